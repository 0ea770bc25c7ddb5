"""What neural networks are made of: a space of names, which are explained where they lie, in the files beside it."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from flowrt.base.familiar import answering as _answering
from flowrt.ops.activation import elu, gelu, leaky_relu, silu, softplus
from flowrt.ops.attention import attention
from flowrt.ops.conv import conv2d, conv2d_transpose
from flowrt.ops.elementwise import relu, sigmoid, tanh
from flowrt.ops.entropy import cross_entropy, sigmoid_cross_entropy, softmax_cross_entropy
from flowrt.ops.gru import gru
from flowrt.ops.layers import batch_norm, bias_add, dropout, embedding, embedding_lookup, layer_norm
from flowrt.ops.moments import moments
from flowrt.ops.pooling import avg_pool2d, max_pool2d
from flowrt.ops.recurrent import lstm
from flowrt.ops.sampled import sampled_softmax
from flowrt.ops.softmax import log_softmax, softmax

__all__ = [
    "attention",
    "avg_pool2d",
    "batch_norm",
    "bias_add",
    "conv2d",
    "conv2d_transpose",
    "cross_entropy",
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

if not _TYPE_CHECKING:
    __getattr__, __dir__ = _answering("fr.nn", globals())
