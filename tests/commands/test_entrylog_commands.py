"""`bkctl entrylog`: the logs of a bookie, in every form of output, with and without a cluster."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from pathlib import Path

import pytest
from support import golden
from support.command_line import CommandLine

from bkctl.bookie.local import LocalCluster
from bkctl.formats import entry_log
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.metadata import Cookie, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster

from . import files
from .conftest import Cli

IDS = ["ledgerScopeId", "ledgerId", "ledgerQualifiedName"]
PLAIN = files.PLAIN.to_json()
SCOPED = files.SCOPED.to_json()
OTHER = LedgerId(0, 9)
ENTRY = [*IDS, "entryId", "lastAddConfirmed", "length", "size", "formatVersion"]
RECORD = [*ENTRY, "logId", "logIdHex", "offset", "recordSize", "type", "file"]
METADATA = LedgerMetadata(1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, ("bookie-1",)),))


@pytest.fixture
def bookie(tmp_path: Path) -> Path:
    files.make(tmp_path)
    return tmp_path


@pytest.fixture
def current(bookie: Path) -> Path:
    return bookie / "ledgers" / "current"


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A cluster that has ledger 5 of scope 0, and no other."""
    uri = f"sqlite://{tmp_path}/metadata.db"
    with open_cluster(uri, create=True) as cluster:
        cluster.ledgers.create(files.PLAIN, METADATA)
    return uri


def second_log(current: Path) -> Path:
    """Log 0x20: two entries of ledger 9, one of ledger 5."""
    sealed = [*files.entries(OTHER)[:2], files.entries(files.PLAIN)[0]]
    records = [len(entry).to_bytes(4, "big") + entry for entry in sealed]
    sizes = {OTHER: len(records[0] + records[1]), files.PLAIN: len(records[2])}
    end = entry_log.HEADER_SIZE + sum(map(len, records))
    data = entry_log.write_header(1, end, 2) + b"".join(records) + b"".join(entry_log.write_ledgers_map(sizes))
    path = current / "20.log"
    path.write_bytes(data)
    return path


# --- list -----------------------------------------------------------------------------------------------------------


def test_list(cli: Cli, bookie: Path) -> None:
    rows = cli("entrylog", "list", bookie / "ledgers", "-o", "ndjson").rows
    assert list(rows[0]) == [
        "logId", "logIdHex", "scoped", "version", "state", "sourceLogId", "ledgerCount", "ledgersMapOffset", "size",
        "mtime", "file",
    ]  # fmt: skip
    assert [(row["logId"], row["scoped"], row["version"], row["state"], row["ledgerCount"]) for row in rows] == [
        (31, False, 1, "closed", 1),
        (31, True, 2, "open", None),
    ]
    assert cli("entrylog", "list", bookie / "ledgers", "-o", "id").out == "31\nscoped/31\n"


def test_list_shows_empty_logs_and_unfinished_compactions(cli: Cli, bookie: Path, current: Path) -> None:
    (current / "21.log").touch()
    os.link(current / "1f.log", current / "22.log.1f.compacted")
    begun = entry_log.write_header() + (current / "1f.log").read_bytes()[1024:1100]
    (current / "23.log.compacting").write_bytes(begun)
    (current / "24.log").write_bytes(entry_log.write_header(0, 1024, 1))
    rows = cli("entrylog", "list", bookie / "ledgers", "-o", "ndjson").rows
    assert [(row["logIdHex"], row["state"], row["sourceLogId"], row["version"]) for row in rows] == [
        ("1f", "closed", None, 1),
        ("21", "empty", None, None),
        ("24", "open", None, 0),
        ("1f", "open", None, 2),
        ("22", "compacted", 31, 1),
        ("23", "compacting", None, 1),
    ]
    # The log that a compaction left holds copies: it is read only if named.
    assert {row["logId"] for row in cli("entrylog", "read", bookie / "ledgers", "-o", "ndjson").rows} == {31}
    for name in ("22.log.1f.compacted", current / "22.log.1f.compacted"):
        rows = cli("entrylog", "read", name, "--dir", bookie / "ledgers", "-o", "ndjson").rows
        assert [(row["logId"], row["entryId"]) for row in rows] == [(34, 0), (34, 1), (34, 2)]
    rows = cli("entrylog", "show", "23.log.compacting", "--dir", bookie / "ledgers", "-o", "ndjson").rows
    assert [(row["logId"], row["size"], row["fromLedgersMap"], row["complete"]) for row in rows] == [
        (35, 43, False, True)
    ]


def test_list_sorted(cli: Cli, bookie: Path, current: Path) -> None:
    large = second_log(current)
    large.write_bytes(large.read_bytes() + bytes(5000))
    os.utime(large, (1_000_000, 1_000_000))
    for order, first in (("id", "31"), ("size", "32"), ("age", "32")):
        assert cli("entrylog", "list", bookie / "ledgers", "--sort", order, "-o", "id").out.split()[0] == first
    for column, first in (("mtime", "32"), ("-logId", "32"), ("logId", "31")):
        assert cli("entrylog", "list", bookie / "ledgers", "--sort", column, "-o", "id").out.split()[0] == first
    assert cli("entrylog", "list", bookie / "ledgers", "--sort", "name").code == 2


def test_list_by_garbage_asks_the_cluster(cli: Cli, bookie: Path, current: Path, uri: str) -> None:
    second_log(current)
    (current / "21.log").touch()
    result = cli("entrylog", "list", bookie / "ledgers", "--sort", "garbage", "-u", uri, "-o", "ndjson")
    assert result.code == 0, result.err
    size = len(files.entries(OTHER)[0]) + len(files.entries(OTHER)[1]) + 8
    rest = len(files.entries(files.PLAIN)[0]) + 4
    found = [(row["logIdHex"], row["garbageSize"], row["remainingSize"], row["usage"]) for row in result.rows]
    assert found == [
        ("1f", 160, 0, 0.0),  # the scoped one
        ("20", size, rest, rest / (rest + size)),
        ("1f", 0, 133, 1.0),
        ("21", 0, 0, None),
    ]
    assert cli("entrylog", "list", bookie / "ledgers", "--sort", "garbage").code == 2  # no cluster is named


# --- read and show --------------------------------------------------------------------------------------------------


def test_read(cli: Cli, bookie: Path) -> None:
    rows = cli("entrylog", "read", "--dir", bookie / "ledgers", "-o", "ndjson").rows
    assert all(list(row) == RECORD for row in rows)
    assert [row["type"] for row in rows] == ["entry"] * 6
    assert rows[0] == PLAIN | {
        "entryId": 0, "lastAddConfirmed": -1, "length": 3, "size": None, "formatVersion": 1, "logId": 31,
        "logIdHex": "1f", "offset": 1024, "recordSize": 39, "type": "entry",
        "file": str(bookie / "ledgers/current/1f.log"),
    }  # fmt: skip
    assert rows[3] == rows[0] | SCOPED | {
        "size": 3, "formatVersion": 2, "recordSize": 48, "file": str(bookie / "ledgers/current/scoped/1f.log"),
    }  # fmt: skip


@pytest.mark.parametrize("ledger", ["5", "0x5", "0:5", f"{5:032x}", "00000000-0000-0000-0000-000000000005"])
def test_read_filters_take_every_form_of_an_id(cli: Cli, bookie: Path, ledger: str) -> None:
    rows = cli("entrylog", "read", bookie / "ledgers", "--ledger", ledger, "-o", "ndjson").rows
    assert [row["ledgerScopeId"] for row in rows] == ["0"] * 3


@pytest.mark.parametrize(
    ("filters", "offsets"),
    [
        (["--ledger", "7:5"], [1024, 1076, 1125]),
        (["--ledger", "5", "--ledger-scope-id", "7"], [1024, 1076, 1125]),
        (["--ledger", files.SCOPED.qualified_name.upper()], [1024, 1076, 1125]),
        (["--ledger-scope-id", "0"], [1024, 1067, 1107]),
        (["--entry", "1"], [1067, 1076]),
        (["--ledger", "5", "--from-pos", "1067", "--to-pos", "0x453"], [1067, 1107]),
        (["--from-pos", "1067", "--to-pos", "1106", "--ledger", "5"], [1067]),
        (["--limit", "2"], [1024, 1067]),
        (["--limit", "2", "--sort=-recordSize"], [1125, 1024]),
        (["--limit", "2", "--sort=-recordSize", "--body"], [1125, 1024]),
        (["--type", "ledgersMap"], [1157]),
    ],
)
def test_read_filters(cli: Cli, bookie: Path, filters: list[str], offsets: list[int]) -> None:
    logs = ["31"] if "--from-pos" in filters else []
    result = cli("entrylog", "read", *logs, "--dir", bookie / "ledgers", *filters, "-o", "ndjson")
    assert [row["offset"] for row in result.rows] == offsets


def test_read_body(cli: Cli, bookie: Path) -> None:
    arguments = ("entrylog", "read", "31", "--dir", bookie / "ledgers", "--digest-type", "CRC32C", "-o", "ndjson")
    assert [row["payload"] for row in cli(*arguments, "--body").rows] == ["b25l", "", "dGhyZWUbWzMxbQ=="]
    assert cli(*arguments, "--format", "hex").rows[0]["payload"] == b"one".hex()


@pytest.mark.parametrize("name", ["31", "0x1f", "0X1F", "1f.log", "scoped/31", "scoped/0x1f", "scoped/1f.log"])
def test_names_of_logs(cli: Cli, bookie: Path, current: Path, name: str) -> None:
    if name == "1f.log":
        (current / "scoped" / "1f.log").unlink()
    rows = cli("entrylog", "read", name, "--dir", bookie / "ledgers", "-o", "ndjson").rows
    place = current / "scoped" if "scoped" in name else current
    assert {row["file"] for row in rows} == {str(place / "1f.log")}


def test_names_that_fit_several_logs_or_none(cli: Cli, bookie: Path, current: Path) -> None:
    result = cli("entrylog", "read", "1f.log", "--dir", bookie / "ledgers")
    assert result.code == 2
    assert str(current / "1f.log") in result.err
    assert str(current / "scoped" / "1f.log") in result.err
    other = bookie / "other" / "current"
    other.mkdir(parents=True)
    (other / "1f.log").write_bytes((current / "1f.log").read_bytes())
    result = cli("entrylog", "show", "31", "--dir", bookie / "ledgers", "--dir", bookie / "other")
    assert result.code == 2
    assert str(current / "1f.log") in result.err
    assert str(other / "1f.log") in result.err
    rows = cli("entrylog", "show", bookie / "ledgers", bookie / "other", "-o", "ndjson").rows
    assert [row["file"] for row in rows if row["ledgerScopeId"] == "0"] == [
        str(current / "1f.log"),
        str(other / "1f.log"),
    ]
    for name, code in (("32", 4), ("scoped/1", 4), ("-1", 2), ("1g", 2), ("", 2), ("no/such.log", 4)):
        assert cli("entrylog", "read", "--dir", bookie / "ledgers", "--", name).code == code, name


def test_show(cli: Cli, bookie: Path) -> None:
    rows = cli("entrylog", "show", "--dir", bookie / "ledgers", "-o", "ndjson").rows
    assert rows[0] == PLAIN | {
        "size": 133, "logId": 31, "logIdHex": "1f", "fromLedgersMap": True, "complete": True,
        "file": str(bookie / "ledgers/current/1f.log"),
    }  # fmt: skip
    assert (rows[1]["ledgerScopeId"], rows[1]["size"], rows[1]["fromLedgersMap"]) == ("7", 133 + 27, False)
    assert cli("entrylog", "show", "--dir", bookie / "ledgers", "-o", "id").out.splitlines() == [
        "5",
        SCOPED["ledgerQualifiedName"],
    ]


def test_show_counts_again_where_the_map_is_damaged(cli: Cli, bookie: Path, current: Path) -> None:
    data = bytearray((current / "1f.log").read_bytes())
    data[19] = 7  # how many ledgers the header says
    (current / "1f.log").write_bytes(data)
    result = cli("entrylog", "show", "31", "--dir", bookie / "ledgers", "-o", "ndjson")
    assert [(row["ledgerId"], row["size"], row["fromLedgersMap"], row["complete"]) for row in result.rows] == [
        ("5", 133, False, True)
    ]
    assert result.code == 7
    assert "edgers map" in result.err


def test_show_counts_records_before_damage(cli: Cli, bookie: Path, current: Path) -> None:
    path = current / "scoped" / "1f.log"
    data = bytearray(path.read_bytes())
    data[1125:1129] = b"\x7f\xff\xff\xff"
    path.write_bytes(data)
    result = cli("entrylog", "show", "scoped/31", "31", "--dir", bookie / "ledgers", "-o", "ndjson")
    assert [(row["ledgerScopeId"], row["size"], row["complete"]) for row in result.rows] == [
        ("7", 101, False),
        ("0", 133, True),
    ]
    assert result.code == 7
    assert "at byte 1125" in result.err


# --- active and garbage ---------------------------------------------------------------------------------------------


def test_active(cli: Cli, bookie: Path, current: Path, uri: str) -> None:
    second_log(current)
    result = cli("entrylog", "active", "--all", "--dir", bookie / "ledgers", "-u", uri, "-o", "ndjson")
    assert (result.code, result.err) == (0, "")
    assert list(result.rows[0]) == [
        *IDS, "state", "size", "topic", "logId", "logIdHex", "fromLedgersMap", "complete", "file"
    ]  # fmt: skip
    assert [(row["logIdHex"], row["ledgerScopeId"], row["ledgerId"], row["state"]) for row in result.rows] == [
        ("1f", "0", "5", "alive"),
        ("20", "0", "5", "alive"),
        ("20", "0", "9", "dead"),
        ("1f", "7", "5", "dead"),
    ]
    arguments = ("entrylog", "active", "0x20", "--dir", bookie / "ledgers", "-u", uri)
    assert cli(*arguments, "-o", "id").out == "5\n9\n"
    assert cli(*arguments, "-o", "id", "--state", "dead").out == "9\n"
    assert cli(*arguments, "-o", "id", "--state", "unknown").out == ""
    assert cli(*arguments, "--all").code == 2


def test_a_ledger_whose_metadata_is_damaged_is_neither_dead_nor_alive(
    cli: Cli, bookie: Path, current: Path, uri: str
) -> None:
    with open_cluster(uri) as cluster:
        cluster.store.put(cluster.ledgers.path(OTHER), b"rubbish", None)
    second_log(current)
    arguments = ("--dir", bookie / "ledgers", "-u", uri, "-o", "ndjson")
    result = cli("entrylog", "active", "32", *arguments)
    assert [(row["ledgerId"], row["state"]) for row in result.rows] == [("5", "alive"), ("9", "unknown")]
    assert result.code == 7
    assert "ledger 9" in result.err
    result = cli("--quiet", "entrylog", "garbage", "32", *arguments)
    (row,) = result.rows
    assert (row["unknownCount"], row["garbageSize"], row["compaction"], result.code) == (1, 0, None, 7)


def test_the_files_of_another_cluster_are_refused(cli: Cli, bookie: Path, current: Path, uri: str) -> None:
    (current / "VERSION").write_bytes(Cookie("bookie:1", ("/j",), ("/l",), "another").serialize())
    for command in (("active",), ("garbage",), ("list", "--sort", "garbage")):
        result = cli("entrylog", *command, "--dir", bookie / "ledgers", "-u", uri)
        assert (result.code, result.out) == (5, "")
        assert "another" in result.err


def test_unreachable_store_prints_no_states(cli: Cli, bookie: Path) -> None:
    arguments = ("--dir", bookie / "ledgers", "-u", "zk+hierarchical://127.0.0.1:1/ledgers", "--timeout", "1s")
    for command in ("active", "garbage"):
        result = cli("entrylog", command, *arguments)
        assert (result.code, result.out) == (6, "")


def test_garbage(cli: Cli, bookie: Path, current: Path, uri: str) -> None:
    second_log(current)
    arguments = ("entrylog", "garbage", "--dir", bookie / "ledgers", "-u", uri)
    result = cli(*arguments, "-o", "ndjson")
    assert result.code == 0, result.err
    assert list(result.rows[0]) == [
        "logId", "logIdHex", "scoped", "aliveCount", "deadCount", "unknownCount", "totalSize", "remainingSize",
        "garbageSize", "usage", "compaction", "topics", "reclaimableSize", "fromLedgersMap", "complete", "file",
    ]  # fmt: skip
    found = [(row["logIdHex"], row["compaction"], row["garbageSize"], row["reclaimableSize"]) for row in result.rows]
    assert found == [("1f", "delete", 160, 160), ("20", "major", 83, 83), ("1f", None, 0, 0)]
    assert "243 B garbage" in result.err
    assert "deletion of 1 log frees 160 B" in result.err
    assert "rewriting 43 B" in result.err
    assert cli(*arguments, "--sort", "id", "-o", "id").out == "31\n32\nscoped/31\n"
    assert cli(*arguments, "--sort", "size", "-o", "id").out == "scoped/31\n31\n32\n"
    assert cli("--quiet", *arguments).err == ""


def test_garbage_thresholds(cli: Cli, bookie: Path, current: Path, uri: str) -> None:
    second_log(current)
    arguments = ("entrylog", "garbage", "32", "--dir", bookie / "ledgers", "-u", uri, "-o", "ndjson")
    assert cli(*arguments, "--minor-threshold", "0.5").rows[0]["compaction"] == "minor"
    assert cli(*arguments, "--major-threshold", "0.3").rows[0]["compaction"] is None
    for bad in ("nan", "1.1", "-0.1", "much", "inf"):
        assert cli(*arguments, "--minor-threshold", bad).code == 2
    conf = bookie / "bk_server.conf"
    conf.write_text("minorCompactionThreshold=0.5\nmajorCompactionThreshold=0.6\n")
    assert cli(*arguments, "--conf", conf).rows[0]["compaction"] == "minor"
    assert cli(*arguments, "--conf", conf, "--minor-threshold", "0").rows[0]["compaction"] == "major"


# --- extract --------------------------------------------------------------------------------------------------------


def test_extract_a_log(cli: Cli, bookie: Path, current: Path) -> None:
    second_log(current)
    target = bookie / "ff.log"
    before = os.umask(0)
    try:
        result = cli("entrylog", "extract", "--ledger", "5", "--dir", bookie / "ledgers", "-f", target, "-o", "json")
    finally:
        os.umask(before)
    assert (result.code, result.err) == (0, "")
    assert target.stat().st_mode & 0o777 == 0o640  # entries, as in the bookie's own logs
    assert result.json == PLAIN | {
        "entryCount": 3, "firstEntryId": 0, "lastEntryId": 2, "copiesCount": 3, "copiesFoundCount": 4,
        "missingCount": 0, "missing": None, "digestType": "CRC32C",
        "logs": [str(current / "1f.log"), str(current / "20.log")], "file": str(target),
    }  # fmt: skip
    rows = cli("entrylog", "read", target, "-o", "ndjson", "--body", "--digest-type", "CRC32C").rows
    assert [(row["entryId"], row["logId"]) for row in rows] == [(0, 255), (1, 255), (2, 255)]
    assert not list(bookie.glob("*.partial"))


def test_extract_follows_no_planted_link(cli: Cli, bookie: Path, tmp_path: Path) -> None:
    victim, target = tmp_path / "victim", tmp_path / "out"
    victim.write_text("untouched")
    for name in ("out.partial", ".out.partial"):
        (tmp_path / name).symlink_to(victim)
    result = cli("entrylog", "extract", "--ledger", "5", "--dir", bookie / "ledgers", "-f", target)
    assert result.code == 0, result.err
    assert victim.read_text() == "untouched"
    assert target.stat().st_size > 0
    assert not target.is_symlink()
    links = {"out.partial", ".out.partial"}
    assert {each.name for each in tmp_path.iterdir() if "out" in each.name} == {"out", *links}  # nothing is left


def test_extract_replaces_files_only(cli: Cli, bookie: Path) -> None:
    os.mkfifo(bookie / "pipe")
    result = cli("entrylog", "extract", "--ledger", "5", "--dir", bookie / "ledgers", "-f", bookie / "pipe", "--yes")
    assert result.code == 2
    assert "is not a regular file" in result.err
    assert (bookie / "pipe").is_fifo()


def test_extract_reports_missing_entries(cli: Cli, bookie: Path, current: Path) -> None:
    (current / "1f.log").unlink()
    second_log(current)
    arguments = ("entrylog", "extract", bookie / "ledgers", "--ledger", "9", "--to", "4")
    result = cli(*arguments, "-f", bookie / "out", "-o", "json")
    assert result.json["missing"] == [{"firstEntryId": 2, "lastEntryId": 4}]
    assert "2-4" in cli(*arguments, "-f", bookie / "other").out
    result = cli(*arguments, "-f", "-", "--format", "raw")
    assert result.out == "one"
    assert "bkctl: Warning: missing entries (3): 2-4" in result.err


@pytest.mark.parametrize("ledger", [files.PLAIN, files.SCOPED])
def test_extract_ndjson_and_raw(cli: Cli, bookie: Path, ledger: LedgerId) -> None:
    arguments = ("entrylog", "extract", "--dir", bookie / "ledgers", "--ledger", ledger, "-f", "-", "--format")
    result = cli(*arguments, "ndjson")
    read = cli("entrylog", "read", "--dir", bookie / "ledgers", "--ledger", ledger, "--body", "--digest-type", "CRC32C",
               "-o", "ndjson")  # fmt: skip
    assert result.rows == read.rows
    assert list(result.rows[0]) == list(read.rows[0])
    assert cli(*arguments, "raw").out == "onethree\x1b[31m"
    assert cli(*arguments, "raw", "--from", "2").out == "three\x1b[31m"


def test_extract_all_copies(cli: Cli, bookie: Path, current: Path) -> None:
    second_log(current)
    arguments = ("entrylog", "extract", bookie / "ledgers", "--ledger", "5", "-f", "-", "--format", "ndjson")
    assert [(row["entryId"], row["logId"]) for row in cli(*arguments).rows] == [(0, 32), (1, 31), (2, 31)]
    assert cli(*arguments[:-1], "log", "-o", "json").code == 2
    found = [(row["entryId"], row["logId"]) for row in cli(*arguments, "--all-copies").rows]
    assert found == [(0, 31), (0, 32), (1, 31), (2, 31)]


def test_extract_damaged_logs_as_far_as_they_are_good(cli: Cli, bookie: Path, current: Path) -> None:
    data = bytearray((current / "1f.log").read_bytes())
    data[1107:1111] = b"\xff" * 4
    (current / "1f.log").write_bytes(data)
    target = bookie / "out"
    result = cli("entrylog", "extract", bookie / "ledgers", "--ledger", "5", "-f", target, "-o", "json")
    assert result.code == 7
    assert "at byte 1107" in result.err
    assert result.json["entryCount"] == 2
    assert cli("entrylog", "read", target, "-o", "id").out == "1024\n1067\n"


def test_extract_tells_what_a_closed_ledger_lacks(cli: Cli, bookie: Path, current: Path, uri: str) -> None:
    with open_cluster(uri) as cluster:
        found = cluster.ledgers.read(files.PLAIN)
        closed = found.metadata._replace(state=LedgerState.CLOSED, length=99, last_entry_id=244)
        cluster.ledgers.write(files.PLAIN, closed, found.version)
    (current / "1f.log").write_bytes(files.log_bytes(1, files.PLAIN, closed=False)[0])
    arguments = (
        "entrylog",
        "extract",
        bookie / "ledgers",
        "--ledger",
        "5",
        "-f",
        bookie / "out",
        "-y",
        "--password",
        "x",
    )
    result = cli(*arguments)
    assert result.code == 0
    assert "known up to 2; the end of ledger 5 is unknown: add -u" in result.err
    result = cli(*arguments, "-u", uri, "-o", "json")
    assert (result.code, result.json["missingCount"], result.json["endEntryId"]) == (3, 242, 244)
    assert result.json["missing"] == [{"firstEntryId": 3, "lastEntryId": 244}]
    with open_cluster(uri) as cluster:
        cluster.ledgers.remove(files.PLAIN)
    result = cli(*arguments, "-u", uri)
    assert result.code == 0
    assert "the end of ledger 5 is unknown" in result.err


def test_extract_marks_damaged_entries(cli: Cli, bookie: Path, current: Path) -> None:
    data, offsets = files.log_bytes(1, files.PLAIN, closed=True)
    damaged = bytearray(data)
    damaged[offsets[1] - 1] ^= 1
    (current / "1f.log").write_bytes(damaged)
    arguments = ("entrylog", "extract", bookie / "ledgers", "--ledger", "5", "-f")
    result = cli(*arguments, bookie / "out", "-o", "json")
    assert (result.code, result.json["damagedCount"], result.json["damaged"]) == (3, 1, [0])
    result = cli(*arguments, "-", "--format", "ndjson")
    assert [row.get("damaged") for row in result.rows] == [True, None, None]
    assert "damaged entries (1): 0" in result.err


def test_extract_can_distrust_ledgers_maps(cli: Cli, bookie: Path, current: Path) -> None:
    data = bytearray((current / "1f.log").read_bytes())
    data[-16:-8] = (77).to_bytes(8, "big")  # the map names another ledger
    (current / "1f.log").write_bytes(data)
    arguments = ("entrylog", "extract", bookie / "ledgers", "--ledger", "5", "-f", "-", "--format", "raw")
    result = cli(*arguments)
    assert result.code == 4
    assert "--scan" in result.err
    assert cli(*arguments, "--scan").out == "onethree\x1b[31m"


def test_extract_refuses(cli: Cli, bookie: Path) -> None:
    target = bookie / "out"
    arguments = ("entrylog", "extract", bookie / "ledgers", "-f", target, "--ledger")
    result = cli(*arguments, "77")
    assert (result.code, result.out, target.exists()) == (4, "", False)
    assert cli(*arguments, "5", "--from", "9", "--to", "12").code == 4
    assert not target.exists()
    target.write_bytes(b"precious")
    assert cli(*arguments, "5").code == 2
    assert target.read_bytes() == b"precious"
    assert cli(*arguments, "5", "--yes").code == 0
    assert target.read_bytes()[:4] == b"BKLO"
    assert cli("entrylog", "extract", bookie / "ledgers", "-f", bookie, "--ledger", "5").code == 2
    assert cli("entrylog", "extract", bookie / "ledgers", "-f", bookie / "no" / "out", "--ledger", "5").code == 4
    assert cli("entrylog", "extract", bookie / "ledgers", "-f", target).code == 2
    assert cli(*arguments, "five").code == 2
    assert cli(*arguments, "5", "--from", "2", "--to", "1", "--yes").code == 2


# --- a bookie of our own --------------------------------------------------------------------------------------------


def test_the_scoped_logs_that_a_bookie_of_ours_left(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    text = tmp_path / "text"
    text.write_bytes(b"".join(b"line %d\n" % number for number in range(100)))
    local = LocalCluster(tmp_path / "cluster")
    local.up(1)
    try:
        monkeypatch.setenv("BKCTL_METADATA_URI", local.metadata_uri)
        quorum = ("--ensemble-size", 1, "--write-quorum", 1, "--ack-quorum", 1)
        for ledger in ("7:1", "7:2", "8:1", "0x10"):
            scope, _, number = ledger.rpartition(":")
            name = ("--ledger-id", number, *(("--ledger-scope-id", scope) if scope else ()))
            assert cli("ledger", "write", text, *name, *quorum).code == 0
        assert cli("ledger", "delete", "7:2", "--yes").code == 0
    finally:
        local.down()
    directory = tmp_path / "cluster" / "bookie-0" / "ledgers"
    rows = cli("entrylog", "active", directory, "-o", "ndjson").rows
    assert [(row["ledgerScopeId"], row["ledgerId"], row["state"]) for row in rows] == [
        ("0", "16", "alive"),
        ("7", "1", "alive"),
        ("7", "2", "dead"),
        ("8", "1", "alive"),
    ]
    (scoped,) = [row for row in cli("entrylog", "garbage", directory, "-o", "ndjson").rows if row["scoped"]]
    assert (scoped["aliveCount"], scoped["deadCount"], scoped["compaction"]) == (2, 1, "major")
    target = tmp_path / "out.log"
    assert cli("entrylog", "extract", directory, "--ledger", "8:1", "-f", target).code == 0
    rows = cli("entrylog", "read", target, "--format", "utf8", "-o", "ndjson").rows
    assert [row["payload"] for row in rows] == [f"line {number}" for number in range(100)]


# --- forms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("list", "ledgers"),
        ("list", "ledgers", "--sort", "garbage"),
        ("show", "ledgers"),
        ("read", "ledgers", "--body"),
        ("active", "ledgers"),
        ("garbage", "ledgers"),
    ],
)
def test_every_form_of_output_has_the_same_rows(
    cli: Cli, bookie: Path, uri: str, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(bookie)
    monkeypatch.setenv("BKCTL_METADATA_URI", uri)
    arguments = ("entrylog", *arguments)
    rows = cli(*arguments, "-o", "ndjson").rows
    assert rows
    assert cli(*arguments, "-o", "json").json == rows
    table = list(csv.DictReader(io.StringIO(cli(*arguments, "-o", "csv").out)))
    assert [list(row) for row in table] == [list(row) for row in rows]
    assert len(cli(*arguments, "-o", "id").out.splitlines()) == len(rows)
    assert len(cli(*arguments).out.splitlines()) == len(rows) + 1
    assert json.loads(json.dumps(rows)) == rows


# --- verify ---------------------------------------------------------------------------------------------------------


def hmac_log(current: Path, password: bytes) -> Path:
    """Log 0x30: three entries of ledger 5, sealed by HMAC."""
    manager = DigestManager(files.PLAIN, DigestType.HMAC, password)
    sealed = [manager.seal(each, each - 1, 4 * (each + 1), b"data") + b"data" for each in range(3)]
    data = entry_log.write_header(1, 0, 0) + b"".join(len(each).to_bytes(4, "big") + each for each in sealed)
    path = current / "30.log"
    path.write_bytes(data)
    return path


def test_verify_finds_the_entry_whose_bits_flipped(cli: Cli, current: Path) -> None:
    whole = cli("entrylog", "verify", str(current), "-o", "json")
    assert whole.code == 0, whole.err
    log = current / "20.log"
    second_log(current)
    data = bytearray(log.read_bytes())
    data[entry_log.HEADER_SIZE + 4 + 33] ^= 1
    log.write_bytes(data)
    found = cli("entrylog", "verify", str(log), "-o", "json")
    assert found.code == 3
    (finding,) = found.json[0]["findings"]
    assert (finding["ledgerId"], finding["entryId"], finding["offset"]) == ("9", 0, entry_log.HEADER_SIZE)
    assert cli("entrylog", "verify", str(log), "--no-digests").code == 0
    assert cli("entrylog", "verify", str(log), "--no-digests", "--digest").code == 2


def test_verify_takes_digest_types_and_passwords_from_metadata(cli: Cli, current: Path, tmp_path: Path) -> None:
    log = hmac_log(current, b"geheim")
    alone = cli("entrylog", "verify", str(log), "-o", "json")
    assert alone.code == 0
    assert "password" in alone.err
    uri = f"sqlite://{tmp_path}/hmac.db"
    with open_cluster(uri, create=True) as cluster:
        cluster.ledgers.create(
            files.PLAIN, LedgerMetadata(1, 1, 1, DigestType.HMAC, b"geheim", (Fragment(0, ("bookie-1",)),))
        )
    known = cli("entrylog", "verify", str(log), "-o", "json", "-u", uri)
    assert known.code == 0, known.err
    assert known.json[0]["digests"] == {"HMAC": 3}
    given = cli("entrylog", "verify", str(log), "--digest", "hmac", "--password", "geheim", "-o", "json")
    assert given.out == known.out
    wrong = cli("entrylog", "verify", str(log), "--digest", "HMAC", "--password", "wrong")
    assert wrong.code == 3
    assert cli("entrylog", "verify", str(log), "--digest", "crc32c").code == 3


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_verify_fits_the_terminal_and_names_each_file(width: int) -> None:
    directory = golden.DATA / "4.18.0" / "interleaved" / "ledgers"
    code, seen = CommandLine(None).terminal(
        "--no-color", "entrylog", "verify", directory, "--no-digests", "--sort", "logId", columns=width
    )
    assert code == 0, seen
    header, *rows = [line for line in seen.splitlines() if line and not line.startswith("Left out for width: ")]
    assert header.split()[0] == "LOG"
    assert max(map(len, [header, *rows])) <= width
    assert width == 60 or any(line.rstrip().endswith(".log") for line in rows)


def test_verify_counts_sound_logs_in_a_sentence_on_a_terminal(current: Path) -> None:
    code, seen = CommandLine(None).terminal("entrylog", "verify", current, "--no-digests")
    assert code == 0, seen
    assert re.fullmatch(r"\d entry logs? (is|are) sound: \d+ entries; -o wide lists them\n", seen), seen
    second_log(current)
    log = current / "20.log"
    log.write_bytes(log.read_bytes()[: entry_log.HEADER_SIZE + 2] + b"\xff" * 50)
    code, seen = CommandLine(None).terminal("--no-color", "entrylog", "verify", current, "--no-digests", columns=200)
    assert code == 7
    rows = [line for line in seen.splitlines() if line.rstrip().endswith(".log")]
    assert [row.split()[0] for row in rows] == [str(0x20)], seen
    _, seen = CommandLine(None).terminal("--no-color", "entrylog", "verify", log, "--no-digests", columns=200)
    assert " sound: " not in seen
    wide = CommandLine(None)("entrylog", "verify", current, "--no-digests", "-o", "wide")
    assert wide.out.count(b".log") > 1
