"""A small world to judge passes in: random graphs, what they mean, and what the plans made of them compute.

`meaning` reads a graph as its author would, node by node in the order written. `run_plans` is a runtime in miniature:
it starts any node whose inputs and controls are done, in random order, and delivers sends through mailboxes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrt.base.device import Device
from flowrt.graph import Graph, Node, Tensor, colocate_with, control_dependencies, device
from flowrt.ops.elementwise import add, add_n, multiply, negative, subtract
from flowrt.ops.flow import identity, merge, switch
from flowrt.ops.source import constant, placeholder, shape_of
from flowrt.ops.state import Variable
from flowrt.passes import Compiled, Transfer

DEAD = object()
CLIENT = "/job:client/task:0"
CPU = Device("local", 0, "cpu", 0)
LOCAL = (CPU, Device("local", 0, "cpu", 1))
CLUSTER = tuple(Device(job, task, "cpu", i) for job, task in (("ps", 0), ("worker", 0), ("worker", 1)) for i in (0, 1))

State = dict[str, Any]

NAIVE: dict[str, Any] = {
    "constant": lambda attrs: attrs["value"],
    "add": lambda attrs, a, b: a + b,
    "subtract": lambda attrs, a, b: a - b,
    "multiply": lambda attrs, a, b: a * b,
    "negative": lambda attrs, a: -a,
    "identity": lambda attrs, a: a,
    "add_n": lambda attrs, *values: sum(values[1:], values[0]),
    "full_like": lambda attrs, a, value: np.full_like(a, value),
    "shape_of": lambda attrs, a: np.array(a.shape, np.int64),
    "bring": lambda attrs, a: a,
    "concat": lambda attrs, *values: np.concatenate(values, attrs["axis"]),
    "reshape": lambda attrs, a, shape: a.reshape(shape),
    "getitem": lambda attrs, a: a[tuple(slice(*part) for part in attrs["key"])],
}


def everywhere(op: str, dtypes: Sequence[Any], kind: str) -> bool:
    """A `supports` by which every op runs on every device."""
    return True


def evaluate(op: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What folds constants here."""
    return (np.asarray(NAIVE[op.name](attrs, *arrays)),)


def _perform(op: str, attrs: Mapping[str, Any], inputs: Sequence[Any], state: State, initial: State) -> list[Any]:
    """The outputs of one live node; ``initial`` is the state before the step."""
    if op == "switch":
        return [DEAD, inputs[0]] if inputs[1] else [inputs[0], DEAD]
    if op == "merge":
        alive = [i for i, value in enumerate(inputs) if value is not DEAD]
        return [inputs[alive[0]], np.int64(alive[0])] if alive else [DEAD, DEAD]
    if op == "read_variable":
        return [(state if attrs["fresh"] else initial)[attrs["resource"]].copy()]
    if op in ("assign", "assign_add", "assign_sub"):
        old = state[attrs["resource"]]
        state[attrs["resource"]] = {"assign": 0, "assign_add": old, "assign_sub": old}[op] + (
            -inputs[0] if op == "assign_sub" else inputs[0]
        )
        return []
    if op == "no_op":
        return []
    return [NAIVE[op](attrs, *inputs)]


def _is_dead(op: str, inputs: Sequence[Any], dead_control: bool) -> bool:
    return dead_control or (op != "merge" and any(value is DEAD for value in inputs))


# ── what a graph means ───────────────────────────────────────────────────────────────────────────────────────────────


def meaning(
    graph: Graph, fetches: Sequence[Tensor], targets: Sequence[Node], feeds: Mapping[Tensor, Any], initial: State
) -> tuple[list[Any], State]:
    """The fetches and the state after the step, computed naively."""
    needed = _needed([t.op for t in fetches if t not in feeds] + list(targets), feeds)
    values: dict[Tensor, Any] = dict(feeds)
    state, dead = dict(initial), set()
    for node in graph.nodes:
        if node not in needed:
            continue
        inputs = [values[t] for t in node.inputs]
        if _is_dead(node.op.name, inputs, any(n in dead for n in node.control_inputs)):
            dead.add(node)
            found = [DEAD] * len(node.outputs)
        else:
            found = _perform(node.op.name, node.attrs, inputs, state, initial)
            if node.op.name == "merge" and found[0] is DEAD:
                dead.add(node)
        for tensor, value in zip(node.outputs, found, strict=True):
            values.setdefault(tensor, value)
    return [values[t] for t in fetches], state


def _needed(roots: Sequence[Node], feeds: Mapping[Tensor, Any]) -> set[Node]:
    found: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [t.op for t in node.inputs if t not in feeds]
            stack += [n for n in node.control_inputs if not (n.outputs and all(t in feeds for t in n.outputs))]
    return found


# ── what plans compute ───────────────────────────────────────────────────────────────────────────────────────────────


def run_plans(compiled: Compiled, feeds: Sequence[Any], initial: State, rng: random.Random) -> tuple[list[Any], State]:
    """The fetches and the state after the step, computed by the plans, whatever is ready in any order."""
    mail: dict[tuple[int, str], Any] = {}
    client = compiled.client
    if client is not None:
        for value, transfers in zip(feeds, client.feeds, strict=True):
            mail |= {(t.edge, t.task): value for t in transfers}
    state = dict(initial)
    tasks = [_Task(plan, feeds if client is None else (), mail, state, initial) for plan in compiled.plans.values()]
    while True:
        ready = [(task, i) for task in tasks for i in task.ready()]
        if not ready:
            break
        task, i = rng.choice(ready)
        task.run(i)
    assert all(not task.left for task in tasks), "the plans wait for each other"
    if client is None:
        return [tasks[0].values[v] for v in tasks[0].plan.fetches], state
    got = [feeds[f] if not isinstance(f, Transfer) else mail[f.edge, client.name] for f in client.fetches]
    return list(client.answers(got)), state


class _Task:
    def __init__(self, plan: Any, feeds: Sequence[Any], mail: dict[Any, Any], state: State, initial: State) -> None:
        self.plan, self.mail, self.state, self.initial = plan, mail, state, initial
        self.values: dict[int, Any] = dict(enumerate(feeds))
        self.starts = plan.value_starts()
        self.left = set(range(len(plan.nodes)))
        self.dead: set[int] = set()

    def ready(self) -> list[int]:
        return [i for i in self.left if self._is_ready(self.plan.nodes[i])]

    def _is_ready(self, node: Any) -> bool:
        if node.op == "recv" and (node.attrs["edge"], self.plan.task) not in self.mail:
            return False
        return all(v in self.values for v in node.inputs) and not any(c in self.left for c in node.control)

    def run(self, i: int) -> None:
        node = self.plan.nodes[i]
        inputs = [self.values[v] for v in node.inputs]
        found = self._outputs(i, node, inputs)
        assert len(found) == len(node.outputs)
        for at, (value, spec) in enumerate(zip(found, node.outputs, strict=True)):
            if value is not DEAD:
                array = np.asarray(value)
                assert spec.accepts(array.dtype, array.shape), f"{node.where()} said {spec}"
                assert spec.value is None or np.array_equal(np.array(spec.value), array)
            self.values[self.starts[i] + at] = value
        self.left.discard(i)

    def _outputs(self, i: int, node: Any, inputs: Sequence[Any]) -> list[Any]:
        dead_control = any(c in self.dead for c in node.control)
        if node.op == "send":
            key = (node.attrs["edge"], node.attrs["peer"])
            assert key not in self.mail, "an edge was used twice"
            self.mail[key] = DEAD if dead_control else inputs[0]
            return []
        if node.op == "recv":
            value = DEAD if dead_control else self.mail.pop((node.attrs["edge"], self.plan.task))
            if value is DEAD:
                self.dead.add(i)
            return [value]
        if _is_dead(node.op, inputs, dead_control):
            self.dead.add(i)
            return [DEAD] * len(node.outputs)
        found = _perform(node.op, node.attrs, inputs, self.state, self.initial)
        if node.op == "merge" and found[0] is DEAD:
            self.dead.add(i)
        return found


# ── random graphs ────────────────────────────────────────────────────────────────────────────────────────────────────

SHAPE = (2,)


class RandomGraph:
    """A graph of integers, its feeds, fetches and targets, all drawn from one seed."""

    def __init__(self, seed: int, devices: Sequence[Device], nodes: int = 25) -> None:
        self.rng = random.Random(seed)
        self.graph = Graph()
        self.pool: list[Tensor] = []
        self.last: dict[str, Node] = {}  # the newest access to each variable that has an order
        self.writes: list[Node] = []
        self.devices = devices
        with self.graph:
            self.x, self.pred = placeholder("int64", SHAPE, name="x"), placeholder("bool", (), name="pred")
            self.pool.append(self.x)
            self.variables = [self._placed(self._variable, i) for i in range(2)]
            builds = [self._combine] * 4 + [self._constant, self._choose, self._write, self._read]
            for _ in range(nodes):
                self._placed(self.rng.choice(builds))
        self.initial: State = {v.name: self._array() for v in self.variables}
        fed = {self.x, *(t for t in self.pool if t.op.resource is None and self.rng.random() < 0.06)}
        fed |= {v.__tensor__() for v in self.variables if self.rng.random() < 0.1}
        self.feeds: dict[Tensor, Any] = {t: self._array(t.shape) for t in sorted(fed, key=lambda t: t.name)}
        self.feeds[self.pred] = np.bool_(self.rng.random() < 0.5)
        self.fetches = [self.rng.choice(self.pool) for _ in range(self.rng.randint(1, 4))]
        self.targets = [w for w in self.writes if self.rng.random() < 0.5]

    def _placed(self, build: Any, *args: Any) -> Any:
        """``build`` under a random device scope, or beside another node, or nowhere in particular."""
        draw = self.rng.random()
        if draw < 0.4:
            chosen = self.rng.choice(self.devices)
            name = self.rng.choice([str(chosen), chosen.host, f"/job:{chosen.job}"])
            with device(name):
                return build(*args)
        if draw < 0.45 and self.pool:
            with colocate_with(self.rng.choice(self.pool)):
                return build(*args)
        return build(*args)

    def _array(self, shape: tuple[int | None, ...] = SHAPE) -> Any:
        return np.array([self.rng.randint(-9, 9) for _ in range(int(np.prod(shape)))], np.int64).reshape(shape)

    def _variable(self, i: int) -> Variable:
        made = Variable(self._array(), name=f"v{i}")
        self.pool.append(made.__tensor__())
        return made

    def _constant(self) -> None:
        self.pool.append(constant(np.full(SHAPE, self.rng.randint(0, 2))))

    def _combine(self) -> None:
        a, b = self.rng.choice(self.pool), self.rng.choice(self.pool)
        build = self.rng.choice([add, subtract, multiply, self._negate, self._sum, self._shape])
        if self.rng.random() < 0.1:
            with control_dependencies([self.rng.choice(self.pool)]):
                self.pool.append(build(a, b))
        else:
            self.pool.append(build(a, b))

    def _negate(self, a: Tensor, b: Tensor) -> Any:
        return negative(identity(a))

    def _sum(self, a: Tensor, b: Tensor) -> Any:
        return add_n([a, b, a])

    def _shape(self, a: Tensor, b: Tensor) -> Any:
        return add(shape_of(a), b)

    def _choose(self) -> None:
        if_false, if_true = switch(self.rng.choice(self.pool), self.pred)
        one, other = add(if_false, self.rng.choice(self.pool)), multiply(if_true, 3)
        self.pool += [merge([one, other])[0]]
        self.pool += [value for value in (one, other) if self.rng.random() < 0.2]

    def _write(self) -> None:
        variable = self.rng.choice(self.variables)
        with control_dependencies([self.last[variable.name]] if variable.name in self.last else []):
            write = self.rng.choice([variable.assign, variable.assign_add, variable.assign_sub])
            self.last[variable.name] = write(self.rng.choice(self.pool))
        self.writes.append(self.last[variable.name])

    def _read(self) -> None:
        variable = self.rng.choice(self.variables)
        with control_dependencies([self.last[variable.name]] if variable.name in self.last else []):
            made = variable.read()
        self.last[variable.name] = made.op
        self.pool.append(made)
