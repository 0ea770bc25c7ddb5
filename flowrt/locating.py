"""Errors that say where: the op or function that was asked, and the user's own line."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from flowrt.errors import FlowrtError, ResourceError, SpecError, user_site
from flowrt.tracebacks import brief, is_of_ours

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
                return function(*args, **kwargs)

        return cast("F", inside)


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
