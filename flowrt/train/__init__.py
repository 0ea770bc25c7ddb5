"""Replicated training: several copies of a model, one set of variables, and a policy for whose updates count."""

from typing import TYPE_CHECKING

from flowrt.base.familiar import answering
from flowrt.sched.policies import (
    Adaptive,
    AllOf,
    Async,
    BoundedStaleness,
    Close,
    Deadline,
    FirstOf,
    LocalSteps,
    Offer,
    Policy,
    Record,
    WaitUntil,
)
from flowrt.train.diagnosis import Slow
from flowrt.train.going_back import RolledBack
from flowrt.train.replicated import Predictor, Replicated
from flowrt.train.reports import StepReport
from flowrt.train.statistics import ReplicaStatistics, Statistics
from flowrt.train.times import Times

__all__ = [
    "Adaptive",
    "AllOf",
    "Async",
    "BoundedStaleness",
    "Close",
    "Deadline",
    "FirstOf",
    "LocalSteps",
    "Offer",
    "Policy",
    "Predictor",
    "Record",
    "ReplicaStatistics",
    "Replicated",
    "RolledBack",
    "Slow",
    "Statistics",
    "StepReport",
    "Times",
    "WaitUntil",
]


if not TYPE_CHECKING:
    __getattr__, __dir__ = answering("fr.train", globals())
