"""What a step takes on a GPU beside torch.compile on the same one, in one run; where there is none, "not measured".

A null step (one addition of four numbers, fed and fetched), and W3, a training step of an MLP of 784, 512, 256 and 10
by momentum, batch 128. Losses are compared with those of the host. The roofline of a step is the larger of its
multiplications at the GPU's peak and of what it must read and write at the memory's; both are asked by --peak.

    python perf/gpu.py                                         # medians and quartiles of --rounds steps
    python perf/gpu.py --peak 67e12 3.35e12                    # an H100: float32 operations, bytes a second
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import machine as this_machine
import numpy as np

import flowrt as fr

SIZES, BATCH, RATE, MOMENTUM = (784, 512, 256, 10), 128, 0.05, 0.9
TOLERANCE = 2e-3  # of the losses of five steps, float32
Step = Callable[[], float]


def data() -> tuple[Any, Any, list[Any]]:
    rng = np.random.default_rng(0)
    shapes = list(itertools.pairwise(SIZES))
    weights = [rng.normal(size=shape, scale=(2 / shape[0]) ** 0.5).astype(np.float32) for shape in shapes]
    return rng.normal(size=(BATCH, SIZES[0])).astype(np.float32), rng.integers(0, 10, BATCH).astype(np.int32), weights


def flowrt_steps(device: str) -> Iterator[tuple[str, Step]]:
    """The steps in sessions on a device, which stay open until they are asked for no more."""
    options = fr.Options(devices=("cpu:0", device))
    with fr.Graph() as graph, fr.device(device):
        x = fr.placeholder("float32", (4,))
        y = x + 1.0
    with fr.BlockingSession(graph, options=options) as session:
        yield "null step", lambda: float(session.run(y, {x: np.zeros(4, np.float32)})[0])
    images, labels, weights = data()
    with fr.Graph() as graph, fr.device(device):
        x, y = fr.placeholder("float32", (BATCH, SIZES[0])), fr.placeholder("int32", (BATCH,))
        z: Any = x
        for n, weight in enumerate(weights):
            z = (fr.relu(z) if n else z) @ fr.Variable(weight, name=f"w{n}")
        loss = fr.mean(fr.nn.softmax_cross_entropy(z, y))
        update = fr.optim.Momentum(RATE, MOMENTUM).minimize(loss)
    with fr.BlockingSession(graph, options=options) as session:
        yield "W3 MLP", lambda: float(session.run([loss, update], {x: images, y: labels})[0])


def torch_steps() -> Iterator[tuple[str, Step]]:
    import torch

    def null() -> float:
        return float((torch.zeros(4).cuda() + 1.0).cpu()[0])

    yield "null step", null
    images, labels, weights = data()
    w = [torch.tensor(weight, device="cuda", requires_grad=True) for weight in weights]
    optimizer = torch.optim.SGD(w, lr=RATE, momentum=MOMENTUM)

    @torch.compile
    def loss_of(x: Any, y: Any) -> Any:
        z = x
        for n, weight in enumerate(w):
            z = (torch.relu(z) if n else z) @ weight
        return torch.nn.functional.cross_entropy(z, y)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(torch.tensor(images).cuda(), torch.tensor(labels).long().cuda())
        loss.backward()
        optimizer.step()
        return float(loss)

    yield "W3 MLP", step


def roofline(name: str, peak: tuple[float, float]) -> float:
    """The least seconds that a step can take."""
    if name == "null step":
        return 32 / peak[1]
    entries = sum(a * b for a, b in itertools.pairwise(SIZES))
    return max(6 * BATCH * entries / peak[0], 4 * 6 * entries / peak[1])


def timed(step: Step, rounds: int) -> tuple[list[float], list[float]]:
    """The first five losses, and the seconds of steps after them."""
    losses = [step() for _ in range(5)]
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return losses, seconds


def why_not() -> str:
    """Why nothing can be measured here; nothing where it can."""
    from flowrt.kernels import gpus

    if gpus.SIMULATED:
        return "simulated GPUs tell nothing of speed"
    try:
        return "" if gpus.count() else "there is no GPU"
    except fr.ResourceError as error:
        return str(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--peak", type=float, nargs=2, metavar=("FLOPS", "BYTES"), help="of the GPU, a second")
    given = parser.parse_args()
    print(this_machine.describe())
    reason = why_not()
    if reason:
        for name in ("null step", "W3 MLP", "W4 CNN", "W5 LSTM", "W6 embedding", "GPT of four layers"):
            print(f"{name:20} not measured: {reason}")
        return
    here = {name: timed(step, 1)[0] for name, step in flowrt_steps("cpu:0")}
    sides = {"flowrt": flowrt_steps("cuda:0")}
    if find_spec("torch") is not None:
        sides["torch.compile"] = torch_steps()
    for side, steps in sides.items():
        for name, step in steps:
            losses, seconds = timed(step, given.rounds)
            if not np.allclose(losses, here[name], rtol=TOLERANCE):
                raise SystemExit(f"{side}, {name}: losses {losses} are not the host's, {here[name]}")
            low, middle, high = statistics.quantiles(seconds, n=4)
            bound = f", roofline {1e6 * roofline(name, tuple(given.peak)):.1f}" if given.peak else ""
            print(f"{name:20} {side:14} {1e6 * middle:9.1f} µs ({1e6 * low:.1f} to {1e6 * high:.1f}){bound}")
    for name in ("W4 CNN", "W5 LSTM", "W6 embedding", "GPT of four layers"):
        print(f"{name:20} not measured: no side is written yet")


if __name__ == "__main__":
    main()
