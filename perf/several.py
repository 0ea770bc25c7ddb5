"""Sides of a comparison that are several processes each: measured in turns, with what every process spends.

All sides of a case run at once; a side's figure is the median step of the median round. See sides/processes.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import section
from compare import PAUSE_SECONDS, READY_SECONDS, Case, Failed, Process
from spending import Counts, Spent, most_memory

Names = Mapping[str, tuple[str, str]]  # of a side: its peer and variant


@dataclass(slots=True)
class Side:
    """One side of one case: seconds of every step, round by round, and what its processes spent on each."""

    name: str
    process: Process
    roles: dict[str, int]  # role: process id
    notes: str = ""
    rounds: list[list[float]] = field(default_factory=list)
    spent: list[dict[str, Spent]] = field(default_factory=list)
    segments: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)  # role: bytes at most
    messages: list[dict[str, float]] = field(default_factory=list)

    def measure(self, seconds: float) -> None:
        self.process.measure(0.0)  # a few steps: the kernel may have taken pages of who waited for the others
        before = Counts.now(self.roles)
        times = self.process.measure(seconds)
        after = Counts.now(self.roles)
        self.memory = {role: most_memory(pid) for role, pid in self.roles.items()}
        self.rounds.append(times)
        self.messages.append(self.process.messages)
        self.spent.append({role: (after.roles[role] - before.roles[role]).each(len(times)) for role in self.roles})
        self.segments.append((after.segments - before.segments) / len(times))

    @property
    def medians(self) -> list[float]:
        return [statistics.median(times) for times in self.rounds]

    @property
    def median(self) -> float:
        return statistics.median(self.medians)

    def of(self, *roles: str) -> Spent:
        """What a step costs the processes of these roles, ``worker`` all workers: medians of the rounds, summed."""
        return sum((self._of(role) for role in self.roles if role in roles or role.split()[0] in roles), Spent())

    def sent(self, role: str) -> float | None:
        """How many messages a role sends in a step, where that is known."""
        known = [messages[role] for messages in self.messages if role in messages]
        return statistics.median(known) if known else None

    def _of(self, role: str) -> Spent:
        middle = statistics.median
        costs = [spent[role] for spent in self.spent]
        return Spent(*(middle(getattr(cost, name) for cost in costs) for name in ("cpu", "switches", "faults")))


def run(
    topic: str, workload: str, sides: Names, *arguments: str, rounds: int, seconds: float, threads: int = 1
) -> tuple[list[Side], dict[str, str]]:
    """Measure every side of sides/TOPIC in turns; answers them, and why others were left out."""
    case = Case(workload, workload, workload, {}, 1.0, arguments, topic=topic)
    ready: list[Side] = []
    failed: dict[str, str] = {}
    running: list[Process] = []
    try:
        for name, (peer, variant) in sides.items():
            try:
                running.append(Process(peer, variant, case, threads))
                said = running[-1].answer(READY_SECONDS)
                ready.append(Side(name, running[-1], said["roles"], said["notes"]))
            except (Failed, FileNotFoundError) as why:
                failed[name] = str(why)
        for _ in range(rounds):
            for side in list(ready):
                time.sleep(PAUSE_SECONDS)
                try:
                    side.measure(seconds)
                except Failed as why:
                    ready.remove(side)
                    failed[side.name] = str(why)
                    side.process.kill()
        for side in list(ready):
            if not side.process.end().get("right"):
                ready.remove(side)
                failed[side.name] = "what it comes to is wrong"
        return ready, failed
    finally:
        for process in running:
            process.kill()


def parser(about: str, cases: Mapping[str, str], sides: Sequence[str]) -> argparse.ArgumentParser:
    """What a command line may ask of a comparison: which cases, workers and sides, for how long, and to write it."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(cases))
    made.add_argument("--workers", type=int, nargs="+", default=[4])
    made.add_argument("--sides", nargs="+", choices=sides, default=list(sides), metavar="SIDE", help=", ".join(sides))
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--seconds", type=float, default=1.0, help="of measuring, per side and round")
    made.add_argument("--write", action="store_true", help="write the tables into docs/performance.md")
    return made


def asked(made: argparse.ArgumentParser, cases: Mapping[str, str]) -> argparse.Namespace:
    """What the command line asks for, of cases that there are."""
    options = made.parse_args()
    if unknown := set(options.cases) - set(cases):
        made.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    return options


def show(heading: str, about: Sequence[str], lines: Sequence[str], write: bool) -> None:
    """Print what was found, and write it into docs/performance.md if that is wanted."""
    print("\n".join(["", heading, "", *lines]), flush=True)
    if write:
        section.put(heading, [*about, "", *lines])


def table(
    sides: Sequence[Side], failed: Mapping[str, str], figure: Callable[[Side], str] | None = None, what: str = "a step"
) -> Iterator[str]:
    """A Markdown table, fastest side first. ``figure`` says a side's median otherwise than in milliseconds."""
    flowrt = next((side for side in sides if side.name == "flowrt"), None)
    yield (
        f"| side | {what} (lowest to highest round) | its time over flowrt's | CPU: server, a worker, client "
        "| switches | TCP segments |"
    )
    yield "|---|---|---|---|---|---|"
    for side in sorted(sides, key=lambda side: side.median):
        found = figure(side) if figure is not None else f"{1e3 * side.median:.3f} ms"
        spread = f"{1e3 * min(side.medians):.3f} to {1e3 * max(side.medians):.3f} ms"
        everybody = side.of(*side.roles)
        yield (
            f"| {side.name} | {found} ({spread}) | {_ratio(side, flowrt)} | {_cpu(side)} ms "
            f"| {everybody.switches:.1f} | {statistics.median(side.segments):.1f} |"
        )
    yield ""
    for name, why in failed.items():
        yield f"- {name} was left out: {why}"


def _ratio(side: Side, flowrt: Side | None) -> str:
    if flowrt is None or side is flowrt:
        return "-"
    ratios = [theirs / ours for theirs, ours in zip(side.medians, flowrt.medians, strict=True)]
    return f"{statistics.median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})"


def _cpu(side: Side) -> str:
    workers = sum(role.startswith("worker") for role in side.roles) or 1
    shares = side.of("server").cpu, side.of("worker").cpu / workers, side.of("client").cpu
    return ", ".join(f"{1e3 * seconds:.3f}" if seconds else "-" for seconds in shares)


def spending(side: Side) -> str:
    """What a step costs each process of a side."""
    parts = []
    for role in side.roles:
        cost, sent = side.of(role), side.sent(role)
        said = "" if sent is None else f"{sent:.1f} messages, "
        parts.append(f"{role} {1e3 * cost.cpu:.3f} ms ({said}{cost.switches:.1f} switches, {cost.faults:.0f} faults)")
    return f"{side.name}'s {1e3 * side.median:.3f} ms, CPU by process: {', '.join(parts)}"


def remembering(side: Side) -> str:
    """What each process of a side had in memory at most."""
    parts = [f"{role} {nbytes / (1 << 20):.0f} MiB" for role, nbytes in side.memory.items()]
    return f"{side.name}'s memory at most, what is shared counted in each process: {', '.join(parts)}"


def memcpy_seconds(count: int) -> float:
    """The median time in which so many bytes are copied within memory that is there already."""
    source, into = np.ones(max(1, count), np.uint8), np.zeros(max(1, count), np.uint8)
    times = []
    for _ in range(7):
        began = time.perf_counter()
        np.copyto(into, source)
        times.append(time.perf_counter() - began)
    return statistics.median(times)
