"""Lines of JSON for ledgers: compiled, they are those of ledger_object, for any bytes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import bkctl.metadata
from bkctl.errors import BkctlError
from bkctl.formats.data_formats_pb2 import LedgerMetadataFormat
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata, LedgerState
from bkctl.ids import U64_MAX, LedgerId
from bkctl.metadata import ledger_json
from bkctl.metadata.ledger_json import ledger_line, ledger_object, usual_lines
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.store import Versioned

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
needs_compiled = pytest.mark.skipif(ledger_json.compiled is None, reason="bkctl was installed without a C compiler")

Found = tuple[LedgerId, Versioned[bytes]]
ids = st.builds(LedgerId, *2 * [st.one_of(st.integers(0, 100), st.integers(0, U64_MAX))])
times = st.one_of(st.none(), st.integers(-10, 260_000_000_000_000), st.sampled_from([I64_MAX, 253_402_300_799_999]))
bookie_ids = st.text("abzAZ059:.-_;@[\\ \xe9", min_size=1, max_size=12) | st.sampled_from(["readonly", "ReadOnly"])


def expected(found: Found) -> str | BkctlError:
    """Return the line of a ledger, by its metadata as parsed, or the error of that."""
    ledger, (value, version, ctime_ms) = found
    try:
        metadata = LedgerMetadata.parse(value)
    except BkctlError as error:
        return error
    read = VersionedMetadata(metadata, version, ctime_ms if metadata.ctime_ms is None else metadata.ctime_ms)
    return json.dumps(ledger_object(ledger, read), separators=(",", ":")) + "\n"


def check(found: Found) -> bool:
    """Check that the ledger has the expected line, or is left to Python; return True if it has one."""
    text, end = usual_lines([found], 0)
    assert (text, end) in ((expected(found), 1), ("", 0))
    return end == 1


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


@needs_compiled
@given(ids, metadata(), times)
@example(LedgerId(0, 0), METADATA, None)
@example(LedgerId(U64_MAX, U64_MAX), METADATA._replace(state=LedgerState.OPEN, custom_metadata={}, ctime_ms=None), None)
@example(LedgerId(0, 1), METADATA._replace(ctime_ms=951_782_399_999), 0)  # the day before a 29th of February
@example(LedgerId(0, 1), METADATA._replace(ctime_ms=253_402_300_799_999), 0)
def test_lines_are_the_ledger_objects(ledger: LedgerId, metadata: LedgerMetadata, ctime_ms: int | None) -> None:
    found = (ledger, Versioned(metadata.serialize(), 3, ctime_ms))
    time_ms = ctime_ms if metadata.ctime_ms is None else metadata.ctime_ms
    assert check(found) == (time_ms is None or 0 <= time_ms < 253_402_300_800_000)


@needs_compiled
@given(st.lists(st.tuples(ids, metadata()), max_size=5), st.integers(0, 5))
def test_lines_end_at_the_first_unusual_ledger(ledgers: list[tuple[LedgerId, LedgerMetadata]], at: int) -> None:
    found = [(ledger, Versioned(replace(each, ctime_ms=1).serialize(), 0, None)) for ledger, each in ledgers]
    lines = [expected(each) for each in found]
    with_missing = [*found[:at], (LedgerId(0, 1), None), *found[at:]]
    begin = min(at, len(found))
    assert usual_lines(with_missing, 0) == ("".join(map(str, lines[:begin])), begin)
    assert usual_lines(with_missing, begin + 1) == ("".join(map(str, lines[begin:])), len(with_missing))


@needs_compiled
@given(st.binary(max_size=80), st.integers(0, 400), st.integers(0, 3), st.booleans())
def test_damaged_metadata_is_left_to_python(noise: bytes, at: int, dropped: int, framed: bool) -> None:
    usual = METADATA.serialize()
    body = usual[len(HEADER) + 2 :]
    if framed:
        at %= len(body) + 1
        value = value_of(body[:at] + noise + body[at + dropped :])
    else:
        at %= len(usual) + 1
        value = usual[:at] + noise + usual[at + dropped :]
    check((LedgerId(0, 5), Versioned(value, 0, None)))


@needs_compiled
@given(bookie_ids, st.integers(-5, 5), st.integers(-2, 6), st.integers(-1, 4), st.integers(0, 5), st.integers(-3, 9))
def test_impossible_metadata_is_left_to_python(
    bookie_id: str, ensemble: int, write: int, ack: int, state: int, start: int
) -> None:
    message = message_of(METADATA)
    message.segment[0].ensembleMember[1] = bookie_id
    message.segment[0].firstEntryId = start
    message.ensembleSize, message.quorumSize, message.ackQuorumSize = ensemble, write, ack
    body = message.SerializeToString() + b"\x28" + bytes([state])  # the state again: the last one counts
    check((LedgerId(0, 5), Versioned(value_of(body), 0, None)))


@needs_compiled
@pytest.mark.parametrize("count", range(1, 11))
def test_size_in_many_bytes_has_its_line_from_python_or_the_same(count: int) -> None:
    """A size of more than 5 bytes is Corrupt to protobuf."""
    body = message_of(METADATA._replace(password=b"")).SerializeToString()
    longer = b"\x42" + b"\x80" * (count - 1) + b"\x00"  # the password again: the last one counts
    check((LedgerId(0, 5), Versioned(value_of(body + longer), 0, None)))


FIELDS = (
    "length", "lastEntryId", "digestType", "password", "ackQuorumSize", "ctime", "cToken", "segment", "customMetadata",
)  # fmt: skip


@needs_compiled
@pytest.mark.parametrize("name", FIELDS)
def test_metadata_without_a_field_has_its_line_from_python_or_the_same(name: str) -> None:
    message = message_of(METADATA)
    message.ClearField(name)
    check((LedgerId(0, 5), Versioned(value_of(message.SerializePartialToString()), 0, 77)))


@needs_compiled
@pytest.mark.parametrize("order", [list(range(12)), [11, 5, 0, 1, 2, 3, 4, 10, 6, 7, 8, 9]])
def test_order_of_fields_does_not_matter(order: list[int]) -> None:
    message = message_of(METADATA)
    parts = []
    for number in order:
        part = LedgerMetadataFormat()
        part.CopyFrom(message)
        for field in message.DESCRIPTOR.fields:
            if field.index != number:
                part.ClearField(field.name)
        parts.append(part.SerializePartialToString())
    assert check((LedgerId(0, 5), Versioned(value_of(b"".join(parts)), 0, None)))
    parts += [parts[order.index(5)][:9]]  # a segment, or a part of one, that stands alone
    check((LedgerId(0, 5), Versioned(value_of(b"".join(parts)), 0, None)))


@needs_compiled
@pytest.mark.parametrize(
    "found",
    [(), (1, 2), (LedgerId(0, 1), None), ((1,), Versioned(b"", 0, None)), ((-1, 1 << 64), Versioned(HEADER, 0, None)),
     (LedgerId(0, 1), (METADATA.serialize(), 0)), (LedgerId(0, 1), Versioned("text", 0, None)), None],
)  # fmt: skip
def test_other_objects_are_left_to_python(found: object) -> None:
    assert usual_lines([found], 0) == ("", 0)  # type: ignore[list-item]


@needs_compiled
def test_large_metadata_is_left_to_python() -> None:
    large = METADATA._replace(custom_metadata={"k": bytes(5000)})
    many = METADATA._replace(ensembles=tuple(Fragment(at, METADATA.ensembles[0].bookies) for at in range(3000)))
    for each in (large, many):
        assert not check((LedgerId(0, 5), Versioned(each.serialize(), 0, None)))


@pytest.mark.parametrize("api", [None, ledger_json.COMPILED_API, ledger_json.COMPILED_API + 1])
def test_compiled_lines_of_other_sources_are_not_used(api: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = ModuleType("bkctl.metadata._ledger_json")
    if api is not None:
        stale.API = api  # type: ignore[attr-defined]
    monkeypatch.setattr(bkctl.metadata, "_ledger_json", stale, raising=False)
    monkeypatch.setitem(sys.modules, "bkctl.metadata._ledger_json", stale)
    spec = spec_from_file_location("bkctl.metadata.ledger_json_of_other_build", ledger_json.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert module.compiled is (stale if api == ledger_json.COMPILED_API else None)


def test_a_line_is_the_ledger_object() -> None:
    read = VersionedMetadata(METADATA, 0, METADATA.ctime_ms)
    line = ledger_line(LedgerId(7, 12), read)
    assert json.loads(line) == ledger_object(LedgerId(7, 12), read)
    assert line.endswith("\n")
