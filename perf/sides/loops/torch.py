"""PyTorch's side of perf/loops.py: loops are Python's, as its users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sides import harness as h
from sides.harness import Settings, Side
from sides.loops import data as d


def rotation(a: Settings) -> Side:
    torch.set_num_threads(a.threads)
    m, first = torch.tensor(d.rotation()), torch.ones(1, d.SIDE)
    h.imported()

    @torch.inference_mode()
    def step() -> Any:
        y = first
        for _ in range(d.TURNS):
            y = y @ m
        return y.numpy()

    return Side(step, work=d.TURNS)


def power(a: Settings) -> Side:
    torch.set_num_threads(a.threads)
    m, first = torch.tensor(d.symmetric()), torch.ones(d.MATRIX)
    h.imported()

    @torch.inference_mode()
    def step() -> Any:
        v = first
        for _ in range(d.POWER_TURNS):
            w = m @ v
            v = w / torch.sqrt(torch.sum(w * w))
        return float(torch.sum(torch.abs(v)))

    return Side(step, work=d.POWER_TURNS)


def _trained(loss: Callable[..., Any], values: tuple[np.ndarray, ...], gradient: bool, work: int) -> Side:
    x, w, u = (torch.tensor(v) for v in values)
    h.imported()

    def step() -> float:
        if not gradient:
            with torch.inference_mode():
                return float(loss(x, w, u))
        w.requires_grad_(True), u.requires_grad_(True)
        w.grad = u.grad = None
        total = loss(x, w, u)
        total.backward()
        return float(total.detach())

    return Side(step, work=work)


def _lstm(size: d.Cell, gradient: bool) -> Callable[[Settings], Side]:
    def loss(x: Any, w: Any, u: Any) -> Any:
        hidden = c = torch.zeros(size.batch, size.units)
        outputs = []
        for row in x:
            i, f, g, o = (row @ w + hidden @ u).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            hidden = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(hidden)
        return torch.stack(outputs).sum()

    def side(a: Settings) -> Side:
        torch.set_num_threads(a.threads)
        return _trained(loss, d.cell(size, 4), gradient, size.steps)

    return side


def _gru(size: d.Cell, gradient: bool) -> Callable[[Settings], Side]:
    def loss(x: Any, w: Any, u: Any) -> Any:
        hidden = torch.zeros(size.batch, size.units)
        outputs = []
        for row in x:
            z, r, n = (row @ w).chunk(3, 1)
            hz, hr, hn = (hidden @ u).chunk(3, 1)
            update = torch.sigmoid(z + hz)
            fresh = torch.tanh(n + torch.sigmoid(r + hr) * hn)
            hidden = (1 - update) * fresh + update * hidden
            outputs.append(hidden)
        return torch.stack(outputs).sum()

    def side(a: Settings) -> Side:
        torch.set_num_threads(a.threads)
        return _trained(loss, d.cell(size, 3), gradient, size.steps)

    return side


def decoder(a: Settings) -> Side:
    torch.set_num_threads(a.threads)
    first, qkv, out, up, down = (torch.tensor(v) for v in d.decoder())
    h.imported()

    @torch.inference_mode()
    def step() -> Any:
        row, cache = first, torch.zeros(d.LAYERS, 2, d.BATCH, d.TOKENS, d.MODEL)
        for t in range(d.TOKENS):
            for layer in range(d.LAYERS):
                q, k, v = (row @ qkv[layer]).chunk(3, 1)
                cache[layer, 0, :, t], cache[layer, 1, :, t] = k, v
                keys, values = cache[layer, :, :, : t + 1]
                seen = torch.nn.functional.scaled_dot_product_attention(q[:, None], keys, values)
                row = row + seen[:, 0] @ out[layer]
                row = row + torch.tanh(row @ up[layer]) @ down[layer]
            row = torch.tanh(row)
        return float(row.sum())

    return Side(step, work=d.TOKENS)


WORKLOADS: dict[str, Callable[[Settings], Side]] = {
    "rotation": rotation, "power": power, "decoder": decoder,
    "lstm": _lstm(d.CELL, False), "lstm-back": _lstm(d.CELL, True), "large": _lstm(d.LARGE, False),
    "large-back": _lstm(d.LARGE, True), "gru": _gru(d.GRU, False), "gru-back": _gru(d.GRU, True),
}  # fmt: skip

if __name__ == "__main__":
    h.main(WORKLOADS)
