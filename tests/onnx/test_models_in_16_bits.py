"""Models of float16 and bfloat16: read, written, and run by onnxruntime."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_world import model_of
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as Lacking
from op_examples import EXAMPLES

import flowrt as fr
from flowrt.onnx.saving import model_of as written_model
from flowrt.onnx.writing.writer import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from example import Example

HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
both = pytest.mark.parametrize("half", HALVES)
SLACK = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # what is rounded to the other one of two neighbours
LEAST = {"float16": 2.0**-24, "bfloat16": 2.0**-133}


def loaded(model: Any, *given: np.ndarray) -> list[Any]:
    """What a model answers that is read."""
    found = fr.onnx.load(model)
    with fr.BlockingSession(found.graph) as session:
        feeds = dict(zip(found.inputs.values(), given, strict=True))
        return [np.asarray(value) for value in session.run(list(found.outputs.values()), feeds)]


def by_others(model: Any, given: list[np.ndarray]) -> list[np.ndarray]:
    """What onnxruntime makes of a model, or, where that has no kernel for bfloat16, ONNX's own evaluator."""
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    feeds = {f"i{n}": array for n, array in enumerate(given)}
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found: list[np.ndarray] = session.run(None, feeds)
    except Lacking:
        found = ReferenceEvaluator(model).run(None, feeds)
    return found


# ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@both
def test_weights_inputs_and_casts_are_of_the_models_dtype(half: str) -> None:
    w = np.array([[1, 2.5], [-3, 0.125]], HALVES[half])
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["z"], ["again"], to=helper.np_dtype_to_tensor_dtype(HALVES[half])),
    ]
    model = model_of(nodes, {"x": (half, (1, 2))}, ["y", "z", "again"], {"w": w})
    y, z, again = loaded(model, np.array([[2, 4]], HALVES[half]))
    assert (y.dtype, z.dtype, again.dtype) == (HALVES[half], np.float32, HALVES[half])
    assert z.tolist() == y.astype("float32").tolist() == again.astype("float32").tolist() == [[-10, 5.5]]


@both
def test_an_operator_of_several_ops_is_rounded_once(half: str) -> None:
    x = np.array([1000, 300, 1e-3, -2], HALVES[half])
    for op, judge in (("Asinh", np.arcsinh), ("Softsign", lambda x: x / (1 + np.abs(x)))):
        (found,) = loaded(model_of([helper.make_node(op, ["x"], ["y"])], {"x": (half, (4,))}, ["y"]), x)
        np.testing.assert_array_equal(found, judge(x.astype("float64")).astype(HALVES[half]))


@both
def test_what_is_normalised_has_its_own_dtype_whatever_its_statistics_are_of(half: str) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(HALVES[half])
    scale, offset, mean, variance = (np.float32([1.5, 0.5, 2]) + n for n in range(4))
    names = {"scale": scale, "offset": offset, "mean": mean, "variance": variance}
    node = helper.make_node("BatchNormalization", ["x", *names], ["y"], epsilon=1e-5)
    (found,) = loaded(model_of([node], {"x": (half, (2, 3, 4))}, ["y"], names), x)
    column = [value[:, None] for value in names.values()]
    wanted = (x.astype("float32") - column[2]) / np.sqrt(column[3] + 1e-5) * column[0] + column[1]
    assert found.dtype == HALVES[half]
    np.testing.assert_allclose(found.astype("float32"), wanted, rtol=SLACK[half], atol=SLACK[half])

    whole = {"scale": np.ones(4, HALVES[half])}
    node = helper.make_node("LayerNormalization", ["x", "scale"], ["y", "mean"])
    y, middle = loaded(model_of([node], {"x": (half, (2, 3, 4))}, ["y", "mean"], whole), x)
    assert (y.dtype, middle.dtype) == (HALVES[half], np.float32)


@both
def test_quotients_are_no_integers(half: str) -> None:
    x = np.array([1, 3, -7], HALVES[half])
    (found,) = loaded(model_of([helper.make_node("Div", ["x", "x2"], ["y"])], dict.fromkeys(("x", "x2"), (half, (3,))),
                               ["y"]), x, np.full(3, 2, HALVES[half]))  # fmt: skip
    assert found.astype("float32").tolist() == [0.5, 1.5, -3.5]


def test_shares_of_float16_are_whole_where_there_are_more_than_it_counts() -> None:
    many = 70_000
    (found,) = loaded(
        model_of([helper.make_node("Softmax", ["x"], ["y"])], {"x": ("float16", (1, many))}, ["y"]),
        np.zeros((1, many), np.float16),
    )
    np.testing.assert_array_equal(found, np.float16(1 / many))


@both
def test_weights_become_variables_that_are_trained_further(half: str) -> None:
    w = np.ones((2, 2), HALVES[half])
    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": (half, (1, 2))}, ["y"], {"w": w})
    with fr.Graph() as graph:
        found = fr.onnx.load(model, trainable=True)
        update = fr.optim.SGD(0.5).minimize(fr.sum(fr.astype(found.outputs["y"], "float32")))
    with fr.BlockingSession(graph) as session:
        session.run(update, {found.inputs["x"]: np.array([[1, 0.5]], HALVES[half])})
        moved = session.run(found.variables["w"])
    assert (moved.dtype, moved.astype("float32").tolist()) == (HALVES[half], [[0.5, 0.5], [0.75, 0.75]])


# ── written ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def saved(graph: fr.Graph, inputs: dict[str, fr.Tensor], outputs: dict[str, fr.Tensor]) -> Any:
    return written_model(SimpleNamespace(graph=graph, inputs=inputs, outputs=outputs), {})


@both
def test_a_model_comes_back_bit_by_bit(half: str, tmp_path: Path) -> None:
    bits = np.arange(0, 1 << 16, 7, dtype=np.uint16).view(HALVES[half])
    with fr.Graph() as graph:
        x = fr.placeholder(half, (None, 1), name="x")
        weights = fr.Variable(bits, name="weights")
        y = fr.where(fr.equal(x, x), weights, weights)
    with fr.BlockingSession(graph) as session:
        model = fr.serving.freeze(session, inputs={"x": x}, outputs={"y": y})
    for beside in (False, True):
        fr.onnx.save(tmp_path / "bits.onnx", model, weights_beside=beside)
        again = fr.onnx.load(tmp_path / "bits.onnx")
        with fr.BlockingSession(again.graph) as session:
            found = session.run(again.outputs["y"], {again.inputs["x"]: np.ones((2, 1), HALVES[half])})
        assert (found.dtype, again.inputs["x"].dtype) == (HALVES[half],) * 2
        np.testing.assert_array_equal(found.view(np.uint16)[1], bits.view(np.uint16))


def test_one_operator_is_written_as_it_is_and_several_in_float32() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float16", (2, 3), name="x")
        product = fr.matmul(x, np.ones((3, 2), np.float16))
        outputs = {"product": product, "precise": fr.expm1(product)}
    model = saved(graph, {"x": x}, outputs)
    ops = [node.op_type for node in model.graph.node]
    assert ops[:2] == ["MatMul", "Cast"]
    assert ops.count("Cast") == 2
    assert {t.data_type for t in model.graph.initializer if list(t.dims) == [3, 2]} == {TensorProto.FLOAT16}


def test_what_the_opset_has_not_of_bfloat16_is_written_in_float32_between_casts() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("bfloat16", (1, 4, 4, 2), name="x")
        y = fr.relu(fr.nn.conv2d(x, np.ones((3, 3, 2, 2), HALVES["bfloat16"])))
    ops = [node.op_type for node in saved(graph, {"x": x}, {"y": y}).graph.node]
    assert ops == ["Cast", "Transpose", "Conv", "Cast", "Relu", "Transpose", "Identity"]


def shown() -> Iterator[Example]:
    """The first example of each op that is written and takes float32."""
    seen = {*NEVER, "fused", "with_epilogue", "narrow_bfloat16", "narrow_float16", "loop"}
    seen.add("weighted")  # attention over a thousand keys, whose roundings add up
    for example in EXAMPLES:
        floats = any(a.dtype == np.float32 for a in example.arrays)
        if floats and example.reference is not None and example.op not in seen:
            seen.add(example.op)
            yield example


@both
@pytest.mark.timeout(300)
def test_what_is_written_is_what_is_computed_here(half: str) -> None:
    wrong: dict[str, Any] = {}
    compared = 0
    for example in shown():
        with np.errstate(all="ignore"):
            for want, got in answers(example, half):
                compared += 1
                size = np.abs(want[np.isfinite(want)]).max(initial=0) if want.dtype.kind == "f" else 0
                if not np.allclose(
                    got, want, rtol=SLACK[half], atol=SLACK[half] * min(size, 1) + LEAST[half], equal_nan=True
                ):
                    wrong[str(example)] = got, want
    assert wrong == {}
    assert compared > 100


def answers(example: Example, half: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What an example answers of floats of 16 bits here, and there; nothing where it is not written, as `test_saving`
    has it of float32."""
    given = [a.astype(HALVES[half]).astype(a.dtype) if a.dtype == np.float32 else a for a in example.arrays]
    with fr.Graph() as graph:
        inputs = [fr.placeholder(a.dtype, a.shape) for a in given]
        made = example.run(*(fr.astype(t, half) if t.dtype == np.float32 else t for t in inputs))
        made = list(made) if isinstance(made, (tuple, list)) else [made]
        outputs = [fr.astype(t, "float32") if t.dtype == HALVES[half] else t for t in made]
    try:
        model = saved(graph, {f"i{n}": t for n, t in enumerate(inputs)}, {f"o{n}": t for n, t in enumerate(outputs)})
    except fr.GraphError:
        return
    with fr.BlockingSession(graph) as session:
        wanted = session.run(outputs, dict(zip(inputs, given, strict=True)))
    yield from zip(wanted, by_others(model, given), strict=True)


def test_scaled_weights_of_a_file_keep_their_dtype() -> None:
    q = numpy_helper.from_array(np.array([-3, 5], np.int8), "q")
    node = helper.make_node("DequantizeLinear", ["q", "scale"], ["y"])
    model = model_of([node], {}, ["y"], {"scale": np.array(0.5, np.float16)})
    model.graph.initializer.append(q)
    (found,) = loaded(model)
    assert (found.dtype, found.tolist()) == (np.float16, [-1.5, 2.5])
