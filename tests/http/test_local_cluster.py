"""A local cluster's bookies have HTTP servers, where they are wanted and the packages are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.raw_http import call

from bkctl.bookie.local import LocalCluster


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "cluster"
    LocalCluster(tmp_path / "cluster").down()


def test_new_bookies_of_a_local_cluster_have_an_http_server(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    cli = CommandLine(None)

    def up(*arguments: Any) -> list[dict[str, Any]]:
        return cli("cluster", "up", "--dir", directory, *arguments, "-o", "ndjson").rows

    (first,) = up("--bookies", 1)
    assert call(int(first["httpUrl"].rpartition(":")[2]), "GET", "/api/v1/bookie/is_ready").body == b"OK"
    state = cli("bookie", "state", "--bookie", "bookie-0", "-o", "ndjson").rows
    assert state[0]["running"]
    # It asks for a token, which other users do not get, and commands find it.
    port = int(first["httpUrl"].rpartition(":")[2])
    for command in (("ready",), ("readonly", "on"), ("gc", "--suspend")):
        other = cli("bookie", *command, "--bookie", "bookie-9", "--bookie-url", first["httpUrl"])
        assert other.code == 4
        assert "This is bookie bookie-0, not bookie-9" in other.problem, command
    assert not cli("bookie", "state", "--bookie", "bookie-0", "-o", "ndjson").rows[0]["readOnly"]
    for method, path, body in (("GET", "/api/v1/ledger/list", None), ("PUT", "/api/v1/config/server_config", {})):
        assert call(port, method, path, body, headers={"Authorization": ""}).status == 401
    for command in (("config",), ("readonly", "on"), ("readonly", "off"), ("gc",), ("sanity",)):
        assert cli("bookie", *command, "--bookie", "bookie-0").code == 0, command
    monkeypatch.setattr("bkctl.http.find_spec", lambda name: None)
    refused = cli("cluster", "up", "--dir", directory, "--bookies", 2, "--http")
    assert refused.code == 8
    assert "pip install" in refused.problem
    assert [row["httpUrl"] for row in up("--bookies", 2)] == [first["httpUrl"], None]
