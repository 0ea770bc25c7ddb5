from __future__ import annotations

import asyncio
import ctypes
import random
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from session_world import cancel_everywhere, every_way, host_of

import flowrt as fr
from flowrt.base.errors import GraphError
from flowrt.base.spec import Spec
from flowrt.kernels.run.direct import BLOCKED, HOLDERS, RIVALS, RIVALS_AT, TAKING, WAITING
from flowrt.sched.executor import Executor
from flowrt.sched.host.host import Host, RunContext
from flowrt.sched.host.variables import Together, Variables

A, B, C = ("", "a"), ("", "b"), ("", "c")
F2 = Spec("float32", (2,))
NONE: frozenset[Any] = frozenset()


def variables(*names: Any) -> Variables:
    made = Variables("/job:test/task:0")
    for name in names or (A, B):
        made.declare(name, F2)
    return made


def some(*names: Any) -> frozenset[Any]:
    return frozenset(names)


async def settled() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def test_readers_share_and_writers_do_not() -> None:
    held = variables()
    assert held.try_hold(some(A), NONE)
    assert held.try_hold(some(A), some(B))
    assert not held.try_hold(NONE, some(A))
    assert not held.try_hold(some(B), NONE)
    held.release(some(A), some(B))
    assert not held.try_hold(NONE, some(A))
    held.release(some(A), NONE)
    assert held.try_hold(some(A), some(A))
    assert not held.try_hold(some(A), NONE)
    held.release(some(A), some(A))
    assert held.try_hold(NONE, some(A, B))


async def test_who_asked_first_goes_first_where_requests_conflict() -> None:
    held, order = variables(), []

    async def hold(label: str, reads: Any, writes: Any) -> None:
        async with held.hold(reads, writes):
            order.append(label)
            await settled()

    assert held.try_hold(some(A), NONE)
    async with asyncio.TaskGroup() as group:
        group.create_task(hold("writer", NONE, some(A)))
        await settled()
        group.create_task(hold("reader behind", some(A), NONE))
        group.create_task(hold("other", some(B), NONE))
        await settled()
        assert order == ["other"]
        assert not held.try_hold(some(A), NONE)
        held.release(some(A), NONE)
    assert order == ["other", "writer", "reader behind"]


@pytest.mark.parametrize(
    ("wanted", "asked", "goes"),
    [
        ((some(A), NONE), (some(A), NONE), True),
        ((some(A), NONE), (NONE, some(A)), False),
        ((NONE, some(A)), (some(A), NONE), False),
        ((NONE, some(A)), (NONE, some(A)), False),
        ((some(A), NONE), (NONE, some(C)), True),
        ((NONE, some(A)), (some(C), NONE), True),
    ],
)
async def test_who_waits_for_one_variable_keeps_the_others_it_wants(wanted: Any, asked: Any, goes: bool) -> None:
    held = variables(A, B, C)
    assert held.try_hold(NONE, some(B))
    reads, writes = wanted

    async def wait() -> None:
        async with held.hold(reads | some(B), writes):
            pass

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(wait())
        await settled()
        assert held.try_hold(*asked) == goes
        if goes:
            held.release(*asked)
        held.release(NONE, some(B))


async def test_a_cancelled_waiter_lets_those_behind_it_through() -> None:
    held = variables()
    assert held.try_hold(some(A), NONE)

    async def hold(reads: Any, writes: Any) -> None:
        async with held.hold(reads, writes):
            pass

    writer = asyncio.ensure_future(hold(NONE, some(A)))
    await settled()
    reader = asyncio.ensure_future(hold(some(A), NONE))
    await settled()
    writer.cancel()
    await reader
    with pytest.raises(asyncio.CancelledError):
        await writer
    held.release(some(A), NONE)
    assert held.try_hold(NONE, some(A))


async def test_a_waiter_cancelled_at_any_point_holds_nothing() -> None:
    held = variables()

    async def work() -> None:
        assert held.try_hold(NONE, some(A))
        asyncio.get_running_loop().call_soon(held.release, NONE, some(A))
        async with held.hold(some(A), some(B)):
            await asyncio.sleep(0)

    async def check() -> None:
        await settled()
        assert not held._waiting
        assert held.try_hold(NONE, some(A, B))
        held.release(NONE, some(A, B))

    assert await cancel_everywhere(work, check) == 2


@pytest.mark.parametrize("seed", range(10))
async def test_random_holders_on_the_loop_and_on_threads_exclude_each_other(seed: int) -> None:
    names = [("", str(i)) for i in range(4)]
    held = variables(*names)
    inside: dict[Any, list[int]] = {name: [0, 0] for name in names}
    guard = threading.Lock()
    broken: list[str] = []

    def enter(reads: Any, writes: Any, sign: int) -> None:
        with guard:
            for name in reads:
                inside[name][0] += sign
            for name in writes:
                inside[name][1] += sign
            for name, (readers, writers) in inside.items():
                if writers > 1 or (writers and readers > (name in reads and name in writes)):
                    broken.append(f"{name}: {readers} readers, {writers} writers")

    def pick(rng: random.Random) -> Any:
        return frozenset(rng.sample(names, rng.randint(0, 2))), frozenset(rng.sample(names, rng.randint(0, 2)))

    async def waits(rng: random.Random) -> None:
        for _ in range(30):
            reads, writes = pick(rng)
            writes -= reads
            async with held.hold(reads, writes):
                enter(reads, writes, 1)
                await asyncio.sleep(0)
                enter(reads, writes, -1)

    def tries(rng: random.Random) -> None:
        for _ in range(300):
            reads, writes = pick(rng)
            writes -= reads
            if held.try_hold(reads, writes):
                enter(reads, writes, 1)
                enter(reads, writes, -1)
                held.release(reads, writes)

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for i in range(5):
            group.create_task(waits(random.Random(seed * 100 + i)))
        group.create_task(asyncio.to_thread(tries, random.Random(seed)))
    assert not broken, (seed, broken[:3])
    assert held.try_hold(NONE, frozenset(names))


def claim(held: Variables, together: Together) -> bool:
    """Take variables as a direct call does."""
    words, table = together.words, ctypes.c_int64 * together.words[RIVALS]
    rivals = [ctypes.c_int64.from_address(at + 8 * HOLDERS) for at in table.from_address(words[RIVALS_AT])]
    if held.words[TAKING] or held.words[WAITING] or words[BLOCKED] or any(rival.value for rival in rivals):
        return False
    words[HOLDERS] += 1
    return True


@pytest.mark.parametrize("seed", range(20))
def test_direct_calls_and_others_get_what_nobody_holds_in_another_way(seed: int) -> None:
    rng = random.Random(seed)
    names = [("", str(i)) for i in range(5)]
    held = variables(*names)
    inside: list[tuple[Any, Any, Together | None]] = []
    known: list[Together] = []

    def excluded(reads: Any, writes: Any) -> bool:
        return any(excluded_by((r, w), (reads, writes)) for r, w, _ in inside)

    def pick() -> Any:
        writes = frozenset(rng.sample(names, rng.randint(0, 2)))
        return frozenset(rng.sample(names, rng.randint(0, 3))) - writes, writes

    for _ in range(400):
        match rng.randrange(5):
            case 0:
                reads, writes = pick()
                blocked = any(one is None and excluded_by((r, w), (reads, writes)) for r, w, one in inside)
                together = held.together(reads, writes)
                assert (together is None) <= blocked, seed
                known += [together] * (together is not None and together not in known)
            case 1 if known:
                known.remove(rng.choice(known))  # those who hold it keep it
            case 2:
                reads, writes = pick()
                free = not excluded(reads, writes)
                assert held.try_hold(reads, writes) is free, seed
                inside += [(reads, writes, None)] * free
            case 3 if known:
                together = rng.choice(known)
                free = not excluded(together.reads, together.writes)
                assert claim(held, together) is free, seed
                inside += [(together.reads, together.writes, together)] * free
            case _ if inside:
                reads, writes, holder = inside.pop(rng.randrange(len(inside)))
                if holder is None:
                    held.release(reads, writes)
                else:
                    holder.words[HOLDERS] -= 1
                del holder
        together = None


def excluded_by(have: Any, want: Any) -> bool:
    return bool(want[1] & (have[0] | have[1]) or want[0] & have[1])


def test_memory_taken_together_is_let_go_with_the_variables() -> None:
    held = variables(A, B)
    together = held.together(some(A), some(B))
    assert together is not None
    assert together.memory == ()
    value = np.zeros(2, np.float32)
    held.begin(A, value)
    assert together.memory is None
    assert held.together(some(A), some(B)) is together
    assert together.memory is not None
    assert together.memory[0] is value
    alive = weakref.ref(value)
    del value
    held.reset("")
    assert together.memory is None
    assert alive() is None


def test_a_variable_exists_once_with_one_spec() -> None:
    held = variables(A)
    held.declare(A, F2)
    assert held.inventory() == {}
    held.begin(A, np.zeros(2, np.float32))
    assert held.inventory() == {A: F2}
    with pytest.raises(GraphError, match=r"variable 'a' exists on /job:test/task:0 as float32\[2\], not int64\[\]"):
        held.declare(A, Spec("int64", ()))
    held.reset("other")
    assert held.inventory() == {A: F2}
    held.reset("")
    assert held.inventory() == {}
    held.declare(A, Spec("int64", ()))
    with pytest.raises(GraphError, match=r"has no value .* was it reset"):
        held.value(A, Spec("int64", ()))


def test_memory_of_another_spec_is_never_handed_out() -> None:
    held = variables(A)
    held.begin(A, np.zeros(2, np.float32))
    for wrong in (Spec("float32", (3,)), Spec("int32", (2,))):
        with pytest.raises(GraphError, match="exists"):
            held.find(A, wrong)


# ── in sessions ──


@every_way
async def test_a_variable_is_written_where_it_lies_and_read_as_a_copy(options: fr.Options) -> None:
    with fr.Graph() as graph:
        v = fr.Variable(np.float32([1, 2]), name="v")
        x = fr.placeholder("float32", (2,))
        add, sub, put = v.assign_add(x), v.assign_sub(x), v.assign(x * 1.0)
    async with fr.Session(graph, options=options) as session:
        memory = host_of(session).variables.value(("", "v"), F2)
        fed = np.float32([10, 20])
        for write, expected in ((add, [11, 22]), (sub, [1, 2]), (put, [10, 20])):
            await session.run(write, {x: fed})
            got = await session.run(v)
            assert got.tolist() == expected
            got[:] = -1
        assert memory.tolist() == [10, 20]
        fed[:] = 5
        assert (await session.run(v)).tolist() == [10, 20]


@every_way
async def test_unordered_writes_are_refused_and_additions_are_not(options: fr.Options) -> None:
    with fr.Graph() as graph:
        v = fr.Variable(1.0, name="v")
        one, two = v.assign(2.0, name="one"), v.assign(3.0, name="two")
        add, sub = v.assign_add(10.0), v.assign_sub(4.0)
    async with fr.Session(graph, options=options) as session:
        with pytest.raises(fr.GraphError, match=r"one.*test_variables.py:\d+.*two"):
            await session.run([one, two])
        await session.run([add, sub])
        assert await session.run(v) == 7.0


@every_way
async def test_a_write_beside_a_value_that_is_read_waits_for_its_users(options: fr.Options) -> None:
    with fr.Graph() as graph:
        v = fr.Variable(np.float32([1, 2, 3, 4]))
        slow = fr.sum(fr.tanh(fr.exp(v * 0.5)) + v)
        write = v.assign(fr.zeros((4,)))
    async with fr.Session(graph, options=options) as session:
        got, _ = await session.run([slow, write])
        base = np.float32([1, 2, 3, 4])
        np.testing.assert_allclose(got, np.sum(np.tanh(np.exp(base * 0.5)) + base), rtol=1e-5)
        assert (await session.run(v)).tolist() == [0, 0, 0, 0]


async def test_graphs_on_one_host_share_variables_by_container_and_name() -> None:
    from flowrt.session.runners import LocalRunner

    def model(initial: Any, container: str = "shared") -> Any:
        with fr.Graph() as graph, fr.container(container):
            v = fr.Variable(initial, name="v")
            bump = v.assign_add(np.ones(v.shape))
        return graph, v, bump

    first, second, third = model(1.0), model(50.0), model(7.0, "own")
    runner = LocalRunner(fr.Options(threads=1))

    class Shared(fr.Session):
        async def _open_runner(self) -> Any:
            return Lent()

    class Lent:
        def __getattr__(self, name: str) -> Any:
            return getattr(runner, name)

        async def aclose(self) -> None:
            pass

    async with Shared(first[0]) as session:
        await session.run(first[2])
        assert await session.run(first[1]) == 2.0
    async with Shared(second[0]) as session:  # it finds the value that the first one left
        assert await session.run(second[1]) == 2.0
        async with Shared(third[0]) as other:
            assert await other.run(third[1]) == 7.0
            await other.reset("own")
        assert await session.run(second[1]) == 2.0
    wrong = model(np.float32([1, 2]))
    with pytest.raises(fr.GraphError, match=r"'v' .*test_variables.py:\d+\) is float32\[2\], but the nodes hold"):
        await Shared(wrong[0]).__aenter__()
    async with Shared(first[0]) as session:
        await session.reset()
    async with Shared(wrong[0]) as session:
        assert (await session.run(wrong[1])).tolist() == [1, 2]
    await runner.aclose()


async def test_a_plan_made_for_a_variable_that_became_another_is_refused() -> None:
    def writer(shape: Any, value: float) -> Any:
        with fr.Graph() as graph:
            v = fr.Variable(np.zeros(shape, np.float32), name="v")
            return graph, v, v.assign(fr.full(shape, value))

    from flowrt.session.runners import LocalRunner, compile_for

    runner = LocalRunner(fr.Options(threads=1))
    host: Host = runner._host

    def executor(made: Any, fetches: Any, tapes: bool) -> Executor:
        compiled = compile_for(runner, made[0], fetches, [made[2]], ())
        (plan,) = compiled.plans.values()
        return Executor(plan, host, tapes=tapes)

    large, small = writer((1000,), 1.0), writer((2,), 2.0)
    steps = [executor(large, [], tapes) for tapes in (True, False)]
    for step in steps:
        await step.run((), RunContext(("t", 1)))
    host.reset()
    await executor(small, [], True).run((), RunContext(("t", 2)))
    for step in steps:
        with pytest.raises(GraphError, match=r"exists .* as float32\[2\], not float32\[1000\]"):
            await step.run((), RunContext(("t", 3)))
    await runner.aclose()
