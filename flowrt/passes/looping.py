"""Which loops and branches a device carries out whose memory is not the host's: see `sched/devices/looping`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.plan import Plan
from flowrt.op import lookup, sizing
from flowrt.ops.body import changes_state
from flowrt.passes.known_sizes import HowMade, find_size

if TYPE_CHECKING:
    from flowrt.base.plan import PlanNode
    from flowrt.base.spec import Spec

Supports: TypeAlias = Callable[[str, Sequence[Any], str], bool]
Sizes: TypeAlias = Callable[[int], "Spec | None"]


def runs_apart(op: str, attrs: Mapping[str, Any], sizes: Sizes, kind: str, supports: Supports) -> bool:
    """Whether devices of that ``kind`` carry out a loop or branch.

    They do where they compute all of its bodies, and nothing in these has an effect or sizes known only inside.
    ``sizes`` answers, of the loop's input of a number, what is known of sizes that the host has (see `find_size`).
    """
    bodies = [value for value in attrs.values() if isinstance(value, Plan)]
    if lookup(op).stateful or changes_state(*bodies):
        return False
    return all(_Body(body, _captured(op, attrs, body), sizes).runs_on(kind, supports) for body in bodies)


def _captured(op: str, attrs: Mapping[str, Any], body: Plan) -> Iterable[tuple[int, int]]:
    """The feeds of a body that are the same in all iterations, each with the input that it is."""
    if op != "loop":
        return [(feed, feed + 1) for feed in range(len(body.feeds))]
    passed = attrs["carried"] + (attrs["scanned"] if body is attrs["body"] else 0)
    behind = attrs["counted"] + attrs["carried"] + attrs["scanned"]
    return [(feed, behind + feed - passed) for feed in range(passed, len(body.feeds))]


class _Body:
    """A body, and what is known of the sizes in it."""

    def __init__(self, body: Plan, captured: Iterable[tuple[int, int]], sizes: Sizes) -> None:
        self._body, self._specs, starts = body, body.value_specs(), body.value_starts()
        self._makers = {v: (node, v - starts[n]) for n, node in enumerate(body.nodes) for v in _made(starts, n)}
        self._found: dict[int, Spec | None] = {feed: sizes(number) for feed, number in captured}

    def runs_on(self, kind: str, supports: Supports) -> bool:
        """Whether devices of that kind compute all of it."""
        return all(self._runs(node, kind, supports) for node in self._body.nodes)

    def _runs(self, node: PlanNode, kind: str, supports: Supports) -> bool:
        if any(isinstance(value, Plan) for value in node.attrs.values()):
            return runs_apart(node.op, node.attrs, lambda number: self._size(node.inputs[number]), kind, supports)
        if any(self._size(node.inputs[n]) is None for n in sizing(node.op, node.attrs, len(node.inputs))):
            return False
        taken = [self._specs[value].dtype for value in node.inputs]
        return supports(node.op, [*taken, *(spec.dtype for spec in node.outputs)], kind)

    def _size(self, value: int) -> Spec | None:
        return find_size(value, self._how, self._found)

    def _how(self, value: int) -> HowMade | None:
        """How a constant is made, or an integer."""
        node, number = self._makers.get(value, (None, 0))
        if node is None or (node.op != "constant" and self._specs[value].dtype.kind not in "iu"):
            return None
        return HowMade(lookup(node.op), node.attrs, node.inputs, [self._specs[v] for v in node.inputs], number)


def _made(starts: Sequence[int], node: int) -> range:
    return range(starts[node], starts[node + 1])
