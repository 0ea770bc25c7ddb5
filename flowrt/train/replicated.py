"""Builds replicated training into a graph: the towers, the step that applies a quorum's updates, and predictors.

One tower per replica computes the loss and its gradients on the replica's device and leaves each parameter server its
parts. One more step waits for the quorum and moves the variables, on every server at once. Running them is the business
of `flowrt.train.steps`; the protocol is `flowrt.sched.coordinator`.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.device import Device
from flowrt.errors import GraphError, SpecError, user_site
from flowrt.graph import Graph, Node, Tensor, control_dependencies, current_graph, current_scope, device, name_scope
from flowrt.misuse import awaited_session
from flowrt.op import as_value, building
from flowrt.ops import replica as protocol
from flowrt.ops.flow import group as group_ops
from flowrt.ops.source import constant, placeholder
from flowrt.ops.state import Variable, variables_from
from flowrt.sched.quorum import AllOf, Policy
from flowrt.sched.replica import policy_to_data
from flowrt.spec import Spec
from flowrt.structure import flatten
from flowrt.tracebacks import brief
from flowrt.train.batches import check_names
from flowrt.train.sharing import FirstCopy, LaterCopy, Servers, Shared
from flowrt.train.statistics import Statistics, Tally
from flowrt.train.steps import Reports, Steps
from flowrt.valueclass import valueclass

if TYPE_CHECKING:
    from flowrt.optim import Optimizer
    from flowrt.session import Session

Array = np.ndarray[Any, Any]
LossFn = Callable[[dict[str, Tensor]], Any]


@valueclass
class Tower:
    """One replica's step: feed ``turn`` and ``inputs``, fetch ``loss``, ``metrics`` and ``verdict``."""

    replica: int
    node: str  # the task it was asked to be on; empty if it may be anywhere
    inputs: dict[str, Tensor]
    loss: Tensor
    metrics: dict[str, Tensor]
    gradients: list[tuple[Tensor | None, Variable]]
    verdict: Tensor


class Replicated:
    """Trains one set of variables with several replicas of a model, each on batches of its own.

    Args:
        loss_fn: Builds the model: takes ``{name: Tensor}``, answers a scalar loss, or ``(loss, {name: metric})``. It is
            called once per replica; the first call creates the variables, later ones get the same ones in call order.
        inputs: The spec of each input of ``loss_fn``, by name.
        optimizer: Moves the variables by the mean of the kept updates.
        replicas: How many copies train.
        policy: Whose updates make a step: `AllOf` or `FirstOf`.
        servers: Over how many parameter servers the variables are spread, by bytes.
        name: Prefixes the names of what is built, and names the trainer on the nodes.
        server_device: Where server ``{}`` is, or a device for each; empty for anywhere.
        worker_device: Where replica ``{}`` is, or a device for each. With both empty, all may run in one process.

    A replica's update counts whole or not at all, on every server. Raises `GraphError` for a policy that ``replicas``
    cannot meet and for copies that differ, `SpecError` for a loss that is not a float scalar.
    """

    @brief
    def __init__(
        self,
        loss_fn: LossFn,
        inputs: Mapping[str, Spec],
        optimizer: Optimizer,
        replicas: int,
        policy: Policy | None = None,
        *,
        servers: int = 1,
        name: str = "replicated",
        server_device: str | Sequence[str] = "/job:ps/task:{}",
        worker_device: str | Sequence[str] = "/job:worker/task:{}",
    ) -> None:
        self.graph: Graph = current_graph("replicated training")
        self.policy: Policy = AllOf() if policy is None else policy
        self.inputs = dict(inputs)
        self.replicas = replicas
        self._check(replicas, servers, optimizer)
        self._workers = _devices(worker_device, replicas)
        self._servers = _devices(server_device, servers)
        self.nodes = tuple(Device.parse(worker).host for worker in self._workers)
        self.servers = tuple(Device.parse(server).host for server in self._servers)
        self._outside = current_scope()
        self.name = self.graph.claim_name(name, "replicated")
        self._attributes = {"group": self.name, "container": self._outside.container}
        self._where = Servers(self._servers)
        self.tally = Tally(replicas)
        with name_scope(self.name.removeprefix(self._outside.prefix)):
            self._build(loss_fn, optimizer)

    def _check(self, replicas: int, servers: int, optimizer: Any) -> None:
        if not hasattr(optimizer, "compute_gradients"):
            raise GraphError(f"{user_site()}: optimizer is an instance, such as fr.optim.SGD(0.1), not {optimizer!r}")
        if not all(isinstance(count, Integral) and count >= 1 for count in (replicas, servers)):
            raise GraphError(
                f"{user_site()}: expected at least 1 replica and 1 server, got {replicas!r} and {servers!r}"
            )
        for name, spec in self.inputs.items():
            if not isinstance(spec, Spec):
                raise GraphError(f"{user_site()}: inputs maps names to fr.Spec(dtype, shape), but {name!r} to {spec!r}")
        policy_to_data(self.policy)
        self.policy.take(replicas)

    def _build(self, loss_fn: LossFn, optimizer: Optimizer) -> None:
        with device(self._servers[0]):
            self.turn: Tensor = placeholder("int64", (2,), name="turn")
            self.gone: Tensor = placeholder("int64", (None,), name="gone")
        first = FirstCopy(self._where, self._outside, f"{current_scope().prefix}replica_0/")
        self._shared: list[Shared] = first.found
        self.towers = [
            self._build_tower(replica, first if replica == 0 else None, loss_fn, optimizer)
            for replica in range(self.replicas)
        ]
        self._check_alike()
        with device(self._servers[0]), variables_from(None):
            self.step = Variable(np.zeros((), np.int64), name="step", trainable=False)
        with name_scope("start"):
            self.start: Node = self._build_start()
        with name_scope("apply"):
            self.receipts: tuple[Tensor, Tensor] = self._build_apply(optimizer)
        with name_scope("lose"), device(self._servers[0]):
            self.lose: Node = protocol.lose_replicas(self.turn, self.gone, **self._attributes)

    @property
    def variables(self) -> list[Variable]:
        """The variables that ``loss_fn`` created, in order."""
        return [shared.variable for shared in self._shared]

    # ── towers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _build_tower(self, replica: int, first: FirstCopy | None, loss_fn: LossFn, optimizer: Optimizer) -> Tower:
        who = f"replica {replica} of {self.name!r}"
        with name_scope(f"replica_{replica}"), device(self._workers[replica]):
            source = first or LaterCopy(self._shared, who, current_scope().prefix)
            inputs = {name: placeholder(s.dtype, s.dims, name=name) for name, s in self.inputs.items()}
            with variables_from(source):
                loss, metrics = _loss_and_metrics(loss_fn(dict(inputs)), who)
            if isinstance(source, LaterCopy):
                source.check_all_given()
            pairs = optimizer.compute_gradients(loss, self._trainable(who))
            pairs = [(None if g is None else as_value(g), v) for g, v in pairs]  # what is averaged is dense
            verdict = self._build_push(replica, [(g, v) for g, v in pairs if g is not None])
        return Tower(replica, self.nodes[replica], inputs, loss, metrics, pairs, verdict)

    def _trainable(self, who: str) -> list[Variable]:
        found = [variable for variable in self.variables if variable.trainable]
        if not found:
            raise GraphError(f"{user_site()}: loss_fn created no trainable variable for {who}; create them inside it")
        return found

    def _build_push(self, replica: int, pairs: list[tuple[Tensor, Variable]]) -> Tensor:
        """From gradients to the verdict on the update; runs on the replica's device and on the servers."""
        delayed = protocol.delay([gradient for gradient, _ in pairs])
        parts = list(delayed) if isinstance(delayed, tuple) else [delayed]
        home = {shared.variable.name: shared.server for shared in self._shared}
        verdicts = []
        for server, where in enumerate(self._servers):
            mine = [part for part, (_, v) in zip(parts, pairs, strict=True) if home[v.name] == server]
            with device(where):
                verdicts.append(
                    protocol.hold_update(self.turn, mine, server=server, replica=replica, **self._attributes)
                )
        with device(self._servers[0]):
            begun = protocol.begin_update(self.turn, replica=replica, **self._attributes)
            with control_dependencies([begun]):
                verdict: Tensor = protocol.offer_update(self.turn, verdicts, replica=replica, **self._attributes)
        return verdict

    def _check_alike(self) -> None:
        """Raise where replicas differentiate with respect to different variables."""
        expected = _moved(self.towers[0])
        for tower in self.towers[1:]:
            if _moved(tower) != expected:
                raise GraphError(
                    f"the loss of replica {tower.replica} depends on {_moved(tower)}, that of replica 0 on {expected}; "
                    "every copy must build the same model"
                )

    # ── servers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _build_start(self) -> Node:
        started = []
        for server, where in enumerate(self._servers):
            with device(where):
                started.append(
                    protocol.start_group(
                        self.turn,
                        server=server,
                        replicas=self.replicas,
                        servers=len(self._servers),
                        policy=policy_to_data(self.policy),
                        **self._attributes,
                    )
                )
        made: Node = group_ops(*started)
        return made

    def _build_apply(self, optimizer: Optimizer) -> tuple[Tensor, Tensor]:
        """Wait for the quorum, move the variables of each server by the mean update, open the next version."""
        with device(self._servers[0]):
            decided = protocol.await_quorum(self.turn, **self._attributes)
        moved = set(_moved(self.towers[0]))
        published = []
        for server, where in enumerate(self._servers):
            mine = [s.variable for s in self._shared if s.server == server and s.variable.name in moved]
            with device(where):
                published.append(self._build_shard(server, mine, decided, optimizer))
        with device(self._servers[0]):
            replicas, outcomes = protocol.publish_version(self.turn, published, **self._attributes)
        return replicas, outcomes

    def _build_shard(self, server: int, mine: list[Variable], decided: Tensor, optimizer: Optimizer) -> Tensor:
        taken = protocol.take_updates(
            self.turn,
            decided,
            server=server,
            dtypes=[v.dtype.name for v in mine],
            shapes=[v.shape for v in mine],
            **self._attributes,
        )
        means = taken if isinstance(taken, tuple) else (taken,)
        done = [optimizer.apply_gradients(zip(means, mine, strict=True))] if mine else [taken]
        if server == 0:
            with control_dependencies(means):
                done.append(self.step.assign(self.turn[1] + constant(1, "int64")))
        with control_dependencies(done):
            token: Tensor = protocol.publish_shard(self.turn, server=server, **self._attributes)
        return token

    # ── using it ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @brief
    def share(self, fn: Callable[[dict[str, Tensor]], Any], inputs: Mapping[str, Spec], *, name: str = "") -> Predictor:
        """Another function on the same variables, for evaluation and prediction.

        ``fn`` takes ``{name: Tensor}``, answers any nesting of tensors, and asks for its variables as ``loss_fn`` does;
        it may stop early. It runs beside the variables, so it works whatever becomes of the replicas.
        """
        label = self.graph.unique_name(name or f"{self.name}/{getattr(fn, '__name__', 'shared').strip('<>')}")
        with building(self.graph), name_scope(label.removeprefix(current_scope().prefix)), device(self._servers[0]):
            source = LaterCopy(self._shared, f"the shared function {label!r}", current_scope().prefix)
            given = {key: placeholder(spec.dtype, spec.dims, name=key) for key, spec in inputs.items()}
            with variables_from(source):
                outputs = fn(dict(given))
        return Predictor(given, outputs)

    @brief
    def steps(
        self, session: Session, batches: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
    ) -> Reports:
        """Train until ``batches`` are used up; one report per step.

        ``batches`` yields ``{name: array}``, one for each replica and step. Training goes on from the version that the
        variables are at. Breaking out, ``aclose`` or leaving the session cancels what runs and waits for it. A step
        begins only when it is asked for. When too few batches are left for a step, the iterator ends.

        Raises `NodeLost`, naming the nodes, when too few replicas are left for the policy or a server is lost; the
        error of a replica whose step fails otherwise; `FeedError` for a batch with other names than ``inputs``;
        `GraphError` for what is no `Session`.
        """
        return Reports(Steps(self, awaited_session(session, "trainer.steps")).run(batches))

    def statistics(self) -> Statistics:
        """Counts and latencies per replica, and batches dropped, over all of this trainer's steps."""
        return self.tally.statistics()


class Predictor:
    """A function that shares a trainer's variables: ``await predictor(session, {name: array})``.

    ``inputs`` and ``outputs`` are its tensors, to fetch and feed otherwise.
    """

    def __init__(self, inputs: dict[str, Tensor], outputs: Any) -> None:
        self.inputs = inputs
        self.outputs = outputs
        for leaf in flatten(outputs)[1]:
            if not isinstance(as_value(leaf), Tensor):
                raise GraphError(f"{user_site()}: a shared function answers tensors, not {leaf!r}")

    def __call__(
        self, session: Session, values: Mapping[str, Any] | None = None, **more: Any
    ) -> Coroutine[Any, Any, Any]:
        """The outputs for the inputs ``values``, in one mapping or by keyword."""
        opened = awaited_session(session, "a shared function")  # a blocking one runs ``outputs`` with ``inputs`` fed
        given = {**(values or {}), **more}
        check_names(given, self.inputs, "what a shared function takes")
        return opened.run(self.outputs, {self.inputs[name]: value for name, value in given.items()})


def _devices(given: str | Sequence[str], count: int) -> tuple[str, ...]:
    names = tuple(given.format(i) for i in range(count)) if isinstance(given, str) else tuple(given)
    if len(names) != count:
        raise GraphError(f"{user_site()}: {count} devices are needed, {len(names)} are given: {', '.join(names)}")
    return names


def _loss_and_metrics(answer: Any, who: str) -> tuple[Tensor, dict[str, Tensor]]:
    loss, metrics = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
    found = as_value(loss)
    if not isinstance(found, Tensor) or found.dtype.kind != "f" or found.spec.dims != ():
        got = found.spec if isinstance(found, Tensor) else repr(answer)[:80]
        raise SpecError(
            f"{user_site()}: loss_fn of {who} answered {got}; the loss must be a float scalar, as fr.mean(...) makes, "
            "alone or as (loss, {name: metric})"
        )
    return found, {name: as_value(metric) for name, metric in dict(metrics).items()}


def _moved(tower: Tower) -> list[str]:
    return [variable.name for gradient, variable in tower.gradients if gradient is not None]
