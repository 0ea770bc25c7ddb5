"""What a client asks servers before a run begins, and has them do, so that they hold one version: each is answered.

And what it asks of all nodes, whatever they do: what that is.
"""

from __future__ import annotations

from typing import Any

from flowrt.base.valueclass import valueclass


@valueclass
class Look:
    """Say what version the variables are at, what is left of an earlier run of the trainer, and who is `Lacking`: see
    `opening.Said`.

    ``versions`` are the names of the variables, in ``container``, that hold the version here.
    """

    container: str
    group: str
    versions: tuple[str, ...]


@valueclass
class Lacking:
    """Remember, and tell whoever looks, that ``tasks`` have not all that is written of the trainer from now on.

    ``number`` is above that of all that was said before: of several servers' word, the newest counts.
    """

    container: str
    group: str
    number: int
    tasks: tuple[str, ...]


@valueclass
class WhoTrains:
    """Say for people who trains some of the variables ``names``, (container, name), beside who asks; empty if nobody.

    That is a run that needs no client, or another client's, whose server 0 is here.
    """

    names: tuple[tuple[str, str], ...]


@valueclass
class Hash:
    """Say a hash of the values of the variables ``names``, by (container, name); nothing where one has none."""

    names: tuple[tuple[str, str], ...]


@valueclass
class Settle:
    """Apply, in a run that has ended, the updates of ``replicas`` to ``version``, as `Order` says: others have."""

    run: int
    version: int
    replicas: tuple[int, ...]
    weights: tuple[float, ...] | None = None
    versions: tuple[int, ...] = ()


@valueclass
class TellTrace:
    """Note what is done here from now on, and hand over what was noted so far: see `tracing.HostTrace`.

    Args:
        trace: A random number, by which both sides know what is traced.
        chunk: How many chunks of it the client has; the last one is told again where it asks for that again.
        most: Slices that are handed over at most; of 0, only the time is told.
        on: Whether to go on; else nothing is noted any more.
    """

    trace: int
    chunk: int
    most: int
    on: bool = True


INQUIRIES: tuple[type[Any], ...] = (Look, Lacking, WhoTrains, Hash, Settle, TellTrace)
