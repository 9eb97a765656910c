"""Records in journals and entry logs: a size, then an entry or a special record of the bookie.

    record   size i32 | body[size]            the offset of a record is that of its size field
    body     an entry (see `entry`), or ledger id, special entry id, and the data of that kind

Source: Journal.scanJournal, DefaultEntryLogger.scanEntryLog; BP-35.
"""

from __future__ import annotations

from enum import StrEnum
from struct import Struct
from typing import Final, NamedTuple

from bkctl.errors import BkctlError, Corrupt, CorruptRecord, Unsupported
from bkctl.formats.entry import (
    ENTRY_V1,
    ENTRY_V2,
    HEADER_SIZE_V1,
    HEADER_SIZE_V2,
    LENGTH_FIELD_SIZE,
    OVERHEAD_SIZE_MAX,
    DigestType,
    digest_of_flags,
    lac_of,
    read_lac_header,
)
from bkctl.formats.layout import Buffer
from bkctl.ids import U64_MAX, LedgerId

#: Far above every frame size in use (5 MiB by default); a larger size field is damage.
RECORD_SIZE_BYTES_MAX: Final = 256 << 20
#: Ledger and entry id of V1, the shortest body.
BODY_SIZE_MIN: Final = 16

RECORD_SIZE: Final = Struct(">i")
IDS_V1: Final = Struct(">Qq")
IDS_V2: Final = Struct(">BQQq")

LEDGER_KEY_ENTRY_ID: Final = -0x1000
FENCE_ENTRY_ID: Final = -0x2000
FORCE_LEDGER_ENTRY_ID: Final = -0x4000
EXPLICIT_LAC_ENTRY_ID: Final = -0x8000
LEDGERS_MAP_ENTRY_ID: Final = -2


def record_of(body: Buffer) -> bytes:
    """Return the record of an entry: its size, then `body`."""
    return b"".join((RECORD_SIZE.pack(len(body)), body))


def body_of(record: bytes) -> memoryview:
    """Return the entry in a record."""
    return memoryview(record)[RECORD_SIZE.size :]


#: The ledger of records that belong to none (−1, as Apache writes it).
NO_LEDGER: Final = LedgerId(0, U64_MAX)
NO_ENTRY: Final = -1


class RecordType(StrEnum):
    """The kind of a record; the values are the words in every output."""

    ENTRY = "entry"
    LEDGER_KEY = "ledgerKey"
    FENCE = "fence"
    FORCE_LEDGER = "forceLedger"
    EXPLICIT_LAC = "explicitLac"
    PADDING = "padding"
    LEDGERS_MAP = "ledgersMap"
    UNKNOWN = "unknown"


_SPECIAL_TYPES: Final = {
    LEDGER_KEY_ENTRY_ID: RecordType.LEDGER_KEY,
    FENCE_ENTRY_ID: RecordType.FENCE,
    FORCE_LEDGER_ENTRY_ID: RecordType.FORCE_LEDGER,
    EXPLICIT_LAC_ENTRY_ID: RecordType.EXPLICIT_LAC,
}


class Record(NamedTuple):
    """One record of a journal or an entry log.

    `offset` is the byte offset of its size field, `record_size` that field (for padding: the bytes after both its
    fields). `ledger` and `entry_id` are NO_LEDGER and a negative number where the record belongs to no ledger. Only
    entries have `last_add_confirmed` and `length` (None for one that ends before), and only entries of V2 a
    `digest_type`. `body` is the whole record after the size field; in entry logs its location is `offset` + 4.
    """

    offset: int
    record_size: int
    type: RecordType
    ledger: LedgerId
    entry_id: int
    last_add_confirmed: int | None
    length: int | None
    format_version: int
    digest_type: DigestType | None
    body: bytes

    def payload_offset(self, digest_type: DigestType | None = None) -> int | None:
        """Return the bytes of `body` before the payload; None unless it is an entry, of V2 or with `digest_type`."""
        if self.type is not RecordType.ENTRY or self.length is None:
            return None
        if self.format_version == 2:
            offset = HEADER_SIZE_V2 + (0 if self.digest_type is None else self.digest_type.code_length)
        elif digest_type is None:
            return None
        else:
            offset = HEADER_SIZE_V1 + digest_type.code_length
        return offset if offset <= self.record_size else None

    def payload_size(self, digest_type: DigestType | None = None) -> int | None:
        """Return the size of the payload in bytes, None where `payload_offset` is None."""
        offset = self.payload_offset(digest_type)
        return None if offset is None else self.record_size - offset

    def payload(self, digest_type: DigestType | None = None) -> bytes | None:
        """Return the payload, None where `payload_offset` is None."""
        offset = self.payload_offset(digest_type)
        return None if offset is None else self.body[offset:]

    @property
    def special_payload(self) -> bytes:
        """Return the key of a ledgerKey record, or the packet of an explicitLac record.

        Raises CorruptRecord when its length field does not fit.
        """
        body, offset = self.body, self.offset
        at = IDS_V1.size if body[:1] < b"\x80" else IDS_V2.size
        if len(body) < at + 4:
            raise CorruptRecord(f"Record of {len(body)} bytes ends before its key or packet", offset=offset)
        (size,) = RECORD_SIZE.unpack_from(body, at)
        if not 0 <= size <= len(body) - at - 4:
            raise CorruptRecord(f"Record says {size} bytes of key or packet", offset=offset)
        return body[at + 4 : at + 4 + size]

    @property
    def lac(self) -> int | None:
        """Return the last add confirmed of an entry, or of an explicitLac record; None where it cannot be read."""
        if self.type is not RecordType.EXPLICIT_LAC:
            return self.last_add_confirmed
        try:
            return read_lac_header(self.special_payload).last_add_confirmed
        except (Corrupt, Unsupported):
            return None


_new_record = tuple.__new__
_make_id = LedgerId._make
_ENTRY = RecordType.ENTRY


def read_record(buffer: bytes, begin: int, size: int, offset: int, where: str = "") -> Record:
    """Return the record whose body is the `size` bytes of `buffer` from `begin`; its size field is at file `offset`.

    Raises CorruptRecord for a body too short for its ids, Unsupported for a flags byte of another format version.
    """
    body = buffer[begin : begin + size]
    if size < BODY_SIZE_MIN:
        raise CorruptRecord(
            f"Record of {size} bytes is too short for a ledger and an entry id", offset=offset, where=where
        )
    flags = body[0]
    if flags < 0x80:
        if size >= HEADER_SIZE_V1:
            ledger_id, entry_id, lac, length = ENTRY_V1.unpack_from(body)
            if entry_id >= 0:
                ledger = _make_id((0, ledger_id))
                return _new_record(Record, (offset, size, _ENTRY, ledger, entry_id, lac, length, 1, None, body))
        else:
            ledger_id, entry_id = IDS_V1.unpack_from(body)
        record_type = _ENTRY if entry_id >= 0 else _SPECIAL_TYPES.get(entry_id, RecordType.UNKNOWN)
        short_lac = lac_of(body) if record_type is _ENTRY and size >= HEADER_SIZE_V1 - LENGTH_FIELD_SIZE else None
        return Record(offset, size, record_type, _make_id((0, ledger_id)), entry_id, short_lac, None, 1, None, body)
    if flags == 0xFF:
        _, entry_id = IDS_V1.unpack_from(body)
        if body[:8] == b"\xff" * 8:
            record_type = RecordType.LEDGERS_MAP if entry_id == LEDGERS_MAP_ENTRY_ID else RecordType.PADDING
            return Record(offset, size, record_type, NO_LEDGER, entry_id, None, None, 1, None, body)
    digest_type = digest_of_flags(flags, offset, where)
    if size < IDS_V2.size:
        raise CorruptRecord(f"Record of {size} bytes is too short for a scoped ledger id", offset=offset, where=where)
    if size >= HEADER_SIZE_V2:
        _, scope_id, ledger_id, entry_id, lac, length = ENTRY_V2.unpack_from(body)
        if entry_id >= 0:
            ledger = _make_id((scope_id, ledger_id))
            return _new_record(Record, (offset, size, _ENTRY, ledger, entry_id, lac, length, 2, digest_type, body))
    else:
        _, scope_id, ledger_id, entry_id = IDS_V2.unpack_from(body)
    record_type = _ENTRY if entry_id >= 0 else _SPECIAL_TYPES.get(entry_id, RecordType.UNKNOWN)
    short_lac = lac_of(body) if record_type is _ENTRY and size >= HEADER_SIZE_V2 - LENGTH_FIELD_SIZE else None
    return Record(
        offset, size, record_type, _make_id((scope_id, ledger_id)), entry_id, short_lac, None, 2, digest_type, body
    )


def write_ids(ledger: LedgerId, entry_id: int) -> bytes:
    """Return the ids that begin a special record: 16 bytes in scope 0, else the flags byte 0xA0 and 24 bytes."""
    if ledger.is_scoped:
        return IDS_V2.pack(0xA0, ledger.scope_id, ledger.ledger_id, entry_id)
    return IDS_V1.pack(ledger.ledger_id, entry_id)


def contradicts_size(start: bytes, size: int) -> bool:
    """Return whether an entry that begins with `start` is too small for `size` bytes: its whole ledger has fewer."""
    try:
        record = read_record(start, 0, len(start), 0)
    except BkctlError:
        return False
    return record.length is not None and size - OVERHEAD_SIZE_MAX > max(record.length, 0)
