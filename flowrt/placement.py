"""Where nodes go, kept apart from the model that they compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from flowrt.base.device import Device
from flowrt.base.errors import PlacementError
from flowrt.base.familiar import answering
from flowrt.base.valueclass import valueclass

__all__ = ["Auto", "Rules"]


@valueclass
class Rules:
    """Devices by node name: ``Rules({"embedding/*": "/job:ps"})``. The first glob that matches a node's name counts.

    A rule refines what the graph leaves open; a device the graph asks for stays. Raises `PlacementError` for a device
    that cannot be parsed.
    """

    devices: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for text in self.devices.values():
            Device.parse(text)


@valueclass
class Auto(Rules):
    """Devices by prediction: each part of the graph goes where the whole is expected to be done soonest.

    ``devices`` are rules, as those of `Rules`, which go before; so does what the graph asks for. The seconds that ops
    take are guessed from what they compute and move, or told by ``profile``: by patterns of node names, as what was
    measured. Between tasks, ``bandwidth`` bytes a second and ``latency`` seconds are expected. All is decided once, for
    all steps of a session, and the same for the same graph and devices. See the guide on placement for what is
    predicted, and how.

    Raises `PlacementError` for a device that cannot be parsed, and numbers that are not positive.
    """

    profile: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float = 1e9
    latency: float = 2e-4

    def __post_init__(self) -> None:
        Rules.__post_init__(self)
        for name, value in (("bandwidth", self.bandwidth), ("latency", self.latency), *self.profile.items()):
            if not value >= 0 or (name == "bandwidth" and value == 0):
                raise PlacementError(f"{name} of fr.placement.Auto is a positive number, in seconds or bytes a second")


if not TYPE_CHECKING:
    __getattr__, __dir__ = answering("fr.placement", globals())
