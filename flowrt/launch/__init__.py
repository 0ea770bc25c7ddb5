"""Launchers: what starts nodes on somebody else's cluster. `flowrt.launch.ray` has them as actors of Ray."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from flowrt.base.familiar import absent as _absent

if _TYPE_CHECKING:
    from flowrt.launch import ray

__all__ = ["ray"]


def __getattr__(name: str) -> _Any:
    if name not in __all__:
        raise _absent("fr.launch", globals(), name)
    return _import_module(f"flowrt.launch.{name}")
