"""Trains a recorded history again: the sets that the ledger names, of the batches that it names, to the same bits.

Law: nothing is decided anew. Each version keeps what was kept, in replica order, of the values that the version before
left; random ops draw by version and replica. Who was not kept is handed nothing, so it does not begin. Replicas that
keep something from round to round, as those of `LocalSteps` may, begin with nothing where they did then, so each run of
then is one again; and they are to have kept what follows from the rounds that counted, as what int8 leaves of updates
does. Updates are packed as they were then, wherever they go now.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import FeedError, FlowrtError, LedgerError
from flowrt.data import Source
from flowrt.sched.drivers.packing import INT8
from flowrt.sched.policies import Policy, recorded
from flowrt.sched.versions.retelling import Retelling
from flowrt.train.accounts import setup_of
from flowrt.train.batches import Batches, Identities, Supply
from flowrt.train.steps import Steps

if TYPE_CHECKING:
    from flowrt.ledger import Ledger, Version
    from flowrt.ledger.writer import LedgerWriter
    from flowrt.session.runners import Runner
    from flowrt.session.session import Session
    from flowrt.train.batches import Given
    from flowrt.train.reports import StepReport
    from flowrt.train.trainer import Trainer

SETS_BYTES = 1 << 17  # of the sets that a run is told of: a message has room for twice that


class Retold(Supply):
    """Hands out batches of a client's iterable that are used again, whose identities are their places in it."""

    wanted: Collection[int] = ()  # identities; the others are passed over
    handing: Retelling
    _drawn = 0

    def _admit(self, replica: int, batch: Mapping[str, Any] | None) -> None:
        if batch is None:
            raise FeedError(
                f"batch {self.handing.identity} was kept, and there are only {self._drawn} to train with again"
            )
        if self._drawn in self.wanted:
            self._put_in(replica, self._drawn, batch)
        self._drawn += 1


class Replay(Steps):
    """An iteration over the steps that a ledger tells of."""

    def __init__(self, trainer: Trainer, session: Session, ledger: Ledger) -> None:
        super().__init__(trainer, session, 0)
        self._retold = ledger
        self._until = 0  # the version at which the run of now ends
        _check(trainer, session, ledger)

    def _open_ledger(self) -> LedgerWriter | None:
        return None  # what happens again is written down already

    def _supply_of(self, batches: Given, runner: Runner) -> Supply:
        trainer, depth = self._trainer, self._depth
        if isinstance(batches, Source):
            return Identities(batches.total, trainer.replicas, depth, self._give)
        inputs = [tower.inputs for tower in trainer.towers]
        return Retold(Batches(batches, trainer.inputs), inputs, depth, self._give, runner.copy)

    def _policy_at(self, version: int) -> Policy:
        """What the servers are told to keep from ``version`` on, in this run."""
        trainer, supply = self._trainer, self._supply
        left = _from(self._retold, version)
        if isinstance(supply, Retold):
            supply.wanted = frozenset(identity for each in left for identity in each.kept_batches)
        width = -(-trainer.replicas // 8)
        feeds_back = bool(left) and left[0].compression == INT8
        alike = bool(left) and (feeds_back or _keeps(trainer))
        part = _rounds_from(self._retold, left, trainer) if alike else _packed_alike(left)
        trainer.packing_in(self._session).begin(part[0].compression if part else None)
        kept = [each.kept for each in part[: SETS_BYTES // width]]
        self._until = version + len(kept)
        supply.handing = Retelling(trainer.replicas, self._depth, kept)
        return recorded(trainer.policy, kept, trainer.replicas)

    async def _next(self) -> StepReport | None:
        """As of others; where a run is over and not all of the history, another one goes on."""
        while (report := await super()._next()) is None and self._told == self._until < self._end:
            await self._change_runs(self._begin_another())
        return report

    @property
    def _end(self) -> int:
        """The version that the history has come to."""
        versions = self._retold.versions
        return versions[-1].version + 1 if versions else 0

    async def _go_on_after(self, error: FlowrtError) -> None:
        raise error


def _check(trainer: Trainer, session: Session, ledger: Ledger) -> None:
    """Raise `LedgerError` where this is not what the ledger is of, or cannot be trained again."""
    here = setup_of(trainer, session)
    if trainer.policy.staleness:
        raise LedgerError(
            f"{ledger.path}: {trainer.policy} keeps stale updates, which are not trained again to the same bits"
        )
    for setup in {id(version.setup): version.setup for version in ledger.versions}.values():
        for what in ("trainer", "replicas", "local_steps", "policy", "servers", "seed"):
            then, now = getattr(setup, what), getattr(here, what)
            if then != now:
                fix = f"; open the session with options=fr.Options(seed={then})" if what == "seed" else ""
                raise LedgerError(f"{ledger.path} cannot be trained again: {what} was {then!r}, and is {now!r}{fix}")


def _from(ledger: Ledger, version: int) -> Sequence[Version]:
    """The versions from ``version`` on. Raises `LedgerError` where some are not known."""
    versions = [each for each in ledger.versions if each.version >= version]
    for expected, each in zip(count(version), versions, strict=False):
        if each.version != expected:
            raise LedgerError(
                f"{ledger.path} cannot be trained again from version {version}: what version {expected} was made of is "
                "not known; restore a later checkpoint"
            )
        if not all(each.kept.values()):
            raise LedgerError(f"{ledger.path}: it is not known which batches made version {each.version}")
    return versions


def _packed_alike(left: Sequence[Version]) -> Sequence[Version]:
    """Those of ``left`` whose updates travelled as those of the first did."""
    return [*takewhile(lambda each: each.compression == left[0].compression, left)]


def _keeps(trainer: Trainer) -> bool:
    """Whether its replicas keep anything from round to round: slots of an optimiser, or steps that they are ahead."""
    local = trainer.towers[0].local
    return local is not None and bool(local.start or trainer.overlap)


def _rounds_from(ledger: Ledger, left: Sequence[Version], trainer: Trainer) -> Sequence[Version]:
    """Those of ``left`` that one run made.

    Raises `LedgerError` where what replicas kept from round to round does not follow from those that counted.
    """
    run, at = left[0].run, left[0].version
    part = [*takewhile(lambda each: each.run == run, left)]
    if (begun := left[0].begun) < at:
        raise _untold(
            ledger, trainer, f"replicas had kept something by version {at}; begin where their run did, at {begun}"
        )
    there, off = set[int](), set[int]()  # who took part, and of those whoever did not, or in vain, in some version
    for each in part:
        if _keeps(trainer) and (back := off.intersection(each.kept)):
            raise _untold(
                ledger, trainer, f"replica {min(back)} counts in version {each.version} after rounds that did not"
            )
        if each.anew:
            raise _untold(
                ledger, trainer, f"replica {min(each.anew)}, which was lost, counts in version {each.version}"
            )
        there.update(each.kept)
        off.update(each.late, each.refused, each.lost, there.difference(each.kept))
    return part


def _untold(ledger: Ledger, trainer: Trainer, why: str) -> LedgerError:
    head = f"{ledger.path} cannot be trained again to the same bits, as replicas"
    if not _keeps(trainer):
        return LedgerError(f"{head} go on with what int8 left of updates before, and {why}. bfloat16 leaves nothing")
    return LedgerError(
        f"{head} of {trainer.policy} go on with what they kept from rounds before, and {why}. With fr.optim.SGD and "
        "overlap=0 they keep nothing"
    )
