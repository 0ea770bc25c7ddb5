"""The guide: what its pages tell a reader to type is run, page by page, as one program in an empty folder.

What begins with the name of a file, as ``# soft_step.py``, belongs there.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from typing import TYPE_CHECKING

import pytest
from places import ROOT
from programs import python

if TYPE_CHECKING:
    from pathlib import Path

PAGES = sorted((ROOT / "docs" / "guide").glob("*.md"))
WORDS = 800
FILE = re.compile(r"# (\w+\.py)\n")
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_and_the_readme_links_to_it(page: Path) -> None:
    assert len(page.read_text().split()) <= WORDS
    assert f"docs/guide/{page.name}" in (ROOT / "README.md").read_text()


@pytest.mark.timeout(180)  # Ray takes its time on a machine that is busy
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_snippets_of_a_page_run_one_after_another(page: Path, tmp_path: Path) -> None:
    snippets = SNIPPET.findall(page.read_text())
    assert snippets
    files: dict[str, list[str]] = {"page.py": []}
    for snippet in snippets:
        named = FILE.match(snippet)
        files.setdefault(named[1] if named else "page.py", []).append(snippet)
    for name, parts in files.items():
        (tmp_path / name).write_text("\n".join(parts))
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:  # a socket's path is short
        quiet = {"RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
        done = subprocess.run(
            [*python(), "page.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **quiet},
            capture_output=True,
            text=True,
            timeout=170,
        )
    assert done.returncode == 0, done.stderr
