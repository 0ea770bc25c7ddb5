"""Every op's kernels computed range by range, in any order: the same to the last bit as computed at once."""

from __future__ import annotations

import ctypes
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from op_examples import EXAMPLES, Example

from flowrt.kernels.launch import Prepared

SHOWN = [e for e in EXAMPLES if e.reference is not None and any(a.size > 1 for a in e.arrays)]


def in_ranges(rng: np.random.Generator) -> Callable[..., None]:
    """What stands for `Prepared.run`: up to four ranges of each step's units, shuffled; some of them are empty."""

    def run(self: Prepared, run: int, addresses: Sequence[int]) -> None:
        bases = self.bases(run, addresses)
        for entry, block, units in self._calls:
            inside = rng.integers(0, units + 1, 3).tolist() if units > 1 else []  # what is one unit, nobody divides
            cuts = [0, *sorted(inside), units]
            pairs = list(itertools.pairwise(cuts))
            for number in rng.permutation(len(pairs)).tolist():
                entry(ctypes.addressof(bases), block, *pairs[number])

    return run


@pytest.mark.parametrize("example", SHOWN, ids=str)
def test_ranges_add_up_to_the_whole(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = zlib.crc32(str(example).encode())
    print("seed", seed)
    whole: Any = example.run(*example.arrays)
    monkeypatch.setattr(Prepared, "run", in_ranges(np.random.default_rng(seed)))
    split: Any = example.run(*example.arrays)
    for one, other in zip(*(v if isinstance(v, tuple) else (v,) for v in (whole, split)), strict=True):
        np.testing.assert_array_equal(one, other)
