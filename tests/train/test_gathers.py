"""What a tower gathers, told apart from it: asking, gathering and computing, each alone, are the tower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.train.gathers import Asked, find_gathers
from flowrt.train.updates import parts_of

SIZE, WIDTH = 600, 4
Model = Callable[[fr.Variable, fr.Variable, dict[str, Any]], Any]


def plain(table: Any, dense: Any, batch: dict[str, Any]) -> Any:
    return fr.mean(fr.nn.embedding_lookup(table, batch["rows"])[:, 0] @ dense)


def bags(table: Any, dense: Any, batch: dict[str, Any]) -> Any:
    return fr.mean(fr.square(fr.mean(fr.take(table, batch["rows"]), axis=1) @ dense))


def computed(table: Any, dense: Any, batch: dict[str, Any]) -> Any:
    first, second = fr.take(table, batch["rows"] * 2 - 1), fr.take(table, fr.reshape(batch["rows"], (-1,)) - 3)
    return fr.mean(fr.sum(fr.square(first), axis=1) @ dense) + fr.sum(fr.exp(second))


def at_once(table: Any, dense: Any, batch: dict[str, Any]) -> Any:
    return fr.mean(fr.take(table, fr.abs(batch["rows"])))


def by_a_value(table: Any, dense: Any, batch: dict[str, Any]) -> Any:
    return fr.mean(fr.take(table, batch["rows"] + fr.astype(dense[0, 0], "int32")))


def by_chance(table: Any, dense: Any, batch: dict[str, Any]) -> Any:
    return fr.mean(fr.take(table, fr.astype(fr.random.uniform((5,), seed=1) * SIZE, "int32")))


def also_whole(table: Any, dense: Any, batch: dict[str, Any]) -> Any:
    return plain(table, dense, batch) + fr.mean(fr.square(table))


class Tower:
    """The loss of a model and the parts of its update, and what it gathers."""

    def __init__(self, model: Model, size: int = SIZE) -> None:
        with fr.Graph() as self.graph:
            rng = np.random.default_rng(1)
            self.table = fr.Variable(rng.normal(size=(size, WIDTH)).astype("float32"), name="table")
            self.dense = fr.Variable(rng.normal(size=(WIDTH, 2)).astype("float32"), name="dense")
            self.batch = {"rows": fr.placeholder("int32", (None, 3), name="rows")}
            loss = model(self.table, self.dense, self.batch)
            self.gradients = fr.gradients(loss, [self.table, self.dense])
            self.outputs = [loss, *parts_of([g for g in self.gradients if g is not None])]
        self.gathers = find_gathers(self.outputs, list(self.batch.values()), [self.table, self.dense])


ROWS = np.int32([[5, 6, 5], [77, 3, 299]])


@pytest.mark.parametrize("model", [plain, bags, computed])
async def test_asking_gathering_and_computing_apart_are_the_tower(model: Model) -> None:
    tower = Tower(model)
    asked, rows = [g.asked for g in tower.gathers], [g.rows for g in tower.gathers]
    (batch,) = tower.batch.values()
    async with fr.Session(tower.graph) as session:
        expected = await session.run(tower.outputs, {batch: ROWS})
        asking = await session.run(asked, {batch: ROWS})
        gathered = await session.run(rows, dict(zip(asked, asking, strict=True)))
        fed = {batch: ROWS, **dict(zip(asked, asking, strict=True)), **dict(zip(rows, gathered, strict=True))}
        found = await session.run(tower.outputs, fed)
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)
        text = str(await session.explain(tower.outputs, feeds=list(fed)))
        assert "variable 'dense'" in text
        assert "variable 'table'" not in text


def test_a_bag_is_gathered_as_its_mean() -> None:
    assert [g.rows.spec.dims for g in Tower(bags).gathers] == [(None, WIDTH)]
    assert [g.rows.spec.dims for g in Tower(plain).gathers] == [(None, 3, WIDTH)]
    assert [g.rows.spec.dims for g in Tower(computed).gathers] == [(None, 3, WIDTH), (None, WIDTH)]
    assert len(Tower(at_once).gathers) == 1


def test_what_is_asked_for_is_computed_once_unless_the_batch_has_it() -> None:
    for model, count, wants in ((bags, 0, (0,)), (computed, 2, (1, 2))):
        tower = Tower(model)
        asked = Asked.of(list(tower.batch.values()), [*tower.gathers, *tower.gathers])
        assert (len(asked.computed), asked.wants(asked.gathers)) == (count, wants)


def test_rows_that_are_answered_too_are_gathered_and_a_table_that_is_answered_is_not() -> None:
    tower = Tower(bags)
    ((mean,), inputs) = ([g.rows for g in tower.gathers], list(tower.batch.values()))
    rows = mean.op.inputs[0]
    found = find_gathers([*tower.outputs, rows], inputs, [tower.table])
    assert [g.rows.spec.dims for g in found] == [(None, 3, WIDTH)]
    assert find_gathers([*tower.outputs, rows.op.inputs[0]], inputs, [tower.table]) == []


@pytest.mark.parametrize("model", [by_a_value, by_chance, also_whole])
def test_rows_that_the_batch_does_not_tell_or_of_a_table_read_whole_are_no_gathers(model: Model) -> None:
    assert Tower(model).gathers == []


def test_a_small_table_is_no_matter_of_rows() -> None:
    assert Tower(plain, size=10).gathers == []
    assert [g.table.name for g in Tower(plain).gathers] == ["table"]
