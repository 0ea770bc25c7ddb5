"""The decorator `op`, and what type checkers see of an op: a function with its parameters' names, types and defaults.

Law: an op has one signature, that of its function in ``ops/``. There a tensor's parameter is an `Operand` and each
output a `Result`: the body knows `Spec`s, callers pass whatever stands for a tensor, and get a `TensorOrArray`. An op
of a program's may as well say `Spec`; then checkers take its tensors by position alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.spec import Spec
from flowrt.op import register

Operand: TypeAlias = Spec | Any
"""A tensor of an op: to the op's function a `Spec`.

To callers it is a tensor, a variable, an array, a number or a list of these, for which checkers know no common type.
"""

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import EllipsisType
    from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload

    from flowrt.base.traits import Stated
    from flowrt.graph import Node, TensorOrArray
    from flowrt.op import Op

    P = ParamSpec("P")
    R = TypeVar("R", covariant=True)

    class TypedOp(Op, Generic[P, R]):
        """An op whose parameters a checker knows."""

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:  # type: ignore[override]
            """The outputs: see `Op`."""

    One: TypeAlias = Callable[P, Spec]
    Many: TypeAlias = Callable[P, Sequence[Spec]]
    Makes: TypeAlias = TypedOp[P, TensorOrArray]
    MakesMany: TypeAlias = TypedOp[P, tuple[TensorOrArray, ...]]

    class Registering(Protocol):
        """The decorator `flowrt.op`, with settings or without.

        Functions that say `Spec` come first: what they begin with, up to three tensors, is an `Operand` to callers.
        """

        @overload
        def __call__(
            self, infer: One[Concatenate[Spec, Spec, Spec, P]], /
        ) -> Makes[Concatenate[Operand, Operand, Operand, P]]: ...
        @overload
        def __call__(self, infer: One[Concatenate[Spec, Spec, P]], /) -> Makes[Concatenate[Operand, Operand, P]]: ...
        @overload
        def __call__(self, infer: One[Concatenate[Spec, P]], /) -> Makes[Concatenate[Operand, P]]: ...
        @overload
        def __call__(self, infer: One[Concatenate[Sequence[Spec], P]], /) -> Makes[Concatenate[Operand, P]]: ...
        @overload
        def __call__(
            self, infer: Many[Concatenate[Spec, Spec, Spec, P]], /
        ) -> MakesMany[Concatenate[Operand, Operand, Operand, P]]: ...
        @overload
        def __call__(
            self, infer: Many[Concatenate[Spec, Spec, P]], /
        ) -> MakesMany[Concatenate[Operand, Operand, P]]: ...
        @overload
        def __call__(self, infer: Many[Concatenate[Spec, P]], /) -> MakesMany[Concatenate[Operand, P]]: ...
        @overload
        def __call__(self, infer: Many[Concatenate[Sequence[Spec], P]], /) -> MakesMany[Concatenate[Operand, P]]: ...
        @overload
        def __call__(self, infer: Callable[P, Result], /) -> Makes[P]: ...
        @overload
        def __call__(self, infer: Callable[P, Sequence[Result]], /) -> MakesMany[P]: ...
        @overload
        def __call__(self, infer: Callable[P, None], /) -> TypedOp[P, Node]: ...
        @overload
        def __call__(
            self,
            *,
            promote: bool | tuple[str, ...] = False,
            stateful: bool = False,
            effect: bool = False,
            name: str | None = None,
            core: int = 0,
            widens: bool = False,
            gradient: Callable[..., Sequence[Any]] | EllipsisType | None = ...,
            **stated: Unpack[Stated],
        ) -> Registering: ...

    Result: TypeAlias = Spec | TensorOrArray
else:
    Result = Spec

register.__name__ = "op"  # as `help` is to show it
op: Registering = register
