"""What server 0 tells of a version that all have applied, or of one that cannot close, from what came of its updates.

Law: it decides nothing. What is kept of an update is the newest of each replica, as long as that may count.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flowrt.base.errors import FlowrtError, NodeLost, ResourceError
from flowrt.sched.drivers.messages import Failed, Report, Update, make_report
from flowrt.sched.policies.noise import NoiseScale
from flowrt.sched.versions.ledger import Cause, Outcome

if TYPE_CHECKING:
    from flowrt.sched.versions.ledger import Stuck
    from flowrt.sched.versions.steady import SteadyVersion

OUTCOMES = tuple(Outcome)
"""What the codes of outcomes in a `Report` mean."""
_CODES = {outcome: code for code, outcome in enumerate(OUTCOMES)}
_ROW, _TIMES = struct.Struct("=4d40s2d"), struct.Struct("=5d")  # of `Report.times`, and what a stopwatch says in it


class _Came(NamedTuple):
    """What came with an update, computed from ``version``: what it ``told``, when, and of how many samples it is."""

    version: int
    told: Sequence[Any]
    at: float
    samples: int


_make_came = tuple.__new__  # in half the time of a call of the class


class Reporting:
    """What came with the updates of one run, of which some may count that are older than the open version, if so."""

    def __init__(self, run: int, older: bool) -> None:
        self._run, self._older = run, older
        self._came: dict[int, _Came] = {}  # by replica: its update that came last
        self._heard: dict[int, tuple[Any, ...]] = {}  # by replica: what `Report.times` says of it, but for the last
        self.whole: dict[int, float] = {}  # by replica: when a server last held its update
        self.failed: dict[int, Failed] = {}  # by replica: why it could not compute an update, and is gone without
        self._noise = NoiseScale()

    def take_down(self, update: Update, told: float, now: float, oldest: int) -> None:
        """An update has come; its replica was ``told`` its version then, and one from ``oldest`` on may count."""
        replica, version = update.replica, update.version
        known = self._came.get(replica)
        if version >= oldest and (known is None or version > known.version):
            self._came[replica] = _make_came(_Came, (version, update.told, now, update.samples))
        self._heard[replica] = replica, version, told, 0.0, update.times, now

    def take_down_cut(self, replica: int, cut: tuple[float, ...], told: float, now: float) -> None:
        """A replica was doing this for a version that was overtaken, of which it was ``told`` then."""
        version, phase, *times, _ = cut
        self._heard[replica] = replica, version, told, phase, _TIMES.pack(*times), now

    @property
    def came(self) -> tuple[int, ...]:
        """Whose updates have come that may count."""
        return tuple(self._came)

    def hold(self, replica: int, when: float) -> None:
        """A server holds the update of ``replica`` since then."""
        self.whole[replica] = max(when, self.whole.get(replica, 0.0))

    def samples(self, replica: int) -> int:
        """Of how many samples the update of ``replica`` was made."""
        came = self._came.get(replica)
        return 0 if came is None else came.samples

    def means(self, kept: Iterable[int]) -> tuple[Any, ...]:
        """What is told of the updates of these."""
        return tuple([_mean(column) for column in zip(*[self._came[replica].told for replica in kept], strict=True)])

    def report(self, made: SteadyVersion, now: float) -> Report:
        """What there is to say of a version."""
        if made.squares is not None:
            self._noise = self._noise.learn(made.squares, made.square)
        whole, waited = self.whole, made.ordered - made.decided  # for the client to ask for it
        receipts = made.receipts
        report: Report = make_report(
            self._run,
            made.version,
            self._towers(made),
            self.means([r.replica for r in receipts if r.outcome is Outcome.KEPT]),
            now - made.opened - waited,
            (made.opened, made.decided, made.ordered, now),
            b"".join([_ROW.pack(*heard, whole.get(replica, 0.0)) for replica, heard in self._heard.items()]),
            made.why,
            self._noise.value,
            (),
            tuple([(replica, each.error, each.text) for replica, each in self.failed.items()]),
        )
        self._heard, self.whole, self.failed = {}, {}, {}
        return report

    def why(self, stuck: Stuck, nodes: Sequence[str], floor: bool = False) -> tuple[str, str]:
        """Why a run ends that is stuck: nothing where its batches have come to their end.

        What replicas had no memory for is told where their updates would have been enough; unless there is a ``floor``
        and others are waited for, who are lost.
        """
        failed = self.failed.values()
        short = {each.replica: each.text for each in failed if each.error == ResourceError.__name__}
        if floor and stuck.cause is Cause.LOST:
            short = {}
        replicas = sorted(short)
        alone = "; ".join([f"on {nodes[replica]}: {short[replica]}" for replica in replicas])
        beside = [f"replica {replica}: {short[replica]}" for replica in replicas]
        match stuck.cause:
            case Cause.EXHAUSTED:
                enough = short and len({*stuck.able, *stuck.refused, *short}) >= stuck.needed
                return (ResourceError.__name__, alone) if enough else ("", "")
            case Cause.LOST if short and short.keys() >= {*stuck.lost}:
                return ResourceError.__name__, alone
            case Cause.LOST:
                return NodeLost.__name__, "; ".join([stuck.told(nodes), *beside])
            case Cause.REFUSED:
                fix = "lower the learning rate, or clip the gradients by optim.clip_by_global_norm"
                return FlowrtError.__name__, "; ".join([stuck.told(nodes), *beside, fix])

    def forget(self, oldest: Callable[[int], int]) -> None:
        """Forget what came with updates that count no more: ``oldest`` says by replica which versions' still do."""
        stays = self._came.items() if self._older else ()
        self._came = {r: came for r, came in stays if came.version >= oldest(r)}

    def _towers(self, made: SteadyVersion) -> tuple[tuple[int, int, int, float, int], ...]:
        """The receipts, as a report has them.

        Seconds are from a replica's version's opening, or since it began, if it did before, to its update; or -1.
        """
        came, opened, began = self._came, made.opened, made.began
        return tuple(
            [
                (r, batch, _CODES[outcome], came[r].at - min(opened, began[r]) if r in came else -1.0, staleness)
                for r, batch, outcome, staleness in made.receipts
            ]
        )


def _mean(values: Sequence[Any]) -> Any:
    """The mean in float64, of numbers or of arrays of one shape; where these are several, a text that tells them."""
    if not {float}.issuperset(map(type, values)) and len(shapes := {np.shape(value) for value in values}) > 1:
        return " and ".join(str([*shape]) for shape in sorted(shapes))
    total: Any = 0.0
    for value in values:
        total = total + (value if isinstance(value, float) else np.asarray(value, np.float64))
    return total / len(values)
