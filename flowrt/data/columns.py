"""Columns: arrays of one length, by name, of which a batch takes the same rows each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from flowrt.base.errors import GraphError, SpecError, user_site
from flowrt.base.plain import shortened
from flowrt.base.spec import Spec, as_dtype
from flowrt.data.mapping import check_whole
from flowrt.data.sources import Array, Batch, Specs, Table

if TYPE_CHECKING:
    from flowrt.data.order import Rows

T = TypeVar("T")
Pairs: TypeAlias = tuple[tuple[str, str], ...]


class ColumnTable(Table):
    """Columns in memory, or mapped into it; those that ``dtypes`` names are converted."""

    def __init__(self, columns: Mapping[str, Array], dtypes: Pairs = ()) -> None:
        self._columns = dict(columns)
        self._dtypes = {name: array.dtype.newbyteorder("=") for name, array in columns.items()}
        self._dtypes |= {name: np.dtype(dtype) for name, dtype in dtypes}
        self.rows = min(map(len, columns.values()))
        self.specs = {name: Spec(self._dtypes[name], (None, *array.shape[1:])) for name, array in columns.items()}

    def take(self, rows: Rows, identity: int) -> Batch:
        for array in self._columns.values():
            check_whole(array)
        return {name: np.ascontiguousarray(array[rows], self._dtypes[name]) for name, array in self._columns.items()}

    def close(self) -> None:
        self._columns = {}  # a map ends with its last array


def checked_columns(what: str, columns: Mapping[str, Array], dtypes: Pairs = ()) -> tuple[int, Specs]:
    """How many rows columns have, and their specs; raises `GraphError` at the user's line where they do not fit."""
    if not columns:
        raise GraphError(f"{user_site()}: {what} has no columns")
    for name, array in columns.items():
        if not isinstance(name, str):
            raise GraphError(f"{user_site()}: {what}: names of columns are texts, not {name!r}")
        if array.ndim == 0:
            raise GraphError(f"{user_site()}: {what}: {name!r} is one value, {shortened(array[()])}; rows need an axis")
    lengths = {name: len(array) for name, array in columns.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
        raise GraphError(f"{user_site()}: {what}: every column has the same number of rows; {found}")
    try:
        table = ColumnTable(columns, dtypes)
    except SpecError as error:
        raise GraphError(f"{user_site()}: {what}: {error}") from None
    return next(iter(lengths.values())), tuple(table.specs.items())


def chosen(what: str, there: Sequence[str], columns: Sequence[str] | Mapping[str, str] | None) -> dict[str, str]:
    """Which of the columns that are ``there`` is read under which name: {name: column}.

    Raises `GraphError` at the user's line for one that is not.
    """
    if isinstance(columns, str) or not isinstance(columns, Iterable | None):
        raise GraphError(f"{user_site()}: columns is a list of them, [{columns!r}], or {{name: column}}")
    wanted = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns or there}
    if missing := [column for column in wanted.values() if column not in there]:
        raise GraphError(f"{user_site()}: {what} has no {', '.join(map(repr, missing))}; it has {', '.join(there)}")
    return wanted


def converted(what: str, names: Sequence[str], dtypes: Mapping[str, Any] | None) -> Pairs:
    """The dtypes to convert columns to, as they travel; raises `GraphError` at the user's line for others."""
    if not isinstance(dtypes, Mapping | None):
        raise GraphError(f"{user_site()}: {what}: dtypes are given by name, as {{'x': 'float32'}}, not {dtypes!r}")
    if unknown := [name for name in dtypes or {} if name not in names]:
        raise GraphError(f"{user_site()}: {what}: dtypes names {', '.join(map(repr, unknown))}, which is not read")
    try:
        return tuple((name, as_dtype(dtype).name) for name, dtype in (dtypes or {}).items())
    except SpecError as error:
        raise GraphError(f"{user_site()}: {what}: {error}") from None


def read(what: str, reading: Callable[[], T]) -> T:
    """What ``reading`` answers; raises `GraphError` at the user's line where a file cannot be read."""
    try:
        return reading()
    except (OSError, ValueError, NotImplementedError, MemoryError) as error:  # of these pyarrow's own are derived
        raise GraphError(f"{user_site()}: cannot read {what}: {error}") from error
