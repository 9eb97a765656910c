"""A bookie whose disks are behind, or fail beside the requests: it goes on, or gives up and says so."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any

import pytest
from servers import DB, INTERLEAVED, SORTED

from bkctl.bookie import server
from bkctl.bookie.server import Bookie
from bkctl.client.ledger import BookKeeper
from bkctl.config import BookieConfig
from bkctl.errors import BookieUnavailable
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.protocol import server as protocol_server
from bkctl.protocol import v2
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import ReadRequest
from bkctl.storage.files import DiskUsage, Files

HOUR_MS = 3_600_000


def bookie_of(cluster: Cluster, directory: Path, files: Files | None = None, **settings: Any) -> Bookie:
    config = BookieConfig(
        bookie_port=0,
        advertised_address="127.0.0.1",
        allow_loopback=True,
        journal_directories=(str(directory / "journal"),),
        ledger_directories=(str(directory / "ledgers"),),
        journal_pre_alloc_size_mb=1,
        **{"flush_interval": HOUR_MS, "disk_check_interval": HOUR_MS, **settings},
    )
    return Bookie(config, cluster=cluster, files=files)


@pytest.mark.parametrize("storage", [SORTED, INTERLEAVED, DB])
def test_held_adds_go_on_without_another_request_or_checkpoint(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    async def scenario() -> None:
        bookie = bookie_of(cluster, tmp_path, ledger_storage_class=storage)
        monkeypatch.setattr(type(bookie.storage.ledgers), "unwritten_bytes_max", 0)
        await bookie.start()
        async with BookKeeper(cluster) as bookkeeper:
            writer = await bookkeeper.create_ledger(ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
            for entry_id in range(3):
                assert await asyncio.wait_for(writer.add(b"entry"), 20) == entry_id
            await writer.close()
        await bookie.stop()

    asyncio.run(scenario())


def test_a_client_that_does_not_read_has_few_answers_in_memory(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol_server, "READS_IN_PROGRESS_MAX", 4)
    count, payload = 200, bytes(200_000)

    async def scenario() -> None:
        bookie = bookie_of(cluster, tmp_path)
        await bookie.start()
        async with BookKeeper(cluster) as bookkeeper:
            writer = await bookkeeper.create_ledger(ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
            await asyncio.gather(*(writer.add(payload) for _ in range(count)))
        read, reads = bookie.storage.read, []
        monkeypatch.setattr(bookie.storage, "find", lambda *_: None)
        monkeypatch.setattr(bookie.storage, "read", lambda *entry: (reads.append(entry), read(*entry))[1])
        reader, stream = await asyncio.open_connection(*bookie.address)
        for entry_id in range(count):
            out: list[Any] = []
            v2.encode_request(ReadRequest(writer.ledger, entry_id), out)
            stream.writelines(out)
        seen = -1
        while seen != len(reads) or not reads:
            seen = len(reads)
            await asyncio.sleep(0.1)
        assert seen < count // 2  # the kernel holds some megabytes
        for _ in range(count):
            size = int.from_bytes(await reader.readexactly(4))
            assert len(await reader.readexactly(size)) > len(payload)
        stream.close()
        await bookie.stop()

    asyncio.run(scenario())


class BrokenDisk(Files):
    """A disk that no longer says how full it is."""

    is_broken = False

    def disk_usage(self, path: Path) -> DiskUsage:
        if self.is_broken:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return super().disk_usage(path)


def test_a_bookie_that_cannot_look_after_its_disks_gives_up(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario() -> None:
        files = BrokenDisk()
        bookie = bookie_of(cluster, tmp_path, files, disk_check_interval=10)
        await bookie.start()
        files.is_broken = True
        await asyncio.wait_for(bookie.stopped.wait(), 20)
        assert "Input/output error" in str(bookie.failure)
        await bookie.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("method", ["commit", "write_entries", "checkpoint"])
# The thread's own traceback is to be seen, by whoever runs the bookie.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bookie_gives_up_when_one_of_its_threads_dies(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def defect(*_: object, **__: object) -> None:
        raise RuntimeError(f"a defect in {method}")

    async def scenario() -> None:
        bookie = bookie_of(cluster, tmp_path, flush_interval=10)
        monkeypatch.setattr(type(bookie.storage.ledgers), "unwritten_bytes_max", 0)
        await bookie.start()
        monkeypatch.setattr(bookie.storage, method, defect)
        async with BookKeeper(cluster) as bookkeeper:
            writer = await bookkeeper.create_ledger(ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
            writer.add(b"entry")
            await asyncio.wait_for(bookie.stopped.wait(), 20)
            assert f"a defect in {method}" in str(bookie.failure)
            await bookie.stop()

    asyncio.run(scenario())


# The thread's own traceback is to be seen, by whoever runs the bookie.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("stops", [False, True], ids=["at work", "while it stops"])
def test_nobody_waits_for_the_answers_of_a_bookie_that_failed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    monkeypatch.setattr(server, "STOP_GRACE_S", 600.0)
    entered, go_on = threading.Event(), threading.Event()

    def defect(*_: object, **__: object) -> None:
        entered.set()
        go_on.wait(20)
        raise RuntimeError("a defect")

    async def scenario() -> None:
        bookie = bookie_of(cluster, tmp_path)
        await bookie.start()
        monkeypatch.setattr(bookie.storage, "commit", defect)
        client = await BookieConnection.open(*bookie.address, bookie_id=bookie.bookie_id, timeout_s=600)
        fence = client.send(ReadRequest(LedgerId(0, 1), -1, bytes(20), fence=True))
        await asyncio.to_thread(entered.wait, 20)
        stopping = asyncio.create_task(bookie.stop()) if stops else None
        await asyncio.sleep(0.1)
        go_on.set()
        with pytest.raises(BookieUnavailable):
            await asyncio.wait_for(fence, 20)
        await asyncio.wait_for(stopping or bookie.stop(), 20)
        assert "a defect" in str(bookie.failure)

    asyncio.run(scenario())


def test_a_bookie_that_turns_read_only_and_back_while_the_store_is_slow_stays_registered(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = threading.Event()
    plain_delete = cluster.store.delete

    def delete(path: str, *arguments: Any, **named: Any) -> None:
        slow.wait(1)
        plain_delete(path, *arguments, **named)

    async def scenario() -> None:
        bookie = bookie_of(cluster, tmp_path)
        await bookie.start()
        monkeypatch.setattr(cluster.store, "delete", delete)
        moves = []
        for read_only in (True, False):
            bookie.read_only = read_only
            moves.append(asyncio.create_task(bookie._register()))
            await asyncio.sleep(0.3)
        await asyncio.gather(*moves)
        slow.set()
        found = cluster.bookies.get(bookie.bookie_id)
        assert found is not None
        assert found.state == "rw"
        await bookie.stop()

    asyncio.run(scenario())


def test_a_stop_during_a_registration_leaves_no_ghost(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster is the caller's, so that no session ends with the bookie."""
    entered, go_on, left = (threading.Event() for _ in range(3))
    plain_register = cluster.bookies.register

    def register(*arguments: Any, **named: Any) -> None:
        entered.set()
        go_on.wait(20)
        plain_register(*arguments, **named)
        left.set()

    async def scenario() -> None:
        bookie = bookie_of(cluster, tmp_path)
        await bookie.start()
        monkeypatch.setattr(cluster.bookies, "register", register)
        bookie.read_only = True
        bookie._register_soon()
        await asyncio.to_thread(entered.wait, 20)
        stopping = asyncio.create_task(bookie.stop())
        await asyncio.sleep(0.3)
        go_on.set()
        await stopping
        await asyncio.to_thread(left.wait, 20)
        found = cluster.bookies.get(bookie.bookie_id)
        assert found is not None
        assert found.state == "down"

    asyncio.run(scenario())


def test_registrations_that_are_over_leave_nothing_behind(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario() -> None:
        bookie = bookie_of(cluster, tmp_path)
        await bookie.start()
        before = len(bookie._tasks)
        for _ in range(20):
            bookie._register_soon()
        async with asyncio.timeout(20):
            while len(bookie._tasks) > before:
                await asyncio.sleep(0.01)
        await bookie.stop()

    asyncio.run(scenario())
