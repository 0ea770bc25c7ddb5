"""Ops are functions with names, types and defaults: to type checkers, to `help`, and where a keyword is wrong."""

from __future__ import annotations

import inspect
import os
import pydoc
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from places import PYTHONPATH, ROOT, TESTS
from programs import python
from typed.wrong_keywords import CALLS

import flowrt as fr
from flowrt.base.familiar import keyword_hint, pages

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS = TESTS / "worlds" / "typed"


def functions() -> Iterator[tuple[str, Any]]:
    for space, module in (("fr", fr.ops), ("fr.nn", fr.nn), ("fr.random", fr.random)):
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.isclass(value) and not inspect.ismodule(value) and value is not fr.mixed_precision:
                yield f"{space}.{name}", value


FUNCTIONS = dict(functions())


@pytest.mark.timeout(240)
def test_type_checkers_pass_programs_and_find_every_wrong_keyword(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    text = (PROGRAMS / "wrong_keywords.py").read_text()
    wrong.write_text(re.sub(r" +# type: ignore.*", "", text))
    programs = [*sorted((ROOT / "examples").glob("*.py")), *sorted(PROGRAMS.glob("*.py"))]
    # asked as `scripts/check` asks, so that what was found of flowrt's own files need not be found again
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", *map(str, [wrong, *programs])]
    paths = {"MYPYPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=paths, check=False, timeout=230)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert not done.stderr
    assert [line for line in errors if "Unexpected keyword argument" not in line or wrong.name not in line] == []
    assert len(errors) == len(CALLS) >= 20


@pytest.mark.parametrize(("right", "call"), CALLS)
def test_a_wrong_keyword_is_answered_by_the_right_one(right: str, call: Any) -> None:
    with pytest.raises(fr.SpecError, match=rf"wrong_keywords.py:\d+\): .*keyword argument '\w+'; .*\b{right}="):
        call()


def test_what_keywords_are_answered_by_exists() -> None:
    optim = [getattr(fr.optim, name) for name in fr.optim.__all__]
    classes = [
        fr.Checkpoints,
        fr.BlockingSession.run,
        fr.LocalCluster,
        fr.Options,
        fr.Session,
        fr.Variable,
        fr.train.Replicated,
    ]
    functions = [*FUNCTIONS.values(), *optim, fr.optim.Optimizer.minimize, *classes]
    takes = {name for function in functions for name in inspect.signature(function).parameters} | {"ps", "worker"}
    lines = pages()["an argument"]
    assert {here for here, _ in lines} <= takes
    assert all(here not in names for here, names in lines)
    assert keyword_hint("stride", ["x", "strides"]) == "; write strides="
    assert keyword_hint("epsilom", ["x", "epsilon"]) == "; did you mean epsilon=?"
    assert keyword_hint("nonsense", ["x", "epsilon"]) == ""


@pytest.mark.parametrize("path", FUNCTIONS)
def test_every_op_refuses_a_keyword_that_it_does_not_have(path: str) -> None:
    name = path.rpartition(".")[2]
    with pytest.raises(fr.SpecError, match=rf"^{name}\(.*test_typed.py:\d+\): .*'nonsense'"):
        FUNCTIONS[path](nonsense=1)


@pytest.mark.parametrize("path", FUNCTIONS)
def test_help_shows_the_signature_of_every_op(path: str) -> None:
    function = FUNCTIONS[path]
    shown = pydoc.plain(pydoc.render_doc(function))
    name = path.rpartition(".")[2]
    assert f"{name}{inspect.signature(function)}" in shown
    assert str(inspect.getdoc(function)).partition("\n")[0] in shown
    unknown = [p.name for p in inspect.signature(function).parameters.values() if p.annotation in (p.empty, "")]
    assert unknown == []


def test_callers_see_operands_and_tensors_where_the_function_has_specs() -> None:
    taking = "x: Operand, indices: Operand, axis: int = 0, absent: bool = False"
    assert str(inspect.signature(fr.take)) == f"({taking}) -> TensorOrArray"
    assert str(inspect.signature(fr.switch)).endswith("-> tuple[TensorOrArray, TensorOrArray]")

    def told(x: fr.Spec, width: float = 1.0) -> fr.Spec:
        return x

    op = fr.op(name="typed_told")(told)
    assert str(inspect.signature(op)) == "(x: Operand, width: float = 1.0) -> TensorOrArray"


def test_an_op_takes_operands_however_they_are_annotated() -> None:
    def by_value(x: fr.Operand, xs: Any, y: fr.Operand | None = None, *, name: str | None = None) -> fr.Result:
        return fr.Spec(x.dtype, x.shape)

    by_value.__annotations__ |= {"x": fr.Operand, "y": fr.Operand | None}
    made = fr.op(name="typed_by_value")(by_value)
    assert [(p.name, p.tensor, p.optional) for p in made.parameters] == [
        ("x", True, False),
        ("xs", False, False),
        ("y", True, True),
    ]
    with fr.Graph():
        assert made(np.ones(2), xs=3, name="mine").name == "mine:0"


def test_an_op_in_a_class_stays_what_it_is() -> None:
    class Model:
        activation = fr.relu

    assert Model().activation is fr.relu


def test_the_surface_is_what_dir_shows() -> None:
    assert dir(fr) == sorted(set(fr.__all__))
    assert set(fr.ops.__all__) <= set(fr.__all__)
    for module in (fr.nn, fr.random, fr.optim, fr.train, fr.data, fr.placement):
        assert dir(module) == sorted(module.__all__)
    assert {"exp", "Session", "LocalCluster", "nn"} <= set(dir(fr))
    assert not {"np", "annotations", "base", "graph"} & set(dir(fr))


def test_the_programs_that_type_checkers_pass_build_their_graphs() -> None:
    program = """if True:
        import flowrt as fr, own_ops, replicated, training
        training.build()
        with fr.Graph():
            print(own_ops.use(fr.placeholder("float64", (None, 4))).name)
    """
    command, paths = [*python(), "-c", program], {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, capture_output=True, text=True, env=paths, check=False, timeout=50)
    assert (done.stdout, done.stderr) == ("both:0\n", "")
