"""The bundle: one file with the standard kernels, and the command and process that build it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from flowrt.base.spec import Spec
from flowrt.kernels.language.table import elementwise
from flowrt.kernels.language.variants import Variant, name_of, symbol_of, variant_code
from flowrt.kernels.launch import LaunchStep, apply_kernel
from flowrt.kernels.store import building
from flowrt.kernels.store import objects as store
from flowrt.kernels.store.bundle import Bundle, bundle_path, open_bundle, write_bundle
from flowrt.kernels.store.parts import PARTS, part_symbol
from flowrt.kernels.tiles.micro import Tile, tile_part
from flowrt.standard import __main__ as command
from flowrt.standard.programs import standard_tiles, standard_variants

if TYPE_CHECKING:
    from pathlib import Path

NAMES = {"one": "flowrt_a", "two": "flowrt_b"}
OBJECTS = {"flowrt_a": b"first" * 100, "flowrt_b": b"second" * 50}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "standard-x.bundle"
    write_bundle(path, NAMES, OBJECTS)
    return path


def test_what_was_written_is_read(path: Path) -> None:
    bundle = open_bundle(path)
    assert bundle.names == NAMES
    assert {symbol: bundle.code(symbol) for symbol in bundle.objects} == OBJECTS
    assert bundle.code("flowrt_c") is None
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name]


def test_an_open_bundle_outlives_its_replacement(path: Path) -> None:
    before = open_bundle(path)
    write_bundle(path, {}, {"flowrt_a": b"other"})
    assert before.code("flowrt_b") == OBJECTS["flowrt_b"]
    assert open_bundle(path).code("flowrt_a") == b"other"


def test_a_file_that_is_not_whole_is_none_or_lacks_what_is_broken(path: Path) -> None:
    whole = path.read_bytes()
    for size in range(0, len(whole), 43):
        path.write_bytes(whole[:size])
        check_objects(path)
    for at in range(0, len(whole), 29):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        check_objects(path)


def check_objects(path: Path) -> None:
    """What the bundle has is what was put in it, if it has it at all."""
    bundle = open_bundle(path)
    assert all(bundle.code(symbol) in (None, OBJECTS[symbol]) for symbol in bundle.objects)
    if bundle.objects:
        os.close(bundle.file)


def test_linked_code_is_mapped_from_the_file_and_left_out_where_it_is_broken(path: Path) -> None:
    variant = multiplication()
    symbol = symbol_of(variant)
    write_bundle(path, {}, OBJECTS | {symbol: variant_code(variant)})
    both = open_bundle(path)
    assert (set(both.parts), set(both.objects)) == ({symbol}, set(OBJECTS))
    write_bundle(path, {}, {symbol: variant_code(variant)})
    bundle = open_bundle(path)
    entry = bundle.address(symbol)
    assert entry is not None
    assert bundle.code(symbol) is None
    with open("/proc/self/maps") as maps:
        assert {line.split()[1] for line in maps if line.rstrip().endswith(str(path))} == {"r-xp"}
    whole = path.read_bytes()
    part, _ = bundle.parts[symbol]
    at = whole.index(ctypes.string_at(bundle.base + part.begin, part.end - part.begin))
    path.unlink()  # what is mapped stays as it is
    for place in range(at, at + part.end - part.begin, 41):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert open_bundle(path).address(symbol) is None
    for size in range(0, len(whole), 61):
        path.write_bytes(whole[:size])
        assert open_bundle(path).address(symbol) is None or size >= at + part.end - part.begin
        path.unlink()
    assert bundle.address(symbol) == entry


def multiplication() -> Variant:
    """A kernel that `STEP` needs."""
    scalar = [Spec("float32", (3,)), Spec("float32", ())]
    (step,) = apply_kernel("multiply", scalar, [Spec("float32", (3,))], {}).steps
    assert isinstance(step, LaunchStep)
    return step.variant()


def test_a_file_that_someone_else_may_write_is_none(path: Path) -> None:
    path.chmod(0o666)
    assert open_bundle(path) == Bundle()
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert open_bundle(path) == Bundle()
    path.unlink()
    os.mkfifo(path)
    assert open_bundle(path) == Bundle()
    assert open_bundle(path.parent / "nothing") == Bundle()


def test_the_standard_kernels_are_bounded_and_each_is_there_once() -> None:
    variants = list(standard_variants())
    assert 100 < len(variants) < 600
    symbols = [symbol_of(variant) for variant in variants]
    assert len(set(symbols)) == len(symbols)
    named = [name for name in map(name_of, variants) if name is not None]
    assert len(set(named)) == len(named) > 100
    assert {"add", "matmul", "conv2d", "class_cross_entropy_short", "class_cross_entropy_long", "fused"} <= {
        v.kernel.op for v in variants
    }


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_of_any_size_are_made_of_what_is_standard(dtype: str) -> None:
    symbols, tiles = {symbol_of(variant) for variant in standard_variants()}, set(standard_tiles())
    for m, n, k in [(2, 2, 2), (1, 50, 70), (50, 1, 70), (40, 50, 60), (700, 800, 300)]:
        specs = [Spec(dtype, (m, k)), Spec(dtype, (k, n)), Spec(dtype, (n,))]
        for op in ("matmul", "matmul_bias"):
            inputs, flags = specs[: 2 + (op != "matmul")], {"transpose_a": False, "transpose_b": False}
            for step in apply_kernel(op, inputs, [Spec(dtype, (m, n))], flags).steps:
                assert isinstance(step, LaunchStep)
                assert symbol_of(step.variant()) in symbols, (op, m, n, k)
                assert {tile_part(tile) for tile in step.call.tiles if isinstance(tile, Tile)} <= tiles


def test_only_kernels_that_stand_in_flowrts_own_files_have_names() -> None:
    mine = elementwise("test_bundled", lambda x: x + 1, on=("cpu",))
    float32 = np.dtype("float32")
    (step,) = apply_kernel("test_bundled", [Spec("float32", (2,))], [Spec("float32", (2,))], {}).steps
    assert isinstance(step, LaunchStep)
    assert step.kernel.function is mine
    assert name_of(step.variant()) is None
    (theirs,) = apply_kernel("add", [Spec("float32", (2,))] * 2, [Spec("float32", (2,))], {}).steps
    assert isinstance(theirs, LaunchStep)
    assert name_of(theirs.variant()) is not None
    assert name_of(theirs.variant()) != name_of(Variant(theirs.kernel, (float32, float32, np.dtype("float64"))))


STEP = """
import sys, numpy as np, flowrt as fr
with fr.Graph() as graph:
    x = fr.placeholder("float32", (None,), name="x")
    y = x * 2.0
with fr.BlockingSession(graph) as session:
    step = session.compile(y, [x])
    for n in (3, 3, 4):
        assert step(np.ones(n, np.float32)).tolist() == [2] * n
print(sorted({"numba", "llvmlite", "importlib.metadata", "scipy", "aiohttp"} & set(sys.modules)))
"""


def run(code: str, folder: Path, **env: str) -> str:
    given = {**os.environ, "FLOWRT_CACHE": str(folder), "FLOWRT_BUILD": "never", **env}
    return subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True).stdout


def test_a_process_with_a_bundle_neither_compiles_nor_imports_the_compiler(tmp_path: Path) -> None:
    variant = multiplication()
    names = {part.name: part_symbol(part) for part in PARTS}
    objects = {part_symbol(part): part.code() for part in PARTS}
    names[name_of(variant) or ""] = symbol_of(variant)
    objects[symbol_of(variant)] = variant_code(variant)
    write_bundle(bundle_path(tmp_path), names, objects)
    assert run(STEP, tmp_path) == "[]\n"
    assert [p.suffix for p in tmp_path.iterdir()] == [".bundle"]


def test_a_node_imports_no_compiler_to_be_ready(tmp_path: Path) -> None:
    code = "import sys, flowrt.worker; print({'numba', 'llvmlite', 'scipy'} & set(sys.modules))"
    assert run(code, tmp_path) == "set()\n"


PARENT = """
import sys
from flowrt.kernels.store import building
building.build_standard_kernels()
building.build_standard_kernels()
print([builder.pid for builder in building._builders], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["exit", "killed"])
def test_the_builder_ends_with_who_started_it(end: str, tmp_path: Path) -> None:
    env = {**os.environ, "FLOWRT_CACHE": str(tmp_path), "FLOWRT_BUILD": "when missing"}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent.stdin, parent.stdout:
        (pid,) = eval(parent.stdout.readline())
        handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        if end == "killed":
            parent.send_signal(signal.SIGKILL)
    parent.wait()
    if handle is not None:
        import select

        assert select.select([handle], [], [], 50)[0], "the builder is still there"
        os.close(handle)


def test_nothing_is_built_where_a_bundle_is_or_none_is_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[Any] = []
    monkeypatch.setattr(building, "_start", started.append)
    monkeypatch.setenv("FLOWRT_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("FLOWRT_BUILD", "never")
    building.build_standard_kernels()
    assert started == []
    monkeypatch.setenv("FLOWRT_BUILD", "")
    building.build_standard_kernels()
    assert started == [tmp_path / "none"]
    monkeypatch.setenv("FLOWRT_CACHE", str(tmp_path))
    write_bundle(bundle_path(tmp_path), NAMES, OBJECTS)
    building.build_standard_kernels()
    assert started == [tmp_path / "none"]


def test_no_builder_is_started_where_another_process_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[Any] = []
    monkeypatch.setattr(building.subprocess, "Popen", lambda command, **_: started.append(command))
    monkeypatch.setattr(building, "_builders", [])
    with command._only_builder(bundle_path(tmp_path), wait=False) as mine:
        assert mine
        building._start.__wrapped__(tmp_path)
        assert started == []
    building._start.__wrapped__(tmp_path)
    assert len(started) == 1


def test_the_command_builds_lists_and_cleans(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = store.cache_folder()
    few = list(command._items())[:2]
    for item in few:
        item.code()  # into the present folder, so that nothing is compiled twice
    (tmp_path / "c").mkdir()
    for item in few:
        (tmp_path / "c" / f"{item.symbol}.o").write_bytes((here / f"{item.symbol}.o").read_bytes())
        (tmp_path / "c" / f"{item.symbol}.o").chmod(0o600)
    monkeypatch.setenv("FLOWRT_CACHE", str(tmp_path / "c"))
    monkeypatch.setattr(command, "_items", lambda: iter(few))
    monkeypatch.setattr(command, "_compile_in_parts", lambda jobs: None)
    assert command.main(["build", "--list"]) == 0
    assert capsys.readouterr().out.split() == [item.label for item in few]
    assert command.main(["build", "--jobs", "1"]) == 0
    assert "2 objects" in capsys.readouterr().out
    assert set(open_bundle(bundle_path(tmp_path / "c")).parts) == {item.symbol for item in few}
    assert command.main(["build"]) == 0
    assert "is there" in capsys.readouterr().out
    assert command.main(["clean"]) == 0
    assert list((tmp_path / "c").iterdir()) == []


@pytest.mark.parametrize("ends", ["stands still", "has built", "is waited for by nobody"])
def test_who_builds_waits_for_another_only_while_that_gets_on(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "standard-x.bundle"
    if ends == "stands still":
        os.utime(tmp_path, (0, 0))
        monkeypatch.setattr(command, "STILL_SECONDS", 0.0)
    if ends == "has built":
        path.touch()
    holder = os.open(path.with_suffix(".building"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        with command._only_builder(path, wait=ends != "is waited for by nobody") as mine:
            assert mine is (ends != "is waited for by nobody")
    finally:
        os.close(holder)
