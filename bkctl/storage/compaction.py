"""Compaction: copy the live entries of a log with garbage to another log, then remove the log.

    copy      each entry whose location in the index is in the old log → `<id>.log.compacting`
    finish    ledgers map and header, synced, renamed to `<id>.log`: a log like any other
    move      the index points to the new location where it still pointed to the old one (compare-and-set), durable
    remove    after a checkpoint, the old log

A crash leaves at worst a second copy, since the old log stays until no index on disk points to it. So Apache's third
name, `<id>.log.<source>.compacted`, is never written; one that Apache left is the finished log.
Source: AbstractLogCompactor, EntryLogCompactor, TransactionalEntryLogCompactor.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from itertools import compress, islice
from typing import Any, Final

from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import BkctlError, Corrupt, ReadOnlyBookie, Unsupported, on_error
from bkctl.files.scan import RecordBatch, ScannedFile
from bkctl.formats.entry_log import HEADER_SIZE, pack_location
from bkctl.ids import LedgerId
from bkctl.pace import Pace
from bkctl.storage.entry_log_metadata import EntryLogMetadata, open_log
from bkctl.storage.entry_logger import CompactionLog, EntryLogger, Move
from bkctl.storage.ledger.ledger_storage import LedgerStorage

#: Moves in memory, 40 bytes each; more finish the log that the copies are in.
MOVES_MAX: Final = 1 << 20
#: Moves of one index update: each may change another page.
MOVES_AT_ONCE_MAX: Final = 4096
#: Free space that a disk must keep besides the copies, and with isForceGCAllowWhenNoSpace: room for indexes and marks.
SPARE_BYTES: Final = 64 << 20
FORCED_SPARE_BYTES: Final = 1 << 20
#: Entries, and their bytes, after which the throttle applies.
_THROTTLED_ENTRIES: Final = 64
_THROTTLED_BYTES: Final = 64 << 10
_MOVE_WIDTH: Final = 5


class CompactionStopped(BkctlError):
    """The bookie stops; a later compaction starts over."""


class UnreadableEntryLog(Corrupt):
    """An entry log that cannot be read to its end, so that a compaction would lose entries."""


class _Target:
    """The log that gets the copies, with the source of each copy."""

    def __init__(self, logger: EntryLogger) -> None:
        self.logger = logger
        #: None until there is something to copy.
        self.log: CompactionLog | None = None
        self.size = 0
        #: Scope, ledger, entry, old and new location of each copy.
        self.moves: array[int] = array("Q")
        #: Logs whose live entries are all copied, to this log or one before.
        self.sources: list[EntryLogMetadata] = []

    def add(self, ledger: LedgerId, entry_id: int, old: int, body: bytes) -> None:
        if self.log is None:
            self.log = self.logger.open_compaction_log()
        new = self.log.add(ledger, body)
        self.size += len(body) + 4
        self.moves.extend((*ledger, entry_id, old, new))

    def every_move(self) -> Iterator[Move]:
        moves = iter(self.moves)
        for scope_id, ledger_id, entry_id, old, new in zip(moves, moves, moves, moves, moves, strict=True):
            yield Move(LedgerId(scope_id, ledger_id), entry_id, old, new)


class EntryLogCompactor:
    """Copies the live entries of several logs to one, up to the size of an entry log.

    With useTransactionalCompaction, copies each log to one of its own, and removes it before the next begins.
    Java's plain compaction appends to the log that the bookie is writing; ours writes logs of its own, so that the
    index needs no flush before they are complete. `checkpoint` returns when a checkpoint that began after its call is
    on disk; `stopped` ends a compaction; `removed` gets each removed log. Logs of different id spaces never mix.
    """

    def __init__(
        self,
        config: BookieConfig,
        storage: LedgerStorage[Any],
        files: Files,
        *,
        checkpoint: Callable[[], None],
        stopped: threading.Event,
        removed: Callable[[EntryLogMetadata], None],
    ) -> None:
        self._storage, self._files = storage, files
        self._checkpoint, self._stopped, self._removed = checkpoint, stopped, removed
        if config.is_throttle_by_bytes:
            self._pace = Pace(bytes_per_s=config.compaction_rate_by_bytes)
        else:
            self._pace = Pace(steps_per_s=config.compaction_rate_by_entries or config.compaction_rate)
        self._size_limit = config.log_size_limit
        self._moves_at_once = min(config.compaction_max_outstanding_requests, MOVES_AT_ONCE_MAX)
        self._ignores_space = config.force_allow_compaction
        self._spare_bytes = FORCED_SPARE_BYTES if config.is_force_gc_allow_when_no_space else SPARE_BYTES
        self._is_transactional = config.use_transactional_compaction
        self._target: _Target | None = None
        #: Entries copied so far.
        self.entry_count = 0

    def compact(self, log: EntryLogMetadata) -> None:
        """Copy the live entries of `log`; `flush` must follow, perhaps after more logs of the same id space.

        Raises ReadOnlyBookie where the disks are too full, UnreadableEntryLog, Corrupt for a fault of the index,
        OSError, CompactionStopped. After an error nothing is lost, and `log` stays.
        """
        self._check_space(log)
        if self._target is not None and self._target.logger is not log.logger:
            self.flush()
        try:
            ledgers = frozenset(log.ledgers)
            for batch in _batches(log, self._storage):
                self._copy(log, ledgers, batch)
        except (OSError, CompactionStopped):
            self.abort()
            raise
        self._target_for(log, 0).sources.append(log)
        if self._is_transactional:
            self.flush()

    def _copy(self, log: EntryLogMetadata, ledgers: frozenset[LedgerId], batch: RecordBatch) -> None:
        window, base = batch.window, pack_location(log.log_id, 4)
        rows = [
            (ledger, entry_id, base + offset, begin + 4, size)
            for ledger, entry_id, offset, begin, size in zip(
                batch.ledgers, batch.entry_ids, batch.offsets, batch.begins, batch.sizes, strict=True
            )
            if entry_id >= 0 and ledger in ledgers
        ]
        live = self._storage.index_of(log.logger).live([row[:3] for row in rows])
        entry_count = size_bytes = 0
        for ledger, entry_id, old, begin, size in compress(rows, live):
            if entry_count >= _THROTTLED_ENTRIES or size_bytes >= _THROTTLED_BYTES:
                self._throttle(entry_count, size_bytes)
                entry_count = size_bytes = 0
            entry_count += 1
            size_bytes += size
            self._target_for(log, size).add(ledger, entry_id, old, window[begin : begin + size])
            self.entry_count += 1
        self._throttle(entry_count, size_bytes)

    def _throttle(self, entry_count: int, size_bytes: int) -> None:
        """Wait until the configured rate allows these entries. Source: AbstractLogCompactor.Throttler."""
        self._pace.begin(size_bytes, entry_count, stopped=self._stopped)
        if self._stopped.is_set():
            raise CompactionStopped("The bookie stops")

    def _target_for(self, log: EntryLogMetadata, size: int) -> _Target:
        target = self._target
        if target is not None and size:
            full = target.size + size + 4 > self._size_limit - HEADER_SIZE
            if (full and target.moves) or len(target.moves) >= MOVES_MAX * _MOVE_WIDTH:
                self.flush()
        if self._target is None:
            self._target = _Target(log.logger)
        return self._target

    def _check_space(self, log: EntryLogMetadata) -> None:
        if self._ignores_space:
            return
        needed = log.remaining_size_bytes + self._spare_bytes
        if self._free_bytes(log) < needed:
            self.flush()  # Finished copies let the logs go that they come from.
        if (free := self._free_bytes(log)) < needed:
            raise ReadOnlyBookie(
                f"No directory has room for the {log.remaining_size_bytes} live bytes of {log.path}, and "
                f"{self._spare_bytes} to spare: {free} bytes are free"
            )

    def _free_bytes(self, log: EntryLogMetadata) -> int:
        """Return the free bytes of the emptiest disk, without those for copies in memory."""
        directories = [directory for directory in log.logger.directories if directory.is_dir()]
        free = max((self._files.disk_usage(directory).free for directory in directories), default=0)
        copied = None if self._target is None else self._target.log
        return free - (0 if copied is None else copied.unwritten_bytes)

    def flush(self) -> None:
        """Finish the copies, move the index, and remove the logs that were copied whole.

        Raises OSError or Corrupt; then the old logs stay.
        """
        target, self._target = self._target, None
        if target is None:
            return
        if target.log is not None:
            with on_error(target.log.abort):
                target.log.finish()
            moves = target.every_move()
            while moved := list(islice(moves, self._moves_at_once)):
                self._storage.index_of(target.logger).move(moved)
                if self._storage.writes_ahead and self._storage.is_flush_due:  # changes of the index wait in memory
                    self._checkpoint()
        if target.sources:
            # Newer entries in memory must be on disk too before the old log is removed.
            self._checkpoint()
        for source in target.sources:
            if not self._storage.unwritten.isdisjoint(source.ledgers):
                continue  # the index on disk of such a ledger may point to the old log: a later round removes it
            source.logger.remove_log(source.log_id)
            self._removed(source)

    def abort(self) -> None:
        """Drop unfinished copies; their source logs stay."""
        target, self._target = self._target, None
        if target is not None and target.log is not None:
            target.log.abort()


def _batches(log: EntryLogMetadata, storage: LedgerStorage[Any]) -> Iterator[RecordBatch]:
    try:
        with open_log(log.logger, log.log_id, log.path, storage) as reader:
            yield from reader.batches(source=ScannedFile.ENTRY_LOG_WITH_SHORT)
    except (Corrupt, Unsupported) as error:
        raise UnreadableEntryLog(error.message, hint=error.hint) from error
