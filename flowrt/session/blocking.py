"""The session for scripts and notebooks: the same session on an event loop of its own, in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from flowrt.base.errors import ClosedError, GraphError, from_site, no_thread, user_site
from flowrt.base.locating import fitting
from flowrt.base.telling import telling
from flowrt.base.tracebacks import brief, shorten
from flowrt.kernels.store.locking import while_wanted
from flowrt.misuse import standing
from flowrt.sched.tape.interrupts import Unbroken
from flowrt.session.interrupts import InterruptWatch
from flowrt.session.session import Session

if TYPE_CHECKING:
    from types import TracebackType

    from flowrt.session.explain import Explanation
    from flowrt.session.step import CompiledStep

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread. `close` stops it and waits for the thread."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._gate = threading.Lock()  # what is called before the loop is told to stop gets its answer
        self._closed = False
        self._given_up: object = None  # the work that an interrupt ended last
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._main, name="flowrt-loop", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise no_thread(error) from error
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                self._loop = runner.get_loop()
                self._stop = asyncio.Event()
                self._loop.call_soon(self._started.set)
                with while_wanted(self._is_wanted):
                    runner.run(self._stop.wait())
        except BaseException as error:
            if self._started.is_set():
                raise
            self._failure = error
            self._started.set()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop, which runs in its own thread."""
        return self._loop

    @property
    def is_ours(self) -> bool:
        """Whether this process started it, and did not come of a fork of the one that did."""
        return self._process == os.getpid()

    def _is_wanted(self) -> bool:
        """Whether somebody waits for what runs on the loop now, though it awaits nothing and cannot be cancelled."""
        task = asyncio.current_task(self._loop)
        return task is None or task.get_coro() is not self._given_up

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it; an interrupt of the calling thread cancels it."""
        future: Any = None
        try:
            with Unbroken():
                future = self._submit(work)
            answer: T = future.result()
        except BaseException:
            if future is None:
                work.close()
                raise
            if future.cancelled():
                raise ClosedError(f"{user_site()}: the session was closed meanwhile") from None
            self._given_up = work
            future.cancel()
            raise
        finally:
            del future  # its error's frames refer to this one
        return answer

    def _submit(self, work: Coroutine[Any, Any, T]) -> Any:
        if not self.is_ours:
            raise ClosedError(
                f"{user_site()}: the session belongs to the process that forked this one; open another here"
            )
        if threading.current_thread() is self._thread:
            raise GraphError(f"{user_site()}: this runs on the session's own event loop, and would wait for itself")
        with from_site(user_site()), self._gate:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        raise ClosedError(f"{user_site()}: the session is closed; use it inside its `with` block")

    def close(self) -> None:
        """Stop the loop, which cancels what still runs on it, and wait for the thread. Twice is once."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes uvloop's event loops where that is installed; None says asyncio's own.

    libuv aborts the process at the close of a file numbered 0, 1 or 2, as files are where a program was started with
    its standard streams closed.
    """
    try:
        import uvloop

        for stream in range(3):
            os.fstat(stream)
    except (ImportError, OSError):
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class BlockingSession:
    """`Session` without ``await``: ``with BlockingSession(graph) as session: session.run(...)``.

    Takes the arguments of `Session`. Works where an event loop already runs (notebooks). Threads may share it. Ctrl-C
    comes when the step that runs is over, or stops it where that takes longer than half a second.
    """

    @fitting
    def __init__(self, graph: Any, cluster: Any = None, **arguments: Any) -> None:
        self._session = Session(graph, cluster, **arguments)
        self._thread: LoopThread | None = None
        self._interrupts: InterruptWatch | None = None

    @telling
    def __repr__(self) -> str:
        return standing(self._session)[1:-1].replace("fr.Session", "fr.BlockingSession", 1)

    @brief
    def __enter__(self) -> BlockingSession:
        if self._thread is not None:
            raise ClosedError(f"{user_site()}: a session is opened once; make another one")
        try:
            with Unbroken():  # else a thread that has begun would be nobody's to end
                self._thread = LoopThread()
                self._interrupts = InterruptWatch(self._thread.loop)
            self._interrupts.open()
            self._call(self._session.__aenter__())
        except BaseException:
            self._end()
            raise
        return self

    @brief
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._call(self._session.__aexit__(kind, error, trace))
        finally:
            self._end()

    @brief
    async def __aenter__(self) -> NoReturn:
        raise GraphError(
            f"{user_site()}: open fr.BlockingSession with `with`; where you can await, use "
            "`async with fr.Session(graph) as session`"
        )

    async def __aexit__(self, *error: object) -> None:
        """Never reached: nothing was opened."""

    def __getattr__(self, name: str) -> NoReturn:
        if hasattr(Session, name) and not name.startswith("_"):
            raise AttributeError(f"fr.BlockingSession has no {name!r}; fr.Session has, inside `async with`")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _end(self) -> None:
        if self._thread is not None and self._interrupts is not None:
            self._thread.close()
            self._interrupts.close()

    @fitting
    def run(self, fetches: Any, feeds: Mapping[Any, Any] | None = None, *, timeout: float | None = None) -> Any:
        """`Session.run`, waiting for the answer; a step that is one short tape runs in the caller's thread."""
        try:
            if timeout is None and self._thread is not None and self._thread.is_ours:
                return self._session.run_here(fetches, feeds, self._call)
            return self._call(self._session.run(fetches, feeds, timeout=timeout))
        except BaseException as error:
            shorten(error)
            raise

    @fitting
    def compile(self, fetches: Any, feeds: Sequence[Any] = ()) -> Callable[..., Any]:
        """`Session.compile`, as a plain callable; a step that is one short tape runs in the caller's thread."""

        async def make() -> CompiledStep:
            return self._session.compile(fetches, feeds)

        return self._call(make()).blocking(self._call)

    @brief
    def save(self) -> int:
        """`Session.save`."""
        return self._call(self._session.save())

    @brief
    def restore(self, step: int | None = None) -> int:
        """`Session.restore`."""
        return self._call(self._session.restore(step))

    @brief
    def reset(self, container: str | None = None) -> None:
        """`Session.reset`."""
        self._call(self._session.reset(container))

    @brief
    def explain(self, fetches: Any, feeds: Mapping[Any, Any] | Sequence[Any] | None = None) -> Explanation:
        """`Session.explain`."""
        return self._call(self._session.explain(fetches, feeds))

    @fitting
    @contextmanager
    def tracing(self, path: str | os.PathLike[str], *, slices: int = 500_000) -> Iterator[None]:
        """`Session.tracing`, in a plain ``with``."""
        with from_site(user_site()):
            traced = self._session.tracing(path, slices=slices)
        self._call(traced.__aenter__())
        try:
            yield
        except BaseException as error:
            self._call(traced.__aexit__(type(error), error, error.__traceback__))
            raise
        self._call(traced.__aexit__(None, None, None))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._thread is None:
            work.close()
            raise ClosedError(
                f"{user_site()}: the session is not open yet; use it inside `with fr.BlockingSession(graph) as session`"
            )
        return self._thread.call(work)
