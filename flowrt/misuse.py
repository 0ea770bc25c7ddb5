"""What is opened or made the wrong way, and which way is right; and what a session says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from flowrt.base.errors import GraphError, user_site
from flowrt.base.familiar import hint
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


class OptimizerElsewhere:
    """What programs for other libraries make an optimiser of, and ask it for."""

    if not TYPE_CHECKING:

        @brief
        def __new__(cls, *settings: Any, **named: Any) -> Any:
            if settings and isinstance(settings[0], (list, tuple, dict, set, Iterator)):
                raise GraphError(
                    f"{user_site()}: an optimiser is made of numbers, as in fr.optim.{cls.__name__}(lr=0.1), and moves "
                    "what minimize(loss, variables) names, by default all trainable variables"
                )
            return super().__new__(cls)

        @brief
        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{hint('an optimiser', name)}")


@telling
def standing(session: Any) -> str:
    """What a session says it is: of which graph, where, and whether it is open."""
    where = "in this process" if session._cluster is None else f"on {session._cluster!r}"
    state = "closed" if session._closed else "not open yet" if session._runner is None else "open"
    return f"fr.Session of {len(session.graph.nodes)} nodes {where}, {state}"
