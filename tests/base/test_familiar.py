"""Names that people bring from elsewhere are answered by flowrt's, and no hint names what does not exist."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt import operators
from flowrt.base.familiar import hint, pages
from flowrt.base.package import PACKAGE

MODULES: dict[str, Any] = {
    "fr": fr,
    "fr.nn": fr.nn,
    "fr.quantize": fr.quantize,
    "fr.random": fr.random,
    "fr.optim": fr.optim,
    "fr.data": fr.data,
    "fr.train": fr.train,
    "fr.placement": fr.placement,
}
TYPED = {
    "fr": {
        "cast": "astype",
        "reduce_mean": "mean",
        "gather": "take",
        "concatenate": "concat",
        "permute": "transpose",
        "clamp": "clip",
        "power": "pow",
        "softmax": "nn.softmax",
        "randn": "random.normal",
        "max_pool": "nn.max_pool2d",
        "cross_entropy": "nn.softmax_cross_entropy",
        "fmod": "fr.sign(a) * fr.remainder(fr.abs(a), fr.abs(b))",
        "isclose": "abs",
        "global_variables_initializer": "starts variables",
        "float32": '"float32"',
        "float16": '"float16"',
        "complex64": "no kernels of complex64",
        "mish": "fr.tanh",
        "topk": "fr.top_k",
        "argwhere": "fr.nonzero",
        "linalg": "fr.matmul",
        "remat": "computes nothing twice",
        "reshpae": "did you mean fr.reshape",
        "zeroes": "did you mean fr.zeros",
        "Sesion": "did you mean fr.Session",
        "sofmax": "for softmax write fr.nn.softmax",
    },
    "fr.nn": {
        "CrossEntropyLoss": "softmax_cross_entropy",
        "Linear": "matmul",
        "relu6": "fr.clip(x, 0, 6)",
        "l2_loss": "fr.sum(fr.square(x)) / 2",
        "binary_cross_entropy": "fr.nn.sigmoid_cross_entropy(logits, labels)",
        "scaled_dot_product_attention": "fr.nn.attention(q, k, v, mask, causal=True)",
        "GRUCell": "fr.nn.gru(x, h, w_x, w_h, bias)",
        "sampled_softmax_loss": "fr.nn.sampled_softmax(weights, biases, labels, inputs, num_sampled)",
        "huber": "fr.where",
        "ConvTranspose2d": "fr.nn.conv2d_transpose(x, filters, strides)",
        "Upsample": "fr.take(x, np.arange(n * size) // n, axis)",
        "cast": "fr.astype",
        "softmaxx": "did you mean fr.nn.softmax",
    },
    "fr.quantize": {"quantize_per_channel": "fr.quantize.quantize(x, axis)", "Linear": "quantized_matmul"},
    "fr.random": {"randn": "normal", "randperm": "permutation", "nromal": "did you mean fr.random.normal"},
    "fr.optim": {"Adagrad": "AdaGrad", "adam": "Adam", "Adammm": "did you mean fr.optim.Adam"},
    "fr.data": {"DataLoader": "fr.data.arrays", "from_generator": "fr.data.function", "parqet": "fr.data.parquet"},
    "fr.train": {"MirroredStrategy": "Replicated", "Firstof": "did you mean fr.train.FirstOf"},
    "fr.placement": {"Rule": "did you mean fr.placement.Rules"},
}
METHODS = {
    "numpy": "session.run",
    "item": "session.run",
    "view": "x.reshape",
    "cuda": "fr.device",
    "detach": "fr.stop_gradient",
    "backward": "fr.gradients",
    "permute": "fr.transpose",
    "unsqueeze": "fr.expand_dims",
    "to": "x.astype",
    "isinf": "fr.isinf",
    "split": "fr.split",
    "sub_": "fr.Variable",
    "shpae": "did you mean x.shape",
}


def test_a_familiar_name_is_answered_by_flowrts() -> None:
    for namespace, names in TYPED.items():
        for typed, here in names.items():
            with pytest.raises(AttributeError, match=rf"has no attribute '{typed}'.*{re.escape(here)}"):
                getattr(MODULES[namespace], typed)


def test_no_hint_names_what_is_not_public() -> None:
    for namespace in ("fr", "fr.nn", "fr.random", "fr.quantize"):
        module = MODULES[namespace]
        for private in {*vars(module)} - {*module.__all__}:
            with pytest.raises(AttributeError) as error:
                getattr(module, f"{private}y")
            assert f"{namespace}.{private}?" not in str(error.value)


def test_what_losses_and_pooling_are_made_of_is_not_among_the_names_of_networks() -> None:
    there = {name for name in vars(fr.nn) if not name.startswith("_")}
    assert there == {*fr.nn.__all__} == {*dir(fr.nn)}


def test_methods_that_tensors_have_elsewhere_are_answered_by_functions() -> None:
    with fr.Graph():
        for tensor in (fr.placeholder("float32", (2,)), fr.Variable(1.0)):
            for typed, here in METHODS.items():
                kind = type(tensor).__name__
                with pytest.raises(AttributeError, match=rf"^'{kind}' object has no attribute '{typed}'; .*{here}"):
                    getattr(tensor, typed)


CONSTRUCTED: list[tuple[Callable[..., object], dict[str, object], str]] = [
    (fr.Checkpoints, {"url": "x", "max_to_keep": 3}, "keep="),
    (fr.Checkpoints, {"directory": "x"}, "url="),
    (fr.Session, {"graph": None, "config": 3}, "options="),
    (fr.BlockingSession, {"graph": None, "config": 3}, "options="),
    (fr.LocalCluster, {"num_workers": 2}, "worker="),
    (fr.LocalCluster, {"worker": 2, "threads_per_worker": 1}, "threads="),
    (fr.Variable, {"initial": 1.0, "requires_grad": True}, "trainable="),
    (fr.Options, {"intra_op_parallelism_threads": 1}, "threads="),
    (fr.train.Replicated, {"num_replicas": 3}, "replicas="),
    (fr.train.FirstOf, {"update": 3}, "did you mean updates="),
    (fr.Graph, {"sed": 1}, "did you mean seed="),
    (fr.optim.SGD, {"lr": 0.1, "momentum": 0.9}, r"write fr.optim.Momentum\(lr, momentum"),
    (fr.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}, r"write fr.optim.AdamW\(lr, weight_decay=\.\.\.\)"),
]


@pytest.mark.parametrize(("kind", "given", "here"), CONSTRUCTED)
def test_an_argument_of_a_class_that_is_called_otherwise_elsewhere_is_answered_by_ours(
    kind: Callable[..., object], given: dict[str, object], here: str
) -> None:
    with pytest.raises((fr.SpecError, fr.GraphError), match=rf"test_familiar.py:\d+.*{here}"):
        kind(**given)


def test_sizes_that_are_given_one_by_one_are_answered_by_a_tuple() -> None:
    untyped: Any = fr
    with pytest.raises(fr.SpecError, match=r"too many positional arguments; write shape=\(2, -1\)"):
        untyped.reshape(np.ones((2, 3)), 2, -1)


def test_an_optimiser_is_named_for_its_arguments_to_other_optimisers_alone() -> None:
    untyped: Any = fr.nn
    with pytest.raises(fr.SpecError) as error:
        untyped.batch_norm(np.ones((2, 3)), momentum=0.9)
    assert "optim" not in str(error.value)


def test_asking_for_what_is_not_there_stays_an_ordinary_question() -> None:
    assert not hasattr(fr, "cast")
    assert getattr(fr.nn, "Linear", None) is None
    assert "cast" not in dir(fr)
    with pytest.raises(ImportError):
        from flowrt import cast  # type: ignore[attr-defined]  # noqa: F401
    for name in ("__wrapped__", "_private"):
        with pytest.raises(AttributeError) as caught:
            getattr(fr, name)
        assert "write" not in str(caught.value)
    assert pickle.loads(pickle.dumps(fr.Spec("float32", (2,)))) == fr.Spec("float32", (2,))
    with fr.Graph():
        x = fr.placeholder("float32", (2,))
        assert not hasattr(x, "numpy")
        assert copy.copy({x: 1}) == {x: 1}
        assert not hasattr(x, "__len_hint__")
        assert fr.nn.embedding(np.int32([1]), np.ones((3, 2))).shape == (1, 2)


@pytest.mark.parametrize("namespace", sorted({*pages()} - {"an argument"}))
def test_what_the_pages_say_to_write_exists(namespace: str) -> None:
    seen: set[str] = set()
    for here, names in pages()[namespace]:
        assert here, names
        for name in names:
            assert name not in seen, f"{name} stands twice in {namespace}"
            seen.add(name)
            for path in named(here.replace("NAME", name)):
                assert exists(path), (here, path)
            module = MODULES.get(namespace)
            if module is not None:
                assert name not in vars(module), f"{namespace}.{name} is there"
            assert hint(namespace, name).startswith("; write ")


OF_ONE = (
    "exp2",
    "arcsinh",
    "arctanh",
    "cbrt",
    "rad2deg",
    "sinc",
    "trunc",
    "signbit",
    "isposinf",
    "nan_to_num",
)
ABOVE_ONE = ("log2", "log10", "arccosh", "trace", "diagonal", "triu", "tril", "rot90")
OF_TWO = ("fmod", "fmax", "fmin", "logaddexp", "vdot", "vecdot", "copysign", "array_equal")
"""NumPy's functions that are answered by expressions of their operands alone."""


def test_expressions_come_to_what_they_stand_for() -> None:
    x, y = np.array([[-0.9, -0.3], [0.25, 0.7]]), np.array([[1.0, 2.5], [3.0, 40.0]])
    cases = (
        [(name, (x,)) for name in OF_ONE] + [(name, (y,)) for name in ABOVE_ONE] + [(name, (x, y)) for name in OF_TWO]
    )
    cases += [("fmod", (x, -y)), ("outer", (x[0], y[1]))]
    for name, given in cases:
        expression = hint("fr", name).removeprefix("; write ")
        found = eval(expression, {"fr": fr, "np": np, "x": given[0], "a": given[0], "b": given[-1], "n": 2})
        wanted = np.sum(x * y, -1) if name == "vecdot" else getattr(np, name)(*given)  # NumPy 2 has it
        assert np.allclose(found, wanted), (name, expression)


def named(text: str) -> list[str]:
    """What is named in a text as of flowrt's: ``fr.nn.softmax``."""
    return [path.rstrip(".") for path in re.findall(r"\bfr\.[A-Za-z_][\w.]*", text)]


def exists(path: str) -> bool:
    value: Any = fr
    for name in path.split(".")[1:]:
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def sayings() -> Iterator[tuple[str, str]]:
    """Every text in flowrt's files: errors and docstrings, parts of formatted ones too."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{file.relative_to(PACKAGE)}:{node.lineno}", node.value


def test_no_text_names_what_does_not_exist() -> None:
    found = [(where, path) for where, text in sayings() for path in named(text)]
    assert len(found) > 30
    assert [(where, path) for where, path in found if not exists(path)] == []


def test_nothing_is_looked_for_among_all_names_while_a_graph_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes half a millisecond, as much as some ops."""
    monkeypatch.setattr(operators, "hint", lambda *about: pytest.fail(f"a tensor was asked for {about}"))
    with fr.Graph():
        x = fr.placeholder("float32", (None, 3))
        table = fr.Variable(np.zeros((9, 3), np.float32))
        rows = fr.nn.embedding_lookup(table, np.array([1, 2]))
        loss = fr.sum(fr.nn.relu(x @ fr.transpose(table)[:, :3] + 1.0)) * fr.mean(rows)
        fr.optim.Adam(0.1).minimize(loss)
        fr.gradients(loss, [x, table])
        fr.while_loop(lambda i: i < 3, lambda i: i + 1, np.int64(0))
