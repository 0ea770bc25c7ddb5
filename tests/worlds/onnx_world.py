"""ONNX's own tests of backends, run by flowrt; and small models to load."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from flowrt.base.errors import GraphError
from flowrt.onnx.backend import prepare

OPSET = 21


@dataclass(frozen=True)
class Outcome:
    """What came of a case: passed, perhaps with inputs given as it was loaded; refused, and why; wrong, and how."""

    name: str
    passed: bool = False
    fixed: bool = False
    refused: str = ""
    wrong: str = ""


def cases_of(modules: Iterable[str]) -> list[Any]:
    """The cases of some modules of ONNX's node tests, without the seconds that all of them take."""
    from onnx.backend.test.case import node

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's about overflows that cases are about
        for module in modules:
            importlib.import_module(f"onnx.backend.test.case.node.{module}")
    return list(node._NodeTestCases)


def all_cases(kinds: Sequence[str]) -> list[Any]:
    """All cases of some kinds: node, simple, pytorch-operator, pytorch-converted."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [case for kind in kinds for case in load_model_tests(kind=kind)]


def _read(path: Path) -> Any:
    tensor = TensorProto()
    tensor.ParseFromString(path.read_bytes())
    return tensor


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def _sets(case: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    """What goes in and what comes out, for each set of data."""
    if case.model_dir is None:
        for given, wanted in case.data_sets:
            yield [_array(v) for v in given], [_array(v) for v in wanted]
        return
    for folder in sorted(Path(case.model_dir).glob("test_data_set*")):
        many = [len(list(folder.glob(f"{what}_*.pb"))) for what in ("input", "output")]
        yield tuple(  # type: ignore[misc]
            [_array(_read(folder / f"{what}_{n}.pb")) for n in range(count)]
            for what, count in zip(("input", "output"), many, strict=True)
        )


def run_case(case: Any) -> Outcome:
    """Run a case, and compare as ONNX does."""
    model = onnx.load(str(Path(case.model_dir) / "model.onnx")) if case.model_dir else case.model
    try:
        prepared = prepare(model)
        for given, wanted in _sets(case):
            found = prepared.run(given)
            wrong = _differs(wanted, found, case)
            if wrong:
                return Outcome(case.name, wrong=wrong)
    except GraphError as error:
        lines = str(error).splitlines()
        return Outcome(case.name, refused=lines[min(1, len(lines) - 1)].strip())
    return Outcome(case.name, passed=True, fixed=bool(prepared.fixed))


def _differs(wanted: Sequence[Any], found: Sequence[Any], case: Any) -> str:
    for expected, got in zip(wanted, found, strict=True):
        expected = np.asarray(expected)
        if (expected.dtype, expected.shape) != (got.dtype, got.shape):
            return f"{expected.dtype}{expected.shape} is expected, got {got.dtype}{got.shape}"
        rtol = case.rtol
        if got.dtype.name == "bfloat16":  # as ONNX's own runner has it
            got, expected, rtol = got.astype(np.float32), expected.astype(np.float32), max(rtol, 2**-6)
        try:
            np.testing.assert_allclose(got, expected, rtol=rtol, atol=case.atol)
        except AssertionError as error:
            return str(error)
    return ""


def model_of(
    nodes: Sequence[Any],
    inputs: Mapping[str, tuple[str, Sequence[int | str | None] | None]],
    outputs: Sequence[str],
    weights: Mapping[str, np.ndarray] | None = None,
    opset: int = OPSET,
) -> Any:
    """A model of ``nodes``: inputs are (dtype, shape), outputs of whatever comes of it."""
    graph = helper.make_graph(
        nodes,
        "small",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
            for name, (dtype, shape) in inputs.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def light_model(name: str) -> Any:
    """One of the image classifiers that ONNX comes with, whose weights are left out: with weights drawn by chance."""
    model = onnx.load(str(Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / f"light_{name}.onnx"))
    rng, nodes = np.random.default_rng(0), []
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape" or node.input[0] not in shapes:
            nodes.append(node)
            continue
        shape = tuple(shapes[node.input[0]].tolist())
        near = np.sqrt(2 / max(np.prod(shape[1:], dtype=int), 1))  # what keeps sums of products about as large
        drawn = rng.uniform(0.5, 1.5, shape) if len(shape) < 2 else rng.normal(scale=near, size=shape)
        model.graph.initializer.append(numpy_helper.from_array(drawn.astype(np.float32), node.output[0]))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.ir_version = 8  # from 4 on, weights need not be inputs
    return model
