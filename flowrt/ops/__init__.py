"""The ops, by family: each file holds what its ops mean; ``kernels/`` has twins that compute them.

What a family's ``__all__`` names is `flowrt`'s own; `nn`, `quantize` and `random` are spaces of names beside it.
"""

import types as _types
import typing as _typing

from flowrt.ops import fused as _fused  # noqa: F401  (which passes make)
from flowrt.ops import nn as nn
from flowrt.ops import quantize as quantize
from flowrt.ops import random as random
from flowrt.ops.activation import *
from flowrt.ops.comparison import *
from flowrt.ops.contraction import *
from flowrt.ops.custom_gradient import *
from flowrt.ops.elementwise import *
from flowrt.ops.entries import *
from flowrt.ops.flow import *
from flowrt.ops.index import *
from flowrt.ops.linalg import *
from flowrt.ops.loops import *
from flowrt.ops.parts import *
from flowrt.ops.precision import *
from flowrt.ops.queues import *
from flowrt.ops.reduce import *
from flowrt.ops.routing import *
from flowrt.ops.running import *
from flowrt.ops.shape import *
from flowrt.ops.slices import *
from flowrt.ops.sorting import *
from flowrt.ops.source import *
from flowrt.ops.state import *
from flowrt.ops.trigonometry import *

if not _typing.TYPE_CHECKING:  # checkers read lists that are written out alone, and take what is imported without one
    _modules = {name for name, value in globals().items() if isinstance(value, _types.ModuleType)}
    __all__ = [
        "nn",
        "quantize",
        "random",
        *(name for name in globals() if name not in _modules and not name.startswith("_")),
    ]
