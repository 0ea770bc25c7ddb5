"""Several ops on operands of fixed specs as one: their launches after one another, what is between them in scratch.

Law: pure. Nothing is fused, so all is to the bit what the ops by themselves compute; memory whose value is not needed
any more serves later ones of as many bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowrt.base.traits import is_alias
from flowrt.base.valueclass import valueclass
from flowrt.kernels.launch import Application, Composite, Operand, apply_kernel

if TYPE_CHECKING:
    import numpy as np

    from flowrt.base.spec import Spec
    from flowrt.kernels.language.variants import Variant
    from flowrt.kernels.launch import Launchable


@valueclass
class JoinedOp:
    """An op on values, which have numbers."""

    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attrs: Mapping[str, Any]


@valueclass
class _Renumbered(Composite):
    """A step among those of other ops: operand ``numbers[n]`` of them all is what it calls ``n``."""

    step: Launchable
    numbers: tuple[int, ...]

    @property
    def operands(self) -> tuple[int, ...]:
        return tuple(self.numbers[n] for n in self.step.operands)

    @property
    def reads(self) -> int:
        return self.step.reads

    @property
    def units(self) -> int:
        return self.step.units

    def variants(self) -> Iterator[Variant]:
        return self.step.variants()

    def is_compiled(self) -> bool:
        return self.step.is_compiled()

    def address(self) -> int:
        return self.step.address()

    def block(self, places: Sequence[Operand]) -> np.ndarray[Any, Any]:
        return self.step.block([places[number] for number in self.numbers])


def join(
    ops: Sequence[JoinedOp], specs: Mapping[int, Spec], given: Sequence[int], answers: Sequence[int]
) -> Application | None:
    """The steps of ``ops`` on the values ``given``, then ``answers``; None where one of them has loops inside."""
    memory = _Memory(ops, given, answers)
    steps: list[Launchable] = []
    for number, applied in enumerate(ops):
        if is_alias(applied.op):
            memory.alias(applied)
            continue
        inputs, outputs = ([specs[value] for value in values] for values in (applied.inputs, applied.outputs))
        application = apply_kernel(applied.op, inputs, outputs, applied.attrs)
        if application.slots:
            return None
        own = [memory.take(spec) for spec in (*application.scratch, *application.local)]
        made = [memory.of(value, specs[value]) for value in (*applied.inputs, *applied.outputs)]
        steps += [_Renumbered(step, (*made, *own)) for step in application.steps]
        for operand in own:
            memory.give_back(operand)
        memory.pass_by(number)
    return Application(tuple(steps), tuple(memory.scratch))


class _Memory:
    """Which operand each value is; those that are neither given nor answers are scratch."""

    def __init__(self, ops: Sequence[JoinedOp], given: Sequence[int], answers: Sequence[int]) -> None:
        self.scratch: list[Spec] = []
        self._first = len(given) + len(answers)
        self._operands = {value: operand for operand, value in enumerate((*given, *answers))}
        self._idle: dict[int, list[int]] = {}  # operands, by their bytes
        self._dying = _last_uses(ops, answers)

    def alias(self, applied: JoinedOp) -> None:
        """Its output, which is no answer, is its first input under another shape."""
        self._operands[applied.outputs[0]] = self._operands[applied.inputs[0]]

    def of(self, value: int, spec: Spec) -> int:
        """The operand that holds ``value``, now if not before."""
        if value not in self._operands:
            self._operands[value] = self.take(spec)
        return self._operands[value]

    def take(self, spec: Spec) -> int:
        """An operand for what is like ``spec``."""
        idle = self._idle.get(spec.nbytes)
        if idle:
            return idle.pop()
        self.scratch.append(spec)
        return self._first + len(self.scratch) - 1

    def give_back(self, operand: int) -> None:
        """Nobody needs what is in ``operand`` any more."""
        if operand >= self._first:
            self._idle.setdefault(self.scratch[operand - self._first].nbytes, []).append(operand)

    def pass_by(self, number: int) -> None:
        """The op with that number is done."""
        for value in self._dying.get(number, ()):
            self.give_back(self._operands[value])


def _last_uses(ops: Sequence[JoinedOp], answers: Collection[int]) -> dict[int, list[int]]:
    """By the number of an op, the values that no later one needs, each under the name it was first given."""
    roots: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, applied in enumerate(ops):
        for value in (*applied.inputs, *applied.outputs):
            last[roots.setdefault(value, value)] = number
        if is_alias(applied.op):
            roots[applied.outputs[0]] = roots[applied.inputs[0]]
    dying: dict[int, list[int]] = {}
    for value, number in last.items():
        if roots[value] == value and value not in answers:
            dying.setdefault(number, []).append(value)
    return dying
