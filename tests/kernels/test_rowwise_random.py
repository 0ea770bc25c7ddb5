"""Random programs of rows: computed in one launch, in pieces, as written, and by NumPy they answer the same."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest
from test_rowwise import compiled_here  # noqa: F401

import flowrt as fr
from flowrt.session.session import Options

Array = np.ndarray[Any, Any]
Line: TypeAlias = "tuple[str, tuple[int, ...]]"

FOLDS = ("sum", "mean", "max", "min")
SHAPES = (((3, 3), 33), ((1, 20), 600), ((2, 6), 16), ((1, 1), 40), ((40, 1), 6), ((9, 1), 2), ((0, 3), 20))
"""Rows and their length: some suit one launch and some do not; one row, and none."""


def random_program(rng: np.random.Generator, lines: int) -> list[Line]:
    """Lines of what is made of the values before; these begin with two of entries, one that repeats, and one a row."""
    program: list[Line] = []
    entries, rows = [0, 1, 2, 3], [3]
    for n in range(4, 4 + lines):
        a, b = (int(i) for i in rng.choice(entries, 2))
        match int(rng.integers(9)):
            case 0 | 1:
                program.append((str(rng.choice(FOLDS)), (a,)))
                rows.append(n)
            case 2:
                program.append((f"bare {rng.choice(FOLDS)}", (a,)))
                rows.append(n)
            case 3:
                program.append(("subtract", (int(rng.choice(rows)), int(rng.choice(rows)))))
                rows.append(n)
            case 4:
                program.append(("exp", (a,)))
            case 5:
                program.append(("divide", (a, int(rng.choice(rows)))))
            case 6:
                program.append(("larger", (a, b)))
            case kind:
                program.append((("multiply", "subtract")[kind - 7], (a, int(rng.choice(rows)))))
        entries.append(n)
    return program


def run_line(np_or_fr: Any, line: Line, values: list[Any], axes: tuple[int, ...]) -> Any:
    """A line's value; numbers stay of a size at which rounding is no matter."""
    op, taken = line[0], [values[n] for n in line[1]]
    match op:
        case "exp":
            return np_or_fr.exp(np_or_fr.tanh(taken[0]))
        case "divide":
            return taken[0] / (np_or_fr.abs(taken[1]) + 1.0)
        case "larger":
            return np_or_fr.where(taken[0] > taken[1], taken[0], taken[1] * 0.5)
        case "multiply" | "subtract":
            return np_or_fr.tanh(getattr(np_or_fr, op)(*taken))
        case "sum":
            return np_or_fr.tanh(np_or_fr.sum(taken[0], axis=axes, keepdims=True))
    if op.startswith("bare"):
        reduced = getattr(np_or_fr, op.split()[1])(taken[0], axis=axes)
        return np_or_fr.expand_dims(np_or_fr.tanh(reduced), axes)
    return getattr(np_or_fr, op)(taken[0], axis=axes, keepdims=True)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], along: int, dtype: str) -> list[Array]:
    """Two of entries, of which one does not lie evenly, one that repeats and one a row."""
    cut = len(shape) - along
    wide = rng.normal(size=(*shape[:-1], 2 * shape[-1])).astype(dtype)
    shapes = [shape, shape[cut:], (*shape[:cut], *[1] * along)]
    x, repeated, row = (rng.normal(size=s).astype(dtype) for s in shapes)
    return [x, wide[..., ::2], repeated, row]


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_of_rows_answer_what_numpy_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    print("seed", seed)
    along, dtype = 1 + seed % 2, ("float64", "float32")[seed // 2 % 2]
    axes = tuple(range(-along, 0))
    program = random_program(rng, int(rng.integers(6, 14)))
    with fr.Graph() as graph:
        feeds = [fr.placeholder(dtype, (None,) * (2 + along)) for _ in range(2)]
        feeds += [fr.placeholder(dtype, (None,) * along), fr.placeholder(dtype, (None, None, *[1] * along))]
        made = evaluated(fr, program, feeds, axes)
        asked = [len(made) - 1, *rng.integers(4, len(made), size=2).tolist()]
        fetches = [*(made[n] for n in asked), fr.sum(made[-2] * feeds[1], axis=(0, 1))]
        slopes = fr.gradients(fr.sum(made[-1] * made[-1]), feeds[:2])
        fetches += [slope for slope in slopes if slope is not None]
    given = [numbers(rng, (*rows, *(2, length // 2)[2 - along :]), along, dtype) for rows, length in SHAPES]
    with fr.BlockingSession(graph, options=Options(optimize=False, threads=1)) as session:
        judges = [session.run(fetches, dict(zip(feeds, values, strict=True))) for values in given]
    with fr.BlockingSession(graph, options=Options(threads=2)) as session:
        step = session.compile(fetches, feeds)
        apart = [copied(step(*values)) for values in given]
        for values in given * 2:
            step(*values)
        together = [copied(step(*values)) for values in given]
    for values, judge, *answers in zip(given, judges, apart, together, strict=True):
        exact = evaluated(np, program, [v.astype(np.float64) for v in values], axes)
        exact = [*(exact[n] for n in asked), np.sum(exact[-2] * exact[1], axis=(0, 1))]
        near = {"rtol": 1e-9, "atol": 1e-9} if dtype == "float64" else {"rtol": 2e-4, "atol": 2e-4}
        for found in answers:
            for mine, other in zip([*found, *found], [*judge, *exact, *found[len(exact) :]], strict=True):
                np.testing.assert_allclose(mine, other, **near, err_msg=f"seed {seed}, {values[0].shape}")


def evaluated(np_or_fr: Any, program: list[Line], values: list[Any], axes: tuple[int, ...]) -> list[Any]:
    """The values and what the program makes of them."""
    made = list(values)
    for line in program:
        made.append(run_line(np_or_fr, line, made, axes))
    return made


def copied(answers: Any) -> list[Array]:
    return [np.array(a) for a in answers]
