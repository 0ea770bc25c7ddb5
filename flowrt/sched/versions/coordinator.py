"""Which replicas' updates are whole, which set a version keeps, when it is applied, and what became of every tower.

One coordinator serves all parameter servers, because servers that chose for themselves could apply different sets in
the same step. It is a value: an event answers a new coordinator and, where there is one, a verdict. It owns

- the open version: begun towers, the servers that hold each one's update, the quorum they are offered to when all do;
- the order to apply: given once per version, when its set is fixed and the client has allowed it, and never again;
- the book of batches: a replica begins a version with its next batch, if it has one;
- the receipts: for every tower begun exactly one, with its batch, once every server has applied the version.

It must not know updates, clocks, sockets or who waits for it. A replica has one try per version: were a replacement
to push again, a server might keep the old part and another the new one. So a replica lost before its update is whole
takes no part in that version any more, even if it joins again, and an update that is not finite is not replaced.

Where the policy lets updates be stale, a tower may outlive the version that it was begun in: it goes on, and its update
is offered to the version that is open when it is whole, unless it is too old for that. Its one receipt is given with
the version that keeps it, or ends it.

How a replica and the coordinator agree on batches without a message for each: with every version a replica is told how
many of its batches are spent and whether it begins with the last of them. If it does not, it begins by itself as soon
as it has the batch after those, and announces it; the announcement, or its update where that comes first, begins it
here, if the version is still open. If it is not, the batch is not spent, and the replica begins a later one with it.
It is also told the oldest version that an update from that batch may be computed from: what it has under way from one
since then it goes on with, and no update of an earlier batch is taken for one of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

from flowrt.base.errors import GraphError, InternalError
from flowrt.base.valueclass import among, put, replace, stateclass
from flowrt.sched.policies.policy import Offer, Policy, Record
from flowrt.sched.versions.book import Book
from flowrt.sched.versions.ledger import AppliedVersion, Receipt, Stuck
from flowrt.sched.versions.quorum import Quorum, Verdict
from flowrt.sched.versions.standing import ENDED, Standing, outcome


@stateclass
class Coordinator:
    """The one place that decides what every parameter server applies.

    Memory is bounded: the open version, and the sets and receipts of the ``remember`` versions before it.

    Args:
        quorum: The open version's set.
        servers: How many parameter servers there are; they are named 0 to ``servers`` - 1.
        remember: How many versions stay readable after every server has applied them.
        book: The batches of each replica.
        standing: By replica, where it stands in the open version.
        holders: By replica, the servers that hold its update.
        since: By replica, the oldest version that an update from its batch may be computed from, or from its next one.
        computed: By replica, the version that it computes its update from, as far as that is known.
        began: By replica, when it began; this and other times are the caller's seconds.
        alive: By replica, whether it may begin a tower.
        allowed: Versions before this one may be applied.
        ordered_at: When the order to apply the open version's set was given; None before.
        squares: By replica, the sum of the squares of its update on the servers that hold it.
        square: The sum of the squares of what the variables were moved by, on the servers that have applied the set.
        closing: Whether the run ends, so that no order is given any more.
        published: The servers that have applied the open version's set.
        waiting: What became whole since the set was fixed, and may count in the next version, by arrival.
        history: The versions before the open one that stay readable, oldest first.
        was: Of each replica that joined again while its tower may yet count, that tower's batch: (replica, batch).
    """

    quorum: Quorum
    servers: int
    remember: int
    book: Book
    standing: tuple[Standing, ...]
    holders: tuple[frozenset[int], ...]
    since: tuple[int, ...]
    computed: tuple[int, ...]
    began: tuple[float, ...]
    alive: tuple[bool, ...]
    allowed: int
    ordered_at: float | None = None
    squares: tuple[float, ...] = ()
    square: float = 0.0
    closing: bool = False
    published: frozenset[int] = frozenset()
    waiting: tuple[Offer, ...] = ()
    history: tuple[AppliedVersion, ...] = ()
    was: tuple[tuple[int, int], ...] = ()

    @classmethod
    def start(
        cls,
        policy: Policy,
        replicas: int,
        servers: int,
        *,
        version: int = 0,
        allowed: int | None = None,
        remember: int = 16,
        now: float = 0.0,
        floor: int = 0,
    ) -> Coordinator:
        """Open ``version`` for ``replicas`` replicas, all alive and without batches.

        With a ``floor`` they come and go, and so many are needed. Without ``allowed`` nothing is allowed yet. Raises
        `GraphError` if the policy cannot be met.
        """
        if servers < 1 or remember < 0:
            raise GraphError(f"expected at least 1 server and 0 versions to remember, got {servers} and {remember}")
        return cls(
            Quorum.start(policy, replicas, version, now, floor),
            servers,
            remember,
            Book.start(replicas),
            standing=(Standing.IDLE,) * replicas,
            holders=(frozenset(),) * replicas,
            since=(version,) * replicas,
            computed=(version,) * replicas,
            began=(now,) * replicas,
            alive=(True,) * replicas,
            allowed=version if allowed is None else allowed,
            squares=(0.0,) * replicas,
        )

    @property
    def version(self) -> int:
        """The open version; the answer to whoever is late."""
        return self.quorum.version

    # ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def ready(self, replica: int, total: int, now: float) -> Coordinator:
        """Note that ``replica`` has been given its first ``total`` batches: if it waits for one, it begins.

        Saying it again, or fewer, changes nothing; nor does it for a replica that is lost.
        """
        self._check(self.version, replica)
        if not self.alive[replica] or total <= self.book.given[replica]:
            return self
        given = self.book.give(replica, total)
        if not self._may_begin(replica):
            return replace(self, book=given)
        standing, computed = put(self.standing, replica, Standing.RUNNING), put(self.computed, replica, self.version)
        began = put(self.began, replica, now)
        return replace(self, book=given.spend(replica), standing=standing, computed=computed, began=began)

    def exhausted(self, totals: tuple[int, ...]) -> Coordinator:
        """Note how many batches each replica will ever be given. See to what is `due`, and ask `stuck` afterwards."""
        return replace(self, book=self.book.exhausted(totals), quorum=self.quorum.stir())

    @property
    def spent(self) -> tuple[int, ...]:
        """By replica, how many of its batches were spent; it is to be told this with every version."""
        return self.book.spent

    def begun(self, replica: int) -> int:
        """The batch with which ``replica`` has begun; 0 if it has not, or was lost in the open version."""
        self._check(self.version, replica)
        began = self.standing[replica] in (Standing.RUNNING, Standing.WHOLE, Standing.REFUSED)
        return self.book.spent[replica] if began else 0

    def oldest(self, replica: int) -> int:
        """The oldest version that an update of ``replica``, begun or to be begun, may be computed from to count now."""
        return max(self.since[replica], self.version - self.quorum.policy.staleness)

    def may_count(self, replica: int, version: int) -> bool:
        """Whether an update of ``replica``, computed from ``version`` and not whole yet, may still count."""
        return version >= self.oldest(replica) and not self._is_late(version)

    # ── updates ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def held(
        self,
        server: int,
        version: int,
        replica: int,
        finite: bool,
        now: float,
        square: float = nan,
        samples: int = 0,
    ) -> tuple[Coordinator, Verdict]:
        """Note that ``server`` holds its part of an update, or refused it as not finite.

        HELD: other servers have not reported it yet. OFFERED, CLOSE: it was offered to the quorum; after CLOSE ask for
        the `order`. REFUSED: some part is not finite, the replica does not count in this version. LATE: the update
        counts nowhere. One that may but count in the next version is HELD until that opens. An update of a replica that
        had not begun says that it has, with its next batch. ``square`` is the sum of the squares of that part,
        ``samples`` as in `Offer`. Raises `InternalError` for a version to come.
        """
        self._check(version, replica, server)
        if version < self.oldest(replica):
            return self, Verdict.LATE
        match self.standing[replica]:
            case Standing.WHOLE:
                return self, Verdict.REPEAT
            case Standing.REFUSED:
                return self, Verdict.REFUSED
            case Standing.LOST | Standing.ABSENT:
                return self, Verdict.LATE
            case _ if self._is_late(version) or self.closing:
                return self, Verdict.LATE
            case Standing.RUNNING:
                return self._gather(server, replica, version, finite, now, square, samples)
            case Standing.IDLE:
                begun = self.ready(replica, self.spent[replica] + 1, now)
                if not begun.begun(replica):
                    return self, Verdict.LATE
                return begun._gather(server, replica, version, finite, now, square, samples)

    # ── when ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def due(self) -> float | None:
        """When `tick` is to be called, if no event comes before; it may be past. None for at no time."""
        return None if self.closing else self.quorum.due

    def tick(self, now: float) -> Coordinator:
        """Ask the policy again, if it is time. Ask for the `order`, and whether it is `stuck`, afterwards."""
        due = self.due
        return self if due is None or now < due else replace(self, quorum=self.quorum.ask(self._may_offer(), now))

    # ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def allow(self, version: int) -> Coordinator:
        """Let versions before ``version`` be applied; what was allowed stays so."""
        return self if version <= self.allowed else replace(self, allowed=version)

    def order(self, now: float) -> tuple[Coordinator, tuple[int, ...] | None]:
        """The set that every server is to apply now, in replica order; None where there is none, or not yet.

        Ask after every event that may close a version, allow it or open the next: it is answered once per version.
        """
        ordered = self.ordered_at is not None
        if ordered or self.closing or self.quorum.closed_at is None or self.version >= self.allowed:
            return self, None
        return replace(self, ordered_at=now), self.quorum.kept

    @property
    def versions(self) -> tuple[int, ...]:
        """What the updates of the fixed set were computed from, in its order; empty if all from the open version."""
        if not self.quorum.policy.staleness:
            return ()
        computed = tuple(self.computed[replica] for replica in self.quorum.kept)
        return () if all(version == self.version for version in computed) else computed

    @property
    def why(self) -> str:
        """What the policy said to the set that is fixed."""
        return self.quorum.why

    @property
    def weights(self) -> tuple[float, ...] | None:
        """What the updates of the set that is fixed are multiplied by, in its order; None for their mean."""
        return self.quorum.weights

    def publish(self, server: int, version: int, now: float, square: float = nan) -> Coordinator:
        """Note that ``server`` has applied the set of ``version``; the next one opens when all have.

        Every replica that has a batch begins it. ``square`` is the sum of the squares of what that moved the server's
        variables by. Saying it again changes nothing. Raises `InternalError` where nothing was ordered.
        """
        self._check(version, 0, server)
        if version < self.version:
            return self
        if self.ordered_at is None:
            raise InternalError(f"server {server} published version {version}, which was not ordered")
        if server in self.published:
            return self
        one = replace(self, published=self.published | {server}, square=self.square + square)
        return one if len(one.published) < self.servers else one._open_next(now)

    def close(self) -> Coordinator:
        """The run ends, or its client is gone: what was ordered is still applied by all, nothing else ever is."""
        return replace(self, closing=True)

    @property
    def settled(self) -> bool:
        """Whether every server stands at the open version: none is still to apply what was ordered."""
        return self.ordered_at is None

    def decided(self, version: int) -> tuple[int, ...] | None:
        """The set that every server applies to ``version``, in replica order; None while it is open.

        Empty when the version was abandoned. Raises `InternalError` for a version to come or one forgotten.
        """
        ledger = self._ledger(version)
        return self.quorum.decided if ledger is None else ledger.decided

    def receipts(self, version: int) -> tuple[Receipt, ...] | None:
        """One receipt per tower begun in ``version``, in replica order; None until all servers have applied it.

        A batch spent on a version that is never applied has none. Errors as `decided`.
        """
        ledger = self._ledger(version)
        return None if ledger is None else ledger.receipts

    # ── who is there ─────────────────────────────────────────────────────────────────────────────────────────────────

    def lost(self, replica: int) -> Coordinator:
        """Note that ``replica`` is gone. An update that is whole still counts; one that is not never will.

        See to what is `due`, and ask `stuck` afterwards. Say this before a replacement `joined`, and also when a tower
        failed with its replica alive: its parts that arrived must not be mixed with those of another try.
        """
        gone, running = self.left(replica), self.standing[replica] is Standing.RUNNING
        return gone._stand(replica, Standing.LOST) if running and not self._is_late(self.computed[replica]) else gone

    def left(self, replica: int) -> Coordinator:
        """Note that ``replica`` begins nothing any more. What it has begun may count, until it is `lost`."""
        self._check(self.version, replica)
        gone = replace(self, alive=put(self.alive, replica, False), book=self.book.withdraw(replica))
        return gone._stand(replica, Standing.ABSENT) if self.standing[replica] is Standing.IDLE else gone

    def joined(self, replica: int, given: int = 0) -> Coordinator:
        """Note that ``replica`` is back; if it was lost in the open version, it may begin from the next one on.

        Of its batches, the first ``given`` are gone with the one that was lost: it begins with those after them.
        """
        self._check(self.version, replica)
        book, was = self.book.skip(replica, given), self.was
        if book is not self.book and self.standing[replica] in ENDED and replica not in dict(was):
            was = (*was, (replica, self.spent[replica]))
        return replace(self, alive=put(self.alive, replica, True), book=book, was=was)._follow()

    def stuck(self) -> Stuck | None:
        """Why the open version can never close, or None. Then the run ends, or gives the version up by `abandon`."""
        if self.quorum.closed_at is not None:
            return None
        may = self._may_offer()
        able = tuple(sorted((*may, *(offer.replica for offer in self.quorum.offers))))
        waits = bool(may) or self.due is not None  # for what may come, or for a time
        needed = self.quorum.least if waits else max(self.quorum.least, len(able) + 1)
        if len(able) >= needed:
            return None
        replicas = range(self.quorum.replicas)
        refused = tuple(r for r, standing in enumerate(self.standing) if standing is Standing.REFUSED)
        exhausted = tuple(r for r in replicas if r not in able and self.alive[r] and self.standing[r] is Standing.IDLE)
        lost = tuple(r for r in replicas if r not in (*able, *refused, *exhausted))
        return Stuck(self.version, needed, able, refused, lost, exhausted)

    def abandon(self, now: float) -> Coordinator:
        """Close a stuck version with the empty set, so that the next one opens with the variables unchanged.

        Raises `InternalError` when the version may still close by itself.
        """
        if self.stuck() is None:
            raise InternalError(f"version {self.version} cannot be abandoned: it is decided or may still be")
        return replace(self, quorum=self.quorum.abandon(now))

    # ── how ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _may_begin(self, replica: int) -> bool:
        """Whether ``replica``, which is alive, begins the open version as soon as it has a batch."""
        return self.standing[replica] is Standing.IDLE and not self._is_late(self.version) and not self.closing

    def _is_late(self, version: int) -> bool:
        """Whether an update computed from ``version`` cannot count any more, if it is not whole yet."""
        return self.quorum.closed_at is not None and self.version + 1 - version > self.quorum.policy.staleness

    def _going(self) -> frozenset[int]:
        """Of whom what they have begun may count in the next version. The set of the open one is fixed."""
        if not self.quorum.policy.staleness:
            return frozenset()
        begun = (r for r, standing in enumerate(self.standing) if standing in (Standing.RUNNING, Standing.WHOLE))
        return frozenset(r for r in begun if r not in self.quorum.kept and not self._is_late(self.computed[r]))

    def _gather(
        self, server: int, replica: int, version: int, finite: bool, now: float, square: float, samples: int = 0
    ) -> tuple[Coordinator, Verdict]:
        if not finite:
            return self._stand(replica, Standing.REFUSED), Verdict.REFUSED
        if server in self.holders[replica]:
            return self, Verdict.REPEAT
        holders = put(self.holders, replica, self.holders[replica] | {server})
        measures = self.quorum.policy.measures
        squares = put(self.squares, replica, self.squares[replica] + square) if measures else self.squares
        computed = self.computed if version == self.computed[replica] else put(self.computed, replica, version)
        if len(holders[replica]) < self.servers:
            return replace(self, holders=holders, squares=squares, computed=computed), Verdict.HELD
        square = squares[replica] if measures else nan
        offer = Offer(replica, now - self.quorum.opened, self.version - version, square, samples)
        quorum, waiting = self.quorum, self.waiting
        if quorum.closed_at is None:
            quorum = quorum.offer(offer, lambda: self._may_offer(replica))
            verdict = Verdict.OFFERED if quorum.closed_at is None else Verdict.CLOSE
        else:
            waiting, verdict = (*waiting, offer), Verdict.HELD
        standing = put(self.standing, replica, Standing.WHOLE)
        whole = {"holders": holders, "squares": squares, "computed": computed, "standing": standing}
        return replace(self, quorum=quorum, waiting=waiting, **whole), verdict

    def _open_next(self, now: float) -> Coordinator:
        """The version after the open one, which every server has applied: receipts for this, and all begin that.

        But for those who go on with what they have begun; of them, what is whole is offered again.
        """
        version, replicas = self.version + 1, range(self.quorum.replicas)
        going, oldest = self._going(), version - self.quorum.policy.staleness
        stay = going.union(r for r, standing in enumerate(self.standing) if standing is Standing.IDLE)
        since = tuple([max(since, oldest) for since in self.since]) if stay else self.since
        waiting = () if self.closing else self.book.waiting
        begin = frozenset([replica for replica in waiting if self.alive[replica] and replica not in going])
        standing = [Standing.RUNNING if replica in begin else Standing.IDLE for replica in replicas]
        opened = replace(
            self,
            quorum=self.quorum.next(now, None if self.closing else lambda: self._record(now)),
            book=self.book.spend(*begin),
            standing=among(going, self.standing, tuple(standing)),
            holders=among(going, self.holders, (frozenset(),) * len(replicas)),
            since=among(stay, since, (version,) * len(replicas)),
            computed=among(going, self.computed, (version,) * len(replicas)),
            began=among(going, self.began, (now,) * len(replicas)),
            ordered_at=None,
            squares=among(going, self.squares, (0.0,) * len(replicas)),
            square=0.0,
            published=frozenset(),
            waiting=(),
            history=(*self.history, self._account())[-self.remember :] if self.remember else (),
            was=tuple([pair for pair in self.was if pair[0] in going]) if self.was else (),
        )
        offers = [offer for offer in (*self.quorum.offers, *self.waiting) if offer.replica in going]
        return opened._offer_again(offers) if offers else opened._follow()

    def _offer_again(self, offers: Sequence[Offer]) -> Coordinator:
        """What was whole before the open version was is offered to it, all at once."""
        older = tuple(replace(offer, seconds=0.0, staleness=offer.staleness + 1) for offer in offers)
        quorum = replace(self._follow().quorum, offers=older)
        ask = len(older) >= quorum.enough and not self.closing
        return replace(self, quorum=quorum.ask(self._may_offer(), quorum.opened) if ask else quorum)

    def _record(self, now: float) -> Record:
        """What the policy is told of the open version, which every server has applied."""
        quorum, closed, ordered = self.quorum, self.quorum.closed_at, self.ordered_at
        assert closed is not None
        assert ordered is not None
        missing = tuple(
            (replica, closed - self.began[replica])
            for replica, standing in enumerate(self.standing)
            if standing is Standing.RUNNING and self.alive[replica]
        )
        waited = ordered - closed
        return Record(
            quorum.offers, quorum.kept, missing, now - quorum.opened - waited, closed - quorum.opened, self.square
        )

    def _account(self) -> AppliedVersion:
        """The open version's ledger. Its set is fixed; who does not go on stands as then."""
        assert self.quorum.closed_at is not None
        kept, going, was = self.quorum.kept, self._going(), dict(self.was)
        each = enumerate(zip(self.standing, self.computed, self.spent, strict=True))
        receipts = tuple(
            Receipt(replica, was.get(replica, spent), outcome(standing, replica, kept), self.version - computed)
            for replica, (standing, computed, spent) in each
            if standing in ENDED and replica not in going
        )
        return AppliedVersion(self.version, self.quorum.kept, receipts, self.quorum.closed_at)

    def _follow(self) -> Coordinator:
        """Where replicas come and go, the open version is made of all but those that it has lost."""
        if not self.quorum.floor or self.quorum.closed_at is not None:
            return self
        here, gone = zip(self.standing, self.alive, strict=True), (Standing.LOST, Standing.ABSENT)
        begun = (Standing.RUNNING, Standing.WHOLE)
        there = sum([standing in begun or (alive and standing not in gone) for standing, alive in here])
        return replace(self, quorum=self.quorum.follow(there))

    def _stand(self, replica: int, standing: Standing) -> Coordinator:
        """``replica``, which was able to offer, stands elsewhere now."""
        return replace(self, standing=put(self.standing, replica, standing), quorum=self.quorum.stir())._follow()

    def _may_offer(self, beside: int = -1) -> tuple[int, ...]:
        """The replicas, others than ``beside``, whose update of the open version may yet become whole."""
        running, idle, expects = Standing.RUNNING, Standing.IDLE, self.book.expects
        pairs = enumerate(zip(self.standing, self.alive, strict=True))
        return tuple(
            [
                replica
                for replica, (standing, alive) in pairs
                if (standing is running or (standing is idle and alive and expects(replica))) and replica != beside
            ]
        )

    def _ledger(self, version: int) -> AppliedVersion | None:
        self._check(version, 0)
        for ledger in reversed(self.history):
            if ledger.version == version:
                return ledger
        if version == self.version:
            return None
        raise InternalError(f"version {version} is forgotten: {self.remember} before {self.version} are remembered")

    def _check(self, version: int, replica: int, server: int = 0) -> None:
        quorum = self.quorum
        if version <= quorum.version and 0 <= replica < quorum.replicas and 0 <= server < self.servers:
            return
        if version > quorum.version:
            raise InternalError(f"version {version} is not open yet, the newest is {self.version}")
        if not 0 <= replica < quorum.replicas:
            raise InternalError(f"replica {replica} does not exist, expected 0 to {self.quorum.replicas - 1}")
        if not 0 <= server < self.servers:
            raise InternalError(f"server {server} does not exist, expected 0 to {self.servers - 1}")
