"""Decides, for one run of one plan: what may launch, what is dead, what to free, and when the step is done.

Law: ints in, ints out. It owns readiness, deadness, frames, last use and failure; it knows no op, device, clock, thread
or value. The executor obeys: it applies `free` before it starts `launch`, and completes every launched activation
exactly once, also one that failed or was cancelled (`dead=ALL_DEAD`: it produced nothing).

An activation is ``slot * nodes + node`` and a value instance ``slot * values + value``. Slot 0 is the root, where both
are the plain ids; every iteration of a frame in progress borrows another slot. Semantics follow the TensorFlow white
paper (2015), section 4.4, and "Dynamic control flow in large-scale machine learning" (EuroSys 2018):

- a node waits for all its inputs; one dead input makes it complete dead, unlaunched, when the last has arrived;
- a MERGE takes its first live data input, and is dead if all are; dead control inputs do not kill it;
- a SEND is launched with a dead input too: its inputs are then not to be read;
- ENTER runs outside its frame, EXIT and NEXT_ITERATION inside; what they produce lives where they lead. A dead
  NEXT_ITERATION starts nothing; an EXIT that no iteration took is dead once the frame is over;
- iterations finish in order. One whose work is over but for its NEXT_ITERATIONs no longer counts against
  `parallel_iterations`, so a frame instance holds at most `parallel_iterations + 2` slots, and returns them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowrt.base.errors import GraphError, InternalError
from flowrt.base.valueclass import valueclass
from flowrt.sched.topology import NodeKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowrt.sched.topology import Frame, Topology

ALL_DEAD = -1
"""As `dead`: every output and every control successor."""

COMPLETED = -1  # in `pending`, beside > 0: waits for so many, 0: launched
DOOMED = 1 << 40  # taken off `pending` at the first dead input


@valueclass
class Next:
    """What to do now: activations to launch, value instances to free. Its lists are reused by the next call."""

    launch: list[int]
    free: list[int]


@dataclass(slots=True, eq=False)
class _Iteration:
    """One slot: the root, or one iteration of one frame instance."""

    slot: int
    index: int
    instance: _Instance | None
    pending: dict[int, int] | list[int]
    uses: dict[int, int] | list[int]
    arrivals: dict[int, int]
    """Merge → data inputs still to come."""
    left: int
    """Nodes not completed and child instances not over."""
    first_value: int
    chosen: dict[int, int] = field(default_factory=dict)
    """Merge → position of its first live input."""
    dead: set[int] = field(default_factory=set)
    children: dict[int, _Instance] = field(default_factory=dict)
    moving: int = 0
    """Live NEXT_ITERATIONs that are ready or running."""
    deferred: list[int] = field(default_factory=list)
    """Those of them that wait for a next iteration."""
    dropped: list[int] = field(default_factory=list)
    """Dead NEXT_ITERATIONs, told to the next iteration if there ever is one."""
    following: _Iteration | None = None

    def only_moving(self) -> bool:
        """Whether all that is left is to hand values to the next iteration."""
        return self.left == self.moving


@dataclass(slots=True, eq=False)
class _Instance:
    """One entry into a frame from one iteration around it."""

    frame: Frame
    number: int
    around: _Iteration
    slot: int
    """Where its constants live."""
    enters_left: int
    iterations: deque[_Iteration] = field(default_factory=deque)
    constants: list[tuple[int, int]] = field(default_factory=list)
    """(ENTER, dead) of each that arrived."""
    exited: set[int] = field(default_factory=set)


class StepMachine:
    """The scheduler's state for one run. `launch` and `free` are refilled by `start` and `complete`."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._nodes = len(topology.kinds)
        self._quick = topology.quick
        self._quick_below = self._nodes
        self._pending = topology.pending.copy()
        self._uses = topology.uses.copy()
        root = topology.frames[0]
        self._root = _Iteration(0, 0, None, self._pending, self._uses, root.first.copy(), len(root.nodes), 0)
        self._slots: list[_Iteration | None] = [self._root]
        self._spare: list[int] = []
        self._dying: list[tuple[_Iteration, int]] = []
        self._unsettled: list[_Instance] = []
        self._running = 1  # until started
        self._failed = False
        self.launch: list[int] = []
        self.free: list[int] = []
        self._next = Next(self.launch, self.free)

    # What the executor says

    def start(self) -> Next:
        """Begin the step; to be called once."""
        topology = self._topology
        self._running = 0
        if not self._failed:
            self.launch.extend(topology.sources)
        for feed in range(topology.feeds):
            if not self._uses[feed]:
                self.free.append(feed)
            self._offer(self._root, feed, dead=False)
        self._drain()
        self._running += len(self.launch)
        return self._next

    def complete(self, activation: int, dead: int = 0) -> Next:
        """Take note that `activation` has run; bit *k* of `dead` says that its output *k* is dead."""
        launch, free = self.launch, self.free
        launch.clear()
        free.clear()
        edges = self._quick[activation] if activation < self._quick_below else None
        if dead or edges is None:
            return self._complete_any(activation, dead)
        pending, uses = self._pending, self._uses
        if pending[activation]:
            raise self._not_running(activation)
        pending[activation] = COMPLETED
        wakes, releases = edges
        for node in wakes:
            pending[node] = left = pending[node] - 1
            if left <= 0:
                if left == 0:
                    launch.append(node)
                elif left == -DOOMED:
                    self._dying.append((self._root, node))
        for value in releases:
            uses[value] = left = uses[value] - 1
            if left == 0:
                free.append(value)
        if self._dying:
            self._drain()
        self._running += len(launch) - 1
        return self._next

    def fail(self) -> None:
        """Launch nothing from now on: the step has failed or is cancelled. What runs is still to be completed."""
        self._failed = True
        self._quick_below = 0

    # What the executor asks

    @property
    def done(self) -> bool:
        """Whether nothing runs and nothing is to be launched."""
        return not self._running

    def over(self, node: int) -> bool:
        """Whether a node of the root has completed, or died."""
        return self._pending[node] == COMPLETED

    def dead(self, value: int) -> bool:
        """Whether a value of the root turned out dead."""
        return value in self._root.dead

    def merged(self, activation: int) -> int:
        """The position of the input that a launched MERGE takes; its other inputs must not be touched."""
        return self._iteration(activation).chosen[activation % self._nodes]

    def inputs(self, activation: int) -> Sequence[int]:
        """The value instances that a launched activation reads."""
        if activation < self._nodes:
            return self._topology.inputs[activation]
        iteration, constants = self._iteration(activation), self._topology.constants
        here, home = iteration.first_value, 0
        if iteration.instance is not None:
            home = iteration.instance.slot * self._topology.values
        values = self._topology.inputs[activation % self._nodes]
        return [(home if value in constants else here) + value for value in values]

    def outputs(self, activation: int) -> range:
        """The value instances that a launched activation produces; an ENTER's lie in the frame it opens.

        To be asked before `complete`: that call may already free them, and the slot with them.
        """
        node = activation % self._nodes
        produced = self._topology.produced[node]
        if activation < self._nodes and self._topology.kinds[node] is not NodeKind.ENTER:
            return produced
        first = self._target(self._iteration(activation), node) * self._topology.values
        return range(first + produced.start, first + produced.stop)

    # One node

    def _complete_any(self, activation: int, dead: int) -> Next:
        iteration, node = self._iteration(activation), activation % self._nodes
        if iteration.pending[node]:
            raise self._not_running(activation)
        self._running -= 1
        if self._topology.kinds[node] is NodeKind.NEXT_ITERATION:
            iteration.moving -= 1
        self._finish(iteration, node, dead)
        self._drain()
        self._running += len(self.launch)
        return self._next

    def _drain(self) -> None:
        """Work off what died and which frames moved on; each may bring about more of both."""
        while self._dying or self._unsettled:
            if self._dying:
                self._die(*self._dying.pop())
            else:
                self._settle(self._unsettled.pop())

    def _die(self, iteration: _Iteration, node: int) -> None:
        """Complete a node that has a dead input; a SEND is launched all the same, to pass the news on."""
        if self._topology.kinds[node] is NodeKind.SEND:
            iteration.pending[node] = 0
            self._launch(iteration, node)
        else:
            self._finish(iteration, node, ALL_DEAD)

    def _finish(self, iteration: _Iteration, node: int, dead: int) -> None:
        """Complete a node: tell its successors, let go of what it read."""
        kind = self._topology.kinds[node]
        iteration.pending[node] = COMPLETED
        if kind <= NodeKind.MERGE:
            self._emit(iteration, node, dead)
        else:
            self._move(iteration, node, kind, dead)
        for value in self._topology.reads[node]:
            if value not in iteration.dead:
                self._release(iteration, value)
        if kind is NodeKind.MERGE and node in iteration.chosen:
            self._release(iteration, self._topology.inputs[node][iteration.chosen[node]])
        iteration.left -= 1
        self._look_at(iteration)

    def _emit(self, target: _Iteration, node: int, dead: int) -> None:
        """Deliver a node's outputs and its completion to its successors in `target`."""
        topology, gone = self._topology, dead
        for value in topology.produced[node]:
            if gone & 1:
                target.dead.add(value)
            for reader in topology.readers[value]:
                self._arrive(target, reader, dead=bool(gone & 1))
            self._offer(target, value, dead=bool(gone & 1))
            gone >>= 1
        for follower in topology.followers[node]:
            self._arrive(target, follower, dead=dead == ALL_DEAD and topology.kinds[follower] is not NodeKind.MERGE)

    def _offer(self, target: _Iteration, value: int, dead: bool) -> None:
        """Deliver a value to the merges that read it."""
        for merge, position in self._topology.merges[value]:
            target.arrivals[merge] -= 1
            if dead:
                if not target.arrivals[merge] and merge not in target.chosen:
                    self._arrive(target, merge, dead=True)
            elif merge in target.chosen:
                self._release(target, value)  # another came first
            else:
                target.chosen[merge] = position
                self._arrive(target, merge, dead=False)

    def _arrive(self, target: _Iteration, node: int, dead: bool) -> None:
        """Count one input of `node` as arrived."""
        left = target.pending[node] - 1
        if dead and left >= 0:
            left -= DOOMED
        target.pending[node] = left
        if left == -DOOMED:
            self._dying.append((target, node))
        elif left == 0 and target.instance is not None and self._topology.kinds[node] is NodeKind.NEXT_ITERATION:
            self._move_on(target, node, target.instance)
        elif left == 0:
            self._launch(target, node)

    def _launch(self, iteration: _Iteration, node: int) -> None:
        if not self._failed:
            self.launch.append(iteration.slot * self._nodes + node)

    def _release(self, iteration: _Iteration, value: int) -> None:
        iteration.uses[value] = left = iteration.uses[value] - 1
        if left == 0:
            self.free.append(iteration.first_value + value)

    # Frames

    def _move(self, iteration: _Iteration, node: int, kind: NodeKind, dead: int) -> None:
        """Carry the value of an ENTER, EXIT or NEXT_ITERATION to where it leads."""
        instance = iteration.instance
        if kind is NodeKind.ENTER:
            self._enter(self._child(iteration, node), node, dead)
        elif instance is None:
            raise InternalError(f"{self._topology.where(node)} completed outside every frame")
        elif kind is NodeKind.EXIT:
            self._exit(instance, node, dead)
        elif iteration.following is not None:
            self._bring(iteration.following, node, dead)
        else:
            iteration.dropped.append(node)

    def _move_on(self, iteration: _Iteration, node: int, instance: _Instance) -> None:
        """Launch a NEXT_ITERATION, or have it wait until there is an iteration to move to."""
        iteration.moving += 1
        if iteration.following is None:
            iteration.deferred.append(node)
        else:
            self._launch(iteration, node)
        self._unsettled.append(instance)

    def _bring(self, target: _Iteration, node: int, dead: int) -> None:
        value = self._topology.produced[node].start
        if not dead and not target.uses[value]:
            self.free.append(target.first_value + value)
        self._emit(target, node, ALL_DEAD if dead else 0)

    def _enter(self, instance: _Instance, node: int, dead: int) -> None:
        instance.enters_left -= 1
        self._look_at(instance.iterations[0])
        if not self._topology.enters[node].is_constant:
            self._bring(instance.iterations[0], node, dead)
            return
        value = self._topology.produced[node].start
        if not dead and not self._topology.read(value):
            self.free.append(instance.slot * self._topology.values + value)
        instance.constants.append((node, dead))
        for iteration in instance.iterations:
            self._emit(iteration, node, ALL_DEAD if dead else 0)

    def _exit(self, instance: _Instance, node: int, dead: int) -> None:
        if dead:
            return  # another iteration may still take it
        if node in instance.exited:
            raise GraphError(f"{self._topology.where(node)}: two iterations of frame {instance.frame.name} left by it")
        instance.exited.add(node)
        self._bring(instance.around, node, 0)

    def _child(self, iteration: _Iteration, enter: int) -> _Instance:
        """The frame instance that `enter` leads to from `iteration`, begun if it is the first to."""
        number = self._topology.leads_to[enter]
        instance = iteration.children.get(number)
        if instance is None:
            frame = self._topology.frames[number]
            instance = _Instance(frame, number, iteration, self._borrow_slot(), frame.enters)
            iteration.children[number] = instance
            iteration.left += 1
            self._iterate(instance, 0)
        return instance

    def _iterate(self, instance: _Instance, index: int) -> _Iteration:
        """Begin an iteration: the constants that arrived are there from its start."""
        frame, slot = instance.frame, self._borrow_slot()
        arrivals = (frame.later if index else frame.first).copy()
        iteration = _Iteration(
            slot=slot,
            index=index,
            instance=instance,
            pending=frame.pending.copy(),
            uses=frame.uses.copy(),
            arrivals=arrivals,
            left=len(frame.nodes),
            first_value=slot * self._topology.values,
        )
        self._slots[slot] = iteration
        instance.iterations.append(iteration)
        for node, dead in instance.constants:
            self._emit(iteration, node, ALL_DEAD if dead else 0)
        return iteration

    def _look_at(self, iteration: _Iteration) -> None:
        """Have the frame settled if `iteration` may be over, or has something for the next one."""
        if iteration.instance is not None and iteration.only_moving():
            self._unsettled.append(iteration.instance)

    def _settle(self, instance: _Instance) -> None:
        """Retire the iterations that are over, oldest first, and begin the next if there is room."""
        iterations = instance.iterations
        if not iterations:
            return
        while iterations and not iterations[0].left and not instance.enters_left:
            self._return_slot(iterations.popleft().slot)
        if not iterations:
            self._leave(instance)
        elif iterations[-1].following is None:
            self._advance(instance, iterations[-1])

    def _advance(self, instance: _Instance, newest: _Iteration) -> None:
        """Begin the next iteration if something wants to move there and there is room."""
        oldest = instance.iterations[0]
        over = oldest.only_moving() and not instance.enters_left
        if not newest.deferred or len(instance.iterations) - over >= instance.frame.parallel_iterations:
            return
        newest.following = self._iterate(instance, newest.index + 1)
        for node in newest.dropped:
            self._emit(newest.following, node, ALL_DEAD)
        for node in newest.deferred:
            self._launch(newest, node)

    def _leave(self, instance: _Instance) -> None:
        """End a frame: its constants go, the exits nobody took are dead."""
        topology, around = self._topology, instance.around
        constants = (topology.produced[node].start for node, dead in instance.constants if not dead)
        self.free += [instance.slot * topology.values + value for value in constants if topology.read(value)]
        for node in instance.frame.exits:
            if node not in instance.exited:
                self._emit(around, node, ALL_DEAD)
        self._return_slot(instance.slot)
        del around.children[instance.number]
        around.left -= 1
        self._look_at(around)

    # Slots

    def _borrow_slot(self) -> int:
        if self._spare:
            return self._spare.pop()
        self._slots.append(None)
        return len(self._slots) - 1

    def _return_slot(self, slot: int) -> None:
        self._slots[slot] = None
        self._spare.append(slot)

    def _iteration(self, activation: int) -> _Iteration:
        slot = activation // self._nodes
        iteration = self._slots[slot] if slot < len(self._slots) else None
        if iteration is None:
            raise InternalError(f"activation {activation}: slot {slot} holds no iteration")
        return iteration

    def _target(self, iteration: _Iteration, node: int) -> int:
        """The slot that the outputs of `node` live in."""
        kind, instance = self._topology.kinds[node], iteration.instance
        if kind is NodeKind.ENTER:
            child = self._child(iteration, node)
            return child.slot if self._topology.enters[node].is_constant else child.iterations[0].slot
        if kind is NodeKind.EXIT and instance is not None:
            return instance.around.slot
        if kind is NodeKind.NEXT_ITERATION and iteration.following is not None:
            return iteration.following.slot
        return iteration.slot

    def _not_running(self, activation: int) -> InternalError:
        return InternalError(f"activation {activation} was completed but is not running")
