"""How a CUDA kernel finds the entries of an expression's operands, of which each may repeat, be turned or have gaps.

Law: pure. An operand that has all entries in order is read at the entry's own number, one that is the same everywhere
once; the others share one odometer. Where all numbers fit 31 bits a quotient is a multiplication and a shift.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowrt.base.valueclass import valueclass
from flowrt.kernels.language.table import View
from flowrt.kernels.tiles.copies import merged

NARROW = 1 << 31  # numbers below it are told in 32 bits
OTHER = 2  # stands for a stride that is neither 0 nor 1, and told


@valueclass
class Ways:
    """What a kernel is compiled for.

    For each operand a stride on each axis of the odometer: 0, 1 or `OTHER`; none where it needs no odometer, as it has
    all entries in order. The odometer's axes count the last one first.
    """

    strides: tuple[tuple[int, ...] | None, ...]
    narrow: bool

    @property
    def axes(self) -> int:
        """Of the odometer."""
        return max((len(some) for some in self.strides if some), default=0)

    def is_single(self, operand: int) -> bool:
        """Whether all entries are one."""
        strides = self.strides[operand]
        return strides is not None and not any(strides)

    def names(self) -> Iterator[str]:
        """What the numbers are called that the kernel is told."""
        for axis in range(self.axes - 1):
            yield from (f"size{axis}", f"factor{axis}", f"shift{axis}") if self.narrow else (f"size{axis}",)
        for operand, strides in enumerate(self.strides):
            if strides and not self.is_single(operand):
                yield from (f"by{operand}_{axis}" for axis, stride in enumerate(strides) if stride == OTHER)
                if not self.narrow:
                    yield f"from{operand}"


@valueclass
class Walk:
    """The ways of some operands; where each begins, an entry's number; and the numbers that the kernel is told."""

    ways: Ways
    starts: tuple[int, ...]
    words: tuple[int, ...]


def walk_over(views: Sequence[View]) -> Walk:
    """How to go over views of one shape, in which there are entries."""
    axes = merged([view for view in views if not (view.contiguous or _is_single(view))] or [View((), ())])
    lowest = [_lowest(view) for view in views]
    backwards = any(view.offset != start for view, start in zip(views, lowest, strict=True))
    narrow = not backwards and all(max(view.size, _reach(view)) < NARROW for view in views)
    turning = iter(zip(*(strides for _, strides in axes), strict=True))
    strides, words = list[tuple[int, ...] | None](), list[int]()
    for n, _ in axes[:-1]:
        words += [n, *reciprocal(n)] if narrow else [n]
    for view, start in zip(views, lowest, strict=True):
        if view.contiguous:
            strides.append(None)
        elif _is_single(view):
            strides.append(())
        else:
            found = next(turning)
            strides.append(tuple(min(stride, OTHER) if stride >= 0 else OTHER for stride in found))
            words += [stride for stride in found if stride not in (0, 1)]
            words += [] if narrow else [view.offset - start]
    return Walk(Ways(tuple(strides), narrow), tuple(lowest), tuple(words))


def _is_single(view: View) -> bool:
    return all(n == 1 or stride == 0 for n, stride in zip(view.shape, view.strides, strict=True))


def _lowest(view: View) -> int:
    """The number of the first of its entries in memory."""
    return view.offset + sum(min((n - 1) * stride, 0) for n, stride in zip(view.shape, view.strides, strict=True))


def _reach(view: View) -> int:
    """How far the last of its entries is from the first."""
    return sum(abs((n - 1) * stride) for n, stride in zip(view.shape, view.strides, strict=True))


def reciprocal(divisor: int) -> tuple[int, int]:
    """A factor and a shift with which all numbers below 2**31 are divided (Granlund and Montgomery 1994)."""
    digits = (divisor - 1).bit_length()
    return (1 << (31 + digits)) // divisor + 1, 31 + digits
