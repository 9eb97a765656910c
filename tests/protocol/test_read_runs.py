"""Runs of reads: what they take is what the decoders say frame by frame; and how they are answered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import LIMIT_S

from bkctl.errors import LedgerNotFound
from bkctl.ids import I64_MAX, LedgerId
from bkctl.protocol import runs, v2, v3
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.handler import ReadRunResponder
from bkctl.protocol.messages import (
    FRAME_SIZE_BYTES_MAX,
    LAST_ENTRY,
    AddRequest,
    BytesLike,
    Protocol,
    ReadRequest,
    ReadResponse,
    Request,
    Respond,
    Status,
    refusal,
)
from bkctl.protocol.runs import AddRun, AnswerAdds, ReadRun
from bkctl.protocol.server import BookieServer

Runner = Callable[[Coroutine[Any, Any, None]], None]

PLAIN = (LedgerId(0, 0), LedgerId(0, 5), LedgerId(0, 2**63 - 1))
SCOPED = (LedgerId(7, 1), LedgerId(2**64 - 1, 2**64 - 1))
KEY = b"k" * 20
SIZE_MAX = FRAME_SIZE_BYTES_MAX - 4
needs_compiled = pytest.mark.compiled
protocols = pytest.mark.parametrize("is_v2", [True, False], ids=["v2", "v3"])


def frame(request: Request, *, is_v2: bool, txn_id: int = 0) -> bytes:
    out: list[BytesLike] = []
    if is_v2:
        v2.encode_request(request, out)
    else:
        v3.encode_request(txn_id, request, out)
    return b"".join(out)


entry_ids = st.one_of(st.integers(0, 300), st.integers(0, I64_MAX))
txn_ids = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1))
reads = st.tuples(st.sampled_from(PLAIN[:2]), entry_ids).map(lambda ids: ReadRequest(*ids))
scoped_reads = st.tuples(st.sampled_from(SCOPED), entry_ids).map(lambda ids: ReadRequest(*ids))
ODD = (
    ReadRequest(PLAIN[1], LAST_ENTRY),
    ReadRequest(PLAIN[1], 3, KEY, fence=True),
    ReadRequest(PLAIN[1], 3, high_priority=True),
    AddRequest(PLAIN[1], 3, KEY, bytes(40)),
)
ODD_V3 = (
    ReadRequest(PLAIN[1], 3, KEY),
    ReadRequest(PLAIN[1], 3, previous_lac=2, timeout_ms=5),
    ReadRequest(SCOPED[0], LAST_ENTRY, previous_lac=2, piggyback=True),
)
v2_frames = st.builds(lambda each: frame(each, is_v2=True), st.one_of(reads, reads, reads, st.sampled_from(ODD)))
v3_frames = st.builds(
    lambda each, txn_id: frame(each, is_v2=False, txn_id=txn_id),
    st.one_of(reads, reads, scoped_reads, st.sampled_from((*ODD, *ODD_V3))),
    txn_ids,
)


read_runs = st.builds(
    lambda ledger, ids: ReadRun(ledger, [entry_id for entry_id, _ in ids], [txn_id for _, txn_id in ids]),
    st.sampled_from((*PLAIN, *SCOPED)),
    st.lists(st.tuples(entry_ids, txn_ids), min_size=1, max_size=9),
)


def single_answers(run: ReadRun, responses: list[ReadResponse], *, is_v2: bool) -> bytes:
    out: list[BytesLike] = []
    for number, response in enumerate(responses):
        if is_v2:
            v2.encode_response(v2.VERSION << 24 | v2.READ_ENTRY << 16, response, out)
        else:
            header = v3.Header(run.txn_ids[number], v3.READ_ENTRY, v3.VERSION, 0)
            v3.encode_response(header, response, run.ledger[0], out)
    return b"".join(out)


@needs_compiled
def test_answers_of_a_run_equal_single_answers() -> None:
    @given(read_runs, st.data(), st.one_of(st.none(), st.integers(-1, I64_MAX)))
    def compare(run: ReadRun, data: st.DataObject, max_lac: int | None) -> None:
        count = len(run.entry_ids)
        sizes = data.draw(st.lists(st.sampled_from((0, 1, 90, 127, 128, 20_000)), min_size=count, max_size=count))
        bodies: list[BytesLike] = [
            kind(bytes([number]) * size)
            for number, (kind, size) in enumerate(
                zip(itertools.cycle((bytes, memoryview, bytearray)), sizes, strict=False)
            )
        ]
        responses = [
            ReadResponse(Status.EOK, run.ledger, entry_id, body, max_lac)
            for entry_id, body in zip(run.entry_ids, bodies, strict=True)
        ]
        assert run.answers(bodies, max_lac, is_v2=False) == single_answers(run, responses, is_v2=False)
        if not run.ledger.is_scoped:
            assert run.answers(bodies, max_lac, is_v2=True) == single_answers(run, responses, is_v2=True)

    compare()
    for txn_ids in ([1, 2], [1]):
        with pytest.raises(ValueError, match="as many bodies"):
            ReadRun(PLAIN[1], [1, 2], txn_ids).answers([b"only one"], None, is_v2=False)


@needs_compiled
def test_compiled_answers_refuse_arguments_that_do_not_fit() -> None:
    wrong: tuple[Any, ...] = (
        ([2**64], None, [b"x"], None), (["1"], None, [b"x"], None), ([1], None, ["text"], None),
        (None, None, [b"x"], None), ([1], [-1], [b"x"], None), ([1], [1], [b"x"], 2**64),
    )  # fmt: skip
    for arguments in wrong:
        with pytest.raises((TypeError, OverflowError)):
            runs.compiled.answer_reads((0, 5), *arguments)


@given(read_runs)
def test_refused_run_is_refused_read_by_read(run: ReadRun) -> None:
    responses = [ReadResponse(Status.EUNKNOWNLEDGERSTATE, run.ledger, entry_id) for entry_id in run.entry_ids]
    for is_v2 in (False,) if run.ledger.is_scoped else (False, True):
        found = run.refusals(Status.EUNKNOWNLEDGERSTATE, is_v2=is_v2)
        assert found == single_answers(run, responses, is_v2=is_v2)


class Bookie:
    """A handler that takes runs of reads; ledger 0 is missing, and odd entries of the others."""

    def __init__(self) -> None:
        self.runs: list[ReadRun] = []
        self.responders: list[ReadRunResponder] = []
        self.requests: list[Request] = []

    def handle(self, request: Request, respond: Respond) -> None:
        if isinstance(request, ReadRequest):
            self.requests.append(request)
        respond(refusal(request, Status.EIO))

    def adds_at_once(self) -> int:
        return 1

    def handle_adds(self, adds: Sequence[AddRun], answer: AnswerAdds) -> None:
        answer(adds, Status.EIO)

    def handle_reads(self, reads: ReadRun, respond: ReadRunResponder) -> None:
        if reads.ledger == PLAIN[0]:
            raise LedgerNotFound(f"No ledger {reads.ledger}")
        self.runs.append(reads)
        self.responders.append(respond)

    def answer(self) -> None:
        for run, respond in zip(self.runs, self.responders, strict=True):
            even = run.part([number for number, entry_id in enumerate(run.entry_ids) if entry_id % 2 == 0])
            odd = run.part([number for number, entry_id in enumerate(run.entry_ids) if entry_id % 2])
            respond.refuse(odd, Status.ENOENTRY)
            respond.answer(even, [b"entry %d" % entry_id for entry_id in even.entry_ids], 17)


@needs_compiled
@pytest.mark.parametrize("protocol", [Protocol.V2, Protocol.V3])
def test_server_takes_runs_and_each_read_has_its_answer(runner: Runner, protocol: Protocol) -> None:
    ledger = PLAIN[1] if protocol is Protocol.V2 else SCOPED[1]

    async def main() -> None:
        bookie = Bookie()
        server = BookieServer(bookie)
        await server.start("127.0.0.1")
        client = await BookieConnection.open("127.0.0.1", server.port, bookie_id="b", protocol=protocol)
        try:
            assert await client.supports_scopes() is (protocol is Protocol.V3)
            before = len(bookie.requests)
            if protocol is Protocol.V2:
                # A connection is taken for one of v3 until its first frame of v2, which therefore comes alone.
                assert (await client.send(ReadRequest(ledger, 1000))).status is Status.EIO
                before += 1
            sent = [client.send(ReadRequest(ledger, entry_id)) for entry_id in range(200)]
            missing = [client.send(ReadRequest(PLAIN[0], entry_id)) for entry_id in range(3)]
            assert [await each for each in missing] == [
                ReadResponse(Status.ENOLEDGER, PLAIN[0], entry_id) for entry_id in range(3)
            ]
            async with asyncio.timeout(LIMIT_S):
                while sum(len(run.entry_ids) for run in bookie.runs) < 200:
                    await asyncio.sleep(0.01)
            assert server.in_flight.bytes > 0
            assert len(bookie.requests) == before
            bookie.answer()
            for entry_id, each in enumerate(sent):
                response = await each
                assert isinstance(response, ReadResponse)
                assert (response.ledger, response.entry_id) == (ledger, entry_id)
                if entry_id % 2:
                    assert response.status is Status.ENOENTRY
                else:
                    assert bytes(response.body or b"") == b"entry %d" % entry_id
                    assert response.max_lac == (None if protocol is Protocol.V2 else 17)
            await asyncio.sleep(0)
            assert server.in_flight.bytes == 0
        finally:
            client.close()
            await client.wait_closed()
            await server.close(grace_s=0.1)

    runner(main())
