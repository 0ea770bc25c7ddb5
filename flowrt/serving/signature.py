"""What a model takes and answers, by the names that its users know: tensors of its graph, and of each what may come.

Law: pure. What a program names is looked at once, here; an error says the name, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrt.base.errors import GraphError, user_site
from flowrt.base.valueclass import valueclass
from flowrt.graph import Graph, Tensor
from flowrt.op import as_value

LONGEST = 200  # characters of a name


@valueclass
class Frozen:
    """All that a model is: a graph without state, tensors of it by name, and what it is called."""

    graph: Graph
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    name: str


def named(values: Any, what: str) -> dict[str, Tensor]:
    """``values`` by name: a mapping of names, or tensors alone, which are called as the last part of their own name."""
    if isinstance(values, Mapping):
        found = [(name, as_value(value)) for name, value in values.items()]
    else:
        alone = not isinstance(values, Sequence)
        tensors = [as_value(value) for value in ([values] if alone else values)]
        found = [(_last_part(tensor), tensor) for tensor in tensors]
    for name, tensor in found:
        if not isinstance(tensor, Tensor):
            raise GraphError(f"{user_site()}: {what} are tensors by name, as {{'x': x}}; got {tensor!r:.200}")
        check_name(name, f"one of the {what}")
    names = [name for name, _ in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise GraphError(f"{user_site()}: several {what} are called {sorted(twice)[0]!r}; name them, as {{'x': x}}")
    return dict(found)


def check_name(name: Any, what: str) -> None:
    """Raise `GraphError` for what cannot stand in a path of HTTP, or on a line of a program's output."""
    if not isinstance(name, str) or not name or len(name) > LONGEST or not name.isprintable() or "/" in name:
        raise GraphError(
            f"{user_site()}: {what} is called {name!r:.200}; a name has 1 to {LONGEST} printable characters, and no /"
        )


def told(tensors: Mapping[str, Tensor]) -> str:
    """Names and specs, for people."""
    return ", ".join(f"{name}: {tensor.spec.without_value()}" for name, tensor in tensors.items()) or "nothing"


def _last_part(tensor: Any) -> Any:
    return tensor.op.name.rpartition("/")[2] if isinstance(tensor, Tensor) else tensor
