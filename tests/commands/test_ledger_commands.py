from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from support.waiting import LIMIT_S

from bkctl.bookie.local import LocalCluster
from bkctl.client.ensemble import with_fragment
from bkctl.commands.kit.audit import audit_file
from bkctl.errors import Corrupt, Unreachable
from bkctl.formats.metadata import LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.ledgers import LedgerManager, VersionedMetadata

from .conftest import Cli


@pytest.fixture(autouse=True)
def _connected(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BKCTL_METADATA_URI", cluster.metadata_uri)


@pytest.fixture
def write(cli: Cli, tmp_path: Path) -> object:
    """Write bytes as a ledger; returns its id as it is printed."""

    def call(content: bytes, *arguments: object) -> str:
        path = tmp_path / "content"
        path.write_bytes(content)
        result = cli("ledger", "write", path, "-o", "id", *arguments)
        assert result.code == 0, result.err
        return result.out.strip()

    return call


def payloads(cli: Cli, ledger: str, *arguments: object) -> list[bytes]:
    result = cli("ledger", "read", ledger, "--body", "-o", "ndjson", *arguments)
    assert result.code == 0, result.err
    return [base64.b64decode(row["payload"]) for row in result.rows]


def test_write_of_a_number_that_is_no_file_names_the_option_for_ids(cli: Cli) -> None:
    answer = cli("ledger", "write", "17")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "bkctl: No file 17 to write; --ledger-id 17 writes stdin into a new ledger 17\n"


def test_a_line_is_an_entry(cli: Cli, write: object) -> None:
    ledger = write(b"one\n\nthree\x00\xff\nlast")  # type: ignore[operator]
    assert payloads(cli, ledger) == [b"one", b"", b"three\x00\xff", b"last"]
    assert payloads(cli, write(b"")) == []  # type: ignore[operator]
    assert payloads(cli, write(b"\n")) == [b""]  # type: ignore[operator]


def test_record_size(cli: Cli, write: object) -> None:
    assert payloads(cli, write(b"abcdefgh\n", "--record-size", "4")) == [b"abcd", b"efgh", b"\n"]  # type: ignore[operator]
    assert payloads(cli, write(bytes(3000), "--record-size", "1KiB")) == [bytes(1024), bytes(1024), bytes(952)]  # type: ignore[operator]


def test_several_files_in_order(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n2")
    (tmp_path / "b").write_text("3\n")
    ledger = cli("ledger", "write", tmp_path / "a", tmp_path / "b", "-o", "id").out.strip()
    assert payloads(cli, ledger) == [b"1", b"2", b"3"]


def test_write_prints_the_ledger_and_says_the_id_first(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\n")
    result = cli(
        "ledger", "write", tmp_path / "a", "--ledger-scope-id", "9", "--ledger-id", "0x10", "-o", "json",
        "--ensemble-size", "2", "--write-quorum", "2", "--ack-quorum", "1", "--digest-type", "hmac",
        "--custom-metadata", "k=v=w", "--password", "p",
    )  # fmt: skip
    assert result.err == f"Ledger {LedgerId(9, 16)}\n"
    found = result.json
    assert (found["ledgerScopeId"], found["ledgerId"], found["state"], found["digestType"]) == (
        "9",
        "16",
        "CLOSED",
        "HMAC",
    )
    assert [found[name] for name in ("ensembleSize", "writeQuorumSize", "ackQuorumSize", "lastEntryId", "length")] == [
        2, 2, 1, 0, 1,
    ]  # fmt: skip
    assert found["customMetadata"] == {"k": base64.b64encode(b"v=w").decode()}
    assert "password" not in found
    assert cli("ledger", "write", tmp_path / "a", "--ledger-scope-id", "9", "--ledger-id", "16").code == 5


@pytest.mark.parametrize("how", ["uuid", "scope", "name"])
def test_scoped_ledgers_round_trip(cli: Cli, write: object, how: str) -> None:
    name = uuid.uuid4()
    options = {"uuid": ["--uuid"], "scope": ["--ledger-scope-id", "7"], "name": ["--ledger-qualified-name", name]}[how]
    printed = write(b"scoped\n", *options)  # type: ignore[operator]
    ledger = LedgerId.parse(printed)
    assert ledger.is_scoped
    if how == "name":
        assert ledger.value == name.int
    for form in (printed, ledger.uuid, f"{ledger.scope_id}:{ledger.ledger_id}"):
        assert payloads(cli, form) == [b"scoped"]
    by_options = ("--ledger-scope-id", ledger.scope_id, "--ledger-id", ledger.ledger_id)
    assert cli("ledger", "show", *by_options, "-o", "json").json["ledgerQualifiedName"] == ledger.qualified_name
    row = cli("ledger", "read", printed, "-o", "ndjson").rows[0]
    assert list(row) == [
        "ledgerScopeId", "ledgerId", "ledgerQualifiedName", "entryId", "lastAddConfirmed", "length", "size",
        "formatVersion",
    ]  # fmt: skip
    assert row["formatVersion"] == 2
    assert printed in cli("ledger", "list", "--all-scopes", "-o", "id").out.split()
    assert printed not in cli("ledger", "list", "-o", "id").out.split()
    assert cli("ledger", "read", printed, "--protocol", "v2").code == 2
    assert cli("ledger", "delete", printed, "--yes").code == 0
    assert cli("ledger", "read", printed).code == 4


def test_read_ranges(cli: Cli, write: object) -> None:
    ledger = write(b"".join(b"%d\n" % number for number in range(10)))  # type: ignore[operator]

    def ids(*arguments: object) -> list[int]:
        return [int(line) for line in cli("ledger", "read", ledger, "-o", "id", *arguments).out.split()]

    assert ids() == list(range(10))
    assert ids("--from", "3", "--to", "5") == [3, 4, 5]
    assert ids("--from", "8") == [8, 9]
    assert ids("--to", "1") == [0, 1]
    assert ids("--last", "2") == [8, 9]
    assert ids("--from", "2", "--limit", "2") == [2, 3]
    assert ids("--from", "2", "--count", "2") == [2, 3]
    assert ids("--no-verify") == list(range(10))
    assert ids("--protocol", "v2") == list(range(10))
    replicas = sorted(number for bookie in ("bookie-0", "bookie-1", "bookie-2") for number in ids("--bookie", bookie))
    assert replicas == sorted([*range(10), *range(10)])
    assert cli("ledger", "read", ledger, "--from", "10").code == 4
    assert cli("ledger", "read", ledger, "--to", "10").code in (2, 4)
    assert cli("ledger", "read", ledger, "--last", "1", "--from", "1").code == 2


def test_entries_are_printed_by_a_template(cli: Cli, write: object) -> None:
    ledger = write(b"one\n\x00\xff\n")  # type: ignore[operator]
    template = r'%l:%e "%x" %S %b %n 100%%\t\x41\\\n'
    assert cli("ledger", "read", ledger, "-f", template).out == (
        f'{ledger}:0 "6f6e65" 3 b25l 3 100%\tA\\\n{ledger}:1 "00ff" 2 AP8= 5 100%\tA\\\n'
    )
    assert cli("ledger", "read", ledger, "--to", "0", "--template", "<%s>").out == "<one>"
    assert cli("ledger", "read", ledger, "--to", "0", "--template", "%c").out == "-1"
    assert cli("ledger", "tail", ledger, "--from", "0", "--template", "%e,").out == "0,1,"
    for wrong in (
        ["-f", "%q"],
        ["-f", "a%"],
        ["-f", r"\q"],
        ["-f", "%s", "-o", "json"],
        ["-f", "%s", "--format", "raw"],
    ):
        assert cli("ledger", "read", ledger, *wrong).code == 2, wrong


def test_raw_payloads_have_a_delimiter(cli: Cli, write: object) -> None:
    ledger = write(b"one\n%e\n")  # type: ignore[operator]
    assert cli("ledger", "read", ledger, "--format", "raw", "--delimiter", r"\0").out == "one\0%e\0"
    assert cli("ledger", "read", ledger, "--format", "raw", "--delimiter", "%e--\n").out == "one%e--\n%e%e--\n"
    assert cli("ledger", "read", ledger, "--format", "raw", "--delimiter", "").out == "one%e"
    assert cli("ledger", "read", ledger, "--delimiter", ",").code == 2


def test_read_formats(cli: Cli, write: object, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = write(b"one\ntwo")  # type: ignore[operator]
    with monkeypatch.context() as patch:
        patch.setenv("BKCTL_OUTPUT", "json")
        assert cli("ledger", "read", ledger, "--format", "raw").out == "onetwo"
    assert [row["payload"] for row in cli("ledger", "read", ledger, "--format", "hex", "-o", "ndjson").rows] == [
        "6f6e65", "74776f",
    ]  # fmt: skip
    assert [row["payload"] for row in cli("ledger", "read", ledger, "--format", "utf8", "-o", "json").json] == [
        "one",
        "two",
    ]
    assert "payload" not in cli("ledger", "read", ledger, "-o", "json").json[0]
    assert cli("ledger", "read", ledger, "-o", "csv").out.splitlines()[1].endswith(",0,-1,3,3,1")


def test_passwords(cli: Cli, write: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = write(b"x\n", "--password", "secret")  # type: ignore[operator]
    for command in ("read", "tail"):
        for wrong in ([], ["--password", "other"]):
            result = cli("ledger", command, ledger, *wrong)
            assert (result.code, result.out) == (1, "")
            problem = "Wrong password for ledger" if wrong else f"Ledger {ledger} has a password;"
            assert problem in result.err
            assert "--password-file or --password; administrators can read without it: --as-admin" in result.err
            assert result.err.count("\n") == 1
    file = tmp_path / "password"
    file.write_text("secret\n")
    assert payloads(cli, ledger, "--password-file", file) == [b"x"]
    assert cli("ledger", "verify", ledger).code == 0
    assert cli("ledger", "recover", ledger, "--yes").code == 0
    monkeypatch.setenv("BKCTL_LEDGER_PASSWORD", "secret")
    assert payloads(cli, ledger) == [b"x"]
    assert "secret" not in cli("ledger", "show", ledger, "-o", "json").out


def test_administrators_read_without_the_password_and_are_logged(cli: Cli, write: object, tmp_path: Path) -> None:
    ledger = write(b"x\n", "--password", "secret")  # type: ignore[operator]
    log = tmp_path / "log"
    assert cli("ledger", "read", ledger, "--as-admin", "--password", "secret").code == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BKCTL_AUDIT_LOG", str(log))
        assert payloads(cli, ledger, "--password", "secret") == [b"x"]
        assert not log.exists()
        assert payloads(cli, ledger, "--as-admin") == [b"x"]
        assert cli("ledger", "tail", ledger, "--as-admin", "-f", "%s").out == "x"
    commands = [json.loads(line)["command"] for line in log.read_text().splitlines()]
    assert [words[2] for words in commands] == ["read", "read", "tail", "tail"]
    assert all("--as-admin" in words for words in commands)


def test_lines_can_be_tailed_while_they_are_written(cluster: LocalCluster) -> None:
    environment = {**os.environ, "BKCTL_METADATA_URI": cluster.metadata_uri}
    writer = subprocess.Popen(
        [sys.executable, "-m", "bkctl", "ledger", "write", "--uuid", "-o", "id"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip
    assert writer.stdin is not None
    assert writer.stderr is not None
    ledger = writer.stderr.readline().decode().split()[1]
    writer.stdin.write(b"first\n")
    writer.stdin.flush()
    tail = subprocess.Popen(
        [sys.executable, "-m", "bkctl", "ledger", "tail", ledger, "--format", "utf8", "-o", "ndjson"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip
    assert tail.stdout is not None
    seen = []
    for line in (b"second\n", b"third\n", None):
        seen.append(json.loads(tail.stdout.readline())["payload"])
        if line is not None:
            writer.stdin.write(line)
            writer.stdin.flush()
    assert seen == ["first", "second", "third"]
    out, _ = writer.communicate(timeout=LIMIT_S)
    assert out.decode().strip() == ledger
    assert tail.communicate(timeout=LIMIT_S) == (b"", b"")
    assert (writer.returncode, tail.returncode) == (0, 0)


def test_tail_begins_with_the_last_entries(cli: Cli, write: object) -> None:
    ledger = write(b"".join(b"%d\n" % number for number in range(20)))  # type: ignore[operator]
    assert cli("ledger", "tail", ledger, "-o", "id").out.split() == [str(number) for number in range(10, 20)]
    assert cli("ledger", "tail", ledger, "-o", "id", "--last", "2").out.split() == ["18", "19"]
    assert cli("ledger", "tail", ledger, "-o", "id", "--from", "17").out.split() == ["17", "18", "19"]


def test_verify_finds_a_damaged_replica(cli: Cli, write: object, cluster: LocalCluster) -> None:
    ledger = write(b"needle-a\nneedle-b\n", "--uuid")  # type: ignore[operator]
    clean = cli("ledger", "verify", ledger, "-o", "json")
    assert (clean.code, clean.json) == (0, [])
    assert "2 entries" in clean.err
    victim = cluster.bookies()[0]
    cluster.down(victim.bookie_id)
    try:
        for path in (victim.directory / "ledgers").rglob("*.log"):
            path.write_bytes(path.read_bytes().replace(b"needle", b"noodle"))
        down = cli("ledger", "verify", ledger, "-o", "ndjson")
        assert down.code == 3
        assert {(row["bookieId"], row["problem"]) for row in down.rows} == {(victim.bookie_id, "unavailable")}
        scopes = {row["bookieId"]: row["ledgerScopes"] for row in cli("ledger", "locate", ledger, "-o", "ndjson").rows}
        assert scopes.pop(victim.bookie_id) is None
        assert set(scopes.values()) == {True}
    finally:
        cluster.up()
    found = cli("ledger", "verify", ledger, "-o", "ndjson")
    assert found.code == 3
    assert list(found.rows[0]) == [
        "ledgerScopeId", "ledgerId", "ledgerQualifiedName", "entryId", "lastEntryId", "entries", "entryCount",
        "bookieId", "problem", "message", "nextCommand",
    ]  # fmt: skip
    assert {(row["bookieId"], row["problem"]) for row in found.rows} == {(victim.bookie_id, "damaged")}
    assert payloads(cli, ledger) == [b"needle-a", b"needle-b"]


def test_recover_closes_a_ledger_whose_writer_died(cli: Cli, cluster: LocalCluster, tmp_path: Path) -> None:
    environment = {**os.environ, "BKCTL_METADATA_URI": cluster.metadata_uri}
    writer = subprocess.Popen(
        [sys.executable, "-m", "bkctl", "ledger", "write", "--uuid"],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip
    assert writer.stdin is not None
    assert writer.stderr is not None
    ledger = writer.stderr.readline().decode().split()[1]
    writer.stdin.write(b"kept\n")
    writer.stdin.flush()
    assert cli("ledger", "read", ledger, "-o", "id").code == 0
    while not cli("ledger", "read", ledger, "-o", "id").out:
        assert writer.poll() is None
    writer.kill()
    writer.wait()
    writer.stderr.close()
    writer.stdin.close()
    assert cli("ledger", "show", ledger, "-o", "json").json["state"] == "OPEN"
    for number, words in enumerate((("read", ledger), ("copy", ledger, "--new-id"))):
        undo = tmp_path / str(number)
        done = cli("ledger", *words, "--recover", "--undo", undo, "-o", "json")
        assert done.code == 0, done.err
        assert cli("ledger", "show", ledger, "-o", "json").json["state"] == "CLOSED"
        assert cli("metadata", "undo", undo, "--yes").code == 0
        assert cli("ledger", "show", ledger, "-o", "json").json["state"] == "OPEN"
    [row] = cli("ledger", "recover", ledger, "--dry-run", "-o", "json").json
    assert (row["state"], row["writing"], "would be fenced" in row["what"]) == ("OPEN", False, True)
    asked = cli("ledger", "recover", ledger)
    assert (asked.code, f"Ledger {ledger} is OPEN" in asked.err, "add --yes" in asked.err) == (2, True, True)
    assert cli("ledger", "show", ledger, "-o", "json").json["state"] == "OPEN"
    done = cli("ledger", "recover", ledger, "--yes", "-o", "json")
    assert "closed already" not in done.err
    [row] = done.json
    assert (row["state"], row["lastEntryId"], row["length"]) == ("CLOSED", 0, 4)
    again = cli("ledger", "recover", ledger, "--yes")
    assert (again.code, again.err) == (0, "1 ledger was closed already: unchanged\n")
    [row] = cli("ledger", "recover", ledger, "--dry-run", "-o", "json").json
    assert (row["state"], row["loss"], row["lastEntryId"], row["length"]) == ("CLOSED", False, 0, 4)
    assert payloads(cli, ledger) == [b"kept"]


@pytest.mark.parametrize(("flag", "reads"), [("--dry-run", 1), ("--yes", 2)])
def test_recover_reads_metadata_to_plan_and_to_open(
    cli: Cli, store: Cluster, monkeypatch: pytest.MonkeyPatch, flag: str, reads: int
) -> None:
    [closed] = cli("ledger", "list", "--state", "CLOSED", "-o", "id").out.split()
    read, count = LedgerManager.read, 0

    def counted(manager: LedgerManager, ledger: LedgerId) -> VersionedMetadata:
        nonlocal count
        count += 1
        return read(manager, ledger)

    monkeypatch.setattr(LedgerManager, "read", counted)
    assert cli("ledger", "recover", closed, flag).code == 0
    assert count == reads


def test_recover_loses_entries_only_with_accept_loss(cli: Cli, cluster: LocalCluster, write: object) -> None:
    """Entry 2 is on bookies that are gone, and the last fragment, on one of these and a live one, is empty."""
    two = ("--ensemble-size", 2, "--write-quorum", 2, "--ack-quorum", 2)
    ledger = write(b"ab\ncd\nef\n", *two)  # type: ignore[operator]
    with open_cluster(cluster.metadata_uri) as opened, socket.socket() as one, socket.socket() as other:
        gone = []
        for each in (one, other):
            each.bind(("127.0.0.1", 0))  # and does not listen
            gone.append(f"127.0.0.1:{each.getsockname()[1]}")
        ledger_id = LedgerId.parse(ledger)
        found = opened.ledgers.read(ledger_id)
        alive = found.metadata.last_fragment.bookies[0]
        left = found.metadata._replace(state=LedgerState.OPEN, last_entry_id=-1, length=0)
        left = with_fragment(with_fragment(left, 2, (gone[0], gone[1])), 3, (alive, gone[0]))
        opened.ledgers.write(ledger_id, left, found.version)

        plan = cli("ledger", "recover", ledger, "--dry-run", "-o", "json")
        [row] = plan.json
        assert (row["state"], row["loss"], row["lastEntryId"]) == ("OPEN", True, 2)
        assert (row["lastReadableEntryId"], row["length"]) == (1, 4)
        refused = cli("ledger", "recover", ledger, "--accept-loss")
        assert (refused.code, refused.out) == (2, "")
        assert "1 entry up to its last entry 2 cannot be read" in refused.err
        assert "--yes" in refused.err
        assert cli("ledger", "show", ledger, "-o", "json").json["state"] == "OPEN"

        plain = cli("ledger", "recover", ledger, "--yes")
        assert plain.code == 6
        assert f"'bkctl ledger recover {ledger} --accept-loss'" in plain.err
        assert cli("ledger", "show", ledger, "-o", "json").json["state"] == "IN_RECOVERY"
        moved = cli("bookies", "recover", "--ledger", ledger, gone[0], "--yes", "-o", "json")
        assert f"'bkctl ledger recover {ledger} --accept-loss'" in moved.out + moved.err

        accepted = cli("ledger", "recover", ledger, "--accept-loss", "--yes", "-o", "json")
        assert accepted.code == 0
        [row] = accepted.json
        assert (row["state"], row["lastEntryId"], row["length"]) == ("CLOSED", 2, 4)
        assert "Given up: Ledger" in accepted.err
    lines = [json.loads(line) for line in audit_file(os.environ).read_text().splitlines()]  # type: ignore[union-attr]
    assert "length stays 4 bytes" in lines[-1]["acceptedLoss"]
    assert lines[-1]["exitCode"] == 0
    again = cli("ledger", "recover", ledger, "--yes", "--accept-loss")
    assert (again.code, again.err) == (0, "1 ledger was closed already: unchanged\n")


def test_test_leaves_nothing_behind(cli: Cli) -> None:
    before = cli("ledger", "list", "--all-scopes", "-o", "id").out
    found = cli("ledger", "test", "--uuid", "--entries", "50", "--size", "1KiB", "-o", "json").json
    assert (found["entryCount"], found["entrySize"], found["lastEntryId"], found["deleted"]) == (50, 1024, 49, True)
    assert cli("ledger", "list", "--all-scopes", "-o", "id").out == before
    kept = cli("ledger", "test", "--count", "2", "--keep", "-o", "id").out.strip()
    assert len(payloads(cli, kept)) == 2


def test_a_test_that_fails_deletes_its_ledger_or_names_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise Corrupt("Not what was written")

    async def keep(*_: object, **__: object) -> None:
        raise Unreachable("No store")

    before = set(cli("ledger", "list", "--all-scopes", "-o", "id").out.split())
    monkeypatch.setattr("bkctl.client.trials.round_trip", fail)
    failed = cli("-q", "ledger", "test")
    assert (failed.code, failed.err) == (7, "bkctl: Not what was written\n")
    assert set(cli("ledger", "list", "--all-scopes", "-o", "id").out.split()) == before
    monkeypatch.setattr("bkctl.client.ledger.BookKeeper.delete_ledger", keep)
    failed = cli("-q", "ledger", "test")
    (left,) = set(cli("ledger", "list", "--all-scopes", "-o", "id").out.split()) - before
    named = f"bkctl: Ledger {left} is not deleted: No store; use 'bkctl ledger delete {left}'\n"
    assert (failed.code, failed.err) == (7, f"{named}bkctl: Not what was written\n")
    assert cli("ledger", "delete", left, "--yes").code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_test_deletes_its_ledger(cli: Cli, number: signal.Signals) -> None:
    before = cli("ledger", "list", "--all-scopes", "-o", "id").out
    command = [sys.executable, "-m", "bkctl", "ledger", "test", "--entries", "1000000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("Ledger ")
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (128 + number, "")
    assert err.startswith("bkctl: Interrupted: Writing and reading")
    assert cli("ledger", "list", "--all-scopes", "-o", "id").out == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_write_closes_the_ledger_and_says_so(cli: Cli, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "bkctl", "ledger", "write"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        ledger = process.stderr.readline().removeprefix("Ledger ").strip()
        process.send_signal(number)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + number
    closed = f"Ledger {ledger} is closed after its last acknowledged entry"
    assert err == f"{closed}\nbkctl: Interrupted: Writing\n"
    assert cli("ledger", "show", ledger, "-o", "json").json["state"] == "CLOSED"


def test_a_write_that_cannot_close_its_ledger_names_the_command_that_does(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Unreachable("The store is away")

    (tmp_path / "x").write_text("x\n")
    with monkeypatch.context() as patch:
        patch.setattr("bkctl.client.write_handle.update_metadata", fail)
        answer = cli("ledger", "write", tmp_path / "x")
    ledger = answer.err.splitlines()[0].removeprefix("Ledger ")
    assert answer.code == Unreachable.exit_code
    assert answer.err.splitlines()[1:] == [
        f"bkctl: Ledger {ledger} is not closed: 'bkctl ledger recover {ledger}' closes it", "bkctl: The store is away"
    ]  # fmt: skip
    assert cli("ledger", "recover", ledger, "--yes").code == 0
    assert cli("ledger", "show", ledger, "-o", "json").json["state"] == "CLOSED"


def test_not_enough_bookies(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\n")
    result = cli("ledger", "write", tmp_path / "a", "--ensemble-size", "9")
    assert result.code == 6
    assert result.err.count("\n") == 1
    assert cli("ledger", "write", tmp_path / "a", "--write-quorum", "4").code == 2


def test_every_form_of_output(cli: Cli, write: object) -> None:
    ledger = write(b"x\ny\n")  # type: ignore[operator]
    for command in (("show", ledger), ("read", ledger), ("verify", ledger), ("list",), ("recover", ledger)):
        for output in ("table", "json", "ndjson", "csv", "id"):
            result = cli("ledger", *command, "-o", output)
            assert result.code == 0, (command, output, result.err)
            if output == "json":
                json.loads(result.out)


# --- many ledgers -----------------------------------------------------------------------------------------------------


@pytest.fixture
def scope() -> str:
    """A scope that belongs to the test."""
    return str(uuid.uuid4().int & 0xFFFFFFFF)


@pytest.fixture
def three(cli: Cli, scope: str, tmp_path: Path) -> list[str]:
    """Three ledgers in `scope` as they are printed: of 1, 200 and 3,000 bytes, the second of Pulsar."""
    pulsar = ("--custom-metadata", "application=pulsar", "--custom-metadata", "component=managed-ledger")
    made = []
    for size, options in ((1, ()), (200, (*pulsar, "--custom-metadata", "pulsar/managed-ledger=a/b/c")), (3000, ())):
        path = tmp_path / "content"
        path.write_bytes(b"x" * size)
        number = str(len(made) + 1)
        words = ("--ledger-scope-id", scope, "--ledger-id", number, *options)
        result = cli("ledger", "write", path, "-o", "id", *words)
        assert result.code == 0, result.err
        made.append(result.out.strip())
    return made


def test_list_by_size_and_custom_metadata(cli: Cli, scope: str, three: list[str]) -> None:
    def ids(*arguments: str) -> list[str]:
        result = cli("ledger", "list", "--ledger-scope-id", scope, "-o", "id", *arguments)
        assert result.code == 0, result.err
        return result.out.split()

    assert ids("--min-size", "200") == three[1:]
    assert ids("--max-size", "200") == three[:2]
    assert ids("--min-size", "2", "--max-size", "1KiB") == three[1:2]
    assert ids("--custom-metadata", "application=pulsar", "--custom-metadata", "component=managed-ledger") == three[1:2]
    assert ids("--custom-metadata", "application=pulsar", "--custom-metadata", "component=schema") == []
    table = cli("ledger", "list", "--ledger-scope-id", scope).out.splitlines()
    assert table[2].endswith("pulsar managed-ledger a/b/c")
    assert table[1].endswith("-")


def test_show_of_several(cli: Cli, three: list[str]) -> None:
    rows = cli("ledger", "show", *three, "-o", "json").json
    assert [row["ledgerQualifiedName"] for row in rows] == three
    assert [row["length"] for row in cli("ledger", "show", three[2], three[0], "-o", "ndjson").rows] == [3000, 1]
    assert [row["password"] for row in cli("ledger", "show", *three, "--show-secrets", "-o", "json").json] == [
        "",
        "",
        "",
    ]
    missing = cli("ledger", "show", three[0], "5:5", three[1], "-o", "id")
    assert (missing.code, missing.out) == (4, f"{three[0]}\n")


def test_locate_shows_each_fragment_and_each_entry(cli: Cli, write: object, cluster: LocalCluster) -> None:
    ledger = write(b"".join(b"%d\n" % number for number in range(10)))  # type: ignore[operator]
    [(first, ensemble)] = cli("ledger", "show", ledger, "-o", "json").json["ensembles"].items()
    rows = cli("ledger", "locate", ledger, "-o", "json").json
    assert [(row["index"], row["bookieId"], row["state"]) for row in rows] == [
        (index, bookie, "rw") for index, bookie in enumerate(ensemble)
    ]
    assert {(row["firstEntryId"], row["lastEntryId"]) for row in rows} == {(int(first), 9)}
    for row in rows:
        there = cli("ledger", "read", ledger, "--bookie", row["bookieId"], "-o", "id").out.split()
        assert row["entryCount"] == len(there)
        for entry in range(10):
            places = cli("ledger", "locate", ledger, "--entry", entry, "-o", "json").json
            assert (row["bookieId"] in [place["bookieId"] for place in places]) == (str(entry) in there)
    assert [row["position"] for row in cli("ledger", "locate", ledger, "--entry", "4", "-o", "json").json] == [0, 1]
    assert cli("ledger", "locate", ledger, "--entry", "10").code == 4
    assert cli("ledger", "locate", ledger, "--entry", "-1").code == 2
    assert cli("ledger", "locate", "5:5").code == 4


def test_delete_of_many_from_a_file(cli: Cli, scope: str, three: list[str], tmp_path: Path) -> None:
    names = tmp_path / "ledgers"
    names.write_text(f"# to go\n{three[0]}\n\n2\n{json.dumps({'ledgerQualifiedName': three[2]})}\n{three[0]}\n")
    words = ("ledger", "delete", "--ledger-scope-id", scope, "--from-file", names)

    def left() -> list[str]:
        return cli("ledger", "list", "--ledger-scope-id", scope, "-o", "id").out.split()

    dry = cli(*words, "--dry-run", "-o", "ndjson")
    assert [(row["ledgerQualifiedName"], row["deleted"]) for row in dry.rows] == [(each, False) for each in three]
    refused = cli(*words)
    assert refused.code == 2
    assert f"3 ledgers (3 closed, with 3201 B) would be lost: {three[0]}, {three[1]}, {three[2]}" in refused.err
    assert left() == three
    undo = tmp_path / "undo"

    def shown() -> list[dict[str, object]]:
        rows = cli("ledger", "show", *three, "-o", "json").json
        # The time of creation is the store's where the metadata has none.
        return [{name: value for name, value in row.items() if name != "ctime"} for row in rows]

    before = shown()
    done = cli(*words, "--yes", "--undo", undo, "-o", "ndjson")
    assert [(row["ledgerQualifiedName"], row["deleted"]) for row in done.rows] == [(each, True) for each in three]
    assert left() == []
    assert f"bkctl metadata undo {undo}" in done.err
    again = cli(*words, "--yes")
    assert again.code == 4
    assert cli(*words, "--yes", "--ignore-missing").code == 0
    assert cli("metadata", "undo", undo, "--yes").code == 0
    assert shown() == before
    assert payloads(cli, three[1]) == [b"x" * 200]


def test_delete_deletes_nothing_after_a_failure_without_keep_going(cli: Cli, three: list[str], tmp_path: Path) -> None:
    stopped = cli("ledger", "delete", three[0], "9:9", three[1], "--yes")
    assert (stopped.code, stopped.out) == (4, "")
    assert cli("ledger", "show", three[0]).code == 0
    state = cli("ledger", "delete", *three, "--if-state", "OPEN", "--yes")
    assert state.code == 5
    assert state.err.count("\n") == 1
    assert "nothing was deleted" in state.err
    gone = cli("ledger", "delete", three[0], "9:9", three[1], "--yes", "--keep-going", "-o", "ndjson", "--rate", "50")
    assert gone.code == 3
    assert {row["ledgerQualifiedName"]: row["deleted"] for row in gone.rows} == {
        LedgerId(9, 9).qualified_name: False, three[0]: True, three[1]: True,
    }  # fmt: skip
    assert "No ledger" in gone.rows[0]["error"]
    assert gone.err.splitlines()[-1] == "bkctl: 1 ledger was not deleted"
    assert cli("ledger", "delete", three[2], "--if-state", "open", "--if-state", "closed", "--yes").code == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [("1\nzz\n", "line 2: Not a ledger id: 'zz'"), ("{}\n", "line 1: an object without"), ("7:1\n", "in scope 7")],
)
def test_a_file_of_ledgers_is_read_with_care(cli: Cli, tmp_path: Path, content: str, words: str) -> None:
    names = tmp_path / "ledgers"
    names.write_text(content)
    result = cli("ledger", "delete", "--from-file", names, "--ledger-scope-id", "8", "--yes")
    assert result.code == 2
    assert words in result.err
    assert cli("ledger", "delete", "--from-file", tmp_path / "none", "--yes").code == 4
    assert cli("ledger", "delete", "--yes").code == 2


def test_an_interrupted_backup_leaves_no_file(
    cli: Cli, three: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object, write: Callable[[bytes], object]) -> None:
        write(b"{")
        raise KeyboardInterrupt

    words = ("ledger", "delete", *three, "--backup", tmp_path / "backup", "--yes")
    with monkeypatch.context() as patch:
        patch.setattr("bkctl.metadata.admin.dump.sources.write_export", interrupted)
        assert cli(*words).code == 130
    assert not [path for path in tmp_path.iterdir() if "backup" in path.name]
    assert cli(*words).code == 0


def test_a_backup_is_an_export_that_import_takes(cli: Cli, three: list[str], tmp_path: Path) -> None:
    from bkctl.metadata.admin.dump.sources import ExportFile

    (tmp_path / "backups").mkdir()
    for target in (tmp_path / "backup", tmp_path / "backups"):
        done = cli("ledger", "delete", *three[:2], "--backup", target, "--yes", "--undo", f"{target}.undo")
        assert done.code == 0, done.err
        [file] = target.iterdir() if target.is_dir() else [target]
        assert file.stat().st_mode & 0o777 == 0o600
        with ExportFile(file) as export:
            assert export.check() == {"ledger": 2}
            assert [record.key for record in export.records()] == three[:2]
        restored = cli("metadata", "import", "-f", file, "--yes")
        assert restored.code == 0, restored.err
        assert len(cli("ledger", "show", *three, "-o", "json").json) == 3
    # Nothing is deleted where it cannot be kept.
    assert cli("ledger", "delete", *three, "--backup", tmp_path / "backup", "--yes").code == 5
    assert cli("ledger", "delete", *three, "--backup", tmp_path / "none" / "x", "--yes").code == 4
    assert len(cli("ledger", "show", *three, "-o", "json").json) == 3


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


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d", "--ledger-qualified-name 9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d"),
        ("0000000000000007000000000000000c", "--ledger-qualified-name 0000000000000007000000000000000c"),
        ("7:12", "--ledger-qualified-name 0000000000000007000000000000000c"),
        ("0xc", "--ledger-id 12"),
    ],
)
def test_write_names_the_option_for_an_id_in_place_of_a_file(cli: Cli, name: str, flag: str) -> None:
    answer = cli("ledger", "write", name)
    assert answer == (2, "", f"bkctl: No file {name} to write; {flag} writes stdin into a new ledger {name}\n")


def test_export_names_the_option_for_its_file(cli: Cli) -> None:
    answer = cli("metadata", "export", "metadata.ndjson")
    assert answer.code == 2
    assert "-f FILE names the file to write" in answer.err
