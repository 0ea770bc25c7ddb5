"""Examples of the ops of replicated training; what they do is judged in `test_replicated`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from example import Example, normal

from flowrt.ops import replica
from flowrt.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUP = {"group": "trainer", "container": ""}
SHARD = {**GROUP, "server": 0}
TURN = np.array([7, 0])
VERDICT = Spec("int64", ())
SOME = Spec("int64", (None,))
PARTS = {"dtypes": ("float32", "float32"), "shapes": ((2,), ())}

REPLICA: Sequence[Example] = [
    Example(
        "start_group",
        lambda t: replica.start_group(t, **SHARD, replicas=4, servers=1, policy=("first", 3)),
        (TURN,),
        specs=(),
    ),
    Example("begin_update", lambda t: replica.begin_update(t, **GROUP, replica=1), (TURN,), specs=(Spec("bool"),)),
    Example(
        "delay",
        lambda *v: replica.delay(v),
        (normal(2), normal(3)),
        specs=(Spec("float32", (2,)), Spec("float32", (3,))),
    ),
    Example(
        "hold_update",
        lambda t, *v: replica.hold_update(t, v, **SHARD, replica=1),
        (TURN, normal(2), normal()),
        specs=(VERDICT,),
    ),
    Example(
        "offer_update",
        lambda t, *v: replica.offer_update(t, v, **GROUP, replica=1),
        (TURN, np.int64(0), np.int64(0)),
        specs=(VERDICT,),
    ),
    Example("await_quorum", lambda t: replica.await_quorum(t, **GROUP), (TURN,), specs=(SOME,)),
    Example(
        "take_updates",
        lambda t, r: replica.take_updates(t, r, **SHARD, **PARTS),
        (TURN, np.array([0, 2])),
        specs=(Spec("float32", (2,)), Spec("float32", ())),
    ),
    Example("publish_shard", lambda t: replica.publish_shard(t, **SHARD), (TURN,), specs=(VERDICT,)),
    Example(
        "publish_version",
        lambda t, *v: replica.publish_version(t, v, **GROUP),
        (TURN, np.int64(1), np.int64(1)),
        specs=(SOME, SOME),
    ),
    Example("lose_replicas", lambda t, r: replica.lose_replicas(t, r, **GROUP), (TURN, np.array([3])), specs=()),
]
