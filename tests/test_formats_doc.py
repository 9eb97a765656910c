"""docs/formats.md against the code: each table that a comment ties to a name of the code says what that name does."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import pytest

import bkctl.formats
from bkctl.errors import UsageError
from bkctl.formats.entry import DigestManager, DigestType, LacHeader, read_lac_header
from bkctl.formats.layout import Layout
from bkctl.ids import LedgerId
from bkctl.metadata.backends.sqlite import SqliteStore
from bkctl.metadata.cluster import open_cluster
from bkctl.protocol.messages import Status

TEXT = (Path(__file__).parents[1] / "docs/formats.md").read_text()
CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i32": "i", "i64": "q"}


class Table(NamedTuple):
    """A table of the document; `kind` and `name` are from the comment before it, empty where there is none."""

    kind: str
    name: str
    rows: list[dict[str, str]]

    def target(self) -> Any:
        """The object that the table is about."""
        module, _, name = self.name.partition(":")
        found = importlib.import_module(module)
        return getattr(found, name) if name else found


def tables() -> Iterator[Table]:
    for match in re.finditer(r"(?:<!-- ([a-z ]+?)(?:: (\S+))? -->\n)?((?:^\|.*\n)+)", TEXT, re.MULTILINE):
        head, _, *lines = match[3].splitlines()
        names = cells(head)
        yield Table(match[1] or "", match[2] or "", [dict(zip(names, cells(line), strict=True)) for line in lines])


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


TABLES = list(tables())


def of_kind(kind: str) -> Any:
    found = [table for table in TABLES if table.kind == kind]
    assert found, f"docs/formats.md has no table of {kind}"
    return pytest.mark.parametrize("table", found, ids=lambda table: table.name)


def number(text: str) -> int:
    return int(text.replace("−", "-"), 0)


def struct_code(type_name: str, size: int) -> str:
    if match := re.fullmatch(r"bytes\[(\d+)\]", type_name):
        assert int(match[1]) == size
        return f"{size}s"
    return f"{size}x" if type_name == "padding" else CODES[type_name]


def test_every_comment_is_of_a_kind_that_is_checked() -> None:
    kinds = {table.kind for table in TABLES}
    checked = {"layout", "constants", "message", "examples", "paths", "sqlite", "digests", "entries", "statuses"}
    assert kinds - {""} == checked | {"journal versions"}
    assert TEXT.count("<!--") == sum(1 for table in TABLES if table.kind)


@of_kind("layout")
def test_offsets_sizes_and_types_match_the_code(table: Table) -> None:
    target = table.target()
    struct: Struct = target.struct if isinstance(target, Layout) else target
    at, code = 0, ""
    for row in table.rows:
        if not (row["offset"].isdigit() and row["size"].isdigit()):
            break
        size = int(row["size"])
        assert int(row["offset"]) == at, row
        code += struct_code(row["type"], size)
        assert Struct(f">{struct_code(row['type'], size)}").size == size, row
        at += size
        if isinstance(target, Layout) and row["type"] != "padding":
            name = row["field"].partition(":")[0].replace(" ", "_")
            assert target.offsets[name] == int(row["offset"]), row
    assert struct.format[1:] == code
    assert at == struct.size
    variable = [row for row in table.rows if not (row["offset"].isdigit() and row["size"].isdigit())]
    if variable:
        assert variable[0]["offset"] == str(at), variable[0]


def test_every_record_of_the_formats_has_a_table() -> None:
    documented = [id(table.target()) for table in TABLES if table.kind == "layout"]
    missing = []
    for info in pkgutil.iter_modules(bkctl.formats.__path__, "bkctl.formats."):
        for name, value in vars(importlib.import_module(info.name)).items():
            struct = value.struct if isinstance(value, Layout) else value
            # A single number is a type of the document's; what follows the ids of an entry is in the entry's table.
            is_record = isinstance(struct, Struct) and len(struct.unpack(bytes(struct.size))) > 1
            if is_record and name != "_AFTER_LEDGER" and id(value) not in documented:
                missing.append(f"{info.name}:{name}")
    assert missing == []


def test_every_node_of_auto_recovery_has_a_row() -> None:
    sources = (path.read_text() for path in Path(bkctl.formats.__path__[0]).parent.rglob("*.py"))
    nodes = {node for text in sources for node in re.findall(r'f"\{UNDERREPLICATION\}/(\w+)', text)}
    section = TEXT.split("### Auto-recovery\n")[1].split("\n<!--")[0]
    assert len(nodes) > 5
    assert [node for node in nodes if f"`{node}" not in section] == []


@of_kind("constants")
def test_constants_match_the_code(table: Table) -> None:
    for row in table.rows:
        assert getattr(table.target(), row["constant"]) == number(row["value"]), row


@of_kind("message")
def test_messages_have_the_fields_of_the_table(table: Table) -> None:
    descriptor = table.target().DESCRIPTOR
    said = {}
    for row in table.rows:
        name = re.match(r"`(\w+)`", row[descriptor.name])
        assert name, row
        said[int(row["number"])] = (name[1], row["label"])
        assert ("scoped" in row[descriptor.name]) == (name[1] == "ledgerScopeId"), row
    found = {}
    for field in descriptor.fields:
        label = "repeated" if field.is_repeated else "required" if field.is_required else "optional"
        found[field.number] = (field.name, label)
    assert said == found


def test_every_message_with_fields_has_a_table() -> None:
    named = {table.name for table in TABLES if table.kind == "message"}
    for module in ("bkctl.formats.data_formats_pb2", "bkctl.protocol.bookkeeper_protocol_pb2"):
        messages = importlib.import_module(module).DESCRIPTOR.message_types_by_name
        for name, descriptor in messages.items():
            if name in ("LedgerMetadataView", "LedgerMetadataViews"):  # the bytes of LedgerMetadataFormat, and many
                continue
            assert not descriptor.fields or f"{module}:{name}" in named, name


@of_kind("examples")
def test_examples_match_the_code(table: Table) -> None:
    function: Callable[..., Any] = table.target()
    for row in table.rows:
        arguments: list[Any] = [LedgerId.parse(row["ledger"])] if "ledger" in row else []
        if "entry" in row:
            arguments.append(int(row["entry"]))
        if "arguments" in row:
            arguments += [number(text.strip()) for text in row["arguments"].split(",")]
        found = function(*arguments)
        if isinstance(found, bytes):
            assert found.hex() == row["hex"]
        else:
            assert found == (number(row["value"]) if isinstance(found, int) else row["value"])


@of_kind("paths")
def test_ledgers_are_at_the_paths_of_the_table(table: Table, tmp_path: Path) -> None:
    with open_cluster(f"sqlite://{tmp_path}/m.db", create=True) as cluster:
        manager = table.target()(cluster.store)
        for row in table.rows:
            assert manager.path(LedgerId.parse(row["ledger"])) == row["path"], row


@of_kind("sqlite")
def test_the_columns_of_the_sqlite_store(table: Table, tmp_path: Path) -> None:
    SqliteStore(str(tmp_path / "m.db"), create=True).close()
    connection = sqlite3.connect(tmp_path / "m.db")
    try:
        columns = [(name, kind) for _, name, kind, *_ in connection.execute(f"PRAGMA table_info({table.name})")]
        assert columns == [(row["column"], row["type"]) for row in table.rows]
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    finally:
        connection.close()
    assert f"`PRAGMA application_id` is 0x{application:X} " in TEXT
    assert f"`PRAGMA user_version` is {version}." in TEXT


@of_kind("digests")
def test_digest_types(table: Table) -> None:
    said = [(int(row["number"]), row["name"], int(row["size"])) for row in table.rows]
    assert said == [(int(each), each.name, each.code_length) for each in DigestType]


@of_kind("entries")
def test_example_entries_are_sealed_as_the_document_says(table: Table) -> None:
    for row in table.rows:
        manager = DigestManager(LedgerId.parse(row["ledger"]), DigestType[row["digest"]], b"testPasswd")
        sealed = manager.seal(0, -1, 5, b"hello").hex()
        assert (
            f"{sealed[: 2 * manager.header_size]} {sealed[2 * manager.header_size :]}"
            == row["bytes before the payload"]
        )


def test_a_lac_packet_of_a_scoped_ledger_has_the_header_of_the_table() -> None:
    packet = DigestManager(LedgerId(7, 1), DigestType.CRC32C).seal_lac(7)
    assert read_lac_header(packet) == LacHeader(LedgerId(7, 1), 7, 2, DigestType.CRC32C, 25)


@of_kind("statuses")
def test_statuses_have_the_numbers_of_the_table(table: Table) -> None:
    assert [(row["status"], int(row["v3"]), int(row["v2"])) for row in table.rows] == [
        (status.name, int(status), status.v2) for status in Status
    ]


@of_kind("journal versions")
def test_journal_headers_have_the_sizes_of_the_table(table: Table) -> None:
    from bkctl.formats.journal import VERSION_MIN, VERSION_SCOPED, header_size, write_header

    versions = [int(row["version"]) for row in table.rows]
    assert versions == list(range(VERSION_MIN, VERSION_SCOPED + 1))
    for row in table.rows:
        assert header_size(int(row["version"])) == int(row["header size"]), row
    assert len(write_header(VERSION_SCOPED)) == int(table.rows[-1]["header size"])
    with pytest.raises(UsageError):
        write_header(versions[-1] + 1)


def test_links_within_the_document_lead_somewhere() -> None:
    anchors = {
        re.sub(r"[^a-z0-9 _-]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= anchors
