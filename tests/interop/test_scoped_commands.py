"""Scoped ledgers through every ledger command, on a local cluster and on ZooKeeper beside Apache's client and shell."""

from __future__ import annotations

import base64
import itertools
import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from support import servers
from support.command_line import Answer, CommandLine
from support.own_bookies import OwnBookie
from support.own_cluster import OwnCluster, entry_log_bodies, journal_bodies, journal_version, start_all, stop_all
from support.servers import SORTED, Java, format_cluster, read_ledgers, wait_for, write_ledgers
from support.waiting import LIMIT_S

from bkctl.ids import LedgerId

SCOPES = [0, 7, 8, (1 << 64) - 1]
LINES = [b"", b"one", b"\xff\x00 no text", b"x" * 5000, *(b"line %d" % number for number in range(40))]

Rows = list[dict[str, Any]]


@dataclass
class Stored:
    """Return the directory of a bookie's files."""

    journal_dir: Path
    ledger_dir: Path

    @property
    def journals(self) -> list[Path]:
        return sorted(self.journal_dir.rglob("*.txn"))

    @property
    def entry_logs(self) -> list[Path]:
        return sorted(self.ledger_dir.rglob("*.log"))

    def rows(self, *command: object) -> Rows:
        arguments = [*command, "--dir", self.journal_dir, "--dir", self.ledger_dir, "-o", "ndjson"]
        return CommandLine(None)(*arguments).rows


@dataclass
class Place:
    """A cluster of three bookies of our own."""

    uri: str
    bookies: list[Stored]
    stop: Callable[[], None]
    start: Callable[[], None]

    @property
    def cli(self) -> CommandLine:
        return CommandLine(self.uri)

    def rows(self, *arguments: object) -> Rows:
        return self.cli(*arguments, "-o", "ndjson").rows

    def ids(self, *arguments: object) -> list[str]:
        return self.cli("ledger", "list", *arguments, "-o", "id").ids


def local_place(directory: Path) -> Iterator[Place]:
    """`cluster up`, with a home directory of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(directory / "share"))
        cli = CommandLine(None)

        def up() -> None:
            cli("cluster", "up", "--dir", directory / "cluster", "--bookies", 3)

        def down() -> None:
            answer = cli("cluster", "down", "--dir", directory / "cluster")
            assert answer.code == 0, answer.err

        up()
        stored = [directory / "cluster" / f"bookie-{index}" for index in range(3)]
        bookies = [Stored(each / "journal", each / "ledgers") for each in stored]
        try:
            yield Place(f"sqlite://{directory / 'cluster' / 'metadata.db'}", bookies, down, up)
        finally:
            down()


def zookeeper_place(request: pytest.FixtureRequest, directory: Path) -> Iterator[Place]:
    """Three bookies on a root that Apache's shell formatted."""
    zookeeper, java = request.getfixturevalue("zookeeper"), request.getfixturevalue("java")
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    format_cluster(java, uri, directory)
    own = OwnCluster(uri, directory)
    start_all(own.bookies)
    bookies = [Stored(each.journal_dir, each.ledger_dir) for each in own.bookies]
    try:
        yield Place(uri, bookies, lambda: stop_all(own.bookies), lambda: start_all(own.bookies))
    finally:
        own.kill()


@pytest.fixture(scope="module", params=["sqlite", "zookeeper"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("place")
    yield from local_place(directory) if request.param == "sqlite" else zookeeper_place(request, directory)


_numbers = itertools.count(5_000_000_000)


def write(place: Place, path: Path, *options: object, lines: list[bytes] = LINES) -> dict[str, Any]:
    """Write lines into a new ledger: its object, as `ledger write` printed it."""
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    (row,) = place.rows("ledger", "write", path, *options)
    return row


def payloads(found: Rows) -> list[bytes]:
    """Payloads by entry id, which count from 0."""
    assert [row["entryId"] for row in found] == list(range(len(found)))
    return [base64.b64decode(row["payload"]) for row in found]


def ledger_of(row: dict[str, Any]) -> LedgerId:
    """The ledger of a row, whose three fields must agree."""
    ledger = LedgerId(int(row["ledgerScopeId"]), int(row["ledgerId"]))
    assert row["ledgerQualifiedName"] == f"{ledger.scope_id:016x}{ledger.ledger_id:016x}"
    return ledger


def printed(ledger: LedgerId) -> str:
    return f"{ledger.scope_id:016x}{ledger.ledger_id:016x}" if ledger.scope_id else str(ledger.ledger_id)


def forms(ledger: LedgerId) -> list[list[object]]:
    """Ways to name one ledger on the command line."""
    name = f"{ledger.scope_id:016x}{ledger.ledger_id:016x}"
    return [
        [name],
        [str(uuid.UUID(name))],
        [f"{ledger.scope_id}:{ledger.ledger_id:#x}"],
        ["--ledger-qualified-name", name.upper()],
        [ledger.ledger_id, "--ledger-scope-id", hex(ledger.scope_id)],
        ["--ledger-id", ledger.ledger_id, "--ledger-scope-id", ledger.scope_id],
    ]


CREATE: dict[str, Callable[[], tuple[list[object], LedgerId | None, int | None]]] = {
    "uuid": lambda: (["--uuid"], None, None),
    "scope": lambda: (["--ledger-scope-id", 7], None, 7),
    "scope-and-id": lambda: (
        ["--ledger-scope-id", 7, "--ledger-id", number := next(_numbers)], LedgerId(7, number), 7,
    ),
    "qualified-name": lambda: (
        ["--ledger-qualified-name", f"{(1 << 64) - 2:016x}{(number := next(_numbers)):016x}"],
        LedgerId((1 << 64) - 2, number), (1 << 64) - 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", CREATE)
def test_a_scoped_ledger_round_trips_through_every_command(place: Place, form: str, tmp_path: Path) -> None:
    options, expected, scope_id = CREATE[form]()
    written = write(place, tmp_path / "lines", *options, "--password", "pw")
    ledger = ledger_of(written)
    assert ledger.scope_id != 0
    assert expected in (None, ledger)
    assert scope_id in (None, ledger.scope_id)
    assert written["state"] == "CLOSED"
    assert (written["lastEntryId"], written["length"]) == (len(LINES) - 1, sum(map(len, LINES)))

    in_scope = ["--ledger-scope-id", ledger.scope_id]
    assert printed(ledger) in place.ids(*in_scope)
    assert printed(ledger) in place.ids("--all-scopes")
    assert not {printed(ledger), str(ledger.ledger_id)} & set(place.ids())
    assert written in place.rows("ledger", "list", *in_scope)

    (first, *others) = [place.rows("ledger", "show", *name) for name in forms(ledger)]
    assert first == [written]
    assert all(other == first for other in others)

    entries = place.rows("ledger", "read", *forms(ledger)[0], "--password", "pw", "--body")
    assert payloads(entries) == LINES
    assert {(ledger_of(row), row["formatVersion"]) for row in entries} == {(ledger, 2)}
    tail = ["ledger", "tail", *forms(ledger)[3], "--password", "pw", "--body", "--from", 0]
    assert place.rows(*tail) == entries
    refused = place.cli("ledger", "read", *forms(ledger)[2], "--password", "wrong")
    assert refused.code == 1, refused
    v2 = place.cli("ledger", "read", *forms(ledger)[2], "--password", "pw", "--protocol", "v2")
    assert v2.code != 0, v2
    assert "v2" in v2.problem

    verified = place.cli("ledger", "verify", *forms(ledger)[4], "-o", "ndjson")
    assert (verified.code, verified.out) == (0, b""), verified
    assert f"{len(LINES)} entries, {2 * len(LINES)} replicas read" in verified.err

    dry = place.cli("ledger", "delete", *forms(ledger)[0], "--dry-run", "-o", "ndjson").rows
    assert [ledger_of(row) for row in dry] == [ledger]
    assert place.cli("ledger", "delete", *forms(ledger)[0]).code == 2
    (gone,) = place.rows("ledger", "delete", *forms(ledger)[5], "--yes")
    assert (ledger_of(gone), gone["deleted"]) == (ledger, True)
    for command in (["show"], ["read"], ["tail"], ["recover"], ["verify"], ["delete", "--yes"]):
        answer = place.cli("ledger", *command, *forms(ledger)[1])
        given = next(text for text in forms(ledger)[1] if not text.startswith("-"))
        assert (answer.code, answer.problem.startswith(f"No ledger {given} in ")) == (4, True), answer
    assert printed(ledger) not in place.ids("--all-scopes")


@pytest.mark.parametrize("form", CREATE)
def test_a_scoped_ledger_is_tailed_while_it_is_written_and_recovered_when_its_writer_died(
    place: Place, form: str
) -> None:
    options, _, _ = CREATE[form]()
    with place.cli.process("ledger", "write", *options, "--ack-quorum", 2) as writer:
        assert writer.stdin is not None
        assert writer.stderr is not None
        try:
            ledger = LedgerId.parse(re.findall(rb"^Ledger (\S+)", writer.stderr.readline())[0].decode())
            assert ledger.scope_id != 0
            writer.stdin.write(b"first\nsecond\n")
            writer.stdin.flush()
            with place.cli.process("ledger", "tail", printed(ledger), "--format", "raw") as tail:
                assert tail.stdout is not None
                try:
                    assert read_for(tail.stdout, 11) == b"firstsecond"
                    writer.stdin.write(b"third\n")
                    writer.stdin.flush()
                    assert read_for(tail.stdout, 5) == b"third"
                    writer.kill()
                    (row,) = place.rows("ledger", "recover", printed(ledger), "--yes")
                    assert (ledger_of(row), row["state"], row["lastEntryId"]) == (ledger, "CLOSED", 2)
                    assert tail.wait(LIMIT_S) == 0
                finally:
                    tail.kill()
        finally:
            writer.kill()
    found = place.rows("ledger", "read", printed(ledger), "--body")
    assert payloads(found) == [b"first", b"second", b"third"]
    assert "is sound" in place.cli("ledger", "verify", printed(ledger)).err
    assert place.cli("ledger", "delete", printed(ledger), "--yes").code == 0


def read_for(stream: Any, size: int, timeout_s: float = LIMIT_S) -> bytes:
    """The next `size` bytes of a pipe."""
    found = b""
    deadline = time.monotonic() + timeout_s
    while len(found) < size and time.monotonic() < deadline:
        if wait([stream], 0.2):
            data = stream.read1(size - len(found))
            if not data:
                break
            found += data
    return found


def test_one_ledger_id_in_several_scopes_never_mixes(place: Place, tmp_path: Path) -> None:
    number = next(_numbers)
    ledgers = [LedgerId(scope_id, number) for scope_id in SCOPES]
    texts = {
        ledger: [b"%d of scope %d" % (entry_id, ledger.scope_id) for entry_id in range(20 + 3 * at)]
        for at, ledger in enumerate(ledgers)
    }
    everywhere = ["--ensemble-size", 3, "--write-quorum", 3, "--ack-quorum", 3]
    for ledger in ledgers:
        named = ["--ledger-id", number, "--ledger-scope-id", ledger.scope_id]
        row = write(place, tmp_path / "lines", *named, *everywhere, lines=texts[ledger])
        assert ledger_of(row) == ledger
        again = place.cli("ledger", "write", tmp_path / "lines", *named)
        assert (again.code, printed(ledger) in again.problem) == (5, True), again

    def check_served(gone: LedgerId | None = None) -> None:
        there = [ledger for ledger in ledgers if ledger != gone]
        for ledger in ledgers:
            listed = [one for one in place.ids("--ledger-scope-id", ledger.scope_id) if one == printed(ledger)]
            assert listed == [printed(ledger)] * (ledger != gone)
        listed = [row for row in place.rows("ledger", "list", "--all-scopes") if row["ledgerId"] == str(number)]
        assert [ledger_of(row) for row in listed] == there
        assert [row["lastEntryId"] for row in listed] == [len(texts[ledger]) - 1 for ledger in there]
        for ledger in there:
            assert place.rows("ledger", "show", printed(ledger)) == [row for row in listed if ledger_of(row) == ledger]
            found = place.rows("ledger", "read", printed(ledger), "--body")
            assert payloads(found) == texts[ledger]
            assert {(ledger_of(row), row["formatVersion"]) for row in found} == {(ledger, 2 if ledger.scope_id else 1)}
        assert place.cli("ledger", "verify", *map(printed, there)).code == 0

    check_served()
    place.stop()
    for bookie in place.bookies:
        for ledger in ledgers:
            check_stored(bookie, ledger, texts[ledger])
        assert {ledger_of(row).scope_id for row in bookie.rows("journal", "read", "--ledger-scope-id", 7)} == {7}
        assert {ledger_of(row).scope_id for row in bookie.rows("entrylog", "read", "--ledger-scope-id", 7)} == {7}
        bare = bookie.rows("entrylog", "read", "--ledger", number, "--ledger-scope-id", 8)
        assert {ledger_of(row) for row in bare} == {LedgerId(8, number)}
    place.start()
    check_served()
    assert place.cli("ledger", "delete", printed(ledgers[1]), "--yes").code == 0
    check_served(gone=ledgers[1])
    assert place.cli("ledger", "delete", printed(ledgers[0]), "--yes").code == 0
    assert place.cli("ledger", "read", printed(ledgers[0])).code == 4
    assert payloads(place.rows("ledger", "read", printed(ledgers[2]), "--body")) == texts[ledgers[2]]
    assert printed(ledgers[0]) not in place.ids("--all-scopes")


def check_stored(bookie: Stored, ledger: LedgerId, texts: list[bytes]) -> None:
    """The files of a stopped bookie, by command, have exactly these entries of the ledger."""
    scoped = ledger.scope_id != 0
    digest = [] if scoped else ["--digest-type", "CRC32C"]
    wanted = ["--ledger", printed(ledger), "--body", "--type", "entry", *digest]
    in_journal = bookie.rows("journal", "read", *wanted)
    in_log = bookie.rows("entrylog", "read", *wanted)
    for found in (in_journal, in_log):
        assert {ledger_of(row) for row in found} == {ledger}
        assert payloads(sorted(found, key=lambda row: row["entryId"])) == texts
        assert {row["formatVersion"] for row in found} == {2 if scoped else 1}
    assert {("scoped" in row["file"]) for row in in_log} == {scoped}
    located = bookie.rows("bookie", "index", "show", printed(ledger))
    assert {ledger_of(row) for row in located} == {ledger}
    assert {row["entryId"]: (row["logId"], row["offset"]) for row in located} == {
        row["entryId"]: (row["logId"], row["offset"]) for row in in_log
    }
    (meta,) = bookie.rows("bookie", "index", "show", printed(ledger), "--meta")
    assert (ledger_of(meta), meta["entryCount"], meta["fenced"]) == (ledger, len(texts), False)
    halves = [f"{ledger.scope_id:016x}", f"{ledger.ledger_id:016x}"]
    if scoped:
        assert meta["file"].endswith("/".join(half[at : at + 8] for half in halves for at in (0, 8)) + ".idx")


def test_a_scoped_entry_costs_nine_bytes_more_in_journal_and_entry_log(place: Place, tmp_path: Path) -> None:
    plain, scoped = LedgerId(0, next(_numbers)), LedgerId(7, next(_numbers))
    for ledger in (plain, scoped):
        name = ["--ledger-qualified-name", ledger.qualified_name]
        write(place, tmp_path / "lines", *name, "--ensemble-size", 1, "--write-quorum", 1, "--ack-quorum", 1)
    # Any bookie may have them: each has its own, or nothing.
    place.stop()
    found: dict[str, dict[LedgerId, dict[int, bytes]]] = {"journal": {}, "log": {}}
    plain_head = plain.ledger_id.to_bytes(8, "big")
    scoped_head = b"\xa3" + scoped.value.to_bytes(16, "big")
    for bookie in place.bookies:
        bodies = {
            "journal": [body for path in bookie.journals for body in journal_bodies(path)],
            "log": [body for path in bookie.entry_logs for body in entry_log_bodies(path)],
        }
        for where, each in bodies.items():
            for body in each:
                for ledger, head in ((plain, plain_head), (scoped, scoped_head)):
                    entry_id = int.from_bytes(body[len(head) : len(head) + 8], "big")
                    if body.startswith(head) and entry_id < 1 << 62:
                        assert entry_id not in found[where].setdefault(ledger, {})
                        found[where][ledger][entry_id] = body
    place.start()
    for where in ("journal", "log"):
        assert list(found[where][plain]) == list(found[where][scoped]) == list(range(len(LINES)))
        for entry_id, line in enumerate(LINES):
            assert len(found[where][plain][entry_id]) == 32 + 4 + len(line)
            assert len(found[where][scoped][entry_id]) == 32 + 4 + len(line) + 9
            # LAC, ledger length and payload stand behind one another alike.
            assert found[where][scoped][entry_id][25:41] == found[where][plain][entry_id][16:32]
            assert found[where][scoped][entry_id][45:] == found[where][plain][entry_id][36:] == line


def test_journals_have_version_7_only_where_scoped(tmp_path: Path) -> None:
    """Two bookies; one scoped ledger on one of them."""
    from bkctl.metadata.cluster import open_cluster

    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    with open_cluster(uri, create=True):
        pass
    own = OwnCluster(uri, tmp_path, (SORTED, SORTED), {"flushInterval": 600_000})
    cli = CommandLine(uri)
    lines = tmp_path / "lines"
    lines.write_bytes(b"line\n" * 10)
    both = ["--ensemble-size", 2, "--write-quorum", 2, "--ack-quorum", 2]
    one = ["--ensemble-size", 1, "--write-quorum", 1, "--ack-quorum", 1]

    def versions(bookie: OwnBookie) -> list[int]:
        return [journal_version(path) for path in sorted((bookie.journal_dir / "current").glob("*.txn"))]

    try:
        start_all(own.bookies)
        assert cli("ledger", "write", lines, *both).code == 0
        assert [versions(bookie) for bookie in own.bookies] == [[6], [6]]
        (row,) = cli("ledger", "write", lines, *one, "--uuid", "-o", "ndjson").rows
        scoped = own.by_id(row["ensembles"]["0"][0])
        (plain,) = [bookie for bookie in own.bookies if bookie is not scoped]
        assert cli("ledger", "write", lines, *both).code == 0
        assert versions(plain) == [6]
        assert versions(scoped) == [6, 7]
        for bookie in own.bookies:
            for path in sorted((bookie.journal_dir / "current").glob("*.txn")):
                holds_scoped = any(body[0] & 0x80 for body in journal_bodies(path))
                assert holds_scoped == (journal_version(path) == 7)
        own.kill()
        start_all(own.bookies)
        assert set(versions(plain)) == {6}
        assert versions(scoped)[-1] == 7
        assert cli("ledger", "write", lines, *both).code == 0
        stop_all(own.bookies)
        for bookie in own.bookies:
            assert set(versions(bookie)) == {6}
        assert not (plain.journal_dir / "current" / "scoped").exists()
        aside = list((scoped.journal_dir / "current" / "scoped").glob("*.txn"))
        assert aside
        assert {journal_version(path) for path in aside} == {7}
        start_all(own.bookies)
        assert len(cli("ledger", "read", row["ledgerQualifiedName"], "-o", "ndjson").rows) == 10
        assert len(cli("ledger", "list", "--all-scopes", "-o", "id").ids) == 4
        assert cli("ledger", "verify", *cli("ledger", "list", "--all-scopes", "-o", "id").ids).code == 0
    finally:
        own.kill()


@pytest.mark.releases
@pytest.mark.parametrize("place", ["zookeeper"], indirect=True)
def test_apaches_client_and_shell_work_beside_the_scopes(place: Place, java: Java, tmp_path: Path) -> None:
    number = next(_numbers)
    ledger_ids = {LedgerId(scope_id, number) for scope_id in SCOPES}
    for ledger in ledger_ids:
        lines = [b"%d in %d" % (entry_id, ledger.scope_id) for entry_id in range(5)]
        write(place, tmp_path / "lines", "--ledger-qualified-name", ledger.qualified_name, lines=lines)
    known = write_ledgers(java, place.uri, "v3", small=True)
    conf = servers.shell_conf(tmp_path / "shell.conf", place.uri)

    listed = set(map(int, re.findall(r"ledgerI[dD][=:] ?(\d+)", java.shell(conf, "listledgers", check=True).stdout)))
    assert listed == set(map(int, place.ids()))
    assert {number, *(int(one["ledgerId"]) for one in known if not one["deleted"])} <= listed
    said = java.shell(conf, "ledgermetadata", "-ledgerid", number, check=True).stdout
    assert "CLOSED" in said
    assert "lastEntryId=4" in said
    there = [one for one in known if not one["deleted"]]
    asked = [{"ledgerId": str(number), "digestType": "CRC32C", "password": ""}, *there]
    found, *others = read_ledgers(java, place.uri, "v2", asked)
    assert [entry["size"] for entry in found["entries"]] == [len(b"%d in 0" % entry_id) for entry_id in range(5)]
    for one, other in zip(there, others, strict=True):
        assert len(other["entries"]) == other["lastAddConfirmed"] + 1 >= one["lastAddConfirmed"] + 1
    java.shell(conf, "deleteledger", "-ledgerid", number, "-force", check=True)
    wait_for(lambda: str(number) not in place.ids(), "the deletion")
    for ledger in ledger_ids - {LedgerId(0, number)}:
        read: Answer = place.cli("ledger", "read", printed(ledger), "--format", "raw")
        assert read.out == b"".join(b"%d in %d" % (entry_id, ledger.scope_id) for entry_id in range(5))
