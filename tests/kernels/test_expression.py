"""Expressions: several scalar functions as one, in plain Python and compiled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_world import own_tables
from numba import njit

import flowrt.kernels  # noqa: F401  (enters the kernels in the table)
from flowrt.base.errors import GraphError
from flowrt.kernels.emit.abi import OPTIONS
from flowrt.kernels.emit.compose import composed
from flowrt.kernels.emit.entries import bind_helpers
from flowrt.kernels.language.composing import express, narrowed
from flowrt.kernels.language.table import Narrow, elementwise
from flowrt.kernels.ops.trigonometry import far_sin64, is_near, near_cos64, near_sin64
from flowrt.kernels.store.fingerprint import fingerprint

F4, F8, I8, B1 = (np.dtype(name) for name in ("float32", "float64", "int64", "bool"))
KINDS = ("sum", "mean", "max", "min", "prod", "any", "all")
MEMBERS = (("add", (0, 1), F4), ("exp", (2,), F4), ("greater", (3, 0), B1), ("where", (4, 0, 3), F4))


def test_an_expression_is_its_members_one_after_another() -> None:
    apply = express((F4, F4), MEMBERS, (4, 5)).function()
    greater, chosen = apply(np.float32(1), np.float32(-4))
    assert not greater
    assert greater.dtype == B1
    assert chosen == pytest.approx(np.exp(-3.0))
    assert chosen.dtype == F4


def test_compiled_code_may_call_an_expression() -> None:
    step = composed(express((I8, F8), (("add", (0, 0), I8), ("astype", (2,), F8), ("multiply", (3, 1), F8)), (2, 4)))
    bind_helpers()

    @njit(**OPTIONS | {"no_cpython_wrapper": False})  # type: ignore[untyped-decorator]
    def repeat(count: int, value: float) -> tuple[int, float]:
        number = 1
        for _ in range(count):
            number, value = step((number, value))
        return number, value

    assert repeat(3, 0.5) == (8, 0.5 * 2 * 4 * 8)


def test_an_expression_is_told_from_another_by_what_it_computes() -> None:
    one = express((F4, F4), MEMBERS, (4, 5))
    assert fingerprint(one) == fingerprint(replace(one))
    others = [
        express((F4, F4), (("add", (1, 0), F4), *MEMBERS[1:]), (4, 5)),
        express((F4, F4), MEMBERS, (5,)),
        express((F4, F4), (("multiply", (0, 1), F4), *MEMBERS[1:]), (4, 5)),
        *(express((F4, F4), MEMBERS, (4, 5), "cpu", ((5, kind),)) for kind in KINDS),
        express((F4, F4), MEMBERS, (4, 5), "cpu", ((2, "sum"),)),
        *(express((F4, F4), ((kind, (0,), F4), ("subtract", (0, 2), F4)), (3,)) for kind in KINDS[:4]),
    ]
    assert len({fingerprint(e) for e in (one, *others)}) == 1 + len(others)


def test_what_is_not_computed_entry_by_entry_is_no_member() -> None:
    with pytest.raises(GraphError, match="entry by entry"):
        express((F4, F4), (("matmul", (0, 1), F4),), (2,))
    with pytest.raises(GraphError, match="only 1 come before"):
        express((F4,), (("add", (0, 1), F4),), (1,))
    with pytest.raises(GraphError, match="cannot answer"):
        express((F4,), (("negative", (0,), F4),), (2,))


def test_an_expression_of_narrow_functions_says_where_it_holds() -> None:
    expression = express((F8, F8), (("multiply", (0, 1), F8), ("sin", (2,), F8), ("cos", (0,), F8)), (3, 4))
    found = narrowed(expression)
    assert found is not None
    narrow, fits = found
    for x, y, holds in ((1.0, 2.0, (True, True)), (2.0**19, 2.0, (False, True)), (2.0**20, 0.5, (True, False))):
        assert tuple(map(bool, fits.function()(x, y))) == holds
        if all(holds):
            np.testing.assert_allclose(narrow.function()(x, y), expression.function()(x, y), rtol=1e-15)
    assert narrowed(express((F4, F4), MEMBERS, (4, 5))) is None


def test_a_kernel_is_named_by_its_narrow_functions_too() -> None:
    with own_tables():
        made = [elementwise("sin", far_sin64, narrow=Narrow(is_near, near)) for near in (near_sin64, near_cos64)]
    assert len({fingerprint(function) for function in made}) == 2
