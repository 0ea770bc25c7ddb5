"""A side of a comparison as a process: which interpreter runs it, in which environment, and what it answers."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Case:
    """A workload with its settings, the variants of each peer, and what is asked of flowrt: peer time ÷ flowrt time."""

    name: str
    workload: str
    what: str
    peers: dict[str, Sequence[str]]
    target: float
    arguments: Sequence[str] = ()
    unit: str = "us"  # of a step; or "M/s": millions of units of work a second; "s": process start to first step
    topic: str = "steps"  # of sides/, the one that has the workload


def home(peer: str) -> Path:
    """The interpreter of a side; bare sockets need no environment of their own."""
    if peer in ("flowrt", "before", "sockets"):
        return Path(sys.executable)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("FLOWRT_PEERS") or cache / "flowrt-peers") / peer / "bin" / "python"


def command(peer: str, variant: str, case: Case, threads: int, *more: str) -> list[str]:
    flags = ["--variant", variant] if variant and peer != "before" else []
    return [
        str(home(peer)),
        "-m",
        f"sides.{case.topic}.{'flowrt' if peer == 'before' else peer}",
        case.workload,
        *flags,
        "--threads",
        str(threads),
        *case.arguments,
        *more,
    ]


def environment(peer: str = "flowrt", variant: str = "") -> dict[str, str]:
    """The sides' environment: this flowrt, or that of the tree that ``before`` has for a variant, no setting that makes
    OpenBLAS slow, none that keeps Python's bytecode off the disk: the peers' is there since they were installed.
    """
    tree = variant if peer == "before" else str(HERE.parent)
    path = os.pathsep.join([tree, *filter(None, [os.environ.get("PYTHONPATH")])])
    left_out = ("OPENBLAS_CORETYPE", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "PYTHONPATH": path}


class Failed(Exception):
    """A side that cannot be measured, and why."""


class Process:
    """One side, running. What it writes to its standard error is kept for when it fails."""

    def __init__(self, peer: str, variant: str, case: Case, threads: int) -> None:
        self.name = f"{peer} {variant}".strip()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by kill)
        self._said = b""
        self._first: dict[str, Any] | None = None  # a message that came, and that nobody has asked for
        self._late = False  # whether it was ended, as it said nothing in time
        self._process = subprocess.Popen(
            command(peer, variant, case, threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            cwd=HERE,
            env=environment(peer, variant),
        )

    def expect(self, seconds: float) -> None:
        """Wait until the next message is there, which the next `answer` answers; who says none in time is ended."""
        try:
            self._first = self.answer(seconds)
        except Failed:
            self._late = self._process.poll() is None
            self._process.kill()
            raise

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next message; lines that libraries print are passed over."""
        if self._first is not None:
            found, self._first = self._first, None
            return found
        end = time.monotonic() + seconds
        while True:
            line, found, rest = self._said.partition(b"\n")
            if found:
                self._said = rest
                if line.startswith(b"{"):
                    message: dict[str, Any] = json.loads(line)
                    return message
                continue
            self._said += self._more(end - time.monotonic())

    def _more(self, seconds: float) -> bytes:
        out = self._process.stdout
        assert out is not None
        if seconds <= 0 or not select.select([out], [], [], seconds)[0]:
            raise Failed("no answer in time")
        some = os.read(out.fileno(), 1 << 20)
        if not some:
            raise Failed(self._last_words())
        return some

    def _last_words(self) -> str:
        self._process.wait()
        if self._late:
            return "no answer in time"
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"ended with {self._process.returncode}"

    def measure(self, seconds: float) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"measure {seconds}\n".encode())
        said = self.answer(60 + 10 * seconds)
        self.messages: dict[str, float] = said.get("messages", {})  # a step, by role, where that is known
        times: list[float] = said["seconds"]
        return times

    def end(self) -> dict[str, Any]:
        """Let it finish; answers its last message, or none."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return self.answer(30)
        except Failed:
            return {}

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            if file is not None:
                file.close()
