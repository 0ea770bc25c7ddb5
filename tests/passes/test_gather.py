"""Where the rows of a variable are taken in a step over several tasks, and what travels for it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from pass_world import compiled
from step_world import CLIENT, CLUSTER, everywhere

import flowrt as fr
from flowrt.graph import device
from flowrt.passes.gather import put_together
from flowrt.passes.place import place
from flowrt.passes.prune import prune
from flowrt.passes.settle import settle

if TYPE_CHECKING:
    from flowrt.passes import Compiled

PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"
SIZE, WIDTH = 5000, 8


class Model:
    """A table on a parameter server and its rows, averaged over the last axis of the indices, on a worker."""

    def __init__(self, rows: Any = fr.take, *, size: int = SIZE, indices: Any = (None, 3), also: Any = None) -> None:
        with fr.Graph() as self.graph:
            with device("/job:ps"):
                self.table = fr.Variable(np.arange(size * WIDTH, dtype=np.float32).reshape(size, WIDTH), name="table")
            with device("/job:worker/task:0"):
                self.indices = fr.placeholder("int32", indices, name="indices")
                self.rows = rows(self.table, self.indices)
                self.means = fr.mean(self.rows, axis=-2, name="means")
                self.loss = fr.mean(fr.square(self.means))
                if also is not None:
                    self.loss = self.loss + fr.mean(also(self.table))
                self.train = fr.optim.SGD(0.5).minimize(self.loss)

    def compile(self, *fetches: Any, targets: Any = ()) -> Compiled:
        settings: dict[str, Any] = {"devices": CLUSTER, "default": CLUSTER[2], "client": CLIENT}
        return compiled(list(fetches), targets, [self.indices], **settings)


def crossing(result: Compiled) -> list[str]:
    """The shapes of what is sent from task to task, without what the client sends and gets."""
    peers = (PS, WORKER)
    nodes = [node for plan in result.plans.values() for node in plan.nodes]
    return sorted(str(n.outputs[0]) for n in nodes if n.op == "recv" and n.attrs["peer"] in peers)


def ops(result: Compiled, task: str) -> Counter[str]:
    return Counter(node.op for node in result.plans[task].nodes)


def test_rows_of_a_remote_variable_are_taken_where_it_lies() -> None:
    for rows in (fr.take, fr.nn.embedding_lookup):
        model = Model(rows)
        result = model.compile(model.rows, model.loss)
        assert crossing(result) == ["float32[?,3,8]"], rows
        assert (ops(result, PS)["take"], ops(result, WORKER)["take"]) == (1, 0)


def test_of_a_bag_of_rows_its_sum_travels_alone() -> None:
    for rows in (fr.take, fr.nn.embedding_lookup):
        model = Model(rows)
        result = model.compile(model.loss)
        assert crossing(result) == ["float32[?,8]"], rows
        assert ops(result, PS)["bag"] == 1
        assert ("move_gathers", "moved") in [(r.name, *r.counts) for r in result.report]
        assert result.placement["means"].startswith(PS)


def test_gradients_of_rows_travel_as_rows() -> None:
    model = Model()
    result = model.compile(model.loss, targets=[model.train])
    assert crossing(result) == ["float32[?,8]", "float32[?,8]", "int32[?]"]
    assert ops(result, PS)["add_rows"] == 1


def test_a_variable_that_travels_whole_anyway_has_its_rows_taken_there() -> None:
    for rows in (fr.take, fr.nn.embedding_lookup):
        model = Model(rows, also=lambda table: table * table)
        result = model.compile(model.rows, model.loss)
        assert crossing(result) == [f"float32[{SIZE},{WIDTH}]"], rows
        assert (ops(result, PS)["take"], ops(result, WORKER)["take"]) == (0, 1)


def test_a_small_variable_and_one_whose_rows_are_more_bytes_travel_whole() -> None:
    for size, indices in ((16, (None, 3)), (128, (None, 3)), (200, (100, 3)), (SIZE, (SIZE, 1))):
        model = Model(size=size, indices=indices)
        assert crossing(model.compile(model.rows, model.loss)) == [f"float32[{size},{WIDTH}]"], (size, indices)
    model = Model(size=129)
    assert crossing(model.compile(model.rows, model.loss)) == ["float32[?,3,8]"]
    model = Model(size=SIZE, indices=(100, 3))
    assert crossing(model.compile(model.rows, model.loss)) == ["float32[100,3,8]"]
    assert crossing(model.compile(model.rows)) == []  # from where they are taken to the client


def test_gathers_that_are_more_than_the_table_together_share_it() -> None:
    with fr.Graph():
        with device("/job:ps"):
            table = fr.Variable(np.zeros((1000, WIDTH), np.float32), name="table")
        with device("/job:worker/task:0"):
            found = [fr.negative(fr.take(table, fr.placeholder("int64", (300,), name=f"i{n}"))) for n in range(3)]
    for count, expected in ((2, ["float32[300,8]"] * 2), (3, ["float32[1000,8]"])):
        feeds = [t.op.inputs[0].op.inputs[1] for t in found]
        result = compiled(found[:count], (), feeds, devices=CLUSTER, default=CLUSTER[2], client=CLIENT)
        assert crossing(result) == expected, count


def test_what_is_no_gather_of_rows_stays() -> None:
    with fr.Graph():
        with device("/job:ps"):
            table = fr.Variable(np.zeros((40, 1000), np.float32), name="table")
            numbers = fr.Variable(np.arange(2000), name="numbers")
        with device("/job:worker/task:0"):
            columns = fr.negative(fr.take(table, [1, 2], axis=1))
            chosen = fr.negative(fr.take(fr.negative(numbers), numbers))
    result = compiled([columns, chosen], devices=CLUSTER, default=CLUSTER[2], client=CLIENT)
    assert crossing(result) == ["float32[40,1000]", "int64[2000]"]


def test_what_is_read_of_a_table_where_it_lies_stays_there_on_its_own_device() -> None:
    def at_home(table: Any) -> Any:
        with device("/job:ps"):
            return fr.mean(table * table)

    model = Model(also=at_home)
    assert crossing(model.compile(model.rows, model.loss)) == ["float32[?,3,8]", "float32[]"]
    with fr.Graph():
        with device("/job:ps/device:cpu:0"):
            table = fr.Variable(np.zeros((SIZE, WIDTH), np.float32), name="table")
        with device("/job:ps/device:cpu:1"):
            rows = fr.negative(fr.take(table, [1, 2], name="take"))
        with device("/job:worker/task:0"):
            end = fr.negative(rows)
    result = compiled([end], devices=CLUSTER, default=CLUSTER[2], client=CLIENT)
    assert result.placement["take"] == "/job:ps/task:0/device:cpu:1"


def test_a_table_that_is_put_together_of_its_parts_is_told_with_its_bytes() -> None:
    with fr.Graph() as graph:
        table, other = (
            fr.Variable(np.zeros((SIZE, WIDTH), np.float32), name=name, partition=2) for name in ("table", "other")
        )
        whole, mixed = fr.negative(table), fr.concat([table.parts[0], other.parts[1], fr.zeros((1, WIDTH))], 0)
    step = prune(graph, [whole, mixed], [], [])
    assert put_together(step) == {"table": SIZE * WIDTH * 4}


def test_each_shard_of_a_table_is_gathered_from_where_it_is() -> None:
    with fr.Graph():
        shards = []
        for where in ("/job:ps", "/job:worker/task:1"):
            with device(where):
                shards.append(fr.Variable(np.zeros((SIZE, WIDTH), np.float32)))
        with device("/job:worker/task:0"):
            indices = fr.placeholder("int32", (None,))
            rows = fr.negative(fr.nn.embedding_lookup(shards, indices))
    result = compiled([rows], (), [indices], devices=CLUSTER, default=CLUSTER[2], client=CLIENT)
    assert [ops(result, task)["take"] for task in (PS, "/job:worker/task:1", WORKER)] == [1, 1, 0]


async def test_rows_taken_on_a_server_are_the_rows() -> None:
    """Lookups, with rows that occur twice and none at all, and a step of training, in processes of their own."""
    model = Model()
    expected = np.arange(SIZE * WIDTH, dtype=np.float32).reshape(SIZE, WIDTH)
    async with fr.LocalCluster(ps=1, worker=1) as cluster, fr.Session(model.graph, cluster=cluster) as session:
        for chosen in (np.int32([[1, 2, 1]]), np.zeros((0, 3), np.int32), np.int32([[SIZE - 1, 0, -1], [4, 4, 4]])):
            rows, means = await session.run([model.rows, model.means], {model.indices: chosen})
            np.testing.assert_array_equal(rows, expected[chosen])
            np.testing.assert_allclose(means, expected[chosen].mean(1), rtol=1e-6)
        chosen = np.int32([[7, 8, 7]])
        mean = expected[chosen].mean(1)
        await session.run(model.train, {model.indices: chosen})
        np.add.at(expected, chosen[0], -0.5 * 2 * mean / WIDTH / 3)
        moved = await session.run(model.rows, {model.indices: np.int32([[6, 7, 8]])})
        np.testing.assert_allclose(moved[0], expected[6:9], rtol=1e-5)
        text = str(await session.explain([model.loss], feeds=[model.indices]))
        assert "move_gathers: moved 2" in text


def test_what_needs_nothing_of_another_task_settles_at_home() -> None:
    """A fed table's rows are taken at home, indices on their way to another task's table made there."""
    with fr.Graph():
        with device("/job:ps"):
            fed = fr.placeholder("float32", (SIZE, WIDTH), name="fed")
            table = fr.Variable(np.zeros((SIZE, WIDTH), np.float32), name="table")
            flat = fr.reshape(fr.placeholder("int32", (None, 3), name="indices"), (-1,), name="flat")
        with device("/job:worker/task:0"):
            rows = fr.add(fr.nn.embedding_lookup(fed, flat), fr.nn.embedding_lookup(table, flat), name="rows")
    step = prune(rows.graph, [rows], [], [fed, flat.op.inputs[0]])
    placed = place(step, devices=CLUSTER, default=CLUSTER[2], supports=everywhere, rules={})
    found = settle(step, placed, [d for d in CLUSTER if d.host == WORKER], everywhere)
    told = {step.nodes[i].name: where.host for i, where in found.items()}
    assert {told["flat"], told["take"], told["rows"]} == {WORKER}
    assert {told["table/value"], told["take_1"]} == {PS}
