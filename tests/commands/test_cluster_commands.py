"""`bkctl cluster`: id, init, status, health, the health check switch, nuke; most on a metadata store alone."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine

from bkctl import __version__
from bkctl.bookie.local import LocalCluster
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieServiceInfo, Cookie, Fragment, LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import NEW
from bkctl.metadata.underreplication import AuditorCheck, AuditorElection, AutoRecoverySettings

from .conftest import Cli, applied

METADATA = LedgerMetadata(1, 1, 1, DigestType.CRC32C, b"secret", (Fragment(0, ("b0:1",)),))


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = f"sqlite://{tmp_path}/m.db"
    monkeypatch.setenv("BKCTL_METADATA_URI", uri)
    return uri


@pytest.fixture
def store(uri: str) -> Iterator[Cluster]:
    with open_cluster(uri, create=True) as cluster:
        for ledger in (LedgerId(0, 5), LedgerId(7, 5)):
            cluster.ledgers.create(ledger, METADATA)
        cluster.cookies.write("b0:1", Cookie("b0:1", ("/j",), ("/l",), instance_id=cluster.instance_id()), -1)
        yield cluster


def test_cluster_is_created_once_and_audited_before(
    cli: Cli, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "audit"
    monkeypatch.setenv("BKCTL_AUDIT_LOG", str(log))
    assert cli("cluster", "id").code == 4
    planned = cli("cluster", "init", "--dry-run", "-o", "json")
    assert (planned.json["metadataUri"], planned.json["instanceId"], planned.err) == (uri, None, "")
    for form in ("table", "wide"):
        assert cli("cluster", "init", "--dry-run", "-o", form).err == "Dry run: nothing was changed\n"
    assert not (tmp_path / "m.db").exists()
    assert not log.exists()
    made = cli("cluster", "init", "-o", "json").json
    assert cli("cluster", "id", "-o", "id").out == f"{made['instanceId']}\n"
    assert applied([cli("cluster", "id", "-o", "json").json]) == [made]
    for more in ([], ["--dry-run"]):
        again = cli("cluster", "init", *more)
        assert again.code == 5
        assert made["instanceId"] in again.err
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(each["event"], each.get("exitCode")) for each in events] == [
        ("begin", None), ("end", 0), ("begin", None), ("end", 5),
    ]  # fmt: skip


def test_a_cluster_without_an_instance_id_has_none_to_show(cli: Cli, store: Cluster) -> None:
    store.store.delete("INSTANCEID")
    assert cli("cluster", "id").code == 4
    assert "no-instance-id" in cli("cluster", "health", "--no-bookies", "-o", "id").out
    assert ": it has no instance id" in cli("cluster", "init").err


def test_import_restores_a_lost_instance_id_that_the_cookies_name(cli: Cli, store: Cluster, tmp_path: Path) -> None:
    assert cli("metadata", "export", "-f", tmp_path / "export").code == 0
    lost, cookie = store.instance_id(), store.cookies.read("b0:1")
    assert cookie is not None
    store.store.delete("INSTANCEID")
    store.cookies.write("b0:1", replace(cookie.value, instance_id="other"), None)
    refused = cli("metadata", "import", tmp_path / "export")
    assert refused.code == 5
    assert "nuke" not in refused.err
    assert "'bkctl cookie list'" in refused.err
    store.cookies.write("b0:1", cookie.value, None)
    done = cli("metadata", "import", tmp_path / "export", "--dry-run")
    assert (done.code, store.instance_id()) == (0, "")
    assert f"{lost}, which its cookies name, would be written" in done.err
    assert cli("metadata", "import", tmp_path / "export").code == 0
    assert store.instance_id() == lost


def test_health_finds_and_advises(cli: Cli, store: Cluster) -> None:
    result = cli("cluster", "health", "--no-bookies", "-o", "ndjson")
    assert result.code == 3
    assert {(row["code"], row["severity"], row["subject"]) for row in result.rows} == {
        ("bookie-down", "error", "b0:1"),
        ("no-writable-bookie", "error", None),
        ("no-auditor", "error", None),
        ("no-auditor-of-scopes", "error", None),
        ("no-bookie-for-scopes", "error", None),
        ("ledgers-unavailable", "error", "scope 0"),
        ("ledgers-unavailable", "error", "scope 7"),
    }
    assert all(row["advice"] and row["nextCommand"].startswith("bkctl ") for row in result.rows)
    with open_cluster(store.uri) as bookie:
        bookie.bookies.register("b0:1", BookieServiceInfo((), {"ledgerScopes": "1"}))
        healthy = cli("cluster", "health", "--no-bookies", "-o", "json")
        assert (healthy.code, healthy.json) == (0, [])
    assert cli("cluster", "health", "--threshold", "101").code == 2


def test_the_health_check_switch(cli: Cli, store: Cluster) -> None:
    for word, enabled in (("disable", False), ("enable", True)):
        for changed in (True, False):
            done = cli("cluster", "healthcheck", word, "-o", "json")
            assert done.json == {"enabled": enabled, "changed": changed}
            assert ("already" in done.err) is not changed
        assert cli("cluster", "healthcheck", "status", "-o", "json").json == {"enabled": enabled}


def test_nuke_requires_the_instance_id_no_registered_bookie_and_yes(cli: Cli, store: Cluster, tmp_path: Path) -> None:
    instance_id = store.instance_id()
    words = ("cluster", "nuke", "--instance-id", instance_id)
    bare = cli("cluster", "nuke", "--yes")
    assert bare.code == 2
    assert f"add --yes-really {instance_id} to go ahead" in bare.err
    assert cli("cluster", "nuke", "--yes-really", "other").code == 5
    assert cli("cluster", "nuke", "--instance-id", "other", "--yes").code == 5
    plan = {"instanceId": instance_id, "ledgerCount": 2, "scopeCount": 1, "cookieCount": 1, "applied": False}
    assert cli(*words, "--dry-run", "-o", "json").json == plan
    refused = cli(*words)
    assert refused.code == 2
    assert "2 ledgers, 1 cookie" in refused.err
    with open_cluster(store.uri) as bookie:
        bookie.bookies.register("b0:1", BookieServiceInfo())
        for more in ([], ["--dry-run"], ["--yes"]):
            assert cli(*words, *more).code == 5
    backup = tmp_path / "backup"
    backup.write_text("mine")
    assert cli(*words, "--yes", "--backup", backup).code == 5
    assert backup.read_text() == "mine"
    assert cli("ledger", "list", "--all-scopes", "--count", "-o", "json").json == {"count": 2}
    backup.unlink()
    before = {ledger: store.store.get(store.ledgers.path(ledger))[0] for ledger in store.ledgers.ledgers(None)}  # type: ignore[index]
    assert cli(*words, "--yes", "--backup", backup, "-o", "json").json == plan | {"applied": True}
    assert b"secret" not in backup.read_bytes()  # it is there, in base64
    assert cli("cluster", "id").code == 4
    assert store.store.children("") in (None, [])

    assert cli("metadata", "import", backup).code == 0
    assert cli("cluster", "id", "-o", "id").out == f"{instance_id}\n"
    after = {ledger: store.store.get(store.ledgers.path(ledger))[0] for ledger in store.ledgers.ledgers(None)}  # type: ignore[index]
    assert after == before


def test_nuke_reports_scoped_ledgers_of_another_cluster(cli: Cli, zookeeper: Any) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    with open_cluster(uri, create=True) as cluster:
        cluster.ledgers.create(LedgerId(7, 5), METADATA)
        cluster.store.put("INSTANCEID", b"another", None)
    words = ("cluster", "nuke", "--instance-id", "another", "-u", uri)
    refused = cli(*words)
    assert refused.code == 2
    planned = cli(*words, "--dry-run", "-o", "json")
    assert planned.json["ledgerCount"] == 0
    for each in (refused, planned):
        assert "no backup holds them: 'bkctl metadata check' says why" in each.err
    assert cli(*words, "--yes").code == 0
    assert cli("metadata", "tree", "-u", uri).code == 4


def test_nuke_asks_on_a_terminal(store: Cluster) -> None:
    cli = CommandLine(store.uri)
    words = ("cluster", "nuke")
    asks = f"Type {store.instance_id()} to go ahead:"
    code, seen = cli.terminal(*words, "--yes", type_in="y\n", asks=asks, columns=200)
    assert code == 1
    assert "2 ledgers, 1 cookie, without a backup" in seen
    assert "nothing was changed" in seen
    assert cli("ledger", "list", "--all-scopes", "--count", "-o", "ndjson").rows == [{"count": 2}]
    code, seen = cli.terminal(*words, type_in=f"{store.instance_id()}\n", asks=asks, columns=200)
    assert code == 0
    assert cli("cluster", "id").code == 4


def test_init_writes_the_long_long_layout_on_request_only(cli: Cli, uri: str, zookeeper: Any) -> None:
    where = zookeeper.metadata_uri(zookeeper.new_root(), "longlonghierarchical")
    plain = zookeeper.metadata_uri(zookeeper.new_root(), "longlonghierarchical")
    made = cli("cluster", "init", "--long-long-layout", "-u", where, "-o", "json").json
    assert made["managerFactoryClass"].endswith(".LongLongHierarchicalLedgerManagerFactory")
    assert cli("ledger", "list", "--count", "-u", where, "-o", "ndjson").json == {"count": 0}
    usual = cli("cluster", "init", "-u", plain, "-o", "json").json
    assert usual["managerFactoryClass"].endswith(".LongHierarchicalLedgerManagerFactory")
    assert cli("cluster", "init", "--long-long-layout").code == 2


def test_status_shows_one_row_for_each_member(cluster: LocalCluster) -> None:
    shell = CommandLine(cluster.metadata_uri)
    answer = shell("cluster", "status", "--threshold", 100, "-o", "ndjson")
    rows = [json.loads(line) for line in answer.out.splitlines()]
    members = [row for row in rows if row["state"] != "unknown"]  # Ledgers of other tests may name those.
    assert answer.code == (0 if members == rows else 3)
    assert [(row["bookieId"], row["state"], row["problem"]) for row in members] == [
        (f"bookie-{index}", "rw", None) for index in range(3)
    ]
    for row in members:
        assert row["latencyMs"] >= 0
        assert row["version"] == f"bkctl {__version__}"
        assert 0 <= row["freeSpace"] <= row["totalSpace"]
        assert row["ledgerCount"] >= 0
    words = ("cluster", "status", "--threshold", 100, "--no-count-ledgers")
    code, seen = shell.terminal("--no-color", *words, columns=100)
    assert code == 0
    assert [line.split()[0] for line in seen.splitlines()][:4] == ["BOOKIE", "bookie-0", "bookie-1", "bookie-2"]


def test_limits_of_disks_are_not_said_of_a_bookie_that_does_not_tell_them(cluster: LocalCluster) -> None:
    shell = CommandLine(cluster.metadata_uri)
    verdict = json.loads(shell("why", "space", "bookie-0", "-o", "json").out)["verdict"]
    assert verdict.endswith("from 95% on, if it has the default limit: its own is not known")


def test_status_of_the_named_cluster_reports_members_that_are_down(cli: Cli, store: Cluster) -> None:
    answer = cli("cluster", "status", "-o", "ndjson")
    assert answer.code == 3
    (row,) = answer.rows
    assert (row["bookieId"], row["state"], row["ledgerCount"]) == ("b0:1", "down", 2)
    assert row["problem"]
    assert "No bookie is writable" in answer.err
    assert cli("cluster", "status", "--no-count-ledgers", "-o", "ndjson").rows[0]["ledgerCount"] is None
    assert cli("cluster", "status", "--threshold", "101").code == 2


def test_status_counts_ledgers_up_to_a_limit(cli: Cli, store: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bkctl.commands.cluster.COUNTED_LEDGERS_MAX", 1)
    short = cli("cluster", "status", "-o", "ndjson")
    assert short.rows[0]["ledgerCount"] is None
    assert "--count-ledgers" in short.err
    assert cli("cluster", "status", "--count-ledgers", "-o", "ndjson").rows[0]["ledgerCount"] == 2


def test_status_reports_members_that_do_not_answer(cli: Cli, store: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with open_cluster(store.uri) as bookie:
        bookie.bookies.register(f"127.0.0.1:{port}", BookieServiceInfo())
        answer = cli("cluster", "status", "-o", "ndjson")
    assert answer.code == 3
    assert "does not answer" in next(row["problem"] for row in answer.rows if row["state"] == "rw")


def test_the_former_names_of_local_commands_are_hidden(cli: Cli) -> None:
    listed = cli("cluster", "--help").out
    assert "  up " not in listed
    assert "bkctl local up" in cli("cluster", "up", "--help").out


def test_muted_findings_are_left_out_but_counted(cli: Cli, store: Cluster) -> None:
    for code in ("bookie-down", "no-writable-bookie", "no-bookie-for-scopes", "ledgers-unavailable"):
        muted = cli("cluster", "health", "mute", code, "--for", "1h", "-o", "json").json
        assert (muted["code"], muted["user"] != "") == (code, True)
    left = cli("cluster", "health", "--no-bookies", "-o", "ndjson")
    assert {row["code"] for row in map(json.loads, left.out.splitlines())} == {"no-auditor", "no-auditor-of-scopes"}
    assert left.code == 3
    assert "5 findings are muted" in left.err
    for code in ("no-auditor", "no-auditor-of-scopes"):
        assert cli("cluster", "health", "mute", code).code == 0
    quiet = cli("cluster", "health", "--no-bookies")
    assert (quiet.code, quiet.out) == (0, "")
    assert "7 findings are muted" in quiet.err
    assert "healthy" not in quiet.err
    detail = cli("cluster", "health", "detail", "--no-bookies", "-o", "ndjson")
    assert detail.code == 0
    assert {row["code"]: "mutedUntil" in row for row in detail.rows} == {
        "bookie-down": True, "no-writable-bookie": True, "no-bookie-for-scopes": True, "no-auditor": False,
        "no-auditor-of-scopes": False, "ledgers-unavailable": True,
    }  # fmt: skip
    table = cli("cluster", "health", "detail", "--no-bookies", "--sort=-code").out.splitlines()
    assert [line.split()[0] for line in table[1:]] == sorted((row["code"] for row in detail.rows), reverse=True)
    assert len(cli("cluster", "health", "mutes", "-o", "ndjson").rows) == 6
    assert cli("cluster", "health", "unmute", "bookie-down").code == 0
    assert cli("metadata", "undo", "--last", "--yes").code == 0
    assert len(cli("cluster", "health", "mutes", "-o", "ndjson").rows) == 6
    assert cli("cluster", "health", "unmute", "bookie-down").code == 0
    assert cli("cluster", "health", "unmute", "bookie-down").code == 4
    assert cli("cluster", "health", "--no-bookies").code == 3
    assert cli("cluster", "health", "mute", "bookie-gone").code == 2
    assert cli("cluster", "health", "mute", "bookie-down", "--for", "0").code == 2


def test_health_on_a_terminal_shows_findings_in_full(store: Cluster) -> None:
    shell = CommandLine(store.uri)
    code, seen = shell.terminal("--no-color", "cluster", "health", "detail", "--no-bookies")
    assert code == 3
    assert "FINDING   bookie-down" in seen
    assert "'bkctl bookies decommission b0:1' if it is gone for good" in " ".join(seen.split())


def test_a_cluster_without_an_auditor_is_not_called_healthy(cli: Cli, store: Cluster) -> None:
    with open_cluster(store.uri) as bookie:
        bookie.bookies.register("b0:1", BookieServiceInfo((), {"ledgerScopes": "1"}))
        result = cli("cluster", "health", "--no-bookies")
        assert (result.code, result.out) == (0, "OK\n")
        assert "Auto-recovery does not run" in result.err
        detail = cli("cluster", "health", "detail", "--no-bookies")
        assert (detail.code, detail.out, detail.err) == (0, "OK\n", result.err)
        for scoped in (False, True):
            AutoRecoverySettings(bookie.store).set_check_ctime_ms(
                AuditorCheck.ALL_LEDGERS, time.time_ns() // 1_000_000, scoped=scoped
            )
        AuditorElection(bookie.store).vote("b0:1")
        AuditorElection(bookie.store).vote("b0:1", scoped=True)
        for words in ((), ("detail",)):
            healthy = cli("cluster", "health", *words, "--no-bookies")
            assert (healthy.out, healthy.err) == ("OK\n", "")


def test_muted_damaged_vote_does_not_fail_the_health_command(cli: Cli, store: Cluster) -> None:
    store.store.put("underreplication/auditorelection/V_0000000001", b"\xff", NEW)
    codes = [row["code"] for row in cli("cluster", "health", "--no-bookies", "-o", "ndjson").rows]
    assert "vote-damaged" in codes
    for code in codes:
        assert cli("cluster", "health", "mute", code).code == 0
    result = cli("cluster", "health", "--no-bookies")
    assert (result.code, result.out) == (0, "")
    assert "vote-damaged" in result.err
