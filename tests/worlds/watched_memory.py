"""Memory of Numba's simulator that knows who used it: what threads do to one entry with no barrier between is found.

Law: two threads of a block may use an entry, one of them to write it, only in different stretches between barriers, and
threads of different blocks never. All threads of a block come to the same barriers. Writes of one value are no race:
what is told of a failure is one.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
from numba.cuda.simulator import kernel
from numba.cuda.simulator.kernelapi import FakeCUDAShared

from flowrt.kernels.cuda import twins

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

Site = str  # a line of a kernel's
Use = tuple[Any, int, int]  # the block, the thread, and how many barriers it had passed


class Watch:
    """What was done in one launch. Barriers at the ``ignored`` line are as if they were not there."""

    def __init__(self, ignored: Site = "") -> None:
        self.ignored = ignored
        self.barriers: set[Site] = set()
        self.faults: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """Forget what was done: a launch begins when the one before has ended."""
        self._passed: dict[tuple[Any, int], list[Site]] = {}
        self._stretch: dict[tuple[Any, int], int] = defaultdict(int)
        self._reads: dict[Any, set[Use]] = defaultdict(set)
        self._writes: dict[Any, dict[Use, Any]] = defaultdict(dict)

    def start(self, thread: Any) -> None:
        self._passed[_name(thread)] = []

    def pass_barrier(self, thread: Any, site: Site) -> None:
        self.barriers.add(site)
        self._passed[_name(thread)].append(site)
        self._stretch[_name(thread)] += site != self.ignored

    def read(self, place: Any, frame: FrameType, *, shared: bool) -> None:
        use, written = self._present(), self._writes[place]
        self._reads[place].add(use)
        if any(_meet(use, other) for other in written):
            self.faults.add(f"{line_of(frame)} reads what another thread writes")
        if shared and not written:
            self.faults.add(f"{line_of(frame)} reads what no thread has written")

    def write(self, place: Any, value: Any, frame: FrameType) -> None:
        use, written = self._present(), self._writes[place]
        if any(_meet(use, other) for other in self._reads[place]):
            self.faults.add(f"{line_of(frame)} writes what another thread reads")
        if any(_meet(use, other) and value != wrote for other, wrote in written.items()):
            self.faults.add(f"{line_of(frame)} writes what another thread writes")
        written[use] = value

    def end(self) -> None:
        """Look whether the threads of each block came to the same barriers."""
        blocks: dict[Any, set[tuple[Site, ...]]] = defaultdict(set)
        for (block, _), sites in self._passed.items():
            blocks[block].add(tuple(sites))
        if any(len(ways) > 1 for ways in blocks.values()):
            self.faults.add("threads of a block come to different barriers")

    def _present(self) -> Use:
        name = _name(threading.current_thread())
        return *name, self._stretch[name]


def _name(thread: Any) -> tuple[Any, int]:
    """A thread's block, and its number there."""
    return tuple(thread.blockIdx), thread.thread_id


def _meet(one: Use, other: Use) -> bool:
    """Whether two uses of an entry have no order."""
    return one[0] != other[0] or (one[1] != other[1] and one[2] == other[2])


def line_of(frame: FrameType) -> Site:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


class Watched:
    """An array as kernels see it: one that all threads have, or each block's own if it is ``shared``."""

    def __init__(self, array: Any, watch: Watch, *, shared: bool = False) -> None:
        self._array, self._watch, self._shared = array, watch, shared

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)

    def __getitem__(self, at: Any) -> Any:
        self._watch.read(self._place(at), sys._getframe(1), shared=self._shared)
        return self._array[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self._array[at] = value
        self._watch.write(self._place(at), self._array[at], sys._getframe(1))

    def _place(self, at: Any) -> Any:
        """What tells an entry from all others; none may be outside."""
        array, places = self._array, [int(place) for place in (at if isinstance(at, tuple) else (at,))]
        assert all(0 <= place < n for place, n in zip(places, array.shape, strict=True)), f"{at} of {array.shape}"
        steps = zip(places, array.strides, strict=True)
        address = array.ctypes.data + sum(place * stride for place, stride in steps)
        thread: Any = threading.current_thread()
        return (address, *thread.blockIdx) if self._shared else address


@contextmanager
def install(watch: Watch) -> Iterator[Watch]:
    """Have twins that are launched inside be watched, one launch after another."""
    launch, thread = twins.PreparedStep.launch, kernel.BlockThread

    def shared(self: Any, shape: Any, dtype: Any) -> Any:
        caller = sys._getframe(1)
        array = self._allocations.setdefault((caller.f_code, caller.f_lasti), np.empty(shape, dtype))
        return Watched(array, watch, shared=True)

    class WatchedThread(thread):  # type: ignore[misc,valid-type]
        def run(self) -> None:
            watch.start(self)
            super().run()

        def syncthreads(self) -> None:
            watch.pass_barrier(self, line_of(sys._getframe(2)))
            super().syncthreads()

    def watched(self: Any, *given: Any) -> None:
        watch.begin()
        launch(self, *given)
        watch.end()

    with ExitStack() as stack:
        for owner, name, other in (
            (FakeCUDAShared, "array", shared),
            (kernel, "BlockThread", WatchedThread),
            (twins, "_as_numbas", partial(Watched, watch=watch)),
            (twins.PreparedStep, "launch", watched),
        ):
            stack.enter_context(patch.object(owner, name, other))
        yield watch
