"""Fused programs: one launch where its object exists, else the members' launches one after another.

Law: what is compiled depends on the members, the dtypes and along which operands rows repeat, never on sizes. A program
that is not compiled yet is ordered, not waited for. Members whose shapes differ in a step are computed one by one.

What goes over a product's entries becomes part of its launch where its units make whole rows: to call it for parts of
rows would cost more than the caches give. A product that others want, too (a gradient, say), is the first result, else
it lies where the last result will.

Parts and repetitions of tensors are read where they lie, unless they would cut a loop's rows short (`short_rows`); what
has several costly ops is computed in pieces (`chains`). What a program computes may be reduced (summed, or the largest
taken) in stretches of elements, whose number follows from the sizes alone; a second launch reduces what they came to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flowrt.base.spec import NAMES, Spec, as_dtype
from flowrt.base.valueclass import valueclass
from flowrt.kernels.composite.epilogue import EpilogueStep
from flowrt.kernels.fusion.chains import cut_chains
from flowrt.kernels.fusion.coordinates import apply_coordinates, by_coordinates
from flowrt.kernels.fusion.padded import apply_padded, padded
from flowrt.kernels.fusion.pieces import Assembly, apart
from flowrt.kernels.fusion.program import (
    PAD,
    FusedProgram,
    Whole,
    fused_kernel,
    is_view,
    plain_members,
    program_of,
    source_view,
)
from flowrt.kernels.fusion.rowwise import in_stages, kept_entries, reductions_read_again, whole_rows
from flowrt.kernels.fusion.short_rows import are_costly, needs_copy, needs_launch
from flowrt.kernels.fusion.stretches import in_stretches, side_by_side, totals_for_each
from flowrt.kernels.language.bits import on_bits
from flowrt.kernels.language.table import Call, Form, View, kernel, product_flops
from flowrt.kernels.language.variants import Variant, is_compiled, symbol_of
from flowrt.kernels.launch import Application, LaunchStep, apply_kernel, copy_step
from flowrt.kernels.store import background
from flowrt.kernels.store.background import CompileOrder

WORTH_BYTES = 4096
"""Less than this stays in the nearest cache, and a launch costs 10 ns: a compilation would not pay, but where there are
many of the kind, as of an optimiser's updates of many small variables."""


@kernel("fused", form=Form.PROGRAM, takes_bits=True)
def apply_fused(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str) -> Application:
    """The application of the program ``attrs["members"]``, which answers the values ``attrs["results"]``."""
    program = program_of(inputs, attrs["members"], attrs["results"])
    parts = Assembly(len(inputs), len(outputs))
    framed = padded(program)
    if framed is not None:
        return apply_padded(parts, framed, device)
    thin = by_coordinates(program)
    if thin is not None:
        return apply_coordinates(parts, thin, device)
    again = reductions_read_again(program)
    pieces = [] if again else _pieces(program)
    if pieces:
        return apart(parts, program, pieces, device)
    whole = (whole_rows if again else _whole)(program, device)
    if whole is not None and (background.is_waited_for() or all(map(is_compiled, _with_ends(whole.step.variant())))):
        return _in_one(parts, whole, program, device)
    orders = () if whole is None else _orders(whole.step)
    if again and not orders:
        return apart(parts, program, in_stages(program), device)
    members_apart = apart(parts, program, [[n] for n in program.made], device)
    saved = _saved_bytes(program)
    if saved < WORTH_BYTES:
        return replace(members_apart, wishes=tuple((order, saved) for order in orders))
    return replace(members_apart, orders=orders)


@kernel("fused", "cuda", form=Form.PROGRAM, takes_bits=True)
def apply_fused_on_cuda(
    inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str
) -> Application:
    """The same program where every thread has registers of its own: what is of one shape between reductions is a
    launch."""
    program = program_of(inputs, attrs["members"], attrs["results"])
    parts, pads = Assembly(len(inputs), len(outputs)), PAD in program.ops
    whole = None if pads or any(map(program.reduces, program.made)) else _whole(program, device)
    if whole is not None:
        return _in_one(parts, whole, program, device)
    pieces = [] if pads else _between_reductions(program)
    return apart(parts, program, pieces if len(pieces) > 1 else [[n] for n in program.made], device)


def _between_reductions(program: FusedProgram) -> list[list[int]]:
    """The members, by number, in pieces one after another: stages without their reductions, then each of these."""
    found: list[list[int]] = []
    read_in_place = program.views.difference(program.results)
    for piece in in_stages(program):
        reductions = [n for n in piece if program.reduces(n)]
        taken = {program.taken(n)[0] for n in reductions}
        rest = [n for n in piece if n not in reductions]
        if not read_in_place.issuperset(rest):
            found.append(rest)
        found += [[n] for n in rest if n in taken and n in read_in_place]
        found += [[n] for n in reductions]
    return found


def _saved_bytes(program: FusedProgram) -> int:
    """What the members, one by one, read of what others have just written."""
    return sum(program.specs[n].nbytes for at in program.made for n in program.taken(at) if n >= program.first)


# ── one launch ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _whole(program: FusedProgram, device: str) -> Whole | None:
    """The program in one launch; None where its members' shapes differ."""
    first, specs, results = program.first, program.specs, program.results
    entrywise = [n for n in program.made if not (program.reduces(n) or is_view(program.op(n)))]
    reduced = [n for n in results if program.reduces(n)]
    shape = _common_shape(program)
    if not entrywise or shape is None or len(set(reduced)) < len(reduced):
        return None
    read = {n for at in (*entrywise, *reduced) for n in program.taken(at)}.union(results)
    sources = [n for n in range(len(specs)) if n in read and (n < first or is_view(program.op(n)))]
    made_of = [(n, program.op(n), program.taken(n), NAMES[specs[n].dtype]) for n in entrywise]
    plain, number = plain_members(made_of, sources)
    reductions = tuple((number[program.taken(n)[0]], program.op(n)) for n in reduced)
    dense = [(at, n) for at, n in enumerate(results, first) if n not in reduced]
    made = fused_kernel(
        tuple(NAMES[specs[n].dtype] for n in sources), plain, tuple(number[n] for _, n in dense), device, reductions
    )
    free = first + len(results) + len(reduced)
    seen = [
        _OperandSource(
            n if n < first else program.taken(n)[0], specs[n].dtype, source_view(program, n).broadcast_to(shape)
        )
        for n in sources
    ]
    seen, before = _in_order(seen, free, are_costly(program.ops), device)
    views = [*(source.view for source in seen), *[View.dense(shape)] * len(dense)]
    dtypes = [specs[n].dtype for n in (*sources, *(n for _, n in dense))]
    call = Call(tuple(views))
    if reduced:
        kept = [program.kept(n, shape) for n in reduced]
        call = in_stretches(shape, kept, views)
        assert made.expression is not None
        dtypes += made.expression.held
    operands = (*(source.operand for source in seen), *(at for at, _ in dense), *range(first + len(results), free))
    step = LaunchStep(made, operands, tuple(dtypes), call, len(sources))
    ends = tuple((at, n) for at, n in enumerate(results, first) if n in reduced)
    copied = tuple(Spec(source.dtype, shape) for source in seen if source.operand >= free)
    return Whole(step, ends, (), tuple(before), copied) if set(step.variant().ranks) <= {0, 1} else None


@valueclass
class _OperandSource:
    """The operand that a program's launch reads, its dtype, and how the launch sees it."""

    operand: int
    dtype: np.dtype[Any]
    view: View


def _in_order(
    seen: Sequence[_OperandSource], free: int, costly: bool, device: str
) -> tuple[list[_OperandSource], list[LaunchStep]]:
    """The sources, those that would cut rows short as copies, in operands from ``free`` on; and what copies them."""
    found, copies = list(seen), list[LaunchStep]()
    for at, source in enumerate(seen):
        if device == "cpu" and needs_copy(source.view, source.dtype.itemsize, costly):
            dense = View.dense(source.view.shape)
            found[at] = _OperandSource(free + len(copies), source.dtype, dense)
            copies.append(copy_step(source.operand, found[at].operand, source.dtype, source.view, dense, device))
    return found, copies


def _common_shape(program: FusedProgram) -> tuple[int, ...] | None:
    """The one shape of what is computed entry by entry, answered, or reduced; None where there are several."""
    made = [n for n in program.made if not program.reduces(n)]
    entrywise = [n for n in made if n in program.results or not is_view(program.op(n))]
    taken = [program.taken(n)[0] for n in program.results if program.reduces(n)]
    shapes = {program.specs[n].concrete for n in (*entrywise, *taken)}
    return shapes.pop() if len(shapes) == 1 else None


def _pieces(program: FusedProgram) -> list[list[int]]:
    """The members, by number, in pieces that are better computed one after another; nothing where one launch is."""
    shape = _common_shape(program)
    if shape is None:
        return []
    short = _short_reductions(program, shape)
    if short:
        return [[n for n in program.made if n not in short], *([n] for n in short)]
    return cut_chains(program)


def _short_reductions(program: FusedProgram, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The reductions, by number, for which rows of that shape would be cut too short; those of columns go side by
    side."""
    reduced = [n for n in dict.fromkeys(program.results) if program.reduces(n)]
    kept = [program.kept(n, shape) for n in reduced]
    if not kept or len(program.members) == len(reduced) or side_by_side(shape, kept, ()) > 1:
        return ()
    views, costly = [View.dense(left).broadcast_to(shape) for left in kept], are_costly(program.ops)
    taken = [NAMES[program.specs[program.taken(n)[0]].dtype] for n in reduced]
    return tuple(
        n
        for n, view, dtype in zip(reduced, views, taken, strict=True)
        if needs_launch(view, program.op(n), dtype, costly)
    )


def _in_one(parts: Assembly, whole: Whole, program: FusedProgram, device: str) -> Application:
    """The step, and what reduces the totals of its units."""
    expression, specs = whole.step.kernel.expression, program.specs
    assert expression is not None
    parts.begin(whole)
    results = [specs[n].with_shape((specs[n].size,)) for _, n in whole.ends]
    totals = [
        Spec(held, (totals_for_each(whole.step.call, number, result.size), result.size))
        for number, (result, held) in enumerate(zip(results, expression.held, strict=True))
    ]
    sources = [parts.take(spec) for spec in totals]
    for spec in whole.copied:
        parts.take(spec)
    for (at, n), spec, result, source in zip(whole.ends, totals, results, sources, strict=True):
        parts.add(_together(program.op(n), spec, result, device), [source, at])
    return parts.application()


def _together(op: str, totals: Spec, result: Spec, device: str = "cpu") -> Application:
    """What makes one result of the totals of stretches; few and of any size, so each entry of it is a unit of work."""
    by = "sum" if op == "mean" else op
    return apply_kernel(f"{by}_at_once", [totals], [result], {"axis": 0, "keepdims": False}, device)


# ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _orders(whole: LaunchStep) -> tuple[CompileOrder, ...]:
    variant, expression = whole.variant(), whole.kernel.expression
    symbol = symbol_of(variant)
    if background.was_tried(symbol) or expression is None:
        return ()
    inputs = [dtype.name for dtype in expression.inputs]
    members = [(member.op, member.operands, member.dtype.name) for member in expression.members]
    what = [inputs, members, expression.results, expression.reductions, variant.ranks, variant.words]
    return (CompileOrder(symbol, json.dumps(what)),)


def ordered_variants(request: str) -> list[Variant]:
    """The variants that an order asks for, the program's own first."""
    inputs, members, results, reductions, pattern, words = json.loads(request)
    plain = tuple((op, tuple(operands), as_dtype(dtype).name) for op, operands, dtype in members)
    inputs = [as_dtype(dtype).name for dtype in inputs]  # of which NumPy may not know bfloat16 yet
    made = fused_kernel(tuple(inputs), plain, tuple(results), "cpu", tuple((n, op) for n, op in reductions))
    assert made.expression is not None
    dtypes = on_bits(made.expression).dtypes
    kept = kept_entries(made.expression, pattern) if made.form is Form.ROWS else ()
    operands = (*dtypes[: len(inputs)], *(dtypes[n] for n in results), *made.expression.held)
    operands += tuple(dtypes[n] for n in kept)
    operands += (np.dtype(np.float32),) * (len(pattern) - len(operands))  # narrow totals
    return _with_ends(Variant(made, operands, tuple(pattern), words))


def _with_ends(variant: Variant) -> list[Variant]:
    """A program's variant, and those that reduce its totals."""
    expression, found = variant.kernel.expression, [variant]
    assert expression is not None
    for (n, op), held in zip(expression.reductions, expression.held, strict=True):
        value = expression.dtypes[n]
        result = value if value.kind == "f" and op not in ("any", "all") else held
        steps = _together(op, Spec(held, (1, 1)), Spec(result, (1,))).steps
        found += [called for step in steps for called in step.variants()]
    return found


# ── products and what goes over their entries ────────────────────────────────────────────────────────────────────────


@kernel("with_epilogue", form=Form.PROGRAM, takes_bits=True, flops=product_flops)
def apply_with_epilogue(
    inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str
) -> Application:
    """The application of ``attrs["epilogue"]`` to what ``attrs["product"]`` makes of the first inputs."""
    (name, count, how), (other, how_other) = attrs["product"], attrs["epilogue"]
    taken, kept = attrs["taken"], int(attrs["kept"])
    made = Spec(inputs[0].dtype, outputs[0].concrete)
    product = apply_kernel(name, inputs[:count], [made], dict(how), device)
    rest = apply_kernel(other, [inputs[n] if n >= 0 else made for n in taken], outputs[kept:], dict(how_other), device)
    products = [i for i, n in enumerate(taken) if n < 0]
    near = device == "cpu" and _goes_over_entries(rest, products, len(taken))
    parts = Assembly(len(inputs), len(outputs))
    between = len(inputs) if kept else _place(parts, made, outputs, near)
    parts.add(product, [*range(count), between])
    results = range(len(inputs) + kept, len(inputs) + len(outputs))
    parts.add(rest, [*(n if n >= 0 else between for n in taken), *results])
    return _joined(parts.application()) if near else parts.application()


def _place(parts: Assembly, made: Spec, outputs: Sequence[Spec], near: bool) -> int:
    """Where a product lies that nobody else wants: where a result will, if that is written entry by entry."""
    alike = [i for i, spec in enumerate(outputs) if spec.dtype == made.dtype]
    return parts.inputs + alike[-1] if near and alike else parts.take(made)


def _goes_over_entries(rest: Application, products: Sequence[int], inputs: int) -> bool:
    """Whether one launch computes it, going over the products' and the results' entries in the order of memory."""
    step = rest.steps[0]
    if len(rest.steps) > 1 or not isinstance(step, LaunchStep) or step.kernel.form is not Form.SCALARS:
        return False
    if step.kernel.expression is not None and step.kernel.expression.reductions:
        return False
    whole = [view for n, view in zip(step.operands, step.call.views, strict=True) if n in products or n >= inputs]
    return all(view.contiguous and view.offset == 0 for view in whole)


def _joined(application: Application) -> Application:
    """The last two steps as one, where the units of the one make whole rows."""
    *steps, product, epilogue = application.steps
    if not isinstance(product, LaunchStep) or not isinstance(epilogue, LaunchStep) or product.call.rows is None:
        return application
    return replace(application, steps=(*steps, EpilogueStep(product, epilogue)))


kernel("with_epilogue", "cuda", form=Form.PROGRAM, takes_bits=True)(apply_with_epilogue)
