"""The public surface: names and signatures that programs rely on, documented and typed; the README's programs."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import ROOT

import flowrt as fr
from flowrt.kernels.store.folder import cache_folder

# What may be passed, in order; "*" begins what is named. A call may give more where a signature grows at its end.
SIGNATURES = {
    "placeholder": "dtype, shape",
    "constant": "value, dtype=None",
    "Variable": "initial, *, dtype=None, name=None, trainable=True",
    "Variable.read": "self",
    "Variable.assign": "self, value",
    "Variable.assign_add": "self, value",
    "Variable.assign_sub": "self, value",
    "Variable.scatter_add": "self, ids, rows",
    "Variable.scatter_sub": "self, ids, rows",
    "Variable.scatter_update": "self, ids, rows",
    "IndexedSlices": "values, indices, shape",
    "segment_sum": "x, segment_ids, num_segments=None",
    "FIFOQueue": "capacity, dtypes, shapes=None, name=None",
    "FIFOQueue.enqueue": "self, value",
    "FIFOQueue.enqueue_many": "self, value",
    "FIFOQueue.dequeue": "self",
    "FIFOQueue.dequeue_many": "self, n",
    "FIFOQueue.dequeue_up_to": "self, n",
    "FIFOQueue.size": "self",
    "FIFOQueue.close": "self, cancel_pending_enqueues=False",
    "ShuffleQueue": "capacity, min_after_dequeue, dtypes, shapes=None, *, seed=None, name=None",
    "PriorityQueue": "capacity, dtypes, shapes=None, *, name=None",
    "Graph": "",
    "Graph.finalize": "self",
    "Graph.to_bytes": "self",
    "Graph.from_bytes": "data",
    "name_scope": "name",
    "device": "name",
    "container": "name",
    "colocate_with": "value",
    "control_dependencies": "values",
    "gradients": "ys, xs, grad_ys=None",
    "switch": "data, pred",
    "merge": "inputs",
    "identity": "x",
    "stop_gradient": "x",
    "add_n": "values",
    "where": "condition, a, b",
    "astype": "x, dtype",
    "sum": "x, axis=None, keepdims=False",
    "mean": "x, axis=None, keepdims=False",
    "max": "x, axis=None, keepdims=False",
    "argmax": "x, axis=None",
    "reshape": "x, shape",
    "transpose": "x, axes=None",
    "concat": "values, axis=0",
    "stack": "values, axis=0",
    "pad": "x, paddings, value=0",
    "shape_of": "x",
    "dot": "a, b",
    "einsum": "equation",
    "tensordot": "a, b, axes=2",
    "take": "x, indices, axis=0",
    "one_hot": "indices, depth, dtype='float32'",
    "matmul": "a, b, transpose_a=False, transpose_b=False",
    "nn.attention": "q, k, v, mask=None, *, causal=False, scale=None",
    "nn.conv2d": "x, filters, strides=1, padding='SAME', dilations=1, groups=1",
    "nn.conv2d_transpose": "x, filters, strides=1, padding='SAME', dilations=1, groups=1",
    "nn.gru": "x, h, w_x, w_h, bias, *, reset_after=True",
    "nn.lstm": "x, h, c, w_x, w_h, bias",
    "nn.max_pool2d": "x, window=2, strides=None, padding='VALID'",
    "nn.sampled_softmax": "weights, biases, labels, inputs, num_sampled=None, num_classes=None",
    "nn.softmax": "x, axis=-1",
    "nn.log_softmax": "x, axis=-1",
    "nn.softmax_cross_entropy": "logits, labels",
    "quantize.dequantize": "x, scale",
    "quantize.quantize": "x, axis=None, *, scale=None",
    "quantize.quantized_matmul": "a, b, a_scale=None, b_scale=None",
    "random.log_uniform": "shape, classes, seed=None",
    "random.normal": "shape, mean=0.0, stddev=1.0, dtype='float32', seed=None",
    "random.uniform": "shape, low=0.0, high=1.0, dtype='float32', seed=None",
    "optim.SGD": "lr",
    "optim.Momentum": "lr, momentum, nesterov=False",
    "optim.LBFGS": "",
    "optim.LBFGS.minimize": "self, loss, variables=None",
    "optim.SGD.minimize": "self, loss, variables=None",
    "optim.SGD.compute_gradients": "self, loss",
    "optim.SGD.apply_gradients": "self, pairs",
    "optim.clip_by_global_norm": "grads, norm",
    "Session": "graph, cluster=None, *, placement=None, checkpoints=None, options=None",
    "Session.run": "self, fetches, feeds=None, *, timeout=None",
    "Session.compile": "self, fetches, feeds=()",
    "Session.explain": "self, fetches",
    "Session.producing": "self, queue, source",
    "Session.reset": "self, container=None",
    "Session.save": "self",
    "Session.restore": "self, step=None",
    "BlockingSession": "graph, cluster=None",
    "BlockingSession.run": "self, fetches, feeds=None, *, timeout=None",
    "BlockingSession.compile": "self, fetches, feeds=()",
    "Options": "optimize=True, tapes=True, threads=None",
    "ClusterSpec": "jobs",
    "ClusterSpec.from_file": "path",
    "ClusterSpec.from_env": "",
    "LocalCluster": "",
    "placement.Rules": "devices",
    "Spec": "dtype, shape=()",
    "Checkpoints": "url, every_steps=None, every_seconds=None, keep=5",
    "train.Replicated": "loss_fn, inputs, optimizer, replicas, policy=None",
    "train.Replicated.share": "self, fn, inputs",
    "train.Replicated.steps": "self, session, batches",
    "train.Replicated.statistics": "self",
    "train.AllOf": "",
    "train.FirstOf": "updates",
    "train.Adaptive": "at_least=1",
    "train.Deadline": "seconds, at_least=1",
    "train.LocalSteps": "k, policy",
}
ELEMENTWISE = (
    "add subtract multiply divide floor_divide remainder pow maximum minimum negative abs sign exp log sqrt rsqrt "
    "square reciprocal tanh sigmoid relu floor equal not_equal less less_equal greater greater_equal logical_and "
    "logical_or logical_xor logical_not isnan isfinite"
)
ERRORS = {
    "FlowrtError": "GraphError FeedError DeadTensorError QueueClosedError ClosedError StepTimeout StepCancelled "
    "ResourceError CheckpointError RemoteError InternalError",
    "GraphError": "SpecError GraphFinalizedError PlacementError",
    "RemoteError": "NodeLost AuthenticationError VersionMismatch BrokenStream",
}


def found(path: str) -> Any:
    value: Any = fr
    for name in path.split("."):
        value = getattr(value, name)
    return value


def parameters(path: str) -> list[inspect.Parameter]:
    value = found(path)
    return [p for p in inspect.signature(value).parameters.values() if p.name != "cls"]


@pytest.mark.parametrize(("path", "promised"), SIGNATURES.items(), ids=list(SIGNATURES))
def test_a_promised_signature_takes_what_it_promises(path: str, promised: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def promise({promised}): pass", namespace)
    wanted = list(inspect.signature(namespace["promise"]).parameters.values())
    have = {p.name: p for p in parameters(path)}
    order = [p.name for p in parameters(path) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    positional = [p.name for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert order[: len(positional)] == positional
    for p in wanted:
        if p.default is not p.empty and have[p.name].kind is not p.VAR_KEYWORD:
            assert have[p.name].default == p.default
    further = [p for name, p in have.items() if name not in {q.name for q in wanted}]
    assert all(p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in further)


@pytest.mark.parametrize("name", ELEMENTWISE.split())
def test_a_function_of_entries_works_on_lists_numbers_and_arrays_at_once(name: str) -> None:
    function = getattr(fr, name)
    count = len(inspect.signature(function).parameters)
    values = [0.5, 2.0] if name != "logical_not" else [True, False]
    for value in (values, values[0], np.asarray(values)):
        answer = function(*[value] * count)
        assert isinstance(answer, np.ndarray)
        assert answer.shape == np.shape(value)


def test_errors_are_of_the_promised_families() -> None:
    for family, members in ERRORS.items():
        for name in members.split():
            assert issubclass(getattr(fr, name), getattr(fr, family)), name
            assert name in fr.__all__


def public() -> Iterator[tuple[str, Any]]:
    """Everything that the modules export, and what its classes show."""
    for module in (fr, fr.nn, fr.random, fr.optim, fr.train, fr.placement):
        for name in getattr(module, "__all__", ["Rules"]):
            value = getattr(module, name)
            yield f"{module.__name__}.{name}", value
            if inspect.isclass(value):
                yield from ((f"{module.__name__}.{name}.{k}", v) for k, v in vars(value).items() if k[0] != "_")


def plain(value: Any) -> Callable[..., Any] | None:
    """The function in what a class or module shows, if it is one."""
    value = value.fget if isinstance(value, property) else value
    value = getattr(value, "__func__", value)
    return value if inspect.isfunction(value) else None


def test_everything_public_is_documented() -> None:
    silent = [name for name, value in public() if plain(value) and not inspect.getdoc(plain(value))]
    silent += [n for n, v in public() if (inspect.isclass(v) or inspect.ismodule(v)) and not (v.__doc__ or "").strip()]
    silent += [n for n, v in public() if type(v).__name__ == "Op" and not (v.__doc__ or "").strip()]
    assert silent == []


def test_everything_public_is_typed() -> None:
    def open_ends(function: Callable[..., Any]) -> bool:
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
        return signature.return_annotation is signature.empty or any(p.annotation is p.empty for p in named)

    assert [name for name, value in public() if (f := plain(value)) and open_ends(f)] == []


def test_an_own_op_takes_a_dozen_lines() -> None:
    @fr.op
    def api_cube(x: fr.Spec) -> fr.Spec:
        """``x`` to the third."""
        return x

    @api_cube.gradient
    def api_cube_grad(node: fr.Operation, dy: fr.Tensor) -> tuple[Any, ...]:
        return (dy * 3.0 * fr.square(node.inputs[0]),)

    @fr.kernel("api_cube", on="cpu")
    def api_cube_kernel(x: Any, out: Any) -> None:
        for i in range(x.size):
            out[i] = x[i] ** 3

    try:
        assert api_cube([1.0, 2.0]).tolist() == [1, 8]
        with fr.Graph() as graph:
            x = fr.placeholder("float32", (None,))
            y = api_cube(x)
            (slope,) = fr.gradients(y, [x])
        with fr.BlockingSession(graph) as session:
            values = session.run([y, slope], {x: [1, 2]})
            assert [v.tolist() for v in values] == [[1, 8], [3, 12]]
    finally:
        from flowrt.kernels.language.table import KERNELS, forget_kernels
        from flowrt.op import REGISTRY

        del REGISTRY["api_cube"], KERNELS["api_cube", "cpu"]
        forget_kernels()


def readme_programs() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("program", readme_programs(), ids=["program", "replicated"])
def test_a_program_of_the_readme_runs_as_written(program: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    few = {"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(Path.home())}
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        cwd=tmp_path,
        env=few | {"FLOWRT_BUILD": "never", "FLOWRT_CACHE": str(cache_folder())},  # whose kernels are there
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_graph_read_from_bytes_is_addressed_by_names() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2,), name="x")
        fr.multiply(x, 2.0, name="double")
    again = fr.Graph.from_bytes(graph.to_bytes())
    with fr.BlockingSession(again) as session:
        fed = {again.get_tensor_by_name("x:0"): [1, 2]}
        assert session.run(again.get_tensor_by_name("double:0"), fed).tolist() == [2, 4]
    assert again.get_operation_by_name("double").op is fr.multiply
    for name in ("double", "double:1", "double:x", "none:0"):
        with pytest.raises(fr.GraphError, match="named"):
            again.get_tensor_by_name(name)


def test_explaining_needs_no_list_of_placeholders() -> None:
    with fr.Graph() as graph:
        x, other = (fr.placeholder("float32", (2,), name=name) for name in ("x", "other"))
        y = x + 1.0
        fr.add(other, 1.0)
    with fr.BlockingSession(graph) as session:
        assert session.explain(y) == session.explain(y, [x])
        assert "1 feeds, 1 fetches" in str(session.explain([y, y.op]))
