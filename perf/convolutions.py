"""Convolutions of many kinds alone, in all three directions, beside PyTorch and JAX.

Works as compare.py does: every side in a process of its own, interleaved, results checked against one another. PyTorch
computes on images that are laid out channels last, as flowrt's, and as it lays them out by itself.

    python perf/convolutions.py                     # every layer of sides/convolutions/data.py
    python perf/convolutions.py depthwise 3x3-first-forward --rounds 5 --peers torch
"""

from __future__ import annotations

import argparse
import statistics

import machine as this_machine
from compare import Case, Failed, Result, run_case, versions
from sides.convolutions.data import named

PEERS: dict[str, tuple[str, ...]] = {"torch": ("nhwc", "nchw"), "jax": ("",)}


def line(result: Result) -> str:
    """One case: flowrt's time and GFLOP/s, the ratio against the fastest peer, and every peer's time."""
    seconds = result.flowrt.median
    parts = [f"{result.case.name:26}{1e3 * seconds:9.3f} ms{result.work / seconds / 1e9:7.1f} GFLOP/s"]
    if result.best is not None:
        ratios = result.ratios(result.best)
        parts.append(f"{statistics.median(ratios):6.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    parts += [f"{peer.name} {1e3 * peer.median:.3f}" for peer in result.peers]
    parts += [f"{name} was left out: {why}" for name, why in result.failed.items()]
    return "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only cases whose names begin so")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.2, help="of measuring, per side and round")
    a = parser.parse_args()
    print(this_machine.describe())
    print(f"Peers: {versions()}. Ratios are the fastest peer's time over flowrt's, {a.threads} threads.", flush=True)
    for name, layer, direction in named():
        if a.names and not name.startswith(tuple(a.names)):
            continue
        peers = {peer: PEERS[peer] for peer in a.peers}
        case = Case(name, name, f"{layer}, {direction}", dict(peers), 1.0, topic="convolutions")
        try:
            print(line(run_case(case, a.threads, a.rounds, a.seconds)), flush=True)
        except Failed as why:
            print(f"{name}: flowrt's side failed: {why}", flush=True)


if __name__ == "__main__":
    main()
