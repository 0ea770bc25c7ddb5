"""Delays as text, as they stand on a command line: `parse` reads what ``str`` of a delay writes.

delay  = part { "+" part }
part   = ( seconds | KIND ":" what it takes | "(" delay ")" ) { limit }
limit  = "at" PLACE | "on" REPLICA { "," REPLICA } | "during" [ from ] ":" [ to ]     steps, or seconds: 5s:8s

0.2                                 exponential:0.05 at input             pauses:50,2 at frozen during 100:200
shifted:0.8,0.2 + 5 on 3            correlated:(lognormal:1,0.3),(0.2)    trace:"seconds.parquet"
"""

from __future__ import annotations

import json
import re
from math import inf
from typing import Any, NoReturn

from flowrt.base.errors import GraphError, user_site
from flowrt.base.valueclass import replace
from flowrt.delays.delay import Delay, add, as_delay, kinds

_TOKEN = re.compile(
    r"""\s*(?: (?P<number> -?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?=[\s+():,;]|$) | (?:nan|-?inf)(?![^\s+():,;]) )
             | (?P<quoted> "(?:[^"\\]|\\.)*" )
             | (?P<mark> [+():,;] )
             | (?P<word> [^\s+():,;"]+ ) )""",
    re.VERBOSE,
)


def parse(delay: str | float | Delay) -> Delay:
    """The delay that a text spells; a number is that many seconds. Raises `GraphError` at the user's line."""
    return _TextReader(delay).read() if isinstance(delay, str) else as_delay(delay)


class _TextReader:
    """Reads one text from left to right."""

    def __init__(self, text: str) -> None:
        self._text, self._tokens, self._at = text, list[tuple[str, str]](), 0
        at, end = 0, len(text.rstrip())
        while at < end:
            match = _TOKEN.match(text, at)
            if match is None:
                self._refuse(f"cannot be read from {text[at:]!r} on")
            kind = str(match.lastgroup)
            self._tokens.append((kind, match[kind]))
            at = match.end()

    def read(self) -> Delay:
        delay = self._delay()
        if self._next[1]:
            self._refuse(f"goes on with {self._next[1]!r}")
        return delay

    # ── delays ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _delay(self) -> Delay:
        parts = list(self._limited().parts)
        while self._took("+"):
            parts += self._limited().parts
        return add(parts)

    def _limited(self) -> Delay:
        delay = self._plain()
        while True:
            if self._took("at"):
                delay = self._placed(delay)
            elif self._took("on"):
                delay = delay.on(*self._row())
            elif self._took("during"):
                delay = self._during(delay)
            else:
                return delay

    def _plain(self) -> Delay:
        if self._took("("):
            delay = self._delay()
            self._expect(")")
            return delay
        kind, text = self._take()
        if kind == "number":
            return as_delay(float(text))
        if text not in kinds:
            file = f"; a file is read by fr.delays.Trace({text!r})" if "." in text or "/" in text else ""
            self._refuse(f"has {text!r} where a delay is expected: seconds, or {', '.join(sorted(kinds))}{file}")
        self._expect(":")
        rows = [self._row()]
        while self._took(";"):
            rows.append(self._row())
        try:
            return kinds[text].of_rows(rows)
        except TypeError:
            takes = ", ".join(kinds[text].takes())
            self._refuse(f"gives {text} {len(rows[0])} numbers, it takes {takes}")

    def _placed(self, delay: Delay) -> Delay:
        place = self._take()[1]
        parts = [replace(part, at=place) for part in delay.parts]
        for part in parts:
            part.check_place()
        return add(parts)

    def _during(self, delay: Delay) -> Delay:
        first, unit = self._end(0)
        self._expect(":")
        stop, other = self._end(inf)
        if unit and other and unit != other:
            self._refuse("has a window that begins in steps and ends in seconds, or the other way round")
        return delay.during(first, stop, unit="seconds" if "s" in (unit, other) else "steps")

    # ── what they take ───────────────────────────────────────────────────────────────────────────────────────────────

    def _row(self) -> list[Any]:
        row = [self._item()]
        while self._took(","):
            row.append(self._item())
        return row

    def _item(self) -> Any:
        """A number, a text or, in parentheses, a delay."""
        if self._next[1] == "(":
            return self._plain()
        kind, text = self._take()
        if kind == "mark":
            self._refuse(f"has {text!r} where a number is expected")
        return float(text) if kind == "number" else json.loads(text) if kind == "quoted" else text

    def _end(self, without: float) -> tuple[float, str]:
        """An end of a window, if there is one, and its unit: "s", "steps" or, without an end, none."""
        if self._next[1] not in (":", "", "+", ")", "at", "on", "during"):
            text = self._take()[1]
            try:
                return (float(text[:-1]), "s") if text.endswith("s") else (float(text), "steps")
            except ValueError:
                self._refuse(f"has a window with {text!r} for an end; write steps as 100:200, seconds as 5s:8s")
        return without, ""

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _next(self) -> tuple[str, str]:
        """The next token's kind and text, empty at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else ("", "")

    def _take(self) -> tuple[str, str]:
        if not self._next[1]:
            self._refuse("ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def _took(self, text: str) -> bool:
        there = self._next[1] == text
        self._at += there
        return there

    def _expect(self, mark: str) -> None:
        if not self._took(mark):
            self._refuse(f"has {self._next[1]!r} where {mark!r} is expected" if self._next[1] else f"lacks a {mark!r}")

    def _refuse(self, what: str) -> NoReturn:
        raise GraphError(
            f"{user_site()}: {self._text!r} is not a delay: it {what}; write seconds as 0.2, "
            "or for example exponential:0.05 at input on 3 during 100:200"
        )
