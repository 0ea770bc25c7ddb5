"""TensorFlow's side of perf/transport.py's steps: a server, a worker and a session over gRPC (tf.compat.v1)."""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf
from sides import processes as p
from sides.null_step.tf import free_ports, stay, tf1
from sides.transport import data as d

PS, WORKER = "/job:ps/task:0/cpu:0", "/job:worker/task:0/cpu:0"


def main() -> None:
    a = p.settings()
    ports = free_ports(2)
    addresses = {"ps": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{ports[1]}"]}
    tasks = [(addresses, job, 0, a) for job in ("ps", "worker")]
    with p.started(stay, tasks, "spawn") as pids, tf1.Graph().as_default():
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
        for pid in pids:
            os.kill(pid, 9)
        os._exit(0)


if __name__ == "__main__":
    main()
