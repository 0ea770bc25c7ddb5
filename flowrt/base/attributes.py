"""What an op's attributes are: plain, immutable data that a plan can carry, and that tells by itself what it means."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias, cast

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.pages import held
from flowrt.base.plan import Plan
from flowrt.base.spec import as_dtype

Attr: TypeAlias = "bool | int | float | str | tuple[Attr, ...] | np.ndarray[Any, Any] | Plan | None"

LINE, LINED_UP = 64, 4096  # bytes


def as_attr(value: Any) -> Attr:
    """``value`` as plain, immutable data that a plan can carry."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return cast("Attr", value.item())
    if isinstance(value, (list, tuple)):
        return tuple(as_attr(item) for item in value)
    if isinstance(value, np.ndarray):
        native = np.asarray(value, value.dtype.newbyteorder("="))
        return native if _never_changes(native) else _copied(native)
    if isinstance(value, (np.dtype, type)):
        return as_dtype(value).name
    if isinstance(value, Plan):
        return value
    raise SpecError(f"{value!r} cannot be an attribute; use numbers, strings, tuples, dtypes or arrays")


def _copied(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy that never changes; of many bytes it begins at a cache line, or registers would be filled from two."""
    pages = held(array)
    if pages is not None:
        return pages
    if array.nbytes < LINED_UP:
        return frozen(np.array(array))
    memory = np.empty(array.nbytes + LINE, np.uint8)
    made = memory[-int(memory.ctypes.data) % LINE :][: array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    frozen(memory)
    return frozen(made)


def frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A new ``array``, told never to change: so it is held as it is from now on."""
    array.setflags(write=False)
    return array


def _never_changes(array: np.ndarray[Any, Any]) -> bool:
    """Whether ``array`` is in order and read-only down to whoever owns its memory."""
    if not array.flags.c_contiguous:
        return False
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return False
        owner = owner.base
    try:
        return owner is None or memoryview(owner).readonly
    except TypeError:
        return False


LARGE = 1 << 16
"""Arrays above so many bytes are one only where they are the same object: reading them all would cost more."""


def attr_key(value: Attr) -> Hashable:
    """``value`` as something that equals only what means the same: 1, 1.0 and True differ, and so do 0.0 and -0.0.

    For a large array it is good for as long as the array lives.
    """
    if isinstance(value, np.ndarray):
        content = value.tobytes() if value.nbytes <= LARGE else id(value).to_bytes(8, "big")
        return "array", value.dtype.str, value.shape, value.nbytes, content
    if isinstance(value, tuple):
        return "tuple", tuple(attr_key(item) for item in value)
    if isinstance(value, float):
        return "float", value.hex()
    if isinstance(value, Plan):
        return _body_key(value)
    return type(value).__name__, value


def _body_key(body: Plan) -> Hashable:
    """A body by what it computes, whatever its nodes are called."""
    nodes = tuple(
        (n.op, n.inputs, n.outputs, n.control, tuple((name, attr_key(n.attrs[name])) for name in sorted(n.attrs)))
        for n in body.nodes
    )
    return "body", tuple(feed.spec for feed in body.feeds), nodes, body.fetches
