"""File descriptors: how many this process may have, and what to say once it has them."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress


def most_descriptors() -> int:
    """How many this process may have."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if most == resource.RLIM_INFINITY else most


def take_descriptors() -> None:
    """Have as many as the system allows, and not the few that programs are given by default."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems have an end of it where they say none
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def out_of_descriptors(error: BaseException) -> str:
    """That ``error`` is for want of them, and what to do; empty if it is not."""
    number = getattr(error, "errno", None)
    if number not in (errno.EMFILE, errno.ENFILE):
        return ""
    return f"{os.strerror(number)}: this process may have {most_descriptors()}; raise `ulimit -n`"
