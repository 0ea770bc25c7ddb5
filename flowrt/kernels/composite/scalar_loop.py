"""A loop of scalars as one kernel: its condition and body are iterations, what it carries stays in registers
or, where many entries are computed alike, on the stack.

Law: what is compiled depends on the program, never on how long a loop runs. A program that is not compiled yet is
ordered, not waited for, where the loop can be run by kernels that are. The block: the most iterations (`limit`,
the slot and offset of a count, the rows of what is scanned), whether backwards, where the number of iterations goes;
then slot and offset of each operand: where each carried value begins and ends, what is scanned, stacked, captured; then
the constants, a word each, and the private slots that say where a lookup failed (`ScalarLoopStep.trace`). An operand,
or a row of it, is one or several scalars, side by side; a table that is only looked up in stays where it is, and is
none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import GraphError
from flowrt.base.valueclass import valueclass
from flowrt.kernels.composite.iteration import ScalarIteration, plain_iteration, read_iteration
from flowrt.kernels.launch import Composite
from flowrt.kernels.store import background
from flowrt.kernels.store.background import CompileOrder
from flowrt.kernels.store.fingerprint import fingerprint
from flowrt.kernels.store.folder import cache_folder
from flowrt.kernels.store.names import symbol_by_name
from flowrt.kernels.store.objects import address_of, is_there
from flowrt.kernels.store.parts import LOOP_MAKERS, made_by, surroundings
from flowrt.kernels.store.sources import sources

if TYPE_CHECKING:
    from flowrt.base.plan import PlanNode
    from flowrt.base.spec import Spec
    from flowrt.kernels.language.variants import Variant
    from flowrt.kernels.launch import Application, Operand

LOOP = "loop "
"""What an order of a scalar loop begins with, before the program's text."""

_EMITTER = "flowrt.kernels.emit.launches.scalar_loop"
SCALAR_LOOP_MAKERS = (
    "flowrt.kernels.composite.iteration",
    "flowrt.kernels.composite.scalar_loop",
    _EMITTER,
    "flowrt.kernels.emit.launches.nested",
    *LOOP_MAKERS,
    "flowrt.kernels.emit.launches.lanes",
    "flowrt.kernels.composite.epilogue",
    "flowrt.kernels.composite.many",
    "flowrt.kernels.ops.slices",
)

NONE = -1
LIMIT, COUNT, ROWS, REVERSE, DONE, OPERANDS = 0, 1, 3, 4, 5, 7


@valueclass
class ScalarProgram:
    """What a scalar loop compiles to. Its iterations take the scalars carried, scanned (the body), captured, and
    constants.

    ``body`` answers what is carried on, then what is stacked. The tuples say how many scalars each operand is. Of
    ``constants`` those that are no numbers with a point are known here, since much follows from a divisor; the others
    are None, and in the block. Of ``tables`` each says which constant is the address of which captured operand.
    """

    cond: ScalarIteration | None
    body: ScalarIteration
    carried: tuple[int, ...]
    scanned: tuple[int, ...]
    stacked: tuple[int, ...]
    captured: tuple[int, ...]
    constants: tuple[int | None, ...] = ()
    tables: tuple[tuple[int, int], ...] = ()

    @property
    def depth(self) -> int:
        """How many loops around a lookup there are at most."""
        return max(self.body.depth, 0 if self.cond is None else self.cond.depth)

    @property
    def is_of_single_scalars(self) -> bool:
        """Whether every operand, or row of one, is one scalar, tables apart."""
        return {0, 1}.issuperset((*self.carried, *self.scanned, *self.stacked, *self.captured))

    def text(self) -> str:
        """The program as one line, by the names of its ops; see `read_program`."""
        counts = (self.carried, self.scanned, self.stacked, self.captured, self.constants, self.tables)
        return json.dumps([plain_iteration(self.cond), plain_iteration(self.body), *counts])


def read_program(text: str) -> ScalarProgram:
    """The program of that text. Raises `GraphError` where an op is none of scalars."""
    cond, body, *counts, tables = json.loads(text)
    inside = read_iteration(body)
    if inside is None:
        raise GraphError("a loop of scalars has no body")
    facts: tuple[Any, ...] = (*map(tuple, counts), tuple(map(tuple, tables)))
    return ScalarProgram(read_iteration(cond), inside, *facts)


@lru_cache(1024)
def scalar_loop_symbol(program: ScalarProgram) -> str:
    """The name of the entry that runs loops of scalars of that program."""
    return symbol_by_name(cache_folder(), program.text()) or found_loop_symbol(program)


def found_loop_symbol(program: ScalarProgram) -> str:
    """The same, from all that decides the entry's content."""
    code = surroundings() + sources(SCALAR_LOOP_MAKERS) + fingerprint(program).encode()
    return f"flowrt_scalar_loop_{hashlib.blake2b(code, digest_size=16).hexdigest()}"


def scalar_loop_address(program: ScalarProgram) -> int:
    """The address of that entry, compiled first if need be."""
    symbol = scalar_loop_symbol(program)

    return address_of(symbol, lambda: made_by(_EMITTER, "emit_scalar_loop", program, symbol))


@valueclass
class LookedUp:
    """What a lookup is for: the index of which node, where among its ``indices``, along which axis of the table."""

    node: PlanNode
    at: tuple[int, ...]
    indices: Spec
    axis: int


@dataclass(frozen=True)
class ScalarLoopStep(Composite):
    """What a `Step` is to an op, for a loop of scalars; places are operand numbers."""

    program: ScalarProgram
    operands: tuple[int, ...]
    reads: int
    first: tuple[int, ...]
    out: tuple[int, ...]
    scanned: tuple[int, ...]
    stacked: tuple[int, ...]
    captured: tuple[int, ...]
    constants: tuple[np.ndarray[Any, Any], ...]
    done: int
    limit: int | None
    count: int | None
    rows: int | None
    reverse: bool
    trace: tuple[int, ...] = ()
    """Private slots: of the lookup that failed, counted from 1, of its index, of how many there are that it chooses
    from, and of the iterations of the loops around it, -1 where there are no more."""
    looks: tuple[LookedUp, ...] = ()
    """What each lookup is for, by its number."""
    held: tuple[np.ndarray[Any, Any], ...] = ()
    """Tables whose addresses are constants."""

    units = 1
    may_fail = True

    def variants(self) -> Iterator[Variant]:
        return iter(())

    def is_compiled(self) -> bool:
        return is_there(scalar_loop_symbol(self.program))

    def address(self) -> int:
        """The compiled entry; compiles it if need be."""
        return scalar_loop_address(self.program)

    def block(self, places: Sequence[Operand]) -> np.ndarray[Any, Any]:
        """The block for operands at ``places``."""
        words = [NONE if self.limit is None else self.limit, NONE, 0]
        if self.count is not None:
            words[COUNT:] = [places[self.count].slot, places[self.count].offset]
        words += [NONE if self.rows is None else self.rows, int(self.reverse)]
        for number in (self.done, *self.first, *self.out, *self.scanned, *self.stacked, *self.captured):
            words += [places[number].slot, places[number].offset]
        constants = np.zeros(len(self.constants), np.int64)
        for number, value in enumerate(self.constants):
            constants[number : number + 1].view(np.uint8)[: value.nbytes] = np.atleast_1d(value).view(np.uint8)
        trace = [places[number].slot for number in self.trace]
        return np.concatenate([np.array(words, np.int64), constants, np.array(trace, np.int64)])


def sooner(scalar: Application, nested: Callable[[], Application]) -> Application:
    """The loop as one kernel, or ``nested`` for as long as a helper compiles that.

    Where the other way of a loop of single scalars has kernels to compile, too, nothing is won by it.
    """
    (step,) = scalar.steps
    assert isinstance(step, ScalarLoopStep)
    symbol = scalar_loop_symbol(step.program)
    if is_there(symbol) or background.was_tried(symbol) or background.is_waited_for():
        return scalar
    other = nested()
    if step.program.is_of_single_scalars and not all(step.is_compiled() for step in other.steps):
        return scalar
    return replace(other, orders=(CompileOrder(symbol, LOOP + step.program.text()),), wishes=())
