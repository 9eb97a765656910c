"""`bookie check`, `bookie index check` and `bookie index show` as an operator calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bkctl.formats.index import index_path, slot_offset, write_location
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster

from . import files
from .conftest import Cli

PLAIN = {"ledgerScopeId": "0", "ledgerId": "5"}
SCOPED = {"ledgerScopeId": "7", "ledgerId": "5"}


@pytest.fixture
def bookie(tmp_path: Path) -> Path:
    """Ledgers 5 and 7:5 with entries 0, 2, 3 in the index, while their logs hold 0, 1, 2: the last two are wrong."""
    files.make(tmp_path)
    return tmp_path


@pytest.fixture
def healthy(bookie: Path) -> Path:
    """The same with the index that the logs have."""
    for ledger in (files.PLAIN, files.SCOPED):
        path = bookie / "ledgers" / "current" / index_path(ledger)
        data = path.read_bytes()
        slots = [data[at : at + 8] for at in range(slot_offset(0), len(data), 8)]
        path.write_bytes(data[: slot_offset(0)] + b"".join([slots[0], *slots[2:]]))
    return bookie


def test_check_of_a_healthy_bookie(cli: Cli, healthy: Path) -> None:
    answer = cli("bookie", "check", "--dir", healthy / "ledgers", "-o", "ndjson")
    assert (answer.code, answer.out) == (0, "")
    assert answer.err == "The index is sound: 2 ledgers, 6 entries in the index, 6 records in 2 logs, 293 B read\n"
    assert cli("bookie", "check", "--dir", healthy / "ledgers").out == ""
    answer = cli("bookie", "check", "--dir", healthy / "ledgers", "--digest", "--rate", "100MiB/s")
    assert answer.code == 0
    assert "Digests: 6 CRC32C matched, 0 not known" in answer.err
    answer = cli("bookie", "check", "--dir", healthy / "ledgers", "--ledger", "7:5")
    assert "1 ledger, 3 entries" in answer.err
    answer = cli("bookie", "check", "--dir", healthy / "ledgers", "--ledger-scope-id", "7", "--sample", "100%")
    assert "1 ledger, 3 entries" in answer.err
    assert cli("--quiet", "bookie", "check", "--dir", healthy / "ledgers").err == ""
    assert cli("bookie", "check", "--dir", healthy / "ledgers", "-o", "json").json == []


@pytest.mark.parametrize("sample", [(), ("--sample", "100%")], ids=["whole", "sample"])
def test_check_of_missing_ledgers(cli: Cli, healthy: Path, sample: tuple[str, ...]) -> None:
    answer = cli("bookie", "check", healthy, "--ledger", "7:5", "--ledger", "7:6", "--ledger", "99", *sample)
    assert (answer.code, answer.out) == (4, "")
    assert answer.err.startswith(f"bkctl: No index and no entry log has ledger 99, {7:016x}{6:016x};")


def test_check_of_a_journal_directory(cli: Cli, healthy: Path) -> None:
    for words in (("bookie", "check"), ("bookie", "index", "check")):
        answer = cli(*words, healthy / "journal")
        assert (answer.code, answer.out) == (4, "")
        assert f"No index and no entry log in {healthy / 'journal'}, but journals" in answer.err
        assert cli(*words, healthy / "journal", healthy / "ledgers").code == 0


def test_check_with_findings(cli: Cli, bookie: Path) -> None:
    arguments = ("bookie", "check", "--dir", bookie / "ledgers", "--ledger", "5")
    answer = cli(*arguments, "-o", "ndjson")
    assert answer.code == 3
    assert answer.err.endswith("\nbkctl: 3 findings\n")
    by_kind = {(row["kind"], row["entryId"]): row for row in answer.rows}
    assert by_kind.keys() == {("wrongEntry", 2), ("wrongEntry", 3), ("notIndexed", 1)}
    row = by_kind["wrongEntry", 2]
    assert {name: row[name] for name in PLAIN} == PLAIN
    assert (row["logId"], row["logIdHex"], row["finding"]) == (31, "1f", True)
    assert row["location"] == 31 << 32 | row["offset"] + 4
    assert row["reason"] == "entry 1 of ledger 5 is there"
    assert row["file"] == str(bookie / "ledgers/current/1f.log")
    table = cli(*arguments)
    assert (table.code, table.out.splitlines()[0].split()[:3]) == (3, ["KIND", "LEDGER", "ENTRY"])
    assert cli(*arguments, "-o", "id").out == "5\n5\n5\n"


def test_check_with_a_damaged_index(cli: Cli, healthy: Path) -> None:
    path = healthy / "ledgers" / "current" / index_path(files.PLAIN)
    path.write_bytes(b"?" + path.read_bytes()[1:])
    for command in (("check",), ("index", "check")):
        answer = cli("bookie", *command, "--dir", healthy / "ledgers", "-o", "ndjson")
        assert answer.code == 7
        assert f"bkctl: {path}: Ledger index does not begin with BKLE at byte 0" in answer.err
        assert "1 index damaged" in answer.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--sample", "0"), "--sample '0': not a share"),
        (("--sample", "101%"), "--sample '101%': not a share"),
        (("--sample", "2"), "not a share"),
        (("--rate", "fast"), "--rate: not a rate: 'fast'; give 20MiB, 50MB/s or '5000 entries'"),
        (("--rate", "0"), "must be more than 0"),
        (("--ledger", "x"), "Not a ledger id: 'x'"),
        (("--seed", "x"), "--seed: not a number"),
        (("--seed", "1"), "--seed needs --sample"),
        (("--digest-type", "MD5"), "MD5"),
    ],
)
def test_check_refuses_malformed_options(cli: Cli, healthy: Path, arguments: tuple[str, ...], problem: str) -> None:
    answer = cli("bookie", "check", "--dir", healthy / "ledgers", *arguments)
    assert answer.code == 2
    assert problem in answer.err


def test_rates_of_entries(cli: Cli, healthy: Path) -> None:
    for rate in ("5000 entries", "5000entries/s", "1entry/s"):
        options = ("--rate", rate, "--ledger-scope-id", "99")
        assert cli("bookie", "check", "--dir", healthy / "ledgers", *options).code == 0


def test_index_check(cli: Cli, bookie: Path) -> None:
    directory = ("--dir", bookie / "ledgers")
    answer = cli("bookie", "index", "check", *directory, "-o", "json")
    assert (answer.code, answer.json) == (0, [])
    assert answer.err == "The index is sound: 2 ledgers, 2 of them fenced, 0 without entries, 6 entries\n"
    assert cli("bookie", "index", "check", *directory, "--ledgers").err.endswith("2 of them fenced\n")
    assert cli("bookie", "index", "check", *directory, "--locations").err == "The index is sound: 6 entries\n"
    path = bookie / "ledgers" / "current" / index_path(files.PLAIN)
    path.write_bytes(path.read_bytes() + write_location(7))
    answer = cli("bookie", "index", "check", *directory, "-o", "ndjson")
    assert answer.code == 3
    (row,) = map(json.loads, answer.out.splitlines())
    assert (row["kind"], row["entryId"], row["location"], row["file"]) == ("badItem", 4, 7, str(path))
    missing = cli("bookie", "index", "check", "--dir", bookie / "nothing")
    assert missing.code == 4


def test_index_show_of_all_ledgers(cli: Cli, bookie: Path) -> None:
    directory = ("--dir", bookie / "ledgers")
    rows = cli("bookie", "index", "show", "--meta", *directory, "-o", "json").json
    assert [(row["ledgerScopeId"], row["ledgerId"], row["entryCount"]) for row in rows] == [
        ("0", "5", 3),
        ("7", "5", 3),
    ]
    (row,) = cli("bookie", "index", "show", "--meta", "--ledger-scope-id", "7", *directory, "-o", "json").json
    assert {name: row[name] for name in SCOPED} == SCOPED
    none = cli("bookie", "index", "show", *directory)
    assert none.code == 2
    assert "No ledger is given" in none.err
    many = cli("bookie", "index", "show", "5", "7:5", *directory, "-o", "ndjson").rows
    assert len(many) == 6
    assert cli("bookie", "index", "show", "6", *directory).code == 4


def test_a_damaged_index_does_not_hide_the_others(cli: Cli, bookie: Path) -> None:
    path = bookie / "ledgers/current" / index_path(files.PLAIN)
    path.write_bytes(b"XXXX" + path.read_bytes()[4:])
    answer = cli("bookie", "index", "show", "--meta", "--dir", bookie / "ledgers", "-o", "ndjson")
    assert [json.loads(line)["ledgerScopeId"] for line in answer.out.splitlines()] == ["7"]
    assert answer.code == 7
    assert str(path) in answer.err


def test_directories_are_arguments_too(cli: Cli, healthy: Path) -> None:
    for words in (("bookie", "check"), ("bookie", "index", "check"), ("bookie", "downgrade", "--dry-run")):
        named = cli(*words, "--dir", healthy / "ledgers", "--dir", healthy / "journal", "-o", "json")
        assert cli(*words, healthy / "ledgers", healthy / "journal", "-o", "json") == named
    assert cli("bookie", "check", healthy).code == 0
    converted = cli("bookie", "convert", "--to", "db", healthy, "-o", "json")
    assert (converted.code, converted.json[0]["ledgers"]) == (0, 2)
    rebuilt = cli("bookie", "index", "rebuild", "--locations", healthy, "-o", "json")
    assert (rebuilt.code, rebuilt.json[0]["entries"]) == (0, 3)


@pytest.mark.parametrize("ledger", [files.PLAIN, files.SCOPED])
def test_a_removed_index_is_a_finding_unless_the_ledger_was_deleted(
    cli: Cli, bookie: Path, tmp_path: Path, ledger: LedgerId
) -> None:
    (bookie / "ledgers" / "current" / index_path(ledger)).unlink()
    for command in (("check",), ("check", "--ledger", ledger), ("index", "check")):
        answer = cli("bookie", *command, "--dir", bookie / "ledgers", "-o", "ndjson")
        found = [row for row in answer.rows if row["kind"] == "unindexed"]
        names = [row["ledgerQualifiedName"] for row in found]
        assert (answer.code, names) == (3, [ledger.to_json()["ledgerQualifiedName"]])
        assert "no entry log has" not in answer.err
    uri = f"sqlite://{tmp_path}/metadata.db"
    with open_cluster(uri, create=True):
        pass
    answer = cli("bookie", "index", "check", "--dir", bookie / "ledgers", "-u", uri, "-o", "ndjson")
    assert [row["finding"] for row in answer.rows if row["kind"] == "unindexed"] == [False]
    assert answer.code == 0


@pytest.mark.parametrize("ledger", [files.PLAIN, files.SCOPED])
def test_an_index_is_lost_unless_the_journals_have_its_entries(cli: Cli, bookie: Path, ledger: LedgerId) -> None:
    path = bookie / "ledgers" / "current" / index_path(ledger)

    def found(*words: object) -> list[str]:
        rows = cli("bookie", *words, "-o", "ndjson").rows
        return [row["ledgerQualifiedName"] for row in rows if row["kind"] == "unindexed"]

    path.write_bytes(path.read_bytes()[: slot_offset(0)])  # Only the header is left.
    assert found("index", "check", bookie / "ledgers") == [ledger.to_json()["ledgerQualifiedName"]]
    path.unlink()
    (bookie / "ledgers" / "current" / "lastMark").unlink()
    for command in (("check",), ("check", "--ledger", ledger), ("index", "check")):
        assert found(*command, bookie / "ledgers", bookie / "journal") == [], "a restart replays them"
