"""What neural networks are made of: pooling and the losses here, and what the files beside it hold.

Images are NHWC (batch, height, width, channels). The two ops below pooling are each other's gradients, so every order
of derivative is at hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrt.base.errors import SpecError
from flowrt.base.familiar import answering
from flowrt.base.locating import located
from flowrt.base.spec import Shape, Spec, is_float, pair, sliding
from flowrt.ops.activation import elu, gelu, leaky_relu, silu, softplus
from flowrt.ops.attention import attention
from flowrt.ops.conv import check_result, conv2d, conv2d_transpose
from flowrt.ops.elementwise import astype, negative, relu, sigmoid, tanh
from flowrt.ops.gru import gru
from flowrt.ops.inference import as_float, broadcast, described, filled, merged
from flowrt.ops.layers import batch_norm, bias_add, dropout, embedding, embedding_lookup, layer_norm
from flowrt.ops.moments import moments
from flowrt.ops.recurrent import lstm
from flowrt.ops.reduce import sum
from flowrt.ops.sampled import sampled_softmax
from flowrt.ops.shape import expand_dims
from flowrt.ops.softmax import log_softmax, softmax, softmax_slope
from flowrt.ops.source import ones_like, shape_of
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.spec import Padding, Pair
    from flowrt.graph import Node, Tensor, TensorOrArray
    from flowrt.typed import Operand, Result

__all__ = [
    "attention",
    "avg_pool2d",
    "batch_norm",
    "bias_add",
    "conv2d",
    "conv2d_transpose",
    "dropout",
    "elu",
    "embedding",
    "embedding_lookup",
    "gelu",
    "gru",
    "layer_norm",
    "leaky_relu",
    "log_softmax",
    "lstm",
    "max_pool2d",
    "moments",
    "relu",
    "sampled_softmax",
    "sigmoid",
    "sigmoid_cross_entropy",
    "silu",
    "softmax",
    "softmax_cross_entropy",
    "softplus",
    "tanh",
]


@op
def max_pool2d(
    x: Operand, window: Pair = 2, strides: Pair | None = None, padding: Padding = "VALID", *, name: str | None = None
) -> Result:
    """The largest entry of every window of images (NHWC), per channel; NaN where the window holds one.

    ``window`` and ``strides`` (the window if None) are an integer or a pair; ``padding`` is as in `conv2d`, and what
    it adds is never the largest. The gradient goes to the first of equal entries.
    """
    return Spec(x.dtype, _pooled(x, window, strides, padding))


@max_pool2d.gradient
def max_pool2d_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    return (max_pool2d_spread(node.inputs[0], dy, *_pool_attrs(node)),)


def _pooled(x: Spec, window: Any, strides: Any, padding: Any) -> Shape:
    size = pair("window", window)
    if x.dtype == bool:
        raise SpecError(f"x must hold numbers, got {x}; use astype")
    if x.dims is not None and x.rank != 4:
        raise SpecError(f"x must have 4 axes (batch, height, width, channels), got {x}")
    batch, height, width, channels = x.dims or (None,) * 4
    if height == 0 or width == 0:
        raise SpecError(f"the largest of no entries is not defined: {x}")
    down, across = sliding((height, width), size, size if strides is None else strides, 1, padding)
    if not isinstance(padding, str) and any(edge >= size[i] for i in (0, 1) for edge in padding[i]):
        raise SpecError(f"padding {padding} must be smaller than the window {size}; else windows may be empty")
    return (batch, down.count, across.count, channels)


def _pool_attrs(node: Node) -> tuple[Any, ...]:
    return tuple(node.attrs[k] for k in ("window", "strides", "padding"))


@op
def max_pool2d_spread(
    x: Operand, dy: Operand, window: Pair = 2, strides: Pair | None = None, padding: Padding = "VALID"
) -> Result:
    """Zeros shaped like ``x`` with every entry of ``dy`` added where its window of ``x`` is largest."""
    check_result(dy, _pooled(x, window, strides, padding))
    return Spec(dy.dtype, x.dims)


@max_pool2d_spread.gradient
def max_pool2d_spread_grad(node: Node, dx: Tensor) -> tuple[Any, ...]:
    return None, max_pool2d_pick(node.inputs[0], dx, *_pool_attrs(node))


@op(gradient=lambda node, dy: (None, max_pool2d_spread(node.inputs[0], dy, *_pool_attrs(node))))
def max_pool2d_pick(
    x: Operand, values: Operand, window: Pair = 2, strides: Pair | None = None, padding: Padding = "VALID"
) -> Result:
    """The entries of ``values``, shaped like ``x``, from where every window of ``x`` is largest."""
    if x.dims is not None and values.dims is not None:
        merged([x.dims, values.dims], [x, values])
    return Spec(values.dtype, _pooled(x, window, strides, padding))


@op
def avg_pool2d(
    x: Operand, window: Pair = 2, strides: Pair | None = None, padding: Padding = "VALID", *, name: str | None = None
) -> Result:
    """The mean of every window of images (NHWC), per channel; of integers in float64.

    The arguments are `max_pool2d`'s. What ``padding`` adds is not counted: a window at the edge is the mean of the
    entries that it really holds.
    """
    return Spec(as_float(x).dtype, _pooled(x, window, strides, padding))


@avg_pool2d.gradient
def avg_pool2d_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    return (avg_pool2d_spread(dy, shape_of(node.inputs[0]), *_pool_attrs(node)),)


@op(gradient=lambda node, dx: (avg_pool2d(dx, *_pool_attrs(node)), None))
def avg_pool2d_spread(
    dy: Operand, shape: Operand, window: Pair = 2, strides: Pair | None = None, padding: Padding = "VALID"
) -> Result:
    """The gradient of `avg_pool2d` for its images, of ``shape``: each window's shared evenly by its entries."""
    out = filled(dy.dtype, shape)
    check_result(dy, _pooled(out, window, strides, padding))
    return out


@located("softmax_cross_entropy")
def softmax_cross_entropy(logits: Operand, labels: Operand, *, name: str | None = None) -> TensorOrArray:
    """The cross entropy between ``labels`` and the softmax of ``logits`` [..., classes], per example: [...].

    ``labels`` are classes, integers [...] from 0 to classes - 1 (any other fails the step), or weights [..., classes].
    """
    given, told = described(logits), described(labels)
    counted = told.dtype.kind in "biu"
    if counted and (given.dims is None or told.dims is None or told.rank != given.rank):
        return class_cross_entropy(logits, labels, name=name)
    return _weighted_entropy(logits, astype(labels, given.dtype) if counted else labels, name=name)


def _check_logits(logits: Spec) -> None:
    if not is_float(logits.dtype) or logits.dims == ():
        raise SpecError(f"logits must be floating, with the classes along the last axis, got {logits}")


def _check_classes(logits: Spec, labels: Spec) -> Shape | None:
    """The examples' shape, where ``labels`` are integers."""
    _check_logits(logits)
    if labels.dtype.kind not in "iu":
        raise SpecError(f"labels must be integers, got {labels}")
    if logits.dims is None:
        return labels.dims
    examples = Spec(labels.dtype, logits.shape[:-1])
    if labels.dims is not None and not examples.accepts(labels.dtype, labels.dims):
        raise SpecError(f"labels of {logits} must be {examples} or have {logits.rank} axes, got {labels}")
    return examples.dims if labels.dims is None else merged([examples.dims, labels.dims], [examples, labels])


@op
def class_cross_entropy(logits: Operand, labels: Operand, *, name: str | None = None) -> Result:
    """`softmax_cross_entropy` where labels are integers."""
    return Spec(logits.dtype, _check_classes(logits, labels))


@class_cross_entropy.gradient
def class_cross_entropy_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    logits, labels = node.inputs
    return class_cross_entropy_slope(logits, labels, dy), None


@op
def class_cross_entropy_slope(logits: Operand, labels: Operand, dy: Operand) -> Result:
    """The gradient of `class_cross_entropy` for the logits: the softmax, less 1 at the label, times ``dy``."""
    examples = _check_classes(logits, labels)
    return Spec(logits.dtype, _slope(logits, Spec(dy.dtype, examples), dy))


def _slope(logits: Spec, examples: Spec, dy: Spec) -> Shape | None:
    """The shape of a gradient for the logits, given that of the losses of the examples."""
    dims = [d for d in (None if logits.dims is None else logits.shape[:-1], examples.dims, dy.dims) if d is not None]
    found = merged(dims, [logits, examples, dy]) if dims else None
    return None if found is None or logits.dims is None else (*found, logits.dims[-1])


@class_cross_entropy_slope.gradient
def class_cross_entropy_slope_grad(node: Node, d: Tensor) -> tuple[Any, ...]:
    logits, labels, dy = node.inputs
    each = class_cross_entropy_slope(logits, labels, ones_like(dy))
    return softmax_slope(softmax(logits), d, -1) * expand_dims(dy, -1), None, sum(d * each, -1)


@op(name="cross_entropy", promote=True)
def _weighted_entropy(logits: Operand, labels: Operand, *, name: str | None = None) -> Result:
    """`softmax_cross_entropy` where labels are weights of all classes."""
    _check_logits(logits)
    dims = merged([logits.dims, labels.dims], [logits, labels])
    return Spec(logits.dtype, None if dims is None else dims[:-1])


@_weighted_entropy.gradient
def weighted_entropy_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    logits, labels = node.inputs
    return cross_entropy_slope(logits, labels, dy), negative(expand_dims(dy, -1) * log_softmax(logits))


@op(promote=True)
def cross_entropy_slope(logits: Operand, labels: Operand, dy: Operand) -> Result:
    """The gradient of `cross_entropy` for the logits: the softmax times the labels' sum, less these, times ``dy``."""
    _check_logits(logits)
    whole = Spec(logits.dtype, merged([logits.dims, labels.dims], [logits, labels]))
    return Spec(logits.dtype, _slope(whole, dy, dy))


@cross_entropy_slope.gradient
def cross_entropy_slope_grad(node: Node, d: Tensor) -> tuple[Any, ...]:
    logits, labels, dy = node.inputs
    likely, each, weight = softmax(logits), expand_dims(dy, -1), sum(labels, -1, True)
    dlogits = softmax_slope(likely, d, -1) * (each * weight)
    return dlogits, each * (sum(d * likely, -1, True) - d), sum(d * (likely * weight - labels), -1)


@located("sigmoid_cross_entropy")
def sigmoid_cross_entropy(logits: Operand, labels: Operand, *, name: str | None = None) -> TensorOrArray:
    """The cross entropy between ``labels``, probabilities, and the sigmoid of ``logits``, entry by entry.

    Computed as ``max(x, 0) - x * label + log(1 + exp(-abs(x)))``, which neither overflows nor loses small results.
    """
    given, told = described(logits), described(labels)
    if not is_float(given.dtype):
        raise SpecError(f"logits must be floating, got {given}; use astype")
    counted = told.dtype.kind in "biu"
    return _entry_entropy(logits, astype(labels, given.dtype) if counted else labels, name=name)


@op(name="binary_cross_entropy", promote=True)
def _entry_entropy(logits: Operand, labels: Operand, *, name: str | None = None) -> Result:
    """`sigmoid_cross_entropy` where labels are floats."""
    return Spec(logits.dtype, broadcast(logits, labels))


@_entry_entropy.gradient
def entry_entropy_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    logits, labels = node.inputs
    return dy * (sigmoid(logits) - labels), negative(dy * logits)


if not TYPE_CHECKING:
    __getattr__, __dir__ = answering("fr.nn", globals())
