"""One parameter server's part of every update, from its arrival until it is applied.

A shard is a value: an event answers a new shard and what to do. It owns three facts: which updates that may still count
this server holds, that a fixed set of them is handed out to be applied once, and which version is current. It must not
know who else holds what, how the set was chosen, or what an update is: that is the coordinator's and the optimizer's.

An update is known by its replica and the version that it was computed from, of which a replica computes each once at
most, in their order. So the newest one of each replica is buffered, and no more; one that is older than that, or than
``staleness`` versions, comes too late. An update of a version to come cannot come: a tower of version k + 1 begins only
after the coordinator has heard from every server, this one included, that k + 1 is published. However late or reordered
messages are, they are therefore of this version or an older one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Generic, TypeVar

from flowrt.base.errors import InternalError
from flowrt.base.valueclass import put, replace, stateclass
from flowrt.sched.versions.quorum import Verdict

Update = TypeVar("Update")


@stateclass
class ShardStatistics:
    """What one server has seen since it started: ``refused`` per replica, the others in messages or versions."""

    version: int
    buffered: int
    applied: int
    repeats: int
    late: int
    refused: tuple[int, ...]


@stateclass
class Shard(Generic[Update]):
    """What one parameter server holds of the updates that may still count.

    Args:
        held: By replica, the finite update it pushed, or None. At most one each: memory is bounded by the replicas.
        computed: By replica, the version that the newest update was computed from that was held, refused or applied;
            not more than needed: what is older than that comes too late.
        version: The version of this server's variables.
        staleness: How many versions older than that an update may have been computed from.
        refused: The replicas whose newest update was not finite.
        taken: The set that is being applied now, None while nobody applies.
        counts: Totals for `statistics`; no decision reads them.
    """

    held: tuple[Update | None, ...]
    computed: tuple[int, ...]
    version: int = 0
    staleness: int = 0
    refused: frozenset[int] = frozenset()
    taken: tuple[int, ...] | None = None
    counts: ShardStatistics = field(kw_only=True, compare=False)

    @classmethod
    def start(cls, replicas: int, version: int = 0, staleness: int = 0) -> Shard[Update]:
        """An empty shard for ``replicas`` replicas whose variables stand at ``version``, where their updates begin."""
        counts = ShardStatistics(version, 0, 0, 0, 0, (0,) * replicas)
        return cls((None,) * replicas, (version - 1,) * replicas, version, staleness, counts=counts)

    def expects(self, version: int, replica: int) -> bool:
        """Whether an update of ``replica``, computed from ``version``, would be news, and may count.

        Raises `InternalError` for a version that is not published here yet.
        """
        if not 0 <= replica < len(self.held):
            raise InternalError(f"version {version}: pushed by replica {replica}, expected 0 to {len(self.held) - 1}")
        if version > self.version:
            raise InternalError(f"replica {replica} pushed version {version}, this server is at {self.version}")
        counts_in = self.version if self.taken is None else self.version + 1
        return version > self.computed[replica] and counts_in - version <= self.staleness

    def hold(self, version: int, replica: int, update: Update, finite: bool) -> tuple[Shard[Update], Verdict]:
        """Keep this server's part of an update: HELD, REPEAT, REFUSED or LATE.

        The first one counts; a repeated one is dropped. HELD and REPEAT are to be told to the coordinator as finite,
        REFUSED as not: a report that was lost is thereby made good by a repeated push. LATE is to be answered with
        ``self.version``. An update that is not finite is counted and not kept. Raises `InternalError` for a version
        that is not published here yet.
        """
        if not self.expects(version, replica):
            return self.known(version, replica)
        return self.keep(version, replica, update, finite)

    def keep(self, version: int, replica: int, update: Update, finite: bool) -> tuple[Shard[Update], Verdict]:
        """`hold` of an update that this `expects`."""
        held, computed = put(self.held, replica, update if finite else None), put(self.computed, replica, version)
        if finite:
            refused = self.refused - {replica} if self.refused else self.refused
            return replace(self, held=held, computed=computed, refused=refused), Verdict.HELD
        counts = replace(self.counts, refused=put(self.counts.refused, replica, self.counts.refused[replica] + 1))
        refused = self.refused | {replica}
        return replace(self, held=held, computed=computed, refused=refused, counts=counts), Verdict.REFUSED

    def keep_all(self, version: int, updates: Mapping[int, Update]) -> Shard[Update]:
        """`keep` of the finite updates of one version, by replica, that this `expects`."""
        held, computed = [*self.held], [*self.computed]
        for replica, update in updates.items():
            held[replica], computed[replica] = update, version
        return replace(self, held=tuple(held), computed=tuple(computed), refused=self.refused - updates.keys())

    def take(
        self, version: int, replicas: tuple[int, ...], versions: Sequence[int] = ()
    ) -> tuple[Shard[Update], tuple[Update, ...] | None]:
        """Hand out the updates of the fixed set ``replicas``, in replica order, to be applied now.

        ``versions`` are those that they were computed from, if not all from ``version``. None says that this version is
        being applied or has been: there is nothing to do. Whoever gets the updates owes one call: `applied` once all
        variables are written, or `give_back` when none was. Raises `InternalError` for a version that is not current
        yet and for an update that is not held: the set was not fixed by the rules.
        """
        if version > self.version:
            raise InternalError(f"version {version} is to be applied, this server is at {self.version}")
        if version < self.version or self.taken is not None:
            return self, None
        updates, taken = [], []
        for replica, computed in sorted(zip(replicas, versions or (version,) * len(replicas), strict=True)):
            update = self.held[replica]
            if update is None or self.computed[replica] != computed:
                where = f"version {self.version}: replica {replica} is in the set"
                raise InternalError(f"{where}, its update is not held here; it was computed from version {computed}")
            updates.append(update)
            taken.append(replica)
        return replace(self, taken=tuple(taken)), tuple(updates)

    def applied(self, version: int) -> Shard[Update]:
        """The updates taken of ``version`` are in the variables: publish the next version and forget these.

        So is what would be too old for the next one.
        """
        taken, oldest = self._owed(version, "applied"), version + 1 - self.staleness
        counts = replace(self.counts, applied=self.counts.applied + 1)
        if not self.staleness:
            none: tuple[Update | None, ...] = (None,) * len(self.held)
            old = (version,) * len(none)
            return replace(
                self, held=none, computed=old, version=version + 1, refused=frozenset(), taken=None, counts=counts
            )
        held = tuple(
            None if computed < oldest or replica in taken else update
            for replica, (update, computed) in enumerate(zip(self.held, self.computed, strict=True))
        )
        return replace(
            self,
            held=held,
            computed=tuple(max(computed, oldest - 1) for computed in self.computed),
            version=version + 1,
            refused=frozenset(replica for replica in self.refused if self.computed[replica] >= oldest),
            taken=None,
            counts=counts,
        )

    def give_back(self, version: int) -> Shard[Update]:
        """The updates taken of ``version`` did not touch any variable: they may be taken again."""
        self._owed(version, "given back")
        return replace(self, taken=None)

    def statistics(self) -> ShardStatistics:
        """What this server has seen since it started."""
        buffered = sum(update is not None for update in self.held)
        return replace(self.counts, version=self.version, buffered=buffered)

    def known(self, version: int, replica: int) -> tuple[Shard[Update], Verdict]:
        """`hold` of an update that this does not expect: it is not news, or too late."""
        counts, newest = self.counts, version == self.computed[replica]
        if newest and replica in self.refused:
            return self, Verdict.REFUSED
        if newest and self.held[replica] is not None:
            return replace(self, counts=replace(counts, repeats=counts.repeats + 1)), Verdict.REPEAT
        return replace(self, counts=replace(counts, late=counts.late + 1)), Verdict.LATE

    def _owed(self, version: int, done: str) -> tuple[int, ...]:
        if version != self.version or self.taken is None:
            raise InternalError(f"version {version} was {done} but not taken; this server is at {self.version}")
        return self.taken


class Untold(Generic[Update]):
    """A shard, and updates of its version that it was not told of yet: it is told of them together, which costs less.

    What is assigned to ``of`` is the shard from then on.
    """

    __slots__ = ("_fresh", "_of")

    def __init__(self, of: Shard[Update]) -> None:
        self.of = of

    @property
    def of(self) -> Shard[Update]:
        """The shard, which may not know of all updates yet."""
        return self._of

    @of.setter
    def of(self, of: Shard[Update]) -> None:
        self._of = of
        self._fresh: dict[int, Update] = {}  # by replica

    def told(self) -> Shard[Update]:
        """The shard, with all that came."""
        if self._fresh:
            self.of = self._of.keep_all(self._of.version, self._fresh)
        return self._of

    def expects(self, version: int, replica: int) -> bool:
        """As `Shard.expects`."""
        of = self._of if replica not in self._fresh else self.told()
        if version == of.version and of.taken is None and 0 <= replica < len(of.computed):  # as mostly
            return of.computed[replica] < version
        return of.expects(version, replica)

    def keep(self, version: int, replica: int, update: Update, finite: bool) -> Verdict:
        """As `Shard.keep`."""
        if finite and version == self._of.version:
            self._fresh[replica] = update
            return Verdict.HELD
        self.of, verdict = self.told().keep(version, replica, update, finite)
        return verdict
