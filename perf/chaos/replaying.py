"""Trains again what a ledger tells of, on nodes that nothing disturbs, and compares the variables bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from client import SEED, Settings
from training import batches, state

import flowrt as fr


async def differences(settings: Settings, cluster: fr.LocalCluster) -> list[str]:
    """Variables that a replay of the run's ledger on ``cluster`` leaves otherwise than the run did."""
    graph, trainer = settings.build()
    async with fr.Session(graph, cluster=cluster, options=SEED) as session:
        async for _ in trainer.replay(session, settings.ledger, batches()):
            pass
        step, again = await state(session, trainer)
    with np.load(settings.final) as then:
        return [_told(name, step, then[name], again[name]) for name in again if _bits(then[name]) != _bits(again[name])]


def _bits(value: Any) -> bytes:
    return np.ascontiguousarray(value).tobytes()


def _told(name: str, step: int, then: Any, again: Any) -> str:
    most = np.abs(then - again).max()
    return f"{name} differs by {most:.3g} where the {step} steps of the ledger are trained again"
