"""Sections of docs/performance.md, each written by the script that measures what it says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"


def put(heading: str, lines: Sequence[str], page: Path = PAGE) -> None:
    """Replace the section under ``heading`` (as `### Two hops`), or add it at the end of the page."""
    text = page.read_text(encoding="utf-8")
    section = "\n".join([heading, "", *lines, ""])
    level = heading.split(" ", 1)[0]
    found = re.search(rf"^{re.escape(heading)}\n.*?(?=^#{{1,{len(level)}}} |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        text = f"{text.rstrip()}\n\n{section}"
    else:
        rest = text[found.end() :]
        text = text[: found.start()] + section + ("\n" + rest if rest else "")
    page.write_text(text, encoding="utf-8")


def others(page: Path = PAGE) -> str:
    """The sections of the page, from its first heading of the second level on."""
    found = re.search(r"^## .*", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return "" if found is None else found.group(0)
