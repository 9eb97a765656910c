"""Bookies in memory behind the real server, with faults on request, and a cluster of them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from enum import Enum
from typing import Any

from support.waiting import LIMIT_S

from bkctl.client.ledger import BookKeeper
from bkctl.formats.availability import serialize
from bkctl.formats.entry import read_entry_header, read_lac_header
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.protocol.connection import SCOPE_PROBE
from bkctl.protocol.handler import Responder
from bkctl.protocol.messages import (
    AddRequest,
    AddResponse,
    BatchReadRequest,
    BatchReadResponse,
    BookieInfoRequest,
    BookieInfoResponse,
    ForceLedgerRequest,
    ForceLedgerResponse,
    ListEntriesRequest,
    ListEntriesResponse,
    ReadLacRequest,
    ReadLacResponse,
    ReadRequest,
    ReadResponse,
    Status,
    WriteLacRequest,
    WriteLacResponse,
    refusal,
)
from bkctl.protocol.server import BookieServer


async def turns() -> None:
    """Let the loop turn so often that all has come which was sent, however little of the processor we get."""
    for _ in range(100):
        await asyncio.sleep(0.0005)


class Fault(Enum):
    SILENCE = "silence"
    DISCONNECT = "disconnect"


class FakeLedger:
    def __init__(self) -> None:
        self.master_key: bytes | None = None
        self.fenced = False
        self.entries: dict[int, bytes] = {}
        self.lac_packet: bytes | None = None
        self.waiters: list[Callable[[], None]] = []

    @property
    def lac(self) -> int:
        told = [read_entry_header(each).last_add_confirmed for each in self.entries.values()]
        if self.lac_packet is not None:
            told.append(read_lac_header(self.lac_packet).last_add_confirmed)
        return max(told, default=-1)


class FakeBookie:
    """A bookie without a disk. `fault(request)` may give a Status, a Fault, or None for the right answer.

    `damage(entry)` changes what reads give back. Without `scopes` it is as Apache's: field 15 is ignored, never echoed;
    with `lies` it echoes in the probe only.
    """

    def __init__(self, bookie_id: str, *, scopes: bool = True, lies: bool = False, tls: Any = None) -> None:
        self.bookie_id = bookie_id
        self.tls = tls
        self.scopes = scopes
        self.lies = lies
        self.ledgers: dict[LedgerId, FakeLedger] = {}
        self.received: list[Any] = []
        self.fault: Callable[[Any], Status | Fault | None] = lambda request: None
        self.damage: Callable[[bytes], bytes] = lambda entry: entry
        self.hold: Callable[[Any], bool] = lambda request: False
        self.held: list[tuple[Any, Any]] = []
        self.port = 0
        self.total_bytes, self.free_bytes = 1 << 40, 1 << 39
        self._server: BookieServer | None = None

    async def start(self) -> None:
        self._server = BookieServer(self, tls=self.tls)
        await self._server.start("127.0.0.1", self.port)
        self.port = self._server.port

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            for connection in list(server.connections):
                connection.abort()
            await server.close(0.1)

    def entries(self, ledger: LedgerId) -> dict[int, bytes]:
        """Return its entries of a ledger by entry id; empty for an unknown ledger."""
        return self.ledgers[ledger].entries if ledger in self.ledgers else {}

    def release(self) -> None:
        """Handle what was held back."""
        self.hold = lambda request: False
        held, self.held = self.held, []
        for request, respond in held:
            self.handle(request, respond)

    def handle(self, request: Any, respond: Any) -> None:
        if not self.scopes or (self.lies and getattr(request, "ledger", None) != SCOPE_PROBE):
            respond = _unscoped(respond)
        self.received.append(request)
        if self.hold(request):
            self.held.append((request, respond))
            return
        fault = self.fault(request)
        if fault is Fault.SILENCE:
            return
        if fault is Fault.DISCONNECT:
            assert self._server is not None
            for connection in list(self._server.connections):
                connection.abort()
            return
        if isinstance(fault, Status):
            respond(refusal(request, fault))
            return
        getattr(self, f"_{type(request).__name__}")(request, respond)

    def _ledger(self, ledger: LedgerId, create: bool = False) -> FakeLedger | None:
        if not self.scopes:
            ledger = LedgerId(0, ledger.ledger_id)
        return self.ledgers.setdefault(ledger, FakeLedger()) if create else self.ledgers.get(ledger)

    def _AddRequest(self, request: AddRequest, respond: Any) -> None:
        ledger = self._ledger(request.ledger, create=True)
        assert ledger is not None
        status = Status.EOK
        ledger.master_key = ledger.master_key or bytes(request.master_key)
        if ledger.master_key != request.master_key:
            status = Status.EUA
        elif ledger.fenced and not request.recovery_add:
            status = Status.EFENCED
        else:
            ledger.entries[request.entry_id] = bytes(request.body)
            self._wake(ledger)
        respond(AddResponse(status, request.ledger, request.entry_id))

    def _wake(self, ledger: FakeLedger) -> None:
        waiters, ledger.waiters = ledger.waiters, []
        for waiter in waiters:
            waiter()

    def _ReadRequest(self, request: ReadRequest, respond: Any) -> None:
        ledger = self._ledger(request.ledger, create=request.fence)
        if ledger is None:
            respond(refusal(request, Status.ENOLEDGER))
            return
        if request.fence:
            if ledger.master_key not in (None, request.master_key):
                respond(refusal(request, Status.EUA))
                return
            ledger.master_key, ledger.fenced = request.master_key, True
            self._wake(ledger)
        if request.previous_lac is not None and request.timeout_ms and ledger.lac <= request.previous_lac:
            loop = asyncio.get_running_loop()
            waiting = request._replace(timeout_ms=None)
            again = functools.partial(self._ReadRequest, waiting, respond)
            timer = loop.call_later(request.timeout_ms / 1000, lambda: (ledger.waiters.remove(woken), again()))

            def woken() -> None:
                timer.cancel()
                self._ReadRequest(request, respond)

            ledger.waiters.append(woken)
            return
        if request.piggyback:
            assert request.previous_lac is not None
            entry = ledger.entries.get(request.previous_lac + 1) if ledger.lac > request.previous_lac else None
            entry_id = -1 if entry is None else request.previous_lac + 1
            respond(ReadResponse(Status.EOK, request.ledger, entry_id, entry, ledger.lac))
            return
        entry_id = max(ledger.entries, default=-1) if request.entry_id == -1 else request.entry_id
        entry = ledger.entries.get(entry_id)
        if entry is None:
            respond(refusal(request, Status.ENOENTRY))
            return
        respond(ReadResponse(Status.EOK, request.ledger, request.entry_id, self.damage(entry), ledger.lac))

    def _BatchReadRequest(self, request: BatchReadRequest, respond: Any) -> None:
        entries = self.entries(request.ledger)
        bodies, size = [], 0
        for entry_id in range(request.entry_id, request.entry_id + request.max_count):
            body = self.damage(entries[entry_id]) if entry_id in entries else None
            if body is None or (bodies and size + len(body) > request.max_size):
                break
            bodies.append(body)
            size += len(body)
        status = Status.EOK if bodies else Status.ENOENTRY
        respond(BatchReadResponse(status, request.ledger, request.entry_id, request.request_id, tuple(bodies)))

    def _WriteLacRequest(self, request: WriteLacRequest, respond: Any) -> None:
        ledger = self._ledger(request.ledger, create=True)
        assert ledger is not None
        ledger.lac_packet = bytes(request.body)
        self._wake(ledger)
        respond(WriteLacResponse(Status.EOK, request.ledger))

    def _ReadLacRequest(self, request: ReadLacRequest, respond: Any) -> None:
        ledger = self._ledger(request.ledger)
        last = None
        if ledger is not None and ledger.entries:
            last = self.damage(ledger.entries[max(ledger.entries)])
        packet = ledger.lac_packet if ledger is not None else None
        status = Status.EOK if last is not None else Status.ENOENTRY if packet is None else Status.EIO
        respond(ReadLacResponse(status, request.ledger, packet, last))

    def _ListEntriesRequest(self, request: ListEntriesRequest, respond: Any) -> None:
        ledger = self._ledger(request.ledger)
        if ledger is None:
            respond(refusal(request, Status.ENOLEDGER))
            return
        listed = serialize(sorted(ledger.entries))
        respond(ListEntriesResponse(Status.EOK, request.ledger, listed))

    def _BookieInfoRequest(self, request: BookieInfoRequest, respond: Any) -> None:
        respond(BookieInfoResponse(Status.EOK, self.total_bytes, self.free_bytes))

    def _ForceLedgerRequest(self, request: ForceLedgerRequest, respond: Any) -> None:
        respond(ForceLedgerResponse(Status.EOK, request.ledger))


def _unscoped(respond: Responder) -> Any:
    """A v3 response without the echo of the scope; v2's as it is."""
    if not respond.carries_lac:
        return respond
    connection, header, _, size = respond.args
    plain = Responder(respond.func, connection, header, 0, size)

    def answer(response: Any) -> None:
        ledger = getattr(response, "ledger", None)
        plain(response if ledger is None else response._replace(ledger=LedgerId(0, ledger.ledger_id)))

    return answer


class FakeCluster:
    """Fake bookies `b0`, `b1`, … registered in a SQLite store."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.bookies: list[FakeBookie] = []

    async def add_bookie(self, **options: Any) -> FakeBookie:
        """Start and register one more; `registers_scopes` sets the registration lock's property."""
        registers_scopes = options.pop("registers_scopes", options.get("scopes", True))
        bookie = FakeBookie(f"b{len(self.bookies)}", **options)
        await bookie.start()
        self.bookies.append(bookie)
        self.register(bookie, scopes=registers_scopes)
        return bookie

    def register(self, bookie: FakeBookie, *, scopes: bool = True) -> None:
        endpoint = BookieEndpoint("bookie", bookie.port, "127.0.0.1", "bookie-rpc")
        info = BookieServiceInfo((endpoint,), {"ledgerScopes": "1"} if scopes else {})
        self.cluster.bookies.register(bookie.bookie_id, info)

    def bookie(self, bookie_id: str) -> FakeBookie:
        return next(each for each in self.bookies if each.bookie_id == bookie_id)

    def unregister(self, bookie: FakeBookie) -> None:
        self.cluster.bookies.unregister(bookie.bookie_id)

    def client(self, **options: Any) -> BookKeeper:
        return BookKeeper(self.cluster, **{"connect_timeout_s": LIMIT_S, **options})

    def metadata(self, ledger: LedgerId) -> Any:
        return self.cluster.ledgers.read(ledger).metadata
