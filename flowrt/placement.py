"""Where nodes go, kept apart from the model that they compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from flowrt.base.device import Device
from flowrt.base.errors import GraphError, PlacementError, path_of, user_site
from flowrt.base.familiar import answering
from flowrt.base.plain import is_number
from flowrt.base.valueclass import valueclass

if TYPE_CHECKING:
    import os

__all__ = ["Auto", "Rules", "profile_of"]


@valueclass
class Rules:
    """Devices by node name: ``Rules({"embedding/*": "/job:ps"})``. The first glob that matches a node's name counts.

    A rule refines what the graph leaves open; a device the graph asks for stays. Raises `PlacementError` for a device
    that cannot be parsed.
    """

    devices: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for text in _by_pattern("devices", self.devices, '{"embedding/*": "/job:ps"}').values():
            try:
                Device.parse(text)
            except PlacementError as error:
                raise PlacementError(f"{user_site()}: {error}") from None


@valueclass
class Auto(Rules):
    """Devices by prediction: each part of the graph goes where the whole is expected to be done soonest.

    ``devices`` are rules, as those of `Rules`, which go before; so does what the graph asks for. The seconds that ops
    take are guessed from what they compute and move, or told by ``profile``: by patterns of node names, as what was
    measured (`profile_of` has it of a trace). Between tasks, ``bandwidth`` bytes a second and ``latency`` seconds are
    expected. All is decided once, for all steps of a session, and the same for the same graph and devices. See the
    guide on placement for what is predicted, and how.

    Raises `PlacementError` for a device that cannot be parsed, and numbers that are not positive.
    """

    profile: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float = 1e9
    latency: float = 2e-4

    def __post_init__(self) -> None:
        Rules.__post_init__(self)
        profile = _by_pattern("profile", self.profile, '{"left/*": 2e-3}')
        numbers: list[tuple[str, Any]] = [("bandwidth", self.bandwidth), ("latency", self.latency), *profile.items()]
        for name, value in numbers:
            if not is_number(value) or (name == "bandwidth" and value == 0):
                raise PlacementError(
                    f"{user_site()}: {name} of fr.placement.Auto is a positive number, in seconds or bytes a second, "
                    f"not {value!r:.80}"
                )


def _by_pattern(what: str, given: Any, example: str) -> Mapping[str, Any]:
    """``given``, if it says something of nodes by patterns of their names."""
    if isinstance(given, Mapping) and all(isinstance(pattern, str) for pattern in given):
        return given
    raise PlacementError(f"{user_site()}: {what} are told by patterns of nodes' names, as {example}, not {given!r:.80}")


def profile_of(path: str | os.PathLike[str]) -> dict[str, float]:
    """The seconds that each node took, by its name, of a file that `Session.tracing` has written: a ``profile`` of
    `Auto`.

    A node's launches are added up, each from the first thread that began it to the last one that ended; of several
    steps the median counts. Of ops that are computed as one, the node that the trace names has all. Raises `GraphError`
    for a file that is no such trace.
    """
    import gzip  # what no other program needs takes a hundredth of a second
    import json
    from glob import escape
    from statistics import median

    path = path_of(path, "a trace")
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        launches = [event for event in events if event.get("cat") == "launch"]
        spans: dict[Any, tuple[float, float]] = {}
        for each in launches:
            about = each["args"]
            key = escape(each["name"]), about["step"], each["pid"], about.get("tape"), about.get("launch")
            begins, ends = spans.get(key, (math.inf, 0.0))
            spans[key] = min(begins, each["ts"]), max(ends, each["ts"] + each["dur"])
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise GraphError(f"{user_site()}: {path} is no trace of session.tracing: {error!r}") from error
    taken: dict[str, dict[Any, float]] = {}
    for (name, step, *_), (begins, ends) in spans.items():
        steps = taken.setdefault(name, {})
        steps[step] = steps.get(step, 0.0) + 1e-6 * (ends - begins)
    return {name: median(steps.values()) for name, steps in taken.items()}


if not TYPE_CHECKING:
    __getattr__, __dir__ = answering("fr.placement", globals())
