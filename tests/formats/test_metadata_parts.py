"""Ledger metadata of version 3 is parsed in parts that ledgers share: as protobuf parses the whole, for any bytes."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from bkctl.errors import BkctlError
from bkctl.formats.data_formats_pb2 import LedgerMetadataFormat
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata, LedgerState

I64_MAX = 2**63 - 1
HEADER = b"BookieMetadataFormatVersion\t3\n"
PULSAR = {"application": b"pulsar", "component": b"managed-ledger", "pulsar/managed-ledger": b"a/b/persistent/c"}
METADATA = LedgerMetadata(
    ensemble_size=3,
    write_quorum_size=2,
    ack_quorum_size=2,
    digest_type=DigestType.CRC32C,
    password=b"secret",
    ensembles=(Fragment(0, ("b1:3181", "b2:3181", "b3:3181")), Fragment(7, ("b1:3181", "b2:3181", "b4:3181"))),
    state=LedgerState.CLOSED,
    length=1 << 40,
    last_entry_id=12,
    ctime_ms=1_700_000_000_123,
    custom_metadata=PULSAR,
    c_token=5,
)
bookie_ids = st.text("abzAZ059:.-_;@[\\ \xe9", min_size=1, max_size=12) | st.sampled_from(["readonly", "ReadOnly"])
times = st.one_of(st.none(), st.integers(0, 260_000_000_000_000), st.sampled_from([I64_MAX, 253_402_300_799_999]))


def check(value: bytes) -> None:
    """Check that the metadata in `value` is what protobuf finds in the whole, or is refused."""
    try:
        found = LedgerMetadata.parse(value)
    except BkctlError:
        return
    message = LedgerMetadataFormat()
    try:
        message.ParseFromString(_body(value))
    except DecodeError:
        pytest.fail(f"{found} was read from bytes that are not a message")
    assert message.IsInitialized()
    assert found.ensembles == tuple(Fragment(each.firstEntryId, tuple(each.ensembleMember)) for each in message.segment)
    assert found.custom_metadata == {each.key: each.value for each in message.customMetadata}
    assert (found.ensemble_size, found.write_quorum_size) == (message.ensembleSize, message.quorumSize)
    assert found.state == message.state
    assert found.ctime_ms == (message.ctime if message.HasField("ctime") else None)
    if found.is_closed:
        assert (found.length, found.last_entry_id) == (message.length, message.lastEntryId)


def _body(value: bytes) -> bytes:
    rest = value[len(HEADER) :]
    size = shift = 0
    for at, byte in enumerate(rest):
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return rest[at + 1 : at + 1 + size]
    raise AssertionError("no message")


def message_of(metadata: LedgerMetadata) -> LedgerMetadataFormat:
    message = LedgerMetadataFormat()
    _, _, body = metadata.serialize().partition(b"\n")
    message.ParseFromString(body[2 if body[0] > 127 else 1 :])
    return message


def value_of(body: bytes) -> bytes:
    size, length = len(body), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return HEADER + bytes([*length, size]) + body


@st.composite
def metadata(draw: st.DrawFn) -> LedgerMetadata:
    sizes = sorted(draw(st.lists(st.integers(1, 5), min_size=3, max_size=3)), reverse=True)
    names = st.lists(st.from_regex(r"[a-zA-Z0-9:._-]{1,20}", fullmatch=True), min_size=sizes[0], max_size=sizes[0])
    starts = sorted(draw(st.sets(st.integers(0, I64_MAX), min_size=1, max_size=4)))
    ensembles = tuple(Fragment(start, tuple(name + "_" for name in draw(names))) for start in starts)
    state = draw(st.sampled_from(LedgerState))
    keys = st.sampled_from([*PULSAR, "x", "\xe9\n", "pulsar/compactedTo"]) | st.text(max_size=5)
    return METADATA._replace(
        ensemble_size=sizes[0],
        write_quorum_size=sizes[1],
        ack_quorum_size=sizes[2],
        digest_type=draw(st.sampled_from(DigestType)),
        password=draw(st.binary(max_size=9)),
        ensembles=ensembles,
        state=state,
        length=draw(st.integers(0, I64_MAX)),
        last_entry_id=draw(st.integers(-1, I64_MAX)),
        ctime_ms=draw(times.filter(lambda time_ms: time_ms is None or time_ms >= 0)),
        custom_metadata=draw(st.dictionaries(keys, st.binary(max_size=30) | st.just(b"pulsar"), max_size=4)),
        c_token=draw(st.none() | st.integers(0, I64_MAX)),
    )


@given(metadata())
def test_metadata_is_read_as_written(metadata: LedgerMetadata) -> None:
    read = LedgerMetadata.parse(metadata.serialize())
    assert read == metadata or not metadata.is_closed
    assert read.serialize() == metadata.serialize()
    check(metadata.serialize())


@given(st.binary(max_size=80), st.integers(0, 400), st.integers(0, 3), st.booleans())
def test_damaged_metadata_is_refused_or_read_as_protobuf_does(
    noise: bytes, at: int, dropped: int, framed: bool
) -> None:
    usual = METADATA.serialize()
    body = usual[len(HEADER) + 2 :]
    if framed:
        at %= len(body) + 1
        value = value_of(body[:at] + noise + body[at + dropped :])
    else:
        at %= len(usual) + 1
        value = usual[:at] + noise + usual[at + dropped :]
    check(value)


@given(bookie_ids, st.integers(-5, 5), st.integers(-2, 6), st.integers(-1, 4), st.integers(0, 5), st.integers(-3, 9))
def test_impossible_metadata_is_refused(
    bookie_id: str, ensemble: int, write: int, ack: int, state: int, start: int
) -> None:
    message = message_of(METADATA)
    message.segment[0].ensembleMember[1] = bookie_id
    message.segment[0].firstEntryId = start
    message.ensembleSize, message.quorumSize, message.ackQuorumSize = ensemble, write, ack
    body = message.SerializeToString() + b"\x28" + bytes([state])  # the state again: the last one counts
    check(value_of(body))


FIELDS = (
    "length", "lastEntryId", "digestType", "password", "ackQuorumSize", "ctime", "cToken", "segment", "customMetadata",
)  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_metadata_without_a_field_is_refused_or_read_as_protobuf_does(name: str) -> None:
    message = message_of(METADATA)
    message.ClearField(name)
    check(value_of(message.SerializePartialToString()))


@pytest.mark.parametrize("field", ["segment", "customMetadata"])
def test_a_shared_part_that_is_not_utf8_is_refused_each_time(field: str) -> None:
    value = METADATA.serialize()
    name = b"b1:3181" if field == "segment" else b"application"
    damaged = value.replace(name, b"\xff" * len(name), 1)
    for _ in range(2):
        with pytest.raises(BkctlError):
            LedgerMetadata.parse(damaged)
    assert LedgerMetadata.parse(value) == METADATA
