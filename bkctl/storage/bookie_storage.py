"""BookieStorage: one bookie's ledgers on disk. The journals and the storage behind them, tied by checkpoints.

    add, fence, …     change what is in memory and queue journal records in batches (the bookie's event loop)
    commits           write a journal's batches, which are on disk then (that journal's thread)
    write_entries     writes what the entry logs hold in memory, unsynced (the entry log thread)
    checkpoints       entry logs synced → indexes synced → last marks → old journals deleted (the checkpoint thread)

Its parts: OpenLedgers (the handles in memory), `commits` (the batches of each journal), `checkpoints`, and at start
JournalReplay. `ledgers` is the storage behind the journals, of the class that the configuration names.
Source: BookieImpl, LedgerDescriptorImpl, SyncThread; BP-35.
"""

from __future__ import annotations

import errno
import functools
import random
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bkctl.config import BookieConfig
from bkctl.disk import NO_SPACE, Files
from bkctl.errors import (
    BadRequest,
    BkctlError,
    BookieIOError,
    Corrupt,
    LedgerFenced,
    LedgerNotFound,
    TruncatedRecord,
    UnknownLedgerState,
    Unsupported,
    UsageError,
    on_error,
)
from bkctl.formats import journal as journal_formats
from bkctl.formats.availability import serialize
from bkctl.formats.entry import ENTRY_FLAGS_V2, lac_of, read_lac_header
from bkctl.formats.journal import LAST_MARK, LogMark, last_mark_name
from bkctl.formats.layout import Buffer
from bkctl.formats.names import CONVERSION_NAME, CURRENT
from bkctl.formats.record import record_of
from bkctl.ids import I64_MAX, LedgerId
from bkctl.storage.journal_writer import Done, JournalBatch, JournalCommits, JournalWriter
from bkctl.storage.ledger.ledger_handle import IsWanted, LedgerHandle, always
from bkctl.storage.ledger.ledger_storage import LedgerStorage, run_whole
from bkctl.storage.open_ledgers import OpenLedgers
from bkctl.storage.replay import JournalReplay, want_of_space


def open_ledger_storage(
    config: BookieConfig, files: Files, *, chance: random.Random | None = None
) -> LedgerStorage[Any]:
    """Return the storage, not yet open, that `ledgerStorageClass` names, in the directories of `config`.

    `chance` picks directories. Raises Unsupported for an unknown class.
    """
    if config.ledger_storage == "db":
        from bkctl.storage.ledger.db_ledger_storage import DbLedgerStorage

        return DbLedgerStorage(config, files)
    from bkctl.storage.ledger.sorted_ledger_storage import SortedLedgerStorage

    return SortedLedgerStorage(config, files, chance=chance)


def check_index(config: BookieConfig) -> None:
    """Refuse an index of another storage class than the configured one.

    With it a bookie would find no ledger, and garbage collection would delete every entry log. Raises UsageError;
    Conflict where a conversion stopped in its last step; Corrupt.
    """
    from bkctl.files.directories import BookieDirectories

    directories = [Path(directory) / CURRENT for directory in config.index_or_ledger_directories]
    if (directories[0] / CONVERSION_NAME).exists():
        from bkctl.files.conversion import check_conversion

        check_conversion(directories[0])
    found: Path | None = None
    if config.ledger_storage == "db":
        # A database in one directory says nothing of the index files in another.
        files = ((each, next(BookieDirectories(index_dirs=[each]).indexes(), None)) for each in directories)
        found = next((file.path for each, file in files if file is not None and database_in_use([each]) is None), None)
    else:
        found = database_in_use(directories)
    if found is not None:
        to = "db" if config.ledger_storage == "db" else "interleaved"
        raise UsageError(
            f"{found} belongs to another storage class than {config.ledger_storage_class.rpartition('.')[2]}",
            hint=f"set ledgerStorageClass to the earlier value, or convert the index: 'bkctl bookie convert --to {to}'",
        )


def database_in_use(directories: Iterable[Path]) -> Path | None:
    """Return the path of a database that has ledgers in one `current/` of an index, None for none. Raises Corrupt."""
    for path in (directory / name for directory in directories for name in ("ledgers", "scoped-ledgers")):
        if (path / "CURRENT").exists():
            from bkctl.files.rocksdb import LedgersDatabase

            with LedgersDatabase.open(path) as database:
                if next(database.ledger_ids(), None) is not None:
                    return path
    return None


@dataclass(slots=True)
class Checkpoint:
    """The work of one checkpoint: the storage's changes, and the place in each journal that they reach."""

    marks: tuple[LogMark, ...]
    #: None when nothing but journals changed.
    flush: object | None


@dataclass(eq=False)
class Checkpointer:
    """Runs the checkpoints of one bookie.

    `marks_written` are in the `lastMark` files at present. A journal in `_pins` keeps its mark there, for records that
    the last start could not replay; so does a journal with records of a ledger that the last flush could not write.
    `_evict` lets handles leave memory once the disk has their changes. `_journals` has `_journal_count` journals once
    the storage is open.
    """

    _storage: LedgerStorage[Any]
    _evict: Callable[[], None]
    _journals: Sequence[JournalWriter]
    _journal_count: int
    _pins: Mapping[int, LogMark]
    marks_written: tuple[LogMark, ...] = ()

    @property
    def held(self) -> set[int]:
        """Return the numbers of the journals that keep their mark."""
        count = len(self._journals)
        return {*self._pins, *(ledger.value % count for ledger in self._storage.unwritten)}

    def begin(self) -> Checkpoint | None:
        """Return the work of a checkpoint of this moment; None when nothing changed. `end` must follow."""
        marks = tuple(self._pins.get(number, journal.mark) for number, journal in enumerate(self._journals))
        flush = self._storage.begin_flush()
        if flush is None and marks == self.marks_written:
            return None
        return Checkpoint(marks, flush)

    def write(self, checkpoint: Checkpoint) -> None:
        """Write `checkpoint` in the order that a crash at any moment needs. Raises OSError."""
        if checkpoint.flush is not None:
            self._storage.flush(checkpoint.flush)
        held = self.held
        checkpoint.marks = tuple(
            written if number in held else mark
            for number, (mark, written) in enumerate(zip(checkpoint.marks, self.marks_written, strict=True))
        )
        for number, (mark, written) in enumerate(zip(checkpoint.marks, self.marks_written, strict=True)):
            if mark != written:
                self.write_mark(number, mark)
        for journal, mark in zip(self._journals, checkpoint.marks, strict=True):
            journal.forget_before(mark)

    def write_mark(self, number: int, mark: LogMark) -> None:
        """Write the last mark of journal `number` to every ledger directory. Raises OSError.

        A full directory may miss it, for the highest mark counts; at least one must have it.
        """
        files, directories = self._storage.files, self._storage.ledger_directories
        full: list[OSError] = []
        for directory in directories:
            path = directory / last_mark_name(number, self._journal_count)
            is_new = not path.exists()
            try:
                with files.open(path, create=True) as file:
                    file.write(0, (mark.serialize(),))
                    if file.size() != LAST_MARK.size:
                        file.truncate(LAST_MARK.size)
                    file.sync()
                if is_new:
                    files.sync_directory(directory)
            except OSError as error:
                full.append(error)
                if error.errno not in NO_SPACE or len(full) == len(directories):
                    raise

    def end(self, checkpoint: Checkpoint, *, written: bool) -> None:
        """Record that `checkpoint` is on disk, or failed: then the next one writes everything again."""
        if checkpoint.flush is not None:
            self._storage.end_flush(checkpoint.flush, written=written)
        if written:
            self.marks_written = checkpoint.marks
            self._evict()


LAC_PACKET_SIZE_BYTES_MAX: Final = 256

# The fields before an entry's length.
_unpack_v1 = struct.Struct(">Qqq").unpack_from
_unpack_v2 = struct.Struct(">BQQqq").unpack_from


class BookieStorage:
    """The ledgers of one bookie in the directories of `config`; see the module for which thread calls what.

    `clock_ms` is wall time: it gives new journals their ids. `chance` picks directories and journals' tags.
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
        self.journal_directories = [Path(directory) / CURRENT for directory in config.journal_directories]
        self._clock_ms = clock_ms
        self._chance = chance
        self.ledgers = open_ledger_storage(config, self.files, chance=chance)
        self.ledger_directories = self.ledgers.ledger_directories
        self.index_directories = self.ledgers.index_directories
        # StoredEntryReader and LedgerStorage describe these.
        reader = self.ledgers.reader
        self.find, self.find_all, self.read, self.read_all = reader.find, reader.find_all, reader.read, reader.read_all
        self.seal_entries, self.write_entries = self.ledgers.seal_entries, self.ledgers.write_entries
        self._handles, self._keep_entries = self.ledgers.handles, self.ledgers.table.add
        self._entry_id_max = self.ledgers.entry_id_max
        self._journals_entries = config.journal_write_data
        self.journals: list[JournalWriter] = []
        self._open_ledgers = OpenLedgers(self.ledgers, self.journals, len(self.journal_directories))
        self.supplied = self._open_ledgers.supplied
        #: (entries, records skipped for want of a ledger key) of the replay at start.
        self.replayed = (0, 0)
        #: Ledgers whose state `open` could not read, so that it could not replay their records, and why.
        self.set_aside = self._open_ledgers.set_aside
        #: By journal number: the place before the first record of a set-aside ledger. The mark stays there.
        self._pins: dict[int, journal_formats.LogMark] = {}
        self.checkpoints = Checkpointer(
            self.ledgers, self._open_ledgers.evict, self.journals, len(self.journal_directories), self._pins
        )
        self.commits = [
            JournalCommits(self.journals, number, self._handles) for number in range(len(self.journal_directories))
        ]
        #: The full disk's error that left replayed entries in memory in `open`, perhaps a journal without a file.
        self.no_space: OSError | None = None

    # --- start and stop ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the directories, created where missing: replay the journals, and begin a new file in each.

        Where a disk has no space for that, replayed entries stay in memory as far as its limit allows, the journals
        stay as they are, and `no_space` has the reason: a later checkpoint writes them. A ledger whose own state cannot
        be read is `set_aside`: its requests fail, other ledgers are served, and the journals from its first record on
        stay until it is mended or deleted.

        Raises OSError; Corrupt when a journal or mark contradicts itself; Unsupported for a later version; UsageError
        for an index of another storage class, Conflict for one that is being converted; BkctlError where the disks
        have no space for more than memory holds. Nothing is open then. Source: SyncThread.flush for full disks.
        """
        directories = (*self.journal_directories, *self.ledger_directories, *self.index_directories)
        for directory in dict.fromkeys(directories):
            self.files.make_directory(directory)
        check_index(self.config)
        self.ledgers.open()
        with on_error(self.ledgers.close, OSError, BkctlError):  # the failure on its way tells more
            self.checkpoints.marks_written = self._replay()
            self._open_journals()
            self._checkpoint_replayed()

    def _replay(self) -> tuple[journal_formats.LogMark, ...]:
        self._open_ledgers.has_scoped = self.ledgers.has_scoped_ledgers()
        replay = JournalReplay(self.config, self.ledgers, self._open_ledgers)
        marks = replay.run(self.journal_directories)
        self.replayed = (replay.entry_count, replay.skipped_count)
        self._pins.update(replay.pins)
        self.no_space = replay.no_space
        if replay.has_records:
            # Bytes of a killed process may be in the page cache alone. Replay saw it and builds on it, and the
            # marks are about to pass it.
            for directory in dict.fromkeys((*self.ledger_directories, *self.index_directories)):
                self.files.sync_file_system(directory)
        return marks

    def _open_journals(self) -> None:
        scoped = self._open_ledgers.has_scoped
        for directory in self.journal_directories:
            journal = JournalWriter(
                directory, self.files, self.config, clock_ms=self._clock_ms, scoped=scoped, chance=self._chance
            )
            journal.open()
            self.journals.append(journal)

    def _checkpoint_replayed(self) -> None:
        """Run the first checkpoint, unless the disks have no space for it: `no_space` has the reason then."""
        self.no_space = want_of_space(self.run_checkpoint)
        if self.no_space is not None:
            return
        for journal in self.journals:
            if not journal.is_open:  # old files may have made room
                journal.open()
            if not journal.is_open:
                self.no_space = OSError(errno.ENOSPC, "No space for a journal file", str(journal.directory))

    def close(self) -> None:
        """Stop cleanly: write everything into ledger storage, and make the directories fit for Apache's bookie.

        A journal with records of a ledger that is `set_aside`, or whose index the disk refuses, stays unchanged for our
        next start. Every batch must have been committed. Raises OSError: then the next start replays. Source: BP-35's
        downgrade.
        """
        self.run_checkpoint()
        held = self.checkpoints.held
        for number, journal in enumerate(self.journals):
            if number not in held:
                journal.make_downgradable(functools.partial(self.checkpoints.write_mark, number))
            journal.close()
        self.ledgers.close()

    # --- changes -----------------------------------------------------------------------------------------------------

    def add(
        self,
        ledger: LedgerId,
        entry_id: int,
        master_key: Buffer,
        body: Buffer,
        done: Done | None,
        recovery: bool = False,
    ) -> None:
        """Add one entry, queue it for its journal, and call `done` once it is on disk.

        As in Apache's bookie it may end behind its LAC.

        Raises Unauthorized (another master key), LedgerFenced (unless `recovery`; always if it is deleted too),
        BadRequest (ids or format of `body` are not the request's, or the master key is not 20 bytes),
        UnknownLedgerState (a fence may be lost; unless `recovery`), OSError, BookieIOError or Corrupt (the ledger's
        index).
        """
        try:
            if ledger[0]:
                flags, scope_id, ledger_id, found_id, lac = _unpack_v2(body)
                fits = flags in ENTRY_FLAGS_V2 and scope_id == ledger[0] and ledger_id == ledger[1]
            else:
                ledger_id, found_id, lac = _unpack_v1(body)
                fits = ledger_id == ledger[1] and ledger_id <= I64_MAX
        except struct.error:
            fits = False
        if not fits or found_id != entry_id or not 0 <= entry_id <= self._entry_id_max:
            raise BadRequest(f"The body is not entry {entry_id} of ledger {ledger} in the format of its scope")
        record = record_of(body)
        self.add_records(ledger, master_key, [entry_id], [record], len(record), lac, done, recovery)

    def add_records(
        self,
        ledger: LedgerId,
        master_key: Buffer,
        entry_ids: Sequence[int],
        records: Sequence[bytes],
        size: int,
        last_add_confirmed: int,
        done: Done | None,
        recovery: bool = False,
    ) -> None:
        """Add entries, `size` bytes in `records`, one an entry; queue them, and call `done` once they are on disk.

        `done` is called once for entries of several ledgers that share a journal, added one after the other. The
        caller has checked the bodies: they are these entries (0 … ENTRY_ID_MAX) of this ledger in the format of its
        scope, and `last_add_confirmed` is their highest LAC. Raises what `add` raises for each of them.
        """
        handle = self._handles.get(ledger)
        if handle is None or handle.master_key != master_key:
            try:
                handle = self._open_ledgers.open_to_write(ledger, master_key)
            except LedgerNotFound as error:
                raise LedgerFenced(error.message) from error
        if handle.index_error is not None:
            raise BookieIOError(f"The disk refuses the index of ledger {ledger}: {handle.index_error}")
        if (handle.fenced or handle.unknown) and not recovery:
            if handle.fenced:
                raise LedgerFenced(f"Ledger {ledger} is fenced")
            raise UnknownLedgerState(f"Ledger {ledger} awaits a data integrity check: it may have been fenced")
        self._keep_entries(handle, entry_ids, records, size)
        if last_add_confirmed > handle.lac:
            handle.lac = last_add_confirmed
            if handle.watchers:
                handle.wake()
        batch = self.commits[handle.journal].batch
        if not handle.key_recorded:
            self._record_key(handle, batch)
        if self._journals_entries:
            batch.records += records
            batch.size += size
            if ledger[0]:
                batch.scoped = True
        batch.count += len(records)
        # Last: a caller in the batch gets the batch's outcome, so nothing may raise behind this.
        if done is not None and (not batch.calls or batch.calls[-1] is not done):
            batch.calls.append(done)

    def get(self, ledger: LedgerId) -> LedgerHandle | None:
        """Return the ledger's handle, None when it is not here. Raises OSError, Corrupt, Unsupported, NeedsDisk."""
        handle = self._handles.get(ledger)
        if handle is None:
            self._open_ledgers.look_up(ledger)
            handle = self._handles.get(ledger)
        return handle

    def missing(self, ledger: LedgerId) -> BkctlError:
        """Return the error for a ledger that is not here: LedgerNotFound, or UnknownLedgerState if it may be lost."""
        if self.ledgers.needs_integrity_check:
            return UnknownLedgerState(f"No ledger {ledger} on this bookie, which may have lost it")
        return LedgerNotFound(f"No ledger {ledger} on this bookie")

    def _record_key(self, handle: LedgerHandle, batch: JournalBatch) -> None:
        batch.append(handle.ledger, journal_formats.ledger_key_record(handle.ledger, handle.master_key))
        handle.key_recorded = True

    def fence(self, ledger: LedgerId, master_key: Buffer, done: Done) -> LedgerHandle:
        """Refuse all but recovery adds from now on, and call `done` once that is on disk; create a missing ledger.

        Raises Unauthorized, BadRequest (the master key is not 20 bytes), LedgerNotFound (fenced and deleted), OSError,
        Corrupt. Source: BookieImpl.fenceLedger.
        """
        handle = self._open_ledgers.open_to_write(ledger, master_key)
        batch = self.commits[handle.journal].batch
        if not handle.fence_recorded:
            self._record_new_key(handle, batch)
            batch.append(ledger, journal_formats.fence_record(ledger))
            handle.fence_recorded = True
        if not handle.fenced:
            handle.fenced = True
            self.ledgers.change_header(handle)
            handle.wake()
        batch.calls.append(done)
        return handle

    def _record_new_key(self, handle: LedgerHandle, batch: JournalBatch) -> None:
        """Record the key first while no index file has it: replay skips the records of a ledger without a key."""
        if not handle.is_on_disk and not handle.key_recorded:
            self._record_key(handle, batch)

    def write_lac(self, ledger: LedgerId, master_key: Buffer, packet: Buffer, done: Done) -> None:
        """Keep the explicit LAC in `packet`, and call `done` once it is on disk; create a missing ledger.

        Raises Unauthorized, LedgerNotFound (fenced and deleted), BadRequest (the packet is not the ledger's, or the
        master key is not 20 bytes), OSError, Corrupt.
        """
        if len(packet) > LAC_PACKET_SIZE_BYTES_MAX:
            raise BadRequest(f"A LAC packet of {len(packet)} bytes")
        try:
            header = read_lac_header(packet)
        except (TruncatedRecord, Unsupported) as error:
            raise BadRequest(f"Not a LAC packet: {error}") from error
        # A V2 packet of scope 0 is refused: its ledgers have V1 packets.
        if header.ledger != ledger or (header.format_version == 2) != ledger.is_scoped:
            raise BadRequest(f"The body is not a LAC of ledger {ledger} in the format of its scope")
        handle = self._open_ledgers.open_to_write(ledger, master_key)
        batch = self.commits[handle.journal].batch
        if ledger.is_scoped or self.config.journal_format_version_to_write >= journal_formats.VERSION_EXPLICIT_LAC:
            self._record_new_key(handle, batch)
            batch.append(ledger, journal_formats.explicit_lac_record(ledger, bytes(packet)))
        self._open_ledgers.set_explicit_lac(handle, header.last_add_confirmed, bytes(packet))
        batch.calls.append(done)

    def force(self, ledger: LedgerId, done: Done) -> None:
        """Call `done` when everything added to the ledger so far is on disk."""
        self.commits[ledger.value % len(self.commits)].batch.calls.append(done)

    def when_written(self, ledger: LedgerId, done: Done) -> None:
        """Call `done` when the system has everything added to the ledger so far, synced or not."""
        self.commits[ledger.value % len(self.commits)].batch.written.append(done)

    def delete_ledger(self, ledger: LedgerId, *, is_damaged: bool = False) -> None:
        """Delete the ledger: its index is removed, its entries stay in the entry logs until garbage collection.

        A checkpoint may be running. The index may be damaged, since it is removed; `is_damaged`: the caller knows that
        it is. Raises LedgerNotFound, OSError, NeedsDisk.
        """
        try:
            handle = self.ledgers.blank(ledger) if is_damaged else self.get(ledger)
        except (Corrupt, Unsupported):
            handle = self.ledgers.blank(ledger)
        if handle is None:
            raise LedgerNotFound(f"No ledger {ledger} on this bookie")
        self._open_ledgers.delete(handle)
        if self.set_aside.pop(ledger, None) is not None and not self.set_aside:
            self._pins.clear()

    # --- reads -------------------------------------------------------------------------------------------------------

    def read_entry(self, ledger: LedgerId, entry_id: int) -> Buffer:
        """Return the whole entry; −1 reads the last one. Raises LedgerNotFound, EntryNotFound, OSError, Corrupt."""
        handle = self.get(ledger)
        if handle is None:
            raise self.missing(ledger)
        return self.read(handle, self.last_entry(handle) if entry_id == -1 else entry_id)

    def last_entry(self, handle: LedgerHandle) -> int:
        """Return the highest entry id here, −1 for none. Raises UnknownLedgerState where a higher one may be lost."""
        if handle.unknown:
            raise UnknownLedgerState(
                f"Ledger {handle.ledger} awaits a data integrity check: its last entry may be lost"
            )
        return handle.last_entry

    def read_lac(self, handle: LedgerHandle) -> int:
        """Return the LAC of the ledger's last entry and explicit LAC, for `learn_lac`; for any thread.

        Raises OSError, Corrupt (the last entry cannot be read) and UnknownLedgerState.
        """
        lac, last_entry = -1, self.last_entry(handle)
        if handle.explicit_lac:
            lac = read_lac_header(handle.explicit_lac).last_add_confirmed
        if last_entry >= 0:
            lac = max(lac, lac_of(self.read(handle, last_entry)))
        return lac

    def learn_lac(self, handle: LedgerHandle, lac: int) -> None:
        """Raise the handle's LAC to `lac` from `read_lac`, unless adds have raised it further meanwhile."""
        handle.lac, handle.lac_is_known = max(handle.lac, lac), True

    def availability(self, handle: LedgerHandle, is_wanted: IsWanted = always) -> Callable[[], bytes]:
        """Return a function that serializes the list of the ledger's entries here; call it in another thread.

        The function returns early, with part of the list, once `is_wanted` says False. Copies what memory has of the
        ids. Raises UnknownLedgerState where entries may be lost, and what `missing` returns for a deleted ledger.
        """
        if handle.deleted:
            raise self.missing(handle.ledger)
        self.last_entry(handle)
        entry_ids = self.ledgers.reader.entry_ids(handle, is_wanted)
        return lambda: serialize(entry_ids(), _rest)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def run_checkpoint(self) -> None:
        """Run a whole checkpoint in the calling thread. Raises OSError."""
        run_whole(self.checkpoints.begin, self.checkpoints.write, self.checkpoints.end)


def _rest() -> None:
    """Leave the interpreter to other threads for about as long as a slice of a list takes."""
    time.sleep(0.001)
