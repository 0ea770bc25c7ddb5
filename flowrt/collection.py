"""Python's collector of cycles, held back where it finds nothing.

It looks at every object again each time there are a quarter more: of the many that building and planning a large graph
makes, none of them garbage, it takes a third of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_enabled: list[bool] = []  # as each that is inside found it; of several threads, the last to leave lets it run again


@contextmanager
def held_back() -> Iterator[None]:
    """No cycles are collected inside, or as a decorator in a function, on any thread."""
    _enabled.append(gc.isenabled())
    gc.disable()
    try:
        yield
    finally:
        if _enabled.pop():
            gc.enable()
