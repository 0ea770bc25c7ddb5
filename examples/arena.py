"""A device of one's own, in one file: a second arena of the host's memory, bounded, and as slow as it is told to be.

    python examples/arena.py                                        trains on arena:0, and says what that took

A program that imports this file, from where Python finds it, has the devices arena:0 and arena:1 beside its own:

    async with fr.Session(graph, options=fr.Options(devices=("arena:0",))) as session: ...
    python -m flowrt.worker --import arena --devices cpu:0,arena:0 ...

It computes with flowrt's own kernels, since what it is there to show is the rest: memory that nobody else touches,
copies in and out, and errors where it is full.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import flowrt as fr

LINE = 64  # bytes: where each tensor begins, and what it is rounded up to
Array = np.ndarray[Any, Any]
Piece = tuple[int, int]  # of the arena: where it begins, and its bytes


class Arena:
    """One device: ``limit`` bytes, in which the first gap that is large enough is taken.

    Every kernel takes ``delay`` seconds longer than on the host, and so does every copy for each MiB.
    """

    def __init__(self, limit: int, delay: float) -> None:
        self.limit, self.delay = limit, delay
        self.launched = 0
        self._bytes = _aligned(limit)
        self._gaps: list[Piece] = [(0, limit)]

    # memory: a piece of the arena

    def allocate(self, nbytes: int) -> Piece:
        size = -(-nbytes // LINE) * LINE
        for place, (start, free) in enumerate(self._gaps):
            if free >= size:
                self._gaps[place : place + 1] = [(start + size, free - size)] if free > size else []
                return start, size
        raise MemoryError(f"the largest gap is of {max((free for _, free in self._gaps), default=0)} bytes")

    def free(self, memory: Piece) -> None:
        gaps: list[Piece] = []
        for start, size in sorted([*self._gaps, memory]):
            if gaps and sum(gaps[-1]) == start:
                start, size = gaps[-1][0], gaps.pop()[1] + size
            gaps.append((start, size))
        self._gaps = gaps

    def part(self, memory: Piece, start: int, nbytes: int) -> Piece:
        return memory[0] + start, nbytes

    # copies

    def write(self, memory: Piece, array: Array) -> None:
        self._slow(array.nbytes)
        self._at(memory, array.nbytes)[:] = array.reshape(-1).view(np.uint8)

    def read(self, memory: Piece, array: Array) -> None:
        self._slow(array.nbytes)
        array.reshape(-1).view(np.uint8)[:] = self._at(memory, array.nbytes)

    def copy(self, source: Piece, target: Piece, nbytes: int) -> None:
        self._at(target, nbytes)[:] = self._at(source, nbytes)

    # kernels

    def prepare(
        self, op: str, inputs: Sequence[fr.Spec], outputs: Sequence[fr.Spec], attrs: Mapping[str, Any]
    ) -> "ArenaKernel":
        return ArenaKernel(self, fr.devices.HostKernel(op, inputs, outputs, attrs))

    def launch(self, kernel: fr.devices.HostKernel, operands: Sequence[Piece], words: Array) -> None:
        time.sleep(self.delay)
        self.launched += 1
        kernel.launch([self._at(piece, piece[1]) for piece in operands], words)

    def finish(self) -> None:
        """Nothing is left to wait for: what was called has been done."""

    def close(self) -> None:
        self._bytes = _aligned(0)

    def _at(self, memory: Piece, nbytes: int) -> Array:
        return self._bytes[memory[0] : memory[0] + nbytes]

    def _slow(self, nbytes: int) -> None:
        time.sleep(self.delay * nbytes / (1 << 20))


class ArenaKernel:
    """An op, ready to be launched in an arena."""

    def __init__(self, arena: Arena, kernel: fr.devices.HostKernel) -> None:
        self._arena, self._kernel = arena, kernel
        self.scratch, self.may_fail, self.may_overwrite = kernel.scratch, kernel.may_fail, kernel.may_overwrite

    def launch(self, operands: Sequence[Piece], words: Array) -> None:
        self._arena.launch(self._kernel, operands, words)


class ArenaKind:
    """Two such devices, opened anew by each session."""

    def __init__(self, limit: int = 4 << 20, delay: float = 0.0) -> None:
        self._limit, self._delay = limit, delay
        self.opened: list[Arena] = []

    def count(self) -> int:
        return 2

    def supports(self, op: str, dtypes: Sequence[np.dtype[Any]]) -> bool:
        return fr.devices.computes_on_host(op, dtypes)

    def open(self, index: int) -> Arena:
        self.opened.append(Arena(self._limit, self._delay))
        return self.opened[-1]


def _aligned(nbytes: int) -> Array:
    whole = np.empty(nbytes + LINE, np.uint8)
    start = -int(whole.ctypes.data) % LINE
    return whole[start : start + nbytes]


fr.devices.register("arena", ArenaKind)


# ── a whole training job ─────────────────────────────────────────────────────────────────────────────────────────────


async def train(steps: int = 300, *, device: str = "arena:0", batch: int = 128) -> tuple[float, Any]:
    """Train two dense layers to tell handwritten digits; answers the accuracy on others, and the device's memory."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16 - 0.3).astype(np.float32), labels.astype(np.int32)
    with fr.Graph(seed=1) as graph:
        x, y = fr.placeholder("float32", (None, 64)), fr.placeholder("int32", (None,))
        w1 = fr.Variable(fr.random.normal((64, 128), stddev=0.18, seed=1), name="w1")
        b1 = fr.Variable(np.zeros(128, np.float32), name="b1")
        w2 = fr.Variable(fr.random.normal((128, 10), stddev=0.09, seed=2), name="w2")
        b2 = fr.Variable(np.zeros(10, np.float32), name="b2")
        logits = fr.nn.relu(x @ w1 + b1) @ w2 + b2
        loss = fr.mean(fr.nn.softmax_cross_entropy(logits, y))
        update = fr.optim.Momentum(0.1, 0.9).minimize(loss)
        found = fr.argmax(logits, axis=-1)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(labels))
    train, test = order[:1437], order[1437:]
    async with fr.Session(graph, options=fr.Options(devices=(device,))) as session:
        for _ in range(steps):
            chosen = rng.choice(train, batch)
            await session.run([loss, update], {x: images[chosen], y: labels[chosen]})
        answers = await session.run(found, {x: images[test]})
        return float(np.mean(answers == labels[test])), fr.devices.memory(session)[device]


if __name__ == "__main__":
    began = time.perf_counter()
    accuracy, memory = asyncio.run(train())
    print(f"accuracy {accuracy:.4f} after {time.perf_counter() - began:.1f} s")
    print(f"arena:0 holds {memory.held} bytes, at most {memory.peak} so far, of {memory.limit}")
