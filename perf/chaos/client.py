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

sys.path.insert(0, str(Path(__file__).parent))

from training import Receipts, build, ones

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
    options: Mapping[str, Any] = field(default_factory=dict)  # of the trainer

    def to_json(self) -> str:
        return json.dumps(asdict(self))


async def train(settings: Settings) -> list[str]:
    """Train until stdin ends; answers the violations."""
    policy = fr.train.FirstOf(settings.keep)
    graph, trainer = build(settings.replicas, policy, settings.servers, **settings.options)
    receipts, told = Receipts(), asyncio.Event()
    asyncio.get_running_loop().add_reader(0, told.set)
    cluster = fr.ClusterSpec(settings.jobs, settings.token_file)
    async with fr.Session(graph, cluster=cluster, name="chaos") as session:
        steps = trainer.steps(session, ones(), ledger=settings.ledger)
        async for report in steps:
            receipts.add(report)
            took_part = sorted({*report.kept, *report.late})
            lost = trainer.statistics().lost
            say(step=report.step, at=time.monotonic(), kept=report.kept, part=took_part, lost=lost)
            if told.is_set():
                break
        await steps.aclose()
        await receipts.check(session, trainer)
    return receipts.violations


def say(**what: Any) -> None:
    """Tell the parent."""
    print(json.dumps(what), flush=True)


def main() -> None:
    logging.basicConfig(level=os.environ.get("FLOWRT_CHAOS_LOG", "ERROR"), format="%(asctime)s client %(message)s")
    say(violations=asyncio.run(train(Settings(**json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
