"""Errors of devices with what they are of in front, nodes and variables, and the user's lines."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from flowrt.base.errors import DeviceLost, FlowrtError, GraphError, ResourceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from flowrt.base.plan import PlanNode
    from flowrt.base.spec import Spec
    from flowrt.sched.devices.driver import Driver, Kernel

MOST_NAMED = 16  # nodes, any of which may be the one


class Naming:
    """``with Naming(nodes):`` has what goes wrong on a device inside name these: one of them did it.

    They may be texts that say where, too; what was ``done`` with them follows.

    What a driver raises that is no error of flowrt's becomes one: `ResourceError` where memory is short.
    """

    __slots__ = ("_done", "_nodes")

    def __init__(self, nodes: Iterable[PlanNode | str], done: str = "") -> None:
        self._nodes, self._done = nodes, done

    def __enter__(self) -> None:
        """Nothing was said yet."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        match error:
            case DeviceLost():
                raise DeviceLost(f"{self._named()}: {error}") from error
            case FlowrtError():
                return
            case MemoryError():
                raise ResourceError(f"{self._named()}: no memory{f': {error}' if str(error) else ''}") from error
            case Exception():
                raise FlowrtError(f"{self._named()}: {type(error).__name__}: {error}") from error

    def _named(self) -> str:
        told = list(dict.fromkeys(node if isinstance(node, str) else node.where() for node in self._nodes))
        of = "" if len(told) == 1 else f"one of {len(told)}: "
        more = f" and {len(told) - MOST_NAMED} more" if len(told) > MOST_NAMED else ""
        return f"{of}{', '.join(told[:MOST_NAMED])}{more}{self._done}"


def prepared(
    driver: Driver, node: PlanNode, op: str, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]
) -> Kernel:
    """The kernel of an op that a node asks for, on inputs and outputs of these specs. Errors name the node."""
    try:
        with Naming([node]):
            kernel = driver.prepare(op, inputs, outputs, attrs)
            if not hasattr(kernel, "launch"):
                raise TypeError(f"prepare answers a kernel; got {kernel!r}")
            return kernel
    except GraphError as error:
        raise type(error)(f"{node.where()}: {error}") from error


def finish(driver: Driver, issued: Iterable[PlanNode]) -> None:
    """Wait until all that was ``issued`` is done. Where that fails, these are named."""
    with Naming(issued):
        driver.finish()


@contextmanager
def finished_though_it_fails(driver: Driver) -> Iterator[None]:
    """Where something goes wrong inside, what was issued there is waited for: it looks at words and operands still."""
    try:
        yield
    except DeviceLost:  # which is asked for nothing any more
        raise
    except BaseException:
        with suppress(Exception):  # the first is told
            driver.finish()
        raise
