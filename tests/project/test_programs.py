"""Programs that are forked for tests are what they would be as processes from the start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from process_world import alive
from programs import python

if TYPE_CHECKING:
    from pathlib import Path

PRINTS = """
import os, sys
print(sys.argv, sys.path[0], os.getcwd(), __name__, os.environ["GIVEN"], "flowrt" in sys.modules, sys.stdin.read())
sys.exit(3)
"""
WAITS = """
import os, sys, time
print(os.getpid(), flush=True)
try:
    while True:
        time.sleep(100)
except KeyboardInterrupt:
    sys.exit(7)
"""


def run(begun: list[str], *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*begun, *arguments], capture_output=True, text=True, timeout=50, **options)


@pytest.mark.parametrize("way", ["code", "module", "file"])
def test_it_finds_what_one_of_the_interpreter_does(way: str, tmp_path: Path) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    arguments = {"code": ["-c", PRINTS], "module": ["-m", "prints"], "file": ["prints.py"]}[way]
    given: dict[str, Any] = {"cwd": tmp_path, "input": "said", "env": {**os.environ, "GIVEN": "given"}}
    forked, plain = (run(begun, *arguments, "a", "b", **given) for begun in (python(), [sys.executable]))
    assert forked.stdout == plain.stdout.replace("given False", "given True")
    assert (forked.returncode, forked.stderr) == (plain.returncode, plain.stderr) == (3, "")


def test_where_python_would_import_otherwise_it_is_the_interpreters_own() -> None:
    shows = ["-c", "import sys; print('flowrt' in sys.modules, sys.flags.bytes_warning)"]
    assert run(python(), *shows).stdout == "True 0\n"
    assert run(python(), "-b", *shows).stdout == "False 1\n"
    assert run(python(), *shows, env={**os.environ, "NUMBA_DEBUG": "0"}).stdout == "False 0\n"
    large = {f"LARGE_{number}": number * "x" for number in range(100_000, 100_003)}  # in one message there is no room
    assert run(python(), *shows, env={**os.environ, **large}).stdout == "False 0\n"
    assert run(python(), *shows).stdout == "True 0\n"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 7), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
@pytest.mark.usefixtures("interruptible")
def test_it_ends_by_signals_to_who_stands_for_it(number: int, code: int) -> None:
    with subprocess.Popen([*python(), "-c", WAITS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        program = int(process.stdout.readline())
        assert alive(program)
        process.send_signal(number)
        assert process.stdout.read() == ""  # which it has open for as long as it lives
        assert process.wait(20) == code


def test_it_ignores_interrupts_where_who_began_it_does() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        told = run(python(), "-c", "import signal; print(signal.getsignal(signal.SIGINT).name)")
    finally:
        signal.signal(signal.SIGINT, before)
    assert told.stdout == "SIG_IGN\n"


def test_an_error_ends_it_as_the_interpreter_would() -> None:
    done = run(python(), "-c", "1 / 0")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
