"""Summaries of entry logs, and their contents by ledger. Source: ReadLogCommand."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from bkctl.errors import BkctlError, Corrupt, NotFound
from bkctl.files.directories import BookieDirectories, BookieFile
from bkctl.files.entry_log import EntryLogReader
from bkctl.formats.entry_log import compaction_of
from bkctl.ids import LedgerId


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
