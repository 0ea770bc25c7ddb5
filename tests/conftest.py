"""In which order tests run, which need not, when they end at the latest, and who runs the CUDA simulator.

The simulator takes a minute in a process of its own, so it starts before all tests and is asked after them, unless what
it found is kept. Where several processes share the files out, one of them begins with it and waits, while others go on.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import programs
import pytest
from hypothesis import settings
from kept import keep, recall
from places import MODULES, ON_GPU, TESTS, environment, file_of
from settled import has_passed, note_passed

from flowrt.cluster import fork_server

if TYPE_CHECKING:
    from pathlib import Path

pytest_plugins = ["reported", "time_limit"]

settings.register_profile("suite", derandomize=True, deadline=None)  # the same examples each time, at any speed
settings.load_profile("suite")

sys.path += MODULES  # tests use what others have
os.environ["FLOWRT_QUIET"] = "1"  # what a slow machine would say on the side is none of a test's output

SIMULATOR = pytest.StashKey["subprocess.Popen[str]"]()
SETTLED = ("settled", True)  # what a report says of a test that was not run again
SHARED_OUT = "PYTEST_XDIST_WORKER" in os.environ
LONG = (  # what takes far longer than its number of tests tells: first where no kernel is compiled yet, then always
    "test_ptx",
    "test_launch_ray",
    "test_ops",
    "test_conv",
    "test_control_random",
    "test_replica_protocol",
    "test_workloads",
    "test_micro",
    "test_background",
    "test_kernel_store",
    "test_bundle",
    "test_api",
    "test_fused",
    "test_passes",
    "test_sparse",
    "test_fused_steps",
    "test_random_loops",
    "test_recurrent",
    "test_unrolled",
    "test_partials",
    "test_rowwise",
    "test_rowwise_random",
    "test_digits",
    "test_stream_protocol",
    "test_stale_protocol",
    "test_membership",
    "test_schedules",
    "test_server_death",
    "test_replicated_cluster",
    "test_going_back",
    "test_guide",
    "test_simulated_devices",
    "test_copies",
    "test_checkpoint_nodes",
    "test_typed",
    "test_runs_protocol",
    "test_detached",
    "test_whole_versions",
    "test_clients",
    "test_joining",
    "test_bad_links",
    "test_faults",
    "test_checkpoint_kills",
    "test_ranges_of_replicas",
    "test_leaving",
    "test_replay",
    "test_growth",
    "test_ranges",
    "test_adaptive",
    "test_transport",
    "test_tls",
    "test_footprint",
    "test_split",
    "test_credit",
    "test_crew",
    "test_kernel_names",
    "test_elementary",
    "test_progress",
    "test_moved",
    "test_checkpoint_rows",
    "test_coordinates",
    "test_liveness",
    "test_opening",
    "test_worker_service",
    "test_device_nodes",
    "test_fork_server",
    "test_random_steps",
    "test_split_over_servers",
    "test_faulty_buckets",
    "test_interrupts",
    "test_time_limit",
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "settled: comes to the same of the same files (tests/worlds/settled.py)")
    if SHARED_OUT and config.args == config.getini("testpaths"):
        config.args = _each_from_another(sorted(str(path) for path in TESTS.iterdir() if _has_tests(path)))


def _has_tests(path: Path) -> bool:
    return path.match("test_*.py") or any(path.glob("**/test_*.py"))


def _each_from_another(places: list[str]) -> list[str]:
    """The same in another order for each process: of tests that one has compiled the others read the bytecode."""
    number, count = os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"), os.environ["PYTEST_XDIST_WORKER_COUNT"]
    first = int(number) * len(places) // int(count)
    return places[first:] + places[:first]


def _is_simulated(item: pytest.Item) -> bool:
    return "simulated" in getattr(item, "fixturenames", ())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two more than cores: tests of processes wait for these, and who needs a kernel for who compiles it."""
    return len(os.sched_getaffinity(0)) + 2


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if SHARED_OUT:
        _longest_first(items)
    else:
        items.sort(key=_is_simulated)


def _longest_first(items: list[pytest.Item]) -> None:
    """File by file, so that no process is left with a long one at the end."""
    files = {item.path for item in items if _is_simulated(item)}
    tests, place = Counter(item.path for item in items), {stem: number for number, stem in enumerate(LONG)}
    rank = {path: (path not in files, place.get(path.stem, len(LONG)), -tests[path], path.stem) for path in tests}
    items.sort(key=lambda item: rank[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Whatever is collected stays: to look through it again and again took a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Tests that collect garbage need not look through thousands of other tests, which stay to the end."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """Nor through what files before theirs have left, compilers' objects above all: some tests did little else."""
    answer = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return answer


def _is_settled(item: pytest.Item) -> bool:
    return SHARED_OUT and item.get_closest_marker("settled") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A settled test that passed before does."""
    if not (_is_settled(pyfuncitem) and has_passed(pyfuncitem.path, pyfuncitem.name)):
        return None
    pyfuncitem.user_properties.append(SETTLED)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    answer = yield
    if _is_settled(item) and SETTLED not in item.user_properties:
        note_passed(item.path, item.name)
    return answer


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed = terminalreporter.stats.get("passed", [])
    count = sum(SETTLED in map(tuple, report.user_properties) for report in passed)
    if count:
        terminalreporter.write_line(f"{count} of them were not run again: they passed before of the very same files")


def pytest_runtestloop(session: pytest.Session) -> None:
    if SHARED_OUT or session.config.option.collectonly or not any(map(_is_simulated, session.items)):
        return
    if _simulated_before() is None:
        _simulate(session.config)


def _simulated_before() -> dict[str, Any] | None:
    return None if ON_GPU else recall("cuda_world")


def _simulate(config: pytest.Config) -> None:
    config.stash[SIMULATOR] = subprocess.Popen(
        [sys.executable, file_of("cuda_world")],
        env=environment(simulated=True),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    process = config.stash.get(SIMULATOR, None)
    if process is not None:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def simulated(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What `cuda_world` found. It is a process of its own: the simulator is chosen before Numba is imported."""
    found = _simulated_before()
    if found is not None:
        return found
    if SHARED_OUT:
        _simulate(request.config)
    process = request.config.stash[SIMULATOR]
    out, errors = process.communicate(timeout=580)  # with nothing compiled yet
    assert process.returncode == 0, errors
    told: dict[str, Any] = json.loads(out)
    if not (ON_GPU or told["differences"]):
        keep("cuda_world", told)
    return told


@pytest.fixture(scope="session", autouse=True)
def _processes_from_one_server() -> Iterator[None]:
    """What nodes and programs import is imported once, not for each of those that tests begin."""
    with fork_server.kept(), programs.kept():
        yield


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT means what it does by default, in children too, though whoever started the tests may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
