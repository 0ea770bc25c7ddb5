"""The bundle's builder, started beside a program that finds none: a process that ends with this one.

It takes only time that nobody wants, and what it has compiled is kept, so several short programs build it as well as a
long one. ``FLOWRT_BUILD=never`` leaves the bundle to ``python -m flowrt.standard build``.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import subprocess
from functools import cache
from typing import TYPE_CHECKING

from flowrt.kernels.store.bundle import bundle_path
from flowrt.kernels.store.children import disown, end, start
from flowrt.kernels.store.folder import cache_folder
from flowrt.kernels.store.objects import bundle

if TYPE_CHECKING:
    from pathlib import Path

_builders: list[subprocess.Popen[bytes]] = []
_log = logging.getLogger(__name__)


def build_standard_kernels() -> None:
    """Start the builder, once per process and folder, if there is no bundle. Never waits, never fails."""
    if os.environ.get("FLOWRT_BUILD") != "never" and not len(bundle()):
        _start(cache_folder())


def _is_being_built(path: Path) -> bool:
    """Whether a process builds the bundle at ``path``: a cluster's nodes leave it to whom their client has started.

    Who finds that nobody does starts one, which takes the lock, so that to try it here keeps no builder from it.
    """
    try:
        handle = os.open(path.with_suffix(".building"), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


@cache
def _start(folder: Path) -> None:
    if _is_being_built(bundle_path(folder)):
        return
    try:
        command = "flowrt.standard", "build", "--background"
        builder = start(*command, stdout=subprocess.DEVNULL, FLOWRT_CACHE=str(folder))
    except OSError as error:
        _log.debug("no builder: %s", error)
        return
    _builders.append(builder)


@atexit.register
def stop_building() -> None:
    """End the builder, if there is one."""
    while _builders:
        end(_builders.pop())


def _forget() -> None:
    """A forked child has no builder: the parent's is not its own."""
    for builder in _builders:
        disown(builder)
    _builders.clear()


os.register_at_fork(after_in_child=_forget)
