"""Which tests need not be run again: those that passed of the very files there are."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import behind
import kept
import pytest
import settled

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A project of its own, and how a file is put there that was written so many seconds before this process began."""
    monkeypatch.setenv("FLOWRT_CACHE", str(tmp_path / "cache"))
    for module in (behind, kept, settled):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(behind, "MODULES", [str(tmp_path / "worlds")])

    def written(name: str, text: str, before: float = 60.0) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
        os.utime(path, (settled.BEGAN - before,) * 2)
        settled._passed.cache_clear()
        behind.files_behind.cache_clear()
        return path

    return written


def test_behind_a_module_is_what_it_imports_anywhere_and_what_that_imports(write: Callable[..., Path]) -> None:
    module = write("test_some.py", "import os\nfrom worlds_one import thing\ndef f():\n    import pack.inner\n")
    write("other.py", "")
    write("pack/__init__.py", "import other")
    files = {
        module,
        write("worlds/worlds_one.py", "from pack import outer\nimport test_some"),
        write("pack/inner.py", ""),
        write("pack/outer.py", "import numpy"),
        write("pack/__init__.py", "import other"),
        write("other.py", ""),
    }
    assert behind.files_behind(module) == files


def test_a_packages_own_file_counts_where_it_is_named(write: Callable[..., Path]) -> None:
    module, named = write("test_some.py", "import pack.inner"), write("test_named.py", "from pack import VALUE")
    package, inner = write("pack/__init__.py", "VALUE = 1"), write("pack/inner.py", "")
    assert behind.files_behind(module) == {module, inner}
    assert behind.files_behind(named) == {named, package}


def test_what_passed_need_not_run_again_until_a_file_behind_it_changes(write: Callable[..., Path]) -> None:
    module = write("test_some.py", "import one")
    write("one.py", "VALUE = 1")
    assert not settled.has_passed(module, "test_a")
    settled.note_passed(module, "test_a")
    settled.note_passed(module, "test_b[1-2]")
    write("other.py", "")
    assert settled.has_passed(module, "test_a")
    assert settled.has_passed(module, "test_b[1-2]")
    assert not settled.has_passed(module, "test_c")
    write("one.py", "VALUE = 2")
    assert not settled.has_passed(module, "test_a")
    write("one.py", "VALUE = 1")
    assert settled.has_passed(module, "test_a")


def test_what_was_changed_while_tests_run_is_not_what_passed(write: Callable[..., Path]) -> None:
    module = write("test_some.py", "import one")
    write("one.py", "VALUE = 1", before=-1.0)
    settled.note_passed(module, "test_a")
    write("one.py", "VALUE = 1")
    assert not settled.has_passed(module, "test_a")
