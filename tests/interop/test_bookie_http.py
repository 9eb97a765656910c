"""The commands that ask a running bookie, against Apache's bookie and ours: the same answers from both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.command_line import Answer, CommandLine
from support.own_bookies import OwnBookie
from support.servers import DB, ApacheBookie, format_cluster, free_port, wait_for

from bkctl.metadata.cluster import open_cluster

SHAPE = ["--ensemble-size", "1", "--write-quorum", "1", "--ack-quorum", "1"]


@dataclass
class Place:
    """A cluster of one bookie with an HTTP server."""

    uri: str
    bookie: ApacheBookie | OwnBookie
    url: str

    @property
    def is_ours(self) -> bool:
        return isinstance(self.bookie, OwnBookie)

    def ask(self, *command: object) -> Answer:
        """Run a command about the bookie."""
        return CommandLine(self.uri)(*command, "--bookie", self.bookie.bookie_id, "-o", "ndjson")

    def row(self, *command: object) -> dict[str, Any]:
        """The one row of a command about the bookie that went well."""
        (row,) = self.ask(*command).rows
        return row

    def ledgers(self) -> list[str]:
        return CommandLine(self.uri)("ledger", "list", "--all-scopes", "-o", "id").ids

    def write(self, path: Path, *options: str) -> str:
        """Write a small ledger: its id."""
        path.write_text("one\ntwo\n")
        (ledger,) = CommandLine(self.uri)("ledger", "write", path, *SHAPE, *options, "-o", "id").ids
        return ledger


@pytest.fixture(scope="module", params=[pytest.param("apache", marks=pytest.mark.releases), "own"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory, port = tmp_path_factory.mktemp("place"), free_port()
    settings = {"httpServerEnabled": "true", "httpServerPort": port, "httpServerHost": "127.0.0.1"}
    if request.param == "apache":
        zookeeper, java = request.getfixturevalue("zookeeper"), request.getfixturevalue("java")
        settings["httpServerClass"] = "org.apache.bookkeeper.http.vertx.VertxHttpServer"
        uri = zookeeper.metadata_uri(zookeeper.new_root())
        format_cluster(java, uri, directory)
        bookie: ApacheBookie | OwnBookie = ApacheBookie(java, uri, directory / "bookie", DB, settings=settings)
    else:
        settings["gcScopedDeleteCountMin"] = 2
        uri = f"sqlite://{directory / 'metadata.db'}"
        open_cluster(uri, create=True).close()
        bookie = OwnBookie(uri, directory / "bookie", storage=DB, settings=settings)
    try:
        bookie.start()
        yield Place(uri, bookie, f"http://127.0.0.1:{port}")
    finally:
        bookie.kill()


def test_a_bookie_is_asked_at_the_server_that_it_registered(place: Place) -> None:
    where = {"bookieId": place.bookie.bookie_id, "url": place.url}
    state = {"running": True, "readOnly": False, "shuttingDown": False, "availableForHighPriorityWrites": True}
    assert place.row("bookie", "state") == {**where, **state}
    assert place.row("bookie", "ready", "--wait", "--deadline", "60s") == {**where, "ready": True, "message": "OK"}
    info = place.row("bookie", "info")
    assert info.items() >= {**where, **state}.items()
    assert 0 < info["freeSpace"] < info["totalSpace"]
    assert info["usedSpace"] == info["totalSpace"] - info["freeSpace"]
    by_url = CommandLine(None)("bookie", "state", "--bookie-url", place.url, "-o", "ndjson").rows
    assert by_url == [{"bookieId": None, "url": place.url, **state}]


def test_a_bookie_is_made_read_only_and_writable_again(place: Place) -> None:
    def registered() -> str:
        (row,) = CommandLine(place.uri)("bookies", "list", "-o", "ndjson").rows
        return str(row["state"])

    on = place.ask("bookie", "readonly", "on")
    try:
        assert on.rows[0]["readOnly"] is True
        assert "accepts no more entries and serves reads" in on.err
        assert place.row("bookie", "state")["readOnly"] is True
        wait_for(lambda: registered() == "ro", "the bookie registered as read-only")
        refused = place.ask("bookie", "sanity")
        assert (refused.code, b'"readOnly":true' in refused.out) == (3, True)
    finally:
        off = place.ask("bookie", "readonly", "off")
    assert off.rows[0]["readOnly"] is False
    wait_for(lambda: registered() == "rw", "the bookie registered as writable")
    assert place.row("bookie", "readonly")["readOnly"] is False


def test_a_forced_round_is_waited_for(place: Place, tmp_path: Path) -> None:
    ledger = place.write(tmp_path / "lines")
    assert CommandLine(place.uri)("ledger", "delete", ledger, "--yes").code == 0
    before = place.row("bookie", "gc", "--status")
    for options in ([], ["--major"], ["--minor"]):
        after = place.row("bookie", "gc", *options, "--wait", "--deadline", "120s")
        assert (after["isInForceGc"], after["forceCompacting"]) == (False, False)
    assert after["lastMajorCompactionTime"] > before["lastMajorCompactionTime"]


def test_compactions_are_suspended_and_resumed(place: Place) -> None:
    def suspended(*options: str) -> tuple[bool, bool]:
        row = place.row("bookie", "gc", *options)
        return row["isMajorGcSuspended"], row["isMinorGcSuspended"]

    assert suspended("--status") == (False, False)
    assert suspended("--suspend") == (True, True)
    assert suspended("--resume", "minor") == (True, False)
    assert suspended("--resume") == (False, False)
    assert suspended("--suspend", "minor") == (False, True)
    assert suspended("--resume") == (False, False)


def test_databases_of_entry_locations_are_compacted(place: Place) -> None:
    plain = str(place.bookie.ledger_dir / "current" / "locations")
    row = place.row("bookie", "compact-locations", plain, "--wait", "--deadline", "120s")
    assert row == {"path": plain, "compacting": False, "applied": True}
    assert plain in [row["path"] for row in place.ask("bookie", "compact-locations", "--status").rows]


def test_a_sanity_test_passes_and_leaves_nothing(place: Place) -> None:
    before = place.ledgers()
    row = place.row("bookie", "sanity", "--entries", "5")
    assert (row["passed"], row["readOnly"], row["entryCount"]) == (True, False, 5)
    by_url = CommandLine(None)("bookie", "sanity", "--bookie-url", place.url, "-o", "ndjson").rows
    assert by_url == [{"bookieId": None, "url": place.url, "passed": True, "readOnly": False}]
    scoped = place.ask("bookie", "sanity", "--ledger-scope-id", "7")
    assert scoped.code == (0 if place.is_ours else 6), scoped.err
    assert place.ledgers() == before


def test_settings_are_shown_and_changed(place: Place) -> None:
    (port,) = place.ask("bookie", "config", "bookiePort").rows
    assert (port["name"], str(port["value"])) == ("bookiePort", str(place.bookie.port))
    (changed,) = place.ask("bookie", "config", "--set", "flushInterval=2000").rows
    assert (changed["name"], str(changed["value"])) == ("flushInterval", "2000")
    assert place.ask("bookie", "config", "noSuchSetting").code == 4


def test_metrics_are_rows_or_name_the_missing_provider(place: Place) -> None:
    place.row("bookie", "sanity")
    answer = place.ask("bookie", "metrics", "--match", "bookkeeper_server_ADD_ENTRY_count")
    if place.is_ours:
        assert sum(row["value"] for row in answer.rows if row["labels"]["success"] == "true") >= 10
    else:
        assert answer.problem.endswith(
            "statsProviderClass=org.apache.bookkeeper.stats.prometheus.PrometheusMetricsProvider"
        )


def test_raw_calls_read_change_and_delete(place: Place, tmp_path: Path) -> None:
    assert place.ask("api", "get", "/heartbeat").out == b"OK\n"
    put = place.ask("api", "put", "bookie/gc/suspend_compaction", "--body", '{"suspendMajor": true}')
    assert put.code == 0, put.err
    assert place.row("bookie", "gc", "--resume")["isMajorGcSuspended"] is False
    ledger = place.write(tmp_path / "lines")
    assert place.ask("api", "delete", f"ledger/delete?ledger_id={ledger}").code == 2
    assert ledger in place.ledgers()
    assert place.ask("api", "delete", f"ledger/delete?ledger_id={ledger}", "--yes").code == 0
    assert ledger not in place.ledgers()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["get", "/no/such/path"], {4, 8}),
        (["put", "bookie/state/readonly", "--body", '{"readOnly": "perhaps"}'], {1}),
        (["put", "bookie/gc", "--body", "[]"], {1}),
        (["put", "bookie/gc/suspend_compaction"], {1}),
    ],
    ids=str,
)
def test_request_that_a_bookie_refuses_is_one_error(place: Place, arguments: list[str], code: set[int]) -> None:
    answer = place.ask("api", *arguments)
    assert answer.code in code
    assert place.url in answer.problem


@pytest.mark.parametrize("place", ["own"], indirect=True)
def test_a_round_that_holds_deletes_of_scopes_back_is_a_finding(place: Place, tmp_path: Path) -> None:
    ledgers = [place.write(tmp_path / "lines", "--ledger-scope-id", "7") for _ in range(3)]
    assert CommandLine(place.uri)("ledger", "delete", *ledgers, "--yes").code == 0
    held = place.ask("bookie", "gc", "--wait", "--deadline", "120s")
    assert held.code == 3, held.err
    assert b'"scopedDeletesHeldBack":"' in held.out
    assert "--accept-scoped-deletes" in held.err
    assert place.ask("bookie", "gc", "--accept-scoped-deletes", "--wait").code == 2  # it asks
    accepted = place.ask("bookie", "gc", "--accept-scoped-deletes", "--yes", "--wait", "--deadline", "120s")
    assert accepted.code == 0, accepted.err
    assert "scopedDeletesHeldBack" not in place.row("bookie", "gc", "--wait", "--deadline", "120s")
