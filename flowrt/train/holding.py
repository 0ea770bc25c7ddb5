"""Who holds which variables of a trainer, and how one that is to hold them is led there: values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from flowrt.base.valueclass import valueclass

if TYPE_CHECKING:
    from flowrt.base.spec import Spec

LITTLE = 4  # one part in so many
Name: TypeAlias = tuple[str, str]


@valueclass
class Holders:
    """What each task that a server is on holds: variables, by (container, name), each with its spec and its device.

    ``steps`` are the names of those that hold its version. Where all is held twice, the task after another one, in
    order, holds what that one does, too.
    """

    tasks: tuple[str, ...]
    variables: Mapping[str, Mapping[Name, tuple[Spec, str]]]
    steps: Mapping[str, tuple[str, ...]]

    def after(self, task: str) -> str:
        """Who holds, too, what ``task`` does."""
        return self.tasks[(self.tasks.index(task) + 1) % len(self.tasks)]

    def before(self, task: str) -> str:
        """Whose variables ``task`` holds, too."""
        return self.tasks[self.tasks.index(task) - 1]


@valueclass
class Leading:
    """What one task tells another: variables with their specs, and which parts of an update move them."""

    task: str
    variables: tuple[tuple[Name, Spec], ...]
    parts: tuple[int, ...]


@valueclass
class Guide:
    """How a task is led: by whom, by which plan it applies updates, and what that is fed: see `Follow`.

    ``dense`` bytes at least are told of every update.
    """

    task: str
    container: str
    group: str
    leaders: tuple[Leading, ...]
    apply: int
    applied: tuple[tuple[int, int], ...]
    seed: int
    dense: int = 0

    @property
    def pays(self) -> bool:
        """Whether what is told of a version is little beside the variables: else to catch up is to copy them again."""
        held = sum(spec.nbytes for leading in self.leaders for _, spec in leading.variables)
        return self.dense <= held // LITTLE
