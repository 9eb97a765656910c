"""Planted damage in the files of a cluster: the jobs find exactly that, as an independent parser of the files says."""

from __future__ import annotations

import shutil
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support import (
    bookie_files,
    source_rows,  # noqa: F401 (skips where there is no PySpark)
)
from support.bookie_files import Files
from support.engines import Engine

from bkctl.client.ensemble import RoundRobinDistributionSchedule
from bkctl.metadata.cluster import open_cluster
from bkctl.spark.engine import functions_of
from bkctl.spark.facts.extraction import extract
from bkctl.spark.facts.facts_store import FactsStore
from bkctl.spark.facts.frames import Facts
from bkctl.spark.jobs.bookies import Bookies, find_bookies
from bkctl.spark.jobs.integrity import integrity
from bkctl.spark.jobs.journal_audit import audit

#: Ways in which jobs read bookies' files.
READINGS = ("directories", "facts")
#: ledgerQualifiedName, entry id.
Entry = tuple[str, int]


class Found(NamedTuple):
    """A record that the parser found: its entry, and the offset and value of its size field."""

    entry: Entry
    offset: int
    size: int


def parse(path: Path) -> Iterator[Found]:
    """Yield the entries of an undamaged journal or entry log."""
    data = path.read_bytes()
    (version,) = struct.unpack_from(">i", data, 4)
    at = 1024 if data[:4] == b"BKLO" else 512 if version >= 5 else 8
    while at + 4 <= len(data):
        (size,) = struct.unpack_from(">i", data, at)
        if size == -0x100:
            at += 8 + struct.unpack_from(">i", data, at + 4)[0]
            continue
        if size <= 0:
            return
        if data[at + 4 : at + 12] != b"\xff" * 8:
            scope_id, place = (struct.unpack_from(">Q", data, at + 5)[0], 13) if data[at + 4] >= 0x80 else (0, 4)
            ledger_id, entry_id = struct.unpack_from(">Qq", data, at + place)
            if entry_id >= 0:
                yield Found((f"{scope_id:016x}{ledger_id:016x}", entry_id), at, size)
        at += 4 + size


def logs_of(place: str) -> list[Path]:
    current = Path(place, "ledgers", "current")
    return [*current.glob("*.log"), *current.glob("scoped/*.log")]


def replayed(place: str) -> set[Entry]:
    """Return the entries in the journals of a bookie; those that a clean stop set aside are not replayed."""
    return {found.entry for path in Path(place, "journal", "current").glob("*.txn") for found in parse(path)}


def promised(files: Files, bookie: str) -> set[Entry]:
    """Return the entries of closed ledgers that the metadata promises on a bookie."""
    entries = set()
    with open_cluster(files.uri) as cluster:
        for written in files.written:
            metadata = cluster.ledgers.read(written.ledger).metadata
            schedule = RoundRobinDistributionSchedule.of(metadata)
            for entry_id in range(written.entry_count if written.closed else written.entry_count - 1):
                ensemble = metadata.fragment_of(entry_id).bookies
                if bookie in [ensemble[index] for index in schedule.write_set(entry_id)]:
                    entries.add((written.ledger.qualified_name, entry_id))
    return entries


def index_of(place: str, name: str) -> Path:
    """Return the index file of a ledger of scope 0."""
    (path,) = Path(place, "ledgers", "current").rglob(f"{int(name, 16):x}.idx")
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return bookie_files.make(tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def files(whole: Files, tmp_path: Path) -> Files:
    """The files to damage."""
    for place in whole.places():
        shutil.copytree(place, tmp_path / Path(place).name, ignore=shutil.ignore_patterns("*.log.lock"))
    with sqlite3.connect(whole.directory / "metadata.db") as store, sqlite3.connect(tmp_path / "metadata.db") as copy:
        store.backup(copy)
    return whole._replace(directory=tmp_path, uri=f"sqlite://{tmp_path / 'metadata.db'}")


def bookies_of(files: Files, places: list[str], reading: str, uri: Path) -> Bookies:
    """The bookies at `places`, or their facts, extracted to `uri`."""
    found = find_bookies(places)
    if reading == "directories":
        return found
    with open_cluster(files.uri) as cluster:
        for bookie in found:
            extract(bookie, FactsStore(str(uri)), cluster)
    return Facts(str(uri))


@pytest.mark.parametrize("reading", READINGS)
def test_replayed_and_unindexed_copies_count_in_integrity(
    engine: Engine, files: Files, tmp_path_factory: pytest.TempPathFactory, reading: str
) -> None:
    first, second, _ = files.places()
    # A start of the first bookie replays its journals: all that it has now.
    for path in [*logs_of(first), *Path(first).rglob("lastMark*")]:
        path.unlink()
    expected = {(*entry, files.bookies[0], "missing") for entry in promised(files, files.bookies[0]) - replayed(first)}
    assert expected
    # The second bookie's index of a ledger is gone, and a byte of one of its copies is flipped.
    name = files.flushed[-1].ledger.qualified_name
    index_of(second, name).unlink()
    log, found = next((log, each) for log in logs_of(second) for each in parse(log) if each.entry == (name, 5))
    data = bytearray(log.read_bytes())
    data[found.offset + 4 + found.size - 1] ^= 1
    log.write_bytes(data)
    of_ledger = {entry for entry in promised(files, files.bookies[1]) if entry[0] == name}
    expected |= {(*entry, files.bookies[1], "notIndexed") for entry in of_ledger - replayed(second)}
    expected.add((name, 5, files.bookies[1], "damaged"))
    bookies = bookies_of(files, [str(files.directory)], reading, tmp_path_factory.mktemp("facts"))
    result = integrity(engine.session, bookies, {"metadataUri": files.uri})
    rows = result.findings.collect()
    assert {(row.ledgerQualifiedName, row.entryId, row.bookieId, row.problem) for row in rows} == expected
    assert len(rows) == len(expected)
    # Findings about one record are in order of their problems.
    of_record = [row.problem for row in rows if (row.file, row.offset) == (str(log), found.offset)]
    assert of_record == ["damaged", "notIndexed"]
    result.release()


@pytest.mark.parametrize("reading", READINGS)
def test_audit_finds_entries_behind_damage_by_their_index(
    engine: Engine, files: Files, tmp_path_factory: pytest.TempPathFactory, reading: str
) -> None:
    expected = set()
    for place, bookie, is_indexed in zip(files.places()[:2], files.bookies, (True, False), strict=False):
        (log,) = [log for log in logs_of(place) if log.parent.name != "scoped"]
        found = list(parse(log))
        # The first size field in the middle of a ledger that the journals still have.
        journaled = replayed(place)
        at = next(number for number, each in enumerate(found) if number > 20 and each.entry in journaled)
        with open(log, "r+b") as file:
            file.seek(found[at].offset)
            file.write(struct.pack(">i", -7))
        logged = {each.entry for path in logs_of(place) if path != log for each in parse(path)}
        before = logged | {each.entry for each in found[:at]}
        behind = ({each.entry for each in found[at + 1 :]} - before) & journaled
        assert behind
        lost = {found[at].entry} | journaled - before - behind
        if not is_indexed:
            for name in {entry[0] for entry in behind}:
                index_of(place, name).unlink()
            expected |= {(*entry, bookie, "unknown") for entry in behind | lost}
        else:
            expected |= {(*entry, bookie, "no" if entry == found[at].entry else "unknown") for entry in lost}
    result = audit(engine.session, bookies_of(files, files.places()[:2], reading, tmp_path_factory.mktemp("facts")))
    rows = result.unlogged.collect()
    assert {(row.ledgerQualifiedName, row.entryId, row.bookieId, row.logged) for row in rows} == expected
    assert len(rows) == len(expected)
    sums = (functions_of(result.journals).sum(name) for name in ("unloggedCount", "unknownCount"))
    (counts,) = result.journals.agg(*sums).collect()
    words = [row[3] for row in expected]
    assert tuple(counts) == (words.count("no"), words.count("unknown"))
    result.release()
