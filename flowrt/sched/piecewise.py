"""Runs a region piece by piece: by tapes, and node by node where sizes come that have not come before.

Law: what the pieces are is decided in `loops.pieces`; who runs a tape, or a node, says what is done about variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from flowrt.base.errors import FlowrtError, ResourceError, StepCancelled
from flowrt.sched.tape.tapes import Tapes

if TYPE_CHECKING:
    from flowrt.base.plan import Plan
    from flowrt.sched.host.memory import Memory
    from flowrt.sched.host.rendezvous import Array
    from flowrt.sched.loops.pieces import Piece
    from flowrt.sched.regions.misfits import PlanWithin
    from flowrt.sched.regions.regions import Region
    from flowrt.sched.tape.tape import Tape

    RunTape: TypeAlias = Callable[[Tape, Sequence[Array], Array], Sequence[Array]]
    RunSingly: TypeAlias = Callable[[Region, Sequence[Array], Array], Sequence[Array]]

KEPT = 2048  # tapes of a plan's pieces: an extent that grows from one run to the next has one for each of its sizes


class Piecewise:
    """Runs pieces of one plan, which ``around`` stands around. May be called from any thread."""

    def __init__(
        self, plan: Plan, memory: Memory, by_tape: RunTape, singly: RunSingly, around: PlanWithin | None = None
    ) -> None:
        self._tapes = Tapes(plan, bound=KEPT, memory=memory, around=around)
        self._run_tape, self._run_singly = by_tape, singly

    def run(self, region: Region, pieces: Sequence[Piece], inputs: Sequence[Array], words: Array) -> list[Array]:
        """The outputs of the ``region`` that these are the pieces of."""
        values = dict(zip(region.inputs, inputs, strict=True))
        for piece in pieces:
            given = [values[v] for v in piece.region.inputs]
            outputs = self._by_tape(piece, given, words)
            if outputs is None:
                outputs = self._run_singly(piece.region, given, words)
            values.update(zip(piece.region.outputs, outputs, strict=True))
        return [values[v] for v in region.outputs]

    def _by_tape(self, piece: Piece, inputs: Sequence[Array], words: Array) -> Sequence[Array] | None:
        """What a piece answers; None where its nodes are to be computed by themselves."""
        tapes = self._tapes
        tape = tapes.made(piece.like, inputs) or (tapes.again if piece.varies else tapes.get)(piece.like, inputs)
        if tape is None:
            return None
        try:
            return self._run_tape(tape, inputs, words)
        except (StepCancelled, ResourceError):
            raise
        except FlowrtError:
            if piece.like is piece.region:
                raise
            return None  # so that what fails is named, and not what is like it
