"""`bkctl bookie state|ready|info|readonly|gc|compact-locations|sanity|config|metrics` and `bkctl api …`.

Over a made-up server that answers as Apache's bookies do; the bookies themselves are in the interop tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.fake_http import HEAD, FakeServer, Reply, Turns, drips, is_silent, misbehaving, sends, sends_for_ever
from support.waiting import LIMIT_S

from bkctl.bookie.local import LocalCluster
from bkctl.client.trials import SANITY_ENTRY_COUNT
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo, Cookie
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.store import NEW

from .conftest import Cli, Result, applied

API = "/api/v1/bookie"
STATE = {"running": True, "readOnly": False, "shuttingDown": False, "availableForHighPriorityWrites": True}
COLLECTOR = {
    "forceCompacting": False, "majorCompacting": False, "minorCompacting": True,
    "lastMajorCompactionTime": 1_700_000_000_123, "lastMinorCompactionTime": 1_700_000_001_000,
    "lastEntryLocationCompactionTime": 1_700_000_002_000, "majorCompactionCounter": 3, "minorCompactionCounter": 4,
    "entryLocationCompactionCounter": 5,
}  # fmt: skip


def apache_replies() -> dict[str, Any]:
    """The answers of an idle Apache bookie with DbLedgerStorage."""
    return {
        "GET /heartbeat": b"OK\n",
        f"GET {API}/state": STATE,
        f"GET {API}/is_ready": b"OK",
        f"GET {API}/info": {"freeSpace": 250, "totalSpace": 1000},
        f"GET {API}/state/readonly": {"readOnly": False},
        f"PUT {API}/state/readonly": {"readOnly": True},
        f"GET {API}/gc": {"is_in_force_gc": "false"},
        f"PUT {API}/gc": "Triggered GC on BookieServer: b:3181",
        f"GET {API}/gc_details": [COLLECTOR],
        f"GET {API}/gc/suspend_compaction": {"isMinorGcSuspended": "true", "isMajorGcSuspended": "false"},
        f"PUT {API}/gc/suspend_compaction": "Suspend majorGC on BookieServer: …",
        f"PUT {API}/gc/resume_compaction": "Resume majorGC on BookieServer: …",
        f"GET {API}/entry_location_compact": {"/d1/locations": False, "/d2/locations": False},
        f"PUT {API}/entry_location_compact": "Triggered entry Location RocksDB compact on bookie:b:3181",
        f"GET {API}/sanity": {"passed": True, "readOnly": False},
        "GET /api/v1/config/server_config": {
            "bookiePort": "3181", "httpServerKeystorePassword": "hush", "tlsKeyStorePasswordPath": "/etc/key",
            "httpServerToken": "hush", "metadataServiceUri": "etcd:http://me:hush@e:2379/bk",
        },
        "PUT /api/v1/config/server_config": b"Success set server config.",
        "GET /metrics": Reply(b'# TYPE a_count counter\na_count{x="1"} 12\na_count{x="2"} NaN\nb_size 1.5\n'),
    }  # fmt: skip


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    server = FakeServer()
    server.replies = apache_replies()
    monkeypatch.setenv("BKCTL_BOOKIE_URL", server.url)
    yield server
    server.close()


def test_state_warns_of_a_bookie_that_runs_and_lost_its_registration(cli: Cli, fake: FakeServer) -> None:
    lost = b"Bookie has lost its registration in the metadata store"
    fake.replies[f"GET {API}/is_ready"] = Reply(lost, 503)
    answer = cli("bookie", "state", "-o", "json")
    assert (answer.code, answer.json) == (0, {"bookieId": None, "url": fake.url, **STATE})
    assert "Warning: The bookie at" in answer.err
    assert "is not ready: Bookie has lost its registration in the metadata store" in answer.err
    del fake.replies[f"GET {API}/is_ready"]
    assert cli("bookie", "state").err == ""


def test_state_info_and_ready_are_typed_values(cli: Cli, fake: FakeServer) -> None:
    assert cli("bookie", "state", "-o", "json").json == {"bookieId": None, "url": fake.url, **STATE}
    assert cli("bookie", "info", "-o", "json").json == {
        "bookieId": None, "url": fake.url, **STATE,
        "totalSpace": 1000, "freeSpace": 250, "usedSpace": 750, "usedPercent": 75,
    }  # fmt: skip
    assert cli("bookie", "ready", "-o", "json").json == {
        "bookieId": None,
        "url": fake.url,
        "ready": True,
        "message": "OK",
    }
    assert cli("bookie", "state", "-o", "id").out == f"{fake.url}\n"
    header, row = cli("bookie", "state", "--bookie", "b:1", "--bookie-url", fake.address, "-o", "csv").out.splitlines()
    assert (header, row) == (
        "bookieId,url,running,readOnly,shuttingDown,availableForHighPriorityWrites",
        f"b:1,{fake.url},true,false,false,true",
    )
    assert fake.asked[-1].path == f"{API}/state?bookie=b%3A1"  # for a gateway
    assert "HIGH-PRIORITY WRITES  yes" in cli("bookie", "state").out
    assert not any("Authorization" in each.headers for each in fake.asked)


def test_other_servers_are_no_bookies(cli: Cli, fake: FakeServer) -> None:
    for body in (b"", b"<html><h1>It works!</h1></html>"):
        fake.replies[f"GET {API}/is_ready"] = Reply(body)
        assert cli("bookie", "ready").code == 7
    for space in ({"freeSpace": 2**63 - 1, "totalSpace": -(2**63)}, {"freeSpace": 2, "totalSpace": 1}):
        fake.replies[f"GET {API}/info"] = space
        assert cli("bookie", "info").code == 7


def test_a_bookie_that_is_not_ready_is_a_finding(cli: Cli, fake: FakeServer) -> None:
    fake.replies[f"GET {API}/is_ready"] = Reply(b"Bookie is not fully started yet", 503)
    answer = cli("bookie", "ready", "-o", "json")
    assert (answer.code, answer.json["ready"]) == (3, False)
    assert "is not ready: Bookie is not fully started yet" in answer.err
    answer = cli("bookie", "ready", "--wait", "--deadline", "10ms")
    assert (answer.code, answer.out) == (6, "")
    assert "is not ready after 0.01 s" in answer.err


def test_ready_waits_for_a_bookie_to_come_up(cli: Cli, fake: FakeServer) -> None:
    no = Reply(b"Bookie is not fully started yet", 503)
    fake.replies[f"GET {API}/is_ready"] = Turns([no, no, b"OK"])
    assert cli("bookie", "ready", "--wait", "-o", "json").json["ready"] is True
    assert len(fake.asked) == 3


def test_ready_waits_for_a_bookie_to_register(cli: Cli, fake: FakeServer, tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    port = int(fake.address.rpartition(":")[2])
    with open_cluster(uri, create=True) as there:
        there.cookies.write("b:1", Cookie("b:1", ("/j",), ("/l",), "i"), NEW)
        command = ["bookie", "ready", "--bookie", "b:1", "-u", uri, "-o", "json"]
        assert cli(*command).code == 6
        assert cli(*command, "--wait", "--deadline", "10ms").code == 6
        with CommandLine(None).process(*command, "--wait") as waiting:
            there.bookies.register("b:1", BookieServiceInfo((BookieEndpoint("httpserver", port, "127.0.0.1", "http"),)))
            out, err = waiting.communicate(timeout=LIMIT_S)
    assert waiting.returncode == 0, err
    assert json.loads(out) == {"bookieId": "b:1", "url": fake.url, "ready": True, "message": "OK"}


def test_readonly_shows_and_switches_the_state(cli: Cli, fake: FakeServer) -> None:
    assert cli("bookie", "readonly", "-o", "json").json == {"bookieId": None, "url": fake.url, "readOnly": False}
    on = cli("bookie", "readonly", "on", "-o", "json")
    assert (on.code, on.json["readOnly"]) == (0, True)
    assert fake.bodies() == [{"readOnly": True}]
    assert "accepts no more entries and serves reads" in on.err
    assert "persistBookieStatusEnabled=true" in on.err
    already = cli("bookie", "readonly", "off")
    assert (already.code, fake.bodies()[1:]) == (1, [{"readOnly": False}])  # The fake says readOnly all the same.
    assert "is writable already" in already.err


def test_readonly_prints_the_refusal_of_the_bookie(cli: Cli, fake: FakeServer) -> None:
    fake.replies[f"PUT {API}/state/readonly"] = Reply(b"Bookie is disabled ReadOnly mode, cannot transit", 400)
    answer = cli("bookie", "readonly", "on")
    assert answer.code == 1
    assert "Bookie is disabled ReadOnly mode, cannot transit (400)" in answer.err


@pytest.mark.parametrize(
    "command",
    [
        ["bookie", "readonly", "on"],
        ["bookie", "gc"],
        ["bookie", "gc", "--suspend"],
        ["bookie", "gc", "--accept-scoped-deletes"],
        ["bookie", "compact-locations"],
        ["bookie", "config", "--set", "a=b"],
        ["api", "put", "bookie/gc"],
        ["api", "delete", "ledger/delete?ledger_id=5"],
    ],
    ids=" ".join,
)
def test_dry_runs_change_nothing_and_are_not_audited(
    cli: Cli, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str]
) -> None:
    monkeypatch.setenv("BKCTL_AUDIT_LOG", str(tmp_path / "audit"))
    answer = cli(*command, "--dry-run")
    assert answer.code == 0, answer.err
    assert answer.err.startswith("Dry run: ")
    assert answer.err.count("Dry run") == 1
    assert {each.method for each in fake.asked} <= {"GET"}
    assert not (tmp_path / "audit").exists()


def test_dry_run_of_a_request_prints_it_as_json(cli: Cli, fake: FakeServer) -> None:
    url = f"{fake.url}/api/v1/bookie/gc"
    answer = cli("api", "put", "bookie/gc", "--body", "{}", "--dry-run", "-o", "json")
    assert (answer.json, answer.err) == ({"method": "PUT", "url": url, "bodySize": 2, "applied": False}, "")
    shown = cli("api", "delete", "bookie/gc", "--dry-run")
    assert url in shown.out
    assert shown.err == "Dry run: nothing was changed\n"


def test_changes_are_audited_without_secrets(
    cli: Cli, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BKCTL_AUDIT_LOG", str(tmp_path / "audit"))
    assert cli("bookie", "state").code == cli("bookie", "gc", "--status").code == 0
    assert not (tmp_path / "audit").exists()
    assert cli("bookie", "readonly", "on").code == cli("bookie", "sanity").code == 0
    assert cli("bookie", "config", "--set", "tlsKeyStorePassword=hush", "--set=aToken=hush").code == 0
    assert cli("api", "put", "config/server_config", "--body", '{"aPassword": "hush"}').code == 0
    text = (tmp_path / "audit").read_text()
    assert "hush" not in text
    events = [json.loads(line) for line in text.splitlines()]
    assert [(each["event"], each["command"][2]) for each in events] == [
        (event, name) for name in ("readonly", "sanity", "config", "put") for event in ("begin", "end")
    ]


# --- gc -------------------------------------------------------------------------------------------------------------


def test_gc_status_has_a_row_for_each_collector(cli: Cli, fake: FakeServer) -> None:
    fake.replies[f"GET {API}/gc_details"] = [COLLECTOR, {**COLLECTOR, "scopedDeletesHeldBack": "120 of 130"}]
    first, second = cli("bookie", "gc", "--status", "-o", "json").json
    times = {
        "lastMajorCompactionTime": "2023-11-14T22:13:20.123Z", "lastMinorCompactionTime": "2023-11-14T22:13:21.000Z",
        "lastEntryLocationCompactionTime": "2023-11-14T22:13:22.000Z",
    }  # fmt: skip
    flags = {"isInForceGc": False, "isMajorGcSuspended": False, "isMinorGcSuspended": True}
    assert first == {"collector": 0, **flags, **COLLECTOR, **times}
    assert (second["collector"], second["scopedDeletesHeldBack"]) == (1, "120 of 130")
    table = cli("bookie", "gc", "--status").out.splitlines()
    assert table[1].split() == ["0", "no", "idle", "running", "3", "2023-11-14T22:13:20Z", "4", "2023-11-14T22:13:21Z"]
    assert fake.bodies() == []


@pytest.mark.parametrize(
    ("options", "bodies"),
    [
        ([], [None]),
        (["--major"], [{"forceMajor": True, "forceMinor": False}]),
        (["--minor"], [{"forceMajor": False, "forceMinor": True}]),
        (["--major", "--minor"], [{"forceMajor": True, "forceMinor": True}]),
        (["--accept-scoped-deletes", "--yes"], [{"acceptScopedDeletes": True}]),
        (["--suspend"], [{"suspendMajor": True, "suspendMinor": True}]),
        (["--suspend", "major"], [{"suspendMajor": True, "suspendMinor": False}]),
        (["--resume=minor"], [{"resumeMajor": False, "resumeMinor": True}]),
        (
            ["--suspend", "--resume", "minor"],
            [{"suspendMajor": True, "suspendMinor": True}, {"resumeMajor": False, "resumeMinor": True}],
        ),
    ],
    ids=str,
)
def test_gc_sends_its_options(
    cli: Cli, fake: FakeServer, options: list[str], bodies: list[dict[str, bool] | None]
) -> None:
    answer = cli("bookie", "gc", *options, "-o", "ndjson")
    assert answer.code == 0, answer.err
    assert fake.bodies() == bodies
    assert [row["collector"] for row in answer.rows] == [0]


def test_gc_waits_for_the_round_before_and_for_its_own(cli: Cli, fake: FakeServer) -> None:
    yes, no = {"is_in_force_gc": "true"}, {"is_in_force_gc": "false"}
    fake.replies[f"GET {API}/gc"] = Turns([yes, yes, no, yes, no])
    busy = {**COLLECTOR, "forceCompacting": True}
    fake.replies[f"GET {API}/gc_details"] = Turns([*[[COLLECTOR]] * 4, [busy], [COLLECTOR]])
    assert cli("bookie", "gc", "--wait").code == 0
    asked = [each.method for each in fake.asked if each.path == f"{API}/gc"]
    assert asked == ["GET", "GET", "GET", "PUT", "GET", "GET", "GET", "GET"]


def test_gc_says_that_another_round_is_under_way(cli: Cli, fake: FakeServer) -> None:
    fake.replies[f"GET {API}/gc"] = {"is_in_force_gc": "true"}
    answer = cli("bookie", "gc")
    assert (answer.code, len(fake.bodies())) == (0, 1)
    assert "is in a forced round and starts no other" in answer.err
    answer = cli("bookie", "gc", "--wait", "--deadline", "10ms")
    assert (answer.code, len(fake.bodies())) == (6, 1)
    assert "still collects garbage after 0.01 s" in answer.err


def test_gc_asks_before_it_accepts_the_deletes_of_scopes(cli: Cli, fake: FakeServer) -> None:
    answer = cli("bookie", "gc", "--accept-scoped-deletes")
    assert (answer.code, fake.bodies()) == (2, [])
    assert "every ledger of a scope that the metadata store does not name" in answer.err
    assert "add --yes" in answer.err
    line = CommandLine(None)
    code, seen = line.terminal(
        "bookie", "gc", "--accept-scoped-deletes", "--bookie-url", fake.url, type_in="n\n"
    )  # fmt: skip
    assert (code, fake.bodies()) == (1, []), seen
    code, seen = line.terminal("bookie", "gc", "--accept-scoped-deletes", "--bookie-url", fake.url, type_in="y\n")
    assert (code, fake.bodies()) == (0, [{"acceptScopedDeletes": True}]), seen


def test_deletes_that_a_round_held_back_are_findings(cli: Cli, fake: FakeServer) -> None:
    fake.replies[f"GET {API}/gc_details"] = [{**COLLECTOR, "scopedDeletesHeldBack": "120 of 130"}]
    shown = cli("bookie", "gc", "--status")
    assert shown.code == 0
    assert "keeps ledgers of scopes that seem deleted: 120 of 130" in shown.err
    answer = cli("bookie", "gc", "--wait")
    assert answer.code == 3
    assert "kept ledgers of scopes that seem deleted: 120 of 130" in answer.err


DISKS = "major compaction is suspended while ledger directories are above diskUsageWarnThreshold"


@pytest.mark.parametrize(
    ("options", "counters", "answer", "code"),
    [
        (["--major", "--wait"], (3, 3), {"lastRoundProblem": "No directory has room"}, 1),
        (["--major", "--wait"], (3, 3), {}, 1),
        (["--major", "--wait"], (3, 4), {"lastRoundProblem": "No directory has room"}, 1),
        (["--major", "--wait"], (3, 4), {"suspendedByDisks": DISKS, "isMajorGcSuspended": "true"}, 0),
        (["--wait"], (3, 3), {"lastRoundProblem": DISKS}, 1),
        (["--resume", "major"], (3, 3), {"suspendedByDisks": DISKS, "isMajorGcSuspended": "true"}, 1),
        (["--resume", "minor"], (3, 3), {"suspendedByDisks": DISKS, "isMinorGcSuspended": "false"}, 0),
        (["--resume", "major"], (3, 3), {"isMajorGcSuspended": "true"}, 0),
    ],
    ids=str,
)
def test_gc_ends_with_the_outcome_of_the_round(
    cli: Cli, fake: FakeServer, options: list[str], counters: tuple[int, int], answer: dict[str, str], code: int
) -> None:
    before, after = ({**COLLECTOR, "majorCompactionCounter": count} for count in counters)
    fake.replies[f"GET {API}/gc_details"] = Turns([[before], [after]])
    switches = {"isMinorGcSuspended": "true", "isMajorGcSuspended": "false", **answer}
    fake.replies[f"GET {API}/gc/suspend_compaction"] = switches
    result = cli("bookie", "gc", *options)
    assert result.code == code, result.err
    if "suspendedByDisks" in answer and "--wait" in options:
        assert DISKS in result.err
    if code:
        assert answer.get("lastRoundProblem", answer.get("suspendedByDisks", "is disabled there")) in result.err
        assert "isForceGCAllowWhenNoSpace" in result.err


# --- compact-locations ----------------------------------------------------------------------------------------------


def test_databases_are_compacted_and_waited_for(cli: Cli, fake: FakeServer) -> None:
    idle, busy = {"/d1/locations": False}, {"/d1/locations": True}
    fake.replies[f"GET {API}/entry_location_compact"] = Turns([idle, idle, busy, busy, idle])
    rows = cli("bookie", "compact-locations", "--wait", "-o", "ndjson").rows
    assert rows == [{"path": "/d1/locations", "compacting": False, "applied": True}]
    assert fake.bodies() == [{"entryLocationRocksDBCompact": True, "entryLocations": ""}]


def test_databases_are_named_by_their_paths(cli: Cli, fake: FakeServer) -> None:
    assert cli("bookie", "compact-locations", "--status", "-o", "id").out == "/d1/locations\n/d2/locations\n"
    unknown = cli("bookie", "compact-locations", "/d3/locations")
    assert (unknown.code, fake.bodies()) == (4, [])
    assert "it has /d1/locations, /d2/locations" in unknown.err
    assert cli("bookie", "compact-locations", "/d2/locations", "-o", "id").out == "/d2/locations\n"
    assert fake.bodies() == [{"entryLocationRocksDBCompact": True, "entryLocations": "/d2/locations"}]
    fake.replies[f"GET {API}/entry_location_compact"] = {}
    assert cli("bookie", "compact-locations").code == 8


# --- sanity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("passed", "read_only", "code", "text"),
    [(True, False, 0, ""), (False, False, 3, "did not pass its test"), (False, True, 3, "is read-only")],
)
def test_a_bookie_by_its_url_tests_itself(
    cli: Cli, fake: FakeServer, passed: bool, read_only: bool, code: int, text: str
) -> None:
    fake.replies[f"GET {API}/sanity"] = {"passed": passed, "readOnly": read_only}
    answer = cli("bookie", "sanity", "-o", "json")
    assert (answer.code, answer.json) == (
        code, {"bookieId": None, "url": fake.url, "passed": passed, "readOnly": read_only},
    )  # fmt: skip

    assert text in answer.err


def test_a_bookie_behind_a_gateway_tests_itself(cli: Cli, fake: FakeServer) -> None:
    answer = cli("bookie", "sanity", "--bookie", "b:1", "--bookie-url", fake.url, "-o", "json")
    assert (answer.code, answer.json) == (
        0, {"bookieId": "b:1", "url": fake.url, "passed": True, "readOnly": False},
    )  # fmt: skip
    assert fake.asked[-1].path == f"{API}/sanity?bookie=b%3A1"


def test_a_bookie_that_tests_itself_has_until_the_deadline(cli: Cli) -> None:
    with misbehaving(is_silent) as silent:
        answer = cli("bookie", "sanity", "--bookie-url", silent.url, "--deadline", "10ms", "--timeout", "1s")
    assert answer.code == 6
    assert answer.err == f"bkctl: The bookie at {silent.url} did not end its test within 0.01 s\n"


def test_a_bookie_by_its_id_is_tested_over_the_wire(
    cli: Cli, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BKCTL_AUDIT_LOG", str(tmp_path / "audit"))
    monkeypatch.setenv("BKCTL_METADATA_URI", cluster.metadata_uri)
    bookie = cluster.bookies()[1].bookie_id
    before = cli("ledger", "list", "--all-scopes", "-o", "id").out
    for scope in ("0", "7"):
        answer = cli("bookie", "sanity", "--bookie", bookie, "--entries", "3", "--ledger-scope-id", scope, "-o", "json")
        assert answer.code == 0, answer.err
        assert (answer.json["bookieId"], answer.json["passed"], answer.json["entryCount"]) == (bookie, True, 3)
    assert cli("ledger", "list", "--all-scopes", "-o", "id").out == before
    assert cli("bookie", "sanity", "--bookie", bookie, "-e", "2", "-t", "60s", "-o", "json").json["entryCount"] == 2
    assert cli("bookie", "sanity", "--bookie", bookie, "-o", "json").json["entryCount"] == SANITY_ENTRY_COUNT
    assert cli("bookie", "sanity", "--bookie", "nobody").code == 4
    events = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [each["exitCode"] for each in events if each["event"] == "end"] == [0, 0, 0, 0, 4]


def test_sanity_writes_to_one_bookie_and_deletes_its_ledger(cli: Cli, cluster: LocalCluster, tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    with open_cluster(uri, create=True) as there:
        port = cluster.bookies()[0].port
        there.bookies.register(
            "good:1", BookieServiceInfo((BookieEndpoint("bookie", port, "127.0.0.1", "bookie-rpc"),))
        )
        there.bookies.register("dead:1", BookieServiceInfo((BookieEndpoint("bookie", 1, "127.0.0.1", "bookie-rpc"),)))
        there.bookies.register(
            "full:1", BookieServiceInfo((BookieEndpoint("bookie", 1, "127.0.0.1", "bookie-rpc"),)), read_only=True
        )
        dead = cli("bookie", "sanity", "--bookie", "dead:1", "-u", uri)
        assert (dead.code, dead.out) == (6, "")
        assert "dead:1" in dead.err
        full = cli("bookie", "sanity", "--bookie", "full:1", "-u", uri, "-o", "json")
        assert (full.code, full.json) == (3, {"bookieId": "full:1", "url": None, "passed": False, "readOnly": True})
        assert cli("ledger", "list", "--all-scopes", "-o", "id", "-u", uri).out == ""


# --- config ---------------------------------------------------------------------------------------------------------


def test_settings_are_rows_and_secrets_are_hidden(cli: Cli, fake: FakeServer) -> None:
    rows = {row["name"]: row["value"] for row in cli("bookie", "config", "-o", "ndjson").rows}
    assert rows == {
        "bookiePort": "3181", "httpServerKeystorePassword": "***", "httpServerToken": "***",
        "metadataServiceUri": "etcd:http://***@e:2379/bk", "tlsKeyStorePasswordPath": "/etc/key",
    }  # fmt: skip
    assert "hush" in cli("bookie", "config", "--show-secrets").out
    assert cli("bookie", "config", "bookie*", "-o", "csv").out == "name,value\nbookiePort,3181\n"
    missing = cli("bookie", "config", "bookiePort", "gcWaitTime", "-o", "id")
    assert (missing.code, missing.out) == (4, "bookiePort\n")
    assert "shows no setting gcWaitTime" in missing.err


def test_settings_are_changed_in_memory(cli: Cli, fake: FakeServer) -> None:
    answer = cli("bookie", "config", "--set", "bookiePort=3182", "--set", "a=b=c", "-o", "ndjson")
    assert answer.code == 0
    assert fake.bodies() == [{"bookiePort": "3182", "a": "b=c"}]
    assert answer.rows == applied([{"name": "bookiePort", "value": "3181"}, {"name": "a", "value": None}])
    assert "loses this change when it stops" in answer.err


# --- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_are_rows(cli: Cli, fake: FakeServer) -> None:
    assert cli("bookie", "metrics", "-o", "ndjson").rows == [
        {"name": "a_count", "labels": {"x": "1"}, "value": 12, "type": "counter"},
        {"name": "a_count", "labels": {"x": "2"}, "value": "NaN", "type": "counter"},
        {"name": "b_size", "labels": {}, "value": 1.5, "type": "untyped"},
    ]
    assert cli("bookie", "metrics", "-o", "id").out == 'a_count{x="1"}\na_count{x="2"}\nb_size\n'
    for pattern in ("size", "b_*", "?_size"):
        assert cli("bookie", "metrics", "--match", pattern, "-o", "id").out == "b_size\n"
    assert cli("bookie", "metrics", "--raw").out == fake.replies["GET /metrics"].body.decode()


def test_metrics_names_the_setting_that_a_bookie_without_metrics_lacks(cli: Cli, fake: FakeServer) -> None:
    text = b"Currently stats provider doesn't support exporting metrics in http service"
    fake.replies["GET /metrics"] = Reply(text, 500)
    answer = cli("bookie", "metrics")
    assert answer.code == 1
    assert "PrometheusMetricsProvider" in answer.err


# --- api ------------------------------------------------------------------------------------------------------------


def test_raw_calls_print_the_response_unchanged(cli: Cli, fake: FakeServer) -> None:
    for path in ("bookie/state", "/bookie/state", "api/v1/bookie/state", "/api/v1/bookie/state"):
        assert json.loads(cli("api", "get", path).out) == STATE
        assert fake.asked[-1].path == "/api/v1/bookie/state"
    assert cli("api", "get", "heartbeat").out == "OK\n"
    assert cli("api", "get", "/heartbeat").out == "OK\n"
    assert cli("api", "get", "/heartbeat?a=b").out == "OK\n"
    assert fake.asked[-1].path == "/heartbeat?a=b"
    unknown = cli("api", "get", "/nowhere")
    assert (unknown.code, unknown.out) == (8, "")


def test_raw_bodies_come_from_the_command_line_a_file_or_stdin(cli: Cli, fake: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "body").write_text('{"forceMajor": true}')
    assert cli("api", "put", "bookie/gc", "--body", '{"forceMajor": false}').code == 0
    assert cli("api", "put", "bookie/gc", "--body", f"@{tmp_path / 'body'}").code == 0
    piped = CommandLine(None).run("api", "put", "bookie/gc", "--body", "@-", "--bookie-url", fake.url, input=b"[1]")
    assert piped.code == 0, piped.err
    assert cli("api", "put", "bookie/gc").code == 0
    assert fake.bodies() == [{"forceMajor": False}, {"forceMajor": True}, [1], None]
    assert cli("api", "put", "bookie/gc", "--body", "{a:b}").code == 2
    assert cli("api", "put", "bookie/gc", "--body", "@/no/such/file").code == 4
    assert len(fake.bodies()) == 4


def test_raw_deletes_ask(cli: Cli, fake: FakeServer) -> None:
    fake.replies["DELETE /api/v1/ledger/delete"] = b'"Deleted ledger: 5"'
    assert cli("api", "delete", "ledger/delete?ledger_id=5").code == 2
    assert fake.asked == []
    answer = cli("api", "delete", "ledger/delete?ledger_id=5", "--yes")
    assert (answer.code, answer.out) == (0, '"Deleted ledger: 5"')
    assert fake.asked[-1].path == "/api/v1/ledger/delete?ledger_id=5"


def test_raw_answers_end_at_their_limit_and_do_not_steer_a_terminal(cli: Cli, fake: FakeServer) -> None:
    fake.replies["GET /x"] = Reply(b"a\tb\x1b[2J\r\n\xff\x9b\x07")
    assert cli("api", "get", "/x", "--max-size", "5").code == 7
    line = CommandLine(None)
    _, seen = line.terminal("api", "get", "/x", "--bookie-url", fake.url)
    assert seen == "a\tb\\x1b[2J\n��\\x07\n"
    assert line.run("api", "get", "/x", "--bookie-url", fake.url).out == fake.replies["GET /x"].body


# --- which server ---------------------------------------------------------------------------------------------------


def test_the_server_is_the_one_that_the_bookie_registered(cli: Cli, fake: FakeServer, tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    port = int(fake.address.rpartition(":")[2])
    with open_cluster(uri, create=True) as there:
        for name, host, address in (("b:1", "0.0.0.0", "127.0.0.1"), ("far:1", "no-such-host.invalid", "127.0.0.2")):
            there.bookies.register(
                name,
                BookieServiceInfo(
                    (
                        BookieEndpoint("bookie", 3181, address, "bookie-rpc"),
                        BookieEndpoint("httpserver", port, host, "http"),
                    )
                ),
            )
        there.bookies.register(
            "none:1", BookieServiceInfo((BookieEndpoint("bookie", 3181, "127.0.0.1", "bookie-rpc"),))
        )
        found = cli("bookie", "state", "--bookie", "b:1", "-u", uri, "-o", "json")
        assert (found.json["bookieId"], found.json["url"]) == ("b:1", fake.url)
        assert cli("bookie", "state", "--bookie", "far:1", "-u", uri).code == 6
        near = ["--bookie-address", "far:1=127.0.0.1:3181"]
        assert cli("bookie", "state", "--bookie", "far:1", "-u", uri, *near, "-o", "json").json["url"] == fake.url
        none = cli("bookie", "state", "--bookie", "none:1", "-u", uri)
        assert (none.code, "registered no HTTP server" in none.err) == (4, True)
        assert cli("bookie", "state", "--bookie", "nobody", "-u", uri).code == 4


def test_a_configuration_names_its_bookies_server(
    cli: Cli, fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BKCTL_BOOKIE_URL")
    conf = tmp_path / "bk_server.conf"
    conf.write_text(f"httpServerEnabled=true\nhttpServerPort={fake.address.rpartition(':')[2]}\n")
    assert cli("bookie", "state", "--conf", conf, "-o", "json").json["url"] == fake.url
    conf.write_text("bookiePort=3181\n")
    answer = cli("bookie", "state", "--conf", conf)
    assert (answer.code, "httpServerEnabled" in answer.err) == (2, True)
    answer = cli("bookie", "state")
    assert (answer.code, "--bookie BOOKIE" in answer.err) == (2, True)


def test_token_is_sent_and_a_missing_one_reported(cli: Cli, fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.replies[f"GET {API}/state"] = Reply({"error": "No token"}, 401)
    answer = cli("bookie", "state")
    assert answer.code == 1
    assert "No token (401); set BKCTL_API_TOKEN" in answer.err
    fake.replies[f"GET {API}/state"] = STATE
    monkeypatch.setenv("BKCTL_API_TOKEN", "t-1")
    answer = cli("bookie", "state")
    assert (answer.code, answer.err) == (0, "")
    assert fake.asked[-1].headers["Authorization"] == "Bearer t-1"


def test_tls_needs_authorities_that_sign_the_servers_certificate(cli: Cli, pem: Path) -> None:
    secure = FakeServer(pem)
    try:
        secure.replies = apache_replies()
        there = ["bookie", "state", "--bookie-url", secure.url]
        assert cli(*there, "--tls-ca", pem, "-o", "json").json == {"bookieId": None, "url": secure.url, **STATE}
        answer = cli(*there)
        assert answer.code == 6
        assert "do not agree on TLS: self-signed certificate" in answer.err
        plain = cli("bookie", "state", "--bookie-url", secure.address)
        assert (plain.code, "https://" in plain.err) in {(6, True), (7, True)}
    finally:
        secure.close()


@pytest.mark.parametrize(
    "command",
    [
        ["gc", "--status", "--suspend"],
        ["gc", "--status", "--wait"],
        ["gc", "--suspend", "--major"],
        ["gc", "--deadline", "5s"],
        ["gc", "--watch"],
        ["gc", "--suspend=all"],
        ["ready", "--deadline", "5s"],
        ["compact-locations", "--status", "/d1/locations"],
        ["compact-locations", "--deadline", "5s"],
        ["config", "bookiePort", "--set", "a=b"],
        ["config", "--set", "a"],
        ["config", "--set", "a=1", "--set", "a=2"],
        ["metrics", "--raw", "--match", "a"],
        ["readonly", "maybe"],
        ["sanity", "--entries", "0"],
        ["sanity", "--ledger-scope-id", "7"],
        ["sanity", "--entries", "5"],
        ["sanity", "--bookie", "b:1", "--bookie-url", "http://127.0.0.1:1", "--entries", "5"],
        ["state", "--bookie-url", "nothing://x"],
    ],
    ids=" ".join,
)
def test_usage_errors_are_found_before_any_request(cli: Cli, fake: FakeServer, command: list[str]) -> None:
    answer = cli("bookie", *command)
    assert (answer.code, answer.out, len(answer.err.splitlines())) == (2, "", 1), answer.err
    assert fake.asked == []


# --- servers that misbehave -----------------------------------------------------------------------------------------

COMMANDS = (
    ["bookie", "state"], ["bookie", "ready"], ["bookie", "info"], ["bookie", "readonly", "on"],
    ["bookie", "gc", "--wait"], ["bookie", "compact-locations"], ["bookie", "sanity"], ["bookie", "config"],
    ["bookie", "metrics"], ["api", "get", "/x"],
)  # fmt: skip
OK = HEAD + b"Content-Length: 8\r\n\r\n"
MISBEHAVIOUR: dict[str, tuple[Callable[..., None], set[int]]] = {
    "no HTTP": (sends(b"\x15\x03\x01\x00\x02\x02\x28"), {7}),
    "closes": (sends(b""), {6}),
    "ends early": (sends(HEAD + b"Content-Length: 9999\r\n\r\n{"), {6}),
    "is silent": (is_silent, {6}),
    "drips": (drips(HEAD, b"A: b\r\n", 0.01), {6}),
    "sends for ever": (sends_for_ever(HEAD + b"\r\n", b"[" * 65536, [0]), {7}),
    "redirects": (sends(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\x1b[2J\r\n\r\n"), {1}),
    "steers the terminal": (sends(b"HTTP/1.1 500 No\r\nContent-Length: 8\r\n\r\n\x1b[2J\x07\r\n\xff"), {1}),
    "has another type": (sends(OK + b'[[1], 2]'), {7}),
    "has no JSON": (sends(OK + b"<html />"), {7}),
}  # fmt: skip


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_every_command_has_one_error_for_a_server_that_misbehaves(cli: Cli, name: str) -> None:
    behave, codes = MISBEHAVIOUR[name]
    with misbehaving(behave) as server:
        for command in COMMANDS:
            if name.startswith("has ") and command[1] in ("ready", "get"):
                continue  # These take any text.
            answer: Result = cli(*command, "--bookie-url", server.url, "--timeout", "0.1s" if 6 in codes else "60s")
            assert answer.code in codes, (command, answer)
            assert len(answer.err.splitlines()) == 1, (command, answer.err)
            assert answer.err.startswith("bkctl: "), (command, answer.err)
            assert "\x1b" not in answer.err, command


def test_memory_stays_flat_while_a_stream_is_printed() -> None:
    program = (
        "import re, sys; from bkctl.commands.main import run; code = run(sys.argv[1:]);"
        "print(code, re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1], file=sys.stderr)"
    )
    with misbehaving(sends_for_ever(HEAD + b"\r\n", b"x" * 65536, [0])) as server:
        arguments = ["api", "get", "/x", "--bookie-url", server.url, "--max-size", "256MiB"]
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True
        )
    code, peak_kib = map(int, done.stderr.decode().split()[-2:])
    assert code == 7
    assert peak_kib < 100 << 10
