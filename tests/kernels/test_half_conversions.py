"""float16 to float32 and back by the processor's instructions and by plain arithmetic: to the same bits."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

import flowrt as fr
from flowrt.kernels.ops.precision import of_float16, to_float16
from flowrt.kernels.store.surroundings import architecture, has_half_conversions

ALL = np.arange(1 << 16, dtype=np.uint16)
SOME = np.random.default_rng(0).integers(0, 2**32, 1 << 14, dtype=np.uint32)  # of float32s, and among them many NaNs
ASK = """
from test_half_conversions import digest, has_half_conversions
print(has_half_conversions(), digest())
"""


def bits(of: str, to: str, held: np.ndarray) -> np.ndarray:
    """What is computed of such bits, as bits."""
    found = np.asarray(fr.astype(held.view(of), to))
    return found.view(f"u{found.itemsize}")


def about_halves() -> np.ndarray:
    """The bits of float32s: of all that are float16s, of what lies just beside and halfway between them, of others."""
    held = ALL.view("float16").astype(np.float32).view(np.uint32)
    halfway = held + np.uint32(1 << 12)
    nans = np.arange(0x7F800000, 0x7FFFFFFF, 4099, dtype=np.uint32)
    return np.concatenate([held, held + 1, held - 1, halfway, halfway + 1, halfway - 1, nans, nans | 1 << 31, SOME])


def digest() -> str:
    """What tells apart all that conversions come to here."""
    found = [bits("float16", "float32", ALL), bits("float32", "float16", about_halves())]
    return hashlib.sha256(b"".join(one.tobytes() for one in found)).hexdigest()


def test_every_float16_is_widened_as_the_plain_function_does() -> None:
    with np.errstate(all="ignore"):
        plain = np.array([of_float16(one) for one in ALL], np.float32).view(np.uint32)
    np.testing.assert_array_equal(bits("float16", "float32", ALL), plain)


def test_float32s_are_rounded_as_the_plain_function_does() -> None:
    given = about_halves()[::11]
    with np.errstate(all="ignore"):
        plain = np.array([to_float16(one) for one in given.view(np.float32)], np.uint16)
    np.testing.assert_array_equal(bits("float32", "float16", given), plain)


def test_nan_is_quiet_and_keeps_its_first_bits_both_ways() -> None:
    loud = np.array([0x7C01, 0xFD55, 0x7E03], np.uint16)
    assert bits("float16", "float32", loud).tolist() == [0x7FC02000, 0xFFEAA000, 0x7FC06000]
    wide = np.array([0x7F800001, 0xFF80E000, 0x7FC02000], np.uint32)
    assert bits("float32", "float16", wide).tolist() == [0x7E00, 0xFE07, 0x7E01]


@pytest.mark.skipif(architecture() != "x86_64", reason="the names are of x86")
@pytest.mark.parametrize(("name", "converts"), [("x86-64", False), ("haswell", True)])
def test_a_processor_without_instructions_for_it_comes_to_the_same_bits(name: str, converts: bool) -> None:
    if converts and not has_half_conversions():
        pytest.skip("this processor cannot run what it is compiled for")
    paths = [os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"NUMBA_CPU_NAME": name, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=os.environ | settings, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(converts), digest()]
