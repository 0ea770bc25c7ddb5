"""What nodes say to each other: one frozen value per kind, checked when it is read.

Law: a message on the wire is a sequence of the name of its kind and the fields of that kind's class, of their types;
anything else is `BrokenStream`. Deciding what a message means is for who receives it.

A connection begins with two hellos (plain dicts, exchanged by the transport). The opener's says what the connection is:
`Drive` or `Resume` (a master commands a node), `Carry` (tensors, pushed and pulled in either direction) or `Enlist` (a
newcomer asks to be a task).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import UnionType
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

import numpy as np

from flowrt.base.errors import BrokenStream, FlowrtError, InternalError, LinkBroken, NodeLost, StepCancelled
from flowrt.base.valueclass import valueclass
from flowrt.net.wire import briefly
from flowrt.net.wire.brief import Brief
from flowrt.net.wire.frames import NoRoom, Piece, frame
from flowrt.net.wire.steps import Done, Push, Start
from flowrt.sched.drivers.messages import KINDS
from flowrt.sched.host.await_all import errors_in

Array: TypeAlias = np.ndarray[Any, Any]
UNASKED = -1  # the number of a request that nobody waits for


# ── hellos ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@valueclass
class Drive:
    """A master's: ``epoch`` is its own, ``peers`` says where each task is: ``{task: (host, port)}``.

    ``incarnation`` counts how often it has given the node up and begins anew with it: what it had there is forgotten.
    Those of the peers that ``joined`` are in no cluster file.
    """

    session: str
    epoch: str
    peers: dict[str, Any]
    incarnation: int = 0
    joined: tuple[str, ...] = ()


@valueclass
class Resume:
    """A master's whose connection broke: it goes on with the plans that it has on the node. Fields as `Drive`'s."""

    session: str
    epoch: str
    peers: dict[str, Any]
    incarnation: int = 0
    joined: tuple[str, ...] = ()


@valueclass
class Carry:
    """Who opens a connection for tensors: a task, or the client of ``epoch``."""

    task: str
    epoch: str


@valueclass
class Enlist:
    """A newcomer's, that will listen at ``host:port``, and asks to be a ``task`` of a job: -1 for the first free one.

    It is told `Enlisted` or `Refused`, at once or, after `Waits`, when a session has come.
    """

    job: str
    task: int
    host: str
    port: int


@valueclass
class Serve:
    """A node's, to whoever opens a connection. ``host`` and ``way`` say what others of its host may use (`Local`).

    ``imports`` are the modules of the user's that it has imported, and their hashes: see `code`.
    ``birth`` tells it from others that have been, or will be, that task.
    """

    task: str
    devices: tuple[str, ...]
    host: str = ""
    way: str = "tcp"
    imports: tuple[tuple[str, str], ...] = ()
    birth: str = ""


# ── a master to a node ───────────────────────────────────────────────────────────────────────────────────────────────


@valueclass
class Ping:
    """Answered by a `Pong` of the same number, so that a silent node is noticed."""

    number: int


@valueclass
class Register:
    """Make a plan ready; answered by `Answer`. ``data`` is the plan, packed in parts.

    Where it is ``silent``, the ends of others say that a run of it has ended well.
    """

    request: int
    plan: int
    data: Array
    silent: bool


@valueclass
class Unregister:
    """Forget a plan. Not answered."""

    plan: int


@valueclass
class Abort:
    """End step ``number``, begun or not. A step in progress answers `Done`."""

    number: int


@valueclass
class Ask:
    """``what`` is inventory, statistics or reset (of ``container``, all if empty); answered by `Answer`."""

    request: int
    what: str
    container: str


@valueclass
class Command:
    """Something for the iterations of a node, a message of theirs, packed; answered by `Answer`."""

    request: int
    data: Array


@valueclass
class Recruited:
    """The newcomer of that `Recruit` is ``task`` from now on; or why it cannot be one."""

    number: int
    task: str
    error: str = ""
    text: str = ""


@valueclass
class Introduce:
    """A node that joined is ``task``, at ``host:port``. Answered by `Answer`, unless the request is `UNASKED`.

    The value is empty where that is well; else it is (task, host, port) as the node knows it otherwise: it knows that
    task at another place than ``was``, or that place as another task's.
    """

    request: int
    task: str
    host: str
    port: int
    was: tuple[Any, ...] = ()


# ── a node to its master ─────────────────────────────────────────────────────────────────────────────────────────────


@valueclass
class Welcome:
    """The node obeys. It knows tasks that ``joined``: {task: (host, port)}."""

    joined: dict[str, Any]


@valueclass
class Refused:
    """The node does not obey, or not any more."""

    error: str
    text: str


@valueclass
class Recruit:
    """A newcomer has come to this node: see `Enlist`. Answered by `Recruited`."""

    number: int
    job: str
    task: int
    host: str
    port: int


@valueclass
class Introduced:
    """Another master says that a node has joined as ``task``."""

    task: str
    host: str
    port: int


@valueclass
class Leaves:
    """The node was told to end, and will: it is to be given nothing any more."""


@valueclass
class Pong:
    """The answer to a `Ping`."""

    number: int


@valueclass
class Answer:
    """To `Register` and `Ask`; ``error`` is empty if all went well."""

    request: int
    value: Any
    error: str = ""
    text: str = ""


# ── a node to a newcomer ─────────────────────────────────────────────────────────────────────────────────────────────


@valueclass
class Waits:
    """No session runs that could say which task the newcomer is: it is told when one does."""


@valueclass
class Enlisted:
    """The newcomer is ``task``, and is to serve as that."""

    task: str


# ── tensors, either way ──────────────────────────────────────────────────────────────────────────────────────────────


@valueclass
class Pull:
    """Send me the value of an edge of step (epoch, number) once it is there; at most ``room`` bytes without asking."""

    request: int
    epoch: str
    number: int
    edge: int
    room: int


@valueclass
class Announce:
    """The value of an edge of step (epoch, number) is there to be pulled: it is larger than what is pushed."""

    epoch: str
    number: int
    edge: int
    nbytes: int


@valueclass
class Forget:
    """The pull is not wanted any more."""

    request: int


@valueclass
class Value:
    """What was pulled."""

    request: int
    value: Array


@valueclass
class DeadValue:
    """What was pulled is dead: the branch that makes it was not taken."""

    request: int


@valueclass
class TooLarge:
    """The value is there, and larger than the room that the pull granted."""

    request: int
    nbytes: int


@valueclass
class Grant:
    """There is room for what was offered."""

    request: int


@valueclass
class Fault:
    """There is no value and never will be."""

    request: int
    error: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """How messages of one class are written and read: its fields, and what each may be an instance of."""

    of: type[Any]
    fields: tuple[str, ...]
    accepted: tuple[tuple[type[Any], ...], ...]
    values: Callable[[Any], tuple[Any, ...]]


def _kind(of: type[Any]) -> _Kind:
    hints = get_type_hints(of)
    fields = tuple(field.name for field in dataclasses.fields(of))
    values = attrgetter(*fields) if len(fields) > 1 else lambda message: tuple(getattr(message, f) for f in fields)
    return _Kind(of, fields, tuple(_classes_of(hints[field]) for field in fields), values)


def _classes_of(hint: Any) -> tuple[type[Any], ...]:
    """What a field of that type may be an instance of. `NoRoom` may stand for any array."""
    if hint is Any:
        return (object,)
    if isinstance(hint, UnionType):
        return tuple(accepted for part in get_args(hint) for accepted in _classes_of(part))
    plain = get_origin(hint) or hint
    return (plain, NoRoom) if plain is np.ndarray else (plain,)


_KINDS: dict[str, _Kind] = {}
POSTED: set[type[Any]] = set()
"""The kinds that tasks post to each other."""


def register_kinds(*kinds: type[Any]) -> None:
    """Have values of these classes be messages that tasks may post to each other (`Link.post`).

    Their fields are plain data and arrays, and tuples of such, as their annotations say.
    """
    _register(*kinds)
    POSTED.update(kinds)


def _register(*kinds: type[Any]) -> None:
    for kind in kinds:
        if _KINDS.setdefault(kind.__name__, _kind(kind)).of is not kind:
            raise InternalError(f"there are two kinds of message named {kind.__name__}")


_register(
    *(Drive, Resume, Carry, Enlist, Serve),
    *(Ping, Register, Unregister, Start, Abort, Ask, Command, Recruited, Introduce),
    *(Welcome, Refused, Recruit, Introduced, Leaves, Pong, Answer, Done),
    *(Waits, Enlisted),
    *(Push, Announce, Pull, Forget, Value, DeadValue, TooLarge, Grant, Fault),
)
register_kinds(*KINDS)


def to_data(message: Any) -> tuple[Any, ...]:
    """``message`` for the codec: the name of its kind, and its fields in order."""
    name = type(message).__name__
    return (name, *_KINDS[name].values(message))


def to_frame(message: Any) -> list[Piece]:
    """The frame of ``message``: a brief one, if there is a place for all of it. `SpecError` if it is not legal."""
    return briefly.write(message) or frame(to_data(message))


def to_hello(message: Any) -> dict[str, Any]:
    """``message`` as what a side says of itself when a connection begins."""
    name = type(message).__name__
    return {"kind": name, **dict(zip(_KINDS[name].fields, _KINDS[name].values(message), strict=True))}


def from_data(data: Any) -> Any:
    """The message that `to_data` or `to_hello` wrote; raises `BrokenStream` for anything else.

    `NoRoom` may stand for any array.
    """
    if type(data) is Brief:
        return briefly.read(data)
    if type(data) is tuple and data and type(data[0]) is str and data[0] in _KINDS:
        kind, values = _KINDS[data[0]], data[1:]
    else:
        kind, values = _read_hello(data)
    if len(values) != len(kind.fields):
        raise BrokenStream(f"{kind.of.__name__} has the fields {', '.join(kind.fields)}; {len(values)} values came")
    if not all(map(isinstance, values, kind.accepted)):
        for field, accepted, value in zip(kind.fields, kind.accepted, values, strict=True):
            if not isinstance(value, accepted):
                text = f"{kind.of.__name__}.{field} is a {accepted[0].__name__}, {type(value).__name__} came"
                raise BrokenStream(text)
    return kind.of(*values)


def _read_hello(data: Any) -> tuple[_Kind, tuple[Any, ...]]:
    name = data.get("kind") if isinstance(data, Mapping) else None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise BrokenStream(f"a message of an unknown kind came: {str(data)[:80]}")
    if data.keys() != {"kind", *kind.fields}:
        raise BrokenStream(f"{name} has the fields {sorted(kind.fields)}, {sorted(data.keys() - {'kind'})} came")
    return kind, tuple(data[field] for field in kind.fields)


# ── errors on the wire ───────────────────────────────────────────────────────────────────────────────────────────────


def root_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a task group that the others are most likely consequences of."""
    return min(errors_in(group), key=lambda e: consequence(e) if isinstance(e, FlowrtError) else -1)


def consequence(error: FlowrtError) -> int:
    """How far ``error`` may be a mere consequence of another: the least of a step's errors is the one to report."""
    match error:
        case StepCancelled():
            return 3
        case BrokenStream() | LinkBroken():
            return 2
        case NodeLost():
            return 1
        case _:
            return 0
