"""What a checkpoint and a graph do not have in common is told, and meant where the user says so."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoint_world import read_checkpoint, write_checkpoint

import flowrt as fr
from flowrt.base.errors import CheckpointError
from flowrt.session.checkpoints import Checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def of(*names: str, size: int = 2, **sizes: int) -> fr.Graph:
    """A graph of vectors of zeros by these names, and others of other sizes."""
    with fr.Graph() as graph:
        for name, length in (dict.fromkeys(names, size) | sizes).items():
            fr.Variable(np.zeros(length, np.float32), name=name)
    return graph


def saved(path: Path, *names: str, step: int = 7) -> None:
    """A checkpoint of vectors by these names: 1, 1 of the first, 2, 2 of the second, ..."""
    content = [(("", name), np.full(2, number, np.float32)) for number, name in enumerate(names, 1)]
    write_checkpoint(path, 1, step, 5, content)


async def restored(graph: fr.Graph, path: Path, **settings: Any) -> dict[str, float]:
    """The first entry of each variable after opening."""
    async with fr.Session(graph, checkpoints=Checkpoints(path, **settings)) as session:
        return {v.name: float((await session.run(v))[0]) for v in graph.variables}


async def refusal(graph: fr.Graph, path: Path, **settings: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        await restored(graph, path, **settings)
    return str(caught.value)


# ── what fits, and what does not ──


async def test_all_that_differs_is_listed_at_once(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b", "c", "lost")
    text = await refusal(of("a", "new", "newer", b=3, c=4), tmp_path)
    here = re.escape("tests/checkpoints/test_restoring.py:")
    assert re.search(rf"step 7 in {tmp_path} does not fit the graph:", text)
    assert re.search(rf"in the graph, but not saved: 'new' float32\[2\] \({here}\d+\), 'newer' float32\[2\]", text)
    assert re.search(r"saved, but not in the graph: 'lost' float32\[2\]\n", text)
    assert re.search(rf"'b' is float32\[3\] \({here}\d+\), but saved float32\[2\], 'c' is float32\[4\]", text)
    assert "partial=True" in text
    assert "rename={" in text


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c"), ("a", "c"), ()])
async def test_whatever_is_missing_or_left_over_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    saved(tmp_path, "a", "b")
    text = await refusal(of(*names), tmp_path)
    for name in {"a", "b"} ^ set(names):
        assert repr(name) in text
    assert ("rename=" in text) == (names == ("a", "c"))  # else there is nothing to be renamed, or to which
    if "a" in names:
        assert "'a'" not in text


async def test_another_dtype_is_another_spec(tmp_path: Path) -> None:
    saved(tmp_path, "a")
    with fr.Graph() as graph:
        fr.Variable(np.zeros(2), name="a")
    text = await refusal(graph, tmp_path)
    assert re.search(r"'a' is float64\[2\] .*, but saved float32\[2\]", text)
    assert "rename=" not in text


async def test_a_restore_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    graph = of("a", "b")
    async with fr.Session(graph, checkpoints=Checkpoints(tmp_path)) as session:
        saved(tmp_path, "a", "c")
        with pytest.raises(CheckpointError, match="'b'"):
            await session.restore()
        with pytest.raises(CheckpointError, match="'c'"):
            await session.restore(7)
        assert [v.tolist() for v in await session.run(list(graph.variables))] == [[0, 0], [0, 0]]


async def test_a_newer_checkpoint_that_does_not_fit_is_no_reason_to_take_an_older_one(tmp_path: Path) -> None:
    saved(tmp_path, "a")
    write_checkpoint(tmp_path, 2, 8, 5, [(("", "b"), np.zeros(2, np.float32))])
    text = await refusal(of("a"), tmp_path)
    assert "step 8" in text
    assert "whole" not in text


async def test_an_error_lists_a_bounded_number_of_names(tmp_path: Path) -> None:
    saved(tmp_path, *(f"v{i}" for i in range(150)))
    assert "and 50 more" in await refusal(of("a"), tmp_path)


async def test_a_container_is_part_of_the_name(tmp_path: Path) -> None:
    saved(tmp_path, "a")
    with fr.Graph() as graph, fr.container("there"):
        fr.Variable(np.zeros(2, np.float32), name="a")
    assert "'a' of container 'there'" in await refusal(graph, tmp_path)


# ── in part ──


async def test_in_part_restores_what_is_common_and_leaves_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, "a", "b", "c")
    with caplog.at_level(logging.INFO, "flowrt.session.checkpoints"):
        assert await restored(of("a", "new", b=3), tmp_path, partial=True) == {"a": 1, "new": 0, "b": 0}
    assert "not saved: 'new'; not used: 'c'; of another dtype or shape: 'b'" in caplog.text


async def test_in_part_by_hand_leaves_the_values_that_are_there(tmp_path: Path) -> None:
    graph = of("a", "b")
    with graph:
        write = [v.assign(np.full(2, 9, np.float32)) for v in graph.variables]
    async with fr.Session(graph, checkpoints=Checkpoints(tmp_path, partial=True)) as session:
        await session.run(write)
        saved(tmp_path, "a", "c")
        assert await session.restore() == 7
        assert [v.tolist() for v in await session.run(list(graph.variables))] == [[1, 1], [9, 9]]


async def test_in_part_must_restore_something(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b")
    text = await refusal(of("model/x", "model/y"), tmp_path, partial=True)
    assert "nothing is common to both" in text
    assert "'model/x'" in text
    assert await restored(of(), tmp_path, partial=True) == {}


async def test_where_there_is_no_checkpoint_a_partial_or_renamed_start_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert await restored(of("a"), tmp_path / "none") == {"a": 0}
    assert caplog.text == ""
    assert await restored(of("a"), tmp_path / "none", partial=True) == {"a": 0}
    assert "no checkpoint in" in caplog.text
    assert not (tmp_path / "none").exists()


async def test_weights_alone_are_restored_from_a_checkpoint_of_training(tmp_path: Path) -> None:
    def weights() -> Any:
        return fr.Variable(np.ones(3, np.float32), name="w")

    with fr.Graph() as training:
        w = weights()
        step = fr.optim.Adam(0.1).minimize(fr.sum(fr.square(w)))
    async with fr.Session(training, checkpoints=Checkpoints(tmp_path)) as session:
        await session.run(step)
        trained = await session.run(w)
        await session.save()
    with fr.Graph() as inference:
        w = weights()
        double = w * 2
    assert "'w/first_moment'" in await refusal(inference, tmp_path)
    async with fr.Session(inference, checkpoints=Checkpoints(tmp_path, partial=True)) as session:
        np.testing.assert_array_equal(await session.run(double), trained * 2)


# ── renamed ──


@pytest.mark.parametrize(
    ("names", "rename", "graph", "expected"),
    [
        ("a", {"a": "b"}, "b", {"b": 1}),
        ("a b", {"a": "b", "b": "a"}, "a b", {"a": 2, "b": 1}),
        ("a b c", {"a": "b", "b": "c", "c": "a"}, "a b c", {"a": 3, "b": 1, "c": 2}),
        ("a/w a/w/momentum b", {"a/w": "x"}, "x x/momentum b", {"x": 1, "x/momentum": 2, "b": 3}),
        ("old/a old/b older", {"old": "new"}, "new/a new/b older", {"new/a": 1, "new/b": 2, "older": 3}),
        ("old/a old/b", {"old/": "new/"}, "new/a new/b", {"new/a": 1, "new/b": 2}),
        ("old/a old/b", {"old": "new", "old/b": "b"}, "new/a b", {"new/a": 1, "b": 2}),
        ("old/a old/b", {"old": ""}, "a b", {"a": 1, "b": 2}),
        ("a b", {"": "model"}, "model/a model/b", {"model/a": 1, "model/b": 2}),
        ("one/a two/b", {"one": "both", "two": "both"}, "both/a both/b", {"both/a": 1, "both/b": 2}),
    ],
    ids=str,
)
async def test_names_and_scopes_are_renamed_at_once(
    tmp_path: Path, names: str, rename: dict[str, str], graph: str, expected: dict[str, float]
) -> None:
    saved(tmp_path, *names.split())
    assert await restored(of(*graph.split()), tmp_path, rename=rename) == expected


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    ("names", "rename", "graph", "says"),
    [
        ("a b", {"x": "b"}, "a b", "nothing saved is called 'x'"),
        ("encoder/w b", {"encodr": "c"}, "c", "did you mean 'encoder'?"),
        ("c", {"a": "c"}, "c", "nothing saved is called 'a'; leave it out, 'c' is saved"),
        ("a b", {"a": "x"}, "a b", "the graph has no variable 'x'"),
        ("a b", {"b": "decoder"}, "a decode", "did you mean 'decode'?"),
        ("a b", {"a": "c", "b": "c"}, "c", "'a' and 'b' would both become 'c'"),
        ("a b/c", {"b": "", "a": "c"}, "c", "'a' and 'b/c' would both become 'c'"),
    ],
    ids=str,
)
async def test_renames_that_mean_nothing_are_refused_in_part_too(
    tmp_path: Path, names: str, rename: dict[str, str], graph: str, says: str, partial: bool
) -> None:
    saved(tmp_path, *names.split())
    assert says in await refusal(of(*graph.split()), tmp_path, rename=rename, partial=partial)


async def test_what_is_renamed_goes_before_what_has_the_name(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b")
    assert "saved, but not in the graph: 'b'" in await refusal(of("b"), tmp_path, rename={"a": "b"})
    assert await restored(of("b"), tmp_path, rename={"a": "b"}, partial=True) == {"b": 1}


async def test_a_program_that_renames_may_restart(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b")
    for _ in range(3):  # names that were exchanged once are not exchanged back
        checkpoints = Checkpoints(tmp_path, rename={"a": "b", "b": "a"})
        graph = of("a", "b")
        async with fr.Session(graph, checkpoints=checkpoints) as session:
            assert [v[0] for v in await session.run(list(graph.variables))] == [2, 1]
            await session.save()
            await session.restore()
            assert [v[0] for v in await session.run(list(graph.variables))] == [2, 1]
            await session.restore(7)  # the one that was saved before
            assert [v[0] for v in await session.run(list(graph.variables))] == [2, 1]
    assert await restored(of("a", "b"), tmp_path) == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("names", "graph", "hint"),
    [
        ("encoder/w", "enc/w", "rename={'encoder': 'enc'}"),
        ("encoder/w encoder/b", "enc/w enc/b", "rename={'encoder': 'enc'}"),
        ("w b", "model/w model/b", "rename={'': 'model'}"),
        ("w b", "kernel b", "rename={'w': 'kernel'}"),
        ("one/w two/b", "first/w second/b", "rename={'one': 'first', 'two': 'second'}"),
        ("w w/m w/steps", "new w w/m new/steps", "rename={'w/steps': 'new/steps'}"),
        ("w b", "x y", "rename={saved name: name in the graph}"),  # which is which?
        ("w b", "x b y", "rename={saved name: name in the graph}"),
    ],
    ids=str,
)
async def test_an_error_says_what_to_rename_where_that_is_clear(
    tmp_path: Path, names: str, graph: str, hint: str
) -> None:
    saved(tmp_path, *names.split())
    assert hint in await refusal(of(*graph.split()), tmp_path)


@pytest.mark.parametrize("rename", [["a"], {"a": 1}, {1: "a"}, "a=b", {"a": None}])
def test_a_rename_that_is_no_mapping_of_names_is_refused(rename: Any) -> None:
    with pytest.raises(fr.GraphError, match=r"rename is \{'saved name': 'name in the graph'\}"):
        Checkpoints("somewhere", rename=rename)


# ── without a name of its own ──


def layers(*widths: int, name: str | None = None) -> fr.Graph:
    """A chain of square layers whose weights are all called alike, or nothing."""
    with fr.Graph() as graph:
        z = fr.placeholder("float32", (None, 2), name="x")
        for width in widths:
            w = fr.Variable(np.zeros((2, 2), np.float32), name=name)
            z = fr.tanh(z @ w) * float(width)
        w.assign_add(fr.ones((2, 2)), name="train")
    return graph


async def trained(graph: fr.Graph, path: Path) -> None:
    async with fr.Session(graph, checkpoints=Checkpoints(path)) as session:
        await session.run(graph.get_operation_by_name("train"))
        await session.save()


def swapped() -> fr.Graph:
    with fr.Graph() as graph:
        z = fr.placeholder("float32", (None, 2), name="x")
        first, second = (fr.Variable(np.zeros((2, 2), np.float32)) for _ in range(2))
        z = fr.tanh(fr.tanh(z @ second) @ first)
        first.assign_add(fr.ones((2, 2)), name="train")
    return graph


def straight() -> fr.Graph:
    with fr.Graph() as graph:
        z = fr.placeholder("float32", (None, 2), name="x")
        first, second = (fr.Variable(np.zeros((2, 2), np.float32)) for _ in range(2))
        z = fr.tanh(fr.tanh(z @ first) @ second)
        first.assign_add(fr.ones((2, 2)), name="train")
    return graph


@pytest.mark.parametrize("name", [None, "w"])
async def test_variables_without_a_name_of_their_own_come_back_into_the_same_graph(
    tmp_path: Path, name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    await trained(layers(1, 2, name=name), tmp_path)
    assert "without a name of their own" in caplog.text
    graph = layers(1, 2, name=name)
    async with fr.Session(graph, checkpoints=Checkpoints(tmp_path)) as session:
        assert [v.sum() for v in await session.run(list(graph.variables))] == [0, 4]


CHANGED: list[tuple[Callable[[], fr.Graph], Callable[[], fr.Graph]]] = [
    (lambda: layers(1, 2), lambda: layers(3, 1, 2)),
    (lambda: layers(1, 2, name="w"), lambda: layers(3, 1, 2, name="w")),
    (lambda: layers(1, 2), lambda: layers(2, 1)),
    (lambda: layers(1, 2), lambda: layers(2)),
    (lambda: layers(1, name="w"), lambda: layers(1, 2, name="w")),
    (lambda: layers(1, 2, name="w"), lambda: layers(1, name="w")),
    (straight, swapped),
]


@pytest.mark.parametrize(("before", "after"), CHANGED, ids=range(len(CHANGED)))
async def test_in_a_changed_graph_they_are_refused_and_left_alone_in_part(
    tmp_path: Path, before: Callable[[], fr.Graph], after: Callable[[], fr.Graph]
) -> None:
    await trained(before(), tmp_path)
    assert "without a name of their own" in await refusal(after(), tmp_path)
    assert "nothing is common to both" in await refusal(after(), tmp_path, partial=True)


async def test_what_was_saved_without_a_name_is_restored_by_renaming(tmp_path: Path) -> None:
    await trained(layers(1, 2), tmp_path)
    with fr.Graph() as graph:
        for name in ("a", "b"):
            fr.Variable(np.zeros((2, 2), np.float32), name=name)
    rename = {"variable": "a", "variable_1": "b"}
    async with fr.Session(graph, checkpoints=Checkpoints(tmp_path, rename=rename)) as session:
        assert [v.sum() for v in await session.run(list(graph.variables))] == [0, 4]


async def test_nodes_that_are_built_behind_change_nothing_for_them(tmp_path: Path) -> None:
    await trained(layers(1, 2), tmp_path)
    graph = layers(1, 2)
    with graph:
        fr.sum(graph.variables[0])
    async with fr.Session(graph, checkpoints=Checkpoints(tmp_path)) as session:
        assert [v.sum() for v in await session.run(list(graph.variables))] == [0, 4]


def test_ops_do_not_take_names_away_from_variables() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (3,), name="mean")
        fr.mean(x)
        v = fr.Variable(0.0, name="mean")
    assert v.name == "mean"
    assert not graph.is_counted("mean")


async def test_two_optimisers_of_the_same_variables_have_names(tmp_path: Path) -> None:
    def model(first: str, second: str) -> fr.Graph:
        with fr.Graph() as graph:
            v = fr.Variable(np.ones(2, np.float32), name="v")
            for name in (first, second):
                fr.optim.Momentum(0.1, 0.9).minimize(fr.sum(v * v), [v], name=name)
        return graph

    graph = model("actor", "critic")
    assert {v.name for v in graph.variables} == {"v", "v/actor/momentum", "v/critic/momentum"}
    async with fr.Session(graph, checkpoints=Checkpoints(tmp_path)) as session:
        await session.save()
    assert read_checkpoint(tmp_path, 1, 0).manifest.order is None
    await restored(model("critic", "actor"), tmp_path)


def test_a_graph_read_from_bytes_knows_which_names_are_counted() -> None:
    graph = layers(1, 2)
    read = fr.Graph.from_bytes(graph.to_bytes())
    assert read.is_counted("variable_1")
    assert not read.is_counted("w")
    with read:
        assert fr.Variable(0.0).name == "variable_2"
