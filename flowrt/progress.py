"""What takes long says so: once, after two seconds, on stderr, what it is and how far it has come.

Law: an `Activity` that is over sooner says nothing, and costs the start of a thread. Where stderr is a terminal, `rich`
draws a bar there until the activity is over. Elsewhere it is one line: a record of the logger ``flowrt`` where the
program has set up logging, which decides what becomes of it, else written to stderr as it is, since to set up logging
is not a library's business. ``FLOWRT_QUIET=1`` silences both.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

SECONDS = 2.0
REDRAWN_EVERY = 0.2
draws = True  # False in processes whose terminal is another's, as that of a cluster's nodes is
_log = logging.getLogger("flowrt")
_terminal = threading.Lock()  # held by the one activity that draws
_active: list[Activity] = []  # in the order in which they began


class Activity:
    """``with Activity("restoring", of=12) as activity: activity.done += 1``: work that may take long.

    ``of`` is how much there is in all, None where nobody knows; ``left`` may say what is missing. All may change
    meanwhile, from any thread, or be set by ``look``, which is called before anything is told. An activity that is
    entered again goes on. It is told again only where there turns out to be more than twice as much as was told. While
    another goes on that began later, only that is told.
    """

    def __init__(self, what: str, of: int | None = None, *, look: Callable[[Activity], None] | None = None) -> None:
        self.what, self.of, self.done, self.left = what, of, 0, ""
        self._look = look
        self._began = time.monotonic()
        self._told: int | None = None  # how much there was in all when it was told
        self._over = threading.Event()
        self._watch: threading.Thread | None = None

    def __str__(self) -> str:
        far = "" if self.of is None else f", {self.done} of {self.of}"
        return f"{self.what}{far}{self.left and f': {self.left}'}"

    def __enter__(self) -> Activity:
        self._over, self._watch = threading.Event(), None
        _active.append(self)
        if os.environ.get("FLOWRT_QUIET", "0") in ("", "0"):
            watch = threading.Thread(target=self._watch_over, name="flowrt-progress", daemon=True)
            with suppress(RuntimeError):  # there can be no more threads: nobody is told
                watch.start()
                self._watch = watch
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        _active.remove(self)
        if self._watch is not None:
            self._watch.join()

    def _watch_over(self) -> None:
        with suppress(OSError, ValueError):  # stderr is closed, or nobody reads it
            self._tell()

    def _tell(self) -> None:
        if self._over.wait(max(0.0, self._began + SECONDS - time.monotonic())):
            return
        while True:
            if self._is_latest():
                self._refresh()
                if draws and sys.stderr is not None and sys.stderr.isatty():
                    self._draw()
                elif self._told is None or (self.of or 0) > 2 * self._told:
                    self._told = self.of or 0
                    say(str(self))
            if self._over.wait(REDRAWN_EVERY):
                return

    def _is_latest(self) -> bool:
        """Whether no other activity began later, which is likely to be what this one waits for."""
        return _active[-1:] == [self]

    def _refresh(self) -> None:
        if self._look is not None:
            self._look(self)

    def _draw(self) -> None:
        """Draw a bar until the activity is over, or another is the latest."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        counted = () if self.of is None else (BarColumn(), MofNCompleteColumn())
        texts = [TextColumn(text, markup=False) for text in ("flowrt: {task.description}", "{task.fields[left]}")]
        columns = (SpinnerColumn(), texts[0], *counted, texts[1], TimeElapsedColumn())
        with (
            _terminal,
            Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar,
        ):
            task = bar.add_task(self.what, total=self.of, left=self.left)
            while self._is_latest() and not self._over.is_set():
                self._refresh()
                bar.update(task, description=self.what, completed=self.done, total=self.of, left=self.left)
                bar.refresh()
                self._over.wait(REDRAWN_EVERY)


def say(text: str) -> None:
    """One line for the user: to the program's logging where it has set that up, else to stderr."""
    if _log.hasHandlers():
        _log.info("%s", text)
    elif sys.stderr is not None:
        print(f"flowrt: {text}", file=sys.stderr, flush=True)
