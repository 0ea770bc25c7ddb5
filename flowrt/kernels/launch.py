"""From an op on concrete operands to launches: a compiled entry and the immutable block it reads.

The operands of a launch are slots of the run's ``bases`` table, in the order inputs, outputs, scratch, copies, local.
Where a kernel wants an operand contiguous and its view is not, a copy into scratch is planned before it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from flowrt.base.errors import FlowrtError
from flowrt.base.spec import Spec, is_half, spec_of, stored
from flowrt.base.valueclass import replace as swift_replace
from flowrt.base.valueclass import valueclass
from flowrt.kernels.language.own import raised_in
from flowrt.kernels.language.table import (
    KERNELS,
    Addressed,
    Call,
    Form,
    RegisteredKernel,
    View,
    Word,
    host_only,
    kernel,
    require_kernel,
)
from flowrt.kernels.language.variants import Variant, entry_address, is_compiled
from flowrt.kernels.tiles.copies import COPY_OP as COPY_OP
from flowrt.kernels.tiles.copies import Copy, merged, plan_box, plan_copy

if TYPE_CHECKING:
    from flowrt.kernels.store.background import CompileOrder

ENTRY_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
RUN_WORDS = 4
STATUS, STEP, SEED = 0, 1, 2
REPEATED = 1 << 48  # runs whose numbers, from 0 on, differ by a multiple of this draw the same

FILL_OP = "fill"
_SEEN_AS_BYTES = np.dtype("int8")  # floats, where tiles alone compute on them

RAISED = 4
# What a kernel may leave in the run's status word.
FAILURES = {
    1: "an index is out of range",
    2: "an integer was divided by zero",
    3: "a label is not among the classes, which run from 0 to the logits' last size - 1",
    RAISED: "the kernel raised an error",
}


WAYS: dict[str, list[str]] = {}  # by kernels that are entered `in_ways`, all those of their op


def drawn_as(number: int) -> int:
    """The number by which a run of that number draws: the word at `STEP`."""
    return number if number < REPEATED else number % REPEATED


def failure(op: str, status: int) -> str:
    """What the run's status word says of the ``op`` whose kernel left it there."""
    text = FAILURES.get(status, f"failed with status {status}")
    own = [
        kernel.function
        for kernel in KERNELS.get((op, "cpu"), ())
        if not str(kernel.function.__module__).startswith("flowrt.")
    ]
    return f"{text} ({raised_in(own[0])})" if status == RAISED and own else text


def check(words: np.ndarray[Any, Any], op: str, where: Callable[[], str], more: Callable[[], str] = str) -> None:
    """Raises `FlowrtError`, which says where, with the reason that a kernel of ``op`` left in a run's words, if any;
    ``more`` answers what is to follow that."""
    if words[STATUS]:
        raise FlowrtError(f"{where()}: {failure(op, int(words[STATUS]))}{more()}")


@valueclass
class Operand:
    """Where an operand lies: a slot of ``bases`` and a byte offset."""

    slot: int
    offset: int = 0


class Launchable(Protocol):
    """One entry to call: a kernel's (`LaunchStep`), or that of several such as one (`composite/`).

    The first ``reads`` of its ``operands``, numbers into the application's, are only read, the others written.
    """

    @property
    def operands(self) -> tuple[int, ...]: ...

    @property
    def reads(self) -> int: ...

    @property
    def units(self) -> int:
        """How many independent pieces of work there are: ranges of them may run on several threads."""

    @property
    def may_fail(self) -> bool:
        """Whether it may leave what it writes half-written."""

    def may_overwrite(self, output: int, operand: int) -> bool:
        """Whether each element of ``output`` is written after ``operand`` was last read there, and nowhere else."""

    def variants(self) -> Iterator[Variant]:
        """The variants of kernels that it calls."""

    def is_compiled(self) -> bool:
        """Whether its entry, and those that it calls, are there, or in the folder."""

    def address(self) -> int:
        """The compiled entry; compiles it if need be."""

    def block(self, places: Sequence[Operand]) -> np.ndarray[Any, Any]:
        """The entry's block for operands at ``places`` (all of the application's operands)."""


class Composite:
    """What is alike in what is made of several steps."""

    may_fail: ClassVar[bool] = False

    def may_overwrite(self: Launchable, output: int, operand: int) -> bool:
        """Only what it does not look at."""
        return operand not in self.operands


@valueclass
class LaunchStep:
    """A kernel on operands, and everything that its entry's block needs but places."""

    kernel: RegisteredKernel
    operands: tuple[int, ...]
    dtypes: tuple[np.dtype[Any], ...]
    call: Call
    reads: int
    _known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What does not hang on which operands they are, once it was asked for."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtypes", tuple(map(stored, self.dtypes)))

    def on(self, operands: Sequence[int]) -> LaunchStep:
        """The same of other operands."""
        return swift_replace(self, operands=tuple(operands))

    @property
    def units(self) -> int:
        if self.kernel.form is Form.ROWS or (self.kernel.expression is not None and self.kernel.expression.reductions):
            return self.call.units
        if self.kernel.form is not Form.ARRAYS:
            return self.call.views[-1].size
        return self.call.units if self.kernel.takes_range else 1

    @property
    def may_fail(self) -> bool:
        return self.kernel.may_fail

    def may_overwrite(self, output: int, operand: int) -> bool:
        views, form = self.call.views, self.kernel.form
        places = [i for i, number in enumerate(self.operands) if number == operand]
        if not places:
            return True
        if form is Form.REDUCE:
            return places == [0]  # it begins with the first input, and adds the others one after another
        at = self.operands.index(output)
        alike = all(views[i].same_elements(views[at]) for i in places)  # by number: the same bytes if of one size
        sizes = {self.dtypes[i].itemsize for i in (*places, at)}
        return form in (Form.SCALARS, Form.ROWS) and alike and len(sizes) == 1

    def variants(self) -> Iterator[Variant]:
        yield self.variant()
        yield from (called for called in self.call.tiles if isinstance(called, Variant))

    def is_compiled(self) -> bool:
        return is_compiled(self.variant())

    def variant(self) -> Variant:
        """What tells the compiled entry from the kernel's others."""
        known: Variant | None = self._known.get("variant")
        if known is None:
            known = self._known["variant"] = self._variant()
        return known

    def _variant(self) -> Variant:
        words = "".join(map(_letters, self.call.words)) + "t" * len(self.call.tiles)
        dtypes = tuple(self.dtypes[n] for n in self._order())
        if self.kernel.takes_tiles:
            dtypes = tuple(_SEEN_AS_BYTES if dtype.kind == "f" else dtype for dtype in dtypes)
        if self.kernel.moved:
            dtypes = tuple(_as_moved(dtype) if n in self.kernel.moved else dtype for n, dtype in enumerate(dtypes))
        if self.kernel.form is Form.REDUCE:  # one entry for any number of inputs
            dtypes = dtypes[:1]
        guarded = self.reads if self.kernel.guards_inputs and not self.call.order else 0
        return Variant(self.kernel, dtypes, self._ranks(), words, guarded)

    def _order(self) -> Sequence[int]:
        """The operands that the function is given."""
        return self.call.order or range(len(self.operands))

    def _ranks(self) -> tuple[int, ...]:
        """The ranks of arrays; of an expression's operands the inner strides, which are 0 or 1."""
        if self.kernel.form is Form.ARRAYS:
            return tuple(len(self.call.views[n].shape) for n in self._order())
        if self.kernel.expression is None:
            return ()
        return tuple(self._odometer()[3 : 3 + len(self.call.views)])

    def _odometer(self) -> list[int]:
        known: list[int] | None = self._known.get("odometer")
        if known is None:
            spelled = _row_odometer if self.kernel.form is Form.ROWS else _odometer
            known = self._known["odometer"] = spelled(self.call.views)
        return known

    def address(self) -> int:
        known: int = self._known.get("address", 0)
        if not known:
            known = self._known["address"] = entry_address(self.variant())
        return known

    def block(self, places: Sequence[Operand]) -> np.ndarray[Any, Any]:
        if self.kernel.form is Form.REDUCE:
            *inputs, output = (places[number] for number in self.operands)
            words = [(place.slot, place.offset) for place in (output, *inputs)]
            return np.array([len(inputs), self.call.views[0].size, *(w for pair in words for w in pair)], np.int64)
        head: list[int] = []
        for n in self._order():
            place, view = places[self.operands[n]], self.call.views[n]
            head += (place.slot, place.offset + view.offset * self.dtypes[n].itemsize if view.offset else place.offset)
        tail: list[int] | None = self._known.get("tail")
        if tail is None:
            tail = self._tail()
        return np.array(head + tail, np.int64)

    def _tail(self) -> list[int]:
        """What follows in the block on the operands' places."""
        words, (called, are_there) = [_bits(w) for w in _flat(self.call.words)], _addresses(self.call.tiles)
        if self.kernel.form is Form.ARRAYS:
            sizes = [size for n in self._order() for size in self.call.views[n].shape]
        else:
            sizes = self._odometer()
        tail = sizes + words + called
        if are_there:
            self._known["tail"] = tail
        return tail


@valueclass
class Application:
    """An op on concrete operands: the steps that compute it, and what they need beside inputs and outputs.

    ``scratch`` is shared by all threads that work at it, ``local`` is each one's own.
    """

    steps: tuple[Launchable, ...]
    scratch: tuple[Spec, ...]
    local: tuple[Spec, ...] = ()
    slots: int = 0  # of the bases, that it sets itself; operands behind all others
    orders: tuple[CompileOrder, ...] = ()  # what, once it is compiled, serves better than these steps
    longest_seconds: float = 0.0  # a guess of what its loops may come to whose iterations only values count
    wishes: tuple[
        tuple[CompileOrder, int], ...
    ] = ()  # orders that save only so many bytes: too few for one application


def _as_moved(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What entries are to a kernel that knows their size alone: signed, as its own zeros are."""
    return np.dtype(f"int{8 * dtype.itemsize}")


def _addresses(tiles: tuple[int | Addressed, ...]) -> tuple[list[int], bool]:
    """Where that lies which a kernel calls, 0 for what is only looked for, and whether nothing is."""
    found = _CALLED.get(tiles)
    if found is not None:
        return found, True
    found = [tile if isinstance(tile, int) else tile.address() for tile in tiles]
    are_there = all(address for tile, address in zip(tiles, found, strict=True) if not isinstance(tile, int))
    if are_there:
        if len(_CALLED) >= CALLED:
            _CALLED.clear()
        _CALLED[tiles] = found
    return found, are_there


CALLED = 4096  # of which this is remembered, of so many geometries and dtypes as there are
_CALLED: dict[tuple[int | Addressed, ...], list[int]] = {}


def _floating(word: Word) -> bool:
    return isinstance(word, (float, np.floating))


def _letters(word: Word | tuple[Any, ...]) -> str:
    """How a variant tells words: f is a float, i an integer, and a tuple stands in brackets."""
    if isinstance(word, tuple):
        return f"({''.join(map(_letters, word))})"
    return "f" if _floating(word) else "i"


def _flat(words: Sequence[Any]) -> Iterator[Word]:
    for word in words:
        if isinstance(word, tuple):
            yield from _flat(word)
        else:
            yield word


def _bits(word: Word) -> int:
    """The word as the block holds it: a float64's bits, or the integer modulo 2**64."""
    return int(np.float64(word).view(np.int64)) if _floating(word) else (int(word) + 2**63) % 2**64 - 2**63


def _odometer(views: Sequence[View]) -> list[int]:
    """Inner length, outer dims and strides of equally shaped views, merged into as few dims as their strides allow."""
    dims = merged(views)
    inner, steps = dims[0] if dims else (1, (1,) * len(views))
    return _spelled_out(inner, steps, dims[1:])


def _row_odometer(views: Sequence[View]) -> list[int]:
    """The same where the last axis, a row, is merged with none."""
    outer = merged([View(v.shape[:-1], v.strides[:-1]) for v in views])
    return _spelled_out(views[0].shape[-1], [v.strides[-1] for v in views], outer)


def _spelled_out(inner: int, steps: Sequence[int], outer: Sequence[tuple[int, tuple[int, ...]]]) -> list[int]:
    count = 1
    for n, _ in outer:
        count *= n
    return [inner, len(outer), count, *steps, *(word for n, strides in outer for word in (n, *strides))]


def apply_kernel(
    op: str, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str = "cpu"
) -> Application:
    """The launches that compute ``op`` on operands of these concrete specs."""
    found = require_kernel(op, device, [s.dtype for s in (*inputs, *outputs)])
    if found.form is Form.PROGRAM:
        application: Application = found.function(inputs, outputs, attrs, device)
        return application
    call = found.layout(inputs, outputs, attrs)
    if found.form is Form.PIECES:
        return Application(tuple(_piece_steps(inputs, outputs[0], call, device)), ())
    scratch = list(found.scratch(inputs, outputs, attrs)) if found.scratch else []
    local = tuple(found.local(inputs, outputs, attrs)) if found.local else ()
    dtypes = tuple(s.dtype for s in (*inputs, *outputs, *scratch, *local))
    numbers = list(range(len(dtypes) - len(local)))
    views = list(call.views)
    steps: list[LaunchStep] = []
    for i in range(len(inputs)):
        if found.form is Form.ARRAYS and not views[i].contiguous:
            dense = View.dense(views[i].shape)
            scratch.append(Spec(inputs[i].dtype, dense.shape))
            numbers[i] = len(inputs) + len(outputs) + len(scratch) - 1
            steps.append(copy_step(i, numbers[i], inputs[i].dtype, views[i], dense, device))
            views[i] = dense.reshape(call.copied[i]) if call.copied else dense
    first = len(inputs) + len(outputs) + len(scratch)
    numbers += range(first, first + len(local))
    steps.append(LaunchStep(found, tuple(numbers), dtypes, swift_replace(call, views=(*views,)), len(inputs)))
    for following in found.then:
        call = following.layout(inputs, outputs, attrs)
        views[len(inputs) :] = call.views[len(inputs) :]
        steps.append(LaunchStep(following, tuple(numbers), dtypes, swift_replace(call, views=(*views,)), len(inputs)))
    needed = [step for step in steps if step.units] or steps[-1:]  # some steps only some shapes need
    return Application(tuple(needed), tuple(scratch), local)


def in_ways(op: str, choose: Callable[..., str], ways: Mapping[str, Callable[..., Any]], **how: Any) -> None:
    """Enter several kernels of ``op`` on CPUs, alike but for the function: ``choose(inputs, outputs, attrs)`` tells
    which.

    Only those are compiled that a program's shapes ask for.
    """

    def apply(
        inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str = "cpu"
    ) -> Application:
        return apply_kernel(f"{op}_{choose(inputs, outputs, attrs)}", inputs, outputs, attrs, device)

    names = [f"{op}_{way}" for way in ways]
    for name, function in zip(names, ways.values(), strict=True):
        kernel(name, **how)(function)
        WAYS[name] = names
    kernel(op, form=Form.PROGRAM, dtypes=how.get("dtypes"), moved=how.get("moved", ()))(apply)
    host_only(*names, why=f"a way of a processor to go about {op}, which has a twin")


def _piece_steps(inputs: Sequence[Spec], output: Spec, call: Call, device: str) -> list[LaunchStep]:
    target, dtype, steps = len(inputs), stored(output.dtype), []
    if call.words:
        word = int(np.array(call.words[0], output.dtype).view(dtype)) if is_half(output.dtype) else call.words[0]
        exact = dtype.kind in "biu" and not _floating(word)  # a float64 holds no more than 53 bits of an integer
        value = (int(word) if exact else float(word),)
        if device == "cpu" and len(call.views) == 2:
            box = plan_box(*call.views, output.size, value[0], dtype)
            if box is not None:
                return [_planned(box, 0, target, device)]
        fill = require_kernel(FILL_OP, device, [dtype])
        steps.append(LaunchStep(fill, (target,), (dtype,), Call((View.dense((output.size,)),), value, output.size), 0))
    for i in range(len(call.views) // 2):
        source, window = call.views[2 * i], call.views[2 * i + 1]
        if source.size:
            steps.append(copy_step(min(i, target - 1), target, dtype, source, window, device))
    return steps


def copy_step(source: int, target: int, dtype: np.dtype[Any], view: View, other: View, device: str) -> LaunchStep:
    plan = plan_copy(view, other, dtype) if device == "cpu" else Copy(COPY_OP, dtype, Call((view, other)))
    return _planned(plan, source, target, device)


def _planned(plan: Copy, source: int, target: int, device: str) -> LaunchStep:
    dtypes = (plan.dtype, plan.dtype)
    return LaunchStep(require_kernel(plan.op, device, dtypes), (source, target), dtypes, plan.call, 1)


class Prepared:
    """An op on operands of fixed specs, ready to run at any addresses. Immutable once made; shared by threads."""

    __slots__ = ("_blocks", "_calls", "_kind", "_outputs", "fresh", "loops", "orders", "scratch", "steps")

    def __init__(self, application: Application, operands: int, outputs: Sequence[Spec] = ()) -> None:
        self.orders = application.orders
        self.scratch = (*application.scratch, *application.local)  # one thread at a time has either for itself
        self._outputs = len(outputs)
        self.fresh = [(spec.concrete, spec.dtype) for spec in (*outputs, *self.scratch)]  # what each run writes into
        self.loops = application.slots > 0
        places = [Operand(i + 1) for i in range(operands + len(self.scratch) + application.slots)]
        self._blocks = [step.block(places) for step in application.steps]
        self.steps = [  # entry, block and units
            (step.address(), block.ctypes.data, step.units)
            for step, block in zip(application.steps, self._blocks, strict=True)
        ]
        self._calls = [(ENTRY_TYPE(entry), block, units) for entry, block, units in self.steps]
        self._kind = ctypes.c_int64 * (1 + len(places) + (RUN_WORDS if self.loops else 0))

    def compute(
        self, inputs: Sequence[np.ndarray[Any, Any]], words: np.ndarray[Any, Any]
    ) -> list[np.ndarray[Any, Any]]:
        """The outputs for C-contiguous ``inputs``; what became of it stands in ``words``, the run's: see `check`."""
        made = [np.empty(shape, dtype) for shape, dtype in self.fresh]
        self.run(words.ctypes.data, [a.ctypes.data for a in (*inputs, *made)])
        return made[: self._outputs]

    def run(self, run: int, addresses: Sequence[int]) -> None:
        """Compute on the operands (inputs, outputs, scratch) at ``addresses``; ``run`` is the run's words' address."""
        bases = self.bases(run, addresses)
        at = ctypes.addressof(bases)
        for entry, block, units in self._calls:
            entry(at, block, 0, units)

    def bases(self, run: int, addresses: Sequence[int]) -> Any:
        """The table that entries read. With loops inside, the run has words of its own behind it: between iterations a
        loop looks by way of these whether those at ``run`` tell it to stop. No kernel in such a loop may fail."""
        table = self._kind(run, *addresses)
        if self.loops:
            _, step, seed, _ = (ctypes.c_int64 * RUN_WORDS).from_address(run)
            table[-RUN_WORDS:] = [0, step, seed, run]
            table[0] = ctypes.addressof(table) + ctypes.sizeof(table) - 8 * RUN_WORDS
        return table


def prepare(
    op: str, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str = "cpu"
) -> Prepared:
    """`apply_kernel` with its entries compiled or loaded."""
    return Prepared(apply_kernel(op, inputs, outputs, attrs, device), len(inputs) + len(outputs), outputs)


def run_kernel(
    op: str,
    inputs: Sequence[np.ndarray[Any, Any]],
    outputs: Sequence[Spec],
    attrs: Mapping[str, Any],
    words: np.ndarray[Any, Any] | None = None,
) -> list[np.ndarray[Any, Any]]:
    """Compute ``op`` on arrays at once, into new arrays of the specs ``outputs``.

    Raises `FlowrtError` with the kernel's reason where it fails.
    """
    run = np.zeros(RUN_WORDS, np.int64) if words is None else words
    given = [np.asarray(a, order="C") for a in inputs]
    made = prepare(op, [spec_of(a) for a in given], outputs, attrs).compute(given, run)
    check(run, op, lambda: op)
    return made
