"""What all experiments with stragglers share: options, the machine, a sentence of finding, a JSON file and a plot.

An experiment is a script beside this one, named for what it tries:

    \"\"\"One line that says what is tried.\"\"\"

    from experiment import Finding, run


    def measure(options: argparse.Namespace) -> Finding:
        seconds = ...  # of options.replicas, options.steps, options.seed
        return Finding("One sentence, with the number.", {"seconds": seconds}, lambda plot: plot.gca().plot(seconds))


    if __name__ == "__main__":
        run(__file__, measure, replicas=50, steps=4000)

It prints the machine and the sentence, and writes NAME.json and NAME.svg into ``docs/stragglers``, or ``--out``.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # flowrt as it lies here
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what other benchmarks share

import machine  # before NumPy, see there
import matplotlib
import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Iterator

OUT = Path(__file__).resolve().parents[2] / "docs" / "stragglers"
DIGITS = 6  # of floats in JSON: what differs beyond them is noise
STYLE = {
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "flowrt",  # the same picture is the same file
}


@dataclass(frozen=True)
class Finding:
    """What an experiment found: one sentence, its ``figures`` (numbers, arrays, mappings, sequences), and a plot."""

    sentence: str
    figures: Mapping[str, Any]
    draw: Callable[[Figure], object]
    size: tuple[float, float] = (7.0, 4.0)  # of the plot, in inches


def run(
    script: str,
    measure: Callable[[argparse.Namespace], Finding],
    *,
    replicas: int,
    steps: int,
    seed: int = 1,
    add: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
    arguments: Sequence[str] | None = None,
) -> Finding:
    """Run the experiment that lies in ``script``: parse options, measure, print, and write.

    ``replicas``, ``steps`` and ``seed`` are the defaults of its options; ``add`` adds options of its own.
    """
    path = Path(script)
    about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or path.stem
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=_positive, default=replicas, help="default: %(default)s")
    parser.add_argument("--steps", type=_positive, default=steps, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=seed, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder to write to")
    add(parser)
    options = parser.parse_args(arguments)
    described = machine.describe()
    print(f"{about.splitlines()[0]}\n{described}", flush=True)
    began = time.perf_counter()
    finding = measure(options)
    seconds = time.perf_counter() - began
    print(f"\n{finding.sentence}\n({seconds:.0f} s)", flush=True)
    facts = {
        "experiment": path.stem,
        "about": about.splitlines()[0],
        "finding": finding.sentence,
        "machine": described,
        "command": " ".join(["python", f"perf/stragglers/{path.name}", *_differing(parser, options)]),
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        "seconds": seconds,
        "figures": finding.figures,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_plain(facts), indent=1, ensure_ascii=False)
    (options.out / f"{path.stem}.json").write_text(text + "\n", encoding="utf-8")
    _plot(finding, options.out / f"{path.stem}.svg")
    return finding


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def _differing(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Iterator[str]:
    """The options that are not as they are by default."""
    for name, value in vars(options).items():
        if name != "out" and value != parser.get_default(name):
            values = value if isinstance(value, list) else [value]
            yield " ".join([f"--{name.replace('_', '-')}", *map(str, values)])


def _plain(value: Any) -> Any:
    """``value`` as JSON holds it: NumPy's values as Python's, floats to the digits that say something."""
    match value:
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case np.ndarray() | np.generic():
            return _plain(value.tolist())
        case list() | tuple():
            return [_plain(item) for item in value]
        case float():
            return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None  # JSON has no NaN
        case Path():
            return value.as_posix()
        case _:
            return value


def _plot(finding: Finding, path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=finding.size)  # not pyplot's: needs no display, and nobody has to close it
        finding.draw(figure)
        figure.savefig(path, metadata={"Date": None})
