from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine

from bkctl.bookie.local import LocalCluster
from bkctl.formats.metadata import Cookie, Fragment, LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.admin.dump import importing
from bkctl.metadata.backends.sqlite import SqliteStore
from bkctl.metadata.cluster import Cluster, cookie_path, open_cluster
from bkctl.metadata.store import NEW
from bkctl.metadata.underreplication import LedgerMarks, mark_path
from bkctl.pace import Pace

from .conftest import BOOKIES, Cli, applied


def test_passwords_are_secret(cli: Cli, store: Cluster) -> None:
    for output in ("table", "json", "ndjson", "csv"):
        out = cli("ledger", "show", "6", "-o", output).out
        assert "secret" not in out
        assert base64.b64encode(b"secret").decode() not in out
    assert cli("ledger", "show", "6", "-o", "json", "--show-secrets").json["password"] == "c2VjcmV0"
    path = next(
        line for line in cli("metadata", "tree", "-o", "id").out.splitlines() if line.endswith("6") and "ledger" in line
    )
    result = cli("metadata", "get", path)
    assert (result.code, result.out) == (2, "")
    assert "--show-secrets" in result.err
    assert cli("metadata", "get", path, "--show-secrets", "-o", "json").json["size"] > 0


def test_layout_says_when_it_is_a_default(cli: Cli, tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path}/bare.db"
    with open_cluster(uri, create=True) as cluster:
        cluster.store.delete("LAYOUT")
        found = cli("metadata", "layout", "-o", "json", "-u", uri)
    assert found.json["stored"] is False
    assert "There is no LAYOUT node: the layout is the default of the metadata URI" in found.err


def test_bookies_list(cli: Cli, store: Cluster) -> None:
    rows = cli("bookies", "list", "-o", "json").json
    assert [list(row) for row in rows] == [["bookieId", "state", "address", "rack", "ledgerScopes", "endpoints"]] * 3
    assert [(row["bookieId"], row["state"], row["ledgerScopes"]) for row in rows] == [
        (BOOKIES[0], "rw", True), (BOOKIES[1], "ro", False), (BOOKIES[2], "down", None),
    ]  # fmt: skip
    assert rows[0]["address"] == "10.0.0.1:3181"
    assert rows[0]["endpoints"][1] == {
        "id": "httpserver", "protocol": "http", "host": "10.0.0.1", "port": 8080, "auth": [], "extensions": [],
    }  # fmt: skip
    assert cli("bookies", "list", "--state", "ro", "-o", "id").out == f"{BOOKIES[1]}\n"
    assert "bookie-rpc://10.0.0.1:3181" in cli("bookies", "list").out


def test_cluster_info(cli: Cli, store: Cluster) -> None:
    info = cli("cluster", "info", "-o", "json").json
    assert info["instanceId"] == store.instance_id()
    assert [
        info[name]
        for name in (
            "totalBookiesCount", "writableBookiesCount", "readonlyBookiesCount", "unavailableBookiesCount",
            "ledgerScopesBookiesCount", "auditorElected", "auditorId", "clusterUnderReplicated",
            "ledgerReplicationEnabled",
        )
    ] == [3, 1, 1, 1, 1, False, None, None, True]  # fmt: skip
    store.store.put("underreplication/disable", b"", -1)
    store.store.put("underreplication/ledgers/0000/0000/0000/0005/urL0000000005", b"", -1)
    store.store.put("underreplication/auditorelection/V_0000000002", b'bookieId: "b2:3181"\n', -1)
    store.store.put("underreplication/auditorelection/V_0000000001", b'bookieId: "b1:3181"\n', -1)
    info = cli("cluster", "info", "-o", "json").json
    assert (info["auditorId"], info["auditorElected"]) == ("b1:3181", True)
    assert info["clusterUnderReplicated"] is True
    assert info["ledgerReplicationEnabled"] is False


def test_metadata_layout_get_tree(cli: Cli, store: Cluster) -> None:
    layout = cli("metadata", "layout", "-o", "json").json
    assert list(layout) == [
        "metadataUri", "layoutFormatVersion", "managerFactoryClass", "managerVersion", "stored", "instanceId",
    ]  # fmt: skip
    assert layout["stored"] is True
    node = cli("metadata", "get", "/INSTANCEID", "-o", "json").json
    assert base64.b64decode(node["value"]).decode() == store.instance_id()
    assert cli("metadata", "get", "INSTANCEID", "--format", "raw").out == store.instance_id()
    assert (
        cli("metadata", "get", "INSTANCEID", "--format", "utf8", "-o", "ndjson").rows[0]["value"] == store.instance_id()
    )
    assert cli("metadata", "get", "nope").code == 4
    assert cli("metadata", "get", "../x").code == 2
    rows = cli("metadata", "tree", "-o", "ndjson").rows
    assert list(rows[0]) == ["path", "version", "size", "ctime"]
    paths = [row["path"] for row in rows]
    assert paths[0] == ""
    assert f"cookies/{BOOKIES[2]}" in paths
    assert cli("metadata", "tree", "cookies", "-o", "id").out == f"cookies\ncookies/{BOOKIES[2]}\n"
    assert len(cli("metadata", "tree", "--depth", "1", "-o", "id").out.split()) < len(paths)
    assert "└─ " in cli("metadata", "tree").out
    assert cli("metadata", "tree", "nope").code == 4


def test_tree_finds_nodes_by_name_and_value_and_sums_subtrees(cli: Cli, tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path}/tree.db"
    words = ("metadata", "tree", "-u", uri)
    with open_cluster(uri, create=True) as cluster:
        for path, value in (("a", b"12"), ("a/b", b"needle"), ("a/b/c", b"123"), ("a/bc", b""), ("z", b"needles")):
            cluster.store.put(path, value, NEW)
    assert cli(*words, "--match", "b*", "-o", "id").out.split() == ["a/b", "a/bc"]
    assert cli(*words, "--match", "a/*", "-o", "id").out.split() == ["a/b", "a/b/c", "a/bc"]
    assert cli(*words, "a", "--contains", "needle", "-o", "id").out.split() == ["a/b"]
    assert cli(*words, "--match", "z", "--contains", "needle", "-o", "json").json[0]["size"] == 7
    assert "└" not in cli(*words, "--contains", "needle").out
    missing = cli(*words, "--contains", "haystack")
    assert (missing.code, missing.out) == (4, "")
    assert cli(*words, "--totals", "--match", "z").code == 2

    totals = cli(*words, "a", "--totals", "--depth", "1", "-o", "ndjson").rows
    assert [(row["path"], row["nodeCount"], row["totalSize"]) for row in totals] == [
        ("a", 4, 11), ("a/b", 2, 9), ("a/bc", 1, 0),
    ]  # fmt: skip
    drawn = [line.split() for line in cli(*words, "a", "--totals").out.splitlines()]
    assert drawn[1:3] == [["a", "4", "11", "B"], ["├─", "b", "2", "9", "B"]]
    everything = cli(*words, "-o", "ndjson").rows
    (root, *_) = cli(*words, "--totals", "--depth", "1", "-o", "ndjson").rows
    assert (root["nodeCount"], root["totalSize"]) == (len(everything), sum(row["size"] for row in everything))
    by_size = cli(*words, "a", "--totals", "--sort", "totalSize", "-o", "id").out.split()
    assert by_size == ["a/bc", "a/b/c", "a/b", "a"]


def test_conf_names_the_cluster(cli: Cli, store: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = cli("metadata", "layout", "-o", "json").json["metadataUri"]
    monkeypatch.delenv("BKCTL_METADATA_URI")
    conf = tmp_path / "bk_server.conf"
    conf.write_text(f"metadataServiceUri={uri}\n")
    assert cli("ledger", "list", "-o", "id", "--conf", conf).out == "5\n6\n"
    assert cli("-c", conf, "ledger", "list", "-o", "id").out == "5\n6\n"
    assert cli("-u", "sqlite:///nonexistent", "ledger", "list", "-o", "id", "--conf", conf).code == 0
    verbose = cli("-v", "ledger", "list", "--conf", conf)
    assert uri in verbose.err


# --- export, import, diff, migrate ----------------------------------------------------------------------------------


@pytest.fixture
def export(cli: Cli, store: Cluster, tmp_path: Path) -> Path:
    path = tmp_path / "export"
    assert cli("metadata", "export", "-f", path).code == 0
    return path


def test_rate_applies_to_each_record(
    cli: Cli, store: Cluster, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    batches: list[int] = []
    write_all = importing._write_all
    monkeypatch.setattr(Pace, "take", lambda pace, size_bytes=0, steps=1: taken.append(steps))
    monkeypatch.setattr(
        importing, "_write_all", lambda batch, target: batches.append(len(batch)) or write_all(batch, target)
    )
    for words in (
        ("export", "-f", tmp_path / "other"), ("check",), ("diff", export),
        ("import", export), ("import", export, "-u", f"sqlite://{tmp_path}/new.db"),
        ("migrate", "--live", "--to", f"sqlite://{tmp_path}/moved.db"),
    ):  # fmt: skip
        taken.clear()
        assert cli("metadata", *words, "--rate", 10).code in (0, 3)
        assert len(taken) >= 3, words
        assert set(taken) == {1}
    assert max(batches) == 1


def test_export_does_not_replace_a_file_and_streams_to_stdout(
    cli: Cli, store: Cluster, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = export.read_bytes()
    assert cli("metadata", "export", "-f", export).code == 5
    assert export.read_bytes() == before
    assert cli("metadata", "export").code == 2
    assert cli("metadata", "export", "-f", "-", "-o", "json").code == 2
    monkeypatch.setenv("BKCTL_OUTPUT", "json")
    lines = cli("metadata", "export", "-f", "-").out.splitlines()
    monkeypatch.delenv("BKCTL_OUTPUT")
    assert lines[1:-1] == before.decode().splitlines()[1:-1]
    row = cli("metadata", "export", "-f", export, "--overwrite", "-o", "json").json
    assert (row["ledgerCount"], row["cookieCount"], row["size"]) == (3, 1, export.stat().st_size)
    assert "secret" not in cli("metadata", "export", "7:5", "-f", "-").out
    assert cli("metadata", "export", "99", "-f", export, "--overwrite").code == 4
    assert [each.name for each in export.parent.iterdir() if "partial" in each.name] == []


def test_import_from_stdin_and_without_a_store(cli: Cli, export: Path, tmp_path: Path) -> None:
    target = f"sqlite://{tmp_path}/copy.db"
    planned = cli("metadata", "import", "-f", export, "-u", target, "--dry-run", "-o", "json")
    assert planned.code == 0
    assert not (tmp_path / "copy.db").exists()
    with CommandLine(target).process("metadata", "import", "-f", "-", "-o", "json") as process:
        out, err = process.communicate(export.read_bytes(), 60)
    assert process.returncode == 0, err
    assert json.loads(out) == applied(planned.json)
    assert cli("metadata", "diff", export, target, "-o", "json").json == []


def test_import_keeps_other_values_without_overwrite(cli: Cli, store: Cluster, export: Path, tmp_path: Path) -> None:
    path = store.ledgers.path(LedgerId(0, 6))
    mine = store.store.get(store.ledgers.path(LedgerId(0, 5)))
    assert mine is not None
    store.store.put(path, mine.value, None)
    for more in ([], ["--dry-run"]):
        result = cli("metadata", "import", "-f", export, *more)
        assert result.code == 5
        assert "Ledger 6 exists with another value" in result.err
    undo = tmp_path / "undo"
    assert cli("metadata", "import", "-f", export, "--overwrite").code == 2
    assert cli("metadata", "import", "-f", export, "--overwrite", "--undo", undo, "--yes").code == 0
    assert cli("metadata", "diff", export, "-o", "json").json == []
    assert cli("metadata", "undo", undo, "--yes").code == 0
    [row] = cli("metadata", "diff", export, "-o", "json").json
    assert (row["kind"], row["key"], row["what"]) == ("ledger", "6", "differs")
    assert {"state", "password", "ensembles"} <= set(row["fields"])
    assert "secret" not in str(row)


def test_import_of_missing_records_can_be_undone(cli: Cli, store: Cluster, export: Path, tmp_path: Path) -> None:
    undo = tmp_path / "undo"
    store.ledgers.remove(LedgerId(0, 5), store.ledgers.read(LedgerId(0, 5)).version)
    done = cli("metadata", "import", "-f", export, "--undo", undo)
    assert (done.code, f"metadata undo {undo}" in done.err) == (0, True)
    assert cli("ledger", "show", "5").code == 0
    assert cli("metadata", "undo", undo, "--yes").code == 0
    assert cli("ledger", "show", "5").code == 4
    assert cli("ledger", "show", "6").code == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"key":"b2:3181"', b'"key":"../LAYOUT"'),
        (b'"key":"b2:3181"', b'"key":""'),
        (b'"key":"b2:3181"', b'"key":"' + b"b" * 9000 + b'"'),
        (b'"key":"b2:3181"', b'"key":"\\ud800"'),
        (b'"kind":"cookie","key":"b2:3181"', b'"kind":"sequence","key":"ledger"'),
        (b'"kind":"cookie","key":"b2:3181"', b'"kind":"node","key":"INSTANCEID"'),
        (b'"key":"00000000000000000000000000000005"', b'"key":"0000000000000000ffffffffffffffff"'),
        (b'"kind":"cookie"', b'"kind":"registration"'),
        (b'"instanceId":"', b'"id":"'),
        (b'{"kind":"end"', b'{"kind":"' + b"x" * (3 << 20) + b'"}\n{"kind":"end"'),
    ],
)
def test_a_hostile_export_changes_nothing(
    cli: Cli, export: Path, tmp_path: Path, old: bytes, new: bytes
) -> None:  # fmt: skip
    data = export.read_bytes()
    assert old in data
    body = data.replace(old, new).rpartition(b'{"kind":"end"')[0]
    end = {"kind": "end", "records": body.count(b"\n") - 1, "sha256": hashlib.sha256(body).hexdigest()}
    export.write_bytes(body + json.dumps(end).encode() + b"\n")  # whoever made it knows how to hash
    for words in ("--dry-run",), ():
        result = cli("metadata", "import", "-f", export, "-u", f"sqlite://{tmp_path}/copy.db", *words)
        assert result.code == 7
    assert len(result.err) < 400
    assert not (tmp_path / "copy.db").exists()


def test_interrupted_migration_and_nuke_are_finished(cli: Cli, store: Cluster, tmp_path: Path) -> None:
    target = f"sqlite://{tmp_path}/copy.db"
    # An import that made the cluster and came no further than its instance id.
    with open_cluster(target, create_store=True) as begun:
        begun.store.put_all([("INSTANCEID", store.instance_id().encode())])
    assert cli("metadata", "migrate", "--to", target).code == 5  # a bookie is registered
    moved = cli("metadata", "migrate", "--to", target, "--live", "-o", "ndjson")
    assert moved.code == 0, moved.err
    with open_cluster(target) as copy:
        assert copy.store.get("LAYOUT") is not None
        assert copy.store.get("LAYOUT")[0] == store.store.get("LAYOUT")[0]  # type: ignore[index]
        # A nuke that was stopped just before its end.
        for name in copy.store.children("") or ():
            if name not in ("INSTANCEID", "cookies"):
                _remove(copy, name)
    finished = cli("cluster", "nuke", "--instance-id", store.instance_id(), "--yes", "-u", target)
    assert finished.code == 0, finished.err
    assert cli("cluster", "id", "-u", target).code == 4


def _remove(cluster: Cluster, path: str) -> None:
    for name in cluster.store.children(path) or ():
        _remove(cluster, f"{path}/{name}")
    cluster.store.delete(path)


def test_reading_a_missing_second_store_does_not_create_it(cli: Cli, store: Cluster, tmp_path: Path) -> None:
    target = f"sqlite://{tmp_path}/copy.db"
    assert cli("metadata", "diff", target).code == 4
    planned = cli("metadata", "migrate", "--to", target, "--live", "--dry-run", "-o", "ndjson")
    assert planned.code == 0
    assert not (tmp_path / "copy.db").exists()
    assert cli("metadata", "migrate", "--to", target, "--live", "-o", "ndjson").rows == applied(planned.rows)
    assert cli("metadata", "migrate", "--to", store.uri, "--live").code == 2
    assert cli("metadata", "migrate").code == 2
    assert cli("metadata", "diff", target, "-o", "json").json == []


def test_two_clusters_differ_even_where_both_are_empty(cli: Cli, tmp_path: Path) -> None:
    uris = [f"sqlite://{tmp_path}/{name}.db" for name in "ab"]
    for uri in uris:
        open_cluster(uri, create=True).close()
    result = cli("metadata", "diff", *uris, "-o", "json")
    assert result.code == 3
    assert [(row["kind"], row["key"], row["what"]) for row in result.json] == [("node", "INSTANCEID", "differs")]


def test_overwriting_a_target_is_undone_there(cli: Cli, store: Cluster, tmp_path: Path) -> None:
    target, undo = f"sqlite://{tmp_path}/copy.db", tmp_path / "undo"
    assert cli("metadata", "migrate", "--to", target, "--live").code == 0
    with open_cluster(target) as copy:
        copy.store.put(f"cookies/{BOOKIES[2]}", b"other", None)
    planned = cli("metadata", "migrate", "--to", target, "--live", "--dry-run")
    assert (planned.code, BOOKIES[2] in planned.err) == (3, True)
    assert cli("metadata", "migrate", "--to", target, "--live", "--dry-run", "--overwrite").code == 0
    kept = cli("metadata", "migrate", "--to", target, "--live")
    assert kept.code == 3
    assert BOOKIES[2] in kept.err
    words = ("metadata", "migrate", "--to", target, "--live", "--overwrite", "--undo", undo)
    assert cli(*words).code == 2
    replaced = cli(*words, "--yes")
    assert replaced.code == 0
    assert f"metadata undo {undo} -u {target}" in replaced.err
    assert cli("metadata", "undo", undo, "-u", target, "--yes").code == 0
    with open_cluster(target) as copy:
        assert copy.store.get(f"cookies/{BOOKIES[2]}")[0] == b"other"  # type: ignore[index]


# --- check, orphans, replace-bookie, ids ----------------------------------------------------------------------------


def test_check_and_orphans_find_and_remove(cli: Cli, store: Cluster, tmp_path: Path) -> None:
    assert cli("metadata", "check").code == 0
    store.store.put(store.ledgers.path(LedgerId(7, 5)), b"damage", None)
    assert cli("autorecovery", "mark", "6", "--missing", BOOKIES[0]).code == 0
    store.ledgers.remove(LedgerId(0, 6))
    result = cli("metadata", "check", "-o", "ndjson")
    assert result.code == 3
    assert {row["code"] for row in result.rows} == {"unparsable", "orphaned-mark"}
    assert cli("metadata", "check", "--ledger-scope-id", 7, "-o", "ndjson").rows == [
        row for row in result.rows if row["code"] == "unparsable"
    ]
    for more in ([], ["--delete", "--dry-run"]):
        assert cli("metadata", "orphans", *more, "-o", "ndjson").code == 3
    assert cli("metadata", "orphans", "--delete").code == 2
    undo = tmp_path / "undo"
    assert cli("metadata", "orphans", "--delete", "--yes", "--undo", undo).code == 0
    assert cli("metadata", "orphans", "-o", "json").json == []
    assert cli("metadata", "undo", undo, "--yes").code == 0
    assert cli("metadata", "orphans", "-o", "json").json[0]["ledgerId"] == "6"


def test_replace_bookie_refuses_data_loss_and_can_be_undone(cli: Cli, store: Cluster, tmp_path: Path) -> None:
    old, new, undo = BOOKIES[2], "named", tmp_path / "undo"
    words = ("metadata", "replace-bookie", "--from", old, "--to", new)
    assert cli("metadata", "replace-bookie", "--from", old).code == 2
    assert cli("metadata", "replace-bookie", "--from", old, "--to", old).code == 2
    assert cli(*words).code == 4  # the new one is unknown
    store.cookies.write(new, Cookie(new, ("/j",), ("/l",)), -1)
    assert cli("metadata", "replace-bookie", "--from", BOOKIES[0], "--to", new).code == 5  # it is registered
    for more in ("--dry-run", "--yes"):
        unknown = cli("metadata", "replace-bookie", "--from", "misspelt", "--to", new, more)
        assert (unknown.code, unknown.err.startswith("bkctl: No bookie misspelt, and no ledger names it")) == (4, True)
    assert cli(*words, "--rate", 0).code == 2
    planned = cli(*words, "--dry-run", "-o", "ndjson").rows
    assert [row["ledgerQualifiedName"][-1] + row["ledgerScopeId"] for row in planned] == ["50", "57"]
    limited = cli(*words, "--limit", 1, "--yes", "--undo", undo, "-o", "ndjson")
    assert (limited.code, limited.rows[:1]) == (3, applied(planned[:1]))
    assert "--limit is reached" in limited.rows[1]["problem"]
    assert cli(*words, "--rate", 100, "--yes", "--undo", "none", "-o", "ndjson").rows == applied(planned[1:])
    assert cli("ledger", "list", "--all-scopes", "--bookie", old, "-o", "id").out == ""
    assert cli("metadata", "undo", undo, "--yes").code == 0
    assert cli("ledger", "list", "--all-scopes", "--bookie", old, "-o", "id").out == "5\n"


def test_undo_of_a_cut_file_says_so(cli: Cli, store: Cluster, tmp_path: Path) -> None:
    undo = tmp_path / "undo"
    assert cli("ledger", "delete", 5, 6, "--yes", "--undo", undo).code == 0
    undo.write_bytes(b"".join(undo.read_bytes().splitlines(keepends=True)[:2]))
    for mode, outcome in (("--dry-run", "restored"), ("--yes", "restored"), ("--yes", "already")):
        done = cli("metadata", "undo", undo, mode, "-o", "json")
        assert (done.code, [row["outcome"] for row in json.loads(done.out)]) == (3, [outcome])
        assert f"The end of {undo} is missing" in done.err


def change_before(method: str, path: str, value: bytes, store: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write `value` to `path` right before a command's first call of the store's `method` about it."""
    original = getattr(SqliteStore, method)

    def call(self: SqliteStore, given: Any, *rest: Any, **options: Any) -> Any:
        if self is not store.store and path in repr(given):
            monkeypatch.setattr(SqliteStore, method, original)
            store.store.put(path, value, None)
        return original(self, given, *rest, **options)

    monkeypatch.setattr(SqliteStore, method, call)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (lambda store: store.ledgers.path(LedgerId(0, 6)), ("ledger", "delete", 6)),
        (lambda store: mark_path(LedgerId(0, 9)), ("metadata", "orphans", "--delete")),
        (lambda store: mark_path(LedgerId(0, 9)), ("autorecovery", "unmark", 9)),
        (lambda store: cookie_path(BOOKIES[2]), ("cookie", "delete", BOOKIES[2])),
    ],
    ids=["ledger delete", "orphans", "unmark", "cookie delete"],
)
def test_refused_removal_is_not_undone(
    cli: Cli,
    store: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: Callable[[Cluster], str],
    words: tuple[object, ...],
) -> None:
    """Another client changes the node right before its removal."""
    LedgerMarks(store.store).add(LedgerId(0, 9), [BOOKIES[0]])
    node, undo = path(store), tmp_path / "undo"
    change_before("delete", node, b"changed", store, monkeypatch)
    assert cli(*words, "--yes", "--undo", undo).code == 5
    assert not undo.exists()


@pytest.mark.parametrize("command", ["import", "replace-bookie"])
def test_retried_change_is_undone_once(
    cli: Cli, store: Cluster, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    words: tuple[object, ...] = ("-f", export, "--overwrite")
    node, undo = store.ledgers.path(LedgerId(0, 5)), tmp_path / "undo"
    changed = store.ledgers.read(LedgerId(0, 5)).metadata._replace(custom_metadata={}).serialize()
    if command == "replace-bookie":
        words = ("--from", BOOKIES[2], "--to", "named")
        store.cookies.write("named", Cookie("named", ("/j",), ("/l",)), NEW)
    else:
        store.store.put(node, b"other", None)
    change_before("put_many", node, changed, store, monkeypatch)
    assert cli("metadata", command, *words, "--yes", "--undo", undo).code == 0
    undone = cli("metadata", "undo", undo, "--yes", "-o", "ndjson")
    assert (undone.code, {row["outcome"] for row in undone.rows}) == (0, {"restored"})
    assert store.store.get(node)[0] == changed  # type: ignore[index]


@pytest.mark.parametrize("scope_id", [0, 7])
def test_undo_restores_only_bookies_that_have_the_entries(
    cli: Cli, cluster: LocalCluster, tmp_path: Path, scope_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BKCTL_METADATA_URI", cluster.metadata_uri)
    (tmp_path / "lines").write_text("one\ntwo\nthree\n")
    shape = ("--ensemble-size", 2, "--write-quorum", 2, "--ack-quorum", 2)
    cli("ledger", "write", tmp_path / "lines", "--ledger-scope-id", scope_id, *shape)
    ledger = LedgerId.parse(cli("ledger", "list", "--ledger-scope-id", scope_id, "-o", "id").out.split()[-1], scope_id)

    def put(metadata: LedgerMetadata) -> None:
        with open_cluster(cluster.metadata_uri) as opened:
            opened.ledgers.write(ledger, metadata, opened.ledgers.read(ledger).version)

    def undo_import_over(metadata: LedgerMetadata) -> list[str]:
        """Import the metadata that the store has now over `metadata`, and undo that."""
        export, undo = tmp_path / "export", tmp_path / "undo"
        for path in (export, undo):
            path.unlink(missing_ok=True)
        assert cli("metadata", "export", "-f", export).code == 0
        put(metadata)
        assert cli("metadata", "import", "-f", export, "--overwrite", "--yes", "--undo", undo).code == 0
        undone = cli("metadata", "undo", undo, "--yes", "-o", "json")
        assert undone.code == (0 if undone.json[0]["outcome"] == "restored" else 3)
        return [row["outcome"] for row in undone.json]

    with open_cluster(cluster.metadata_uri) as opened:
        right = opened.ledgers.read(ledger).metadata
    others = {each.bookie_id for each in cluster.bookies()} - {*right.ensembles[0].bookies}
    wrong = right._replace(ensembles=(Fragment(0, (right.ensembles[0].bookies[0], others.pop())),))
    assert undo_import_over(wrong) == ["moved"]
    assert cli("ledger", "verify", "--ledger-scope-id", scope_id, ledger.ledger_id).code == 0
    put(wrong)
    assert undo_import_over(right) == ["restored"]
    assert cli("ledger", "verify", "--ledger-scope-id", scope_id, ledger.ledger_id).code == 0


@pytest.mark.parametrize("value", [None, b"other"], ids=["lost", "changed"])
def test_copies_say_that_scoped_ledgers_are_left_out(
    cli: Cli, store: Cluster, zookeeper: Any, tmp_path: Path, value: bytes | None
) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    with open_cluster(uri, create=True) as cluster:
        for ledger in (LedgerId(0, 5), LedgerId(7, 5)):
            cluster.ledgers.create(ledger, store.ledgers.read(ledger).metadata)
        cluster.store.delete("INSTANCEID")
        if value is not None:
            cluster.store.put("INSTANCEID", value, NEW)
    export, target = ("metadata", "export", "-u", uri, "-f"), f"sqlite://{tmp_path}/target.db"
    migrate = ("metadata", "migrate", "-u", uri, "--to", target)
    for words in ((*export, tmp_path / "x"), (*export, "-"), (*migrate, "--dry-run"), migrate, (*migrate, "--dry-run")):
        done = cli(*words)
        assert done.code == 3
        assert "The ledgers at scopes are left out: 'bkctl metadata check' says why" in done.err
    assert (tmp_path / "x").exists()
    assert cli(*export, tmp_path / "y", 5).code == 0


def test_scopes_and_new_ids(cli: Cli, store: Cluster) -> None:
    rows = cli("metadata", "scopes", "-o", "json").json
    assert [(row["ledgerScopeId"], row["ledgerCount"]) for row in rows] == [("0", 2), ("7", 1)]
    assert len(set(cli("metadata", "idgen", "--limit", 3, "-o", "id").out.split())) == 3
    [row] = cli("metadata", "idgen", "--ledger-scope-id", 7, "-o", "ndjson").rows
    assert row["ledgerScopeId"] == "7"
    taken = [int(each) for each in cli("metadata", "idgen", "--sequence", "--count", 3, "-o", "id").out.split()]
    assert taken == list(range(taken[0], taken[0] + 3))
    assert store.ledgers.new_ledger_id() > LedgerId(0, taken[-1])
    assert cli("metadata", "idgen", "--ledger-scope-id", 0).code == 2
    assert cli("metadata", "idgen", "--ledger-scope-id", 7, "--sequence").code == 2


def test_a_missing_undo_file_is_refused_with_the_way_to_list_them(cli: Cli, store: Cluster, tmp_path: Path) -> None:
    failed = cli("metadata", "undo", tmp_path / "none", "--yes")
    assert failed.code == 4
    assert failed.err == f"bkctl: No undo file {tmp_path}/none; 'bkctl metadata undo --list' lists them\n"
    assert cli("metadata", "undo", "none", "--yes").err.startswith("bkctl: No undo file none; ")
