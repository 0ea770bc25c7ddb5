"""Everything that decides what a kernel compiles to, as one text: its code, and all that its code refers to.

Pure. Helpers and closures are followed, constants taken by value, dataclasses field by field, so that no fact that they
gain can be left out; line numbers, docstrings and comments do not count, nor where in this package a
file lies.
What the standard library, NumPy and Numba hold is told by their versions, which are not this file's matter.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

_VERSIONED = sys.stdlib_module_names | {"numpy", "numba", "llvmlite"}
_ROOTS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_STEPS = ("LOAD_ATTR", "LOAD_METHOD")
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
_HAS_DOCSTRING = getattr(inspect, "CO_HAS_DOCSTRING", 0)  # from Python 3.14; before, the first constant is kept for it


@lru_cache(4096)
def fingerprint(code: Hashable) -> str:
    """What tells a function, or a frozen dataclass of functions and plain data, from every other that compiles to
    something else; equal in every process."""
    return _describe(code, frozenset())


@lru_cache(4096)
def raises(function: Callable[..., Any]) -> bool:
    """Whether ``function``, or a helper that it calls, has a line that raises."""
    return _raises(function, frozenset())


def _raises(value: Any, seen: frozenset[Any]) -> bool:
    value = inspect.getattr_static(value, "py_func", value)
    if not isinstance(value, FunctionType) or value in seen:
        return False
    if any(instruction.opname == "RAISE_VARARGS" for instruction in dis.get_instructions(value.__code__)):
        return True
    known = {**value.__globals__, **_closure(value)}
    paths = [path for path in _paths(value.__code__) if path[0] in known]
    return any(_raises(_follow(known[path[0]], path[1:]), seen | {value}) for path in paths)


@lru_cache(4096)
def _alone(function: FunctionType) -> str:
    return _function(function, frozenset({function}))


def _describe(value: Any, seen: frozenset[Any]) -> str:
    if type(value) in _PLAIN:  # nearly all that a loop's program holds
        return repr(value)
    if type(value) is tuple:
        return f"tuple({', '.join([_describe(v, seen) for v in value])})"
    value = inspect.getattr_static(value, "py_func", value)  # what Numba's own decorators wrap
    if isinstance(value, FunctionType):
        if not seen:
            return _alone(value)  # a program has the same few functions many times
        return "recursion" if value in seen else _function(value, seen | {value})
    if isinstance(value, (ModuleType, type)):
        names = getattr(value, "_fields", ())  # of a named tuple, whose order decides what a name stands for
        return f"{_module(value)}.{value.__name__}{names or ''}"
    if is_dataclass(value):
        held = ", ".join(f"{field.name}={_describe(getattr(value, field.name), seen)}" for field in fields(value))
        return f"{type(value).__name__}({held})"
    if isinstance(value, (np.ndarray, np.generic)):  # whose repr rounds and elides
        entries = hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()
        return f"{type(value).__name__}({value.dtype.str}, {value.shape}, {entries})"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(_describe(v, seen) for v in value)})"
    if isinstance(value, (set, frozenset)):  # whose order differs between processes
        return f"set({', '.join(sorted(_describe(v, seen) for v in value))})"
    return repr(value)


def _module(value: ModuleType | type) -> str:
    """The module of a class, but for this package's own: where in it one stands changes no code."""
    module = str(getattr(value, "__module__", ""))
    return "" if module.startswith("flowrt.") else module


def _function(function: FunctionType, seen: frozenset[Any]) -> str:
    known = {**function.__globals__, **_closure(function)}
    parts = list(_text(function.__code__))
    parts.append(_describe(function.__defaults__, seen))
    parts.append(_describe(tuple(sorted((function.__kwdefaults__ or {}).items())), seen))
    paths = [path for path in _paths(function.__code__) if path[0] in known]
    parts += [f"{'.'.join(path)}={_describe(_follow(known[path[0]], path[1:]), seen)}" for path in paths]
    return f"({';'.join(parts)})"


def _closure(function: FunctionType) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != type(cell)()}


def _follow(value: Any, path: tuple[str, ...]) -> Any:
    """What ``value.a.b`` means to the compiler: attributes of the user's modules and classes are constants."""
    for name in path:
        if not isinstance(value, (ModuleType, type)) or _versioned(value) or not hasattr(value, name):
            break
        value = getattr(value, name)
    return value


def _versioned(value: Any) -> bool:
    module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return module.partition(".")[0] in _VERSIONED - {"__main__"}


@lru_cache(4096)
def _text(code: CodeType) -> tuple[str, ...]:
    return tuple(_code(code))


def _code(code: CodeType) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_exceptiontable.hex()} {code.co_flags} {code.co_argcount}"
    yield repr((code.co_kwonlyargcount, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
    for constant in code.co_consts[1 if _documented(code) else 0 :]:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            yield _describe(constant, frozenset())


def _documented(code: CodeType) -> bool:
    if _HAS_DOCSTRING:
        return bool(code.co_flags & _HAS_DOCSTRING)
    return not code.co_name.startswith("<") and isinstance(code.co_consts[0], str)


@lru_cache(4096)  # many kernels call the same helpers
def _paths(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """The dotted names of globals and closures that the code loads, in order."""
    return tuple(sorted(set(_loads(code))))


def _loads(code: CodeType) -> Iterator[tuple[str, ...]]:
    path: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if path and instruction.opname not in _STEPS:
            yield path
            path = ()
        if instruction.opname in _ROOTS:
            path = (str(instruction.argval),)
        elif path:
            path = (*path, str(instruction.argval))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _loads(constant)
