"""Errors of devices with the nodes in front that they are of, and the user's lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrt.base.errors import DeviceLost, GraphError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flowrt.base.plan import PlanNode
    from flowrt.sched.devices.driver import Driver

MOST_NAMED = 16  # nodes, any of which may be the one


class Naming:
    """``with Naming(nodes):`` has what is said of a device that is lost inside name these: one of them did it."""

    __slots__ = ("_nodes",)

    def __init__(self, nodes: Iterable[PlanNode]) -> None:
        self._nodes = nodes

    def __enter__(self) -> None:
        """Nothing was said yet."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DeviceLost):
            told = list(dict.fromkeys(node.where() for node in self._nodes))
            of = "" if len(told) == 1 else f"one of {len(told)}: "
            more = f" and {len(told) - MOST_NAMED} more" if len(told) > MOST_NAMED else ""
            raise DeviceLost(f"{of}{', '.join(told[:MOST_NAMED])}{more}: {error}") from error


def finish(driver: Driver, issued: Iterable[PlanNode]) -> None:
    """Wait until all that was ``issued`` is done. Where the device is lost, these are named."""
    with Naming(issued):
        driver.finish()


def located(node: PlanNode, error: GraphError) -> GraphError:
    """The error with the node and the user's line in front."""
    return type(error)(f"{node.where()}: {error}")
