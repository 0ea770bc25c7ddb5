"""The tapes of a plan, found by the shapes that come: which are made, kept and let go.

Law: what a tape computes is none of its business (`tape`), nor is what it is made of (`recording`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.collection import held_back
from flowrt.base.spec import Spec, Value, spec_of, value_known
from flowrt.kernels.store.background import are_ready, submit
from flowrt.sched.host.latest import Latest
from flowrt.sched.host.memory import Memory
from flowrt.sched.regions.lives import DataDependent
from flowrt.sched.tape.arenas import Arenas
from flowrt.sched.tape.recording import record
from flowrt.sched.tape.tape import Tape

if TYPE_CHECKING:
    from flowrt.base.plan import Plan
    from flowrt.sched.regions.misfits import PlanWithin
    from flowrt.sched.regions.recorded import Recording
    from flowrt.sched.regions.regions import Region

Array: TypeAlias = "np.ndarray[Any, Any]"

RECORDED = 64  # recordings of a plan that are kept, for predictions and for the tapes made after them; one per region
KEPT, KEPT_EACH = 256, 4  # tapes of a plan that are kept at least, and of each of its regions
TRIMMED_EACH = 8  # idle memory is looked at each time that so many parts of the tapes are new


class Tapes:
    """The tapes of one plan's regions, by the shapes (and values that decide shapes) of their inputs.

    Keeps the ``bound`` most recently used, by default several of each of so many ``regions``. What the plan is the body
    of is ``around`` it. May be called from any thread; two that ask for one new tape at the same time may both make it,
    which costs time and nothing else.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        bound: int | None = None,
        regions: int = 1,
        memory: Memory | None = None,
        around: PlanWithin | None = None,
    ) -> None:
        self._memory = memory or Memory()
        self._plan, self._around = plan, around
        bound = max(KEPT, KEPT_EACH * regions) if bound is None else bound
        self._untrimmed = 0  # tapes made since idle memory was last looked at
        self._specs = plan.value_specs()
        self._tapes: Latest[Any, Tape | None] = Latest(bound)
        self._made_of: Counter[Region] = Counter()
        # What `again` was asked for; the other tapes are of regions that do not vary, and of those laid out.
        self._met: Latest[Any, None] = Latest(bound // 2)
        self._arenas: dict[Region, Arenas] = {}
        self._decisive: dict[Region, tuple[int, ...]] = {}
        self._recorded: Latest[Any, Recording] = Latest(max(RECORDED, regions))
        self._memory.enlist(self)  # last: from now on other threads ask what is idle here

    def record(self, region: Region, inputs: Sequence[Spec]) -> Recording:
        """What the tape of ``region`` for inputs of these concrete specs is or will be made of.

        Raises as `recording.record` does; `DataDependent` also where a value that decides shapes is not known.
        """
        decisive = frozenset(region.shape_inputs)
        specs = tuple(
            spec if value in decisive else Spec(spec.dtype, spec.dims, _static(self._specs[value]))
            for value, spec in zip(region.inputs, inputs, strict=True)
        )
        for value, spec in zip(region.inputs, specs, strict=True):
            if value in decisive and not value_known(spec.value):
                raise DataDependent(f"shapes depend on the value of {spec}")
        key = (region, *[(spec.dims, spec.value) for spec in specs])
        found = self._recorded.pop(key, None)
        if found is None or (found.orders and are_ready(found.orders)):
            found = record(self._plan, region, specs)
        self._recorded[key] = found
        return found

    def made(self, region: Region, inputs: Sequence[Array]) -> Tape | None:
        """The tape of ``region`` for arrays like ``inputs``, if it was made before: compiles nothing.

        One that would be better with kernels not compiled yet has them ordered when it is asked for again, and is given
        up for a new one once they are there.
        """
        key = self._key(region, inputs)
        try:
            tape = self._tapes[key]
            self._tapes.move_to_end(key)
        except KeyError:  # another thread may just have pushed it out
            return None
        if tape is None or not tape.recording.orders:
            return tape
        submit(tape.recording.orders)
        return None if are_ready(tape.recording.orders) else tape

    def get(self, region: Region, inputs: Sequence[Array]) -> Tape | None:
        """The tape of ``region`` for arrays like ``inputs``, or None where its shapes depend on values made inside.

        Raises `SpecError` naming the node that these inputs do not fit.
        """
        key = self._key(region, inputs)
        try:
            tape = self._tapes[key]
            self._tapes.move_to_end(key)
        except KeyError:
            tape = None
        else:
            if tape is None or not tape.recording.orders or not are_ready(tape.recording.orders):
                return tape
        tape = self._tapes[key] = self._make(region, inputs)
        self._made_of[region] += 1
        self._trim()
        return tape

    def made_of(self, region: Region) -> int:
        """How many tapes were made of ``region``."""
        return self._made_of[region]

    def again(self, region: Region, inputs: Sequence[Array]) -> Tape | None:
        """As `get`, where arrays like these came before; else None: to lay out takes longer than to run without a tape.

        No more are remembered than there may be tapes, so what comes again only after more others is never laid out.
        """
        key = self._key(region, inputs)
        if key in self._tapes or key in self._met:
            self._met.pop(key, None)
            return self.get(region, inputs)
        self._met[key] = None
        return None

    def _trim(self) -> None:
        """Have idle memory let go, once there are some more tapes: looking at all for each would take long of many."""
        self._untrimmed += 1
        if self._untrimmed * TRIMMED_EACH < len(self._tapes):
            return
        self._untrimmed = 0
        self._memory.trim(apart_from=self)
        surplus = self.kept_bytes - self._memory.most_idle
        for tape in tuple(self._tapes.values()):
            if surplus <= 0:
                return
            if tape is not None:
                surplus -= tape.direct_bytes
                tape.direct = None

    @property
    def idle_bytes(self) -> int:
        """What no run is in."""
        return sum(arenas.idle_bytes for arenas in tuple(self._arenas.values()))

    @property
    def kept_bytes(self) -> int:
        """What the tapes keep for runs to come, direct calls included."""
        return self.idle_bytes + sum(tape.direct_bytes for tape in tuple(self._tapes.values()) if tape is not None)

    def let_go(self) -> None:
        """Drop what no run is in, and what direct calls compute in, but for the latest: who makes those holds them."""
        for arenas in tuple(self._arenas.values()):
            arenas.let_go()
        for tape in tuple(self._tapes.values()):
            if tape is not None:
                tape.direct = None

    def _key(self, region: Region, inputs: Sequence[Array]) -> Any:
        key = (region, *[array.shape for array in inputs])
        return (key, *[inputs[i].tobytes() for i in self._positions(region)]) if region.shape_inputs else key

    def _positions(self, region: Region) -> tuple[int, ...]:
        found = self._decisive.get(region)
        if found is None:
            found = self._decisive[region] = tuple(region.inputs.index(v) for v in region.shape_inputs)
        return found

    @held_back()
    def _make(self, region: Region, inputs: Sequence[Array]) -> Tape | None:
        specs = [spec_of(array) for array in inputs]
        try:
            recording = self.record(region, specs)
        except DataDependent:
            return None
        arenas = self._arenas.setdefault(region, Arenas(self._memory))
        around, memory = self._around, self._memory
        return Tape(self._plan, region, specs, memory=memory, arenas=arenas, recording=recording, around=around)


def _static(spec: Spec) -> Value:
    """The value that the plan itself knows entirely, if it does."""
    return spec.value if value_known(spec.value) else None
