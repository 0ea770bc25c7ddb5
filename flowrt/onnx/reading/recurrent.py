"""RNN, GRU and LSTM: one layer in one or two directions, by a scan of its cell, or by flowrt's own layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import flowrt.ops as fr
from flowrt.graph import Tensor
from flowrt.onnx.reading.elementwise import COMPOSED, NUMBERS, UNARY, Curve
from flowrt.onnx.reading.reader import NodeCall, Unreadable, Value, reads
from flowrt.ops.inference import described

Step = Callable[[tuple[Any, ...], Any], tuple[Any, ...]]
FORWARD, BACKWARD = ("forward", "bidirectional"), ("reverse", "bidirectional")
USUAL = ("Elu", "HardSigmoid", "LeakyRelu", "Relu", "Sigmoid", "Softplus", "Softsign", "Tanh", "ThresholdedRelu")
CURVES: dict[str, Curve] = {
    **{name: (UNARY | COMPOSED)[name] for name in USUAL},
    "Affine": lambda x, alpha, beta: fr.add(fr.multiply(x, alpha), beta),
    "ScaledTanh": lambda x, alpha, beta: fr.multiply(alpha, fr.tanh(fr.multiply(beta, x))),
}
NAMES = {name.lower(): name for name in CURVES}  # as models write them, in any case


def _curves(call: NodeCall, usual: Sequence[str], directions: int) -> list[list[Curve]]:
    """The activations of each direction; each that has numbers takes the next ones of those that the node says."""
    names = list(call.attr("activations", list(usual) * directions))
    if len(names) != len(usual) * directions:
        raise Unreadable(f"{len(usual) * directions} activations are needed, got {names}")
    said = {what: iter(call.attr(f"activation_{what}", [])) for what in ("alpha", "beta")}
    found: list[Curve] = []
    for given in names:
        name = NAMES.get(given.lower())
        if name is None:
            raise Unreadable(f"the activation {given} is not supported")
        takes = NUMBERS.get(name, {}) if name in USUAL else {"alpha": 1.0, "beta": 1.0}
        found.append(partial(CURVES[name], **{what: float(next(said[what], n)) for what, n in takes.items()}))
    return [found[i : i + len(usual)] for i in range(0, len(found), len(usual))]


class _Recurrent:
    """What the three have in common: inputs, directions, lengths; ``gates`` are those of one direction's weights."""

    def __init__(self, call: NodeCall, gates: int, usual: Sequence[str]) -> None:
        self.call = call
        direction = str(call.attr("direction", "forward"))
        self.backward = [name is BACKWARD for name in (FORWARD, BACKWARD) if direction in name]
        self.curves = _curves(call, usual, len(self.backward))
        self.usual = call.attr("activations") in (None, list(usual) * len(self.backward))
        self.batched = bool(call.attr("layout", 0))
        x = call[0]
        self.x = fr.transpose(x, (1, 0, 2)) if self.batched else x
        units = call.shape(2)[-1]
        if units is None:
            raise Unreadable("the sizes of its weights must be known")
        self.units, self.gates = units, gates
        self.lengths = call[4]
        self.clip = call.attr("clip")

    def weights(self, n: int) -> tuple[Any, Any, Any, Any]:
        """Of one direction: [in, gates], [units, gates], and the biases of both products, vectors or None."""
        w, r = (fr.transpose(self._of(value, n)) for value in self.call.inputs[1:3])
        bias = self.call[3]
        if bias is None:
            return w, r, None, None
        both, size = self._of(bias, n), self.gates * self.units
        return w, r, both[:size], both[size:]

    def _of(self, value: Value, n: int) -> Any:
        return value[n] if isinstance(value, np.ndarray) else fr.squeeze(fr.take(value, np.asarray([n])), 0)

    def start(self, index: int, n: int) -> Any:
        """The state that one direction begins with: zeros unless the node gives one."""
        value = self.call[index]
        if value is None:
            batch = fr.shape_of(self.x)[1]
            sizes = fr.stack([batch, self.units]) if isinstance(batch, Tensor) else (int(batch), self.units)
            return fr.zeros(sizes, described(self.x).dtype.name)
        return self._of(fr.transpose(value, (1, 0, 2)) if self.batched else value, n)

    def gate(self, sums: Any, n: int) -> Any:
        """One gate's part of the sums of all."""
        return sums[..., n * self.units : (n + 1) * self.units]

    def limited(self, sums: Any) -> Any:
        """Sums before an activation, held within what the node says."""
        return sums if self.clip is None else fr.clip(sums, -float(self.clip), float(self.clip))

    def run(self, step: Step, states: Sequence[Any], backward: bool, sums: Any) -> tuple[Any, tuple[Any, ...]]:
        """Outputs of every time, and the last states, of ``states = step(states, sums of x)``.

        Times that an example has not leave its state alone, and are answered with zeros.
        """
        graph = self.call.reader
        scanned: Any = sums
        if self.lengths is not None:
            times = fr.arange(fr.shape_of(self.x)[0])
            alive = fr.less(fr.expand_dims(times, 1), fr.expand_dims(fr.astype(self.lengths, "int64"), 0))
            scanned = (sums, fr.expand_dims(alive, -1))

        def once(held: tuple[Any, ...], now: Any) -> tuple[tuple[Any, ...], Any]:
            if self.lengths is None:
                made = step(held, now)
                return made, made[0]
            made = step(held, now[0])
            kept = tuple(fr.where(now[1], new, old) for new, old in zip(made, held, strict=True))
            return kept, fr.where(now[1], made[0], np.asarray(0, described(made[0]).dtype))

        begin = tuple(graph.tensor(state) for state in states)
        last, outputs = fr.scan(once, begin, scanned, reverse=backward)
        return outputs, last

    def answers(self, found: Sequence[tuple[Any, tuple[Any, ...]]]) -> tuple[Any, ...]:
        """Outputs and last states as ONNX has them: directions are an axis of their own."""
        outputs = fr.stack([each[0] for each in found], 1)
        states = [fr.stack(list(last)) for last in zip(*[each[1] for each in found], strict=True)]
        if not self.batched:
            return outputs, *states
        return fr.transpose(outputs, (2, 0, 1, 3)), *[fr.transpose(state, (1, 0, 2)) for state in states]


def _sum(*values: Any) -> Any:
    there = [value for value in values if value is not None]
    found = there[0]
    for value in there[1:]:
        found = fr.add(found, value)
    return found


@reads("RNN")
def rnn(call: NodeCall) -> Any:
    layer = _Recurrent(call, 1, ["Tanh"])
    found = []
    for n, backward in enumerate(layer.backward):
        w, r, b_w, b_r = layer.weights(n)
        (curve,) = layer.curves[n]

        def step(held: tuple[Any, ...], now: Any, r: Any = r, curve: Curve = curve) -> tuple[Any, ...]:
            return (curve(layer.limited(fr.add(now, fr.matmul(held[0], r)))),)

        sums = _sum(fr.matmul(layer.x, w), b_w, b_r)
        found.append(layer.run(step, [layer.start(5, n)], backward, sums))
    return layer.answers(found)


@reads("GRU")
def gru(call: NodeCall) -> Any:
    """Gates in the order z, r, h."""
    layer = _Recurrent(call, 3, ["Sigmoid", "Tanh"])
    after = bool(call.attr("linear_before_reset", 0))
    found = []
    for n, backward in enumerate(layer.backward):
        w, r, b_w, b_r = layer.weights(n)
        f, g = layer.curves[n]

        def step(held: tuple[Any, ...], now: Any, r: Any = r, b_r: Any = b_r, f: Curve = f, g: Curve = g) -> Any:
            (h,) = held
            units = layer.units
            own = _sum(fr.matmul(h, r[:, : 2 * units]), None if b_r is None else b_r[: 2 * units])
            z, reset = (f(layer.limited(fr.add(layer.gate(now, i), layer.gate(own, i)))) for i in (0, 1))
            last = None if b_r is None else b_r[2 * units :]
            if after:
                new = fr.multiply(reset, _sum(fr.matmul(h, r[:, 2 * units :]), last))
            else:
                new = _sum(fr.matmul(fr.multiply(reset, h), r[:, 2 * units :]), last)
            new = g(layer.limited(fr.add(layer.gate(now, 2), new)))
            return (fr.add(fr.multiply(fr.subtract(1.0, z), new), fr.multiply(z, h)),)

        found.append(layer.run(step, [layer.start(5, n)], backward, _sum(fr.matmul(layer.x, w), b_w)))
    return layer.answers(found)


@reads("LSTM")
def lstm(call: NodeCall) -> Any:
    """Gates in the order i, o, f, c."""
    layer = _Recurrent(call, 4, ["Sigmoid", "Tanh", "Tanh"])
    plain = layer.usual and layer.clip is None and call[4] is None and call[7] is None
    if plain and not call.attr("input_forget", 0):
        return layer.answers([_plain_lstm(layer, n, backward) for n, backward in enumerate(layer.backward)])
    return layer.answers([_any_lstm(layer, n, backward) for n, backward in enumerate(layer.backward)])


def _plain_lstm(layer: _Recurrent, n: int, backward: bool) -> tuple[Any, tuple[Any, ...]]:
    w, r, b_w, b_r = layer.weights(n)

    def ordered(weights: Any) -> Any:
        return fr.concat([layer.gate(weights, i) for i in (0, 2, 3, 1)], -1)

    size = 4 * layer.units
    bias = np.zeros(size, described(layer.x).dtype) if b_w is None else ordered(fr.add(b_w, b_r))
    x = fr.flip(layer.x, 0) if backward else layer.x
    outputs, h, c = fr.nn.lstm(x, layer.start(5, n), layer.start(6, n), ordered(w), ordered(r), bias)
    return fr.flip(outputs, 0) if backward else outputs, (h, c)


def _any_lstm(layer: _Recurrent, n: int, backward: bool) -> tuple[Any, tuple[Any, ...]]:
    call = layer.call
    w, r, b_w, b_r = layer.weights(n)
    f, g, h_curve = layer.curves[n]
    peeps = None if call[7] is None else layer._of(call[7], n)
    coupled = bool(call.attr("input_forget", 0))

    def step(held: tuple[Any, ...], now: Any) -> tuple[Any, ...]:
        h, c = held
        sums = fr.add(now, fr.matmul(h, r))
        parts = [layer.gate(sums, i) for i in range(4)]

        def opened(i: int, state: Any, peep: int) -> Any:
            seen = None if peeps is None else fr.multiply(layer.gate(peeps, peep), state)
            return f(layer.limited(_sum(parts[i], seen)))

        i = opened(0, c, 0)
        forget = fr.subtract(1.0, i) if coupled else opened(2, c, 2)
        new = fr.add(fr.multiply(forget, c), fr.multiply(i, g(layer.limited(parts[3]))))
        return fr.multiply(opened(1, new, 1), h_curve(new)), new

    sums = _sum(fr.matmul(layer.x, w), b_w, b_r)
    return layer.run(step, [layer.start(5, n), layer.start(6, n)], backward, sums)
