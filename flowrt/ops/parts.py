"""What passes make of lookups in tables split by rows, and of writes to them, once it is known what lies where.

None of it is a program's: see `flowrt.passes.parts`. A table's parts lie on devices, its *homes*, and rows of all parts
of one home travel as one tensor, one part's behind the other's. Of n indices each part has a *stretch* of the vectors
that `route_rows` answers, and what these have room for fits any number of rows: so a step on one device has sizes that
follow from n alone, and what is sent is cut off by `part_of`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.spec import Spec
from flowrt.base.traits import Elsewhere
from flowrt.ops.routing import check_part
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.typed import Operand, Result

__all__: list[str] = []

VECTORS = ("found", "order", "numbers")
"""By what `move_parts` tells rows, and where they come to lie."""


@op(gradient=None)
def take_parts(tables: Sequence[Operand], indices: Operand, bounds: Any, absent: bool = False) -> Result:
    """`take` of rows of the table whose rows from ``bounds[i]`` up to the next are those of ``tables[i]``.

    It is made of a lookup where all parts lie in one place, after gradients are taken.
    """
    if indices.dtype.kind not in "iu" or indices.dims is None or indices.rank != 1:
        raise SpecError(f"indices into parts are a vector of integers, got {indices}")
    if any(table.dims is None or table.rank < 1 or not table.known for table in tables):
        raise SpecError(f"the parts of a table have rows of known sizes, got {' and '.join(map(str, tables))}")
    given = list(bounds) if isinstance(bounds, (tuple, list)) else bounds
    wanted = list(itertools.accumulate((table.concrete[0] for table in tables), initial=0))
    if given != wanted or not tables:
        raise SpecError(f"{len(tables)} parts of a table have their rows between bounds {wanted}, got {bounds!r}")
    _check_alike(tables)
    return Spec(tables[0].dtype, (indices.shape[0], *tables[0].shape[1:]))


@op(elsewhere=Elsewhere.AS_FIRST, gradient=None)
def pack_parts(starts: Operand, found: Operand, homes: Any) -> tuple[Result, Result]:
    """Where the rows of each part come to lie where those of one home are packed; part i lies in ``homes[i]``.

    They are: for each place in the stretch of a part its row among those of its home, as many as are ``found``; and 0
    and the number of rows of each home, one pair behind the other, so that `part_of` cuts off what is too much.
    """
    _check_vectors(starts, found)
    parts = None if starts.dims is None or starts.shape[0] is None else starts.shape[0] - 1
    given = tuple(homes) if isinstance(homes, (tuple, list)) else ()
    numbers = sorted(set(given))
    if not given or numbers != [*range(len(numbers))] or (parts is not None and parts != len(given)):
        raise SpecError(f"each of {parts or 'its'} parts has a home, numbered from 0 up, got {homes!r}")
    return Spec("int64", found.dims), Spec("int64", (2 * len(numbers),))


def _check_vectors(*vectors: Spec) -> None:
    for spec in vectors:
        if spec.dtype != np.int64 or (spec.dims is not None and spec.rank != 1):
            raise SpecError(f"where parts and their rows are is said by int64 vectors, got {spec}")


@op(gradient=None)
def move_parts(
    sources: Sequence[Operand],
    starts: Operand,
    found: Operand,
    order: Operand,
    back: Operand,
    numbers: Operand,
    parts: Any,
    rows: Any,
    places: str,
) -> Result:
    """The stretches of ``parts`` of a table: rows of ``sources[i]`` come to lie where ``places`` say, for ``parts[i]``.

    Which rows ``rows[i]`` says: those ``found`` in the part, in the ``order`` of the indices, or by their ``numbers``
    in the part's home. As many are made as there are indices, where that is their order, else as many as any home may
    have, of which those with no number are not written. No row's are zeros.
    """
    _check_vectors(starts, found, order, back, numbers)
    given, ways = tuple(parts), tuple(rows)
    if not len(sources) == len(given) == len(ways) > 0:
        raise SpecError(f"each of {len(sources)} sources is some part's, got parts={parts!r} and rows={rows!r}")
    if not {*ways} <= {*VECTORS} or places not in ("order", "numbers"):
        raise SpecError(f"rows come to lie by order or numbers, got rows={rows!r} and places={places!r}")
    for part in given:
        check_part(starts, part)
    _check_alike(sources)
    made = back if places == "order" else numbers
    inner = next((source.shape[1:] for source in sources if source.dims is not None), None)
    return Spec(sources[0].dtype, None if inner is None else (None if made.dims is None else made.shape[0], *inner))


def _check_alike(tables: Sequence[Spec]) -> None:
    ranked = [table for table in tables if table.dims is not None]
    if any(table.rank < 1 for table in ranked):
        raise SpecError(f"a scalar has no rows, got {' and '.join(map(str, tables))}")
    if any((table.dtype, table.shape[1:]) != (ranked[0].dtype, ranked[0].shape[1:]) for table in ranked):
        raise SpecError(f"rows of parts are alike, got {' and '.join(map(str, tables))}")


@op(gradient=None)
def group_part(starts: Operand, found: Operand, numbers: Operand, like: Operand, part: int, size: int) -> Result:
    """`group_rows` of the indices of one part, of ``size`` rows, out of what `route_rows` answers of all of them.

    ``numbers`` say of each place in its stretch which of the values is its. There are as many values as indices of all
    parts, those of ``like``, or fewer.
    """
    check_part(starts, part)
    _check_vectors(starts, found, numbers)
    count = None if like.dims is None else like.shape[0]
    return Spec("int32" if size < 1 << 31 else "int64", (None if count is None else 3 * count + 2,))
