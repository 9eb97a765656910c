"""Our bookies collect what Apache's client deletes: entry logs shrink, and every replica of the rest stays whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.own_bookies import OwnBookie
from support.own_cluster import STORAGES, OwnCluster, stop_all
from support.servers import Java, read_ledgers, wait_for, write_ledgers

from bkctl.client.ledger import BookKeeper
from bkctl.client.verify import verify_entries
from bkctl.errors import NotFound
from bkctl.files.entry_log import EntryLogReader
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster

COLLECTING: dict[str, object] = {
    "logSizeLimit": 128 * 1024,
    "flushInterval": 300,
    "gcWaitTime": 1000,
    "minorCompactionInterval": 1,
    "majorCompactionInterval": 2,
    "majorCompactionThreshold": "1.0",  # every log with garbage
    "compactionRateByEntries": 1_000_000,
    "gcScopedDeleteRatioMax": "1.0",
}
SCOPED = [LedgerId(7, number) for number in range(1, 7)]
ENTRIES = 40


def entry_logs(bookie: OwnBookie) -> list[Path]:
    current = bookie.ledger_dir / "current"
    return [*current.glob("*.log"), *current.glob("scoped/*.log")]


def ledgers_in_logs(bookie: OwnBookie) -> set[LedgerId]:
    """The ledgers with entries in any log of a bookie that may be running."""
    found: set[LedgerId] = set()
    for path in entry_logs(bookie):
        try:
            with EntryLogReader.open(path) as reader:
                found.update(record.ledger for record in reader.records())
        except NotFound:  # collected just now
            continue
    return found


async def write_ours(uri: str, ledgers: Collection[LedgerId | None], entries: int = ENTRIES) -> list[LedgerId]:
    """Ledgers on all three bookies (None: of scope 0), an entry of each in turn."""
    with open_cluster(uri) as cluster:
        async with BookKeeper(cluster) as client:
            handles = [
                await client.create_ledger_adv(
                    None if each is None else each.ledger_id,
                    ledger_scope_id=0 if each is None else each.scope_id,
                    write_quorum_size=3, ack_quorum_size=3, password=b"pw",
                )
                for each in ledgers
            ]  # fmt: skip
            for entry_id in range(entries):
                await asyncio.gather(
                    *(handle.add(b"%d of ours " % entry_id * 90, entry_id=entry_id) for handle in handles)
                )
            for handle in handles:
                await handle.close()
            return [handle.ledger for handle in handles]


async def check_ours(uri: str, ledgers: Collection[LedgerId]) -> None:
    """Every entry is whole on every bookie that should have it."""
    with open_cluster(uri) as cluster:
        async with BookKeeper(cluster) as client:
            for ledger in ledgers:
                reader = await client.open_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=b"pw")
                assert reader.last_add_confirmed == ENTRIES - 1
                count = 0
                async for check in verify_entries(reader):
                    assert check.ok, f"ledger {ledger}: {check}"
                    count += 1
                assert count == ENTRIES


def check_files(bookie: OwnBookie) -> None:
    answer = CommandLine(None)("bookie", "check", "--conf", bookie.conf, "--digest", "--password", "pw")
    assert answer.code == 0, answer


@pytest.mark.releases
def test_bookies_remove_ledgers_that_javas_client_deleted_and_keep_the_rest(
    java: Java, own_cluster: Callable[..., OwnCluster]
) -> None:
    cluster = own_cluster(STORAGES, COLLECTING)
    uri = cluster.metadata_uri
    cluster.ensure_up()
    written = [one for one in write_ledgers(java, uri, "v3", small=True) if not one["deleted"]]
    ours = asyncio.run(write_ours(uri, [*SCOPED, *[None] * 6]))
    gone, kept = ours[::2], ours[1::2]
    gone_of_java, kept_of_java = written[::2], written[1::2]
    for bookie in cluster.bookies:
        wait_for(lambda: {*ours} <= ledgers_in_logs(bookie), f"{bookie.bookie_id} does not flush")  # noqa: B023
    ids = [int(one["ledgerId"]) for one in gone_of_java] + [each.ledger_id for each in gone if not each.is_scoped]
    java.run("DeleteLedgers", uri, *ids)
    for ledger in gone:
        if ledger.is_scoped:
            answer = CommandLine(uri)("ledger", "delete", ledger, "--yes")
            assert answer.code == 0, answer
    deleted = {*gone, *(LedgerId(0, int(one["ledgerId"])) for one in gone_of_java)}
    # Further adds complete the logs in use, so that no deleted entry is in a log that stays open.
    kept += asyncio.run(write_ours(uri, [*(LedgerId(7, number) for number in range(50, 55)), *[None] * 5]))
    for bookie in cluster.bookies:
        wait_for(lambda: not ledgers_in_logs(bookie) & deleted, f"{bookie.bookie_id} keeps deleted ledgers")  # noqa: B023
        check_files(bookie)

    def check_all() -> None:
        asyncio.run(check_ours(uri, kept))
        answers = read_ledgers(java, uri, "v3", kept_of_java)
        for one, found in zip(kept_of_java, answers, strict=True):
            last = found["lastAddConfirmed"]
            assert found["entries"] == _expected(one, last), one["name"]
            assert last == (one["explicitLac"] if one["explicitLac"] is not None else one["lastAddConfirmed"])

    check_all()
    stop_all(cluster.bookies)
    for bookie in cluster.bookies:
        check_files(bookie)
        assert not list(bookie.ledger_dir.rglob("*.compact*"))
    cluster.ensure_up()
    check_all()


def _expected(one: dict[str, Any], last: int) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in entry.items() if name != "lastAddConfirmed"}
        for entry in one["entries"][: last + 1]
    ]
