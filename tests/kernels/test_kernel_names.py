"""What kernels go by: their symbols depend on all that decides their code; names on disk say nothing else."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flowrt.base.package import PACKAGE
from flowrt.base.spec import Spec
from flowrt.kernels.compiler import carry_out
from flowrt.kernels.composite.iteration import make_iteration
from flowrt.kernels.composite.scalar_loop import SCALAR_LOOP_MAKERS, ScalarProgram, scalar_loop_symbol
from flowrt.kernels.fusion.fused import _orders, _whole, fused_kernel, ordered_variants
from flowrt.kernels.fusion.program import program_of
from flowrt.kernels.language import variants
from flowrt.kernels.language.variants import Variant, found_symbol, name_of, symbol_of
from flowrt.kernels.launch import LaunchStep, apply_kernel
from flowrt.kernels.store import bundle, names, parts, surroundings
from flowrt.kernels.store.names import remember, symbol_by_name
from flowrt.kernels.store.parts import MAKERS, PARTS
from flowrt.kernels.store.sources import sources
from flowrt.kernels.tiles import micro
from flowrt.kernels.tiles.micro import Tile, tile_part

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, without a bundle that knows symbols by names."""
    monkeypatch.setenv("FLOWRT_CACHE", str(tmp_path))
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def forget() -> None:
    """As a process that has just begun."""
    for known in (parts.surroundings, parts.part_symbol, scalar_loop_symbol, surroundings.identity, symbol_of):
        known.cache_clear()
    sources.cache_clear()
    names._known.cache_clear()


def fused_variant() -> Variant:
    specs, members = [Spec("float32", (3,))] * 3, [("add", (0, 1), "float32", ()), ("exp", (2,), "float32", ())]
    whole = _whole(program_of(specs[:2], members, (3,)), "cpu")
    assert whole is not None
    return whole.step.variant()


def matmul_variant() -> Variant:
    specs = [Spec("float32", (40, 50)), Spec("float32", (50, 60))]
    steps = apply_kernel(
        "matmul", specs, [Spec("float32", (40, 60))], {"transpose_a": False, "transpose_b": False}
    ).steps
    assert isinstance(steps[-1], LaunchStep)
    return steps[-1].variant()


def loop_symbol() -> str:
    iteration = make_iteration(["float32", "float32"], [[("add", (0, 1), "float32")]], [2])
    return scalar_loop_symbol(ScalarProgram(None, iteration, (1,), (), (), (), (None,)))


# ── symbols ──────────────────────────────────────────────────────────────────────────────────────────────────────────

ALL_PARTS = (*PARTS, tile_part(Tile("tile", 6, 2, 32, "float32")))
ASKED = {
    "variant": lambda: found_symbol(matmul_variant()),
    "scalar loop": loop_symbol,
    **{part.name: lambda part=part: parts.part_symbol(part) for part in ALL_PARTS},  # type: ignore[misc]
}
DECIDED_BY = {
    "variant": MAKERS,
    "scalar loop": (*MAKERS, *SCALAR_LOOP_MAKERS),
    **{part.name: (*MAKERS, *part.makers) for part in ALL_PARTS},
}


@pytest.mark.parametrize("what", ASKED)
def test_a_symbol_changes_with_each_file_that_decides_its_code(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_bytes
    forget()
    before, edited = ASKED[what](), Path()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b"more = 1" if path == edited else b""))
    for module in DECIDED_BY[what]:
        edited = path_of(module)
        forget()
        assert ASKED[what]() != before, module
    edited = path_of("surely_none")
    forget()
    assert ASKED[what]() == before
    forget()


def path_of(module: str) -> Path:
    return PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")


MODULE = b'''"""What it does."""

from flowrt.here import (
    one,  # the first
    two,
)

TEXT = """
"""  # of two lines
"""A sign: # stays."""


def said(to: int) -> str:
    """How it goes."""
    return f"{to} # {one}" + "flowrt.here"  # and why
'''


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        (b"from flowrt.here import", b"from flowrt.elsewhere.now import", True),
        (b"(\n    one,  # the first\n    two,\n)", b"two, one", True),
        (b"and why", b"or why not", True),
        (b'"flowrt.here"', b'"flowrt.now.here"', True),
        (b'"flowrt.here"', b'"flowrt.there"', False),
        (b"What it does", b"What it is for", True),
        (b"How it goes.", b"How it goes,\n\n    and where to.", True),
        (b"\n\n\n", b"\n\n\n\n", True),
        (b"    two,", b"    three as two,", False),
        (b'"""\n"""', b'"""\n\t"""', False),
        (b"# {one}", b"# {two}", False),
        (b"return", b"yield", False),
    ],
)
def test_a_module_says_the_same_wherever_it_and_what_it_imports_lie(
    before: bytes, after: bytes, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MODULE.count(before) >= 1
    texts = [MODULE, MODULE.replace(before, after, 1)]
    monkeypatch.setattr(Path, "read_bytes", lambda _: texts.pop())
    sources.cache_clear()
    first = sources(("flowrt.any",))
    sources.cache_clear()
    assert (sources(("flowrt.any",)) == first) == same
    sources.cache_clear()


def emitters() -> list[tuple[str, str]]:
    """(what is compiled, the module that emits it)."""
    parts = {part.name: part.module for part in ALL_PARTS}
    parts |= {"scalar loop": "flowrt.kernels.emit.launches.scalar_loop", "variant": "flowrt.kernels.emit.entries"}
    return list(parts.items())


# What the modules that emit code use of others without those deciding code by themselves.
TOLD_OTHERWISE = {
    "flowrt.kernels.language.table": "a kernel's form and function are in its variant's symbol",
    "flowrt.kernels.store.objects": "stores what was emitted",
    "flowrt.kernels.store.parts": "names what emits, and asks for it",
    "flowrt.kernels.store.sources": "reads what symbols are made of",
    "flowrt.kernels.store.fingerprint": "reads what symbols are made of",
    "flowrt.kernels.store.names": "remembers symbols",
    "flowrt.kernels.store.folder": "says where what was emitted is kept",
    "flowrt.kernels.language.twin": "stands for what CUDA devices have",
    "flowrt.kernels.teams.standing": "is of what threads of CUDA devices do alone",
    "flowrt.kernels.teams.grouping": "is of what threads of CUDA devices do alone",
    "flowrt.kernels.language.variants": "names what emits, and asks for it",
    "flowrt.kernels.tiles.micro": "its stubs carry a digest of `tile`; what kernels use of it they tell",
    "flowrt.kernels.emit.tile": "see `micro`",
    "flowrt.kernels.language.reductions": "kernels refer to its functions",
    "flowrt.kernels.ops.precision": "kernels refer to its functions",
    "flowrt.kernels.store.background": "passes orders on",
    "flowrt.kernels.launch": "`direct` takes two numbers from it, and has it in its symbol",
    "flowrt.kernels.store.surroundings": "its answer is part of every symbol",
}


@pytest.mark.parametrize(("what", "module"), emitters())
def test_every_module_that_emits_code_is_among_those_that_decide_it(what: str, module: str) -> None:
    decided, seen, left = {*DECIDED_BY[what], *TOLD_OTHERWISE}, set[str](), [module]
    while left:
        module = left.pop()
        assert module in decided, f"{what} is emitted with {module}, which is not in its symbol"
        if module not in seen and module not in TOLD_OTHERWISE:
            left += imported(path_of(module))
        seen.add(module)


def imported(path: Path) -> list[str]:
    """The modules of kernels that one imports when it is imported."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("flowrt.kernels"):
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in named if path_of(name).exists()] or [node.module]
    return found


def test_a_products_symbol_changes_with_the_code_of_register_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = micro.transpose(16)
    other = micro.transpose.__wrapped__
    before = variants.fingerprint(stub)
    assert variants.fingerprint(other(16)) == before
    monkeypatch.setattr(micro, "_REVISION", "another")
    assert variants.fingerprint(other(16)) != before


def test_symbols_tell_processors_compilers_and_systems_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    here = surroundings.identity()
    for name, answer in (("_processor", "another"), ("_library", "another"), ("_version", "another")):
        with monkeypatch.context() as patch:
            patch.setattr(surroundings, name, lambda *_: answer)  # noqa: B023 (called at once)
            assert surroundings.identity.__wrapped__() != here


DESCRIPTION = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Some Processor
cpu MHz\t\t: {mhz}
flags\t\t: fpu sse2 {flags}

processor\t: 1
flags\t\t: never looked at
"""


def test_a_processor_is_told_by_what_it_has_not_by_how_fast_it_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def told(mhz: str, flags: str) -> tuple[str, frozenset[str]]:
        (tmp_path / "cpuinfo").write_text(DESCRIPTION.format(mhz=mhz, flags=flags))
        surroundings._described.cache_clear()
        surroundings.processor_features.cache_clear()
        return surroundings._processor(), surroundings.processor_features()

    monkeypatch.setattr(surroundings, "_DESCRIPTION", tmp_path / "cpuinfo")
    monkeypatch.setattr(surroundings, "architecture", lambda: "x86_64")
    try:
        text, features = told("2000.1", "avx avx2")
        assert {"avx2", "sse2"} <= features
        assert "looked" not in features
        assert told("3100.9", "avx avx2")[0] == text
        assert told("2000.1", "avx")[0] != text
    finally:
        surroundings._described.cache_clear()
        surroundings.processor_features.cache_clear()


def test_llvm_is_asked_where_the_system_does_not_describe_its_processors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = surroundings.processor_features()
    monkeypatch.setattr(surroundings, "_DESCRIPTION", tmp_path / "nothing")
    try:
        surroundings._described.cache_clear()
        surroundings.processor_features.cache_clear()
        asked = surroundings.processor_features()
        assert {"avx2", "avx512f"} & asked == {"avx2", "avx512f"} & here
        assert surroundings._processor()
    finally:
        surroundings._described.cache_clear()
        surroundings.processor_features.cache_clear()


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_helper_remembers_what_a_fused_kernel_goes_by(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = fused_variant()
    name, symbol = name_of(variant), found_symbol(variant)
    assert name is not None
    assert symbol_by_name(folder, name) is None
    specs, members = [Spec("float32", (3,))] * 3, [("add", (0, 1), "float32", ()), ("exp", (2,), "float32", ())]
    whole = _whole(program_of(specs[:2], members, (3,)), "cpu")
    assert whole is not None
    (order,) = _orders(whole.step)
    assert order.symbol == symbol
    assert carry_out(order.symbol, order.request) == ""
    forget()
    assert symbol_by_name(folder, name) == symbol
    monkeypatch.setattr(variants, "fingerprint", lambda function: pytest.fail("it needs no fingerprint"))
    assert symbol_of(ordered_variants(order.request)[0]) == symbol


def test_fused_kernels_that_differ_go_by_different_names() -> None:
    plain = [("add", (0, 1), "float32"), ("exp", (2,), "float32")]
    forms = [
        (("float32", "float32"), tuple(plain), (3,), ()),
        (("float32", "float32"), tuple(plain), (2, 3), ()),
        (("float32", "float32"), tuple(plain), (3,), ((3, "sum"),)),
        (("float32", "float32"), tuple(plain), (3,), ((3, "mean"),)),
        (("float32", "float32"), tuple(plain), (3,), ((3, "max"),)),
        (("float32", "float64"), tuple(plain), (3,), ()),
        (("float32", "float32"), (("add", (1, 1), "float32"), plain[1]), (3,), ()),
        (("float32", "float32"), (("subtract", (0, 1), "float32"), plain[1]), (3,), ()),
    ]
    kernels = [
        fused_kernel(inputs, members, results, "cpu", reductions) for inputs, members, results, reductions in forms
    ]
    variants = [Variant(kernel, (), (1, 1, 1), "") for kernel in kernels]
    found = {name_of(variant) for variant in variants}
    assert None not in found
    assert len(found) == len({found_symbol(variant) for variant in variants}) == len(forms)


def test_names_are_those_of_whole_lines_in_files_that_no_one_else_may_write(folder: Path) -> None:
    for number in range(3):
        remember(folder, f"name {number}", f"flowrt_{number}")
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    second = len(whole.splitlines()[0]) + 1
    for broken in (whole[:-9], whole[:second] + b"{}\n", whole[: second + 9], whole[:second] + b"\xff\xfe\n\n\n"):
        path.write_bytes(broken)
        names._known.cache_clear()
        assert symbol_by_name(folder, "name 0") == "flowrt_0"
        assert symbol_by_name(folder, "name 2") is None
    path.write_bytes(whole)
    path.chmod(0o666)
    names._known.cache_clear()
    assert symbol_by_name(folder, "name 0") is None


def test_the_files_of_names_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        (folder / f"names-{number}").touch()
        os.utime(folder / f"names-{number}", (number, number))
    remember(folder, "a name", "flowrt_x")
    assert {p.name for p in folder.iterdir()} == {"names-5", "names-6", "names-7", f"names-{bundle.stamp()}"}
    size = (folder / f"names-{bundle.stamp()}").stat().st_size
    monkeypatch.setattr(names, "MOST_BYTES", size)
    remember(folder, "another name", "flowrt_y")
    assert (folder / f"names-{bundle.stamp()}").stat().st_size == size


@pytest.mark.parametrize("place", ["/dev/null/x", "/proc/nothing/here"])
def test_without_a_folder_nothing_is_remembered(place: str) -> None:
    remember(Path(place), "a name", "flowrt_x")
    assert symbol_by_name(Path(place), "a name") is None
