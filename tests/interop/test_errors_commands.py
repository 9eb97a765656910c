"""Failures of a cluster: each with its exit code, and one line that names the fault, the place and the next step."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.black_hole import black_hole_port
from support.command_line import Answer, CommandLine
from support.servers import ApacheCluster, free_port
from support.waiting import LIMIT_S

from bkctl.metadata.cluster import open_cluster
from bkctl.protocol.connection import BookieConnection

UNKNOWN = (1 << 62) + 4242


@pytest.fixture
def cli(apache_cluster: ApacheCluster, tmp_path: Path) -> CommandLine:
    (tmp_path / "lines").write_bytes(b"one\ntwo\n")
    return CommandLine(apache_cluster.metadata_uri)


@pytest.fixture
def ledger(cli: CommandLine, tmp_path: Path) -> str:
    """A closed ledger of two entries."""
    return cli("ledger", "write", tmp_path / "lines", "-o", "id").ids[0]


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where a server takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = []

        def take() -> None:
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for connection in taken:
            connection.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """--timeout is for the bookies alone: it says nothing of a busy metadata store."""
    limits = {"timeout_s": LIMIT_S, "connect_timeout_s": LIMIT_S}
    monkeypatch.setattr(
        "bkctl.metadata.cluster.open_cluster", lambda uri, **kept: open_cluster(uri, **{**kept, **limits})
    )


@pytest.fixture
def web_server() -> Iterator[int]:
    """A port where another server answers, in a protocol that is not a bookie's."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    with server.accept()[0] as connection:
                        connection.recv(1024)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                except OSError:
                    return

        threading.Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def black_hole() -> Iterator[int]:
    """A port that does not answer when one connects, as a host behind a firewall."""
    with black_hole_port() as port:
        yield port


def elsewhere(cluster: ApacheCluster, port: int) -> list[str]:
    """Options that send what is for the bookies to another port."""
    return [part for bookie in cluster.bookies for part in ("--bookie-address", f"{bookie.bookie_id}=127.0.0.1:{port}")]


def check(answer: Answer, code: int, *words: str) -> None:
    assert answer.code == code, answer
    problem = answer.problem
    assert "Traceback" not in problem
    for word in words:
        assert word in problem, problem


# --- what was asked for ----------------------------------------------------------------------------------------------

FORMS = "accepted are a decimal or 0x ledger id, SCOPE:ID, 32 hex digits (the qualified name) or a UUID"


@pytest.mark.parametrize(
    "text",
    [
        "abc", "", " 7", "7 ", "+5", "1_0", "٣", "1.0", "1e3", "0x", "0xg", "0x12345678901234567", str(1 << 64),
        ":", "7:", ":7", "1:2:3", "7:-5", "7:x", "0x:1", "123e4567-e89b-12d3-a456-42661417400",
        "123e4567e89b12d3a45642661417400", "{123e4567-e89b-12d3-a456-426614174000}", "1" * 33, "9" * 5000, "1\n2",
    ],
    ids=lambda text: repr(text)[:40],
)  # fmt: skip
def test_malformed_ledger_ids_are_refused(cli: CommandLine, text: str) -> None:
    for arguments in ((text,), ("--ledger-id", text)):
        check(cli("ledger", "show", *arguments), 2, "Not a ledger id: ", FORMS)
    check(cli("ledger", "list", "--after", text), 2, "Not a ledger id: ", FORMS)


def test_every_form_of_an_id_is_read(cli: CommandLine, ledger: str) -> None:
    number = int(ledger)
    name = f"{number:032x}"
    uuid = f"{name[:8]}-{name[8:12]}-{name[12:16]}-{name[16:20]}-{name[20:]}"
    for text in (ledger, f"0x{number:x}", f"0X{number:X}", f"0:{ledger}", f"0x0:0x{number:x}", name, f"0x{name}",
                 name.upper(), uuid, uuid.upper(), f"000{ledger}"):  # fmt: skip
        assert cli("ledger", "show", text, "-o", "id").ids == [ledger]
    for options in (("--ledger-id", ledger), ("--ledger-id", ledger, "--ledger-scope-id", 0),
                    ("--ledger-qualified-name", name), (ledger, "--ledger-id", ledger, "--ledger-qualified-name", uuid),
                    (name, "--ledger-scope-id", "0x0")):  # fmt: skip
        assert cli("ledger", "show", *options, "-o", "id").ids == [ledger]
    for options in (("--", "-5"), ("--ledger-id", "-5"), (str((1 << 64) - 5),)):
        check(cli("ledger", "show", *options), 4, "No ledger 18446744073709551611 in /ledgers of ZooKeeper at ")
    check(cli("ledger", "show", "-5"), 2, "put a negative id after -- or in --ledger-id")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2, "--ledger-id", 3), ("'2' and '3' name different ledgers (2 and 3)", "give one of them")),
        ((2, "--ledger-qualified-name", f"{3:032x}"), ("name different ledgers (3 and 2)",)),
        (("--ledger-id", 2, "--ledger-qualified-name", f"{3:032x}"), ("name different ledgers",)),
        (("7:2", "--ledger-scope-id", 8), ("'7:2' is in scope 7, but the scope id given is 8", "drop one")),
        (("0:2", "--ledger-scope-id", 8), ("is in scope 0, but the scope id given is 8",)),
        ((f"{7:016x}{2:016x}", "--ledger-scope-id", 8), ("is in scope 7",)),
        (("--ledger-qualified-name", f"{7:016x}{2:016x}", "--ledger-scope-id", 8), ("is in scope 7",)),
        (("--ledger-qualified-name", 2), ("Not a ledger qualified name: '2'", "give 32 hex digits or a UUID")),
        ((2, "--ledger-scope-id", "x"), ("Not a ledger scope id: 'x'",)),
        (("--ledger-scope-id", 7), ("Scope 7 is given, but no ledger id",)),
        ((), ("No ledger is given",)),
    ],
    ids=lambda value: " ".join(map(str, value))[:60],
)
def test_forms_that_disagree_or_name_no_ledger(
    cli: CommandLine, arguments: tuple[object, ...], words: tuple[str, ...]
) -> None:
    for command in ("show", "read", "tail"):
        check(cli("ledger", command, *arguments), 2, *words)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("ledger", "list", "--ledger-scope-id", 7, "--all-scopes"), 2, ("give one of them",)),
        (("ledger", "list", "--after", "7:3"), 2, ("'7:3' is in scope 7", "--ledger-scope-id 7 or --all-scopes")),
        (("ledger", "list", "--limit", 0), 2, ("--limit 0: must be 1 or more",)),
        (("ledger", "list", "--limit", "x"), 2, ("--limit: not a number: 'x'",)),
        (("ledger", "list", "--state", "x"), 2, ("--state 'x'", "OPEN, IN_RECOVERY, CLOSED")),
        (("ledger", "list", "--min-age", "x"), 2, ("--min-age: not a duration: 'x'",)),
        (("ledger", "list", "--min-size", "1XB"), 2, ("--min-size: not a size: '1XB'", "KiB")),
        (("ledger", "list", "--custom-metadata", "=x"), 2, ("--custom-metadata '=x'",)),
        (("ledger", "list", "-o", "xml"), 2, ("'xml' is not one of table, wide, json, ndjson, yaml, csv, id",)),
        (("ledger", "list", "--timeout", "soon"), 2, ("--timeout: not a duration: 'soon'",)),
        (("ledger", "list", "--nope"), 2, ("No such option: --nope", "try 'bkctl ledger list --help'")),
        (("ledger", "list", "x"), 2, ("unexpected extra argument",)),
        (("ledger", "read", 2, 3), 2, ("Got unexpected extra argument(s) (3)",)),
        (("ledger", "tail", 2, 3), 2, ("Got unexpected extra argument(s) (3)",)),
        (("ledger", "read", 1, "--from", "x"), 2, ("--from: not a number: 'x'",)),
        (("ledger", "read", 1, "--from", -1), 2, ("entry ids are 0 or more",)),
        (("ledger", "read", 1, "--from", 2, "--to", 1), 2, ("--from 2 is after --to 1",)),
        (("ledger", "read", 1, "--last", 2, "--from", 1), 2, ("--last excludes --from and --limit",)),
        (("ledger", "read", 1, "--to", 2, "--count", 1), 2, ("--to and --limit are given",)),
        (("ledger", "read", 1, "--protocol", "v4"), 2, ("'v4' is not one of v2, v3",)),
        (("ledger", "read", 1, "--format", "x"), 2, ("'x' is not one of base64, utf8, hex, raw",)),
        (("ledger", "read", 1, "--format", "raw", "-o", "json"), 2, ("--format raw",)),
        (("ledger", "read", 1, "--password", "a", "--password-file", "b"), 2, ("--password and --password-file",)),
        (("ledger", "read", 1, "--password-file", "/no/file"), 4, ("/no/file: No such file or directory",)),
        (("ledger", "read", 1, "--bookie-address", "x"), 2, ("--bookie-address 'x': not ID=HOST:PORT",)),
        (("ledger", "read", "7:1", "--protocol", "v2"), 2, ("Protocol v2 cannot carry a ledger scope", "use v3")),
        (("ledger", "tail", "7:1", "--protocol", "v2"), 2, ("Protocol v2 cannot carry a ledger scope",)),
        (("ledger", "verify", "7:1", "--protocol", "v2"), 2, ("Protocol v2 cannot carry a ledger scope",)),
        (("ledger", "tail", 1, "--from", 1, "--last", 1), 2, ("--from and --last are given",)),
        (("ledger", "delete", 1, "--if-state", "x"), 2, ("--if-state 'x': not a ledger state",)),
        (("ledger", "write", "/no/file"), 4, ("/no/file: No such file or directory",)),
        (("ledger", "write", "/"), 2, ("/: Is a directory",)),
        (("ledger", "write", "-", "-"), 2, ("stdin",)),
        (("ledger", "write", "/dev/null", "--record-size", 0), 2, ("record size",)),
        (("ledger", "write", "/dev/null", "--record-size", "6MB"), 2, ("holds at most 5242624 bytes, not 6000000",)),
        (("ledger", "write", "/dev/null", "--digest-type", "md5"), 2, ("'md5'; one of CRC32, HMAC, CRC32C, DUMMY",)),
        (("ledger", "write", "/dev/null", "--ensemble-size", "x"), 2, ("'x' is not a valid int",)),
        (("ledger", "write", "/dev/null", "--ensemble-size", 1), 2, ("do not fit",)),
        (("ledger", "write", "/dev/null", "--ack-quorum", 0), 2, ("do not fit",)),
        (("ledger", "write", "/dev/null", "--ensemble-size", 4), 6, ("4 writable bookies are needed, 3 are there",)),
        (("ledger", "write", "/dev/null", "--custom-metadata", "x"), 2, ("not KEY=VALUE",)),
        (("ledger", "write", "/dev/null", "--uuid", "--ledger-id", 1), 2, ("--uuid generates an id",)),
        (("ledger", "write", "/dev/null", "--uuid", "--protocol", "v2"), 2, ("Protocol v2 cannot carry",)),
        (("ledger", "write", "/dev/null", "--ledger-id", 1 << 63), 2, ("2^63 or more",)),
        (("ledger", "write", "/dev/null", "--ledger-id", -1), 2, ("2^63 or more",)),
        (("ledger", "write", "/dev/null", "--ledger-id", (1 << 63) - 1), 2, ("Apache's bookies delete every ledger",)),
        (("metadata", "get", "no/such/node"), 4, ("No node 'no/such/node'", "bkctl metadata tree")),
        (("ledger", "nope"), 2, ("No such command 'nope'",)),
    ],
    ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, tuple) else None,
)
def test_contradicting_arguments_change_nothing(
    cli: CommandLine, arguments: tuple[object, ...], code: int, words: tuple[str, ...]
) -> None:
    before = cli("ledger", "list", "-o", "id").ids
    check(cli(*arguments), code, *words)
    assert cli("ledger", "list", "-o", "id").ids == before


def test_an_unknown_ledger_is_exit_4_everywhere(cli: CommandLine, apache_cluster: ApacheCluster) -> None:
    where = f"/ledgers of ZooKeeper at {apache_cluster.zookeeper.connect_string}"
    for command in (("show",), ("read",), ("read", "--protocol", "v2"), ("read", "--recover"), ("tail",), ("recover",),
                    ("verify",), ("delete", "--yes"), ("delete", "--dry-run")):  # fmt: skip
        answer = cli("ledger", *command, UNKNOWN, "-o", "ndjson")
        check(answer, 4, f"No ledger {UNKNOWN} in {where}; 'bkctl ledger list' lists the existing ones")
        assert answer.out == b""
        scoped = cli("ledger", *[part for part in command if part not in ("--protocol", "v2")], "7:1")
        check(scoped, 4, f"No ledger 7:1 in {where}")


def test_an_id_that_is_taken_is_a_conflict(cli: CommandLine, ledger: str) -> None:
    check(cli("ledger", "write", "/dev/null", "--ledger-id", ledger), 5, f"Ledger {ledger} exists in ", "another id")


# --- where to connect ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "code", "words"),
    [
        ("", 2, ("The metadata URI is empty",)),
        ("foo", 2, ("'foo'", "no scheme", "zk+hierarchical://HOST:2181/ledgers")),
        ("127.0.0.1:2181/ledgers", 2, ("no scheme",)),
        ("foo://x", 8, ("the store 'foo', which bkctl does not support",)),
        ("ms://x:1", 8, ("the store 'ms', which bkctl does not support",)),
        ("metadata-store:rocksdb:/x", 8, ("rocksdb",)),
        ("etcd://127.0.0.1:1/x", 6, ("127.0.0.1:1", "refused")),
        ("zk:", 2, ("not followed by '://'",)),
        ("zk://", 2, ("names no host",)),
        ("zk:///ledgers", 2, ("names no host",)),
        ("zk://127.0.0.1:1/", 2, ("root path is empty",)),
        ("zk://127.0.0.1:x/ledgers", 2, ("'x' is not a port",)),
        ("zk://127.0.0.1:99999/ledgers", 2, ("'99999' is not a port",)),
        ("zk://:1/ledgers", 2, ("not HOST:PORT",)),
        ("zk://me:pw@127.0.0.1:1/ledgers", 2, ("a user name has no meaning",)),
        ("zk+foo://127.0.0.1:1/ledgers", 8, ("ledger manager type 'foo'", "it has hierarchical")),
        ("sqlite://x.db", 2, ("must be absolute",)),
        ("sqlite:///no/such/file.db", 4, ("No metadata store at /no/such/file.db",)),
        ("zk://no.such.host.invalid/ledgers", 6, ("no.such.host.invalid does not resolve", "check the metadata URI")),
    ],
)
def test_metadata_uris_that_lead_nowhere(uri: str, code: int, words: tuple[str, ...]) -> None:
    answer = CommandLine(None)("ledger", "list", "-u", uri, "--timeout", 10)
    check(answer, code, *words)
    assert answer.out == b""


def test_nothing_that_names_a_cluster(tmp_path: Path) -> None:
    nowhere = {"CONFIG": str(tmp_path / "config.toml")}
    cli = CommandLine(None)
    check(cli("ledger", "list", "-c", tmp_path / "none.conf"), 4, "No configuration file ", "none.conf")
    (tmp_path / "empty.conf").write_text("a=1\n")
    check(cli("ledger", "list", "-c", tmp_path / "empty.conf"), 2, "no metadataServiceUri and no zkServers")
    check(cli("ledger", "list", "-x", "prod", **nowhere), 4, "Context 'prod'", "config.toml", "bkctl context add")
    check(cli("ledger", "list", TIMEOUT="soon"), 2, "BKCTL_TIMEOUT: not a duration: 'soon'")
    check(cli("ledger", "list", OUTPUT="xml"), 2, "BKCTL_OUTPUT='xml'")


def test_a_zookeeper_without_a_cluster_at_that_path(cli: CommandLine, apache_cluster: ApacheCluster) -> None:
    for path in ("/nothing/here", "/zookeeper", "/ledgers/available"):
        answer = cli("ledger", "list", "-o", "ndjson", "-u", apache_cluster.zookeeper.metadata_uri(path))
        check(answer, 4, f"No BookKeeper cluster in {path} of ZooKeeper at ", "check the path at the end of the")


def test_a_uri_of_another_layout_names_the_right_one(cli: CommandLine, apache_cluster: ApacheCluster) -> None:
    for manager in ("flat", "longhierarchical", "longlonghierarchical"):
        answer = cli("ledger", "list", "-u", apache_cluster.zookeeper.metadata_uri("/ledgers", manager))
        check(answer, 2, f"HierarchicalLedgerManagerFactory, which zk+{manager}:// does not fit")
        assert answer.problem.endswith(f"use {apache_cluster.metadata_uri}")
    hosts = apache_cluster.zookeeper.connect_string
    ids = cli("ledger", "list", "-o", "id").ids
    for uri in (f"zk://{hosts}/ledgers", f"zk+null://{hosts}/ledgers", f"zk+hierarchical://{hosts}/ledgers/",
                f"metadata-store:zk:{hosts}/ledgers", f"zk://127.0.0.1:1;{hosts}/ledgers",
                f"zk://127.0.0.1:1,{hosts}/ledgers"):  # fmt: skip
        assert cli("ledger", "list", "-o", "id", "-u", uri).ids == ids, uri
    conf = apache_cluster.directory / "old.conf"
    conf.write_text(f"zkServers={hosts}\nzkLedgersRootPath=/ledgers\n")
    assert CommandLine(None)("ledger", "list", "-o", "id", "-c", conf).ids == ids


# --- servers that are not there --------------------------------------------------------------------------------------


def test_no_zookeeper(silent: int, black_hole: int) -> None:
    cli = CommandLine(None)
    refusing = free_port()
    for command in (("ledger", "list"), ("ledger", "show", 1), ("ledger", "write", "/dev/null"), ("bookies", "list"),
                    ("cluster", "info"), ("metadata", "layout")):  # fmt: skip
        answer = cli(*command, "-u", f"zk://127.0.0.1:{refusing}/ledgers")
        check(answer, 6, f"No ZooKeeper at 127.0.0.1:{refusing}: connection refused; check the metadata URI")
    for port in (silent, black_hole):
        answer = cli("ledger", "list", "-u", f"zk://127.0.0.1:{port}/ledgers", "--timeout", "500ms")
        check(answer, 6, f"ZooKeeper at 127.0.0.1:{port} gave no session within 0.5 s", "--connect-timeout")


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("protocol", ["v3", "v2"])
@pytest.mark.parametrize("how", ["refusing", "silent", "black hole", "web server"])
def test_no_bookie_answers(
    cli: CommandLine, apache_cluster: ApacheCluster, tmp_path: Path, request: pytest.FixtureRequest, how: str,
    protocol: str,
) -> None:  # fmt: skip
    port, word = {
        "refusing": lambda: (free_port(), "cannot be reached: Connection refused"),
        "silent": lambda: (request.getfixturevalue("silent"), "gave no answer within 1.5 s"),
        "black hole": lambda: (request.getfixturevalue("black_hole"), "cannot be reached: no answer within 1.5 s"),
        "web server": lambda: (request.getfixturevalue("web_server"), "sent a frame of 1213486160 bytes"),
    }[how]()
    options = [*elsewhere(apache_cluster, port), "--timeout", "1500ms", "--protocol", protocol]
    code = 7 if how == "web server" else 6
    closed = cli("ledger", "write", tmp_path / "lines", "-o", "id").ids[0]

    answer = cli("ledger", "read", closed, *options, "-o", "ndjson")
    assert (answer.code, answer.out) == (code, b"")
    assert re.match(f"Entry 0 of ledger {closed} cannot be read from any of its bookies ", answer.problem)
    assert word in answer.problem

    answer = cli("ledger", "write", tmp_path / "lines", *options, "-o", "ndjson")
    assert answer.code == 6
    first, left, problem = answer.err.splitlines()
    created = first.removeprefix("Ledger ")
    assert left == f"Ledger {created} is closed after its last acknowledged entry"
    assert problem.startswith(f"bkctl: Ledger {created} cannot be written: Bookie 127.0.0.1:")
    assert word in problem
    assert problem.endswith("see 'bkctl bookies list'")

    answer = cli("ledger", "verify", closed, *options, "-o", "ndjson")
    assert answer.code == 3
    assert len(answer.out.splitlines()) == 3  # one finding a bookie, not one an entry
    assert answer.out.count(b'"problem":"unavailable"') == 3

    answer = cli("ledger", "read", closed, *options, "--bookie", apache_cluster.bookies[0].bookie_id, "-o", "ndjson")
    check(answer, code, apache_cluster.bookies[0].bookie_id, word)


@pytest.mark.usefixtures("patient")
def test_recovery_that_reaches_no_bookie_can_be_tried_again(
    cli: CommandLine, apache_cluster: ApacheCluster, black_hole: int, silent: int
) -> None:
    with cli.process("ledger", "write") as writer:
        assert writer.stdin is not None
        assert writer.stderr is not None
        ledger = writer.stderr.readline().split()[1].decode()
        writer.stdin.write(b"one\ntwo\n")
        writer.stdin.flush()
        while cli("ledger", "read", ledger, "-o", "id").ids != ["0", "1"]:
            pass
        writer.kill()
    for port in (free_port(), black_hole, silent):
        options = [*elsewhere(apache_cluster, port), "--timeout", "1500ms"]
        check(cli("ledger", "recover", ledger, "--yes", "--quiet", *options, "-o", "ndjson"), 6, f"edger {ledger}")
        answer = cli("ledger", "tail", ledger, *options, "-o", "ndjson")
        check(answer, 6, f"Last add confirmed of ledger {ledger} is not known: too few of its bookies answer")
    (row,) = cli("ledger", "recover", ledger, "--yes", "-o", "ndjson").rows
    assert (row["state"], row["lastEntryId"], row["length"]) == ("CLOSED", 1, 6)


@pytest.mark.usefixtures("patient")
def test_one_bookie_that_is_silent_delays_but_hides_nothing(
    cli: CommandLine, apache_cluster: ApacheCluster, ledger: str, silent: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    connect = BookieConnection.open

    def patient_with_others(host: str, port: int, **settings: Any) -> Awaitable[BookieConnection]:
        return connect(host, port, **settings if port == silent else {**settings, "timeout_s": LIMIT_S})

    monkeypatch.setattr(BookieConnection, "open", patient_with_others)
    options = ["--bookie-address", f"{apache_cluster.bookies[0].bookie_id}=127.0.0.1:{silent}", "--timeout", "1500ms"]
    assert cli("ledger", "read", ledger, *options, "--format", "raw").out == b"onetwo"
    shape = ["--ensemble-size", 2, "--write-quorum", 2, "--ack-quorum", 2]
    for _ in range(3):  # the bookie may be in the ensemble or not
        (row,) = cli("ledger", "write", tmp_path / "lines", *shape, *options, "-o", "ndjson").rows
        assert (row["state"], row["lastEntryId"]) == ("CLOSED", 1)
        assert cli("ledger", "verify", row["ledgerId"]).code == 0
