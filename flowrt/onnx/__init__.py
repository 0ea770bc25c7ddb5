"""Models of ONNX, both ways: `load` makes a graph of one, `save` writes one of what a graph computes.

Law: a model means here what ONNX says that it means, or is refused: with one error that lists all that stands in the
way. What nodes mean is in ``reading/``, a function for each of ONNX's ops; how ops are said in ONNX in ``writing/``.
The package ``onnx`` is imported with the first call, and by this room alone.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from flowrt.base.familiar import absent as _absent

if _TYPE_CHECKING:
    from flowrt.onnx import backend
    from flowrt.onnx.loading import LoadedModel, load
    from flowrt.onnx.saving import save

__all__ = ["LoadedModel", "backend", "load", "save"]

_PLACES = {"LoadedModel": "loading", "load": "loading", "save": "saving"}


def __getattr__(name: str) -> _Any:
    if name not in __all__:
        raise _absent("fr.onnx", globals(), name)
    try:
        module = _import_module(f"flowrt.onnx.{_PLACES.get(name, name)}")
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise ImportError("models of ONNX need the package onnx: pip install 'flowrt[onnx]'") from error
    return getattr(module, name) if name in _PLACES else module


def __dir__() -> list[str]:
    return sorted(__all__)
