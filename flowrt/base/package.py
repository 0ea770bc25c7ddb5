"""Which version this package is, where it lies, and how processes that this one starts find it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

VERSION = "0.1.0"
PACKAGE = Path(sys.modules[__name__.partition(".")[0]].__file__ or "").absolute().parent


def search_path(others: Iterable[str] = ()) -> str:
    """``PYTHONPATH`` by which this very package is found first, then ``others``."""
    return os.pathsep.join([str(PACKAGE.parent), *others, *filter(None, [os.environ.get("PYTHONPATH")])])
