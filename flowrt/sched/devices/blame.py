"""Errors of devices with the nodes in front that they are of, and the user's lines."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from flowrt.base.errors import DeviceLost, GraphError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from flowrt.base.plan import PlanNode
    from flowrt.sched.devices.driver import Driver

MOST_NAMED = 16  # nodes, any of which may be the one


@contextmanager
def naming(nodes: Iterable[PlanNode]) -> Iterator[None]:
    """Have what is said of a device that is lost inside name these nodes: the one that did it is among them."""
    try:
        yield
    except DeviceLost as error:
        told = list(dict.fromkeys(node.where() for node in nodes))
        of = "" if len(told) == 1 else f"one of {len(told)}: "
        more = f" and {len(told) - MOST_NAMED} more" if len(told) > MOST_NAMED else ""
        raise DeviceLost(f"{of}{', '.join(told[:MOST_NAMED])}{more}: {error}") from error


def finish(driver: Driver, issued: Iterable[PlanNode]) -> None:
    """Wait until all that was ``issued`` is done. Where the device is lost, these are named."""
    with naming(issued):
        driver.finish()


def located(node: PlanNode, error: GraphError) -> GraphError:
    """The error with the node and the user's line in front."""
    return type(error)(f"{node.where()}: {error}")
