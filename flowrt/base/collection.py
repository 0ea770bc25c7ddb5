"""Python's collector of cycles, held back where it finds nothing, and freeing that holds nobody up.

It looks at every object again each time there are a quarter more: of the many that building and planning a large graph
makes, none of them garbage, it takes a third of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


@contextmanager
def passed_over() -> Iterator[None]:
    """As `held_back`; and what was made inside counts as old afterwards, as if the collector had looked at it.

    It would look at all of that in one go, and holds the GIL meanwhile: of the millions of values that a plan may be,
    for a tenth of a second. A full collection looks at them. Where somebody froze objects on purpose, they stay frozen.
    """
    with held_back():
        try:
            yield
        finally:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()


def free_each(values: list[Any]) -> None:
    """Free what only ``values`` holds, one by one: all at once, of hundreds of thousands, holds the GIL for 10 ms."""
    while values:
        values.pop()
