"""The files of a small cluster of our bookies, of all storage classes, with known ledgers: for the jobs' tests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, NamedTuple

from support.own_cluster import STORAGES, OwnCluster, stop_all

from bkctl.client.ledger import BookKeeper
from bkctl.formats.entry import DigestType
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster

PASSWORD: Final = b"not for plans"
#: Small logs; no flush before the bookie stops, no garbage collection.
SETTINGS: Final = {
    "logSizeLimit": 64 * 1024,
    "flushInterval": 3_600_000,
    "gcWaitTime": 3_600_000,
    "journalMaxSizeMB": 64,
    "dbStorage_writeCacheMaxSizeMb": 32,
}


class Written(NamedTuple):
    """A written ledger."""

    ledger: LedgerId
    digest_type: DigestType
    entry_count: int
    write_quorum_size: int
    closed: bool


async def write(
    uri: str, scope_id: int, digest_type: DigestType, count: int, *, quorum: int = 2, close: bool = True,
    size: int = 300, custom: dict[str, bytes] | None = None,
) -> Written:  # fmt: skip
    """Write a ledger of `count` entries over three bookies."""
    with open_cluster(uri) as cluster:
        async with BookKeeper(cluster) as client:
            handle = await client.create_ledger_adv(
                ledger_scope_id=scope_id, ensemble_size=3, write_quorum_size=quorum, ack_quorum_size=quorum,
                digest_type=digest_type, password=PASSWORD, custom_metadata=custom or {},
            )  # fmt: skip
            for number in range(count):
                await handle.add(b"%06d" % number + bytes([number % 251]) * size, entry_id=number)
            if close:
                await handle.close()
            return Written(handle.ledger, digest_type, count, quorum, close)


class Files(NamedTuple):
    """The directories of a cluster whose bookies are down, and its ledgers."""

    directory: Path
    uri: str
    bookies: list[str]
    flushed: list[Written]
    journaled: list[Written]

    @property
    def written(self) -> list[Written]:
        return [*self.flushed, *self.journaled]

    def places(self) -> list[str]:
        """Return the directory of each bookie."""
        return [str(self.directory / f"own-{number}") for number in range(len(self.bookies))]


def make(directory: Path) -> Files:
    """Write ledgers of several scopes and every digest type, some to logs, others to the journals of killed bookies."""
    directory.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite://{directory / 'metadata.db'}"
    with open_cluster(uri, create=True):
        pass
    cluster = OwnCluster(uri, directory, STORAGES, SETTINGS)
    try:
        cluster.ensure_up()
        flushed = [
            asyncio.run(write(uri, scope_id, digest_type, 40 + number))
            for scope_id in (0, 7)
            for number, digest_type in enumerate(DigestType)
        ]
        pulsar = {
            "application": b"pulsar",
            "component": b"managed-ledger",
            "pulsar/managed-ledger": b"public/default/t",
        }
        flushed.append(asyncio.run(write(uri, 0, DigestType.CRC32C, 70, quorum=3, custom=pulsar)))
        stop_all(cluster.bookies)
        cluster.ensure_up()
        journaled = [
            asyncio.run(write(uri, scope_id, DigestType.CRC32C, 12, close=close))
            for scope_id, close in ((0, True), (0, False), (2**64 - 1, True))
        ]
    finally:
        cluster.kill()
    return Files(directory, uri, [bookie.bookie_id for bookie in cluster.bookies], flushed, journaled)
