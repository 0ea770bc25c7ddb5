"""What loops and branches cost, beside JAX and PyTorch: turns of scalars, of products, of recurrent cells and back.

Works as compare.py does: every side in a process of its own, interleaved, results checked against one another.

    python perf/loops.py                     # every case
    python perf/loops.py lstm lstm-back --rounds 5
"""

from __future__ import annotations

from beside import main
from compare import Case

BOTH: dict[str, tuple[str, ...]] = {"jax": ("",), "torch": ("",)}
JAX: dict[str, tuple[str, ...]] = {"jax": ("",)}
WHATS = {
    "scalars": ("while_loop of two int32 scalars, 10,000 turns", JAX),
    "rotation": ("while_loop of [1,16] @ [16,16], 10,000 turns", BOTH),
    "power": ("power iteration, 256 by 256, 500 turns", BOTH),
    "newton": ("Newton's method on 1,000 numbers, 200 turns with a test of all", JAX),
    "collatz": ("a cond in a loop in a loop, of scalars", JAX),
    "chase": ("a table of 1,000 numbers read where it says, 20,000 turns", JAX),
    "histogram": ("scan of 20,000 numbers that counts in 64 bins", JAX),
    "sines": ("while_loop of 16 sines, 2,000 turns", JAX),
    "squares": ("while_loop of [4,4] @ [4,4] and tanh, 5,000 turns", JAX),
    "branching": ("a cond of vectors of 64 in a loop, 2,000 turns", JAX),
    "mapped": ("map_fn over 256 rows of 64", JAX),
    "lstm": ("scan of an LSTM cell by hand, 64 steps, batch 32, 64 to 128", BOTH),
    "lstm-back": ("the same and its gradients", BOTH),
    "gru": ("scan of a GRU cell by hand, 64 steps, batch 32, 64 to 128", BOTH),
    "gru-back": ("the same and its gradients", BOTH),
    "decoder": ("64 tokens by a decoder of 2 layers that sees all rows so far of its caches, batch 4, 64", BOTH),
    "large": ("scan of an LSTM cell by hand, 16 steps, batch 512, 512 to 512", BOTH),
    "large-back": ("the same and its gradients", BOTH),
}
CASES = {name: Case(name, name, what, dict(peers), 1.0, topic="loops") for name, (what, peers) in WHATS.items()}


if __name__ == "__main__":
    main(__doc__, CASES)
