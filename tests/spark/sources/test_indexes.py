"""`bookkeeper.index` without Spark: the entries and ledgers that indexes know, whatever the storage class."""

from __future__ import annotations

import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual
from support import golden
from support.source_rows import Planned, rows_of

from bkctl.errors import BkctlError, Conflict, Corrupt, NotFound, UsageError
from bkctl.files.directories import BookieDirectories
from bkctl.files.index import BookieIndexes, LedgerIndexReader
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.files.windows import FileReader
from bkctl.formats.entry import DigestManager, DigestType, master_key, read_lac_header
from bkctl.formats.entry_log import pack_location
from bkctl.formats.index import LedgerData, index_path, location_key, write_header
from bkctl.ids import LedgerId
from bkctl.spark.sources import indexes
from bkctl.spark.sources.indexes import IndexSource

V1, V2, HUGE = LedgerId(0, 5), LedgerId(7, 1), LedgerId(2**64 - 1, 2**63 + 9)
BOOKIES = golden.bookies()


def write_index(directory: Path, ledger: LedgerId, locations: list[int], *, fenced: bool = False) -> Path:
    path = directory / "current" / index_path(ledger)
    path.parent.mkdir(parents=True, exist_ok=True)
    lac = DigestManager(ledger, DigestType.CRC32C).seal_lac(3)
    header = write_header(master_key(b""), fenced=fenced, explicit_lac=lac)
    path.write_bytes(header + b"".join(struct.pack(">q", each) for each in locations))
    return path


def write_databases(directory: Path, *ledgers: LedgerId, stale: LedgerId | None = None) -> None:
    current = directory / "current"
    prefix = "scoped-" if ledgers[0].is_scoped else ""
    with LedgersDatabase.create(current / f"{prefix}ledgers") as database:
        for ledger in ledgers:
            database.put(ledger, LedgerData(True, ledger == ledgers[0], master_key(b"")))
    with LocationsDatabase.create(current / f"{prefix}locations") as database:
        for ledger in [*ledgers, *([stale] if stale else [])]:
            for entry_id in range(10):
                database.put(ledger, entry_id * 2, pack_location(entry_id, 5000 + entry_id))


def expected(directory: Path) -> list[tuple[Any, ...]]:
    """Return the rows of each ledger's index, one ledger after the other."""
    found = []
    with BookieIndexes(BookieDirectories.at(directory)) as indexes:
        for ledger in indexes.ledgers():
            with indexes.open(ledger) as index:
                found += [
                    (ledger.qualified_name, each.entry_id, each.log_id, each.offset, each.location)
                    for each in index.locations()
                ]
    return found


def of_rows(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    names = ("ledgerQualifiedName", "entryId", "logId", "offset", "location")
    return sorted(tuple(row[name] for name in names) for row in rows)


@pytest.mark.parametrize("size", ["20000", "1m"])
@pytest.mark.parametrize("bookie", BOOKIES, ids=[f"{each.version}-{each.name}" for each in BOOKIES])
def test_index_matches_apache_shell(bookie: golden.GoldenBookie, size: str) -> None:
    rows = rows_of(IndexSource, path=bookie.ledger_dir, maxPartitionBytes=size)
    locations = {
        (ledger_id, entry_id): place
        for ledger_id, answer in bookie.indexes.items()
        for entry_id, place in answer["locations"].items()
    }
    # The shell prints where the entry itself begins.
    assert {(str(row["ledgerId"]), row["entryId"]): (row["logId"], row["offset"] + 4) for row in rows} == locations
    assert len(rows) == len(locations)
    assert {row["bookieId"] for row in rows} == {bookie.bookie_id}
    assert all(row["logIdHex"] == f"{row['logId']:x}" for row in rows)
    ledgers = rows_of(IndexSource, path=bookie.ledger_dir, rows="ledgers", maxPartitionBytes=size)
    assert {str(row["ledgerId"]): row["entryCount"] for row in ledgers} == {
        ledger_id: len(answer["locations"]) for ledger_id, answer in bookie.indexes.items()
    }
    for row in ledgers:
        assert "masterKey" not in row
        assert row["fenced"] == bookie.indexes[str(row["ledgerId"])].get("fenced", row["fenced"])


@pytest.mark.parametrize("size", ["1", "100", "1m"])
def test_scoped_and_mixed_directories(tmp_path: Path, size: str) -> None:
    for ledger in (V1, V2, HUGE):
        write_index(tmp_path / "files", ledger, [0, pack_location(3, 2000), 0, 0, pack_location(2**31 - 1, 9)])
    write_databases(tmp_path / "db", V1, LedgerId(0, 6), stale=LedgerId(0, 99))
    write_databases(tmp_path / "db", V2, HUGE, stale=LedgerId(7, 99))
    for place in ("files", "db"):
        rows = rows_of(IndexSource, path=tmp_path / place, maxPartitionBytes=size)
        assert of_rows(rows) == expected(tmp_path / place)
        assert {row["scoped"] for row in rows if row["ledgerScopeId"] == 0} == {False}
        assert {row["scoped"] for row in rows if row["ledgerScopeId"] != 0} == {True}
        ledgers = rows_of(IndexSource, path=tmp_path / place, rows="ledgers", columns="*,masterKey")
        assert {row["ledgerId"] for row in ledgers} >= {5, 1, 2**63 + 9}
        assert {row["masterKey"] for row in ledgers} == {master_key(b"")}
    assert {row["explicitLac"] for row in rows_of(IndexSource, path=tmp_path / "files", rows="ledgers")} == {3}


def test_index_files_are_planned_by_listing_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cookie = b'4\nbookieHost: "b:3181"\njournalDir: "/j"\nledgerDirs: "1\t/l"\n'
    (tmp_path / "current").mkdir()
    (tmp_path / "current" / "VERSION").write_bytes(cookie)
    for ledger_id in range(20):
        write_index(tmp_path, LedgerId(0, ledger_id), [pack_location(3, 2000)])
    opened: list[str] = []
    looked_up: list[Path] = []
    whole = FileReader.__init__
    bookie_id = indexes.bookie_id_at
    monkeypatch.setattr(FileReader, "__init__", lambda self, path: opened.append(path) or whole(self, path))
    monkeypatch.setattr(indexes, "bookie_id_at", lambda home: looked_up.append(home) or bookie_id(home))
    planned = Planned(IndexSource, path=tmp_path)
    assert (opened, len(planned.parts)) == ([], 1)
    assert len(looked_up) == len(set(looked_up))
    assert {(row["bookieId"], row["entryId"]) for row in planned.rows()} == {("b:3181", 0)}


def test_many_small_index_files_share_batches(tmp_path: Path) -> None:
    ledgers = [LedgerId(scope, number) for scope in (0, 7) for number in range(1, 151)]
    for ledger in ledgers:
        write_index(tmp_path, ledger, [0, pack_location(1, ledger.ledger_id + 8), pack_location(2, 4096)])
    (damaged,) = [path for path in tmp_path.rglob("*.idx") if path.name == "64.idx" and "00000000" not in path.parts]
    damaged.write_bytes(b"rubbish!" * 200)
    planned = Planned(IndexSource, path=tmp_path, mode="permissive")
    batches = [batch for part in planned.parts for batch in planned.reader.read(part)]
    assert len(batches) <= 2 * len(planned.parts) + 2
    rows = [row for batch in batches for row in batch.to_pylist()]
    lost = LedgerId(0, 0x64)
    assert [row["file"] for row in rows if row["damage"]] == [str(damaged)]
    found = {
        (row["ledgerScopeId"], row["ledgerId"], row["entryId"], row["logId"]): row for row in rows if not row["damage"]
    }
    assert found.keys() == {
        (*ledger, entry_id, entry_id) for ledger in ledgers if ledger != lost for entry_id in (1, 2)
    }
    for (scope_id, ledger_id, _, _), row in found.items():
        assert row["file"].endswith(index_path(LedgerId(int(scope_id), int(ledger_id))))
        assert row["scoped"] == (scope_id != 0)
    filtered = rows_of(IndexSource, [EqualTo(("logId",), 2)], path=tmp_path, mode="permissive")
    assert {row["file"] for row in filtered if not row["damage"]} == {row["file"] for row in found.values()}


def test_holes_of_index_files_are_no_partitions(tmp_path: Path) -> None:
    path = write_index(tmp_path, V1, [pack_location(3, 2000)] * 5)
    with open(path, "r+b") as file:
        file.seek(1024 + 8 * (1 << 24))
        file.write(struct.pack(">q", pack_location(4, 3000)) * 1000)
    planned = Planned(IndexSource, path=path, maxPartitionBytes="8000")
    assert 2 <= len(planned.parts) <= 4
    assert [row["entryId"] for row in planned.rows()] == [*range(5), *range(1 << 24, (1 << 24) + 1000)]


def test_databases_are_cut_within_a_ledger(tmp_path: Path) -> None:
    write_databases(tmp_path, V1, LedgerId(0, 6), stale=LedgerId(0, 99))
    wanted = of_rows(rows_of(IndexSource, path=tmp_path))
    with LocationsDatabase.edit(tmp_path / "current" / "locations") as database:
        # Three tables in all: RocksDB merges four.
        for first in (100, 200):
            for entry_id in range(first, first + 100):
                database.put(V1, entry_id, pack_location(1, 2000 + entry_id))
            database.flush()
    name = V1.qualified_name
    wanted += [(name, entry_id, 1, 1996 + entry_id, pack_location(1, 2000 + entry_id)) for entry_id in range(100, 300)]
    planned = Planned(IndexSource, path=tmp_path, maxPartitionBytes="800")
    assert [part.first for part in planned.parts] == [None, location_key(V1, 200)]
    assert of_rows(planned.rows()) == sorted(wanted)
    ledgers = Planned(IndexSource, path=tmp_path, rows="ledgers", maxPartitionBytes="1")
    counts = Counter(row[0] for row in wanted)
    assert {row["ledgerQualifiedName"]: row["entryCount"] for row in ledgers.rows()} == counts
    assert len(ledgers.rows()) == len(counts)


def test_single_files_and_databases_are_read(tmp_path: Path) -> None:
    path = write_index(tmp_path / "files", V1, [pack_location(3, 2000)])
    write_databases(tmp_path / "db", V1)
    assert len(rows_of(IndexSource, path=path)) == 1
    assert len(rows_of(IndexSource, path=f"{tmp_path}/files/current/**/*.idx")) == 1
    assert len(rows_of(IndexSource, path=tmp_path / "db" / "current" / "locations")) == 10
    assert len(rows_of(IndexSource, path=f"{tmp_path}/*")) == 11
    assert len(rows_of(IndexSource, paths=f'["{tmp_path}/db", "{tmp_path}/db/current"]')) == 10
    (tmp_path / "5.idx").write_bytes(path.read_bytes())
    for options, error in (
        ({"path": tmp_path / "5.idx"}, UsageError),
        ({"path": tmp_path / "none"}, NotFound),
        ({"path": path, "rows": "pages"}, UsageError),
        ({"path": path, "columns": "masterKey"}, UsageError),
    ):
        with pytest.raises(error):
            rows_of(IndexSource, **options)


@pytest.mark.parametrize("place", ["files", "db"])
def test_index_filters_are_pushed_down(tmp_path: Path, place: str) -> None:
    for ledger in (V1, V2, HUGE):
        write_index(tmp_path / "files", ledger, [pack_location(at // 4, 2000 + at) for at in range(10)])
    write_databases(tmp_path / "db", V1)
    write_databases(tmp_path / "db", V2, HUGE)
    path = tmp_path / place
    whole = rows_of(IndexSource, path=path)
    for filters, wanted in (
        ([EqualTo(("ledgerId",), 1)], lambda row: row["ledgerId"] == 1),
        ([EqualTo(("ledgerScopeId",), 7), EqualTo(("ledgerId",), 1)], lambda row: row["ledgerScopeId"] == 7),
        ([EqualTo(("ledgerQualifiedName",), HUGE.qualified_name)], lambda row: row["ledgerId"] == 2**63 + 9),
        ([EqualTo(("ledgerId",), 5), GreaterThanOrEqual(("entryId",), 4)],
         lambda row: row["ledgerId"] == 5 and row["entryId"] >= 4),
        ([EqualTo(("logId",), 1)], lambda row: row["logId"] == 1),
        ([EqualTo(("entryId",), 2)], lambda row: row["entryId"] == 2),
        ([EqualTo(("ledgerId",), 99)], lambda row: False),
    ):  # fmt: skip
        planned = Planned(IndexSource, filters, path=path)
        assert planned.left == []
        assert of_rows(planned.rows()) == of_rows([row for row in whole if wanted(row)])
    names = {row["ledgerQualifiedName"] for row in rows_of(IndexSource, path=path, ledger=f"5,{V2.qualified_name}")}
    assert names == {V1.qualified_name, V2.qualified_name}


def test_damaged_index_file_is_an_error_or_row(tmp_path: Path) -> None:
    good = write_index(tmp_path, V1, [pack_location(1, 2000)])
    bad = write_index(tmp_path, LedgerId(0, 6), [pack_location(1, 2000)])
    bad.write_bytes(b"BKXX" + bad.read_bytes()[4:])
    with pytest.raises(Corrupt, match=r"6\.idx"):
        rows_of(IndexSource, path=tmp_path)
    for rows in ("entries", "ledgers"):
        found = rows_of(IndexSource, path=tmp_path, mode="permissive", rows=rows)
        assert [row["file"] for row in found if row["damage"] is None] == [str(good)]
        (damage,) = [row for row in found if row["damage"] is not None]
        assert damage["damage"]["file"] == damage["file"] == str(bad)
        assert damage["ledgerId"] is None


@pytest.mark.parametrize("rows", ["entries", "ledgers"])
def test_index_file_changed_after_plan_is_an_error(tmp_path: Path, rows: str) -> None:
    path = write_index(tmp_path, V1, [pack_location(1, 2000)] * 100)
    planned = Planned(IndexSource, path=path, rows=rows)
    path.write_bytes(path.read_bytes() + struct.pack(">q", pack_location(1, 3000)))
    assert len(planned.rows()) == (100 if rows == "entries" else 1)
    path.write_bytes(path.read_bytes()[:-80])
    with pytest.raises(Conflict, match="when the plan was made"):
        planned.rows()
    path.unlink()
    with pytest.raises(NotFound, match="after the plan was made"):
        planned.rows()


@pytest.mark.parametrize("mode", ["failfast", "permissive"])
def test_directory_that_the_executor_lacks_is_named(tmp_path: Path, mode: str) -> None:
    write_index(tmp_path / "files", V1, [pack_location(1, 2000)])
    write_databases(tmp_path / "db", V1)
    for name in ("files", "db"):
        planned = Planned(IndexSource, path=tmp_path / name, mode=mode)
        (tmp_path / name).rename(tmp_path / "elsewhere")
        with pytest.raises(UsageError, match=r"cannot be seen by the executor on .* does not exist there"):
            planned.rows()
        (tmp_path / "elsewhere").rename(tmp_path / name)


def test_damaged_or_missing_database_is_an_error_or_row(tmp_path: Path) -> None:
    source = golden.GoldenBookie("4.18.0", "db")
    shutil.copytree(source.ledger_dir, tmp_path / "ledgers")
    planned = Planned(IndexSource, path=tmp_path / "ledgers")
    permissive = Planned(IndexSource, path=tmp_path / "ledgers", mode="permissive")
    count = len(planned.rows())
    assert count == sum(len(answer["locations"]) for answer in source.indexes.values())
    tables = sorted((tmp_path / "ledgers" / "current" / "locations").glob("*.sst"))
    data = bytearray(tables[0].read_bytes())
    data[len(data) // 4] ^= 0xFF
    tables[0].write_bytes(data)
    with pytest.raises(BkctlError):
        planned.rows()
    assert [row["damage"]["file"] for row in permissive.rows() if row["damage"]] == [str(tables[0].parent)]
    shutil.rmtree(tmp_path / "ledgers" / "current" / "locations")
    with pytest.raises(BkctlError):
        planned.rows()
    with pytest.raises(BkctlError):
        rows_of(IndexSource, path=tmp_path / "ledgers")
    found = rows_of(IndexSource, path=tmp_path / "ledgers", mode="permissive")
    assert [row["damage"] is None for row in found] == [False]


INDEX = next(path for path in (golden.GoldenBookie("4.18.0", "sorted").ledger_dir).rglob("*.idx"))


@given(
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=12)), max_size=3),
    st.none() | st.floats(0, 1),
    st.sampled_from(["entries", "ledgers"]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hostile_index_files_match_the_reader(
    tmp_path: Path, changes: list[tuple[float, bytes]], cut: float | None, rows: str
) -> None:
    data = bytearray(INDEX.read_bytes())
    for place, what in changes:
        # The header first: there is where the lengths are.
        at = int(place * 100)
        data[at : at + len(what)] = what
    path = tmp_path / "current" / INDEX.relative_to(INDEX.parents[2])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if cut is None else data[: int(cut * len(data))])
    wanted: list[Any] = []
    error: BkctlError | None = None
    try:
        with LedgerIndexReader.open(path) as reader:
            wanted = [(entry_id, location) for entry_id, location in reader.locations()]
            if rows == "ledgers" and reader.header.explicit_lac is not None:
                read_lac_header(reader.header.explicit_lac)
    except BkctlError as caught:
        error = caught
    permissive = rows_of(IndexSource, path=path, rows=rows, mode="permissive")
    if error is not None:
        with pytest.raises(type(error)):
            rows_of(IndexSource, path=path, rows=rows)
        assert [row["damage"]["reason"] for row in permissive] == [str(error)]
        return
    found = rows_of(IndexSource, path=path, rows=rows)
    assert [row for row in permissive if row.pop("damage") is None] == found
    if rows == "entries":
        assert [(row["entryId"], row["location"]) for row in found] == wanted
    else:
        assert [(row["entryCount"], row["lastEntryId"]) for row in found] == [
            (len(wanted), wanted[-1][0] if wanted else -1)
        ]
