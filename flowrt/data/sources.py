"""What a source of batches is: frozen plain data, of which any node can make any batch again.

Law: a source holds no file and no thread. `Source.open` answers what does, a `Reading`, and who opens closes. What a
batch holds follows from the source and the batch's identity alone, so it does not matter who reads it, when, or how
often.

A new source is a subclass that is a frozen dataclass of plain values and arrays, with `table`. It is known by the name
of its class wherever its module was imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import count
from typing import Any, Self, TypeAlias

import numpy as np

from flowrt.base.errors import ClosedError, FeedError, GraphError, how_to_bring
from flowrt.base.spec import Spec
from flowrt.data.order import BatchOrder, Rows

Array: TypeAlias = "np.ndarray[Any, Any]"
Batch: TypeAlias = "dict[str, Array]"
Specs: TypeAlias = tuple[tuple[str, Spec], ...]
NAME = "class"  # what the name of the class stands under in the plain form, beside the fields
KNOWN: dict[str, type[Source]] = {}


class Table:
    """Rows that can be taken in any order. ``rows`` is how many there are, None for endless; ``specs`` are of a batch.

    ``specs`` is empty where only reading tells.
    """

    rows: int | None
    specs: Mapping[str, Spec]

    def take(self, rows: Rows, identity: int) -> Batch:
        """These rows of each column, in this order, as arrays of their own; ``identity`` is the batch's."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what is open. Closing twice is closing once."""


class Source:
    """Batches ``{name: array}`` by their identities: a frozen value, made by the functions of `fr.data`.

    It may be given to `Replicated.steps`, whose workers then read it themselves, and iterated over, which reads here.
    ``order`` says which rows make which batch.
    """

    __slots__ = ()
    order: BatchOrder

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        KNOWN[cls.__qualname__] = cls

    @property
    def specs(self) -> Mapping[str, Spec]:
        """The specs of a batch, by name; the first axis is None. Empty where only reading tells."""
        raise NotImplementedError

    def table(self) -> Table:
        """Open what the rows are in."""
        raise NotImplementedError

    @property
    def batches_per_epoch(self) -> int | None:
        """How many batches an epoch has; None where it has no end."""
        return self.order.per_epoch

    @property
    def total(self) -> int | None:
        """How many batches there are; None where they have no end."""
        return self.order.total

    def open(self) -> Reading:
        """Open the source to read batches: ``with source.open() as reading: reading.batch(7)``.

        Raises `FeedError` where what is there is not what the source was made of, `OSError` where nothing is.
        """
        return Reading(self)

    def batch(self, identity: int) -> Batch:
        """The batch of that identity, from 0 on. Opens the source for it; `open` is for many."""
        with self.open() as reading:
            return reading.batch(identity)

    def __iter__(self) -> Iterator[Batch]:
        """All batches in order, read as they are asked for."""
        with self.open() as reading:
            for identity in count() if self.total is None else range(self.total):
                yield reading.batch(identity)


class Specified(Source):
    """A source that holds the specs of a batch, as they were ``found`` when it was made."""

    __slots__ = ()
    found: Specs

    @property
    def specs(self) -> Mapping[str, Spec]:
        return dict(self.found)


class Reading:
    """A source that is open, for one thread at a time or several: `batch` changes nothing. Who opened it closes it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._closed = False
        self._table = source.table()
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def batch(self, identity: int) -> Batch:
        """The batch of that identity. Raises `ClosedError` once this is closed."""
        if self._closed:
            raise ClosedError(f"{self.source} was closed here; open it again")
        return self._table.take(self.source.order.rows_of(identity), identity)

    def close(self) -> None:
        """Close what is open. Closing twice is closing once."""
        self._closed = True
        self._table.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self) -> None:
        """Raise `FeedError` where the table is another one than the source was made of."""
        source, table = self.source, self._table
        made, found = (source.order.rows, source.specs), (table.rows, dict(table.specs))
        if made != found:
            raise FeedError(f"{source} was made of {_described(*made)}; here it has {_described(*found)}")


def source_to_data(source: Source) -> dict[str, Any]:
    """``source`` as it travels: the name of its class, and its fields."""
    made: Any = source
    return {
        NAME: type(source).__qualname__,
        **{field.name: _to_data(getattr(made, field.name)) for field in fields(made)},
    }


def source_from_data(data: Mapping[str, Any]) -> Source:
    """The source that `source_to_data` wrote; raises `GraphError` where its class is not known here."""
    name = data[NAME]
    if name not in KNOWN:
        raise GraphError(f"a source named {name} is not known here; {how_to_bring('it')}")
    kind: Any = KNOWN[name]
    given = {field: _from_data(value) for field, value in data.items() if field != NAME}
    try:
        made: Source = kind(**given)
    except TypeError as error:
        raise GraphError(f"{name} is another source here than where it was made: {error}") from error
    return made


def _to_data(value: Any) -> Any:
    match value:
        case Source():
            return {"source": source_to_data(value)}
        case BatchOrder():
            return {"order": tuple(getattr(value, field.name) for field in fields(value))}
        case Spec():
            return {"spec": (value.dtype.name, value.dims)}
        case tuple():
            return tuple(_to_data(item) for item in value)
        case _:
            return value


def _from_data(value: Any) -> Any:
    match value:
        case {"source": parts}:
            return source_from_data(parts)
        case {"order": parts}:
            return BatchOrder(*parts)
        case {"spec": parts}:
            return Spec(*parts)
        case tuple():
            return tuple(_from_data(item) for item in value)
        case _:
            return value


def _described(rows: int | None, specs: Mapping[str, Spec]) -> str:
    columns = ", ".join(f"{name} {spec}" for name, spec in specs.items())
    return f"{'endless' if rows is None else rows} rows" + (f" of {columns}" if columns else "")
