"""Summaries of entry logs, their contents by ledger, and the filter for records to show, of journals too.

Source: ReadLogCommand, ReadJournalCommand.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.errors import BkctlError, Corrupt, CorruptRecord, NotFound
from bkctl.files.directories import BookieDirectories, BookieFile
from bkctl.files.entry_log import EntryLogReader
from bkctl.formats.entry_log import HEADER_SIZE, compaction_of
from bkctl.formats.record import RecordType
from bkctl.ids import LedgerId

if TYPE_CHECKING:
    from bkctl.files.journal import JournalReader
    from bkctl.files.scan import RecordBatch


class LogStage(StrEnum):
    """The stage of a log in its life; the values are the words of every output."""

    #: Allocated and still unwritten.
    EMPTY = "empty"
    #: Without a ledgers map: being written, unfinished when the bookie stopped, or of header version 0.
    OPEN = "open"
    #: Finished with a ledgers map.
    CLOSED = "closed"
    #: `<id>.log.compacting`: written by a compaction that runs or was killed; a bookie's start deletes it.
    COMPACTING = "compacting"
    #: `<id>.log.<source>.compacted`: complete, but the index may still point at the source; a start resumes there.
    COMPACTED = "compacted"


class EntryLogSummary(NamedTuple):
    """An entry log and its header; `ledgers_count` is None without a ledgers map.

    `version` is None for an empty file. With `error` (the version is unknown) `version` and `state` are None.
    """

    file: BookieFile
    version: int | None
    state: LogStage | None
    ledgers_map_offset: int | None
    ledgers_count: int | None
    error: BkctlError | None = None

    @property
    def source_id(self) -> int | None:
        """Return the id of the log that was compacted into this file, from the file's name; None for other files."""
        compaction = compaction_of(self.file.path.name)
        return None if compaction is None else compaction.source_id


def entry_log_summaries(directories: BookieDirectories) -> Iterator[EntryLogSummary]:
    """Yield the entry logs in order, scoped ones last in each directory, then files of unfinished compactions.

    Skips a log that a running bookie deletes meanwhile. Raises NotFound for a missing directory.
    """
    for file in [*directories.entry_logs(), *directories.compaction_logs()]:
        try:
            with EntryLogReader.open(file.path) as reader:
                header = reader.header
        except NotFound:
            continue
        except BkctlError as error:
            yield EntryLogSummary(file, None, None, None, None, error)
            continue
        compaction = compaction_of(file.path.name)
        if compaction is not None:
            state = LogStage.COMPACTING if compaction.source_id is None else LogStage.COMPACTED
        elif header is None:
            state = LogStage.EMPTY
        else:
            state = LogStage.CLOSED if header.has_map else LogStage.OPEN
        counts = (header.ledgers_map_offset, header.ledgers_count) if header and header.has_map else (None, None)
        yield EntryLogSummary(file, None if header is None else header.version, state, *counts)


class LogContents(NamedTuple):
    """The ledgers of a log, in order, with their bytes (entries and their size fields).

    `from_map` is False after a scan. `error` is the damage: of the ledgers map if `complete` (the scan read every
    record), else of the records (`sizes` has the records before it).
    """

    sizes: dict[LedgerId, int]
    from_map: bool
    complete: bool = True
    error: BkctlError | None = None

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all ledgers."""
        return sum(self.sizes.values())


def log_contents(reader: EntryLogReader) -> LogContents:
    """Return the contents of a log: from its ledgers map, or by a scan if the map is missing or damaged.

    Source: DefaultEntryLogger.getEntryLogMetadata.
    """
    damage: BkctlError | None = None
    try:
        if (mapped := reader.ledgers_map()) is not None:
            return LogContents(dict(sorted(mapped.items())), from_map=True)
    except Corrupt as error:
        damage = error
    sizes, scan_damage = reader.scan_ledgers(complete=damage is None)
    return LogContents(sizes, from_map=False, complete=scan_damage is None, error=scan_damage or damage)


#: Records without a ledger are left out unless asked for by type, as in Apache's tools.
FILLER_TYPES: Final = frozenset((RecordType.PADDING, RecordType.LEDGERS_MAP))


class RecordFilter(NamedTuple):
    """The records to show; None matches any. `types` None: all but padding and ledgers maps.

    `position_first` is the byte at which the first record begins (0: behind the header), `position_last` the last byte
    at which a record may begin. All methods raise CorruptRecord for a first position within the header.
    """

    ledger: LedgerId | None = None
    scope_id: int | None = None
    entry_id: int | None = None
    types: Container[RecordType] | None = None
    position_first: int = 0
    position_last: int | None = None

    def of_journal(self, reader: JournalReader, start: int = 0) -> Iterator[RecordBatch]:
        """Return the matching records of a journal as columns, from byte `start` on."""
        types, last = self.types, self.position_last
        padding = types is not None and RecordType.PADDING in types
        first = max(start, self._first(reader.header_size, reader.name))
        return self._choose(reader.batches(first, None if last is None else last + 1, padding=padding))

    def of_entry_log(self, reader: EntryLogReader) -> Iterator[RecordBatch]:
        """Return the matching records of an entry log as columns."""
        types, last = self.types, self.position_last
        special = types is not None and any(filler in types for filler in FILLER_TYPES)
        end = None if last is None else last + 1
        return self._choose(reader.batches(self._first(HEADER_SIZE, reader.name), end, special=special))

    def _first(self, header_size: int, name: str) -> int:
        if 0 < self.position_first < header_size:
            hint = f"the header goes to byte {header_size}; 0 is the whole file"
            raise CorruptRecord("No record begins in the header", offset=self.position_first, where=name, hint=hint)
        return self.position_first

    def _choose(self, batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
        ledger, scope_id, entry_id, types, _, _ = self
        for batch in batches:
            if types is None or batch.type in types:
                chosen = batch.select(ledger, scope_id, entry_id)
                if len(chosen):
                    yield chosen
