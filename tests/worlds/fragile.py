"""Devices like the example's, but for the node that is told `FRAGILE`: there one is lost after so many kernels, and one
has hardly any memory."""

from __future__ import annotations

import sys
from typing import Any

import arena

import flowrt as fr

FRAGILE, KERNELS, BYTES = "--task=1", 60, 512


class Fragile(arena.Arena):  # type: ignore[misc]
    """One that computes for a while."""

    def launch(self, *args: Any) -> None:
        if self.launched >= KERNELS:
            raise fr.DeviceLost("an illegal address")
        super().launch(*args)


class Kind(arena.ArenaKind):  # type: ignore[misc]
    """Finds it."""

    def open(self, index: int) -> Any:
        return Fragile(4 << 20, 0.0) if FRAGILE in sys.argv else super().open(index)


fr.devices.register("fragile", Kind)
fr.devices.register("narrow", lambda: arena.ArenaKind(BYTES if FRAGILE in sys.argv else 4 << 20))
