"""What the client, the replicas and the parameter servers of one run of a trainer say to one another.

Law: every message names its run; of a run that its receiver does not know, it changes nothing. All may be posted again,
whole: to hear one twice is to hear it once. Servers and replicas are numbered; server 0 coordinates. Versions count
the updates of the variables: an update of version v is computed from values of version v, and makes version v + 1.
Batches of a replica are numbered 1, 2, … as they are handed to it. Where a replica makes an update of several, the
client and the replicas count what they send each other one by one, everybody else counts whole groups of so many.
"""

from __future__ import annotations

from math import nan
from typing import Any

from flowrt.base.valueclass import maker, valueclass
from flowrt.sched.drivers.beginning import BeginReplica, BeginServer
from flowrt.sched.drivers.following import ABOUT_FOLLOWING, POSTED_TO_FOLLOW
from flowrt.sched.drivers.inquiries import INQUIRIES
from flowrt.sched.drivers.keeping import ABOUT_CHECKPOINTS

# ── the client, to begin and to end: each is answered ────────────────────────────────────────────────────────────────


@valueclass
class Stop:
    """End the run here, once what was ordered is applied; server 0 answers the version that all are at, others -1.

    That is given up in time, and an opening decides; a ``patient`` end is not: -1 is answered, and it comes later. One
    ``at_once`` waits for no other server, as one is lost.
    """

    run: int
    patient: bool = False
    at_once: bool = False


@valueclass
class Join:
    """To server 0: a replica that was lost is begun again, as another ``incarnation``, by the process of ``birth``.

    Answers (version, spent, given): the open version, how many batches the one before it had spent, see `Gone`, and
    after how many its own begin: ``given``, or in a detached run what server 0 says.
    """

    run: int
    replica: int
    incarnation: int
    given: int
    birth: str = ""


# ── the client of a detached run: each is answered ───────────────────────────────────────────────────────────────────


@valueclass
class GoOn:
    """To server 0 of a detached run: all have begun but the ``lost``; from now on it needs no client.

    Until then it is its client's as any other run is: nothing is ordered, and it ends when that one is gone. Answers
    who is lost by now, as server 0 sees.
    """

    run: int
    lost: tuple[int, ...]


@valueclass
class Attach:
    """Be of a detached run whose client this one is from now on.

    Answers (server, replicas): the replicas that go on here, each with how often it was begun again, and of the server
    here its version, None where none is known. Of server 0 that is (attachment, version, dropped, incarnations, lost,
    compression, begun): by what number `Allow` is this client's, the version of which is reported next, how many older
    reports nobody has had that are not kept any more, by replica how often it was begun again, who is lost, of a run
    that is over nobody, how updates are packed, and the version at which the run began.
    """

    run: int


@valueclass
class Hold:
    """To server 0 of a detached run: order nothing until it is let go again, or its client is gone; if it is ``on``.

    Answered once all servers have applied what was ordered, by the version that they are at.
    """

    run: int
    on: bool


# ── the client, on the way ───────────────────────────────────────────────────────────────────────────────────────────


@valueclass
class Batch:
    """To a replica: the ``values`` of its batch of that number, and of those after it, if there is ``more``."""

    run: int
    replica: int
    number: int
    values: tuple[Any, ...]
    more: tuple[tuple[Any, ...], ...] = ()


@valueclass
class Draw:
    """To a replica that reads its batches itself: those from that ``number`` on are ``identities``."""

    run: int
    replica: int
    number: int
    identities: tuple[int, ...]


@valueclass
class Allow:
    """To server 0: versions before ``version`` may be applied, and the user has had the reports before ``seen``.

    ``totals``, once the batches are at their end, says how many each replica was given. What comes back of those that
    were handed out may change that, so the run ends for want of batches only once its client, which has seen the
    report of all versions but the open one, has said it since the last replica was lost.
    """

    run: int
    version: int
    seen: int
    totals: tuple[int, ...] | None = None


@valueclass
class Lost:
    """To server 0, which tells the others: a replica's task is lost, in this ``incarnation`` of it.

    Answered by `Gone`, unless it was begun again meanwhile. A replica that ``leaves`` says that itself, to server 0
    alone: it begins nothing any more, what it has begun may count.
    """

    run: int
    replica: int
    incarnation: int = 0
    leaves: bool = False


@valueclass
class Probe:
    """To a replica, or, where that is -1, to server 0: say what you are doing. Answered by `Doing` and `Pending`."""

    run: int
    replica: int


# ── a replica to servers ─────────────────────────────────────────────────────────────────────────────────────────────


@valueclass
class Update:
    """A replica's update of ``version``: this server's ``parts``, and for server 0, what is ``told`` to the client.

    Parts that are not all ``finite`` count nowhere, and need not come.

    ``ready`` is how many batches it has been given, as far as the next; ``wants`` are (number, values) of those that
    `Wants` would tell of with no version. For server 0, ``times`` are what `Stopwatch.post` says. After local steps
    ``samples`` is how many entries along the first axis the first values of their batches have. ``square`` is the sum
    of the squares of the parts' numbers, where the policy measures it.
    """

    run: int
    version: int
    replica: int
    ready: int
    parts: tuple[Any, ...]
    told: tuple[Any, ...] = ()
    wants: tuple[tuple[int, tuple[Any, ...]], ...] = ()
    times: bytes = b""
    finite: bool = True
    samples: int = 0
    square: float = nan


@valueclass
class Ready:
    """To server 0: a replica that waited for a batch was given some, ``total`` so far, and begins if it may."""

    run: int
    replica: int
    total: int


@valueclass
class Seen:
    """A replica has that version of the server and, for now, owes no update: it may be told of newer ones.

    Where it cut off what it was doing for an older one, server 0 is told of that by what `Stopwatch.so_far` says. It
    ``waits`` for a newer one unless an update of its, which is on its way or arrived, may yet count.
    """

    run: int
    replica: int
    version: int
    cut: tuple[float, ...] = ()
    incarnation: int = 0
    waits: bool = True


@valueclass
class Wants:
    """To a server: which rows of its tables batch ``number`` of a replica wants, as ``values`` tell.

    They come with a version to be told; with ``version``, the replica has that and wants rows of it now.
    """

    run: int
    replica: int
    number: int
    version: int
    values: tuple[Any, ...]


@valueclass
class Failed:
    """To server 0: ``version`` could not be computed by a replica, or, where that is -1, applied by ``server``.

    Where both are told, it is the server that could not do what the replica asked of it; else that is -1.
    """

    run: int
    version: int
    replica: int
    server: int
    error: str
    text: str


@valueclass
class Doing:
    """To the client, which asked: what a replica does now, as `Stopwatch.so_far` says."""

    run: int
    replica: int
    times: tuple[float, ...]


# ── a server to replicas ─────────────────────────────────────────────────────────────────────────────────────────────


@valueclass
class NewVersion:
    """The ``values`` of a server's variables at ``version``, in the order of `BeginServer.values`.

    From server 0, ``spent`` is how many batches of the replica are, and if it has ``begun`` a version, it is to
    compute its update from the last of these. ``since`` is the oldest version that an update from this batch, or, if
    none is begun, from the next one, may be computed from to count: one from then on, under way, is gone on with.
    ``counted`` is the newest version that an update of the replica was computed from which counted. From others these
    four mean nothing. ``number`` is the batch for which rows come, 0 if for none: here, or, if it takes long to gather
    them, as `AskedRows`.
    """

    run: int
    version: int
    server: int
    replica: int
    spent: int
    begun: bool
    since: int
    values: tuple[Any, ...]
    number: int = 0
    rows: tuple[Any, ...] = ()
    counted: int = -1


@valueclass
class AskedRows:
    """What batch ``number`` of a replica wants of a server's tables at ``version``."""

    run: int
    version: int
    server: int
    replica: int
    number: int
    rows: tuple[Any, ...]


# ── servers among themselves ─────────────────────────────────────────────────────────────────────────────────────────


@valueclass
class Held:
    """To server 0: ``server`` holds its parts of the updates of ``replicas``, or refused them as not ``finite``.

    ``seconds`` are for how long it has held each. ``square`` is the sum of the squares of their numbers, where the
    policy measures it: then it is of one replica.
    """

    run: int
    server: int
    version: int
    replicas: tuple[int, ...]
    finite: bool
    seconds: tuple[float, ...]
    square: float = nan


@valueclass
class ApplyOrder:
    """From server 0: apply these replicas' updates to ``version``: their mean, or each times its one of ``weights``.

    ``versions`` are those that they were computed from, empty where that is ``version`` for all. Where server 0 may be
    lost and nothing else (`BeginServer.keeps`), ``batches`` are those that they were made of, and ``told`` is what is
    to be told of them, as in `Report`.
    """

    run: int
    version: int
    replicas: tuple[int, ...]
    weights: tuple[float, ...] | None = None
    versions: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    told: tuple[Any, ...] = ()


@valueclass
class Applied:
    """To server 0: the variables of ``server`` are one version after ``version``.

    ``square`` is the sum of the squares of what they were moved by, where the policy measures it.
    """

    run: int
    server: int
    version: int
    square: float = nan


# ── server 0 to the client ───────────────────────────────────────────────────────────────────────────────────────────


@valueclass
class Report:
    """Version ``version`` was applied by all servers.

    ``receipts`` holds, for each tower that ended, (replica, batch, outcome, seconds, staleness): its outcome's place in
    `Outcome`, how long its update took to come, -1 if it did not, and how many versions old it was. ``told`` are means
    over the kept updates. ``why`` is what the policy said to the set, ``noise_scale`` what `NoiseScale` says, where the
    policy measures. In a detached run ``identities`` are, for each receipt, those of the batches that it is about.
    ``errors`` holds (replica, error, text) of those that could not compute an update, and were gone without.

    What its parts took is told by each node's own clock. ``stages`` are server 0's: when the version was opened, when
    its set was fixed, when it was ordered, and when all had applied it. ``times`` holds, for each replica of which
    server 0 has heard since the report before, the newest of these, as floats: (replica, version, when it was told that
    version, its `Phase`, five numbers of its `Stopwatch`, when its update came, when that was whole), with 0 for what
    was not.
    """

    run: int
    version: int
    receipts: tuple[tuple[int, int, int, float, int], ...]
    told: tuple[Any, ...]
    seconds: float
    stages: tuple[float, ...] = ()
    times: bytes = b""
    why: str = ""
    noise_scale: float = nan
    identities: tuple[tuple[int, ...], ...] = ()
    errors: tuple[tuple[int, str, str], ...] = ()


@valueclass
class Gone:
    """To the client: of a replica that was lost, ``spent`` batches are; no later one counts, so others may have those.

    Said of this ``incarnation``, whenever server 0 is told of its loss; ``why``, if its device was and its node is not.
    """

    run: int
    replica: int
    incarnation: int
    spent: int
    why: str = ""


@valueclass
class Pending:
    """To the client, which asked: what server 0 waits for, in seconds, -1 for what is not.

    ``stages`` are how long ago the open ``version`` was opened, its set fixed, and ordered; ``told`` says by replica
    how long ago it was told the oldest of the versions to which it has not answered; ``came`` are the replicas whose
    updates of the open version have come.
    """

    run: int
    version: int
    stages: tuple[float, ...]
    told: tuple[float, ...]
    came: tuple[int, ...]


@valueclass
class Ended:
    """The run is over, all servers being at ``version``: to the client, and to everybody else who takes part.

    Without an ``error``, there were too few batches left for another version. It is not ``whole`` where some server
    could not apply what was ordered.
    """

    run: int
    version: int
    error: str = ""
    text: str = ""
    whole: bool = True


KINDS: tuple[type[Any], ...] = (
    *INQUIRIES,
    *ABOUT_CHECKPOINTS,
    *ABOUT_FOLLOWING,
    *(BeginServer, BeginReplica, GoOn, Attach, Hold, Join, Stop),
    *(Batch, Draw, Allow, Lost, Probe),
    *(Update, Ready, Seen, Wants, Failed, Doing),
    *POSTED_TO_FOLLOW,
    *(NewVersion, AskedRows, Held, ApplyOrder, Applied, Report, Gone, Pending, Ended),
)

# what makes messages of every step, of all their fields in order
make_update, make_version, make_report = maker(Update), maker(NewVersion), maker(Report)
make_allow, make_batch, make_order = maker(Allow), maker(Batch), maker(ApplyOrder)
make_held, make_applied = maker(Held), maker(Applied)
