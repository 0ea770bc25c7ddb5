"""Sections of docs/performance.md, each written by the script that measures what it says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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


def put_rows(heading: str, about: Sequence[str], columns: str, rows: Mapping[str, str], page: Path = PAGE) -> None:
    """Replace rows of the table under ``heading``, or add them at its end, by what stands in their first cell.

    Rows of another machine than that of ``about``'s first line do not stay beside them.
    """
    text = page.read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    before = found.group(1).splitlines() if found and _machine(about[0]) in found.group(1) else []
    kept = {line.split("|")[1].strip(): line for line in before if line.startswith("|")}
    kept = {name: line for name, line in kept.items() if line not in (columns, _rule(columns))}
    put(heading, [*about, "", columns, _rule(columns), *{**kept, **rows}.values()], page)


def _machine(line: str) -> str:
    """What a machine's line says of it that is the same from run to run."""
    return line.split("(load")[0]


def _rule(columns: str) -> str:
    return "|---" * (columns.count("|") - 1) + "|"


def others(page: Path = PAGE) -> str:
    """The sections of the page, from its first heading of the second level on."""
    found = re.search(r"^## .*", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return "" if found is None else found.group(0)
