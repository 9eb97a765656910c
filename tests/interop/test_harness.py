"""The servers of the test harness themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.servers import ApacheCluster, Java, read_ledgers


def test_three_storage_classes_serve_one_cluster_and_come_back_after_a_kill(
    apache_cluster: ApacheCluster, java: Java
) -> None:
    assert len({bookie.storage for bookie in apache_cluster.bookies}) == 3
    victim = apache_cluster.bookies[0]
    victim.kill()
    assert not victim.running
    victim.start()
    listed = java.shell(victim, "listbookies", "-rw", check=True).stdout
    assert all(f"127.0.0.1:{bookie.port}" in listed for bookie in apache_cluster.bookies)


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def test_the_java_programs_agree_on_the_known_ledgers(
    apache_cluster: ApacheCluster, apache_ledgers: list[dict[str, Any]], java: Java
) -> None:
    there = [ledger for ledger in apache_ledgers if not ledger["deleted"]]
    for protocol in ("v2", "v3"):
        if protocol == "v3":
            # Bookies that were started again have forgotten an explicit LAC when asked first (FileInfo.getExplicitLac).
            confirmed = [ledger for ledger in there if ledger["explicitLac"] is not None]
            read_ledgers(java, apache_cluster.metadata_uri, protocol, confirmed)
        found = read_ledgers(java, apache_cluster.metadata_uri, protocol, there)
        for expected, ledger in zip(there, found, strict=True):
            last = expected["lastAddConfirmed"]
            if protocol == "v3" and expected["explicitLac"] is not None:
                last = expected["explicitLac"]
            entries = [without(entry, "lastAddConfirmed") for entry in expected["entries"][: last + 1]]
            names = {"name", "protocol", "explicitLac", "deleted"}
            assert ledger == without(expected, *names) | {"entries": entries, "lastAddConfirmed": last}


@pytest.mark.parametrize("protocol", ["v2", "v3"])
def test_the_round_trip_program_passes_on_apaches_bookies(
    apache_cluster: ApacheCluster, java: Java, protocol: str
) -> None:
    lines = java.run_source("Roundtrip.java", apache_cluster.metadata_uri, protocol).stdout.splitlines()
    steps = {json.loads(line)["step"] for line in lines}
    assert {"write, close, read", "recovery", "fencing", "delete"} <= steps
    assert ("long poll" in steps) == (protocol == "v3")


@pytest.mark.parametrize("protocol", ["v2", "v3"])
def test_the_benchmark_program_counts_what_it_adds_and_reads(
    apache_cluster: ApacheCluster, java: Java, protocol: str
) -> None:
    uri = apache_cluster.metadata_uri
    added = json.loads(java.run("Bench", uri, protocol, "add", 1000, 100, 3, 2, 2).stdout)
    read = json.loads(java.run("Bench", uri, protocol, "read", added["ledgerId"]).stdout)
    assert added["entries"] == read["entries"] == 1000
