"""``python -m flowrt.standard build``: compile the standard kernels of this machine into one bundle; ``clean`` removes.

Several processes compile, each into the cache as ever, so a build that was stopped goes on where it was; the bundle is
written at the end, at once.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from flowrt.base.errors import GraphError
from flowrt.kernels.language.variants import name_of, symbol_of, variant_code
from flowrt.kernels.store.bundle import bundle_path, write_bundle
from flowrt.kernels.store.folder import cache_folder
from flowrt.kernels.store.locking import stand_back
from flowrt.kernels.store.parts import PARTS, part_symbol
from flowrt.progress import Activity
from flowrt.standard.programs import standard_tiles, standard_variants

if TYPE_CHECKING:
    from pathlib import Path

LOOKED_EVERY = 0.1  # seconds
STILL_SECONDS = 30.0  # without a new object, after which a builder is taken to stand still
BUNDLES_KEPT = 4  # of other versions and machines that share the folder


class _Item:
    """An object of the bundle: what it is called there and in the list, its symbol, and how to have it."""

    def __init__(self, label: str, name: str | None, symbol: str, code: Callable[[], bytes]) -> None:
        self.label, self.name, self.symbol, self.code = label, name, symbol, code


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one command; answers the exit code."""
    parser = argparse.ArgumentParser(prog="python -m flowrt.standard", description="The kernels kept on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="compile the standard kernels into one bundle")
    build.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="compiling processes")
    build.add_argument("--list", action="store_true", help="say what the bundle would hold, and compile nothing")
    build.add_argument("--part", default="", metavar="I/N", help=argparse.SUPPRESS)
    build.add_argument("--background", action="store_true", help=argparse.SUPPRESS)
    commands.add_parser("clean", help="remove every compiled kernel of this user's cache")
    given = parser.parse_args(arguments)
    if given.command == "clean":
        return _clean(cache_folder())
    if given.list:
        for item in _items():
            print(item.label)
        return 0
    if given.part:
        number, _, count = given.part.partition("/")
        return _compile(list(_items())[int(number) :: int(count)])
    return _build(bundle_path(cache_folder()), max(1, given.jobs), given.background)


def _items() -> Iterator[_Item]:
    for part in (*PARTS, *standard_tiles()):
        yield _Item(part.name, part.name, part_symbol(part), part.code)
    for variant in standard_variants():
        label = f"{variant.kernel.entry} of ({', '.join(str(d) for d in variant.dtypes)})"
        code: Callable[[], bytes] = lambda variant=variant: variant_code(variant)  # type: ignore[misc]  # noqa: E731
        yield _Item(label, name_of(variant), symbol_of(variant), code)


def _build(path: Path, jobs: int, background: bool) -> int:
    with _only_builder(path, wait=not background) as mine:
        if not mine or path.exists():
            print(f"{path} is there" if mine else "another process builds it")
            return 0
        if background:
            _yield_to_everybody()
            if _compile(list(_items())):
                return 1  # whoever started this is gone
        else:
            _compile_in_parts(jobs)
        return _pack(path)


def _compile(items: Sequence[_Item]) -> int:
    """Compile ``items``, a line for each, until the input ends, which whoever started this process holds."""
    for item in items:
        if select.select([0], [], [], 0)[0] and not os.read(0, 1):
            return 1
        try:
            item.code()
        except GraphError as error:
            print(f"{item.label}: {error}", file=sys.stderr)
        with suppress(BrokenPipeError):
            print(item.label, flush=True)
    return 0


def _compile_in_parts(jobs: int) -> None:
    """Have processes compile a share each, and tell how far they are."""
    count, done, began = sum(1 for _ in _items()), 0, time.monotonic()
    command = [sys.executable, "-m", "flowrt.standard", "build", "--part"]
    quiet = {**os.environ, "FLOWRT_QUIET": "1"}  # what they do is told here
    parts = [
        subprocess.Popen([*command, f"{number}/{jobs}"], env=quiet, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for number in range(jobs)
    ]
    left = [part.stdout for part in parts if part.stdout is not None]
    try:
        while left:
            for pipe in select.select(left, [], [])[0]:
                line = pipe.readline()
                if not line:
                    left.remove(pipe)
                    continue
                done += 1
                print(f"\r{done}/{count}  {line.decode().strip()[:60]:60}", end="", flush=True)
    finally:
        for part in parts:
            for stream in (part.stdin, part.stdout):
                if stream is not None:
                    stream.close()
            part.wait()
    print(f"\r{done} kernels in {time.monotonic() - began:.0f} s{'':60}")


def _pack(path: Path) -> int:
    names: dict[str, str] = {}
    objects: dict[str, bytes] = {}
    for item in _items():
        try:
            objects[item.symbol] = item.code()
        except GraphError:
            continue
        if item.name is not None:
            names[item.name] = item.symbol
    try:
        write_bundle(path, names, objects)
    except OSError as error:
        print(f"cannot write {path}: {error}", file=sys.stderr)
        return 1
    others = sorted(path.parent.glob("standard-*.bundle"), key=lambda other: other.stat().st_mtime_ns)
    for old in others[:-BUNDLES_KEPT]:
        old.unlink(missing_ok=True)
    print(f"{path}: {len(objects)} objects, {path.stat().st_size >> 10} KiB")
    return 0


def _clean(folder: Path) -> int:
    removed = 0
    for pattern in ("flowrt_*.o", "flowrt_*.lock", "flowrt_*.part", "standard-*", "names-*"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
            removed += 1
    print(f"removed {removed} files from {folder}")
    return 0


@contextmanager
def _only_builder(path: Path, wait: bool) -> Iterator[bool]:
    """Hold the lock of the bundle at ``path``; False where another does and this one is not to wait.

    Who waits does so until the other has built it, or stands still: then both do, and the bundle is written whole.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path.with_suffix(".building"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with Activity("waiting for another process that builds the standard kernels"):
            while not (mine := _try_lock(handle)) and wait and not path.exists() and not _stands_still(path.parent):
                time.sleep(LOOKED_EVERY)
        yield mine or wait
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stands_still(folder: Path) -> bool:
    """Whether nobody has put an object there for a while."""
    return time.time() - folder.stat().st_mtime > STILL_SECONDS


def _yield_to_everybody() -> None:
    """Run only where nobody else wants the core, and let nobody wait for what is being made then."""
    stand_back()
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        os.nice(19)


if __name__ == "__main__":
    sys.exit(main())
