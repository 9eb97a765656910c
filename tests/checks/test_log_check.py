"""Reports of `entrylog verify`: the end of the intact part and its cause, the records behind it, contradictions."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import golden

from bkctl.checks.digests import DigestChecker
from bkctl.checks.log_check import Salvage, check_entry_log, check_entry_logs, look_behind
from bkctl.errors import Corrupt, Unsupported
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.scan import ScanState
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.entry_log import write_header, write_ledgers_map
from bkctl.ids import LedgerId

LEDGERS = (LedgerId(0, 1), LedgerId(0, 2))
SCOPED = (LedgerId(7, 1), LedgerId(2**64 - 1, 2**64 - 1))
COUNT = 40


def entry(entry_id: int, ledger: LedgerId = LEDGERS[0], payload: bytes = b"hello " * 9) -> bytes:
    sealed = DigestManager(ledger, DigestType.CRC32C).seal(
        entry_id, entry_id - 1, (entry_id + 1) * len(payload), payload
    )
    return struct.pack(">i", len(sealed) + len(payload)) + sealed + payload


def log(ledgers: tuple[LedgerId, ...] = LEDGERS, *, closed: bool = True, said: dict[LedgerId, int] | None = None):
    """The bytes of a log, and where its records begin."""
    version = 2 if ledgers == SCOPED else 1
    records = [entry(number // 2, ledgers[number % 2]) for number in range(COUNT)]
    at = 1024 + sum(map(len, records))
    offsets = [1024 + sum(map(len, records[:number])) for number in range(COUNT)]
    sizes = {ledger: sum(map(len, records[index::2])) for index, ledger in enumerate(ledgers)}
    if not closed:
        return bytearray(write_header(version) + b"".join(records)), offsets
    sizes = sizes if said is None else said
    ledgers_map = b"".join(write_ledgers_map(sizes, version))
    return bytearray(write_header(version, at, len(sizes)) + b"".join(records) + ledgers_map), offsets


@pytest.fixture
def verify(tmp_path: Path):
    def verify(data: bytes | bytearray, *, is_newest: bool = True, digests: bool = True):
        path = tmp_path / "1f.log"
        path.write_bytes(data)
        found = check_entry_log(path, DigestChecker() if digests else None, is_newest=is_newest)
        assert found is not None
        return found

    return verify


@pytest.mark.parametrize("ledgers", [LEDGERS, SCOPED])
@pytest.mark.parametrize("closed", [True, False])
def test_a_sound_log(verify, ledgers, closed) -> None:
    data, _ = log(ledgers, closed=closed)
    check = verify(data)
    assert (check.log_id, check.version, check.state) == (0x1F, 2 if ledgers == SCOPED else 1, ScanState.END_OF_FILE)
    assert (check.entry_count, check.good_end, check.size_bytes) == (COUNT, len(data), len(data))
    assert (check.behind, check.problem, check.finding_count, check.error) == (Salvage(), None, 0, None)
    assert check.digests is not None
    assert check.digests.matched == {DigestType.CRC32C: COUNT}
    assert verify(data, digests=False).digests is None


def test_zeros_behind_the_records_are_space_allocated_ahead(verify) -> None:
    data, _ = log(closed=False)
    check = verify(data + bytes(9000))
    assert (check.state, check.good_end, check.problem) == (ScanState.ZEROS, len(data), None)


def test_an_allocated_log_is_empty_and_another_file_unreadable(verify) -> None:
    assert (verify(b"").state, verify(b"").problem) == (ScanState.EMPTY, None)
    check = verify(b"BKLO")
    assert (check.state, check.good_end) == (ScanState.UNREADABLE, None)
    assert isinstance(check.error, Corrupt)
    assert isinstance(verify(b"BKLO\0\0\0\x09" + bytes(1016)).error, Unsupported)


@pytest.mark.parametrize("keep", [1, 3, 4, 30])
def test_a_torn_tail_is_a_finding_only_where_newer_logs_follow(verify, keep) -> None:
    data, offsets = log(closed=False)
    cut = data[: offsets[-1] + keep]
    check = verify(cut)
    assert (check.state, check.good_end, check.entry_count) == (ScanState.TORN, offsets[-1], COUNT - 1)
    assert (check.behind, check.finding_count, check.error) == (Salvage(keep), 0, None)
    older = verify(cut, is_newest=False)
    assert (older.state, older.finding_count) == (ScanState.TORN, 1)
    assert f"byte {offsets[-1]}, {keep} bytes of it are here" in str(older.problem)


@pytest.mark.parametrize(("place", "wrong"), [("current", 2), ("current/scoped", 1), ("copies", 0)])
def test_a_log_of_the_other_id_space_is_a_finding(tmp_path: Path, place: str, wrong: int) -> None:
    (tmp_path / place).mkdir(parents=True)
    for version, ledgers in ((1, LEDGERS), (2, SCOPED)):
        (tmp_path / place / "1f.log").write_bytes(log(ledgers)[0])
        (check,) = check_entry_logs([tmp_path / place / "1f.log"])
        problem = f"A log of header version {version} does not belong in {tmp_path / place}"
        assert (check.problem, check.finding_count) == ((problem, 1) if version == wrong else (None, 0))


def grown(entry_id: int, ledger: LedgerId, payload: bytes = b"hello " * 9) -> bytes:
    """An entry of a ledger that has grown so long that a huge size does not contradict it."""
    length = (1 << 40) + (entry_id + 1) * 54
    sealed = DigestManager(ledger, DigestType.DUMMY).seal(entry_id, entry_id - 1, length, payload)
    return struct.pack(">i", len(sealed) + len(payload)) + sealed + payload


@pytest.mark.parametrize("ledger", [LEDGERS[0], SCOPED[0]])
@pytest.mark.parametrize("number", [0, 10, COUNT - 2])
@pytest.mark.parametrize("tail", ["nothing", "zeros", "torn"])
def test_a_size_beyond_the_end_is_damage_if_records_follow(verify, ledger, number, tail) -> None:
    records = [grown(at, ledger) for at in range(COUNT)]
    behind = {"nothing": b"", "zeros": bytes(5000), "torn": grown(COUNT, ledger)[:60]}[tail]
    data = bytearray(write_header(2 if ledger.is_scoped else 1) + b"".join(records) + behind)
    at = 1024 + number * len(records[0])
    struct.pack_into(">i", data, at, 1 << 27)
    check = verify(data)
    assert (check.state, check.good_end, check.entry_count) == (ScanState.DAMAGED, at, number)
    assert f"length {1 << 27}" in str(check.problem)
    assert (check.behind.resumes_at, check.behind.entry_count) == (at + len(records[0]), COUNT - number - 1)


@pytest.mark.parametrize("ledger", [LEDGERS[0], SCOPED[0]])
@pytest.mark.parametrize("entry_id", [0, 5])
def test_a_torn_tail_whose_payload_is_an_entry_log_is_torn(verify, ledger, entry_id) -> None:
    inner = bytes(log()[0])
    before = [entry(at, ledger, b"x") for at in range(entry_id)]
    sealed = DigestManager(ledger, DigestType.CRC32C).seal(entry_id, entry_id - 1, entry_id + len(inner), inner)
    last = struct.pack(">i", len(sealed) + len(inner)) + sealed + inner
    data = write_header(2 if ledger.is_scoped else 1) + b"".join(before) + last
    for keep in (1, len(inner) // 2):
        check = verify(data[:-keep])
        assert (check.state, check.entry_count, check.error) == (ScanState.TORN, entry_id, None)
    assert verify(data).state is ScanState.END_OF_FILE


def test_a_torn_record_must_begin_like_a_record(verify) -> None:
    """A damaged size lets the scan reach any bytes at all."""
    data, _ = log(closed=False)
    check = verify(bytes(data) + struct.pack(">i", 5000) + b"\xc1" * 200)
    assert (check.state, check.good_end) == (ScanState.DAMAGED, len(data))


def test_newest_log_of_a_directory_may_end_torn(tmp_path: Path) -> None:
    data, offsets = log(closed=False)
    for name in ("1.log", "a.log"):
        (tmp_path / name).write_bytes(data[: offsets[-1] + 9])
    (tmp_path / "b.log").write_bytes(b"")
    (tmp_path / "other.txt").write_bytes(b"x")
    older, newest, allocated = check_entry_logs([tmp_path / name for name in ("1.log", "a.log", "b.log")])
    assert (older.finding_count, newest.finding_count, allocated.state) == (1, 0, ScanState.EMPTY)
    (tmp_path / "DIRTY").touch()
    assert [check.finding_count for check in check_entry_logs([tmp_path / "1.log"])] == [1], "from before the start"
    (tmp_path / "1.log").touch()
    assert [check.finding_count for check in check_entry_logs([tmp_path / "1.log"])] == [0], "it may be one of many"
    (tmp_path / "1.log").unlink()
    assert [check.path.name for check in check_entry_logs([tmp_path / "1.log", tmp_path / "a.log"])] == ["a.log"]


@pytest.mark.parametrize("ledgers", [LEDGERS, SCOPED])
@pytest.mark.parametrize(
    "size", [0, -1, 7, 0x7FFFFFFF, 1 << 26, -0x0F0F0F10], ids=["zero", "negative", "short", "absurd", "large", "filler"]
)
def test_records_behind_a_damaged_size_are_found(verify, ledgers, size) -> None:
    data, offsets = log(ledgers)
    struct.pack_into(">i", data, offsets[10], size)
    check = verify(data)
    assert (check.state, check.good_end, check.entry_count) == (ScanState.DAMAGED, offsets[10], 10)
    assert isinstance(check.error, Corrupt)
    assert f"byte {offsets[10]}" in str(check.problem)
    assert check.behind.size_bytes == len(data) - offsets[10]
    assert (check.behind.resumes_at, check.behind.entry_count) == (offsets[11], COUNT - 11)
    assert check.behind.entries_size_bytes == offsets[-1] + len(entry(19, ledgers[1])) - offsets[11]


def test_records_between_damaged_places_are_found(verify) -> None:
    data, offsets = log()
    for number in (5, 20):
        data[offsets[number] : offsets[number] + 40] = bytes(40)
    check = verify(data)
    assert (check.good_end, check.behind.resumes_at) == (offsets[5], offsets[6])
    assert check.behind.entry_count == COUNT - 5 - 2


def test_bytes_cut_out_of_the_middle(verify) -> None:
    data, offsets = log()
    del data[offsets[7] + 20 : offsets[9] + 30]
    check = verify(data)
    assert check.good_end in (offsets[7], offsets[8])
    assert check.error is not None
    # The entry whose beginning is left is read with the bytes of a later one, or not at all.
    assert COUNT - 11 <= check.behind.entry_count <= COUNT - 8
    assert check.entry_count - 7 in (0, 1)


def test_damage_without_records_behind_it(verify) -> None:
    data, offsets = log(closed=False)
    check = verify(data[: offsets[3]] + b"\xff" * 5000)
    assert (check.behind, check.entry_count) == (Salvage(5000), 3)


@pytest.mark.parametrize("filler", [b"\1", b"\0\0\0\x30" + bytes(44), entry(3)[:30] * 2, b"\0\0\1"])
def test_look_behind_reads_a_bounded_number_of_bytes(tmp_path: Path, filler: bytes) -> None:
    path = tmp_path / "1.log"
    path.write_bytes(write_header() + b"\xff\xff\xff\xfe" + filler * ((3 << 20) // len(filler)))
    with EntryLogReader.open(path) as reader:
        assert look_behind(reader, 1024).size_bytes == path.stat().st_size - 1024


def test_digest_mismatches_are_findings_with_their_offset(verify) -> None:
    data, offsets = log()
    for number in (0, 12):
        data[offsets[number] + 4 + 40] ^= 1
    check = verify(data)
    assert (check.error, check.state, check.finding_count) == (None, ScanState.END_OF_FILE, 2)
    assert sorted((each.entry_id, each.offset) for each in check.mismatches) == [(0, offsets[0]), (6, offsets[12])]
    assert {each.ledger for each in check.mismatches} == {LEDGERS[0]}
    assert check.digests is not None
    assert check.digests[:2] == ({DigestType.CRC32C: COUNT - 2}, 2)


SIZES = dict.fromkeys(LEDGERS, 20 * len(entry(0)))


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({LEDGERS[0]: SIZES[LEDGERS[0]]}, "lacks ledger 2"),
        (SIZES | {LedgerId(0, 9): 100}, "gives 100 bytes to ledger 9, which has no entries"),
        (SIZES | {LEDGERS[1]: 5}, "gives 5 bytes to ledger 2, which has 1,"),
    ],
)
def test_a_ledgers_map_that_contradicts_the_records(verify, said, problem) -> None:
    check = verify(log(said=said)[0])
    assert (check.error, check.finding_count) == (None, 1)
    assert problem in str(check.problem)


def test_a_log_closed_without_entries_is_sound(verify) -> None:
    check = verify(write_header(1, 1024, 0))
    assert (check.error, check.state, check.problem) == (None, ScanState.END_OF_FILE, None)


def test_a_damaged_ledgers_map_is_damage(verify) -> None:
    data, _ = log()
    data[16:20] = struct.pack(">i", 7)
    check = verify(data)
    assert isinstance(check.error, Corrupt)
    assert "Ledgers map names 2 ledgers, the header says 7" in str(check.problem)


def test_a_map_that_the_header_lacks_or_misplaces(verify) -> None:
    data, _ = log()
    unknown = verify(data[:8] + bytes(12) + data[20:])
    assert "does not know of the ledgers map" in str(unknown.problem)
    followed = verify(data + entry(99))
    assert followed.contradictions == [f"1 entry follows the ledgers map at byte {len(data) - 56}"]
    assert followed.error is None
    map_at = len(data) - 56
    misplaced = verify(data[:8] + struct.pack(">q", 1024) + data[16:])
    assert misplaced.contradictions == [
        f"The header says the ledgers map is at byte 1024, the first one is at {map_at}"
    ]
    assert misplaced.error is None


def test_a_closed_log_that_was_cut(verify) -> None:
    data, offsets = log()
    check = verify(data[: offsets[30]])
    assert (check.entry_count, check.good_end) == (30, offsets[30])
    assert "closed with a ledgers map" in str(check.problem)


def test_a_log_that_was_cut_in_its_map_names_the_ends_of_file_and_records(verify) -> None:
    data, _ = log()
    at = int.from_bytes(data[8:16], "big")
    check = verify(data[:-37])
    assert str(check.problem) == (
        f"Entry log was closed with a ledgers map at byte {at}, but the file ends at byte {len(data) - 37}, "
        f"and the readable records end at byte {at}"
    )


@given(st.integers(0, 4000), st.binary(min_size=1, max_size=8), st.booleans())
def test_any_damage_gives_one_answer(
    tmp_path_factory: pytest.TempPathFactory, at: int, patch: bytes, cut: bool
) -> None:
    data, offsets = log()
    path = tmp_path_factory.getbasetemp() / "check.log"
    path.write_bytes(data[:at] + patch + (b"" if cut else data[at + len(patch) :]))
    check = check_entry_log(path, DigestChecker(), is_newest=False)
    assert check is not None
    before = sum(offset + len(entry(0)) <= at for offset in offsets)
    if at >= 1024:
        assert check.entry_count >= before
        assert check.good_end is not None
        assert check.good_end >= offsets[min(before, COUNT - 1)]
    if check.error is None and not check.finding_count:
        assert check.entry_count == COUNT or bytes(data) == path.read_bytes() or at < 1024


@pytest.mark.parametrize("bookie", golden.bookies(), ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def test_apaches_logs_are_sound(bookie) -> None:
    for check in check_entry_logs(bookie.entry_logs, DigestChecker()):
        assert (check.problem, check.finding_count) == (None, 0)
        assert check.state in (ScanState.END_OF_FILE, ScanState.ZEROS, ScanState.EMPTY)
        assert check.entry_count == len(bookie.entry_logs[check.path][0])
