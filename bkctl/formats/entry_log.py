"""The entry log: file header, records, ledgers map, entry locations.

    file         header (1024 bytes) | records …                        direct I/O: the header takes 4096
    record       size i32 | entry[size]
    ledgers map  size i32 | -1 i64 | -2 i64 | count i32 | items …       one or more records, once the log is closed
    item         ledger i64 | bytes i64                                 scope u64 | ledger u64 | bytes i64 in version 2

An entry's location is its log's id and the byte offset of the entry itself, behind the size.

Transactional compaction of log S into log T names its file `T.log.compacting` while it is written, adds a hard link
`T.log.S.compacted` while the index is updated, and the link `T.log` then; the first two and `S.log` are deleted last.
Source: DefaultEntryLogger, DirectEntryLogger, TransactionalEntryLogCompactor; BP-35.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from struct import Struct
from typing import Annotated, Final, NamedTuple

from bkctl.errors import CorruptRecord, Unsupported
from bkctl.formats.layout import Buffer, Layout
from bkctl.formats.record import IDS_V1, LEDGERS_MAP_ENTRY_ID, NO_LEDGER, RECORD_SIZE
from bkctl.ids import U64_MAX, LedgerId

FINGERPRINT: Final = b"BKLO"
VERSION_WITHOUT_MAP: Final = 0
VERSION_CURRENT: Final = 1
VERSION_SCOPED: Final = 2
HEADER_SIZE: Final = 1024
LOG_ID_MAX: Final = (1 << 31) - 1
#: Ledgers in one record of the ledgers map.
LEDGERS_MAP_ITEMS_MAX: Final = 10_000
LEDGERS_MAP_HEADER_SIZE: Final = 20
#: Alignment of the direct I/O logger, and its fill byte (a negative number, read as a size).
DIRECT_ALIGNMENT: Final = 4096
DIRECT_PADDING_BYTE: Final = 0xF0

_FILE_NAME = re.compile(r"([0-9a-fA-F]{1,8})\.log", re.ASCII)
_COMPACTION_NAME = re.compile(r"([0-9a-fA-F]{1,8})\.log\.(?:compacting|([0-9a-fA-F]{1,8})\.compacted)", re.ASCII)
_LAST_ID = re.compile(r"\s*([0-9a-fA-F]{1,16})\s*", re.ASCII)


class EntryLogHeader(NamedTuple):
    """Block at the head of an entry log file, `<log id in hex>.log`. Source: DefaultEntryLogger.Header."""

    fingerprint: Annotated[bytes, "4s"] = FINGERPRINT
    version: Annotated[int, "i"] = VERSION_CURRENT
    #: Bytes from the file's start; 0 until the log is closed.
    ledgers_map_offset: Annotated[int, "q"] = 0
    ledgers_count: Annotated[int, "i"] = 0

    @property
    def has_map(self) -> bool:
        """Return True if the log was closed with a ledgers map."""
        return self.ledgers_map_offset != 0 and self.version != VERSION_WITHOUT_MAP


HEADER: Final = Layout(EntryLogHeader, size=HEADER_SIZE)
_MAP_ITEM_V1: Final = Struct(">Qq")
_MAP_ITEM_V2: Final = Struct(">QQq")


def read_header(start: Buffer, where: str = "") -> EntryLogHeader:
    """Return the header in a log's first 1024 bytes.

    Raises TruncatedRecord, CorruptRecord (no fingerprint), Unsupported (unknown version).
    """
    header = HEADER.unpack_from(start, 0, where)
    if header.fingerprint != FINGERPRINT:
        raise CorruptRecord("Entry log does not begin with BKLO", offset=0, where=where)
    if not VERSION_WITHOUT_MAP <= header.version <= VERSION_SCOPED:
        at = f"{where}: " if where else ""
        raise Unsupported(f"{at}Entry log has header version {header.version}, 0 to {VERSION_SCOPED} are known")
    return header


def write_header(version: int = VERSION_CURRENT, ledgers_map_offset: int = 0, ledgers_count: int = 0) -> bytes:
    """Return the 1024 bytes that begin a log."""
    return HEADER.pack(EntryLogHeader(FINGERPRINT, version, ledgers_map_offset, ledgers_count))


def write_ledgers_map(sizes: Mapping[LedgerId, int], version: int = VERSION_CURRENT) -> Iterator[bytes]:
    """Return the records (size included) that list each ledger's bytes in a log, at most 10,000 ledgers a record."""
    items = iter(sizes.items())
    while batch := list(islice(items, LEDGERS_MAP_ITEMS_MAX)):
        if version == VERSION_SCOPED:
            packed = [_MAP_ITEM_V2.pack(ledger.scope_id, ledger.ledger_id, size) for ledger, size in batch]
        else:
            packed = [_MAP_ITEM_V1.pack(ledger.ledger_id, size) for ledger, size in batch]
        ids = IDS_V1.pack(NO_LEDGER.ledger_id, LEDGERS_MAP_ENTRY_ID)
        body = ids + RECORD_SIZE.pack(len(batch)) + b"".join(packed)
        yield RECORD_SIZE.pack(len(body)) + body


def is_ledgers_map(body: Buffer) -> bool:
    """Return whether a record has the marks of the ledgers map in place of a ledger and an entry id."""
    return len(body) >= IDS_V1.size and IDS_V1.unpack_from(body) == (U64_MAX, LEDGERS_MAP_ENTRY_ID)


def read_ledgers_map(body: Buffer, version: int, offset: int = 0, where: str = "") -> list[tuple[LedgerId, int]]:
    """Return the ledgers and their bytes in one record of the ledgers map; `offset` is the record's, for messages.

    Raises CorruptRecord when its marks or its size contradict the format.
    """
    item = _MAP_ITEM_V2 if version == VERSION_SCOPED else _MAP_ITEM_V1
    if len(body) < LEDGERS_MAP_HEADER_SIZE:
        raise CorruptRecord(f"Ledgers map of {len(body)} bytes is too short", offset=offset, where=where)
    if not is_ledgers_map(body):
        raise CorruptRecord("Ledgers map does not begin with -1 and -2", offset=offset, where=where)
    (count,) = RECORD_SIZE.unpack_from(body, IDS_V1.size)
    if count < 0 or LEDGERS_MAP_HEADER_SIZE + count * item.size != len(body):
        raise CorruptRecord(f"Ledgers map of {len(body)} bytes says {count} ledgers", offset=offset, where=where)
    items = item.iter_unpack(body[LEDGERS_MAP_HEADER_SIZE:])
    if version == VERSION_SCOPED:
        return [(LedgerId(scope_id, ledger_id), size) for scope_id, ledger_id, size in items]
    return [(LedgerId(0, ledger_id), size) for ledger_id, size in items]


def pack_location(log_id: int, offset: int) -> int:
    """Return the location of the entry that is `offset` bytes from the start of log `log_id`; 0 never occurs."""
    return log_id << 32 | offset


def unpack_location(location: int) -> tuple[int, int]:
    """Return the log id and the byte offset of the entry at `location`."""
    return location >> 32 & 0xFFFFFFFF, location & 0xFFFFFFFF


def file_name(log_id: int) -> str:
    """Return the name of an entry log file, `<hex id>.log`."""
    return f"{log_id:x}.log"


def log_id_of(name: str) -> int | None:
    """Return the id in an entry log file's name; None for any other name."""
    match = _FILE_NAME.fullmatch(name)
    return int(match[1], 16) if match else None


class CompactionName(NamedTuple):
    """The ids in the name of a transactional compaction's file.

    `source_id` is the compacted log; None in the name of a file that is being written.
    """

    log_id: int
    source_id: int | None


def compaction_of(name: str) -> CompactionName | None:
    """Return the ids in `<hex>.log.compacting` or `<hex>.log.<hex>.compacted`; None for any other name."""
    match = _COMPACTION_NAME.fullmatch(name)
    if match is None:
        return None
    return CompactionName(int(match[1], 16), None if match[2] is None else int(match[2], 16))


def content_id_of(name: str) -> int | None:
    """Return the id of the log in the file `name`, finished or in compaction; None for any other name."""
    compaction = compaction_of(name)
    return log_id_of(name) if compaction is None else compaction.log_id


def write_last_id(log_id: int) -> bytes:
    """Return the bytes of a `lastId` file."""
    return b"%x\n" % log_id


def read_last_id(data: bytes) -> int | None:
    """Return the log id in a `lastId` file; None if a bookie lists the logs instead (unreadable, 0 or less)."""
    match = _LAST_ID.fullmatch(data.decode("ascii", "replace"))
    return int(match[1], 16) or None if match else None
