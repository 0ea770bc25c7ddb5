"""What the system lets this process use: cores, and the memory that is left. Law: it is asked, and nothing is kept."""

from __future__ import annotations

import os
import resource
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")  # of version 2
MINE = Path("/proc/self/cgroup")
MACHINE = Path("/proc/meminfo")


def usable_cores(root: Path = CGROUPS, mine: Path = MINE) -> int:
    """The cores this process may use: its affinity, cut down to the quota of its cgroups; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quotas = [quota for quota in map(_cgroup_cores, _cgroups(root, mine)) if quota is not None]
    return max(1, min([cores, *quotas]))


def available_bytes(root: Path = CGROUPS, mine: Path = MINE, info: Path = MACHINE) -> int | None:
    """What this process may still take: of the machine, of its cgroups, and of addresses, where `ulimit` bounds these.
    None where nobody tells."""
    told = (_machine_bytes(info), _address_bytes(), *map(_cgroup_bytes, _cgroups(root, mine)))
    return min([left for left in told if left is not None], default=None)


def _cgroups(root: Path, mine: Path) -> set[Path]:
    """The folders of this process's cgroup and of those around it."""
    try:
        lines = os.fsdecode(mine.read_bytes()).splitlines()
    except OSError:
        lines = []
    paths = [line.split(":", 2)[2] for line in lines if line.startswith("0::")]
    parts = [Path(path.lstrip("/")) for path in paths]
    return {root, *(root / part for path in parts for part in (path, *path.parents))}


def _cgroup_cores(folder: Path) -> int | None:
    """A cgroup's quota, rounded up."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _cgroup_bytes(folder: Path) -> int | None:
    """What a cgroup may still take; file pages that nobody uses are given up for it."""
    try:
        most = (folder / "memory.max").read_text().strip()
        if most == "max":
            return None
        used = int((folder / "memory.current").read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
        spare = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
        return max(0, int(most) - used + spare)
    except (OSError, ValueError):
        return None


def _address_bytes() -> int | None:
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return None
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None
    return max(0, most - mapped)


def _machine_bytes(info: Path) -> int | None:
    try:
        lines = info.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
