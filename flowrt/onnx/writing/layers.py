"""Products, convolutions, pools, and the layers that ONNX has operators for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrt.base.spec import is_float, pair
from flowrt.onnx.writing.elementwise import FIRST, channels_last
from flowrt.onnx.writing.writer import AppliedOp, Unwritable, writes


def _last_two(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


@writes("matmul")
def matmul(one: AppliedOp) -> str:
    dtype = one.out.dtype
    wide = dtype if is_float(dtype) or dtype.itemsize >= 4 else np.dtype(np.int32)
    sides = []
    for n, turned in enumerate((one.attrs["transpose_a"], one.attrs["transpose_b"])):
        name = one.input_as(wide, n)
        sides.append(one.transposed(name, _last_two(one.rank(n))) if turned else name)
    made = one.add("MatMul", *sides)
    if dtype == np.bool_:
        return one.add("Not", one.add("Equal", made, one.constant(0, wide)))
    return one.cast(made, wide, dtype)


@writes("matmul_int8")
def matmul_int8(one: AppliedOp) -> str:
    return one.add("MatMulInteger", one.inputs[0], one.transposed(one.inputs[1], _last_two(one.rank(1))))


def images_first(one: AppliedOp) -> str:
    """The images that are its first input, with their channels first."""
    name = one.inputs[0]
    found = one.writer.shared.channels_first.get(name)
    if found is None:
        found = one.writer.shared.channels_first[name] = one.transposed(name, FIRST)
    return found


def _sliding(one: AppliedOp) -> dict[str, Any]:
    padding = one.attrs["padding"]
    if isinstance(padding, str):
        return {"auto_pad": "SAME_UPPER" if padding == "SAME" else "VALID"}
    return {"pads": [*[before for before, _ in padding], *[after for _, after in padding]]}


def _kernels(one: AppliedOp, index: int, order: Sequence[int]) -> str:
    return one.transposed(one.inputs[index], order)


@writes("conv2d")
def conv2d(one: AppliedOp) -> str:
    filters = _kernels(one, 1, (3, 2, 0, 1))
    made = one.add(
        "Conv",
        images_first(one),
        filters,
        strides=list(pair("strides", one.attrs["strides"])),
        dilations=list(pair("dilations", one.attrs["dilations"])),
        group=one.attrs["groups"],
        **_sliding(one),
    )
    return channels_last(one, made)


@writes("conv2d_input_grad")
def conv2d_input_grad(one: AppliedOp) -> str:
    """`conv2d_transpose`: what ONNX calls by that name, where all sizes are known."""
    dims, given, kernel = one.out.dims, one.specs[0].dims, one.specs[1].dims
    if None in (dims, given, kernel) or None in (*dims[1:3], *given[1:3], *kernel[:2]):  # type: ignore[index]
        raise Unwritable("the sizes of the images that it makes must be known")
    strides, dilations = pair("strides", one.attrs["strides"]), pair("dilations", one.attrs["dilations"])
    edges = []
    for axis in (0, 1):
        reached = (given[axis + 1] - 1) * strides[axis] + (kernel[axis] - 1) * dilations[axis] + 1  # type: ignore[index,operator]
        whole = dims[axis + 1]  # type: ignore[index]
        padding = one.attrs["padding"]
        if padding == "VALID":
            before, after = 0, reached - whole  # type: ignore[operator]
        elif padding == "SAME":
            total = max(reached - whole, 0)  # type: ignore[operator]
            before, after = total // 2, reached - whole - total // 2  # type: ignore[operator]
        else:
            before, after = padding[axis][0], reached - whole - padding[axis][0]  # type: ignore[operator]
        edges.append((before, after))
    made = one.add(
        "ConvTranspose",
        images_first(one),
        _kernels(one, 1, (3, 2, 0, 1)),
        strides=list(strides),
        dilations=list(dilations),
        group=one.attrs["groups"],
        pads=[*[before for before, _ in edges], *[max(after, 0) for _, after in edges]],
        output_padding=[max(-after, 0) for _, after in edges],
    )
    return channels_last(one, made)


@writes("max_pool2d", "avg_pool2d")
def pool(one: AppliedOp) -> str:
    window = pair("window", one.attrs["window"])
    strides = window if one.attrs["strides"] is None else pair("strides", one.attrs["strides"])
    dtype = one.out.dtype
    if dtype in (np.int64, np.uint64):
        raise Unwritable(f"runtimes have no pools of {dtype}; cast to float64 first")
    wide = dtype if is_float(dtype) or dtype.itemsize == 1 else np.dtype(np.float64)
    images = one.cast(images_first(one), one.specs[0].dtype, wide)
    op = "MaxPool" if one.op == "max_pool2d" else "AveragePool"
    made = one.add(op, images, kernel_shape=list(window), strides=list(strides), **_sliding(one))
    return channels_last(one, one.cast(made, wide, dtype))


@writes("softmax", "log_softmax")
def softmax(one: AppliedOp) -> str:
    op = "Softmax" if one.op == "softmax" else "LogSoftmax"
    return one.add(op, one.input_as(one.out.dtype), axis=int(one.attrs["axis"]) % one.rank())


@writes("class_cross_entropy")
def class_cross_entropy(one: AppliedOp) -> str:
    shares = one.add("LogSoftmax", one.inputs[0], axis=-1)
    labels = one.add("Unsqueeze", one.input_as(np.int64, 1), one.ints(-1))
    return one.add("Neg", one.add("Squeeze", one.add("GatherElements", shares, labels, axis=-1), one.ints(-1)))


@writes("cross_entropy")
def cross_entropy(one: AppliedOp) -> str:
    shares = one.add("LogSoftmax", one.inputs[0], axis=-1)
    nothing = one.like(0)
    weighed = one.add("Where", one.add("Equal", one.inputs[1], nothing), nothing, one.add("Mul", one.inputs[1], shares))
    return one.add("Neg", one.add("ReduceSum", weighed, one.ints(-1), keepdims=0))


@writes("lstm_steps")
def lstm_steps(one: AppliedOp) -> list[str]:
    """ONNX has gates in the order i, o, f, c where these are i, f, g, o, and weights transposed."""
    x, h, c, w_x, w_h, bias = one.inputs
    if not one.specs[4].known:
        raise Unwritable("the number of its units must be known")
    units = one.specs[4].concrete[0]
    order = np.concatenate([np.arange(n * units, (n + 1) * units) for n in (0, 3, 1, 2)])

    def gates(name: str, axis: int) -> str:
        held = one.writer.known(name)
        if held is not None:
            return one.writer.constant(held.take(order, axis), name=f"{name}/ordered")
        return one.add("Gather", name, one.ints(*order.tolist()), axis=axis)

    def lead(name: str) -> str:
        held = one.writer.known(name)
        if held is not None:
            return one.writer.constant(held[None], name=f"{name}/one")
        return one.add("Unsqueeze", name, one.ints(0))

    weights = [lead(one.transposed(gates(name, 1), (1, 0))) for name in (w_x, w_h)]
    none = one.constant(np.zeros(4 * units, one.out.dtype))
    both = lead(one.add("Concat", gates(bias, 0), none, axis=0))
    outputs, last_h, last_c = one.add_many(
        "LSTM", x, *weights, both, None, lead(h), lead(c), outputs=3, hidden_size=units
    )
    return [
        one.add("Squeeze", outputs, one.ints(1)),
        one.add("Squeeze", last_h, one.ints(0)),
        one.add("Squeeze", last_c, one.ints(0)),
    ]
