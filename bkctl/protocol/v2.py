"""Protocol v2: fixed-width packets, scope 0 only. Requests and responses ↔ frames, both directions.

Frame: length i32 (of what follows) ‖ header i32 (`version << 24 | opcode << 16 | flags`) ‖ packet. All big-endian.

| packet | after the header |
| --- | --- |
| add request | master key [20] ‖ entry |
| read request | ledger u64 ‖ entry i64 ‖ master key [20] when fencing |
| batch read request | ledger u64 ‖ entry i64 ‖ request id i64 ‖ count i32 ‖ size i64 ‖ master key [20] when fencing |
| add, read response | code i32 ‖ ledger u64 ‖ entry i64 ‖ the entry (read, code 0) |
| batch read response | code i32 ‖ ledger u64 ‖ entry i64 ‖ request id i64 ‖ (size i32 ‖ entry)* |
| authentication | AuthMessage (protobuf), in both directions |

Source: BookieProtocol, BookieProtoEncoding.RequestEnDeCoderPreV3 and ResponseEnDeCoderPreV3.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from bkctl.errors import IllegalOperation, ProtocolError, UsageError
from bkctl.ids import LedgerId
from bkctl.protocol import v3
from bkctl.protocol.messages import (
    MASTER_KEY_SIZE_BYTES,
    AddRequest,
    AddResponse,
    AuthMessage,
    AuthResponse,
    BareResponse,
    BatchReadRequest,
    BatchReadResponse,
    BytesLike,
    ReadRequest,
    ReadResponse,
    Request,
    Response,
    Status,
)

VERSION: Final = 2
ADD_ENTRY, READ_ENTRY, AUTH, BATCH_READ_ENTRY = 1, 2, 3, 7
DO_FENCING, RECOVERY_ADD, HIGH_PRIORITY = 0x0001, 0x0002, 0x0004

#: Key that a request shares with its response, because v2 has no transaction id: operation, then two ids.
Key: TypeAlias = tuple[int, int, int]

#: The headers of plain adds and reads, and of their responses.
ADD_HEAD: Final = VERSION << 24 | ADD_ENTRY << 16
READ_HEAD: Final = VERSION << 24 | READ_ENTRY << 16
#: Frame length, header, code, ledger, entry.
RESPONSE: Final = struct.Struct(">iIiQq")
_BATCH_HEAD: Final = VERSION << 24 | BATCH_READ_ENTRY << 16
_AUTH_HEAD: Final = VERSION << 24 | AUTH << 16
_AUTH_KEY: Final = (AUTH, 0, 0)

_U32: Final = struct.Struct(">I")
_PREFIX: Final = struct.Struct(">iI")  # frame length, header
_ADD_REQUEST: Final = struct.Struct(">iI20s")
_READ_REQUEST: Final = struct.Struct(">iIQq")
_BATCH_REQUEST: Final = struct.Struct(">iIQqqiq")
_IDS: Final = struct.Struct(">Qq")
_BATCH_FIELDS: Final = struct.Struct(">Qqqiq")
_RESPONSE_FIELDS: Final = struct.Struct(">IiQq")
_BATCH_RESPONSE: Final = struct.Struct(">iIiQqq")
_I64: Final = struct.Struct(">q")
_SIZE: Final = struct.Struct(">i")

_EOK: Final = Status.EOK
# Creates a LedgerId without its range check, which halves that were just read as u64 do not need.
_new = tuple.__new__


def encode_request(request: Request, out: list[BytesLike]) -> tuple[Key, int]:
    """Append the frame of `request` to `out`, and return its key and the frame's size in bytes.

    Raises, with nothing appended, IllegalOperation when v2 cannot carry `request` (a scope other than 0, or an
    operation of v3 only), and UsageError for a master key that is missing or not 20 bytes long.
    """
    if isinstance(request, AddRequest | ReadRequest | BatchReadRequest) and request[0][0]:
        raise IllegalOperation(
            f"Protocol v2 cannot carry a ledger scope, and ledger {request.ledger} has one", hint="use v3"
        )
    if isinstance(request, ReadRequest):
        (_, ledger_id), entry_id, master_key, fence, high_priority, previous_lac, _, piggyback = request
        if previous_lac is not None or piggyback:
            raise IllegalOperation("Protocol v2 has no long poll", hint="use v3")
        key = _checked_key(master_key) if fence else b""
        head = READ_HEAD | high_priority << 2 | fence * DO_FENCING
        out.append(_READ_REQUEST.pack(20 + len(key), head, ledger_id, entry_id) + key)
        return (READ_ENTRY, ledger_id, entry_id), 24 + len(key)
    if isinstance(request, AddRequest):
        (_, ledger_id), entry_id, master_key, body, recovery_add, high_priority, deferred_sync = request
        if deferred_sync:
            raise IllegalOperation("Protocol v2 has no deferred sync", hint="use v3")
        head = ADD_HEAD | recovery_add << 1 | high_priority << 2
        pieces = body if isinstance(body, tuple) else (body,)
        size = 24 + sum(map(len, pieces))
        out.append(_ADD_REQUEST.pack(size, head, _checked_key(master_key)))
        out += pieces
        return (ADD_ENTRY, ledger_id, entry_id), size + 4
    if isinstance(request, BatchReadRequest):
        flags = request.fence * DO_FENCING | request.high_priority * HIGH_PRIORITY
        key = _checked_key(request.master_key) if request.fence else b""
        size = _BATCH_REQUEST.size - 4 + len(key)
        _, ledger_id = request.ledger
        fields = (ledger_id, request.entry_id, request.request_id, request.max_count, request.max_size)
        out.append(_BATCH_REQUEST.pack(size, _BATCH_HEAD | flags, *fields) + key)
        return (BATCH_READ_ENTRY, request.request_id, 0), 4 + size
    if isinstance(request, AuthMessage):
        message = v3.encode_auth(request)
        out.append(_PREFIX.pack(4 + len(message), _AUTH_HEAD) + message)
        return _AUTH_KEY, 8 + len(message)
    raise IllegalOperation(f"Protocol v2 has no {type(request).__name__}", hint="use v3")


def _checked_key(master_key: bytes | None) -> bytes:
    if master_key is None or len(master_key) != MASTER_KEY_SIZE_BYTES:
        size = 0 if master_key is None else len(master_key)
        raise UsageError(f"A master key has {MASTER_KEY_SIZE_BYTES} bytes, not {size}")
    return master_key


def decode_response(buffer: memoryview, at: int, end: int) -> tuple[Key, Response]:
    """Return the key and the response whose body is `buffer[at:end]`. Entries are views of `buffer`.

    Raises ProtocolError when the bytes are not a response, or carry a code that v2 does not have.
    """
    if end - at < 24:
        return _decode_other_response(buffer, at, end)
    head, code, ledger_id, entry_id = _RESPONSE_FIELDS.unpack_from(buffer, at)
    opcode = head >> 16 & 0xFF
    if opcode == AUTH:
        return _decode_other_response(buffer, at, end)
    status = _EOK if code == 0 else _status(code)
    ledger = _new(LedgerId, (0, ledger_id))
    if opcode == READ_ENTRY:
        body = buffer[at + 24 : end] if code == 0 else None
        return (opcode, ledger_id, entry_id), _new(ReadResponse, (status, ledger, entry_id, body, None, None))
    if opcode == ADD_ENTRY:
        if end - at != 24:
            raise ProtocolError(f"an add response of {end - at} bytes, not 24")
        return (opcode, ledger_id, entry_id), _new(AddResponse, (status, ledger, entry_id))
    if opcode == BATCH_READ_ENTRY:
        if end - at < 32:
            raise ProtocolError(f"a batch read response of {end - at} bytes")
        (request_id,) = _I64.unpack_from(buffer, at + 24)
        bodies = _split(buffer, at + 32, end) if code == 0 else ()
        return (opcode, request_id, 0), BatchReadResponse(status, ledger, entry_id, request_id, bodies)
    return _decode_other_response(buffer, at, end)


def _decode_other_response(buffer: memoryview, at: int, end: int) -> tuple[Key, Response]:
    if end - at < 4:
        raise ProtocolError(f"a v2 response of {end - at} bytes")
    opcode = buffer[at + 1]
    if opcode != AUTH:
        raise ProtocolError(f"a v2 response of {end - at} bytes with opcode {opcode}")
    return _AUTH_KEY, AuthResponse(_EOK, *v3.decode_auth(buffer[at + 4 : end]))


def _status(code: int) -> Status:
    status = Status.from_v2(code)
    if status is None:
        raise ProtocolError(f"return code {code}, which v2 does not have")
    return status


def _split(buffer: memoryview, at: int, end: int) -> tuple[memoryview, ...]:
    bodies = []
    while at < end:
        if end - at < 4:
            raise ProtocolError("a batch read response that ends inside an entry's size")
        (size,) = _SIZE.unpack_from(buffer, at)
        at += 4
        if not 0 <= size <= end - at:
            raise ProtocolError(f"a batch read response with an entry of {size} bytes where {end - at} are left")
        bodies.append(buffer[at : at + size])
        at += size
    return tuple(bodies)


class Packet(NamedTuple):
    """A v2 request as a bookie gets it. `head` is the response's header: version and opcode, flags 0."""

    head: int
    request: Request


def decode_request(buffer: memoryview, at: int, end: int) -> Packet:
    """Return the request whose body is `buffer[at:end]`; an add's entry is a view of `buffer`.

    Raises ProtocolError when the bytes are not a v2 request: the bookie closes such a connection without an answer.
    """
    if end - at < 4:
        raise ProtocolError(f"a v2 request of {end - at} bytes")
    (head,) = _U32.unpack_from(buffer, at)
    version, opcode, flags = head >> 24, head >> 16 & 0xFF, head & 0xFFFF
    if version == 0:
        opcode, flags = head & 0xFF, 0
    head = version << 24 | opcode << 16
    fence, is_urgent = flags & DO_FENCING != 0, flags & HIGH_PRIORITY != 0
    at += 4
    if opcode == ADD_ENTRY:
        if end - at < 36:
            raise ProtocolError(f"an add request of {end - at + 4} bytes has no entry")
        key = bytes(buffer[at : at + 20])
        at += 20
        ledger_id, entry_id = _IDS.unpack_from(buffer, at)
        ledger = _new(LedgerId, (0, ledger_id))
        # AddRequest's fields in order; its own constructor takes twice as long.
        fields = (ledger, entry_id, key, buffer[at:end], flags & RECOVERY_ADD != 0, is_urgent, False)
        return _new(Packet, (head, _new(AddRequest, fields)))
    if opcode == READ_ENTRY:
        if end - at < 16:
            raise ProtocolError(f"a read request of {end - at + 4} bytes")
        ledger_id, entry_id = _IDS.unpack_from(buffer, at)
        master_key = _fencing_key(buffer, at + 16, end, version) if fence else None
        read_fields = (_new(LedgerId, (0, ledger_id)), entry_id, master_key, fence, is_urgent, None, None, False)
        return _new(Packet, (head, _new(ReadRequest, read_fields)))
    if opcode == BATCH_READ_ENTRY:
        if end - at < 36:
            raise ProtocolError(f"a batch read request of {end - at + 4} bytes")
        ledger_id, *ids = _BATCH_FIELDS.unpack_from(buffer, at)
        batch_key = _fencing_key(buffer, at + 36, end, version) if fence else None
        batch_fields = (_new(LedgerId, (0, ledger_id)), *ids, batch_key, fence, is_urgent)
        return Packet(head, _new(BatchReadRequest, batch_fields))
    if opcode == AUTH:
        return Packet(head, v3.decode_auth(buffer[at:end]))
    raise ProtocolError(f"a v2 request with opcode {opcode}")


def _fencing_key(buffer: memoryview, at: int, end: int, version: int) -> bytes | None:
    if version < 2:
        return None
    if end - at < MASTER_KEY_SIZE_BYTES:
        raise ProtocolError(f"a fencing read with a master key of {end - at} bytes")
    return bytes(buffer[at : at + MASTER_KEY_SIZE_BYTES])


def encode_response(head: int, response: Response, out: list[BytesLike]) -> int:
    """Append the frame of `response` to a packet with `head` to `out`, and return its size in bytes.

    A BareResponse has no form in v2: raises IllegalOperation (the bookie closes the connection instead).
    """
    if isinstance(response, AddResponse):
        status, ledger, entry_id = response
        out.append(RESPONSE.pack(24, head, 0 if status is _EOK else status.v2, ledger[1], entry_id))
        return 28
    if isinstance(response, ReadResponse):
        status, ledger, entry_id, body, _, _ = response
        if status is _EOK and body is not None:
            size = len(body)
            out.append(RESPONSE.pack(24 + size, head, 0, ledger[1], entry_id))
            out.append(body)
            return 28 + size
        out.append(RESPONSE.pack(24, head, status.v2, ledger[1], entry_id))
        return 28
    if isinstance(response, BatchReadResponse):
        bodies: Sequence[BytesLike] = response.bodies if response.status is _EOK else ()
        size = 32 + sum(map(len, bodies)) + 4 * len(bodies)
        fields = (response.status.v2, response.ledger[1], response.entry_id, response.request_id)
        out.append(_BATCH_RESPONSE.pack(size, head, *fields))
        for entry in bodies:
            out += (_SIZE.pack(len(entry)), entry)
        return 4 + size
    if isinstance(response, AuthResponse):
        message = v3.encode_auth(AuthMessage(response.plugin_name, response.payload))
        out.append(_PREFIX.pack(4 + len(message), head) + message)
        return 8 + len(message)
    what = f"status {response.status.name}" if isinstance(response, BareResponse) else type(response).__name__
    raise IllegalOperation(f"Protocol v2 has no answer of the kind {what}")
