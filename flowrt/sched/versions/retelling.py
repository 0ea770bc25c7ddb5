"""Which batch goes to which replica when a history is trained again: to those that were kept, for their versions.

Law: as `Handing`; but a replica is handed a batch only once nothing lies between the open version and the one that the
batch is for in which it was not kept. It would begin such a version, and was not to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowrt.sched.versions.handing import Handing


class Retelling(Handing):
    """Hands out what was kept: ``versions`` holds for each, by replica, the identities of the batches of its update."""

    def __init__(self, replicas: int, depth: int, versions: Sequence[Mapping[int, Sequence[int]]]) -> None:
        super().__init__(replicas, depth)
        self._versions = versions
        self._open = 0  # which of them is open
        self._ended: set[int] = set()  # of whom a receipt of the open one has come
        self._coming: list[list[tuple[int, int]]] = [[] for _ in range(replicas)]  # (version, identity), next one last
        for at in range(len(versions) - 1, -1, -1):
            for replica, identities in versions[at].items():
                self._coming[replica].extend((at, identity) for identity in reversed(identities))

    @property
    def due(self) -> tuple[int, int] | None:
        """Whose turn it is, and what that one is handed."""
        for replica, coming in enumerate(self._coming):
            if self.given[replica] - self.spent[replica] < self.depth and self._may_have(replica):
                return replica, coming[-1][1]
        return None

    @property
    def identity(self) -> int | None:
        """What is handed out next; None where nobody may have a batch."""
        return None if (due := self.due) is None else due[1]

    def hand(self, replica: int, identity: int) -> int:
        """Hand out what is `due`."""
        self._coming[replica].pop()
        self.new += 1  # counts, here
        number = self.given[replica] = self.given[replica] + 1
        self._held[replica][number] = identity
        return number

    def end(self, total: int) -> None:
        """There are no more batches, though there should be."""
        self._coming = [[] for _ in self._coming]

    @property
    def over(self) -> bool:
        """Whether all were handed out."""
        return not any(self._coming)

    def spend(self, replica: int, number: int) -> list[int]:
        """As `Handing.spend`; each version has one receipt of each replica that it keeps."""
        self._ended.add(replica)
        if self._open < len(self._versions) and self._ended.issuperset(self._versions[self._open]):
            self._open, self._ended = self._open + 1, set()
        return super().spend(replica, number)

    def _may_have(self, replica: int) -> bool:
        """As of others, who has a batch coming that it may begin."""
        if not (coming := self._coming[replica]) or not super()._may_have(replica):
            return False
        at, _ = coming[-1]
        return at <= self._open or replica in self._versions[at - 1]
