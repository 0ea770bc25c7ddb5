"""Every kernel that can be split computes the same bits range by range, in any order, with any local memory."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from op_examples import EXAMPLES, Example

import flowrt as fr
from flowrt.eager import evaluate
from flowrt.graph import Graph
from flowrt.kernels.launch import ENTRY_TYPE, Operand, apply_kernel
from flowrt.kernels.table import ALIASES, KERNELS
from flowrt.spec import Spec

Array = np.ndarray[Any, Any]

RUN = np.array([0, 3, 11, 0], np.int64)  # what random ops read: the step and the seed
_seen: set[Any] = set()


def computed(example: Example) -> list[tuple[Any, list[Array], list[Array]]]:
    """The nodes of an example that a kernel computes and that no earlier one had, with their inputs and outputs."""
    with Graph() as graph:
        inputs = [fr.placeholder(a.dtype, a.shape) for a in example.arrays]
        example.run(*inputs)
    values: dict[Any, Any] = dict(zip(inputs, example.arrays, strict=True))
    found = []
    for node in graph.nodes:
        runs = node.op.name == "constant" or node.op.name in ALIASES or (node.op.name, "cpu") in KERNELS
        if not node.outputs or node.outputs[0] in values or not runs or any(t not in values for t in node.inputs):
            continue
        arrays = [np.ascontiguousarray(values[t]).reshape(np.shape(values[t])) for t in node.inputs]
        outputs = list(evaluate(node.op, arrays, node.attrs, RUN.copy()))
        values.update(zip(node.outputs, outputs, strict=True))
        key = (node.op.name, str(node.attrs), *((a.dtype.str, a.shape, a.tobytes()) for a in arrays))
        if (node.op.name, "cpu") in KERNELS and node.op.name not in ALIASES and key not in _seen:
            _seen.add(key)
            found.append((node, arrays, outputs))
    return found


def run_in_ranges(node: Any, inputs: list[Array], outputs: list[Array], seed: int, places_to_cut: int) -> list[Array]:
    """The outputs, each step computed in random ranges in random order, over memory that holds rubbish."""
    rng = random.Random(seed)
    specs = [Spec(a.dtype, a.shape) for a in (*inputs, *outputs)]
    application = apply_kernel(node.op.name, specs[: len(inputs)], specs[len(inputs) :], node.attrs)
    made = [np.empty(spec.concrete, spec.dtype) for spec in (*specs[len(inputs) :], *application.scratch)]
    local = [np.empty(spec.concrete, spec.dtype) for spec in application.local]
    for array in (*made, *local):
        array.reshape(-1).view(np.uint8)[:] = 0x77
    memory = [*inputs, *made, *local]
    places, run = [Operand(number + 1) for number in range(len(memory) + application.slots)], RUN.copy()
    run[-1] = run.ctypes.data  # whom a loop inside asks whether it is to stop
    bases = np.array([run.ctypes.data, *(a.ctypes.data for a in memory), *[0] * application.slots], np.int64)
    for step in application.steps:
        block, entry = step.block(places), ENTRY_TYPE(step.address())
        cuts = sorted({0, step.units, *(rng.randrange(step.units + 1) for _ in range(places_to_cut))})
        ranges = list(itertools.pairwise(cuts)) or [(0, 0)]
        rng.shuffle(ranges)
        for begin, end in ranges:
            for array in local:  # what a range leaves there, the next must not count on
                array.reshape(-1).view(np.uint8)[:] = rng.randrange(256)
            entry(bases.ctypes.data, block.ctypes.data, begin, end)
    return made[: len(outputs)]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_ranges_make_the_same_bits_as_the_whole(example: Example) -> None:
    for node, inputs, outputs in computed(example):
        seed = len(_seen)
        whole, parts = (run_in_ranges(node, inputs, outputs, seed, places_to_cut) for places_to_cut in (0, 3))
        for mine, expected in zip(parts, whole, strict=True):
            same = mine.tobytes() == expected.tobytes()
            assert same or np.array_equal(mine, expected, equal_nan=True), f"{node.op.name}, seed {seed}"
