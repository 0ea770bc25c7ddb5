"""What an optimiser's step costs, beside PyTorch and JAX: many small parameters, some middling ones, few large ones.

The gradients are there already, so that a step is the update alone. PyTorch's is the best of its fused and its foreach
implementation; JAX's is one compiled function that is given its state to overwrite. Works as compare.py does: every
side in a process of its own, interleaved, results checked against one another.

    python perf/updates.py                     # every case
    python perf/updates.py adam-small sgd-large --rounds 5
"""

from __future__ import annotations

import argparse

import machine as this_machine
from compare import Case, Failed, Result, figure, run_case, versions

PEERS: dict[str, tuple[str, ...]] = {"torch": ("fused", "foreach"), "jax": ("",)}
SIZES = {"small": "200 of 64", "middling": "60 of 10,000", "large": "20 of 1,000,000"}
CASES = {
    f"{rule}-{size}": Case(f"{rule}-{size}", f"{rule}-{size}", text, dict(PEERS), 1.0, script="updates")
    for rule in ("sgd", "momentum", "adam")
    for size, text in SIZES.items()
}


def line(result: Result) -> str:
    """One case: flowrt's time and every peer's, with its ratio and spread."""
    size = SIZES[result.case.name.split("-")[1]]
    parts = [f"{result.case.name:18} {size:16} flowrt {figure(result.flowrt.median, result)}"]
    for peer in sorted(result.peers, key=lambda side: side.median):
        ratios = sorted(result.ratios(peer))
        middle = ratios[len(ratios) // 2]
        parts.append(f"{peer.name} {figure(peer.median, result)}: {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
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
