"""ONNX's own tests of backends: a chosen part of them. `scripts/onnx_suite` runs them all."""

from __future__ import annotations

import pytest
from onnx_world import Outcome, all_cases, cases_of, run_case

MODULES = """
    add argmax batch_normalization bitshift clip concat conv convinteger convtranspose cumsum depthtospace div einsum
    dequantizelinear expand flatten gather gatherelements gathernd gemm globalaveragepool groupnormalization gru hardmax
    if_ instance_normalization isinf layernormalization leakyrelu loop lrn lstm matmul matmulinteger maxpool mod onehot
    pad pow prelu qlinearconv qlinearmatmul quantizelinear rangeop reducemean reducesum reshape resize rnn
    reversesequence scan scatterelements scatternd slice softmax softmax_cross_entropy_loss split tile topk unique where
"""
UNHELD = ("float8", "float4", "int4", "int2", "string", "sequence", "optional", "Sequence")
"""What tensors here cannot hold, and values that are no tensors."""
REFUSED = {
    "test_convtranspose_3d": "more than two axes of images",
    "test_scan_sum": "a Scan of before opset 9",
    "test_unique_sorted_with_axis": "unique slices along an axis",
    "test_unique_sorted_with_axis_3d": "unique slices along an axis",
    "test_unique_sorted_with_negative_axis": "unique slices along an axis",
    "test_gradient_of_add": "ai.onnx.preview.training",
    "test_gradient_of_add_and_mul": "ai.onnx.preview.training",
}


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    cases = [case for case in cases_of(MODULES.split()) if not case.name.endswith("_expanded")]
    return [run_case(case) for case in [*cases, *all_cases(["simple"])]]


@pytest.mark.timeout(300)
def test_no_answer_is_wrong(outcomes: list[Outcome]) -> None:
    assert {one.name: one.wrong for one in outcomes if one.wrong} == {}


@pytest.mark.timeout(300)
def test_nothing_is_refused_but_what_is_known_to_be(outcomes: list[Outcome]) -> None:
    refused = {one.name: one.refused for one in outcomes if one.refused}
    told = {name: why for name, why in refused.items() if not any(word in why for word in UNHELD)}
    assert told.keys() == REFUSED.keys()
    assert all(REFUSED[name] in why for name, why in told.items())
    assert sum(one.passed for one in outcomes) == len(outcomes) - len(refused)
