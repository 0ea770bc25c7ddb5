"""Policies: which updates of replicas make the next version of the variables, and when. See `policies.policy`.

Law: pure; a policy is asked with the time, and answers. It knows no other room.
"""

from flowrt.sched.policies.adaptive import Adaptive
from flowrt.sched.policies.all_of import AllOf
from flowrt.sched.policies.asking import fewest, fixed_size, together
from flowrt.sched.policies.asynchronous import Async
from flowrt.sched.policies.bounded_staleness import BoundedStaleness
from flowrt.sched.policies.deadline import Deadline
from flowrt.sched.policies.first_of import FirstOf
from flowrt.sched.policies.local_steps import LocalSteps
from flowrt.sched.policies.policy import Close, Offer, Policy, Record, WaitUntil
from flowrt.sched.policies.recorded import recorded
from flowrt.sched.policies.travel import policy_from_data, policy_to_data

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
    "Record",
    "WaitUntil",
    "fewest",
    "fixed_size",
    "policy_from_data",
    "policy_to_data",
    "recorded",
    "together",
]
