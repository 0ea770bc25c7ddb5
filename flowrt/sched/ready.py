"""What is ready to run: one way for a node, a region's tape, and a direct call.

Law: what is `Computing` knows, or makes, the `ReadyRun` for inputs of one kind, and runs that. Whether it is run now or
in a lane is decided by the seconds that are expected of it (`running`). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from flowrt.base.valueclass import valueclass

if TYPE_CHECKING:
    from flowrt.base.plan import PlanNode
    from flowrt.sched.host.memory import Memory
    from flowrt.sched.host.rendezvous import Array


class ReadyRun(Protocol):
    """What computes inputs of one kind, such as a tape."""

    @property
    def expected_seconds(self) -> float:
        """A rough guess of one run; infinite where nobody can tell."""

    def took(self, seconds: float) -> None:
        """Learn from a whole run that took so long."""


class Computing(Protocol):
    """Computes a node of a plan, or a region. May be called from any thread."""

    def known(self, inputs: Sequence[Any]) -> ReadyRun | None:
        """What computes inputs like these, if there were such before and nothing better since; compiles nothing."""

    def ready(self, inputs: Sequence[Any]) -> ReadyRun:
        """The same, made if need be."""

    def run(self, ready: Any, inputs: Sequence[Any], words: Array) -> Sequence[Any]:
        """The outputs for C-contiguous ``inputs``, by what is ``ready`` for them; ``words`` are the run's.

        Raises `StepCancelled` if the run was stopped, and `FlowrtError` with the kernel's reason where it fails.
        """


@valueclass
class Guessed:
    """What is expected of a run from which nothing is learnt: the next one may be another."""

    expected_seconds: float

    def took(self, seconds: float) -> None:
        """Nothing to learn."""


AT_ONCE, LONG = Guessed(0.0), Guessed(math.inf)


class GuessingRunner:
    """Computes a node for which nothing is made ready; what it takes is guessed from the inputs."""

    def __init__(self, node: PlanNode, memory: Memory) -> None:
        self.node = node
        self._memory = memory

    def expected_seconds(self, inputs: Sequence[Any]) -> float:
        """A guess of one run; infinite where how often it iterates depends on values."""
        return math.inf

    def known(self, inputs: Sequence[Any]) -> ReadyRun:
        return Guessed(self.expected_seconds(inputs))

    ready = known

    def run(self, ready: Any, inputs: Sequence[Any], words: Array) -> Sequence[Any]:
        return self(inputs, words)

    def __call__(self, inputs: Sequence[Any], words: Array) -> Sequence[Any]:
        """The outputs."""
        raise NotImplementedError
