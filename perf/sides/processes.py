"""What the sides share whose work is done by several processes: how they are told to measure, and how they answer.

A side is a script whose first process `serve`s: it says on its standard output, one JSON object a line, that it is
ready (and which process has which role, so that what each spends can be read from outside), answers each ``measure
SECONDS`` line of its standard input with the seconds of every step, and at its end says whether its variables are what
so many steps make of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIRST = 5  # steps before anything is measured, whose results are checked at once
FEWEST = 3  # steps that are asked for at once
WARM_UP_SECONDS = 0.5
PR_SET_PDEATHSIG = 1  # of prctl, on Linux


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line asks for."""

    workload: str
    variant: str
    workers: int
    threads: int


def settings() -> Settings:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload")
    parser.add_argument("--variant", default="")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="of kernels, in each process")
    a = parser.parse_args()
    return Settings(a.workload, a.variant, a.workers, a.threads)


def say(message: Mapping[str, Any]) -> None:
    print(json.dumps(message), flush=True)


class Pace:
    """How many steps fill so many seconds, by what the last ones took on average; ``fewest`` at least.

    Of a side that goes ahead while nobody asks, so many are more than it is ahead: it answers those at once, and by
    them alone thousands of long steps would seem to fill a second.
    """

    def __init__(self, fewest: int = FEWEST) -> None:
        self._each = 0.05
        self._fewest = fewest
        self.taken = 0  # steps in all

    def steps(self, seconds: float) -> int:
        return max(self._fewest, min(20_000, round(seconds / self._each)))

    def took(self, times: Sequence[float]) -> None:
        self.taken += len(times)
        self._each = sum(times) / len(times)


def serve(
    run: Callable[[int], Sequence[float]],
    roles: Mapping[str, int],
    right: Callable[[int], bool],
    first: int = FIRST,
    notes: Callable[[], str] = str,
    messages: Callable[[], Mapping[str, int]] = dict,
    fewest: int = FEWEST,
) -> None:
    """Answer what the command line's process asks. ``run(n)`` makes n steps and answers the seconds of each.

    After ``first`` steps, what they come to is checked for the first time, and ``notes`` are taken. ``messages`` says
    how many each role has sent, where that is known.
    """
    pace = Pace(fewest)
    pace.took(run(first))
    if not right(pace.taken):
        raise SystemExit(f"wrong after {pace.taken} steps")
    say({"ready": True, "roles": dict(roles), "notes": notes()})
    warm = False
    for line in sys.stdin:
        if not warm:
            pace.took(run(pace.steps(WARM_UP_SECONDS)))
            warm = True
        before = messages()
        times = run(pace.steps(float(line.split()[1])))
        pace.took(times)
        sent = {role: (count - before[role]) / len(times) for role, count in messages().items()}
        say({"seconds": list(times), "messages": sent})
    say({"right": bool(right(pace.taken)), "steps": pace.taken})


async def serve_beside(
    run: Callable[[int], Awaitable[Sequence[float]]],
    roles: Mapping[str, int],
    right: Callable[[int], Awaitable[bool]],
    first: int = FIRST,
    notes: Callable[[], str] = str,
    messages: Callable[[], Awaitable[Mapping[str, int]]] | None = None,
    fewest: int = FEWEST,
) -> None:
    """`serve`, where steps are coroutines: the loop goes on while the command line's process has nothing to ask."""
    loop = asyncio.get_running_loop()

    def waited(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    counted = dict if messages is None else lambda: waited(messages())
    await asyncio.to_thread(
        serve, lambda n: waited(run(n)), roles, lambda n: waited(right(n)), first, notes, counted, fewest
    )


def timed(step: Callable[[], Any], count: int) -> list[float]:
    """The seconds of so many calls."""
    clock = time.perf_counter
    out = []
    before = clock()
    for _ in range(count):
        step()
        after = clock()
        out.append(after - before)
        before = after
    return out


async def timed_reports(reports: AsyncIterator[Any], count: int) -> list[float]:
    """The seconds that each of so many reports took to come."""
    clock, out = time.perf_counter, []
    before = clock()
    async for _ in reports:
        after = clock()
        out.append(after - before)
        before = after
        if len(out) == count:
            break
    return out


def followed(step: Callable[[], Any], others: Sequence[Any]) -> Callable[[int], list[float]]:
    """Times steps that take part in those of other processes: each is told how many there are, at its pipe's end."""

    def run(count: int) -> list[float]:
        for tell in others:
            tell.send(count)
        return timed(step, count)

    return run


@contextlib.contextmanager
def started(work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], how: str = "fork") -> Iterator[list[int]]:
    """Processes that do ``work``, one for each tuple of arguments; they are gone at the end. Answers their ids."""
    context = multiprocessing.get_context(how)
    children = [context.Process(target=_until_orphaned, args=(work, given), daemon=True) for given in arguments]
    for child in children:
        child.start()
    try:
        yield [child.pid or 0 for child in children]
        for child in children:
            child.join(timeout=5)
    finally:
        for child in children:
            child.kill()
            child.join()


def _until_orphaned(work: Callable[..., Any], given: tuple[Any, ...]) -> None:
    """Work, but not for longer than the process that began it, however that ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    work(*given)


def workers(pids: Sequence[int]) -> dict[str, int]:
    """Roles of processes that are workers."""
    return {f"worker {number}": pid for number, pid in enumerate(pids)}


def here() -> int:
    return os.getpid()
