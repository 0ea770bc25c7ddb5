"""Seconds of replicas, step by step, in files of text: as spreadsheets, NumPy and pandas write them.

Either a line for each step and a column for each replica, or a line that names columns, of which ``step``,
``replica``, ``seconds``, and perhaps ``censored``, mean what they do in `flowrt.delays.parquet`. In the first case
there are numbers alone, or a line before them numbers the replicas, as ``step,worker0,worker1`` and the ``,0,1`` of
pandas do: in their order, from 0 on or, with a word, from 1, perhaps behind a column of steps. What is between the
columns are commas, semicolons, tabs or blanks; what is left empty is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowrt.base.errors import GraphError, user_site

WORDS = {"true": "1", "false": "0", "": "nan"}


def columns(path: str, named: Sequence[str], optional: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The columns ``named`` of a file, and those of ``optional`` that it has; raises `GraphError` for one without."""
    with open(path, encoding="utf-8-sig") as file:
        lines = [(number, _fields(line)) for number, line in enumerate(file, 1) if line.strip() and line[0] != "#"]
    head = lines[0][1] if lines else []
    if begin := _first_numbered(head):
        return dict(zip(named, _a_column_each(path, lines[1:], len(head), begin - 1), strict=True))
    if all(map(_is_number, head)):
        return dict(zip(named, _a_column_each(path, lines, len(head), 0), strict=True))
    if not set(named) <= set(head):
        raise GraphError(
            f"{user_site()}: a trace, {path}: expected the columns {', '.join(named)}, or a line for each "
            "step and a column for each replica, named by its number (worker0, worker1, …) or not at all; its first "
            f"line is {', '.join(head)}"
        )
    names = [name for name in (*named, *optional) if name in head]
    table = _numbers(path, lines[1:], [head.index(name) for name in names], len(head))
    return {name: v if name == "seconds" else _whole(v) for name, v in zip(names, table.T, strict=True)}


def _fields(line: str) -> list[str]:
    line = line.strip("\r\n ")
    between = next((mark for mark in ",;\t" if mark in line), None)
    fields = line.split(between) if between else re.split(" +", line)
    return [field.strip().strip('"') for field in fields]


def _first_numbered(head: Sequence[str]) -> int:
    """The column, from 1 on, from which a line is a word with one number after the other; 0 if it is not.

    Numbers alone are seconds, but where they are 0, 1, … and more than one, or behind a column of steps.
    """
    begin = int(head[:1] in ([""], ["step"]))
    names = [re.fullmatch(r"(\D*)(\d+)", name) for name in head[begin:]]
    found = [(name[1], int(name[2])) for name in names if name]
    word, first = found[0] if found else ("", 0)
    if found != [(word, first + place) for place in range(len(names))]:
        return 0
    known = first <= 1 if word else first == 0 and len(head) > 1
    return begin + 1 if known else 0


def _a_column_each(
    path: str, lines: Sequence[tuple[int, Sequence[str]]], width: int, begin: int
) -> Iterator[NDArray[Any]]:
    """Steps, replicas and seconds of lines that are a step each, with a replica in each column from ``begin`` on."""
    table = _numbers(path, lines, range(width), width)
    step, replica = np.indices((len(table), width - begin))
    if begin:
        step = np.broadcast_to(_whole(table[:, :1]), step.shape)
    return map(np.ravel, (step, replica, table[:, begin:]))


def _is_number(text: str) -> bool:
    try:
        float(text or "nan")
    except ValueError:
        return False
    return True


def _numbers(
    path: str, lines: Sequence[tuple[int, Sequence[str]]], wanted: Sequence[int], width: int
) -> NDArray[np.float64]:
    """The ``wanted`` of the ``width`` fields of each line."""
    table = np.empty((len(lines), len(wanted)))
    for place, (number, fields) in enumerate(lines):
        texts = [WORDS.get(field.lower(), field) for field in fields]
        if len(fields) != width or not all(_is_number(texts[k]) for k in wanted):
            raise GraphError(f"{user_site()}: a trace, {path}: line {number} is {','.join(fields)}: expected numbers")
        table[place] = [float(texts[k]) for k in wanted]
    return table


def _whole(values: NDArray[np.float64]) -> NDArray[Any]:
    """As integers, where they are."""
    return values.astype(np.int64) if (values == np.trunc(values)).all() else values
