"""How things that are no plain values show themselves: short, in angle brackets, and always."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def telling(words: Callable[[Any], str]) -> Callable[[Any], str]:
    """A ``__repr__`` of these ``words``; of its class alone where they cannot be found, as for what is half made.

    Debuggers and errors show whatever there is, so it never raises.
    """

    def text(self: Any) -> str:
        try:
            return f"<{words(self)}>"
        except Exception:  # an error about an error would hide the first
            return f"<{type(self).__name__}, not made>"

    return text
