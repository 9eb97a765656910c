"""The commands on a whole cluster's metadata beside Apache's shell, classes, bookies and auto-recovery."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.servers import ApacheBookie, Java, ZooKeeperServer, conversation, read_ledgers, shell_conf, wait_for

from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.store import NEW

pytestmark = pytest.mark.java

#: Each range of ids that Apache's layouts have.
IDS = [7, (1 << 31) - 2, (1 << 31) - 1, 1 << 40, (1 << 63) - 2]
SCOPED = LedgerId(7, 5)
PASSWORD = base64.b64encode(b"secret").decode()

Ask = Callable[..., dict[str, Any]]
Shell = Callable[..., list[str]]
Bookie = Callable[..., ApacheBookie]


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo files go to the test's own directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def shell_of(java: Java, uri: str, directory: Path) -> Shell:
    """Apache's shell on a root: the lines that it answers, without the times of the store."""
    conf = shell_conf(directory / f"{uri.rpartition('/')[2]}.conf", uri)

    def shell(*words: object) -> list[str]:
        text = java.shell(conf, *words, check=True).stdout
        return [line for line in text.splitlines() if line.strip()]

    return shell


def without_ctimes(lines: list[str]) -> list[str]:
    """Ledger metadata without the time when the store created its node, which no copy can keep."""
    return sorted(re.sub(r"ctime=-?\d+", "ctime", line) for line in lines)


def words_of(lines: list[str]) -> list[str]:
    return re.findall(r"[\w.:-]+", " ".join(lines))


@pytest.fixture(scope="module")
def written(java: Java, zookeeper: ZooKeeperServer) -> str:
    """A root that Apache's classes filled: ledgers of every id range and metadata version, marks, a cookie."""
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    cli = CommandLine(uri)
    assert cli("cluster", "init").code == 0
    with conversation(java, "LedgerMetadataStore", uri) as ask:
        for _ in range(3):
            ask("create", ask("id")["ledgerId"])
        for ledger_id in IDS:
            ask("create", ledger_id)
        ask("close", IDS[2], 0)
    with conversation(java, "Underreplication", uri) as ask:
        ask("mark", IDS[0], "127.0.0.1:3181")
        ask("mark", IDS[3], "127.0.0.1:3181", "bookie-2")
        ask("delay", 60)
        ask("clocks", 1_700_000_000_001, 1_700_000_000_002, 1_700_000_000_003)
    lines = map(json.loads, java.run_source("MetadataBytes").stdout.splitlines())
    with open_cluster(uri) as cluster:
        for number, line in enumerate(lines, 100):
            value = base64.b64decode(line["bytes"])
            cluster.store.put(cluster.ledgers.path(LedgerId(0, number)), value, NEW)
        cluster.ledgers.create(SCOPED, cluster.ledgers.read(LedgerId(0, IDS[2])).metadata)
    return uri


COOKIE = "127.0.0.1:3181"


@pytest.fixture
def source(written: str, tmp_path: Path) -> CommandLine:
    cli = CommandLine(written)
    if COOKIE not in cli("cookie", "list", "-o", "id").ids:
        file = tmp_path / "cookie"
        made = cli("cookie", "generate", COOKIE, "--journal-dirs", "/j", "--ledger-dirs", "/l", "-f", file)
        assert made.code == 0, made.err
        assert cli("cookie", "create", COOKIE, "-f", file).code == 0
    return cli


def new_place(zookeeper: ZooKeeperServer) -> CommandLine:
    return CommandLine(zookeeper.metadata_uri(zookeeper.new_root()))


def test_apache_sees_the_same_on_a_root_that_an_export_was_imported_into(
    source: CommandLine, zookeeper: ZooKeeperServer, java: Java, tmp_path: Path
) -> None:
    file, target = tmp_path / "export", new_place(zookeeper)
    uris = [each.settings["METADATA_URI"] for each in (source, target)]
    assert source("metadata", "export", "-f", file).code == 0
    planned = target("metadata", "import", "-f", file, "--dry-run", "-o", "ndjson").rows
    with pytest.raises(AssertionError, match="No BookKeeper cluster"):
        assert target("cluster", "id", "-o", "id").ids
    imported = target("metadata", "import", "-f", file, "-o", "ndjson").rows
    assert imported == [row | {"applied": True} for row in planned]
    assert target("metadata", "diff", uris[0], "-o", "id").ids == []
    again = target("metadata", "import", "-f", file, "-o", "ndjson").rows
    assert [row["same"] for row in again] == [row["created"] for row in imported]

    theirs, ours = (shell_of(java, uri, tmp_path) for uri in uris)
    listed = without_ctimes(theirs("listledgers", "-m"))
    assert without_ctimes(ours("listledgers", "-m")) == listed
    assert {str(ledger_id) for ledger_id in IDS} <= set(words_of(listed))
    for words in (
        ("listunderreplicated", "-printmissingreplica"), ("whatisinstanceid",), ("cookie_get", COOKIE),
        ("lostbookierecoverydelay", "-get"),
    ):  # fmt: skip
        expected = [line.replace(uris[0], uris[1]) for line in theirs(*words)]
        assert ours(*words) == expected
        assert expected
    one = ("ledgermetadata", "-ledgerid", IDS[-1])
    assert without_ctimes(ours(*one)) == without_ctimes(theirs(*one))
    assert target("ledger", "show", str(SCOPED), "-o", "id").ids == [str(SCOPED)]


@pytest.mark.parametrize("long", [False, True], ids=["31 bits", "63 bits"])
def test_apache_generates_no_id_again_on_an_imported_root(
    zookeeper: ZooKeeperServer, java: Java, tmp_path: Path, long: bool
) -> None:
    source, target = new_place(zookeeper), new_place(zookeeper)
    assert source("cluster", "init").code == 0
    if long:
        with open_cluster(source.settings["METADATA_URI"]) as cluster:
            cluster.store.put("idgen-long/HOB-0000000003", b"", NEW)
    with conversation(java, "LedgerMetadataStore", source.settings["METADATA_URI"]) as ask:
        taken = [int(ask("id")["ledgerId"]) for _ in range(5)]  # none of them is a ledger any more
    assert source("metadata", "export", "-f", tmp_path / "export").code == 0
    assert target("metadata", "import", "-f", tmp_path / "export").code == 0
    with conversation(java, "LedgerMetadataStore", target.settings["METADATA_URI"]) as ask:
        assert int(ask("id")["ledgerId"]) > max(taken)


@pytest.mark.parametrize("kind", ["etcd", "hbase"])
def test_metadata_migrated_to_another_store_and_back_is_unchanged(
    request: pytest.FixtureRequest, source: CommandLine, zookeeper: ZooKeeperServer, java: Java, kind: str
) -> None:
    server = request.getfixturevalue(kind)
    middle, back = CommandLine(server.metadata_uri(server.new_root())), new_place(zookeeper)
    uris = [each.settings["METADATA_URI"] for each in (source, middle, back)]
    for one, other in ((source, uris[1]), (middle, uris[2])):
        moved = one("metadata", "migrate", "--to", other, "-o", "ndjson")
        assert moved.code == 0, moved.err
    for uri in uris[1:]:
        assert source("metadata", "diff", uri, "-o", "id").ids == []
    with open_cluster(uris[0]) as first, open_cluster(uris[2]) as last:
        ledgers = list(first.ledgers.ledgers(None))
        assert list(last.ledgers.ledgers(None)) == ledgers
        for path in ["INSTANCEID", "LAYOUT", f"cookies/{COOKIE}", *map(first.ledgers.path, ledgers)]:
            assert first.store.get(path)[0] == last.store.get(path)[0]  # type: ignore[index]
    with conversation(java, "LedgerMetadataStore", uris[2]) as ask:
        assert sorted(map(int, ask("list")["ledgerIds"])) == [each.ledger_id for each in ledgers if not each.is_scoped]
        assert ask("close", IDS[3], 0)["version"] == 1
    assert back("metadata", "diff", uris[0], "-o", "ndjson").code == 3


def test_apaches_shell_reads_a_cluster_that_changes_its_layout(
    source: CommandLine, zookeeper: ZooKeeperServer, java: Java, tmp_path: Path
) -> None:
    managers = ("flat", "hierarchical", "longhierarchical")
    uris = [zookeeper.metadata_uri(zookeeper.new_root(), manager) for manager in managers]
    assert CommandLine(uris[0])("cluster", "init").code == 0
    with conversation(java, "LedgerMetadataStore", uris[0]) as ask:
        taken = [int(ask("id")["ledgerId"]) for _ in range(3)]
        for ledger_id in (*taken, (1 << 31) - 2, (1 << 31) + 5):
            ask("create", ledger_id)
    shells = [shell_of(java, uri, tmp_path) for uri in uris]
    for at, (name, wider) in enumerate((("Flat", "Hierarchical"), ("Hierarchical", "LongHierarchical"))):
        words = ("metadata", "migrate", "--to", uris[at + 1], "-o", "ndjson")
        for dry_run in (["--dry-run"], []):
            moved = CommandLine(uris[at])(*words, *dry_run)
            assert moved.code == 0, moved.err
            assert f"changes from {name}LedgerManagerFactory to {wider}LedgerManagerFactory" in moved.err
        for command in (("listledgers", "-m"), ("ledgermetadata", "-ledgerid", (1 << 31) + 5)):
            listed = without_ctimes(shells[at](*command))
            assert str((1 << 31) + 5) in words_of(listed)
            assert without_ctimes(shells[at + 1](*command)) == listed
        with conversation(java, "LedgerMetadataStore", uris[at + 1]) as ask:
            assert int(ask("id")["ledgerId"]) > max(taken)

    refused = source("metadata", "migrate", "--to", zookeeper.metadata_uri(zookeeper.new_root(), "flat"), "--dry-run")
    assert refused.code == 5
    assert f"cannot hold 2 of the ledgers, from {1 << 40} on" in refused.problem


def test_a_bookie_lives_on_a_root_that_we_made_moves_with_its_metadata_and_leaves_it_to_be_nuked(
    zookeeper: ZooKeeperServer, java: Java, apache_bookie: Bookie, tmp_path: Path
) -> None:
    first, second = new_place(zookeeper), new_place(zookeeper)
    uris = [each.settings["METADATA_URI"] for each in (first, second)]
    made = first("cluster", "init", "-o", "ndjson").rows
    assert first("cluster", "init").code == 5
    shells = [shell_of(java, uri, tmp_path) for uri in uris]
    assert made[0]["instanceId"] in words_of(shells[0]("whatisinstanceid"))
    bookie = apache_bookie(uris[0])
    bookie.start()
    with conversation(java, "LedgerMetadataStore", uris[0]) as ask:
        ledger_id = ask("write", "here")["ledgerId"]
    assert first("metadata", "migrate", "--to", uris[1]).code == 5  # the bookie is registered
    assert first("cluster", "nuke", "--instance-id", made[0]["instanceId"], "--yes").code == 5
    bookie.stop()
    assert first("metadata", "migrate", "--to", uris[1]).code == 0

    place = {"journalDirectory": bookie.journal_dir, "ledgerDirectories": bookie.ledger_dir}
    moved = apache_bookie(uris[1], port=bookie.port, settings=place)
    moved.start()
    [read] = read_ledgers(java, uris[1], "v3", [{"ledgerId": ledger_id, "digestType": "CRC32C", "password": PASSWORD}])
    assert len(read["entries"]) == 1
    with conversation(java, "LedgerMetadataStore", uris[1]) as ask:
        assert int(ask("write", "there")["ledgerId"]) > int(ledger_id)
    moved.stop()

    backup = tmp_path / "backup"
    nuke = ("cluster", "nuke", "--instance-id", made[0]["instanceId"])
    assert first("cluster", "nuke", "--instance-id", "another", "--yes").code == 5
    assert first(*nuke, "--dry-run", "-o", "ndjson").rows[0]["ledgerCount"] == 1
    assert first(*nuke).code == 2
    gone = first(*nuke, "--backup", backup, "--yes")
    assert gone.code == 0, gone.err
    assert first("cluster", "id").code == 4
    shells[0]("initnewcluster")
    assert first("cluster", "id", "-o", "id").ids != [made[0]["instanceId"]]
    other = first("metadata", "import", "-f", backup)
    assert other.code == 5
    assert "another" in other.problem or "not" in other.problem


def test_switches_marks_and_the_auditor_are_one_with_apaches_shell(
    zookeeper: ZooKeeperServer, java: Java, apache_bookie: Bookie, tmp_path: Path
) -> None:
    cli = new_place(zookeeper)
    uri = cli.settings["METADATA_URI"]
    assert cli("cluster", "init").code == 0
    shell = shell_of(java, uri, tmp_path)
    assert cli("autorecovery", "auditor").code == 4
    with open_cluster(uri) as cluster:  # ids that do not count anything
        cluster.store.put("idgen-long/HOB-0000000003", b"", NEW)
    bookie = apache_bookie(uri, settings={"autoRecoveryDaemonEnabled": "true"})
    bookie.start()
    wait_for(lambda: cli("autorecovery", "auditor", "-o", "id").out == f"{bookie.bookie_id}\n".encode(), "the auditor")
    assert bookie.bookie_id in " ".join(shell("whoisauditor"))
    assert cli("autorecovery", "audit", "-o", "id").ids == [bookie.bookie_id]
    shell("triggeraudit")

    shell("lostbookierecoverydelay", "-set", 77)
    assert cli("autorecovery", "delay", "-o", "ndjson").rows == [{"lostBookieRecoveryDelay": 77, "stored": True}]
    assert cli("autorecovery", "delay", "2m").code == 0
    assert "120" in words_of(shell("lostbookierecoverydelay", "-get"))
    # Findings that Apache's shell does not have.
    assert cli("autorecovery", "delay", 0).code == 0
    assert "0" in words_of(shell("lostbookierecoverydelay", "-get"))

    with conversation(java, "LedgerMetadataStore", uri) as ask:
        ledgers = [ask("write", "here")["ledgerId"] for _ in range(2)]
    assert cli("autorecovery", "disable", "-o", "ndjson").rows == [{"enabled": False, "changed": True}]
    assert cli("autorecovery", "audit").code == 5
    assert "disabled" in " ".join(shell("autorecovery")).lower()
    assert cli("autorecovery", "mark", *ledgers, "--missing", "nobody:1").code == 2
    marked = cli("autorecovery", "mark", *ledgers, "--missing", bookie.bookie_id, "-o", "id")
    assert marked.ids == ledgers
    listed = shell("listunderreplicated", "-printmissingreplica")
    assert {*ledgers, bookie.bookie_id} <= set(words_of(listed))
    assert cli("autorecovery", "list", "--missing", bookie.bookie_id, "-o", "id").ids == ledgers
    assert cli("autorecovery", "unmark", *ledgers, "--yes", "--undo", tmp_path / "undo").code == 0
    assert not set(ledgers) & set(words_of(shell("listunderreplicated")))
    assert cli("metadata", "undo", tmp_path / "undo", "--yes").code == 0
    assert set(ledgers) <= set(words_of(shell("listunderreplicated")))
    assert cli("autorecovery", "status", "-o", "ndjson").rows[0]["underReplicated"] is True

    shell("autorecovery", "-enable")
    assert cli("autorecovery", "enable", "-o", "ndjson").rows == [{"enabled": True, "changed": False}]
    # The worker finds nothing missing, and takes the marks away.
    wait_for(lambda: cli("autorecovery", "list", "--count", "-o", "ndjson").rows == [{"count": 0}], "the worker")
    shell("autorecovery", "-disable")
    assert cli("autorecovery", "status", "-o", "ndjson").rows[0]["enabled"] is False
    bookie.stop()


def test_a_replaced_bookie_is_replaced_in_apaches_view(source: CommandLine, java: Java, tmp_path: Path) -> None:
    uri = source.settings["METADATA_URI"]
    shell = shell_of(java, uri, tmp_path)
    new, file = "renamed:3181", tmp_path / "undo"
    assert source("metadata", "export", "-f", tmp_path / "before").code == 0
    with open_cluster(uri) as cluster:
        cluster.store.put(f"cookies/{new}", cluster.store.get(f"cookies/{COOKIE}")[0], NEW)  # type: ignore[index]

    def on(bookie_id: str) -> set[str]:
        return {word for word in words_of(shell("listledgers", "-bookieid", bookie_id)) if word.isdigit()}

    before = on(COOKIE)
    assert {str(ledger_id) for ledger_id in IDS} <= before
    words = ("metadata", "replace-bookie", "--from", COOKIE, "--to", new)
    try:
        planned = source(*words, "--dry-run", "-o", "ndjson").rows
        assert on(COOKIE) == before
        assert source(*words).code == 2
        done = source(*words, "--yes", "--undo", file, "-o", "ndjson").rows
        assert done == [row | {"applied": True} for row in planned]
        assert on(new) >= {str(ledger_id) for ledger_id in IDS}
        assert not on(COOKIE) & {str(ledger_id) for ledger_id in IDS}
        assert source("metadata", "undo", file, "--yes").code == 0
        assert on(COOKIE) == before
    finally:
        source("cookie", "delete", new, "--yes")
    assert source("metadata", "diff", tmp_path / "before", "-o", "id").ids == []


def test_the_health_check_switch_is_apaches(source: CommandLine, java: Java) -> None:
    with conversation(java, "LedgerMetadataStore", source.settings["METADATA_URI"]) as ask:

        def ours() -> bool:
            return bool(source("cluster", "healthcheck", "status", "-o", "ndjson").rows[0]["enabled"])

        assert ask("health") == {"enabled": True}
        assert source("cluster", "healthcheck", "disable", "-o", "ndjson").rows == [{"enabled": False, "changed": True}]
        assert ask("health") == {"enabled": False}
        assert source("cluster", "healthcheck", "enable").code == 0
        assert ask("health") == {"enabled": ours()} == {"enabled": True}
        assert ask("health", "false") == {"enabled": ours()} == {"enabled": False}
        assert ask("health", "true") == {"enabled": ours()} == {"enabled": True}


def test_scoped_ledgers_live_beside_a_bookie_that_collects_garbage(
    zookeeper: ZooKeeperServer, java: Java, apache_bookie: Bookie, tmp_path: Path
) -> None:
    cli = new_place(zookeeper)
    uri = cli.settings["METADATA_URI"]
    assert cli("cluster", "init").code == 0
    settings = {"gcWaitTime": 500, "minorCompactionInterval": 0, "majorCompactionInterval": 0}
    bookie = apache_bookie(uri, settings=settings)
    bookie.start()
    scoped = [LedgerId(7, 0), LedgerId(7, 1), LedgerId((1 << 64) - 1, (1 << 64) - 1)]
    with conversation(java, "LedgerMetadataStore", uri) as ask:
        doomed, kept = (ask("write", "x" * 1000)["ledgerId"] for _ in range(2))
        with open_cluster(uri) as cluster:
            metadata = cluster.ledgers.read(LedgerId.parse(kept)).metadata
            # Also with ids of scope 0's ledgers, and of the one that goes.
            scoped += [LedgerId(9, int(doomed)), LedgerId(9, int(kept))]
            for ledger in scoped:
                cluster.ledgers.create(ledger, metadata)
            before = {ledger: cluster.store.get(cluster.ledgers.path(ledger)) for ledger in scoped}
            assert ask("list") == {"ledgerIds": [doomed, kept]}
            ask("remove", doomed)
            rows = ("bookie", "index", "show", doomed, "--dir", bookie.journal_dir, "--dir", bookie.ledger_dir)
            wait_for(lambda: CommandLine(None)(*rows).code == 4, "garbage collection")
            assert {ledger: cluster.store.get(cluster.ledgers.path(ledger)) for ledger in scoped} == before
            assert list(cluster.ledgers.ledgers(None)) == [LedgerId.parse(kept), *sorted(scoped)]
        assert ask("list") == {"ledgerIds": [kept]}
    shell = shell_of(java, uri, tmp_path)
    assert [word for word in words_of(shell("listledgers")) if word.isdigit()] == [kept]
    login = {"ledgerId": kept, "digestType": "CRC32C", "password": PASSWORD}
    assert len(read_ledgers(java, uri, "v3", [login])[0]["entries"]) == 1
    bookie.stop()


@pytest.mark.parametrize("manager", ["flat", "hierarchical", "longhierarchical"])
def test_a_ledger_of_either_is_managed_by_the_other_in_each_layout(
    zookeeper: ZooKeeperServer, java: Java, apache_bookie: Bookie, tmp_path: Path, manager: str
) -> None:
    cli = CommandLine(zookeeper.metadata_uri(zookeeper.new_root(), manager))
    uri = cli.settings["METADATA_URI"]
    assert cli("cluster", "init").code == 0
    shell = shell_of(java, uri, tmp_path)
    bookie = apache_bookie(uri)
    bookie.start()
    with conversation(java, "LedgerMetadataStore", uri) as ask:
        theirs = ask("write", "theirs")["ledgerId"]
    words = ("ledger", "write", "-", "--ensemble-size", 1, "--write-quorum", 1, "--ack-quorum", 1, "-o", "id")
    written = cli.run(*words, input=b"ours\n")
    assert written.code == 0, written.err
    [ours] = written.out.decode().split()
    assert int(ours) > int(theirs)

    assert cli("ledger", "list", "-o", "id").ids == [theirs, ours]
    [shown] = cli("ledger", "show", theirs, "-o", "ndjson").rows
    assert (shown["state"], shown["ensembles"]) == ("CLOSED", {"0": [bookie.bookie_id]})
    assert [row["bookieId"] for row in cli("ledger", "locate", theirs, "-o", "ndjson").rows] == [bookie.bookie_id]
    told = " ".join(shell("ledgermetadata", "-ledgerid", ours))
    assert bookie.bookie_id in told
    assert "CLOSED" in told
    assert sorted(word for word in words_of(shell("listledgers")) if word.isdigit()) == sorted([theirs, ours])

    assert cli("ledger", "delete", theirs, "--yes").code == 0
    shell("deleteledger", "-ledgerid", ours, "-force")
    assert cli("ledger", "list", "-o", "id").ids == []
    assert not [word for word in words_of(shell("listledgers")) if word.isdigit()]
    bookie.stop()


def test_apache_starts_anew_on_an_etcd_that_we_nuked(etcd: Any, java_on_etcd: Java, tmp_path: Path) -> None:
    root = etcd.new_root()
    cli = CommandLine(etcd.metadata_uri(root))
    # Siblings that Apache's own nuke would take with it.
    with open_cluster(etcd.metadata_uri(f"{root}-x"), create=True) as sibling:
        shell = shell_of(java_on_etcd, cli.settings["METADATA_URI"], tmp_path)
        shell("initnewcluster")
        [first] = cli("cluster", "id", "-o", "id").ids
        with open_cluster(cli.settings["METADATA_URI"]) as cluster, open_cluster(sibling.uri) as other:
            for ledger in (LedgerId(0, 5), SCOPED):
                cluster.store.put(cluster.ledgers.path(ledger), b"anything", NEW)
                other.store.put(other.ledgers.path(ledger), b"anything", NEW)
        nuked = cli("cluster", "nuke", "--instance-id", first, "--yes")
        assert nuked.code == 0, nuked.err
        assert list(sibling.ledgers.ledgers(None)) == [LedgerId(0, 5), SCOPED]
    shell("initnewcluster")
    assert first not in cli("cluster", "id", "-o", "id").ids
    assert cli("ledger", "list", "--all-scopes", "-o", "id").ids == []
