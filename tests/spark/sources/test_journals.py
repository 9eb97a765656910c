"""`bookkeeper.journal` without Spark: rows as the reader of single records gives them, torn tails, damage, changes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import golden
from support.source_rows import Planned, cuts, rows_of

from bkctl.errors import BkctlError, Conflict, CorruptRecord, NotFound
from bkctl.files.journal import JournalReader
from bkctl.formats.entry import DigestManager, DigestType, master_key, read_lac_header
from bkctl.formats.journal import write_header, write_padding
from bkctl.formats.record import (
    EXPLICIT_LAC_ENTRY_ID,
    FENCE_ENTRY_ID,
    LEDGER_KEY_ENTRY_ID,
    NO_LEDGER,
    Record,
    RecordType,
    record_of,
    write_ids,
)
from bkctl.ids import LedgerId
from bkctl.spark.sources.columns import ledger_values
from bkctl.spark.sources.places import bookie_id_at
from bkctl.spark.sources.records import JournalSource

V1, V2 = LedgerId(0, 5), LedgerId(7, 2**63 + 1)
BOOKIES = golden.bookies()
SETS = golden.journals()


def entry(ledger: LedgerId, entry_id: int, payload: bytes = b"hello") -> bytes:
    manager = DigestManager(ledger, DigestType.CRC32C)
    return record_of(manager.seal(entry_id, entry_id - 1, (entry_id + 1) * len(payload), payload) + payload)


def special(ledger: LedgerId, entry_id: int, content: bytes | None = None) -> bytes:
    body = write_ids(ledger, entry_id)
    return record_of(body if content is None else body + struct.pack(">i", len(content)) + content)


def journal(version: int, *groups: list[bytes]) -> bytes:
    data = write_header(version)
    for group in groups:
        data += b"".join(group)
        data += write_padding(len(data))
    return data


def groups_of(*ledgers: LedgerId) -> list[list[bytes]]:
    """Groups of records of every type."""
    found = []
    for ledger in ledgers:
        manager = DigestManager(ledger, DigestType.CRC32C)
        found.append([special(ledger, LEDGER_KEY_ENTRY_ID, master_key(b"secret"))])
        found.append([entry(ledger, at, bytes(at)) for at in range(30)])
        found.append([special(ledger, EXPLICIT_LAC_ENTRY_ID, manager.seal_lac(17)), special(ledger, FENCE_ENTRY_ID)])
        found += [[entry(ledger, at)] for at in range(30, 40)]
    return found


def row_of(record: Record, reader: JournalReader) -> dict[str, Any]:
    lac = record.last_add_confirmed
    if record.type is RecordType.EXPLICIT_LAC:
        lac = read_lac_header(record.special_payload).last_add_confirmed
    ids = dict.fromkeys(NO_LEDGER.to_json()) if record.ledger == NO_LEDGER else ledger_values(record.ledger)
    return {
        **ids,
        "entryId": record.entry_id,
        "lastAddConfirmed": lac,
        "length": record.length,
        "size": record.payload_size(),
        "formatVersion": record.format_version,
        "journalId": reader.journal_id,
        "journalIdHex": None if reader.journal_id is None else f"{reader.journal_id:x}",
        "offset": record.offset,
        "recordSize": record.record_size,
        "type": record.type.value,
        "file": str(reader.path),
        "scoped": reader.path.parent.name == "scoped",
        "bookieId": bookie_id_at(reader.path.parent),
    }


def outcome(path: Path, *, padding: bool = False) -> tuple[list[dict[str, Any]], BkctlError | None]:
    """The rows that the reader of single records finds, and the error that ends it."""
    found: list[dict[str, Any]] = []
    try:
        with JournalReader.open(path) as reader:
            found.extend(row_of(record, reader) for record in reader.records(padding=padding))
    except BkctlError as error:
        return found, error
    return found, None


def check_both_modes(path: Path, **options: object) -> None:
    rows, error = outcome(path)
    if error is None:
        assert rows_of(JournalSource, path=path, **options) == rows
    else:
        with pytest.raises(type(error)) as caught:
            rows_of(JournalSource, path=path, **options)
        assert str(caught.value) == str(error)
    found = rows_of(JournalSource, path=path, mode="permissive", **options)
    assert [row for row in found if row.pop("damage") is None] == rows or error is not None
    assert found[: len(rows)] == rows
    assert len(found) == len(rows) + (error is not None)


@pytest.mark.parametrize("size", [8000, 1 << 30])
@pytest.mark.parametrize("bookie", BOOKIES, ids=[f"{each.version}-{each.name}" for each in BOOKIES])
def test_journals_match_apache_shell(bookie: golden.GoldenBookie, size: int) -> None:
    rows = rows_of(JournalSource, path=bookie.journal_dir, borders=cuts(size, *bookie.journals))
    names = ("type", "ledgerId", "entryId", "offset", "recordSize")
    by_file: dict[Path, list[tuple[Any, ...]]] = {path: [] for path in bookie.journals}
    for row in rows:
        by_file[Path(row["file"])].append(tuple(row[name] for name in names))
    for path, (_, answer) in bookie.journals.items():
        wanted = [(each["type"], int(each["ledgerId"]), *(each[name] for name in names[2:])) for each in answer]
        assert by_file[path] == wanted
    assert {row["bookieId"] for row in rows} == {bookie.bookie_id}


@pytest.mark.parametrize("each", SETS, ids=str)
def test_journals_of_every_version_have_every_row(each: golden.GoldenJournals) -> None:
    for path in each.journals:
        check_both_modes(path, borders=cuts(4000, path))


@pytest.mark.parametrize("size", [1, 300, 1 << 20])
@pytest.mark.parametrize("version", [5, 6, 7])
def test_every_type_of_record(tmp_path: Path, version: int, size: int) -> None:
    path = tmp_path / "1f.txn"
    path.write_bytes(journal(version, *groups_of(V1, *([V2, V1] if version == 7 else []))))
    check_both_modes(path, borders=cuts(size, path))
    rows, error = outcome(path, padding=True)
    assert error is None
    types = ",".join(RecordType)
    assert rows_of(JournalSource, path=path, types=types, borders=cuts(size, path)) == rows
    fences = rows_of(JournalSource, path=path, types="fence", borders=cuts(size, path))
    assert fences == [row for row in rows if row["type"] == "fence"]


def test_master_keys_are_read_on_request_only(tmp_path: Path) -> None:
    path = tmp_path / "1f.txn"
    path.write_bytes(journal(6, *groups_of(V1)))
    rows = rows_of(JournalSource, path=path, columns="type,masterKey,payload", digestType="CRC32C")
    assert {row["type"]: row["masterKey"] for row in rows if row["masterKey"]} == {"ledgerKey": master_key(b"secret")}
    assert [len(row["payload"]) for row in rows if row["type"] == "entry"] == [*range(30), *[5] * 10]
    assert "masterKey" not in rows_of(JournalSource, path=path)[0]


def test_scoped_journals_that_a_downgrade_set_aside_are_found(tmp_path: Path) -> None:
    for place, ledger in (("current", V1), ("current/scoped", V2)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "1.txn").write_bytes(journal(7, *groups_of(ledger)))
    rows = rows_of(JournalSource, path=tmp_path)
    assert {(row["scoped"], row["ledgerQualifiedName"]) for row in rows} == {
        (False, V1.qualified_name), (True, V2.qualified_name)
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize(
    ("name", "tail"),
    [
        ("torn", entry(V1, 40)[:-3]),
        ("size only", entry(V1, 40)[:4] + bytes(500)),
        ("zeros", bytes(4096)),
        ("hole", bytes(4096) + entry(V1, 40)),
        ("negative", struct.pack(">i", -9) + bytes(60)),
        ("huge", struct.pack(">i", 2**31 - 1) + entry(V1, 40)[4:]),
        ("padding cut", struct.pack(">ii", -0x100, 500) + bytes(20)),
        ("padding absurd", struct.pack(">ii", -0x100, -5) + bytes(20)),
        ("scoped in 6", entry(V2, 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_torn_tails_match_the_reader(tmp_path: Path, name: str, tail: bytes, size: int) -> None:
    path = tmp_path / "1f.txn"
    path.write_bytes(journal(6, *groups_of(V1)) + tail)
    check_both_modes(path, borders=cuts(size, path))


JOURNALS = {"real": next(iter(golden.GoldenBookie("4.18.0", "sorted").journals)).read_bytes()}
JOURNALS["scoped"] = journal(7, *groups_of(V1, V2))


@given(
    st.sampled_from(sorted(JOURNALS)),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=12)), max_size=3),
    st.none() | st.floats(0, 1),
    st.sampled_from([4000, 1 << 20]),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hostile_journals_match_the_reader(
    tmp_path: Path, name: str, changes: list[tuple[float, bytes]], cut: float | None, size: int
) -> None:
    data = bytearray(JOURNALS[name])
    for place, what in changes:
        at = int(place * len(data))
        data[at : at + len(what)] = what
    path = tmp_path / "1f.txn"
    path.write_bytes(data if cut is None else data[: int(cut * len(data))])
    check_both_modes(path, borders=cuts(size, path))


@pytest.mark.parametrize("size", [200, 1 << 20])
@pytest.mark.parametrize("change", ["deleted", "emptied", "shrunk", "another version"])
def test_journal_changed_after_plan_is_an_error(tmp_path: Path, change: str, size: int) -> None:
    path = tmp_path / "1f.txn"
    data = journal(6, *groups_of(V1))
    path.write_bytes(data)
    failing, permissive = (
        Planned(JournalSource, path=path, borders=cuts(size, path), mode=mode) for mode in ("failfast", "permissive")
    )
    if change == "deleted":
        path.unlink()
    else:
        path.write_bytes(
            {
                "emptied": b"",
                "shrunk": data[:-1500],
                "another version": write_header(7) + data[512:],
            }[change]
        )
    with pytest.raises(NotFound if change == "deleted" else Conflict, match=r"1f\.txn .* after the plan was made"):
        failing.rows()
    damage = [row["damage"] for row in permissive.rows() if row["damage"] is not None]
    assert {each["file"] for each in damage} == {str(path)}


def test_records_appended_after_plan_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "1f.txn"
    data = journal(6, *groups_of(V1))
    path.write_bytes(data)
    planned = Planned(JournalSource, path=path)
    before, _ = outcome(path)
    more = data + entry(V1, 40)
    path.write_bytes(more + write_padding(len(more)) + struct.pack(">i", -9) * 20)
    assert planned.rows() == before
    with pytest.raises(CorruptRecord):
        rows_of(JournalSource, path=path)
