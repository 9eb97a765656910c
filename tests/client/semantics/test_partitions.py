"""Bookies behind links that are cut, which drops all packets without an answer. Needs root."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mixed_clusters import Namespace, why_no_namespaces
from support.own_bookies import OwnBookie
from support.own_cluster import start_all

from bkctl import BookKeeper
from bkctl.errors import LedgerFenced, Unreachable
from bkctl.metadata.cluster import open_cluster

TIMEOUT_S = 4.0


class Partitioned:
    def __init__(self, uri: str, directory: Path, namespaces: list[Namespace]) -> None:
        self.uri = uri
        self.bookies = [
            OwnBookie(uri, directory / each.name, settings={"advertisedAddress": each.address}, prefix=each.prefix)
            for each in namespaces
        ]
        self._namespaces = {
            f"{space.address}:{bookie.port}": space for space, bookie in zip(namespaces, self.bookies, strict=True)
        }

    @contextlib.contextmanager
    def cut(self, *bookie_ids: str) -> Iterator[None]:
        for bookie_id in bookie_ids:
            self._namespaces[bookie_id].cut()
        yield
        for bookie_id in bookie_ids:
            self._namespaces[bookie_id].mend()


@pytest.fixture
def partitioned(tmp_path: Path) -> Iterator[Partitioned]:
    if reason := why_no_namespaces():
        pytest.skip(reason)
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    with open_cluster(uri, create=True):
        pass
    with contextlib.ExitStack() as stack:
        namespaces = []
        for number in range(4):
            namespaces.append(Namespace(number))
            stack.callback(namespaces[-1].close)
        cluster = Partitioned(uri, tmp_path, namespaces)
        for bookie in cluster.bookies:
            stack.callback(bookie.kill)
        start_all(cluster.bookies)
        yield cluster


async def test_a_writer_outlives_partitions_and_is_fenced_beyond_them(partitioned: Partitioned) -> None:
    async with (
        BookKeeper(partitioned.uri, timeout_s=TIMEOUT_S) as client,
        BookKeeper(partitioned.uri, timeout_s=TIMEOUT_S) as other,
    ):
        writer = await client.create_ledger(ensemble_size=3, write_quorum_size=3, ack_quorum_size=2)
        await asyncio.gather(*(writer.add(b"%d" % entry_id) for entry_id in range(20)))
        with partitioned.cut(writer.metadata.last_fragment.bookies[0]):
            await asyncio.gather(*(writer.add(b"%d" % entry_id) for entry_id in range(20, 40)))
            reader = await other.open_ledger(writer.ledger, recovery=True)
            assert reader.last_add_confirmed == 39
            assert [entry.payload async for entry in reader.read()] == [b"%d" % number for number in range(40)]
            with pytest.raises(LedgerFenced):
                await writer.add(b"late")


async def test_a_partition_of_an_ack_quorum_changes_the_ensemble_and_of_most_bookies_stops_recovery(
    partitioned: Partitioned,
) -> None:
    async with BookKeeper(partitioned.uri, timeout_s=TIMEOUT_S) as client:
        writer = await client.create_ledger(ensemble_size=3, write_quorum_size=3, ack_quorum_size=3)
        await writer.add(b"0")
        lost = writer.metadata.last_fragment.bookies[1]
        with partitioned.cut(lost):
            await asyncio.gather(*(writer.add(b"%d" % entry_id) for entry_id in range(1, 10)))
            assert lost not in writer.metadata.last_fragment.bookies
        with partitioned.cut(*writer.metadata.last_fragment.bookies), pytest.raises(Unreachable):
            await client.open_ledger(writer.ledger, recovery=True)
        async with BookKeeper(partitioned.uri) as other:  # the links are up again
            reader = await other.open_ledger(writer.ledger, recovery=True)
            assert [entry.payload async for entry in reader.read()] == [b"%d" % number for number in range(10)]
