"""The jobs over the files of a mixed cluster of ours: what they count, what they find, and nothing else."""

from __future__ import annotations

import csv
import json
import shutil
import sqlite3
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from support import (
    bookie_files,
    source_rows,  # noqa: F401 (skips where there is no PySpark)
)
from support.bookie_files import Files, Written
from support.command_line import CommandLine
from support.engines import Engine, on_both_engines

from bkctl.client.ensemble import RoundRobinDistributionSchedule
from bkctl.columns import Column, Columns, Kind
from bkctl.commands.pipeline import saves
from bkctl.commands.pipeline.saves import Saves, check_spark_saves, frame_rows
from bkctl.errors import AlreadyExists, UsageError
from bkctl.files.entry_log import EntryLogReader
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import LedgerState
from bkctl.http.bookie_load import parse_metrics
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.spark.jobs import garbage
from bkctl.spark.jobs.bookies import find_bookies
from bkctl.spark.jobs.entries import held_entries, shares_of
from bkctl.spark.jobs.garbage import by_bookie, garbage_shares, orphans, uses
from bkctl.spark.jobs.integrity import Integrity, integrity
from bkctl.spark.jobs.inventory import Grouping, applications, damages, shares, totals

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = list[dict[str, Any]]
#: ledgerQualifiedName, entry id, bookie.
Key = tuple[str, int, str]
#: Index files that each take the place of a whole ledger's.
INTERLEAVED_BOOKIE: Final = 1
RUN_AT: Final = datetime(2026, 3, 29, 1, 30, 0, 250_000, UTC)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The cluster's files; no test changes them."""
    return bookie_files.make(tmp_path_factory.mktemp("cluster"))


def copied(files: Files, directory: Path) -> Files:
    """The same files to damage, with a metadata store of their own."""
    for place in files.places():
        shutil.copytree(place, directory / Path(place).name, ignore=shutil.ignore_patterns("*.log.lock"))
    with sqlite3.connect(files.directory / "metadata.db") as store, sqlite3.connect(directory / "metadata.db") as copy:
        store.backup(copy)
    return files._replace(directory=directory, uri=f"sqlite://{directory / 'metadata.db'}")


def promised(files: Files, written: Iterable[Written]) -> set[Key]:
    """Return the replicas that the ledgers' metadata promises; of an open ledger all but the last entry is known."""
    found: set[Key] = set()
    with open_cluster(files.uri) as cluster:
        for each in written:
            metadata = cluster.ledgers.read(each.ledger).metadata
            schedule = RoundRobinDistributionSchedule.of(metadata)
            for entry_id in range(each.entry_count if each.closed else each.entry_count - 1):
                for index in schedule.write_set(entry_id):
                    found.add((each.ledger.qualified_name, entry_id, metadata.fragment_of(entry_id).bookies[index]))
    return found


def of_type(files: Files, digest_type: DigestType, scope_id: int) -> Written:
    return next(each for each in files.flushed if each.digest_type is digest_type and each.ledger.scope_id == scope_id)


def record_of(log: Path, ledger: LedgerId) -> tuple[int, int, int]:
    """Offset of the size field, size and entry id of a record of the ledger in the middle of a log."""
    with EntryLogReader.open(log) as reader:
        found = [each for each in reader.records() if each.ledger == ledger]
    middle = found[len(found) // 2]
    return middle.offset, middle.record_size, middle.entry_id


# --- inventory ------------------------------------------------------------------------------------------------------


@on_both_engines
def test_inventory_matches_commands_for_one_bookie(engine: Engine, files: Files) -> None:
    logs = {row["file"]: row for row in engine.rows(None, "inventory", "--by", "entrylog", files.directory)}
    sizes: Counter[tuple[str, str]] = Counter()
    entries: Counter[tuple[str, str]] = Counter()
    for number, place in enumerate(files.places()):
        listed = CommandLine(None)("entrylog", "list", place, "-o", "ndjson").rows
        for log in listed:
            row = logs.pop(log["file"])
            assert row["bookieId"] == files.bookies[number]
            assert (row["logId"], row["scoped"], row["fileSize"]) == (log["logId"], log["scoped"], log["size"])
            shown = CommandLine(None)("entrylog", "show", log["file"], "-o", "ndjson").rows
            records = CommandLine(None)("entrylog", "read", log["file"], "-o", "ndjson").rows
            assert row["ledgerCount"] == len(shown)
            assert (row["size"], row["entryCount"]) == (sum(each["size"] for each in shown), len(records))
            for each in shown:
                sizes[files.bookies[number], each["ledgerQualifiedName"]] += each["size"]
            for each in records:
                entries[files.bookies[number], each["ledgerQualifiedName"]] += 1
    assert not logs
    assert sum(sizes.values()) > 0

    found = find_bookies(files.places())
    counted = shares(engine.session, found).persist()
    assert damages(counted).count() == 0

    def by(what: Grouping, connection: dict[str, str] | None = None) -> Rows:
        return [row.asDict() for row in totals(engine.session, found, counted, what, connection).collect()]

    assert {row["bookieId"]: (row["entryCount"], row["size"]) for row in by(Grouping.BOOKIE)} == {
        bookie: tuple(sum(count for (owner, _), count in sums.items() if owner == bookie) for sums in (entries, sizes))
        for bookie in files.bookies
    }
    ledgers = by(Grouping.LEDGER)
    assert {row["ledgerQualifiedName"]: (row["entryCount"], row["size"]) for row in ledgers} == {
        name: tuple(sum(count for (_, ledger), count in sums.items() if ledger == name) for sums in (entries, sizes))
        for name in {ledger for _, ledger in entries}
    }
    assert ledgers == sorted(ledgers, key=lambda row: (-row["size"], row["ledgerQualifiedName"]))
    for row in ledgers:
        assert LedgerId(int(row["ledgerScopeId"]), int(row["ledgerId"])).qualified_name == row["ledgerQualifiedName"]
    scopes = {row["ledgerScopeId"]: row for row in by(Grouping.SCOPE)}
    assert set(scopes) == {"0", "7"}
    for scope_id, row in scopes.items():
        of_scope = [each for each in ledgers if each["ledgerScopeId"] == scope_id]
        assert (row["ledgerCount"], row["size"]) == (len(of_scope), sum(each["size"] for each in of_scope))
    (pulsar,) = [row for row in ledgers if row["ledgerQualifiedName"] == files.flushed[-1].ledger.qualified_name]
    named = {row["application"]: row for row in by(Grouping.APPLICATION, {"metadataUri": files.uri})}
    assert (named["pulsar"]["component"], named["pulsar"]["managedLedger"]) == ("managed-ledger", "public/default/t")
    assert (named["pulsar"]["entryCount"], named["pulsar"]["size"]) == (pulsar["entryCount"], pulsar["size"])
    assert set(named) == {"pulsar", None}
    assert named[None]["size"] == sum(sizes.values()) - pulsar["size"]
    counted.unpersist()
    scoped = engine.rows(None, "inventory", "--by", "ledger", "--ledger-scope-id", 7, files.directory)
    names = [row["ledgerQualifiedName"] for row in ledgers if row["ledgerScopeId"] == "7"]
    assert [row["ledgerQualifiedName"] for row in scoped] == names


@on_both_engines
def test_application_that_is_not_utf8_is_none(engine: Engine, files: Files, tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    values = [b"\xff\xfe", b"\xed\xa0\x80", "caf\N{LATIN SMALL LETTER E WITH ACUTE}".encode()]
    with open_cluster(files.uri) as cluster, open_cluster(uri, create=True) as copy:
        for written, value in zip(files.flushed, values, strict=False):
            metadata = cluster.ledgers.read(written.ledger).metadata
            copy.ledgers.create(written.ledger, metadata._replace(custom_metadata={"application": value}))
    found = applications(engine.session, {"metadataUri": uri}).collect()
    names = [written.ledger.qualified_name for written in files.flushed]
    expected = dict(zip(names, [None, None, values[2].decode()], strict=False))
    rows = [row.asDict() for row in found]
    assert {row["ledgerQualifiedName"]: row["application"] for row in rows} == expected


# --- integrity ------------------------------------------------------------------------------------------------------


def check(engine: Engine, files: Files, **options: Any) -> tuple[Integrity, set[tuple[str | None, ...]]]:
    result = integrity(engine.session, find_bookies([files.directory]), {"metadataUri": files.uri}, **options)
    rows = result.findings.collect()
    return result, {(row.ledgerQualifiedName, row.entryId, row.bookieId, row.problem, row.intactCount) for row in rows}


def test_integrity_finds_nothing_on_intact_files(engine: Engine, files: Files) -> None:
    result, found = check(engine, files)
    assert found == set()
    expected = promised(files, files.written)
    (checked,) = result.checked.collect()
    assert checked.replicaCount == len(expected)
    assert checked.entryCount == len({(ledger, entry_id) for ledger, entry_id, _ in expected})
    assert checked.ledgerCount == len(files.written)
    assert result.unchecked.count() == 0
    result.release()


def test_integrity_finds_exactly_the_injected_problems(engine: Engine, files: Files, tmp_path: Path) -> None:
    files = copied(files, tmp_path)
    logs = [Path(place, "ledgers", "current", "0.log") for place in files.places()]
    scoped_log = Path(files.places()[0], "ledgers", "current", "scoped", "0.log")
    expected: dict[Key, str] = {}

    def flip(log: Path, bookie: int, written: Written, at: int = -1) -> None:
        offset, size, entry_id = record_of(log, written.ledger)
        with open(log, "r+b") as file:
            file.seek(offset + 4 + (at if at >= 0 else size - 1))
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 0xFF]))
        expected[written.ledger.qualified_name, entry_id, files.bookies[bookie]] = "damaged"

    for digest_type in (DigestType.CRC32, DigestType.CRC32C, DigestType.HMAC):
        flip(logs[0], 0, of_type(files, digest_type, 0))
        flip(scoped_log, 0, of_type(files, digest_type, 7))
    # A broken size field: the scan ends there, and what stands behind is still served by its index.
    broken = of_type(files, DigestType.HMAC, 7)
    offset, _, entry_id = record_of(
        scoped := Path(files.places()[2], "ledgers", "current", "scoped", "0.log"), broken.ledger
    )
    with open(scoped, "r+b") as file:
        file.seek(offset)
        file.write(struct.pack(">i", -7))
    expected[broken.ledger.qualified_name, entry_id, files.bookies[2]] = "damaged"
    # One ledger's index is gone on the bookie that keeps a file for each.
    forgotten = of_type(files, DigestType.DUMMY, 0)
    name = f"{forgotten.ledger.ledger_id:x}.idx"
    (index,) = Path(files.places()[INTERLEAVED_BOOKIE], "ledgers", "current").rglob(name)
    index.unlink()
    everything = promised(files, files.written)
    lost = {forgotten.ledger.qualified_name: "notIndexed"}
    # Journals are gone on one bookie: what was there only is missing.
    for journal in Path(files.places()[0], "journal", "current").glob("*.txn"):
        journal.unlink()
    lost_there = {each.ledger.qualified_name for each in files.journaled}
    for key in everything:
        if key[2] == files.bookies[INTERLEAVED_BOOKIE] and key[0] in lost:
            expected[key] = lost[key[0]]
        if key[2] == files.bookies[0] and key[0] in lost_there:
            expected[key] = "missing"

    result, found = check(engine, files)
    bad = Counter((ledger, entry_id) for ledger, entry_id, _ in expected)
    copies = Counter((ledger, entry_id) for ledger, entry_id, _ in everything)
    assert {row for row in found if row[0] is not None} == {
        (*key, problem, copies[key[:2]] - bad[key[:2]]) for key, problem in expected.items()
    }
    assert {row[1:4] for row in found if row[0] is None} == {(None, files.bookies[2], "unreadable")}
    result.release()
    some = of_type(files, DigestType.CRC32C, 7).ledger
    rows = engine.rows(files.uri, "integrity", "--ledger", some, files.directory, code=3)
    assert [(row["entryId"], row["problem"]) for row in rows if row["ledgerId"]] == [
        (entry_id, "damaged") for ledger, entry_id, _ in expected if ledger == some.qualified_name
    ]


def ranges_of(rows: Rows, keys: tuple[str, ...], step: int) -> Rows:
    """The ranges of rows of entries that agree in `keys` and whose ids are at most `step` apart."""
    found: dict[tuple[Any, ...], list[Rows]] = {}
    for row in sorted((row for row in rows if row["entryId"] is not None), key=lambda row: row["entryId"]):
        ranges = found.setdefault(tuple(row[key] for key in keys), [])
        if ranges and row["entryId"] - ranges[-1][-1]["entryId"] <= step:
            ranges[-1].append(row)
        else:
            ranges.append([row])
    return [
        dict(zip(keys, values, strict=True))
        | {
            "firstEntryId": each[0]["entryId"], "lastEntryId": each[-1]["entryId"], "findingCount": len(each),
            "entryCount": len({row["entryId"] for row in each}),
        }
        for values, ranges in found.items() for each in ranges
    ]  # fmt: skip


def sorted_rows(rows: Rows) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


def test_integrity_shows_ranges_by_ledger_bookie_and_log(engine: Engine, files: Files, tmp_path: Path) -> None:
    files = copied(files, tmp_path)
    # Of each three entries of the ledger, the bookie has two: all are one range, but where another copy is damaged.
    forgotten = of_type(files, DigestType.DUMMY, 0)
    (index,) = Path(files.places()[INTERLEAVED_BOOKIE]).rglob(f"{forgotten.ledger.ledger_id:x}.idx")
    index.unlink()
    for journal in Path(files.places()[0], "journal", "current").glob("*.txn"):
        journal.unlink()
    log = Path(files.places()[0], "ledgers", "current", "0.log")
    offset, _, _ = record_of(log, of_type(files, DigestType.CRC32, 0).ledger)
    with open(log, "r+b") as file:
        file.seek(offset)
        file.write(struct.pack(">i", -7))
    command = ("integrity", files.directory, "--by")
    entries = engine.here.rows(files.uri, *command, "entry", code=3)
    ledger = ("ledgerScopeId", "ledgerId", "ledgerQualifiedName")
    same = (*ledger, "problem", "intactCount", "writeQuorumSize", "ledgerState")
    keys = {"ledger": same, "bookie": ("bookieId", *same), "log": ("bookieId", "file", *same)}
    answers = {by: (engine if by == "log" else engine.here).run(files.uri, *command, by) for by in keys}
    found = {by: [json.loads(line) for line in answer.out.splitlines()] for by, answer in answers.items()}
    for by, of_range in keys.items():
        names = (*of_range, "firstEntryId", "lastEntryId", "findingCount", "entryCount")
        rows = [{name: row[name] for name in names} for row in found[by] if row["ledgerId"] is not None]
        # All ledgers of these files have two copies of each entry on three bookies, but the last, with three.
        expected = ranges_of(entries, of_range, 2)
        assert sorted_rows(rows) == sorted_rows(expected)
        assert len(rows) < len(entries) / 4
        (unreadable,) = [row for row in found[by] if row["ledgerId"] is None]
        assert (unreadable["problem"], unreadable["file"], unreadable["findingCount"]) == ("unreadable", str(log), 1)
        assert sum(row["findingCount"] for row in found[by]) == len(entries)
        assert (answers[by].code, answers[by].err.splitlines()[-1]) == (3, f"bkctl: {len(entries)} findings")
    (whole,) = [row for row in found["bookie"] if row["ledgerQualifiedName"] == forgotten.ledger.qualified_name]
    held = {entry_id for _, entry_id, bookie in promised(files, [forgotten]) if bookie == whole["bookieId"]}
    assert (whole["problem"], whole["firstEntryId"], whole["lastEntryId"], whole["entryCount"]) == (
        "notIndexed", min(held), max(held), len(held),
    )  # fmt: skip
    assert {row["bookieCount"] for row in found["ledger"]} == {1}


def test_damaged_entry_does_not_extend_open_ledger(engine: Engine, files: Files, tmp_path: Path) -> None:
    files = copied(files, tmp_path)
    written = of_type(files, DigestType.HMAC, 0)
    with open_cluster(files.uri) as cluster:
        found = cluster.ledgers.read(written.ledger)
        reopened = found.metadata._replace(state=LedgerState.OPEN, last_entry_id=-1, length=0)
        cluster.ledgers.write(written.ledger, reopened, found.version)
    log = Path(files.places()[0], "ledgers", "current", "0.log")
    offset, _, entry_id = record_of(log, written.ledger)
    with open(log, "r+b") as file:
        file.seek(offset + 4 + 16)
        file.write(struct.pack(">q", 2**62))
    (row,) = engine.rows(files.uri, "integrity", "--ledger", written.ledger, files.directory, code=3)
    assert (row["entryId"], row["bookieId"], row["problem"]) == (entry_id, files.bookies[0], "damaged")


def test_missing_bookies_and_indexes_are_not_findings(engine: Engine, files: Files, tmp_path: Path) -> None:
    files = copied(files, tmp_path)
    for index in Path(files.places()[INTERLEAVED_BOOKIE]).rglob("*.idx"):
        index.unlink()
    answer = engine.run(files.uri, "integrity", "--no-indexes", *files.places()[:2])
    assert (answer.code, answer.out) == (0, b"")
    assert f"their files are not given: {files.bookies[2]} ({len(files.written)} ledgers)" in answer.err


def test_a_number_in_metadata_that_no_files_can_hold_is_one_finding_a_bookie(
    engine: Engine, files: Files, tmp_path: Path
) -> None:
    files = copied(files, tmp_path)
    written = of_type(files, DigestType.CRC32, 0)
    with open_cluster(files.uri) as cluster:
        found = cluster.ledgers.read(written.ledger)
        cluster.ledgers.write(written.ledger, found.metadata._replace(last_entry_id=2**62), found.version)
    rows = engine.rows(files.uri, "integrity", files.directory, code=3)
    named = {written.ledger.qualified_name: "notCompared"}
    assert {row["ledgerQualifiedName"]: row["problem"] for row in rows} == named
    assert {row["bookieId"] for row in rows} == set(found.metadata.ensembles[-1].bookies)


def test_intact_count_is_unknown_where_a_holder_is_not_given(engine: Engine, files: Files, tmp_path: Path) -> None:
    files = copied(files, tmp_path)
    written = of_type(files, DigestType.CRC32, 0)
    for journal in Path(files.places()[0], "journal", "current").glob("*.txn"):
        journal.unlink()
    for log in Path(files.places()[0], "ledgers", "current").rglob("*.log"):
        log.unlink()
    copies = Counter((ledger, entry_id) for ledger, entry_id, _ in promised(files, [written]))
    given = set(files.bookies[:2])
    of_given = Counter(key[:2] for key in promised(files, [written]) if key[2] in given)
    command = ("integrity", "--ledger", written.ledger)
    some = engine.rows(files.uri, *command, *files.places()[:2], code=3)
    assert {row["entryId"]: row["intactCount"] for row in some} == {
        entry_id: count - 1 if of_given[ledger, entry_id] == count else None
        for (ledger, entry_id), count in copies.items()
        if (ledger, entry_id, files.bookies[0]) in promised(files, [written])
    }
    assert {row["intactCount"] for row in some} == {1, None}
    one = engine.rows(files.uri, *command, "--by", "ledger", files.places()[0], code=3)
    assert [row["intactCount"] for row in one] == [None]


# --- garbage --------------------------------------------------------------------------------------------------------


@on_both_engines
def test_garbage_matches_command_for_one_bookie(engine: Engine, files: Files, tmp_path: Path) -> None:
    files = copied(files, tmp_path)
    dead = [
        of_type(files, DigestType.CRC32, 0).ledger,
        *(each.ledger for each in files.flushed if each.ledger.is_scoped),
    ]
    with open_cluster(files.uri) as cluster:
        for ledger in dead:
            cluster.ledgers.remove(ledger)
    options = ("--minor-threshold", 0.1, "--major-threshold", 0.95)
    rows = {row["file"]: row for row in engine.rows(files.uri, "garbage", *options, files.directory)}
    sums: Counter[str] = Counter()
    for place, bookie in zip(files.places(), files.bookies, strict=True):
        single = CommandLine(files.uri)("entrylog", "garbage", "--dir", place, *options, "-o", "ndjson").rows
        for expected in single:
            row = rows.pop(expected["file"])
            assert row.pop("bookieId") == bookie
            expected.pop("topics")
            row.pop("rewrittenSize")
            assert row == expected
            sums[bookie] += expected["garbageSize"]
    assert not rows
    assert sums.total() > 0
    found = garbage_shares(engine.session, find_bookies([files.directory]), {"metadataUri": files.uri}).persist()
    assert {row.bookieId: row.garbageSize for row in by_bookie(uses(found)).collect()} == sums
    dead_rows = orphans(found).collect()
    assert {row.ledgerQualifiedName for row in dead_rows} == {ledger.qualified_name for ledger in dead}
    assert sum(row.size for row in dead_rows) == sums.total()
    found.unpersist()


@on_both_engines
def test_metadata_of_another_cluster_is_refused(engine: Engine, files: Files, tmp_path: Path) -> None:
    other = f"sqlite://{tmp_path / 'other.db'}"
    with open_cluster(other, create=True):
        pass
    for job in ("garbage", "integrity"):
        answer = engine.run(other, job, files.directory)
        assert (answer.code, answer.out) == (5, b"")
        assert "every ledger would look dead" in answer.problem
    # Nor are ledgers somebody else's, or what is lost of them in order.
    for words in (("inventory", "--by", "application"), ("journal-audit",)):
        answer = engine.run(other, *words, files.directory)
        assert (answer.code, answer.out) == (5, b"")
        assert "belongs to the cluster" in answer.problem


def test_garbage_reads_each_log_once(
    engine: Engine, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, read = tmp_path / "seen", garbage.log_rows

    def noted(log: tuple[str, str]) -> Iterator[dict[str, Any]]:
        with open(seen, "a") as file:
            file.write(f"{log[1]}\n")
        yield from read(log)

    monkeypatch.setattr(garbage, "log_rows", noted)
    bookies = find_bookies(files.places()[:1])
    shares = garbage_shares(engine.session, bookies, {"metadataUri": files.uri})
    assert {row.state for row in shares.collect()} == {"alive"}
    assert sorted(seen.read_text().splitlines()) == sorted(bookies[0].entry_logs())


# --- journals -------------------------------------------------------------------------------------------------------


def test_audit_reports_replayed_hidden_and_unlogged_records(engine: Engine, files: Files, tmp_path: Path) -> None:
    files = copied(files, tmp_path)
    place = files.places()[0]
    everything = promised(files, [*files.journaled[:1], *files.journaled[2:]])
    entries = engine.here.rows(files.uri, "journal-audit", "--by", "entry", files.directory)
    open_name = files.journaled[1].ledger.qualified_name
    unlogged = {(row["ledgerQualifiedName"], row["entryId"], row["bookieId"]) for row in entries}
    assert {key for key in unlogged if key[0] != open_name} == everything
    assert {row["replayed"] for row in entries} == {True}
    for by, keys in (("ledger", ()), ("log", ("bookieId", "file"))):
        on = engine if keys else engine.here
        ranges = on.rows(files.uri, "journal-audit", "--by", by, files.directory)
        of_range = (*keys, "ledgerQualifiedName", "logged", "replayed", "state")
        names = (*of_range, "firstEntryId", "lastEntryId", "findingCount", "entryCount")
        assert sorted_rows([{name: row[name] for name in names} for row in ranges]) == sorted_rows(
            ranges_of(entries, of_range, 2)
        )
        assert len(ranges) == len(files.journaled) * (3 if keys else 1)
    # A whole record behind damage, and a mark behind what is in no log yet.
    journal = max(Path(place, "journal", "current").glob("*.txn"))
    single = CommandLine(None)("journal", "read", journal, "-o", "ndjson").rows
    second = [row["offset"] for row in single if row["type"] == "entry"][1]
    with open(journal, "r+b") as file:
        file.seek(second)
        file.write(struct.pack(">i", -7))
    answer = engine.run(files.uri, "journal-audit", files.directory)
    assert answer.code == 7
    assert str(journal) in answer.err.splitlines()[-1]
    rows = {row["file"]: row for row in map(json.loads, answer.out.splitlines())}
    for each in files.places():
        checks = CommandLine(None)("journal", "verify", each, "-o", "ndjson")
        for expected in map(json.loads, checks.out.splitlines()):
            row = rows.pop(expected["file"])
            assert (row["state"], row["goodEnd"], row["recordsBehind"]) == (
                expected["state"], expected["goodEnd"], expected["recordsBehind"],
            )  # fmt: skip
            if row["file"] == str(journal):
                assert row["recordsBehind"] > 0
                assert row["replayEntryCount"] == row["unloggedCount"] == 1
    assert not rows
    for mark in Path(place, "ledgers", "current").glob("lastMark*"):
        mark.write_bytes(struct.pack(">qq", int(journal.stem, 16) + 1, 0))
    rows_after = engine.here.rows(files.uri, "journal-audit", "--by", "entry", place, code=7)
    assert {(row["replayed"], row["state"]) for row in rows_after} == {(False, "alive")}


# --- results that stay ----------------------------------------------------------------------------------------------


@on_both_engines
def test_saved_files_appear_when_complete(engine: Engine, files: Files, tmp_path: Path) -> None:
    import pyarrow.parquet

    paths = {ending: tmp_path / f"ledgers.{ending}" for ending in ("parquet", "csv", "json", "html")}
    saves = [word for path in paths.values() for word in ("--save", path)]
    printed = engine.rows(files.uri, "inventory", "--by", "ledger", files.directory, *saves)
    assert json.loads(paths["json"].read_text()) == printed
    with open(paths["csv"], newline="") as file:
        assert list(csv.DictReader(file)) == [{name: str(value) for name, value in row.items()} for row in printed]
    assert pyarrow.parquet.read_table(paths["parquet"]).to_pylist() == printed
    page = paths["html"].read_text()
    assert page.startswith("<!doctype html>")
    assert "<svg" in page
    assert "http" not in page.replace("http-equiv", "")
    assert sorted(tmp_path.iterdir()) == sorted(paths.values())
    again = engine.run(files.uri, "inventory", files.directory, "--save", paths["csv"])
    assert (again.code, again.out) == (5, b"")
    assert again.problem.startswith(f"{paths['csv']} exists")


def saves_of(*paths: object, tables: tuple[str, ...] = (), append: bool = False) -> Saves:
    return Saves([str(path) for path in paths], list(tables), append, RUN_AT)


class Printing:
    """A run that keeps the rows it prints."""

    def __init__(self) -> None:
        self.printed: Rows = []
        self.out = self

    def outlive_stdout(self) -> None:
        pass

    def render(self, rows: Iterable[Any], columns: Columns) -> None:
        self.printed.extend(row.asDict() for row in rows)


def test_saved_uri_has_the_printed_columns_of_one_run(spark: SparkSession, tmp_path: Path) -> None:
    import pyarrow.parquet

    seen = tmp_path / "seen"

    def noted(batches: Iterable[Any]) -> Iterator[Any]:
        with open(seen, "a") as file:
            file.write("run\n")
        yield from batches

    frame = spark.range(0, 3, 1, 1).mapInArrow(noted, "id bigint").selectExpr("id AS offset", "'x' AS hidden")
    columns = Columns(Column("OFFSET", "offset", "offset", Kind.INTEGER))
    uris = [f"file://{tmp_path}/{name}.parquet" for name in ("one", "two")]
    run: Any = Printing()
    frame_rows(run, frame, columns, saves_of(*uris))
    for name in ("one", "two"):
        assert pyarrow.parquet.read_table(tmp_path / f"{name}.parquet").to_pylist() == run.printed
    assert run.printed == [{"offset": number} for number in range(3)]
    assert seen.read_text() == "run\n"
    check_spark_saves(spark, saves_of(f"file://{tmp_path}/three.parquet", "rows.csv"), columns)
    with pytest.raises(AlreadyExists, match=r"two\.parquet exists"):
        check_spark_saves(spark, saves_of(*uris[1:]), columns)


@pytest.mark.usefixtures("spark")
def test_existing_uri_is_refused_before_the_job(files: Files, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").mkdir()
    answer = CommandLine(None)("pipeline", "inventory", files.directory, "--save", f"file://{tmp_path}/rows.parquet")
    assert (answer.code, answer.out) == (5, b"")
    assert "rows.parquet exists" in answer.problem


@on_both_engines
def test_appended_rows_carry_the_time_of_their_run(engine: Engine, files: Files, tmp_path: Path) -> None:
    import pyarrow.parquet

    trend = tmp_path / "trend.parquet"
    runs = []
    for places in (files.places(), files.places()[:1]):
        before = datetime.now(UTC)
        runs.append(engine.rows(None, "inventory", *places, "--save", trend, "--append"))
        assert len(list(trend.iterdir())) == len(runs)
        times = set(pyarrow.parquet.read_table(trend).column("runAt").to_pylist())
        assert len(times) == len(runs)
        assert before <= max(times) <= datetime.now(UTC)
    rows = pyarrow.parquet.read_table(trend).sort_by([("runAt", "ascending"), ("bookieId", "ascending")]).to_pylist()
    assert [{name: value for name, value in row.items() if name != "runAt"} for row in rows] == [
        row for rows in runs for row in sorted(rows, key=lambda row: row["bookieId"])
    ]
    answer = engine.run(None, "inventory", *files.places(), "--by", "scope", "--save", trend, "--append")
    assert (answer.code, answer.out) == (2, b"")
    assert f"The rows in {trend} have other columns than those to append: bookieCount, bookieId," in answer.problem
    assert len(list(trend.iterdir())) == len(runs)


def test_uris_and_tables_get_new_or_dated_rows(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = Columns(Column("OFFSET", "offset", "offset", Kind.INTEGER))
    frame = spark.range(0, 3, 1, 1).selectExpr("id AS offset")
    run: Any = Printing()
    new = saves_of(tables=("findings",))
    with pytest.raises(UsageError, match="Spark's catalog is in memory, and ends with the job"):
        check_spark_saves(spark, new, columns)
    # The session of tests has no lasting catalog, which another test has.
    monkeypatch.setattr(saves, "_catalog_is_temporary", lambda session, table: False)
    try:
        check_spark_saves(spark, new, columns)
        frame_rows(run, frame, columns, new)
        assert sorted(tuple(row) for row in spark.table("findings").collect()) == [(0,), (1,), (2,)]
        with pytest.raises(AlreadyExists, match="The table findings exists"):
            check_spark_saves(spark, new, columns)
        with pytest.raises(UsageError, match="other columns than those to append: runAt"):
            check_spark_saves(spark, saves_of(tables=("findings",), append=True), columns)
        uri = f"file://{tmp_path}/trend.parquet"
        dated = saves_of(uri, tables=("trend",), append=True)
        for _ in range(2):
            check_spark_saves(spark, dated, columns)
            frame_rows(run, frame, columns, dated)
        for rows in (spark.table("trend"), spark.read.parquet(uri)):
            found = rows.selectExpr("unix_micros(runAt)", "offset").collect()
            moment = int(RUN_AT.timestamp()) * 1_000_000 + RUN_AT.microsecond
            assert sorted(tuple(row) for row in found) == sorted(2 * [(moment, number) for number in range(3)])
    finally:
        for table in ("findings", "trend"):
            spark.sql(f"DROP TABLE IF EXISTS {table}")


def test_shares_of_held_entries_match_a_scan(engine: Engine, files: Files) -> None:
    bookies = find_bookies([files.directory])
    held = held_entries(engine.session, bookies, None, None).persist()
    columns = ("bookieId", "file", "ledgerQualifiedName", "entryCount", "size")
    expected = sorted(shares(engine.session, bookies).select(*columns).collect())
    assert sorted(shares_of(held).select(*columns).collect()) == expected
    held.unpersist()


def test_report_is_one_page_with_escaped_names(engine: Engine, files: Files, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    textfile = tmp_path / "bkctl.prom"
    textfile.write_text("of an earlier report")
    parts = engine.rows(files.uri, "report", files.directory, "--save", page, "--textfile", textfile)
    assert [part["job"] for part in parts] == ["inventory", "integrity", "garbage", "journal-audit"]
    assert sum(part["findings"] for part in parts) == 0
    text = page.read_text()
    for title in ("Inventory", "Integrity", "Garbage", "Journals"):
        assert f"<h2>{title}</h2>" in text
    assert "<script" not in text
    assert "src=" not in text
    samples: dict[str, dict[str, float]] = {}
    for metric in parse_metrics(textfile.read_text()):
        assert metric.type == "gauge"
        samples.setdefault(metric.name, {})[metric.labels.get("job") or metric.labels.get("bookie", "")] = metric.value
    assert samples["bkctl_report_findings"] == {part["job"]: part["findings"] for part in parts}
    inventory = engine.here.rows(files.uri, "inventory", "--by", "bookie", files.directory)
    assert samples["bkctl_report_entry_bytes"] == {row["bookieId"]: row["size"] for row in inventory}
    assert samples["bkctl_report_entries"] == {row["bookieId"]: row["entryCount"] for row in inventory}
    assert set(samples["bkctl_report_garbage_bytes"]) == {row["bookieId"] for row in inventory}
    assert samples["bkctl_report_timestamp_seconds"][""] >= page.stat().st_mtime - 3600


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["inventory"], 2, "No files of bookies are given"),
        (["inventory", "/nowhere"], 4, "/nowhere does not exist"),
        (["inventory", "{place}", "--save", "rows.xlsx"], 2, "not a name that ends in .parquet"),
        (["inventory", "{place}", "--save", "s3a://bucket/page.html"], 2, "a page is written on this machine"),
        (["inventory", "{place}", "--append"], 2, "add --save NAME.parquet or --save-table NAME"),
        (["inventory", "{place}", "--append", "--save", "rows.csv"], 2, "rows cannot be appended to it"),
        (["report", "{place}", "--save", "rows.csv"], 2, "not a name that ends in .html"),
        (["export", "{place}/x", "--state", "CLOSING"], 2, "not a ledger state"),
        (["inventory", "{place}", "--save", "/nowhere/rows.csv"], 4, "the directory /nowhere does not exist"),
        (["report", "{place}"], 2, "add --save report.html"),
        (["report", "{place}", "--textfile", "totals.txt"], 2, "not a name that ends in .prom"),
        (["report", "{place}", "--textfile", "/nowhere/x.prom"], 4, "the directory /nowhere does not exist"),
        (["inventory", "{place}", "--master", "sc://spark1:15002"], 2, "a Spark Connect server runs already"),
        (["inventory", "{place}", "--spark-conf", "executor.memory"], 2, "not NAME=VALUE"),
        (["integrity", "{place}", "-u", "sqlite:///nowhere.db"], 4, "/nowhere.db"),
        (["migrate-scope", "--to-scope", "1"], 2, "name ledgers, or add --ledger-scope-id"),
        (["import", "{place}"], 4, "is not a complete export; create one with 'bkctl pipeline export'"),
        (["export", "{place}"], 5, "add --overwrite"),
    ],
)
def test_usage_errors_are_one_line_before_spark_starts(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: str
) -> None:
    # No local cluster is up here, whatever other tests began.
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    uri = None if arguments == ["inventory"] else files.uri
    answer = CommandLine(uri)("pipeline", *(word.format(place=files.places()[0]) for word in arguments))
    assert (answer.code, answer.out) == (code, b"")
    assert words in answer.problem
