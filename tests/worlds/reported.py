"""What a process that shares in the suite tells of a test: how it went, in one message, not in six.

Of most tests there is no more to tell, and to tell it took as long as they do. What failed, was skipped or took its
time before or after the test itself is told, too.
"""

from __future__ import annotations

import os

import pytest
from _pytest.runner import runtestprotocol

LONG = 0.1  # seconds that making ready or tidying up takes, to be told


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed or report.duration > LONG:
            item.ihook.pytest_runtest_logreport(report=report)
    return True
