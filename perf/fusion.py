"""What fusing gains: programs written from elementwise ops and sums, fused and as written, beside the peers.

Each case is one program in every library's own words (`CASES`, `JAX`, `TORCH`), on the same numbers; what they answer
is compared. Peers run as processes of their own, where scripts/peers has installed them: jax.jit, torch eager and
torch's own fused optimiser. Least of all runs, since others may use the machine; bytes are those a single pass must
move.

    python perf/fusion.py [--threads 1] [--peers jax torch] [CASE ...]
    python perf/fusion.py --random 100 --seed 0 [--threads 1]    # random programs, fused against as written
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import machine as this_machine
import numpy as np
import random_fusion

PEERS = Path.home() / ".cache" / "flowrt-peers"
SIZE, PARAMETER, SECONDS = 1 << 20, 10_000_000, 0.5

# Rows and columns of what each case is given, and how many float32 one pass over memory reads and writes.
SHAPES: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "chain": ((SIZE,), (SIZE,)),
    "options": ((SIZE,), (SIZE,), (SIZE,)),
    "gelu": ((1024, 2048), (2048,), (1024, 2048)),
    "masked": ((SIZE,), (SIZE,), (SIZE,)),
    "norm": ((4096, 512), (512,), (512,)),
    "softmax": ((4096, 1024), (4096, 1024)),
    "attention": ((16, 12, 128, 128), (128, 128)),
    "layer": ((4096, 768), (768,), (768,), (4096, 768)),
    "rms": ((4096, 768), (768,), (4096, 768)),
    "adam": ((PARAMETER,),),
}
MOVED = {
    "chain": 3 * SIZE,
    "options": 5 * SIZE,
    "gelu": 4 * 1024 * 2048,
    "masked": 4 * SIZE,
    "norm": 2 * 4096 * 512,
    "softmax": 3 * 4096 * 1024,
    "attention": 2 * 16 * 12 * 128 * 128,
    "layer": 4 * 4096 * 768,
    "rms": 4 * 4096 * 768,
    "adam": 7 * PARAMETER,
}

JAX = """
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
def chain(x, y):
    for _ in range(2):
        x = jnp.maximum(x * 0.9 + y, 0.0)
        x = jnp.abs(x - 0.5) / (y * y + 1.0)
    return x
def options(s, k, t):
    s, k, t = jnp.exp(s), jnp.exp(k), jnp.abs(t) + 0.1
    spread = 0.2 * jnp.sqrt(t)
    a = (jnp.log(s / k) + (0.02 + 0.02) * t) / spread
    n = lambda z: 0.5 * (1.0 + jax.scipy.special.erf(z * 0.70710678))
    call = s * n(a) - k * jnp.exp(-0.02 * t) * n(a - spread)
    return call, call - s + k * jnp.exp(-0.02 * t)
def gelu(x, b, w):
    return jax.grad(lambda x, b: jnp.sum(jax.nn.gelu(x + b, approximate=True) * w), (0, 1))(x, b)
def masked(p, t, m):
    f = lambda p: jnp.mean(jnp.where(m > 0, jnp.square(p - t), 0.0))
    return jax.value_and_grad(f)(p)
def norm(x, g, b):
    c = x - jnp.mean(x, 1, keepdims=True)
    return c * jax.lax.rsqrt(jnp.mean(c * c, 1, keepdims=True) + 1e-5) * g + b
def softmax(x, t):
    def f(x):
        z = x - jax.lax.stop_gradient(jnp.max(x, 1, keepdims=True))
        return -jnp.mean(jnp.sum(t * (z - jnp.log(jnp.sum(jnp.exp(z), 1, keepdims=True))), 1))
    return jax.value_and_grad(f)(x)
def attention(s, m):
    s = s * 0.125 + m
    e = jnp.exp(s - jnp.max(s, -1, keepdims=True))
    return e / jnp.sum(e, -1, keepdims=True)
def layer(x, g, b, w):
    y, pull = jax.vjp(norm, x, g, b)
    return y, *pull(w)
def rms(x, g, w):
    y, pull = jax.vjp(lambda x, g: x * jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + 1e-6) * g, x, g)
    return y, *pull(w)
def adam(g):
    p, m, v = (jnp.zeros(g.size) for _ in range(3))
    def step(p, m, v, g):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        return p - 0.001 * m / (jnp.sqrt(v) + 1e-8), m, v
    step = jax.jit(step, donate_argnums=(0, 1, 2))
    def run():
        nonlocal p, m, v
        p, m, v = step(p, m, v, g)
        p.block_until_ready()
    return run
for name, given in data():
    given = [jnp.asarray(a) for a in given]
    if name == "adam":
        measure(name, adam(*given))
    else:
        program = jax.jit(globals()[name])
        measure(name, lambda: jax.block_until_ready(program(*given)), jax.tree.leaves(program(*given)))
"""
TORCH = """
import torch
torch.set_num_threads(THREADS)
def chain(x, y):
    for _ in range(2):
        x = torch.relu(x * 0.9 + y)
        x = torch.abs(x - 0.5) / (y * y + 1.0)
    return x
def options(s, k, t):
    s, k, t = torch.exp(s), torch.exp(k), torch.abs(t) + 0.1
    spread = 0.2 * torch.sqrt(t)
    a = (torch.log(s / k) + (0.02 + 0.02) * t) / spread
    n = lambda z: 0.5 * (1.0 + torch.erf(z * 0.70710678))
    call = s * n(a) - k * torch.exp(-0.02 * t) * n(a - spread)
    return call, call - s + k * torch.exp(-0.02 * t)
def gelu(x, b, w):
    x, b = x.requires_grad_(), b.requires_grad_()
    return torch.autograd.grad(torch.sum(torch.nn.functional.gelu(x + b, approximate="tanh") * w), (x, b))
def masked(p, t, m):
    p = p.requires_grad_()
    loss = torch.mean(torch.where(m > 0, torch.square(p - t), 0.0))
    return loss, *torch.autograd.grad(loss, p)
def norm(x, g, b):
    c = x - torch.mean(x, 1, keepdim=True)
    return c * torch.rsqrt(torch.mean(c * c, 1, keepdim=True) + 1e-5) * g + b
def softmax(x, t):
    x = x.requires_grad_()
    z = x - torch.amax(x, 1, keepdim=True).detach()
    loss = -torch.mean(torch.sum(t * (z - torch.log(torch.sum(torch.exp(z), 1, keepdim=True))), 1))
    return loss, *torch.autograd.grad(loss, x)
def attention(s, m):
    return torch.softmax(s * 0.125 + m, -1)
def layer(x, g, b, w):
    x, g, b = (a.requires_grad_() for a in (x, g, b))
    y = torch.nn.functional.layer_norm(x, (768,), g, b)
    return y, *torch.autograd.grad(y, (x, g, b), w)
def rms(x, g, w):
    x, g = x.requires_grad_(), g.requires_grad_()
    y = torch.nn.functional.rms_norm(x, (768,), g, 1e-6)
    return y, *torch.autograd.grad(y, (x, g), w)
for name, given in data():
    given = [torch.from_numpy(a) for a in given]
    if name == "adam":
        p = torch.nn.Parameter(torch.zeros(given[0].shape)); p.grad = given[0]
        measure(name, torch.optim.Adam([p], 1e-3, fused=True).step)
    else:
        made = globals()[name](*given)
        made = made if isinstance(made, tuple) else [made]
        measure(name, lambda: globals()[name](*given), [a.detach() for a in made])
"""
PEER = """
import json, os, sys, time
import numpy as np
THREADS, SECONDS, SHAPES = {threads}, {seconds}, {shapes}
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
found = {{}}
def data():
    for name, shapes in SHAPES.items():
        yield name, [np.random.default_rng(i).normal(size=s).astype(np.float32) for i, s in enumerate(shapes)]
def measure(name, call, answers=()):
    for _ in range(3): call()
    best, until = 1e9, time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        begin = time.perf_counter(); call(); best = min(best, time.perf_counter() - begin)
    found[name] = best, [float(np.asarray(a, np.float64).sum()) for a in answers]
{source}
print(json.dumps(found))
"""


# ── our side ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def chain(x: Any, y: Any) -> Any:
    import flowrt as fr

    for _ in range(2):
        x = fr.relu(x * 0.9 + y)
        x = fr.abs(x - 0.5) / (y * y + 1.0)
    return [x]


def options(s: Any, k: Any, t: Any) -> Any:
    """Black and Scholes' prices of calls and puts."""
    import flowrt as fr

    s, k, t = fr.exp(s), fr.exp(k), fr.abs(t) + 0.1
    spread = 0.2 * fr.sqrt(t)
    a = (fr.log(s / k) + (0.02 + 0.02) * t) / spread
    call = s * _normal(a) - k * fr.exp(-0.02 * t) * _normal(a - spread)
    return [call, call - s + k * fr.exp(-0.02 * t)]


def _normal(z: Any) -> Any:
    import flowrt as fr

    return 0.5 * (1.0 + fr.erf(z * 0.70710678))


def gelu(x: Any, b: Any, w: Any) -> Any:
    import flowrt as fr

    z = x + b
    y = 0.5 * z * (1.0 + fr.tanh(0.7978845608 * (z + 0.044715 * z * z * z)))
    return fr.gradients(fr.sum(y * w), [x, b])


def masked(p: Any, t: Any, m: Any) -> Any:
    import flowrt as fr

    loss = fr.mean(fr.where(m > 0.0, fr.square(p - t), 0.0))
    return [loss, *fr.gradients(loss, [p])]


def norm(x: Any, g: Any, b: Any) -> Any:
    import flowrt as fr

    c = x - fr.mean(x, 1, keepdims=True)
    return [c * fr.rsqrt(fr.mean(c * c, 1, keepdims=True) + 1e-5) * g + b]


def softmax(x: Any, t: Any) -> Any:
    import flowrt as fr

    z = x - fr.stop_gradient(fr.max(x, 1, keepdims=True))
    loss = -fr.mean(fr.sum(t * (z - fr.log(fr.sum(fr.exp(z), 1, keepdims=True))), 1))
    return [loss, *fr.gradients(loss, [x])]


def attention(s: Any, m: Any) -> Any:
    """What attends to what, of scaled and masked scores."""
    import flowrt as fr

    s = s * 0.125 + m
    e = fr.exp(s - fr.max(s, -1, keepdims=True))
    return [e / fr.sum(e, -1, keepdims=True)]


def layer(x: Any, g: Any, b: Any, w: Any) -> Any:
    import flowrt as fr

    (y,) = norm(x, g, b)
    return [y, *fr.gradients(y, [x, g, b], w)]


def rms(x: Any, g: Any, w: Any) -> Any:
    import flowrt as fr

    y = x * fr.rsqrt(fr.mean(x * x, 1, keepdims=True) + 1e-6) * g
    return [y, *fr.gradients(y, [x, g], w)]


def adam(g: Any) -> Any:
    import flowrt as fr

    return fr.optim.Adam(1e-3).apply_gradients([(g, fr.Variable(fr.zeros(PARAMETER)))])


CASES: Mapping[str, Callable[..., Any]] = {
    made.__name__: made for made in (chain, options, gelu, masked, norm, softmax, attention, layer, rms, adam)
}


def ours(case: str, optimize: bool, threads: int) -> tuple[float, list[float]]:
    """Seconds of a case and the sums of its answers; what is fused is compiled before anything is timed."""
    import flowrt as fr
    from flowrt.kernels.store.background import wait_compiled

    values = [np.random.default_rng(i).normal(size=s).astype(np.float32) for i, s in enumerate(SHAPES[case])]
    with fr.Graph() as graph:
        feeds = [fr.placeholder("float32", a.shape) for a in values]
        made = CASES[case](*feeds)
    with fr.BlockingSession(graph, options=fr.Options(optimize=optimize, threads=threads)) as session:
        step = session.compile(made, feeds)
        for _ in range(3):
            answers = step(*values)
            if not wait_compiled(120):
                raise SystemExit("the fused kernels were not compiled in two minutes")
        for _ in range(8):  # the first runs of a tape are timed, to divide it
            step(*values)
        best, until = float("inf"), time.perf_counter() + SECONDS
        while time.perf_counter() < until:
            begin = time.perf_counter()
            step(*values)
            best = min(best, time.perf_counter() - begin)
    return best, [float(np.asarray(a, np.float64).sum()) for a in answers or ()]


def peer(name: str, source: str, cases: list[str], threads: int) -> dict[str, tuple[float, list[float]]]:
    python = PEERS / name / "bin" / "python"
    if not python.exists():
        return {}
    shapes = {case: SHAPES[case] for case in cases}
    program = PEER.format(threads=threads, seconds=SECONDS, shapes=shapes, source=source)
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    return {case: (seconds, sums) for case, (seconds, sums) in json.loads(done.stdout.splitlines()[-1]).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--peers", nargs="*", default=["jax", "torch"])
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="so many random programs instead")
    parser.add_argument("--seed", type=int, default=0, help="that of the first of them")
    arguments = parser.parse_args()
    if arguments.random:
        print(f"{this_machine.describe()}, {arguments.threads} threads", flush=True)
        print(random_fusion.summary(list(random_fusion.survey(arguments.random, arguments.seed, arguments.threads))))
        return
    cases = arguments.cases or list(CASES)
    sources = {"jax": JAX, "torch": TORCH}
    sides = {name: {case: ours(case, name == "fused", arguments.threads) for case in cases} for name in OURS}
    sides |= {name: peer(name, sources[name], cases, arguments.threads) for name in arguments.peers}
    if arguments.json:
        print(json.dumps({"machine": this_machine.describe(), "threads": arguments.threads, "seconds": sides}))
        return
    print(f"{this_machine.describe()}, {arguments.threads} threads")
    for case in cases:
        print(f"{case}: microseconds, GB/s of what one pass moves")
        for side, found in sides.items():
            if case in found:
                seconds, sums = found[case]
                agrees = np.allclose(sums, sides["fused"][case][1], rtol=1e-3, atol=1e-2)
                note = "" if agrees or not sums else f"  answers {sums}, not {sides['fused'][case][1]}"
                print(f"  {side:11} {1e6 * seconds:8.0f}  {4 * MOVED[case] / seconds / 1e9:5.1f}{note}")


OURS = ("fused", "as written")

if __name__ == "__main__":
    sys.exit(main())
