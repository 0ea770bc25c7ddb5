"""What a variable may start from, and what is refused where it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr

if TYPE_CHECKING:
    from collections.abc import Callable


def fed() -> Any:
    return fr.placeholder("float32", (3,), name="image")


def dequeued() -> Any:
    return fr.FIFOQueue(1, "float32", shapes=(3,), name="lines").dequeue()


def behind_a_write() -> Any:
    v = fr.Variable(np.zeros(3, np.float32), name="v")
    with fr.control_dependencies([v.assign_add(fr.ones((3,)))]):
        return v.read()


def behind_a_placeholder() -> Any:
    with fr.control_dependencies([fed()]):
        return fr.zeros((3,)) + 1


def looped(write: bool) -> Any:
    v = fr.Variable(np.zeros(3, np.float32), name="v")

    def turn(i: Any, total: Any) -> Any:
        if not write:
            return i + 1, total + v
        with fr.control_dependencies([v.assign_add(fr.ones((3,)))]):
            return i + 1, total + v.read()

    return fr.while_loop(lambda i, total: i < 3, turn, (fr.constant(0), fr.ones((3,))))[1]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a placeholder": (fed, r"placeholder 'image' \(.*test_starting\.py:\d+\), and nothing is fed"),
    "a computation of one": (lambda: fr.tanh(fed()) * 2, "placeholder 'image'"),
    "its shape made static": (lambda: fr.reshape(fed(), (3, 1)), "placeholder 'image'"),
    "what waits for one": (behind_a_placeholder, "placeholder 'image'"),
    "a queue": (dequeued, r"dequeue 'lines/dequeue' .* waits or writes 'lines'"),
    "a queue's size": (lambda: fr.FIFOQueue(1, "float32", name="lines").size(), "queue_size"),
    "what follows a write": (behind_a_write, r"assign_add 'v/assign_add' .* writes 'v'"),
    "a loop that writes": (lambda: looped(write=True), "writes 'v'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_session_can_compute_on_opening_is_refused_where_it_is_built(case: str) -> None:
    build, says = REFUSED[case]
    with fr.Graph() as graph:
        first = build()
        before = set(graph.resources), len(graph.variables)
        for _ in range(2):
            with (
                fr.name_scope("layer"),
                pytest.raises(fr.GraphError, match=r"'layer/w' \(.*test_starting\.py:\d+\) can"),
            ):
                fr.Variable(first, name="w")
        with pytest.raises(fr.GraphError, match=says):
            fr.Variable(fr.identity(first))
        assert (set(graph.resources), len(graph.variables)) == before
        fr.Variable(fr.zeros((3,)), name="w")


async def test_random_numbers_loops_and_other_variables_are_all_right() -> None:
    with fr.Graph() as graph:
        drawn = fr.Variable(fr.random.normal((3,), seed=1), name="drawn")
        fr.Variable(drawn * 2, name="twice")
        fr.Variable(looped(write=False), name="looped")
        fr.Variable(fr.cond(fr.constant(True), lambda: drawn + 1, lambda: drawn), name="chosen")
    async with fr.Session(graph) as session:
        first, twice, zeros, looped_, chosen = await session.run(list(graph.variables))
    np.testing.assert_array_equal(twice, first * 2)
    np.testing.assert_array_equal(looped_, 1 + zeros)
    np.testing.assert_array_equal(chosen, first + 1)


def test_a_tensor_of_another_graph_leaves_no_half_variable() -> None:
    with fr.Graph():
        other = fr.zeros((3,), name="there")
    with fr.Graph() as graph:
        with pytest.raises(fr.GraphError, match=r"variable 'w' .*'there:0' .* belongs to another graph"):
            fr.Variable(other, name="w")
        assert not graph.resources
        assert fr.Variable(fr.zeros((3,)), name="w").name == "w"


def test_in_a_body_there_are_no_variables_whatever_they_start_from() -> None:
    with fr.Graph():
        x = fed()
        for start in (lambda total: total, lambda total: x, lambda total: 1.0):
            with pytest.raises(fr.GraphError, match="outside the loop or branch"):
                fr.while_loop(
                    lambda t: fr.sum(t) < 3, lambda t, start=start: fr.Variable(start(t)).read(), (fr.ones((3,)),)
                )


def test_the_inner_tensor_of_a_body_is_no_start_outside() -> None:
    inside = []
    with fr.Graph() as graph:
        fr.scan(lambda total, x: inside.append(total + x) or (total + x, x), fr.zeros((3,)), fr.ones((2, 3)))
        with pytest.raises(fr.GraphError, match="the body of a loop"):
            fr.Variable(inside[0], name="w")
        assert not graph.resources


def test_a_graph_read_from_bytes_is_checked_alike() -> None:
    with fr.Graph() as graph:
        x = fed()
        fr.Variable(fr.zeros((3,)), name="w")
    resource = graph.resources["", "w"]
    assert resource.initialize is not None
    resource.initialize.inputs = (x,)
    graph.complete_resource(("", "w"), x, resource.initialize)
    with pytest.raises(fr.GraphError, match=r"'w' .* cannot start from 'image:0'"):
        fr.Graph.from_bytes(graph.to_bytes())
