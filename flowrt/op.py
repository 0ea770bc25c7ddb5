"""What an op is, and who is building.

An op's meaning is one function: parameters annotated ``Operand`` are its tensors, every other one is an attribute, and
the body infers the outputs' specs from the inputs'. Calling the op hands it to the builder in force: a graph records
it, the eager builder evaluates it. This file knows neither; it knows only that *somebody is building*.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, Unpack, cast

import numpy as np

from flowrt.base.alike import RECALL, in_order, likeness, met, of_arrays, roles_of
from flowrt.base.attributes import as_attr
from flowrt.base.errors import GraphError, ResourceError, SpecError, how_to_bring, user_site
from flowrt.base.locating import checked_function, located, misfit
from flowrt.base.parameters import SIZES, as_called, parameters_of, size_positions
from flowrt.base.plain import as_dtype_of, common_dtype, default_array, widened
from flowrt.base.spec import NAMES, Spec, as_dtype
from flowrt.base.tracebacks import brief, shorten
from flowrt.base.traits import TRAITS, Stated, Traits

if TYPE_CHECKING:
    from types import EllipsisType

    from flowrt.base.alike import Known, Roles
    from flowrt.base.attributes import Attr

DType: TypeAlias = "str | np.dtype[Any] | type"  # an attribute of this type holds the name of what it is given
Rule = TypeVar("Rule", bound=Callable[..., Sequence[Any]])
AnOp = TypeVar("AnOp", bound="Op")
F = TypeVar("F", bound=Callable[..., Any])

REGISTRY: dict[str, Op] = {}
MOST_STARRED = 8  # arguments of one parameter, of calls that are learnt


class Builder(Protocol):
    """Who turns a call of an op into a result: a graph, or the eager builder."""

    def constant(self, array: np.ndarray[Any, Any]) -> Any:
        """What stands for a plain array among this builder's values."""

    def spec(self, value: Any) -> Spec:
        """The spec of one of this builder's values."""

    def lies_in(self, other: Any) -> bool:
        """Whether ``other`` is a graph around this one, whose values may be used here."""

    def adopt(self, value: Any) -> Any:
        """``value`` as one of this builder's own where it comes from a builder around it; else as it is."""

    def apply(self, op: Op, inputs: Sequence[Any], attrs: Mapping[str, Attr], name: str | None) -> tuple[Any, ...]:
        """The outputs of ``op``; an op without outputs answers with the operation itself, alone in the tuple."""


Rounding: TypeAlias = Callable[[Any, Sequence[Any]], list[Any]]
rounding: ContextVar[Rounding | None] = ContextVar("flowrt_rounding", default=None)
"""What rounds the operands of products, given their builder, where that is asked for."""

_active: ContextVar[Builder | None] = ContextVar("flowrt_builder", default=None)
_eager: list[tuple[Callable[[], Builder], Callable[..., Any], Callable[..., Known]]] = []
_gradients: list[Callable[..., list[Any]]] = []


def active_builder() -> Builder | None:
    """The builder that `building` put in force here, if any."""
    return _active.get()


def set_eager_builder(
    make: Callable[[], Builder], learn: Callable[..., Any], learn_whole: Callable[..., Known]
) -> None:
    """Name what evaluates ops outside every graph, made at the first, and what answers `alike.Known` after a call: of
    an op, and of a function that is `whole`."""
    _eager[:] = [(make, learn, learn_whole)]


def set_gradients(differentiate: Callable[..., list[Any]]) -> None:
    """Name what differentiates the bodies of ops that hold some."""
    _gradients[:] = [differentiate]


def gradients_inside(ys: Sequence[Any], xs: Sequence[Any], grad_ys: Sequence[Any]) -> list[Any]:
    """`flowrt.gradients`, for the gradient rules of ops that hold bodies."""
    return _gradients[0](ys, xs, grad_ys)


class building:
    """``with building(builder):`` ops on plain arrays go to ``builder``, or to the body inside it that is built now."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    def __enter__(self) -> None:
        here = _active.get()
        inside = here is not None and here.lies_in(self._builder)
        self._token = _active.set(here if inside else self._builder)

    def __exit__(self, *exc: object) -> None:
        _active.reset(self._token)


def builder_for(values: Iterable[Any]) -> Builder:
    """The builder of the tensors among ``values``, else the one in force, else the eager one."""
    found = _active.get()
    for value in values:
        mine = getattr(value, "builder", None)
        if mine is None or mine is found or (found is not None and found.lies_in(mine)):
            continue
        if found is not None:
            raise GraphError(f"{user_site()}: {value!r} belongs to another graph; build the whole step in one graph")
        found = mine
    if found is None:
        if not _eager:
            raise GraphError("ops outside a graph need flowrt's eager builder: import flowrt")
        found = _eager[0][0]()
    return found


def whole(function: F) -> F:
    """Decorator of a function of tensors that is made of ops: on plain arrays its ops become one call, once it is met
    again. What it does must hang on dtypes, shapes and attributes alone."""
    known_roles: list[Roles] = []

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if _active.get() is not None or rounding.get() is not None:
            return function(*args, **kwargs)
        if not known_roles:
            known_roles.append(roles_of(parameters_of(function.__name__, _spread(inspect.signature(function))), ()))
        key = likeness(function, known_roles[0], args, kwargs)
        known = RECALL.young.get(key) or RECALL.older(key)
        if known is None:
            RECALL.meet(key)
        elif known is met and _eager:
            RECALL.keep(key, _eager[0][2](function, args, kwargs))
        else:
            answer = known(*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        return function(*args, **kwargs)

    return cast("F", brief(called))


def _spread(signature: inspect.Signature) -> inspect.Signature:
    """``signature`` with a few parameters in the place of one that takes any number of arguments."""
    spread: list[inspect.Parameter] = []
    for p in signature.parameters.values():
        names = [f"{p.name}_{n}" for n in range(MOST_STARRED)] if p.kind is p.VAR_POSITIONAL else []
        spread += [p.replace(name=name, kind=p.POSITIONAL_OR_KEYWORD) for name in names] or [p]
    return signature.replace(parameters=spread)


_DEALING = frozenset({"_many", "_none"})  # attributes that say which inputs are whose: see `Op._arguments`


class _AsCalled:
    """The signature of an op as callers see it, made when it is asked for: `help` and editors do, programs do not."""

    def __get__(self, op: Op | None, kind: type) -> inspect.Signature:
        if op is None:
            raise AttributeError("__signature__")  # the class has that of its constructor
        return as_called(op.signature)


class Op:
    """A primitive: name, attributes, shape and dtype inference, gradient. Call it to build one."""

    def __init__(
        self,
        infer: Callable[..., Any],
        *,
        promote: bool | tuple[str, ...] = False,
        stateful: bool = False,
        effect: bool = False,
        name: str | None = None,
        core: int = 0,
        widens: bool = False,
        gradient: Callable[..., Sequence[Any]] | EllipsisType | None = ...,
        **stated: Unpack[Stated],
    ) -> None:
        self.name = name or infer.__name__
        self.__name__ = self.__qualname__ = self.name
        self.__doc__ = infer.__doc__
        self.__module__ = infer.__module__
        self.__wrapped__ = infer
        self.signature = inspect.signature(infer)
        self.parameters = parameters_of(infer.__name__, self.signature)
        self.tensors = tensors = tuple(p.name for p in self.parameters if p.tensor)
        self.promote = tensors if promote is True else promote or ()  # cast to their common dtype, as NumPy would
        self.stateful = stateful  # reads or writes more than its inputs: never merged, never folded
        self.effect = effect  # waits, on the event loop; it has no kernel
        self.core = core  # how many last axes of each input do not broadcast with the others'
        self.widens = widens  # where a number beyond what the promoted inputs' dtype holds makes it wider
        self.traits = Traits(**stated)
        self._multiplies = self.traits.contraction is not None
        self.differentiable = gradient is not None
        self.absent_gradients = (
            False  # whether the rule is given None, not zeros, for outputs that nothing came back to
        )
        self.results: Callable[[Any], Sequence[Any]] | None = None  # of a node: what its rule takes the gradients of
        self.gradient_rule = None if gradient is ... else gradient
        self._infer = infer
        self._placed = [p.name for p in self.parameters if p.placed]
        self._defaults = {p.name: p.default for p in self.parameters if p.default is not inspect.Parameter.empty}
        self._roles = roles_of(self.parameters, self.promote)
        alone = all(p.tensor and not p.many for p in self.parameters)
        self._tensors_alone = len(self.parameters) if alone else 0  # how many it takes, if nothing else

    __signature__ = _AsCalled()

    def __get__(self, owner: object, kind: type | None = None) -> Op:
        return self  # as an attribute of a class it stays what it is; having this, it counts as a function for `help`

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return lookup, (self.name,)  # as functions are, by name

    def gradient(self, rule: Rule) -> Rule:
        """Decorator: ``rule(node, *output_gradients)`` answers one gradient (or None) per input.

        A rule of one expression may stand at the op instead: ``@fr.op(gradient=lambda node, dy: (dy * 2,))``.
        """
        self.gradient_rule = rule
        return rule

    def infer(self, inputs: Sequence[Spec], attrs: Mapping[str, Attr]) -> tuple[Spec, ...]:
        """The outputs' specs; raises `SpecError` saying what does not fit."""
        if not _DEALING.isdisjoint(attrs):
            inputs = self._arguments(inputs, attrs)
            attrs = {name: value for name, value in attrs.items() if name not in _DEALING}
        out = self._infer(*inputs, **attrs)
        if isinstance(out, Spec):
            return (out,)
        if out is None:
            return ()
        if not isinstance(out, (tuple, list)) or not all(isinstance(spec, Spec) for spec in out):
            raise SpecError(f"its function answered {out!r}, not a Spec for each output")
        return tuple(out)

    def _arguments(self, inputs: Sequence[Any], attrs: Mapping[str, Attr]) -> list[Any]:
        """``inputs`` dealt to the tensor parameters; ``_many`` holds the count of a sequence, ``_none`` absent ones."""
        left = list(inputs)
        absent = cast("tuple[str, ...]", attrs.get("_none", ()))
        out: list[Any] = []
        for p in self.parameters:
            if not p.tensor:
                break
            if p.name in absent:
                out.append(None)
            elif p.many:
                count = cast("int", attrs["_many"])
                out.append(left[:count])
                del left[:count]
            else:
                out.append(left.pop(0))
        return out

    def __call__(self, *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        try:
            return self._answer(args, kwargs, name)
        except BaseException as error:
            shorten(error)
            raise

    def _answer(self, args: Sequence[Any], kwargs: Mapping[str, Any], name: str | None) -> Any:
        """The outputs: by what is known of calls like this one, else the long way."""
        try:
            if _active.get() is not None or (self._multiplies and rounding.get() is not None):
                return self._call(args, kwargs, name, None)
            if not kwargs and (last := RECALL.last.get(self)) is not None:
                answer = last(*args)
                if answer is not NotImplemented:
                    return answer
            key = likeness(self, self._roles, args, kwargs)
            known = RECALL.young.get(key) or RECALL.older(key)
            if known is None:
                RECALL.meet(key)
                return self._call(args, kwargs, name, None)
            if type(known) is BuiltinFunctionType and not kwargs and of_arrays(self._roles, args):
                RECALL.last[self] = known
            answer = known(*args, **kwargs)
            if answer is NotImplemented and (tidied := in_order(args)) is not None:
                answer = known(*tidied, **kwargs)
            if answer is NotImplemented:
                return self._call(args, kwargs, name, key if known is met else None)
            return answer
        except MemoryError as error:
            raise ResourceError(f"{self.name} ({user_site()}): {error}") from None

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any], name: str | None, key: Hashable | None) -> Any:
        """The outputs; what is learnt of calls like this one is kept under ``key``, unless that is None."""
        here = _active.get()
        if here is not None and not kwargs and self._are_sorted(args, here):
            return self.applied(here, args, {}, name)
        bound = self._bound(args, kwargs)
        first = bound.get(self.tensors[0]) if self.tensors else None
        composed = getattr(type(first), "composed", None)  # a tensor itself would look for what was meant: 0.5 ms
        if composed is not None and (made := composed(first, self, bound, name)) is not None:
            return made  # by other ops, on the parts of a variable
        with located(f"{self.name} {name!r}" if name else self.name):
            values, promoted, attrs = self._sort(bound)
            builder = builder_for(values)
            inputs = self.as_inputs(builder, [builder.adopt(value) for value in values], promoted)
        outputs = self.applied(builder, inputs, attrs, name)
        if key is not None:
            known = _eager[0][1](self, args, kwargs, values, promoted, inputs, attrs)
            if known is not None:
                RECALL.keep(key, known)
        return outputs

    def applied(self, builder: Builder, inputs: Sequence[Any], attrs: Mapping[str, Attr], name: str | None) -> Any:
        """The outputs, where nothing is left to sort out: ``inputs`` are the builder's own, ``attrs`` plain and all."""
        if self._multiplies and (rounded := rounding.get()) is not None:
            inputs = rounded(builder, inputs)
        with located(f"{self.name} {name!r}" if name else self.name):
            outputs = builder.apply(self, inputs, attrs, name)
        return outputs[0] if len(outputs) == 1 else outputs

    def _are_sorted(self, args: Sequence[Any], builder: Builder) -> bool:
        """Whether ``args`` are one tensor of ``builder`` for each parameter, and none is to be cast.

        So are most calls of a large graph, for which sorting out would take as long as all else.
        """
        if not args or len(args) != self._tensors_alone:
            return False
        for value in args:
            if value is None or getattr(value, "__tensor__", value) is not None or value.builder is not builder:
                return False
        return not self.promote or len(args) == 1 or len({builder.spec(value).dtype for value in args}) == 1

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """All parameters with what they are given, or their defaults: a third of what `inspect` takes for it."""
        given = dict(zip(self._placed, args))  # noqa: B905  (the others are given by name, or not at all)
        bound = {**self._defaults, **given, **kwargs}
        if bound.keys() == self._roles[1].keys() and len(given) == len(args) and given.keys().isdisjoint(kwargs):
            return bound
        raise misfit(self.name, self.signature, args, kwargs)

    def _sort(self, arguments: Mapping[str, Any]) -> tuple[list[Any], list[bool], dict[str, Attr]]:
        """The tensors among ``arguments``, whether each is promoted, and the attributes."""
        values: list[Any] = []
        promoted: list[bool] = []
        attrs: dict[str, Attr] = {}
        absent: list[str] = []
        for p in self.parameters:
            given = arguments[p.name]
            if p.many:
                items = [as_value(v) for v in given]
                attrs["_many"] = len(items)
                values += items
            elif p.tensor:
                if given is None and p.optional:
                    absent.append(p.name)
                else:
                    values.append(as_value(given))
            else:
                p.check(given)
                attrs[p.name] = NAMES[as_dtype(given)] if p.dtype and given is not None else as_attr(given)
            if len(values) > len(promoted):
                promoted += [p.name in self.promote] * (len(values) - len(promoted))
        if absent:
            attrs["_none"] = tuple(absent)
        return values, promoted, attrs

    def as_inputs(self, builder: Builder, values: Sequence[Any], promoted: Sequence[bool]) -> list[Any]:
        """Tensors and plain data as the builder's own values, those that are ``promoted`` of their common dtype."""
        both = list(zip(values, promoted, strict=True))
        kinds = [builder.spec(v).dtype if is_tensor(v, builder) else v for v, cast_it in both if cast_it]
        dtype = common_dtype(kinds) if kinds else None
        if dtype is not None and self.widens:
            dtype = widened(kinds, dtype)
        return [_cast(builder, v, dtype if cast_it else None) for v, cast_it in both]


def _cast(builder: Builder, value: Any, dtype: np.dtype[Any] | None) -> Any:
    """``value`` among the builder's own values, of ``dtype`` if one is asked for."""
    if not is_tensor(value, builder):
        if dtype is None or (isinstance(value, np.ndarray) and value.dtype == dtype):
            return builder.constant(default_array(value))
        return builder.constant(as_dtype_of(value, dtype))
    return value if dtype is None or builder.spec(value).dtype == dtype else REGISTRY["astype"](value, dtype)


def as_value(value: Any) -> Any:
    """The tensor that ``value`` stands for (a variable stands for its read); lists that hold tensors are stacked."""
    convert = getattr(value, "__tensor__", None)
    if convert is not None:
        return convert()
    if isinstance(value, (list, tuple)) and any(getattr(as_value(v), "builder", None) is not None for v in value):
        return REGISTRY["stack"](list(value))
    return value


def is_tensor(value: Any, builder: Builder) -> bool:
    """Whether ``value`` is one of ``builder``'s own values rather than plain data."""
    return getattr(value, "builder", None) is builder


@brief
def register(
    infer: Callable[..., Any] | None = None,
    *,
    promote: bool | tuple[str, ...] = False,
    stateful: bool = False,
    effect: bool = False,
    name: str | None = None,
    core: int = 0,
    widens: bool = False,
    gradient: Callable[..., Sequence[Any]] | EllipsisType | None = ...,
    **stated: Unpack[Stated],
) -> Any:
    """What the decorator `flowrt.op` does: make ``infer`` an op of the registry.

    ``promote`` casts the inputs (or those it names) to their common dtype; ``stateful`` ops read or write more than
    their inputs; an ``effect`` waits on the event loop and has no kernel. ``name`` is for an op behind a function that
    bears its name and brings arguments into one form first. ``core`` counts the last axes of each input that do not
    broadcast (NumPy's core dimensions). An op that ``widens`` takes numbers that the common dtype cannot hold: of use
    where the result is of another. ``gradient`` is its rule, where that is one expression (see `Op.gradient`), or None
    where no derivative flows through it. What else is ``stated`` are its `Traits`, which passes and the scheduler ask
    for.
    """

    def enter(fn: Callable[..., Any]) -> Op:
        checked_function(fn, "what op makes an op of")
        about: Any = {"promote": promote, "stateful": stateful, "effect": effect, "name": name, "core": core}
        made = Op(fn, widens=widens, gradient=gradient, **about, **stated)
        if made.name in REGISTRY and REGISTRY[made.name].__module__ != made.__module__:
            raise GraphError(f"an op named {made.name!r} exists already, in {REGISTRY[made.name].__module__}")
        REGISTRY[made.name], TRAITS[made.name] = made, made.traits
        return made

    return brief(enter) if infer is None else enter(infer)


def no_gradient(op: AnOp) -> AnOp:
    """Decorator: no derivative flows through ``op``."""
    if not isinstance(op, Op):
        raise GraphError(f"{user_site()}: no_gradient is for ops, not {op!r}; put it above @fr.op")
    op.differentiable = False
    return op


def is_effect(name: str) -> bool:
    """Whether the op of that name waits, as its signature says."""
    return name in REGISTRY and REGISTRY[name].effect


def lookup(name: str) -> Op:
    """The op of that name; raises `GraphError` where the registry has none."""
    try:
        return REGISTRY[name]
    except KeyError:
        raise GraphError(f"no op named {name!r} is known here; {how_to_bring('it')}") from None


PROGRAMS = frozenset({"fused", "with_epilogue"})  # ops that others are inside of


def sizing(op: str, attrs: Mapping[str, Any], inputs: int) -> Iterator[int]:
    """Positions of those of an op's ``inputs`` whose values decide its outputs' sizes, also inside programs."""
    if op == "fused":
        yield from sorted(_shapes_in(attrs["members"], inputs))
        return
    if op == "with_epilogue":
        (product, count, pairs), (epilogue, others), taken = attrs["product"], attrs["epilogue"], attrs["taken"]
        yield from sizing(product, dict(pairs), count)
        yield from (taken[n] for n in sizing(epilogue, dict(others), len(taken)) if taken[n] >= 0)
        return
    if not SIZES.isdisjoint(lookup(op).tensors):
        yield from size_positions(lookup(op).parameters, attrs)


def _shapes_in(members: Sequence[Any], inputs: int) -> set[int]:
    """The inputs of a program whose values are the shapes that others are repeated to."""
    found: set[int] = set()
    for op, operands, _, _ in members:
        names = lookup(op).tensors
        if not SIZES.isdisjoint(names):
            found.update(n for name, n in zip(names, operands, strict=False) if name in SIZES and n < inputs)
    return found
