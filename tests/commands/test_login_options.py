"""`--metadata-…`: commands log in to metadata stores, by options, the environment and contexts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.command_line import CommandLine
from support.own_bookies import OwnBookie
from support.servers import EtcdServer, ZooKeeperServer

from bkctl.formats.metadata import Cookie
from bkctl.metadata.cluster import open_cluster


@pytest.fixture
def cookie(tmp_path: Path) -> Path:
    path = tmp_path / "cookie"
    path.write_bytes(Cookie("b:1", ("/j",), ("/l",)).serialize())
    return path


def test_nodes_with_creator_acl_are_readable_by_their_user_only(
    zookeeper: ZooKeeperServer, cookie: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    open_cluster(uri, create=True).close()
    cli = CommandLine(uri)
    password = tmp_path / "password"
    password.write_text("geheim\n")
    login = ("--metadata-user", "ann", "--metadata-password-file", password)
    made = cli(*login, "cookie", "create", "b:1", "-f", cookie, "--metadata-creator-acl")
    assert made.code == 0, made.err
    assert cli("cookie", "show", "b:1", *login, "-o", "id").ids == ["b:1"]
    refused = cli("cookie", "show", "b:1")
    assert refused.code == 1
    assert "geheim" not in refused.problem
    wrong = tmp_path / "wrong"
    wrong.write_text("other")
    assert cli("cookie", "show", "b:1", "--metadata-user", "ann", "--metadata-password-file", wrong).code == 1

    from_environment = {"METADATA_USER": "ann", "METADATA_PASSWORD": "geheim"}
    assert cli("cookie", "show", "b:1", "-o", "id", **from_environment).ids == ["b:1"]

    config = tmp_path / "config.toml"
    nameless = CommandLine(None)
    added = nameless("context", "add", "zk", "--use", "-u", uri, *login, CONFIG=str(config))
    assert added.code == 0, added.err
    assert b"geheim" not in config.read_bytes()
    assert nameless("cookie", "show", "b:1", "-o", "id", CONFIG=str(config)).ids == ["b:1"]
    assert nameless("cookie", "delete", "b:1", "--yes", "--undo", tmp_path / "undo", CONFIG=str(config)).code == 0


def test_an_etcd_with_certificates_is_reached_with_them_only(etcd_server: Callable[..., EtcdServer], pem: Path) -> None:
    server = etcd_server(tls=pem)
    cli = CommandLine(server.metadata_uri())
    tls = ("--metadata-tls-ca", pem, "--metadata-tls-cert", pem, "--metadata-tls-key", pem)
    made = cli("cluster", "init", *tls)
    assert made.code == 0, made.err
    assert cli("ledger", "list", "--count", "-o", "ndjson", *tls).rows == [{"count": 0}]
    assert cli("ledger", "list", "--timeout", "2").code == 6
    assert cli("ledger", "list", "--metadata-tls-key", pem).code == 2


def test_a_bookie_joins_an_etcd_that_asks_for_certificates(
    etcd_server: Callable[..., EtcdServer], pem: Path, tmp_path: Path
) -> None:
    uri = etcd_server(tls=pem).metadata_uri()
    tls = ("--metadata-tls-ca", pem, "--metadata-tls-cert", pem, "--metadata-tls-key", pem)
    cli = CommandLine(uri)
    assert cli("cluster", "init", *tls).code == 0
    login = ("env", *(f"BKCTL_METADATA_TLS_{name}={pem}" for name in ("CA", "CERT", "KEY")))
    bookie = OwnBookie(uri, tmp_path / "bookie", prefix=login)
    bookie.start()
    try:
        assert cli("bookies", "list", *tls, "-o", "id").ids == [bookie.bookie_id]
    finally:
        bookie.stop()
