"""What is written of a value, as TensorBoard's plugins read it: each function adds one to an event.

Law: it is made in the writer's thread, of values that nobody changes any more. What has no picture, such as an image
without pixels or a histogram of NaN alone, is left out and told to the log, once for each name: it ends no training.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_FLOAT, DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layouts
from tensorboard.plugins.histogram import metadata as histograms
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.image import metadata as images
from tensorboard.plugins.scalar import metadata as scalars
from tensorboard.plugins.text import metadata as texts

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import SummaryMetadata

    from flowrt.summary.event_file import Entry

Array = np.ndarray[Any, Any]

CHUNK = 1 << 20  # entries that are counted at once, between which others have the interpreter
_log = logging.getLogger("flowrt.summary")
_SCALAR = scalars.create_summary_metadata("", "")
_HISTOGRAM = histograms.create_summary_metadata("", "")
_IMAGE = images.create_summary_metadata("", "")
_TEXT = texts.create_summary_metadata("", "")


def head() -> bytes:
    """What a file of events begins with."""
    written: bytes = Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString()
    return written


class EventMaker:
    """What makes records of entries; ``sum_up`` answers the events that are about all that was made before."""

    def __init__(self, sum_up: Callable[[], Iterable[Event]]) -> None:
        self._sum_up = sum_up

    def make(self, entry: Entry) -> list[bytes]:
        """The record of an entry; none of what is left out."""
        event = Event(wall_time=entry.time, step=entry.step)
        entry.add(event)
        return [event.SerializeToString()] if event.WhichOneof("what") else []

    def sum_up(self) -> list[bytes]:
        """Those of all that was made since it was asked last."""
        return [event.SerializeToString() for event in self._sum_up()]


def scalar(event: Event, name: str, value: float) -> None:
    """One number, in float32: what loads files fast for TensorBoard passes over wider ones."""
    event.summary.value.add(tag=name, metadata=_SCALAR, tensor=TensorProto(dtype=DT_FLOAT, float_val=[value]))


def text(event: Event, name: str, value: str) -> None:
    """A text, which TensorBoard shows as Markdown."""
    _strings(event, name, _TEXT, [value.encode()], ())


def histogram(event: Event, name: str, values: Array, buckets: int, told: set[str]) -> None:
    """How the finite ones of ``values`` are distributed, in buckets of one width."""
    rows, left_out = bucketed(values.reshape(-1), buckets)
    if left_out:
        _tell(told, name, "%d of %d values are not finite, and not in the histogram %r", left_out, values.size)
        if left_out == values.size:
            return
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in rows.shape])
    tensor = TensorProto(dtype=DT_DOUBLE, tensor_shape=shape, tensor_content=rows.tobytes())
    event.summary.value.add(tag=name, metadata=_HISTOGRAM, tensor=tensor)


def bucketed(values: Array, buckets: int) -> tuple[Array, int]:
    """[buckets, 3]: lower bound, upper bound and count of each; and how many of ``values`` [n] are not finite.

    Of values that are all the same, the last bucket has all; where there are none, there are zeros.
    """
    chunks = [values[start : start + CHUNK] for start in range(0, len(values), CHUNK)]
    ends, left_out = [], 0
    for chunk in chunks:
        finite = _finite(chunk)
        left_out += len(chunk) - len(finite)
        if len(finite):
            ends += [float(finite.min()), float(finite.max())]
    rows = np.zeros((buckets, 3))
    if not ends:
        return rows, left_out
    low, high = min(ends), max(ends)
    if low == high:
        rows[:, :2], rows[-1, 2] = low, len(values) - left_out
        return rows, left_out
    scale = 1.0 if np.isfinite(high - low) else 0.25  # to a power of two: nothing is rounded
    bounds = np.linspace(scale * low, scale * high, buckets + 1)
    for chunk in chunks:
        place = (scale * _finite(chunk) - scale * low) / (scale * high - scale * low) * buckets
        rows[:, 2] += np.bincount(np.minimum(place.astype(np.int64), buckets - 1), minlength=buckets)
        time.sleep(0)
    rows[:, 0], rows[:, 1] = bounds[:-1] / scale, bounds[1:] / scale
    return rows, left_out


def _finite(chunk: Array) -> Array:
    wide = chunk.astype(np.float64)
    return wide[np.isfinite(wide)]


def image(event: Event, name: str, batch: Array, told: set[str]) -> None:
    """The images of ``batch`` [n, height, width, channels]: uint8, or floats from 0 to 1, of which NaN is black."""
    if not batch.size:
        _tell(told, name, "an image of shape %s has no pixels; %r is left out", batch.shape)
        return
    files = [png(pixels) for pixels in batch]
    sizes = [str(size).encode() for size in (batch.shape[2], batch.shape[1])]
    _strings(event, name, _IMAGE, [*sizes, *files], (2 + len(files),))


def png(pixels: Array) -> bytes:
    """A PNG file of [height, width, channels]."""
    from PIL import Image  # which few programs need

    if pixels.dtype.kind == "b":
        pixels = pixels.astype(np.float32)
    if pixels.dtype.kind not in "iu":
        pixels = 255 * np.nan_to_num(pixels.astype(np.float32), nan=0.0, posinf=1.0, neginf=0.0) + 0.5
    whole = np.clip(pixels, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    channels = whole.shape[2]
    Image.fromarray(np.ascontiguousarray(whole[..., 0] if channels == 1 else whole)).save(file, "PNG")
    return file.getvalue()


def hyperparameters(event: Event, values: Mapping[str, bool | int | float | str]) -> None:
    """What this run was set to."""
    event.summary.MergeFrom(hparams_pb(values))


def restart(event: Event) -> None:
    """Have what was written of this step and later ones be taken back."""
    event.session_log.status = SessionLog.START


def charts(event: Event, patterns: Mapping[str, str]) -> None:
    """Charts of several scalars each: by title, the pattern of their names. Shown under Custom Scalars."""
    layout = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title="replicas",
                chart=[
                    layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=[pattern]))
                    for title, pattern in patterns.items()
                ],
            )
        ]
    )
    _strings(event, layouts.CONFIG_SUMMARY_TAG, layouts.create_summary_metadata(), [layout.SerializeToString()], ())


def _strings(
    event: Event, name: str, metadata: SummaryMetadata, values: Sequence[bytes], shape: tuple[int, ...]
) -> None:
    form = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in shape])
    tensor = TensorProto(dtype=DT_STRING, tensor_shape=form, string_val=values)
    event.summary.value.add(tag=name, metadata=metadata, tensor=tensor)


def _tell(told: set[str], name: str, words: str, *about: Any) -> None:
    """Say in the log what is left out, unless that was said of ``name`` before."""
    if name not in told:
        told.add(name)
        _log.warning(words, *about, name)
