"""The processor that code is made for: this one, or one that Numba is told of, as LLVM knows it."""

from __future__ import annotations

from functools import cache
from typing import Any

import llvmlite.binding as llvm
from numba.core import config

_PROBE = """
define <16 x float> @wide(<16 x float> %x) "min-legal-vector-width"="512" "prefer-vector-width"="512" {
  %y = fadd <16 x float> %x, %x
  ret <16 x float> %y
}
define float @fused(float %x) {
  %y = call float @llvm.fma.f32(float %x, float %x, float %x)
  ret float %y
}
declare float @llvm.fma.f32(float, float, float)
define float @widened(half %x) {
  %y = fpext half %x to float
  ret float %y
}
"""
_SIGNS = {
    "avx": ("ymm", "zmm"),
    "avx512f": ("zmm",),
    "f16c": ("vcvtph2ps",),
    "fma": ("vfmadd",),
}  # in what LLVM makes of that on x86


def name() -> str:
    """What LLVM calls it."""
    found: str = llvm.get_host_cpu_name() if config.CPU_NAME is None else config.CPU_NAME
    return found


def features() -> str:
    """What it has more or less than LLVM knows by its name, in LLVM's words. One that Numba is told of by name alone
    has what its name says."""
    if config.CPU_FEATURES is not None:
        return str(config.CPU_FEATURES)
    if config.CPU_NAME is not None:
        return ""
    found: str = llvm.get_host_cpu_features().flatten()
    return found


def machine() -> Any:
    """LLVM's machine that makes objects for it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=name(), features=features(), opt=3, reloc="pic", codemodel="default", jit=False
    )


@cache
def probed_features() -> frozenset[str]:
    """Which of `surroundings.processor_features` it has as far as they matter here, by the code that LLVM makes."""
    made = machine().emit_assembly(llvm.parse_assembly(_PROBE))
    return frozenset(feature for feature, signs in _SIGNS.items() if any(sign in made for sign in signs))
