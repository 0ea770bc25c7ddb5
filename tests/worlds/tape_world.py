"""Plans for tests of regions and tapes, and a naive interpreter of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import flowrt.kernels.ops.elementwise
import flowrt.kernels.ops.shape
import flowrt.ops  # noqa: F401  (fills the registry)
from flowrt.base.plan import Plan, PlanFeed, PlanNode
from flowrt.base.spec import Spec, spec_of
from flowrt.kernels.launch import RUN_WORDS, SEED, STEP
from flowrt.op import lookup
from flowrt.sched.regions.regions import Region, find_regions
from flowrt.sched.tape import schedule
from flowrt.sched.tape.pace import Pace
from flowrt.sched.tape.tape import Tape

if TYPE_CHECKING:
    import pytest

    from flowrt.sched.host.lanes import Crew

Array = np.ndarray[Any, Any]

MEANING: Mapping[str, Any] = {
    "add": lambda a, b: a + b,
    "add_n": lambda a, *others: sum(others, a),
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "maximum": np.maximum,
    "negative": lambda a: -a,
    "square": lambda a: a * a,
    "relu": lambda a: np.maximum(a, 0),
    "identity": lambda a: a,
    "reshape": lambda a, shape: a.reshape(shape),
    "transpose": np.transpose,
    "broadcast_to": lambda a, shape: np.broadcast_to(a, shape).copy(),
    "shape_of": lambda a: np.array(a.shape, np.int64),
    "sum": np.sum,
    "max": np.max,
    "cumsum": np.cumsum,
}


class PlanMaker:
    """Adds nodes one by one, as a graph would; answers value ids. Feeds must come first."""

    def __init__(self) -> None:
        self.nodes: list[PlanNode] = []
        self.feeds: list[PlanFeed] = []
        self.specs: list[Spec] = []

    def feed(self, dtype: str, shape: Sequence[int | None]) -> int:
        assert not self.nodes
        self.feeds.append(PlanFeed(f"x{len(self.feeds)}", Spec(dtype, shape), "train.py:1"))
        self.specs.append(self.feeds[-1].spec)
        return len(self.specs) - 1

    def node(self, op: str, *inputs: int, control: Sequence[int] = (), device: str = "cpu:0", **attrs: Any) -> int:
        """The first output's value id; for a node without outputs, the number of values so far."""
        outputs = lookup(op).infer([self.specs[v] for v in inputs], attrs)
        number = len(self.nodes)
        site = f"train.py:{number + 10}"
        self.nodes.append(PlanNode(op, f"{op}_{number}", inputs, outputs, attrs, tuple(control), device, site))
        self.specs += outputs
        return len(self.specs) - len(outputs)

    def constant(self, value: Any) -> int:
        array = np.asarray(value)
        return self.node("constant", value=array.astype(np.float32) if array.dtype == np.float64 else array)

    def read(self, name: str, shape: Sequence[int], control: Sequence[int] = ()) -> int:
        return self.node(
            "read_variable", control=control, resource=name, container="", dtype="float32", shape=tuple(shape)
        )

    def write(self, op: str, name: str, value: int, control: Sequence[int] = ()) -> int:
        """The position of the node that writes."""
        shape = self.specs[value].concrete
        self.node(op, value, control=control, resource=name, container="", dtype="float32", shape=shape)
        return self.last

    @property
    def last(self) -> int:
        return len(self.nodes) - 1

    def plan(self, *fetches: int) -> Plan:
        return Plan("/job:worker/task:0", tuple(self.nodes), tuple(self.feeds), fetches)


def interpret(plan: Plan, feeds: Sequence[Array], variables: dict[str, Array]) -> list[Array]:
    """Every value of ``plan``, computed by NumPy in plan order; ``variables`` are written in place."""
    values: list[Array] = [np.asarray(feed) for feed in feeds]
    for node in plan.nodes:
        inputs = [values[v] for v in node.inputs]
        match node.op:
            case "constant":
                values.append(node.attrs["value"])
            case "read_variable":
                values.append(variables[node.attrs["resource"]].copy())
            case "assign":
                variables[node.attrs["resource"]][...] = inputs[0]
            case "assign_add":
                variables[node.attrs["resource"]] += inputs[0]
            case "assign_sub":
                variables[node.attrs["resource"]] -= inputs[0]
            case "no_op":
                pass
            case op:
                attrs = {k: v for k, v in node.attrs.items() if k in ("axes", "axis", "keepdims")}
                values.append(np.asarray(MEANING[op](*inputs, **attrs)))
    return values


def whole_region(plan: Plan) -> Region:
    (region,) = find_regions(plan, lambda node: False)
    return region


def words(step: int = 0, seed: int = 0) -> Array:
    out = np.zeros(RUN_WORDS, np.int64)
    out[STEP], out[SEED] = step, seed
    return out


def tape_of(plan: Plan, *inputs: Array) -> Tape:
    return Tape(plan, whole_region(plan), [spec_of(a) for a in inputs])


def array(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def random_plan(rng: random.Random) -> tuple[Plan, list[Array], dict[str, Array]]:
    make = PlanMaker()
    shapes = [(2, 3), (3,), (2, 1), (), (0, 3)] if rng.random() < 0.2 else [(2, 3), (3,), (2, 1), ()]
    feeds = [array(*rng.choice(shapes), seed=i) for i in range(3)]
    values = [make.feed("float32", tuple(None if rng.random() < 0.3 else n for n in feed.shape)) for feed in feeds]
    for value, feed in zip(values, feeds, strict=True):
        make.specs[value] = Spec("float32", feed.shape)  # grow the plan on what will be fed
    state = {name: array(2, 3, seed=i + 10) for i, name in enumerate("uv")}
    last_write: dict[str, int] = {}
    for _ in range(rng.randrange(3, 40)):
        draw, value = rng.random(), rng.choice(values[-6:])
        spec = make.specs[value]
        if draw < 0.15:
            values.append(make.node(rng.choice(["negative", "square", "identity"]), value))
        elif draw < 0.25:
            axes = list(range(spec.rank))
            rng.shuffle(axes)
            values.append(make.node("transpose", value, axes=tuple(axes)))
        elif draw < 0.4:
            shape = make.constant(np.array([spec.size], np.int64))
            values.append(make.node("reshape", value, shape))
        elif draw < 0.45:
            values.append(make.constant(array(2, 3, seed=rng.randrange(100))))
        elif draw < 0.55:
            name = rng.choice("uv")
            values.append(make.read(name, (2, 3), control=[last_write[name]] if name in last_write else []))
        elif draw < 0.65 and any(make.specs[v].dims == (2, 3) for v in values):
            name = rng.choice("uv")
            source = rng.choice([v for v in values if make.specs[v].dims == (2, 3)])
            last_write[name] = make.write(rng.choice(["assign", "assign_add", "assign_sub"]), name, source)
        else:
            other = rng.choice([v for v in values if fits(make.specs[v], spec)])
            values.append(make.node(rng.choice(["add", "subtract", "multiply", "maximum"]), value, other))
    return make.plan(*rng.sample(values, min(4, len(values)))), feeds, state


def fits(a: Spec, b: Spec) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a.concrete), reversed(b.concrete), strict=False))


def divided(tape: Tape, plan: Plan, crew: Crew, monkeypatch: pytest.MonkeyPatch, seed: int | None = None) -> Tape:
    """``tape``, shared by ``crew`` as if its launches took long, or at random."""
    monkeypatch.setattr(schedule, "GAIN", float("inf"))
    launches, rng = tape.recording.launches, random.Random(seed)
    tape.pace = Pace(plan, launches, crew.threads)
    tape.pace.left = 0
    tape.pace.decide([1.0 if seed is None else rng.choice([1e-7, 2e-6, 1e-4]) for _ in launches] or [1.0])
    return tape
