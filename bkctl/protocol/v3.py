"""Protocol v3: protobuf messages with a transaction id, and BP-35's ledger scope id. Both directions.

Frame: length i32 (of what follows, big-endian) ‖ serialized `Request` or `Response` of `bookkeeper_protocol.proto`.
Source: BookkeeperProtocol.proto, RequestEnDecoderV3 and ResponseEnDecoderV3; field 15 (`ledgerScopeId`) is BP-35's.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from bkctl.errors import IllegalOperation, ProtocolError
from bkctl.ids import LedgerId, to_signed, to_unsigned
from bkctl.protocol import bookkeeper_protocol_pb2 as pb
from bkctl.protocol import v3_hot
from bkctl.protocol.messages import (
    HIGH_PRIORITY,
    AddRequest,
    AddResponse,
    AuthMessage,
    AuthResponse,
    BareResponse,
    BookieInfoRequest,
    BookieInfoResponse,
    BytesLike,
    ForceLedgerRequest,
    ForceLedgerResponse,
    ListEntriesRequest,
    ListEntriesResponse,
    ReadLacRequest,
    ReadLacResponse,
    ReadRequest,
    ReadResponse,
    Request,
    Response,
    StartTlsRequest,
    StartTlsResponse,
    Status,
    WriteLacRequest,
    WriteLacResponse,
)

VERSION: Final = 3
READ_ENTRY, ADD_ENTRY, AUTH, WRITE_LAC, READ_LAC, GET_BOOKIE_INFO, START_TLS, FORCE_LEDGER, LIST_ENTRIES = (
    1, 2, 5, 6, 7, 8, 9, 10, 11,
)  # fmt: skip
FENCE_LEDGER, ENTRY_PIGGYBACK = 1, 2
RECOVERY_ADD = 1
DEFERRED_SYNC = 1

OPERATIONS: Final[dict[type, int]] = {
    ReadRequest: READ_ENTRY,
    AddRequest: ADD_ENTRY,
    AuthMessage: AUTH,
    WriteLacRequest: WRITE_LAC,
    ReadLacRequest: READ_LAC,
    BookieInfoRequest: GET_BOOKIE_INFO,
    StartTlsRequest: START_TLS,
    ForceLedgerRequest: FORCE_LEDGER,
    ListEntriesRequest: LIST_ENTRIES,
}

_LENGTH: Final = struct.Struct(">i")
_STATUSES: Final[dict[int, Status]] = {int(status): status for status in Status}
_EOK: Final = Status.EOK
_new = tuple.__new__


def _join(body: BytesLike | tuple[BytesLike, ...]) -> bytes:
    return b"".join(body) if isinstance(body, tuple) else bytes(body)


def encode_request(txn_id: int, request: Request, out: list[BytesLike]) -> int:
    """Append the frame of `request` to `out`; returns its size in bytes.

    Raises IllegalOperation for a batch read, which v3 does not have, and for a read that is to fence and to piggyback.
    """
    size = 0
    if type(request) is AddRequest:
        size = v3_hot.encode_add(txn_id, request, out)
    elif type(request) is ReadRequest:
        size = v3_hot.encode_read(txn_id, request, out)
    return size or encode_request_protobuf(txn_id, request, out)


def encode_request_protobuf(txn_id: int, request: Request, out: list[BytesLike]) -> int:
    """`encode_request` for every request, by protobuf."""
    operation = OPERATIONS.get(type(request))
    if operation is None:
        raise IllegalOperation("Protocol v3 has no batch read", hint="use v2, or pipelined reads")
    message = pb.Request()
    header = message.header
    header.version, header.operation, header.txnId = VERSION, operation, txn_id
    match request:
        case AddRequest():
            add = message.addRequest
            add.ledgerId, add.entryId = request.ledger.signed[1], request.entry_id
            add.masterKey, add.body = request.master_key, _join(request.body)
            if request.deferred_sync:
                add.writeFlags = DEFERRED_SYNC
            if request.recovery_add:
                add.flag = RECOVERY_ADD
            if request.high_priority:
                header.priority = HIGH_PRIORITY
            if request.ledger[0]:
                add.ledgerScopeId = to_signed(request.ledger[0])
        case ReadRequest():
            read = message.readRequest
            read.ledgerId, read.entryId = request.ledger.signed[1], request.entry_id
            if request.master_key is not None:
                read.masterKey = request.master_key
            if request.previous_lac is not None:
                read.previousLAC = request.previous_lac
            if request.timeout_ms is not None:
                read.timeOut = request.timeout_ms
            if request.fence:
                if request.piggyback:
                    raise IllegalOperation("A read can fence or piggyback, not both: v3 has one flag")
                read.flag = FENCE_LEDGER
            elif request.piggyback:
                read.flag = ENTRY_PIGGYBACK
            if request.high_priority:
                header.priority = HIGH_PRIORITY
            if request.ledger[0]:
                read.ledgerScopeId = to_signed(request.ledger[0])
        case WriteLacRequest():
            write_lac = message.writeLacRequest
            write_lac.ledgerId, write_lac.lac = request.ledger.signed[1], request.lac
            write_lac.masterKey, write_lac.body = request.master_key, bytes(request.body)
            if request.ledger[0]:
                write_lac.ledgerScopeId = to_signed(request.ledger[0])
        case ReadLacRequest() | ForceLedgerRequest() | ListEntriesRequest():
            by_ledger: pb.ReadLacRequest | pb.ForceLedgerRequest | pb.GetListOfEntriesOfLedgerRequest
            if isinstance(request, ReadLacRequest):
                by_ledger = message.readLacRequest
            elif isinstance(request, ForceLedgerRequest):
                by_ledger = message.forceLedgerRequest
            else:
                by_ledger = message.getListOfEntriesOfLedgerRequest
            by_ledger.ledgerId = request.ledger.signed[1]
            if request.ledger[0]:
                by_ledger.ledgerScopeId = to_signed(request.ledger[0])
        case BookieInfoRequest():
            message.getBookieInfoRequest.requested = request.requested
        case AuthMessage():
            message.authRequest.authPluginName = request.plugin_name
            message.authRequest.payload = request.payload
        case StartTlsRequest():
            message.startTLSRequest.SetInParent()
    body = message.SerializeToString()
    out.append(_LENGTH.pack(len(body)))
    out.append(body)
    return 4 + len(body)


class Answer(NamedTuple):
    """A v3 response as a client gets it. `response` is None when status or form are unknown; `problem` says why."""

    txn_id: int
    operation: int
    response: Response | None
    problem: str = ""


def decode_response(buffer: memoryview, at: int, end: int) -> Answer:
    """The response whose body is `buffer[at:end]`; the body of a plain read is a view of `buffer`.

    Raises ProtocolError when the bytes are no `Response`.
    """
    hot = v3_hot.decode_response(buffer, at, end)
    if hot is not None:
        return _new(Answer, (*hot, ""))
    return decode_response_protobuf(buffer, at, end)


def decode_response_protobuf(buffer: memoryview, at: int, end: int) -> Answer:
    """`decode_response` for every response, by protobuf."""
    message = pb.Response()
    try:
        message.ParseFromString(buffer[at:end])  # type: ignore[arg-type]
    except DecodeError as error:
        raise ProtocolError(f"a v3 response that does not parse ({error})") from error
    if not message.IsInitialized():
        raise ProtocolError("a v3 response without its required fields")
    header = message.header
    txn_id, operation, outer = header.txnId, header.operation, message.status
    name = _NESTED_RESPONSE.get(operation)
    if name is None or not message.HasField(name):
        status = _STATUSES.get(outer)
        if status is None:
            return Answer(txn_id, operation, None, f"status {outer} is unknown")
        if status is _EOK:
            if operation == START_TLS:
                return Answer(txn_id, operation, StartTlsResponse(status))
            return Answer(txn_id, operation, None, "success, but nothing of the operation's own")
        return Answer(txn_id, operation, BareResponse(status))
    if operation == AUTH:
        auth = message.authResponse
        status = _STATUSES.get(outer)
        if status is None:
            return Answer(txn_id, operation, None, f"status {outer} is unknown")
        return Answer(txn_id, operation, AuthResponse(status, auth.authPluginName, auth.payload))
    if operation == START_TLS:
        status = _STATUSES.get(outer)
        if status is None:
            return Answer(txn_id, operation, None, f"status {outer} is unknown")
        return Answer(txn_id, operation, StartTlsResponse(status))
    nested = getattr(message, name)
    number = outer or nested.status
    status = _STATUSES.get(number)
    if status is None:
        return Answer(txn_id, operation, None, f"status {number} is unknown")
    if operation == GET_BOOKIE_INFO:
        info = message.getBookieInfoResponse
        return Answer(
            txn_id,
            operation,
            BookieInfoResponse(
                status,
                info.totalDiskCapacity if info.HasField("totalDiskCapacity") else None,
                info.freeDiskSpace if info.HasField("freeDiskSpace") else None,
            ),
        )
    ledger = LedgerId(to_unsigned(nested.ledgerScopeId), to_unsigned(nested.ledgerId))
    response: Response
    if operation == READ_ENTRY:
        read = message.readResponse
        response = ReadResponse(
            status,
            ledger,
            read.entryId,
            read.body if read.HasField("body") else None,
            read.maxLAC if read.HasField("maxLAC") else None,
            read.lacUpdateTimestamp if read.HasField("lacUpdateTimestamp") else None,
        )
    elif operation == ADD_ENTRY:
        response = AddResponse(status, ledger, message.addResponse.entryId)
    elif operation == WRITE_LAC:
        response = WriteLacResponse(status, ledger)
    elif operation == READ_LAC:
        lac = message.readLacResponse
        response = ReadLacResponse(
            status,
            ledger,
            lac.lacBody if lac.HasField("lacBody") else None,
            lac.lastEntryBody if lac.HasField("lastEntryBody") else None,
        )
    elif operation == FORCE_LEDGER:
        response = ForceLedgerResponse(status, ledger)
    else:
        entries = message.getListOfEntriesOfLedgerResponse
        has_list = entries.HasField("availabilityOfEntriesOfLedger")
        response = ListEntriesResponse(status, ledger, entries.availabilityOfEntriesOfLedger if has_list else None)
    return Answer(txn_id, operation, response)


_NESTED_RESPONSE: Final[dict[int, str]] = {
    READ_ENTRY: "readResponse",
    ADD_ENTRY: "addResponse",
    AUTH: "authResponse",
    WRITE_LAC: "writeLacResponse",
    READ_LAC: "readLacResponse",
    GET_BOOKIE_INFO: "getBookieInfoResponse",
    START_TLS: "startTLSResponse",
    FORCE_LEDGER: "forceLedgerResponse",
    LIST_ENTRIES: "getListOfEntriesOfLedgerResponse",
}

_NESTED_REQUEST: Final[dict[int, str]] = {
    READ_ENTRY: "readRequest",
    ADD_ENTRY: "addRequest",
    AUTH: "authRequest",
    WRITE_LAC: "writeLacRequest",
    READ_LAC: "readLacRequest",
    GET_BOOKIE_INFO: "getBookieInfoRequest",
    START_TLS: "startTLSRequest",
    FORCE_LEDGER: "forceLedgerRequest",
    LIST_ENTRIES: "getListOfEntriesOfLedgerRequest",
}


class Header(NamedTuple):
    """A v3 request's header, which its response repeats."""

    txn_id: int
    operation: int
    version: int = VERSION
    priority: int = 0


class Call(NamedTuple):
    """A v3 request as a bookie gets it; `request` is None when we have no such operation (EBADREQ)."""

    header: Header
    request: Request | None


def decode_request(buffer: memoryview, at: int, end: int) -> Call | None:
    """The request whose body is `buffer[at:end]`; the body of a plain add is a view of `buffer`.

    None when the bytes are no `Request`, so that v2 is to be tried.
    """
    hot = v3_hot.decode_request(buffer, at, end)
    if hot is not None:
        txn_id, operation, request = hot
        return _new(Call, (_new(Header, (txn_id, operation, VERSION, 0)), request))
    return decode_request_protobuf(buffer, at, end)


def decode_request_protobuf(buffer: memoryview, at: int, end: int) -> Call | None:
    """`decode_request` for every request, by protobuf."""
    message = pb.Request()
    try:
        message.ParseFromString(buffer[at:end])  # type: ignore[arg-type]
    except DecodeError:
        return None
    if not message.IsInitialized():
        return None
    head = message.header
    operation, priority = head.operation, head.priority
    header = Header(head.txnId, operation, head.version, priority)
    name = _NESTED_REQUEST.get(operation)
    if name is None or not message.HasField(name):
        return Call(header, None)
    request: Request
    if operation == AUTH:
        request = AuthMessage(message.authRequest.authPluginName, message.authRequest.payload)
        return Call(header, request)
    if operation == START_TLS:
        return Call(header, StartTlsRequest())
    if operation == GET_BOOKIE_INFO:
        return Call(header, BookieInfoRequest(message.getBookieInfoRequest.requested))
    nested = getattr(message, name)
    ledger = LedgerId(to_unsigned(nested.ledgerScopeId), to_unsigned(nested.ledgerId))
    if operation == ADD_ENTRY:
        add = message.addRequest
        request = AddRequest(
            ledger,
            add.entryId,
            add.masterKey,
            memoryview(add.body),
            add.flag == RECOVERY_ADD,
            priority > 0,
            add.writeFlags & DEFERRED_SYNC != 0,
        )
    elif operation == READ_ENTRY:
        read = message.readRequest
        request = ReadRequest(
            ledger,
            read.entryId,
            read.masterKey if read.HasField("masterKey") else None,
            read.flag == FENCE_LEDGER,
            priority > 0,
            read.previousLAC if read.HasField("previousLAC") else None,
            read.timeOut if read.HasField("timeOut") else None,
            read.flag == ENTRY_PIGGYBACK,
        )
    elif operation == WRITE_LAC:
        write_lac = message.writeLacRequest
        request = WriteLacRequest(ledger, write_lac.lac, write_lac.masterKey, write_lac.body)
    elif operation == READ_LAC:
        request = ReadLacRequest(ledger)
    elif operation == FORCE_LEDGER:
        request = ForceLedgerRequest(ledger)
    else:
        request = ListEntriesRequest(ledger)
    return Call(header, request)


def encode_response(header: Header, response: Response, scope_id: int, out: list[BytesLike]) -> int:
    """Append the frame of `response` to the request with `header` to `out`; returns its size in bytes.

    A `scope_id` other than 0 is echoed in the nested message. Raises IllegalOperation for a batch read's answer.
    """
    size = 0
    if type(response) is AddResponse:
        size = v3_hot.encode_add_response(header[0], response, scope_id, out)
    elif type(response) is ReadResponse:
        size = v3_hot.encode_read_response(header[0], response, scope_id, out)
    return size or encode_response_protobuf(header, response, scope_id, out)


def encode_response_protobuf(header: Header, response: Response, scope_id: int, out: list[BytesLike]) -> int:
    """`encode_response` for every response, by protobuf."""
    message = pb.Response()
    head = message.header
    head.version, head.operation, head.txnId = VERSION, header.operation, header.txn_id
    message.status = response.status
    nested: (
        pb.AddResponse
        | pb.ReadResponse
        | pb.WriteLacResponse
        | pb.ReadLacResponse
        | pb.ForceLedgerResponse
        | pb.GetListOfEntriesOfLedgerResponse
    )
    match response:
        case AddResponse():
            message.addResponse.entryId = response.entry_id
            nested = message.addResponse
        case ReadResponse():
            read = message.readResponse
            read.entryId = response.entry_id
            if response.body is not None:
                read.body = bytes(response.body)
            if response.max_lac is not None:
                read.maxLAC = response.max_lac
            if response.lac_update_timestamp_ms is not None:
                read.lacUpdateTimestamp = response.lac_update_timestamp_ms
            nested = read
        case WriteLacResponse():
            nested = message.writeLacResponse
        case ReadLacResponse():
            read_lac = message.readLacResponse
            if response.lac_body is not None:
                read_lac.lacBody = bytes(response.lac_body)
            if response.last_entry_body is not None:
                read_lac.lastEntryBody = bytes(response.last_entry_body)
            nested = read_lac
        case ForceLedgerResponse():
            nested = message.forceLedgerResponse
        case ListEntriesResponse():
            entries = message.getListOfEntriesOfLedgerResponse
            if response.availability is not None:
                entries.availabilityOfEntriesOfLedger = bytes(response.availability)
            nested = entries
        case BookieInfoResponse():
            info = message.getBookieInfoResponse
            info.status = response.status
            if response.total_disk_capacity is not None:
                info.totalDiskCapacity = response.total_disk_capacity
            if response.free_disk_space is not None:
                info.freeDiskSpace = response.free_disk_space
            return _finish(message, out)
        case AuthResponse():
            _repeat(header, head)
            message.authResponse.authPluginName = response.plugin_name
            message.authResponse.payload = response.payload
            return _finish(message, out)
        case StartTlsResponse():
            message.startTLSResponse.SetInParent()
            return _finish(message, out)
        case BareResponse():
            _repeat(header, head)
            return _finish(message, out)
        case _:
            raise IllegalOperation("Protocol v3 has no batch read")
    nested.status = response.status
    nested.ledgerId = to_signed(response.ledger[1])
    if scope_id:
        nested.ledgerScopeId = to_signed(scope_id)
    return _finish(message, out)


def _repeat(header: Header, head: pb.BKPacketHeader) -> None:
    """Bare and authentication answers copy the request's header whole."""
    head.version = header.version
    if header.priority:
        head.priority = header.priority


def _finish(message: pb.Response, out: list[BytesLike]) -> int:
    body = message.SerializeToString()
    out.append(_LENGTH.pack(len(body)))
    out.append(body)
    return 4 + len(body)


def encode_auth(message: AuthMessage) -> bytes:
    """The serialized AuthMessage, as v2 carries it too."""
    return pb.AuthMessage(authPluginName=message.plugin_name, payload=message.payload).SerializeToString()


def decode_auth(data: memoryview) -> AuthMessage:
    """The AuthMessage in `data`. Raises ProtocolError when it is none."""
    message = pb.AuthMessage()
    try:
        message.ParseFromString(data)  # type: ignore[arg-type]
    except DecodeError as error:
        raise ProtocolError("an authentication message that does not parse") from error
    if not message.IsInitialized():
        raise ProtocolError("an authentication message without its fields")
    return AuthMessage(message.authPluginName, message.payload)
