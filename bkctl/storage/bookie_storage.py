"""BookieStorage: one bookie's ledgers on disk. The journals and the storage behind them, tied by checkpoints.

    add, fence, …     change what is in memory and queue journal records in batches (the bookie's event loop)
    commit            writes one journal's batch; when it returns, the batch is on disk (that journal's thread)
    write_entries     writes what the entry logs hold in memory, unsynced (the entry log thread)
    checkpoint        entry logs synced → indexes synced → last marks → old journals deleted (the checkpoint thread)

`ledgers` is the storage proper, of the class that the configuration names. At start everything behind the last mark is
replayed from the journals. Source: BookieImpl, LedgerDescriptorImpl, SyncThread; BP-35.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import random
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from google_crc32c import value as _crc32c

from bkctl.config import MEBIBYTE, BookieConfig
from bkctl.disk import NO_SPACE, SECTOR_SIZE_BYTES, Files
from bkctl.errors import (
    BadRequest,
    BkctlError,
    Corrupt,
    CorruptRecord,
    LedgerFenced,
    LedgerNotFound,
    TruncatedRecord,
    Unauthorized,
    UnknownLedgerState,
    Unsupported,
)
from bkctl.files.journal import JournalEnd, JournalReader, read_last_mark
from bkctl.formats import journal as journal_formats
from bkctl.formats.availability import Availability
from bkctl.formats.entry import (
    ENTRY_FLAGS_V2,
    ENTRY_V1,
    ENTRY_V2,
    MASTER_KEY_SIZE,
    read_entry_header,
    read_lac_header,
)
from bkctl.formats.journal import LAST_MARK, LogMark, file_name, last_mark_name
from bkctl.formats.layout import Buffer
from bkctl.formats.names import CURRENT
from bkctl.formats.record import RECORD_SIZE, Record, RecordType, record_of
from bkctl.ids import I64_MAX, LedgerId
from bkctl.storage.journal_writer import JournalWriter, journal_ids
from bkctl.storage.ledger.factory import check_index, open_ledger_storage
from bkctl.storage.ledger.ledger_storage import CHUNK_SIZE_BYTES, IsWanted, LedgerHandle, NeedsDisk, always

LAC_PACKET_SIZE_BYTES_MAX: Final = 256
#: A ledger that was fenced when it was deleted takes no writes until nobody tried for so long; and how many are kept.
FENCED_AND_DELETED_MS: Final = 7 * 24 * 3_600_000
FENCED_AND_DELETED_MAX: Final = 100_000
#: Ledgers that the log names where the state of many cannot be read.
SET_ASIDE_NAMED_MAX: Final = 100

log: Final = logging.getLogger("bkctl.bookie")
_DAMAGE_HINT: Final = "'bkctl journal verify' shows what follows"
_SKIP_HINT: Final = (
    "Restore the file from a copy. Or set skipReplayJournalInvalidRecord=true to start without what follows in it; "
    "then replicate the bookie's ledgers from other replicas"
)

_unpack_v1 = ENTRY_V1.unpack_from
_unpack_v2 = ENTRY_V2.unpack_from

#: Told when a batch is on disk (None), or that it never will be.
Done = Callable[[BaseException | None], None]


class Batch:
    """Records on their way to one journal, and who waits for them.

    `tokens` are the callers' own, one for what is added at once, `count` entries in all; `calls` are told the outcome
    after them. `written` are told before, once the system has the batch (or that it never will).
    """

    __slots__ = ("calls", "count", "epoch", "put_s", "records", "scoped", "size", "tokens", "written")

    def __init__(self, epoch: int = 0) -> None:
        #: Batches of one epoch stand on one another: if one fails, so do those behind it.
        self.epoch = epoch
        self.records: list[bytes] = []
        #: Bytes of the records, and how many of them are entries.
        self.size = 0
        self.count = 0
        #: When it was put to its journal (monotonic clock).
        self.put_s = 0.0
        self.scoped = False
        self.tokens: list[Any] = []
        self.calls: list[Done] = []
        self.written: list[Done] = []

    def tell_written(self, error: BaseException | None) -> None:
        """Tell, once, whether the system has the batch."""
        written, self.written = self.written, []
        for done in written:
            _tell(done, error)


def _tell(done: Done, error: BaseException | None) -> None:
    """Call `done`; an exception of one caller is logged, so that the others of its group still hear theirs."""
    try:
        done(error)
    except Exception:
        log.exception("A caller of the journal failed when its group was settled")


@dataclass(slots=True)
class Checkpoint:
    """What one checkpoint writes: the storage's changes, and the place in each journal that they reach."""

    marks: tuple[LogMark, ...]
    #: None when nothing but journals changed.
    flush: object | None


class BookieStorage:
    """The ledgers of one bookie in the directories of `config`; see the module for which thread calls what.

    `clock_ms` gives new journals their ids; `chance` picks directories.
    """

    def __init__(
        self,
        config: BookieConfig,
        *,
        files: Files | None = None,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        chance: random.Random | None = None,
    ) -> None:
        self.config = config
        self.files = files or Files()
        self.journal_directories = [Path(each) / CURRENT for each in config.journal_directories]
        self.ledger_directories = [Path(each) / CURRENT for each in config.ledger_directories]
        index_directories = config.index_directories or config.ledger_directories
        self.index_directories = [Path(each) / CURRENT for each in index_directories]
        self._writable = list(range(len(self.ledger_directories)))
        self._clock_ms = clock_ms
        self.ledgers = open_ledger_storage(config, self.files, chance=chance)
        self._handles = self.ledgers.handles
        #: Of the ledgers that `supplied` found not to be here: what `_open_to_write` makes them of.
        self._blanks: dict[LedgerId, LedgerHandle] = {}
        self._entry_id_max = self.ledgers.entry_id_max
        self.journals: list[JournalWriter] = []
        self.batches: list[Batch] = []
        self._marks_written: tuple[LogMark, ...] = ()
        #: When somebody last wanted to write to it, the longest ago first.
        self._fenced_and_deleted: dict[LedgerId, int] = {}
        self._has_scoped = False
        self._journals_entries = config.journal_write_data
        #: (entries, ledgers skipped for want of a key) of the replay at start.
        self.replayed = (0, 0)
        self._replays = False
        #: Ledgers whose state cannot be read, so that `open` could not replay their records, and why.
        self.set_aside: dict[LedgerId, BkctlError] = {}
        #: By journal number: the place before the first record of a ledger that is set aside. The mark stays there.
        self._pins: dict[int, LogMark] = {}
        #: Why `open` left what it replayed in memory, and perhaps a journal without a file: a disk is full.
        self.no_space: OSError | None = None

    @property
    def writable(self) -> list[int]:
        """Indexes of the ledger directories that take new files."""
        return self._writable

    def set_writable(self, numbers: list[int]) -> None:
        """Let only these ledger directories take new files; an entry log in another one is completed as it is.

        While there are none, everything stays where it is. Source: EntryLogManagerForSingleEntryLog.
        """
        if numbers != self._writable:
            self._writable = numbers
            self.ledgers.set_writable(numbers)

    def leave_full_disk(self) -> bool:
        """After a write to the entry logs failed for want of space: whether its entries go elsewhere now.

        True: `write_entries` may be called again, unless a checkpoint is under way.
        """
        return self.ledgers.leave_full_disk()

    def set_index_writable(self, numbers: list[int]) -> None:
        """Let only these index directories take new files, while there are any."""
        self.ledgers.set_index_writable(numbers)

    # --- start and stop ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the directories, made where missing: replay the journals, and begin a new file in each.

        Where a disk has no space for that, what was replayed stays in memory as far as that may be filled, the journals
        stay as they are, and `no_space` says so: it takes a checkpoint later. A ledger whose own state cannot be read
        is `set_aside`: its requests fail, the others are served, and the journals from its first record on stay until
        it is mended or deleted. Raises OSError; Corrupt when a journal or mark contradicts itself; Unsupported for a
        later version; UsageError for an index of another storage class, Conflict for one that is being converted;
        BkctlError where more than memory holds has no space on the disks. Nothing is open then. Source:
        SyncThread.flush, which tells the same of a full disk.
        """
        directories = (*self.journal_directories, *self.ledger_directories, *self.index_directories)
        for directory in dict.fromkeys(directories):
            self.files.make_directory(directory)
        check_index(self.config)
        self.ledgers.open()
        try:
            self._open_journals()
        except BaseException:
            with contextlib.suppress(OSError, BkctlError):  # the failure on its way tells more
                self.ledgers.close()
            raise

    def _open_journals(self) -> None:
        self._has_scoped = self.ledgers.has_scoped_ledgers()
        marks = tuple(self._replay())
        if self._replays:
            # What a killed process wrote may be in the system's memory alone. Replay saw it and builds on it, and the
            # marks are about to pass it.
            for directory in dict.fromkeys((*self.ledger_directories, *self.index_directories)):
                self.files.sync_file_system(directory)
        config = self.config
        self.journals = [
            JournalWriter(
                directory,
                self.files,
                clock_ms=self._clock_ms,
                size_max=config.journal_max_size_mb * MEBIBYTE,
                allocation_size=config.journal_pre_alloc_size_mb * MEBIBYTE,
                alignment=config.journal_alignment_size,
                backups=config.journal_max_backups,
                version=config.journal_format_version_to_write,
                scoped=self._has_scoped,
                sync_data=config.journal_sync_data,
                sync_interval_ms=config.journal_page_cache_flush_interval_msec,
                forgets_cache=config.journal_remove_from_page_cache,
            )
            for directory in self.journal_directories
        ]
        for journal in self.journals:
            journal.open()
        self.batches = [Batch() for _ in self.journals]
        self._failed_epochs = [-1] * len(self.journals)
        self._marks_written = marks
        if self._has_space_for(self.run_checkpoint):
            self.no_space = None
            for journal in self.journals:
                if not journal.is_open:  # old files may have made room
                    journal.open()
                if not journal.is_open:
                    self.no_space = OSError(errno.ENOSPC, "No space for a journal file", str(journal.directory))

    def _has_space_for(self, write: Callable[[], object]) -> bool:
        """Do `write`, again where a full directory can be left; `no_space` says why it was in vain. Raises OSError."""
        while True:
            try:
                write()
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                if not self.leave_full_disk():
                    self.no_space = error
                    return False
            else:
                return True

    def close(self) -> None:
        """The clean stop: everything into ledger storage, and the directories fit for Apache's bookie again.

        A journal with records of a ledger that is `set_aside` stays as it is, for our next start. Every batch must have
        been committed. Raises OSError: then the next start replays. Source: BP-35's downgrade.
        """
        self.run_checkpoint()
        for number, journal in enumerate(self.journals):
            if number not in self._pins:
                journal.make_downgradable(lambda mark, number=number: self._write_mark(number, mark))  # type: ignore[misc]
            journal.close()
        self.ledgers.close()

    # --- changes -----------------------------------------------------------------------------------------------------

    def add(
        self,
        ledger: LedgerId,
        entry_id: int,
        master_key: Buffer,
        body: Buffer,
        token: object,
        recovery: bool = False,
    ) -> None:
        """Add one entry, and queue it with `token` for its journal.

        Raises Unauthorized (another master key), LedgerFenced (unless `recovery`, or it is deleted too), BadRequest
        (ids or format of `body` are not the request's, or the master key is not 20 bytes), UnknownLedgerState (a fence
        may be lost; unless `recovery`), OSError or Corrupt (the ledger's index cannot be read).
        """
        try:
            if ledger[0]:
                flags, scope_id, ledger_id, found_id, lac, _ = _unpack_v2(body)
                fits = flags in ENTRY_FLAGS_V2 and scope_id == ledger[0] and ledger_id == ledger[1]
            else:
                ledger_id, found_id, lac, _ = _unpack_v1(body)
                fits = ledger_id == ledger[1] and ledger_id <= I64_MAX
        except struct.error:
            fits = False
        if not fits or found_id != entry_id or not 0 <= entry_id <= self._entry_id_max:
            raise BadRequest(f"The body is not entry {entry_id} of ledger {ledger} in the format of its scope")
        record = record_of(body)
        self.add_records(ledger, master_key, [entry_id], [record], len(record), lac, token, recovery)

    def add_records(
        self,
        ledger: LedgerId,
        master_key: Buffer,
        entry_ids: Sequence[int],
        records: Sequence[bytes],
        size: int,
        last_add_confirmed: int,
        token: object,
        recovery: bool = False,
    ) -> None:
        """Add entries, and queue them with `token` for their journal: `size` bytes in `records`, one an entry.

        Their bodies must be what the request says: these entries (0 … ENTRY_ID_MAX) of this ledger in the format of its
        scope, with `last_add_confirmed` the highest that they say. Raises what `add` does for each of them.
        """
        handle = self._handles.get(ledger)
        if handle is None or handle.master_key != master_key:
            try:
                handle = self._open_to_write(ledger, master_key)
            except LedgerNotFound as error:
                raise LedgerFenced(error.message) from error
        if (handle.fenced or handle.unknown) and not recovery:
            if handle.fenced:
                raise LedgerFenced(f"Ledger {ledger} is fenced")
            raise UnknownLedgerState(f"Ledger {ledger} is in limbo: it may have been fenced")
        self.ledgers.add(handle, entry_ids, records, size)
        if last_add_confirmed > handle.lac:
            handle.lac = last_add_confirmed
            if handle.watchers:
                self.wake(handle)
        batch = self.batches[handle.journal]
        if not handle.key_recorded:
            self._record_key(handle, batch)
        if self._journals_entries:
            batch.records += records
            batch.size += size
            if ledger[0]:
                batch.scoped = True
        # Last: whoever is in the batch is answered with it, so nothing may raise behind this.
        batch.tokens.append(token)
        batch.count += len(records)

    def _open_to_write(self, ledger: LedgerId, master_key: Buffer) -> LedgerHandle:
        """The ledger's handle, made where it is missing: the first master key binds it.

        Raises Unauthorized; BadRequest for a master key that is not 20 bytes, or an id that no ledger can have;
        LedgerNotFound for a ledger that was fenced and is deleted. Source: HandleFactoryImpl.
        """
        handle = self._look_up(ledger)
        is_here = ledger in self._handles
        if is_here and handle.master_key:
            if handle.master_key != master_key:
                raise Unauthorized(f"Wrong master key for ledger {ledger}")
            return handle
        if len(master_key) != MASTER_KEY_SIZE:
            raise BadRequest(f"A master key for ledger {ledger} of {len(master_key)} bytes, not {MASTER_KEY_SIZE}")
        if not is_here:
            if self._was_fenced(ledger):
                raise LedgerNotFound(f"Ledger {ledger} was fenced, and is deleted")
            if not ledger.is_scoped and ledger.ledger_id > I64_MAX:
                raise BadRequest(f"Ledger id {ledger.ledger_id} is 2^63 or more, which no ledger of scope 0 can have")
            self._create(handle, bytes(master_key))
        else:
            handle.master_key = bytes(master_key)
            self.ledgers.change_header(handle)
        return handle

    def _create(self, handle: LedgerHandle, master_key: bytes) -> None:
        ledger = handle.ledger
        self._blanks.pop(ledger, None)
        self.ledgers.create(handle, master_key)
        self._assign_journal(handle)
        if ledger.is_scoped and not self._has_scoped:
            self._has_scoped = True
            for journal in self.journals:
                journal.expect_scoped()

    def get(self, ledger: LedgerId) -> LedgerHandle | None:
        """Return the ledger's handle, None when it is not here. Raises OSError, Corrupt, Unsupported, NeedsDisk."""
        handle = self._handles.get(ledger)
        if handle is None:
            self._look_up(ledger)
            handle = self._handles.get(ledger)
        return handle

    def _look_up(self, ledger: LedgerId) -> LedgerHandle:
        """The ledger's handle, or where it is not here one that is not among `_handles`."""
        handle = self._handles.get(ledger) or self._blanks.get(ledger)
        if handle is None:
            read = functools.partial(self.ledgers.load, ledger)
            if not self.ledgers.waits_for_disk:
                raise NeedsDisk(ledger, read)
            handle = self._adopt(read())
        return handle

    def _adopt(self, handle: LedgerHandle) -> LedgerHandle:
        if handle.is_on_disk:
            self._assign_journal(handle)
            self._handles[handle.ledger] = handle
        return handle

    def serve_from_memory(self) -> None:
        """Raise NeedsDisk from now on in place of waiting for the disk in the thread that takes requests."""
        self.ledgers.waits_for_disk = False

    @contextlib.contextmanager
    def supplied(self, found: object) -> Iterator[None]:
        """Serve within, from memory, the requests that waited for what NeedsDisk.read returned."""
        if not isinstance(found, LedgerHandle):
            yield
            return
        ledger = found.ledger
        assert ledger not in self._handles, f"ledger {ledger} was opened twice"
        if not self._adopt(found).is_on_disk:
            self._blanks[ledger] = found
        try:
            yield
        finally:
            self._blanks.pop(ledger, None)

    def missing(self, ledger: LedgerId) -> BkctlError:
        """The error for a ledger that is not here: LedgerNotFound, or UnknownLedgerState where it may be lost."""
        if self.ledgers.needs_integrity_check:
            return UnknownLedgerState(f"No ledger {ledger} on this bookie, which may have lost it")
        return LedgerNotFound(f"No ledger {ledger} on this bookie")

    def _assign_journal(self, handle: LedgerHandle) -> None:
        handle.journal = handle.ledger.value % len(self.journal_directories)

    def _record(self, batch: Batch, ledger: LedgerId, record: bytes) -> None:
        batch.records.append(record)
        batch.size += len(record)
        batch.scoped = batch.scoped or ledger.is_scoped

    def _record_key(self, handle: LedgerHandle, batch: Batch) -> None:
        self._record(batch, handle.ledger, journal_formats.ledger_key_record(handle.ledger, handle.master_key))
        handle.key_recorded = True

    def fence(self, ledger: LedgerId, master_key: Buffer, done: Done) -> LedgerHandle:
        """Refuse all but recovery adds from now on, in a ledger made where it is missing; `done` once that is on disk.

        Raises Unauthorized, BadRequest (the master key is not 20 bytes), LedgerNotFound (fenced and deleted), OSError,
        Corrupt. Source: BookieImpl.fenceLedger.
        """
        handle = self._open_to_write(ledger, master_key)
        batch = self.batches[handle.journal]
        if not handle.fence_recorded:
            self._record_new_key(handle, batch)
            self._record(batch, ledger, journal_formats.fence_record(ledger))
            handle.fence_recorded = True
        if not handle.fenced:
            handle.fenced = True
            self.ledgers.change_header(handle)
            self.wake(handle)
        batch.calls.append(done)
        return handle

    def _record_new_key(self, handle: LedgerHandle, batch: Batch) -> None:
        """Without its key a record is skipped by replay, so it goes first while no index file has it."""
        if not handle.is_on_disk and not handle.key_recorded:
            self._record_key(handle, batch)

    def write_lac(self, ledger: LedgerId, lac: int, master_key: Buffer, packet: Buffer, done: Done) -> None:
        """Keep an explicit LAC, in a ledger made where it is missing; `done` once it is on disk.

        Raises Unauthorized, LedgerNotFound (fenced and deleted), BadRequest (the packet is not the request's, or the
        master key is not 20 bytes), OSError, Corrupt.
        """
        if len(packet) > LAC_PACKET_SIZE_BYTES_MAX:
            raise BadRequest(f"A LAC packet of {len(packet)} bytes")
        try:
            header = read_lac_header(packet)
        except (TruncatedRecord, Unsupported) as error:
            raise BadRequest(f"Not a LAC packet: {error}") from error
        # A V2 packet may say scope 0, which is nothing that belongs there.
        fits = header.ledger == ledger and (header.format_version == 2) == ledger.is_scoped
        if not fits or header.last_add_confirmed != lac:
            raise BadRequest(f"The body is not LAC {lac} of ledger {ledger} in the format of its scope")
        handle = self._open_to_write(ledger, master_key)
        batch = self.batches[handle.journal]
        if ledger.is_scoped or self.config.journal_format_version_to_write >= journal_formats.VERSION_EXPLICIT_LAC:
            self._record_new_key(handle, batch)
            self._record(batch, ledger, journal_formats.explicit_lac_record(ledger, bytes(packet)))
        self._set_explicit_lac(handle, lac, bytes(packet))
        batch.calls.append(done)

    def _set_explicit_lac(self, handle: LedgerHandle, lac: int, packet: bytes) -> None:
        handle.explicit_lac = packet
        self.ledgers.change_header(handle)
        if lac > handle.lac:
            handle.lac = lac
            self.wake(handle)

    def force(self, ledger: LedgerId, done: Done) -> None:
        """Call `done` when everything added to the ledger so far is on disk."""
        self.batches[ledger.value % len(self.batches)].calls.append(done)

    def when_written(self, ledger: LedgerId, done: Done) -> None:
        """Call `done` when the system has everything added to the ledger so far, synced or not."""
        self.batches[ledger.value % len(self.batches)].written.append(done)

    def wake(self, handle: LedgerHandle) -> None:
        """Call, once, everybody who watches the ledger's LAC."""
        watchers, handle.watchers = handle.watchers, {}
        for watcher in watchers:
            watcher()

    def delete_ledger(self, ledger: LedgerId, *, is_damaged: bool = False) -> None:
        """Forget the ledger: its index goes, its entries stay in the entry logs until those are collected.

        A checkpoint may be under way. The index may be damaged, since it goes; `is_damaged`: the caller knows that it
        is. Raises LedgerNotFound, OSError, NeedsDisk.
        """
        try:
            handle = self.ledgers.blank(ledger) if is_damaged else self.get(ledger)
        except (Corrupt, Unsupported):
            handle = self.ledgers.blank(ledger)
        if handle is None:
            raise LedgerNotFound(f"No ledger {ledger} on this bookie")
        self.ledgers.delete_ledger(handle)
        if self.set_aside.pop(ledger, None) is not None and not self.set_aside:
            self._pins.clear()
        if handle.fenced:
            self._fenced_and_deleted[ledger] = self._clock_ms()
            if len(self._fenced_and_deleted) > FENCED_AND_DELETED_MAX:
                del self._fenced_and_deleted[next(iter(self._fenced_and_deleted))]
        self.wake(handle)

    def _was_fenced(self, ledger: LedgerId) -> bool:
        """Whether the ledger was fenced and is deleted since not too long: its writer may not know either yet."""
        last_ms = self._fenced_and_deleted.pop(ledger, None)
        if last_ms is None or self._clock_ms() - last_ms > FENCED_AND_DELETED_MS:
            return False
        self._fenced_and_deleted[ledger] = self._clock_ms()
        return True

    # --- journals ----------------------------------------------------------------------------------------------------

    def take_batch(self, number: int) -> Batch | None:
        """The batch gathered for journal `number`, for `commit` and then `settle`; None when nothing was."""
        batch = self.batches[number]
        if not batch.tokens and not batch.calls and not batch.size:
            return None  # nobody waits in `written` but for an entry, which is a token
        self.batches[number] = Batch(batch.epoch)
        return batch

    def commit(self, number: int, batch: Batch, *more: Batch, written: Callable[[], object] | None = None) -> None:
        """Write batches of journal `number` as one group, in the order of `take_batch`; then they are on disk.

        `written` is called before they are synced. Raises OSError: the batches fail, and so do all that were taken
        before `settle` is told.
        """
        # Grouped behind a batch that fails, one of a later epoch fails too, and so do those that lean on it.
        last_epoch = max(batch.epoch, *(each.epoch for each in more)) if more else batch.epoch
        if batch.epoch <= self._failed_epochs[number]:
            self._failed_epochs[number] = last_epoch
            raise OSError(f"An earlier group of journal {self.journals[number].directory} failed")
        records, size, scoped = batch.records, batch.size, batch.scoped
        for each in more:
            records += each.records
            size += each.size
            scoped = scoped or each.scoped
        try:
            self.journals[number].commit(records, size, scoped=scoped, written=written)
        except Exception:
            self._failed_epochs[number] = last_epoch
            raise

    def settle(self, number: int, batch: Batch, error: OSError | None) -> Batch | None:
        """Take note of what `commit` came to, and tell the batch's `calls`; its `tokens` are the caller's to tell.

        After a failure what was gathered meanwhile fails too, since its records lean on the lost ones (a ledger key):
        that batch is returned, its calls are told, its tokens are the caller's.
        """
        doomed = None
        if error is not None and batch.epoch == self.batches[number].epoch:
            doomed = self.batches[number]
            self.batches[number] = Batch(batch.epoch + 1)
            for handle in self._handles.values():
                if handle.journal == number:
                    handle.key_recorded = False
                    handle.fence_recorded = False
        for each in (batch,) if doomed is None else (batch, doomed):
            each.tell_written(error)
            for call in each.calls:
                _tell(call, error)
        return doomed

    def flush_journals(self) -> None:
        """Commit and settle what is queued, in the calling thread; for tools and tests without a journal thread."""
        for number in range(len(self.journals)):
            batch = self.take_batch(number)
            if batch is not None:
                error = None
                try:
                    self.commit(number, batch)
                except OSError as failure:
                    error = failure
                self.settle(number, batch, error)
                if error is not None:
                    raise error

    # --- reads -------------------------------------------------------------------------------------------------------

    def has(self, handle: LedgerHandle, entry_id: int) -> bool:
        """Whether the entry is here. Raises OSError, Corrupt."""
        return self.ledgers.has(handle, entry_id)

    def find(self, handle: LedgerHandle, entry_id: int) -> Buffer | None:
        """The entry if that needs no disk, else None: then `read` it. Raises EntryNotFound, OSError, Corrupt."""
        return self.ledgers.find(handle, entry_id)

    def read(self, handle: LedgerHandle, entry_id: int) -> Buffer:
        """The entry; any thread may call it. Raises EntryNotFound, OSError; Corrupt when it does not stand there."""
        return self.ledgers.read(handle, entry_id)

    def read_entry(self, ledger: LedgerId, entry_id: int) -> Buffer:
        """The whole entry; −1 reads the last one. Raises LedgerNotFound, EntryNotFound, OSError, Corrupt."""
        handle = self.get(ledger)
        if handle is None:
            raise self.missing(ledger)
        return self.read(handle, self.last_entry(handle) if entry_id == -1 else entry_id)

    def last_entry(self, handle: LedgerHandle) -> int:
        """The highest entry id here, −1 for none. Raises UnknownLedgerState where a higher one may be lost."""
        if handle.unknown:
            raise UnknownLedgerState(f"Ledger {handle.ledger} is in limbo: its last entry may be lost")
        return handle.last_entry

    def last_add_confirmed(self, handle: LedgerHandle) -> int:
        """The highest LAC that any entry or explicit LAC of the ledger said here, −1 for none.

        Raises as `read_lac` does.
        """
        if not handle.lac_is_known:
            self.learn_lac(handle, self.read_lac(handle))
        return handle.lac

    def read_lac(self, handle: LedgerHandle) -> int:
        """Read the LAC that the ledger's last entry and explicit LAC say, for `learn_lac`; in any thread.

        Raises OSError, Corrupt (the last entry cannot be read) and UnknownLedgerState.
        """
        lac, last_entry = -1, self.last_entry(handle)
        if handle.explicit_lac:
            lac = read_lac_header(handle.explicit_lac).last_add_confirmed
        if last_entry >= 0:
            lac = max(lac, read_entry_header(self.read(handle, last_entry)).last_add_confirmed)
        return lac

    def learn_lac(self, handle: LedgerHandle, lac: int) -> None:
        """Take in what `read_lac` returned; adds meanwhile may have said more."""
        handle.lac, handle.lac_is_known = max(handle.lac, lac), True

    def availability(self, handle: LedgerHandle, is_wanted: IsWanted = always) -> Callable[[], Availability]:
        """A function that lists the ledger's entries here; it reads the index, so call it in any other thread.

        It ends early, with some of them, when it is not wanted any more. Raises UnknownLedgerState where some entries
        may be lost.
        """
        self.last_entry(handle)
        entry_ids = self.ledgers.entry_ids(handle, is_wanted)
        return lambda: Availability.of(entry_ids())

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def unwritten_bytes(self) -> int:
        """Entry bytes in memory that no entry log file has yet."""
        return self.ledgers.unwritten_bytes

    def seal_entries(self, least: int = CHUNK_SIZE_BYTES) -> bool:
        """Prepare what is in memory for `write_entries`, where it is `least` bytes or more; whether it was."""
        return self.ledgers.seal_entries(least)

    def write_entries(self) -> None:
        """Write what was sealed. Raises OSError; nothing is lost then, the next call tries again."""
        self.ledgers.write_entries()

    @property
    def is_checkpoint_due(self) -> bool:
        """Whether a checkpoint should not wait for the flush interval: memory fills up."""
        return self.ledgers.is_flush_due

    def begin_checkpoint(self) -> Checkpoint | None:
        """What a checkpoint of this moment has to write; None when nothing changed. `end_checkpoint` must follow."""
        marks = tuple(self._pins.get(number, journal.mark) for number, journal in enumerate(self.journals))
        flush = self.ledgers.begin_flush()
        if flush is None and marks == self._marks_written:
            return None
        return Checkpoint(marks, flush)

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write everything down, in the order that a crash anywhere in between needs. Raises OSError."""
        if checkpoint.flush is not None:
            self.ledgers.flush(checkpoint.flush)
        for number, mark in enumerate(checkpoint.marks):
            if mark != (self._marks_written[number] if self._marks_written else None):
                self._write_mark(number, mark)
        for journal, mark in zip(self.journals, checkpoint.marks, strict=True):
            journal.forget_before(mark)

    def end_checkpoint(self, checkpoint: Checkpoint, *, written: bool) -> None:
        """Take note that `checkpoint` is done, or failed: then the next one writes everything again."""
        if checkpoint.flush is not None:
            self.ledgers.end_flush(checkpoint.flush, written=written)
        if written:
            self._marks_written = checkpoint.marks

    def run_checkpoint(self) -> None:
        """A whole checkpoint in the calling thread. Raises OSError."""
        checkpoint = self.begin_checkpoint()
        if checkpoint is not None:
            written = False
            try:
                self.checkpoint(checkpoint)
                written = True
            finally:
                self.end_checkpoint(checkpoint, written=written)

    def _write_mark(self, number: int, mark: LogMark) -> None:
        """Write a journal's mark to every ledger directory; a full one may miss it, for the highest counts."""
        name = last_mark_name(number, len(self.journal_directories))
        full: OSError | None = None
        written = 0
        for directory in self.ledger_directories:
            path = directory / name
            try:
                is_new = not path.exists()
                with self.files.open(path, create=True) as file:
                    file.write(0, (mark.serialize(),))
                    if file.size() != LAST_MARK.size:
                        file.truncate(LAST_MARK.size)
                    file.sync()
                if is_new:
                    self.files.sync_directory(directory)
                written += 1
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                full = error
        if full is not None and not written:
            raise full

    # --- replay ------------------------------------------------------------------------------------------------------

    def _replay(self) -> Iterator[LogMark]:
        """Bring everything behind the last marks into ledger storage, in memory or not; gives the marks."""
        keys: dict[LedgerId, bytes] = {}
        for number, directory in enumerate(self.journal_directories):
            mark = read_last_mark(self.ledger_directories, number, len(self.journal_directories))
            journals = [each for each in journal_ids(directory) if each >= mark.journal_id]
            if mark.journal_id > 0 and (not journals or journals[0] != mark.journal_id):
                raise Corrupt(
                    f"Journal {directory / file_name(mark.journal_id)} is missing, which the last mark names",
                    hint="entries that were acknowledged may be in it: find it before the bookie starts",
                )
            for journal_id in journals:
                start = mark.offset if journal_id == mark.journal_id else 0
                self._replay_file(directory / file_name(journal_id), start, keys)
                if self.set_aside and number not in self._pins:
                    self._pins[number] = mark
            yield mark
        for ledger, error in islice(self.set_aside.items(), SET_ASIDE_NAMED_MAX):
            log.error(
                "Ledger %s is set aside: it has records to replay, and its own state cannot be read (%s). Its requests "
                "fail, other ledgers are served, and the journals with its records stay until it is mended or deleted: "
                "stop the bookie, mend the index ('bkctl bookie index'), and start it again", ledger, error,
            )  # fmt: skip
        if len(self.set_aside) > SET_ASIDE_NAMED_MAX:
            log.error("%d more ledgers are set aside", len(self.set_aside) - SET_ASIDE_NAMED_MAX)

    def _replay_file(self, path: Path, start: int, keys: dict[LedgerId, bytes]) -> None:
        with JournalReader.open(path) as reader:
            try:
                for record in reader.records(start):
                    self._replay_record(reader, record, keys)
                    if self.no_space is None:
                        if self.seal_entries():
                            self._has_space_for(self.write_entries)
                        if self.is_checkpoint_due:
                            self._has_space_for(self._flush_replayed)
                    elif self.unwritten_bytes > self.ledgers.unwritten_bytes_max:
                        self._make_room()
            except CorruptRecord as error:
                if not self.config.skip_replay_journal_invalid_record:
                    raise Corrupt(
                        f"{error.message}. Entries that were acknowledged may follow in this journal",
                        hint=f"{error.hint or _DAMAGE_HINT}. {_SKIP_HINT}",
                    ) from error
                log.warning("%s: skipReplayJournalInvalidRecord drops what follows in this journal", error.message)
            else:
                self._log_incomplete_group(reader)

    def _make_room(self) -> None:
        """Memory is full of what a full disk refused: try once more. Raises BkctlError."""
        full = self.no_space
        self.no_space = None
        if full is not None and not self._has_space_for(self._flush_replayed):
            raise BkctlError(
                f"The journals hold more than {self.ledgers.unwritten_bytes_max >> 20} MiB that ledger storage has no "
                f"space for ({full.filename or full})",
                hint="make space on the disks of the ledger and index directories; nothing is lost until then",
            )

    def _flush_replayed(self) -> None:
        flush = self.ledgers.begin_flush()
        if flush is not None:
            written = False
            try:
                self.ledgers.flush(flush)
                written = True
            finally:
                self.ledgers.end_flush(flush, written=written)

    def _log_incomplete_group(self, reader: JournalReader) -> None:
        """Log which bytes of a journal were not replayed because their group was never synced."""
        if reader.end is JournalEnd.TORN:
            log.warning(
                "%s: dropped what follows byte %d, up to byte %d: a crash left the last group of records incomplete, "
                "and nothing in it was acknowledged", reader.name, reader.position, reader.size(),
            )  # fmt: skip

    def _is_unsynced(self, reader: JournalReader, record: Record, problem: str) -> bool:
        """Return whether a crash explains `problem` of a record: it is in the last group. Logs that it is dropped."""
        if not reader.is_in_last_group(record.offset):
            return False
        log.warning(
            "%s: dropped the record at byte %d: %s, in the last group of records, which a crash left incomplete",
            reader.name, record.offset, problem,
        )  # fmt: skip
        return True

    def _replay_record(self, reader: JournalReader, record: Record, keys: dict[LedgerId, bytes]) -> None:
        self._replays = True
        ledger = record.ledger
        if record.format_version == 2 and not ledger.is_scoped:
            problem = "Scope 0 in a record of format version 2"
            if not self._is_unsynced(reader, record, problem):
                raise CorruptRecord(problem, offset=record.offset, where=reader.name)
            return
        if record.type is RecordType.LEDGER_KEY:
            master_key = record.special_payload
            if self._is_torn_key(reader, record, master_key):
                problem = "A part of the master key is in a sector of zeros"
                if self._is_unsynced(reader, record, problem):
                    return
                if len(master_key) < _ZERO_KEY_SIZE_MIN:
                    raise CorruptRecord(problem, offset=record.offset, where=reader.name)
            if len(master_key) == MASTER_KEY_SIZE:
                keys[ledger] = master_key
            elif ledger not in keys:
                keys[ledger] = b""
                log.warning(
                    "Ledger %s has a master key of %d bytes in %s, which no client makes: it keeps its entries without "
                    "a key", ledger, len(master_key), reader.name,
                )  # fmt: skip
            return
        if record.type not in _REPLAYED or ledger in self.set_aside:
            return
        problem = "The header of the entry is zeros"
        has_zero_header = _is_torn(record)
        if has_zero_header and self._is_unsynced(reader, record, problem):
            return
        try:
            is_known = self._apply_record(record, keys)
        except BkctlError as error:
            # Damage of one ledger's index must not pass for damage of the journal.
            self.set_aside[ledger] = error
            return
        if has_zero_header and not is_known:
            raise CorruptRecord(problem, offset=record.offset, where=reader.name)

    def _apply_record(self, record: Record, keys: dict[LedgerId, bytes]) -> bool:
        """Bring a record into memory. Return False, and count it, if no ledger of that id is here.

        Raises OSError; BkctlError where the ledger's own state cannot be read.
        """
        ledger = record.ledger
        handle = self._look_up(ledger)
        if ledger not in self._handles:
            key = keys.get(ledger)
            if key is None or (not ledger.is_scoped and ledger.ledger_id > I64_MAX):
                self.replayed = (self.replayed[0], self.replayed[1] + 1)
                return False
            self._create(handle, key)
        if record.type is RecordType.FENCE:
            handle.fenced = handle.fence_recorded = True
            self.ledgers.change_header(handle)
        elif record.type is RecordType.EXPLICIT_LAC:
            self._replay_lac(handle, record.special_payload)
        else:
            self._replay_entry(handle, record)
        return True

    def _is_torn_key(self, reader: JournalReader, record: Record, master_key: bytes) -> bool:
        """Whether a crash cut the key, together with what it was written for: part of it is in a sector of zeros.

        A key of many zeros alone proves that only where groups share sectors: clients may choose such keys.
        """
        if master_key.count(0) < _TORN_KEY_ZEROS:
            return False
        if reader.version < journal_formats.VERSION_PADDING or self.config.journal_alignment_size % SECTOR_SIZE_BYTES:
            return True
        end = record.offset + RECORD_SIZE.size + record.record_size
        start = end - len(master_key)
        sectors = range(start - start % SECTOR_SIZE_BYTES, end, SECTOR_SIZE_BYTES)
        return any(not any(reader.read(sector, SECTOR_SIZE_BYTES)) for sector in sectors)

    def _replay_lac(self, handle: LedgerHandle, packet: bytes) -> None:
        try:
            header = read_lac_header(packet)
        except (TruncatedRecord, Unsupported):
            return
        old = handle.explicit_lac
        is_torn = bool(old) and _has_digest(old, header.size) and not _has_digest(packet, header.size)
        if header.ledger != handle.ledger or is_torn:
            return
        self._set_explicit_lac(handle, header.last_add_confirmed, packet)

    def _replay_entry(self, handle: LedgerHandle, record: Record) -> None:
        body, entry_id = record.body, record.entry_id
        if record.length is None or entry_id > self._entry_id_max:
            return
        if self.ledgers.has(handle, entry_id):
            try:
                old = bytes(self.read(handle, entry_id))
            except (OSError, Corrupt, Unsupported):
                old = b""
            # An equal one is put again: after a sync that failed it may be in the system's memory alone, as if synced.
            if old and old != body and _is_better(old, body):
                return
        record_as_added = record_of(body)
        self.ledgers.add(handle, [entry_id], [record_as_added], len(record_as_added))
        if record.last_add_confirmed is not None:
            handle.lac = max(handle.lac, record.last_add_confirmed)
        self.replayed = (self.replayed[0] + 1, self.replayed[1])


#: A master key is a SHA-1 digest with most clients: with this many zeros it may have been cut by a crash.
_TORN_KEY_ZEROS: Final = 8
#: A key from this size on can be zeros over a whole sector. Shorter ones share each sector with fields that are not 0.
_ZERO_KEY_SIZE_MIN: Final = SECTOR_SIZE_BYTES - 2 * RECORD_SIZE.size
_REPLAYED: Final = frozenset({RecordType.ENTRY, RecordType.FENCE, RecordType.EXPLICIT_LAC})


def _is_torn(record: Record) -> bool:
    """Whether an entry record is the zeros of a group that a crash cut: no length, and yet a payload."""
    body = record.body
    return record.format_version == 1 and len(body) > ENTRY_V1.size + 20 and not any(body[: ENTRY_V1.size])


def _is_better(old: bytes, new: bytes) -> bool:
    """Whether of two copies of one entry the stored one is to be kept: the journal's was cut by a crash.

    Copies differ in LAC and digest only (recovery writes an entry again), so a damaged one shows by its digest; where
    the digest cannot tell, by having more zeros, which is what sectors that never reached the disk read as.
    """
    if old == new:
        return True
    size = read_entry_header(new).size
    if _has_digest(new, size):
        return False
    return _has_digest(old, size) or len(old) != len(new) or old.count(0) < new.count(0)


def _has_digest(data: bytes, size: int) -> bool:
    """Whether the CRC32 or CRC32C of the `size` bytes of header and the payload follows the header.

    Those are the digests that need no password. True for an entry and for a LAC packet alike.
    """
    if data[size : size + 4] == _crc32c(data[:size] + data[size + 4 :]).to_bytes(4, "big"):
        return True
    return data[size : size + 8] == zlib.crc32(data[size + 8 :], zlib.crc32(data[:size])).to_bytes(8, "big")
