"""An op on plain arrays as one C call of Python's: arrays checked, results made and kernels run with no Python between.

What `as_call` answers is called as the op is. Some of its arguments have to be plain arrays of just one dtype and shape
each, the others it takes no notice of. Where the arrays are other ones, or a kernel fails, it answers NotImplemented,
and nothing was done: whoever calls it knows another way, and can say what is wrong. It writes to its own stack and to
what it answers alone, so any number of threads may call it at once.

It relies on what `direct` does, and may be made only where that is `available`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.spec import Spec
from flowrt.base.valueclass import valueclass
from flowrt.kernels.launch import RUN_WORDS
from flowrt.kernels.run.direct import (
    ARGUMENTS,
    FALLBACK,
    FASTCALL,
    LAUNCHES,
    LETS_OTHERS,
    MOST_OUTPUTS,
    OUTPUTS,
    RECORDS,
    Method,
    c_function,
    head_words,
    native_dtype,
)
from flowrt.kernels.store.parts import AT_ONCE_PART

if TYPE_CHECKING:
    from flowrt.kernels.launch import Prepared

Array: TypeAlias = np.ndarray[Any, Any]

MOST_SLOTS = 1024  # operands, whose addresses lie on the stack

# The words of its head are as of a `Direct`'s, but for NOT_DONE. So are those of its plan, behind them, where they are
# of one name; then it says how many arguments are given by position and by name, how many of the outputs are the
# answer (the others are scratch), and where steps (entry, block, units) and the operands that are always the same
# (slot, address) are listed. A record's cell is its slot of the bases, an argument's maker is the argument's number.
NOT_DONE = FALLBACK
BY_POSITION, BY_NAME, ANSWERS, STEPS, FIXED, FIXED_AT = range(2, 8)


@valueclass
class Taken:
    """How a call is given: so many arguments by position and by name.

    Input i is argument ``arguments[i]``, else the array ``fixed[i]``. Kernels that read the run's words find them in
    the argument ``words``.
    """

    by_position: int
    by_name: int
    arguments: Mapping[int, int]
    fixed: Mapping[int, Array]
    words: int | None = None


def as_call(
    prepared: Prepared, inputs: Sequence[Spec], outputs: Sequence[Spec], taken: Taken, lets_others: bool
) -> Callable[..., Any] | None:
    """What runs ``prepared``, made for ``inputs`` and ``outputs``; None where it is too much for one call.

    The answer is the one output, or a tuple of them. ``lets_others``: whether the GIL is let go meanwhile.
    """
    made = (*outputs, *prepared.scratch)
    if prepared.loops or not outputs or len(made) > MOST_OUTPUTS or 1 + len(inputs) + len(made) > MOST_SLOTS:
        return None
    steps = np.array(prepared.steps, np.int64)
    fixed = np.array([(1 + number, array.ctypes.data) for number, array in taken.fixed.items()], np.int64)
    records = [(inputs[number], 1 + number, at) for number, at in taken.arguments.items()]
    if taken.words is not None:
        records.append((Spec("int64", (RUN_WORDS,)), 0, taken.words))
    plan = [0] * RECORDS
    plan[ARGUMENTS], plan[OUTPUTS], plan[ANSWERS] = len(records), len(made), len(outputs)
    plan[BY_POSITION], plan[BY_NAME], plan[LETS_OTHERS] = taken.by_position, taken.by_name, int(lets_others)
    plan[LAUNCHES], plan[STEPS], plan[FIXED], plan[FIXED_AT] = (
        len(steps),
        steps.ctypes.data,
        len(fixed),
        fixed.ctypes.data,
    )
    records += [(spec, 1 + len(inputs) + number, 0) for number, spec in enumerate(made)]
    dtypes = []
    for spec, slot, number in records:
        dtypes.append(native_dtype(spec))
        plan += [id(dtypes[-1]), len(spec.concrete), slot, number, *spec.concrete]
    head = np.array([*head_words(tuple), *plan], np.int64)
    head[NOT_DONE] = id(NotImplemented)
    return c_function(_method(), head, (prepared, steps, fixed, tuple(taken.fixed.values()), dtypes))


@cache
def _method() -> Method:
    return Method(b"at_once", AT_ONCE_PART.address(), FASTCALL, b"An op on arrays of some dtypes and shapes.")
