"""What building, compiling and recording a step takes grows as the graph does: nothing looks at all for each one.

Lines of code are counted, function by function, on a graph and on one twice as large; no clock is read.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from step_world import CPU

import flowrt as fr
from flowrt.base.spec import Spec
from flowrt.op import as_value
from flowrt.passes import StepTerms, compile_step
from flowrt.sched.machine import StepMachine
from flowrt.sched.tape.recording import record
from flowrt.sched.tape.schedule import hazards
from flowrt.sched.units import connect, find_units
from flowrt.session.runners import fusible, supports
from flowrt.train.gathers import find_gathers

if TYPE_CHECKING:
    from types import CodeType

PACKAGE = str(Path(fr.__file__).parent)
SIZE = 40
MOST, SLACK = 2.6, 150
"""How many times the lines a graph twice as large may take, of any function; and lines more, for short ones."""

Made = tuple[list[Any], list[Any]]
"""Fetches and feeds."""


def chain(n: int) -> Made:
    x = y = fr.placeholder("float32", (16,))
    a, b = fr.Variable(np.ones(16, "float32")), fr.Variable(np.ones(16, "float32"))
    for _ in range(n):
        y = fr.tanh(y * a + b)
    return [y], [x]


def chain_and_gradients(n: int) -> Made:
    (y,), feeds = chain(n)
    return [y, *fr.gradients(y, feeds)], feeds


def variables(optimizer: fr.optim.Optimizer) -> Callable[[int], Made]:
    def build(n: int) -> Made:
        x = fr.placeholder("float32", (4,))
        made = [fr.Variable(np.zeros(4, "float32")) for _ in range(n // 4)]
        loss = fr.add_n([fr.sum(fr.square(v - x)) for v in made])
        return [loss, optimizer.minimize(loss)], [x]

    return build


def residual_layers(n: int) -> Made:
    x = y = fr.placeholder("float32", (None, 8))
    for _ in range(n // 8):
        w, b = fr.Variable(np.zeros((8, 8), "float32")), fr.Variable(np.zeros(8, "float32"))
        y = fr.nn.relu(y @ w + b) + y
    loss = fr.mean(fr.square(y))
    return [loss, fr.optim.SGD(0.1).minimize(loss)], [x]


def fan(n: int) -> Made:
    x = fr.placeholder("float32", (16,))
    y = fr.add_n([fr.tanh(x * float(i)) for i in range(n)])
    return [y, *fr.gradients(y, [x])], [x]


def reductions(n: int) -> Made:
    x = fr.placeholder("float32", (5, 4))
    parts = [fr.tanh(x * float(i)) for i in range(n)]
    return [fr.add_n([fr.sum(part) + fr.max(fr.exp(part), axis=0) for part in parts])], [x]


def layers_side_by_side(n: int) -> Made:
    x = fr.placeholder("float32", (None, 8))
    return [fr.nn.relu(x @ fr.Variable(np.zeros((8, 8), "float32")) + 1.0) for _ in range(n // 2)], [x]


def feeds_and_fetches(n: int) -> Made:
    feeds = [fr.placeholder("float32", (3,)) for _ in range(n)]
    return [fr.tanh(x + 1.0) for x in feeds], feeds


def controls(n: int) -> Made:
    x = fr.placeholder("float32", (3,))
    writes = [fr.Variable(np.zeros(3, "float32")).assign(x * float(i)) for i in range(n)]
    with fr.control_dependencies(writes):
        return [fr.tanh(x)], [x]


def writes_in_order(n: int) -> Made:
    x, v = fr.placeholder("float32", (3,)), fr.Variable(np.zeros(3, "float32"))
    last: list[Any] = []
    for _ in range(n):
        with fr.control_dependencies(last):
            last = [v.assign(v.read() * 2.0 + x)]
    return last, [x]


def queues(n: int) -> Made:
    x, taken = fr.placeholder("float32", (3,)), []
    for i in range(n // 2):
        queue = fr.FIFOQueue(4, "float32", (3,))
        with fr.control_dependencies([queue.enqueue(x * float(i))]):
            taken.append(fr.tanh(queue.dequeue()))
    return taken, [x]


def bags(n: int) -> Made:
    ids = fr.placeholder("int32", (3, 2))
    tables = [fr.Variable(np.zeros((10, 4), "float32")) for _ in range(n // 2)]
    return [fr.sum(fr.take(table, ids, axis=0), axis=1) for table in tables], [ids]


def branch(n: int) -> Made:
    x, chosen = fr.placeholder("float32", (3,)), fr.placeholder("bool", ())

    def long() -> Any:
        y = x
        for _ in range(n):
            y = fr.tanh(y + 1.0)
        return y

    return [fr.cond(chosen, long, lambda: x)], [x, chosen]


def turns(n: int) -> Made:
    x = fr.placeholder("float32", (3, 5))

    def turn(carried: Any, row: Any) -> Any:
        y = carried + row
        for _ in range(n):
            y = fr.tanh(y + 1.0)
        return y, y

    return [fr.scan(turn, fr.zeros((5,)), x)[0]], [x]


def loops(n: int) -> Made:
    x = y = fr.placeholder("float32", (3,))
    for _ in range(n // 8):
        y = fr.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, fr.tanh(v)), (0, y))[1]
    return [y], [x]


def scopes(n: int) -> Made:
    x = y = fr.placeholder("float32", (3,))
    for _ in range(n):
        with fr.name_scope("block"):
            y = fr.tanh(y, name="again")
    return [y], [x]


PROGRAMS: dict[str, Callable[[int], Made]] = {
    build.__name__: build
    for build in (
        chain,
        chain_and_gradients,
        residual_layers,
        fan,
        reductions,
        layers_side_by_side,
        feeds_and_fetches,
        controls,
        writes_in_order,
        queues,
        bags,
        branch,
        turns,
        loops,
        scopes,
    )
} | {
    f"variables_under_{optimizer.__class__.__name__}": variables(optimizer)
    for optimizer in (fr.optim.SGD(0.1), fr.optim.Momentum(0.1, 0.9), fr.optim.AdaGrad(0.1), fr.optim.Adam(0.1))
}


def prepare(build: Callable[[int], Made], n: int, optimize: bool) -> None:
    """All that comes before a step's first run, but for what compiles kernels or waits."""
    with fr.Graph() as graph:
        asked, feeds = build(n)
    fetches = [t for t in asked if isinstance(t, fr.Tensor)]
    targets = [t for t in asked if not isinstance(t, fr.Tensor)]
    where: dict[str, Any] = {"devices": [CPU], "default": CPU, "supports": supports, "fusible": fusible}
    (plan,) = compile_step(graph, fetches, targets, feeds, StepTerms(**where, optimize=optimize)).plans.values()
    units = find_units(plan, tapes=True)
    StepMachine(connect(plan, units).topology).start()
    specs = plan.value_specs()
    for region in (unit.region for unit in units if unit.region is not None):
        known = [Spec(specs[v].dtype, [2 if size is None else size for size in specs[v].shape]) for v in region.inputs]
        hazards(record(plan, region, known).launches)


def lines_of(work: Callable[[], None]) -> Counter[str]:
    """How many lines each function of flowrt runs."""
    counts: dict[int, _Count] = {}  # by the code's address, as its hash is of all that is in it

    def called(frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        count = counts.get(id(code)) or counts.setdefault(id(code), _Count(code))
        return count.line(frame, event, _) if count.counts else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        work()
    finally:
        sys.settrace(before)
    by_name: Counter[str] = Counter()
    for count in counts.values():
        if count.counts:
            by_name[count.name] += count.lines
    return by_name


class _Count:
    """How many lines a function has run; it keeps the code, whose address is then no other's."""

    def __init__(self, code: CodeType) -> None:
        self.code, self.lines, self.counts = code, 0, code.co_filename.startswith(PACKAGE)

        def line(*_: Any) -> Any:
            self.lines += 1
            return line

        self.line = line

    @property
    def name(self) -> str:
        return f"{Path(self.code.co_filename).relative_to(PACKAGE)}:{self.code.co_firstlineno} {self.code.co_name}"


def steep(build: Callable[[int], Made], optimize: bool) -> dict[str, tuple[int, int]]:
    """The functions of which a graph twice as large takes far more than twice the lines, and both counts."""
    prepare(build, SIZE // 2, optimize)  # what is found out once and kept
    once, twice = (lines_of(lambda n=n: prepare(build, n, optimize)) for n in (SIZE, 2 * SIZE))  # type: ignore[misc]
    return _steep(once, twice)


def _steep(once: Counter[str], twice: Counter[str]) -> dict[str, tuple[int, int]]:
    return {name: (once[name], lines) for name, lines in twice.items() if lines > MOST * once[name] + SLACK}


@pytest.fixture(autouse=True)
def kernels_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings the same whatever has been compiled so far."""
    monkeypatch.setattr("flowrt.kernels.fusion.fused.is_compiled", lambda _: True)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_graph_twice_as_large_takes_no_function_more_than_twice_the_lines(program: str) -> None:
    assert steep(PROGRAMS[program], optimize=True) == {}


def test_a_small_step_takes_as_much_in_a_large_graph_as_in_a_small_one() -> None:
    def another(n: int) -> Counter[str]:
        with fr.Graph() as graph:
            variables(fr.optim.Adam(0.1))(n)
        graph.finalize()
        where: dict[str, Any] = {"devices": [CPU], "default": CPU, "supports": supports, "fusible": fusible}
        first, second = (as_value(variable) for variable in graph.variables[:2])
        compile_step(graph, [first], [], [], StepTerms(**where))
        return lines_of(lambda: compile_step(graph, [second], [], [], StepTerms(**where)))

    another(4)
    assert another(SIZE) == another(4 * SIZE)


def test_a_replicated_model_of_twice_the_variables_takes_no_function_more_than_twice_the_lines() -> None:
    def replicate(n: int) -> None:
        def loss_fn(given: dict[str, fr.Tensor]) -> fr.Tensor:
            made = [fr.Variable(np.zeros(4, "float32")) for _ in range(n)]
            return fr.add_n([fr.sum(fr.square(v - given["x"])) for v in made])

        inputs, adam = {"x": Spec("float32", (4,))}, fr.optim.Adam(0.1)
        with fr.Graph():
            built = fr.train.Replicated(loss_fn, inputs, adam, replicas=2, servers=2)
        (tower, *_) = built.towers
        assert find_gathers([tower.loss, *(g for g, _ in tower.gradients)], [*tower.inputs.values()], built.held) == []

    replicate(SIZE // 2)  # what is found out once and kept
    once, twice = (lines_of(lambda n=n: replicate(n)) for n in (SIZE, 2 * SIZE))  # type: ignore[misc]
    assert _steep(once, twice) == {}


def test_writing_reading_and_searching_a_graph_take_their_share() -> None:
    def search(n: int) -> None:
        with fr.Graph() as graph:
            variables(fr.optim.Adam(0.1))(n)
            chain_and_gradients(n)
        read = fr.Graph.from_bytes(graph.to_bytes())
        assert [read.get_operation_by_name(node.name).index for node in graph.nodes] == list(range(len(graph.nodes)))

    search(SIZE // 2)
    assert _steep(lines_of(lambda: search(SIZE)), lines_of(lambda: search(2 * SIZE))) == {}


@pytest.mark.parametrize("program", ["chain_and_gradients", "writes_in_order", "queues"])
def test_nor_does_one_that_no_pass_rewrites(program: str) -> None:
    assert steep(PROGRAMS[program], optimize=False) == {}
