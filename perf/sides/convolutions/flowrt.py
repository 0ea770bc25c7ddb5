"""flowrt's side of perf/convolutions.py."""

from __future__ import annotations

import atexit
from collections.abc import Callable

from sides import harness as h
from sides.convolutions import data as d
from sides.harness import Settings, Side

import flowrt as fr


def _convolution(layer: d.Layer, direction: str) -> Callable[[Settings], Side]:
    def side(a: Settings) -> Side:
        values = d.arrays(layer)
        h.imported()
        with fr.Graph() as graph:
            x, filters, dy = (fr.placeholder(v.dtype, v.shape) for v in values)
            beside = layer.padding, layer.padding
            y = fr.nn.conv2d(x, filters, layer.stride, (beside, beside), layer.dilation, layer.groups)
            source = {"images": x, "filters": filters}.get(direction)
            fetch = y if source is None else fr.gradients(y, source, dy)[0]
        session = fr.BlockingSession(graph, options=fr.Options(threads=a.threads)).__enter__()
        atexit.register(session.__exit__, None, None, None)
        step = session.compile(fetch, [x, filters, dy])
        return Side(lambda: step(*values), work=layer.flops)

    return side


WORKLOADS = {name: _convolution(layer, direction) for name, layer, direction in d.named()}

if __name__ == "__main__":
    h.main(WORKLOADS)
