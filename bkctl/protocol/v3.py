"""Protocol v3: protobuf messages with a transaction id, and BP-35's ledger scope id. Both directions.

Frame: length i32 (of what follows, big-endian) ‖ serialized `Request` or `Response` of `bookkeeper_protocol.proto`.
`MESSAGES` maps each operation to our values and to protobuf's fields; both directions follow it. Plain adds and reads
take the fast path of `v3_hot.py`.
Source: BookkeeperProtocol.proto, RequestEnDecoderV3 and ResponseEnDecoderV3; field 15 (`ledgerScopeId`) is BP-35's.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple, cast

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

_LENGTH: Final = struct.Struct(">i")
_STATUSES: Final[dict[int, Status]] = {int(status): status for status in Status}
_EOK: Final = Status.EOK
_new = tuple.__new__


class _Field:
    """A value's place in a protobuf message: one field that is always set."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def write(self, message: Any, value: Any) -> None:
        """Set `value` in `message`."""
        setattr(message, self.name, value)

    def read(self, message: Any) -> Any:
        """Return the value that `message` has."""
        return getattr(message, self.name)


class _Optional(_Field):
    """A field that is left out for None."""

    def write(self, message: Any, value: Any) -> None:
        if value is not None:
            setattr(message, self.name, value)

    def read(self, message: Any) -> Any:
        return getattr(message, self.name) if message.HasField(self.name) else None


class _Bytes(_Field):
    """An entry or packet, which may be given in pieces."""

    def write(self, message: Any, value: Any) -> None:
        setattr(message, self.name, b"".join(value) if isinstance(value, tuple) else bytes(value))


class _View(_Bytes):
    """An entry that is received as a view."""

    def read(self, message: Any) -> memoryview:
        return memoryview(getattr(message, self.name))


class _OptionalBytes(_Optional):
    """An entry or packet that is left out for None."""

    def write(self, message: Any, value: Any) -> None:
        if value is not None:
            setattr(message, self.name, bytes(value))


class _Choice(_Field):
    """A boolean that is one of the values of an enumeration; at most one of them can be set."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(name)
        self.number = number

    def write(self, message: Any, value: bool) -> None:
        if value:
            if message.HasField(self.name):
                raise IllegalOperation("A read can fence or piggyback, not both: v3 has one flag")
            setattr(message, self.name, self.number)

    def read(self, message: Any) -> bool:
        return bool(getattr(message, self.name) == self.number)


class _Bit(_Choice):
    """A boolean that is one bit of a number."""

    def read(self, message: Any) -> bool:
        return bool(getattr(message, self.name) & self.number)


class _Ledger(_Field):
    """A ledger id in two signed fields; the scope is left out in scope 0."""

    def write(self, message: Any, value: tuple[int, int]) -> None:
        message.ledgerId = to_signed(value[1])
        if value[0]:
            message.ledgerScopeId = to_signed(value[0])

    def read(self, message: Any) -> LedgerId:
        return LedgerId(to_unsigned(message.ledgerScopeId), to_unsigned(message.ledgerId))


_LEDGER: Final = _Ledger()
#: The priority of an add or read stands in the packet's header.
_PRIORITY: Final = _Field("priority")
#: The status of a response: in its nested message too, except where the row says otherwise.
_STATUS: Final = _Field("status")
_ENTRY_ID: Final = _Field("entryId")


class _Form(NamedTuple):
    """One of our values in protobuf: its type, its nested message, and its fields in the order of the type's."""

    kind: type
    nested: str
    fields: tuple[_Field, ...]


class _Operation(NamedTuple):
    """A row of MESSAGES: an operation with its request and its response."""

    number: int
    request: _Form
    response: _Form


#: Every operation of v3. A response's first field, the status, is written to the nested message of all but AUTH and
#: START_TLS, which have none there.
MESSAGES: Final = (
    _Operation(
        READ_ENTRY,
        _Form(ReadRequest, "readRequest", (
            _LEDGER, _ENTRY_ID, _Optional("masterKey"), _Choice("flag", FENCE_LEDGER), _PRIORITY,
            _Optional("previousLAC"), _Optional("timeOut"), _Choice("flag", ENTRY_PIGGYBACK),
        )),
        _Form(ReadResponse, "readResponse", (
            _STATUS, _LEDGER, _ENTRY_ID, _OptionalBytes("body"), _Optional("maxLAC"), _Optional("lacUpdateTimestamp"),
        )),
    ),
    _Operation(
        ADD_ENTRY,
        _Form(AddRequest, "addRequest", (
            _LEDGER, _ENTRY_ID, _Field("masterKey"), _View("body"), _Choice("flag", RECOVERY_ADD), _PRIORITY,
            _Bit("writeFlags", DEFERRED_SYNC),
        )),
        _Form(AddResponse, "addResponse", (_STATUS, _LEDGER, _ENTRY_ID)),
    ),
    _Operation(
        AUTH,
        _Form(AuthMessage, "authRequest", (_Field("authPluginName"), _Field("payload"))),
        _Form(AuthResponse, "authResponse", (_STATUS, _Field("authPluginName"), _Field("payload"))),
    ),
    _Operation(
        WRITE_LAC,
        _Form(WriteLacRequest, "writeLacRequest", (_LEDGER, _Field("lac"), _Field("masterKey"), _Bytes("body"))),
        _Form(WriteLacResponse, "writeLacResponse", (_STATUS, _LEDGER)),
    ),
    _Operation(
        READ_LAC,
        _Form(ReadLacRequest, "readLacRequest", (_LEDGER,)),
        _Form(ReadLacResponse, "readLacResponse", (
            _STATUS, _LEDGER, _OptionalBytes("lacBody"), _OptionalBytes("lastEntryBody"),
        )),
    ),
    _Operation(
        GET_BOOKIE_INFO,
        _Form(BookieInfoRequest, "getBookieInfoRequest", (_Field("requested"),)),
        _Form(BookieInfoResponse, "getBookieInfoResponse", (
            _STATUS, _Optional("totalDiskCapacity"), _Optional("freeDiskSpace"),
        )),
    ),
    _Operation(
        START_TLS,
        _Form(StartTlsRequest, "startTLSRequest", ()),
        _Form(StartTlsResponse, "startTLSResponse", (_STATUS,)),
    ),
    _Operation(
        FORCE_LEDGER,
        _Form(ForceLedgerRequest, "forceLedgerRequest", (_LEDGER,)),
        _Form(ForceLedgerResponse, "forceLedgerResponse", (_STATUS, _LEDGER)),
    ),
    _Operation(
        LIST_ENTRIES,
        _Form(ListEntriesRequest, "getListOfEntriesOfLedgerRequest", (_LEDGER,)),
        _Form(ListEntriesResponse, "getListOfEntriesOfLedgerResponse", (
            _STATUS, _LEDGER, _OptionalBytes("availabilityOfEntriesOfLedger"),
        )),
    ),
)  # fmt: skip

OPERATIONS: Final[dict[type, int]] = {row.request.kind: row.number for row in MESSAGES}
_BY_REQUEST: Final = {row.request.kind: row for row in MESSAGES}
_BY_RESPONSE: Final = {row.response.kind: row for row in MESSAGES}
_BY_NUMBER: Final = {row.number: row for row in MESSAGES}
#: Operations whose responses carry their status outside of the nested message only.
_OUTER_STATUS: Final = frozenset({AUTH, START_TLS})


def encode_request(txn_id: int, request: Request, out: list[BytesLike]) -> int:
    """Append the frame of `request` to `out`, and return its size in bytes.

    Raises IllegalOperation for a batch read, which v3 lacks, and for a read that is to fence and to piggyback.
    """
    size = 0
    if type(request) is AddRequest:
        size = v3_hot.encode_add(txn_id, request, out)
    elif type(request) is ReadRequest:
        size = v3_hot.encode_read(txn_id, request, out)
    return size or encode_request_protobuf(txn_id, request, out)


def encode_request_protobuf(txn_id: int, request: Request, out: list[BytesLike]) -> int:
    """Encode any request as `encode_request` does, by protobuf."""
    row = _BY_REQUEST.get(type(request))
    if row is None:
        raise IllegalOperation("Protocol v3 has no batch read", hint="use v2, or pipelined reads")
    message = pb.Request()
    header = message.header
    header.version, header.operation, header.txnId = VERSION, row.number, txn_id
    nested = getattr(message, row.request.nested)
    if row.number == START_TLS:  # its messages have no fields, so they are set as such
        nested.SetInParent()
    for field, value in zip(row.request.fields, request, strict=True):
        if field is not _PRIORITY:
            field.write(nested, value)
        elif value:
            header.priority = HIGH_PRIORITY
    return _append(message, out)


class Answer(NamedTuple):
    """A v3 response as a client gets it. `response` is None when status or form are unknown; `problem` says why."""

    txn_id: int
    operation: int
    response: Response | None
    problem: str = ""


def decode_response(buffer: memoryview, at: int, end: int) -> Answer:
    """Return the response whose body is `buffer[at:end]`; the body of a plain read is a view of `buffer`.

    Raises ProtocolError when the bytes are not a `Response`.
    """
    hot = v3_hot.decode_response(buffer, at, end)
    if hot is not None:
        return _new(Answer, (*hot, ""))
    return decode_response_protobuf(buffer, at, end)


def decode_response_protobuf(buffer: memoryview, at: int, end: int) -> Answer:
    """Decode any response as `decode_response` does, by protobuf."""
    message = pb.Response()
    try:
        message.ParseFromString(buffer[at:end])  # type: ignore[arg-type]
    except DecodeError as error:
        raise ProtocolError(f"a v3 response that does not parse ({error})") from error
    if not message.IsInitialized():
        raise ProtocolError("a v3 response without its required fields")
    txn_id, operation, number = message.header.txnId, message.header.operation, message.status
    row = _BY_NUMBER.get(operation)
    form = None if row is None or not message.HasField(cast("Any", row.response.nested)) else row.response
    nested = None if form is None else getattr(message, form.nested)
    if nested is not None and operation not in _OUTER_STATUS:
        number = number or nested.status
    status = _STATUSES.get(number)
    if status is None:
        return Answer(txn_id, operation, None, f"status {number} is unknown")
    if form is not None:
        fields = [field.read(nested) for field in form.fields[1:]]
        return Answer(txn_id, operation, form.kind(status, *fields))
    if status is not _EOK:
        return Answer(txn_id, operation, BareResponse(status))
    if operation == START_TLS:
        return Answer(txn_id, operation, StartTlsResponse(status))
    return Answer(txn_id, operation, None, "success, but nothing of the operation's own")


class Header(NamedTuple):
    """A v3 request's header, which its response repeats."""

    txn_id: int
    operation: int
    version: int = VERSION
    priority: int = 0


class Call(NamedTuple):
    """A v3 request as a bookie gets it; `request` is None for an unknown operation (EBADREQ)."""

    header: Header
    request: Request | None


def decode_request(buffer: memoryview, at: int, end: int) -> Call | None:
    """Return the request whose body is `buffer[at:end]`; the body of a plain add is a view of `buffer`.

    None when the bytes are not a `Request`, so that v2 is to be tried.
    """
    hot = v3_hot.decode_request(buffer, at, end)
    if hot is not None:
        txn_id, operation, request = hot
        return _new(Call, (_new(Header, (txn_id, operation, VERSION, 0)), request))
    return decode_request_protobuf(buffer, at, end)


def decode_request_protobuf(buffer: memoryview, at: int, end: int) -> Call | None:
    """Decode any request as `decode_request` does, by protobuf."""
    message = pb.Request()
    try:
        message.ParseFromString(buffer[at:end])  # type: ignore[arg-type]
    except DecodeError:
        return None
    if not message.IsInitialized():
        return None
    head = message.header
    header = Header(head.txnId, head.operation, head.version, head.priority)
    row = _BY_NUMBER.get(header.operation)
    if row is None or not message.HasField(cast("Any", row.request.nested)):
        return Call(header, None)
    nested, is_high = getattr(message, row.request.nested), header.priority > 0
    fields = [is_high if field is _PRIORITY else field.read(nested) for field in row.request.fields]
    return Call(header, row.request.kind(*fields))


def encode_response(header: Header, response: Response, scope_id: int, out: list[BytesLike]) -> int:
    """Append the frame that answers the request with `header` to `out`, and return its size in bytes.

    A `scope_id` other than 0 is echoed in the nested message. Raises IllegalOperation for a batch read's response.
    """
    size = 0
    if type(response) is AddResponse:
        size = v3_hot.encode_add_response(header[0], response, scope_id, out)
    elif type(response) is ReadResponse:
        size = v3_hot.encode_read_response(header[0], response, scope_id, out)
    return size or encode_response_protobuf(header, response, scope_id, out)


def encode_response_protobuf(header: Header, response: Response, scope_id: int, out: list[BytesLike]) -> int:
    """Encode any response as `encode_response` does, by protobuf."""
    message = pb.Response()
    head = message.header
    head.version, head.operation, head.txnId = VERSION, header.operation, header.txn_id
    message.status = response.status
    if type(response) in (AuthResponse, BareResponse):
        # These two copy the request's header whole.
        head.version = header.version
        if header.priority:
            head.priority = header.priority
        if type(response) is BareResponse:
            return _append(message, out)
    row = _BY_RESPONSE.get(type(response))
    if row is None:
        raise IllegalOperation("Protocol v3 has no batch read")
    nested = getattr(message, row.response.nested)
    if row.number == START_TLS:
        nested.SetInParent()
    for field, value in zip(row.response.fields, response, strict=True):
        if field is _LEDGER:
            field.write(nested, (scope_id, cast("LedgerId", value)[1]))
        elif field is not _STATUS or row.number not in _OUTER_STATUS:
            field.write(nested, value)
    return _append(message, out)


def _append(message: pb.Request | pb.Response, out: list[BytesLike]) -> int:
    body = message.SerializeToString()
    out.append(_LENGTH.pack(len(body)))
    out.append(body)
    return 4 + len(body)


def encode_auth(message: AuthMessage) -> bytes:
    """Serialize an AuthMessage, which v2 carries too."""
    return pb.AuthMessage(authPluginName=message.plugin_name, payload=message.payload).SerializeToString()


def decode_auth(data: memoryview) -> AuthMessage:
    """Return the AuthMessage in `data`. Raises ProtocolError for other bytes."""
    message = pb.AuthMessage()
    try:
        message.ParseFromString(data)  # type: ignore[arg-type]
    except DecodeError as error:
        raise ProtocolError("an authentication message that does not parse") from error
    if not message.IsInitialized():
        raise ProtocolError("an authentication message without its fields")
    return AuthMessage(message.authPluginName, message.payload)
