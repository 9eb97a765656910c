"""Batch reads as no honest client sends them: absurd numbers, and entries that lie far apart in their log."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from support.served_bookies import PLAIN, add, connected, digests, on_a_bookie, statuses
from support.servers import DB, INTERLEAVED, SORTED

from bkctl.bookie.bookie import Bookie
from bkctl.errors import BkctlError
from bkctl.formats.entry import read_entry_header
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.protocol import v2
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import AddRequest, BatchReadRequest, BatchReadResponse, Protocol, Status

I64 = 1 << 63
OTHER = LedgerId(0, 6)


@pytest.mark.parametrize("is_on_disk", [False, True], ids=["in memory", "on disk"])
@pytest.mark.parametrize("storage", [SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"])
def test_absurd_batch_reads_are_answered_each_for_itself(
    tmp_path: Path, cluster: Cluster, storage: str, is_on_disk: bool
) -> None:
    firsts = (0, 5, 19, 20, -2, -5, -4096, -I64, I64 - 1, I64 - 2, 1 << 40)
    counts, sizes = (0, 1, -1, -(1 << 31), (1 << 31) - 1), (0, 1, -1, -I64, I64 - 1)

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        assert set(await statuses(connection, *(add(PLAIN, entry_id) for entry_id in range(20)))) == {Status.EOK}
        key = digests(PLAIN).master_key
        if is_on_disk:
            await bookie.checkpoint()
        for number, (first, count, size, fence) in enumerate(itertools.product(firsts, counts, sizes, (False, True))):
            request = BatchReadRequest(PLAIN, first, number, count, size, key if fence else None, fence)
            answer = await connection.send(request)
            present = 0 <= first < 20
            assert answer.status is (Status.EOK if present else Status.ENOENTRY), request
            found = [read_entry_header(each).entry_id for each in answer.bodies]
            assert found == list(range(first, first + len(found)))
            assert bool(found) == present
            if count == 1 or size <= 1:
                assert len(found) <= 1
        for ledger_id in (0, 99, (1 << 63) - 1, (1 << 64) - 1):
            request = BatchReadRequest(LedgerId(0, ledger_id), 0, 1, 9, 9)
            assert await statuses(connection, request) == [Status.ENOLEDGER]
        wrong = BatchReadRequest(PLAIN, 0, 1, 1, 1, bytes(20), True)
        assert await statuses(connection, wrong) == [Status.EUA]
        assert bookie.metrics.unexpected_errors == 0

    on_a_bookie(tmp_path, cluster, body, Protocol.V2, ledger_storage_class=storage)


def test_clients_that_leave_during_batch_reads_leave_nothing_behind(tmp_path: Path, cluster: Cluster) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        assert set(await statuses(connection, *(add(PLAIN, entry_id) for entry_id in range(300)))) == {Status.EOK}
        await bookie.checkpoint()
        for _ in range(20):
            async with connected(bookie, Protocol.V2) as other:
                reads = [other.send(BatchReadRequest(PLAIN, 0, number, 300, 1 << 20)) for number in range(50)]
                other.close()
                for read in reads:
                    with pytest.raises(BkctlError):
                        await read
        answer = await connection.send(BatchReadRequest(PLAIN, 0, 1, 300, 1 << 20))
        assert len(answer.bodies) == 300
        assert bookie.metrics.unexpected_errors == 0

    on_a_bookie(tmp_path, cluster, body, Protocol.V2, ledger_storage_class=INTERLEAVED)


def test_batch_of_small_entries_far_apart_keeps_no_more_than_they_have(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer of 10,000 such entries kept 320 MiB and more, and no limit counted them."""
    gap = 9_000
    kept: list[tuple[int, int]] = []
    encode = v2.encode_response

    def encoded(head: int, response: Any, out: list[Any]) -> int:
        if isinstance(response, BatchReadResponse):
            buffers = {id(body.obj): len(body.obj) for body in response.bodies if isinstance(body, memoryview)}
            kept.append((sum(map(len, response.bodies)), sum(buffers.values())))
        return encode(head, response, out)

    monkeypatch.setattr(v2, "encode_response", encoded)
    others = digests(OTHER)

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        for entry_id in range(200):
            between = others.seal(entry_id, entry_id - 1, gap * (entry_id + 1), bytes(gap)) + bytes(gap)
            adds = (add(PLAIN, entry_id), AddRequest(OTHER, entry_id, others.master_key, between))
            assert await statuses(connection, *adds) == [Status.EOK, Status.EOK]
        await bookie.checkpoint()
        for request_id in range(2):
            answer = await connection.send(BatchReadRequest(PLAIN, 0, request_id, 200, 1 << 20))
            assert [bytes(each) for each in answer.bodies] == [add(PLAIN, number).body for number in range(200)]
        assert len(kept) == 2
        for size, in_memory in kept:
            assert in_memory <= 3 * size

    on_a_bookie(tmp_path, cluster, body, Protocol.V2, ledger_storage_class=INTERLEAVED)
