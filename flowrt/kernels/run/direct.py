"""A step as one C call of Python's: arguments checked, tape run and outputs wrapped without any Python between.

A `Direct` holds a callable that Python calls as it calls ``len``. Whoever knows a tape gives it a *plan*: words that
say what arguments it is for and where everything lies. As long as the arguments are plain arrays of just those dtypes
and shapes, the gate is open, nobody else runs by the plan, and its variables are free and lie where they lay, a call
holds them and runs that tape; in every other case (keywords are one) it calls the fallback with what it was given, and
nothing was done.
So nothing is decided here. Some plans are kept, for different arguments, so that callers may take turns.

It relies on what compiled extension modules rely on: the layout of NumPy's array (its ABI 2), of an object's head, and
addresses that Python and NumPy hand out. `available` looks whether all of that is so here; where it is not, the
callable is the fallback.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from flowrt.base.errors import GraphError, user_site
from flowrt.base.valueclass import valueclass
from flowrt.kernels.launch import STATUS, STEP
from flowrt.kernels.store.parts import DIRECT_PART

if TYPE_CHECKING:
    from flowrt.base.spec import Spec

__all__ = ["STATUS", "STEP", "Direct", "RunPlace", "RunTerms", "available", "plan_words"]

Array: TypeAlias = np.ndarray[Any, Any]
Words: TypeAlias = "ctypes.Array[ctypes.c_int64]"

# Where the fields of a NumPy array lie, in bytes (PyArrayObject_fields, part of its ABI), and flags that say C order
# and aligned.
ARRAY_DATA, ARRAY_RANK, ARRAY_DIMS, ARRAY_DTYPE, ARRAY_FLAGS = 16, 24, 32, 56, 64
IN_ORDER = 0x1 | 0x100
_ABI = 0x2000000
_VERSION_ENTRY, _NEW_ENTRY, _RETURN_ENTRY = 0, 94, 76  # of NumPy's table of functions, part of its ABI as well

MOST_OUTPUTS = 512  # words of them lie on the stack
FASTCALL = 0x80 | 0x2  # METH_FASTCALL | METH_KEYWORDS

# The words of a callable's head: objects, then functions of Python's and NumPy's, then what each leaf of the answer is.
(CHOICE, FALLBACK, FINISH, NONE, ARRAY_TYPE, LEAVES, NEW_ARRAY, SCALAR, NEXT, AS_INT, INTEGER) = range(11)
(RETAIN, RELEASE, CALL, GET_LIST, GET_TUPLE, NEW_BOX, SET) = range(11, 18)
(LET_OTHERS, RESUME, FETCH_ERROR, RESTORE_ERROR, FIRST_LEAF) = range(18, 23)
_FUNCTIONS = {
    NEXT: "PyIter_Next",
    AS_INT: "PyLong_AsLongLong",
    INTEGER: "PyLong_FromLongLong",
    RETAIN: "Py_IncRef",
    RELEASE: "Py_DecRef",
    CALL: "PyObject_Vectorcall",
    FETCH_ERROR: "PyErr_Fetch",
    RESTORE_ERROR: "PyErr_Restore",
    LET_OTHERS: "PyEval_SaveThread",
    RESUME: "PyEval_RestoreThread",
    GET_LIST: "PyList_GetItem",
    GET_TUPLE: "PyTuple_GetItem",
}
_BOXES: dict[type, tuple[str, str]] = {
    list: ("PyList_New", "PyList_SetItem"),
    tuple: ("PyTuple_New", "PyTuple_SetItem"),
}

# The words of a plan: the thread that runs by it (0: none), what it needs to know, then the records of its arguments
# and outputs: dtype, rank, cell (0: none), who makes it (0: NumPy), dims.
(ARGUMENTS, OUTPUTS, _, BUSY, GATE, HELD, CHANGES, COUNTER, BASE, SPAN, WORDS, LAUNCHES) = range(12)
(LOOP, GIVEN, _, _, LETS_OTHERS, FAIL, GRANT, TOGETHER, MEMORY, RECORDS) = range(12, 22)
DTYPE, RANK, CELL, MAKER, DIMS = range(5)

# What `sched.host.variables` tells: whether someone takes or gives back some now, how often memory was replaced or
# forgotten, how many wait; and of variables that are taken together: how many direct calls hold them, how many others
# hold some so that they cannot be taken, how many rivals they have, and where it is said whose words those are: while
# a rival is held, they cannot be taken either.
TAKING, CHANGES_WORD, WAITING = range(3)
HOLDERS, BLOCKED, RIVALS, RIVALS_AT, TOGETHER_WORDS = range(5)

MOST_PLANS = 8  # of different arguments, that one callable keeps
NO_PLAN = (np.full(RECORDS, -1, np.int64), None)


@valueclass
class RunPlace:
    """Where a tape's run lies, how many launches it has, and what runs it: a loop, and three words to call it with."""

    span: int
    words: int
    launches: int
    loop: tuple[int, int, int, int]


class Method(ctypes.Structure):
    """Python's description of a function in C."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("text", ctypes.c_char_p),
    )


class StepWords(np.ndarray[Any, Any]):
    """The words that a step reads, as what it is a method of: they name places of this process."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise GraphError(
            f"{user_site()}: a compiled step is not pickled: compile it anew, in a session of that process"
        )


class Direct:
    """``call`` takes the values of a step's feeds and answers what ``fallback`` would.

    ``leaves`` says of each leaf of the answer which output of the tape it is, None for none; ``kind`` that the answer
    is the one leaf (None), or a list or tuple of the leaves; ``finish`` makes another form of a list of them.
    """

    def __init__(
        self,
        fallback: Callable[..., Any],
        leaves: Sequence[int | None],
        kind: type | None,
        finish: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._choice: list[Any] = [NO_PLAN] * MOST_PLANS
        self.call = fallback
        if available() and (kind is not None or len(leaves) == 1):
            self.call = self._made(fallback, leaves, kind, finish)

    def choose(self, plan: tuple[Any, ...]) -> None:
        """Run by this plan from now on where arguments are what it is for: made by `plan_words`."""
        others = [kept for kept in self._choice if kept[1] != plan[1]]
        self._choice[:] = ([plan, *others] + [NO_PLAN] * MOST_PLANS)[:MOST_PLANS]

    def _made(
        self, fallback: Any, leaves: Sequence[int | None], kind: type | None, finish: Callable[[list[Any]], Any] | None
    ) -> Callable[..., Any]:
        head = np.zeros(FIRST_LEAF + len(leaves), np.int64).view(StepWords)
        head[:FIRST_LEAF] = head_words(kind)
        head[CHOICE], head[FALLBACK] = id(self._choice), id(fallback)
        head[FINISH], head[LEAVES] = 0 if finish is None else id(finish), len(leaves)
        head[FIRST_LEAF:] = [-1 if leaf is None else leaf for leaf in leaves]
        return c_function(_method(), head, (self._choice, fallback, finish))


@valueclass
class RunTerms:
    """When and how runs of a plan take place.

    ``gate`` is one word, open while not 0. Runs are numbered by what ``counter`` iterates to, added to the word
    ``base``. ``held`` are the words of all variables, whose changes must stay ``changes``; ``together`` are those of
    the ones that are needed, whose memory ``memory`` keeps, which lives as long as there are no changes; ``grant`` is
    called where someone waits when they are given back.
    ``lets_others``: whether the GIL is let go meanwhile. ``fail(reached, status, number)`` raises for the run of that
    number, which stopped.
    """

    gate: Words
    counter: Any
    base: Words
    held: Words
    changes: int
    together: Words
    memory: tuple[Array, ...]
    grant: Callable[[], Any]
    lets_others: bool
    fail: Callable[[int, int, int], Any]


def plan_words(
    place: RunPlace,
    terms: RunTerms,
    arguments: Sequence[tuple[Spec, int]],
    outputs: Sequence[tuple[Spec, int, Callable[[], Array] | None]],
) -> tuple[Any, ...]:
    """A plan for `Direct.choose`: for arguments of these specs, each with the cell its address is put in (0: none).

    Outputs have cells too, and are made by NumPy or by who is given. A plan is its words, what it is for, and then all
    that must live as long as it does.
    """
    words = [0] * RECORDS
    words[ARGUMENTS], words[OUTPUTS] = len(arguments), len(outputs)
    near = terms.gate, terms.held, terms.base, terms.together
    words[GATE], words[HELD], words[BASE], words[TOGETHER] = map(ctypes.addressof, near)
    words[CHANGES], words[COUNTER], words[LETS_OTHERS] = terms.changes, id(terms.counter), int(terms.lets_others)
    words[FAIL], words[GRANT], words[MEMORY] = id(terms.fail), id(terms.grant), id(terms.memory)
    words[SPAN], words[WORDS], words[LAUNCHES] = place.span, place.words, place.launches
    words[LOOP : LOOP + 4] = place.loop
    dtypes = []
    for spec, cell, maker in (*((spec, cell, None) for spec, cell in arguments), *outputs):
        dtypes.append(native_dtype(spec))
        words += [id(dtypes[-1]), len(spec.concrete), cell, 0 if maker is None else id(maker), *spec.concrete]
    signature = tuple((spec.dtype, spec.concrete) for spec, _ in arguments)
    alive = *near, terms.counter, terms.grant, terms.fail
    return np.array(words, np.int64), signature, alive, dtypes, outputs


@cache
def head_words(kind: type | None) -> Words:
    """What all heads hold: objects and functions of Python's and NumPy's, those that make boxes of ``kind`` too."""
    head = (ctypes.c_int64 * FIRST_LEAF)()
    head[NONE], head[ARRAY_TYPE] = id(None), id(np.ndarray)
    for place, name in _FUNCTIONS.items():
        head[place] = _python(name)
    head[NEW_ARRAY], head[SCALAR] = _numpy(_NEW_ENTRY), _numpy(_RETURN_ENTRY)
    if kind is not None:
        head[NEW_BOX], head[SET] = map(_python, _BOXES[kind])
    return head


def c_function(method: Method, head: Array, alive: tuple[Any, ...]) -> Callable[..., Any]:
    """What calls the function that ``method`` describes, with ``head`` for its self. It keeps what it is given."""
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.py_object]
    call: Callable[..., Any] = make(ctypes.addressof(method), head, (*alive, method))
    return call


def native_dtype(spec: Spec) -> np.dtype[Any]:
    """The one object that arrays of the spec's dtype share."""
    return np.dtype(spec.dtype.type)


@cache
def available() -> bool:
    """Whether objects and arrays lie here as this file believes, and nothing but the GIL is needed between threads."""
    if sys.implementation.name != "cpython" or "t" in sys.abiflags or object.__basicsize__ != 16:
        return False
    try:
        version = ctypes.CFUNCTYPE(ctypes.c_uint)(_numpy(_VERSION_ENTRY))()
    except (ImportError, AttributeError, ValueError):
        return False
    return version == _ABI and _lies_as_believed(np.zeros((2, 3), np.float32)) and _lies_as_believed(np.ones(4)[::2])


def _lies_as_believed(array: Array) -> bool:
    at = id(array)
    rank = ctypes.c_int.from_address(at + ARRAY_RANK).value
    words = [ctypes.c_int64.from_address(at + byte).value for byte in (8, ARRAY_DATA, ARRAY_DIMS, ARRAY_DTYPE)]
    if rank != array.ndim or words[0] != id(np.ndarray) or words[1] != array.ctypes.data or words[3] != id(array.dtype):
        return False
    dims = tuple((ctypes.c_int64 * rank).from_address(words[2]))
    return dims == array.shape and ctypes.c_int.from_address(at + ARRAY_FLAGS).value == array.flags.num


def _python(name: str) -> int:
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0


def _numpy(entry: int) -> int:
    """The address of a function in NumPy's table for extension modules."""
    from numpy._core import _multiarray_umath  # type: ignore[attr-defined]  # where extension modules find it, too

    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(_python("PyCapsule_GetPointer"))
    table = pointer(_multiarray_umath._ARRAY_API, None)
    return int(ctypes.c_void_p.from_address(table + 8 * entry).value or 0)


@cache
def _method() -> Method:
    text = b"The values of the feeds, in order or by their names -> the fetches."
    return Method(b"step", DIRECT_PART.address(), FASTCALL, text)
