"""How a node comes to hold variables that others move meanwhile: what a client asks, and what nodes then post.

It *follows*: those that *lead* it tell it what the variables were at a version, piece by piece, and the updates that
each version since was made of, which it applies itself. Nobody waits for it. What it holds counts for nothing until the
client has heard that it is at the version at which all others rest.
"""

from __future__ import annotations

from typing import Any

from flowrt.base.valueclass import valueclass


@valueclass
class Follow:
    """Be ready to take what the ``leaders`` tell of the variables of a trainer; until `Arrive` there are none here.

    Args:
        follow: The number by which all know this.
        leaders: The tasks, whose parts of an update are laid behind one another.
        variables: By leader, (container, name, dtype, dims) of what it tells, in order.
        version: The version at which they do.
        apply: The plan that moves the variables by updates.
        applied: What that is fed: as `BeginServer` has it.
    """

    follow: int
    container: str
    group: str
    leaders: tuple[str, ...]
    variables: tuple[tuple[tuple[Any, ...], ...], ...]
    version: int
    apply: int
    applied: tuple[tuple[int, int], ...]
    seed: int


@valueclass
class Lead:
    """To a server of a run: tell ``task`` what the variables ``names`` are at ``version``, then how they are moved.

    ``parts`` are those of each update that they are moved by. Answers whether that began; not where it is too late, or
    where somebody writes them otherwise, or they do not lie on the host.
    """

    follow: int
    run: int
    task: str
    names: tuple[tuple[str, str], ...]
    version: int
    parts: tuple[int, ...]


@valueclass
class Caught:
    """Answer whether who follows has come near: once it has all but the newest version, or is to give up."""

    follow: int


@valueclass
class Arrive:
    """Answer whether who follows is at ``version``, at which all rest, once it is: it holds the variables then.

    Where it cannot be, it holds none.
    """

    follow: int
    version: int


@valueclass
class Unfollow:
    """End it, here; who has followed holds nothing then, unless it has arrived. Nothing may be known of it."""

    follow: int


@valueclass
class FollowNobody:
    """End all that follow of a trainer, here, whoever had them: what is held here is about to be copied here."""

    container: str
    group: str


ABOUT_FOLLOWING: tuple[type[Any], ...] = (Follow, Lead, Caught, Arrive, Unfollow, FollowNobody)


@valueclass
class Passed:
    """To who follows: item ``number`` of what is told, ``left`` so many that are to follow as far as is known.

    ``values`` are bytes of variables, or of each update of a set its parts, one update behind another. An item that is
    to come after all that was told has number -1: there will be nothing more.
    """

    follow: int
    number: int
    left: int
    values: tuple[Any, ...]


@valueclass
class Had:
    """To who leads: all items before ``number`` have been used."""

    follow: int
    number: int


POSTED_TO_FOLLOW: tuple[type[Any], ...] = (Passed, Had)
