"""Recurrent layers: how the time steps of one are divided among launches, and their work among threads.

Law: pure; sizes in, launches out. What does not wait for the step before comes ahead: the weights are packed into
column panels once for all, the inputs of all steps are multiplied. Then threads share either the batch, each going
through all steps for some of its rows, or the units, step by step: in a loop inside the launch, whose iterations all
share. In an iteration each reads only its part of the weights, which stays in its cache, and they meet once. So an
iteration backwards begins with the product that ends the step after it; the first and the last one, with half of that,
are launches of their own. Either way is the same code, told by words, and computes the same bits (`recurrent_steps`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.composite.nested import Carried, Inner, NestedStep, ScannedRows
from flowrt.kernels.elementary.exponential import sigmoid32, sigmoid64, tanh32, tanh64
from flowrt.kernels.language.table import Call, Form, RegisteredKernel, View, kernel, natural
from flowrt.kernels.language.variants import Variant
from flowrt.kernels.launch import Application, LaunchStep, Operand
from flowrt.kernels.ops.nn import recurrent_steps as steps_of
from flowrt.kernels.ops.nn.recurrent_steps import ASKED, BLOCK, GATES, GROUP, KEPT
from flowrt.kernels.tiles.micro import Tile, native, tiles_of
from flowrt.kernels.tiles.panels import stage, table_size

NEAR, TOGETHER = 3 << 16, (3, 8)  # bytes of rows that meet a panel while they are near; how few and how many blocks
FEW_WEIGHTS = 3 << 17  # bytes of weights that stay in a second cache
BLOCKS = (2, 8)  # how many blocks of rows are enough to share few weights, and many
PRODUCT = "table taps tile places"  # what products need of a thread's own memory
OWN = f"fresh asked {PRODUCT}"  # all of it
NO_ROWS: Mapping[str, int] = MappingProxyType({})


def near_blocks(blocks: int, depth: int, size: int) -> int:
    """How many of ``blocks`` of rows of ``depth`` numbers meet each panel: as many as stay in a cache."""
    fewest, most = TOGETHER
    fits = min(max(NEAR // max(BLOCK * depth * size, 1), fewest), most)
    return -(-blocks // max(-(-blocks // fits), 1)) or 1


def are_shared_by_rows(steps: int, batch: int, units: int, size: int) -> bool:
    """Whether threads share the batch, each going through all steps with all weights, and not the units of a step.

    They need no meeting then, but each reads all weights in every step: from a cache that holds them, or for so many
    rows that it does not matter.
    """
    few, many = BLOCKS
    weights = GATES * units * units * size
    return steps == 0 or -(-batch // BLOCK) >= (few if weights <= FEW_WEIGHTS else many)


KERNELS = {
    function.__name__: RegisteredKernel(function.__name__, "cpu", function, natural)
    for function in (
        steps_of.lstm_weights,
        steps_of.lstm_inputs,
        steps_of.lstm_turns,
        steps_of.lstm_weights_grad,
        steps_of.lstm_turns_grad,
    )
}
"""What launches run, by name."""


@cache
def elementwise(turns: str, dtype: np.dtype[Any]) -> Variant:
    """The kernel that those of ``turns`` call."""
    if turns == "lstm_turns":
        functions = (sigmoid32, tanh32) if dtype == np.float32 else (sigmoid64, tanh64)
        function, count = steps_of.gating(*functions), 3
    else:
        function, count = steps_of.lstm_gates_grad, 4
    return Variant(RegisteredKernel(function.__name__, "cpu", function, natural), (dtype,) * count, (2,) * count)


@cache
def _tiles(name: str, dtype: np.dtype[Any]) -> tuple[int | Tile | Variant, ...]:
    """What a kernel calls."""
    own = (elementwise(name, dtype),) if name.startswith("lstm_turns") else ()
    return (*tiles_of(native(), dtype), *own)


class _NamedOperands:
    """An application's operands as they are named: those given, then scratch, what each thread has for itself, and the
    slots that a loop sets."""

    def __init__(self, dtype: np.dtype[Any], given: Mapping[str, tuple[int, ...]]) -> None:
        self.dtype = dtype
        self._specs = {name: Spec(dtype, shape) for name, shape in given.items()}
        self._given, self._scratch, self._local = len(given), 0, 0

    def scratch(self, **shapes: tuple[int, ...]) -> None:
        """Memory that all threads share, also for how many turns a loop took."""
        self._specs |= {name: Spec(self.dtype, shape) for name, shape in shapes.items()}
        self._specs["done"] = Spec("int64", ())
        self._scratch = len(shapes) + 1

    def local(self, fresh: int) -> None:
        """Each thread's room for what it makes of some sums, for an elementwise kernel's block, and for products."""
        table, taps = Spec("int64", (table_size(native(), BLOCK),)), Spec("int64", (2,))
        own = (Spec(self.dtype, (fresh,)), Spec("int64", (ASKED,)), table, taps, *stage(native(), self.dtype))
        self._specs |= dict(zip(OWN.split(), own, strict=True))
        self._local = len(own)

    def slots(self, **shapes: tuple[int, ...]) -> None:
        """What a loop points at from turn to turn."""
        self._specs |= {name: Spec(self.dtype, shape) for name, shape in shapes.items()}
        self._specs |= dict.fromkeys(("crew", "trace", "turn"), Spec("int64", ()))

    def numbers(self, names: str) -> tuple[int, ...]:
        """Where operands stand; no more of them may be named after this."""
        order = list(self._specs)
        return tuple(order.index(name) for name in names.split())

    def step(
        self,
        name: str,
        reads: str,
        writes: str,
        units: int,
        words: Sequence[int] = (),
        rows: Mapping[str, int] = NO_ROWS,
    ) -> LaunchStep:
        """A launch of a kernel, of some operands only one of their ``rows``."""
        names = f"{reads} {writes}".split()
        views = tuple(self._view(each, rows.get(each)) for each in names)
        dtypes = tuple(self._specs[each].dtype for each in names)
        call = Call(views, tuple(words), units, tiles=_tiles(name, self.dtype))
        return LaunchStep(KERNELS[name], self.numbers(f"{reads} {writes}"), dtypes, call, len(reads.split()))

    def _view(self, name: str, row: int | None) -> View:
        """An operand, or its row, as a vector: kernels know sizes from their words."""
        spec = self._specs[name]
        if row is None:
            return View.dense((spec.size,))
        size = View.dense(spec.concrete[1:]).size
        return View((size,), (1,), row * size)

    def loop(self, turn: LaunchStep, reads: str, writes: str, rows: int, **facts: Any) -> NestedStep:
        """Turns of one launch, for each of so many rows."""
        specs = list(self._specs.values())
        sizes = tuple(specs[n].nbytes for n in turn.operands)
        places = tuple(map(Operand, turn.operands))
        inner = Inner(replace(turn, operands=tuple(range(len(places)))), places, sizes)
        operands = self.numbers(f"{reads} {writes} done")
        done, crew, trace, number = self.numbers("done crew trace turn")
        local = self.numbers(OWN)
        return NestedStep(
            "loop",
            operands,
            len(reads.split()),
            local,
            ((), (inner,)),
            (-1, 0),
            rows=rows,
            done=done,
            crew=crew,
            trace=trace,
            iteration=number,
            **facts,
        )

    def rows(self, present: str, whole: str, before: int = 0) -> ScannedRows:
        """The rows of an operand that a slot points at; the first comes after so many others."""
        at, of = self.numbers(f"{present} {whole}")
        nbytes = self._specs[present].nbytes
        return ScannedRows(at, of, nbytes, before * nbytes)

    def application(self, steps: Sequence[Any]) -> Application:
        """Of these launches, those that have something to do."""
        specs, local = list(self._specs.values()), self._given + self._scratch
        slots = local + self._local
        needed = tuple(step for step in steps if step.units)
        return Application(needed, tuple(specs[self._given : local]), tuple(specs[local:slots]), len(specs) - slots)


def _flops(specs: Sequence[Spec]) -> float:
    """Every entry that is kept of a gate is a dot product with x and one with h."""
    x, h, kept = specs[0], specs[1], specs[-1]
    return 2 * kept.size * 4 / 6 * (x.concrete[2] + h.concrete[1]) if kept.size else 0


def _flops_back(specs: Sequence[Spec]) -> float:
    return 2 * specs[0].size * specs[3].concrete[1]


@kernel("lstm_steps", form=Form.PROGRAM, flops=_flops)
def apply_lstm_steps(
    inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str
) -> Application:
    """The launches of a layer."""
    x, h, _, w_x, w_h, bias = (spec.concrete for spec in inputs)
    (steps, batch, width), units, dtype = x, h[1], inputs[0].dtype
    size, wide = dtype.itemsize, native().columns(dtype)
    columns, blocks = -(-units // wide), -(-batch // BLOCK)
    padded, groups = columns * wide, -(-columns // GROUP)
    ahead, near = near_blocks(steps * blocks, width, size), BLOCK * near_blocks(blocks, units, size)
    state, every, row = (batch, units), (steps, batch, units), (KEPT * batch * units,)
    operands = _NamedOperands(
        dtype,
        {"x": x, "h": h, "c": h, "w_x": w_x, "w_h": w_h, "bias": bias}
        | {"y": every, "last_h": state, "last_c": state, "before": every, "kept": (steps, *row)},
    )
    panels = {"from_x": (GATES, padded * width), "from_h": (GATES, padded * units), "edges": (GATES, padded)}
    operands.scratch(**panels, cells=(batch * units,), spare=state)
    operands.local(BLOCK * wide)
    by_rows = are_shared_by_rows(steps, batch, units, size)
    if not by_rows:
        operands.slots(h_now=state, h_next=state, y_row=state, before_row=state, kept_row=row)
    reads, writes = "c w_x w_h bias", "from_x from_h edges cells"
    weights = operands.step("lstm_weights", reads, writes, GATES * groups, (batch, width, units, groups))
    reads, writes, shares = "x from_x edges", f"kept {PRODUCT}", -(-steps * blocks // ahead)
    sums = operands.step("lstm_inputs", reads, writes, shares, (steps, batch, width, units, ahead))
    if by_rows:
        writes = f"cells last_h last_c y before kept {OWN}"
        rows = operands.step("lstm_turns", "h c from_h", writes, blocks, (steps, batch, units, near, 1))
        return operands.application([weights, sums, rows])
    writes = f"cells h_next last_c y_row before_row kept_row {OWN}"
    turn = operands.step("lstm_turns", "h_now c from_h", writes, columns, (1, batch, units, near, 0))
    now, following, first, out, spare = operands.numbers("h_now h_next h last_h spare")
    carried = Carried(now, following, first, out, spare, Spec(dtype, state).nbytes, False)
    stacked = tuple(operands.rows(f"{name}_row", name) for name in ("y", "before", "kept"))
    writes = "cells last_h last_c y before kept spare"
    loop = operands.loop(turn, "h c from_h", writes, steps, carried=(carried,), stacked=stacked)
    return operands.application([weights, sums, loop])


@kernel("lstm_steps_grad", form=Form.PROGRAM, flops=_flops_back)
def apply_lstm_steps_grad(
    inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str
) -> Application:
    """The launches of a layer's gradient."""
    (steps, batch, units), w_h, dtype = inputs[0].concrete, inputs[3].concrete, inputs[0].dtype
    wide = native().columns(dtype)
    columns, blocks = -(-units // wide), -(-batch // BLOCK)
    near = BLOCK * near_blocks(blocks, units, dtype.itemsize)
    state, kept, sums = (batch, units), (KEPT * batch * units,), (batch, GATES * units)
    operands = _NamedOperands(
        dtype,
        {"dy": (steps, *state), "given_h": state, "given_c": state, "w_h": w_h, "kept": (steps, *kept)}
        | {"ds": (steps, *sums), "dh": state, "dc": state},
    )
    operands.scratch(panels=(columns * wide * GATES * units,), dhs=(batch * units,), dcs=(batch * units,))
    operands.local(5 * BLOCK * wide)
    by_rows = are_shared_by_rows(steps, batch, units, dtype.itemsize)
    if not by_rows:
        operands.slots(later=sums, dy_row=state, kept_row=kept, ds_row=sums)
    packed = operands.step("lstm_weights_grad", "w_h", "panels", columns, (units,))

    def turns(row: str, later: str, first: int, beyond: int, rows: Mapping[str, int] = NO_ROWS) -> LaunchStep:
        reads = f"{later} panels given_h given_c dy{row} kept{row}"
        writes = f"dhs dcs ds{row} dh dc {OWN}"
        words = steps, batch, units, near, int(by_rows), first, beyond
        return operands.step("lstm_turns_grad", reads, writes, blocks if by_rows else columns, words, rows)

    if by_rows:
        return operands.application([packed, turns("", "ds", 0, steps + 1)])
    first = turns("", "ds", 0, 1, dict.fromkeys(("dy", "kept", "ds"), steps - 1))
    last = turns("", "ds", steps, steps + 1, dict.fromkeys(("dy", "kept", "ds"), 0))
    loop = operands.loop(
        turns("_row", "later", 1, 2),
        "panels given_h given_c dy kept",
        "dhs dcs ds dh dc",
        steps - 1,
        reverse=True,
        scanned=(operands.rows("later", "ds", 1), operands.rows("dy_row", "dy"), operands.rows("kept_row", "kept")),
        stacked=(operands.rows("ds_row", "ds"),),
    )
    return operands.application([packed, first, loop, last])
