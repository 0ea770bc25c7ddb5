"""What convolutions are to cuDNN; see `test_nvidia_libraries` for what it makes of them."""

from __future__ import annotations

from typing import Any

import pytest
from computed import computed
from op_examples_windows import CONVOLUTIONS, Example, _convolution

from flowrt.base.spec import Spec
from flowrt.kernels.launch import LaunchStep, apply_kernel
from flowrt.kernels.nvidia.convolutions import as_product, convolution

Array = Any
NAMES = ("conv2d", "conv2d_input_grad", "conv2d_filter_grad")
NONE = ((0, 0), (0, 0))
MORE = [
    example
    for name in NAMES
    for example in (
        _convolution(name, (2, 6, 5, 1), (3, 2, 1, 2), NONE, (3, 2), padding="VALID", note="rows-unseen"),
        _convolution(name, (1, 6, 6, 2), (1, 1, 2, 3), NONE, (3, 3), note="same-narrow"),
        _convolution(name, (1, 5, 6, 2), (3, 3, 2, 2), ((1, 1), (0, 1)), (2, 2), note="same-even-and-odd"),
        _convolution(name, (2, 3, 4, 5), (1, 1, 5, 3), NONE, note="product"),
        _convolution(name, (1, 3, 4, 4), (1, 1, 2, 4), NONE, groups=2, note="products-of-groups"),
    )
]


def asked_of(example: Example) -> tuple[LaunchStep, list[Array], Array]:
    """The step of an example's convolution, its operands, and what the host makes of them."""
    ((node, arrays, found),) = [each for each in computed(example) if each[0].op.name == example.op]
    specs = [Spec(a.dtype, a.shape) for a in arrays]
    outputs = [Spec(a.dtype, a.shape) for a in found]
    (step,) = apply_kernel(example.op, specs, outputs, node.attrs, "cuda").steps
    assert isinstance(step, LaunchStep)
    return step, list(arrays), found[0]


@pytest.mark.parametrize("note", ["same", "same-narrow", "products-of-groups", "explicit"])
def test_only_a_window_of_one_entry_that_goes_one_by_one_is_a_product(note: str) -> None:
    for example in (*CONVOLUTIONS, *MORE):
        if example.note == note:
            asked = convolution(asked_of(example)[0])
            assert asked is not None
            assert as_product(asked) is None


@pytest.mark.parametrize("name", NAMES)
def test_edges_are_alike_where_that_makes_the_same_places(name: str) -> None:
    """As (1, 0) and (1, 1) do, where the window goes two rows at a time and the last row is never its first."""
    example = _convolution(name, (1, 6, 6, 1), (3, 3, 1, 1), ((1, 0), (1, 0)), (2, 2), padding=((1, 0), (1, 0)))
    asked = convolution(asked_of(example)[0])
    assert asked is not None
    assert (asked.before, asked.after) == ((1, 1), (1, 1))


@pytest.mark.parametrize("name", NAMES)
def test_without_images_there_is_nothing_to_ask_for(name: str) -> None:
    (example,) = [e for e in CONVOLUTIONS if (e.op, e.note) == (name, "no-images")]
    assert convolution(asked_of(example)[0]) is None
