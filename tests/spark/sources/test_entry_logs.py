"""`bookkeeper.entrylog` without Spark: plans, rows, filters, damage, and files that change between plan and read."""

from __future__ import annotations

import os
import shutil
import struct
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import EqualTo, IsNotNull
from pyspark.sql.types import LongType, StructType
from support import golden
from support.source_rows import Planned, cuts, rows_of

from bkctl.errors import BkctlError, Conflict, CorruptRecord, NotFound, Unsupported, UsageError
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.windows import FileReader
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.entry_log import write_header, write_ledgers_map
from bkctl.formats.record import NO_LEDGER
from bkctl.ids import LedgerId
from bkctl.spark.sources.columns import ledger_values
from bkctl.spark.sources.places import resolve
from bkctl.spark.sources.records import EntryLogSource

V1, OTHER = LedgerId(0, 5), LedgerId(0, 6)
V2, HUGE = LedgerId(7, 1), LedgerId(2**64 - 1, 2**63 + 9)
BOOKIES = golden.bookies()
IDS = [f"{bookie.version}-{bookie.name}" for bookie in BOOKIES]
LOG = next(iter(golden.GoldenBookie("4.18.0", "sorted").entry_logs))


def record(ledger: LedgerId, entry_id: int, payload: bytes = b"hello", digest: DigestType = DigestType.CRC32C) -> bytes:
    sealed = DigestManager(ledger, digest).seal(entry_id, entry_id - 1, (entry_id + 1) * len(payload), payload)
    return struct.pack(">i", len(sealed) + len(payload)) + sealed + payload


def write(path: Path, *records: bytes, version: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(write_header(version) + b"".join(records))
    return path


def expected(path: Path, digest_type: DigestType | None = None, **more: Any) -> Iterator[dict[str, Any]]:
    """The rows of a log, made of what the reader of single records says."""
    with EntryLogReader.open(path) as reader:
        for each in reader.records():
            yield {
                **ledger_values(each.ledger),
                "entryId": each.entry_id,
                "lastAddConfirmed": each.last_add_confirmed,
                "length": each.length,
                "size": each.payload_size(digest_type),
                "formatVersion": each.format_version,
                "logId": reader.log_id,
                "logIdHex": f"{reader.log_id:x}",
                "offset": each.offset,
                "recordSize": each.record_size,
                "type": each.type.value,
                "file": str(path),
                "scoped": path.parent.name == "scoped",
                **more,
            }


def without_bookie(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "bookieId"} for row in rows]


@pytest.mark.parametrize("size", [5000, 1 << 20])
@pytest.mark.parametrize("bookie", BOOKIES, ids=IDS)
def test_entry_logs_match_apache_shell(bookie: golden.GoldenBookie, size: int) -> None:
    rows = rows_of(EntryLogSource, path=bookie.ledger_dir, borders=cuts(size, *bookie.entry_logs))
    names = ("ledgerId", "entryId", "offset", "recordSize", "lastAddConfirmed")
    by_file: dict[Path, list[tuple[Any, ...]]] = {path: [] for path in bookie.entry_logs}
    for row in rows:
        by_file[Path(row["file"])].append(tuple(row[name] for name in names))
    for path, (answer, _) in bookie.entry_logs.items():
        entries = [each for each in answer if each["type"] == "entry"]
        assert by_file[path] == [(int(each["ledgerId"]), *(each[name] for name in names[1:])) for each in entries]
    assert {row["bookieId"] for row in rows} == {bookie.bookie_id}
    assert {row["scoped"] for row in rows} == {False}


@pytest.mark.parametrize("digest_type", [None, DigestType.CRC32C, DigestType.HMAC])
def test_every_column_matches_the_record_reader(tmp_path: Path, digest_type: DigestType | None) -> None:
    records = [record(V1, at, bytes(at)) for at in range(40)]
    plain = write(tmp_path / "current" / "1a.log", *records, record(OTHER, 2**40), *write_ledgers_map({V1: 5}))
    records = [record(V2 if at % 3 else HUGE, at, b"x" * at, list(DigestType)[at % 4]) for at in range(40)]
    scoped = write(tmp_path / "current" / "scoped" / "0.log", *records, *write_ledgers_map({V2: 9}, 2), version=2)
    options = {} if digest_type is None else {"digestType": digest_type.name}
    rows = rows_of(EntryLogSource, path=tmp_path, borders=cuts(500, plain, scoped), **options)
    assert without_bookie(rows) == [*expected(plain, digest_type), *expected(scoped, digest_type)]
    assert rows[0]["bookieId"] is None
    assert rows[-1]["ledgerId"] == 2**63 + 9


def test_columns_on_request(tmp_path: Path) -> None:
    records = [record(V1, at, b"p%d" % at, DigestType.CRC32 if at % 2 else DigestType.CRC32C) for at in range(20)]
    damaged = bytearray(record(V1, 20, b"payload"))
    damaged[-1] ^= 1
    path = write(tmp_path / "5.log", *records, bytes(damaged), record(V1, 21, b"m", DigestType.HMAC))
    columns = "payload,record,digest,digestType,entryId"
    rows = rows_of(EntryLogSource, path=path, columns=columns, digestType="crc32c")
    assert list(rows[0]) == columns.split(",")
    with EntryLogReader.open(path) as reader:
        for row, each in zip(rows, reader.records(), strict=True):
            assert row["payload"] == each.payload(DigestType.CRC32C)
            assert row["record"] == each.body
            assert row["digestType"] is None
    assert [row["digest"] for row in rows] == ["CRC32C", "CRC32"] * 10 + [None, None]
    assert {row["payload"] for row in rows_of(EntryLogSource, path=path, columns="payload")} == {None}

    records = [record(V2, at, b"p%d" % at, list(DigestType)[at % 4]) for at in range(20)]
    path = write(tmp_path / "6.log", *records, version=2)
    rows = rows_of(EntryLogSource, path=path, columns=columns)
    assert [row["payload"] for row in rows] == [b"p%d" % at for at in range(20)]
    assert [row["digestType"] for row in rows] == [each.name for each in DigestType] * 5
    assert [row["digest"] for row in rows] == ["CRC32", None, "CRC32C", "DUMMY"] * 5


def test_entries_too_short_for_their_digest_have_no_payload(tmp_path: Path) -> None:
    short = record(V1, 0, b"")[:-2]
    short = struct.pack(">i", len(short) - 4) + short[4:]
    path = write(tmp_path / "5.log", *[short] * 10, *(record(V1, at) for at in range(1, 11)))
    rows = rows_of(EntryLogSource, path=path, columns="size,payload", digestType="CRC32C")
    assert rows == [{"size": None, "payload": None}] * 10 + [{"size": 5, "payload": b"hello"}] * 10


@pytest.mark.parametrize("size", [1, 700, 10_000])
def test_payload_with_records_is_not_searched(tmp_path: Path, size: int) -> None:
    inner = write_header() + b"".join(record(OTHER, at) for at in range(50))
    records = [record(V1, at, inner[at:] if at % 2 else inner) for at in range(12)]
    path = write(tmp_path / "0.log", *records, *write_ledgers_map({V1: 1}))
    planned = Planned(EntryLogSource, path=path, borders=cuts(size, path), columns="*,payload", digestType="CRC32C")
    rows = planned.rows()
    assert [(row["ledgerId"], row["entryId"]) for row in rows] == [(5, at) for at in range(12)]
    assert rows[0]["payload"] == inner


@pytest.mark.parametrize("size", [1, 100, 4096, 1 << 20])
def test_partitions_hold_each_record_once(size: int) -> None:
    planned = Planned(EntryLogSource, path=LOG, borders=cuts(size, LOG), types="entry,ledgersMap,padding")
    with EntryLogReader.open(LOG) as reader:
        offsets = [each.offset for each in reader.records(special=True)]
    assert {part.start for part in planned.parts} - {0} <= set(offsets)
    found = [[row["offset"] for row in planned.rows_of(part)] for part in planned.parts]
    assert all(len(each) == 1 or each[-1] - each[0] <= max(size, 1024) for each in found[:-1])
    assert list(chain.from_iterable(found)) == offsets


def test_plan_reads_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write(tmp_path / "current" / f"{at}.log", record(V1, at, bytes(1 << 20))) for at in range(3)]
    sizes: Counter[str] = Counter()
    whole = FileReader.read

    def read(self: FileReader, at: int, size: int) -> bytes:
        data = whole(self, at, size)
        sizes[self.name] += len(data)
        return data

    monkeypatch.setattr(FileReader, "read", read)
    planned = Planned(EntryLogSource, path=tmp_path, ledger="5")
    assert sizes == {str(path): 8 for path in paths}
    assert [part.state.size_bytes for part in planned.parts] == [path.stat().st_size for path in paths]


def test_logs_without_a_wanted_ledger_are_not_scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for at, ledger in enumerate((V1, OTHER, OTHER)):
        records = [record(ledger, each) for each in range(5)]
        size = sum(map(len, records))
        ledgers_map = b"".join(write_ledgers_map({ledger: size}))
        path = write(tmp_path / "current" / f"{at}.log", *records, ledgers_map)
        with open(path, "r+b") as file:
            # The last log has no header that names its map: it may hold every ledger.
            file.write(write_header(1, *((1024 + size, 1) if at < 2 else ())))
    scanned = []
    batches = EntryLogReader.batches
    monkeypatch.setattr(
        EntryLogReader, "batches",
        lambda self, *words, **named: scanned.append(self.log_id) or batches(self, *words, **named),
    )  # fmt: skip
    assert [row["logId"] for row in rows_of(EntryLogSource, path=tmp_path, ledger="5")] == [0] * 5
    assert scanned == [0, 2]


def test_records_of_every_size_are_found(tmp_path: Path) -> None:
    sizes = [3 << 20, 0, 100_000, 1, 5 << 20, *[70_000] * 90, 20, 9 << 20]
    path = write(tmp_path / "0.log", *(record(V1, at, bytes(size)) for at, size in enumerate(sizes)))
    for columns in ("entryId,recordSize", "entryId,recordSize,payload"):
        rows = rows_of(EntryLogSource, path=path, columns=columns, digestType="CRC32C")
        assert [(row["entryId"], row["recordSize"]) for row in rows] == [
            (at, size + 36) for at, size in enumerate(sizes)
        ]
    assert [len(row["payload"]) for row in rows] == sizes


@pytest.mark.parametrize("version", [1, 2])
def test_large_payloads_are_read_on_request_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    ledger = V1 if version == 1 else V2
    path = write(tmp_path / "0.log", *(record(ledger, at, bytes(300_000)) for at in range(60)), version=version)
    planned = Planned(EntryLogSource, path=path)
    read_bytes = 0
    whole = FileReader.read

    def read(self: FileReader, at: int, size: int) -> bytes:
        nonlocal read_bytes
        data = whole(self, at, size)
        read_bytes += len(data)
        return data

    monkeypatch.setattr(FileReader, "read", read)
    assert len(planned.rows()) == 60
    assert read_bytes < path.stat().st_size / 3


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("count", [7, 8, 9, 14])
def test_few_large_entries_are_read_by_their_headers(tmp_path: Path, version: int, count: int) -> None:
    ledger = V1 if version == 1 else V2
    records = [record(ledger, at, bytes(600_000)) for at in range(count)]
    path = write(tmp_path / "0.log", *records, version=version)
    rows = rows_of(EntryLogSource, path=path, columns="ledgerQualifiedName,entryId,recordSize,offset,type")
    with EntryLogReader.open(path) as reader:
        assert [tuple(row.values()) for row in rows] == [
            (each.ledger.qualified_name, each.entry_id, each.record_size, each.offset, "entry")
            for each in reader.records()
        ]
    (sums,) = rows_of(EntryLogSource, path=path, rows="ledgers", columns="ledgerQualifiedName,entryCount,size")
    assert tuple(sums.values()) == (ledger.qualified_name, count, sum(map(len, records)))


def test_padding_of_direct_io_logger_is_skipped(tmp_path: Path) -> None:
    def padded(data: bytes) -> bytes:
        return data + b"\xf0" * (-(1024 + len(data)) % 4096)

    data = padded(padded(record(V1, 0)) + record(V1, 1) + record(V1, 2)) + record(V1, 3)
    path = write(tmp_path / "0.log", data)
    assert without_bookie(rows_of(EntryLogSource, path=path, borders=cuts(1, path))) == list(expected(path))
    assert without_bookie(rows_of(EntryLogSource, path=path)) == list(expected(path))


def test_fillers_are_rows_on_request_only(tmp_path: Path) -> None:
    path = write(tmp_path / "0.log", record(V1, 0), *write_ledgers_map({V1: 45}))
    assert [row["type"] for row in rows_of(EntryLogSource, path=path)] == ["entry"]
    rows = rows_of(EntryLogSource, path=path, types="ledgersMap,entry")
    assert [(row["type"], row["ledgerId"], row["entryId"]) for row in rows] == [
        ("entry", 5, 0), ("ledgersMap", None, -2)
    ]  # fmt: skip


def test_options_ledger_and_scope_select(tmp_path: Path) -> None:
    write(tmp_path / "current" / "0.log", *(record(each, 3) for each in (V1, OTHER) * 10))
    write(tmp_path / "current" / "scoped" / "0.log", *(record(each, 4) for each in (V2, HUGE) * 10), version=2)

    def found(**options: str) -> set[str]:
        return {row["ledgerQualifiedName"] for row in rows_of(EntryLogSource, path=tmp_path, **options)}

    assert found(ledger="5") == {V1.qualified_name}
    assert found(ledger=f"6,{V2.qualified_name}") == {OTHER.qualified_name, V2.qualified_name}
    assert found(ledger="1", ledgerScopeId="7") == {V2.qualified_name}
    assert found(ledgerScopeId="0") == {V1.qualified_name, OTHER.qualified_name}
    assert found(ledgerScopeId="-1") == {HUGE.qualified_name}
    assert found(ledger="99") == set()


# --- which files ------------------------------------------------------------------------------------------------------


def test_files_directories_and_patterns_name_each_file_once(tmp_path: Path) -> None:
    for bookie in "ab":
        write(tmp_path / bookie / "ledgers" / "current" / "0.log", record(V1, 0))
        write(tmp_path / bookie / "ledgers" / "current" / "1.log.compacting", record(V1, 1))
        write(tmp_path / bookie / "ledgers" / "current" / "1.log.0.compacted", record(V1, 2))
    first = tmp_path / "a" / "ledgers" / "current" / "0.log"

    def files(**options: str) -> list[str]:
        return [row["file"] for row in rows_of(EntryLogSource, **options)]

    both = [str(first), str(tmp_path / "b" / "ledgers" / "current" / "0.log")]
    assert files(path=str(first)) == both[:1]
    assert files(path=first.as_uri()) == both[:1]
    assert files(path=f"{tmp_path}/*/ledgers") == both
    assert files(path=f"{tmp_path}/*/ledgers/current") == both
    assert files(path=f"{tmp_path}/**/0.log") == both
    assert files(paths=f'["{first}", "{tmp_path}/a", "{tmp_path}/b/ledgers"]') == both
    compacted = first.with_name("1.log.0.compacted")
    assert files(path=str(compacted)) == [str(compacted)]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, UsageError),
        ({"path": "{}/none"}, NotFound),
        ({"path": "{}/none/*.log"}, NotFound),
        ({"path": "{}"}, NotFound),
        ({"path": "s3://bucket/0.log"}, UsageError),
        ({"path": "{}", "colums": "entryId"}, UsageError),
        ({"path": "{}", "columns": "entryid,nothing"}, UsageError),
        ({"path": "{}", "mode": "lenient"}, UsageError),
        ({"path": "{}", "borders": "many"}, UsageError),
        ({"path": "{}", "borders": "[1]"}, UsageError),
        ({"path": "{}", "borders": '{{"0.log": [9, 8]}}'}, UsageError),
        ({"path": "{}", "types": "entries"}, UsageError),
        ({"path": "{}", "ledger": "x"}, UsageError),
        ({"path": "{}", "digestType": "MD5"}, UsageError),
        ({"paths": "[1]"}, UsageError),
    ],
)
@pytest.mark.parametrize("mode", ["failfast", "permissive"])
def test_usage_errors_are_raised_in_both_modes(
    tmp_path: Path, options: dict[str, str], error: type[BkctlError], mode: str
) -> None:
    given_options = {name: value.format(tmp_path) for name, value in options.items()}
    with pytest.raises(error):
        Planned(EntryLogSource, **{"mode": mode, **given_options})


def test_schema_with_unknown_columns_is_refused() -> None:
    with pytest.raises(UsageError, match="no column ledgerId of type bigint"):
        EntryLogSource({"path": "x"}).reader(StructType().add("ledgerId", LongType()))


# --- damage -----------------------------------------------------------------------------------------------------------


def outcome(path: Path) -> tuple[list[tuple[Any, ...]], BkctlError | None]:
    """Return the records that the reader of single records finds, and the error that ends it."""
    found = []
    try:
        with EntryLogReader.open(path) as reader:
            found.extend(
                (each.offset, each.record_size, each.ledger.qualified_name, each.entry_id) for each in reader.records()
            )
    except BkctlError as error:
        return found, error
    return found, None


def of_rows(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["offset"], row["recordSize"], row["ledgerQualifiedName"], row["entryId"]) for row in rows]


def check_both_modes(path: Path, **options: object) -> None:
    """The rows before damage, and the damage itself as an error or as a row."""
    rows, error = outcome(path)
    if error is None:
        assert of_rows(rows_of(EntryLogSource, path=path, **options)) == rows
    else:
        with pytest.raises(type(error)) as caught:
            rows_of(EntryLogSource, path=path, **options)
        assert str(caught.value) == str(error)
    found = rows_of(EntryLogSource, path=path, mode="permissive", **options)
    assert of_rows([row for row in found if row["damage"] is None]) == rows
    damage = [row for row in found if row["damage"] is not None]
    assert len(damage) == (error is not None)
    for row in damage:
        assert row["damage"]["reason"] == str(error)
        assert row["damage"]["file"] == row["file"] == str(path)
        assert row["damage"]["offset"] == getattr(error, "offset", None)
        assert row["entryId"] is None


LOGS = {"real": LOG.read_bytes()}
LOGS["scoped"] = write_header(2) + b"".join(
    [record(V2 if at % 3 else HUGE, at, b"x" * at, list(DigestType)[at % 4]) for at in range(30)]
)


@given(
    st.sampled_from(sorted(LOGS)),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=12)), max_size=3),
    st.none() | st.floats(0, 1),
    st.sampled_from([4000, 1 << 20]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hostile_logs_match_the_reader(
    tmp_path: Path, log: str, changes: list[tuple[float, bytes]], cut: float | None, size: int
) -> None:
    data = bytearray(LOGS[log])
    for place, what in changes:
        at = int(place * len(data))
        data[at : at + len(what)] = what
    path = tmp_path / "0.log"
    path.write_bytes(data if cut is None else data[: int(cut * len(data))])
    check_both_modes(path, borders=cuts(size, path))


@pytest.mark.parametrize(
    ("name", "tail"),
    [
        ("torn", record(V1, 3)[:-1]),
        ("zeros", bytes(5000)),
        ("hole", bytes(5000) + record(V1, 3)),
        ("negative", struct.pack(">i", -9) + bytes(60)),
        ("huge", struct.pack(">i", 2**31 - 1) + record(V1, 3)[4:]),
        ("version", struct.pack(">i", 60) + b"\xb3" + bytes(59)),
        ("short", struct.pack(">i", 3) + bytes(3)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_torn_tails_match_the_reader(tmp_path: Path, name: str, tail: bytes) -> None:
    path = write(tmp_path / "0.log", *(record(V1, at) for at in range(3)), tail)
    check_both_modes(path)
    check_both_modes(path, borders=cuts(1, path))


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_oversized_record_does_not_hide_later_ones(tmp_path: Path, size: int) -> None:
    records = []
    for at in range(10):
        sealed = DigestManager(V1, DigestType.CRC32C).seal(at, at - 1, (1 << 40) + (at + 1) * 5, b"hello")
        records.append(struct.pack(">i", len(sealed) + 5) + sealed + b"hello")
    records[4] = struct.pack(">i", 1 << 27) + records[4][4:]
    path = write(tmp_path / "0.log", *records)
    check_both_modes(path, borders=cuts(size, path))
    *good, damage = rows_of(EntryLogSource, path=path, mode="permissive", borders=cuts(size, path))
    assert [row["entryId"] for row in good] == list(range(4))
    assert damage["damage"]["offset"] == 1024 + 4 * len(records[0])


@pytest.mark.parametrize("data", [b"", b"BKLO", b"BKXX" + bytes(1020), write_header(1)[:4] + bytes([0, 0, 0, 9] * 255)])
def test_files_that_are_not_logs_fail_alike_in_both_modes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "0.log"
    path.write_bytes(data)
    check_both_modes(path)


def test_damage_in_one_file_does_not_hide_others(tmp_path: Path) -> None:
    for name in ("0", "2"):
        write(tmp_path / "current" / f"{name}.log", record(V1, int(name)))
    bad = write(tmp_path / "current" / "1.log", record(V1, 1), struct.pack(">i", -9) + bytes(60))
    rows = rows_of(EntryLogSource, path=tmp_path, mode="permissive", columns="entryId,logId")
    assert [(row["entryId"], row["logId"], row["damage"] is None) for row in rows] == [
        (0, 0, True), (1, 1, True), (None, 1, False), (2, 2, True)
    ]  # fmt: skip
    assert rows[2]["damage"]["file"] == str(bad)
    assert rows[2]["damage"]["offset"] == 1024 + len(record(V1, 1))
    with pytest.raises(CorruptRecord, match=r"1\.log"):
        rows_of(EntryLogSource, path=tmp_path)
    # The option keeps what is damaged, whatever ledger it would have been of.
    rows = rows_of(EntryLogSource, path=tmp_path, mode="permissive", columns="entryId", ledger="99")
    assert [row["damage"]["file"] for row in rows] == [str(bad)]


# --- files that change between plan and read ----------------------------------------------------------------------


def changes(path: Path) -> dict[str, Any]:
    """Changes that a task must notice, by name."""
    data = path.read_bytes()
    other = b"".join(record(OTHER, at) for at in range(30))
    return {
        "deleted": path.unlink,
        "emptied": lambda: path.write_bytes(b""),
        "shrunk": lambda: path.write_bytes(data[:-20]),
        "one record less": lambda: path.write_bytes(data[: -len(record(V1, 29))]),
        "other ids": lambda: path.write_bytes(write_header() + other),
        "two records exchanged": lambda: path.write_bytes(
            data[: -2 * len(record(V1, 29))] + record(V1, 29) + record(V1, 28)
        ),
        "another version": lambda: path.write_bytes(write_header(2) + data[1024:]),
        "no log at all": lambda: path.write_bytes(b"text" * 1000),
        "zeroed": lambda: path.write_bytes(data[:1100] + bytes(len(data) - 1100)),
        "a record split in two": lambda: path.write_bytes(
            data[: -len(record(V1, 29))] + record(V1, 29, b"")[:-4] + struct.pack(">i", 1) + b"x"
        ),
    }


CHANGES = ["deleted", "emptied", "shrunk", "one record less", "other ids", "two records exchanged", "another version",
           "no log at all", "zeroed", "a record split in two"]  # fmt: skip


@pytest.mark.parametrize("size", [200, 1 << 20])
@pytest.mark.parametrize("change", CHANGES)
def test_log_changed_after_plan_is_an_error(tmp_path: Path, change: str, size: int) -> None:
    path = write(tmp_path / "0.log", *(record(V1, at) for at in range(30)))
    plans = [
        Planned(EntryLogSource, path=path, borders=cuts(size, path), mode=mode) for mode in ("failfast", "permissive")
    ]
    changes(path)[change]()
    if path.exists():
        os.utime(path, ns=(0, plans[0].parts[0].state.mtime_ns + 1))
    with pytest.raises(NotFound if change == "deleted" else Conflict, match=r"0\.log .* after the plan was made"):
        plans[0].rows()
    damage = [row["damage"] for row in plans[1].rows() if row["damage"] is not None]
    assert {each["file"] for each in damage} == {str(path)}
    assert all("after the plan was made" in each["reason"] for each in damage)


@pytest.mark.parametrize("size", [200, 1 << 20])
def test_records_appended_by_running_bookie_are_ignored(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "0.log", *(record(V1, at) for at in range(30)), record(V1, 30)[:20])
    planned = Planned(EntryLogSource, path=path, borders=cuts(size, path))
    more = b"".join(record(V1, at) for at in range(31, 40))
    path.write_bytes(path.read_bytes() + record(V1, 30)[20:] + more + b"".join(write_ledgers_map({V1: 1})))
    # Closing a log writes its header anew.
    with open(path, "r+b") as file:
        file.write(write_header(1, 1024, 1))
    assert [row["entryId"] for row in planned.rows()] == list(range(30))


def test_log_deleted_during_plan_restarts_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write(tmp_path / "current" / "0.log", record(V1, 0), record(OTHER, 0))

    def compact_after_listing(*given: Any) -> Any:
        found = resolve(*given)
        if old.exists():
            write(tmp_path / "current" / "1.log", record(V1, 0))
            old.unlink()
        return found

    monkeypatch.setattr("bkctl.spark.sources.records.resolve", compact_after_listing)
    assert [(row["logId"], row["ledgerId"]) for row in rows_of(EntryLogSource, path=tmp_path)] == [(1, 5)]

    def always_one_too_many(*given: Any) -> Any:
        (place,) = resolve(*given)
        return [place, place._replace(path=f"{place.path}x")]

    monkeypatch.setattr("bkctl.spark.sources.records.resolve", always_one_too_many)
    with pytest.raises(Conflict, match="was deleted while it was read"):
        Planned(EntryLogSource, path=tmp_path)


def test_unreadable_file_is_an_error_or_row(tmp_path: Path) -> None:
    path = write(tmp_path / "current" / "0.log", record(V1, 0))
    (tmp_path / "current" / "1.log").symlink_to(tmp_path / "nothing")
    rows = rows_of(EntryLogSource, path=path)
    assert len(rows) == 1
    with pytest.raises(BkctlError, match="is a link to a missing file"):
        rows_of(EntryLogSource, path=f"{tmp_path}/current/*.log")
    if os.geteuid() != 0:
        path.chmod(0)
        with pytest.raises(BkctlError, match="Permission denied"):
            rows_of(EntryLogSource, path=path)
        assert [row["damage"]["file"] for row in rows_of(EntryLogSource, path=path, mode="permissive")] == [str(path)]


@pytest.mark.parametrize("mode", ["failfast", "permissive"])
def test_directory_that_the_executor_lacks_is_named(tmp_path: Path, mode: str) -> None:
    write(tmp_path / "mount" / "current" / "0.log", record(V1, 0))
    planned = Planned(EntryLogSource, path=tmp_path / "mount", mode=mode)
    (tmp_path / "mount").rename(tmp_path / "elsewhere")
    # In no mode a row: the entries are not lost.
    with pytest.raises(UsageError, match=r"0\.log cannot be seen by the executor on .*current does not exist there"):
        planned.rows()


def test_unknown_entry_format_versions_are_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "0.log", record(V1, 0), struct.pack(">i", 60) + b"\xb3" + bytes(59))
    with pytest.raises(Unsupported):
        rows_of(EntryLogSource, path=path)


def test_copies_in_two_places_are_two_bookies(tmp_path: Path) -> None:
    source = golden.GoldenBookie("4.18.0", "db")
    for name in ("one", "two"):
        shutil.copytree(source.ledger_dir, tmp_path / name / "ledgers")
    count = sum(len(rows) for rows, _ in source.entry_logs.values())
    assert len(rows_of(EntryLogSource, path=f"{tmp_path}/*")) == 2 * count
    assert NO_LEDGER not in {row["ledgerId"] for row in rows_of(EntryLogSource, path=tmp_path / "one")}


# --- sums of ledgers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10_000, 1 << 20])
@pytest.mark.parametrize("bookie", BOOKIES, ids=IDS)
def test_ledger_sums_match_apache_shell(bookie: golden.GoldenBookie, size: int) -> None:
    sums: dict[tuple[str, str], list[int]] = {}
    for row in rows_of(EntryLogSource, path=bookie.ledger_dir, rows="ledgers", borders=cuts(size, *bookie.entry_logs)):
        of_ledger = sums.setdefault((row["file"], str(row["ledgerId"])), [0, 0])
        of_ledger[0] += row["entryCount"]
        of_ledger[1] += row["size"]
        assert (row["bookieId"], row["scoped"]) == (bookie.bookie_id, False)
    wanted = {}
    for path, (records, ledgers) in bookie.entry_logs.items():
        counts = Counter(str(each["ledgerId"]) for each in records if each["type"] == "entry")
        wanted |= {(str(path), ledger_id): [counts[ledger_id], size] for ledger_id, size in ledgers.items()}
    assert sums == wanted


def test_ledger_sums_of_scoped_and_selected_ledgers(tmp_path: Path) -> None:
    records = [record(V2 if at % 3 else HUGE, at, bytes(at)) for at in range(100)]
    path = write(tmp_path / "current" / "scoped" / "0.log", *records, *write_ledgers_map({V2: 1}, 2), version=2)
    with EntryLogReader.open(path) as reader:
        wanted = {ledger.qualified_name: size for ledger, size in reader.scan_ledgers()[0].items()}
    rows = rows_of(EntryLogSource, path=tmp_path, rows="ledgers")
    assert {row["ledgerQualifiedName"]: row["size"] for row in rows} == wanted
    assert [row["entryCount"] for row in rows] == [66, 34]
    (row,) = rows_of(EntryLogSource, path=tmp_path, rows="ledgers", ledger=HUGE.qualified_name)
    assert (row["ledgerId"], row["entryCount"]) == (HUGE.ledger_id, 34)
    filters = [EqualTo(("ledgerScopeId",), 7), IsNotNull(("ledgerScopeId",))]
    planned = Planned(EntryLogSource, filters, path=tmp_path, rows="ledgers", columns="entryCount")
    assert (planned.left, planned.rows()) == ([], [{"entryCount": 66}])


def test_ledger_sums_of_damaged_log_have_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "0.log", *(record(V1, at) for at in range(20)), struct.pack(">i", -9) + bytes(60))
    with pytest.raises(CorruptRecord):
        rows_of(EntryLogSource, path=path, rows="ledgers")
    good, bad = rows_of(EntryLogSource, path=path, rows="ledgers", mode="permissive")
    assert (good["entryCount"], good["damage"]) == (20, None)
    assert (bad["entryCount"], bad["damage"]["file"]) == (None, str(path))
    with pytest.raises(UsageError):
        rows_of(EntryLogSource, path=path, rows="ledgers", columns="entryId")
