from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from places import ROOT
from session_world import lanes, world_slow

import flowrt as fr
from flowrt.op import no_gradient
from flowrt.session.blocking import LoopThread
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.spec import Spec


def model() -> Any:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2,), name="x")
        v = fr.Variable([1.0, 1.0], name="v")
        return graph, x, v, x * 2.0 + v, v.assign_add(x)


def test_a_step_that_is_run_again_and_again_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrt.session.session.MAX_STEPS", 4)
    graph, x, _, y, _ = model()
    with graph:
        others = [x + float(i) for i in range(6)]
    with fr.BlockingSession(graph) as session:
        session.run(y, {x: [1, 2]})
        (known,) = (step for step in session._session._steps.values() if y in step._wanted)
        for other in others:
            session.run(other, {x: [1, 2]})
            assert session.run(y, {x: [1, 2]}).tolist() == [3, 5]
        assert known in session._session._steps.values()


def test_a_script_runs_steps_without_await() -> None:
    graph, x, v, y, bump = model()
    with fr.BlockingSession(graph) as session:
        assert session.run(y, {x: [1, 2]}).tolist() == [3, 5]
        assert session.run([y, bump], {x: [1, 2]})[0].tolist() == [3, 5]
        step = session.compile([v, bump], [x])
        for i in range(4):
            assert step([1, 0])[0].tolist() == [2 + i, 3]
        assert "tape of" in str(session.explain(y, [x]))
        session.reset()
        with pytest.raises(fr.GraphError, match="has no value"):
            session.run(v)
    assert lanes() == []


async def test_it_works_where_a_loop_already_runs() -> None:
    graph, x, _, y, _ = model()
    with fr.BlockingSession(graph) as session:
        assert session.run(y, {x: [1, 2]}).tolist() == [3, 5]
        assert session.compile(y, [x])([1, 2]).tolist() == [3, 5]
    assert lanes() == []


def test_a_short_tape_runs_in_the_callers_thread_whatever_the_loop_does() -> None:
    graph, x, _, y, _ = model()
    with fr.BlockingSession(graph) as session:
        step = session.compile(y, [x])
        for _ in range(3):
            step([1, 2])
        blocked, release = threading.Event(), threading.Event()

        async def block() -> None:
            blocked.set()
            assert release.wait(20)

        thread = session._thread
        assert thread is not None
        other = threading.Thread(target=thread.call, args=(block(),))
        other.start()
        assert blocked.wait(20)
        assert step([1, 2]).tolist() == [3, 5]
        release.set()
        other.join()


def test_a_run_of_one_tape_takes_the_callers_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with fr.Graph() as graph:
        x, total = fr.placeholder("float32", (2,)), fr.Variable(0.0)
        y, grow = x + 1.0, total.assign_add(fr.sum(x))
    with fr.BlockingSession(graph) as session:
        for _ in range(3):
            session.run({"y": y, "grow": grow}, {x: [1, 2]})
        monkeypatch.setattr(type(session), "_call", None)
        answer = session.run({"y": y, "grow": grow}, {x: [1, 2]})
        assert answer["grow"] is None
        assert answer["y"].tolist() == [2, 3]
        with pytest.raises(fr.FeedError, match=r"test_blocking.py:\d+: feed"):
            session.run({"y": y, "grow": grow}, {x: [1, 2, 3]})
        monkeypatch.undo()
        assert session.run(total) == 4 * 3


def test_threads_share_a_session() -> None:
    graph, x, _, y, _ = model()
    wrong: list[Any] = []

    def work(session: fr.BlockingSession, number: int) -> None:
        step = session.compile(y, [x])
        for i in range(100):
            fed = np.float32([number, i])
            got = (step(fed) if i % 2 else session.run(y, {x: fed})) - 2 * fed
            if got.tolist() != [1, 1]:
                wrong.append((number, i, got))

    with fr.BlockingSession(graph) as session:
        threads = [threading.Thread(target=work, args=(session, n)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_errors_name_the_line_of_the_caller() -> None:
    graph, x, _, y, _ = model()
    with fr.BlockingSession(graph) as session:
        step = session.compile(y, [x])
        for call in (lambda: session.run(y, {x: [1, 2, 3]}), lambda: step([1, 2, 3]), lambda: session.run("y")):
            with pytest.raises(fr.FlowrtError, match=r"^\S*test_blocking.py:\d+: "):
                call()


def test_a_timeout_cancels_the_step() -> None:
    with fr.Graph() as graph:
        got = fr.FIFOQueue(1, "float32").dequeue()
    with fr.BlockingSession(graph) as session, pytest.raises(fr.StepTimeout):
        session.run(got, timeout=0.01)


def test_it_cannot_be_used_before_or_after() -> None:
    graph, x, _, y, _ = model()
    session = fr.BlockingSession(graph)
    with pytest.raises(fr.ClosedError, match=r"with fr\.BlockingSession"):
        session.run(y, {x: [1, 2]})
    with session:
        step = session.compile(y, [x])
        step([1, 2])
        step([1, 2])
    for use in (lambda: session.run(y, {x: [1, 2]}), lambda: step([1, 2]), session.reset, session.__enter__):
        with pytest.raises(fr.ClosedError):
            use()
    assert lanes() == []


def test_a_failed_opening_leaves_no_thread() -> None:
    with fr.Graph() as graph:
        fr.Variable(fr.take(fr.constant([1.0, 2.0]), fr.astype(fr.random.uniform((), 9.0, 10.0, seed=1), "int32")))
    with pytest.raises(fr.FlowrtError, match="out of range"):
        fr.BlockingSession(graph).__enter__()
    assert lanes() == []


def test_leaving_ends_the_calls_of_other_threads() -> None:
    with fr.Graph() as graph:
        got = fr.FIFOQueue(1, "float32").dequeue()
    errors: list[BaseException] = []

    def wait(session: fr.BlockingSession) -> None:
        try:
            session.run(got)
        except BaseException as error:
            errors.append(error)

    with fr.BlockingSession(graph) as session:
        threads = [threading.Thread(target=wait, args=(session,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        inner = session._session

        async def all_wait() -> None:
            while len(inner._running) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)

        assert session._thread is not None
        session._thread.call(all_wait())
    for thread in threads:
        thread.join(20)
    assert [type(error) for error in errors] == [fr.ClosedError] * 3
    assert lanes() == []


def test_leaving_ends_the_endless_loop_that_another_thread_runs() -> None:
    with fr.Graph() as graph:
        x, turns = fr.placeholder("float32", ()), fr.placeholder("int64", ())
        out = fr.while_loop(lambda i, y: i < turns, lambda i, y: (i + 1, fr.cos(y)), (0, x))[1]
    ended: list[BaseException] = []

    def work(session: fr.BlockingSession) -> None:
        try:
            session.run(out, {x: 1.0, turns: 1 << 60})
        except fr.ClosedError as error:
            ended.append(error)

    with fr.BlockingSession(graph) as session:
        for _ in range(4):
            session.run(out, {x: 1.0, turns: 3})
        thread = threading.Thread(target=work, args=(session,), daemon=True)
        thread.start()
        while thread.is_alive() and not session._session._running:
            pass
    thread.join(60)
    assert len(ended) == 1


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_cancels_the_step_and_leaving_waits_for_it() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (2,))
        y = world_slow(x)
        for _ in range(20):
            y = world_slow(y)
    session = fr.BlockingSession(graph)
    with pytest.raises(KeyboardInterrupt), session:
        interrupted(session, y, {x: [1, 2]})
    assert lanes() == []


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_a_session_opens_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupt(thread: threading.Thread) -> None:
        start(thread)
        signal.raise_signal(signal.SIGINT)

    before = {*threading.enumerate()}
    monkeypatch.setattr(threading.Thread, "start", interrupt)
    with pytest.raises(KeyboardInterrupt), fr.BlockingSession(fr.Graph()):
        pass
    assert not {*threading.enumerate()} - before


def interrupted(session: fr.BlockingSession, fetch: Any, feeds: Any) -> None:
    """Run a step, interrupted while it waits for the answer."""
    import _thread

    threading.Timer(0.05, _thread.interrupt_main).start()
    session.run(fetch, feeds)


def test_a_loop_thread_answers_all_it_was_asked_before_it_closed() -> None:
    for _ in range(20):
        thread = LoopThread()
        answers: list[Any] = []

        async def answer() -> int:
            return 1

        def ask(thread: LoopThread = thread, answers: list[Any] = answers) -> None:
            for _ in range(50):
                try:
                    answers.append(thread.call(answer()))
                except fr.ClosedError:
                    answers.append(0)

        askers = [threading.Thread(target=ask) for _ in range(3)]
        for asker in askers:
            asker.start()
        thread.close()
        thread.close()
        for asker in askers:
            asker.join(20)
            assert not asker.is_alive()
        assert len(answers) == 150


# ── ops of the user's own ──


@op
def blocking_test_cube(x: Spec) -> Spec:
    """``x`` three times multiplied with itself."""
    return x


@blocking_test_cube.gradient
def blocking_test_cube_grad(node: Any, dy: Any) -> Any:
    return (dy * 3.0 * fr.square(node.inputs[0]),)


@fr.kernel("blocking_test_cube", on="cpu")
def blocking_test_cube_kernel(x: Any, y: Any) -> None:
    for i in range(x.size):
        y[i] = x[i] * x[i] * x[i]


@pytest.mark.parametrize("tapes", [True, False])
def test_an_op_of_the_users_own_runs_everywhere_and_has_a_gradient(tapes: bool) -> None:
    given = np.float32([1, 2, -3])
    np.testing.assert_array_equal(blocking_test_cube(given), given**3)
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None,))
        y = blocking_test_cube(x)
        (dx,) = fr.gradients(fr.sum(y), [x])
    with fr.BlockingSession(graph, options=fr.Options(tapes=tapes)) as session:
        for _ in range(3):
            cubes, slopes = session.run([y, dx], {x: given})
        np.testing.assert_array_equal(cubes, given**3)
        np.testing.assert_array_equal(slopes, 3 * given**2)


@no_gradient
@op
def blocking_test_broken(x: Spec) -> Spec:
    """An op whose kernel Numba refuses."""
    return x


@fr.kernel("blocking_test_broken")
def blocking_test_broken_kernel(x: Any, y: Any) -> None:
    y[0] = x.no_such_attribute


@pytest.mark.parametrize("tapes", [True, False])
def test_a_kernel_that_does_not_compile_names_its_op_and_line(tapes: bool) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2,))
        y = blocking_test_broken(x, name="mine")
    with fr.BlockingSession(graph, options=fr.Options(tapes=tapes)) as session:
        with pytest.raises(fr.GraphError, match=r"broken 'mine' \(.*test_blocking.py:\d+\): .*not compile"):
            session.run(y, {x: [1, 2]})
        assert session.run(x, {x: [1, 2]}).tolist() == [1, 2]


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_a_program_whose_standard_streams_are_closed_ends_well(closed: str) -> None:
    program = (
        "import flowrt as fr\n"
        "with fr.Graph() as graph: x = fr.placeholder('float32', ())\n"
        "with fr.BlockingSession(graph) as session: print(session.run(x, {x: 2.5}))\n"
    )
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", program]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=50, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert (done.returncode, done.stdout) == (0, "2.5\n")


def test_what_is_used_after_its_session_names_the_line() -> None:
    graph, x, _, y, _ = model()
    with fr.BlockingSession(graph) as session:
        step = session.compile(y, [x])
    for use in (lambda: step([1, 2]), lambda: session.run(y, {x: [1, 2]}), session.reset, session.__enter__):
        with pytest.raises(fr.ClosedError, match=r"test_blocking.py:\d+: "):
            use()
