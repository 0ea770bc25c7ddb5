"""PyTorch's side of perf/serving.py: the same protocol by aiohttp, and one forward pass for each request."""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np
import torch
import uvloop
from aiohttp import web
from sides.serving import data as d


def network(case: str) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for matrix in d.weights(case):
        layer = torch.nn.Linear(*matrix.shape, bias=False)
        layer.weight = torch.nn.Parameter(torch.from_numpy(np.ascontiguousarray(matrix.T)))
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1], torch.nn.Softmax(dim=1)).eval()


async def main(case: str, variant: str) -> None:
    torch.set_num_threads(1)
    forward = network(case)

    async def infer(request: web.Request) -> web.Response:
        body, count = await request.read(), int(request.headers[d.LENGTH])
        (tensor,) = json.loads(body[:count])["inputs"]
        given = torch.frombuffer(bytearray(body[count:]), dtype=torch.float32).reshape(tensor["shape"])
        with torch.inference_mode():
            answer = forward(given).numpy()
        output = {"name": "y", "datatype": "FP32", "shape": list(answer.shape)}
        output["parameters"] = {"binary_data_size": answer.nbytes}
        head = json.dumps({"model_name": "m", "outputs": [output]}).encode()
        return web.Response(body=head + answer.tobytes(), headers={d.LENGTH: str(len(head))})

    with torch.inference_mode():
        forward(torch.from_numpy(d.rows()))
    application = web.Application()
    application.add_routes([web.post("/v2/models/m/infer", infer)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
