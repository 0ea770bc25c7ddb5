"""The map for newcomers names files that there are."""

from __future__ import annotations

import re

from places import ROOT

PAGES = (
    "CONTRIBUTING.md",
    "docs/architecture.md",
    *(str(p.relative_to(ROOT)) for p in ROOT.glob("flowrt/*/README.md")),
)
ROW = re.compile(r"^\| (?P<question>[^|]+\?) \| `(?P<file>[^`|]+)` \|$", re.MULTILINE)


def test_twenty_questions_of_a_newcomer_are_answered_by_a_file() -> None:
    rows = ROW.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(rows) >= 20
    for question, file in rows:
        assert (ROOT / file).is_file(), f"{question} {file} is none"


def test_what_pages_call_a_file_is_one() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text()
        around = ROOT / page.rpartition("/")[0] if page.endswith("README.md") else ROOT / "flowrt"
        for name in re.findall(r"`((?:flowrt/|tests/|[a-z]+/)[a-z_/]+)(?:\.py)?(?:\.[A-Z]\w*)?`", text):
            found = [place / (name + end) for place in (ROOT, ROOT / "flowrt", around) for end in ("", ".py")]
            assert any(path.exists() for path in found), f"{page}: there is no {name}"
