"""`bkctl cookie …` over a metadata store of the test's own; what Apache's shell says of them is in interop."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from support.servers import DB

from bkctl.bookie.cookies import configured_cookie, version_file
from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import NotFound
from bkctl.files.rocksdb import LedgersDatabase
from bkctl.formats.index import LedgerData
from bkctl.formats.metadata import BookieServiceInfo, Cookie
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.store import NEW

from .conftest import Cli


class Place(NamedTuple):
    """A bookie that is down: its settings, and its cookies in the store and in every directory."""

    uri: str
    conf: Path
    config: BookieConfig
    instance_id: str

    def local(self, name: str) -> Path:
        return version_file(str(self.conf.parent / name))

    def stored(self, bookie_id: str) -> bytes | None:
        with open_cluster(self.uri) as cluster:
            found = cluster.store.get(f"cookies/{bookie_id}")
            return None if found is None else found.value


def write_conf(path: Path, uri: str, **changes: str) -> Path:
    directory = path.parent
    settings = {
        "metadataServiceUri": uri,
        "bookieId": "b1",
        "journalDirectories": str(directory / "journal"),
        "ledgerDirectories": f"{directory / 'l1'},{directory / 'l2'}",
        "indexDirectories": str(directory / "index"),
    }
    path.write_text("".join(f"{name}={value}\n" for name, value in {**settings, **changes}.items()))
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    conf = write_conf(tmp_path / "bk_server.conf", uri)
    config = BookieConfig.load(conf)
    with open_cluster(uri, create=True) as cluster:
        cookie = configured_cookie(config, "b1", cluster.instance_id())
        cluster.cookies.write("b1", cookie, NEW)
        instance_id = cluster.instance_id()
    for name in ("journal", "l1", "l2", "index"):
        version_file(str(tmp_path / name)).parent.mkdir(parents=True)
        version_file(str(tmp_path / name)).write_bytes(cookie.serialize())
    monkeypatch.setenv("BKCTL_METADATA_URI", uri)
    return Place(uri, conf, config, instance_id)


def test_list_and_show(place: Place, cli: Cli) -> None:
    [row] = cli("cookie", "list", "-o", "json").json
    directory = place.conf.parent
    expected = {
        "bookieId": "b1",
        "journalDirs": [str(directory / "journal")],
        "ledgerDirs": [str(directory / "l1"), str(directory / "l2")],
        "indexDirs": [str(directory / "index")],
        "instanceId": place.instance_id,
        "layoutVersion": 5,
        "version": 0,
    }
    assert row == expected
    assert cli("cookie", "show", "b1", "-o", "json").json == expected
    assert cli("cookie", "show", "b1", "--format", "raw").out.encode() == place.stored("b1")
    local = cli("cookie", "show", "--dir", directory / "l1", "-o", "json").json
    assert local["directory"] == str(place.local("l1"))
    assert local["ledgerDirs"] == expected["ledgerDirs"]
    assert len(cli("cookie", "show", "--dir", directory / "l1", "--dir", directory / "index" / "current").out) > 0
    assert {row["directory"] for row in cli("cookie", "show", "--dir", directory, "-o", "json").json} == {
        str(place.local(name)) for name in ("journal", "l1", "l2", "index")
    }
    assert cli("cookie", "show", "b2").code == 4
    assert "is needed" in cli("cookie", "show").err
    both = cli("cookie", "show", "b1", "--dir", directory / "l1")
    assert (both.code, both.err) == (2, "bkctl: BOOKIE and --dir are given; give one of them\n")
    for output in ("table", "csv", "ndjson"):
        assert "b1" in cli("cookie", "list", "-o", output).out


def test_a_cookie_that_cannot_be_read_is_a_row_and_a_finding(place: Place, cli: Cli) -> None:
    with open_cluster(place.uri) as cluster:
        cluster.store.put("cookies/b0", b"nonsense", NEW)
    result = cli("cookie", "list", "-o", "ndjson")
    assert result.code == 3
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert [(row["bookieId"], "error" in row) for row in rows] == [("b0", True), ("b1", False)]
    assert cli("cookie", "show", "b0").code == 7
    assert cli("cookie", "show", "b0", "--format", "raw").out == "nonsense"


def test_generate_writes_the_cookie_of_a_configuration_or_of_options(place: Place, cli: Cli, tmp_path: Path) -> None:
    raw = place.stored("b1")
    assert raw is not None
    assert cli("cookie", "generate", "-c", place.conf).out.encode() == raw
    file = tmp_path / "cookie"
    assert cli("cookie", "generate", "-c", place.conf, "-f", file).code == 0
    assert file.read_bytes() == raw
    assert cli("cookie", "generate", "-c", place.conf, "-f", file).code == 5
    given = cli(
        "cookie", "generate", "x:1", "--journal-dirs", "/a,/b", "--ledger-dirs", "/c", "--instance-id", "i",
    ).out  # fmt: skip
    assert Cookie.parse(given.encode()) == Cookie("x:1", ("/a", "/b"), ("/c",), "i", None)
    assert cli("cookie", "generate", "x:1", "--journal-dirs", "/a").code == 2
    assert cli("cookie", "generate", "a b", "--journal-dirs", "/a", "--ledger-dirs", "/c").code == 2


def test_create_update_and_delete_leave_undo_files(place: Place, cli: Cli, tmp_path: Path) -> None:
    file, undo = tmp_path / "cookie", tmp_path / "undo"
    data = Cookie("b2", ("/j",), ("/l",), "i").serialize()
    file.write_bytes(data)
    assert cli("cookie", "create", "b3", "-f", file).code == 2
    assert cli("cookie", "update", "b2", "-f", file, "--yes").code == 4
    assert cli("cookie", "create", "b2", file, "--dry-run").code == 0
    assert cli("cookie", "create", "b2", file, "--file", file, "--dry-run").code == 2
    assert cli("cookie", "create", "b2", "--dry-run").code == 2
    assert place.stored("b2") is None
    undo.mkdir()
    assert cli("cookie", "create", "b2", "-f", file, "--undo", undo / "1").code == 0
    assert place.stored("b2") == data
    assert cli("cookie", "create", "b2", "-f", file).code == 5

    changed = Cookie("b2", ("/j",), ("/l", "/m"), "i2").serialize()
    file.write_bytes(changed)
    assert cli("cookie", "update", "b2", "-f", file).code == 2
    dry = cli("cookie", "update", "b2", file, "--dry-run", "-o", "json").json
    assert [(row["field"], row["before"], row["after"]) for row in dry] == [
        ("ledgerDirs", "/l", "/l,/m"), ("indexDirs", "/l", "/l,/m"), ("instanceId", "i", "i2"),
    ]  # fmt: skip
    assert place.stored("b2") == data
    assert cli("cookie", "update", "b2", "-f", file, "--yes", "--undo", undo / "2").code == 0
    assert place.stored("b2") == changed

    assert cli("cookie", "delete", "b2").code == 2
    assert cli("cookie", "delete", "b2", "--dry-run", "-o", "id").out == "b2\n"
    assert cli("cookie", "delete", "b2", "b9", "--yes").code == 4
    assert cli("cookie", "delete", "b2", "--yes", "--undo", undo / "3").code == 0
    assert place.stored("b2") is None
    for step, value in (("3", changed), ("2", data), ("1", None)):
        assert cli("metadata", "undo", undo / step, "--yes").code == 0
        assert place.stored("b2") == value


def test_no_undo_file_on_request(place: Place, cli: Cli, tmp_path: Path) -> None:
    result = cli("cookie", "delete", "b1", "--yes", "--undo", "none", "-o", "id")
    assert (result.code, result.out, result.err) == (0, "b1\n", "")
    assert not (tmp_path / "state" / "bkctl" / "undo").exists()
    assert not Path("none").exists()


def test_delete_takes_local_cookies_along_and_undo_brings_them_back(place: Place, cli: Cli, tmp_path: Path) -> None:
    before = place.local("l1").read_bytes()
    undo = tmp_path / "undo"
    result = cli("cookie", "delete", "b1", "--dir", tmp_path / "l1", "--yes", "--undo", undo)
    assert result.code == 0, result.err
    assert not place.local("l1").exists()
    assert place.local("l2").exists()
    assert cli("metadata", "undo", undo, "--yes").code == 0
    assert (place.local("l1").read_bytes(), place.stored("b1")) == (before, before)


def test_cookies_of_a_running_bookie_cannot_be_changed(place: Place, cli: Cli, tmp_path: Path) -> None:
    with open_cluster(place.uri) as cluster:
        cluster.bookies.register("b1", BookieServiceInfo(()))
        for words in (
            ("delete", "b1"), ("rename", "b1", "b2"), ("rename", "b0", "b1"), ("expand", "-c", place.conf),
        ):  # fmt: skip
            result = cli("cookie", *words, "--yes")
            assert result.code == 5, words
            assert "running" in result.err


def test_expand_takes_new_empty_directories_in(place: Place, cli: Cli, tmp_path: Path) -> None:
    nothing = cli("cookie", "expand", "-c", place.conf, "--yes")
    assert (nothing.code, nothing.err) == (0, "No directory is new\n")
    before = place.stored("b1")
    dirs = ",".join(str(tmp_path / name) for name in ("l1", "l2", "l3"))
    conf = write_conf(tmp_path / "new.conf", place.uri, ledgerDirectories=dirs)
    assert cli("cookie", "verify", "-c", conf).code == 3
    assert cli("cookie", "expand", "-c", conf, "--dry-run", "-o", "id").out == f"{tmp_path / 'l3'}\n"
    assert not (tmp_path / "l3").exists()
    result = cli("cookie", "expand", "-c", conf, "--yes", "--undo", tmp_path / "undo")
    assert result.code == 0, result.err
    assert cli("cookie", "verify", "-c", conf).code == 0
    assert cli("cookie", "verify", "-c", place.conf).code == 3
    assert cli("metadata", "undo", tmp_path / "undo", "--yes").code == 0
    assert place.stored("b1") == before
    assert cli("cookie", "verify", "-c", place.conf).code == 0


def test_expand_refuses_directories_that_are_not_empty(place: Place, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "l3" / "current").mkdir(parents=True)
    (tmp_path / "l3" / "current" / "0.log").write_bytes(b"")
    dirs = ",".join(str(tmp_path / name) for name in ("l1", "l2", "l3"))
    conf = write_conf(tmp_path / "new.conf", place.uri, ledgerDirectories=dirs)
    assert "not empty" in cli("cookie", "expand", "-c", conf, "--yes").err
    fewer = write_conf(tmp_path / "fewer.conf", place.uri, ledgerDirectories=str(tmp_path / "l1"))
    assert cli("cookie", "expand", "-c", fewer, "--yes").code == 5
    place.local("l2").unlink()
    (tmp_path / "l3" / "current" / "0.log").unlink()
    result = cli("cookie", "expand", "-c", conf, "--yes")
    assert result.code == 5
    assert "had it before" in result.err


@pytest.mark.parametrize("ledger", [LedgerId(0, 1), LedgerId(7, 1)], ids=str)
def test_expand_refuses_directories_among_which_ledgers_are_not_found(
    place: Place, cli: Cli, tmp_path: Path, ledger: LedgerId
) -> None:
    path = tmp_path / "index" / "current" / ("scoped-ledgers" if ledger.is_scoped else "ledgers")
    with LedgersDatabase.create(path) as database:
        database.put(ledger, LedgerData(exists=True, fenced=False, master_key=bytes(20)))
    before = place.stored("b1")
    dirs = ",".join(str(tmp_path / name) for name in ("l1", "l2", "l3"))
    conf = write_conf(tmp_path / "new.conf", place.uri, ledgerDirectories=dirs, ledgerStorageClass=DB)
    result = cli("cookie", "expand", "-c", conf, "--yes")
    assert result.code == 5
    assert f"{path} has ledgers" in result.err
    assert (place.stored("b1"), (tmp_path / "l3").exists()) == (before, False)
    shutil.rmtree(path)
    assert cli("cookie", "expand", "-c", conf, "--yes", "--undo", "none").code == 0


def test_rename_changes_the_store_and_the_directories_and_can_be_undone(place: Place, cli: Cli, tmp_path: Path) -> None:
    before = place.stored("b1")
    assert before is not None
    names = ("journal", "l1", "l2", "index")
    assert cli("cookie", "rename", "b1", "b1", "--yes").code == 2
    assert cli("cookie", "rename", "b7", "b8", "--yes").code == 4
    dry = cli("cookie", "rename", "b1", "b2", "-c", place.conf, "--dry-run", "-o", "json").json
    assert [row["place"] for row in dry] == ["metadata store", *(str(tmp_path / name) for name in names)]
    assert place.stored("b1") == before
    result = cli("cookie", "rename", "b1", "b2", "-c", place.conf, "--yes", "--undo", tmp_path / "undo")
    assert result.code == 0, result.err
    assert "Ledgers that name b1 still do: 'bkctl metadata replace-bookie --from b1 --to b2'" in result.err
    after = before.replace(b'"b1"', b'"b2"')
    assert (place.stored("b1"), place.stored("b2")) == (None, after)
    assert {place.local(name).read_bytes() for name in names} == {after}
    assert cli("cookie", "verify", "b2", "-c", place.conf).code == 0
    assert cli("metadata", "undo", tmp_path / "undo", "--yes").code == 0
    assert (place.stored("b1"), place.stored("b2")) == (before, None)
    assert {place.local(name).read_bytes() for name in names} == {before}


def test_interrupted_rename_is_completed(place: Place, cli: Cli, tmp_path: Path) -> None:
    before = place.stored("b1")
    assert before is not None
    after = before.replace(b'"b1"', b'"b2"')
    with open_cluster(place.uri) as cluster:
        cluster.store.put("cookies/b2", after, NEW)
    place.local("journal").write_bytes(after)
    assert cli("cookie", "rename", "b1", "b2", "-c", place.conf, "--yes").code == 0
    assert (place.stored("b1"), place.stored("b2")) == (None, after)
    assert place.local("l2").read_bytes() == after


def test_rename_keeps_off_other_bookies(place: Place, cli: Cli, tmp_path: Path) -> None:
    with open_cluster(place.uri) as cluster:
        cluster.cookies.write("b2", Cookie("b2", ("/j",), ("/l",), "i"), NEW)
    assert cli("cookie", "rename", "b1", "b2", "-c", place.conf, "--yes").code == 5
    place.local("l1").write_bytes(Cookie("b5", ("/j",), ("/l",), "i").serialize())
    result = cli("cookie", "rename", "b1", "b3", "-c", place.conf, "--yes")
    assert result.code == 5
    assert "b5's" in result.err
    assert place.stored("b3") is None


@pytest.mark.parametrize("command", ["expand", "rename"])
def test_undo_keeps_what_another_client_did_meanwhile(
    place: Place, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The other client makes the very change that the command is about to make, so that this one is refused."""
    dirs = ",".join(str(tmp_path / name) for name in ("l1", "l2", "l3"))
    conf = write_conf(tmp_path / "new.conf", place.uri, ledgerDirectories=dirs)
    cookie = configured_cookie(BookieConfig.load(conf), "b1", place.instance_id)
    expanded, words = (cookie.serialize(), ()) if command == "expand" else (None, ("b1", "b2"))
    replace = Files.replace

    def replace_later(self: Files, path: Path, data: bytes) -> None:
        with open_cluster(place.uri) as cluster:
            if expanded is None:
                with suppress(NotFound):
                    cluster.store.delete("cookies/b1")
            else:
                cluster.store.put("cookies/b1", expanded, None)
        replace(self, path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "replace", replace_later)
        options = ("-c", conf if command == "expand" else place.conf, "--yes", "--undo", tmp_path / "undo")
        assert cli("cookie", command, *words, *options).code != 0
    assert place.stored("b1") == expanded
    undone = cli("metadata", "undo", tmp_path / "undo", "--yes")
    assert (undone.code, place.stored("b1")) == (0, expanded), undone.err


def test_verify_explains_every_difference(place: Place, cli: Cli, tmp_path: Path) -> None:
    same = cli("cookie", "verify", "-c", place.conf, "-o", "json")
    assert (same.code, same.json) == (0, [])
    assert "The 5 cookies of bookie b1 are equal" in same.err

    place.local("l1").write_bytes(
        Cookie("b9", ("/j",), (str(tmp_path / "l2"), str(tmp_path / "l1")), "i", (str(tmp_path / "index"),)).serialize()
    )
    place.local("l2").unlink()
    place.local("index").write_bytes(b"x")
    result = cli("cookie", "verify", "-c", place.conf, "-o", "ndjson")
    assert result.code == 3
    found = {(Path(row["place"]).name, row["field"]): row for row in result.rows}
    assert set(found) == {
        ("l1", "bookieId"), ("l1", "journalDirs"), ("l1", "ledgerDirs"), ("l1", "instanceId"), ("l2", "cookie"),
        ("index", "cookie"),
    }  # fmt: skip
    assert (found["l1", "bookieId"]["expected"], found["l1", "bookieId"]["found"]) == ("b1", "b9")
    assert "another order" in found["l1", "ledgerDirs"]["meaning"]
    assert "not mounted" in found["l2", "cookie"]["meaning"]
    assert "layout version" in found["index", "cookie"]["meaning"]
    place.local("index").write_bytes(
        Cookie("b1", ("/j",), (str(tmp_path / "l1"),), "i", (str(tmp_path / "index"),)).serialize()
    )
    rows = cli("cookie", "verify", "-c", place.conf, "-o", "ndjson").rows
    assert any(f"{tmp_path / 'l2'} is new: " in row["meaning"] for row in rows)
    place.local("index").write_bytes(b"x")
    # Without a configuration, the store's cookie counts.
    local = cli("cookie", "verify", "b1", "--dir", tmp_path / "l1", "-u", place.uri, "-o", "json")
    assert {row["field"] for row in local.json} == {"bookieId", "journalDirs", "ledgerDirs", "instanceId"}
    assert cli("cookie", "verify", "b8").code == 4
    whole = cli("cookie", "verify", "b1", "--dir", tmp_path, "-u", place.uri, "-o", "ndjson").rows
    assert {Path(row["place"]).name for row in whole} == {"l1", "l2", "index"}
    other = cli("cookie", "verify", "b1", "--dir", tmp_path / "other", "-u", place.uri, "-o", "json").json
    assert other[0]["meaning"].startswith("not a directory of the bookie")
    alone = cli("cookie", "verify", "b1", "-u", place.uri)
    assert (alone.code, alone.err.startswith("Only the metadata store's cookie of bookie b1 was read")) == (0, True)
    new = cli("cookie", "verify", "b8", "-c", place.conf, "-o", "json").json
    assert ("metadata store", "cookie") in {(row["place"], row["field"]) for row in new}


def test_every_form_of_output(place: Place, cli: Cli) -> None:
    for words in (("list",), ("show", "b1"), ("verify", "-c", place.conf), ("rename", "b1", "b2", "--dry-run")):
        for output in ("table", "json", "ndjson", "csv", "id"):
            assert cli("cookie", *words, "-o", output).code == 0, (words, output)
