"""Fused programs with a padding amid them, as stencils have: one launch goes over what is inside the frame.

Law: pure. What the members ahead of the padding make is an inside, and those behind it go over all. Inside the frame
both are one program, whose launch writes a window of each result; the frame's strips are what the members behind make
of the padding's value, one by one, since a strip is small. So no padded tensor is made, and no inside.

A program that is not compiled yet, and one whose frame is large, are computed as they are written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.spec import Spec
from flowrt.base.valueclass import valueclass
from flowrt.kernels.fusion.pieces import Assembly, apart
from flowrt.kernels.fusion.program import PAD, PART, FusedProgram, Member, program_of
from flowrt.kernels.language.table import Form, View
from flowrt.kernels.launch import Application, LaunchStep, apply_kernel, copy_step

if TYPE_CHECKING:
    from flowrt.kernels.launch import Launchable

SMALL_FRAME = 8  # a frame is at most such a part of everything

Box: TypeAlias = "tuple[tuple[int, int], ...]"
"""For each axis where a part begins and ends."""


@valueclass
class Padded:
    """A program around the padding that value ``at`` is, and of which shape its results are."""

    program: FusedProgram
    at: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.program.specs[self.at].concrete

    @property
    def padding(self) -> Mapping[str, Any]:
        return self.program.attrs(self.at)

    @property
    def inside(self) -> Box:
        taken = self.program.specs[self.program.taken(self.at)[0]].concrete
        pairs = zip(self.padding["paddings"], taken, strict=True)
        return tuple((before, before + size) for (before, _), size in pairs)

    def strips(self) -> Iterator[Box]:
        """The frame in parts that do not overlap, those of the first axes across all others."""
        for axis, (begin, end) in enumerate(self.inside):
            for span in ((0, begin), (end, self.shape[axis])):
                box = (*self.inside[:axis], span, *((0, size) for size in self.shape[axis + 1 :]))
                if all(start < stop for start, stop in box):
                    yield box


def padded(program: FusedProgram) -> Padded | None:
    """The program as one around a padding; None where it has none."""
    at = next((n for n in program.made if program.op(n) == PAD), None)
    return None if at is None else Padded(program, at)


def apply_padded(parts: Assembly, framed: Padded, device: str) -> Application:
    """The application of a program around a padding."""
    program, first, count = framed.program, framed.program.first, len(framed.program.results)
    inside = _cut(framed, framed.inside)
    attrs = {"members": inside.members, "results": inside.results}
    made = apply_kernel("fused", inside.specs[: inside.first], [inside.specs[n] for n in inside.results], attrs, device)
    at = {first + n: _window(framed, framed.inside) for n in range(count)}
    placed = _placed(made, at) if _frame_is_small(framed) else None
    if placed is None:
        written = apart(parts, program, _as_written(framed), device)
        return replace(written, orders=(*written.orders, *made.orders), wishes=(*written.wishes, *made.wishes))
    parts.add(placed, range(first + count))
    for box in framed.strips():
        _add_strip(parts, framed, box, device)
    return parts.application()


def _frame_is_small(framed: Padded) -> bool:
    inside = math.prod(end - begin for begin, end in framed.inside)
    return inside > 0 and (math.prod(framed.shape) - inside) * SMALL_FRAME <= inside


def _as_written(framed: Padded) -> list[list[int]]:
    """The members ahead of the padding, it, and those behind it."""
    made, at = framed.program.made, framed.at
    return [list(piece) for piece in (range(made.start, at), range(at, at + 1), range(at + 1, made.stop)) if piece]


def _cut(framed: Padded, box: Box, filled: Spec | None = None) -> FusedProgram:
    """The members behind the padding on the part ``box`` of everything, with those ahead of it, or with an input more
    in their place, which is ``filled`` with the padding's value."""
    program, at = framed.program, framed.at
    first, behind = program.first, range(at + 1, len(program.specs))
    inputs = (*program.specs[:first], *(() if filled is None else (filled,)))
    members: list[Member] = []
    number = {n: n for n in range(first)}

    def put(n: int, member: Member) -> None:
        op, operands, dtype, attrs = member
        members.append((op, tuple(number[i] for i in operands), dtype, attrs))
        number[n] = len(inputs) + len(members) - 1

    for n in range(first, at) if filled is None else ():
        put(n, program.members[n - first])
    number[at] = first if filled is not None else number[program.taken(at)[0]]
    for i in sorted({i for n in behind for i in program.taken(n) if i < first}):
        key = _key(program.specs[i], box)
        if key:
            put(i, (PART, (i,), program.specs[i].dtype.name, (("key", key),)))
    for n in behind:
        put(n, program.members[n - first])
    return program_of(inputs, tuple(members), tuple(number[n] for n in program.results))


def _key(spec: Spec, box: Box) -> tuple[tuple[int, int, int], ...]:
    """The index that takes of a tensor, which is repeated along axes of size 1, what lies in ``box``."""
    shape = spec.concrete
    spans = zip(shape, box[len(box) - len(shape) :], strict=True)
    return tuple((0, 1, 1) if size == 1 else (begin, end, 1) for size, (begin, end) in spans)


def _window(framed: Padded, box: Box) -> View:
    return View.dense(framed.shape).window([begin for begin, _ in box], _sizes(box))


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in box)


def _placed(made: Application, windows: Mapping[int, View]) -> Application | None:
    """An application whose outputs are written in ``windows``; None where that takes more than one launch each."""
    writers = Counter(n for step in made.steps for n in step.operands if n in windows)
    if made.orders or made.wishes or any(count != 1 for count in writers.values()):
        return None
    steps = [_written_in(step, windows) for step in made.steps]
    return None if None in steps else replace(made, steps=tuple(step for step in steps if step is not None))


def _written_in(step: Launchable, windows: Mapping[int, View]) -> Launchable | None:
    if windows.keys().isdisjoint(step.operands):
        return step
    if not isinstance(step, LaunchStep) or step.kernel.form is not Form.SCALARS:
        return None
    pairs = list(zip(step.operands, step.call.views, strict=True))
    if any(view != View.dense(windows[n].shape) for n, view in pairs if n in windows):
        return None
    made = replace(step, call=replace(step.call, views=tuple(windows.get(n, view) for n, view in pairs)))
    return made if made.variant() == step.variant() else None  # windows of one column have other strides


def _add_strip(parts: Assembly, framed: Padded, box: Box, device: str) -> None:
    """Compute a strip of the frame, member by member, and put it where it belongs."""
    count, filled = framed.program.first, Spec(framed.program.specs[framed.at].dtype, _sizes(box))
    value = parts.fill(filled, framed.padding["value"])
    part = _cut(framed, box, filled)
    own = apart(Assembly(part.first, len(part.results)), part, [[n] for n in part.made], device)
    made = [parts.take(part.specs[n]) for n in part.results]
    parts.add(own, [*range(count), value, *made])
    for n, (result, place) in enumerate(zip(part.results, made, strict=True)):
        spec = part.specs[result]
        dense = View.dense(spec.concrete)
        parts.steps.append(copy_step(place, count + n, spec.dtype, dense, _window(framed, box), device))
