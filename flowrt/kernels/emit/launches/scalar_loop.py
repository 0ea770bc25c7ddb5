"""The machine code of loops of scalars: what an iteration touches is in registers, that of loops inside it, too.

Entries computed alike, by the dozen, lie side by side on the stack (`emit.lanes`); tables stay where they are.
The run's status and the word by which others stop it are looked at every `PATIENCE` iterations, whichever loop takes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import typeof, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import numpy_support

from flowrt.kernels.composite.iteration import LaneValues, Lookup
from flowrt.kernels.composite.scalar_loop import COUNT, DONE, LIMIT, NONE, OPERANDS, REVERSE, ROWS
from flowrt.kernels.emit.abi import ONE, WORD, ZERO, pointer, word
from flowrt.kernels.emit.compose import Composition, infer_types
from flowrt.kernels.emit.entries import bind_helpers, object_code, set_word, word_at
from flowrt.kernels.emit.launches.lanes import CarriedState, LanesEmitter, Spot, TypedLanes, typed_lanes
from flowrt.kernels.emit.launches.nested import stopped
from flowrt.kernels.language.expression import Expression
from flowrt.kernels.ops.slices import ABSENT, OUT_OF_RANGE

if TYPE_CHECKING:
    from flowrt.kernels.composite.iteration import InnerLoop, Part, ScalarIteration
    from flowrt.kernels.composite.scalar_loop import ScalarProgram

PATIENCE = 1 << 16


# ── typed ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _TypedIteration:
    kinds: tuple[Any, ...]  # of its inputs
    parts: tuple[Composition | TypedLanes | Lookup | _TypedLoop, ...]
    results: tuple[int, ...]

    @property
    def has_loops(self) -> bool:
        return any(isinstance(part, _TypedLoop) for part in self.parts)


@dataclass(frozen=True, slots=True)
class _TypedLoop:
    cond: _TypedIteration | None
    body: _TypedIteration
    facts: InnerLoop | None = None

    @property
    def has_loops(self) -> bool:
        return self.body.has_loops or (self.cond is not None and self.cond.has_loops)


def _typed(typing_context: Any, iteration: ScalarIteration) -> _TypedIteration:
    """An iteration whose members Numba has typed and lowered."""
    kinds = tuple(numpy_support.from_dtype(dtype) for dtype in iteration.inputs)
    return _TypedIteration(
        kinds, tuple(_typed_part(typing_context, part) for part in iteration.parts), iteration.results
    )


def _typed_part(typing_context: Any, part: Part) -> Composition | TypedLanes | Lookup | _TypedLoop:
    if isinstance(part, Lookup):
        return part
    if isinstance(part, LaneValues):
        return typed_lanes(typing_context, part)
    if isinstance(part, Expression):
        return infer_types(typing_context, part)
    return _typed_loop(typing_context, part.cond, part.body, part)


def _typed_loop(
    typing_context: Any, cond: ScalarIteration | None, body: ScalarIteration, facts: InnerLoop | None = None
) -> _TypedLoop:
    return _TypedLoop(None if cond is None else _typed(typing_context, cond), _typed(typing_context, body), facts)


# ── iterations and loops, in LLVM's terms
# ─────────────────────────────────────────────────────────────────────────────────


class _Emitter:
    """Emits loops and what is in them. ``looks`` emits whether the run is to stop, as a bit, ``fails`` the end of a run
    in which the lookup of a number failed, with what there was to say: `store_trace`.

    Variables are places on the stack, which LLVM makes registers of. ``fuel`` is how many iterations are left until a
    loop looks whether it is to stop: a loop that stops leaves none, so that those around it look, too, and stop.
    """

    def __init__(
        self,
        context: Any,
        builder: Any,
        lanes: LanesEmitter,
        looks: Callable[[], Any],
        fails: Callable[[int, Sequence[Any]], None],
    ) -> None:
        self._context, self._builder, self._lanes, self._looks, self._fails = context, builder, lanes, looks, fails
        self._iterations: list[Any] = []  # where each of the loops around counts its iterations
        self._fuel = cgutils.alloca_once_value(builder, ZERO)

    def loop(
        self,
        loop: _TypedLoop,
        first: Sequence[Any],
        most: Any,
        inputs: Callable[[Sequence[Any], Any], list[Any]],
        keep: Callable[[Sequence[Any], Any], None],
    ) -> tuple[CarriedState, Any]:
        """Where a loop leaves what it carries last, and how many iterations it took: at most ``most``, if not below 0.

        The inputs of an iteration are ``inputs(what is carried, iterations done)``, without the latter those of the
        condition; ``keep(what it answers beyond what it carries, iterations done)`` follows it.
        """
        builder = self._builder
        state = CarriedState(self._context, builder, loop.body.kinds[: len(first)], first, self._lanes)
        done = cgutils.alloca_once_value(builder, ZERO)
        self._iterations.append(done)
        head, begin, iteration, goes_on, over, end = (
            builder.append_basic_block(f"loop.{name}")
            for name in ("head", "begin", "iteration", "goes_on", "over", "end")
        )
        builder.branch(head)
        builder.position_at_end(head)
        self._refuel(begin, end)
        before = builder.load(done)
        until = builder.add(before, ONE if loop.has_loops else builder.load(self._fuel))
        limited = builder.and_(builder.icmp_signed(">=", most, ZERO), builder.icmp_signed("<", most, until))
        until = builder.select(limited, most, until)
        builder.branch(iteration)

        builder.position_at_end(iteration)
        now = builder.load(done)
        builder.cbranch(builder.icmp_signed("<", now, until), goes_on, over)
        builder.position_at_end(goes_on)
        values = state.values()
        if loop.cond is not None:
            test = self._lanes.scalar(self.iteration(loop.cond, inputs(values, None))[0])
            self._go_on_where(test, builder.sub(now, before), end)
        answers = self.iteration(loop.body, inputs(values, now))
        keep([self._lanes.scalar(value) for value in answers[len(first) :]], now)
        state.store(answers[: len(first)])
        builder.store(builder.add(now, ONE), done)
        builder.branch(iteration)

        builder.position_at_end(over)
        self._burn(builder.sub(now, before))
        builder.cbranch(
            builder.and_(builder.icmp_signed(">=", most, ZERO), builder.icmp_signed(">=", now, most)), end, head
        )
        builder.position_at_end(end)
        self._iterations.pop()
        return state, done

    def _go_on_where(self, answer: Any, taken: Any, end: Any) -> None:
        """Go to ``end``, after so many iterations, unless ``answer`` is true."""
        builder = self._builder
        leave, stay = builder.append_basic_block("loop.leave"), builder.append_basic_block("loop.stay")
        builder.cbranch(answer, stay, leave)
        builder.position_at_end(leave)
        self._burn(taken)
        builder.branch(end)
        builder.position_at_end(stay)

    def _burn(self, iterations: Any) -> None:
        self._builder.store(self._builder.sub(self._builder.load(self._fuel), iterations), self._fuel)

    def _refuel(self, begin: Any, end: Any) -> None:
        """Go on at ``begin`` with fuel, or at ``end`` where the run is to stop."""
        builder = self._builder
        look, fill = builder.append_basic_block("loop.look"), builder.append_basic_block("loop.fill")
        builder.cbranch(builder.icmp_signed(">", builder.load(self._fuel), ZERO), begin, look)
        builder.position_at_end(look)
        builder.cbranch(self._looks(), end, fill)
        builder.position_at_end(fill)
        builder.store(ir.Constant(WORD, PATIENCE), self._fuel)
        builder.branch(begin)
        builder.position_at_end(begin)

    def iteration(self, iteration: _TypedIteration, inputs: Sequence[Any]) -> list[Any]:
        """What an iteration answers for ``inputs``."""
        values = list(inputs)
        for part in iteration.parts:
            if isinstance(part, Composition):
                self._load(part, values)
                values += part.emit(self._context, self._builder, values)[len(values) :]
            elif isinstance(part, TypedLanes):
                values += self._lanes.emit(part, values)
            elif isinstance(part, Lookup):
                values += self._look_up(part, values)
            else:
                values += self._inside(part, values)
        return [values[i] for i in iteration.results]

    def _load(self, part: Composition, values: list[Any]) -> None:
        """Load what members take, as far as it is not."""
        for number in {i for member in part.expression.members for i in member.operands if i < len(values)}:
            values[number] = self._lanes.scalar(values[number])

    def _look_up(self, lookup: Lookup, values: Sequence[Any]) -> list[Any]:
        """What a lookup by an iteration of these values finds."""
        builder, kind = self._builder, numpy_support.from_dtype(lookup.dtype)
        table = self._table(lookup, kind, values)
        if lookup.index is None:
            return self._entries(lookup, kind, table, ZERO)
        given, size = (self._lanes.scalar(values[i]) for i in (lookup.index, lookup.size))
        at = builder.select(builder.icmp_signed("<", given, ZERO), builder.add(given, size), given)
        here, missing, behind = (builder.append_basic_block(f"lookup.{n}") for n in ("here", "missing", "behind"))
        builder.cbranch(builder.icmp_unsigned("<", at, size), here, missing).set_weights([999, 1])
        builder.position_at_end(here)
        found = self._entries(lookup, kind, table, builder.mul(at, ir.Constant(WORD, lookup.pitch)))
        here = builder.block
        builder.branch(behind)
        builder.position_at_end(missing)
        self._fail_unless_zero(lookup, given, values, behind)
        builder.position_at_end(behind)
        return [self._or_zero(kind, entry, here, missing) for entry in found]

    def _table(self, lookup: Lookup, kind: Any, values: Sequence[Any]) -> Any:
        """A pointer to where the table begins."""
        if lookup.entries:
            return self._lanes.together(kind, [values[i] for i in lookup.entries])
        return pointer(self._builder, values[lookup.table], self._context.get_data_type(kind))

    def _entries(self, lookup: Lookup, kind: Any, table: Any, first: Any) -> list[Any]:
        builder = self._builder
        places = [builder.gep(table, [builder.add(first, ir.Constant(WORD, n))]) for n in lookup.offsets]
        return [self._context.unpack_value(builder, kind, place) for place in places]

    def _fail_unless_zero(self, lookup: Lookup, given: Any, values: Sequence[Any], behind: Any) -> None:
        """Go on ``behind`` where what is not in the table reads 0, else fail."""
        builder = self._builder
        reads_zero: Any = ir.Constant(ir.IntType(1), 0)
        if lookup.absent:
            reads_zero = builder.icmp_signed("==", given, ir.Constant(WORD, ABSENT))
        if lookup.guard is not None:
            reads_zero = builder.or_(reads_zero, builder.not_(self._lanes.scalar(values[lookup.guard])))
        fail = builder.append_basic_block("lookup.fail")
        builder.cbranch(reads_zero, behind, fail)
        builder.position_at_end(fail)
        size = self._lanes.scalar(values[lookup.size])
        self._fails(lookup.number, [given, size, *(builder.load(done) for done in self._iterations)])

    def _or_zero(self, kind: Any, entry: Any, here: Any, missing: Any) -> Any:
        found = self._builder.phi(entry.type)
        found.add_incoming(entry, here)
        found.add_incoming(self._context.get_constant_null(kind), missing)
        return found

    def _inside(self, loop: _TypedLoop, values: Sequence[Any]) -> list[Any]:
        """What the loop inside an iteration of these values makes. Where all it takes is known ahead, it runs once."""
        facts, builder = loop.facts, self._builder
        assert facts is not None
        captured, behind = [values[i] for i in facts.captured], builder.append_basic_block("inside.behind")
        if all(self._lanes.is_fixed(values[i]) for i in facts.taken):
            self._unless_done(behind)
        state, done = self.loop(
            loop, [values[i] for i in facts.first], self._most(facts, values), lambda state, row: [*state, *captured],
            lambda rest, row: None,
        )  # fmt: skip
        builder.branch(behind)
        builder.position_at_end(behind)
        return [*state.values(), builder.load(done)]

    def _unless_done(self, behind: Any) -> None:
        """Go ``behind`` in all iterations but the first that comes here."""
        builder = self._builder
        is_done = self._lanes.flag_ahead()
        first = builder.append_basic_block("inside.first")
        builder.cbranch(builder.load(is_done), behind, first)
        builder.position_at_end(first)
        builder.store(ir.Constant(ir.IntType(1), 1), is_done)

    def _most(self, facts: InnerLoop, values: Sequence[Any]) -> Any:
        builder = self._builder
        most = ir.Constant(WORD, NONE if facts.limit is None else facts.limit)
        if facts.count is not None:
            count = self._lanes.scalar(values[facts.count])
            count = builder.select(builder.icmp_signed("<", count, ZERO), ZERO, count)
            less = builder.icmp_unsigned("<", count, most)  # no limit is more than any count
            most = builder.select(less, count, most)
        return most if facts.guard is None else builder.select(self._lanes.scalar(values[facts.guard]), most, ZERO)


# ── operands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Operands:
    """Operands at word ``at`` of the block and on: how many scalars each is, or each row of it; the scalars' types."""

    at: int
    widths: tuple[int, ...]
    kinds: tuple[Any, ...]

    @property
    def behind(self) -> int:
        return self.at + 2 * len(self.widths)

    def address(self, builder: Any, bases: Any, block: Any, number: int) -> Any:
        """Where one of the operands lies."""
        slot, offset = (word(builder, block, self.at + 2 * number + i) for i in (0, 1))
        return builder.add(builder.load(builder.gep(pointer(builder, bases, WORD), [slot])), offset)

    def _spots(self, context: Any, builder: Any, bases: Any, block: Any, row: Any) -> list[Spot]:
        """Where the scalars of the entry or row ``row`` lie."""
        found: list[Spot] = []
        for number, width in enumerate(self.widths):
            address = self.address(builder, bases, block, number)
            if width:
                kind = self.kinds[len(found)]
                whole = pointer(builder, address, context.get_data_type(kind))
                start = builder.gep(whole, [builder.mul(row, ir.Constant(WORD, width))])
                found += [Spot(start, i, kind) for i in range(width)]
        return found

    def load(self, context: Any, builder: Any, bases: Any, block: Any, row: Any = ZERO) -> list[Any]:
        return [
            Spot(spot.start, spot.index, spot.kind, context.unpack_value(builder, spot.kind, spot.place(builder)))
            for spot in self._spots(context, builder, bases, block, row)
        ]

    def store(self, context: Any, builder: Any, bases: Any, block: Any, values: Sequence[Any], row: Any = ZERO) -> None:
        for spot, value in zip(self._spots(context, builder, bases, block, row), values, strict=True):
            context.pack_value(builder, spot.kind, value, spot.place(builder))


class _Layout:
    """Where a program's operands lie in the block."""

    def __init__(self, program: ScalarProgram) -> None:
        kinds = [numpy_support.from_dtype(dtype) for dtype in program.body.inputs]
        answers = [numpy_support.from_dtype(dtype) for dtype in program.body.answers]
        carried, scanned, captured = (sum(w) for w in (program.carried, program.scanned, program.captured))
        self.constants = tuple(zip(program.constants, kinds[len(kinds) - len(program.constants) :], strict=True))
        self.first = _Operands(OPERANDS, program.carried, tuple(kinds[:carried]))
        self.out = _Operands(self.first.behind, program.carried, tuple(answers[:carried]))
        self.rows = _Operands(self.out.behind, program.scanned, tuple(kinds[carried : carried + scanned]))
        self.stacks = _Operands(self.rows.behind, program.stacked, tuple(answers[carried:]))
        known = kinds[carried + scanned : carried + scanned + captured]
        self.captured = _Operands(self.stacks.behind, program.captured, tuple(known))
        self._tables = dict(program.tables)
        self._trace, self._depth = self.captured.behind + len(self.constants), program.depth

    def load_constants(self, context: Any, builder: Any, bases: Any, block: Any) -> list[Any]:
        """Tables' addresses, those that are known as they are, the others from their words of the block."""
        found = []
        for number, (value, kind) in enumerate(self.constants):
            if number in self._tables:
                found.append(self.captured.address(builder, bases, block, self._tables[number]))
                continue
            if value is not None:
                found.append(context.get_constant(kind, value))
                continue
            spot = builder.gep(pointer(builder, block, WORD), [ir.Constant(WORD, self.captured.behind + number)])
            found.append(
                context.unpack_value(builder, kind, builder.bitcast(spot, context.get_data_type(kind).as_pointer()))
            )
        return found

    def store_trace(self, builder: Any, bases: Any, block: Any, number: int, told: Sequence[Any]) -> None:
        """Say which lookup failed, the index, how many there are, and in which iterations, in the slots for it."""
        without = [ir.Constant(WORD, NONE)] * (2 + self._depth - len(told))
        for position, value in enumerate([ir.Constant(WORD, number + 1), *told, *without], self._trace):
            slot = word(builder, block, position)
            builder.store(value, builder.gep(pointer(builder, bases, WORD), [slot]))


# ── the entry ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _runs(program: ScalarProgram) -> Any:
    """An intrinsic (bases, block, most) → iterations done, which runs a loop of that program from its operands to
    them."""
    at = _Layout(program)

    @intrinsic
    def run(typing_context: Any, bases: Any, block: Any, most: Any) -> Any:
        loop = _typed_loop(typing_context, program.cond, program.body)
        looking = typeof(stopped)
        looked = typing_context.resolve_function_type(looking, (types.intp,), {})

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            bases, block, most = args
            look = context.get_function(looking, looked)
            context.add_linking_libs(getattr(look, "libs", ()))
            captured = at.captured.load(context, builder, bases, block)
            constants = at.load_constants(context, builder, bases, block)
            rest = [*captured, *constants]
            backwards = builder.icmp_signed("!=", word(builder, block, REVERSE), ZERO)

            def row_of(done: Any) -> Any:
                return builder.select(backwards, builder.sub(builder.sub(most, ONE), done), done)

            def inputs(state: Sequence[Any], done: Any) -> list[Any]:
                rows = [] if done is None else at.rows.load(context, builder, bases, block, row_of(done))
                return [*state, *rows, *rest]

            def keep(answers: Sequence[Any], done: Any) -> None:
                at.stacks.store(context, builder, bases, block, answers, row_of(done))

            end, taken = builder.append_basic_block("run.end"), cgutils.alloca_once_value(builder, ZERO)

            def fails(number: int, told: Sequence[Any]) -> None:
                at.store_trace(builder, bases, block, number, told)
                builder.store(ir.Constant(WORD, OUT_OF_RANGE), pointer(builder, word(builder, bases, 0), WORD))
                builder.branch(end)

            first = at.first.load(context, builder, bases, block)
            ahead, start = (builder.append_basic_block(f"run.{name}") for name in ("ahead", "start"))
            builder.branch(ahead)
            builder.position_at_end(start)
            lanes = LanesEmitter(context, builder, ahead, [*(spot.value for spot in captured), *constants])
            emitter = _Emitter(context, builder, lanes, lambda: look(builder, [bases]), fails)
            state, done = emitter.loop(loop, first, most, inputs, keep)
            at.out.store(context, builder, bases, block, [lanes.scalar(value) for value in state.values()])
            with builder.goto_block(ahead):
                builder.branch(start)
            builder.store(builder.load(done), taken)
            builder.branch(end)
            builder.position_at_end(end)
            return builder.load(taken)

        return types.intp(types.intp, types.intp, types.intp), codegen

    return run


def emit_scalar_loop(program: ScalarProgram, symbol: str) -> bytes:
    """The object code of the entry that runs loops of that program."""
    bind_helpers()
    run = _runs(program)

    def entry(bases: int, block: int, begin: int, end: int) -> None:
        limit, length = word_at(block, LIMIT), word_at(block, ROWS)
        most = limit if length < 0 or 0 <= limit < length else length
        if word_at(block, COUNT) >= 0:
            count = max(word_at(word_at(bases, word_at(block, COUNT)) + word_at(block, COUNT + 1), 0), 0)
            most = count if most < 0 else min(count, most)
        set_word(word_at(bases, word_at(block, DONE)) + word_at(block, DONE + 1), 0, run(bases, block, most))

    return object_code(entry, symbol)
