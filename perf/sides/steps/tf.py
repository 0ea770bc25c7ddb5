"""TensorFlow's side: graph sessions (make_callable), functions, and functions compiled by XLA."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from sides import harness as h
from sides.harness import Settings, Side


def _config(tf: Any, a: Settings, *, optimize: bool = True) -> Any:
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=a.threads, inter_op_parallelism_threads=a.threads)
    if not optimize:
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        config.graph_options.optimizer_options.opt_level = -1
    if a.variant == "single_threaded":
        config.experimental.executor_type = "SINGLE_THREADED_EXECUTOR"
    if a.variant == "callable_nothreads":
        config.inter_op_parallelism_threads = -1  # the executor runs in the caller's thread
    return config


def _limit(tf: Any, a: Settings) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(a.threads)
    tf.config.threading.set_inter_op_parallelism_threads(a.threads)


def dispatch(a: Settings) -> Side:
    import tensorflow as tf

    h.imported()
    reads = h.edges(a.shape)
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        x, one = v1.placeholder(tf.float32, []), tf.constant(1.0)
        out: list[Any] = []
        for those in reads:
            sources = [out[j] for j in those] or [x]
            many = len(sources) > 1
            out.append(tf.raw_ops.AddN(inputs=sources) if many else tf.raw_ops.AddV2(x=sources[0], y=one))
        ends = [out[j] for j in h.sinks(reads)]
        target = ends[0] if len(ends) == 1 else tf.add_n(ends)
        session = v1.Session(config=_config(tf, a, optimize=False))
        call = session.make_callable(target, feed_list=[x])
    fed = np.float32(1.0)
    return Side(lambda: call(fed), work=h.NODES, notes="grappler off")


def overhead(a: Settings) -> Side:
    import tensorflow as tf

    h.imported()
    if a.variant.startswith("callable"):
        v1 = tf.compat.v1
        with tf.Graph().as_default():
            p = v1.placeholder(tf.float32, [8])
            call = v1.Session(config=_config(tf, a)).make_callable(p * 2.0 + 1.0, feed_list=[p])
        return Side(lambda: call(h.VECTOR))
    _limit(tf, a)
    signature = [tf.TensorSpec([8], tf.float32)]
    f = tf.function(lambda x: x * 2.0 + 1.0, jit_compile=a.variant == "xla", input_signature=signature)
    concrete = f.get_concrete_function()
    return Side(lambda: concrete(tf.constant(h.VECTOR)).numpy())


def loop(a: Settings) -> Side:
    import tensorflow as tf

    h.imported()
    v1, fed = tf.compat.v1, np.int32(h.ITERATIONS)
    if a.variant == "xla":
        _limit(tf, a)

        @tf.function(jit_compile=True, autograph=False)
        def f(n: Any) -> Any:
            return tf.while_loop(lambda i, s: i < n, lambda i, s: (i + 1, s + i), (0, 0))[1]

        n = tf.constant(fed)
        return Side(lambda: int(f(n)), work=h.ITERATIONS)
    (v1.enable_control_flow_v2 if a.variant == "v2" else v1.disable_control_flow_v2)()
    with tf.Graph().as_default():
        n = v1.placeholder(tf.int32, [])
        out = v1.while_loop(lambda i, s: i < n, lambda i, s: (i + 1, s + i), (0, 0))[1]
        call = v1.Session(config=_config(tf, a)).make_callable(out, feed_list=[n])
    return Side(lambda: int(call(fed)), work=h.ITERATIONS)


def _trained(
    a: Settings, loss_of: Callable[..., Any], values: list[np.ndarray], rate: float, batch: tuple[np.ndarray, ...]
) -> Side:
    """Momentum on one batch: a graph session's callable, or a function."""
    import tensorflow as tf

    if a.variant.startswith("callable"):
        v1 = tf.compat.v1
        (v1.enable_control_flow_v2 if a.variant == "callable_v2" else v1.disable_control_flow_v2)()
        with tf.Graph().as_default():
            feeds = [v1.placeholder(tf.as_dtype(b.dtype), b.shape) for b in batch]
            p = [v1.get_variable(f"p{i}", initializer=v, use_resource=True) for i, v in enumerate(values)]
            loss = loss_of(p, *feeds)
            train = v1.train.MomentumOptimizer(rate, h.MOMENTUM).minimize(loss)
            session = v1.Session(config=_config(tf, a))
            session.run(v1.global_variables_initializer())
            call = session.make_callable([loss, train], feed_list=feeds)
        return Side(lambda: float(call(*batch)[0]))
    _limit(tf, a)
    p = [tf.Variable(v) for v in values]
    m = [tf.Variable(tf.zeros_like(v)) for v in p]

    @tf.function(jit_compile=a.variant == "xla", autograph=False)
    def train(*batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(p, *batch)
        for v, acc, g in zip(p, m, tape.gradient(loss, p), strict=True):
            tf.raw_ops.ResourceApplyMomentum(var=v.handle, accum=acc.handle, lr=rate, grad=g, momentum=h.MOMENTUM)
        return loss

    return Side(lambda: float(train(*map(tf.constant, batch))))


def mlp(a: Settings) -> Side:
    import tensorflow as tf

    batch, values = h.mlp_batch(a.batch), h.mlp()
    h.imported()

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        z = tf.nn.relu(tf.matmul(x, p[0]) + p[1])
        z = tf.nn.relu(tf.matmul(z, p[2]) + p[3])
        logits = tf.matmul(z, p[4]) + p[5]
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))

    return _trained(a, loss_of, values, h.MLP_RATE, batch)


def cnn(a: Settings) -> Side:
    import tensorflow as tf

    batch, values = h.cnn_batch(), h.cnn()
    h.imported()

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        k1, b1, k2, b2, w3, b3, w4, b4 = p
        z = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, k1, 1, "SAME"), b1))
        z = tf.nn.max_pool2d(z, 2, 2, "VALID")
        z = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(z, k2, 1, "SAME"), b2))
        z = tf.nn.max_pool2d(z, 2, 2, "VALID")
        z = tf.nn.relu(tf.matmul(tf.reshape(z, [-1, 4096]), w3) + b3)
        logits = tf.matmul(z, w4) + b4
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))

    return _trained(a, loss_of, values, h.CNN_RATE, batch)


def lstm(a: Settings) -> Side:
    import tensorflow as tf

    batch, values = h.lstm_batch(), h.lstm()
    h.imported()
    steps, rows, units = h.LSTM_STEPS, h.LSTM_BATCH, h.LSTM_UNITS

    def cell(xw: Any, hidden: Any, c: Any, wh: Any) -> Any:
        i, f, g, o = tf.split(xw + tf.matmul(hidden, wh), 4, axis=1)
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
        return tf.sigmoid(o) * tf.tanh(c), c

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        wx, wh, b, wo, bo = p
        xw = tf.reshape(tf.matmul(tf.reshape(x, [steps * rows, -1]), wx) + b, [steps, rows, 4 * units])
        hidden = c = tf.zeros([rows, units])
        if "unrolled" in a.variant:
            outputs = []
            for xt in tf.unstack(xw):
                hidden, c = cell(xt, hidden, c, wh)
                outputs.append(hidden)
            stacked = tf.stack(outputs)
        else:
            xs = tf.TensorArray(tf.float32, steps, element_shape=[rows, 4 * units]).unstack(xw)
            hs = tf.TensorArray(tf.float32, steps, element_shape=[rows, units])

            def body(t: Any, hidden: Any, c: Any, hs: Any) -> Any:
                hidden, c = cell(xs.read(t), hidden, c, wh)
                return t + 1, hidden, c, hs.write(t, hidden)

            hs = tf.while_loop(lambda t, *_: t < steps, body, (0, hidden, c, hs), maximum_iterations=steps)[3]
            stacked = hs.stack()
        logits = tf.matmul(tf.reshape(stacked, [steps * rows, units]), wo) + bo
        labels = tf.reshape(y, [-1])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))

    return _trained(a, loss_of, values, h.LSTM_RATE, batch)


def embedding(a: Settings) -> Side:
    import tensorflow as tf

    v1 = tf.compat.v1
    batches, values = itertools.cycle(h.embedding_batches()), h.embeddings()
    h.imported()

    def loss_of(p: Any, ids: Any, y: Any) -> Any:
        table, w, b = p
        z = tf.matmul(tf.reduce_mean(tf.nn.embedding_lookup(table, ids), 1), w) + b
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=z))

    if a.variant == "callable":
        with tf.Graph().as_default():
            ids = v1.placeholder(tf.int32, [h.EMBEDDING_BATCH, h.BAG])
            y = v1.placeholder(tf.float32, [h.EMBEDDING_BATCH, 1])
            starts = [v1.placeholder(tf.float32, v.shape) for v in values]  # 51 MB do not belong into the graph
            p = [v1.get_variable(f"p{i}", initializer=s, use_resource=True) for i, s in enumerate(starts)]
            loss = loss_of(p, ids, y)
            train = v1.train.AdagradOptimizer(h.EMBEDDING_RATE, h.ACCUMULATOR).minimize(loss)
            session = v1.Session(config=_config(tf, a))
            session.run(v1.global_variables_initializer(), dict(zip(starts, values, strict=True)))
            call = session.make_callable([loss, train], feed_list=[ids, y])
        return Side(lambda: float(call(*next(batches))[0]))
    _limit(tf, a)
    p = [tf.Variable(v) for v in values]
    acc = [tf.Variable(tf.fill(v.shape, h.ACCUMULATOR)) for v in p]

    @tf.function(autograph=False)
    def train(ids: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(p, ids, y)
        slices, *rest = tape.gradient(loss, p)
        unique, at = tf.unique(slices.indices)
        summed = tf.math.unsorted_segment_sum(slices.values, at, tf.shape(unique)[0])
        tf.raw_ops.ResourceSparseApplyAdagrad(
            var=p[0].handle, accum=acc[0].handle, lr=h.EMBEDDING_RATE, indices=unique, grad=summed
        )
        for v, c, g in zip(p[1:], acc[1:], rest, strict=True):
            tf.raw_ops.ResourceApplyAdagrad(var=v.handle, accum=c.handle, lr=h.EMBEDDING_RATE, grad=g)
        return loss

    return Side(lambda: float(train(*map(tf.constant, next(batches)))))


if __name__ == "__main__":
    h.main(h.named(globals()))
