"""What an optimiser's step costs, beside PyTorch and JAX: 200 parameters of 64, 60 of 10,000, 20 of 1,000,000.

The gradients are there already, so that a step is the update alone. PyTorch's is the best of its fused and its foreach
implementation; JAX's is one compiled function that is given its state to overwrite. Works as compare.py does: every
side in a process of its own, interleaved, results checked against one another.

    python perf/updates.py                     # every case
    python perf/updates.py adam-small sgd-large --rounds 5
"""

from __future__ import annotations

from beside import main
from compare import Case

PEERS: dict[str, tuple[str, ...]] = {"torch": ("fused", "foreach"), "jax": ("",)}
SIZES = {"small": "200 of 64", "middling": "60 of 10,000", "large": "20 of 1,000,000"}
CASES = {
    f"{rule}-{size}": Case(f"{rule}-{size}", f"{rule}-{size}", text, dict(PEERS), 1.0, topic="updates")
    for rule in ("sgd", "momentum", "adam")
    for size, text in SIZES.items()
}


if __name__ == "__main__":
    main(__doc__, CASES)
