"""The processor that kernels are made for: this one, or one that Numba's settings name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from llvmlite import ir

from flowrt.kernels.emit.roundings import contract
from flowrt.kernels.store.surroundings import architecture

ASK = """
import json
from flowrt.kernels.tiles.micro import native
from flowrt.kernels.emit.processor import features, name, probed_features
from flowrt.kernels.store.surroundings import has_fused_products, processor_features
ours = processor_features() & {"avx", "avx512f", "f16c", "fma"} == probed_features()
print(json.dumps([name(), features(), native().width, has_fused_products(), ours]))
"""


def told(**settings: str) -> Any:
    plain = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_CPU_")}
    done = subprocess.run([sys.executable, "-c", ASK], env=plain | settings, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(architecture() != "x86_64", reason="the names are of x86")
@pytest.mark.parametrize(
    ("name", "width", "fuses"), [("x86-64", 16, False), ("haswell", 32, True), ("skylake-avx512", 64, True)]
)
def test_a_processor_named_to_numba_has_what_its_name_says(name: str, width: int, fuses: bool) -> None:
    assert told(NUMBA_CPU_NAME=name) == [name, "", width, fuses, True]


@pytest.mark.skipif(architecture() != "x86_64", reason="the features are of x86")
def test_this_processors_features_are_those_that_llvm_uses() -> None:
    *_, ours = told()
    assert ours


def opcodes(write: Any) -> list[str]:
    """What is left of a function of three floats that ``write`` makes, after its products have joined their sums."""
    module = ir.Module()
    double = ir.DoubleType()
    function = ir.Function(module, ir.FunctionType(double, [double] * 3), "f")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(write(builder, *function.args))
    contract(module)
    return [i.opname if i.opname != "call" else i.callee.name for i in function.blocks[0].instructions]


@pytest.mark.parametrize(
    ("write", "fused"),
    [
        (lambda b, x, y, z: b.fadd(b.fmul(x, y), z), 1),
        (lambda b, x, y, z: b.fadd(z, b.fmul(x, y)), 1),
        (lambda b, x, y, z: b.fsub(b.fmul(x, y), z), 1),
        (lambda b, x, y, z: b.fsub(z, b.fmul(x, y)), 1),
        (lambda b, x, y, z: b.fadd(b.fmul(x, y), b.fmul(y, z)), 1),
        (lambda b, x, y, z: b.fadd(b.fmul(b.fadd(b.fmul(x, y), z), x), y), 2),
        (lambda b, x, y, z: b.fadd(b.fadd(x, y), z), 0),
        (lambda b, x, y, z: b.fadd(b.fmul(x, y), z, flags=("reassoc",)), 0),
    ],
)
def test_a_sum_takes_in_the_first_product_that_is_its_alone(write: Any, fused: int) -> None:
    assert opcodes(write).count("llvm.fma.f64") == fused


def test_a_product_that_something_else_wants_stays_one() -> None:
    def write(b: Any, x: Any, y: Any, z: Any) -> Any:
        product = b.fmul(x, y)
        return b.fdiv(b.fadd(product, z), product)

    assert "llvm.fma.f64" not in opcodes(write)
