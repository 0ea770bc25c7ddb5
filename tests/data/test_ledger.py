"""The ledger as a file: what it says, what is left of it when it is cut off or damaged, and who may write it."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest
from places import PYTHONPATH
from programs import python

import flowrt as fr
from flowrt.base import codec
from flowrt.base.errors import LedgerError
from flowrt.ledger import summary as summing
from flowrt.ledger import writer as writing
from flowrt.ledger.__main__ import main
from flowrt.ledger.account import Account, BatchState
from flowrt.ledger.frames import HEAD, MAGIC, framed
from flowrt.ledger.records import Begun, Handed, Made, Missed, Over, Setup, Undone, record_to_data
from flowrt.ledger.summary import summary_of
from flowrt.ledger.writer import LedgerWriter

if TYPE_CHECKING:
    from pathlib import Path

KEPT, LATE, REFUSED, LOST = range(4)
POLICY = {"class": "FirstOf", "m": 2}


def setup(**changes: Any) -> Setup:
    given = {"trainer": "model", "replicas": 3, "local_steps": 1, "policy": POLICY, "servers": 1, "seed": 5}
    return Setup(**{**given, "late": "drop", **changes})


def report(version: int, *receipts: tuple[int, int, int], run: int = 1) -> Any:
    """Receipts are (replica, number, outcome)."""
    taken = tuple((replica, number, code, 0.0, 0) for replica, number, code in receipts)
    return SimpleNamespace(run=run, version=version, receipts=taken, identities=())


def write_some(path: Path, **changes: Any) -> LedgerWriter:
    """A ledger of two runs: batches 0, 2, 3 and 5 kept, 1 late, 4 lost, 7 refused, 6 and 8 unused."""
    writer = LedgerWriter(path, setup(**changes))
    writer.begin(1, 0)
    writer.hand(0, 1, [0, 3])
    writer.hand(1, 1, [1, 4])
    writer.hand(2, 1, [2, 5])
    writer.made(report(0, (0, 1, KEPT), (1, 1, LATE), (2, 1, KEPT)))
    writer.hand(1, 3, [6])
    writer.made(report(1, (0, 2, KEPT), (1, 2, LOST), (2, 2, KEPT)))
    writer.returned(1, [6])
    writer.over()
    writer.begin(2, 2)
    writer.hand(0, 1, [6])
    writer.hand(2, 1, [7, 8])
    writer.made(report(2, (2, 1, REFUSED), run=2))
    writer.over()
    return writer


def states(ledger: fr.Ledger) -> list[str]:
    return [ledger.state_of(identity) for identity in range(ledger.drawn)]


def test_every_batch_ends_once_and_what_was_handed_out_and_not_used_is_unused(tmp_path: Path) -> None:
    write_some(tmp_path / "some.ledger").close()
    ledger = fr.Ledger(tmp_path / "some.ledger")
    assert states(ledger) == ["kept", "late", "kept", "kept", "lost", "kept", "unused", "refused", "unused"]
    assert (ledger.version, ledger.unused, ledger.violations, ledger.torn) == (3, [6, 8], (), 0)
    assert [ledger.updates(1, outcome) for outcome in ("kept", "late", "refused", "lost")] == [0, 1, 0, 1]
    assert [(v.version, v.run, dict(v.kept)) for v in ledger.versions[:2]] == [
        (0, 1, {0: (0,), 2: (2,)}),
        (1, 1, {0: (3,), 2: (5,)}),
    ]


def test_with_requeue_a_batch_that_was_late_or_lost_is_unused_until_it_is_kept(tmp_path: Path) -> None:
    with_requeue = write_some(tmp_path / "some.ledger", late="requeue")
    assert with_requeue.account.unused == [1, 4, 6, 8]
    with_requeue.begin(3, 3)
    with_requeue.hand(0, 1, [1])
    with_requeue.made(report(3, (0, 1, KEPT), run=3))
    with_requeue.close()
    ledger = fr.Ledger(tmp_path / "some.ledger")
    assert (ledger.state_of(1), ledger.violations) == ("kept", ())


def test_who_goes_on_after_a_kill_takes_in_what_nobody_had_of_the_run_before(tmp_path: Path) -> None:
    killed = LedgerWriter(tmp_path / "some.ledger", setup())
    killed.begin(1, 0)
    killed.hand(0, 1, [0, 2])
    killed.hand(1, 1, [1])
    killed.close()  # as the system does when the process ends
    again = LedgerWriter(tmp_path / "some.ledger", setup())
    assert again.first == 3
    unseen = [report(version, (0, version + 1, KEPT)) for version in range(1)]
    again.catch_up([*unseen, report(7, (0, 1, KEPT), run=6)])
    again.begin(2, 1)
    again.close()
    ledger = fr.Ledger(tmp_path / "some.ledger")
    assert (states(ledger), ledger.unused, ledger.violations) == (["kept", "unused", "unused"], [1, 2], ())


def test_a_client_of_a_detached_run_may_be_killed_at_any_byte_and_the_next_one_writes_what_is_left(
    tmp_path: Path,
) -> None:
    reports: list[Any] = [
        SimpleNamespace(**{**vars(report(version, *receipts)), "identities": identities})
        for version, receipts, identities in (
            (0, [(0, 1, KEPT), (1, 1, LATE), (2, 1, KEPT)], ((0, 3), (1, 4), (2, 5))),
            (1, [(2, 2, KEPT), (1, 2, LOST)], ((8, 9), ())),
            (2, [(1, 3, REFUSED), (0, 2, KEPT)], ((6,), (7, 10))),
        )
    ]

    def attach(path: Path, seen: int) -> LedgerWriter:
        """A client writes all reports but those that clients before it are known to have had."""
        writer = LedgerWriter(path, setup(local_steps=2))
        writer.attach(1, seen)
        for each in reports[seen:]:
            writer.made(each)
        return writer

    whole, cut = tmp_path / "whole.ledger", tmp_path / "cut.ledger"
    attach(whole, 0).close()
    expected, data = fr.Ledger(whole), whole.read_bytes()
    assert expected.violations == ()
    for length in range(len(data) + 1):
        cut.write_bytes(data[:length])
        for seen in range(len(fr.Ledger(cut).versions) + 1):
            cut.write_bytes(data[:length])
            attach(cut, seen).close()
            again = fr.Ledger(cut)
            assert (again.violations, states(again), len(again.versions)) == ((), states(expected), 3)


@pytest.mark.parametrize("version", [2, 3])
def test_versions_of_which_nothing_is_known_cost_what_may_have_been_used_in_them(tmp_path: Path, version: int) -> None:
    killed = LedgerWriter(tmp_path / "some.ledger", setup())
    killed.begin(1, 0)
    killed.hand(0, 1, [0, 1])
    killed.made(report(0, (0, 1, KEPT)))
    killed.close()
    again = LedgerWriter(tmp_path / "some.ledger", setup())
    again.begin(2, version)
    again.close()
    ledger = fr.Ledger(tmp_path / "some.ledger")
    assert (states(ledger), ledger.version, ledger.violations) == (["kept", "lost"], version, ())


def test_what_was_kept_in_versions_that_are_undone_is_lost_or_used_again(tmp_path: Path) -> None:
    for late, expected in (("drop", "lost"), ("requeue", "unused")):
        path = tmp_path / f"{late}.ledger"
        writer = write_some(path, late=late)
        writer.begin(3, 1, because="a server was lost", again=True)
        writer.close()
        ledger = fr.Ledger(path)
        assert [ledger.state_of(i) for i in (0, 2, 3, 5)] == ["kept", "kept", expected, expected]
        assert [version.version for version in ledger.versions] == [0]
        assert ledger.violations == ()
        assert list(ledger.history(3))[-1].startswith("undone, as the variables are at version 1 again: a server was")


def test_a_ledger_that_is_cut_off_at_any_byte_is_read_and_written_on_from_its_last_whole_record(tmp_path: Path) -> None:
    write_some(tmp_path / "some.ledger").close()
    data = (tmp_path / "some.ledger").read_bytes()
    whole = fr.Ledger(tmp_path / "some.ledger")
    ends = [0, len(MAGIC), *(end for _, end in whole._records)]
    cut, seen = tmp_path / "cut.ledger", set()
    for length in range(len(data)):
        zeros = 40 if length in ends[1:] else 0  # as may be left where power is lost
        cut.write_bytes(data[:length] + bytes(zeros))
        ledger = fr.Ledger(cut)
        kept = len(ledger._records)
        seen.add(kept)
        assert ledger._records == whole._records[:kept]
        assert ledger.torn == length + zeros - max(end for end in ends if end <= length)
        assert ledger.violations == ()
        writer = LedgerWriter(cut, setup())
        writer.begin(9, ledger.version or 0)
        writer.close()
        again = fr.Ledger(cut)
        assert (again.torn, again.violations) == (0, ())
    assert seen == set(range(len(whole._records)))


def test_a_ledger_in_which_any_bit_is_flipped_is_refused_with_the_place(tmp_path: Path) -> None:
    write_some(tmp_path / "some.ledger").close()
    data = (tmp_path / "some.ledger").read_bytes()
    ends = [len(MAGIC), *(end for _, end in fr.Ledger(tmp_path / "some.ledger")._records)]
    bad, rng = tmp_path / "bad.ledger", random.Random(3)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        bad.write_bytes(flipped)
        begin = max((end for end in ends if end <= at), default=0)
        expected = f"bad.ledger is damaged at byte {begin}: " if at >= len(MAGIC) else "bad.ledger is no ledger"
        for read in (fr.Ledger, lambda path: LedgerWriter(path, setup())):
            with pytest.raises(LedgerError, match=expected):
                read(bad)
        assert bad.read_bytes() == flipped


def write_many(path: Path, steps: int) -> LedgerWriter:
    """A ledger of a run that goes on: of each step a batch was kept, one late, and one is unused or with a replica."""
    writer = LedgerWriter(path, setup(policy={**POLICY, "more": (1.5, None)}))
    writer.begin(1 << 60, 0)
    for step in range(steps):
        for replica in range(3):
            writer.hand(replica, step + 1, [3 * step + replica])
        writer.made(report(step, (0, step + 1, KEPT), (1, step + 1, LATE), run=1 << 60))
        if step % 2:
            writer.returned(2, [3 * step + 2])
    return writer


def test_who_goes_on_with_a_long_ledger_takes_in_what_came_since_its_summary_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "EVERY", 2000)
    path = tmp_path / "some.ledger"
    (tmp_path / "some.ledger.summary.1-a.part").write_bytes(b"of a writer that was killed")
    write_many(path, 300).close()
    assert {entry.name for entry in tmp_path.iterdir()} == {"some.ledger", "some.ledger.summary"}
    summed = LedgerWriter(path, setup())
    taken, take = [], Account.take
    monkeypatch.setattr(Account, "take", lambda account, record: taken.append(record) or take(account, record))
    summed.close()
    again = LedgerWriter(path, summed.account.setup or setup())
    again.close()
    assert 0 < len(taken) < 2000 // HEAD
    summary_of(path).unlink()
    whole = LedgerWriter(path, summed.account.setup or setup())
    whole.close()
    assert len(taken) > 1000
    assert vars(again.account) == vars(whole.account)
    assert (whole.account.violations, len(whole.account.held)) == ([], 150)


def test_a_summary_that_is_amiss_or_of_other_bytes_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "EVERY", 500)
    path, beside = tmp_path / "some.ledger", summary_of(tmp_path / "some.ledger")
    write_many(path, 40).close()
    data, summary = path.read_bytes(), beside.read_bytes()
    beside.unlink()
    whole = LedgerWriter(path, setup())
    whole.close()
    for cut in range(0, len(summary), 7):
        for amiss in (summary[:cut], summary[:cut] + bytes([summary[cut] ^ 1]) + summary[cut + 1 :]):
            path.write_bytes(data)
            beside.write_bytes(amiss)
            other = LedgerWriter(path, setup())
            other.close()
            assert other.account.states == whole.account.states
    told = [*codec.unpack(summary[len(summing._MAGIC) + summing._SUM :])]
    for place, amiss in ((2, told[2][:1]), (5, ((0, 1),)), (6, ((0, 99, 1),))):  # with a checksum that is right
        content = codec.pack((*told[:place], amiss, *told[place + 1 :]))
        beside.write_bytes(summing._MAGIC + crc32(content).to_bytes(summing._SUM, "little") + content)
        path.write_bytes(data)
        other = LedgerWriter(path, setup())
        other.close()
        assert other.account.states == whole.account.states
    beside.write_bytes(summary)
    path.write_bytes(data[: len(data) // 2])
    LedgerWriter(path, setup()).close()
    assert fr.Ledger(path).drawn < len(whole.account.states)
    path.write_bytes(data[:600] + bytes([data[600] ^ 1]) + data[601:])
    with pytest.raises(LedgerError, match="is damaged at byte"):
        LedgerWriter(path, setup())


def test_one_process_at_a_time_writes_a_ledger(tmp_path: Path) -> None:
    first = write_some(tmp_path / "some.ledger")
    with pytest.raises(LedgerError, match=r"writes the ledger .*some.ledger, and one at a time does"):
        LedgerWriter(tmp_path / "some.ledger", setup())
    code = "import sys; from test_ledger import *; LedgerWriter(sys.argv[1], setup())"
    run = [*python(), "-c", code, str(tmp_path / "some.ledger")]
    path = {**os.environ, "PYTHONPATH": PYTHONPATH}
    other = subprocess.run(run, env=path, capture_output=True, text=True, timeout=60, check=False)
    assert "one at a time does" in other.stderr
    fr.Ledger(tmp_path / "some.ledger")
    first.close()
    first.close()
    LedgerWriter(tmp_path / "some.ledger", setup()).close()


def test_a_forked_child_has_no_part_in_a_ledger(tmp_path: Path) -> None:
    writer = write_some(tmp_path / "some.ledger")
    read, write = os.pipe()
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(here, b"x")
        os.read(read, 1)
        os._exit(0)
    os.read(there, 1)
    writer.close()
    LedgerWriter(tmp_path / "some.ledger", setup()).close()
    os.write(write, b"x")
    os.waitpid(child, 0)
    for end in (read, write, there, here):
        os.close(end)


def test_a_ledger_of_another_trainer_is_refused_and_of_another_policy_gone_on_with(tmp_path: Path) -> None:
    write_some(tmp_path / "some.ledger").close()
    with pytest.raises(LedgerError, match="is of trainer 'model' with 1 local steps, not of 'other' with 1"):
        LedgerWriter(tmp_path / "some.ledger", setup(trainer="other"))
    other = setup(policy={"class": "AllOf"}, replicas=4)
    LedgerWriter(tmp_path / "some.ledger", other).close()
    assert fr.Ledger(tmp_path / "some.ledger").setup == other


@pytest.mark.parametrize(
    "data",
    [
        (1, 1, "0", 0.0),  # Begun
        (2, 0, 1, (0, None)),  # Handed
        (2, 0, 1, (-1,)),
        (2, 0, 1, (1 << 60,)),
        (3, 0, ((0, 1, 0),)),  # Made
        (3, 0, ((0, 99, 0, ()),)),
        (3, 0, 7),
        (7, 0, 7),  # Over
    ],
)
def test_a_record_whose_checksum_is_right_and_that_says_nonsense_is_refused(tmp_path: Path, data: Any) -> None:
    path = tmp_path / "bad.ledger"
    path.write_bytes(MAGIC + framed(record_to_data(setup())) + framed(data))
    with pytest.raises(LedgerError, match=r"bad\.ledger before byte .*: a record that this version of flowrt does not"):
        fr.Ledger(path)
    assert main([str(path), "--verify"]) == 2


def test_what_does_not_fit_what_was_said_before_is_a_violation(tmp_path: Path) -> None:
    records = [
        setup(),
        Begun(1, 0, 0.0),
        Handed(0, 1, (0, 1)),
        Handed(1, 1, (1,)),
        Made(0, ((0, KEPT, 0, (0,)),)),
        Made(2, ((0, KEPT, 0, (0,)),)),
        Over(3, ()),
    ]
    path = tmp_path / "bad.ledger"
    path.write_bytes(MAGIC + b"".join(framed(record_to_data(record)) for record in records))
    assert fr.Ledger(path).violations == (
        "batch 1 is handed to replica 1, and was handed already",
        "version 2 was used, and the variables were at 1",
        "batch 0 is kept of replica 0 in version 2, and was kept already",
        "a run is over, and [1] neither used nor unused",
    )
    assert main([str(path), "--verify"]) == 1
    account, found = Account(), list[str]()
    for record, *said in [
        (Handed(0, 1, (0,)), "[0] are handed out, and no run goes on"),
        (Begun(1, 3, 0.0),),
        (Begun(2, 4, 0.0), "run 2 begins before run 1 is over", "version 4 began a run, and the variables were at 3"),
        (Handed(0, 1, (1,)), "0 and 1 are both batch 1 of 0"),
        (Undone(5, "", (), again=False), "version 5 went back, and the variables were at 4"),
        (Undone(5, "", (), again=False),),
        (Missed(5, ()), "version 5 was missed, and the variables were at 5"),
        (Missed(6, (0,)),),
        (Over(5, (1,)), "version 5 was the end, and the variables were at 6"),
        (Begun(3, 6, 0.0),),
    ]:
        account.take(record)  # type: ignore[arg-type]
        found += said  # type: ignore[arg-type]
        assert account.violations == found
    assert [account.count(state) for state in (BatchState.LOST, BatchState.UNUSED)] == [1, 1]


def test_the_command_line_sums_up_tells_of_one_batch_and_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.ledger"
    write_some(path).close()
    assert main([str(path)]) == 0
    said = capsys.readouterr().out
    assert "model: 3 replicas, FirstOf(m=2)\n2 runs, at version 3\n" in said
    assert "9 batches drawn: 4 kept, 1 late, 1 refused, 1 lost, 2 unused" in said
    assert "replica 2          2         0         1         0" in said
    assert main([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batches"]["kept"] == 4
    assert main([str(path), "--batch", "6"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "batch 6: unused",
        "  handed to replica 1 as its batch 3 of run 1",
        "  came back of replica 1, which was lost before it began with it",
        "  handed to replica 0 as its batch 1 of run 2",
        "  not used in run 2, which was over at version 3",
    ]
    assert main([str(path), "--verify"]) == 0
    assert capsys.readouterr().out == ""
    path.write_bytes(b"no ledger at all, this")
    assert main([str(path)]) == 2
    assert "is no ledger: it begins with b'no ledger at all'" in capsys.readouterr().err
    assert main([str(tmp_path / "absent")]) == 2
    assert "there is no ledger to read at" in capsys.readouterr().err


def test_a_disk_that_is_full_ends_writing_with_what_was_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, write, left = write_some(tmp_path / "some.ledger"), os.write, [11]
    before = (tmp_path / "some.ledger").read_bytes()

    def fill(file: int, data: bytes) -> int:
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: left.pop()])

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(LedgerError, match=r"some.ledger could not be written: .*No space left on device; .* make room"):
        writer.begin(3, 3)
    writer.close()
    assert (tmp_path / "some.ledger").read_bytes() == before


def test_a_disk_that_is_full_before_a_ledger_begins_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(LedgerError, match=r"some.ledger cannot be read, or begun: .*No space left"):
        write_some(tmp_path / "some.ledger")
