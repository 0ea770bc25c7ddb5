"""What clients of a detached run ask: to let it go on, to attach to one that does, to have it stand still a moment."""

from __future__ import annotations

from flowrt.base.valueclass import valueclass


@valueclass
class GoOn:
    """To server 0 of a detached run: all have begun but the ``lost``; from now on it needs no client.

    Until then it is its client's as any other run is: nothing is ordered, and it ends when that one is gone. Answers
    who is lost by now, as server 0 sees.
    """

    run: int
    lost: tuple[int, ...]


@valueclass
class Attach:
    """Be of a detached run whose client this one is from now on.

    Answers (server, replicas): the replicas that go on here, each with how often it was begun again, and of the server
    here its version, None where none is known. Of server 0 that is (attachment, version, dropped, turns, lost,
    compression, begun): by what number `Allow` is this client's, the version of which is reported next, how many older
    reports nobody has had that are not kept any more, by replica how often it was begun again, who is lost, of a run
    that is over nobody, how updates are packed, and the version at which the run began.
    """

    run: int


@valueclass
class Hold:
    """To server 0 of a detached run: order nothing until it is let go again, or its client is gone; if it is ``on``.

    Answered once all servers have applied what was ordered, by the version that they are at.
    """

    run: int
    on: bool
