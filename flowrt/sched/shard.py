"""One parameter server's part of every update, from its arrival until it is applied.

A shard is a value: an event answers a new shard and what to do. It owns three facts: which updates of the current
version this server holds, that a fixed set of them is handed out to be applied once, and which version is current.
It must not know who else holds what, how the set was chosen, or what an update is: that is the coordinator's and the
optimizer's.

Only the current version is buffered, at most one update per replica. An update of a later version cannot come: a tower
of version k + 1 begins only after the coordinator has heard from every server, this one included, that k + 1 is
published. However late or reordered messages are, they are therefore of this version or an older one.
"""

from __future__ import annotations

from dataclasses import field
from typing import Generic, TypeVar

from flowrt.errors import InternalError
from flowrt.sched.quorum import Verdict
from flowrt.valueclass import put, replace, stateclass

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
    """What one parameter server holds of the current version's updates.

    Args:
        held: By replica, the finite update it pushed, or None. At most one each: memory is bounded by the replicas.
        version: The version of this server's variables; an update must have been computed from it.
        refused: The replicas whose update of this version was not finite.
        taken: The set that is being applied now, None while nobody applies.
        counts: Totals for `statistics`; no decision reads them.
    """

    held: tuple[Update | None, ...]
    version: int = 0
    refused: frozenset[int] = frozenset()
    taken: tuple[int, ...] | None = None
    counts: ShardStatistics = field(kw_only=True, compare=False)

    @classmethod
    def start(cls, replicas: int, version: int = 0) -> Shard[Update]:
        """An empty shard for ``replicas`` replicas whose variables stand at ``version``."""
        counts = ShardStatistics(version, 0, 0, 0, 0, (0,) * replicas)
        return cls((None,) * replicas, version, counts=counts)

    def hold(self, version: int, replica: int, update: Update, finite: bool) -> tuple[Shard[Update], Verdict]:
        """Keep this server's part of an update: HELD, REPEAT, REFUSED or LATE.

        The first one counts; a repeated one is dropped. HELD and REPEAT are to be told to the coordinator as finite,
        REFUSED as not: a report that was lost is thereby made good by a repeated push. LATE is to be answered with
        ``self.version``. An update that is not finite is counted and not kept. Raises `InternalError` for a version
        that is not published here yet.
        """
        if not 0 <= replica < len(self.held):
            raise InternalError(f"version {version}: pushed by replica {replica}, expected 0 to {len(self.held) - 1}")
        if version > self.version:
            raise InternalError(f"replica {replica} pushed version {version}, this server is at {self.version}")
        if version < self.version:
            return self._late()
        if replica in self.refused:
            return self, Verdict.REFUSED
        if self.held[replica] is not None:
            return replace(self, counts=replace(self.counts, repeats=self.counts.repeats + 1)), Verdict.REPEAT
        if self.taken is not None:
            return self._late()
        if not finite:
            return self._refuse(replica), Verdict.REFUSED
        return replace(self, held=put(self.held, replica, update)), Verdict.HELD

    def take(self, version: int, replicas: tuple[int, ...]) -> tuple[Shard[Update], tuple[Update, ...] | None]:
        """Hand out the updates of the fixed set ``replicas``, in replica order, to be applied now.

        None says that this version is being applied or has been: there is nothing to do. Whoever gets the updates owes
        one call: `applied` once all variables are written, or `give_back` when none was. Raises `InternalError` for a
        version that is not current yet and for a replica whose update is not held: the set was not fixed by the rules.
        """
        if version > self.version:
            raise InternalError(f"version {version} is to be applied, this server is at {self.version}")
        if version < self.version or self.taken is not None:
            return self, None
        updates = tuple(self._update(replica) for replica in sorted(replicas))
        return replace(self, taken=tuple(sorted(replicas))), updates

    def applied(self, version: int) -> Shard[Update]:
        """The updates taken of ``version`` are in the variables: publish the next version and forget this one's."""
        self._owed(version, "applied")
        counts = replace(self.counts, applied=self.counts.applied + 1)
        empty: tuple[Update | None, ...] = (None,) * len(self.held)
        return replace(self, held=empty, version=version + 1, refused=frozenset(), taken=None, counts=counts)

    def give_back(self, version: int) -> Shard[Update]:
        """The updates taken of ``version`` did not touch any variable: they may be taken again."""
        self._owed(version, "given back")
        return replace(self, taken=None)

    def statistics(self) -> ShardStatistics:
        """What this server has seen since it started."""
        buffered = sum(update is not None for update in self.held)
        return replace(self.counts, version=self.version, buffered=buffered)

    def _late(self) -> tuple[Shard[Update], Verdict]:
        return replace(self, counts=replace(self.counts, late=self.counts.late + 1)), Verdict.LATE

    def _refuse(self, replica: int) -> Shard[Update]:
        counts = replace(self.counts, refused=put(self.counts.refused, replica, self.counts.refused[replica] + 1))
        return replace(self, refused=self.refused | {replica}, counts=counts)

    def _update(self, replica: int) -> Update:
        update = self.held[replica]
        if update is None:
            raise InternalError(f"version {self.version}: replica {replica} is in the set, its update is not held here")
        return update

    def _owed(self, version: int, done: str) -> None:
        if version != self.version or self.taken is None:
            raise InternalError(f"version {version} was {done} but not taken; this server is at {self.version}")
