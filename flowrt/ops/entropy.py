"""What a model's answers are worth beside what they ought to be: cross entropies, and the ops that they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrt.base.errors import SpecError
from flowrt.base.locating import fitting, located
from flowrt.base.spec import Shape, Spec, is_float
from flowrt.ops.elementwise import astype, negative, sigmoid
from flowrt.ops.inference import broadcast, described, merged
from flowrt.ops.reduce import sum as sum_
from flowrt.ops.shape import expand_dims
from flowrt.ops.softmax import log_softmax, softmax, softmax_slope
from flowrt.ops.source import ones_like
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.graph import Node, Tensor, TensorOrArray
    from flowrt.typed import Operand, Result


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


@fitting
def cross_entropy(logits: Operand, labels: Operand, *, name: str | None = None) -> TensorOrArray:
    """`softmax_cross_entropy`, per example: ``fr.mean`` of it is what PyTorch calls so."""
    return softmax_cross_entropy(logits, labels, name=name)


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
    return softmax_slope(softmax(logits), d, -1) * expand_dims(dy, -1), None, sum_(d * each, -1)


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
    likely, each, weight = softmax(logits), expand_dims(dy, -1), sum_(labels, -1, True)
    dlogits = softmax_slope(likely, d, -1) * (each * weight)
    return dlogits, each * (sum_(d * likely, -1, True) - d), sum_(d * (likely * weight - labels), -1)


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
