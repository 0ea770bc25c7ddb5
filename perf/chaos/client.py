"""A client that trains until it is told to end: a process of its own, so that it can be killed.

    python perf/chaos/client.py SETTINGS        # the fields of `Settings` as JSON

Prints a line of JSON for each report, and, once its stdin ends, one with what it found wrong.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from training import Receipts, batches, build, source, state

import flowrt as fr


@dataclass(frozen=True)
class Settings:
    """What is trained, where, and how ``keep`` of the replicas make a step."""

    jobs: Mapping[str, tuple[str, ...]]
    token_file: str
    replicas: int
    keep: int
    servers: int
    ledger: str
    final: str  # where the variables are written to in the end, as npz
    checkpoints: str = ""  # a folder, or that there are to be none
    detached: bool = False
    tls: str | None = None  # the folder of the keys, where the way to the nodes is a network
    options: Mapping[str, Any] = field(default_factory=dict)  # of the trainer

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def build(self) -> tuple[fr.Graph, Any]:
        """The graph and the trainer."""
        return build(self.replicas, fr.train.FirstOf(self.keep), self.servers, **self.options)


SEED = fr.Options(seed=1)
SAVE = 2.0  # seconds between two checkpoints


async def train(settings: Settings) -> list[str]:
    """Train until stdin ends; answers the violations."""
    graph, trainer = settings.build()
    folder, ledger = settings.checkpoints, Path(settings.ledger)
    checkpoints = fr.Checkpoints(folder, every_seconds=SAVE) if folder else None
    receipts, told = Receipts(), asyncio.Event()
    asyncio.get_running_loop().add_reader(0, told.set)
    cluster = fr.ClusterSpec(settings.jobs, settings.token_file)
    how = {"name": "chaos", "options": SEED, "checkpoints": checkpoints, "tls": settings.tls}
    async with fr.Session(graph, cluster=cluster, **how) as session:
        drawn_here: Any = source() if settings.detached else batches(drawn(ledger))
        steps = trainer.steps(session, drawn_here, ledger=ledger, detached=settings.detached)
        async for report in steps:
            copies = await trainer.copies_on(session) if trainer.copies > 1 else None
            back = report.rolled_back is not None or (checkpoints is not None and not receipts.steps)
            receipts.add(report)
            gone = [] if copies is None else sorted(copies.gone)
            here = {"client": os.getpid(), "gone": gone, "losses": losses(session)}
            at = made_at(report) if settings.detached else time.monotonic()
            say(step=report.step, at=at, kept=report.kept, back=back, **here)
            if told.is_set():
                if not settings.detached:
                    break
                await trainer.stop(session)  # what was made until then is reported
        await steps.aclose()
        await receipts.check(session, trainer)
        np.savez(settings.final, **(await state(session, trainer))[1])
    return receipts.violations


def drawn(ledger: Path) -> int:
    """How many batches clients before this one have drawn."""
    return fr.Ledger(ledger).drawn if ledger.exists() else 0


def losses(session: fr.Session) -> dict[str, int]:
    """By parameter server, how often it was lost, as this client knows."""
    return {task: count for task, count in session._open().losses.items() if ":ps/" in task}


def made_at(report: fr.train.StepReport) -> float:
    """When a step was made: by the clock of server 0, which is this machine's."""
    assert report.measured is not None
    return float(report.measured[0].stages[-1])


def say(**what: Any) -> None:
    """Tell the parent."""
    print(json.dumps(what), flush=True)


def main() -> None:
    logging.basicConfig(level=os.environ.get("FLOWRT_CHAOS_LOG", "ERROR"), format="%(asctime)s client %(message)s")
    say(violations=asyncio.run(train(Settings(**json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
