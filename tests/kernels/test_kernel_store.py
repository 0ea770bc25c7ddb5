"""Compiled kernels on disk: real processes, real files, and the errors of kernels that do not compile."""

from __future__ import annotations

import logging
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_world import own_tables

from flowrt.base.errors import FlowrtError, GraphError
from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Call, View, elementwise, kernel
from flowrt.kernels.language.variants import complaint
from flowrt.kernels.launch import apply_kernel, run_kernel
from flowrt.kernels.store import objects as store
from flowrt.kernels.store.folder import cache_folder
from flowrt.kernels.store.locking import locked
from flowrt.kernels.store.objects import object_code
from flowrt.kernels.store.surroundings import identity


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own; the tables are restored after it."""
    monkeypatch.setenv("FLOWRT_CACHE", str(tmp_path / "cache"))
    with own_tables():
        yield tmp_path / "cache"


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────

ASK = """
import logging, sys
logging.basicConfig(format="%(message)s", stream=sys.stdout)
logging.getLogger("flowrt.kernels").setLevel(logging.DEBUG)
import numpy as np
from flowrt.kernels.launch import run_kernel
from flowrt.kernels.language.table import elementwise
from flowrt.base.spec import Spec
NAMES = frozenset(["red", "green", "blue"])
elementwise("test_asked", lambda x: x * 3 if x > 0 else x, on=("cpu",))
if len(sys.argv) > 1:
    print("ready", flush=True)
    sys.stdin.readline()
print(run_kernel("test_asked", [np.float32([-1, 2])], [Spec("float32", (2,))], {})[0].tolist(), flush=True)
print("numba" in sys.modules, flush=True)
"""

STAYING = """
import logging, sys
logging.basicConfig(format="%(message)s", stream=sys.stdout)
stays = logging.Handler()
stays.emit = lambda record: sys.stdin.read()  # once it has said what it is about to compile
logging.getLogger().addHandler(stays)
"""


class Process:
    """A Python process that prints lines; killed at the end of the test."""

    def __init__(self, *arguments: str, **env: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-u", "-c", *arguments],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().rstrip()

    def lines(self) -> list[str]:
        """All it prints until it ends, as it should."""
        text, _ = self.popen.communicate("go\n", timeout=100)
        assert self.popen.returncode == 0, text
        return text.splitlines()

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_three_processes_that_want_a_kernel_compile_it_once(folder: Path) -> None:
    asking = [Process(ASK, "wait", PYTHONHASHSEED=str(seed)) for seed in range(3)]
    try:
        assert [p.line() for p in asking] == ["ready"] * 3
        for process in asking:
            assert process.popen.stdin is not None
            process.popen.stdin.write("go\n")
            process.popen.stdin.flush()
        said = [process.lines() for process in asking]
    finally:
        for process in asking:
            process.close()
    assert sum(line.startswith("compiling flowrt_test_asked_") for lines in said for line in lines) == 1
    assert all("[-1.0, 6.0]" in lines for lines in said)
    assert [lines[-1] for lines in said].count("True") == 1  # one alone needed the compiler
    (left,) = names(folder)
    assert left.startswith("flowrt_test_asked_")
    assert left.endswith(".o")


def test_a_process_killed_while_it_compiles_is_followed_by_the_next(folder: Path) -> None:
    with Process(STAYING + ASK) as first:
        said = first.line()
        first.kill()
    assert said.startswith("compiling flowrt_test_asked_")
    symbol = said.removeprefix("compiling ")
    assert names(folder) == [f"{symbol}.lock"]
    (folder / f"{symbol}.o.123-abcd.part").write_bytes(b"half an obj")  # as if it had been killed a little later
    with Process(ASK) as second:
        assert second.lines() == [f"compiling {symbol}", "[-1.0, 6.0]", "True"]
    assert names(folder) == [f"{symbol}.o"]


EAGER = """
import sys
import numpy as np
import flowrt.ops as fr
x = np.arange(1, 11, dtype=np.float32)
print(*[float(op(x)) for op in ({})], "numba" in sys.modules)
"""


def test_objects_of_several_processes_do_not_answer_for_each_other() -> None:
    """Numba names functions by a count per process: the sum's and the product's have the same names here."""
    for asked, answer in (("fr.sum,", "55.0 True"), ("fr.prod,", "3628800.0 True")):
        with Process(EAGER.format(asked), PYTHONHASHSEED="0") as alone:
            assert alone.lines() == [answer]
    with Process(EAGER.format("fr.sum, fr.prod"), PYTHONHASHSEED="0") as both:
        assert both.lines() == ["55.0 3628800.0 False"]  # and where all kernels are on disk, Numba is not imported


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Compiler:
    """What makes an object, and counts how often it is asked to."""

    def __init__(self, code: bytes = b"\x7fELF and so on") -> None:
        self.code, self.calls = code, 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.code


def test_an_object_is_made_once_and_read_after(folder: Path) -> None:
    compiler = Compiler()
    for _ in range(3):
        assert object_code("flowrt_x", compiler) == compiler.code
    assert compiler.calls == 1
    assert names(folder) == ["flowrt_x.o"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "flowrt_x.o").stat().st_mode) == 0o600


def replaced_by_link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def replaced_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def another_kernels(path: Path) -> None:
    object_code("flowrt_y", Compiler())
    path.with_name("flowrt_y.o").replace(path)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_a_folder_that_others_can_write_is_not_used_and_told_of(
    mode: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = Compiler()
    object_code("flowrt_x", compiler)
    folder.chmod(mode)
    for symbol in ("flowrt_x", "flowrt_y"):
        assert object_code(symbol, compiler) == compiler.code
    assert compiler.calls == 3
    assert names(folder) == ["flowrt_x.o"]
    assert [str(folder) in line and "others can write it" in line for line in caplog.messages] == [True]
    folder.chmod(0o755)
    object_code("flowrt_x", compiler)
    assert compiler.calls == 3


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "short": lambda path: path.write_bytes(path.read_bytes()[:7]),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "flipped digest": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 128])),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "another kernel's": another_kernels,
    "a link": replaced_by_link,
    "a pipe": replaced_by_pipe,
    "writable by all": lambda path: path.chmod(0o666),
    "another user's": lambda path: os.chown(path, 12345, -1),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_an_object_that_is_not_whole_or_not_ours_is_made_anew(damage: Callable[[Path], object], folder: Path) -> None:
    compiler = Compiler()
    object_code("flowrt_x", compiler)
    try:
        damage(folder / "flowrt_x.o")
    except PermissionError:
        pytest.skip("only root gives files away")
    for calls in (2, 2):
        assert object_code("flowrt_x", compiler) == compiler.code
        assert compiler.calls == calls
    assert stat.S_ISREG((folder / "flowrt_x.o").lstat().st_mode)


@pytest.mark.parametrize("place", ["/dev/null/x", "/proc/nothing/here"])
def test_without_a_folder_kernels_are_compiled_by_each_process(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLOWRT_CACHE", place)
    compiler = Compiler()
    assert object_code("flowrt_x", compiler) == compiler.code
    assert object_code("flowrt_x", compiler) == compiler.code
    assert compiler.calls == 2
    (told,) = [record.getMessage() for record in caplog.records]
    assert f"cannot be kept in {place}" in told
    assert "FLOWRT_CACHE" in told


def test_a_kernel_runs_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRT_CACHE", "/dev/null/x")
    elementwise("test_nowhere", lambda x: x - 41, on=("cpu",))
    assert run_kernel("test_nowhere", [np.array([42])], [Spec("int64", (1,))], {})[0].tolist() == [1]


def test_the_folder_is_the_given_one_or_the_users(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert cache_folder() == folder
    monkeypatch.delenv("FLOWRT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/flowrt")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/flowrt")


def test_the_oldest_of_too_many_objects_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_KEPT", 16)
    for number in range(16):
        object_code(f"flowrt_{number:02}", Compiler())
        os.utime(folder / f"flowrt_{number:02}.o", (number, number))
    assert len(names(folder)) == 16
    object_code("flowrt_new", Compiler())
    assert names(folder) == [*(f"flowrt_{number:02}.o" for number in range(2, 16)), "flowrt_new.o"]


def test_a_compilation_that_fails_leaves_nothing(folder: Path) -> None:
    def fails() -> bytes:
        raise GraphError("no")

    with pytest.raises(GraphError, match="no"):
        object_code("flowrt_x", fails)
    assert names(folder) == []
    assert object_code("flowrt_x", Compiler()) == Compiler().code


def test_a_lock_has_one_holder_although_its_file_is_removed(tmp_path: Path) -> None:
    inside, most = 0, 0
    guard, together = threading.Lock(), threading.Barrier(6)

    def work(_: int) -> None:
        nonlocal inside, most
        together.wait(20)
        for _ in range(200):
            with locked(tmp_path / "x.lock"):
                with guard:
                    inside += 1
                    most = max(most, inside)
                for _ in range(5):
                    os.sched_yield()  # to whoever else believes to hold it
                with guard:
                    inside -= 1

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert most == 1
    assert names(tmp_path) == []


# ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_threads_that_want_a_kernel_compile_and_load_it_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "flowrt.kernels")
    elementwise("test/raced!", lambda x: x + 5, on=("cpu",))  # a name that no file or symbol could have
    spec, together = Spec("int64", (3,)), threading.Barrier(8)
    (step,) = apply_kernel("test/raced!", [spec], [spec], {}).steps

    def address(_: int) -> int:
        together.wait(20)
        return step.address()

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(address, range(8)))
    assert len(found) == 1
    assert [re.sub("[0-9a-f]{32}", "#", r.getMessage()) for r in caplog.records] == ["compiling flowrt_test_raced__#"]


# ── kernels that do not compile, or fail ─────────────────────────────────────────────────────────────────────────────


def misnamed(x: Any, y: Any) -> None:
    y[0] = x[0]
    y[1] = x.nothing


def undefined(x: Any, y: Any) -> None:
    y[0] = nonesuch(x[0])  # type: ignore[name-defined]  # noqa: F821


def mistyped(x: Any, y: Any) -> None:
    y[0] = "a"


def allocating(x: Any, y: Any) -> None:
    rest = np.zeros(3)
    y[0] = rest[0] + x[0]


def temporary(x: Any, y: Any) -> None:
    y[:] = x[:] * 2 + x


def printing(x: Any, y: Any) -> None:
    print(x[0])


def drawing(x: Any, y: Any) -> None:
    y[0] = np.random.rand()


MISTAKES: list[tuple[Callable[..., Any], int, str]] = [
    (misnamed, 2, r"Unknown attribute 'nothing' of type array\(float32, 1d, C\)$"),
    (undefined, 0, "NameError: name 'nonesuch' is not defined"),
    (mistyped, 1, r"No implementation of function .*setitem.* found for signature: >>> setitem\(array\(float32"),
    (allocating, 1, r"it allocates .* declare scratch="),
    (temporary, 1, r"it allocates .* declare scratch="),
    (printing, 0, "it needs numba_gil_ensure when it runs, which no kernel has"),
    (drawing, 0, "it needs numba_"),
]


@pytest.mark.parametrize(("function", "line", "reason"), MISTAKES, ids=[f.__name__ for f, _, _ in MISTAKES])
def test_a_kernel_that_does_not_compile_says_which_where_and_why(
    function: Callable[..., Any], line: int, reason: str
) -> None:
    kernel("test_mistake")(function)
    with pytest.raises(GraphError) as caught:
        run_kernel("test_mistake", [np.ones(4, np.float32)], [Spec("float32", (4,))], {})
    text, name = str(caught.value), function.__name__
    at = function.__code__.co_firstlineno + line
    start = f"test_mistake of (float32, float32): its cpu kernel {name} (test_kernel_store.py:{at}) does not compile: "
    assert text.startswith(start)
    assert re.match(reason, text.removeprefix(start)) or re.search(reason, text)
    assert "\n" not in text
    assert caught.value.__cause__ is not None


def test_a_complaint_in_colour_is_read() -> None:
    text = "Failed in nopython mode pipeline (step: x)\n\x1b[1m\x1b[1mCannot unify\x1b[0m a and b\nDuring: Pass y"
    assert complaint(text, misnamed)[1] == "Cannot unify a and b"


def test_a_kernel_that_raises_fails_and_the_process_lives() -> None:
    def picky(x: Any, y: Any) -> None:
        y[0] = 1
        if x[0] > 2:
            raise ValueError("too much")

    def single(x: Any, y: Any) -> None:
        y[0] = x.item()  # which Numba refuses at run time for anything but one entry

    kernel("test_picky")(picky)
    kernel("test_single")(single)
    assert run_kernel("test_picky", [np.array([2])], [Spec("int64", (1,))], {})[0].tolist() == [1]
    assert run_kernel("test_single", [np.array([2])], [Spec("int64", (1,))], {})[0].tolist() == [2]
    with pytest.raises(FlowrtError, match="test_picky: the kernel raised an error"):
        run_kernel("test_picky", [np.array([3])], [Spec("int64", (1,))], {})
    with pytest.raises(FlowrtError, match="test_single: the kernel raised an error"):
        run_kernel("test_single", [np.array([3, 4])], [Spec("int64", (1,))], {})


def test_a_kernel_is_found_by_what_it_refers_to() -> None:
    """The same op with another constant is another object; so is another dtype, rank or kind of word."""

    def scaled(factor: int) -> Callable[..., None]:
        def scale(x: Any, y: Any, word: Any) -> None:
            for i in range(x.size):
                y[i] = x[i] * factor + word

        return scale

    def answer(dtype: str, word: Any) -> Any:
        x = np.ones(2, dtype)
        return run_kernel("test_scaled", [x], [Spec(dtype, (2,))], {"word": word})[0].tolist()

    def layout(inputs: Any, outputs: Any, attrs: Any) -> Call:
        return Call((View.dense((2,)), View.dense((2,))), (attrs["word"],))

    kernel("test_scaled", layout=layout)(scaled(2))
    assert answer("int64", 1) == [3, 3]
    assert answer("float64", 0.5) == [2.5, 2.5]
    kernel("test_scaled", layout=layout)(scaled(3))
    assert answer("int64", 1) == [4, 4]


# ── Numba's settings ─────────────────────────────────────────────────────────────────────────────────────────────────


def identity_with(folder: Path, **settings: str) -> str:
    """What a process in ``folder`` with these settings takes its surroundings for."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("NUMBA_")]:
            patch.delenv(name)
        for name, value in settings.items():
            patch.setenv(name, value)
        patch.chdir(folder)
        return identity.__wrapped__()  # the first answer is kept by each process


def test_settings_of_numba_that_may_change_code_are_in_every_symbol(tmp_path: Path) -> None:
    changing = ["CPU_NAME=generic", "CPU_FEATURES=+sse2", "OPT=1", "DEBUGINFO=1", "BOUNDSCHECK=1", "SLP_VECTORIZE=1"]
    told = [identity_with(tmp_path, **{f"NUMBA_{k}": v}) for k, _, v in (s.partition("=") for s in changing)]
    plain = identity_with(tmp_path)
    assert len({plain, *told}) == len(changing) + 1
    harmless = {"NUMBA_NUM_THREADS": "1", "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_ENABLE_CUDASIM": "1"}
    assert identity_with(tmp_path, **harmless) == plain
    (tmp_path / ".numba_config.yaml").write_text("opt: 1\n")
    assert identity_with(tmp_path) not in {plain, *told}
