"""An example of an op, and arrays to show it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.op import REGISTRY

if TYPE_CHECKING:
    from flowrt.base.spec import Spec


@dataclass(frozen=True)
class Example:
    """``run(*inputs)`` must equal ``reference(*inputs)``; ``op`` is what it shows.

    ``gradient`` is whether it is differentiated numerically (by default if the op has a rule); ``margin`` is how far
    float32 results may be off, relatively; ``open_sizes`` whether it can be built before its inputs' sizes are known.
    """

    op: str
    run: Callable[..., Any]
    inputs: tuple[Any, ...] = ()
    reference: Callable[..., Any] | None = None
    gradient: bool | None = None
    specs: tuple[Spec, ...] | None = None
    margin: float = 2e-6
    open_sizes: bool = True
    note: str = ""

    @property
    def differentiable(self) -> bool:
        rule = REGISTRY[self.op].gradient_rule is not None
        floats = any(a.dtype.kind == "f" for a in self.arrays)
        return floats and (rule if self.gradient is None else self.gradient)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return tuple(np.asarray(a) for a in self.inputs)

    def __str__(self) -> str:
        dtypes = ",".join(f"{a.dtype}{list(a.shape)}" for a in self.arrays)
        return f"{self.op}({dtypes}){self.note and '-' + self.note}"


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def positive(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.5, 2.0, size=shape).astype(np.float32)


def integers(*shape: int, low: int = -5, high: int = 6, dtype: str = "int32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, size=shape).astype(dtype)


def bools(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2, size=shape).astype(bool)
