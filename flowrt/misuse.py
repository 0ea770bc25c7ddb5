"""What is opened the wrong way, and which way is right; and what a session says of itself."""

from __future__ import annotations

from typing import Any, NoReturn

from flowrt.base.errors import GraphError, user_site
from flowrt.base.telling import telling
from flowrt.base.tracebacks import brief


@brief
class AsyncOnly:
    """What ``async with`` opens; `WHAT` is how it is written, `INSTEAD` what else there is where nothing is awaited."""

    WHAT = ""
    INSTEAD = ""

    def __enter__(self) -> NoReturn:
        raise GraphError(f"{user_site()}: open {self.WHAT} with `async with`, in an `async def`{self.INSTEAD}")

    def __exit__(self, *error: object) -> None:
        """Never reached: nothing was opened."""


@telling
def standing(session: Any) -> str:
    """What a session says it is: of which graph, where, and whether it is open."""
    where = "in this process" if session._cluster is None else f"on {session._cluster!r}"
    state = "closed" if session._closed else "not open yet" if session._runner is None else "open"
    return f"fr.Session of {len(session.graph.nodes)} nodes {where}, {state}"
