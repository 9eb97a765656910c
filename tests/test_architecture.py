"""The direction of imports, the sizes of classes and of the product, and what a stranger reads first of a module."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: From left to right; parts that share a place do not import each other.
DIRECTION = [
    {"errors", "pace", "redaction", "summaries", "tasks"},
    {"ids", "rocksdb_conf"},
    {"columns", "config"},
    {"formats"},
    {"disk"},
    {"model"},
    {"files", "protocol", "metadata"},
    {"storage"},
    {"checks"},
    {"repair"},
    {"client"},
    {"replication", "sync"},
    {"bookie"},
    {"http", "spark"},
    {"daemon"},
    {"commands"},
]
PLACE = {part: place for place, parts in enumerate(DIRECTION) for part in parts}

#: Start-up pays for what is imported, so a command imports only what it uses.
HEAVY = {
    "asyncio",
    "etcd3",
    "google.protobuf",
    "grpc",
    "kazoo",
    "pyspark",
    "rich",
    "rocksdict",
    "sqlite3",
    "ssl",
    "starlette",
    "uvicorn",
    "uvloop",
}


def modules() -> list[Path]:
    """Every Python file of the package, generated ones left out."""
    found = [*ROOT.glob("bkctl/**/*.py"), *ROOT.glob("commands/**/*.py")]
    return sorted(path for path in found if not path.stem.endswith("_pb2"))


def part_of(path: Path) -> str:
    """`formats` for bkctl/formats/entry.py, `ids` for bkctl/ids.py, `commands` for commands/main.py."""
    first, *rest = path.relative_to(ROOT).with_suffix("").parts
    return "commands" if first == "commands" else rest[0]


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Line and absolute name of every import, those inside functions too."""
    found: list[tuple[int, str]] = []
    package = [*path.relative_to(ROOT).parts[:-1]]
    if package[0] == "commands":
        package.insert(0, "bkctl")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_left_only(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "__main__"):  # the version; the door to commands.main
        return
    assert part in PLACE, f"{part} has no place in the direction of imports"
    for line, name in imports(path):
        top, _, rest = name.partition(".")
        assert top != "commands", f"{path}:{line} names bkctl.commands by its source directory"
        target = rest.partition(".")[0]
        if top == "bkctl" and target in PLACE and target != part:
            assert PLACE[target] < PLACE[part], f"{path}:{line}: {part} imports {name}"


def module_name(path: Path) -> str:
    """The dotted name that `path` is imported by."""
    parts = [*path.relative_to(ROOT).with_suffix("").parts]
    if parts[0] == "commands":
        parts.insert(0, "bkctl")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for types count, too."""
    paths = {module_name(path): path for path in modules()}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        names = {name for _, name in imports(path)}
        graph[module] = {name if name in paths else name.rpartition(".")[0] for name in names} & paths.keys() - {module}

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        following = [start]
        while following:
            found = graph[following.pop()] - seen
            seen |= found
            following += found
        return seen

    needs = {module: reached(module) for module in graph}
    circles = {frozenset(other for other in needs[module] if module in needs[other]) for module in graph}
    found = {circle for circle in circles if circle}
    assert found == set(), "modules import each other in a circle"


#: Parts of the library whose private names the parts above it must not use.
ABOVE_THE_CLIENT = [path for path in modules() if part_of(path) in ("commands", "spark", "replication")]
#: Private names of other libraries that have no public ones for it.
FOREIGN_NAMES = {
    "bkctl/spark/internals.py": "PySpark's processes and its Java side",
    "commands/kit/completion.py": "os._exit",
    "commands/kit/forks.py": "os._exit",
    "commands/kit/interrupts.py": "os._exit",
    "commands/kit/parser.py": "the type of a parameter that Typer parses",
}
NAMEDTUPLE = {"_replace", "_fields", "_asdict", "_make"}


@pytest.mark.parametrize("path", ABOVE_THE_CLIENT, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_spark_and_replication_use_public_names_only(path: Path) -> None:
    """A module may use its own private names: its functions, its classes, and what these keep in `self`."""
    if str(path.relative_to(ROOT)) in FOREIGN_NAMES:
        return
    nodes = list(ast.walk(ast.parse(path.read_text())))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name)} | NAMEDTUPLE
    own |= {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            is_private = node.attr.startswith("_") and not node.attr.startswith("__")
            assert not is_private or node.attr in own, f"{path}:{node.lineno}: {ast.unparse(node)} is private"
    for line, name in imports(path):
        last = name.rpartition(".")[2]
        private = name.startswith("bkctl.") and last.startswith("_") and not last.startswith("__")
        assert not private, f"{path}:{line}: {name} is private"


CLASS_LINES_MAX, CLASS_METHODS_MAX = 400, 25
#: Classes over these limits.
LARGE_CLASSES = {
    "IndexInMemPageMgr": "Java's class of this name, method by method",
    "IndexPersistenceMgr": "Java's class of this name, method by method",
    "JournalReader": "replay, verification and search read records by the same state",
}


def test_classes_are_small() -> None:
    large = {}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.end_lineno:
                lines = node.end_lineno - node.lineno + 1
                methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
                if lines > CLASS_LINES_MAX or methods > CLASS_METHODS_MAX:
                    large[node.name] = f"{path.relative_to(ROOT)}: {lines} lines, {methods} methods"
    new = {name: large[name] for name in large.keys() - LARGE_CLASSES.keys()}
    assert not new, f"classes over {CLASS_LINES_MAX} lines or {CLASS_METHODS_MAX} methods"
    assert LARGE_CLASSES.keys() - large.keys() == set(), "classes that are small now: remove them from LARGE_CLASSES"


def test_private_functions_are_named_elsewhere() -> None:
    """An override that lost its base is never called, and the class does without it what it should not do."""
    sources = [path.read_text() for path in modules()]
    words = Counter(word for source in sources for word in re.findall(r"\w+", source))
    unused = [
        node.name
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and node.name.startswith("_")
        and not node.decorator_list
        and not node.name.endswith("__")
        and words[node.name] < 2
    ]
    assert not unused


BODY_LINES_MAX, BODY_COMPLEXITY_MAX = 40, 12
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.AsyncFor, ast.ExceptHandler, ast.comprehension, ast.match_case)
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Commands whose body does more than parse, call and render.
LARGE_BODIES = {
    "bookie.running.gc": {"branches"},
    "bookie.running.compact_locations": {"branches"},
    "bookie.repair.format_bookie": {"branches"},
    "bookie.running.config": {"branches"},
    "bookies.departure.show_stop_risks": {"branches"},
    "cluster.status": {"branches"},
    "cluster.health_detail": {"loop"},
    "cookie.generate": {"branches"},
    "entrylog.extract.extract": {"branches", "long"},
    "ledger.listing.list_ledgers": {"branches"},
    "metadata.nodes.undo_command": {"branches"},
    "metadata.stores.migrate": {"branches"},
}


def bodies_of_commands() -> Iterator[tuple[str, list[ast.stmt]]]:
    """The body of each command, without its docstring."""
    for path in sorted(ROOT.glob("commands/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            decorators = getattr(node, "decorator_list", ())
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "command"
                for each in decorators
            ):
                name = ".".join(path.relative_to(ROOT / "commands").with_suffix("").parts)
                yield f"{name}.{node.name}", node.body[1:]


def _faults(body: list[ast.stmt]) -> set[str]:
    nodes = [node for statement in body for node in ast.walk(statement)]
    lines = (body[-1].end_lineno or 0) - body[0].lineno + 1
    branches = sum(isinstance(node, _BRANCHES) for node in nodes)
    branches += sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    found = {
        "loop": any(isinstance(node, _LOOPS) for node in nodes),
        "function": any(isinstance(node, _FUNCTIONS) for node in nodes),
        "long": lines > BODY_LINES_MAX,
        "branches": branches >= BODY_COMPLEXITY_MAX,
    }
    return {name for name, is_there in found.items() if is_there}


def test_bodies_of_commands_parse_call_and_render() -> None:
    """Loops and nested functions belong to the library; LARGE_BODIES has the exceptions, and only shrinks."""
    bodies = dict(bodies_of_commands())
    assert len(bodies) > 100
    found = {name: faults for name, body in bodies.items() if (faults := _faults(body))}
    more = {name: faults - LARGE_BODIES.get(name, set()) for name, faults in found.items()}
    assert {name: faults for name, faults in more.items() if faults} == {}, "move this into the library"
    less = {name: faults - found.get(name, set()) for name, faults in LARGE_BODIES.items()}
    assert {name: faults for name, faults in less.items() if faults} == {}, "remove these from LARGE_BODIES"


def room_of(path: Path) -> str:
    """`storage` for bkctl/storage/ledger/x.py, `bkctl` for the modules beside the rooms, `commands`."""
    first, *rest = path.relative_to(ROOT).parts
    return rest[0] if first == "bkctl" and len(rest) > 1 else first


def test_the_product_stays_within_its_budget() -> None:
    """[tool.bkctl.budget] of pyproject.toml has the most lines of Python and C, and each room's at that time.

    A room may grow as long as others shrink.
    """
    budget = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["bkctl"]["budget"]
    lines: Counter[str] = Counter()
    for path in sorted(each for name in ("bkctl", "commands") for each in (ROOT / name).rglob("*.*")):
        if path.suffix in (".py", ".c", ".h") and "_pb2" not in path.stem:
            lines[room_of(path)] += path.read_bytes().count(b"\n")
    grown = sorted(((count - budget["rooms"].get(room, 0), room) for room, count in lines.items()), reverse=True)
    assert lines.total() <= budget["lines-max"], (
        f"the product has {lines.total()} lines, and its budget is {budget['lines-max']}. Grown most: "
        + ", ".join(f"{room} by {more}" for more, room in grown[:5] if more > 0)
        + ". Say once what is said twice, or raise the budget in a commit of its own that says why. "
        + f"The rooms now: {dict(sorted(lines.items()))}"
    )


@pytest.mark.parametrize(
    "path", [path for path in modules() if part_of(path) != "commands"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_the_library_neither_prints_nor_knows_the_terminal(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{path}:{node.lineno}"
    terminal = {name.partition(".")[0] for _, name in imports(path)} & {"typer", "click", "rich"}
    assert not terminal, f"{path} imports {terminal}"


def test_starting_up_imports_nothing_heavy() -> None:
    program = "import sys, bkctl.commands.main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "bkctl.commands.main" in loaded
    assert not HEAVY & set(loaded)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_say_in_one_line_what_they_are_for(path: Path) -> None:
    summary = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    assert summary.endswith(".") or not path.read_text(), "a module's docstring begins with a sentence of one line"


#: Modules of rooms with intervals that may read the clock that people set: for moments that are shown or stored.
WALL_CLOCK = {
    "bkctl/bookie/bookie.py": "the start of the bookie, which is shown",
    "bkctl/bookie/garbage_collector.py": "last compactions, which are shown",
    "bkctl/client/ledger_survey.py": "the time of a survey, and ages of ledgers",
    "bkctl/http/bookie_load.py": "the clock of a bookie beside the one here",
    "bkctl/http/bundle.py": "the time of a file in a bundle",
    "bkctl/replication/worker.py": "the time of a failure, which is published",
    "bkctl/bookie/reads.py": "the time of an update, in the protocol",
    "bkctl/bookie/state_manager.py": "the time in BOOKIE_STATUS",
    "bkctl/client/pulsar.py": "ages of ledgers",
    "bkctl/files/index.py": "the age of a file",
    "bkctl/http/console/pages.py": "when a look was taken",
    "bkctl/http/bookie_metrics.py": "the time left to a certificate",
    "bkctl/replication/auditor.py": "ages of marks and of checks by other processes",
    "bkctl/storage/bookie_storage.py": "ids of new journals",
}
WITH_INTERVALS = {"bookie", "client", "disk", "files", "http", "pace", "protocol", "replication", "storage", "tasks"}


def test_intervals_are_measured_by_the_monotonic_clock() -> None:
    """A clock that is set back must put nothing off: who reads the wall clock says here what for."""
    readers = {
        ("time", "time"),
        ("time", "time_ns"),
        ("datetime", "now"),
        ("datetime", "utcnow"),
        ("datetime", "today"),
    }
    found = {
        str(path.relative_to(ROOT))
        for path in modules()
        if part_of(path) in WITH_INTERVALS
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and (ast.unparse(node.value).rpartition(".")[2], node.attr) in readers)
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "time"
            and any(alias.name in ("time", "time_ns") for alias in node.names)
        )
    }
    assert found - WALL_CLOCK.keys() == set(), (
        "measure intervals with time.monotonic(), or add the reason to WALL_CLOCK"
    )
    assert WALL_CLOCK.keys() - found == set(), "modules in WALL_CLOCK that do not read the clock"
