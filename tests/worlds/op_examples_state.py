"""The examples of the families state, queues, rows and flow; see `op_examples`."""

from __future__ import annotations

import numpy as np
from example import Example, integers, normal

import flowrt.ops as fr
from flowrt.base.spec import Spec
from flowrt.ops import flow, queues, rows, state

HELD = {"resource": "v", "container": "", "dtype": "float32", "shape": (2,)}
TABLE = {**HELD, "shape": (9, 3)}
SETTINGS = np.zeros(8, np.float32)
MOVED = (normal(4, 3), np.zeros(14, np.int32))
QUEUE = {"resource": "q", "container": "", "capacity": 3, "dtypes": ("float32", "int32"), "shapes": ((2,), ())}
QUEUE |= {"order": ("fifo",)}
ELEMENT = (Spec("float32", (2,)), Spec("int32", ()))
MANY = (Spec("float32", (4, 2)), Spec("int32", (4,)))
PAIR = (normal(2), np.int32(1))
PAIRS_OF_FOUR = (normal(4, 2), integers(4))

STATE = [
    Example("read_variable", lambda: state.read_variable(**HELD), specs=(Spec("float32", (2,)),)),
    Example("assign", lambda v: state.assign(v, **HELD), (normal(2),), specs=()),
    Example("assign_add", lambda v: state.assign_add(v, **HELD), (normal(2),), specs=()),
    Example("assign_sub", lambda v: state.assign_sub(v, **HELD), (normal(2),), specs=()),
    *[
        Example(op, lambda v, g, op=op, more=more: getattr(rows, op)(v, g, SETTINGS, **TABLE, **more), MOVED, specs=())
        for op, more in [
            ("add_rows", {}),
            ("assign_rows", {}),
            ("momentum_rows", {"slots": ("a",)}),
            ("adagrad_rows", {"slots": ("a",)}),
            ("rmsprop_rows", {"slots": ("a", "b")}),
            ("adam_rows", {"slots": ("a", "b")}),
        ]
    ],
    Example("enqueue", lambda *v: queues.enqueue(v, **QUEUE), PAIR, specs=()),
    Example("enqueue_many", lambda *v: queues.enqueue_many(v, **QUEUE), PAIRS_OF_FOUR, specs=()),
    Example("dequeue", lambda: queues.dequeue(**QUEUE), specs=ELEMENT),
    Example("dequeue_many", lambda: queues.dequeue_many(4, **QUEUE), specs=MANY),
    Example(
        "dequeue_up_to",
        lambda: queues.dequeue_up_to(4, **QUEUE),
        specs=tuple(s.with_shape((None, *s.shape[1:])) for s in MANY),
    ),
    Example("queue_size", lambda: queues.queue_size(**QUEUE), specs=(Spec("int64", ()),)),
    Example("queue_close", lambda: queues.queue_close(**QUEUE, cancel_pending_enqueues=True), specs=()),
]

FLOW = [
    Example("identity", fr.identity, (normal(2, 3),), lambda x: x),
    Example("stop_gradient", fr.stop_gradient, (integers(3),), lambda x: x),
    Example("no_op", lambda: fr.no_op(), specs=()),
    Example("no_op", lambda x: fr.group(x), (normal(2),), specs=(), note="group"),
    Example("switch", fr.switch, (normal(2), np.array(True)), specs=(Spec("float32", (2,)), Spec("float32", (2,)))),
    Example(
        "merge", lambda *v: fr.merge(v), (normal(2, 3), normal(4, 3)), specs=(Spec("float32", (None, 3)), Spec("int64"))
    ),
    Example("bring", flow.bring, (normal(2),), specs=(Spec("float32", (2,)),)),
    Example("send", lambda x: flow.send(x, edge=3, peer="/job:ps/task:0"), (normal(2),), specs=()),
    Example("recv", lambda: flow.recv(edge=3, peer="x", dtype="int8", shape=(2,)), specs=(Spec("int8", (2,)),)),
]
