"""Names from NumPy, PyTorch, TensorFlow and JAX, answered by flowrt's own.

Law: words only, most of them `elsewhere`'s. Whoever lacks an attribute asks `absent` for the error to raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from flowrt.base.elsewhere import BEHIND, PAGES

KEYWORDS = """
    axis: dim dims axes dimension reduction_indices
    axes: perm dims permutation
    keepdims: keepdim keep_dims
    x: a input inputs tensor data value array image images
    a: x x1 input left
    b: y x2 other right
    values: tensors arrays inputs
    shape: size dims newshape new_shape output_shape
    strides: stride step window_strides
    dilations: dilation rate rhs_dilation
    padding: pad pads
    paddings: pad padding pad_width pads
    filters: filter kernel weight weights
    groups: feature_group_count
    window: kernel_size ksize pool_size window_shape size
    transpose_a: adjoint_a trans_a
    transpose_b: adjoint_b trans_b
    logits: input predictions y_pred
    labels: target targets y_true
    depth: num_classes classes n
    indices: index ids idx
    ids: indices input index
    shards: table params weight embeddings
    segment_ids: ids index indices
    num_segments: n size minlength
    num_partitions: n
    min: clip_value_min a_min low
    max: clip_value_max a_max high
    mean: loc
    stddev: std scale sigma
    low: minval min a
    high: maxval max b
    epsilon: eps variance_epsilon
    scale: weight gamma
    offset: bias beta
    bias: b biases
    rate: p prob dropout_prob
    value: fill_value constant_values
    repeats: reps multiples
    condition: cond mask pred
    pred: condition cond predicate
    true_fn: if_true
    false_fn: if_false
    cond_fn: cond condition
    body_fn: body
    loop_vars: init_val
    maximum_iterations: max_iterations
    fn: f func function
    xs: elems inputs
    init: initializer initial
    equation: subscripts
    dtype: type out_type
    rows: N num_rows
    columns: M num_columns
    start: low
    stop: end limit high
    step: delta
    lr: learning_rate
    beta1: betas b1 beta_1
    beta2: b2 beta_2
    decay: rho
    variables: var_list params parameters
    norm: max_norm clip_norm
"""
"""What arguments are called here, and what elsewhere."""


def keyword_hint(name: str, there: Sequence[str]) -> str:
    """Which of the arguments ``there`` is meant by ``name``: what is called so elsewhere, or nearly so here."""
    for line in KEYWORDS.strip().splitlines():
        here, _, names = line.strip().partition(": ")
        if here in there and name in names.split():
            return f"; write {here}="
    from difflib import get_close_matches

    near = get_close_matches(name, there, 1, 0.6)
    return f"; did you mean {near[0]}=?" if near else ""


@cache
def _page(namespace: str) -> dict[str, str]:
    """What to write here, by the name that is typed."""
    return {**_words(BEHIND.get(namespace, "")), **_words(namespace)}


def _words(namespace: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in PAGES.get(namespace, "").strip().splitlines():
        here, _, names = line.strip().rpartition(": ")
        found |= {name: here.replace("NAME", name) for name in names.split()}
    return found


def hint(namespace: str, name: str, there: Iterable[str] = ()) -> str:
    """What to write for ``name`` in ``namespace``, or for what of ``there`` it is a misspelling of; else nothing."""
    if name.startswith("_"):
        return ""
    here = _page(namespace).get(name)
    if here is not None:
        return f"; write {here}"
    from difflib import get_close_matches  # a millisecond that no right program needs

    near = get_close_matches(name, there, 1, 0.75)
    dot = "x" if namespace == "a tensor" else namespace
    return f"; did you mean {dot}.{near[0]}?" if near else ""


def answering(namespace: str, module: Mapping[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and the ``__dir__`` of a module that programs know as ``namespace``."""

    def __getattr__(name: str) -> Any:
        raise absent(namespace, module, name)

    def __dir__() -> list[str]:
        return sorted(module["__all__"])

    return __getattr__, __dir__


def absent(namespace: str, module: Mapping[str, Any], name: str) -> AttributeError:
    """The error for a ``name`` that the module does not have."""
    there = [known for known, value in module.items() if _is_public(known, value)]
    return AttributeError(f"module {module['__name__']!r} has no attribute {name!r}{hint(namespace, name, there)}")


def _is_public(name: str, value: Any) -> bool:
    if isinstance(value, ModuleType):
        return False  # which may ask here in its turn
    ours = str(getattr(value, "__module__", "")).startswith("flowrt.") and callable(value)
    return ours and not name.startswith("_") and not name.endswith("_grad")
