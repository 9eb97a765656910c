"""Indexes checked on their own: what a bookie writes is in order, and what it does not write is found."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from support import golden
from support.command_line import CommandLine
from support.golden import DATA, GoldenBookie

from bkctl.checks.findings import Counts, FindingKind
from bkctl.checks.index_scan import IndexScan
from bkctl.errors import Corrupt
from bkctl.files.directories import BookieDirectories
from bkctl.files.index import BookieIndexes
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase, new_batch
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.index import LedgerData, index_path, ledger_key, read_location_key, write_header, write_location
from bkctl.ids import LedgerId

KEY = b"k" * 20
LEDGER, OTHER = LedgerId(0, 5), LedgerId(0, 6)


def scan(directory: Path, **options: bool) -> tuple[list[tuple[str, LedgerId | None]], Counts]:
    job = IndexScan(BookieDirectories.at(directory), **options)
    return [(each.kind.value, each.ledger) for each in job.findings()], job.counts


def data(key: bytes = KEY, lac: bytes | None = None) -> LedgerData:
    return LedgerData(exists=True, fenced=False, master_key=key, explicit_lac=lac)


def lac_of(ledger: LedgerId) -> bytes:
    return DigestManager(ledger, DigestType.CRC32C).seal_lac(3)


@pytest.mark.parametrize("bookie", golden.bookies(), ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def test_a_healthy_bookie_has_no_findings(bookie: GoldenBookie) -> None:
    found, counts = scan(bookie.ledger_dir)
    assert [kind for kind, _ in found if kind not in (FindingKind.STRAY_TABLE,)] == []
    assert counts.entries == sum(len(answer["locations"]) for answer in bookie.indexes.values())
    assert counts.ledgers - counts.empty_ledgers == sum(bool(each["locations"]) for each in bookie.indexes.values())
    assert counts.errors == []


def test_invalid_items_of_index_files_are_findings(tmp_path: Path) -> None:
    def write(ledger: LedgerId, header: bytes, *locations: int, below: str = "one", suffix: str = "") -> Path:
        path = tmp_path / below / "current" / (index_path(ledger) + suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(header + b"".join(map(write_location, locations)))
        return path

    write(LEDGER, write_header(KEY, fenced=True), 0, 0x500)
    assert scan(tmp_path / "one")[0] == []
    write(LEDGER, write_header(b""), 0x500, 3, -1, -0x500)
    assert scan(tmp_path / "one")[0] == [(FindingKind.NO_MASTER_KEY, LEDGER), *[(FindingKind.BAD_ITEM, LEDGER)] * 3]
    assert scan(tmp_path / "one", locations=False)[0] == [(FindingKind.NO_MASTER_KEY, LEDGER)]
    assert len(scan(tmp_path / "one", ledgers=False)[0]) == 3
    write(LEDGER, write_header(KEY, explicit_lac=lac_of(OTHER)))
    found, counts = scan(tmp_path / "one")
    assert (found, counts.empty_ledgers) == ([(FindingKind.BAD_ITEM, LEDGER)], 1)
    write(LEDGER, write_header(KEY))
    write(OTHER, write_header(KEY), 0x500, suffix=".rloc")
    found, counts = scan(tmp_path / "one")
    assert (found, counts.ledgers, counts.entries) == ([(FindingKind.RELOCATION, OTHER)], 2, 1)
    write(OTHER, write_header(KEY), 0x500)
    assert scan(tmp_path / "one")[0] == []
    write(LEDGER, write_header(KEY), below="two")
    job = IndexScan(BookieDirectories([], [tmp_path / "one", tmp_path / "two"]))
    assert [(each.kind, each.ledger) for each in job.findings()] == [(FindingKind.TWICE, LEDGER)]
    damaged = write(OTHER, b"nothing")
    pipe = tmp_path / "one" / "current" / index_path(LedgerId(0, 7))
    directory = tmp_path / "one" / "current" / index_path(LedgerId(0, 8))
    directory.mkdir(parents=True)
    pipe.parent.mkdir(exist_ok=True)
    os.mkfifo(pipe)
    _, counts = scan(tmp_path / "one")
    assert [
        (error.exit_code, str(path) in str(error))
        for path, error in zip((damaged, pipe, directory), counts.errors, strict=True)
    ] == [(7, True)] * 3
    assert counts.ledgers == 1


def test_invalid_items_of_databases_are_findings(tmp_path: Path) -> None:
    current = tmp_path / "current"
    with LedgersDatabase.create(current / "ledgers") as ledgers:
        ledgers.put(LEDGER, data())
        ledgers.put(OTHER, data())
        ledgers.put_storage_flags(0)
    with LocationsDatabase.create(current / "locations") as locations:
        locations.put(LEDGER, 0, 0x500)
    found, counts = scan(tmp_path)
    assert (found, counts.ledgers, counts.entries, counts.empty_ledgers) == ([], 2, 1, 1)
    with LedgersDatabase.edit(current / "ledgers") as ledgers:
        ledgers._batch().put(ledger_key(LEDGER) + bytes(8), data(b"").serialize())
        ledgers._batch().put(b"odd", b"")
        ledgers._batch().put(ledger_key(LedgerId(0, 9)), b"\xff")
        ledgers._batch().put(b"\xff" * 8, bytes(8))
        ledgers.put(OTHER, data(lac=lac_of(LEDGER)))
        ledgers.put_storage_flags(1)
    with LocationsDatabase.edit(current / "locations") as locations:
        locations.put(LEDGER, 1, 0)
        locations.put(LedgerId(0, 7), 1, 0x500)
        locations._batch().put(b"odd", b"")
        locations._batch().put(bytes(16), b"short")
    found, counts = scan(tmp_path)
    assert sorted(found, key=str) == sorted(
        [
            (FindingKind.TWICE, LEDGER), (FindingKind.NO_MASTER_KEY, LEDGER), (FindingKind.NEEDS_CHECK, None),
            *[(FindingKind.BAD_ITEM, None)] * 3, (FindingKind.BAD_ITEM, OTHER),
            (FindingKind.BAD_ITEM, LEDGER), (FindingKind.NO_LEDGER, LedgerId(0, 7)),
            *[(FindingKind.BAD_ITEM, None)] * 2,
        ],
        key=str,
    )  # fmt: skip
    assert counts.errors == []
    notes = ("noMasterKey", "needsIntegrityCheck", "noLedger")
    assert counts.findings == len([kind for kind, _ in found if kind not in notes])
    assert len(scan(tmp_path, locations=False)[0]) == 7
    assert len(scan(tmp_path, ledgers=False)[0]) == 3


def test_scoped_databases_have_longer_keys(tmp_path: Path) -> None:
    current = tmp_path / "current"
    scoped = LedgerId(7, 5)
    with LedgersDatabase.create(current / "scoped-ledgers") as ledgers:
        ledgers.put(scoped, data(lac=lac_of(scoped)))
    with LocationsDatabase.create(current / "scoped-locations") as locations:
        locations.put(scoped, 0, 0x500)
    assert scan(tmp_path)[0] == []
    with LocationsDatabase.edit(current / "scoped-locations") as locations:
        locations._batch().put(bytes(16), write_location(0x500))
    assert scan(tmp_path)[0] == [(FindingKind.BAD_ITEM, None)]


def test_ledgers_in_another_directory_than_the_bookie_looks_in_are_a_finding(tmp_path: Path) -> None:
    places = [tmp_path / "one", tmp_path / "two"]
    for number, place in enumerate(places):
        for prefix, scope_id in (("", 0), ("scoped-", 7)):
            with LedgersDatabase.create(place / "current" / f"{prefix}ledgers") as ledgers:
                for ledger_id in range(number, 6, 2):
                    ledgers.put(LedgerId(scope_id, ledger_id), data())
            LocationsDatabase.create(place / "current" / f"{prefix}locations").close()
    assert not list(IndexScan(BookieDirectories([], places), is_complete=True).findings())
    assert not list(IndexScan(BookieDirectories([], places[::-1])).findings())
    found = list(IndexScan(BookieDirectories([], places[::-1]), is_complete=True).findings())
    assert {(each.kind, each.ledger, each.path.parents[1], each.is_problem) for each in found} == {
        (FindingKind.WRONG_DIRECTORY, LedgerId(scope_id, 4 + number), places[number], True)
        for scope_id in (0, 7)
        for number in (0, 1)
    }
    assert all(each.reason.endswith("that it does not find: 3") for each in found)


def test_a_table_missing_in_the_manifest_is_a_note(tmp_path: Path) -> None:
    shutil.copytree(DATA / "4.18.0" / "db" / "ledgers", tmp_path / "ledgers")
    table = tmp_path / "ledgers" / "current" / "locations" / "999999.sst"
    table.write_bytes(b"?")
    job = IndexScan(BookieDirectories.at(tmp_path / "ledgers"))
    (note,) = job.findings()
    assert (note.kind, note.path, note.is_problem) == (FindingKind.STRAY_TABLE, table, False)


def test_a_block_with_a_wrong_checksum_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(DATA / "4.18.0" / "db" / "ledgers", tmp_path / "ledgers")
    tables = sorted((tmp_path / "ledgers" / "current" / "locations").glob("*.sst"))
    for table in tables:
        whole = bytearray(table.read_bytes())
        whole[20] ^= 1
        table.write_bytes(whole)
    found, counts = scan(tmp_path / "ledgers")
    assert found == []
    (error,) = counts.errors
    assert isinstance(error, Corrupt)
    assert "checksum" in str(error)
    assert str(tables[0].parent) in str(error)


def test_a_ledger_that_lost_its_locations_is_unindexed(tmp_path: Path) -> None:
    shutil.copytree(DATA / "4.18.0" / "db" / "ledgers", tmp_path / "ledgers")
    directories = BookieDirectories.at(tmp_path / "ledgers")
    with BookieIndexes(directories) as indexes:
        ledger = next(each for each in indexes.ledgers() if indexes.open(each).extent()[0] > 3)
    with LocationsDatabase.edit(tmp_path / "ledgers" / "current" / "locations") as locations:
        batch = new_batch()
        for key in [each for each, _ in locations.items()]:
            if read_location_key(key, "", scoped=False)[0] == ledger:
                batch.delete(key)
        locations.write(batch)
    job = IndexScan(directories, find_deleted=lambda _: set())
    assert [(each.kind, each.ledger) for each in job.findings() if each.is_problem] == [(FindingKind.UNINDEXED, ledger)]


@pytest.mark.parametrize("name", ["sorted", "interleaved", "db"])
def test_a_damaged_log_is_a_finding_since_its_ledgers_are_not_known(tmp_path: Path, name: str) -> None:
    shutil.copytree(DATA / "4.18.0" / name / "ledgers", tmp_path / "ledgers")
    directories = BookieDirectories.at(tmp_path / "ledgers")
    logs = [file.path for file in directories.entry_logs() if file.path.stat().st_size > 1024]
    data = bytearray(logs[0].read_bytes())
    data[8:20] = bytes(12)  # no ledgers map, so the records are read
    data[1024:1028] = b"\xff\xff\xff\xfe"
    logs[0].write_bytes(data)
    job = IndexScan(directories, find_deleted=lambda _: set())
    found = [each for each in job.findings() if each.is_problem]
    assert [(each.kind, each.path) for each in found] == [(FindingKind.LOG_DAMAGED, logs[0])]
    assert "not looked for: " in found[0].reason


@pytest.mark.parametrize("lost", ["ledgers", "locations"])
@pytest.mark.parametrize("command", ["check", "index check"])
def test_a_lost_database_is_damage_that_names_the_repair(tmp_path: Path, command: str, lost: str) -> None:
    shutil.copytree(DATA / "4.18.0" / "db", tmp_path / "db")
    shutil.rmtree(tmp_path / "db" / "ledgers" / "current" / lost)
    cli = CommandLine(None)
    answer = cli("bookie", *command.split(), tmp_path / "db" / "ledgers")
    assert answer.code == 7
    assert f"{lost} has no database" in answer.err
    repair = re.search(r"bkctl (bookie index rebuild --ledgers --locations)", answer.err)
    assert repair is not None
    given = [option for each in ("ledgers", "journal") for option in ("--dir", tmp_path / "db" / each)]
    assert cli(*repair[1].split(), *given).code == 0
    answer = cli("bookie", *command.split(), tmp_path / "db" / "ledgers")
    assert "damaged" not in answer.err


@pytest.mark.parametrize("name", ["sorted", "interleaved"])
def test_lost_index_files_are_findings(tmp_path: Path, name: str) -> None:
    shutil.copytree(DATA / "4.18.0" / name / "ledgers", tmp_path / "ledgers")
    for path in (tmp_path / "ledgers" / "current").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    answer = CommandLine(None)("bookie", "index", "check", tmp_path / "ledgers")
    assert (answer.code, b"its index is lost" in answer.out) == (3, True)


def test_a_ledger_in_place_of_a_directory_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = CommandLine(None)("bookie", "index", "check", "3")
    assert answer.code == 4
    assert "Directory 3 does not exist; a directory of a bookie is needed" in answer.err
