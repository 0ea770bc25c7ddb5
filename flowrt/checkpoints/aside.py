"""A thread that works where others leave a core idle.

Law: it asks the system for that by its niceness; but that counts only among the threads of one group: Linux groups by
session, and by container, and shares cores out among groups whatever their threads say. So it also looks how long it
was ready to run and was not let, which is how long it wanted a core that another had, and rests for longer than that.
What it waits for otherwise, a disk or a network, it waits for as ever.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

NICENESS = 10  # more, and who is put off in the middle of Python holds up all of the process for long
REST = 4  # seconds of rest for each in which a core was another's
LONGEST = 0.1  # of one rest, in seconds
_WAITED = Path("/proc/thread-self/schedstat")  # nanoseconds run, nanoseconds ready and not run, how often


class Aside:
    """The calling thread steps aside from now on; it calls this now and then."""

    def __init__(self) -> None:
        if sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, NICENESS)  # there, of this thread alone
        self._put_off = _put_off()

    def __call__(self) -> None:
        """Rest, if others wanted the core since the last time."""
        rest = REST * (_put_off() - self._put_off)
        if rest > 0:
            time.sleep(min(rest, LONGEST))
        self._put_off = _put_off()


def _put_off() -> float:
    """For how many seconds the calling thread was ready to run and did not, so far; 0 where that is not told."""
    try:
        return int(_WAITED.read_bytes().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0
