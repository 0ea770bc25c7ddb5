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

from flowrt.base.spec import Spec, as_dtype
from flowrt.base.valueclass import valueclass
from flowrt.kernels.composite.epilogue import EpilogueStep
from flowrt.kernels.fusion.chains import cut_chains
from flowrt.kernels.fusion.coordinates import apply_coordinates, by_coordinates
from flowrt.kernels.fusion.padded import apply_padded, padded
from flowrt.kernels.fusion.pieces import Assembly, apart
from flowrt.kernels.fusion.program import (
    PAD,
    Member,
    Plain,
    Whole,
    axes_of,
    fused_kernel,
    is_reduction,
    is_view,
    kept_shape,
    source_view,
    specs_of,
    views_of,
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
    members, results = attrs["members"], attrs["results"]
    specs, first = specs_of(inputs, members), len(inputs)
    parts = Assembly(first, len(outputs))
    framed = padded(first, specs, members, results)
    if framed is not None:
        return apply_padded(parts, framed, device)
    thin = by_coordinates(first, specs, members, results)
    if thin is not None:
        return apply_coordinates(parts, thin, device)
    again = reductions_read_again(members, first)
    pieces = [] if again else _pieces(first, specs, members, results)
    if pieces:
        return apart(parts, specs, members, results, pieces, device)
    whole = (whole_rows if again else _whole)(first, specs, members, results, device)
    if whole is not None and (background.is_waited_for() or all(map(is_compiled, _with_ends(whole.step.variant())))):
        return _in_one(parts, whole, specs, members, device)
    orders = () if whole is None else _orders(whole.step)
    if again and not orders:
        return apart(parts, specs, members, results, in_stages(specs, members, results, first), device)
    members_apart = apart(parts, specs, members, results, [[n] for n in range(first, len(specs))], device)
    saved = _saved_bytes(first, specs, members)
    if saved < WORTH_BYTES:
        return replace(members_apart, wishes=tuple((order, saved) for order in orders))
    return replace(members_apart, orders=orders)


@kernel("fused", "cuda", form=Form.PROGRAM, takes_bits=True)
def apply_fused_on_cuda(
    inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str
) -> Application:
    """The same program where every thread has registers of its own: what is of one shape between reductions is a
    launch."""
    members, results = attrs["members"], attrs["results"]
    specs, first = specs_of(inputs, members), len(inputs)
    parts = Assembly(first, len(outputs))
    ops = [op for op, *_ in members]
    whole = None if any(map(is_reduction, ops)) or PAD in ops else _whole(first, specs, members, results, device)
    if whole is not None:
        return _in_one(parts, whole, specs, members, device)
    pieces = [] if PAD in ops else _between_reductions(first, specs, members, results)
    alone = [[n] for n in range(first, len(specs))]
    return apart(parts, specs, members, results, pieces if len(pieces) > 1 else alone, device)


def _between_reductions(
    first: int, specs: Sequence[Spec], members: Sequence[Member], results: Sequence[int]
) -> list[list[int]]:
    """The members, by number, in pieces one after another: stages without their reductions, then each of these."""
    found: list[list[int]] = []
    read_in_place = views_of(members, first).difference(results)
    for piece in in_stages(specs, members, results, first):
        reductions = [n for n in piece if is_reduction(members[n - first][0])]
        taken = {members[n - first][1][0] for n in reductions}
        rest = [n for n in piece if n not in reductions]
        if not read_in_place.issuperset(rest):
            found.append(rest)
        found += [[n] for n in rest if n in taken and n in read_in_place]
        found += [[n] for n in reductions]
    return found


def _saved_bytes(inputs: int, specs: Sequence[Spec], members: Sequence[Member]) -> int:
    """What the members, one by one, read of what others have just written."""
    return sum(specs[n].nbytes for _, operands, _, _ in members for n in operands if n >= inputs)


# ── one launch ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _whole(
    first: int, specs: Sequence[Spec], members: Sequence[Member], results: Sequence[int], device: str
) -> Whole | None:
    """The program in one launch; None where its members' shapes differ."""
    ops = dict(enumerate((member[0] for member in members), first))
    entrywise = [n for n in ops if not (is_reduction(ops[n]) or is_view(ops[n]))]
    reduced = [n for n in results if n in ops and is_reduction(ops[n])]
    shape = _common_shape(first, specs, members, results)
    if not entrywise or shape is None or len(set(reduced)) < len(reduced):
        return None
    read = {n for at in (*entrywise, *reduced) for n in members[at - first][1]}.union(results)
    sources = [n for n in range(len(specs)) if n in read and (n < first or is_view(ops[n]))]
    plain, number = _plain([(n, members[n - first]) for n in entrywise], sources)
    reductions = tuple((number[members[n - first][1][0]], ops[n]) for n in reduced)
    dense = [(at, n) for at, n in enumerate(results, first) if n not in reduced]
    made = fused_kernel(
        tuple(specs[n].dtype.name for n in sources), plain, tuple(number[n] for _, n in dense), device, reductions
    )
    free = first + len(results) + len(reduced)
    seen = [
        _OperandSource(
            n if n < first else members[n - first][1][0],
            specs[n].dtype,
            source_view(specs, members, first, n).broadcast_to(shape),
        )
        for n in sources
    ]
    seen, before = _in_order(seen, free, are_costly(ops.values()), device)
    views = [*(source.view for source in seen), *[View.dense(shape)] * len(dense)]
    dtypes = [specs[n].dtype for n in (*sources, *(n for _, n in dense))]
    call = Call(tuple(views))
    if reduced:
        kept = [kept_shape(shape, axes_of(Spec("float64", shape), members[n - first][3])) for n in reduced]
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


def _common_shape(
    first: int, specs: Sequence[Spec], members: Sequence[Member], results: Sequence[int]
) -> tuple[int, ...] | None:
    """The one shape of what is computed entry by entry, answered, or reduced; None where there are several."""
    ops = dict(enumerate((member[0] for member in members), first))
    entrywise = [n for n in ops if not (is_reduction(ops[n]) or (is_view(ops[n]) and n not in results))]
    taken = [members[n - first][1][0] for n in results if n in ops and is_reduction(ops[n])]
    shapes = {specs[n].concrete for n in (*entrywise, *taken)}
    return shapes.pop() if len(shapes) == 1 else None


def _pieces(first: int, specs: Sequence[Spec], members: Sequence[Member], results: Sequence[int]) -> list[list[int]]:
    """The members, by number, in pieces that are better computed one after another; nothing where one launch is."""
    if _common_shape(first, specs, members, results) is None:
        return []
    short = _short_reductions(first, specs, members, results)
    if short:
        return [[n for n in range(first, len(specs)) if n not in short], *([n] for n in short)]
    return cut_chains(specs, members, results, first)


def _short_reductions(
    first: int, specs: Sequence[Spec], members: Sequence[Member], results: Sequence[int]
) -> tuple[int, ...]:
    """The reductions, by number, for which a program's rows would be cut too short; those of columns go side by
    side."""
    shape = _common_shape(first, specs, members, results)
    reduced = [n for n in dict.fromkeys(results) if n >= first and is_reduction(members[n - first][0])]
    if shape is None or len(members) == len(reduced):
        return ()
    kept = [kept_shape(shape, axes_of(Spec("bool", shape), members[n - first][3])) for n in reduced]
    if not kept or side_by_side(shape, kept, ()) > 1:
        return ()
    views, costly = [View.dense(left).broadcast_to(shape) for left in kept], are_costly(member[0] for member in members)
    taken = [specs[members[n - first][1][0]].dtype.name for n in reduced]
    return tuple(
        n
        for n, view, dtype in zip(reduced, views, taken, strict=True)
        if needs_launch(view, members[n - first][0], dtype, costly)
    )


def _plain(entrywise: Sequence[tuple[int, Member]], sources: Sequence[int]) -> tuple[Plain, dict[int, int]]:
    """The members of an expression of ``sources``, and the number that each value of the program has in it."""
    number = {n: at for at, n in enumerate(sources)}
    plain: list[tuple[str, tuple[int, ...], str]] = []
    for n, (op, operands, dtype, _) in entrywise:
        taken = [number[i] for i in operands]
        if op == "add_n":
            total, *rest = taken
            for value in rest:
                plain.append(("add", (total, value), dtype))
                total = len(sources) + len(plain) - 1
            number[n] = total
        else:
            plain.append((op, tuple(taken), dtype))
            number[n] = len(sources) + len(plain) - 1
    return tuple(plain), number


def _in_one(
    parts: Assembly, whole: Whole, specs: Sequence[Spec], members: Sequence[Member], device: str
) -> Application:
    """The step, and what reduces the totals of its units."""
    expression = whole.step.kernel.expression
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
        parts.add(_together(members[n - parts.inputs][0], spec, result, device), [source, at])
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
