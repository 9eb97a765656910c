"""Two stores, two logins: what opens the first is never offered to the second."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.command_line import CommandLine
from support.servers import EtcdServer

SECRET = "the operator's secret"


def guard(server: EtcdServer, user: str) -> None:
    """From now on the server asks who it is: `root`, or `user`, who may do everything too."""

    def call(path: str, **body: Any) -> None:
        url = f"http://{server.connect_string}/v3/auth/{path}"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
            json.load(answer)

    call("role/add", name="root")
    for name in ("root", user):
        call("user/add", name=name, password=SECRET)
        call("user/grant", user=name, role="root")
    call("enable")


@pytest.fixture
def password(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(f"{SECRET}\n")
    return path


def test_each_store_gets_its_own_login_only(
    etcd_server: Callable[..., EtcdServer], password: Path, tmp_path: Path
) -> None:
    first, second = etcd_server(), etcd_server()
    for server in (first, second):
        guard(server, "ann")  # the same user and password would open both
    source, target = (CommandLine(server.metadata_uri()) for server in (first, second))
    login = ("--metadata-user", "ann", "--metadata-password-file", password)
    assert source("cluster", "init", *login).code == 0
    to = ("metadata", "migrate", *login, "--to", second.metadata_uri())
    refused = source(*to)
    assert refused.code == 1
    assert second.connect_string in refused.problem
    assert SECRET not in refused.err
    assert source(*to, "--to-user", "ann").code == 2
    assert source(*to, METADATA_PASSWORD=SECRET).code == 1
    moved = source(*to, "--to-user", "ann", "--to-password-file", password)
    assert moved.code == 0, moved.err
    assert target("cluster", "id", *login).code == 0

    # The same servers are the connection's own.
    assert source("metadata", "migrate", *login, "--to", first.metadata_uri("/other")).code == 0
    assert source("metadata", "diff", first.metadata_uri("/other"), *login, "-o", "id").ids == []

    guarded = f"etcd://ann:{quote(SECRET)}@{first.connect_string}/ledgers"
    assert CommandLine(guarded)("metadata", "diff", first.metadata_uri("/other"), "-o", "id").ids == []
    stranger = f"etcd://bob:{quote(SECRET)}@{first.connect_string}/other"
    assert CommandLine(guarded)("metadata", "diff", stranger, "-o", "id").code == 1
    assert CommandLine(guarded)("metadata", "diff", second.metadata_uri(), "-o", "id").code == 1
    both = guarded.replace(first.connect_string, second.connect_string)
    compared = CommandLine(guarded)("metadata", "diff", both, "-o", "id")
    assert compared.ids == []
    told = CommandLine(guarded)("metadata", "migrate", "--to", both, "--overwrite", "--dry-run")
    assert told.code == 0
    assert SECRET not in told.err
    assert quote(SECRET) not in told.err

    assert source("metadata", "diff", second.metadata_uri(), *login).code == 1
    config = {"CONFIG": str(tmp_path / "config.toml")}
    assert source("context", "add", "second", "-u", second.metadata_uri(), *login, **config).code == 0
    assert source("metadata", "diff", "context:second", *login, "-o", "id", **config).ids == []
    assert source("metadata", "migrate", *login, "--to", "context:second", **config).code == 0
    assert source("metadata", "diff", "context:third", *login, **config).code == 4
