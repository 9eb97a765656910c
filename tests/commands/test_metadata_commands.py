from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieServiceInfo, Cookie, Endpoint, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster

from .conftest import Cli

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
            (Endpoint("bookie", 3181, "10.0.0.1", "bookie-rpc"), Endpoint("httpserver", 8080, "10.0.0.1", "http")),
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
        (["--meta-key", "application=pulsar"], "5"),
        (["--limit", "1"], "5"),
        (["--after", "5"], "6"),
    ],
)
def test_ledger_list_filters(cli: Cli, store: Cluster, arguments: list[str], ids: str) -> None:
    assert cli("ledger", "list", "-o", "id", *arguments).out.split() == [ids]
    assert [row["ledgerId"] for row in cli("ledger", "list", "-o", "ndjson", *arguments).rows] == [ids]


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
    assert [list(row) for row in rows] == [["bookieId", "state", "address", "ledgerScopes", "endpoints"]] * 3
    assert [(row["bookieId"], row["state"], row["ledgerScopes"]) for row in rows] == [
        (BOOKIES[0], "rw", True), (BOOKIES[1], "ro", False), (BOOKIES[2], "down", False),
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
    assert list(layout) == ["metadataUri", "layoutFormatVersion", "managerFactoryClass", "managerVersion", "instanceId"]
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
