"""JournalReplay: the records behind the last marks, brought into ledger storage when a bookie starts.

Drops the tail that a crash left unsynced, and sets aside ledgers whose own state cannot be read.
Source: Bookie.readJournal, Journal.scanJournal; BP-35.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

from google_crc32c import value as _crc32c

from bkctl.config import BookieConfig
from bkctl.disk import NO_SPACE, SECTOR_SIZE_BYTES
from bkctl.errors import BkctlError, Corrupt, CorruptRecord, TruncatedRecord, Unsupported
from bkctl.files.journal import JournalReader, missing_journals, read_last_mark
from bkctl.files.scan import ScanState
from bkctl.formats.entry import ENTRY_V1, HEADER_SIZE_V1, HEADER_SIZE_V2, MASTER_KEY_SIZE, read_lac_header
from bkctl.formats.journal import PADDING_MASK, SEAL, LogMark, file_name
from bkctl.formats.record import RECORD_SIZE, Record, RecordType, record_of
from bkctl.ids import I64_MAX, LedgerId
from bkctl.storage.journal_writer import journal_ids
from bkctl.storage.ledger.ledger_handle import LedgerHandle
from bkctl.storage.ledger.ledger_storage import LedgerStorage, run_whole
from bkctl.storage.open_ledgers import OpenLedgers

log: Final = logging.getLogger("bkctl.bookie")

#: Set-aside ledgers that the log names one by one.
SET_ASIDE_NAMED_MAX: Final = 100
#: A master key is a SHA-1 digest with most clients: with this many zeros a crash may have cut it.
_TORN_KEY_ZEROS: Final = 8
#: A key from this size on can be zeros over a whole sector. Shorter ones share each sector with fields that are not 0.
_ZERO_KEY_SIZE_MIN: Final = SECTOR_SIZE_BYTES - 2 * RECORD_SIZE.size
_REPLAYED: Final = frozenset({RecordType.ENTRY, RecordType.FENCE, RecordType.EXPLICIT_LAC})
_DAMAGE_HINT: Final = "'bkctl journal verify' describes the damage"
_LATER_RELEASE_HINT: Final = (
    "Start the release that wrote this journal. If none is later than this one, the byte is damaged: restore the file "
    "from a copy"
)
SKIP_HINT: Final = (
    "Restore the file from a copy. Or set skipReplayJournalInvalidRecord=true to start without the entries that are "
    "lost; then replicate the bookie's ledgers from other replicas"
)
_END_OF_LAST: Final = "a crash left the last group of records incomplete, and nothing in it was acknowledged"
_END_OF_FOLLOWED: Final = (
    "later journals have records. Unless a crash left the file so, entries that were acknowledged are lost: replicate "
    "the bookie's ledgers from other replicas"
)


class JournalReplay:
    """One replay of a bookie's journals into `storage`, at start."""

    def __init__(self, config: BookieConfig, storage: LedgerStorage[Any], ledgers: OpenLedgers) -> None:
        self._config = config
        self._storage = storage
        self._ledgers = ledgers
        self._keys: dict[LedgerId, bytes] = {}
        self.entry_count = 0
        #: Records skipped because the journals have no key of their ledger.
        self.skipped_count = 0
        self.has_records = False
        #: Ledgers whose state cannot be read, so that their records were not replayed, and why.
        self.set_aside = ledgers.set_aside
        #: By journal number: the place before the first record of a set-aside ledger.
        self.pins: dict[int, LogMark] = {}
        #: The full disk's error that leaves replayed entries in memory.
        self.no_space: OSError | None = None

    def run(self, directories: Sequence[Path]) -> tuple[LogMark, ...]:
        """Replay the journals in `directories`, and return the last mark of each.

        Raises OSError; Corrupt for a journal that is missing or damaged; BkctlError where the disks have no space for
        more than memory holds.
        """
        marks = []
        for number, directory in enumerate(directories):
            mark = read_last_mark(self._storage.ledger_directories, number, len(directories))
            self._replay_journal(number, directory, mark)
            marks.append(mark)
        self._log_set_aside()
        return tuple(marks)

    def _replay_journal(self, number: int, directory: Path, mark: LogMark) -> None:
        journals = [journal_id for journal_id in journal_ids(directory) if journal_id >= mark.journal_id]
        for problem in lost_journals(directory, journals, mark):
            self._skip(Corrupt(problem), "its entries", "may be in it")
        paths = [directory / file_name(journal_id) for journal_id in journals]
        last = next((index for index in reversed(range(len(paths))) if _has_records(paths[index])), 0)
        for index, path in enumerate(paths):
            start = mark.offset if journals[index] == mark.journal_id else 0
            self._replay_file(path, start, is_followed=index < last)
            if self.set_aside and number not in self.pins:
                self.pins[number] = mark

    def _log_set_aside(self) -> None:
        for ledger, error in islice(self.set_aside.items(), SET_ASIDE_NAMED_MAX):
            log.error(
                "Ledger %s is set aside: it has records to replay, and its own state cannot be read (%s). Its requests "
                "fail, other ledgers are served, and the journals with its records stay until it is mended or deleted: "
                "stop the bookie, mend the index ('bkctl bookie index'), and start it again", ledger, error,
            )  # fmt: skip
        if len(self.set_aside) > SET_ASIDE_NAMED_MAX:
            log.error("%d more ledgers are set aside", len(self.set_aside) - SET_ASIDE_NAMED_MAX)

    def _replay_file(self, path: Path, start: int, *, is_followed: bool) -> None:
        """Replay a journal from byte `start`; `is_followed`: later journals have records."""
        with JournalReader.open(path) as reader:
            if (problem := reader.mark_problem(start)) is not None:
                self._skip(Corrupt(f"{reader.name}: {problem}"), "what it lacks", "may be missing from it")
                start = 0  # the mark itself may be wrong
            try:
                for record in reader.records(start):
                    try:
                        self._replay_record(reader, record)
                    except CorruptRecord as error:
                        self._skip(error, "this record")
                    self._write_when_full()
            except CorruptRecord as error:
                self._skip(error, "what follows in this journal")
            except Unsupported as error:
                # No setting skips it: a later release's entries would be lost by starting an earlier one.
                raise Unsupported(error.message, hint=_LATER_RELEASE_HINT) from error
            else:
                if reader.end is ScanState.TORN or (is_followed and reader.is_blank):
                    log.warning(
                        "%s: dropped what follows byte %d, up to byte %d: %s", reader.name, reader.position,
                        reader.size(), _END_OF_FOLLOWED if is_followed else _END_OF_LAST,
                    )  # fmt: skip

    def _skip(self, error: Corrupt, dropped: str, at_risk: str = "may follow in this journal") -> None:
        """Log that records are dropped. Raises Corrupt unless the configuration has invalid ones skipped."""
        if not self._config.skip_replay_journal_invalid_record:
            raise Corrupt(
                f"{error.message}. Entries that were acknowledged {at_risk}",
                hint=f"{error.hint or _DAMAGE_HINT}. {SKIP_HINT}",
            ) from error
        log.warning("%s: skipReplayJournalInvalidRecord drops %s", error.message, dropped)

    # --- space -------------------------------------------------------------------------------------------------------

    def _write_when_full(self) -> None:
        """Write replayed entries when enough are in memory; on a full disk, keep them there while memory lasts."""
        storage = self._storage
        if self.no_space is None:
            if storage.seal_entries():
                self.no_space = want_of_space(storage.write_entries)
            if storage.is_flush_due:
                self.no_space = want_of_space(self._flush) or self.no_space
        elif storage.unwritten_bytes > storage.unwritten_bytes_max:
            if want_of_space(self._flush) is not None:
                raise BkctlError(
                    f"The journals hold more than {storage.unwritten_bytes_max >> 20} MiB that ledger storage has no "
                    f"space for ({self.no_space.filename or self.no_space})",
                    hint="make space on the disks of the ledger and index directories; nothing is lost until then",
                )
            self.no_space = None

    def _flush(self) -> None:
        run_whole(self._storage.begin_flush, self._storage.flush, self._storage.end_flush)
        self._ledgers.evict()

    # --- records -----------------------------------------------------------------------------------------------------

    def _replay_record(self, reader: JournalReader, record: Record) -> None:
        self.has_records = True
        ledger = record.ledger
        if record.format_version == 2 and not ledger.is_scoped:
            problem = "Scope 0 in a record of format version 2"
            if not _is_unsynced(reader, record, problem):
                raise CorruptRecord(problem, offset=record.offset, where=reader.name)
        elif record.type is RecordType.LEDGER_KEY:
            self._replay_key(reader, record)
        elif record.type in _REPLAYED and ledger not in self.set_aside:
            problem = "The header of the entry is zeros"
            if _has_lost_header(reader, record) and _is_unsynced(reader, record, problem):
                return
            try:
                is_here = self._apply(record)
            except BkctlError as error:
                # Damage of one ledger's index must not pass for damage of the journal.
                self.set_aside[ledger] = error
                self._ledgers.handles.pop(ledger, None)
                return
            if not is_here and _is_of_padding(reader, record):
                raise CorruptRecord(problem, offset=record.offset, where=reader.name)

    def _replay_key(self, reader: JournalReader, record: Record) -> None:
        ledger, master_key = record.ledger, record.special_payload
        end = record.offset + RECORD_SIZE.size + record.record_size
        if master_key.count(0) >= _TORN_KEY_ZEROS and reader.has_lost_sector(end - len(master_key), end):
            problem = "A part of the master key is in a sector of zeros"
            if _is_unsynced(reader, record, problem):
                return
            if len(master_key) < _ZERO_KEY_SIZE_MIN:
                raise CorruptRecord(problem, offset=record.offset, where=reader.name)
        if len(master_key) == MASTER_KEY_SIZE:
            self._keys[ledger] = master_key
        elif ledger not in self._keys:
            self._keys[ledger] = b""
            log.warning(
                "Ledger %s has a master key of %d bytes in %s, which no client sends: it keeps its entries without "
                "a key", ledger, len(master_key), reader.name,
            )  # fmt: skip

    def _apply(self, record: Record) -> bool:
        """Bring a record into memory. Return False, and count it as skipped, if its ledger is not here.

        Raises OSError; BkctlError where the ledger's own state cannot be read.
        """
        ledger = record.ledger
        handle = self._ledgers.look_up(ledger)
        if ledger not in self._ledgers.handles:
            key = self._keys.get(ledger)
            if key is None and handle.index_error is not None:
                raise handle.index_error
            if key is None or (not ledger.is_scoped and ledger.ledger_id > I64_MAX):
                self.skipped_count += 1
                return False
            self._ledgers.create(handle, key)
        if record.type is RecordType.FENCE:
            handle.fenced = handle.fence_recorded = True
            self._storage.change_header(handle)
        elif record.type is RecordType.EXPLICIT_LAC:
            self._apply_lac(handle, record.special_payload)
        else:
            self._apply_entry(handle, record)
        return True

    def _apply_lac(self, handle: LedgerHandle, packet: bytes) -> None:
        try:
            header = read_lac_header(packet)
        except (TruncatedRecord, Unsupported):
            return
        old = handle.explicit_lac
        is_torn = bool(old) and _has_digest(old, header.size) and not _has_digest(packet, header.size)
        if header.ledger == handle.ledger and not is_torn:
            self._ledgers.set_explicit_lac(handle, header.last_add_confirmed, packet)

    def _apply_entry(self, handle: LedgerHandle, record: Record) -> None:
        body, entry_id = record.body, record.entry_id
        if record.last_add_confirmed is None or entry_id > self._storage.entry_id_max:
            return
        reader = self._storage.reader
        if reader.has(handle, entry_id):
            try:
                old = bytes(reader.read(handle, entry_id))
            except (OSError, Corrupt, Unsupported):
                old = b""
            # An equal copy is added again: after a failed sync the old one may be in the system's memory alone.
            if old and old != body and _is_better(old, body):
                return
        record_as_added = record_of(body)
        self._storage.table.add(handle, [entry_id], [record_as_added], len(record_as_added))
        handle.lac = max(handle.lac, record.last_add_confirmed)
        self.entry_count += 1


def lost_journals(directory: Path, ids: Sequence[int], mark: LogMark) -> Iterator[str]:
    """Yield which journals of `directory` from the marked one on are missing between its ascending `ids`."""
    if mark.journal_id > 0:
        if mark.journal_id not in ids:
            yield f"Journal {directory / file_name(mark.journal_id)} is missing, but the last mark names it"
        yield from (f"{directory}: {gap}" for _, gap in missing_journals(ids, mark.journal_id))


def _has_records(path: Path) -> bool:
    with JournalReader.open(path) as reader, suppress(Corrupt, Unsupported):
        return next(reader.batches(), None) is not None
    return True


def want_of_space(write: Callable[[], object]) -> OSError | None:
    """Call `write`; return the error of a full disk, None without. Raises OSError for any other error."""
    try:
        write()
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        return error
    return None


def _is_unsynced(reader: JournalReader, record: Record, problem: str) -> bool:
    """Return whether a crash explains `problem` of a record: it is in the last group. Log that it is dropped."""
    if not reader.is_in_last_group(record.offset):
        return False
    log.warning(
        "%s: dropped the record at byte %d: %s, in the last group of records, which a crash left incomplete",
        reader.name, record.offset, problem,
    )  # fmt: skip
    return True


def _has_lost_header(reader: JournalReader, record: Record) -> bool:
    """Return whether the header of an entry is zeros because its sector never reached the disk."""
    body, start = record.body, record.offset + RECORD_SIZE.size
    return (
        record.format_version == 1
        and len(body) > ENTRY_V1.size
        and not any(body[: ENTRY_V1.size])
        and reader.has_lost_sector(start, start + ENTRY_V1.size)
    )


def _is_of_padding(reader: JournalReader, record: Record) -> bool:
    """Return whether a record is the count and zeros of padding, to which the record before reaches too far."""
    end = record.offset + RECORD_SIZE.size + record.record_size
    if reader.is_sealed and end % SECTOR_SIZE_BYTES:
        end += SEAL.size
    if end % SECTOR_SIZE_BYTES or any(record.body):
        return False
    return reader.read(max(0, record.offset - RECORD_SIZE.size), RECORD_SIZE.size) == RECORD_SIZE.pack(PADDING_MASK)


def _is_better(old: bytes, new: bytes) -> bool:
    """Return whether the stored copy `old` of an entry is kept, since a crash cut the journal's copy `new`.

    Copies differ in LAC and digest only (recovery writes an entry again), so a damaged one shows by its digest; where
    the digest cannot tell, by having more zeros, which is what sectors that never reached the disk read as.
    """
    if old == new:
        return True
    size = HEADER_SIZE_V1 if new[0] < 0x80 else HEADER_SIZE_V2
    if _has_digest(new, size):
        return False
    return _has_digest(old, size) or len(old) != len(new) or old.count(0) < new.count(0)


def _has_digest(data: bytes, size: int) -> bool:
    """Return True if the CRC32 or CRC32C of header and payload stands behind the header of `size` bytes.

    Both digests need no password. `data` is an entry or a LAC packet.
    """
    if data[size : size + 4] == _crc32c(data[:size] + data[size + 4 :]).to_bytes(4, "big"):
        return True
    return data[size : size + 8] == zlib.crc32(data[size + 8 :], zlib.crc32(data[:size])).to_bytes(8, "big")
