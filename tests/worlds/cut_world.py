"""Launches cut into ranges: those whose units are entries into every range that loops of vectors tell apart.

Their judge is each entry computed by itself. What lies outside a range must stay as it was. NaN equals NaN, whatever
its bits: which of two goes on is left to the processor. Zeros have their sign.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import flowrt as fr
from flowrt.base.errors import SpecError
from flowrt.base.spec import Spec
from flowrt.base.traits import is_alias
from flowrt.graph import Graph
from flowrt.kernels.fusion.program import fused_kernel
from flowrt.kernels.language.table import KERNELS, Call, Form, RegisteredKernel, View, find_kernel
from flowrt.kernels.launch import ENTRY_TYPE, Application, LaunchStep, Operand, apply_kernel
from flowrt.kernels.tiles.micro import native
from flowrt.op import REGISTRY
from flowrt.session.eager import evaluate

Array = np.ndarray[Any, Any]
Cut = tuple[int, int]

DTYPES = ("float32", "float64")
SIDE_BY_SIDE = 4  # vectors that a loop computes at a time
ROW = 7  # entries of a short row
RUN = np.array([0, 3, 11, 0], np.int64)  # what random ops read: the step and the seed


def seeded(*what: object) -> np.random.Generator:
    """A generator that follows from ``what`` alone."""
    seed = zlib.crc32(" ".join(map(str, what)).encode())
    print("seed", seed)
    return np.random.default_rng(seed)


def bits(array: Array) -> Array:
    """What is compared."""
    if array.dtype.kind == "f":
        array = np.where(array != array, np.array(np.nan, array.dtype), array)
    return array.view(f"u{array.dtype.itemsize}")


# ── units that are entries ───────────────────────────────────────────────────────────────────────────────────────────


def enough(dtypes: Iterable[np.dtype[Any]]) -> int:
    """So many entries that a range can take every loop over vectors of them, from any begin within one."""
    shortest = min(dtype.itemsize for dtype in dtypes if dtype.kind == "f")
    return (SIDE_BY_SIDE + 1) * native().width // shortest + 1


def every_cut(count: int) -> Iterator[Cut]:
    """All ranges of ``count`` entries."""
    return itertools.combinations(range(count + 1), 2)


def some_cuts(count: int) -> Iterator[Cut]:
    """Ranges of every length, from three begins."""
    return ((begin, end) for begin in (0, 1, 5) for end in range(begin + 1, count + 1))


def mixed(count: int, dtype: np.dtype[Any], rng: np.random.Generator) -> Array:
    """Ordinary numbers and, among them, ones of every size and sign, infinities and NaN."""
    if dtype.kind != "f":
        return rng.integers(0, 2, count).astype(dtype)
    ends = [0.0, -0.0, 1.0, -1.0, 0.5, np.inf, -np.inf, np.nan, 1e-40, 2.0**24, 2.0**31]
    far = rng.normal(size=count) * 10.0 ** rng.integers(-40, 38, count)
    far = np.where(rng.random(count) < 0.5, far, rng.choice(ends, count))
    near = rng.normal(size=count) * rng.choice([0.1, 1.0, 10.0], count)
    with np.errstate(over="ignore"):
        return np.where(rng.random(count) < 0.25, far, near).astype(dtype)


@dataclass(frozen=True)
class Entrywise:
    """A kernel whose units are entries, and the dtypes of its operands, of which it reads the first ``inputs``."""

    name: str
    kernel: RegisteredKernel
    dtypes: tuple[np.dtype[Any], ...]
    inputs: int

    def __str__(self) -> str:
        return f"{self.name}({','.join(map(str, self.dtypes))})"


class Launch:
    """A step over memory of its own, seen by ``views``: ``values`` are the inputs' entries in order."""

    def __init__(self, what: Entrywise, values: Sequence[Array], views: Sequence[View], in_place: bool = False) -> None:
        self.count, self._reads = views[-1].size, what.inputs
        step = LaunchStep(what.kernel, tuple(range(len(views))), what.dtypes, Call(tuple(views)), what.inputs)
        self._places = [_places(view) for view in views]
        self._before = [np.full(at.max() + 9, 0.75).astype(d) for at, d in zip(self._places, what.dtypes, strict=True)]
        for memory, places, value in zip(self._before, self._places, values, strict=False):
            memory[places] = value
        self._at = self._joined() if in_place else list(range(len(views)))  # the memory of each operand
        self._block = step.block([Operand(n + 1) for n in range(len(views))])
        self._entry: Callable[..., None] = ENTRY_TYPE(step.address())

    def _joined(self) -> list[int]:
        """Each result in the memory of an input of its dtype, no two in one."""
        found, free = list(range(self._reads)), list(range(self._reads))
        for n in range(self._reads, len(self._before)):
            own = next((i for i in free if self._before[i].dtype == self._before[n].dtype), n)
            free = [i for i in free if i != own]
            found.append(own)
        return found

    def run(self, begin: int, end: int) -> list[Array]:
        """The bits of each result's memory after a range, which found everything as it was."""
        memory, run = [array.copy() for array in self._before], RUN.copy()
        bases = np.array([run.ctypes.data, *(memory[n].ctypes.data for n in self._at)], np.int64)
        self._entry(bases.ctypes.data, self._block.ctypes.data, begin, end)
        return [bits(memory[n]) for n in self._at[self._reads :]]

    def judge(self) -> list[Array]:
        """The bits of every entry of each result, computed by itself."""
        alone = [self.run(at, at + 1) for at in range(self.count)]
        return [
            np.array([found[n][at[k]] for k, found in enumerate(alone)])
            for n, at in enumerate(self._places[self._reads :])
        ]

    def is_wrong(self, judge: Sequence[Array], begin: int, end: int) -> bool:
        """Whether a range makes anything else than the judge has for it, or writes elsewhere."""
        for n, (found, wanted) in enumerate(zip(self.run(begin, end), judge, strict=True), self._reads):
            expected = bits(self._before[self._at[n]]).copy()
            expected[self._places[n][begin:end]] = wanted[begin:end]
            if not np.array_equal(found, expected):
                return True
        return False


def _places(view: View) -> Array:
    """Where each entry lies, in order."""
    index = np.indices(view.shape).reshape(len(view.shape), -1)
    return np.asarray(view.offset + np.array(view.strides, np.int64) @ index)


def _dense(count: int) -> View:
    return View((count,), (1,))


def _layouts(what: Entrywise, count: int) -> Iterator[tuple[str, list[View], bool]]:
    """Ways for ``count`` entries to lie: their names, the operands' views, and whether results lie where inputs do.

    Each pattern of strides that a fused kernel is given is compiled by itself, so such a kernel has few.
    """
    every, inputs = len(what.dtypes), what.inputs
    yield "dense", [_dense(count)] * every, False
    yield "in place", [_dense(count)] * every, True
    rows = View((count // ROW, ROW), (ROW + 2, 1))
    yield "rows in place", [rows] * every, True
    if what.kernel.expression is not None:
        return
    backwards, outputs = View((count,), (-1,), count - 1), [_dense(count)] * (every - inputs)
    yield "backwards", [backwards] * inputs + outputs, False
    yield "apart", [View((count,), (3,), 1)] * every, False
    for one in range(inputs if inputs > 1 else 0):
        yield f"one of {one}", [View((count,), (int(n != one),)) for n in range(inputs)] + outputs, False


def differences(what: Entrywise, cuts: Callable[[int], Iterable[Cut]]) -> tuple[int, list[str]]:
    """How many cuts were tried in all layouts, and those that make other bits."""
    rng, count = seeded(what), enough(what.dtypes)
    every = [mixed(count, dtype, rng) for dtype in what.dtypes[: what.inputs]]
    tried, wrong = 0, []
    for name, views, in_place in _layouts(what, count):
        size = views[-1].size
        values = [v[:size] if any(s.strides) else np.full(size, v[0]) for v, s in zip(every, views, strict=False)]
        judge = Launch(what, values, [_dense(size)] * len(views)).judge()
        launch = Launch(what, values, views, in_place)
        for begin, end in cuts(size):
            tried += 1
            if launch.is_wrong(judge, begin, end):
                wrong.append(f"{what} {name} [{begin}, {end})")
    return tried, wrong


FIRST = {"where": "bool", "widen_bfloat16": "uint16", "widen_float16": "uint16"}  # the dtype of the first operand
WHOLE = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def elementwise_ops(dtype: str) -> Iterator[Entrywise]:
    """Every op of flowrt's own that is computed entry by entry, on floats of ``dtype``; tests enter others."""
    for (op, device), kernels in sorted(KERNELS.items(), key=lambda item: item[0]):
        own = kernels[0].function.__module__.startswith("flowrt.")
        if own and device == "cpu" and kernels[0].form is Form.SCALARS:
            count = kernels[0].function.__code__.co_argcount
            taken = [Spec(FIRST.get(op, dtype) if n == 0 else dtype, (4,)) for n in range(count)]
            for made in _made(op, taken):
                dtypes = tuple(spec.dtype for spec in (*taken, made))
                kernel = find_kernel(op, "cpu", dtypes)
                if kernel is not None and kernel.form is Form.SCALARS:
                    yield Entrywise(op, kernel, dtypes, count)


def _made(op: str, taken: Sequence[Spec]) -> list[Spec]:
    if op == "astype":
        return [Spec(dtype, taken[0].dims) for dtype in ("float32", "float64", "bool", *WHOLE)]
    if op not in REGISTRY:  # kernels have parts that no op is made of alone
        return [taken[0]]
    try:
        return [REGISTRY[op].infer(taken, {})[0]]
    except SpecError:
        return []  # it is of other dtypes


CHEAP = ("add", "add", "subtract", "multiply", "multiply", "divide", "maximum", "where")
ONE = ("negative", "square", "abs", "relu", "sqrt", "reciprocal")
DEAR = ("exp", "tanh", "sigmoid", "softplus", "log1p", "sin", "erf", "expm1")


def random_group(seed: int, dtype: str) -> Entrywise:
    """A fused program of up to ten members, of one result or two."""
    rng = np.random.default_rng(seed)
    inputs = int(rng.integers(1, 4))
    floats = list(range(inputs))
    members: list[tuple[str, tuple[int, ...], str]] = []

    def add(op: str, operands: Sequence[int], kind: str = dtype) -> int:
        members.append((op, tuple(operands), kind))
        return inputs + len(members) - 1

    for _ in range(int(rng.integers(2, 9))):
        op = str(rng.choice(rng.choice(np.array([CHEAP, CHEAP, ONE, DEAR], object))))
        taken = [int(n) for n in rng.choice(floats[-4:], 2)]
        if op == "where":
            floats.append(add(op, (add("less", taken, "bool"), *taken)))
        else:
            floats.append(add(op, taken if op in CHEAP else taken[:1]))
    results = tuple(dict.fromkeys((floats[-1], floats[max(inputs, len(floats) - 3)])))
    kernel = fused_kernel((dtype,) * inputs, tuple(members), results)
    name = f"group {seed} {[op for op, _, _ in members]}"
    return Entrywise(name, kernel, (np.dtype(dtype),) * (inputs + len(results)), inputs)


# ── any units ────────────────────────────────────────────────────────────────────────────────────────────────────────


def computed(run: Callable[..., Any], arrays: Sequence[Array]) -> list[tuple[Any, list[Array], list[Array]]]:
    """The nodes of what ``run`` builds that a kernel computes, with their inputs and outputs."""
    with Graph() as graph:
        inputs = [fr.placeholder(a.dtype, a.shape) for a in arrays]
        run(*inputs)
    values: dict[Any, Any] = dict(zip(inputs, arrays, strict=True))
    found = []
    for node in graph.nodes:
        runs = node.op.name == "constant" or is_alias(node.op.name) or (node.op.name, "cpu") in KERNELS
        if not node.outputs or node.outputs[0] in values or not runs or any(t not in values for t in node.inputs):
            continue
        taken = [np.ascontiguousarray(values[t]).reshape(np.shape(values[t])) for t in node.inputs]
        outputs = list(evaluate(node.op, taken, node.attrs, RUN.copy()))
        values.update(zip(node.outputs, outputs, strict=True))
        if (node.op.name, "cpu") in KERNELS and not is_alias(node.op.name):
            found.append((node, taken, outputs))
    return found


def application_of(node: Any, inputs: Sequence[Array], outputs: Sequence[Array]) -> Application:
    taken, made = ([Spec(a.dtype, a.shape) for a in arrays] for arrays in (inputs, outputs))
    return apply_kernel(node.op.name, taken, made, node.attrs)


def run_in_ranges(
    application: Application,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    ranges: Callable[[int], list[Cut]],
    rng: np.random.Generator,
) -> list[Array]:
    """The outputs, each step's units computed in ``ranges(how many)``, over memory that holds rubbish."""
    made = [np.empty_like(a, order="C") for a in outputs]
    made += [np.empty(spec.concrete, spec.dtype) for spec in application.scratch]
    local = [np.empty(spec.concrete, spec.dtype) for spec in application.local]
    for array in (*made, *local):
        array.reshape(-1).view(np.uint8)[:] = 0x77
    memory = [*inputs, *made, *local]
    places, run = [Operand(number + 1) for number in range(len(memory) + application.slots)], RUN.copy()
    run[-1] = run.ctypes.data  # whom a loop inside asks whether it is to stop
    bases = np.array([run.ctypes.data, *(a.ctypes.data for a in memory), *[0] * application.slots], np.int64)
    for step in application.steps:
        block, entry = step.block(places), ENTRY_TYPE(step.address())
        for begin, end in ranges(step.units):
            for array in local:  # what a range leaves there, the next must not count on
                array.reshape(-1).view(np.uint8)[:] = rng.integers(256)
            entry(bases.ctypes.data, block.ctypes.data, begin, end)
    return made[: len(outputs)]


def at_once(units: int) -> list[Cut]:
    return [(0, units)]


def shuffled(rng: np.random.Generator, places_to_cut: int) -> Callable[[int], list[Cut]]:
    """Ranges between so many random places, in random order."""

    def ranges(units: int) -> list[Cut]:
        cuts = sorted({0, units, *rng.integers(0, units + 1, places_to_cut).tolist()})
        pairs = list(itertools.pairwise(cuts)) or [(0, 0)]
        return [pairs[n] for n in rng.permutation(len(pairs))]

    return ranges


def are_same(mine: Sequence[Array], others: Sequence[Array]) -> bool:
    return all(np.array_equal(bits(a), bits(b)) for a, b in zip(mine, others, strict=True))
