"""What TensorBoard reads in a folder of event files: its own reader's word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.util.tensor_util import make_ndarray

if TYPE_CHECKING:
    from pathlib import Path


class Board:
    """All that is in ``folder``, by TensorBoard's `EventAccumulator`."""

    def __init__(self, folder: Path) -> None:
        self.reader = EventAccumulator(str(folder), size_guidance={"tensors": 0})
        self.reader.Reload()

    @property
    def names(self) -> list[str]:
        return list(self.reader.Tags()["tensors"])

    def values(self, name: str) -> dict[int, Any]:
        """By step, what was told: an array."""
        return {event.step: make_ndarray(event.tensor_proto) for event in self.reader.Tensors(name)}

    def scalars(self, name: str) -> dict[int, float]:
        return {step: float(value) for step, value in self.values(name).items()}

    def text(self, name: str) -> dict[int, str]:
        return {step: value.item().decode() for step, value in self.values(name).items()}

    def plugin(self, name: str) -> str:
        """Which of TensorBoard's plugins shows it."""
        plugin: str = self.reader.SummaryMetadata(name).plugin_data.plugin_name
        return plugin

    @property
    def graph(self) -> Any:
        """The `GraphDef`."""
        return self.reader.Graph()


def records(path: Path | str) -> list[Any]:
    """The events of one file, whose checksums TensorBoard looked at; what is torn at the end is left out."""
    return [Event.FromString(record) for record in RawEventFileLoader(str(path)).Load()]


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("events.out.tfevents.*"))


def counts(histogram: np.ndarray[Any, Any]) -> list[int]:
    """How many values each bucket has."""
    return [int(count) for count in histogram[:, 2]]
