"""Models over HTTP, as a part of a program that awaits: what it serves, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import ClosedError, GraphError, user_site
from flowrt.base.locating import fitting
from flowrt.base.plain import is_number, is_whole
from flowrt.base.tracebacks import brief
from flowrt.misuse import AsyncOnly
from flowrt.net.door.tls import Keys
from flowrt.net.door.tokens import checked
from flowrt.serving.batching import Batching
from flowrt.serving.endpoint import Endpoint
from flowrt.serving.http import Face
from flowrt.serving.model import Model
from flowrt.serving.signature import check_name

if TYPE_CHECKING:
    from flowrt.session.options import Options

LOOK_SECONDS = 1.0  # between two looks at a model's file


class ModelServer(AsyncOnly):
    """``async with fr.serving.ModelServer("digits.flowrt") as server:`` answers while the block runs.

    ``models`` is a `Model` or the path of a file, or several: a list, or a mapping of names to them; by itself a model
    has its own name, a file its name without the ending. A file that is replaced is served anew, without a pause. It
    listens at ``host`` and ``port`` (0: any free one, which ``server.port`` then is; None: nowhere, for `infer` and
    `application` alone). Who asks has to bring the ``token``, where there is one; ``tls`` is a folder of keys, of which
    who asks has to have some, too. ``max_body`` bounds what one request may be, in bytes. Leaving the block answers all
    that was asked, and lets nothing more in. Raises `GraphError` for what makes no sense, `AuthenticationError` for a
    token that is none, or keys that cannot be used.
    """

    WHAT = "fr.serving.ModelServer"

    @fitting
    def __init__(
        self,
        models: Model | str | PathLike[str] | Sequence[Any] | Mapping[str, Any],
        *,
        host: str = "127.0.0.1",
        port: int | None = 8500,
        batching: Batching | None = None,
        options: Options | None = None,
        token: str | None = None,
        tls: str | PathLike[str] | None = None,
        max_body: int = 16 << 20,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        for name, value, fits, wanted in (
            ("batching", batching, batching is None or isinstance(batching, Batching), "an fr.serving.Batching"),
            ("max_body", max_body, is_whole(max_body, 1), "a number of bytes from 1 up"),
            ("look_seconds", look_seconds, is_number(look_seconds) and look_seconds > 0, "seconds above 0"),
            ("token", token, token is None or isinstance(token, str), "a text"),
            ("tls", tls, tls is None or isinstance(tls, (str, PathLike)), "a folder"),
        ):
            if not fits:
                raise GraphError(f"{user_site()}: ModelServer: {name} is {wanted}, got {value!r:.200}")
        self._batching = batching or Batching()
        self.endpoints = {name: Endpoint(source, self._batching, options) for name, source in _by_name(models).items()}
        self._host, self._port, self._look_seconds = host, port, look_seconds
        self._face = Face(self.endpoints, self._batching, None if token is None else checked(token), max_body)
        self._tls = None if tls is None else Keys(tls)
        self._opened, self._was_opened = AsyncExitStack(), False

    @property
    def port(self) -> int | None:
        """Where it listens."""
        return self._port

    @property
    def application(self) -> Any:
        """What answers, for `add_subapp` of an aiohttp application of your own."""
        return self._face.application

    @brief
    async def __aenter__(self) -> ModelServer:
        if self._was_opened:
            raise ClosedError(f"{user_site()}: a ModelServer is opened once; make another one")
        self._was_opened = True
        try:
            self._opened = await self._open()
        except BaseExceptionGroup as errors:  # of one, as a task group raises it
            raise errors.exceptions[0] from None
        self._face.ready = True
        return self

    async def _open(self) -> AsyncExitStack:
        async with AsyncExitStack() as opened:
            opened.callback(self._face.close)
            tasks = await opened.enter_async_context(asyncio.TaskGroup())
            following = await opened.enter_async_context(_Ending())
            for endpoint in self.endpoints.values():
                opened.callback(endpoint.close)
                await endpoint.open(tasks)
                following.add(tasks.create_task(endpoint.follow(tasks, self._look_seconds)))
            if self._port is not None:
                self._port = await opened.enter_async_context(self._face.listening(self._host, self._port, self._tls))
            return opened.pop_all()

    async def __aexit__(self, *error: object) -> None:
        self._face.ready = False
        await self._opened.aclose()

    @brief
    async def infer(self, values: Mapping[str, Any], *, model: str | None = None) -> dict[str, Any]:
        """The outputs by name for inputs by name, without HTTP: joined with what others ask, and bounded likewise.

        ``model`` says which, where there are several. Raises `FeedError` for what does not fit, `WouldBlock` where too
        much waits already, `StepTimeout` where it takes too long.
        """
        name = next(iter(self.endpoints)) if model is None and len(self.endpoints) == 1 else model
        if name not in self.endpoints:
            raise GraphError(f"{user_site()}: no model is called {name!r}; there are {', '.join(self.endpoints)}")
        return (await self.endpoints[name].infer(values))[1]


class _Ending:
    """Tasks that end when the block is left."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, task: asyncio.Task[None]) -> None:
        self._tasks.append(task)

    async def __aenter__(self) -> _Ending:
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()


def _by_name(models: Any) -> dict[str, Model | Path]:
    if isinstance(models, Mapping):
        found = list(models.items())
    else:
        several = models if isinstance(models, Sequence) and not isinstance(models, str) else [models]
        found = [(each.name if isinstance(each, Model) else _stem(each), each) for each in several]
    for name, each in found:
        check_name(name, "a model")
        if not isinstance(each, Model):
            _stem(each)
    if not found or len(dict(found)) < len(found):
        names = ", ".join(name for name, _ in found) or "none"
        raise GraphError(f"{user_site()}: a server has models of different names, got {names}; name them: {{'a': ...}}")
    return {name: each if isinstance(each, Model) else Path(each) for name, each in found}


def _stem(path: Any) -> str:
    """The name of a file without its ending."""
    if isinstance(path, (str, PathLike)):
        return Path(path).stem
    raise GraphError(f"{user_site()}: a server has an fr.serving.Model, or the path of one, got {path!r:.200}")
