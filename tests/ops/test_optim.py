"""Optimisers against their formulas in NumPy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pass_world import compiled

import flowrt as fr
from flowrt.base.device import Device

if TYPE_CHECKING:
    from pathlib import Path

START = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32)
GOAL = np.array([[0.0, 1.0], [2.0, -1.0]], np.float32)
STEPS = 10


def gradient(p: np.ndarray) -> np.ndarray:
    """Of the sum of (p - GOAL)²."""
    return 2 * (p - GOAL)


Slots = dict[str, np.ndarray]
Rule = Callable[[np.ndarray, np.ndarray, Slots, int], np.ndarray]  # what is subtracted at a rate of 1, at step 1 and up


def sgd(p: np.ndarray, g: np.ndarray, slots: Slots, t: int) -> np.ndarray:
    return g


def momentum(p: np.ndarray, g: np.ndarray, slots: Slots, t: int) -> np.ndarray:
    slots["v"] = 0.9 * slots.get("v", 0) + g
    return slots["v"]


def nesterov(p: np.ndarray, g: np.ndarray, slots: Slots, t: int) -> np.ndarray:
    return g + 0.9 * momentum(p, g, slots, t)


def adagrad(p: np.ndarray, g: np.ndarray, slots: Slots, t: int) -> np.ndarray:
    slots["a"] = slots.get("a", 0.1) + g**2
    return g / (np.sqrt(slots["a"]) + 1e-7)


def rmsprop(p: np.ndarray, g: np.ndarray, slots: Slots, t: int) -> np.ndarray:
    slots["s"] = 0.8 * slots.get("s", 0) + 0.2 * g**2
    return g / (np.sqrt(slots["s"]) + 1e-3)


def rmsprop_with_momentum(p: np.ndarray, g: np.ndarray, slots: Slots, t: int) -> np.ndarray:
    slots["v"] = 0.7 * slots.get("v", 0) + rmsprop(p, g, slots, t)
    return slots["v"]


def adam(p: np.ndarray, g: np.ndarray, slots: Slots, t: int) -> np.ndarray:
    slots["m"] = 0.9 * slots.get("m", 0) + 0.1 * g
    slots["s"] = 0.999 * slots.get("s", 0) + 0.001 * g**2
    return slots["m"] / (1 - 0.9**t) / (np.sqrt(slots["s"] / (1 - 0.999**t)) + 1e-8)


def adamw(p: np.ndarray, g: np.ndarray, slots: Slots, t: int) -> np.ndarray:
    return adam(p, g, slots, t) + 0.05 * p


RULES: list[tuple[Callable[[object], fr.optim.Optimizer], Rule]] = [
    (fr.optim.SGD, sgd),
    (lambda rate: fr.optim.Momentum(rate, 0.9), momentum),
    (lambda rate: fr.optim.Momentum(rate, 0.9, nesterov=True), nesterov),
    (fr.optim.AdaGrad, adagrad),
    (lambda rate: fr.optim.RMSProp(rate, 0.8, epsilon=1e-3), rmsprop),
    (lambda rate: fr.optim.RMSProp(rate, 0.8, 0.7, 1e-3), rmsprop_with_momentum),
    (fr.optim.Adam, adam),
    (lambda rate: fr.optim.AdamW(rate, weight_decay=0.05), adamw),
]


@pytest.mark.parametrize(("make", "rule"), RULES, ids=[rule.__name__ for _, rule in RULES])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
async def test_each_step_follows_the_formula(
    make: Callable[[object], fr.optim.Optimizer], rule: Rule, dtype: str, as_tensor: bool
) -> None:
    with fr.Graph() as graph:
        p = fr.Variable(START.astype(dtype), name="p")
        loss = fr.sum(fr.square(p - fr.constant(GOAL.astype(dtype))))
        train = make(fr.constant(0.1) if as_tensor else 0.1).minimize(loss)
    expected, slots = START.astype(np.float64), Slots()
    rate = float(np.float32(0.1)) if as_tensor else 0.1
    async with fr.Session(graph) as session:
        for step in range(1, STEPS + 1):
            await session.run(train)
            expected = expected - rate * rule(expected, gradient(expected), slots, step)
            margin = 1e-5 if dtype == "float32" else 1e-10
            np.testing.assert_allclose(await session.run(p), expected, rtol=margin, atol=margin)


async def test_a_mean_without_memory_needs_no_correction() -> None:
    """With beta1 and beta2 of 0 Adam moves by the rate, whatever the gradient."""
    with fr.Graph() as graph:
        p = fr.Variable(START, name="p")
        train = fr.optim.Adam(0.5, beta1=0, beta2=0).minimize(fr.sum(fr.square(p - GOAL)))
    async with fr.Session(graph) as session:
        await session.run(train)
        np.testing.assert_allclose(await session.run(p), START - 0.5 * np.sign(START - GOAL), rtol=1e-6)
    with pytest.raises(fr.GraphError, match=r"test_optim\.py:\d+.*beta2 must be from 0 up to 1"):
        fr.optim.Adam(0.5, beta2=1.0)


@pytest.mark.parametrize(("make", "rule"), RULES[-1:], ids=["adamw"])
async def test_replicas_train_by_their_mean_gradient(make: Callable[[object], fr.optim.Optimizer], rule: Rule) -> None:
    def loss_fn(inputs: dict[str, fr.Tensor]) -> fr.Tensor:
        p = fr.Variable(START, name="p")
        return fr.sum(fr.square(p - inputs["goal"]))

    inputs = {"goal": fr.Spec("float32", START.shape)}
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(
            loss_fn, inputs, make(0.1), replicas=2, policy=fr.train.AllOf(), server_device="", worker_device=""
        )
    expected, slots = START.astype(np.float64), Slots()
    batches = [{"goal": GOAL}, {"goal": 3 * GOAL}] * STEPS
    async with fr.Session(graph) as session:
        reports = [report.step async for report in trainer.steps(session, batches)]
        moved = await session.run(trainer.variables[0])
    for step in reports:
        expected = expected - 0.1 * rule(expected, 2 * (expected - 2 * GOAL), slots, step)
    assert reports == list(range(1, STEPS + 1))
    np.testing.assert_allclose(moved, expected, rtol=1e-5)
    assert {v.name for v in graph.variables} >= {"p", "p/first_moment", "p/second_moment", "p/steps"}


async def test_what_an_optimiser_remembers_is_a_variable_that_is_not_trained() -> None:
    with fr.Graph() as graph:
        p = fr.Variable(START, name="p")
        fr.optim.Momentum(0.1, 0.9).minimize(fr.sum(p))
    velocity = graph.variables[-1]
    assert velocity.name == "p/momentum"
    assert not velocity.trainable
    assert velocity.spec == p.spec


async def test_only_the_variables_asked_for_move() -> None:
    with fr.Graph() as graph:
        moved, still, frozen = (fr.Variable(START, name=n, trainable=n != "frozen") for n in ("a", "b", "frozen"))
        train = fr.optim.SGD(0.5).minimize(fr.sum(moved * still * frozen), variables=[moved])
    async with fr.Session(graph) as session:
        await session.run(train)
        np.testing.assert_allclose(await session.run(moved), START - 0.5 * START * START, rtol=1e-6)
        np.testing.assert_array_equal(await session.run([still, frozen]), [START, START])


def test_a_variable_the_loss_does_not_depend_on_has_no_gradient_and_stays() -> None:
    with fr.Graph():
        used, unused = fr.Variable(START, name="used"), fr.Variable(START, name="unused")
        pairs = fr.optim.SGD(0.1).compute_gradients(fr.sum(used))
    assert [variable for _, variable in pairs] == [used, unused]
    assert pairs[1][0] is None


def test_nothing_to_minimize_is_an_error_that_names_the_variables() -> None:
    with fr.Graph():
        fr.Variable(START, name="weights")
        with pytest.raises(fr.GraphError, match=r"test_optim\.py:\d+.*does not depend on 'weights'"):
            fr.optim.SGD(0.1).minimize(fr.sum(fr.constant(START)))
    with fr.Graph(), pytest.raises(fr.GraphError, match="no trainable variable"):
        fr.optim.SGD(0.1).minimize(fr.sum(fr.constant(START)))
    with fr.Graph(), pytest.raises(fr.GraphError, match="no gradients to apply"):
        fr.optim.SGD(0.1).apply_gradients([])


@pytest.mark.parametrize("norm", [1.0, 100.0])
async def test_gradients_are_clipped_by_their_common_norm(norm: float) -> None:
    grads = [START, np.array([3.0, 4.0], np.float32)]
    actual = np.sqrt(sum((g**2).sum() for g in grads))
    with fr.Graph() as graph:
        clipped, total = fr.optim.clip_by_global_norm([fr.constant(grads[0]), None, fr.constant(grads[1])], norm)
    assert clipped[1] is None
    async with fr.Session(graph) as session:
        first, second, measured = await session.run([clipped[0], clipped[2], total])
    np.testing.assert_allclose(measured, actual, rtol=1e-6)
    scale = min(1.0, norm / actual)
    np.testing.assert_allclose(first, grads[0] * scale, rtol=1e-5)
    np.testing.assert_allclose(second, grads[1] * scale, rtol=1e-5)


def _counts(graph: fr.Graph) -> list[str]:
    return [v.name for v in graph.variables if "/steps" in v.name]


async def test_variables_that_move_together_have_one_count_in_each_place() -> None:
    """Of any dtype, shape and rank, and tables of which rows move; two updates count apart."""
    shapes: list[tuple[int, ...]] = [(), (3,), (0, 2), (2, 1, 2)]
    with fr.Graph() as graph:
        moved = [fr.Variable(np.ones(s, d), name="p") for s in shapes for d in ("float32", "float64")]
        table = fr.Variable(np.ones((4, 2), np.float32), name="table")
        rows = fr.nn.embedding_lookup(table, fr.constant([1, 1, 3]))
        loss = fr.add_n([fr.astype(fr.sum(p * p), "float32") for p in moved]) + fr.sum(rows)
        train, other = fr.optim.Adam(0.1).minimize(loss), fr.optim.AdamW(0.1).minimize(loss)
    assert _counts(graph) == ["p/steps", "p/steps_1"]
    expected = [np.ones(s) for s in shapes for _ in range(2)]
    slots: list[Slots] = [{} for _ in expected]
    async with fr.Session(graph) as session:
        for step in range(1, 4):
            await session.run(train)
            expected = [p - 0.1 * adam(p, 2 * p, kept, step) for p, kept in zip(expected, slots, strict=True)]
        for variable, value in zip(moved, expected, strict=True):
            np.testing.assert_allclose(await session.run(variable), value, rtol=1e-5)
        np.testing.assert_allclose((await session.run(table))[:, 0], [1, 0.7, 1, 0.7], rtol=1e-5)
        counts = [v for v in graph.variables if v.name in _counts(graph)]
        assert [int(n) for n in await session.run(counts)] == [3, 0]
        await session.run(other)
        assert [int(n) for n in await session.run(counts)] == [3, 1]


@pytest.mark.parametrize("optimizer", [fr.optim.Momentum(0.1, 0.9), fr.optim.AdaGrad(0.1), fr.optim.Adam(0.1)])
def test_what_is_kept_beside_variables_starts_from_the_same_constants(optimizer: fr.optim.Optimizer) -> None:
    def constants(variables: int) -> int:
        with fr.Graph() as graph:
            moved = [fr.Variable(fr.random.normal((2, 3), seed=n)) for n in range(variables)]
            gradient = fr.placeholder("float32", (2, 3))
            before = len(graph.nodes)
            optimizer.apply_gradients([(gradient, v) for v in moved])
        return sum(node.op.name == "constant" for node in graph.nodes[before:])

    assert constants(8) == constants(2)


def test_each_server_counts_for_itself() -> None:
    """So that no step waits for a number from elsewhere."""
    with fr.Graph() as graph:
        moved = []
        for n in range(4):
            with fr.device(f"/job:ps/task:{n % 2}"):
                moved.append(fr.Variable(np.full(2, n, np.float32), name=f"p{n}"))
        with fr.container("apart"), fr.device("/job:ps/task:1"):
            moved.append(fr.Variable(np.zeros(2, np.float32), name="q"))
        train = fr.optim.Adam(0.5).apply_gradients([(p * 2, p) for p in moved])
    assert _counts(graph) == ["p0/steps", "p1/steps", "q/steps"]
    servers = [Device.parse(f"/job:ps/task:{n}/device:cpu:0") for n in range(2)]
    plans = compiled([], [train], devices=servers, default=servers[0], client="/job:client/task:0").plans
    assert [[n.op for n in plans[s.host].nodes].count("assign") for s in servers] == [5, 8]
    assert "recv" not in [node.op for node in plans[servers[1].host].nodes]


async def test_a_checkpoint_keeps_the_common_count(tmp_path: Path) -> None:
    async def train(steps: int) -> list[np.ndarray]:
        with fr.Graph() as graph:
            pair = [fr.Variable(START, name="a"), fr.Variable(2 * START, name="b")]
            step = fr.optim.Adam(0.1).minimize(fr.add_n([fr.sum(fr.square(p - GOAL)) for p in pair]))
            counts = [v for v in graph.variables if v.name == "a/steps"]
        async with fr.Session(graph, checkpoints=fr.Checkpoints(tmp_path / "kept", every_steps=3)) as session:
            for _ in range(steps):
                await session.run(step)
            return list(await session.run([*counts, *pair]))

    straight = await train(6)
    shutil.rmtree(tmp_path / "kept")
    assert (await train(3))[0] == 3
    for again, value in zip(await train(3), straight, strict=True):
        np.testing.assert_array_equal(again, value)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda loss, v: fr.optim.Adam(learning_rate=0.1), r"Adam\(lr: .*test_optim.*'learning_rate'; write lr="),
        (lambda loss, v: fr.optim.Momentum(0.1), r"Momentum\(lr: .*missing a required argument: 'momentum'"),
        (
            lambda loss, v: fr.optim.SGD("0.1"),
            "is a finite number or a scalar tensor, not '0.1'",
        ),
        (lambda loss, v: fr.optim.SGD(np.nan), "not nan"),
        (lambda loss, v: fr.optim.SGD(np.ones(2)), "not array"),
        (
            lambda loss, v: fr.optim.SGD(0.1).minimize(loss, var_list=[v]),
            r"minimize\(.*'var_list'; write variables=",
        ),
        (lambda loss, v: fr.optim.clip_by_global_norm([v], max_norm=1), "'max_norm'; write norm="),
        (lambda loss, v: fr.optim.clip_by_global_norm([v], 0), "is more than 0, not 0"),
    ],
)
def test_arguments_that_an_optimiser_does_not_take_are_told_beside_those_that_it_does(call: Any, told: str) -> None:
    with fr.Graph():
        v = fr.Variable(START, name="v")
        with pytest.raises(fr.FlowrtError, match=told):
            call(fr.sum(v), v)


def test_one_variable_alone_may_be_named_to_minimise_along() -> None:
    with fr.Graph() as graph:
        moved, left = fr.Variable(START, name="moved"), fr.Variable(START, name="left")
        train = fr.optim.SGD(1.0).minimize(fr.sum(moved * left), moved)
    with fr.BlockingSession(graph) as session:
        session.run(train)
        np.testing.assert_array_equal(session.run(moved), 0 * START)
        np.testing.assert_array_equal(session.run(left), START)


def test_all_that_an_update_builds_is_of_the_line_that_asks_for_it() -> None:
    with fr.Graph() as graph:
        w = fr.Variable([1.0, 2.0])
        pairs = fr.optim.Adam(0.1).compute_gradients(fr.sum(fr.square(w)))
        before = len(graph.nodes)
        made = fr.optim.Adam(0.1).apply_gradients(pairs)
        after = fr.square(w)
    assert {node.site for node in graph.nodes[before : made.index + 1]} == {made.site}
    assert made.site.file == __file__
    assert after.op.site.line == made.site.line + 1


def test_tensors_of_a_kind_share_what_is_known_of_them() -> None:
    with fr.Graph():
        specs = {id((fr.Variable([1.0, 2.0]) * fr.Variable([3.0, 4.0])).spec) for _ in range(20)}
    assert len(specs) == 1


@pytest.mark.parametrize("make", [make for make, _ in RULES[1:]], ids=[rule.__name__ for _, rule in RULES[1:]])
def test_an_update_is_one_node_of_a_graph_and_its_writes(make: Callable[[object], fr.optim.Optimizer]) -> None:
    with fr.Graph() as graph:
        pairs = [(fr.placeholder("float32", (n, 2)), fr.Variable(np.ones((n, 2), np.float32))) for n in (1, 2, 3)]
        before = len(graph.nodes)
        make(0.1).apply_gradients(pairs)
    fused = [node for node in graph.nodes[before:] if node.op.name == "fused"]
    assert len(fused) == len(pairs)
    assert len({id(node.attrs["members"]) for node in fused}) == 1  # recorded once
    gradients = {gradient for gradient, _ in pairs}
    assert all(node in fused for node in graph.nodes if not gradients.isdisjoint(node.inputs))  # and nothing else


@pytest.mark.parametrize("make", [make for make, _ in RULES[1:]], ids=[rule.__name__ for _, rule in RULES[1:]])
def test_gradients_and_variables_of_any_shape_move_as_whole_ones(make: Callable[[object], fr.optim.Optimizer]) -> None:
    """Scalars, nothing at all, and gradients that are spread over the variable."""
    shapes: list[tuple[Any, Any]] = [((), ()), ((0, 3), (0, 3)), ((2, 3), (3,)), ((2, 3), (1, 3)), ((2, 3), ())]
    rng = np.random.default_rng(7)
    starts = [rng.normal(size=shape).astype(np.float32) for shape, _ in shapes]
    given = [rng.normal(size=shape).astype(np.float32) for _, shape in shapes]
    found = []
    for whole in (False, True):
        with fr.Graph() as graph:
            held = [fr.Variable(start) for start in starts]
            gradients = [np.broadcast_to(g, v.shape).copy() if whole else g for g, v in zip(given, held, strict=True)]
            train = make(0.1).apply_gradients([(fr.constant(g), v) for g, v in zip(gradients, held, strict=True)])
        with fr.BlockingSession(graph) as session:
            for _ in range(3):
                session.run(train)
            found.append(session.run(held))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
