"""Delays that were recorded."""

from __future__ import annotations

import json
import os
from dataclasses import field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flowrt.base.valueclass import valueclass
from flowrt.delays import parquet
from flowrt.delays.delay import Seconds, Term, number_text


@valueclass
class Trace(Term):
    """Seconds that were recorded, step after step and replica by replica, from the beginning again at the end.

    ``source`` is an array of seconds [steps, replicas], or [steps] for all replicas alike, or the path of a file:
    a Parquet file that `save` or a trainer's statistics wrote, or a trace of operations (columns: see `parquet`), or
    CSV, of columns ``step,replica,seconds``, or a line of numbers for each step, perhaps below one that numbers the
    replicas, as ``step,worker0,worker1`` does. Step s of replica r takes row s modulo the steps and column r modulo the
    replicas. Raises `GraphError` for a file without its columns, for what is empty, and for seconds that are negative
    or not finite.
    """

    source: Any
    seconds: NDArray[np.float64] = field(init=False, compare=False, kw_only=True)

    WORD: ClassVar[str] = "trace"

    def check(self) -> None:
        if isinstance(self.source, (str, os.PathLike)):
            path = os.fspath(self.source)
            seconds = parquet.load(path)
            object.__setattr__(self, "source", path)
        else:
            seconds = parquet.as_table(self.source, "a trace")
            object.__setattr__(self, "source", tuple(map(tuple, seconds.tolist())))
        seconds.flags.writeable = False
        object.__setattr__(self, "seconds", seconds)

    def draw(self, rng: np.random.Generator, step: int, replicas: int) -> Seconds:
        return np.resize(self.seconds[step % len(self.seconds)], replicas)

    @property
    def described(self) -> str:
        if isinstance(self.source, str):
            return f"{self.WORD}:{json.dumps(self.source)}"
        return f"{self.WORD}:{';'.join(','.join(map(number_text, row)) for row in self.source)}"

    @classmethod
    def of_rows(cls, rows: list[list[Any]]) -> Trace:
        """What the text of a trace says: a file, or the seconds themselves."""
        match rows:
            case [[str(path)]]:
                return cls(path)
            case _:
                return cls(rows)
