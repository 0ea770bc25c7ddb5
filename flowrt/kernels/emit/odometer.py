"""How compiled loops walk over ranges of elements: row by row, and along outer dims, as a block's odometer says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from flowrt.kernels.emit.abi import ONE, WORD, ZERO


@contextmanager
def in_blocks(builder: Any, count: Any, size: Any) -> Iterator[tuple[Any, Any]]:
    """Emit the body for every ``size`` of ``count`` elements; yields the first of them and how many they are."""
    length = ir.Constant(WORD, size) if isinstance(size, int) else size
    blocks = builder.udiv(builder.add(count, builder.sub(length, ONE)), length)
    with cgutils.for_range(builder, blocks) as iteration:
        start = builder.mul(iteration.index, length)
        left = builder.sub(count, start)
        yield start, smaller(builder, left, length)


def smaller(builder: Any, a: Any, b: Any) -> Any:
    """The smaller of two words."""
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of two words."""
    return builder.select(builder.icmp_signed(">", a, b), a, b)


@contextmanager
def rows_between(
    builder: Any, begin: Any, end: Any, inner: Any, together: Callable[[Any], Any] | None = None
) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Emit the body as a loop over the rows of ``inner`` elements that the elements [begin, end) lie in.

    Yields the row's number, the first of its elements to visit, how many, and of how many rows: more than one, all of
    them whole, where ``together`` says that so many from this one on may be. Else only a range that begins after the
    first row costs a division.
    """
    place = cgutils.alloca_once_value(builder, begin)  # the next element
    number = cgutils.alloca_once(builder, WORD)
    first = cgutils.alloca_once(builder, WORD)
    builder.store(begin, place)
    builder.store(ZERO, number)
    builder.store(begin, first)
    some = builder.icmp_signed("<", begin, end)  # where there is nothing, ``inner`` may be 0
    with builder.if_then(builder.and_(some, builder.icmp_signed(">=", begin, inner))):
        builder.store(builder.udiv(begin, inner), number)
        builder.store(builder.urem(begin, inner), first)
    check, body, done = (builder.append_basic_block(f"rows.{name}") for name in ("check", "body", "done"))
    builder.branch(check)
    builder.position_at_end(check)
    builder.cbranch(builder.icmp_signed("<", builder.load(place), end), body, done)
    builder.position_at_end(body)
    start, left = builder.load(first), builder.sub(end, builder.load(place))
    whole = builder.sub(inner, start)
    count = builder.select(builder.icmp_signed("<", left, whole), left, whole)
    rows = ONE
    if together is not None:
        most = smaller(builder, together(builder.load(number)), builder.udiv(left, inner))
        begun = builder.icmp_signed("!=", start, ZERO)
        rows = builder.select(begun, ONE, larger(builder, most, ONE))
        count = builder.select(builder.icmp_signed(">", rows, ONE), builder.mul(rows, inner), count)
    yield builder.load(number), start, count, rows
    builder.store(builder.add(builder.load(number), rows), number)
    builder.store(builder.add(builder.load(place), count), place)
    builder.store(ZERO, first)
    builder.branch(check)
    builder.position_at_end(done)


def outer_position(builder: Any, table: Any, dims: Any, index: Any, starts: Sequence[Any]) -> list[Any]:
    """The operands' addresses at the ``index``-th combination of the outer dims."""
    left = cgutils.alloca_once_value(builder, index)
    moved = [cgutils.alloca_once_value(builder, ZERO) for _ in starts]
    builder.store(index, left)
    for place in moved:
        builder.store(ZERO, place)
    width = ir.Constant(WORD, len(starts) + 1)
    here = cgutils.alloca_once(builder, WORD)
    last = builder.sub(dims, ONE)
    with cgutils.for_range(builder, dims) as dim:
        entry = builder.gep(table, [builder.mul(dim.index, width)])
        rest = builder.load(left)
        builder.store(rest, here)
        with builder.if_then(
            builder.icmp_signed("<", dim.index, last)
        ):  # the last dim, often the only, divides nothing
            size = builder.load(entry)
            builder.store(builder.urem(rest, size), here)
            builder.store(builder.udiv(rest, size), left)
        for i, place in enumerate(moved):
            stride = builder.load(builder.gep(entry, [ir.Constant(WORD, i + 1)]))
            builder.store(builder.add(builder.load(place), builder.mul(builder.load(here), stride)), place)
    return [builder.gep(start, [builder.load(place)]) for start, place in zip(starts, moved, strict=True)]
