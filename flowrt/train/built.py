"""Builds replicated training into a graph: the towers, and what each server does with updates.

One tower per replica computes the loss and its gradients on the replica's device. For each parameter server there is
what says whether its part of an update is finite, and what moves its variables by the mean of as many updates as the
policy takes. `flowrt.train.program` makes plans of these, which the nodes run by themselves: `flowrt.sched.runs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from flowrt.base.device import HOST_KIND, Device, HeldTwice, SomeOf
from flowrt.base.errors import GraphError, SpecError, user_site
from flowrt.base.locating import checked_function, fitting
from flowrt.base.plain import is_number, is_whole, shortened
from flowrt.base.spec import Spec, is_float
from flowrt.base.valueclass import valueclass
from flowrt.graph import (
    Graph,
    Node,
    Tensor,
    control_dependencies,
    current_graph,
    current_scope,
    device,
    name_scope,
    scoped,
)
from flowrt.op import as_value
from flowrt.ops.flow import group as group_ops
from flowrt.ops.source import placeholder
from flowrt.ops.state import Variable, variables_from
from flowrt.optim.optimizer import by_parts, counted_together, mirror
from flowrt.sched.drivers.packing import INT8
from flowrt.sched.policies import AllOf, LocalSteps, Policy, fewest, fixed_size, policy_to_data
from flowrt.train.compression import checked_compression
from flowrt.train.local import LocalCopies as LocalCopies
from flowrt.train.local import LocalTower, apply_differences, build_local, outer_of
from flowrt.train.scaling import scale_of
from flowrt.train.sharing import FirstCopy, LaterCopy, Servers, SharedVariable, fewest_on
from flowrt.train.statistics import Tally
from flowrt.train.updates import Gradient, all_finite, fed_like, mean_of, of_rows, parts_of

if TYPE_CHECKING:
    from flowrt.optim.optimizer import Optimizer

Array = np.ndarray[Any, Any]
LossFn = Callable[[dict[str, Tensor]], Any]


@valueclass
class Tower:
    """What one replica computes from ``inputs`` and variables. ``gradients`` are of those that the loss depends on.

    For each server, ``finite`` says whether all numbers of its part of the update are; None where it has none. With
    ``local`` steps the gradients are what these come to, and the loss is that of each.
    """

    replica: int
    node: str  # the task it was asked to be on; empty if it may be anywhere
    inputs: dict[str, Tensor]
    loss: Tensor
    metrics: dict[str, Tensor]
    gradients: list[tuple[Gradient, Variable]]
    finite: list[Tensor | None]
    local: LocalTower | None = None
    skips: Tensor | None = None  # where a loss is scaled: 1 if this update has its version move nothing, else 0


@valueclass
class ServerShard:
    """What one server does with updates.

    ``parts[i]`` are placeholders for its parts of the i-th update of a set; ``apply`` moves its variables by the mean
    over the set, and ``step`` to ``version``. Where there is but one update, made of a set of any size, ``combined``
    says which of its parts are of rows.
    """

    variables: list[Variable]
    parts: list[list[Tensor]]
    combined: list[bool]
    step: Variable
    apply: Node


class Built:
    """What a trainer builds, and what it is asked to be; see `Replicated` for the arguments."""

    @fitting
    def __init__(
        self,
        loss_fn: LossFn,
        inputs: Mapping[str, Spec],
        optimizer: Optimizer,
        replicas: int | tuple[int, int],
        policy: Policy | None = None,
        *,
        servers: int = 1,
        copies: int = 1,
        name: str = "replicated",
        server_device: str | Sequence[str] = "/job:ps/task:{}",
        worker_device: str | Sequence[str] = "/job:worker/task:{}",
        late: str = "drop",
        split_above: int | None = 1 << 28,
        compression: str | None = None,
    ) -> None:
        self.graph: Graph = current_graph("replicated training")
        self.policy: Policy = AllOf() if policy is None else policy
        local = self.policy if isinstance(self.policy, LocalSteps) else None
        self.local_steps: int = 1 if local is None else local.k  # batches that a replica makes an update of
        self.overlap: int = 0 if local is None else local.overlap  # of these, how many while updates travel
        self.outer: Optimizer | None = None if local is None else outer_of(local)
        self.inputs = checked_inputs(inputs)
        self.late = late
        self.compression = checked_compression(compression)
        least, self.replicas = _range(replicas)
        self._check(servers, optimizer, split_above)
        checked_function(loss_fn, "loss_fn")
        self.copies = _checked_copies(copies, servers)
        self.floor: int = fewest(self.policy, least, self.replicas) if least else 0  # 0 where none come and go
        self.least: int = self.floor or self.policy.least(self.replicas)  # fewer do not train
        self._workers = _devices(worker_device, self.replicas)
        self._servers = _on_hosts(_devices(server_device, servers))
        self.nodes = tuple(Device.parse(worker).host for worker in self._workers)
        self.servers = tuple(Device.parse(server).host for server in self._servers)
        self._outside = current_scope()
        self.name = self.graph.claim_name(name, "replicated")
        self.container = self._outside.container
        shares = len({*self.servers}) > 1 and not {*self.servers}.isdisjoint(self.nodes)
        self._where = Servers(self._servers, split_above, fewest_on(self.servers, self.copies) if shares else None)
        self.tally = Tally(self.replicas)
        with name_scope(self.name.removeprefix(self._outside.prefix)):
            self._build(loss_fn, optimizer)

    def _check(self, servers: int, optimizer: Any, split_above: Any) -> None:
        if isinstance(optimizer, type) or not hasattr(optimizer, "compute_gradients"):
            raise GraphError(f"{user_site()}: optimizer is an instance, such as fr.optim.SGD(0.1), not {optimizer!r}")
        if self.outer is not None and scale_of(optimizer) is not None:
            raise GraphError(
                f"{user_site()}: replicas that step by themselves would each change the scale of their loss; have it "
                "stay as it is, by fr.LossScaled(..., grow_every=None)"
            )
        if self.compression == INT8 and scale_of(optimizer) is not None:
            raise GraphError(
                f"{user_site()}: compression='int8' goes on with what it left of updates that counted, which those are "
                "not that only change the scale of a loss; take 'bfloat16', or fr.LossScaled(..., grow_every=None)"
            )
        if not is_whole(servers, 1):
            raise GraphError(f"{user_site()}: expected at least 1 server, got servers={servers!r}")
        if split_above is not None and not is_number(split_above):
            raise GraphError(f"{user_site()}: split_above is a number of bytes, or None, not {split_above!r}")
        policy_to_data(self.policy)
        if self.late not in ("drop", "requeue"):
            raise GraphError(f"{user_site()}: late is 'drop' or 'requeue', not {self.late!r}")

    def _build(self, loss_fn: LossFn, optimizer: Optimizer) -> None:
        first = FirstCopy(self._where, self._outside, f"{current_scope().prefix}replica_0/")
        self.scale, self._scope = scale_of(optimizer), current_scope()
        self._shared: list[SharedVariable] = first.found
        before = len(self.graph.nodes)
        self.towers = [
            self._build_tower(replica, first if replica == 0 else None, loss_fn, optimizer)
            for replica in range(self.replicas)
        ]
        self._start_on_servers()
        self.graph.some_of.append(SomeOf(self.nodes, self.least, range(before, len(self.graph.nodes))))
        self._check_alike()
        self.version: Tensor = placeholder("int64", (), name="version")
        with counted_together(self.held):
            self.shards = [self._build_shard(server, where, optimizer) for server, where in enumerate(self._servers)]
        self.step: Variable = self.shards[0].step
        mirror([shard.step for shard in self.shards], self.step.name)
        if self.copies > 1:
            moved = frozenset(name_of(variable) for variable in self.moved)
            self.graph.held_twice.append(HeldTwice(tuple(dict.fromkeys(self.servers)), moved, self.keep_copies))

    def _start_on_servers(self) -> None:
        """Have what variables start from be made on their servers, lest no session open without the first replica.

        What its tower uses, too, stays.
        """
        tower = self.towers[0]
        finite = [each for each in tower.finite if each is not None]
        parts = parts_of(gradient for gradient, _ in tower.gradients)
        used = leading_to(tensor.op for tensor in (tower.loss, *tower.metrics.values(), *parts, *finite))
        here = Device.parse(self._workers[0]).over(self._outside.device)
        for part in self.held:
            if part.resource.initial is not None:
                for node in leading_to([part.resource.initial.op]) - used:
                    if node.device == here:
                        node.device = part.resource.device

    async def keep_copies(self, session: Any) -> None:
        """See to it that what servers hold is held twice on the nodes of ``session``, which opens."""

    @property
    def variables(self) -> list[Variable]:
        """The variables that ``loss_fn`` created, in order."""
        return [shared.variable for shared in self._shared]

    @property
    def held(self) -> list[Variable]:
        """The variables that servers hold: those, and of one that is split its parts."""
        return [part for variable in self.variables for part in variable.parts]

    @property
    def moved(self) -> list[Variable]:
        """Those, and all else that applying an update works on."""
        names = {name_of(variable) for variable in self.held}
        for node in leading_to(shard.apply for shard in self.shards):
            names.update(node.resources)
        return [variable for variable in self.graph.variables if name_of(variable) in names]

    # ── towers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _build_tower(self, replica: int, first: FirstCopy | None, loss_fn: LossFn, optimizer: Optimizer) -> Tower:
        who = f"replica {replica} of {self.name!r}"
        with name_scope(f"replica_{replica}"), device(self._workers[replica]):
            source = first or LaterCopy(self._shared, who, current_scope().prefix)
            inputs: dict[str, Tensor] = {
                name: placeholder(s.dtype, s.dims, name=name) for name, s in self.inputs.items()
            }
            copies = LocalCopies(source) if self.outer is not None else None
            before = len(self.graph.summaries)
            with variables_from(copies or source):
                loss, metrics = _loss_and_metrics(loss_fn(Inputs(inputs)), who)
                metrics |= _told_beside(self.graph, before, metrics, who)
                if self.scale is not None:
                    self.scale.variable()
            if first is not None:
                self._take_servers()
            if isinstance(source, LaterCopy):
                source.check_all_given()
            local, skips, trainable = None, None, self._trainable(who)
            if self.scale is not None:
                pairs = self.scale.gradients(loss, trainable)
                skips = self.scale.skips(pairs)
            elif copies is None:
                pairs = by_parts(optimizer.compute_gradients(loss, trainable))
            else:
                local, pairs = build_local(optimizer, loss, trainable, copies, who, self.overlap > 0)
            parts = [self._of_server(pairs, server) for server in range(len(self._servers))]
            finite = [all_finite(part) if part and skips is None else None for part in parts]
        return Tower(replica, self.nodes[replica], inputs, loss, metrics, pairs, finite, local, skips)

    def _take_servers(self) -> None:
        """Have those take part that variables of the first copy went to."""
        self._servers, self.servers = self._servers[: self._where.used], self.servers[: self._where.used]
        if self.scale is not None:
            with scoped(self._scope):
                self.scale.add_servers(self._servers)

    def _trainable(self, who: str) -> list[Variable]:
        found = [variable for variable in self.variables if variable.trainable]
        if not found:
            raise GraphError(f"{user_site()}: loss_fn created no trainable variable for {who}; create them inside it")
        return found

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

    def gradients_of(self, tower: Tower, server: int) -> list[tuple[Gradient, Variable]]:
        """The gradients of ``tower`` that move variables of ``server``, with these."""
        return self._of_server(tower.gradients, server)

    def _of_server(self, pairs: Sequence[tuple[Gradient, Variable]], server: int) -> list[tuple[Gradient, Variable]]:
        home = self._home
        return [(gradient, v) for gradient, v in pairs if home[v.name] == server]

    @property
    def _home(self) -> dict[str, int]:
        """The server of each variable that one holds."""
        counts = [] if self.scale is None else self.scale.counts
        return {count.name: server for server, count in enumerate(counts)} | {
            part.name: server
            for shared in self._shared
            for part, server in zip(shared.variable.parts, shared.servers, strict=True)
        }

    def _build_shard(self, server: int, where: str, optimizer: Optimizer) -> ServerShard:
        pairs = self.gradients_of(self.towers[0], server)
        variables = [variable for _, variable in pairs]
        size = fixed_size(self.policy, self.replicas, self.floor)
        with name_scope(f"server_{server}"), device(where):
            fed = [fed_like([gradient for gradient, _ in pairs], any_rows=not size) for _ in range(size or 1)]
            means = [mean_of(member) for member in zip(*fed, strict=True)]
            moved = self._moves(optimizer, server, list(zip(means, variables, strict=True))) if pairs else []
        with device(where), variables_from(None):
            step = Variable(np.zeros((), np.int64), name=f"step_{server}" if server else "step", trainable=False)
        with name_scope(f"server_{server}"), device(where), control_dependencies(moved):
            apply: Node = group_ops(step.assign(self.version), *moved)
        combined = [] if size else of_rows(gradient for gradient, _ in pairs)
        return ServerShard(variables, [parts_of(member) for member in fed], combined, step, apply)

    def without_mean(self, told: Sequence[Any]) -> SpecError:
        """What is wrong with the first metric that has several shapes in one step: a text in its place tells these."""
        pairs = zip(self.towers[0].metrics.items(), told, strict=True)
        name, metric, shapes = next((*item, shapes) for item, shapes in pairs if isinstance(shapes, str))
        return SpecError(
            f"{metric.op.site}: the metric {name!r} has no mean over the replicas of {self.name!r}: it is {shapes}; "
            "answer one number of it, as fr.mean makes"
        )

    def _moves(self, optimizer: Optimizer, server: int, pairs: list[tuple[Gradient, Variable]]) -> list[Node]:
        """What moves a server's variables by the mean of updates."""
        if self.scale is not None:
            return self.scale.moves(pairs, keeps=server == self._home[self.scale.name])
        return [optimizer.apply_gradients(pairs)] if self.outer is None else apply_differences(self.outer, pairs)


def leading_to(nodes: Iterable[Node]) -> set[Node]:
    """These, and all before them."""
    seen, ahead = set[Node](), list(nodes)
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            ahead += [tensor.op for tensor in node.inputs]
            ahead += node.control_inputs
    return seen


class Inputs(dict[str, Tensor]):
    """What the user's function is given: asked for another name, it says which there are."""

    def __missing__(self, name: Any) -> NoReturn:
        raise GraphError(f"{user_site()}: there is no input {name!r}; inputs= names {', '.join(map(repr, self))}")


def name_of(variable: Variable) -> tuple[str, str]:
    """By which nodes know a variable."""
    return variable.resource.container, variable.resource.name


def checked_inputs(inputs: Any) -> dict[str, Spec]:
    if not isinstance(inputs, Mapping):
        raise GraphError(f"{user_site()}: inputs maps names to fr.Spec(dtype, shape), and is not {shortened(inputs)}")
    for name, spec in inputs.items():
        if not isinstance(spec, Spec):
            raise GraphError(f"{user_site()}: inputs maps names to fr.Spec(dtype, shape), but {name!r} to {spec!r}")
    return dict(inputs)


def _range(replicas: Any) -> tuple[int, int]:
    """The fewest, 0 where none come and go, and the most. Raises `GraphError` for what is no such numbers."""
    least, most = replicas if isinstance(replicas, tuple) and len(replicas) == 2 else (0, replicas)
    fewest = 1 if isinstance(replicas, tuple) else 0
    if not (is_whole(least, fewest) and is_whole(most, max(least, 1))):
        raise GraphError(
            f"{user_site()}: replicas={replicas!r}: expected how many copies train, 1 or more such as replicas=4, or "
            "the fewest and the most, such as replicas=(2, 32)"
        )
    return int(least), int(most)


def _checked_copies(copies: Any, servers: int) -> int:
    if isinstance(copies, bool) or copies not in (1, 2):
        raise GraphError(f"{user_site()}: copies={copies!r}: expected 1, or 2 for variables that are held twice")
    if copies > 1 and servers < 2:
        raise GraphError(
            f"{user_site()}: copies={copies} with servers={servers}: a copy is another server's; give it servers=2 or "
            "more, and two tasks to put them on"
        )
    return int(copies)


def _devices(given: str | Sequence[str], count: int) -> tuple[str, ...]:
    try:
        names = tuple(given.format(i) for i in range(count)) if isinstance(given, str) else tuple(given)
    except (LookupError, ValueError, TypeError):
        raise GraphError(
            f"{user_site()}: {given!r} does not say where {count} copies are; write their devices, or one with {{}} "
            "for the number, as '/job:worker/task:{}'"
        ) from None
    if len(names) != count:
        raise GraphError(f"{user_site()}: {count} devices are needed, {len(names)} are given: {', '.join(names)}")
    return names


def _on_hosts(servers: tuple[str, ...]) -> tuple[str, ...]:
    """Servers, none of which is another device than a host's: what they tell lies in its memory."""
    for name in servers:
        if (kind := Device.parse(name).kind) not in (None, HOST_KIND):
            raise GraphError(
                f"{user_site()}: server_device={name!r}: servers' variables lie in their hosts' memory; leave out "
                f"{kind}, on which replicas compute by worker_device"
            )
    return servers


def _loss_and_metrics(answer: Any, who: str) -> tuple[Tensor, dict[str, Tensor]]:
    loss, metrics = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
    found = as_value(loss)
    if not isinstance(found, Tensor) or not is_float(found.dtype) or found.spec.dims != ():
        got = found.spec if isinstance(found, Tensor) else repr(answer)[:80]
        raise SpecError(
            f"{user_site()}: loss_fn of {who} answered {got}; the loss must be a float scalar, as fr.mean(...) makes, "
            "alone or as (loss, {name: metric})"
        )
    if not isinstance(metrics, Mapping):
        raise SpecError(f"{user_site()}: the metrics of {who} are {{name: metric}}, not {shortened(metrics)}")
    return found, {name: as_value(metric) for name, metric in metrics.items()}


def _told_beside(graph: Graph, before: int, metrics: Mapping[str, Tensor], who: str) -> dict[str, Tensor]:
    """What loss_fn told by `fr.summary.scalar`: metrics, as each replica tells it, by names within its scope."""
    found: dict[str, Tensor] = {}
    for told in list(graph.summaries)[before:]:
        name = told.name.removeprefix(current_scope().prefix)
        if told.kind != "scalar":
            raise GraphError(
                f"{user_site()}: loss_fn of {who} tells the {told.kind} {name!r}; what each replica computes for "
                "itself is told as scalars alone. Tell of the trainer's variables once it is built"
            )
        if name in metrics:
            raise GraphError(f"{user_site()}: loss_fn of {who} answers the metric {name!r}, and tells it, too")
        found[name] = graph.summaries.pop(told)
    return found


def _moved(tower: Tower) -> list[str]:
    return [variable.name for _, variable in tower.gradients]
