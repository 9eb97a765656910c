"""Apache's bookies on our directories and the reverse, after clean stops and kills, under Apache's client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.own_bookies import OwnBookie
from support.own_cluster import STORAGES
from support.servers import ApacheBookie, Java, read_ledgers, wait_for, write_ledgers

from bkctl.metadata.cluster import open_cluster

MakeOwn = Callable[..., OwnBookie]
MakeApache = Callable[..., ApacheBookie]


def start_three(uri: str, own_bookie: MakeOwn) -> list[OwnBookie]:
    bookies = [own_bookie(uri, storage=storage) for storage in STORAGES]
    for bookie in bookies:
        bookie.launch()
    for bookie in bookies:
        bookie.wait_ready()
    return bookies


def expect_all(
    java: Java, uri: str, ledgers: list[dict[str, Any]], protocol: str, *, restarted_apache: bool = False
) -> None:
    """Apache's client reads every ledger, byte for byte as it wrote it.

    `restarted_apache`: Apache's bookie answers its first READ_LAC after a start without looking for an explicit LAC in
    the index file, so an open ledger may seem to end where its entries say.
    """
    there = [ledger for ledger in ledgers if not ledger["deleted"]]
    for expected, found in zip(there, read_ledgers(java, uri, protocol, there), strict=True):
        assert "entries" in found, (expected["name"], found)
        last = expected["lastAddConfirmed"]
        if protocol == "v3" and expected["explicitLac"] is not None:
            last = expected["explicitLac"]
            if restarted_apache:
                last = max(expected["lastAddConfirmed"], found["lastAddConfirmed"])
        assert [without_lac(each) for each in found["entries"]] == [
            without_lac(each) for each in expected["entries"][: last + 1]
        ], expected["name"]
        assert found["state"] == expected["state"]


def without_lac(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry without what recovery may change."""
    return {name: value for name, value in entry.items() if name != "lastAddConfirmed"}


@pytest.mark.java
def test_apaches_bookies_take_over_our_directories_and_ours_take_them_back(
    zookeeper_uri: str, own_bookie: MakeOwn, apache_bookie: MakeApache, java: Java
) -> None:
    ours = start_three(zookeeper_uri, own_bookie)
    first = write_ledgers(java, zookeeper_uri, "v3", small=True)
    for bookie in ours:
        bookie.stop()
        assert not (bookie.ledger_dir / "current" / "DIRTY").exists()
    with open_cluster(zookeeper_uri) as cluster:
        assert {each.state for each in cluster.bookies.list()} == {"down"}

    theirs = [
        apache_bookie(
            zookeeper_uri, str(bookie.settings["ledgerStorageClass"]), port=bookie.port,
            settings={"journalDirectory": bookie.journal_dir, "ledgerDirectories": bookie.ledger_dir},
        )
        for bookie in ours
    ]  # fmt: skip
    for bookie in theirs:
        bookie.launch()
    for bookie in theirs:
        bookie.wait_ready()
    expect_all(java, zookeeper_uri, first, "v2")
    second = write_ledgers(java, zookeeper_uri, "v2", salt=1, small=True)
    theirs[1].stop()
    for bookie in (theirs[0], theirs[2]):
        bookie.kill()  # ours replays what Apache's left in its journal

    for bookie in ours:
        bookie.start()
    expect_all(java, zookeeper_uri, first + second, "v3")

    for bookie in ours:
        bookie.kill()  # and Apache's replays what ours left
    with open_cluster(zookeeper_uri) as cluster:
        # Apache's bookie gives up at the registration of a session that is not over yet.
        wait_for(lambda: not cluster.bookies.list(include_down=False), "the killed bookies' sessions over")
    for bookie in theirs:
        bookie.launch()
    for bookie in theirs:
        bookie.wait_ready()
    expect_all(java, zookeeper_uri, first + second, "v3", restarted_apache=True)
