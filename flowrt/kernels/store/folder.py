"""Where compiled kernels are kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``$FLOWRT_CACHE``, else ``flowrt`` in the user's cache folder."""
    given = os.environ.get("FLOWRT_CACHE")
    if given:
        return Path(given)
    above = os.environ.get("XDG_CACHE_HOME")
    if above:
        return Path(above) / "flowrt"
    try:
        return Path.home() / ".cache" / "flowrt"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / f"flowrt-{os.geteuid()}"
