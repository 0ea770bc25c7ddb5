"""What the key of a compiled kernel tells apart, and what it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numba import njit

import flowrt.kernels  # noqa: F401  (fills the table)
from flowrt.kernels.language.table import KERNELS
from flowrt.kernels.store.fingerprint import fingerprint


def defined(source: str, **names: Any) -> Callable[..., Any]:
    """The function ``f`` that ``source`` defines among ``names``."""
    exec(compile(source, "kernels.py", "exec"), names)
    function: Callable[..., Any] = names["f"]
    return function


def module(**names: Any) -> ModuleType:
    made = ModuleType("users_module")
    made.__dict__.update(names)
    return made


def setting(**names: Any) -> type:
    return type("Setting", (), {**names, "__module__": "users_module"})


class Colour(Enum):
    RED = 1


class OtherColour(Enum):
    RED = 2


@dataclass(frozen=True)
class Setting:
    what: Any
    scale: int = 1


KERNEL = "def f(x, y, scale=2.0):\n    y[0] = helper(x[0]) * scale + SIZE"
HELPER = "def f(x):\n    return x + 1.0"


def kernel(source: str = KERNEL, helper: str = HELPER, size: Any = 3, **names: Any) -> str:
    return fingerprint(defined(source, helper=defined(helper, **names), SIZE=size))


def closing_over(value: Any) -> Callable[..., Any]:
    def f(x: Any, y: Any) -> None:
        y[0] = x[0] * value

    return f


LONG = np.arange(5000.0)
LONG_BUT_ONE = np.where(LONG == 2500, -1.0, LONG)

DIFFERENT = {
    "its code": (kernel(), kernel(KERNEL.replace("*", "/"))),
    "a constant in it": (kernel(), kernel(KERNEL.replace("x[0]", "x[1]"))),
    "a constant's sign": (kernel(size=0.0), kernel(size=-0.0)),
    "a constant's type": (kernel(size=1), kernel(size=1.0)),
    "a bool for an int": (kernel(size=1), kernel(size=True)),
    "a NumPy scalar's type": (kernel(size=np.float32(0.5)), kernel(size=np.float64(0.5))),
    "a global": (kernel(size=3), kernel(size=4)),
    "an entry of a tuple": (kernel(size=(1, (2, 3))), kernel(size=(1, (2, 4)))),
    "an entry of a long array": (kernel(size=LONG), kernel(size=LONG_BUT_ONE)),
    "an array's last digits": (kernel(size=np.array([0.1])), kernel(size=np.array([0.1 + 1e-16]))),
    "an array's dtype": (kernel(size=np.zeros(2, "float32")), kernel(size=np.zeros(2, "int32"))),
    "an array's shape": (kernel(size=np.zeros((2, 3))), kernel(size=np.zeros((3, 2)))),
    "an array in a tuple": (kernel(size=(LONG,)), kernel(size=(LONG_BUT_ONE,))),
    "a helper": (kernel(), kernel(helper=HELPER.replace("1.0", "2.0"))),
    "a helper's helper": (
        kernel(helper="def f(x): return g(x)", g=defined("def f(x): return x")),
        kernel(helper="def f(x): return g(x)", g=defined("def f(x): return -x")),
    ),
    "a dataclass's field": (kernel(size=Setting(HELPER, 2)), kernel(size=Setting(HELPER, 3))),
    "a function in a dataclass": (
        kernel(size=Setting(defined("def f(x): return x"))),
        kernel(size=Setting(defined("def f(x): return -x"))),
    ),
    "a default": (kernel(), kernel(KERNEL.replace("2.0", "2.5"))),
    "a keyword's default": (
        fingerprint(defined("def f(x, *, scale=2): return x * scale")),
        fingerprint(defined("def f(x, *, scale=3): return x * scale")),
    ),
    "a closure": (fingerprint(closing_over(2)), fingerprint(closing_over(3))),
    "a helper in a closure": (
        fingerprint(closing_over(defined("def f(x): return x"))),
        fingerprint(closing_over(defined("def f(x): return -x"))),
    ),
    "a module's constant": (
        fingerprint(defined("def f(x): return x * m.SCALE", m=module(SCALE=2))),
        fingerprint(defined("def f(x): return x * m.SCALE", m=module(SCALE=3))),
    ),
    "a module's module's helper": (
        fingerprint(defined("def f(x): return m.n.g(x)", m=module(n=module(g=defined("def f(x): return x"))))),
        fingerprint(defined("def f(x): return m.n.g(x)", m=module(n=module(g=defined("def f(x): return -x"))))),
    ),
    "a class's constant": (
        fingerprint(defined("def f(x): return x * S.SCALE", S=setting(SCALE=2))),
        fingerprint(defined("def f(x): return x * S.SCALE", S=setting(SCALE=3))),
    ),
    "the order of a named tuple": (
        fingerprint(defined("def f(x): return N(*x).a", N=namedtuple("N", "a b"))),
        fingerprint(defined("def f(x): return N(*x).a", N=namedtuple("N", "b a"))),
    ),
    "a member of an enum": (
        fingerprint(defined("def f(x): return x * C.RED.value", C=Colour)),
        fingerprint(defined("def f(x): return x * C.RED.value", C=OtherColour)),
    ),
    "a function that Numba wrapped": (
        fingerprint(defined("def f(x): return g(x)", g=njit(defined("def f(x): return x")))),
        fingerprint(defined("def f(x): return g(x)", g=njit(defined("def f(x): return -x")))),
    ),
    "a nested function": (
        fingerprint(defined("def f(x):\n    def g(z): return z\n    return g(x)")),
        fingerprint(defined("def f(x):\n    def g(z): return -z\n    return g(x)")),
    ),
}

EQUAL = {
    "lines above": (kernel(), kernel("# a comment\n\nother = 3\n\n" + KERNEL)),
    "a comment": (kernel(), kernel(KERNEL.replace(":\n", ":\n    # why\n"))),
    "lines within": (kernel(), kernel(KERNEL.replace("* scale", "* \\\n        scale"))),
    "a docstring": (
        fingerprint(defined('def f(x):\n    """One."""\n    return x + 1')),
        fingerprint(defined('def f(x):\n    """Another."""\n    return x + 1')),
    ),
    "annotations": (
        fingerprint(defined("from __future__ import annotations\ndef f(x): return x")),
        fingerprint(defined("from __future__ import annotations\ndef f(x: Any) -> Any: return x")),
    ),
    "globals it does not use": (
        fingerprint(defined("def f(x): return x.size", size=1)),
        fingerprint(defined("def f(x): return x.size", size=object())),
    ),
    "a module's other constants": (
        fingerprint(defined("def f(x): return x * m.SCALE", m=module(SCALE=2, other=1))),
        fingerprint(defined("def f(x): return x * m.SCALE", m=module(SCALE=2, other=object()))),
    ),
    "equal arrays": (kernel(size=np.zeros(3)), kernel(size=np.zeros(3))),
}


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_a_change_of_what_is_compiled_changes_it(pair: tuple[str, str]) -> None:
    assert pair[0] != pair[1]


@pytest.mark.parametrize("pair", EQUAL.values(), ids=EQUAL)
def test_a_change_that_compiles_to_the_same_does_not(pair: tuple[str, str]) -> None:
    assert pair[0] == pair[1]


def test_a_function_that_calls_itself_has_one() -> None:
    assert "recursion" in fingerprint(defined("def f(x): return f(x - 1) if x > 0 else 0"))


PRINT = """
import hashlib, flowrt.kernels
from flowrt.kernels.store.fingerprint import fingerprint
from flowrt.kernels.language.table import KERNELS, Form
names = frozenset({"red", "green", "blue"})
def f(x): return 1 if x in {"red", "green", "blue"} or x in names else 2
kernels = [k for (_, device), ks in sorted(KERNELS.items()) if device == "cpu" for k in ks]
texts = [fingerprint(k.function) for k in kernels if k.form is not Form.PROGRAM]  # which is made of others
print(hashlib.blake2b("".join([*texts, fingerprint(f)]).encode()).hexdigest())
"""


def test_every_cpu_kernels_is_the_same_in_every_process() -> None:
    assert sum(device == "cpu" for _, device in KERNELS) > 50
    answers = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        found = subprocess.run([sys.executable, "-c", PRINT], env=env, capture_output=True, text=True, check=True)
        answers.add(found.stdout)
    assert len(answers) == 1
