"""One ledger's entries, gathered from all logs of a bookie."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from support import golden
from support.golden import GoldenBookie

from bkctl.checks.digests import DigestChecker
from bkctl.errors import Corrupt
from bkctl.files.entry_log import EntryLogReader
from bkctl.formats import entry_log
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.ids import LedgerId
from bkctl.repair import extraction
from bkctl.repair.extraction import LedgerExtraction

ONE, TWO, SCOPED = LedgerId(0, 1), LedgerId(0, 2), LedgerId(7, 1)


def log(path: Path, entries: Iterable[tuple[LedgerId, int]], *, closed: bool = True) -> Path:
    """A log of (ledger, entry id); each payload names the log."""
    records, sizes = b"", dict[LedgerId, int]()
    for ledger, entry_id in entries:
        payload = f"{path.stem}:{entry_id}".encode()
        body = DigestManager(ledger, DigestType.CRC32C).seal(entry_id, entry_id - 1, 9 * entry_id, payload) + payload
        records += len(body).to_bytes(4, "big") + body
        sizes[ledger] = sizes.get(ledger, 0) + len(body) + 4
    version = 2 if any(ledger.is_scoped for ledger in sizes) else 1
    if closed:
        header = entry_log.write_header(version, entry_log.HEADER_SIZE + len(records), len(sizes))
        records += b"".join(entry_log.write_ledgers_map(sizes, version))
    else:
        header = entry_log.write_header(version)
    path.write_bytes(header + records)
    return path


def taken(found: LedgerExtraction) -> list[bytes]:
    return [each.record.payload(DigestType.CRC32C) or b"" for each in found.entries()]


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    """Entries 2 and 3 were compacted from log 1 into log a, entry 2 from there into log b."""
    return [
        log(tmp_path / "b.log", [(ONE, 2), (TWO, 7)]),
        log(tmp_path / "1.log", [(ONE, 0), (TWO, 0), (ONE, 2), (ONE, 3)]),
        log(tmp_path / "a.log", [(ONE, 2), (ONE, 3), (ONE, 9)], closed=False),
        log(tmp_path / "2.log", [(TWO, 1)]),
    ]


def test_entries_come_in_order_with_the_last_copy_of_each(logs: list[Path]) -> None:
    with LedgerExtraction(logs, ONE) as found:
        assert taken(found) == [b"1:0", b"b:2", b"a:3", b"a:9"]
        assert list(found.entry_ids) == [0, 2, 3, 9]
        assert (len(found), found.entries_count, found.copies_count, found.last_entry_id) == (4, 4, 7, 9)
        assert list(found.gaps()) == [(1, 1), (4, 8)]
        assert [path.name for path in found.log_paths] == ["1.log", "a.log", "b.log"]
        assert found.logs_skipped == 1  # the map of 2.log does not name it
        assert found.problems == []


def test_all_copies(logs: list[Path]) -> None:
    with LedgerExtraction(logs, ONE, all_copies=True) as found:
        assert taken(found) == [b"1:0", b"1:2", b"a:2", b"b:2", b"1:3", b"a:3", b"a:9"]
        assert (len(found), found.entries_count) == (7, 4)
        assert list(found.gaps()) == [(1, 1), (4, 8)]


def test_ranges_include_both_ends(logs: list[Path]) -> None:
    with LedgerExtraction(logs, ONE, 2, 3) as found:
        assert list(found.entry_ids) == [2, 3]
        assert list(found.gaps()) == []
    with LedgerExtraction(logs, ONE, 1, 12) as found:
        assert list(found.gaps()) == [(1, 1), (4, 8), (10, 12)]
    with LedgerExtraction(logs, ONE, 4, 8) as found:
        assert (len(found), found.entries_count, list(found.gaps())) == (0, 0, [(4, 8)])
    with LedgerExtraction(logs, LedgerId(0, 99)) as found:
        assert (len(found), found.last_entry_id, list(found.gaps()), found.log_paths) == (0, -1, [], [])


@pytest.mark.parametrize("all_copies", [False, True])
def test_the_written_log_is_valid(logs: list[Path], tmp_path: Path, all_copies: bool) -> None:
    stream = io.BytesIO()
    with LedgerExtraction(logs, ONE, all_copies=all_copies) as found:
        assert found.write_log(stream.write) is None
        expected = taken(found)
        size = sum(4 + each.record.record_size for each in found.entries())
    path = tmp_path / "ff.log"
    path.write_bytes(stream.getvalue())
    with EntryLogReader.open(path) as reader:
        assert [record.payload(DigestType.CRC32C) for record in reader.records()] == expected
        assert (reader.ledgers_map(), None) == reader.scan_ledgers() == ({ONE: size}, None)
        assert reader.header is not None
        assert reader.header.version == 1


def test_scoped_ledgers_make_a_log_of_version_2(tmp_path: Path) -> None:
    path = log(tmp_path / "5.log", [(SCOPED, 0), (LedgerId(8, 1), 0), (SCOPED, 1)])
    stream = io.BytesIO()
    with LedgerExtraction([path], SCOPED) as found:
        assert taken(found) == [b"5:0", b"5:1"]
        found.write_log(stream.write)
    path.write_bytes(stream.getvalue())
    with EntryLogReader.open(path) as reader:
        assert reader.header is not None
        assert reader.header.version == 2
        assert list(reader.ledgers_map() or ()) == [SCOPED]
        assert [record.entry_id for record in reader.records()] == [0, 1]


def test_a_log_that_would_be_too_large_returns_the_first_missing_entry(
    logs: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extraction, "LOG_SIZE_BYTES_MAX", 1024 + 64 + 100)
    stream = io.BytesIO()
    with LedgerExtraction(logs, ONE) as found:
        assert found.write_log(stream.write) == 3
    (tmp_path / "0.log").write_bytes(stream.getvalue())
    with EntryLogReader.open(tmp_path / "0.log") as reader:
        assert [record.entry_id for record in reader.records()] == [0, 2]
        assert (reader.ledgers_map(), None) == reader.scan_ledgers()


def test_damaged_logs_give_the_entries_before_the_damage(logs: list[Path]) -> None:
    data = bytearray(logs[2].read_bytes())
    data[-43:-39] = b"\xff" * 4  # the size of entry 9
    logs[2].write_bytes(data)
    logs[3].write_bytes(b"no log" * 300)
    logs.append(logs[0].with_name("dead.log"))
    with LedgerExtraction(logs, ONE) as found:
        assert taken(found) == [b"1:0", b"b:2", b"a:3"]
        assert sorted(str(each).partition(":")[0] for each in found.problems) == [str(logs[3]), str(logs[2])]


def test_a_damaged_map_hides_nothing(logs: list[Path]) -> None:
    data = bytearray(logs[1].read_bytes())
    data[19] ^= 1  # the count in the header
    logs[1].write_bytes(data)
    with LedgerExtraction(logs, ONE) as found:
        assert list(found.entry_ids) == [0, 2, 3, 9]
        assert "edgers map" in str(found.problems[0])


def test_logs_deleted_meanwhile_are_read_to_the_end(logs: list[Path]) -> None:
    with LedgerExtraction(logs, ONE) as found:
        for path in logs:
            path.unlink()
        assert len(taken(found)) == 4


def test_few_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "_OPEN_FILES_MAX", 3)
    paths = [log(tmp_path / f"{number:x}.log", [(ONE, number), (ONE, number + 20)]) for number in range(20)]
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with LedgerExtraction(paths, ONE) as found:
        assert list(found.entry_ids) == list(range(40))
        assert len(taken(found)) == 40
        if before:
            assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_a_log_that_changes_meanwhile_is_an_error(logs: list[Path]) -> None:
    with LedgerExtraction(logs, ONE) as found:
        log(logs[1], [(TWO, 0), (ONE, 2), (ONE, 3)])
        with pytest.raises(Corrupt):
            taken(found)


def test_the_digest_type_is_found_by_trying(tmp_path: Path) -> None:
    for digest_type, expected in ((DigestType.CRC32, DigestType.CRC32), (DigestType.HMAC, None)):
        body = DigestManager(ONE, digest_type, b"pw").seal(0, -1, 5, b"hello") + b"hello"
        path = tmp_path / "0.log"
        path.write_bytes(entry_log.write_header() + len(body).to_bytes(4, "big") + body)
        with LedgerExtraction([path], ONE) as found:
            assert found.find_digest_type() is expected


@pytest.mark.parametrize("bookie", golden.bookies(), ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def test_apaches_logs_give_the_entries_of_apaches_index(bookie: GoldenBookie) -> None:
    checked = 0
    for ledger_id, answer in bookie.indexes.items():
        with LedgerExtraction(bookie.entry_logs, LedgerId(0, int(ledger_id))) as found:
            located = {each.record.entry_id: (each.log_id, each.record.offset + 4) for each in found.entries()}
        assert located == answer["locations"]
        checked += len(located)
    assert checked > 1000


@pytest.mark.parametrize("ledger", [ONE, SCOPED])
def test_extraction_resumes_behind_damage_and_marks_damaged_entries(tmp_path: Path, ledger: LedgerId) -> None:
    path = log(tmp_path / "1.log", [(ledger, entry_id) for entry_id in range(30)], closed=False)
    with EntryLogReader.open(path) as reader:
        offsets = [record.offset for record in reader.records()]
    data = bytearray(path.read_bytes())
    data[offsets[10] : offsets[10] + 4] = b"\x7f" * 4
    data[offsets[21] - 1] ^= 1  # the payload of entry 20
    path.write_bytes(data)
    with LedgerExtraction([path], ledger, 0, 39, digests=DigestChecker()) as found:
        assert list(found.entry_ids) == [*range(10), *range(11, 30)]
        assert list(found.gaps()) == [(10, 10), (30, 39)]
        assert found.damaged_ids == [20]
        assert [each.record.entry_id for each in found.entries() if each.damaged] == [20]
        assert len(found.problems) == 1
    sound = log(tmp_path / "0.log", [(ledger, 20)])
    with LedgerExtraction([path, sound], ledger, digests=DigestChecker()) as found:
        assert found.damaged_ids == []
        assert b"0:20" in taken(found)


def test_extraction_names_logs_that_end_within_a_record(tmp_path: Path) -> None:
    path = log(tmp_path / "1.log", [(ONE, entry_id) for entry_id in range(5)], closed=False)
    path.write_bytes(path.read_bytes()[:-3])
    with LedgerExtraction([path], ONE) as found:
        assert (found.cut, found.last_entry_id, found.problems) == ([path], 3, [])
