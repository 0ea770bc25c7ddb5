"""flowrt's sides of the comparisons in perf/: what they come to is what JAX and PyTorch find, or what it must be."""

from __future__ import annotations

import json
import os
import re
import subprocess

import numpy as np
import pytest
from places import ROOT
from programs import python

PERF = ROOT / "perf"
FIRST = {
    "W1": [10001.0] * 5,
    "W2": [64.0] * 5,
    "W3": [3.32042, 3.29785, 3.25589, 3.19801, 3.12786],
    "W4": [6.70654, 4.60560, 3.70837, 3.25217, 3.46075],
    "W5": [4.162110, 4.161909, 4.161525, 4.160979, 4.160289],
    "W5b": [49995000.0] * 5,
    "W7": [0.692984, 0.692898, 0.693669, 0.693226, 0.693125],
    "normed": [2.667035, 1.946332, 1.452302, 0.967430, 0.579424],
    "residual": [2.385172, 2.377421, 2.363180, 2.343947, 2.321303],
    "gru": [4.166218, 4.165535, 4.164239, 4.162394, 4.160061],
    "power": [104.47617] * 5,
    "bodies": [3.049863] * 5,
    "heat": [13089.889] * 5,
    "columns": [-0.682392] * 5,
    "pooled": [1079794.6] * 5,
    "gpt": [6.278103, 5.959924, 5.578474, 5.345035, 5.065296],
    "many_rows": [0.754360, 0.729242, 0.737959, 0.756971, 0.796918],
}


def run_side(topic: str, workload: str, *more: str, said: str = "") -> str:
    """What a side prints that is told ``said``."""
    line = [*python(), "-m", f"sides.{topic}.flowrt", workload, *more]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "FLOWRT_BUILD": "never"}
    done = subprocess.run(line, cwd=PERF, env=environment, input=said, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)  # with no kernel compiled yet
@pytest.mark.parametrize("workload", FIRST)
def test_a_workload_gives_what_the_peers_give(workload: str) -> None:
    said = run_side("steps", workload, "--threads", "2", "--seconds", "0.01")
    found = re.search(r"first \[(.*)\]", said)
    assert found is not None, said
    np.testing.assert_allclose([float(n) for n in found.group(1).split(",")], FIRST[workload], rtol=1e-4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("topic", "workload"),
    [("null_step", "scalar"), ("null_step", "rows-2.5MB"), ("transport", "pass-1KiB"), ("transport", "steps")],
)
def test_what_several_processes_come_to_is_right(topic: str, workload: str) -> None:
    said = run_side(topic, workload, "--workers", "2", said="measure 0.05\n")
    ready, measured, end = (json.loads(line) for line in said.splitlines())
    assert {"server", "worker 0", "client"} <= ready["roles"].keys()
    assert all(seconds > 0 for seconds in measured["seconds"])
    assert end["right"]
