"""What is true of an op by itself, for those who rewrite, fuse and schedule ops without knowing them by name.

Law: pure. Each fact is stated once, at the op's ``@op(...)``, and asked for by name; nobody keeps lists of ops. What
its kernels cost is stated where they are registered (`flowrt.kernels.language.table.Facts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeAlias, TypedDict

import numpy as np

from flowrt.base.spec import normal_axes
from flowrt.base.valueclass import valueclass

Sizes: TypeAlias = "tuple[Any, ...]"


@valueclass
class Reduction:
    """One of many entries, along the axes ``attrs["axis"]``: the op ``by`` combines two of them, in any order.

    A mean is a sum divided by the number of entries. What is made of each row ``in_rows`` may be read again by what
    else is computed along the row; such a reduction makes of a single entry that entry.
    """

    by: str
    mean: bool = False
    in_rows: bool = False

    @property
    def adds(self) -> bool:
        """Whether it is a sum or a mean."""
        return self.by == "add"

    def held(self, dtype: Any) -> np.dtype[Any]:
        """The dtype that what many entries of ``dtype`` come to is held in: wide enough that none of them is lost."""
        taken: np.dtype[Any] = np.dtype(dtype)
        match self.by:
            case "maximum" | "minimum":
                return taken
            case "logical_or" | "logical_and":
                return np.dtype(bool)
        wide = {"f": "float64", "u": "uint64"}.get(taken.kind, "int64")
        return np.dtype("float64" if self.mean else wide)


class Arranged(Enum):
    """How the entries of an output are those of the first input."""

    RESHAPED = "all of them in their order, under another shape: nothing is computed"
    REPEATED = "each as often as a larger shape asks for"
    PART = "some of them"


@valueclass
class VariableUpdate:
    """A variable is written, or of several that an optimiser keeps together some ``rows``, by a kernel that sees them.

    ``by`` is the op on what it held and what is given, where that tells what it holds then; by a rule of its ``own``
    the kernel makes one of both.
    """

    by: str | None = None
    rows: bool = False
    own: bool = False

    @property
    def whole(self) -> str | None:
        """The op that makes all of what the variable holds then, of what it held and what is given."""
        return None if self.rows else self.by

    @property
    def commutes(self) -> bool:
        """Whether it does not matter which of two such updates comes first."""
        return self.by is not None

    @property
    def replaces(self) -> bool:
        """Whether what was held counts no more, but by what is given."""
        return self.by is None and not self.own


class Elsewhere(Enum):
    """How another task than the one that has computed an output comes by it, where that is not by having it sent."""

    AGAIN = "it is computed there once more, of its inputs, unless its attribute `again` says no"
    AS_FIRST = "as by its first input: where that is computed once more, so is it"


@valueclass
class Contraction:
    """Sums of products, as matrices and convolutions are made of; an epilogue may go over their entries.

    ``biased`` is the op that adds a vector to each row and then, if asked, applies relu. ``stored`` are pairs of a
    dtype of 16 bits, and the op that takes the bits of such floats.
    """

    biased: str | None = None
    stored: tuple[tuple[str, str], ...] = ()


@valueclass
class Traits:
    """The facts of one op; None where it is none of that kind."""

    reduction: Reduction | None = None
    view: Arranged | None = None
    update: VariableUpdate | None = None
    contraction: Contraction | None = None
    idle_if_alike: bool = False  # where its first input is of the output's shape, it is the output
    unread: tuple[int, ...] = ()  # inputs, by position, that no kernel looks at: derivatives alone go to them
    elsewhere: Elsewhere | None = None


class Stated(TypedDict, total=False):
    """The facts as ``@op(...)`` takes them: fields of `Traits` by name."""

    reduction: Reduction
    view: Arranged
    update: VariableUpdate
    contraction: Contraction
    idle_if_alike: bool
    unread: tuple[int, ...]
    elsewhere: Elsewhere


NONE = Traits()
TRAITS: dict[str, Traits] = {}


def traits_of(op: str) -> Traits:
    """What was stated of the op of that name; it need not exist."""
    return TRAITS.get(op, NONE)


def reduction_of(op: str) -> Reduction | None:
    """How the op makes one of many entries, if it does."""
    return traits_of(op).reduction


def writes(op: str) -> bool:
    """Whether the op writes a variable."""
    return traits_of(op).update is not None


def writes_rows(op: str) -> bool:
    """Whether the op's kernel reads and writes the variables that it names where these lie."""
    update = traits_of(op).update
    return update is not None and update.rows


def is_alias(op: str) -> bool:
    """Whether the op's output is its first input under another shape, so that nothing is computed."""
    return traits_of(op).view is Arranged.RESHAPED


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
# Reductions along the last axes may be read again: what a value is beside the rows that they make one number each of.
# Passes and kernels read rows by this alike; sizes that only a step knows are None.


class RowForm(Enum):
    """What a value is beside a row."""

    ENTRY = "an entry for each element"
    KEPT = "one for each row, with axes of size 1 in the row's place"
    BARE = "one for each row, without such axes"
    TOTAL = "reduced otherwise: nothing takes it"


@valueclass
class RowSpace:
    """The shape of some elements, and how many of its last axes are a row: 0 while nothing reduced is read."""

    dims: Sizes
    along: int = 0

    @property
    def bare(self) -> Sizes:
        return self.dims[: len(self.dims) - self.along]

    @property
    def kept(self) -> Sizes:
        return (*self.bare, *[1] * self.along)

    @property
    def rows(self) -> int:
        """How many there are, where all sizes are known."""
        return math.prod(self.bare)

    @property
    def length(self) -> int:
        """Of how many entries a row is."""
        return math.prod(self.dims[len(self.bare) :])

    def form_of(self, dims: Sizes | None) -> RowForm | None:
        """What is of that shape, unless it is reduced."""
        if dims == self.dims:
            return RowForm.ENTRY
        return {self.kept: RowForm.KEPT, self.bare: RowForm.BARE}.get(dims) if self.along and dims is not None else None

    def form_reduced(self, axes: int, keepdims: bool) -> RowForm:
        """What the reduction of an entry for each element is, over so many of the last axes; see `last_axes`."""
        if axes != self.along or not axes:
            return RowForm.TOTAL
        return RowForm.KEPT if keepdims else RowForm.BARE

    def links(self, op: str, attrs: Mapping[str, Any], found: RowForm | None, taken: RowForm | None) -> bool:
        """Whether ``op``, a view, puts what is one for each row in another shape, or repeats it along the row."""
        if taken not in (RowForm.KEPT, RowForm.BARE):
            return False
        if traits_of(op).view is not Arranged.REPEATED:
            return found in (RowForm.KEPT, RowForm.BARE)
        if "axis" not in attrs:  # to a shape, as NumPy broadcasts
            return taken is RowForm.KEPT and found in (RowForm.ENTRY, RowForm.KEPT)
        axes = normal_axes(attrs["axis"], len(self.dims))
        whole = sorted(axes) == list(range(len(self.bare), len(self.dims)))
        return found is RowForm.ENTRY and whole and taken is (RowForm.KEPT if attrs["keepdims"] else RowForm.BARE)


def last_axes(op: str, rank: int, axis: Any) -> int:
    """How many of the last axes ``op`` makes one number each of, that may be read again beside them; 0 if it is other.

    All of them count, too.
    """
    reduction = reduction_of(op)
    if reduction is None or not reduction.in_rows:
        return 0
    axes = normal_axes(axis, rank)
    return len(axes) if axes and min(axes) == rank - len(axes) else 0


def held_dtype(op: str, dtype: Any) -> np.dtype[Any]:
    """The dtype that the reduction ``op`` holds what it makes of many entries in."""
    reduction = reduction_of(op)
    assert reduction is not None
    return reduction.held(dtype)


def reduces_rows(op: str) -> bool:
    """Whether a member of an expression may make one of the entries of a row (`row_loops`) by ``op``."""
    reduction = reduction_of(op)
    return reduction is not None and reduction.in_rows


def adds_up(op: str) -> bool:
    """Whether ``op`` makes a sum or a mean of many entries."""
    reduction = reduction_of(op)
    return reduction is not None and reduction.adds
