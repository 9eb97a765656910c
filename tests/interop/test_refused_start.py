"""A start of ours beside a running bookie of Apache's: refused before a byte on the disks changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.own_bookies import OwnBookie
from support.served_bookies import add, statuses
from support.servers import DB, INTERLEAVED, SORTED, ApacheBookie, Java, ZooKeeperServer, format_cluster, free_port

from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import Protocol, ReadRequest, Request, Status

pytestmark = pytest.mark.java
LEDGER = LedgerId(0, 7)


def ask(bookie: ApacheBookie | OwnBookie, *requests: Request) -> set[Status]:
    async def body() -> set[Status]:
        connection = await BookieConnection.open(
            "127.0.0.1", bookie.port, bookie_id=bookie.bookie_id, protocol=Protocol.V2
        )
        try:
            return set(await statuses(connection, *requests))
        finally:
            connection.close()
            await connection.wait_closed()

    return asyncio.run(body())


# The storage is not opened before the port and the registration are known to be free: each storage is tried once there.
@pytest.mark.parametrize(
    ("storage", "taken"),
    [
        pytest.param(SORTED, "port", id="sorted-port"),
        pytest.param(DB, "registration", id="db-registration"),
        pytest.param(SORTED, "journal", id="sorted-journal"),
        pytest.param(INTERLEAVED, "journal", id="interleaved-journal"),
        pytest.param(DB, "journal", id="db-journal"),
    ],
)
def test_entries_that_apaches_bookie_acknowledges_after_a_refused_start_survive_its_kill(
    java: Java, zookeeper: ZooKeeperServer, tmp_path: Path, storage: str, taken: str
) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    format_cluster(java, uri, tmp_path)
    settings = {"bookieId": "the-bookie", "flushInterval": 3_600_000, "journalFormatVersionToWrite": 6}
    apache = ApacheBookie(java, uri, tmp_path / "apache", storage, settings=settings)
    apache.start()
    try:
        assert ask(apache, *(add(LEDGER, each) for each in range(20))) == {Status.EOK}
        journals = sorted(apache.journal_dir.rglob("*.txn"))
        marks = {path: path.read_bytes() for path in apache.ledger_dir.rglob("lastMark*")}
        ours = OwnBookie(
            uri,
            tmp_path / "ours",
            port=apache.port if taken == "port" else free_port(),
            storage=storage,
            settings={**apache.settings, **settings, "zkTimeout": 2000}
            | ({"bookiePort": free_port()} if taken != "port" else {}),
        )
        if taken == "journal":  # nothing else is left: the registration is lost, and the port another one
            with open_cluster(uri) as cluster:
                cluster.bookies.unregister("the-bookie")
        with pytest.raises(RuntimeError, match="ended"):
            ours.start()
        problems = {
            "port": "cannot listen on port",
            "registration": "is registered by another process",
            "journal": f"is in use by process {apache.pid} (java ",
        }
        assert problems[taken] in ours.log_tail()
        assert sorted(apache.journal_dir.rglob("*.txn")) == journals
        assert {path: path.read_bytes() for path in apache.ledger_dir.rglob("lastMark*")} == marks
        assert ask(apache, *(add(LEDGER, each) for each in range(20, 40))) == {Status.EOK}
        apache.kill()
        apache.start()
        assert ask(apache, *(ReadRequest(LEDGER, each) for each in range(40))) == {Status.EOK}
    finally:
        apache.kill()
