"""Whether updates of a trainer are packed for the way to its servers, and which parts of them how.

Law: all replicas' updates are packed alike, so that what they come to does not hang on who computes where, and copies
of servers hold the same bits. Of one host, where memory is shared, nothing is packed: it would only cost. What is not
float32, or short, travels as it is. Rows of a table go as bfloat16 in either case: what one batch leaves of its rows
belongs to no other's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from flowrt.base.errors import GraphError, user_site
from flowrt.sched.drivers.packing import BFLOAT16, INT8
from flowrt.train.updates import of_rows, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flowrt.graph import Tensor
    from flowrt.session.runners import Runner
    from flowrt.train.updates import Gradient

Begin = TypeVar("Begin")
LEAST = 1024  # numbers, 4 KiB: fewer cost a message no more than its head does
HOW = (BFLOAT16, INT8)


def checked_compression(how: Any) -> str:
    """What a program asks for; empty for nothing."""
    if how is None:
        return ""
    if how not in HOW:
        words = " or ".join(map(repr, HOW))
        raise GraphError(f"{user_site()}: compression={how!r}: expected {words}, or None for updates as they are")
    return str(how)


def packed_as(how: str, gradients: Sequence[Gradient]) -> tuple[str, ...]:
    """How each part of an update is packed, however long it turns out to be; empty where it is not."""
    return tuple([_packed(how, part, rows) for part, rows in zip(parts_of(gradients), of_rows(gradients), strict=True)])


def _packed(how: str, part: Tensor, rows: bool) -> str:
    if part.dtype != np.float32 or (part.spec.known and part.spec.nbytes < 4 * LEAST):
        return ""
    return how if part.spec.known and not rows else BFLOAT16


class PackingChoice:
    """How updates are packed in the runs of one iteration: as the program ``asked``, where hosts are apart.

    That is seen once, as the first of them begins, of the nodes that are there then.
    """

    def __init__(self, asked: str) -> None:
        self._asked = asked
        self.how: str | None = None  # empty where they are not; None until it is known

    def begin(self, how: str | None = None) -> None:
        """Another iteration begins, or a run in which it is known ``how``."""
        self.how = how

    def see(self, runner: Runner, replicas: Sequence[str], servers: Sequence[str]) -> None:
        """Choose, if that is to be done, for the tasks of replicas and those of servers."""
        if self.how is None:
            self.how = self._asked if self._asked and _are_apart(runner, replicas, servers) else ""

    def of_server(self, begin: Callable[..., Begin], gradients: Sequence[Gradient]) -> Callable[..., Begin]:
        """``begin``, with how each part of ``gradients`` comes to a server, as it is known then."""
        return lambda **about: begin(packed=self._packed(gradients), **about)

    def of_replica(self, begin: Callable[..., Begin], gradients: Sequence[Sequence[Gradient]]) -> Callable[..., Begin]:
        """As `of_server`, for all servers."""
        return lambda **about: begin(packed=tuple(map(self._packed, gradients)) if self.how else (), **about)

    def _packed(self, gradients: Sequence[Gradient]) -> tuple[str, ...]:
        return packed_as(self.how, gradients) if self.how else ()


def _are_apart(runner: Runner, replicas: Sequence[str], servers: Sequence[str]) -> bool:
    """Whether an update goes from one host to another, or is to travel as if it did."""
    there = [[task for task in tasks if task not in runner.lost] for tasks in (replicas, servers)]
    return any(runner.way(one, other) == "tcp" for one in there[0] for other in there[1] if one != other)
