"""A bookie's indexes against its entry logs: a healthy bookie has no findings, and what is wrong is found."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rocksdict import WriteBatch
from support import golden
from support.golden import DATA, GoldenBookie

from bkctl import pace
from bkctl.checks import check, index_rows, recheck
from bkctl.checks.check import IndexCheck
from bkctl.checks.digests import DigestChecker
from bkctl.checks.findings import Counts, Finding, FindingKind
from bkctl.errors import Corrupt
from bkctl.files.directories import BookieDirectories
from bkctl.files.index import BookieIndexes
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.formats import entry_log, index, journal
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.entry_log import pack_location
from bkctl.formats.index import LedgerData, index_path, location_key, slot_offset, write_location
from bkctl.formats.record import record_of
from bkctl.ids import LedgerId

KEY = b"k" * 20
PLAIN, SCOPED = LedgerId(0, 5), LedgerId(7, 5)
STORAGES = ("files", "databases")
OBSTACLES = ("pipe", "directory", "permission")


def obstruct(path: Path, obstacle: str, patch: pytest.MonkeyPatch) -> None:
    """Put something in the place of a file that cannot be read."""
    if obstacle == "permission":
        really_open = os.open

        def refuse(name: object, *arguments: int, **options: int) -> int:
            if name == path:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return really_open(name, *arguments, **options)  # type: ignore[arg-type]

        patch.setattr(os, "open", refuse)
        return
    path.unlink(missing_ok=True)
    if obstacle == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


# --- a bookie of our own making -------------------------------------------------------------------------------------


class Bookie:
    """Ledgers in logs and indexes below `base`, in either storage; `where` says each entry's location."""

    def __init__(self, base: Path, storage: str) -> None:
        self.base, self.storage = base, storage
        self.current = base / "ledgers" / "current"
        (self.current / "scoped").mkdir(parents=True)
        self.journal = base / "journal" / "current"
        self.journal.mkdir(parents=True)
        self.where: dict[tuple[LedgerId, int], int] = {}

    def log(self, log_id: int, entries: list[tuple[LedgerId, int]], *, scoped: bool = False) -> None:
        """Write a log with these entries."""
        data = entry_log.write_header(2 if scoped else 1)
        for ledger, entry_id in entries:
            payload = b"x" * (entry_id % 50)
            body = DigestManager(ledger, DigestType.CRC32C).seal(entry_id, entry_id - 1, 50 * entry_id, payload)
            body += payload
            self.where[ledger, entry_id] = pack_location(log_id, len(data) + 4)
            data += len(body).to_bytes(4, "big") + body
        directory = self.current / "scoped" if scoped else self.current
        (directory / entry_log.file_name(log_id)).write_bytes(data)

    def write_index(self) -> None:
        """Write the indexes as the logs are."""
        for ledger in {ledger for ledger, _ in self.where}:
            self.add_ledger(ledger)
        for (ledger, entry_id), location in self.where.items():
            self.point(ledger, entry_id, location)

    def add_ledger(self, ledger: LedgerId) -> None:
        if self.storage == "files":
            path = self.current / index_path(ledger)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(index.write_header(KEY))
            return
        path = self.current / ("scoped-ledgers" if ledger.is_scoped else "ledgers")
        locations = path.with_name(path.name.replace("ledgers", "locations"))
        if not locations.exists():
            LocationsDatabase.create(locations).close()
        with LedgersDatabase.edit(path) if path.exists() else LedgersDatabase.create(path) as ledgers:
            ledgers.put(ledger, LedgerData(exists=True, fenced=False, master_key=KEY))

    def point(self, ledger: LedgerId, entry_id: int, location: int) -> None:
        """Let the index say that an entry is at `location` (0: nowhere)."""
        if self.storage == "files":
            with (self.current / index_path(ledger)).open("r+b") as file:
                file.seek(slot_offset(entry_id))
                file.write(write_location(location))
            return
        path = self.current / ("scoped-locations" if ledger.is_scoped else "locations")
        with LocationsDatabase.edit(path) as locations:
            if location:
                locations.put(ledger, entry_id, location)
            else:
                batch = WriteBatch(raw_mode=True)
                batch.delete(location_key(ledger, entry_id))
                locations.write(batch)

    def forget(self, ledger: LedgerId) -> None:
        """Delete the ledger from the index."""
        if self.storage == "files":
            (self.current / index_path(ledger)).unlink()
            return
        with LedgersDatabase.edit(self.current / "ledgers") as ledgers:
            ledgers.write(ledgers.batch_of({}, [ledger]))
        with LocationsDatabase.edit(self.current / "locations") as locations:
            locations.write(LocationsDatabase.batch_without([ledger]))

    @property
    def directories(self) -> BookieDirectories:
        return BookieDirectories([self.base / "journal"], [self.base / "ledgers"])

    def check(self, **options: object) -> tuple[list[Finding], IndexCheck]:
        job = IndexCheck(self.directories, **options)  # type: ignore[arg-type]
        return list(job.findings()), job


@pytest.fixture(params=STORAGES)
def bookie(request: pytest.FixtureRequest, tmp_path: Path) -> Bookie:
    """Two logs of a plain and of another ledger, one of a scoped one."""
    made = Bookie(tmp_path, request.param)
    other = LedgerId(0, 6)
    made.log(0, [(PLAIN, 0), (PLAIN, 1), (other, 0), (PLAIN, 2)])
    made.log(1, [(PLAIN, 3), (other, 1), (PLAIN, 4)])
    made.log(1, [(SCOPED, 0), (SCOPED, 1)], scoped=True)
    made.write_index()
    return made


def kinds(findings: list[Finding]) -> list[tuple[str, LedgerId | None, int | None]]:
    return [(each.kind.value, each.ledger, each.entry_id) for each in findings]


# --- healthy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bookie", golden.bookies(), ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def test_a_healthy_bookie_has_no_findings(bookie: GoldenBookie) -> None:
    expected = sum(len(answer["locations"]) for answer in bookie.indexes.values())
    for directories in (
        BookieDirectories([bookie.journal_dir], [bookie.ledger_dir]),
        BookieDirectories.at(bookie.ledger_dir),
    ):
        digests = DigestChecker()
        job = IndexCheck(directories, digests=digests)
        assert list(job.findings()) == []
        assert job.counts.entries == expected
        assert job.counts.records >= expected
        assert job.counts.errors == []
        assert sum(digests.counts().matched.values()) > 1000


def test_plain_and_scoped_ledgers_of_one_directory(bookie: Bookie) -> None:
    findings, job = bookie.check()
    assert findings == []
    assert (job.counts.entries, job.counts.records, job.counts.logs, job.counts.ledgers) == (9, 9, 3, 3)
    findings, job = bookie.check(scope_id=7)
    assert (findings, job.counts.entries, job.counts.ledgers) == ([], 2, 1)
    findings, job = bookie.check(ledgers=[PLAIN])
    assert (findings, job.counts.entries, job.counts.ledgers) == ([], 5, 1)


# --- wrong ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ledger", [PLAIN, SCOPED], ids=str)
@pytest.mark.parametrize("options", [{}, {"ledgers": [PLAIN, SCOPED]}, {"sample": 1.0}], ids=str)
def test_an_index_entry_that_points_at_the_wrong_place(
    bookie: Bookie, ledger: LedgerId, options: dict[str, object]
) -> None:
    right = bookie.where[ledger, 1]
    for location, kind, reason in (
        (bookie.where[ledger, 0], FindingKind.WRONG_ENTRY, f"entry 0 of ledger {ledger} is there"),
        (right + 3, FindingKind.NO_RECORD, ""),
        (right + (1 << 20), FindingKind.NO_RECORD, "the log ends before"),
        (pack_location(right >> 32, 4), FindingKind.NO_RECORD, ""),
        (pack_location(77, right & 0xFFFFFFFF), FindingKind.LOG_MISSING, "entry log 77 (0x4d) does not exist"),
        ((1 << 63) - 1, FindingKind.LOG_MISSING, ""),
    ):
        bookie.point(ledger, 1, location)
        findings, job = bookie.check(**options)
        assert kinds(findings) == [(kind, ledger, 1)]
        (finding,) = findings
        assert reason in finding.reason
        assert (finding.location, finding.is_problem) == (location, True)
        assert (finding.log_id, finding.offset) == (location >> 32, (location & 0xFFFFFFFF) - 4)
        assert finding.path.parent.name == ("scoped" if ledger.is_scoped else "current")
        assert job.counts.findings == 1


@pytest.mark.parametrize("name", ["db", "interleaved", "sorted"])
def test_a_wrong_location_in_the_files_of_an_apache_bookie(name: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / "4.18.0" / name / "ledgers", tmp_path / "ledgers")
    directories = BookieDirectories.at(tmp_path / "ledgers")
    with BookieIndexes(directories) as indexes:
        ledger = next(each for each in indexes.ledgers() if indexes.open(each).extent()[0] > 3)
        first, second = list(indexes.open(ledger).locations())[:2]
    if name == "db":
        with LocationsDatabase.edit(tmp_path / "ledgers" / "current" / "locations") as locations:
            locations.put(ledger, second.entry_id, first.location)
    else:
        with (tmp_path / "ledgers" / "current" / index_path(ledger)).open("r+b") as file:
            file.seek(slot_offset(second.entry_id))
            file.write(write_location(first.location))
    findings = list(IndexCheck(directories).findings())
    assert kinds(findings) == [(FindingKind.WRONG_ENTRY, ledger, second.entry_id)]


def test_an_unindexed_entry_is_a_finding(bookie: Bookie) -> None:
    bookie.point(PLAIN, 2, 0)
    findings, _ = bookie.check()
    assert kinds(findings) == [(FindingKind.NOT_INDEXED, PLAIN, 2)]
    assert findings[0].location == bookie.where[PLAIN, 2]
    assert kinds(bookie.check(ledgers=[PLAIN])[0]) == [(FindingKind.NOT_INDEXED, PLAIN, 2)]
    assert bookie.check(ledgers=[LedgerId(0, 6)])[0] == []
    assert bookie.check(sample=1.0)[0] == []
    assert "this log was not finished, so the entry may never have been acknowledged" in findings[0].reason, (
        "the log has no ledgers map, so it was cut"
    )
    path = findings[0].path
    data = path.read_bytes()
    header = entry_log.write_header(1, len(data), 1)
    path.write_bytes(header + data[len(header) :] + b"".join(entry_log.write_ledgers_map({PLAIN: 1}, 1)))
    (completed,) = bookie.check(ledgers=[PLAIN])[0]
    assert (completed.kind, "acknowledged" in completed.reason) == (FindingKind.NOT_INDEXED, False)


def test_a_deleted_ledger_is_a_note(bookie: Bookie) -> None:
    bookie.forget(PLAIN)
    findings, job = bookie.check()
    assert kinds(findings) == [(FindingKind.UNINDEXED, PLAIN, None)]
    assert "5 entries" in findings[0].reason
    assert (findings[0].is_problem, job.counts.findings, job.counts.notes) == (False, 0, 1)


def test_a_ledger_that_a_checkpoint_indexes_meanwhile_is_not_lost(
    bookie: Bookie, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the looks at the index and at the journals: it is in neither."""

    def find_in(self: recheck.UnflushedEntries, _: object) -> tuple[()]:
        bookie.add_ledger(PLAIN)
        bookie.point(PLAIN, 0, bookie.where[PLAIN, 0])
        return ()

    bookie.forget(PLAIN)
    monkeypatch.setattr(recheck.UnflushedEntries, "find_in", find_in)
    job = recheck.Recheck(bookie.directories, Counts(), None)
    logs = {PLAIN: bookie.current / "0.log", LedgerId(0, 99): bookie.current / "1.log"}
    assert list(job.ledgers_without_index(logs)) == [LedgerId(0, 99)]


def test_a_second_copy_of_an_entry_is_not_a_finding(bookie: Bookie) -> None:
    """A compaction has copied it, and not yet deleted the log that it came from."""
    bookie.log(2, [(PLAIN, 0), (PLAIN, 1)])
    bookie.point(PLAIN, 0, bookie.where[PLAIN, 0])
    findings, job = bookie.check()
    assert findings == []
    assert job.counts.copies == 2


def test_a_missing_log_is_a_finding(bookie: Bookie) -> None:
    (bookie.current / "1.log").unlink()
    findings, _ = bookie.check()
    assert sorted(kinds(findings)) == [
        (FindingKind.LOG_MISSING, PLAIN, 3), (FindingKind.LOG_MISSING, PLAIN, 4),
        (FindingKind.LOG_MISSING, LedgerId(0, 6), 1),
    ]  # fmt: skip


def test_a_damaged_log_is_read_up_to_the_damage_and_then_where_the_index_points(bookie: Bookie) -> None:
    path = bookie.current / "0.log"
    data = bytearray(path.read_bytes())
    at = bookie.where[PLAIN, 1] & 0xFFFFFFFF
    data[at - 4 : at] = b"\xff\xff\xff\0"
    path.write_bytes(data)
    findings, job = bookie.check()
    assert kinds(findings) == [(FindingKind.LOG_DAMAGED, None, None)]
    assert str(path) in findings[0].reason
    assert "; 1 entry of 1 ledger that the index has there is lost" in findings[0].reason
    assert job.counts.findings == 1


def test_a_wrong_location_in_front_of_damage_is_a_finding_of_its_own(bookie: Bookie) -> None:
    path = bookie.current / "0.log"
    whole = path.read_bytes()
    at = bookie.where[PLAIN, 1] & 0xFFFFFFFF
    path.write_bytes(whole[: at - 4] + b"\xff" * (len(whole) - at + 4))
    bookie.point(PLAIN, 4, bookie.where[PLAIN, 0])
    bookie.point(PLAIN, 3, bookie.where[PLAIN, 0] + 7)
    findings, _ = bookie.check()
    assert sorted(kinds(findings), key=str) == sorted(
        [
            (FindingKind.WRONG_ENTRY, PLAIN, 4), (FindingKind.NO_RECORD, PLAIN, 3),
            (FindingKind.LOG_DAMAGED, None, None),
        ],
        key=str,
    )  # fmt: skip
    (damaged,) = (each for each in findings if each.kind is FindingKind.LOG_DAMAGED)
    assert "; 3 entries of 2 ledgers that" in damaged.reason


def test_a_digest_mismatch_is_a_finding(bookie: Bookie) -> None:
    path = bookie.current / "0.log"
    data = bytearray(path.read_bytes())
    data[(bookie.where[PLAIN, 1] & 0xFFFFFFFF) + 30] ^= 1
    path.write_bytes(data)
    assert bookie.check()[0] == []
    for options in ({}, {"sample": 1.0}):
        for digests in (DigestChecker(), DigestChecker(DigestType.CRC32C)):
            findings, _ = bookie.check(digests=digests, **options)
            assert kinds(findings) == [(FindingKind.DIGEST, PLAIN, 1)]
            assert "CRC32C" in findings[0].reason


def test_locations_without_their_ledger_are_a_note(tmp_path: Path) -> None:
    bookie = Bookie(tmp_path, "databases")
    bookie.log(0, [(PLAIN, 0), (PLAIN, 1)])
    bookie.write_index()
    with LedgersDatabase.edit(bookie.current / "ledgers") as ledgers:
        ledgers.write(ledgers.batch_of({}, [PLAIN]))
    findings, _ = bookie.check()
    assert kinds(findings)[0] == (FindingKind.NO_LEDGER, PLAIN, None)
    assert "2 locations" in findings[0].reason
    assert not findings[0].is_problem  # DbLedgerStorage leaves them when it is killed after a deletion


def test_a_damaged_index_is_an_error_and_the_check_continues(bookie: Bookie) -> None:
    bookie.point(SCOPED, 1, bookie.where[SCOPED, 0])
    if bookie.storage == "files":
        path = bookie.current / index_path(PLAIN)
        path.write_bytes(b"what?" + path.read_bytes()[5:])
    else:
        path = bookie.current / "locations"
        for table in path.glob("*.sst"):
            table.unlink()
    findings, job = bookie.check()
    assert (FindingKind.WRONG_ENTRY, SCOPED, 1) in kinds(findings)
    assert [each for each in findings if each.is_problem and each.ledger != SCOPED] == []
    (error,) = job.counts.errors
    assert isinstance(error, Corrupt)
    assert str(path) in str(error)


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("options", [{}, {"sample": 1.0}])
def test_an_unreadable_index_is_an_error_and_the_check_continues(
    obstacle: str, options: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Bookie(tmp_path, "files")
    made.log(0, [(PLAIN, 0), (LedgerId(0, 6), 0), (LedgerId(0, 6), 1)])
    made.write_index()
    made.point(LedgerId(0, 6), 1, made.where[LedgerId(0, 6), 0])
    path = made.current / index_path(PLAIN)
    obstruct(path, obstacle, monkeypatch)
    findings, job = made.check(**options)
    assert [each for each in kinds(findings) if each[1] != PLAIN] == [(FindingKind.WRONG_ENTRY, LedgerId(0, 6), 1)]
    (error,) = job.counts.errors
    assert error.exit_code == 7
    assert str(path) in str(error)


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_an_unreadable_log_is_a_finding(bookie: Bookie, obstacle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bookie.current / "0.log"
    obstruct(path, obstacle, monkeypatch)
    findings, job = bookie.check()
    assert kinds(findings) == [(FindingKind.LOG_DAMAGED, None, None)]
    assert str(path) in findings[0].reason
    assert "4 entries of 2 ledgers" in findings[0].reason
    assert job.counts.records == 5
    assert {each.kind for each in bookie.check(sample=1.0)[0]} == {FindingKind.NO_RECORD}


# --- running --------------------------------------------------------------------------------------------------------


def test_entries_that_a_restart_would_replay_count_as_not_flushed(bookie: Bookie) -> None:
    bookie.log(2, [(PLAIN, 10), (PLAIN, 11), (SCOPED, 10)])
    records = b"".join(
        record_of(DigestManager(ledger, DigestType.CRC32C).seal(entry_id, -1, 0, b""))
        for ledger, entry_id in ((PLAIN, 10), (PLAIN, 11), (PLAIN, 12))
    )
    start = len(journal.write_header(6))
    (bookie.journal / "a.txn").write_bytes(journal.write_header(6) + records)
    bookie.point(PLAIN, 12, pack_location(2, 5000))
    # The mark before all three; then behind the first.
    (bookie.current / "lastMark").write_bytes(journal.LogMark(0xA, start).serialize())
    findings, job = bookie.check()
    assert [each for each in kinds(findings) if each[1] == PLAIN] == []
    assert job.counts.not_flushed == 3
    (bookie.current / "lastMark").write_bytes(journal.LogMark(0xA, start + len(records) // 3).serialize())
    findings, job = bookie.check()
    assert [each for each in kinds(findings) if each[1] == PLAIN] == [(FindingKind.NOT_INDEXED, PLAIN, 10)]
    assert job.counts.not_flushed == 2


def test_without_journals_a_log_that_changed_since_the_last_mark_is_not_flushed(bookie: Bookie) -> None:
    (bookie.current / "lastMark").write_bytes(journal.LogMark(0xA, 512).serialize())
    bookie.log(2, [(PLAIN, 10)])
    directories = BookieDirectories.at(bookie.base / "ledgers")

    def missing() -> list[int | None]:
        return [each.entry_id for each in IndexCheck(directories).findings()]

    assert missing() == [10]
    (bookie.current / "DIRTY").touch()
    assert missing() == []
    os.utime(bookie.current / "2.log", ns=(0, 0))
    assert missing() == [10]


def test_an_entry_moved_by_a_compaction_meanwhile_is_not_a_finding(
    bookie: Bookie, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index is read; then log 0 is compacted into log 9, and deleted."""
    read_index = IndexCheck._check_logs
    compacted = []

    def compact_first(self: IndexCheck, *arguments: object) -> object:
        if not compacted:
            compacted.append(True)
            bookie.log(9, [(PLAIN, 0), (PLAIN, 1), (LedgerId(0, 6), 0), (PLAIN, 2)])
            for ledger, entry_id in list(bookie.where):
                bookie.point(ledger, entry_id, bookie.where[ledger, entry_id])
            (bookie.current / "0.log").unlink()
        return read_index(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(IndexCheck, "_check_logs", compact_first)
    findings, _ = bookie.check()
    assert compacted
    assert findings == []


def test_a_ledger_deleted_meanwhile_is_not_a_finding(bookie: Bookie, monkeypatch: pytest.MonkeyPatch) -> None:
    read_index = IndexCheck._check_logs
    deleted: list[bool] = []

    def delete_first(self: IndexCheck, *arguments: object) -> object:
        if not deleted:
            deleted.append(True)
            bookie.forget(PLAIN)
            (bookie.current / "1.log").unlink()
            bookie.point(LedgerId(0, 6), 1, 0)
        return read_index(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(IndexCheck, "_check_logs", delete_first)
    findings, _ = bookie.check()
    assert [each for each in findings if each.is_problem] == []


# --- samples, rates, sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
def test_a_sample_is_the_same_for_the_same_seed(tmp_path: Path, storage: str) -> None:
    bookie = Bookie(tmp_path, storage)
    bookie.log(0, [(PLAIN, entry_id) for entry_id in range(2000)])
    bookie.add_ledger(PLAIN)
    if storage == "files":
        slots = b"".join(write_location(bookie.where[PLAIN, entry_id]) for entry_id in range(2000))
        with (bookie.current / index_path(PLAIN)).open("ab") as file:
            file.write(slots)
    else:
        with LocationsDatabase.edit(bookie.current / "locations") as locations:
            locations.put_all((ledger, entry_id, place) for (ledger, entry_id), place in bookie.where.items())
    counts = [bookie.check(sample=0.1, seed=seed)[1].counts for seed in (1, 1, 2)]
    assert counts[0].entries == counts[1].entries
    assert (counts[0].bytes_read, counts[0].entries) != (counts[2].bytes_read, counts[2].entries)
    assert 100 < counts[0].entries < 300
    assert bookie.check(sample=1.0)[1].counts.entries == 2000


def test_a_rate_slows_reading_down(bookie: Bookie, monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    # In this module only: threads of servers that other tests left up sleep, too.
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    _, job = bookie.check(pace=pace.Pace(bytes_per_s=100.0))
    assert sum(slept) == pytest.approx(job.counts.bytes_read / 100)
    slept.clear()
    bookie.check(sample=1.0, pace=pace.Pace(steps_per_s=2.0))
    assert sum(slept) == pytest.approx(9 / 2)


def test_several_runs_of_rows_give_the_same_findings(bookie: Bookie, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted runs on disk, windows of two records, two second looks: the same answer."""
    bookie.point(PLAIN, 1, bookie.where[PLAIN, 0])
    bookie.point(PLAIN, 4, bookie.where[PLAIN, 0])
    expected = kinds(bookie.check()[0])
    assert len(expected) == 2
    monkeypatch.setattr(index_rows, "RUN_ROWS", 2)
    monkeypatch.setattr(index_rows, "BATCH_ITEMS", 2)
    monkeypatch.setattr(check, "WINDOW_RECORDS", 2)
    monkeypatch.setattr(recheck, "RETRY_ENTRIES", 2)
    assert sorted(kinds(bookie.check()[0])) == sorted(expected)
    assert sorted(kinds(bookie.check(ledgers=[PLAIN])[0])) == sorted(expected)


# --- several directories --------------------------------------------------------------------------------------------


def test_each_directory_that_lost_its_databases_is_searched(tmp_path: Path) -> None:
    parts = []
    for number in range(3):
        part = Bookie(tmp_path / str(number), "databases")
        part.log(0, [(LedgerId(0, 9 + number), 0)])
        part.write_index()
        parts.append(part)
    for part in parts[1:]:
        for name in ("ledgers", "locations"):
            shutil.rmtree(part.current / name)
    job = IndexCheck(BookieDirectories([], [part.base / "ledgers" for part in parts]))
    assert sorted(each.ledger for each in job.findings()) == [LedgerId(0, 10), LedgerId(0, 11)]


def test_a_database_for_each_of_several_ledger_directories(tmp_path: Path) -> None:
    """Each has log ids of its own; a ledger is in directory id mod n. With index directories apart, too."""
    parts = []
    for number in range(2):
        part = Bookie(tmp_path / str(number), "databases")
        part.log(0, [(LedgerId(0, 10 + number), entry_id) for entry_id in range(3 + number)])
        part.write_index()
        parts.append(part)
    ledger_dirs = [part.base / "ledgers" for part in parts]
    job = IndexCheck(BookieDirectories([], ledger_dirs))
    assert list(job.findings()) == []
    assert (job.counts.entries, job.counts.records) == (7, 7)
    for number, part in enumerate(parts):
        for name in ("ledgers", "locations"):
            (part.current / name).rename(part.base / f"lost-{name}")
        (lost,) = IndexCheck(BookieDirectories([], ledger_dirs)).findings()
        assert (lost.kind, lost.ledger, lost.path) == (
            FindingKind.UNINDEXED,
            LedgerId(0, 10 + number),
            part.current / "0.log",
        )
        for name in ("ledgers", "locations"):
            (part.base / f"lost-{name}").rename(part.current / name)
    for part in parts:
        for name in ("ledgers", "locations"):
            shutil.move(part.current / name, part.base / "index" / "current" / name)
    index_dirs = [part.base / "index" for part in parts]
    arrange: Callable[[], list[BookieDirectories]] = lambda: [  # noqa: E731
        BookieDirectories([], ledger_dirs, index_dirs),
        BookieDirectories.at(*ledger_dirs, *index_dirs),
    ]
    for directories in arrange():
        job = IndexCheck(directories)
        assert list(job.findings()) == []
        assert (job.counts.entries, job.counts.records) == (7, 7)
    crossed = IndexCheck(BookieDirectories([], ledger_dirs, index_dirs[::-1]))
    assert {each.kind for each in crossed.findings()} >= {FindingKind.WRONG_ENTRY}


def test_index_files_in_several_directories(tmp_path: Path) -> None:
    """Log ids are one space over all ledger directories."""
    one, two = Bookie(tmp_path / "1", "files"), Bookie(tmp_path / "2", "files")
    one.log(0, [(PLAIN, 0), (LedgerId(0, 6), 0)])
    two.log(1, [(PLAIN, 1), (LedgerId(0, 6), 1)])
    one.add_ledger(PLAIN)
    two.add_ledger(LedgerId(0, 6))
    one.point(PLAIN, 0, one.where[PLAIN, 0])
    one.point(PLAIN, 1, two.where[PLAIN, 1])
    two.point(LedgerId(0, 6), 0, one.where[LedgerId(0, 6), 0])
    two.point(LedgerId(0, 6), 1, two.where[LedgerId(0, 6), 1])
    directories = BookieDirectories([], [one.base / "ledgers", two.base / "ledgers"])
    job = IndexCheck(directories)
    assert list(job.findings()) == []
    assert job.counts.entries == 4
    two.add_ledger(PLAIN)
    two.point(PLAIN, 0, one.where[PLAIN, 0])
    job = IndexCheck(directories)
    (finding,) = job.findings()
    assert (finding.kind, finding.ledger, finding.path) == (
        FindingKind.TWICE, PLAIN, two.current / index_path(PLAIN),
    )  # fmt: skip
    assert str(one.current / index_path(PLAIN)) in finding.reason
    assert (job.counts.entries, job.counts.ledgers) == (4, 2)
