"""Which calls of an op are alike: those for which the same is to be computed, on other entries.

Law: pure and quick; this file looks at types, dtypes and shapes, at entries never. A call's likeness says too much
rather than too little: calls of one likeness are bound, inferred and prepared in one way, but for what entries decide.
What it has no word for has no likeness. `Recall` keeps what is known of some likenesses, the ones met last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

Known: TypeAlias = Callable[..., Any]
"""What answers the calls of one likeness, given as they are; NotImplemented, and nothing done, where it cannot."""


def met(*args: Any, **kwargs: Any) -> Any:
    """What is known of calls that were met once: those that are met again are worth learning."""
    return NotImplemented


def unknown(*args: Any, **kwargs: Any) -> Any:
    """What is known of calls of which nothing can be."""
    return NotImplemented


# What a parameter takes: an attribute, a tensor, or one that is cast to a dtype that others have a part in; below 0:
# many of them.
_ATTRIBUTE, _TENSOR, _PROMOTED = range(3)
Roles: TypeAlias = tuple[tuple[int, ...], Mapping[str, int]]
"""Those of the parameters that may be given by position, and of all by name."""

_INTEGERS = frozenset({int, *(np.dtype(code).type for code in "bhilqBHILQ")})
_OTHERS = frozenset({float, bool, np.bool_, np.float16, np.float32, np.float64})
_NUMBERS = _INTEGERS | _OTHERS
_ONLY_INTS = {int}


class Described(Protocol):
    """What is asked of an op's parameter."""

    @property
    def name(self) -> str: ...
    @property
    def tensor(self) -> bool: ...
    @property
    def many(self) -> bool: ...
    @property
    def placed(self) -> bool:
        """Whether it may be given by position."""


def roles_of(parameters: Sequence[Described], promoted: Collection[str]) -> Roles:
    """What the parameters take, those named by ``promoted`` being promoted."""
    of = {p.name: (_PROMOTED if p.name in promoted else _TENSOR) if p.tensor else _ATTRIBUTE for p in parameters}
    named = {p.name: -of[p.name] if p.many else of[p.name] for p in parameters}
    return tuple(named[p.name] for p in parameters if p.placed), named


def likeness(op: Hashable, roles: Roles, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
    """What tells a call of ``op`` from those that are not like it: None where that cannot be told.

    Arrays count by dtype and shape, numbers that are promoted by type, all else by value.
    """
    placed, named = roles
    count = len(args)
    if count > len(placed):
        return None
    key: list[Any] = [op, count, *kwargs]
    for role, value in zip(placed, args):  # noqa: B905  (some are left to their defaults)
        if type(value) is np.ndarray and role > 0:
            key.append(value.dtype)
            key.append(value.shape)
            continue
        part = _part(role, value)
        if part is None:
            return None
        key.append(part)
    for name in kwargs:
        part = _part(named[name], kwargs[name]) if name in named else None
        if part is None:
            return None
        key.append(part)
    return tuple(key)


def of_arrays(roles: Roles, args: Sequence[Any]) -> bool:
    """Whether all that a call is given is tensors, each an array by itself."""
    return all(role > 0 and type(value) is np.ndarray for role, value in zip(roles[0], args))  # noqa: B905


def _part(role: int, value: Any) -> Any:
    """What an argument in that role adds to the likeness of its call."""
    kind = type(value)
    if role == _ATTRIBUTE:
        return _attribute(value)
    if role < 0:
        return _each(-role, value) if kind is list or kind is tuple else None
    if kind is np.ndarray:
        return value.dtype, value.shape
    if value is None or is_open(role == _PROMOTED, value):
        return kind
    if kind in _INTEGERS:
        return kind, int(value)  # perhaps a size, or an axis to be
    return _integers(value) if kind is tuple or kind is list else None


def is_open(promoted: bool, value: Any) -> bool:
    """Whether calls are alike that give a tensor other entries than ``value``, an array or number."""
    kind = type(value)
    return kind is np.ndarray or kind in _OTHERS or (promoted and kind in _INTEGERS)


def usual(value: Any) -> Any:
    """``value``, but a small number of its type in the place of one: such as say nothing about the dtype they need."""
    return type(value)(1) if type(value) in _NUMBERS else value


def in_order(args: Sequence[Any]) -> list[Any] | None:
    """The arguments, with copies of those arrays that do not lie as kernels read them; None where all do."""
    found, tidied = False, list(args)
    for number, value in enumerate(args):
        if type(value) is np.ndarray:
            tidied[number] = made = ordered(value)
            found = found or made is not value
    return tidied if found else None


def ordered(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``array`` in C order, aligned, in this machine's byte order; itself where it is."""
    if not array.dtype.isnative:
        return np.array(array, array.dtype.newbyteorder("=").str, order="C")
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else array.copy()


def _each(role: int, values: Sequence[Any]) -> Hashable | None:
    parts = tuple([_part(role, value) for value in values])
    return None if None in parts else parts


def _integers(values: Sequence[Any]) -> Hashable | None:
    return (type(values), *values) if {*map(type, values)} <= _ONLY_INTS else None


def _attribute(value: Any) -> Hashable | None:
    """An attribute by its value: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    kind = type(value)
    if kind is int or kind is bool or kind is str or value is None:
        return kind, value
    if kind is float:
        return kind, value.hex()
    if kind is tuple or kind is list:
        return _integers(value) or _each(_ATTRIBUTE, value)
    if kind in _NUMBERS:
        return kind, value.tobytes()
    return ("type", value) if isinstance(value, (np.dtype, type)) else None


class Recall:
    """What is known of likenesses: of twice ``most`` at most, each of which was met lately.

    Two generations: where the young are too many they become the old ones, and the old are forgotten. ``last`` is, by
    op, what answered a call on arrays alone, and sees by itself whether others are like those. Any number of threads
    read and write all that, and none waits: the worst that may happen is that something is forgotten.
    """

    __slots__ = ("_most", "last", "old", "young")

    def __init__(self, most: int) -> None:
        self._most = most
        self.young: dict[Hashable, Known] = {}
        self.old: dict[Hashable, Known] = {}
        self.last: dict[Hashable, Known] = {}

    def forget(self) -> None:
        """Know nothing any more."""
        self.young, self.old, self.last = {}, {}, {}

    def older(self, key: Hashable) -> Known | None:
        """What was known before those that are young, which it is from now on."""
        found = self.old.get(key)
        if found is not None:
            self.keep(key, found)
        return found

    def meet(self, key: Hashable | None) -> None:
        """Note a call that is the first of its likeness, if it has one."""
        if key is not None:
            self.keep(key, met)

    def keep(self, key: Hashable, known: Known) -> None:
        if len(self.young) >= self._most:
            self.old, self.young = self.young, {}
        self.young[key] = known


RECALL = Recall(1024)
