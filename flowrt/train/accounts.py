"""The ledger of a trainer in a session: where it lies, and whose batches it is told to be of."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from flowrt.ledger.records import Setup
from flowrt.ledger.writer import LedgerWriter
from flowrt.sched.policies import policy_to_data

if TYPE_CHECKING:
    import os

    from flowrt.session.session import Session
    from flowrt.train.built import Built


def open_ledger(trainer: Built, session: Session, path: str | os.PathLike[str] | None) -> LedgerWriter | None:
    """The ledger at ``path``, or else the one in the folder of the session's checkpoints; None without either.

    Raises `LedgerError`: see `LedgerWriter`.
    """
    checkpoints = session.checkpoints
    if path is None:
        if checkpoints is None or checkpoints.path is None:
            return None
        path = checkpoints.path / f"{quote(trainer.name, safe='')}.ledger"
    writer = LedgerWriter(path, setup_of(trainer, session))
    if checkpoints is not None:
        checkpoints.before_save = writer.sync
    return writer


def setup_of(trainer: Built, session: Session) -> Setup:
    """What a ledger says of a trainer."""
    return Setup(
        trainer.name,
        trainer.replicas,
        trainer.local_steps,
        policy_to_data(trainer.policy),
        len(trainer.shards),
        session._seed,
        trainer.late,
    )
