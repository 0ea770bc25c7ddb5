"""Replicated training: several copies of a model, one set of variables, and a policy for whose updates count."""

from flowrt.familiar import answering
from flowrt.sched.quorum import AllOf, FirstOf, Policy
from flowrt.train.replicated import Predictor, Replicated
from flowrt.train.statistics import ReplicaStatistics, Statistics
from flowrt.train.steps import StepReport

__all__ = [
    "AllOf",
    "FirstOf",
    "Policy",
    "Predictor",
    "ReplicaStatistics",
    "Replicated",
    "Statistics",
    "StepReport",
]


__getattr__ = answering("fr.train", globals())
