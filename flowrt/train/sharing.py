"""One set of variables for every copy of a model: the first copy creates them, the others are handed the same ones.

The program writes its model once, as a function that creates its variables. Copies must ask for the same variables in
the same order; whatever differs raises, naming both.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowrt.base.device import Device
from flowrt.base.errors import GraphError, Site, user_site
from flowrt.base.partitioning import row_bounds
from flowrt.base.plain import default_spec
from flowrt.base.spec import Spec, as_dtype
from flowrt.base.valueclass import valueclass
from flowrt.graph import Scope, current_scope, scoped
from flowrt.op import as_value
from flowrt.ops.state import Variable, split_variable, variables_from

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARE = 1 << 14  # bytes of variables that pay for another server, which costs a step a message from and to each replica


@valueclass
class SharedVariable:
    """A variable as a copy asked for it, and the servers that keep its parts: one, unless it is split."""

    asked: str
    variable: Variable
    servers: tuple[int, ...]
    site: Site


class Servers:
    """Where variables go: each, or each part of one, to the server that has the fewest bytes so far.

    One of more than ``bound`` bytes is split by its rows, into a part for each server. With ``least`` no more servers
    than these are used beyond what variables are worth: one for each `SHARE` bytes, to which what is split is no bound.
    """

    def __init__(self, devices: Sequence[str], bound: int | None = None, least: int | None = None) -> None:
        self.devices = tuple(devices)
        self._bound = bound
        self._least = least
        self._bytes = [0] * len(self.devices)
        self.used = len(self.devices) if least is None else least  # the first so many

    def split(self, spec: Spec) -> int | None:
        """Into how many parts a variable is split that the program says nothing about; None for not at all."""
        if self._bound is None or not spec.known or spec.nbytes <= self._bound or not spec.dims:
            return None
        parts = min(len(self.devices), spec.concrete[0])
        return parts if parts > 1 else None

    def choose(self, nbytes: int, split: bool = False) -> int:
        """The server for a variable of ``nbytes``, or for a part of one that is ``split``, counted from now on."""
        if split or self._least is None:
            most = len(self.devices)
        else:
            most = min(max((sum(self._bytes) + nbytes) // SHARE, self._least), len(self.devices))
        server = self._bytes.index(min(self._bytes[:most]))
        self._bytes[server] += nbytes
        self.used = max(self.used, server + 1)
        return server


def fewest_on(tasks: Sequence[str], count: int) -> int:
    """How many of the first servers are on ``count`` tasks; all, if they are on fewer."""
    return next((n for n in range(1, len(tasks)) if len({*tasks[:n]}) == count), len(tasks))


class FirstCopy:
    """Creates the variables of the first copy, on the servers. ``outside`` is the scope around all copies."""

    def __init__(self, servers: Servers, outside: Scope, prefix: str) -> None:
        self.found: list[SharedVariable] = []
        self._servers = servers
        self._outside = outside
        self._prefix = prefix

    def variable(self, initial: Any, dtype: Any, name: str | None, trainable: bool, *partition: Any) -> Variable:
        """A new variable, on the server that has the fewest bytes; or each of its parts, if it is split."""
        inner = current_scope().prefix.removeprefix(self._prefix)
        spec = spec_of_initial(initial, dtype)
        parts = partition[0] if partition else self._servers.split(spec)
        around = replace(self._outside, prefix=self._outside.prefix + inner)
        if parts is None or not spec.dims:
            servers: tuple[int, ...] = (self._servers.choose(spec.nbytes if spec.known else 0),)
            with variables_from(None), scoped(replace(around, device=self._device(servers[0]))):
                made = Variable(initial, dtype=dtype, name=name, trainable=trainable, partition=parts)
        else:
            rows = itertools.pairwise(row_bounds(parts, spec.concrete[0]))
            row = spec.nbytes // max(spec.concrete[0], 1)
            servers = tuple(self._servers.choose((end - first) * row, split=True) for first, end in rows)
            with variables_from(None), scoped(around):
                made = split_variable(initial, dtype, name, trainable, parts, [self._device(s) for s in servers])
        self.found.append(SharedVariable(inner + (name or "variable"), made, servers, user_site()))
        return made

    def _device(self, server: int) -> Device:
        return Device.parse(self._servers.devices[server]).over(self._outside.device)


class LaterCopy:
    """Hands out the variables of the first copy, in the order in which that one asked for them."""

    def __init__(self, first: Sequence[SharedVariable], who: str, prefix: str) -> None:
        self._first = first
        self._who = who
        self._prefix = prefix
        self._given = 0

    def variable(self, initial: Any, dtype: Any, name: str | None, trainable: bool, *partition: Any) -> Variable:
        """The next variable of the first copy; raises `GraphError` where another one is asked for."""
        asked = current_scope().prefix.removeprefix(self._prefix) + (name or "variable")
        spec = spec_of_initial(initial, dtype)
        if self._given == len(self._first):
            raise GraphError(
                f"{user_site()}: {self._who} asks for a variable {asked!r} {spec}, after the {len(self._first)} that "
                "the first copy of the model created; every copy must create the same variables"
            )
        shared = self._first[self._given]
        held = shared.variable
        if asked != shared.asked or not held.spec.accepts(spec.dtype, spec.shape) or trainable != held.trainable:
            raise GraphError(
                f"{user_site()}: {self._who} asks for a variable {asked!r} {spec}{_kind(trainable)} where the first "
                f"copy created {shared.asked!r} {held.spec}{_kind(held.trainable)} ({shared.site}); "
                "every copy must create the same variables in the same order"
            )
        self._given += 1
        return held

    def check_all_given(self) -> None:
        """Raise `GraphError` if this copy asked for fewer variables than the first."""
        if self._given < len(self._first):
            left = self._first[self._given]
            raise GraphError(
                f"{self._who} asked for {self._given} of the {len(self._first)} variables of the first copy; the next "
                f"is {left.asked!r} {left.variable.spec} ({left.site}); every copy must create the same variables"
            )


def _kind(trainable: bool) -> str:
    return "" if trainable else " (not trainable)"


def spec_of_initial(initial: Any, dtype: Any) -> Spec:
    """What a variable that starts from ``initial`` would be."""
    value = as_value(initial)
    spec = value.spec if hasattr(value, "builder") else default_spec(value)
    return Spec(spec.dtype if dtype is None else as_dtype(dtype), spec.shape)
