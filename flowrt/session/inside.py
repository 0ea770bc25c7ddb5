"""A session as its parts see it: its steps, what fills its queues, and its checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from flowrt.graph import Graph, Resource
    from flowrt.placement import Rules
    from flowrt.sched.tape.direct import Numbers
    from flowrt.session.options import Options
    from flowrt.session.resting import Rests
    from flowrt.session.runners import Runner


class Inside(Protocol):
    """What `session.Session` is to files of this room that it is made of."""

    graph: Graph
    options: Options
    checkpoints: Any
    rests: Rests
    _numbers: Numbers
    _placement: Rules | None
    _iterating: dict[Any, Callable[[], Coroutine[Any, Any, None]]]

    @property
    def next_number(self) -> int: ...

    def fresh_number(self) -> int: ...

    def skip_numbers(self, number: int) -> None: ...

    async def start_over(self) -> bool: ...

    async def run_uncounted(self, fetches: Any, feeds: Mapping[Any, Any] | None = None) -> Any: ...

    async def fill(self, step: Any, values: Sequence[Any]) -> None: ...

    def retire(self, *steps: Any) -> None: ...

    def _held(self) -> Mapping[tuple[str, str], Resource]: ...

    def _open(self) -> Runner: ...

    def _open_here(self) -> Runner: ...

    def _attempt(self, step: Any, arrays: Sequence[Any], choose: Callable[[Any], None], within: float = ...) -> Any: ...

    async def _run(self, step: Any, arrays: Sequence[Any], *, number: int | None = None) -> Any: ...
