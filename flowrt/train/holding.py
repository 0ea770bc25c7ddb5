"""Who holds which variables of a trainer, and how one that is to hold them is led there: values, and who finds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from flowrt.base.device import Device
from flowrt.base.errors import GraphError
from flowrt.base.valueclass import valueclass
from flowrt.op import as_value
from flowrt.passes import Compiled, Ends
from flowrt.train.built import name_of

if TYPE_CHECKING:
    from flowrt.base.spec import Spec
    from flowrt.train.built import Built

LITTLE = 4  # one part in so many
Name: TypeAlias = tuple[str, str]
Compile: TypeAlias = Callable[..., Compiled]


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


def held_compiler(trainer: Built, compiler: Compile) -> Compile:
    """What compiles for servers: where all is held twice, as if all were there, each with what is at home on it."""
    return partial(compiler, stand_ins={}, there=trainer.servers) if trainer.copies > 1 else compiler


def find_places(trainer: Built, compiler: Compile) -> dict[Name, Device]:
    """Where all that applying updates works on is at home."""
    reads = [as_value(variable) for variable in trainer.moved]
    placed = held_compiler(trainer, compiler)(reads, [], [], ends=Ends.USED).placement
    return {read.op.resources[0]: Device.parse(placed[read.op.name]) for read in reads}


def holders_at(trainer: Built, places: Mapping[Name, Device]) -> Holders:
    """Who holds what. Raises `GraphError` where nothing could be held twice that is to be."""
    steps: dict[str, tuple[str, ...]] = {}
    for shard in trainer.shards:
        task = places[name_of(shard.step)].host
        steps[task] = (*steps.get(task, ()), shard.step.name)
    if trainer.copies > 1 and len(steps) < 2:
        raise GraphError(
            f"copies={trainer.copies} of {trainer.name!r}: all its servers are on {next(iter(steps))}, and a copy is "
            "to survive its task; give it servers=2 or more, and two tasks to put them on"
        )
    known = trainer.graph.resources
    variables: dict[str, dict[Name, tuple[Spec, str]]] = {task: {} for task in steps}
    for name, device in places.items():
        if device.host in variables:
            variables[device.host][name] = known[name].specs[0], device.local
    return Holders(tuple(steps), variables, steps)
