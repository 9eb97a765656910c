"""The audit log: which commands are in it, what it says of them, and that it never stands in their way."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from bkctl.commands.kit import audit as _audit
from bkctl.commands.kit.audit import Audit, audit_file, without_secrets
from bkctl.formats.metadata import Cookie
from bkctl.metadata.cluster import open_cluster

from .conftest import Cli


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    open_cluster(uri, create=True).close()
    monkeypatch.setenv("BKCTL_METADATA_URI", uri)
    (tmp_path / "cookie").write_bytes(Cookie("b1", ("/j",), ("/l",)).serialize())
    return uri


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "state" / "bkctl" / "audit.ndjson"


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_audit_log_has_user_time_host_and_result_of_a_change(uri: str, cli: Cli, log: Path, tmp_path: Path) -> None:
    assert cli("cookie", "create", "b1", "-f", tmp_path / "cookie", "--undo", tmp_path / "undo").code == 0
    begin, end = lines(log)
    assert (begin["event"], end["event"]) == ("begin", "end")
    assert begin["id"] == end["id"]
    assert (end["exitCode"], end["pid"], end["host"]) == (0, os.getpid(), os.uname().nodename)
    assert end["user"]
    assert end["command"][:4] == ["bkctl", "cookie", "create", "b1"]
    assert (end["metadataUri"], end["connection"]) == (uri, "BKCTL_METADATA_URI")
    assert end["undoFile"] == str(tmp_path / "undo")
    assert end["time"].endswith("Z")
    assert end["seconds"] >= 0
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_failures_and_refusals_are_logged(uri: str, cli: Cli, log: Path, tmp_path: Path) -> None:
    create = ("cookie", "create", "b1", "-f", tmp_path / "cookie")
    assert cli(*create).code == 0
    failed = cli(*create)
    assert failed.code == 5
    assert cli("cookie", "delete", "b1").code == 2
    ends = [line for line in lines(log) if line["event"] == "end"]
    assert [end["exitCode"] for end in ends] == [0, 5, 2]
    assert failed.err == f"bkctl: {ends[1]['error']}\n"


def test_commands_that_change_nothing_are_not_logged(uri: str, cli: Cli, log: Path, tmp_path: Path) -> None:
    for words in (
        ("cookie", "list"), ("ledger", "list"), ("cookie", "create", "b1", "-f", tmp_path / "cookie", "--dry-run"),
        ("cookie", "create", "b1"), ("cookie", "create", "b1", "-f", tmp_path / "cookie", "-u", "nonsense"),
        ("ledger", "read", "5"),
    ):  # fmt: skip
        cli(*words)
    assert not log.exists()


def test_an_option_can_make_a_command_one_that_changes(uri: str, cli: Cli, log: Path) -> None:
    assert cli("ledger", "read", "5", "--recover", "--password", "geheim").code == 4
    assert lines(log)[-1]["command"] == ["bkctl", "ledger", "read", "5", "--recover", "--password", "***"]
    assert "geheim" not in log.read_text()


def test_secrets_within_errors_do_not_reach_the_log(cli: Cli, log: Path) -> None:
    failed = cli("api", "put", "/api/v1/some?token=geheim", "--bookie-url", "http://127.0.0.1:1", "--yes")
    assert failed.code != 0
    audit = Audit(log, ["bkctl", "api", "put"])
    audit.begin()
    audit.end(4, "PUT /api/v1/some?a=b&token=geheim: Unknown path")
    assert "geheim" not in log.read_text()
    assert lines(log)[-1]["error"] == "PUT /api/v1/some?a=b&token=***"


def test_secrets_do_not_reach_the_log() -> None:
    assert without_secrets(
        ["-u", "etcd://ann:x@h:1", "--password", "x", "--password=x", "--b64password", "x", "--api-token=x"]
    ) == ["-u", "etcd://***@h:1", "--password", "***", "--password=***", "--b64password", "***", "--api-token=***"]
    kept = ["--metadata-password-file", "f", "--show-secrets", "1", "--custom-metadata", "a=b"]
    assert without_secrets(kept) == kept


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--spark-conf=spark.authenticate.secret=hush"], ["--spark-conf=spark.authenticate.secret=***"]),
        (["--spark-conf", "spark.ssl.keyPassword=hush"], ["--spark-conf", "spark.ssl.keyPassword=***"]),
        (
            ["--spark-conf=spark.hadoop.fs.s3a.access.key=hush"],
            ["--spark-conf=spark.hadoop.fs.s3a.access.key=***"],
        ),
        (["--spark-conf", "fs.s3a.secret.key=hu=sh"], ["--spark-conf", "fs.s3a.secret.key=***"]),
        (["--spark-conf=fs.azure.account.key.a.b=hush"], ["--spark-conf=fs.azure.account.key.a.b=***"]),
        (["--set=aPassword=hush"], ["--set=aPassword=***"]),
        (
            ["--spark-conf", "spark.driver.extraJavaOptions=-Da=b -Djavax.net.ssl.keyStorePassword=hush"],
            ["--spark-conf", "spark.driver.extraJavaOptions=-Da=b -Djavax.net.ssl.keyStorePassword=***"],
        ),
        (["--spark-conf=a.password = hush"], ["--spark-conf=a.password =***"]),
        (["/api/v1/some?a=b&token=hush"], ["/api/v1/some?a=b&token=***"]),
        (["wasbs://box@host/path?sv=1&sig=hush"], ["wasbs://***@host/path?sv=1&sig=***"]),
        (['--body=[{"token": "hush"}]'], ["--body=***"]),
        (['--body={"a": {"token": "hush"}}'], ["--body=***"]),
        (["-uetcd://ann:hu/sh@h:1"], ["-uetcd://***@h:1"]),
        (["--metadata-uri=etcd://ann:hu@sh@h:1"], ["--metadata-uri=etcd://***@h:1"]),
        (["--metadata-uri=etcd://ann:hu sh@h:1"], ["--metadata-uri=etcd://***@h:1"]),
        (["--spark-conf=spark.executor.memory=4g"], ["--spark-conf=spark.executor.memory=4g"]),
        (["--set=httpServerTokenFile=/f"], ["--set=httpServerTokenFile=/f"]),
    ],
    ids=str,
)
def test_secrets_joined_to_options_and_within_uris_do_not_reach_the_log(words: list[str], shown: list[str]) -> None:
    assert without_secrets(words) == shown


def test_the_log_can_be_elsewhere_or_nowhere(
    uri: str, cli: Cli, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BKCTL_AUDIT_LOG", str(tmp_path / "else" / "where"))
    assert cli("cookie", "create", "b1", "-f", tmp_path / "cookie").code == 0
    assert len(lines(tmp_path / "else" / "where")) == 2
    monkeypatch.setenv("BKCTL_AUDIT_LOG", "none")
    assert cli("cookie", "delete", "b1", "--yes").code == 0
    assert not log.exists()
    assert audit_file({"XDG_STATE_HOME": "/s"}) == Path("/s/bkctl/audit.ndjson")


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_a_log_that_cannot_be_written_is_a_warning(
    uri: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    place = tmp_path / "place"
    if kind == "directory":
        place.mkdir()
    else:
        os.mkfifo(place)
    monkeypatch.setenv("BKCTL_AUDIT_LOG", str(place))
    result = cli("cookie", "create", "b1", "-f", tmp_path / "cookie", "-o", "id")
    assert (result.code, result.out) == (0, "b1\n")
    [warning] = [line for line in result.err.splitlines() if line.startswith("bkctl:")]
    assert warning.startswith(f"bkctl: Warning: the audit log {place} cannot be written: ")
    assert cli("-q", "cookie", "delete", "b1", "--yes").err == ""


def test_a_full_log_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_audit, "SIZE_BYTES_MAX", 2000)
    path = tmp_path / "log"
    for number in range(40):
        audit = Audit(path, ["bkctl", str(number)])
        audit.begin()
        audit.end(0, None)
        assert audit.problem is None
    aside = tmp_path / "log.1"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["log", "log.1"]
    for each in (path, aside):
        assert each.stat().st_size < 3000
    kept = [*lines(aside), *lines(path)]
    assert [line["command"][1] for line in kept[-4:]] == ["38", "38", "39", "39"]


def test_audit_list_and_show_give_each_run(uri: str, cli: Cli, log: Path, tmp_path: Path) -> None:
    assert cli("audit", "list").out.split() == ["ID", "TIME", "USER", "RESULT", "COMMAND"]
    assert cli("audit", "show", "last").code == 4
    create = ("cookie", "create", "b1", tmp_path / "cookie")
    assert cli(*create).code == 0
    assert cli(*create).code == 5
    killed = {"event": "begin", "id": "feed", "time": "2020-01-01T00:00:00.000Z", "command": ["bkctl", "killed"]}
    log.with_name("audit.ndjson.1").write_text(json.dumps(killed) + "\nnot json\n[]\n")
    rows = cli("audit", "list", "-o", "ndjson").rows
    assert [(row["result"], row["exitCode"]) for row in rows] == [("unfinished", None), ("done", 0), ("failed", 5)]
    assert rows[1]["command"] == f"bkctl cookie create b1 {tmp_path / 'cookie'}"
    assert rows[1]["undoFile"].startswith(str(tmp_path / "state" / "bkctl" / "undo"))
    assert "has a cookie" in rows[2]["error"]
    assert cli("audit", "list", "--failed", "-o", "id").out.split() == ["feed", rows[2]["id"]]
    assert cli("audit", "list", "--since", "1h", "-o", "id").out.split() == [rows[1]["id"], rows[2]["id"]]
    limited = cli("audit", "list", "--limit", "1", "-o", "id")
    assert (limited.out.split(), limited.err) == ([rows[2]["id"]], "1 of 3 runs; --limit lists more\n")
    assert cli("audit", "show", "last", "-o", "json").json == rows[2]
    assert cli("audit", "show", rows[1]["id"][:9], "-o", "json").json == rows[1]
    assert cli("audit", "show", "none").code == 4
    assert "UNDO FILE" in cli("audit", "show", "feed").out


def test_audit_list_says_that_the_log_is_off(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BKCTL_AUDIT_LOG", "none")
    result = cli("audit", "list")
    assert (result.code, result.err) == (
        4,
        "bkctl: The audit log is switched off by BKCTL_AUDIT_LOG; unset it, or let it name a file\n",
    )


def test_audit_list_says_that_the_named_log_is_not_there(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "named"
    assert cli("audit", "list").code == 0
    monkeypatch.setenv("BKCTL_AUDIT_LOG", str(named))
    result = cli("audit", "list")
    assert (result.code, f"No audit log {named}" in result.err) == (4, True)
    named.touch()
    assert cli("audit", "list").code == 0
