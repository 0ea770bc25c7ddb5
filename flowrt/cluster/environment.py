"""Where an environment says that a cluster's tasks are, and which of them this process is.

Law: of these the first that is there counts, whole: FLOWRT_CLUSTER, FLOWRT_HOSTS, TF_CONFIG, torchrun's variables,
Slurm's. What one lacks is not looked for in the next; the sentence that is raised says what is missing, and how to give
it. Pure: it reads the mapping that it is given, and no file.

Where ranks are known instead of jobs, the first ranks are those of the first job, and so on, as ``FLOWRT_JOBS`` says:
``ps=1,worker`` (the default) makes rank 0 the server and all others workers; a job without a number takes the rest.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from flowrt.base.errors import GraphError
from flowrt.base.valueclass import valueclass
from flowrt.cluster.hosts import MOST, expand_counts, expand_hosts

JOBS = "ps=1,worker"
MOST_JOBS = 2**32 - 1  # of Slurm, which has such numbers where clusters are federated
PORT = 7001  # of the first rank on each host where nothing says otherwise
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID")
WAYS = (
    "set FLOWRT_CLUSTER to a cluster file or its content as JSON, with FLOWRT_JOB and FLOWRT_TASK for which task this "
    "process is; or FLOWRT_HOSTS to the hosts of the ranks, with FLOWRT_RANK; or start it where TF_CONFIG is set, by "
    "torchrun, or by Slurm's srun"
)
WHICH_TASK = {  # how to say it, by what is said
    "FLOWRT_CLUSTER": "set FLOWRT_JOB and FLOWRT_TASK",
    "FLOWRT_HOSTS": "set FLOWRT_RANK",
    "TF_CONFIG": 'give it a "task" with "type" and "index"',
    "torchrun's variables": "set RANK",
    "Slurm's variables": "start it by srun, which sets SLURM_PROCID",
}
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")
_JOB = re.compile(r"([A-Za-z][A-Za-z0-9_]*)(?:=(\d{1,9}))?")
Environ: TypeAlias = "Mapping[str, str]"
T = TypeVar("T")


@valueclass
class Found:
    """What an environment says: the ``cluster`` as data, or the path of its file; and which of its tasks this is.

    ``task`` is None where it does not say that, as for a client. ``said`` names the variables.
    """

    cluster: Any
    task: str | None
    said: str


def find(environ: Environ, jobs: str | None = None) -> Found:
    """What ``environ`` says; ``jobs`` are those of ranks, in the place of FLOWRT_JOBS. Raises `GraphError`."""
    environ = {name: text.strip() for name, text in environ.items() if text.strip()}
    jobs = jobs or environ.get("FLOWRT_JOBS", JOBS)
    if "FLOWRT_CLUSTER" in environ:
        return _own(environ)
    torchrun = any(name in environ for name in TORCHRUN[:2])
    if "FLOWRT_HOSTS" in environ and not torchrun:
        return _hosts(environ, jobs)
    if "TF_CONFIG" in environ:
        return _tensorflow(environ["TF_CONFIG"])
    slurm = any(name in environ for name in SLURM)
    if torchrun or (any(name in environ for name in TORCHRUN) and not slurm):
        return _torchrun(environ, jobs)
    if slurm:
        return _slurm(environ, jobs)
    raise GraphError(f"no cluster is named in the environment; {WAYS}")


# ── a cluster by its jobs ────────────────────────────────────────────────────────────────────────────────────────────


def _own(environ: Environ) -> Found:
    cluster: Any = environ["FLOWRT_CLUSTER"]
    if cluster.startswith(("{", "[")):
        cluster = _json("FLOWRT_CLUSTER", cluster)
    job, number = environ.get("FLOWRT_JOB"), _count(environ, "FLOWRT_TASK")
    if (job is None) != (number is None):
        there, missing = ("FLOWRT_JOB", "FLOWRT_TASK") if job else ("FLOWRT_TASK", "FLOWRT_JOB")
        raise GraphError(f"{there} is set and {missing} is not; set both, as FLOWRT_JOB=worker FLOWRT_TASK=0, or none")
    return Found(cluster, None if job is None else f"/job:{job}/task:{number}", "FLOWRT_CLUSTER")


def _tensorflow(text: str) -> Found:
    form = 'TF_CONFIG is {"cluster": {"ps": ["HOST:PORT"], ...}, "task": {"type": "ps", "index": 0}}'
    data = _json("TF_CONFIG", text)
    if not isinstance(data, Mapping) or not isinstance(cluster := data.get("cluster"), Mapping):
        raise GraphError(f'TF_CONFIG has no "cluster"; {form}')
    if (task := data.get("task")) is None:
        return Found(cluster, None, "TF_CONFIG")
    job, index = (task.get("type"), task.get("index")) if isinstance(task, Mapping) else (None, None)
    if not isinstance(job, str) or not re.fullmatch(r"\d{1,9}", str(index)):
        raise GraphError(f'TF_CONFIG\'s "task" has no "type" and "index" that make one, but is {task!r}; {form}')
    return Found(cluster, f"/job:{job}/task:{int(str(index))}", "TF_CONFIG")


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GraphError(f"{name} is not JSON: {error}; it begins {text[:40]!r}") from error


# ── a cluster by its ranks ───────────────────────────────────────────────────────────────────────────────────────────


def _hosts(environ: Environ, jobs: str) -> Found:
    hosts = _expanded("FLOWRT_HOSTS", environ["FLOWRT_HOSTS"], expand_hosts)
    rank, port = _count(environ, "FLOWRT_RANK"), _port(environ, PORT)
    return _by_rank(hosts, port, jobs, rank, "FLOWRT_RANK", "FLOWRT_HOSTS")


def _torchrun(environ: Environ, jobs: str) -> Found:
    said = "torchrun's variables"
    if missing := [name for name in TORCHRUN if name not in environ]:
        raise GraphError(
            f"{said} are set in part: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; start this "
            f"by torchrun, which sets all of {', '.join(TORCHRUN)}, or {WAYS}"
        )
    world, rank = _count(environ, "WORLD_SIZE") or 0, _count(environ, "RANK")
    master, first = environ["MASTER_ADDR"], _count(environ, "MASTER_PORT") or 0
    local = _count(environ, "LOCAL_WORLD_SIZE") or world
    if "FLOWRT_HOSTS" in environ:
        hosts = _expanded("FLOWRT_HOSTS", environ["FLOWRT_HOSTS"], expand_hosts)
    elif local >= world or _LOOPBACK.fullmatch(master):
        hosts, local = [master], world
    else:
        raise GraphError(
            f"{said} name one host, {master}, and there are {world} ranks, {local} on each host; set FLOWRT_HOSTS to "
            f"the {-(-world // local)} hosts in the order of GROUP_RANK, as in FLOWRT_HOSTS={master},..."
        )
    if len(hosts) != world:
        hosts = [host for host in hosts for _ in range(local)]
    if len(hosts) != world:
        raise GraphError(
            f"FLOWRT_HOSTS names {len(hosts) // local} hosts, of {local} ranks each, and torchrun's WORLD_SIZE is "
            f"{world}; name {-(-world // local)} hosts, in the order of GROUP_RANK"
        )
    # MASTER_PORT is torch's own
    return _by_rank(hosts, _port(environ, first + 1), jobs, rank, "RANK", said)


def _slurm(environ: Environ, jobs: str) -> Found:
    said = "Slurm's variables"
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    name = next((name for name in names if name in environ), None)
    if name is None:
        there = next(name for name in SLURM if name in environ)
        raise GraphError(
            f"{there} is set, and SLURM_JOB_NODELIST is not; start this by srun, within sbatch or salloc, or {WAYS}"
        )
    hosts = _expanded(name, environ[name], expand_hosts)
    if len({*hosts}) != len(hosts):
        raise GraphError(f"{name} names a host twice: {environ[name]}")
    ranks = _spread(hosts, _slurm_counts(environ, hosts, name), environ.get("SLURM_DISTRIBUTION", "block"))
    job = _count(environ, "SLURM_JOB_ID", MOST_JOBS) or 0
    port = _port(environ, 10_000 + 64 * (job % 312))  # so that two jobs may share hosts
    return _by_rank(ranks, port, jobs, _count(environ, "SLURM_PROCID"), "SLURM_PROCID", said)


def _slurm_counts(environ: Environ, hosts: Sequence[str], where: str) -> list[int]:
    """How many tasks there are on each host."""
    total = _count(environ, "SLURM_STEP_NUM_TASKS") or _count(environ, "SLURM_NTASKS")
    each = _count(environ, "SLURM_NTASKS_PER_NODE")
    name = next((n for n in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if n in environ), None)
    if name is not None:
        counts = _expanded(name, environ[name], expand_counts)
        if len(counts) != len(hosts):
            raise GraphError(f"{name}={environ[name]} counts {len(counts)} hosts, and {where} names {len(hosts)}")
    elif each and total is not None:  # the last hosts have fewer
        name = "SLURM_NTASKS_PER_NODE"
        counts = [min(each, max(0, total - each * place)) for place in range(len(hosts))]
    elif total is not None:  # as evenly as can be, as Slurm has it
        counts = [(total + len(hosts) - 1 - place) // len(hosts) for place in range(len(hosts))]
    else:
        counts = [each or 1] * len(hosts)
    if total is not None and sum(counts) != total:
        raise GraphError(
            f"SLURM_NTASKS is {total}, and {name}={environ.get(name or '')} makes {sum(counts)} tasks on the "
            f"{len(hosts)} hosts of {where}; start all of them by one srun, as in srun --ntasks={sum(counts)}"
        )
    return counts


def _spread(hosts: Sequence[str], counts: Sequence[int], distribution: str) -> list[str]:
    """The host of each rank."""
    match re.split(r"[:,]", distribution)[0]:
        case "block":
            return [host for host, count in zip(hosts, counts, strict=True) for _ in range(count)]
        case "cyclic":
            turns = range(max(counts, default=0))
            return [host for turn in turns for host, count in zip(hosts, counts, strict=True) if turn < count]
        case other:
            raise GraphError(
                f"SLURM_DISTRIBUTION={other} does not say which rank is on which host; start this by "
                "srun --distribution=block"
            )


def _by_rank(hosts: Sequence[str], port: int, jobs: str, rank: int | None, name: str, said: str) -> Found:
    """The cluster whose rank r is on host r; those on one host have ports one after another."""
    if rank is not None and rank >= len(hosts):
        raise GraphError(f"{name}={rank}, and {said} make {len(hosts)} ranks, from 0 to {len(hosts) - 1}")
    addresses = _addresses(hosts, port)
    cluster: dict[str, list[str]] = {}
    task, first = None, 0
    for job, count in _shares(jobs, len(hosts), said):
        cluster[job] = addresses[first : first + count]
        if rank is not None and first <= rank < first + count:
            task = f"/job:{job}/task:{rank - first}"
        first += count
    return Found(cluster, task, said)


def _addresses(hosts: Sequence[str], port: int) -> list[str]:
    """An address on each host; FLOWRT_HOSTS may say its port."""
    beside: Counter[str] = Counter()
    addresses = []
    for host in hosts:
        if host.count(":") == 1:
            addresses.append(host)
            continue
        if port + beside[host] >= 1 << 16:
            raise GraphError(f"{host} has no port above {port} left for its ranks; set FLOWRT_PORT to a lower one")
        addresses.append(f"[{host}]:{port + beside[host]}" if ":" in host else f"{host}:{port + beside[host]}")
        beside[host] += 1
    return addresses


def _shares(jobs: str, ranks: int, said: str) -> list[tuple[str, int]]:
    """How many ranks each job has."""
    matches = [_JOB.fullmatch(part.strip()) for part in jobs.split(",")]
    named = [(match[1], match[2]) for match in matches if match is not None]
    open_ones = [job for job, count in named if count is None]
    if len(named) < len(matches) or len(open_ones) > 1 or len({job for job, _ in named}) < len(named):
        raise GraphError(
            f"FLOWRT_JOBS={jobs} does not say how many ranks each job has; write ps=1,worker: one job may have no "
            "number, and takes the rest"
        )
    rest = ranks - sum(int(count) for _, count in named if count is not None)
    if rest < len(open_ones) or (rest > 0 and not open_ones):
        needed = ranks - rest + len(open_ones)
        least = " at least" if open_ones else ""
        raise GraphError(
            f"{said} make {ranks} {'rank' if ranks == 1 else 'ranks'}, and the jobs {jobs} need {needed}{least}; start "
            f"as many, or set FLOWRT_JOBS, as in FLOWRT_JOBS={'worker' if ranks == 1 else JOBS}"
        )
    return [(job, rest if count is None else int(count)) for job, count in named if count is None or int(count)]


def _expanded(name: str, text: str, expand: Callable[[str], list[T]]) -> list[T]:
    try:
        return expand(text)
    except ValueError as error:
        raise GraphError(f"{name}: {error}") from error


def _count(environ: Environ, name: str, most: int = MOST) -> int | None:
    text = environ.get(name)
    if text is not None and not (re.fullmatch(r"\d{1,18}", text) and int(text) <= most):
        raise GraphError(f"{name}={text} is not a number from 0 to {most}")
    return None if text is None else int(text)


def _port(environ: Environ, otherwise: int) -> int:
    """The port of the first rank on each host."""
    port = _count(environ, "FLOWRT_PORT", 10**9)
    if port is None:
        return otherwise
    if not 1 <= port < 1 << 16:
        raise GraphError(f"FLOWRT_PORT={port} is not a port; write one from 1 to 65535")
    return port
