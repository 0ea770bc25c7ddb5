"""What Python prints of an error that nobody catches: the user's lines and what went wrong, and little else."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from places import ROOT

import flowrt as fr
from flowrt.base.tracebacks import shorten

if TYPE_CHECKING:
    from pathlib import Path

MOST = 15
ASYNCIO = 9  # lines that `asyncio.run` adds by itself, three for each of its frames: none of them is flowrt's
HERE = "test_tracebacks.py"


@fr.op
def traced_picky(x: fr.Spec) -> fr.Spec:
    """The vector ``x``, where no entry is negative."""
    return x


@fr.kernel("traced_picky")
def traced_picky_kernel(x: Any, y: Any) -> None:
    for i in range(x.size):
        y[i] = x[i]
        if x[i] < 0:
            raise ValueError("negative")


@fr.op
def traced_broken(x: fr.Spec) -> fr.Spec:
    """An op whose kernel does not compile."""
    return x


@fr.kernel("traced_broken")
def traced_broken_kernel(x: Any, y: Any) -> None:
    y[0] = x.nothing


@fr.op
def traced_confused(x: fr.Spec) -> fr.Spec:
    """An op whose inference is wrong."""
    return fr.Spec(x.nothing, x.shape)  # type: ignore[attr-defined]


class Model:
    """One of everything that may fail when it is run."""

    def __init__(self) -> None:
        with fr.Graph() as self.graph:
            self.ids = fr.placeholder("int32", (None,), name="ids")
            self.x, self.y = (fr.placeholder("float32", (None,), name=name) for name in "xy")
            table = fr.Variable(np.ones((3, 1), np.float32), name="table")
            self.taken = fr.take(table, self.ids)
            self.sum = self.x + self.y
            self.picky, self.broken = traced_picky(self.x), traced_broken(self.x)
            self.queue = fr.FIFOQueue(4, "float32", ())
            self.got = self.queue.dequeue()
            self.closed = self.queue.close()


MODEL = Model()
OUTSIDE = np.array([7], np.int32)
LONG, SHORT, NEGATIVE = (np.full(n, value, np.float32) for n, value in ((4, 1), (3, 1), (3, -1)))
# What fails when it is run: the fetch, what is fed, the timeout, and a word of the error.
FAILURES: dict[str, tuple[Any, dict[Any, Any], float | None, str]] = {
    "a kernel": (MODEL.taken, {MODEL.ids: OUTSIDE}, None, "out of range"),
    "an own kernel": (MODEL.picky, {MODEL.x: NEGATIVE}, None, "raised an error"),
    "an own kernel that does not compile": (MODEL.broken, {MODEL.x: SHORT}, None, "nothing"),
    "shapes that only the step knows": (MODEL.sum, {MODEL.x: SHORT, MODEL.y: LONG}, None, "do not broadcast"),
    "a feed": (MODEL.sum, {MODEL.x: np.ones((2, 2), np.float32), MODEL.y: LONG}, None, "expected float32"),
    "no feed": (MODEL.sum, {MODEL.x: SHORT}, None, "needs a value"),
    "a timeout": (MODEL.got, {}, 0.05, "did not finish"),
}


def printed(call: Callable[[], Any]) -> list[str]:
    """The lines Python prints of the error that ``call`` ends with, but for the one in this function."""
    try:
        call()
    except BaseException as error:
        lines = "".join(traceback.format_exception(error)).splitlines()
        own = [number for number, line in enumerate(lines) if "in printed" in line]
        assert own == [1]
        return [lines[0], *lines[3 if lines[3].startswith("  File") else 4 :]]
    raise AssertionError("no error was raised")


def check(lines: list[str], says: str, most: int = MOST, at: str = "") -> None:
    text = "\n".join(lines)
    assert len(lines) <= most, text
    assert says in text
    assert HERE in text
    assert any(at in line for before, line in pairwise(lines) if HERE in before), text
    assert f"{os.sep}flowrt{os.sep}tracebacks.py" not in text


failing = pytest.mark.parametrize("what", FAILURES)


@failing
@pytest.mark.parametrize("compiled", [False, True], ids=["run", "compiled"])
def test_an_awaited_step_that_fails(what: str, compiled: bool) -> None:
    fetch, feeds, timeout, says = FAILURES[what]
    if compiled and (timeout is not None or what == "no feed"):
        return

    async def main() -> None:
        async with fr.Session(MODEL.graph) as session:
            step = session.compile(fetch, list(feeds))
            _ = await (step(*feeds.values()) if compiled else session.run(fetch, feeds, timeout=timeout))

    def program() -> None:
        asyncio.run(main())

    check(printed(program), says, at="session.compile(" if what == "no feed" else "_ = await (step(")
    for line in printed(program):
        assert "/flowrt/" not in line


@failing
@pytest.mark.parametrize("compiled", [False, True], ids=["run", "compiled"])
def test_a_blocking_step_that_fails(what: str, compiled: bool) -> None:
    fetch, feeds, timeout, says = FAILURES[what]
    if compiled and (timeout is not None or what == "no feed"):
        return

    def program() -> None:
        with fr.BlockingSession(MODEL.graph) as session:
            step = session.compile(fetch, list(feeds))
            _ = step(*feeds.values()) if compiled else session.run(fetch, feeds, timeout=timeout)

    check(printed(program), says, MOST - ASYNCIO, at="session.compile(" if what == "no feed" else "_ = step(*")


@pytest.mark.parametrize("blocking", [False, True], ids=["awaited", "blocking"])
def test_a_direct_call_that_fails(blocking: bool) -> None:
    inside = np.array([1], np.int32)

    async def main() -> None:
        async with fr.Session(MODEL.graph) as session:
            step = session.compile(MODEL.taken, [MODEL.ids])
            for _ in range(20):
                await step(inside)
            await step(OUTSIDE)

    def program() -> None:
        if not blocking:
            asyncio.run(main())
        with fr.BlockingSession(MODEL.graph) as session:
            step = session.compile(MODEL.taken, [MODEL.ids])
            for _ in range(20):
                step(inside)
            step(OUTSIDE)

    check(printed(program), "out of range", at="step(OUTSIDE)")


def lines_of_batches(kind: str) -> Iterator[dict[str, Any]]:
    while kind == "kernel":
        yield {"ids": OUTSIDE}
    yield {"ids": np.zeros(1, np.int32)}
    if kind == "source":
        raise ValueError("disk on fire")
    yield {"other": OUTSIDE}


@pytest.mark.parametrize(("kind", "says"), [("kernel", "out of range"), ("source", "on fire"), ("names", "'other'")])
def test_training_that_fails(kind: str, says: str) -> None:
    def loss(inputs: Any) -> Any:
        table = fr.Variable(np.ones((3, 1), np.float32), name="table")
        return fr.mean(fr.take(table, inputs["ids"]))

    with fr.Graph() as graph:
        spec, where = {"ids": fr.Spec("int32", (None,))}, {"server_device": "", "worker_device": ""}
        trainer = fr.train.Replicated(loss, inputs=spec, optimizer=fr.optim.SGD(0.1), replicas=2, **where)

    async def main() -> None:
        async with fr.Session(graph) as session:
            async for _ in trainer.steps(session, lines_of_batches(kind)):
                pass

    def program() -> None:
        asyncio.run(main())

    lines = printed(program)
    check(lines, says, MOST + 2 * (kind == "source"), at="async for _ in trainer.steps")  # and the source's own line
    assert not any("/flowrt/" in line for line in lines)


def test_a_source_of_a_queue_that_fails() -> None:
    def source() -> Iterator[Any]:
        yield np.float32(1)
        raise ValueError("disk on fire")

    async def main() -> None:
        async with fr.Session(MODEL.graph) as session, session.producing(MODEL.queue, source()):
            while True:
                await session.run(MODEL.got)

    def program() -> None:
        asyncio.run(main())

    lines = printed(program)
    check(lines, "disk on fire", MOST + 2, at='raise ValueError("disk on fire")')
    assert any("in source" in line for line in lines)


def build(what: str) -> None:
    with fr.Graph():
        x = fr.placeholder("float32", (2, 3))
        match what:
            case "an op":
                fr.matmul(x, x)
            case "an op in a loop":
                fr.while_loop(lambda i: i < 3, lambda i: fr.matmul(x, x), (0,))
            case "an op in a branch":
                fr.cond(fr.sum(x) > 0, lambda: fr.matmul(x, x), lambda: x)
            case "the user's own code in a loop":
                fr.while_loop(lambda i: i < 3, lambda i: i + {}["nothing"], (0,))
            case "an own op's inference":
                traced_confused(x)
            case "a gradient rule":
                fr.custom_gradient(lambda y: (y * 2.0, lambda slope: (slope, slope)))(x)
            case "gradients":
                fr.gradients(fr.argmax(x, axis=0), x)
            case "an optimiser":
                fr.optim.SGD(0.1).minimize(x)
            case "a trainer":
                fr.train.Replicated(lambda inputs: x, inputs={}, optimizer=fr.optim.SGD(0.1), replicas=1)


BUILDS = ["an op", "an op in a loop", "an op in a branch", "the user's own code in a loop", "an own op's inference"]


@pytest.mark.parametrize("what", [*BUILDS, "a gradient rule", "gradients", "an optimiser", "a trainer"])
def test_a_graph_that_cannot_be_built(what: str) -> None:
    check(printed(lambda: build(what)), "in build", 12)


@pytest.mark.parametrize(
    "call",
    [
        lambda: fr.matmul(np.ones((2, 3)), np.ones((2, 3))),
        lambda: fr.take(np.ones((2, 3)), OUTSIDE),
        lambda: traced_picky(NEGATIVE),
        lambda: traced_confused(SHORT),
    ],
)
def test_an_op_that_fails_outside_a_graph(call: Callable[[], Any]) -> None:
    check(printed(call), "Error", 8)


def open_rank(graph: fr.Graph) -> Any:
    with graph:
        return fr.FIFOQueue(1, "float32").dequeue()


# What is wrong as it is called: on a graph with x [?, 3], v [2, 3] and q, of one float32[3].
WRONG: dict[str, Callable[[Any, Any, Any], Any]] = {
    "an operator": lambda x, v, q: v @ v,
    "an operator of a variable": lambda x, v, q: v + np.ones(4, np.float32),
    "an operator from the right": lambda x, v, q: np.ones((4, 4), np.float32) - v,
    "an index": lambda x, v, q: x["a"],
    "a method": lambda x, v, q: x.reshape(-1, -1),
    "a truth value": lambda x, v, q: bool(x),
    "a variable's truth value": lambda x, v, q: bool(v),
    "a length": lambda x, v, q: len(x),
    "a loop over entries": lambda x, v, q: list(x),
    "an array of a tensor": lambda x, v, q: np.asarray(v),
    "a rank": lambda x, v, q: open_rank(x.graph).ndim,
    "a variable": lambda x, v, q: fr.Variable("nothing"),
    "an assignment": lambda x, v, q: v.assign(np.ones(4, np.float32)),
    "rows of a variable": lambda x, v, q: v.scatter_add([0], np.ones(4, np.float32)),
    "a queue": lambda x, v, q: fr.FIFOQueue(0, "float32"),
    "an element": lambda x, v, q: q.enqueue(np.ones(4, np.float32)),
    "some elements": lambda x, v, q: q.dequeue_many(-1),
    "a function made of ops": lambda x, v, q: fr.einsum("ij,jk", v, v),
    "a loss": lambda x, v, q: fr.nn.softmax_cross_entropy(x, x[0, 0]),
    "a shape": lambda x, v, q: fr.zeros((-3,)),
    "checkpoints": lambda x, v, q: fr.Checkpoints("folder", every_steps="2"),  # type: ignore[arg-type]
    "a place of checkpoints": lambda x, v, q: fr.Checkpoints("nowhere://bucket"),
    "a recurrence": lambda x, v, q: fr.nn.lstm(v, v, v, v, v, v),
    "inputs": lambda x, v, q: fr.train.Replicated(len, {"x": (3,)}, fr.optim.SGD(0.1), 1),  # type: ignore[dict-item]
    "an optimiser's name": lambda x, v, q: fr.train.Replicated(len, {}, "sgd", 1),  # type: ignore[arg-type]
    "how many replicas": lambda x, v, q: fr.train.Replicated(len, {}, fr.optim.SGD(0.1), "2"),  # type: ignore[arg-type]
    "a session": lambda x, v, q: fr.Session("graph"),  # type: ignore[arg-type]
    "a blocking session": lambda x, v, q: fr.BlockingSession(x.graph, checkpoints="folder"),
    "a session that is not awaited": lambda x, v, q: fr.Session(x.graph).__enter__(),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_call_that_is_wrong_by_itself(what: str) -> None:
    with fr.Graph():
        x, v = fr.placeholder("float32", (None, 3)), fr.Variable(np.ones((2, 3), np.float32))
        lines = printed(lambda: WRONG[what](x, v, fr.FIFOQueue(4, ["float32"], [(3,)])))
    assert not any(str(ROOT / "flowrt") in line for line in lines), "\n".join(lines)
    check(lines, HERE, 8)
    assert HERE in lines[-1]  # the message itself says where


@pytest.mark.timeout(90)
@pytest.mark.parametrize("blocking", [False, True], ids=["awaited", "blocking"])
def test_a_step_on_a_cluster_that_fails(blocking: bool) -> None:
    with fr.Graph() as graph, fr.device("/job:worker/task:0"):
        ids = fr.placeholder("int32", (None,), name="ids")
        taken = fr.take(fr.Variable(np.ones((3, 1), np.float32), name="table"), ids)

    async def main() -> None:
        async with fr.LocalCluster(worker=1) as cluster:
            if blocking:
                with fr.BlockingSession(graph, cluster) as session:
                    _ = session.run(taken, {ids: OUTSIDE})
            async with fr.Session(graph, cluster) as session:
                _ = await session.run(taken, {ids: OUTSIDE})

    def program() -> None:
        asyncio.run(main())

    check(printed(program), "on /job:worker/task:0: take", at="session.run(taken, {ids: OUTSIDE})")


def test_the_error_that_was_being_handled_is_still_told() -> None:
    def program() -> None:
        with fr.BlockingSession(MODEL.graph) as session:
            try:
                raise KeyError("mine")
            except KeyError:
                session.run(MODEL.taken, {MODEL.ids: OUTSIDE})

    lines = printed_whole(program)
    assert "KeyError: 'mine'" in lines
    assert any("During handling" in line for line in lines)


def printed_whole(call: Callable[[], Any]) -> list[str]:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        call()
    return "".join(traceback.format_exception(caught.value)).splitlines()


def test_a_bug_shows_the_line_where_it_is() -> None:
    code = compile("def broken():\n    return {}['nothing']\n", str(ROOT / "flowrt" / "imagined.py"), "exec")
    space: dict[str, Any] = {}
    exec(code, space)
    with pytest.raises(KeyError) as caught:
        space["broken"]()
    shorten(caught.value)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "broken"


PROGRAM = """
import asyncio, sys, traceback
import numpy as np
import flowrt as fr

with fr.Graph() as graph:
    ids = fr.placeholder("int32", (None,))
    taken = fr.take(fr.Variable(np.ones((3, 1), np.float32)), ids)

async def main():
    async with fr.Session(graph) as session:
        value = await session.run(taken, {ids: np.array([7], "int32")})

try:
    asyncio.run(main())
except fr.FlowrtError:
    if sys.argv[1:]:
        raise
    traceback.print_exc()
    sys.exit(1)
"""


@pytest.mark.parametrize("printed_by", ["the interpreter", "traceback"])
@pytest.mark.parametrize("full", [False, True], ids=["short", "full"])
def test_a_program_that_ends_with_an_error(full: bool, printed_by: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLOWRT_FULL_TRACEBACK": str(int(full))}
    command = [sys.executable, str(tmp_path / "program.py"), *(["raise"] if printed_by != "traceback" else [])]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=50)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert any("value = await session.run" in line and "in main" in before for before, line in pairwise(lines))
    assert "an index is out of range" in lines[-1]
    assert (len(lines) <= MOST) is not full, done.stderr
    assert full is any("/flowrt/sched/" in line for line in lines)
