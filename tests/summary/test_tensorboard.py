"""Graphs as TensorBoard draws them; and TensorBoard itself, a process, which shows what was written."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pytest
from board_world import Board
from google.protobuf import text_format
from PIL import Image
from process_world import running
from tensorboard.compat.proto.graph_pb2 import GraphDef

import flowrt as fr

if TYPE_CHECKING:
    from pathlib import Path


def written(graph: fr.Graph, folder: Path) -> dict[str, Any]:
    """The nodes, by name, that are read of what is written of ``graph``."""
    with fr.summary.Writer(folder) as writer:
        writer.graph(graph)
    nodes = Board(folder).graph.node
    assert len({node.name for node in nodes}) == len(nodes)
    return {node.name: node for node in nodes}


def shapes(node: Any) -> list[list[int]]:
    return [[dim.size for dim in shape.dim] for shape in node.attr["_output_shapes"].list.shape]


def model() -> fr.Graph:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 3), name="x")
        with fr.device("/job:ps/task:1"):
            w = fr.Variable(np.ones((3, 2), np.float32), name="w")
        with fr.name_scope("layer"), fr.device("/job:worker/task:0"):
            y = fr.matmul(x, w, name="product")
            with fr.control_dependencies([y]), fr.colocate_with(w):
                fr.sum(y, axis=1, name="total")
    return graph


# ── graphs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nodes_have_their_devices_shapes_edges_and_lines(tmp_path: Path) -> None:
    nodes = written(model(), tmp_path)
    product, total = nodes["layer/product"], nodes["layer/total"]
    assert (nodes["x"].op, product.op, total.op) == ("Placeholder", "matmul", "sum")
    assert product.input == ["x", "w/value"]
    assert total.input == ["layer/product", "^layer/product"]
    assert product.device == "/job:worker/task:0"
    assert nodes["w/value"].device == "/job:ps/task:1"
    assert (shapes(nodes["x"]), shapes(product)) == ([[-1, 3]], [[-1, 2]])
    assert total.attr["_class"].list.s == [b"loc:@w/value"]
    assert total.attr["axis"].s == b"1"
    assert re.fullmatch(rb".*test_tensorboard.py:\d+", total.attr["built at"].s)


def test_outputs_beyond_the_first_are_told_apart(tmp_path: Path) -> None:
    with fr.Graph() as graph:
        first, second = fr.split(fr.placeholder("float32", (4,)), 2)
        fr.add(first, second, name="both")
    nodes = written(graph, tmp_path)
    assert len(nodes["both"].input) == len(set(nodes["both"].input)) == 2


def test_bodies_lie_in_the_scope_of_their_op(tmp_path: Path) -> None:
    with fr.Graph() as graph, fr.name_scope("m"):
        x = fr.placeholder("float32", (3,), name="x")
        fr.while_loop(
            lambda i, a: i < 3,
            lambda i, a: (i + 1, fr.cond(fr.sum(a) > 0, lambda: a * 2.0, lambda: a)),
            (fr.constant(0), x),
            name="loop",
        )
    nodes = written(graph, tmp_path)
    inside = {name for name in nodes if name.startswith("m/loop/body/")}
    assert {"m/loop/body/add", "m/loop/body/cond", "m/loop/body/cond/true/multiply"} <= inside
    known = set(nodes)
    for node in nodes.values():
        assert {name.lstrip("^").partition(":")[0] for name in node.input} <= known


def test_arrays_and_ranks_that_are_open_are_shown_short(tmp_path: Path) -> None:
    with fr.Graph() as graph:
        fr.constant(np.zeros((500, 500)), name="large")
        fr.constant([1.0, 2.0], name="small")
        queue = fr.FIFOQueue(3, ["float32"], name="queue")
        queue.dequeue()
    nodes = written(graph, tmp_path)
    assert nodes["large"].attr["value"].s == b"float64[500, 500]"
    assert nodes["small"].attr["value"].s == b"[1.0, 2.0]"
    (taken,) = [node for node in nodes.values() if node.op == "dequeue"]
    assert taken.attr["_output_shapes"].list.shape[0].unknown_rank


def test_a_trainers_graph_and_ten_thousand_nodes_are_drawn(tmp_path: Path) -> None:
    with fr.Graph() as graph:
        fr.train.Replicated(
            lambda inputs: fr.mean(inputs["x"] @ fr.Variable(np.ones((8, 1), np.float32), name="w")),
            {"x": fr.Spec("float32", (None, 8))},
            fr.optim.Adam(0.1),
            replicas=4,
        )
        x: Any = fr.placeholder("float32", ())
        for number in range(100):
            with fr.name_scope(f"layer_{number}"):
                for _ in range(100):
                    x = x + 1.0
    assert len(graph.nodes) > 10_000
    nodes = written(graph, tmp_path)
    assert len(nodes) == len(graph.nodes)
    assert {node.device for node in nodes.values()} >= {"/job:ps/task:0", "/job:worker/task:3"}


# ── TensorBoard itself ───────────────────────────────────────────────────────────────────────────────────────────────


class Pages:
    """What TensorBoard's pages ask it for."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def get(self, path: str, body: bytes | None = None) -> bytes:
        def ask() -> bytes:
            request = urllib.request.Request(self._url + path, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                content: bytes = answer.read()
            return content

        return await asyncio.to_thread(ask)

    async def plugin(self, path: str, **query: Any) -> Any:
        asked = "&".join(f"{key}={quote(str(value), safe='')}" for key, value in query.items())
        return json.loads(await self.get(f"data/plugin/{path}?{asked}"))

    async def until_shown(self, run: str, tag: str) -> None:
        """Wait until it has read a run as far as that."""
        while tag not in (await self.plugin("scalars/tags")).get(run, {}):  # noqa: ASYNC110  (it tells nobody)
            await asyncio.sleep(0.1)


async def opened(process: Any) -> Pages:
    """Wait for what it says when it can be asked."""
    async for line in process.stderr:
        if found := re.search(rb"at (http://\S+/) ", line):
            return Pages(found[1].decode())
    raise AssertionError("TensorBoard has ended")


def fill(folder: Path) -> None:
    rng = np.random.default_rng(0)
    with fr.summary.Writer(folder) as writer:
        writer.graph(model())
        writer.hyperparameters({"rate": 0.1, "optimizer": "SGD"})
        writer.image("digits/first", rng.random((5, 7, 3)), 3)
        writer.text("about", "a **bold** word")
        for step in range(20):
            writer.histogram("weights", rng.normal(size=100) + step, step)
            writer.scalars({"loss": 1 / (step + 1), "größe/ü": step, "odd": np.inf if step else np.nan}, step)


@pytest.mark.timeout(180)  # it takes ten seconds to begin, of a machine that has nothing else to do
@pytest.mark.asyncio
async def test_tensorboard_shows_all_that_was_written(tmp_path: Path) -> None:
    fill(tmp_path / "one")
    arguments = ["--logdir", str(tmp_path), "--host", "127.0.0.1", "--port", "0", "--reload_interval", "1"]
    async with (
        asyncio.timeout(150),
        running(sys.executable, "-m", "tensorboard.main", *arguments, stderr=asyncio.subprocess.PIPE) as process,
        fr.summary.Writer(tmp_path / "two") as writer,
    ):
        pages = await opened(process)
        await pages.until_shown("one", "odd")
        scalars = await pages.plugin("scalars/scalars", run="one", tag="loss")
        assert [(step, value) for _, step, value in scalars] == [
            (step, pytest.approx(1 / (step + 1))) for step in range(20)
        ]
        assert [step for _, step, _ in await pages.plugin("scalars/scalars", run="one", tag="größe/ü")] == list(
            range(20)
        )

        histograms = await pages.plugin("histograms/histograms", run="one", tag="weights")
        assert [step for _, step, _ in histograms] == list(range(20))
        assert sum(count for _, _, count in histograms[7][2]) == 100

        (image,) = await pages.plugin("images/images", run="one", tag="digits/first", sample=0)
        assert image["step"] == 3
        shown = Image.open(io.BytesIO(await pages.get(f"data/plugin/images/individualImage?{image['query']}")))
        assert shown.size == (7, 5)

        (text,) = await pages.plugin("text/text", run="one", tag="about")
        assert "<strong>bold</strong>" in text["text"]

        drawn = await pages.get("data/plugin/graphs/graph?run=one&limit_attr_size=1024&large_attrs_key=_too_large")
        graph = text_format.Parse(drawn, GraphDef())
        assert {node.name for node in graph.node} >= {"x", "w/value", "layer/product", "layer/total"}

        asked = json.dumps({"experimentName": "", "hparamsLimit": 10}).encode()
        experiment = json.loads(await pages.get("data/plugin/hparams/experiment", asked))
        assert {each["name"] for each in experiment["hparamInfos"]} == {"rate", "optimizer"}

        writer.scalar("live", 3, 1)  # while TensorBoard looks on
        await writer.aflush()
        await pages.until_shown("two", "live")
