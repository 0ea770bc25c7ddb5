"""The helper process: what is ordered is compiled some time, and nothing else depends on it."""

from __future__ import annotations

import fcntl
import math
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from programs import python
from tape_world import whole_region
from test_fuse import plan_of
from test_fused import F4, apply

import flowrt as fr
from flowrt.base.spec import Spec
from flowrt.base.valueclass import replace
from flowrt.kernels.composite.nested import NestedStep
from flowrt.kernels.fusion import fused
from flowrt.kernels.fusion.fused import ordered_variants
from flowrt.kernels.language.table import Form
from flowrt.kernels.language.variants import found_symbol, is_compiled, request_of, requested
from flowrt.kernels.launch import LaunchStep, Operand, apply_kernel
from flowrt.kernels.store import background
from flowrt.kernels.store.background import CompileOrder, are_ready, share, submit, wait_compiled, was_tried
from flowrt.kernels.store.compiling import batch, compiled, note_missing, only_looks
from flowrt.kernels.store.parts import PARTS, part_symbol
from flowrt.sched.tape import recording
from flowrt.sched.tape.tapes import Tapes
from flowrt.standard.programs import standard_variants

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def small_ones_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "WORTH_BYTES", 0)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache beside which the helper begins anew."""
    monkeypatch.setenv("FLOWRT_CACHE", str(tmp_path))
    yield tmp_path
    background.close()


def order(number: float) -> CompileOrder:
    """An order for a program that no other test has."""
    members = (("multiply", (0, 0), "float64", ()), ("floor", (1,), "float64", ()), ("add", (2, 0), "float64", ()))
    (made,) = apply([np.ones(3)], members[: 2 + int(number)], (3,) if number else (2,)).orders
    return made


def test_the_helper_compiles_what_is_ordered(fresh_cache: Path) -> None:
    wanted = order(1)
    assert not is_compiled(ordered_variants(wanted.request)[0])
    submit([wanted])
    submit([wanted])
    assert wait_compiled(120)
    assert are_ready([wanted])
    assert (fresh_cache / f"{wanted.symbol}.o").exists()
    assert is_compiled(ordered_variants(wanted.request)[0])
    assert (
        apply(
            [np.ones(3)],
            (("multiply", (0, 0), "float64", ()), ("floor", (1,), "float64", ()), ("add", (2, 0), "float64", ())),
            (3,),
        ).orders
        == ()
    )


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The symbols that the helper is given, on a machine with an idle core."""
    given: list[str] = []
    monkeypatch.setattr(background, "submit", lambda orders: given.extend(order.symbol for order in orders))
    monkeypatch.setattr(background, "usable_cores", lambda: 2)
    monkeypatch.setattr(background, "LOAD", tmp_path / "load")
    background.LOAD.write_text("9.00 9.00 9.00 1/180 4711\n")  # what ran in the last minute is over
    monkeypatch.setenv("FLOWRT_BUILD", "")
    return given


MANY = [CompileOrder(f"flowrt_{number}", "entry") for number in range(background.WORTH_SHARING)]


def test_the_helper_takes_the_last_of_many_first(shared: list[str]) -> None:
    share(MANY)
    assert shared == [order.symbol for order in reversed(MANY)]


def test_nothing_is_shared_where_there_is_little_no_core_is_idle_or_the_user_wants_none(
    shared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    share(MANY[1:])
    with monkeypatch.context() as never:
        never.setenv("FLOWRT_BUILD", "never")
        share(MANY)
    background.LOAD.write_text("0.00 0.00 0.00 2/180 4711\n")  # this process, and another
    share(MANY)
    background.LOAD.write_text("0.00 0.00 0.00 1/180 4711\n")
    monkeypatch.setattr(background, "usable_cores", lambda: 1)
    share(MANY)
    background.LOAD.unlink()
    share(MANY)
    assert shared == []


def test_answers_come_through_a_pipe_of_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of models, or a node, has as many descriptors open as it may."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    read, write = os.pipe()
    with open(write, "wb") as answers, open(fcntl.fcntl(read, fcntl.F_DUPFD_CLOEXEC, 1100), "rb") as pipe:
        os.close(read)
        helper = SimpleNamespace(stdout=pipe, poll=lambda: None)
        state = background._State(helper=helper, pending={"a": MANY[0]})  # type: ignore[arg-type]
        monkeypatch.setattr(background, "_state", state)
        answers.write(b"a\n")
        answers.flush()
        background.go_on()
        assert state.done == {"a"}
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_what_a_batch_will_compile_is_shared_once_it_compiles(shared: list[str]) -> None:
    def ask() -> None:
        for symbol, request in (("a", "entry"), ("b", "entry"), ("c", ""), ("d", "part")):
            if only_looks():
                note_missing(symbol, request)
                continue
            with compiled(symbol):  # the first of them is this thread's, and nobody else can compile the third
                assert shared == ["d", "b"]

    with batch(ask):
        ask()


def test_a_block_has_a_word_for_what_is_only_looked_for_and_is_made_anew_once_that_is_there() -> None:
    class Looked:
        where = iter([0, 64])

        def address(self) -> int:
            return next(self.where)

    (step,) = apply_kernel("cumsum", [Spec(F4, (4,))], [Spec(F4, (4,))], {"axis": 0, "reverse": False}).steps
    assert isinstance(step, LaunchStep)
    calling = LaunchStep(step.kernel, step.operands, step.dtypes, replace(step.call, tiles=(0, Looked())), step.reads)
    places = [Operand(number) for number in range(4)]
    plain = step.block(places).tolist()
    found = [calling.block(places).tolist() for _ in range(3)]
    assert found == [[*plain, 0, address] for address in (0, 64, 64)]


def test_requests_stand_for_their_variants() -> None:
    of_halves = apply_kernel("astype", [Spec("bfloat16", (4,))], [Spec(F4, (4,))], {"dtype": np.dtype(F4)})
    variants = [*islice(standard_variants(), 60), *of_halves.steps[0].variants()]
    asked = {request_of(variant): variant for variant in variants}
    asked.pop("")  # of fused groups, and of what no op is called by
    assert len(asked) > 30
    assert {variant.kernel.form for variant in asked.values()} >= {Form.ARRAYS, Form.SCALARS}
    assert {request: requested(request) for request in asked} == asked


def test_no_request_stands_for_what_is_not_entered() -> None:
    assert request_of(ordered_variants(order(0).request)[0]) == ""


def test_the_helper_compiles_entries_and_parts(fresh_cache: Path) -> None:
    (variant,) = apply_kernel("exp", [Spec(F4, (4,))], [Spec(F4, (4,))], {}).steps[0].variants()
    part = next(part for part in PARTS if part.name == "many")
    wanted = {found_symbol(variant): request_of(variant), part_symbol(part): part.request()}
    submit([CompileOrder(*each) for each in wanted.items()])
    submit([CompileOrder(f"{symbol}0", request) for symbol, request in wanted.items()])  # of another flowrt
    assert wait_compiled(120)
    assert {path.stem for path in fresh_cache.glob("*.o")} == set(wanted)


def test_an_order_that_makes_no_sense_is_given_up(fresh_cache: Path) -> None:
    bad = [CompileOrder("flowrt_fused_x", "nonsense"), CompileOrder("flowrt_fused_y", order(0).request)]
    bad.append(CompileOrder("flowrt_exp_z", 'entry ["exp", "cpu", 99, 0, [], [], "", 0]'))
    submit(bad)
    assert wait_compiled(120)
    assert are_ready(bad)
    assert all(was_tried(each.symbol) for each in bad)


def test_a_helper_that_dies_is_followed_by_another_and_then_given_up(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, begun, begin = order(0), list[Any](), subprocess.Popen

    def begin_one_that_dies(*_: Any, **options: Any) -> Any:
        begun.append(begin(["/bin/false"], **options))
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", begin_one_that_dies)
    submit([wanted])
    assert wait_compiled(120)
    assert was_tried(wanted.symbol)
    assert len(begun) == background.MAX_TRIES
    assert background._state.helper is None


def test_where_the_cache_cannot_be_written_programs_stay_unfused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLOWRT_CACHE", str(tmp_path / "file" / "folder"))
    wanted = order(0)
    submit([wanted])
    assert wait_compiled(120)
    assert was_tried(wanted.symbol)
    assert not is_compiled(ordered_variants(wanted.request)[0])
    background.close()


def test_orders_of_many_threads_are_taken_once(fresh_cache: Path) -> None:
    wanted = order(0)
    threads = [threading.Thread(target=lambda: [submit([wanted]), are_ready([wanted])]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wait_compiled(120)
    assert len(list(fresh_cache.glob("*.o"))) == 1


ENDING = """
import numpy as np, sys
import flowrt as fr
from flowrt.kernels.store import background; from flowrt.kernels.fusion import fused
with fr.Graph() as graph:
    x = fr.placeholder("float32", (4000,))
    y = fr.tanh(x * 3.0) + x
with fr.BlockingSession(graph) as session:
    for _ in range(3):
        session.run(y, {x: np.ones(4000, np.float32)})
print(background._state.helper.pid)
"""


def test_a_process_leaves_no_helper_behind(fresh_cache: Path) -> None:
    done = subprocess.run([*python(), "-c", ENDING], capture_output=True, text=True, timeout=120, check=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


FORKING = """
import os, subprocess, sys
from flowrt.kernels.store import background, building
def told():
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
helper, builder = told(), told()
background._state.helper, building._builders[:] = helper, [builder]
helper.stdin.write(b"an order half written")
if not os.fork():
    mine = [os.open(sys.argv[1], os.O_RDWR | os.O_CREAT) for _ in range(8)]  # under the numbers of the pipes
    del helper, builder
    os._exit(0 if sum(os.fstat(file).st_size for file in mine) == 0 else 1)
print(os.waitpid(-1, 0)[1])
background.close()
building.stop_building()
"""


def test_a_forked_child_lets_go_of_the_helpers_pipes_once(tmp_path: Path) -> None:
    asked = [*python(), "-c", FORKING, str(tmp_path / "mine")]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0\n"


def test_first_steps_run_unfused_and_later_ones_fused(fresh_cache: Path) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder(F4, (None,))
        y = fr.exp(x * 0.5) - x
    with fr.BlockingSession(graph) as session:
        step = session.compile(y, [x])
        value = np.linspace(-1, 1, 50, dtype=F4)
        first = step(value)
        assert list(fresh_cache.glob("flowrt_fused_*")) == []
        second = step(value)  # a step that is run again is worth a kernel
        assert wait_compiled(120)
        assert len(list(fresh_cache.glob("flowrt_fused_*.o"))) == 1
        for found in (first, second, step(value), step(value)):
            np.testing.assert_allclose(found, np.exp(value * 0.5) - value, rtol=1e-6)


def test_a_tape_is_made_anew_once_its_kernels_are_compiled(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is the recording that predictions and later tapes of the plan share."""
    plan = plan_of(lambda x: fr.tanh(x * 0.5) - x, (50,))  # no other test compiles it
    region = whole_region(plan)
    tapes, values = Tapes(plan), [np.linspace(-1, 1, 50, dtype=F4)]
    with monkeypatch.context() as before:
        before.setattr(background, "LOOKED_EVERY", math.inf)  # however long that takes
        first = tapes.get(region, values)
        assert first is not None
        assert first.launches > 1
        assert tapes.made(region, values) is first
    assert wait_compiled(120)
    assert tapes.made(region, values) is None
    again = tapes.get(region, values)
    assert again is not None
    assert again.launches == 1
    assert not again.recording.orders


def test_what_small_parts_of_a_body_would_save_is_known_around_it(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "WORTH_BYTES", recording.WORTH_BYTES)
    plan = plan_of(lambda x: fr.cond(fr.sum(x) > 0, lambda: fr.tanh(x - fr.exp(x) * x) - x, lambda: x), (50,))
    region = whole_region(plan)
    made = recording.record(plan, region, [Spec(F4, (50,))])
    assert len(made.wishes) == 1
    assert not made.orders
    kept = [step for application in region.latest.applied.values() for step in application.steps]
    assert not any(isinstance(step, NestedStep) for step in kept)  # it is better once that is compiled


@pytest.mark.timeout(240)
def test_a_run_that_waits_for_its_kernels_has_the_bits_of_the_next_one(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(0).normal(size=(21, 26))

    def run() -> np.ndarray:
        with fr.Graph() as graph:
            given = fr.placeholder("float64", (None, 26))
            made = fr.sum(fr.sigmoid(given) * given + 0.3, axis=0)
        with fr.BlockingSession(graph) as session:
            return session.run(made, {given: x})

    apart = run()
    monkeypatch.setenv("FLOWRT_FUSED", "wait")
    first, then = run(), run()
    assert (first == then).all()
    assert (first != apart).any(), "the example shows nothing any more: take one whose sum is added up in another order"
