"""Index, linalg and nn ops beyond their examples: higher derivatives, failures, texts of errors, speed's promises."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import flowrt.ops as fr
from flowrt.base.errors import FlowrtError, SpecError
from flowrt.gradients import gradients
from flowrt.graph import Graph, Tensor, device
from flowrt.ops import conv, entropy, pooling
from flowrt.session import eager
from flowrt.session.session import Session

Array = np.ndarray[Any, Any]
FILTERS = np.random.default_rng(0).normal(size=(2, 2, 1, 2))
CLASSES = np.int32([3, 0, 1])


def run(fetch: Tensor, feeds: dict[Tensor, Array]) -> Array:
    values: dict[Any, Any] = dict(feeds)
    for node in fetch.graph.nodes:
        if not any(output in values for output in node.outputs) and all(t in values for t in node.inputs):
            outputs = eager.evaluate(node.op, [values[t] for t in node.inputs], node.attrs)
            values.update(zip(node.outputs, outputs, strict=True))
    found: Array = values[fetch]
    return found


def image(x: Any) -> Any:
    return fr.reshape(x, (1, 3, 4, 1))


HIGHER: list[tuple[str, Callable[[Any], Any]]] = [
    ("take", lambda x: fr.square(fr.take(x, [2, 0, 2]))),
    ("take_along_axis", lambda x: fr.square(fr.take_along_axis(x, [[2, 0, 2]], 1)) * x[:, :1]),
    ("matmul", lambda x: fr.matmul(x, fr.matmul(x, x, transpose_a=True), transpose_b=True)),
    ("matmul of vectors", lambda x: fr.matmul(x, x[0] * x[1])),
    ("conv2d", lambda x: fr.square(fr.nn.conv2d(image(x), FILTERS, padding="SAME"))),
    ("conv2d of itself", lambda x: fr.nn.conv2d(image(x), fr.reshape(x[:2, :2], (2, 2, 1, 1)), 2, ((1, 0), (0, 1)))),
    ("max_pool2d", lambda x: fr.square(fr.nn.max_pool2d(image(x), 2, 1))),
    ("max_pool2d_pick", lambda x: fr.square(pooling.max_pool2d_pick(image(np.arange(12.0)), image(x)))),
    ("avg_pool2d", lambda x: fr.square(fr.nn.avg_pool2d(image(x), 2, 1, "SAME"))),
    ("batch_norm", lambda x: fr.square(fr.nn.batch_norm(x, x[0], x[1], axis=0)[0])),
    ("sigmoid_cross_entropy", lambda x: fr.nn.sigmoid_cross_entropy(x, x * x)),
    ("softmax", fr.nn.softmax),
    ("log_softmax", lambda x: fr.square(fr.nn.log_softmax(x, axis=0))),
    ("class_cross_entropy", lambda x: fr.square(fr.nn.softmax_cross_entropy(x, CLASSES))),
    ("cross_entropy", lambda x: fr.nn.softmax_cross_entropy(x, x * x)),
]


@pytest.mark.parametrize(("name", "function"), HIGHER, ids=[name for name, _ in HIGHER])
def test_gradients_of_gradients_are_finite_differences(name: str, function: Callable[[Any], Any]) -> None:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    point, direction, weight = (rng.uniform(0.5, 1.5, size=(3, 4)) for _ in range(3))
    with Graph():
        x = fr.placeholder("float64", (3, 4))
        first = gradients(function(x), x)[0]
        second = gradients(first, x, [weight])[0]
    analytic = float(np.sum(run(second, {x: point}) * direction))

    def slope(step: float) -> float:
        return float(np.sum(run(first, {x: point + step * direction}) * weight))

    assert analytic == pytest.approx((slope(1e-6) - slope(-1e-6)) / 2e-6, rel=1e-6, abs=1e-7)


X = np.ones((2, 3), np.float32)
IMAGES = np.ones((2, 5, 5, 4), np.float32)

MISFITS: list[tuple[str, Callable[[], Any], str]] = [
    ("matmul", lambda: fr.matmul(X, X), "cannot multiply float32[2,3] by float32[2,3]; transpose_b=True would fit"),
    ("matmul left", lambda: fr.matmul(X, X[:, :2].T.copy().T[:, :1]), "transpose_a=True would fit"),
    ("matmul undo", lambda: fr.matmul(X, X.T, transpose_b=True), "transpose_b=False would fit"),
    ("matmul never", lambda: fr.matmul(X, np.ones((7, 8), np.float32)), "as long as the second last"),
    ("matmul scalar", lambda: fr.matmul(X, 2.0), "use multiply for scalars"),
    ("matmul bools", lambda: fr.matmul(X > 0, X > 0), "use astype"),
    ("matmul vector", lambda: fr.matmul(X[0], X, transpose_a=True), "cannot transpose a vector"),
    ("matmul batches", lambda: fr.matmul(np.ones((2, 1, 3)), np.ones((3, 3, 1))), "do not broadcast"),
    ("take floats", lambda: fr.take(X, [0.5]), "indices must be integers"),
    ("take scalar", lambda: fr.take(1.0, [0]), "no axis"),
    ("take axis", lambda: fr.take(X, [0], axis=2), "axis 2 is not among the 2 axes"),
    ("take of none", lambda: fr.take(X[:0], [0]), "which is empty"),
    ("scatter", lambda: fr.scatter_add(X, [0], (4, 3)), "must be float32[1,3], got float32[2,3]"),
    ("along", lambda: fr.take_along_axis(X, [0, 1]), "indices of float32[2,3] must have 2 axes, too, got int64[2]"),
    ("beside", lambda: fr.take_along_axis(X, [[0]] * 3), "float32[2,3] and indices int64[3,1] must have equal sizes"),
    ("of none", lambda: fr.take_along_axis(X[:, :0], [[0]]), "nothing can be taken from axis -1 of float32[2,0]"),
    ("axes", lambda: fr.take_along_axis(X, [[0]], (0, 1)), "axis is an integer"),
    ("nd", lambda: fr.gather_nd(X, [[0, 1, 2]]), "indices int64[1,3] name 3 axes, of float32[2,3], which has 2"),
    ("of no axis", lambda: fr.gather_nd(X[:0], [[0, 1]]), "nothing can be taken from axes of sizes (0, 3)"),
    ("updates", lambda: fr.scatter_nd([[0], [1]], X[0], (2, 3)), "must be float32[2,3], got float32[3]"),
    ("depth", lambda: fr.one_hot([1], -1), "depth must be an integer from 0 up"),
    ("conv rank", lambda: fr.nn.conv2d(X, X), "4 axes (batch, height, width, channels), got float32[2,3]"),
    ("conv channels", lambda: fr.nn.conv2d(IMAGES, IMAGES[:1, :1]), "cannot convolve"),
    ("conv groups", lambda: fr.nn.conv2d(IMAGES, np.ones((1, 1, 2, 3), "f"), groups=2), "do not divide"),
    ("conv ints", lambda: fr.nn.conv2d(IMAGES.astype(int), np.ones((1, 1, 4, 1), int)), "must be floating"),
    ("conv padding", lambda: fr.nn.conv2d(IMAGES, np.ones((1, 1, 4, 1), "f"), padding="same"), 'must be "SAME"'),
    ("conv edges", lambda: fr.nn.conv2d(IMAGES, np.ones((1, 1, 4, 1), "f"), padding=(1, 2)), "(before, after)"),
    ("conv window", lambda: fr.nn.conv2d(IMAGES, np.ones((6, 1, 4, 1), "f"), padding="VALID"), "spans 6 does not fit"),
    ("conv strides", lambda: fr.nn.conv2d(IMAGES, np.ones((1, 1, 4, 1), "f"), strides=0), "positive integer"),
    ("pool rank", lambda: fr.nn.max_pool2d(X), "4 axes"),
    ("pool window", lambda: fr.nn.max_pool2d(IMAGES, 9), "spans 9 does not fit"),
    ("pool edges", lambda: fr.nn.max_pool2d(IMAGES, 2, padding=((2, 0), (0, 0))), "smaller than the window"),
    ("avg edges", lambda: fr.nn.avg_pool2d(IMAGES, 2, padding=((2, 0), (0, 0))), "smaller than the window"),
    ("bias", lambda: fr.nn.bias_add(X, np.ones(2, "f")), "a vector of its last axis, got float32[2]"),
    ("scale", lambda: fr.nn.batch_norm(X, np.ones(2, "f"), axis=0), "do not broadcast"),
    ("dropout", lambda: fr.nn.dropout(X, 1.0), "from 0 up to 1"),
    ("dropout of ints", lambda: fr.nn.dropout([1], 0.5), "must be floating"),
    ("no table", lambda: fr.nn.embedding_lookup([], [0]), "at least one table"),
    ("ids", lambda: fr.nn.embedding_lookup(X, [0.5]), "ids must be integers"),
    ("probabilities", lambda: fr.nn.sigmoid_cross_entropy(np.int32([1]), X), "logits must be floating"),
    ("softmax axis", lambda: fr.nn.softmax(X, axis=2), "axis 2 is not among"),
    ("softmax axes", lambda: fr.nn.softmax(X, axis=(0, 1)), "axis is an integer, got (0, 1)"),
    ("labels", lambda: fr.nn.softmax_cross_entropy(X, np.int32([1, 2, 0])), "labels of float32[2,3] must be int32[2]"),
    ("weights", lambda: fr.nn.softmax_cross_entropy(X, X[:, :2]), "must have the same shape"),
    ("logits", lambda: fr.nn.softmax_cross_entropy(np.int32([[1]]), np.int32([0])), "logits must be floating"),
]


@pytest.mark.parametrize(("build", "message"), [m[1:] for m in MISFITS], ids=[m[0] for m in MISFITS])
def test_what_does_not_fit_says_so_with_the_users_line(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)) as caught:
        build()
    assert "test_nn.py:" in str(caught.value)


TURNS = [
    ((2, 1, 3), (1, 4, 1)),
    ((2, 1, 3, 1, 2, 1), (1, 4, 1, 2, 1, 3)),
    ((2, 3, 2), (1, 3, 1)),
    ((3, 1, 0), (1, 2, 1)),
]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize(("left", "right"), TURNS)
@pytest.mark.parametrize(("m", "k", "n"), [(3, 4, 5), (2, 3, 1), (1, 1, 1), (40, 33, 20), (2, 0, 3)])
def test_batches_broadcast_in_turns(
    left: tuple[int, ...], right: tuple[int, ...], m: int, k: int, n: int, dtype: str
) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 9, size=shape).astype(dtype) for shape in ((*left, m, k), (*right, k, n)))
    np.testing.assert_array_equal(fr.matmul(a, b), a @ b)
    np.testing.assert_array_equal(fr.matmul(a.swapaxes(-1, -2), b.swapaxes(-1, -2), True, True), a @ b)


@pytest.mark.parametrize("indices", [[2], [-3], [0, 1, 99]])
def test_an_index_out_of_range_fails_the_step(indices: Sequence[int]) -> None:
    with pytest.raises(FlowrtError, match="an index is out of range"):
        fr.take(X, indices)
    with pytest.raises(FlowrtError, match="an index is out of range"):
        fr.scatter_add(np.ones((len(indices), 3), "f"), indices, (2, 3))


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_that_is_no_class_fails_the_step(label: int) -> None:
    labels = np.int64([0, label])
    for op, also in ((fr.nn.softmax_cross_entropy, ()), (entropy.class_cross_entropy_slope, (X[:, 0],))):
        with pytest.raises(FlowrtError, match="a label is not among the classes"):
            op(X, labels, *also)


def test_open_shapes_are_taken_and_what_is_known_is_inferred() -> None:
    with Graph():
        any_rank, rows = fr.placeholder("float32"), fr.placeholder("float32", (None, 4))
        images = fr.placeholder("float32", (None, None, 8, 3))
        weights = fr.placeholder("float32", (3, 3, 3, 5))
        for y in (any_rank @ rows, fr.take(any_rank, [1]), fr.nn.softmax(any_rank)):
            assert y.spec.dims is None
        assert (rows @ fr.placeholder("float32", (4, None))).shape == (None, None)
        assert fr.nn.conv2d(images, weights, (1, 2)).shape == (None, None, 4, 5)
        assert fr.nn.conv2d(any_rank, weights).shape == (None, None, None, 5)
        assert fr.nn.max_pool2d(images).shape == (None, None, 4, 3)
        labels = fr.placeholder("int32", (6,))
        assert fr.nn.softmax_cross_entropy(rows, labels).shape == (6,)
        assert fr.nn.softmax_cross_entropy(rows, labels).op.op.name == "class_cross_entropy"
        assert fr.nn.cross_entropy(rows, labels, name="loss").name == "loss:0"
        assert fr.nn.softmax_cross_entropy(any_rank, labels).shape == (6,)


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
async def test_dropout_drops_anew_at_every_step_and_its_gradient_follows(as_tensor: bool) -> None:
    with Graph() as graph:
        x = fr.constant(np.full((100, 100), 3.0, np.float32))
        y = fr.nn.dropout(x, fr.constant(0.25) if as_tensor else 0.25, seed=7)
        slope = gradients(y, x)[0]
    async with Session(graph) as session:
        first, along = await session.run([y, slope])
        second = await session.run(y)
    assert set(np.unique(first)) == {np.float32(0), np.float32(4)}
    assert np.mean(first == 0) == pytest.approx(0.25, abs=0.03)
    np.testing.assert_allclose(along, first / 3, rtol=1e-6)
    assert np.mean(first != second) == pytest.approx(2 * 0.25 * 0.75, abs=0.03)


def test_nothing_is_dropped_at_rate_0() -> None:
    np.testing.assert_array_equal(fr.nn.dropout(X, 0), X)


def test_rows_of_shards_are_read_where_the_shards_are() -> None:
    with Graph():
        with device("/job:ps/task:0"):
            first = fr.Variable(X, name="first")
        with device("/job:ps/task:1"):
            second = fr.Variable(X, name="second")
        with device("/job:worker/task:0"):
            found = fr.nn.embedding_lookup([first, second], [3, 0])
    taken = [node for node in found.graph.nodes if node.op.name == "take"]
    assert [[other.name for other in node.colocate] for node in taken] == [["first/value"], ["second/value"]]
    assert {str(node.device) for node in taken} == {""}  # not the worker's


def test_an_id_beyond_its_shard_fails_the_step() -> None:
    with pytest.raises(FlowrtError, match="an index is out of range"):
        fr.nn.embedding_lookup([X, X], [4])


async def test_gelu_has_slopes_far_out() -> None:
    with Graph() as graph:
        x = fr.placeholder("float32", (4,))
        made = []
        for approximate in (False, True):
            (slope,) = gradients(fr.gelu(x, approximate), [x])
            made += [slope, gradients(slope, [x])[0]]
    async with Session(graph) as session:
        found = await session.run(made, {x: np.array([-np.inf, -1e30, 1e30, np.inf], "float32")})
    np.testing.assert_array_equal(found, [[0, 0, 1, 1], [0, 0, 0, 0]] * 2)


def test_a_loss_of_huge_logits_is_exact() -> None:
    logits = np.float32([[1e30, -1e30], [0, 700]])
    found = fr.nn.softmax_cross_entropy(logits, np.int32([0, 0]))
    np.testing.assert_array_equal(found, np.float32([0, 700]))


def test_many_images_are_convolved_in_several_runs_of_patches() -> None:
    """More than the scratch holds at a time: the batch is gathered in parts, the last one smaller."""
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(11, 30, 30, 8)), rng.normal(size=(3, 3, 8, 2))
    whole = fr.nn.conv2d(x, w)
    apart = np.concatenate([fr.nn.conv2d(x[i : i + 1], w) for i in range(11)])
    np.testing.assert_allclose(whole, apart, rtol=1e-12)
    dy = rng.normal(size=whole.shape)
    dx, dw = conv.conv2d_input_grad(dy, w, x.shape), conv.conv2d_filter_grad(x, dy, w.shape)
    assert np.sum(whole * dy) == pytest.approx(np.sum(dx * x))
    assert np.sum(whole * dy) == pytest.approx(np.sum(dw * w))
