"""Random tensors, the same on every device: counter-based, so a value is a function of its key and its position.

The key is (seed, stream, step, iterations). The seed is the op's own, else its graph's, else the session's; the stream
is a hash of the name the op has in its graph, or, outside graphs, of the kind of draw; the step is the run's counter;
the iterations are the numbers of those of the loops around the op, outermost first: an input like any other, so it does
not matter who runs the loop. The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC'11).
"""

from __future__ import annotations

import hashlib
import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.attributes import frozen
from flowrt.base.errors import GraphError, SpecError
from flowrt.base.familiar import answering
from flowrt.base.locating import checked_seed, located
from flowrt.base.plain import as_dtype_of, is_whole
from flowrt.base.spec import as_dtype, is_float, is_half
from flowrt.graph import Graph
from flowrt.op import as_value, builder_for
from flowrt.ops.elementwise import add, astype, exp, minimum, multiply, remainder, subtract
from flowrt.ops.index import take
from flowrt.ops.inference import described, filled
from flowrt.ops.shape import expand_dims, reshape, stack
from flowrt.ops.sorting import argsort
from flowrt.ops.source import shape_of
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.spec import Spec
    from flowrt.graph import TensorOrArray
    from flowrt.op import DType
    from flowrt.typed import Operand, Result

__all__ = ["log_uniform", "normal", "permutation", "randint", "truncated_normal", "uniform"]

SEEDS = (1 << 63) - 1  # of a seed, what counts
_ALL = (1 << 64) - 1  # the bits that an integer is drawn by
_NO_ITERATIONS = frozen(np.zeros(0, np.int64))


def _check_iterations(iterations: Spec) -> None:
    if iterations.dtype != np.int64 or (iterations.dims is not None and iterations.rank != 1):
        raise SpecError(f"the iterations of the loops around random numbers are a vector of int64, got {iterations}")


def _sampled(dtype: DType, shape: Spec, iterations: Spec) -> Spec:
    _check_iterations(iterations)
    out = filled(dtype, shape)
    if not is_float(out.dtype):
        raise SpecError(f"random numbers are floats, got dtype {out.dtype}; use astype on the result")
    return out


@op(stateful=True, gradient=None)
def random_normal(
    shape: Operand,
    iterations: Operand,
    mean: float,
    stddev: float,
    dtype: DType = "float32",
    seed: int | None = None,
    stream: int = 0,
    first: int = 0,
    *,
    name: str | None = None,
) -> Result:
    """Samples of the normal distribution; see `normal`. They are a larger tensor's from its entry ``first`` on."""
    return _sampled(dtype, shape, iterations)


@op(stateful=True, gradient=None)
def random_uniform(
    shape: Operand,
    iterations: Operand,
    low: float,
    high: float,
    dtype: DType = "float32",
    seed: int | None = None,
    stream: int = 0,
    first: int = 0,
    *,
    name: str | None = None,
) -> Result:
    """Samples of the uniform distribution; see `uniform`. They are a larger tensor's from its entry ``first`` on."""
    if not low <= high:
        raise SpecError(f"low must not be above high, got {low} and {high}")
    return _sampled(dtype, shape, iterations)


@op(stateful=True, gradient=None)
def random_truncated_normal(
    shape: Operand,
    iterations: Operand,
    mean: float,
    stddev: float,
    dtype: DType = "float32",
    seed: int | None = None,
    stream: int = 0,
    first: int = 0,
    *,
    name: str | None = None,
) -> Result:
    """Samples within two standard deviations; see `truncated_normal`. They are a larger tensor's from ``first`` on."""
    return _sampled(dtype, shape, iterations)


@op(stateful=True, gradient=None)
def random_integers(
    shape: Operand,
    iterations: Operand,
    low: int,
    most: int,
    dtype: DType = "int64",
    seed: int | None = None,
    stream: int = 0,
    *,
    name: str | None = None,
) -> Result:
    """Integers from ``low`` to ``most``, which may be one; see `randint`."""
    _check_iterations(iterations)
    out = filled(dtype, shape)
    if out.dtype.kind not in "iu":
        raise SpecError(f"random integers are of an integer dtype, not {out.dtype}; use astype on the result")
    held = np.iinfo(out.dtype)
    if not held.min <= low <= most <= held.max:
        raise SpecError(f"{out.dtype} holds integers from {held.min} to {held.max}, got low={low}, high={most + 1}")
    return out


@located("normal")
def normal(
    shape: Operand,
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: DType = "float32",
    seed: int | None = None,
    *,
    name: str | None = None,
) -> TensorOrArray:
    """Samples of the normal distribution, new ones at every step, and in a loop at every iteration.

    ``mean`` and ``stddev`` are numbers.
    With a ``seed`` two runs of a program see the same values; outside a graph the same seed always gives the same.
    """
    seed, stream, iterations = _key("random_normal", shape, seed, name)
    mean, stddev = _number("mean", mean, dtype), _number("stddev", stddev, dtype)
    return random_normal(shape, iterations, mean, stddev, dtype, seed, stream, name=name)


@located("uniform")
def uniform(
    shape: Operand,
    low: float = 0.0,
    high: float = 1.0,
    dtype: DType = "float32",
    seed: int | None = None,
    *,
    name: str | None = None,
) -> TensorOrArray:
    """Samples from ``low`` up to ``high``, which is left out; new ones at every step, and in a loop at every iteration.

    With a ``seed`` two runs of a program see the same values; outside a graph the same seed always gives the same.
    """
    least, limit = _number("low", low, dtype), _number("high", high, dtype)
    seed, stream, iterations = _key("random_uniform", shape, seed, name)
    edge = _rounded_edge(least, limit, as_dtype(dtype))
    if edge is None:
        return random_uniform(shape, iterations, least, limit, dtype, seed, stream, name=name)
    return minimum(random_uniform(shape, iterations, least, limit, dtype, seed, stream), edge, name=name)


def _rounded_edge(least: float, limit: float, dtype: np.dtype[Any]) -> Any:
    """The largest number below ``limit`` in a dtype of 16 bits where numbers are rounded up to that; None elsewhere."""
    if not is_half(dtype):
        return None
    low, high = as_dtype_of(least, dtype), as_dtype_of(limit, dtype)
    return np.nextafter(high, low) if float(high) >= limit else None


@located("log_uniform")
def log_uniform(shape: Operand, classes: int, seed: int | None = None, *, name: str | None = None) -> TensorOrArray:
    """Classes, int64 from 0 up to ``classes``: c with probability ``log((c + 2) / (c + 1)) / log(classes + 1)``.

    So are words distributed that are numbered by falling frequency, nearly (Zipf's law). New ones are drawn as in
    `uniform`, each for itself. TensorFlow's log_uniform_candidate_sampler, with replacement.
    """
    if not is_whole(classes, 1):
        raise SpecError(f"classes must be a positive integer, got {classes!r}")
    classes = int(classes)
    drawn = shares("log_uniform", shape, seed, name, "float64")
    found = astype(subtract(exp(multiply(drawn, math.log(classes + 1))), 1.0), "int64")
    return minimum(found, np.int64(classes - 1))  # of what rounds up to it


@located("truncated_normal")
def truncated_normal(
    shape: Operand,
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: DType = "float32",
    seed: int | None = None,
    *,
    name: str | None = None,
) -> TensorOrArray:
    """Samples of the normal distribution that are within two standard deviations, as if others were drawn again.

    Else as `normal`. Of a ``stddev`` of 1 before it is cut off they have one of 0.88.
    """
    mean, stddev = _number("mean", mean, dtype), _number("stddev", stddev, dtype)
    seed, stream, iterations = _key("random_truncated_normal", shape, seed, name)
    return random_truncated_normal(shape, iterations, mean, stddev, dtype, seed, stream, name=name)


@located("randint")
def randint(
    shape: Operand,
    low: Operand,
    high: Operand,
    dtype: DType = "int64",
    seed: int | None = None,
    *,
    name: str | None = None,
) -> TensorOrArray:
    """Integers from ``low`` up to ``high``, which is left out; new ones at each step, and each iteration of a loop.

    No integer is likelier than another by more than 2**-32 of its probability. Either bound may be a scalar that a step
    computes: then other numbers are drawn, that holds of up to 2**32 integers, and nobody sees to it that there is one.
    With a ``seed`` two runs of a program see the same values; outside a graph the same seed always gives the same.
    """
    least, limit = _integer("low", low), _integer("high", high)
    seed, stream, iterations = _key("random_integers", shape, seed, name)
    if not (isinstance(least, int) and isinstance(limit, int)):
        bits = random_integers(shape, iterations, 0, _ALL, "uint64", seed, stream)
        drawn = remainder(bits, astype(subtract(limit, least), "uint64"))
        return add(astype(drawn, dtype), astype(least, dtype), name=name)
    if not least < limit:
        raise SpecError(f"there is no integer from low={least} up to high={limit}, which is left out")
    return random_integers(shape, iterations, least, limit - 1, dtype, seed, stream, name=name)


@located("permutation")
def permutation(x: Operand, seed: int | None = None, *, name: str | None = None) -> TensorOrArray:
    """The integers from 0 up to ``x``, an integer, in an order drawn by chance; or ``x``, its rows in such an order.

    All orders are as likely, but for 2**-64 of ``x`` squared; another comes at each step, and each iteration of a loop.
    With a ``seed`` two runs of a program see the same; outside a graph the same seed always gives the same.
    """
    spec = described(x)
    if spec.dims == () and spec.dtype.kind not in "iu":
        raise SpecError(f"an order is of so many integers, or of a tensor's slices, got {spec}")
    shape = reshape(x, (1,)) if spec.dims == () else shape_of(x)[:1]
    seed, stream, iterations = _key("random_integers", shape, seed, name, "permutation")
    order = argsort(random_integers(shape, iterations, 0, _ALL, "uint64", seed, stream))
    return order if spec.dims == () else take(x, order, name=name)


def _integer(what: str, value: Any) -> Any:
    """A bound: an int, or a scalar tensor of integers."""
    found = as_value(value)
    if hasattr(found, "builder") and found.dtype.kind in "iu" and found.spec.dims in (None, ()):
        return found
    try:
        return operator.index(found)
    except (TypeError, GraphError):
        first = "; the shape comes first" if isinstance(value, (tuple, list)) else ""
        raise SpecError(f"{what} is an integer, not {value!r}{first}") from None


def _number(what: str, value: Any, dtype: DType) -> float:
    """A number of Python's that a dtype of floats holds."""
    try:
        number = float(value)
    except (TypeError, ValueError, GraphError):
        raise SpecError(f"{what} is a number, not {value!r}; scale and shift the result for a tensor") from None
    if not math.isfinite(number) or (what == "stddev" and number < 0):
        raise SpecError(f"{what} is a finite number{' from 0 up' if what == 'stddev' else ''}, got {value!r}")
    if is_float(as_dtype(dtype)):
        as_dtype_of(number, as_dtype(dtype))  # raises where that does not hold it
    return number


def shares(kind: str, shape: Any, seed: int | None, name: str | None, dtype: str = "float32") -> Any:
    """Samples from 0 up to 1 for an op of another ``kind``, whose draws outside a graph are its own."""
    seed, stream, iterations = _key("random_uniform", shape, seed, name, kind)
    return random_uniform(shape, iterations, 0.0, 1.0, dtype, seed, stream, name=name)


def _key(
    op_name: str, shape: Any, seed: int | None, name: str | None, kind: str | None = None
) -> tuple[int | None, int, Any]:
    """The seed, the stream and the iterations for an op about to be built.

    Outside a graph no name tells draws of one seed apart: there each kind has a stream, which begins anew at each call.
    The builder seeds those that are given no seed.
    """
    items = shape if isinstance(shape, (tuple, list)) else [shape]
    builder = builder_for([as_value(item) for item in items])
    seed = checked_seed(seed)
    if not isinstance(builder, Graph):
        return (None if seed is None else seed & SEEDS, stream_of(kind or op_name), _NO_ITERATIONS)
    seed = builder.seed if seed is None else seed
    unique = builder.unique_name(f"{name or op_name}#stream")  # numbered as the nodes' names are, and apart from them
    return None if seed is None else seed & SEEDS, stream_of(unique), _iterations(builder)


def stream_of(name: str) -> int:
    """The stream of what bears that name."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & SEEDS


def _iterations(graph: Graph) -> Any:
    iterations = graph.iterations()
    if len(iterations) < 2:
        return expand_dims(iterations[0], 0) if iterations else _NO_ITERATIONS
    return stack(iterations)


if not TYPE_CHECKING:
    __getattr__, __dir__ = answering("fr.random", globals())
