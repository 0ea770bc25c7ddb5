"""The names of a task's devices."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from flowrt.base.device import HOST_KIND
from flowrt.base.errors import GraphError

if TYPE_CHECKING:
    from collections.abc import Iterable

HOST = f"{HOST_KIND}:0"


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names of devices as ``cuda:0`` or, for all of a kind, ``cuda``. Raises `GraphError` for anything else."""
    found = (names,) if isinstance(names, str) else tuple(names)
    for name in found:
        if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*(:\d+)?", name):
            raise GraphError(f"devices are named as in cpu:0, cuda:0 or, for all of a kind, cuda; got {name!r}")
        if name.split(":")[0] == HOST_KIND and name not in (HOST_KIND, HOST):
            raise GraphError(f"the host is one device, {HOST}, whose threads are as many as are asked for; got {name}")
    return found
