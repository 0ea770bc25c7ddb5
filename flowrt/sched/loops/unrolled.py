"""Bodies on scalars and small tensors as iterations of scalars: every entry is a value of its own.

Law: pure. What moves entries comes to nothing, since it only says which is where; what computes comes to a member, or
several, for each entry it answers. Branches come to both and a choice for each of their answers; in one that is not
chosen a loop takes no iteration and no lookup fails, and nothing else can. What is read at computed indices stays in
memory (`lookups`). What does not fit raises `Unfit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.spec import Spec, normal_axes
from flowrt.base.traits import Reduction, is_alias, reduction_of
from flowrt.kernels.composite.iteration import LEAST_LANES
from flowrt.kernels.language.table import is_costly
from flowrt.sched.loops.lookups import entries_of, part_of, taken
from flowrt.sched.loops.making import (
    MOST_ENTRIES,
    MOST_MEMBERS,
    Entries,
    LoopInside,
    Making,
    SharedValues,
    TableAddress,
    Unfit,
    Unrolled,
    Value,
    check_entries,
    flat,
    numbered,
)
from flowrt.sched.loops.structured import COND, LOOP, longest_seconds

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode

SECONDS_PER_MEMBER = 2e-9
LEAST_CHEAP_LANES = 16
"""Entries alike of an instruction or two that LLVM does not make vectors of by itself, and hold in registers."""


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Op:
    """An op on entries: those it takes (`_IN_PLACE`: tables, too), and what its outputs are known to be."""

    making: Making
    inputs: Sequence[Any]
    attrs: Mapping[str, Any]
    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None
    guard: int | None
    node: PlanNode


def follow(making: Making, body: Plan, inputs: Sequence[Value], guard: int | None = None) -> list[Entries]:
    """What ``body`` answers for ``inputs``; its loops iteration, and its lookups fail, only where ``guard`` is true."""
    values = list(inputs)
    for node in body.nodes:
        if not node.outputs:
            raise Unfit(f"{node.op}, which has an effect")
        given = [values[v] for v in node.inputs]
        spec = node.outputs[0]
        shape = spec.concrete if spec.known else None
        made = _apply(node.op, _Op(making, given, node.attrs, spec.dtype, shape, guard, node))
        if len(made) != len(node.outputs):
            raise Unfit(f"{node.op} with {len(node.outputs)} outputs")
        values += made
    return [entries_of(making, values[v]) for v in body.fetches]


def _apply(name: str, op: _Op) -> Sequence[Value]:
    if name not in _IN_PLACE and not is_alias(name):
        op = replace(op, inputs=[entries_of(op.making, value) for value in op.inputs])
    several = _SEVERAL.get(name)
    if several is not None:
        return several(op)
    if is_alias(name):
        return [_reshaped(op.inputs[0], _known(op))]
    compute, reduction = _ENTRIES.get(name), reduction_of(name)
    if reduction is not None and reduction.in_rows:
        made: Entries | TableAddress = _reduced(op, reduction)
    else:
        made = _entrywise(name, op.making, op.inputs, op.dtype) if compute is None else compute(op)
    if isinstance(made, TableAddress):
        return [made]
    check_entries(made.size)
    if any(op.making.dtype(int(n)) != op.dtype for n in made.flat) or op.shape not in (None, made.shape):
        raise Unfit(f"{name} to another dtype or shape")
    return [made]


def _reshaped(value: Value, shape: tuple[int, ...]) -> Value:
    return replace(value, shape=shape) if isinstance(value, TableAddress) else value.reshape(shape)


def _known(op: _Op) -> tuple[int, ...]:
    if op.shape is None:
        raise Unfit("a shape that only the step knows")
    return op.shape


def _entrywise(name: str, making: Making, inputs: Sequence[Entries], dtype: np.dtype[Any]) -> Entries:
    """``name`` of every entry, by the rules of broadcasting."""
    alike = np.broadcast_arrays(*inputs)
    if not inputs or not alike[0].size:
        raise Unfit(f"{name} of no entries")  # for which no member would be asked, and so none found to be missing
    check_entries(alike[0].size)
    lanes = [tuple(int(n) for n in a.flat) for a in alike]
    if _are_lanes(making, name, lanes):
        return np.array(making.alike(name, lanes, dtype), np.int64).reshape(alike[0].shape)
    if is_costly(name):
        making.count(0, alike[0].size - 1)
    numbers = [making.member(name, entry, dtype) for entry in zip(*(a.flat for a in alike), strict=True)]
    return np.array(numbers, np.int64).reshape(alike[0].shape)


def _are_lanes(making: Making, name: str, operands: Sequence[tuple[int, ...]]) -> bool:
    """Whether entries alike are worth a loop of vectors: what they take lies together, or is worth bringing there."""
    few = is_costly(name) or any(map(making.are_made_alike, operands))
    if len(operands[0]) < (LEAST_LANES if few else LEAST_CHEAP_LANES):
        return False
    return is_costly(name) or all(map(making.lie_together, operands))


def _branch(op: _Op) -> Sequence[Value]:
    """Both branches, and a choice for each entry of their answers."""
    making, (first, *captured) = op.making, op.inputs
    pred = entries_of(making, first)
    chosen = int(pred[()])
    flag = np.dtype(bool)
    answers = []
    for name in ("if_true", "if_false"):
        body = op.attrs[name]
        guard = chosen if name == "if_true" else making.member("logical_not", [chosen], flag)
        if op.guard is not None:
            guard = making.member("logical_and", [op.guard, guard], flag)
        answers.append(follow(making, body, captured, guard))
    return [_chosen(making, pred, one, other) for one, other in zip(*answers, strict=True)]


def _chosen(making: Making, pred: Entries, one: Entries, other: Entries) -> Entries:
    if one.shape != other.shape:
        raise Unfit("branches of different shapes")
    if not one.size:
        return one
    return _entrywise("where", making, [pred, one, other], making.dtype(int(one.flat[0])))


def _loop(op: _Op) -> Sequence[Value]:
    """A loop inside, of what it carries alone."""
    attrs, making = op.attrs, op.making
    counted, carried = int(attrs["counted"]), int(attrs["carried"])
    if attrs["scanned"] or len(attrs["body"].fetches) > carried or not all(v.size for v in op.inputs):
        raise Unfit("a loop inside that scans or stacks rows")
    first = [entries_of(making, v) for v in op.inputs[counted : counted + carried]]
    given = [*first, *op.inputs[counted + carried :]]
    known = [v if isinstance(v, TableAddress) else Spec(making.dtype(int(v.flat[0])), v.shape) for v in given]
    unrolled = unroll_loop(attrs, known, making.shared)
    longest = longest_seconds(attrs, None, unrolled.members * SECONDS_PER_MEMBER, unrolled.longest)
    captured = [v for v in given[carried:] if not isinstance(v, TableAddress)]
    count = int(op.inputs[0][()]) if counted else None
    made = making.inside(LoopInside(unrolled, flat(first), flat(captured), attrs["limit"], count, op.guard, longest))
    values = numbered([v.shape for v in first])
    return [np.array(made, np.int64)[value] for value in values] + [np.array(made[-1], np.int64)]


def unroll_loop(attrs: Mapping[str, Any], known: Sequence[Spec | TableAddress], shared: SharedValues) -> Unrolled:
    """The bodies of a loop on values like these: what is carried, rows of what is scanned, captured."""
    carried, scanned = int(attrs["carried"]), int(attrs["scanned"])
    body, answers = _unroll(attrs["body"], known, shared)
    for answer, spec in zip(answers, known[:carried], strict=False):
        if answer.shape != spec.shape or any(body.dtype(n) != spec.dtype for n in flat([answer])):
            raise Unfit("something carried whose shape or dtype changes")
    if attrs["cond"] is None:
        return Unrolled(None, (), body, answers)
    made = _unroll(attrs["cond"], [*known[:carried], *known[carried + scanned :]], shared)
    return Unrolled(*made, body, answers)


def _unroll(body: Plan, known: Sequence[Spec | TableAddress], shared: SharedValues) -> tuple[Making, list[Entries]]:
    specs = [spec for spec in known if isinstance(spec, Spec)]
    numbers = iter(numbered([spec.concrete for spec in specs]))
    making = Making([spec.dtype for spec in specs for _ in range(spec.size)], shared)
    return making, follow(making, body, [spec if isinstance(spec, TableAddress) else next(numbers) for spec in known])


def _fused(op: _Op) -> Sequence[Value]:
    values: list[Any] = list(op.inputs)
    for name, operands, dtype, attrs in op.attrs["members"]:
        given = [values[n] for n in operands]
        member = replace(op, inputs=given, attrs=dict(attrs), dtype=np.dtype(dtype), shape=None)
        values += _apply(name, member)
    return [values[n] for n in op.attrs["results"]]


def _with_epilogue(op: _Op) -> Sequence[Value]:
    name, count, attrs = op.attrs["product"]
    if not op.inputs[0].size:
        raise Unfit("a product of no entries")
    dtype = op.making.dtype(int(op.inputs[0].flat[0]))
    (made,) = _apply(name, replace(op, inputs=op.inputs[:count], attrs=dict(attrs), dtype=dtype, shape=None))
    other, other_attrs = op.attrs["epilogue"]
    given = [made if n < 0 else op.inputs[n] for n in op.attrs["taken"]]
    results = _apply(other, replace(op, inputs=given, attrs=dict(other_attrs), dtype=dtype))
    return [made, *results] if op.attrs["kept"] else results


# ── ops that move entries ────────────────────────────────────────────────────────────────────────────────────────────


def _key(op: _Op) -> tuple[Any, ...]:
    """The attribute ``key`` as NumPy takes it."""
    return tuple(slice(*k) if isinstance(k, tuple) else ... if k == "..." else k for k in op.attrs["key"])


def _put(op: _Op) -> Entries:
    """Zeros but for the part that the key names."""
    (zero,) = op.making.constant(np.zeros(1, op.dtype))
    whole = np.full(_known(op), zero, np.int64)
    whole[_key(op)] = op.inputs[0]
    return whole


def _padded(op: _Op) -> Entries:
    (filling,) = op.making.constant(np.full(1, op.attrs["value"], op.dtype))
    return np.pad(op.inputs[0], op.attrs["paddings"], constant_values=filling)


def _repeated(op: _Op) -> Entries:
    """What a reduction left, along the axes that it reduced."""
    shape, kept = _known(op), op.inputs[0]
    if not op.attrs["keepdims"]:
        kept = np.expand_dims(kept, tuple(normal_axes(op.attrs["axis"], len(shape))))
    return np.broadcast_to(kept, shape)


# ── ops that add entries up ──────────────────────────────────────────────────────────────────────────────────────────


def _reduction(making: Making, name: str, entries: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Entries put together two by two, so that none waits for all before it."""
    if any(making.dtype(n) != dtype for n in entries):
        raise Unfit("a reduction in another dtype")
    left = np.array(entries, np.int64)
    while len(left) > 1:
        half = len(left) // 2
        paired = _entrywise(name, making, [left[:half], left[half : 2 * half]], dtype)
        left = np.concatenate([paired, left[2 * half :]])
    return int(left[0])


def _reduced(op: _Op, reduction: Reduction) -> Entries:
    value = op.inputs[0]
    axes = tuple(normal_axes(op.attrs["axis"], value.ndim))
    out = _reduced_along(op, reduction.by, axes)
    if reduction.mean:
        size = op.making.constant(np.array(value.size // max(out.size, 1), op.dtype))
        out = _entrywise("divide", op.making, [out, size], op.dtype)
    return np.expand_dims(out, axes) if op.attrs["keepdims"] else out


def _reduced_along(op: _Op, by: str, axes: tuple[int, ...]) -> Entries:
    """The first input without these axes."""
    value = op.inputs[0]
    if not value.size:
        raise Unfit("a reduction of no entries")
    last = np.moveaxis(value, axes, range(value.ndim - len(axes), value.ndim))
    kept = last.shape[: value.ndim - len(axes)]
    rows = last.reshape(math.prod(kept), -1)
    return np.array([_reduction(op.making, by, row.tolist(), op.dtype) for row in rows], np.int64).reshape(kept)


def _summed_to(op: _Op) -> Entries:
    value, shape = op.inputs[0], _known(op)
    full = (1,) * (value.ndim - len(shape)) + shape
    axes = tuple(i for i, (n, m) in enumerate(zip(value.shape, full, strict=True)) if n != m)
    return _reduced_along(op, "add", axes).reshape(shape)


def _summed(op: _Op) -> Entries:
    total: Entries = op.inputs[0]
    for other in op.inputs[1:]:
        total = _entrywise("add", op.making, [total, other], op.dtype)
    return total


def _product(op: _Op) -> Entries:
    making, dtype = op.making, op.dtype
    a, b = op.inputs
    a = np.swapaxes(a, -1, -2) if op.attrs["transpose_a"] else a
    b = np.swapaxes(b, -1, -2) if op.attrs["transpose_b"] else b
    if a.ndim < 2 or b.ndim < 2 or not a.shape[-1]:
        raise Unfit("a product that is none of matrices")
    left, right = np.broadcast_arrays(a[..., :, None, :], np.swapaxes(b, -1, -2)[..., None, :, :])
    if left.size > MOST_MEMBERS:
        raise Unfit(f"a product of {left.size} terms, above {MOST_MEMBERS}")
    total = _entrywise("multiply", making, [left[..., 0], right[..., 0]], dtype)
    for k in range(1, left.shape[-1]):
        total = _entrywise("multiply_add", making, [left[..., k], right[..., k], total], dtype)
    return total


def _product_and_bias(op: _Op) -> Entries:
    *factors, bias = op.inputs
    made = _product(replace(op, inputs=factors))
    made = _entrywise("add", op.making, [made, bias], op.dtype)
    return _entrywise("relu", op.making, [made], op.dtype) if op.attrs["activation"] else made


def _constant(op: _Op) -> Value:
    value = np.asarray(op.attrs["value"])
    return op.making.shared.constant_table(value) if value.size > MOST_ENTRIES else op.making.constant(value)


def _one_hot(op: _Op) -> Entries:
    """Whether each class is that of an index, as a number; those that no index of the dtype names are zeros."""
    making, indices = op.making, op.inputs[0]
    if not indices.size:
        raise Unfit("one_hot of no entries")
    held = making.dtype(int(indices.flat[0]))
    depth = op.attrs["depth"]
    check_entries(indices.size * depth)
    named = min(depth, np.iinfo(held).max + 1)
    classes = making.constant(np.arange(named, dtype=held))
    same = _entrywise("equal", making, [indices[..., None], classes], np.dtype(bool))
    ones = same if op.dtype == bool else _entrywise("astype", making, [same], op.dtype)
    (zero,) = making.constant(np.zeros(1, op.dtype))
    return np.concatenate([ones, np.full((*indices.shape, depth - named), zero)], axis=-1)


_IN_PLACE = frozenset({COND, LOOP, "fused", "take", "getitem", "shape_of", "full_like"})
_SEVERAL: dict[str, Callable[[_Op], Sequence[Value]]] = {
    COND: _branch,
    LOOP: _loop,
    "fused": _fused,
    "with_epilogue": _with_epilogue,
}
_ENTRIES: dict[str, Callable[[_Op], Value]] = {
    "constant": _constant,
    "take": lambda op: taken(op.making, op.node, op.inputs, op.attrs["axis"], op.attrs["absent"], op.guard),
    "one_hot": _one_hot,
    "shape_of": lambda op: op.making.constant(np.array(op.inputs[0].shape, np.int64)),
    "transpose": lambda op: np.transpose(op.inputs[0], op.attrs["axes"]),
    "getitem": lambda op: part_of(op.making, op.inputs[0], _key(op)),
    "place": _put,
    "pad": _padded,
    "concat": lambda op: np.concatenate(op.inputs, op.attrs["axis"]),
    "stack": lambda op: np.stack(op.inputs, op.attrs["axis"]),
    "broadcast_to": lambda op: np.broadcast_to(op.inputs[0], _known(op)),
    "full": lambda op: np.broadcast_to(op.inputs[1], _known(op)),
    "full_like": lambda op: np.broadcast_to(op.inputs[1], op.inputs[0].shape),
    "spread": _repeated,
    "sum_to": _summed_to,
    "add_n": _summed,
    "matmul": _product,
    "matmul_bias": _product_and_bias,
}
