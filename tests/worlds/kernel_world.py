"""Kernels of tests: what they enter in the tables is removed again, so that nobody else meets it.

Helpers that kernels call stay: the functions that make them remember what they made, and make it no second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flowrt.base.traits import TRAITS
from flowrt.kernels.compiler import carry_out
from flowrt.kernels.fusion import fused
from flowrt.kernels.language.table import FACTS, HOST_ONLY, KERNELS, forget_kernels
from flowrt.kernels.store import background

if TYPE_CHECKING:
    import pytest


def compile_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile even small programs as soon as they are ordered, in this process: the helper takes its time."""

    def carry_out_all() -> None:
        for order in list(background._state.pending.values()):
            background._answered(f"{order.symbol} {carry_out(order.symbol, order.request)}")

    monkeypatch.setattr(background, "_send", carry_out_all)
    monkeypatch.setattr(fused, "WORTH_BYTES", 0)


@contextmanager
def own_tables() -> Iterator[None]:
    """Undo, at the end, what is registered inside."""
    kernels = {key: list(found) for key, found in KERNELS.items()}
    host_only, facts, traits = dict(HOST_ONLY), dict(FACTS), dict(TRAITS)
    try:
        yield
    finally:
        KERNELS.clear()
        KERNELS.update(kernels)
        forget_kernels()
        for stated, before in ((HOST_ONLY, host_only), (FACTS, facts), (TRAITS, traits)):
            stated.clear()
            stated.update(before)
