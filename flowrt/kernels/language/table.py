"""The kernels flowrt knows, by op and device kind, and how each wants to see its operands.

A kernel is a plain Python function over arrays, written so that Numba can compile it: inputs, outputs, scratch, local
memory, then attribute words, in that order. One whose parameters are ``arrays`` and ``words`` is given two tuples, so
that it need not name what it passes on. Nothing here or in the families imports Numba: a node whose kernels are on
disk never needs it. A `Call` says how the dense operands of one application are to be viewed and which words it is
given.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from flowrt.base.errors import GraphError
from flowrt.base.spec import Spec, is_half
from flowrt.base.traits import writes
from flowrt.base.valueclass import valueclass
from flowrt.kernels.language.costs import CHEAP, COSTLY
from flowrt.kernels.language.own import attribute_words, check_written, is_programs
from flowrt.kernels.store.fingerprint import raises

if TYPE_CHECKING:
    from flowrt.kernels.language.expression import Expression

Attrs: TypeAlias = Mapping[str, Any]
Word: TypeAlias = int | float


class Addressed(Protocol):
    """Code that has an address where it is loaded: a register tile, or another kernel's entry."""

    def address(self) -> int: ...


@valueclass
class View:
    """How a kernel sees a dense operand: a shape, strides and an offset, all in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @staticmethod
    def dense(shape: Sequence[int]) -> View:
        return _dense(tuple(shape))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after another, in order (an empty or single one always does)."""
        expected = 1
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != expected and self.size > 0:
                return False
            expected *= n
        return True

    def same_elements(self, other: View) -> bool:
        """Whether two views run through the same elements in the same order."""
        steps = zip(self.shape, self.strides, other.strides, strict=False)
        alike = self.shape == other.shape and self.offset == other.offset
        return alike and all(n == 1 or s == t for n, s, t in steps)

    def reshape(self, shape: Sequence[int]) -> View:
        """Another shape of a contiguous view."""
        if not self.contiguous or math.prod(shape) != self.size:
            raise ValueError(f"cannot view {self.shape} as {tuple(shape)}")
        return View(tuple(shape), View.dense(shape).strides, self.offset)

    def permute(self, axes: Sequence[int]) -> View:
        return View(tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes), self.offset)

    def broadcast_to(self, shape: Sequence[int]) -> View:
        """NumPy's broadcasting: missing and single dimensions repeat with stride 0."""
        pad = len(shape) - len(self.shape)
        if pad < 0 or any(n not in (1, m) for n, m in zip(self.shape, shape[pad:], strict=True)):
            raise ValueError(f"cannot broadcast {self.shape} to {tuple(shape)}")
        strides = [0] * pad + [
            0 if n == 1 and m != 1 else s for n, s, m in zip(self.shape, self.strides, shape[pad:], strict=True)
        ]
        return View(tuple(shape), tuple(strides), self.offset)

    def window(self, starts: Sequence[int], shape: Sequence[int], steps: Sequence[int] | None = None) -> View:
        """The part that begins at ``starts`` and takes every ``steps``-th element; steps may be negative."""
        steps = steps or (1,) * len(shape)
        ends = zip(starts, shape, steps, self.shape, strict=True)
        if 0 not in shape and any(not (0 <= s < n and 0 <= s + (m - 1) * by < n) for s, m, by, n in ends):
            raise ValueError(f"the window {tuple(shape)} from {tuple(starts)} leaves {self.shape}")
        offset = self.offset + sum(s * stride for s, stride in zip(starts, self.strides, strict=True))
        strides = tuple(stride * step for stride, step in zip(self.strides, steps, strict=True))
        return View(tuple(shape), strides, offset)


@lru_cache(4096)
def _dense(shape: tuple[int, ...]) -> View:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return View(shape, tuple(strides))


@valueclass
class Call:
    """One application of a kernel: a view per operand (inputs, outputs, scratch, local) and its attribute words.

    ``units`` is how many independent pieces of work it has: where the function takes ``begin`` and ``end``, ranges of
    them may run on several threads at once, in any order. The forms SCALARS and REDUCE count elements by themselves.
    Where each unit makes whole rows of the first output, ``rows`` says which: (m, n, so many at most) if the output is
    seen as [any, m, n] and the units go through its matrices one by one. ``tiles`` are integers, and addresses that
    code has where the launch runs. ``order`` are the operands that the function is given, if not each in its turn.
    An input that is to be contiguous and is not is copied into its shape of ``copied``, if not its view's own.
    A CUDA twin is launched with so many ``blocks``, not at all for 0; where it does not say, with a thread for each
    entry of its largest operand.
    """

    views: tuple[View, ...]
    words: tuple[Any, ...] = ()  # `Word`s, and tuples of them
    units: int = 1
    rows: tuple[int, int, int] | None = None
    tiles: tuple[int | Addressed, ...] = ()
    order: tuple[int, ...] = ()
    copied: tuple[tuple[int, ...], ...] = ()
    blocks: int | None = None


Layout: TypeAlias = Callable[[Sequence[Spec], Sequence[Spec], Attrs], Call]


@valueclass
class Narrow:
    """What a scalar function comes to for those arguments that it ``fits``: arithmetic that loops make vectors of."""

    fits: Callable[..., Any]
    function: Callable[..., Any]


class Form(Enum):
    """What the compiled entry passes to the function."""

    ARRAYS = "arrays"  # C-contiguous arrays of the ranks in the Call
    SCALARS = "scalars"  # one element of each input; the entry loops over any strides
    ROWS = "rows"  # an expression that reduces rows; the entry runs several loops over each
    PIECES = (
        "pieces"  # no function: input i's view 2i is copied to view 2i + 1 of the output, filled first with the word;
        # what is more than there are inputs is the last one's
    )
    PROGRAM = "program"  # its function answers the application, made of other kernels
    REDUCE = "fold"  # two elements to combine; the entry combines any number of vectors, one after another


Flops: TypeAlias = Callable[[Sequence[Spec]], float]
"""Of the concrete specs of an op's operands (inputs, then outputs) a number: of operations, or of bytes."""


@valueclass
class Facts:
    """What is true of an op's kernels, whatever device and dtypes they are for; whoever registers one states it."""

    entry: int = CHEAP  # what an entry of the output costs
    flops: Flops | None = None  # how many multiplications and additions there are, if many for each entry
    moves: Flops | None = None  # how many bytes are touched, if not all that the operands have
    usual: tuple[str, ...] = ()  # dtypes that programs give it so often that every machine compiles it for these ahead


@valueclass
class RegisteredKernel:
    """How one op is computed on one kind of device."""

    op: str
    device: str
    function: Callable[..., Any]
    layout: Layout
    form: Form = Form.ARRAYS
    scratch: Callable[[Sequence[Spec], Sequence[Spec], Attrs], Sequence[Spec]] | None = None
    dtypes: Callable[[Sequence[Any]], bool] | None = None
    local: Callable[[Sequence[Spec], Sequence[Spec], Attrs], Sequence[Spec]] | None = None
    infallible: bool = False
    moved: tuple[int, ...] = ()  # operands whose entries it moves, whatever they mean
    expression: Expression | None = None  # of a kernel of several ops' functions, whose form is SCALARS or ROWS
    then: tuple[
        RegisteredKernel, ...
    ] = ()  # further steps on the same operands, each begun when the one before is done
    takes_bits: bool = False  # of floats of 16 bits, and knows what they stand for, or need not

    def __hash__(self) -> int:
        return hash((self.op, self.device, self.function))  # all fields would take longer than what is looked up by it

    def supports(self, dtypes: Sequence[Any]) -> bool:
        return self._sees_bits(dtypes) and (self.dtypes is None or self.dtypes(dtypes))

    def _sees_bits(self, dtypes: Sequence[Any]) -> bool:
        """Whether it does what it should on floats of 16 bits, if there are any: where it but moves their bits."""
        if self.takes_bits or self.form is Form.PIECES:
            return True
        return all(n in self.moved for n, dtype in enumerate(dtypes) if is_half(np.dtype(dtype)))

    @property
    def guards_inputs(self) -> bool:
        """Whether it is a program's, and so may take one of its inputs for an output: to write one does not compile."""
        own = self.form is Form.ARRAYS and not self.takes_tuples and is_programs(self.function)
        return own and not writes(self.op)

    @property
    def takes_run(self) -> bool:
        """Whether the function ends with the run's words (status, step, seed)."""
        return "run" in _parameters(self.function)

    @property
    def may_fail(self) -> bool:
        """Whether a launch may leave its outputs half-written: it can set the run's status, or raise."""
        return (self.takes_run and not self.infallible) or raises(self.function)

    @property
    def cost(self) -> int:
        """What an entry costs: loops over costly ones are made otherwise."""
        return facts_of(self.op).entry if self.form is Form.SCALARS else CHEAP

    @property
    def takes_tuples(self) -> bool:
        """Whether the function takes its arrays as one tuple and its words as another."""
        return {"arrays", "words"} <= _parameters(self.function)

    @property
    def takes_tiles(self) -> bool:
        """Whether the function takes, after its two tuples, one of `Call.tiles`."""
        return "tiles" in _parameters(self.function)

    @property
    def entry(self) -> str:
        """What the compiled entry is called: ops share a function that takes tiles, which they tell by words."""
        return self.function.__name__ if self.takes_tiles else self.op

    @property
    def takes_range(self) -> bool:
        """Whether the function is told, after its words, which of the application's units to compute."""
        return "begin" in _parameters(self.function)


@lru_cache(4096)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


KERNELS: dict[tuple[str, str], list[RegisteredKernel]] = {}
FACTS: dict[str, Facts] = {}
NARROW: dict[Callable[..., Any], Narrow] = {}  # by scalar functions that have one
HOST_ONLY: dict[str, str] = {}  # ops that have a CPU kernel and, on purpose, no CUDA twin, and the reason
REPLACED: list[Callable[[], None]] = []  # called where a program writes a kernel anew, by whoever keeps what they made
JITABLES: list[Callable[..., Any]] = []  # helpers that kernels call, in order of definition
_edition = [object()]


_NO_FACTS = Facts()


def natural(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """Every operand as it is; no words."""
    return Call(tuple(View.dense(spec.concrete) for spec in (*inputs, *outputs)))


def _by_name(function: Callable[..., Any]) -> Layout:
    """Every operand as it is, and as words the attributes that the function names."""

    def layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
        return replace(natural(inputs, outputs, attrs), words=attribute_words(function, inputs, outputs, attrs))

    return layout


def broadcast(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """Every input broadcast to the output's shape."""
    shape = outputs[0].concrete
    views = [View.dense(spec.concrete).broadcast_to(shape) for spec in inputs]
    return Call((*views, View.dense(shape)))


def flat(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """Every operand as a vector; each of the first output's entries is a unit of work."""
    return Call(tuple(View.dense((spec.size,)) for spec in (*inputs, *outputs)), units=outputs[0].size)


def kernel(
    op: str,
    on: str = "cpu",
    *,
    layout: Layout | None = None,
    form: Form = Form.ARRAYS,
    scratch: Callable[[Sequence[Spec], Sequence[Spec], Attrs], Sequence[Spec]] | None = None,
    dtypes: Callable[[Sequence[Any]], bool] | None = None,
    local: Callable[[Sequence[Spec], Sequence[Spec], Attrs], Sequence[Spec]] | None = None,
    infallible: bool = False,
    moved: tuple[int, ...] = (),
    then: Sequence[tuple[Callable[..., Any], Layout]] = (),
    takes_bits: bool = False,
    flops: Flops | None = None,
    moves: Flops | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function computes ``op`` on device kind ``on``.

    It takes the inputs, the outputs (to be filled), then attributes of the op by their names: numbers, bools, and
    tuples of them. With a ``layout`` it takes scratch arrays, local arrays and the layout's words in their place; where
    it has parameters named ``arrays`` and ``words``, as only CPUs' may, it takes them as two tuples. One that has
    ``tiles``, too, is compiled once for all float dtypes and ops: it sees floats as bytes, and their sizes, with the
    addresses of what computes on them, are in that third tuple. Parameters named ``begin`` and ``end`` after those
    receive the range of the Call's units to compute, and a last one named ``run`` the run's words. Scratch is shared by
    all ranges of an application; local memory is the calling thread's own and holds nothing when a range begins. The
    function must compile under Numba and neither raise nor allocate. One that takes ``run`` and never sets its status
    is ``infallible``: only what cannot fail is computed straight into a variable. Of operands that are ``moved``, entry
    by entry and perhaps zeros among them, a CPU's is compiled once for each size of an entry: it sees signed integers.
    Of floats of 16 bits every kernel sees the bits, as uint16; it is given none that are not moved unless it
    ``takes_bits``.
    Further steps follow in ``then``: functions of the same operands, with layouts of their own, whose units are begun
    when those of the step before are done. Several kernels of an op may differ in the ``dtypes`` they accept; the one
    registered last is tried first.

    Where entries take many operations each, ``flops`` says how many there are in all, and ``moves`` how many bytes are
    touched where that is not all of the operands: functions of these operands' specs, inputs first. By them a scheduler
    guesses how long the op takes, and whether it may keep an event loop waiting.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        state(op, flops=flops, moves=moves)
        if layout is None and form is Form.ARRAYS:
            check_written(op, on, function)
        laid = layout or (_by_name(function) if form is Form.ARRAYS else natural)
        following = tuple(
            RegisteredKernel(op, on, other, its_layout, form, infallible=infallible) for other, its_layout in then
        )
        given = scratch, dtypes, local, infallible, moved
        made = RegisteredKernel(op, on, function, laid, form, *given, then=following, takes_bits=takes_bits)
        anew = (op, on) in KERNELS and is_programs(function)
        KERNELS.setdefault((op, on), []).insert(0, made)
        forget_kernels()
        for forget in REPLACED if anew else ():
            forget()
        return function

    return register


def state(op: str, **facts: Any) -> None:
    """Add to the facts about an op's kernels those that are no None."""
    told = {name: fact for name, fact in facts.items() if fact is not None}
    if told:
        FACTS[op] = replace(facts_of(op), **told)


def facts_of(op: str) -> Facts:
    """What was stated of the op's kernels."""
    return FACTS.get(op, _NO_FACTS)


def is_costly(op: str) -> bool:
    """Whether an entry of what the op answers takes many instructions."""
    return facts_of(op).entry >= COSTLY


def elementwise(
    op: str,
    function: Callable[..., Any],
    on: tuple[str, ...] = ("cpu", "cuda"),
    dtypes: Any = None,
    narrow: Narrow | None = None,
    *,
    entry: int | None = None,
    usual: tuple[str, ...] | None = None,
    takes_bits: bool = False,
) -> Callable[..., Any]:
    """Register a scalar expression as ``op``'s kernel: one line serves both devices.

    ``entry`` is what an entry costs, if not `CHEAP`; ``usual`` are the dtypes for which it is compiled ahead.

    Entries that fit ``narrow`` take its function instead; where all of a stretch do, loops on CPUs have no other.
    """
    if narrow is not None:
        function = _chosen(narrow, function)
        NARROW[function] = narrow
    state(op, entry=entry, usual=usual)
    for device in on:
        kernel(op, device, layout=broadcast, form=Form.SCALARS, dtypes=dtypes, takes_bits=takes_bits)(function)
    return function


def _chosen(narrow: Narrow, others: Callable[..., Any]) -> Callable[..., Any]:
    """The choice between two helpers, entry by entry: no value depends on those beside it."""
    fits, near = narrow.fits, narrow.function
    if others.__code__.co_argcount == 1:
        return lambda x: near(x) if fits(x) else others(x)
    return lambda x, y: near(x, y) if fits(x, y) else others(x, y)


def single(dtypes: Sequence[Any]) -> bool:
    """Whether the first operand is float32: what a kernel's ``dtypes`` may be."""
    return bool(np.dtype(dtypes[0]) == np.float32)


def double(dtypes: Sequence[Any]) -> bool:
    """Whether the first operand is float64."""
    return bool(np.dtype(dtypes[0]) == np.float64)


def floating(dtypes: Sequence[Any]) -> bool:
    """Whether the first operand is float32 or float64."""
    return bool(np.dtype(dtypes[0]).kind == "f")


def integral(dtypes: Sequence[Any]) -> bool:
    """Whether the first operand holds integers or bools."""
    return bool(np.dtype(dtypes[0]).kind in "biu")


def jitable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for a helper that kernels call: plain Python here, compiled with the kernel that calls it."""
    JITABLES.append(function)
    return function


def product_flops(specs: Sequence[Spec]) -> float:
    """The multiplications and additions of a product: exact for matrices, as sqrt(mk · kn · mn) = mkn."""
    sizes = [spec.size for spec in (*specs[:2], specs[-1]) if spec.dtype.kind == "f"]
    return 2 * math.sqrt(math.prod(sizes))


def pieces(op: str, layout: Layout, on: tuple[str, ...] = ("cpu", "cuda")) -> None:
    """Register an op whose output is made of strided copies of its inputs (over a fill, if the Call has a word)."""
    for device in on:
        kernel(op, device, layout=layout, form=Form.PIECES)(_nothing)


def _nothing() -> None:
    """The function of kernels that are made of copies alone."""


def host_only(*ops: str, why: str) -> None:
    """Say that the ops run on CPUs alone, and why."""
    HOST_ONLY.update(dict.fromkeys(ops, why))


def find_kernel(op: str, device: str, dtypes: Sequence[Any]) -> RegisteredKernel | None:
    """The kernel for these operand dtypes (inputs, then outputs), if there is one."""
    return _found(edition(), op, device, tuple(dtypes))


@lru_cache(4096)
def _found(there: object, op: str, device: str, dtypes: tuple[Any, ...]) -> RegisteredKernel | None:
    return next((candidate for candidate in KERNELS.get((op, device), ()) if candidate.supports(dtypes)), None)


def edition() -> object:
    """Stands for the kernels that there are now: what is found of them holds for as long as this is the same."""
    return _edition[0]


def forget_kernels() -> None:
    """Have kernels looked for anew, once there are others; what a thread is still finding is of the edition before."""
    _edition[0] = object()
    _found.cache_clear()


def without_kernel(op: str) -> str:
    """What to do for an op that has no kernel at all."""
    from difflib import get_close_matches  # a millisecond that few programs need

    near = get_close_matches(op, {name for name, _ in KERNELS}, 1, 0.8)
    there = f"; there is one for {near[0]!r}" if near else ""
    return f'write one, @fr.kernel("{op}", on="cpu"){there}'


def require_kernel(op: str, device: str, dtypes: Sequence[Any]) -> RegisteredKernel:
    """The kernel of ``op`` on ``device`` for these dtypes; raises `GraphError` naming the devices that have one."""
    found = find_kernel(op, device, dtypes)
    if found is None:
        has = sorted({kind for name, kind in KERNELS if name == op}) or [f"no device; {without_kernel(op)}"]
        names = ", ".join(str(d) for d in dtypes)
        raise GraphError(f"no {device} kernel for {op} of ({names}); {op} has kernels on {', '.join(has)}")
    return found
