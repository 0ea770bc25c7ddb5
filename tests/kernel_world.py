"""Kernels of tests: what they enter in the tables is removed again, so that nobody else meets it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flowrt.kernels.table import ALIASES, HOST_ONLY, JITABLES, KERNELS


@contextmanager
def own_tables() -> Iterator[None]:
    """Undo, at the end, what is registered inside."""
    kernels = {key: list(found) for key, found in KERNELS.items()}
    aliases, host_only, helpers = set(ALIASES), set(HOST_ONLY), len(JITABLES)
    try:
        yield
    finally:
        KERNELS.clear()
        KERNELS.update(kernels)
        for table, before in ((ALIASES, aliases), (HOST_ONLY, host_only)):
            table.clear()
            table.update(before)
        del JITABLES[helpers:]
