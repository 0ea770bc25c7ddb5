"""Ctrl-C, as a real process meets it: in loops that never end, run by the machine, by a tape and by a direct call."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import python

import flowrt as fr
from flowrt.kernels.launch import RUN_WORDS, STATUS
from flowrt.sched.host.lanes import main_thread, this_thread
from flowrt.sched.host.variables import Variables
from flowrt.sched.tape.interrupts import Noted, present_run
from flowrt.sched.tape.tape import CANCELLED
from flowrt.session.blocking import LoopThread
from flowrt.session.interrupts import NOBODY, _left, _line

pytestmark = pytest.mark.usefixtures("interruptible")

ENDLESS = """
import sys
import numpy as np
import flowrt as fr

width, runs_before, device = eval(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if device != "cpu:0":
    import arena
with fr.Graph() as graph, fr.device(device):
    x, turns = fr.placeholder("float32", width), fr.placeholder("int64", ())
    out = fr.while_loop(lambda i, y: i < turns, lambda i, y: (i + 1, fr.cos(y)), (0, x))[1]
options = fr.Options(devices=(device,))
passing = fr.BlockingSession(graph, options=options).__enter__()
with fr.BlockingSession(graph, options=options) as session:
    passing.__exit__(None, None, None)  # it was the one that is told
    step = session.compile(out, [x, turns])
    start = np.ones(width, np.float32)
    for _ in range(runs_before):
        step(start, np.array(3))
    try:
        print("runs", flush=True)
        step(start, np.array(1 << 60))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print(np.shape(step(start, np.array(3))), flush=True)
"""


@pytest.mark.parametrize("width", [(), (3,)], ids=["one kernel", "nested launches"])
@pytest.mark.parametrize("runs_before", [0, 2, 12], ids=["first run", "later run", "direct call"])
def test_ctrl_c_ends_a_loop_that_never_ends(width: tuple[int, ...], runs_before: int) -> None:
    check_interrupted(width, runs_before, "cpu:0")


@pytest.mark.parametrize("runs_before", [0, 2], ids=["first run", "later run"])
def test_ctrl_c_ends_a_loop_on_a_device_whose_lane_the_main_thread_waits_for(runs_before: int) -> None:
    check_interrupted((3,), runs_before, "arena:0")


def check_interrupted(width: tuple[int, ...], runs_before: int, device: str) -> None:
    """A second signal is sent should the first have come between two steps of Python, just before the loop began."""
    root = Path(fr.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(root / "examples")))}
    child = subprocess.Popen(
        [*python(), "-c", ENDLESS, str(width), str(runs_before), device],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    with child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "runs\n"
            child.send_signal(signal.SIGINT)
            while not select.select([child.stdout], [], [], 5)[0]:
                child.send_signal(signal.SIGINT)
            assert child.stdout.readline() == "interrupted\n"
            assert child.stdout.read() == f"{width}\n"
            assert child.wait(60) == 0
        finally:
            child.kill()


def test_an_interrupt_just_as_a_run_is_handed_over_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody would ever wait for it, and what comes next would wait for its lane for good."""
    with fr.Graph() as graph:
        turns = fr.placeholder("int64", ())
        out = fr.while_loop(lambda i: i < turns, lambda i: (i + 1,), (0,))[0]
    with fr.BlockingSession(graph, options=fr.Options(threads=1, optimize=False)) as session:
        submit = LoopThread._submit

        def submit_and_interrupt(self: LoopThread, work: Any) -> Any:
            found = submit(self, work)
            signal.raise_signal(signal.SIGINT)
            return found

        with monkeypatch.context() as patched:
            patched.setattr(LoopThread, "_submit", submit_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                session.run(out, {turns: 1 << 60})
        assert session.run(out, {turns: 3}) == 3


def test_whoever_has_the_wake_up_descriptor_keeps_it() -> None:
    with fr.Graph() as graph:
        one = fr.constant(1.0)
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    before = signal.set_wakeup_fd(write_end)
    try:
        with fr.BlockingSession(graph) as session:
            assert session.run(one) == 1
        assert signal.set_wakeup_fd(NOBODY) == write_end
        with fr.BlockingSession(graph) as first, fr.BlockingSession(graph) as second:
            assert first.run(one) == second.run(one)
            ours = signal.set_wakeup_fd(NOBODY)
            assert ours != NOBODY
            signal.set_wakeup_fd(ours)
        assert signal.set_wakeup_fd(NOBODY) == NOBODY
    finally:
        signal.set_wakeup_fd(before)
        os.close(read_end)
        os.close(write_end)


def test_the_next_session_watches_when_the_one_that_did_closes() -> None:
    with fr.Graph() as graph:
        one = fr.constant(1.0)
    sessions = [fr.BlockingSession(graph).__enter__() for _ in range(4)]
    seen = set()
    try:
        for number in (0, 2, 1, 3):  # of which the second and the last are not, or no longer, first in line
            told = signal.set_wakeup_fd(NOBODY)
            assert told != NOBODY
            signal.set_wakeup_fd(told)
            seen.add(os.fstat(told).st_ino)
            sessions[number].__exit__(None, None, None)
            assert all(session.run(one) == 1 for session in sessions if session._interrupts in _line)
    finally:
        assert signal.set_wakeup_fd(NOBODY) == NOBODY
    assert len(seen) == 3


def in_another_thread(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_a_session_closed_in_another_thread_leaves_its_place_to_others() -> None:
    with fr.Graph() as graph:
        one = fr.constant(1.0)
    first, second, third = (fr.BlockingSession(graph) for _ in range(3))
    first.__enter__(), second.__enter__()
    ends = first._interrupts._ends
    in_another_thread(lambda: first.__exit__(None, None, None))
    assert second._interrupts._ends == ends
    os.write(ends[1], b"\0")
    while select.select([ends[0]], [], [], 0)[0]:  # until the second session has read it
        pass
    in_another_thread(lambda: second.__exit__(None, None, None))
    assert _left == [ends]
    os.write(ends[1], bytes([signal.SIGINT]))  # one that came when nobody was there
    with third:
        assert third._interrupts._ends == ends
        assert not select.select([ends[0]], [], [], 0)[0]
        assert third.run(one) == 1
    assert _left == []
    assert signal.set_wakeup_fd(NOBODY) == NOBODY
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ends[1])


FORKING = """
import os, signal
import flowrt as fr

with fr.Graph() as graph:
    one = fr.constant(1.0)
with fr.BlockingSession(graph) as session:
    child = os.fork()
    if not child:
        os._exit(signal.set_wakeup_fd(-1) != -1)
    assert os.waitpid(child, 0)[1] == 0
    assert signal.set_wakeup_fd(-1) != -1
"""


def test_signals_to_a_forked_child_are_its_own() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(fr.__file__).parents[1])}
    subprocess.run([*python(), "-c", FORKING], env=environment, check=True, timeout=50)


def test_what_a_handler_runs_leaves_what_it_interrupted_known() -> None:
    outer, inner = (np.zeros(RUN_WORDS, np.int64) for _ in range(2))
    with Noted(outer):
        with Noted(inner):
            pass
        stop = present_run(this_thread())
        assert stop is not None
        stop()
    assert present_run(this_thread()) is None
    assert outer[STATUS] == CANCELLED
    assert inner[STATUS] != CANCELLED


@pytest.mark.parametrize("method", ["try_hold", "release"])
def test_ctrl_c_leaves_no_variable_held(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fr.Graph() as graph:
        v = fr.Variable(0.0)
        grow = v.assign_add(1.0)
    done = getattr(Variables, method)

    def interrupted(self: Variables, *names: Any) -> Any:
        if this_thread() == main_thread().ident:
            signal.raise_signal(signal.SIGINT)
        return done(self, *names)

    with fr.BlockingSession(graph) as session:
        for _ in range(4):
            session.run(grow)
        monkeypatch.setattr(Variables, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.run(grow)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        monkeypatch.undo()
        session.run(grow, timeout=5)
        assert session.run(v) == 6


IGNORING = """
import signal, sys
import flowrt as fr

with fr.Graph() as graph:
    v = fr.Variable(0.0)
    grow = v.assign_add(1.0)
with fr.BlockingSession(graph) as session:
    step = session.compile(grow)
    for _ in range(4):
        step(), session.run(grow)
    print("runs", flush=True)
    sys.stdin.readline()
    for _ in range(4):
        step(), session.run(grow)
    print(session.run(v), signal.getsignal(signal.SIGINT).name)
"""


def test_an_interrupt_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a job that a shell runs in the background, or under nohup
    environment = {**os.environ, "PYTHONPATH": str(Path(fr.__file__).parents[1])}
    command = [sys.executable, "-c", IGNORING]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
    with child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "runs\n"
            child.send_signal(signal.SIGINT)
            assert child.communicate("go on\n", timeout=40)[0] == "16.0 SIG_IGN\n"
        finally:
            child.kill()
