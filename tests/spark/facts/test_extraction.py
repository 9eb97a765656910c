"""Extracts of a bookie's files: incremental, complete or without effect, and cleaned up."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support import (
    bookie_files,
    source_rows,  # skips where there is no PyArrow
)
from support.bookie_files import Files
from support.command_line import CommandLine

from bkctl.errors import BkctlError, Conflict, NotFound, Unreachable, UsageError
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.index import LedgerIndexReader
from bkctl.formats.entry import DigestType
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.spark.facts.extraction import ExtractCounts, extract
from bkctl.spark.facts.facts_store import FactsStore, directory_name
from bkctl.spark.jobs.bookies import find_bookies
from bkctl.spark.jobs.journal_audit import check_rows
from bkctl.spark.sources.indexes import IndexSource

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

#: Extracts a bookie in a process that is killed once its logs are read.
KILLED = """
import os, signal, sys
from bkctl.spark.facts import extraction
from bkctl.spark.jobs.bookies import find_bookies
extraction._Extract._write_index = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
(bookie,) = find_bookies([sys.argv[1]])
extraction.extract(bookie, extraction.FactsStore(sys.argv[2]), None)
"""


#: Runs the command where PySpark cannot be imported.
WITHOUT_SPARK = """
import sys
sys.modules["pyspark"] = None
from bkctl.__main__ import main
sys.argv[0] = "bkctl"
main()
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a cluster; no test changes them."""
    return bookie_files.make(tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def place(files: Files, tmp_path: Path) -> Path:
    """A copy of the directories of the bookie with databases, which has several logs."""
    place = tmp_path / "bookie"
    shutil.copytree(files.places()[2], place, ignore=shutil.ignore_patterns("*.log.lock"))
    return place


def extracted(place: Path, store: FactsStore, *, full: bool = False, keep_s: float = 3600) -> ExtractCounts:
    (bookie,) = find_bookies([place])
    return extract(bookie, store, None, full=full, keep=timedelta(seconds=keep_s))


def tables(store: FactsStore) -> dict[str, list[dict[str, object]]]:
    """The current rows of each table but for the names of their parts."""
    found: dict[str, list[dict[str, object]]] = {}
    for each in store.part_lists():
        for row in each.rows:
            if row["supersededAt"] is None:
                rows = store.read(row["table"], row["part"]).drop(["part"]).to_pylist()
                found.setdefault(row["table"], []).extend(rows)
    return {table: sorted(rows, key=repr) for table, rows in found.items()}


def test_second_extract_reads_changed_logs_only(place: Path, tmp_path: Path) -> None:
    store = FactsStore(str(tmp_path / "facts"))
    first = extracted(place, store)
    assert first.read_log_count == first.log_count > 1
    content = tables(store)
    assert {name for name, rows in content.items() if rows} >= {
        "records", "ledgers", "index", "journals", "journal_records", "cookies", "marks",
    }  # fmt: skip
    second = extracted(place, store)
    assert (second.read_log_count, second.record_count) == (0, first.record_count)
    assert tables(store) == content
    (bookie,) = find_bookies([place])
    log = Path(bookie.entry_logs()[0])
    os.utime(log, ns=(0, 0))
    assert extracted(place, store).read_log_count == 1
    assert tables(store) == content
    assert extracted(place, store, full=True).read_log_count == first.log_count
    assert tables(store) == content
    log.unlink()
    assert extracted(place, store).log_count == first.log_count - 1
    assert {row["file"] for row in tables(store)["ledgers"]} == set(bookie.entry_logs())


def test_killed_extract_leaves_nothing_half_and_is_completed(place: Path, tmp_path: Path) -> None:
    store = FactsStore(str(tmp_path / "facts"))
    command = [sys.executable, "-c", KILLED, place, store.uri]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    with pytest.raises(NotFound, match="has no facts of version 1"):
        store.part_lists()
    done = extracted(place, store)
    assert done.read_log_count == 0
    content = tables(store)
    other = FactsStore(str(tmp_path / "other"))
    extracted(place, other)
    assert content == tables(other)
    # A later extract that is killed changes nothing that readers see.
    (bookie,) = find_bookies([place])
    for log in bookie.entry_logs():
        os.utime(log, ns=(0, 0))
    before = store.part_lists()
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert store.part_lists() == before
    assert tables(store) == content


def test_superseded_parts_are_kept_for_a_while(place: Path, tmp_path: Path) -> None:
    store = FactsStore(str(tmp_path / "facts"))
    extracted(place, store)
    (first,) = store.part_lists()
    extracted(place, store)
    (second,) = store.part_lists()
    superseded = {row["part"] for row in second.rows if row["supersededAt"] is not None}
    current = {row["part"] for row in second.rows} - superseded
    assert superseded == {row["part"] for row in first.rows} - current
    assert {part.partition("/")[0] for part in superseded} >= {"index", "ledgers", "journals"}
    assert set(second.parts("records")) == set(first.parts("records")) <= current
    assert superseded <= {file.path for file in store.files("")}
    # Files that no list names are removed once no extract can still write them.
    leftover = Path(store.uri, "v1", "index", directory_name(second.bookie_id), "_0.tmp")
    leftover.write_bytes(b"")
    os.utime(leftover, (0, 0))
    extracted(place, store, keep_s=0)
    assert superseded.isdisjoint(file.path for file in store.files(""))
    assert not leftover.exists()
    assert len(list(Path(store.uri, "v1", "parts").iterdir())) == 1


def test_extracts_of_one_bookie_at_once_both_count(place: Path, tmp_path: Path) -> None:
    store = FactsStore(str(tmp_path / "facts"))
    extracted(place, store)
    content = tables(store)
    (bookie,) = find_bookies([place])
    during: list[ExtractCounts] = []

    def extract_meanwhile(done: int, known: int) -> None:
        if done == known:
            during.append(extracted(place, store))

    later = extract(bookie, store, None, progress=extract_meanwhile)
    assert len(during) == 1
    assert later.started_at < during[0].started_at
    assert tables(store) == content
    (current,) = store.part_lists()
    assert store.numbers() == {directory_name(bookie.bookie_id): [3]}
    assert current.started_at == later.started_at
    # Jobs that read the list of the other extract find its files.
    other = {row["part"] for row in current.rows if row["startedAt"] == during[0].started_at}
    assert other
    assert other <= {file.path for file in store.files("")}


def test_extract_gives_way_to_others_that_never_end(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FactsStore(str(tmp_path / "facts"))
    extracted(place, store)

    def vanish(*_: object) -> None:
        raise NotFound("No such file")

    monkeypatch.setattr(store, "part_list", vanish)
    with pytest.raises(Conflict, match=r"Other extracts of bookie .* run this one again when they are done"):
        extracted(place, store)


def test_digests_of_hmac_come_from_the_cluster_else_records_are_evidence(
    files: Files, place: Path, tmp_path: Path
) -> None:
    (bookie,) = find_bookies([place])
    with open_cluster(files.uri) as cluster:
        named = FactsStore(str(tmp_path / "named"))
        extract(bookie, named, cluster)
    plain = FactsStore(str(tmp_path / "plain"))
    extract(bookie, plain, None)
    assert "HMAC" in {row["digest"] for row in tables(named)["records"]}
    assert not tables(named)["evidence"]
    doubtful = [row for row in tables(plain)["records"] if row["digest"] is None]
    proofs = {(row["file"], row["offset"]): row["record"] for row in tables(plain)["evidence"]}
    assert doubtful
    for row in doubtful:
        record = proofs[row["file"], row["offset"]]
        assert isinstance(record, bytes)
        data = Path(str(row["file"])).read_bytes()
        begin = int(str(row["offset"])) + 4
        assert data[begin : begin + int(str(row["recordSize"]))] == record


def test_records_of_a_ledger_that_may_come_back_are_evidence(files: Files, place: Path, tmp_path: Path) -> None:
    """Else the next extracts, which do not read the log again, could not tell its sound entries from damaged ones."""
    facts = tmp_path / "facts"
    ledger = next(each.ledger for each in files.flushed if each.digest_type is DigestType.HMAC)
    (bookie,) = find_bookies([place])
    with open_cluster(files.uri) as cluster:
        (kept,) = [found for _, found in cluster.ledgers.read_many([ledger])]
        assert not isinstance(kept, BkctlError)
        cluster.ledgers.remove(ledger)
        try:
            extract(bookie, FactsStore(str(facts)), cluster)
        finally:
            cluster.ledgers.create(ledger, kept.metadata)
        assert extract(bookie, FactsStore(str(facts)), cluster).read_log_count == 0
    command = CommandLine(files.uri)
    expected = command("pipeline", "integrity", place, "--ledger", ledger)
    assert expected.code == 0, expected
    found = command("pipeline", "integrity", "--facts", facts, "--ledger", ledger)
    assert (found.code, found.out) == (0, expected.out), found


def test_extract_refuses_another_cluster_than_the_bookie_s(place: Path, tmp_path: Path) -> None:
    """Another cluster would judge records by the digests of other ledgers."""
    other = CommandLine(f"sqlite://{tmp_path / 'other.db'}")
    assert other("cluster", "init").code == 0
    refused = other("pipeline", "extract", place, tmp_path / "facts")
    assert (refused.code, refused.out) == (5, b""), refused
    assert "belongs to the cluster" in refused.problem
    assert not (tmp_path / "facts").exists()


@pytest.mark.parametrize("calls", [0, 1, 2])
@pytest.mark.parametrize("error_class", [Unreachable, BkctlError])
def test_metadata_store_that_fails_is_not_noted_as_damage(
    files: Files, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int,
    error_class: type[BkctlError],
) -> None:  # fmt: skip
    """Else the next extract would take over the part of the log that this one did not read."""
    (bookie,) = find_bookies([place])
    left = calls

    with open_cluster(files.uri) as cluster:
        read = cluster.ledgers.read

        def failing(ledger: LedgerId) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise error_class("The metadata store does not answer")
            return read(ledger)

        monkeypatch.setattr(cluster.ledgers, "read", failing)
        store = FactsStore(str(tmp_path / "facts"))
        with pytest.raises(Unreachable, match="does not answer"):
            extract(bookie, store, cluster)
        monkeypatch.undo()
        extract(bookie, store, cluster)
    found = tables(store)
    assert not found.get("damages")
    assert "HMAC" in {row["digest"] for row in found["records"]}


def test_full_extract_reports_no_damage_that_is_gone(files: Files, place: Path, tmp_path: Path) -> None:
    store = FactsStore(str(tmp_path / "facts"))
    (bookie,) = find_bookies([place])
    log = Path(bookie.entry_logs()[0])
    sound, status = log.read_bytes(), log.stat()
    with EntryLogReader.open(log) as reader:
        offset = next(iter(reader.records())).offset
    log.write_bytes(sound[:offset] + struct.pack(">i", -7) + sound[offset + 4 :])
    os.utime(log, ns=(status.st_mtime_ns, status.st_mtime_ns))
    assert extracted(place, store).damage_count == 1
    (before,) = store.part_lists()
    assert tables(store)["damages"]
    assert tables(store)["evidence"]
    log.write_bytes(sound)
    os.utime(log, ns=(status.st_mtime_ns, status.st_mtime_ns))
    with open_cluster(files.uri) as cluster:
        assert extract(bookie, store, cluster, full=True).damage_count == 0
    assert not tables(store).get("damages")
    assert not tables(store).get("evidence")
    # Jobs that still read the former list find its files.
    assert {row["part"] for row in before.rows} <= {file.path for file in store.files("")}


def test_index_that_the_bookie_deletes_meanwhile_is_left_out(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "bookie"
    shutil.copytree(files.places()[1], place, ignore=shutil.ignore_patterns("*.log.lock"))
    opened: list[Path] = []

    def opening(path: Path) -> LedgerIndexReader:
        opened.append(path)
        if len(opened) == 2:
            path.unlink()
        return LedgerIndexReader(path)

    monkeypatch.setattr(LedgerIndexReader, "open", opening)
    store = FactsStore(str(tmp_path / "facts"))
    extracted(place, store)
    found = tables(store)
    assert len(opened) > 2
    assert {row["file"] for row in found["index"]} == set(map(str, opened)) - {str(opened[1])}
    assert not found.get("damages")


@pytest.mark.parametrize("missing", ["ledgers", "locations"])
def test_missing_database_is_noted_as_damage(place: Path, tmp_path: Path, missing: str) -> None:
    store = FactsStore(str(tmp_path / "facts"))
    extracted(place, store)
    before = tables(store)["index"]
    (database,) = place.rglob(f"current/{missing}")
    shutil.rmtree(database)
    assert extracted(place, store).damage_count == 1
    found = tables(store)
    assert [row for row in before if row["scoped"]] == found["index"] != []
    (damage,) = found["damages"]
    assert (damage["source"], damage["file"]) == ("index", str(database.with_name("locations")))
    assert str(database) in str(damage["reason"])
    rows = source_rows.rows_of(IndexSource, path=database.parent, mode="permissive")
    assert [row["damage"]["reason"] for row in rows if row["damage"]] == [damage["reason"]]


def test_a_damaged_journal_is_counted(place: Path, tmp_path: Path) -> None:
    journal = min(place.glob("journal/current/*.txn"))
    data = journal.read_bytes()
    journal.write_bytes(data[:1024] + struct.pack(">i", -7) + data[1028:])
    (check,) = (row for row in check_rows(find_bookies([place])[0]) if row["file"] == str(journal))
    assert check["damaged"]
    assert extracted(place, FactsStore(str(tmp_path / "facts"))).damage_count == 1


@pytest.mark.parametrize(("number", "name"), [(2, "0.log"), (2, "*.txn"), (2, "CURRENT"), (1, "*.idx")])
def test_file_without_permission_to_read_is_not_noted_as_damage(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    """Else later extracts took over the part of the log, and never read it."""
    place = tmp_path / "bookie"
    shutil.copytree(files.places()[number], place, ignore=shutil.ignore_patterns("*.log.lock"))
    file = min(place.rglob(name))
    really_open = os.open

    def refuse(path: Any, *arguments: int, **options: int) -> int:
        if path == file:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return really_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    store = FactsStore(str(tmp_path / "facts"))
    with pytest.raises(BkctlError, match=f"{file} cannot be read: Permission denied") as caught:
        extracted(place, store)
    assert caught.value.exit_code == 1
    monkeypatch.undo()
    extracted(place, store)
    assert not tables(store).get("damages")


@pytest.mark.parametrize("error", [Unreachable("The store is away"), NotFound("A part is gone")], ids=["away", "gone"])
def test_facts_that_cannot_be_read_are_not_noted_as_damage_of_an_index(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BkctlError
) -> None:
    monkeypatch.setattr("bkctl.spark.facts.extraction._CHUNK_ROWS", 1)
    store = FactsStore(str(tmp_path / "facts"))
    read = store.read

    def failing(table: str, path: str, columns: list[str] | None = None) -> Any:
        if table == "records":
            raise error
        return read(table, path, columns)

    monkeypatch.setattr(store, "read", failing)
    with pytest.raises(type(error), match=error.message):
        extracted(Path(files.places()[1]), store)
    with pytest.raises(NotFound, match="has no facts"):
        store.part_lists()


def test_extract_prints_its_counts_and_refuses_what_it_cannot_use(place: Path, tmp_path: Path) -> None:
    command = CommandLine(None)
    (row,) = command("pipeline", "extract", place, tmp_path / "facts", "-o", "ndjson").rows
    assert row["readLogCount"] == row["logCount"] > 1
    (row,) = command("pipeline", "extract", place, tmp_path / "facts", "-o", "ndjson").rows
    assert row["readLogCount"] == 0
    unknown = command("pipeline", "extract", place, "gopher://host/facts")
    assert (unknown.code, unknown.out) == (2, b"")
    assert "gopher://host/facts cannot be used for facts" in unknown.problem
    (tmp_path / "file").write_bytes(b"")
    taken = command("pipeline", "extract", place, tmp_path / "file")
    assert (taken.code, taken.out) == (1, b"")
    assert f"Cannot write facts at {tmp_path / 'file'}" in taken.problem
    with pytest.raises(UsageError, match="cannot be used for facts"):
        FactsStore("gopher://host/facts")
    with pytest.raises(BkctlError, match="Cannot write facts"):
        extracted(place, FactsStore(str(tmp_path / "file")))


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[:0],
        lambda rows: rows.drop(["part"]),
        lambda rows: rows.drop(["bookieId"]).append_column("bookieId", pa.array(["another"] * rows.num_rows)),
        lambda rows: rows.drop(["startedAt"]).append_column("startedAt", pa.array(["soon"] * rows.num_rows)),
        lambda rows: rows.drop(["part"]).append_column(
            "part", pa.array([f"{table}/{'../' * 9}etc/passwd" for table in rows.column("table").to_pylist()])
        ),
    ],
    ids=["empty", "incomplete", "another bookie", "wrong type", "outside"],
)
def test_list_that_no_extract_wrote_is_refused(
    place: Path, tmp_path: Path, change: Callable[[pa.Table], pa.Table]
) -> None:
    command = CommandLine(None)
    extracted(place, FactsStore(str(tmp_path / "facts")))
    (found,) = (tmp_path / "facts/v1/parts").iterdir()
    pq.write_table(change(pq.read_table(found)), found)
    for arguments in (["inventory", "--facts", tmp_path / "facts"], ["extract", place, tmp_path / "facts"]):
        refused = command("pipeline", *arguments)
        assert refused.code == 1
        assert str(tmp_path / "facts") in refused.problem
        assert "Internal error" not in refused.problem


def test_extract_needs_no_spark(place: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_SPARK, "pipeline", "extract", place, tmp_path / "facts"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert tables(FactsStore(str(tmp_path / "facts")))["records"]


def test_directory_names_tell_bookies_apart() -> None:
    ids = ["a:1", "a_3A1", "a-1", "[::1]:3181", "a/1", "A:1", "\N{LATIN SMALL LETTER E WITH ACUTE}:1"]
    names = [directory_name(each) for each in ids]
    assert len(set(names)) == len(ids)
    assert all(name.startswith("bookie-") and "/" not in name and ":" not in name for name in names)


def test_uris_are_shown_and_given_to_spark_without_keys() -> None:
    store = FactsStore("s3://key:secret@bucket/facts?region=eu-central-1")
    assert store.uri == "s3://***@bucket/facts?region=eu-central-1"
    assert store.spark_path("parts/a.parquet") == "s3a://bucket/facts/v1/parts/a.parquet"
    assert FactsStore("relative").spark_path("parts") == f"file://{Path('relative').absolute()}/v1/parts"
