"""Bare sockets' side of perf/null_step.py: blocking TCP on loopback, one server and its workers, nothing but bytes.

A worker answers each version it receives with its gradient; the server, when it has all, applies their mean in order
and sends the next version. Of a table only rows travel: with the gradient of its rows a worker names those of its next
batch.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Sequence

import numpy as np
from sides import processes as p
from sides.null_step import data as d

BLOCK = 1 << 16  # floats that are applied at a time, so that they stay in a cache
SLICE = 1 << 22  # bytes of a call


def receive(stream: socket.socket, array: np.ndarray) -> None:
    view = memoryview(array).cast("B")
    at = 0
    while at < len(view):
        count = stream.recv_into(view[at : at + SLICE])
        if not count:
            os._exit(0)
        at += count


def send(stream: socket.socket, array: np.ndarray) -> None:
    view = memoryview(array).cast("B")
    for at in range(0, len(view), SLICE):
        stream.sendall(view[at : at + SLICE])


def tuned(stream: socket.socket) -> socket.socket:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def work(number: int, port: int, a: p.Settings) -> None:
    stream = tuned(socket.create_connection(("127.0.0.1", port)))
    send(stream, np.array([number]))
    rows = a.workload in d.TABLES
    batches = d.ids(a.workload, a.workers)[number].astype(np.int64) if rows else None
    read = np.empty((d.ROWS_A_STEP, d.WIDTH) if rows else d.floats(a.workload), np.float32)
    gradient = np.empty_like(read)
    step = 0
    if batches is not None:
        send(stream, batches[0])
    while True:
        receive(stream, read)
        0.5 * np.dot(read.ravel(), read.ravel())
        np.multiply(read, 1.0, out=gradient)
        step += 1
        send(stream, gradient)
        if batches is not None:
            send(stream, batches[step % d.BATCHES])


class Server:
    """The variable, and a stream to each worker."""

    def __init__(self, streams: Sequence[socket.socket], a: p.Settings) -> None:
        self.streams = streams
        self.workers = a.workers
        self.rows = a.workload in d.TABLES
        shape = (d.TABLES[a.workload], d.WIDTH) if self.rows else d.floats(a.workload)
        self.w = np.ones(shape, np.float32)
        part = (d.ROWS_A_STEP, d.WIDTH) if self.rows else shape
        self.updates = [np.empty(part, np.float32) for _ in streams]
        self.named = [np.empty(d.ROWS_A_STEP, np.int64) for _ in streams]
        self.next = [np.empty(d.ROWS_A_STEP, np.int64) for _ in streams]
        self.scratch = np.empty(BLOCK, np.float32)
        self.selector = selectors.DefaultSelector()
        for number, stream in enumerate(streams):
            self.selector.register(stream, selectors.EVENT_READ, number)
            if self.rows:
                receive(stream, self.named[number])

    def step(self) -> None:
        for number, stream in enumerate(self.streams):
            send(stream, self.w[self.named[number]] if self.rows else self.w)
        wanting = len(self.streams)
        while wanting:
            for key, _ in self.selector.select():
                receive(self.streams[key.data], self.updates[key.data])
                if self.rows:
                    receive(self.streams[key.data], self.next[key.data])
                wanting -= 1
        if self.rows:
            for named, update in zip(self.named, self.updates, strict=True):
                np.subtract.at(self.w, named, np.float32(d.ROW_RATE / self.workers) * update)
            self.named, self.next = self.next, self.named
        else:
            self.apply()

    def apply(self) -> None:
        for start in range(0, self.w.size, BLOCK):
            block = slice(start, min(start + BLOCK, self.w.size))
            total = self.scratch[: block.stop - start]
            np.copyto(total, self.updates[0][block])
            for update in self.updates[1:]:
                total += update[block]
            total *= np.float32(d.RATE / self.workers)
            self.w[block] -= total


def main() -> None:
    a = p.settings()
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        port = listener.getsockname()[1]
        with p.started(work, [(number, port, a) for number in range(a.workers)]) as pids:
            found: dict[int, socket.socket] = {}
            for _ in pids:
                stream = tuned(listener.accept()[0])
                number = np.empty(1, np.int64)
                receive(stream, number)
                found[int(number[0])] = stream
            server = Server([found[number] for number in range(a.workers)], a)

            def right(steps: int) -> bool:
                probed = server.w[d.probes(a.workload, a.workers), 0] if server.rows else server.w[-1:]
                return d.right(a.workload, a.workers, steps, probed)

            p.serve(lambda count: p.timed(server.step, count), {"server": p.here(), **p.workers(pids)}, right)
            for stream in server.streams:
                stream.close()


if __name__ == "__main__":
    main()
