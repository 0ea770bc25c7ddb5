"""Plans written by hand for two tasks and the client, as partition would write them."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrt.base.plan import Plan, PlanNode
from flowrt.base.spec import Spec
from flowrt.base.valueclass import replace

CLIENT = "/job:client/task:0"
PS = "/job:ps/task:0"
WORKERS = ["/job:worker/task:0", "/job:worker/task:1"]


class Writer:
    """Writes one plan, node by node; each call answers the value it makes, or the position of a node without one."""

    def __init__(self, task: str) -> None:
        self.task = task
        self._nodes: list[PlanNode] = []
        self._values = 0

    def node(self, op: str, *inputs: int, out: Spec | None = None, control: tuple[int, ...] = (), **attrs: Any) -> int:
        outputs = () if out is None else (out,)
        name = f"{op}_{len(self._nodes)}"
        self._nodes.append(PlanNode(op, name, inputs, outputs, attrs, control, site="plans.py:1"))
        self._values += len(outputs)
        return self._values - 1 if outputs else len(self._nodes) - 1

    def recv(self, edge: int, peer: str, spec: Spec, control: tuple[int, ...] = ()) -> int:
        return self.node(
            "recv", out=spec, edge=edge, peer=peer, dtype=spec.dtype.name, shape=spec.dims, control=control
        )

    def send(self, value: int, edge: int, peer: str) -> int:
        return self.node("send", value, edge=edge, peer=peer)

    def switch(self, name: str, data: int, pred: int, spec: Spec) -> tuple[int, int]:
        self._nodes.append(PlanNode("switch", name, (data, pred), (spec, spec), site="plans.py:1"))
        self._values += 2
        return self._values - 2, self._values - 1

    def merge(self, name: str, one: int, other: int, spec: Spec) -> int:
        self._nodes.append(PlanNode("merge", name, (one, other), (spec, Spec("int64", ())), site="plans.py:1"))
        self._values += 2
        return self._values - 2

    def plan(self) -> Plan:
        return Plan(self.task, tuple(self._nodes))


def echo(task: str, spec: Spec) -> dict[str, Any]:
    """A step on one task that answers its feed plus itself."""
    w = Writer(task)
    x = w.recv(0, CLIENT, spec)
    w.send(w.node("add", x, x, out=spec), 1, CLIENT)
    return {"plans": {task: w.plan()}, "feeds": [[(0, task)]], "fetches": [(1, task)]}


def relay(first: str, second: str, spec: Spec) -> dict[str, Any]:
    """The client feeds ``first``, which doubles for ``second``, which doubles for the client."""
    a, b = Writer(first), Writer(second)
    x = a.recv(0, CLIENT, spec)
    a.send(a.node("add", x, x, out=spec), 1, second)
    y = b.recv(1, first, spec)
    b.send(b.node("add", y, y, out=spec), 2, CLIENT)
    return {"plans": {first: a.plan(), second: b.plan()}, "feeds": [[(0, first)]], "fetches": [(2, second), 0]}


def chain(first: str, second: str, third: str, spec: Spec) -> dict[str, Any]:
    """The client feeds ``first``; each doubles for the next, and ``third`` for the client."""
    step, c = relay(first, second, spec), Writer(third)
    y = c.recv(2, second, spec)
    c.send(c.node("add", y, y, out=spec), 3, CLIENT)
    *before, last = step["plans"][second].nodes
    on = replace(last, attrs={**last.attrs, "peer": third})
    plans = {**step["plans"], second: Plan(second, (*before, on)), third: c.plan()}
    return {"plans": plans, "feeds": step["feeds"], "fetches": [(3, third), 0]}


def counter(task: str, container: str) -> dict[str, dict[str, Any]]:
    """Steps on a variable: set it to the feed, add the feed to it, read it."""
    spec = Spec("float64", (3,))
    where = {"resource": "v", "container": container, "dtype": "float64", "shape": (3,)}
    steps = {}
    for name in ("assign", "assign_add"):
        w = Writer(task)
        w.node(name, w.recv(0, CLIENT, spec), **where)
        steps[name] = {"plans": {task: w.plan()}, "feeds": [[(0, task)]], "fetches": []}
    w = Writer(task)
    w.send(w.node("read_variable", out=spec, fresh=False, **where), 0, CLIENT)
    steps["read"] = {"plans": {task: w.plan()}, "feeds": [], "fetches": [(0, task)]}
    return steps


QUEUE = {"capacity": 1, "order": ("fifo",), "dtypes": ("float64",), "shapes": ((),)}


def waiting(task: str, other: str) -> dict[str, Any]:
    """``task`` waits on a queue that nobody fills; ``other`` waits for what it would send."""
    spec = Spec("float64", ())
    a, b = Writer(task), Writer(other)
    a.send(a.node("dequeue", out=spec, resource="never", container="", **QUEUE), 0, other)
    b.send(b.recv(0, task, spec), 1, CLIENT)
    return {"plans": {task: a.plan(), other: b.plan()}, "feeds": [], "fetches": [(1, other)]}


def failing(task: str, other: str) -> dict[str, Any]:
    """``task`` dequeues from a queue that it closes; ``other`` waits for the value."""
    spec = Spec("float64", ())
    a, b = Writer(task), Writer(other)
    closed = {"resource": "closed", "container": ""} | QUEUE
    close = a.node("queue_close", cancel_pending_enqueues=False, **closed)
    a.send(a.node("dequeue", out=spec, control=(close,), **closed), 0, other)
    b.send(b.recv(0, task, spec), 1, CLIENT)
    return {"plans": {task: a.plan(), other: b.plan()}, "feeds": [], "fetches": [(1, other)]}


def dead(task: str) -> dict[str, Any]:
    """A fetch from the side of a switch that the feed decides."""
    spec = Spec("float64", ())
    w = Writer(task)
    pred = w.recv(0, CLIENT, Spec("bool", ()))
    one = w.node("constant", out=spec, value=np.asarray(1.0))
    w.send(w.switch("choice", one, pred, spec)[1], 1, CLIENT)
    return {"plans": {task: w.plan()}, "feeds": [[(0, task)]], "fetches": [(1, task)]}
