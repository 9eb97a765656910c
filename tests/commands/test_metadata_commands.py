from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command_line import CommandLine

from bkctl.bookie.cookies import cookie_path
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo, Cookie, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.admin.dump import importing
from bkctl.metadata.backends.sqlite import SqliteStore
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import NEW
from bkctl.metadata.underreplication import LedgerMarks, mark_path
from bkctl.pace import Pace

from .conftest import Cli, applied

BOOKIES = ("b0:3181", "b1:3181", "b2:3181")
LEDGER_NAMES = [
    "ledgerScopeId", "ledgerId", "ledgerQualifiedName", "metadataFormatVersion", "state", "ensembleSize",
    "writeQuorumSize", "ackQuorumSize", "digestType", "length", "lastEntryId", "ctime", "customMetadata", "ensembles",
]  # fmt: skip


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    uri = f"sqlite://{tmp_path}/m.db"
    monkeypatch.setenv("BKCTL_METADATA_URI", uri)
    with open_cluster(uri, create=True) as cluster:
        closed = LedgerMetadata(
            3, 2, 2, DigestType.CRC32C, b"", (Fragment(0, BOOKIES),), LedgerState.CLOSED, 10, 3, 1755770000123,
            {"application": b"pulsar", "component": b"managed-ledger", "pulsar/managed-ledger": b"t"},
        )  # fmt: skip
        cluster.ledgers.create(LedgerId(0, 5), closed)
        cluster.ledgers.create(
            LedgerId(0, 6), LedgerMetadata(1, 1, 1, DigestType.HMAC, b"secret", (Fragment(0, BOOKIES[:1]),))
        )
        cluster.ledgers.create(LedgerId(7, 5), closed)
        info = BookieServiceInfo(
            (
                BookieEndpoint("bookie", 3181, "10.0.0.1", "bookie-rpc"),
                BookieEndpoint("httpserver", 8080, "10.0.0.1", "http"),
            ),
            {"ledgerScopes": "1"},
        )
        cluster.bookies.register(BOOKIES[0], info)
        cluster.bookies.register(BOOKIES[1], BookieServiceInfo(), read_only=True)
        cluster.cookies.write(BOOKIES[2], Cookie(BOOKIES[2], ("/j",), ("/l",)), -1)
        yield cluster


def test_ledger_object(cli: Cli, store: Cluster) -> None:
    found = cli("ledger", "show", "6", "-o", "json").json
    assert list(found) == LEDGER_NAMES
    found = cli("ledger", "show", "7:5", "-o", "json").json
    assert list(found) == [*LEDGER_NAMES, "pulsar"]
    assert found["ledgerScopeId"] == "7"
    assert found["ensembles"] == {"0": list(BOOKIES)}
    assert found["ctime"] == "2025-08-21T09:53:20.123Z"
    assert base64.b64decode(found["customMetadata"]["application"]) == b"pulsar"
    assert found["pulsar"]["managedLedger"] == "t"
    assert cli("ledger", "show", "0000000000000007-0000000000000005".replace("-", ""), "-o", "id").out == (
        "00000000000000070000000000000005\n"
    )


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


def test_ledger_list(cli: Cli, store: Cluster) -> None:
    assert cli("ledger", "list", "-o", "id").out == "5\n6\n"
    assert cli("ledger", "list", "--all-scopes", "-o", "id").out.splitlines()[-1] == "00000000000000070000000000000005"
    assert cli("ledger", "list", "--ledger-scope-id", "7", "-o", "id").out.count("\n") == 1
    assert [list(row)[: len(LEDGER_NAMES)] for row in cli("ledger", "list", "-o", "ndjson").rows] == [LEDGER_NAMES] * 2
    assert len(cli("ledger", "list", "-o", "json").json) == 2
    assert cli("ledger", "list", "-o", "csv").out.splitlines()[0].startswith(",".join(LEDGER_NAMES))
    assert "3/2/2" in cli("ledger", "list").out


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        (["--state", "closed"], "5"),
        (["--state", "OPEN"], "6"),
        (["--bookie", BOOKIES[2]], "5"),
        (["--min-size", "10"], "5"),
        (["--min-age", "1d"], "5"),
        (["--max-age", "1h"], "6"),
        (["--custom-metadata", "application=pulsar"], "5"),
        (["--custom-metadata", "application"], "5"),
        (["--min-age", "1w"], "5"),
        (["--sort", "-lastEntryId", "--max-size", "0"], "6"),
        (["--limit", "1"], "5"),
        (["--after", "5"], "6"),
    ],
)
def test_ledger_list_filters(cli: Cli, store: Cluster, arguments: list[str], ids: str) -> None:
    assert cli("ledger", "list", "-o", "id", *arguments).out.split() == [ids]
    assert [row["ledgerId"] for row in cli("ledger", "list", "-o", "ndjson", *arguments).rows] == [ids]


@pytest.mark.parametrize("output", ["ndjson", "json"])
@pytest.mark.parametrize("damaged", [None, 0, 20, 41])
def test_ledger_list_of_many_is_the_list_of_a_few(cli: Cli, store: Cluster, output: str, damaged: int | None) -> None:
    for number in range(10, 50):
        fragments = tuple(Fragment(first, BOOKIES[: number % 3 + 1]) for first in range(number % 4 + 1))
        sizes = (number % 3 + 1, 1, 1)
        metadata = LedgerMetadata(
            *sizes, DigestType.CRC32, b"", fragments, format_version=number % 3 + 1, custom_metadata={"é": b"\xff"}
        )
        if number % 3 == 0:
            metadata = metadata._replace(digest_type=None, password=None, custom_metadata={})
        store.ledgers.create(LedgerId(0, number), metadata)
    ids = list(store.ledgers.ledgers(0))
    if damaged is not None:
        store.store.put(store.ledgers.path(ids[damaged]), b"BookieMetadataFormatVersion\t3\n\x05x", None)
    for options in ((), ("--keep-going",), ("--all-scopes", "--keep-going"), ("--after", "30"), ("--after", "999")):
        lines = cli("ledger", "list", "-o", output, *options)
        rows = cli("ledger", "list", "-o", output, *options, "--limit", "1000")
        assert (lines.code, lines.out, lines.err) == (rows.code, rows.out, rows.err)
    assert not lines.rows if output == "ndjson" else lines.json == []


def test_filtered_lists_count_what_they_read_on_a_terminal(store: Cluster, tmp_path: Path) -> None:
    line = CommandLine(f"sqlite://{tmp_path}/m.db")
    code, seen = line.terminal("ledger", "list", "--state", "OPEN", columns=200)
    assert (code, seen.splitlines()[-1]) == (0, "1 of 2 ledgers")
    assert "of 2 ledgers" not in line.terminal("ledger", "list", columns=200)[1]
    assert line("ledger", "list", "--state", "OPEN").err == ""


def test_ledger_list_filter_by_key_finds_no_other_key(cli: Cli, store: Cluster) -> None:
    assert cli("ledger", "list", "-o", "id", "--custom-metadata", "nothing").out == ""
    assert cli("ledger", "list", "-o", "id", "--custom-metadata", "=pulsar").code == 2
    assert cli("ledger", "write", "--custom-metadata", "key", "/dev/null").code == 2


def test_ledgers_of_a_pulsar_topic_are_listed_by_it_and_name_it(cli: Cli, store: Cluster) -> None:
    def create(ledger_id: int, **names: bytes) -> None:
        custom = {"application": b"pulsar", "component": b"x"} | {f"pulsar/{key}": text for key, text in names.items()}
        fragments = (Fragment(0, BOOKIES[:1]),)
        metadata = LedgerMetadata(1, 1, 1, DigestType.CRC32, b"", fragments, custom_metadata=custom)
        store.ledgers.create(LedgerId(0, ledger_id), metadata)

    create(20, **{"managed-ledger": b"a/b/persistent/c-partition-0"})
    create(21, **{"managed-ledger": b"a/b/persistent/c", "cursor": b"sub"})
    create(22, compactedTopic=b"persistent://a/b/c", compactedTo=b"\x08\x14\x10\x05")
    create(23, schemaId=b"a/b/c")
    topic = ("ledger", "list", "--topic", "persistent://a/b/c")
    assert cli(*topic, "-o", "id").out.split() == ["20", "21", "22"]
    assert cli(*topic, "--subscription", "sub", "-o", "id").out.split() == ["21"]
    assert cli("ledger", "list", "--subscription", "sub").code == 2
    assert cli("ledger", "list", "--topic", "c").code == 2
    assert cli("ledger", "show", "21", "-o", "json").json["pulsar"]["topic"] == "persistent://a/b/c"
    shown = cli("ledger", "list", "--after", "19").out
    for words in (
        "pulsar x persistent://a/b/c-partition-0\n", "pulsar x persistent://a/b/c cursor=sub\n", "schemaId=a/b/c\n",
        "compactedTo=20:5 compactedTopic=persistent://a/b/c\n",
    ):  # fmt: skip
        assert words in shown


def test_layout_says_when_it_is_a_default(cli: Cli, tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path}/bare.db"
    with open_cluster(uri, create=True) as cluster:
        cluster.store.delete("LAYOUT")
        found = cli("metadata", "layout", "-o", "json", "-u", uri)
    assert found.json["stored"] is False
    assert "There is no LAYOUT node: the layout is the default of the metadata URI" in found.err


def test_ledger_list_in_the_order_and_with_the_columns_asked_for(cli: Cli, store: Cluster) -> None:
    assert cli("ledger", "list", "--sort", "-ledger", "-o", "id").out == "6\n5\n"
    assert cli("ledger", "list", "--sort", "-length", "--limit", "1", "-o", "id").out == "5\n"
    assert cli("ledger", "list", "--sort", "length", "--limit", "1", "-o", "id").out == "6\n"
    assert cli("--sort", "-ledger", "ledger", "list", "-o", "id").out == "6\n5\n"
    rows = cli("ledger", "list", "--columns", "state,ledger", "-o", "ndjson").rows
    assert list(rows[0]) == ["state", *LEDGER_NAMES[:3]]
    table = cli("ledger", "list", "--columns", "ensembleSize,state", "--sort", "ack quorum size").out.splitlines()
    assert table[0].split() == ["ENSEMBLE", "SIZE", "STATE"]
    assert cli("ledger", "list", "-o", "id", "--columns", "state").code == 2
    wrong = cli("ledger", "list", "--columns", "colour")
    assert (wrong.code, wrong.out) == (2, "")
    assert "'colour': not a column of this command; name some of ledger, state" in wrong.err
    assert "ENSEMBLES" in cli("ledger", "list", "-o", "wide").out
    assert yaml.safe_load(cli("ledger", "show", "5", "-o", "yaml").out) == cli("ledger", "show", "5", "-o", "json").json


def test_ledger_list_count_and_damage(cli: Cli, store: Cluster) -> None:
    assert cli("ledger", "list", "--count", "-o", "json").json == {"count": 2}
    assert cli("ledger", "list", "--count", "--all-scopes", "--state", "CLOSED", "-o", "csv").out == "count\n2\n"
    path = store.ledgers.path(LedgerId(0, 5))
    store.store.put(path, b"damage", None)
    result = cli("ledger", "list", "-o", "ndjson")
    assert result.code == 7
    result = cli("ledger", "list", "-o", "ndjson", "--keep-going")
    assert result.code == 3
    assert [row["ledgerId"] for row in result.rows] == ["6"]
    assert cli("ledger", "show", "5").code == 7


def test_ledger_not_found(cli: Cli, store: Cluster) -> None:
    result = cli("ledger", "show", "99")
    assert result.code == 4
    assert "No ledger 99" in result.err


def test_delete_needs_yes_without_a_terminal(cli: Cli, store: Cluster) -> None:
    result = cli("ledger", "delete", "5")
    assert result.code == 2
    assert "Ledger 5 (CLOSED, 4 entries, 10 B) would be lost" in result.err
    [row] = cli("ledger", "delete", "5", "--dry-run", "-o", "json").json
    assert (row["ledgerId"], row["state"], row["deleted"]) == ("5", "CLOSED", False)
    assert cli("ledger", "delete", "6", "--if-state", "CLOSED", "--yes").code == 5
    assert cli("ledger", "delete", "5", "77", "--yes").code == 4
    assert cli("ledger", "list", "-o", "id").out == "5\n6\n"
    [row] = cli("--yes", "ledger", "delete", "5", "-o", "json").json
    assert row["deleted"] is True
    assert cli("ledger", "list", "--all-scopes", "-o", "id").out.split() == ["6", "00000000000000070000000000000005"]
    assert cli("ledger", "delete", "5", "--yes").code == 4


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
    ] == [3, 1, 1, 1, 1, False, None, False, True]  # fmt: skip
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
    result = cli("metadata", "import", "-f", export, "-u", f"sqlite://{tmp_path}/copy.db")
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
    kept = cli("metadata", "migrate", "--to", target, "--live")
    assert kept.code == 3
    assert BOOKIES[2] in kept.err
    words = ("metadata", "migrate", "--to", target, "--live", "--overwrite", "--undo", undo)
    assert cli(*words).code == 2
    replaced = cli(*words, "--yes")
    assert replaced.code == 0
    assert f"metadata undo {undo} -u '{target}'" in replaced.err
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
    assert cli(*words, "--limit", 1, "--yes", "--undo", undo, "-o", "id").out == "5\n"
    assert cli(*words, "--rate", 100, "--yes", "--undo", "none", "-o", "ndjson").rows == applied(planned[1:])
    assert cli("ledger", "list", "--all-scopes", "--bookie", old, "-o", "id").out == ""
    assert cli("metadata", "undo", undo, "--yes").code == 0
    assert cli("ledger", "list", "--all-scopes", "--bookie", old, "-o", "id").out == "5\n"


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


def test_ledgers_of_an_unknown_bookie_are_not_found(cli: Cli, store: Cluster) -> None:
    for more in ([], ["--count"], ["-o", "json"], ["-o", "id"]):
        missing = cli("ledger", "list", "--bookie", "nowhere:1", *more)
        assert (missing.code, missing.out) == (4, ""), missing
        assert "No bookie nowhere:1" in missing.err
    assert cli("ledger", "list", "--bookie", BOOKIES[2], "--state", "IN_RECOVERY", "-o", "json").json == []


def test_an_empty_scope_says_what_other_scopes_hold(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite://{tmp_path}/scoped.db"
    with open_cluster(uri, create=True) as cluster:
        for more in ([], ["--all-scopes"], ["--ledger-scope-id", 9]):
            assert cli("ledger", "list", "-u", uri, *more).err == "No ledgers\n"
        metadata = LedgerMetadata(1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, ("b0:1",)),))
        for ledger in (LedgerId(7, 1), LedgerId(7, 2), LedgerId(8, 1)):
            cluster.ledgers.create(ledger, metadata)
        for more in ([], ["--count"], ["-o", "id"], ["-o", "json"]):
            answer = cli("ledger", "list", "-u", uri, *more)
            assert answer.code == 0
            assert "No ledgers in scope 0; 2 other scopes with 3 ledgers: add --all-scopes" in answer.err
        assert "No ledgers in scope 9; 2 other scopes" in cli("ledger", "list", "-u", uri, "--ledger-scope-id", 9).err
        cluster.ledgers.create(LedgerId(0, 1), metadata)
        assert cli("ledger", "list", "-u", uri, "--state", "CLOSED").err == ""


def test_a_missing_undo_file_is_refused_with_the_way_to_list_them(cli: Cli, store: Cluster, tmp_path: Path) -> None:
    failed = cli("metadata", "undo", tmp_path / "none", "--yes")
    assert failed.code == 4
    assert failed.err == f"bkctl: No undo file {tmp_path}/none; 'bkctl metadata undo --list' lists them\n"
    assert cli("metadata", "undo", "none", "--yes").err.startswith("bkctl: No undo file none; ")
