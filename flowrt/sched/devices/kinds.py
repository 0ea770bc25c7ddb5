"""The kinds of devices there are, and those found when a host opens."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from flowrt.base.device import HOST_KIND
from flowrt.base.errors import GraphError
from flowrt.base.traits import Arranged, traits_of
from flowrt.kernels.language.table import find_kernel
from flowrt.sched.devices.driver import Driver, Kind
from flowrt.sched.devices.names import HOST, check_names
from flowrt.sched.regions.regions import CONSTANT, READ

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
WITHOUT_KERNEL = frozenset({CONSTANT, READ, "assign", "bring", "shape_of", "no_op"})
"""What the scheduler does by itself on any device."""

_log = logging.getLogger(__name__)
_kinds: dict[str, Callable[[], Kind]] = {}
_made: dict[str, Kind] = {}  # those of them that somebody asked for


def register(kind: str, make: Callable[[], Kind]) -> None:
    """Have ``make`` answer what knows the devices named ``kind:0``, ``kind:1``, …, when one is first asked for.

    Nodes of a cluster learn of a kind by ``--import`` of the module that registers it. Raises `GraphError` for a name
    that is none, and for that of the host's own.
    """
    if not isinstance(kind, str) or not re.fullmatch("[a-z][a-z0-9_]*", kind) or kind == HOST_KIND:
        raise GraphError(f"a kind of devices is named by small letters and digits, and not {HOST_KIND}; got {kind!r}")
    if not callable(make):
        raise GraphError(f"what is registered as {kind!r} is called to make the kind, so it is its class; got {make!r}")
    _kinds[kind] = make
    _made.pop(kind, None)


def find_kind(name: str) -> Kind | None:
    """What knows the devices of a kind; None for one that nobody has registered."""
    if name not in _made and name in _kinds:
        _made[name] = _whole(_kinds[name](), f"the kind of the devices {name!r}", Kind)
    return _made.get(name)


def supports(op: str, dtypes: Sequence[np.dtype[Any]], kind: str) -> bool:
    """Whether devices of a ``kind`` other than the host's compute ``op`` on these dtypes (inputs, then outputs)."""
    known = find_kind(kind)
    if known is None:
        return False
    traits = traits_of(op)
    if traits.update is not None and traits.update.whole is not None:
        return known.supports(traits.update.whole, [dtypes[0]] * 3)
    if op in WITHOUT_KERNEL or traits.view is Arranged.RESHAPED:
        return True
    try:
        return known.supports(op, dtypes)
    except Exception as error:
        raise GraphError(f"the devices {kind!r} fail to say whether they compute {op}: {error!r}") from error


def _whole(made: T, what: str, protocol: type[Any]) -> T:
    """What somebody has written, who may have forgotten some of it."""
    wanted = [name for name in vars(protocol) if not name.startswith("_")]
    if missing := [name for name in wanted if not hasattr(made, name)]:
        raise GraphError(f"{what}, {made!r}, has no {', '.join(missing)}; see flowrt.devices.{protocol.__name__}")
    return made


def open_drivers(names: Iterable[str]) -> dict[str, Driver | None]:
    """The drivers of those devices that are here, in the order asked for; None is the host's own, always among them.

    Of what is not there, or cannot be opened, the log says why. Raises `GraphError` for a kind that nobody registered.
    """
    found: dict[str, Driver | None] = {}
    for name in check_names(names):
        there, why = _there(name.partition(":")[0])
        wanted = there if ":" not in name else [name] if name in there else []
        if not wanted:
            _log.warning("%s is not used: %s", name, why or f"there are {', '.join(there)}")
        for each in wanted:
            if each not in found:
                _open(each, found)
    found.setdefault(HOST, None)
    return found


def _there(kind: str) -> tuple[list[str], str]:
    """The devices of a kind, and why there is none."""
    if kind == HOST_KIND:
        return [HOST], ""
    known = find_kind(kind)
    if known is None:
        kinds = ", ".join([HOST_KIND, *sorted(_kinds)])
        raise GraphError(
            f"nobody has registered the devices {kind!r}: there are {kinds}; import the module that registers them"
        )
    try:
        count = known.count()
    except Exception as error:
        return [], str(error) or type(error).__name__
    if not isinstance(count, int):
        raise GraphError(f"count() of the devices {kind!r} answers how many there are, an int; got {count!r}")
    return [f"{kind}:{index}" for index in range(count)], "" if count else f"there is no {kind} device"


def _open(name: str, found: dict[str, Driver | None]) -> None:
    if name == HOST:
        found[name] = None
        return
    kind, _, index = name.partition(":")
    known = find_kind(kind)
    assert known is not None
    try:
        driver = known.open(int(index))
    except Exception as error:
        _log.warning("%s is not used: %s: %s", name, type(error).__name__, error)
    else:
        found[name] = _whole(driver, f"the driver of {name}", Driver)


class _Cuda:
    """NVIDIA's GPUs, or the simulator that stands for them; see `flowrt.kernels.cuda.twins`."""

    def count(self) -> int:
        from flowrt.kernels.cuda.present import count

        return count()

    def supports(self, op: str, dtypes: Sequence[np.dtype[Any]]) -> bool:
        return find_kernel(op, "cuda", dtypes) is not None

    def open(self, index: int) -> Driver:
        from flowrt.kernels.cuda.driver import open_driver

        return open_driver(index)


register("cuda", _Cuda)
