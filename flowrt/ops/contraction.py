"""Sums of products by named axes: einsum and what it says in short. All of it is composed of ops, gradients too.

Operands are contracted pair by pair, from the left. A pair becomes one matrix product of its axes merged into four
groups (in both and kept, in one, summed, in the other), or a broadcast product where there is nothing to sum.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.locating import located
from flowrt.base.plain import default_array
from flowrt.base.valueclass import valueclass
from flowrt.op import whole
from flowrt.ops.elementwise import astype, multiply
from flowrt.ops.index import take
from flowrt.ops.inference import described, settled
from flowrt.ops.linalg import matmul
from flowrt.ops.reduce import sum as sum_
from flowrt.ops.shape import expand_dims, getitem, reshape, squeeze, stack, transpose
from flowrt.ops.source import arange, shape_of

if TYPE_CHECKING:
    from flowrt.graph import TensorOrArray
    from flowrt.typed import Operand

__all__ = ["dot", "einsum", "tensordot"]

Labels: TypeAlias = tuple[str, ...]
ELLIPSIS = "..."


@valueclass
class _Term:
    """A value whose axes have names."""

    value: Any
    labels: Labels

    def size(self, label: str) -> Any:
        """The size of an axis, as a number or a scalar tensor."""
        return shape_of(self.value)[self.labels.index(label)]


@whole
@located("einsum")
def einsum(equation: str, *operands: Operand) -> TensorOrArray:
    """The sum of products that ``equation`` says, as NumPy's: ``"ij,jk->ik"`` is a product of matrices.

    Each operand's axes are letters; those that the result does not name are summed. Without ``->`` the result has, in
    the order of the alphabet, the letters that occur once. ``...`` stands for any axes, which broadcast.
    """
    values = _values(*operands)
    terms, out = _named(equation, values)
    terms = [_diagonal(_without_ones(term, terms)) for term in terms]
    total = terms[0]
    for number, term in enumerate(terms[1:], 1):
        later = set(out).union(*(t.labels for t in terms[number + 1 :]))
        total = _contracted(total, term, later)
    total = _summed(total, set(out))
    made: TensorOrArray = _ordered(total, out).value
    return made


@whole
@located("tensordot")
def tensordot(a: Operand, b: Operand, axes: int | Sequence[int | Sequence[int]] = 2) -> TensorOrArray:
    """The sum of products over some axes of ``a`` and as many of ``b``: what is left of a's axes, then of b's.

    ``axes`` is how many: the last ones of ``a``, in order, with the first ones of ``b``; or a pair of axes, or of
    sequences of them.
    """
    a, b = _values(a, b)
    m, n = _rank(a), _rank(b)
    if isinstance(axes, (int, np.integer)):
        left, right = tuple(range(m - axes, m)), tuple(range(axes))
    else:
        left, right = ((x,) if isinstance(x, (int, np.integer)) else tuple(x) for x in axes)
    ours, theirs = [f"a{i}" for i in range(m)], [f"b{i}" for i in range(n)]
    if len(left) != len(right) or any(not -r <= i < r for r, of in ((m, left), (n, right)) for i in of):
        raise SpecError(f"axes {axes} do not fit {described(a)} and {described(b)}")
    for i, j in zip(left, right, strict=True):
        theirs[j] = ours[i]
    first, second = _Term(a, tuple(ours)), _Term(b, tuple(theirs))
    _check_sizes((first, second))
    summed = {ours[i] for i in left}
    made: TensorOrArray = _contracted(first, second, {*ours, *theirs} - summed).value
    return made


@whole
@located("dot")
def dot(a: Operand, b: Operand) -> TensorOrArray:
    """NumPy's dot: the sum of products over a's last axis and b's second last, or its only one; scalars multiply."""
    a, b = _values(a, b)
    m, n = _rank(a), _rank(b)
    return multiply(a, b) if 0 in (m, n) else tensordot(a, b, (m - 1, max(n - 2, 0)))


def _values(*operands: Any) -> list[Any]:
    return [x if hasattr(x, "builder") else default_array(x) for x in settled(*operands)]


def _rank(x: Any) -> int:
    spec = described(x)
    if spec.dims is None:
        raise SpecError(f"the rank of {spec} is not known; declare its shape")
    return len(spec.dims)


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _named(equation: str, values: Sequence[Any]) -> tuple[list[_Term], Labels]:
    """The operands with their axes' names, and the names of the result's."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    parts = left.split(",")
    if len(parts) != len(values):
        raise SpecError(f"{equation!r} is of {len(parts)} operands, got {len(values)}")
    terms = [_Term(x, _labels(equation, part, _rank(x))) for part, x in zip(parts, values, strict=True)]
    counts = Counter(label for term in terms for label in term.labels)
    more = max((_dots(term.labels) for term in terms), key=len)
    if arrow:
        out = _split(equation, right)
        out = tuple(label for each in out for label in (more if each == ELLIPSIS else (each,)))
    else:
        out = (*more, *sorted(label for label, n in counts.items() if n == 1 and not label.startswith(ELLIPSIS)))
    missing = [label for label in out if label not in counts]
    if missing or len(set(out)) < len(out):
        raise SpecError(f"the result of {equation!r} names {missing or 'an axis'} wrongly")
    _check_sizes(terms)
    return terms, out


def _labels(equation: str, part: str, rank: int) -> Labels:
    letters = _split(equation, part)
    hidden = rank - sum(each != ELLIPSIS for each in letters)
    if hidden < 0 or (hidden > 0 and ELLIPSIS not in letters):
        raise SpecError(f"{part!r} of {equation!r} does not name {rank} axes")
    dots = [f"{ELLIPSIS}{i}" for i in range(hidden, 0, -1)]  # counted from the right, where they line up
    return tuple(label for each in letters for label in (dots if each == ELLIPSIS else [each]))


def _split(equation: str, part: str) -> Labels:
    before, dots, after = part.partition(ELLIPSIS)
    if not (before + after).isalpha() and before + after:
        raise SpecError(f"{equation!r} may hold letters, commas, one '->' and '...'")
    return (*before, *((ELLIPSIS,) if dots else ()), *after)


def _dots(labels: Iterable[str]) -> Labels:
    return tuple(label for label in labels if label.startswith(ELLIPSIS))


def _check_sizes(terms: Sequence[_Term]) -> None:
    sizes: dict[str, int] = {}
    for term in terms:
        for label, size in zip(term.labels, described(term.value).shape, strict=True):
            if size in (None, 1):
                continue
            if sizes.setdefault(label, size) != size:
                found = ", ".join(str(described(t.value)) for t in terms)
                raise SpecError(f"axis {label!r} of {found} is {sizes[label]} and {size} long")


# ── one operand ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _without_ones(term: _Term, terms: Sequence[_Term]) -> _Term:
    """``term`` without the axes of size 1 that broadcast to longer ones of others."""
    ones = [
        axis
        for axis, (label, size) in enumerate(zip(term.labels, described(term.value).shape, strict=True))
        if size == 1 and any(_longer(other, label) for other in terms)
    ]
    if not ones:
        return term
    left = tuple(label for axis, label in enumerate(term.labels) if axis not in ones)
    return _Term(squeeze(term.value, tuple(ones)), left)


def _longer(term: _Term, label: str) -> bool:
    sizes = zip(term.labels, described(term.value).shape, strict=True)
    return any(mine == label and size != 1 for mine, size in sizes)


def _diagonal(term: _Term) -> _Term:
    """``term`` with each name once: where two axes have one name only entries with equal indices count."""
    for label, count in Counter(term.labels).items():
        for _ in range(count - 1):
            first = term.labels.index(label)
            second = term.labels.index(label, first + 1)
            value, labels = term.value, term.labels
            spec = described(value)
            known = spec.shape[first] if spec.shape[first] is not None else spec.shape[second]
            size = shape_of(value)[first] if known is None else known
            others = tuple(axis for axis in range(len(labels)) if axis not in (first, second))
            order = (first, second, *others)
            square = value if order == tuple(range(len(order))) else transpose(value, order)
            rest = [shape_of(value)[axis] if spec.shape[axis] is None else spec.shape[axis] for axis in others]
            rows = reshape(square, [size * size, *rest])
            taken = take(rows, arange(size) * (size + 1)) if known is None else getitem(rows, ((None, None, size + 1),))
            term = _Term(taken, tuple(labels[axis] for axis in (first, *others)))
    return term


def _summed(term: _Term, kept: set[str]) -> _Term:
    """``term`` without the axes that are not ``kept``, in the dtype it had: sums alone are of wider integers."""
    axes = tuple(axis for axis, label in enumerate(term.labels) if label not in kept)
    if not axes:
        return term
    total, dtype = sum_(term.value, axes), described(term.value).dtype
    total = total if described(total).dtype == dtype else astype(total, dtype)
    return _Term(total, tuple(label for label in term.labels if label in kept))


def _ordered(term: _Term, labels: Labels) -> _Term:
    if term.labels == labels:
        return term
    return _Term(transpose(term.value, tuple(term.labels.index(label) for label in labels)), labels)


# ── two operands ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _contracted(a: _Term, b: _Term, kept: set[str]) -> _Term:
    """The product of two terms, summed over the names that nothing later needs."""
    a, b = _summed(a, kept.union(b.labels)), _summed(b, kept.union(a.labels))
    both = tuple(label for label in a.labels if label in b.labels and label in kept)
    inner = tuple(label for label in a.labels if label in b.labels and label not in kept)
    left = tuple(label for label in a.labels if label not in b.labels)
    right = tuple(label for label in b.labels if label not in a.labels)
    out = (*both, *left, *right)
    if not inner or (both and not left and not right):
        product = _Term(multiply(_spaced(a, (*out, *inner)), _spaced(b, (*out, *inner))), (*out, *inner))
        return _summed(product, kept)
    x, transposed_x = _merged(a, both, left, inner)
    y, transposed_y = _merged(b, both, inner, right)
    sizes = [a.size(label) for label in (*both, *left)] + [b.size(label) for label in right]
    return _Term(reshape(matmul(x, y, transposed_x, transposed_y), _vector(sizes)), out)


def _spaced(term: _Term, labels: Labels) -> Any:
    """The value with its axes in the order of ``labels``, those it lacks of size 1."""
    mine = tuple(label for label in labels if label in term.labels)
    absent = tuple(axis for axis, label in enumerate(labels) if label not in term.labels)
    value = _ordered(term, mine).value
    return expand_dims(value, absent) if absent else value


def _merged(term: _Term, both: Labels, rows: Labels, columns: Labels) -> tuple[Any, bool]:
    """The value as [both, rows, columns], or the last two the other way round if its axes lie that way."""
    transposed = term.labels == (*both, *columns, *rows) and term.labels != (*both, *rows, *columns)
    groups = (both, columns, rows) if transposed else (both, rows, columns)
    value = _ordered(term, tuple(label for group in groups for label in group))
    one: Any = np.int64(1)
    merged = [functools.reduce(multiply, [value.size(label) for label in group], one) for group in groups]
    return reshape(value.value, _vector(merged if both else merged[1:])), transposed


def _vector(sizes: Sequence[Any]) -> Any:
    return stack(list(sizes)) if sizes else np.zeros(0, np.int64)
