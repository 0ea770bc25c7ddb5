"""`Writer`: what a program tells, noted at once, for a thread to write."""

from __future__ import annotations

import asyncio
import operator
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import FeedError, GraphError, user_site
from flowrt.base.locating import fitting
from flowrt.base.plain import shortened
from flowrt.base.telling import telling
from flowrt.base.tracebacks import brief
from flowrt.finishing import to_the_end
from flowrt.graph import Graph
from flowrt.ops.slices import IndexedSlices
from flowrt.summary.told import ALL_IMAGES, BUCKETS, MOST_BUCKETS, MOST_IMAGES, Summary, counted

if TYPE_CHECKING:
    import os

    from flowrt.summary.event_file import EventFile
    from flowrt.train.reports import StepReport

Array = np.ndarray[Any, Any]

FLUSH_SECONDS = 2.0
MOST_BYTES = 256 << 20
NODE_BYTES = 256  # that a node of a graph holds, about, until it is written
NUMBERS = frozenset({float, int, np.float32, np.float64})
HOW_TO_HAVE = "pip install 'flowrt[tensorboard]'"


@brief
class Writer:
    """Writes summaries to a new file in ``folder``, which TensorBoard shows as a run.

    ``with`` and ``async with`` close it. Telling a value notes it, arrays as copies, from any thread; a thread of the
    writer's own writes every ``flush_seconds``, and what it has written is there whatever becomes of the process.
    Where more than ``most_bytes`` wait to be written, what is told is dropped, and the log says how much. Where the
    disk is full, the log says so once, and what waits is written when there is room; training goes on.

    Names may have slashes, by which TensorBoard groups them. A process that was forked opens one of its own.
    Raises `GraphError` where ``folder`` cannot be written to, or TensorBoard is not installed.
    """

    @fitting
    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        flush_seconds: float = FLUSH_SECONDS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        try:
            from flowrt.summary import events, graph_def
            from flowrt.summary.event_file import EventFile
            from flowrt.summary.training import Training
        except ImportError as error:
            raise GraphError(f"{user_site()}: fr.summary.Writer needs TensorBoard: {HOW_TO_HAVE}") from error
        self._events, self._graph_def, self._training = events, graph_def, Training()
        self._told: set[str] = set()  # of which names the log was told
        maker = events.EventMaker(self._training.sum_up)
        self._file: EventFile = EventFile(folder, maker, events.head(), flush_seconds, most_bytes)
        self._at_end = weakref.finalize(self, self._file.close)  # at the end of the process, too

    @telling
    def __repr__(self) -> str:
        return f"fr.summary.Writer to {self.path}{', closed' if self._file.closed else ''}"

    @property
    def path(self) -> str:
        """The file that it writes."""
        return self._file.path

    def __enter__(self) -> Writer:
        self._file.check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Writer:
        self._file.check_open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await to_the_end(self.aclose())

    # ── what is told ──

    def scalar(self, name: str, value: Any, step: int) -> None:
        """One number, such as a loss."""
        try:
            number = float(value) if type(value) in NUMBERS else _number(name, value)
        except OverflowError:
            raise _no_number(name, value) from None
        self._file.put(partial(self._events.scalar, name=_name(name), value=number), _step(step))

    def scalars(self, values: Mapping[str, Any], step: int) -> None:
        """Numbers by name."""
        if not isinstance(values, Mapping):
            raise GraphError(f"{user_site()}: scalars are {{name: value}}, not {shortened(values)}")
        for name, value in values.items():
            self.scalar(name, value, step)

    def histogram(self, name: str, values: Any, step: int, *, buckets: int = BUCKETS) -> None:
        """How numbers, of any shape, are distributed, in up to 65,536 ``buckets``; those that are not finite are left
        out, as the log says."""
        array = _copied(values.values if isinstance(values, IndexedSlices) else values, name)
        make = partial(
            self._events.histogram,
            name=_name(name),
            values=array,
            buckets=counted(buckets, "buckets", MOST_BUCKETS),
            told=self._told,
        )
        self._file.put(make, _step(step), array.nbytes)

    def image(self, name: str, pixels: Any, step: int, *, most: int = MOST_IMAGES) -> None:
        """The first ``most`` images of [height, width], [height, width, channels] or a batch of the latter.

        Of uint8, or floats from 0 to 1; with 1, 2, 3 or 4 channels: grey or RGB, without alpha or with it.
        """
        batch = _copied(_as_batch(_numbers(pixels, name), name)[: counted(most, "most", ALL_IMAGES)], name)
        make = partial(self._events.image, name=_name(name), batch=batch, told=self._told)
        self._file.put(make, _step(step), batch.nbytes)

    def text(self, name: str, text: str, step: int = 0) -> None:
        """A text, which TensorBoard shows as Markdown."""
        value = _text(text, "a text")
        self._file.put(partial(self._events.text, name=_name(name), value=value), _step(step), 4 * len(value) + 1024)

    def hyperparameters(self, values: Mapping[str, Any]) -> None:
        """What this run was set to, by name: TensorBoard compares runs by it. What is no number or text is told so."""
        if not isinstance(values, Mapping):
            raise GraphError(f"{user_site()}: hyperparameters are {{name: value}}, not {shortened(values)}")
        plain = {_name(name): _setting(value) for name, value in values.items()}
        self._file.put(partial(self._events.hyperparameters, values=plain), 0)

    def graph(self, graph: Graph) -> None:
        """The graph as it is now: its nodes by scope, their devices, shapes and lines of your program."""
        if not isinstance(graph, Graph):
            raise GraphError(f"{user_site()}: writer.graph takes an fr.Graph, not {shortened(graph)}")
        nodes = list(graph.nodes)
        self._file.put(partial(self._graph_def.graph, nodes=nodes), 0, NODE_BYTES * len(nodes))

    def summaries(self, values: Mapping[Summary, Any], step: int) -> None:
        """What a step answered for `fr.summary.merged`."""
        if not isinstance(values, Mapping) or not all(isinstance(told, Summary) for told in values):
            raise GraphError(
                f"{user_site()}: writer.summaries takes what session.run(fr.summary.merged(graph)) answers, not "
                f"{shortened(values)}"
            )
        for told, value in values.items():
            match told.kind:
                case "scalar":
                    self.scalar(told.name, value, step)
                case "histogram":
                    self.histogram(told.name, value, step, buckets=told.most)
                case "image":
                    self.image(told.name, value, step, most=told.most)

    def report(self, report: StepReport) -> None:
        """A step of `Replicated.steps`: its loss, metrics, seconds, whose updates were kept and late, and who is slow.

        Of each replica there are latencies and the parts of its steps, each time that is written; of steps that are
        undone, as a server was lost, nothing stays.
        """
        undone = getattr(report, "rolled_back", None)
        if undone is not None:
            self._file.put(self._events.restart, undone.step + 1)
        try:
            self._file.put(partial(self._training.step, report=report), report.step, 1024 + _measured_bytes(report))
        except AttributeError:
            raise GraphError(
                f"{user_site()}: writer.report takes a report of trainer.steps, not {shortened(report)}"
            ) from None

    # ── its end ──

    def flush(self) -> None:
        """Wait until all that was told is written; raises `ResourceError` where it cannot be, as on a full disk."""
        from flowrt.summary.event_file import refused

        done, answers = threading.Event(), list[str | None]()

        def tell(why: str | None) -> None:
            answers.append(why)
            done.set()

        self._file.when_written(tell)
        done.wait()
        if answers[0] is not None:
            raise refused(answers[0])

    async def aflush(self) -> None:
        """`flush`, while the event loop goes on."""
        from flowrt.summary.event_file import refused

        why = await self._written()
        if why is not None:
            raise refused(why)

    async def _written(self) -> str | None:
        """Await that all is written; answers why it is not."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str | None] = loop.create_future()

        def settle(why: str | None) -> None:
            if not answer.done():
                answer.set_result(why)

        def tell(why: str | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, why)

        self._file.when_written(tell)
        return await answer

    def close(self) -> None:
        """Write what was told, as far as that can be, and end. Twice is once."""
        self._at_end()

    async def aclose(self) -> None:
        """`close`, while the event loop goes on."""
        if not self._file.closed:
            await self._written()
        self.close()


def _name(name: Any) -> str:
    if name:
        return _text(name, "a summary's name")
    raise GraphError(f"{user_site()}: a summary has a name, not {name!r}")


def _text(value: Any, what: str) -> str:
    with suppress(UnicodeEncodeError):
        if isinstance(value, str) and value.encode() is not None:
            return value
    raise GraphError(f"{user_site()}: {what} is a str of whole characters, not {shortened(value)}")


def _step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -(1 << 63) - 1
    if not -(1 << 63) <= number < 1 << 63:
        raise GraphError(f"{user_site()}: step is a whole number, such as report.step, not {shortened(step)}")
    return number


def _number(name: Any, value: Any) -> float:
    array = _numbers(value, name)
    if array.size != 1:
        raise FeedError(
            f"{user_site()}: the scalar {name!r} is one number, not {list(array.shape)} of them; write their mean, or "
            "writer.histogram"
        )
    return float(array.reshape(()).astype(np.float64))


def _copied(values: Any, name: Any) -> Array:
    return np.array(_numbers(values, name), order="C")


def _numbers(values: Any, name: Any) -> Array:
    """``values`` as an array of real numbers, of any dtype that float64 can be made of."""
    with suppress(TypeError, ValueError):
        array = np.asarray(values)
        if array.dtype.kind not in "OSUMmc":
            np.empty(0, array.dtype).astype(np.float64)  # raises for what no number can be made of
            return array
    raise _no_number(name, values)


def _no_number(name: Any, value: Any) -> FeedError:
    return FeedError(f"{user_site()}: {name!r} is told in real numbers, not {shortened(value)}")


def _as_batch(pixels: Array, name: Any) -> Array:
    """``pixels`` as [batch, height, width, channels]."""
    match pixels.shape:
        case (_, _):
            return pixels[None, :, :, None]
        case (_, _, 1 | 2 | 3 | 4):
            return pixels[None]
        case (_, _, _, 1 | 2 | 3 | 4):
            return pixels
    raise FeedError(
        f"{user_site()}: the image {name!r} is [height, width], [height, width, channels] or [batch, height, width, "
        f"channels], of 1 to 4 channels, not {list(pixels.shape)}; channels come last"
    )


def _setting(value: Any) -> bool | int | float | str:
    plain = value.item() if isinstance(value, (np.generic, np.ndarray)) and value.size == 1 else value
    is_one = isinstance(plain, (bool, float, str)) or (isinstance(plain, int) and abs(plain) < 1 << 1023)
    return plain if is_one else repr(plain)


def _measured_bytes(report: StepReport) -> int:
    return 0 if report.measured is None else len(report.measured[0].times)
