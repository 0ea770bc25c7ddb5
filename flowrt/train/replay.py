"""Trains a recorded history again: the sets that the ledger names, of the batches that it names, to the same bits.

Law: nothing is decided anew. Each version keeps what was kept, in replica order, of the values that the version before
left; random ops draw by version and replica. Who was not kept is handed nothing, so it does not begin.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import FeedError, FlowrtError, LedgerError
from flowrt.data import Source
from flowrt.sched.policies import Policy, recorded
from flowrt.sched.versions.retelling import Retelling
from flowrt.train.accounts import setup_of
from flowrt.train.batches import Batches, Identities, Supply
from flowrt.train.steps import Steps

if TYPE_CHECKING:
    from flowrt.ledger import Ledger, Version
    from flowrt.ledger.writer import Writer
    from flowrt.session.runners import Runner
    from flowrt.session.session import Session
    from flowrt.train.trainer import Trainer

SETS_BYTES = 1 << 17  # of the sets that a run is told of: a message has room for twice that


class Retold(Supply):
    """Hands out batches of a client's iterable that are used again, whose identities are their places in it."""

    handing: Retelling
    _drawn = 0

    def _admit(self, replica: int, batch: Mapping[str, Any] | None) -> None:
        if batch is None:
            raise FeedError(
                f"batch {self.handing.identity} was kept, and there are only {self._drawn} to train with again"
            )
        if self._drawn in self.handing.identities:
            self._put_in(replica, self._drawn, batch)
        self._drawn += 1


class Replay(Steps):
    """An iteration over the steps that a ledger tells of."""

    def __init__(self, trainer: Trainer, session: Session, ledger: Ledger) -> None:
        super().__init__(trainer, session, 0)
        self._retold = ledger
        _check(trainer, session, ledger)

    def _open_ledger(self) -> Writer | None:
        return None  # what happens again is written down already

    def _supply_of(
        self, batches: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]], runner: Runner
    ) -> Supply:
        trainer, depth = self._trainer, self._depth
        if isinstance(batches, Source):
            return Identities(batches.total, trainer.replicas, depth, self._give)
        inputs = [tower.inputs for tower in trainer.towers]
        return Retold(Batches(batches, trainer.inputs), inputs, depth, self._give, runner.copy)

    def _policy_at(self, version: int) -> Policy:
        """What the servers are told to keep from ``version`` on."""
        trainer = self._trainer
        width = -(-trainer.replicas // 8)
        versions = _from(self._retold, version)[: SETS_BYTES // width]
        self._supply.handing = Retelling(trainer.replicas, self._depth, [each.kept for each in versions])
        return recorded(trainer.policy, [each.kept for each in versions], trainer.replicas)

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
