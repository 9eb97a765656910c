"""Health findings and their mutes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from bkctl.client.ledger_survey import published_survey
from bkctl.errors import NotFound
from bkctl.formats.metadata import BookieServiceInfo, Cookie
from bkctl.ids import LedgerId
from bkctl.metadata.admin.health import (
    MUTES,
    SCOPES_NAMED_MAX,
    HealthMutes,
    Severity,
    health_findings,
    read_only_finding,
)
from bkctl.metadata.admin.health_codes import HealthCode
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.underreplication import AutoRecoverySettings, LedgerMarks, ReplicationFailures


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with open_cluster(f"sqlite://{tmp_path}/m.db", create=True) as cluster:
        for bookie_id in ("b1:1", "b2:1", "b3:1"):
            cookie = Cookie(bookie_id, ("/j",), ("/l",), instance_id=cluster.instance_id())
            cluster.cookies.write(bookie_id, cookie, -1)
        cluster.bookies.register("b1:1", BookieServiceInfo())
        yield cluster


def test_lost_bookies_that_nothing_repairs_are_an_error(cluster: Cluster) -> None:
    found = {finding.code: finding for finding in health_findings(cluster)}
    unguarded = found[HealthCode.NO_AUDITOR]
    assert unguarded.severity is Severity.ERROR
    assert "nothing replicates the ledgers of b2:1 and 1 more" in unguarded.message

    AutoRecoverySettings(cluster.store).disable()
    found = {finding.code: finding for finding in health_findings(cluster)}
    assert found[HealthCode.AUTORECOVERY_DISABLED].severity is Severity.ERROR
    assert "b2:1 and 1 more" in found[HealthCode.AUTORECOVERY_DISABLED].message


@pytest.mark.parametrize("scope_count", [SCOPES_NAMED_MAX, SCOPES_NAMED_MAX + 1, 3 * SCOPES_NAMED_MAX])
def test_scopes_beyond_the_first_with_marks_share_one_finding(cluster: Cluster, scope_count: int) -> None:
    marks = LedgerMarks(cluster.store)
    for scope_id in range(scope_count):
        marks.add(LedgerId(scope_id, 1), ["b2:1"], now_ms=1 if scope_id == scope_count - 1 else None)
        marks.add(LedgerId(scope_id, 2), ["b2:1"])
    found = [each for each in health_findings(cluster) if each.code is HealthCode.UNDERREPLICATED]
    named, rest = found[:SCOPES_NAMED_MAX], found[SCOPES_NAMED_MAX:]
    assert [each.subject for each in named] == [f"scope {scope_id}" for scope_id in range(SCOPES_NAMED_MAX)]
    assert {each.details["ledgerCount"] for each in named if each.details} == {2}
    more_count = scope_count - SCOPES_NAMED_MAX
    if not more_count:
        assert rest == []
        assert named[-1].severity is Severity.ERROR
        return
    [more] = rest
    assert {each.severity for each in named} == {Severity.WARNING}
    assert more.severity is Severity.ERROR
    assert more.subject == ("1 more scope" if more_count == 1 else f"{more_count} more scopes")
    assert f"{2 * more_count} ledgers are under-replicated, the oldest for " in more.message
    assert more.details is not None
    assert (more.details["scopeCount"], more.details["ledgerCount"]) == (more_count, 2 * more_count)
    assert more.details["olderThan"] == {"10m": 1, "1h": 1, "1d": 1}


def test_mutes_end_by_time_or_request(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = 1_000_000
    monkeypatch.setattr("bkctl.metadata.admin.health._now_ms", lambda: now_ms)
    mutes = HealthMutes(cluster)
    assert mutes.active() == []
    short = mutes.mute(HealthCode.BOOKIE_DOWN, duration_s=60, user="ann")
    assert short.until_ms == now_ms + 60_000
    forever = mutes.mute(HealthCode.NO_AUDITOR, duration_s=None, user="bob")
    assert mutes.active() == [short, forever]
    now_ms += 60_000
    assert mutes.active() == [forever]
    assert mutes.unmute(HealthCode.NO_AUDITOR) == forever
    for code in (HealthCode.NO_AUDITOR, HealthCode.BOOKIE_DOWN):
        with pytest.raises(NotFound):
            mutes.unmute(code)


@pytest.mark.parametrize(
    "value", [b"", b"[]", b"{", b'{"a": 1}', b'{"a": {"since": "x", "until": null, "user": 1}}', b"[" * 9999]
)
def test_damaged_mutes_mute_nothing_and_are_replaced(cluster: Cluster, value: bytes) -> None:
    cluster.store.put(MUTES, value, None)
    mutes = HealthMutes(cluster)
    assert mutes.active() == []
    mutes.mute(HealthCode.DISK_FULL, duration_s=None, user="ann")
    assert [mute.code for mute in mutes.active()] == ["disk-full"]


def test_mutes_of_two_commands_at_once_both_stay(cluster: Cluster) -> None:
    one, two = HealthMutes(cluster), HealthMutes(cluster)
    put = cluster.store.put
    raced = []

    def put_late(path: str, content: bytes, expected: int | None) -> int:
        if not raced:
            raced.append(True)
            two.mute(HealthCode.DISK_FULL, duration_s=None, user="bob")
        return put(path, content, expected)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.store, "put", put_late)
        one.mute(HealthCode.BOOKIE_DOWN, duration_s=None, user="ann")
    assert [mute.code for mute in one.active()] == ["bookie-down", "disk-full"]


@pytest.mark.parametrize("used", [None, 10.0, 99.0])
def test_a_bookie_id_with_braces_and_quotes_fits_the_next_command(used: float | None) -> None:
    finding = read_only_finding("b{x}'; rm", used, 95.0)
    assert shlex.split(finding.command)[-1] == "b{x}'; rm"


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN"])
def test_impossible_times_in_our_nodes_count_as_damage(cluster: Cluster, number: str) -> None:
    LedgerMarks(cluster.store).add(LedgerId(0, 1), ["b2:1"])
    failure = f'{{"attempts": 1, "reason": "r", "worker": "w", "time": {number}, "retryAt": null}}'
    cluster.store.put("underreplication/bkctlFailures/urL0000000001", failure.encode(), None)
    cluster.store.put("underreplication/bkctlSurvey", f'{{"time": {number}, "tallies": []}}'.encode(), None)
    cluster.store.put(MUTES, f'{{"bookie-down": {{"since": {number}, "until": null, "user": "u"}}}}'.encode(), None)
    assert list(ReplicationFailures(cluster.store).list()) == []
    assert published_survey(cluster.store, scoped=False) is None
    assert HealthMutes(cluster).active() == []
    assert HealthCode.REPLICATION_STUCK not in {finding.code for finding in health_findings(cluster)}
