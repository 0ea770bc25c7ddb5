"""A picture of where the time of replicas' steps goes. It takes matplotlib, which nothing else here does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flowrt.base.errors import GraphError, not_written, user_site
from flowrt.train.times import PARTS

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

SHOWN = 512  # newest steps of each replica that are drawn one by one
COLORS = {  # by part: those of Okabe and Ito, which everybody can tell apart
    "input": "#E69F00",
    "pull": "#56B4E9",
    "compute": "#009E73",
    "push": "#0072B2",
    "wait": "#DDDDDD",
    "server": "#CC79A7",
}


class Drawn(Protocol):
    """What there is to draw: `statistics.Statistics`."""

    @property
    def replicas(self) -> Sequence[Any]: ...

    @property
    def slow(self) -> Sequence[Any]: ...

    @property
    def records(self) -> Mapping[str, np.ndarray[Any, Any]]: ...


def draw(statistics: Drawn, path: str | os.PathLike[str]) -> None:
    """Draw what `Statistics.plot` says."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GraphError(
            f"{user_site()}: a picture of statistics takes matplotlib, which is not installed: "
            "pip install 'flowrt[stragglers]'"
        ) from error
    replicas = len(statistics.replicas)
    figure = Figure(figsize=(9.0, 2.5 + 0.35 * replicas), layout="constrained")
    bars, course = figure.subplots(1, 2)
    _draw_bars(bars, statistics)
    _draw_course(course, statistics)
    figure.suptitle("; ".join(map(str, statistics.slow)) or "nobody is slow", fontsize=9, wrap=True)
    try:
        figure.savefig(path)
    except OSError as error:
        raise not_written(path, error) from error
    except ValueError as error:  # an ending that is no format
        raise GraphError(f"{user_site()}: {error}") from error


def _draw_bars(axes: Axes, statistics: Drawn) -> None:
    """The median of each part, a bar for each replica."""
    slow = {found.replica: found.cause for found in statistics.slow}
    names = [f"{r}: {slow[r]}" if r in slow else str(r) for r in range(len(statistics.replicas))]
    left = np.zeros(len(names))
    for part in PARTS:
        seconds = np.array([0.0 if each.times is None else getattr(each.times, part) for each in statistics.replicas])
        axes.barh(names, 1e3 * seconds, left=1e3 * left, color=COLORS[part], label=part)
        left += seconds
    axes.invert_yaxis()
    axes.set_xlabel("median of a step, ms")
    axes.set_ylabel("replica")
    axes.legend(ncols=3, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _draw_course(axes: Axes, statistics: Drawn) -> None:
    """How long each of the newest steps took each replica, until its update was there; crosses were cut off."""
    records = statistics.records
    seconds = np.nan_to_num([records[part] for part in ("input", "pull", "compute", "push")]).sum(0)
    for replica in range(len(statistics.replicas)):
        mine = np.nonzero(records["replica"] == replica)[0][-SHOWN:]
        done, cut = mine[~records["cut"][mine]], mine[records["cut"][mine]]
        (line,) = axes.plot(records["version"][done], 1e3 * seconds[done], ".", ms=2, label=f"replica {replica}")
        axes.plot(records["version"][cut], 1e3 * seconds[cut], "x", ms=3, color=line.get_color())
    axes.set_yscale("log")
    axes.set_xlabel("version")
    axes.set_ylabel("until the update is there, ms")
    axes.legend(fontsize=7, markerscale=4, frameon=False)
