"""How a session runs steps: what a program may choose about it."""

from __future__ import annotations

from numbers import Integral, Real

from flowrt.errors import GraphError, user_site
from flowrt.valueclass import valueclass


@valueclass
class Options:
    """How a session runs steps.

    ``optimize=False``: no pass rewrites, every node runs as written (tapes still do). ``tapes=False``: the machine runs
    every node. ``threads`` defaults to the cores the process may use. For an in-process session; nodes of a cluster
    have their own. ``transfer_budget`` bounds, in bytes, the tensors on their way here. ``memory_limit``, in bytes,
    bounds what the session's steps hold together with its variables; a step that does not fit, or without a limit does
    not fit what the machine has left, is refused with `ResourceError` before it runs. ``seed`` decides what random ops
    without a seed draw; None draws a new one per session.
    """

    optimize: bool = True
    tapes: bool = True
    threads: int | None = None
    transfer_budget: int = 256 << 20
    memory_limit: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _check("threads", self.threads is None or is_at_least(1, self.threads, Integral), "an integer from 1 up", self)
        _check("transfer_budget", is_at_least(1, self.transfer_budget, Real), "a number of bytes", self)
        limit = self.memory_limit
        _check("memory_limit", limit is None or is_at_least(0, limit, Real), "a number of bytes", self)
        _check("seed", self.seed is None or isinstance(self.seed, Integral), "an integer", self)


def is_at_least(least: int, value: object, kind: type) -> bool:
    """Whether a setting is a number of that kind (of `numbers`) from ``least`` up."""
    return isinstance(value, kind) and not isinstance(value, bool) and bool(value >= least)  # type: ignore[operator]


def _check(name: str, fits: bool, wanted: str, options: Options) -> None:
    if not fits:
        raise GraphError(f"{user_site()}: Options: {name} is {wanted}, got {getattr(options, name)!r}")
