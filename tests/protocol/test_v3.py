from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bkctl.errors import IllegalOperation, ProtocolError
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.ids import I64_MAX, U64_MAX, LedgerId
from bkctl.protocol import bookkeeper_protocol_pb2 as pb
from bkctl.protocol import v3
from bkctl.protocol.messages import (
    AddRequest,
    AddResponse,
    AuthMessage,
    AuthResponse,
    BareResponse,
    BatchReadRequest,
    BatchReadResponse,
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

KEY = bytes(range(20))
SCOPED = LedgerId(7, 1)
U64 = st.one_of(
    st.integers(0, 300),
    st.integers(0, 64).flatmap(lambda bits: st.integers((1 << bits) // 2, (1 << bits) - 1)),  # of every length
    st.just(U64_MAX),
)
I64 = st.one_of(st.integers(-2, 300), st.integers(-(1 << 63), I64_MAX))
LEDGERS = st.builds(LedgerId, st.one_of(st.just(0), U64), U64)
KEYS = st.one_of(st.binary(min_size=20, max_size=20), st.binary(max_size=24))
BODIES = st.one_of(st.binary(max_size=300), st.just(bytes(20_000)))
STATUSES = st.one_of(st.just(Status.EOK), st.sampled_from(Status))
FLAGS = st.tuples(st.booleans(), st.booleans(), st.booleans())
PLAIN_ADDS = st.tuples(LEDGERS, I64, st.just(KEY), BODIES).map(lambda fields: AddRequest(*fields))
PLAIN_READS = st.tuples(LEDGERS, I64).map(lambda fields: ReadRequest(*fields))
PLAIN = PLAIN_ADDS | PLAIN_READS
ADDS = st.tuples(LEDGERS, I64, KEYS, BODIES, FLAGS).map(lambda fields: AddRequest(*fields[:4], *fields[4]))
READS = st.tuples(LEDGERS, I64, st.none() | KEYS, st.none() | I64, st.none() | I64, FLAGS).map(
    lambda fields: ReadRequest(
        *fields[:3],
        fence=fields[5][0],
        high_priority=fields[5][1],
        previous_lac=fields[3],
        timeout_ms=fields[4],
        piggyback=fields[5][2] and not fields[5][0],
    )
)
BY_LEDGER = st.sampled_from([ReadLacRequest, ForceLedgerRequest, ListEntriesRequest])
REQUESTS = st.one_of(
    PLAIN,
    ADDS,
    READS,
    st.builds(WriteLacRequest, LEDGERS, I64, KEYS, BODIES),
    st.builds(lambda kind, ledger: kind(ledger), BY_LEDGER, LEDGERS),
    st.builds(BookieInfoRequest, st.integers(0, 3)),
    st.builds(AuthMessage, st.text(max_size=20), st.binary(max_size=40)),
    st.just(StartTlsRequest()),
)
HOT_RESPONSES = st.one_of(
    st.builds(AddResponse, STATUSES, LEDGERS, I64),
    st.builds(ReadResponse, STATUSES, LEDGERS, I64, st.none() | BODIES, st.none() | I64, st.none() | st.none() | I64),
)
RESPONSES = st.one_of(
    HOT_RESPONSES,
    st.builds(WriteLacResponse, STATUSES, LEDGERS),
    st.builds(ReadLacResponse, STATUSES, LEDGERS, st.none() | BODIES, st.none() | BODIES),
    st.builds(ForceLedgerResponse, STATUSES, LEDGERS),
    st.builds(ListEntriesResponse, STATUSES, LEDGERS, st.none() | BODIES),
    st.builds(BookieInfoResponse, STATUSES, st.none() | I64, st.none() | I64),
    st.builds(AuthResponse, STATUSES, st.text(max_size=20), st.binary(max_size=40)),
    st.just(StartTlsResponse(Status.EOK)),
    st.builds(BareResponse, st.sampled_from([status for status in Status if status])),
)
OPERATION_OF = {
    AddResponse: v3.ADD_ENTRY,
    ReadResponse: v3.READ_ENTRY,
    WriteLacResponse: v3.WRITE_LAC,
    ReadLacResponse: v3.READ_LAC,
    ForceLedgerResponse: v3.FORCE_LEDGER,
    ListEntriesResponse: v3.LIST_ENTRIES,
    BookieInfoResponse: v3.GET_BOOKIE_INFO,
    AuthResponse: v3.AUTH,
    StartTlsResponse: v3.START_TLS,
    BareResponse: v3.ADD_ENTRY,
}


def joined(out: list[BytesLike], size: int) -> bytes:
    frame = b"".join(out)
    assert size == len(frame) == 4 + int.from_bytes(frame[:4], "big")
    return frame[4:]


def request_bytes(txn_id: int, request: Request) -> bytes:
    out: list[BytesLike] = []
    return joined(out, v3.encode_request(txn_id, request, out))


def response_bytes(header: v3.Header, response: Response, scope_id: int = 0) -> bytes:
    out: list[BytesLike] = []
    return joined(out, v3.encode_response(header, response, scope_id, out))


# The body stands in the middle of a larger buffer, as it does when it is received.
def padded(body: bytes) -> tuple[memoryview, int, int]:
    return memoryview(b"\x01" * 3 + body + b"\x01" * 40), 3, 3 + len(body)


def decoded(request: Request) -> Request:
    """Return what a bookie gets of `request`: reads keep a master key only to fence, and little of a long one."""
    if not isinstance(request, ReadRequest) or request.master_key is None:
        return request
    return request._replace(master_key=request.master_key[:21] if request.fence else None)


def test_add_bytes() -> None:
    body = b"entry of ledger 300"
    assert request_bytes(5, AddRequest(LedgerId(0, 300), 2, KEY, body)).hex(" ") == (
        "0a 06 08 03 10 02 18 05 aa 06 30 08 ac 02 10 02 1a 14 " + KEY.hex(" ") + " 22 13 " + body.hex(" ")
    )


def test_a_scope_is_field_15() -> None:
    assert request_bytes(5, AddRequest(LedgerId(7, 300), 2, KEY, b"e")).endswith(bytes.fromhex("22 01 65 78 07"))
    assert request_bytes(5, ReadRequest(LedgerId(7, 300), 2)).hex(" ") == (
        "0a 06 08 03 10 01 18 05 a2 06 07 08 ac 02 10 02 78 07"
    )
    for request in (ReadLacRequest(SCOPED), ForceLedgerRequest(SCOPED), ListEntriesRequest(SCOPED)):
        assert request_bytes(5, request).endswith(bytes.fromhex("08 01 78 07"))
    assert request_bytes(5, WriteLacRequest(SCOPED, 0, b"", b"")).endswith(bytes.fromhex("1a 00 22 00 78 07"))
    high = LedgerId(U64_MAX, 1)
    assert request_bytes(5, ReadLacRequest(high)).endswith(bytes.fromhex("78 ff ff ff ff ff ff ff ff ff 01"))


@pytest.mark.parametrize("digits", range(1, 11))
def test_a_scope_costs_its_field_and_nine_bytes_of_entry_on_the_wire(digits: int) -> None:
    """`-s` prints the frames of an add of 1 KiB and its answer, in scope 0 and in a scope of `digits` varint bytes."""
    scope_id = min(1 << 7 * (digits - 1), U64_MAX)
    field = 1 + digits  # 2 to 11 bytes
    sizes = {}
    for ledger in (LedgerId(0, 300), LedgerId(scope_id, 300)):
        by = DigestManager(ledger, DigestType.CRC32C, b"secret")
        entry = by.seal(2, 1, 3072, bytes(1024)) + bytes(1024)
        add = request_bytes(5, AddRequest(ledger, 2, by.master_key, entry))
        read = request_bytes(5, ReadRequest(ledger, 2))
        added = response_bytes(v3.Header(5, v3.ADD_ENTRY), AddResponse(Status.EOK, ledger, 2), ledger.scope_id)
        found = ReadResponse(Status.EOK, ledger, 2, entry, 1)
        answered = response_bytes(v3.Header(5, v3.READ_ENTRY), found, ledger.scope_id)
        frames = {"add": add, "read": read, "added": added, "answered": answered}
        sizes[ledger.scope_id] = {name: len(frame) for name, frame in frames.items()}
        for name, frame in frames.items():
            print(f"{name} {ledger.qualified_name} {len(frame)}: {frame[:100].hex(' ')} … {frame[-12:].hex(' ')}")
    more = {name: sizes[scope_id][name] - sizes[0][name] for name in sizes[0]}
    assert more == {"add": 9 + field, "read": field, "added": field, "answered": 9 + field}


@pytest.mark.parametrize(
    ("response", "operation", "tail"),
    [
        (AddResponse(Status.EOK, SCOPED, 2), v3.ADD_ENTRY, "aa 06 08 08 00 10 01 18 02 78 07"),
        (
            ReadResponse(Status.EOK, SCOPED, 2, b"e", 1),
            v3.READ_ENTRY,
            "a2 06 0d 08 00 10 01 18 02 22 01 65 28 01 78 07",
        ),
        (ReadResponse(Status.ENOENTRY, SCOPED, 2), v3.READ_ENTRY, "a2 06 09 08 93 03 10 01 18 02 78 07"),
        (WriteLacResponse(Status.EOK, SCOPED), v3.WRITE_LAC, "ba 06 06 08 00 10 01 78 07"),
        (ReadLacResponse(Status.EOK, SCOPED), v3.READ_LAC, "c2 06 06 08 00 10 01 78 07"),
        (ForceLedgerResponse(Status.EOK, SCOPED), v3.FORCE_LEDGER, "da 06 06 08 00 10 01 78 07"),
        (ListEntriesResponse(Status.EOK, SCOPED, b"l"), v3.LIST_ENTRIES, "e2 06 09 08 00 10 01 1a 01 6c 78 07"),
    ],
)
def test_the_scope_is_echoed_as_field_15(response: Response, operation: int, tail: str) -> None:
    assert response_bytes(v3.Header(5, operation), response, 7).endswith(bytes.fromhex(tail))


def test_scope_0_is_left_out() -> None:
    ledger = LedgerId(0, 1)
    for request in (ReadLacRequest(ledger), ForceLedgerRequest(ledger), ListEntriesRequest(ledger)):
        assert request_bytes(5, request).endswith(bytes.fromhex("02 08 01"))
    assert response_bytes(v3.Header(5, v3.FORCE_LEDGER), ForceLedgerResponse(Status.EOK, ledger)).endswith(
        bytes.fromhex("da 06 04 08 00 10 01")
    )


@given(txn_id=U64, request_=REQUESTS)
def test_requests_round_trip(txn_id: int, request_: Request) -> None:
    call = v3.decode_request(*padded(request_bytes(txn_id, request_)))
    assert call is not None
    assert call.request == decoded(request_)
    assert type(call.request) is type(request_)
    assert (call.header.txn_id, call.header.operation) == (txn_id, v3.OPERATIONS[type(request_)])


@given(txn_id=U64, response=RESPONSES)
def test_responses_round_trip(txn_id: int, response: Response) -> None:
    operation = OPERATION_OF[type(response)]
    scope_id = getattr(response, "ledger", SCOPED)[0]
    answer = v3.decode_response(*padded(response_bytes(v3.Header(txn_id, operation), response, scope_id)))
    assert answer == (txn_id, operation, response, "")
    assert type(answer.response) is type(response)


@given(st.binary(max_size=100))
def test_random_bytes_decode_to_request_or_none(data: bytes) -> None:
    call = v3.decode_request(*padded(data))
    if call is not None:
        assert call.header.txn_id >= 0


@given(st.binary(max_size=100))
def test_random_bytes_are_a_response_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        answer = v3.decode_response(*padded(data))
        assert answer.response is not None or answer.problem


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_a_v2_packet_is_never_a_v3_request(first: int) -> None:
    for opcode in range(8):
        body = bytes((first, opcode, 0, 0)) + bytes(60)
        assert v3.decode_request(*padded(body)) is None


def test_message_without_required_fields_is_not_a_request() -> None:
    assert v3.decode_request(*padded(b"")) is None
    assert v3.decode_request(*padded(bytes.fromhex("0a 02 08 03"))) is None
    # An add without its body.
    assert v3.decode_request(*padded(bytes.fromhex("0a 06 08 03 10 02 18 05 aa 06 04 08 01 10 02"))) is None


@pytest.mark.parametrize("operation", [3, 4, 12, 13, 1, 2])
def test_unknown_operation_is_decoded_without_request(operation: int) -> None:
    body = bytes((0x0A, 6, 8, 3, 0x10, operation, 0x18, 5))
    assert v3.decode_request(*padded(body)) == (v3.Header(5, operation), None)


def test_protocol_version_and_priority_are_kept() -> None:
    body = bytes.fromhex("0a 08 08 02 10 01 18 05 20 64 a2 06 04 08 01 10 02")
    call = v3.decode_request(*padded(body))
    assert call is not None
    assert call.header == v3.Header(5, 1, 2, 100)
    assert call.request == ReadRequest(LedgerId(0, 1), 2, high_priority=True)


def test_fields_may_come_in_another_order() -> None:
    """LightProto writes the flag first."""
    body = bytes.fromhex("0a 06 08 03 10 01 18 05 a2 06 07 a0 06 01 08 01 10 02")
    call = v3.decode_request(*padded(body))
    assert call is not None
    assert call.request == ReadRequest(LedgerId(0, 1), 2, fence=True)


def test_a_logging_context_is_ignored() -> None:
    body = request_bytes(5, ReadRequest(LedgerId(0, 1), 2)) + bytes.fromhex("c2 0c 06 0a 01 6b 12 01 76")
    call = v3.decode_request(*padded(body))
    assert call is not None
    assert call.request == ReadRequest(LedgerId(0, 1), 2)


def response(status: int, nested_status: int | None = None, operation: int = 2) -> bytes:
    message = pb.Response(status=status)
    message.header.version, message.header.operation, message.header.txnId = 3, operation, 5
    if nested_status is not None:
        message.addResponse.status, message.addResponse.ledgerId, message.addResponse.entryId = nested_status, 1, 2
    return message.SerializeToString()


def test_the_nested_status_counts_when_the_outer_one_is_ok() -> None:
    assert v3.decode_response(*padded(response(0, 504))).response == AddResponse(Status.EFENCED, LedgerId(0, 1), 2)
    assert v3.decode_response(*padded(response(502, 0))).response == AddResponse(Status.EUA, LedgerId(0, 1), 2)
    assert v3.decode_response(*padded(response(502))).response == BareResponse(Status.EUA)


@pytest.mark.parametrize("body", [response(999), response(0, 999), response(999, 0), response(0), response(0, 0, 6)])
def test_invalid_answer_is_reported_for_its_transaction(body: bytes) -> None:
    answer = v3.decode_response(*padded(body))
    assert (answer.txn_id, answer.response) == (5, None)
    assert answer.problem


def test_a_batch_read_has_no_form() -> None:
    out: list[BytesLike] = []
    with pytest.raises(IllegalOperation):
        v3.encode_request(1, BatchReadRequest(LedgerId(0, 1), 1, 1, 1, 1), out)
    with pytest.raises(IllegalOperation):
        v3.encode_response(v3.Header(1, 12), BatchReadResponse(Status.EOK, LedgerId(0, 1), 1, 1), 0, out)
    with pytest.raises(IllegalOperation):
        v3.encode_request(1, ReadRequest(LedgerId(0, 1), -1, KEY, fence=True, piggyback=True), out)
    assert out == []


def test_bare_and_authentication_answers_repeat_the_whole_header() -> None:
    header = v3.Header(5, 7, 3, 100)
    bare = pb.Response.FromString(response_bytes(header, BareResponse(Status.EBADREQ)))
    assert (bare.header.operation, bare.header.txnId, bare.header.priority, bare.status) == (7, 5, 100, 404)
    assert not bare.HasField("readLacResponse")


def test_the_generated_module_is_that_of_the_proto_file(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    root = Path(v3.__file__).parents[2]
    proto = "bkctl/protocol/bookkeeper_protocol.proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", f"--python_out={tmp_path}", proto]
    subprocess.run(command, check=True, cwd=root)
    made = (tmp_path / proto.replace(".proto", "_pb2.py")).read_text().split("DESCRIPTOR = ")[1].splitlines()[0]
    kept = Path(pb.__file__).read_text().split("DESCRIPTOR = ")[1].splitlines()[0]
    assert made == kept
