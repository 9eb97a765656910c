"""Our bookie in this process, asked over its port: the answers of the decision table, and what becomes of the files."""

from __future__ import annotations

import asyncio
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.own_cluster import tree
from support.served_bookies import PLAIN, SCOPED, add, config_for, connected, digests, on_a_bookie, serving, statuses
from support.servers import DB, INTERLEAVED, SORTED
from support.waiting import LIMIT_S

from bkctl.bookie.bookie import Bookie
from bkctl.bookie.cookies import CookieMismatch
from bkctl.disk import DiskUsage, Files
from bkctl.errors import AlreadyExists, BkctlError, DirectoryInUse, IllegalOperation, Unsupported, UsageError
from bkctl.files.journal import JournalReader, read_last_mark
from bkctl.formats.availability import Availability
from bkctl.formats.entry import read_entry_header
from bkctl.formats.journal import LogMark
from bkctl.formats.metadata import BookieServiceInfo
from bkctl.ids import LedgerId
from bkctl.metadata.backends.sqlite import SqliteStore
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import (
    LAST_ENTRY,
    AddRequest,
    BatchReadRequest,
    BookieInfoRequest,
    ForceLedgerRequest,
    ListEntriesRequest,
    Protocol,
    ReadLacRequest,
    ReadRequest,
    Status,
    WriteLacRequest,
)

LEDGERS = [PLAIN, SCOPED]


def test_the_start_lists_the_settings_without_effect(
    tmp_path: Path, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        pass

    on_a_bookie(tmp_path / "some", cluster, body, warnings=("enableBusyWait has no effect: none",))
    assert "enableBusyWait has no effect: none" in caplog.messages
    caplog.clear()
    on_a_bookie(tmp_path / "none", cluster, body)
    assert "no effect" not in caplog.text


@pytest.mark.parametrize("ledger", LEDGERS, ids=str)
@pytest.mark.parametrize("protocol", list(Protocol), ids=lambda each: each.name)
def test_entries_are_read_back_as_they_were_added(
    tmp_path: Path, cluster: Cluster, protocol: Protocol, ledger: LedgerId
) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        if ledger.is_scoped and protocol is Protocol.V2:
            with pytest.raises(IllegalOperation):
                connection.send(add(ledger, 0))
            return
        requests = [add(ledger, entry_id) for entry_id in range(300)]
        assert set(await statuses(connection, *requests)) == {Status.EOK}
        for _ in range(2):
            for entry_id in (0, 7, 299):
                response = await connection.send(ReadRequest(ledger, entry_id))
                assert response.status is Status.EOK
                assert bytes(response.body) == requests[entry_id].body
                assert response.entry_id == entry_id
                assert response.max_lac == (298 if protocol is Protocol.V3 else None)
            last = await connection.send(ReadRequest(ledger, LAST_ENTRY))
            assert (last.entry_id, bytes(last.body)) == (LAST_ENTRY, requests[299].body)
            await bookie.checkpoint()  # now from the files

    on_a_bookie(tmp_path, cluster, body, protocol)


@pytest.mark.parametrize("ledger", LEDGERS, ids=str)
def test_requests_are_refused_with_apaches_status_codes(tmp_path: Path, cluster: Cluster, ledger: LedgerId) -> None:
    other = LedgerId(ledger.scope_id, ledger.ledger_id + 1)
    wrong_key = digests(ledger, b"wrong").master_key

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        refusals = [
            (ReadRequest(ledger, 0), Status.ENOLEDGER),
            (ReadLacRequest(ledger), Status.ENOENTRY),
            (ListEntriesRequest(ledger), Status.ENOLEDGER),
            (ForceLedgerRequest(ledger), Status.EOK),
            (add(ledger, 0), Status.EOK),
            (add(ledger, 1, master_key=wrong_key), Status.EUA),
            (add(ledger, 1)._replace(entry_id=2), Status.EBADREQ),
            (add(other, 1)._replace(ledger=ledger), Status.EBADREQ),
            (add(ledger, 1, body=b"short"), Status.EBADREQ),
            (add(ledger, 1 << 41), Status.EBADREQ),
            (ReadRequest(ledger, 1), Status.ENOENTRY),
            (ReadRequest(ledger, LAST_ENTRY, wrong_key, True), Status.EUA),
            (ReadRequest(ledger, LAST_ENTRY, None, True), Status.EUA),
            (ReadRequest(ledger, 0, previous_lac=0, piggyback=True), Status.EBADREQ),
            (WriteLacRequest(ledger, 0, wrong_key, digests(ledger).seal_lac(0)), Status.EUA),
            (WriteLacRequest(ledger, 0, digests(ledger).master_key, digests(other).seal_lac(0)), Status.EBADREQ),
            (WriteLacRequest(ledger, 0, digests(ledger).master_key, bytes(300)), Status.EBADREQ),
            (ReadRequest(other, 0), Status.ENOLEDGER),
        ]
        for request, expected in refusals:
            assert (await connection.send(request)).status is expected, request

    on_a_bookie(tmp_path, cluster, body)


@pytest.mark.parametrize("storage", [SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"])
@pytest.mark.parametrize("protocol", list(Protocol), ids=lambda each: each.name)
def test_entries_that_end_behind_their_lac_are_kept(
    tmp_path: Path, cluster: Cluster, protocol: Protocol, storage: str
) -> None:
    """As Apache's bookie does: in memory, in entry logs and in the list of entries."""
    ledgers = [PLAIN] if protocol is Protocol.V2 else LEDGERS

    def request(ledger: LedgerId, entry_id: int, rest: int) -> AddRequest:
        whole = add(ledger, entry_id)
        return whole._replace(body=bytes(whole.body)[: (33 if ledger.is_scoped else 24) + rest])

    requests = [request(ledger, rest + 1, rest) for ledger in ledgers for rest in range(8)]

    async def is_all_there(connection: BookieConnection) -> None:
        for each in requests:
            response = await connection.send(ReadRequest(each.ledger, each.entry_id))
            assert (response.status, bytes(response.body)) == (Status.EOK, each.body)
        for ledger in ledgers if protocol is Protocol.V3 else ():
            listed = await connection.send(ListEntriesRequest(ledger))
            assert list(Availability.parse(listed.availability)) == list(range(9))
            assert (await connection.send(ReadLacRequest(ledger))).status is Status.EOK
            polled = ReadRequest(ledger, LAST_ENTRY, previous_lac=0, timeout_ms=10)
            assert (await connection.send(polled)).max_lac == 7

    async def before(bookie: Bookie, connection: BookieConnection) -> None:
        assert set(await statuses(connection, *(add(ledger, 0) for ledger in ledgers), *requests)) == {Status.EOK}
        await is_all_there(connection)
        await bookie.checkpoint()
        await is_all_there(connection)

    async def after(bookie: Bookie, connection: BookieConnection) -> None:
        await is_all_there(connection)

    on_a_bookie(tmp_path, cluster, before, protocol, ledger_storage_class=storage)
    on_a_bookie(tmp_path, cluster, after, protocol, ledger_storage_class=storage)


@pytest.mark.parametrize("ledger", LEDGERS, ids=str)
def test_explicit_lac_is_that_of_the_packet(tmp_path: Path, cluster: Cluster, ledger: LedgerId) -> None:
    """Java's client sets the field first and packs the LAC later."""

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        by = digests(ledger)
        assert await statuses(
            connection, add(ledger, 0), WriteLacRequest(ledger, 3, by.master_key, by.seal_lac(7))
        ) == [Status.EOK, Status.EOK]
        assert by.open_lac((await connection.send(ReadLacRequest(ledger))).lac_body) == 7
        assert (await connection.send(ReadRequest(ledger, 0))).max_lac == 7

    on_a_bookie(tmp_path, cluster, body)


def test_refused_requests_are_logged_once_with_the_reason(
    tmp_path: Path, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        refused = [add(PLAIN, number, body=b"short") for number in range(20)]
        assert set(await statuses(connection, *refused)) == {Status.EBADREQ}

    on_a_bookie(tmp_path, cluster, body)
    (logged,) = [message for message in caplog.messages if message.startswith("Refused a request")]
    assert "The body is not entry 0 of ledger" in logged


def test_bodies_of_another_format_than_the_scopes_store_nothing(tmp_path: Path, cluster: Cluster) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        plain, scoped = add(PLAIN, 0), add(SCOPED, 0)
        torn_flags = b"\xb3" + bytes(scoped.body[1:])
        assert await statuses(
            connection,
            plain._replace(body=scoped.body),
            scoped._replace(body=plain.body),
            scoped._replace(body=torn_flags),
            ReadRequest(PLAIN, 0),
            ReadRequest(SCOPED, 0),
        ) == [Status.EBADREQ, Status.EBADREQ, Status.EBADREQ, Status.ENOLEDGER, Status.ENOLEDGER]
        async with connected(bookie, Protocol.V2) as v2:
            # In a v2 frame the ids are the body's first 16 bytes, whatever they are.
            ledger_id, entry_id = struct.unpack_from(">Qq", scoped.body)
            request = AddRequest(LedgerId(0, ledger_id), entry_id, plain.master_key, scoped.body)
            assert await statuses(v2, request) == [Status.EBADREQ]

    on_a_bookie(tmp_path, cluster, body)


@pytest.mark.parametrize("ledger", LEDGERS, ids=str)
def test_fenced_ledger_takes_recovery_adds_only_and_stays_fenced(
    tmp_path: Path, cluster: Cluster, ledger: LedgerId
) -> None:
    key = digests(ledger).master_key

    async def before(bookie: Bookie, connection: BookieConnection) -> None:
        assert (await connection.send(add(ledger, 0))).status is Status.EOK
        fenced = await connection.send(ReadRequest(ledger, LAST_ENTRY, key, fence=True))
        assert (fenced.status, fenced.max_lac) == (Status.EOK, None)
        assert await statuses(connection, add(ledger, 1), add(ledger, 1, recovery_add=True)) == [
            Status.EFENCED,
            Status.EOK,
        ]

    async def after(bookie: Bookie, connection: BookieConnection) -> None:
        assert await statuses(connection, add(ledger, 2), ReadRequest(ledger, 1)) == [Status.EFENCED, Status.EOK]

    on_a_bookie(tmp_path, cluster, before)
    on_a_bookie(tmp_path, cluster, after)


def test_fencing_creates_a_missing_ledger(tmp_path: Path, cluster: Cluster) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        for ledger in LEDGERS:
            fence = ReadRequest(ledger, LAST_ENTRY, digests(ledger).master_key, fence=True)
            assert await statuses(connection, fence) == [Status.ENOENTRY]
            assert await statuses(connection, add(ledger, 0)) == [Status.EFENCED]

    on_a_bookie(tmp_path, cluster, body)


def test_scopes_never_mix(tmp_path: Path, cluster: Cluster) -> None:
    scopes = [LedgerId(scope_id, 5) for scope_id in (0, 1, 7, 1 << 63, (1 << 64) - 1)]

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        for index, ledger in enumerate(scopes):
            assert set(await statuses(connection, *(add(ledger, each) for each in range(index + 1)))) == {Status.EOK}
        fence = ReadRequest(scopes[1], LAST_ENTRY, digests(scopes[1]).master_key, fence=True)
        assert await statuses(connection, fence) == [Status.EOK]
        for _ in range(2):
            for index, ledger in enumerate(scopes):
                last = await connection.send(ReadRequest(ledger, LAST_ENTRY))
                header = read_entry_header(last.body)
                assert (header.ledger, header.entry_id) == (ledger, index)
                expected = Status.EFENCED if index == 1 else Status.EOK
                assert await statuses(connection, add(ledger, index)) == [expected]
            await bookie.checkpoint()
        bookie.storage.delete_ledger(scopes[2])
        found = [(await connection.send(ReadRequest(each, 0))).status for each in scopes]
        assert found == [Status.EOK, Status.EOK, Status.ENOLEDGER, Status.EOK, Status.EOK]

    on_a_bookie(tmp_path, cluster, body)


@pytest.mark.parametrize("ledger", LEDGERS, ids=str)
def test_explicit_lac_is_kept_and_answered(tmp_path: Path, cluster: Cluster, ledger: LedgerId) -> None:
    by = digests(ledger)

    async def before(bookie: Bookie, connection: BookieConnection) -> None:
        assert await statuses(connection, WriteLacRequest(ledger, 3, by.master_key, by.seal_lac(3))) == [Status.EOK]
        alone = await connection.send(ReadLacRequest(ledger))
        assert (alone.status, by.open_lac(alone.lac_body)) == (Status.EIO, 3)
        assert await statuses(connection, add(ledger, 4, lac=2)) == [Status.EOK]

    async def after(bookie: Bookie, connection: BookieConnection) -> None:
        both = await connection.send(ReadLacRequest(ledger))
        assert (both.status, by.open_lac(both.lac_body)) == (Status.EOK, 3)
        assert by.open(bytes(both.last_entry_body), 4).last_add_confirmed == 2
        assert (await connection.send(ReadRequest(ledger, 4))).max_lac == 3

    on_a_bookie(tmp_path, cluster, before)
    on_a_bookie(tmp_path, cluster, after)


def test_long_poll_ends_with_an_update_a_fence_or_its_time(tmp_path: Path, cluster: Cluster) -> None:
    def poll(previous_lac: int, timeout_ms: int = 60_000, **changes: Any) -> ReadRequest:
        return ReadRequest(PLAIN, LAST_ENTRY, previous_lac=previous_lac, timeout_ms=timeout_ms, **changes)

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        await statuses(connection, add(PLAIN, 0))
        timed_out = await connection.send(poll(-1, 1, piggyback=True))
        assert (timed_out.status, timed_out.max_lac, timed_out.body) == (Status.EOK, -1, None)
        assert timed_out.lac_update_timestamp_ms is None

        waiting = connection.send(poll(-1, piggyback=True))
        assert await statuses(connection, add(PLAIN, 1)) == [Status.EOK]
        woken = await waiting
        assert (woken.status, woken.max_lac, woken.entry_id) == (Status.EOK, 0, 0)
        assert read_entry_header(woken.body).entry_id == 0
        assert woken.lac_update_timestamp_ms is not None

        at_once = await connection.send(poll(-1, piggyback=True))
        assert (at_once.entry_id, at_once.lac_update_timestamp_ms) == (0, None)

        plain = connection.send(poll(0))
        await statuses(connection, add(PLAIN, 2))
        assert (await plain).max_lac == 1
        assert read_entry_header((await plain).body).entry_id == 2

        fenced = connection.send(poll(1))
        await connection.send(ReadRequest(PLAIN, LAST_ENTRY, digests(PLAIN).master_key, fence=True))
        assert (await fenced).status is Status.EOK

    on_a_bookie(tmp_path, cluster, body)


def test_ledger_stays_in_memory_while_a_long_poll_of_it_wakes(tmp_path: Path, cluster: Cluster) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        await statuses(connection, add(PLAIN, 0), add(SCOPED, 0))
        await bookie.checkpoint()
        waiting = connection.send(ReadRequest(PLAIN, LAST_ENTRY, previous_lac=0, timeout_ms=50_000))
        storage = bookie.storage
        while not (handle := storage.ledgers.handles[PLAIN]).watchers:
            await asyncio.sleep(0.001)
        handle.wake()  # for no news
        storage.ledgers.config = storage.ledgers.config.with_changes(open_file_limit=0)
        storage._open_ledgers.evict()
        assert list(storage.ledgers.handles) == [PLAIN]
        await asyncio.sleep(0.01)
        await statuses(connection, add(PLAIN, 1), add(PLAIN, 2))
        woken = await waiting
        assert woken.max_lac == 1
        assert woken.lac_update_timestamp_ms is not None, "by the entry, not by its time"

    on_a_bookie(tmp_path, cluster, body)


def test_force_syncs_deferred_adds(tmp_path: Path, cluster: Cluster) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        requests = [add(PLAIN, entry_id, deferred_sync=True) for entry_id in range(20)]
        assert set(await statuses(connection, *requests)) == {Status.EOK}
        assert await statuses(connection, ForceLedgerRequest(PLAIN)) == [Status.EOK]
        with JournalReader.open(sorted(bookie.storage.journal_directories[0].glob("*.txn"))[-1]) as journal:
            assert sum(record.entry_id >= 0 for record in journal.records()) == 20

    on_a_bookie(tmp_path, cluster, body)


def test_list_of_entries_and_disk_sizes(tmp_path: Path, cluster: Cluster) -> None:
    ids = [0, 1, 2, 7, 1023, 1024, 5000]

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        for ledger in LEDGERS:
            await statuses(connection, *(add(ledger, entry_id) for entry_id in ids))
            for _ in range(2):
                response = await connection.send(ListEntriesRequest(ledger))
                assert list(Availability.parse(response.availability)) == ids
                await bookie.checkpoint()
        info = await connection.send(BookieInfoRequest(3))
        usage = Files().disk_usage(tmp_path)
        assert info.total_disk_capacity == usage.total
        assert 0 < info.free_disk_space <= usage.total
        partly = await connection.send(BookieInfoRequest(2))
        assert partly.total_disk_capacity is None

    on_a_bookie(tmp_path, cluster, body)


def test_rare_requests_have_latencies_of_their_own(tmp_path: Path, cluster: Cluster) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        ledger, key = LEDGERS[-1], digests(LEDGERS[-1]).master_key
        absent = LedgerId(0, 999)
        await statuses(connection, *(add(ledger, entry_id) for entry_id in range(3)))
        poll = ReadRequest(ledger, 0, previous_lac=-1, timeout_ms=60_000)

        def counts() -> dict[str, tuple[int, int]]:
            return {name: (each.success.count, each.failure.count) for name, each in bookie.metrics.requests.items()}

        before = counts()
        answers = await statuses(
            connection, ReadLacRequest(ledger), ReadLacRequest(absent), ForceLedgerRequest(ledger),
            ListEntriesRequest(ledger), ListEntriesRequest(absent), BookieInfoRequest(2), poll,
            ReadRequest(ledger, 0, fence=True, master_key=key), ReadRequest(ledger, 0),
        )  # fmt: skip
        assert answers.count(Status.EOK) == 7
        after = counts()
        assert {name: (after[name][0] - before[name][0], after[name][1] - before[name][1]) for name in after} == {
            "READ_ENTRY_FENCE": (1, 0),
            "READ_ENTRY_LONG_POLL": (1, 0),
            "WRITE_LAC": (0, 0),
            "READ_LAC": (1, 1),
            "FORCE_LEDGER": (1, 0),
            "GET_LIST_OF_ENTRIES_OF_LEDGER": (1, 1),
            "GET_BOOKIE_INFO": (1, 0),
        }

    on_a_bookie(tmp_path, cluster, body)


def test_batch_read_keeps_count_and_size(tmp_path: Path, cluster: Cluster) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        await statuses(connection, *(add(PLAIN, entry_id) for entry_id in [*range(10), 11]))
        size = len(add(PLAIN, 0).body)

        async def read(entry_id: int, count: int, size_max: int = 1 << 20) -> list[int]:
            response = await connection.send(BatchReadRequest(PLAIN, entry_id, 1, count, size_max))
            assert response.status is Status.EOK
            return [read_entry_header(each).entry_id for each in response.bodies]

        assert await read(0, 3) == [0, 1, 2]
        assert await read(8, 10) == [8, 9]
        assert await read(0, 0) == list(range(10))
        assert await read(2, 10, 1) == [2]
        assert await read(2, 10, 36 + 2 * (size + 4)) == [2, 3]
        (status,) = await statuses(connection, BatchReadRequest(PLAIN, 10, 2, 3, 1000))
        assert status is Status.ENOENTRY

    on_a_bookie(tmp_path, cluster, body, Protocol.V2)


@pytest.mark.parametrize("storage", [SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"])
def test_batch_read_of_entries_in_memory_and_in_files_cuts_where_apaches_does(
    tmp_path: Path, cluster: Cluster, storage: str
) -> None:
    by = digests(PLAIN)
    payloads = [bytes(1 + 37 * entry_id % 900) for entry_id in range(700)]
    bodies = [by.seal(entry_id, -1, 0, payload) + payload for entry_id, payload in enumerate(payloads)]

    def expected(first: int, count: int, size_max: int) -> int:
        """Return how many entries BatchedReadEntryProcessor answers with."""
        size = 36 + len(bodies[first]) + 4
        count = min(count, 700 - first, 1 + max(0, size_max - size) // (len(bodies[first]) + 4))
        found = 1
        while found < count and (size := size + len(bodies[first + found]) + 4) <= size_max:
            found += 1
        return found

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        for half in range(0, 700, 350):
            adds = [AddRequest(PLAIN, number, by.master_key, bodies[number]) for number in range(half, half + 350)]
            assert set(await statuses(connection, *adds)) == {Status.EOK}
            for first in (0, 3, 298, 340, 349, 360, 699):
                for count, size_max in ((1, 1 << 20), (100, 1 << 20), (700, 1 << 20), (700, 9000), (300, 100_000)):
                    if first >= half + 350:
                        continue
                    response = await connection.send(BatchReadRequest(PLAIN, first, 1, count, size_max))
                    wanted = min(expected(first, count, size_max), half + 350 - first)
                    assert [bytes(each) for each in response.bodies] == bodies[first : first + wanted]
            await bookie.checkpoint()

    on_a_bookie(tmp_path, cluster, body, Protocol.V2, ledger_storage_class=storage)


def test_restart_after_stop_or_kill_restores_every_ledger(tmp_path: Path, cluster: Cluster) -> None:
    async def write(bookie: Bookie, connection: BookieConnection) -> None:
        for ledger in LEDGERS:
            await statuses(connection, *(add(ledger, entry_id) for entry_id in range(2000)))

    async def read(bookie: Bookie, connection: BookieConnection) -> None:
        for ledger in LEDGERS:
            for entry_id in (0, 1023, 1024, 1999):
                response = await connection.send(ReadRequest(ledger, entry_id))
                assert response.body == add(ledger, entry_id).body

    on_a_bookie(tmp_path, cluster, write, log_size_limit=50_000)
    for _ in range(2):
        on_a_bookie(tmp_path, cluster, read)


def test_clean_stop_leaves_only_files_that_apaches_bookie_reads(tmp_path: Path, cluster: Cluster) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        await statuses(connection, *(add(ledger, 0) for ledger in LEDGERS))

    journal, ledgers = tmp_path / "journal" / "current", tmp_path / "ledgers" / "current"
    for round_number in range(2):
        on_a_bookie(tmp_path, cluster, body)
        versions = {}
        for path in journal.glob("*.txn"):
            with JournalReader.open(path) as reader:
                versions[reader.journal_id] = (reader.version, list(reader.records()))
        assert {version for version, _ in versions.values()} == {6}
        newest = max(versions)
        assert versions[newest] == (6, [])
        assert read_last_mark([ledgers]) == LogMark(newest, 512)
        aside = list((journal / "scoped").glob("*.txn"))
        assert len(aside) == 1 + round_number
        for path in aside:
            with JournalReader.open(path) as reader:
                assert reader.version == 7
        assert not (ledgers / "DIRTY").exists()
        assert cluster.bookies.list(include_down=False) == []


def test_bookie_without_scoped_ledgers_leaves_version_6_and_nothing_of_ours(tmp_path: Path, cluster: Cluster) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        await statuses(connection, add(PLAIN, 0))
        assert (tmp_path / "ledgers" / "current" / "DIRTY").exists()

    on_a_bookie(tmp_path, cluster, body)
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    (journal_name,) = {name for name in names if name.endswith(".txn")}
    assert {name for name in names if not name.startswith("metadata")} == {
        "journal/current/VERSION",
        journal_name,
        "ledgers/current/VERSION",
        "ledgers/current/lastMark",
        "ledgers/current/lastId",
        "ledgers/current/0.log",
        "ledgers/current/0/5/5.idx",
    }


def test_registration_has_addresses_and_ledger_scopes(tmp_path: Path, cluster: Cluster) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        (found,) = await asyncio.to_thread(cluster.bookies.list)
        assert (found.bookie_id, found.state, found.ledger_scopes) == (bookie.bookie_id, "rw", True)
        assert found.address == bookie.address
        assert found.info is not None
        assert [each.protocol for each in found.info.endpoints] == ["bookie-rpc"]

    on_a_bookie(tmp_path, cluster, body, bookie_id="bookie-of-mine")
    (stopped,) = cluster.bookies.list()
    assert stopped.state == "down"


class FullDisks(Files):
    """Disks that are as full as the test says."""

    used = 0.5

    def disk_usage(self, path: Path) -> DiskUsage:
        return DiskUsage(1 << 40, int((1 - self.used) * (1 << 40)), 1)


def test_full_disks_make_a_bookie_read_only_until_there_is_space(tmp_path: Path, cluster: Cluster) -> None:
    disks = FullDisks()

    async def until(state: str) -> None:
        while [each.state for each in await asyncio.to_thread(cluster.bookies.list)] != [state]:
            await asyncio.sleep(0.01)

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        assert await statuses(connection, add(PLAIN, 0)) == [Status.EOK]
        disks.used = 0.97
        await until("ro")
        lac = WriteLacRequest(PLAIN, 0, digests(PLAIN).master_key, digests(PLAIN).seal_lac(0))
        assert await statuses(connection, add(PLAIN, 1), lac, ReadRequest(PLAIN, 0)) == [
            Status.EREADONLY,
            Status.EREADONLY,
            Status.EOK,
        ]
        high = add(PLAIN, 1, recovery_add=True, high_priority=True)
        assert await statuses(connection, high) == [Status.EOK]
        disks.used = 0.93
        await asyncio.sleep(0.05)
        assert bookie.read_only, "not before the low-water mark"
        disks.used = 0.5
        await until("rw")
        assert await statuses(connection, add(PLAIN, 2)) == [Status.EOK]

    on_a_bookie(
        tmp_path, cluster, body, files=disks,
        disk_usage_threshold=0.95, disk_usage_lwm_threshold=0.90, disk_check_interval=5,
    )  # fmt: skip


def test_cookies_keep_a_bookie_to_its_directories(tmp_path: Path, cluster: Cluster) -> None:
    async def nothing(bookie: Bookie, connection: BookieConnection) -> None:
        assert (tmp_path / "journal" / "current" / "VERSION").read_bytes() == (
            tmp_path / "ledgers" / "current" / "VERSION"
        ).read_bytes()

    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(CookieMismatch, match=match):
            on_a_bookie(tmp_path, cluster, nothing, **{"bookie_id": "one", **changes})

    on_a_bookie(tmp_path, cluster, nothing, bookie_id="one")
    on_a_bookie(tmp_path, cluster, nothing, bookie_id="one")
    refused("bookie id is 'two', the cookie has 'one'", bookie_id="two")
    more = (str(tmp_path / "ledgers"), str(tmp_path / "more"))
    refused("ledger directories", ledger_directories=more)
    assert not (tmp_path / "more").exists(), "a place whose disk may not be mounted"
    before = cluster.cookies.read("one")
    assert before is not None
    on_a_bookie(tmp_path, cluster, nothing, bookie_id="one", ledger_directories=more, allow_storage_expansion=True)
    # A crash before the store's cookie was written: the next start writes it.
    cluster.cookies.write("one", before.value, before.version + 1)
    on_a_bookie(tmp_path, cluster, nothing, bookie_id="one", ledger_directories=more, allow_storage_expansion=True)
    on_a_bookie(tmp_path, cluster, nothing, bookie_id="one", ledger_directories=more)
    (tmp_path / "more" / "current" / "VERSION").unlink()
    refused("has no cookie: its data is lost", ledger_directories=more)
    (tmp_path / "more" / "current").rename(tmp_path / "away")
    refused("has no cookie: its data is lost", ledger_directories=more)
    assert not (tmp_path / "more" / "current").exists()
    cluster.cookies.remove("one", None)
    file = tmp_path / "journal" / "current" / "VERSION"
    refused(f"metadata store has no cookie.*'bkctl cookie create one {file}'; else", ledger_directories=more)


@pytest.mark.parametrize("ledger", LEDGERS, ids=str)
@pytest.mark.parametrize("storage", [SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"])
def test_bookie_takes_more_directories_only_if_it_still_finds_its_ledgers(
    tmp_path: Path, cluster: Cluster, storage: str, ledger: LedgerId
) -> None:
    def start(names: str, *requests: Any, allow_storage_expansion: bool = True) -> None:
        async def body(bookie: Bookie, connection: BookieConnection) -> None:
            assert set(await statuses(connection, *requests)) <= {Status.EOK}

        on_a_bookie(
            tmp_path, cluster, body, bookie_id="one", ledger_storage_class=storage,
            ledger_directories=tuple(str(tmp_path / name) for name in names),
            allow_storage_expansion=allow_storage_expansion,
        )  # fmt: skip

    def refused(names: str) -> None:
        with pytest.raises(CookieMismatch, match=r"current/(scoped-)?ledgers has ledgers"):
            start(names)

    ledgers = [LedgerId(ledger.scope_id, ledger.ledger_id + number) for number in range(6)]
    reads = [ReadRequest(each, 0) for each in ledgers]
    start("a")
    start("ab")  # it has no ledgers yet
    start("ab", *(add(each, 0) for each in ledgers))
    if storage == DB:
        refused("abc")
        refused("ba")
        assert not (tmp_path / "c" / "current" / "VERSION").exists()
    else:
        start("abc", *reads)
        start("bca", *reads)
    start("ab" if storage == DB else "abc", *reads, allow_storage_expansion=False)


def test_two_bookies_never_share_a_directory(tmp_path: Path, cluster: Cluster) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        other = Bookie(config_for(tmp_path, bookie_port=0, bookie_id="other"), cluster=cluster)
        with pytest.raises(DirectoryInUse, match=str(tmp_path)):
            await other.start()
        assert await statuses(connection, add(PLAIN, 0)) == [Status.EOK]
        assert [each.state for each in await asyncio.to_thread(cluster.bookies.list)] == ["rw"]

    on_a_bookie(tmp_path, cluster, body)


def test_start_that_is_cancelled_holds_the_directories_until_its_thread_ended(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        bookie = Bookie(config_for(tmp_path), cluster=cluster)
        is_opening, may_open = threading.Event(), threading.Event()
        open_storage = bookie.storage.open

        def open_later() -> None:
            is_opening.set()
            assert may_open.wait(LIMIT_S)
            open_storage()

        monkeypatch.setattr(bookie.storage, "open", open_later)
        starting = asyncio.ensure_future(bookie.start())
        try:
            assert await asyncio.to_thread(is_opening.wait, LIMIT_S)
            starting.cancel()
            await asyncio.wait([starting], timeout=0.1)
            with pytest.raises(DirectoryInUse):
                await Bookie(config_for(tmp_path), cluster=cluster).start()
        finally:
            may_open.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not bookie.storage_is_open
        async with serving(config_for(tmp_path), cluster):
            pass

    asyncio.run(run())


def test_start_that_is_cancelled_closes_the_cluster_that_a_thread_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_opening, may_open = threading.Event(), threading.Event()
    closed: list[None] = []

    def open_later(*_: object, **__: object) -> Any:
        is_opening.set()
        assert may_open.wait(LIMIT_S)
        return SimpleNamespace(close=lambda: closed.append(None))

    monkeypatch.setattr("bkctl.bookie.bookie.open_cluster", open_later)

    async def run() -> None:
        starting = asyncio.ensure_future(Bookie(config_for(tmp_path, metadata_service_uri="sqlite://x")).start())
        try:
            assert await asyncio.to_thread(is_opening.wait, LIMIT_S)
            starting.cancel()
            await asyncio.wait([starting], timeout=0.1)
        finally:
            may_open.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert closed == [None]

    asyncio.run(run())


def test_unsupported_settings_are_refused_at_the_start(tmp_path: Path, cluster: Cluster) -> None:
    async def nothing(bookie: Bookie, connection: BookieConnection) -> None:
        pytest.fail("it started")

    with pytest.raises(UsageError, match="loopback"):
        on_a_bookie(tmp_path, cluster, nothing, allow_loopback=False)
    with pytest.raises(UsageError, match="no-such-host"):
        on_a_bookie(tmp_path, cluster, nothing, advertised_address="no-such-host.invalid")
    tls = "org.apache.bookkeeper.tls.TLSContextFactory"
    with pytest.raises(Unsupported, match="JKS"):
        on_a_bookie(tmp_path, cluster, nothing, tls_provider_factory_class=tls)
    provider = "org.apache.bookkeeper.sasl.SASLBookieAuthProviderFactory"
    with pytest.raises(Unsupported, match="no authentication of its own"):
        on_a_bookie(tmp_path, cluster, nothing, bookie_auth_provider_factory_class=provider)
    with pytest.raises(UsageError, match="tlsRequired needs tlsProviderFactoryClass"):
        on_a_bookie(tmp_path, cluster, nothing, tls_required=True)
    with pytest.raises(UsageError, match="may not start this bookie: permittedStartupUsers are nobody-here"):
        on_a_bookie(tmp_path, cluster, nothing, permitted_startup_users=("nobody-here",))
    assert not list(tmp_path.glob("journal"))


def test_taken_port_is_reported(tmp_path: Path, cluster: Cluster) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        config = config_for(tmp_path / "second", bookie_port=bookie.address[1], bookie_id="second")
        with pytest.raises(BkctlError, match="cannot listen on port"):
            await Bookie(config, cluster=cluster).start()
        assert not (tmp_path / "second").exists()

    on_a_bookie(tmp_path, cluster, body)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("storage", [SORTED, INTERLEAVED, DB])
def test_start_of_a_registered_bookie_changes_nothing(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, storage: str, read_only: bool
) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        assert set(await statuses(connection, add(PLAIN, 0), add(SCOPED, 0))) == {Status.EOK}

    config = config_for(tmp_path / "bookie", ledger_storage_class=storage)
    on_a_bookie(tmp_path / "bookie", cluster, body, ledger_storage_class=storage)
    before = tree(tmp_path / "bookie")
    ephemeral = SqliteStore.ephemeral
    monkeypatch.setattr(
        SqliteStore, "ephemeral", lambda *args, **more: ephemeral(*args, **{**more, "wait_s": more["wait_s"] or 0})
    )
    with open_cluster(cluster.uri) as other:
        bookie_id = cluster.cookies.list()[0]
        other.bookies.register(bookie_id, BookieServiceInfo(), read_only)
        with pytest.raises(AlreadyExists, match="registered by another process"):
            asyncio.run(Bookie(config, cluster=cluster).start())
        assert tree(tmp_path / "bookie") == before
        assert [each.bookie_id for each in cluster.bookies.list(include_down=False)] == [bookie_id]
    on_a_bookie(tmp_path / "bookie", cluster, body, ledger_storage_class=storage)


def test_bookie_spreads_over_several_journals_and_ledger_directories(tmp_path: Path, cluster: Cluster) -> None:
    directories: dict[str, Any] = {
        "journal_directories": tuple(str(tmp_path / f"j{number}") for number in range(3)),
        "ledger_directories": tuple(str(tmp_path / f"l{number}") for number in range(2)),
        "index_directories": (str(tmp_path / "index"),),
    }
    ledgers = [LedgerId(0, number) for number in range(6)] + [LedgerId(1, 1), LedgerId(1, 2)]

    async def write(bookie: Bookie, connection: BookieConnection) -> None:
        assert set(await statuses(connection, *(add(each, 0) for each in ledgers))) == {Status.EOK}
        for number in range(3):
            found = set()
            for path in (tmp_path / f"j{number}" / "current").glob("*.txn"):
                with JournalReader.open(path) as reader:
                    found |= {record.ledger for record in reader.records()}
            assert found == {each for each in ledgers if each.value % 3 == number}

    async def read(bookie: Bookie, connection: BookieConnection) -> None:
        assert set(await statuses(connection, *(ReadRequest(each, 0) for each in ledgers))) == {Status.EOK}

    on_a_bookie(tmp_path, cluster, write, **directories)
    on_a_bookie(tmp_path, cluster, read, **directories)
    assert {path.name for path in (tmp_path / "l0" / "current").glob("lastMark*")} == {
        "lastMark.0",
        "lastMark.1",
        "lastMark.2",
    }


async def test_bookie_serves_tls_with_pem_files(tmp_path: Path, cluster: Cluster) -> None:
    import datetime
    import ssl

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bookie")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
    certificate = builder.not_valid_after(now + datetime.timedelta(days=1)).sign(key, hashes.SHA256())
    plain = serialization.NoEncryption()
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    )
    (tmp_path / "certificate.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    config = config_for(
        tmp_path,
        tls_provider_factory_class="org.apache.bookkeeper.tls.TLSContextFactory",
        tls_key_store_type="PEM",
        tls_key_store=str(tmp_path / "key.pem"),
        tls_certificate_path=str(tmp_path / "certificate.pem"),
    )
    async with serving(config, cluster) as bookie:
        context = ssl.create_default_context(cafile=str(tmp_path / "certificate.pem"))
        context.check_hostname = False
        connection = await BookieConnection.open(*bookie.address, bookie_id=bookie.bookie_id, tls=context)
        assert await statuses(connection, add(PLAIN, 0), ReadRequest(PLAIN, 0)) == [Status.EOK, Status.EOK]
        connection.close()
        await connection.wait_closed()
