"""What a product of matrices is to cuBLAS: strided batches of matrices that are stored column by column.

Law: pure; a step's views in, calls out. Stored by columns, a matrix of ours is its own transpose, so y = a·b is asked
for as yᵀ = bᵀ·aᵀ: the right operand comes first, and nothing is moved. A batch of one stands for every one by a stride
of 0. Batches that no single stride runs through are a few calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flowrt.base.valueclass import valueclass

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flowrt.kernels.language.table import View
    from flowrt.kernels.launch import LaunchStep

CALLS = 16  # at most: more small products take longer than the own tiles, which are one launch
DTYPES = (np.dtype("float32"), np.dtype("float64"))
BITS = np.dtype("uint16")  # of floats that have a name of their own: `StridedProduct.stored`

Axis = tuple[int, tuple[int, int, int]]  # of a batch: how many, and how far apart they are in a, b and y


@valueclass
class StridedMatrices:
    """As many matrices as a call multiplies, the entries of a column side by side; all sizes are in entries."""

    rows: int
    columns: int
    offset: int = 0  # where the first begins
    stride: int = 0  # from each to the next
    transposed: bool = False  # before they are multiplied


@valueclass
class StridedProduct:
    """One call: ``batch`` products of matrices of the operands b and a, in this order, into those of y.

    Operands are of y's dtype, or ``stored`` as floats of 16 bits that are called so.
    """

    b: StridedMatrices
    a: StridedMatrices
    y: StridedMatrices
    batch: int
    dtype: np.dtype[np.generic]
    stored: str = ""

    @property
    def starts(self) -> tuple[int, int, int]:
        """Where the first matrices of b, a and y begin, in bytes."""
        size = (BITS if self.stored else self.dtype).itemsize
        return size * self.b.offset, size * self.a.offset, self.dtype.itemsize * self.y.offset


def strided_products(step: LaunchStep, stored: str = "") -> tuple[StridedProduct, ...] | None:
    """The calls that a step of `matmul` comes to, or of what is ``stored`` as floats of 16 bits.

    None where the own tiles serve better, or alone.
    """
    a, b, y = step.call.views
    transpose_a, transpose_b = map(bool, step.call.words)
    dtype = step.dtypes[2]
    if dtype not in DTYPES or not a.size or not b.size:
        return None
    axes = _joined([_axis(axis, (a, b, y)) for axis in (0, 1) if y.shape[axis] > 1])
    apart, together = _parted(axes)
    if apart[0] > CALLS:
        return None
    batch, strides = together
    return tuple(
        StridedProduct(
            _matrices(b, starts[1], strides[1], transpose_b),
            _matrices(a, starts[0], strides[0], transpose_a),
            _matrices(y, starts[2], strides[2]),
            batch,
            dtype,
            stored,
        )
        for starts in _starts(apart)
    )


def _axis(axis: int, views: Sequence[View]) -> Axis:
    a, b, y = (view.strides[axis] if view.shape[axis] > 1 else 0 for view in views)
    return views[2].shape[axis], (a, b, y)


def _joined(axes: list[Axis]) -> list[Axis]:
    """Two axes as one, where every operand goes through both by one stride."""
    if len(axes) == 2:
        (outer, far), (inner, near) = axes
        if all(f == inner * n for f, n in zip(far, near, strict=True)):
            return [(outer * inner, near)]
    return axes


def _parted(axes: list[Axis]) -> tuple[Axis, Axis]:
    """The axis that is a call for each, and the one that every call goes through."""
    alone: Axis = (1, (0, 0, 0))
    first, second = sorted([alone, alone, *axes], key=lambda axis: axis[0])[-2:]
    return first, second


def _starts(axis: Axis) -> Iterator[tuple[int, int, int]]:
    size, (a, b, y) = axis
    return ((i * a, i * b, i * y) for i in range(size))


def _matrices(view: View, start: int, stride: int, transposed: bool = False) -> StridedMatrices:
    return StridedMatrices(view.shape[3], view.shape[2], view.offset + start, stride, transposed)
