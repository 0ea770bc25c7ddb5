"""Training on handwritten digits by replicas, the data of scripts/train: undisturbed, and with one slow worker.

Beside flowrt, in the same run: PyTorch's DistributedDataParallel over gloo, TensorFlow's in-graph towers and
SyncReplicasOptimizer, and ray's actors with NumPy. All begin with the same weights and see the same batches, so all
that wait for every replica come to the same loss, which is checked; of those that keep the first updates it is shown.
The straggler takes 0.2 s longer for each of its updates.

    python perf/replicas.py                                   # both, with 4 workers
    python perf/replicas.py undisturbed --workers 16 --sides flowrt ddp
    python perf/replicas.py --write                           # and into docs/performance.md
"""

from __future__ import annotations

import os
import sys
import tempfile

import machine as this_machine
from compare import versions
from several import asked, parser, run, show, spending, table
from sides.replicas import data as replicas_data

WAITING = {
    "flowrt": ("flowrt", ""),
    "ddp": ("torch", ""),
    "tf-ingraph": ("tf", "ingraph"),
    "tf-sync": ("tf", "sync"),
    "ray": ("ray", ""),
}
FIRST = {"flowrt": ("flowrt", "first"), "tf-sync-first": ("tf", "first"), "ray-first": ("ray", "first")}
SIDES = {
    "undisturbed": WAITING,
    "straggler": {**FIRST, "flowrt-all": ("flowrt", ""), "ddp": ("torch", ""), "tf-sync": ("tf", "sync")},
}
WHAT = {"undisturbed": "undisturbed", "straggler": "with a worker that is 0.2 s late"}


def main() -> None:
    a = asked(parser(__doc__, WHAT, list(dict.fromkeys(name for sides in SIDES.values() for name in sides))), WHAT)
    about = [
        f"{this_machine.describe()}.",
        f"Peers: {versions('tf', 'torch', 'ray')}. {a.rounds} rounds of {a.seconds:g} s; batches of "
        f"{replicas_data.BATCH} a replica; every process computes on one thread.",
    ]
    print("\n".join(about), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DIGITS"] = os.path.join(folder, "digits.npz")
        replicas_data.save(os.environ["DIGITS"])
        for case in a.cases or SIDES:
            for workers in a.workers:
                heading = f"### Digits, {workers} workers, {WHAT[case]}"
                print(f"\n{heading}", file=sys.stderr, flush=True)
                chosen = {name: side for name, side in SIDES[case].items() if name in a.sides}
                sides, failed = run(
                    "replicas", case, chosen, "--workers", str(workers), rounds=a.rounds, seconds=a.seconds
                )
                lines = list(table(sides, failed))
                lines += [f"- {side.name}: {side.notes}" for side in sides]
                lines += [f"- {spending(side)}" for side in sides if side.name == "flowrt"]
                show(heading, about, lines, a.write)


if __name__ == "__main__":
    main()
