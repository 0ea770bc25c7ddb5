"""Run the experiments with stragglers one after another, and write what they found into docs/stragglers.md.

scripts/stragglers              # all of them: a quarter of an hour on two cores
scripts/stragglers backups      # these; the page keeps what the others found last
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
EXPERIMENTS = (
    "backups",
    "adaptive",
    "order_statistics",
    "policies",
    "staleness",
    "local_steps",
    "attribution",
    "scale",
)
HEAD = """# Stragglers

What first m of n, and letting machines be late in other ways, does to training: experiments that anybody can repeat by
`scripts/stragglers`. Each is a script in `perf/stragglers/`, which says how it measures; `docs/stragglers/` holds its
numbers beside its plot. [The guide](guide/stragglers.md) says how to do the same with your own model.
"""


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *EXPERIMENTS], metavar="NAME", help=", ".join(EXPERIMENTS))
    environ = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    for name in parser.parse_args().names or EXPERIMENTS:
        print(f"── {name} ──", flush=True)
        subprocess.run([sys.executable, HERE / f"{name}.py"], env=environ, check=True)
    (DOCS / "stragglers.md").write_text(HEAD + "".join(_sections()), encoding="utf-8")


def _sections() -> Iterator[str]:
    for name in EXPERIMENTS:
        found = DOCS / "stragglers" / f"{name}.json"
        if found.exists():
            yield _section(name, json.loads(found.read_text(encoding="utf-8")))


def _section(name: str, facts: dict[str, Any]) -> str:
    return f"""
## {facts["about"].rstrip(".")}

{facts["finding"]}

![{name}](stragglers/{name}.svg)

`{facts["command"]}` took {facts["seconds"]:.0f} s on {facts["machine"]}; numbers in
[stragglers/{name}.json](stragglers/{name}.json).
"""


if __name__ == "__main__":
    main()
