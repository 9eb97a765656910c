"""Checkpoints: entry logs synced → indexes synced → last marks → old journals deleted.

Source: SyncThread, Journal (LastLogMark).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bkctl.disk import NO_SPACE
from bkctl.formats.journal import LAST_MARK, LogMark, last_mark_name
from bkctl.storage.journal_writer import JournalWriter
from bkctl.storage.ledger.ledger_storage import LedgerStorage


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
    `_evict` lets handles leave memory once the disk has their changes. `_journals` are those of `_journal_count`
    directories once the storage is open.
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
