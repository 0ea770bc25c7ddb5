"""Modules of a package whose own code, that of its ``__init__``, need not run for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_wants_modules = ContextVar("_wants_modules", default=False)  # whether this thread imports them, and nothing else


@contextmanager
def without_its_own_code(name: str) -> Iterator[None]:
    """Within, import modules of the package ``name``; its own code runs once somebody asks for what that defines.

    Where it has run already, or there is no such package, this does nothing.
    """
    spec = None if name in sys.modules else find_spec(name)
    if spec is None:
        yield
        return
    package: Any = module_from_spec(spec)
    package.__class__ = _Package
    sys.modules[name] = package
    before = _wants_modules.set(True)
    try:
        yield
    finally:
        _wants_modules.reset(before)


class _Package(ModuleType):
    """A package that has its modules, and gets what its own code defines when it is asked for that."""

    def __getattr__(self, name: str) -> Any:
        if _wants_modules.get():
            raise AttributeError(name)  # upon which Python imports the module of that name
        package: Any = self
        package.__class__ = ModuleType
        package.__spec__.loader.exec_module(self)
        return getattr(self, name)
