"""Asks policies, and believes no answer that makes no sense: a user's mistake ends the run, and says where it is.

Nothing else calls a policy's methods while it decides.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Sequence
from math import inf, isfinite
from numbers import Integral
from typing import Any, NoReturn, TypeVar

from flowrt.base.errors import GraphError, Site
from flowrt.base.plain import is_number
from flowrt.sched.policies.all_of import AllOf
from flowrt.sched.policies.first_of import FirstOf
from flowrt.sched.policies.policy import Close, Offer, Policy, Record, WaitUntil, site_of

Answer = TypeVar("Answer")


def decide(
    policy: Policy,
    replicas: int,
    offers: Sequence[Offer],
    able: Sequence[int],
    now: float,
    there: int | None = None,
) -> Close | WaitUntil:
    """What ``policy`` decides; raises `GraphError` for what nobody can obey. Of ``replicas`` so many are ``there``."""
    answer = _called(policy, policy.decide, offers, able, now)
    if isinstance(answer, Close):
        _check_close(policy, answer, replicas if there is None else there, offers)
    elif isinstance(answer, WaitUntil):
        _check_wait(policy, answer)
        if len(offers) == replicas and not now < answer.seconds < inf:
            _refuse(policy, f"decide answered {answer!r} when all {replicas} had offered; nobody else can come: close")
    else:
        _refuse(policy, f"decide answered {answer!r}; answer Close(replicas) or WaitUntil(seconds)")
    return answer


def weights(policy: Policy, kept: Sequence[Offer]) -> tuple[float, ...] | None:
    """What the kept updates are multiplied by, in their order; None for their mean. Raises `GraphError` as `decide`."""
    answer = _called(policy, policy.weights, kept)
    if answer is None:
        return None
    if not isinstance(answer, tuple) or len(answer) != len(kept) or not all(_is_finite(weight) for weight in answer):
        _refuse(policy, f"weights of {len(kept)} updates answered {answer!r}; answer a finite number for each, or None")
    return tuple(map(float, answer))


def fixed_size(policy: Policy, replicas: int, floor: int = 0) -> int | None:
    """How many updates every set has whose mean is taken; None where that differs, or they are weighted or measured.

    With a ``floor``, any number of replicas from that up may be there.
    """
    if policy.measures or type(policy).weights is not Policy.weights:
        return None
    sizes = {policy.size(there) for there in range(floor or replicas, replicas + 1)}
    return sizes.pop() if len(sizes) == 1 else None


def fewest(policy: Policy, least: int, most: int) -> int:
    """The fewest replicas, ``least`` or more, that can meet ``policy``; raises `GraphError` where ``most`` cannot."""
    for replicas in range(least, most):
        try:
            policy.least(replicas)
        except GraphError:
            continue
        return replicas
    policy.least(most)
    return most


def together(policy: Policy, replicas: int, floor: int = 0) -> int:
    """How many updates there are, at least, before it matters to ``policy`` which of them came, and when.

    With a ``floor``, any number of replicas from that up may be there.
    """
    return policy.least(floor or replicas) if type(policy) in (AllOf, FirstOf) else 1


def learns(policy: Policy) -> bool:
    """Whether a policy wants the records of versions."""
    return type(policy).after is not Policy.after


def after(policy: Policy, record: Record, replicas: int) -> Policy:
    """The policy of the version after that of ``record``; raises `GraphError` as `decide`."""
    answer = _called(policy, policy.after, record)
    if not isinstance(answer, Policy):
        _refuse(policy, f"after answered {answer!r}; answer the policy of the next version")
    if answer.size(replicas) != policy.size(replicas):
        _refuse(policy, f"after answered {answer!r}, whose sets are of another size; policies of one run have one size")
    return answer


def repeats(policy: Policy) -> bool:
    """Whether a policy answers one and the same to the updates of all, whenever they came: one asking is enough."""
    return type(policy) is AllOf


def prepares(policy: Policy) -> bool:
    """Whether a policy has something to work out before it is asked."""
    return type(policy).prepare is not Policy.prepare


def prepare(policy: Policy) -> None:
    """Have it work that out; raises `GraphError` as `decide`."""
    _called(policy, policy.prepare)


def _check_close(policy: Policy, close: Close, replicas: int, offers: Sequence[Offer]) -> None:
    chosen = close.replicas
    if not isinstance(chosen, Collection) or not chosen or not isinstance(close.why, str):
        _refuse(
            policy,
            f"decide answered {close!r}; a set has at least one update: answer Close((replica, ...), 'why'), "
            "or wait by WaitUntil",
        )
    if (strange := _strange(chosen, there := [offer.replica for offer in offers])) is not None:
        _refuse(policy, f"decide closed with replica {strange}, which has not offered; choose among {there}")
    if len(set(chosen)) < len(chosen):
        _refuse(policy, f"decide closed with {list(chosen)}; name each replica once")
    size, least = policy.size(replicas), policy.least(replicas)
    if len(chosen) < least or (size is not None and len(chosen) != size):
        needed = f"least says {least} or more" if size is None else f"size says {size}"
        _refuse(policy, f"decide closed with {len(chosen)} updates of {replicas} replicas, where {needed}")


def _strange(chosen: Collection[Any], there: Sequence[int]) -> str | None:
    """The first that is chosen and is not there, if any is."""
    known = frozenset(there)
    if {*map(type, chosen)} == {int} and known.issuperset(chosen):  # as nearly always
        return None
    return next((repr(one) for one in chosen if not isinstance(one, Integral) or one not in known), None)


def _check_wait(policy: Policy, wait: WaitUntil) -> None:
    seconds, offers = wait.seconds, wait.offers
    if not is_number(seconds, -inf):
        _refuse(policy, f"decide answered {wait!r}; seconds is a time since the version was opened, such as 0.5")
    if isinstance(offers, bool) or not isinstance(offers, int):
        _refuse(policy, f"decide answered {wait!r}; offers is a number of updates, an int")


def _is_finite(weight: Any) -> bool:
    return isinstance(weight, (int, float)) and isfinite(weight)


def _called(policy: Policy, method: Callable[..., Answer], *arguments: Any) -> Answer:
    """What a method answers; an error of its own becomes one that says where."""
    try:
        return method(*arguments)
    except GraphError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = Site(at.filename, at.lineno or 0)
        raise GraphError(f"{where}: {policy!r} failed in {method.__name__}: {type(error).__name__}: {error}") from error


def _refuse(policy: Policy, what: str) -> NoReturn:
    raise GraphError(f"{site_of(type(policy))}: {policy!r}: {what}")
