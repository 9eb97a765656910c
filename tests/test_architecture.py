"""The direction of imports, and that docs/architecture.md names every module."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAP = ROOT / "docs" / "architecture.md"

#: From left to right; parts that share a place do not import each other.
DIRECTION = [
    {"errors", "pace", "redaction", "tasks"},
    {"ids"},
    {"columns", "config"},
    {"formats"},
    {"disk"},
    {"model"},
    {"files", "protocol", "metadata"},
    {"storage"},
    {"checks"},
    {"repair"},
    {"client"},
    {"replication"},
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


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every import, those inside functions too."""
    package = [*path.relative_to(ROOT).parts[:-1]]
    if package[0] == "commands":
        package.insert(0, "bkctl")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


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


def type_only(tree: ast.Module) -> set[int]:
    """The lines of imports below `if TYPE_CHECKING:`."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    return {each.lineno for block in blocks for each in ast.walk(block) if hasattr(each, "lineno")}


def test_no_modules_import_each_other_in_a_circle() -> None:
    paths = {module_name(path): path for path in modules()}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        ignored = type_only(ast.parse(path.read_text()))
        names = {name for line, name in imports(path) if line not in ignored}
        found = {name if name in paths else name.rpartition(".")[0] for name in names}
        graph[module] = (found & paths.keys()) - {module}
    while leaves := {module for module, needed in graph.items() if not needed}:
        graph = {module: needed - leaves for module, needed in graph.items() if module not in leaves}
    # What is left imports a circle or is part of one; drop what nothing in it imports.
    while roots := graph.keys() - set().union(*graph.values()):
        graph = {module: needed for module, needed in graph.items() if module not in roots}
    assert not graph, f"import circles among {sorted(graph)}"


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


def test_the_module_map_is_complete_and_true() -> None:
    named = set(re.findall(r"^\| `((?:bkctl|commands)/[\w/.]+)` \|", MAP.read_text(), re.MULTILINE))
    there = {str(path.relative_to(ROOT)) for path in modules() if path.stem != "__init__"}
    assert there - named == set(), "modules that docs/architecture.md does not name"
    assert named - there == set(), "modules in docs/architecture.md that do not exist"


#: Modules of rooms with intervals that may read the clock that people set: for moments that are shown or stored.
WALL_CLOCK = {
    "bkctl/bookie/bookie.py": "the start of the bookie, which is shown",
    "bkctl/bookie/garbage_collector.py": "last compactions, which are shown",
    "bkctl/bookie/reads.py": "the time of an update, in the protocol",
    "bkctl/bookie/state_manager.py": "the time in BOOKIE_STATUS",
    "bkctl/files/index.py": "the age of a file",
    "bkctl/http/bookie_metrics.py": "the time left to a certificate",
    "bkctl/replication/ledger_checks.py": "ages of marks and of checks by other processes",
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
