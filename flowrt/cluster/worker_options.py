"""What a node is told when it starts, by its command line, a cluster file and the environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from flowrt.base.errors import AuthenticationError, GraphError
from flowrt.base.valueclass import replace, valueclass
from flowrt.cluster.cluster import ClusterSpec, parse_address
from flowrt.cluster.environment import WHICH_TASK
from flowrt.cluster.tasks import check_is_among
from flowrt.net.door.addresses import is_loopback
from flowrt.net.door.tls import MAKE, TOKEN, Keys, check_reach
from flowrt.net.door.tokens import load_token, own_token, read_token
from flowrt.sched.devices.names import check_names

if TYPE_CHECKING:
    from flowrt.delays import Delay


@valueclass
class Settings:
    """What a node is told when it starts; with a ``door``, the ``task`` that it is, it is told there.

    Until then that is one it asks for, or -1, of a ``job``, and the ``host`` may be empty.
    """

    task: str
    host: str
    port: int
    token: str
    threads: int | None
    delay: Delay | None
    die_with_parent: bool
    door: tuple[str, int] | None = None
    job: str = ""
    number: int = -1
    health: tuple[str, int] | None = None
    tls: Keys | None = None
    said: str = ""  # by which environment it is that task
    devices: tuple[str, ...] | None = None


class NoPlace(GraphError):
    """The environment does not say which task a node is."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; the process ends with 2 where it makes no sense."""
    given = parser().parse_args(arguments)
    if given.job is None and (given.join or given.task is not None):
        parser().error(f"{'--join' if given.join else '--task'} needs --job, the job that this node has a task of")
    return given


def read_settings(given: argparse.Namespace) -> Settings:
    """What the command line, the cluster file and the environment say. Raises a `FlowrtError` for what cannot be."""
    keys = _tls(given)
    tls = None if keys is None else Keys(keys)  # first, as a token may lie beside them
    settings = _newcomer(given) if given.join else _named(given)
    devices = None if given.devices is None else check_names(given.devices.split(","))
    settings = replace(settings, tls=tls, devices=devices)
    check_reach(settings.host or parse_address(given.join)[0], settings.tls)
    if given.health is None:
        return settings
    host, port = given.health
    return replace(settings, health=(settings.host if host is None else host, port))


def _named(given: argparse.Namespace) -> Settings:
    """The settings of a node that a cluster file or its environment names."""
    said, cluster = "", None
    if given.job is None:
        cluster = _cluster_here(given)
        task = str(cluster.task)
        jobs = ", ".join(f"{job}={len(tasks)}" for job, tasks in cluster.jobs.items())
        said = f"is {task} of {jobs}, as {cluster.said} said"
    elif given.task is None:
        raise GraphError("--task says which of the job's tasks this node is; or let it --join a cluster, to be told")
    else:
        task, cluster = f"/job:{given.job}/task:{given.task}", _cluster(given)
    if cluster is None:
        host, port = parse_address(given.bind, lowest=0)
    else:
        tasks = cluster.tasks()
        check_is_among(task, tasks)
        host, port = parse_address(given.bind, lowest=0) if given.bind else tasks[task]
    return Settings(
        task,
        host,
        port,
        _token(given, cluster, host),
        given.threads,
        _delay(given.delay),
        given.die_with_parent,
        said=said,
    )


def _cluster_here(given: argparse.Namespace) -> ClusterSpec:
    """The cluster of the environment, which says which task this node is. Raises `NoPlace`."""
    environ = os.environ | ({"FLOWRT_CLUSTER": given.cluster} if given.cluster else {})
    try:
        cluster = ClusterSpec.from_env(environ)
    except GraphError as error:
        raise NoPlace(f"{error}; or give --job and --task") from error
    if cluster.task is None:
        said = "--cluster" if given.cluster else cluster.said
        raise NoPlace(f"{said} tells of a cluster, and not which of its tasks this is; {WHICH_TASK[cluster.said]}")
    return cluster


def _newcomer(given: argparse.Namespace) -> Settings:
    """The settings of a node that joins."""
    if given.cluster:
        raise GraphError("--join is for a node that no cluster file names: give --cluster or --join, not both")
    door = parse_address(given.join)
    host, port = parse_address(given.bind, lowest=0) if given.bind else ("", 0)
    token = _token(given, None, host or door[0])
    number = -1 if given.task is None else given.task
    return Settings(
        "", host, port, token, given.threads, _delay(given.delay), given.die_with_parent, door, given.job, number
    )


def _delay(text: str | None) -> Delay | None:
    """The delay that is given: as text, or in a file."""
    if not text:
        return None
    from flowrt import delays  # for experiments alone

    try:
        return delays.parse(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except OSError as error:
        raise GraphError(f"--delay {text}: {error}") from error
    except GraphError as error:
        raise GraphError(f"--delay: {str(error).partition(': ')[2]}") from error  # the line is not the user's


def _cluster(given: argparse.Namespace) -> ClusterSpec | None:
    """The cluster, where one is given; its masters tell a node that knows only its own address."""
    if given.cluster:
        return ClusterSpec.from_file(given.cluster)
    return None if given.bind else ClusterSpec.from_env()


def _token(given: argparse.Namespace, cluster: ClusterSpec | None, host: str) -> str:
    path = given.token_file or (cluster and cluster.token_file) or os.environ.get("FLOWRT_TOKEN_FILE")
    if path:
        return read_token(0) if path == "-" else load_token(path)
    keys = _tls(given)
    if keys and (keys / TOKEN).exists():
        return load_token(keys / TOKEN)
    if not is_loopback(host):
        raise AuthenticationError(
            f"listening on {host}, beyond this machine, needs a secret: give --token-file, or --tls DIR, with "
            f"keys and a token: {MAKE} makes them"
        )
    return own_token()


def _tls(given: argparse.Namespace) -> Path | None:
    """The folder of this node's keys, if it has some."""
    folder = given.tls or os.environ.get("FLOWRT_TLS")
    return Path(folder) if folder else None


@cache
def parser() -> argparse.ArgumentParser:
    """What a node may be told."""
    made = argparse.ArgumentParser(
        prog="python -m flowrt.worker",
        description="A node of a flowrt cluster: computes what masters ask for, and keeps variables between them.",
        epilog="A cluster file is TOML with the addresses of each job's tasks: "
        'ps = ["127.0.0.1:7001"], worker = ["127.0.0.1:7002", "127.0.0.1:7003"], and perhaps token_file = "PATH". '
        "A node that is in no such file takes part by --join HOST:PORT, the address of any node that is up; if no "
        "session runs it waits for one. Without --job, the environment says which task of which cluster a node is: "
        "FLOWRT_CLUSTER with FLOWRT_JOB and FLOWRT_TASK, else FLOWRT_HOSTS with FLOWRT_RANK, TF_CONFIG, torchrun's "
        "variables, or Slurm's. Of ranks, the first is the server and the others are workers, unless FLOWRT_JOBS says "
        "otherwise, as FLOWRT_JOBS=ps=2,worker. On SIGTERM or SIGINT a node says that it leaves, ends the batch that "
        "it is at, and ends with exit code 0; a second signal ends it at once. 2 says that it could not start as it "
        "was told to, 3 that no environment says which task it is, 1 that flowrt failed.",
    )
    _add_place(made.add_argument)
    _add_trust(made.add_argument)
    _add_running(made.add_argument)
    return made


def _add_place(add: Callable[..., object]) -> None:
    """Which node of which cluster it is, and where it listens."""
    add("--job", help="the job this node has a task of, as in ps; by default the environment says job and task")
    add(
        "--task", type=_count, help="which of the job's tasks it is, from 0; with --join, by default the first free one"
    )
    add(
        "--join",
        metavar="HOST:PORT",
        help="take part in the cluster of the node that listens there, though no cluster file names this one; it "
        "listens at --bind, by default at any port of the address by which that node sees it",
    )
    add("--cluster", metavar="FILE", help="the cluster file; by default what the environment says")
    add("--bind", metavar="HOST:PORT", help="where to listen, if not at the task's address; port 0 is any free one")


def _add_trust(add: Callable[..., object]) -> None:
    """Whom it believes, and whose code it runs."""
    add(
        "--token-file",
        metavar="FILE",
        help="holds the secret that masters and nodes share, readable by its owner alone; - for the first line of "
        "stdin; by default the cluster file's, FLOWRT_TOKEN_FILE's, that in the folder of --tls, or (on this machine "
        "only) this user's own, made at the first use",
    )
    add(
        "--tls",
        metavar="DIR",
        help="talk over TLS with the keys in this folder, which `python -m flowrt.worker keys DIR` makes; by default "
        "FLOWRT_TLS's. Without, nodes beyond this machine talk over TLS that their token vouches for",
    )
    add(
        "--import",
        dest="imports",
        metavar="MODULE",
        action="append",
        default=[],
        help="import a module of yours first, for the ops, kernels, policies and sources that it defines; may be given "
        "again",
    )


def _add_running(add: Callable[..., object]) -> None:
    """How it computes, and what it tells of itself."""
    add(
        "--devices",
        metavar="NAME,...",
        help="the devices it looks for, the first of which is its own choice for what nothing ties down, as in "
        "cpu:0,cuda:0 or, for all of a kind, cpu,cuda; of one that is not there the log says why (default: cpu:0)",
    )
    add("--threads", type=_positive, metavar="N", help="kernel threads; by default the cores it may use")
    add(
        "--delay",
        metavar="TEXT",
        help="for experiments: be slow, by so many seconds a step: 0.2, exponential:MEAN, lognormal:MEDIAN,SIGMA, "
        "link:BYTES_PER_SECOND, … and sums of them, each perhaps with `at input` (push, server, frozen), `on REPLICA` "
        "or `during 100:200`; or @FILE that holds it. See flowrt.delays",
    )
    levels = ("debug", "info", "warning", "error")
    add("--log-level", default="warning", choices=levels, help="what to write to stderr (default: %(default)s)")
    add(
        "--log-format",
        default="text",
        choices=("text", "json"),
        help="json: each line is an object with time, level, node, message and fields (default: %(default)s)",
    )
    add(
        "--health",
        type=_health,
        metavar="[HOST:]PORT",
        help="answer GET /healthz with 200 while the node lives, and GET /readyz with 200 while it can be used, else "
        "503, and GET /metrics with numbers for Prometheus; by default where the node listens, or, while it is to "
        "--join, at every address",
    )
    add("--die-with-parent", action="store_true", help="end when stdin, a pipe that the parent holds, ends")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return int(text)


def _health(text: str) -> tuple[str | None, int]:
    """A port, perhaps with its host."""
    if text.isdecimal() and int(text) < 1 << 16:
        return None, int(text)
    try:
        return parse_address(text, lowest=0)
    except GraphError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a port nor HOST:PORT") from error


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)
