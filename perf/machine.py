"""The line that every figure needs beside it: what machine and which libraries gave it."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

# Set in some environments; it costs OpenBLAS a third to a half of its speed on machines with AVX-512. Read by OpenBLAS
# when NumPy is first imported, hence before the imports below.
os.environ.pop("OPENBLAS_CORETYPE", None)

import numpy as np
import threadpoolctl


def describe() -> str:
    """The processor, the cores this process may use, the load, Python, NumPy and its BLAS, in one line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    blas = [
        f"{pool['internal_api']} {pool.get('version')} {pool.get('architecture', '')} x{pool['num_threads']}"
        for pool in threadpoolctl.threadpool_info()
        if pool["user_api"] == "blas"
    ]
    return (
        f"{_processor()}, {cores} cores (load {load:.1f}), {platform.system()} {platform.release()}, "
        f"Python {sys.version.split()[0]}, NumPy {np.__version__}, {'; '.join(blas) or 'no BLAS'}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    print(describe())
