"""Injected delays: what is drawn, whom it strikes and when, their text, files of recorded ones, and refusals."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrt as fr
from flowrt.delays import parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowrt.delays import Delay

# ── what is drawn ────────────────────────────────────────────────────────────────────────────────────────────────────

JUDGES = [
    (fr.delays.Exponential(0.05), lambda stats: stats.expon(scale=0.05)),
    (fr.delays.ShiftedExponential(0.8, 0.2), lambda stats: stats.expon(loc=0.8, scale=0.2)),
    (fr.delays.Uniform(0.1, 0.3), lambda stats: stats.uniform(0.1, 0.2)),
    (fr.delays.Pareto(0.1, 1.8), lambda stats: stats.pareto(1.8, scale=0.1)),
    (fr.delays.LogNormal(0.05, 0.5), lambda stats: stats.lognorm(0.5, scale=0.05)),
]


@pytest.fixture(scope="module")
def stats() -> Any:
    from scipy import stats  # here: whoever collects tests would take a second for it

    return stats


@pytest.mark.parametrize(("delay", "make"), JUDGES, ids=lambda value: str(getattr(value, "WORD", "")))
def test_a_delay_is_drawn_from_its_distribution(delay: Delay, make: Callable[[Any], Any], stats: Any) -> None:
    rng = np.random.default_rng(7)
    draws = np.concatenate([delay.sample(rng, step, 500) for step in range(40)])
    judge = make(stats)
    assert stats.kstest(draws, judge.cdf).pvalue > 0.001
    assert np.median(draws) == pytest.approx(judge.median(), rel=0.05)


def test_a_common_factor_is_the_same_for_all_replicas_of_a_step(stats: Any) -> None:
    rng, delay = np.random.default_rng(3), fr.delays.Correlated(fr.delays.LogNormal(1, 0.5), 0.2)
    steps = np.array([delay.sample(rng, step, 5) for step in range(2000)])
    assert (steps == steps[:, :1]).all()
    assert stats.kstest(steps[:, 0], stats.lognorm(0.5, scale=0.2).cdf).pvalue > 0.001
    mixed = fr.delays.Correlated(fr.delays.LogNormal(1, 0.5), fr.delays.LogNormal(0.2, 0.5))
    logs = np.log([mixed.sample(rng, step, 2) for step in range(4000)])
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(0.5, abs=0.05)


def test_pauses_come_in_one_of_so_many_steps() -> None:
    rng, delay = np.random.default_rng(5), fr.delays.Pauses(20, 3)
    drawn = np.array([delay.sample(rng, step, 100) for step in range(400)])
    assert set(np.unique(drawn)) == {0.0, 3.0}
    assert (drawn > 0).mean() == pytest.approx(1 / 20, rel=0.1)


def test_delays_add_up_each_where_it_strikes() -> None:
    delay = 0.5 + fr.delays.Constant(1) + fr.delays.Constant(2, at="server") + 4
    rng = np.random.default_rng(0)
    assert delay.sample(rng, 0, 2).tolist() == [7.5, 7.5]
    assert delay.sample(rng, 0, 2, at=("server",)).tolist() == [2, 2]
    assert delay.sample(rng, 0, 2, at=("input", "compute")).tolist() == [5.5, 5.5]


def test_a_delay_strikes_whom_and_when_it_says() -> None:
    rng = np.random.default_rng(0)
    delay = fr.delays.Constant(1).on(1, 2).during(10, 20) + fr.delays.Constant(5).during(2.5, 3, unit="seconds")
    assert delay.sample(rng, 9, 3).tolist() == [0, 0, 0]
    assert delay.sample(rng, 10, 3, now=2.4).tolist() == [0, 1, 1]
    assert delay.sample(rng, 19, 3, now=2.5).tolist() == [5, 6, 6]
    assert delay.sample(rng, 20, 3, now=3.0).tolist() == [0, 0, 0]
    narrowed = fr.delays.Constant(1).on(1, 2).on(2, 3).during(3).during(0, 8)
    assert narrowed == fr.delays.Constant(1).on(2).during(3, 8)


def test_what_is_drawn_does_not_hang_on_whom_and_when_it_strikes() -> None:
    def draws(delay: Delay, **how: Any) -> list[float]:
        rng = np.random.default_rng(11)
        return [float(delay.sample(rng, step, 4, **how)[3]) for step in range(20)]

    whole = fr.delays.Exponential(1)
    windowed = fr.delays.Exponential(9).during(5, 9).on(0) + whole
    elsewhere = fr.delays.Exponential(9, at="server") + whole
    assert draws(elsewhere, at=("compute",)) == draws(windowed) != draws(whole)


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "delay"),
    [
        ("0.2", fr.delays.Constant(0.2)),
        ("1e-3", fr.delays.Constant(0.001)),
        ("exponential:0.05", fr.delays.Exponential(0.05)),
        ("shifted:0.8,0.2 + 5 on 3", fr.delays.ShiftedExponential(0.8, 0.2) + fr.delays.Constant(5).on(3)),
        ("uniform:0.1,0.3 at server", fr.delays.Uniform(0.1, 0.3, at="server")),
        ("lognormal:0.05,0.5 during 5s:", fr.delays.LogNormal(0.05, 0.5).during(5, unit="seconds")),
        ("pareto:0.1,1.8 at push during 100:200", fr.delays.Pareto(0.1, 1.8, at="push").during(100, 200)),
        ("pauses:50,2 at frozen on 0,4", fr.delays.Pauses(50, 2, at="frozen").on(4, 0)),
        ("correlated:(lognormal:1,0.3),(0.1 + exponential:0.2)", None),
        ("link:125000000,0.01", fr.delays.Link(125e6, 0.01)),
        ("trace:1,2;3,4.5", fr.delays.Trace([[1, 2], [3, 4.5]])),
    ],
)
def test_a_delay_reads_as_it_is_written(text: str, delay: Delay | None) -> None:
    common = fr.delays.LogNormal(1, 0.3)
    delay = delay or fr.delays.Correlated(common, fr.delays.Constant(0.1) + fr.delays.Exponential(0.2))
    assert parse(text) == delay
    assert parse(str(delay)) == delay
    assert eval(repr(delay), {"fr": fr}) == delay
    assert hash(parse(text)) == hash(delay)


def test_text_may_be_shorter_than_what_is_written() -> None:
    assert parse("constant:1") == parse(" 1.0 ") == parse(1) == fr.delays.Constant(1)
    assert parse("(1+exponential:2) at input during :7") == (
        fr.delays.Constant(1, at="input") + fr.delays.Exponential(2, at="input")
    ).during(0, 7)
    assert parse("link:1e6") == fr.delays.Link(1e6)


numbers = st.floats(0, 1e9) | st.integers(0, 1000)
plain = st.one_of(
    numbers.map(fr.delays.Constant),
    st.builds(fr.delays.Exponential, numbers, at=st.sampled_from(["input", "compute", "push", "server", "frozen"])),
    st.builds(fr.delays.LogNormal, numbers, numbers),
    st.builds(fr.delays.Pauses, st.floats(1, 1e6), numbers),
    st.builds(lambda rows: fr.delays.Trace(rows), st.lists(numbers, min_size=1, max_size=4)),
)
limited = st.one_of(
    plain,
    st.builds(lambda d, a, b: d.during(a, a + b), plain, st.integers(0, 99), st.integers(1, 99)),
    st.builds(lambda d, a, b: d.during(a, a + b, unit="seconds"), plain, st.floats(0, 99), st.floats(0.1, 99)),
    st.builds(lambda d, r: d.on(*r), plain, st.lists(st.integers(0, 9), min_size=1, max_size=3)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(limited, min_size=1, max_size=4))
def test_any_delay_reads_as_it_is_written(parts: list[Delay]) -> None:
    delay = sum(parts[1:], parts[0])
    assert parse(str(delay)) == delay


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────

NO_TEXTS = ["", "fast", "uniform:0.1", "gamma:1", "1,2", "trace:", "exponential:", "(1", "1 +", "1 2", "1 during 5s:8"]
NO_TEXTS += ["1 during x:3", "link", "exponential:0.1;2", '"', "1 at"]


@pytest.mark.parametrize("text", NO_TEXTS)
def test_what_is_no_delay_is_refused(text: str) -> None:
    with pytest.raises(fr.GraphError, match=r"test_delays.py:\d+: .* is not a delay: it .*; write seconds as 0.2"):
        parse(text)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fr.delays.Constant(-1), "Constant: seconds is a finite number of seconds, 0 or more, got -1"),
        (lambda: fr.delays.Exponential(float("nan")), "Exponential: mean .* got nan"),
        (lambda: parse("inf"), "seconds .* got inf"),
        (lambda: fr.delays.ShiftedExponential(1, inf), "mean .* got inf"),
        (lambda: fr.delays.Uniform(3, 1), "lowest 3 is above highest 1"),
        (lambda: fr.delays.Pareto(1, 0), "shape is a finite number above 0, got 0"),
        (lambda: fr.delays.LogNormal(1, -0.5), "sigma .* got -0.5"),
        (lambda: fr.delays.Constant("0.2"), "got '0.2'"),  # type: ignore[arg-type]
        (lambda: fr.delays.Constant(True), "got True"),
        (lambda: fr.delays.Constant(1, at="moon"), "at='moon' .* expected input, compute, push, server, frozen"),
        (lambda: parse("link:3 at server"), "at='server' is no place where it strikes; expected link"),
        (lambda: fr.delays.Link(0), "bytes_per_second is a finite number above 0"),
        (lambda: fr.delays.Constant(1).during(5, 3), r"during\(5, 3\)"),
        (lambda: fr.delays.Constant(1).during(0.5, 3), 'unit="seconds" would take these'),
        (lambda: fr.delays.Constant(1).during(0, 3, unit="hours"), "unit='hours': expected steps or seconds"),
        (lambda: fr.delays.Constant(1).on(-1), r"on\(-1\): expected replicas, numbered from 0"),
        (lambda: fr.delays.Constant(1).on(1).on(2), "it strikes .* alone"),
        (lambda: fr.delays.Correlated("1", 2), "expected a delay or a number of seconds, got '1'"),
        (lambda: fr.delays.Trace([]), "a trace: expected seconds"),
        (lambda: fr.delays.Trace([[1.0, -2.0]]), "got -2 in step 0 of replica 1"),
        (lambda: fr.delays.Trace([1.0, float("nan")]), "got nan in step 1 of replica 0"),
        (lambda: fr.delays.Trace([[1], [1, 2]]), "a trace: expected seconds"),
        (lambda: fr.delays.Trace("/nowhere/none.parquet"), "a trace, /nowhere/none.parquet: .*No such file"),
        (lambda: parse(None), "got None"),  # type: ignore[arg-type]
    ],
)
def test_a_delay_that_makes_no_sense_is_an_error_at_the_line_that_made_it(make: Any, said: str) -> None:
    with pytest.raises(fr.GraphError, match=rf"test_delays.py:\d+: .*{said}"):
        make()


# ── what was recorded ────────────────────────────────────────────────────────────────────────────────────────────────


def write(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return os.fspath(path)


def test_a_trace_goes_on_from_the_beginning() -> None:
    trace, rng = fr.delays.Trace([[1, 2], [3, 4], [5, 6]]), np.random.default_rng(0)
    assert [trace.sample(rng, step, 3).tolist() for step in (0, 2, 3)] == [[1, 2, 1], [5, 6, 5], [1, 2, 1]]
    assert fr.delays.Trace([1, 2]).sample(rng, 1, 3).tolist() == [2, 2, 2]


def test_seconds_come_back_from_a_file(tmp_path: Path) -> None:
    seconds = np.random.default_rng(1).exponential(size=(20, 3))
    fr.delays.save(tmp_path / "seconds.parquet", seconds, first_step=100)
    trace = fr.delays.Trace(tmp_path / "seconds.parquet")
    np.testing.assert_array_equal(trace.seconds, seconds)
    assert parse(str(trace)) == trace
    assert pq.read_table(tmp_path / "seconds.parquet")["step"][0].as_py() == 100


def test_what_was_cut_off_took_as_long_as_what_took_longer(tmp_path: Path) -> None:
    seconds = np.array([[1.0, 1.0], [2.0, 9.0], [4.0, 0.5], [1.5, 9.5], [8.0, np.nan]])
    censored = np.array([[0, 0], [1, 1], [0, 1], [0, 1], [0, 0]], bool)
    fr.delays.save(tmp_path / "cut.parquet", seconds, censored)
    found = fr.delays.Trace(tmp_path / "cut.parquet").seconds
    np.testing.assert_array_equal(found[:, 0], [1, 6, 4, 1.5, 8])  # 6: the median of 4 and 8
    np.testing.assert_array_equal(found[:, 1], [1, 9, 1, 9.5, 5])  # nobody took longer than 9; 5: the median of its own


def test_a_trace_of_operations_counts_a_rank_from_its_first_to_its_last_computing(tmp_path: Path) -> None:
    path = write(
        tmp_path / "operations.parquet",
        step=[7, 7, 7, 7, 9, 9],
        dp_rank=[0, 0, 2, 2, 0, 2],
        optype=["forward-compute", "backward-compute", "forward-compute", "optimizer", *["forward-compute"] * 2],
        start_ts=[0.5, 3.0, 1.0, 0.0, 0.0, 0.0],
        duration=[1.0, 2.0, 4.0, 50.0, 3.0, 2.0],
    )
    np.testing.assert_array_equal(fr.delays.Trace(path).seconds, [[4.5, 4.0], [3.0, 2.0]])


ROWS: dict[str, Any] = {"step": [0, 1], "replica": [0, 0], "seconds": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"step": [1], "seconds": [1.0]}, "expected the columns step, replica, seconds, or .* it has step, seconds"),
        ({name: values[:0] for name, values in ROWS.items()}, ""),
        (ROWS | {"seconds": [1.0, -2.0]}, "got -2 in step 1 of replica 0"),
        (ROWS | {"seconds": [1.0, inf]}, "got inf in step 1 of replica 0"),
        (ROWS | {"seconds": [float("nan")] * 2}, "no seconds of replica 0"),
        (ROWS | {"replica": [0, 2]}, "replicas are numbered from 0"),
        (ROWS | {"replica": [1, 1]}, "no seconds of replica 0"),
        (ROWS | {"replica": [0.5, 1.0]}, "column replica has to hold integers"),
        (ROWS | {"step": [0, None]}, "column step has to hold integers"),
        (ROWS | {"seconds": ["a", "b"]}, ""),
    ],
)
def test_a_file_that_is_no_trace_is_an_error_at_the_line_that_reads_it(
    tmp_path: Path, columns: dict[str, Any], said: str
) -> None:
    with pytest.raises(fr.GraphError, match=rf"test_delays.py:\d+: a trace, .*x.parquet: .*{said}"):
        fr.delays.Trace(write(tmp_path / "x.parquet", **columns))


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("seconds")
    with pytest.raises(fr.GraphError, match=r"test_delays.py:\d+: a trace, "):
        fr.delays.Trace(tmp_path / "x.parquet")


def test_what_is_no_table_of_seconds_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(fr.GraphError, match="got -1 in step 0 of replica 0"):
        fr.delays.save(tmp_path / "x.parquet", [[-1.0]])
    with pytest.raises(fr.GraphError, match=r"censored has shape \[2\], seconds \[1, 1\]"):
        fr.delays.save(tmp_path / "x.parquet", [[1.0]], [True, False])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "0.5,1\n2,0.25\n",
        "\ufeff# of 3 May\n0.5;1\n\n2;0.25",
        "0.5\t1\r\n2\t0.25\r\n",
        "0.5 1.0\n 2.0  2.5e-01\n",
        "replica,step,host,seconds\n1,8,a,0.25\n0,8,a,2\n0,7,b,0.5\n1,7,b,1\n",
        '"step","replica","seconds","censored"\n0,0,0.5,False\n0,1,1,false\n1,0,2,0\n1,1,0.25,false\n',
        "worker0,worker1\n0.5,1\n2,0.25\n",
        "step;rank 1;rank 2\n7;0.5;1\n8;2;0.25\n",
        "step,r0,r1\n1,2,0.25\n0,0.5,1\n",
        ",0,1\n0,0.5,1\n1,2,0.25\n",  # as pandas writes an array
        "0,1\n0.5,1\n2,0.25\n",
        "0,5;1\n2;0,25\n",  # where a comma is a point
    ],
)
def test_a_trace_may_be_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    np.testing.assert_array_equal(fr.delays.Trace(tmp_path / "trace.csv").seconds, [[0.5, 1], [2, 0.25]])


def test_of_rows_that_tell_how_far_a_step_had_come_the_last_counts_and_none_once_it_ended(tmp_path: Path) -> None:
    rows = ["0,0,1,0", "0,1,2,1", "0,1,5,1", "0,1,3,1", "1,0,1,0", "1,1,4,0", "1,1,3,1"]
    (tmp_path / "trace.csv").write_text("\n".join(["step,replica,seconds,censored", *rows]))
    np.testing.assert_array_equal(fr.delays.Trace(tmp_path / "trace.csv").seconds, [[1, 5], [1, 4]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no seconds of any replica"),
        ("1,2\n3\n", "line 2 is 3: expected 2 fields, as in the first line"),
        ("1,2,\n3,4,\n", "no seconds of replica 2; .* of whom nothing is known are left out"),
        ("step,replica,seconds\n7,0,1\n8,1,1\n8,1,2\n", "several rows of step 8 and replica 1: add up what belongs"),
        ("1,2\n3,fast\n", "line 2 is 3,fast: expected numbers"),
        ("iteration,worker,time\n0,0,1\n", "columns step, replica, seconds, or a line for each.* is iteration, worker"),
        ("iteration,worker0\n0,1\n", "perhaps behind one that is named step; its first line is iteration, worker0"),
        ("worker0,worker2\n1,2\n", "its first line is worker0, worker2"),
        ("worker1,worker0\n1,2\n", "its first line is worker1, worker0"),
        ("worker2,worker3\n1,2\n", "its first line is worker2, worker3"),
        ("step,worker0,worker1\n0.5,1,2\n", "column step has to hold integers"),
        ("step,replica,seconds\n0,1.5,1\n", "column replica has to hold integers"),
        ("step,replica,seconds\n0,1,1\n1,1,1\n", "no seconds of replica 0; they are numbered from 0"),
        ("1,2\n-3,4\n", "got -3 in step 1 of replica 0"),
    ],
)
def test_text_that_is_no_trace_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(fr.GraphError, match=rf"test_delays.py.*trace.csv: .*{message}"):
        fr.delays.Trace(tmp_path / "trace.csv")


def test_first_lines_of_seconds_are_seconds(tmp_path: Path) -> None:
    for line in ("1,2", "0.0,1.0", "0"):
        (tmp_path / "trace.csv").write_text(f"{line}\n{line}\n")
        assert len(fr.delays.Trace(tmp_path / "trace.csv").seconds) == 2


def test_what_is_left_empty_in_text_is_not_known(tmp_path: Path) -> None:
    for text in ("1,2\n3,\n5,8\n", "1,NA\n3,2\n5,8\n", "1,NaN\n3,2\n5,8\n"):
        (tmp_path / "trace.csv").write_text(text)
        np.testing.assert_array_equal(np.sort(fr.delays.Trace(tmp_path / "trace.csv").seconds[:, 1]), [2, 5, 8])


@pytest.mark.parametrize("text", ["seconds\n0.5\n2\n", ",seconds\n0,0.5\n1,2\n"])
def test_a_single_column_may_be_named_for_what_it_holds(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    np.testing.assert_array_equal(fr.delays.Trace(tmp_path / "trace.csv").seconds, [[0.5], [2]])


@pytest.mark.parametrize(
    "columns",
    [
        {"worker0": [0.5, 2], "worker1": [1, 0.25]},
        {"0": [0.5, 2], "1": [1, 0.25], "__index_level_0__": [7, 8]},  # as pandas writes an array
        {"step": [2, 1], "rank 1": [2, 0.5], "rank 2": [0.25, 1]},
        {"step": [1.0, 1, 2, 2], "replica": [0.0, 1, 0, 1], "seconds": [0.5, 1, 2, 0.25]},  # as it does beside a NaN
        {"step": [1, 1, 2, 2], "replica": [0, 1] * 2, "seconds": np.array([500, 1000, 2000, 250], "timedelta64[ms]")},
    ],
    ids=lambda columns: ",".join(columns),
)
def test_a_parquet_file_may_be_a_table_with_a_column_for_each_replica(tmp_path: Path, columns: dict[str, Any]) -> None:
    path = write(tmp_path / "wide.parquet", **columns)
    np.testing.assert_array_equal(fr.delays.Trace(path).seconds, [[0.5, 1], [2, 0.25]])


def test_a_file_that_is_neither_text_nor_parquet_is_refused_with_the_way_around(tmp_path: Path) -> None:
    np.save(tmp_path / "seconds.npy", np.ones((2, 2)))
    with pytest.raises(fr.GraphError, match=r"neither a Parquet file nor text; .*Trace\(numpy.load\('.*s.npy'\)\)"):
        fr.delays.Trace(tmp_path / "seconds.npy")


def test_seconds_keep_what_their_array_says_of_them() -> None:
    """A mask is no number, and times have a unit."""
    times = np.array([[1500, 250]], "timedelta64[ms]")
    np.testing.assert_array_equal(fr.delays.Trace(times).seconds, [[1.5, 0.25]])
    with pytest.raises(fr.GraphError, match="got nan in step 1 of replica 0; what is not known is estimated in files"):
        fr.delays.Trace(np.ma.masked_equal([[1.0], [2.0]], 2.0))
    with pytest.raises(fr.GraphError, match=r"numbers of seconds are no datetime64"):
        fr.delays.Trace(np.array(["2026-01-01"], "datetime64[s]"))
    assert fr.simulate(fr.train.AllOf(), np.float32(0.5), replicas=2, steps=4).seconds.sum() == 2


def test_the_name_of_a_file_is_not_taken_for_a_delay() -> None:
    with pytest.raises(fr.GraphError, match=r"a file is read by fr.delays.Trace\('seen.csv'\)"):
        fr.simulate(fr.train.AllOf(), "seen.csv", replicas=2, steps=4)
    with pytest.raises(fr.GraphError, match=r"simulate: a file is read by fr.delays.Trace\('seen.csv'\)"):
        fr.simulate(fr.train.AllOf(), Path("seen.csv"), replicas=2, steps=4)
    with pytest.raises(fr.GraphError, match="seed is an integer from 0 up, got -1"):
        fr.simulate(fr.train.AllOf(), 0.5, replicas=2, steps=4, seed=-1)


def test_what_a_trainer_saw_is_a_trace(tmp_path: Path) -> None:
    parts = {name: np.array([0.1, 0.2, np.nan]) for name in ("input", "pull", "compute", "push", "wait", "server")}
    records = {"version": np.array([4, 4, 5]), "replica": np.array([0, 1, 0]), "cut": np.array([False, True, False])}
    statistics = fr.train.Statistics(2, 0, (), (), (), records | parts)
    statistics.save(tmp_path / "seen.parquet")
    table = pq.read_table(tmp_path / "seen.parquet")
    assert table["censored"].to_pylist() == [False, True, False]
    np.testing.assert_allclose(table["seconds"], [0.4, 0.8, 0.0])
    np.testing.assert_allclose(fr.delays.Trace(tmp_path / "seen.parquet").seconds, [[0.4, 0.8], [0.0, 0.8]])
    with pytest.raises(fr.GraphError, match=r"test_delays.py:\d+: .*x.parquet cannot be written.*make the folder"):
        statistics.save(tmp_path / "missing" / "x.parquet")
    with pytest.raises(fr.GraphError, match=r"test_delays.py:\d+: there is nothing to save"):
        fr.train.Statistics(0, 0, (), ()).save(tmp_path / "none.parquet")
