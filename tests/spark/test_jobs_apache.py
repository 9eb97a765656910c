"""The jobs over the files of Apache's bookies, of all three storage classes, after a crash and after a clean stop."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import (
    apache_shell,
    source_rows,  # noqa: F401 (skips where there is no PySpark)
)
from support.command_line import CommandLine
from support.servers import INTERLEAVED, SORTED, ApacheCluster, Java, offline_conf

from bkctl.client.ensemble import RoundRobinDistributionSchedule
from bkctl.files.entry_log import EntryLogReader
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster

pytestmark = [pytest.mark.usefixtures("spark"), pytest.mark.java, pytest.mark.long]

Rows = list[dict[str, Any]]


class Copies(NamedTuple):
    """Copies of the bookies' directories, by storage class, and the ledgers that must be whole in them."""

    uri: str
    places: dict[str, Path]
    bookies: dict[str, str]
    ledgers: dict[str, str]

    def of_ours(self, rows: Rows) -> Rows:
        """The rows of these ledgers: other tests share the cluster."""
        return [row for row in rows if row["ledgerQualifiedName"] in self.ledgers.values()]


def copies(cluster: ApacheCluster, ledgers: Rows, directory: Path, *, crash: bool) -> Copies:
    """Kill or stop all bookies, copy their files, and start them again."""
    cluster.ensure_up()
    for bookie in cluster.bookies:
        if crash:
            bookie.kill()
        else:
            bookie.stop()
    places = {bookie.storage: directory / bookie.storage.rpartition(".")[2] for bookie in cluster.bookies}
    for bookie in cluster.bookies:
        for part in (bookie.journal_dir, bookie.ledger_dir):
            shutil.copytree(part, places[bookie.storage] / part.name)
    cluster.ensure_up()
    names = {each["name"]: LedgerId(0, int(each["ledgerId"])).qualified_name for each in ledgers if not each["deleted"]}
    owners = {bookie.storage: bookie.bookie_id for bookie in cluster.bookies}
    return Copies(cluster.metadata_uri, places, owners, names)


def pipeline(uri: str | None, *arguments: object, codes: tuple[int, ...] = (0,)) -> Rows:
    """The rows of a job, which are the same on both engines."""
    answer = CommandLine(uri)("pipeline", *arguments, "-o", "ndjson")
    assert answer.code in codes, answer
    on_spark = CommandLine(uri)("pipeline", *arguments, "--master", "local[2]", "-o", "ndjson")
    assert (on_spark.code, on_spark.out) == (answer.code, answer.out), on_spark
    return [json.loads(line) for line in answer.out.splitlines()]


def test_jobs_on_apache_bookies_match_shell_and_commands(
    java: Java, apache_cluster: ApacheCluster, apache_ledgers: Rows, tmp_path: Path
) -> None:
    # Entries that the bookies had not written to their logs are in their journals.
    files = copies(apache_cluster, apache_ledgers, tmp_path / "crashed", crash=True)
    assert files.of_ours(pipeline(files.uri, "integrity", *files.places.values(), codes=(0, 3))) == []
    files = copies(apache_cluster, apache_ledgers, tmp_path / "stopped", crash=False)
    rows = {row["file"]: row for row in pipeline(None, "inventory", "--by", "entrylog", *files.places.values())}
    for storage, place in files.places.items():
        for log in CommandLine(None)("entrylog", "list", place, "-o", "ndjson").rows:
            row = rows.pop(log["file"])
            assert row["bookieId"] == files.bookies[storage]
            shown = CommandLine(None)("entrylog", "show", log["file"], "-o", "ndjson").rows
            assert (row["size"], row["ledgerCount"]) == (sum(each["size"] for each in shown), len(shown))
        # Apache's shell takes a second for each; the log with the most in it is enough.
        log_path = max(place.rglob("*.log"), key=lambda path: path.stat().st_size)
        conf = offline_conf(tmp_path / f"{storage}.conf", place / "journal", place / "ledgers", storage)
        sizes = apache_shell.log_metadata(java.shell(conf, "readlogmetadata", log_path.name, check=True).stdout)
        counts: Counter[str] = Counter(
            each["ledgerId"]
            for each in apache_shell.records(java.shell(conf, "readlog", int(log_path.stem, 16), check=True).stdout)
        )
        ledgers = pipeline(None, "inventory", "--by", "ledger", f"one={_alone(log_path, tmp_path / 'one' / storage)}")
        assert {row["ledgerId"]: row["size"] for row in ledgers} == sizes
        assert {row["ledgerId"]: row["entryCount"] for row in ledgers} == counts
    assert not rows

    assert files.of_ours(pipeline(files.uri, "integrity", *files.places.values(), codes=(0, 3))) == []
    uses = {row["file"]: row for row in pipeline(files.uri, "garbage", *files.places.values())}
    for place in files.places.values():
        for row in CommandLine(files.uri)("entrylog", "garbage", "--dir", place, "-o", "ndjson").rows:
            found = uses.pop(row["file"])
            assert {name: found[name] for name in row} == row
    assert not uses
    expected = [
        CommandLine(None)("journal", "verify", place, "-o", "ndjson").out.splitlines()
        for place in files.places.values()
    ]
    audited = {row["file"]: row for row in pipeline(files.uri, "journal-audit", *files.places.values(), codes=(0, 3))}
    for check in map(json.loads, [line for lines in expected for line in lines]):
        row = audited.pop(check["file"])
        assert (row["state"], row["goodEnd"], row["entryCount"]) == (
            check["state"],
            check["goodEnd"],
            check["entryCount"],
        )
    assert not audited

    _damage_is_found_exactly(files)


def _alone(log: Path, directory: Path) -> Path:
    """A directory with nothing but this log."""
    directory.mkdir(parents=True)
    shutil.copy(log, directory)
    return directory


def _damage_is_found_exactly(files: Copies) -> None:
    """One entry log is damaged, and one ledger's replica is removed: the rows report both."""
    damaged, removed = files.ledgers["closed-MAC"], files.ledgers["many-entries"]
    expected: set[tuple[str, int, str, str]] = set()
    hurt = False
    for log in sorted(files.places[SORTED].rglob("*.log")):
        with EntryLogReader.open(log) as reader:
            found = [each for each in reader.records() if each.ledger.qualified_name == damaged and each.length]
        if not found or hurt:
            continue
        hurt = True
        last = found[-1]
        with open(log, "r+b") as file:
            file.seek(last.offset + 4 + last.record_size - 1)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
        expected.add((damaged, last.entry_id, files.bookies[SORTED], "damaged"))
    assert hurt
    number = f"{int(removed, 16):x}"
    (index,) = [path for path in files.places[INTERLEAVED].rglob("*.idx") if path.stem == number]
    index.unlink()
    for journal in files.places[INTERLEAVED].rglob("*.txn"):
        journal.unlink()
    with open_cluster(files.uri) as cluster:
        metadata = cluster.ledgers.read(LedgerId.from_value(int(removed, 16))).metadata
    schedule = RoundRobinDistributionSchedule.of(metadata)
    for entry_id in range(metadata.last_entry_id + 1):
        bookies = metadata.fragment_of(entry_id).bookies
        if files.bookies[INTERLEAVED] in [bookies[index] for index in schedule.write_set(entry_id)]:
            expected.add((removed, entry_id, files.bookies[INTERLEAVED], "notIndexed"))
    rows = files.of_ours(pipeline(files.uri, "integrity", *files.places.values(), codes=(3,)))
    assert {(row["ledgerQualifiedName"], row["entryId"], row["bookieId"], row["problem"]) for row in rows} == expected
    assert len(rows) == len(expected)
