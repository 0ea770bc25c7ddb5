"""What a GPU is told to do again: one call for all of it, with what lies in the host's memory then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from imitated_driver import ImitatedDriver

from flowrt.kernels.cuda.driver import CudaDriver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Launched:
    """A kernel that does nothing but to issue copies."""

    may_fail = takes_run = False

    def __init__(self, issue: Callable[..., None], *more: Any) -> None:
        self._issue, self._more = issue, more

    def launch(self, operands: Sequence[Any], words: Any) -> None:
        self._issue(*operands, *self._more)


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch) -> ImitatedDriver:
    made = ImitatedDriver()
    made.stand_in(monkeypatch)
    return made


def test_values_come_in_and_go_out_with_what_is_recorded(imitated: ImitatedDriver) -> None:
    gpu = CudaDriver(0)
    given, made, first, second = gpu.pinned(16), gpu.pinned(16), gpu.allocate(64), gpu.allocate(64)
    recorded = gpu._recorded(
        [
            (Launched(gpu.send, given), [first]),
            (Launched(gpu.copy, 16), [first, second]),
            (Launched(gpu.fetch, made), [second]),
        ]
    )
    for n in (1, 2):
        given[:] = n
        made[:] = 0
        imitated.called.clear()
        recorded.replay()
        gpu.finish()
        assert (made == n).all()
        assert imitated.called == {"launch_graph": 1, "synchronize": 1}
    gpu.close()
    assert imitated.alive == {}


def test_what_is_recorded_goes_with_its_memory(imitated: ImitatedDriver) -> None:
    gpu = CudaDriver(0)
    gpu.allocate(64)
    before = imitated.alive.copy()
    recorded = gpu._recorded([(Launched(gpu.send, gpu.pinned(16)), [gpu.allocate(16)])])
    recorded.replay()
    gpu.finish()
    del recorded
    held = gpu.allocate(64)
    assert len(imitated.alive) == len(before)
    del held
    np.testing.assert_equal(sorted(imitated.alive.values()), sorted(before.values()))
