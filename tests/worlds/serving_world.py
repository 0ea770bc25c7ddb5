"""Models to serve, and who asks for them over real sockets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np

import flowrt as fr
from flowrt.base.spec import NAMES
from flowrt.serving.protocol import LENGTH, datatype_of

Array = np.ndarray[Any, Any]

X = np.random.default_rng(5).normal(size=(64, 8)).astype("float32")


def frozen(
    build: Callable[[Any], Any],
    *,
    shape: Any = (None, 8),
    dtype: str = "float32",
    name: str = "m",
    output: str = "y",
) -> Any:
    """The model that computes ``output``, what ``build`` makes of ``x``."""
    with fr.Graph() as graph:
        x = fr.placeholder(dtype, shape, name="x")
        y = build(x)
    with fr.BlockingSession(graph) as session:
        return fr.serving.freeze(session, {"x": x}, {output: y}, name=name)


def doubling(name: str = "m", by: float = 2) -> Any:
    """A model whose rows have the same bits however many run together."""
    return frozen(lambda x: x * by + 1, name=name)


def asking(array: Array, *, name: str = "x", **more: Any) -> dict[str, Any]:
    """A request with one input, written out."""
    data = array.reshape(-1).tolist()
    tensor = {"name": name, "shape": list(array.shape), "datatype": datatype_of(array.dtype), "data": data}
    return {"inputs": [tensor], **more}


async def until(true: Callable[[], bool]) -> None:
    """Let others go on until something is so."""
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0)


class Held:
    """What does what ``function`` does, once it may; meanwhile others are told that it was called."""

    def __init__(self, function: Any) -> None:
        self._function, self.called, self.may = function, threading.Event(), threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        self.called.set()
        assert self.may.wait(30), "it holds the event loop"
        return self._function(*arguments)


class Client:
    """Who asks a server, and looks at the answer."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        async with self.session.get(path, **more) as answer:
            return answer.status, await answer.json()

    async def post(self, body: Any, model: str = "m", **more: Any) -> tuple[int, Any]:
        given = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.post(f"/v2/models/{model}/infer", **given, **more) as answer:
            return answer.status, await answer.json()

    async def infer(self, array: Array, model: str = "m") -> Array:
        """The output ``y``, through JSON, which holds a float's every bit."""
        status, answer = await self.post(asking(array), model)
        assert status == 200, answer
        (output,) = answer["outputs"]
        assert output["name"] == "y"
        dtype = next(dtype for dtype in NAMES if datatype_of(dtype) == output["datatype"])
        return np.array(output["data"], dtype).reshape(output["shape"])

    async def infer_as_bytes(self, array: Array, model: str = "m") -> Array:
        """The same, all tensors as bytes."""
        tensor = {"name": "x", "shape": list(array.shape), "datatype": datatype_of(array.dtype)}
        tensor["parameters"] = {"binary_data_size": array.nbytes}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        path, headers = f"/v2/models/{model}/infer", {LENGTH: str(len(head))}
        async with self.session.post(path, data=head + array.tobytes(), headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            body, count = await answer.read(), int(answer.headers[LENGTH])
        (output,) = json.loads(body[:count])["outputs"]
        assert output["parameters"]["binary_data_size"] == len(body) - count
        return np.frombuffer(body[count:], array.dtype).reshape(output["shape"])


@asynccontextmanager
async def client_of(port: int | None, **more: Any) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", **more) as session:
        yield Client(session)


@asynccontextmanager
async def serving(models: Any, **more: Any) -> AsyncIterator[tuple[Any, Client]]:
    """A server in this process, and who asks it."""
    async with fr.serving.ModelServer(models, port=0, **more) as server, client_of(server.port) as client:
        yield server, client
