"""PyTorch's side: eager, channels-last where that is faster, fused optimisers, and torch.compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from sides import harness as h
from sides.harness import Settings, Side


def _torch(a: Settings) -> Any:
    import torch

    torch.set_num_threads(a.threads)
    torch.backends.cudnn.allow_tf32 = False  # products of float32 are of float32, as matmul's are by default
    return torch


def _placed(a: Settings, what: Any) -> Any:
    """A tensor, or a module, where the step is to be."""
    return what.to(a.device) if a.device else what


def overhead(a: Settings) -> Side:
    torch = _torch(a)
    h.imported()

    def f(x: Any) -> Any:
        return x * 2.0 + 1.0

    f = torch.compile(f) if a.variant == "compile" else f

    def step() -> Any:
        with torch.inference_mode():
            return f(_placed(a, torch.from_numpy(h.VECTOR))).cpu().numpy()

    return Side(step)


def loop(a: Settings) -> Side:
    torch = _torch(a)
    h.imported()

    def step() -> int:
        i = s = torch.tensor(0)
        with torch.inference_mode():
            while i < h.ITERATIONS:
                i, s = i + 1, s + i
        return int(s)

    return Side(step, work=h.ITERATIONS)


def _trained(
    a: Settings,
    parameters: Any,
    rate: float,
    loss_of: Callable[..., Any],
    batch: Callable[[], tuple[Any, ...]],
    optimizer: Any = None,
) -> Side:
    """Steps of ``optimizer``, by default SGD with momentum."""
    torch = _torch(a)
    for parameter in parameters:
        parameter.data = _placed(a, parameter.data)
    optimizer = optimizer or torch.optim.SGD(parameters, lr=rate, momentum=h.MOMENTUM, fused=True)
    loss_of = torch.compile(loss_of) if "compile" in a.variant else loss_of

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(*(_placed(a, part) for part in batch()))
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return Side(step)


def mlp(a: Settings) -> Side:
    torch = _torch(a)
    functional = torch.nn.functional
    (x, y), values = h.mlp_batch(a.batch), h.mlp()
    h.imported()
    # weights as nn.Linear holds them: (out, in)
    p = [torch.nn.Parameter(torch.from_numpy(v.T.copy() if v.ndim == 2 else v)) for v in values]

    def loss_of(x: Any, y: Any) -> Any:
        z = functional.relu(functional.linear(x, p[0], p[1]))
        z = functional.relu(functional.linear(z, p[2], p[3]))
        return functional.cross_entropy(functional.linear(z, p[4], p[5]), y)

    return _trained(a, p, h.MLP_RATE, loss_of, lambda: (torch.from_numpy(x), torch.from_numpy(y).long()))


def cnn(a: Settings) -> Side:
    torch = _torch(a)
    functional = torch.nn.functional
    (x, y), values = h.cnn_batch("NCHW" if "nchw" in a.variant else "NHWC"), h.cnn("NCHW")
    h.imported()
    p = []
    for v in values:
        t = torch.from_numpy(v.T.copy() if v.ndim == 2 else v)
        last = t.ndim == 4 and "nhwc" in a.variant
        p.append(torch.nn.Parameter(t.contiguous(memory_format=torch.channels_last) if last else t))

    def batch() -> tuple[Any, Any]:
        images = torch.from_numpy(x)
        return (images if "nchw" in a.variant else images.permute(0, 3, 1, 2)), torch.from_numpy(y).long()

    def loss_of(x: Any, y: Any) -> Any:
        k1, b1, k2, b2, w3, b3, w4, b4 = p
        z = functional.max_pool2d(functional.relu(functional.conv2d(x, k1, b1, padding=1)), 2)
        z = functional.max_pool2d(functional.relu(functional.conv2d(z, k2, b2, padding=1)), 2)
        z = functional.relu(functional.linear(z.flatten(1), w3, b3))
        return functional.cross_entropy(functional.linear(z, w4, b4), y)

    return _trained(a, p, h.CNN_RATE, loss_of, batch)


def lstm(a: Settings) -> Side:
    torch = _torch(a)
    functional = torch.nn.functional
    (x, y), (wx, wh, b, wo, bo) = h.lstm_batch(), h.lstm()
    h.imported()
    linear = torch.nn.Linear(h.LSTM_UNITS, h.LSTM_CLASSES)
    linear.weight.data.copy_(torch.from_numpy(wo.T.copy()))
    linear.bias.data.copy_(torch.from_numpy(bo))
    cell = torch.nn.LSTM(h.LSTM_IN, h.LSTM_UNITS)  # gates in the order i, f, g, o
    cell.weight_ih_l0.data.copy_(torch.from_numpy(wx.T.copy()))
    cell.weight_hh_l0.data.copy_(torch.from_numpy(wh.T.copy()))
    cell.bias_ih_l0.data.copy_(torch.from_numpy(b))
    cell.bias_hh_l0.data.zero_()
    cell.bias_hh_l0.requires_grad_(False)  # one bias, as everywhere else
    _placed(a, cell), _placed(a, linear)
    p = [q for q in (*cell.parameters(), *linear.parameters()) if q.requires_grad]

    def loss_of(x: Any, y: Any) -> Any:
        return functional.cross_entropy(linear(cell(x)[0]).flatten(0, 1), y.flatten())

    return _trained(a, p, h.LSTM_RATE, loss_of, lambda: (torch.from_numpy(x), torch.from_numpy(y).long()))


def embedding(a: Settings) -> Side:
    torch = _torch(a)
    functional = torch.nn.functional
    batches, (table, w, b) = itertools.cycle(h.embedding_batches()), h.embeddings()
    h.imported()
    bag = torch.nn.EmbeddingBag.from_pretrained(torch.from_numpy(table), freeze=False, mode="mean", sparse=True)
    linear = torch.nn.Linear(h.WIDTH, 1)
    linear.weight.data.copy_(torch.from_numpy(w.T.copy()))
    linear.bias.data.copy_(torch.from_numpy(b))
    _placed(a, bag), _placed(a, linear)
    how = {"lr": h.EMBEDDING_RATE, "initial_accumulator_value": h.ACCUMULATOR, "eps": h.EPSILON}
    optimizers = [
        torch.optim.Adagrad(bag.parameters(), **how),
        torch.optim.Adagrad(linear.parameters(), **how, fused=True),
    ]

    def step() -> float:
        ids, y = next(batches)
        for o in optimizers:
            o.zero_grad()
        z = linear(bag(_placed(a, torch.from_numpy(ids))))
        loss = functional.binary_cross_entropy_with_logits(z, _placed(a, torch.from_numpy(y)))
        loss.backward()
        for o in optimizers:
            o.step()
        return float(loss.item())

    return Side(step)


def normed(a: Settings) -> Side:
    torch = _torch(a)
    functional = torch.nn.functional
    (x, y), values = h.normed_batch(), h.normed()
    h.imported()
    p = [torch.nn.Parameter(torch.from_numpy(v.T.copy() if v.ndim == 2 else v)) for v in values]

    def loss_of(z: Any, y: Any) -> Any:
        *hidden, w, b = p
        for v, c, scale, offset in zip(*[iter(hidden)] * 4, strict=True):
            z = functional.linear(z, v, c)
            z = functional.gelu(functional.layer_norm(z, z.shape[1:], scale, offset))
        return functional.cross_entropy(functional.linear(z, w, b), y)

    adam = torch.optim.Adam(p, lr=h.ADAM_RATE, betas=(h.BETA1, h.BETA2), eps=h.ADAM_EPSILON, fused=True)
    return _trained(a, p, 0, loss_of, lambda: (torch.from_numpy(x), torch.from_numpy(y).long()), adam)


def residual(a: Settings) -> Side:
    torch = _torch(a)
    functional = torch.nn.functional
    (x, y), values = h.residual_batch(), h.residual()
    h.imported()

    def parameter(v: np.ndarray) -> Any:
        if v.ndim == 4:
            filters = torch.from_numpy(v.transpose(3, 2, 0, 1).copy())
            return torch.nn.Parameter(filters.contiguous(memory_format=torch.channels_last))
        return torch.nn.Parameter(torch.from_numpy(v.T.copy()))

    p = [parameter(v) for v in values]

    def layer(x: Any, which: int, strides: int = 1) -> Any:
        k, scale, offset = p[3 * which : 3 * which + 3]
        if strides == 2 and k.shape[2] == 3:
            z = functional.conv2d(functional.pad(x, (0, 1, 0, 1)), k, stride=2)  # what SAME means for even sizes
        else:
            z = functional.conv2d(x, k, stride=strides, padding=k.shape[2] // 2)
        return functional.batch_norm(z, None, None, scale, offset, training=True)

    def loss_of(x: Any, y: Any) -> Any:
        z = functional.relu(layer(x, 0))
        z = functional.relu(layer(functional.relu(layer(z, 1, 2)), 2) + layer(z, 3, 2))
        return functional.cross_entropy(functional.linear(z.mean((2, 3)), p[12], p[13]), y)

    return _trained(
        a, p, h.RESIDUAL_RATE, loss_of, lambda: (torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(y).long())
    )


def gru(a: Settings) -> Side:
    torch = _torch(a)
    functional = torch.nn.functional
    (x, y), (w_x, w_h, b_x, b_h, w_out, b_out) = h.lstm_batch(), h.gru()
    h.imported()
    linear = torch.nn.Linear(h.LSTM_UNITS, h.LSTM_CLASSES)
    cell = torch.nn.GRU(h.LSTM_IN, h.LSTM_UNITS)  # gates in the order r, z, n
    for place, v in (
        (cell.weight_ih_l0, w_x.T),
        (cell.weight_hh_l0, w_h.T),
        (cell.bias_ih_l0, b_x),
        (cell.bias_hh_l0, b_h),
        (linear.weight, w_out.T),
        (linear.bias, b_out),
    ):
        place.data.copy_(torch.from_numpy(v.copy()))

    def loss_of(x: Any, y: Any) -> Any:
        return functional.cross_entropy(linear(cell(x)[0]).flatten(0, 1), y.flatten())

    p = [*cell.parameters(), *linear.parameters()]
    return _trained(a, p, h.GRU_RATE, loss_of, lambda: (torch.from_numpy(x), torch.from_numpy(y).long()))


def power(a: Settings) -> Side:
    torch = _torch(a)
    matrix, first = h.power()
    h.imported()

    def step() -> float:
        with torch.inference_mode():
            m, v = torch.from_numpy(matrix), torch.from_numpy(first)
            for _ in range(h.POWER_TURNS):
                w = m @ v
                norm = torch.sqrt(torch.sum(w * w))
                v = w / norm
            return float(norm)

    return Side(step)


def bodies(a: Settings) -> Side:
    torch = _torch(a)
    given = h.points()
    h.imported()

    def turn(x: Any, v: Any, m: Any) -> Any:
        d = x[None] - x[:, None]
        squares = (d * d).sum(-1) + h.SOFTENING
        pull = m * squares.rsqrt() / squares
        v = v + (d * pull[..., None]).sum(1) * h.POINT_TIME
        return x + v * h.POINT_TIME, v

    turn = torch.compile(turn) if a.variant == "compile" else turn

    def step() -> float:
        with torch.inference_mode():
            x, v, m = (torch.from_numpy(g) for g in given)
            for _ in range(h.POINT_TURNS):
                x, v = turn(x, v, m)
            return float((m[:, None] * v * v).sum())

    return Side(step)


def heat(a: Settings) -> Side:
    torch = _torch(a)
    first = h.grid()
    h.imported()

    def turn(u: Any) -> Any:
        around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4.0 * u[1:-1, 1:-1]
        return u + h.GRID_RATE * torch.nn.functional.pad(around, (1, 1, 1, 1))

    turn = torch.compile(turn) if a.variant == "compile" else turn

    def step() -> float:
        with torch.inference_mode():
            u = torch.from_numpy(first)
            for _ in range(h.GRID_TURNS):
                u = turn(u)
            return float((u * u).sum())

    return Side(step)


def columns(a: Settings) -> Side:
    torch = _torch(a)
    x, weights = (torch.from_numpy(g) for g in h.columns())
    h.imported()

    def weighted(x: Any, weights: Any) -> Any:
        return torch.softmax(x, 0) * weights

    weighted = torch.compile(weighted) if a.variant == "compile" else weighted

    def step() -> Any:
        with torch.inference_mode():
            return weighted(x, weights).numpy()

    return Side(step)


def pooled(a: Settings) -> Side:
    """Channels last, as the arrays lie."""
    torch = _torch(a)
    x, slopes = (torch.from_numpy(g).permute(0, 3, 1, 2) for g in h.pooled())
    h.imported()

    def step() -> Any:
        given = x.detach().requires_grad_()
        largest = torch.nn.functional.max_pool2d(given, 2)
        (largest * largest * slopes).sum().backward()
        return given.grad.permute(0, 2, 3, 1).numpy()

    return Side(step)


def many_rows(a: Settings) -> Side:
    torch = _torch(a)
    functional = torch.nn.functional
    batches, (table, w, b) = itertools.cycle(h.many_batches()), h.many_rows()
    h.imported()
    bag = torch.nn.EmbeddingBag.from_pretrained(torch.from_numpy(table), freeze=False, mode="sum", sparse=True)
    linear = torch.nn.Linear(h.MANY_WIDTH, 1)
    linear.weight.data.copy_(torch.from_numpy(w.T.copy()))
    linear.bias.data.copy_(torch.from_numpy(b))
    how = {"lr": h.ADAM_RATE, "betas": (h.BETA1, h.BETA2), "eps": h.ADAM_EPSILON}
    optimizers = [
        torch.optim.SparseAdam(list(bag.parameters()), **how),
        torch.optim.Adam(linear.parameters(), **how, fused=True),
    ]

    def step() -> float:
        ids, y = next(batches)
        for o in optimizers:
            o.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(linear(bag(torch.from_numpy(ids))), torch.from_numpy(y))
        loss.backward()
        for o in optimizers:
            o.step()
        return float(loss.item())

    return Side(step)


def gpt(a: Settings) -> Side:
    torch = _torch(a)
    functional = torch.nn.functional
    (words, following), values = h.gpt_batch(), h.gpt()
    heads, width = h.GPT_HEADS, h.GPT_WIDTH
    h.imported()
    p = [torch.nn.Parameter(torch.from_numpy(v)) for v in values]

    def attend(z: Any, w_qkv: Any, w_out: Any) -> Any:
        parted = (z @ w_qkv).unflatten(2, (3, heads, width // heads))
        q, k, v = (parted[:, :, i].transpose(1, 2) for i in range(3))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2) @ w_out

    def loss_of(words: Any, following: Any) -> Any:
        table, places, *layers, scale, offset, w = p
        z = functional.embedding(words, table) + places
        for s1, o1, w_qkv, w_out, s2, o2, w_up, w_down in zip(*[iter(layers)] * 8, strict=True):
            z = z + attend(functional.layer_norm(z, (width,), s1, o1), w_qkv, w_out)
            z = z + functional.gelu(functional.layer_norm(z, (width,), s2, o2) @ w_up) @ w_down
        logits = functional.layer_norm(z, (width,), scale, offset) @ w
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten())

    for q in p:
        q.data = _placed(a, q.data)
    adam = torch.optim.Adam(p, lr=h.ADAM_RATE, betas=(h.BETA1, h.BETA2), eps=h.ADAM_EPSILON, fused=True)
    batch = torch.from_numpy(words), torch.from_numpy(following).long()
    return _trained(a, p, 0, loss_of, lambda: batch, adam)


def dispatch(a: Settings) -> Side:
    """Eager adds in a Python loop: PyTorch has no graph to dispatch."""
    torch = _torch(a)
    h.imported()
    x = torch.tensor(1.0)

    def chain(x: Any, length: int) -> Any:
        for _ in range(length):
            x = x + 1.0
        return x

    def run() -> float:
        if a.shape == "chain":
            return float(chain(x, h.NODES))
        if a.shape == "parallel":
            return float(np.sum([float(chain(x, h.NODES // h.CHAINS)) for _ in range(h.CHAINS)]))
        source = x + 1.0
        return float(torch.stack([source + 1.0 for _ in range(h.NODES - 2)]).sum())

    def step() -> float:
        with torch.inference_mode():
            return run()

    return Side(step, work=h.NODES)


if __name__ == "__main__":
    h.main(h.named(globals()))
