"""Sources that are functions of the user's: named, and known wherever their module was imported.

Law: a function answers from the rows that it is given, and what it is told beside them, alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from flowrt.base.errors import FeedError, GraphError, how_to_bring, user_site
from flowrt.base.plain import shortened, unmasked
from flowrt.base.tracebacks import brief
from flowrt.base.valueclass import valueclass
from flowrt.data.order import BatchOrder, Rows, checked_order
from flowrt.data.sources import Batch, Source, Specified, Specs, Table

if TYPE_CHECKING:
    from flowrt.base.spec import Spec

Function: TypeAlias = Callable[..., Mapping[str, Any]]
F = TypeVar("F", bound=Function)
PLAIN = (type(None), bool, int, float, str, bytes)
FUNCTIONS: dict[str, Function] = {}


@brief
def source(function: F) -> F:
    """Register a function as a source under its name: ``@fr.data.source``.

    ``function(rows, ...)`` takes row numbers, an int64 array [batch], and answers ``{name: array}`` with a row for
    each. It is called on the worker that reads, in a thread, where its module was imported (``--import MODULE``,
    ``LocalCluster(imports=[...])``). A parameter ``rng`` is given a `numpy.random.Generator` seeded by the source's
    seed and the batch's identity. It answers the same whenever it is given the same.
    """
    if not callable(function) or not hasattr(function, "__name__"):
        raise GraphError(f"{user_site()}: @fr.data.source is for functions, not {function!r}")
    known = FUNCTIONS.get(function.__name__)
    if known is not None and _home(known) != _home(function):
        raise GraphError(
            f"{user_site()}: there is a source named {function.__name__!r} already, of {_home(known)}; rename one"
        )
    FUNCTIONS[function.__name__] = function
    return function


@valueclass
class FunctionSource(Specified):
    """A registered function's batches; see `function`."""

    name: str
    settings: tuple[tuple[str, Any], ...]
    found: Specs
    order: BatchOrder

    def table(self) -> Table:
        return _Calls(self)

    def __str__(self) -> str:
        return f"the source {self.name}(…)"


class _Calls(Table):
    def __init__(self, made: FunctionSource) -> None:
        if made.name not in FUNCTIONS:
            raise GraphError(f"the function {made.name!r} of a source is not known here; {how_to_bring('it')}")
        self.rows, self.specs = made.order.rows, made.specs
        self._function = FUNCTIONS[made.name]
        self._settings, self._seed, self._name = dict(made.settings), made.order.seed, made.name
        self._draws = "rng" in inspect.signature(self._function).parameters

    def take(self, rows: Rows, identity: int) -> Batch:
        more = dict(self._settings)
        if self._draws:
            more["rng"] = np.random.default_rng([self._seed, identity])
        found = self._function(rows, **more)
        if not isinstance(found, Mapping):
            raise FeedError(f"{self._name} answers {{name: array}}, not {shortened(found)}")
        return {name: np.asarray(unmasked(value)) for name, value in found.items()}


@brief
def function(
    function: Function | str,
    rows: int | None,
    batch: int,
    *,
    specs: Mapping[str, Spec] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    epochs: int | None = None,
    remainder: str = "drop",
    **settings: Any,
) -> Source:
    """A source of what a function answers that is registered by `source`: on the nodes, and here if it is not named.

    Args:
        function: It, or its name where this process does not have it.
        rows: How many rows there are, from 0 on; None for no end, with row numbers that never come again.
        batch: The rows of a batch.
        specs: What a batch holds, by name, with None for the first axis; if given, what does not fit a trainer's inputs
            is found before anything is read.
        shuffle: See `arrays`, as for the rest; endless rows are not shuffled.
        seed: See `arrays`.
        epochs: See `arrays`.
        remainder: See `arrays`.
        settings: Further arguments of the function: numbers, texts and bytes.

    Raises `GraphError`, at the line that calls it, for a function that is not registered or does not take ``settings``.
    """
    name = function if isinstance(function, str) else getattr(function, "__name__", repr(function))
    known = FUNCTIONS.get(name)
    if not isinstance(function, str):
        if known is not function:
            raise GraphError(f"{user_site()}: {name} is not registered as a source; put @fr.data.source above it")
        _check_settings(function, settings)
    for key, value in settings.items():
        if not isinstance(value, PLAIN):
            raise GraphError(f"{user_site()}: {key}={shortened(value)}: settings of {name} are numbers, texts or bytes")
    what = f"the source {name}"
    if not isinstance(specs, Mapping | None):
        raise GraphError(f"{user_site()}: {what}: specs are given by name, as {{'x': fr.Spec(...)}}, not {specs!r}")
    order = checked_order(what, rows, batch, shuffle, seed, epochs, remainder)
    return FunctionSource(name, tuple(settings.items()), tuple((specs or {}).items()), order)


def _check_settings(function: Function, settings: Mapping[str, Any]) -> None:
    signature = inspect.signature(function)
    drawn = {"rng": None} if "rng" in signature.parameters else {}
    try:
        signature.bind(None, **settings, **drawn)
    except TypeError as error:
        raise GraphError(f"{user_site()}: {function.__name__}{signature}: {error}") from None


def _home(function: Function) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}"
