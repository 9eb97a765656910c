from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bkctl.errors import IllegalOperation, ProtocolError, UsageError
from bkctl.ids import U64_MAX, LedgerId
from bkctl.protocol import v2
from bkctl.protocol.messages import (
    AddRequest,
    AddResponse,
    AuthMessage,
    AuthResponse,
    BareResponse,
    BatchReadRequest,
    BatchReadResponse,
    BookieInfoRequest,
    BytesLike,
    ForceLedgerRequest,
    ListEntriesRequest,
    ReadLacRequest,
    ReadRequest,
    ReadResponse,
    Request,
    Response,
    StartTlsRequest,
    Status,
    WriteLacRequest,
)

LEDGER = LedgerId(0, 0x1122334455667788)
KEY = bytes(range(20))
ENTRY = bytes.fromhex("1122334455667788 0000000000000005") + b"rest of the entry"


def request_bytes(request: Request) -> tuple[v2.Key, bytes]:
    out: list[BytesLike] = []
    key, size = v2.encode_request(request, out)
    frame = b"".join(out)
    assert size == len(frame) == 4 + int.from_bytes(frame[:4], "big")
    return key, frame


def response_bytes(head: int, response: Response) -> bytes:
    out: list[BytesLike] = []
    size = v2.encode_response(head, response, out)
    frame = b"".join(out)
    assert size == len(frame) == 4 + int.from_bytes(frame[:4], "big")
    return frame


# The frame stands in the middle of a larger buffer, as it does when it is received.
def decode_request(frame: bytes) -> v2.Packet:
    return v2.decode_request(memoryview(b"\xee" * 3 + frame + b"\xee" * 40), 7, 3 + len(frame))


def decode_response(frame: bytes) -> tuple[v2.Key, Response]:
    return v2.decode_response(memoryview(b"\xee" * 3 + frame + b"\xee" * 40), 7, 3 + len(frame))


def test_an_add_is_header_master_key_and_entry() -> None:
    frame = request_bytes(AddRequest(LEDGER, 5, KEY, ENTRY))[1]
    assert frame.hex() == "00000039" + "02010000" + KEY.hex() + ENTRY.hex()


def test_the_pieces_of_a_body_are_sent_one_after_the_other() -> None:
    whole = request_bytes(AddRequest(LEDGER, 5, KEY, ENTRY))
    assert request_bytes(AddRequest(LEDGER, 5, KEY, (ENTRY[:10], memoryview(ENTRY)[10:]))) == whole


@pytest.mark.parametrize(
    ("request_", "frame"),
    [
        (ReadRequest(LEDGER, 5), "00000014 02020000 1122334455667788 0000000000000005"),
        (ReadRequest(LEDGER, -1), "00000014 02020000 1122334455667788 ffffffffffffffff"),
        (
            ReadRequest(LEDGER, -1, KEY, fence=True),
            "00000028 02020001 1122334455667788 ffffffffffffffff" + KEY.hex(),
        ),
        (
            ReadRequest(LEDGER, 5, KEY, fence=True, high_priority=True),
            "00000028 02020005 1122334455667788 0000000000000005" + KEY.hex(),
        ),
        (
            BatchReadRequest(LEDGER, 5, 9, 100, 5 << 20),
            "00000028 02070000 1122334455667788 0000000000000005 0000000000000009 00000064 0000000000500000",
        ),
        (
            BatchReadRequest(LEDGER, 5, 9, 100, 5 << 20, KEY, fence=True),
            "0000003c 02070001 1122334455667788 0000000000000005 0000000000000009 00000064 0000000000500000"
            + KEY.hex(),
        ),
        (AuthMessage("P", b"ab"), "0000000b 02030000 0a0150 12026162"),
    ],
)
def test_request_bytes(request_: Request, frame: str) -> None:
    assert request_bytes(request_)[1] == bytes.fromhex(frame)
    assert decode_request(bytes.fromhex(frame)).request == request_


def test_recovery_and_priority_are_flags() -> None:
    for recovery, high, flags in ((False, False, 0), (True, False, 2), (False, True, 4), (True, True, 6)):
        add = AddRequest(LEDGER, 5, KEY, ENTRY, recovery_add=recovery, high_priority=high)
        frame = request_bytes(add)[1]
        assert frame[4:8] == bytes((2, 1, 0, flags))
        assert decode_request(frame) == (0x02010000, add)


@pytest.mark.parametrize(
    ("response", "head", "frame"),
    [
        (
            AddResponse(Status.EOK, LEDGER, 5),
            0x02010000,
            "00000018 02010000 00000000 1122334455667788 0000000000000005",
        ),
        (
            AddResponse(Status.EFENCED, LEDGER, 5),
            0x02010000,
            "00000018 02010000 00000068 1122334455667788 0000000000000005",
        ),
        (
            ReadResponse(Status.EOK, LEDGER, -1, b"entry"),
            0x02020000,
            "0000001d 02020000 00000000 1122334455667788 ffffffffffffffff 656e747279",
        ),
        (
            ReadResponse(Status.ENOENTRY, LEDGER, 5),
            0x01020000,
            "00000018 01020000 00000002 1122334455667788 0000000000000005",
        ),
        (
            BatchReadResponse(Status.EOK, LEDGER, 5, 9, (b"ab", b"", b"cde")),
            0x02070000,
            "00000031 02070000 00000000 1122334455667788 0000000000000005 0000000000000009"
            "00000002 6162 00000000 00000003 636465",
        ),
        (
            BatchReadResponse(Status.ENOLEDGER, LEDGER, 5, 9),
            0x02070000,
            "00000020 02070000 00000001 1122334455667788 0000000000000005 0000000000000009",
        ),
        (AuthResponse(Status.EOK, "P", b""), 0x02030000, "00000009 02030000 0a0150 1200"),
    ],
)
def test_response_bytes(response: Response, head: int, frame: str) -> None:
    assert response_bytes(head, response) == bytes.fromhex(frame)
    assert decode_response(bytes.fromhex(frame))[1] == response


def test_a_response_finds_its_request_by_operation_ledger_and_entry() -> None:
    read, add = ReadRequest(LEDGER, 5), AddRequest(LEDGER, 5, KEY, ENTRY)
    batch = BatchReadRequest(LEDGER, 5, 9, 1, 1)
    keys = {
        request_bytes(request)[0]
        for request in (read, add, batch, read._replace(entry_id=6), batch._replace(request_id=1))
    }
    assert len(keys) == 5
    for request, head, response in (
        (read, 0x02020000, ReadResponse(Status.EOK, LEDGER, 5, b"")),
        (add, 0x02010000, AddResponse(Status.EIO, LEDGER, 5)),
        (batch, 0x02070000, BatchReadResponse(Status.EIO, LEDGER, 5, 9)),
    ):
        assert decode_response(response_bytes(head, response))[0] == request_bytes(request)[0]


@pytest.mark.parametrize(
    "request_",
    [
        AddRequest(LedgerId(7, 1), 0, KEY, ENTRY),
        ReadRequest(LedgerId(7, 1), 0),
        BatchReadRequest(LedgerId(7, 1), 0, 1, 1, 1),
        AddRequest(LEDGER, 5, KEY, ENTRY, deferred_sync=True),
        ReadRequest(LEDGER, -1, previous_lac=3),
        ReadRequest(LEDGER, -1, piggyback=True),
        WriteLacRequest(LEDGER, 5, KEY, b""),
        ReadLacRequest(LEDGER),
        ForceLedgerRequest(LEDGER),
        ListEntriesRequest(LEDGER),
        BookieInfoRequest(3),
        StartTlsRequest(),
    ],
    ids=repr,
)
def test_v2_refuses_requests_of_v3_and_writes_nothing(request_: Request) -> None:
    out: list[BytesLike] = []
    with pytest.raises(IllegalOperation):
        v2.encode_request(request_, out)
    assert out == []


@pytest.mark.parametrize(
    "request_",
    [
        AddRequest(LEDGER, 5, KEY[:19], ENTRY),
        ReadRequest(LEDGER, 5, None, fence=True),
        ReadRequest(LEDGER, 5, KEY + b"!", fence=True),
        BatchReadRequest(LEDGER, 5, 1, 1, 1, b"", fence=True),
    ],
    ids=repr,
)
def test_a_master_key_of_another_size_is_refused(request_: Request) -> None:
    out: list[BytesLike] = []
    with pytest.raises(UsageError):
        v2.encode_request(request_, out)
    assert out == []


@pytest.mark.parametrize(
    ("frame", "key"),
    [
        ("00000014 02020001 0000000000000001 0000000000000002", None),
        ("00000027 02020001 0000000000000001 0000000000000002" + KEY[:19].hex(), None),
        ("00000028 02070001 0000000000000001 0000000000000005 0000000000000009 00000064 0000000000500000", None),
        ("00000014 01020001 0000000000000001 0000000000000002", b""),
    ],
)
def test_a_fencing_read_needs_its_key_from_version_2_on(frame: str, key: bytes | None) -> None:
    data = bytes.fromhex(frame)
    if key is None:
        with pytest.raises(ProtocolError):
            decode_request(data)
    else:
        request = decode_request(data).request
        assert isinstance(request, ReadRequest)
        assert (request.fence, request.master_key) == (True, None)


def test_bytes_behind_a_plain_read_are_ignored() -> None:
    frame = bytes.fromhex("00000017 02020000 0000000000000001 0000000000000002 aabbcc")
    assert decode_request(frame).request == ReadRequest(LedgerId(0, 1), 2)


def test_version_0_has_its_opcode_in_the_lowest_byte() -> None:
    head, request = decode_request(bytes.fromhex("00000014 00000002 0000000000000001 0000000000000002"))
    assert request == ReadRequest(LedgerId(0, 1), 2)
    assert head == 0x00020000


def test_later_version_is_decoded_with_its_number() -> None:
    packet = decode_request(bytes.fromhex("00000014 05020000 0000000000000001 0000000000000002"))
    assert packet.head >> 24 == 5


def test_an_add_whose_body_is_of_a_scoped_entry_stays_in_scope_0() -> None:
    body = bytes.fromhex("a3 0000000000000007 0000000000000001 0000000000000000") + bytes(40)
    frame = (24 + len(body)).to_bytes(4, "big") + bytes.fromhex("02010000") + KEY + body
    request = decode_request(frame).request
    assert isinstance(request, AddRequest)
    assert request.ledger == LedgerId(0, 0xA300000000000000)
    assert request.body[0] == 0xA3


@given(
    scope_0=st.integers(0, U64_MAX),
    entry_id=st.integers(-(1 << 63), (1 << 63) - 1),
    key=st.binary(min_size=20, max_size=20),
    payload=st.binary(max_size=200),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_adds_and_reads_round_trip(
    scope_0: int, entry_id: int, key: bytes, payload: bytes, flags: tuple[bool, bool]
) -> None:
    ledger = LedgerId(0, scope_0)
    body = scope_0.to_bytes(8, "big") + entry_id.to_bytes(8, "big", signed=True) + payload
    add = AddRequest(ledger, entry_id, key, body, *flags)
    key_sent, frame = request_bytes(add)
    assert decode_request(frame).request == add
    assert decode_response(response_bytes(0x02010000, AddResponse(Status.EOK, ledger, entry_id)))[0] == key_sent
    read = ReadRequest(ledger, entry_id, key if flags[0] else None, *flags)
    key_sent, frame = request_bytes(read)
    assert decode_request(frame).request == read
    answer = ReadResponse(Status.EOK, ledger, entry_id, payload)
    assert decode_response(response_bytes(0x02020000, answer)) == (key_sent, answer)


@given(st.binary(max_size=80))
def test_random_bytes_are_a_request_or_a_protocol_error(data: bytes) -> None:
    for head in (b"", *(bytes((2, opcode, 0, 1)) for opcode in range(9))):
        frame = (len(head) + len(data)).to_bytes(4, "big") + head + data
        with contextlib.suppress(ProtocolError):
            packet = decode_request(frame)
            assert isinstance(packet.request, AddRequest | ReadRequest | BatchReadRequest | AuthMessage)


@given(st.binary(max_size=80))
def test_random_bytes_are_a_response_or_a_protocol_error(data: bytes) -> None:
    for head in (b"", *(bytes((2, opcode, 0, 0, 0, 0, 0, 0)) for opcode in range(9))):
        frame = (len(head) + len(data)).to_bytes(4, "big") + head + data
        with contextlib.suppress(ProtocolError):
            response = decode_response(frame)[1]
            if isinstance(response, BatchReadResponse):
                assert sum(map(len, response.bodies)) <= len(data)


@pytest.mark.parametrize("size", [-1, 3, 0x7FFFFFFF])
def test_a_batch_entry_is_held_to_its_frame(size: int) -> None:
    fields = "02070000 00000000 1122334455667788 0000000000000005 0000000000000009"
    body = bytes.fromhex(fields) + size.to_bytes(4, "big", signed=True) + b"ab"
    with pytest.raises(ProtocolError, match="entry of"):
        decode_response(len(body).to_bytes(4, "big") + body)


def test_unknown_v2_code_is_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="return code 42"):
        decode_response(bytes.fromhex("00000018 02010000 0000002a 1122334455667788 0000000000000005"))


def test_a_bare_status_has_no_form() -> None:
    out: list[BytesLike] = []
    with pytest.raises(IllegalOperation):
        v2.encode_response(0x02010000, BareResponse(Status.EUA), out)
    assert out == []
