"""Which loops are of scalars or small tensors alone, and the one launch that each comes to.

Law: pure. A loop is one where its bodies can be unrolled (`unrolled`) on what it carries, a row of what it scans, and
what it captures. Captured tables may be as large as they like where they are only looked up in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrt.base.errors import GraphError
from flowrt.base.spec import Spec
from flowrt.kernels.composite.scalar_loop import ScalarLoopStep, ScalarProgram
from flowrt.kernels.launch import Application
from flowrt.sched.loops.lookups import indexed_inputs, is_table
from flowrt.sched.loops.making import SharedValues, TableAddress, Unfit
from flowrt.sched.loops.structured import longest_seconds
from flowrt.sched.loops.unrolled import SECONDS_PER_MEMBER, unroll_loop


def in_one_kernel(inputs: Sequence[Spec], attrs: Mapping[str, Any]) -> float | str:
    """The seconds of an iteration of a loop on such inputs, if it is one kernel; else what keeps it from being one."""
    try:
        return _program(inputs, attrs)[2]
    except Unfit as reason:
        return str(reason)
    except (GraphError, ValueError) as error:
        return f"a body that does not fit: {error}"


def apply_scalar_loop(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Application | None:
    """The launch that computes a loop of scalars, or None where it is of anything else."""
    carried, scanned, counted = (int(attrs[name]) for name in ("carried", "scanned", "counted"))
    rows = inputs[counted + carried : counted + carried + scanned]
    try:
        program, shared, seconds, longest = _program(inputs, attrs)
    except (Unfit, GraphError, ValueError):  # the last where shapes do not fit, which recording the body will tell
        return None
    first, count = len(inputs), len(inputs) + len(outputs)
    iterations = rows[0].concrete[0] if rows else None
    slots = 3 + program.depth if program.depth else 0
    step = ScalarLoopStep(
        program,
        tuple(range(count)),
        len(inputs),
        first=tuple(range(counted, counted + carried)),
        out=tuple(range(first, first + carried)),
        scanned=tuple(range(counted + carried, counted + carried + scanned)),
        stacked=tuple(range(first + carried + 1, count)),
        captured=tuple(range(counted + carried + scanned, len(inputs))),
        constants=tuple(map(np.asarray, shared.constants)),
        done=first + carried,
        limit=attrs["limit"],
        count=0 if counted else None,
        rows=iterations,
        reverse=attrs["reverse"],
        trace=tuple(range(count, count + slots)),
        looks=tuple(shared.looks),
        held=tuple(shared.held),
    )
    return Application((step,), (), slots=slots, longest_seconds=longest_seconds(attrs, iterations, seconds, longest))


def _program(inputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[ScalarProgram, SharedValues, float, float]:
    """The program of a loop on such inputs, what iterations share, an iteration's seconds, and what loops inside may
    come to beside.

    Raises `Unfit` where there is none.
    """
    carried, scanned, counted = (int(attrs[name]) for name in ("carried", "scanned", "counted"))
    behind = carried + scanned
    shapes = [s.concrete for s in inputs[counted:]]
    shapes[carried:behind] = [shape[1:] for shape in shapes[carried:behind]]
    shared, indexed = SharedValues(), indexed_inputs(attrs)
    known: list[Spec | TableAddress] = [Spec(s.dtype, shape) for s, shape in zip(inputs[counted:], shapes, strict=True)]
    for number, spec in enumerate(inputs[counted + behind :], behind):
        if is_table(spec.size, number in indexed):
            known[number] = shared.captured_table(number - behind, spec.concrete, spec.dtype)
    loop = unroll_loop(attrs, known, shared)
    if not loop.answers:
        raise Unfit("a loop that makes nothing")
    widths = tuple(0 if isinstance(spec, TableAddress) else spec.size for spec in known)
    program = ScalarProgram(
        *loop.iterations(),
        widths[:carried],
        widths[carried:behind],
        tuple(answer.size for answer in loop.answers[carried:]),
        widths[behind:],
        shared.known(),
        tuple(shared.captured.items()),
    )
    return program, shared, loop.members * SECONDS_PER_MEMBER, loop.longest
