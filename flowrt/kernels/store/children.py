"""Processes of this package that a process starts beside itself, and that end with it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from flowrt.base.package import search_path

if TYPE_CHECKING:
    import io


def start(module: str, *arguments: str, stdout: int, **environment: str) -> subprocess.Popen[bytes]:
    """A child that runs a module of this package. Its stdin is a pipe, whose end tells it that its parent is gone.

    Raises `OSError` where there can be none.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": search_path(), **environment},
        start_new_session=True,  # an interrupt of the terminal is for this process
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a child of this process, whatever it does."""
    for pipe in filter(None, (process.stdin, process.stdout)):
        with suppress(OSError):
            pipe.close()
    process.kill()
    process.wait()


def disown(process: subprocess.Popen[bytes]) -> None:
    """In a forked child: have no part in a child of the parent's, nor write what the parent has yet to write to it."""
    for pipe in filter(None, (process.stdin, process.stdout)):
        with suppress(OSError):
            cast("io.BufferedReader | io.BufferedWriter", pipe).raw.close()
    process.returncode = 0  # there is nothing to wait for
