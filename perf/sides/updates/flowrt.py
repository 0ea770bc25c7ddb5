"""flowrt's side of perf/updates.py."""

from __future__ import annotations

import atexit

from sides import harness as h
from sides.harness import Settings, Side
from sides.updates import data as d

import flowrt as fr

RULES = {
    "sgd": lambda: fr.optim.SGD(d.RATE),
    "momentum": lambda: fr.optim.Momentum(d.RATE, d.MOMENTUM),
    "adam": lambda: fr.optim.Adam(d.RATE, d.BETA1, d.BETA2, d.EPSILON),
}


def update(a: Settings) -> Side:
    values, slopes = d.parameters(a.workload)
    h.imported()
    with fr.Graph() as graph:
        parameters = [fr.Variable(value) for value in values]
        gradients = [fr.Variable(slope, trainable=False) for slope in slopes]
        before = parameters[-1][0]
        move = RULES[a.workload.split("-")[0]]().apply_gradients(zip(gradients, parameters, strict=True))
    session = fr.BlockingSession(graph, options=fr.Options(threads=a.threads)).__enter__()
    atexit.register(session.__exit__, None, None, None)
    step = session.compile([before, move])
    return Side(lambda: step()[0])


if __name__ == "__main__":
    h.main(dict.fromkeys(d.WORKLOADS, update))
