"""Indices that name nothing, the least of each dtype among them: out of range whoever reads them, as in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.ops import entries

CUBE = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
TABLE = np.arange(12, dtype=np.float32).reshape(4, 3)
READERS: dict[str, Callable[[Any], Any]] = {
    "one": lambda t: fr.constant(CUBE)[t] if hasattr(t, "builder") else fr.take(CUBE, t),
    "rows": lambda t: fr.take(CUBE, fr.stack([t, t])),
    "columns": lambda t: fr.take(CUBE, fr.stack([t]), axis=1),
    "entries": lambda t: fr.take(TABLE, fr.stack([t, t, t]), axis=-1),
    "entries of each line": lambda t: fr.take_along_axis(TABLE, fr.stack([fr.stack([t])] * 4), axis=1),
    "columns of each line": lambda t: fr.take_along_axis(TABLE, fr.stack([fr.stack([t, t, t])]), axis=0),
    "sums of entries": lambda t: entries.add_along_axis(TABLE[:, :1], fr.stack([fr.stack([t])] * 4), (4, 3), 1),
    "sums of columns": lambda t: entries.add_along_axis(TABLE[:1], fr.stack([fr.stack([t, t, t])]), (4, 3), 0),
    "entries of axes": lambda t: fr.gather_nd(TABLE, fr.stack([fr.stack([t, t])])),
    "sums of axes": lambda t: fr.scatter_nd(fr.stack([fr.stack([t, t])]), np.float32([1]), (4, 3)),
    "embedding": lambda t: fr.nn.embedding_lookup(TABLE, fr.stack([t])),
    "shards": lambda t: fr.nn.embedding_lookup([TABLE, TABLE], fr.stack([t])),
    "bag": lambda t: fr.mean(fr.take(TABLE, fr.stack([fr.stack([t, t]), fr.stack([t, t])])), axis=1),
    "sum of rows": lambda t: fr.scatter_add(TABLE[:1], fr.stack([t]), (4, 3)),
    "segments": lambda t: fr.segment_sum(TABLE[:2], fr.stack([t, t]), 4),
    "slices": lambda t: fr.IndexedSlices(TABLE[:1], fr.stack([t]), (4, 3)) + 0.0,
}
FAR = [np.iinfo(kind).min for kind in ("int8", "int16", "int32", "int64")]
FAR += [np.iinfo(kind).max for kind in ("int64", "uint64")] + [1 << 63]


def as_index(number: int, dtype: str = "") -> Any:
    return np.array(number, dtype or ("uint64" if number >= 1 << 63 else "int64"))


@pytest.mark.parametrize("reader", READERS)
def test_an_index_that_names_nothing_fails_at_once_and_in_steps(reader: str) -> None:
    for kind in ("int64", "uint64"):
        with fr.Graph() as graph:
            t = fr.placeholder(kind, ())
            found = READERS[reader](t)
        for options in (fr.Options(optimize=False, tapes=False, threads=1), fr.Options()):
            with fr.BlockingSession(graph, options=options) as session:
                session.run(found, {t: as_index(1, kind)})
                for far in (number for number in FAR if as_index(number).dtype == kind):
                    with pytest.raises(fr.FlowrtError, match="an index is out of range"):
                        session.run(found, {t: as_index(far)})
    for far in FAR:
        with pytest.raises(fr.FlowrtError, match="an index is out of range"):
            READERS[reader](as_index(far))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_the_least_index_of_a_dtype_is_out_of_range(dtype: str) -> None:
    least = np.iinfo(dtype).min
    with pytest.raises(fr.FlowrtError, match=rf"an index is out of range: {least} at position \(1,\)"):
        fr.take(TABLE, np.array([0, least], dtype))


def test_a_gradient_by_an_index_that_names_nothing_moves_nothing() -> None:
    with fr.Graph() as graph:
        v, t = fr.Variable(TABLE, name="v"), fr.placeholder("int64", (2,))
        moved = fr.optim.Adam(0.1).apply_gradients([(fr.IndexedSlices(TABLE[:2], t, (4, 3)), v)])
        clipped = fr.optim.clip_by_global_norm([fr.IndexedSlices(TABLE[:2], t, (4, 3))], 1.0)[1]
    with fr.BlockingSession(graph) as session:
        for fetch in (moved, clipped):
            with pytest.raises(fr.FlowrtError, match="an index is out of range"):
                session.run(fetch, {t: [0, np.iinfo("int64").min]})
        np.testing.assert_array_equal(session.run(v), TABLE)
