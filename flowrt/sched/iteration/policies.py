"""Policies as plain data, as they travel to the server that coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowrt.errors import GraphError
from flowrt.sched.quorum import AllOf, FirstOf, Policy


def policy_to_data(policy: Policy) -> tuple[Any, ...]:
    """``policy`` as it travels; raises `GraphError` for one that nodes do not know."""
    match policy:
        case AllOf():
            return ("all",)
        case FirstOf(updates):
            return ("first", updates)
        case _:
            raise GraphError(f"{policy!r} is not a policy; use AllOf() or FirstOf(m)")


def policy_from_data(data: Sequence[Any]) -> Policy:
    """The policy that `policy_to_data` wrote."""
    match tuple(data):
        case ("all",):
            return AllOf()
        case ("first", int(updates)):
            return FirstOf(updates)
        case _:
            raise GraphError(f"{data!r} is not a policy that this node knows")


def fixed_size(policy: Policy, replicas: int) -> int | None:
    """How many updates every set has whose mean is taken; None where that differs, or updates are weighted."""
    return policy.take(replicas)
