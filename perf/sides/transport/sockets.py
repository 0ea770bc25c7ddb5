"""Bare sockets' side of perf/transport.py's steps: blocking TCP on loopback, into memory that is there already.

""        TCP
unix      the same over a Unix socket
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import numpy as np
from sides import processes as p
from sides.null_step.sockets import receive, send, tuned
from sides.transport import data as d


def pair(a: p.Settings) -> tuple[socket.socket, socket.socket]:
    if a.variant == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = tuned(socket.create_connection(listener.getsockname()))
        return first, tuned(listener.accept()[0])


def hold(streams: list[socket.socket], a: p.Settings) -> None:
    """Send the value to who asks."""
    asked, value = np.zeros(d.REQUEST, np.uint8), d.value(a.workload)
    while True:
        receive(streams[0], asked)
        send(streams[0], value)


def add(streams: list[socket.socket], a: p.Settings) -> None:
    """Add 1 to what comes from the first stream, and send it to the second."""
    number = np.zeros(1, np.float32)
    while True:
        receive(streams[0], number)
        number += 1
        send(streams[-1], number)


def asking(stream: socket.socket, a: p.Settings) -> Callable[[], bool]:
    asked, room = np.zeros(d.REQUEST, np.uint8), np.ones(d.floats(a.workload), np.float32)

    def step() -> bool:
        send(stream, asked)
        receive(stream, room)
        return d.right(room)

    return step


def main() -> None:
    a = p.settings()
    if a.workload != "steps":
        mine, theirs = pair(a)
        with p.started(hold, [([theirs], a)]) as pids:
            step = asking(mine, a)
            roles = {"server": pids[0], "client": p.here()}
            p.serve(lambda n: p.timed(step, n), roles, lambda _: step())
            os._exit(0)
    (to_server, at_server), (between, at_worker), (back, from_client) = pair(a), pair(a), pair(a)
    with p.started(add, [([at_server, between], a), ([at_worker, back], a)]) as pids:
        number = np.zeros(1, np.float32)

        def around() -> bool:
            number[0] = 1
            send(to_server, number)
            receive(from_client, number)
            return bool(number[0] == d.VALUE)

        roles = {"server": pids[0], "worker 0": pids[1], "client": p.here()}
        p.serve(lambda n: p.timed(around, n), roles, lambda _: around())
        os._exit(0)


if __name__ == "__main__":
    main()
