"""Random numbers in loops: new at every iteration, the same whoever runs the loop, and gradients see what was drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flowrt as fr
import flowrt.passes
from flowrt.passes.lower import lower

Array = np.ndarray[Any, Any]
WAYS = ["tape", "machine", "lowered"]


async def run(way: str, fetches: Any, feeds: Any, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> Any:
    """The answers of the last of so many steps of a new session."""
    with monkeypatch.context() as patch:
        if way == "lowered":
            patch.setattr(flowrt.passes, "lower", lambda plan: lower(plan, everything=True))
        graph = fetches[0].graph
        async with fr.Session(graph, options=fr.Options(tapes=way != "machine", threads=1)) as session:
            for _ in range(times):
                answer = await session.run(fetches, feeds)
            return answer


def drawn_in_loops(x: Any) -> list[Any]:
    """What is drawn by a scan, by a loop in it, by a branch in it and by a while loop's condition."""

    def iteration(carry: Any, row: Any) -> Any:
        def inner(i: Any, kept: Any) -> Any:
            return i + 1, kept + fr.where(fr.equal(fr.arange(3), i), fr.random.normal((3,)), 0.0)

        inside = fr.while_loop(lambda i, kept: i < 3, inner, (np.int64(0), np.zeros(3, np.float32)))[1]
        chosen = fr.cond(row > 1.0, lambda: fr.random.uniform(()), lambda: fr.random.uniform(()) + 1.0)
        return carry + row, (fr.random.uniform((2,)), inside, chosen)

    stacks = fr.scan(iteration, np.float32(0), x)[1]
    tossed = fr.while_loop(lambda i: fr.random.uniform(()) < 0.9, lambda i: i + 1, np.int64(0))
    return [*stacks, tossed]


async def test_whoever_runs_a_loop_draws_the_same_and_every_iteration_and_step_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fr.Graph(seed=3) as graph:
        x = fr.placeholder("float32", (None,))
        fetches = drawn_in_loops(x)
    assert graph is fetches[0].graph
    fed = {x: np.arange(4, dtype=np.float32)}
    first = await run("tape", fetches, fed, monkeypatch)
    for way in WAYS:
        again = await run(way, fetches, fed, monkeypatch)
        for one, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=way)
    numbers = np.concatenate([np.ravel(stack) for stack in first[:3]])
    assert len(np.unique(numbers)) == numbers.size == 4 * (2 + 3 + 1)
    second = await run("tape", fetches, fed, monkeypatch, times=2)
    assert not np.isin(np.concatenate([np.ravel(stack) for stack in second[:3]]), numbers).any()


@pytest.mark.parametrize("way", WAYS)
async def test_the_gradient_of_dropout_in_a_scanned_cell_uses_the_masks_of_each_iteration(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cell(h: Any, row: Any) -> Any:
        kept = fr.nn.dropout(fr.ones_like(row), 0.5)
        h = fr.tanh(fr.matmul(h * kept, w) + row)
        return h, kept

    with fr.Graph(seed=5):
        x, w = fr.placeholder("float64", (6, 2, 3)), fr.placeholder("float64", (3, 3))
        last, masks = fr.scan(cell, fr.constant(np.ones((2, 3))), x)
        slopes = fr.gradients([fr.sum(last * last)], [x, w])
    rng = np.random.default_rng(11)
    fed = {x: rng.normal(size=(6, 2, 3)), w: rng.normal(size=(3, 3))}
    got, kept, dx, dw = await run(way, [last, masks, *slopes], fed, monkeypatch)
    assert set(np.unique(kept)) == {0.0, 2.0}
    assert len({mask.tobytes() for mask in kept}) > 1
    np.testing.assert_allclose(got, forward(fed[x], fed[w], kept)[-1], rtol=1e-12)
    wanted = backward(fed[x], fed[w], kept)
    np.testing.assert_allclose(dx, wanted[0], rtol=1e-10)
    np.testing.assert_allclose(dw, wanted[1], rtol=1e-10)


def forward(x: Array, w: Array, kept: Array) -> list[Array]:
    states = [np.ones((2, 3))]
    for row, mask in zip(x, kept, strict=True):
        states.append(np.tanh((states[-1] * mask) @ w + row))
    return states


def backward(x: Array, w: Array, kept: Array) -> tuple[Array, Array]:
    states = forward(x, w, kept)
    dh, dx, dw = 2 * states[-1], np.zeros_like(x), np.zeros_like(w)
    for t in reversed(range(len(x))):
        dx[t] = dh * (1 - states[t + 1] ** 2)
        dw += (states[t] * kept[t]).T @ dx[t]
        dh = (dx[t] @ w.T) * kept[t]
    return dx, dw
