"""Several runs of a trainer, searched to exhaustion: clients that die, two at once, servers started again, checkpoints.

What holds in every state: a run begins, and trains on, where all servers hold the same, and on each of them at most
once a version; no set is ordered for a client that is gone, or beyond what one has asked for; and no client is refused
because servers disagree unless one of them was started again. And every state leads on, without another fault, to one
in which all is quiet and the servers agree, without another client, if server 0 has not given up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from replica_world import Violation, search
from runs_world import Client, Runs, Server, State

from flowrt.sched.policies import Deadline
from flowrt.sched.versions.coordinator import Coordinator
from flowrt.sched.versions.opening import Apply, End, Go, Refuse, Said, decide

pytestmark = [  # a search computes and waits for nothing: it takes what the machine gives it
    pytest.mark.timeout(300),
    pytest.mark.settled,
]

BRIEF: dict[str, Any] = {"each": 1, "replicas": 1}
HASTY: dict[str, Any] = {"each": 1, "hasty": 1}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "world",
    [
        {"clients": 1},
        {"together": True, "deaths": 2, **BRIEF},
        {"servers": 3, **BRIEF},
        HASTY,
        {"restarts": 1, **BRIEF},
        {"restarts": 1, "restores": 1, **BRIEF},
        {"restores": 1, "hasty": 1, **BRIEF},
        {"clients": 1, "policy": Deadline(1.0)},
        {"detached": True, "deaths": 2, "clients": 3, **BRIEF},
        {"detached": True, "together": True, **BRIEF},
        {"versions": 1, "policy": Deadline(1.0), **HASTY},
    ],
)
def test_no_reachable_state_of_several_runs_breaks_the_protocol(world: dict[str, Any]) -> None:
    found = search(Runs(**world))
    print(found)
    assert found.complete > 0


# Decisions.


def asks_only_server_0(trainer: str, said: Sequence[Said]) -> Any:
    return decide(trainer, said[:1])


def applies_nothing(trainer: str, said: Sequence[Said]) -> Any:
    decided = decide(trainer, said)
    return Refuse("apart") if isinstance(decided, Apply) else decided


def applies_what_it_finds(trainer: str, said: Sequence[Said]) -> Any:
    decided = decide(trainer, said)
    left = said[-1].left
    if isinstance(decided, Apply) and left is not None:
        return replace(decided, replicas=tuple(replica for replica, _ in sorted(left.held))[-1:])
    return decided


def believes_what_is_left(trainer: str, said: Sequence[Said]) -> Any:
    return decide(trainer, [one if one.left is None else replace(one, version=one.left.version) for one in said])


def leaves_runs_of_the_dead(trainer: str, said: Sequence[Said]) -> Any:
    decided = decide(trainer, said)
    return Go(said[0].version or 0) if isinstance(decided, End) else decided


DECISIONS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (asks_only_server_0, HASTY, "cannot begin"),
    (applies_nothing, HASTY, "refused although no server was started again"),
    (applies_what_it_finds, HASTY, "torn"),
    (believes_what_is_left, {"restores": 1, "replicas": 1}, "cannot begin"),
    (leaves_runs_of_the_dead, BRIEF, "cannot begin"),
]


@pytest.mark.parametrize(("mutant", "world", "symptom"), DECISIONS, ids=[mutant.__name__ for mutant, *_ in DECISIONS])
def test_the_search_catches_an_opening_that(mutant: Any, world: dict[str, Any], symptom: str) -> None:
    with pytest.raises(Violation, match=symptom):
        search(Runs(**world, opening=mutant))


# Coordinators, and what clients and servers do.


class OrdersForTheDead(Coordinator):
    def close(self) -> Any:
        return self

    @property
    def settled(self) -> bool:
        return super().settled and self.closing


class SaysItIsSettled(Coordinator):
    @property
    def settled(self) -> bool:
        return True


class DropsTheOrder(Coordinator):
    def close(self) -> Any:
        return replace(self, closing=True, ordered_at=None)


class RefusesAtTheFirstWord(Runs):
    def sure(self, client: Client) -> bool:
        return True


class AsksInAnyOrder(Runs):
    def asked(self, client: Client) -> tuple[int, ...]:
        return tuple(self.servers)


class BeginsBesideAnother(Runs):
    def free(self, state: State, at: int) -> bool:
        return True


class BeginsAtAnyVersion(Runs):
    def at(self, server: Server, version: int) -> bool:
        return True


RULES: list[tuple[type, dict[str, Any], str]] = [
    (OrdersForTheDead, BRIEF, "ordered for nobody"),
    (SaysItIsSettled, {"each": 1}, "refused although no server was started again"),
    (DropsTheOrder, {"each": 1}, "which was not ordered"),
    (RefusesAtTheFirstWord, {"together": True, **BRIEF}, "refused although no server was started again"),
    (AsksInAnyOrder, {"together": True, **BRIEF}, "no way on"),
    (BeginsBesideAnother, {"together": True, **BRIEF}, "no way on"),
    (BeginsAtAnyVersion, {"restarts": 1, **BRIEF}, "a run begins on"),
]


@pytest.mark.parametrize(("mutant", "world", "symptom"), RULES, ids=[mutant.__name__ for mutant, *_ in RULES])
def test_the_search_catches(mutant: type, world: dict[str, Any], symptom: str) -> None:
    with_mutant = mutant(**world) if issubclass(mutant, Runs) else Runs(**world, coordinator=mutant)
    with pytest.raises(Violation, match=symptom):
        search(with_mutant)
