"""What somebody writes who has a device: how to find it, and its memory, copies and kernels.

All calls to an open driver come from one thread, the device's lane, one after the other, so it needs no lock. What is
issued may go on after a call has returned, in the order of the calls; `Driver.finish` and `Driver.read` wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from flowrt.base.spec import Spec

Array: TypeAlias = "np.ndarray[Any, Any]"


class Kernel(Protocol):
    """An op made ready for operands of certain specs, to be launched any number of times.

    One method more may be there: ``may_overwrite(output, input)``, numbers of operands both, says whether that output
    may lie where that input does, as each of its entries is written when the input's was read last.
    """

    @property
    def scratch(self) -> Sequence[Spec]:
        """What it computes in, beside its inputs and outputs: nothing is found there, and nothing kept."""

    @property
    def may_fail(self) -> bool:
        """Whether it may leave a reason in the first of the run's words: see `flowrt.kernels.launch.FAILURES`."""

    def launch(self, operands: Sequence[Any], words: Array) -> None:
        """Issue it on memory: of the inputs, the outputs, which it fills, and the scratch.

        No output shares memory with an input but where that may be, and that of a variable which rows are written to.
        ``words`` are the run's
        own, four int64 in the host's memory: status, step, seed, and one unused. Once `Driver.finish` has returned, the
        first is what the kernel has left there; until then they stay where they are.
        """


class RecordedLaunches(Protocol):
    """Launches that a device does again by itself, told once."""

    @property
    def words(self) -> Array:
        """The words of each launch, a row of four for each, in the host's memory: see `Kernel.launch`."""

    def replay(self) -> None:
        """Issue all of them again, on the same memory, with what is in `words` now."""


class Driver(Protocol):
    """One open device. What it calls memory is its own affair: the scheduler hands it back, and looks at nothing.

    Where nothing can be done on it any more, whatever is asked of it raises `flowrt.DeviceLost`, and says why. It is
    asked for nothing then but to `close`. Any other error is that of the step, which names what was computed.

    Two methods more may be there, and have more done in one call. ``part(memory, start, nbytes)`` answers some of a
    piece of memory as memory, from a multiple of 64 on, or for a copy from anywhere on: with it, all that a step
    computes there lies in one piece. ``record(launches)`` answers a `RecordedLaunches` of pairs of a kernel and the
    operands that its ``launch`` would be given: with both, a step that runs again is one call.

    Three methods beside those have it bring small values in and out by itself. ``pinned(nbytes)`` answers bytes of the
    host's memory. ``send(memory, bytes)`` and ``fetch(memory, bytes)`` issue copies of them to and from where
    ``memory`` begins, which are done when their turn comes: in a recording, each time anew.
    """

    @property
    def limit(self) -> int | None:
        """The bytes that may be held at once; None where only an allocation can tell."""

    def allocate(self, nbytes: int) -> Any:
        """Memory of so many bytes, at least 1. Raises `MemoryError` where there are none."""

    def free(self, memory: Any) -> None:
        """Take memory back, which what was issued before may still use."""

    def write(self, memory: Any, array: Array) -> None:
        """Copy a C-contiguous array of the host's to where ``memory`` begins; it may change once this has returned."""

    def read(self, memory: Any, array: Array) -> None:
        """Fill a C-contiguous array of the host's from where ``memory`` begins, once all issued before is done."""

    def copy(self, source: Any, target: Any, nbytes: int) -> None:
        """Copy within the device."""

    def prepare(self, op: str, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Kernel:
        """The kernel of an op that the device's kind `Kind.supports`."""

    def finish(self) -> None:
        """Wait until all that was issued is done; raises what went wrong with it."""

    def close(self) -> None:
        """Let everything go."""


class Kind(Protocol):
    """A kind of devices: what stands before the colon of ``cuda:0``."""

    def count(self) -> int:
        """How many there are here. Raises any error whose text says why there might be some that cannot be used."""

    def supports(self, op: str, dtypes: Sequence[np.dtype[Any]]) -> bool:
        """Whether it has a kernel for operands of these dtypes (inputs, then outputs).

        Asked where steps are placed, which may be where there is no such device. Constants, reshapes, reads of
        variables and assignments need no kernel; additions to variables need that of ``add`` or ``subtract``.
        """

    def open(self, index: int) -> Driver:
        """The device of that number. What is bound to a thread is best left to the first call in the lane."""
