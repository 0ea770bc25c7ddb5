"""Run as a program with the CUDA simulator on, or on GPUs: whole training jobs in sessions whose devices they are.

Prints one JSON object. The jobs are tiny: a simulated thread is one of Python's.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import numpy as np
from kept import tell

import flowrt as fr
from flowrt.devices import cuda as gpu  # whatever a kernel calls it
from flowrt.kernels.cuda import present

Job = tuple[Any, Any, Any, Callable[[Any], tuple[Any, Any]]]  # two placeholders, the loss, and what draws a batch
STEPS = 3
BOTH = fr.Options(devices=("cpu:0", "cuda"))
SECOND = "cuda:1" if present.count() > 1 else "cuda:0"


def weights(*shape: int, seed: int) -> fr.Variable:
    return fr.Variable(fr.random.normal(shape, stddev=0.5, seed=seed), name=f"w{seed}")


def floats(rng: Any, *shape: int) -> Any:
    return rng.normal(size=shape).astype(np.float32)


def classes(rng: Any, count: int) -> Any:
    return rng.integers(0, 3, count).astype(np.int32)


def mlp() -> Job:
    x, y = fr.placeholder("float32", (None, 5)), fr.placeholder("int32", (None,))
    hidden = fr.nn.relu(x @ weights(5, 6, seed=1) + fr.Variable(np.zeros(6, np.float32), name="b"))
    loss = fr.mean(fr.nn.softmax_cross_entropy(hidden @ weights(6, 3, seed=2), y))
    return x, y, loss, lambda rng: (floats(rng, 4, 5), classes(rng, 4))


def embedding() -> Job:
    x, y = fr.placeholder("int64", (None, 2)), fr.placeholder("int32", (None,))
    rows = fr.mean(fr.take(weights(7, 4, seed=1), x), axis=1)
    loss = fr.mean(fr.nn.softmax_cross_entropy(rows @ weights(4, 3, seed=2), y))
    return x, y, loss, lambda rng: (rng.integers(0, 7, (3, 2)), classes(rng, 3))


def cnn() -> Job:
    x, y = fr.placeholder("float32", (None, 6, 5, 2)), fr.placeholder("int32", (None,))
    seen = fr.nn.conv2d(x, weights(3, 3, 2, 3, seed=1), strides=2, padding="SAME")
    pooled = fr.nn.max_pool2d(fr.nn.relu(seen + fr.Variable(np.zeros(3, np.float32), name="b")), 2, 1)
    loss = fr.mean(fr.nn.softmax_cross_entropy(fr.reshape(pooled, (-1, 12)) @ weights(12, 3, seed=2), y))
    return x, y, loss, lambda rng: (floats(rng, 2, 6, 5, 2), classes(rng, 2))


def lstm() -> Job:
    x, y = fr.placeholder("float32", (None, 3, 4)), fr.placeholder("float32", (None, 2))
    kernel, h, c = weights(6, 8, seed=1), fr.zeros((2, 2)), fr.zeros((2, 2))
    for t in range(3):
        gates = fr.concat([x[:, t], h], axis=1) @ kernel
        i, j, f, o = (gates[:, 2 * n : 2 * n + 2] for n in range(4))
        c = fr.sigmoid(f) * c + fr.sigmoid(i) * fr.tanh(j)
        h = fr.sigmoid(o) * fr.tanh(c)
    return x, y, fr.mean(fr.square(h - y)), lambda rng: (floats(rng, 2, 3, 4), floats(rng, 2, 2))


def recurrent() -> Job:
    """A whole layer, which is one op."""
    x, y = fr.placeholder("float32", (3, None, 4)), fr.placeholder("float32", (None, 2))
    state = fr.zeros((2, 2))
    h = fr.nn.lstm(x, state, state, weights(4, 8, seed=1), weights(2, 8, seed=2), weights(8, seed=3))[1]
    return x, y, fr.mean(fr.square(h - y)), lambda rng: (floats(rng, 3, 2, 4), floats(rng, 2, 2))


def transposing() -> Job:
    """A scan, a loop that its condition ends, and a branch, all of whose bodies are there."""
    x, y = fr.placeholder("float32", (3, 2, 4)), fr.placeholder("float32", (None, 4))
    w = weights(4, 4, seed=1)
    state, _ = fr.scan(lambda h, row: (fr.tanh(h @ w + row), h), fr.zeros((2, 4)), x)
    grown = fr.while_loop(lambda v: fr.sum(fr.abs(v)) < 20, lambda v: v * 2, fr.stop_gradient(state) + 1)
    chosen = fr.cond(fr.sum(y) > 0, lambda: state @ w, lambda: fr.exp(state))
    return x, y, fr.mean(fr.square(chosen - y)) + fr.mean(grown), lambda rng: (floats(rng, 3, 2, 4), floats(rng, 2, 4))


def unknown_rows() -> Job:
    """A branch, a scan and a loop over as many rows as come, so that nodes are issued one by one."""
    x, y = fr.placeholder("float32", (None, 4)), fr.placeholder("float32", (None, 4))
    w = weights(4, 4, seed=1)
    chosen = fr.cond(fr.sum(y) > 0, lambda: fr.exp(x @ w), lambda: x @ w)
    state, _ = fr.scan(lambda h, row: (fr.tanh(h @ w + row), h), fr.zeros((1, 4)), fr.expand_dims(x, 1))
    shrunk = fr.while_loop(lambda v: fr.mean(fr.square(v)) > 0.1, lambda v: fr.tanh(v @ w) / 2, x)
    loss = fr.mean(fr.square(chosen - y)) + fr.mean(fr.square(state)) + fr.sum(fr.square(shrunk))
    return x, y, loss, lambda rng: (floats(rng, 3, 4), floats(rng, 3, 4))


def mixed() -> Job:
    """Products of 16 bits."""
    with fr.mixed_precision("bfloat16"):
        return mlp()


def second_order() -> Job:
    """A loss that is the size of another's gradient."""
    x, y, loss, draw = mlp()
    return x, y, fr.sum(fr.square(fr.gradients([loss], [x])[0])) + loss, draw


async def trained(job: Callable[[], Job], device: str) -> tuple[list[float], int]:
    """The losses of some steps, and the most bytes that the GPU held."""
    with fr.Graph(seed=1) as graph, fr.device(device):
        x, y, loss, draw = job()
        update = fr.optim.Adam(0.1).minimize(loss)
    rng, losses = np.random.default_rng(0), []
    async with fr.Session(graph, options=BOTH) as session:
        for _ in range(STEPS):
            a, b = draw(rng)
            losses.append(float((await session.run([loss, update], {x: a, y: b}))[0]))
        return losses, fr.devices.memory(session)["cuda:0"].peak


async def jobs() -> dict[str, Any]:
    found = {}
    for job in (mlp, embedding, cnn, lstm, recurrent, transposing, unknown_rows, mixed, second_order):
        (there, peak), (here, none) = await trained(job, "cuda:0"), await trained(job, "cpu:0")
        found[job.__name__] = {"there": there, "here": here, "peaks": (peak, none)}
    return found


async def split() -> list[float]:
    """How far a graph over the host and two GPUs, with variables on two of the three, is from NumPy at most."""
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 4))
        with fr.device("cuda:0"):
            a = fr.exp(x)
            kept = fr.Variable(np.ones((1, 4), np.float32), name="kept")
        with fr.device(SECOND):
            b = a @ fr.Variable(np.eye(4, dtype=np.float32), name="w") + x
        with fr.device("cpu:0"):
            c = b - x + kept
        with fr.device("cuda:0"):
            added = kept.assign_add(fr.sum(c, axis=0, keepdims=True))
    given = floats(np.random.default_rng(1), 3, 4)
    expected = np.exp(given)
    async with fr.Session(graph, options=BOTH) as session:
        found = await session.run([a, b, c, added], {x: given})
        after = await session.run(kept)
        mine = (*found[:3], after)
    naive = expected, expected + given, expected + 1, 1 + (expected + 1).sum(axis=0, keepdims=True)
    return [float(np.abs(one - other).max()) for one, other in zip(mine, naive, strict=True)]


async def out_of_memory() -> str:
    with fr.Graph() as graph, fr.device(SECOND):
        x = fr.placeholder("float32", (None,), name="x")
        y = fr.concat([fr.exp(x), fr.exp(-x)], name="whole")
    options = fr.Options(devices=("cpu:0", SECOND), device_memory_limit=1000)
    async with fr.Session(graph, options=options) as session:
        try:
            await session.run(y, {x: np.zeros(80, np.float32)})
        except fr.ResourceError as error:
            assert len(await session.run(y, {x: np.zeros(8, np.float32)})) == 16
            return str(error)
    return ""


async def failing() -> str:
    with fr.Graph() as graph, fr.device("cuda:0"):
        x = fr.placeholder("int64", (None,))
        y = fr.take(fr.Variable(np.ones((3, 2), np.float32), name="rows"), x)
    async with fr.Session(graph, options=BOTH) as session:
        try:
            await session.run(y, {x: [0, 9]})
        except fr.FlowrtError as error:
            return str(error)
    return ""


@fr.op
def half_step(x: fr.Spec, width: float = 1.0) -> fr.Spec:
    """x / (width + |x|), entry by entry."""
    return x


@fr.kernel("half_step", on="cuda")
def half_step_on_cuda(x: Any, out: Any, width: float) -> None:
    xs, outs = x.reshape(-1), out.reshape(-1)
    for i in range(gpu.grid(1), xs.size, gpu.gridsize(1)):
        outs[i] = xs[i] / (width + abs(xs[i]))


async def own_op() -> float:
    """How far an op of one's own, which has a kernel for GPUs alone, is from NumPy at most."""
    given = floats(np.random.default_rng(4), 5, 9)
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 9))
        y = half_step(x, 0.5)
    async with fr.Session(graph, options=BOTH) as session:
        found = await session.run(y, {x: given})
    return float(np.abs(found - given / (0.5 + np.abs(given))).max())


async def towers(device: str) -> list[float]:
    """The losses of two replicas whose towers are on a device, their variables in the host's memory."""

    def loss_fn(inputs: dict[str, Any]) -> Any:
        logits = fr.tanh(inputs["x"] @ weights(5, 4, seed=1)) @ weights(4, 3, seed=2)
        return fr.mean(fr.nn.softmax_cross_entropy(logits, inputs["y"]))

    with fr.Graph(seed=1) as graph:
        trainer = fr.train.Replicated(
            loss_fn,
            inputs={"x": fr.Spec("float32", (None, 5)), "y": fr.Spec("int32", (None,))},
            optimizer=fr.optim.Momentum(0.1, 0.9),
            replicas=2,
            policy=fr.train.AllOf(),
            server_device="cpu:0",
            worker_device=device,
        )
    rng, losses = np.random.default_rng(2), []
    batches = ({"x": floats(rng, 4, 5), "y": classes(rng, 4)} for _ in range(2 * STEPS + 4))
    async with fr.Session(graph, options=BOTH) as session, aclosing(trainer.steps(session, batches)) as reports:
        async for report in reports:
            losses.append(report.loss)
            if len(losses) == STEPS:
                break
        return [*losses, fr.devices.memory(session)["cuda:0"].peak]


async def main() -> None:
    found = {
        "jobs": await jobs(),
        "split": await split(),
        "out_of_memory": await out_of_memory(),
        "failing": await failing(),
        "own_op": await own_op(),
        "towers": [await towers("cuda:0"), await towers("cpu:0")],
    }
    tell(found)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # a device does not warn of inf and NaN, as NumPy does
    asyncio.run(main())
