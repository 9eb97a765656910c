"""The bookie's end of the wire under Java's client, over bookies that keep everything in memory."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers import Java, ZooKeeperServer, format_cluster

from bkctl.errors import BkctlError, EntryNotFound, LedgerFenced, LedgerNotFound, Unauthorized
from bkctl.formats.entry import read_entry_header, read_lac_header
from bkctl.ids import LedgerId
from bkctl.protocol import runs, v3
from bkctl.protocol.connection import run
from bkctl.protocol.messages import (
    AddRequest,
    AddResponse,
    BatchReadRequest,
    BatchReadResponse,
    ForceLedgerRequest,
    ForceLedgerResponse,
    ReadLacRequest,
    ReadLacResponse,
    ReadRequest,
    ReadResponse,
    Request,
    Respond,
    Response,
    Status,
    WriteLacRequest,
    WriteLacResponse,
    refusal,
)
from bkctl.protocol.server import BookieServer

pytestmark = pytest.mark.java


class MemoryLedger:
    def __init__(self, key: bytes) -> None:
        self.key = key
        self.entries: dict[int, bytes] = {}
        self.fenced = False
        self.explicit_lac: bytes | None = None
        self.lac = -1
        self.waiting: list[tuple[ReadRequest, Respond]] = []

    def entry(self, entry_id: int) -> bytes:
        last = max(self.entries, default=-1)
        found = self.entries.get(last if entry_id == -1 else entry_id)
        if found is None:
            raise EntryNotFound(f"Entry {entry_id}")
        return found


class MemoryBookie:
    """As much of a bookie as Java's client needs."""

    def __init__(self) -> None:
        self.ledgers: dict[LedgerId, MemoryLedger] = {}

    def handle(self, request: Request, respond: Respond) -> None:
        match request:
            case ReadRequest(previous_lac=previous, timeout_ms=timeout) if previous is not None and timeout:
                ledger = self._ledger(request.ledger)
                if ledger.lac > previous or ledger.fenced:
                    respond(self._tail(ledger, request))
                    return
                ledger.waiting.append((request, respond))
                asyncio.get_running_loop().call_later(timeout / 1000, self._wake, ledger, request, respond)
            case _:
                respond(self._answer(request))

    def _ledger(self, ledger: LedgerId) -> MemoryLedger:
        if ledger not in self.ledgers:
            raise LedgerNotFound(f"Ledger {ledger}")
        return self.ledgers[ledger]

    def _opened(self, ledger: LedgerId, key: bytes | None) -> MemoryLedger:
        if key is None:
            raise Unauthorized("No master key")
        found = self.ledgers.setdefault(ledger, MemoryLedger(key))
        if found.key != key:
            raise Unauthorized("Another master key")
        return found

    def _answer(self, request: Request) -> Response:
        match request:
            case AddRequest():
                assert not isinstance(request.body, tuple)
                header = read_entry_header(request.body)
                assert (header.ledger, header.entry_id) == (request.ledger, request.entry_id)
                ledger = self._opened(request.ledger, request.master_key)
                if ledger.fenced and not request.recovery_add:
                    raise LedgerFenced(f"Ledger {request.ledger}")
                ledger.entries[request.entry_id] = bytes(request.body)
                self._advance(ledger, header.last_add_confirmed)
                return AddResponse(Status.EOK, request.ledger, request.entry_id)
            case ReadRequest():
                if request.fence:
                    ledger = self._opened(request.ledger, request.master_key)
                    ledger.fenced = True
                    self._advance(ledger, ledger.lac)
                    return ReadResponse(Status.EOK, request.ledger, request.entry_id, ledger.entry(request.entry_id))
                ledger = self._ledger(request.ledger)
                if request.piggyback:
                    return self._tail(ledger, request)
                body = ledger.entry(request.entry_id)
                return ReadResponse(Status.EOK, request.ledger, request.entry_id, body, ledger.lac)
            case BatchReadRequest():
                ledger = self._ledger(request.ledger)
                bodies = [ledger.entry(request.entry_id)]
                while (body_ := ledger.entries.get(request.entry_id + len(bodies))) and len(bodies) < request.max_count:
                    bodies.append(body_)
                return BatchReadResponse(
                    Status.EOK, request.ledger, request.entry_id, request.request_id, tuple(bodies)
                )
            case WriteLacRequest():
                ledger = self._opened(request.ledger, request.master_key)
                ledger.explicit_lac = bytes(request.body)
                self._advance(ledger, read_lac_header(request.body).last_add_confirmed)
                return WriteLacResponse(Status.EOK, request.ledger)
            case ReadLacRequest():
                known = self.ledgers.get(request.ledger)
                if known is None or not (known.entries or known.explicit_lac):
                    return ReadLacResponse(Status.ENOENTRY, request.ledger)
                last = known.entries[max(known.entries)] if known.entries else None
                status = Status.EIO if last is None else Status.EOK
                return ReadLacResponse(status, request.ledger, known.explicit_lac, last)
            case ForceLedgerRequest():
                return ForceLedgerResponse(Status.EOK, request.ledger)
            case _:
                return refusal(request, Status.EBADREQ)

    def _advance(self, ledger: MemoryLedger, lac: int) -> None:
        if lac > ledger.lac or ledger.fenced:
            ledger.lac = max(ledger.lac, lac)
            for request, respond in list(ledger.waiting):
                self._wake(ledger, request, respond)

    def _wake(self, ledger: MemoryLedger, request: ReadRequest, respond: Respond) -> None:
        if (request, respond) in ledger.waiting:
            ledger.waiting.remove((request, respond))
            respond(self._tail(ledger, request))

    def _tail(self, ledger: MemoryLedger, request: ReadRequest) -> Response:
        assert request.previous_lac is not None
        entry_id = request.previous_lac + 1
        if not request.piggyback:
            try:
                return ReadResponse(
                    Status.EOK, request.ledger, request.entry_id, ledger.entry(request.entry_id), ledger.lac
                )
            except BkctlError:
                return refusal(request, Status.ENOENTRY)
        if ledger.lac >= entry_id and entry_id in ledger.entries:
            return ReadResponse(Status.EOK, request.ledger, entry_id, ledger.entries[entry_id], ledger.lac, 1)
        return ReadResponse(Status.EOK, request.ledger, -1, None, ledger.lac)


@pytest.fixture
def memory_bookies() -> Iterator[list[int]]:
    """The ports of three bookies in memory, served by a thread of their own."""
    ports: list[int] = []
    started = threading.Event()
    loop_and_end: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def main() -> None:
        servers = [BookieServer(MemoryBookie()) for _ in range(3)]
        for server in servers:
            await server.start("127.0.0.1")
            ports.append(server.port)
        end = asyncio.Event()
        loop_and_end.append((asyncio.get_running_loop(), end))
        started.set()
        await end.wait()
        for server in servers:
            await server.close(grace_s=0.1)

    thread = threading.Thread(target=run, args=(main(),))
    thread.start()
    assert started.wait(60)
    yield ports
    loop, end = loop_and_end[0]
    loop.call_soon_threadsafe(end.set)
    thread.join()


@pytest.mark.parametrize("protocol", ["v2", "v3"])
def test_javas_client_is_served_from_first_to_last(
    java: Java,
    zookeeper: ZooKeeperServer,
    memory_bookies: list[int],
    tmp_path: Path,
    protocol: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kazoo.client import KazooClient

    plain: list[type] = []
    decode = v3.decode_request

    def counted(buffer: memoryview, at: int, end: int) -> object:
        call = decode(buffer, at, end)
        taken = runs.compiled and runs.take_requests(buffer, at - 4, end, end - at, 1, 1, is_v2=False)
        if call is not None and taken is not None:
            plain.append(type(call.request))
        return call

    monkeypatch.setattr(v3, "decode_request", counted)
    root = zookeeper.new_root()
    uri = zookeeper.metadata_uri(root)
    format_cluster(java, uri, tmp_path)
    registry = KazooClient(zookeeper.connect_string)
    registry.start()
    try:
        for port in memory_bookies:
            registry.create(f"{root}/available/127.0.0.1:{port}", b"", ephemeral=True)
        lines = java.run_source("Roundtrip.java", uri, protocol).stdout.splitlines()
    finally:
        registry.stop()
        registry.close()
    steps = {json.loads(line)["step"] for line in lines}
    assert {"write, close, read", "recovery", "fencing", "delete"} <= steps
    if protocol == "v3" and runs.compiled is not None:
        # Java's plain requests have the form that runs have.
        assert plain.count(AddRequest) > 1000
        assert plain.count(ReadRequest) > 1000
