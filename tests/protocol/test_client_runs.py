"""A client's runs: compiled, they are the frames and answers of the encoders and decoders, one by one."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bkctl.errors import BkctlError
from bkctl.ids import LedgerId
from bkctl.protocol import runs, v2, v3
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import (
    FRAME_SIZE_BYTES_MAX,
    AddRequest,
    AddResponse,
    BytesLike,
    Protocol,
    ReadRequest,
    ReadResponse,
    Request,
    Response,
    Status,
    refusal,
)
from bkctl.protocol.runs import KINDS, RESPONSES, encode_run
from bkctl.protocol.server import BookieServer

SIZE_MAX = FRAME_SIZE_BYTES_MAX - 4
KEY = b"k" * 20
needs_compiled = pytest.mark.compiled

numbers = st.one_of(
    st.integers(0, 2**63 - 1), st.sampled_from([0, 127, 128, 2**14 - 1, 2**14, 2**21, 2**28, 2**35, 2**63 - 1])
)
bodies = st.binary(max_size=300)


def ledgers(is_v2: bool) -> st.SearchStrategy[LedgerId]:
    return st.builds(LedgerId, st.just(0) if is_v2 else st.sampled_from([0, 0, 7, 2**64 - 1]), numbers)


def adds(is_v2: bool) -> st.SearchStrategy[AddRequest]:
    pieces = st.one_of(bodies, st.tuples(bodies, bodies), st.tuples())
    return st.tuples(ledgers(is_v2), numbers, st.just(KEY), pieces).map(lambda fields: AddRequest(*fields))


def reads(is_v2: bool) -> st.SearchStrategy[ReadRequest]:
    return st.tuples(ledgers(is_v2), numbers).map(lambda fields: ReadRequest(*fields))


def frames(is_v2: bool, first_txn_id: int, requests: list[Any]) -> bytes:
    """The frames as the encoders of single requests write them."""
    out: list[BytesLike] = []
    for txn_id, request in enumerate(requests, first_txn_id):
        if is_v2:
            v2.encode_request(request, out)
        else:
            v3.encode_request(txn_id, joined(request), out)
    return b"".join(out)


def joined(request: Any) -> Any:
    """An add with its body in one piece, as protobuf takes it."""
    if isinstance(request, AddRequest) and isinstance(request.body, tuple):
        return request._replace(body=b"".join(request.body))
    return request


@needs_compiled
@pytest.mark.parametrize("is_v2", [True, False], ids=["v2", "v3"])
@given(data=st.data())
def test_runs_are_encoded_as_single_requests(is_v2: bool, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([adds, reads]))
    requests: list[Any] = data.draw(st.lists(kind(is_v2), min_size=1, max_size=8))
    txn_id = data.draw(numbers.filter(lambda number: number < 2**62))
    assert encode_run(is_v2, txn_id, requests, SIZE_MAX) == frames(is_v2, txn_id, requests)


@needs_compiled
@pytest.mark.parametrize("is_v2", [True, False], ids=["v2", "v3"])
def test_requests_that_are_not_plain_are_left_to_the_encoders(is_v2: bool) -> None:
    ledger = LedgerId(0, 5)
    plain = AddRequest(ledger, 1, KEY, b"entry")
    others: list[Request] = [
        plain._replace(recovery_add=True),
        plain._replace(high_priority=True),
        plain._replace(deferred_sync=True),
        plain._replace(master_key=b"short"),
        plain._replace(entry_id=-1),
        plain._replace(body=bytes(SIZE_MAX)),
        plain._replace(body=memoryview(b"entry")),
    ]
    for other in others:
        assert encode_run(is_v2, 1, [plain, other], SIZE_MAX) is None, other
    read = ReadRequest(ledger, 1)
    for changed in (
        read._replace(master_key=KEY, fence=True), read._replace(high_priority=True), read._replace(entry_id=-1),
        read._replace(previous_lac=1), read._replace(timeout_ms=1), read._replace(piggyback=True),
    ):  # fmt: skip
        assert encode_run(is_v2, 1, [read, changed], SIZE_MAX) is None, changed
    scoped = encode_run(is_v2, 1, [ReadRequest(LedgerId(7, 5), 1)], SIZE_MAX)
    assert (scoped is None) == is_v2


def answer(is_v2: bool, txn_id: int, response: Any) -> bytes:
    out: list[BytesLike] = []
    kind = AddRequest if isinstance(response, AddResponse) else ReadRequest
    if is_v2:
        opcode = v2.ADD_ENTRY if kind is AddRequest else v2.READ_ENTRY
        v2.encode_response(v2.VERSION << 24 | opcode << 16, response, out)
    else:
        header = v3.Header(txn_id, v3.OPERATIONS[kind], v3.VERSION, 0)
        v3.encode_response(header, response, response.ledger.scope_id, out)
    return b"".join(out)


def responses(is_v2: bool) -> st.SearchStrategy[Any]:
    lacs = st.none() if is_v2 else st.one_of(st.none(), st.integers(-1, 2**63 - 1))
    eok = st.just(Status.EOK)
    added = st.tuples(eok, ledgers(is_v2), numbers).map(lambda fields: AddResponse(*fields))
    read = st.tuples(eok, ledgers(is_v2), numbers, bodies, lacs).map(lambda fields: ReadResponse(*fields))
    refused = st.builds(refusal, st.one_of(adds(is_v2), reads(is_v2)), st.sampled_from([Status.ENOENTRY, Status.EIO]))
    return st.one_of(added, read, added, read, refused)


def one_by_one(is_v2: bool, data: bytes) -> list[tuple[Any, Response | None]]:
    """Key and response of each frame, by the decoders of single frames."""
    found: list[tuple[Any, Response | None]] = []
    view, at = memoryview(data), 0
    while at < len(data):
        stop = at + 4 + int.from_bytes(data[at : at + 4], "big")
        if is_v2:
            found.append(v2.decode_response(view, at + 4, stop))
        else:
            decoded = v3.decode_response(view, at + 4, stop)
            found.append((decoded.txn_id, decoded.response))
        at = stop
    return found


@needs_compiled
@pytest.mark.parametrize("is_v2", [True, False], ids=["v2", "v3"])
@given(data=st.data())
def test_runs_of_answers_are_decoded_as_single_answers(is_v2: bool, data: st.DataObject) -> None:
    answers = data.draw(st.lists(responses(is_v2), max_size=8))
    sent = b"".join(answer(is_v2, txn_id * 1000, each) for txn_id, each in enumerate(answers))
    cut = data.draw(st.integers(0, 20))
    found = runs.take_answers(is_v2, memoryview(sent + b"\0\0\0"), 0, len(sent) - min(cut, len(sent)), SIZE_MAX)
    expected = one_by_one(is_v2, sent)
    if found is None:
        first = answers[0] if answers else None
        assert cut or first is None or first.status is not Status.EOK
        return
    stop, keys, got = found
    assert list(zip(keys, got, strict=True)) == expected[: len(got)]
    assert [type(each) for each in got] == [type(each) for _, each in expected[: len(got)]]
    assert stop == len(b"".join(answer(is_v2, at * 1000, each) for at, each in enumerate(answers[: len(got)])))
    if not cut and len(got) < len(answers):
        assert answers[len(got)].status is not Status.EOK, "stopped at a plain answer"
    assert all(each.status is Status.EOK for each in got)


@needs_compiled
@pytest.mark.parametrize("is_v2", [True, False], ids=["v2", "v3"])
@given(data=st.binary(max_size=200), start=st.integers(0, 40), flips=st.lists(st.integers(0, 10**6), max_size=3))
@example(data=b"\x00\x00\x00\x08\x0a\x05\x08\x03\x10\x01\x18", start=0, flips=[])
@example(data=b"\x7f\xff\xff\xff" + bytes(40), start=0, flips=[])
@example(data=b"\x00\x00\x00\x18\x02\x02" + bytes(30), start=0, flips=[])
def test_damaged_answers_are_never_decoded_differently(is_v2: bool, data: bytes, start: int, flips: list[int]) -> None:
    response = ReadResponse(Status.EOK, LedgerId(0, 5), 300, b"entry", None if is_v2 else 299)
    changed = bytearray(answer(is_v2, 7, response) + data)
    for flip in flips:
        changed[flip // 8 % len(changed)] ^= 1 << flip % 8
    at = min(start, len(changed))
    found = runs.take_answers(is_v2, memoryview(changed), at, len(changed), SIZE_MAX)
    if found is not None:
        stop, keys, got = found
        assert at < stop <= len(changed)
        expected = one_by_one(is_v2, bytes(changed[at:stop]))
        assert list(zip(keys, got, strict=True)) == expected


@needs_compiled
def test_every_change_of_one_byte_of_an_answer_is_taken_as_the_decoders_do() -> None:
    ledger = LedgerId(9, 1 << 40)
    for response in (AddResponse(Status.EOK, ledger, 70_000), ReadResponse(Status.EOK, ledger, 7, b"entry" * 9, 5)):
        example_frame = answer(False, 300_000, response)
        for at, value in itertools.product(range(4, len(example_frame)), (0, 1, 5, 0x7F, 0x80, 0xFF)):
            data = example_frame[:at] + bytes((value,)) + example_frame[at + 1 :]
            found = runs.compiled.take_answers(False, memoryview(data), 0, len(data), SIZE_MAX, KINDS)
            if found is not None:
                assert found[0] == len(data)
                assert list(zip(*found[1:], strict=True)) == one_by_one(False, data)


@needs_compiled
def test_an_apache_bookie_that_served_no_add_since_its_start_is_read_in_runs() -> None:
    # Its maxLAC is -1, ten bytes of varint; captured from Apache BookKeeper 4.18.0.
    body = bytes.fromhex("00000000000000000000000000000000ffffffffffffffff0000000000000002") + b"CRCChi"
    nested = b"\x08\x00\x10\x00\x18\x00\x22" + bytes([len(body)]) + body + b"\x28" + b"\xff" * 9 + b"\x01"
    message = bytes.fromhex("0a060803100118011000a206") + bytes([len(nested)]) + nested
    data = len(message).to_bytes(4, "big") + message
    expected = ReadResponse(Status.EOK, LedgerId(0, 0), 0, body, -1)
    assert runs.take_answers(False, memoryview(data), 0, len(data), SIZE_MAX) == (len(data), [1], [expected])
    assert one_by_one(False, data) == [(1, expected)]


@needs_compiled
def test_part_outside_the_buffer_is_refused() -> None:
    assert runs.compiled is not None
    for at, end in ((0, 11), (-1, 10)):
        with pytest.raises(ValueError, match="part of the buffer"):
            runs.compiled.take_answers(True, memoryview(bytes(10)), at, end, 100, KINDS)


class Answering:
    """Stores nothing: refuses every third add or read, and answers the others."""

    def handle(self, request: Any, respond: Any) -> None:
        if request.entry_id % 3 == 2:
            respond(refusal(request, Status.EIO))
        elif isinstance(request, AddRequest):
            respond(AddResponse(Status.EOK, request.ledger, request.entry_id))
        else:
            respond(ReadResponse(Status.EOK, request.ledger, request.entry_id, b"%d" % request.entry_id))


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiled), False], ids=["compiled", "plain"])
@pytest.mark.parametrize("protocol", Protocol)
@pytest.mark.parametrize("kind", RESPONSES)
async def test_each_request_of_a_run_gets_its_own_outcome(
    kind: type, protocol: Protocol, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(runs, "compiled", None)
    server = BookieServer(Answering())  # type: ignore[arg-type]
    await server.start("127.0.0.1", 0)
    connection = await BookieConnection.open("127.0.0.1", server.port, bookie_id="b", protocol=protocol)
    ledger = LedgerId(0, 5)
    entry = ledger.ledger_id.to_bytes(8, "big")
    requests: list[Any] = [
        ReadRequest(ledger, entry_id)
        if kind is ReadRequest
        else AddRequest(ledger, entry_id, KEY, (entry, entry_id.to_bytes(8, "big"), bytes(16)))
        for entry_id in range(100)
    ]
    found: dict[int, Any] = {}
    done = asyncio.Event()

    def answered(requests: Any, outcomes: Any) -> None:
        assert found.keys().isdisjoint(request.entry_id for request in requests)
        found.update((request.entry_id, outcome) for request, outcome in zip(requests, outcomes, strict=True))
        if len(found) == len(requests):
            done.set()

    connection.send_run(requests, answered)
    await done.wait()
    for entry_id, outcome in found.items():
        assert not isinstance(outcome, BkctlError)
        assert (type(outcome), outcome.ledger, outcome.entry_id) == (RESPONSES[kind], ledger, entry_id)
        assert outcome.status is (Status.EIO if entry_id % 3 == 2 else Status.EOK)
        if kind is ReadRequest and entry_id % 3 != 2:
            assert bytes(outcome.body) == b"%d" % entry_id
    connection.close()
    await connection.wait_closed()
    await server.close(0.1)
