"""Small faults in the pure files, one at a time: which of them their own tests find.

    scripts/mutants                            # a sample of every file's: minutes
    scripts/mutants sched/host/arena net/wire/frames     # these files'
    scripts/mutants --each 1000 sched/host/queues   # all there are

A mutant is one comparison, operator, constant or condition changed, or one statement left out. Only the file's own
tests look at it: they are collected once, and for each mutant a process forked from there puts it in the file's place
and runs them. One with which they take far longer is found late. Those that survive are printed with their lines: to
be killed by a test, or known to come to the same.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.util
import inspect
import itertools
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import IO, TYPE_CHECKING, Any

from places import ROOT, file_of

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

PACKAGE = ROOT / "flowrt"
PROTOCOL = ("test_quorum",)  # the searches of all states find more, in more time
TESTS = {
    "indexing": ("test_indexing", "test_sorting"),
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
    "sched/versions/opening": ("test_opening_runs",),
    "sched/versions/handing": ("test_handing",),
    "sched/versions/steady": ("test_steady",),
    "sched/versions/retelling": ("test_retelling",),
    "sched/policies/recorded": ("test_retelling",),
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
    "sched/regions/misfits": ("test_misfits",),
    "sched/regions/cost": ("test_cost",),
    "sched/tape/gathering": ("test_many",),
    "sched/host/rendezvous": ("test_rendezvous",),
    "sched/host/queues": ("test_queues", "test_orders"),
    "sched/host/orders": ("test_orders",),
    "sched/host/credit": ("test_credit",),
    "sched/alone": ("test_alone",),
    "sched/ahead": ("test_making_ahead",),
    "sched/demand": ("test_demand",),
    "sched/replica/local": ("test_local_rounds",),
    "sched/host/snapshots": ("test_snapshots",),
    "sched/host/variables": ("test_variables", "test_lending"),
    "net/wire/frames": ("test_frames", "test_brief"),
    "net/master/ends": ("test_ends",),
    "net/master/steps": ("test_open_steps",),
    "net/node/started": ("test_started",),
    "net/master/closing": ("test_closing",),
    "net/master/liveness": ("test_liveness",),
    "net/wire/messages": ("test_messages",),
    "net/wire/brief": ("test_brief",),
    "net/wire/handshake": ("test_handshake",),
    "net/door/heads": ("test_handshake",),
    "net/door/failures": ("test_handshake",),
    "net/wire/briefly": ("test_brief",),
    "net/wire/steps": ("test_brief",),
    "passes/send_early": ("test_send_early",),
    "passes/widen": ("test_widen",),
    "passes/stored": ("test_stored",),
    "passes/bag": ("test_bag",),
    "passes/arrange": ("test_arrange",),
    "passes/line_up": ("test_line_up",),
    "passes/hasten": ("test_hasten",),
    "passes/simplify": ("test_simplify",),
    "passes/paddings": ("test_paddings",),
    "passes/order_state": ("test_order_state",),
    "passes/earliest_finish": ("test_earliest_finish",),
    "passes/partition": ("test_partition", "test_bundling"),
    "passes/place": ("test_place", "test_arrange"),
    "passes/bundle": ("test_bundling",),
    "passes/epilogue": ("test_epilogue",),
    "passes/gather": ("test_gather",),
    "passes/contract": ("test_contract",),
    "passes/count_iterations": ("test_count_iterations",),
    "sched/regions/leading": ("test_leading",),
    "sched/policies/caps": ("test_caps",),
    "sched/visits": ("test_visits",),
    "sched/replica/stopwatch": ("test_stopwatch",),
    "sched/loops/pieces": ("test_pieces",),
    "serving/batching": ("test_batching",),
    "serving/joining": ("test_batching",),
    "summary/events": ("test_summary_writer",),
    "train/gathers": ("test_gathers",),
    "train/times": ("test_attribution",),
    "tracing/clocks": ("test_clocks",),
    "ledger/account": ("test_ledger",),
    "net/links": ("test_links",),
    "net/door/tokens": ("test_admission",),
    "net/stream/outbox": ("test_posting",),
    "sched/drivers/closed": ("test_closed",),
    "sched/drivers/packing": ("test_packing",),
    "sched/server/combining": ("test_combining",),
    "sched/tape/apart": ("test_apart",),
    "train/batches": ("test_batches",),
}
SECONDS = 300  # of one file's tests, and more than they ever take
FOUND, LATE, SURVIVES, ELSEWHERE = OUTCOMES = ("found", "late", "survive", "elsewhere")
WRAPPED = ("__wrapped__", "__func__", "fget", "fset", "func")  # where what decorates a function has it

# ── mutants ──────────────────────────────────────────────────────────────────────────────────────────────────────────

OTHER: dict[type[Any], type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
DECIDING = (ast.If, ast.IfExp, ast.While)
UNDECIDED = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)
Drawn = tuple[int, str, ast.Module]


def mutants(tree: ast.Module) -> Iterator[Drawn]:
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
            if isinstance(child, UNDECIDED) or _for_types(child) or _asserts(child):
                continue
            if isinstance(child, ast.AST):
                if hasattr(child, "lineno"):
                    yield child
                yield from _decisions(child)


def _for_types(node: Any) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _asserts(node: Any) -> bool:
    """Whether it is zip's ``strict``, which only raises."""
    return isinstance(node, ast.keyword) and node.arg == "strict"


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
            lambda n: setattr(n, "value", ast.Constant(0 if isinstance(n.op, (ast.Add, ast.Sub, ast.BitOr)) else 1)),
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
    import numpy  # noqa: F401  (each file's process has it)
    import pytest  # noqa: F401

    for file in options.files:
        _try(file, random.Random(f"{options.seed} {file}"), options.each)


def _try(file: str, draw: random.Random, each: int) -> None:
    """Print what becomes of some mutants of a file."""
    tree = ast.parse(source := (PACKAGE / f"{file}.py").read_text())
    every, lines, began = list(mutants(tree)), source.splitlines(), time.monotonic()
    drawn = [every[number] for number in sorted(draw.sample(range(len(every)), min(each, len(every))))]
    count: Counter[str] = Counter()
    for (line, what, _), outcome in _with_outcomes(file, tree, drawn):
        count[outcome] += 1
        if outcome == SURVIVES:
            print(f"    {file}.py:{line}: {what}: {lines[line - 1].strip()}", flush=True)
    if drawn and not count:
        print(f"    {file}.py: its tests fail as it is", flush=True)
    told = ", ".join(f"{count[outcome]:4} {outcome}" for outcome in (FOUND, LATE, SURVIVES))
    print(f"{file:24}{len(every):6} mutants: {told}, {time.monotonic() - began:5.0f} s", flush=True)


def _with_outcomes(file: str, tree: ast.Module, drawn: list[Drawn]) -> Iterator[tuple[Drawn, str]]:
    """Each mutant with what the file's tests make of it; none, if they fail as it is."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.close(reading)
        _run_tests(file, _Trying(file, tree, [mutant for _, _, mutant in drawn], os.fdopen(writing, "w")))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        for one, line in zip(drawn, told, strict=False):
            outcome = line.strip()
            yield one, _outcome_alone(file, one[2]) if outcome == ELSEWHERE else outcome
    os.waitpid(child, 0)


def _run_tests(file: str, *plugins: Any) -> bool:
    """Whether the file's tests pass; what they print goes nowhere."""
    import pytest

    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    tests = [file_of(name) for name in TESTS[file]]
    return pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--no-header", *tests], plugins) == 0


class _Trying:
    """A plugin of pytest that runs what was collected for each mutant, and says on ``told`` what comes of it.

    That is `ELSEWHERE` for one that what is imported already cannot be made into.
    """

    def __init__(self, file: str, tree: ast.Module, changed: list[ast.Module], told: IO[str]) -> None:
        self._file, self._changed, self._told = file, changed, told
        self._path = str(PACKAGE / f"{file}.py")
        self._code = compile(tree, self._path, "exec")

    def pytest_runtestloop(self, session: Any) -> bool:
        began = time.monotonic()
        if session.testsfailed or _outcome(partial(self._runs, session, None), SECONDS) != SURVIVES:
            return True
        seconds = 10 + 4 * (time.monotonic() - began)
        for mutant in self._changed:
            print(_outcome(partial(self._runs, session, mutant), seconds), file=self._told, flush=True)
        return True

    def _runs(self, session: Any, mutant: ast.Module | None) -> str:
        if mutant is not None and not self._put_in_place(mutant):
            return ELSEWHERE
        for item, later in itertools.pairwise([*session.items, None]):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=later)
            if session.testsfailed:
                break
        session.config.hook.pytest_sessionfinish(session=session, exitstatus=0)
        return FOUND if session.testsfailed else SURVIVES

    def _put_in_place(self, mutant: ast.Module) -> bool:
        """Give the functions that differ the mutant's code, whoever holds them; answers whether that was possible."""
        module = sys.modules.get(_module_of(self._file))
        if module is None:
            sys.meta_path.insert(0, _Mutant(self._file, mutant))
            return True
        for code in _changed_functions(self._code, compile(mutant, self._path, "exec")):
            function = None if code is None else _function_of(module, code)
            if function is None:
                return False
            try:
                function.__code__ = code
            except ValueError:  # of other variables around it
                return False
        return True


def _changed_functions(before: CodeType, after: CodeType) -> Iterator[CodeType | None]:
    """What the functions that differ are after a change; None for a change that is not in a function."""
    if before.replace(co_consts=()) != after.replace(co_consts=()):
        yield None
    for old, new in zip(before.co_consts, after.co_consts, strict=False):
        if old == new:
            continue
        if not isinstance(new, CodeType):
            yield None
        elif new.co_flags & inspect.CO_OPTIMIZED:
            yield new
        else:  # a class
            yield from _changed_functions(old, new)


def _function_of(module: Any, code: CodeType) -> Any:
    """The function at the place of ``code``, whatever it is wrapped in."""
    found = module
    for name in code.co_qualname.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    look = [found]
    while look:
        found = look.pop()
        own = getattr(found, "__code__", None)
        if own is not None and (own.co_qualname, own.co_firstlineno) == (code.co_qualname, code.co_firstlineno):
            return found
        look += [inner for name in WRAPPED if (inner := getattr(found, name, None)) is not None]
    return None


def _outcome_alone(file: str, mutant: ast.Module) -> str:
    """What the file's tests make of a mutant that is in its place from the beginning."""

    def runs() -> str:
        sys.meta_path.insert(0, _Mutant(file, mutant))
        return SURVIVES if _run_tests(file) else FOUND

    return _outcome(runs, SECONDS)


def _outcome(runs: Callable[[], str], seconds: float) -> str:
    """What a process that ``runs`` tests comes to."""
    if not (child := os.fork()):
        os.setsid()
        try:
            os._exit(OUTCOMES.index(runs()))
        finally:  # an error that is no test's
            os._exit(OUTCOMES.index(FOUND))
    end = time.monotonic() + seconds
    done = 0
    while not done and time.monotonic() < end:
        time.sleep(0.01)
        done, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, 9)  # and what it started
    if not done:
        os.waitpid(child, 0)
        return LATE
    code = os.waitstatus_to_exitcode(status)
    return OUTCOMES[code] if 0 <= code < len(OUTCOMES) else FOUND


def _module_of(file: str) -> str:
    return "flowrt." + file.replace("/", ".")


class _Mutant:
    """Finds the one module whose code is another's."""

    def __init__(self, file: str, tree: ast.Module) -> None:
        self._name, self._path, self._tree = _module_of(file), PACKAGE / f"{file}.py", tree

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
