"""Sources in Parquet files: row groups are read whole, when a batch needs one, and some of them kept."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np

from flowrt.base.errors import FeedError, GraphError, path_of, user_site
from flowrt.base.spec import Spec
from flowrt.base.tracebacks import brief
from flowrt.base.valueclass import valueclass
from flowrt.data.columns import Pairs, checked_columns, chosen, converted, read
from flowrt.data.order import BatchOrder, Rows, checked_order
from flowrt.data.sources import Array, Batch, Source, Specified, Specs, Table


@valueclass
class Parquet(Specified):
    """Columns of Parquet files; see `parquet`. ``columns`` are (name, column), ``dtypes`` (name, dtype)."""

    paths: tuple[str, ...]
    columns: Pairs
    dtypes: Pairs
    found: Specs
    order: BatchOrder

    def table(self) -> Table:
        return _Groups(self)

    def __str__(self) -> str:
        return f"the source parquet {_named(self.paths)}"


class _Groups(Table):
    """The row groups of files, one file's after the other's. No file stays open."""

    def __init__(self, source: Parquet) -> None:
        places = _places(source.paths)
        sizes = [size for _, _, size in places]
        if tuple(sizes) != source.order.blocks:
            raise FeedError(f"{source} has other row groups here than where the source was made")
        self.rows, self.specs = sum(sizes), source.specs
        self._source, self._places = source, places
        self._starts = np.array([0, *accumulate(sizes)])
        self._forms = {name: (Spec(spec.dtype, spec.shape[1:]).concrete, spec.dtype) for name, spec in source.found}
        self._group = lru_cache(maxsize=2 * source.order.mix)(self._read_group)  # a batch may lie in two windows

    def take(self, rows: Rows, identity: int) -> Batch:
        groups = np.searchsorted(self._starts, rows, "right") - 1
        batch = {name: np.empty((len(rows), *tail), dtype) for name, (tail, dtype) in self._forms.items()}
        for group in np.unique(groups):
            here = groups == group
            columns = self._group(int(group))
            for name, array in batch.items():
                array[here] = columns[name][rows[here] - self._starts[group]]
        return batch

    def close(self) -> None:
        self._group.cache_clear()

    def _read_group(self, group: int) -> Batch:
        path, number, _ = self._places[group]
        columns = _read_columns(path, number, dict(self._source.columns))
        casts = dict(self._source.dtypes)
        for name, (tail, dtype) in self._forms.items():
            found = columns[name]
            if found.shape[1:] != tail or (name not in casts and found.dtype != dtype):
                got = f"{found.dtype}{list(found.shape)}"
                raise FeedError(f"{path}, row group {number}: {name!r} is {self.specs[name]} before, {got} there")
        return columns


@brief
def parquet(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    batch: int,
    *,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    dtypes: Mapping[str, Any] | None = None,
    shuffle: bool = True,
    mix: int = 4,
    seed: int = 0,
    epochs: int | None = None,
    remainder: str = "drop",
) -> Source:
    """A source of the columns of Parquet files: ``fr.data.parquet("clicks.parquet", batch=32, columns=["x", "y"])``.

    Row groups are read whole: each epoch takes them in an order of its own, and shuffles the rows of ``mix`` at a time,
    of which each worker keeps twice as many in memory. Columns hold numbers, or lists of numbers that are all of one
    length; none of them null. It needs pyarrow: ``pip install "flowrt[parquet]"``.

    Args:
        paths: A file, or several, whose rows follow one another; see `npz` for where they are.
        batch: The rows of a batch.
        columns: The columns to read, or ``{name: column}``; all by default.
        dtypes: What to convert columns to, by name, as Parquet's numbers often are float64: ``{"x": "float32"}``.
        shuffle: See `arrays`, as for the rest.
        mix: How many row groups are shuffled among each other.
        seed: See `arrays`.
        epochs: See `arrays`.
        remainder: See `arrays`.

    Raises `GraphError` as `arrays` does, for a file that cannot be read, and where pyarrow is missing.
    """
    given: list[Any] = [paths]
    if isinstance(paths, Iterable) and not isinstance(paths, (str, bytes, os.PathLike)):
        given = list(paths)
    if not given:
        raise GraphError(f"{user_site()}: parquet takes a path or several, not none")
    files = tuple(os.path.abspath(path_of(path, "a parquet file")) for path in given)
    what = f"parquet {_named(files)}"
    _pyarrow()
    places = read(what, lambda: _places(files))
    if not places:
        raise GraphError(f"{user_site()}: {what} is empty: it has no rows")
    names = chosen(what, read(what, lambda: _names(files[0])), columns)
    for file in files[1:]:
        chosen(f"parquet {file}", read(what, partial(_names, file)), list(names.values()))
    casts = converted(what, list(names), dtypes)
    path, number, _ = places[0]
    _, specs = checked_columns(what, read(what, lambda: _read_columns(path, number, names)), casts)
    sizes = tuple(size for _, _, size in places)
    order = checked_order(what, sum(sizes), batch, shuffle, seed, epochs, remainder, sizes, mix)
    return Parquet(files, tuple(names.items()), casts, specs, order)


def _places(paths: Sequence[str]) -> list[tuple[str, int, int]]:
    """Every row group that has rows: its file, its number in that, and how many."""
    found = []
    for path in paths:
        with _pyarrow().ParquetFile(path) as file:
            sizes = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
        found += [(path, number, size) for number, size in enumerate(sizes) if size]
    return found


def _names(path: str) -> list[str]:
    with _pyarrow().ParquetFile(path) as file:
        return list(file.schema_arrow.names)


def _read_columns(path: str, group: int, columns: Mapping[str, str]) -> dict[str, Array]:
    """The columns of a row group, by the names that they are to have. Raises `ValueError` for what is no array."""
    with _pyarrow().ParquetFile(path) as file:
        there = set(file.schema_arrow.names)
        if missing := [column for column in columns.values() if column not in there]:
            raise ValueError(f"{path} has no column {', '.join(map(repr, missing))}")
        table = file.read_row_group(group, columns=list(columns.values()), use_threads=False)
    return {
        name: _as_array(table.column(column).combine_chunks(), f"{path}: {column!r}")
        for name, column in columns.items()
    }


def _as_array(values: Any, what: str) -> Array:
    """Values of a column as an array: lists of one length add an axis."""
    if hasattr(values, "chunks"):  # some versions of pyarrow answer a chunked array of one chunk
        values = values.chunk(0)
    if values.null_count:
        raise ValueError(f"{what} has {values.null_count} nulls; fill or drop them")
    if hasattr(values, "flatten") and hasattr(values, "values"):
        inner = _as_array(values.flatten(), what)
        length, rest = divmod(len(inner), len(values))
        if rest or (hasattr(values, "offsets") and (np.diff(values.offsets.to_numpy()) != length).any()):
            raise ValueError(f"{what} has lists of different lengths; make them of one")
        return inner.reshape(len(values), length, *inner.shape[1:])
    found: Array = values.to_numpy(zero_copy_only=False)
    return found


def _named(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise GraphError(
            f'{user_site()}: Parquet files need pyarrow, which is not installed: pip install "flowrt[parquet]"'
        ) from error
    return pyarrow.parquet
