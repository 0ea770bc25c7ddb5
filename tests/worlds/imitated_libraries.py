"""cuBLASLt and cuDNN in NumPy: the C functions that flowrt calls, on descriptors and addresses as they are called.

Each imitation stands in for `flowrt.kernels.nvidia.library.CudaLibrary`, and computes in the host's memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, product
from typing import Any

import numpy as np

from flowrt.kernels.nvidia.library import WORKSPACE_AT, LibraryRefusal

Array = Any
INVALID, NOT_SUPPORTED = 7, 15
TYPES = {0: "float32", 1: "float64", 2: "float16", 14: "bfloat16"}


@dataclass
class Described:
    """A descriptor: what it was made as, and its attributes by number."""

    kind: Any
    set: dict[int, Any] = field(default_factory=dict)
    finalized: bool = False


class Memory:
    """An array in the host's memory, with the address that launches take."""

    def __init__(self, array: Array) -> None:
        self.array, self.address = array, array.ctypes.data


def memory_at(place: int, nbytes: int) -> Memory:
    """Bytes that begin so far behind a multiple of `WORKSPACE_AT`."""
    held = np.full(nbytes + 2 * WORKSPACE_AT, 255, np.uint8)
    start = -held.ctypes.data % WORKSPACE_AT + place
    return Memory(held[start : start + nbytes])


def seen(address: int, dtype: Any, shape: Sequence[int], strides: Sequence[int]) -> Array:
    """What lies at an address, with strides in entries."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    nbytes = size * np.dtype(dtype).itemsize
    flat = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, [s * flat.itemsize for s in strides])


def pointed(argument: Any) -> Any:
    """What ``byref`` points to."""
    return argument._obj


class Imitation:
    """Keeps descriptors by handles, from 1 on."""

    def __init__(self) -> None:
        self.alive: dict[int, Any] = {}
        self._numbers = count(1)

    def call(self, function: str, *arguments: Any) -> None:
        getattr(self, function)(*arguments)

    def made(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.call(function, ctypes.byref(handle), *arguments)
        return handle

    def keep(self, out: Any, what: Any) -> None:
        pointed(out).value = number = next(self._numbers)
        self.alive[number] = what

    def of(self, handle: Any) -> Any:
        return self.alive[handle if isinstance(handle, int) else handle.value]

    def drop(self, handle: Any) -> None:
        del self.alive[handle.value]


class ImitatedBlas(Imitation):
    """cuBLASLt. It has an algorithm for any product that ``knows`` says so of, which asks for a ``workspace``."""

    def __init__(self, *, knows: bool = True, workspace: int = 0) -> None:
        super().__init__()
        self.knows, self.workspace = knows, workspace
        self.alignments: list[int] = []

    def cublasLtCreate(self, out: Any) -> None:
        self.keep(out, "handle")

    def cublasLtMatmulDescCreate(self, out: Any, compute: int, scale: int) -> None:
        assert (compute, scale) in ((68, 0), (70, 1)), "float32 or float64 throughout"
        self.keep(out, Described(scale))

    def cublasLtMatrixLayoutCreate(self, out: Any, dtype: int, rows: int, columns: int, leading: int) -> None:
        assert leading >= rows > 0 < columns
        self.keep(out, Described((TYPES[dtype], rows, columns, leading)))

    def cublasLtMatmulPreferenceCreate(self, out: Any) -> None:
        self.keep(out, Described("preference"))

    def cublasLtMatrixTransformDescCreate(self, out: Any, scale: int) -> None:
        self.keep(out, Described(scale))

    def _set(self, handle: Any, attribute: int, value: Any, size: int) -> None:
        assert ctypes.sizeof(pointed(value)) == size
        self.of(handle).set[attribute] = pointed(value).value

    cublasLtMatmulDescSetAttribute = cublasLtMatrixLayoutSetAttribute = _set
    cublasLtMatmulPreferenceSetAttribute = cublasLtMatrixTransformDescSetAttribute = _set
    cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = cublasLtMatmulPreferenceDestroy = Imitation.drop
    cublasLtMatrixTransformDescDestroy = cublasLtDestroy = Imitation.drop

    def cublasLtMatmulAlgoGetHeuristic(self, *asked: Any) -> None:
        *_, preference, most, found, number = asked
        assert most == 1
        if not self.knows:
            raise LibraryRefusal("cublasLtMatmulAlgoGetHeuristic", NOT_SUPPORTED, "not supported", "")
        told = self.of(preference).set
        assert self.workspace <= told[1]
        self.alignments = [told[attribute] for attribute in (5, 6, 7, 8)]
        pointed(found).workspace, pointed(number).value = self.workspace, 1

    def cublasLtMatmul(self, handle: Any, what: Any, *given: Any) -> None:
        one, a, of_a, b, of_b, zero, c, of_c, d, of_d, _, workspace, size, _ = given
        if (workspace is None) != (size == 0) or (workspace or 0) % WORKSPACE_AT:
            raise LibraryRefusal("cublasLtMatmul", INVALID, "an unsupported value or parameter", "")
        assert (pointed(one).value, pointed(zero).value, c, of_c) == (1, 0, d, of_d)
        assert size == self.workspace
        flipped = [self.of(what).set[attribute] for attribute in (3, 4)]
        for number in range(self.of(of_d).set[5]):
            left, right, made = (self._matrix(at, of, number) for at, of in ((a, of_a), (b, of_b), (d, of_d)))
            made[:] = (left.T if flipped[0] else left) @ (right.T if flipped[1] else right)

    def cublasLtMatrixTransform(self, handle: Any, what: Any, *given: Any) -> None:
        one, a, of_a, _, b, _, c, of_c, _ = given
        assert (pointed(one).value, b, self.of(what).set) == (1, None, {2: 1})
        self._matrix(c, of_c)[:] = self._matrix(a, of_a).T

    def _matrix(self, address: int, layout: Any, number: int = 0) -> Array:
        """One of a layout's matrices, to be written to, or what one of floats of 16 bits stands for."""
        kind, rows, columns, leading = self.of(layout).kind
        dtype = np.dtype("uint16" if kind == "bfloat16" else kind)
        start = number * self.of(layout).set.get(6, 0) * dtype.itemsize
        found = seen(address + start, dtype, (rows, columns), (1, leading))
        if kind == "bfloat16":
            return (found.astype(np.uint32) << 16).view(np.float32)
        return found.astype(np.float32) if kind == "float16" else found


@dataclass(frozen=True)
class Engine:
    """One way that the imitated cuDNN knows: its notes, what it asks for, and whether it can be made ready."""

    notes: tuple[int, ...] = ()
    behaves: tuple[int, ...] = ()
    workspace: int = 0
    works: bool = True


TENSOR, CONVOLUTION, GRAPH, CONFIG, ENGINE, PLAN, HEURISTIC = 17, 1, 15, 3, 2, 5, 4
TO_IMAGES, TO_FILTERS = 12, 11
TENSORS = {10: (704, 703, 705), TO_IMAGES: (710, 709, 711), TO_FILTERS: (716, 715, 717)}  # of images, filters, result


class ImitatedDnn(Imitation):
    """cuDNN's graph API: ``best`` engines are those of heuristic mode A, ``others`` those to fall back to."""

    def __init__(self, best: Sequence[Engine] = (Engine(),), others: Sequence[Engine] = ()) -> None:
        super().__init__()
        self.engines = {3: best, 2: others}
        self.executed: list[Engine] = []

    def cudnnCreate(self, out: Any) -> None:
        self.keep(out, "handle")

    cudnnDestroy = cudnnBackendDestroyDescriptor = Imitation.drop

    def cudnnSetStream(self, handle: Any, stream: int) -> None:
        assert self.of(handle) == "handle"

    def cudnnBackendCreateDescriptor(self, kind: int, out: Any) -> None:
        self.keep(out, Described(kind))

    def cudnnBackendSetAttribute(self, handle: Any, attribute: int, kind: int, number: int, array: Any) -> None:
        assert not self.of(handle).finalized
        self.of(handle).set[attribute] = list(array[:number])

    def cudnnBackendFinalize(self, handle: Any) -> None:
        described = self.of(handle)
        if described.kind == PLAN and not self._engine(described).works:
            raise LibraryRefusal("cudnnBackendFinalize", 3000, "not supported", "")
        if described.kind == HEURISTIC and not self.engines[described.set[200][0]]:
            raise LibraryRefusal("cudnnBackendFinalize", 3000, "not supported", "")
        described.finalized = True

    def cudnnBackendGetAttribute(
        self, handle: Any, attribute: int, kind: int, most: int, number: Any, array: Any
    ) -> None:
        described = self.of(handle)
        if attribute == 202:
            found = self.engines[described.set[200][0]][:most]
            for at, engine in enumerate(found):
                self.of(array[at]).set.update({300: engine, 201: described.set[201]})
        elif attribute == 300:
            self.of(array[0]).set[300], found = described.set[300], [None]
        else:
            engine = self._engine(described) if attribute == 402 else described.set[300]
            found = {1303: engine.notes, 1305: engine.behaves, 402: [engine.workspace]}[attribute]
            array[: len(found)] = found
        pointed(number).value = len(found)

    def _engine(self, plan: Described) -> Engine:
        engine: Engine = self.of(plan.set[401][0]).set[300]
        return engine

    def cudnnBackendExecute(self, handle: Any, plan: Any, pack: Any) -> None:
        self.executed.append(self._engine(self.of(plan)))
        config = self.of(self.of(plan).set[401][0])
        operation = self.of(self.of(config.set[201][0]).set[801][0])
        given = self.of(pack).set
        addresses = dict(zip(given[1000], given[1001], strict=True))
        assert given[1003][0] % WORKSPACE_AT == 0
        tensors = [self._tensor(operation.set[place][0], addresses) for place in TENSORS[operation.kind]]
        first = {10: 700, TO_IMAGES: 706, TO_FILTERS: 712}[operation.kind]
        assert [operation.set[first + i] for i in (0, 1)] == [[1.0], [0.0]]
        correlate(operation.kind, self.of(operation.set[first + 2][0]).set, *tensors)

    def _tensor(self, handle: int, addresses: dict[int, int]) -> Array:
        told = self.of(handle).set
        dtype = ("float32", "float64")[told[901][0]]
        return seen(addresses[told[906][0]], dtype, told[902], told[903])


def correlate(kind: int, told: dict[int, Any], images: Array, filters: Array, result: Array) -> None:
    """A cross-correlation, or its gradient, of tensors whose dimensions are in cuDNN's order."""
    assert (told[101], told[106]) == ([1], [2])
    strides, dilations, before, after = told[103], told[102], told[105], told[104]
    wide, depth, rows, columns = filters.shape
    padded = np.pad(images, ((0, 0), (0, 0), *zip(before, after, strict=True)))
    sizes = zip(padded.shape[2:], (rows, columns), strides, dilations, strict=True)
    places = [(n - (window - 1) * apart - 1) // stride + 1 for n, window, stride, apart in sizes]
    assert places == list(result.shape[2:]), "another size is refused"
    if kind == TO_IMAGES:
        padded[:] = 0
    elif kind != TO_FILTERS:
        result[:] = 0
    groups = images.shape[1] // depth
    each = wide // groups
    for r, c, group in product(range(rows), range(columns), range(groups)):
        down, across = (
            slice(tap * apart, tap * apart + (number - 1) * stride + 1, stride)
            for tap, apart, number, stride in zip((r, c), dilations, places, strides, strict=True)
        )
        window = padded[:, group * depth : (group + 1) * depth, down, across]
        made = slice(group * each, (group + 1) * each)
        if kind == TO_IMAGES:
            window += np.einsum("nohw,oc->nchw", result[:, made], filters[made, :, r, c])
        elif kind == TO_FILTERS:
            filters[made, :, r, c] = np.einsum("nohw,nchw->oc", result[:, made], window)
        else:
            result[:, made] += np.einsum("nchw,oc->nohw", window, filters[made, :, r, c])
    if kind == TO_IMAGES:
        (top, left), (height, width) = before, images.shape[2:]
        images[:] = padded[:, :, top : top + height, left : left + width]
