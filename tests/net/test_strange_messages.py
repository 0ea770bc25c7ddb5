"""Whatever somebody with the token says to a node: it is refused by name, ends that connection at most, and no node."""

from __future__ import annotations

import random
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from cluster_plans import PS, counter

from flowrt.base import codec
from flowrt.base.errors import FlowrtError
from flowrt.net.door.tokens import new_token
from flowrt.net.door.transport import Connection, connect
from flowrt.net.master.master import Master
from flowrt.net.node.node import NetworkNode
from flowrt.net.wire import briefly
from flowrt.net.wire.frames import frame
from flowrt.net.wire.messages import _KINDS, POSTED, Carry, Drive, Enlist, Resume, to_hello
from flowrt.sched.host.host import Host

TO_LINKS = ("Push", "Announce", "Pull", "Forget", "Value", "DeadValue", "TooLarge", "Grant", "Fault")
TO_NODES = ("Ping", "Register", "Unregister", "Start", "Abort", "Ask", "Command", "Recruited", "Introduce")
TO_TASKS = tuple(name for name, kind in _KINDS.items() if kind.of in POSTED)
INTEGERS = (0, 1, 2, -1, 7, 64, 4096, 70_000, 2**31, 2**62, 2**63 - 1, -(2**63), 2**64 - 1)
STRINGS = (
    "",
    PS,
    "/job:ps/task:9",
    "/job:",
    "client",
    "e1",
    "é\ud7ff",
    "\x00",
    "x" * 300,
    "SystemExit",
    "127.0.0.1",
)
ARRAYS = (np.zeros(0, "float32"), np.array(1.5), np.arange(9), np.zeros((3, 0, 2), "int8"), np.zeros(9_000))


def drawn(rng: random.Random, hint: Any, depth: int = 0) -> Any:
    """Something that a field of that type may hold; now and then, something else."""
    kind = get_origin(hint) or hint
    parts = get_args(hint)
    if isinstance(hint, UnionType):
        return drawn(rng, rng.choice(parts), depth)
    if kind is Any or rng.random() < 0.05:
        return drawn(
            rng, rng.choice([int, str, float, bool, bytes, np.ndarray, type(None), *[tuple] * (depth < 3)]), depth
        )
    if kind is tuple and len(parts) == 2 and parts[1] is not ...:
        return tuple(drawn(rng, part, depth + 1) for part in parts)
    if kind is tuple:
        return tuple(drawn(rng, parts[0] if parts else Any, depth + 1) for _ in range(rng.choice((0, 1, 2, 20))))
    if kind is dict:
        return {rng.choice(STRINGS): drawn(rng, Any, depth + 1) for _ in range(rng.randrange(3))}
    choices: dict[Any, Any] = {int: INTEGERS, str: STRINGS, np.ndarray: ARRAYS, bool: (True, False)}
    choices |= {float: (0.0, 1.5, float("nan"), -float("inf")), bytes: (b"", b"\x00" * 8, b"\xff" * 33)}
    return rng.choice(choices.get(kind, (None,)))


def message(rng: random.Random, kind: str) -> tuple[Any, ...]:
    """One of that kind, or nearly so; what is asked of runs is packed within."""
    if kind == "Command" and rng.random() < 0.9:
        return "Command", rng.choice(INTEGERS), np.frombuffer(codec.pack(message(rng, rng.choice(TO_TASKS))), np.uint8)
    hints = get_type_hints(_KINDS[kind].of)
    values = [drawn(rng, hints[field]) for field in _KINDS[kind].fields]
    return (kind, *values[: len(values) - (rng.random() < 0.05)])


def hello(rng: random.Random) -> tuple[tuple[str, ...], dict[str, Any]]:
    """How a connection begins, and of which kinds its messages are then to be."""
    peers = {PS: ("127.0.0.1", 1), rng.choice(STRINGS): drawn(rng, rng.choice((tuple[str, int], Any)))}
    joined = tuple(rng.choice((PS, *STRINGS)) for _ in range(rng.randrange(2)))
    epoch = rng.choice(("e1", "e2"))
    match rng.randrange(6):
        case 0 | 1:
            return (*TO_LINKS, *TO_TASKS), to_hello(Carry(rng.choice(STRINGS), rng.choice(("", epoch))))
        case 2 | 3:
            return TO_NODES, to_hello(Drive("session", epoch, peers, rng.randrange(1000), joined))
        case 4:
            return TO_NODES, to_hello(Resume("session", epoch, peers, rng.randrange(1000), joined))
        case _:
            return TO_NODES, to_hello(Enlist("ps", rng.choice(INTEGERS), rng.choice(STRINGS), rng.choice(INTEGERS)))


def say(rng: random.Random, connection: Connection, kinds: tuple[str, ...]) -> None:
    """Post a message of one of these kinds, or its bytes with some of them changed."""
    try:
        said = message(rng, rng.choice(kinds))
        pieces = frame(said)
        pieces = briefly.write(_KINDS[said[0]].of(*said[1:])) or pieces
    except (FlowrtError, TypeError, AttributeError, ValueError):
        return  # nobody could write it
    whole = bytearray(b"".join(bytes(piece) for piece in pieces))
    for _ in range(rng.choice((0, 0, 1, 3))):
        whole[rng.randrange(4, len(whole))] = rng.randrange(256)
    connection._stream.transport.write(bytes(whole))


@pytest.mark.parametrize("seed", range(12))
async def test_nothing_that_is_said_fails_a_node(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    rng, token = random.Random(seed), new_token()
    host = Host(PS, threads=1)
    try:
        async with NetworkNode(host, token).serving("127.0.0.1", 0) as server:
            for _ in range(20):
                kinds, begins = hello(rng)
                async with await connect("127.0.0.1", server.port, token, begins) as connection:
                    for _ in range(rng.choice((1, 5, 30))):
                        if not connection.closed:
                            say(rng, connection, kinds)
            async with Master({PS: ("127.0.0.1", server.port)}, token, name="after") as master:
                for number, name in enumerate(("assign", "assign_add"), 1):
                    step = await master.register(**counter(PS, "c")[name])
                    await master.run(step, [np.ones(3)], number=number, seed=0)
    finally:
        await host.aclose()
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


@pytest.mark.parametrize("task", ["", "client", "/job:ps", "/job:ps/task:-1", "/job:ps/task:0/device:cpu:0"])
@pytest.mark.parametrize("place", [("127.0.0.1", 1), (True, 1), ("127.0.0.1", True)])
async def test_who_is_no_task_or_nowhere_is_not_made_known_to_masters_that_come_later(task: str, place: Any) -> None:
    token, host = new_token(), Host(PS, threads=1)
    known = "/job:ps/task:1" if place != ("127.0.0.1", 1) else task
    begins = to_hello(Drive("session", "e1", {PS: ("127.0.0.1", 1), known: place}, 0, (known,)))
    try:
        async with NetworkNode(host, token).serving("127.0.0.1", 0) as server:
            async with await connect("127.0.0.1", server.port, token, begins) as connection:
                with pytest.raises(FlowrtError):
                    await connection.receive()
            async with Master({PS: ("127.0.0.1", server.port)}, token, name="after") as master:
                assert [str(device.host) for device in master.peers.devices] == [PS]
    finally:
        await host.aclose()
