"""Before a run begins: what all servers say, what that means, and what is done about it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import RemoteError
from flowrt.sched.drivers.inquiries import Settle
from flowrt.sched.drivers.messages import Stop
from flowrt.sched.host.await_all import await_all
from flowrt.sched.runs.iterations import left_from_data
from flowrt.sched.versions.opening import Apply, End, Go, Going, Refuse, Said, decide

if TYPE_CHECKING:
    from flowrt.session.runners import Runner
    from flowrt.session.session import Session
    from flowrt.train.program import Program

TRIES = 4  # to make servers agree that others may change meanwhile


def who(session: Session) -> str:
    """Who trains, for people who may not."""
    name = f"session {session._name!r}" if session._name else "a session without a name"
    return f"{name}, process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%X')}"


async def agree(
    runner: Runner, program: Program, trainer: str, detached: str = "", *, alone: bool = False
) -> Go | Going:
    """The version that all servers are at, once no run goes on and what one of them lacks is applied.

    With it comes what nobody may have had of the reports of the run before: see `Left`. A session whose name is
    ``detached`` is told of a run that goes on without a client, if there is one of that name. Where these are ``alone``
    of all that had servers, none of them waits for what another one was to apply.
    Raises `RemoteError` where another client trains, or the servers hold different versions.
    """
    refused = ""
    for _ in range(TRIES):
        match decide(repr(trainer), await look(runner, program), detached):
            case Go() | Going() as found:
                return found
            case Refuse(text):
                if text == refused:  # what servers say is of different moments: another client may train meanwhile
                    raise RemoteError(text)
                refused = text
            case End(run, server):
                await runner.command(program.servers[server], Stop(run, at_once=alone))
            case Apply(run, version, replicas, servers, weights, versions):
                settle = Settle(run, version, replicas, weights, versions)
                await _each(runner, {program.servers[s]: settle for s in servers if s})
                await runner.command(program.servers[0], settle)  # which reports it, as all have applied it then
    raise RemoteError(f"the servers of {trainer!r} did not come to rest; try again")


async def look(runner: Runner, program: Program) -> list[Said]:
    """What each server says; server 0 is asked when the others have answered, as `decide` wants it."""
    looks = dict(zip(program.servers, program.looks, strict=True))
    first = program.servers[0]
    said = await _each(runner, {task: look for task, look in looks.items() if task != first})
    said |= await _each(runner, {first: looks[first]})
    return [_said(task, said[task]) for task in program.servers]


def _said(task: str, data: tuple[Any, ...]) -> Said:
    version, left, _ = data
    return Said(task, None if version < 0 else version, left_from_data(left))


async def _each(runner: Runner, messages: Mapping[str, Any]) -> dict[str, Any]:
    """What each task answers; raises the first error."""
    answers = await await_all(runner.command(task, message) for task, message in messages.items())
    return dict(zip(messages, answers, strict=True))
