"""What a world found, kept where kernels are for as long as nothing changes that it was found with.

A world that takes a minute computes the same of the same files: those `behind` its own that its process had loaded by
its end, which it tells, what compiled and ran them, and on which processor. A run of the suite after a change of
something else need not find it again: `import flowrt` loads all of it, most of which a world of kernels never asks.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from behind import files_behind
from places import ROOT

from flowrt.kernels.store.folder import cache_folder
from flowrt.kernels.store.surroundings import identity

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST = 8  # of a world: several trees share the folder


def tell(found: dict[str, Any]) -> None:
    """Print what this process found as JSON, and of which files."""
    loaded = {module.__file__ for module in tuple(sys.modules.values()) if getattr(module, "__file__", None)}
    behind = files_behind(Path(sys.modules["__main__"].__file__ or "").absolute())
    mine = sorted(str(place.relative_to(ROOT)) for place in behind if str(place) in loaded)
    json.dump({**found, "files": mine}, sys.stdout)


def digest(files: Iterable[str]) -> str:
    """Of what these files say now, and of all else that is computed with."""
    around = f"{identity()}{_gpu_packages()}".encode()
    parts = [around, *(part for name in files for part in (name.encode(), _bytes(name)))]
    return sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()[:32]


@cache
def _gpu_packages() -> list[tuple[str, str]]:
    named = ((each.name.lower(), each.version) for each in distributions())
    return sorted((name, version) for name, version in named if name.startswith(("nvidia", "cuda")))


def _bytes(name: str) -> bytes:
    with suppress(OSError):
        return (ROOT / name).read_bytes()
    return b""


def recall(world: str) -> dict[str, Any] | None:
    """What that world found before of the very same."""
    for path in cache_folder().glob(f"{world}-*.json"):
        with suppress(OSError, ValueError, KeyError):
            found: dict[str, Any] = json.loads(path.read_text())
            if path.stem == f"{world}-{digest(found['files'])}":
                return found
    return None


def keep(world: str, found: dict[str, Any]) -> None:
    """For the runs to come; the oldest goes."""
    path = cache_folder() / f"{world}-{digest(found['files'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(found))
    partial.replace(path)
    for old in sorted(path.parent.glob(f"{world}-*.json"), key=lambda each: each.stat().st_mtime)[:-MOST]:
        old.unlink(missing_ok=True)
