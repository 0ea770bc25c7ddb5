"""The signature of an op's function, read: which parameters are tensors, and what the attributes may be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flowrt.errors import GraphError, SpecError
from flowrt.plain import shortened
from flowrt.valueclass import valueclass


@valueclass
class Parameter:
    """One parameter of an op's signature."""

    name: str
    tensor: bool
    many: bool  # a sequence of tensors
    optional: bool  # a tensor that may be None
    dtype: bool  # an attribute that names a dtype
    placed: bool  # whether it may be given by position
    kinds: tuple[type, ...]  # of what an attribute may be, where its annotation says
    default: Any

    def check(self, value: Any) -> None:
        """Raise `SpecError` where an attribute cannot be ``value``."""
        if type(value) in (self.kinds or _PLAIN):
            return
        if hasattr(value, "builder") or hasattr(value, "__tensor__"):
            raise SpecError(
                f"{self.name} is an attribute, known while the graph is built, and not a tensor: {value!r}; "
                "an op of your own takes a tensor where you annotate it fr.Spec"
            )
        if self.kinds and not isinstance(value, self.kinds):
            told = [kind for kind in self.kinds if kind in _KIND_NAMES and not (kind is int and float in self.kinds)]
            wanted = " or ".join(_KIND_NAMES[kind] for kind in told)
            raise SpecError(f"{self.name} is {wanted}, got {shortened(value)}")


_PLAIN = (bool, int, float, str, tuple, type(None))  # what most attributes are, and no tensor is

_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool, np.bool_),
    "int": (int, np.integer),
    "float": (float, int, np.floating, np.integer),
    "str": (str,),
    "None": (type(None),),
}
_KIND_NAMES = {bool: "True or False", int: "an integer", float: "a number", str: "a string", type(None): "None"}


def _kinds(note: str) -> tuple[type, ...]:
    """What an attribute annotated so may be; nothing where that is not told by its type."""
    parts = [part.strip() for part in note.split("|")]
    return tuple(kind for part in parts for kind in _KINDS[part]) if all(part in _KINDS for part in parts) else ()


def parameters_of(fn: Callable[..., Any]) -> tuple[Parameter, ...]:
    """What an op's function takes; raises `GraphError` where that does not say what are its tensors."""
    out = []
    signature = inspect.signature(fn).parameters
    for p in signature.values():
        note = p.annotation if isinstance(p.annotation, str) else getattr(p.annotation, "__name__", str(p.annotation))
        tensor = "Spec" in note
        many = tensor and "Sequence" in note
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise GraphError(f"op {fn.__name__}: take Sequence[Spec] rather than *{p.name}")
        placed = p.kind is not p.KEYWORD_ONLY
        if p.annotation is p.empty and not any("Spec" in str(q.annotation) for q in signature.values()):
            raise GraphError(
                f"op {fn.__name__}: annotate its tensors, as in {p.name}: fr.Spec; the rest are attributes"
            )
        out.append(
            Parameter(
                p.name,
                tensor,
                many,
                tensor and "None" in note,
                note == "DType",
                placed,
                () if tensor else _kinds(note),
                p.default,
            )
        )
    return tuple(out)


SIZES = frozenset({"shape", "count", "stop", "step"})  # tensor parameters whose values decide the outputs' sizes


def size_positions(parameters: Sequence[Parameter], attrs: Mapping[str, Any]) -> list[int]:
    """Positions among an op's inputs, as bound by ``attrs``, of those whose values decide its outputs' sizes."""
    found: list[int] = []
    position = 0
    tensors = [p for p in parameters if p.tensor and p.name not in attrs.get("_none", ())]
    decisive = SIZES | {"start"} if any(p.name == "stop" for p in tensors) else SIZES
    for parameter in tensors:
        count = int(attrs["_many"]) if parameter.many else 1
        if parameter.name in decisive:
            found += range(position, position + count)
        position += count
    return found
