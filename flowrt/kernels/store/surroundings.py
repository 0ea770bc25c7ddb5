"""What every compiled object depends on beside the kernel: processor, interpreter, compilers' versions and settings.

Told without importing a compiler, which takes a process 40 MiB and a third of a second. Where the system does not
describe its processors as Linux does, LLVM is asked all the same.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

_DESCRIPTION = Path("/proc/cpuinfo")
# The lines of the description that LLVM's choice of instructions follows from, on x86 and on ARM.
_TELLING = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU variant", "CPU part", "Features")
# Numba's settings that leave a kernel's code as it is, by how their names begin; of any other it is assumed to change.
_HARMLESS = tuple(
    f"NUMBA_{name}"
    for name in (
        "CACHE_",
        "COLOR_SCHEME",
        "CUDA_",
        "DISABLE_CUDA",
        "DISABLE_PERFORMANCE_WARNINGS",
        "DUMP_",
        "ENABLE_CUDASIM",
        "NUM_THREADS",
        "THREADING_LAYER",
        "WARNINGS",
    )
)
_NAMES = ("NUMBA_CPU_", "CPU_")  # settings that tell of a processor: in the environment, and in the file
_SETTINGS = Path(".numba_config.yaml")  # which Numba reads too, in the folder that it is imported in


@cache
def identity() -> str:
    """A text that is the same where the same kernel compiles to the same object."""
    interpreter = [sys.version, sys.platform, getattr(sys.implementation, "_multiarch", ""), np.__version__]
    compilers = [_version("numba"), _version("llvmlite"), *_settings()]
    return "|".join([*interpreter, _library(), _processor(), *compilers])


def _settings() -> list[str]:
    """What decides how Numba compiles beside what it is asked; nothing where it is left alone."""
    told = sorted(name for name in os.environ if name.startswith("NUMBA_") and not name.startswith(_HARMLESS))
    found = [f"{name}={os.environ[name]}" for name in told]
    with suppress(OSError):
        found.append(_SETTINGS.read_text(errors="replace"))
    return found


def architecture() -> str:
    """The kind of processor: ``x86_64``, ``aarch64`` and so on."""
    machine = os.uname().machine
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine)


@cache
def processor_features() -> frozenset[str]:
    """What the processor and the system have beyond the architecture's least, by LLVM's and Linux's names.

    Where Numba is told of another processor, what that one has of what kernels ask for.
    """
    if any(line.upper().lstrip().startswith(_NAMES) for told in _settings() for line in told.splitlines()):
        from flowrt.kernels.emit.processor import probed_features

        return probed_features()
    described = _described()
    if described:
        return frozenset(word for line in described if line.startswith(("flags", "Features")) for word in line.split())
    import llvmlite.binding as llvm

    return frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)


@cache
def has_fused_products() -> bool:
    """Whether the processor computes a product and a sum in one instruction, of one rounding."""
    return architecture() == "aarch64" or "fma" in processor_features()


@cache
def has_half_conversions() -> bool:
    """Whether the processor has instructions from float16 to float32 and back."""
    return architecture() == "aarch64" or "f16c" in processor_features()


def _library() -> str:
    """Which C library this is, where it says so: objects call its functions."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""


def _processor() -> str:
    return "|".join([architecture(), *(_described() or sorted(processor_features()))])


@cache
def _described() -> tuple[str, ...]:
    """The telling lines of the system's description of its processors, each once."""
    found: dict[str, None] = {}
    try:
        with _DESCRIPTION.open() as lines:
            for line in lines:
                if line.partition(":")[0].strip() in _TELLING:
                    found[" ".join(line.split())] = None
                elif not line.strip() and architecture() == "x86_64":
                    break  # the others are like the first, and to describe each takes the system time
    except OSError:
        return ()
    return tuple(found)


def _version(package: str) -> str:
    """The version of a package that need not be imported for it: what its ``_version.py`` says."""
    found = find_spec(package)
    about = Path(found.origin).with_name("_version.py") if found is not None and found.origin else None
    if about is not None and about.exists():
        return about.read_text()
    from importlib.metadata import version  # which imports much

    return version(package)
