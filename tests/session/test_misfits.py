"""An index that names no row: the error says which it is, where it stands, and how many rows there are."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.kernels.store import background

IDS = np.array([[0, 1], [2, 3], [4, 5], [6, 1234]])
ROWS = np.ones((1000, 3), np.float32)
BAD = "an index is out of range: 1234 at position (3, 1) of int64[4,2], and "


def said(text: str) -> Any:
    return pytest.raises(fr.FlowrtError, match=re.escape(text))


def lookups(**how: Any) -> tuple[fr.Graph, fr.Tensor, list[Any]]:
    with fr.Graph() as graph:
        table = fr.Variable(ROWS, name="emb", **how)
        ids = fr.placeholder("int64", (None, 2), name="ids")
        rows = fr.take(table, ids)
        step = fr.optim.AdaGrad(0.1).minimize(fr.sum(fr.square(rows)))
    return graph, ids, [rows, step]


def test_of_arrays_the_first_index_that_names_nothing_is_told() -> None:
    for _ in range(3):  # the later ones are one C call
        with said(BAD + "there are 1,000 rows"):
            fr.take(ROWS, IDS)
    with said("an index is out of range: -4 at position (1,) of int32[2], and there are 3 entries along axis 1"):
        fr.take(ROWS, np.array([0, -4], np.int32), axis=1)
    with said("an index is out of range: 255 at position () of uint8[], and there are 3 rows"):
        fr.take(np.zeros(3, np.float32), np.array(255, np.uint8))
    with said("and there are 5 rows"):
        fr.scatter_add(np.ones((2, 3), np.float32), np.array([0, 5]), np.array([5, 3]))


def test_a_label_that_is_no_class_is_told() -> None:
    with said(": 10 at position (2,) of int64[3], and there are 10 classes"):
        fr.nn.softmax_cross_entropy(np.zeros((3, 10), np.float32), np.array([0, 9, 10]))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [{}, {"partition": 2}], ids=["whole", "split"])
def test_a_lookup_names_the_table_and_the_place_as_the_program_gave_it(how: dict[str, Any]) -> None:
    graph, ids, fetches = lookups(**how)
    with fr.BlockingSession(graph) as session:
        for fetch in fetches:
            for good in range(3):  # once it was run the step is a C call
                with said(BAD):
                    session.run(fetch, {ids: IDS})
                session.run(fetch, {ids: np.where(IDS == 1234, good, IDS)})


@pytest.mark.timeout(120)
def test_a_lookup_whose_table_is_split_over_servers_names_the_table() -> None:
    graph, ids, fetches = lookups(partition=2)

    async def main() -> None:
        async with fr.LocalCluster(ps=2, worker=1) as cluster, fr.Session(graph, cluster=cluster) as session:
            await session.run(fetches[0], {ids: IDS})

    with pytest.raises(fr.FlowrtError, match=r"emb/rows.*" + re.escape(BAD + "there are 1,000 rows")):
        asyncio.run(main())


def take_in(how: str, table: Any, ids: Any) -> Any:
    """What takes rows at ids one after another, at all of them again and again, or where that is chosen."""
    match how:
        case "scalars":
            return fr.scan(lambda total, i: (total + fr.take(table, i)[0], None), fr.constant(np.float32(0)), ids)[0]
        case "rows":
            turns = (np.int64(0), fr.constant(np.float32(0)))
            return fr.while_loop(lambda n, a: n < 3, lambda n, a: (n + 1, a + fr.sum(fr.take(table, ids))), turns)[1]
        case _:
            return fr.cond(fr.sum(ids) > 0, lambda: fr.take(table, abs(ids)), lambda: fr.take(table, ids + 1))


@pytest.mark.parametrize("tapes", [True, False])
@pytest.mark.parametrize("how", ["scalars", "rows", "branch"])
def test_in_loops_and_branches_the_index_and_the_table_are_told_too(
    how: str, tapes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for compiled in (False, True):  # loops of scalars are compiled at once, or later
        monkeypatch.setattr(background, "was_tried", lambda symbol, compiled=compiled: compiled)
        with fr.Graph() as graph:
            ids = fr.placeholder("int64", (4,), name="ids")
            out = take_in(how, fr.Variable(ROWS, name="emb"), ids)
        with fr.BlockingSession(graph, options=fr.Options(threads=1, tapes=tapes)) as session:
            for _ in range(2):
                with said("an index is out of range: 1234") as caught:
                    session.run(out, {ids: np.array([1, 2, 3, 1234])})
                told = str(caught.value)
                assert "and 'emb' has 1,000 rows" in told
                iteration = {"scalars": "in iteration 4 of loop", "rows": "in iteration 1 of loop"}.get(how, "")
                assert iteration in told or not tapes
                assert f"at position {'() of int64[]' if how == 'scalars' else '(3,) of int64[4]'}" in told
