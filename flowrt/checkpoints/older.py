"""Checkpoints of format 1: one file of bytes, ``data``, with a digest over it all, and a manifest that wraps another.

Law: pure. They are read for good, and not written any more.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from flowrt.base.errors import FlowrtError
from flowrt.checkpoints.manifest import (
    MANIFEST,
    File,
    Manifest,
    Name,
    NotWhole,
    SavedPart,
    Stored,
    of,
    order_from_data,
    renamed_from_data,
    row_count,
    said,
    spec_from_data,
)

FORMAT, DATA, BLAKE2B = 1, "data", "blake2b"


def is_older(outer: dict[str, Any]) -> bool:
    """Whether a manifest is of format 1."""
    return outer.keys() == {"manifest", "digest"}


def from_data(outer: dict[str, Any], nbytes: int) -> Manifest:
    """What a manifest of format 1 says, beside which lie ``nbytes`` of data. Raises `NotWhole`."""
    try:
        text = of(str, outer["manifest"])
        if hashlib.blake2b(text.encode(), digest_size=32).hexdigest() != outer["digest"]:
            raise ValueError("it does not match its digest")
        data = of(dict, json.loads(text))
        if data["format"] != FORMAT:
            raise ValueError(f"it is of format {data['format']!r:.100}")
        variables = dict(_variable(of(dict, each), nbytes) for each in of(list, data["variables"]))
        return Manifest(
            of(int, data["step"]),
            of(int, data["run"]),
            0.0,
            variables,
            (File(DATA, nbytes, nbytes, of(str, data["data"]), BLAKE2B),),
            order_from_data(data.get("order")),
            renamed_from_data(data.get("renamed", {})),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, FlowrtError) as error:
        raise NotWhole(f"{MANIFEST}: {said(error)}") from error


def _variable(fields: dict[str, Any], nbytes: int) -> tuple[Name, Stored]:
    name = of(str, fields["container"]), of(str, fields["name"])
    spec, offset = spec_from_data(fields), of(int, fields["offset"])
    if not 0 <= offset <= nbytes - spec.nbytes:
        raise ValueError(f"variable {name[1]!r} lies outside the data")
    return name, Stored(spec, (SavedPart(DATA, name[1], offset, 0, row_count(spec), ""),))
