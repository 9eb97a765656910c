"""Indexes of Apache's bookies of every storage class, and of ours: as Apache's shell has them, and checked."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from support import apache_shell, golden
from support.command_line import Answer, CommandLine
from support.own_bookies import OwnBookie
from support.servers import (
    BOOKIE_NUMBERS,
    DB,
    INTERLEAVED,
    SORTED,
    ApacheBookie,
    ApacheCluster,
    Java,
    Server,
    ZooKeeperServer,
    format_cluster,
    offline_conf,
    wait_for,
)

from bkctl.files.directories import BookieDirectories
from bkctl.files.index import BookieIndexes
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.formats.entry_log import unpack_location
from bkctl.ids import LedgerId

#: Logs of a few ledgers each, and a collection and a compaction every second.
COLLECTING: Final[dict[str, object]] = {
    "logSizeLimit": 128 * 1024,
    "flushInterval": 300,
    "gcWaitTime": 1000,
    "minorCompactionInterval": 1,
    "majorCompactionInterval": 2,
    "skipListSizeLimit": 64 * 1024,
}
ENSEMBLE: Final = ("--ensemble-size", 1, "--write-quorum", 1, "--ack-quorum", 1)

Locations = dict[int, tuple[int, int]]


def bookie(*arguments: object) -> Answer:
    return CommandLine(None)("bookie", *arguments, "-o", "ndjson")


def shown(directory: Path, ledgers: Iterable[str]) -> dict[str, Locations]:
    """Ledger id → entry id → (log id, position), as `apache_shell.locations` gives them."""
    found: dict[str, Locations] = {ledger: {} for ledger in ledgers}
    for row in bookie("index", "show", *found, "--dir", directory).rows:
        found[row["ledgerId"]][row["entryId"]] = (row["logId"], row["offset"] + 4)
    return found


def told(java: Java, conf: Path, storage: str, ledgers: Iterable[str]) -> dict[str, Locations]:
    """Return the output of Apache's `ledger`, in the same form."""
    flag = [] if storage == DB else ["-m"]
    return {ledger: apache_shell.locations(java.shell(conf, "ledger", *flag, ledger).stdout) for ledger in ledgers}


class Checked:
    """Return the lines of a check on stderr."""

    def __init__(self, answer: Answer) -> None:
        self.code, self.rows = answer.code, [json.loads(line) for line in answer.out.splitlines()]
        self.text = answer.err
        # Without a cluster nothing says that a ledger was deleted.
        assert answer.code in (0, 3), answer.err + answer.out.decode()
        assert [row for row in self.rows if row["finding"] and row["kind"] != "unindexed"] == []

    def count(self, what: str) -> int:
        match = re.search(rf"([\d,]+) {what}", self.text)
        return int(match[1].replace(",", "")) if match else 0


def check(*directories: Path, options: Iterable[object] = ()) -> Checked:
    """Check a bookie that must be healthy, its indexes alone too."""
    given = [word for each in directories for word in ("--dir", each)]
    Checked(bookie("index", "check", *given))
    return Checked(bookie("check", *given, *options))


@contextmanager
def paused(server: Server) -> Iterator[None]:
    """A bookie that stands still between two of its instructions."""
    os.killpg(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(server.pid, signal.SIGCONT)


@contextmanager
def writing(uri: str, said: Path) -> Iterator[Callable[[], int]]:
    """Ledgers are written, and each second one is deleted, in another process. Says how many there were."""
    program = f"""
import itertools, os, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.command_line import CommandLine
line = CommandLine({uri!r})
for number in itertools.count():
    data = os.urandom(40_000)
    (ledger,) = line.run("ledger", "write", "--record-size", 500, *{ENSEMBLE!r}, "-o", "id", input=data).ids
    if number % 2:
        assert line.run("ledger", "delete", ledger, "--yes").code == 0
    print(ledger, flush=True)
"""
    with said.open("w") as stdout:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=stdout)

    def count() -> int:
        assert process.poll() is None
        return said.read_text().count("\n")

    try:
        yield count
    finally:
        process.kill()
        process.wait()


# --- the shared bookies, one of each storage class ------------------------------------------------------------------


@pytest.fixture(params=BOOKIE_NUMBERS)
def one(
    request: pytest.FixtureRequest, apache_cluster: ApacheCluster, apache_ledgers: list[dict[str, Any]]
) -> ApacheBookie:
    return apache_cluster.bookies[request.param]


def test_snapshot_of_an_index_matches_apaches_shell(
    one: ApacheBookie, java: Java, apache_ledgers: list[dict[str, Any]], tmp_path: Path
) -> None:
    journal, ledgers = tmp_path / "journal", tmp_path / "ledgers"
    check(one.journal_dir, one.ledger_dir)
    one.stop()  # SortedLedgerStorage has everything in memory until then.
    one.start()
    with paused(one):
        shutil.copytree(one.journal_dir, journal)
        shutil.copytree(one.ledger_dir, ledgers)
    check(one.journal_dir, one.ledger_dir, options=["--digest"])  # live
    check(one.ledger_dir)
    snapshot = check(journal, ledgers, options=["--digest"])
    assert snapshot.count("entries in the index") > 500
    all_of_it = {row["ledgerId"]: row for row in bookie("index", "show", "--meta", "--dir", ledgers).rows}
    assert sum(row["entryCount"] for row in all_of_it.values()) == snapshot.count("entries in the index")
    names = {"closed-MAC", "many-entries", "id-near-2^63"}
    chosen = [each["ledgerId"] for each in apache_ledgers if each["name"] in names and each["ledgerId"] in all_of_it]
    found = shown(ledgers, chosen)
    # Apache's shell may write (RocksDB), so it comes last.
    conf = offline_conf(tmp_path / "bk_server.conf", journal, ledgers, one.storage)
    assert told(java, conf, one.storage, chosen) == found
    assert sum(map(len, found.values())) > 500
    for ledger, locations in found.items():
        assert all_of_it[ledger]["entryCount"] == len(locations)
        assert all_of_it[ledger]["lastEntryId"] == max(locations)


def test_a_stopped_bookie_is_healthy_and_a_wrong_location_is_found(one: ApacheBookie, tmp_path: Path) -> None:
    one.stop()
    healthy = check(one.journal_dir, one.ledger_dir)
    assert healthy.count("entries not flushed") == 0
    assert healthy.count("records") >= healthy.count("entries in the index") > 500
    ledgers = shutil.copytree(one.ledger_dir, tmp_path / "ledgers")
    with BookieIndexes(BookieDirectories.at(ledgers)) as indexes:
        ledger = next(each for each in indexes.ledgers() if indexes.open(each).extent()[0] > 3)
        first, second = list(indexes.open(ledger).locations())[:2]
        path = indexes.open(ledger).path
    if one.storage == DB:
        with LocationsDatabase.edit(path) as locations:
            locations.put(ledger, second.entry_id, first.location)
    else:
        data = bytearray(path.read_bytes())
        at = 1024 + 8 * second.entry_id
        data[at : at + 8] = first.location.to_bytes(8, "big")
        path.write_bytes(data)
    answer = bookie("check", "--dir", ledgers)
    assert answer.code == 3
    (row,) = [row for row in map(json.loads, answer.out.splitlines()) if row["finding"]]
    assert (row["kind"], row["ledgerId"], row["entryId"]) == ("wrongEntry", str(ledger.ledger_id), second.entry_id)
    assert (row["logId"], row["offset"]) == (first.log_id, first.offset)


# --- collections and compactions, under writes ----------------------------------------------------------------------


@pytest.fixture
def alone(java: Java, zookeeper: ZooKeeperServer, tmp_path: Path) -> Iterator[Callable[..., ApacheBookie | OwnBookie]]:
    """Makes a started bookie on a metadata root of its own."""
    made: list[ApacheBookie | OwnBookie] = []

    def make(storage: str, own: bool, **settings: object) -> ApacheBookie | OwnBookie:
        uri = zookeeper.metadata_uri(zookeeper.new_root())
        format_cluster(java, uri, tmp_path)
        directory = tmp_path / f"bookie-{len(made)}"
        if own:
            made.append(OwnBookie(uri, directory, storage=storage, settings=settings))
        else:
            made.append(ApacheBookie(java, uri, directory, storage, settings=settings))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.kill()


@pytest.mark.parametrize(
    ("storage", "own"),
    [
        pytest.param(SORTED, False, id="sorted"), pytest.param(DB, False, id="db"),
        pytest.param(INTERLEAVED, False, id="interleaved", marks=pytest.mark.long),
        pytest.param(SORTED, True, id="ours-sorted"), pytest.param(DB, True, id="ours-db"),
    ],
)  # fmt: skip
def test_a_bookie_under_writes_collections_and_compactions(
    alone: Callable[..., ApacheBookie | OwnBookie], storage: str, own: bool, tmp_path: Path
) -> None:
    here = alone(storage, own, **COLLECTING)
    places = here.journal_dir, here.ledger_dir

    def logs() -> set[str]:
        return {path.name for path in (here.ledger_dir / "current").glob("*.log")}

    seen = logs()
    gone: set[str] = set()
    with writing(str(here.settings["metadataServiceUri"]), tmp_path / "written") as written:

        def enough() -> bool:
            check(*places, options=["--digest"])
            check(here.ledger_dir)
            now = logs()
            gone.update(seen - now)
            seen.update(now)
            return written() >= 8 and len(gone) >= 1

        wait_for(enough, "some logs collected")
    after = check(*places)  # right after, and still running
    assert after.count("entries in the index") > 200
    here.kill()
    check(*places)
    check(here.ledger_dir)


# --- scoped ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [SORTED, DB], ids=["sorted", "db"])
def test_our_bookie_with_plain_and_scoped_ledgers(alone: Callable[..., ApacheBookie | OwnBookie], storage: str) -> None:
    here = alone(storage, True)
    line = CommandLine(str(here.settings["metadataServiceUri"]))
    ids = []
    for scope in ([], ["--ledger-scope-id", 7], ["--ledger-scope-id", 1 << 63]):
        data = os.urandom(50_000)
        ids += line.run("ledger", "write", "--record-size", 500, *ENSEMBLE, *scope, "-o", "id", input=data).ids
    check(here.journal_dir, here.ledger_dir, options=["--digest"])
    here.stop()
    whole = check(here.journal_dir, here.ledger_dir, options=["--digest"])
    assert whole.count("entries in the index") == 300
    metas = bookie("index", "show", "--meta", "--dir", here.ledger_dir).rows
    assert [(row["entryCount"], row["lastEntryId"]) for row in metas] == [(100, 99)] * 3
    assert {str(LedgerId(int(row["ledgerScopeId"]), int(row["ledgerId"]))) for row in metas} == set(ids)
    (scoped,) = bookie("index", "show", "--meta", "--ledger-scope-id", 7, "--dir", here.ledger_dir).rows
    assert scoped["ledgerScopeId"] == "7"
    one = check(here.ledger_dir, options=["--ledger-scope-id", 7])
    assert one.count("entries in the index") == 100


# --- what we write --------------------------------------------------------------------------------------------------


def test_apache_reads_the_databases_that_we_write(java: Java, tmp_path: Path) -> None:
    source = next(each for each in golden.bookies() if each.name == "db")
    journal, ledgers = tmp_path / "journal", tmp_path / "ledgers"
    shutil.copytree(source.journal_dir, journal)
    shutil.copytree(source.ledger_dir, ledgers)
    current = ledgers / "current"
    for name, kind in (("ledgers", LedgersDatabase), ("locations", LocationsDatabase)):
        with kind.open(source.ledger_dir / "current" / name) as old:
            shutil.rmtree(current / name)
            if isinstance(old, LedgersDatabase):
                with LedgersDatabase.create(current / name) as new:
                    for ledger, data in old.ledgers():
                        new.put(ledger, data)
            else:
                with LocationsDatabase.create(current / name) as made:
                    made.put_all(old.locations())
    conf = offline_conf(tmp_path / "bk_server.conf", journal, ledgers, DB)
    chosen = sorted(source.indexes, key=lambda ledger: -len(source.indexes[ledger]["locations"]))[:3]
    expected = {ledger: source.indexes[ledger]["locations"] for ledger in chosen}
    assert told(java, conf, DB, chosen) == expected
    with LocationsDatabase.open(current / "locations") as read:
        assert {
            entry_id: unpack_location(location) for _, entry_id, location in read.locations(LedgerId(0, int(chosen[0])))
        } == expected[chosen[0]]
