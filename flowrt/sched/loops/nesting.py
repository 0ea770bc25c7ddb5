"""A loop or branch on concrete specs as one launch that holds others; see `kernels.composite.nested`.

Law: pure. A body is recorded as a region of its own is; its slots then become operands of the launch around it: its
inputs are that launch's inputs or the private slots of what is carried and scanned, its outputs private slots too or
the outputs of a branch, its arena and its thread's memory parts of the enclosing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.composite.nested import Carried, Inner, NestedStep, ScannedRows
from flowrt.kernels.composite.scalar_loop import sooner
from flowrt.kernels.launch import COPY_OP, Application, Operand, apply_kernel
from flowrt.sched.loops.scalar_loops import apply_scalar_loop
from flowrt.sched.loops.structured import COND, longest_seconds
from flowrt.sched.regions.recorded import ARENA_SLOT, FIRST_SLOT, LOCAL_SLOT
from flowrt.sched.regions.regions import Region

if TYPE_CHECKING:
    from flowrt.base.plan import Plan
    from flowrt.kernels.store.background import CompileOrder
    from flowrt.sched.regions.recorded import Recording

Record: TypeAlias = "Callable[[Plan, Region, Sequence[Spec]], Recording]"

BYTE = np.dtype(np.uint8)


def apply_structured(
    op: str,
    inputs: Sequence[Spec],
    outputs: Sequence[Spec],
    attrs: Mapping[str, Any],
    device: str,
    record: Record,
    bodies: dict[int, Region] | None = None,
) -> Application:
    """The one launch that computes a loop or branch; raises what recording its bodies raises.

    ``bodies`` keeps their regions, by the plans' ids, for when it is asked for again.
    """
    nest = _Nest(inputs, outputs, attrs, device, record, {} if bodies is None else bodies)
    if op == COND:
        return nest.branch()
    scalar = apply_scalar_loop(inputs, outputs, attrs)
    return nest.loop() if scalar is None else sooner(scalar, nest.loop)


def whole(plan: Plan, device: str) -> Region:
    """All of a body as one region."""
    return Region(
        nodes=tuple(range(len(plan.nodes))),
        first=tuple(plan.value_starts()[:-1]),
        device=device,
        inputs=tuple(range(len(plan.feeds))),
        outputs=plan.fetches,
    )


@dataclass(slots=True)
class _Nest:
    """Numbers the operands of one structured launch: inputs, outputs, scratch, thread's memory, private slots.

    The scratch is the bodies' arena and, for a loop, the condition's answer and a spare place for all it carries.
    """

    inputs: Sequence[Spec]
    outputs: Sequence[Spec]
    attrs: Mapping[str, Any]
    device: str
    record: Record
    bodies: dict[int, Region]
    scratch: list[Spec] = field(default_factory=list)
    arena_bytes: int = 0
    local_bytes: int = 0
    used: int = 0
    predicted: float = 0.0
    longest: float = 0.0
    orders: tuple[CompileOrder, ...] = ()
    wishes: tuple[tuple[CompileOrder, int], ...] = ()
    constants: list[tuple[int, np.ndarray[Any, Any]]] = field(default_factory=list)

    @property
    def _arena(self) -> int:
        return len(self.inputs) + len(self.outputs)

    @property
    def _local(self) -> int:
        return self._arena + 1 + (1 + self.attrs["carried"] if "carried" in self.attrs else 0)

    def _slot(self) -> int:
        """A private slot."""
        self.used += 1
        return self._local + self.used

    def branch(self) -> Application:
        captured = list(range(1, len(self.inputs)))
        targets = [len(self.inputs) + i for i in range(len(self.outputs))]
        spans = tuple(
            self._span(self.attrs[name], [self.inputs[i] for i in captured], captured, targets)[0]
            for name in ("if_true", "if_false")
        )
        return self._finish("cond", spans, (0, 0), {})

    def loop(self) -> Application:
        carried, scanned, counted = (int(self.attrs[name]) for name in ("carried", "scanned", "counted"))
        first = list(range(counted, counted + carried))
        rows = list(range(counted + carried, counted + carried + scanned))
        captured = list(range(counted + carried + scanned, len(self.inputs)))
        held = [Spec(s.dtype, s.shape) for s in self.outputs[:carried]]
        row_specs = [Spec(self.inputs[i].dtype, self.inputs[i].shape[1:]) for i in rows]
        known = [self.inputs[i] for i in captured]
        present, following = [self._slot() for _ in first], [self._slot() for _ in first]
        read, stacks = [self._slot() for _ in rows], [self._slot() for _ in self.outputs[carried + 1 :]]
        body, fixed = self._span(
            self.attrs["body"],
            [*held, *row_specs, *known],
            [*present, *read, *captured],
            [*following, *stacks],
            carried,
        )
        pred = self._arena + 1
        cond: tuple[Inner, ...] = ()
        if self.attrs["cond"] is not None:
            cond, _ = self._span(self.attrs["cond"], [*held, *known], [*present, *captured], [pred])
        out = len(self.inputs)
        facts: dict[str, Any] = {
            "limit": self.attrs["limit"],
            "count": 0 if counted else None,
            "rows": self.inputs[rows[0]].concrete[0] if rows else None,
            "reverse": self.attrs["reverse"],
            "carried": tuple(
                Carried(present[k], following[k], first[k], out + k, pred + 1 + k, held[k].nbytes, k in fixed)
                for k in range(carried)
            ),
            "scanned": tuple(ScannedRows(read[i], rows[i], row_specs[i].nbytes) for i in range(scanned)),
            "stacked": tuple(
                ScannedRows(stacks[i], out + carried + 1 + i, Spec(spec.dtype, spec.shape[1:]).nbytes)
                for i, spec in enumerate(self.outputs[carried + 1 :])
            ),
            "done": out + carried,
            "crew": self._slot(),
            "iteration": self._slot(),
        }
        self.scratch = [Spec("bool", ()), *(Spec(s.dtype, s.shape) for s in held)]
        self.longest = longest_seconds(self.attrs, facts["rows"], self.predicted, self.longest)
        return self._finish("loop", (cond, body), (pred, 0) if cond or self.attrs["cond"] else (-1, 0), facts)

    def _finish(
        self, kind: str, spans: tuple[tuple[Inner, ...], ...], pred: tuple[int, int], facts: Mapping[str, Any]
    ) -> Application:
        operands = tuple(range(self._local))
        scratch = (Spec(BYTE, (self.arena_bytes,)), *self.scratch)
        constants, trace = tuple(self.constants), self._slot()
        own, local = (self._local,), (Spec(BYTE, (self.local_bytes,)),)
        step = NestedStep(kind, operands, len(self.inputs), own, spans, pred, constants, trace=trace, **facts)
        return Application((step,), scratch, local, self.used, self.orders, self.longest, self.wishes)

    # Bodies

    def _span(
        self,
        body: Plan,
        specs: Sequence[Spec],
        sources: Sequence[int],
        targets: Sequence[int],
        carried: int = 0,
    ) -> tuple[tuple[Inner, ...], frozenset[int]]:
        """The launches of a body that reads ``sources`` and writes ``targets``, and which of those that are carried it
        leaves as they are."""
        region = self.bodies.get(id(body)) or self.bodies.setdefault(id(body), whole(body, self.device))
        made = self.record(body, region, specs)
        self.arena_bytes = max(self.arena_bytes, made.arena_bytes)
        self.local_bytes = max(self.local_bytes, made.local_bytes)
        self.predicted += made.predicted_seconds
        self.longest += made.longest_seconds
        self.orders += made.orders
        self.wishes += made.wishes
        fresh = [target for target, output in zip(targets, made.outputs, strict=True) if output.fresh]
        constants = [self._constant(array) for array in made.constants]
        behind = [*sources, *fresh, *constants, *(self._slot() for _ in range(made.slots))]
        operand = {ARENA_SLOT: self._arena, LOCAL_SLOT: self._local} | dict(enumerate(behind, FIRST_SLOT))
        inner = [
            Inner(
                launch.step,
                tuple(Operand(operand[p.slot], p.offset) for p in launch.places),
                launch.sizes,
                body,
                launch.node,
            )
            for launch in made.launches
        ]
        fixed: set[int] = set()
        for number, (target, output) in enumerate(zip(targets, made.outputs, strict=True)):
            if output.input == number < carried:
                fixed.add(number)
            elif output.input is not None:
                inner += self._copy(sources[output.input], target, output.spec)
            elif output.constant is not None:
                inner += self._copy(self._constant(output.constant), target, output.spec)
        return tuple(inner), frozenset(fixed)

    def _constant(self, array: np.ndarray[Any, Any]) -> int:
        slot = self._slot()
        self.constants.append((slot, array))
        return slot

    def _copy(self, source: int, target: int, spec: Spec) -> list[Inner]:
        application = apply_kernel(COPY_OP, [spec], [spec], {}, self.device.partition(":")[0])
        sizes = (spec.nbytes, spec.nbytes)
        return [Inner(step, (Operand(source), Operand(target)), sizes) for step in application.steps]
