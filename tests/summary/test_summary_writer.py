"""Event files: what is written is what TensorBoard's own reader finds, whatever is told, and whatever happens."""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from board_world import Board, counts, files_in, records
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from places import ROOT
from programs import python
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

import flowrt as fr
from flowrt.summary.event_file import framed
from flowrt.summary.events import bucketed

if TYPE_CHECKING:
    from pathlib import Path

# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_scalars_are_read_as_they_were_told(tmp_path: Path) -> None:
    told = {1: 0.5, 2: 2.0**-149, 3: -(2.0**100), 4: np.inf, 5: -np.inf, 10**12: 2.0**24}
    with fr.summary.Writer(tmp_path) as writer:
        for step, value in told.items():
            writer.scalar("loss", value, step)
    board = Board(tmp_path)
    assert board.scalars("loss") == told
    assert board.plugin("loss") == "scalars"


def test_scalars_are_float32_and_infinite_beyond_it(tmp_path: Path) -> None:
    with fr.summary.Writer(tmp_path) as writer:
        for step, value in enumerate([1 / 3, 1e300, -1e39, 1e-300]):
            writer.scalar("loss", value, step)
    assert Board(tmp_path).scalars("loss") == {0: float(np.float32(1 / 3)), 1: np.inf, 2: -np.inf, 3: 0}


@pytest.mark.parametrize(
    "value", [3, True, np.float16(3), np.uint8(3), np.int64(3), np.longdouble(3), np.array(3), np.array([[3.0]])]
)
def test_a_scalar_may_be_any_one_number(value: Any, tmp_path: Path) -> None:
    with fr.summary.Writer(tmp_path) as writer:
        writer.scalar("loss", value, np.int32(4))
    assert Board(tmp_path).scalars("loss") == {4: float(np.max(value))}


def test_nan_is_a_scalar(tmp_path: Path) -> None:
    with fr.summary.Writer(tmp_path) as writer:
        writer.scalars({"loss": float("nan"), "rate": 0.1}, 1)
    assert np.isnan(Board(tmp_path).scalars("loss")[1])


@pytest.mark.parametrize("name", ["a/b/c", "Verlust/größe", "损失", "a b:c=d?e&f", "emoji 🙂", "%s %d", "x" * 5000])
def test_names_are_kept_to_the_letter(name: str, tmp_path: Path) -> None:
    with fr.summary.Writer(tmp_path) as writer:
        writer.scalar(name, 1.0, 0)
        writer.text(name + "/text", name)
    board = Board(tmp_path)
    assert board.names == [name, name + "/text"]
    assert board.text(name + "/text") == {0: name}


def test_a_histogram_has_all_values_between_its_ends(tmp_path: Path) -> None:
    values = np.random.default_rng(3).normal(size=(100, 70)).astype(np.float32)
    with fr.summary.Writer(tmp_path) as writer:
        writer.histogram("w", values, 1)
        writer.histogram("w", values, 2, buckets=7)
    board = Board(tmp_path)
    wide, narrow = board.values("w").values()
    assert (wide.shape, narrow.shape, board.plugin("w")) == ((30, 3), (7, 3), "histograms")
    expected, bounds = np.histogram(values.astype(np.float64), 7)
    np.testing.assert_array_equal(narrow[:, 2], expected)
    np.testing.assert_allclose(narrow[:, :2], np.stack([bounds[:-1], bounds[1:]], 1), rtol=1e-12)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.zeros((0, 3)), [0, 0, 0]),
        (np.array(4.5), [0, 0, 1]),
        (np.full(5, -2, np.int8), [0, 0, 5]),
        (np.array([False, True, True]), [1, 0, 2]),
        (np.array([0, 1, 2], np.float16), [1, 1, 1]),
        (np.array([-65504, 65504], np.float16), [1, 0, 1]),
        (np.array([-3e38, 0, 3e38], np.float32), [1, 1, 1]),
        (np.array([-1.7e308, 0, 1.7e308]), [1, 1, 1]),
        (np.array([0, 5e-324, 1e-323]), [1, 1, 1]),
        (np.array([1.0, np.nextafter(1.0, 2)]), [1, 0, 1]),
        (np.array([0, 2**63, 2**64 - 1], np.uint64), [1, 1, 1]),
        ([[1, 2], [3, 4]], [1, 1, 2]),
        (np.arange(24.0).reshape(2, 3, 4).T[:, ::2], [4, 8, 4]),
    ],
)
def test_histograms_of_odd_values_are_right(values: Any, expected: list[int], tmp_path: Path) -> None:
    with fr.summary.Writer(tmp_path) as writer:
        writer.histogram("w", values, 1, buckets=3)
    histogram = Board(tmp_path).values("w")[1]
    assert counts(histogram) == expected
    assert np.isfinite(histogram).all()
    if np.size(values):
        assert (histogram[0, 0], histogram[-1, 1]) == (float(np.min(values)), float(np.max(values)))


@given(st.lists(st.floats(width=64), max_size=50), st.integers(1, 40))
def test_no_value_is_lost_and_bounds_only_grow(values: list[float], buckets: int) -> None:
    array = np.array(values, np.float64)
    rows, left_out = bucketed(array, buckets)
    assert rows[:, 2].sum() + left_out == len(values)
    assert left_out == int((~np.isfinite(array)).sum())
    assert (np.diff(rows[:, 0]) >= 0).all()
    assert (rows[:-1, 1] == rows[1:, 0]).all()


def test_values_that_are_all_the_same_are_counted_without_those_that_are_left_out() -> None:
    rows, left_out = bucketed(np.array([2.0, np.nan, 2.0]), 3)
    assert rows.tolist() == [[2, 2, 0], [2, 2, 0], [2, 2, 2]]
    assert left_out == 1


def test_values_that_are_not_finite_are_left_out_and_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fr.summary.Writer(tmp_path) as writer:
        for step in range(3):
            writer.histogram("w", [1.0, np.nan, 3.0, np.inf], step, buckets=2)
        writer.histogram("all", [np.nan], 0)
    board = Board(tmp_path)
    assert counts(board.values("w")[2]) == [1, 1]
    assert board.names == ["w"]
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 4 values are not finite, and not in the histogram 'w'",
        "1 of 1 values are not finite, and not in the histogram 'all'",
    ]


def test_a_large_histogram_is_counted_in_pieces(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random(3_000_001, np.float32)
    rows, _ = bucketed(values, 10)
    np.testing.assert_array_equal(rows[:, 2], np.histogram(values.astype(np.float64), 10)[0])


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images_are_read_pixel_by_pixel(channels: int, tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (5, 6, 9, channels), np.uint8)
    with fr.summary.Writer(tmp_path) as writer:
        writer.image("x", pixels, 1, most=2)
        writer.image("one", pixels[3], 1)
    board = Board(tmp_path)
    width, height, *files = board.values("x")[1]
    assert (width, height, len(files), board.plugin("x")) == (b"9", b"6", 2, "images")
    for file, expected in zip(files, pixels, strict=False):
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(file))).reshape(expected.shape), expected)
    (file,) = board.values("one")[1][2:]
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(file))).reshape(pixels[3].shape), pixels[3])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_of_images_are_shades_from_0_to_1(dtype: Any, tmp_path: Path) -> None:
    pixels = np.array([[0, 0.5, 1], [-3, np.nan, np.inf]], dtype)
    with fr.summary.Writer(tmp_path) as writer:
        writer.image("x", pixels, 1)
    shown = np.asarray(Image.open(io.BytesIO(Board(tmp_path).values("x")[1][2])))
    np.testing.assert_array_equal(shown, [[0, 128, 255], [0, 0, 255]])


@pytest.mark.parametrize("shape", [(0, 4, 4, 3), (2, 0, 4, 1), (0, 5)])
def test_images_without_pixels_are_left_out(shape: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fr.summary.Writer(tmp_path) as writer:
        writer.image("x", np.zeros(shape), 1)
        writer.scalar("loss", 1, 1)
    assert Board(tmp_path).names == ["loss"]
    assert "has no pixels; 'x' is left out" in caplog.text


def test_an_array_is_what_it_was_when_it_was_told(tmp_path: Path) -> None:
    values = np.zeros(4)
    with fr.summary.Writer(tmp_path, flush_seconds=60) as writer:
        writer.histogram("w", values, 1, buckets=1)
        values += 7
    assert Board(tmp_path).values("w")[1].tolist() == [[0, 0, 4]]


def test_hyperparameters_are_numbers_texts_and_what_is_neither_as_text(tmp_path: Path) -> None:
    with fr.summary.Writer(tmp_path) as writer:
        writer.hyperparameters({"rate": np.float32(0.5), "layers": (3, 4), "nesterov": True, "name": "x", "none": None})
    metadata = Board(tmp_path).reader.SummaryMetadata("_hparams_/session_start_info")
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

    told = parse_session_start_info_plugin_data(metadata.plugin_data.content).hparams
    found = {name: getattr(value, value.WhichOneof("kind")) for name, value in told.items()}
    assert found == {"rate": 0.5, "layers": "(3, 4)", "nesterov": True, "name": "x", "none": "None"}


@pytest.mark.parametrize(
    ("tell", "error", "words"),
    [
        (lambda w: w.scalar("x", [1, 2], 0), fr.FeedError, "is one number, not [2] of them"),
        (lambda w: w.scalar("x", "one", 0), fr.FeedError, "real numbers, not 'one'"),
        (lambda w: w.scalar("x", 1j, 0), fr.FeedError, "real numbers"),
        (lambda w: w.scalar("x", None, 0), fr.FeedError, "real numbers, not None"),
        (lambda w: w.scalar("", 1, 0), fr.GraphError, "has a name"),
        (lambda w: w.scalar(3, 1, 0), fr.GraphError, "name is a str"),
        (lambda w: w.scalar("\ud800", 1, 0), fr.GraphError, "whole characters"),
        (lambda w: w.scalar("x", 1, 0.5), fr.GraphError, "step is a whole number"),
        (lambda w: w.scalar("x", 1, 1 << 63), fr.GraphError, "step is a whole number"),
        (lambda w: w.scalar("x", 10**400, 0), fr.FeedError, "real numbers, not 1000"),
        (lambda w: w.scalars([1], 0), fr.GraphError, "are {name: value}"),
        (lambda w: w.image("x", [[1], [1, 2]], 0), fr.FeedError, "real numbers"),
        (lambda w: w.histogram("x", [1], 0, buckets=0), fr.GraphError, "buckets is a number from 1 to 65536"),
        (lambda w: w.histogram("x", [[1], [1, 2]], 0), fr.FeedError, "real numbers"),
        (lambda w: w.image("x", np.zeros((3, 8, 8)), 0), fr.FeedError, "channels come last"),
        (lambda w: w.image("x", np.zeros(3), 0), fr.FeedError, "[height, width]"),
        (lambda w: w.text("x", b"bytes"), fr.GraphError, "a text is a str"),
        (lambda w: w.hyperparameters(["rate"]), fr.GraphError, "are {name: value}"),
        (lambda w: w.graph(3), fr.GraphError, "takes an fr.Graph"),
        (lambda w: w.summaries({"loss": 3}, 0), fr.GraphError, "fr.summary.merged(graph)"),
        (lambda w: w.report(3), fr.GraphError, "a report of trainer.steps"),
    ],
)
def test_what_cannot_be_told_is_refused_at_the_programs_line(
    tell: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    with fr.summary.Writer(tmp_path) as writer:
        with pytest.raises(error) as raised:
            tell(writer)
        assert words in str(raised.value)
        assert "test_summary_writer.py" in str(raised.value)
    assert Board(tmp_path).names == []


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.binary(max_size=300))
def test_records_are_those_of_tensorboards_own_writer(content: bytes) -> None:
    theirs = io.BytesIO()
    RecordWriter(theirs).write(content)
    assert framed(content) == theirs.getvalue()


def test_checksums_are_tensorboards(tmp_path: Path) -> None:
    content = bytes(range(256)) * 41
    assert framed(content)[-4:] == masked_crc32c(content).to_bytes(4, "little")


def test_what_was_flushed_is_read_while_the_writer_is_open(tmp_path: Path) -> None:
    with fr.summary.Writer(tmp_path, flush_seconds=60) as writer:
        for step in range(3):
            writer.scalar("loss", step, step)
            writer.flush()
            assert list(Board(tmp_path).scalars("loss")) == list(range(step + 1))
        assert writer.path in repr(writer)


@pytest.mark.asyncio
async def test_a_writer_is_awaited_where_a_loop_runs(tmp_path: Path) -> None:
    async with fr.summary.Writer(tmp_path, flush_seconds=60) as writer:
        writer.scalar("loss", 1, 1)
        await asyncio.gather(writer.aflush(), writer.aflush())
        assert Board(tmp_path).scalars("loss") == {1: 1}
        writer.scalar("loss", 2, 2)
    assert Board(tmp_path).scalars("loss") == {1: 1, 2: 2}
    await writer.aclose()
    with pytest.raises(fr.ClosedError, match="the writer is closed"):
        await writer.aflush()


def test_a_closed_writer_says_so_and_closes_once(tmp_path: Path) -> None:
    writer = fr.summary.Writer(tmp_path)
    writer.close()
    writer.close()
    for use in (lambda: writer.scalar("x", 1, 1), writer.flush, writer.__enter__):
        with pytest.raises(fr.ClosedError, match=r"test_summary_writer.py:\d+: the writer is closed"):
            use()
    assert "closed" in repr(writer)
    assert "flowrt-summaries" not in [thread.name for thread in threading.enumerate()]


class ClosesFirst:
    """A lock that the thread which ends the writer has before anybody else."""

    def __init__(self, file: Any) -> None:
        self._file, self._lock = file, file._lock

    def __enter__(self) -> None:
        self._file._lock = self._lock
        self._file.close()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_what_is_told_while_another_thread_closes_is_written_or_refused(tmp_path: Path) -> None:
    writer = fr.summary.Writer(tmp_path)
    writer._file._lock = ClosesFirst(writer._file)  # type: ignore[assignment]
    with pytest.raises(fr.ClosedError, match="the writer is closed"):
        writer.scalar("a", 1, 0)


def test_a_writer_that_nobody_holds_has_written_all(tmp_path: Path) -> None:
    fr.summary.Writer(tmp_path, flush_seconds=60).scalar("loss", 1, 1)
    assert Board(tmp_path).scalars("loss") == {1: 1}


def test_writers_beside_each_other_have_files_of_their_own(tmp_path: Path) -> None:
    writers = [fr.summary.Writer(tmp_path / "a" / "b") for _ in range(4)]

    def tell(number: int) -> None:
        for step in range(200):
            writers[number % 4].scalar(f"x{number}", step, step)

    threads = [threading.Thread(target=tell, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        writer.close()
    assert len(files_in(tmp_path / "a" / "b")) == 4
    board = Board(tmp_path / "a" / "b")
    for number in range(8):
        assert board.scalars(f"x{number}") == {step: step for step in range(200)}


def test_a_folder_that_cannot_be_written_to_is_told_of_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fr.GraphError, match=r"test_summary_writer.py:\d+: .*file/sub/events.* cannot be written"):
        fr.summary.Writer(tmp_path / "file" / "sub")


def test_a_file_in_which_there_is_no_room_is_told_of_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*of: Any) -> int:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(fr.GraphError, match=r"test_summary_writer.py:\d+: .*cannot be written.*no room"):
        fr.summary.Writer(tmp_path)


def test_what_is_too_much_is_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that is larger than all that may wait is admitted alone, as else it never would be."""
    with fr.summary.Writer(tmp_path, flush_seconds=60, most_bytes=1000) as writer:
        with held_up(writer):
            writer.histogram("large", np.zeros(1000), 1)
            for step in range(5):
                writer.scalar("loss", step, step)
        writer.flush()
        writer.scalar("loss", 9, 9)
    board = Board(tmp_path)
    assert (board.names, board.scalars("loss")) == (["large", "loss"], {9: 9})
    assert "lacks 5 summaries, as too many waited" in caplog.text


@contextmanager
def held_up(writer: Any) -> Iterator[None]:
    """Have the writer's thread be in the middle of something while the block runs."""
    began, over = threading.Event(), threading.Event()

    def add(event: Any) -> None:
        began.set()
        over.wait()

    writer._file.put(add, 0, 0)
    writer._file._wake.set()
    began.wait()
    try:
        yield
    finally:
        over.set()


# ── what happens meanwhile ───────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def disk_of(nbytes: int) -> Iterator[None]:
    """Files may have so many bytes and no more: beyond, a write ends early, then fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_of_once_and_written_to_when_it_has_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "x" * 5000
    with fr.summary.Writer(tmp_path, flush_seconds=60) as writer:
        writer.scalar("loss", 1, 1)
        writer.flush()
        with disk_of(4096):
            writer.text("long", text, 2)
            for step in (2, 3):
                writer.scalar("loss", step, step)
                with pytest.raises(fr.ResourceError, match="make room there: what waits is written then"):
                    writer.flush()
            (path,) = files_in(tmp_path)
            assert path.stat().st_size == 4096  # a torn record
            assert Board(tmp_path).scalars("loss") == {1: 1}
        writer.flush()
        writer.scalar("loss", 4, 4)
    board = Board(tmp_path)
    assert board.scalars("loss") == {1: 1, 2: 2, 3: 3, 4: 4}
    assert board.text("long") == {2: text}
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert warnings[0].endswith("training goes on")
    assert warnings[1].endswith("is written again")


def test_a_disk_that_stays_full_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with disk_of(4096), fr.summary.Writer(tmp_path) as writer:
        writer.text("long", "x" * 5000, 2)
    assert Board(tmp_path).names == []
    assert "what was put last is not in it" in caplog.text


def test_what_was_flushed_survives_a_kill_and_what_is_torn_is_passed_over(tmp_path: Path) -> None:
    program = """
import os, signal, sys
import flowrt as fr

writer = fr.summary.Writer(sys.argv[1], flush_seconds=60)
for step in range(1000):
    writer.scalar("loss", step, step)
writer.flush()
for step in range(1000, 2000):
    writer.scalar("loss", step, step)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([*python(), "-c", program, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(Board(tmp_path).scalars("loss"))[:1000] == list(range(1000))
    (path,) = files_in(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    assert len(records(path)) == 1000
    with fr.summary.Writer(tmp_path) as writer:  # who goes on has a file of its own
        writer.scalar("later", 1, 2000)
    board = Board(tmp_path)
    assert len(board.scalars("loss")) == 999
    assert board.scalars("later") == {2000: 1}


def test_a_program_that_ends_without_closing_has_written_all(tmp_path: Path) -> None:
    program = """
import sys
import flowrt as fr

writer = fr.summary.Writer(sys.argv[1], flush_seconds=60)
writer.scalar("loss", 1, 1)
"""
    subprocess.run([*python(), "-c", program, str(tmp_path)], cwd=ROOT, check=True, timeout=50)
    assert Board(tmp_path).scalars("loss") == {1: 1}


def test_a_fork_writes_nothing_of_its_parents(tmp_path: Path) -> None:
    program = """
import os, sys
import flowrt as fr

writer = fr.summary.Writer(sys.argv[1], flush_seconds=60)
writer.scalar("parent", 1, 1)
child = os.fork()
if not child:
    try:
        writer.scalar("child", 1, 1)
    except fr.ClosedError as error:
        with fr.summary.Writer(sys.argv[1]) as own:
            own.text("refused", str(error))
    sys.exit()  # whose cleanups run in the child, too
assert os.waitpid(child, 0)[1] == 0
writer.scalar("parent", 2, 2)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    board = Board(tmp_path)
    assert board.scalars("parent") == {1: 1, 2: 2}
    assert "the process that forked this one" in board.text("refused")[0]
    assert sorted(board.names) == ["parent", "refused"]
    assert len({path.name.rsplit(".", 2)[1] for path in files_in(tmp_path)}) == 2


def test_a_program_without_tensorboard_is_told_what_to_install(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["tensorboard"] = None
import flowrt as fr

with fr.Graph() as graph:
    fr.summary.scalar("loss", fr.constant(1.0))
assert len(fr.summary.merged(graph)) == 1
try:
    fr.summary.Writer(sys.argv[1])
except fr.GraphError as error:
    print(error)
"""
    done = subprocess.run(
        [*python(), "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith("fr.summary.Writer needs TensorBoard: pip install 'flowrt[tensorboard]'")
    assert os.listdir(tmp_path) == []
