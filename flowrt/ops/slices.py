"""Gradients of tables: rows and where they belong, rather than as many zeros as the table has entries.

An `IndexedSlices` is no tensor. Whatever takes tensors sees the dense sum it stands for; who knows better (optimisers,
a table's own writes) takes rows and indices as they are and works in time that the table's size has no part in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.locating import located
from flowrt.base.spec import Spec, as_shape
from flowrt.graph import TensorOperators
from flowrt.op import REGISTRY, as_value
from flowrt.ops.inference import described
from flowrt.typed import op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowrt.typed import Operand, Result

__all__ = ["IndexedSlices"]

ABSENT = -(1 << 63)
"""An index that is no row's, where an op is told that some may be absent; else it is out of range as any other."""


@dataclass(frozen=True, slots=True, eq=False, init=False)
class IndexedSlices(TensorOperators):
    """A sum of slices along the first axis: zeros of ``shape`` to whose rows ``indices`` the ``values`` are added.

    ``values`` is [n, *shape[1:]], ``indices`` are n integers (or any shape in place of n, in both), and a row may occur
    any number of times. Where some may be ``absent``, the least int64 among them is no row's, and what it stands for is
    left out. Used as a tensor, or by ``np.asarray`` where it holds arrays, it is the dense sum.
    """

    values: Any
    indices: Any
    shape: tuple[int, ...]
    absent: bool

    @located("IndexedSlices")
    def __init__(self, values: Any, indices: Any, shape: Any, absent: bool = False) -> None:
        values, indices, shape = as_value(values), as_value(indices), as_shape(shape)
        given, rows = described(values), described(indices)
        if not shape or None in shape:
            raise SpecError(f"shape must be known and have an axis, got {shape}")
        if rows.dtype.kind not in "iu":
            raise SpecError(f"indices must be integers, got {rows}; use astype")
        if rows.dims is not None:
            wanted = Spec(given.dtype, (*rows.dims, *shape[1:]))
            if given.dims is not None and not wanted.accepts(given.dtype, given.dims):
                raise SpecError(f"the values of {rows} must be {wanted}, got {given}")
        object.__setattr__(self, "values", _flat(values, given, shape[1:]))
        object.__setattr__(self, "indices", _flat(indices, rows, ()))
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "absent", absent)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values, and of the dense sum."""
        return described(self.values).dtype

    @property
    def spec(self) -> Spec:
        """The spec of the dense sum."""
        return Spec(self.dtype, self.shape)

    def __tensor__(self) -> Any:
        shape = np.array(self.shape, np.int64)
        return REGISTRY["scatter_add"](self.values, self.indices, shape, absent=self.absent)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self.__tensor__(), *args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return IndexedSlices, (self.values, self.indices, self.shape, self.absent)  # as a step answers them, of arrays

    def __repr__(self) -> str:
        return f"<IndexedSlices {self.spec} of {described(self.values)}>"


def _flat(value: Any, spec: Spec, inner: Sequence[int | None]) -> Any:
    """``value`` with one axis before the ``inner`` ones."""
    if spec.dims is not None and len(spec.dims) == 1 + len(inner):
        return value
    count = math.prod(spec.concrete[: spec.rank - len(inner)]) if spec.known else -1
    return REGISTRY["reshape"](value, (count, *inner))


def sum_slices(slices: Sequence[IndexedSlices]) -> IndexedSlices:
    """The sum of several: their rows, one after another."""
    join, convert = REGISTRY["concat"], REGISTRY["astype"]
    values, indices = [s.values for s in slices], [s.indices for s in slices]
    if len({described(each).dtype for each in indices}) > 1:
        indices = [convert(each, "int64") for each in indices]
    return IndexedSlices(join(values), join(indices), slices[0].shape, any(s.absent for s in slices))


@op(gradient=None)
def group_rows(
    indices: Operand, values: Operand, size: int, absent: bool = False, *, name: str | None = None
) -> Result:
    """Which of n ``indices`` into ``size`` rows are equal: one vector of 3 n + 2 numbers that row kernels read.

    They are: how many different rows occur, c; n + 1 numbers, of which from the g-th to the next is the range of the
    g-th row's occurrences; n, of which the first c are the rows, in order of first occurrence; n, the occurrences, row
    by row. ``values`` is how many values there are: as many as indices, or each is for equally many in a row, and an
    occurrence is told by its value's number. Those that may be ``absent``, as of `take`, are in no group.
    """
    if indices.dtype.kind not in "iu" or (indices.dims is not None and indices.rank != 1):
        raise SpecError(f"indices must be a vector of integers, got {indices}")
    if values.dtype != np.int64 or values.dims not in (None, ()):
        raise SpecError(f"the number of values is an int64 scalar, got {values}")
    count = None if indices.dims is None else indices.shape[0]
    return Spec("int32" if size < 1 << 31 else "int64", (None if count is None else 3 * count + 2,))


@op(gradient=None)
def sum_rows(values: Operand, groups: Operand) -> Result:
    """The sum of the ``values`` of each row of ``groups`` (see `group_rows`), then zeros: [n, ...] for n indices."""
    check_groups(values, groups)
    many = groups.dims is None or groups.shape[0] is None
    return Spec(values.dtype, None if values.dims is None else (None if many else _count(groups), *values.shape[1:]))


def _count(groups: Spec) -> int:
    return ((groups.shape[0] or 2) - 2) // 3


def check_groups(values: Spec, groups: Spec) -> None:
    """Raise `SpecError` where ``groups`` are not of so many values."""
    if groups.dtype not in (np.int32, np.int64) or (groups.dims is not None and groups.rank != 1):
        raise SpecError(f"groups are what group_rows answers, got {groups}")
    if values.dims is None or groups.dims is None or groups.shape[0] is None:
        return
    if values.rank == 0 or values.shape[0] is None:
        return
    rows, count = values.shape[0], _count(groups)
    if groups.shape[0] % 3 != 2 or (count % rows if rows else count):
        raise SpecError(f"{groups} are not the groups of {values}: there are {count} indices")
