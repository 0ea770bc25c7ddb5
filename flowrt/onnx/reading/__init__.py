"""What ONNX's nodes mean: a function for each op, by families, and who goes through a model with them.

Law: a function here gets a `NodeCall` and answers what its node does, or raises `Unreadable`. Values are tensors,
or plain arrays where a model says them itself: what hangs on these alone is computed while a model is loaded, so that
shapes are known. It follows the operator of every opset from 13 on; what differs is asked of `NodeCall.opset`.
"""

from flowrt.onnx.reading import (
    control,
    elementwise,
    images,
    integers,
    moving,
    norms,
    products,
    recurrent,
    reductions,
    resizing,
)

__all__ = [
    "control",
    "elementwise",
    "images",
    "integers",
    "moving",
    "norms",
    "products",
    "recurrent",
    "reductions",
    "resizing",
]
