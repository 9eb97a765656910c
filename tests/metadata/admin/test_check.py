"""Findings about the metadata itself, orphans, another bookie in every ensemble, and the health of a cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bkctl.errors import Conflict
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo, Cookie, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.admin.check import check_metadata, impossibilities, orphans, remove_orphans
from bkctl.metadata.admin.health import HealthCheckSwitch, Severity, health_findings
from bkctl.metadata.admin.ledger_changes import replace_bookie
from bkctl.metadata.admin.overview import walk
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.ledgers import SCOPES
from bkctl.metadata.store import NEW
from bkctl.metadata.underreplication import AuditorElection, AutoRecoveryState, LedgerMarks, mark_path

BOOKIES = ("b0:3181", "b1:3181", "b2:3181")
GOOD = LedgerMetadata(
    3, 2, 2, DigestType.CRC32C, b"", (Fragment(0, BOOKIES), Fragment(4, BOOKIES[::-1])), LedgerState.CLOSED, 100, 9
)
INFO = BookieServiceInfo((BookieEndpoint("bookie", 3181, "10.0.0.1", "bookie-rpc"),), {"ledgerScopes": "1"})
SCOPED = LedgerId(7, 5)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with open_cluster(f"sqlite://{tmp_path}/m.db", create=True) as opened:
        for bookie_id in BOOKIES:
            cookie = Cookie(bookie_id, ("/j",), ("/l",), instance_id=opened.instance_id())
            opened.cookies.write(bookie_id, cookie, NEW)
            opened.bookies.register(bookie_id, INFO)
        opened.ledgers.create(LedgerId(0, 5), GOOD)
        opened.ledgers.create(SCOPED, GOOD)
        yield opened


def codes(cluster: Cluster) -> list[tuple[str, LedgerId | None]]:
    return [(finding.code, finding.ledger) for finding in check_metadata(cluster)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ack_quorum_size": 3}, "do not fit"),
        ({"ensembles": ()}, "no ensemble"),
        ({"ensembles": (Fragment(1, BOOKIES),)}, "begins with entry 1"),
        ({"ensembles": (Fragment(0, BOOKIES[:2]),)}, "2 bookies of 3"),
        ({"ensembles": (Fragment(0, (BOOKIES[0], BOOKIES[0], BOOKIES[1])),)}, "twice"),
        ({"ensembles": (Fragment(0, BOOKIES), Fragment(9, BOOKIES), Fragment(4, BOOKIES))}, "follows"),
        ({"last_entry_id": -5, "ensembles": (Fragment(0, BOOKIES),)}, "last entry is -5"),
        ({"last_entry_id": -1, "ensembles": (Fragment(0, BOOKIES),)}, "100 bytes in 0 entries"),
        ({"last_entry_id": 2}, "has an ensemble from entry 4 on"),
    ],
)
def test_contradicting_fields_are_described(change: dict[str, Any], words: str) -> None:
    assert list(impossibilities(GOOD)) == []
    found = list(impossibilities(GOOD._replace(**change)))
    assert any(words in each for each in found), found


def test_an_empty_closed_ledger_and_an_open_one_are_possible() -> None:
    empty = GOOD._replace(ensembles=(Fragment(0, BOOKIES),), length=0, last_entry_id=-1)
    assert list(impossibilities(empty)) == []
    assert list(impossibilities(empty._replace(state=LedgerState.OPEN))) == []
    # A bookie that failed before anything was acknowledged leaves an ensemble behind the end.
    assert list(impossibilities(GOOD._replace(last_entry_id=3))) == []


def test_a_healthy_cluster_has_no_findings(cluster: Cluster) -> None:
    assert codes(cluster) == []
    assert list(orphans(cluster)) == []
    assert list(health_findings(cluster)) == []


def test_unparsable_dangling_and_impossible_metadata_is_found(cluster: Cluster) -> None:
    cluster.store.put(cluster.ledgers.path(LedgerId(0, 5)), b"nonsense", None)
    cluster.ledgers.create(LedgerId(7, 6), GOOD._replace(ensembles=(Fragment(0, ("b0:3181", "b1:3181", "b9:1")),)))
    cluster.ledgers.create(LedgerId(7, 7), GOOD._replace(last_entry_id=2))
    assert codes(cluster) == [
        ("unparsable", LedgerId(0, 5)),
        ("dangling", LedgerId(7, 6)),
        ("impossible", LedgerId(7, 7)),
    ]
    assert [finding.ledger for finding in check_metadata(cluster, 0)] == [LedgerId(0, 5)]


def test_damaged_and_foreign_cookies_and_marks_are_found(cluster: Cluster) -> None:
    cluster.store.put("cookies/b0:3181", b"nonsense", None)
    cluster.store.put("cookies/b1:3181", Cookie("b1:3181", ("/j",), ("/l",), instance_id="other").serialize(), None)
    marks = LedgerMarks(cluster.store)
    marks.add(LedgerId(0, 99), ["b0:3181"])
    assert codes(cluster) == [
        ("unparsable-cookie", None),
        ("cookie-of-another-cluster", None),
        ("orphaned-mark", LedgerId(0, 99)),
    ]
    assert {finding.code for finding in health_findings(cluster)} == {
        "cookie-damaged", "cookie-of-another-cluster", "no-auditor", "no-auditor-of-scopes", "underreplicated",
    }  # fmt: skip


def test_cookies_are_not_of_another_cluster_where_the_cluster_has_no_id(cluster: Cluster) -> None:
    cluster.store.delete("INSTANCEID")
    assert codes(cluster) == []
    assert {finding.code for finding in health_findings(cluster)} == {"no-instance-id"}


def test_nodes_without_a_valid_name_are_findings_and_stop_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = ("available", "available/readonly", "cookies", "ledgers", "underreplication/ledgers", "x")
    with monkeypatch.context() as unchecked:
        unchecked.setattr("bkctl.metadata.store._UNPRINTABLE", re.compile("(?!)"))
        for directory in directories:
            cluster.store.put(f"{directory}/evil\n", b"", NEW)
        cluster.store.put("\x1b", b"", NEW)
        cluster.store.put("ledgers/\x1b", b"", NEW)
    for name in ("available/a b", "available/readonly/a b"):  # a path, but not a bookie id
        cluster.store.put(name, b"", NEW)
    found = list(check_metadata(cluster))
    names = ["\x1b", "ledgers/\x1b", "available/a b", "available/readonly/a b"]
    names = sorted([*names, *(f"{directory}/evil\n" for directory in directories if directory != "x")])
    assert sorted((finding.code, finding.path) for finding in found) == [("invalid-name", name) for name in names]
    assert [bookie.bookie_id for bookie in cluster.bookies.list()] == list(BOOKIES)
    assert cluster.cookies.list() == list(BOOKIES)
    assert list(cluster.ledgers.ledgers(None)) == [LedgerId(0, 5), SCOPED]
    assert "x" in [node.path for node in walk(cluster.store)]
    assert list(LedgerMarks(cluster.store).list(None)) == []
    assert list(health_findings(cluster)) == []


def test_ledger_in_recovery_for_a_day_is_stuck(cluster: Cluster) -> None:
    cluster.ledgers.create(
        LedgerId(0, 6), GOOD._replace(state=LedgerState.IN_RECOVERY, ctime_ms=1, length=0, last_entry_id=-1)
    )
    assert codes(cluster) == [("stuck-in-recovery", LedgerId(0, 6))]


def test_orphans_are_listed_and_removable_ones_removed(cluster: Cluster) -> None:
    marks = LedgerMarks(cluster.store)
    for ledger in (LedgerId(0, 99), LedgerId(7, 99), SCOPED):
        marks.add(ledger, ["b0:3181"])
    cluster.cookies.write("b9:3181", Cookie("b9:3181", ("/j",), ("/l",)), NEW)
    cluster.store.put("strange/child", b"", NEW)
    found = list(orphans(cluster))
    assert [(each.code, each.path.rpartition("/")[2], each.removable) for each in found] == [
        ("orphaned-mark", "urL0000000099", True),
        ("orphaned-mark", f"urL{LedgerId(7, 99).qualified_name}", True),
        ("unused-cookie", "b9:3181", False),
        ("unknown-node", "strange", False),
    ]
    assert found[-1].node_count == 2
    for each in found[:2]:
        remove_orphans(cluster, [each])
    assert [ledger for ledger, _ in marks.list(None)] == [SCOPED]


@pytest.mark.parametrize("ledger", [LedgerId(0, 77), LedgerId(7, 77)], ids=str)
def test_mark_in_the_directory_of_another_ledger_is_removed_where_it_is(cluster: Cluster, ledger: LedgerId) -> None:
    wrong = mark_path(LedgerId(ledger.scope_id, 1)).rpartition("/")[0] + "/" + mark_path(ledger).rpartition("/")[2]
    cluster.store.put(wrong, b"", NEW)
    found = list(orphans(cluster))
    assert [each.path for each in found] == [wrong]
    assert [remove_orphans(cluster, found) for _ in range(2)] == [1, 0]
    assert list(orphans(cluster)) == []
    assert cluster.store.get(wrong.rpartition("/")[0]) is None  # parents left empty


def test_scopes_that_the_cluster_took_since_the_listing_stay(zookeeper: Any) -> None:
    with open_cluster(zookeeper.metadata_uri(zookeeper.new_root()), create=True) as cluster:
        cluster.ledgers.create(SCOPED, GOOD)
        cluster.store.put(SCOPES, b"another cluster", None)
        found = list(orphans(cluster))
        assert [(each.code, each.removable) for each in found] == [("foreign-scopes", True)]
        cluster.store.put(SCOPES, cluster.instance_id().encode(), None)
        with pytest.raises(Conflict):
            remove_orphans(cluster, found)
        assert list(cluster.ledgers.ledgers(7)) == [SCOPED]


@pytest.mark.parametrize("value", [None, b"other"], ids=["lost", "changed"])
def test_scopes_that_a_cookie_of_this_cluster_names_are_not_removable(zookeeper: Any, value: bytes | None) -> None:
    with open_cluster(zookeeper.metadata_uri(zookeeper.new_root()), create=True) as cluster:
        cluster.ledgers.create(SCOPED, GOOD)
        cookie = Cookie("b0:3181", ("/j",), ("/l",), instance_id=cluster.instance_id())
        if value is not None:
            cluster.cookies.write("b0:3181", cookie, NEW)
        cluster.store.delete("INSTANCEID")
        if value is not None:
            cluster.store.put("INSTANCEID", value, NEW)
        assert [(each.code, each.removable) for each in orphans(cluster) if each.path == SCOPES] == [
            ("foreign-scopes", False)
        ]


def test_bookie_is_replaced_in_every_scope_unless_ensembles_clash(cluster: Cluster) -> None:
    clash = GOOD._replace(ensembles=(Fragment(0, ("b0:3181", "b1:3181", "b9:1")),))
    cluster.ledgers.create(LedgerId(0, 6), clash)

    def run(**options: Any) -> list[Any]:
        return list(replace_bookie(cluster, "b0:3181", "b9:1", **options))

    planned = run(dry_run=True)
    assert cluster.ledgers.read(SCOPED).metadata.ensembles == GOOD.ensembles
    assert run(limit=1)[0].ledger == LedgerId(0, 5)
    done = run()
    assert [each.ledger for each in planned] == [LedgerId(0, 5), LedgerId(0, 6), SCOPED]
    assert [each.ledger for each in done] == [LedgerId(0, 6), SCOPED]
    assert done[0].problem is not None
    assert cluster.ledgers.read(LedgerId(0, 6)).metadata.ensembles == clash.ensembles
    for ledger in (LedgerId(0, 5), SCOPED):
        found = cluster.ledgers.read(ledger).metadata
        assert found == GOOD._replace(
            ensembles=(Fragment(0, ("b9:1", "b1:3181", "b2:3181")), Fragment(4, ("b2:3181", "b1:3181", "b9:1"))),
            c_token=found.c_token,
        )


def test_ledger_that_another_command_changed_meanwhile_is_not_counted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_later(ledger: LedgerId) -> Any:
        monkeypatch.undo()
        assert next(replace_bookie(cluster, "b0:3181", "b9:1")).ledger == ledger
        return cluster.ledgers.read(ledger)

    monkeypatch.setattr(cluster.ledgers, "read", read_later)
    done = list(replace_bookie(cluster, "b0:3181", "b9:1", limit=1))
    assert [(each.ledger, each.fragment_count) for each in done] == [(SCOPED, 2)]


def test_health_reports_bookies_and_replication(cluster: Cluster, tmp_path: Path) -> None:
    cluster.bookies.unregister("b0:3181")
    cluster.bookies.register("b1:3181", INFO, True)
    cluster.cookies.remove("b2:3181", None)
    state = AutoRecoveryState(cluster.store)
    state.marks.add(LedgerId(0, 5), ["b0:3181"], now_ms=1)
    state.marks.add(SCOPED, ["b0:3181"])
    state.settings.disable()
    found = {(each.code, each.subject): each.severity for each in health_findings(cluster)}
    assert found == {
        ("bookie-down", "b0:3181"): Severity.ERROR,
        ("bookie-read-only", "b1:3181"): Severity.WARNING,
        ("bookie-without-cookie", "b2:3181"): Severity.WARNING,
        ("underreplicated", "scope 0"): Severity.ERROR,
        ("underreplicated", "scope 7"): Severity.WARNING,
        ("autorecovery-disabled", ""): Severity.ERROR,
    }
    for bookie_id in BOOKIES[1:]:
        cluster.bookies.unregister(bookie_id)
    assert {"no-writable-bookie", "no-bookie-for-scopes"} <= {each.code for each in health_findings(cluster)}


def test_the_health_check_switch_is_apaches_node(cluster: Cluster) -> None:
    switch = HealthCheckSwitch(cluster)
    assert switch.is_enabled()
    assert switch.set(False)
    assert not switch.set(False)
    assert cluster.store.get("disableHealthCheck") is not None
    assert switch.set(True)
    assert not switch.set(True)
    assert switch.is_enabled()


def test_a_damaged_vote_is_a_finding(zookeeper: Any) -> None:
    with open_cluster(zookeeper.metadata_uri(zookeeper.new_root()), create=True) as cluster:
        assert "no-auditor" in {each.code for each in health_findings(cluster)}
        cluster.store.put("underreplication/auditorelection/V_0000000001", b"\xff", NEW)
        assert "vote-damaged" in {each.code for each in health_findings(cluster)}


def test_local_cluster_needs_an_auditor_only_after_an_election_or_with_marks(tmp_path: Path) -> None:
    def codes(cluster: Cluster) -> set[str]:
        return {each.code for each in health_findings(cluster) if "auditor" in each.code or "replicated" in each.code}

    with open_cluster(f"sqlite://{tmp_path / 'a.db'}", create=True) as cluster:
        election = AuditorElection(cluster.store)
        assert codes(cluster) == set()
        vote = election.vote("b0:3181")
        assert codes(cluster) == set()
        vote.release()
        assert codes(cluster) == {"no-auditor"}
        election.vote("b0:3181")
        cluster.store.put("underreplication/auditorelection/V_2000000000", b"\xff", NEW)  # a candidate's
        assert "vote-damaged" in {each.code for each in health_findings(cluster)}
    with open_cluster(f"sqlite://{tmp_path / 'b.db'}", create=True) as cluster:
        LedgerMarks(cluster.store).add(LedgerId(0, 5), ["b0:3181"])
        assert codes(cluster) == {"no-auditor", "underreplicated"}


def test_bookie_registered_during_the_check_is_not_dangling(cluster: Cluster) -> None:
    cluster.ledgers.create(LedgerId(0, 4), GOOD._replace(ensembles=(Fragment(0, ("a:1", "b1:3181", "b2:3181")),)))
    cluster.ledgers.create(LedgerId(8, 4), GOOD._replace(ensembles=(Fragment(0, ("b:1", "b1:3181", "b2:3181")),)))
    found = check_metadata(cluster)
    first = next(found)
    assert (first.code, first.ledger) == ("dangling", LedgerId(0, 4))
    assert "b1:3181" not in first.message
    cluster.cookies.write("b:1", Cookie("b:1", ("/j",), ("/l",)), NEW)
    assert list(found) == []


def test_unchanged_ledgers_do_not_count_towards_the_limit(cluster: Cluster) -> None:
    cluster.ledgers.create(LedgerId(0, 4), GOOD._replace(ensembles=(Fragment(0, ("b0:3181", "b1:3181", "b9:1")),)))
    cluster.ledgers.create(LedgerId(0, 6), GOOD)
    done = list(replace_bookie(cluster, "b0:3181", "b9:1", limit=1))
    assert [(each.ledger, each.problem is None) for each in done] == [
        (LedgerId(0, 4), False), (LedgerId(0, 5), True), (LedgerId(0, 6), False)
    ]  # fmt: skip
    assert "--limit is reached" in str(done[-1].problem)
