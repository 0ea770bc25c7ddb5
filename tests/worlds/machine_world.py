"""What the step machine is tested with: drafts of topologies, a fake executor that trusts nothing, random programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowrt.sched.machine import ALL_DEAD, COMPLETED, Next, StepMachine
from flowrt.sched.topology import Enter, NodeKind, Topology

if TYPE_CHECKING:
    import random

DEAD = None
Env = dict[int, int | None]


@dataclass
class Draft:
    """A topology in the making, with a kernel on ints for each node."""

    feeds: int = 0
    kinds: list[NodeKind] = field(default_factory=list)
    inputs: list[tuple[int, ...]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    controls: list[tuple[int, ...]] = field(default_factory=list)
    enters: dict[int, Enter] = field(default_factory=dict)
    kernels: list[Callable[..., int]] = field(default_factory=list)
    makers: dict[int, int] = field(default_factory=dict)

    def node(
        self,
        *inputs: int,
        kind: NodeKind = NodeKind.PLAIN,
        outputs: int = 1,
        after: Sequence[int] = (),
        kernel: Callable[..., int] = sum,
    ) -> int:
        """Add a node; returns its first output value."""
        value = self.feeds + len(self.makers)
        self.makers.update({value + k: len(self.kinds) for k in range(outputs)})
        self.kinds.append(kind)
        self.inputs.append(inputs)
        self.outputs.append(outputs)
        self.controls.append(tuple(after))
        self.kernels.append(kernel)
        return value

    def switch(self, data: int, pred: int) -> tuple[int, int]:
        false = self.node(data, pred, kind=NodeKind.SWITCH, outputs=2)
        return false, false + 1

    def merge(self, *inputs: int, after: Sequence[int] = ()) -> int:
        return self.node(*inputs, kind=NodeKind.MERGE, after=after)

    def enter(self, value: int, frame: str, is_constant: bool = False, parallel: int = 10) -> int:
        self.enters[len(self.kinds)] = Enter(frame, is_constant, parallel)
        return self.node(value, kind=NodeKind.ENTER)

    def loop(
        self,
        initial: Sequence[int],
        constants: Sequence[int],
        body: Callable[[list[int], list[int]], list[int]],
        parallel: int = 10,
    ) -> list[int]:
        """While the first variable is less than the first constant; returns the exits."""
        frame = f"loop{len(self.kinds)}"
        merges = [self.merge(self.enter(value, frame, parallel=parallel), -1) for value in initial]
        inner = [self.enter(value, frame, is_constant=True, parallel=parallel) for value in constants]
        goes_on = self.node(merges[0], inner[0], kernel=lambda pair: int(pair[0] < pair[1]))
        switches = [self.switch(merge, goes_on) for merge in merges]
        exits = [self.node(out, kind=NodeKind.EXIT) for out, _ in switches]
        results = body([stay for _, stay in switches], inner)
        for merge, result in zip(merges, results, strict=True):
            maker = self.makers[merge]
            self.inputs[maker] = (self.inputs[maker][0], self.node(result, kind=NodeKind.NEXT_ITERATION))
        return exits

    def topology(self, *keep: int) -> Topology:
        return Topology(self.kinds, self.inputs, self.outputs, self.controls, self.feeds, frozenset(keep), self.enters)


class Run:
    """A fake executor that holds the values and checks, at every step, that it was told nothing impossible."""

    def __init__(self, draft: Draft, keep: Sequence[int], feeds: Sequence[int] = (), strict: bool = False) -> None:
        self.draft, self.keep, self.strict = draft, keep, strict
        self.topology = draft.topology(*keep)
        self.machine = StepMachine(self.topology)
        self.values = dict(enumerate(feeds))
        self.running: dict[int, tuple[int, ...]] = {}
        self.launches: Counter[int] = Counter()
        self.most_slots = 0

    def obey(self, step: Next) -> None:
        for value in step.free:
            del self.values[value]  # a KeyError: freed twice, or dead
            assert value not in self.keep
            assert not any(value in inputs for inputs in self.running.values()), "freed under a reader"
        for activation in step.launch:
            assert activation not in self.running
            inputs = tuple(self.machine.inputs(activation))
            node = activation % len(self.draft.kinds)
            if self.draft.kinds[node] is NodeKind.MERGE:
                inputs = (inputs[self.machine.merged(activation)],)
            assert all(value in self.values for value in inputs), "launched before its inputs"
            self.running[activation] = inputs
            self.launches[node] += 1
            self.most_slots = max(self.most_slots, activation // len(self.draft.kinds) + 1)

    def finish(self, activation: int, failed: bool = False) -> None:
        node = activation % len(self.draft.kinds)
        got = [self.values[value] for value in self.running[activation]]
        dead = ALL_DEAD if failed else 0
        if not failed and self.draft.kinds[node] is NodeKind.SWITCH:
            dead = 0b01 if got[1] % 2 else 0b10
        result = got[0] if self.draft.kinds[node] is not NodeKind.PLAIN else self.draft.kernels[node](got)
        live = [value for k, value in enumerate(self.machine.outputs(activation)) if not dead >> k & 1]
        assert not any(value in self.values for value in live), "produced twice"
        self.values.update(dict.fromkeys(live, result))
        del self.running[activation]
        self.obey(self.machine.complete(activation, dead))

    def check_nothing_lingers(self) -> None:
        """No value of the root is held that nobody waits for any more."""
        topology, pending = self.topology, self.machine._pending
        for value in self.values:
            if value < topology.values and value not in self.keep:
                merges = [merge for merge, _ in topology.merges[value]]
                readers = [*topology.readers[value], *merges]
                assert any(pending[reader] != COMPLETED for reader in readers), "held although its readers are done"

    def drive(self, rng: random.Random | None = None, fail_after: int = -1) -> None:
        failing = fail_after >= 0
        self.obey(self.machine.start())
        while self.running:
            assert not self.machine.done
            activation = rng.choice(list(self.running)) if rng else next(iter(self.running))
            self.finish(activation, failed=fail_after == 0)
            if self.strict:
                self.check_nothing_lingers()
            fail_after -= 1
            if fail_after == 0:
                self.machine.fail()
                self.launches.clear()
        assert self.machine.done
        if not failing:
            assert set(self.values) == {value for value in self.keep if not self.machine.dead(value)}

    def fetched(self) -> list[int | None]:
        return [DEAD if self.machine.dead(value) else self.values[value] for value in self.keep]


class Program:
    """A random program: drafts nodes, and beside each the statement that evaluates it in order."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.draft = Draft(feeds=3)
        self.scope = list(range(3))
        self.evaluated: Counter[int] = Counter()
        self.statements = self.block(self.scope, rng.randint(2, 9), depth=0)
        self.keep = rng.sample(self.scope, min(3, len(self.scope)))

    def evaluate(self, feeds: Sequence[int]) -> list[int | None]:
        env: Env = dict(enumerate(feeds))
        for statement in self.statements:
            statement(env)
        return [env[value] for value in self.keep]

    def block(self, scope: list[int], size: int, depth: int) -> list[Callable[[Env], None]]:
        kinds = [self.plain, self.plain, self.plain, self.branch, self.bare_switch, self.twin_merge]
        if depth < 2:
            kinds.append(self.loop)
        return [self.rng.choice(kinds)(scope, depth) for _ in range(size)]

    def pick(self, scope: list[int], most: int = 1) -> list[int]:
        return [self.rng.choice(scope[-8:]) for _ in range(self.rng.randint(1, most))]

    def plain(self, scope: list[int], depth: int) -> Callable[[Env], None]:
        return self.compute(scope, self.pick(scope, most=3), lambda got: (sum(got) * 7 + 3) % 1009)

    def compute(self, scope: list[int], inputs: list[int], kernel: Callable[..., int]) -> Callable[[Env], None]:
        makers = [(value, self.draft.makers[value]) for value in scope if value in self.draft.makers]
        plain = [(value, node) for value, node in makers if self.draft.kinds[node] is NodeKind.PLAIN]
        before = self.rng.sample(plain, 1) if plain and self.rng.random() < 0.2 else []
        value = self.draft.node(*inputs, after=[node for _, node in before], kernel=kernel)
        scope.append(value)

        def statement(env: Env) -> None:
            live = [got for read in inputs if (got := env[read]) is not DEAD]
            env[value] = DEAD
            if len(live) == len(inputs) and all(env[control] is not DEAD for control, _ in before):
                env[value] = kernel(live)
                self.evaluated[self.draft.makers[value]] += 1

        return statement

    def bare_switch(self, scope: list[int], depth: int) -> Callable[[Env], None]:
        data, pred = *self.pick(scope), *self.pick(scope)
        false, true = self.draft.switch(data, pred)
        scope += [false, true]

        def statement(env: Env) -> None:
            chosen, got = env[pred], env[data]
            env[false] = DEAD if chosen is DEAD or chosen % 2 else got
            env[true] = got if chosen is not DEAD and chosen % 2 else DEAD

        return statement

    def merged(self, scope: list[int], *inputs: int) -> Callable[[Env], None]:
        value = self.draft.merge(*inputs)
        scope.append(value)

        def statement(env: Env) -> None:
            env[value] = next((got for read in inputs if (got := env[read]) is not DEAD), DEAD)

        return statement

    def branch(self, scope: list[int], depth: int) -> Callable[[Env], None]:
        inner = list(scope)
        split = self.bare_switch(inner, depth)
        false, true = inner[-2:]
        arms = [self.compute(inner, [arm, *self.pick(scope)], lambda got: got[0] * 2 + 1) for arm in (false, true)]
        return in_order([split, *arms, self.merged(scope, inner[-2], inner[-1])])

    def twin_merge(self, scope: list[int], depth: int) -> Callable[[Env], None]:
        inner = list(scope)
        source = self.pick(scope)
        twins = [self.compute(inner, source, lambda got: got[0]) for _ in range(2)]
        return in_order([*twins, self.merged(scope, inner[-2], inner[-1])])

    def loop(self, scope: list[int], depth: int) -> Callable[[Env], None]:
        start = self.compute(scope, self.pick(scope), lambda got: got[0] % 3)
        limit = self.compute(scope, self.pick(scope), lambda got: got[0] % 7)
        initial, constants = [scope[-2], *self.pick(scope, most=2)], [scope[-1], *self.pick(scope, most=2)]
        parts: list[list[int]] = []
        statements: list[Callable[[Env], None]] = []

        def body(state: list[int], inner_constants: list[int]) -> list[int]:
            # A constant would be live in the last iteration too: what the body reads hangs on the condition.
            pivot = self.draft.makers[self.draft.node(state[0])]
            gated = [self.draft.node(value, after=[pivot]) for value in inner_constants]
            inner = [*state, *gated]
            statements.append(self.compute_freely(inner, state[0]))
            counter = inner[-1]
            statements.extend(self.block(inner, self.rng.randint(1, 4), depth + 1))
            results = [counter, *(self.pick(inner)[0] for _ in state[1:])]
            parts.extend([state, gated, results])
            return results

        exits = self.draft.loop(initial, constants, body, self.rng.choice([1, 2, 10]))
        scope += exits

        def run(env: Env) -> None:
            state, gated, results = parts
            now, fixed = [env[value] for value in initial], [env[value] for value in constants]
            while now[0] is not DEAD and fixed[0] is not DEAD and now[0] < fixed[0]:
                inner = dict(zip([*state, *gated], [*now, *fixed], strict=True))
                for statement in statements:
                    statement(inner)
                now = [inner[value] for value in results]
            stuck = now[0] is DEAD or fixed[0] is DEAD
            env.update(dict.fromkeys(exits, DEAD) if stuck else dict(zip(exits, now, strict=True)))

        return in_order([start, limit, run])

    def compute_freely(self, scope: list[int], counter: int) -> Callable[[Env], None]:
        """The loop's own count: never held up or killed by a control edge."""
        value = self.draft.node(counter, kernel=lambda got: got[0] + 1)
        scope.append(value)

        def statement(env: Env) -> None:
            got = env[counter]
            assert got is not DEAD
            env[value] = got + 1
            self.evaluated[self.draft.makers[value]] += 1

        return statement


def in_order(statements: list[Callable[[Env], None]]) -> Callable[[Env], None]:
    def run(env: Env) -> None:
        for statement in statements:
            statement(env)

    return run
