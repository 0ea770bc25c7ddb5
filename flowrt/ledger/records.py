"""What a ledger's records say, and how they stand in the file: see `flowrt.ledger`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeAlias

from flowrt.base.errors import LedgerError
from flowrt.base.valueclass import valueclass
from flowrt.sched.versions.ledger import Outcome


@valueclass
class Setup:
    """Whose batches these are.

    ``policy`` is its plain form. ``servers`` is how many shards there are, ``seed`` the session's. ``local_steps`` are
    batches that a replica makes one update of. ``late`` is what becomes of updates that do not count: "drop", or
    "requeue": their batches are used again.
    """

    trainer: str
    replicas: int
    local_steps: int
    policy: dict[str, Any]
    servers: int
    seed: int
    late: str


@valueclass
class Begun:
    """Run number ``run`` began at ``version``, ``time`` seconds after 1970."""

    run: int
    version: int
    time: float


@valueclass
class Handed:
    """``replica`` is about to be handed ``identities``, as its batches from ``number`` on in this run."""

    replica: int
    number: int
    identities: tuple[int, ...]


@valueclass
class Made:
    """Version ``version`` of the variables was used, and the one after it made.

    A receipt is (replica, outcome, staleness, identities): the outcome's place in `Outcome`, how many versions old the
    values were, and the batches that the update was made of.
    """

    version: int
    receipts: tuple[tuple[int, int, int, tuple[int, ...]], ...]


@valueclass
class Returned:
    """``replica`` was lost, and server 0 says that it never began with ``identities``."""

    replica: int
    identities: tuple[int, ...]


@valueclass
class Undone:
    """The variables are at ``version`` again, ``because``. What had been kept since, ``identities``, counts as lost.

    Where ``again``, it is used again.
    """

    version: int
    because: str
    identities: tuple[int, ...]
    again: bool


@valueclass
class Missed:
    """The variables are at ``version``, and nothing is known of those between. ``identities`` may have been used."""

    version: int
    identities: tuple[int, ...]


@valueclass
class Over:
    """The run is over at ``version``; ``unused`` were handed out, and not used."""

    version: int
    unused: tuple[int, ...]


@valueclass
class Packed:
    """Of that run, which began last: how updates travel, see `train.compression`, and the version at which it began.

    Written where they are packed, or where the run had made versions before a client attached to it.
    """

    run: int
    compression: str
    begun: int


IDENTITIES = 1 << 32  # batches, of each of which readers keep a byte
Record: TypeAlias = "Setup | Begun | Handed | Made | Returned | Undone | Missed | Over | Packed"
KINDS: tuple[Any, ...] = (Setup, Begun, Handed, Made, Returned, Undone, Missed, Over, Packed)
_FIELDS: dict[Any, Callable[[Any], Any]] = {kind: attrgetter(*(f.name for f in fields(kind))) for kind in KINDS}
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


def record_to_data(record: Record) -> tuple[Any, ...]:
    """A record as it stands in the file."""
    return _NUMBERS[type(record)], *_FIELDS[type(record)](record)


def record_from_data(data: Any, where: str) -> Record:
    """What `record_to_data` wrote; ``where`` is said in the error of anything else, `LedgerError`."""
    try:
        number, *values = data
        kind = KINDS[number]
        record: Record = kind(*values)
        if not all(_IS[field.type](value) for field, value in zip(fields(kind), values, strict=True)):
            raise ValueError
    except (TypeError, ValueError, IndexError):
        raise LedgerError(f"{where}: a record that this version of flowrt does not know: {str(data)[:100]}") from None
    return record


def _are_identities(value: Any) -> bool:
    return type(value) is tuple and all(type(each) is int and 0 <= each < IDENTITIES for each in value)


def _are_receipts(value: Any) -> bool:
    for replica, outcome, staleness, identities in value:
        numbers = type(replica) is type(outcome) is type(staleness) is int and 0 <= outcome < len(Outcome)
        if not numbers or not _are_identities(identities):
            return False
    return True


_IS: dict[Any, Callable[[Any], bool]] = {  # by how a field is annotated
    "int": lambda value: type(value) is int,
    "float": lambda value: type(value) is float,
    "str": lambda value: type(value) is str,
    "bool": lambda value: type(value) is bool,
    "dict[str, Any]": lambda value: type(value) is dict,
    "tuple[int, ...]": _are_identities,
    "tuple[tuple[int, int, int, tuple[int, ...]], ...]": _are_receipts,
}
