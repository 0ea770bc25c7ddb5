"""`fr.train.Replicated`: a model trained by several replicas, as a program has it."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import GraphError, path_of, user_site
from flowrt.base.locating import checked_function, fitting
from flowrt.base.plain import is_whole
from flowrt.base.telling import telling
from flowrt.base.tracebacks import brief
from flowrt.data import Source
from flowrt.graph import Tensor, current_scope, device, name_scope
from flowrt.ledger import Ledger
from flowrt.op import as_value, building
from flowrt.ops.source import placeholder
from flowrt.ops.state import variables_from
from flowrt.ops.structure import flatten
from flowrt.session.awaited import awaited_session
from flowrt.train.batches import check_iterable, check_names
from flowrt.train.built import Inputs, checked_inputs
from flowrt.train.reads import check_source
from flowrt.train.replay import Replay
from flowrt.train.reports import Reports
from flowrt.train.sharing import LaterCopy
from flowrt.train.steps import Steps
from flowrt.train.trainer import Trainer

if TYPE_CHECKING:
    import os

    from flowrt.base.spec import Spec
    from flowrt.session.session import Session
    from flowrt.train.statistics import Statistics


class Replicated(Trainer):
    """Trains one set of variables with several replicas of a model, each on batches of its own.

    Args:
        loss_fn: Builds the model: takes ``{name: Tensor}``, answers a scalar loss, or ``(loss, {name: metric})``. It is
            called once per replica; the first call creates the variables, later ones get the same ones in call order.
        inputs: The spec of each input of ``loss_fn``, by name.
        optimizer: Moves the variables by the mean of the kept updates; with `LocalSteps` each replica's copies of them.
        replicas: How many copies train. ``(least, most)`` where their nodes come and go: ``most`` are built, those
            whose node is there train, and while ``least``, or what ``policy`` needs, are not there, training waits. A
            policy is asked about those that are there: `AllOf` waits for all of these.
        policy: Whose updates make a step, such as `AllOf`, `FirstOf` or `Adaptive`, or a `Policy` of your own.
        servers: Over how many parameter servers the variables are spread, by bytes.
        copies: With 2, each server's variables are held by the next one, too, which moves them by the same updates: a
            server may be lost, and nothing is. With 1, training goes back to a checkpoint then, if the session has any.
        name: Prefixes the names of what is built, and names the trainer on the nodes.
        server_device: Where server ``{}`` is, or a task for each; empty for anywhere. Its variables lie in that host's
            memory. Of as many servers as replicas, "/job:worker/task:{}" has each worker hold a share of them, as in an
            all-reduce: as many as there are shares of 16 KiB, as a smaller one costs more in messages than it spares.
        worker_device: Where replica ``{}`` is, or a device for each. With both empty, all may run in one process.
        late: What becomes of a batch whose update came late, or was lost with its replica: with "drop" nothing more,
            with "requeue" it is handed out again, before new ones, until an update of it is kept.
        split_above: A variable of more bytes is split by its rows, into a part for each server, unless its
            ``partition`` says how; None for none. By default 256 MiB.
        compression: "bfloat16" has gradients of float32 travel from replicas to servers in half the bytes, where these
            are on several hosts, each number as the nearest bfloat16; "int8" in a quarter, with what that leaves of a
            number added to the next update's. See docs/guide/compression.md.

    A replica's update counts whole or not at all, on every server. Raises `GraphError` for a policy that ``replicas``
    cannot meet, for a range that makes no sense and for copies that differ, `SpecError` for a loss that is not a float
    scalar.
    """

    @telling
    def __repr__(self) -> str:
        return f"fr.train.Replicated {self.name!r} of {self.replicas} replicas, {self.policy!r}"

    @brief
    def share(self, fn: Callable[[dict[str, Tensor]], Any], inputs: Mapping[str, Spec], *, name: str = "") -> Predictor:
        """Another function on the same variables, for evaluation and prediction.

        ``fn`` takes ``{name: Tensor}``, answers any nesting of tensors, and asks for its variables as ``loss_fn`` does;
        it may stop early. It runs beside the variables, so it works whatever becomes of the replicas.
        """
        called = getattr(checked_function(fn, "what a trainer shares"), "__name__", "shared").strip("<>")
        label = self.graph.unique_name(name or f"{self.name}/{called}")
        with building(self.graph), name_scope(label.removeprefix(current_scope().prefix)), device(self._servers[0]):
            source = LaterCopy(self._shared, f"the shared function {label!r}", current_scope().prefix)
            given: dict[str, Tensor] = {
                key: placeholder(spec.dtype, spec.dims, name=key) for key, spec in checked_inputs(inputs).items()
            }
            with variables_from(source):
                outputs = fn(Inputs(given))
        return Predictor(given, outputs)

    @fitting
    def steps(
        self,
        session: Session,
        batches: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
        *,
        ahead: int = 0,
        ledger: str | os.PathLike[str] | None = None,
        detached: bool = False,
    ) -> Reports:
        """Train until ``batches`` are used up; one report per step.

        ``batches`` yields ``{name: array}``, one for each replica and step; they are drawn, and sent to the replicas,
        ``ahead`` + 3 for each at most before they are used. An iterator may write batches into the memory of others
        before, if it does so within its first 8: then each is copied. Else what was given is not to be written to. Of a
        source of `flowrt.data` only identities are sent, and replicas read what they name themselves. Training goes on
        from the version that the variables are at. They move when a report is asked for, and ``ahead`` steps beyond it:
        with 0 they are in the loop's body at exactly ``report.step``, while the replicas already compute the next
        updates; with more the nodes need not wait for a slow body, and a session that saves checkpoints by itself has
        them wait all the same. What the body writes to variables of ``loss_fn``, or restores, is seen by updates from
        the step after the next on.

        What becomes of every batch is written to the file ``ledger``, or, where the session has `Checkpoints`, to one
        beside them: see `flowrt.ledger`. Identities go on from there, and a source of `fr.data` is gone on with where
        it was left.

        Breaking out, ``aclose`` or leaving the session ends what runs and waits for it; what the servers had begun to
        apply, all apply. When too few batches are left for a step, the iterator ends.

        With ``detached`` the nodes go on by themselves, also when this client leaves the loop, closes its session or
        dies: until the batches, a source of `fr.data`, are used up, or somebody calls `stop`. Who says the same again
        in a session of the same name attaches: it has the reports that nobody asked beyond, as many as 16 MiB hold, and
        then new ones, which its ledger takes in. Variables move meanwhile; checkpoints are saved while a client is
        there, of one version.

        When a server is lost, a session with `Checkpoints` waits for it, restores the newest one, and goes on from
        there: the next report's ``rolled_back`` says which steps are undone.

        Raises `NodeLost`, naming the nodes, when too few replicas are left for the policy, or a server is lost and
        there are no checkpoints; the error of a replica whose step fails otherwise; `RemoteError` while another client
        trains these variables, or if the servers do not hold one version of them; `FeedError` for a batch with other
        names than ``inputs``; `LedgerError` for a ledger that cannot be written; `GraphError` for what is no `Session`
        or no iterable, and for ``detached`` without a source or a name of the session, or with copies.
        """
        if not is_whole(ahead, 0):
            raise GraphError(f"{user_site()}: ahead is a number of steps, 0 or more, not {ahead!r}")
        if isinstance(batches, Source):
            check_source(self, batches, user_site())
        else:
            check_iterable(batches, "trainer.steps")
        opened = self._own(session, "trainer.steps")
        ledger, name = None if ledger is None else path_of(ledger, "a ledger"), ""
        if detached:
            from flowrt.train.detached import name_of_detached  # which others need not import

            name = name_of_detached(self, opened, batches, user_site())
        return Reports(Steps(self, opened, int(ahead), ledger, name).run(batches))

    async def stop(self, session: Session) -> bool:
        """End training that goes on detached, whoever began it; answers whether there was any.

        What was ordered, all servers apply before this returns; who is attached has the reports up to there.
        """
        from flowrt.train.detached import stop  # which others need not import

        return await stop(self, self._own(session, "trainer.stop"))

    @fitting
    def replay(
        self,
        session: Session,
        ledger: Ledger | str | os.PathLike[str],
        batches: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
    ) -> Reports:
        """Train again what ``ledger`` tells of, from the version that the variables are at: to the same bits.

        ``batches`` are those of then, from the first one on: the same source, or an iterable of the same. The reports
        are of the same steps, and name the same ``kept``. Nothing is written to the ledger, so name it rather than
        have it be this session's.

        Raises `LedgerError` where the trainer, its policy, or the session's seed are not those of then, where it is not
        known what a version was made of, or what replicas of `LocalSteps` kept from the rounds before, and for a policy
        that keeps updates of stale values; `FeedError` where there are too few batches; else as `steps`.
        """
        check_iterable(batches, "trainer.replay")
        told = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        return Reports(Replay(self, self._own(session, "trainer.replay"), told).run(batches))

    def _own(self, session: Session, who: str) -> Session:
        """``session``, if it is one of this trainer's graph that is open."""
        opened = awaited_session(session, who)
        if opened.graph is not self.graph:
            raise GraphError(f"{user_site()}: {who} takes a session of the graph that {self.name!r} was built in")
        return opened

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

    @telling
    def __repr__(self) -> str:
        return f"function of {', '.join(map(repr, self.inputs))} that shares a trainer's variables"

    def __call__(
        self, session: Session, values: Mapping[str, Any] | None = None, **more: Any
    ) -> Coroutine[Any, Any, Any]:
        """The outputs for the inputs ``values``, in one mapping or by keyword."""
        opened = awaited_session(session, "a shared function")  # a blocking one runs ``outputs`` with ``inputs`` fed
        given = {**(values or {}), **more}
        check_names(given, self.inputs, "what a shared function takes")
        return opened.run(self.outputs, {self.inputs[name]: value for name, value in given.items()})
