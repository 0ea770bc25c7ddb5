"""Nestings of lists, tuples, dicts, slices and split gradients: taken apart into leaves, and put together again around
other leaves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType
from typing import Any

from flowrt.base.valueclass import valueclass
from flowrt.ops.routing import SplitGradient
from flowrt.ops.slices import IndexedSlices

_DICTS = (dict, OrderedDict)


@valueclass
class Structure:
    """The form of a nesting: a leaf, nothing, or a container of forms.

    ``names`` are a dict's keys, what slices have beside their tensors, or the partition of a split gradient.
    """

    kind: type | None = None
    names: tuple[Any, ...] = ()
    parts: tuple[Structure, ...] = ()

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The nesting with ``leaves`` in it, in the order `flatten` found them."""
        return self._build(iter(leaves))

    def _build(self, leaves: Iterator[Any]) -> Any:
        if self.kind is None:
            return next(leaves)
        if self.kind is NoneType:
            return None
        parts = [part._build(leaves) for part in self.parts]
        if self.kind in _DICTS:
            return self.kind(zip(self.names, parts, strict=True))
        if self.kind is IndexedSlices:
            values, indices = parts
            return IndexedSlices(values, indices, *self.names)
        if self.kind is SplitGradient:
            return SplitGradient(self.names[0], parts)
        return self.kind(*parts) if hasattr(self.kind, "_fields") else self.kind(parts)


LEAF = Structure()
NOTHING = Structure(NoneType)


def flatten(value: Any, parts: bool = False) -> tuple[Structure, list[Any]]:
    """The form of ``value`` and its leaves, in order.

    A split gradient is a leaf, as the tensor of the whole, unless it is to come apart into its ``parts``.
    """
    leaves: list[Any] = []
    return _flatten(value, leaves, parts), leaves


def _flatten(value: Any, leaves: list[Any], parts: bool) -> Structure:
    def forms(values: Iterable[Any]) -> tuple[Structure, ...]:
        return tuple([_flatten(each, leaves, parts) for each in values])

    if isinstance(value, dict):
        kind = type(value) if type(value) in _DICTS else dict
        return Structure(kind, tuple(value), forms(value.values()))
    if isinstance(value, (list, tuple)):
        return Structure(type(value), (), forms(value))
    if isinstance(value, IndexedSlices):
        return Structure(IndexedSlices, (value.shape, value.absent), forms((value.values, value.indices)))
    if parts and isinstance(value, SplitGradient):
        of_parts = tuple([NOTHING if part is None else _flatten(part, leaves, parts) for part in value.parts])
        return Structure(SplitGradient, (value.partition,), of_parts)
    leaves.append(value)
    return LEAF


def leaves_of(form: Structure) -> int:
    """How many leaves a nesting of that form has."""
    return 1 if form.kind is None else sum(map(leaves_of, form.parts))


def loose(form: Structure) -> Any:
    """``form`` as far as a body must keep it: a list does for a tuple, and a tensor for a sequence of one."""
    if form.kind is None:
        return "leaf"
    parts = tuple(map(loose, form.parts))
    if form.kind is dict:
        return dict, form.names, parts
    return parts[0] if len(parts) == 1 else parts


def written(form: Structure, kept: Iterable[bool]) -> str:
    """A form as errors show it, some leaves of which are kept as tensors."""
    leaves = ["tensor" if keep else "operation or None" for keep in kept]
    return str(shown(form).rebuild(leaves)).replace("'", "")


def shown(form: Structure) -> Structure:
    """A form that words may be in where slices have tensors."""
    parts = tuple(map(shown, form.parts))
    if form.kind is IndexedSlices:
        return Structure(dict, ("values", "indices"), parts)
    return Structure(form.kind, form.names, parts)
