"""Values of the metadata store, by literal bytes and by Apache's own; and every rule that makes a value unreadable."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import golden

from bkctl.errors import BkctlError, Corrupt, Unsupported, UsageError
from bkctl.formats import data_formats_pb2, metadata
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import (
    BookieEndpoint,
    BookieServiceInfo,
    Cookie,
    Fragment,
    LedgerLayout,
    LedgerMetadata,
    LedgerState,
    print_text,
)

CLOSED = LedgerMetadata(
    ensemble_size=2,
    write_quorum_size=2,
    ack_quorum_size=1,
    digest_type=DigestType.CRC32C,
    password=b"pw",
    ensembles=(Fragment(0, ("a:1", "b:2")), Fragment(10, ("a:1", "c:3"))),
    state=LedgerState.CLOSED,
    length=300,
    last_entry_id=12,
    custom_metadata={"k": b"v"},
    c_token=5,
)
V1_TEXT = b"BookieMetadataFormatVersion\t1\n2\n2\n300\n0\ta:1\tb:2\n10\ta:1\tc:3\n12\tCLOSED"
V2_TEXT = b"""BookieMetadataFormatVersion\t2
quorumSize: 2
ensembleSize: 2
length: 300
lastEntryId: 12
state: CLOSED
segment {
  ensembleMember: "a:1"
  ensembleMember: "b:2"
  firstEntryId: 0
}
segment {
  ensembleMember: "a:1"
  ensembleMember: "c:3"
  firstEntryId: 10
}
digestType: CRC32C
password: "pw"
ackQuorumSize: 1
customMetadata {
  key: "k"
  value: "v"
}
"""
V3_BYTES = b"BookieMetadataFormatVersion\t3\n" + bytes.fromhex(
    "39 08 02 10 02 18 ac02 20 0c 28 03 32 0c 0a03613a31 0a03623a32 10 00 32 0c 0a03613a31 0a03633a33 10 0a"
    "38 03 42 02 7077 48 01 5a 06 0a016b 120176 60 05"
)


def test_writes_every_metadata_version():
    assert CLOSED.serialize() == V3_BYTES
    assert CLOSED._replace(format_version=2).serialize() == V2_TEXT
    assert CLOSED._replace(format_version=1).serialize() == V1_TEXT


def test_reads_every_metadata_version():
    assert LedgerMetadata.parse(V3_BYTES) == CLOSED
    assert LedgerMetadata.parse(V3_BYTES + b"trailing") == CLOSED
    assert LedgerMetadata.parse(V2_TEXT) == CLOSED._replace(format_version=2, c_token=None)
    v1 = LedgerMetadata.parse(V1_TEXT)
    assert (v1.digest_type, v1.password, v1.ack_quorum_size, v1.custom_metadata) == (None, None, 2, {})
    assert (v1.state, v1.length, v1.last_entry_id, v1.ensembles) == (LedgerState.CLOSED, 300, 12, CLOSED.ensembles)


def test_states_of_version_1():
    for state, tail in ((LedgerState.OPEN, b""), (LedgerState.IN_RECOVERY, b"-102\tCLOSED")):
        data = CLOSED._replace(format_version=1, state=state).serialize()
        assert data == b"BookieMetadataFormatVersion\t1\n2\n2\n0\n0\ta:1\tb:2\n10\ta:1\tc:3\n" + tail
        assert LedgerMetadata.parse(data).state is state
    assert LedgerMetadata.parse(V1_TEXT + b"\nwhatever\tfollows").last_entry_id == 12


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
def test_length_and_last_entry_count_only_when_closed(version, state):
    data = CLOSED._replace(format_version=version, state=state).serialize()
    found = LedgerMetadata.parse(data)
    assert (found.state, found.length, found.last_entry_id) == (state, 0, -1)
    assert found.serialize() == data
    assert LedgerMetadata.parse(V2_TEXT.replace(b"CLOSED", state.name.encode())).last_entry_id == -1


def test_absent_fields_have_the_formats_default():
    text = V2_TEXT.replace(b"lastEntryId: 12\n", b"").replace(b"ackQuorumSize: 1\n", b"")
    found = LedgerMetadata.parse(text.replace(b"digestType: CRC32C\n", b""))
    assert (found.last_entry_id, found.ack_quorum_size, found.digest_type) == (0, 2, DigestType.CRC32)
    bare = LedgerMetadata.parse(text.replace(b'password: "pw"\n', b""))
    assert (bare.password, bare.digest_type) == (None, None)
    assert b"digestType" not in bare.serialize()
    empty = CLOSED._replace(password=b"", ack_quorum_size=0, ctime_ms=7)
    assert LedgerMetadata.parse(empty.serialize()) == empty


V3_HEADER = b"BookieMetadataFormatVersion\t3\n"
DAMAGED = [
    (b"", Corrupt, "BookieMetadataFormatVersion"),
    (b"BookieMetadataFormatVersion\t3", Corrupt, "BookieMetadataFormatVersion"),
    (b"BookieMetadataFormatVersion\t12345678901\n", Corrupt, "BookieMetadataFormatVersion"),
    (V3_BYTES.replace(b"\t3\n", b"\t4\n"), Unsupported, "version 4"),
    (V3_BYTES.replace(b"\t3\n", b"\t0\n"), Unsupported, "version 0"),
    (V3_HEADER, Corrupt, "cut short"),
    (V3_HEADER + b"\x80", Corrupt, "cut short"),
    (V3_HEADER + b"\xff" * 20, Corrupt, "malformed"),
    (V3_HEADER + b"\xff\xff\xff\xff\x07", Corrupt, "2147483647 bytes"),
    (V3_BYTES[:-1], Corrupt, "57 bytes of message, 56"),
    (V3_HEADER + b"\x02\x08\x02", Corrupt, "lacks ensembleSize, length, state"),
    (V3_HEADER + b"\x01\xff", Corrupt, "not a protobuf"),
    (V3_BYTES.replace(b"\x38\x03", b"\x38\x09"), Unsupported, "digest type 9"),
    (V3_BYTES.replace(b"\x28\x03", b"\x28\x09"), Corrupt, "lacks state"),
    (V3_BYTES.replace(b"a:1", b"a\xff1"), Corrupt, "UTF-8"),
    (V3_BYTES.replace(b"a:1", b"a 1"), Corrupt, "bookie id 'a 1'"),
    (V2_TEXT + b"cTokens: 3\n", Corrupt, "cTokens"),
    (V2_TEXT.replace(b"CLOSED", b"SHUT"), Corrupt, "SHUT"),
    (V2_TEXT.replace(b"length: 300\n", b""), Corrupt, "lacks length"),
    (V2_TEXT[:-2], Corrupt, "text"),
    (V2_TEXT + b"\xff", Corrupt, "UTF-8"),
    (V2_TEXT.replace(b"firstEntryId: 10", b"firstEntryId: 0"), Corrupt, "from entry 0 comes after"),
    (V2_TEXT.replace(b'  ensembleMember: "c:3"\n', b""), Corrupt, "has 1 bookies, not 2"),
    (V2_TEXT.replace(b"quorumSize: 2", b"quorumSize: 3"), Corrupt, "not in descending order"),
    (V2_TEXT.replace(b"ackQuorumSize: 1", b"ackQuorumSize: 3"), Corrupt, "not in descending order"),
    (V2_TEXT.replace(b"ackQuorumSize: 1", b"ackQuorumSize: -1"), Corrupt, "not in descending order"),
    (re.sub(rb"segment \{.*?\}\n", b"", V2_TEXT, flags=re.DOTALL), Corrupt, "list of ensembles is empty"),
    (b"BookieMetadataFormatVersion\t1\n2\n2\n", Corrupt, "2 lines"),
    (b"BookieMetadataFormatVersion\t1\n2\n2\n0\n", Corrupt, "list of ensembles is empty"),
    (b"BookieMetadataFormatVersion\t1\n2\nx\n0\n0\ta:1", Corrupt, "'x'"),
    (b"BookieMetadataFormatVersion\t1\n2\n2147483648\n0\n", Corrupt, "32 bits"),
    (V1_TEXT.replace(b"10\ta", b"0\ta"), Corrupt, "from entry 0 comes after"),
    (V1_TEXT.replace(b"\tc:3", b""), Corrupt, "has 1 bookies"),
    (V1_TEXT.replace(b"\ta:1\tc:3", b""), Corrupt, "names no bookie"),
    (V1_TEXT.replace(b"c:3", b"\xff"), Corrupt, "UTF-8"),
]


@pytest.mark.parametrize(("data", "error", "problem"), DAMAGED)
def test_damaged_ledger_metadata_raises_one_error_that_names_the_value(data, error, problem):
    with pytest.raises(error, match=problem) as caught:
        LedgerMetadata.parse(data, "/ledgers/00/0000/L0001")
    assert str(caught.value).startswith("/ledgers/00/0000/L0001: ")
    assert "\n" not in str(caught.value)


def test_refuses_to_write_contradictions():
    for change in ({"password": None}, {"ensembles": ()}, {"ack_quorum_size": 3}, {"format_version": 4}):
        with pytest.raises(UsageError):
            CLOSED._replace(**change).serialize()


def test_fragments_by_entry():
    assert [CLOSED.fragment_of(entry_id).first_entry_id for entry_id in (0, 9, 10, 99)] == [0, 0, 10, 10]
    assert CLOSED.last_fragment.bookies == ("a:1", "c:3")
    with pytest.raises(UsageError):
        CLOSED.fragment_of(-1)


def test_secrets_stay_out_of_repr():
    assert "pw" not in repr(CLOSED)


@pytest.mark.parametrize("version", golden.VERSIONS)
def test_apaches_ledger_metadata_round_trips(version):
    lines = golden.ledger_metadata(version)
    assert {line["formatVersion"] for line in lines} == {1, 2, 3}
    for line in lines:
        data = base64.b64decode(line["bytes"])
        found, expected = LedgerMetadata.parse(data), line["readBack"]
        assert found.serialize() == data
        assert found.state.name == expected["state"]
        assert found.format_version == line["formatVersion"]
        assert (found.ensemble_size, found.write_quorum_size, found.ack_quorum_size) == (
            expected["ensembleSize"],
            expected["writeQuorumSize"],
            expected["ackQuorumSize"],
        )
        assert (found.length, found.last_entry_id) == (expected["length"], expected["lastEntryId"])
        digest_type = found.digest_type and found.digest_type.name.replace("HMAC", "MAC")
        assert digest_type == expected["digestType"]
        assert (found.password and base64.b64encode(found.password).decode()) == expected["password"]
        custom = {key: base64.b64encode(value).decode() for key, value in found.custom_metadata.items()}
        assert custom == expected["customMetadata"]
        assert {str(first): list(bookies) for first, bookies in found.ensembles} == expected["ensembles"]


@pytest.mark.parametrize("version", golden.VERSIONS)
def test_apaches_nodes_round_trip(version):
    seen = set()
    for path, value in golden.zookeeper_nodes(version).items():
        data = base64.b64decode(value)
        kind: type[LedgerLayout | Cookie | BookieServiceInfo | LedgerMetadata]
        if path == "/LAYOUT":
            kind = LedgerLayout
        elif path.startswith("/cookies/"):
            kind = Cookie
        elif path.startswith("/available/") and data:
            kind = BookieServiceInfo
        elif data.startswith(b"BookieMetadataFormatVersion"):
            kind = LedgerMetadata
        else:
            continue
        assert kind.parse(data, path).serialize() == data
        seen.add(kind)
    assert {LedgerLayout, Cookie, LedgerMetadata} <= seen


bookie_ids = st.from_regex(r"[a-z0-9.-]{1,12}:[0-9]{1,5}", fullmatch=True)
i64 = st.integers(-(2**63), 2**63 - 1)


@st.composite
def ledger_metadata(draw: st.DrawFn) -> LedgerMetadata:
    sizes = sorted((draw(st.integers(1, 4)) for _ in range(3)), reverse=True)
    firsts = sorted(draw(st.sets(st.integers(0, 2**63 - 1), min_size=1, max_size=4)))
    version = draw(st.integers(1, 3))
    digest_type = draw(st.sampled_from(DigestType)) if version > 1 and draw(st.booleans()) else None
    state = draw(st.sampled_from(LedgerState))
    closed = state is LedgerState.CLOSED
    return LedgerMetadata(
        ensemble_size=sizes[0],
        write_quorum_size=sizes[1],
        ack_quorum_size=sizes[1] if version == 1 else draw(st.integers(0, sizes[1])),
        digest_type=digest_type,
        password=None if digest_type is None else draw(st.binary(max_size=20)),
        ensembles=tuple(Fragment(first, tuple(draw(bookie_ids) for _ in range(sizes[0]))) for first in firsts),
        state=state,
        length=draw(i64) if closed else 0,
        last_entry_id=draw(st.integers(-1, 2**63 - 1)) if closed else -1,
        ctime_ms=draw(st.none() | i64) if version > 1 else None,
        custom_metadata=draw(st.dictionaries(st.text(max_size=8), st.binary(max_size=8))) if version > 1 else {},
        c_token=draw(st.none() | i64) if version == 3 else None,
        format_version=version,
    )


@given(ledger_metadata())
def test_ledger_metadata_round_trips(value):
    assert LedgerMetadata.parse(value.serialize()) == value


@given(ledger_metadata(), st.data())
def test_damaged_values_raise_only_declared_errors(value, data):
    cookie = Cookie("127.0.0.1:3181", ("/j",), ("/l1", "/l2"), "id", ("/i",))
    info = BookieServiceInfo((BookieEndpoint("bookie", 1, "host", "bookie-rpc"),), {"a": "b"})
    layout = LedgerLayout(2, "org.example.Factory", 1)
    for each in (value, cookie, info, layout):
        damaged = bytearray(each.serialize())
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(damaged) - 1))
            damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        with contextlib.suppress(BkctlError):
            type(each).parse(bytes(damaged), "somewhere")
        with contextlib.suppress(BkctlError):
            type(each).parse(data.draw(st.binary(max_size=40)), "somewhere")


COOKIE_TEXT = b"""5
bookieHost: "127.0.0.1:43181"
journalDir: "/data/j1,/data/j2"
ledgerDirs: "1\\t/data/l1"
instanceId: "47db9102"
indexDirs: "2\\t/i1\\t/i2"
"""
COOKIE = Cookie("127.0.0.1:43181", ("/data/j1", "/data/j2"), ("/data/l1",), "47db9102", ("/i1", "/i2"))


def test_cookies_match_apaches_bytes():
    assert COOKIE.serialize() == COOKIE_TEXT
    assert Cookie.parse(COOKIE_TEXT) == COOKIE
    bare = dataclasses.replace(COOKIE, instance_id=None, index_dirs=None)
    assert b"instanceId" not in bare.serialize()
    assert b"indexDirs" not in bare.serialize()
    assert Cookie.parse(bare.serialize()) == bare


def test_reads_older_cookies():
    assert Cookie.parse(COOKIE_TEXT.replace(b"5\n", b"4\n", 1)) == dataclasses.replace(COOKIE, layout_version=4)
    third = Cookie.parse(b"3\n127.0.0.1:3181\n/j\n2\t/l1\t/l2\n")
    assert third == Cookie("127.0.0.1:3181", ("/j",), ("/l1", "/l2"), layout_version=3)
    assert third.serialize() == b"5\n127.0.0.1:3181\n/j\n2\t/l1\t/l2\n"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", Corrupt),
        (b"five\n", Corrupt),
        (b"2\n127.0.0.1\n/j\n1\t/l\n", Unsupported),
        (b"5\n", Corrupt),
        (b"3\n127.0.0.1:3181\n/j\n", Corrupt),
        (COOKIE_TEXT.replace(b"journalDir", b"journalDirs"), Corrupt),
        (COOKIE_TEXT.replace(b'ledgerDirs: "1', b'ledgerDirs: "2'), Corrupt),
        (COOKIE_TEXT.replace(b"47db", b"\xff"), Corrupt),
        (COOKIE_TEXT.replace(b"/data/l1", b"/data/\\377"), Corrupt),
        (COOKIE_TEXT[:-3], Corrupt),
    ],
)
def test_damaged_cookies_raise_one_error(data, error):
    with pytest.raises(error, match=r"^/data/VERSION: "):
        Cookie.parse(data, "/data/VERSION")


def test_cookie_differences_are_named():
    moved = dataclasses.replace(COOKIE, journal_dirs=("/new",)).differences(COOKIE)
    assert [str(each).startswith("the journal directories are '/new', the cookie has ") for each in moved] == [True]
    assert list(COOKIE.differences(COOKIE)) == []
    more = dataclasses.replace(COOKIE, ledger_dirs=("/data/l1", "/data/l2"))
    (added,) = more.differences(COOKIE)
    (removed,) = COOKIE.differences(more)
    assert ("ledger directories" in str(added), added.is_expansion, removed.is_expansion) == (True, True, False)
    other = Cookie("other:1", ("/x",), ("/data/l1",), None, ("/i1", "/i2"))
    assert len(list(other.differences(COOKIE))) == 3
    without_index = dataclasses.replace(COOKIE, index_dirs=None)
    assert list(dataclasses.replace(COOKIE, index_dirs=COOKIE.ledger_dirs).differences(without_index)) == []


def test_layouts():
    text = b"2\norg.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory:1"
    layout = LedgerLayout.parse(text)
    assert layout == LedgerLayout(2, "org.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory", 1)
    assert layout.serialize() == text
    assert LedgerLayout.parse(b"1\nhierarchical:1") == dataclasses.replace(layout, format_version=1)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"3\na:1", Unsupported), (b"0\na:1", Unsupported), (b"", Corrupt), (b"2", Corrupt), (b"2\na", Corrupt),
        (b"2\na:b:1", Corrupt), (b"2\na:x", Corrupt), (b"2\n:1", Corrupt), (b"x\na:1", Corrupt),
        (b"2\n\xff:1", Corrupt),
    ],
)  # fmt: skip
def test_damaged_layouts_raise_one_error(data, error):
    with pytest.raises(error, match=r"^/ledgers/LAYOUT: "):
        LedgerLayout.parse(data, "/ledgers/LAYOUT")


def test_service_info():
    data = bytes.fromhex(
        "3229 0a06626f6f6b6965 10ed18 1a093132372e302e302e31 220a626f6f6b69652d727063 2a0161 32026578"
        "3a11 0a0c6c656467657253636f706573 120131"
    )
    info = BookieServiceInfo(
        (BookieEndpoint("bookie", 3181, "127.0.0.1", "bookie-rpc", ("a",), ("ex",)),), {"ledgerScopes": "1"}
    )
    assert info.serialize() == data
    assert BookieServiceInfo.parse(data) == info
    assert BookieServiceInfo.parse(b"") == BookieServiceInfo()
    no_text = bytes.fromhex("3a06 0a01ff 120131")
    for damaged in (data[:-1], b"\x32\x02\x0a\x00", data.replace(b"127", b"\xff27"), no_text):
        with pytest.raises(Corrupt, match=r"^/available/x: "):
            BookieServiceInfo.parse(damaged, "/available/x")


def test_escapes_text_as_apache():
    message = data_formats_pb2.CookieFormat(bookieHost="a\u00e9\"'\\", journalDir="\a\b\f\n\r\t\v\0\x7f", ledgerDirs="")
    assert print_text(message) == (
        'bookieHost: "a\\303\\251\\"\\\'\\\\"\njournalDir: "\\007\\b\\f\\n\\r\\t\\013\\000\\177"\nledgerDirs: ""\n'
    )
    older = COOKIE_TEXT.replace(b"47db9102", b"\\a\\v\\007\\013")
    assert Cookie.parse(older).instance_id == "\a\v\a\v"


def without_json_names(file):
    """`file` without what protoc adds for JSON: it is in no generated module."""
    messages = list(file.message_type)
    while messages:
        message = messages.pop()
        messages += message.nested_type
        for field in message.field:
            field.ClearField("json_name")
    return file


def test_generated_module_matches_the_proto_file(tmp_path):
    root = Path(metadata.__file__).parents[2]
    proto = "bkctl/formats/data_formats.proto"
    output = tmp_path / "descriptors"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={output}", proto]
    subprocess.run(command, cwd=root, check=True)
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

    (made,) = FileDescriptorSet.FromString(output.read_bytes()).file
    generated = FileDescriptorProto.FromString(data_formats_pb2.DESCRIPTOR.serialized_pb)
    assert generated == without_json_names(made)


def test_generated_module_works_with_the_oldest_protobuf():
    text = Path(data_formats_pb2.__file__).read_text()
    generated = tuple(map(int, re.search(r"Protobuf Python Version: (\d+)\.(\d+)\.(\d+)", text).groups()))
    project = tomllib.loads((Path(metadata.__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (required,) = [each for each in project["dependencies"] if re.match(r"protobuf\W", each)]
    floor = tuple(map(int, re.search(r">=([\d.]+)", required)[1].split(".")))
    assert generated <= (*floor, 0, 0)[:3]


def test_only_the_first_of_many_missing_fields_is_named() -> None:
    body = bytes.fromhex("0801100118002801") + b"\x32\0" * 100_000
    data = b"BookieMetadataFormatVersion\t3\n" + b"\xc8\x9a\x0c" + body
    with pytest.raises(Corrupt, match="an ensemble lacks firstEntryId"):
        LedgerMetadata.parse(data)
