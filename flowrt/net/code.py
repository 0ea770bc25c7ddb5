"""Whether all nodes of a session have imported the same code of the user's: the modules that ``--import`` names.

Law: a module is known by a hash of its source, of all of a package's, as it was when the module was imported. Who has
imported something else than the others would compute something else: that is an error, before anything runs. Who has
not imported something that others have may not need it, and is named.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

Hashes: TypeAlias = Mapping[str, str]
SHOWN = 8  # digits of a hash, in errors


def hash_of(module: str) -> str:
    """What the source of an imported module comes to; of a package, of all its files below. Empty where it has none."""
    found = sys.modules[module]
    file, folders = getattr(found, "__file__", None), list(getattr(found, "__path__", ()))
    digest = hashlib.sha256()
    files = [(path.relative_to(folder), path) for folder in map(Path, folders) for path in folder.rglob("*.py")]
    if not folders and file:
        files = [(Path(Path(file).name), Path(file))]
    try:
        for name, path in sorted(files):
            content = path.read_bytes()
            digest.update(f"{name.as_posix()} {len(content)}\n".encode() + content)
    except OSError:
        return ""
    return digest.hexdigest() if files else ""


def hashes_here(modules: Iterable[str]) -> dict[str, str]:
    """The hashes of those of ``modules`` that are imported here."""
    return {module: hash_of(module) for module in modules if module in sys.modules}


def differing(code: Mapping[str, Hashes], here: Hashes) -> list[str]:
    """What is another module on a node than on this client, or, where that has none, than on most: with the fix."""
    found = []
    for module in sorted({module for hashes in code.values() for module in hashes}):
        there = {task: hashes[module] for task, hashes in code.items() if module in hashes}
        who, right = _right(there, here.get(module))
        found += [
            f"{task} has imported another {module} than {who} has ({_shown(other)} there, {_shown(right)} here): "
            f"have it find the same files, and restart it with --import {module}"
            for task, other in there.items()
            if other != right
        ]
    return found


def missing(code: Mapping[str, Hashes]) -> list[str]:
    """What some nodes have imported and others have not."""
    found = []
    for module in sorted({module for hashes in code.values() for module in hashes}):
        lacking = [task for task, hashes in code.items() if module not in hashes]
        if lacking:
            having = next(task for task, hashes in code.items() if module in hashes)
            found.append(
                f"{', '.join(lacking)} has not imported {module}, as {having} has; restart it with --import {module} "
                "if it is to run what that defines"
            )
    return found


def _right(there: Hashes, here: str | None) -> tuple[str, str]:
    """Whose module the others' are held against: this client's, or the one that most have."""
    if here is not None:
        return "this client", here
    tasks, hashes = list(there), list(there.values())
    right = max(hashes, key=hashes.count)
    return tasks[hashes.index(right)], right


def _shown(digest: str) -> str:
    return digest[:SHOWN] or "no source"
