from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest

from bkctl.formats.index import index_path
from bkctl.ids import LedgerId

from . import files
from .conftest import Cli

IDS = ["ledgerScopeId", "ledgerId", "ledgerQualifiedName"]
ENTRY = [*IDS, "entryId", "lastAddConfirmed", "length", "size", "formatVersion"]
PLAIN = {"ledgerScopeId": "0", "ledgerId": "5", "ledgerQualifiedName": "00000000000000000000000000000005"}
SCOPED = {"ledgerScopeId": "7", "ledgerId": "5", "ledgerQualifiedName": "00000000000000070000000000000005"}


@pytest.fixture
def bookie(tmp_path: Path) -> Path:
    files.make(tmp_path)
    return tmp_path


def test_journal_list(cli: Cli, bookie: Path) -> None:
    rows = cli("journal", "list", bookie / "journal", "-o", "ndjson").rows
    assert list(rows[0]) == ["journalId", "journalIdHex", "version", "size", "mtime", "scoped", "file"]
    assert [(row["journalId"], row["journalIdHex"], row["version"]) for row in rows] == [(10, "a", 6), (11, "b", 7)]
    assert cli("journal", "list", bookie / "journal", "-o", "id").out == "10\n11\n"


def test_journal_list_prints_all_rows_then_the_errors(cli: Cli, bookie: Path) -> None:
    (bookie / "journal/current/9.txn").write_bytes(b"BKLG\x00\x00\x00\x63" + bytes(504))
    result = cli("journal", "list", bookie / "journal", "-o", "json")
    assert [row["version"] for row in result.json] == [None, 6, 7]
    assert result.code == 8


def test_journal_read_rows(cli: Cli, bookie: Path) -> None:
    rows = cli("journal", "read", bookie / "journal", "-o", "ndjson").rows
    names = [*ENTRY, "journalId", "journalIdHex", "offset", "recordSize", "type", "file"]
    assert all(list(row) == names for row in rows)
    plain = [row for row in rows if row["journalId"] == 10]
    assert [row["type"] for row in plain] == ["ledgerKey", "entry", "entry", "entry", "fence", "explicitLac"]
    assert plain[1] == PLAIN | {
        "entryId": 0, "lastAddConfirmed": -1, "length": 3, "size": None, "formatVersion": 1, "journalId": 10,
        "journalIdHex": "a", "offset": 556, "recordSize": 39, "type": "entry",
        "file": str(bookie / "journal/current/a.txn"),
    }  # fmt: skip
    assert plain[0]["length"] is None
    assert plain[-1]["lastAddConfirmed"] == 1
    scoped = [row for row in rows if row["journalId"] == 11]
    assert [row["size"] for row in scoped if row["type"] == "entry"] == [3, 0, 10]
    assert scoped[1]["recordSize"] == plain[1]["recordSize"] + 9
    assert {row["ledgerQualifiedName"] for row in scoped} == {SCOPED["ledgerQualifiedName"]}


def test_journal_read_filters(cli: Cli, bookie: Path) -> None:
    def count(*arguments: object) -> int:
        return len(cli("journal", "read", bookie / "journal", "-o", "id", *arguments).out.splitlines())

    assert count() == 12
    assert count("--ledger", "7:5") == 6
    assert count("--ledger", "5") == 6
    assert count("--ledger", "5", "--ledger-scope-id", "7") == 6
    assert count("--ledger-scope-id", "7") == 6
    assert count("--all-scopes") == 12
    assert count("--entry", "2") == 2
    assert count("--type", "fence", "--type", "ledgerKey") == 4
    assert count("--type", "padding") == 2
    assert count("--limit", "7") == 7
    assert count("--from-pos", "556", "--ledger", "5") == 5
    assert count("--to-pos", "556", "--ledger", "5") == 2


def test_journal_read_takes_ids_names_and_paths(cli: Cli, bookie: Path) -> None:
    path = bookie / "journal/current/a.txn"
    for name in ("10", "0xa", "a.txn", path):
        rows = cli("journal", "read", name, "--dir", bookie / "journal", "-o", "ndjson").rows
        assert {row["file"] for row in rows} == {str(path)}
    assert cli("journal", "read", path, "-o", "ndjson").rows
    assert cli("journal", "read", "12", "--dir", bookie / "journal").code == 4


def test_conf_gives_the_directories(cli: Cli, bookie: Path) -> None:
    conf = bookie / "bk_server.conf"
    conf.write_text(f"journalDirectory={bookie / 'journal'}\nledgerDirectories={bookie / 'ledgers'}\n")
    assert cli("journal", "list", "--conf", conf, "-o", "id").out == "10\n11\n"
    assert cli("entrylog", "list", "--conf", conf, "-o", "id").out == "31\nscoped/31\n"
    assert cli("-c", conf, "bookie", "index", "show", "7:5", "-o", "id").out == "0\n2\n3\n"
    rows = cli("journal", "read", "--conf", conf, "--after-lastmark", "-o", "ndjson").rows
    assert {row["journalId"] for row in rows} == {11}
    assert len(rows) == 6


def test_journal_read_body_and_secrets(cli: Cli, bookie: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("journal", "read", "11", "--dir", bookie / "journal", "-o", "ndjson", "--body")
    result = cli(*arguments)
    payloads = [row["payload"] for row in result.rows if row["type"] == "entry"]
    assert [base64.b64decode(payload) for payload in payloads] == list(files.PAYLOADS)
    assert base64.b64encode(files.KEY).decode() not in result.out
    assert "masterKey" not in result.out
    keys = [row["masterKey"] for row in cli(*arguments, "--show-secrets").rows if "masterKey" in row]
    assert keys == [base64.b64encode(files.KEY).decode()]
    assert files.KEY.hex() in cli("journal", "read", "11", "--dir", bookie / "journal", "--show-secrets").out
    assert cli(*arguments, "--format", "hex").rows[1]["payload"] == b"one".hex()
    assert cli(*arguments, "--format", "utf8").rows[1]["payload"] == "one"
    monkeypatch.setenv("BKCTL_OUTPUT", "json")
    raw = cli("journal", "read", "11", "--dir", bookie / "journal", "--format", "raw")
    assert raw.out == b"".join(files.PAYLOADS).decode()


def test_payloads_of_scope_0_need_the_digest_type(cli: Cli, bookie: Path) -> None:
    arguments = ("journal", "read", "10", "--dir", bookie / "journal", "-o", "ndjson", "--body")
    result = cli(*arguments)
    assert {row["payload"] for row in result.rows} == {None}
    assert "--digest-type" in result.err
    result = cli(*arguments, "--digest-type", "CRC32C")
    assert [row["size"] for row in result.rows if row["type"] == "entry"] == [3, 0, 10]
    assert base64.b64decode(result.rows[1]["payload"]) == b"one"
    assert result.err == ""


def test_payloads_cannot_steer_the_terminal(cli: Cli, bookie: Path) -> None:
    assert "\x1b" not in cli("journal", "read", "11", "--dir", bookie / "journal", "--body").out


def test_records_before_damage_are_printed(cli: Cli, bookie: Path) -> None:
    path = bookie / "journal/current/a.txn"
    data = bytearray(path.read_bytes())
    data[556:560] = (-7).to_bytes(4, "big", signed=True)
    path.write_bytes(data)
    result = cli("journal", "read", bookie / "journal", "-o", "json")
    assert result.code == 7
    assert [row["type"] for row in result.json][:2] == ["ledgerKey", "ledgerKey"]
    assert len(result.json) == 7
    assert json.loads(result.err)["error"]["code"] == "corruptRecord"
    assert "a.txn" in result.err
    assert "byte 556" in result.err
    path.write_bytes(bytes(data[:530]))
    assert cli("journal", "read", path).code == 0


def test_unknown_file_does_not_hide_the_others(cli: Cli, bookie: Path) -> None:
    (bookie / "ledgers/current/1e.log").write_bytes(b"nonsense" * 200)
    (bookie / "ledgers/current/20.log").write_bytes(b"")
    for command in ("read", "show", "list"):
        result = cli("entrylog", command, "--dir", bookie / "ledgers", "-o", "json")
        assert result.code == 7
        assert {row["file"] for row in result.json} >= {str(bookie / "ledgers/current/1f.log")}
        assert "1e.log" in result.err
        assert result.err.count("\n") == 1


def test_lastmark(cli: Cli, bookie: Path) -> None:
    [row] = cli("journal", "lastmark", bookie / "ledgers", "-o", "json").json
    assert row.pop("mtime")
    assert row == {
        "journalIndex": 0, "journalId": 11, "journalIdHex": "b", "offset": 512,
        "file": str(bookie / "ledgers/current/lastMark"),
    }  # fmt: skip


def test_bookie_files(cli: Cli, bookie: Path) -> None:
    rows = cli("bookie", "files", bookie / "journal", bookie / "ledgers", "-o", "ndjson").rows
    assert list(rows[0]) == ["kind", "id", "idHex", *IDS, "scoped", "size", "mtime", "file", "detail"]
    assert [row["detail"] for row in rows if row["kind"] == "journal"] == [{"version": 6}, {"version": 7}]
    kinds = [row["kind"] for row in rows]
    assert sorted(kinds) == ["entryLog", "entryLog", "index", "index", "journal", "journal", "lastMark"]
    indexes = cli("bookie", "files", bookie / "ledgers", "--kind", "INDEX", "-o", "ndjson").rows
    assert [row["ledgerScopeId"] for row in indexes] == ["7", "0"] or [row["ledgerScopeId"] for row in indexes] == [
        "0",
        "7",
    ]
    assert {row["file"].rpartition("/current/")[2] for row in indexes} == {
        "0/5/5.idx",
        "00000000/00000007/00000000/00000005.idx",
    }
    assert SCOPED["ledgerQualifiedName"] in cli("bookie", "files", bookie / "ledgers").out


def test_bookie_index_show(cli: Cli, bookie: Path) -> None:
    directory = ("--dir", bookie / "ledgers")
    rows = cli("bookie", "index", "show", "5", *directory, "-o", "ndjson").rows
    assert rows[0] == PLAIN | {"entryId": 0, "logId": 31, "logIdHex": "1f", "offset": 1024, "location": 31 << 32 | 1028}
    assert [row["entryId"] for row in rows] == [0, 2, 3]
    assert cli("bookie", "index", "show", "5", *directory, "-o", "id", "--entry", "2").out == "2\n"
    [gap] = cli("bookie", "index", "show", "7:5", *directory, "--gaps", "-o", "json").json
    assert gap == SCOPED | {"firstEntryId": 1, "lastEntryId": 1, "entryCount": 1}
    arguments = ("bookie", "index", "show", "7:5", *directory, "--meta", "-o", "json")
    [meta] = cli(*arguments).json
    assert meta == SCOPED | {
        "fenced": True, "explicitLac": 1, "entryCount": 3, "lastEntryId": 3,
        "file": str(bookie / "ledgers/current/00000000/00000007/00000000/00000005.idx"),
    }  # fmt: skip
    assert base64.b64decode(cli(*arguments, "--show-secrets").json[0]["masterKey"]) == files.KEY
    assert files.KEY.hex() in cli(*arguments[:-2], "--show-secrets").out
    assert cli("bookie", "index", "show", "5", *directory, "--meta", "--gaps").code == 2


def test_a_file_that_is_not_an_index_is_reported_and_hides_no_other(cli: Cli, bookie: Path) -> None:
    place = ("--dir", bookie / "ledgers", "-o", "ndjson")
    whole = {
        command: cli("bookie", *command, *place).rows
        for command in (("check",), ("index", "check"), ("index", "show", "--meta"))
    }
    pipe = bookie / "ledgers/current" / index_path(LedgerId(0, 0x2B2B))
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    (bookie / "ledgers/current" / index_path(LedgerId(0, 0x2B2C))).mkdir(parents=True)
    for command, rows in whole.items():
        result = cli("bookie", *command, *place)
        assert (result.code, result.rows) == (7, rows)
        assert f"{pipe} is not a regular file" in result.err
        assert "2b2c.idx is a directory" in result.err
    named = cli("bookie", "index", "show", str(0x2B2B), *place)
    assert (named.code, str(pipe) in named.err) == (7, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("journal", "list", "journal"),
        ("journal", "read", "journal"),
        ("journal", "lastmark", "ledgers"),
        ("entrylog", "list", "ledgers"),
        ("entrylog", "show", "--dir", "ledgers"),
        ("entrylog", "read", "--dir", "ledgers", "--body"),
        ("bookie", "files", "journal", "ledgers"),
        ("bookie", "index", "show", "5", "--dir", "ledgers"),
        ("bookie", "index", "show", "5", "--dir", "ledgers", "--meta"),
        ("bookie", "index", "show", "5", "--dir", "ledgers", "--gaps"),
    ],
)
def test_every_form_of_output_has_the_same_rows(
    cli: Cli, bookie: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    import csv
    import io

    monkeypatch.chdir(bookie)
    rows = cli(*arguments, "-o", "ndjson").rows
    assert cli(*arguments, "-o", "json").json == rows
    table = list(csv.DictReader(io.StringIO(cli(*arguments, "-o", "csv").out)))
    assert [list(row) for row in table] == [list(row) for row in rows]
    assert len(cli(*arguments, "-o", "id").out.splitlines()) == len(rows)
    assert len(cli(*arguments).out.splitlines()) == len(rows) + 1


@pytest.mark.parametrize("form", ["ndjson", "table"])
@pytest.mark.parametrize(("kind", "file", "header"), [("journal", "11", 512), ("entrylog", "31", 1024)])
def test_no_record_begins_in_the_header(cli: Cli, bookie: Path, kind: str, file: str, header: int, form: str) -> None:
    place = (kind, "read", file, "--dir", bookie / ("journal" if kind == "journal" else "ledgers"), "-o", form)
    for position in (1, 5, header - 1):
        for options in ((), ("--body",)):
            result = cli(*place, "--from-pos", position, *options)
            assert result.code == 7
            assert f"No record begins in the header at byte {position}" in result.err
    for position in (0, header):
        assert cli(*place, "--from-pos", position).out == cli(*place).out != ""


@pytest.mark.parametrize(
    "words",
    [
        "journal list", "journal read", "journal verify", "journal stats", "journal lastmark", "entrylog list",
        "entrylog read", "entrylog verify", "bookie files", "bookie check", "bookie index check",
    ],
)  # fmt: skip
def test_directories_without_files_of_a_bookie_are_not_found(cli: Cli, tmp_path: Path, words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    conf = tmp_path / "bk_server.conf"
    conf.write_text(f"journalDirectory={tmp_path}/empty\nledgerDirectories={tmp_path}/other\n")
    for place in ([tmp_path / "empty"], [tmp_path / "other"], ["--conf", conf]):
        for output in ("table", "json"):
            answer = cli(*words.split(), *place, "-o", output)
            assert (answer.code, answer.out) == (4, ""), answer
            assert "No files of a bookie in" in answer.err


@pytest.mark.parametrize(
    "words",
    [
        "journal verify", "entrylog verify", "bookie check", "bookie index check", "bookie index regenerate --all",
        "bookie index rebuild --ledgers", "bookie convert --to db",
    ],
)  # fmt: skip
@pytest.mark.parametrize("empty", ["j2", "l2", "i2"])
def test_an_empty_directory_beside_a_cookie_is_not_mounted(cli: Cli, bookie: Path, words: str, empty: str) -> None:
    conf, b = bookie / "bk_server.conf", bookie
    conf.write_text(
        f"journalDirectories={b}/journal,{b}/j2\nledgerDirectories={b}/ledgers,{b}/l2\nindexDirectories={b}/ledgers,{b}/i2\n"
    )
    for name in ("journal", "ledgers", "j2", "l2", "i2"):
        (bookie / name / "current").mkdir(parents=True, exist_ok=True)
        (bookie / name / "current" / "VERSION").write_text("4\n")
    (bookie / empty / "current" / "VERSION").unlink()
    answer = cli(*words.split(), "-c", conf, *(["--dry-run"] if words.startswith("bookie index r") else []))
    assert (answer.code, answer.out) == (4, ""), answer
    assert f"No files of a bookie in {bookie / empty}; are all of its disks mounted?" in answer.err


def test_a_position_behind_every_file_is_refused(cli: Cli, bookie: Path) -> None:
    for words in (("journal", "read"), ("entrylog", "read")):
        places = [row["file"] for row in cli(words[0], "list", bookie, "-o", "ndjson").rows]
        sizes = [Path(place).stat().st_size for place in places]
        for options in ((), ("--format", "raw")):
            result = cli(*words, *places, "--from-pos", max(sizes) + 1, *options)
            longest = places[sizes.index(max(sizes))]
            assert (result.code, result.err) == (
                4, f"bkctl: {longest} ends at byte {max(sizes)}, before --from-pos {max(sizes) + 1}\n",
            )  # fmt: skip
            assert cli(*words, longest, "--from-pos", max(sizes), *options).code == 0


@pytest.mark.parametrize(
    "command",
    ["journal list", "journal verify", "journal read", "journal stats", "entrylog list", "entrylog verify",
     "entrylog show", "entrylog read", "bookie files", "bookie check"],
)  # fmt: skip
def test_a_link_to_a_missing_file_is_reported(cli: Cli, bookie: Path, command: str) -> None:
    """A moved file whose new disk is not mounted is lost to the reader, not deleted by the bookie."""
    for path in (bookie / "journal/current/a.txn", bookie / "ledgers/current/1f.log"):
        path.rename(bookie / path.name)
        path.symlink_to(bookie / "unmounted" / path.name)
    result = cli(*command.split(), "--dir", bookie / "journal", "--dir", bookie / "ledgers")
    assert result.code == (3 if command == "bookie check" else 1)
    assert "is a link to a missing file" in result.err + result.out
