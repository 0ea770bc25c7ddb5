"""What a tape computes is the same bits on any number of threads, however they share it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cut_world import are_same, seeded
from tape_world import PlanMaker, divided, tape_of, words

from flowrt.sched.host.lanes import Crew

if TYPE_CHECKING:
    from flowrt.base.plan import Plan

F4 = "float32"
ONE = ("softplus", "exp", "tanh", "sigmoid", "log1p", "sin", "erf", "relu", "square", "negative")
TWO = ("add", "subtract", "multiply", "divide", "maximum", "binary_cross_entropy", "remainder")
MOMENTUM = (  # velocity, gradient, parameter, rate
    ("multiply", (0, 3), F4, ()),
    ("add", (4, 1), F4, ()),
    ("multiply", (5, 3), F4, ()),
    ("subtract", (2, 6), F4, ()),
)


def random_steps(rng: np.random.Generator) -> Plan:
    """A chain of ops over odd sizes, a fused group of what they made, and folds of that along each axis."""
    make = PlanMaker()
    values = [make.feed(F4, (37, 211)), make.feed(F4, (37, 211))]
    rate = make.feed(F4, ())
    values.append(make.node("multiply", *values))
    for _ in range(6):
        if rng.random() < 0.6:
            values.append(make.node(str(rng.choice(ONE)), values[-1]))
        else:
            values.append(make.node(str(rng.choice(TWO)), values[-1], int(rng.choice(values))))
    fused = make.node("fused", *values[-3:], rate, members=MOMENTUM, results=(7, 5), _many=4)
    reductions = [make.node(op, fused, axis=axis, keepdims=False) for op in ("sum", "max") for axis in (0, 1)]
    return make.plan(values[-1], fused, fused + 1, make.node("softmax", fused, axis=-1), *reductions)


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_make_the_same_bits_on_any_number_of_threads(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = seeded("threads", seed)
    plan = random_steps(rng)
    feeds: list[Any] = [rng.normal(size=(37, 211)).astype(F4) for _ in range(2)]
    feeds.append(np.asarray(0.9, F4))
    expected = tape_of(plan, *feeds).run(words(), feeds)
    for threads in range(2, 9):
        crew = Crew(threads, "sweep")
        try:
            for times in (None, seed):  # launches that all seem long, and others that seem so
                tape = divided(tape_of(plan, *feeds), plan, crew, monkeypatch, times)
                for _ in range(3):
                    assert are_same(tape.run(words(), feeds, crew=crew), expected), f"{threads} threads"
        finally:
            crew.close()
