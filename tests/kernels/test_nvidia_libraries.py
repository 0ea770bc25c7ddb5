"""Products and convolutions by calls of C, which imitations of cuBLASLt and cuDNN carry out in the host's memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from imitated_libraries import Engine, ImitatedBlas, ImitatedDnn, Memory, memory_at
from op_examples_precision import PRECISION
from op_examples_windows import CONVOLUTIONS, Example
from test_convolutions_by_dnn import MORE, NAMES, asked_of
from test_cuda_calls import has_driver
from test_products_by_blas import judged, step_of

from flowrt.base.spec import Spec
from flowrt.kernels.cuda import twins
from flowrt.kernels.nvidia import blas, dnn
from flowrt.kernels.nvidia.libraries import CudaLibraries
from flowrt.kernels.nvidia.library import MEMORY_AT, WORKSPACE_AT, LibraryRefusal, begin_of

Array = Any
STREAM = 64
STORED = ("matmul_bfloat16", "matmul_float16")
EXAMPLES = [example for example in (*CONVOLUTIONS, *MORE) if example.note != "no-images"]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[Libraries]:
    """The libraries of a GPU that is the host."""
    made = Libraries()
    monkeypatch.setattr(blas, "CudaLibrary", lambda *given: made.blas)
    monkeypatch.setattr(dnn, "CudaLibrary", lambda *given: made.dnn)
    yield made
    made.libraries.close()
    gc.collect()
    assert made.blas.alive == made.dnn.alive == {}, "descriptors go with what made them"


class Libraries:
    def __init__(self) -> None:
        self.blas, self.dnn, self.libraries = ImitatedBlas(), ImitatedDnn(), CudaLibraries(STREAM)

    def launched(self, step: Any, arrays: list[Array], made: Array) -> Array:
        """What a step's launch makes of arrays, where a library has it."""
        launch = self.libraries.prepare(step)
        assert launch is not None
        launch.launch([Memory(array) for array in (*arrays, made)], memory_at(MEMORY_AT, launch.workspace))
        return made


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("flags", [(False, False), (True, True)])
@pytest.mark.parametrize(("a", "b"), [((4, 5), (5, 3)), ((2, 1, 4, 5), (3, 5, 3)), ((1, 3, 4, 5), (2, 3, 5, 3))])
def test_cublas_is_called_with_what_it_multiplies(
    libraries: Libraries, a: tuple[int, ...], b: tuple[int, ...], flags: tuple[bool, bool], dtype: str
) -> None:
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=shape).astype(dtype) for shape in (a, b))
    x, y = (np.ascontiguousarray(m.swapaxes(-1, -2)) if flip else m for m, flip in zip((x, y), flags, strict=True))
    expected = judged(x, y, flags)
    made = libraries.launched(step_of(x.shape, y.shape, flags, dtype), [x, y], np.zeros_like(expected))
    np.testing.assert_allclose(made, expected, rtol=1e-5)


@pytest.mark.parametrize("example", [e for e in PRECISION if e.op in STORED and e.arrays[0].size], ids=str)
def test_floats_of_16_bits_are_multiplied_as_they_are_stored(libraries: Libraries, example: Example) -> None:
    step, arrays, expected = asked_of(example)
    made = libraries.launched(step, arrays, np.zeros_like(expected))
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5)


def test_what_an_algorithm_asks_for_is_scratch_of_the_op(libraries: Libraries) -> None:
    libraries.blas.workspace = 4096
    rng = np.random.default_rng(2)
    a, b, y = rng.normal(size=(4, 5)), rng.normal(size=(5, 3)), np.zeros((4, 3))
    specs, flags = [Spec(m.dtype, m.shape) for m in (a, b, y)], {"transpose_a": False, "transpose_b": False}
    steps = twins.PreparedSteps("matmul", specs[:2], specs[2:], flags, Typed(libraries.libraries))
    (space,) = steps.scratch
    memory = [m.reshape(-1).view(np.uint8) for m in (a, b, y)]
    for start in range(0, WORKSPACE_AT, MEMORY_AT):  # from any place that tensors begin at, it reaches far enough
        there = memory_at(start, space.nbytes).array
        y[:] = 0
        steps.launch([*memory, there], None)
        np.testing.assert_allclose(y, a @ b)
        assert begin_of(Memory(there)) + 4096 <= there.ctypes.data + there.nbytes


def test_what_a_library_refuses_when_it_is_called_its_twin_does(
    libraries: Libraries, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*given: Any) -> None:
        raise LibraryRefusal("cublasLtMatmul", 7, "an unsupported value", "see its documentation")

    launched: list[Any] = []
    monkeypatch.setattr(libraries.blas, "cublasLtMatmul", refused, raising=False)
    monkeypatch.setattr(twins.PreparedStep, "launch", lambda *given: launched.append(given[1:]))
    specs, flags = [Spec("float64", (2, 2))] * 3, {"transpose_a": False, "transpose_b": False}
    steps = twins.PreparedSteps("matmul", specs[:2], specs[2:], flags, Typed(libraries.libraries))
    memory = [np.zeros(32, np.uint8) for _ in range(3)]
    for _ in range(2):
        steps.launch(memory, None, ("stream",))
    assert len(launched) == 2
    (told,) = caplog.messages
    assert told.startswith("matmul is left to flowrt's own kernel: cublasLtMatmul: an unsupported value (7)")


class Typed:
    """Libraries for operands that are NumPy's own arrays."""

    def __init__(self, libraries: CudaLibraries) -> None:
        self._libraries = libraries

    def prepare(self, step: Any) -> Any:
        launch = self._libraries.prepare(step)
        assert launch is not None
        inner = launch.launch
        launch.launch = lambda operands, workspace: inner([Memory(m) for m in operands], Memory(workspace))  # type: ignore[method-assign]
        return launch


def test_memory_is_said_to_be_aligned_as_far_as_it_is(libraries: Libraries) -> None:
    libraries.libraries.prepare(step_of((4, 5), (5, 3), (False, False)))
    assert libraries.blas.alignments == [blas.ALIGNED] * 4
    libraries.libraries.prepare(step_of((2, 1, 3, 1), (1, 2, 1, 3), (False, False)))
    assert libraries.blas.alignments == [16, 8, 16, 16]


def test_what_cublas_has_no_algorithm_for_is_left_to_the_tiles(libraries: Libraries) -> None:
    libraries.blas.knows = False
    assert libraries.libraries.prepare(step_of((4, 5), (5, 3), (False, False))) is None


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_cudnn_is_called_with_what_it_convolves(libraries: Libraries, example: Example) -> None:
    step, arrays, expected = asked_of(example)
    libraries.dnn.engines[3] = [Engine(workspace=100)]
    made = libraries.launched(step, arrays, np.full_like(expected, np.nan))
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_windows_of_one_entry_are_multiplied(libraries: Libraries, name: str) -> None:
    (example,) = [each for each in MORE if (each.op, each.note) == (name, "product")]
    step, arrays, expected = asked_of(example)
    made = libraries.launched(step, arrays, np.zeros_like(expected))
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5)
    assert libraries.dnn.executed == []


TENSOR_CORE, DOWN_CONVERTED, REDUCED, FFT, NONDETERMINISTIC, WINOGRAD, TILE_6, TILE_13 = 0, 1, 2, 3, 4, 5, 7, 8
GOOD, OTHER = Engine((WINOGRAD,)), Engine()
UNWANTED = [
    *(Engine((note,)) for note in (TENSOR_CORE, DOWN_CONVERTED, REDUCED, FFT, NONDETERMINISTIC)),
    *(Engine((WINOGRAD, note)) for note in (TILE_6, TILE_13)),
    Engine(behaves=(0,)),
    Engine(works=False),
    Engine(workspace=dnn.WORKSPACE + 1),
]


def taken(libraries: Libraries, best: list[Engine], others: list[Engine]) -> list[Engine]:
    """The engine that computes a convolution, if one does."""
    libraries.dnn.engines = {3: best, 2: others}
    step, arrays, expected = asked_of(CONVOLUTIONS[0])
    launch = libraries.libraries.prepare(step)
    if launch is not None:
        operands = [Memory(array) for array in (*arrays, np.zeros_like(expected))]
        launch.launch(operands, memory_at(0, launch.workspace))
    return libraries.dnn.executed


@pytest.mark.parametrize("engine", UNWANTED, ids=str)
def test_engines_that_round_or_waver_or_cannot_are_passed_over(libraries: Libraries, engine: Engine) -> None:
    assert taken(libraries, [engine, GOOD, OTHER], []) == [GOOD]


def test_where_none_of_the_best_will_do_another_is_taken(libraries: Libraries) -> None:
    assert taken(libraries, UNWANTED, [UNWANTED[0], OTHER]) == [OTHER]


def test_where_none_is_left_the_twin_computes(libraries: Libraries) -> None:
    assert taken(libraries, UNWANTED, []) == []


@pytest.mark.skipif(has_driver(), reason="here the libraries might be at hand")
def test_where_a_library_is_missing_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    libraries = CudaLibraries(STREAM)
    step = step_of((4, 5), (5, 3), (False, False))
    with caplog.at_level("INFO", "flowrt"):
        assert [libraries.prepare(step), libraries.prepare(step)] == [None, None]
    (told,) = caplog.messages
    assert told.startswith("matrices are multiplied by flowrt's own tiles: ")
    assert told.endswith("; pip install flowrt[cuda13], or [cuda12]")
