"""TensorFlow's side of perf/building.py: a graph and a session, as before eager execution."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from sides.building import clock as clock

v1 = tf.compat.v1


def chain(size: int) -> clock.Built:
    with tf.Graph().as_default() as graph:
        x = y = v1.placeholder(tf.float32, (16,))
        a, b = (v1.Variable(np.full(16, value, np.float32), use_resource=True) for value in (1.1, 0.1))
        for _ in range(size // 3):
            y = tf.tanh(y * a + b)
        start = v1.global_variables_initializer()
    return lambda: ready(graph, start, y, x, np.zeros(16, np.float32))


def variables(size: int) -> clock.Built:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, (4,))
        made = [v1.Variable(np.zeros(4, np.float32), use_resource=True) for _ in range(size)]
        loss = tf.add_n([tf.reduce_sum(tf.square(v - x)) for v in made])
        train = v1.train.AdamOptimizer(clock.RATE).minimize(loss)
        start = v1.global_variables_initializer()
    return lambda: ready(graph, start, [loss, train], x, np.ones(4, np.float32))


def ready(graph: Any, start: Any, fetches: Any, feed: Any, value: Any) -> Any:
    session = v1.Session(graph=graph)
    session.run(start)
    step = session.make_callable(fetches, [feed])
    return lambda: step(value)


if __name__ == "__main__":
    clock.measure({"chain": chain, "variables": variables})
