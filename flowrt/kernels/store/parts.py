"""The objects that are no kernels, as the loops that run tapes: who emits each, and what decides its content.

Law: who emits is named and imported only when an object must be made, since that imports the compiler.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib import import_module
from typing import Any

from flowrt.base.valueclass import valueclass
from flowrt.kernels.store.objects import address_of, bundle, is_there, object_code
from flowrt.kernels.store.sources import sources
from flowrt.kernels.store.surroundings import identity

PART = "part "  # how the request of one begins
MAKERS = (
    "flowrt.kernels.emit.entries",
    "flowrt.kernels.emit.abi",
    "flowrt.kernels.emit.compose",
    "flowrt.kernels.language.expression",
    "flowrt.kernels.language.composing",
    "flowrt.kernels.language.costs",
    "flowrt.kernels.emit.lowering",
    "flowrt.kernels.emit.pipeline",
    "flowrt.kernels.emit.roundings",
    "flowrt.kernels.emit.halves",
    "flowrt.kernels.emit.processor",
    "flowrt.kernels.emit.elementwise",
    "flowrt.kernels.emit.odometer",
    "flowrt.kernels.emit.reductions",
    "flowrt.kernels.emit.rows",
    "flowrt.kernels.fusion.row_plan",
    "flowrt.kernels.emit.reshaping",
)


@cache
def surroundings() -> bytes:
    """What every object depends on: the compilers, the interpreter's bytecode, the machine and how entries are made."""
    return identity().encode() + sources(MAKERS)


def made_by(module: str, function: str, *arguments: Any) -> bytes:
    """The object that a function of ``module`` makes."""
    code: bytes = getattr(import_module(module), function)(*arguments)
    return code


@valueclass
class RuntimeObject:
    """An object that is no kernel: who emits it (a module's function, given these arguments and the symbol).

    ``others`` are the modules that decide its content beside that one and those that decide every object's.
    """

    name: str
    module: str
    function: str
    arguments: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def makers(self) -> tuple[str, ...]:
        """All modules of its own that decide its content."""
        return (self.module, *self.others)

    def address(self) -> int:
        """The address of its entry, compiled first if need be."""
        return address_of(part_symbol(self), self._emit, self.request)

    def is_compiled(self) -> bool:
        """Whether it is loaded or in the folder."""
        return is_there(part_symbol(self))

    def code(self) -> bytes:
        """The object that holds its entry."""
        return object_code(part_symbol(self), self._emit)

    def request(self) -> str:
        """What `requested_part` makes it of, in another process."""
        return PART + json.dumps([self.name, self.module, self.function, self.arguments, self.others])

    def _emit(self) -> bytes:
        return made_by(self.module, self.function, *self.arguments, part_symbol(self))


_SHARING = ("flowrt.kernels.run.board", "flowrt.kernels.emit.launches.atomic")
LOOP_PARTS = {
    name: RuntimeObject(f"loop_{name}", "flowrt.kernels.emit.launches.tape", "emit_loop", (name,), _SHARING)
    for name in ("alone", "shared", "help")
}
"""What runs tapes: ``alone``, ``shared`` with helpers, or to ``help``."""
_CALLS = ("flowrt.kernels.run.direct", "flowrt.kernels.launch")
DIRECT_PART = RuntimeObject("direct", "flowrt.kernels.emit.launches.direct", "emit_direct", (), _CALLS)
"""The C function behind `direct`'s callables."""
AT_ONCE_PART = RuntimeObject(
    "at_once",
    "flowrt.kernels.emit.launches.at_once",
    "emit_at_once",
    (),
    ("flowrt.kernels.run.at_once", "flowrt.kernels.emit.launches.direct", *_CALLS),
)
"""The C function behind `at_once`'s callables."""
LOOP_MAKERS = ("flowrt.kernels.composite.nested", "flowrt.kernels.emit.launches.tape", *_SHARING)
NESTED_PARTS = {
    kind: RuntimeObject(f"nested_{kind}", "flowrt.kernels.emit.launches.nested", "emit_nested", (kind,), LOOP_MAKERS)
    for kind in ("loop", "cond")
}
"""The entries that run loops (``loop``) and branches (``cond``)."""
EPILOGUE_PART = RuntimeObject(
    "epilogue", "flowrt.kernels.emit.launches.epilogue", "emit_epilogue", (), ("flowrt.kernels.composite.epilogue",)
)
"""The entry that runs a product's units, each with what is to be done with its results."""
MANY_PART = RuntimeObject(
    "many", "flowrt.kernels.emit.launches.many", "emit_many", (), ("flowrt.kernels.composite.many",)
)
"""The entry that runs several steps as one."""
PARTS = (*LOOP_PARTS.values(), DIRECT_PART, AT_ONCE_PART, *NESTED_PARTS.values(), EPILOGUE_PART, MANY_PART)


def requested_part(request: str) -> RuntimeObject:
    """The object whose `request` that is."""
    name, module, function, arguments, others = json.loads(request.removeprefix(PART))
    return RuntimeObject(name, module, function, tuple(arguments), tuple(others))


@cache
def part_symbol(part: RuntimeObject) -> str:
    """The name of the part's entry."""
    known = bundle().names.get(part.name)
    if known is not None:
        return known
    code = surroundings() + sources(part.makers)
    return f"flowrt_{part.name}_{hashlib.blake2b(code, digest_size=16).hexdigest()}"
