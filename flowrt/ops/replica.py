"""What replicas and parameter servers say to each other, as ops that wait where waiting is due.

Every op here works on the group of one trainer, kept on the nodes under (container, group). ``turn`` is an int64 vector
(run, version): who a message is from, so that those of an earlier run of the trainer are told from those of this one.
Servers are numbered; server 0 coordinates. The protocol is `flowrt.sched.coordinator` and `flowrt.sched.shard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowrt.errors import SpecError
from flowrt.op import no_gradient, op
from flowrt.spec import Spec

if TYPE_CHECKING:
    from flowrt.op import Attr


def _check_turn(turn: Spec) -> None:
    if not turn.accepts(Spec("int64").dtype, (2,)):
        raise SpecError(f"a turn is (run, version), int64[2], not {turn}")


@no_gradient
@op(stateful=True, effect=True)
def start_group(
    turn: Spec, *, group: str, container: str, server: int, replicas: int, servers: int, policy: Attr
) -> None:
    """Begin a run of the group at a version, on one server; what is left of an earlier run is forgotten."""
    _check_turn(turn)


@no_gradient
@op(stateful=True, effect=True)
def begin_update(turn: Spec, *, group: str, container: str, replica: int) -> Spec:
    """Tell server 0 that a replica begins its update of a version; whether it may still count (a bool scalar)."""
    _check_turn(turn)
    return Spec("bool")


@no_gradient
@op(stateful=True, effect=True)
def delay(values: Sequence[Spec]) -> tuple[Spec, ...]:
    """``values``, after the delay that the node was started with, if any: for experiments with stragglers."""
    return tuple(value.without_value() for value in values)


@no_gradient
@op(stateful=True, effect=True)
def hold_update(turn: Spec, parts: Sequence[Spec], *, group: str, container: str, server: int, replica: int) -> Spec:
    """Leave a server its parts of a replica's update; its verdict (an int64 scalar)."""
    _check_turn(turn)
    return Spec("int64")


@no_gradient
@op(stateful=True, effect=True)
def offer_update(turn: Spec, verdicts: Sequence[Spec], *, group: str, container: str, replica: int) -> Spec:
    """Offer server 0 the update that all servers gave their ``verdicts`` on; what becomes of it (an int64 scalar)."""
    _check_turn(turn)
    return Spec("int64")


@no_gradient
@op(stateful=True, effect=True)
def await_quorum(turn: Spec, *, group: str, container: str) -> Spec:
    """Wait until a version's set of replicas is fixed: int64, in replica order. Raises when it never can be."""
    _check_turn(turn)
    return Spec("int64", (None,))


@no_gradient
@op(stateful=True, effect=True)
def take_updates(
    turn: Spec, replicas: Spec, *, group: str, container: str, server: int, dtypes: tuple[str, ...], shapes: Any
) -> tuple[Spec, ...]:
    """The mean, over the set ``replicas``, of each part that a server holds."""
    _check_turn(turn)
    return tuple(Spec(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True))


@no_gradient
@op(stateful=True, effect=True)
def publish_shard(turn: Spec, *, group: str, container: str, server: int) -> Spec:
    """Let a server, whose variables are written, go to the next version; answers it (an int64 scalar)."""
    _check_turn(turn)
    return Spec("int64")


@no_gradient
@op(stateful=True, effect=True)
def publish_version(turn: Spec, versions: Sequence[Spec], *, group: str, container: str) -> tuple[Spec, Spec]:
    """Open the next version, which all servers are at; the receipts of this one: replicas and outcomes, int64 both."""
    _check_turn(turn)
    return Spec("int64", (None,)), Spec("int64", (None,))


@no_gradient
@op(stateful=True, effect=True)
def lose_replicas(turn: Spec, replicas: Spec, *, group: str, container: str) -> None:
    """Tell server 0 that ``replicas`` (an int64 vector) are gone; an update of theirs that is whole still counts."""
    _check_turn(turn)
