"""Kernels as programs write them: arrays first, then the op's attributes by their names; and the usual mistakes.

A kernel without a layout is given the inputs and outputs as they are. Whatever parameters follow are attributes:
numbers and bools as words, tuples as tuples of them.
"""

from __future__ import annotations

import dis
import inspect
import linecache
import os
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import GraphError

if TYPE_CHECKING:
    from flowrt.base.spec import Spec

NOT_ATTRIBUTES = ("begin", "end", "run")  # parameters that mean the range of units and the run's words
_WORD_BITS = 64


def place_of(function: Callable[..., Any]) -> str:
    """Where a kernel stands, for errors."""
    code = function.__code__
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def is_programs(function: Callable[..., Any]) -> bool:
    """Whether a kernel's function is none of this package's."""
    return not str(function.__module__).startswith("flowrt.")


def check_written(op: str, device: str, function: Any) -> None:
    """Refuse what can be no kernel: it raises `GraphError` where the decorator stands."""
    if device not in ("cpu", "cuda"):
        raise GraphError(f'kernel({op!r}) computes on "cpu" or "cuda", not on {device!r}')
    if not isinstance(function, FunctionType):
        raise GraphError(f"kernel({op!r}) decorates a plain function of arrays, not {function!r}")
    where = f"the {device} kernel {function.__qualname__} of {op!r} ({place_of(function)})"
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise GraphError(f"{where} takes {parameter}; name its inputs, outputs and attributes one by one")
        if parameter.default is not parameter.empty:
            raise GraphError(f"{where} takes {parameter}; the default belongs to the op's attribute")
    if _answers(function):
        raise GraphError(f"{where} returns a value; it writes what it computes into its last arrays, the outputs")


def _answers(function: FunctionType) -> bool:
    """Whether some line returns something other than None."""
    before: Any = None
    for instruction in dis.get_instructions(function):
        if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return True
        if instruction.opname == "RETURN_VALUE" and not (before.opname == "LOAD_CONST" and before.argval is None):
            return True
        before = instruction
    return False


def attribute_words(
    function: Callable[..., Any], inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The values of the attributes that a kernel takes behind its arrays; raises `GraphError` for what cannot be."""
    parameters = list(inspect.signature(function).parameters)
    arrays = len(inputs) + len(outputs)
    names = [name for name in parameters[arrays:] if name not in NOT_ATTRIBUTES]
    own = [name for name in attrs if not name.startswith("_")]
    unknown = [name for name in names if name not in own]
    short = len([name for name in parameters if name not in NOT_ATTRIBUTES]) < arrays
    if unknown or short or any(name in own for name in parameters[:arrays]):
        there = (
            f"attributes of the op by their names: {', '.join(own)}" if own else "nothing else: it has no attributes"
        )
        has = f"{_counted(len(inputs), 'input')} and {_counted(len(outputs), 'output')}"
        raise GraphError(
            f"{_called(function)} takes ({', '.join(parameters)}), but the op has {has}; a kernel takes these arrays "
            f"first, then {there}"
        )
    return tuple(_word(name, attrs[name], function) for name in names)


def writes_an_input(function: Callable[..., Any], inputs: int, arrays: int) -> str:
    """What is wrong where a kernel compiles only if it may write its inputs."""
    names = list(inspect.signature(function).parameters)[:arrays]
    taken = f"{_counted(inputs, 'input')} ({', '.join(names[:inputs])})"
    filled = f"{_counted(arrays - inputs, 'output')} ({', '.join(names[inputs:])})"
    return f"it writes into an input, or hands one to a helper that may; it takes {taken} first, then {filled} to fill"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _word(name: str, value: Any, function: Callable[..., Any]) -> Any:
    if isinstance(value, tuple):
        return tuple(_word(name, item, function) for item in value)
    if isinstance(value, float) or (isinstance(value, int) and int(value).bit_length() < _WORD_BITS):
        return value
    raise GraphError(
        f"{_called(function)} takes the attribute {name} = {value!r:.80}, but only numbers of 64 bits, bools and "
        "tuples of them reach a kernel; let a number stand for a choice, and annotate an array as Spec, for an input"
    )


def _called(function: Callable[..., Any]) -> str:
    return f"its kernel {function.__qualname__} ({place_of(function)})"


def raised_in(function: Callable[..., Any]) -> str:
    """Where a kernel that raised an error may have done so: its own line that raises, if it has one alone."""
    code = function.__code__
    lines: set[int] = set()
    at = code.co_firstlineno
    for instruction in dis.get_instructions(function):
        at = instruction.starts_line or at
        if instruction.opname == "RAISE_VARARGS":
            lines.add(at)
    if len(lines) != 1:
        return f"{function.__qualname__}, {place_of(function)}"
    line = lines.pop()
    said = linecache.getline(code.co_filename, line).strip()
    return f"{function.__qualname__}, {os.path.basename(code.co_filename)}:{line}" + (f": {said}" if said else "")
