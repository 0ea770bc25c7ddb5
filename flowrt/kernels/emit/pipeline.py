"""How a Python function of this package becomes LLVM's: Numba's own steps, without those that kernels need not.

Law: what comes out computes what Numba's whole pipeline makes of it. Kernels make no functions, stand in no ``with``
and count no references, so nobody looks for what only such code has, no variable is deleted, and which ones live where
is not asked after each step. Functions of others go through all of Numba's.
"""

from __future__ import annotations

from typing import Any

from numba.core.analysis import dead_branch_prune, rewrite_semantic_constants
from numba.core.compiler import Compiler
from numba.core.ir_utils import build_definitions
from numba.core.rewrites import rewrite_registry
from numba.core.ssa import reconstruct_ssa
from numba.core.targetconfig import ConfigStack
from numba.core.transforms import canonicalize_cfg
from numba.core.typed_passes import NativeLowering, NoPythonBackend, NopythonTypeInference, PreLowerStripPhis
from numba.core.untyped_passes import FixupArgs, RewriteDynamicRaises, TranslateByteCode


class Pipeline(Compiler):  # type: ignore[misc]
    """Numba's compiler, with fewer steps for functions of this package."""

    def _compile_core(self) -> Any:
        state = self.state
        if not _is_ours(state.func_id.func):
            return super()._compile_core()
        with ConfigStack().enter(state.flags.copy()):
            for step in _STEPS:
                step(state)
        state.pipeline = None  # which holds the state: nobody need look for circles
        return state.cr


def _is_ours(function: Any) -> bool:
    return str(function.__module__).startswith("flowrt.kernels.")


def _before_types(state: Any) -> None:
    function = state.func_ir
    function.blocks = canonicalize_cfg(function.blocks)
    rewrite_semantic_constants(function, state.args)
    dead_branch_prune(function, state.args)
    _rewrite(state)
    RewriteDynamicRaises().run_pass(state)
    reconstruct_ssa(function)
    function._definitions = build_definitions(function.blocks)
    dead_branch_prune(function, state.args)


def _rewrite(state: Any) -> None:
    """Rewrite blocks until none matches, as Numba does, which then asks anew which variables live where."""
    blocks = state.func_ir.blocks
    for kind in rewrite_registry.rewrites["before-inference"]:
        rewrite, left = kind(state), list(blocks)
        while left:
            label = left.pop()
            if rewrite.match(state.func_ir, blocks[label], state.typemap, state.calltypes):
                blocks[label] = rewrite.apply()
                left.append(label)


def _without_phis(state: Any) -> None:
    state.func_ir = PreLowerStripPhis()._strip_phi_nodes(state.func_ir)


_STEPS = (
    TranslateByteCode().run_pass,
    FixupArgs().run_pass,
    _before_types,
    NopythonTypeInference().run_pass,
    _without_phis,
    NativeLowering().run_pass,
    NoPythonBackend().run_pass,
)
