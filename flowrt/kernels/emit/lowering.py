"""Python functions to one object: each is typed and lowered by itself, and all are optimised together, once.

Law: what compiled code calls is `Lowered`: typed, brought to LLVM's terms, and no further. `linked_object` puts what an
entry calls together, hides all but the entry, optimises it and makes machine code. Functions of Numba's own kind would
each be optimised, given wrappers for Python and made machine code first, which took most of a compilation's time. Where
a user's kernel calls such a function, it is linked as it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import compiler, typing
from numba.core.codegen import AOTCodeLibrary, AOTCPUCodegen
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu import CPUContext
from numba.core.registry import CPUDispatcher, cpu_target
from numba.core.sigutils import normalize_signature

from flowrt.base.errors import GraphError
from flowrt.kernels.emit import processor, reshaping
from flowrt.kernels.emit.abi import INLINED, OPTIONS
from flowrt.kernels.emit.pipeline import Pipeline
from flowrt.kernels.emit.roundings import contract
from flowrt.kernels.store.surroundings import has_fused_products


class _Library(AOTCodeLibrary):  # type: ignore[misc]
    """A function by itself, until something links it with what it calls: the object that has a ``symbol``.

    Numba's own libraries are each linked with all that they call, over and over as one calls another.
    """

    symbol = ""
    _shared_module: Any

    def finalize(self) -> None:
        if self.symbol:
            self._link_needed(self._final_module)
            if any(f.name == reshaping.SYMBOL and f.is_declaration for f in self._final_module.functions):
                text = reshaping.reshaping(self._final_module.triple, self._final_module.data_layout)
                self._final_module.link_in(llvm.parse_assembly(text))
            self._linking_libraries.clear()
            super().finalize()
        self._finalized = True

    def _link_needed(self, module: Any) -> None:
        """Add what is called to ``module``. Numba's own libraries come last: of them LLVM takes what is asked for."""
        ours, left = {self}, [*self._linking_libraries]
        others: dict[Any, None] = {}
        while left:
            library = left.pop()
            if not isinstance(library, _Library):
                others[library] = None
            elif library not in ours:
                ours.add(library)
                module.link_in(library._alone(), preserve=True)
                left += library._linking_libraries
        for library in others:
            module.link_in(library._get_module_for_linking(), preserve=True)

    def _alone(self) -> Any:
        """The function's own module, which any number of modules may take in."""
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == llvm.Linkage.external:
                function.linkage = "weak_odr"
        return self._final_module

    def _get_module_for_linking(self) -> Any:
        """The same with what it calls, for libraries of Numba's own."""
        if self._shared_module is None:
            self._shared_module = self._alone().clone()
            self._link_needed(self._shared_module)
        return self._shared_module

    def _optimize_final_module(self) -> None:
        _hide_all_but(self._final_module, self.symbol)
        super()._optimize_final_module()

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout


class _Codegen(AOTCPUCodegen):  # type: ignore[misc]
    """Numba's code generator for objects, for the processor's very features: some machines hide some of their CPU's."""

    _library_class = _Library

    def _customize_tm_features(self) -> str:
        return processor.features()


@cache
def _codegen() -> Any:
    return _Codegen("flowrt", "host")


class _Typing(typing.Context):  # type: ignore[misc]
    """Numba's own typing context, its very state, which remembers what operators come to: most calls are such.

    Numba tries each operator's many definitions anew wherever it stands.
    """

    def __init__(self) -> None:
        self.__dict__ = cpu_target.typing_context.__dict__

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        if isinstance(func, types.Function) and not kws and getattr(func.typing_key, "__module__", "") == "_operator":
            return _resolve_operator(func, tuple(args))
        return super().resolve_function_type(func, args, kws)


class _Target(CPUContext):  # type: ignore[misc]
    """Numba's own target context, its very state, which remembers sizes: Numba makes a module to ask for each."""

    def __init__(self) -> None:
        self.__dict__ = cpu_target.target_context.__dict__

    def get_abi_sizeof(self, ty: Any) -> int:
        return _size_of(ty)

    def post_lowering(self, mod: Any, library: Any) -> None:
        if has_fused_products():
            contract(mod)
        super().post_lowering(mod, library)


@lru_cache(4096)
def _resolve_operator(func: Any, args: tuple[Any, ...]) -> Any:
    return typing.Context.resolve_function_type(_contexts()[0], func, args, {})


@lru_cache(4096)
def _size_of(kind: Any) -> int:
    size: int = kind.get_abi_size(cpu_target.target_context.target_data)
    return size


@cache
def _contexts() -> tuple[_Typing, _Target]:
    return _Typing(), _Target()


class Lowered(CPUDispatcher):  # type: ignore[misc]
    """A Python function for compiled code to call, lowered for each list of argument types that it is called with."""

    def __init__(self, function: Callable[..., Any], *, inlined: bool = False) -> None:
        super().__init__(function, targetoptions=dict(INLINED if inlined else OPTIONS) | {"nopython": True})
        self.typingctx, self.targetctx = _contexts()

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """The function as called with arguments of these types: of an integer that the caller knows, its type counts.

        Numba would lower it anew for each such integer, and again where a loop comes to others. LLVM knows them still.
        """
        return super().get_call_template(list(map(_plain, args)), {name: _plain(kind) for name, kind in kws.items()})

    def compile(self, sig: Any) -> Any:
        """What the function is known by to its callers, for arguments of these types."""
        with global_compiler_lock, self._compiling_counter:
            types, returned = normalize_signature(sig)
            if types not in self.overloads:
                self.overloads[types] = self._lower(types, returned)
            return self.overloads[types].entry_point

    def _lower(self, types: Any, returned: Any) -> Any:
        flags = compiler.Flags()
        self.targetdescr.options.parse_as_flags(flags, self.targetoptions)
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        library = _codegen().create_library(self.py_func.__qualname__)
        made = compiler.compile_extra(
            self.typingctx, self.targetctx, self.py_func, types, returned, flags, {}, library, Pipeline
        )
        name = object()
        self.targetctx.insert_user_function(name, made.fndesc, [library])
        return made._replace(entry_point=name)


def _plain(kind: Any) -> Any:
    return kind.literal_type if isinstance(kind, types.IntegerLiteral) else kind


_bound: dict[Callable[..., Any], Any] = {}


def is_bound(function: Callable[..., Any]) -> bool:
    """Whether something is compiled in the place of ``function`` already."""
    return function in _bound


def bind(function: Callable[..., Any], callee: Lowered) -> None:
    """Have compiled code call ``callee`` where it calls the plain ``function``."""
    _bound[function] = callee
    typing = cpu_target.typing_context
    typing.insert_global(function, typing.resolve_value_type(callee))


def linked_object(function: Callable[..., Any], signature: Any, symbol: str, fail: Callable[..., None] | None) -> bytes:
    """The object code of ``function`` as a C function ``symbol``, and nothing else to be seen.

    Where it raises, what ``fail(builder, arguments)`` emits is done; without that it must not raise.
    """
    with global_compiler_lock:
        lowered = Lowered(function)
        lowered.compile(signature)
        made = lowered.overloads[tuple(signature.args)]
        library = _codegen().create_library(symbol)
        library.symbol = symbol
        library.add_linking_library(made.library)
        library.add_ir_module(_entry(library.create_ir_module(symbol), lowered.targetctx, made, symbol, fail))
        library.finalize()
        return _machine_code(library)


def written_object(write: Callable[[Any], None], symbol: str) -> bytes:
    """The object code of a module that ``write`` puts a C function ``symbol`` into."""
    with global_compiler_lock:
        library = _codegen().create_library(symbol)
        library.symbol = symbol
        module = library.create_ir_module(symbol)
        write(module)
        library.add_ir_module(module)
        library.finalize()
        return _machine_code(library)


def _entry(module: Any, context: Any, made: Any, symbol: str, fail: Callable[..., None] | None) -> Any:
    """The C function that calls what was ``made``, in ``module``."""
    kinds = [context.get_value_type(kind) for kind in made.signature.args]
    answer = context.get_value_type(made.signature.return_type) if fail is None else ir.VoidType()
    entry = ir.Function(module, ir.FunctionType(answer, kinds), symbol)
    builder = ir.IRBuilder(entry.append_basic_block())
    status, value = context.call_internal_no_propagate(builder, made.fndesc, made.signature, entry.args)
    if fail is None:
        builder.ret(value)
        return module
    with builder.if_then(status.is_error, likely=False):
        fail(builder, entry.args)
    builder.ret_void()
    return module


_NEEDED_FOR = {
    "gil": ": it prints, or calls Python",
    "rnd": ": it draws random numbers; take them as an input, from fr.random",
    "random": ": it draws random numbers; take them as an input, from fr.random",
}


def _machine_code(library: Any) -> bytes:
    module = llvm.parse_bitcode(library.emit_bitcode())
    for value in [*module.functions, *module.global_variables]:
        if value.is_declaration and not value.name.startswith("llvm.") and not _offered(value.name):
            hint = next((hint for sign, hint in _NEEDED_FOR.items() if sign in value.name), "")
            raise GraphError(f"it needs {value.name} when it runs, which no kernel has{hint}")
    code: bytes = processor.machine().emit_object(module)
    return code


def _hide_all_but(module: Any, symbol: str) -> None:
    """Leave nothing to be seen but ``symbol``, before what is then called from one place is optimised.

    Numba counts functions per process, so objects of two processes use one name for different functions; loaded into
    a third, the first would stand for both.
    """
    for number, value in enumerate([*module.functions, *module.global_variables]):
        if not value.is_declaration and value.name != symbol:
            value.linkage = "internal"
            value.name = f"{symbol}.{number}"


def _offered(symbol: str) -> bool:
    """Whether any process can resolve ``symbol`` without Python or Numba: it is in C's library of functions."""
    return not symbol.startswith(("Py", "_Py")) and hasattr(ctypes.CDLL(None), symbol)
