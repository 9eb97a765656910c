"""BookKeeper's wire messages as one set of immutable values, shared by protocol v2 and v3 and by both ends.

The bytes are in `v2.py` and `v3.py`; `framing.py` moves them. A received body is a view of the receive buffer: it stays
valid while it is held, and keeps the buffer alive (copy a body with `bytes()` to keep it for long).

Source: BookieProtocol (v2), BookkeeperProtocol.proto (v3), BP-35 for the ledger scope id.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple, TypeAlias, get_args

from bkctl.errors import BY_V3_CODE, BkctlError
from bkctl.ids import LedgerId

#: Largest frame, its 4-byte length included. Source: nettyMaxFrameSizeBytes.
FRAME_SIZE_BYTES_MAX: Final = 5 * 1024 * 1024
MASTER_KEY_SIZE_BYTES: Final = 20
#: The entry id of "the last entry on that bookie".
LAST_ENTRY: Final = -1
#: Name of the authentication plug-in of peers without authentication. Source: AuthProviderFactoryFactory.
AUTH_DISABLED_PLUGIN: Final = "AuthDisabledPlugin"
#: The priority that Java's client sends with recovery reads and adds. Source: PerChannelBookieClient.
HIGH_PRIORITY: Final = 100

BytesLike: TypeAlias = bytes | bytearray | memoryview


class Protocol(IntEnum):
    """Wire protocol version."""

    V2 = 2
    V3 = 3


class Status(IntEnum):
    """Status of a response; the numbers are v3's. Source: BookkeeperProtocol.StatusCode, BookieProtocol."""

    EOK = 0
    ENOLEDGER = 402
    ENOENTRY = 403
    EBADREQ = 404
    EIO = 501
    EUA = 502
    EBADVERSION = 503
    EFENCED = 504
    EREADONLY = 505
    ETOOMANYREQUESTS = 506
    EUNKNOWNLEDGERSTATE = 507

    @property
    def v2(self) -> int:
        """The return code of v2 with the same meaning."""
        return _V2_CODES[self]

    @classmethod
    def from_v2(cls, code: int) -> Status | None:
        """Return the status that v2's return code `code` means; None for an unknown code."""
        return _BY_V2_CODE.get(code)


_V2_CODES: Final = {Status.EOK: 0} | {
    Status(code): error.v2_code for code, error in BY_V3_CODE.items() if error.v2_code is not None
}
_BY_V2_CODE: Final[dict[int, Status]] = {code: status for status, code in _V2_CODES.items()}


def status_of(error: BaseException) -> Status:
    """Return the status that tells a client of `error`; EIO for an error without a status."""
    return Status.EIO if not isinstance(error, BkctlError) or error.v3_code is None else Status(error.v3_code)


def error_for(status: Status, message: str, *, hint: str | None = None) -> BkctlError:
    """Return the error that `status` (not EOK) stands for, with `message`."""
    return BY_V3_CODE[status](message, hint=hint)


class BookieInfoFlags(IntFlag):
    """Values that GET_BOOKIE_INFO can ask for. Source: GetBookieInfoRequest.Flags."""

    TOTAL_DISK_CAPACITY = 1
    FREE_DISK_SPACE = 2


class AddRequest(NamedTuple):
    """Store one entry. `body` is the whole entry: header, digest, payload.

    A sender may give `body` as a tuple of pieces, sent one after the other; a receiver gets one view or bytes. A v2
    frame has only the ids in the body: `ledger` and `entry_id` are its first two 64-bit numbers, in scope 0, whatever
    the first byte is (the bookie refuses a body of scope 0 whose first byte is ≥ 0x80).
    """

    ledger: LedgerId
    entry_id: int
    master_key: bytes
    body: BytesLike | tuple[BytesLike, ...]
    recovery_add: bool = False
    high_priority: bool = False
    deferred_sync: bool = False


class ReadRequest(NamedTuple):
    """Read one entry, or LAST_ENTRY; with `fence` the bookie fences the ledger first (needs the master key).

    `previous_lac` makes the read a long poll: with `timeout_ms` the bookie waits until its LAC exceeds `previous_lac`,
    and with `piggyback` (entry id LAST_ENTRY) it answers with entry `previous_lac` + 1 beside the LAC.
    """

    ledger: LedgerId
    entry_id: int
    master_key: bytes | None = None
    fence: bool = False
    high_priority: bool = False
    previous_lac: int | None = None
    timeout_ms: int | None = None
    piggyback: bool = False


class BatchReadRequest(NamedTuple):
    """Read consecutive entries from `entry_id`, at most `max_count` (≤ 0: no limit), about `max_size` bytes; v2 only.

    The caller chooses `request_id`, unique among the requests in flight on one connection.
    """

    ledger: LedgerId
    entry_id: int
    request_id: int
    max_count: int
    max_size: int
    master_key: bytes | None = None
    fence: bool = False
    high_priority: bool = False


class WriteLacRequest(NamedTuple):
    """Store an explicit LAC; `body` is the LAC packet."""

    ledger: LedgerId
    lac: int
    master_key: bytes
    body: BytesLike


class ReadLacRequest(NamedTuple):
    """Ask for the explicit LAC and the last entry."""

    ledger: LedgerId


class ForceLedgerRequest(NamedTuple):
    """Wait until all entries added with deferred sync are on disk."""

    ledger: LedgerId


class ListEntriesRequest(NamedTuple):
    """Ask for the ids of the ledger's entries on the bookie. Source: GetListOfEntriesOfLedgerRequest."""

    ledger: LedgerId


class BookieInfoRequest(NamedTuple):
    """Ask for disk sizes; `requested` is an or of BookieInfoFlags."""

    requested: int


class AuthMessage(NamedTuple):
    """One step of authentication, in either direction."""

    plugin_name: str
    payload: bytes


class StartTlsRequest(NamedTuple):
    """Ask to continue in TLS; always v3."""


class AddResponse(NamedTuple):
    """Answer to AddRequest."""

    status: Status
    ledger: LedgerId
    entry_id: int


class ReadResponse(NamedTuple):
    """Answer to ReadRequest. `body` is the whole entry; `max_lac` the bookie's LAC (v3).

    `entry_id` echoes the request's (the real one is in the body), except after a long poll with piggyback.
    """

    status: Status
    ledger: LedgerId
    entry_id: int
    body: BytesLike | None = None
    max_lac: int | None = None
    lac_update_timestamp_ms: int | None = None


class BatchReadResponse(NamedTuple):
    """Answer to BatchReadRequest: whole entries with consecutive ids from `entry_id`."""

    status: Status
    ledger: LedgerId
    entry_id: int
    request_id: int
    bodies: tuple[BytesLike, ...] = ()


class WriteLacResponse(NamedTuple):
    """Answer to WriteLacRequest."""

    status: Status
    ledger: LedgerId


class ReadLacResponse(NamedTuple):
    """Answer to ReadLacRequest: the stored LAC packet and the last entry, where there are any."""

    status: Status
    ledger: LedgerId
    lac_body: BytesLike | None = None
    last_entry_body: BytesLike | None = None


class ForceLedgerResponse(NamedTuple):
    """Answer to ForceLedgerRequest."""

    status: Status
    ledger: LedgerId


class ListEntriesResponse(NamedTuple):
    """Answer to ListEntriesRequest; `availability` is an AvailabilityOfEntriesOfLedger block."""

    status: Status
    ledger: LedgerId
    availability: BytesLike | None = None


class BookieInfoResponse(NamedTuple):
    """Answer to BookieInfoRequest, sizes in bytes over all ledger directories."""

    status: Status
    total_disk_capacity: int | None = None
    free_disk_space: int | None = None


class AuthResponse(NamedTuple):
    """Answer to AuthMessage (v2 has no status: EOK)."""

    status: Status
    plugin_name: str
    payload: bytes


class StartTlsResponse(NamedTuple):
    """Answer to StartTlsRequest; after EOK the TLS handshake follows."""

    status: Status


class BareResponse(NamedTuple):
    """A v3 answer without a message of its operation: unknown operation, not authenticated, failed TLS."""

    status: Status


Request: TypeAlias = (
    AddRequest
    | ReadRequest
    | BatchReadRequest
    | WriteLacRequest
    | ReadLacRequest
    | ForceLedgerRequest
    | ListEntriesRequest
    | BookieInfoRequest
    | AuthMessage
    | StartTlsRequest
)
Response: TypeAlias = (
    AddResponse
    | ReadResponse
    | BatchReadResponse
    | WriteLacResponse
    | ReadLacResponse
    | ForceLedgerResponse
    | ListEntriesResponse
    | BookieInfoResponse
    | AuthResponse
    | StartTlsResponse
    | BareResponse
)


#: Requests and responses about one ledger, which is the first field of a request and the second of a response.
LEDGER_REQUESTS: Final = frozenset(kind for kind in get_args(Request) if kind._fields[:1] == ("ledger",))
LEDGER_RESPONSES: Final = frozenset(kind for kind in get_args(Response) if kind._fields[1:2] == ("ledger",))


def scope_of(request: Request) -> int:
    """Return the scope of the ledger that `request` is about; 0 without a ledger."""
    return request[0][0] if type(request) in LEDGER_REQUESTS else 0  # type: ignore[misc, index, return-value]


#: The response to each request, and how many of the request's first fields it repeats behind its status.
_REFUSALS: Final[dict[type, tuple[Callable[..., Response], int]]] = {
    AddRequest: (AddResponse, 2),
    ReadRequest: (ReadResponse, 2),
    BatchReadRequest: (BatchReadResponse, 3),
    WriteLacRequest: (WriteLacResponse, 1),
    ReadLacRequest: (ReadLacResponse, 1),
    ForceLedgerRequest: (ForceLedgerResponse, 1),
    ListEntriesRequest: (ListEntriesResponse, 1),
    BookieInfoRequest: (BookieInfoResponse, 0),
    AuthMessage: (BareResponse, 0),
    StartTlsRequest: (BareResponse, 0),
}


def refusal(request: Request, status: Status) -> Response:
    """Return the response of `request`'s operation that carries `status` (not EOK) and nothing else."""
    kind, count = _REFUSALS[type(request)]
    return kind(status, *request[:count])


#: Sends the one answer to a request. Called once, from the event loop's thread, at any time and in any order.
Respond: TypeAlias = Callable[[Response], None]
