"""How a step of a replica divides: input, pull, compute, push, wait and server, from what each node's clock told.

Law: only differences of one clock's stamps mean anything. The time on the way, there and back, is what passed on the
server's clock between a version and its update, less what passed on the replica's between the same two. How that
divides into pull and push no clock can tell; it is taken to be half each where it is least, and what is more of either
is known: a message that takes longer comes later by both clocks, whatever lies between them. Clocks drift: the least
of what was seen is forgotten at `DRIFT`, faster than any quartz goes wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.valueclass import valueclass
from flowrt.sched.replica.stopwatch import Phase

if TYPE_CHECKING:
    from flowrt.sched.drivers.messages import Report

Array: TypeAlias = "np.ndarray[Any, Any]"
PARTS = ("input", "pull", "compute", "push", "wait", "server")
DRIFT = 2e-4  # seconds a second
NEWEST = 1024  # rows of a replica that medians are of
WIDTH = 11  # numbers of a row of `Report.times`
REPLICA, VERSION, TOLD, PHASE, PULLED, INPUT, COMPUTE, ENDED, HELD, CAME, WHOLE = range(WIDTH)


@valueclass
class Times:
    """What a replica did for ``version``, in seconds.

    It waited for its batch (``input``), was told the values (``pull``), computed (``compute``), its update was on its
    way (``push``), waited for others and for the client's permission (``wait``), and was looked at and applied
    (``server``). Where it was ``cut`` off by a newer version, or came too late for its own, it did not wait and was not
    applied; cut off, what it was at had taken so long and was not done.
    """

    version: int
    input: float
    pull: float
    compute: float
    push: float
    wait: float
    server: float
    cut: bool = False

    @property
    def seconds(self) -> float:
        """From the values on their way to the update there: without waiting for others and the server."""
        return self.input + self.pull + self.compute + self.push


class Clocks:
    """What lies between the clock of server 0 and each replica's, and the least time on the way: see above."""

    def __init__(self, replicas: int) -> None:
        self._out = np.full(replicas, np.inf)  # least (replica's - server's) stamp of a version
        self._back = np.full(replicas, np.inf)  # least (server's - replica's) stamp of an update
        self._at = np.full(replicas, -np.inf)  # the server's stamp when these were looked at

    def __len__(self) -> int:
        return len(self._at)

    def note(self, rows: Array) -> None:
        """Take in rows of reports [n, `WIDTH`]."""
        rows = rows[(rows[:, TOLD] > 0) & (rows[:, CAME] > 0)]
        for replica in np.unique(rows[:, REPLICA]).astype(int):
            mine = rows[rows[:, REPLICA] == replica]
            last = float(mine[:, CAME].max())
            leak = DRIFT * max(0.0, last - self._at[replica]) if np.isfinite(self._at[replica]) else 0.0
            self._at[replica] = last
            for least, stamps in (
                (self._out, mine[:, PULLED] - mine[:, TOLD]),
                (self._back, mine[:, CAME] - mine[:, ENDED]),
            ):
                least[replica] = min(least[replica] + leak, float(stamps.min()))

    def split(self, rows: Array) -> tuple[Array, Array]:
        """Seconds [n] of pull and of push of each row; nan where they are not known."""
        who = rows[:, REPLICA].astype(int)
        known = rows[:, TOLD] > 0
        out = np.where(known, rows[:, PULLED] - rows[:, TOLD], np.nan)
        back = np.where(known, rows[:, CAME] - rows[:, ENDED], np.nan)
        away = np.maximum(0.0, out + back)
        least = np.fmax(0.0, self._out[who] + self._back[who])
        least = np.where(np.isfinite(least), least, away)
        pull = np.where(np.isfinite(self._out[who]), out - self._out[who] + least / 2, away / 2)
        pull = np.clip(pull, 0.0, away)
        return pull, away - pull


def tables(reports: Sequence[Report], replicas: int) -> tuple[Array, Array]:
    """The rows of reports [n, `WIDTH`], and [n, 5] the version and the stages of the report that each came with.

    Whatever a node made up that are no such numbers is left out.
    """
    those = [report for report in reports if len(report.stages) == 4 and len(report.times) % (8 * WIDTH) == 0]
    rows = np.frombuffer(b"".join([report.times for report in those]), np.float64).reshape(-1, WIDTH)
    try:
        each = np.array([(report.version, *report.stages) for report in those], np.float64).reshape(-1, 5)
    except (TypeError, ValueError):
        return np.empty((0, WIDTH)), np.empty((0, 5))
    stages = np.repeat(each, [len(report.times) // (8 * WIDTH) for report in those], 0)
    finite = np.isfinite(rows).all(1) & np.isfinite(stages).all(1)
    mine = (rows[:, REPLICA] >= 0) & (rows[:, REPLICA] < replicas) & finite
    return rows[mine], stages[mine]


def away(rows: Array) -> Array:
    """Seconds on the way [n], there and back; nan where they are not known."""
    there = (rows[:, CAME] - rows[:, TOLD]) - (rows[:, ENDED] - rows[:, PULLED])
    return np.where(rows[:, TOLD] > 0, np.maximum(0.0, there), np.nan)


def divide(rows: Array, stages: Array, clocks: Clocks) -> dict[str, Array]:
    """Columns, a row each: version, replica, the seconds of every part, and whether it was cut.

    ``stages`` [n, 5] are the version, and the stages, of the report that each row came with.
    """
    pull, push = clocks.split(rows)
    cut = rows[:, PHASE] != Phase.POSTED
    counts = (rows[:, WHOLE] > 0) & (rows[:, VERSION] == stages[:, 0]) & (rows[:, WHOLE] <= stages[:, 3])
    looked = rows[:, WHOLE] - rows[:, CAME]
    zero = np.zeros(len(rows))
    return {
        "version": rows[:, VERSION].astype(np.int64),
        "replica": rows[:, REPLICA].astype(np.int64),
        "input": rows[:, INPUT],
        "pull": pull,
        "compute": rows[:, COMPUTE],
        "push": np.where(cut, zero, push),
        "wait": np.where(counts, stages[:, 3] - rows[:, WHOLE], zero),
        "server": np.where(counts, stages[:, 4] - stages[:, 3] + looked, zero),
        "cut": cut,
    }


def times_of(report: Report, clocks: Clocks) -> dict[int, Times]:
    """How what one report tells of divides, by replica."""
    columns = divide(*tables([report], len(clocks)), clocks)
    versions, replicas, cuts = (columns[name].tolist() for name in ("version", "replica", "cut"))
    seconds = zip(*(np.nan_to_num(columns[part]).tolist() for part in PARTS), strict=True)
    rows = zip(versions, replicas, seconds, cuts, strict=True)
    return {replica: _times(version, parts, cut) for version, replica, parts, cut in rows}


def medians(records: Mapping[str, Array], replica: int) -> Times | None:
    """The medians of the newest `NEWEST` rows of one replica among columns of `divide`; None where it has none."""
    (mine,) = np.nonzero(records["replica"] == replica)
    mine = mine[-NEWEST:]
    if not len(mine):
        return None
    counted = mine[records["server"][mine] > 0]
    found = [_middle(records[part][counted if part in ("wait", "server") else mine]) for part in PARTS]
    return _times(int(records["version"][mine[-1]]), found, bool(records["cut"][mine].mean() > 0.5))


def _times(version: int, seconds: Sequence[float], cut: bool) -> Times:
    waited, pull, compute, push, wait, server = seconds  # in the order of `PARTS`
    return Times(version, waited, pull, compute, push, wait, server, cut)


def _middle(seconds: Array) -> float:
    """Their median, nan aside, 0 of none: to the bit `np.median`'s, which takes three to ten times as long."""
    ordered = np.sort(seconds[~np.isnan(seconds)])
    count = len(ordered)
    return float(ordered[(count - 1) // 2] + ordered[count // 2]) / 2 if count else 0.0
