"""What is left to do when a parameter server is lost whose variables nobody else holds: wait for it, and go back.

Law: the newest checkpoint is of one version on all servers, so restored as a whole it is where a run can begin. What
came after it is undone, and is told: in the log, and with the next report.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowrt.base.valueclass import valueclass
from flowrt.progress import Activity

if TYPE_CHECKING:
    from flowrt.session.session import Session

_log = logging.getLogger(__name__)


@valueclass
class RolledBack:
    """Parameter servers were ``lost``, and training went back to where a checkpoint had it: after ``step`` steps.

    Steps up to ``until`` had been made, as far as reports told. It stood still for ``seconds``.
    """

    lost: tuple[str, ...]
    step: int
    until: int
    seconds: float

    @property
    def undone(self) -> range:
        """The steps that were reported, and are undone: what is reported from now on takes their place."""
        return range(self.step + 1, self.until + 1)

    def __str__(self) -> str:
        undone = self.undone
        which = f"steps {undone[0]} to {undone[-1]} are undone" if undone else "no step is undone"
        values = "as the newest checkpoint has it" if self.step else "with the values that it began with"
        return (
            f"training goes on from step {self.step}, {values}, {self.seconds:.1f} s after "
            f"{', '.join(self.lost)} was lost; {which}"
        )


async def wait_for_servers(session: Session, trainer: str, servers: Sequence[str], what: str) -> tuple[str, ...]:
    """Wait until none of ``servers`` is lost, and say so; ``what`` tells people what waits. Answers who was."""
    waited: dict[str, None] = {}
    runner = session._open_here()
    with Activity(f"{trainer}: {what}, and goes back to a checkpoint once its servers are there") as activity:
        said: list[str] = []
        while gone := [task for task in servers if task in runner.lost]:
            activity.left = f"waiting for {', '.join(gone)}"
            if gone != said:
                _log.warning("%s: %s, and goes back to a checkpoint once %s is there", trainer, what, ", ".join(gone))
            said = gone
            waited |= dict.fromkeys(gone)
            await runner.wait_changed(runner.lost, runner.suspects)
    return tuple(waited)
