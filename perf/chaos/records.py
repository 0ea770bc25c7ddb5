"""What was tried of the promises under fault: rows that scripts print, keep as JSON, and make a document of.

.venv/bin/python perf/chaos/records.py          # writes docs/reliability.md from docs/reliability/*.json
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "perf")]

from machine import describe  # noqa: E402

Row = dict[str, Any]
NOTHING: Mapping[str, Any] = MappingProxyType({})
FOLDER, DOCUMENT = ROOT / "docs" / "reliability", ROOT / "docs" / "reliability.md"
BESIDE = FOLDER / "beside.md"  # what was tried by no script of these
PROMISES = {
    1: "A worker's death does not stop training; what replaces it counts within 10 s of its process running",
    4: "A stopped worker slows the median step by a tenth at most, is named within 3 s, is handed no more than one "
    "batch, and counts again within 2 s of going on",
    5: "A partition applies nothing twice, and training goes on within 5 s of its end",
    10: "Checkpoints survive kills: the newest that was acknowledged is restored, and nothing is left lying",
    17: "Who has no token reaches nobody, ends no node, holds up no training and takes no memory",
    23: "Wall clocks do not matter: whatever they say, nothing is lost, counted twice or waited for",
    30: "A client's death leaves all servers at one version, and the next client goes on from there",
    32: "Every batch ends exactly once, and the variables are, to the bit, what the reports say",
    33: "What was away counts again: within 2 s of going on where it was stopped, within 10 s where it was cut off",
    34: "With two copies, a parameter server's death loses no committed step and stops training for a second at most",
    39: "Training under one fault after another keeps 98.5% of its undisturbed speed",
    41: "A parameter server's death does not end training, which goes on within 10 s of another one being there, from "
    "what the others hold or from the newest checkpoint",
}
HEAD = """# Reliability

What is promised under fault, how often it was tried, and how often it was broken. This page is made from the records
in `docs/reliability/` by `perf/chaos/records.py`; each says the command that made it, and those of one fault add up;
what was tried beside, at the end, has no such records.
`scripts/chaos` and, in `perf/chaos`, `partitions.py`, `freezing.py`, `strangers.py` and `clocks.py` try again, with
`--json docs/reliability`; of checkpoints the tests do.

| promise | fault | times | violations | what was seen |
|---|---|---|---|---|
"""


def row(
    promise: int,
    fault: str,
    times: int,
    violations: Sequence[str],
    figure: str = "",
    *,
    samples: Mapping[str, Sequence[float]] = NOTHING,
    counts: Mapping[str, int] = NOTHING,
) -> Row:
    """What became of a promise that was tried so many times.

    ``samples`` are seconds of each time, ``counts`` what was counted in all: of several records of one promise and
    fault they add up. ``figure`` says anything else.
    """
    assert promise in PROMISES
    found = {"promise": promise, "fault": fault, "times": times, "violations": list(violations), "figure": figure}
    return found | {"samples": {name: list(each) for name, each in samples.items()}, "counts": dict(counts)}


def figure_of(one: Row) -> str:
    """What was seen, in words."""
    told = [f"{name} {_spread(seconds)}" for name, seconds in one.get("samples", {}).items()]
    counted = ", ".join(f"{count} {name}" for name, count in one.get("counts", {}).items() if count)
    return "; ".join(part for part in (*told, counted, one["figure"]) if part)


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s (most)"


def show(rows: Iterable[Row]) -> None:
    """Print rows, and the machine."""
    print(describe())
    for one in rows:
        print(f"{one['fault']}, {one['times']} times: {figure_of(one)}")
        for violation in one["violations"]:
            print(f"VIOLATION: {violation}")


def write(path: Path, rows: Sequence[Row]) -> None:
    """Keep rows with the machine and the command that they are of."""
    script = str(Path(sys.argv[0]).resolve().relative_to(ROOT))
    command, _ = _parted([script, *sys.argv[1:]], "--json")
    record = {"command": command, "machine": describe(), "day": time.strftime("%Y-%m-%d"), "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def document(records: Sequence[dict[str, Any]]) -> str:
    """The page."""
    lines = []
    rows = merged([one for record in records for one in record["rows"]])
    for number, promise in PROMISES.items():
        for one in [one for one in rows if one["promise"] == number]:
            found = len(one["violations"])
            told = f"{found}: {'; '.join(one['violations'][:3])}" if found else "0"
            lines.append(f"| {promise} | {one['fault']} | {one['times']} | {told} | {figure_of(one)} |")
    return HEAD + "\n".join(lines) + "\n\nMade by\n\n" + "\n".join(_made_by(records)) + "\n"


def merged(rows: Iterable[Row]) -> list[Row]:
    """One row for each promise and fault, in which all that were tried of it add up."""
    found: dict[tuple[int, str], Row] = {}
    for one in rows:
        known = found.setdefault((one["promise"], one["fault"]), row(one["promise"], one["fault"], 0, []))
        known["times"] += one["times"]
        known["violations"] += one["violations"]
        known["figure"] = ", ".join(part for part in (known["figure"], one["figure"]) if part)
        for name, seconds in one.get("samples", {}).items():
            known["samples"].setdefault(name, []).extend(seconds)
        for name, count in one.get("counts", {}).items():
            known["counts"][name] = known["counts"].get(name, 0) + count
    return list(found.values())


def _made_by(records: Sequence[dict[str, Any]]) -> list[str]:
    """Each command once, with its seeds."""
    seeds: dict[str, list[str]] = {}
    where: dict[str, str] = {}
    for record in records:
        command, seed = _parted(shlex.split(record["command"]), "--seed")
        seeds.setdefault(command, []).extend([seed] if seed else [])
        where.setdefault(command, f"{record['day']}; {record['machine']}")
    told = {command: f" with `--seed` {', '.join(of)}" if of else "" for command, of in seeds.items()}
    return [f"- `{command}`{told[command]} ({where[command]})" for command in seeds]


def _parted(words: Sequence[str], option: str) -> tuple[str, str]:
    """A command without an option that has one value, and that value."""
    if option not in words:
        return shlex.join(words), ""
    at = words.index(option)
    return shlex.join([*words[:at], *words[at + 2 :]]), words[at + 1]


def main() -> None:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]
    beside = BESIDE.read_text(encoding="utf-8")
    DOCUMENT.write_text(f"{document(records)}\n{beside}", encoding="utf-8")


if __name__ == "__main__":
    main()
