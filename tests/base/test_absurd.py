"""Absurd sizes and attributes end in flowrt's own error, which names the op and the user's line: built, and at once."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from op_examples import EXAMPLES

import flowrt as fr
from flowrt.kernels.language.table import KERNELS
from flowrt.kernels.launch import apply_kernel
from flowrt.op import Op

ABSURD: list[Any] = [0, -1, 7, 2**31, 2**62, 2**63, 2**70, -(2**63), 1.5, float("nan"), float("inf"), "x", "", None]
ABSURD += [(), (0,), (-1, -1), (1, 2, 3), (1.5, 2), ("a", "b"), ((-1, 0), (0, 0)), ((2**62, 2**62), (0, 0))]
ABSURD += [(2**40, 2**40), (None,), [[1, 2], [3]], [None], np.ones(2), {}]

X, IMAGE, FILTERS = np.ones(4, np.float32), np.ones((1, 8, 8, 3), np.float32), np.ones((3, 3, 3, 4), np.float32)
CASES: dict[str, tuple[str, Callable[[Any, Any, Any], Any]]] = {
    "more entries than addresses": ("full", lambda x, i, f: fr.zeros((2**62,))),
    "sizes whose product overflows": ("full", lambda x, i, f: fr.ones((2**31, 2**31, 2**31))),
    "more memory than there is": ("full", lambda x, i, f: fr.zeros((2**40,))),
    "a size beyond 64 bits": ("zeros|full", lambda x, i, f: fr.zeros((2**70,))),
    "a size that is no number": ("placeholder|zeros|full", lambda x, i, f: fr.zeros((1.5,))),
    "reshaped to more": ("reshape", lambda x, i, f: fr.reshape(x, (2**32, 2**32))),
    "broadcast to more": ("broadcast_to", lambda x, i, f: fr.broadcast_to(fr.sum(x), (2**62,))),
    "repeated less than never": ("tile|broadcast_to", lambda x, i, f: fr.tile(x, (-1,))),
    "repeated too often": ("tile|broadcast_to", lambda x, i, f: fr.tile(x, (2**62,))),
    "padded by less than nothing": ("pad", lambda x, i, f: fr.pad(x, ((-1, 0),))),
    "padded by too much": ("pad", lambda x, i, f: fr.pad(x, ((2**62, 2**62),))),
    "padded with what does not fit": ("pad", lambda x, i, f: fr.pad(fr.astype(x, "int8"), 1, 300)),
    "a depth below 0": ("one_hot", lambda x, i, f: fr.one_hot(np.arange(3), -1)),
    "a depth without end": ("one_hot", lambda x, i, f: fr.one_hot(np.arange(3), 2**62)),
    "a stride of 0": ("conv2d", lambda x, i, f: fr.nn.conv2d(i, f, 0)),
    "a dilation of 0": ("conv2d", lambda x, i, f: fr.nn.conv2d(i, f, 1, "SAME", 0)),
    "a dilation beyond counting": ("conv2d", lambda x, i, f: fr.nn.conv2d(i, f, 1, "SAME", 2**63)),
    "groups that do not divide": ("conv2d", lambda x, i, f: fr.nn.conv2d(i, f, 1, "SAME", 1, 2)),
    "no groups": ("conv2d", lambda x, i, f: fr.nn.conv2d(i, f, 1, "SAME", 1, 0)),
    "padding beyond counting": ("conv2d", lambda x, i, f: fr.nn.conv2d(i, f, 1, padding=((2**62, 0), (0, 0)))),
    "a window of 0": ("max_pool2d", lambda x, i, f: fr.nn.max_pool2d(i, 0)),
    "a window below 0": ("avg_pool2d", lambda x, i, f: fr.nn.avg_pool2d(i, -1)),
    "a step of 0": ("arange", lambda x, i, f: fr.arange(0, 10, 0)),
    "a stop that is no number": ("arange", lambda x, i, f: fr.arange(float("nan"))),
    "numbers without end": ("arange", lambda x, i, f: fr.arange(2**62)),
    "numbers beyond 64 bits": ("arange", lambda x, i, f: fr.arange(2**70)),
    "an identity beyond memory": ("eye", lambda x, i, f: fr.eye(2**31)),
    "an identity of less than nothing": ("eye", lambda x, i, f: fr.eye(-1)),
    "random numbers without end": ("normal", lambda x, i, f: fr.random.normal((2**62,), seed=1)),
    "a spread below 0": ("normal", lambda x, i, f: fr.random.normal((2,), 0.0, -1.0, seed=1)),
    "a bound that is no number": ("uniform", lambda x, i, f: fr.random.uniform((2,), float("nan"), seed=1)),
    "a product beyond memory": ("matmul", lambda x, i, f: fr.matmul(fr.zeros((2**40, 0)), fr.zeros((0, 2**40)))),
    "an axis that is not there": ("sum", lambda x, i, f: fr.sum(x, 2**62)),
    "half an axis": ("expand_dims", lambda x, i, f: fr.expand_dims(x, 0.5)),
    "nothing to put together": ("concat", lambda x, i, f: fr.concat([])),
    "nothing to stack": ("stack", lambda x, i, f: fr.stack([])),
    "nothing to add": ("add_n", lambda x, i, f: fr.add_n([])),
    "a rate that is no number": ("dropout", lambda x, i, f: fr.nn.dropout(x, "half")),
    "letters that are none": ("einsum", lambda x, i, f: fr.einsum(7, x)),
    "axes that are none": ("tensordot", lambda x, i, f: fr.tensordot(x, x, (1, 2, 3))),
}


@contextmanager
def little_memory() -> Iterator[None]:
    """Let nobody be given the memory that is asked for here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("name", CASES)
def test_absurd_sizes_and_attributes_name_op_and_line(name: str) -> None:
    op, ask = CASES[name]
    says = rf"({op}).*\S*test_absurd.py:\d+"

    def in_a_graph() -> None:
        with fr.Graph() as graph:
            inputs = [fr.placeholder(a.dtype, a.shape) for a in (X, IMAGE, FILTERS)]
            y = ask(*inputs)
        with fr.BlockingSession(graph) as session:
            session.run(y, dict(zip(inputs, (X, IMAGE, FILTERS), strict=True)))

    with little_memory():
        for way in (in_a_graph, lambda: ask(X, IMAGE, FILTERS)):
            with pytest.raises((fr.SpecError, fr.ResourceError), match=says) as caught:
                way()
            assert "\n" not in str(caught.value) or isinstance(caught.value, fr.ResourceError)


@pytest.mark.parametrize("size", [2**62, 2**40, -1])
def test_an_absurd_size_that_only_the_step_knows_ends_the_step(size: int) -> None:
    with fr.Graph() as graph:
        n = fr.placeholder("int64", ())
        y = fr.zeros(fr.stack([n, n]))
    with little_memory(), fr.BlockingSession(graph) as session:
        with pytest.raises((fr.SpecError, fr.ResourceError), match=r"full 'full' \(\S*test_absurd.py:\d+\)"):
            session.run(y, {n: size})
        assert session.run(y, {n: 2}).shape == (2, 2)


# ── what is no tensor ────────────────────────────────────────────────────────────────────────────────────────────────


def in_a_graph(make: Callable[[], Any]) -> Any:
    with fr.Graph():
        return make()


def trainer_of(loss: Any = lambda given: fr.sum(given["x"] * fr.Variable(X)), **more: Any) -> Any:
    return fr.train.Replicated(loss, {"x": fr.Spec("float32", (4,))}, fr.optim.SGD(0.1), 1, **more)


BEYOND = 10**400  # all floats
REFUSED: dict[str, Callable[[], Any]] = {
    "a model's file that is a number": lambda: fr.serving.Model.load(3),  # type: ignore[arg-type]
    "a model's file with a zero in its name": lambda: fr.serving.Model.load("a\0"),
    "a model of ONNX that is a number": lambda: fr.onnx.load(3),
    "what is no model as one of ONNX": lambda: fr.onnx.save("x.onnx", 3),  # type: ignore[arg-type]
    "summaries in a number": lambda: fr.summary.Writer(3),  # type: ignore[arg-type]
    "a trace that is a number": lambda: fr.placement.profile_of(3),  # type: ignore[arg-type]
    "a cluster file that is a number": lambda: fr.ClusterSpec.from_file(3),  # type: ignore[arg-type]
    "a graph of a text": lambda: fr.Graph.from_bytes("x"),  # type: ignore[arg-type]
    "a network beyond all floats": lambda: fr.placement.Auto(bandwidth=BEYOND),
    "a scale that is a text": lambda: fr.LossScaled(fr.optim.SGD(0.1), "x"),  # type: ignore[arg-type]
    "a scale for what is no optimiser": lambda: fr.LossScaled(0.1),  # type: ignore[arg-type]
    "a precision of several": lambda: fr.mixed_precision(["float16"]).__enter__(),  # type: ignore[arg-type]
    "a rate beyond all floats": lambda: fr.optim.SGD(BEYOND),
    "a rate that is a text of NumPy's": lambda: fr.optim.SGD(np.str_("0.1")),
    "several momenta": lambda: fr.optim.Momentum(0.1, [0.9]),  # type: ignore[arg-type]
    "no decay of weights": lambda: fr.optim.AdamW(0.1, weight_decay=None),  # type: ignore[arg-type]
    "a decay that is a text": lambda: fr.optim.RMSProp(0.1, "x"),  # type: ignore[arg-type]
    "a history that no memory holds": lambda: fr.optim.LBFGS(history=10**30),
    "gradients that are none": lambda: fr.optim.clip_by_global_norm(None, 1.0),  # type: ignore[arg-type]
    "gradients without variables": lambda: fr.optim.SGD(0.1).apply_gradients([3]),  # type: ignore[list-item]
    "a number of pairs": lambda: fr.optim.SGD(0.1).apply_gradients(3),  # type: ignore[arg-type]
    "the memory of no session": lambda: fr.devices.memory(None),  # type: ignore[arg-type]
    "a ledger that is a number": lambda: fr.Ledger(3),  # type: ignore[arg-type]
    "an npz file that is a number": lambda: fr.data.npz(3, 1),  # type: ignore[arg-type]
    "an npy file that is none": lambda: fr.data.npy({"x": None}, 1),  # type: ignore[dict-item]
    "a parquet file that is a number": lambda: fr.data.parquet(3, 1),  # type: ignore[arg-type]
    "columns that are a number": lambda: fr.data.npz(__file__, 1, columns=3),  # type: ignore[arg-type]
    "the batch of a text": lambda: fr.data.arrays({"x": X}, 1).batch("x"),  # type: ignore[arg-type]
    "specs that are a number": lambda: fr.data.function("x", 3, 1, specs=3),  # type: ignore[arg-type]
    "keys in a number": lambda: fr.LocalCluster(worker=1, tls=3),  # type: ignore[arg-type]
    "a token file that is a number": lambda: fr.ClusterSpec({"w": ["a:1"]}, 3),  # type: ignore[arg-type]
    "a number of devices": lambda: fr.LocalCluster(worker=1, devices=3),  # type: ignore[arg-type]
    "a number of imports": lambda: fr.LocalCluster(worker=1, imports=3),  # type: ignore[arg-type]
    "threads that are a text": lambda: fr.LocalCluster(worker=1, threads="x"),  # type: ignore[arg-type]
    "a start in a text of seconds": lambda: fr.LocalCluster(worker=1, startup="x"),  # type: ignore[arg-type]
    "what is awaited that is no function": lambda: fr.LocalCluster(worker=1, warm=3),  # type: ignore[arg-type]
    "a session called by a number": lambda: fr.Session(fr.Graph(), name=3),  # type: ignore[arg-type]
    "a graph whose seed is a text": lambda: fr.Graph("x"),  # type: ignore[arg-type]
    "options that are no": lambda: fr.Options(optimize="no"),  # type: ignore[arg-type]
    "an op of a number": lambda: fr.op(3),  # type: ignore[call-overload]
    "no gradient of a number": lambda: fr.no_gradient(3),  # type: ignore[type-var]
    "a gradient of one's own of a number": lambda: fr.custom_gradient(3),  # type: ignore[arg-type]
    "gradients of nothing": lambda: fr.gradients(X),  # type: ignore[call-arg]
    "a container of a number": lambda: fr.container(3).__enter__(),  # type: ignore[arg-type]
    "a loss that is a number": partial(in_a_graph, lambda: trainer_of(loss=3)),
    "a number that is shared": partial(in_a_graph, lambda: trainer_of().share(3, {})),
    "a seed that is a text": lambda: fr.random.normal((3,), seed="x"),  # type: ignore[arg-type]
    "a seed between two": lambda: fr.random.uniform((3,), seed=1.5),  # type: ignore[arg-type]
    "a bound beyond its dtype": lambda: fr.random.uniform((3,), 0.0, 1e39),
    "a spread beyond its dtype": lambda: fr.random.normal((3,), 0.0, 70000.0, "float16"),
    "branches that are values": lambda: fr.cond(True, 3, 4),  # type: ignore[call-overload]
    "a condition that is a value": lambda: fr.while_loop(True, lambda x: x, 1),  # type: ignore[arg-type]
    "what is mapped by a value": lambda: fr.map_fn(3, X),  # type: ignore[call-overload]
    "a case of values": lambda: fr.case([(True, 3)]),  # type: ignore[list-item]
    **{
        f"a number as the name of {what}": partial(in_a_graph, make)
        for what, make in {
            "a variable": lambda: fr.Variable(X, name=3),  # type: ignore[arg-type]
            "a placeholder": lambda: fr.placeholder("float32", name=3),  # type: ignore[arg-type]
            "a queue": lambda: fr.FIFOQueue(2, "float32", (), name=3),  # type: ignore[arg-type]
            "a trainer": lambda: trainer_of(name=3),
        }.items()
    },
    "a text of bytes to split above": partial(in_a_graph, lambda: trainer_of(split_above="1")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_function_does_not_take_is_refused_at_the_programs_line(what: str) -> None:
    with pytest.raises(fr.FlowrtError, match=r"test_absurd.py:\d+"):
        REFUSED[what]()


def test_sessions_refuse_what_they_do_not_take_at_the_programs_line() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (4,))
        v = fr.Variable(X)
        y = x * v
    with fr.BlockingSession(graph) as session:
        for call in (
            lambda: session.run(y, {x: X}, timeout=float("nan")),
            lambda: session.run(y, {x: X}, timeout=BEYOND),
            lambda: session.compile(y, 3),  # type: ignore[arg-type]
            lambda: session.compile(y, [x, x]),
            lambda: session.tracing("a\0").__enter__(),
            lambda: fr.serving.freeze(session, {"x": x}, {"y": y}, given=3),  # type: ignore[call-overload]
            lambda: fr.serving.freeze(session, {}, {"y": y}, given={"x": X}),
            lambda: fr.optim.SGD(0.1).minimize(y, 3),  # type: ignore[arg-type]
            lambda: fr.optim.SGD(0.1).apply_gradients([(v, x)]),  # type: ignore[list-item]
            lambda: fr.serving.freeze(session, {"x": x}, {"y": y}).save(""),
        ):
            with pytest.raises(fr.FlowrtError, match=r"test_absurd.py:\d+"):
                call()
        assert (session.run(y, {x: X}, timeout=1e300) == 1).all()  # years are awaited, whatever their number


def test_a_number_is_no_path_and_the_descriptor_that_it_names_stays_open() -> None:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    for read in (fr.serving.Model.load, fr.placement.profile_of, fr.ClusterSpec.from_file):
        with pytest.raises(fr.GraphError, match=f"told by its path, not {descriptor}"):
            read(descriptor)  # type: ignore[operator]
    os.close(descriptor)  # raises where it is closed


# ── every op of the registry ─────────────────────────────────────────────────────────────────────────────────────────


def calls() -> dict[Op, dict[str, Any]]:
    """What each op that the examples show is given in one of them; tensors as specs."""
    found: dict[Op, dict[str, Any]] = {}
    shown = Op.__call__

    def spy(self: Op, *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        if self not in found and self.__module__.startswith("flowrt.ops.") and self.__module__ != "flowrt.ops.fused":
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            found[self] = {name: as_specs(value) for name, value in bound.arguments.items()}
        return shown(self, *args, name=name, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "__call__", spy)
        for example in EXAMPLES:
            with fr.Graph(), suppress(fr.FlowrtError):
                example.run(*[fr.placeholder(a.dtype, a.shape) for a in example.arrays])
    return found


def as_specs(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and any(isinstance(item, fr.Tensor) for item in value):
        return [as_specs(item) for item in value]
    return value.spec if isinstance(value, fr.Tensor) else value


def as_inputs(value: Any) -> Any:
    if isinstance(value, list):
        return [as_inputs(item) for item in value]
    return fr.placeholder(value.dtype, value.dims) if isinstance(value, fr.Spec) else value


def test_no_parameter_of_any_op_leads_into_the_depths() -> None:
    escaped = []
    for op, given in calls().items():
        for parameter in op.parameters:
            for value in ABSURD:
                try:
                    with fr.Graph() as graph:
                        op(**{**{name: as_inputs(v) for name, v in given.items()}, parameter.name: value})
                    if not parameter.tensor:
                        lay_out(graph.nodes[-1])
                except fr.FlowrtError as error:
                    if ".py:" not in str(error):
                        escaped.append(f"{op.name}({parameter.name}={value!r}) names no line: {error}")
                except Exception as error:
                    escaped.append(f"{op.name}({parameter.name}={value!r}): {error!r}")
    assert not escaped


OPERATE_ON_STATE = ("resource", "slots")  # whose kernels are given what the variables hold, too


def lay_out(node: fr.Operation) -> None:
    """Ask the node's kernel how it would go about it, without compiling it."""
    specs = [t.spec for t in (*node.inputs, *node.outputs)]
    computed = (node.op.name, "cpu") in KERNELS and not any(name in node.attrs for name in OPERATE_ON_STATE)
    if computed and all(spec.known for spec in specs):
        with suppress(fr.SpecError):  # scratch beyond memory; a session says whose
            apply_kernel(node.op.name, specs[: len(node.inputs)], specs[len(node.inputs) :], node.attrs)
