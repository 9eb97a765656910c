"""Runs of reads: each entry has the answer that it would have alone, from memory and from the disk."""

from __future__ import annotations

import asyncio
import random
import struct
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.served_bookies import PLAIN, SCOPED, add, config_for, connected, digests, on_a_bookie, serving, statuses
from support.servers import DB, INTERLEAVED, SORTED
from support.waiting import LIMIT_S

from bkctl.bookie import reads
from bkctl.bookie.bookie import Bookie
from bkctl.disk import StorageFile
from bkctl.formats.record import record_of
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.protocol import backpressure, runs, v2, v3
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.handler import ReadRunResponder
from bkctl.protocol.messages import (
    AddRequest,
    BytesLike,
    Protocol,
    ReadRequest,
    ReadResponse,
    Request,
    Status,
)
from bkctl.protocol.runs import ReadRun
from bkctl.storage.ledger.entry_reader import StoredEntryReader

COUNT = 120
OTHER = LedgerId(0, 6)
storage_classes = pytest.mark.parametrize(
    "storage_class", [SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"]
)
spoken = pytest.mark.parametrize(
    ("protocol", "ledger"),
    [(Protocol.V2, PLAIN), (Protocol.V3, PLAIN), (Protocol.V3, SCOPED)],
    ids=["v2", "v3", "scoped"],
)


def entry(ledger: LedgerId, entry_id: int) -> AddRequest:
    """An entry of many a size, so that neighbours are close in the log, or far apart."""
    payload = bytes([entry_id]) * (0, 7, 900, 5000, 70_000)[entry_id * entry_id % 5]
    sealed = digests(ledger).seal(entry_id, entry_id - 1, 1 << 20, payload)
    return AddRequest(ledger, entry_id, digests(ledger).master_key, sealed + payload)


async def fill(connection: BookieConnection, ledger: LedgerId) -> None:
    """Every third entry is missing, and another ledger's entries are in between."""
    wanted = [entry(ledger, number) for number in range(COUNT) if number % 3 != 1]
    others = [entry(OTHER, number) for number in range(0, COUNT, 7)]
    mixed = [request for pair in zip(wanted, others * 9, strict=False) for request in pair]
    assert set(await statuses(connection, *mixed)) == {Status.EOK}


async def check(connection: BookieConnection, ledger: LedgerId, entry_ids: list[int]) -> None:
    answers = await asyncio.gather(*(connection.send(ReadRequest(ledger, entry_id)) for entry_id in entry_ids))
    for entry_id, answer in zip(entry_ids, answers, strict=True):
        assert isinstance(answer, ReadResponse)
        assert (answer.ledger, answer.entry_id) == (ledger, entry_id)
        if entry_id % 3 == 1 or entry_id >= COUNT:
            assert answer.status is Status.ENOENTRY
        else:
            assert answer.status is Status.EOK
            assert bytes(answer.body or b"") == entry(ledger, entry_id).body


@storage_classes
@spoken
@pytest.mark.parametrize("run_bytes", [reads.RUN_BYTES_MAX, 1000])
def test_each_read_of_a_run_has_its_entry(
    tmp_path: Path, cluster: Cluster, storage_class: str, protocol: Protocol, ledger: LedgerId, run_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(reads, "RUN_BYTES_MAX", run_bytes)
    shuffled = [*range(COUNT + 10), *range(0, COUNT, 2)]
    random.Random(5).shuffle(shuffled)

    async def run() -> None:
        config = config_for(tmp_path, ledger_storage_class=storage_class)
        async with serving(config, cluster) as bookie, connected(bookie, protocol) as connection:
            await fill(connection, ledger)
            for entry_ids in ([*range(COUNT + 10)], shuffled):
                await check(connection, ledger, entry_ids)
        for entry_ids in ([*range(COUNT + 10)], shuffled, [*range(0, COUNT, 2)]):  # new, so nothing is in memory
            async with serving(config, cluster) as bookie, connected(bookie, protocol) as connection:
                await check(connection, ledger, entry_ids)
                await check(connection, ledger, entry_ids)
                # Some entries are in memory then, and some are not.
                added = [entry(ledger, number) for number in range(0, COUNT, 9)]
                assert set(await statuses(connection, *added)) == {Status.EOK}
                await check(connection, ledger, entry_ids)

    asyncio.run(run())


@storage_classes
@spoken
def test_without_compiled_loops_requests_come_one_by_one_and_have_the_same_answers(
    tmp_path: Path, cluster: Cluster, storage_class: str, protocol: Protocol, ledger: LedgerId,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(runs, "compiled", None)

    async def run() -> None:
        config = config_for(tmp_path, ledger_storage_class=storage_class)
        for is_new in (True, False):
            async with serving(config, cluster) as bookie, connected(bookie, protocol) as connection:
                if is_new:
                    await fill(connection, ledger)
                await check(connection, ledger, [*range(COUNT + 10)])

    asyncio.run(run())


@storage_classes
@spoken
def test_answers_to_many_reads_of_one_entry_in_memory_come_in_parts(
    tmp_path: Path, cluster: Cluster, storage_class: str, protocol: Protocol, ledger: LedgerId,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A small request that names a large entry again and again must not multiply it in memory."""
    count, large = 100, entry(ledger, 2)
    size = len(large.body)
    out: list[BytesLike] = []
    for number in range(count):
        if protocol is Protocol.V2:
            v2.encode_request(ReadRequest(ledger, 2), out)
        else:
            v3.encode_request(number, ReadRequest(ledger, 2), out)
    sent: list[int] = []
    real = ReadRunResponder.answer

    def answer(self: ReadRunResponder, run: ReadRun, bodies: Sequence[BytesLike], max_lac: int | None) -> None:
        sent.append(sum(map(len, bodies)))
        real(self, run, bodies, max_lac)

    monkeypatch.setattr(ReadRunResponder, "answer", answer)

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        assert await statuses(connection, entry(ledger, 0), large) == [Status.EOK, Status.EOK]
        reader, writer = await asyncio.open_connection(*bookie.address)
        writer.write(b"".join(out))
        for _ in range(count):
            (frame_size,) = struct.unpack(">i", await reader.readexactly(4))
            assert bytes(large.body) in await reader.readexactly(frame_size)  # type: ignore[arg-type]
        writer.close()
        await writer.wait_closed()
        assert max(sent) > size, "no run had several reads"
        assert max(sent) <= reads.RUN_BYTES_MAX + size

    on_a_bookie(tmp_path, cluster, body, protocol, ledger_storage_class=storage_class)


def on_damaged_logs(
    tmp_path: Path,
    cluster: Cluster,
    storage_class: str,
    ledger: LedgerId,
    damage: Callable[[bytes], bytes],
    then: Callable[[Bookie], Awaitable[None]],
) -> None:
    async def run() -> None:
        config = config_for(tmp_path, ledger_storage_class=storage_class)
        async with serving(config, cluster) as bookie, connected(bookie) as connection:
            await fill(connection, ledger)
        for path in (tmp_path / "ledgers").rglob("*.log"):
            path.write_bytes(damage(path.read_bytes()))
        async with serving(config, cluster) as bookie:
            await then(bookie)

    asyncio.run(run())


@storage_classes
@spoken
def test_damaged_neighbours_of_a_run_fail_alone(
    tmp_path: Path, cluster: Cluster, storage_class: str, protocol: Protocol, ledger: LedgerId
) -> None:
    damaged = {}
    for number, new in ((3, b"\xff"), (21, struct.pack(">i", -5)), (30, struct.pack(">i", 1 << 30)), (63, bytes(4))):
        record = record_of(bytes(entry(ledger, number).body))  # type: ignore[arg-type]
        at = 4 if len(new) == 1 else 0  # the first byte of the body, or the size
        damaged[number] = (record, record[:at] + new + record[at + len(new) :])

    def damage(data: bytes) -> bytes:
        for record, changed in damaged.values():
            data = data.replace(record, changed)
        return data

    async def then(bookie: Bookie) -> None:
        entry_ids = [number for number in range(COUNT) if number % 3 != 1]
        async with connected(bookie, protocol) as connection:
            for _ in range(2):
                answers = await asyncio.gather(*(connection.send(ReadRequest(ledger, number)) for number in entry_ids))
                failed = {
                    number for number, answer in zip(entry_ids, answers, strict=True) if answer.status is Status.EIO
                }
                assert failed == damaged.keys()
                await check(connection, ledger, [number for number in entry_ids if number not in damaged])

    on_damaged_logs(tmp_path, cluster, storage_class, ledger, damage, then)


@storage_classes
@spoken
def test_log_that_ends_early_fails_the_reads_behind_its_end_alone(
    tmp_path: Path, cluster: Cluster, storage_class: str, protocol: Protocol, ledger: LedgerId
) -> None:
    cut = record_of(bytes(entry(ledger, 72).body))  # type: ignore[arg-type]

    def damage(data: bytes) -> bytes:
        found = data.find(cut)
        return data if found < 0 else data[: found + 10]

    async def then(bookie: Bookie) -> None:
        async with connected(bookie, protocol) as connection:
            entry_ids = [number for number in range(COUNT - 1) if number % 3 != 1]
            answers = await asyncio.gather(*(connection.send(ReadRequest(ledger, number)) for number in entry_ids))
            for entry_id, answer in zip(entry_ids, answers, strict=True):
                assert answer.status is (Status.EOK if entry_id < 72 else Status.EIO)
                if entry_id < 72:
                    assert bytes(answer.body) == entry(ledger, entry_id).body

    on_damaged_logs(tmp_path, cluster, storage_class, ledger, damage, then)


@storage_classes
@spoken
def test_reads_and_other_requests_may_be_mixed_and_cut_anywhere(
    tmp_path: Path, cluster: Cluster, storage_class: str, protocol: Protocol, ledger: LedgerId
) -> None:
    """Fencing needs its master key, and reads beside a refused fence are answered."""
    key = digests(ledger).master_key
    missing = LedgerId(ledger[0], 99)
    requests: list[tuple[Request, Status]] = [(ReadRequest(missing, 0), Status.ENOLEDGER)]
    requests += [(ReadRequest(ledger, number), Status.EOK) for number in range(4)]
    requests += [(ReadRequest(ledger, 50), Status.ENOENTRY), (add(ledger, 4), Status.EOK)]
    requests += [(ReadRequest(ledger, number), Status.EOK) for number in (4, 0)]
    requests += [(ReadRequest(ledger, 1, b"wrong" * 4, fence=True), Status.EUA)]
    requests += [(ReadRequest(ledger, number), Status.EOK) for number in (2, 3)]
    requests += [(add(ledger, 5), Status.EOK), (ReadRequest(missing, 1), Status.ENOLEDGER)]
    requests += [(ReadRequest(ledger, 3, key, fence=True), Status.EOK), (add(ledger, 6), Status.EFENCED)]
    requests += [(ReadRequest(ledger, number), Status.EOK) for number in (0, 1, 2)]
    out: list[BytesLike] = []
    for number, (request, _) in enumerate(requests):
        if protocol is Protocol.V2:
            v2.encode_request(request, out)
        else:
            v3.encode_request(number, request, out)
    data = b"".join(out)
    chance = random.Random(len(data))

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        assert set(await statuses(connection, *(add(ledger, number) for number in range(4)))) == {Status.EOK}
        for cuts in (
            *([at] for at in range(0, len(data), 11)),
            *(chance.sample(range(len(data)), 9) for _ in range(30)),
        ):
            reader, writer = await asyncio.open_connection(*bookie.address)
            for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
                writer.write(data[begin:end])
                await writer.drain()
                await asyncio.sleep(0)
            got: list[tuple[Any, Status]] = []
            while len(got) < len(requests):
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                frame = memoryview(await reader.readexactly(size))
                if protocol is Protocol.V2:
                    which, answer = v2.decode_response(frame, 0, size)
                    got.append((which, answer.status))
                else:
                    response = v3.decode_response(frame, 0, size)
                    got.append((response.txn_id, response.response.status))
            writer.close()
            await writer.wait_closed()
            # Only the first round adds: the ledger is fenced then.
            expected = [
                Status.EFENCED if isinstance(request, AddRequest) and bookie_is_fenced else status
                for request, status in requests
            ]
            if protocol is Protocol.V3:
                assert [status for _, status in sorted(got)] == expected
            else:
                assert sorted(status for _, status in got) == sorted(expected)
            bookie_is_fenced.append(True)

    bookie_is_fenced: list[bool] = []
    on_a_bookie(tmp_path, cluster, body, protocol, ledger_storage_class=storage_class)


@storage_classes
def test_reads_over_the_limit_of_waiting_ones_are_refused_and_others_served(
    tmp_path: Path, cluster: Cluster, storage_class: str
) -> None:
    async def run() -> None:
        config = config_for(tmp_path, ledger_storage_class=storage_class)
        async with serving(config, cluster) as bookie, connected(bookie) as connection:
            await fill(connection, PLAIN)
        limited = config.with_changes(max_pending_read_requests_per_thread=10)
        async with serving(limited, cluster) as bookie, connected(bookie) as connection:
            entry_ids = [number for number in range(COUNT) if number % 3 != 1]
            for _ in range(3):
                answers = await asyncio.gather(*(connection.send(ReadRequest(PLAIN, number)) for number in entry_ids))
                found = {answer.status for answer in answers}
                assert found <= {Status.EOK, Status.ETOOMANYREQUESTS}
                assert Status.EOK in found
                assert bookie.processor.server.reads.count == 0

    asyncio.run(run())


@spoken
def test_reads_that_no_thread_can_begin_are_refused_and_later_ones_served(
    tmp_path: Path, cluster: Cluster, protocol: Protocol, ledger: LedgerId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may refuse a thread for a while. Nothing is left that waits for a read which did not begin."""
    failures = 0

    class Threads(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **options: Any) -> Any:
            nonlocal failures
            if failures:
                failures -= 1
                raise RuntimeError("can't start new thread")
            return super().submit(*arguments, **options)

    async def run() -> None:
        nonlocal failures
        config = config_for(tmp_path)
        async with serving(config, cluster) as bookie, connected(bookie, protocol) as connection:
            await fill(connection, ledger)
        monkeypatch.setattr(reads, "ThreadPoolExecutor", Threads)
        monkeypatch.setattr(StorageFile, "read_cached", lambda *_: None)
        async with serving(config, cluster) as bookie, connected(bookie, protocol) as connection:
            assert await statuses(connection, ReadRequest(ledger, 0)) == [Status.EOK]
            failures = count = backpressure.READS_IN_PROGRESS_MAX + 2
            for _ in range(count):
                assert await statuses(connection, ReadRequest(ledger, 3)) == [Status.EIO]
            assert failures == 0
            await check(connection, ledger, list(range(COUNT)))
            assert bookie.processor.server.reads.in_progress_count == 0

    asyncio.run(run())


@storage_classes
@spoken
def test_runs_that_follow_one_on_a_slow_disk_are_answered_with_it(
    tmp_path: Path, cluster: Cluster, storage_class: str, protocol: Protocol, ledger: LedgerId,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also when it fails, and when its client or theirs is gone; adds and other ledgers do not wait."""
    is_free, is_broken = threading.Event(), threading.Event()
    real = StoredEntryReader.read_all

    def slow(self: Any, handle: Any, entry_ids: Any, size_max: int) -> Any:
        if handle.ledger == ledger:
            assert is_free.wait(LIMIT_S)
            if is_broken.is_set():
                raise OSError(5, "Input/output error")
        return real(self, handle, entry_ids, size_max)

    async def run() -> None:
        config = config_for(tmp_path, ledger_storage_class=storage_class)
        async with serving(config, cluster) as bookie, connected(bookie, protocol) as connection:
            await fill(connection, ledger)
        monkeypatch.setattr(StoredEntryReader, "read_all", slow)
        # Without the page cache, so that every read needs a thread.
        monkeypatch.setattr(StorageFile, "read_cached", lambda *_: None)
        for fails in (True, False):
            is_free.clear()
            (is_broken.set if fails else is_broken.clear)()
            async with (
                serving(config, cluster) as bookie,
                connected(bookie, protocol) as first,
                connected(bookie, protocol) as second,
                connected(bookie, protocol) as third,
            ):
                sent = []
                for begin, connection in zip(range(0, 90, 30), (first, second, third), strict=True):
                    entry_ids = [number for number in range(begin, begin + 30) if number % 3 != 1]
                    sent.append(
                        [asyncio.ensure_future(connection.send(ReadRequest(ledger, each))) for each in entry_ids]
                    )
                    await asyncio.sleep(0.05)
                other = LedgerId(0, 6)
                assert await statuses(third, ReadRequest(other, 0), add(other, 200)) == [Status.EOK, Status.EOK]
                second.close()
                await second.wait_closed()
                # The first frame of v2 on a connection is decoded alone, and so not part of a run.
                runs = sent[0][1:], sent[2][1:]
                assert not any(each.done() for each in (*runs[0], *runs[1]))
                is_free.set()
                for answers in runs:
                    expected = Status.EIO if fails else Status.EOK
                    assert {answer.status for answer in await asyncio.gather(*answers)} == {expected}
                await asyncio.gather(*sent[1], return_exceptions=True)
                while bookie.processor.server.in_flight.bytes or bookie.processor.server.reads.count:
                    await asyncio.sleep(0.01)
                assert not bookie.processor.reader._following

    asyncio.run(run())
