"""The readers give what Apache's shell gave on the same files, and every entry is the one that Java's client wrote."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support import golden
from support.golden import GoldenBookie

from bkctl.files.entry_log import EntryLogReader
from bkctl.files.index import LedgerIndexReader
from bkctl.files.journal import JournalReader, read_last_mark
from bkctl.files.listing import log_contents
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.entry_log import unpack_location
from bkctl.formats.index import index_path
from bkctl.formats.record import Record, RecordType
from bkctl.ids import LedgerId

BOOKIES = golden.bookies()


@pytest.fixture(params=BOOKIES, ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def bookie(request: pytest.FixtureRequest) -> GoldenBookie:
    assert isinstance(request.param, GoldenBookie)
    return request.param


def row(record: Record) -> dict[str, Any]:
    """A record as `apache_shell.records` gives it."""
    found: dict[str, Any] = {
        "type": str(record.type),
        "ledgerId": str(record.ledger.ledger_id),
        "entryId": record.entry_id,
        "offset": record.offset,
        "recordSize": record.record_size,
    }
    if record.type is RecordType.ENTRY:
        found["lastAddConfirmed"] = record.last_add_confirmed
    elif record.type is RecordType.LEDGER_KEY:
        found["masterKey"] = record.special_payload.hex()
    return found


def test_journals_have_the_records_that_readjournal_lists(bookie: GoldenBookie) -> None:
    assert len(bookie.journals) >= 2
    for path, (version, rows) in bookie.journals.items():
        with JournalReader.open(path) as reader:
            assert version in (None, reader.version)
            assert [row(record) for record in reader.records()] == rows


def test_entry_logs_have_the_records_that_readlog_lists(bookie: GoldenBookie) -> None:
    assert sum(bool(rows) for rows, _ in bookie.entry_logs.values()) >= 2
    for path, (rows, ledgers) in bookie.entry_logs.items():
        with EntryLogReader.open(path) as reader:
            assert [row(record) for record in reader.records()] == rows
            assert {str(ledger.ledger_id): size for ledger, size in log_contents(reader).sizes.items()} == ledgers


def test_ledgers_maps_match_readlogmetadata() -> None:
    maps = []
    for bookie in BOOKIES:
        for path, (_, ledgers) in bookie.entry_logs.items():
            with EntryLogReader.open(path) as reader:
                found = reader.ledgers_map()
            maps.append(found is not None)
            if found is not None:
                assert {str(ledger.ledger_id): size for ledger, size in found.items()} == ledgers
    assert any(maps)
    assert not all(maps)


def test_index_files_have_the_locations_that_ledger_lists(bookie: GoldenBookie) -> None:
    if bookie.name == "db":
        assert not list(bookie.ledger_dir.glob("**/*.idx"))
        return
    assert len(bookie.indexes) == len(list(bookie.ledger_dir.glob("**/*.idx")))
    for ledger_id, answer in bookie.indexes.items():
        ledger = LedgerId(0, int(ledger_id))
        with LedgerIndexReader.open(bookie.ledger_dir / "current" / index_path(ledger)) as reader:
            assert reader.ledger == ledger
            assert reader.header.master_key.hex() == answer["masterKey"]
            assert reader.header.fenced == answer["fenced"]
            found = {entry_id: unpack_location(location) for entry_id, location in reader.locations()}
            assert found == answer["locations"]


def test_the_last_mark_is_the_one_that_lastmark_prints(bookie: GoldenBookie) -> None:
    assert tuple(read_last_mark([bookie.ledger_dir])) == bookie.last_mark


def records_of(paths: Iterable[Path]) -> Iterable[Record]:
    for path in paths:
        with EntryLogReader.open(path) as reader:
            yield from reader.records()


def test_every_entry_in_the_logs_matches_its_digest_and_payload(bookie: GoldenBookie) -> None:
    ledgers = {int(ledger["ledgerId"]): ledger for ledger in golden.ledgers(bookie.version)}
    managers = {
        ledger_id: DigestManager(
            LedgerId(0, ledger_id), DigestType.parse(ledger["digestType"]), base64.b64decode(ledger["password"])
        )
        for ledger_id, ledger in ledgers.items()
    }
    entries = 0
    for record in records_of(bookie.entry_logs):
        if record.type is not RecordType.ENTRY:
            continue
        ledger_id = record.ledger.ledger_id
        expected = ledgers[ledger_id]["entries"][record.entry_id]
        entry = managers[ledger_id].open(record.body, record.entry_id)
        assert hashlib.sha256(entry.payload).hexdigest() == expected["sha256"]
        assert (len(entry.payload), entry.length) == (expected["size"], expected["length"])
        assert expected["lastAddConfirmed"] in (None, entry.last_add_confirmed)
        entries += 1
    assert entries > 1000


def test_the_index_points_at_the_entries_in_the_logs(bookie: GoldenBookie) -> None:
    for ledger_id, answer in bookie.indexes.items():
        for entry_id, (log_id, position) in list(answer["locations"].items())[:20]:
            with EntryLogReader.open(bookie.ledger_dir / "current" / f"{log_id:x}.log") as reader:
                record = reader.entry_at(position)
            assert (record.ledger.ledger_id, record.entry_id) == (int(ledger_id), entry_id)
