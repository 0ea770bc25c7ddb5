"""What loops and branches cost, beside JAX and PyTorch: turns of scalars, of products, of recurrent cells and back.

Works as compare.py does: every side in a process of its own, interleaved, results checked against one another.

    python perf/loops.py                     # every case
    python perf/loops.py lstm lstm-back --rounds 5
"""

from __future__ import annotations

import argparse
import statistics

import machine as this_machine
from compare import Case, Failed, Result, figure, run_case, versions

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
    "large": ("scan of an LSTM cell by hand, 16 steps, batch 512, 512 to 512", BOTH),
    "large-back": ("the same and its gradients", BOTH),
}
CASES = {name: Case(name, name, what, dict(peers), 1.0, script="loops") for name, (what, peers) in WHATS.items()}


def line(result: Result) -> str:
    """One case: flowrt's time, its time per turn, and every peer's with the ratio and its spread."""
    turn = 1e6 * result.flowrt.median / result.work
    parts = [f"{result.case.name:11} flowrt {figure(result.flowrt.median, result)} ({turn:.3g} µs a turn)"]
    for peer in sorted(result.peers, key=lambda side: side.median):
        ratios = result.ratios(peer)
        parts.append(
            f"{peer.name} {figure(peer.median, result)}: {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
    parts += [f"{name} was left out: {why}" for name, why in result.failed.items()]
    return "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3, help="of measuring, per side and round")
    a = parser.parse_args()
    if unknown := set(a.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    print(this_machine.describe())
    print(f"Peers: {versions()}. Ratios are the peer's time over flowrt's.", flush=True)
    for name in a.cases or CASES:
        try:
            print(line(run_case(CASES[name], a.threads, a.rounds, a.seconds)), flush=True)
        except Failed as why:
            print(f"{name}: flowrt's side failed: {why}", flush=True)


if __name__ == "__main__":
    main()
