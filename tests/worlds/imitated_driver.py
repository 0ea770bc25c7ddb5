"""NVIDIA's driver in the host's memory: the calls of `flowrt.kernels.nvidia.calls`, each noted, and done at once.

Addresses are the host's own. What is issued while a stream is captured becomes a graph, and is done when that is
launched: with what lies at its addresses then.
"""

from __future__ import annotations

import ctypes
import inspect
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

from flowrt.kernels.nvidia import calls


class ImitatedDriver:
    """Stands in for the driver's calls.

    ``called`` counts them, and those that are among ``fails`` raise that. ``alive`` is what was made and has not gone,
    handles and memory, by kind.
    """

    def __init__(self) -> None:
        self.called: Counter[str] = Counter()
        self.fails: dict[str, Exception] = {}
        self.alive: dict[int, str] = {}
        self._memory: dict[int, Any] = {}
        self._graphs: dict[int, list[Callable[[], None]]] = {}
        self._handles = count(1)
        self._captured: list[Callable[[], None]] | None = None

    def stand_in(self, monkeypatch: Any) -> None:
        """Answer all calls from now on, and what Numba is asked for."""
        for name, function in vars(calls).items():
            if inspect.isfunction(function) and hasattr(self, name):
                monkeypatch.setattr(calls, name, self._noted(name))
        monkeypatch.setattr("numba.cuda.select_device", lambda index: None)
        monkeypatch.setattr("numba.cuda.external_stream", lambda stream: stream)

    def _noted(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.called[name] += 1
            if name in self.fails:
                raise self.fails[name]
            return getattr(self, name)(*arguments)

        return call

    # ── handles ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _made(self, kind: str) -> int:
        handle = next(self._handles)
        self.alive[handle] = kind
        return handle

    def _gone(self, handle: int) -> None:
        del self.alive[handle]

    def create_stream(self) -> int:
        return self._made("stream")

    def create_event(self) -> int:
        return self._made("event")

    destroy_stream = destroy_event = destroy_graph = destroy_replayable = _gone

    def total_memory(self, index: int) -> int:
        return 1 << 30

    def find_pool(self, index: int) -> str:
        return "pool"

    def _nothing(self, *given: Any) -> None:
        """All was done when it was asked for."""

    start = retain_context = keep_freed = trim = record_event = wait_for_event = let_stream_wait = _nothing

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _memory_of(self, nbytes: int, kind: str) -> int:
        held = (ctypes.c_uint8 * (nbytes + 256))()
        address = -(-ctypes.addressof(held) // 256) * 256
        self._memory[address], self.alive[address] = held, kind
        return address

    def allocate(self, nbytes: int, stream: int) -> int:
        assert self._captured is None, "a graph has no memory of its own"
        return self._memory_of(nbytes, "memory")

    def allocate_pinned(self, nbytes: int) -> int:
        return self._memory_of(nbytes, "pinned")

    def free(self, address: int, stream: int) -> None:
        self.free_pinned(address)

    def free_pinned(self, address: int) -> None:
        del self._memory[address], self.alive[address]

    # ── what is issued ───────────────────────────────────────────────────────────────────────────────────────────────

    def copy_to_gpu(self, target: int, source: int, nbytes: int, stream: int) -> None:
        if self._captured is not None:
            self._captured.append(lambda: ctypes.memmove(target, source, nbytes) and None)
        else:
            ctypes.memmove(target, source, nbytes)

    copy_to_host = copy_on_gpu = copy_to_gpu

    def synchronize(self, stream: int) -> None:
        assert self._captured is None, "what is captured is not done"

    def begin_capture(self, stream: int) -> None:
        self._captured = []

    def end_capture(self, stream: int) -> int:
        graph = self._made("graph")
        self._graphs[graph], self._captured = self._captured or [], None
        return graph

    def instantiate(self, graph: int) -> int:
        ready = self._made("ready graph")
        self._graphs[ready] = self._graphs[graph]
        return ready

    def launch_graph(self, ready: int, stream: int) -> None:
        for step in self._graphs[ready]:
            step()
