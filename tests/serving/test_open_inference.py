"""The protocol: what is asked is checked with the signature, and what is answered reads back to the bit."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_world import asking, doubling, frozen

from flowrt.base.errors import FeedError
from flowrt.base.spec import NAMES, as_dtype, is_float
from flowrt.serving.protocol import LONG, MARKS, PIECE, Inquiry, datatype_of, described, read, written

MODEL = doubling()
ROW = np.arange(8, dtype="float32")[None]


def given_as(**changes: Any) -> bytes:
    """A request whose only input is changed so; None takes a key away."""
    body = asking(ROW)
    tensor = {**body["inputs"][0], **changes}
    body["inputs"] = [{key: value for key, value in tensor.items() if value is not None}]
    return json.dumps(body).encode()


def test_a_request_is_read() -> None:
    asked = read(json.dumps(asking(ROW, id="7")).encode(), None, MODEL)
    assert (asked.id, asked.wanted) == ("7", {"y": False})
    np.testing.assert_array_equal(asked.values["x"], ROW)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": "z"}, "gives the input 'z'; the model takes x"),
        ({"datatype": "FP64"}, r"input 'x': expected FP32 of shape \[-1, 8\], got datatype 'FP64'; convert it to FP32"),
        ({"datatype": "BYTES", "data": ["a"]}, "text is not taken"),
        ({"datatype": None}, "got datatype None"),
        ({"shape": [8]}, r"got shape \[8\]; give it a first axis of 1"),
        ({"shape": [1, 9]}, r"got shape \[1, 9\]"),
        ({"shape": [-1, 8]}, "a shape is a list of sizes"),
        ({"shape": [True, 8]}, "a shape is a list of sizes"),
        ({"shape": [1] * 9}, "a shape is a list of sizes"),
        ({"shape": "1,8"}, "a shape is a list of sizes"),
        ({"shape": [2, 8]}, r"shape \[2, 8\], which is 16 entries, and data \[8\]"),
        ({"data": [[0] * 4] * 2}, r"data \[2, 4\]"),
        ({"data": ["0"] * 8}, "got data of str, as '0'"),
        ({"data": [None] * 8}, "got data of NoneType, as None"),
        ({"data": [[1], [2, 3]]}, "input 'x'"),
        ({"data": [1e300] * 8}, "does not fit float32"),
        ({"data": {"a": 1}}, "data is a list"),
        ({"data": None}, "data is a list"),
        ({"data": None, "parameters": {"shared_memory_region": "a"}}, "parameter 'shared_memory_region' is"),
        ({"parameters": 3}, "parameters is an object"),
        ({"parameters": {"binary_data_size": 32}}, "which is 32 bytes"),
    ],
)
def test_an_input_that_does_not_fit_is_named_with_what_was_expected(changes: Any, text: str) -> None:
    with pytest.raises(FeedError, match=text):
        read(given_as(**changes), None, MODEL)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "the request is an object"),
        (b"{}", "'inputs' are a list"),
        (b'{"inputs": [3]}', "an input is an object"),
        (b'{"inputs": []}', r"lacks input 'x': expected FP32 of shape \[-1, 8\]"),
        (json.dumps({"inputs": asking(ROW)["inputs"] * 2}).encode(), "gives the input 'x' twice"),
        (json.dumps(asking(ROW, id=7)).encode(), "id of a request is a string"),
        (json.dumps(asking(ROW, outputs=[{"name": "z"}])).encode(), "no output 'z'; it has y"),
        (json.dumps(asking(ROW, outputs=3)).encode(), "'outputs' are a list"),
        (
            json.dumps(asking(ROW, outputs=[{"name": "y", "parameters": {"classification": 3}}])).encode(),
            "parameter 'classification' is of an extension that is not here; there is binary_tensor_data",
        ),
    ],
)
def test_a_request_that_is_none_is_refused(body: bytes, text: str) -> None:
    with pytest.raises(FeedError, match=text):
        read(body, None, MODEL)


def as_bytes(array: Any, datatype: str, size: int | None = None) -> tuple[bytes, str]:
    tensor = {"name": "x", "shape": list(array.shape), "datatype": datatype}
    tensor["parameters"] = {"binary_data_size": array.nbytes if size is None else size}
    head = json.dumps({"inputs": [tensor]}).encode()
    return head + array.tobytes(), str(len(head))


@pytest.mark.parametrize("dtype", sorted({*NAMES.values(), "bfloat16"}))  # which is known once it is asked for
@pytest.mark.parametrize("binary", [False, True])
def test_every_dtype_comes_and_goes_to_the_bit(dtype: str, binary: bool) -> None:
    model = frozen(lambda x: x, shape=(None, 3), dtype=dtype)
    array = np.random.default_rng(1).integers(0, 2, (4, 3)).astype(as_dtype(dtype))
    if is_float(array.dtype):
        array *= np.random.default_rng(2).normal(size=(4, 3)).astype(array.dtype)
        array[0] = [math.nan, math.inf, -0.0]
    datatype = datatype_of(array.dtype)
    if binary:
        body, length = as_bytes(array, datatype)
        asked = read(body, length, model)
    else:
        asked = read(json.dumps(asking(array)).encode(), None, model)
    assert (asked.values["x"].dtype, asked.values["x"].tobytes()) == (array.dtype, array.tobytes())
    parts, count = written(Inquiry("i", {}, {"y": binary}), "m", "v", {"y": array})
    answer = json.loads(bytes(parts[0]))
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("i", "m", "v")
    (output,) = answer["outputs"]
    assert (output["datatype"], output["shape"]) == (datatype, [4, 3])
    if binary:
        assert count == len(parts[0])
        assert bytes(parts[1]) == array.tobytes()
    else:
        assert count is None
        assert np.array(output["data"], array.dtype).tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
@pytest.mark.parametrize("count", [0, 1, PIECE, PIECE + 1, 3 * PIECE])
def test_what_is_written_in_pieces_is_one_list(dtype: str, count: int) -> None:
    array = (np.random.default_rng(3).normal(size=(count, 1)) * 1e3).astype(dtype)
    (text,), _ = written(Inquiry('"i', {}, {"a": False, "b": False}), "m", "v", {"a": array, "b": array[:1]})
    entry = {"datatype": datatype_of(array.dtype), "shape": [count, 1], "data": array.reshape(-1).tolist()}
    first, second = (
        {"name": "a", **entry},
        {"name": "b", **entry, "shape": [min(count, 1), 1], "data": entry["data"][:1]},
    )
    expected = {"model_name": "m", "model_version": "v", "id": '"i', "outputs": [first, second]}
    assert json.loads(bytes(text)) == expected


def test_a_long_request_is_read_as_a_short_one() -> None:
    rows = np.tile(ROW + 0.1, (LONG // 8, 1))
    body = json.dumps(asking(rows)).encode()
    assert len(body) > LONG
    np.testing.assert_array_equal(read(body, None, MODEL).values["x"], rows)
    numbers = np.arange(LONG)[:, None]
    body = json.dumps(asking(numbers)).encode()
    np.testing.assert_array_equal(
        read(body, None, frozen(lambda x: x, shape=(None, 1), dtype="int64")).values["x"], numbers
    )


def test_bytes_that_are_too_few_too_many_or_no_bools_are_refused() -> None:
    for size, extra in ((28, b""), (32, b"more"), (36, b"")):
        body, length = as_bytes(ROW, "FP32", size)
        with pytest.raises(FeedError, match="binary_data_size"):
            read(body + extra, length, MODEL)
    body, length = as_bytes(ROW, "FP32")
    with pytest.raises(FeedError, match="0 came"):
        read(body[:-1][: int(length)], length, MODEL)
    for wrong in ("-1", "٣", "1" * 30, str(len(body) + 1)):
        with pytest.raises(FeedError, match="Inference-Header-Content-Length"):
            read(body, wrong, MODEL)
    bools = frozen(lambda x: x, dtype="bool")
    body, length = as_bytes(np.full((1, 8), 2, "uint8"), "BOOL")
    with pytest.raises(FeedError, match="other than 0 and 1"):
        read(body, length, bools)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=12))
def test_whatever_stands_where_data_belongs_is_read_or_refused(data: Any) -> None:
    try:
        asked = read(given_as(data=data), None, MODEL)
    except FeedError:
        return
    assert asked.values["x"].shape == (1, 8)


@given(st.binary(max_size=200), st.none() | st.integers(-5, 300).map(str))
def test_no_bytes_do_harm(body: bytes, length: str | None) -> None:
    with pytest.raises(FeedError):
        read(body, length, MODEL)


@pytest.mark.parametrize("depth", [9, 33, 65, 900])
def test_lists_in_lists_are_no_deeper_than_a_shape(depth: int) -> None:
    body = given_as(data=0).replace(b'"data": 0', b'"data": ' + b"[" * depth + b"0" + b"]" * depth)
    with pytest.raises(FeedError, match=f"lists {depth} deep; data is a list, flat or nested"):
        read(body, None, MODEL)


@pytest.mark.parametrize("mark", ["[]", "{}", '""'])
def test_a_request_of_more_lists_than_are_read_at_once_is_refused_before_it_is_read(
    mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = given_as(data=0).replace(b'"data": 0', b'"data": [' + b",".join([mark.encode()] * MARKS) + b"]")
    monkeypatch.delattr("json.loads")
    with pytest.raises(FeedError, match=f"more than {MARKS} lists, objects and quotes; give data flat, or as bytes"):
        read(body, None, MODEL)


@pytest.mark.parametrize(
    ("shape", "data", "text"),
    [
        ([1, 8], [[]] * 8, r"which is 8 entries, and data \[8, 0\]"),
        ([1, 8], [None] * 9, r"which is 8 entries, and data \[9\]"),
        ([1, 8], [[0] * 9], r"which is 8 entries, and data \[1, 9\]"),
        ([2, 8], [[0] * 8, []], r"got data in which \[\] stands where a list of 8 belongs"),
        ([2, 8], [[0] * 8, 3], r"got data in which 3 stands where a list of 8 belongs"),
        ([2, 8], [[0] * 8, [0] * 7 + [[]]], "got data of list, as 0"),
    ],
)
def test_what_cannot_be_the_tensor_is_refused_before_an_array_is_made(
    shape: list[int], data: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("numpy.asarray")
    with pytest.raises(FeedError, match=text):
        read(given_as(shape=shape, data=data), None, MODEL)


def test_nested_lists_are_read_as_flat_ones() -> None:
    model = frozen(lambda x: x, shape=(None, None, 2))
    for shape in ((2, 3, 2), (0, 3, 2), (3, 0, 2)):
        array = np.arange(np.prod(shape), dtype="float32").reshape(shape)
        for data in (array.tolist(), array.reshape(-1).tolist()):
            asked = read(given_as(shape=list(shape), data=data), None, model)
            np.testing.assert_array_equal(asked.values["x"], array)


def test_metadata_say_what_a_model_takes() -> None:
    assert described(MODEL) == {
        "name": "m",
        "versions": [],
        "platform": "flowrt",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 8]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 8]}],
    }
