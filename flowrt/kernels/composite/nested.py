"""Loops and branches as one launch: a block that holds other launches, on the same bases.

Law: pure. The block says everything in itself: tables of the inner launches' entries, and their blocks behind those,
found by offsets from the block's start. An inner launch's operands are operands of the launch around it. Some of these
are *private slots* of the bases, which the entry sets as it goes: to what is carried at present and to where it goes
next, to the present row of what is scanned and stacked, to constants. What is carried moves between two places by
exchanging addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.valueclass import valueclass
from flowrt.kernels.launch import Composite
from flowrt.kernels.store.parts import NESTED_PARTS

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode
    from flowrt.kernels.language.variants import Variant
    from flowrt.kernels.launch import Launchable, Operand

NONE = -1
HEAD = 24
"""Words at the beginning of a block; their meaning by name is in `LOOP` and `BRANCH`."""
LOOP = (
    "limit", "count_slot", "count_offset", "rows", "reverse", "conds", "cond_table", "pred_slot", "pred_offset",
    "bodies", "body_table", "carried", "carried_table", "scanned", "scanned_table", "stacked", "stacked_table",
    "done_slot", "done_offset", "constants", "constant_table", "crew_slot", "trace_slot", "iteration_slot",
)  # fmt: skip
BRANCH = (
    "pred_slot",
    "pred_offset",
    "trues",
    "true_table",
    "falses",
    "false_table",
    "constants",
    "constant_table",
    "trace_slot",
)
CARRIED_WORDS, ROW_WORDS, LAUNCH_WORDS, CONSTANT_WORDS = 9, 4, 3, 2


@valueclass
class Inner:
    """A launch inside: its step, its operands as places among the operands of the launch around it, the sizes of these
    in bytes, and of which body's node it is part, by its position."""

    step: Launchable
    places: tuple[Operand, ...]
    sizes: tuple[int, ...] = ()
    body: Plan | None = None
    position: int = 0

    @property
    def node(self) -> PlanNode | None:
        """The body's node."""
        return None if self.body is None else self.body.nodes[self.position]


@valueclass
class Carried:
    """One loop variable, as operand numbers: the private slots of its present and its next value, where it begins,
    where it is to end, and a place to change with that. ``fixed``: the body leaves it as it is."""

    present: int
    next: int
    first: int
    out: int
    spare: int
    nbytes: int
    fixed: bool


@valueclass
class ScannedRows:
    """Something scanned or stacked: the private slot of its present row, where it lies whole, a row's bytes, and how
    many bytes of the whole come before the first row."""

    present: int
    whole: int
    nbytes: int
    before: int = 0


@dataclass(frozen=True)
class NestedStep(Composite):
    """What a `Step` is to an op, for a loop or branch. ``constants`` are private slots and what they point at."""

    kind: str
    operands: tuple[int, ...]
    reads: int
    local: tuple[int, ...]
    """The operands that each thread has for itself."""
    spans: tuple[tuple[Inner, ...], ...]
    """A branch: where true, where false. A loop: the condition's launches, the body's."""
    pred: tuple[int, int]
    constants: tuple[tuple[int, np.ndarray[Any, Any]], ...] = ()
    limit: int | None = None
    count: int | None = None
    rows: int | None = None
    reverse: bool = False
    carried: tuple[Carried, ...] = ()
    scanned: tuple[ScannedRows, ...] = ()
    stacked: tuple[ScannedRows, ...] = ()
    done: int = 0
    crew: int = 0
    trace: int = 0
    iteration: int = 0
    """Private slots: of the `board` share of those who run iterations together; of where the present launch failed,
    counted from 1, in the first span below 0; of the iteration in which it did."""

    units = 1
    may_fail = True

    def variants(self) -> Iterator[Variant]:
        for inner in chain(*self.spans):
            yield from inner.step.variants()

    def is_compiled(self) -> bool:
        return NESTED_PARTS[self.kind].is_compiled() and all(inner.step.is_compiled() for inner in chain(*self.spans))

    def address(self) -> int:
        """The compiled entry; inner launches are compiled when the block is made."""
        return NESTED_PARTS[self.kind].address()

    def block(self, places: Sequence[Operand]) -> np.ndarray[Any, Any]:
        """The block, and in it those of the inner launches, for operands at ``places``."""
        return np.array(_Writer(self, places).words(), np.int64)


class _Writer:
    """Writes a block: the head, then tables and inner blocks as they are asked for."""

    def __init__(self, step: NestedStep, places: Sequence[Operand]) -> None:
        self._step, self._places = step, places
        self._behind: list[int] = []

    def words(self) -> list[int]:
        head = self._loop_head() if self._step.kind == "loop" else self._branch_head()
        names = LOOP if self._step.kind == "loop" else BRANCH
        found = [head.get(name, 0) for name in names]
        return [*found, *[0] * (HEAD - len(found)), *self._behind]

    def _branch_head(self) -> dict[str, int]:
        step = self._step
        true, false = step.spans
        pred = self._at(*step.pred)
        return {
            "pred_slot": pred[0],
            "pred_offset": pred[1],
            "trues": len(true),
            "true_table": self._launches(true),
            "falses": len(false),
            "false_table": self._launches(false),
            **self._constants(),
            "trace_slot": self._places[step.trace].slot,
        }

    def _loop_head(self) -> dict[str, int]:
        step = self._step
        cond, body = step.spans
        pred = (NONE, 0) if step.pred[0] < 0 else self._at(*step.pred)
        count = (NONE, 0) if step.count is None else self._at(step.count)
        done = self._at(step.done)
        return {
            "limit": NONE if step.limit is None else step.limit,
            "count_slot": count[0],
            "count_offset": count[1],
            "rows": NONE if step.rows is None else step.rows,
            "reverse": int(step.reverse),
            "conds": len(cond),
            "cond_table": self._launches(cond),
            "pred_slot": pred[0],
            "pred_offset": pred[1],
            "bodies": len(body),
            "body_table": self._launches(body),
            "carried": len(step.carried),
            "carried_table": self._table([self._carried(one) for one in step.carried]),
            "scanned": len(step.scanned),
            "scanned_table": self._table([self._rows(one) for one in step.scanned]),
            "stacked": len(step.stacked),
            "stacked_table": self._table([self._rows(one) for one in step.stacked]),
            "done_slot": done[0],
            "done_offset": done[1],
            **self._constants(),
            "crew_slot": self._places[step.crew].slot,
            "trace_slot": self._places[step.trace].slot,
            "iteration_slot": self._places[step.iteration].slot,
        }

    def _at(self, operand: int, offset: int = 0) -> tuple[int, int]:
        place = self._places[operand]
        return place.slot, place.offset + offset

    def _carried(self, one: Carried) -> list[int]:
        present, following = self._places[one.present].slot, self._places[one.next].slot
        spots = [*self._at(one.first), *self._at(one.out), *self._at(one.spare)]
        return [present, NONE if one.fixed else following, *spots, one.nbytes]

    def _rows(self, one: ScannedRows) -> list[int]:
        return [self._places[one.present].slot, *self._at(one.whole, one.before), one.nbytes]

    def _constants(self) -> dict[str, int]:
        rows = [[self._places[slot].slot, array.ctypes.data] for slot, array in self._step.constants]
        return {"constants": len(rows), "constant_table": self._table(rows)}

    def _table(self, rows: Sequence[Sequence[int]]) -> int:
        """Where in the block a table begins."""
        at = HEAD + len(self._behind)
        self._behind += [word for row in rows for word in row]
        return at

    def _launches(self, span: Sequence[Inner]) -> int:
        rows = []
        for inner in span:
            places = [self._resolved(place) for place in inner.places]
            block = inner.step.block(places).tolist()
            rows.append([inner.step.address(), self._table([block]), inner.step.units])
        return self._table(rows)

    def _resolved(self, place: Operand) -> Operand:
        slot, offset = self._at(place.slot, place.offset)
        return type(place)(slot, offset)
