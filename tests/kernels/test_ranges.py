"""What is computed range by range is the same to the last bit as the whole: in any order, at any cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cut_world import (
    WHOLE,
    Entrywise,
    application_of,
    are_same,
    at_once,
    computed,
    differences,
    elementwise_ops,
    random_group,
    run_in_ranges,
    seeded,
    shuffled,
    some_cuts,
)
from op_examples import EXAMPLES, Example

import flowrt as fr
from flowrt.kernels.language.table import is_costly

CUTS = 6  # of each kernel


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_ranges_make_the_same_bits_as_the_whole(example: Example) -> None:
    rng = seeded(example)
    for node, inputs, outputs in computed(example.run, example.arrays):
        application = application_of(node, inputs, outputs)
        whole = run_in_ranges(application, inputs, outputs, at_once, rng)
        for _ in range(CUTS if any(step.units > 1 for step in application.steps) else 1):
            parts = run_in_ranges(application, inputs, outputs, shuffled(rng, 3), rng)
            assert are_same(parts, whole), node.op.name


ENTRYWISE = [*elementwise_ops("float32"), *(what for what in elementwise_ops("float64") if is_costly(what.name))]
GROUPS = [random_group(seed, "float32") for seed in range(3)]


@pytest.mark.parametrize("what", [*ENTRYWISE, *GROUPS], ids=str)
def test_an_entry_is_the_same_bits_in_every_range(what: Entrywise) -> None:
    """In vectors side by side, in single ones, in what is left over, and alone; wherever it lies."""
    tried, wrong = differences(what, some_cuts)
    assert not wrong, f"{len(wrong)} of {tried} cuts, the first {wrong[0]}"


@pytest.mark.parametrize("dtype", WHOLE)
def test_floats_become_the_same_integers_in_vectors_and_alone(dtype: str) -> None:
    values: Any = [0.0, 1.9, -1.9, -1.0, 200.0, -200.0, 70000.0, 2.0**31, -(2.0**31), 2.0**63, 1e30, -1e30]
    x = np.array([*values, np.inf, -np.inf, np.nan], np.float32)
    many = fr.ops.astype(np.repeat(x, 37), dtype).reshape(-1, 37)
    for value, found in zip(x, many, strict=True):
        assert set(found.tolist()) == {fr.ops.astype(value, dtype).item()}, value
    held = np.abs(x) < 2.0**31
    np.testing.assert_array_equal(many[held, 0], x[held].astype(np.int64).astype(dtype))  # modulo its size, as NumPy
