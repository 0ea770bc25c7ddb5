"""The standard kernels: what the bundle of a machine holds, so that most programs never wait for the compiler.

They are elementwise ops of the dtypes that these are usually of, as is stated with their kernels, and the tapes of
typical programs, each optimiser's training step among them. A kernel does not depend on sizes, so a program of any size
of the same kind finds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

import flowrt.kernels  # noqa: F401  (enters the kernels in the table)
from flowrt import ops, optim
from flowrt.base.device import Device
from flowrt.base.errors import FlowrtError
from flowrt.base.spec import Spec
from flowrt.graph import Graph, Tensor
from flowrt.kernels.fusion.fused import ordered_variants
from flowrt.kernels.language.table import FACTS, require_kernel
from flowrt.kernels.language.variants import Variant, symbol_of
from flowrt.kernels.launch import WAYS, apply_kernel
from flowrt.kernels.ops.updates.combining import summing
from flowrt.kernels.tiles.convolution.lines import flattened
from flowrt.kernels.tiles.micro import Tile, native, tile_part, tiles_of
from flowrt.kernels.tiles.products import Tiled
from flowrt.op import as_value, lookup
from flowrt.ops.state import Variable
from flowrt.passes import StepTerms, compile_step
from flowrt.sched.tape.recording import record
from flowrt.sched.units import find_units
from flowrt.session.eager import evaluate
from flowrt.session.initial import initial_waves
from flowrt.session.runners import fusible, supports

if TYPE_CHECKING:
    from flowrt.kernels.store.parts import RuntimeObject

F32, F64, I32, I64, BOOL = "float32", "float64", "int32", "int64", "bool"
CASTS = ((I32, F32), (I64, F32), (BOOL, F32), (F32, I32), (F32, I64), (F32, F64), (F64, F32), (I64, I32), (I32, I64))
ROWS, COLUMNS, WIDE = 64, 10, 64  # large enough for fusion to be worth a compilation


def standard_variants() -> Iterator[Variant]:
    """Every standard variant, the most wanted first, each once."""
    seen: set[str] = set()  # symbols, since several ops may share an entry
    wanted = dict.fromkeys((*_of_programs(), *_of_elements()))
    for variant in (*wanted, *(other for one in wanted for other in _other_ways(one))):
        if symbol_of(variant) not in seen:
            seen.add(symbol_of(variant))
            yield variant


def _other_ways(variant: Variant) -> Iterator[Variant]:
    """What the same op takes for other shapes."""
    for name in WAYS.get(variant.kernel.op, ()):
        yield replace(variant, kernel=require_kernel(name, "cpu", variant.dtypes))


def standard_tiles() -> Iterator[RuntimeObject]:
    """The register tiles of products and convolutions, each once."""
    geometry = native()
    for dtype in (F32, F64):
        beside, lines = tiles_of(geometry, dtype, "beside"), tiles_of(flattened(geometry), dtype)
        found = (*Tiled(geometry).tiles(dtype), *beside, *lines)
        yield from dict.fromkeys(tile_part(tile) for tile in found if isinstance(tile, Tile))


# ── elementwise ops ──────────────────────────────────────────────────────────────────────────────────────────────────


def _of_elements() -> Iterator[Variant]:
    for name, facts in FACTS.items():
        for dtype in facts.usual:
            yield from _steps(name, [Spec(dtype, (ROWS,))] * len(lookup(name).tensors), {})
    for dtype in (F32, F64, I32, I64, BOOL):
        yield from _steps("where", [Spec(BOOL, (ROWS,)), Spec(dtype, (ROWS,)), Spec(dtype, (ROWS,))], {})
        yield from _steps("transpose", [Spec(dtype, (ROWS, COLUMNS))], {"axes": (1, 0)})
    sizes = {"strides": 1, "padding": "SAME", "dilations": 1, "groups": 1}
    yield from _steps("conv2d", [Spec(F32, (ROWS, 8, 8, WIDE)), Spec(F32, (3, 3, WIDE, 1))], sizes)  # to few channels
    flags = {"transpose_a": False, "transpose_b": False}
    for dtype in (F32, F64):
        few = Spec(dtype, (2, 2))  # of products of few numbers, which need no tiles
        yield from _steps("matmul", [few, few], flags)
        yield from _steps("matmul_bias", [few, few, Spec(dtype, (2,))], {**flags, "activation": ""})
    for dtype in (F32, F64):
        yield from (variant for step in summing(dtype, 1, 1, 1).steps for variant in step.variants())
    for source, target in CASTS:
        yield from _steps("astype", [Spec(source, (ROWS,))], {"dtype": np.dtype(target)})


def _steps(name: str, inputs: Sequence[Spec], attrs: dict[str, Any]) -> Iterator[Variant]:
    try:
        outputs = lookup(name).infer(inputs, attrs)
        application = apply_kernel(name, inputs, outputs, attrs)
    except FlowrtError:
        return  # not for these dtypes
    yield from (variant for step in application.steps for variant in step.variants())


# ── programs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_programs() -> Iterator[Variant]:
    for program in PROGRAMS:
        with Graph() as graph:
            feeds, fetches = program()
        for options in ((fetches, True), (fetches, False)):
            yield from _of_step(graph, feeds, *options)
        for wave in initial_waves(graph.resources):
            yield from _of_step(graph, (), wave, True)


def _of_step(graph: Graph, feeds: Sequence[Tensor], fetches: Sequence[Any], optimize: bool) -> Iterator[Variant]:
    device = Device.parse("/job:local/task:0/device:cpu:0")
    wanted = [as_value(value) for value in fetches]
    tensors = [value for value in wanted if isinstance(value, Tensor)]
    targets = [value for value in wanted if not isinstance(value, Tensor)]
    compiled = compile_step(
        graph,
        tensors,
        targets,
        feeds,
        StepTerms(
            devices=[device], default=device, supports=supports, fusible=fusible, evaluate=evaluate, optimize=optimize
        ),
    )
    for plan in compiled.plans.values():
        specs = plan.value_specs()
        for unit in find_units(plan):
            if unit.region is not None:
                recording = record(plan, unit.region, [_sized(specs[value]) for value in unit.region.inputs])
                yield from (variant for launch in recording.launches for variant in launch.step.variants())
                yield from (variant for order in recording.orders for variant in ordered_variants(order.request))


def _sized(spec: Spec) -> Spec:
    return Spec(spec.dtype, tuple(ROWS if n is None else n for n in spec.dims or ()))


Program: TypeAlias = "Callable[[], tuple[Sequence[Tensor], Sequence[Any]]]"


def _weights(*shape: int) -> Variable:
    return Variable(ops.random.normal(shape, stddev=0.1))


def _trained(loss: Tensor, by: optim.Optimizer, *feeds: Tensor, also: Sequence[Any] = ()) -> tuple[Any, Any]:
    return feeds, [loss, by.minimize(loss), *also]


def _images() -> tuple[Tensor, Tensor]:
    return ops.placeholder(F32, (None, 8, 8, 3)), ops.placeholder(I32, (None,))


def _perceptron(by: optim.Optimizer, labels: str = I32) -> Program:
    def program() -> tuple[Any, Any]:
        x, y = ops.placeholder(F32, (None, WIDE)), ops.placeholder(labels, (None,))
        hidden = ops.relu(x @ _weights(WIDE, WIDE) + Variable(np.zeros(WIDE, np.float32)))
        hidden = ops.tanh(hidden @ _weights(WIDE, WIDE) + Variable(ops.zeros((WIDE,))))
        logits = hidden @ _weights(WIDE, COLUMNS) + Variable(ops.zeros((COLUMNS,)))
        right = ops.mean(ops.astype(ops.equal(ops.astype(ops.argmax(logits, axis=-1), labels), y), F32))
        loss = ops.mean(ops.nn.softmax_cross_entropy(logits, y))
        return _trained(loss, by, x, y, also=[logits, right, ops.nn.softmax(logits)])

    return program


def _convolutional() -> tuple[Any, Any]:
    x, y = _images()
    z = ops.nn.max_pool2d(ops.relu(ops.nn.conv2d(x, _weights(3, 3, 3, 8)) + Variable(ops.zeros((8,)))))
    z = ops.nn.max_pool2d(ops.relu(ops.nn.conv2d(z, _weights(3, 3, 8, 16)) + Variable(ops.zeros((16,)))))
    logits = ops.reshape(z, (-1, WIDE)) @ _weights(WIDE, COLUMNS) + Variable(ops.zeros((COLUMNS,)))
    loss = ops.mean(ops.nn.softmax_cross_entropy(logits, y))
    return _trained(loss, optim.Momentum(0.1, 0.9), x, y)


def _normalised() -> tuple[Any, Any]:
    x, y = _images()
    z, _, _ = ops.nn.batch_norm(ops.nn.conv2d(x, _weights(3, 3, 3, 8), strides=2), *_scale_and_offset(8))
    z = ops.mean(ops.nn.avg_pool2d(ops.relu(z)), axis=(1, 2))
    z = ops.gelu(ops.nn.layer_norm(z @ _weights(8, WIDE), *_scale_and_offset(WIDE)))
    logits = ops.nn.dropout(z, 0.1, seed=1) @ _weights(WIDE, COLUMNS)
    return _trained(ops.mean(ops.nn.softmax_cross_entropy(logits, y)), optim.Adam(0.1), x, y)


def _scale_and_offset(size: int) -> tuple[Variable, Variable]:
    return Variable(ops.ones((size,))), Variable(ops.zeros((size,)))


def _recurrent(units: int) -> Program:
    def program() -> tuple[Any, Any]:
        x, y = ops.placeholder(F32, (5, None, WIDE)), ops.placeholder(I32, (5, None))
        zero, rows = ops.zeros((ROWS, units)), (_weights(WIDE, 4 * units), _weights(units, 4 * units))
        outputs, _, _ = ops.nn.lstm(x, zero, zero, *rows, Variable(ops.zeros((4 * units,))))
        loss = ops.mean(ops.nn.softmax_cross_entropy(outputs @ _weights(units, COLUMNS), y))
        return _trained(loss, optim.Momentum(0.1, 0.9), x, y)

    return program


def _embedded(by: optim.Optimizer) -> Program:
    def program() -> tuple[Any, Any]:
        ids, y = ops.placeholder(I32, (None, 5)), ops.placeholder(F32, (None, 1))
        z = ops.mean(ops.nn.embedding_lookup(_weights(ROWS, WIDE), ids), axis=1) @ _weights(WIDE, 1)
        return _trained(ops.mean(ops.nn.sigmoid_cross_entropy(z, y)), by, ids, y)

    return program


def _everyday(dtype: str) -> Program:
    """Reductions, slices and joins of matrices."""

    def program() -> tuple[Any, Any]:
        x = ops.placeholder(dtype, (None, COLUMNS))
        parts: list[Any] = [reduce(x, axis=axis) for reduce in (ops.sum, ops.max, ops.min) for axis in (None, 0, -1)]
        parts += [ops.mean(x, axis=axis) for axis in (None, 0, -1)] if dtype in (F32, F64) else []
        parts += [
            ops.transpose(x),
            ops.concat([x, x], 0),
            ops.stack([x, x], 0),
            x[1:3],
            x[:, 0],
            ops.argmax(x, axis=-1),
        ]
        parts += [
            ops.matmul(x, x, transpose_a=True),
            ops.take(x, np.array([0, 1]), axis=0),
            ops.pad(x, ((1, 1), (0, 0))),
        ]
        parts += [ops.one_hot(ops.argmax(x, axis=-1), COLUMNS), ops.cumsum(x, axis=0), x + x[0], x * 2, x - 1]
        return (x,), parts

    return program


OPTIMISERS = (optim.Momentum(0.1, 0.9), optim.SGD(0.1), optim.Adam(0.1), optim.AdaGrad(0.1), optim.RMSProp(0.1))
PROGRAMS: Sequence[Program] = (
    *(_perceptron(by) for by in OPTIMISERS),
    _convolutional,
    *map(_recurrent, (WIDE, 4 * WIDE)),  # whose threads share the batch, or the units
    _embedded(optim.AdaGrad(0.1)),
    _perceptron(optim.SGD(0.1), I64),
    _perceptron(optim.AdamW(0.1)),
    _normalised,
    *(_embedded(by) for by in (optim.SGD(0.1), optim.Adam(0.1))),
    *(_everyday(dtype) for dtype in (F32, F64, I64, I32)),
)
