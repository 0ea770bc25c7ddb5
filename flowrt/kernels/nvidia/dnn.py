"""Convolutions by cuDNN's graph API: a graph of one operation, and the first plan that computes as is asked.

float32 is multiplied and added up as float32. Left out are engines of the tensor cores, which round it; those that see
an image as waves, where a NaN or a large entry reaches all others; and those whose results change from run to run. See
the cuDNN Backend API, NVIDIA's reference; what is here named an attribute or a descriptor is so there.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.kernels.nvidia.calls import CudaCallError, Stream
from flowrt.kernels.nvidia.convolutions import Convolution, Direction, Sizes
from flowrt.kernels.nvidia.library import CudaLibrary, LibraryRefusal, begin_of, room_for

if TYPE_CHECKING:
    from flowrt.kernels.nvidia.blas import Blas

WORKSPACE = 256 << 20  # bytes that a plan may ask for
ALIGNED = 16  # bytes that operands begin at a multiple of
BESIDE = 256  # bytes whose multiple the filters begin at
_REFUSALS = range(2000, 4000)  # CUDNN_STATUS_BAD_PARAM and _NOT_SUPPORTED, with what they say of the reason
CONSIDERED = 128  # engines, the most promising first

_handle, _int, _pointer, _count = ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
_out = ctypes.POINTER(ctypes.c_void_p)
SIGNATURES = {
    "cudnnCreate": (_out,),
    "cudnnDestroy": (_handle,),
    "cudnnSetStream": (_handle, _pointer),
    "cudnnBackendCreateDescriptor": (_int, _out),
    "cudnnBackendDestroyDescriptor": (_handle,),
    "cudnnBackendFinalize": (_handle,),
    "cudnnBackendSetAttribute": (_handle, _int, _int, _count, _pointer),
    "cudnnBackendGetAttribute": (_handle, _int, _int, _count, ctypes.POINTER(_count), _pointer),
    "cudnnBackendExecute": (_handle, _handle, _handle),
}

_TYPES = {np.dtype("float32"): (0, ctypes.c_float), np.dtype("float64"): (1, ctypes.c_double)}
"""By dtype: CUDNN_DATA_FLOAT or _DOUBLE, and what factors are to C."""

_AS = {  # CUDNN_TYPE_...: how an attribute's entries are spelled
    "handle": (0, ctypes.c_void_p),
    "data type": (1, ctypes.c_int),
    "int64": (3, ctypes.c_int64),
    "float": (4, ctypes.c_float),
    "double": (5, ctypes.c_double),
    "address": (6, ctypes.c_void_p),
    "mode": (7, ctypes.c_int),
    "heuristic": (8, ctypes.c_int),
    "numerical note": (11, ctypes.c_int),
    "descriptor": (15, ctypes.c_void_p),
    "behavior note": (19, ctypes.c_int),
}
_CONVOLUTION, _ENGINE, _ENGINE_CONFIG, _HEURISTIC, _PLAN, _GRAPH, _PACK, _TENSOR = 1, 2, 3, 4, 5, 15, 16, 17
_OPERATIONS = {Direction.FORWARD: (10, 700, (704, 703, 705)), Direction.TO_IMAGES: (12, 706, (710, 709, 711)),
               Direction.TO_FILTERS: (11, 712, (716, 715, 717))}  # fmt: skip
"""By direction: the descriptor, the first of its attributes (alpha, then beta and the convolution), and x, w and y."""

_CROSS_CORRELATION = 1
_BEST, _ANY = 3, 2  # CUDNN_HEUR_MODE_A, _FALLBACK
_TENSOR_CORE, _DOWN_CONVERTED, _REDUCED, _FFT, _NONDETERMINISTIC, _TILE_6, _TILE_13 = 0, 1, 2, 3, 4, 7, 8
_UNWANTED = {_TENSOR_CORE, _DOWN_CONVERTED, _REDUCED, _FFT, _NONDETERMINISTIC, _TILE_6, _TILE_13}
_NOTES, _RUNTIME_COMPILED = 16, 0  # notes of an engine at most; a behavior that takes seconds when it is first used
IMAGES, FILTERS, RESULT = 1, 2, 3  # by which tensors are told apart


class Descriptor:
    """One of cuDNN's descriptors, which goes when this does."""

    def __init__(self, library: CudaLibrary, kind: int) -> None:
        self._library, self.handle = library, ctypes.c_void_p()
        library.call("cudnnBackendCreateDescriptor", kind, ctypes.byref(self.handle))
        self._held: list[Descriptor] = []  # what it refers to
        weakref.finalize(self, library.call, "cudnnBackendDestroyDescriptor", self.handle).atexit = False

    def set(self, attribute: int, kind: str, *values: Any) -> Descriptor:
        """Set an attribute to one or several entries of that kind."""
        number, spelled = _AS[kind]
        held = [value for value in values if isinstance(value, Descriptor)]
        self._held += held
        array = (spelled * len(values))(*(each.handle for each in held) if held else values)
        self._library.call("cudnnBackendSetAttribute", self.handle, attribute, number, len(values), array)
        return self

    def finalized(self) -> Descriptor:
        self._library.call("cudnnBackendFinalize", self.handle)
        return self

    def get(self, attribute: int, kind: str, most: int = 1) -> list[int]:
        """An attribute's entries, of which there are ``most``."""
        number, spelled = _AS[kind]
        array: Any = (spelled * most)()
        return list(array[: self._get(attribute, number, most, array)])

    def get_all(self, attribute: int, kind: int, most: int) -> list[Descriptor]:
        """The descriptors of some kind that are an attribute's entries, filled in."""
        made = [Descriptor(self._library, kind) for _ in range(most)]
        number, spelled = _AS["descriptor"]
        count = self._get(attribute, number, most, (spelled * most)(*(each.handle for each in made)))
        for each in made:
            each._held.append(self)
        return made[:count]

    def _get(self, attribute: int, number: int, most: int, array: Any) -> int:
        """Have entries of an attribute filled in; how many there are."""
        count = ctypes.c_int64(0)
        asked = self.handle, attribute, number, most, ctypes.byref(count), array
        self._library.call("cudnnBackendGetAttribute", *asked)
        return count.value


class Dnn:
    """cuDNN for the GPU whose context the calling thread has, and a stream of its.

    Raises an error where it is not installed.
    """

    def __init__(self, stream: Stream) -> None:
        self.library = CudaLibrary("cudnn", SIGNATURES, "cudnnGetErrorString", _REFUSALS.__contains__)
        self.handle = self.library.made("cudnnCreate")
        self.library.call("cudnnSetStream", self.handle, int(stream))

    def prepare(self, asked: Convolution, blas: Blas) -> PreparedConvolution | None:
        """The convolution, ready to be launched; None where the library has no way that does it as it should."""
        plan = self.plan(asked)
        return PreparedConvolution(self, plan, asked, blas) if plan else None

    def plan(self, asked: Convolution) -> Descriptor | None:
        """How it is computed."""
        try:
            graph = self.graph(asked)
        except LibraryRefusal:
            return None  # more than the library counts up to
        for mode in (_BEST, _ANY):
            for config in self._configs(graph, mode):
                plan = self._plan(config)
                if plan is not None:
                    return plan
        return None

    def graph(self, asked: Convolution) -> Descriptor:
        """The operation, alone."""
        kind, first, places = _OPERATIONS[asked.direction]
        number, factor = _TYPES[asked.dtype]
        (batch, height, width, channels), (rows, columns, depth, wide) = asked.images, asked.filters
        tensors = (
            self._tensor(IMAGES, number, (batch, channels, height, width)),
            self._tensor(FILTERS, number, (wide, depth, rows, columns)),
            self._tensor(RESULT, number, (asked.result[0], wide, *asked.result[1:3])),
        )
        made = Descriptor(self.library, _CONVOLUTION)
        made.set(100, "data type", number).set(101, "mode", _CROSS_CORRELATION).set(106, "int64", 2)
        made.set(102, "int64", *asked.dilations).set(103, "int64", *asked.strides)
        made.set(104, "int64", *asked.after).set(105, "int64", *asked.before)
        operation = Descriptor(self.library, kind)
        scale = "double" if factor is ctypes.c_double else "float"
        operation.set(first, scale, 1.0).set(first + 1, scale, 0.0).set(first + 2, "descriptor", made.finalized())
        for place, tensor in zip(places, tensors, strict=True):
            operation.set(place, "descriptor", tensor)
        graph = Descriptor(self.library, _GRAPH).set(800, "handle", self.handle)
        return graph.set(801, "descriptor", operation.finalized()).finalized()

    def _tensor(self, number: int, kind: int, sizes: Sizes) -> Descriptor:
        """One whose channels lie side by side."""
        _, channels, height, width = sizes
        strides = height * width * channels, 1, width * channels, channels
        made = Descriptor(self.library, _TENSOR).set(901, "data type", kind).set(906, "int64", number)
        return made.set(900, "int64", ALIGNED).set(902, "int64", *sizes).set(903, "int64", *strides).finalized()

    def _configs(self, graph: Descriptor, mode: int) -> Iterator[Descriptor]:
        """Engines with their settings, those that NVIDIA thinks the best first, of which none does what is unwanted."""
        heuristic = Descriptor(self.library, _HEURISTIC).set(201, "descriptor", graph).set(200, "heuristic", mode)
        try:
            found = heuristic.finalized().get_all(202, _ENGINE_CONFIG, CONSIDERED)
        except LibraryRefusal:
            return  # it knows none
        for config in found:
            (engine,) = config.get_all(300, _ENGINE, 1)
            notes = set(engine.get(1303, "numerical note", _NOTES))
            if not notes & _UNWANTED and _RUNTIME_COMPILED not in engine.get(1305, "behavior note", _NOTES):
                yield config

    def _plan(self, config: Descriptor) -> Descriptor | None:
        """The engine made ready; None where it cannot compute that after all, or asks for too much memory."""
        plan = Descriptor(self.library, _PLAN).set(400, "handle", self.handle).set(401, "descriptor", config)
        try:
            plan.finalized()
        except CudaCallError:
            return None
        return plan if workspace_of(plan) <= WORKSPACE else None

    def execute(self, plan: Descriptor, addresses: Sequence[int], workspace: int) -> None:
        """Issue a plan on images, filters and result at these addresses."""
        pack = Descriptor(self.library, _PACK).set(1000, "int64", IMAGES, FILTERS, RESULT)
        pack.set(1001, "address", *addresses).set(1003, "address", workspace).finalized()
        self.library.call("cudnnBackendExecute", self.handle, plan.handle, pack.handle)

    def close(self) -> None:
        self.library.call("cudnnDestroy", self.handle)


def workspace_of(plan: Descriptor) -> int:
    """The bytes that a plan computes in."""
    return plan.get(402, "int64")[0]


class PreparedConvolution:
    """A convolution with its plan, whose workspace is followed by the filters as cuDNN has them."""

    def __init__(self, dnn: Dnn, plan: Descriptor, asked: Convolution, blas: Blas) -> None:
        self._dnn, self._plan, self._direction = dnn, plan, asked.direction
        *depth, wide = asked.filters
        sizes = (math.prod(depth), wide) if asked.direction is not Direction.TO_FILTERS else (wide, math.prod(depth))
        self._turn = blas.transposition(*sizes, asked.dtype)
        self._filters = -(-workspace_of(plan) // BESIDE) * BESIDE
        self.workspace = room_for(self._filters + math.prod(asked.filters) * asked.dtype.itemsize)

    def launch(self, operands: Sequence[Any], workspace: Any) -> None:
        """Issue it; the filters, or their gradient, are turned around on the way."""
        images, filters, result = (operands[number].address for number in self._direction.value)
        space = begin_of(workspace)
        turned = space + self._filters
        if self._direction is not Direction.TO_FILTERS:
            self._turn.launch(filters, turned)
        self._dnn.execute(self._plan, (images, turned, result), space)
        if self._direction is Direction.TO_FILTERS:
            self._turn.launch(turned, filters)
