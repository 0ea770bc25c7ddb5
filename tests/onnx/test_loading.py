"""Models of ONNX as graphs: what `fr.onnx.load` builds, what it lets one do, and what it refuses."""

from __future__ import annotations

import builtins
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest
from example import normal
from onnx import TensorProto, helper, numpy_helper
from onnx_world import light_model, model_of

import flowrt as fr
from flowrt.onnx import backend
from flowrt.onnx.reading import reader

if TYPE_CHECKING:
    from pathlib import Path

W, B = normal(3, 2), normal(2, seed=1)


def perceptron(**more: Any) -> Any:
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["sums"], name="dense"),
        helper.make_node("Relu", ["sums"], ["y"], name="relu"),
    ]
    return model_of(nodes, {"x": ("float32", ("batch", 3))}, ["y"], {"w": W, "b": B}, **more)


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x @ W + B, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    onnx.save(perceptron(), str(tmp_path / "model.onnx"))
    return tmp_path / "model.onnx"


def test_a_model_is_run_by_the_names_of_its_inputs_and_outputs(path: Path) -> None:
    model, x = fr.onnx.load(path), normal(4, 3, seed=2)
    assert list(model.inputs) == ["x"]
    assert list(model.outputs) == ["y"]
    with fr.BlockingSession(model.graph) as session:
        np.testing.assert_allclose(session.run(model.outputs["y"], {model.inputs["x"]: x}), relu(x), rtol=1e-6)


def test_sizes_with_names_are_open(path: Path) -> None:
    model = fr.onnx.load(path.read_bytes())
    assert model.inputs["x"].shape == (None, 3)
    assert model.outputs["y"].shape == (None, 2)


def test_a_model_is_part_of_a_graph_whose_tensors_it_is_given(path: Path) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 3))
        model = fr.onnx.load(path, {"x": x * 2})
        y = fr.sum(model.outputs["y"])
    assert model.inputs["x"].graph is graph
    with fr.BlockingSession(graph) as session:
        given = normal(4, 3, seed=3)
        np.testing.assert_allclose(session.run(y, {x: given}), relu(given * 2).sum(), rtol=1e-6)


def test_weights_that_are_variables_are_trained(path: Path) -> None:
    with fr.Graph() as graph:
        model = fr.onnx.load(path, trainable=True)
        loss = fr.mean(fr.square(model.outputs["y"] - 1))
        train = fr.optim.SGD(0.1).minimize(loss)
    assert sorted(model.variables) == ["b", "w"]
    with fr.BlockingSession(graph) as session:
        feeds = {model.inputs["x"]: normal(8, 3, seed=4)}
        np.testing.assert_array_equal(session.run(model.variables["w"]), W)
        losses = [session.run((loss, train), feeds)[0] for _ in range(50)]
    assert losses[-1] < losses[0] / 2


def test_weights_are_trained_that_are_named_and_statistics_never(path: Path) -> None:
    assert list(fr.onnx.load(path, trainable=["b"]).variables) == ["b"]
    weights = {name: np.ones(2, np.float32) for name in ("scale", "offset", "mean", "variance")}
    node = helper.make_node("BatchNormalization", ["x", *weights], ["y"])
    model = fr.onnx.load(model_of([node], {"x": ("float32", (1, 2, 3, 3))}, ["y"], weights), trainable=True)
    assert sorted(model.variables) == ["offset", "scale"]
    with pytest.raises(fr.GraphError, match=r"no weights \['nothing'\]"):
        fr.onnx.load(path, trainable=["nothing"])


def test_nodes_are_named_as_in_the_model(path: Path) -> None:
    model = fr.onnx.load(path)
    assert {"small/dense/matmul", "small/relu/relu"} <= {node.name for node in model.graph.nodes}


def test_metadata_is_kept() -> None:
    model = perceptron()
    helper.set_model_props(model, {"author": "someone"})
    assert fr.onnx.load(model).metadata == {"author": "someone"}


def test_everything_that_cannot_be_read_is_told_at_once() -> None:
    nodes = [
        helper.make_node("StringNormalizer", ["x"], ["a"], name="first"),
        helper.make_node("Cast", ["x"], ["b"], name="second", to=TensorProto.FLOAT8E5M2),
        helper.make_node("Custom", ["x"], ["c"], name="third", domain="else.where"),
        helper.make_node("Add", ["a", "b"], ["d"], name="of what is not read"),
    ]
    model = model_of(nodes, {"x": ("float32", (2,))}, ["c", "d"])
    with pytest.raises(fr.GraphError) as error:
        fr.onnx.load(model)
    told = str(error.value)
    assert [word in told for word in ("'first'", "'second'", "'third'", "of what")] == [True, True, True, False]
    assert "float8e5m2" in told
    assert "else.where" in told


def test_operators_that_nothing_computes_are_told_though_what_they_take_is_not_read_either() -> None:
    nodes = [
        helper.make_node("StringNormalizer", ["x"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"], name="known"),
        helper.make_node("StringConcat", ["b", "b"], ["c"], name="second"),
        helper.make_node("Bogus", ["c"], ["d"], name="third"),
        helper.make_node("Custom", ["d"], ["e"], name="fourth", domain="else.where"),
    ]
    with pytest.raises(fr.GraphError) as error:
        fr.onnx.load(model_of(nodes, {"x": ("float32", (2,))}, ["e"]))
    assert str(error.value).splitlines()[1:] == [
        "  StringNormalizer 'first': flowrt has nothing that computes it",
        "  StringConcat 'second': flowrt has nothing that computes it",
        "  Bogus 'third': opset 21 has no such operator",
        "  Custom 'fourth': operators of else.where are not supported",
    ]


def test_what_would_have_to_be_known_is_asked_for_and_given_as_an_array() -> None:
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)
    model = model_of([node], {"x": ("float32", (2, 3)), "axes": ("int64", (1,))}, ["y"])
    with pytest.raises(fr.GraphError, match="the axes must be known"):
        fr.onnx.load(model)
    loaded = fr.onnx.load(model, {"axes": np.array([1])})
    assert list(loaded.inputs) == ["x"]
    assert loaded.outputs["y"].shape == (2,)


def test_inputs_that_are_none_of_the_models_or_of_another_dtype_are_refused(path: Path) -> None:
    with pytest.raises(fr.GraphError, match=r"no inputs \['z'\]; it has \['x'\]"):
        fr.onnx.load(path, {"z": np.ones(3, np.float32)})
    with pytest.raises(fr.GraphError, match=r"'x' is float32\[\?,3\], not of int64"):
        fr.onnx.load(path, {"x": np.ones((2, 3), np.int64)})


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no model")
    for given in (tmp_path / "text", b"no model", b""):
        with pytest.raises(fr.GraphError, match="hold no model of ONNX"):
            fr.onnx.load(given)
    with pytest.raises(fr.GraphError, match="cannot be read: No such file"):
        fr.onnx.load(tmp_path / "absent")


def test_a_newer_opset_is_refused_and_an_older_one_converted() -> None:
    with pytest.raises(fr.GraphError, match="of opset 999"):
        fr.onnx.load(perceptron(opset=999))
    model = fr.onnx.load(perceptron(opset=9))
    with fr.BlockingSession(model.graph) as session:
        x = normal(2, 3)
        np.testing.assert_allclose(session.run(model.outputs["y"], {model.inputs["x"]: x}), relu(x), rtol=1e-6)


def _beside(folder: Path, location: str) -> Path:
    """A model whose weight lies in a file at ``location``."""
    model = perceptron()
    tensor = model.graph.initializer[0]
    data = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (folder / "weights.bin").write_bytes(data)
    return folder / "model.onnx"


def test_weights_in_a_file_beside_the_model_are_read(tmp_path: Path) -> None:
    model, x = fr.onnx.load(_beside(tmp_path, "weights.bin")), normal(2, 3)
    with fr.BlockingSession(model.graph) as session:
        np.testing.assert_allclose(session.run(model.outputs["y"], {model.inputs["x"]: x}), relu(x), rtol=1e-6)


def test_no_file_outside_of_the_models_folder_is_read(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret.bin").write_bytes(W.tobytes())
    for location in ("../secret.bin", str(tmp_path / "secret.bin")):
        with pytest.raises(fr.GraphError, match="what lies beside it cannot be read"):
            fr.onnx.load(_beside(inner, location))
    with pytest.raises(fr.GraphError, match="give the model's path"):
        fr.onnx.load(_beside(inner, "weights.bin").read_bytes())


def test_functions_of_the_model_are_read_with_their_attributes() -> None:
    inside = helper.make_node("LeakyRelu", ["a"], ["b"])
    inside.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    function = helper.make_function("mine", "Leaky", ["a"], ["b"], [inside], [helper.make_opsetid("", 21)], ["slope"])
    model = model_of(
        [helper.make_node("Leaky", ["x"], ["y"], domain="mine", slope=0.25)], {"x": ("float32", (2,))}, ["y"]
    )
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("mine", 1))
    loaded = fr.onnx.load(model)
    with fr.BlockingSession(loaded.graph) as session:
        found = session.run(loaded.outputs["y"], {loaded.inputs["x"]: np.float32([-4, 4])})
    np.testing.assert_array_equal(found, np.float32([-1, 4]))


def test_a_function_that_holds_itself_is_refused() -> None:
    node = helper.make_node("Endless", ["a"], ["b"], domain="mine")
    function = helper.make_function("mine", "Endless", ["a"], ["b"], [node], [helper.make_opsetid("mine", 1)])
    model = model_of([helper.make_node("Endless", ["x"], ["y"], domain="mine")], {"x": ("float32", (2,))}, ["y"])
    model.functions.append(function)
    with pytest.raises(fr.GraphError, match="nested more than 64 deep"):
        fr.onnx.load(model)


def test_images_stay_with_their_channels_last_between_layers() -> None:
    weights = {"f": normal(4, 2, 3, 3), "g": normal(4, 4, 3, 3, seed=1)}
    nodes = [
        helper.make_node("Conv", ["x", "f"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "g"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["b", "c"], ["d"]),
        helper.make_node("MaxPool", ["d"], ["y"], kernel_shape=[2, 2], strides=[2, 2]),
    ]
    model = fr.onnx.load(model_of(nodes, {"x": ("float32", (1, 2, 8, 8))}, ["y"], weights))
    needed, stack = set(), [model.outputs["y"].op]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += [tensor.op for tensor in node.inputs]
    assert sum(node.op.name == "transpose" for node in needed) == 2


def test_a_branch_that_is_decided_by_a_weight_is_the_only_one_read() -> None:
    def branch(op: str) -> Any:
        node = helper.make_node(op, ["x"], ["out"])
        return helper.make_graph([node], op, [], [onnx.ValueInfoProto(name="out")])

    node = helper.make_node("If", ["c"], ["y"], then_branch=branch("Neg"), else_branch=branch("StringNormalizer"))
    model = fr.onnx.load(model_of([node], {"x": ("float32", (2,))}, ["y"], {"c": np.array(True)}))
    assert [node.op.name for node in model.graph.nodes] == ["placeholder", "negative"]


def test_a_loop_stacks_what_its_iterations_answer_until_its_condition_fails() -> None:
    body = helper.make_graph(
        [
            helper.make_node("Mul", ["held", "two"], ["next"]),
            helper.make_node("Less", ["next", "most"], ["more"]),
            helper.make_node("Identity", ["next"], ["row"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, ()),
            helper.make_tensor_value_info("go", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("held", TensorProto.FLOAT, ()),
        ],
        [onnx.ValueInfoProto(name=name) for name in ("more", "next", "row")],
    )
    node = helper.make_node("Loop", ["", "", "x"], ["last", "rows"], body=body)
    weights = {"two": np.float32(2), "most": np.float32(20)}
    weights = {name: np.asarray(value) for name, value in weights.items()}
    model = fr.onnx.load(model_of([node], {"x": ("float32", ())}, ["last", "rows"], weights))
    with fr.BlockingSession(model.graph) as session:
        last, rows = session.run(list(model.outputs.values()), {model.inputs["x"]: np.float32(3)})
    assert last == 24
    np.testing.assert_array_equal(rows, np.float32([6, 12, 24]))


def test_a_prepared_model_takes_inputs_in_order_or_by_name(path: Path) -> None:
    prepared, x = backend.prepare(onnx.load(str(path))), normal(2, 3)
    for given in ([x], {"x": x}):
        np.testing.assert_allclose(prepared.run(given)[0], relu(x), rtol=1e-6)
    assert not backend.supports_device("CUDA")
    unread = model_of([helper.make_node("StringNormalizer", ["x"], ["y"])], {"x": ("float32", (2,))}, ["y"])
    assert not backend.is_compatible(unread)


def test_without_the_package_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "onnx" or name.startswith("onnx."):
            raise ModuleNotFoundError(f"No module named {name!r}", name="onnx")
        return kept(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("flowrt.onnx.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'flowrt\[onnx\]'"):
        _ = fr.onnx.load


def test_a_damaged_weight_is_refused() -> None:
    model = perceptron()
    model.graph.initializer[0].raw_data = b"short"
    with pytest.raises(fr.GraphError, match="the weight 'w': the tensor 'w' is damaged"):
        fr.onnx.load(model)


def test_a_weight_is_the_default_of_an_input_of_its_name() -> None:
    node = helper.make_node("Add", ["x", "by"], ["y"])
    model = model_of([node], {"x": ("float32", (2,)), "by": ("float32", (2,))}, ["y"])
    model.graph.initializer.append(numpy_helper.from_array(np.float32([1, 2]), "by"))
    assert list(fr.onnx.load(model).inputs) == ["x"]
    loaded = fr.onnx.load(model, {"by": np.float32([5, 5])})
    with fr.BlockingSession(loaded.graph) as session:
        found = session.run(loaded.outputs["y"], {loaded.inputs["x"]: np.float32([0, 0])})
    np.testing.assert_array_equal(found, np.float32([5, 5]))


def run_of(model: Any, **arrays: np.ndarray) -> np.ndarray:
    loaded = fr.onnx.load(model)
    with fr.BlockingSession(loaded.graph) as session:
        (found,) = session.run(list(loaded.outputs.values()), {loaded.inputs[name]: a for name, a in arrays.items()})
    return found


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
def test_what_was_over_all_axes_from_one_on_still_is(op: str) -> None:
    x = normal(2, 3, 4)
    found = run_of(model_of([helper.make_node(op, ["x"], ["y"])], {"x": ("float32", (2, 3, 4))}, ["y"], opset=11), x=x)
    flat = run_of(
        model_of([helper.make_node(op, ["x"], ["y"])], {"x": ("float32", (2, 12))}, ["y"]), x=x.reshape(2, 12)
    )
    np.testing.assert_allclose(found, flat.reshape(2, 3, 4), rtol=1e-6)


def test_images_are_resized_as_before_opset_11() -> None:
    weights = {"s": np.float32([1, 1, 2, 2])}
    for op, opset in (("Upsample", 9), ("Resize", 10)):
        node = helper.make_node(op, ["x", "s"], ["y"], mode="linear")
        x = np.float32([[[[0, 4], [8, 12]]]])
        found = run_of(model_of([node], {"x": ("float32", (1, 1, 2, 2))}, ["y"], weights, opset), x=x)
        np.testing.assert_array_equal(found[0, 0, 0], np.float32([0, 2, 4, 4]))
    node = helper.make_node("Resize", ["x", "s"], ["y"])
    small = model_of([node], {"x": ("float32", (1, 1, 4, 4))}, ["y"], {"s": np.float32([1, 1, 0.6, 0.6])}, 10)
    with pytest.raises(fr.GraphError, match="which entries are the nearest"):
        fr.onnx.load(small)


def test_an_old_model_whose_bodies_meant_something_else_is_refused() -> None:
    def branch(op: str) -> Any:
        return helper.make_graph([helper.make_node(op, ["x"], ["out"])], op, [], [onnx.ValueInfoProto(name="out")])

    node = helper.make_node("If", ["c"], ["y"], then_branch=branch("Softmax"), else_branch=branch("Neg"))
    model = model_of([node], {"x": ("float32", (2, 3)), "c": ("bool", ())}, ["y"], opset=11)
    with pytest.raises(fr.GraphError, match=r"\['Softmax'\] inside of loops or branches"):
        fr.onnx.load(model)


def test_what_onnx_cannot_convert_is_refused() -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to="INT64")
    with pytest.raises(fr.GraphError, match="ONNX's converter cannot convert it"):
        fr.onnx.load(model_of([node], {"x": ("float32", (2, 3))}, ["y"], opset=5))


def test_an_attribute_that_the_operator_has_not_is_refused() -> None:
    node = helper.make_node("Squeeze", ["x"], ["y"], axes=[0])  # as before opset 13
    with pytest.raises(fr.GraphError, match=r"opset 21 has no attributes \['axes'\]"):
        fr.onnx.load(model_of([node], {"x": ("float32", (1, 3))}, ["y"]))


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (helper.make_node("Add", ["x"], ["y"]), "takes 2 to 2 inputs, and has 1"),
        (helper.make_node("Cast", ["x"], ["y"]), "lacks the attribute 'to'"),
        (helper.make_node("Transpose", ["x"], ["y"], perm="01"), "'perm' is of another kind"),
        (helper.make_node("Transpose", ["x"], ["y"], perm=[0, 7]), "do not order"),
        (helper.make_node("Softmax", ["x"], ["y"], axis=5), "axis 5 is none of 2 axes"),
        (helper.make_node("Add", ["x", "z"], ["y"]), "nothing makes its input 'z'"),
        (helper.make_node("TopK", ["x", "k"], ["y", "i"]), "k is one integer from 0 up, not -1"),
        (helper.make_node("EyeLike", ["cube"], ["y"]), r"like float32\[1,1,1\], there is none"),
    ],
    ids=lambda value: getattr(value, "op_type", ""),
)
def test_a_node_that_is_not_what_its_operator_takes_is_refused(node: Any, why: str) -> None:
    weights = {"k": np.int64([-1]), "cube": normal(1, 1, 1)}
    with pytest.raises(fr.GraphError, match=why):
        fr.onnx.load(model_of([node], {"x": ("float32", (2, 3))}, ["y"], weights))


@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_recurrent_layers_of_examples_of_different_lengths_are_what_the_runtime_makes(op: str, direction: str) -> None:
    gates, sides = {"RNN": 1, "GRU": 3, "LSTM": 4}[op], 2 if direction == "bidirectional" else 1
    weights = {
        "w": normal(sides, 2 * gates, 4),
        "r": normal(sides, 2 * gates, 2, seed=1),
        "b": normal(sides, 4 * gates, seed=2),
        "lengths": np.int32([5, 2, 3]),
        "h": normal(sides, 3, 2, seed=3),
    }
    node = helper.make_node(op, ["x", *weights], ["y", "last"], hidden_size=2, direction=direction)
    model, x = model_of([node], {"x": ("float32", (5, 3, 4))}, ["y", "last"], weights), normal(5, 3, 4, seed=4)
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    for found, want in zip(backend.prepare(model).run([x]), wanted, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("curve", "said"),
    [("Affine", True), ("ScaledTanh", True), ("hardsigmoid", True), ("hardsigmoid", False), ("leakyrelu", False)],
)
def test_activations_of_layers_take_their_numbers_however_their_names_are_written(curve: str, said: bool) -> None:
    numbers = {"activation_alpha": [0.3], "activation_beta": [0.4]} if said else {}
    weights = {"w": normal(1, 6, 4), "r": normal(1, 6, 2, seed=1)}
    node = helper.make_node("GRU", ["x", *weights], ["y"], hidden_size=2, activations=[curve, "Tanh"], **numbers)
    model, x = model_of([node], {"x": ("float32", (3, 2, 4))}, ["y"], weights), normal(3, 2, 4, seed=2)
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(backend.prepare(model).run([x])[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_a_classifier_of_images_is_what_the_runtime_makes_of_it(name: str) -> None:
    """Models of opset 9, with weights that are drawn, so that what comes of them tells entries apart."""
    model, x = light_model(name), normal(1, 3, 224, 224)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    judge = onnxruntime.InferenceSession(model.SerializeToString(), options)
    (wanted,) = judge.run(None, {judge.get_inputs()[0].name: x})
    (found,) = backend.prepare(model).run([x])
    assert wanted.std() > 1e-5
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)


NEAREST = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
FIRST_SIZE = {"first": np.array([0]), "second": np.array([1])}


def resized_to_size_of(name: str) -> list[Any]:
    """The nodes that resize x to the first size of an input and the weight ``rest``."""
    return [
        helper.make_node("Shape", [name], ["shape"]),
        helper.make_node("Slice", ["shape", "first", "second"], ["batch"]),
        helper.make_node("Concat", ["batch", "rest"], ["whole"], axis=0),
        helper.make_node("Resize", ["x", "", "", "whole"], ["y"], **NEAREST),
    ]


@pytest.mark.parametrize("by", ["scales", "sizes"])
def test_images_are_resized_whose_batch_is_open(by: str) -> None:
    if by == "scales":
        nodes = [helper.make_node("Resize", ["x", "", "scales"], ["y"], **NEAREST)]
        weights = {"scales": np.array([1, 1, 2, 2], "float32")}
    else:
        nodes, weights = resized_to_size_of("x"), FIRST_SIZE | {"rest": np.array([1, 6, 8])}
    model = fr.onnx.load(model_of(nodes, {"x": ("float32", ("batch", 1, 3, 4))}, ["y"], weights))
    with fr.BlockingSession(model.graph) as session:
        for batch in (1, 3):
            x = normal(batch, 1, 3, 4)
            found = session.run(model.outputs["y"], {model.inputs["x"]: x})
            np.testing.assert_array_equal(found, x.repeat(2, axis=2).repeat(2, axis=3))


def test_a_batch_that_a_model_resizes_is_an_error_of_the_step() -> None:
    inputs = {"x": ("float32", ("batch", 2)), "z": ("float32", ("others",))}
    model = fr.onnx.load(model_of(resized_to_size_of("z"), inputs, ["y"], FIRST_SIZE | {"rest": np.array([4])}))
    x, z = model.inputs["x"], model.inputs["z"]
    with fr.BlockingSession(model.graph) as session:
        assert session.run(model.outputs["y"], {x: normal(3, 2), z: normal(3)}).shape == (3, 4)
        with pytest.raises(fr.FlowrtError, match="reshape"):
            session.run(model.outputs["y"], {x: normal(3, 2), z: normal(6)})


def test_functions_that_use_others_twice_are_refused_before_anybody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MOST_NODES", 1000)
    model = model_of([helper.make_node("F0", ["x"], ["y"], domain="mine")], {"x": ("float32", (2,))}, ["y"])
    for n in range(40):
        inner = ("Relu", "") if n == 39 else (f"F{n + 1}", "mine")
        nodes = [helper.make_node(inner[0], ["a"], [out], domain=inner[1]) for out in ("c", "b")]
        opsets = [helper.make_opsetid("mine", 1), helper.make_opsetid("", 21)]
        model.functions.append(helper.make_function("mine", f"F{n}", ["a"], ["b"], nodes, opsets))
    with pytest.raises(fr.GraphError, match="come to more than 1000 nodes"):
        fr.onnx.load(model)


@pytest.mark.parametrize("inside", ["constant", "function", "branch"])
def test_a_tensor_of_a_file_is_read_of_no_folder_that_nobody_named(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.bin").write_bytes(np.float32([1, 2]).tobytes())
    monkeypatch.chdir(tmp_path)
    tensor = TensorProto(name="t", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="secret.bin")
    node, functions = helper.make_node("Constant", [], ["y"], value=tensor), []
    if inside == "function":
        functions = [helper.make_function("mine", "F", [], ["y"], [node], [helper.make_opsetid("", 21)])]
        node = helper.make_node("F", [], ["y"], domain="mine")
    elif inside == "branch":
        out = helper.make_tensor_value_info("t", TensorProto.FLOAT, (2,))
        branch = helper.make_graph([], "b", [], [out], [tensor])
        node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    model = model_of([node], {"c": ("bool", ())}, ["y"])
    model.functions.extend(functions)
    with pytest.raises(fr.GraphError, match="'t' lies in a file beside the model"):
        fr.onnx.load(model.SerializeToString())


@pytest.mark.parametrize(
    ("op", "attrs", "weights"),
    [
        ("Cast", {"to": 999}, {}),
        ("MaxPool", {"kernel_shape": [3]}, {}),
        ("MaxPool", {"kernel_shape": [2, 2], "strides": [0, 0], "ceil_mode": 1}, {}),
        ("DepthToSpace", {"blocksize": 0}, {}),
        ("Pad", {}, {"p": np.array([1])}),
        ("Pad", {}, {"p": np.array([1, 1]), "": None, "axes": np.array([7])}),
        ("Slice", {}, {"s": np.array([0]), "e": np.array([1]), "a": np.array([9])}),
        ("Resize", {"mode": "nearest"}, {"": None, "s": np.float32([1, 1, np.nan, 1])}),
        ("Resize", {"mode": "nearest"}, {"": None, "s": np.float32([1, 1, -2, 1])}),
        ("CumSum", {}, {"axis": np.array(9)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_no_sense_is_refused_in_one_error(op: str, attrs: Any, weights: Any) -> None:
    node = helper.make_node(op, ["x", *weights], ["y"], name="it", **attrs)
    held = {name: array for name, array in weights.items() if name}
    with pytest.raises(fr.GraphError, match=f"cannot be read:\n  {op} 'it'"):
        fr.onnx.load(model_of([node], {"x": ("float32", (1, 4, 4, 4))}, ["y"], held))


@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
def test_recurrent_layers_are_trained_further(op: str) -> None:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op]
    weights = {"w": normal(1, 2 * gates, 4), "r": normal(1, 2 * gates, 2, seed=1)}
    node = helper.make_node(op, ["x", *weights], ["y"], hidden_size=2)
    proto, x = model_of([node], {"x": ("float32", (5, 3, 4))}, ["y"], weights), normal(5, 3, 4, seed=4)
    with fr.Graph() as graph:
        model = fr.onnx.load(proto, trainable=True)
        loss = fr.sum(fr.square(model.outputs["y"]))
        train = fr.optim.SGD(0.1).minimize(loss)
    with fr.BlockingSession(graph) as session:
        first = session.run(loss, {model.inputs["x"]: x})
        session.run(train, {model.inputs["x"]: x})
        assert session.run(loss, {model.inputs["x"]: x}) < first
    assert sorted(model.variables) == ["r", "w"]
    np.testing.assert_allclose(first, np.square(run_of(proto, x=x)).sum(), rtol=1e-5)


NAMED = {
    "another node": [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["y"], name="it")],
    "an input": [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Abs", ["y"], ["x"], name="it")],
    "a weight": [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["w"], name="it")],
    "the node itself": [helper.make_node("Split", ["x"], ["y", "y"], name="it", num_outputs=2)],
}


@pytest.mark.parametrize("whose", NAMED)
def test_a_node_that_makes_what_has_the_name_of_something_else_is_refused(whose: str) -> None:
    model = model_of(NAMED[whose], {"x": ("float32", (2,))}, ["y"], {"w": np.ones(2, "float32")})
    with pytest.raises(fr.GraphError, match=r"\'it\': it makes \'[xyw]\', which is there already"):
        fr.onnx.load(model)


def test_inputs_and_weights_of_one_name_are_refused() -> None:
    node = helper.make_node("Add", ["x", "w"], ["y"])
    model = model_of([node], {"x": ("float32", (2,))}, ["y"], {"w": np.ones(2, "float32")})
    model.graph.input.append(model.graph.input[0])
    model.graph.initializer.append(model.graph.initializer[0])
    with pytest.raises(fr.GraphError, match=r"the weight 'w': it is there twice\n  the input 'x': it is there 2 times"):
        fr.onnx.load(model)


def test_a_branch_may_name_its_own_as_those_around_it_are_named() -> None:
    out = helper.make_tensor_value_info("z", TensorProto.FLOAT, (2,))
    nodes = [helper.make_node("Neg", ["x"], ["t"]), helper.make_node("Abs", ["t"], ["z"])]
    branch = helper.make_graph(nodes, "b", [], [out])
    around = [helper.make_node("Exp", ["x"], ["t"]), helper.make_node("Identity", ["t"], ["e"])]
    choose = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    model = model_of([*around, choose], {"x": ("float32", (2,)), "c": ("bool", ())}, ["y"])
    x = np.float32([-1, 2])
    np.testing.assert_array_equal(run_of(model, x=x, c=np.array(True)), np.abs(x))
