"""Seconds of replicas, step by step, in files: what a trainer saw, and traces that others have published.

They are Parquet files; of text there are those that `flowrt.delays.written` reads.

A file of flowrt's has one row for each step and replica, in any order:

    step      integer     the version of the variables that was computed, from any number on
    replica   integer     from 0
    seconds   float       from the version's arrival to the update's; NaN or no row where nothing is known
    censored  boolean     (may be missing) it was cut off then, and would have taken longer; of several such rows of one
                          step and replica the longest counts, and where it ended after all, only the row that says so

Statistics of a trainer add what the seconds consist of, ``input pull compute push``, and ``wait`` and ``server``. A
file may also have a row for each step and a column for each replica, named as in text.

Of a trace of operations, with columns ``step``, ``dp_rank``, ``optype``, ``start_ts`` and ``duration``, as ByteDance's
are (Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis", arXiv 2505.05713), a replica
is a data-parallel rank. Its seconds go from the beginning of its first ``forward-compute`` or ``backward-compute`` of a
step, on any of its stages, to the end of the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flowrt.base.errors import GraphError, not_written, user_site
from flowrt.delays import written

if TYPE_CHECKING:
    from os import PathLike

OURS = ("step", "replica", "seconds")
OPERATIONS = ("step", "dp_rank", "optype", "start_ts", "duration")
TIMES = {"seconds", "start_ts", "duration"}
INDEX = "__index_level_"  # begins the name of a column that pandas wrote beside the program's
MAGIC = b"PAR1"
COMPUTING = ("forward-compute", "backward-compute")


def save(path: str | PathLike[str], seconds: Any, censored: Any = None, *, first_step: int = 0) -> None:
    """Write ``seconds`` [steps, replicas] to a Parquet file; NaN where nothing is known.

    ``censored``, of the same shape, says which were cut off then. Raises `GraphError` for what is no such table, and
    where pyarrow is missing.
    """
    table = as_table(seconds, "seconds to save", known=False)
    cut = np.zeros(table.shape, bool) if censored is None else np.asarray(censored, bool)
    if cut.shape != table.shape:
        raise GraphError(f"{user_site()}: censored has shape {list(cut.shape)}, seconds {list(table.shape)}")
    known = ~np.isnan(table)
    step, replica = np.nonzero(known)
    write(path, step + first_step, replica, table[known], cut[known])


def write(
    path: str | PathLike[str], step: Any, replica: Any, seconds: Any, censored: Any, **more: NDArray[np.float64]
) -> None:
    """Write these columns to a Parquet file, and ``more``. Raises `GraphError` for want of pyarrow or the folder."""
    arrow, parquet = _pyarrow()
    columns = {"step": step, "replica": np.asarray(replica, np.int32), "seconds": seconds, "censored": censored}
    try:
        parquet.write_table(arrow.table(columns | more), path)
    except OSError as error:
        raise not_written(path, error) from error


def load(path: str) -> NDArray[np.float64]:
    """The seconds [steps, replicas] in a file: each finite, what was cut off as long as it may have taken.

    What is not known is the replica's median. What was cut off is the median of what took longer, of that replica's or
    else of all; where nothing did, it stays as it was cut. Raises `GraphError` for a file that has none.
    """
    try:
        columns = _columns(path) if _is_parquet(path) else written.columns(path, OURS, ("censored",))
    except UnicodeDecodeError as error:
        raise GraphError(
            f"{user_site()}: a trace, {path}: it is neither a Parquet file nor text; what is read by other means is "
            f"given as an array, such as Trace(numpy.load({path!r}))"
        ) from error
    except (OSError, ValueError, NotImplementedError) as error:  # of these pyarrow's own are derived
        raise GraphError(f"{user_site()}: a trace, {path}: {error}") from error
    seconds, censored = _measured(path, columns) if "replica" in columns else _operations(path, columns)
    if (unknown := np.isnan(seconds).all(axis=0)).any() or not seconds.size:
        what = f"replica {int(np.argmax(unknown))}" if seconds.size else "any replica"
        raise GraphError(
            f"{user_site()}: a trace, {path}: it has no seconds of {what}; they are numbered from 0, and those of whom "
            "nothing is known are left out"
        )
    return _completed(as_table(seconds, f"a trace, {path}", known=False), censored)


def _is_parquet(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _columns(path: str) -> dict[str, Any]:
    """The columns of a Parquet file that there are to be."""
    _, parquet = _pyarrow()
    with parquet.ParquetFile(path) as file:
        names = [name for name in file.schema_arrow.names if not name.startswith(INDEX)]
        begin = written.first_numbered(names)
        wanted = names if begin else _wanted(path, names)
        found = file.read(columns=wanted, use_threads=False)
    columns = {name: found[name].to_numpy() for name in wanted}
    if begin:
        table = np.stack([as_seconds(column) for column in columns.values()], axis=1)
        return dict(zip(OURS, written.a_column_each(table, begin - 1), strict=True))
    times = {name: as_seconds(columns[name]) for name in columns.keys() & TIMES}
    numbers = {name: written.whole(v) for name, v in columns.items() if name not in TIMES and v.dtype.kind == "f"}
    return columns | numbers | times


def as_seconds(values: Any) -> NDArray[np.float64]:
    """``values`` as floats, where what a masked array hides is not known, and times of NumPy's are seconds."""
    if isinstance(values, np.ma.MaskedArray):
        values = np.ma.filled(values.astype(np.float64), np.nan)
    elif isinstance(values, np.ndarray) and values.dtype.kind == "m":
        values = values / np.timedelta64(1, "s")
    elif isinstance(values, np.ndarray) and values.dtype.kind in "Mc":
        raise TypeError(f"numbers of seconds are no {values.dtype}")
    return np.array(values, np.float64)


def as_table(values: Any, whose: str, *, known: bool = True) -> NDArray[np.float64]:
    """`as_seconds` [steps, replicas]; [steps] is of one replica. Unless ``known``, NaN is legal.

    Raises `GraphError` for what is empty, no such array, negative or infinite.
    """
    try:
        table = as_seconds(values)
    except (TypeError, ValueError) as error:
        raise GraphError(f"{user_site()}: {whose}: expected seconds [steps, replicas]: {error}") from error
    if table.ndim == 1:
        table = table[:, np.newaxis]
    if table.ndim != 2 or not table.size:
        raise GraphError(f"{user_site()}: {whose}: expected seconds [steps, replicas], got shape {list(table.shape)}")
    wrong = ~(table >= 0) | np.isinf(table)
    if not known:
        wrong &= ~np.isnan(table)
    if wrong.any():
        step, replica = np.argwhere(wrong)[0]
        wrong_one = table[step, replica]
        fix = "; what is not known is estimated in files, as fr.delays.save writes them" if np.isnan(wrong_one) else ""
        raise GraphError(
            f"{user_site()}: {whose}: seconds are finite and 0 or more, got {wrong_one:g} "
            f"in step {step} of replica {replica}{fix}"
        )
    return table


def _wanted(path: str, names: list[str]) -> list[str]:
    """The columns to read of those that there are."""
    if set(OURS) <= set(names):
        return [*OURS, *({"censored"} & set(names))]
    if set(OPERATIONS) <= set(names):
        return list(OPERATIONS)
    raise GraphError(
        f"{user_site()}: a trace, {path}: expected the columns {', '.join(OURS)}, or one for each replica, worker0, "
        f"worker1, …, or of a trace of operations {', '.join(OPERATIONS)}; it has {', '.join(names)}"
    )


def _measured(path: str, columns: dict[str, Any]) -> tuple[Any, Any]:
    """The seconds [steps, replicas], NaN where not known, and which were cut off."""
    row, replica = _rows(path, columns["step"]), columns["replica"]
    _check_whole(path, "replica", replica)
    if len(replica) and not 0 <= replica.min() <= replica.max() < len(replica):
        raise GraphError(f"{user_site()}: a trace, {path}: replicas are numbered from 0, and each has a row")
    cut = columns["censored"].astype(bool) if "censored" in columns else np.zeros(len(row), bool)
    _check_once(path, columns["step"][~cut], replica[~cut])
    seconds = np.full((row.max(initial=-1) + 1, replica.max(initial=-1) + 1), np.nan)
    censored = np.zeros(seconds.shape, bool)
    np.fmax.at(seconds, (row[cut], replica[cut]), columns["seconds"][cut])  # told of again and again, as it went on
    censored[row[cut], replica[cut]] = True
    seconds[row[~cut], replica[~cut]] = columns["seconds"][~cut]
    censored[row[~cut], replica[~cut]] = False
    return seconds, censored


def _operations(path: str, columns: dict[str, Any]) -> tuple[Any, Any]:
    """As `_measured`, of a trace of operations."""
    computing = np.isin(columns["optype"].astype(str), COMPUTING)
    row, rank, start, duration = (columns[name][computing] for name in ("step", "dp_rank", "start_ts", "duration"))
    _check_whole(path, "dp_rank", rank)
    row, (_, replica) = _rows(path, row), np.unique(rank, return_inverse=True)
    shape = row.max(initial=-1) + 1, replica.max(initial=-1) + 1
    first, last = np.full(shape, np.inf), np.full(shape, -np.inf)
    np.minimum.at(first, (row, replica), start)
    np.maximum.at(last, (row, replica), start + duration)
    return np.where(np.isfinite(last), last - first, np.nan), np.zeros(shape, bool)


def _rows(path: str, step: Any) -> Any:
    """The row of each step: steps in their order, whatever they are numbered."""
    _check_whole(path, "step", step)
    return np.unique(step, return_inverse=True)[1]


def _check_once(path: str, step: Any, replica: Any) -> None:
    """Raise `GraphError` where a replica has several rows of one step, all of which ended."""
    rows, counts = np.unique(np.stack([step, replica]), axis=1, return_counts=True)
    if (counts > 1).any():
        once, whose = rows[:, counts.argmax()].tolist()
        raise GraphError(
            f"{user_site()}: a trace, {path}: it has several rows of step {once} and replica {whose}: add up what "
            "belongs to one step, or give each its number"
        )


def _check_whole(path: str, name: str, numbers: Any) -> None:
    if not np.issubdtype(numbers.dtype, np.integer):  # nor where a row has none: then they come as floats
        raise GraphError(f"{user_site()}: a trace, {path}: column {name} has to hold integers, one in each row")


def _completed(seconds: NDArray[np.float64], censored: NDArray[np.bool_]) -> NDArray[np.float64]:
    """``seconds`` with an estimate of each that is not known, or was cut off."""
    whole = np.where(censored, np.nan, seconds)
    everybody = np.sort(whole[~np.isnan(whole)])
    found = seconds.copy()
    for replica in range(seconds.shape[1]):
        own = np.sort(whole[~np.isnan(whole[:, replica]), replica])
        for step in np.flatnonzero(censored[:, replica]):
            found[step, replica] = _longer(seconds[step, replica], own, everybody)
        unknown = np.isnan(found[:, replica])
        found[unknown, replica] = np.median(found[~unknown, replica])
    return found


def _longer(cut: float, own: NDArray[np.float64], everybody: NDArray[np.float64]) -> float:
    """How long something took that was cut off: the median of what took longer."""
    for taken in (own, everybody):
        longer = taken[np.searchsorted(taken, cut, "right") :]
        if len(longer):
            return float(np.median(longer))
    return cut


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise GraphError(
            f'{user_site()}: Parquet files need pyarrow, which is not installed: pip install "flowrt[stragglers]"'
        ) from error
    return pyarrow, pyarrow.parquet
