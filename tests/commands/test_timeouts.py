"""--connect-timeout: the wait for a connection, apart from --timeout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.black_hole import black_hole_port
from support.command_line import CommandLine

from bkctl.bookie.local import LocalCluster
from bkctl.commands.kit.command import Run
from bkctl.commands.kit.settings import GlobalOptions, Session


@pytest.fixture
def port() -> Iterator[int]:
    with black_hole_port() as port:
        yield port


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("zk://127.0.0.1:{port}/ledgers", "gave no session within 0.3 s"),
        ("hbase://127.0.0.1:{port}/prefix", "gave no session within 0.3 s"),
        ("etcd://127.0.0.1:{port}/scope", "did not answer within 0.3 s"),
    ],
)
def test_metadata_stores_are_given_up_after_the_connect_timeout(port: int, uri: str, message: str) -> None:
    line = CommandLine(uri.format(port=port))
    answer = line("ledger", "list", "--connect-timeout", "300ms", "--timeout", "10m")
    assert answer.code == 6
    assert message in answer.problem
    assert "--connect-timeout" in answer.problem
    assert message in line("ledger", "list", "--timeout", "10m", CONNECT_TIMEOUT="0.3").problem


def test_bookies_and_http_servers_are_given_up_after_the_connect_timeout(
    port: int, cluster: LocalCluster, tmp_path: Path
) -> None:
    line = CommandLine(cluster.metadata_uri)
    (tmp_path / "line").write_text("x\n")
    (ledger,) = line("ledger", "write", tmp_path / "line", "-o", "id").ids
    elsewhere = [word for number in range(3) for word in ("--bookie-address", f"bookie-{number}=127.0.0.1:{port}")]
    answer = line("ledger", "read", ledger, *elsewhere, "--connect-timeout", "300ms", "--timeout", "10m")
    assert answer.code == 6
    assert "cannot be reached: no answer within 0.3 s" in answer.problem
    url = f"http://127.0.0.1:{port}"
    answer = line("bookie", "state", "--bookie-url", url, "--connect-timeout", "300ms", "--timeout", "10m")
    assert answer.code == 6
    assert f"{url}: no connection within 0.3 s; --connect-timeout allows longer waits" in answer.problem


@pytest.mark.parametrize(
    ("options", "expected_s"),
    [
        (GlobalOptions(), 10.0),
        (GlobalOptions(timeout_s=2.0), 2.0),
        (GlobalOptions(timeout_s=60.0), 10.0),
        (GlobalOptions(timeout_s=2.0, connect_timeout_s=20.0), 20.0),
    ],
)
def test_the_default_is_ten_seconds_or_a_shorter_timeout(options: GlobalOptions, expected_s: float) -> None:
    assert Run(Session(), options).access.connect_timeout_s == expected_s


@pytest.mark.parametrize("name", ["--timeout", "--connect-timeout"])
def test_no_wait_at_all_is_refused(tmp_path: Path, name: str) -> None:
    line = CommandLine(f"sqlite://{tmp_path}/bk.db")
    answer = line("ledger", "list", name, "0s")
    assert (answer.code, f"{name} 0s: must be more than 0" in answer.problem) == (2, True)
    variable = name.removeprefix("--").replace("-", "_").upper()
    answer = line("ledger", "list", **{variable: "0"})
    assert (answer.code, f"BKCTL_{variable} 0: must be more than 0" in answer.problem) == (2, True)
