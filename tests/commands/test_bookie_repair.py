"""Commands that change a bookie's files: what they print and ask, what they leave when they cannot."""

from __future__ import annotations

import base64
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import golden
from support.command_line import CommandLine, environment

from bkctl.bookie.local import LocalCluster
from bkctl.formats.journal import LogMark, write_header
from bkctl.formats.metadata import BookieServiceInfo
from bkctl.metadata.cluster import open_cluster

from . import files
from .conftest import Cli


@pytest.fixture
def bookie(tmp_path: Path) -> Path:
    files.make(tmp_path)
    return tmp_path


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """The ledger directory of a copy of a golden bookie with DbLedgerStorage; its journal is beside."""
    found = next(one for one in golden.bookies() if one.name == "db")
    shutil.copytree(found.journal_dir, tmp_path / "journal")
    shutil.copytree(found.ledger_dir, tmp_path / "ledgers")
    return tmp_path / "ledgers"


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# --- rebuild and regenerate -------------------------------------------------------------------------------------------


def test_rebuild_reports_its_counts(cli: Cli, db: Path) -> None:
    result = cli(
        "bookie",
        "index",
        "rebuild",
        "--locations",
        "--ledgers",
        "--dir",
        db,
        "--dir",
        db.parent / "journal",
        "-o",
        "json",
    )
    assert (result.code, result.err) == (0, "")
    assert list(result.json[0]) == [
        "file", "logs", "ledgers", "ledgersBefore", "entries", "entriesBefore", "ledgersLeftOut", "entriesSaved",
        "fencesGuessed", "withoutMasterKey", "backup", "applied",
    ]  # fmt: skip
    ledgers, locations = result.json
    assert ledgers["file"] == str(db / "current" / "ledgers")
    assert ledgers["ledgers"] == ledgers["ledgersBefore"] > 20
    assert locations["entries"] == locations["entriesBefore"] > 1000
    for row in result.json:
        assert Path(row["backup"]).parent == db / "current"
        assert (Path(row["backup"]) / "CURRENT").exists()
    table = cli("bookie", "index", "rebuild", "--locations", "--dir", db, "--dry-run").out
    assert table.splitlines()[0].split() == [
        "DATABASE",
        "LOGS",
        "LEDGERS",
        "BEFORE",
        "ENTRIES",
        "BEFORE",
        "LEFT",
        "OUT",
        "BACKUP",
    ]
    assert cli("bookie", "index", "rebuild", "--locations", "--dir", db, "-o", "id").out == f"{db}/current/locations\n"


def test_rebuild_reports_damage_and_ends_with_findings(cli: Cli, db: Path) -> None:
    log = db / "current" / "0.log"
    data = bytearray(log.read_bytes())
    data[1024:1028] = b"\x7f\xff\xff\xff"
    log.write_bytes(data)
    result = cli("bookie", "index", "rebuild", "--locations", "--dir", db, "-o", "ndjson")
    assert result.code == 3
    assert result.rows[0]["entriesSaved"] > 0
    assert result.rows[0]["entries"] == result.rows[0]["entriesBefore"]
    assert f"{log}: Record has length 2147483647" in result.err
    assert result.err.splitlines()[-1].startswith("bkctl: 1 damaged file; ")


def test_rebuild_without_a_choice_and_on_another_storage_class(cli: Cli, bookie: Path) -> None:
    result = cli("bookie", "index", "rebuild", "--dir", bookie / "ledgers")
    assert (result.code, result.err) == (
        2,
        "bkctl: Neither --ledgers nor --locations is given; give one of them, or both\n",
    )
    result = cli("bookie", "index", "rebuild", "--locations", "--dir", bookie / "ledgers")
    assert result.code == 2
    assert "regenerate" in result.err


def test_lost_databases_are_rebuilt_and_no_index_files_written(cli: Cli, db: Path, tmp_path: Path) -> None:
    for database in db.glob("current/*l*[os]/"):  # ledgers and locations, also scoped
        shutil.rmtree(database)
    conf = tmp_path / "bk_server.conf"
    storage = "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage"
    conf.write_text(
        f"journalDirectory={tmp_path / 'journal'}\nledgerDirectories={db}\nledgerStorageClass={storage}\nbookieId=b\n"
    )
    for command in (("check",), ("index", "check")):
        found = cli("bookie", *command, "--conf", conf, "-o", "ndjson")
        assert found.code == 3, found.err
        commands = {row["nextCommand"] for row in found.rows if row["kind"] in ("unindexed", "notIndexed")}
        assert commands == {f"bkctl bookie index rebuild --ledgers --locations --conf {conf}"}
    refused = cli("bookie", "index", "regenerate", "--all", "--conf", conf)
    assert refused.code == 2
    assert "names DbLedgerStorage, which has no index files; 'bkctl bookie index rebuild" in refused.err
    assert cli("bookie", "index", "rebuild", "--ledgers", "--locations", "--conf", conf).code == 0
    assert cli("bookie", "check", "--conf", conf).code == 0


def test_regenerate_named_ledgers_and_all(cli: Cli, bookie: Path) -> None:
    place = ("--dir", bookie / "ledgers", "--dir", bookie / "journal", "-o", "json")
    result = cli("bookie", "index", "regenerate", "7:5", *place)
    assert result.code == 0, result.err
    (row,) = result.json
    assert (row["ledgerScopeId"], row["ledgerId"], row["entries"], row["lastEntryId"]) == ("7", "5", 3, 2)
    assert (row["fenced"], row["fenceGuessed"]) == (True, False)
    assert Path(row["backup"]).is_file()
    assert row["file"].endswith("00000000/00000007/00000000/00000005.idx")
    result = cli("bookie", "index", "regenerate", "--all", *place)
    assert [row["ledgerScopeId"] for row in result.json] == ["0", "7"]
    result = cli("bookie", "index", "regenerate", "--all", "--ledger-scope-id", "7", *place)
    assert [row["ledgerScopeId"] for row in result.json] == ["7"]


def test_regenerate_with_a_password_file(cli: Cli, bookie: Path) -> None:
    (bookie / "password").write_text("other\n")
    shutil.rmtree(bookie / "journal")
    shutil.rmtree(bookie / "ledgers" / "current" / "0")
    place = ("--dir", bookie / "ledgers", "-o", "json")
    result = cli("bookie", "index", "regenerate", "5", *place)
    assert result.code == 2
    assert "--password-file" in result.err
    result = cli("bookie", "index", "regenerate", "5", "--password-file", bookie / "password", *place)
    assert (result.code, result.json[0]["fenceGuessed"]) == (0, True)
    assert "1 ledger was fenced, since the state is unknown" in result.err
    meta = cli("bookie", "index", "show", "5", "--meta", "--show-secrets", *place)
    from bkctl.formats.entry import master_key

    assert base64.b64decode(meta.json[0]["masterKey"]) == master_key(b"other")


def test_regenerate_requires_ledgers_or_all(cli: Cli, bookie: Path) -> None:
    for arguments in ((), ("--all", "5")):
        result = cli("bookie", "index", "regenerate", *arguments, "--dir", bookie / "ledgers")
        assert result.code == 2
        assert "add --all" in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("index", "rebuild", "--locations", "--ledgers"),
        ("convert", "--to", "interleaved"),
    ],
)
def test_a_directory_in_use_is_left_alone(cli: Cli, db: Path, arguments: tuple[str, ...]) -> None:
    before = snapshot(db)
    script = "import sys; file = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, db / "current" / "0.log"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        result = cli("bookie", *arguments, "--dir", db)
        dry = cli("bookie", *arguments, "--dir", db, "--dry-run")
        process.stdin.close()
    assert (result.code, result.out) == (5, "")
    assert f"is in use by process {process.pid} (" in result.err
    assert dry.code == 0
    assert snapshot(db) == before


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        (("index", "rebuild", "--locations", "--ledgers"), 10_000),
        (("convert", "--to", "interleaved"), 5_000),
    ],
)
def test_a_file_that_cannot_grow_is_one_error_and_loses_nothing(
    db: Path, arguments: tuple[str, ...], limit: int
) -> None:
    before = snapshot(db / "current")
    done = subprocess.run(
        [sys.executable, "-m", "bkctl", "bookie", *arguments, "--dir", db], env=environment(), capture_output=True,
        text=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)), check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert len(done.stderr.splitlines()) == 1
    after = snapshot(db / "current")
    assert {name: after[name] for name in before} == before
    command = [sys.executable, "-m", "bkctl", "bookie", *arguments, "--dir", db]
    subprocess.run(command, env=environment(), check=True, capture_output=True)


def test_regenerate_on_a_full_disk(bookie: Path) -> None:
    before = snapshot(bookie / "ledgers")
    command = [sys.executable, "-m", "bkctl", "bookie", "index", "regenerate", "--all", "--dir", bookie / "ledgers"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)), check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1), done.stderr
    assert snapshot(bookie / "ledgers") == before


# --- convert ----------------------------------------------------------------------------------------------------------


def test_convert_there_and_back(cli: Cli, bookie: Path) -> None:
    place = ("--dir", bookie / "ledgers", "--dir", bookie / "journal")
    show = ("bookie", "index", "show", "5", "7:5", "--dir", bookie / "ledgers", "-o", "ndjson")
    before = cli(*show).rows
    dry = cli("bookie", "convert", "--to", "db", "--dry-run", *place, "-o", "json")
    expected = {"directory": str(bookie / "ledgers/current"), "ledgers": 2, "entries": 6, "backups": []}
    assert dry.json == [expected | {"applied": False}]
    result = cli("bookie", "convert", "--to", "db", *place, "-o", "json")
    assert (result.code, result.json[0]["ledgers"], result.json[0]["entries"]) == (0, 2, 6)
    assert [row["result"] for row in cli("audit", "list", "-o", "ndjson").rows] == ["done"]
    assert [Path(each).is_dir() for each in result.json[0]["backups"]] == [True]
    assert "Set ledgerStorageClass=org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage" in result.err
    assert cli(*show).rows == before
    again = cli("bookie", "convert", "--to", "db", *place)
    assert again.code == 2
    assert "converted already" in again.err
    refused = cli("bookie", "convert", "--to", "interleaved", "--discard-old", *place)
    assert refused.code == 2
    assert "--yes" in refused.err
    result = cli("bookie", "convert", "--to", "interleaved", "--discard-old", "--yes", *place)
    assert result.code == 0, result.err
    assert result.out.splitlines()[1].split()[-1] == "-"
    assert cli(*show).rows == before
    assert not (bookie / "ledgers/current/ledgers").exists()


def test_databases_of_a_conversion_are_closed_to_other_users(cli: Cli, bookie: Path) -> None:
    before = os.umask(0)
    try:
        result = cli("bookie", "convert", "--to", "db", "--dir", bookie / "ledgers", "--dir", bookie / "journal")
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert result.code == 0, result.err
    current = bookie / "ledgers" / "current"
    files = [path for name in ("ledgers", "locations") for path in (current / name, *(current / name).rglob("*"))]
    assert len(files) > 8
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o750", "0o640"}


# --- format and init --------------------------------------------------------------------------------------------------


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """The configuration of a bookie that is not there yet, in a cluster of its own."""
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    open_cluster(uri, create=True).close()
    path = tmp_path / "bk_server.conf"
    path.write_text(
        f"bookieId=bookie-1\njournalDirectory={tmp_path}/journal\nledgerDirectories={tmp_path}/ledgers\n"
        f"indexDirectories={tmp_path}/index\nmetadataServiceUri={uri}\n"
    )
    return path


def test_init_makes_a_bookie_once(cli: Cli, conf: Path, tmp_path: Path) -> None:
    place = ("--conf", conf)
    check = cli("bookie", "init", "--check", *place, "-o", "json")
    assert (check.code, check.json) == (0, [])
    assert not (tmp_path / "journal").exists()
    result = cli("bookie", "init", *place, "-o", "json")
    assert (result.code, result.json["bookieId"]) == (0, "bookie-1")
    assert result.json["ledgerDirs"] == [f"{tmp_path}/ledgers"]
    cookies = {(tmp_path / name / "current" / "VERSION").read_bytes() for name in ("journal", "ledgers", "index")}
    assert len(cookies) == 1
    assert cli("cookie", "verify", *place).code == 0
    again = cli("bookie", "init", *place)
    assert again.code == 5
    assert "bookie-1 has a cookie" in again.err


def test_new_bookie_is_undone(cli: Cli, conf: Path, tmp_path: Path) -> None:
    undo, uri = tmp_path / "undo", f"sqlite://{tmp_path / 'metadata.db'}"
    assert cli("bookie", "init", "--conf", conf, "--undo", undo).code == 0
    (bookie,) = cli("cookie", "list", "-u", uri, "-o", "id").out.split()
    with open_cluster(uri) as cluster:
        cluster.bookies.register(bookie, BookieServiceInfo())
        for option in ("--dry-run", "--yes"):
            refused = cli("metadata", "undo", undo, "-u", uri, option)
            assert (refused.code, f"Bookie {bookie} is registered" in refused.err) == (5, True)
        cluster.bookies.unregister(bookie)
    journal = tmp_path / "journal/current/1.txn"
    journal.touch()
    refused = cli("metadata", "undo", undo, "-u", uri, "--yes")
    assert (refused.code, f"{journal.parent} has entry logs or journals" in refused.err) == (5, True)
    assert len([*tmp_path.glob("*/current/VERSION")]) == 3
    journal.unlink()
    undone = cli("metadata", "undo", undo, "-u", uri, "--yes", "-o", "ndjson")
    assert (undone.code, [row["outcome"] for row in undone.rows]) == (0, ["restored"] * 4)
    assert not [*tmp_path.glob("*/current/VERSION")]
    assert cli("bookie", "init", "--conf", conf, "--undo", "none").code == 0


def test_init_names_all_that_is_in_the_way(cli: Cli, conf: Path, tmp_path: Path) -> None:
    (tmp_path / "ledgers" / "current").mkdir(parents=True)
    (tmp_path / "ledgers" / "current" / "0.log").touch()
    (tmp_path / "index").touch()
    result = cli("bookie", "init", "--check", "--conf", conf, "-o", "ndjson")
    assert result.code == 3
    assert result.rows == [
        {"place": f"{tmp_path}/ledgers", "problem": "is not empty: current/0.log"},
        {"place": f"{tmp_path}/index", "problem": "is not a directory"},
    ]
    assert cli("bookie", "init", "--conf", conf).code == 5
    assert not (tmp_path / "journal").exists()


def test_init_continues_after_a_kill(cli: Cli, conf: Path, tmp_path: Path) -> None:
    cli("bookie", "init", "--conf", conf)
    assert cli("cookie", "delete", "bookie-1", "--yes", "--conf", conf).code == 0
    (tmp_path / "index" / "current" / "VERSION").unlink()
    assert cli("bookie", "init", "--conf", conf).code == 0
    assert cli("cookie", "verify", "--conf", conf).code == 0


@pytest.fixture
def full(conf: Path, tmp_path: Path, cli: Cli) -> Path:
    """The same bookie, with files."""
    cli("bookie", "init", "--conf", conf)
    files.make(tmp_path / "made")
    for name in ("journal", "ledgers"):
        shutil.copytree(tmp_path / "made" / name, tmp_path / name, dirs_exist_ok=True)
    for name in ("0", "00000000"):
        shutil.move(tmp_path / "ledgers" / "current" / name, tmp_path / "index" / "current" / name)
    return conf


def test_format_lists_the_losses_and_requires_the_id(cli: Cli, full: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path / "index")
    dry = cli("bookie", "format", "--dry-run", "--conf", full, "-o", "json")
    assert [(row["roles"], row["files"], row["ledgers"], row["scopedLedgers"]) for row in dry.json] == [
        (["journal"], 3, 0, 0),
        (["ledger"], 4, 0, 0),
        (["index"], 3, 1, 1),
    ]
    assert all(row["size"] > 0 for row in dry.json)
    refused = cli("bookie", "format", "--conf", full)
    assert (refused.code, refused.out) == (2, "")
    assert "Bookie bookie-1 would lose" in refused.err
    assert "in 2 ledgers" in refused.err
    assert "add --yes-really bookie-1 to go ahead" in refused.err
    assert cli("bookie", "format", "--yes", "--conf", full).code == 2
    assert cli("bookie", "format", "--yes-really", "bookie-2", "--conf", full).code == 5
    assert snapshot(tmp_path / "index") == before


def test_format_empties_everything(cli: Cli, full: Path, tmp_path: Path) -> None:
    (tmp_path / "journal" / "lost+found").mkdir()
    assert cli("bookie", "format", "--yes-really", "bookie-1", "--conf", full).code == 0
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["lost+found"]
    assert list((tmp_path / "ledgers").iterdir()) == list((tmp_path / "index").iterdir()) == []
    # The metadata's cookie is there still: a start would fail, as it should.
    assert cli("bookie", "init", "--conf", full).code == 5
    assert cli("bookie", "format", "--yes-really", "bookie-1", "--delete-cookie", "--conf", full).code == 0
    (tmp_path / "journal" / "lost+found").rmdir()
    assert cli("bookie", "init", "--conf", full).code == 0


@pytest.mark.parametrize("name", ["current", "current/0"])
def test_format_refuses_what_lies_behind_a_link(cli: Cli, full: Path, tmp_path: Path, name: str) -> None:
    place = tmp_path / "index" / name
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    for option in (["--dry-run"], ["--yes-really", "bookie-1"]):
        result = cli("bookie", "format", *option, "--conf", full)
        assert (result.code, result.out) == (8, "")
        assert f"{place} is a symbolic link and its data would stay" in result.err
    assert (tmp_path / "journal" / "current" / "VERSION").exists()


def test_an_interrupted_format_does_not_say_that_cookies_are_removed(
    cli: Cli, full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bkctl.bookie.format.wipe", interrupted)
    before = snapshot(tmp_path / "index")
    result = cli("bookie", "format", "--yes-really", "bookie-1", "--conf", full)
    assert (result.code, snapshot(tmp_path / "index") == before) == (130, True)
    assert "; without its cookies the bookie cannot start: run the command again to finish" in result.err


@pytest.mark.parametrize(("typed", "code"), [("bookie-1\n", 0), ("yes\n", 1), ("\n", 1)])
def test_format_on_a_terminal_wants_the_bookies_id(full: Path, tmp_path: Path, typed: str, code: int) -> None:
    found, seen = CommandLine(None).terminal(
        "bookie", "format", "--yes", "--conf", full, type_in=typed, asks="to go ahead:", columns=200
    )
    assert found == code, seen
    assert "Type bookie-1 to go ahead:" in seen
    assert "2 ledgers" in seen
    assert (tmp_path / "journal" / "current").exists() == (code != 0)


def test_format_refuses_directories_of_another_bookie(cli: Cli, full: Path, tmp_path: Path) -> None:
    full.write_text(full.read_text().replace("bookie-1", "bookie-2"))
    result = cli("bookie", "format", "--yes-really", "bookie-2", "--conf", full)
    assert result.code == cli("bookie", "format", "--dry-run", "--conf", full).code == 5
    assert "belongs to bookie bookie-1, not to bookie-2" in result.err
    assert (tmp_path / "journal" / "current" / "a.txn").exists()


def test_format_of_a_running_bookie(cli: Cli, cluster: LocalCluster) -> None:
    conf = cluster.directory / "bookie-0" / "bk_server.conf"
    if not conf.exists():
        (conf, *_) = sorted(cluster.directory.glob("bookie-*/*.conf"))
    for arguments in (("format", "--yes"), ("format", "--dry-run"), ("init",)):
        result = cli("bookie", *arguments, "--conf", conf)
        assert result.code == 5, result.err


def test_repairs_are_audited(cli: Cli, db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BKCTL_AUDIT_LOG", str(tmp_path / "audit.ndjson"))
    cli("bookie", "index", "rebuild", "--locations", "--dir", db, "--dry-run")
    assert not (tmp_path / "audit.ndjson").exists()
    cli("bookie", "index", "rebuild", "--locations", "--dir", db)
    lines = [json.loads(line) for line in (tmp_path / "audit.ndjson").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["begin", "end"]
    assert os.fspath(db) in " ".join(lines[0]["command"])


@pytest.mark.parametrize("version", [6, 7])
def test_dry_run_of_a_downgrade_fails_over_damage_as_the_run(
    cli: Cli, conf: Path, tmp_path: Path, version: int
) -> None:
    assert cli("bookie", "init", "--conf", conf, "--undo", "none").code == 0
    header = b"BKLG" + version.to_bytes(4, "big")
    record = (24).to_bytes(4, "big") + bytes(24)
    (tmp_path / "journal" / "current" / "1.txn").write_bytes(
        header.ljust(512, b"\0") + (0x7000_0000).to_bytes(4, "big") + b"x" * 700 + record * 50
    )
    results = [cli("bookie", "downgrade", "--conf", conf, *words) for words in (("--dry-run",), ())]
    assert [each.code for each in results] == [7, 7]
    assert not [each.err for each in results if "can start" in each.err]


@pytest.mark.parametrize("damage", ["mark", "emptied", "missing"])
def test_downgrade_refuses_journals_that_lost_bytes(cli: Cli, conf: Path, tmp_path: Path, damage: str) -> None:
    assert cli("bookie", "init", "--conf", conf, "--undo", "none").code == 0
    header = write_header(6)
    for name in ("1.txn", "2.txn", "3.txn"):
        (tmp_path / "journal" / "current" / name).write_bytes(header)
    mark = LogMark(1, 1 << 40 if damage == "mark" else 512)
    (tmp_path / "ledgers" / "current" / "lastMark").write_bytes(mark.serialize())
    if damage == "emptied":
        (tmp_path / "journal" / "current" / "1.txn").write_bytes(b"")
    elif damage == "missing":
        (tmp_path / "journal" / "current" / "2.txn").unlink()
    for words in (("--dry-run",), ()):
        result = cli("bookie", "downgrade", "--conf", conf, *words)
        assert (result.code, "can start" in result.err) == (7, False)
        assert ("2.txn is missing" if damage == "missing" else "1.txn: the last mark points at byte") in result.err
        assert "skipReplayJournalInvalidRecord" in result.err


@pytest.mark.parametrize("named", ["l1,l0", "l0", "a copy", "copied ledgers"])
def test_changing_commands_compare_the_directories_with_their_cookies(
    cli: Cli, conf: Path, tmp_path: Path, named: str
) -> None:
    conf.write_text(
        f"bookieId=bookie-1\njournalDirectory={tmp_path}/j\nledgerDirectories={tmp_path}/l0,{tmp_path}/l1\n"
        f"metadataServiceUri=sqlite://{tmp_path / 'metadata.db'}\n"
    )
    assert cli("bookie", "init", "--conf", conf, "--undo", "none").code == 0
    text, base = conf.read_text(), tmp_path
    if named == "a copy":
        base /= "copy"
        base.mkdir()
        for name in ("j", "l0", "l1"):
            (tmp_path / name).rename(base / name)
        conf.write_text(text.replace(f"{tmp_path}/", f"{base}/"))
    elif named == "copied ledgers":
        for name in ("l0", "l1"):
            (tmp_path / name).rename(tmp_path / f"copied-{name}")
        conf.write_text(text.replace(f"{tmp_path}/l", f"{tmp_path}/copied-l"))
    else:
        ledger_dirs = ",".join(f"{tmp_path}/{name}" for name in named.split(","))
        conf.write_text(text.replace(f"{tmp_path}/l0,{tmp_path}/l1", ledger_dirs))
    for command in ("downgrade", "index rebuild --locations", "index regenerate --all", "convert --to interleaved"):
        for words in (("--dry-run",), ()):
            result = cli("bookie", *command.split(), "--conf", conf, *words)
            is_refused = named in ("l1,l0", "l0") or command == "downgrade"
            assert (result.code == 5, "/j does not fit this bookie: the " in result.err) == (is_refused,) * 2
    (base / "j" / "current" / "VERSION").write_bytes(b"no cookie")
    assert cli("bookie", "downgrade", "--conf", conf).code == 7
