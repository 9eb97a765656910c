"""Checks of entry logs: the sound records, the end and its reason, and the entries that can be saved behind damage.

A log is sound if its records follow each other to its end, the ledgers map at the end matches the records, and each
entry matches its digest. Apache's readers do not check: behind damage they advance byte by byte. Source:
DefaultEntryLogger.scanEntryLog, extractEntryLogMetadataFromIndex.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from bkctl.checks.digests import DigestChecker, DigestCounts, DigestMismatchAt
from bkctl.errors import BkctlError, Corrupt, NotFound, Unsupported
from bkctl.files.directories import BookieDirectories
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.index import BookieIndexes
from bkctl.files.scan import RecordBatch, ScanState
from bkctl.formats.entry_log import VERSION_SCOPED, content_id_of, log_id_of
from bkctl.formats.names import CURRENT, DIRTY_NAME, SCOPED_DIRECTORY
from bkctl.formats.record import NO_LEDGER, RecordType
from bkctl.ids import LedgerId
from bkctl.pace import Pace

#: Mismatches of one log that are kept; all are counted.
MISMATCHES_MAX: Final = 1000
#: Reads of the rest of a damaged log at most, as multiples of its size and in bytes.
_READS_MAX: Final = 4
_READS_MIN_BYTES: Final = 256 << 20


class Salvage(NamedTuple):
    """The bytes behind the end of a log's records.

    `size_bytes` up to the end of the file; at least `entry_count` entries in them can be saved (`entries_size_bytes`
    with their size fields), the first at byte `resumes_at` (None: none). A payload that holds entries counts too.
    """

    size_bytes: int = 0
    entry_count: int = 0
    entries_size_bytes: int = 0
    resumes_at: int | None = None


@dataclass
class LogCheck:
    """The result of checking one entry log.

    The `entry_count` entries are sound up to byte `good_end`, where they end because of `state`. `problem` describes
    the damage in words, `error` is the damage. `contradictions` are the other faults: of the ledgers map, or a cut tail
    where no bookie writes. `mismatches` has the first MISMATCHES_MAX entries that do not match their digests (`digests`
    counts all), among them entries of earlier logs whose ledger's digest type became known here.
    """

    path: Path
    log_id: int | None
    scoped: bool = False
    version: int | None = None
    size_bytes: int | None = None
    state: ScanState = ScanState.UNREADABLE
    good_end: int | None = None
    entry_count: int = 0
    behind: Salvage = field(default_factory=Salvage)
    digests: DigestCounts | None = None
    mismatches: list[DigestMismatchAt] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    error: BkctlError | None = None

    @property
    def problem(self) -> str | None:
        """Return the damage in words, else the first contradiction; None for a sound log."""
        if self.error is not None:
            return self.error.message.removeprefix(f"{self.path}: ")
        return self.contradictions[0] if self.contradictions else None

    @property
    def finding_count(self) -> int:
        """Return the number of digest mismatches and contradictions; damage does not count."""
        mismatched = max(len(self.mismatches), 0 if self.digests is None else self.digests.mismatched)
        return mismatched + len(self.contradictions)

    @property
    def is_sound(self) -> bool:
        """Return whether the log is whole, without faults."""
        return self.problem is None and not self.finding_count and self.state is not ScanState.TORN


def check_entry_logs(
    paths: Sequence[Path],
    checker: DigestChecker | None = None,
    *,
    index_dirs: Iterable[Path] = (),
    pace: Pace | None = None,
) -> Iterator[LogCheck]:
    """Yield the check of each log in the order of `paths`; without `checker` digests are not checked.

    Skips logs that a running bookie deletes meanwhile. The index in `index_dirs` and beside the logs tells a damaged
    size from a cut record whose payload holds entries. `pace` bounds the bytes and entries read.
    """
    newest: dict[Path, int] = {}
    beside = [path.parent.parent if path.parent.name == SCOPED_DIRECTORY else path.parent for path in paths]
    with BookieIndexes(BookieDirectories(index_dirs=[*index_dirs, *beside])) as indexes:
        for path, current in zip(paths, beside, strict=True):
            if path.parent not in newest:
                newest[path.parent] = _newest_log_id(path.parent)
            log_id = log_id_of(path.name)
            is_newest = log_id is None or log_id >= newest[path.parent] or _may_be_open(path, current)
            check = check_entry_log(path, checker, is_newest=is_newest, indexes=indexes, pace=pace)
            if check is not None:
                yield check


def _newest_log_id(directory: Path) -> int:
    """Return the highest id of the nonempty logs in a directory; -1 without one."""
    found = -1
    for path in directory.iterdir():
        log_id = log_id_of(path.name)
        if log_id is not None and log_id > found:
            with suppress(OSError):
                found = log_id if path.stat().st_size > 0 else found
    return found


def _may_be_open(log: Path, current: Path) -> bool:
    """Return True if a bookie that runs, or was killed, wrote to the log: with a log for each ledger, many are open."""
    with suppress(OSError):
        return log.stat().st_mtime_ns >= (current / DIRTY_NAME).stat().st_mtime_ns
    return False


def check_entry_log(
    path: Path,
    checker: DigestChecker | None = None,
    *,
    is_newest: bool = True,
    indexes: BookieIndexes | None = None,
    pace: Pace | None = None,
) -> LogCheck | None:
    """Check one entry log; return None if it was just deleted.

    `is_newest`: a bookie may still write to the log, so its tail may be cut. `indexes` are its bookie's.
    """
    check = LogCheck(path, content_id_of(path.name), scoped=path.parent.name == SCOPED_DIRECTORY)
    before = None if checker is None else checker.counts()
    try:
        with EntryLogReader.open(path) as reader:
            check.size_bytes = reader.size()
            if reader.header is None:
                check.state, check.good_end = ScanState.EMPTY, 0
                return check
            check.version = reader.header.version
            if path.parent.name == (CURRENT if check.version == VERSION_SCOPED else SCOPED_DIRECTORY):
                check.contradictions.append(f"A log of header version {check.version} does not belong in {path.parent}")
            if indexes is not None and check.log_id is not None:
                reader.is_indexed = partial(indexes.points_to, check.log_id)
            _check_records(reader, check, checker, pace or Pace())
            if check.state is ScanState.TORN:
                cut = max(0, reader.size() - reader.position)
                check.behind = Salvage(cut)
                if not is_newest:  # no bookie will complete it
                    check.contradictions.append(
                        f"The last record is cut at byte {reader.position}, {cut:,} bytes of it are here, and newer "
                        "logs follow: a crash left it so, or bytes were lost"
                    )
    except NotFound:
        return None
    except BkctlError as error:
        check.state, check.error = ScanState.UNREADABLE, error
    if checker is not None and before is not None:
        check.mismatches += list(checker.late_findings())[: MISMATCHES_MAX - len(check.mismatches)]
        after = checker.counts()
        check.digests = DigestCounts(
            dict(Counter(after.matched) - Counter(before.matched)),
            after.mismatched - before.mismatched,
            after.unprotected - before.unprotected,
            max(0, after.unknown - before.unknown),
            after.without_password - before.without_password,
        )
    return check


def _check_records(reader: EntryLogReader, check: LogCheck, checker: DigestChecker | None, pace: Pace) -> None:
    """Read the log to its end: count, check digests, compare with the ledgers map, look behind damage."""
    sizes: Counter[tuple[int, int]] = Counter()
    map_at: int | None = None
    behind_map = position = 0
    try:
        for batch in reader.batches(special=True):
            if batch.record is not None and batch.record.ledger is NO_LEDGER:
                if batch.record.type is RecordType.LEDGERS_MAP and map_at is None:
                    map_at = batch.record.offset
                continue
            check.entry_count += len(batch)
            behind_map += len(batch) if map_at is not None else 0
            sizes.update(batch.sizes_by_ledger())
            if checker is not None:
                found = checker.check_batch(batch, reader.name)
                check.mismatches += found[: MISMATCHES_MAX - len(check.mismatches)]
            pace.take(reader.position - position, len(batch))
            position = reader.position
    except (Corrupt, Unsupported) as error:
        check.error = error
    check.good_end, check.state = reader.position, reader.end
    if check.error is not None:
        check.behind = look_behind(reader, reader.position)
        return
    if behind_map:
        follow = "entry follows" if behind_map == 1 else "entries follow"
        check.contradictions.append(f"{behind_map:,} {follow} the ledgers map at byte {map_at}")
    _check_map(reader, check, map_at, {LedgerId(*key): size for key, size in sizes.items()})


def _check_map(reader: EntryLogReader, check: LogCheck, map_at: int | None, counted: dict[LedgerId, int]) -> None:
    """Compare the ledgers map with the header and the `counted` bytes; the scan found a map at byte `map_at`."""
    try:
        mapped = reader.ledgers_map()
    except Corrupt as error:
        check.error = error
        return
    header = reader.header
    assert header is not None
    if map_at is not None and header.ledgers_map_offset == 0:
        check.contradictions.append(f"The header does not know of the ledgers map at byte {map_at}")
    elif (mapped or map_at is not None) and map_at != header.ledgers_map_offset:
        check.contradictions.append(
            f"The header says the ledgers map is at byte {header.ledgers_map_offset}, the first one is at {map_at}"
        )
    if mapped is None:
        return
    for ledger in sorted(mapped.keys() | counted.keys()):
        expected, found = mapped.get(ledger), counted.get(ledger)
        if expected is None:
            check.contradictions.append(f"The ledgers map lacks ledger {ledger}, which has {found:,} bytes")
        elif expected != found:
            held = "no entries" if found is None else f"{found:,}"
            check.contradictions.append(
                f"The ledgers map gives {expected:,} bytes to ledger {ledger}, which has {held}"
            )


def look_behind(reader: EntryLogReader, start: int) -> Salvage:
    """Return what can be saved from byte `start` on, where a log's records ended, as `batches_behind` finds it."""
    entries = entries_size = 0
    resumes_at: int | None = None
    for batch in batches_behind(reader, start):
        if resumes_at is None:
            resumes_at = batch.offsets[0]
        entries, entries_size = entries + len(batch), entries_size + sum(batch.sizes) + 4 * len(batch)
    return Salvage(max(0, reader.size() - start), entries, entries_size, resumes_at)


def batches_behind(reader: EntryLogReader, start: int) -> Iterator[RecordBatch]:
    """Yield the entries that can be saved from byte `start` on, where a log's records ended.

    Entries count if two or more follow each other, or if zeros, padding, a ledgers map or the end of the file follows
    one. Skips bytes that the disk cannot read. Reads the rest of the log a few times at most.
    """
    end = reader.size()
    budget = max(_READS_MIN_BYTES, _READS_MAX * (end - start))
    at = start + 1
    while budget > 0:
        found, budget = reader.next_entry(at, end, budget)
        if found is None:
            return
        with suppress(Corrupt, Unsupported):
            yield from reader.batches(found, complete=False)
        budget -= reader.position - found
        at = max(reader.position, found + 1)
