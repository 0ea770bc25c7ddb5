"""Sources of arrays: in memory, which travel to the nodes once, and in NumPy's files, which are mapped there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import GraphError, SpecError, path_of, user_site
from flowrt.base.plain import unmasked
from flowrt.base.tracebacks import brief
from flowrt.base.valueclass import valueclass
from flowrt.data.columns import ColumnTable, Pairs, checked_columns, chosen, converted, read
from flowrt.data.mapping import map_member, map_npy, members_of
from flowrt.data.order import BatchOrder, checked_order
from flowrt.data.sources import Array, Source, Specified, Specs

if TYPE_CHECKING:
    from flowrt.base.spec import Spec

Path: TypeAlias = str | os.PathLike[str]


@valueclass
class Arrays(Source):
    """Arrays in memory; see `arrays`."""

    columns: tuple[tuple[str, Array], ...] = field(repr=False, compare=False)
    order: BatchOrder

    @property
    def specs(self) -> Mapping[str, Spec]:
        return self.table().specs

    def table(self) -> ColumnTable:
        return ColumnTable(dict(self.columns))

    def __str__(self) -> str:
        return f"a source of arrays {', '.join(name for name, _ in self.columns)}"


@valueclass
class Npz(Specified):
    """Members of an npz file; see `npz`. ``members`` are (name, member), ``dtypes`` (name, dtype)."""

    path: str
    members: Pairs
    dtypes: Pairs
    found: Specs
    order: BatchOrder

    def table(self) -> ColumnTable:
        return ColumnTable({name: map_member(self.path, member) for name, member in self.members}, self.dtypes)

    def __str__(self) -> str:
        return f"the source npz {self.path}"


@valueclass
class Npy(Specified):
    """npy files; see `npy`. ``paths`` are (name, path), ``dtypes`` (name, dtype)."""

    paths: Pairs
    dtypes: Pairs
    found: Specs
    order: BatchOrder

    def table(self) -> ColumnTable:
        return ColumnTable({name: map_npy(path) for name, path in self.paths}, self.dtypes)

    def __str__(self) -> str:
        return f"the source npy {', '.join(path for _, path in self.paths)}"


@brief
def arrays(
    columns: Mapping[str, Any],
    batch: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    epochs: int | None = None,
    remainder: str = "drop",
) -> Source:
    """A source of arrays in memory: ``fr.data.arrays({"images": images, "labels": labels}, batch=32)``.

    Args:
        columns: Arrays by name, with a row for each example along the first axis. Where workers read, they travel to
            each of them once for each iteration; what is large is better read from files. They may not change later.
        batch: The rows of a batch.
        shuffle: Whether each epoch is in an order of its own, that ``seed`` and its number tell.
        seed: From 0 on.
        epochs: How often each row is used; None for no end.
        remainder: What becomes of an epoch's last rows if they make no whole batch: ``"drop"``, or a ``"short"`` one.

    Raises `GraphError`, at the line that calls it, for columns of different lengths, without rows or of a dtype that no
    tensor has, and for numbers that make no sense.
    """
    if not isinstance(columns, Mapping):
        raise GraphError(f"{user_site()}: arrays takes {{name: array}}, not {type(columns).__name__}")
    what = "a source of arrays"
    try:
        found = {name: np.asarray(unmasked(array)) for name, array in columns.items()}
    except SpecError as error:
        raise GraphError(f"{user_site()}: {what}: {error}") from None
    _, specs, order = _checked(what, found, None, batch, shuffle, seed, epochs, remainder)
    plain = tuple((name, np.ascontiguousarray(found[name], spec.dtype)) for name, spec in specs)
    return Arrays(plain, order)


@brief
def npz(
    path: Path,
    batch: int,
    *,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    dtypes: Mapping[str, Any] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    epochs: int | None = None,
    remainder: str = "drop",
) -> Source:
    """A source of the arrays in an npz file, as `numpy.savez` writes it: ``fr.data.npz("digits.npz", batch=32)``.

    Members are mapped where they lie in the file, so only the rows of a batch are read. What `numpy.savez_compressed`
    has compressed is loaded whole when the file is opened, once on each node that reads. ``path`` is of this machine
    and of the workers'; a relative one begins at this process's directory.

    Args:
        path: The file.
        batch: The rows of a batch.
        columns: The members to read, or ``{name: member}``; all by default.
        dtypes: What to convert arrays to, by name: ``{"images": "float32"}``.
        shuffle: See `arrays`, as for the rest.
        seed: See `arrays`.
        epochs: See `arrays`.
        remainder: See `arrays`.

    Raises `GraphError` as `arrays` does, and for a file that cannot be read or a member that it does not have.
    """
    place = os.path.abspath(path_of(path, "an npz file"))
    what = f"npz {place}"
    members = chosen(what, read(what, lambda: members_of(place)), columns)
    found = read(what, lambda: {name: map_member(place, member) for name, member in members.items()})
    return Npz(place, tuple(members.items()), *_checked(what, found, dtypes, batch, shuffle, seed, epochs, remainder))


@brief
def npy(
    paths: Mapping[str, Path],
    batch: int,
    *,
    dtypes: Mapping[str, Any] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    epochs: int | None = None,
    remainder: str = "drop",
) -> Source:
    """A source of arrays in npy files: ``fr.data.npy({"images": "images.npy", "labels": "labels.npy"}, batch=32)``.

    The files are mapped, so only the rows of a batch are read. For the rest see `npz`.
    """
    if not isinstance(paths, Mapping):
        raise GraphError(f"{user_site()}: npy takes {{name: path}}, not {paths!r}")
    places = {name: os.path.abspath(path_of(path, "an npy file")) for name, path in paths.items()}
    what = f"npy {', '.join(places.values())}"
    found = read(what, lambda: {name: map_npy(place) for name, place in places.items()})
    return Npy(tuple(places.items()), *_checked(what, found, dtypes, batch, shuffle, seed, epochs, remainder))


def _checked(
    what: str, columns: Mapping[str, Array], dtypes: Mapping[str, Any] | None, *asked: Any
) -> tuple[Pairs, Specs, BatchOrder]:
    """To which dtypes columns are converted, the specs of their batches, and the order that is ``asked`` for."""
    casts = converted(what, list(columns), dtypes)
    rows, specs = checked_columns(what, columns, casts)
    return casts, specs, checked_order(what, rows, *asked)
