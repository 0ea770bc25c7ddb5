"""Random programs of loops and branches: tapes, the machine, the primitives and Python itself must agree."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest

import flowrt as fr
import flowrt.sched.executor
from flowrt.base.device import Device
from flowrt.passes import StepTerms, compile_step
from flowrt.passes.lower import lower
from flowrt.sched.executor import Executor
from flowrt.sched.host.host import Host, RunContext
from flowrt.session.runners import supports

Program: TypeAlias = "tuple[tuple[Any, ...], ...]"

TABLE = np.arange(300) * 7 % 41
OPS: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "larger": fr.maximum,
    "negative": lambda a, b: -a,
    "halved": lambda a, b: (a - b) // 2,
    "looked up": lambda a, b: fr.take(TABLE, a % 300) - fr.take(b, a % 4 - 2),
    "constant": lambda a, b: a * 0 + np.array([3, -2]),
    "either": lambda a, b: fr.where(a > b, a, b + 1),
}


def draw(rng: random.Random, known: int, depth: int) -> Program:
    """Some lines, each of which makes one value of those before it."""
    lines: list[tuple[Any, ...]] = []
    for _ in range(rng.randint(1, 3 if depth == 2 else 2)):
        kind = rng.choice(["op", "while", "scan", "cond"] if depth else ["op"])
        at = [rng.randrange(known + len(lines)) for _ in range(3)]
        if kind == "op":
            lines.append((rng.choice(list(OPS)), *at))
        elif kind == "while":
            turns = rng.choice([0, 1, 2, 3])
            lines.append((kind, *at, turns, draw(rng, known + len(lines) + 1, depth - 1), rng.random() < 0.3))
        elif kind == "scan":
            lines.append((kind, *at, rng.random() < 0.5, draw(rng, known + len(lines) + 2, depth - 1)))
        else:
            inner = [draw(rng, known + len(lines), depth - 1) for _ in range(2)]
            lines.append((kind, *at, *inner))
    return tuple(lines)


def follow(program: Program, values: Sequence[Any]) -> list[Any]:
    """What the program makes of ``values``: tensors in a graph, arrays at once."""
    known = list(values)
    for kind, a, b, c, *more in program:
        x, y, z = known[a], known[b], known[c]
        if kind == "while":
            known.append(_while(known, x, y, *more))
        elif kind == "scan":
            known.append(_scan(known, x, y, z, *more))
        elif kind == "cond":
            first, second = more
            before = list(known)
            known.append(
                fr.cond(
                    fr.sum(x - y) > 0,
                    lambda p=first, k=before: follow(p, k)[-1],
                    lambda p=second, k=before: follow(p, k)[-1],
                )
            )
        else:
            known.append(OPS[kind](x, y))
    return known


def _while(known: Sequence[Any], x: Any, y: Any, turns: int, body: Program, limited: bool) -> Any:
    before = list(known)
    return fr.while_loop(
        lambda i, v: (i < turns) if turns != 2 else fr.logical_and(i < 5, fr.sum(v) < 40),
        lambda i, v: (i + 1, follow(body, [*before, v])[-1]),
        (np.int64(0), x),
        maximum_iterations=2 if limited else 6,
    )[1]


def _scan(known: Sequence[Any], x: Any, y: Any, z: Any, reverse: bool, body: Program) -> Any:
    before = list(known)

    def turn(carry: Any, row: Any) -> Any:
        made = follow(body, [*before, carry, row])[-1]
        return made, made - row

    last, stacked = fr.scan(turn, x, fr.stack([y, z, x]), reverse=reverse)
    return last + stacked[0] - fr.sum(stacked, axis=0)


DEVICE = Device.parse("/job:local/task:0/device:cpu:0")


async def answers(host: Host, program: Program, fed: Sequence[Any], optimize: bool) -> list[list[Any]]:
    """The last value by a tape, by the machine node by node, and by the primitives."""
    with fr.Graph() as graph:
        inputs = [fr.placeholder("int64", (2,)) for _ in fed]
        last = follow(program, inputs)[-1]
    made = compile_step(
        graph, [last], [], inputs, StepTerms(devices=[DEVICE], default=DEVICE, supports=supports, optimize=optimize)
    )
    (plan,) = made.plans.values()
    lowered = lower(plan, everything=True)
    assert not any(node.op in ("loop", "cond") for node in lowered.nodes)
    ways = [Executor(plan, host), Executor(plan, host, tapes=False), Executor(lowered, host, tapes=not optimize)]
    return [await way.run(fed, RunContext(("random", 0), 0, 0)) for way in ways]


@pytest.mark.parametrize("block", range(20))
async def test_random_programs_of_loops_and_branches_agree_whoever_runs_them(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flowrt.sched.executor, "INLINE_SECONDS", math.inf)  # a hop to a lane costs more than all else
    host = Host(threads=1)
    try:
        for seed in range(25 * block, 25 * (block + 1)):
            rng = random.Random(seed)
            fed = [np.array([rng.randint(-5, 5), rng.randint(-5, 5)]) for _ in range(2)]
            program = draw(rng, len(fed), depth=2)
            wanted = np.asarray(follow(program, fed)[-1])
            for way, (got,) in zip(
                ("tape", "machine", "lowered"), await answers(host, program, fed, seed % 2 == 0), strict=True
            ):
                np.testing.assert_array_equal(got, wanted, err_msg=f"seed {seed}, {way}: {program}")
    finally:
        await host.aclose()
