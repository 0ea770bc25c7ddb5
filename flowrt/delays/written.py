"""Seconds of replicas, step by step, in files of text: as spreadsheets, NumPy and pandas write them.

Either a line for each step and a column for each replica, or a line that names columns, of which ``step``,
``replica``, ``seconds``, and perhaps ``censored``, mean what they do in `flowrt.delays.parquet`. In the first case
there are numbers alone, or a line before them numbers the replicas, as ``step,worker0,worker1`` and the ``,0,1`` of
pandas do: in their order, from 0 on or, with a word, from 1, perhaps behind a column of steps; a single one may be
called ``seconds``. What is between the columns are commas, semicolons, tabs or blanks, and where it is no comma, one
may stand for a point; what is left empty, or ``NA``, is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowrt.base.errors import GraphError, user_site

WORDS = {"true": "1", "false": "0", "": "nan", "na": "nan"}


def columns(path: str, named: Sequence[str], optional: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The columns ``named`` of a file, and those of ``optional`` that it has; raises `GraphError` for one without."""
    with open(path, encoding="utf-8-sig") as file:
        lines = [(number, _fields(line)) for number, line in enumerate(file, 1) if line.strip() and line[0] != "#"]
    head = lines[0][1] if lines else []
    begin = first_numbered(head)
    if begin or all(map(_is_number, head)):
        table = _numbers(path, lines[1:] if begin else lines, range(len(head)), len(head))
        return dict(zip(named, a_column_each(table, max(begin - 1, 0)), strict=True))
    if not set(named) <= set(head):
        raise GraphError(
            f"{user_site()}: a trace, {path}: expected the columns {', '.join(named)}, or a line for each "
            "step and a column for each replica, named by its number (worker0, worker1, …) or not at all, perhaps "
            f"behind one that is named step; its first line is {', '.join(head)}"
        )
    names = [name for name in (*named, *optional) if name in head]
    table = _numbers(path, lines[1:], [head.index(name) for name in names], len(head))
    return {name: v if name == "seconds" else whole(v) for name, v in zip(names, table.T, strict=True)}


def _fields(line: str) -> list[str]:
    line = line.strip("\r\n ")
    between = next((mark for mark in ";\t," if mark in line), None)
    fields = line.split(between) if between else re.split(" +", line)
    if between != ",":
        fields = [field.replace(",", ".") for field in fields]
    return [field.strip().strip('"') for field in fields]


def first_numbered(head: Sequence[str]) -> int:
    """The column, from 1 on, from which names are a word with one number after the other; 0 if they are not.

    Numbers alone are seconds, but where they are 0, 1, … and more than one, or behind a column of steps. ``seconds``
    are a single replica's, unless there are steps, as then a column of replicas may be missing.
    """
    if head in (["seconds"], ["", "seconds"]):
        return len(head)
    begin = int(head[:1] in ([""], ["step"]))
    names = [re.fullmatch(r"(\D*)(\d+)", name) for name in head[begin:]]
    found = [(name[1], int(name[2])) for name in names if name]
    word, first = found[0] if found else ("", 0)
    if found != [(word, first + place) for place in range(len(names))]:
        return 0
    known = first <= 1 if word else first == 0 and len(head) > 1
    return begin + 1 if known else 0


def a_column_each(table: NDArray[np.float64], begin: int) -> Iterator[NDArray[Any]]:
    """Steps, replicas and seconds of rows that are a step each, with a replica in each column from ``begin`` on."""
    step, replica = np.indices((len(table), table.shape[1] - begin))
    if begin:
        step = np.broadcast_to(whole(table[:, :1]), step.shape)
    return map(np.ravel, (step, replica, table[:, begin:]))


def _is_number(text: str) -> bool:
    try:
        float(WORDS.get(text.lower(), text))
    except ValueError:
        return False
    return True


def _numbers(
    path: str, lines: Sequence[tuple[int, Sequence[str]]], wanted: Sequence[int], width: int
) -> NDArray[np.float64]:
    """The ``wanted`` of the ``width`` fields of each line."""
    table = np.empty((len(lines), len(wanted)))
    for place, (number, fields) in enumerate(lines):
        if len(fields) != width:
            raise GraphError(
                f"{user_site()}: a trace, {path}: line {number} is {','.join(fields)}: expected {width} fields, as in "
                "the first line"
            )
        if not all(_is_number(fields[k]) for k in wanted):
            raise GraphError(f"{user_site()}: a trace, {path}: line {number} is {','.join(fields)}: expected numbers")
        table[place] = [float(WORDS.get(fields[k].lower(), fields[k])) for k in wanted]
    return table


def whole(values: NDArray[Any]) -> NDArray[Any]:
    """As integers, where they are."""
    return values.astype(np.int64) if np.isfinite(values).all() and (values == np.trunc(values)).all() else values
