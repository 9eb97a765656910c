"""Recover and decommission beside Apache's: bookies of Apache's and of ours, ledgers of scope 0 and of scopes."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import servers
from support.command_line import CommandLine
from support.own_cluster import OwnCluster
from support.servers import DB, INTERLEAVED, SORTED, ApacheCluster, Java, ZooKeeperServer

from bkctl.client.ledger import BookKeeper
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.protocol.connection import run

HTTP = {"httpServerEnabled": "true", "httpServerHost": "127.0.0.1", "httpServerPort": "0"}
#: Ensemble size, write quorum, whether it is closed, entries.
SHAPES = ((3, 2, True, 40), (2, 2, True, 25), (3, 3, True, 10), (3, 2, True, 0), (3, 2, False, 20))


@pytest.fixture
def cluster(java: Java, zookeeper: ZooKeeperServer, tmp_path: Path) -> Iterator[ApacheCluster]:
    """Four bookies of Apache's without a ledger: the tests recover all of a bookie's, and decommission one."""
    storages = (SORTED, INTERLEAVED, DB, SORTED)
    found = ApacheCluster(java, zookeeper, tmp_path / "four", root=zookeeper.new_root(), storages=storages)
    try:
        found.start()
        yield found
    finally:
        found.stop()


def write(
    cluster: Cluster, bookies: Iterable[str], shapes: Iterable[tuple[int, int, bool, int]], scope: int = 0
) -> list[LedgerId]:
    """Ledgers of these shapes whose ensembles begin on `bookies` alone."""

    async def work() -> list[LedgerId]:
        found = []
        async with BookKeeper(cluster, only=list(bookies)) as client:
            for ensemble_size, write_quorum_size, closed, count in shapes:
                shape = {
                    "ensemble_size": ensemble_size, "write_quorum_size": write_quorum_size,
                    "ack_quorum_size": write_quorum_size, "password": b"secret",
                }  # fmt: skip
                if scope:
                    writer = await client.create_ledger_adv(ledger_scope_id=scope, **shape)
                else:
                    writer = await client.create_ledger(**shape)
                for number in range(count):
                    writer.add(b"%d" % number * 10)
                await writer.flush()
                if closed:
                    await writer.close()
                found.append(writer.ledger)
        return found

    return run(work())


def masked(metadata: LedgerMetadata, gone: str, was_closed: bool) -> tuple[Any, ...]:
    """Return the fields that two recoveries must agree on: all but the new bookie and its place.

    Of a ledger that was open, entries after the last add confirmed are added again, and the first of these to meet the
    lost bookie begins a fragment. Which one that is depends on when the writer's acknowledgements came.
    """
    first_entry_ids = [each.first_entry_id for each in metadata.ensembles]
    assert first_entry_ids[0] == 0
    assert first_entry_ids == sorted(set(first_entry_ids))
    assert first_entry_ids[-1] <= max(metadata.last_entry_id, 0)
    fragments = {(len(set(each.bookies)), gone in each.bookies) for each in metadata.ensembles}
    return (
        first_entry_ids if was_closed else None,
        metadata.state, metadata.last_entry_id, metadata.length, metadata.ensemble_size, metadata.write_quorum_size,
        metadata.ack_quorum_size, metadata.digest_type, metadata.password, metadata.format_version, fragments,
    )  # fmt: skip


def verified(bkctl: CommandLine, ledgers: Iterable[LedgerId]) -> None:
    """Every replica of every entry is there."""
    answer = bkctl("ledger", "verify", *ledgers)
    assert answer.code == 0, answer.out.decode() + answer.err


def test_recover_moves_the_same_fragments_as_apaches(cluster: ApacheCluster, java: Java) -> None:
    lost, *others = cluster.bookies
    bkctl = CommandLine(cluster.metadata_uri)
    with open_cluster(cluster.metadata_uri) as opened:
        # The same twice: one half for each.
        on_it = [lost.bookie_id, others[0].bookie_id, others[1].bookie_id]
        theirs, ours = [], []
        for ensemble_size, *shape in SHAPES:
            for half in (theirs, ours):
                half += write(opened, on_it[:ensemble_size], [(ensemble_size, *shape)])  # type: ignore[list-item]
        lost.stop()
        servers.wait_for(lambda: opened.bookies.get(lost.bookie_id).state == "down", "the registration is gone")  # type: ignore[union-attr]
        queried = bkctl("bookies", "recover", lost.bookie_id, "--query", "-o", "ndjson").rows
        assert [int(row["ledgerId"]) for row in queried] == [each.ledger_id for each in sorted(theirs + ours)]
        planned = bkctl("bookies", "recover", lost.bookie_id, "--dry-run", "-o", "ndjson").rows
        assert [row["closesLedger"] for row in planned] == [not closed for _, _, closed, _ in SHAPES for _ in "12"]
        assert all(lost.bookie_id not in row["newEnsemble"] for row in planned)
        options = [word for ledger in ours for word in ("--ledger", ledger)]
        done = bkctl("bookies", "recover", lost.bookie_id, "--yes", *options, "-o", "ndjson").rows
        assert {row["outcome"] for row in done} == {"moved"}
        java.shell(others[0], "recover", "-force", lost.bookie_id)  # all that is left there
        found = [
            [
                masked(opened.ledgers.read(each).metadata, lost.bookie_id, closed)
                for each, (_, _, closed, _) in zip(half, SHAPES, strict=True)
            ]
            for half in (theirs, ours)
        ]
        assert found[1] == found[0]
        assert all(fragments == {(shape[0], False)} for (*_, fragments), shape in zip(found[0], SHAPES, strict=True))
        assert bkctl("bookies", "recover", lost.bookie_id, "--query", "-o", "id").ids == []
        verified(bkctl, theirs + ours)
    password = base64.b64encode(b"secret").decode()
    wanted = [{"ledgerId": str(each.ledger_id), "digestType": "CRC32C", "password": password} for each in ours]
    read = servers.read_ledgers(java, cluster.metadata_uri, "v3", wanted)
    assert [each["ledgerId"] for each in read] == [each["ledgerId"] for each in wanted]
    assert [len(each["entries"]) for each in read] == [count for *_, count in SHAPES]


def test_a_decommission_that_cannot_be_finished_names_why_and_succeeds_later(cluster: ApacheCluster) -> None:
    lost, other, *rest = cluster.bookies
    bkctl = CommandLine(cluster.metadata_uri)
    with open_cluster(cluster.metadata_uri) as opened:
        # Two bookies are left, and one of them can join.
        write(opened, [lost.bookie_id, rest[0].bookie_id], [(2, 2, True, 25), (2, 2, False, 20)])
        [bad] = write(opened, [lost.bookie_id, other.bookie_id], [(2, 2, True, 12)])
        risks = bkctl("bookies", "ok-to-stop", lost.bookie_id, other.bookie_id, "--min-replicas", "1", "-o", "ndjson")
        assert risks.code == 3
        assert f'"ledgerId":"{bad}"' in risks.out.decode()
        refused = bkctl("bookies", "decommission", lost.bookie_id, "--yes")
        assert refused.code == 3
        assert "is registered" in refused.out.decode()
        for bookie in (lost, other):
            bookie.stop()
            servers.wait_for(lambda bookie=bookie: opened.bookies.get(bookie.bookie_id).state == "down", "it is down")  # type: ignore[misc, union-attr]
        for options in (("--dry-run",), ("--yes",)):
            answer = bkctl("bookies", "decommission", lost.bookie_id, *options, "-o", "ndjson")
            assert answer.code == 3
            [named] = [row for row in map(_parsed, answer.out.splitlines()) if row.get("unreadableEntries")]
            assert named["ledgerId"] == str(bad)
            assert named["unreadableEntries"] == [{"firstEntryId": 0, "lastEntryId": 11, "entryCount": 12}]
            assert "entries 0-11" in named["message"]
            assert lost.bookie_id in opened.cookies.list()
        assert bkctl("bookies", "recover", lost.bookie_id, "--query", "-o", "id").ids == [str(bad)]
        other.start()
        servers.wait_for(lambda: opened.bookies.get(other.bookie_id).state == "rw", "it is back")  # type: ignore[union-attr]
        rows = bkctl("bookies", "decommission", lost.bookie_id, "--yes", "-o", "ndjson").rows
        assert [row["result"] for row in rows if row["step"] in ("ledger", "cookie")] == ["moved", "deleted"]
        assert lost.bookie_id not in opened.cookies.list()
        ids = list(opened.ledgers.ledgers(None))
        verified(bkctl, ids)


def _parsed(line: bytes) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads(line)
    return found


def test_our_bookies_give_up_scoped_ledgers_too(own_cluster: Callable[..., OwnCluster], tmp_path: Path) -> None:
    cluster = own_cluster((SORTED, DB, INTERLEAVED, SORTED), HTTP)
    cluster.ensure_up()
    bkctl = CommandLine(cluster.metadata_uri)
    first, second, third, fourth = (each.bookie_id for each in cluster.bookies)
    with open_cluster(cluster.metadata_uri) as opened:
        ledgers = [
            ledger for scope in (0, 7, 1 << 63) for ledger in write(opened, [first, second, third], SHAPES, scope)
        ]  # fmt: skip
        [bad] = write(opened, [first, fourth], [(2, 2, True, 9)], 7)
        cluster.by_id(first).kill()
        cluster.by_id(fourth).stop()
        for name in (first, fourth):
            servers.wait_for(lambda name=name: opened.bookies.get(name).state == "down", "it is down")  # type: ignore[misc, union-attr]
        resume = tmp_path / "resume"
        partly = bkctl("bookies", "recover", first, "--yes", "--skip-open", "--resume", resume, "-o", "ndjson")
        assert partly.code == 3
        cluster.by_id(fourth).start()
        servers.wait_for(lambda: opened.bookies.get(fourth).state == "rw", "it is back")  # type: ignore[union-attr]
        again = bkctl("bookies", "recover", first, "--yes", "--resume", resume, "-o", "ndjson")
        assert again.code == 0, again.err
        verified(bkctl, [*ledgers, bad])
        rows = bkctl("bookies", "decommission", first, "--yes", "-o", "ndjson").rows
        assert rows[-1]["result"] == "deleted"
        # A serving bookie is emptied without loss.
        drained = bkctl("bookies", "drain", second, "--yes", "-o", "ndjson")
        assert drained.code == 3  # Two bookies are left, and ensembles of three do not fit.
        assert opened.bookies.get(second).state == "ro"  # type: ignore[union-attr]
