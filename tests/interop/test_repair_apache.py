"""Indexes that bkctl made serve Apache's bookies and clients; indexes that Apache's shell made are read by bkctl."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import golden, servers
from support.servers import (
    BOOKKEEPER_VERSION,
    DB,
    INTERLEAVED,
    SORTED,
    ApacheBookie,
    ApacheCluster,
    Java,
    ZooKeeperServer,
    offline_conf,
)

from bkctl.client.ledger import BookKeeper
from bkctl.formats.entry import DigestManager, DigestType, master_key
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.protocol.connection import BookieConnection, run
from bkctl.protocol.messages import AddRequest, Protocol, Status

pytestmark = pytest.mark.java

Rows = list[dict[str, Any]]


def bkctl(*arguments: object, code: int = 0) -> Rows:
    """The rows that a command prints as ndjson."""
    command = [sys.executable, "-m", "bkctl", *map(str, arguments), "-o", "ndjson"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# --- bkctl repairs, Apache serves -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(java: Java, zookeeper: ZooKeeperServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheCluster]:
    """Apache bookies of the three storage classes, and one with several directories of each kind, to be repaired."""
    base, storages = tmp_path_factory.mktemp("repair"), (SORTED, INTERLEAVED, DB, DB)
    made = ApacheCluster(java, zookeeper, base, root=zookeeper.new_root(), storages=storages)
    spread = made.bookies[3]
    for setting, name in (("journalDirectories", "j"), ("ledgerDirectories", "l"), ("indexDirectories", "i")):
        spread.settings[setting] = ",".join(str(spread.directory / f"{name}{number}") for number in (0, 1))
    del spread.settings["journalDirectory"]
    servers.write_conf(spread.conf, spread.settings)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def ledgers(whole: ApacheCluster, java: Java) -> list[dict[str, Any]]:
    """Known ledgers on it: closed, fenced by a recovery, open, with an explicit LAC."""
    written = servers.write_ledgers(java, whole.metadata_uri, "v3", small=True)
    # Then all is in entry logs; what comes later is in the journals of killed bookies.
    for bookie in whole.bookies:
        bookie.stop()
    return [one for one in written if not one["deleted"]]


@pytest.fixture
def cluster(whole: ApacheCluster, ledgers: list[dict[str, Any]], tmp_path: Path) -> Iterator[ApacheCluster]:
    """The cluster with its ledgers; what a test does to the bookies is undone after it, so that any may come first."""
    before = [(dict(bookie.settings), bookie.storage) for bookie in whole.bookies]
    for bookie in whole.bookies:
        bookie.stop()
        shutil.copytree(bookie.directory, tmp_path / bookie.directory.name)
    with open_cluster(whole.metadata_uri) as store:
        known = [(ledger, store.ledgers.read(ledger).metadata) for ledger in store.ledgers.ledgers(None)]
    whole.ensure_up()
    yield whole
    with open_cluster(whole.metadata_uri) as store:
        for ledger, metadata in known:
            store.ledgers.write(ledger, metadata, store.ledgers.read(ledger).version)
    for bookie, (settings, storage) in zip(whole.bookies, before, strict=True):
        bookie.kill()
        bookie.settings, bookie.storage = settings, storage
        shutil.rmtree(bookie.directory)
        shutil.copytree(tmp_path / bookie.directory.name, bookie.directory)


def entries(ledger: dict[str, Any]) -> list[tuple[int, int, str]]:
    return [(entry["entryId"], entry["size"], entry["sha256"]) for entry in ledger["entries"]]


def check_served(
    java: Java,
    cluster: ApacheCluster,
    ledgers: list[dict[str, Any]],
    *,
    recover: bool = False,
) -> None:
    """Apache's client reads every entry up to the last one that is confirmed; every bookie has all that it should have.

    More may be confirmed by an explicit LAC: after a restart bookies with index files keep it, and do not tell it.
    """
    answers = servers.read_ledgers(java, cluster.metadata_uri, "v3", ledgers, recover=recover)
    assert len(answers) == len(ledgers)
    for one, found in zip(ledgers, answers, strict=True):
        assert "error" not in found, (one["name"], found)
        if not recover:
            assert found["lastAddConfirmed"] >= one["lastAddConfirmed"], one["name"]
        assert entries(found) == entries(one)[: found["lastAddConfirmed"] + 1], one["name"]
    uri = cluster.metadata_uri
    assert bkctl("ledger", "verify", *(one["ledgerId"] for one in ledgers), "-u", uri) == []


def repair(cluster: ApacheCluster) -> None:
    """Kill all bookies, lose and remake their indexes, start them on what bkctl made."""
    for bookie in cluster.bookies:
        bookie.kill()
    uri = cluster.metadata_uri
    lost, kept, db = (cluster.bookie(storage) for storage in (SORTED, INTERLEAVED, DB))
    for path in (lost.ledger_dir / "current").glob("*/*/*.idx"):
        path.unlink()
    rows = bkctl("bookie", "index", "regenerate", "--all", "--conf", lost.conf, "-u", uri)
    assert rows
    assert not any(row["fenceGuessed"] for row in rows)
    assert {row["backup"] for row in rows} == {None}
    rows = bkctl("bookie", "index", "regenerate", "--all", "--conf", kept.conf)
    assert rows
    assert all(row["backup"] for row in rows)
    spread = cluster.bookies[3]
    for bookie, places in ((db, [db.ledger_dir]), (spread, [spread.directory / "i0", spread.directory / "i1"])):
        for place in places:
            for name in ("ledgers", "locations"):
                shutil.rmtree(place / "current" / name)
        rows = bkctl("bookie", "index", "rebuild", "--ledgers", "--locations", "--conf", bookie.conf, "-u", uri)
        assert [Path(row["file"]).relative_to(bookie.directory) for row in rows] == [
            place.relative_to(bookie.directory) / "current" / name
            for name in ("ledgers", "locations")
            for place in places
        ]
        assert {(row["fencesGuessed"], row["withoutMasterKey"]) for row in rows} == {(0, 0)}
        # The ensembles that Java's client chose decide how many a bookie has, and in which of its directories.
        assert all(row["ledgers"] > 0 for row in rows)
        assert all(row["entries"] is None or row["entries"] > 0 for row in rows)
    cluster.ensure_up()


OPEN_PASSWORD = b"mine"


async def left_open(cluster: ApacheCluster) -> tuple[LedgerId, list[ApacheBookie]]:
    """A ledger of five entries whose writer went away, and its bookies."""
    with open_cluster(cluster.metadata_uri) as store:
        async with BookKeeper(store) as client:
            handle = await client.create_ledger(
                ensemble_size=3, write_quorum_size=3, ack_quorum_size=3, password=OPEN_PASSWORD
            )
            for number in range(5):
                await handle.add(b"%d" % number)
            return handle.ledger, [cluster.by_id(each) for each in handle.metadata.last_fragment.bookies]


async def answers_to_adds(
    bookies: list[ApacheBookie], ledger: LedgerId, entry_id: int, password: bytes
) -> list[Status]:
    """Return each bookie's answer to an ordinary add of a 1-byte entry."""
    digest = DigestManager(ledger, DigestType.CRC32C, password)
    body = digest.seal(entry_id, entry_id - 1, entry_id + 1, b"5"), b"5"
    found = []
    for bookie in bookies:
        connection = await BookieConnection.open(
            "127.0.0.1", bookie.port, bookie_id=bookie.bookie_id, protocol=Protocol.V3
        )
        answer = await connection.send(AddRequest(ledger, entry_id, digest.master_key, body))
        found.append(answer.status)
        connection.close()
        await connection.wait_closed()
    return found


def test_apaches_bookies_serve_from_rebuilt_indexes(
    cluster: ApacheCluster, ledgers: list[dict[str, Any]], java: Java
) -> None:
    ledger, bookies = run(left_open(cluster))
    repair(cluster)
    check_served(java, cluster, ledgers)
    # A writer with the password continues, one with another is refused, and a fenced ledger stays fenced.
    # Apache's DbLedgerStorage says EIO where it has not opened the ledger since it started.
    assert set(run(answers_to_adds(bookies, ledger, 5, b"wrong"))) <= {Status.EUA, Status.EIO}
    assert run(answers_to_adds(bookies, ledger, 5, OPEN_PASSWORD)) == [Status.EOK] * 3
    recovered = next(one for one in ledgers if one["name"] == "recovered")
    fenced = LedgerId(0, int(recovered["ledgerId"]))
    bookies = [cluster.by_id(each) for each in recovered["ensembles"]["0"]]
    assert run(answers_to_adds(bookies, fenced, 100, b"pw")) == [Status.EFENCED] * 3
    asked = {"ledgerId": str(ledger.ledger_id), "digestType": "CRC32C", "password": b64encode(OPEN_PASSWORD).decode()}
    (found,) = servers.read_ledgers(java, cluster.metadata_uri, "v3", [asked], recover=True)
    assert (found["state"], found["lastEntryId"], len(found["ensembles"])) == ("CLOSED", 5, 1)


def test_running_bookies_are_left_alone(cluster: ApacheCluster) -> None:
    sorted_, _, db, spread = cluster.bookies
    for arguments in (
        ("bookie", "index", "regenerate", "--all", "--conf", sorted_.conf),
        ("bookie", "index", "regenerate", "--all", "--dir", sorted_.ledger_dir),
        ("bookie", "index", "rebuild", "--locations", "--conf", db.conf),
        ("bookie", "index", "rebuild", "--ledgers", "--dir", db.ledger_dir),
        ("bookie", "index", "rebuild", "--ledgers", "--conf", spread.conf),
        ("bookie", "convert", "--to", "db", "--conf", sorted_.conf),
        ("bookie", "convert", "--to", "interleaved", "--conf", db.conf),
        ("bookie", "format", "--yes", "--conf", sorted_.conf),
        ("bookie", "init", "--conf", sorted_.conf),
    ):
        assert bkctl(*arguments, code=5) == []


def test_apaches_bookies_serve_from_converted_indexes(
    cluster: ApacheCluster, ledgers: list[dict[str, Any]], java: Java
) -> None:
    first, second, db, spread = cluster.bookies
    # The first leaves entries in its journal alone, the others stop cleanly.
    first.kill()
    for bookie in (second, db, spread):
        bookie.stop()
    # Its directories have logs of the same ids, which index files cannot tell apart.
    assert bkctl("bookie", "convert", "--to", "interleaved", "--conf", spread.conf, code=8) == []
    for bookie, to, storage in ((first, "db", DB), (second, "db", DB), (db, "interleaved", SORTED)):
        (row,) = bkctl("bookie", "convert", "--to", to, "--conf", bookie.conf)
        assert row["ledgers"] > 5
        assert row["backups"]
        bookie.settings["ledgerStorageClass"] = bookie.storage = storage
        servers.write_conf(bookie.conf, bookie.settings)
    cluster.ensure_up()
    check_served(java, cluster, ledgers)
    # Recovery fences, and adds the last entries again: that needs the right master keys.
    still_open = [one for one in ledgers if one["state"] == "OPEN"]
    assert still_open
    check_served(java, cluster, still_open, recover=True)
    wrong = [one | {"password": "d3Jvbmc="} for one in ledgers if one["state"] == "CLOSED"]
    answers = servers.read_ledgers(java, cluster.metadata_uri, "v3", wrong)
    assert {answer.get("code") for answer in answers} == {-102}  # UnauthorizedAccessException


def test_a_formatted_bookie_is_initialised_and_starts(cluster: ApacheCluster, java: Java) -> None:
    bookie = cluster.bookies[0]
    bookie.stop()
    uri = cluster.metadata_uri
    (problem, *_) = bkctl("bookie", "init", "--check", "--conf", bookie.conf, "-u", uri, code=3)
    assert "not empty" in problem["problem"]
    rows = bkctl("bookie", "format", "--yes-really", bookie.bookie_id, "--delete-cookie", "--conf", bookie.conf)
    assert sum(row["ledgers"] for row in rows) > 5
    assert list(bookie.ledger_dir.iterdir()) == list(bookie.journal_dir.iterdir()) == []
    done = java.shell(bookie, "initbookie", check=True)
    assert "ERROR" not in done.stdout + done.stderr
    bkctl("bookie", "init", "--conf", bookie.conf)
    assert bkctl("cookie", "verify", "--conf", bookie.conf) == []
    bookie.start()


# --- Apache's shell repairs, bkctl reads ------------------------------------------------------------------------------


#: Apache's ranges of ledgers end before it: its conversions and rebuilds forget it.
FORGOTTEN = str((1 << 63) - 1)


class Copy:
    """A copy of a golden bookie's files, for Apache's shell to repair."""

    def __init__(self, java: Java, name: str, base: Path) -> None:
        named = {bookie.version: bookie for bookie in golden.bookies() if bookie.name == name}
        bookie = named.get(BOOKKEEPER_VERSION) or named[max(named)]
        self.java, self.bookie, self.ledger_dir = java, bookie, base / "ledgers"
        shutil.copytree(bookie.journal_dir, base / "journal")
        shutil.copytree(bookie.ledger_dir, self.ledger_dir)
        self.conf = offline_conf(base / "bk_server.conf", base / "journal", self.ledger_dir, bookie.storage_class)
        self.before = self.metas()
        self.locations = self.read_locations()

    def shell(self, *arguments: object) -> None:
        done = self.java.shell(self.conf, *arguments, check=True)
        assert "ERROR" not in done.stdout, done.stdout

    def metas(self) -> dict[str, dict[str, Any]]:
        """Ledger id → what the index says of it, without the file's name."""
        rows = bkctl("bookie", "index", "show", "--meta", "--show-secrets", "--dir", self.ledger_dir)
        return {
            row["ledgerId"]: {name: row[name] for name in row if name != "file"}
            for row in rows
            if row["ledgerId"] != FORGOTTEN
        }

    def read_locations(self) -> Rows:
        rows = bkctl("bookie", "index", "show", *self.metas(), "--dir", self.ledger_dir)
        return sorted(rows, key=lambda row: (int(row["ledgerId"]), row["entryId"]))


def without(rows: dict[str, dict[str, Any]], *names: str) -> dict[str, dict[str, Any]]:
    return {ledger: {name: row[name] for name in row if name not in names} for ledger, row in rows.items()}


def test_databases_converted_by_apache_read_like_the_index_files(java: Java, tmp_path: Path) -> None:
    copy = Copy(java, "sorted", tmp_path)
    copy.shell("convert-to-db-storage")
    assert [path.stem for path in (copy.ledger_dir / "current").glob("*/*/*.idx")] == [f"{int(FORGOTTEN):x}"]
    # Apache's conversion forgets explicit LACs.
    assert without(copy.metas(), "explicitLac") == without(copy.before, "explicitLac")
    assert copy.read_locations() == copy.locations


def test_index_files_converted_by_apache_read_like_the_databases(java: Java, tmp_path: Path) -> None:
    copy = Copy(java, "db", tmp_path)
    copy.shell("convert-to-interleaved-storage")
    assert not (copy.ledger_dir / "current" / "ledgers").exists()
    assert without(copy.metas(), "explicitLac") == without(copy.before, "explicitLac")
    assert copy.read_locations() == copy.locations


def test_locations_that_apache_rebuilt_read_alike(java: Java, tmp_path: Path) -> None:
    copy = Copy(java, "db", tmp_path)
    copy.shell("rebuild-db-ledger-locations-index")
    assert copy.metas() == copy.before
    assert copy.read_locations() == copy.locations


def test_ledgers_that_apache_rebuilt_get_their_keys_back(java: Java, tmp_path: Path) -> None:
    copy = Copy(java, "db", tmp_path)
    copy.shell("rebuild-db-ledgers-index")
    metas = copy.metas()
    assert copy.before.keys() <= metas.keys()
    assert {(row["fenced"], row["masterKey"]) for row in metas.values()} == {(True, "")}
    assert copy.read_locations() == copy.locations
    bkctl("bookie", "index", "rebuild", "--ledgers", "--conf", copy.conf)
    keys = {ledger: row["masterKey"] for ledger, row in copy.metas().items() if row["masterKey"]}
    assert keys
    assert all(copy.before[ledger]["masterKey"] == key for ledger, key in keys.items() if ledger in copy.before)


def test_index_files_that_apache_regenerated_read_alike(java: Java, tmp_path: Path) -> None:
    copy = Copy(java, "interleaved", tmp_path)
    chosen = [ledger for ledger, row in copy.before.items() if row["entryCount"] and int(ledger) < 1 << 31][:5]
    for ledger in chosen:
        for path in (copy.ledger_dir / "current").glob(f"*/*/{int(ledger):x}.idx"):
            path.unlink()
    copy.shell("regenerate-interleaved-storage-index-file", "-l", ",".join(chosen), "-password", "pw")
    after = copy.metas()
    for ledger in chosen:
        assert (after[ledger]["fenced"], base64.b64decode(after[ledger]["masterKey"])) == (True, master_key(b"pw"))
    assert copy.read_locations() == copy.locations
