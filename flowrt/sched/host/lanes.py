"""The threads that kernels run in: as many as the process may use cores, and never abandoned.

Law: only this file and the blocking session own threads. A kernel cannot be interrupted, so whoever waits for one waits
until it has returned, also when cancelled meanwhile. Lanes run Python that calls kernels; the crew's helpers never
leave compiled code, and share the work of tapes that a lane or a caller runs.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

import numpy as np

from flowrt.base.errors import ClosedError, no_thread
from flowrt.kernels.launch import ENTRY_TYPE
from flowrt.kernels.run import board as at
from flowrt.kernels.store.parts import LOOP_PARTS
from flowrt.sched.host.arena import local_room
from flowrt.sched.host.shielded import shielded
from flowrt.usable import usable_cores

T = TypeVar("T")
Array: TypeAlias = "np.ndarray[Any, Any]"

NOBODY = -(1 << 40)  # sleepers: however many add themselves

this_thread = threading.get_ident
main_thread = threading.main_thread


def aligned_zeros(words: int) -> Array:
    """Zeroed words that begin at a cache line that nobody else uses."""
    memory = np.zeros(words + at.BOARD_ALIGNMENT // 8, np.int64)
    start = -int(memory.ctypes.data) % at.BOARD_ALIGNMENT // 8
    return memory[start : start + words]


class Crew:
    """Helper threads that run compiled code alone: they take part in the tapes that others run, and sleep in between.

    Who runs a tape with them needs the address of their `board`; the loop takes one of its slots for the run. Nobody
    waits for a helper that has not begun a chunk of work. The threads start when the board is first asked for and end
    with `close`; in a forked child there are none.
    """

    def __init__(
        self, threads: int, name: str = "helper", *, patience: float = 100e-6, empty: Callable[..., Array] = np.empty
    ) -> None:
        self.threads = threads
        self._name, self._patience = name, patience
        self._helpers: list[threading.Thread] = []
        self._words: Array | None = None
        self._board = 0
        self._close_pipe: weakref.finalize[..., Any] | None = None
        self._lock = threading.Lock()
        self._closed = threads < 2
        self._local, self.local_bytes = np.zeros(0, np.int64), 0
        self._empty = empty
        if not self._closed:
            _crews.add(self)

    @property
    def board(self) -> int:
        """The address of what the threads share; 0 where there is no one to help. Whoever uses it keeps the crew."""
        if self._words is None and not self._closed:
            self._start()
        return 0 if self._closed else self._board

    def local(self, nbytes: int) -> Array:
        """Memory of at least ``nbytes`` for each helper, the same for all runs: a helper has one chunk at a time."""
        room = local_room(nbytes, self.threads - 1)
        if self.local_bytes < room:
            memory = self._empty((room,), np.dtype(np.uint8))
            start = -int(memory.ctypes.data) % at.BOARD_ALIGNMENT
            self._local = memory[start : start + room - at.BOARD_ALIGNMENT].view(np.int64)
            self.local_bytes = room
        return self._local

    def _start(self) -> None:
        with self._lock:
            if self._words is not None or self._closed:
                return
            help_out, count = ENTRY_TYPE(LOOP_PARTS["help"].address()), 2 * self.threads
            try:
                read_end, write_end = os.pipe()
            except OSError:  # there can be no more files: whoever runs a tape does so alone
                return
            words = aligned_zeros(at.SLOT + at.SLOT_WORDS * count)
            words[: at.PATIENCE + 1] = (read_end, write_end, self.threads, count, int(self._patience * 1e9))
            for lane in range(1, self.threads):
                arguments = (int(words.ctypes.data), lane, 0, 0)
                # a daemon, since a process that ends waits for others before it may be told to close this crew
                name = f"flowrt-{self._name}-{lane}"
                helper = threading.Thread(target=help_out, args=arguments, name=name, daemon=True)
                try:
                    helper.start()
                except RuntimeError:  # there can be no more: those that there are have the work of all
                    break
                self._helpers.append(helper)
            self._close_pipe = weakref.finalize(self, _close_both, read_end, write_end)
            self._close_pipe.atexit = False  # the threads end first
            self._words, self._board = words, int(words.ctypes.data)

    def close(self) -> None:
        """End the threads and wait for them; runs under way go on alone. Closing twice is closing once."""
        with self._lock:
            self._closed = True
            words, close_pipe = self._words, self._close_pipe
            if words is None or close_pipe is None:
                return
            self._dismiss(words)
            if self._helpers:
                os.write(int(words[at.WRITE_END]), bytes(len(self._helpers)))
            while self._helpers:
                self._helpers.pop().join()
            if not words[at.SLOT + at.TAKEN :: at.SLOT_WORDS].any():  # else a run might still write to the pipe, which
                close_pipe()  # ends with the crew then

    def forget(self) -> None:
        """In a forked child: the threads are not here, and the pipe is the parent's too."""
        self._closed, self._helpers, self._lock = True, [], threading.Lock()
        if self._words is not None:
            self._dismiss(self._words)

    def _dismiss(self, words: Array) -> None:
        """Have nobody count on the threads any more."""
        words[at.CLOSED] = 1
        words[at.ASLEEP] = NOBODY


def _close_both(*ends: int) -> None:
    for end in ends:
        os.close(end)


_crews: weakref.WeakSet[Crew] = weakref.WeakSet()


def _forget_crews() -> None:
    for crew in _crews:
        crew.forget()


os.register_at_fork(after_in_child=_forget_crews)


class _Work:
    """A call for a lane, and what came of it."""

    __slots__ = ("_answer", "_arguments", "_error", "_function")

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments
        self._answer: Any = None
        self._error: BaseException | None = None

    def carry_out(self) -> None:
        """Make the call, in a lane."""
        arguments, self._arguments = self._arguments, ()
        try:
            self._answer = self._function(*arguments)
        except BaseException as error:  # whoever waits is told, whatever it is
            self._error = error
        del arguments  # who waits may be told before this thread is done
        self._tell()

    def _tell(self) -> None:
        """Have who waits go on."""
        raise NotImplementedError

    def _outcome(self, interrupt: BaseException | None) -> Any:
        """The answer; raises what the call raised, and what came meanwhile for who waited."""
        answer, self._answer = self._answer, None
        failure, self._error = self._error, None
        try:
            if interrupt is not None:
                raise interrupt from failure
            if failure is not None:
                raise failure
        finally:
            del failure, interrupt  # they refer to this frame
        return answer


class _Awaited(_Work):
    """One whose end somebody awaits on a loop."""

    __slots__ = ("_loop", "_over", "_waiter")

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        super().__init__(function, arguments)
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._over = False

    def _tell(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._over = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _told(self) -> asyncio.Future[None]:
        self._waiter = self._loop.create_future()
        return self._waiter

    async def result(self, stop: Callable[[], None] | None) -> Any:
        """The answer, once it is there; a cancellation meanwhile calls ``stop`` and is delivered then."""
        return self._outcome(await shielded(lambda: self._over, self._told, stop))


class _Waited(_Work):
    """One whose end a thread waits for."""

    __slots__ = ("_ended",)

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        super().__init__(function, arguments)
        self._ended = threading.Lock()
        self._ended.acquire()

    def _tell(self) -> None:
        self._ended.release()

    def result(self, stop: Callable[[], None]) -> Any:
        """The answer, once it is there; an interrupt meanwhile calls ``stop`` and is delivered then."""
        interrupt: BaseException | None = None
        try:
            while True:
                try:
                    self._ended.acquire()
                    break
                except BaseException as error:
                    interrupt = error
                    stop()
            return self._outcome(interrupt)
        finally:
            del interrupt  # which refers to this frame


def _serve(works: SimpleQueue[_Work | None]) -> None:
    """A lane's life."""
    while (work := works.get()) is not None:
        work.carry_out()
        del work


class Lanes:
    """The threads of one device, and the ``crew`` that helps them. `close` waits for what still runs.

    ``empty(shape, dtype)`` makes the memory that helpers compute in.
    """

    def __init__(
        self, threads: int | None = None, name: str = "lane", *, empty: Callable[..., Array] = np.empty
    ) -> None:
        self.threads = threads or usable_cores()
        self.crew = Crew(self.threads, empty=empty)
        self._name = name
        self._lock = threading.Lock()
        self._works: SimpleQueue[_Work | None] = SimpleQueue()
        self._started: list[threading.Thread] = []
        self._busy = 0  # works that were handed in and have not ended
        self._closed = False
        # of a host that nobody closed, or when the process ends
        weakref.finalize(self, _end_lanes, self._works, self._started, self.crew)

    async def run(self, function: Callable[..., T], *args: Any, stop: Callable[[], None] | None = None) -> T:
        """Run ``function`` in a lane and wait for it, even if cancelled meanwhile; ``stop`` then asks it to be quick.

        A kernel writes into buffers that we would otherwise free under it: cancellation is delivered once it returned.
        Who came first is served first.
        """
        work = _Awaited(function, args)
        self._hand_in(work)
        try:
            answer: T = await work.result(stop)
        finally:
            with self._lock:
                self._busy -= 1
        return answer

    def call(self, function: Callable[..., T], *args: Any, stop: Callable[[], None]) -> T:
        """As `run`, for a thread that may wait; an interrupt meanwhile calls ``stop``."""
        work = _Waited(function, args)
        self._hand_in(work)
        try:
            answer: T = work.result(stop)
        finally:
            with self._lock:
                self._busy -= 1
        return answer

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for a lane. From any thread."""
        return not self._works.empty()

    def _hand_in(self, work: _Work) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError("the lanes are closed")
            self._busy += 1
            if self._busy > len(self._started) < self.threads:
                name = f"flowrt-{self._name}_{len(self._started)}"
                lane = threading.Thread(target=_serve, args=(self._works,), name=name, daemon=True)
                try:
                    lane.start()
                    self._started.append(lane)
                except RuntimeError as error:  # those that there are have the work of all
                    if not self._started:
                        self._busy -= 1
                        raise no_thread(error) from error
            self._works.put(work)

    def close(self) -> None:
        """End the lanes after all that was handed in, and wait for them. Closing twice is closing once."""
        with self._lock:
            self._closed = True
        _end_lanes(self._works, self._started, self.crew)


def _end_lanes(works: SimpleQueue[_Work | None], started: list[threading.Thread], crew: Crew) -> None:
    """Have the lanes end after all that was handed in, and wait for them."""
    for _ in started:
        works.put(None)
    while started:
        started.pop().join()
    crew.close()
