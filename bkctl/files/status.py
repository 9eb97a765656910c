"""The facts in the small files of a bookie, and in the first bytes of its large ones.

A file in a form that no bookie writes gives one error. Source: Cookie, LastLogMark, BookieStatus,
EntryLoggerAllocator, TransactionalEntryLogCompactor, JournalChannel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from bkctl.errors import Corrupt, CorruptRecord
from bkctl.files.directories import BookieFile, FileKind
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.journal import JournalReader
from bkctl.files.windows import FileReader
from bkctl.formats import entry_log
from bkctl.formats.journal import LogMark
from bkctl.formats.status import BookieStatus

#: The facts in a file: JSON name → value.
Detail = Mapping[str, str | int | bool | list[str] | None]
T = TypeVar("T")
_ATTEMPTS_MAX: Final = 5
_PAUSE_S: Final = 0.01
#: Far above the size of any of these files.
_SIZE_BYTES_MAX: Final = 1 << 20


def read_detail(file: BookieFile) -> Detail | None:
    """Return the facts in `file` by JSON name; None for kinds without facts of their own (indexes, databases).

    Cookie: layoutVersion, bookieId, journalDirs, ledgerDirs, indexDirs, instanceId. Last mark: journalId, journalIdHex,
    offset. Last id: logId, logIdHex. Status: mode, updated (ms), manual. Journal and entry log: version. Compaction:
    logId, and sourceLogId once it is known. Raises Corrupt or Unsupported, naming file and byte; NotFound if the file
    was just deleted; BkctlError if unreadable.
    """
    match file.kind:
        case FileKind.COOKIE:
            from bkctl.formats.metadata import Cookie

            return read_small(file.path, Cookie.parse).to_json()
        case FileKind.LAST_MARK:
            mark = read_small(file.path, LogMark.parse)
            return {"journalId": mark.journal_id, "journalIdHex": f"{mark.journal_id:x}", "offset": mark.offset}
        case FileKind.LAST_ID:
            log_id = read_small(file.path, _parse_last_id)
            return {"logId": log_id, "logIdHex": f"{log_id:x}"}
        case FileKind.STATUS:
            status = read_small(file.path, BookieStatus.parse)
            return {"mode": status.mode.value, "updated": status.updated_ms, "manual": status.manual}
        case FileKind.JOURNAL:
            with JournalReader.open(file.path) as journal:
                return {"version": journal.version}
        case FileKind.ENTRY_LOG:
            with EntryLogReader.open(file.path) as log:
                return {"version": None if log.header is None else log.header.version}
        case FileKind.COMPACTION:
            name = entry_log.compaction_of(file.path.name)
            assert name is not None
            return {"logId": name.log_id, "sourceLogId": name.source_id}
    return None


def read_small(path: Path, parse: Callable[[bytes, str], T]) -> T:
    """Read a small file and return the result of `parse`, which gets the bytes and the file's name.

    A running bookie truncates and rewrites such a file, so damage is confirmed by further reads. Raises the errors of
    `parse`, NotFound, BkctlError for an unreadable file.
    """
    for attempt in range(_ATTEMPTS_MAX):
        with FileReader(path) as reader:
            try:
                return parse(reader.read(0, _SIZE_BYTES_MAX), reader.name)
            except Corrupt:
                if attempt == _ATTEMPTS_MAX - 1:
                    raise
        time.sleep(_PAUSE_S)
    raise AssertionError


def _parse_last_id(data: bytes, where: str) -> int:
    log_id = entry_log.read_last_id(data)
    if log_id is None and data.strip().strip(b"0") == b"" != data.strip():
        log_id = 0
    if log_id is None:
        # A bookie then lists its logs instead.
        shown = repr(data[:40].decode("ascii", "backslashreplace"))
        raise CorruptRecord(f"Last log id is {shown}, not a hexadecimal number", offset=0, where=where)
    return log_id
