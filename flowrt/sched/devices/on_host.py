"""flowrt's kernels for the host, for a driver whose memory is arrays of the host's: what a device of one's own may have
for all ops at once, until it has better."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrt.kernels.language.table import find_kernel
from flowrt.kernels.launch import Prepared, apply_kernel
from flowrt.sched.regions.sharing import may_overwrite

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    import numpy as np

    from flowrt.base.spec import Spec
    from flowrt.sched.devices.driver import Array


class HostKernel:
    """A kernel that computes on the calling thread, in arrays of any dtype that hold enough bytes."""

    def __init__(self, op: str, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> None:
        self._application = apply_kernel(op, inputs, outputs, attrs)
        self._prepared = Prepared(self._application, len(inputs) + len(outputs))
        self.scratch = self._prepared.scratch
        self.may_fail = any(step.may_fail for step in self._application.steps)

    def may_overwrite(self, output: int, operand: int) -> bool:
        """Whether an output may lie where an input does; see `Kernel`."""
        return may_overwrite(self._application, output, [operand])

    def launch(self, operands: Sequence[Array], words: Array) -> None:
        """Compute; see `Kernel.launch`. The arrays begin at multiples of 64 bytes."""
        self._prepared.run(words.ctypes.data, [array.ctypes.data for array in operands])


def computes_on_host(op: str, dtypes: Sequence[np.dtype[Any]]) -> bool:
    """Whether there is a `HostKernel` for operands of these dtypes (inputs, then outputs)."""
    return find_kernel(op, "cpu", dtypes) is not None
