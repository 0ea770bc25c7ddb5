"""Replicated training in virtual time: what a policy would do to a run, in seconds instead of days.

`simulate` drives the very coordinator, quorum and policies that nodes run with delays that are drawn or were recorded.
What it leaves out are the nodes: messages take no time but what is given, nobody is lost, and every update is finite.

The model of progress is that of McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162, eq.
2.7: a step that keeps k updates is worth k / (k + B), where B, the gradient noise scale, is in updates of a replica. A
policy that measures is shown squares that have just this B: 1 + B of each update and 1 + B / k of the mean of k. A
version of local steps is worth as many steps, as if replicas did not drift apart meanwhile; so it is at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from math import inf, isfinite
from numbers import Real
from os import PathLike, fspath
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flowrt.base.errors import GraphError, user_site
from flowrt.base.locating import fitting
from flowrt.base.plain import is_number, is_whole, shortened
from flowrt.base.valueclass import valueclass
from flowrt.delays import Delay, Link, parse
from flowrt.delays.parquet import as_table
from flowrt.sched.policies import LocalSteps, Policy
from flowrt.sched.versions.batched import hold_all
from flowrt.sched.versions.coordinator import Coordinator

Delays: TypeAlias = "Delay | str | float | NDArray[np.float64] | Sequence[Any] | Callable[..., Any]"
Seconds: TypeAlias = "NDArray[np.float64]"


@valueclass
class Simulation:
    """What came of a simulated run, step by step.

    Args:
        seconds: How long each step took [steps].
        kept: How many updates counted in it [steps].
        worth: What that was worth [steps]: kept / (kept + noise_scale), with `LocalSteps` times their number.
    """

    seconds: Seconds = field(compare=False)
    kept: NDArray[np.int64] = field(compare=False)
    worth: Seconds = field(compare=False)

    def seconds_to(self, worth: float) -> float:
        """The virtual time until the worth of all steps adds up to ``worth``.

        Beyond the last step at the rate of the whole run.
        """
        total, clock = np.cumsum(self.worth), np.cumsum(self.seconds)
        step = int(np.searchsorted(total, worth * (1 - 1e-12)))
        return float(clock[step] if step < len(total) else clock[-1] * worth / total[-1])


@fitting
def simulate(
    policy: Policy,
    delays: Delays,
    *,
    replicas: int,
    steps: int,
    seed: int = 0,
    overhead: float = 0.0,
    noise_scale: float = 8.0,
) -> Simulation:
    """Simulate ``steps`` steps of ``replicas`` replicas under ``policy``; the same ``seed`` gives the same run.

    ``delays`` says how long replicas compute: one of `flowrt.delays`, itself or as text; a number of seconds; an array
    [steps, replicas], from the beginning again at its end; or a function of a generator and the step that answers
    seconds [replicas]. With `LocalSteps` these are of one of its steps. All replicas begin a step when it is opened,
    unless the policy lets them go on with an older one: then each takes the next row of an array with each beginning.
    ``overhead`` is the seconds from the moment that a set is fixed to that at which all have the next version; delays
    at the ``"server"`` come on top. ``noise_scale`` is the gradient noise scale in updates.

    Raises `GraphError` for a policy that cannot be met or never ends a step, for what makes no sense, and for delays
    that are negative or not finite, with their step and replica.
    """
    for name, value, least in (("replicas", replicas, 1), ("steps", steps, 1), ("seed", seed, 0)):
        if not is_whole(value, least):
            raise GraphError(f"{user_site()}: simulate: {name} is an integer from {least} up, got {value!r}")
    for name, number in (("overhead", overhead), ("noise_scale", noise_scale)):
        if not is_number(number) or not isfinite(number):
            raise GraphError(f"{user_site()}: simulate: {name} is a finite number from 0 up, got {number!r}")
    if not isinstance(policy, Policy):
        raise GraphError(f"{user_site()}: simulate: expected a policy such as fr.train.FirstOf(3), got {policy!r}")
    local = policy.k if isinstance(policy, LocalSteps) else 1
    source = _source(delays, int(replicas), int(seed), local)
    run = _SimulatedRun(policy, int(replicas), int(steps), source, float(overhead), float(noise_scale))
    for step in range(int(steps)):
        run.step(step)
    return Simulation(run.seconds, run.kept, local * run.kept / (run.kept + noise_scale))


class _SimulatedRun:
    """One simulated run: the coordinator, and when what each replica computes will be whole."""

    def __init__(
        self, policy: Policy, replicas: int, steps: int, source: _DelaySource, overhead: float, noise_scale: float
    ) -> None:
        coordinator = Coordinator.start(policy, replicas, 1, allowed=steps, remember=0)
        for replica in range(replicas):
            coordinator = coordinator.ready(replica, 2 * steps, 0.0)
        self._value = coordinator
        self._source, self._overhead, self._noise = source, overhead, noise_scale
        self._now = 0.0
        self._whole = np.full(replicas, inf)  # when what a replica computes is whole; infinite if it computes nothing
        self._of = np.zeros(replicas, np.int64)  # from which version
        self._spent = np.zeros(replicas, np.int64)
        self.seconds, self.kept = np.zeros(steps), np.zeros(steps, np.int64)

    def step(self, step: int) -> None:
        """From the opening of a version to that of the next one."""
        self._begin(step)
        opened = self._now
        self._close()
        quorum = self._value.quorum
        closed, kept = quorum.closed_at, len(quorum.kept)
        if closed is None:
            raise GraphError(
                f"{user_site()}: simulate: {quorum.policy} waits for {quorum.enough} offers in step {step}, and there "
                f"are {quorum.replicas} replicas"
            )
        self._now = closed + self._overhead + self._source.server(step, closed)
        self._value, _ = self._value.order(closed)
        if self._value.quorum.policy.staleness:
            self._offer_until(self._now)
        self._value = self._value.publish(0, step, self._now, 1 + self._noise / kept)
        self.seconds[step], self.kept[step] = self._now - opened, kept

    def _begin(self, step: int) -> None:
        """Those who were booked to begin with the open version do."""
        spent = np.array(self._value.spent)
        begin = spent > self._spent
        if begin.any():
            self._whole[begin] = self._now + self._source.seconds(step, spent - 1, self._now)[begin]
            self._of[begin] = step
            self._spent = spent

    def _close(self) -> None:
        """Offer updates as they become whole, until the open version's set is fixed."""
        if self._value.quorum.policy.staleness:
            self._offer_until(inf)
        else:
            order = np.argsort(self._whole, kind="stable")
            self._value = hold_all(self._value, order.tolist(), self._whole[order].tolist(), 1 + self._noise)
        while (due := self._value.due) is not None:
            self._value = self._value.tick(due)

    def _offer_until(self, until: float) -> None:
        """Offer one update after the other: before ``until``, or else until the open version's set is fixed."""
        while isfinite(until) or self._value.quorum.closed_at is None:
            replica = int(self._whole.argmin())
            when = float(self._whole[replica])
            due = self._value.due
            if due is not None and due <= when and due < until:
                self._value = self._value.tick(due)
            elif when < until:
                version = int(self._of[replica])
                self._value, _ = self._value.held(0, version, replica, True, when, 1 + self._noise)
                self._whole[replica] = inf
            else:
                return


# ── how long replicas take ───────────────────────────────────────────────────────────────────────────────────────────


class _DelaySource:
    """How long replicas compute, and by how much the server is slower. Each step is drawn by a generator of its own."""

    def __init__(self, replicas: int, seed: int, local: int) -> None:
        self._replicas, self._seed = replicas, seed
        self._local = local  # steps of a replica in each step of the run

    def seconds(self, step: int, turns: NDArray[np.int64], now: float) -> Seconds:
        """Seconds [replicas] of who begins ``step`` at ``now``; each has computed ``turns`` times before."""
        raise NotImplementedError

    def server(self, step: int, now: float) -> float:
        """By how many seconds later the step is applied."""
        return 0.0

    def _rng(self, step: int, what: int = 0) -> np.random.Generator:
        return np.random.default_rng((self._seed, step, what))


class _Drawn(_DelaySource):
    def __init__(self, delay: Delay, replicas: int, seed: int, local: int) -> None:
        super().__init__(replicas, seed, local)
        self._delay = delay
        self._slow_server = any(part.at == "server" for part in delay.parts)
        if any(isinstance(part, Link) for part in delay.parts):
            raise GraphError(
                f"{user_site()}: simulate: {delay}: a simulation sends no bytes; give what they take in seconds, as "
                "bytes / bytes_per_second at push"
            )

    def seconds(self, step: int, turns: NDArray[np.int64], now: float) -> Seconds:
        def at(*places: str) -> Seconds:
            return self._delay.sample(self._rng(step), step, self._replicas, now, places)

        if self._local == 1:
            return at("input", "compute", "push", "frozen")
        return self._local * at("input", "compute") + at("push", "frozen")

    def server(self, step: int, now: float) -> float:
        if not self._slow_server:
            return 0.0
        return float(self._delay.sample(self._rng(step, 1), step, 1, now, ("server",))[0])


class _Recorded(_DelaySource):
    def __init__(self, table: Seconds, replicas: int, seed: int, local: int) -> None:
        super().__init__(replicas, seed, local)
        self._table = table
        self._column = np.arange(replicas) % table.shape[1]

    def seconds(self, step: int, turns: NDArray[np.int64], now: float) -> Seconds:
        found: Seconds = self._table[turns % len(self._table), self._column]
        return self._local * found


class _Called(_DelaySource):
    def __init__(self, function: Callable[..., Any], replicas: int, seed: int, local: int) -> None:
        super().__init__(replicas, seed, local)
        self._function = function
        self._site = user_site()

    def seconds(self, step: int, turns: NDArray[np.int64], now: float) -> Seconds:
        found = self._function(self._rng(step), step)
        try:
            answer = np.asarray(found, np.float64)
        except (TypeError, ValueError):
            raise GraphError(
                f"{self._site}: simulate: delays answered {shortened(found)} in step {step}, expected "
                f"[{self._replicas}] numbers, in seconds"
            ) from None
        if answer.shape != (self._replicas,):
            raise GraphError(
                f"{self._site}: simulate: delays answered shape {list(answer.shape)} in step {step}, "
                f"expected [{self._replicas}]"
            )
        if not (answer >= 0).all() or np.isinf(answer).any():
            replica = int(np.argmin((answer >= 0) & np.isfinite(answer)))
            raise GraphError(
                f"{self._site}: simulate: seconds are finite and 0 or more, delays answered {answer[replica]:g} "
                f"in step {step} of replica {replica}"
            )
        return self._local * answer


def _source(delays: Any, replicas: int, seed: int, local: int) -> _DelaySource:
    if isinstance(delays, Real):
        delays = float(delays)  # NumPy's, too
    if isinstance(delays, (Delay, str, float)):
        return _Drawn(parse(delays), replicas, seed, local)
    if callable(delays):
        return _Called(delays, replicas, seed, local)
    if isinstance(delays, PathLike):
        raise GraphError(f"{user_site()}: simulate: a file is read by fr.delays.Trace({fspath(delays)!r})")
    if isinstance(delays, Mapping):
        raise GraphError(
            f"{user_site()}: simulate: delays by name are a cluster's; here one delay is that of all replicas: add up "
            "what only some have, as '0.1 + 0.4 on 3'"
        )
    return _Recorded(as_table(delays, "simulate: delays"), replicas, seed, local)
