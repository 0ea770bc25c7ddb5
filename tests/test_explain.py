from __future__ import annotations

from typing import Any

import flowrt as fr


async def test_explain_names_passes_placement_tapes_and_what_broke_them() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (4,), name="x")
        queue = fr.FIFOQueue(1, "float32", shapes=[(4,)], name="q")
        put = queue.enqueue(fr.tanh(x) + 1.0)
        y = fr.exp(queue.dequeue())
    async with fr.Session(graph) as session:
        text = str(await session.explain([put, y], [x]))
        for part in ("prune", "order_state", "/job:local/task:0/device:cpu:0", "tanh", "tape of", "bytes of arena"):
            assert part in text
        assert "broken by enqueue 'q/enqueue' (" in text
        assert "test_explain.py:" in text
    async with fr.Session(graph, options=fr.Options(tapes=False)) as session:
        assert "no tapes" in str(await session.explain(y))


async def test_explain_says_which_loops_are_one_kernel_and_what_keeps_others_from_it() -> None:
    def loop(turn: Any, start: Any) -> Any:
        return fr.while_loop(lambda i, _: i < 9, lambda i, y: (i + 1, turn(y)), (fr.constant(0), start))[1]

    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None,))
        loops = [
            loop(lambda y: y * 0.5, fr.constant(1.0)),
            loop(lambda y: y * 0.5, fr.ones((1000,))),
            loop(lambda y: fr.tanh(fr.sin(fr.exp(fr.cos(fr.tanh(y))))), fr.ones((7,))),
            loop(lambda y: fr.cumsum(y, 0), fr.ones((10,))),
            loop(lambda y: y * 0.5, x),
        ]
    async with fr.Session(graph) as session:
        told = [str(await session.explain(y)) for y in loops]
    assert "loop 'while_loop' (" in told[0]
    for text, part in zip(told, ("one kernel", "1000 entries", "costly", "has cumsum", "depends on the"), strict=True):
        assert part in next(line for line in text.splitlines() if line.startswith("  loop"))
