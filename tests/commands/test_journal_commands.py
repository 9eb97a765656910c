"""`journal verify`, `stats` and `lastmark`: what they find in a bookie's directories."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.command_line import CommandLine

from bkctl.formats import journal
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.journal import LogMark
from bkctl.formats.metadata import Cookie
from bkctl.formats.record import record_of
from bkctl.ids import LedgerId

from . import files
from .conftest import Cli

#: The offsets of the records of the journal that `files` makes, in order; and its end.
OFFSETS = (512, 556, 599, 639)


@pytest.fixture
def bookie(tmp_path: Path) -> Path:
    files.make(tmp_path)
    return tmp_path


def mark(bookie: Path, journal_id: int, offset: int) -> None:
    (bookie / "ledgers/current/lastMark").write_bytes(LogMark(journal_id, offset).serialize())


def test_verify_finds_nothing_in_good_directories(cli: Cli, bookie: Path) -> None:
    rows = cli("journal", "verify", bookie / "journal", bookie / "ledgers", "-o", "ndjson").rows
    assert [
        (row["journalId"], row["version"], row["state"], row["recordCount"], row["entryCount"]) for row in rows
    ] == [
        (10, 6, "endOfFile", 6, 3),
        (11, 7, "endOfFile", 6, 3),
    ]
    assert [row["lastMark"] for row in rows] == [None, 512]
    assert [row["goodEnd"] for row in rows] == [row["size"] for row in rows]
    assert {row["problem"] for row in rows} == {None}
    assert list(rows[0]) == [
        "journalId", "journalIdHex", "version", "size", "state", "recordCount", "entryCount", "goodEnd", "sizeBehind",
        "entriesBehind", "recordsBehind", "resumesAt", "lastMark", "scoped", "file", "problem", "nextCommand",
    ]  # fmt: skip
    assert cli("journal", "verify", bookie / "journal", "-o", "id").out == "10\n11\n"


def test_verify_counts_sound_journals_in_a_sentence_on_a_terminal(bookie: Path) -> None:
    terminal = CommandLine(None).terminal
    code, seen = terminal("journal", "verify", bookie / "journal", bookie / "ledgers")
    assert (code, seen) == (0, "2 journals are sound: 12 records; -o wide lists them\n")
    mark(bookie, 10, 557)
    code, seen = terminal("--no-color", "journal", "verify", bookie / "journal", bookie / "ledgers", columns=200)
    assert code == 3
    assert [line.split()[0] for line in seen.splitlines() if "points at byte 557" in line] == ["10"]
    assert "1 journal is sound" in seen
    assert not any(line.startswith("     11") or line.split()[:1] == ["11"] for line in seen.splitlines())


def test_verify_shows_torn_journals_on_a_terminal(bookie: Path) -> None:
    first, last = sorted(bookie.glob("journal/current/*.txn"))
    os.truncate(last, last.stat().st_size - 3)
    terminal = CommandLine(None).terminal
    code, seen = terminal("--no-color", "journal", "verify", first, last, columns=200)
    assert (code, [line.split()[0] for line in seen.splitlines() if " torn " in line]) == (0, ["11"])
    assert "1 journal is sound: 6 records" in seen
    _, seen = terminal("--no-color", "journal", "verify", last, columns=200)
    assert " torn " in seen
    assert " sound: " not in seen


def test_read_says_that_a_file_ends_within_a_record(bookie: Path) -> None:
    cli, log, journal = CommandLine(None), bookie / "ledgers/current/scoped/1f.log", bookie / "journal/current/b.txn"
    for group, file in (("entrylog", log), ("journal", journal)):
        whole = cli(group, "read", file, "-o", "ndjson")
        assert (whole.code, whole.err) == (0, "")
        os.truncate(file, whole.rows[-1]["offset"] + 7)
        cut = cli(group, "read", file, "-o", "ndjson")
        assert (cut.code, cut.rows) == (0, whole.rows[:-1])
        assert f"{file} ends within a record at byte {whole.rows[-1]['offset']}:" in cut.err


@pytest.mark.parametrize(
    ("offset", "problem"),
    [
        (0, None),
        *((offset, None) for offset in OFFSETS),
        (1024, None),
        (557, "points at byte 557, inside a record"),
        (1 << 40, "behind its end"),
    ],
)
def test_verify_shows_the_position_of_a_mark(cli: Cli, bookie: Path, offset: int, problem: str | None) -> None:
    mark(bookie, 10, offset)
    result = cli("journal", "verify", "--dir", bookie / "journal", "--dir", bookie / "ledgers", "-o", "json")
    row = result.json[0]
    assert row["lastMark"] == offset
    assert result.code == (0 if problem is None else 3)
    assert problem is None or problem in row["problem"]


def test_verify_takes_the_marks_that_javas_replay_leaves(cli: Cli, bookie: Path) -> None:
    path = bookie / "journal/current/a.txn"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + bytes(4096))
    mark(bookie, 10, size + 4)
    assert cli("journal", "verify", bookie / "journal", bookie / "ledgers").code == 0


def test_verify_finds_missing_journals(cli: Cli, bookie: Path) -> None:
    mark(bookie, 9, 600)
    result = cli("journal", "verify", bookie / "journal", bookie / "ledgers", "-o", "json")
    assert result.code == 3
    assert [(row["journalId"], row["state"]) for row in result.json] == [
        (9, "missing"), (10, "endOfFile"), (11, "endOfFile")
    ]  # fmt: skip
    assert "lastMark points at its byte 600" in result.json[0]["problem"]
    mark(bookie, 10, 512)
    (bookie / "journal/current/b.txn").rename(bookie / "journal/current/e.txn")
    result = cli("journal", "verify", bookie / "journal", bookie / "ledgers", "-o", "json")
    assert result.code == 3
    assert "b.txn to d.txn are missing between a.txn and e.txn" in result.out
    mark(bookie, 14, 512)
    assert cli("journal", "verify", bookie / "journal", bookie / "ledgers", "-o", "json").code == 0


@pytest.mark.parametrize("content", [b"", bytes(1 << 20), b"BKLG" + bytes(3) + b"\6" + bytes(92)])
def test_verify_finds_journals_that_lost_their_header(cli: Cli, bookie: Path, content: bytes) -> None:
    """The marked one, and one that later journals follow; a crash leaves the last one so."""
    current = bookie / "journal/current"
    for name, marked, problem in (
        ("b.txn", 10, None),
        ("b.txn", 11, "the last mark points at byte 512, "),
        ("a.txn", 10, "the last mark points at byte 512, "),
        ("b.txn", 10, "has no header, but later journals follow"),
    ):
        before = (current / name).read_bytes()
        (current / name).write_bytes(content)
        mark(bookie, marked, 512)
        result = cli("journal", "verify", bookie / "journal", bookie / "ledgers", "-o", "json")
        assert result.code == (3 if problem else 0)
        assert not problem or [row["problem"] for row in result.json if problem in str(row["problem"])]
        (current / name).write_bytes(before)
        if name == "a.txn":
            (current / "c.txn").write_bytes(before)


def test_verify_reports_damage_and_the_records_behind_it(cli: Cli, bookie: Path) -> None:
    path = bookie / "journal/current/a.txn"
    data = bytearray(path.read_bytes())
    data[556:560] = (-7).to_bytes(4, "big", signed=True)
    path.write_bytes(data)
    result = cli("journal", "verify", bookie / "journal", bookie / "ledgers", "-o", "json")
    row = result.json[0]
    assert (result.code, row["state"], row["goodEnd"], row["recordCount"]) == (7, "damaged", 556, 1)
    assert (row["entriesBehind"], row["recordsBehind"], row["resumesAt"]) == (2, 4, 599)
    assert row["sizeBehind"] == len(data) - 556
    assert row["problem"] == "Record has length -7 at byte 556"
    rest = cli("journal", "read", path, "--from-pos", row["resumesAt"], "-o", "ndjson").rows
    assert [each["type"] for each in rest] == ["entry", "entry", "fence", "explicitLac"]
    (bookie / "ledgers/current/lastMark").write_bytes(b"?")
    result = cli("journal", "verify", bookie / "journal", bookie / "ledgers", "-o", "json")
    assert (result.code, result.json[0]["state"]) == (7, "unreadable")


@pytest.mark.parametrize("quiet", [(), ("-q",)])
def test_every_unreadable_journal_is_named(cli: Cli, bookie: Path, quiet: tuple[str, ...]) -> None:
    paths = [bookie / "journal/current" / name for name in ("a.txn", "b.txn")]
    for path in paths:
        path.write_bytes(b"BKLG\xff\xff\xff\xff" + bytes(504))
    result = cli(*quiet, "journal", "list", bookie / "journal")
    assert (result.code, result.err.count("\n")) == (8, 2)
    assert all(str(path) in result.err for path in paths)


def test_stats(cli: Cli, bookie: Path) -> None:
    rows = cli("journal", "stats", bookie / "journal", "-o", "ndjson").rows
    first = rows[0]
    assert (first["recordCount"], first["entryCount"], first["ledgerKeyCount"]) == (6, 3, 1)
    assert (first["fenceCount"], first["explicitLacCount"], first["ledgerCount"]) == (1, 1, 1)
    assert first["writtenSize"] == first["size"] == 512 + first["recordSize"] + first["paddingSize"]
    assert first["groupCount"] == 2
    assert first["recordsPerGroup"] == 3.0
    assert 0 < first["paddingRatio"] < 1
    types = {
        row["type"]: row for row in cli("journal", "stats", bookie / "journal", "--by", "type", "-o", "ndjson").rows
    }
    assert {name: row["recordCount"] for name, row in types.items()} == {
        "entry": 6, "ledgerKey": 2, "fence": 2, "explicitLac": 2, "padding": 2
    }  # fmt: skip
    assert sum(row["size"] for row in types.values()) == sum(row["recordSize"] + row["paddingSize"] for row in rows)
    ledgers = cli("journal", "stats", bookie / "journal", "--by", "ledger", "-o", "ndjson").rows
    assert [(row["ledgerScopeId"], row["recordCount"]) for row in ledgers] == [("7", 6), ("0", 6)]
    assert len(cli("journal", "stats", bookie / "journal", "--by", "ledger", "--top", "1", "-o", "ndjson").rows) == 1
    scopes = cli("journal", "stats", bookie / "journal", "--by", "scope", "-o", "ndjson").rows
    assert [(row["ledgerScopeId"], row["ledgerCount"]) for row in scopes] == [("7", 1), ("0", 1)]
    assert [row["size"] for row in scopes] == [row["size"] for row in ledgers]


def test_after_lastmark_knows_each_journal_directory_of_a_configuration(cli: Cli, bookie: Path) -> None:
    shutil.copytree(bookie / "journal", bookie / "second")
    conf = bookie / "bk_server.conf"
    conf.write_text(
        f"journalDirectories={bookie / 'journal'},{bookie / 'second'}\nledgerDirectories={bookie / 'ledgers'}\n"
    )
    for index, place in enumerate(((11, 512), (10, 639))):
        (bookie / f"ledgers/current/lastMark.{index}").write_bytes(LogMark(*place).serialize())
    (bookie / "ledgers/current/lastMark").unlink()
    rows = cli("journal", "read", "--conf", conf, "--after-lastmark", "-o", "ndjson").rows
    found = [(Path(row["file"]).parent.parent.name, row["journalId"], row["offset"]) for row in rows]
    assert found[0] == ("journal", 11, 512)
    assert next(place for place in found if place[0] == "second") == ("second", 10, 639)
    assert cli("journal", "verify", "--conf", conf).code == 0
    marks = cli("journal", "lastmark", "--conf", conf, "-o", "ndjson").rows
    assert [(row["journalIndex"], row["journalId"], row["offset"]) for row in marks] == [(0, 11, 512), (1, 10, 639)]


def test_verify_looks_at_the_directories_given_and_no_others(
    cli: Cli, bookie: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cookie = Cookie("bookie", (str(bookie / "journal"),), (str(bookie / "ledgers"),)).serialize()
    for name in ("journal", "ledgers"):
        (bookie / name / "current/VERSION").write_bytes(cookie)
    for name in ("journal", "ledgers"):
        shutil.copytree(bookie / name, bookie / "copy" / name)
    for directory in (bookie, bookie / "copy"):
        monkeypatch.chdir(directory)
        rows = cli("journal", "verify", "--dir", "journal", "--dir", "ledgers", "-o", "ndjson").rows
        assert [(row["file"], row["lastMark"]) for row in rows] == [
            ("journal/current/a.txn", None),
            ("journal/current/b.txn", 512),
        ]


@pytest.mark.parametrize(
    "words", [("journal", "verify"), ("entrylog", "verify"), ("bookie", "check"), ("bookie", "index", "check")]
)
def test_a_check_of_nothing_does_not_pass(cli: Cli, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "empty").mkdir()
    result = cli(*words, "--dir", tmp_path / "empty")
    assert (result.code, result.out) == (4, "")
    assert "No files of a bookie in" in result.err


@pytest.mark.parametrize("ledger", [files.PLAIN, files.SCOPED], ids=["scope 0", "other scope"])
@pytest.mark.parametrize("options", [(), ("--digest-type", "CRC32C")], ids=["by trying", "given"])
def test_verify_finds_overwritten_payload(cli: Cli, tmp_path: Path, ledger: LedgerId, options: tuple[str, ...]) -> None:
    by = DigestManager(ledger, DigestType.CRC32C, b"secret")
    payloads = [b"a" * 700, b"b" * 700, bytes(700)]
    records = [record_of(by.seal(number, -1, 1, each) + each) for number, each in enumerate(payloads)]
    data = journal.write_header(7) + b"".join(records)
    data += journal.write_padding(len(data))
    path = tmp_path / "1a.txn"
    path.write_bytes(data + bytes(2048))
    sound = cli("journal", "verify", path, *options, "-o", "ndjson")
    assert (sound.code, sound.rows[0]["problem"]) == (0, None)
    at = data.index(b"b" * 700)
    path.write_bytes(data[:at] + b"x" * 599 + data[at + 599 :] + bytes(2048))
    found = cli("journal", "verify", path, *options, "-o", "ndjson")
    assert found.code == 3
    (row,) = found.rows
    assert f"entry 1 of ledger {ledger}" in row["problem"]
    assert "does not match its CRC32C digest" in row["problem"]
    assert ("2 entries match their digests; mismatched: 1, without a digest: 0" in found.err) == bool(options)
    # Entries that a crash cut were never acknowledged, so they do not count as findings.
    cut = at + 599 - (at + 599) % 512
    path.write_bytes(data[:cut] + bytes(4096))
    assert cli("journal", "verify", path, *options).code == 0


def test_verify_says_which_entries_it_could_not_check(cli: Cli, tmp_path: Path) -> None:
    by = DigestManager(files.PLAIN, DigestType.HMAC, b"secret")
    path = tmp_path / "1a.txn"
    path.write_bytes(journal.write_header(6) + record_of(by.seal(0, -1, 3, b"one") + b"one"))
    unknown = cli("journal", "verify", path, "--digest-type", "HMAC")
    assert unknown.code == 0
    assert "1 entry could not be checked" in unknown.err


@pytest.mark.parametrize("version", [4, 5, 6, 7])
@pytest.mark.parametrize("kind", ["empty", "zeros", "header", "header and zeros", "cut header"])
def test_verify_and_read_take_a_journal_without_records(cli: Cli, tmp_path: Path, version: int, kind: str) -> None:
    header = journal.write_header(version)
    data = {
        "empty": b"", "zeros": bytes(1 << 20), "header": header, "header and zeros": header + bytes(1 << 20),
        "cut header": header[:7],
    }[kind]  # fmt: skip
    path = tmp_path / "1a.txn"
    path.write_bytes(data)
    assert cli("journal", "read", path, "-o", "ndjson").rows == []
    verified = cli("journal", "verify", path, "-o", "ndjson")
    assert verified.code == 0
    assert verified.rows[0]["state"] in ("endOfFile", "zeros", "torn")
