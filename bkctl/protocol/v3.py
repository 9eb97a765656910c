"""Protocol v3: protobuf messages with a transaction id, and BP-35's ledger scope id. Both directions.

Frame: length i32 (of what follows, big-endian) ‖ serialized `Request` or `Response` of `bookkeeper_protocol.proto`.
`MESSAGES` maps each operation to our values and to protobuf's fields; both directions follow it. Plain adds and reads
mostly travel in runs (`runs.py`).
Source: BookkeeperProtocol.proto, RequestEnDecoderV3 and ResponseEnDecoderV3; field 15 (`ledgerScopeId`) is BP-35's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from bkctl.errors import IllegalOperation, ProtocolError
from bkctl.ids import U64_MAX, LedgerId, to_signed
from bkctl.protocol import bookkeeper_protocol_pb2 as pb
from bkctl.protocol.messages import (
    HIGH_PRIORITY,
    MASTER_KEY_SIZE_BYTES,
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


class _Field(NamedTuple):
    """A value's place in a protobuf message. None and False leave the field out."""

    name: str
    #: Return the value that a message has.
    read: Callable[[Any], Any]
    #: Return what the field takes for a value; None: the value as it is.
    convert: Callable[[Any], Any] | None = None


def _plain(name: str) -> _Field:
    """Return a field that is always set."""
    return _Field(name, attrgetter(name))


def _optional(name: str, convert: Callable[[Any], Any] | None = None) -> _Field:
    """Return a field that reads as None where it is not set."""
    return _Field(name, lambda message: getattr(message, name) if message.HasField(name) else None, convert)


def _choice(name: str, number: int) -> _Field:
    """Return a field for a boolean that is one value of an enumeration."""
    return _Field(name, lambda message: getattr(message, name) == number, lambda _: number)


def _join(entry: BytesLike | tuple[BytesLike, ...]) -> bytes:
    return b"".join(entry) if isinstance(entry, tuple) else bytes(entry)


def _read_ledger(message: Any) -> LedgerId:
    # Both halves are in range, so that LedgerId need not check them.
    return _new(LedgerId, (message.ledgerScopeId & U64_MAX, message.ledgerId & U64_MAX))


#: A ledger id in two signed fields; the scope is left out in scope 0. The first value of requests, the second of
#: responses.
_LEDGER: Final = _Field("ledgerId", _read_ledger)
#: The priority of an add or read stands in the packet's header.
_PRIORITY: Final = _Field("priority", lambda message: False)
#: The status of a response, its first value, stands before its nested message, and in the nested message too.
_STATUS: Final = _plain("status")
#: The status of a response whose nested message has none.
_OUTER_STATUS: Final = _plain("status")
_ENTRY_ID: Final = _plain("entryId")
#: The entry of an add, which a client may give in pieces, and a bookie receives as a view.
_BODY: Final = _Field("body", lambda message: memoryview(message.body), _join)
#: One bit of the flags of an add.
_DEFERRED_SYNC: Final = _choice("writeFlags", DEFERRED_SYNC)._replace(
    read=lambda message: message.writeFlags & DEFERRED_SYNC != 0
)

#: The master key of a read, which only fencing needs. One byte too many is enough for a refusal.
_FENCING_KEY: Final = _Field(
    "masterKey",
    lambda message: (
        message.masterKey[: MASTER_KEY_SIZE_BYTES + 1]
        if message.flag == FENCE_LEDGER and message.HasField("masterKey")
        else None
    ),
)


class _Form:
    """One of our values in protobuf: its type, its nested message, and its fields in the order of the type's."""

    def __init__(self, kind: type[Any], nested: str, fields: tuple[_Field, ...]) -> None:
        self.kind = kind
        self.nested: Any = nested
        self.has_ledger = _LEDGER in fields
        self.has_status = _STATUS in fields
        self.priority_at = fields.index(_PRIORITY) if _PRIORITY in fields else None
        #: Readers of the values, in their order, without a response's status.
        self.readers = tuple(field.read for field in fields if field not in (_STATUS, _OUTER_STATUS))
        #: Places, names and conversions of the values of the nested message, without status and ledger.
        self.writers = tuple(
            (at, field.name, field.convert)
            for at, field in enumerate(fields)
            if field not in (_LEDGER, _PRIORITY, _STATUS, _OUTER_STATUS)
        )


class _Operation(NamedTuple):
    """A row of MESSAGES: an operation with its request and its response."""

    number: int
    request: _Form
    response: _Form


#: Every operation of v3.
MESSAGES: Final = (
    _Operation(
        READ_ENTRY,
        _Form(ReadRequest, "readRequest", (
            _LEDGER, _ENTRY_ID, _FENCING_KEY, _choice("flag", FENCE_LEDGER), _PRIORITY,
            _optional("previousLAC"), _optional("timeOut"), _choice("flag", ENTRY_PIGGYBACK),
        )),
        _Form(ReadResponse, "readResponse", (
            _STATUS, _LEDGER, _ENTRY_ID,
            _optional("body", bytes), _optional("maxLAC"), _optional("lacUpdateTimestamp"),
        )),
    ),
    _Operation(
        ADD_ENTRY,
        _Form(AddRequest, "addRequest", (
            _LEDGER, _ENTRY_ID, _plain("masterKey"), _BODY, _choice("flag", RECOVERY_ADD), _PRIORITY,
            _DEFERRED_SYNC,
        )),
        _Form(AddResponse, "addResponse", (_STATUS, _LEDGER, _ENTRY_ID)),
    ),
    _Operation(
        AUTH,
        _Form(AuthMessage, "authRequest", (_plain("authPluginName"), _plain("payload"))),
        _Form(AuthResponse, "authResponse", (_OUTER_STATUS, _plain("authPluginName"), _plain("payload"))),
    ),
    _Operation(
        WRITE_LAC,
        _Form(WriteLacRequest, "writeLacRequest", (
            _LEDGER, _plain("lac"), _plain("masterKey"), _Field("body", attrgetter("body"), bytes),
        )),
        _Form(WriteLacResponse, "writeLacResponse", (_STATUS, _LEDGER)),
    ),
    _Operation(
        READ_LAC,
        _Form(ReadLacRequest, "readLacRequest", (_LEDGER,)),
        _Form(ReadLacResponse, "readLacResponse", (
            _STATUS, _LEDGER, _optional("lacBody", bytes), _optional("lastEntryBody", bytes),
        )),
    ),
    _Operation(
        GET_BOOKIE_INFO,
        _Form(BookieInfoRequest, "getBookieInfoRequest", (_plain("requested"),)),
        _Form(BookieInfoResponse, "getBookieInfoResponse", (
            _STATUS, _optional("totalDiskCapacity"), _optional("freeDiskSpace"),
        )),
    ),
    _Operation(
        START_TLS,
        _Form(StartTlsRequest, "startTLSRequest", ()),
        _Form(StartTlsResponse, "startTLSResponse", (_OUTER_STATUS,)),
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
            _STATUS, _LEDGER, _optional("availabilityOfEntriesOfLedger", bytes),
        )),
    ),
)  # fmt: skip

OPERATIONS: Final[dict[type, int]] = {row.request.kind: row.number for row in MESSAGES}
_BY_REQUEST: Final = {row.request.kind: row for row in MESSAGES}
_BY_RESPONSE: Final = {row.response.kind: row for row in MESSAGES}
_BY_NUMBER: Final = {row.number: row for row in MESSAGES}


def encode_request(txn_id: int, request: Request, out: list[BytesLike]) -> int:
    """Append the frame of `request` to `out`, and return its size in bytes.

    Raises IllegalOperation for a batch read, which v3 lacks, and for a read that is to fence and to piggyback.
    """
    row = _BY_REQUEST.get(type(request))
    if row is None:
        raise IllegalOperation("Protocol v3 has no batch read", hint="use v2, or pipelined reads")
    if type(request) is ReadRequest and request.fence and request.piggyback:
        raise IllegalOperation("A read can fence or piggyback, not both: v3 has one flag")
    form = row.request
    values: tuple[Any, ...] = request
    message = pb.Request()
    header = message.header
    header.version, header.operation, header.txnId = VERSION, row.number, txn_id
    if form.priority_at is not None and values[form.priority_at]:
        header.priority = HIGH_PRIORITY
    nested = getattr(message, form.nested)
    if form.has_ledger:
        _write_ledger(nested, *values[0])
    elif row.number == START_TLS:  # its messages have no fields, so they are set as such
        nested.SetInParent()
    _write(nested, form, values)
    return _append(message, out)


def _write_ledger(nested: Any, scope_id: int, ledger_id: int) -> None:
    nested.ledgerId = to_signed(ledger_id)
    if scope_id:
        nested.ledgerScopeId = to_signed(scope_id)


def _write(nested: Any, form: _Form, values: tuple[Any, ...]) -> None:
    for at, name, convert in form.writers:
        value = values[at]
        if value is not None and value is not False:
            setattr(nested, name, value if convert is None else convert(value))


class Answer(NamedTuple):
    """A v3 response as a client gets it. `response` is None when status or form are unknown; `problem` says why."""

    txn_id: int
    operation: int
    response: Response | None
    problem: str = ""


def decode_response(buffer: memoryview, at: int, end: int) -> Answer:
    """Return the response whose body is `buffer[at:end]`.

    Raises ProtocolError when the bytes are not a `Response`.
    """
    message = pb.Response()
    try:
        message.ParseFromString(buffer[at:end])  # type: ignore[arg-type]
    except DecodeError as error:
        raise ProtocolError(f"a v3 response that does not parse ({error})") from error
    if not message.IsInitialized():
        raise ProtocolError("a v3 response without its required fields")
    txn_id, operation, number = message.header.txnId, message.header.operation, message.status
    row = _BY_NUMBER.get(operation)
    form = None if row is None or not message.HasField(row.response.nested) else row.response
    nested: Any = None if form is None else getattr(message, form.nested)
    if form is not None and form.has_status:
        number = number or nested.status
    status = _STATUSES.get(number)
    if status is None:
        return Answer(txn_id, operation, None, f"status {number} is unknown")
    if form is not None:
        response = _new(form.kind, (status, *[read(nested) for read in form.readers]))
        return _new(Answer, (txn_id, operation, response, ""))
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
    """Return the request whose body is `buffer[at:end]`.

    None when the bytes are not a `Request`, so that v2 is to be tried.
    """
    message = pb.Request()
    try:
        message.ParseFromString(buffer[at:end])  # type: ignore[arg-type]
    except DecodeError:
        return None
    if not message.IsInitialized():
        return None
    head = message.header
    operation, priority = head.operation, head.priority
    header = _new(Header, (head.txnId, operation, head.version, priority))
    row = _BY_NUMBER.get(operation)
    if row is None or not message.HasField(row.request.nested):
        return Call(header, None)
    form = row.request
    nested = getattr(message, form.nested)
    values = [read(nested) for read in form.readers]
    if form.priority_at is not None:
        values[form.priority_at] = priority > 0
    return _new(Call, (header, _new(form.kind, values)))


def encode_response(header: Header, response: Response, scope_id: int, out: list[BytesLike]) -> int:
    """Append the frame that answers the request with `header` to `out`, and return its size in bytes.

    A `scope_id` other than 0 is echoed in the nested message. Raises IllegalOperation for a batch read's response.
    """
    message = pb.Response()
    head = message.header
    head.version, head.operation, head.txnId = VERSION, header.operation, header.txn_id
    message.status = response.status
    values: tuple[Any, ...] = response
    row = _BY_RESPONSE.get(type(response))
    if type(response) is BareResponse or type(response) is AuthResponse:
        # These two copy the request's header whole.
        head.version = header.version
        if header.priority:
            head.priority = header.priority
    if row is not None:
        form = row.response
        nested = getattr(message, form.nested)
        if form.has_ledger:
            _write_ledger(nested, scope_id, values[1][1])
        elif row.number == START_TLS:
            nested.SetInParent()
        if form.has_status:
            nested.status = response.status
        _write(nested, form, values)
    elif type(response) is not BareResponse:
        raise IllegalOperation("Protocol v3 has no batch read")
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
