"""Small faults in the pure files, one at a time: which of them their own tests find.

    scripts/mutants                            # a sample of every file's: minutes
    scripts/mutants sched/host/arena net/wire/frames     # these files'
    scripts/mutants --each 1000 sched/host/queues   # all there are

A mutant is one comparison, operator, constant or condition changed, or one statement left out. Only the file's own
tests look at it, in a process that has read the mutant in the file's place; one that takes too long is found, too.
Those that survive are printed with their lines: to be killed by a test, or known to come to the same.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.util
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from places import ROOT, file_of

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from pathlib import Path

PACKAGE = ROOT / "flowrt"
PROTOCOL = ("test_quorum",)  # the searches of all states find more, in more time
TESTS = {
    "indexing": ("test_indexing",),
    "sched/machine": ("test_machine",),
    "sched/topology": ("test_machine",),
    "sched/versions/quorum": PROTOCOL,
    "sched/versions/book": PROTOCOL,
    "sched/versions/coordinator": (*PROTOCOL, "test_staleness"),
    "sched/versions/shard": (*PROTOCOL, "test_staleness"),
    "sched/versions/standing": (*PROTOCOL, "test_staleness"),
    **{
        f"sched/policies/{name}": ("test_policies",)
        for name in ("policy", "asking", "travel", "all_of", "first_of", "deadline")
    },
    "sched/versions/opening": ("test_opening",),
    "sched/versions/handing": ("test_handing",),
    "sched/versions/steady": ("test_steady",),
    "sched/versions/retelling": ("test_retelling",),
    "sched/versions/batched": ("test_simulation",),
    "sched/versions/ledger": PROTOCOL,
    "sched/footprint": ("test_footprint",),
    "sched/policies/asynchronous": ("test_staleness",),
    "sched/policies/bounded_staleness": ("test_staleness",),
    "sched/policies/local_steps": ("test_local_policy",),
    "sched/policies/adaptive": ("test_adaptive",),
    "sched/policies/arrivals": ("test_adaptive",),
    "sched/policies/reading": ("test_adaptive",),
    "sched/policies/spread": ("test_adaptive",),
    "sched/policies/noise": ("test_adaptive",),
    "sched/host/arena": ("test_arena",),
    "sched/regions/regions": ("test_regions",),
    "sched/regions/lives": ("test_lives", "test_sharing", "test_tape"),
    "sched/tape/schedule": ("test_schedule",),
    "sched/regions/sharing": ("test_sharing",),
    "sched/regions/cost": ("test_cost",),
    "sched/tape/gathering": ("test_many",),
    "sched/host/rendezvous": ("test_rendezvous",),
    "sched/host/queues": ("test_queues", "test_orders"),
    "sched/host/orders": ("test_orders",),
    "sched/host/credit": ("test_credit",),
    "sched/alone": ("test_alone",),
    "sched/ahead": ("test_making_ahead", "test_credit"),
    "sched/demand": ("test_demand", "test_credit"),
    "sched/replica/local": ("test_local_rounds",),
    "sched/host/snapshots": ("test_snapshots",),
    "sched/host/variables": ("test_variables", "test_lending"),
    "net/wire/frames": ("test_frames",),
    "net/master/ends": ("test_ends",),
    "net/master/steps": ("test_ends", "test_between", "test_pushing"),
    "net/node/started": ("test_ends", "test_between", "test_pushing"),
    "net/master/closing": ("test_closing",),
    "net/master/liveness": ("test_liveness",),
    "net/wire/messages": ("test_messages",),
    "net/wire/brief": ("test_brief",),
    "net/wire/handshake": ("test_handshake",),
    "net/door/heads": ("test_handshake",),
    "net/door/failures": ("test_handshake",),
}
SECONDS = 60  # of one mutant's tests, and more than they ever take

# ── mutants ──────────────────────────────────────────────────────────────────────────────────────────────────────────

OTHER: dict[type[Any], type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
DECIDING = (ast.If, ast.IfExp, ast.While)


def mutants(tree: ast.Module) -> Iterator[tuple[int, str, ast.Module]]:
    """Each mutant of a module: the line, what was done, and the whole."""
    for number, node in enumerate(nodes := list(_decisions(tree))):
        for what, change in _changes(node):
            mutant = copy.deepcopy(tree)
            change(list(_decisions(mutant))[number])
            yield nodes[number].lineno, what, ast.fix_missing_locations(mutant)


def _decisions(node: ast.AST) -> Iterator[Any]:
    """The nodes below that decide something: no annotation, message or documentation."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "keywords" if _is_class(node) else ""):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)) or _for_types(
                child
            ):
                continue
            if isinstance(child, ast.AST):
                if hasattr(child, "lineno"):
                    yield child
                yield from _decisions(child)


def _for_types(node: Any) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _is_class(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef)


def _changes(node: Any) -> Iterator[tuple[str, Callable[[Any], None]]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        yield "compares otherwise", lambda n: n.ops.__setitem__(0, OTHER[type(n.ops[0])]())
    if isinstance(node, (ast.BoolOp, ast.BinOp, ast.AugAssign)) and type(node.op) in OTHER:
        yield "another operator", lambda n: setattr(n, "op", OTHER[type(n.op)]())
    if isinstance(node, DECIDING):
        yield "the other case", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    if isinstance(node, ast.comprehension) and node.ifs:
        yield "no condition", lambda n: setattr(n, "ifs", [])
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "the other truth", lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "one more", lambda n: setattr(n, "value", n.value + 1)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "left out", lambda n: setattr(n, "value", ast.Constant(None))
    if isinstance(node, ast.AugAssign):
        yield (
            "not changed",
            lambda n: setattr(n, "value", ast.Constant(0 if isinstance(n.op, (ast.Add, ast.Sub)) else 1)),
        )
    if isinstance(node, (ast.Continue, ast.Break)):
        yield "goes on", lambda n: setattr(n, "__class__", ast.Pass)


# ── tried ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=list(TESTS), metavar="FILE", help="as in sched/host/arena")
    parser.add_argument("--each", type=int, default=20, help="mutants of each file, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    import numpy  # noqa: F401  (each mutant's process has it)
    import pytest  # noqa: F401

    for file in options.files:
        source = (PACKAGE / f"{file}.py").read_text()
        every = list(mutants(ast.parse(source)))
        drawn = sorted(random.Random(f"{options.seed} {file}").sample(range(len(every)), min(options.each, len(every))))
        found, began = 0, time.monotonic()
        for number in drawn:
            line, what, tree = every[number]
            if is_found(file, tree):
                found += 1
            else:
                print(f"    {file}.py:{line}: {what}: {source.splitlines()[line - 1].strip()}", flush=True)
        seconds = time.monotonic() - began
        print(f"{file:20}{len(every):6} mutants, {len(drawn):4} tried, {found:4} found, {seconds:5.0f} s", flush=True)


def is_found(file: str, tree: ast.Module) -> bool:
    """Whether the file's tests fail with ``tree`` in its place."""
    child = os.fork()
    if not child:
        os.setsid()
        os._exit(_tests_fail(file, tree))
    for _ in range(SECONDS * 20):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) != 0
        time.sleep(0.05)
    os.killpg(child, 9)
    os.waitpid(child, 0)
    return True


def _tests_fail(file: str, tree: ast.Module) -> int:
    import pytest

    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    sys.meta_path.insert(0, _Mutant("flowrt." + file.replace("/", "."), PACKAGE / f"{file}.py", tree))
    tests = [file_of(name) for name in TESTS[file]]
    return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--no-header", *tests]))


class _Mutant:
    """Finds the one module whose code is another's."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self._name, self._path, self._tree = name, path, tree

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(name, self._path, loader=self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        exec(compile(self._tree, str(self._path), "exec"), module.__dict__)


if __name__ == "__main__":
    main()
