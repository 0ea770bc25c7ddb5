"""What processes spend, as the kernel counts it: CPU, context switches and page faults of each; TCP segments of all.

Read from outside, so alike for every system that is measured. Linux only; elsewhere nothing is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds on a CPU, context switches (asked for or forced) and minor page faults of a process's living threads."""

    cpu: float = 0.0
    switches: float = 0.0
    faults: float = 0.0

    def __sub__(self, before: Spent) -> Spent:
        return Spent(self.cpu - before.cpu, self.switches - before.switches, self.faults - before.faults)

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.cpu + other.cpu, self.switches + other.switches, self.faults + other.faults)

    def each(self, steps: int) -> Spent:
        """What one of so many steps took."""
        return Spent(self.cpu / steps, self.switches / steps, self.faults / steps)


@dataclass(frozen=True, slots=True)
class Counts:
    """What is counted at one moment: of every role, and the TCP segments that the machine has sent."""

    roles: Mapping[str, Spent]
    segments: int

    @staticmethod
    def now(roles: Mapping[str, int]) -> Counts:
        """Count what the processes of these ids have spent."""
        return Counts({role: _spent(pid) for role, pid in roles.items()}, _segments())


def _spent(pid: int) -> Spent:
    total = Spent()
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        try:
            cpu = int((thread / "schedstat").read_text().split()[0]) / 1e9
            status = (thread / "status").read_text()
            faults = int((thread / "stat").read_text().rsplit(")", 1)[1].split()[7])
        except (OSError, IndexError):
            continue  # it ended meanwhile
        switches = sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)
        total += Spent(cpu, switches, faults)
    return total


def most_memory(pid: int) -> int:
    """The bytes that a process had in memory at one moment at most, shared ones among them; 0 where nobody says."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return 1024 * int(found[0]) if found else 0


def _segments() -> int:
    try:
        names, values = (
            line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
        )
    except (OSError, ValueError):
        return 0
    return int(values[names.index("OutSegs")])
