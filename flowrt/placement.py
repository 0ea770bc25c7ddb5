"""Where nodes go, kept apart from the model that they compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from flowrt.base.device import Device
from flowrt.base.familiar import answering
from flowrt.base.valueclass import valueclass

__all__ = ["Rules"]


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


if not TYPE_CHECKING:
    __getattr__, __dir__ = answering("fr.placement", globals())
