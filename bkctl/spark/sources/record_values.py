"""The columns of single records, and the digest type that an entry matches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from bkctl.errors import Corrupt, Unsupported
from bkctl.formats.entry import HEADER_SIZE_V1, HEADER_SIZE_V2, DigestType, digest_function, read_lac_header
from bkctl.formats.record import NO_LEDGER, Record, RecordType
from bkctl.spark.sources.columns import DAMAGE

#: Digest types that need no password, in the order in which entries of format version 1 are checked.
_CHECKED_TYPES: Final = (DigestType.CRC32C, DigestType.CRC32)
_TYPES_BY_NUMBER: Final = {int(digest_type): digest_type for digest_type in DigestType}


def digest_of_v1(window: bytes, body: int, size: int) -> str | None:
    """Return the name of the digest type without password that an entry of format version 1 matches; else None."""
    payload = body + HEADER_SIZE_V1
    header = window[body:payload]
    end = body + size
    for digest_type in _CHECKED_TYPES:
        at = payload + digest_type.code_length
        if at <= end and digest_function(digest_type)(header, window[at:end]) == window[payload:at]:
            return digest_type.name
    return None


def digest_of_v2(window: bytes, body: int, size: int) -> str | None:
    """Return the name of the digest type in an entry of format version 2 if the entry matches it; else None."""
    digest_type = _TYPES_BY_NUMBER.get(window[body] & 0x0F)
    if digest_type is None or digest_type is DigestType.HMAC:
        return None
    payload = body + HEADER_SIZE_V2
    at, end = payload + digest_type.code_length, body + size
    if at > end or digest_function(digest_type)(window[body:payload], window[at:end]) != window[payload:at]:
        return None
    return digest_type.name


def _last_add_confirmed(record: Record) -> int | None:
    if record.type is not RecordType.EXPLICIT_LAC:
        return record.last_add_confirmed
    try:
        return read_lac_header(record.special_payload).last_add_confirmed
    except (Corrupt, Unsupported):
        return None


def _record_digest(record: Record) -> str | None:
    if record.type is not RecordType.ENTRY or record.length is None:
        return None
    check = digest_of_v1 if record.format_version == 1 else digest_of_v2
    return check(record.body, 0, record.record_size)


#: Column → its value of a record; the digest type of version 1, where given, tells the payload's size.
VALUES: Final[dict[str, Callable[[Record, DigestType | None], Any]]] = {
    "ledgerScopeId": lambda record, _: None if record.ledger is NO_LEDGER else record.ledger.scope_id,
    "ledgerId": lambda record, _: None if record.ledger is NO_LEDGER else record.ledger.ledger_id,
    "ledgerQualifiedName": lambda record, _: None if record.ledger is NO_LEDGER else record.ledger.qualified_name,
    "entryId": lambda record, _: record.entry_id,
    "lastAddConfirmed": lambda record, _: _last_add_confirmed(record),
    "length": lambda record, _: record.length,
    "size": lambda record, digest_type: record.payload_size(digest_type),
    "formatVersion": lambda record, _: record.format_version,
    "offset": lambda record, _: record.offset,
    "recordSize": lambda record, _: record.record_size,
    "type": lambda record, _: record.type.value,
    "digestType": lambda record, _: None if record.digest_type is None else record.digest_type.name,
    "digest": lambda record, _: _record_digest(record),
    "payload": lambda record, digest_type: record.payload(digest_type),
    "record": lambda record, _: record.body,
    "masterKey": lambda record, _: record.special_payload if record.type is RecordType.LEDGER_KEY else None,
    DAMAGE: lambda record, _: None,
}
