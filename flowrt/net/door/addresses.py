"""Addresses as people write them, and which of them are this machine's own."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

_TASK = re.compile(r"/job:[A-Za-z][A-Za-z0-9_]*/task:\d{1,9}")
UNREACHABLE = (OSError, ValueError, OverflowError)  # the system's, and Python's of a host or port that can be none


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine, to itself."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_place(host: str, port: int) -> bool:
    """Whether somebody could be there."""
    return host != "" and 0 < port < 1 << 16


def is_task_at(task: Any, host: Any, port: Any) -> bool:
    """Whether a node could be that task, and there, whatever those are."""
    types = type(task), type(host), type(port)
    return types == (str, str, int) and _TASK.fullmatch(task) is not None and is_place(host, port)


def is_any(host: str) -> bool:
    """Whether who listens on ``host`` listens on every network of this machine."""
    try:
        return host == "" or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def named(address: tuple[Any, ...] | None) -> str:
    """A socket's address, for people."""
    host, port = (address or ("unknown", 0))[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
