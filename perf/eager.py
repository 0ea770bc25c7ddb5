"""What an op called at once costs on small arrays, beside PyTorch and JAX: a network of nine ops, and ops one by one.

Works as compare.py does: every side in a process of its own, interleaved, results checked against one another. A step
calls its ops many times over, and its time is told by the op.

    python perf/eager.py                      # every case
    python perf/eager.py network add --rounds 5
    python perf/eager.py add scale --write    # and their rows into docs/performance.md
"""

from __future__ import annotations

from beside import main
from compare import Case

WHATS = {
    "network": "two layers, their loss and its mean: nine ops, batch 32, width 64",
    "add": "a matrix and a vector",
    "scale": "a matrix times a Python number",
    "mixed": "float32 and int64",
    "strided": "relu of every other column",
    "matmul": "[32,64] @ [64,64]",
    "einsum": '[32,64] and [64,64], by "ij,jk->ik"',
    "relu": "of [32,64]",
    "softmax": "of [32,64]",
    "layer_norm": "of [32,64], with a scale and an offset",
    "cross_entropy": "of [32,10] and classes",
    "sum": "over the last axis, named",
    "reshape": "to a tuple",
    "transpose": "written out",
    "concat": "two along the last axis",
    "take": "32 rows by int32",
    "where": "a condition, a matrix and a number",
    "conv2d": "[2,8,8,4] with 3 by 3 filters, 8 of them",
    "max_pool": "[2,8,8,4] by 2",
    "normal": "32 by 64 random numbers",
    "large": "a [1024,1024] matrix and a vector",
}
PEERS = {"torch": ("",), "jax": ("",)}
CASES = {name: Case(name, name, what, PEERS, 1.0, topic="eager") for name, what in WHATS.items()}


if __name__ == "__main__":
    main(__doc__, CASES, "op", "## Ops called at once")
