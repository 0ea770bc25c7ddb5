"""Attention beyond what `op_examples` shows: masks, blocks, what gradients keep, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from op_examples_layers import attended

import flowrt as fr
from flowrt.base.errors import SpecError
from flowrt.ops import attention

FAR = -np.inf


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def operands(queries: int, keys: int, dtype: str = "float32", heads: int = 2) -> list[np.ndarray]:
    sizes = (2, heads, queries, 4), (2, heads, keys, 4), (2, heads, keys, 3)
    return [normal(*size, seed=seed, dtype=dtype) for seed, size in enumerate(sizes)]


def by_time(queries: int, keys: int) -> np.ndarray:
    return np.where(np.tri(queries, keys, dtype=bool), 0.0, FAR)


SIZES = [(1, 1), (1, 9), (7, 5), (5, 7), (128, 128), (129, 300), (300, 129), (260, 260)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_each_query_sees_the_keys_up_to_its_own_place_where_it_is_causal(queries: int, keys: int, dtype: str) -> None:
    given = operands(queries, keys, dtype)
    margin = 2e-6 if dtype == "float32" else 1e-13
    found = fr.nn.attention(*given, causal=True)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, attended(*given, by_time(queries, keys)), rtol=margin, atol=margin)
    np.testing.assert_allclose(fr.nn.attention(*given), attended(*given), rtol=margin, atol=margin)


def masks(queries: int, keys: int) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = [(keys,), (1, keys), (queries, 1), (queries, keys), (2, 1, 1, keys), (2, 2, queries, keys), (2, 1, 1, 1)]
    some = [rng.random(shape) < 0.6 for shape in shapes]
    return [*some, *(np.where(mask, rng.normal(size=mask.shape), FAR).astype("float32") for mask in some)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(6, 5), (140, 300)])
def test_a_query_that_may_see_nothing_is_answered_with_zeros(queries: int, keys: int, causal: bool) -> None:
    given = operands(queries, keys)
    blind = 0
    for mask in masks(queries, keys):
        added = np.where(mask, 0.0, FAR) if mask.dtype == bool else mask
        added = np.broadcast_to(added + (by_time(queries, keys) if causal else 0.0), (2, 2, queries, keys))
        blind += (added == FAR).all(-1).sum()
        want = attended(*given, added)
        np.testing.assert_allclose(fr.nn.attention(*given, mask, causal=causal), want, rtol=3e-6, atol=3e-6)
    assert blind


def test_examples_of_keys_and_of_the_mask_may_be_more_than_those_of_queries() -> None:
    q, k, v = operands(3, 4)
    mask = np.random.default_rng(1).random((2, 1, 3, 4)) < 0.8
    want = fr.nn.attention(np.stack([q[0], q[0]]), k, v, mask)
    for first in (q[:1], q[0]):
        np.testing.assert_allclose(fr.nn.attention(first, k, v, mask), want, rtol=2e-6, atol=2e-6)


def composed(q: Any, k: Any, v: Any, mask: Any, causal: bool) -> Any:
    """The same of single ops, for masks that leave each query something to see."""
    scores = fr.matmul(q, k, transpose_b=True) * 0.5 + (0.0 if mask is None else mask)
    if causal:
        scores = scores + np.maximum(by_time(q.shape[-2], k.shape[-2]), -1e30).astype(q.dtype)
    return fr.matmul(fr.nn.softmax(scores), v)


@pytest.mark.parametrize("kept", [0, 1 << 20], ids=["again", "kept"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(5, 7), (130, 300), (300, 130)], ids=str)
async def test_gradients_are_those_of_the_single_ops(
    sizes: tuple[int, int], causal: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "KEPT", kept)
    given = [*operands(*sizes, "float64"), normal(2, 1, 1, sizes[1], seed=8, dtype="float64")]
    weight = normal(2, 2, sizes[0], 3, seed=9, dtype="float64")
    found = []
    with fr.Graph() as graph:
        inputs = [fr.placeholder("float64", a.shape) for a in given]
        for layer in (lambda *x: fr.nn.attention(*x, causal=causal), lambda *x: composed(*x, causal)):
            y = layer(*inputs)
            first = fr.gradients(fr.sum(y * weight), inputs)
            second = fr.gradients(fr.add_n([fr.sum(fr.square(slope)) for slope in first]), inputs)
            found.append([y, *first, *second])
    async with fr.Session(graph) as session:
        mine, judge = await session.run(found, dict(zip(inputs, given, strict=True)))
    for got, want in zip(mine, judge, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kept", [0, 1 << 20], ids=["again", "kept"])
@pytest.mark.parametrize("kind", ["bool", "float32"])
async def test_what_sees_nothing_has_no_gradient(kind: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "KEPT", kept)
    given = operands(130, 257)
    shown = np.ones((130, 257), bool)
    shown[3], shown[:, 5] = False, False
    mask = shown if kind == "bool" else np.where(shown, np.float32(0.5), np.float32(FAR))
    with fr.Graph() as graph:
        inputs = [fr.placeholder("float32", a.shape) for a in given]
        y = fr.nn.attention(*inputs, mask)
        slopes = fr.gradients(fr.sum(fr.square(y + 1.0)), inputs)
    async with fr.Session(graph) as session:
        dq, dk, dv = await session.run(slopes, dict(zip(inputs, given, strict=True)))
    for slope in (dq, dk, dv):
        assert np.isfinite(slope).all()
    assert not dq[:, :, 3].any()
    assert not dk[:, :, 5].any()
    assert not dv[:, :, 5].any()
    assert dq[:, :, 2].all()


def in_heads(x: np.ndarray) -> np.ndarray:
    return np.repeat(x, 3, axis=1)


@pytest.mark.parametrize("heads", [2, 1])
@pytest.mark.parametrize("causal", [False, True])
async def test_heads_of_queries_share_those_of_keys(heads: int, causal: bool) -> None:
    q, (_, k, v) = normal(2, 3 * heads, 6, 4, seed=4), operands(6, 6, heads=heads)
    rng = np.random.default_rng(5)
    for mask in (
        None,
        rng.random((6, 6)) < 0.9,
        rng.random((2, 1, 1, 6)) < 0.9,
        rng.random((2, 3 * heads, 6, 6)) < 0.9,
    ):
        want = fr.nn.attention(q, in_heads(k), in_heads(v), mask, causal=causal)
        np.testing.assert_allclose(fr.nn.attention(q, k, v, mask, causal=causal), want, rtol=2e-6, atol=2e-6)
    with fr.Graph() as graph:
        shared = [fr.placeholder("float32", (None, *a.shape[1:2], None, a.shape[-1])) for a in (q, k, v)]
        slopes = fr.gradients(fr.sum(fr.square(fr.nn.attention(*shared, causal=causal))), shared)
        apart = [fr.placeholder("float32", a.shape) for a in (q, in_heads(k), in_heads(v))]
        judges = fr.gradients(fr.sum(fr.square(fr.nn.attention(*apart, causal=causal))), apart)
    async with fr.Session(graph) as session:
        feeds = zip([*shared, *apart], [q, k, v, q, in_heads(k), in_heads(v)], strict=True)
        (dq, dk, dv), (want_q, want_k, want_v) = await session.run([slopes, judges], dict(feeds))
    np.testing.assert_allclose(dq, want_q, rtol=1e-5, atol=1e-6)
    for slope, want in ((dk, want_k), (dv, want_v)):
        np.testing.assert_allclose(slope, want.reshape(2, heads, 3, 6, -1).sum(2), rtol=1e-5, atol=1e-5)


async def test_sizes_that_only_a_step_knows_are_taken() -> None:
    given = operands(150, 270)
    mask = np.random.default_rng(6).random((150, 270)) < 0.5
    with fr.Graph() as graph:
        inputs = [fr.placeholder("float32", (None,) * 4) for _ in given]
        anything = [fr.placeholder("float32") for _ in given]
        shown = fr.placeholder("bool", (None, None))
        answers = [fr.nn.attention(*x, shown, causal=True) for x in (inputs, anything)]
        slopes = fr.gradients(fr.sum(answers[0]), inputs)
    async with fr.Session(graph) as session:
        feeds = {**dict(zip([*inputs, *anything], given * 2, strict=True)), shown: mask}
        found, (dq, _, _) = await session.run([answers, slopes], feeds)
    for y in found:
        np.testing.assert_allclose(y, fr.nn.attention(*given, mask, causal=True), rtol=2e-6, atol=2e-6)
    assert np.isfinite(dq).all()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
async def test_mixed_precision_rounds_what_is_computed_again_as_it_was(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = operands(140, 280)
    found = []
    with fr.Graph() as graph:
        inputs = [fr.placeholder("float32", a.shape) for a in given]
        for kept in (0, 1 << 20):
            monkeypatch.setattr(attention, "KEPT", kept)
            with fr.mixed_precision(precision):
                y = fr.nn.attention(*inputs, causal=True)
            found.append([y, *fr.gradients(fr.sum(fr.square(y)), inputs)])
    async with fr.Session(graph) as session:
        again, stored = await session.run(found, dict(zip(inputs, given, strict=True)))
    whole = fr.nn.attention(*given, causal=True)
    assert 1e-5 < np.abs(again[0] - whole).max() < 3e-2
    for got, want in zip(again, stored, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


async def test_what_gradients_keep_of_many_keys_grows_with_time_and_not_its_square() -> None:
    peaks = []
    for length in (2048, 4096):
        with fr.Graph() as graph:
            x = fr.placeholder("float32", (1, 1, length, 8))
            y = x
            for _ in range(4):
                y = fr.nn.attention(y, y, y, causal=True)
            slope = fr.gradients(fr.sum(fr.square(y)), x)
        async with fr.Session(graph, options=fr.Options(threads=1)) as session:
            peaks.append((await session.explain(slope)).peak_bytes)
    weights = 4 * 4096**2 * 4 / 2
    assert peaks[1] < weights / 4  # of all four layers, were they kept
    assert peaks[1] - peaks[0] < weights / 8


async def test_it_is_differentiated_in_bodies() -> None:
    rows = normal(3, 2, 5, 4)
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 2, 5, 4))
        mapped = fr.map_fn(lambda row: fr.nn.attention(row, row, row, causal=True), x)
        found = [mapped, *fr.gradients(fr.sum(fr.square(mapped)), [x])]
        at_once = fr.nn.attention(x, x, x, causal=True)
        judge = [at_once, *fr.gradients(fr.sum(fr.square(at_once)), [x])]
    async with fr.Session(graph) as session:
        mine, wanted = await session.run([found, judge], {x: rows})
    for got, want in zip(mine, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


async def test_a_graph_that_came_back_computes_it_again() -> None:
    x = normal(1, 130, 2)
    with fr.Graph() as graph:
        rows = fr.placeholder("float32", (1, attention.KEPT + 1, 2))
        y = fr.nn.attention(fr.placeholder("float32", x.shape), rows, rows)
    back = fr.Graph.from_bytes(graph.to_bytes())
    found = []
    for each in (graph, back):
        with each:
            tensor = each.nodes[y.op.index].outputs[0]
            inputs = [node.outputs[0] for node in each.nodes if node.op.name == "placeholder"]
            slopes = fr.gradients(fr.sum(tensor), inputs)
        async with fr.Session(each) as session:
            found.append(await session.run(slopes, dict(zip(inputs, [normal(1, 1025, 2), x], strict=True))))
    assert y.op.op.name == "weighted"
    for got, want in zip(*found, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("empty", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_no_queries_and_no_keys_are_taken(empty: tuple[int, int], causal: bool) -> None:
    given = operands(*empty)
    mask = np.ones((1, empty[1]), bool)
    for found in (fr.nn.attention(*given, causal=causal), fr.nn.attention(*given, mask, causal=causal)):
        np.testing.assert_array_equal(found, np.zeros((2, 2, empty[0], 3), "float32"))


def test_a_scale_may_be_a_number_or_learned() -> None:
    q, k, v = operands(5, 6)
    want = fr.nn.attention(q * np.float32(0.6), k, v)
    np.testing.assert_allclose(fr.nn.attention(q, k, v, scale=0.3), want, rtol=2e-6, atol=2e-6)
    with fr.Graph() as graph:
        scale = fr.Variable(np.float32(0.3))
        y = fr.nn.attention(*(fr.constant(x) for x in (q, k, v)), scale=scale)
        slope = fr.gradients(fr.sum(fr.square(y)), scale)
    with fr.BlockingSession(graph) as session:
        found, (d,) = session.run([y, slope])
    np.testing.assert_allclose(found, want, rtol=2e-6, atol=2e-6)
    near = [np.square(fr.nn.attention(q, k, v, scale=0.3 + step), dtype="float64").sum() for step in (-1e-3, 1e-3)]
    np.testing.assert_allclose(d, (near[1] - near[0]) / 2e-3, rtol=1e-2)


Q, K, V = operands(5, 6)
MISFITS: list[tuple[Callable[[], Any], str]] = [
    (lambda: fr.nn.attention(Q.astype("int32"), K, V), r"q must be floating, got int32\[2,2,5,4\]; use astype"),
    (lambda: fr.nn.attention(Q, K, V[0, 0, 0]), r"v must be \[\.\.\., time, depth\], got float32\[3\]"),
    (lambda: fr.nn.attention(Q, V, V), "q and k must have the same depth, got"),
    (lambda: fr.nn.attention(Q, K, V[:, :, 1:]), "k and v must have as many keys, got"),
    (lambda: fr.nn.attention(Q, K, V, np.ones(6, "int32")), "mask must be bools or floats, got int32"),
    (lambda: fr.nn.attention(Q, K, V, np.ones((6, 5), bool)), r"mask must broadcast to float32\[2,2,5,6\]"),
    (lambda: fr.nn.attention(Q, K, V, np.ones((3, 5, 6), bool)), r"missing: mask\[:, None\]"),
    (lambda: fr.nn.attention(Q, np.repeat(K, 2, 1)[:, :3], V), "2 heads of queries cannot share 3 of keys evenly"),
    (lambda: fr.nn.attention(Q, K, V, is_causal=True), "write causal="),
    (lambda: fr.nn.attention(Q, K, V, attn_mask=np.ones((5, 6), bool)), "write mask="),
]


@pytest.mark.parametrize(("call", "message"), MISFITS, ids=[m[1][:20] for m in MISFITS])
def test_what_does_not_fit_says_so(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=rf"attention.*test_attention\.py:\d+.*{message}"):
        call()
