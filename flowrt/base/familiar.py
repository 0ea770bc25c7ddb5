"""Names from NumPy, PyTorch, TensorFlow and JAX, answered by flowrt's own.

Law: words only, those of `elsewhere.txt`. Whoever lacks an attribute asks `absent` for the error to raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from flowrt.base.package import PACKAGE

BEHIND = {"fr": "fr.nn", "fr.nn": "fr", "fr.random": "fr", "fr.quantize": "fr", "a tensor": "fr"}
"""Where else a name is looked for."""


@cache
def pages() -> dict[str, list[tuple[str, list[str]]]]:
    """By heading, line by line, what to write here and what others call it."""
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for line in (PACKAGE / "base" / "elsewhere.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            page = found[line[1:-1]] = []
        elif line and not line.startswith("#"):
            here, _, names = line.rpartition(": ")
            page.append((here, names.split()))
    return found


def argument_meant(name: str, there: Sequence[str]) -> str | None:
    """Which of the arguments ``there`` is called ``name`` elsewhere, if one is."""
    return next((here for here, names in pages()["an argument"] if here in there and name in names), None)


def keyword_hint(name: str, there: Sequence[str]) -> str:
    """Which of the arguments ``there`` is meant by ``name``: what is called so elsewhere, or nearly so here."""
    meant = argument_meant(name, there)
    if meant is not None:
        return f"; write {meant}="
    from difflib import get_close_matches

    near = get_close_matches(name, there, 1, 0.6)
    return f"; did you mean {near[0]}=?" if near else ""


@cache
def _page(namespace: str) -> dict[str, str]:
    """What to write here, by the name that is typed."""
    lines = [*pages().get(BEHIND.get(namespace, ""), ()), *pages().get(namespace, ())]
    return {name: here.replace("NAME", name) for here, names in lines for name in names}


def hint(namespace: str, name: str, there: Iterable[str] = ()) -> str:
    """What to write for ``name``, or for what it is a misspelling of, first of what is ``there``; else nothing."""
    if name.startswith("_"):
        return ""
    page = _page(namespace)
    if name in page:
        return f"; write {page[name]}"
    from difflib import get_close_matches  # a millisecond that no right program needs

    if near := get_close_matches(name, there, 1, 0.75):
        dot = "x" if namespace == "a tensor" else namespace
        return f"; did you mean {dot}.{near[0]}?"
    near = get_close_matches(name, page, 1, 0.8)
    return f"; for {near[0]} write {page[near[0]]}" if near else ""


def answering(namespace: str, module: Mapping[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and the ``__dir__`` of a module that programs know as ``namespace``."""

    def __getattr__(name: str) -> Any:
        raise absent(namespace, module, name)

    def __dir__() -> list[str]:
        return sorted(module["__all__"])

    return __getattr__, __dir__


def absent(namespace: str, module: Mapping[str, Any], name: str) -> AttributeError:
    """The error for a ``name`` that the module does not have."""
    return AttributeError(
        f"module {module['__name__']!r} has no attribute {name!r}{hint(namespace, name, module['__all__'])}"
    )
