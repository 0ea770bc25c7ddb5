"""What `fr.onnx.save` writes, judged by onnxruntime, which knows nothing of flowrt."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest
from example import Example, bools, integers, normal
from onnx.reference import ReferenceEvaluator
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as Lacking
from op_examples import EXAMPLES

import flowrt as fr
from flowrt.onnx.saving import model_of
from flowrt.onnx.writing.writer import NEVER, WRITERS
from flowrt.op import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

BY_THE_RUNTIME = {
    "sum(float32[100003])-long": "it adds up in another order",
    "mean(float32[0])-empty": "its mean of nothing is 0",
    "matmul_int8(int8[2, 0],int8[3, 0])-no-terms": "its sums of nothing are what memory held",
    "lstm_steps(float32[2, 0, 3],float32[0, 2],float32[0, 2],float32[3, 8],float32[2, 8],float32[8])-2x0": "it crashes",
    "lstm_steps(float32[0, 2, 3],float32[2, 2],float32[2, 2],float32[3, 8],float32[2, 8],float32[8])-0x2": "it crashes",
}
"""Where onnxruntime does otherwise than ONNX says, or than others do."""
UNORDERED = ("max", "min", "argmax", "argmin", "sort", "argsort", "top_k", "max_pool2d")
"""Ops among whose inputs ONNX says no place for NaN."""
PARTLY = {"argsort", "sort", "place", "flat_indices"}
"""Ops some of whose examples are refused: of uint64, of steps, of sizes that only a step knows."""

ELSEWHERE = {"place"}
"""Ops none of whose examples is written, but which has a test of its own."""


def session_of(model: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    given = model if isinstance(model, str) else model.SerializeToString()
    return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])


def judged(model: Any, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """What onnxruntime makes of a model, or, where that has no kernel for its dtypes, ONNX's own evaluator."""
    onnx.checker.check_model(model, full_check=True)
    try:
        found: list[np.ndarray] = session_of(model).run(None, feeds)
    except Lacking:
        with np.errstate(all="ignore"):
            found = ReferenceEvaluator(model).run(None, dict(feeds))
    return found


def written(example: Example) -> tuple[Any, list[fr.Tensor]]:
    with fr.Graph() as graph:
        given = [fr.placeholder(array.dtype, array.shape) for array in example.arrays]
        made = example.run(*given)
    outputs = list(made) if isinstance(made, (tuple, list)) else [made]
    model = SimpleNamespace(
        graph=graph,
        inputs={f"i{n}": tensor for n, tensor in enumerate(given)},
        outputs={f"o{n}": tensor for n, tensor in enumerate(outputs)},
    )
    return model_of(model, {}), outputs


def _not_ordered(example: Example) -> bool:
    return example.op in UNORDERED and any(a.dtype.kind == "f" and np.isnan(a).any() for a in example.arrays)


def compared(example: Example, seen: set[str]) -> str:
    """How what is written of an example differs from its reference, if it does; ``seen`` are the ops that were."""
    model, outputs = written(example)
    seen |= {node.op.name for node in outputs[0].graph.nodes}
    found = judged(model, {f"i{n}": array for n, array in enumerate(example.arrays)})
    assert example.reference is not None
    with np.errstate(all="ignore"):
        wanted = example.reference(*example.arrays)
    for want, got, tensor in zip(
        wanted if isinstance(wanted, (tuple, list)) else [wanted], found, outputs, strict=False
    ):
        if got.dtype != tensor.dtype or not fr.Spec(tensor.dtype, tensor.spec.dims).accepts(got.dtype, got.shape):
            return f"{got.dtype}{got.shape} for {tensor.spec}"
        try:
            np.testing.assert_allclose(got, np.asarray(want).astype(tensor.dtype), rtol=1e-4, atol=1e-5)
        except AssertionError as error:
            return str(error)
    return ""


RUN = [
    example
    for example in EXAMPLES
    if example.reference is not None and str(example) not in BY_THE_RUNTIME and not _not_ordered(example)
]


def test_every_op_is_written_or_it_is_said_why_not() -> None:
    assert {*WRITERS, *NEVER} >= {name for name, op in REGISTRY.items() if op.__module__.startswith("flowrt.")}
    assert not set(WRITERS) & set(NEVER)


@pytest.mark.timeout(300)
def test_what_is_written_of_the_examples_of_ops_is_what_they_are() -> None:
    wrong: dict[str, str] = {}
    refused: set[str] = set()
    seen: set[str] = set()
    for example in RUN:
        try:
            differs = compared(example, seen)
        except fr.GraphError as error:
            refused |= {line.split()[0] for line in str(error).splitlines()[1:]}
            continue
        if differs:
            wrong[str(example)] = differs
    assert wrong == {}
    assert refused - set(NEVER) == PARTLY
    assert set(WRITERS) - seen == ELSEWHERE


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def frozen(build: Callable[[fr.Tensor], Any], shape: tuple[int | None, ...]) -> tuple[Any, Callable[[np.ndarray], Any]]:
    """A model that was built and frozen, and what it answers here."""
    with fr.Graph(seed=3) as graph:
        x = fr.placeholder("float32", shape, name="x")
        y = build(x)
    with fr.BlockingSession(graph) as session:
        model = fr.serving.freeze(session, inputs={"x": x}, outputs={"y": y})

    def here(array: np.ndarray) -> Any:
        with model:
            return model(x=array)["y"]

    return model, here


def weights(*shape: int) -> fr.Variable:
    return fr.Variable(fr.random.normal(shape, stddev=0.4))


def perceptron(x: fr.Tensor) -> Any:
    hidden = fr.nn.gelu(x @ weights(6, 16) + weights(16))
    return fr.nn.log_softmax(fr.relu(hidden @ weights(16, 8)) @ weights(8, 4) + weights(4))


def convolutional(x: fr.Tensor) -> Any:
    """Two layers with what stands between them, a way around the second, and a mean over places."""
    hidden = fr.nn.bias_add(fr.nn.conv2d(x, weights(3, 3, 3, 8), 2), weights(8))
    hidden, _, _ = fr.nn.batch_norm(hidden, weights(8), weights(8))
    hidden = fr.nn.max_pool2d(fr.relu(hidden), 2)
    around = fr.nn.conv2d(hidden, weights(3, 3, 2, 8), padding=((1, 1), (1, 1)), groups=4)
    return fr.mean(fr.relu(hidden + around), (1, 2)) @ weights(8, 5)


def recurrent(x: fr.Tensor) -> Any:
    state = fr.zeros((2, 5))
    outputs, h, c = fr.nn.lstm(x, state, state, weights(4, 20), weights(5, 20), weights(20))
    again, last = fr.nn.gru(outputs, h, weights(5, 15), weights(5, 15), weights(2, 15))
    return fr.concat([fr.reshape(again, (-1, 5)), last, c], 0)


def transformer(x: fr.Tensor) -> Any:
    """A block of attention and a perceptron, each beside the input that it adds to."""
    normed = fr.nn.layer_norm(x, weights(8), weights(8))
    q, k, v = (fr.transpose(fr.reshape(normed @ weights(8, 8), (2, 6, 2, 4)), (0, 2, 1, 3)) for _ in range(3))
    seen = fr.reshape(fr.transpose(fr.nn.attention(q, k, v, causal=True), (0, 2, 1, 3)), (2, 6, 8))
    x = x + seen @ weights(8, 8)
    return x + fr.nn.silu(fr.nn.layer_norm(x) @ weights(8, 32)) @ weights(32, 8)


def generator(x: fr.Tensor) -> Any:
    image = fr.relu(fr.nn.conv2d_transpose(x, weights(4, 4, 6, 3), 2))
    return fr.nn.conv2d_transpose(image, weights(3, 3, 2, 6), 2, "VALID", output_padding=1)


def looped(x: fr.Tensor) -> Any:
    """Newton's method until it has converged, then a choice."""
    root = fr.while_loop(
        lambda y, n: fr.logical_and(fr.max(fr.abs(y * y - x)) > 1e-4, n < 50),
        lambda y, n: ((y + x / y) / 2, n + 1),
        (fr.ones_like(x), 0),
    )
    return fr.cond(fr.sum(x) > 3, lambda: root[0] * 2 + fr.astype(root[1], "float32"), lambda: -root[0])


def backwards(x: fr.Tensor) -> Any:
    last, sums = fr.scan(lambda held, row: (held + row, held * row), fr.zeros((3,)), x, reverse=True)
    return fr.concat([sums, fr.expand_dims(last, 0)])


def in_integers(x: fr.Tensor) -> Any:
    rows, scale = fr.quantize.quantize(x, scale=0.05)
    columns, steps = fr.quantize.quantize(weights(6, 3), axis=-1)
    return fr.quantize.quantized_matmul(rows, columns, scale, steps)


MODELS: list[tuple[Callable[[fr.Tensor], Any], tuple[int | None, ...], tuple[int, ...]]] = [
    (perceptron, (None, 6), (5, 6)),
    (convolutional, (None, 16, 16, 3), (3, 16, 16, 3)),
    (recurrent, (7, 2, 4), (7, 2, 4)),
    (transformer, (2, 6, 8), (2, 6, 8)),
    (generator, (2, 4, 5, 3), (2, 4, 5, 3)),
    (looped, (4,), (4,)),
    (backwards, (None, 3), (5, 3)),
    (in_integers, (None, 6), (4, 6)),
]


@pytest.mark.parametrize(("build", "shape", "sizes"), MODELS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_model_is_to_the_runtime_what_it_is_here_and_comes_back_as_it_was(
    build: Callable[[fr.Tensor], Any], shape: tuple[int | None, ...], sizes: tuple[int, ...], tmp_path: Path
) -> None:
    model, here = frozen(build, shape)
    fr.onnx.save(tmp_path / "model.onnx", model)
    x = np.abs(normal(*sizes, seed=5))
    wanted = here(x)
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    (found,) = session_of(str(tmp_path / "model.onnx")).run(None, {"x": x})
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    back = fr.onnx.load(tmp_path / "model.onnx")
    with fr.BlockingSession(back.graph) as session:
        np.testing.assert_allclose(session.run(back.outputs["y"], {back.inputs["x"]: x}), wanted, rtol=1e-4, atol=1e-5)


def nodes_of(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(str(path)).graph.node]


def test_images_are_transposed_as_they_come_in_alone(tmp_path: Path) -> None:
    model, _ = frozen(convolutional, (None, 16, 16, 3))
    fr.onnx.save(tmp_path / "model.onnx", model)
    found = nodes_of(tmp_path / "model.onnx")
    assert found.count("Conv") == 2
    assert found.count("Transpose") == 1


def test_an_lstm_is_one_node(tmp_path: Path) -> None:
    model, _ = frozen(recurrent, (7, 2, 4))
    fr.onnx.save(tmp_path / "model.onnx", model)
    assert nodes_of(tmp_path / "model.onnx").count("LSTM") == 1
    assert nodes_of(tmp_path / "model.onnx").count("Loop") == 1


def test_names_metadata_and_open_sizes_are_kept(tmp_path: Path) -> None:
    model, _ = frozen(lambda x: fr.tanh(x, name="squashed"), (None, 3))
    fr.onnx.save(tmp_path / "model.onnx", model, metadata={"author": "someone"})
    found = onnx.load(str(tmp_path / "model.onnx"))
    assert [dim.dim_param or dim.dim_value for dim in found.graph.input[0].type.tensor_type.shape.dim] == ["x_0", 3]
    assert "squashed" in {node.name for node in found.graph.node}
    assert fr.onnx.load(tmp_path / "model.onnx").metadata == {"author": "someone"}


def test_large_weights_lie_beside_the_model(tmp_path: Path) -> None:
    model, here = frozen(lambda x: x @ weights(32, 32), (None, 32))
    for _ in range(2):  # what lay there is replaced
        fr.onnx.save(tmp_path / "model.onnx", model, weights_beside=True)
    assert (tmp_path / "model.onnx.data").stat().st_size == 32 * 32 * 4
    assert (tmp_path / "model.onnx").stat().st_size < 1000
    x = normal(2, 32)
    (found,) = session_of(str(tmp_path / "model.onnx")).run(None, {"x": x})
    np.testing.assert_allclose(found, here(x), rtol=1e-5)
    assert fr.onnx.load(tmp_path / "model.onnx").outputs["y"].shape == (None, 32)


def test_all_that_cannot_be_written_is_told_with_its_line(tmp_path: Path) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("uint64", (3,), name="x")
        y = fr.sort(x, name="ordered")
        z = fr.random.uniform((3,), name="drawn") + fr.astype(y, "float32")
    with pytest.raises(fr.GraphError) as error:
        fr.onnx.save(tmp_path / "model.onnx", SimpleNamespace(graph=graph, inputs={"x": x}, outputs={"z": z}))
    told = str(error.value)
    assert "sort 'ordered' (tests/onnx/test_saving.py:" in told
    assert "'drawn" in told
    assert "random numbers" in told
    assert not (tmp_path / "model.onnx").exists()


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    model, _ = frozen(fr.tanh, (None, 3))
    with pytest.raises(fr.GraphError, match="make the folder"):
        fr.onnx.save(tmp_path / "absent" / "model.onnx", model)


@pytest.mark.parametrize("beside", [False, True])
def test_a_disk_that_is_full_leaves_the_model_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    def run_out(path: Any, *more: Any) -> None:
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model, _ = frozen(lambda x: x @ weights(32, 32), (None, 32))
    fr.onnx.save(tmp_path / "model.onnx", model, weights_beside=beside)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    monkeypatch.setattr("pathlib.Path.write_bytes", run_out)
    monkeypatch.setattr(onnx, "save_model", lambda model, path, **told: run_out(path))
    with pytest.raises(fr.GraphError, match=r"model.onnx cannot be written: No space left"):
        fr.onnx.save(tmp_path / "model.onnx", model, weights_beside=beside)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_weights_are_not_put_beside_a_model_that_cannot_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(draft: Path, target: Path) -> Path:
        if target.name == "model.onnx":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return replace(draft, target)

    replace = type(tmp_path).replace
    (old, _), (new, _) = (frozen(lambda x, wide=wide: x @ weights(32, wide), (None, 32)) for wide in (32, 33))
    (tmp_path / "some").mkdir()
    fr.onnx.save(tmp_path / "some" / "model.onnx", old, weights_beside=True)
    for folder in (tmp_path / "some", tmp_path):
        before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        monkeypatch.setattr(type(tmp_path), "replace", fail)
        with pytest.raises(fr.GraphError, match=r"model.onnx cannot be written: Operation not permitted"):
            fr.onnx.save(folder / "model.onnx", new, weights_beside=True)
        assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before
    monkeypatch.undo()
    (tmp_path / "model.onnx").mkdir()
    with pytest.raises(fr.GraphError, match=r"model.onnx cannot be written: Is a directory"):
        fr.onnx.save(tmp_path / "model.onnx", new, weights_beside=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.onnx", "some"]


def test_an_input_that_is_an_output_is_written() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2,))
    model = model_of(SimpleNamespace(graph=graph, inputs={"x": x}, outputs={"y": x, "z": x}), {})
    found = judged(model, {"x": np.float32([1, 2])})
    np.testing.assert_array_equal(found, [[1, 2], [1, 2]])


def test_what_is_repeated_no_times_is_nothing_to_the_runtime() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2, 3))
    model = model_of(SimpleNamespace(graph=graph, inputs={"x": x}, outputs={"y": fr.tile(x, (1, 0))}), {})
    assert judged(model, {"x": normal(2, 3)})[0].shape == (2, 0)


def test_a_part_is_put_in_its_place() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2, 3))
        y = fr.place(x, (4, 2, 5), ((1, 3, None), 1, (None, 3, None)))
    model = model_of(SimpleNamespace(graph=graph, inputs={"x": x}, outputs={"y": y}), {})
    wanted = np.zeros((4, 2, 5), np.float32)
    wanted[1:3, 1, :3] = normal(2, 3)
    np.testing.assert_array_equal(judged(model, {"x": normal(2, 3)})[0], wanted)


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
def test_integers_are_divided_as_here(dtype: str) -> None:
    a, b = (integers(40, low=-9 if dtype[0] == "i" else 0, high=10, dtype=dtype, seed=n) for n in (0, 1))
    with fr.Graph() as graph:
        x, y = fr.placeholder(dtype, (40,)), fr.placeholder(dtype, (40,))
        outputs = {"quotient": x // y, "rest": x % y}
    model = model_of(SimpleNamespace(graph=graph, inputs={"x": x, "y": y}, outputs=outputs), {})
    for got, want in zip(judged(model, {"x": a, "y": b}), (fr.floor_divide(a, b), fr.remainder(a, b)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_bools_are_added_and_compared_as_here() -> None:
    a, b = bools(9), bools(9, seed=1)
    with fr.Graph() as graph:
        x, y = fr.placeholder("bool", (9,)), fr.placeholder("bool", (9,))
        outputs = {
            "sum": x + y,
            "product": x * y,
            "less": x < y,
            "all": fr.all(x),
            "largest": fr.max(x),
            "chosen": fr.where(x, y, ~y),
        }
    model = model_of(SimpleNamespace(graph=graph, inputs={"x": x, "y": y}, outputs=outputs), {})
    for got, want in zip(
        judged(model, {"x": a, "y": b}), (a | b, a & b, ~a & b, a.all(), a.max(), a == b), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_images_that_both_branches_read_are_turned_in_each() -> None:
    filters = np.random.default_rng(0).normal(size=(3, 3, 3, 2)).astype("float32")
    with fr.Graph() as graph:
        x, p = fr.placeholder("float32", (1, 4, 4, 3)), fr.placeholder("bool", ())
        y = fr.cond(p, lambda: fr.nn.conv2d(x, filters), lambda: fr.nn.conv2d(x, filters) * 2)
        outputs = {"y": y, "z": fr.nn.max_pool2d(x)}
    model = model_of(SimpleNamespace(graph=graph, inputs={"x": x, "p": p}, outputs=outputs), {})
    images = np.random.default_rng(1).normal(size=(1, 4, 4, 3)).astype("float32")
    for truth in (True, False):
        once = fr.nn.conv2d(images, filters) * (1 if truth else 2)
        found = judged(model, {"x": images, "p": np.array(truth)})
        for got, want in zip(found, (once, fr.nn.max_pool2d(images)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_an_output_that_bears_an_inputs_name_is_refused() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2,))
        with pytest.raises(fr.GraphError, match=r"\['x'\] are names of inputs and of outputs"):
            model_of(SimpleNamespace(graph=graph, inputs={"x": x}, outputs={"x": x * 2}), {})


@pytest.mark.parametrize("descending", [True, False])
def test_what_is_put_in_order_comes_back_whose_sizes_are_open(descending: bool, tmp_path: Path) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, None), name="x")
        outputs = {"sorted": fr.sort(x, 0, descending), "places": fr.argsort(x, None, descending)}
    with fr.BlockingSession(graph) as session:
        fr.onnx.save(tmp_path / "order.onnx", fr.serving.freeze(session, {"x": x}, outputs))
    loaded, given = fr.onnx.load(tmp_path / "order.onnx"), np.float32([[3, 1, 2], [0, 5, 1]])
    with fr.BlockingSession(loaded.graph) as session:
        found = session.run(loaded.outputs, {loaded.inputs["x"]: given})
    np.testing.assert_array_equal(found["sorted"], fr.sort(given, 0, descending))
    np.testing.assert_array_equal(found["places"], fr.argsort(given, None, descending))
