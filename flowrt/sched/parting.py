"""What the machine itself does where rows are dealt out to parts and joined again: a step's values decide their sizes.

Law: nothing is computed. A part is a view of what was dealt out, and shares its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.errors import ResourceError, SpecError
from flowrt.sched.ready import GuessingRunner

Array: TypeAlias = "np.ndarray[Any, Any]"

PARTING = frozenset({"part_of", "join_parts"})
COPIED_PER_SECOND = 4e9  # bytes


class PartRunner(GuessingRunner):
    """Computes a node that takes a part, or joins parts. May be called from any thread."""

    def expected_seconds(self, inputs: Sequence[Array]) -> float:
        """What copying all rows takes; a part is not copied."""
        return 0.0 if self.node.op == "part_of" else sum(part.nbytes for part in inputs[:-2]) / COPIED_PER_SECOND

    def __call__(self, inputs: Sequence[Array], run: Array) -> Sequence[Array]:
        """The output; raises `ResourceError` where there is no room for it, `SpecError` for parts that do not fit."""
        if self.node.op == "part_of":
            x, starts = inputs
            part = self.node.attrs["part"]
            return (x[starts[part] : starts[part + 1]],)
        *parts, _, order = inputs
        return (self._joined(parts, len(order)),)

    def _joined(self, parts: Sequence[Array], room: int) -> Array:
        rows = sum(map(len, parts))
        if rows > room:
            raise SpecError(f"{self.node.where()}: {rows} rows of parts do not fit {room}")
        try:
            out = self._memory.output((room, *parts[0].shape[1:]), parts[0].dtype)
        except ResourceError as error:
            raise ResourceError(f"{self.node.where()}: {error}") from error
        np.concatenate(parts, out=out[:rows])
        out[rows:] = 0
        return out
