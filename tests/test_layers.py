"""The architecture as a test: who may import whom, and which file owns which side effect."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache

import pytest
from places import TESTS

from flowrt.base.package import PACKAGE

# each may import those to its left
FLOOR = [
    "base/package",
    "base/pages",
    "base/collection",
    "base/valueclass",
    "base/telling",
    "base/errors",
    "base/tracebacks",
    "base/spec",
    "base/plain",
    "base/device",
    "base/codec",
    "base/traits",
    "base/plan",
    "base/attributes",
    "base/alike",
    "base/parameters",
    "base/familiar",
    "base/locating",
    "base/partitioning",
]
FAMILIES = [
    "source",
    "comparison",
    "elementwise",
    "activation",
    "flow",
    "precision",
    "reduce",
    "shape",
    "running",
    "slices",
    "index",
    "entries",
    "sorting",
    "routing",
    "parts",
    "linalg",
    "contraction",
]
FAMILIES += [
    "random",
    "layers",
    "recurrent",
    "nn",
    "rows",
    "starting",
    "state",
    "queues",
    "fused",
    "body",
    "control",
    "loops",
]
# each may import those to its left
MEANING = [*FLOOR, "op", "indexing", "operators", "graph", "typed", "subgraph", "ops", "gradients", "passes"]
MAY_IMPORT = {
    "op": FLOOR,
    "indexing": [*FLOOR, "op"],
    "operators": [*FLOOR, "op", "indexing"],
    "graph": [*FLOOR, "op", "operators"],
    "typed": [*FLOOR, "op", "graph"],
    "subgraph": [*FLOOR, "op", "graph"],
    "ops": [*FLOOR, "op", "indexing", "operators", "graph", "typed", "subgraph", "ops"],
    "gradients": [*FLOOR, "op", "graph", "subgraph", "ops"],
    "passes": [*FLOOR, "op", "graph", "subgraph", "ops", "gradients", "passes"],
    "progress": FLOOR,
    "usable": FLOOR,
    "files": [],
    "delays": [*FLOOR, "delays"],
    "data": [*FLOOR, "data"],
    "kernels": [*FLOOR, "progress", "usable", "files", "kernels"],
    "checkpoints": [*FLOOR, "checkpoints/folders", "checkpoints"],
    "ledger": [*FLOOR, "checkpoints/folders", "files", "sched", "ledger"],
    "sched": [*FLOOR, "op", "usable", "delays", "data", "kernels", "checkpoints", "sched"],
    "net": [*FLOOR, "sched", "net"],
    "tracing": [*FLOOR, "finishing", "misuse", "sched", "tracing"],
}
HEAD = {"ledger/__main__"}  # a command line belongs to the head, wherever Python wants it to lie
# each may import, when it is loaded, those before it; a place in a place is the nearer one
ROOMS = [
    [
        "kernels/store",
        "kernels/language",
        "kernels/elementary",
        "kernels/tiles",
        "kernels/tiles/convolution",
        "kernels/teams",
        "kernels/launch",
        "kernels/composite",
        "kernels/ops",
        "kernels/nvidia",
        "kernels/cuda",
        "kernels/fusion",
        "kernels/run",
        "kernels/emit",
        "kernels/emit/launches",
    ],
    [
        "sched/policies",
        "sched/versions",
        "sched/host",
        "sched/regions",
        "sched/loops/structured",  # what they are, wherever they run
        "sched/devices",
        "sched/host/host",  # which opens the devices
        "sched/loops",
        "sched/tape",
        "sched",
        "sched/drivers",
        "sched/replica",
        "sched/server",
        "sched/runs",
    ],
    ["net/wire", "net/stream", "net/door", "net", "net/node", "net/master"],
    ["base", "op", "operators", "graph", "ops/structure", "cluster", "session", "train"],
    ["base", "op", "operators", "graph", "ops", "summary/told", "summary/events", "summary"],
    ["base", "cluster", "launch"],
]
MOST_FILES = 20  # in a room
WITH_ROOMS = ["base", "cluster", "kernels", "net", "onnx", "sched", "serving", "session", "summary", "tracing"]
WITHOUT_A_COMPILER = ["kernels/store/loading", "kernels/store/surroundings"]  # where they cannot do their work without
# module → the only places that may import it
OWNERS = {
    "numba": ["kernels/emit", "kernels/cuda"],
    "llvmlite": ["kernels/emit", *WITHOUT_A_COMPILER],
    "cuda": ["kernels/nvidia/calls", "kernels/nvidia/library"],
    "scipy": [],
    "aiohttp": ["net/door/heads", "serving/http"],
    "cryptography": ["net/door/certificates", "cluster/keys"],
    "msgpack": ["base/codec"],
    "fsspec": ["checkpoints/remote"],
    "tensorboard": ["summary/events", "summary/event_file", "summary/graph_def", "summary/training"],
    "google_crc32c": ["summary/event_file"],
    "PIL": ["summary/events"],
    "pyarrow": ["delays/parquet", "data/parquet_files"],
    "threading": [
        "sched/host/lanes",
        "sched/host/memory",
        "sched/host/segments",
        "sched/host/spares",
        "sched/host/tracer",
        "sched/host/variables",
        "session/blocking",
        "kernels/store/objects",
        "kernels/store/locking",
        "kernels/store/compiling",
        "progress",
        "kernels/store/background",
        "kernels/run/pools",
        "kernels/cuda/driver",
        "kernels/cuda/simulator",
        "launch/ray_node",
        "summary/event_file",
        "summary/writer",
    ],
    "concurrent": ["sched/host/lanes"],
    "uvloop": ["session/blocking"],
    "rich": ["progress"],
    "ray": ["launch"],
    "onnx": ["onnx"],
    # what makes code of bytes, which nothing here may
    "pickle": [],
    "marshal": [],
    "shelve": [],
    "dill": [],
    "cloudpickle": [],
    "joblib": [],
}
PURE = [
    *MEANING,
    "sched/policies",
    "sched/versions",
    "sched/regions",
    "sched/machine",
    "sched/topology",
    "sched/alone",
    "sched/footprint",
    "sched/host/orders",
    "sched/loops/pieces",
    "sched/host/arena",
    "sched/tape/schedule",
    "sched/host/credit",
    "sched/demand",
    "sched/ahead",
    "session/restoring",
    "cluster/hosts",
    "cluster/environment",
    "simulation",
    "session/building_order",
    "net/master/liveness",
    "ledger/frames",
    "ledger/records",
    "ledger/account",
    "checkpoints/manifest",
    "checkpoints/older",
    "checkpoints/retention",
    "net/wire/frames",
    "net/wire/handshake",
    "net/door/heads",
    "net/door/failures",
    "net/wire/brief",
    "net/wire/briefly",
    "net/wire/steps",
    "net/master/closing",
    "net/master/ends",
    "kernels/cuda/walk",
    "kernels/nvidia/products",
    "kernels/nvidia/convolutions",
    "tracing/clocks",
    "tracing/timeline",
    "serving/batching",
    "serving/cut",
    "serving/int8",
    "serving/joining",
    "serving/metrics",
    "serving/probing",
    "serving/protocol",
    "serving/signature",
    "delays",
    "data",
]
IMPURE = {"asyncio", "time", "random", "socket", "threading", "concurrent", "subprocess", "secrets"}


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MODULES = [str(p.relative_to(PACKAGE).with_suffix("")) for p in sorted(PACKAGE.rglob("*.py"))]
KNOWN = set(MODULES)


@cache  # read when a test asks: every process that shares in the tests collects all of them
def imported(module: str) -> frozenset[str]:
    """Every module, and every name of a package, imported anywhere in the file, function bodies included."""
    return frozenset(imports(nodes_of(module)))


@cache
def used(module: str) -> frozenset[str]:
    """The modules of this package that one imports anywhere, by their paths."""
    return frozenset(path_of(name) for name in imported(module) if name.startswith("flowrt."))


@cache
def loaded_with(module: str) -> frozenset[str]:
    """The modules of this package that are imported when one is."""
    names = imports(parsed(module).body)
    return frozenset(path_of(name) for name in names if name.startswith("flowrt."))


def path_of(name: str) -> str:
    """``sched/tape/tape`` of the dotted name of that module, or of what stands in it."""
    path = name.removeprefix("flowrt.").replace(".", "/")
    while path not in KNOWN and f"{path}/__init__" not in KNOWN:
        path = path.rpartition("/")[0]
        assert path, f"{name}: import it from the file that has it"
    return path


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text())


@cache
def nodes_of(module: str) -> list[ast.AST]:
    """What tests ask about of a whole file, in one walk."""
    asked = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.Call, *FUNCTIONS)
    return [node for node in ast.walk(parsed(module)) if isinstance(node, asked)]


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            package = node.module.replace(".", "/").removeprefix("flowrt").removeprefix("/")
            if node.module == "flowrt" or f"{package}/__init__" in KNOWN:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


def within(module: str, places: Collection[str]) -> bool:
    """Whether it is one of these, or lies in one."""
    return any(module == place or module.startswith(f"{place}/") for place in places)


def room(module: str) -> str:
    """The place of a table that a module lies in: the nearest one around it."""
    around = [place for place in MAY_IMPORT if within(module, [place])]
    return max(around, key=len, default="")


def test_every_file_imports_only_what_its_layer_may() -> None:
    wrong = {}
    for module in MODULES:
        inside = {other for other in used(module) if other}
        if module in FLOOR:
            wrong[module] = inside - set(FLOOR[: FLOOR.index(module)])
        elif room(module) and module not in HEAD:
            allowed = [*MAY_IMPORT[room(module)], room(module)]
            wrong[module] = {other for other in inside if not within(other, allowed)}
    assert {module: others for module, others in wrong.items() if others} == {}


def place_of(module: str, order: list[str]) -> int:
    """Which of the places a module lies in, by number; -1 if in none."""
    around = [place for place in order if within(module, [place])]
    return order.index(max(around, key=len)) if around else -1


@pytest.mark.parametrize("order", ROOMS, ids=lambda order: order[0])
def test_a_room_is_loaded_with_those_before_it_alone(order: list[str]) -> None:
    for module in KNOWN - HEAD:
        mine = place_of(module, order)
        if mine >= 0:
            later = {other for other in loaded_with(module) if place_of(other, order) > mine}
            assert not later, f"{module}, of {order[mine]}, loads {later}"


FOLDERS = sorted({str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")} - {"."})


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder.split("/")[0] in WITH_ROOMS])
def test_a_room_has_a_law_and_few_files(folder: str) -> None:
    assert "\nLaw: " in (ast.get_docstring(parsed(f"{folder}/__init__")) or ""), f"{folder} says no law"
    files = [path.name for path in (PACKAGE / folder).glob("*.py")]
    assert len(files) <= MOST_FILES, f"{folder} has {len(files)} files"


def circles(edges: Mapping[str, Collection[str]]) -> list[list[str]]:
    """The sets of nodes from each of which one comes to all others of its set, by Tarjan's algorithm."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        path.append(node)
        for other in edges[node]:
            if other not in number:
                visit(other)
            if other in path:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == number[node]:
            start = path.index(node)
            found.append(sorted(path[start:]))
            del path[start:]

    for node in edges:
        if node not in number:
            visit(node)
    return [each for each in found if len(each) > 1]


def test_no_files_import_each_other_in_a_circle() -> None:
    """Not for types either: what two files must know of each other is a third one's."""
    packages = {module.removesuffix("/__init__") for module in MODULES if module.endswith("/__init__")}
    named = {module: {f"{m}/__init__" if m in packages else m for m in used(module)} for module in MODULES}
    assert circles({module: (found - {module}) & KNOWN for module, found in named.items()}) == []


def test_no_two_classes_bear_one_name() -> None:
    places: dict[str, list[str]] = {}
    for module in MODULES:
        for node in nodes_of(module):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


TRAINING = ["sched/drivers", "sched/replica", "sched/server", "sched/runs", "train"]


@pytest.mark.parametrize(
    ("word", "rooms"),
    [
        ("fold", ["kernels", "passes", "sched"]),  # reduction
        ("room", ["kernels/run", "sched/tape"]),  # buffer
        ("mutex", ["kernels", "net", "sched", "serving", "session", "train"]),  # lock
        (  # iteration, transpose, incarnation
            "turn",
            ["graph", "subgraph", "ops", "kernels/composite", "sched/loops", "sched/tape", *TRAINING],
        ),
    ],
)
def test_identifiers_have_the_dictionarys_words(word: str, rooms: list[str]) -> None:
    """See CONTRIBUTING's table. Constants are folded: that is the field's own word."""
    wrong = re.compile(rf"(?:^|_){word}(?:s|ed|ing)?(?:_|$)", re.IGNORECASE)
    anywhere = re.compile(rf"(?:\b|_){word}(?:s|ed|ing)?(?:_|\b)", re.IGNORECASE)  # in comments, too
    for module in [module for module in MODULES if within(module, rooms) and module != "passes/__init__"]:
        text = PACKAGE.joinpath(f"{module}.py").read_text()
        if not anywhere.search(text):
            continue
        names = {
            word.string for word in tokenize.generate_tokens(io.StringIO(text).readline) if word.type == tokenize.NAME
        }
        assert not {name for name in names - {"fold_constants"} if wrong.search(name)}, module


def test_side_effects_stay_with_their_owners() -> None:
    for module in MODULES:
        for name in imported(module):
            owners = OWNERS.get(name.split(".")[0])
            if owners is not None:
                assert within(module, owners), f"{module} imports {name}, which belongs to {owners}"


def test_meaning_and_pure_files_know_no_clock_thread_or_socket() -> None:
    pure = [module for module in MODULES if within(module, PURE)]
    wrong = {module: {name.split(".")[0] for name in imported(module)} & IMPURE for module in pure}
    assert {module: names for module, names in wrong.items() if names} == {}


def test_op_families_import_leftward_only() -> None:
    for module in MODULES:
        family = module.removeprefix("ops/")
        if module.startswith("ops/") and family in FAMILIES:
            seen = {other.removeprefix("ops/") for other in used(module) if other.startswith("ops/")}
            right = set(FAMILIES[FAMILIES.index(family) :]) & seen
            assert not right, f"ops/{family} imports {right}, which stand to its right"


def test_no_file_is_longer_than_500_lines() -> None:
    assert [str(p) for p in PACKAGE.rglob("*.py") if len(p.read_text().splitlines()) > 500] == []


def test_no_function_is_longer_than_a_screen() -> None:
    functions = [(module, node) for module in MODULES for node in nodes_of(module) if isinstance(node, FUNCTIONS)]
    assert [(m, f.name) for m, f in functions if (f.end_lineno or f.lineno) - f.lineno >= 59] == []


WRITERS = ["base/valueclass", "kernels/cuda/fused"]  # of functions: from names of a class's fields, and from numbers


def test_nothing_executes_data() -> None:
    for module in MODULES:
        calls = [node for node in nodes_of(module) if isinstance(node, ast.Call)]
        called = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        written = {"exec"} if module in WRITERS else set()
        assert not called & {"eval", "exec", "compile", "__import__"} - written, module
        for call in calls:
            if _called(call) in ("load", "read_array") and isinstance(call.func, ast.Attribute):
                of_numpy = ast.unparse(call.func.value) in ("np", "numpy", "npy_format")
                assert not of_numpy or "allow_pickle=False" in ast.unparse(call), f"{module}, line {call.lineno}"


GENERATORS = {"default_rng", "Random", "RandomState"}


def test_tests_draw_from_generators_that_nothing_ran_before() -> None:
    """What a test tries follows from itself: a generator is seeded, and no two tests share one."""
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text()
        if not any(name in text for name in GENERATORS):
            continue
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _called(node) in GENERATORS:
                assert node.args or node.keywords, f"{path.name}:{node.lineno} draws other numbers in each run"
        for statement in tree.body:
            made = getattr(statement, "value", None)
            shared = isinstance(made, ast.Call) and _called(made) in GENERATORS
            assert not shared, f"{path.name}:{statement.lineno} is drawn from by several tests"


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
