"""Every error flowrt raises, by whose fault it is, and where in the user's program it began.

The caller's (`GraphError`, `FeedError`), a peer's (`RemoteError`), the world's (`ResourceError`), use after close
(`ClosedError`), or a bug of ours (`InternalError`). An error that crosses the wire is named by its class and rebuilt
from `BY_NAME`; nothing is imported by name.
"""

from __future__ import annotations

import contextlib
import os
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.package import PACKAGE
from flowrt.base.valueclass import valueclass

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_PACKAGE = f"{PACKAGE}{os.sep}"
_LIBRARY = os.path.dirname(contextlib.__file__)
# Between the user's lines and ours: what enters `with` blocks and decorated functions, and what runs tasks.
# And NumPy's and `copy`'s, whose functions call methods of tensors.
_BETWEEN = (
    _PACKAGE,
    contextlib.__file__,
    os.path.join(_LIBRARY, "asyncio") + os.sep,
    os.path.join(_LIBRARY, "copy.py"),
    os.path.dirname(np.__file__) + os.sep,
)


class FlowrtError(Exception):
    """Root of every error raised on purpose."""


class GraphError(FlowrtError):
    """The caller's program is wrong: a graph, fetch or feed that cannot mean anything."""


class SpecError(GraphError):
    """Shapes, dtypes or attributes that an op does not accept."""

    located = False  # whether the text names the op and the user's line


class GraphFinalizedError(GraphError):
    """An op was added to a graph that a session already runs."""


class PlacementError(GraphError):
    """A node cannot be put where it was asked to be, or nowhere at all.

    ``missing`` is the device that it was asked to be on, where there is none such.
    """

    missing: Any = None


class FeedError(FlowrtError):
    """A fed value is missing, misshapen or of another dtype."""


class DeadTensorError(FlowrtError):
    """A fetched tensor lies on the branch of a switch that was not taken."""


class QueueClosedError(FlowrtError):
    """The queue is closed: nothing more can be enqueued, and nothing is left to dequeue."""


class WouldBlock(FlowrtError):
    """An operation that does not wait would have to."""


class ClosedError(FlowrtError):
    """A session, cluster, connection or queue was used after it was closed."""


class StepTimeout(FlowrtError):
    """A step did not finish within its ``timeout``; it was cancelled and left nothing behind."""


class StepCancelled(FlowrtError):
    """A step was cancelled before it finished."""


class ResourceError(FlowrtError):
    """Memory, disk, ports or descriptors ran out."""


class DeviceLost(FlowrtError):
    """A device failed so that nothing can be computed on it any more; its node, and other devices, go on."""


class CheckpointError(FlowrtError):
    """A checkpoint could not be written, or none that is whole could be read."""


class LedgerError(FlowrtError):
    """A ledger could not be written, is damaged, or is not what it is taken for."""


class RemoteError(FlowrtError):
    """Another node, or the way to it, failed."""


class NodeLost(RemoteError):
    """A node died or cannot be reached."""


class LinkBroken(RemoteError):
    """The way to a node broke in the middle of a step. The node itself may be well: the step may be run again."""


class TakenOver(RemoteError):
    """Another master of the same session name took over: this one is not obeyed any more."""


class NoDescriptors(RemoteError, ResourceError):
    """This process may open no more files, so no more connections."""


class AuthenticationError(RemoteError):
    """A token was missing or wrong."""


class VersionMismatch(RemoteError):
    """The other end speaks another version of the protocol."""


class BrokenStream(RemoteError):
    """A peer sent something that is not a legal message."""


class InternalError(FlowrtError):
    """A bug in flowrt; please report it."""


def _family(root: type[FlowrtError]) -> dict[str, type[FlowrtError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _family(child)
    return found


BY_NAME = _family(FlowrtError)
LONGEST_TEXT = 1 << 14  # characters of an error that travel


def name_error(error: BaseException) -> tuple[str, str]:
    """The class and text of ``error`` as they travel. What is not ours is a bug, or the kernel author's."""
    match error:
        case FlowrtError():
            name, text = type(error).__name__, str(error)
        case MemoryError():
            name, text = ResourceError.__name__, f"out of memory: {error}"
        case _:
            name, text = InternalError.__name__, f"{type(error).__name__}: {error}"
    return name, text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "…"


def as_error(name: str, text: str) -> FlowrtError:
    """The error that a peer named; a class we do not know is a `RemoteError`."""
    return BY_NAME.get(name, RemoteError)(text)


@valueclass
class Site:
    """A line of the user's program."""

    file: str
    line: int

    def __str__(self) -> str:
        here = os.getcwd() + os.sep
        return f"{self.file.removeprefix(here)}:{self.line}"


def how_to_bring(what: str) -> str:
    """What to do so that a node knows ``what`` a module of the user's defines."""
    return (
        f"bring the module that defines {what}, which may be a file beside the program: by --import MODULE where the "
        "node is started, LocalCluster(imports=[MODULE]) where it is one of those"
    )


carried_site: ContextVar[Site | None] = ContextVar("flowrt_carried_site", default=None)
"""The user's line, where a call of theirs is carried to a thread on whose stack it is not."""


@contextmanager
def from_site(site: Site | None) -> Iterator[None]:
    """Have what is built or refused inside be of the user's line ``site``, without looking for it on the stack."""
    token = carried_site.set(site)
    try:
        yield
    finally:
        carried_site.reset(token)


def user_site() -> Site:
    """The innermost line on the stack that is neither flowrt's own nor the standard library's between them."""
    carried = carried_site.get()
    if carried is not None:
        return carried
    frame = sys._getframe(1)
    while (outer := frame.f_back) is not None:
        file = frame.f_code.co_filename
        if not _is_between(file_of(frame) if file == "<string>" else file):
            break
        frame = outer
    return _site(frame.f_code.co_filename, frame.f_lineno)


def path_of(value: Any, what: str) -> str:
    """``value`` as the path of ``what``; raises `GraphError` for any other thing, as a number, which names a descriptor
    that is somebody's."""
    path = os.fsdecode(value) if isinstance(value, (str, bytes, os.PathLike)) else "\0"
    if "\0" in path:
        raise GraphError(f"{user_site()}: {what} is told by its path, not {value!r:.80}")
    return path


def not_written(path: str | os.PathLike[str], error: OSError) -> GraphError:
    """The error of a file that could not be written."""
    folder = os.path.dirname(os.fspath(path)) or "."
    fix = "" if os.path.isdir(folder) else f"; make the folder {folder} first"
    return GraphError(f"{user_site()}: {os.fspath(path)} cannot be written: {error.strerror or error}{fix}")


def no_thread(error: BaseException) -> ResourceError:
    """The error of a thread, or a process, that could not be started."""
    return ResourceError(
        f"there can be no more threads or processes ({error}); raise `ulimit -u`, the limit of memory, or the cgroup's "
        "of pids"
    )


def file_of(frame: FrameType) -> str:
    """Where its code stands; of what `dataclass` writes for a class of ours, flowrt's folder."""
    file = frame.f_code.co_filename
    return _PACKAGE if file == "<string>" and frame.f_globals.get("__name__", "").startswith("flowrt.") else file


@lru_cache(maxsize=4096)
def _is_between(file: str) -> bool:
    return file.startswith(_BETWEEN)


_site = lru_cache(maxsize=4096)(Site)  # many nodes are built on one line
