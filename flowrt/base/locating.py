"""Errors that say where: the op or function that was asked, and the user's own line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Signature, signature
from numbers import Integral
from typing import Any, Self, TypeVar, cast

from flowrt.base.errors import FlowrtError, GraphError, ResourceError, SpecError, user_site
from flowrt.base.familiar import hint, keyword_hint
from flowrt.base.parameters import as_called
from flowrt.base.tracebacks import brief, is_of_ours

F = TypeVar("F", bound=Callable[..., Any])


class located:
    """Around a function's body, or as its decorator: errors from what is asked of it say ``what`` and the user's line.

    What the user's own functions raise, where the body calls some, stays as it is.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SpecError):
            raise located_error(self._what, error) from None
        if isinstance(error, DEPTHS):
            told = from_the_depths(self._what, error)
            if told is not None:
                raise told from error

    def __call__(self, function: F) -> F:
        @brief
        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                try:
                    return function(*args, **kwargs)
                except TypeError as error:
                    if not _never_began(error):
                        raise
                    if function.__name__ == "__init__":
                        raise _misfit_of(function, args, kwargs) from None
                    raise misfit(self._what, signature(function), args, kwargs) from None

        return cast("F", inside)


def fitting(function: F) -> F:
    """Decorator of a public function or method: arguments that it does not take are told beside those that it does."""

    @brief
    @wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if _never_began(error):
                raise _misfit_of(function, args, kwargs) from None
            raise

    return cast("F", inside)


class Fitting:
    """A class of values whose fields are told beside arguments that do not fit them."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        takes = signature(cls).replace(return_annotation=Signature.empty)
        try:
            if args or kwargs:  # a copy comes without
                takes.bind(*args, **kwargs)
        except TypeError:
            raise misfit(cls.__name__, takes, args, kwargs) from None
        return super().__new__(cls)


def _misfit_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> SpecError:
    takes, what = signature(function), function.__name__
    if next(iter(takes.parameters), "") in ("self", "cls"):
        takes, itself, args = takes.replace(parameters=list(takes.parameters.values())[1:]), args[0], args[1:]
        if what in ("__init__", "__new__"):
            made = itself if isinstance(itself, type) else type(itself)
            takes, what = takes.replace(return_annotation=Signature.empty), made.__name__
    return misfit(what, takes, args, kwargs)


def _never_began(error: TypeError) -> bool:
    """Whether ``error`` says that a call, made where it was caught, has arguments that do not fit."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def misfit(what: str, takes: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SpecError:
    """The error for arguments that ``what``, whose function has that signature, cannot be called with."""
    wrong = next((name for name in kwargs if name not in takes.parameters), None)
    if wrong is None:
        try:
            takes.bind(*args, **kwargs)
            reason = "these arguments do not fit"
        except TypeError as error:
            reason = f"{error}{_as_one(list(takes.parameters), args)}"
    else:
        fix = keyword_hint(wrong, [name for name in takes.parameters if name not in kwargs])
        fix = fix or (hint("an optimiser's argument", wrong) if "lr" in takes.parameters else "")
        reason = f"got an unexpected keyword argument {wrong!r}{fix}"
    return located_error(f"{what}{as_called(takes)}", SpecError(reason))


def _as_one(names: Sequence[str], args: Sequence[Any]) -> str:
    """How to give sizes that were given one by one."""
    at = next((n for n, name in enumerate(names) if name in ("shape", "repeats")), len(names))
    several = len(args) > at + 1 and all(type(value) is int for value in args[at:])
    return f"; write {names[at]}={tuple(args[at:])}" if several else ""


DEPTHS = (ArithmeticError, ValueError, TypeError, LookupError, AttributeError, MemoryError)


def from_the_depths(what: str, error: Exception) -> FlowrtError | None:
    """An error of Python's or NumPy's that absurd arguments led to, as one of ours; None if it is the user's own."""
    if not is_of_ours(error):
        return None
    if isinstance(error, MemoryError):
        return ResourceError(f"{what} ({user_site()}): {str(error) or 'there is no memory for that'}")
    return located_error(what, SpecError(f"cannot take these arguments: {error or type(error).__name__}"))


def located_error(what: str, error: SpecError) -> SpecError:
    """``error`` with ``what`` and the user's line in front, unless it tells these already."""
    if error.located:
        return error
    found = SpecError(f"{what} ({user_site()}): {error}")
    found.located = True
    return found


def checked_name(name: Any) -> str:
    """``name`` as it is; raises `GraphError` for what is no text."""
    if not isinstance(name, str):
        raise GraphError(f"{user_site()}: a name is a text, as name='hidden', not {name!r:.80}")
    return name


def checked_function(function: Any, what: str) -> Any:
    """``function`` as it is; raises `GraphError` where ``what`` it is to be cannot be called."""
    if not callable(function):
        raise GraphError(f"{user_site()}: {what} is a function, not {function!r:.80}")
    return function


def checked_seed(seed: Any) -> int | None:
    """``seed`` as an integer, or None; raises `GraphError` for anything else."""
    if seed is None or isinstance(seed, Integral):
        return None if seed is None else int(seed)
    raise GraphError(f"{user_site()}: a seed is an integer, or None, not {seed!r:.80}")
