"""Kernels of tests: what they enter in the tables is removed again, so that nobody else meets it.

Helpers that kernels call stay: the functions that make them remember what they made, and make it no second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flowrt.kernels.table import ALIASES, HOST_ONLY, KERNELS


@contextmanager
def own_tables() -> Iterator[None]:
    """Undo, at the end, what is registered inside."""
    kernels = {key: list(found) for key, found in KERNELS.items()}
    aliases, host_only = set(ALIASES), set(HOST_ONLY)
    try:
        yield
    finally:
        KERNELS.clear()
        KERNELS.update(kernels)
        for table, before in ((ALIASES, aliases), (HOST_ONLY, host_only)):
            table.clear()
            table.update(before)
