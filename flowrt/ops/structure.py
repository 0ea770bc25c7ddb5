"""Nestings of lists, tuples, dicts and slices: taken apart into leaves, and put together again around other leaves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from flowrt.base.valueclass import valueclass
from flowrt.ops.slices import IndexedSlices

_DICTS = (dict, OrderedDict)


@valueclass
class Structure:
    """The form of a nesting: a leaf, or a container of forms.

    ``names`` are a dict's keys, or what slices have beside their tensors.
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
        parts = [part._build(leaves) for part in self.parts]
        if self.kind in _DICTS:
            return self.kind(zip(self.names, parts, strict=True))
        if self.kind is IndexedSlices:
            values, indices = parts
            return IndexedSlices(values, indices, *self.names)
        return self.kind(*parts) if hasattr(self.kind, "_fields") else self.kind(parts)


LEAF = Structure()


def flatten(value: Any) -> tuple[Structure, list[Any]]:
    """The form of ``value`` and its leaves, in order."""
    leaves: list[Any] = []
    return _flatten(value, leaves), leaves


def _flatten(value: Any, leaves: list[Any]) -> Structure:
    if isinstance(value, dict):
        kind = type(value) if type(value) in _DICTS else dict
        return Structure(kind, tuple(value), tuple(_flatten(v, leaves) for v in value.values()))
    if isinstance(value, (list, tuple)):
        return Structure(type(value), (), tuple(_flatten(v, leaves) for v in value))
    if isinstance(value, IndexedSlices):
        parts = _flatten(value.values, leaves), _flatten(value.indices, leaves)
        return Structure(IndexedSlices, (value.shape, value.absent), parts)
    leaves.append(value)
    return LEAF
