"""What a client tells the tasks that take part in a run, to begin: each is answered. See `messages`."""

from __future__ import annotations

from typing import Any

from flowrt.base.valueclass import valueclass


@valueclass
class BeginServer:
    """Be a server of a run, unless another client's goes on, or the variables are not at ``version``.

    Args:
        run: A random number, by which all messages know the run.
        container: With ``group``, the trainer's name.
        group: See ``container``.
        version: What the variables of all servers are at.
        client: Whose run it is, for people.
        server: Which of ``servers`` this task is.
        servers: The tasks of the servers.
        replicas: The task of each replica.
        policy: Whose updates make a version: see `policy_to_data`.
        staleness: How many versions old an update may be that counts.
        apply: The plan that moves the variables by the mean of a set of updates.
        applied: For each feed of that plan, (i, j) for part j of the i-th update of the set in replica order; (-1, -1)
            for the version that this makes.
        versions: The names of the variables, in ``container``, that hold the version here.
        values: The names (container, name) of the variables that replicas are told, in order.
        gather: The plan that takes rows of tables, fed what a replica wants; -1 where replicas want none.
        seed: Of what random ops draw.
        measures: Whether sums of squares are measured, for the policy.
        detached: `Terms` of a run without a client.
        packed: Of each part of an update, how it comes, as `packing` says; empty where all come as they are.
        combined: Where sets may be of any size, or weighted, ``apply`` is fed one update, which the server makes of the
            set: for each part of it, whether it is of rows, which are laid behind one another. Empty elsewhere.
        counted: Of the parts, how many, from the first on, count in sums of squares: others have the rest, too.
        keeps: Whether another server may have to say what this one was ordered, and knows no more: see `ApplyOrder`.
        floor: With how few replicas a version is made, where they come and go; 0 where all are counted on.
        births: Which process each server is; empty of one that nobody can name.
        together: How many updates there are at least before it matters which of them came: as many are told server 0 at
            once.
    """

    run: int
    container: str
    group: str
    version: int
    client: str
    server: int
    servers: tuple[str, ...]
    replicas: tuple[str, ...]
    policy: dict[str, Any]
    staleness: int
    apply: int
    applied: tuple[tuple[int, int], ...]
    versions: tuple[str, ...]
    values: tuple[tuple[str, str], ...]
    gather: int
    seed: int
    combined: tuple[bool, ...] = ()
    measures: bool = False
    counted: int = 0
    keeps: bool = False
    floor: int = 0
    detached: tuple[Any, ...] = ()
    births: tuple[str, ...] = ()
    packed: tuple[str, ...] = ()
    together: int = 1


@valueclass
class BeginReplica:
    """Be a replica of a run, from ``version`` on.

    Args:
        run: As in `BeginServer`, as are ``container``, ``group``, ``servers``, ``staleness`` and ``seed``.
        replica: Which of ``replicas`` this is.
        replicas: How many there are.
        version: The newest one that there is.
        plan: The tower. Its feeds are, in order, what ``feeds`` says; its fetches are ``told`` values for the client,
            then the parts of the update.
        feeds: For each feed of the plan, (-1, i) for the i-th value of a batch, or (server, i) for the i-th value that
            the server tells; rows that it takes are behind its variables' values.
        ask: The plan that computes, from a batch, more values of it, which tell rows; -1 where there are none.
        wants: For each server, which values of a batch it is to be told, as they tell the rows that are wanted of it.
        told: How many fetches are for the client.
        parts: For each server, which of the other fetches are its parts of an update.
        finite: For each server, which of the other fetches say whether all numbers of those are finite.
        steps: How many batches make one of those that are counted and booked: see `local.Rounds`. Where these are used
            one by one, in local steps, ``plan`` is what one of them runs, its fetches being the told values.
        start: The plan that gives what local steps keep from version to version its first values, or -1.
        load: The plan that begins local steps at a version, or -1; it is fed what ``loaded`` says, as ``feeds`` does.
        differ: The plan that ends local steps, fed as ``differed`` says. Its fetches are those that ``parts`` and
            ``finite`` are of, then whether what is kept is finite.
        overlap: Local steps taken for a version before it is there; then ``merge`` is run in place of ``load``.
        incarnation: How often the replica was lost, and is begun again.
        given: How many of the counted batches the one before it may have had: it is given those after them.
        measured: For each server, of each of its parts that count whether it is of rows, where squares are measured.
        source: Where it reads its batches itself, by `Draw`: what of, as `source_to_data` says.
        inputs: What such a batch is made of, in order: (name, dtype, dims).
        detached: Whether it goes on without a client; then ``births`` are as in `BeginServer`.
        packed: For each server, what it is told by `BeginServer.packed`.
    """

    run: int
    container: str
    group: str
    replica: int
    replicas: int
    servers: tuple[str, ...]
    version: int
    plan: int
    feeds: tuple[tuple[int, int], ...]
    staleness: int
    ask: int
    wants: tuple[tuple[int, ...], ...]
    told: int
    parts: tuple[tuple[int, ...], ...]
    finite: tuple[tuple[int, ...], ...]
    seed: int
    steps: int = 1
    start: int = -1
    load: int = -1
    loaded: tuple[tuple[int, int], ...] = ()
    differ: int = -1
    differed: tuple[tuple[int, int], ...] = ()
    overlap: int = 0
    merge: int = -1
    incarnation: int = 0
    given: int = 0
    measured: tuple[tuple[bool, ...], ...] = ()
    source: dict[str, Any] | None = None
    inputs: tuple[tuple[Any, ...], ...] = ()
    detached: bool = False
    births: tuple[str, ...] = ()
    packed: tuple[tuple[str, ...], ...] = ()
