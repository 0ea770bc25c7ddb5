"""Addresses as people write them, and which of them are this machine's own."""

from __future__ import annotations

import ipaddress
from typing import Any

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
