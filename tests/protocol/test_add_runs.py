"""Runs of adds agree with the decoders frame by frame, and are answered as one."""

from __future__ import annotations

import asyncio
import functools
import struct
import tracemalloc
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import LIMIT_S

from bkctl.errors import LedgerFenced
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.index import ENTRY_ID_MAX
from bkctl.ids import LedgerId
from bkctl.protocol import bookkeeper_protocol_pb2 as pb
from bkctl.protocol import v2, v3
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import (
    FRAME_SIZE_BYTES_MAX,
    AddRequest,
    AddResponse,
    BytesLike,
    Protocol,
    ReadRequest,
    Request,
    Respond,
    Status,
    refusal,
)
from bkctl.protocol.runs import AddRun, AnswerAdds, take_requests
from bkctl.protocol.server import GATHER_S, GATHERED_BYTES_MAX, BookieServer

Runner = Callable[[Coroutine[Any, Any, None]], None]

PLAIN = (LedgerId(0, 0), LedgerId(0, 5), LedgerId(0, 2**63 - 1))
SCOPED = (LedgerId(7, 1), LedgerId(2**64 - 1, 2**64 - 1))
KEYS = (b"k" * 20, bytes(20))
SIZE_MAX = FRAME_SIZE_BYTES_MAX - 4
needs_compiled = pytest.mark.compiled


def entry(ledger: LedgerId, entry_id: int, payload: bytes = b"", digest: DigestType = DigestType.CRC32C) -> bytes:
    return DigestManager(ledger, digest).seal(entry_id, entry_id - 1, 70_000, payload) + payload


def frame(request: Request, *, is_v2: bool, txn_id: int = 0) -> bytes:
    out: list[BytesLike] = []
    if is_v2:
        v2.encode_request(request, out)
    else:
        v3.encode_request(txn_id, request, out)
    return b"".join(out)


def add(ledger: LedgerId, entry_id: int, payload: bytes = b"", key: bytes = KEYS[0], **flags: bool) -> AddRequest:
    return AddRequest(ledger, entry_id, key, entry(ledger, entry_id, payload), **flags)


def run_of(data: bytes, *, is_v2: bool) -> AddRun:
    found = take_requests(memoryview(data), 0, len(data), SIZE_MAX, 10_000, 10_000, is_v2=is_v2)
    assert found is not None
    stop, (run,), reads = found
    assert (stop, reads) == (len(data), [])
    return run


adds = st.builds(add, st.sampled_from(PLAIN), st.integers(0, 300), st.binary(max_size=200), st.sampled_from(KEYS))
scoped_adds = st.builds(add, st.sampled_from(SCOPED), st.integers(0, 300), st.binary(max_size=200))
odd_requests = st.sampled_from(
    (
        add(PLAIN[1], 3, recovery_add=True),
        add(PLAIN[1], 3, high_priority=True),
        add(PLAIN[1], ENTRY_ID_MAX + 1),
        AddRequest(PLAIN[1], 3, KEYS[0], entry(PLAIN[1], 3)[:31]),
        AddRequest(PLAIN[1], 3, KEYS[0], entry(PLAIN[1], 3)[:20]),
        ReadRequest(PLAIN[1], 3),
    )
)
odd_v3_requests = st.sampled_from(
    (
        add(PLAIN[1], 3, deferred_sync=True),
        AddRequest(PLAIN[1], 4, KEYS[0], entry(PLAIN[1], 3)),
        AddRequest(PLAIN[1], 3, KEYS[0], entry(SCOPED[0], 3)),
        AddRequest(SCOPED[0], 3, KEYS[0], entry(PLAIN[1], 3)),
        AddRequest(SCOPED[0], 3, KEYS[0], entry(SCOPED[1], 3)),
        AddRequest(SCOPED[0], 3, KEYS[0], entry(SCOPED[0], 3)[:40]),
        AddRequest(SCOPED[0], 3, KEYS[0], b"\xa5" + entry(SCOPED[0], 3)[1:]),
    )
)
txn_ids = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1))
v2_frames = st.builds(lambda each: frame(each, is_v2=True), st.one_of(adds, adds, odd_requests))
v3_frames = st.builds(
    lambda each, txn_id: frame(each, is_v2=False, txn_id=txn_id),
    st.one_of(adds, scoped_adds, odd_requests, odd_v3_requests),
    txn_ids,
)


class Bookie:
    """A handler that takes runs; it refuses runs of ledger 0, and holds all other runs back."""

    def __init__(self) -> None:
        self.runs: list[AddRun] = []
        self.answers: list[Callable[[Status], None]] = []
        self.requests: list[Request] = []

    def handle(self, request: Request, respond: Respond) -> None:
        if isinstance(request, AddRequest):
            self.requests.append(request)
            respond(AddResponse(Status.EOK, request.ledger, request.entry_id))
        else:  # whether it knows scopes
            respond(refusal(request, Status.ENOLEDGER))

    def adds_at_once(self) -> int:
        return 50

    def handle_adds(self, adds: Sequence[AddRun], answer: AnswerAdds) -> None:
        assert sum(len(run.records) for run in adds) <= 50
        if all(run.ledger == PLAIN[0] for run in adds):
            raise LedgerFenced(f"Ledger {adds[0].ledger} is fenced")
        for run in adds:
            if run.ledger == PLAIN[0]:
                answer([run], Status.EFENCED)
                continue
            self.runs.append(run)
            self.answers.append(functools.partial(answer, [run]))


@needs_compiled
@pytest.mark.parametrize("protocol", [Protocol.V2, Protocol.V3])
def test_a_bookie_serves_runs_and_each_add_has_its_answer(runner: Runner, protocol: Protocol) -> None:
    ledger = PLAIN[1] if protocol is Protocol.V2 else SCOPED[1]

    async def main() -> None:
        bookie = Bookie()
        server = BookieServer(bookie)
        await server.start("127.0.0.1")
        client = await BookieConnection.open("127.0.0.1", server.port, bookie_id="b", protocol=protocol)
        try:
            assert await client.supports_scopes() is (protocol is Protocol.V3)
            sent = [client.send(add(ledger, entry_id, bytes(500))) for entry_id in range(200)]
            odd = client.send(add(ledger, 200, recovery_add=True))
            refused = [client.send(add(PLAIN[0], entry_id)) for entry_id in range(3)]
            failed = [client.send(add(ledger, entry_id)) for entry_id in range(300, 340)]
            assert (await odd).status is Status.EOK
            assert [await each for each in refused] == [
                AddResponse(Status.EFENCED, PLAIN[0], entry_id) for entry_id in range(3)
            ]
            # A connection is taken for one of v3 until its first frame of v2, which therefore comes alone.
            expected = [*range(protocol is Protocol.V2, 200), *range(300, 340)]
            async with asyncio.timeout(LIMIT_S):
                while sum(len(run.records) for run in bookie.runs) < len(expected):
                    await asyncio.sleep(0.01)
            assert [entry_id for run in bookie.runs for entry_id in run.entry_ids] == expected
            assert len(bookie.requests) == 240 + 1 - len(expected)
            assert server.in_flight.bytes > 239 * 36
            for run, answer in zip(bookie.runs, bookie.answers, strict=True):
                answer(Status.EOK if run.entry_ids[0] < 300 else Status.EIO)
            assert [await each for each in sent] == [
                AddResponse(Status.EOK, ledger, entry_id) for entry_id in range(200)
            ]
            assert [await each for each in failed] == [
                AddResponse(Status.EIO, ledger, entry_id) for entry_id in range(300, 340)
            ]
            await asyncio.sleep(0)
            assert server.in_flight.bytes == 0
        finally:
            client.close()
            await client.wait_closed()
            await server.close(grace_s=0.1)

    runner(main())


@needs_compiled
@pytest.mark.parametrize("gather_s", [3600, GATHER_S])
def test_small_pieces_of_input_are_gathered_while_many_adds_are_in_flight(
    runner: Runner, gather_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bkctl.protocol.server.GATHER_S", gather_s)

    async def main() -> None:
        bookie = Bookie()
        server = BookieServer(bookie)
        await server.start("127.0.0.1")
        client = await BookieConnection.open("127.0.0.1", server.port, bookie_id="b", protocol=Protocol.V3)

        async def served(count: int) -> None:
            async with asyncio.timeout(LIMIT_S):
                while sum(len(run.records) for run in bookie.runs) < count:
                    await asyncio.sleep(0.01)

        try:
            assert await client.supports_scopes()
            sent = [client.send(add(PLAIN[1], entry_id, bytes(1000))) for entry_id in range(100)]
            await served(100)
            for entry_id in range(100, 103):
                sent.append(client.send(add(PLAIN[1], entry_id)))
                await asyncio.sleep(0.05)
            if gather_s < 1:
                await served(103)
            sent.append(client.send(add(PLAIN[1], 103, bytes(GATHERED_BYTES_MAX))))
            await served(104)
            if gather_s > 1:
                assert bookie.runs[-1].entry_ids == [100, 101, 102, 103]
            for answer in bookie.answers:
                answer(Status.EOK)
            assert [(await each).status for each in sent] == [Status.EOK] * 104
        finally:
            client.close()
            await client.wait_closed()
            await server.close(grace_s=0.1)

    runner(main())


@needs_compiled
@given(
    st.sampled_from((*PLAIN, *SCOPED)), st.lists(st.tuples(st.integers(0, 2**40 - 1), txn_ids), min_size=1, max_size=9)
)
def test_a_refused_run_is_refused_add_by_add(ledger: LedgerId, ids: list[tuple[int, int]]) -> None:
    for is_v2 in (False,) if ledger.is_scoped else (False, True):
        data = b"".join(frame(add(ledger, entry_id), is_v2=is_v2, txn_id=txn_id) for entry_id, txn_id in ids)
        out = memoryview(run_of(data, is_v2=is_v2).refusals(Status.EFENCED, is_v2=is_v2))
        at = 0
        for entry_id, txn_id in ids:
            end = at + 4 + int.from_bytes(out[at : at + 4], "big")
            expected = AddResponse(Status.EFENCED, ledger, entry_id)
            if is_v2:
                assert v2.decode_response(out, at + 4, end) == ((v2.ADD_ENTRY, ledger.ledger_id, entry_id), expected)
            else:
                answer = v3.decode_response(out, at + 4, end)
                assert (answer.txn_id, answer.response) == (txn_id, expected)
            at = end
        assert at == len(out)


@needs_compiled
@pytest.mark.parametrize("size", [0, 1, 19, 21, 1000])
def test_a_run_takes_no_master_key_that_is_not_20_bytes(size: int) -> None:
    """Such a frame goes its own way, to be refused; it also ends the run before it."""
    for ledger in (*PLAIN, *SCOPED):
        odd = frame(add(ledger, 1, b"payload", b"k" * size), is_v2=False)
        plain = frame(add(ledger, 0, b"payload"), is_v2=False)
        assert take_requests(memoryview(odd), 0, len(odd), SIZE_MAX, 10, 10, is_v2=False) is None
        found = take_requests(memoryview(plain + odd), 0, len(plain + odd), SIZE_MAX, 10, 10, is_v2=False)
        assert found is not None
        assert (found[0], [run.entry_ids for run in found[1]]) == (len(plain), [[0]])


@needs_compiled
def test_bytes_in_the_place_of_a_scope_are_not_kept() -> None:
    """Each frame has an empty entry, and much behind it."""
    size, kept = 1 << 18, []
    tracemalloc.start()
    try:
        for number in range(6):
            nested = b"\x08\x05\x10\x01\x1a\x14" + KEYS[0] + b"\x22\x00\x78" + bytes([number]) * size
            varint = pb.BKPacketHeader(txnId=len(nested)).SerializePartialToString()[1:]
            body = b"\x0a\x06\x08\x03\x10\x02\x18\x01\xaa\x06" + varint + nested
            data = memoryview(struct.pack(">i", len(body)) + body)
            assert take_requests(data, 0, len(data), SIZE_MAX, 10, 10, is_v2=False) is None
            del nested, body, data
            kept.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert kept[-1] - kept[0] < size
