"""PyTorch's side of perf/convolutions.py: images channels last, or as PyTorch lays them out by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sides import harness as h
from sides.convolutions import data as d
from sides.harness import Settings, Side


def _convolution(layer: d.Layer, direction: str) -> Callable[[Settings], Side]:
    def side(a: Settings) -> Side:
        torch.set_num_threads(a.threads)
        x, filters, dy = (torch.tensor(v) for v in d.arrays(layer))
        layout = torch.channels_last if a.variant == "nhwc" else torch.contiguous_format
        x, dy = (v.permute(0, 3, 1, 2).contiguous(memory_format=layout) for v in (x, dy))
        filters = filters.permute(3, 2, 0, 1).contiguous(memory_format=layout)
        h.imported()
        how = [layer.stride] * 2, [layer.padding] * 2, [layer.dilation] * 2, False, [0, 0], layer.groups
        wanted = [direction == "images", direction == "filters", False]

        @torch.inference_mode()
        def step() -> Any:
            if direction == "forward":
                return torch.ops.aten.convolution(x, filters, None, *how).numpy()
            gradients = torch.ops.aten.convolution_backward(dy, x, filters, None, *how, wanted)
            return gradients[wanted.index(True)].numpy()

        return Side(step, work=layer.flops)

    return side


WORKLOADS = {name: _convolution(layer, direction) for name, layer, direction in d.named()}

if __name__ == "__main__":
    h.main(WORKLOADS)
