"""The face that models have to HTTP.

Law: it decides nothing about models. Of a request no more is read than is allowed, and no more at once than may wait;
who has to have a token shows it first. What is long is read and written out in a lane, so that others are answered
meanwhile. What is HTTP is answered in JSON, an error as ``{"error": "..."}``; what went wrong on this side, and that
alone, is told to the log, and not to who asks.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from flowrt.base.errors import (
    BrokenStream,
    ClosedError,
    FeedError,
    FlowrtError,
    GraphError,
    ResourceError,
    StepTimeout,
    WouldBlock,
)
from flowrt.base.package import VERSION
from flowrt.sched.host.lanes import Lanes
from flowrt.serving import metrics, protocol

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from flowrt.net.door.tls import Keys
    from flowrt.serving.batching import Batching
    from flowrt.serving.endpoint import Endpoint
    from flowrt.serving.model import Model

T = TypeVar("T")
RETRY_SECONDS = 1  # after which who was refused may ask again
IDLE_SECONDS = 75.0  # of a connection on which no whole request comes
_log = logging.getLogger(__name__)
_http_log = logging.getLogger(f"{__name__}.requests")  # aiohttp's
_http_log.addFilter(lambda record: not _is_of_who_asked(record))
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Face:
    """Answers for ``endpoints``, once it is ``ready``."""

    def __init__(self, endpoints: Mapping[str, Endpoint], batching: Batching, token: str | None, max_body: int) -> None:
        self.ready = False
        self._endpoints, self._batching, self._token, self._max_body = endpoints, batching, token, max_body
        self._here = 0  # bytes of requests and outputs that are not written out yet, and of long answers being sent
        self._lane, self._turn = Lanes(1, "serving"), asyncio.Lock()
        self.application = web.Application(middlewares=[self._answered], client_max_size=max_body)
        one = "/v2/models/{model}"
        self.application.add_routes(
            [
                *(web.post(f"{path}/infer", self._infer) for path in (one, one + "/versions/{version}")),
                web.get("/v2", self._server),
                web.get("/v2/health/live", self._live),
                web.get("/v2/health/ready", self._is_ready),
                web.get("/metrics", self._metrics),
                *(web.get(f"{path}/ready", self._is_ready) for path in (one, one + "/versions/{version}")),
                *(web.get(path, self._metadata) for path in (one, one + "/versions/{version}")),
            ]
        )

    def close(self) -> None:
        """End what reads and writes beside the event loop."""
        self._lane.close()

    @asynccontextmanager
    async def listening(self, host: str, port: int, tls: Keys | None) -> AsyncIterator[int]:
        """Listen at ``host:port`` (0: any free one) while the block runs, then end what was asked; yields the port.

        Raises `ResourceError` where it cannot listen.
        """
        runner = web.AppRunner(
            self.application,
            handler_cancellation=True,
            access_log=None,
            logger=_http_log,
            shutdown_timeout=self._batching.timeout,
            keepalive_timeout=IDLE_SECONDS,
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port, ssl_context=_context(tls))
            try:
                await site.start()
            except (OSError, OverflowError) as error:
                raise ResourceError(f"cannot listen on {host}:{port}: {error}; port 0 takes any free one") from error
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()

    # What is asked

    async def _server(self, request: web.Request) -> web.StreamResponse:
        about = {"name": "flowrt", "version": VERSION, "extensions": protocol.EXTENSIONS}
        return web.json_response(about)

    async def _live(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"live": True})

    async def _is_ready(self, request: web.Request) -> web.StreamResponse:
        if "model" in request.match_info:
            self._endpoint(request)
        return web.json_response({"ready": self.ready}, status=200 if self.ready else 503)

    async def _metadata(self, request: web.Request) -> web.StreamResponse:
        endpoint = self._endpoint(request)
        return web.json_response(protocol.described(endpoint.current.model) | {"name": request.match_info["model"]})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        waiting = {name: (at.current.waiting, at.current.waiting_bytes) for name, at in self._endpoints.items()}
        text = metrics.text({name: at.metrics for name, at in self._endpoints.items()}, waiting)
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        endpoint = self._endpoint(request)
        with self._room_for(request, endpoint):
            body = await self._body(request)
            try:
                asked = await self._read(body, request.headers.get(protocol.LENGTH), endpoint)
            except FeedError:
                endpoint.metrics.note_ended("invalid", 0)
                raise
            del body
            answer, headers = await self._written(request, asked, *await endpoint.infer(asked.values))
        return await self._sent(request, answer, headers)

    def _endpoint(self, request: web.Request) -> Endpoint:
        name, version = request.match_info["model"], request.match_info.get("version")
        endpoint = self._endpoints.get(name)
        if endpoint is None:
            raise _Rejected(404, f"there is no model {name!r:.200}; there are {', '.join(self._endpoints)}")
        if not self.ready:
            raise ClosedError("the server is starting, or about to end")
        if version is not None and version != endpoint.current.model.version:
            raise _Rejected(404, f"the model {name!r} is served in version {endpoint.current.model.version!r}")
        return endpoint

    @contextmanager
    def _room_for(self, request: web.Request, endpoint: Endpoint) -> Iterator[None]:
        """Count a request's body among those that are here, if there is room."""
        nbytes = request.content_length
        if nbytes is None:
            raise _Rejected(411, "say the length of the request, by the header Content-Length")
        if nbytes > self._max_body:
            raise _Rejected(413, f"the request has {nbytes} bytes, at most {self._max_body} are taken")
        if "Content-Encoding" in request.headers:
            nbytes = self._max_body  # it may come to that
        if self._here and self._here + nbytes > self._batching.max_bytes:
            endpoint.metrics.note_ended("overload", 0)
            raise WouldBlock(
                f"requests and answers of {self._here} bytes are here, and there is no room for more: ask again later"
            )
        with self._counted(nbytes):
            yield

    @contextmanager
    def _counted(self, nbytes: int) -> Iterator[None]:
        """Count bytes that are here; what was admitted is, even beyond the room, and keeps others out."""
        self._here += nbytes
        try:
            yield
        finally:
            self._here -= nbytes

    async def _body(self, request: web.Request) -> bytearray:
        body = bytearray()
        try:
            async with asyncio.timeout(self._batching.timeout):
                async for chunk in request.content.iter_any():
                    body += chunk
                    if len(body) > self._max_body:
                        raise _Rejected(413, f"the request has more than {self._max_body} bytes")
        except TimeoutError:
            raise _Rejected(408, f"the request did not come within {self._batching.timeout} s") from None
        except web.RequestPayloadError as error:
            raise _Rejected(400, f"the request cannot be read: {error}") from None
        return body

    async def _read(self, body: bytearray, length: str | None, endpoint: Endpoint) -> protocol.Inquiry:
        """What ``body`` asks of the version of a model that is to answer it. Raises `FeedError`."""
        while True:
            model = endpoint.current.model
            read = partial(protocol.read, body, length, model, self._max_body)
            asked = await self._beside(read) if len(body) > protocol.LONG else read()
            if endpoint.current.model is model:  # else another took its place meanwhile, which may take something else
                return asked

    async def _beside(self, work: Callable[[], T]) -> T:
        """What ``work`` comes to, in the lane; raises `StepTimeout` where its turn does not come in time.

        It waits here and not in the lane, where nobody could give it up.
        """
        try:
            async with asyncio.timeout(self._batching.timeout):
                await self._turn.acquire()
        except TimeoutError:
            raise StepTimeout(f"others were read and written out for {self._batching.timeout} s") from None
        try:
            return await self._lane.run(work)
        finally:
            self._turn.release()

    # What is answered

    async def _written(
        self, request: web.Request, asked: protocol.Inquiry, model: Model, outputs: Mapping[str, Any]
    ) -> tuple[bytes, Mapping[str, str]]:
        """An answer and its headers; the outputs count among what is here until they are written out."""
        write = partial(protocol.written, asked, request.match_info["model"], model.version, outputs)
        with self._counted(sum(np.asarray(output).nbytes for output in outputs.values())):
            parts, length = await self._beside(write) if protocol.is_long(asked, outputs) else write()
        headers = {"Content-Type": "application/json"}
        if length is not None:
            headers = {"Content-Type": "application/octet-stream", protocol.LENGTH: str(length)}
        return b"".join(parts), headers

    async def _sent(self, request: web.Request, body: bytes, headers: Mapping[str, str]) -> web.StreamResponse:
        """An answer; one that is long counts among what is here, for as long as who asked may take to read it."""
        answer = web.Response(body=body, headers=headers)
        if len(body) <= protocol.LONG:
            return answer
        with self._counted(len(body)):
            try:
                async with asyncio.timeout(self._batching.timeout):
                    await answer.prepare(request)
                    await answer.write_eof()
            except TimeoutError:
                _log.warning("%s %s: the answer was not read", request.method, request.raw_path)
                if request.transport is not None:
                    request.transport.abort()
            except ConnectionError:  # who asked is gone
                pass
        return answer

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check_token(request)
            return await handler(request)
        except _Rejected as error:
            return _error(error.status, str(error))
        except web.HTTPException as error:
            return _error(error.status, error.reason)
        except FlowrtError as error:
            status = _status(error)
            if status < 500:
                return _error(status, str(error))
            _log.warning("%s %s: %s", request.method, request.raw_path, error)
            return _error(status, str(error) if status == 503 else "there was no answer")
        except Exception:
            _log.exception("%s %s", request.method, request.raw_path)
            return _error(500, "there was no answer")

    def _check_token(self, request: web.Request) -> None:
        about_models = "model" in request.match_info
        if self._token is None or (request.match_info.handler in (self._live, self._is_ready) and not about_models):
            return
        scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
        fits = hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), self._token.encode())
        if scheme.lower() != "bearer" or not fits:
            raise _Rejected(401, "show the token: Authorization: Bearer TOKEN")


def _is_of_who_asked(record: logging.LogRecord) -> bool:
    """Whether aiohttp tells of what was sent that is no HTTP, which it does with a stack for each."""
    error = record.exc_info[1] if record.exc_info else None
    return isinstance(error, (HttpProcessingError, web.RequestPayloadError))


class _Rejected(Exception):
    """A request that comes to nothing, and the status that says so."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def _status(error: FlowrtError) -> int:
    match error:
        case WouldBlock() | ClosedError() | ResourceError():
            return 503
        case StepTimeout():
            return 504
        case FeedError() | GraphError() | BrokenStream():
            return 400
    return 500


def _error(status: int, text: str) -> web.Response:
    headers = {"Retry-After": str(RETRY_SECONDS)} if status == 503 else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response({"error": text}, status=status, headers=headers)


def _context(keys: Keys | None) -> ssl.SSLContext | None:
    """What connections begin with: the keys as they lie in their folder at that moment."""
    if keys is None:
        return None

    def newest(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = keys.contexts().node

    context = keys.contexts().node
    context.sni_callback = newest
    return context
