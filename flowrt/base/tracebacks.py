"""What a traceback tells a user: their own lines, not the way from one to the next through flowrt and asyncio.

Law: a public function that lets an error out has `shorten` take away the frames between, and the causes that say
nothing the error does not say. What the user's own code raised keeps its lines and its causes. Of an error that nobody
raised on purpose the innermost line stays: it is a bug, and that line is what to report. ``FLOWRT_FULL_TRACEBACK=1``
leaves all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import iscoroutinefunction
from types import FunctionType, TracebackType
from typing import Any, TypeVar, cast

from flowrt.base.errors import FlowrtError, InternalError, file_of
from flowrt.base.package import PACKAGE

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = f"{PACKAGE}{os.sep}"
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_COMPILED = ("<frozen ", f"uvloop{os.sep}")
_TOOLS = tuple(f"-packages{os.sep}{name}{os.sep}" for name in ("numba", "llvmlite", "numpy", "aiohttp", "msgpack"))
_FREQUENT = ("__init__", "__repr__", "__tensor__")
_BETWEEN = (_PACKAGE, *_COMPILED, *(_LIBRARY + name for name in ("asyncio", "concurrent", "contextlib", "threading")))


def brief(function: F) -> F:
    """Decorator of a public function: what it raises is shortened, and does not show the decorator either.

    Of a class: the same for its public methods and operators, though not for what is called for every tensor there is.
    """
    if isinstance(function, type):
        for name, method in list(vars(function).items()):
            if isinstance(method, FunctionType) and name not in _FREQUENT and (name[0] != "_" or name[:2] == "__"):
                setattr(function, name, brief(method))
        return function

    if iscoroutinefunction(function):

        @wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            try:
                return await function(*args, **kwargs)
            except BaseException as error:
                shorten(error)
                raise

        return cast("F", awaited)

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            shorten(error)
            raise

    return cast("F", called)


def shorten(error: BaseException) -> None:
    """Take what is not the user's out of the traceback of ``error`` and of those it is chained to.

    For ``except BaseException as error: shorten(error); raise``, which does not add the line it stands in.
    """
    if _are_full():
        return
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = _told(link)
        link = _rechained(link)


def unmark(error: BaseException | None) -> None:
    """Take the row of ``^^^`` from under the first line of an error of ours that leaves a block of the user's.

    `asyncio.run` alone takes nine lines. Only where the code has an instruction that belongs to no place in the source,
    as what ends a ``with`` block has.
    """
    trace = error.__traceback__ if isinstance(error, FlowrtError) else None
    if error is None or trace is None or _are_full():
        return
    places = enumerate(trace.tb_frame.f_code.co_positions())
    nowhere = next((2 * number for number, (line, *_) in places if line is None), trace.tb_lasti)
    error.__traceback__ = TracebackType(trace.tb_next, trace.tb_frame, nowhere, trace.tb_lineno)


def is_of_ours(error: BaseException) -> bool:
    """Whether ``error`` came about in flowrt, or what it calls, and not in code of the user's that it calls."""
    return not any(map(_is_users, _entries(error.__traceback__)))


def _are_full() -> bool:
    """Whether all is to be left as it is."""
    return os.environ.get("FLOWRT_FULL_TRACEBACK", "0") not in ("", "0")


def _told(error: BaseException) -> TracebackType | None:
    """The lines of ``error`` to tell: the user's first and what follows, without ours; else the last of a bug."""
    entries = list(_entries(error.__traceback__))
    if not any(_file(entry).startswith(_PACKAGE) for entry in entries):
        return error.__traceback__  # none of our business
    first = next((place for place, entry in enumerate(entries) if _is_users(entry)), len(entries))
    told = [entry for entry in entries[first:] if not _file(entry).startswith(_BETWEEN)]
    last = entries[-1]
    if _is_unexpected(error) and (not told or told[-1] is not last):
        told.append(last)
    trace: TracebackType | None = None
    for entry in reversed(told):
        trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace


def _rechained(error: BaseException) -> BaseException | None:
    """What ``error`` is still chained to: of an error of ours, the first that comes from the user's code."""
    link = _link(error)
    if _is_unexpected(error):
        return link
    telling, silent = link, []
    while telling is not None and telling not in silent and not any(map(_is_users, _entries(telling.__traceback__))):
        silent.append(telling)
        telling = _link(telling)
    if not silent:
        return link
    for other in silent:
        other.__traceback__ = None
    told = None if telling in silent else telling
    error.__context__, error.__cause__ = link, told  # without a cause, Python does not print the context either
    return told


def _link(error: BaseException) -> BaseException | None:
    """What Python prints above ``error``."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_unexpected(error: BaseException) -> bool:
    """Whether this is none of the errors that flowrt raises on purpose, nor a way to stop it."""
    return isinstance(error, Exception) and (
        isinstance(error, InternalError) or not isinstance(error, (FlowrtError, TimeoutError))
    )


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _file(entry: TracebackType) -> str:
    return file_of(entry.tb_frame)


def _is_users(entry: TracebackType) -> bool:
    file = _file(entry)
    if file.startswith((_PACKAGE, *_COMPILED)) or any(tool in file for tool in _TOOLS):
        return False
    return not file.startswith(_LIBRARY) or "-packages" + os.sep in file
