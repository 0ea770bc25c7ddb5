"""Where a trainer's batches come from: any iterable, plain or asynchronous, of ``{name: array}``."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from typing import Any

from flowrt.errors import FeedError, user_site


class Batches:
    """The batches that are left. ``empty`` is known once one more was asked for than there are."""

    def __init__(
        self, source: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]], names: Iterable[str]
    ) -> None:
        self.empty = False
        self._names = frozenset(names)
        self._batches = aiter(source) if isinstance(source, AsyncIterable) else iter(source)

    async def next(self) -> Mapping[str, Any] | None:
        """The next batch, or None if there is none; raises `FeedError` if it has other names than expected."""
        if self.empty:
            return None
        try:
            batch = await anext(self._batches) if isinstance(self._batches, AsyncIterator) else next(self._batches)
        except (StopIteration, StopAsyncIteration):
            self.empty = True
            return None
        check_names(batch, self._names, "a batch")
        return batch


def check_names(given: Any, expected: Iterable[str], who: str) -> None:
    """Raise `FeedError` unless ``given`` is a mapping with exactly the names ``expected``."""
    wanted = sorted(expected)
    if not isinstance(given, Mapping) or sorted(given) != wanted:
        got = sorted(given) if isinstance(given, Mapping) else repr(given)[:80]
        raise FeedError(f"{user_site()}: {who} is a mapping with {wanted}, got {got}")
