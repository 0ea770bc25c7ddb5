"""Writes to some rows of a variable, in place: what is not named is neither read nor written.

Each takes values and the groups of their indices (see `group_rows`). Where a row occurs several times its values are
summed first, so that a row moves once. An optimiser's rule moves the same rows of the variables it keeps beside the
table, its ``slots``, and nothing else: a row that does not occur keeps its momentum, its mean square, its value.
Slots and ``settings``, the rule's numbers, are of the variable's dtype; beside one of 16 bits of float32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.spec import Spec, as_dtype, computed, normal_axes
from flowrt.base.traits import VariableUpdate
from flowrt.ops.elementwise import astype
from flowrt.ops.reduce import spread
from flowrt.ops.shape import concat, reshape, stack
from flowrt.ops.slices import IndexedSlices, check_groups, group_rows
from flowrt.ops.source import shape_of
from flowrt.typed import op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowrt.op import DType, Op
    from flowrt.typed import Operand

SETTINGS = 8
"""The numbers a rule is given; those it has no use for are 0."""


def _row_write(name: str, meaning: str, by: str | None = None, *, own: bool = False) -> Op:
    """The op that moves rows of the variable ``resource`` and of its ``slots``, which are of its shape.

    It takes values [n, *shape[1:]], their groups, and ``SETTINGS`` numbers.
    """

    def write(
        values: Operand,
        groups: Operand,
        settings: Operand,
        *,
        resource: str,
        container: str,
        dtype: DType,
        shape: Any,
        slots: tuple[str, ...] = (),
    ) -> None:
        _check(values, groups, settings, resource, Spec(dtype, shape))

    write.__doc__ = meaning
    return op(name=name, stateful=True, update=VariableUpdate(by, rows=True, own=own), gradient=None)(write)


add_rows = _row_write("add_rows", "Add the values, times the first of the settings, to the rows.", by="add")

assign_rows = _row_write("assign_rows", "Make the values the rows'; of a row's several values the last counts.")

momentum_rows = _row_write(
    "momentum_rows",
    """v = momentum * v + g; p -= rate * (along * v + ahead * g).

    Settings: rate, momentum, along, ahead; slots: v. Sutskever et al., ICML 2013.
    """,
    own=True,
)

adagrad_rows = _row_write(
    "adagrad_rows",
    """a = a + g²; p -= rate * g / (sqrt(a) + epsilon).

    Settings: rate, epsilon; slots: a. Duchi et al., JMLR 2011.
    """,
    own=True,
)

rmsprop_rows = _row_write(
    "rmsprop_rows",
    """s = decay * s + (1 - decay) * g²; p -= v, where v = momentum * v + rate * g / (sqrt(s) + epsilon).

    Settings: rate, decay, 1 - decay, epsilon, momentum; slots: s, v. Tieleman and Hinton, 2012.
    """,
    own=True,
)

adam_rows = _row_write(
    "adam_rows",
    """m = beta1 * m + (1 - beta1) * g; s = beta2 * s + (1 - beta2) * g²;
    p -= rate * m / (sqrt(s) + epsilon) + decay * p.

    Settings: rate, beta1, 1 - beta1, beta2, 1 - beta2, epsilon, decay; slots: m, s. Kingma and Ba, ICLR 2015; the decay
    is Loshchilov and Hutter's, ICLR 2019.
    """,
    own=True,
)


def _check(values: Spec, groups: Spec, settings: Spec, resource: str, held: Spec) -> None:
    if held.rank == 0:
        raise SpecError(f"the variable {resource!r} is a scalar: it has no rows")
    wanted = Spec(held.dtype, (None, *held.shape[1:]))
    if values.dtype != held.dtype or (values.dims is not None and not wanted.accepts(values.dtype, values.dims)):
        raise SpecError(f"rows of the variable {resource!r} must be {wanted}, got {values}")
    numbers = Spec(computed(held.dtype), (SETTINGS,))
    if not numbers.accepts(settings.dtype, settings.dims or (SETTINGS,)):
        raise SpecError(f"the settings must be {numbers}, got {settings}")
    check_groups(values, groups)


def write_rows(write: Op, slices: IndexedSlices, settings: Sequence[Any], attributes: dict[str, Any], name: str) -> Any:
    """The operation that does ``write`` with the values and indices of ``slices``.

    ``attributes`` are the variable's and the write's own; ``settings`` are numbers or scalars.
    """
    values, _ = unrepeated(slices.values)
    filled, dtype = (*settings, *[0] * (SETTINGS - len(settings))), computed(as_dtype(attributes["dtype"]))
    numbers: Any
    if any(hasattr(s, "builder") for s in settings):
        numbers = stack(
            [astype(s, dtype.name) if hasattr(s, "builder") else np.asarray(s).astype(dtype) for s in filled]
        )
    else:
        numbers = np.array(filled, dtype)
    groups = group_rows(slices.indices, shape_of(values)[0], slices.shape[0], slices.absent)
    return write(values, groups, numbers, **attributes, name=name)


def unrepeated(values: Any) -> tuple[Any, int | None]:
    """``values`` without the copies that the gradient of a sum or mean made of each for neighbouring indices.

    That of the mean over a bag of rows is one row for all of the bag. Also answered is how many there are of each, None
    where only a step knows.
    """
    node = getattr(values, "op", None)
    if node is not None and node.op.name == "reshape":
        node = node.inputs[0].op
    if node is None or node.op.name != "spread":
        return values, 1
    whole, inner = node.outputs[0].spec, values.spec.shape[1:]
    if whole.dims is None or None in inner or whole.shape[whole.rank - len(inner) :] != inner:
        return values, 1
    bags = whole.rank - len(inner)  # the axes of the indices
    axes = normal_axes(node.attrs["axis"], whole.rank)
    if not axes or axes != tuple(range(bags - len(axes), bags)):
        return values, 1
    sizes, once = [whole.shape[axis] for axis in axes], node.inputs[0]
    if once.spec.dims is None or once.spec.rank != 1 + len(inner):
        once = reshape(once, (-1, *inner))
    return once, None if None in sizes else math.prod(sizes)


def repeated(values: Any, times: int) -> Any:
    """``values`` with so many copies of each, as `unrepeated` knows them."""
    if times == 1:
        return values
    inner = values.spec.shape[1:]
    sizes = concat([shape_of(values)[:1], np.array([times, *inner], np.int64)])
    return reshape(spread(values, sizes, 1), (-1, *inner))
