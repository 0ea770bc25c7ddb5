"""What an iteration tells of each step of training, and the iterator that tells it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import field
from math import nan
from typing import TYPE_CHECKING, Any, NoReturn

from flowrt.base.errors import GraphError, user_site
from flowrt.base.telling import telling
from flowrt.base.tracebacks import brief
from flowrt.base.valueclass import maker, valueclass
from flowrt.train.times import Clocks, Times, times_of

if TYPE_CHECKING:
    from flowrt.base.errors import FlowrtError
    from flowrt.sched.drivers.messages import Report
    from flowrt.train.diagnosis import Slow
    from flowrt.train.going_back import RolledBack


@valueclass
class StepReport:
    """One step of training: ``step`` updates have been applied so far, counted from 1.

    ``kept``, ``late``, ``refused`` (not finite) and ``lost`` are replicas, by what became of their updates. ``errors``
    says why those of ``lost`` could not compute theirs whose nodes are there, as where memory was short. ``loss`` and
    ``metrics`` are means over the kept ones; ``seconds`` is how long the step took, without the time in which it was
    ready and not asked for. ``why`` is the policy's reason to keep these. ``staleness`` says of each of ``kept`` how
    many versions older than the one that it moved were the values that it was computed from. ``noise_scale`` is the
    gradient noise scale so far, in updates of a replica: beyond so many, more of them make a step little better
    (McCandlish et al., arXiv 1812.06162); NaN where the policy does not measure it, or nothing was measured yet.
    ``batches`` says by replica which batches this step decided about, by identity: their places, from 0, in the order
    in which the source was drawn. ``rolled_back`` tells of what was undone since the report before, as a parameter
    server was lost; None mostly. ``slow`` is who is slow at the time, and why; ``times`` is how the replicas' steps
    divided, of those that server 0 has heard of since the report before. One was ``skipped`` that moved nothing, as an
    update of ``kept`` was not finite: a loss whose scale changes comes to that at times, see `flowrt.LossScaled`.
    """

    step: int
    loss: float
    metrics: Mapping[str, Any]
    kept: tuple[int, ...]
    late: tuple[int, ...]
    lost: tuple[int, ...]
    refused: tuple[int, ...]
    seconds: float
    why: str = ""
    staleness: tuple[int, ...] = ()
    noise_scale: float = nan
    slow: tuple[Slow, ...] = ()
    batches: Mapping[int, Sequence[int]] = field(default_factory=dict)
    rolled_back: RolledBack | None = None
    skipped: bool = False
    errors: Mapping[int, FlowrtError] = field(default_factory=dict, compare=False)
    measured: tuple[Report, Clocks] | None = field(default=None, repr=False, compare=False)

    @telling
    def __repr__(self) -> str:
        became = {"kept": self.kept, "late": self.late, "lost": self.lost, "refused": self.refused}
        told = ", ".join(f"{what} {list(replicas)}" for what, replicas in became.items() if replicas or what == "kept")
        moved = ", skipped" if self.skipped else ""
        return f"step {self.step}: loss {self.loss:.6g}, {told}{moved}, {self.seconds:.3g} s"

    @property
    def times(self) -> Mapping[int, Times]:
        """By replica, how its step divided; where it was late or cut off, of the version that it was at."""
        return {} if self.measured is None else times_of(*self.measured)


make_step_report = maker(StepReport)


class Reports(AsyncGenerator[StepReport, None]):
    """What `Replicated.steps` answers: an asynchronous iterator of reports, and nothing else."""

    def __init__(self, reports: AsyncGenerator[StepReport, None]) -> None:
        self._reports = reports

    def __anext__(self) -> Coroutine[Any, Any, StepReport]:
        return self._reports.__anext__()

    def asend(self, value: None) -> Coroutine[Any, Any, StepReport]:
        """Of asynchronous generators; see `__anext__`."""
        return self._reports.asend(value)

    def athrow(self, *error: Any) -> Coroutine[Any, Any, StepReport]:
        """Of asynchronous generators: raise an error where the iteration stands."""
        return self._reports.athrow(*error)

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Cancel what runs, and wait for it."""
        return self._reports.aclose()

    @brief
    def __iter__(self) -> NoReturn:
        raise GraphError(f"{user_site()}: write `async for report in trainer.steps(session, batches)`")
