"""The program that scripts of some cases are: each case measured beside its peers, a line for each."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping

import machine as this_machine
import section
from compare import Case, Failed, Result, figure, run_case, versions


def main(about: str, cases: Mapping[str, Case], piece: str = "turn", heading: str = "") -> None:
    """Measure the cases that the command line asks for, or all of them; a step's work is so many pieces.

    With a ``heading`` they can be written into a table under it in docs/performance.md, which keeps its other rows.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(cases))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3, help="of measuring, per side and round")
    if heading:
        parser.add_argument("--write", action="store_true", help="write the rows into docs/performance.md")
    a = parser.parse_args()
    if unknown := set(a.cases) - set(cases):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    said = [f"{this_machine.describe()}.", f"Peers: {versions()}. Ratios are the peer's time over flowrt's."]
    print("\n".join(said), flush=True)
    settings = f"Every side on {a.threads} threads; {a.rounds} rounds of {a.seconds} s."
    columns = f"| case | flowrt, per {piece} | peers: ratio (of rounds) |"
    for name in a.cases or cases:
        try:
            result = run_case(cases[name], a.threads, a.rounds, a.seconds)
        except Failed as why:
            print(f"{name}: flowrt's side failed: {why}", flush=True)
            continue
        print(line(result, piece), flush=True)
        if heading and a.write:  # at once: what ends the program early leaves what was measured
            section.put_rows(heading, [*said, settings], columns, {name: row(result)})


def row(result: Result) -> str:
    """One case as a row of a table, times by the piece."""
    peers = [
        f"{peer.name} {1e6 * peer.median / result.work:.3g} µs: **{statistics.median(ratios):.2f}** "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
        for peer in sorted(result.peers, key=lambda side: side.median)
        for ratios in [result.ratios(peer)]
    ]
    ours = f"{1e6 * result.flowrt.median / result.work:.3g} µs"
    return f"| {result.case.name} | {result.case.what}: {ours} | {', '.join(peers)} |"


def line(result: Result, piece: str) -> str:
    """One case: flowrt's time, that of one of several pieces, and every peer's with the ratio and its spread."""
    parts = [f"{result.case.name:18} flowrt {figure(result.flowrt.median, result)}"]
    if result.work > 1:
        parts[0] += f" ({1e6 * result.flowrt.median / result.work:.3g} µs per {piece})"
    for peer in sorted(result.peers, key=lambda side: side.median):
        ratios = result.ratios(peer)
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        parts.append(f"{peer.name} {figure(peer.median, result)}: {spread}")
    parts += [f"{name} was left out: {why}" for name, why in result.failed.items()]
    return "; ".join(parts)
