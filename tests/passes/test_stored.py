"""Products of floats of 16 bits as products of their bits: where, and what is left of what stood between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from step_world import CPU

import flowrt as fr
from flowrt.base.device import Device
from flowrt.ops import linalg, precision
from flowrt.ops.source import placeholder
from flowrt.passes import StepTerms, compile_step

GPU = Device.parse(str(CPU).replace("cpu:0", "cuda:0"))
KINDS = ("bfloat16", "float16")


def on_these(op: str, dtypes: Sequence[Any], kind: str) -> bool:
    return kind in ("cpu", "cuda")


def without_bits(op: str, dtypes: Sequence[Any], kind: str) -> bool:
    return not op.startswith("matmul_")


def ops_of(fetches: list[Any], feeds: list[Any], device: Device = GPU, supports: Any = on_these) -> list[str]:
    """What is done on the device."""
    graph, devices = fetches[0].graph, [CPU, GPU]
    made = compile_step(graph, fetches, (), feeds, StepTerms(devices=devices, default=device, supports=supports))
    (plan,) = made.plans.values()
    return sorted(node.op for node in plan.nodes if node.op != "bring")


def operands() -> list[Any]:
    return [placeholder("float32", (3, 4), name="x"), placeholder("float32", (4, 5), name="w")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_takes_the_bits_and_nothing_is_widened(kind: str) -> None:
    with fr.Graph():
        feeds = operands()
        with fr.mixed_precision(kind):
            y = feeds[0] @ feeds[1]
    assert ops_of([y], feeds) == [f"matmul_{kind}", f"narrow_{kind}", f"narrow_{kind}"]


@pytest.mark.parametrize("kind", KINDS)
def test_so_do_the_products_of_its_gradients(kind: str) -> None:
    with fr.Graph():
        feeds = operands()
        with fr.mixed_precision(kind):
            y = feeds[0] @ feeds[1]
        slopes = fr.gradients(fr.sum(y * y), feeds)
    found = ops_of(slopes, feeds)
    assert found.count(f"matmul_{kind}") == 3
    assert not {op for op in found if op.startswith("widen") or op == "matmul"}


@pytest.mark.parametrize("kind", KINDS)
def test_so_does_a_product_of_what_is_cast_to_float32_and_to_no_other_float(kind: str) -> None:
    with fr.Graph():
        feeds = [placeholder(kind, (3, 4), name="x"), placeholder(kind, (4, 5), name="w")]
        numbers = [placeholder("int32", (3, 4), name="n"), placeholder("int32", (4, 5), name="m")]
        wide, large, whole = (
            fr.astype(x, to) @ fr.astype(y, to)
            for (x, y), to in ((feeds, "float32"), (feeds, "float64"), (numbers, "float32"))
        )
    assert ops_of([wide], feeds) == [f"matmul_{kind}"]
    assert ops_of([large], feeds) == ops_of([whole], numbers) == ["astype", "astype", "matmul"]


def test_who_else_reads_a_widened_operand_keeps_it() -> None:
    with fr.Graph():
        feeds = operands()
        with fr.mixed_precision("float16"):
            y = feeds[0] @ feeds[1]
    assert ops_of([y, y.op.inputs[0]], feeds) == ["matmul_float16", "narrow_float16", "narrow_float16", "widen_float16"]


def test_hosts_and_devices_without_such_a_kernel_multiply_what_is_widened() -> None:
    with fr.Graph():
        feeds = operands()
        with fr.mixed_precision():
            y = feeds[0] @ feeds[1]
    assert "matmul" in ops_of([y], feeds, device=CPU)
    assert "matmul" in ops_of([y], feeds, supports=without_bits)


def test_operands_of_two_kinds_and_plain_ones_stay_as_they_are() -> None:
    with fr.Graph():
        feeds = operands()
        with fr.mixed_precision("float16"):
            half = feeds[0] @ feeds[1]
        with fr.mixed_precision("bfloat16"):
            brain = feeds[0] @ feeds[1]
        mixed = fr.matmul(half.op.inputs[0], brain.op.inputs[1])
        plain = fr.matmul(half.op.inputs[0], feeds[1])
    for product in (mixed, plain, feeds[0] @ feeds[1]):
        assert "matmul" in ops_of([product], feeds)


@pytest.mark.parametrize("kind", KINDS)
async def test_bits_multiply_to_what_they_stand_for(kind: str) -> None:
    """On the host, which has a kernel for them, too."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((30, 70), (70, 20)))
    narrow, widen = precision.WAYS[kind]
    left, right = narrow(a), narrow(b)
    found = getattr(linalg, f"matmul_{kind}")(left, right)
    np.testing.assert_allclose(found, widen(left, a) @ widen(right, b), rtol=1e-5, atol=1e-5)
