"""Policies as plain data, as they travel to the server that coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from flowrt.base.errors import GraphError, SpecError, how_to_bring, user_site
from flowrt.sched.policies.policy import Policy, known, site_of

NAME = "class"  # what the name of the class stands under, beside the fields, of which none can be called that
PLAIN = (type(None), bool, int, float, str, bytes)


def policy_to_data(policy: Any) -> dict[str, Any]:
    """``policy`` as it travels: its name, and its fields; policies among them likewise.

    Raises `GraphError` for what is no policy, and for one that cannot travel.
    """
    if not isinstance(policy, Policy):
        made = f"{policy.__name__}()" if isinstance(policy, type) and issubclass(policy, Policy) else "AllOf()"
        raise GraphError(f"{user_site()}: {policy!r} is not a policy; use one such as fr.train.{made}")
    kind = type(policy)
    if not is_dataclass(policy) or not policy.__dataclass_params__.frozen:
        raise GraphError(
            f"{site_of(kind)}: {kind.__qualname__} cannot travel to a node; make it a frozen dataclass, by "
            "@dataclass(frozen=True)"
        )
    return {NAME: kind.__qualname__, **{name: _to_data(policy, name, getattr(policy, name)) for name in _names(policy)}}


def policy_from_data(data: Mapping[str, Any]) -> Policy:
    """The policy that `policy_to_data` wrote; raises `GraphError` where its class is not known here."""
    name = data[NAME]
    if name not in known:
        raise GraphError(f"a policy named {name} is not known here; {how_to_bring('it')}")
    kind: Any = known[name]
    try:
        made: Policy = kind(**{field: _from_data(value) for field, value in data.items() if field != NAME})
    except (SpecError, TypeError) as error:
        raise GraphError(f"{site_of(kind)}: {name} is another policy here than where it was made: {error}") from error
    return made


def _names(policy: Any) -> list[str]:
    """The fields that make a policy: all but what the client alone needs, by ``metadata={"travels": False}``."""
    return [field.name for field in fields(policy) if field.init and field.metadata.get("travels", True)]


def _to_data(policy: Policy, name: str, value: Any) -> Any:
    if isinstance(value, Policy):
        return policy_to_data(value)
    if isinstance(value, tuple):
        return tuple(_to_data(policy, name, item) for item in value)
    if not isinstance(value, PLAIN):
        raise GraphError(
            f"{user_site()}: {type(policy).__qualname__}.{name} cannot travel to a node: expected numbers, texts, "
            f"policies and tuples of them, got {value!r}"
        )
    return value


def _from_data(value: Any) -> Any:
    match value:
        case tuple():
            return tuple(_from_data(item) for item in value)
        case dict():
            return policy_from_data(value)
        case _:
            return value
