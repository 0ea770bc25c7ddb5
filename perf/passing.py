"""What a value costs that goes through a step; run by `perf/transport.py --steps`, which says more."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from several import Side, memcpy_seconds, run, spending, table
from sides.transport import data

SIDES = {
    "flowrt": ("flowrt", ""),
    "flowrt-tcp": ("flowrt", "tcp"),
    "sockets": ("sockets", ""),
    "unix-sockets": ("sockets", "unix"),
    "gloo": ("torch", ""),
    "tf": ("tf", ""),
    "ray": ("ray", ""),
}
WHAT = {
    **{f"pass-{size}": f"{size} of one value, from node to node" for size in data.SIZES},
    **{f"fetch-{size}": f"{size} of one value, fetched by the client" for size in data.SIZES},
    "steps": "a scalar through two nodes and back",
    "model": f"gradient descent by hand: {data.LAYERS} small variables on a server, layers on a worker",
}
GRAPHS = ("flowrt", "flowrt-tcp", "tf")  # sides that have a graph over nodes


def measure(workload: str, names: Sequence[str], rounds: int, seconds: float) -> Iterator[str]:
    """A Markdown table of one case, and the floors beside it."""
    names = [name for name in names if workload != "model" or name in GRAPHS]
    sides, failed = run("transport", workload, {name: SIDES[name] for name in names}, rounds=rounds, seconds=seconds)
    size = 4 * data.floats(workload)
    large = size >= 1 << 20

    def rate(side: Side) -> str:
        return f"{size / side.median / (1 << 30):.2f} GiB/s" if large else f"{1e6 * side.median:.1f} µs"

    yield from table(sides, failed, rate, "GiB/s" if large else "a step")
    for side in sides:
        if side.name.startswith("flowrt"):
            yield f"- {spending(side)}; {1 / side.median:,.0f} steps a second"
    raw, ours = (next((side for side in sides if side.name == name), None) for name in ("sockets", "flowrt-tcp"))
    if raw is not None and ours is not None:
        rounds = [theirs / mine for theirs, mine in zip(raw.medians, ours.medians, strict=True)]
        spread = f"({min(rounds):.2f} to {max(rounds):.2f})"
        yield f"- Over TCP, of what bare sockets pass in the same round: {statistics.median(rounds):.2f} {spread}"
    if large:
        yield f"- A copy in memory: {size / memcpy_seconds(size) / (1 << 30):.2f} GiB/s"
