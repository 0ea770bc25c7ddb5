"""How a session runs steps: what a program may choose about it."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from numbers import Integral

import numpy as np

from flowrt.base.errors import GraphError, user_site
from flowrt.base.locating import Fitting
from flowrt.base.plain import is_number, is_whole
from flowrt.base.valueclass import valueclass
from flowrt.sched.devices.names import check_names


@valueclass
class Options(Fitting):
    """How a session runs steps.

    ``optimize=False``: no pass rewrites, every node runs as written (tapes still do). ``tapes=False``: the machine runs
    every node. ``threads`` defaults to the cores the process may use. For an in-process session; nodes of a cluster
    have their own. ``transfer_budget`` bounds, in bytes, the tensors on their way here. ``memory_limit``, in bytes,
    bounds what the session's steps hold together with its variables; a step that does not fit, or without a limit does
    not fit what the machine has left, is refused with `ResourceError` before it runs. ``seed`` decides what random ops
    without a seed draw; None draws a new one per session.

    ``devices`` are those an in-process session looks for, as ``("cuda:0", "cpu:0")`` or, for all of a kind, ``"cuda"``;
    what nothing ties down goes to the first that is there. The host's own, ``cpu:0``, always is; of any other that is
    not, the log says why. ``device_memory_limit`` bounds, in bytes, what each of these others holds. With
    ``soft_placement`` what is asked to be on a device that is not there, or has no kernel for it, goes to one that
    has, and the log says so; else that is a `PlacementError`.
    """

    optimize: bool = True
    tapes: bool = True
    threads: int | None = None
    transfer_budget: int = 256 << 20
    memory_limit: int | None = None
    seed: int | None = None
    devices: str | Sequence[str] | None = None
    device_memory_limit: int | None = None
    soft_placement: bool = False

    def __post_init__(self) -> None:
        for name in ("optimize", "tapes", "soft_placement"):
            _check(name, isinstance(getattr(self, name), (bool, np.bool_)), "True or False", self)
        _check("threads", self.threads is None or is_whole(self.threads, 1), "an integer from 1 up", self)
        for name, optional in (("transfer_budget", False), ("memory_limit", True), ("device_memory_limit", True)):
            limit = getattr(self, name)
            fits = (optional and limit is None) or (is_number(limit, 1) and (limit == inf or limit % 1 == 0))
            _check(name, fits, "a number of bytes, from 1 up", self)
        try:
            names = None if self.devices is None else check_names(self.devices)
        except (GraphError, TypeError) as error:
            raise GraphError(f"{user_site()}: Options: devices: {error}") from None
        object.__setattr__(self, "devices", names)
        _check("seed", self.seed is None or isinstance(self.seed, Integral), "an integer", self)


def check_for_cluster(options: Options) -> None:
    """Raise `GraphError` for what a session on a cluster cannot choose, as its nodes are told that when they start."""
    for name in ("devices", "device_memory_limit"):
        if (given := getattr(options, name)) is not None:
            raise GraphError(
                f"{user_site()}: Options({name}={given!r}) is for a session in this process; nodes of a cluster have "
                "devices of their own: start workers with --devices, as fr.LocalCluster(devices=...) does"
            )


def _check(name: str, fits: bool, wanted: str, options: Options) -> None:
    if not fits:
        raise GraphError(f"{user_site()}: Options: {name} is {wanted}, got {getattr(options, name)!r}")
