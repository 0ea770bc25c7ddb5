"""What was tried of the promises under fault: rows that scripts print, keep as JSON, and make a document of.

.venv/bin/python perf/chaos/records.py          # writes docs/reliability.md from docs/reliability/*.json
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "perf")]

from machine import describe  # noqa: E402

Row = dict[str, Any]
FOLDER, DOCUMENT = ROOT / "docs" / "reliability", ROOT / "docs" / "reliability.md"
PROMISES = {
    1: "A worker's death does not stop training; what replaces it counts within 10 s of its process running",
    4: "A stopped worker slows the median step by a tenth at most, is named within 3 s, is handed no more than one "
    "batch, and counts again within 2 s of going on",
    5: "A partition applies nothing twice, and training goes on within 5 s of its end",
    30: "A client's death leaves all servers at one version, and the next client goes on from there",
    32: "Every batch ends exactly once, and the variables are, to the bit, what the reports say",
    33: "What was away counts again: within 2 s of going on where it was stopped, within 10 s where it was cut off",
    34: "With two copies, a parameter server's death loses no committed step and stops training for a second at most",
    39: "Training under one fault after another keeps 98.5% of its undisturbed speed",
}
HEAD = """# Reliability

What is promised under fault, how often it was tried, and how often it was broken. This page is made from the records
in `docs/reliability/` by `perf/chaos/records.py`; each says the command that made it. `scripts/chaos`,
`perf/chaos/partitions.py` and `perf/chaos/freezing.py` try again, with `--json docs/reliability`.

| promise | fault | times | violations | what was seen |
|---|---|---|---|---|
"""


def row(promise: int, fault: str, times: int, violations: Sequence[str], figure: str) -> Row:
    """What became of a promise that was tried so many times."""
    assert promise in PROMISES
    return {"promise": promise, "fault": fault, "times": times, "violations": list(violations), "figure": figure}


def show(rows: Iterable[Row]) -> None:
    """Print rows, and the machine."""
    print(describe())
    for one in rows:
        print(f"{one['fault']}, {one['times']} times: {one['figure']}")
        for violation in one["violations"]:
            print(f"VIOLATION: {violation}")


def write(path: Path, rows: Sequence[Row]) -> None:
    """Keep rows with the machine and the command that they are of."""
    command = shlex.join([str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *_without_json(sys.argv[1:])])
    record = {"command": command, "machine": describe(), "day": time.strftime("%Y-%m-%d"), "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _without_json(arguments: Sequence[str]) -> list[str]:
    if "--json" not in arguments:
        return list(arguments)
    at = arguments.index("--json")
    return [*arguments[:at], *arguments[at + 2 :]]


def document(records: Sequence[dict[str, Any]]) -> str:
    """The page."""
    lines = []
    for number, promise in PROMISES.items():
        rows = [one for record in records for one in record["rows"] if one["promise"] == number]
        for one in rows:
            found = len(one["violations"])
            told = f"{found}: {'; '.join(one['violations'][:3])}" if found else "0"
            lines.append(f"| {promise} | {one['fault']} | {one['times']} | {told} | {one['figure']} |")
    made = [f"- `{record['command']}` ({record['day']}; {record['machine']})" for record in records]
    return HEAD + "\n".join(lines) + "\n\nMade by\n\n" + "\n".join(made) + "\n"


def main() -> None:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]
    DOCUMENT.write_text(document(records), encoding="utf-8")


if __name__ == "__main__":
    main()
