"""What experiments with stragglers share: what a finding leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from places import ROOT
from programs import python

if TYPE_CHECKING:
    from pathlib import Path

SHARED = ROOT / "perf" / "stragglers"
SCRIPT = '''"""Whether a line rises.

More about it.
"""

import numpy as np
from experiment import Finding, run


def measure(options):
    figures = {"line": np.arange(options.steps) / 3, "seed": np.int64(options.seed), "none": float("nan")}
    return Finding("It rises by a third a step.", figures, lambda plot: plot.gca().plot(figures["line"]))


run(__file__, measure, replicas=2, steps=3, add=lambda parser: parser.add_argument("--many-words", nargs="*"))
'''


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "rising.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [*python(), script, "--out", tmp_path / "found", *arguments],
        env=os.environ | {"PYTHONPATH": str(SHARED)},
        capture_output=True,
        text=True,
        timeout=50,
    )


def test_an_experiment_prints_its_finding_and_writes_figures_and_plot(tmp_path: Path) -> None:
    done = run(tmp_path, "--steps", "4", "--many-words", "a", "b")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Whether a line rises.\n")
    assert "\nIt rises by a third a step.\n" in done.stdout
    found = json.loads((tmp_path / "found" / "rising.json").read_text())
    assert found["figures"] == {"line": [0.0, 0.333333, 0.666667, 1.0], "seed": 1, "none": None}
    assert found["command"] == "python perf/stragglers/rising.py --steps 4 --many-words a b"
    assert found["options"] == {"replicas": 2, "steps": 4, "seed": 1, "many_words": ["a", "b"]}
    assert found["machine"] in done.stdout
    assert (tmp_path / "found" / "rising.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("wrong", [["--steps", "0"], ["--replicas", "-3"], ["--steps", "many"]])
def test_an_experiment_refuses_numbers_that_count_nothing(tmp_path: Path, wrong: list[str]) -> None:
    done = run(tmp_path, *wrong)
    assert done.returncode == 2
    assert "is not a number from 1 up" in done.stderr
