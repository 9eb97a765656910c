"""Auto-recovery's state: what we write Apache reads, and the reverse, byte for byte; its shell and bookies included."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import servers

from bkctl.errors import AlreadyExists, Conflict
from bkctl.ids import I64_MAX, LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.underreplication import AuditorCheck, AutoRecoveryState, LedgerMarks, UnderreplicatedLedger

IDS = [0, 5, 9_999_999_999, 0x7AFEBEEF0000FEED, I64_MAX]
SCOPED = [LedgerId(7, 5), LedgerId(U64 := (1 << 64) - 1, U64)]

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def uri(zookeeper: Any) -> str:
    found: str = zookeeper.metadata_uri(zookeeper.new_root())
    open_cluster(found, create=True).close()
    return found


@pytest.fixture
def cluster(uri: str) -> Iterator[Cluster]:
    with open_cluster(uri) as opened:
        yield opened


@pytest.fixture
def ours(cluster: Cluster) -> AutoRecoveryState:
    return AutoRecoveryState(cluster.store)


@pytest.fixture
def apache(java: Any, uri: str) -> Iterator[Ask]:
    """Apache's classes on the same root: `apache("get", 5)`."""
    with servers.conversation(java, "Underreplication", uri) as ask:
        yield ask


def nodes(cluster: Cluster, path: str = "underreplication") -> dict[str, bytes]:
    """Every node below `path` and its value."""
    found = cluster.store.get(path)
    assert found is not None
    values = {path: found.value}
    for name in cluster.store.children(path) or ():
        values |= nodes(cluster, f"{path}/{name}")
    return values


def test_the_same_marks_are_the_same_bytes_in_the_same_places(zookeeper: Any, java: Any, apache: Ask, cluster: Cluster,
                                                              ours: AutoRecoveryState) -> None:  # fmt: skip
    marks = [(0, ["127.0.0.1:3181"]), (5, ["b-1", "b-2:3181"]), (I64_MAX, ["bookie-1"])]
    for ledger_id, missing in marks:
        assert apache("mark", ledger_id, *missing) == {}
    assert apache("mark", 5, "b-3") == {}
    theirs = nodes(cluster)
    times = {ledger_id: int(apache("get", ledger_id)["ctime"]) for ledger_id, _ in marks}
    with open_cluster(zookeeper.metadata_uri(zookeeper.new_root()), create=True) as other:
        other_marks = LedgerMarks(other.store)
        for ledger_id, missing in marks:
            assert other_marks.add(LedgerId(0, ledger_id), missing, now_ms=times[ledger_id])
        assert other_marks.add(LedgerId(0, 5), ["b-3"], now_ms=times[5])
        assert nodes(other) == theirs
        for path in theirs:
            assert other.store.get(path)[:2] == cluster.store.get(path)[:2]  # type: ignore[index]
    assert not ours.marks.add(LedgerId(0, 5), ["b-2:3181", "b-3"])
    assert nodes(cluster) == theirs


def test_apache_and_bkctl_see_and_remove_each_others_marks(
    apache: Ask, cluster: Cluster, ours: AutoRecoveryState
) -> None:
    for index, ledger_id in enumerate(IDS):
        if index % 2:
            apache("mark", ledger_id, "bookie-1")
        else:
            ours.marks.add(LedgerId(0, ledger_id), ["bookie-1"])
    for ledger in SCOPED:
        ours.marks.add(ledger, ["bookie-2"])
    ours.marks.add(LedgerId(0, 5), ["bookie-1", "bookie-2"])
    apache("mark", 0, "bookie-2")
    both = ["bookie-1", "bookie-2"]
    expected = {str(ledger_id): both if ledger_id in (0, 5) else ["bookie-1"] for ledger_id in IDS}
    assert apache("list") == expected
    listed = dict(ours.marks.list(None))
    assert list(listed) == [*(LedgerId(0, ledger_id) for ledger_id in IDS), *SCOPED]
    for ledger_id in IDS:
        found = listed[LedgerId(0, ledger_id)]
        assert isinstance(found, UnderreplicatedLedger)
        theirs = apache("get", ledger_id)
        assert (list(found.missing_replicas), found.ctime_ms) == (theirs["replicas"], theirs["ctime"])
    assert list(ours.marks.list(7)) == [(SCOPED[0], listed[SCOPED[0]])]

    ours.marks.remove(LedgerId(0, 0x7AFEBEEF0000FEED))
    assert apache("get", 0x7AFEBEEF0000FEED) == {}
    taken = int(apache("poll")["ledgerId"])
    apache("replicated", taken)
    assert ours.marks.get(LedgerId(0, taken)) is None
    left = {LedgerId(0, ledger_id) for ledger_id in IDS} - {LedgerId(0, taken), LedgerId(0, 0x7AFEBEEF0000FEED)}
    assert [ledger for ledger, _ in ours.marks.list()] == sorted(left)
    for ledger in left:
        ours.marks.remove(ledger)
    for ledger in SCOPED:
        ours.marks.remove(ledger)
    assert apache("list") == {}
    assert cluster.store.children("underreplication/ledgers") == []
    assert cluster.store.children("underreplication/scopes/ledgers") == []


def test_locks_of_either_keep_the_other_off(apache: Ask, ours: AutoRecoveryState) -> None:
    for ledger_id in (5, 6):
        apache("mark", ledger_id, "bookie-1")
    ours.locks.lock(LedgerId(0, 5), "host-1")
    assert apache("worker", 5) == {"worker": "host-1", "locked": True}
    assert apache("poll") == {"ledgerId": "6"}
    with pytest.raises(Conflict) as caught:
        ours.locks.lock(LedgerId(0, 6), "host-1")
    owner = apache("worker", 6)["worker"]
    assert f"by {owner}" in str(caught.value)
    ours.locks.lock(LedgerId(7, 6), "host-1")
    assert [(lock.ledger, lock.owner) for lock in ours.locks.list()] == [
        (LedgerId(0, 5), "host-1"), (LedgerId(0, 6), owner), (LedgerId(7, 6), "host-1"),
    ]  # fmt: skip
    assert apache("poll") == {"ledgerId": "-1"}
    apache("release", 6)
    assert ours.locks.get(LedgerId(0, 6)) is None
    ours.locks.unlock(LedgerId(0, 5))
    assert apache("worker", 5) == {"worker": None, "locked": False}
    ours.marks.add(LedgerId(0, 5), ["bookie-2"])
    assert apache("poll")["ledgerId"] in ("5", "6")


def test_switches_clocks_and_the_delay_are_one(apache: Ask, cluster: Cluster,
                                               ours: AutoRecoveryState) -> None:  # fmt: skip
    assert ours.settings.is_enabled()
    ours.settings.disable()
    assert apache("status") == {"enabled": False}
    with pytest.raises(AlreadyExists):
        ours.settings.disable()
    apache("enable")
    assert ours.settings.is_enabled()
    with pytest.raises(AlreadyExists):
        ours.settings.enable()
    apache("disable")
    assert not ours.settings.is_enabled()

    assert ours.settings.lost_bookie_recovery_delay_s() is None
    assert apache("delay", 75) == {"delay": 75}
    assert ours.settings.lost_bookie_recovery_delay_s() == 75
    ours.settings.set_lost_bookie_recovery_delay_s(0)
    assert apache("delay") == {"delay": 0}

    checks = [AuditorCheck.ALL_LEDGERS, AuditorCheck.PLACEMENT_POLICY, AuditorCheck.REPLICAS]
    assert [ours.settings.check_ctime_ms(check) for check in checks] == [None, None, None]
    times = [1_700_000_000_001, 1_700_000_000_002, 1_700_000_000_003]
    assert apache("clocks", *times) == {"clocks": times}
    assert [ours.settings.check_ctime_ms(check) for check in checks] == times
    theirs = [cluster.store.get(f"underreplication/{check.value}").value for check in checks]  # type: ignore[union-attr]
    for check, time_ms in zip(checks, times, strict=True):
        ours.settings.set_check_ctime_ms(check, time_ms)
    assert [
        cluster.store.get(f"underreplication/{check.value}").value
        for check in checks  # type: ignore[union-attr]
    ] == theirs
    ours.settings.set_check_ctime_ms(AuditorCheck.REPLICAS, -1)
    assert apache("clocks") == {"clocks": [*times[:2], -1]}
    assert ours.settings.check_ctime_ms(AuditorCheck.REPLICAS) is None


def test_the_auditor_that_apache_elects_is_ours(apache: Ask, ours: AutoRecoveryState) -> None:
    assert ours.election.auditor() is None
    assert apache("vote", "bookie-1:3181") == {}
    assert (ours.election.auditor(), ours.election.votes()) == ("bookie-1:3181", ("bookie-1:3181",))
    assert apache("auditor") == {"auditor": "bookie-1:3181"}
    assert ours.election.auditor(scoped=True) is None


def test_apaches_shell_reads_and_changes_our_marks_and_switches(
    java: Any, uri: str, ours: AutoRecoveryState, tmp_path: Path
) -> None:
    conf = servers.shell_conf(tmp_path / "shell.conf", uri)

    def shell(*words: object) -> str:
        text: str = java.shell(conf, *words).stdout
        return text

    ours.marks.add(LedgerId(0, 5), ["127.0.0.1:3181"])
    ours.marks.add(LedgerId(0, 1 << 40), ["127.0.0.1:3182"])
    ours.marks.add(LedgerId(7, 6), ["127.0.0.1:3181"])
    ours.settings.set_lost_bookie_recovery_delay_s(60)
    listed = shell("listunderreplicated", "-printmissingreplica")
    assert set(re.findall(r"\b5\b|1099511627776|\b6\b", listed)) == {"5", str(1 << 40)}
    assert "127.0.0.1:3182" in listed
    only = shell("listunderreplicated", "-missingreplica", "127.0.0.1:3182")
    assert "1099511627776" in only
    assert not re.search(r"\b5\b", only)
    assert "60" in shell("lostbookierecoverydelay", "-get")
    shell("lostbookierecoverydelay", "-set", 61)
    assert ours.settings.lost_bookie_recovery_delay_s() == 61
    shell("autorecovery", "-disable")
    assert not ours.settings.is_enabled()
    ours.settings.enable()
    shell("autorecovery", "-disable")
    with pytest.raises(Conflict):
        ours.trigger_audit()
    shell("autorecovery", "-enable")
    assert ours.settings.is_enabled()


def test_the_auditor_of_a_running_bookie_hears_us_and_passes_the_scopes_over(
    zookeeper: Any, java: Any, apache_bookie: Callable[..., Any], tmp_path: Path
) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    servers.format_cluster(java, uri, tmp_path)
    bookie = apache_bookie(uri, settings={"autoRecoveryDaemonEnabled": "true"})
    bookie.start()
    with open_cluster(uri) as cluster:
        ours = AutoRecoveryState(cluster.store)
        ours.marks.add(LedgerId(7, 5), ["127.0.0.1:1"])
        servers.wait_for(lambda: ours.election.auditor() == bookie.bookie_id, "the election")
        assert bookie.bookie_id in java.shell(bookie, "whoisauditor").stdout
        servers.wait_for(lambda: ours.settings.lost_bookie_recovery_delay_s() is not None, "the delay")
        # A worker takes marks of ledgers that do not exist away.
        ours.marks.add(LedgerId(0, 5), ["127.0.0.1:1"])
        servers.wait_for(lambda: ours.marks.get(LedgerId(0, 5)) is None, "the worker")
        assert ours.trigger_audit() == bookie.bookie_id
        assert ours.marks.get(LedgerId(7, 5)) is not None
        assert not ours.marks.has_marks(0)
        assert ours.marks.has_marks(7)
