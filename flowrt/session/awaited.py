"""A session that is handed over where its runs are awaited, or an error that says which one is taken."""

from __future__ import annotations

from typing import Any

from flowrt.base.errors import GraphError, user_site
from flowrt.session.session import Session


def awaited_session(value: Any, who: str) -> Session:
    """``value``, if it is a session whose runs are awaited; else raises `GraphError` that says what ``who`` takes."""
    if isinstance(value, Session):
        return value
    got = "an fr.BlockingSession" if type(value).__name__ == "BlockingSession" else repr(value)
    raise GraphError(
        f"{user_site()}: {who} takes an open fr.Session, as `async with fr.Session(graph) as session` gives, not {got}"
    )
