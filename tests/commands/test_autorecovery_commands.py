"""`bkctl autorecovery` on a store alone: what it prints, refuses and leaves behind."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import CommandLine

from bkctl.errors import BkctlError
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.admin.overview import walk
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import NEW
from bkctl.metadata.underreplication import AuditorCheck, AuditorElection, AutoRecoveryState, mark_path

from .conftest import Cli, applied

LEDGERS = [LedgerId(0, 5), LedgerId(0, 6), LedgerId(7, 5)]
NAMES = [str(ledger) for ledger in LEDGERS]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    uri = f"sqlite://{tmp_path}/m.db"
    monkeypatch.setenv("BKCTL_METADATA_URI", uri)
    with open_cluster(uri, create=True) as cluster:
        for ledger in LEDGERS:
            metadata = LedgerMetadata(2, 2, 2, DigestType.CRC32C, b"", (Fragment(0, ("b0:1", "b1:1")),))
            cluster.ledgers.create(ledger, metadata)
        yield cluster


@pytest.fixture
def state(store: Cluster) -> AutoRecoveryState:
    return AutoRecoveryState(store.store)


def test_missing_store_is_not_found_and_not_created(cli: Cli, tmp_path: Path) -> None:
    for words in (["status"], ["list"], ["enable"], ["disable"], ["workers"], ["auditor"], ["delay", "5"]):
        result = cli("autorecovery", *words, "-u", f"sqlite://{tmp_path}/none.db")
        assert (result.code, result.out) == (4, "")
    assert not (tmp_path / "none.db").exists()


def test_switches_say_whether_they_changed_anything(cli: Cli, store: Cluster) -> None:
    for word, enabled in (("disable", False), ("enable", True)):
        for changed in (True, False):
            result = cli("autorecovery", word, "-o", "json")
            assert (result.code, result.json) == (0, {"enabled": enabled, "changed": changed})
        assert cli("autorecovery", "status", "-o", "json").json["enabled"] is enabled


@pytest.mark.parametrize(
    "words",
    [
        ("autorecovery", "disable"),
        ("autorecovery", "delay", "90"),
        ("autorecovery", "mark", "5", "--missing", "b1:1"),
        ("autorecovery", "audit", "--reset-clock", "placement"),
        ("cluster", "healthcheck", "disable"),
    ],
    ids=" ".join,
)
def test_changes_are_undone_and_done_again_by_the_last_undo_file(
    cli: Cli, store: Cluster, words: tuple[str, ...]
) -> None:
    def nodes() -> list[tuple[str, bytes]]:
        """Return the nodes that say something: parents without a value may stay."""
        found = [(node.path, node.found.value) for node in walk(store.store) if node.found is not None]
        return [(path, value) for path, value in found if value or "disable" in path]

    assert cli("autorecovery", "mark", "6", "--missing", "b1:1").code == 0
    AutoRecoveryState(store.store).settings.set_check_ctime_ms(AuditorCheck.PLACEMENT_POLICY, 1)
    before = nodes()
    assert cli(*words).code == 0
    after = nodes()
    assert before != after
    for expected in (before, after, before):
        assert cli("metadata", "undo", "--last", "--dry-run").code == 0
        undone = cli("metadata", "undo", "--last", "--yes")
        assert undone.code == 0, undone.err
        assert nodes() == expected


def test_a_command_that_changed_nothing_is_not_the_last_one(cli: Cli, store: Cluster) -> None:
    first = cli("--no-color", "autorecovery", "disable")
    again = cli("autorecovery", "disable")
    assert ("Undo it with" in first.err, "Undo it with" in again.err) == (True, False)
    [row] = cli("metadata", "undo", "--list", "-o", "ndjson").rows
    refused = '{"path":"underreplication/disable","before":null,"after":""}\n{"void":"underreplication/disable"}\n'
    kept = Path(row["file"])
    assert "-autorecovery-disable-" in kept.name
    (kept.parent / "29990101T000000Z-of-an-older-bkctl.ndjson").write_text(
        kept.read_text().partition("\n")[0].replace(row["time"], "2999-01-01T00:00:00Z") + f"\n{refused}"
    )
    assert cli("metadata", "undo", "--last", "--yes").code == 0
    assert cli("autorecovery", "status", "-o", "json").json["enabled"] is True


@pytest.mark.usefixtures("store")
def test_an_undo_that_did_not_end_is_not_taken_back_by_the_same_words(cli: Cli) -> None:
    assert cli("autorecovery", "disable").code == 0
    [disabled] = cli("metadata", "undo", "--list", "-o", "ndjson").rows
    assert cli("metadata", "undo", "--last", "--yes").code == 0
    undone = Path(cli("metadata", "undo", "--list", "-o", "ndjson").rows[-1]["file"])
    text = undone.read_text()
    assert text.endswith('{"end":true}\n{"changes":1}\n')
    undone.write_text(text.removesuffix('{"end":true}\n{"changes":1}\n'))
    again = cli("metadata", "undo", "--last", "--yes")
    assert (again.code, again.out) == (5, "")
    assert f"'bkctl metadata undo {disabled['file']}' continues it" in again.err
    assert cli("metadata", "undo", disabled["file"], "--yes").code == 0
    assert cli("metadata", "undo", "--last", "--yes").code == 0
    assert cli("autorecovery", "status", "-o", "json").json["enabled"] is False


def test_on_a_terminal_the_last_change_is_undone_after_a_question(cli: Cli, store: Cluster) -> None:
    line = CommandLine(store.uri)
    assert cli("autorecovery", "disable").code == 0
    code, seen = line.terminal("metadata", "undo", "--last", type_in="n\n")
    assert (code, "Declined; nothing was changed" in seen) == (1, True)
    code, seen = line.terminal("metadata", "undo", "--last", type_in="y\n")
    assert (code, "bkctl autorecovery disable" in seen) == (0, True)
    assert cli("autorecovery", "status", "-o", "json").json["enabled"] is True


def test_on_a_terminal_wide_tables_are_not_cut_and_chosen_columns_are_in_order(cli: Cli, store: Cluster) -> None:
    line = CommandLine(store.uri)
    _, wide = line.terminal("--no-color", "ledger", "list", "-o", "wide", columns=60)
    assert {"ENSEMBLES", "FORMAT"} <= set(wide.split())
    assert "…" not in wide
    words = ("ledger", "list", "--columns", "state,ledger", "--sort=-ledger")
    _, chosen = line.terminal("--no-color", *words, columns=60)
    assert [row.split() for row in chosen.splitlines()] == [["STATE", "LEDGER"], ["OPEN", "6"], ["OPEN", "5"]]


def test_undo_lists_files_and_asks_for_one(cli: Cli, store: Cluster, tmp_path: Path) -> None:
    assert cli("metadata", "undo", "--list").out.split() == ["FILE", "CHANGES", "COMMAND", "CLUSTER"]
    assert cli("metadata", "undo", "--last", "--yes").code == 4
    assert "FILE, --last or --list is needed" in cli("metadata", "undo").err
    several = cli("metadata", "undo", "file", "--last", "--list")
    assert (several.code, several.err) == (2, "bkctl: FILE and --last and --list are given; give one of them\n")
    assert cli("autorecovery", "disable", "--undo", "none").code == 0
    assert cli("metadata", "undo", "--list", "-o", "json").json == []
    assert cli("autorecovery", "delay", "5").code == 0
    with open_cluster(f"sqlite://{tmp_path}/other.db", create=True):
        assert cli("metadata", "undo", "--last", "--yes", "-u", f"sqlite://{tmp_path}/other.db").code == 4
    [row] = cli("metadata", "undo", "--list", "-o", "ndjson").rows
    assert (row["command"], row["instanceId"]) == ("bkctl autorecovery delay 5", store.instance_id())
    assert cli("metadata", "undo", row["file"], "--dry-run").code == 0
    name = Path(row["file"]).name
    _, table = CommandLine(store.uri).terminal("--no-color", "metadata", "undo", "--list", columns=80)
    assert name in table
    assert cli("metadata", "undo", name, "--yes").code == 0


def test_ledgers_of_every_scope_are_marked_listed_and_unmarked(
    cli: Cli, state: AutoRecoveryState, tmp_path: Path
) -> None:
    planned = cli("autorecovery", "mark", *NAMES, "--missing", "b1:1", "--dry-run", "-o", "ndjson").rows
    assert not state.marks.has_marks()
    assert cli("autorecovery", "mark", *NAMES, "--missing", "b1:1", "-o", "ndjson").rows == applied(planned)
    again = cli("autorecovery", "mark", NAMES[0], "--missing", "b1:1", "-o", "json")
    assert again.json[0]["changed"] is False
    assert again.err.startswith(f"Ledger {LEDGERS[0]} was marked for b1:1 already\n")
    assert cli("autorecovery", "list", "-o", "id").out.split() == NAMES
    assert cli("autorecovery", "list", "--ledger-scope-id", 7, "-o", "id").out.split() == NAMES[2:]
    assert cli("autorecovery", "list", "--missing", "b0:1", "-o", "json").json == []
    assert cli("autorecovery", "list", "--not-missing", "b1:1", "--count", "-o", "json").json == {"count": 0}
    assert cli("autorecovery", "list", "--older-than", "1h", "-o", "json").json == []
    [row] = cli("autorecovery", "list", "--ledger-scope-id", 7, "-o", "json").json
    assert (row["missingReplicas"], row["worker"]) == (["b1:1"], None)

    undo = tmp_path / "undo"
    assert cli("autorecovery", "unmark", *NAMES).code == 2
    assert cli("autorecovery", "unmark", *NAMES, "--dry-run", "-o", "id").out.split() == NAMES
    assert cli("autorecovery", "unmark", *NAMES, "--yes", "--undo", undo).code == 0
    assert not state.marks.has_marks()
    again = cli("autorecovery", "unmark", NAMES[0])
    assert (again.code, again.err) == (0, f"Ledger {LEDGERS[0]} is not marked as under-replicated\n")
    assert cli("metadata", "undo", undo, "--yes").code == 0
    assert cli("autorecovery", "list", "--count", "-o", "json").json == {"count": 3}


def test_nothing_is_marked_where_one_ledger_cannot_be(cli: Cli, state: AutoRecoveryState) -> None:
    result = cli("autorecovery", "mark", NAMES[0], "99", "--missing", "b0:1")
    assert (result.code, result.out) == (4, "")
    result = cli("autorecovery", "mark", *NAMES, "--missing", "b9:1")
    assert result.code == 2
    assert "b9:1 is in no ensemble of ledger 5" in result.err
    assert cli("autorecovery", "mark", NAMES[0]).code == 2
    assert not state.marks.has_marks()


def test_damaged_mark_is_reported_and_can_be_removed(cli: Cli, store: Cluster) -> None:
    store.store.put(mark_path(LEDGERS[0]), b"\xff damage", -1)
    result = cli("autorecovery", "list")
    assert result.code == 7
    assert "0005" in result.err
    assert cli("autorecovery", "unmark", NAMES[0], "--yes").code == 0
    assert cli("autorecovery", "list", "-o", "json").json == []


def test_workers_lists_each_worker_with_its_ledgers(cli: Cli, store: Cluster) -> None:
    state = AutoRecoveryState(store.store)
    state.marks.add(LEDGERS[2], ["b0:1"])
    state.locks.lock(LEDGERS[2], "host-1")
    [row] = cli("autorecovery", "workers", "-o", "json").json
    assert (row["ledgerQualifiedName"], row["worker"], row["length"]) == (NAMES[2], "host-1", 0)
    assert cli("autorecovery", "list", "-o", "json").json[0]["worker"] == "host-1"
    assert cli("autorecovery", "status", "-o", "json").json["lockedLedgerCount"] == 1


def test_the_delay_can_be_none_and_is_checked(cli: Cli, state: AutoRecoveryState) -> None:
    assert cli("autorecovery", "delay", "-o", "json").json == {"lostBookieRecoveryDelay": 0, "stored": False}
    assert cli("autorecovery", "delay", "90", "--dry-run").code == 0
    assert state.settings.lost_bookie_recovery_delay_s() is None
    for text, seconds in (("90", 90), ("2m", 120), ("0", 0)):
        assert cli("autorecovery", "delay", text, "-o", "json").json["lostBookieRecoveryDelay"] == seconds
        assert state.settings.lost_bookie_recovery_delay_s() == seconds
    for text in ("1.5", "soon", "99999999d"):
        assert cli("autorecovery", "delay", text).code == 2
    assert state.settings.lost_bookie_recovery_delay_s() == 0


def test_an_audit_needs_an_auditor_and_auto_recovery(cli: Cli, store: Cluster) -> None:
    assert cli("autorecovery", "audit").code == 4
    assert cli("autorecovery", "audit", "--dry-run").code == 4
    for name, bookie_id in (("V_0000000009", "b1:1"), ("V_0000000003", "b0:1")):
        store.store.put(f"underreplication/auditorelection/{name}", f'bookieId: "{bookie_id}"\n'.encode(), -1)
    assert cli("autorecovery", "auditor", "-o", "id").out == "b0:1\n"
    assert cli("autorecovery", "auditor", "--all", "-o", "id").out == "b0:1\nb1:1\n"
    assert cli("autorecovery", "audit", "-o", "id").out == "b0:1\n"
    cli("autorecovery", "disable")
    for more in ([], ["--dry-run"]):
        assert cli("autorecovery", "audit", *more).code == 5


def test_one_damaged_record_hides_no_other(cli: Cli, store: Cluster) -> None:
    votes = {"auditorelection/V_0000000001": b"\xff", "auditorelection/V_0000000002": b'bookieId: "b2:1"'}
    votes["scopes/auditorelection/V_0000000001"] = b'bookieId: "b3:1"'
    for name, value in votes.items():
        store.store.put(f"underreplication/{name}", value, NEW)
    found = cli("autorecovery", "status")
    assert (found.code, "b3:1" in found.out, "V_0000000001" in found.err) == (7, True, True)
    for more, ids in (([], "b3:1\n"), (["--all"], "b2:1\nb3:1\n")):
        found = cli("autorecovery", "auditor", *more, "-o", "id")
        assert (found.code, found.out, "V_0000000001" in found.err) == (7, ids, True)
    store.store.put("underreplication/lostBookieRecoveryDelay", b"never", None)
    found = cli("autorecovery", "status")
    assert (found.code, "b3:1" in found.out, "V_0000000001" in found.err) == (7, True, True)


def test_status_calls_nothing_replicated_that_nobody_audits(cli: Cli, store: Cluster) -> None:
    def status() -> tuple[object, object]:
        row = cli("autorecovery", "status", "-o", "json").json
        return row["underReplicated"], row.get("notAudited")

    assert status() == (None, "never audited")
    assert "never audited" in cli("autorecovery", "status").out
    vote = "underreplication/auditorelection/V_0000000001"
    scoped_vote = "underreplication/scopes/auditorelection/V_0000000001"
    store.store.put(vote, b'bookieId: "b1:1"', NEW)
    assert status() == (None, "never audited in ledger scopes"), "scope 0's auditor looks at no ledger of other scopes"
    scoped = [ledger for ledger in store.ledgers.ledgers(None) if ledger.is_scoped]
    kept = {ledger: store.ledgers.read(ledger).metadata for ledger in scoped}
    for ledger in scoped:
        store.ledgers.remove(ledger, None)
    assert status() == (False, None)
    for ledger, metadata in kept.items():
        store.ledgers.create(ledger, metadata)
    store.store.put(scoped_vote, b'bookieId: "b1:1"', NEW)
    assert status() == (False, None)
    assert cli("cluster", "info", "-o", "json").json["clusterUnderReplicated"] is False
    store.store.delete(vote)
    assert cli("cluster", "info", "-o", "json").json["clusterUnderReplicated"] is None
    assert status() == (None, "never audited"), "the scopes' auditor looks at no ledger of scope 0"
    store.store.put(vote, b'bookieId: "b1:1"', NEW)
    cli("autorecovery", "disable")
    assert status() == (None, "never audited")
    cli("autorecovery", "enable")
    store.store.delete(vote)
    AutoRecoveryState(store.store).settings.set_check_ctime_ms(AuditorCheck.ALL_LEDGERS, 1_700_000_000_000)
    assert status() == (None, "not audited since 2023-11-14T22:13:20Z")
    AutoRecoveryState(store.store).marks.add(LedgerId(0, 1), ["b1:1"])
    assert status()[0] is True


def test_clocks_are_set_back(cli: Cli, store: Cluster) -> None:
    assert cli("autorecovery", "audit", "--reset-clock", "all-ledgers,nonsense").code == 2
    planned = cli("autorecovery", "audit", "--reset-clock", "all-ledgers,replicas", "--dry-run", "-o", "json").json
    assert [row["check"] for row in planned] == ["all-ledgers", "replicas"]
    assert cli("autorecovery", "status", "-o", "json").json["checkAllLedgersTime"] is None
    assert [row["after"] for row in planned] == [None, None], "checks that never ran are due"
    assert cli("autorecovery", "audit", "--reset-clock", "all-ledgers,replicas").code == 0
    assert cli("autorecovery", "status", "-o", "json").json["checkAllLedgersTime"] is None
    settings, now_ms = AutoRecoveryState(store.store).settings, time.time_ns() // 1_000_000
    settings.set_check_ctime_ms(AuditorCheck.ALL_LEDGERS, now_ms)
    settings.set_check_ctime_ms(AuditorCheck.REPLICAS, now_ms, scoped=True)
    assert cli("autorecovery", "audit", "--reset-clock", "all-ledgers,replicas,placement").code == 0
    week_ms = 7 * 24 * 3600 * 1000
    assert (settings.check_ctime_ms(AuditorCheck.ALL_LEDGERS) or now_ms) < now_ms - week_ms
    assert (settings.check_ctime_ms(AuditorCheck.REPLICAS, scoped=True) or now_ms) < now_ms - week_ms
    assert settings.check_ctime_ms(AuditorCheck.REPLICAS) is None
    assert settings.check_ctime_ms(AuditorCheck.PLACEMENT_POLICY, scoped=True) is None

    done = cli("autorecovery", "audit", "--reset-clock", "all-ledgers,replicas")
    assert done.code == 0
    assert "replicas runs only if the auditor's auditorReplicasCheckInterval is above 0" in done.err
    assert "auditorPeriodicPlacementPolicyCheckInterval" not in done.err
    status = cli("autorecovery", "status", "-o", "json").json
    assert status["checkAllLedgersTime"] is not None
    assert status["placementPolicyCheckTime"] is None


def test_auto_recovery_without_a_scope_or_a_cluster_is_refused(cli: Cli, store: Cluster, tmp_path: Path) -> None:
    result = cli("autorecovery", "run", "--scopes-only", "--scope-0-only")
    assert (result.code, result.out) == (2, "")
    result = cli("autorecovery", "run", "-u", f"sqlite://{tmp_path}/none.db")
    assert (result.code, result.out) == (4, "")
    result = cli("autorecovery", "run", "--id", "no bookie")
    assert (result.code, result.out) == (2, "")
    store.store.put("underreplication/LAYOUT", b'type: "BASIC"\nversion: 2\n', None)
    assert cli("autorecovery", "run").code == 8


def test_auto_recovery_speaks_tls_to_bookies_as_its_configuration_says(
    cli: Cli, store: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography.x509")
    from support.certificates import write_pair

    own, conf = tmp_path / "own.pem", tmp_path / "bookkeeper.conf"
    write_pair(own, own, 1)
    taken: list[object] = []

    def take(*_: object, tls: object, **__: object) -> None:
        taken.append(tls)
        raise BkctlError("enough")

    monkeypatch.setattr("bkctl.replication.daemon.AutoRecovery", take)
    uri = store.store.name.replace("metadata store ", "sqlite://")
    for more in ("", f"tlsProviderFactoryClass=x\ntlsTrustStore={own}\ntlsCertificatePath={own}\ntlsKeyStore={own}\n"):
        conf.write_text(f"metadataServiceUri={uri}\nbookieId=b1:1\n{more}")
        refused = cli("autorecovery", "run", "--conf", conf)
        assert (refused.code, "enough" in refused.err) == (1, True), refused.err
    assert [type(each) for each in taken] == [type(None), ssl.SSLContext]


def test_an_audit_is_asked_of_the_auditor_that_there_is(cli: Cli, state: AutoRecoveryState, store: Cluster) -> None:
    assert cli("autorecovery", "audit").code == 4
    with open_cluster(f"{store.store.name.replace('metadata store ', 'sqlite://')}") as other:
        vote = AuditorElection(other.store).vote("scoped:1", scoped=True)
        before = state.settings.delay_version()
        assert cli("autorecovery", "audit", "--dry-run", "-o", "id").out.split() == ["scoped:1"]
        assert state.settings.delay_version() == before
        assert cli("autorecovery", "audit", "-o", "id").out.split() == ["scoped:1"]
        assert state.settings.delay_version() != before
        vote.release()
