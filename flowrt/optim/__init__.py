"""Optimisers, built of nothing but variables and primitive maths.

Law: an optimiser is a recipe; it holds its settings and no state. What must be remembered between steps (a momentum) is
a variable beside the one it belongs to, so it is placed, checkpointed and restored like any other.
"""

from typing import TYPE_CHECKING

from flowrt.base.familiar import answering
from flowrt.optim.clipping import clip_by_global_norm
from flowrt.optim.descent import SGD, AdaGrad, Adam, AdamW, Momentum, RMSProp
from flowrt.optim.optimizer import Optimizer
from flowrt.optim.quasi_newton import LBFGS

__all__ = ["LBFGS", "SGD", "AdaGrad", "Adam", "AdamW", "Momentum", "Optimizer", "RMSProp", "clip_by_global_norm"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = answering("fr.optim", globals())
