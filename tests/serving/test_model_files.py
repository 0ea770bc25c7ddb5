"""Models as files: whole or not at all, and no byte of them is trusted."""

from __future__ import annotations

import hashlib
import os
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from places import ROOT
from programs import python

import flowrt as fr
from flowrt.base.codec import pack, unpack
from flowrt.base.errors import BrokenStream, FlowrtError, GraphError
from flowrt.checkpoints.shards import header_of
from flowrt.serving.files import DESCRIPTION

if TYPE_CHECKING:
    from pathlib import Path

X = np.random.default_rng(1).normal(size=(4, 32)).astype("float32")


def made(scale: float = 1) -> fr.serving.Model:
    """A model with one weight that is a tensor of the file, and one that is not."""
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 32), name="x")
        w = fr.Variable(scale * np.random.default_rng(2).normal(size=(32, 48)).astype("float32"), name="w")
        y = x @ w + fr.Variable(np.ones(48, "float32"), name="b")
    with fr.BlockingSession(graph) as session:
        return fr.serving.freeze(session, {"x": x}, {"y": y}, name="linear")


def answer(model: fr.serving.Model) -> Any:
    with model:
        return model(x=X)["y"]


def test_a_model_comes_back_with_its_names_bits_and_version(tmp_path: Path) -> None:
    model = made()
    assert model.version == ""
    model.save(tmp_path / "linear")
    back = fr.serving.Model.load(tmp_path / "linear")
    assert repr(back) == repr(model)
    assert back.version == model.version != ""
    np.testing.assert_array_equal(answer(back), answer(model))


def test_the_same_model_makes_the_same_file_and_another_weight_another_version(tmp_path: Path) -> None:
    one = made()
    one.save(tmp_path / "a")
    one.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    other = made(2)
    other.save(tmp_path / "c")
    assert other.version != one.version


def test_any_reader_of_safetensors_finds_the_weights(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    made().save(tmp_path / "linear")
    tensors = load_file(tmp_path / "linear")
    assert sorted(tensors) == [DESCRIPTION, "w"]
    np.testing.assert_array_equal(tensors["w"], np.random.default_rng(2).normal(size=(32, 48)).astype("float32"))


def test_every_byte_counts(tmp_path: Path) -> None:
    path = tmp_path / "linear"
    made().save(path)
    whole = path.read_bytes()
    for at in sorted({*range(400), *range(400, len(whole), 37), len(whole) - 1}):
        changed = bytearray(whole)
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(BrokenStream, match="linear"):
            fr.serving.Model.load(path)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 1000, -1])
def test_a_file_that_was_cut_off_is_refused(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "linear"
    made().save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BrokenStream):
        fr.serving.Model.load(path)


def forged(path: Path, **changes: Any) -> None:
    """Change what a file's description says, with digests that fit."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    body = whole[8 + length :]
    weight, packed = body[: 32 * 48 * 4], body[32 * 48 * 4 + 32 :]
    data = unpack(packed)
    for key, change in changes.items():
        data[key] = change(data[key])
    packed = pack(data)
    content = hashlib.sha256(packed).digest() + packed
    layouts = [(np.dtype("float32"), (32, 48)), (np.dtype("uint8"), (len(content),))]
    path.write_bytes(header_of(["w", DESCRIPTION], layouts)[0] + weight + content)


def _without_placeholder(graph: Any) -> Any:
    graph["nodes"][0]["op"] = "no_such_op"
    return graph


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": lambda _: 9}, "of version 9"),
        ({"inputs": lambda _: (("x", 2, 0),)}, "inputs that are none"),
        ({"inputs": lambda _: (("x", 99, 0),)}, "IndexError"),
        ({"outputs": lambda _: (("y", -1, 0),)}, "names nothing"),
        ({"outputs": lambda _: 3}, "TypeError"),
        ({"name": lambda _: "a/b"}, "called"),
        ({"weights": lambda _: ()}, "that its nodes take"),
        ({"weights": lambda w: ((0, *w[0][1:]),)}, "its node is"),
        ({"weights": lambda w: ((*w[0][:2], b"0" * 32),)}, "damaged"),
        ({"graph": _without_placeholder}, "no_such_op"),
    ],
)
def test_a_description_that_cannot_be_is_refused(changes: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "linear"
    made().save(path)
    forged(path)
    answer(fr.serving.Model.load(path))  # so it is what was changed that is refused
    forged(path, **changes)
    with pytest.raises(FlowrtError, match=text):
        fr.serving.Model.load(path)


def test_a_save_that_fails_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "linear"
    made().save(path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(GraphError, match="cannot be written: No space left"):
        made(2).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["linear"]


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="make the folder"):
        made().save(tmp_path / "none" / "linear")
    with pytest.raises(FileNotFoundError):
        fr.serving.Model.load(tmp_path / "none")


def test_another_process_loads_and_runs_it_without_the_program_that_made_it(tmp_path: Path) -> None:
    model = made()
    model.save(tmp_path / "linear")
    np.save(tmp_path / "x.npy", X)
    program = (
        "import sys, numpy as np, flowrt as fr\n"
        "with fr.serving.Model.load('linear') as model:\n"
        "    np.save('y.npy', model(x=np.load('x.npy'))['y'])\n"
    )
    done = subprocess.run(
        [*python(), "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=50
    )
    assert done.returncode == 0
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), answer(model))


@pytest.mark.parametrize("header", ["1", "null", '"x"', "[]"])
def test_a_header_that_is_no_table_is_refused(header: str, tmp_path: Path) -> None:
    path = tmp_path / "m.flowrt"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(BrokenStream, match="no table of tensors"):
        fr.serving.Model.load(path)
