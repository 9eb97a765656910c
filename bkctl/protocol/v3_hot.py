"""The plain adds and reads of protocol v3 without protobuf: about twice as fast, and entries are not copied.

Messages in any other form than the ones below give None (or 0), and `v3.py` uses protobuf for them.

| message | form: protobuf fields in the order of their numbers, each once |
| --- | --- |
| any | `0A` size, header: `08 03` version, `10` operation, `18` txnId |
| request | `A2 06` (read) or `AA 06` (add) size, nested message to the end |
| read request | `08` ledgerId, `10` entryId, [`78` ledgerScopeId] |
| add request | `08` ledgerId, `10` entryId, `1A 14` masterKey [20], `22` size body, [`78` ledgerScopeId] |
| response | `10 00` status EOK, `A2 06` (read) or `AA 06` (add) size, nested message to the end |
| read response | `08 00` status EOK, `10` ledgerId, `18` entryId, `22` size body, [`28` maxLAC], [`78` ledgerScopeId] |
| add response | `08 00` status EOK, `10` ledgerId, `18` entryId, [`78` ledgerScopeId] |

Source: protobuf's encoding of BookkeeperProtocol.proto, as Apache's and our own encoders write it.
"""

from __future__ import annotations

import functools
import struct
from typing import Final

from bkctl.ids import I64_MAX, U64_MAX, LedgerId, to_signed
from bkctl.protocol.messages import (
    MASTER_KEY_SIZE_BYTES,
    AddRequest,
    AddResponse,
    BytesLike,
    ReadRequest,
    ReadResponse,
    Status,
)

_LENGTH: Final = struct.Struct(">i")
_ALL_CONTINUED: Final = 0x8080808080808080
_HEAD: Final = struct.Struct(">BBIB")  # 0A, header size, 08 03 10 operation, 18
_HEAD_REQUIRED: Final = 0x08031000
_READ, _ADD = 1, 2
_BYTE: Final = tuple(bytes((value,)) for value in range(256))
# Bytes before the transaction id, by the id's size in bytes.
_READ_HEAD: Final = tuple(bytes((0x0A, 5 + size, 0x08, 0x03, 0x10, _READ, 0x18)) for size in range(11))
_ADD_HEAD: Final = tuple(bytes((0x0A, 5 + size, 0x08, 0x03, 0x10, _ADD, 0x18)) for size in range(11))
_EOK: Final = Status.EOK
# Creates a LedgerId without its range check: the decoded halves are u64 already.
_new = tuple.__new__


def varint(value: int) -> bytes:
    """Return `value` (unsigned) as protobuf writes it: 7 bits a byte, the lowest first."""
    if value < 0x80:
        return _BYTE[value]
    if value < 0x4000:
        return bytes((value & 127 | 128, value >> 7))
    if value < 0x200000:
        return bytes((value & 127 | 128, value >> 7 & 127 | 128, value >> 14))
    if value < 0x10000000:
        return bytes((value & 127 | 128, value >> 7 & 127 | 128, value >> 14 & 127 | 128, value >> 21))
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


@functools.lru_cache(1024)
def _field(tag: int, value: int) -> bytes:
    """Return a varint field whose value repeats: a ledger or scope id."""
    return _BYTE[tag] + varint(value)


@functools.lru_cache(1024)
def _gather(word: int) -> int:
    """Join the lower 7 bits of each of 8 bytes. Numbers this long are ids from UUIDs, which repeat."""
    word &= 0x7F7F7F7F7F7F7F7F
    word = word & 0x007F007F007F007F | word >> 1 & 0x3F803F803F803F80
    word = word & 0x00003FFF00003FFF | word >> 2 & 0x0FFFC0000FFFC000
    return word & 0x0FFFFFFF | word >> 4 & 0x00FFFFFFF0000000


def read_varint(buffer: memoryview, at: int) -> tuple[int, int]:
    """Return the varint at `at` (below 2^64) and the offset behind it.

    Raises ValueError for one of more than 64 bits, IndexError at the end of `buffer`.
    """
    first = buffer[at]
    if first < 128:
        return first, at + 1
    second = buffer[at + 1]
    if second < 128:
        return first & 127 | second << 7, at + 2
    third = buffer[at + 2]
    if third < 128:
        return first & 127 | (second & 127) << 7 | third << 14, at + 3
    fourth = buffer[at + 3]
    if fourth < 128:
        return first & 127 | (second & 127) << 7 | (third & 127) << 14 | fourth << 21, at + 4
    word = int.from_bytes(buffer[at : at + 8], "little")
    if word & _ALL_CONTINUED == _ALL_CONTINUED:
        word = _gather(word)
        ninth = buffer[at + 8]
        if ninth < 128:
            return word | ninth << 56, at + 9
        tenth = buffer[at + 9]
        if tenth > 1:
            raise ValueError("a varint of more than 64 bits")
        return word | (ninth & 127) << 56 | tenth << 63, at + 10
    value = shift = 0
    while (byte := buffer[at]) > 127:
        value |= (byte & 127) << shift
        shift += 7
        at += 1
    return value | byte << shift, at + 1


def encode_add(txn_id: int, request: AddRequest, out: list[BytesLike]) -> int:
    """Append a plain add's frame to `out`, and return its size; 0 for an add that is not plain."""
    (scope_id, ledger_id), entry_id, master_key, body, recovery_add, high_priority, deferred_sync = request
    if recovery_add or high_priority or deferred_sync or entry_id < 0 or len(master_key) != MASTER_KEY_SIZE_BYTES:
        return 0
    if isinstance(body, tuple):
        size = sum(map(len, body))
    else:
        size = len(body)
        body = (body,)
    tail = _field(0x78, scope_id) if scope_id else b""
    txn, ledger, entry, body_size = varint(txn_id), _field(0x08, ledger_id), varint(entry_id), varint(size)
    nested_size = 24 + len(ledger) + len(entry) + len(body_size) + size + len(tail)
    nested = varint(nested_size)
    frame_size = 9 + len(txn) + len(nested) + nested_size
    front = (_LENGTH.pack(frame_size), _ADD_HEAD[len(txn)], txn, b"\xaa\x06", nested)
    out.append(b"".join((*front, ledger, b"\x10", entry, b"\x1a\x14", master_key, b"\x22", body_size)))
    out += body
    if tail:
        out.append(tail)
    return 4 + frame_size


def encode_read(txn_id: int, request: ReadRequest, out: list[BytesLike]) -> int:
    """Append a plain read's frame to `out`, and return its size; 0 for a read that is not plain."""
    (scope_id, ledger_id), entry_id, master_key, fence, high_priority, previous_lac, timeout_ms, piggyback = request
    if (
        entry_id < 0
        or master_key is not None
        or fence
        or high_priority
        or previous_lac is not None
        or timeout_ms is not None
        or piggyback
    ):
        return 0
    tail = _field(0x78, scope_id) if scope_id else b""
    nested = b"%b\x10%b%b" % (_field(0x08, ledger_id), varint(entry_id), tail)
    txn = varint(txn_id)
    frame = b"\x0a%b\x08\x03\x10\x01\x18%b\xa2\x06%b%b" % (_BYTE[5 + len(txn)], txn, _BYTE[len(nested)], nested)
    out.append(_LENGTH.pack(len(frame)) + frame)
    return 4 + len(frame)


def decode_request(buffer: memoryview, at: int, end: int) -> tuple[int, int, AddRequest | ReadRequest] | None:
    """Return transaction id, operation and request of a plain add or read; the entry is a view of `buffer`."""
    try:
        tag, header_size, fields, txn_tag = _HEAD.unpack_from(buffer, at)
        operation = fields & 0xFF
        if tag != 0x0A or txn_tag != 0x18 or fields & 0xFFFFFF00 != _HEAD_REQUIRED or not _READ <= operation <= _ADD:
            return None
        header_end = at + 2 + header_size
        txn_id, at = read_varint(buffer, at + 7)
        if at != header_end or buffer[at + 1] != 0x06:
            return None
        nested_tag = buffer[at]
        size, at = read_varint(buffer, at + 2)
        if at + size != end or buffer[at] != 0x08:
            return None
        ledger_id, at = read_varint(buffer, at + 1)
        if buffer[at] != 0x10:
            return None
        entry_id, at = read_varint(buffer, at + 1)
        if entry_id > I64_MAX:
            return None
        scope_id = 0
        if operation == _READ:
            if nested_tag != 0xA2:
                return None
            if at != end:
                if buffer[at] != 0x78:
                    return None
                scope_id, at = read_varint(buffer, at + 1)
                if at != end:
                    return None
            ledger = _new(LedgerId, (scope_id, ledger_id))
            return txn_id, _READ, _new(ReadRequest, (ledger, entry_id, None, False, False, None, None, False))
        if nested_tag != 0xAA or buffer[at] != 0x1A or buffer[at + 1] != 0x14 or buffer[at + 22] != 0x22:
            return None
        master_key = bytes(buffer[at + 2 : at + 22])
        size, at = read_varint(buffer, at + 23)
        body_end = at + size
        if body_end != end:
            if body_end > end or buffer[body_end] != 0x78:
                return None
            scope_id, tail_end = read_varint(buffer, body_end + 1)
            if tail_end != end:
                return None
        ledger = _new(LedgerId, (scope_id, ledger_id))
        body = buffer[at:body_end]
        return txn_id, _ADD, _new(AddRequest, (ledger, entry_id, master_key, body, False, False, False))
    except (IndexError, ValueError, struct.error):
        return None


def encode_add_response(txn_id: int, response: AddResponse, scope_id: int, out: list[BytesLike]) -> int:
    """Append a successful add's answer to `out`, and return its size; 0 for an answer that is not plain."""
    status, (_, ledger_id), entry_id = response
    if status is not _EOK or entry_id < 0:
        return 0
    tail = _field(0x78, scope_id) if scope_id else b""
    nested = b"\x08\x00%b\x18%b%b" % (_field(0x10, ledger_id), varint(entry_id), tail)
    txn = varint(txn_id)
    frame = b"\x0a%b\x08\x03\x10\x02\x18%b\x10\x00\xaa\x06%b%b" % (_BYTE[5 + len(txn)], txn, _BYTE[len(nested)], nested)
    out.append(_LENGTH.pack(len(frame)) + frame)
    return 4 + len(frame)


def encode_read_response(txn_id: int, response: ReadResponse, scope_id: int, out: list[BytesLike]) -> int:
    """Append a successful read's answer to `out`, and return its size; 0 for an answer that is not plain."""
    status, (_, ledger_id), entry_id, body, max_lac, timestamp = response
    if status is not _EOK or entry_id < 0 or body is None or timestamp is not None:
        return 0
    tail = b"" if max_lac is None else _field(0x28, max_lac & U64_MAX)
    if scope_id:
        tail += _field(0x78, scope_id)
    size = len(body)
    txn, ledger, entry, body_size = varint(txn_id), _field(0x10, ledger_id), varint(entry_id), varint(size)
    nested_size = 4 + len(ledger) + len(entry) + len(body_size) + size + len(tail)
    nested = varint(nested_size)
    frame_size = 11 + len(txn) + len(nested) + nested_size
    front = (_LENGTH.pack(frame_size), _READ_HEAD[len(txn)], txn, b"\x10\x00\xa2\x06", nested)
    out.append(b"".join((*front, b"\x08\x00", ledger, b"\x18", entry, b"\x22", body_size)))
    out.append(body)
    if tail:
        out.append(tail)
    return 4 + frame_size


def decode_response(buffer: memoryview, at: int, end: int) -> tuple[int, int, AddResponse | ReadResponse] | None:
    """Return transaction id, operation and response of a successful add or read; the entry is a view of `buffer`."""
    try:
        tag, header_size, fields, txn_tag = _HEAD.unpack_from(buffer, at)
        operation = fields & 0xFF
        if tag != 0x0A or txn_tag != 0x18 or fields & 0xFFFFFF00 != _HEAD_REQUIRED or not _READ <= operation <= _ADD:
            return None
        header_end = at + 2 + header_size
        txn_id, at = read_varint(buffer, at + 7)
        if at != header_end or buffer[at] != 0x10 or buffer[at + 1] != 0 or buffer[at + 3] != 0x06:
            return None
        nested_tag = buffer[at + 2]
        size, at = read_varint(buffer, at + 4)
        if at + size != end or buffer[at] != 0x08 or buffer[at + 1] != 0 or buffer[at + 2] != 0x10:
            return None
        ledger_id, at = read_varint(buffer, at + 3)
        if buffer[at] != 0x18:
            return None
        entry_id, at = read_varint(buffer, at + 1)
        if entry_id > I64_MAX:
            return None
        scope_id = 0
        if operation == _ADD:
            if nested_tag != 0xAA:
                return None
            if at != end:
                if buffer[at] != 0x78:
                    return None
                scope_id, at = read_varint(buffer, at + 1)
                if at != end:
                    return None
            return txn_id, _ADD, _new(AddResponse, (_EOK, _new(LedgerId, (scope_id, ledger_id)), entry_id))
        if nested_tag != 0xA2 or at >= end or buffer[at] != 0x22:
            return None
        size, at = read_varint(buffer, at + 1)
        body_end = at + size
        if body_end > end:
            return None
        body = buffer[at:body_end]
        at = body_end
        max_lac = None
        if at != end and buffer[at] == 0x28:
            # -1 if the bookie served no add of the ledger since its start.
            max_lac, at = read_varint(buffer, at + 1)
            max_lac = to_signed(max_lac)
        if at != end:
            if buffer[at] != 0x78:
                return None
            scope_id, at = read_varint(buffer, at + 1)
            if at != end:
                return None
        ledger = _new(LedgerId, (scope_id, ledger_id))
        return txn_id, _READ, _new(ReadResponse, (_EOK, ledger, entry_id, body, max_lac, None))
    except (IndexError, ValueError, struct.error):
        return None
