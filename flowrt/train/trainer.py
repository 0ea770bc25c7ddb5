"""A trainer as the nodes of sessions have it: for each session its programs, and who holds its variables."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from flowrt.train.built import Built
from flowrt.train.copies import Copies, copies_known
from flowrt.train.making import Maker

if TYPE_CHECKING:
    from flowrt.session.session import Session
    from flowrt.train.compression import PackingChoice
    from flowrt.train.program import Program


class Trainer(Built):
    """What was built, and what runs of it are given to the nodes of a session."""

    @cached_property
    def _makers(self) -> WeakKeyDictionary[Session, Maker]:
        return WeakKeyDictionary()

    async def program(self, session: Session, gone: frozenset[str] = frozenset()) -> Program:
        """What the nodes of ``session`` run, made once for those that are there, with no server on those ``gone``."""
        return await self._maker(session).program(gone)

    def packing_in(self, session: Session) -> PackingChoice:
        """How updates are packed in runs on the nodes of ``session``."""
        return self._maker(session).packing

    async def copies_on(self, session: Session) -> Copies:
        """The variables that are held twice on the nodes of ``session``."""
        known, maker = copies_known(session, self), self._maker(session)
        return known or Copies(session, self, maker.holders(), maker.guide)

    async def keep_copies(self, session: Session) -> None:
        if len(set(self.servers)) > 1:  # else nobody can, which is said where training is to begin
            await (await self.copies_on(session)).open()

    def _maker(self, session: Session) -> Maker:
        maker = self._makers.get(session)
        if maker is None:
            maker = self._makers[session] = Maker(session, self)
        return maker
