"""Calls of ops with keywords that they do not have: each an error to checkers, and answered by the right one.

The checks of a whole repository find an unused ``type: ignore`` where a checker lets one pass.
"""

from collections.abc import Callable

import numpy as np

import flowrt as fr

X = np.ones((2, 3), "float32")
IMAGES, FILTERS = np.ones((1, 4, 4, 1), "float32"), np.ones((2, 2, 1, 1), "float32")

CALLS: list[tuple[str, Callable[[], object]]] = [
    ("strides", lambda: fr.nn.conv2d(IMAGES, FILTERS, stride=2)),  # type: ignore[call-arg]
    ("dilations", lambda: fr.nn.conv2d(IMAGES, FILTERS, dilation=2)),  # type: ignore[call-arg]
    ("window", lambda: fr.nn.max_pool2d(IMAGES, kernel_size=2)),  # type: ignore[call-arg]
    ("padding", lambda: fr.nn.avg_pool2d(IMAGES, 2, paddign="SAME")),  # type: ignore[call-arg]
    ("axis", lambda: fr.sum(X, dim=0)),  # type: ignore[call-arg]
    ("keepdims", lambda: fr.mean(X, 0, keepdim=True)),  # type: ignore[call-arg]
    ("axis", lambda: fr.nn.softmax(X, axes=-1)),  # type: ignore[call-arg]
    ("transpose_b", lambda: fr.matmul(X, X, adjoint_b=True)),  # type: ignore[call-arg]
    ("indices", lambda: fr.take(X, index=[0])),  # type: ignore[call-arg]
    ("depth", lambda: fr.one_hot([0, 1], num_classes=3)),  # type: ignore[call-arg]
    ("shape", lambda: fr.random.normal(size=(3,))),  # type: ignore[call-arg]
    ("stddev", lambda: fr.random.normal((3,), std=2.0)),  # type: ignore[call-arg]
    ("low", lambda: fr.random.uniform((3,), minval=0.5)),  # type: ignore[call-arg]
    ("value", lambda: fr.pad(X, 1, constant_values=1.0)),  # type: ignore[call-arg]
    ("value", lambda: fr.pad(X, 1, name="padded", vale=1.0)),  # type: ignore[call-arg]
    ("shape", lambda: fr.reshape(X, newshape=(3, 2))),  # type: ignore[call-arg]
    ("axes", lambda: fr.transpose(X, perm=(1, 0))),  # type: ignore[call-arg]
    ("values", lambda: fr.concat(tensors=[X, X])),  # type: ignore[call-arg]
    ("min", lambda: fr.clip(X, a_min=0.0)),  # type: ignore[call-arg]
    ("epsilon", lambda: fr.nn.layer_norm(X, eps=1e-3)),  # type: ignore[call-arg]
    ("rate", lambda: fr.nn.dropout(X, p=0.5)),  # type: ignore[call-arg]
    ("labels", lambda: fr.nn.softmax_cross_entropy(X, targets=[0, 1])),  # type: ignore[call-arg]
    ("dtype", lambda: fr.zeros((2,), type="int64")),  # type: ignore[call-arg]
    ("value", lambda: fr.full((2,), fill_value=1.0)),  # type: ignore[call-arg]
    ("num_segments", lambda: fr.segment_sum(X, [0, 1], size=2)),  # type: ignore[call-arg]
    ("bias", lambda: fr.nn.bias_add(X, b=np.ones(3))),  # type: ignore[call-arg]
]
