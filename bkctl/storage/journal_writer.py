"""Journals: the files of one journal directory, and the batches of records that are written to them in groups.

    open()    create a new file at each start, never append to an old one
    commit()  one group: roll if needed, write, pad to the alignment, sync; a group counts once it is on disk
    mark      the end of the last group that is on disk

Source: Journal, JournalChannel; BP-35 for version 7.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from bkctl.config import MEBIBYTE, BookieConfig
from bkctl.disk import NO_SPACE, Files, StorageFile, names_in
from bkctl.errors import BookieIOError, Corrupt, on_error
from bkctl.formats import journal as formats
from bkctl.formats.journal import LogMark
from bkctl.formats.names import SCOPED_DIRECTORY
from bkctl.ids import I64_MAX, LedgerId
from bkctl.storage.ledger.ledger_handle import LedgerHandle


class JournalWriter:
    """Writes one journal directory (its `current`). Everything but `mark` belongs to one thread at a time.

    `scoped`: every file is of version 7, because the bookie has scoped ledgers. `allocation_size`: bytes to reserve at
    once, 0 for none.
    `failed` is set by any failure but a lack of space: the writer refuses all further groups, and the bookie has to
    stop; the next start replays the journal. `clock_ms` is wall time, for the ids of new files; `now_s` measures
    intervals; `chance` makes the files' tags.
    """

    def __init__(
        self,
        directory: Path,
        files: Files,
        config: BookieConfig,
        *,
        clock_ms: Callable[[], int],
        now_s: Callable[[], float] = time.monotonic,
        scoped: bool = False,
        chance: random.Random | None = None,
    ) -> None:
        self.directory, self._files, self._config = directory, files, config
        self._clock_ms, self._now_s, self._chance = clock_ms, now_s, chance or random.SystemRandom()
        self._size_max = config.journal_max_size_mb * MEBIBYTE
        self.allocation_size = config.journal_pre_alloc_size_mb * MEBIBYTE
        self._version = self._plain_version = config.journal_format_version_to_write
        self._scoped = scoped
        self._sync_data = config.journal_sync_data
        self._synced_s = -math.inf
        self._file: StorageFile | None = None
        self._tag = b""
        self._journal_id = self._position = self._allocated = 0
        self.mark = LogMark(0, 0)
        self.failed: Exception | None = None

    def open(self) -> None:
        """Begin a new journal file, durably. Raises OSError.

        On a full disk, `commit` creates the file later. Until then `mark` is the end of the newest file: all of it was
        replayed, and it stays. Raises Corrupt where a file's name leaves no ids for later files.
        """
        ids = journal_ids(self.directory)
        newest = max([*ids, *journal_ids(self.directory / SCOPED_DIRECTORY), self._journal_id])
        if newest > I64_MAX // 2:  # Ids are times in milliseconds, and count up.
            raise Corrupt(
                f"Journal {formats.file_name(newest)} in {self.directory} leaves no ids for later journals",
                hint="no bookie names a file so: move the file out of the directory, and start the bookie again",
            )
        self._journal_id = newest or self._clock_ms()
        try:
            self._open_next()
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            if ids:
                with self._files.open(self.directory / formats.file_name(ids[-1])) as file:
                    # A killed bookie may have left it unsynced, and no power failure may take what a mark names.
                    file.sync()
                    self._files.sync_directory(self.directory)
                    self.mark = LogMark(ids[-1], file.size() if any(file.read(0, formats.HEADER.size)) else 0)

    @property
    def is_open(self) -> bool:
        """Return whether there is a file to write to; False while its disk is too full for one."""
        return self._file is not None

    def expect_scoped(self) -> None:
        """Create every new file as version 7 from now on: the bookie has scoped ledgers. For any thread."""
        self._scoped = True

    def _open_next(self) -> None:
        if self._file is not None and not self._sync_data:
            self._sync(self._file)
        journal_id = self._journal_id + 1
        version = formats.VERSION_SCOPED if self._scoped else self._plain_version
        # Version 6 and earlier stay Apache's, byte for byte.
        tag = self._chance.randbytes(formats.TAG_SIZE) if version == formats.VERSION_SCOPED else b""
        header = formats.write_header(version, tag)
        path = self.directory / formats.file_name(journal_id)
        file = self._files.open(path, create=True)
        # Else every try on a full disk would leave one file more.
        with on_error(partial(self._files.remove, path), OSError), on_error(file.close):
            file.truncate(0)
            file.write(0, (header,))
            file.sync()
            self._files.sync_directory(self.directory)
        if self._file is not None:
            self._file.close()
        self._file = file
        self._version, self._tag = version, tag
        self._journal_id = journal_id
        self._position = self._allocated = len(header)
        self.mark = LogMark(journal_id, self._position)

    def commit(
        self,
        records: list[bytes],
        size: int,
        *,
        scoped: bool = False,
        written: Callable[[], object] | None = None,
    ) -> None:
        """Append one group of whole records, `size` bytes; return once it is on disk.

        `scoped`: the group has records of scoped ledgers. `records` is changed. Calls `written` once the system has the
        group. Without journalSyncData the file is synced only every journalPageCacheFlushIntervalMSec. Raises OSError:
        the whole group failed then; BookieIOError once `failed` is set.
        """
        if self.failed is not None:
            raise BookieIOError(f"Journal {self.directory} failed before: {self.failed}")
        if size == 0:
            if written is not None:
                written()
            return
        try:
            self._commit(records, size, scoped, written)
        except OSError as error:
            if error.errno not in NO_SPACE:  # Source: Journal, whose thread ends with any IOException
                self.failed = self.failed or error
            raise

    def _commit(self, records: list[bytes], size: int, scoped: bool, written: Callable[[], object] | None) -> None:
        self._scoped = self._scoped or scoped
        is_too_old = scoped and self._version != formats.VERSION_SCOPED
        if self._file is None or self._position > self._size_max or is_too_old:
            self._open_next()
        file = self._file
        assert file is not None
        start = self._position
        end = start + size
        if self._version >= formats.VERSION_PADDING:
            alignment = self._config.journal_alignment_size
            if self._tag:
                padding = formats.write_seal(start, end, self._tag, alignment)
            else:
                padding = formats.write_padding(end, alignment)
            records.append(padding)
            end += len(padding)
        self._allocate(file, end)
        try:
            file.write(start, records)
        except Exception:
            self._drop_tail(file, start)
            raise
        self._position = end
        if written is not None:
            written()
        if self._sync_data or self._is_sync_due():
            self._sync(file)
            self.mark = LogMark(self._journal_id, end)

    def _sync(self, file: StorageFile) -> None:
        """Sync; a failure is the journal's, whatever it is: written data is uncertain."""
        try:
            file.sync()
        except Exception as error:
            self.failed = error
            raise

    def _is_sync_due(self) -> bool:
        now_s = self._now_s()
        due = (now_s - self._synced_s) * 1000 >= self._config.journal_page_cache_flush_interval_msec
        if due:
            self._synced_s = now_s
        return due

    def _allocate(self, file: StorageFile, end: int) -> None:
        """Reserve space in steps, so that a full disk is found before a byte of the group is written."""
        if end <= self._allocated or self.allocation_size == 0:
            return
        steps = -(-(end - self._allocated) // self.allocation_size)
        target = self._allocated + steps * self.allocation_size
        file.allocate(target)
        self._allocated = target
        if self._config.journal_remove_from_page_cache:
            # Only a bookie that starts reads a journal. Source: journalRemoveFromPageCache.
            file.forget_cache(self._position)

    def _drop_tail(self, file: StorageFile, position: int) -> None:
        """Truncate the file after a failed write, so that the next group follows whole records."""
        try:
            file.truncate(position)
            file.sync()
        except Exception as error:  # noqa: BLE001 - kept in `failed`
            self.failed = error
        else:
            self._allocated = position

    def forget_before(self, mark: LogMark) -> None:
        """Delete files before the mark's, except the newest `journalMaxBackups`. Source: Journal.checkpointComplete."""
        for directory in (self.directory, self.directory / SCOPED_DIRECTORY):
            done = [journal_id for journal_id in journal_ids(directory) if journal_id < mark.journal_id]
            surplus = done[: max(0, len(done) - self._config.journal_max_backups)]
            for journal_id in surplus:
                self._files.remove(directory / formats.file_name(journal_id))

    def make_downgradable(self, write_mark: Callable[[LogMark], None]) -> None:
        """Move files that Apache's bookie refuses out of its way, once everything is in ledger storage.

        With version-7 files: create an empty version-6 file, set the mark to it, and move those files to
        `current/scoped/`, in this order, so that a crash in between loses nothing. Source: BP-35's downgrade.
        """
        scoped_ids = [journal_id for journal_id in journal_ids(self.directory) if self._is_scoped(journal_id)]
        if not scoped_ids:
            return
        self._scoped = False
        self._plain_version = min(self._plain_version, formats.VERSION_CURRENT)
        self._open_next()
        write_mark(self.mark)
        aside = self.directory / SCOPED_DIRECTORY
        self._files.make_directory(aside)
        # The new file may have replaced an incomplete one that a full disk had left.
        for journal_id in (scoped_id for scoped_id in scoped_ids if scoped_id != self._journal_id):
            name = formats.file_name(journal_id)
            self._files.rename(self.directory / name, aside / name)
        self._files.sync_directory(aside)
        self._files.sync_directory(self.directory)
        self.forget_before(self.mark)

    def _is_scoped(self, journal_id: int) -> bool:
        with self._files.open_to_read(self.directory / formats.file_name(journal_id)) as file:
            header = file.read(0, formats.HEADER.size)
        return formats.read_header(header, str(file.path)) == formats.VERSION_SCOPED

    def close(self) -> None:
        """Close the file; committed groups stay."""
        if self._file is not None:
            self._file.close()
            self._file = None


#: Called with None when a batch is on disk, or with the error that lost it.
Done: TypeAlias = Callable[[OSError | None], object]


class JournalBatch:
    """Records on their way to one journal, `count` entries among them, and the callers that wait for them.

    `calls` get the outcome once it is known. `written` get it earlier: once the system has the batch, synced or not.
    """

    __slots__ = ("calls", "count", "epoch", "put_s", "records", "scoped", "size", "written")

    def __init__(self, epoch: int = 0) -> None:
        #: Batches of one epoch depend on each other: if one fails, so do those behind it.
        self.epoch = epoch
        self.records: list[bytes] = []
        #: Bytes of the records, and how many of them are entries.
        self.size = 0
        self.count = 0
        #: The time at which the batch was queued for its journal (monotonic clock).
        self.put_s = 0.0
        self.scoped = False
        self.calls: list[Done] = []
        self.written: list[Done] = []

    def append(self, ledger: LedgerId, record: bytes) -> None:
        """Append a record that is not an entry."""
        self.records.append(record)
        self.size += len(record)
        self.scoped = self.scoped or ledger.is_scoped


class JournalCommits:
    """The batches of journal `number` of a bookie: `batch` gathers records in the event loop; one thread commits them.

    `journals` are the bookie's, once it is open; `handles` are the ledgers in memory.
    """

    def __init__(
        self, journals: Sequence[JournalWriter], number: int, handles: Mapping[LedgerId, LedgerHandle]
    ) -> None:
        self._journals = journals
        self.number = number
        self._handles = handles
        self.batch = JournalBatch()
        self._failed_epoch = -1

    @property
    def journal(self) -> JournalWriter:
        """The journal's files, once the storage is open."""
        return self._journals[self.number]

    def take_batch(self) -> JournalBatch | None:
        """Return the gathered batch, for `commit` and then `settle`; None for an empty one."""
        batch = self.batch
        if not (batch.calls or batch.written or batch.size):
            return None
        self.batch = JournalBatch(batch.epoch)
        return batch

    def commit(self, batch: JournalBatch, *more: JournalBatch, written: Callable[[], object] | None = None) -> None:
        """Write batches as one group, in the order of `take_batch`; return once they are on disk.

        Calls `written` before the sync. Raises OSError: the batches fail, and so do all taken before `settle`.
        """
        # Grouped behind a batch that fails, one of a later epoch fails too, and so do those that depend on it.
        last_epoch = max(batch.epoch, *(other.epoch for other in more)) if more else batch.epoch
        if batch.epoch <= self._failed_epoch:
            self._failed_epoch = last_epoch
            raise OSError(f"An earlier group of journal {self.journal.directory} failed")
        records, size, scoped = batch.records, batch.size, batch.scoped
        for other in more:
            records += other.records
            size += other.size
            scoped = scoped or other.scoped
        try:
            self.journal.commit(records, size, scoped=scoped, written=written)
        except Exception:
            self._failed_epoch = last_epoch
            raise

    def settle(self, batch: JournalBatch, error: OSError | None) -> list[Done]:
        """Return the callers to report the outcome of `commit` to.

        After a failure the batch gathered meanwhile fails too, since its records depend on the lost ones (a ledger
        key): its callers are among them.
        """
        calls = [*batch.written, *batch.calls]
        if error is not None and batch.epoch == self.batch.epoch:
            calls += [*self.batch.written, *self.batch.calls]
            self.batch = JournalBatch(batch.epoch + 1)
            for handle in self._handles.values():
                if handle.journal == self.number:
                    handle.key_recorded = handle.fence_recorded = False
        return calls


def journal_ids(directory: Path) -> list[int]:
    """Return the ids of the journal files in `directory`, ascending; none when it is missing."""
    return sorted(found for name in names_in(directory) if (found := formats.journal_id_of(name)) is not None)
