"""Entry logs of Apache's bookies: running, snapshotted, stopped, of every logger, after collection and compaction."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from support import apache_shell, golden
from support.command_line import CommandLine
from support.servers import (
    BOOKIE_NUMBERS,
    DB,
    INTERLEAVED,
    SORTED,
    ApacheBookie,
    ApacheCluster,
    Java,
    ZooKeeperServer,
    format_cluster,
    offline_conf,
    wait_for,
)

from bkctl.files.entry_log import EntryLogReader

Rows = list[dict[str, Any]]

#: Small logs, as many as there are ledgers in a test, and no garbage collection unless asked for.
SMALL_LOGS: Final[dict[str, object]] = {
    "logSizeLimit": 128 * 1024,
    "flushInterval": 300,
    "gcWaitTime": 3_600_000,
    "minorCompactionInterval": 0,
    "majorCompactionInterval": 0,
}
COLLECTING: Final[dict[str, object]] = SMALL_LOGS | {
    "gcWaitTime": 1000,
    "minorCompactionInterval": 1,
    "majorCompactionInterval": 2,
}
DIRECT_IO: Final[dict[str, object]] = {
    "dbStorage_directIOEntryLogger": "true",
    "dbStorage_directIOEntryLoggerTotalWriteBufferSizeMB": 8,
    "dbStorage_directIOEntryLoggerTotalReadBufferSizeMB": 8,
}
ENTRY_SIZE: Final = 1000
ENTRIES: Final = 30


def cli(*arguments: object, uri: str | None = None) -> Rows:
    return CommandLine(uri)("entrylog", *arguments, "-o", "ndjson").rows


def logs_in(*directories: Path) -> list[Path]:
    """The logs of a bookie that have entries, in order."""
    found = [path for each in directories for path in (each / "current").glob("*.log") if path.stat().st_size > 1024]
    return sorted(found, key=lambda path: (str(path.parent), int(path.stem, 16)))


def told(rows: Rows) -> Rows:
    """Of each record what Apache's shell tells too."""
    names = ("type", "ledgerId", "entryId", "offset", "recordSize", "lastAddConfirmed")
    return [{name: row[name] for name in names} for row in rows]


def sizes(rows: Rows) -> dict[str, int]:
    return {row["ledgerId"]: row["size"] for row in rows}


@contextmanager
def paused(bookie: ApacheBookie) -> Iterator[None]:
    """A bookie that stands still between two of its instructions."""
    os.killpg(bookie.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(bookie.pid, signal.SIGCONT)


def active_ledgers(text: str) -> tuple[dict[str, int | None], dict[str, float]]:
    """`activeledgers`: ledger id → bytes, and remainingSize, totalSize and usage (none where nothing is alive).

    Before 4.18 it prints ids alone.
    """
    ledgers: dict[str, int | None] = {}
    usage: dict[str, float] = {}
    for line in text.splitlines():
        if match := re.search(r"Size for ledger's entries \{ledgerId=(\d+), totalSize=(\d+)", line):
            ledgers[match[1]] = int(match[2])
        elif match := re.fullmatch(r"(\d+) *", line):
            ledgers[match[1]] = None
        elif match := re.search(r"\bremainingSize=(\d+), totalSize=(\d+), usage=([0-9.E-]+)", line):
            usage = {"remainingSize": int(match[1]), "totalSize": int(match[2]), "usage": float(match[3])}
    return ledgers, usage


def compare_with_shell(java: Java, conf: Path, log: Path) -> int:
    """Assert that `read` and `show` say of a log what `readlog` and `readlogmetadata` say; returns its entries."""
    log_id = int(log.stem, 16)
    rows = apache_shell.records(java.shell(conf, "readlog", log_id, check=True).stdout)
    assert told(cli("read", log)) == rows
    assert sizes(cli("show", log)) == apache_shell.log_metadata(java.shell(conf, "readlogmetadata", log.name).stdout)
    return len(rows)


def compare_active(java: Java, conf: Path, uri: str, log: Path) -> None:
    """Assert that `active` and `garbage` say of a log what `activeledgers` says."""
    answer = java.shell(conf, "activeledgers", "-l", int(log.stem, 16), "-t", 60_000)
    ledgers, usage = active_ledgers(answer.stdout)
    rows = cli("active", log, uri=uri)
    alive = {row["ledgerId"]: row["size"] for row in rows if row["state"] == "alive"}
    assert alive.keys() == ledgers.keys(), answer.stdout
    assert {ledger: ledgers[ledger] or size for ledger, size in alive.items()} == alive
    assert {row["state"] for row in rows} <= {"alive", "dead"}
    assert sizes(rows) == sizes(cli("show", log))
    (row,) = cli("garbage", log, uri=uri)
    assert row["totalSize"] == sum(each["size"] for each in rows)
    assert row["remainingSize"] == sum(alive.values())
    assert {name: row[name] for name in usage} == pytest.approx(usage)
    assert usage or None in ledgers.values() or not ledgers


@pytest.fixture(scope="module", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the undo file of `ledger delete` out of the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


# --- the shared bookies, one of each storage class -------------------------------------------------------------------


@pytest.fixture(scope="module")
def deleted(_apache_cluster: ApacheCluster, apache_ledgers: Rows) -> list[str]:
    """Ledgers that are on each of the shared bookies, and in the metadata no more."""
    _apache_cluster.ensure_up()
    line = CommandLine(_apache_cluster.metadata_uri)
    ids = []
    for number in range(3):
        data = random.Random(number).randbytes(ENTRIES * ENTRY_SIZE)
        quorum = ("--ensemble-size", 3, "--write-quorum", 3, "--ack-quorum", 3)
        ids += line.run("ledger", "write", "--record-size", ENTRY_SIZE, *quorum, "-o", "id", input=data).ids
    assert line.run("ledger", "delete", *ids, "--yes").code == 0
    return ids


@pytest.fixture(params=BOOKIE_NUMBERS)
def one(request: pytest.FixtureRequest, apache_cluster: ApacheCluster, deleted: list[str]) -> ApacheBookie:
    return apache_cluster.bookies[request.param]


def test_a_running_bookie_and_what_it_looked_like_at_one_moment(
    one: ApacheBookie, java: Java, apache_cluster: ApacheCluster, tmp_path: Path
) -> None:
    uri = apache_cluster.metadata_uri
    if one.storage == SORTED:
        # Its entries wait in memory for more; what a start replays goes to the log.
        one.stop()
        one.start()
    with paused(one):
        shutil.copytree(one.ledger_dir, tmp_path / "ledgers")
    # Live, while it writes.
    live = cli("list", one.ledger_dir)
    assert {row["state"] for row in live} <= {"empty", "open", "closed"}
    assert len(cli("read", one.ledger_dir)) > 1000
    assert cli("active", one.ledger_dir, uri=uri)
    assert cli("garbage", one.ledger_dir, uri=uri)
    # The snapshot.
    conf = offline_conf(tmp_path / "bk_server.conf", tmp_path / "journal", tmp_path / "ledgers", one.storage)
    conf.write_text(f"{conf.read_text()}metadataServiceUri={uri}\n")
    found = logs_in(tmp_path / "ledgers")
    closed = {row["logId"] for row in cli("list", tmp_path / "ledgers") if row["state"] == "closed"}
    largest = max(found, key=lambda path: path.stat().st_size)
    unfinished = [path for path in found if int(path.stem, 16) not in closed]
    chosen = {largest, *unfinished[-1:]}
    assert sum(compare_with_shell(java, conf, log) for log in chosen) > 100
    for log in {largest, found[-1]}:
        compare_active(java, conf, uri, log)


def test_a_stopped_bookie(one: ApacheBookie, java: Java, apache_cluster: ApacheCluster, deleted: list[str]) -> None:
    uri = apache_cluster.metadata_uri
    one.stop()
    log = logs_in(one.ledger_dir)[-1]
    conf = offline_conf(one.directory / "offline.conf", one.journal_dir, one.ledger_dir, one.storage)
    assert compare_with_shell(java, conf, log)
    conf.write_text(f"{conf.read_text()}metadataServiceUri={uri}\n")
    compare_active(java, conf, uri, log)
    states = {row["ledgerId"]: row["state"] for row in cli("active", one.ledger_dir, uri=uri)}
    assert {states[ledger] for ledger in deleted} == {"dead"}
    assert "unknown" not in states.values()
    assert "alive" in states.values()


# --- bookies of their own: loggers and collections -------------------------------------------------------------------


class Place:
    """One Apache bookie on a metadata root of its own."""

    def __init__(self, java: Java, zookeeper: ZooKeeperServer, directory: Path, storage: str, **settings: object):
        self.java = java
        self.uri = zookeeper.metadata_uri(zookeeper.new_root())
        format_cluster(java, self.uri, directory)
        self.bookie = ApacheBookie(java, self.uri, directory, storage, settings={**SMALL_LOGS, **settings})
        self.directories = [Path(each) for each in str(self.bookie.settings["ledgerDirectories"]).split(",")]
        self.payloads: dict[str, bytes] = {}
        self._file = directory / "payload"

    def write(self, count: int) -> list[str]:
        """`count` ledgers of 30 entries; their ids."""
        ids = []
        for _ in range(count):
            data = random.Random(len(self.payloads)).randbytes(ENTRIES * ENTRY_SIZE)
            self._file.write_bytes(data)
            quorum = ("--ensemble-size", 1, "--write-quorum", 1, "--ack-quorum", 1)
            write = ("ledger", "write", self._file, "--record-size", ENTRY_SIZE, *quorum, "-o", "id")
            (ledger,) = CommandLine(self.uri)(*write).ids
            self.payloads[ledger] = data
            ids.append(ledger)
        return ids

    def delete(self, ids: Iterable[str]) -> None:
        answer = CommandLine(self.uri)("ledger", "delete", *ids, "--yes")
        assert answer.code == 0, answer.err

    def rows(self, command: str, *arguments: object) -> Rows:
        return cli(command, *self.directories, *arguments, uri=self.uri)

    def names(self) -> set[str]:
        return {path.name for each in self.directories for path in (each / "current").glob("*.log*")}

    def extract(self, ledger: str, *arguments: object) -> bytes:
        """The payloads of a ledger, gathered from its files."""
        answer = CommandLine(None)(
            "entrylog", "extract", *self.directories, *arguments, "--ledger", ledger, "-f", "-", "--format", "raw"
        )
        assert answer.code in (0, 3), answer.err  # 3: the log of a killed bookie ends within a record
        return answer.out


@pytest.fixture
def place(java: Java, zookeeper: ZooKeeperServer, tmp_path: Path) -> Iterator[Any]:
    """Makes places, not started."""
    made: list[Place] = []

    def make(storage: str, **settings: object) -> Place:
        made.append(Place(java, zookeeper, tmp_path / f"bookie-{len(made)}", storage, **settings))
        return made[-1]

    yield make
    for each in made:
        each.bookie.kill()


def test_logs_of_the_direct_io_logger_in_two_directories(place: Any, java: Java, tmp_path: Path) -> None:
    directories = [tmp_path / "first", tmp_path / "second"]
    here = place(DB, ledgerDirectories=",".join(map(str, directories)), **DIRECT_IO)
    here.bookie.start()
    ids = here.write(10)
    assert here.rows("list")
    # A bookie that is stopped earlier may leave its last entries to the journal.
    wait_for(lambda: len(here.rows("read")) == 10 * ENTRIES, "the logs flushed")
    here.bookie.stop()
    listed = here.rows("list")
    assert all("0" in {path.stem for path in logs_in(each)} for each in directories)
    assert {Path(row["file"]).parent.parent for row in listed} == set(directories)
    assert {row["state"] for row in listed} >= {"closed"}
    rows = here.rows("read")
    assert min(row["offset"] for row in rows) == 4096
    assert len(rows) == 10 * ENTRIES
    for ledger in ids:
        assert here.extract(ledger) == here.payloads[ledger]
    ambiguous = CommandLine(None)("entrylog", "show", "0", "--dir", directories[0], "--dir", directories[1])
    assert ambiguous.code == 2
    assert all(str(each / "current" / "0.log") in ambiguous.err for each in directories)
    # Apache's shell knows the first log of an id only, and reads the direct logger's as any other's.
    first = tmp_path / "only" / "current"
    first.mkdir(parents=True)
    closed = next(Path(row["file"]) for row in listed if row["state"] == "closed")
    shutil.copy(closed, first / closed.name)
    conf = offline_conf(tmp_path / "bk_server.conf", tmp_path / "journal", first.parent, SORTED)
    assert compare_with_shell(java, conf, first / closed.name) > 50


def test_one_log_per_ledger(place: Any) -> None:
    here = place(INTERLEAVED, entryLogPerLedgerEnabled="true")
    here.bookie.start()
    ids = here.write(4)
    here.delete(ids[:1])
    wait_for(lambda: len(here.rows("read")) == 4 * ENTRIES, "the logs flushed")
    shares = here.rows("active")
    assert sorted((row["ledgerId"], row["state"]) for row in shares) == sorted(
        zip(ids, ["dead", "alive", "alive", "alive"], strict=True)
    )
    assert len({row["logId"] for row in shares}) == 4
    assert [row["compaction"] for row in here.rows("garbage", "--sort", "garbage")][:2] == ["delete", None]


def test_logs_that_a_bookie_has_open_are_not_damaged(place: Any) -> None:
    here = place(INTERLEAVED, entryLogPerLedgerEnabled="true", flushInterval=600_000, writeBufferSizeBytes=1500)
    here.bookie.start()
    here.write(3)
    rows = here.rows("verify", "--no-digests")
    assert "torn" in {row["state"] for row in rows[:-1]}
    assert not [row["problem"] for row in rows if row["problem"]]
    here.bookie.kill()


def mixed(here: Place) -> list[str]:
    """Ledgers that are alive, with deleted ones between them; the logs are closed but for the last."""
    ids = here.write(12)
    alive = ids[::3]
    here.delete(ledger for ledger in ids if ledger not in alive)
    return alive


@pytest.mark.parametrize(
    ("storage", "transactional"), [(INTERLEAVED, "true"), (DB, "false")], ids=["interleaved", "db"]
)
def test_logs_after_garbage_collection_and_compaction(place: Any, java: Java, storage: str, transactional: str) -> None:
    here = place(storage, useTransactionalCompaction=transactional)
    here.bookie.start()
    alive = mixed(here)
    before = {row["logId"]: row for row in here.rows("garbage", "--sort", "id")}
    assert any(row["compaction"] == "major" for row in before.values())
    here.bookie.stop()
    here.bookie.settings.update(COLLECTING, useTransactionalCompaction=transactional)
    here.bookie.conf.write_text("".join(f"{name}={value}\n" for name, value in here.bookie.settings.items()))
    here.bookie.start()
    expected = {log_id for log_id, row in before.items() if row["compaction"] is not None}
    wait_for(
        lambda: not expected & {row["logId"] for row in here.rows("list")}, "every log that we said is compacted away"
    )
    kept = {log_id for log_id, row in before.items() if row["compaction"] is None and row["totalSize"]}
    assert kept <= {row["logId"] for row in here.rows("list")}
    here.bookie.stop()
    for ledger in alive:
        assert here.extract(ledger) == here.payloads[ledger]
    garbage = here.rows("garbage")
    assert sum(row["garbageSize"] for row in garbage) < sum(row["garbageSize"] for row in before.values())
    log = logs_in(*here.directories)[-1]
    conf = offline_conf(here.bookie.directory / "offline.conf", here.bookie.journal_dir, here.bookie.ledger_dir)
    assert compare_with_shell(java, conf, log)
    conf.write_text(f"{conf.read_text()}metadataServiceUri={here.uri}\n")
    compare_active(java, conf, here.uri, log)


def test_a_bookie_that_is_killed_while_it_compacts(place: Any, java: Java) -> None:
    here = place(
        INTERLEAVED, useTransactionalCompaction="true", isThrottleByBytes="true", compactionRateByBytes=10_000,
        writeBufferSizeBytes=4096, **COLLECTING,
    )  # fmt: skip
    here.bookie.start()
    alive = mixed(here)
    pattern = "*.log.compacting"
    wait_for(
        lambda: any(path.stat().st_size > 2000 for path in here.bookie.ledger_dir.rglob(pattern)), "a compaction begun"
    )
    here.bookie.kill()
    (begun,) = here.bookie.ledger_dir.rglob(pattern)
    (row,) = [row for row in here.rows("list") if row["state"] == "compacting"]
    assert (row["file"], row["logIdHex"], row["ledgerCount"]) == (str(begun), begun.name.split(".")[0], None)
    copies = cli("read", begun)
    assert copies
    assert {row["logId"] for row in copies} == {int(begun.name.split(".")[0], 16)}
    # Its copies are in the source as well, and are equal.
    source = {(row["ledgerId"], row["entryId"]): row for row in here.rows("read")}
    for copy in copies:
        assert copy["recordSize"] == source[copy["ledgerId"], copy["entryId"]]["recordSize"]
    for ledger in alive:
        assert here.extract(ledger) == here.payloads[ledger]
        assert here.extract(ledger, begun) == here.payloads[ledger]
    # As Apache marks a compaction that is complete: a hard link.
    closed = next(Path(row["file"]) for row in here.rows("list") if row["state"] == "closed")
    compacted = closed.with_name(f"{closed.name}.0.compacted")
    os.link(closed, compacted)
    (row,) = [row for row in here.rows("list") if row["state"] == "compacted"]
    assert (row["sourceLogId"], row["ledgerCount"]) == (0, cli_count(closed))
    assert [told([row]) for row in cli("read", compacted)] == [told([row]) for row in cli("read", closed)]


def cli_count(log: Path) -> int:
    """Return the number of ledgers in a log."""
    return len(cli("show", log))


def test_apache_reads_extracted_entry_logs(place: Any, java: Java, tmp_path: Path) -> None:
    here = place(INTERLEAVED)
    here.bookie.start()
    ledger, *_ = here.write(2)
    here.bookie.stop()
    current = tmp_path / "extracted" / "current"
    current.mkdir(parents=True)
    target = current / "1a.log"
    answer = CommandLine(None)("entrylog", "extract", here.bookie.ledger_dir, "--ledger", ledger, "-f", target)
    assert answer.code == 0, answer.err
    conf = offline_conf(tmp_path / "bk_server.conf", tmp_path / "journal", current.parent)
    assert compare_with_shell(java, conf, target) == ENTRIES
    assert sizes(cli("show", target)).keys() == {ledger}


def test_log_with_a_ledgers_map_behind_the_place_in_its_header(java: Java, tmp_path: Path) -> None:
    """SortedLedgerStorage writes such a log when it adds an entry while another thread appends the map."""
    (tmp_path / "ledgers" / "current").mkdir(parents=True)
    log = tmp_path / "ledgers" / "current" / "1.log"
    source = closed_golden_log()
    data = bytearray(source.read_bytes())
    with EntryLogReader.open(source) as reader:
        *_, before_last, _ = reader.records()
    data[8:16] = struct.pack(">q", before_last.offset)
    log.write_bytes(data)
    conf = offline_conf(tmp_path / "bk_server.conf", tmp_path / "journal", tmp_path / "ledgers", SORTED)
    assert compare_with_shell(java, conf, log) > 10


def closed_golden_log() -> Path:
    """A log that an Apache bookie closed, with its ledgers map."""
    for bookie in golden.bookies():
        for path in sorted((bookie.ledger_dir / "current").glob("*.log")):
            with EntryLogReader.open(path) as reader:
                if reader.ledgers_map():
                    return path
    raise AssertionError("no golden log has a ledgers map")
