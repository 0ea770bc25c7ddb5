"""Devices of your own, beside the host's cores and NVIDIA's GPUs.

A `Kind` finds and opens them, a `Driver` is one: its memory, its copies and its kernels. `register` gives them a name::

    fr.devices.register("arena", ArenaKind)

    async with fr.Session(graph, options=fr.Options(devices=("arena:0",))) as session: ...

``examples/arena.py`` is one, whole.
"""

from collections.abc import Mapping

from flowrt.base.errors import GraphError, user_site
from flowrt.kernels.language.twin import cuda
from flowrt.sched.devices.driver import Driver, Kernel, Kind
from flowrt.sched.devices.kinds import register
from flowrt.sched.devices.on_host import HostKernel, computes_on_host
from flowrt.sched.host.memory import MemoryStatistics
from flowrt.session.blocking import BlockingSession
from flowrt.session.session import Session

__all__ = [
    "Driver",
    "HostKernel",
    "Kernel",
    "Kind",
    "MemoryStatistics",
    "computes_on_host",
    "cuda",
    "memory",
    "register",
]


def memory(session: Session | BlockingSession) -> Mapping[str, MemoryStatistics]:
    """By device of an in-process session, in bytes: what is held now, at most so far (``peak``), and the ``limit``."""
    inner = session._session if isinstance(session, BlockingSession) else session
    if not isinstance(inner, Session):
        raise GraphError(f"{user_site()}: fr.devices.memory takes a session, not {session!r}")
    return inner._open().memory()
