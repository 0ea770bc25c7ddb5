"""PyTensor's side: functions compiled by its Numba mode, with shared variables."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from sides import harness as h
from sides.harness import Settings, Side


def _pytensor(a: Settings) -> tuple[Any, Any]:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = str(a.threads)
    import pytensor
    import pytensor.tensor as pt

    pytensor.config.floatX = "float32"
    return pytensor, pt


def overhead(a: Settings) -> Side:
    pytensor, pt = _pytensor(a)
    h.imported()
    v = pt.fvector()
    f = pytensor.function([v], v * np.float32(2) + np.float32(1), mode="NUMBA")
    f.trust_input = a.variant == "trusted"
    return Side(lambda: f(h.VECTOR))


def loop(a: Settings) -> Side:
    pytensor, pt = _pytensor(a)
    h.imported()
    n, zero, one = pt.lscalar(), np.int64(0), np.int64(1)
    states, _ = pytensor.scan(lambda i, s: (i + one, s + i), outputs_info=[zero, zero], n_steps=n)
    f = pytensor.function([n], states[1][-1], mode="NUMBA")
    return Side(lambda: int(f(h.ITERATIONS)), work=h.ITERATIONS, notes="scan of n steps; int64")


def _trained(pytensor: Any, inputs: list[Any], loss: Any, p: list[Any], rate: float, batch: tuple[Any, ...]) -> Side:
    import pytensor.tensor as pt

    updates = []
    for v, g in zip(p, pt.grad(loss, p), strict=True):
        m = pytensor.shared(np.zeros_like(v.get_value()))
        new = np.float32(h.MOMENTUM) * m + g
        updates += [(m, new), (v, v - np.float32(rate) * new)]
    f = pytensor.function(inputs, loss, updates=updates, mode="NUMBA")
    f.trust_input = True
    return Side(lambda: float(f(*batch)))


def mlp(a: Settings) -> Side:
    pytensor, pt = _pytensor(a)
    batch, values = h.mlp_batch(a.batch), h.mlp()
    h.imported()
    x, y = pt.fmatrix(), pt.ivector()
    p = [pytensor.shared(v) for v in values]
    z = pt.maximum(x @ p[0] + p[1], np.float32(0))
    z = pt.maximum(z @ p[2] + p[3], np.float32(0))
    logp = pt.special.log_softmax(z @ p[4] + p[5], axis=-1)
    loss = -logp[pt.arange(y.shape[0]), y].mean(dtype="float32")
    return _trained(pytensor, [x, y], loss, p, h.MLP_RATE, batch)


def lstm(a: Settings) -> Side:
    pytensor, pt = _pytensor(a)
    batch, values = h.lstm_batch(), h.lstm()
    h.imported()
    x, y = pt.ftensor3(), pt.imatrix()
    wx, wh, b, wo, bo = p = [pytensor.shared(v) for v in values]
    steps, rows, units = h.LSTM_STEPS, h.LSTM_BATCH, h.LSTM_UNITS
    xw = (x.reshape((steps * rows, h.LSTM_IN)) @ wx + b).reshape((steps, rows, 4 * units))

    def cell(xt: Any, hidden: Any, c: Any, wh: Any) -> Any:
        z = xt + hidden @ wh
        i, f, g, o = (z[:, k * units : (k + 1) * units] for k in range(4))
        c = pt.sigmoid(f) * c + pt.sigmoid(i) * pt.tanh(g)
        return pt.sigmoid(o) * pt.tanh(c), c

    zero = pt.zeros((rows, units), dtype="float32")
    hidden, _ = pytensor.scan(cell, sequences=[xw], outputs_info=[zero, zero], non_sequences=[wh], return_updates=False)
    logp = pt.special.log_softmax(hidden.reshape((steps * rows, units)) @ wo + bo, axis=-1)
    loss = -logp[pt.arange(steps * rows), y.flatten()].mean(dtype="float32")
    return _trained(pytensor, [x, y], loss, p, h.LSTM_RATE, batch)


if __name__ == "__main__":
    h.main(h.named(globals()))
