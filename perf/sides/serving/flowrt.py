"""flowrt's side of perf/serving.py: a `ModelServer`, with batches or without."""

from __future__ import annotations

import asyncio
import json
import sys

from sides.serving import data as d

import flowrt as fr
from flowrt.session.blocking import loop_factory


def model(case: str, quantize: str | None) -> fr.serving.Model:
    *hidden, last = d.weights(case)
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 784), name="x")
        value = x
        for matrix in hidden:
            value = fr.nn.relu(value @ fr.Variable(matrix))
        scores = fr.nn.softmax(value @ fr.Variable(last))
    with fr.BlockingSession(graph) as session:
        return fr.serving.freeze(session, {"x": x}, {"y": scores}, name="m", quantize=quantize)


async def main(case: str, variant: str) -> None:
    settings = {
        "alone": fr.serving.Batching(max_batch=1),
        "batches": fr.serving.Batching(max_batch=64, max_delay=0.002),
        "int8": fr.serving.Batching(max_batch=64, max_delay=0.002),
        "at once": fr.serving.Batching(max_batch=64, max_delay=0.0),
    }[variant]
    served, options = model(case, "int8" if variant == "int8" else None), fr.Options(threads=1)
    async with fr.serving.ModelServer(served, port=0, batching=settings, options=options) as server:
        print(json.dumps({"port": server.port}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main(*sys.argv[1:]))
