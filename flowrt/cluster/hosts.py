"""Lists of hosts as batch systems write them: ``node[01-03,07],gpu-a[1-2]`` is six hosts, ``2(x3),1`` four counts.

The grammar is that of Slurm's ``scontrol show hostnames``: a name may have several ranges, which count like digits, the
last one fastest; what has leading zeros keeps its width.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

MOST = 1 << 16  # hosts in one list: a typing error is not to fill the memory
_RANGES = re.compile(r"\[([0-9,-]+)\]")
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")


def expand_hosts(text: str) -> list[str]:
    """The hosts that a list names, in its order. Raises `ValueError` that says what is wrong with it."""
    hosts: list[str] = []
    for part in _parts(text):
        hosts += expand_ranges(part)
        if len(hosts) > MOST:
            raise ValueError(f"{text!r} names more than {MOST} hosts")
    return hosts


def expand_ranges(text: str) -> list[str]:
    """What ``node[01-03,07].here`` stands for; a text without ranges for itself. Raises `ValueError`."""
    pieces = _RANGES.split(text)  # texts and ranges in turn
    choices = [
        _numbers(piece, text) if odd else [piece]
        for piece, odd in zip(pieces, itertools.cycle((False, True)), strict=False)
    ]
    if math.prod(map(len, choices)) > MOST:
        raise ValueError(f"{text!r} names more than {MOST} hosts")
    return ["".join(choice) for choice in itertools.product(*choices)]


def expand_counts(text: str) -> list[int]:
    """``2(x3),1`` as 2, 2, 2, 1. Raises `ValueError`."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None or (times := int(match[2] or 1)) > MOST:
            raise ValueError(f"{part!r} is not a count; write 2, or 2(x3) for three times 2")
        counts += [int(match[1])] * times
    return counts


def _parts(text: str) -> Iterator[str]:
    """The names between commas, but not those within brackets."""
    for part in re.split(r",(?![0-9,-]*\])", text):
        name = part.strip()
        if not name or re.search(r"[\[\]\s]", _RANGES.sub("0", name)):
            raise ValueError(f"{part!r} is no host; write them as in node[01-03,07],gpu-a[1-2]")
        yield name


def _numbers(ranges: str, text: str) -> list[str]:
    """The numbers of ``01-03,07``, as wide as they are written."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first:
            raise ValueError(f"{part!r} in {text!r} is not a range; write the lower number first, as in [01-03,07]")
        if last - first >= MOST:
            raise ValueError(f"{text!r} names more than {MOST} hosts")
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers
