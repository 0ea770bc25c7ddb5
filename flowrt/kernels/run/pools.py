"""The threads of the BLAS that NumPy and SciPy carry: one each while any host is open, and as before afterwards.

Law: flowrt splits work above BLAS, so threads below it only fight for the same cores. Hosts are counted. Only the
OpenBLAS in NumPy's and SciPy's own packages is touched, where the process has loaded it; another BLAS is left as it is.
What is loaded while hosts are open is limited by the next, and afterwards gets as many threads as NumPy's had.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path
from typing import Any

_PACKAGES = {"numpy": "64_", "scipy": ""}  # whose OpenBLAS has which suffix to its functions' names
_lock = threading.Lock()
_hosts = 0
_before: dict[str, int] = {}  # package → its library's threads before they were limited


def limit() -> None:
    """Limit the pools for one more host."""
    global _hosts
    with _lock:
        _hosts += 1
        for package, library in _libraries().items():
            _before.setdefault(package, _function(library, "get", package)())
            _function(library, "set", package)(1)


def restore() -> None:
    """Let go of a `limit`; the last gives the libraries their threads back."""
    global _hosts
    with _lock:
        _hosts -= 1
        if _hosts:
            return
        for package, library in _libraries().items():
            threads = _before.get(package, _before.get("numpy"))
            if threads is not None:
                _function(library, "set", package)(threads)
        _before.clear()


def _libraries() -> dict[str, Any]:
    """The libraries that this process has loaded, by package."""
    homes = {Path(sys.modules[name].__file__ or "").parent.parent for name in _PACKAGES if name in sys.modules}
    found = {}
    for package in _PACKAGES:
        for home in homes:
            beside, inside = home / f"{package}.libs", home / package / ".dylibs"
            for path in (*beside.glob("libscipy_openblas*"), *inside.glob("libscipy_openblas*")):
                library = _loaded(path)
                if library is not None and hasattr(library, _name("set", package)):
                    found[package] = library
    return found


def _loaded(path: Path) -> Any:
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None


def _name(verb: str, package: str) -> str:
    return f"scipy_openblas_{verb}_num_threads{_PACKAGES[package]}"


def _function(library: Any, verb: str, package: str) -> Any:
    return getattr(library, _name(verb, package))
