"""CUDA twins as a GPU's compiler sees them: one process compiles all that the examples launch, which takes no GPU."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import distributions
from typing import Any

import pytest
from places import TESTS, told_by

from flowrt.base.package import PACKAGE
from flowrt.kernels.store.objects import cache_folder

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's compiler is made for Linux alone"),
]
VARIANTS = 190  # and more: as many as the examples of all ops launch


def compilers() -> list[str]:
    """What compiles it, with versions."""
    names = ("numba", "llvmlite", "numpy", "nvidia", "cuda")
    found = {(each.name.lower(), each.version) for each in distributions() if each.name.lower().startswith(names)}
    return [sys.version, *(f"{name} {version}" for name, version in sorted(found))]


def digest() -> str:
    sources = [*sorted(PACKAGE.rglob("*.py")), *sorted((TESTS / "worlds").glob("*.py"))]
    parts = [path.read_bytes() for path in sources] + [line.encode() for line in compilers()]
    return sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()[:32]


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """What `ptx_world` compiled, now or before from the very same: it is kept where kernels are.

    It is a process of its own, as Numba's simulator compiles nothing.
    """
    kept = cache_folder() / f"ptx-{digest()}.json"
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    found = told_by("ptx_world", simulated=False, seconds=580)
    if not found["failures"]:
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(found))
        partial.replace(kept)
        for old in sorted(kept.parent.glob("ptx-*.json"), key=lambda path: path.stat().st_mtime)[:-8]:
            old.unlink(missing_ok=True)
    return found


def test_every_variant_of_every_twin_compiles_to_ptx(compiled: dict[str, Any]) -> None:
    assert compiled["failures"] == []
    assert sum(compiled["compiled"].values()) >= VARIANTS
