"""TensorFlow's sides of perf/null_step.py, over gRPC, by graphs and sessions (tf.compat.v1).

ingraph   one graph with a tower on each worker; a client runs a step of it at a time
sync      SyncReplicasOptimizer: a graph and a session in each worker, and a token queue on the server
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import tensorflow as tf
from sides import processes as p
from sides.null_step import data as d

tf1 = tf.compat.v1
tf1.disable_v2_behavior()
Addresses = dict[str, list[str]]


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def start(addresses: Addresses, job: str, task: int, a: p.Settings) -> Any:
    config = tf1.ConfigProto(intra_op_parallelism_threads=a.threads, inter_op_parallelism_threads=a.threads)
    return tf1.train.Server(tf.train.ClusterSpec(addresses), job_name=job, task_index=task, config=config)


def stay(addresses: Addresses, job: str, task: int, a: p.Settings) -> None:
    start(addresses, job, task, a).join()


def variable(a: p.Settings) -> Any:
    rows = a.workload in d.TABLES
    shape = (d.TABLES[a.workload], d.WIDTH) if rows else (d.floats(a.workload),)
    with tf1.device("/job:ps/task:0/cpu:0"):
        return tf1.get_variable("w", shape, tf.float32, use_resource=True, initializer=tf1.ones_initializer())


def gradient(w: Any, worker: int, turn: Any, a: p.Settings) -> Any:
    """What one worker computes in a step; rows as IndexedSlices.

    The loss is multiplied by a variable of the worker: by 1, TensorFlow would find, there is nothing to compute there.
    """
    one = tf1.get_variable(
        f"one_{worker}",
        (),
        use_resource=True,
        initializer=tf1.ones_initializer(),
        collections=[tf1.GraphKeys.LOCAL_VARIABLES],
    )
    if a.workload not in d.TABLES:
        return tf.gradients(tf.nn.l2_loss(w.read_value()) * one, w)[0]
    with tf1.device("/job:ps/task:0/cpu:0"):
        named = tf.gather(tf.constant(d.ids(a.workload, a.workers)[worker]), turn % d.BATCHES)
        rows = tf.gather(w, named)
    grad = tf.gradients(tf.nn.l2_loss(rows) * one, rows)[0]
    return tf.IndexedSlices(grad, named, tf.constant([d.TABLES[a.workload], d.WIDTH]))


def probe(w: Any, a: p.Settings) -> Any:
    with tf1.device("/job:ps/task:0/cpu:0"):
        return tf.gather(w, d.probes(a.workload, a.workers))[:, 0] if a.workload in d.TABLES else w[-1:]


def rate(a: p.Settings) -> float:
    return d.ROW_RATE if a.workload in d.TABLES else d.RATE


# ── one graph ────────────────────────────────────────────────────────────────────────────────────────────────────────


def in_graph(a: p.Settings) -> None:
    ports = free_ports(1 + a.workers)
    addresses = {"ps": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{port}" for port in ports[1:]]}
    tasks = [("ps", 0), *(("worker", worker) for worker in range(a.workers))]
    with p.started(stay, [(addresses, job, task, a) for job, task in tasks], "spawn") as pids, tf1.Graph().as_default():
        w = variable(a)
        with tf1.device("/job:ps/task:0/cpu:0"):
            count = tf1.get_variable("turn", (), tf.int64, use_resource=True, initializer=tf1.zeros_initializer())
            turn = count.read_value()
        towers = []
        for worker in range(a.workers):
            with tf1.device(f"/job:worker/task:{worker}/cpu:0"):
                towers.append(gradient(w, worker, turn, a))
        with tf1.device("/job:ps/task:0/cpu:0"), tf1.control_dependencies([turn]):
            moves = [mean_applied(w, towers, a), count.assign_add(1).op]
            train = tf.group(*moves)
        session = tf1.Session(f"grpc://{addresses['ps'][0]}")
        session.run([tf1.global_variables_initializer(), tf1.local_variables_initializer()])
        step = session.make_callable(train)
        probed = probe(w, a)
        roles = {"server": pids[0], **p.workers(pids[1:]), "client": p.here()}
        p.serve(
            lambda n: p.timed(step, n),
            roles,
            lambda steps: d.right(a.workload, a.workers, steps, session.run(probed)),
        )
        os.kill(pids[0], 9)
        os._exit(0)


def mean_applied(w: Any, towers: list[Any], a: p.Settings) -> Any:
    """SGD by the mean, on the server."""
    optimizer = tf1.train.GradientDescentOptimizer(rate(a))
    if a.workload not in d.TABLES:
        return optimizer.apply_gradients([(tf.add_n(towers) / a.workers, w)])
    values = tf.concat([tower.values for tower in towers], 0) / a.workers
    named = tf.concat([tower.indices for tower in towers], 0)
    return optimizer.apply_gradients([(tf.IndexedSlices(values, named, towers[0].dense_shape), w)])


# ── a graph in each worker ───────────────────────────────────────────────────────────────────────────────────────────


def replica(worker: int, addresses: Addresses, a: p.Settings) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What a step of one worker is, and what is compared in the end."""
    server = start(addresses, "worker", worker, a)
    with tf1.Graph().as_default():
        with tf1.device("/job:ps/task:0/cpu:0"):
            number = tf1.train.get_or_create_global_step()
        w = variable(a)
        optimizer = tf1.train.SyncReplicasOptimizer(
            tf1.train.GradientDescentOptimizer(rate(a)), replicas_to_aggregate=a.workers, total_num_replicas=a.workers
        )
        with tf1.device(f"/job:worker/task:{worker}/cpu:0"):
            # A worker takes a token before it begins a step, so the step's number is that of the version.
            made = gradient(w, worker, tf.identity(number), a)
            if a.workload in d.TABLES:  # which the optimizer averages row by row, over those that have it
                made = tf.IndexedSlices(made.values / a.workers, made.indices, made.dense_shape)
        with tf1.device("/job:ps/task:0/cpu:0"):
            train = optimizer.apply_gradients([(made, w)], global_step=number)
        probed = probe(w, a)
        hook = optimizer.make_session_run_hook(is_chief=worker == 0, num_tokens=0)
        session = tf1.train.MonitoredTrainingSession(
            master=server.target,
            is_chief=worker == 0,
            hooks=[hook],
            save_summaries_steps=None,
            save_summaries_secs=None,
        )
    raw = session._tf_sess()
    step = raw.make_callable(train)
    return step, lambda: raw.run(probed)


def follow(worker: int, addresses: Addresses, a: p.Settings, told: Any) -> None:
    step, _ = replica(worker, addresses, a)
    while count := told.recv():
        for _ in range(count):
            step()
    os._exit(0)


def sync(a: p.Settings) -> None:
    ports = free_ports(1 + a.workers)
    addresses = {"ps": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{port}" for port in ports[1:]]}
    pipes = [multiprocessing.get_context("spawn").Pipe(duplex=False) for _ in range(1, a.workers)]
    followers = [(worker, addresses, a, pipes[worker - 1][0]) for worker in range(1, a.workers)]
    with p.started(stay, [(addresses, "ps", 0, a)], "spawn") as server, p.started(follow, followers, "spawn") as pids:
        step, probed = replica(0, addresses, a)

        run = p.followed(step, [tell for _, tell in pipes])
        roles = {"server": server[0], **p.workers([p.here(), *pids])}
        p.serve(run, roles, lambda steps: d.right(a.workload, a.workers, steps, probed()))
        for pid in (*server, *pids):
            os.kill(pid, 9)
        os._exit(0)


if __name__ == "__main__":
    settings = p.settings()
    {"ingraph": in_graph, "sync": sync}[settings.variant](settings)
