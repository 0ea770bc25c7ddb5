"""Softmax over very many classes by candidates, and how these are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import SpecError
from flowrt.train.gathers import find_gathers
from flowrt.train.updates import parts_of

CLASSES, WIDTH, COUNT = 600, 4, 12


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


TABLE, OFFSETS, INPUTS = normal(CLASSES, WIDTH), normal(CLASSES, seed=1), normal(5, WIDTH, seed=2)
LABELS = np.int32([0, 3, 599, 3, 40])


def share(c: Any) -> Any:
    return np.log((c + 2) / (c + 1)) / np.log(CLASSES + 1)


def losses(table: np.ndarray, offsets: Any, labels: np.ndarray, x: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """By the formula, example by example."""
    found = []
    for row, label in zip(x.astype("float64"), labels, strict=True):
        logits = table @ row + offsets
        others = [np.exp(logits[c]) / (len(sampled) * share(c)) for c in sampled if c != label]
        found.append(np.log(np.exp(logits[label]) + sum(others)) - logits[label])
    return np.array(found)


def test_classes_are_drawn_as_often_as_they_are_to_be() -> None:
    drawn = fr.random.log_uniform((400, 500), CLASSES, seed=1)
    assert (drawn.dtype, drawn.shape, drawn.min()) == (np.int64, (400, 500), 0)
    often = np.bincount(drawn.ravel(), minlength=CLASSES)
    wanted = share(np.arange(CLASSES)) * drawn.size
    assert len(often) == CLASSES
    assert ((often - wanted) ** 2 / wanted).sum() < CLASSES + 5 * np.sqrt(2 * CLASSES)
    assert not fr.random.log_uniform((50,), 1, seed=1).any()


@pytest.mark.parametrize("offsets", [OFFSETS, None], ids=["biases", "none"])
async def test_losses_and_gradients_are_those_of_the_formula(offsets: Any) -> None:
    sampled = fr.random.log_uniform((COUNT,), CLASSES, seed=3)
    sampled[0] = LABELS[1]  # which is nobody else's own
    want = losses(TABLE, 0 if offsets is None else offsets, LABELS, INPUTS, sampled)
    with fr.Graph() as graph:
        x, labels = fr.placeholder("float32", (None, WIDTH)), fr.placeholder("int32", (None,))
        given = fr.placeholder("int64", (COUNT,))
        table, added = fr.Variable(TABLE), fr.Variable(OFFSETS)
        biases = None if offsets is None else added
        y = fr.nn.sampled_softmax(table, biases, labels, x, sampled=given)
        slopes = fr.gradients(fr.sum(y), [table, x] + [added] * (offsets is not None))
        dense = [fr.identity(slope) for slope in slopes]
    assert isinstance(slopes[0], fr.IndexedSlices)
    assert isinstance(slopes[-1], fr.IndexedSlices) or offsets is None
    async with fr.Session(graph) as session:
        found, (d_table, d_x, *_) = await session.run([y, dense], {x: INPUTS, labels: LABELS, given: sampled})
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fr.nn.sampled_softmax(TABLE, offsets, LABELS, INPUTS, sampled=sampled), found, rtol=1e-5)
    step = 1e-4
    for array, slope, at in ((TABLE, d_table, (3, 1)), (TABLE, d_table, (int(sampled[2]), 0)), (INPUTS, d_x, (4, 2))):
        near = []
        for side in (-step, step):
            moved = array.astype("float64")
            moved[at] += side
            table_now, x_now = (moved, INPUTS) if array is TABLE else (TABLE, moved)
            near.append(losses(table_now, 0 if offsets is None else offsets, LABELS, x_now, sampled).sum())
        np.testing.assert_allclose(slope[at], (near[1] - near[0]) / (2 * step), rtol=1e-3, atol=1e-4)
    assert set(np.flatnonzero(d_table.any(1))) <= {*LABELS.tolist(), *sampled.tolist()}


def test_with_many_candidates_it_comes_to_the_softmax_over_all_classes() -> None:
    want = fr.nn.softmax_cross_entropy(INPUTS @ TABLE.T + OFFSETS, LABELS)
    found = fr.nn.sampled_softmax(TABLE, OFFSETS, LABELS, INPUTS, 400_000, seed=5)
    np.testing.assert_allclose(found, want, atol=0.03)


def test_the_shards_of_a_table_are_the_table() -> None:
    split = [[whole[n::3] for n in range(3)] for whole in (TABLE, OFFSETS)]
    found = fr.nn.sampled_softmax(*split, LABELS, INPUTS, COUNT, seed=7)
    np.testing.assert_allclose(found, fr.nn.sampled_softmax(TABLE, OFFSETS, LABELS, INPUTS, COUNT, seed=7), rtol=1e-5)


async def test_candidates_are_new_at_every_step_and_examples_may_have_any_axes() -> None:
    with fr.Graph(seed=1) as graph:
        x = fr.placeholder("float32", (2, None, WIDTH))
        y = fr.nn.sampled_softmax(TABLE, OFFSETS, np.zeros((2, 3), "uint8"), x, COUNT)
        again = fr.nn.sampled_softmax(TABLE, OFFSETS, np.zeros((2, 3), "uint8"), x, COUNT)
    async with fr.Session(graph) as session:
        found = [await session.run([y, again], {x: normal(2, 3, WIDTH)}) for _ in range(2)]
    assert found[0][0].shape == (2, 3)
    assert len({float(one.sum()) for pair in found for one in pair}) == 4


@pytest.mark.parametrize("drawn", [False, True])
def test_rows_are_asked_of_servers_where_the_batch_has_the_candidates(drawn: bool) -> None:
    with fr.Graph():
        given = [
            fr.placeholder("float32", (5, WIDTH)),
            fr.placeholder("int64", (5,)),
            fr.placeholder("int64", (COUNT,)),
        ]
        table = fr.Variable(TABLE, name="table")
        how: dict[str, Any] = {"num_sampled": COUNT} if drawn else {"sampled": given[2]}
        loss = fr.mean(fr.nn.sampled_softmax(table, None, given[1], given[0], **how))
        outputs = [loss, *parts_of(fr.gradients(loss, [table]))]
    assert len(find_gathers(outputs, given, [table])) == (0 if drawn else 1)


INPUT_SPECS = {"x": fr.Spec("float32", (None, WIDTH)), "labels": fr.Spec("int64", (None,))}


@pytest.mark.parametrize("servers", [1, 2])
async def test_a_trainer_learns_what_the_formula_says(servers: int) -> None:
    def loss_fn(batch: dict[str, fr.Tensor]) -> fr.Tensor:
        table = fr.Variable(TABLE, name="table")
        return fr.mean(fr.nn.sampled_softmax(table, None, batch["labels"], batch["x"], sampled=batch["sampled"]))

    rng, table = np.random.default_rng(8), TABLE.astype("float64")
    batches = [
        {
            "x": normal(5, WIDTH, seed=n),
            "labels": rng.integers(0, CLASSES, 5),
            "sampled": rng.integers(0, CLASSES, COUNT),
        }
        for n in range(4)
    ]
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(
            loss_fn,
            INPUT_SPECS | {"sampled": fr.Spec("int64", (COUNT,))},
            fr.optim.SGD(0.5),
            1,
            servers=servers,
            server_device="",
            worker_device="",
        )
    async with fr.Session(graph) as session:
        reports = [report async for report in trainer.steps(session, batches)]
        (found,) = await session.run(trainer.variables)
    for report, batch in zip(reports, batches, strict=True):
        want = losses(table, 0, batch["labels"], batch["x"], batch["sampled"])
        np.testing.assert_allclose(report.loss, want.mean(), rtol=1e-4)
        logits = batch["x"] @ table.T
        weight = np.zeros_like(logits)
        for row, label in enumerate(batch["labels"]):
            for c in batch["sampled"][batch["sampled"] != label]:
                weight[row, c] += 1 / (COUNT * share(c))
            weight[row, label] = 1
        power = np.exp(logits) * weight
        slope = power / power.sum(1, keepdims=True)
        slope[np.arange(5), batch["labels"]] -= 1
        table = table - 0.5 * slope.T @ batch["x"] / 5
    np.testing.assert_allclose(found, table, rtol=1e-4, atol=1e-5)


MISFITS: list[tuple[Callable[[], Any], str]] = [
    (lambda: fr.nn.sampled_softmax(TABLE, None, LABELS, INPUTS), "num_sampled must be a positive integer, got None"),
    (lambda: fr.nn.sampled_softmax(TABLE, None, LABELS, INPUTS, 0), "num_sampled must be a positive integer, got 0"),
    (lambda: fr.nn.sampled_softmax(TABLE, None, INPUTS, INPUTS, 3), "labels must be classes, integers, got float32"),
    (lambda: fr.nn.sampled_softmax(TABLE, None, LABELS, LABELS, 3), r"inputs must be floats \[..., width\]"),
    (lambda: fr.nn.sampled_softmax(TABLE, None, LABELS, INPUTS, sampled=LABELS[None]), "sampled must be a vector"),
    (lambda: fr.nn.sampled_softmax(TABLE, None, LABELS, INPUTS, 4, sampled=LABELS), "how many candidates there are"),
    (lambda: fr.random.log_uniform((3,), 0), "classes must be a positive integer, got 0"),
]


@pytest.mark.parametrize(("call", "message"), MISFITS, ids=[m[1][:12] + str(n) for n, m in enumerate(MISFITS)])
def test_what_does_not_fit_says_so(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=rf"test_sampled_softmax\.py:\d+.*{message}"):
        call()
