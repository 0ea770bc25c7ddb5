"""TensorFlow's sides of perf/replicas.py, over gRPC (tf.compat.v1).

ingraph   one graph with a tower on each worker; every step waits for all of them
sync      SyncReplicasOptimizer, which waits for all replicas
first     the same, keeping the first updates, of all but one
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from sides import processes as p
from sides.null_step.tf import Addresses, free_ports, start, stay, tf1
from sides.replicas import data as d

PS = "/job:ps/task:0/cpu:0"


def variables() -> list[Any]:
    with tf1.device(PS):
        return [
            tf1.get_variable(f"w{number}", initializer=value, use_resource=True)
            for number, value in enumerate(d.weights())
        ]


def gradients(w: list[Any]) -> tuple[list[Any], list[Any]]:
    """The inputs of a tower, and what it computes."""
    images, labels = tf1.placeholder(tf.float32, (None, 64)), tf1.placeholder(tf.int32, (None,))
    scores = tf.nn.relu(images @ w[0] + w[1]) @ w[2] + w[3]
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores))
    return [images, labels], tf.gradients(loss, w)


def optimizer() -> Any:
    return tf1.train.MomentumOptimizer(d.RATE, d.MOMENTUM)


def places(a: p.Settings) -> Addresses:
    ports = [f"127.0.0.1:{port}" for port in free_ports(1 + a.workers)]
    return {"ps": ports[:1], "worker": ports[1:]}


def slow(worker: int, a: p.Settings) -> bool:
    return a.workload == "straggler" and worker == a.workers - 1


def in_graph(a: p.Settings) -> None:
    if a.workload == "straggler":
        raise SystemExit("nothing can be made to wait in a worker's part of a graph")
    addresses = places(a)
    tasks = [(addresses, "ps", 0, a), *((addresses, "worker", worker, a) for worker in range(a.workers))]
    judge = d.Judge(a.workload, a.workers, waits=True)
    with p.started(stay, tasks, "spawn") as pids, tf1.Graph().as_default():
        w, inputs, towers = variables(), [], []
        for worker in range(a.workers):
            with tf1.device(f"/job:worker/task:{worker}/cpu:0"):
                given, found = gradients(w)
                inputs += given
                towers.append(found)
        with tf1.device(PS):
            means = [tf.add_n(parts) / a.workers for parts in zip(*towers, strict=True)]
            train = optimizer().apply_gradients(zip(means, w, strict=True))
        session = tf1.Session(f"grpc://{addresses['ps'][0]}")
        session.run(tf1.global_variables_initializer())
        call, source = session.make_callable(train, inputs), d.batches()

        def step() -> None:
            call(*[array for _ in range(a.workers) for array in next(source)])

        roles = {"server": pids[0], **p.workers(pids[1:]), "client": p.here()}
        measured = d.FIRST[a.workload]
        p.serve(lambda n: p.timed(step, n), roles, lambda n: judge.right(n, session.run(w)), measured, judge.notes)
        end(pids)


def end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, 9)
    os._exit(0)


def replica(worker: int, addresses: Addresses, a: p.Settings) -> tuple[Callable[[], Any], Callable[[], Any]]:
    server = start(addresses, "worker", worker, a)
    take = a.workers - (a.variant == "first")
    with tf1.Graph().as_default():
        with tf1.device(PS):
            number = tf1.train.get_or_create_global_step()
        w = variables()
        synced = tf1.train.SyncReplicasOptimizer(optimizer(), take, total_num_replicas=a.workers)
        with tf1.device(f"/job:worker/task:{worker}/cpu:0"):
            inputs, found = gradients(w)
        with tf1.device(PS):
            train = synced.apply_gradients(zip(found, w, strict=True), global_step=number)
        hook = synced.make_session_run_hook(is_chief=worker == 0, num_tokens=0)
        session = tf1.train.MonitoredTrainingSession(
            server.target, worker == 0, hooks=[hook], save_summaries_steps=None, save_summaries_secs=None
        )
    raw, batches = session._tf_sess(), d.batches_of(worker, a.workers)
    call = raw.make_callable(train, inputs)

    def step() -> None:
        batch = next(batches)
        if slow(worker, a):
            time.sleep(d.DELAY)
        call(*batch)

    return step, lambda: raw.run(w)


def follow(worker: int, addresses: Addresses, a: p.Settings, told: Any) -> None:
    step, _ = replica(worker, addresses, a)
    while slow(worker, a) and a.variant == "first":
        step()  # nobody waits for it
    while count := told.recv():
        for _ in range(count):
            step()


def sync(a: p.Settings) -> None:
    addresses = places(a)
    pipes = [multiprocessing.get_context("spawn").Pipe(duplex=False) for _ in range(1, a.workers)]
    followers = [(worker, addresses, a, pipes[worker - 1][0]) for worker in range(1, a.workers)]
    judge = d.Judge(a.workload, a.workers, waits=a.variant == "sync")
    with p.started(stay, [(addresses, "ps", 0, a)], "spawn") as server, p.started(follow, followers, "spawn") as pids:
        step, found = replica(0, addresses, a)

        run = p.followed(step, [tell for _, tell in pipes])
        roles = {"server": server[0], **p.workers([p.here(), *pids])}
        p.serve(run, roles, lambda n: judge.right(n, found()), d.FIRST[a.workload], judge.notes)
        end([*server, *pids])


if __name__ == "__main__":
    settings = p.settings()
    (in_graph if settings.variant == "ingraph" else sync)(settings)
