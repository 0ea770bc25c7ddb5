"""Tapes that several threads share: the same results, failures and cancellations as on one thread."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from kernel_world import own_tables
from tape_world import PlanMaker, array, divided, interpret, random_plan, tape_of, whole_region, words

from flowrt.base.errors import FlowrtError, StepCancelled
from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Call, View, kernel
from flowrt.kernels.launch import FAILURES, STATUS
from flowrt.kernels.run import board as at
from flowrt.op import no_gradient
from flowrt.sched.host.lanes import Crew
from flowrt.sched.tape import schedule
from flowrt.sched.tape.pace import Pace
from flowrt.sched.tape.tape import CANCELLED, address
from flowrt.sched.tape.tapes import Tapes
from flowrt.typed import op


@no_gradient
@op
def crew_test_rows(x: Spec) -> Spec:
    """The rows of ``x``, by way of local memory."""
    return x


@no_gradient
@op
def crew_test_checked(x: Spec) -> Spec:
    """``x``, or a failure where an entry is negative."""
    return x


def rows_layout(inputs: Any, outputs: Any, attrs: Any) -> Call:
    rows, columns = inputs[0].concrete
    return Call((View.dense((rows, columns)),) * 2 + (View.dense((columns,)),), units=rows)


def rows(x: Any, y: Any, own: Any, begin: int, end: int) -> None:
    for i in range(begin, end):
        for _ in range(20):  # whoever shared this memory would be caught
            for j in range(x.shape[1]):
                own[j] = x[i, j]
            for j in range(x.shape[1]):
                y[i, j] = own[j]


def checked(x: Any, y: Any, begin: int, end: int, run: Any) -> None:
    for i in range(begin, end):
        y[i] = x[i]
        if x[i] < 0:
            run[0] = 1


def split(inputs: Any, outputs: Any, attrs: Any) -> Call:
    return Call((View.dense((inputs[0].size,)),) * 2, units=inputs[0].size)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with own_tables():
        local = lambda inputs, outputs, attrs: [Spec("float32", inputs[0].concrete[1:])]  # noqa: E731
        kernel("crew_test_rows", layout=rows_layout, local=local)(rows)
        kernel("crew_test_checked", layout=split)(checked)
        yield


@pytest.fixture(params=[2, 4], ids=["two", "four"])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    made = Crew(request.param, "test")
    yield made
    made.close()


def test_a_large_launch_is_shared_and_gives_the_same_bits(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    make = PlanMaker()
    x, row = make.feed("float32", (333, 77)), make.feed("float32", (77,))
    y = make.node(
        "add",
        make.node("transpose", make.node("multiply", x, row), axes=(1, 0)),
        make.node("sum", row, axis=None, keepdims=False),
    )
    plan = make.plan(y)
    feeds = [array(333, 77), array(77, seed=1)]
    tape = divided(tape_of(plan, *feeds), plan, crew, monkeypatch)
    assert tape.pace is not None
    assert tape.pace.division is not None
    assert max(task.chunks for task in tape.pace.division.schedule.tasks) == 3 * crew.threads
    (expected,) = tape.run(words(), feeds)
    for _ in range(100):
        np.testing.assert_array_equal(tape.run(words(), feeds, crew=crew)[0], expected)


def test_every_thread_has_local_memory_of_its_own(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    make = PlanMaker()
    plan = make.plan(make.node("crew_test_rows", make.feed("float32", (64, 100))))
    x = array(64, 100)
    tape = divided(tape_of(plan, x), plan, crew, monkeypatch)
    for _ in range(200):
        np.testing.assert_array_equal(tape.run(words(), [x], crew=crew)[0], x)


@pytest.mark.parametrize("seed", range(300))
def test_random_plans_agree_with_numpy_on_several_threads(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, feeds, state = random_plan(random.Random(seed))
    crew = _crews[seed % 2]
    expected_state = {name: value.copy() for name, value in state.items()}
    region = whole_region(plan)
    inputs = [feeds[v] for v in region.inputs]
    tape = Tapes(plan).get(region, inputs)
    assert tape is not None
    divided(tape, plan, crew, monkeypatch, seed if seed % 3 else None)
    for _ in range(3):
        with np.errstate(all="ignore"):
            expected = interpret(plan, feeds, expected_state)
        outputs = tape.run(words(), inputs, [address(state[name]) for _, name in tape.variables], crew=crew)
        for value, output in zip(region.outputs, outputs, strict=True):
            np.testing.assert_array_equal(output, expected[value], err_msg=f"seed {seed}, value {value}")
        for name in state:
            np.testing.assert_array_equal(state[name], expected_state[name], err_msg=f"seed {seed}, variable {name}")


_crews: list[Crew] = []


@pytest.fixture(scope="module", autouse=True)
def crews() -> Iterator[None]:
    _crews[:] = [Crew(2, "random"), Crew(5, "random")]
    yield
    for crew in _crews:
        crew.close()


def test_what_fails_first_in_the_tapes_order_is_named(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    make = PlanMaker()
    x, y = make.feed("float32", (5000,)), make.feed("float32", (5000,))
    a, b = make.node("crew_test_checked", x), make.node("crew_test_checked", y)
    for _ in range(20):
        a, b = make.node("negative", a), make.node("negative", b)
    plan = make.plan(make.node("add", a, b))
    good, bad = np.ones(5000, np.float32), np.ones(5000, np.float32)
    bad[4321] = -1
    tape = divided(tape_of(plan, good, good), plan, crew, monkeypatch)
    for _ in range(50):
        with pytest.raises(FlowrtError, match=r"'crew_test_checked_1' \(train.py:11\): " + FAILURES[1]):
            tape.run(words(), [good, bad], crew=crew)
        with pytest.raises(FlowrtError, match=r"'crew_test_checked_0' \(train.py:10\): " + FAILURES[1]):
            tape.run(words(), [bad, good], crew=crew)
        assert tape.run(words(), [good, good], crew=crew)[0].tolist() == [2] * 5000


def test_nothing_that_waits_for_a_check_runs_after_it_failed(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    make = PlanMaker()
    x, new = make.feed("float32", (4000,)), make.feed("float32", (3,))
    y = make.node("crew_test_checked", x)
    make.node("no_op", control=[make.last])
    make.write("assign", "v", new, control=[make.last])
    plan = make.plan(y)
    bad, v = np.full(4000, -1, np.float32), np.zeros(3, np.float32)
    tape = divided(tape_of(plan, bad, array(3)), plan, crew, monkeypatch)
    for _ in range(100):
        with pytest.raises(FlowrtError, match="crew_test_checked"):
            tape.run(words(), [bad, np.ones(3, np.float32)], [address(v)], crew=crew)
        assert v.tolist() == [0, 0, 0]


def test_another_thread_stops_a_shared_tape(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    make = PlanMaker()
    x = make.feed("float32", (1 << 20,))
    value = x
    for _ in range(500):
        value = make.node("square", make.node("add", value, x))
    plan, data = make.plan(value), np.zeros(1 << 20, np.float32)
    tape = divided(tape_of(plan, data), plan, crew, monkeypatch)
    run_words = words()

    def cancel() -> None:
        run_words[STATUS] = CANCELLED

    timer = threading.Timer(0.05, cancel)
    timer.start()
    with pytest.raises(StepCancelled, match="stopped at "):
        tape.run(run_words, [data], crew=crew)
    timer.join()


def test_many_runs_at_once_share_a_crew(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    make = PlanMaker()
    x = make.feed("float32", (3000,))
    branches = []
    for _ in range(4):
        value = x
        for i in range(10):
            value = make.node("add" if i % 3 else "subtract", make.node("negative", value), x)
        branches.append(value)
    total = branches[0]
    for value in branches[1:]:
        total = make.node("add", total, value)
    plan = make.plan(total)
    tape = divided(tape_of(plan, array(3000)), plan, crew, monkeypatch)
    feeds = [array(3000, seed=i) for i in range(300)]
    with ThreadPoolExecutor(3 * crew.threads) as pool:  # more than there are slots
        outputs = list(pool.map(lambda feed: tape.run(words(), [feed], crew=crew)[0], feeds))
    for feed, output in zip(feeds, outputs, strict=True):
        np.testing.assert_array_equal(output, interpret(plan, [feed], {})[total])


def test_helpers_sleep_and_are_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Crew(3, "impatient", patience=0.0)
    make = PlanMaker()
    x = make.feed("float32", (20000,))
    y = x
    for _ in range(5):
        y = make.node("add", y, x)
    plan, data = make.plan(y), array(20000)
    tape = divided(tape_of(plan, data), plan, crew, monkeypatch)
    (expected,) = tape.run(words(), [data])
    for _ in range(500):
        np.testing.assert_array_equal(tape.run(words(), [data], crew=crew)[0], expected)
    while crew._words[at.ASLEEP] != 2:  # they fall asleep once there is nothing to do
        os.sched_yield()
    crew.close()


def test_launches_of_more_chunks_than_have_a_place_are_shared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Crew(at.MOST_PLACES // schedule.CHUNKS_PER_THREAD + 2, "many")
    make = PlanMaker()
    x = make.feed("float32", (5000,))
    plan, data = make.plan(make.node("tanh", make.node("add", x, x))), array(5000)
    tape = divided(tape_of(plan, data), plan, crew, monkeypatch)
    assert tape.pace is not None
    assert tape.pace.division is not None
    assert tape.pace.division.schedule.tasks[0].chunks > at.MOST_PLACES
    (expected,) = tape.run(words(), [data])
    for _ in range(20):
        assert tape.run(words(), [data], crew=crew)[0].tobytes() == expected.tobytes()
    crew.close()


def test_a_pace_learns_from_the_fastest_of_the_first_runs() -> None:
    make = PlanMaker()
    x = make.feed("float32", (1 << 10,))
    y = make.node("negative", make.node("add", x, x))
    plan = make.plan(y)
    launches = tape_of(plan, array(1 << 10)).recording.launches
    for fastest, chunks in [([30_100, 30_100], [6, 6]), ([30_100, 3], None), ([100_000, 5_000], [6, 2])]:
        pace = Pace(plan, launches, 2)
        assert pace.division is None
        for run in ([10**9, fastest[1]], [fastest[0], 10**9], [10**9, 10**9]):
            assert pace.left > 0
            assert pace.division is None
            pace.learn(np.array(run))
        assert pace.left == 0
        made = pace.division
        assert (None if made is None else [task.chunks for task in made.schedule.tasks]) == chunks
    for threads, some in [(1, launches), (2, ())]:
        assert Pace(plan, some, threads).left == 0


def test_timed_runs_teach_the_tape(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    make = PlanMaker()
    x = make.feed("float32", (5000,))
    plan, data = make.plan(make.node("add", make.node("negative", x), x)), array(5000)
    tape, learned = tape_of(plan, data), []
    monkeypatch.setattr(Pace, "learn", lambda pace, nanoseconds, turns: learned.append(nanoseconds))
    tape.run(words(), [data], crew=crew)
    divided(tape, plan, crew, monkeypatch)
    assert tape.pace is not None
    tape.pace.left = 1
    tape.run(words(), [data], crew=crew)
    assert [len(times) for times in learned] == [2, 2]
    assert all((times > 0).all() for times in learned)


def test_one_thread_has_no_crew() -> None:
    before = set(threading.enumerate())
    crew = Crew(1, "alone")
    assert crew.board == 0
    make = PlanMaker()
    plan, data = make.plan(make.node("negative", make.feed("float32", (1 << 20,)))), array(1 << 20)
    tape = tape_of(plan, data)
    np.testing.assert_array_equal(tape.run(words(), [data], crew=crew)[0], -data)
    assert tape.runs_alone
    assert set(threading.enumerate()) == before
    crew.close()


def test_no_thread_or_file_outlives_its_crew() -> None:
    def files() -> int:
        return len(os.listdir("/dev/fd"))

    threads, open_files = set(threading.enumerate()), files()
    for _ in range(3):
        crew = Crew(4, "short-lived")
        assert crew.board
        assert len(threading.enumerate()) == len(threads) + 3
        crew.close()
        crew.close()
        assert crew.board == 0
    held = Crew(2, "held")
    assert held.board
    held._words[at.SLOT + at.TAKEN] = 1  # as by a run under way, which may yet write to the pipe
    held.close()
    assert files() == open_files + 2
    del held
    assert set(threading.enumerate()) == threads
    assert files() == open_files


SCRIPT = """
import os, sys
import numpy as np
import flowrt as fr
with fr.Graph() as graph:
    x = fr.placeholder("float32", (1 << 18,), name="x")
    y = x
    for _ in range(20):
        y = y * 0.5 + x
session = fr.BlockingSession(graph, options=fr.Options(threads=2)).__enter__()
step = session.compile(y, [x])
data = np.ones(1 << 18, np.float32)
expected = step(data)
for _ in range(10):
    assert (step(data) == expected).all()
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        assert (step(data) == expected).all()
        with fr.BlockingSession(graph, options=fr.Options(threads=2)) as own:
            again = own.compile(y, [x])
            for _ in range(10):
                assert (again(data) == expected).all()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (step(data) == expected).all()
print("done", flush=True)
"""


@pytest.mark.parametrize("way", ["fork", "abandon"])
def test_neither_a_fork_nor_an_abandoned_session_hangs(way: str) -> None:
    """The child runs on alone, and may have a session of its own; a process ends though its session was not closed."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, way], stdout=subprocess.PIPE, start_new_session=True)
    try:
        out, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert out.strip() == b"done"
    assert process.returncode == 0
