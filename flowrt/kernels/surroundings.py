"""What every compiled object depends on beside the kernel it is of: processor, interpreter, versions of the compilers.

Told without importing a compiler, which takes a process 40 MiB and a third of a second. Where the system does not
describe its processors as Linux does, LLVM is asked all the same.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

_DESCRIPTION = Path("/proc/cpuinfo")
# The lines of the description that LLVM's choice of instructions follows from, on x86 and on ARM.
_TELLING = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU variant", "CPU part", "Features")


@cache
def identity() -> str:
    """A text that is the same where the same kernel compiles to the same object."""
    interpreter = [sys.version, sys.platform, getattr(sys.implementation, "_multiarch", ""), np.__version__]
    return "|".join([*interpreter, _library(), _processor(), _version("numba"), _version("llvmlite")])


def architecture() -> str:
    """The kind of processor: ``x86_64``, ``aarch64`` and so on."""
    machine = os.uname().machine
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine)


@cache
def processor_features() -> frozenset[str]:
    """What the processor and the system have beyond the architecture's least, by LLVM's and Linux's names."""
    described = _described()
    if described:
        return frozenset(word for line in described if line.startswith(("flags", "Features")) for word in line.split())
    import llvmlite.binding as llvm

    return frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)


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
