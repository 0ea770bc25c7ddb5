"""Plans that compute between what others push here and what they push: as the step machine would, without it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_plans import CLIENT, PS, QUEUE, WORKERS, Writer, relay
from test_faults import SMALL, TASKS, World, world

from flowrt.base.errors import BrokenStream, DeadTensorError, FlowrtError, LinkBroken
from flowrt.base.spec import Spec
from flowrt.kernels.run.direct import available
from flowrt.net.node.started import Started
from flowrt.sched.drivers.closed import Closed
from flowrt.sched.executor import Executor
from flowrt.sched.host.rendezvous import Pushed
from flowrt.sched.host.shielded import EndedAnyway

if TYPE_CHECKING:
    from flowrt.net.master.steps import Registered

WORKER = WORKERS[0]
SCALAR, FLAG, OPEN, INDEX = Spec("float64", ()), Spec("bool", ()), Spec("float64", (None,)), Spec("int64", ())
CALLS = 20  # until tapes are made and known to be short


@contextmanager
def without_machine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Executor, "begin")
        yield


async def warm(made: World, step: Registered, *feeds: Any) -> None:
    for _ in range(CALLS):
        await made.run(step, *feeds)


async def turn_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def doubling(task: str, edges: tuple[int, int], spec: Spec, peer: str = CLIENT, source: str = CLIENT) -> Writer:
    """A plan that sends twice what it receives."""
    w = Writer(task)
    x = w.recv(edges[0], source, spec)
    w.send(w.node("add", x, x, out=spec), edges[1], peer)
    return w


# ── what comes of it ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(not available(), reason="no step is run by a direct call here")
@pytest.mark.parametrize("tasks", [TASKS, TASKS[::-1]], ids=["sender first", "receiver first"])
async def test_a_step_of_two_nodes_needs_no_machine_whoever_begins_first(tasks: tuple[str, str]) -> None:
    async with world() as made:
        told = relay(*TASKS, SMALL)
        step = await made.master.register(**told | {"plans": {task: told["plans"][task] for task in tasks}})
        await warm(made, step, np.ones(3))
        with without_machine(), pytest.MonkeyPatch.context() as patch:
            patch.delattr(Closed, "_run_plainly")
            for number in range(5):
                np.testing.assert_array_equal((await made.run(step, np.full(3, number)))[0], np.full(3, 4.0 * number))
        await made.assert_well()


async def test_a_value_may_come_before_its_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as made:
        step = await made.master.register(**relay(*TASKS, SMALL))
        await warm(made, step, np.ones(3))
        start, held = Started.start, []
        monkeypatch.setattr(
            Started, "start", lambda *how: held.append(how) if how[0]._host.task == WORKER else start(*how)
        )
        running = asyncio.ensure_future(made.run(step, np.ones(3)))
        meet = made.hosts[WORKER].rendezvous
        await turn_until(lambda: bool(held) and meet.holds((made.master.epoch, made.number), 1))
        with without_machine():
            start(*held.pop())
            np.testing.assert_array_equal((await running)[0], np.full(3, 4.0))
        monkeypatch.undo()
        await made.assert_well()


async def test_steps_at_the_same_time_have_their_own_values() -> None:
    async with world() as made:
        step = await made.master.register(**relay(*TASKS, SMALL))
        await warm(made, step, np.ones(3))
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(made.run(step, np.full(3, float(n)))) for n in range(100)]
        for number, run in enumerate(runs):
            np.testing.assert_array_equal(run.result()[0], np.full(3, 4.0 * number))
        await made.assert_well()


async def test_one_value_may_go_to_several_and_be_fetched_beside() -> None:
    async with world() as made:
        a, b = Writer(PS), Writer(WORKER)
        x = a.recv(0, CLIENT, SMALL)
        twice = a.node("add", x, x, out=SMALL)
        a.send(twice, 1, WORKER)
        a.send(a.node("multiply", twice, x, out=SMALL), 2, WORKER)
        a.send(twice, 3, WORKER)
        a.send(twice, 4, CLIENT)
        one, two, three = (b.recv(edge, PS, SMALL) for edge in (1, 2, 3))
        b.send(b.node("subtract", b.node("multiply", one, two, out=SMALL), three, out=SMALL), 5, CLIENT)
        plans = {PS: a.plan(), WORKER: b.plan()}
        step = await made.master.register(plans, [[(0, PS)]], [(4, PS), (5, WORKER), 0])
        for number in range(CALLS):
            x = np.arange(3.0) + number
            for got, wanted in zip(await made.run(step, x), (2 * x, 4 * x**3 - 2 * x, x), strict=True):
                np.testing.assert_array_equal(got, wanted)
        await made.assert_well()


# ── what goes another way ────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_is_dead_is_left_to_the_machine() -> None:
    async with world() as made:
        a, b = Writer(PS), doubling(WORKER, (2, 3), SCALAR, source=PS)
        x, pred = a.recv(0, CLIENT, SCALAR), a.recv(1, CLIENT, FLAG)
        a.send(a.switch("choice", x, pred, SCALAR)[1], 2, WORKER)
        plans = {PS: a.plan(), WORKER: b.plan()}
        step = await made.master.register(plans, [[(0, PS)], [(1, PS)]], [(3, WORKER)])

        async def run(alive: bool) -> Any:
            made.number += 1
            feeds = [np.float64(21).reshape(()), np.asarray(alive)]
            return await made.master.run(step, [np.asarray(f) for f in feeds], number=made.number, seed=0)

        for _ in range(CALLS):
            assert await run(True) == [42.0]
            with pytest.raises(DeadTensorError):
                await run(False)
        await made.assert_well()


async def test_what_is_not_what_the_plan_says_fails_that_step_alone() -> None:
    async with world() as made:
        plans = {
            PS: doubling(PS, (0, 1), OPEN, WORKER).plan(),
            WORKER: doubling(WORKER, (1, 2), SMALL, source=PS).plan(),
        }
        step = await made.master.register(plans, [[(0, PS)]], [(2, WORKER)])
        await warm(made, step, np.ones(3))
        with pytest.raises(
            BrokenStream, match=r"recv 'recv_0' \(plans.py:1\): expected float64\[3\], float64\[2\] came"
        ):
            await made.run(step, np.ones(2))
        assert (await made.run(step, np.ones(3)))[0].tolist() == [4, 4, 4]
        await made.assert_well()


async def test_a_variable_that_is_held_is_waited_for() -> None:
    async with world() as made:
        where = {"resource": "v", "container": "c", "dtype": "float64", "shape": (3,)}
        a, b = doubling(PS, (0, 1), SMALL, WORKER), Writer(WORKER)
        held = b.node("read_variable", out=SMALL, fresh=False, **where)
        b.send(b.node("add", b.recv(1, PS, SMALL), held, out=SMALL), 2, CLIENT)
        step = await made.master.register({PS: a.plan(), WORKER: b.plan()}, [[(0, PS)]], [(2, WORKER)])
        await warm(made, step, np.ones(3))
        variables, name = made.hosts[WORKER].variables, frozenset({("c", "v")})
        assert variables.try_hold(frozenset(), name)
        running = asyncio.ensure_future(made.run(step, np.ones(3)))
        await turn_until(lambda: made.nodes[PS].statistics()["steps"] == 0)
        await asyncio.sleep(0)
        assert not running.done()
        variables.release(frozenset(), name)
        assert (await running)[0].tolist() == [3, 3, 3]
        await made.assert_well()


async def test_a_way_that_was_closed_is_opened_again() -> None:
    async with world() as made:
        step = await made.master.register(**relay(*TASKS, SMALL))
        await warm(made, step, np.ones(3))
        links = made.nodes[PS]._links
        for _ in range(3):
            for link in list(links._links.values()):
                link.close()
            await turn_until(lambda: not len(links))
            with without_machine():
                assert (await made.run(step, np.ones(3)))[0].tolist() == [4, 4, 4]
        await made.assert_well()


# ── what ends it ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_step_is_cancelled_while_it_waits_for_a_value() -> None:
    async with world() as made:
        a, b = Writer(PS), doubling(WORKER, (0, 1), SCALAR, source=PS)
        a.send(a.node("dequeue", out=SCALAR, resource="q", container="", **QUEUE), 0, WORKER)
        fill = Writer(PS)
        fill.node("enqueue", fill.recv(0, CLIENT, SCALAR), resource="q", container="", **QUEUE)
        step = await made.master.register({PS: a.plan(), WORKER: b.plan()}, [], [(1, WORKER)])
        put = await made.master.register({PS: fill.plan()}, [[(0, PS)]], [])
        for number in range(CALLS):
            running = asyncio.ensure_future(made.run(step))
            await made.wait_steps(2)
            if number % 2:
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
            else:
                await made.run(put, number)
                assert await running == [2 * number]
        await made.assert_well()


async def test_a_step_is_cancelled_while_it_opens_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as made:
        step = await made.master.register(**relay(*TASKS, SMALL))
        await warm(made, step, np.ones(3))
        asked = asyncio.Event()

        async def open_way(*of: Any) -> None:
            asked.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(made.nodes[PS], "push", lambda *what: Pushed.NO_WAY)
        monkeypatch.setattr(made.nodes[PS], "open_way", open_way)
        running = asyncio.ensure_future(made.run(step, np.ones(3)))
        await asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        monkeypatch.undo()
        await made.assert_well()


async def test_a_way_that_cannot_be_opened_fails_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as made:
        step = await made.master.register(**relay(*TASKS, SMALL))
        await warm(made, step, np.ones(3))

        async def open_way(*of: Any) -> None:
            raise LinkBroken("there is none")

        monkeypatch.setattr(made.nodes[PS], "push", lambda *what: Pushed.NO_WAY)
        monkeypatch.setattr(made.nodes[PS], "open_way", open_way)
        with pytest.raises(LinkBroken, match=f"on {PS}: there is none"):
            await made.run(step, np.ones(3))
        monkeypatch.undo()
        await made.assert_well()


async def test_a_kernel_that_fails_ends_its_step_alone() -> None:
    async with world() as made:
        a, b = Writer(PS), Writer(WORKER)
        index = a.recv(0, CLIENT, INDEX)
        a.send(a.node("add", index, index, out=INDEX), 1, WORKER)
        table = b.node("constant", out=SMALL, value=np.array([5.0, 6.0, 7.0]))
        b.send(b.node("take", table, b.recv(1, PS, INDEX), out=SCALAR, axis=0, absent=False), 2, CLIENT)
        step = await made.master.register({PS: a.plan(), WORKER: b.plan()}, [[(0, PS)]], [(2, WORKER)])

        async def run(index: int) -> Any:
            made.number += 1
            return await made.master.run(step, [np.asarray(index, np.int64)], number=made.number, seed=0)

        for _ in range(CALLS):
            assert await run(1) == [7.0]
            with pytest.raises(FlowrtError, match=f"on {WORKER}: take 'take_2'.*plans.py:1.*4"):
                await run(2)
        await made.assert_well()


async def test_a_value_of_a_step_that_has_ended_changes_nothing() -> None:
    async with world() as made:
        step = await made.master.register(**relay(*TASKS, SMALL))
        await warm(made, step, np.ones(3))
        key = (made.master.epoch, made.number)
        link = made.nodes[PS]._links._links[made.addresses[WORKER]]
        assert link.push(key, 1, np.ones(3))
        assert (await made.run(step, np.ones(3)))[0].tolist() == [4, 4, 4]
        with pytest.raises(FlowrtError, match="has ended"):
            made.hosts[WORKER].rendezvous.open(key)
        await made.assert_well()


async def _outcome(made: World, step: Registered, number: int) -> None:
    """Run a step to whatever end; if it ends well, or broke, that is as it should be."""
    try:
        (got, *_) = await made.run(step, np.full(3, float(number)))
    except EndedAnyway as ended:
        (got, *_) = ended.values
    except LinkBroken:
        return
    np.testing.assert_array_equal(got, np.full(3, 4.0 * number))


@pytest.mark.parametrize("seed", range(3))
async def test_whichever_steps_are_cancelled_and_ways_are_closed_others_are_right(seed: int) -> None:
    rng = random.Random(seed)

    async def turns(most: int) -> None:
        for _ in range(rng.randrange(most)):
            await asyncio.sleep(0)

    async with world() as made:
        steps = [await made.master.register(**relay(*tasks, SMALL)) for tasks in (TASKS, TASKS[::-1])]
        for _ in range(60):
            running = [asyncio.ensure_future(_outcome(made, rng.choice(steps), n)) for n in range(rng.randint(1, 12))]
            await turns(30)
            for each in running:
                if rng.random() < 0.3:
                    each.cancel()
                await turns(4)
            for node in made.nodes.values():
                for link in list(node._links._links.values()):
                    if rng.random() < 0.1:
                        link.close()
            for end in await asyncio.gather(*running, return_exceptions=True):
                assert end is None or isinstance(end, asyncio.CancelledError), end
        await made.assert_well()
