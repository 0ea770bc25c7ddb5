"""Small launches that do not depend on one another run as one, and answer what they do one by one."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.kernels.composite.many import ManyStep
from flowrt.kernels.fusion import fused
from flowrt.kernels.fusion.fused import fused_kernel
from flowrt.kernels.language.table import Call, View, require_kernel
from flowrt.kernels.launch import LaunchStep
from flowrt.kernels.store.background import wait_compiled
from flowrt.sched.tape import recording
from flowrt.sched.tape.gathering import HELD, SMALL, gather
from flowrt.sched.tape.tape import Tape
from flowrt.session.session import Options

F4 = np.dtype(np.float32)
FUSED = fused_kernel(("float32",) * 2, (("add", (0, 1), "float32"), ("multiply", (2, 0), "float32")), (3,), "cpu", ())


@dataclass(frozen=True)
class Candidate:
    step: LaunchStep
    storages: list[Any]
    sizes: tuple[int, ...]


def random_launches(rng: random.Random, count: int) -> list[Candidate]:
    """Some that may wait, some that are no fused ones and some that are too large, on a few stretches of memory."""
    memory: list[Any] = [object() for _ in range(count // 2)]
    made = []
    for _ in range(count):
        kernel = FUSED if rng.random() < 0.8 else require_kernel("add", "cpu", [F4] * 3)
        step = LaunchStep(kernel, (0, 1, 2), (F4,) * 3, Call((View.dense((4,)),) * 3), 2)
        nbytes = rng.choice([16, 1024, SMALL // 3, SMALL])
        made.append(Candidate(step, rng.choices(memory, k=3), (nbytes,) * 3))
    return made


def touched(one: Candidate) -> tuple[set[int], set[int]]:
    return {id(m) for m in one.storages}, {id(m) for m in one.storages[2:]}


@pytest.mark.parametrize("seed", range(20))
def test_the_order_that_matters_is_kept(seed: int) -> None:
    rng = random.Random(seed)
    launches = random_launches(rng, rng.randrange(2, 60))
    ordered = [set(rng.sample(range(n), min(n, rng.choice([0, 0, 0, 1])))) for n in range(len(launches))]
    groups = gather(launches, ordered)
    assert sorted(n for numbers, _ in groups for n in numbers) == list(range(len(launches)))
    place = {n: at for at, (numbers, _) in enumerate(groups) for n in numbers}
    for late, one in enumerate(launches):
        for early in range(late):
            (mine, wrote), (theirs, written) = touched(one), touched(launches[early])
            if wrote & theirs or mine & written or early in ordered[late]:
                assert place[early] < place[late], f"seed {seed}: {early} before {late}"
    for numbers, before in groups:
        assert all(number <= before for number in numbers)
        assert sum(sum(launches[n].sizes) for n in numbers) <= HELD or len(numbers) == 1


def test_what_only_ends_needs_runs_as_one() -> None:
    step = LaunchStep(FUSED, (0, 1, 2), (F4,) * 3, Call((View.dense((4,)),) * 3), 2)
    launches = [Candidate(step, [object(), object(), object()], (16,) * 3) for _ in range(5)]
    assert gather(launches, [()] * 5) == [([0, 1, 2, 3, 4], 5)]
    assert gather(launches, [(), (), (), (1,), ()]) == [([1], 3), ([0, 2, 3, 4], 5)]


def test_no_more_is_put_off_than_a_cache_holds_and_nothing_that_is_large() -> None:
    step = LaunchStep(FUSED, (0, 1, 2), (F4,) * 3, Call((View.dense((4,)),) * 3), 2)
    fits = HELD // SMALL
    launches = [Candidate(step, [object(), object(), object()], (SMALL - 2, 1, 1)) for _ in range(fits + 4)]
    assert gather(launches, [()] * len(launches)) == [
        ([*range(fits)], fits),
        ([*range(fits, fits + 4)], fits + 4),
    ]
    large = Candidate(step, [object(), object(), object()], (SMALL, 1, 0))
    assert gather([large, *launches[:2]], [()] * 3) == [([0], 0), ([1, 2], 3)]


def test_what_folds_is_not_put_off() -> None:
    reducing = fused_kernel(("float32",) * 2, (("add", (0, 1), "float32"),), (), "cpu", ((2, "sum"),))
    step = LaunchStep(reducing, (0, 1, 2), (F4,) * 3, Call((View.dense((4,)),) * 3), 2)
    launches = [Candidate(step, [object(), object(), object()], (16,) * 3) for _ in range(3)]
    assert gather(launches, [()] * 3) == [([0], 0), ([1], 1), ([2], 2)]


SHAPES: list[tuple[int, ...]] = [(), (1,), (3, 5), (64,), (0, 4), (2, 1, 7), (33,), (8, 8), (4096,), (70, 70)]


def training() -> tuple[fr.Graph, Any, list[fr.Variable]]:
    """Variables of many shapes and a table, that move together."""
    rng = np.random.default_rng(7)
    with fr.Graph() as graph:
        moved, slopes = (
            [fr.Variable(np.asarray(rng.normal(size=s), F4), name=name, trainable=name == "p") for s in SHAPES * 3]
            for name in ("p", "slope")
        )
        table = fr.Variable(np.asarray(rng.normal(size=(20, 3)), F4), name="table")
        rows = fr.sum(fr.square(fr.nn.embedding_lookup(table, fr.constant([3, 3, 11]))))
        pairs = [*zip(slopes, moved, strict=True), *fr.optim.SGD(0.1).compute_gradients(rows, [table])]
        train = fr.optim.Momentum(0.1, 0.9).apply_gradients(pairs)
    return graph, train, [*moved, table]


@pytest.mark.parametrize("threads", [1, 2])
def test_updates_are_the_same_bits_as_one_by_one(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for apart in (False, False, True):  # the first has kernels compiled, and computes its first steps without them
        graph, train, state = training()
        if apart:
            monkeypatch.setattr(recording, "gather", lambda launches, _: [([n], n) for n in range(len(launches))])
        with fr.BlockingSession(graph, options=Options(threads=threads)) as session:
            for _ in range(2):
                session.run(train)
            assert wait_compiled(120)
            for _ in range(5):
                session.run(train)
            most = max(_gathered(), default=0)
            assert (most == 0) if apart else (most > len(state) // 2), most
            assert ("small ones;" in str(session.explain(train))) is not apart
            found.append(session.run(state))
    for mine, other in zip(*found[1:], strict=True):
        np.testing.assert_array_equal(mine, other)


def _gathered() -> list[int]:
    """How many launches are in each one of several, of all tapes there are."""
    gc.collect()
    steps = [launch.step for tape in gc.get_objects() if type(tape) is Tape for launch in tape.recording.launches]
    return [step.units for step in steps if isinstance(step, ManyStep)]


def test_updates_of_one_variable_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "WORTH_BYTES", 0)
    with fr.Graph() as graph:
        v, w = (fr.Variable(np.float32([1, 2, 3]), name=n) for n in "vw")
        first = v.assign(v * 2.0 + 1.0)
        with fr.control_dependencies([first]):
            second = v.assign(v.read() * 3.0 - 1.0)
        with fr.control_dependencies([second]):
            third = w.assign_add(v.read() * 0.5 + 4.0)
    with fr.BlockingSession(graph, options=Options(threads=1)) as session:
        expected, other = np.float32([1, 2, 3]), np.float32([1, 2, 3])
        for turn in range(6):
            session.run(third)
            expected = (expected * 2 + 1) * 3 - 1
            other = other + (expected * 0.5 + 4)
            if turn == 2:
                assert wait_compiled(120)
        np.testing.assert_array_equal(session.run(v), expected)
        np.testing.assert_array_equal(session.run(w), other)


def test_kernels_that_many_small_updates_share_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """One alone would not be worth a compilation."""
    ordered = []
    monkeypatch.setattr("flowrt.sched.tape.tapes.submit", lambda orders: ordered.append(len(orders)))
    for count in (2, 40):
        ordered.clear()
        with fr.Graph() as graph:
            moved = [fr.Variable(np.ones(48, np.float32), name=f"v{n}") for n in range(count)]
            train = fr.group(*(v.assign((v * 0.125 - 3.5) / 7.25 + v * v) for v in moved))
        monkeypatch.setattr(fused, "is_compiled", lambda variant: False)
        with fr.BlockingSession(graph, options=Options(threads=1)) as session:
            for _ in range(3):
                session.run(train)
        assert ordered == [] if count == 2 else ordered
