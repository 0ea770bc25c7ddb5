"""The names of a cluster's tasks, and what launchers are asked for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.errors import GraphError, user_site
from flowrt.base.familiar import argument_meant
from flowrt.base.plain import is_number, is_whole
from flowrt.sched.devices.names import check_names

if TYPE_CHECKING:
    from flowrt.delays import Delay

Delays: TypeAlias = "dict[str, Delay]"
Devices: TypeAlias = "str | Sequence[str] | Mapping[str, str | Sequence[str]] | None"
NAMED = 8  # tasks that a sentence lists
_JOB = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def check_job(job: str) -> None:
    """Raise `GraphError` for what cannot name a job."""
    if not isinstance(job, str) or not _JOB.fullmatch(job) or job == "client":
        raise GraphError(f"{job!r} cannot name a job: letters, digits and _, but not client, which is the session's")


def split_task(task: str) -> tuple[str, int]:
    """The job and the number of ``/job:worker/task:3``."""
    job, _, number = task.removeprefix("/job:").partition("/task:")
    return job, int(number)


def check_is_among(task: str, tasks: Iterable[str]) -> None:
    """Raise `GraphError` where these ``tasks`` of a cluster have no such one, that names some of them."""
    there = list(tasks)
    if task in there:
        return
    if len(there) > NAMED:
        there[NAMED - 1 : -1] = ["..."]
    raise GraphError(f"{task} is not in the cluster, which has {', '.join(there)}")


def checked_tasks(jobs: Mapping[str, int]) -> list[str]:
    """The names of so many tasks of each job. Raises `GraphError` for what makes no cluster."""
    for job, count in jobs.items():
        check_job(job)
        meant = argument_meant(job, ("worker", "ps", "threads"))
        if meant is not None:
            raise GraphError(f"{user_site()}: {job}={count!r} would be so many tasks of a job {job!r}; write {meant}=")
        if not is_whole(count, 0):
            raise GraphError(f"{job}={count!r}: a job has a number of tasks, from 0 up")
    tasks = [f"/job:{job}/task:{number}" for job, count in jobs.items() for number in range(count)]
    if not tasks:
        raise GraphError("a cluster needs a task; worker=1 would be one")
    return tasks


def checked_delays(delays: Mapping[str, str | float | Delay] | None, tasks: Iterable[str]) -> Delays:
    """The delays of tasks, parsed. Raises `GraphError` for what is none, or no task's."""
    if not delays:
        return {}
    if not isinstance(delays, Mapping):
        raise GraphError(
            f"{user_site()}: delays are given by task, as {{'/job:worker/task:0': 'constant:0.1'}}, got {delays!r}"
        )
    from flowrt.delays import parse  # for experiments alone

    parsed = {task: parse(delay) for task, delay in delays.items()}
    for task in parsed.keys() - set(tasks):
        raise GraphError(f"{user_site()}: a delay is given for {task}, which is not in the cluster")
    return parsed


def checked_devices(devices: Devices, tasks: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The devices that tasks look for, given for all or by task. Raises `GraphError` for what is none, or no task's."""
    by_task = devices if isinstance(devices, Mapping) else {} if devices is None else dict.fromkeys(tasks, devices)
    for task in by_task.keys() - set(tasks):
        raise GraphError(f"{user_site()}: devices are given for {task}, which is not in the cluster")
    try:
        return {task: check_names(asked) for task, asked in by_task.items()}
    except (GraphError, TypeError) as error:
        raise GraphError(f"{user_site()}: {error}") from None


def checked_imports(imports: Sequence[str]) -> tuple[str, ...]:
    """The names of modules. Raises `GraphError` for what is none."""
    if (
        isinstance(imports, str)
        or not isinstance(imports, Iterable)
        or not all(isinstance(module, str) and module for module in imports)
    ):
        raise GraphError(f"{user_site()}: imports names modules, as in imports=['majority'], not {imports!r}")
    return tuple(imports)


def check_numbers(**numbers: Any) -> None:
    """Raise `GraphError` for what is no number from 0 up; None is the default's."""
    for name, number in numbers.items():
        if number is not None and not is_number(number):
            raise GraphError(f"{user_site()}: {name} is a number from 0 up, not {number!r}")
