"""Plain data as arrays: which dtype numbers, lists and arrays have, alone and beside tensors.

Arrays have a dtype of their own. Numbers, Python's and NumPy's, and lists of them are *weak*: beside a tensor or an
array they only say what kind they are of (bool, integer, float), and take the dtype that comes to. One of NumPy's whose
kind is higher than all of theirs, as a float beside integers, says which dtype of its kind it is, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, TypeGuard

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.spec import THE_DTYPES, Spec, holds, is_float, is_half, kind_of, largest, spec_of

_PYTHON = (bool, int, float)
_EXAMPLES: dict[str, Any] = {"b": np.dtype(bool), "u": 0, "i": 0, "f": 0.0}  # of a kind of weak numbers, for NumPy
_ALWAYS_FITS = float(np.finfo(np.float32).max)
_FLOAT16 = np.dtype(np.float16)
RANKS = {"b": 0, "u": 1, "i": 1, "f": 2}


def default_array(value: Any) -> np.ndarray[Any, Any]:
    """``value`` as an array; Python floats become float32, ints int64. Raises `SpecError` for a float beyond those."""
    array = _as_written(value)
    if _is_narrower(value, array):
        return narrowed(array, np.dtype(np.float32), "; NumPy's numbers say what they are: np.float64(...)")
    return array


def is_whole(value: Any, least: int) -> TypeGuard[int]:
    """Whether ``value`` is a whole number from ``least`` up, of Python's or NumPy's; a bool is none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


def is_number(value: Any, least: float = 0.0) -> TypeGuard[float]:
    """Whether ``value`` is a real number from ``least`` up that a float can be; neither a bool nor NaN is one."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and float(value) >= least
    except OverflowError:
        return False


def default_dtype(value: Any) -> np.dtype[Any]:
    """The dtype of `default_array`, though that may not hold all numbers: beside a wider one they are of that."""
    array = _as_written(value)
    return np.dtype(np.float32) if _is_narrower(value, array) else array.dtype


def default_spec(value: Any) -> Spec:
    """The spec of `default_array`, likewise."""
    array = _as_written(value)
    return Spec(np.float32, array.shape) if _is_narrower(value, array) else spec_of(array)


def _is_narrower(value: Any, array: np.ndarray[Any, Any]) -> bool:
    """Whether ``value``, which NumPy makes this array of, is of Python's floats alone."""
    return array.dtype == np.float64 and not isinstance(value, (np.ndarray, np.generic)) and not _holds_numpy(value)


def _as_written(value: Any) -> np.ndarray[Any, Any]:
    """What NumPy makes of ``value``; raises `SpecError` for what is no tensor."""
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(unmasked(value))
    else:
        try:
            array = np.asarray(value)
        except (ValueError, OverflowError) as error:
            raise SpecError(f"{shortened(value)} is not a tensor: {error}") from None
    if not (holds(array.dtype) or holds(array.dtype.newbyteorder("="))):
        raise SpecError(f"{shortened(value)} is not a tensor: {_why_none(value, array)}")
    return array


def _why_none(value: Any, array: np.ndarray[Any, Any]) -> str:
    """Why there is no tensor of the array that NumPy makes of ``value``."""
    if array.dtype == object and _holds_none(value):
        return "None stands in it; where that is a size that only a step knows, take it from fr.shape_of(x)"
    if array.dtype == object and _is_integer(value):
        return "integers have at most 64 bits"
    fix = "; convert it with .astype" if array.dtype.kind == "f" else ""
    return f"its dtype would be {array.dtype}, and {THE_DTYPES}{fix}"


def narrowed(array: np.ndarray[Any, Any], dtype: np.dtype[Any], fix: str = "") -> np.ndarray[Any, Any]:
    """``array`` as a ``dtype`` of no lower kind; raises `SpecError`, with a ``fix``, for an entry that is beyond it."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        found = array.astype(dtype.type)  # not the dtype: plans go by the one object that arrays share
    if is_float(dtype) and np.isfinite(found).all():  # as most are
        return found
    beyond = np.isinf(found) & np.isfinite(array) if is_float(dtype) else found != array
    if beyond.any():
        raise SpecError(f"{array[beyond][0]} does not fit {dtype}, which holds {_range(dtype)}{fix}")
    return found


def unmasked(array: Any) -> Any:
    """``array``, none of whose entries is masked: a tensor would hold what lies below the mask."""
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise SpecError("entries of the array are masked; fill them, with .filled(value)")
    return array


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, (list, tuple)) and any(map(_is_integer, value)))


def _holds_none(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(item is None or _holds_none(item) for item in value)


def _holds_numpy(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_numpy(item) for item in value)
    return isinstance(value, (np.ndarray, np.generic))


def _holds_array(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_array(item) for item in value)
    return isinstance(value, np.ndarray)


def is_weak(value: Any) -> bool:
    """Whether ``value`` takes the dtype of what stands beside it: a number, or a list of numbers."""
    return isinstance(value, (*_PYTHON, np.generic)) or (isinstance(value, (list, tuple)) and not _holds_array(value))


def shortened(value: Any) -> str:
    """``value`` as errors show it."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def common_dtype(values: Sequence[Any]) -> np.dtype[Any]:
    """NumPy's result type of dtypes, arrays, and numbers, which are weak; numbers alone are float32 or int64.

    Among numbers alone, those of NumPy and lists say what they are and Python's are weak, as in NumPy.
    """
    strong: list[Any] = []
    weak: list[Any] = []
    for value in values:
        if isinstance(value, np.dtype):
            strong.append(value)
        elif is_weak(value):
            weak.append(value)
        else:
            strong.append(default_dtype(value))
    if strong:
        rank = max(RANKS[kind_of(dtype)] for dtype in strong)
        strong += [value.dtype for value in weak if _says_more(value, rank)]
        return _promoted(tuple(strong), tuple(map(_kind, weak)))
    numbers = [value for value in weak if isinstance(value, _PYTHON) and not isinstance(value, np.generic)]
    telling = [default_dtype(value) for value in weak if not any(value is number for number in numbers)]
    if telling:
        return _promoted(tuple(telling), tuple(map(_kind, numbers)))
    found = np.result_type(*[default_dtype(number) for number in numbers])
    return np.dtype(np.float32) if found.kind == "f" else found


def _says_more(value: Any, rank: int) -> bool:
    """Whether ``value`` is a number of NumPy's of a dtype whose kind is above ``rank``."""
    return isinstance(value, np.generic) and holds(value.dtype) and RANKS[kind_of(value.dtype)] > rank


@lru_cache(1024)
def _promoted(strong: tuple[np.dtype[Any], ...], weak: tuple[str, ...]) -> np.dtype[Any]:
    """The result type of dtypes and of weak numbers of these kinds.

    NumPy's, where bfloat16 is to others what float16 is; both together make float32.
    """
    halves = {dtype for dtype in strong if is_half(dtype)}
    both = [np.float32] if len(halves) > 1 else []
    known = [_FLOAT16 if is_half(dtype) else dtype for dtype in strong]
    found = np.result_type(*known, *both, *[_EXAMPLES[kind] for kind in weak])
    return halves.pop() if found == _FLOAT16 and halves else found


def _kind(value: Any) -> str:
    """The kind of a weak value's numbers."""
    if isinstance(value, bool):
        return "b"
    if isinstance(value, int):
        return "i"
    if isinstance(value, float):
        return "f"
    return kind_of(default_dtype(value)) if isinstance(value, (list, tuple)) else _number_kind(value)


def _number_kind(number: np.generic) -> str:
    if number.dtype.kind not in RANKS:
        default_dtype(number)  # raises, where that is not bfloat16
    return kind_of(number.dtype)


def as_dtype_of(value: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Plain data as an array of ``dtype``; raises `SpecError` for a number beyond what that can hold.

    An array is cast as NumPy does; a float's fraction is lost in an integer dtype.
    """
    if not is_weak(value):
        return default_array(value).astype(dtype)
    try:
        if type(value) in _PYTHON and is_float(dtype) and not abs(value) > _always_fits(dtype):
            return np.array(value, dtype)
        plain = value if type(value) is int else np.asarray(value).tolist()  # NumPy's own numbers would wrap around
        with np.errstate(over="raise", invalid="raise"):
            return np.array(plain, dtype) if not is_half(dtype) else _halves(plain, dtype)
    except (OverflowError, FloatingPointError):
        raise SpecError(
            f"{shortened(value)} does not fit {dtype}, which holds {_range(dtype)}; use a wider dtype, with astype"
        ) from None
    except ValueError as error:
        raise SpecError(f"{shortened(value)} is not a tensor of {dtype}: {error}") from None


def _halves(plain: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Plain numbers as floats of 16 bits; raises `OverflowError` for one beyond them, where NumPy makes infinity."""
    wide = np.array(plain, np.float64)
    with np.errstate(over="ignore"):
        found = wide.astype(dtype.type)
    if np.any(np.isinf(found) & np.isfinite(wide)):
        raise OverflowError
    return found


def _always_fits(dtype: np.dtype[Any]) -> float:
    """Up to what size numbers fit ``dtype``, whatever they are rounded to."""
    return largest(dtype) if is_half(dtype) else _ALWAYS_FITS


def _range(dtype: np.dtype[Any]) -> str:
    if is_float(dtype):
        return f"numbers up to {largest(dtype):.3g}, and inf"
    bounds = np.iinfo(dtype)
    return f"integers from {bounds.min} to {bounds.max}"


def widened(values: Sequence[Any], dtype: np.dtype[Any]) -> np.dtype[Any]:
    """``dtype``, or a wider one of its kind where a number among ``values`` needs that."""
    wide = np.dtype(np.float64 if is_float(dtype) else np.int64)
    if dtype.itemsize == wide.itemsize or all(fits(value, dtype) for value in values if is_weak(value)):
        return dtype
    return wide


def fits(value: Any, dtype: np.dtype[Any]) -> bool:
    """Whether ``dtype`` holds numbers as large as the weak ``value``."""
    if type(value) in _PYTHON and is_float(dtype) and not is_half(dtype):
        return math.isinf(value) or not abs(value) > _ALWAYS_FITS
    try:
        as_dtype_of(value, dtype)
    except SpecError:
        return False
    return True


def takes(value: Any, dtype: np.dtype[Any]) -> bool:
    """Whether a tensor of ``dtype`` beside ``value`` keeps its dtype: that is weak, and of no higher kind."""
    return is_weak(value) and RANKS[_kind(value)] <= RANKS[kind_of(dtype)]


def fitting_array(value: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Plain data as an array of ``dtype``; raises `SpecError` where that would lose a fraction, a sign or a size.

    Floats may lose precision: a float64 array is taken for float32.
    """
    array = _as_written(value)
    out = as_dtype_of(value, dtype)
    if RANKS[kind_of(array.dtype)] > RANKS[kind_of(dtype)] or (dtype.kind in "iu" and not np.array_equal(out, array)):
        raise SpecError(
            f"{shortened(value)}, {default_dtype(value)}, does not fit {dtype}; convert it with .astype first"
        )
    return out
