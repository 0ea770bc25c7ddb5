"""The whole suite, shared out file by file to processes that are forked once its tests are collected.

To collect takes as long as thousands of tests do, so that is done once. A process takes the file that is next when it
has done with one, and tells of each test in one message: of most there is no more to tell than that it passed. A test
that nobody has told of in the end, since its process ended at it, has failed.
"""

from __future__ import annotations

import os
import traceback
from contextlib import suppress
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytest
from _pytest.runner import runtestprotocol

LONG = 0.1  # seconds that making ready or tidying up takes, to be told
MOST = 8  # processes
NUMBER = 2  # bytes of a file's number

if TYPE_CHECKING:
    from pathlib import Path

Files: TypeAlias = "list[list[pytest.Item]]"

_telling: list[Connection] = []  # in a process that has a share: its end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shared", action="store_true", help="share the files of tests out to some processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    if not config.option.shared or config.option.collectonly or session.testsfailed:
        return None  # pytest's own lists the tests, or says what cannot be collected
    _share_out(session)
    return True


def _share_out(session: pytest.Session) -> None:
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    queue, writing = os.pipe()
    os.write(writing, b"".join(number.to_bytes(NUMBER, "big") for number in range(len(files))))
    os.close(writing)
    folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    processes: dict[Connection, int] = {}
    try:
        for number in range(min(len(os.sched_getaffinity(0)) + 2, MOST)):  # some wait for the processes of their tests
            receiving, sending = Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                for end in (receiving, *processes):
                    end.close()
                _have_share(session, files, queue, sending, folder / str(number))
            sending.close()
            processes[receiving] = pid
        os.close(queue)
        _report(session, {*processes})
    finally:
        codes = [_end(*each) for each in processes.items()]
    if any(codes):
        session.shouldfail = f"the processes that shared the tests ended with {codes}"
        raise session.Failed(session.shouldfail)


def _report(session: pytest.Session, ends: set[Connection]) -> None:
    """What is told of tests, until all has been; those that nobody has told of then."""
    config, left = session.config, {item.nodeid: item for item in session.items}
    while ends:
        for end in wait(ends):
            assert isinstance(end, Connection)
            try:
                told = end.recv()
            except EOFError:
                ends.remove(end)
                continue
            for data in told:
                report = config.hook.pytest_report_from_serializable(config=config, data=data)
                config.hook.pytest_runtest_logreport(report=report)
                left.pop(report.nodeid, None)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
    for item in left.values():
        what = "its process ended at it, or at a test of the same file before it"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", what, "call")
        config.hook.pytest_runtest_logreport(report=report)


def _end(end: Connection, pid: int) -> int:
    """Have a process end, if it has not, at the test after the one that it is at; its exit code."""
    end.close()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ── who has a share ──────────────────────────────────────────────────────────────────────────────────────────────────


def _have_share(session: pytest.Session, files: Files, queue: int, end: Connection, folder: Path) -> None:
    """Run files until there are no more, and end this process."""
    code = 1
    try:
        with suppress(BrokenPipeError, KeyboardInterrupt):  # nobody asks any more
            _run(session, files, queue, end, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(session: pytest.Session, files: Files, queue: int, end: Connection, folder: Path) -> None:
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # into files that all processes have in common
    capture.start_global_capturing()
    capture.suspend_global_capture()
    folder.mkdir(0o700)
    session.config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    np.random.seed()  # no two draw the same; Python's own does that by itself
    _telling.append(end)
    try:
        while taken := os.read(queue, NUMBER):
            items = files[int.from_bytes(taken, "big")]
            for item, following in zip(items, [*items[1:], session], strict=True):  # ends what is of this file alone
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    finally:
        session._setupstate.teardown_exact(None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """What failed, was skipped or took its time before or after the test itself is told, too."""
    if not _telling:
        return None
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    worth = [each for each in reports if each.when == "call" or not each.passed or each.duration > LONG]
    config = item.config
    _telling[0].send([config.hook.pytest_report_to_serializable(config=config, report=each) for each in worth])
    return True
