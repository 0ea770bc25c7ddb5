"""Programs that tests run as processes of their own, forked from one that has imported what they import.

Imports are most of what a short program costs. One that has to show how it imports, that is given options of Python's,
whose number counts, or that is killed and looked after at once is begun with `sys.executable` itself.
"""

from __future__ import annotations

import gc
import marshal
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from begun import LARGEST, REFUSED

from flowrt.cluster import fork_server

BEGUN = Path(__file__).with_name("begun.py")
IMPORTED = ("flowrt.worker", "flowrt.train", "numba.core.registry", "rich.console")
EARLY = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "OMP_", "OPENBLAS_", "MKL_", "NPY_", "NUMBA_")

_kept: list[_Server] = []


def python() -> list[str]:
    """What a command begins with, in place of `sys.executable`; a program, ``-c`` or ``-m`` comes next."""
    return _kept[-1].command() if _kept and hasattr(os, "pidfd_open") else [sys.executable]


@contextmanager
def kept() -> Iterator[None]:
    """Fork programs meanwhile; those that are left at the end are killed."""
    with ExitStack() as stack:
        _kept.append(_Server(stack))
        stack.callback(_kept.pop)
        yield


class _Server:
    """The process that programs are forked from, started with the first of them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._address = stack, ""

    def command(self) -> list[str]:
        if not self._address:
            self._address = self._start()
        return [sys.executable, "-IS", str(BEGUN), self._address]

    def _start(self) -> str:
        address = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="programs-")) + "/socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(address)
            listening.listen(64)
            process = subprocess.Popen(
                [sys.executable, __file__, str(listening.fileno())],
                stdin=subprocess.PIPE,  # its end is the server's
                stdout=subprocess.DEVNULL,
                pass_fds=[listening.fileno()],
                start_new_session=True,
            )
        self._stack.callback(process.communicate)
        return address


class _Program:
    """A program, to its server, and the socket of who began it."""

    def __init__(self, pid: int, asked: socket.socket) -> None:
        self.pid, self.asked, self.handle = pid, asked, os.pidfd_open(pid)

    def tell_end(self) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with suppress(OSError):  # who began it may be gone
            self.asked.send(code.to_bytes(4, sys.byteorder, signed=True))

    def close(self) -> None:
        self.asked.close()
        os.close(self.handle)


class _Forking:
    """The server's own side."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._programs: list[_Program] = []
        self._events = selectors.PollSelector()
        self._events.register(listening, selectors.EVENT_READ)
        self._events.register(0, selectors.EVENT_READ)

    def run(self) -> Sequence[str]:
        """Returns in programs alone, with the arguments of each."""
        while True:
            for key, _ in self._events.select():
                if key.fileobj == 0:
                    self._end()
                elif key.fileobj is self._listening:
                    arguments = self._fork()
                    if arguments is not None:
                        return arguments
                elif key.data in self._programs:
                    self._follow(key.data, key.fileobj)

    def _end(self) -> None:
        for program in self._programs:
            os.kill(program.pid, signal.SIGKILL)
        os._exit(0)

    def _fork(self) -> Sequence[str] | None:
        asked, _ = self._listening.accept()
        request, files, _, _ = socket.recv_fds(asked, LARGEST, 3)
        with ExitStack() as ours:
            for file in files:
                ours.callback(os.close, file)
            if len(request) < 2:  # who asked is gone, or was told to end before
                asked.close()
                return None
            told = marshal.loads(request)
            if not _is_served(told):
                with asked:
                    asked.send(REFUSED)
                return None
            pid = os.fork()
            if pid:
                self._watch(_Program(pid, asked))
                return None
            for each in (asked, self._listening, *self._programs):
                each.close()
            _become(told, files)
        arguments: Sequence[str] = told["arguments"]
        return arguments

    def _watch(self, program: _Program) -> None:
        self._programs.append(program)
        self._events.register(program.asked, selectors.EVENT_READ, program)
        self._events.register(program.handle, selectors.EVENT_READ, program)

    def _follow(self, program: _Program, event: Any) -> None:
        """It ended, or whoever began it sent a signal on or is gone."""
        if event is not program.asked:
            self._events.unregister(program.handle)
            with suppress(KeyError):
                self._events.unregister(program.asked)
            program.tell_end()
            program.close()
            self._programs.remove(program)
        elif said := program.asked.recv(1):
            os.kill(program.pid, said[0])
        else:
            self._events.unregister(program.asked)
            os.kill(program.pid, signal.SIGKILL)


def _is_served(told: Mapping[str, Any]) -> bool:
    """Whether Python would have imported the same, and is given no options."""
    changed = {name for name, _ in told["environ"].items() ^ os.environ.items()} - {"PYTHONPATH"}
    early = any(name.startswith(EARLY) for name in changed)
    return not early and (told["arguments"][0] in ("-c", "-m") or told["arguments"][0][0] != "-")


def _become(told: Mapping[str, Any], files: Sequence[int]) -> None:
    """Be in this process what one is that was begun so."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environ"])
    sys.path[1:] = [*_paths(told["environ"]), *BASE]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in told["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    sys.modules["numpy"].random.seed()  # no two programs draw the same; Python's own does that by itself


def _paths(environ: Mapping[str, str]) -> list[str]:
    return [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]


BASE = [path for path in sys.path[1:] if path not in _paths(os.environ)]


def _run(what: str, *more: str) -> None:
    """As ``python what more`` does."""
    if what == "-c":
        sys.argv, sys.path[0] = ["-c", *more[1:]], ""
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(more[0], "<string>", "exec"), main.__dict__)
    elif what == "-m":
        sys.argv, sys.path[0] = list(more), os.getcwd()
        sys.modules.pop(more[0], None)
        runpy.run_module(more[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [what, *more], str(Path(what).parent.absolute())
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    for module in IMPORTED:
        import_module(module)
    gc.collect()
    gc.freeze()  # what programs have in common stays so: a collection would write into all of it
    arguments = _Forking(socket.socket(fileno=int(sys.argv[1]))).run()
    with fork_server.kept():
        _run(*arguments)
