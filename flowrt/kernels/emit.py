"""From a kernel's Python function to machine code: the only file that imports Numba, and only when it must compile.

Every entry has the one ABI ``void(bases, block, begin, end)``. ``bases`` is the run's table of addresses; its slot 0
holds the run's words. ``block`` is int64 words: for each operand its slot in ``bases`` and its byte offset, then what
the form needs (dims; for SCALARS the odometer and strides), then the attribute words. ``begin`` and ``end`` are the
range of the application's units to compute.

An object calls nothing of Python's or Numba's, so that it runs without the interpreter and loads without Numba. Where
a kernel raises, its entry sets the run's status instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import cfunc, njit, typeof, types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np import numpy_support
from numba.np.arrayobj import make_array, populate_array

from flowrt.errors import GraphError
from flowrt.kernels.blas import GEMM, resolve
from flowrt.kernels.compose import OPTIONS
from flowrt.kernels.table import JITABLES, Form, Kernel

ENTRY = types.void(types.intp, types.intp, types.intp, types.intp)
RUN_WORDS = 4
NODE_WORDS = 3  # of a node in a tape's table: entry, block, units
RAISED = 4  # of launch.FAILURES
_WORD = ir.IntType(64)
_bound: set[Any] = set()


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _word(builder: Any, block: Any, position: int) -> Any:
    base = _pointer(builder, block, _WORD)
    return builder.load(builder.gep(base, [ir.Constant(_WORD, position)]))


def _operand_address(builder: Any, bases: Any, block: Any, operand: int) -> Any:
    slot, offset = _word(builder, block, 2 * operand), _word(builder, block, 2 * operand + 1)
    base = builder.load(builder.gep(_pointer(builder, bases, _WORD), [slot]))
    return builder.add(base, offset)


def _array(context: Any, builder: Any, kind: Any, address: Any, dims: Sequence[Any]) -> Any:
    """A C-contiguous Numba array over memory that someone else owns."""
    size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    strides: list[Any] = []
    step = ir.Constant(_WORD, size)
    for dim in reversed(dims):
        strides.insert(0, step)
        step = builder.mul(step, dim)
    array = make_array(kind)(context, builder)
    data = builder.inttoptr(address, context.get_data_type(kind.dtype).as_pointer())
    populate_array(array, data=data, shape=list(dims), strides=strides, itemsize=ir.Constant(_WORD, size), meminfo=None)
    return array._getvalue()


def _arguments(dtypes: Sequence[Any], ranks: Sequence[int], words: str, ranged: bool, run: bool) -> Any:
    """An intrinsic (bases, block, begin, end) → the tuple of arrays, words and perhaps the range and run's words."""
    arrays = [types.Array(numpy_support.from_dtype(d), r, "C") for d, r in zip(dtypes, ranks, strict=True)]
    scalars = [types.float64 if w == "f" else types.int64 for w in words]
    tail = [types.Array(types.int64, 1, "C")] if run else []
    answer = types.Tuple([*arrays, *scalars, *[types.intp] * (2 if ranged else 0), *tail])

    @intrinsic
    def arguments(typing_context: Any, bases: Any, block: Any, begin: Any, end: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            bases, block, *limits = args
            position, items = 2 * len(arrays), []
            for i, kind in enumerate(arrays):
                dims = [_word(builder, block, position + d) for d in range(kind.ndim)]
                position += kind.ndim
                items.append(_array(context, builder, kind, _operand_address(builder, bases, block, i), dims))
            for i, kind in enumerate(scalars):
                value = _word(builder, block, position + i)
                items.append(builder.bitcast(value, ir.DoubleType()) if kind is types.float64 else value)
            items += limits if ranged else ()
            for kind in tail:
                address = builder.load(_pointer(builder, bases, _WORD))
                items.append(_array(context, builder, kind, address, [ir.Constant(_WORD, RUN_WORDS)]))
            return context.make_tuple(builder, answer, items)

        return answer(*ENTRY.args), codegen

    return arguments


def _scalars(function: Callable[..., Any], dtypes: Sequence[Any]) -> Any:
    """An intrinsic (bases, block, begin, end) that applies a scalar function along any strides.

    The range is one of elements, in the order of the odometer; it may begin and end within a row. After the operands
    the block holds: inner length, number of outer dims, product of the outer dims, each operand's inner stride, then
    per outer dim (last first) its size and a stride for each operand. Strides are in elements.
    """
    kinds = [numpy_support.from_dtype(np.dtype(d)) for d in dtypes]
    scalar = njit(function, **OPTIONS)
    count = len(kinds)

    @intrinsic
    def scalars(typing_context: Any, bases: Any, block: Any, begin: Any, end: Any) -> Any:
        dispatcher = typeof(scalar)
        inferred = typing_context.resolve_function_type(dispatcher, tuple(kinds[:-1]), {})

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            bases, block, begin, end = args
            element = [context.get_data_type(kind) for kind in kinds]
            apply = context.get_function(dispatcher, inferred)
            context.add_linking_libs(getattr(apply, "libs", ()))
            head = 2 * count
            inner, outer_dims = (_word(builder, block, head + i) for i in range(2))
            strides = [_word(builder, block, head + 3 + i) for i in range(count)]
            starts = [_pointer(builder, _operand_address(builder, bases, block, i), element[i]) for i in range(count)]
            table = builder.gep(_pointer(builder, block, _WORD), [ir.Constant(_WORD, head + 3 + count)])
            one, zero = ir.Constant(_WORD, 1), ir.Constant(_WORD, 0)

            def element_at(places: Sequence[Any], fixed: Sequence[Any]) -> None:
                values = [fixed[i] or context.unpack_value(builder, kinds[i], places[i]) for i in range(count - 1)]
                result = context.cast(builder, apply(builder, values), inferred.return_type, kinds[-1])
                context.pack_value(builder, kinds[-1], result, places[-1])

            def row(at: Sequence[Any], count_here: Any, steps: Sequence[Any]) -> None:
                # a step of zero is known here, so that LLVM keeps the value in a register
                fixed = [
                    context.unpack_value(builder, kinds[i], at[i]) if steps[i] is zero else None
                    for i in range(count - 1)
                ]
                with cgutils.for_range(builder, count_here) as loop:
                    places = [builder.gep(p, [builder.mul(loop.index, s)]) for p, s in zip(at, steps, strict=True)]
                    element_at(places, fixed)

            def rows(at: Sequence[Any], count_here: Any, cases: Sequence[Sequence[Any]]) -> None:
                if not cases:
                    row(at, count_here, strides)
                    return
                fits = cgutils.true_bit
                for stride, step in zip(strides, cases[0], strict=True):
                    fits = builder.and_(fits, builder.icmp_signed("==", stride, step))
                with builder.if_else(fits) as (then, otherwise):
                    with then:
                        row(at, count_here, cases[0])
                    with otherwise:
                        rows(at, count_here, cases[1:])

            cases = [[one] * count]
            if count > 2:
                cases += [[zero if i == j else one for i in range(count)] for j in range(count - 1)]
            first_alone = builder.and_(builder.icmp_signed("==", begin, zero), builder.icmp_signed("==", end, one))
            with builder.if_else(first_alone) as (then, otherwise):
                with then:  # a scalar; the first element lies where the operands begin, whatever their strides
                    element_at(starts, [None] * (count - 1))
                with otherwise, _rows_between(builder, begin, end, inner) as (number, first, count_here):
                    at = _outer_position(builder, table, outer_dims, number, starts)
                    at = [builder.gep(p, [builder.mul(first, stride)]) for p, stride in zip(at, strides, strict=True)]
                    rows(at, count_here, cases)
            return context.get_dummy_value()

        return ENTRY, codegen

    return scalars


@contextmanager
def _rows_between(builder: Any, begin: Any, end: Any, inner: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Emit the body as a loop over the rows of ``inner`` elements that the elements [begin, end) lie in.

    Yields the row's number, the first of its elements to visit, and how many. Only a range that begins after the first
    row costs a division.
    """
    place = cgutils.alloca_once_value(builder, begin)  # the next element
    number = cgutils.alloca_once(builder, _WORD)
    first = cgutils.alloca_once(builder, _WORD)
    zero, one = ir.Constant(_WORD, 0), ir.Constant(_WORD, 1)
    builder.store(begin, place)
    builder.store(zero, number)
    builder.store(begin, first)
    some = builder.icmp_signed("<", begin, end)  # where there is nothing, ``inner`` may be 0
    with builder.if_then(builder.and_(some, builder.icmp_signed(">=", begin, inner))):
        builder.store(builder.udiv(begin, inner), number)
        builder.store(builder.urem(begin, inner), first)
    check, body, done = (builder.append_basic_block(f"rows.{name}") for name in ("check", "body", "done"))
    builder.branch(check)
    builder.position_at_end(check)
    builder.cbranch(builder.icmp_signed("<", builder.load(place), end), body, done)
    builder.position_at_end(body)
    start, left = builder.load(first), builder.sub(end, builder.load(place))
    whole = builder.sub(inner, start)
    count = builder.select(builder.icmp_signed("<", left, whole), left, whole)
    yield builder.load(number), start, count
    builder.store(builder.add(builder.load(number), one), number)
    builder.store(builder.add(builder.load(place), count), place)
    builder.store(zero, first)
    builder.branch(check)
    builder.position_at_end(done)


def _outer_position(builder: Any, table: Any, dims: Any, index: Any, starts: Sequence[Any]) -> list[Any]:
    """The operands' addresses at the ``index``-th combination of the outer dims."""
    left = cgutils.alloca_once_value(builder, index)
    moved = [cgutils.alloca_once_value(builder, ir.Constant(_WORD, 0)) for _ in starts]
    builder.store(index, left)
    for place in moved:
        builder.store(ir.Constant(_WORD, 0), place)
    width = ir.Constant(_WORD, len(starts) + 1)
    with cgutils.for_range(builder, dims) as dim:
        entry = builder.gep(table, [builder.mul(dim.index, width)])
        size, rest = builder.load(entry), builder.load(left)
        here = builder.urem(rest, size)
        builder.store(builder.udiv(rest, size), left)
        for i, place in enumerate(moved):
            stride = builder.load(builder.gep(entry, [ir.Constant(_WORD, i + 1)]))
            builder.store(builder.add(builder.load(place), builder.mul(here, stride)), place)
    return [builder.gep(start, [builder.load(place)]) for start, place in zip(starts, moved, strict=True)]


@intrinsic
def _word_at(typing_context: Any, address: Any, position: Any) -> Any:
    """The int64 at ``position`` of the words at ``address``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.gep(_pointer(builder, args[0], _WORD), [args[1]]))

    return types.intp(types.intp, types.intp), codegen


def _fold(function: Callable[..., Any], dtype: Any) -> Callable[..., None]:
    """An entry that combines any number of vectors into the first operand, pair by pair.

    Its block: how many inputs, the vectors' length, then slot and offset of the output and of each input. The range is
    one of the vectors' elements.
    """
    kind = types.Array(numpy_support.from_dtype(np.dtype(dtype)), 1, "C")
    combine = njit(function, **OPTIONS)

    @intrinsic
    def vector(typing_context: Any, bases: Any, block: Any, operand: Any, length: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            bases, block, operand, length = args
            place = builder.add(builder.mul(operand, ir.Constant(_WORD, 2)), ir.Constant(_WORD, 2))
            words = builder.gep(_pointer(builder, block, _WORD), [place])
            base = builder.load(builder.gep(_pointer(builder, bases, _WORD), [builder.load(words)]))
            offset = builder.load(builder.gep(words, [ir.Constant(_WORD, 1)]))
            return _array(context, builder, kind, builder.add(base, offset), [length])

        return kind(types.intp, types.intp, types.intp, types.intp), codegen

    def entry(bases: int, block: int, begin: int, end: int) -> None:
        count, length = _word_at(block, 0), _word_at(block, 1)
        out, first = vector(bases, block, 0, length), vector(bases, block, 1, length)
        for i in range(begin, end):
            out[i] = first[i]
        for number in range(2, count + 1):
            more = vector(bases, block, number, length)
            for i in range(begin, end):
                out[i] = combine(out[i], more[i])

    return entry


def bind_helpers() -> None:
    """Let compiled kernels call the families' plain helpers and the BLAS entry points."""
    for helper in JITABLES:
        if helper not in _bound:
            _bound.add(helper)
            overload(helper, strict=False, jit_options=OPTIONS)(_itself(helper))
    for name, stub in GEMM.items():
        if stub not in _bound:
            _bound.add(stub)
            overload(stub, strict=False)(_external(name))
            llvm.add_symbol(name, resolve(name))  # Numba, too, loads what it compiles


def _itself(helper: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: helper


def _external(symbol: str) -> Callable[..., Any]:
    call = types.ExternalFunction(symbol, types.void(*[types.intp] * 13))

    def typed(*args: Any) -> Any:
        return lambda *args: call(*args)

    return typed


def emit(kernel: Kernel, dtypes: Sequence[Any], ranks: Sequence[int], words: str, symbol: str) -> bytes:
    """The object code of one variant of ``kernel``, whose entry is named ``symbol``."""
    bind_helpers()
    if kernel.form is Form.ARRAYS:
        body = njit(kernel.function, **OPTIONS)
        arguments = _arguments(dtypes, ranks, words, kernel.takes_range, kernel.takes_run)

        def entry(bases: int, block: int, begin: int, end: int) -> None:
            body(*arguments(bases, block, begin, end))
    elif kernel.form is Form.FOLD:
        entry = _fold(kernel.function, dtypes[0])
    else:
        scalars = _scalars(kernel.function, dtypes)

        def entry(bases: int, block: int, begin: int, end: int) -> None:
            scalars(bases, block, begin, end)

    return _object_code(entry, symbol)


@intrinsic
def _set_word(typing_context: Any, address: Any, position: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], builder.gep(_pointer(builder, args[0], _WORD), [args[1]]))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


@intrinsic
def _call_entry(typing_context: Any, entry: Any, bases: Any, block: Any, begin: Any, end: Any) -> Any:
    """Call the entry at an address for a range of its units."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * 4)
        builder.call(_pointer(builder, args[0], kind), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), codegen


def emit_loop(symbol: str) -> bytes:
    """The object code of the tape's loop: ``loop(nodes, bases, span, 0)``.

    ``nodes`` points at three words for each node: its entry, its block and how many units of work it has. ``span``
    points at two words: the first node to run and one past the last. The last of the run's words is the address of a
    word by which others stop the loop. After each node the loop looks at that word and at the run's status; where one
    is set, it stops and leaves that node's position in the first word of ``span``.
    """

    def loop(nodes: int, bases: int, span: int, unused: int) -> None:
        run, node, stop = _word_at(bases, 0), _word_at(span, 0), _word_at(span, 1)
        others = _word_at(run, RUN_WORDS - 1)
        while node < stop:
            at = NODE_WORDS * node
            _call_entry(_word_at(nodes, at), bases, _word_at(nodes, at + 1), 0, _word_at(nodes, at + 2))
            if _word_at(run, 0) != 0 or _word_at(others, 0) != 0:
                break
            node += 1
        _set_word(span, 0, node)

    return _object_code(loop, symbol)


def _guarded(entry: Callable[..., None]) -> Any:
    """An intrinsic that calls ``entry`` and, where that raised, says so in the run's status."""
    body = njit(entry, **OPTIONS)
    body.compile(ENTRY.args)
    made = body.overloads[ENTRY.args]

    @intrinsic
    def guarded(typing_context: Any, bases: Any, block: Any, begin: Any, end: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            context.add_linking_libs([made.library])
            status, _ = context.call_internal_no_propagate(builder, made.fndesc, made.signature, args)
            with cgutils.if_unlikely(builder, status.is_error):
                run = builder.load(_pointer(builder, args[0], _WORD))
                builder.store(ir.Constant(_WORD, RAISED), _pointer(builder, run, _WORD))
            return context.get_dummy_value()

        return ENTRY, codegen

    return guarded


def _object_code(entry: Callable[..., None], symbol: str) -> bytes:
    guarded = _guarded(entry)

    def outer(bases: int, block: int, begin: int, end: int) -> None:
        guarded(bases, block, begin, end)

    compiled = cfunc(ENTRY, **OPTIONS)(outer)
    module = llvm.parse_assembly(compiled.inspect_llvm().replace(compiled._wrapper_name, symbol))
    _seal(module, symbol)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="default",
        jit=False,
    )
    code: bytes = machine.emit_object(module)
    return code


def _seal(module: Any, symbol: str) -> None:
    """Leave nothing to be seen but ``symbol``, and nothing missing but what every process has.

    Numba counts functions per process, so objects of two processes use one name for different functions; loaded into
    a third, the first would stand for both.
    """
    for number, value in enumerate([*module.functions, *module.global_variables]):
        if not value.is_declaration:
            if value.name != symbol:
                value.linkage = "internal"
                value.name = f"{symbol}.{number}"
        elif not value.name.startswith("llvm.") and not _offered(value.name):
            raise GraphError(f"it needs {value.name} when it runs, which no kernel has")


def _offered(symbol: str) -> bool:
    """Whether any process can resolve ``symbol`` without Python or Numba: BLAS, and C's library of functions."""
    return symbol in GEMM or (not symbol.startswith(("Py", "_Py")) and hasattr(ctypes.CDLL(None), symbol))
