"""Python's operators and an array's usual methods, as calls of ops by their names.

What stands for a tensor (`Tensor`, `Variable`) takes them from here. It knows the registry, not graphs.
"""

from __future__ import annotations

from numbers import Number
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import numpy as np

from flowrt.base.errors import GraphError, user_site
from flowrt.base.familiar import hint
from flowrt.base.plain import common_dtype
from flowrt.base.spec import is_float
from flowrt.base.tracebacks import brief
from flowrt.indexing import indexed
from flowrt.op import REGISTRY, as_value

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowrt.base.spec import Axes
    from flowrt.op import DType


Answer = TypeVar("Answer")  # what ops answer: for checkers what stands for a tensor, or an array

NEVER_COPIED = (
    "a graph is neither pickled nor copied, nor are its tensors and variables: build it anew, by the same function; a "
    "checkpoint keeps what variables hold"
)
_WITH_ENTRIES = (Number, list, tuple)
_SYMBOLS = {  # NumPy's functions that operators of arrays call
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "truediv",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "power": "pow",
    "matmul": "matmul",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "equal": "eq",
    "not_equal": "ne",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
}
_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def _no_function(name: str, method: str) -> str:
    """Why NumPy's function ``name`` takes no tensor, and what to write."""
    fix = f"; write fr.{name}" if name in REGISTRY else hint("fr", name)
    return f"np.{name}{'' if method == '__call__' else '.' + method} takes arrays, not tensors{fix}"


def _before(op: str) -> Callable[[Operators[Answer], Any], Answer]:
    """The operator that stands for the op of that name, with what it is a method of before the other."""

    def apply(self: Operators[Answer], other: Any) -> Answer:
        return self._with(op, other)

    return apply


def _behind(op: str) -> Callable[[Operators[Answer], Any], Answer]:
    """The same with what it is a method of behind the other."""

    def apply(self: Operators[Answer], other: Any) -> Answer:
        made: Answer = REGISTRY[op](other, self)
        return made

    return apply


def _bits(name: str) -> Callable[[Operators[Answer], Any], Answer]:
    """The operator on bools, or on bits."""

    def apply(self: Operators[Answer], other: Any) -> Answer:
        both = [value.dtype if hasattr(value, "builder") else value for value in map(as_value, (self, other))]
        return self._with(f"{'logical' if common_dtype(both).kind == 'b' else 'bitwise'}_{name}", other)

    return apply


def _no_value(self: Operators[Answer], *settings: Any) -> NoReturn:
    raise GraphError(
        f"{user_site()}: {as_value(self)!r} is no number while the graph is built: session.run answers it, and "
        "fr.astype, fr.round and fr.while_loop go on with it in the graph"
    )


@brief
class Operators(Generic[Answer]):
    """Python's operators, slicing and an array's usual methods, for what stands for a tensor.

    ``==`` and ``!=`` compare entry by entry, so code that looks for a tensor among others asks with ``is``, or in a
    set or dict: hashing goes by identity.
    """

    __slots__ = ()

    @brief
    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        raise GraphError(f"{user_site()}: {NEVER_COPIED}")

    def __array_ufunc__(self, function: np.ufunc, method: str, *values: Any, **settings: Any) -> Any:
        """An array beside a tensor leaves the operator to the tensor; NumPy's functions have namesakes that are ops."""
        symbol = _SYMBOLS.get(function.__name__)
        if symbol is None or method != "__call__" or settings or len(values) != 2:
            raise GraphError(f"{user_site()}: {_no_function(function.__name__, method)}")
        left, right = values
        if isinstance(left, Operators):
            return getattr(left, f"__{symbol}__")(right)
        if symbol in _MIRRORED and isinstance(left, np.ndarray) and not left.ndim:
            left = left[()]  # NumPy's numbers compare as arrays
        return getattr(right, f"__{_MIRRORED.get(symbol, 'r' + symbol)}__")(left)

    if not TYPE_CHECKING:  # for checkers nothing answers what is not there

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{hint('a tensor', name, dir(type(self)))}")

    def __getitem__(self, key: Any) -> Answer:
        made: Answer = indexed(self, key)
        return made

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise GraphError(
            f"{user_site()}: a tensor never changes: fr.where(condition, value, x) makes another one, and a variable "
            "is written by assign, or row by row by scatter_update"
        )

    def __format__(self, spec: str) -> str:
        return str(self) if not spec else _no_value(self)

    def _with(self, name: str, *others: Any) -> Answer:
        made: Answer = REGISTRY[name](self, *others)
        return made

    __add__, __radd__ = _before("add"), _behind("add")
    __sub__, __rsub__ = _before("subtract"), _behind("subtract")
    __mul__, __rmul__ = _before("multiply"), _behind("multiply")
    __truediv__, __rtruediv__ = _before("divide"), _behind("divide")
    __floordiv__, __rfloordiv__ = _before("floor_divide"), _behind("floor_divide")
    __mod__, __rmod__ = _before("remainder"), _behind("remainder")
    __pow__, __rpow__ = _before("pow"), _behind("pow")
    __matmul__, __rmatmul__ = _before("matmul"), _behind("matmul")
    __lt__, __le__ = _before("less"), _before("less_equal")
    __gt__, __ge__ = _before("greater"), _before("greater_equal")
    __and__ = __rand__ = _bits("and")
    __or__ = __ror__ = _bits("or")
    __xor__ = __rxor__ = _bits("xor")

    def __eq__(self, other: object) -> Any:
        return self._with("equal", other) if _is_comparable(other) else NotImplemented

    def __ne__(self, other: object) -> Any:
        return self._with("not_equal", other) if _is_comparable(other) else NotImplemented

    if not TYPE_CHECKING:  # for checkers it has no number
        __float__ = __int__ = __complex__ = __index__ = __round__ = __trunc__ = _no_value

    __hash__ = object.__hash__  # by identity: tensors are keys of feeds

    def __invert__(self) -> Answer:
        dtype = as_value(self).dtype
        if is_float(dtype):
            raise GraphError(f"{user_site()}: ~ flips bools and the bits of integers, not {dtype}")
        if dtype.kind == "b":
            return self._with("logical_not")
        made: Answer = REGISTRY["subtract"](-self, 1)
        return made

    def __neg__(self) -> Answer:
        return self._with("negative")

    def __abs__(self) -> Answer:
        return self._with("abs")

    @property
    def T(self) -> Answer:
        """With its axes reversed."""
        return self._with("transpose")

    @property
    @brief
    def ndim(self) -> int:
        """How many axes it has; raises `SpecError` where not even that is known."""
        return len(as_value(self).shape)

    @property
    def size(self) -> Any:
        """How many entries it has: an int, or where only a step will know, an int64 scalar tensor."""
        spec = as_value(self).spec
        return spec.size if spec.known else REGISTRY["prod"](REGISTRY["shape_of"](self))

    def astype(self, dtype: DType) -> Answer:
        """Its entries as another dtype."""
        return self._with("astype", dtype)

    def reshape(self, *shape: Any) -> Answer:
        """Its entries in another shape, given as one argument or size by size; one size may be -1."""
        whole = len(shape) == 1 and (isinstance(shape[0], (list, tuple)) or np.ndim(as_value(shape[0])) == 1)
        return self._with("reshape", shape[0] if whole else shape)

    def sum(self, axis: Axes = None, dtype: DType | None = None, out: None = None, keepdims: bool = False) -> Answer:
        """The sum over ``axis``, of the entries as ``dtype`` if one is given."""
        return self._reduced("sum", axis, dtype, out, keepdims)

    def mean(self, axis: Axes = None, dtype: DType | None = None, out: None = None, keepdims: bool = False) -> Answer:
        """The mean over ``axis``, of the entries as ``dtype`` if one is given."""
        return self._reduced("mean", axis, dtype, out, keepdims)

    def max(self, axis: Axes = None, out: None = None, keepdims: bool = False) -> Answer:
        """The largest entry over ``axis``."""
        return self._reduced("max", axis, None, out, keepdims)

    def min(self, axis: Axes = None, out: None = None, keepdims: bool = False) -> Answer:
        """The smallest entry over ``axis``."""
        return self._reduced("min", axis, None, out, keepdims)

    def _reduced(self, name: str, axis: Any, dtype: Any, out: None, keepdims: bool) -> Answer:
        """Arguments as NumPy's methods have them, so that `np.sum` of a tensor is one, too."""
        if out is not None:
            raise GraphError(f"{user_site()}: {name} of a tensor makes another one and cannot write to out={out!r}")
        x = self if dtype is None else self.astype(dtype)
        made: Answer = REGISTRY[name](x, axis, keepdims)
        return made


def _is_comparable(other: object) -> bool:
    """Whether ``other`` has entries to compare with: numbers, arrays, lists, whatever stands for a tensor.

    Nothing else equals a tensor, as None and strings do not.
    """
    if isinstance(other, (str, bytes)):
        return False
    return isinstance(other, _WITH_ENTRIES) or any(hasattr(other, name) for name in ("__tensor__", "__array__"))


class NoValue:
    """What is taken for a value, and has none: what `assign` answers."""

    __slots__ = ()

    if not TYPE_CHECKING:

        @brief
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)  # Python asks, perhaps of a copy that is not filled yet
            raise AttributeError(self._says())

        @brief
        def _refuse(self, other: Any) -> NoReturn:
            raise GraphError(f"{user_site()}: {self._says()}")

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
        __matmul__ = __rmatmul__ = __pow__ = __rpow__ = _refuse

        def _says(self) -> str:
            return (
                f"{self!r} is an operation, which has no value: run it, or read what it wrote behind it: "
                "`with fr.control_dependencies([operation]): variable.read()`"
            )
