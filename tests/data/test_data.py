"""Sources of batches: which rows a batch has, here and anywhere; what files give; what is said of bad ones."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base import codec
from flowrt.data.order import BatchOrder
from flowrt.data.permutation import permuted
from flowrt.data.sources import source_from_data, source_to_data

IMAGES = np.arange(240, dtype=np.float32).reshape(60, 4)
LABELS = np.arange(60, dtype=np.int32)
COLUMNS = {"images": IMAGES, "labels": LABELS}


def labels_of(source: fr.data.Source, *identities: int) -> list[int]:
    return [int(label) for identity in identities for label in source.batch(identity)["labels"]]


# ── which rows ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [*range(1, 20), 97, 1797])
def test_a_permutation_sends_every_place_to_another(count: int) -> None:
    assert sorted(permuted(np.arange(count), count, 3, 1)) == list(range(count))


def test_a_permutation_needs_no_more_than_the_places_that_are_asked_for() -> None:
    some = permuted([5, 999_999_999_999], 10**12, 7, 2)
    assert len(set(some)) == 2
    assert all(0 <= row < 10**12 for row in some)


def test_permutations_are_these_on_every_machine() -> None:
    assert permuted(range(10), 10, 0, 0).tolist() == [9, 1, 6, 7, 4, 2, 5, 0, 3, 8]
    assert permuted(range(3), 10**9, 1, 2).tolist() == [416671019, 645154902, 201035760]


@pytest.mark.parametrize("count", [3, 4, 5])
def test_all_orders_of_few_rows_are_alike_likely(count: int) -> None:
    seen = Counter(tuple(permuted(range(count), count, 7, epoch)) for epoch in range(6000))
    orders = list(itertools.permutations(range(count)))
    expected = 6000 / len(orders)
    spread = sum((seen[order] - expected) ** 2 / expected for order in orders) / (len(orders) - 1)
    assert spread < 2.0


@pytest.mark.parametrize("rows", [60, 70_000])
@pytest.mark.parametrize("blocks", [1, 7])
def test_an_epoch_has_every_row_once_and_the_next_one_in_another_order(rows: int, blocks: int) -> None:
    sizes = tuple(map(len, np.array_split(np.arange(rows), blocks))) if blocks > 1 else ()
    order = BatchOrder(rows, 32, True, 5, 2, True, sizes, 2)
    epochs = [[int(r) for i in ids for r in order.rows_of(i)] for ids in np.split(np.arange(order.total or 0), 2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(rows))
    assert epochs[0] != epochs[1] != list(range(rows))


def test_rows_in_blocks_come_from_a_few_blocks_at_a_time() -> None:
    order = BatchOrder(1000, 10, True, 1, 1, False, (50,) * 20, 4)
    seen = set()
    for first in range(0, 100, 20):
        rows = np.concatenate([order.rows_of(identity) for identity in range(first, first + 20)])
        assert len(set(rows // 50)) == 4
        seen.add(tuple(rows % 50))
    assert len(seen) == 5  # each time in an order of its own
    assert len(set(order.rows_of(0) // 50)) > 1


def test_a_batch_is_told_by_its_identity_alone() -> None:
    source = fr.data.arrays(COLUMNS, batch=8, seed=3)
    assert labels_of(source, 9) == labels_of(fr.data.arrays(COLUMNS, batch=8, seed=3), 9)
    assert labels_of(source, 9) != labels_of(fr.data.arrays(COLUMNS, batch=8, seed=4), 9)
    assert source.total is None
    assert source.batches_per_epoch == 7
    assert dict(source.specs) == {"images": fr.Spec("float32", (None, 4)), "labels": fr.Spec("int32", (None,))}


def test_what_is_left_of_an_epoch_is_dropped_or_short() -> None:
    dropped = fr.data.arrays(COLUMNS, batch=8, epochs=2)
    short = fr.data.arrays(COLUMNS, batch=8, epochs=2, remainder="short", shuffle=False)
    assert [len(batch["labels"]) for batch in dropped] == [8] * 14
    assert [len(batch["labels"]) for batch in short] == [*[8] * 7, 4] * 2
    assert labels_of(short, 7, 8) == [56, 57, 58, 59, *range(8)]
    with pytest.raises(IndexError, match="0 to 13, not 14"):
        dropped.batch(14)


def test_images_and_labels_stay_together() -> None:
    for batch in fr.data.arrays(COLUMNS, batch=16, epochs=1):
        assert np.array_equal(batch["images"], IMAGES[batch["labels"]])


def test_arrays_of_any_layout_travel_as_tensors_are() -> None:
    odd = {"images": np.asfortranarray(IMAGES)[::2], "labels": LABELS.astype(">i4")[::2]}
    source = source_from_data(codec.unpack(codec.pack(source_to_data(fr.data.arrays(odd, batch=8, shuffle=False)))))
    assert np.array_equal(source.batch(1)["images"], IMAGES[16:32:2])
    assert source.batch(1)["labels"].dtype == np.int32


async def test_a_source_fills_a_queue() -> None:
    with fr.Graph() as graph:
        queue = fr.FIFOQueue(4, ["float32", "int32"], [(8, 4), (8,)])
        taken = queue.dequeue()
    found = []
    source = fr.data.arrays(COLUMNS, batch=8, epochs=1)
    async with fr.Session(graph) as session, session.producing(queue, source):
        for _ in range(source.total or 0):
            images, labels = await session.run(taken)
            assert np.array_equal(images, IMAGES[labels])
            found.append(labels)
    assert np.array_equal(np.concatenate(found), labels_of(source, *range(7)))


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def in_file(kind: str, folder: Path, **more: Any) -> fr.data.Source:
    match kind:
        case "npz":
            np.savez(folder / "some.npz", **COLUMNS)
            return fr.data.npz(folder / "some.npz", batch=8, **more)
        case "compressed":
            np.savez_compressed(folder / "some.npz", **COLUMNS)
            return fr.data.npz(folder / "some.npz", batch=8, **more)
        case "npy":
            np.save(folder / "images.npy", np.asfortranarray(IMAGES))
            np.save(folder / "labels.npy", LABELS.astype(">i4"))
            return fr.data.npy({"images": folder / "images.npy", "labels": folder / "labels.npy"}, batch=8, **more)
        case _:
            import pyarrow.parquet as parquet

            images = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(IMAGES.reshape(-1)), 4)
            table = pyarrow.table({"images": images, "labels": LABELS})
            parquet.write_table(table[:32], folder / "a.parquet", row_group_size=10)
            parquet.write_table(table[32:], folder / "b.parquet", row_group_size=7)
            return fr.data.parquet([folder / "a.parquet", folder / "b.parquet"], batch=8, mix=2, **more)


pyarrow = pytest.importorskip("pyarrow")
KINDS = ["npz", "compressed", "npy", "parquet"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_gives_what_was_saved_in_it(kind: str, tmp_path: Path) -> None:
    plain = in_file(kind, tmp_path, shuffle=False, epochs=1, remainder="short")
    found = list(plain)
    assert np.array_equal(np.concatenate([batch["images"] for batch in found]), IMAGES)
    assert np.array_equal(np.concatenate([batch["labels"] for batch in found]), LABELS)
    for batch in in_file(kind, tmp_path, seed=2, epochs=1):
        assert np.array_equal(batch["images"], IMAGES[batch["labels"]])
        assert all(array.dtype.isnative and array.flags.c_contiguous for array in batch.values())


@pytest.mark.parametrize("kind", ["arrays", *KINDS])
def test_a_source_travels_as_plain_data(kind: str, tmp_path: Path) -> None:
    source = (
        fr.data.arrays(COLUMNS, batch=8) if kind == "arrays" else in_file(kind, tmp_path, dtypes={"labels": "int64"})
    )
    made = source_from_data(codec.unpack(codec.pack(source_to_data(source))))
    assert made == source
    assert labels_of(made, 4, 11) == labels_of(source, 4, 11)
    assert made.batch(4)["labels"].dtype == source.specs["labels"].dtype


def test_columns_are_chosen_renamed_and_converted(tmp_path: Path) -> None:
    source = in_file("npz", tmp_path, columns={"x": "images"}, dtypes={"x": "float64"})
    assert dict(source.specs) == {"x": fr.Spec("float64", (None, 4))}
    assert source.batch(0)["x"].dtype == np.float64


def test_members_of_an_npz_are_mapped_where_they_lie(tmp_path: Path) -> None:
    from flowrt.data.mapping import map_member

    in_file("npz", tmp_path)
    base = map_member(str(tmp_path / "some.npz"), "images")
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)


@pytest.mark.parametrize(("kind", "name"), [("npz", "some.npz"), ("npy", "images.npy")])
def test_a_file_that_is_cut_short_is_told_before_and_while_it_is_read(kind: str, name: str, tmp_path: Path) -> None:
    source, path = in_file(kind, tmp_path, shuffle=False), tmp_path / name
    with source.open() as reading:
        whole = reading.batch(0)
        os.truncate(path, 200)
        with pytest.raises(fr.FeedError, match=rf"{name} has 200 bytes, and had \d+ at least when it was opened"):
            reading.batch(0)
    with pytest.raises(ValueError, match=rf"{name} (was cut short: it has 200 bytes|is no npz file, or not whole)"):
        source.open()
    assert np.array_equal(whole["images"], IMAGES[:8])


@pytest.mark.parametrize(
    ("packed", "at"),
    [(True, 35), (True, 300), (False, 120)],
    ids=["member", "packed bytes", "header of an array"],
)
def test_an_archive_with_a_damaged_byte_is_refused_by_its_name(packed: bool, at: int, tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    (np.savez_compressed if packed else np.savez)(path, images=IMAGES)
    content = bytearray(path.read_bytes())
    content[at : at + 4] = bytes(4)
    path.write_bytes(content)
    with pytest.raises(fr.GraphError, match=r"cannot read npz .*some\.npz"):
        fr.data.npz(path, batch=8)


@pytest.mark.parametrize(
    ("at", "value", "told"),
    [(8, 1, "is encrypted, which is not read$"), (10, 97, "compression method is not supported")],
)
def test_an_archive_that_is_not_read_is_not_called_damaged(at: int, value: int, told: str, tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    np.savez(path, images=IMAGES)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\1\2") + at] = value  # a byte of what is told of the member
    path.write_bytes(content)
    with pytest.raises(fr.GraphError, match=told) as error:
        fr.data.npz(path, batch=8)
    assert "damaged" not in str(error.value)


def test_a_source_that_is_read_leaves_no_file_open(tmp_path: Path) -> None:
    source = in_file("npz", tmp_path)
    with source.open() as reading:
        reading.batch(3)
    with pytest.raises(fr.ClosedError, match="open it again"):
        reading.batch(3)
    for maps in Path("/proc/self").glob("maps"):
        assert "some.npz" not in maps.read_text()


def test_another_file_than_the_source_was_made_of_is_refused(tmp_path: Path) -> None:
    source = in_file("npz", tmp_path)
    np.savez(tmp_path / "some.npz", images=IMAGES[:50], labels=LABELS[:50])
    with pytest.raises(fr.FeedError, match=r"was made of 60 rows of .*; here it has 50 rows"):
        source.batch(0)


# ── functions ────────────────────────────────────────────────────────────────────────────────────────────────────────


@fr.data.source
def noisy(rows: Any, rng: Any, scale: float) -> dict[str, Any]:
    return {"rows": rows, "noise": scale * rng.normal(size=len(rows))}


def test_a_function_answers_from_rows_and_a_generator_of_the_batch() -> None:
    source = fr.data.function(noisy, rows=10, batch=4, scale=0.0, epochs=1)
    assert sorted(int(row) for batch in source for row in batch["rows"]) != sorted(range(10)), "two rows are dropped"
    loud = fr.data.function(noisy, rows=None, batch=4, scale=2.0)
    assert loud.batch(3)["rows"].tolist() == [12, 13, 14, 15]
    assert np.array_equal(loud.batch(3)["noise"], loud.batch(3)["noise"])
    assert not np.array_equal(loud.batch(3)["noise"], loud.batch(2)["noise"])
    assert (loud.total, loud.batches_per_epoch) == (None, None)


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: fr.data.arrays({"a": IMAGES, "b": LABELS[:7]}, batch=8), "'a' has 60, 'b' has 7"),
        (lambda: fr.data.arrays({"a": IMAGES[:0]}, batch=8), "is empty"),
        (lambda: fr.data.arrays({}, batch=8), "has no columns"),
        (lambda: fr.data.arrays(COLUMNS, batch=0), "batch is a number of rows, 1 or more, not 0"),
        (lambda: fr.data.arrays(COLUMNS, batch=61), "remainder='short'"),
        (lambda: fr.data.arrays(COLUMNS, batch=8, seed=-1), "seed is"),
        (lambda: fr.data.arrays(COLUMNS, batch=8, epochs=0), "epochs is"),
        (lambda: fr.data.arrays(COLUMNS, batch=8, remainder="keep"), "'drop' or 'short', not 'keep'"),
        (lambda: fr.data.arrays({"a": np.array(["x"])}, batch=1), "<U1"),
        (
            lambda: fr.data.arrays({"a": np.ma.array([1.0, 2.0], mask=[1, 0])}, batch=1),
            "entries of the array are masked",
        ),
        (lambda: fr.data.npz("absent.npz", batch=8), "absent.npz"),
        (lambda: fr.data.npz(__file__, batch=8), "no npz file"),
        (lambda: fr.data.npy({"a": "absent.npy"}, batch=8), "absent.npy"),
        (lambda: fr.data.npy({"a": __file__}, batch=8), "magic"),
        (lambda: fr.data.parquet("absent.parquet", batch=8), "absent.parquet"),
        (lambda: fr.data.parquet([], batch=8), "takes a path"),
        (lambda: fr.data.function(len, rows=9, batch=8), "@fr.data.source"),
        (lambda: fr.data.function(noisy, rows=9, batch=8, size=1), "scale"),
    ],
)
def test_what_makes_no_sense_is_said_where_the_source_is_made(made: Any, says: str) -> None:
    with pytest.raises(fr.GraphError) as caught:
        made()
    assert says in str(caught.value)
    assert Path(__file__).name in str(caught.value)


def test_a_missing_member_or_column_is_named_beside_those_there_are(tmp_path: Path) -> None:
    for kind in ("npz", "parquet"):
        with pytest.raises(fr.GraphError, match=r"has no 'label'; it has images, labels"):
            in_file(kind, tmp_path, columns=["images", "label"])


def test_a_column_that_a_later_parquet_file_lacks_is_told_when_the_source_is_made(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    first, second = tmp_path / "first.parquet", tmp_path / "second.parquet"
    parquet.write_table(pyarrow.table({"x": [1.0], "y": [2.0]}), first)
    parquet.write_table(pyarrow.table({"x": [1.0], "z": [2.0]}), second)
    with pytest.raises(fr.GraphError, match=r"second.parquet has no 'y'; it has x, z"):
        fr.data.parquet([first, second], batch=1)
    assert fr.data.parquet([first, second], batch=2, columns=["x"], shuffle=False).batch(0)["x"].tolist() == [1, 1]


def test_nulls_in_a_parquet_file_are_refused(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table({"x": [1.0, None]}), tmp_path / "x.parquet")
    with pytest.raises(fr.GraphError, match=r"'x' has 1 nulls"):
        fr.data.parquet(tmp_path / "x.parquet", batch=1)
