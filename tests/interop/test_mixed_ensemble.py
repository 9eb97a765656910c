"""Four bookies, one of them Apache's; then Apache's takes the place of one of ours that has scoped ledgers.

Nothing scoped may reach an Apache bookie: it would acknowledge it as scope 0 and lose it, or fence a ledger of scope 0.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.own_cluster import OwnCluster, WireTap, start_all, tree
from support.servers import SORTED, ApacheBookie, Java, ZooKeeperServer, format_cluster, read_ledgers, wait_for

from bkctl.client.ledger import BookKeeper
from bkctl.client.read_handle import ReadHandle
from bkctl.client.verify import ReplicaState, verify_entries
from bkctl.client.write_handle import WriteHandle
from bkctl.errors import NotEnoughBookies
from bkctl.formats.index import index_path
from bkctl.formats.metadata import LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.protocol.bookkeeper_protocol_pb2 import Request

pytestmark = pytest.mark.releases

SCOPE = 7
FIRST_ID = 2_000_000_000
#: A ledger of scope 0 that is deleted.
DOOMED = LedgerId(0, FIRST_ID - 2)
ENTRY_COUNT = 60
#: The probe that a client sends before its first scoped request.
PROBE = LedgerId(1, (1 << 63) - 1)
SETTINGS = {"gcWaitTime": 1000}


def payload_of(ledger: LedgerId, entry_id: int) -> bytes:
    return f"{entry_id} of {ledger.ledger_id} in {ledger.scope_id} ".encode() * (1 + entry_id % 40)


def requests(tap: WireTap) -> list[tuple[str, LedgerId]]:
    """Operation and ledger of every v3 request that came over the tap; authentication is left out."""
    found = []
    for frame in tap.frames():
        request = Request.FromString(frame)
        for field, value in request.ListFields():
            if field.name not in ("header", "authRequest"):
                scope_id = value.ledgerScopeId if value.HasField("ledgerScopeId") else 0
                found.append((field.name, LedgerId(scope_id % (1 << 64), value.ledgerId % (1 << 64))))
    return found


async def write(client: BookKeeper, ledger: LedgerId, ensemble_size: int) -> WriteHandle:
    """A ledger with ENTRY_COUNT acknowledged entries, not closed."""
    handle = await client.create_ledger_adv(
        ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=b"pw", ensemble_size=ensemble_size,
        write_quorum_size=ensemble_size, ack_quorum_size=ensemble_size,
    )  # fmt: skip
    for entry_id in range(ENTRY_COUNT):
        handle.add(payload_of(ledger, entry_id))
        if entry_id == ENTRY_COUNT - 2:
            await handle.flush()
    await handle.flush()
    return handle


async def check_read(reader: ReadHandle, count: int = ENTRY_COUNT) -> None:
    """The reader has the first `count` entries."""
    assert reader.last_add_confirmed == count - 1, reader.ledger
    found = [entry.payload async for entry in reader.read(0, count - 1)]
    assert found == [payload_of(reader.ledger, entry_id) for entry_id in range(count)]


async def check_replicas(reader: ReadHandle, *unavailable: str) -> None:
    """Every replica is whole, but for those on the bookies that are unavailable for this ledger."""
    async for check in verify_entries(reader):
        for replica in check.replicas:
            down = replica.bookie_id in unavailable
            assert replica.state is (ReplicaState.UNAVAILABLE if down else ReplicaState.OK), replica


class Mixed:
    """Three bookies of ours and Apache's; `replacement` is Apache's on the directories and port of our first."""

    def __init__(self, java: Java, uri: str, directory: Path, make_apache: Callable[..., ApacheBookie]) -> None:
        self.own = OwnCluster(uri, directory, (SORTED, SORTED, SORTED), SETTINGS)
        self.first, *self.others = self.own.bookies
        self.apache = make_apache(uri, SORTED, settings=SETTINGS)
        self.replacement = make_apache(uri, SORTED, port=self.first.port, settings=self.first.settings)

    def scoped_files(self) -> dict[str, bytes]:
        """Everything scoped in the directories of the first bookie."""
        journal, ledgers = self.first.journal_dir / "current", self.first.ledger_dir / "current"
        indexes = tree(*(path for path in ledgers.iterdir() if len(path.name) == 8 and path.is_dir()))
        return tree(journal / "scoped", ledgers / "scoped") | indexes


@pytest.fixture
def mixed(
    java: Java, zookeeper: ZooKeeperServer, tmp_path: Path, apache_bookie: Callable[..., ApacheBookie]
) -> Iterator[Mixed]:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    format_cluster(java, uri, tmp_path)
    four = Mixed(java, uri, tmp_path, apache_bookie)
    start_all([*four.own.bookies, four.apache])
    yield four
    four.own.kill()


def test_an_apache_bookie_in_the_place_of_ours_sees_nothing_scoped(mixed: Mixed, java: Java) -> None:
    uri = mixed.own.metadata_uri
    first_id, apache_id = mixed.first.bookie_id, mixed.apache.bookie_id
    cli = CommandLine(uri)
    scoped: list[LedgerId] = []
    plain: list[LedgerId] = []
    taps: list[WireTap] = []
    files: dict[str, bytes] = {}

    def swap_to_apache() -> None:
        mixed.first.stop()
        files.update(mixed.scoped_files())
        mixed.replacement.start()
        taps.extend(WireTap(bookie.port) for bookie in (mixed.replacement, mixed.apache))

    async def fill(client: BookKeeper) -> None:
        """The same ids in scope 0 on all four, and in ours on two of our three; those with even ids stay open."""
        on_first = [0, 0]
        while min(on_first) < 2:
            ledger_id = FIRST_ID + len(scoped)
            scoped.append(LedgerId(SCOPE, ledger_id))
            plain.append(LedgerId(0, ledger_id))
            for handle in (await write(client, scoped[-1], 2), await write(client, plain[-1], 4)):
                if ledger_id % 2:
                    await handle.close()
                if handle.scope_id:
                    assert apache_id not in handle.metadata.last_fragment.bookies
                    on_first[ledger_id % 2] += first_id in handle.metadata.last_fragment.bookies
        with pytest.raises(NotEnoughBookies, match=f"without ledger scopes: {apache_id}"):
            await client.create_ledger_adv(ledger_scope_id=SCOPE, ensemble_size=4)
        await (await write(client, DOOMED, 4)).close()

    async def write_through_the_swap(client: BookKeeper) -> None:
        """A writer that knew our bookie there continues on other bookies."""
        live = await write(client, LedgerId(SCOPE, 1), 2)
        while first_id not in live.metadata.last_fragment.bookies:
            live = await write(client, LedgerId(SCOPE, live.ledger_id + 1), 2)
        await asyncio.to_thread(swap_to_apache)
        for entry_id in range(ENTRY_COUNT, 2 * ENTRY_COUNT):
            await live.add(payload_of(live.ledger, entry_id))
        assert not {first_id, apache_id} & set(live.metadata.last_fragment.bookies)
        await live.close()
        reader = await client.open_ledger(live.ledger_id, ledger_scope_id=SCOPE, password=b"pw")
        await check_read(reader, 2 * ENTRY_COUNT)

    async def use_scoped(client: BookKeeper, cluster: Cluster) -> None:
        """Reads, recovery, verification, creation."""
        for ledger in scoped:
            before = cluster.ledgers.read(ledger).metadata
            reader = await client.open_ledger(
                ledger.ledger_id, ledger_scope_id=SCOPE, password=b"pw", recovery=not before.is_closed
            )
            await check_read(reader)
            await check_replicas(reader, first_id)
            metadata = cluster.ledgers.read(ledger).metadata
            assert (metadata.state, metadata.last_entry_id) == (LedgerState.CLOSED, ENTRY_COUNT - 1)
            assert metadata.length == sum(len(payload_of(ledger, entry_id)) for entry_id in range(ENTRY_COUNT))
            if before.is_closed:
                assert metadata == before
            else:
                assert not {first_id, apache_id} & set(metadata.last_fragment.bookies)
        handle = await write(client, LedgerId(SCOPE, FIRST_ID - 1), 2)
        assert set(handle.metadata.last_fragment.bookies) == {each.bookie_id for each in mixed.others}
        await handle.close()
        with pytest.raises(NotEnoughBookies, match="without ledger scopes"):
            await client.create_ledger_adv(ledger_scope_id=SCOPE, ensemble_size=3)

    async def before_and_through(cluster: Cluster) -> None:
        async with BookKeeper(cluster) as client:
            await fill(client)
            await write_through_the_swap(client)

    async def after(cluster: Cluster) -> None:
        tapped = dict(zip((first_id, apache_id), (("127.0.0.1", tap.port) for tap in taps), strict=True))
        async with BookKeeper(cluster, addresses=tapped) as client:
            await use_scoped(client, cluster)
        assert set(requests(taps[0])) == {("readLacRequest", PROBE)}
        assert requests(taps[1]) == []

    async def check_scope_0(cluster: Cluster) -> None:
        async with BookKeeper(cluster) as client:
            for ledger in plain:
                reader = await client.open_ledger(ledger.ledger_id, password=b"pw")
                await check_read(reader, ENTRY_COUNT if reader.is_closed else ENTRY_COUNT - 1)
                await check_replicas(reader)

    async def check_back(cluster: Cluster) -> None:
        async with BookKeeper(cluster) as client:
            for ledger in scoped + plain:
                reader = await client.open_ledger(
                    ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=b"pw", recovery=True
                )
                await check_read(reader)
                await check_replicas(reader)

    def run(each: Coroutine[Any, Any, None]) -> None:
        asyncio.run(asyncio.wait_for(each, 300))

    try:
        with open_cluster(uri) as cluster:
            run(before_and_through(cluster))
            listed = {row["bookieId"]: row["ledgerScopes"] for row in cli("bookies", "list", "-o", "ndjson").rows}
            assert listed == {each.bookie_id: True for each in mixed.others} | {first_id: False, apache_id: False}
            run(after(cluster))
            verified = cli("ledger", "verify", *(ledger.qualified_name for ledger in scoped), "-o", "ndjson")
            assert verified.code == 3
            findings = map(json.loads, verified.out.splitlines())
            assert {(row["bookieId"], row["problem"]) for row in findings} == {(first_id, "unavailable")}

            run(check_scope_0(cluster))
            java_reads(java, uri, plain)
            # Apache's bookie collects garbage, and finds none that is scoped.
            doomed = mixed.first.ledger_dir / "current" / index_path(DOOMED)
            assert doomed.exists()
            assert cli("ledger", "delete", DOOMED, "--yes").code == 0
            wait_for(lambda: not doomed.exists(), "a round of garbage collection")
            mixed.replacement.stop()
            assert sum(name.endswith(".idx") for name in files) >= 4
            assert sum(name.endswith(".log") for name in files) == 1
            assert sum(name.endswith(".txn") for name in files) == 1
            assert mixed.scoped_files() == files
            show = ["bookie", "index", "show", *plain, "--meta", "--dir", mixed.first.ledger_dir, "-o", "ndjson"]
            assert {(row["fenced"], row["entryCount"]) for row in cli(*show).rows} == {(False, ENTRY_COUNT)}

            mixed.first.start()
            run(check_back(cluster))
    finally:
        for tap in taps:
            tap.close()


def java_reads(java: Java, uri: str, ledgers: list[LedgerId]) -> None:
    """Java's client reads the scope-0 ledgers as they were written, without recovery."""
    password = base64.b64encode(b"pw").decode()
    asked = [{"ledgerId": str(each.ledger_id), "digestType": "CRC32C", "password": password} for each in ledgers]
    for ledger, found in zip(ledgers, read_ledgers(java, uri, "v3", asked), strict=True):
        assert [entry["sha256"] for entry in found["entries"]] == [
            hashlib.sha256(payload_of(ledger, entry_id)).hexdigest()
            for entry_id in range(ENTRY_COUNT if ledger.ledger_id % 2 else ENTRY_COUNT - 1)
        ]


def test_after_a_crash_apaches_bookie_replays_scope_0_and_refuses_journals_with_scopes(
    java: Java, zookeeper: ZooKeeperServer, tmp_path: Path, apache_bookie: Callable[..., ApacheBookie]
) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    format_cluster(java, uri, tmp_path)
    # Nothing is checkpointed: all that is acknowledged is in the journals.
    own = OwnCluster(uri, tmp_path, (SORTED, SORTED), {"zkTimeout": 4000, "flushInterval": 600_000})
    plain = [LedgerId(0, FIRST_ID + index) for index in range(4)]
    scoped = LedgerId(SCOPE, FIRST_ID)

    def run(body: Callable[[BookKeeper], Coroutine[Any, Any, Any]]) -> Any:
        async def within() -> Any:
            async with BookKeeper(cluster) as client:
                return await asyncio.wait_for(body(client), 300)

        return asyncio.run(within())

    async def fill(client: BookKeeper) -> str:
        for ledger in plain:
            handle = await write(client, ledger, 2)
            if ledger.ledger_id % 2:
                await handle.close()
        recovered = await client.open_ledger(plain[2].ledger_id, password=b"pw", recovery=True)
        assert recovered.last_add_confirmed == ENTRY_COUNT - 1
        return (await write(client, scoped, 1)).metadata.last_fragment.bookies[0]

    async def check(client: BookKeeper) -> None:
        for ledger in (*plain, scoped):
            reader = await client.open_ledger(
                ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=b"pw", recovery=True
            )
            await check_read(reader)
            await check_replicas(reader)

    try:
        start_all(own.bookies)
        with open_cluster(uri) as cluster:
            with_scopes = own.by_id(run(fill))
            (without,) = [bookie for bookie in own.bookies if bookie is not with_scopes]
            own.kill()

            refused = apache_bookie(uri, SORTED, port=with_scopes.port, settings=with_scopes.settings)
            served = apache_bookie(uri, SORTED, port=without.port, settings=without.settings)
            before = tree(with_scopes.journal_dir)
            refused.launch()
            served.start()
            # Apache's process need not end with that, but it does not register.
            wait_for(lambda: "Invalid journal version" in refused.log_tail(0, 1 << 20), "the refusal")
            writable = lambda: {each.bookie_id for each in cluster.bookies.list() if each.state == "rw"}  # noqa: E731
            wait_for(lambda: writable() == {served.bookie_id}, "one registration")
            refused.kill()
            assert tree(with_scopes.journal_dir) == before
            java_reads(java, uri, [ledger for ledger in plain if ledger.ledger_id % 2])
            served.kill()

            start_all(own.bookies)
            run(check)
    finally:
        own.kill()
