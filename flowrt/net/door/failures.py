"""From where handshakes failed lately, and how often: who fails too often is not listened to for a while.

Law: what is kept is bounded, however many addresses there are, and goes by itself.
"""

from __future__ import annotations

from collections import OrderedDict


class Failures:
    """Of each of the ``kept`` addresses that failed last: how often, in the ``seconds`` since it first did.

    Where that is ``most``, it is refused until those are over. Times are seconds on any clock that does not go back.
    """

    def __init__(self, most: int = 64, seconds: float = 10.0, kept: int = 4096) -> None:
        self._most = most
        self._seconds = seconds
        self._kept = kept
        self._failed: OrderedDict[str, tuple[float, int]] = OrderedDict()  # since when and how often; the oldest first

    def __len__(self) -> int:
        return len(self._failed)

    def note(self, address: str, now: float) -> None:
        """Somebody at ``address`` failed."""
        self._forget(now)
        since, count = self._failed.get(address, (now, 0))
        self._failed[address] = since, count + 1
        if len(self._failed) > self._kept:
            self._failed.popitem(last=False)

    def refuses(self, address: str, now: float) -> bool:
        """Whether who comes from ``address`` is not listened to."""
        self._forget(now)
        return self._failed.get(address, (now, 0))[1] >= self._most

    def _forget(self, now: float) -> None:
        while self._failed:
            address, (since, _) = next(iter(self._failed.items()))
            if now - since < self._seconds:
                return
            del self._failed[address]
