"""einsum, tensordot and dot against NumPy's, and their gradients against those of the pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import SpecError

SIZES = {"i": 2, "j": 3, "k": 4, "l": 5, "b": 3}
EQUATIONS = [
    "ij,jk->ik",
    "ij,kj->ik",
    "ij,jk->ki",
    "ji,jk",
    "bij,bjk->bik",
    "bij,jk->bik",
    "ibj,bkj->bik",
    "ij,ij->ij",
    "ij,ij->",
    "bi,bi->b",
    "i,j->ij",
    "i,i",
    "ijk->ki",
    "ijk->",
    "ii->i",
    "ii",
    "iji->j",
    "ij,jk,kl->il",
    "ij,ik,il->jkl",
    "ijk,jil->kl",
    "bik,bjk,bl->bijl",
    ",ij->ij",
    "b...,b...->...b",
    "...ij,...jk->...ik",
    "i...,j->...j",
]


def operands(equation: str) -> list[np.ndarray]:
    rng = np.random.default_rng(len(equation))
    dots = iter([(6, 7), (7,), (1, 7)])
    out = []
    for part in equation.replace(" ", "").partition("->")[0].split(","):
        before, found, after = part.partition("...")
        shape = [SIZES[c] for c in before] + list(next(dots) if found else ()) + [SIZES[c] for c in after]
        out.append(rng.normal(size=shape).astype(np.float32))
    return out


@pytest.mark.parametrize("equation", ["ii->i", "ii", "iij->ij", "jii->j", "iji->ji", "iii->i"])
def test_a_diagonal_is_its_own_entries_whatever_lies_beside_them(equation: str) -> None:
    given = equation.partition("->")[0]
    places = np.indices([SIZES[c] for c in given])
    along = [places[axis] for axis, label in enumerate(given) if label == "i"]
    beside = np.any([axis != along[0] for axis in along], axis=0)
    for dtype, strange in ((np.float32, np.nan), (np.float64, np.inf), (np.int32, -7)):
        array = np.where(beside, strange, np.arange(beside.size).reshape(beside.shape)).astype(dtype)
        got = fr.einsum(equation, array)
        np.testing.assert_array_equal(got, np.einsum(equation, array))
        assert np.asarray(got).dtype == dtype


@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum_answers_what_numpys_does(equation: str) -> None:
    arrays = operands(equation)
    want = np.einsum(equation, *arrays)
    got = fr.einsum(equation, *arrays)
    assert np.asarray(got).dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


OPEN = [e for e in EQUATIONS if e not in ("ii->i", "ii", "iji->j") and "..." not in e]


async def test_sizes_may_be_open_until_the_step_and_gradients_are_einsums_themselves() -> None:
    """That of an operand is the einsum of the other operands with the result's gradient, in its place."""
    fetches, feeds, wanted = [], {}, []
    with fr.Graph() as graph:
        for equation in OPEN:
            arrays = operands(equation)
            inputs = [fr.placeholder("float32", (None,) * a.ndim) for a in arrays]
            feeds.update(zip(inputs, arrays, strict=True))
            y = fr.einsum(equation, *inputs)
            weight = np.random.default_rng(1).normal(size=np.einsum(equation, *arrays).shape).astype(np.float32)
            fetches.append([y, fr.gradients(fr.sum(y * weight), inputs)])
            wanted.append(
                [np.einsum(equation, *arrays), [slope(equation, arrays, n, weight) for n in range(len(arrays))]]
            )
    async with fr.Session(graph, options=fr.Options(optimize=False)) as session:
        found = await session.run(fetches, feeds)
    for equation, (y, slopes), (want, expected) in zip(OPEN, found, wanted, strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5, err_msg=equation)
        for mine, judge in zip(slopes, expected, strict=True):
            np.testing.assert_allclose(mine, judge, rtol=1e-5, atol=1e-5, err_msg=equation)


@pytest.mark.parametrize("equation", ["ii->i", "bii->b", "iji->ji", "iii->i"])
async def test_the_size_of_a_diagonal_may_be_open_until_the_step(equation: str) -> None:
    (array,) = operands(equation)
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None,) * array.ndim)
        y = fr.einsum(equation, x)
        (gradient,) = fr.gradients(fr.sum(fr.square(y)) / 2, [x])
    async with fr.Session(graph) as session:
        for given in (array, np.zeros((0,) * array.ndim, np.float32)):
            found, slopes = await session.run([y, gradient], {x: given})
            expected = np.einsum(equation, given)
            np.testing.assert_allclose(found, expected, rtol=1e-6)
            places = np.indices(given.shape)[[axis for axis, c in enumerate(equation.partition("->")[0]) if c == "i"]]
            alike = (places == places[0]).all(axis=0)
            np.testing.assert_array_equal(slopes[~alike], 0)
            np.testing.assert_allclose(np.sum(slopes * given), np.sum(expected**2), rtol=1e-5)
        with pytest.raises(fr.SpecError, match=r"test_contraction.py:\d+"):
            await session.run(y, {x: np.ones(range(2, 2 + array.ndim), np.float32)})


def slope(equation: str, arrays: list[np.ndarray], number: int, weight: np.ndarray) -> Any:
    left, arrow, out = equation.partition("->")
    parts = left.split(",")
    if not arrow:
        out = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    others = [(p, a) for n, (p, a) in enumerate(zip(parts, arrays, strict=True)) if n != number]
    ones = [(c, np.ones(SIZES[c], np.float32)) for c in parts[number]]  # names that nothing else holds
    terms = [(out, weight), *others, *ones]
    return np.einsum(",".join(p for p, _ in terms) + "->" + parts[number], *[a for _, a in terms])


@pytest.mark.parametrize("axes", [0, 1, 2, ((1, 2), (1, 0)), (-1, -1), ([0], [2])], ids=str)
def test_tensordot_is_numpys(axes: Any) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(3, 3, 3)), rng.normal(size=(3, 3, 3))
    np.testing.assert_allclose(fr.tensordot(a, b, axes), np.tensordot(a, b, axes), rtol=1e-12)


@pytest.mark.parametrize(
    "shapes", [((3,), (3,)), ((2, 3), (3,)), ((2, 3), (4, 3, 2)), ((), (2,)), ((3,), (3, 2))], ids=str
)
def test_dot_is_numpys(shapes: Any) -> None:
    a, b = (np.random.default_rng(i).normal(size=s) for i, s in enumerate(shapes))
    np.testing.assert_allclose(fr.dot(a, b), np.dot(a, b), rtol=1e-12)


def test_integers_are_contracted_too() -> None:
    a, b = np.arange(6).reshape(2, 3), np.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(fr.einsum("ij,jk->ki", a, b), (a @ b).T)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
@pytest.mark.parametrize("equation", ["ij,ij->i", "ij,kl->jl"])
def test_sums_of_products_keep_their_dtype(dtype: str, equation: str) -> None:
    a = (np.arange(6).reshape(2, 3) * 50).astype(dtype)
    wanted, got = np.einsum(equation, a, a), fr.einsum(equation, a, a)
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)


A, B = np.ones((2, 3), np.float32), np.ones((4, 5), np.float32)
MISFITS = [
    (lambda: fr.einsum("ij,jk->ik", A), "is of 2 operands, got 1"),
    (lambda: fr.einsum("ij,jk->ik", A, B), r"axis 'j' of float32\[2,3\], float32\[4,5\] is 3 and 4 long"),
    (lambda: fr.einsum("ijk->k", A), "does not name 2 axes"),
    (lambda: fr.einsum("ij->ik", A), r"names \['k'\] wrongly"),
    (lambda: fr.einsum("ij->ii", A), "names an axis wrongly"),
    (lambda: fr.einsum("i1->i", A), "may hold letters"),
    (lambda: fr.tensordot(A, B, 1), "is 3 and 4 long"),
    (lambda: fr.tensordot(A, B, (2, 0)), "do not fit"),
]


@pytest.mark.parametrize(("run", "message"), MISFITS, ids=[m for _, m in MISFITS])
def test_what_does_not_fit_says_so(run: Any, message: str) -> None:
    with pytest.raises(SpecError, match=rf"test_contraction\.py:\d+.*{message}"):
        run()
