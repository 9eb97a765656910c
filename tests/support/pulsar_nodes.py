"""Pulsar's nodes and ledgers, written as its brokers write them, for tests without a broker."""

from __future__ import annotations

import zlib
from typing import Any

from bkctl.formats.entry import DigestType
from bkctl.formats.managed_ledger_pb2 import CompressedInfo, ManagedCursorInfo, ManagedLedgerInfo, SchemaLocator
from bkctl.formats.metadata import Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster

APPLICATION = {"application": b"pulsar"}


def messages_of(managed_ledger: str, cursor: str | None = None) -> dict[str, bytes]:
    """The custom metadata of a ledger of messages, or of a cursor's."""
    found = {**APPLICATION, "component": b"managed-ledger", "pulsar/managed-ledger": managed_ledger.encode()}
    return found if cursor is None else {**found, "pulsar/cursor": cursor.encode()}


def compacted_of(topic: str) -> dict[str, bytes]:
    return {**APPLICATION, "component": b"compacted-ledger", "pulsar/compactedTopic": topic.encode()}


def bucket_of(managed_ledger: str, cursor: str, key: str) -> dict[str, bytes]:
    return {
        **APPLICATION,
        "component": b"delayed-index-bucket",
        "pulsar/delayedIndexTopic": managed_ledger.encode(),
        "pulsar/delayedIndexCursor": cursor.encode(),
        "pulsar/delayedIndexBucketKey": key.encode(),
    }


def schema_of(name: str) -> dict[str, bytes]:
    return {**APPLICATION, "component": b"schema", "pulsar/schemaId": name.encode()}


class PulsarStore:
    """A cluster with Pulsar's nodes beside it, in a SQLite store: there, below the root."""

    def __init__(self, cluster: Cluster, bookies: tuple[str, ...]) -> None:
        self.cluster, self.bookies = cluster, bookies

    def ledger(
        self, ledger_id: int, custom: dict[str, bytes], *, ctime_ms: int = 1_755_770_000_000, **given: Any
    ) -> int:
        """Create a closed ledger of 10 entries and 1,000 bytes, or as `given`."""
        fragment = Fragment(0, given.pop("bookies", self.bookies))
        metadata = LedgerMetadata(
            len(fragment.bookies), given.pop("quorum", 2), 2, DigestType.CRC32C, b"", (fragment,), LedgerState.CLOSED,
            1000, 9, ctime_ms, custom,
        )  # fmt: skip
        self.cluster.ledgers.create(LedgerId(0, ledger_id), metadata._replace(**given))
        return ledger_id

    def topic(self, name: str, *ledger_ids: int, **fields: Any) -> ManagedLedgerInfo:
        info = ManagedLedgerInfo(**fields)
        for ledger_id in ledger_ids:
            info.ledgerInfo.add(ledgerId=ledger_id, entries=10, size=1000, timestamp=1_755_770_000_000)
        self.put(f"managed-ledgers/{name}", info.SerializeToString())
        return info

    def cursor(self, topic: str, name: str, ledger_id: int = -1, at: tuple[int, int] = (-1, -1), **fields: Any) -> None:
        info = ManagedCursorInfo(
            cursorsLedgerId=ledger_id, markDeleteLedgerId=at[0], markDeleteEntryId=at[1], **fields
        )  # fmt: skip
        self.put(f"managed-ledgers/{topic}/{name}", info.SerializeToString())

    def schema(self, name: str, *ledger_ids: int) -> None:
        locator = SchemaLocator()
        for version, ledger_id in enumerate(ledger_ids):
            for entry in (locator.info, locator.index.add()):
                entry.version, entry.hash = version, b"h"
                entry.position.ledgerId, entry.position.entryId = ledger_id, 0
        self.put(f"schemas/{name}", locator.SerializeToString())

    def put(self, path: str, value: bytes) -> None:
        self.cluster.store.put(path, value, None)


def compressed(value: bytes, number: int = 2) -> bytes:
    """A value as Pulsar's managedLedgerInfoCompressionType leaves it; `number` 2 is ZLIB."""
    import pyarrow

    codec = {1: "lz4_raw", 3: "zstd", 4: "snappy"}.get(number)
    body = zlib.compress(value) if codec is None else pyarrow.compress(value, codec, asbytes=True)
    header = CompressedInfo(compressionType=number, uncompressedSize=len(value)).SerializeToString()
    return b"\x47\x78" + len(header).to_bytes(4) + header + body
