"""What a server says of a run whose server 0 may be lost: what it was ordered, and what of that there is to report.

Law: a set is fixed once and ordered once, so whoever was ordered it knows it as well as server 0 did. Of updates that
were not kept, others than server 0 know nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import TYPE_CHECKING

from flowrt.base.valueclass import replace
from flowrt.sched.drivers.messages import ApplyOrder, Report
from flowrt.sched.server.reporting import OUTCOMES
from flowrt.sched.versions.ledger import Outcome

if TYPE_CHECKING:
    from flowrt.sched.versions.opening import Left

WHY = "as was ordered by a server that was lost before it told of more"


def left_with_orders(left: Left, orders: Sequence[ApplyOrder], server: int) -> Left:
    """What is ``left`` of a run on one of its other servers, which heard these orders."""
    left = replace(left, server=server)
    if not orders:
        return left
    last = orders[-1]
    return replace(
        left,
        order=(last.version, last.replicas),
        weights=last.weights,
        versions=last.versions,
        unseen=tuple([report_of(order) for order in orders if order.version < left.version]),
    )


def report_of(order: ApplyOrder) -> Report:
    """What there is to report of an order that all have obeyed."""
    versions = order.versions or (order.version,) * len(order.replicas)
    kept = zip(order.replicas, order.batches, versions, strict=True)
    receipts = tuple([(r, batch, OUTCOMES.index(Outcome.KEPT), -1.0, order.version - at) for r, batch, at in kept])
    return Report(order.run, order.version, receipts, order.told, nan, why=WHY)
