"""Fed matrices that turns multiply with vectors are copied to where lines begin; nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from step_world import CPU, everywhere

import flowrt as fr
from flowrt.base.device import Device
from flowrt.passes import StepTerms, compile_step

GPU = Device("local", 0, "cuda", 0)
N = 64


def repeated(turn: Callable[[Any], Any], first: Any) -> Any:
    return fr.while_loop(lambda i, v: i < 5, lambda i, v: (i + 1, turn(v)), (0, first))[1]


def nested(m: Any, v: Any) -> Any:
    return repeated(lambda v: repeated(lambda v: fr.tanh(m @ v), v), v)


LOOPS: dict[str, tuple[Callable[[Any, Any], Any], tuple[int, ...], tuple[int, ...], bool]] = {
    "a column": (lambda m, v: repeated(lambda v: fr.tanh(m @ v), v), (N, N), (N, 1), True),
    "a vector": (lambda m, v: repeated(lambda v: fr.tanh(m @ v), v), (N, N), (N,), True),
    "a row": (lambda m, v: repeated(lambda v: fr.tanh(v @ m), v), (N, N), (1, N), True),
    "rows of a batch": (lambda m, v: repeated(lambda v: fr.tanh(v @ m), v), (N, N), (2, 1, N), True),
    "a loop in a loop": (nested, (N, N), (N, 1), True),
    "many columns": (lambda m, v: repeated(lambda v: fr.tanh(m @ v), v), (N, N), (N, 9), False),
    "many rows": (lambda m, v: repeated(lambda v: fr.tanh(v @ m), v), (N, N), (9, N), False),
    "matrices of a scan": (lambda m, v: fr.scan(lambda v, m: (fr.tanh(m @ v), v), v, m)[0], (3, N, N), (N, 1), False),
    "a small matrix": (lambda m, v: repeated(lambda v: fr.tanh(m @ v), v), (8, 8), (8, 1), False),
    "what is computed": (lambda m, v: repeated(lambda v: fr.tanh((m + m) @ v), v), (N, N), (N, 1), False),
    "rows of a scan": (lambda m, v: fr.scan(lambda v, row: (fr.tanh(v * row), v), v, m)[0], (N, N), (N,), False),
    "as little as is worth it": (lambda m, v: repeated(lambda v: fr.tanh(m @ v), v), (32, 32), (32, 1), True),
    "as much as is worth it": (lambda m, v: repeated(lambda v: fr.tanh(m @ v), v), (1024, 1024), (1024, 1), True),
    "more than that": (lambda m, v: repeated(lambda v: fr.tanh(m @ v), v), (1025, 1025), (1025, 1), False),
    "a long vector": (lambda m, v: repeated(lambda s: fr.tanh(v @ (m * s)), v), (1024, 1024), (1024,), False),
    "no loop": (lambda m, v: m @ v, (N, N), (N, 1), False),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_turns_read_again_and_again_is_copied(name: str) -> None:
    build, of_matrix, of_vector, copied = LOOPS[name]
    with fr.Graph() as graph:
        m, v = fr.placeholder("float32", of_matrix), fr.placeholder("float32", of_vector)
        result = build(m, v)
    made = compile_step(graph, [result], [], [m, v], StepTerms(devices=[CPU], default=CPU, supports=everywhere))
    (plan,) = made.plans.values()
    copies = [node for node in plan.nodes if node.op == "concat"]
    assert [node.inputs for node in copies] == [(0,)] * copied


def test_iterations_compute_the_same_on_a_matrix_that_begins_anywhere() -> None:
    with fr.Graph() as graph:
        m, v = fr.placeholder("float32", (N, N)), fr.placeholder("float32", (N, 1))
        result = repeated(lambda v: fr.tanh(m @ v), v)
    draws = np.random.default_rng(0)
    matrix, vector = (draws.standard_normal(shape).astype(np.float32) for shape in ((N, N), (N, 1)))
    memory = np.empty(matrix.nbytes + 64, np.uint8)
    found = []
    with fr.BlockingSession(graph) as session:
        step = session.compile(result, [m, v])
        for begin in (0, 4, 16, 32, 60):
            moved = memory[begin : begin + matrix.nbytes].view(np.float32).reshape(N, N)
            moved[...] = matrix
            found += [step(moved, vector) for _ in range(2)]
            moved[...] = 0
    want = vector
    for _ in range(5):
        want = np.tanh(matrix @ want)
    np.testing.assert_allclose(found[0], want, rtol=1e-4, atol=1e-6)
    for other in found:
        np.testing.assert_array_equal(other, found[0])


def test_each_loop_has_a_copy_of_each_matrix_beside_it() -> None:
    with fr.Graph() as graph:
        one, other, v = (fr.placeholder("float32", dims) for dims in ((N, N), (N, N), (N, 1)))
        first = repeated(lambda v: fr.tanh(one @ v + other @ v), v)
        last = repeated(lambda v: fr.tanh(one @ v), first)
    for device, many in ((CPU, 3), (GPU, 0)):
        made = compile_step(
            graph, [last], [], [one, other, v], StepTerms(devices=[CPU, GPU], default=device, supports=everywhere)
        )
        (plan,) = made.plans.values()
        copies = [node for node in plan.nodes if node.op == "concat"]
        assert sorted(node.inputs for node in copies) == [(0,), (0,), (1,)][:many]
