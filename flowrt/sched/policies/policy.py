"""What a policy is: it decides which updates of replicas make the next version of the variables, and when.

A policy is a frozen value that answers one question: of the updates that are there, which are kept, or until when is
more waited for? It must not know updates, servers, clocks or sockets: what it is told is all there is, so the same
questions have the same answers, on a node, in a simulation and when a run is looked into afterwards. The quorum asks,
checks the answer and obeys.

A new policy is one file: a frozen dataclass with `decide`, as plain as what travels. It is known by the name of its
class wherever its module was imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan

from flowrt.base.errors import GraphError, Site
from flowrt.base.locating import Fitting
from flowrt.base.plain import is_number, is_whole
from flowrt.base.valueclass import valueclass


@valueclass
class Offer:
    """An update that is whole: every server holds its part, and all its numbers are finite.

    Args:
        replica: Whose it is.
        seconds: When it was whole, since the version was opened; 0 for one that was there before.
        staleness: How many versions older than the open one the values are that it was computed from.
        square: The sum of the squares of its numbers over all servers; NaN unless the policy ``measures``.
        samples: Of how many samples it was made in local steps, by the first axis of each batch's first input; else 0.
    """

    replica: int
    seconds: float
    staleness: int = 0
    square: float = nan
    samples: int = 0


@valueclass
class Close:
    """Fix the set: the updates of ``replicas`` make the next version. ``why``, for people, is shown in the report."""

    replicas: tuple[int, ...]
    why: str = ""


@valueclass
class WaitUntil:
    """Wait: ask again at ``seconds`` since the version was opened, or as soon as ``offers`` updates are there.

    With 0 ``offers`` the next one is the time to ask. Seconds that are past mean no time at all. A policy is asked
    again, too, when a replica that was able no longer is, though it has not offered.
    """

    seconds: float = inf
    offers: int = 0


@valueclass
class Record:
    """A version that was applied, for a policy that learns.

    Args:
        offers: The updates that were whole when the set was fixed, by arrival.
        kept: The set, in replica order.
        missing: Replicas that were computing then, each with for how many seconds it had been.
        seconds: From this version's opening to the next one's, without waiting for permission to apply it.
        closed: When the set was fixed, in seconds since the opening.
        square: The sum of the squares of what the variables were moved by, over all servers; NaN unless measured.
    """

    offers: tuple[Offer, ...]
    kept: tuple[int, ...]
    missing: tuple[tuple[int, float], ...]
    seconds: float
    closed: float
    square: float = nan


def makes_whole(policy: Policy, name: str, least: int) -> bool:
    """Whether a field is a whole number from ``least`` up; it is Python's own then, as which it travels."""
    value = getattr(policy, name)
    if not is_whole(value, least):
        return False
    object.__setattr__(policy, name, int(value))
    return True


def makes_number(policy: Policy, name: str, least: float) -> bool:
    """Whether a field is a number from ``least`` up; it is Python's own then, as which it travels."""
    value = getattr(policy, name)
    if not is_number(value, least):
        return False
    object.__setattr__(policy, name, value if isinstance(value, int) else float(value))
    return True


def check_at_least(policy: Policy, made: str) -> None:
    """Raise `GraphError` where ``at_least`` is no number of updates; ``made`` says where, and how it was written."""
    if not makes_whole(policy, "at_least", 1):
        raise GraphError(f"{made}: a step needs at least one update; use at_least=1 or more")


def least_of(policy: Policy, at_least: int, replicas: int) -> int:
    """``at_least``; raises `GraphError` when there are fewer ``replicas`` than that."""
    if at_least > replicas:
        raise GraphError(
            f"{policy} of {replicas} replicas can never be met; "
            f"use at_least={replicas} or fewer, or replicas={at_least} or more"
        )
    return at_least


class Policy(Fitting):
    """Whose updates make a version. A policy is a subclass that is a frozen dataclass of plain values.

    ``decide`` is all it needs; the rest says more, where there is more to say.
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _register(cls)

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        """Which updates make the version, or until when to wait.

        ``offers``, by arrival, are `least` at least; ``able`` are the replicas that may yet offer; ``now`` is seconds
        since the version was opened. Where nobody is able any more and there is no time to be asked again at, a
        version that is not closed is stuck.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decide(offers, able, now)")

    def after(self, record: Record) -> Policy:
        """The policy of the next version."""
        return self

    def prepare(self) -> None:
        """Work out what `decide` will need, if that is not done yet: replicas compute now, and nothing waits for it.

        It changes no answer, and need not be called.
        """

    def least(self, replicas: int) -> int:
        """The fewest updates of ``replicas`` that make a version: it is not asked before so many are there.

        Raises `GraphError` where the policy cannot be met.
        """
        return 1

    def size(self, replicas: int) -> int | None:
        """How many updates make every version, if that is fixed."""
        return None

    def weights(self, kept: Sequence[Offer]) -> tuple[float, ...] | None:
        """What each of the updates is multiplied by before they are added up; None for their mean."""
        return None

    @property
    def measures(self) -> bool:
        """Whether it wants the squares of updates; they cost the servers a little."""
        return False

    @property
    def staleness(self) -> int:
        """How many versions old an update may be that counts."""
        return 0


known: dict[str, type[Policy]] = {}
"""The policies whose modules were imported here, by the names of their classes."""


def site_of(kind: type[Policy]) -> Site:
    """Where a policy decides."""
    code = kind.decide.__code__
    return Site(code.co_filename, code.co_firstlineno)


def _register(kind: type[Policy]) -> None:
    """Note a policy under its name. One that is made anew, as by a decorator or in a notebook, takes its own place."""
    other = known.get(kind.__qualname__, kind)
    if other.__module__ != kind.__module__ and site_of(other).file != site_of(kind).file:
        raise GraphError(
            f"{site_of(kind)}: there is a policy named {kind.__qualname__} already, at {site_of(other)}; nodes know "
            "policies by their names, so give this one another"
        )
    known[kind.__qualname__] = kind
