"""`bkctl ledger …` against Apache's cluster, judged by Apache's shell and Apache's client."""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import itertools
import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.servers import INTERLEAVED, SORTED, ApacheBookie, ApacheCluster, Java, read_ledgers, wait_for
from support.waiting import LIMIT_S

Ledgers = list[dict[str, Any]]


@pytest.fixture
def cli(apache_cluster: ApacheCluster) -> CommandLine:
    return CommandLine(apache_cluster.metadata_uri)


@pytest.fixture
def written(cli: CommandLine, tmp_path: Path) -> Callable[..., str]:
    """Writes lines into a ledger of its own, and gives the ledger's id."""

    def write(*options: object, lines: bytes = b"one\ntwo\nthree\n") -> str:
        path = tmp_path / "lines"
        path.write_bytes(lines)
        return cli("ledger", "write", path, "-o", "id", *options).ids[0]

    return write


def password_of(known: dict[str, Any]) -> str:
    return base64.b64decode(known["password"] or "").decode()


def sha256(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


# --- list, show ------------------------------------------------------------------------------------------------------


@pytest.mark.releases
def test_list_gives_exactly_the_ledgers_of_apaches_shell(
    cli: CommandLine, apache_cluster: ApacheCluster, apache_ledgers: Ledgers, java: Java
) -> None:
    text = java.shell(apache_cluster.bookies[0], "listledgers", check=True).stdout
    expected = sorted(map(int, re.findall(r"ledgerI[dD][=:] ?(\d+)", text)))
    ids = cli("ledger", "list", "-o", "id").ids
    assert list(map(int, ids)) == expected
    assert {one["ledgerId"] for one in apache_ledgers if not one["deleted"]} <= set(ids)
    assert [row["ledgerId"] for row in cli("ledger", "list", "-o", "ndjson").rows] == ids
    assert cli("ledger", "list", "--all-scopes", "-o", "id").ids == ids
    assert cli("ledger", "list", "--ledger-scope-id", 7, "-o", "id").ids == []

    assert cli("ledger", "list", "--count", "-o", "ndjson").rows == [{"count": len(ids)}]
    assert cli("ledger", "list", "--limit", 3, "-o", "id").ids == ids[:3]
    assert cli("ledger", "list", "--limit", 10**6, "-o", "id").ids == ids
    # The two trees that Apache keeps ids in, their ends, and ids that no ledger has.
    for after in (ids[0], ids[-2], ids[-1], "12345", "2147483647", "0x7fffffff", "2147483648", str(10**18), "0:3"):
        behind = [one for one in ids if int(one) > int(after.removeprefix("0:"), 0)]
        assert cli("ledger", "list", "--after", after, "-o", "id").ids == behind, after
    assert cli("ledger", "list", "--after", ids[4], "--limit", 2, "-o", "ndjson").rows[0]["ledgerId"] == ids[5]


def test_list_filters_ledgers_by_their_metadata(cli: CommandLine, apache_ledgers: Ledgers) -> None:
    rows = cli("ledger", "list", "-o", "ndjson").rows

    def ids(*options: object) -> list[str]:
        return cli("ledger", "list", "-o", "id", *options).ids

    assert ids("--state", "open") == [row["ledgerId"] for row in rows if row["state"] == "OPEN"]
    assert ids("--state", "OPEN", "--state", "in-recovery", "--state", "closed") == [row["ledgerId"] for row in rows]
    described = {one["ledgerId"] for one in apache_ledgers if one["name"] == "custom-metadata"}
    pulsar = base64.b64encode(b"pulsar").decode()
    found = [row["ledgerId"] for row in rows if row["customMetadata"].get("application") == pulsar]
    assert described <= set(found)
    assert ids("--custom-metadata", "application=pulsar") == found
    bookie = rows[0]["ensembles"]["0"][0]
    there = [row["ledgerId"] for row in rows if any(bookie in each for each in row["ensembles"].values())]
    assert ids("--bookie", bookie) == there
    assert ids("--min-size", "100KiB") == [row["ledgerId"] for row in rows if row["length"] >= 102400]
    assert ids("--min-age", "1d") == []
    assert ids("--max-age", "1d") == [row["ledgerId"] for row in rows]


@pytest.mark.releases
def test_show_prints_the_metadata_that_apaches_client_reads(cli: CommandLine, apache_ledgers: Ledgers) -> None:
    for known in apache_ledgers:
        answer = cli("ledger", "show", known["ledgerId"], "-o", "json")
        if known["deleted"]:
            assert answer.code == 4
            continue
        ctime = datetime.fromtimestamp(known["ctimeMs"] / 1000, UTC)
        expected = {
            "ledgerScopeId": "0",
            "ledgerId": known["ledgerId"],
            "ledgerQualifiedName": f"{int(known['ledgerId']):032x}",
            **{
                name: known[name]
                for name in (
                    "metadataFormatVersion", "state", "ensembleSize", "writeQuorumSize", "ackQuorumSize", "length",
                    "lastEntryId", "customMetadata", "ensembles",
                )
            },
            "digestType": known["digestType"].replace("MAC", "HMAC"),
            "ctime": f"{ctime:%Y-%m-%dT%H:%M:%S}.{known['ctimeMs'] % 1000:03d}Z",
        }  # fmt: skip
        shown = json.loads(answer.out)
        assert {name: shown[name] for name in expected} == expected
        assert ("pulsar" in shown) == (known["name"] == "custom-metadata")
        if known["password"]:
            secret = json.loads(cli("ledger", "show", known["ledgerId"], "-o", "json", "--show-secrets").out)
            assert secret["password"] == known["password"]
            texts = [cli("ledger", "show", known["ledgerId"], "-o", form).out for form in ("table", "csv", "ndjson")]
            for text in (answer.out, *texts):
                assert known["password"].encode() not in text
                assert password_of(known).encode() not in text


# --- read ------------------------------------------------------------------------------------------------------------


@pytest.mark.releases
@pytest.mark.parametrize("protocol", ["v3", "v2"])
def test_read_gives_every_ledger_of_apaches_client_byte_for_byte(
    cli: CommandLine, apache_ledgers: Ledgers, tmp_path: Path, protocol: str
) -> None:
    options = ["-o", "ndjson", "--body", "--protocol", protocol]
    secret = tmp_path / "password"
    ways = itertools.cycle(("option", "file", "environment"))
    for known in apache_ledgers:
        ledger_id, password = known["ledgerId"], password_of(known)
        if known["deleted"]:
            answer = cli("ledger", "read", ledger_id, *options)
            assert (answer.code, answer.out) == (4, b"")
            assert answer.problem.startswith(f"No ledger {ledger_id} in /ledgers of ZooKeeper at ")
            continue
        secret.write_text(f"{password}\n")
        match next(ways):
            case "option":
                answer = cli("ledger", "read", ledger_id, *options, "--password", password)
            case "file":
                answer = cli("ledger", "read", ledger_id, *options, "--password-file", secret)
            case _:
                answer = cli("ledger", "read", ledger_id, *options, LEDGER_PASSWORD=password)
        last = known["lastAddConfirmed"]
        if protocol == "v3" and known["explicitLac"] is not None:
            last = known["explicitLac"]
            # An Apache bookie that was started again has forgotten it when it is asked first (FileInfo.getExplicitLac).
            command = ("ledger", "read", ledger_id, *options, "--password", password)
            wait_for(lambda: len(cli(*command).rows) == last + 1, "the explicit LAC")  # noqa: B023
            answer = cli(*command)
        rows = answer.rows
        assert len(rows) == last + 1
        for row, entry in zip(rows, known["entries"], strict=False):
            payload = base64.b64decode(row.pop("payload"))
            assert sha256(payload) == entry["sha256"]
            confirmed = row.pop("lastAddConfirmed")
            assert -1 <= confirmed < row["entryId"]
            assert entry["lastAddConfirmed"] in (None, confirmed)
            assert row == {
                "ledgerScopeId": "0",
                "ledgerId": ledger_id,
                "ledgerQualifiedName": f"{int(ledger_id):032x}",
                "entryId": entry["entryId"],
                "length": entry["length"],
                "size": entry["size"],
                "formatVersion": 1,
            }
        assert {known["name"]: len(rows) > 0} == {known["name"]: known["name"] != "empty"}


@pytest.mark.parametrize("command", ["read", "tail"])
def test_a_wrong_password_is_one_line_and_exit_1(cli: CommandLine, apache_ledgers: Ledgers, command: str) -> None:
    ledger_id = next(one["ledgerId"] for one in apache_ledgers if one["name"] == "closed-MAC")
    for password in ("", "wrong", "secret of MAC "):
        answer = cli("ledger", command, ledger_id, "--password", password, "-o", "ndjson")
        assert (answer.code, answer.out) == (1, b"")
        assert answer.problem.startswith(
            (f"Wrong password for ledger {ledger_id}; ", f"Ledger {ledger_id} has a password; ")
        )


def test_read_gives_ranges_and_bare_payloads(cli: CommandLine, written: Callable[..., str]) -> None:
    ledger = written(lines=b"".join(b"%d\n" % number for number in range(12)))

    def ids(*options: object) -> list[int]:
        return list(map(int, cli("ledger", "read", ledger, "-o", "id", *options).ids))

    assert ids() == list(range(12))
    assert ids("--from", 3, "--to", 5) == [3, 4, 5]
    assert ids("--to", "0x2") == [0, 1, 2]
    assert ids("--from", 10) == [10, 11]
    assert ids("--from", 9, "--count", 2) == [9, 10]
    assert ids("--count", 100) == list(range(12))
    assert ids("--last", 2) == [10, 11]
    assert ids("--last", 100) == list(range(12))
    assert ids("--last", 2, "--to", 4) == [3, 4]
    assert cli("ledger", "read", ledger, "--format", "raw", "--from", 9).out == b"91011"
    for flag in ("--from", "--to"):
        answer = cli("ledger", "read", ledger, flag, 12)
        assert answer.code == 4
        assert answer.problem.startswith(f"Ledger {ledger} ends at entry 11, and {flag} is 12; ")
    empty = written(lines=b"")
    assert cli("ledger", "read", empty, "-o", "json").out == b"[]\n"
    assert cli("ledger", "read", empty, "--from", 0).problem.startswith(f"Ledger {empty} has no entries, and ")


def test_read_asks_one_bookie_for_its_replicas(
    cli: CommandLine, apache_cluster: ApacheCluster, written: Callable[..., str]
) -> None:
    ledger = written(lines=b"0\n1\n2\n3\n4\n5\n")
    ensemble = json.loads(cli("ledger", "show", ledger, "-o", "json").out)["ensembles"]["0"]
    for index, bookie_id in enumerate(ensemble):
        found = cli("ledger", "read", ledger, "--bookie", bookie_id, "-o", "ndjson").rows
        assert [row["entryId"] for row in found] == [id for id in range(6) if (index - id) % 3 < 2]
    answer = cli("ledger", "read", ledger, "--bookie", "127.0.0.1:1")
    assert answer.code == 2
    assert "Bookie 127.0.0.1:1 has no replica of the entries 0 to 5" in answer.problem


# --- write -----------------------------------------------------------------------------------------------------------

BINARY = bytes(range(256)) * 2500


@pytest.mark.releases
def test_apaches_client_reads_every_ledger_of_write(
    cli: CommandLine, apache_cluster: ApacheCluster, java: Java, tmp_path: Path
) -> None:
    files = {"text": b"l1\nl2", "more": b"l3\n\n", "binary": BINARY, "nothing": b""}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    secret = tmp_path / "password"
    secret.write_bytes(b"p\xc3\xa4ss\r\n")
    chunks = [BINARY[at : at + 65536] for at in range(0, len(BINARY), 65536)]
    lines = BINARY.split(b"\n")
    one = ("--ensemble-size", 1, "--write-quorum", 1, "--ack-quorum", 1)
    all_3 = ("--ensemble-size", 3, "--write-quorum", 3, "--ack-quorum", 2)
    # Options, files, stdin, the entries, digest type, password.
    cases: list[tuple[tuple[object, ...], list[str], bytes | None, list[bytes], str, bytes]] = [
        ((), [], b"a\n\nbc\nlast", [b"a", b"", b"bc", b"last"], "CRC32C", b""),
        ((), [], b"", [], "CRC32C", b""),
        ((), [], b"\n\n", [b"", b""], "CRC32C", b""),
        ((), ["text", "-", "more"], b"stdin\n", [b"l1", b"l2", b"stdin", b"l3", b""], "CRC32C", b""),
        ((), ["nothing"], None, [], "CRC32C", b""),
        (("--digest-type", "CRC32", "--password", "pw"), ["text", "more"], None, [b"l1", b"l2", b"l3", b""],
         "CRC32", b"pw"),
        (("--digest-type", "hmac", *all_3), ["binary"], None, lines, "MAC", b""),
        (("--digest-type", "MAC", "--password-file", secret), ["text"], None, [b"l1", b"l2"], "MAC", b"p\xc3\xa4ss"),
        (("--digest-type", "DUMMY", "--protocol", "v2"), ["binary"], None, lines, "DUMMY", b""),
        (("--record-size", "64KiB"), ["binary"], None, chunks, "CRC32C", b""),
        (("--record-size", "64KiB", *one, "--protocol", "v2"), [], BINARY, chunks, "CRC32C", b""),
        (("--record-size", 3), ["text", "more"], None, [b"l1\n", b"l2", b"l3\n", b"\n"], "CRC32C", b""),
        (("--record-size", 5242624), ["binary"], None, [BINARY], "CRC32C", b""),
        (("--ledger-id", (1 << 62) + 5), ["text"], None, [b"l1", b"l2"], "CRC32C", b""),
        (("--ledger-id", 2_000_000_077), ["text"], None, [b"l1", b"l2"], "CRC32C", b""),
    ]  # fmt: skip
    asked = []
    for options, names, stdin, entries, digest_type, password in cases:
        arguments = ["ledger", "write", *(name if name == "-" else tmp_path / name for name in names), *options]
        arguments += ["-o", "json", "--custom-metadata", "k=tä=g", "--custom-metadata", "empty="]
        answer = cli(*arguments) if stdin is None else cli.run(*arguments, input=stdin)
        assert answer.code == 0, (options, answer.err)
        shown = json.loads(answer.out)
        assert answer.err == f"Ledger {shown['ledgerId']}\n"
        assert shown["state"] == "CLOSED"
        assert shown["length"] == sum(map(len, entries))
        assert shown["lastEntryId"] == len(entries) - 1
        assert shown["customMetadata"] == {"empty": "", "k": base64.b64encode("tä=g".encode()).decode()}
        asked.append(shown | {"digestType": digest_type, "password": base64.b64encode(password).decode()})
    assert asked[-2]["ledgerId"] == str((1 << 62) + 5)
    assert asked[-1]["ledgerId"] == "2000000077"
    assert [asked[at]["ensembleSize"] for at in (0, 6, 10)] == [3, 3, 1]

    for protocol in ("v3", "v2"):
        for case, shown, found in zip(
            cases, asked, read_ledgers(java, apache_cluster.metadata_uri, protocol, asked), strict=True
        ):
            entries = case[3]
            assert "code" not in found, (case[0], found)
            assert [entry["sha256"] for entry in found["entries"]] == list(map(sha256, entries)), case[0]
            lengths = list(itertools.accumulate(map(len, entries)))
            assert [entry["length"] for entry in found["entries"]] == lengths
            for name in ("state", "length", "lastEntryId", "ensembles", "writeQuorumSize", "ackQuorumSize"):
                assert found[name] == shown[name], case[0]
            assert found["lastAddConfirmed"] == len(entries) - 1
            assert (found["digestType"], found["customMetadata"]) == (case[4], shown["customMetadata"])


def test_write_reads_pipes_once(cli: CommandLine) -> None:
    answer = cli.shell("$bkctl ledger write -o id <(printf 'a\\nb\\n') <(sleep 0.3; printf c)")
    rows = cli("ledger", "read", answer.ids[0], "-o", "ndjson", "--body").rows
    assert [base64.b64decode(row["payload"]) for row in rows] == [b"a", b"b", b"c"]


@contextlib.contextmanager
def processes(*started: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    return process.stderr.readline().decode()


def type_line(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


@pytest.mark.releases
def test_each_line_is_seen_by_tails_and_by_java_while_the_writer_is_at_work_and_survives_its_death(
    cli: CommandLine, apache_cluster: ApacheCluster, java: Java
) -> None:
    writer = cli.process("ledger", "write", "--password", "pw")
    with processes(writer):
        found = re.fullmatch(r"Ledger (\d+)\n", first_line(writer))  # on stderr before there is anything to write
        assert found is not None
        ledger = found[1]
        tails = [
            cli.process("ledger", "tail", ledger, "--password", "pw", "--body", "-o", "ndjson", "--protocol", protocol)
            for protocol in ("v3", "v2")
        ]
        with processes(*tails):
            for line in (b"one\n", b"\n", b"three\n"):
                type_line(writer, line)
                for tail in tails:
                    assert tail.stdout is not None
                    assert base64.b64decode(json.loads(tail.stdout.readline())["payload"]) == line[:-1]
            assert len(cli("ledger", "read", ledger, "--password", "pw", "-o", "id").ids) == 3
            known = {"ledgerId": ledger, "digestType": "CRC32C", "password": base64.b64encode(b"pw").decode()}
            (seen,) = read_ledgers(java, apache_cluster.metadata_uri, "v3", [known])
            assert (seen["state"], seen["lastAddConfirmed"]) == ("OPEN", 2)
            assert [entry["sha256"] for entry in seen["entries"]] == list(map(sha256, (b"one", b"", b"three")))

            type_line(writer, b"four\nhalf a li")
            for tail in tails:
                assert tail.stdout is not None
                assert json.loads(tail.stdout.readline())["entryId"] == 3
            writer.kill()
            writer.wait()
            assert json.loads(cli("ledger", "show", ledger, "-o", "json").out)["state"] == "OPEN"
            assert [tail.poll() for tail in tails] == [None, None]
            (row,) = cli("ledger", "recover", ledger, "--yes", "-o", "ndjson").rows
            assert (row["state"], row["lastEntryId"], row["length"]) == ("CLOSED", 3, 12)
            for tail in tails:  # the ledger is closed, so nothing more can come
                assert tail.communicate(timeout=LIMIT_S) == (b"", b"")
                assert tail.returncode == 0
        (row,) = cli("ledger", "recover", ledger, "--yes", "-o", "ndjson").rows
        assert (row["state"], row["lastEntryId"], row["length"]) == ("CLOSED", 3, 12)
        (seen,) = read_ledgers(java, apache_cluster.metadata_uri, "v2", [known])
        assert (seen["state"], len(seen["entries"])) == ("CLOSED", 4)


def test_interrupted_writer_closes_its_ledger_at_the_last_acknowledged_entry(cli: CommandLine) -> None:
    writer = cli.process("ledger", "write")
    with processes(writer):
        ledger = first_line(writer).split()[1]
        type_line(writer, b"one\ntwo\nhalf")
        read = lambda: cli("ledger", "read", ledger, "-o", "id").out  # noqa: E731
        wait_for(lambda: read() == b"0\n1\n", "two entries")
        writer.send_signal(signal.SIGINT)
        out, err = writer.communicate(timeout=LIMIT_S)
        assert (writer.returncode, out) == (130, b"")
        assert err.decode().splitlines() == [
            f"Ledger {ledger} is closed after its last acknowledged entry", "bkctl: Interrupted: Writing, 12 B"
        ]  # fmt: skip
    shown = json.loads(cli("ledger", "show", ledger, "-o", "json").out)
    assert (shown["state"], shown["lastEntryId"], shown["length"]) == ("CLOSED", 1, 6)


# --- recover, tail, delete, test -------------------------------------------------------------------------------------


@pytest.mark.releases
def test_recover_fences_a_java_writer_at_work(
    cli: CommandLine, apache_cluster: ApacheCluster, java: Java, tmp_path: Path
) -> None:
    before = set(cli("ledger", "list", "-o", "id").ids)
    errors = (tmp_path / "errors").open("w+")
    program = java.start("Bench", apache_cluster.metadata_uri, "v3", "add", "60s", 100, 3, 2, 2, 500, stderr=errors)
    try:
        new: set[str] = set()
        wait_for(lambda: new.update(set(cli("ledger", "list", "-o", "id").ids) - before) or new, "the writer's ledger")
        (ledger,) = new
        wait_for(lambda: len(cli("ledger", "read", ledger, "-o", "id").ids) > 1000, "entries")
        (row,) = cli("ledger", "recover", ledger, "--yes", "-o", "ndjson").rows
        assert row["state"] == "CLOSED"
        assert row["length"] == 100 * (row["lastEntryId"] + 1)
        assert program.wait(LIMIT_S) != 0
        assert re.search("fenced|ledger is closed", (tmp_path / "errors").read_text(), re.IGNORECASE)
    finally:
        java.end(program)
        errors.close()
    assert len(cli("ledger", "read", ledger, "-o", "id").ids) == row["lastEntryId"] + 1
    assert cli("ledger", "verify", ledger, "-o", "ndjson").rows == []


def test_tail_begins_at_from_or_last_and_ends_with_a_closed_ledger(
    cli: CommandLine, written: Callable[..., str]
) -> None:
    ledger = written(lines=b"".join(b"%d\n" % number for number in range(15)))

    def ids(*options: object) -> list[int]:
        return list(map(int, cli("ledger", "tail", ledger, "-o", "id", *options).ids))

    assert ids() == list(range(5, 15))
    assert ids("--last", 2) == [13, 14]
    assert ids("--last", 99, "--protocol", "v2") == list(range(15))
    assert ids("--from", 12) == [12, 13, 14]
    assert ids("--from", 15) == []
    assert cli("ledger", "tail", ledger, "--last", 3, "--format", "raw").out == b"121314"


def test_delete_asks_or_needs_yes_and_has_a_dry_run(cli: CommandLine, written: Callable[..., str]) -> None:
    first, second, third = written(), written(), written()
    answer = cli("ledger", "delete", first)
    assert answer.code == 2
    assert answer.problem.startswith(f"Ledger {first} (CLOSED, 3 entries, 11 B) would be lost: not asked")
    (row,) = cli("ledger", "delete", first, "--dry-run", "-o", "ndjson").rows
    assert (row["ledgerId"], row["state"], row["lastEntryId"], row["deleted"]) == (first, "CLOSED", 2, False)
    assert cli("ledger", "delete", first, "--if-state", "OPEN", "--yes").code == 5
    assert cli("ledger", "delete", first, second, (1 << 62) + 99, "--yes").code == 4  # nothing goes then
    for typed in ("n\n", "\n"):
        code, seen = cli.terminal("ledger", "delete", first, type_in=typed)
        assert code == 1
        assert f"Ledger {first} (CLOSED, 3 entries, 11 B) would be lost. Go ahead? [y/N]" in seen
        assert seen.endswith("bkctl: Declined; nothing was changed\n")
    for ledger in (first, second, third):
        assert cli("ledger", "show", ledger).code == 0
    code, seen = cli.terminal("ledger", "delete", first, type_in="y\n")
    assert code == 0, seen
    answer = cli("ledger", "delete", second, second, third, "--if-state", "closed", "--yes", "-o", "ndjson")
    assert [row["ledgerId"] for row in answer.rows] == [second, third]
    left = cli("ledger", "list", "-o", "id").ids
    for ledger in (first, second, third):
        assert ledger not in left
        for command in (("show",), ("read",), ("tail",), ("recover",), ("verify",), ("delete", "--yes")):
            assert cli("ledger", *command, ledger, "-o", "ndjson").code == 4, command


@pytest.mark.releases
@pytest.mark.parametrize("protocol", ["v3", "v2"])
def test_ledger_test_writes_reads_and_leaves_nothing(cli: CommandLine, protocol: str) -> None:
    before = cli("ledger", "list", "-o", "id").ids
    answer = cli("ledger", "test", "--count", 50, "--size", 300, "--protocol", protocol, "-o", "ndjson")
    (row,) = answer.rows
    assert (row["entryCount"], row["entrySize"], row["lastEntryId"], row["deleted"]) == (50, 300, 49, True)
    assert answer.err == f"Ledger {row['ledgerId']}\n"
    assert cli("ledger", "list", "-o", "id").ids == before
    refused = cli("ledger", "test", "--size", "6MB")
    assert (refused.code, refused.problem) == (2, "--size: an entry holds at most 5242624 bytes, not 6000000")
    (kept,) = cli("ledger", "test", "--count", 1, "--size", 0, "--keep", "--protocol", protocol, "-o", "id").ids
    assert cli("ledger", "delete", kept, "--yes", "-o", "id").ids == [kept]


# --- verify ----------------------------------------------------------------------------------------------------------


def findings(cli: CommandLine, *ledgers: str) -> list[dict[str, Any]]:
    answer = cli("ledger", "verify", *ledgers, "-o", "ndjson")
    rows = [json.loads(line) for line in answer.out.splitlines()]
    assert answer.code == (3 if rows else 0)
    if rows:
        counts = f"{len(rows)} finding{'s' * (len(rows) > 1)} in {len(ledgers)} ledger{'s' * (len(ledgers) > 1)}"
        assert answer.err.splitlines()[-1] == f"bkctl: {counts}"
    return rows


def flip(bookie: ApacheBookie, payload: bytes) -> None:
    """Flip a bit of an entry in a stopped bookie's entry log."""
    flipped = 0
    for path in sorted((bookie.ledger_dir / "current").glob("*.log")):
        content = path.read_bytes()
        at = content.find(payload)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([payload[0] ^ 1]))
            flipped += 1
    assert flipped == 1


@pytest.mark.releases
def test_verify_distinguishes_unreachable_damaged_and_missing_replicas(
    cli: CommandLine, apache_cluster: ApacheCluster, written: Callable[..., str]
) -> None:
    marks = [b"verify me: %d" % number for number in range(9)]
    lines = b"\n".join(marks)
    ledger, other = written(lines=lines), written("--digest-type", "HMAC", "--password", "pw")
    answer = cli("ledger", "verify", ledger, other, "-o", "ndjson")
    assert (answer.code, answer.out) == (0, b"")
    assert answer.err.splitlines() == [
        f"Ledger {ledger} is sound: 9 entries, 18 replicas read",
        f"Ledger {other} is sound: 3 entries, 6 replicas read",
    ]
    ensemble = json.loads(cli("ledger", "show", ledger, "-o", "json").out)["ensembles"]["0"]
    has = lambda bookie: [id for id in range(9) if (ensemble.index(bookie.bookie_id) - id) % 3 < 2]  # noqa: E731
    sorted_bookie, interleaved = apache_cluster.bookie(SORTED), apache_cluster.bookie(INTERLEAVED)

    # Stopped cleanly, so that all is in the entry logs and nothing comes back from the journal.
    sorted_bookie.stop()
    interleaved.stop()
    rows = findings(cli, ledger)
    assert {row["problem"] for row in rows} == {"unavailable"}
    assert {row["bookieId"]: row["entryId"] for row in rows} == {
        bookie.bookie_id: has(bookie)[0] for bookie in (sorted_bookie, interleaved)
    }
    for row in rows:
        assert row["message"].startswith("6 entries not checked: "), row
        assert row["message"].endswith(" cannot be reached: Connection refused"), row

    damaged_id = next(id for id in has(sorted_bookie) if id not in has(interleaved))
    flip(sorted_bookie, marks[damaged_id])
    for index in (interleaved.ledger_dir / "current").rglob(f"{int(ledger):x}.idx"):
        index.unlink()
    sorted_bookie.start()
    interleaved.start()
    rows = findings(cli, ledger, other)
    damaged = [row for row in rows if row["bookieId"] == sorted_bookie.bookie_id]
    assert [(row["ledgerId"], row["entryId"], row["problem"]) for row in damaged] == [(ledger, damaged_id, "damaged")]
    missing = [row for row in rows if row["bookieId"] == interleaved.bookie_id]
    assert (missing[0]["entryId"], missing[-1]["lastEntryId"]) == (has(interleaved)[0], has(interleaved)[-1])
    assert sum(row["entryCount"] for row in missing) == len(has(interleaved))
    assert {row["problem"] for row in missing} == {"missing"}
    assert len(rows) == len(damaged) + len(missing)

    # Reads go to the intact replica; the damaged one alone is corrupt data.
    for protocol in ("v3", "v2"):
        assert cli("ledger", "read", ledger, "--format", "raw", "--protocol", protocol).out == b"".join(marks)
    alone = cli("ledger", "read", ledger, "--bookie", sorted_bookie.bookie_id, "-o", "id")
    assert alone.code == 7
    assert f"Entry {damaged_id} of ledger {ledger}" in alone.err
    unchecked = cli("ledger", "read", ledger, "--bookie", sorted_bookie.bookie_id, "-o", "id", "--no-verify")
    assert list(map(int, unchecked.ids)) == has(sorted_bookie)


# --- scopes ----------------------------------------------------------------------------------------------------------


@pytest.mark.releases
def test_a_scoped_create_finds_no_bookie_here_and_leaves_no_trace(
    cli: CommandLine, apache_cluster: ApacheCluster
) -> None:
    nodes = cli("metadata", "tree", "-o", "ndjson").out
    logs = [bookie.log.stat().st_size for bookie in apache_cluster.bookies]
    for options in (
        ("--uuid",), ("--ledger-scope-id", 7), ("--ledger-scope-id", 7, "--ledger-id", 5),
        ("--ledger-qualified-name", "0000000000000007000000000000000a"), ("--uuid", "--ensemble-size", 1,
        "--write-quorum", 1, "--ack-quorum", 1),
    ):  # fmt: skip
        for command in ("write", "test"):
            answer = cli("ledger", command, *options, *(["/dev/null"] if command == "write" else []))
            assert (answer.code, answer.out) == (6, b"")
            assert "writable bookie" in answer.problem
            for bookie in apache_cluster.bookies:
                assert bookie.bookie_id in answer.problem
            assert answer.problem.endswith("start bookies that serve ledger scopes")
    assert cli("metadata", "tree", "-o", "ndjson").out == nodes
    for bookie, size in zip(apache_cluster.bookies, logs, strict=True):
        assert "Channel connected" not in bookie.log_tail(size)
    assert cli("ledger", "read", "7:5").code == 4
    answer = cli("ledger", "read", "7:5", "--protocol", "v2")
    assert answer.code == 2
    assert answer.problem == "Protocol v2 cannot carry a ledger scope such as 7; use v3"


# --- output ----------------------------------------------------------------------------------------------------------


def test_all_forms_of_output_say_the_same(cli: CommandLine, apache_ledgers: Ledgers) -> None:
    ledger = next(one["ledgerId"] for one in apache_ledgers if one["name"] == "closed-CRC32C")
    # Commands with their key; `show` ones print one object.
    commands: list[tuple[tuple[object, ...], str | None, bool]] = [
        (("ledger", "list"), "ledgerId", False),
        (("ledger", "list", "--count"), None, True),
        (("ledger", "show", ledger), "ledgerId", True),
        (("ledger", "show", ledger, "--show-secrets"), "ledgerId", True),
        (("ledger", "read", ledger, "--body"), "entryId", False),
        (("ledger", "tail", ledger), "entryId", False),
        (("ledger", "recover", ledger), "ledgerId", False),
        (("ledger", "verify", ledger), "entryId", False),
        (("ledger", "delete", ledger, "--dry-run"), "ledgerId", False),
        (("bookies", "list"), "bookieId", False),
        (("cluster", "info"), "instanceId", True),
        (("metadata", "layout"), "instanceId", True),
        (("metadata", "get", "LAYOUT"), "path", True),
        (("metadata", "tree", "--depth", 2), "path", False),
    ]
    csv.field_size_limit(1 << 20)
    for command, key, is_object in commands:
        rows = cli(*command, "-o", "ndjson").rows
        document = json.loads(cli(*command, "-o", "json").out)
        assert (document if not is_object else [document]) == rows, command
        table = list(csv.DictReader(io.StringIO(cli(*command, "-o", "csv").out.decode())))
        assert len(table) == len(rows)
        for line, row in zip(table, rows, strict=True):
            for name, text in line.items():
                value = row.get(name)
                if isinstance(value, dict | list):
                    assert json.loads(text) == value, (command, name)
                elif isinstance(value, bool):
                    assert text == str(value).lower(), (command, name)
                else:
                    assert text == ("" if value is None else str(value)), (command, name)
        answer = cli(*command, "-o", "id")
        if key is None:
            assert answer.code == 2
            assert answer.problem.startswith("-o id: ")
        else:
            assert answer.ids == [str(row[key]) for row in rows]
        shown = cli(*command)
        assert shown.code == 0
        assert b"\x1b" not in shown.out
        if not is_object:
            # Without findings, a sentence replaces the table.
            lines = 0 if command[1] == "verify" else len(rows) + 1
            assert shown.out.count(b"\n") == lines, command
        elif key is not None:
            assert str(rows[0][key]).encode() in shown.out


def test_a_reader_that_goes_away_ends_a_command_quietly(cli: CommandLine, apache_ledgers: Ledgers) -> None:
    many = next(one["ledgerId"] for one in apache_ledgers if one["name"] == "many-entries")
    lines = [
        f"$bkctl ledger read {many} --body -o {form} | head -1 >/dev/null; echo ${{PIPESTATUS[0]}}"
        for form in ("ndjson", "table", "csv", "json", "id")
    ]
    lines += [f"$bkctl ledger read {many} --format raw | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}"]
    lines += ["$bkctl ledger list -o ndjson | true; echo ${PIPESTATUS[0]}"]
    answer = cli.shell("\n".join(lines))
    assert answer.err == ""
    assert answer.out.split() == [b"0"] * len(lines)


def test_closed_or_full_streams_are_reported_in_one_line(cli: CommandLine, apache_ledgers: Ledgers) -> None:
    ledger = next(one["ledgerId"] for one in apache_ledgers if one["name"] == "closed-CRC32C")
    answer = cli.shell(f"$bkctl ledger show {ledger} >&-")
    assert (answer.code, answer.out, answer.err) == (0, b"", "")
    answer = cli.shell(f"$bkctl ledger show {ledger} -o id <&- 2>&-")
    assert (answer.code, answer.out) == (0, f"{ledger}\n".encode())
    answer = cli.shell(f"$bkctl ledger show {ledger} >/dev/full")
    assert (answer.code, answer.problem) == (1, "stdout: No space left on device")
    answer = cli.shell("$bkctl ledger write <&-")
    assert answer.code == 2
    assert answer.problem.startswith("stdin is closed, so there is nothing to write")
    assert cli.shell(f"$bkctl ledger delete {ledger} <&-").code == 2


def test_tables_on_a_terminal_have_colours_and_keep_to_its_width(cli: CommandLine, apache_ledgers: Ledgers) -> None:
    ledger = next(one["ledgerId"] for one in apache_ledgers if one["name"] == "closed-CRC32C")
    code, seen = cli.terminal("ledger", "read", ledger, "--body", "--last", 3)
    assert code == 0
    assert seen.startswith("\x1b[1mLEDGER")
    plain = re.sub(r"\x1b\[\d*m", "", seen)
    assert len(plain.splitlines()) == 4
    assert max(map(len, plain.splitlines())) <= 80
    code, seen = cli.terminal("ledger", "list", "--limit", 2)
    assert code == 0
    assert "\x1b[32mCLOSED\x1b[0m" in seen
    code, seen = cli.terminal("--no-color", "ledger", "show", ledger)
    assert code == 0
    assert "\x1b[" not in seen
    code, seen = cli.terminal("ledger", "show", (1 << 62) + 9)
    assert code == 4
    assert re.fullmatch(r"bkctl: No ledger \d+ in .*\n", seen), seen
