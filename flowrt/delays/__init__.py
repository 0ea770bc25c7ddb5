"""Injected slowness, for experiments with stragglers: what slows whom, where and when.

    fr.LocalCluster(ps=1, worker=4, delays={"/job:worker/task:3": fr.delays.Exponential(0.2)})
    fr.LocalCluster(ps=1, worker=4, delays={"/job:ps/task:0": "0.05 at server during 100:200"})
    fr.simulate(fr.train.FirstOf(90), 0.8 + fr.delays.Exponential(0.2), replicas=100, steps=1000)

Delays are frozen values, add up, and have a text form: ``parse(str(delay)) == delay``. See `delay.Delay` for where they
strike, `text` for the text, `parquet` for recorded ones.
"""

from flowrt.delays.delay import Delay
from flowrt.delays.distributions import (
    Constant,
    Correlated,
    Exponential,
    Link,
    LogNormal,
    Pareto,
    Pauses,
    ShiftedExponential,
    Uniform,
)
from flowrt.delays.parquet import save
from flowrt.delays.text import parse
from flowrt.delays.trace import Trace

__all__ = [
    "Constant",
    "Correlated",
    "Delay",
    "Exponential",
    "Link",
    "LogNormal",
    "Pareto",
    "Pauses",
    "ShiftedExponential",
    "Trace",
    "Uniform",
    "parse",
    "save",
]
