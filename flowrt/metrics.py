"""What a service that trains or serves tells of itself: numbers as a plain dict, and as Prometheus reads them.

    found = await fr.metrics.collect(session, trainer)
    text = fr.metrics.prometheus(found)

Law: nothing is counted for it. When it is called, it asks nodes, memory, queues and trainers for what these know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.errors import FlowrtError, GraphError, user_site
from flowrt.session.awaited import awaited_session

if TYPE_CHECKING:
    from flowrt.train.replicated import Replicated

__all__ = ["collect", "prometheus"]

Sample: TypeAlias = tuple[str, dict[str, Any], float | None]
SECONDS = 1.0
OUTCOMES = ("kept", "late", "refused", "lost")
COUNTERS = frozenset(
    {"runs", "node_losses", "node_messages_sent", "node_bytes_sent", "train_steps", "train_dropped_batches"}
    | {"train_updates"}
)
HELP = {
    "runs": "Runs of the session so far",
    "node_up": "1 while the task is there and answers, else 0",
    "node_losses": "How often the task was lost",
    "node_steps": "Steps in progress",
    "node_sessions": "Sessions that use the node",
    "node_messages_sent": "Messages sent to other processes",
    "node_bytes_sent": "Bytes sent to other processes, by memory that both see or by sockets",
    "memory_bytes": "Bytes held in a device's memory",
    "memory_peak_bytes": "The most bytes held there at one moment",
    "memory_limit_bytes": "The bytes that may be held there",
    "queue_size": "Elements in a queue",
    "queue_capacity": "Elements that a queue holds at most",
    "queue_waiting": "Who waits to enqueue or to dequeue",
    "train_steps": "Steps of a trainer",
    "train_dropped_batches": "Batches that were handed out and are in no step",
    "train_updates": "Updates of a replica by what became of them",
    "train_latency_seconds": "After how long updates of a replica come, of the newest ones",
    "train_slow": "How many times as long as usual a replica's steps take, by cause; of all where there is no replica",
}


async def collect(session: Any, *trainers: Replicated, within: float = SECONDS) -> dict[str, Any]:
    """What an open `fr.Session`, its nodes and ``trainers`` know of themselves, as nested dicts of numbers.

    ``runs`` of the session; ``nodes`` by task: whether each is ``up`` and how often it was lost, its steps in progress,
    what it has sent, its ``memory`` by device and its ``queues`` by name; ``trainers`` by name: steps, and updates and
    latencies by replica, and who is slow. Of nodes that do not answer ``within`` so many seconds there is the former
    alone. It may be called while anything runs.
    """
    runner = awaited_session(session, "fr.metrics.collect")._open_here()
    told: Mapping[str, Mapping[str, Any]] = {}
    with suppress(FlowrtError):
        told = await runner.statistics(within)
    away = runner.lost | runner.suspects
    tasks = sorted({device.host for device in runner.known_devices} | away | told.keys())
    up = told.keys() - away
    nodes = {task: {"up": task in up, "losses": runner.losses.get(task, 0), **told.get(task, {})} for task in tasks}
    return {
        "runs": session.next_number,
        "nodes": nodes,
        "trainers": {trainer.name: _of_trainer(trainer) for trainer in trainers},
    }


def _of_trainer(trainer: Replicated) -> dict[str, Any]:
    counts = trainer.tally.counts()
    replicas = {
        number: {
            **{outcome: getattr(replica, outcome) for outcome in OUTCOMES},
            "median_seconds": replica.median_seconds,
            "p95_seconds": replica.p95_seconds,
        }
        for number, replica in enumerate(counts.replicas)
    }
    slow = [{"replica": one.replica, "cause": one.cause, "factor": one.factor} for one in counts.slow]
    return {"steps": counts.steps, "dropped_batches": counts.dropped_batches, "replicas": replicas, "slow": slow}


def prometheus(found: Mapping[str, Any]) -> str:
    """What `collect` answered in Prometheus' text format, as ``text/plain; version=0.0.4``."""
    if not isinstance(found, Mapping) or "nodes" not in found:
        raise GraphError(f"{user_site()}: fr.metrics.prometheus takes what fr.metrics.collect answers")
    return _written(_samples(found))


def of_node(task: str, up: bool, statistics: Mapping[str, Any]) -> str:
    """What one node tells of itself, in that format; ``statistics`` are `NetworkNode.statistics`."""
    return _written([("node_up", {"task": task}, up), *_samples_of_node(task, statistics)])


def _written(samples: Iterable[Sample]) -> str:
    """Samples as Prometheus' text format has them, each name's together; None is left out."""
    lines: dict[str, list[str]] = {name: [] for name in HELP}
    for name, labels, value in samples:
        if value is not None:
            told = ",".join(f'{label}="{escaped(str(text))}"' for label, text in labels.items())
            lines[name].append(f"{_full(name)}{{{told}}} {_shown(value)}" if told else f"{_full(name)} {_shown(value)}")
    families = (
        [f"# HELP {_full(name)} {HELP[name]}.", f"# TYPE {_full(name)} {_kind(name)}", *each]
        for name, each in lines.items()
        if each
    )
    return "".join(f"{line}\n" for family in families for line in family)


def _samples(found: Mapping[str, Any]) -> Iterator[Sample]:
    yield "runs", {}, found["runs"]
    for task, node in found["nodes"].items():
        yield "node_up", {"task": task}, node["up"]
        yield "node_losses", {"task": task}, node["losses"]
        yield from _samples_of_node(task, node)
        for queue, state in node.get("queues", {}).items():
            named = {"task": task, "queue": queue}
            yield "queue_size", named, state["size"]
            yield "queue_capacity", named, state["capacity"]
            for side in ("enqueues", "dequeues"):
                yield "queue_waiting", {**named, "to": side[:-1]}, state[f"waiting_{side}"]
    for name, trainer in found["trainers"].items():
        yield from _samples_of_trainer({"trainer": name}, trainer)


def _samples_of_node(task: str, node: Mapping[str, Any]) -> Iterator[Sample]:
    """What a node knows of itself: see `NetworkNode.statistics`."""
    named = {"task": task}
    yield "node_steps", named, node.get("steps")
    yield "node_sessions", named, node.get("masters")
    yield "node_messages_sent", named, node.get("messages")
    yield "node_bytes_sent", {**named, "by": "memory"}, node.get("bytes_shared")
    yield "node_bytes_sent", {**named, "by": "socket"}, node.get("bytes_by_socket")
    for device, memory in node.get("memory", {}).items():
        there = {**named, "device": device}
        yield "memory_bytes", there, memory["held"]
        yield "memory_peak_bytes", there, memory["peak"]
        yield "memory_limit_bytes", there, memory["limit"]


def _samples_of_trainer(named: dict[str, Any], trainer: Mapping[str, Any]) -> Iterator[Sample]:
    yield "train_steps", named, trainer["steps"]
    yield "train_dropped_batches", named, trainer["dropped_batches"]
    for number, replica in trainer["replicas"].items():
        one = {**named, "replica": number}
        for outcome in OUTCOMES:
            yield "train_updates", {**one, "outcome": outcome}, replica[outcome]
        yield "train_latency_seconds", {**one, "quantile": 0.5}, replica["median_seconds"]
        yield "train_latency_seconds", {**one, "quantile": 0.95}, replica["p95_seconds"]
    for slow in trainer["slow"]:
        who = "all" if slow["replica"] is None else slow["replica"]
        yield "train_slow", {**named, "replica": who, "cause": slow["cause"]}, slow["factor"]


def _full(name: str) -> str:
    return f"flowrt_{name}_total" if name in COUNTERS else f"flowrt_{name}"


def _kind(name: str) -> str:
    return "counter" if name in COUNTERS else "gauge"


def escaped(text: str) -> str:
    """A label's value as it stands between quotes."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _shown(value: float) -> str:
    number = float(value)
    if math.isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    return str(int(number)) if number.is_integer() else repr(number)
