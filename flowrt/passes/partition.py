"""Cut a placed step into one plan per task, joined by sends and receives.

Law: a value crosses once per (tensor, destination device), whoever and however many want it there; small constants are
repeated instead, as is what its op says is computed again (`base.traits.Elsewhere`). Between devices of one task it is
brought, by a node on the one that wants it; tasks exchange what lies in their hosts' memory. There, too, lie shapes,
and what decides sizes. Order that must hold across tasks travels as a token. Edges are numbered within the step, so the
key of a transfer is (step, edge). In a cluster the client is a peer of its own: it sends the feeds and receives the
fetches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.plan import Plan, PlanFeed, PlanNode
from flowrt.base.traits import Elsewhere, traits_of
from flowrt.base.valueclass import valueclass
from flowrt.op import lookup, sizing
from flowrt.passes.known_sizes import ON_HOST, HowMade, find_size
from flowrt.passes.step import FED, Ref, StepGraph, StepNode, in_order

if TYPE_CHECKING:
    from flowrt.base.attributes import Attr
    from flowrt.base.device import Device
    from flowrt.base.errors import Site
    from flowrt.base.spec import Spec

REPEATED = 1 << 12
"""A constant of at most so many bytes is repeated where it is wanted: a message costs more."""


@valueclass
class Transfer:
    """A value on its way between the client and ``task``, under the key ``edge`` of the step."""

    edge: int
    task: str


@valueclass
class Part:
    """A fetch that is entries of what comes by another's transfer: from ``start`` to ``stop`` of the ``whole``."""

    whole: int
    start: int
    stop: int
    shape: tuple[int, ...]


@valueclass
class Client:
    """What the client of a step over several tasks sends and receives.

    ``feeds``: for each feed, the transfers to send it by (none where nobody needs it). ``fetches``: for each value that
    comes, its transfer, or the position of the feed that answers it. ``parts``: for each that was asked for, which of
    them it is, or is part of; if there are none, it is the one at its position.
    """

    name: str
    feeds: tuple[tuple[Transfer, ...], ...]
    fetches: tuple[Transfer | int, ...]
    parts: tuple[Part | int, ...] = ()

    def answers(self, came: Sequence[np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
        """What was asked for, made of what came."""
        if not self.parts:
            return came
        return [
            came[part] if isinstance(part, int) else came[part.whole][part.start : part.stop].reshape(part.shape).copy()
            for part in self.parts
        ]


@valueclass
class Partitioned:
    """A step in parts: a plan per task, the client's part, and how many values cross."""

    plans: Mapping[str, Plan]
    client: Client | None
    transfers: int


def partition(
    step: StepGraph,
    placement: Mapping[int, Device],
    *,
    home: Device | None,
    client: str | None,
    parts: tuple[Part | int, ...] = (),
) -> Partitioned:
    """The plans of ``step``, whose nodes run where ``placement`` says: one for every task that has nodes.

    Feeds and fetches cross to and from the ``client``, which is told of their ``parts``. Without one they are those of
    the plan of the task of ``home``, the device where feeds lie; without that, too, every plan is fed what it uses, and
    there is nothing to fetch.
    """
    cut = _Cut(step, placement, home, client)
    for node in step.nodes.values():
        cut.add(node)
    if client is None:
        return cut.closed()
    fetches = tuple(cut.answer(ref) for ref in step.fetches)
    return Partitioned(cut.plans(), Client(client, cut.feeds(), fetches, parts), cut.transfers)


class _Cut:
    """The nodes of the parts as they come together: those of the step, and the transfers between them."""

    def __init__(
        self, step: StepGraph, placement: Mapping[int, Device], home: Device | None, client: str | None
    ) -> None:
        self._step, self._home, self._client = step, home, client
        self._device = dict(placement)
        self._nodes: dict[int, StepNode] = {}
        self._order = {FED: -1} | {i: place for place, i in enumerate(step.nodes)}
        self._place: dict[int, tuple[int, int, int]] = {}  # the step's order, with what was put in beside its cause
        self._arrived: dict[tuple[Ref, Device], Ref] = {}
        self._copied: dict[int, int] = {}  # by node that brings a value of another device, the one that makes it
        self._sizes: dict[Device, dict[Ref, Spec | None]] = {}
        self._told: dict[tuple[tuple[int, ...], str], int] = {}
        self._fed: list[list[Transfer]] = [[] for _ in step.feeds]
        self._answers: dict[Ref, Transfer] = {}
        self._next = step.free
        self.transfers = 0

    def add(self, node: StepNode) -> None:
        """Put a node of the step into the part of its device."""
        device = self._device[node.id]
        if device.is_host:
            inputs = tuple([self._bring(ref, device, node.id) for ref in node.inputs])
        else:
            inputs = self._bring_apart(node, device)
        control = self._wait(node.control, device, node.id) if node.control else []
        control += [source for source in node.after if self._device[source] == device]
        self._place[node.id] = (self._order[node.id], 0, 0)
        waits = tuple(dict.fromkeys(control))
        as_it_was = not node.after and inputs == node.inputs and waits == node.control
        self._nodes[node.id] = node if as_it_was else node.rewired(inputs, waits, ())

    def answer(self, ref: Ref) -> Transfer | int:
        """How the client gets the value ``ref``: one transfer, however often it is fetched."""
        if ref[0] == FED:
            return ref[1]
        if ref not in self._answers:
            device = self._lies(ref).on_host
            edge, _ = self._send(self._bring(ref, device, ref[0]), device, str(self._client))
            self._answers[ref] = Transfer(edge, device.host)
        return self._answers[ref]

    def feeds(self) -> tuple[tuple[Transfer, ...], ...]:
        return tuple(tuple(transfers) for transfers in self._fed)

    # ── crossing ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _lies(self, ref: Ref) -> Device:
        """The device in whose memory the value of a node of the step lies."""
        device = self._device[ref[0]]
        return device.on_host if self._step.nodes[ref[0]].op.name in ON_HOST else device

    def _bring(self, ref: Ref, device: Device, consumer: int) -> Ref:
        """The value ``ref`` as it is on ``device``."""
        remote_feed = ref[0] == FED and self._client is not None
        source = self._home or device.on_host if ref[0] == FED else self._lies(ref)
        if (source is device or source == device) and not remote_feed:
            return ref
        if (ref, device) not in self._arrived:
            self._arrived[ref, device] = self._brought(ref, source, device, consumer, remote_feed)
        return self._arrived[ref, device]

    def _brought(self, ref: Ref, source: Device, device: Device, consumer: int, remote_feed: bool) -> Ref:
        if self._is_small_constant(ref):
            return self._repeat(self._step.nodes[ref[0]], device, consumer)
        if source.host != device.host and device.is_host and self._is_computed_again(ref):
            return self._compute_again(ref, device, consumer)
        if source.host == device.host and not remote_feed:
            return self._copy(ref, device, consumer)
        if not device.is_host:
            return self._copy(self._bring(ref, device.on_host, consumer), device, consumer)
        if remote_feed:
            return self._receive_feed(ref, device, consumer)
        return self._carry(self._bring(ref, source.on_host, ref[0]), source.on_host, device, consumer)

    def _bring_apart(self, node: StepNode, device: Device) -> tuple[Ref, ...]:
        """The inputs of a node on ``device``, those in the host's memory whose values decide sizes.

        What inference finds by itself decides sizes wherever it is, and is left there: the host need not be asked.
        """
        sizes = set(sizing(node.op.name, node.attrs, len(node.inputs)))
        where = [
            device.on_host if place in sizes and self._size(ref, device) is None else device
            for place, ref in enumerate(node.inputs)
        ]
        return tuple(self._bring(ref, there, node.id) for ref, there in zip(node.inputs, where, strict=True))

    def _size(self, ref: Ref, device: Device) -> Spec | None:
        """What inference finds of a value that is made on ``device`` by arithmetic of shapes: see `find_size`."""
        return find_size(ref, lambda ref: self._made(ref, device), self._sizes.setdefault(device, {}))

    def _made(self, ref: Ref, device: Device) -> HowMade | None:
        """How a constant is made, or an integer on ``device`` that waits for nothing."""
        node = self._step.nodes.get(ref[0])
        if node is None or node.control or node.after or node.op.stateful:
            return None
        here = self._device[node.id] == device and self._step.spec(ref).dtype.kind in "iu"
        if not (here or node.op.name == "constant"):
            return None
        return HowMade(node.op, node.attrs, node.inputs, [self._step.spec(source) for source in node.inputs], ref[1])

    def _copy(self, ref: Ref, device: Device, consumer: int) -> Ref:
        """The value ``ref`` of another device of the same task."""
        name, site = self._origin(ref)
        name = f"{name}/to_{device.kind}_{device.index}"
        copied = self._insert(lookup("bring"), name, (ref,), {}, site, device, (consumer, -1))
        self._copied[copied] = ref[0]
        return copied, 0

    def _bring_home(self, ref: Ref, home: Device) -> Ref:
        """The value ``ref`` in the host's memory, on the task of ``home``."""
        if ref[0] == FED:
            return ref
        lies = self._lies(ref)
        return ref if lies.is_host and lies.host == home.host else self._bring(ref, home, ref[0])

    def _wait(self, sources: tuple[int, ...], device: Device, consumer: int) -> list[int]:
        """What a node on ``device`` waits for in order to start after ``sources``: a token from each other task."""
        by_task: dict[str, list[int]] = {}
        for source in sources:
            by_task.setdefault(self._device[source].host, []).append(source)
        out = by_task.pop(device.host, [])
        for others in by_task.values():
            key = (tuple(others), device.host)
            if key not in self._told:
                origin = self._device[others[-1]].on_host
                self._told[key], _ = self._carry((self._token(key[0], origin), 0), origin, device.on_host, consumer)
            out.append(self._told[key])
        return out

    def _is_small_constant(self, ref: Ref) -> bool:
        node = self._step.nodes.get(ref[0])
        return (
            node is not None
            and node.op.name == "constant"
            and not node.control
            and self._step.spec(ref).nbytes <= REPEATED
        )

    def _repeat(self, constant: StepNode, device: Device, consumer: int) -> Ref:
        return self._insert(constant.op, constant.name, (), constant.attrs, constant.site, device, (consumer, -1)), 0

    def _is_computed_again(self, ref: Ref) -> bool:
        """Whether each task that wants a value computes it of its inputs."""
        node = self._step.nodes.get(ref[0])
        if node is None or node.control or node.after:
            return False
        match traits_of(node.op.name).elsewhere:
            case Elsewhere.AGAIN:
                return bool(node.attrs.get("again", True))
            case Elsewhere.AS_FIRST:
                return self._is_computed_again(node.inputs[0])
        return False

    def _compute_again(self, ref: Ref, device: Device, consumer: int) -> Ref:
        """The value ``ref`` of another task, computed on ``device``, as all outputs of its node are."""
        node = self._step.nodes[ref[0]]
        inputs = tuple([self._bring(source, device, consumer) for source in node.inputs])
        made = self._insert(node.op, node.name, inputs, node.attrs, node.site, device, (consumer, -1))
        for output in range(len(node.outputs)):
            self._arrived[(node.id, output), device] = made, output
        return made, ref[1]

    def _token(self, sources: tuple[int, ...], device: Device) -> int:
        """A value that is there once all ``sources`` have run, and dead if one of them is dead."""
        last = self._step.nodes[sources[-1]]
        attrs: dict[str, Attr] = {"value": np.zeros((), bool)}
        where = (last.id, 1)
        return self._insert(lookup("constant"), f"{last.name}/done", (), attrs, last.site, device, where, sources)

    def _carry(self, ref: Ref, source: Device, device: Device, consumer: int) -> Ref:
        """The value ``ref``, sent from ``source`` to ``device``."""
        edge, sender = self._send(ref, source, device.host)
        return self._receive(ref, edge, source.host, device, consumer, (sender,))

    def _receive_feed(self, ref: Ref, device: Device, consumer: int) -> Ref:
        edge = self._new_edge()
        self._fed[ref[1]].append(Transfer(edge, device.host))
        return self._receive(ref, edge, str(self._client), device, consumer)

    def _send(self, ref: Ref, device: Device, peer: str) -> tuple[int, int]:
        """The edge and the node that send ``ref`` to ``peer``."""
        edge = self._new_edge()
        name, site = self._origin(ref)
        attrs: dict[str, Attr] = {"edge": edge, "peer": peer}
        if lead := self._step.lead.get(self._copied.get(ref[0], ref[0])):
            attrs["lead"] = lead
        return edge, self._insert(lookup("send"), f"{name}/send_{edge}", (ref,), attrs, site, device, (ref[0], 2))

    def _receive(
        self, ref: Ref, edge: int, peer: str, device: Device, consumer: int, after: tuple[int, ...] = ()
    ) -> Ref:
        spec = self._spec(ref)
        name, site = self._origin(ref)
        attrs: dict[str, Attr] = {"edge": edge, "peer": peer, "dtype": spec.dtype.name, "shape": spec.dims}
        name = f"{name}/recv_{edge}"
        return self._insert(lookup("recv"), name, (), attrs, site, device, (consumer, -1), after=after), 0

    def _insert(
        self,
        op: Any,
        name: str,
        inputs: tuple[Ref, ...],
        attrs: Mapping[str, Attr],
        site: Site,
        device: Device,
        place: tuple[int, int],
        control: tuple[int, ...] = (),
        after: tuple[int, ...] = (),
    ) -> int:
        made = self._next
        self._next += 1
        outputs = op.infer([self._spec(ref) for ref in inputs], attrs)
        self._nodes[made] = StepNode(made, op, name, inputs, outputs, attrs, control, site, after)
        self._device[made] = device
        beside = self._place[place[0]][0] if place[0] in self._place else self._order[place[0]]
        self._place[made] = (beside, place[1], made)
        return made

    def _new_edge(self) -> int:
        self.transfers += 1
        return self.transfers - 1

    def _spec(self, ref: Ref) -> Any:
        if ref[0] == FED or ref[0] in self._step.nodes:
            return self._step.spec(ref)
        return self._nodes[ref[0]].outputs[ref[1]]

    def _origin(self, ref: Ref) -> tuple[str, Site]:
        """The name and site of the node that makes ``ref``."""
        if ref[0] == FED:
            node = self._step.feeds[ref[1]].op
            return node.name, node.site
        found = self._step.nodes.get(ref[0]) or self._nodes[ref[0]]
        return found.name, found.site

    # ── plans ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def closed(self) -> Partitioned:
        """The plans of a step that has no client: it is fed, and answers, where it runs."""
        feeds = [
            PlanFeed(t.op.name, spec, str(t.op.site))
            for t, spec in zip(self._step.feeds, self._step.feed_specs, strict=True)
        ]
        if self._home is None:
            plans = {task: self._plan(task, nodes, _fed_to(nodes, feeds)) for task, nodes in self._by_task()}
            return Partitioned(plans, None, self.transfers)
        home = self._home.host
        fetches = tuple([self._bring_home(ref, self._home) for ref in self._step.fetches])
        by_task: dict[str, list[StepNode]] = {home: [], **dict(self._by_task())}
        own = self._plan(home, by_task.pop(home), dict(enumerate(feeds)), fetches)
        return Partitioned(
            {home: own, **{t: self._plan(t, nodes) for t, nodes in by_task.items()}}, None, self.transfers
        )

    def plans(self) -> dict[str, Plan]:
        """One plan for every task that has something to do."""
        return {task: self._plan(task, nodes) for task, nodes in self._by_task()}

    def _by_task(self) -> list[tuple[str, list[StepNode]]]:
        by_task: dict[str, list[StepNode]] = {}
        for node in self._ordered():
            by_task.setdefault(self._device[node.id].host, []).append(node)
        return sorted(by_task.items())

    def _ordered(self) -> Iterable[StepNode]:
        uses = Counter(source for node in self._nodes.values() for source in node.before)
        uses.update(self._step.targets)
        uses.update(source for source, _ in self._step.fetches)
        for i in sorted(self._nodes, key=self._place.__getitem__, reverse=True):  # who uses it is looked at before it
            if not uses[i] and (self._is_small_constant((i, 0)) or self._is_computed_again((i, 0))):
                uses.subtract(self._nodes.pop(i).before)  # it is repeated elsewhere
        return in_order(self._nodes, key=self._place.__getitem__).values()

    def _plan(
        self,
        task: str,
        nodes: Iterable[StepNode],
        feeds: Mapping[int, PlanFeed] | None = None,
        fetches: tuple[Ref, ...] = (),
    ) -> Plan:
        feeds = feeds or {}
        value: dict[Ref, int] = {(FED, i): place for place, i in enumerate(feeds)}
        position: dict[int, int] = {}
        out: list[PlanNode] = []
        sites: dict[int, str] = {}  # the texts of those that there are
        names = {id(device): device.local for device in {id(d): d for d in self._device.values()}.values()}
        for node in nodes:
            site = sites.get(id(node.site)) or sites.setdefault(id(node.site), str(node.site))
            position[node.id] = len(out)
            for i in range(len(node.outputs)):
                value[node.id, i] = len(value)
            out.append(
                PlanNode(
                    node.op.name,
                    node.name,
                    tuple([value[ref] for ref in node.inputs]),
                    node.outputs,
                    node.attrs,
                    tuple([position[source] for source in node.control]),
                    names[id(self._device[node.id])],
                    site,
                )
            )
        return Plan(task, tuple(out), tuple(feeds.values()), tuple(value[ref] for ref in fetches))


def _fed_to(nodes: Iterable[StepNode], feeds: Sequence[PlanFeed]) -> dict[int, PlanFeed]:
    """Those of ``feeds`` that ``nodes`` use, by their place."""
    used = {place for node in nodes for source, place in node.inputs if source == FED}
    return {place: feeds[place] for place in sorted(used)}
