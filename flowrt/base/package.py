"""Where this package lies."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = Path(sys.modules[__name__.partition(".")[0]].__file__ or "").absolute().parent
