"""The metadata of Apache's cluster and its cookies: parsed as Apache parses them, written as it writes them."""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest
from support import golden

from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieServiceInfo, Cookie, LedgerLayout, LedgerMetadata

versions = pytest.mark.parametrize("version", golden.VERSIONS)


def described(metadata: LedgerMetadata) -> dict[str, Any]:
    """Metadata as the Java programs print it."""
    return {
        "state": metadata.state.name,
        "ensembleSize": metadata.ensemble_size,
        "writeQuorumSize": metadata.write_quorum_size,
        "ackQuorumSize": metadata.ack_quorum_size,
        "length": metadata.length,
        "lastEntryId": metadata.last_entry_id,
        "digestType": None if metadata.digest_type is None else metadata.digest_type.name.replace("HMAC", "MAC"),
        "password": None if metadata.password is None else base64.b64encode(metadata.password).decode(),
        "customMetadata": {key: base64.b64encode(value).decode() for key, value in metadata.custom_metadata.items()},
        "ensembles": {str(fragment.first_entry_id): list(fragment.bookies) for fragment in metadata.ensembles},
    }


@versions
def test_every_version_of_ledger_metadata_is_read_as_apache_reads_it_and_written_as_it_writes(version: str) -> None:
    samples = golden.ledger_metadata(version)
    assert {sample["formatVersion"] for sample in samples} == {1, 2, 3}
    for sample in samples:
        data = base64.b64decode(sample["bytes"])
        metadata = LedgerMetadata.parse(data)
        read_back = dict(sample["readBack"])
        assert metadata.ctime_ms == (None if read_back["ctimeMs"] == -1 else read_back.pop("ctimeMs"))
        read_back.pop("ctimeMs", None)
        assert described(metadata) == read_back
        assert metadata.format_version == sample["formatVersion"]
        assert metadata.serialize() == data


@versions
def test_parsed_ledger_nodes_match_the_metadata_of_javas_client(version: str) -> None:
    nodes = golden.zookeeper_nodes(version)
    ledgers = {ledger["ledgerId"]: ledger for ledger in golden.ledgers(version) if not ledger["deleted"]}
    seen = set()
    for path, value in nodes.items():
        if not re.fullmatch(r"(/\d+)+/L\d{4}", path):
            continue
        ledger_id = str(int(path.replace("/", "").replace("L", "")))
        metadata = LedgerMetadata.parse(base64.b64decode(value), path)
        found = described(metadata)
        assert found == {name: ledgers[ledger_id][name] for name in found}
        assert isinstance(metadata.digest_type, DigestType)
        seen.add(ledger_id)
    assert seen == set(ledgers)


@versions
def test_layout_cookies_and_registrations_are_read_and_written_byte_for_byte(version: str) -> None:
    nodes = {path: base64.b64decode(value) for path, value in golden.zookeeper_nodes(version).items()}
    layout = LedgerLayout.parse(nodes["/LAYOUT"])
    assert layout.factory_class.endswith(".HierarchicalLedgerManagerFactory")
    assert layout.serialize() == nodes["/LAYOUT"]

    registered = [path for path in nodes if re.fullmatch(r"/available/127\.0\.0\.1:\d+", path)]
    assert len(registered) == 3
    for path in registered:
        info = BookieServiceInfo.parse(nodes[path])
        assert [(endpoint.host, endpoint.port) for endpoint in info.endpoints] == [
            ("127.0.0.1", int(path.rpartition(":")[2]))
        ]
        assert info.serialize() == nodes[path]
        cookie = nodes[path.replace("/available/", "/cookies/")]
        assert Cookie.parse(cookie).serialize() == cookie


@pytest.mark.parametrize("bookie", golden.bookies(), ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def test_the_cookie_in_the_directories_is_the_one_in_the_store(bookie: golden.GoldenBookie) -> None:
    stored = base64.b64decode(golden.zookeeper_nodes(bookie.version)[f"/cookies/{bookie.bookie_id}"])
    for directory in (bookie.journal_dir, bookie.ledger_dir):
        data = (directory / "current" / "VERSION").read_bytes()
        assert data == stored
        assert Cookie.parse(data).serialize() == data
