"""A node as a process: what it is started with, and what it says on stdout while it starts."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

from flowrt.base.errors import ResourceError, no_thread
from flowrt.base.package import search_path
from flowrt.cluster.tasks import split_task
from flowrt.net.door.descriptors import out_of_descriptors

if TYPE_CHECKING:
    from asyncio import StreamReader
    from pathlib import Path

ENDS = 2.0  # seconds in which a node that says no more has ended
FAILED = "flowrt worker: "  # what a node's reason not to start begins with
_READY = re.compile(r" ready on (\S+)$")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class _Pipe(Protocol):
    def write(self, data: bytes, /) -> object: ...
    def close(self) -> None: ...


class Process(Protocol):
    """A node's process as its cluster uses it: one of `asyncio.subprocess`, or of a fork server."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def stdin(self) -> _Pipe | None: ...
    @property
    def stdout(self) -> StreamReader | None: ...
    async def wait(self) -> int: ...
    def send_signal(self, signal: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def environment(threads: int, paths: Iterable[str]) -> dict[str, str]:
    """Ours, with the libraries' own threads bounded, and this very flowrt to be found first, then ``paths``."""
    path = search_path(os.path.abspath(path) for path in paths)
    return os.environ | dict.fromkeys(_THREADS, str(threads)) | {"PYTHONPATH": path}


def arguments(
    task: str, bind: str, options: Mapping[str, Any], imports: Iterable[str], delay: str, folder: Path
) -> list[str]:
    """What a node's command says of it. A ``delay`` lies in ``folder``: a trace may be longer than an argument."""
    job, number = split_task(task)
    told = {"job": job, "task": number, "bind": bind, **options}
    if delay:
        file = folder / f"{job}-{number}.delay"
        file.write_text(delay, encoding="utf-8")
        told["delay"] = f"@{file}"
    given = [f"--{name}={value}" for name, value in told.items()]
    return ["--die-with-parent", *given, *(f"--import={module}" for module in imports)]


def keys_folder(asked: bool | str | os.PathLike[str], made: ExitStack) -> str | None:
    """The folder of a cluster's keys, if some are ``asked`` for: that one, or one whose keys are made here.

    What is made lasts until ``made`` is closed, as long as the cluster.
    """
    if not isinstance(asked, bool):
        return os.fspath(asked)
    if not asked:
        return None
    from flowrt.cluster.keys import ANY, make_keys  # needs an extra

    folder = made.enter_context(TemporaryDirectory(prefix="flowrt-keys-"))
    make_keys(folder, [ANY])
    return folder


def address_in(task: str, line: str) -> str | None:
    """Where a node listens, if this ``line`` of its stdout says so; what a user's modules print is theirs.

    Raises `ResourceError` where it says why the node did not start.
    """
    if line.startswith(FAILED):
        raise ResourceError(f"{task} did not start: {line.removeprefix(FAILED)}")
    said = _READY.search(line)
    return said and said[1]


@contextmanager
def being_started(task: str) -> Iterator[None]:
    """Raise `ResourceError` where the system gives a node no process, or asyncio no thread to wait for its end."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, BlockingIOError) or "new thread" in str(error):
            why: object = no_thread(error)
        elif isinstance(error, OSError):
            why = out_of_descriptors(error) or error
        else:
            raise
        raise ResourceError(f"{task} cannot be started: {why}") from error


def ended_early(task: str, line: str, code: int | None = None) -> ResourceError:
    """What became of a node that said nothing of use, at last that ``line``, and ended with ``code``, if it did."""
    how = f" by {_name_of(-code)}" if code is not None and code < 0 else ""
    fix = ", or raise `ulimit -u`: where there can be no more threads libuv aborts" * (code == -signal.SIGABRT)
    return ResourceError(
        f"{task} did not start: its process ended{how}, or said {line!r}; see its last words on stderr{fix}"
    )


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of those in real time
        return f"signal {number}"


async def ready(task: str, process: Process) -> str:
    """The address that a node says when it is ready. Raises `ResourceError` if it does not start."""
    assert process.stdout is not None
    line = ""
    async for said in process.stdout:
        line = said.decode(errors="replace").rstrip()
        if (address := address_in(task, line)) is not None:
            return address
    with suppress(TimeoutError):
        async with asyncio.timeout(ENDS):
            await process.wait()
    raise ended_early(task, line, process.returncode)


def send(process: Process, how: str) -> None:
    """``terminate`` or ``kill`` a process that may have ended meanwhile."""
    if process.returncode is None:
        try:
            getattr(process, how)()
        except ProcessLookupError:
            return


async def end(processes: Sequence[Process], grace: float, *, in_order: bool = True) -> None:
    """End processes: asked first, then forced. Those that need not leave ``in_order`` are told that we are gone."""
    for process in processes:
        send(process, "terminate")
        if not in_order:
            close_stdin(process)
    try:
        async with asyncio.timeout(grace):
            await _ended(processes)
    except TimeoutError:
        for process in processes:
            send(process, "kill")
        await _ended(processes)
    for process in processes:
        close_stdin(process)


async def _ended(processes: Sequence[Process]) -> None:
    for process in processes:
        await process.wait()


def tell_token(process: Process, token: str) -> None:
    """Say the token to a node that was started with ``--token-file=-``."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended, and `ready` says why
        process.stdin.write(token.encode() + b"\n")


def close_stdin(process: Process) -> None:
    """Let a node know that nobody holds its stdin any more."""
    if process.stdin is not None:
        process.stdin.close()
