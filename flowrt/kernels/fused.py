"""Fused programs: one launch where its object exists, else the members' launches one after another.

Law: what is compiled depends on the members, the dtypes and along which operands rows repeat, never on sizes. A program
that is not compiled yet is ordered, not waited for. Members whose shapes differ in a step are computed one by one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from flowrt.errors import SpecError
from flowrt.kernels import background
from flowrt.kernels.background import Order
from flowrt.kernels.expression import express
from flowrt.kernels.launch import COPY_OP, Application, Step, apply_kernel
from flowrt.kernels.store import Variant, is_compiled, symbol_of
from flowrt.kernels.table import Call, Form, Kernel, View, broadcast, host_only, kernel
from flowrt.spec import Spec

WORTH_BYTES = 4096
"""Less scratch than this stays in the nearest cache, and a launch costs 10 ns: a compilation would not pay."""

Members: TypeAlias = "Sequence[tuple[str, tuple[int, ...], str, tuple[tuple[str, Any], ...]]]"


@kernel("fused", form=Form.PROGRAM)
def apply_fused(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str) -> Application:
    """The application of the program ``attrs["members"]``, which answers the values ``attrs["results"]``."""
    members, results = attrs["members"], attrs["results"]
    specs = _specs(inputs, members)
    step = _one_step(inputs, specs, members, results, device)
    if step is not None and is_compiled(step.variant()):
        return Application((step,), ())
    apart = _one_by_one(inputs, specs, members, results, device)
    if step is None or sum(spec.nbytes for spec in apart.scratch) < WORTH_BYTES:
        return apart
    return replace(apart, orders=_orders(step, members, results))


def _specs(inputs: Sequence[Spec], members: Members) -> list[Spec]:
    """The specs of all values of a program."""
    specs = list(inputs)
    for _, operands, dtype, _ in members:
        shape = np.broadcast_shapes(*(specs[n].concrete for n in operands))
        specs.append(Spec(dtype, shape))
    return specs


# ── one launch ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _one_step(
    inputs: Sequence[Spec], specs: Sequence[Spec], members: Members, results: Sequence[int], device: str
) -> Step | None:
    """The program as one step; None where its members' shapes differ."""
    shape = specs[-1].concrete
    if any(spec.concrete != shape for spec in specs[len(inputs) :]):
        return None
    plain = tuple((op, operands, dtype) for op, operands, dtype, _ in members)
    made = fused_kernel(tuple(spec.dtype.name for spec in inputs), plain, tuple(results), device)
    views = [View.dense(spec.concrete).broadcast_to(shape) for spec in inputs]
    views += [View.dense(shape)] * len(results)
    dtypes = (*(spec.dtype for spec in inputs), *(specs[n].dtype for n in results))
    return Step(made, tuple(range(len(views))), dtypes, Call(tuple(views)), len(inputs))


@lru_cache(1024)
def fused_kernel(
    inputs: tuple[str, ...],
    members: tuple[tuple[str, tuple[int, ...], str], ...],
    results: tuple[int, ...],
    device: str = "cpu",
) -> Kernel:
    """The kernel of a program on inputs of these dtypes; members are (op, operands, dtype of the result)."""
    expression = express(inputs, members, results, device)
    return Kernel("fused", device, expression.function(), broadcast, Form.SCALARS, expression=expression)


# ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _orders(step: Step, members: Members, results: Sequence[int]) -> tuple[Order, ...]:
    variant = step.variant()
    symbol = symbol_of(variant)
    if background.was_tried(symbol):
        return ()
    plain = [(op, operands, dtype) for op, operands, dtype, _ in members]
    inputs = [dtype.name for dtype in step.dtypes[: step.reads]]
    return (Order(symbol, json.dumps([inputs, plain, list(results), list(variant.ranks)])),)


def ordered_variant(request: str) -> Variant:
    """The variant that an order asks for."""
    inputs, members, results, pattern = json.loads(request)
    plain = tuple((op, tuple(operands), dtype) for op, operands, dtype in members)
    made = fused_kernel(tuple(inputs), plain, tuple(results))
    assert made.expression is not None
    dtypes = made.expression.dtypes
    return Variant(made, (*dtypes[: len(inputs)], *(dtypes[n] for n in results)), tuple(pattern))


# ── one launch after another ─────────────────────────────────────────────────────────────────────────────────────────


def _one_by_one(
    inputs: Sequence[Spec], specs: Sequence[Spec], members: Members, results: Sequence[int], device: str
) -> Application:
    places = _Places(len(inputs), specs, members, results)
    steps: list[Any] = []
    for number, (op, operands, _, attrs) in enumerate(members, len(inputs)):
        taken = [specs[n] for n in operands]
        part = apply_kernel(op, taken, [specs[number]], dict(attrs), device)
        if part.scratch or part.local:
            raise SpecError(f"{op} needs memory of its own, so it can be no member of a program")
        at = [*(places.of[n] for n in operands), places.begin(number)]
        steps += [replace(step, operands=tuple(at[n] for n in step.operands)) for step in part.steps]
        places.end(number)
    for value, target in places.copies:
        part = apply_kernel(COPY_OP, [specs[value]], [specs[value]], {}, device)
        steps += [replace(step, operands=(places.of[value], target)) for step in part.steps]
    return Application(tuple(steps), tuple(places.scratch))


class _Places:
    """The operand that holds each value: inputs, results, then scratch, which is taken again when its value is dead."""

    def __init__(self, inputs: int, specs: Sequence[Spec], members: Members, results: Sequence[int]) -> None:
        self._specs, self._first = specs, inputs + len(results)
        self._last: dict[int, int] = {n: at for at, (_, used, *_) in enumerate(members, inputs) for n in used}
        self.of = {n: n for n in range(inputs)}
        self.copies: list[tuple[int, int]] = []  # what is answered twice, or as it came in
        self._results: dict[int, int] = {}
        for target, value in enumerate(results, inputs):
            if value < inputs or value in self._results:
                self.copies.append((value, target))
            else:
                self._results[value] = target
        self.scratch: list[Spec] = []
        self._free: dict[Spec, list[int]] = {}

    def begin(self, value: int) -> int:
        """Where a value is to be computed."""
        spec = self._specs[value]
        if value in self._results:
            self.of[value] = self._results[value]
        elif self._free.get(spec):
            self.of[value] = self._free[spec].pop()
        else:
            self.of[value] = self._first + len(self.scratch)
            self.scratch.append(spec)
        return self.of[value]

    def end(self, number: int) -> None:
        """Give back the scratch of what member ``number`` was the last to take."""
        for value, last in self._last.items():
            if last == number and self.of[value] >= self._first:
                self._free.setdefault(self._specs[value], []).append(self.of[value])


host_only("fused")
