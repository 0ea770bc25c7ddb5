"""``python -m flowrt.ledger FILE``: what became of every batch of a trainer.

With ``--json`` as plain data, with ``--batch N`` what was said of one batch, with ``--verify`` nothing but what must
not be. Ends with 0; with 1 where something must not be; with 2 where the file cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from flowrt.base.errors import LedgerError
from flowrt.ledger.ledger import Ledger

COLUMNS = ("kept", "late", "refused", "lost")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; answers the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m flowrt.ledger", description="What became of every batch of a trainer."
    )
    parser.add_argument("file", help="the ledger, such as FOLDER/TRAINER.ledger beside checkpoints")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--batch", type=int, metavar="N", help="print what was said of the batch of that identity")
    parser.add_argument("--verify", action="store_true", help="print only what must not be, if anything")
    given = parser.parse_args(arguments)
    try:
        ledger = Ledger(given.file)
    except LedgerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(ledger.to_data(), indent=1, default=list))
    elif given.batch is not None:
        print(f"batch {given.batch}: {ledger.state_of(given.batch)}", *ledger.history(given.batch), sep="\n  ")
    elif not given.verify:
        print(summary(ledger))
    for violation in ledger.violations:
        print(f"must not be: {violation}", file=sys.stderr)
    return 1 if ledger.violations else 0


def summary(ledger: Ledger) -> str:
    """The ledger in some lines."""
    found, setup = ledger.to_data(), ledger.setup
    if setup is None:
        return f"{ledger.path}: empty"
    batches = found["batches"]
    states = [*COLUMNS, "unused", *(["handed"] if batches["handed"] else [])]
    return "\n".join(
        [
            f"{setup.trainer}: {setup.replicas} replicas, {_text(setup.policy)}",
            f"{found['runs']} runs, at version {ledger.version}",
            *([f"updates travel as {ledger.compression}"] if ledger.compression else []),
            f"{found['drawn']} batches drawn: " + ", ".join(f"{batches[state]} {state}" for state in states),
            "",
            "updates of" + "".join(f"{column:>10}" for column in COLUMNS),
            *(
                f"{f'replica {replica}':10}" + "".join(f"{counts[column]:10}" for column in COLUMNS)
                for replica, counts in enumerate(found["updates"])
            ),
            *(
                f"back at version {u['version']}, {u['batches']} batches undone: {u['because']}"
                for u in found["undone"]
            ),
            *([f"{ledger.torn} bytes at the end are of a record that was cut off"] if ledger.torn else []),
            f"{len(ledger.violations)} violations",
        ]
    )


def _text(policy: Any) -> str:
    """A policy as it is written in a program."""
    if not isinstance(policy, dict):
        return repr(policy)
    given = ", ".join(f"{name}={_text(value)}" for name, value in policy.items() if name != "class")
    return f"{policy.get('class', '')}({given})"


if __name__ == "__main__":
    sys.exit(main())
