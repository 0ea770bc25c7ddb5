"""TensorFlow's side of perf/transport.py's steps: a server, a worker and a session over gRPC (tf.compat.v1)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import tensorflow as tf
from sides import processes as p
from sides.null_step.tf import free_ports, stay, tf1
from sides.transport import data as d

PS, WORKER = "/job:ps/task:0/cpu:0", "/job:worker/task:0/cpu:0"


def model(target: str) -> Callable[[], bool]:
    """A step of the model by a session with the worker; answers whether its loss is right."""
    with tf1.device(PS):
        layers = [
            tf1.get_variable(f"layer_{i}", initializer=np.eye(d.WIDTH, dtype=np.float32), use_resource=True)
            for i in range(d.LAYERS)
        ]
    with tf1.device(WORKER):
        out = x = tf1.placeholder(tf.float32, (d.ROWS, d.WIDTH))
        for layer in layers:
            out = tf.tanh(out @ layer)
        loss = tf.reduce_mean(tf.square(out))
        train = tf1.train.GradientDescentOptimizer(d.RATE).minimize(loss)
        with tf.control_dependencies([train]):
            trained = tf.identity(loss)
    session = tf1.Session(target)
    session.run(tf1.global_variables_initializer())
    call, given = session.make_callable(trained, [x]), d.inputs()
    return lambda: d.loss_is_right(call(given))


def end(pids: list[int]) -> NoReturn:
    """End the servers, which do not by themselves, and this process."""
    for pid in pids:
        os.kill(pid, 9)
    os._exit(0)


def main() -> None:
    a = p.settings()
    ports = free_ports(2)
    addresses = {"ps": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{ports[1]}"]}
    tasks = [(addresses, job, 0, a) for job in ("ps", "worker")]
    with p.started(stay, tasks, "spawn") as pids, tf1.Graph().as_default():
        if a.workload == "model":
            step = model(f"grpc://{addresses['worker'][0]}")
            p.serve(
                lambda n: p.timed(step, n),
                {"server": pids[0], "worker 0": pids[1], "client": p.here()},
                lambda _: step(),
            )
            end(pids)
        with tf1.device(PS):
            shape = (d.floats(a.workload),)
            v = tf1.get_variable("v", shape, use_resource=True, initializer=tf1.constant_initializer(d.VALUE))
            number = tf1.placeholder(tf.float32, (), name="number")
            held = number + 1.0 if a.workload == "steps" else v.read_value()
        with tf1.device(WORKER):
            arrived = tf.identity(held)
            ends = held + 1.0 if a.workload == "steps" else tf.concat([arrived[:1], arrived[-1:]], 0)
        session = tf1.Session(f"grpc://{addresses['worker'][0]}")
        session.run(tf1.global_variables_initializer())
        if a.workload == "steps":
            call = session.make_callable(ends, [number])

            def step() -> bool:
                return bool(call(np.float32(1)) == d.VALUE)
        else:
            fetch = session.make_callable(held if a.workload.startswith("fetch") else ends)

            def step() -> bool:
                return d.right(fetch())

        roles = {"server": pids[0], "worker 0": pids[1], "client": p.here()}
        p.serve(lambda n: p.timed(step, n), roles, lambda _: step())
        end(pids)


if __name__ == "__main__":
    main()
