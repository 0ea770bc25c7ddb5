"""Programs of a trainer for a session: of parts that are made once, and of more as more nodes come."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from flowrt.session.runners import compile_for
from flowrt.train.compression import PackingChoice
from flowrt.train.holding import find_places, holders_at
from flowrt.train.program import ProgramParts, away

if TYPE_CHECKING:
    from flowrt.session.session import Session
    from flowrt.train.built import Built
    from flowrt.train.holding import Guide, Holders
    from flowrt.train.program import Program


class Maker:
    """Makes the program of ``trainer`` on the nodes of ``session``, and more of it as more of them come.

    It must not know the session, by which it is kept.
    """

    def __init__(self, session: Session, trainer: Built) -> None:
        runner, options = session._open_here(), session.options
        self._runner, self._trainer = runner, trainer
        compiler = partial(compile_for, runner, trainer.graph, optimize=options.optimize, placement=session._placement)
        self._compiler = compiler
        self._make = partial(ProgramParts, trainer, runner, compiler, session._seed, options.optimize)
        self._made: ProgramParts | None = None
        self._lost: frozenset[str] = frozenset()  # when that was made
        self._making = asyncio.Lock()
        self.packing = PackingChoice(trainer.compression)

    async def program(self, gone: frozenset[str] = frozenset()) -> Program:
        """The program for the nodes that are not `away`, its servers on tasks that are not ``gone``.

        Raises what compiling raises, and `GraphError` for what nodes cannot do by themselves.
        """
        made = await self._maker()
        self.packing.see(self._runner, [tower.home for tower in made.towers.values()], made.holders.tasks)
        return made.program(gone, self.packing)

    def holders(self) -> Holders:
        """Who holds what."""
        return holders_at(self._trainer, find_places(self._trainer, self._compiler))

    async def guide(self, task: str, gone: frozenset[str]) -> Guide:
        """How a task comes to hold what it should: see `Parts.guide`."""
        return (await self._maker()).guide(task, gone)

    async def _maker(self) -> ProgramParts:
        async with self._making:
            lost = away(self._runner, self._trainer)
            if self._made is None or (lost != self._lost and not self._made.is_fixed):
                made = self._make()
                await made.make()
                self._made, self._lost = made, lost
            elif not self._lost <= lost:  # somebody is there for whom there is no plan
                await self._made.make()
                self._lost &= lost
            return self._made
