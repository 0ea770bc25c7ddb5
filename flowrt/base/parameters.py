"""The signature of an op's function, read: which parameters are tensors, and what the attributes may be."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrt.base.errors import GraphError, SpecError
from flowrt.base.plain import shortened
from flowrt.base.valueclass import valueclass


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


def _written(annotation: Any) -> str:
    """An annotation as the program wrote it, or so that what it names is found in it."""
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def parameters_of(name: str, signature: inspect.Signature) -> tuple[Parameter, ...]:
    """What the function of op ``name`` takes; raises `GraphError` where that does not say what are its tensors."""
    out = []
    given = signature.parameters.values()
    for p in given:
        if _names(p):
            continue
        note = _written(p.annotation)
        tensor = "Operand" in note or "Spec" in note
        many = tensor and "Sequence" in note
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise GraphError(f"op {name}: take Sequence[Spec] rather than *{p.name}")
        placed = p.kind is not p.KEYWORD_ONLY
        if p.annotation is p.empty and not any("Spec" in _written(q.annotation) for q in given):
            raise GraphError(f"op {name}: annotate its tensors, as in {p.name}: fr.Spec; the rest are attributes")
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


_SPECS = re.compile(r"\b(?:\w+\.)*(?:Spec|Result)\b")


class _Note(str):
    """An annotation that signatures show without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def as_called(signature: inspect.Signature) -> inspect.Signature:
    """The signature of an op's function as callers see it, who pass and get tensors or arrays.

    Without ``name``, which every op takes: it is the node's.
    """
    seen = [
        p.replace(annotation=_seen(p.annotation, "Operand")) for p in signature.parameters.values() if not _names(p)
    ]
    answer = signature.return_annotation
    outputs = _Note("Operation") if answer in (None, "None") else _seen(answer, "TensorOrArray")
    return inspect.Signature(seen, return_annotation=outputs)


def _names(p: inspect.Parameter) -> bool:
    """Whether this is not the op's, but the name that the node is given."""
    return p.name == "name" and p.kind is p.KEYWORD_ONLY


def _seen(annotation: Any, tensor: str) -> Any:
    """An annotation with ``tensor`` where it says `Spec`."""
    return annotation if annotation is inspect.Signature.empty else _Note(_SPECS.sub(tensor, _written(annotation)))
