"""A bookie's files found, and named in every form."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import golden

from bkctl.errors import BkctlError, NotFound, UsageError
from bkctl.files.directories import BookieDirectories, FileKind, current_of, describe
from bkctl.formats.index import index_path
from bkctl.ids import LedgerId

LEDGERS = (LedgerId(0, 0x1234), LedgerId(0, 2**63 - 1), LedgerId(7, 1))


@pytest.fixture
def bookie(tmp_path):
    """Two ledger directories and one journal directory with one of everything."""
    files = [
        "journal/current/VERSION", "journal/current/a.txn", "journal/current/1f.txn", "journal/current/x.tmp",
        "journal/current/scoped/b.txn",
        "l1/current/VERSION", "l1/current/a.log", "l1/current/1f.log", "l1/current/lastId", "l1/current/lastMark",
        "l1/current/scoped/5.log", "l1/current/scoped/lastId", "l1/current/2.log.compacting",
        "l1/current/BOOKIE_STATUS", "l1/current/DIRTY", "l1/current/ledgers/000001.sst", "l1/current/locations/CURRENT",
        "l1/current/scoped-ledgers/CURRENT", "l1/current/0/0/0.idx.rloc", "l1/current/0/0/1.idx",
        "l1/current/ledgers.PREV-2026-11-21T06:45:48.123Z/CURRENT", "l1/current/locations.unfinished/CURRENT",
        "l2/current/0/0/7.idx.backup-20261121T064548Z", "l2/current/lastMark.1", "l2/current/5.log",
        "l2/current/a.log", "l2/current/scoped/1f.log",
        f"l1/current/{index_path(LEDGERS[0])}", f"l2/current/{index_path(LEDGERS[1])}",
        f"l2/current/{index_path(LEDGERS[2])}",
    ]  # fmt: skip
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"xyz")
    return tmp_path


@pytest.fixture
def directories(bookie):
    return BookieDirectories([bookie / "journal"], [bookie / "l1", bookie / "l2"])


def names(files, root):
    return [str(file.path.relative_to(root)) for file in files]


def test_files_by_kind(bookie, directories):
    journals = directories.journals()
    assert names(journals, bookie / "journal/current") == ["a.txn", "1f.txn", "scoped/b.txn"]
    assert [(file.id, file.size, file.scoped) for file in journals] == [(10, 3, False), (31, 3, False), (11, 3, True)]
    assert names(directories.entry_logs(), bookie) == [
        "l1/current/a.log", "l1/current/1f.log", "l1/current/scoped/5.log",
        "l2/current/5.log", "l2/current/a.log", "l2/current/scoped/1f.log",
    ]  # fmt: skip
    assert [file.id for file in directories.last_marks()] == [0, 1]
    assert names(directories.cookies(), bookie) == ["journal/current/VERSION", "l1/current/VERSION"]
    assert [(file.path.name, file.size, file.scoped) for file in directories.rocksdbs()] == [
        ("ledgers", 3, False), ("locations", 3, False), ("scoped-ledgers", 3, True)
    ]  # fmt: skip
    indexes = [file for file in directories.indexes() if file.kind is FileKind.INDEX]
    assert [(file.id, file.scoped) for file in indexes] == [
        (LEDGERS[0], False), (LEDGERS[2], True), (LEDGERS[1], False)
    ]  # fmt: skip


def test_files_given_in_several_roles_are_listed_once(bookie):
    given = [bookie / "journal", bookie / "l1", bookie / "l1/current", bookie / "l2"]
    found = list(BookieDirectories.at(*given).files())
    assert len(found) == len({file.path for file in found})
    assert {file.kind for file in found} == set(FileKind)
    unknown = [file.path for file in found if file.kind is FileKind.UNKNOWN]
    assert {path.name for path in unknown} == {"x.tmp", "1.idx"}
    assert not {file.path.name for file in BookieDirectories([bookie / "l1"]).indexes()} & {"x.tmp", "1.idx"}
    assert all(file.mtime_ms > 10**12 for file in found)


@pytest.mark.parametrize("text", ["31", "0x1f", "0X1F", "1f", "1F", "001f", "1f.txn", "{}/journal/current/1f.txn"])
def test_a_journal_in_every_form(bookie, directories, text):
    path = bookie / "journal/current/1f.txn"
    assert directories.resolve_journal(text.format(bookie)) == path
    assert BookieDirectories.at(bookie / "journal/current").resolve_journal(text.format(bookie)) == path


def test_entry_logs_in_every_form(bookie, directories):
    resolve = directories.resolve_entry_log
    assert resolve("5") == resolve("0x5") == bookie / "l2/current/5.log"
    assert resolve("scoped/5") == resolve("scoped/0x5") == resolve("scoped/5.log") == bookie / "l1/current/scoped/5.log"
    assert resolve("scoped/31") == bookie / "l2/current/scoped/1f.log"
    assert resolve("31") == bookie / "l1/current/1f.log"
    assert resolve("scoped/1f") == resolve("scoped/31")
    assert directories.resolve_journal("scoped/11") == bookie / "journal/current/scoped/b.txn"
    assert directories.resolve_journal("b.txn") == bookie / "journal/current/scoped/b.txn"


@pytest.mark.parametrize("text", ["11", "0xb"])
def test_an_id_that_only_a_scoped_file_has_is_refused_with_its_name(directories, text):
    with pytest.raises(NotFound, match=rf"no journal {text} of scope 0; give scoped/{text}$"):
        directories.resolve_journal(text)
    assert directories.resolve_journal(f"scoped/{text}").name == "b.txn"


def test_a_missing_file_is_refused_with_the_command_that_lists_files(directories):
    with pytest.raises(NotFound, match=r"There is no journal 77 in .*; 'bkctl bookie files' lists the existing ones$"):
        directories.resolve_journal("77")


def test_digits_are_decimal_and_hex_is_named_where_only_that_exists(bookie, directories):
    (bookie / "journal/current/99.txn").write_bytes(b"")
    with pytest.raises(NotFound, match=r"no journal 99 \(decimal\); 99.txn is 0x99$"):
        directories.resolve_journal("99")
    (bookie / "journal/current/63.txn").write_bytes(b"")
    assert directories.resolve_journal("99").name == "63.txn"


def test_bare_hex_that_is_a_file_too_is_refused_with_both_paths(bookie, directories, monkeypatch):
    monkeypatch.chdir(bookie)
    (bookie / "1f").write_bytes(b"")
    with pytest.raises(UsageError, match="2 files fit journal 1f"):
        directories.resolve_journal("1f")


@pytest.mark.parametrize("text", ["10", "a.log", "5.log", "1f.log"])
def test_a_name_that_fits_several_files_is_refused_with_their_paths(bookie, directories, text):
    with pytest.raises(UsageError, match="2 files fit entry log") as caught:
        directories.resolve_entry_log(text)
    assert str(bookie) in str(caught.value)


@pytest.mark.parametrize("text", ["7", "0x99", "9f", "99.txn", "scoped/7", "sub/1.txn", "/nowhere/1.txn"])
def test_a_missing_journal_is_not_found(directories, text):
    with pytest.raises(NotFound):
        directories.resolve_journal(text)


@pytest.mark.parametrize("text", ["", "nonsense", "-1", "0x", "1g", "a\0b", "3.14"])
def test_invalid_names_are_refused(directories, text):
    with pytest.raises(UsageError):
        directories.resolve_journal(text)


def test_a_file_in_the_working_directory_is_itself(bookie, directories, monkeypatch):
    monkeypatch.chdir(bookie / "l1/current")
    assert directories.resolve_entry_log("2.log.compacting").read_bytes() == b"xyz"
    assert directories.resolve_entry_log("./1f.log").resolve() == bookie / "l1/current/1f.log"
    assert BookieDirectories().resolve_entry_log("1f.log").resolve() == bookie / "l1/current/1f.log"


def test_missing_directories_are_refused(bookie):
    with pytest.raises(NotFound):
        list(BookieDirectories.at(bookie / "none").files())
    with pytest.raises(UsageError):
        BookieDirectories([bookie / "journal/current/1f.txn"]).journals()
    assert current_of(bookie / "journal") == current_of(bookie / "journal/current") == bookie / "journal/current"


@pytest.mark.parametrize("apache", golden.bookies(), ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def test_files_of_an_apache_bookie_are_found(apache):
    found = BookieDirectories([apache.journal_dir], [apache.ledger_dir])
    assert [file.path for file in found.journals()] == sorted(apache.journals)
    assert [file.path for file in found.entry_logs()] == sorted(apache.entry_logs)
    assert len(found.cookies()) == 2
    assert [file.path.name for file in found.last_marks()] == ["lastMark"]


def test_a_directory_with_directories_of_a_bookie_stands_for_them(bookie):
    found = BookieDirectories.at(bookie)
    assert found.ledger_dirs == tuple(bookie / name for name in ("journal", "l1", "l2"))
    assert list(found.files()) == list(BookieDirectories.at(bookie / "journal", bookie / "l1", bookie / "l2").files())
    assert BookieDirectories.at(bookie / "l1").ledger_dirs == (bookie / "l1",)
    assert BookieDirectories.at(bookie / "l1/current").ledger_dirs == (bookie / "l1/current",)
    assert BookieDirectories.at(bookie / "none").ledger_dirs == (bookie / "none",)


def test_a_bookies_directory_is_never_taken_for_a_database(tmp_path):
    (tmp_path / "ledgers/current").mkdir(parents=True)
    assert [file.kind for file in BookieDirectories(ledger_dirs=[tmp_path]).files()] == [FileKind.UNKNOWN]


def test_directories_without_bookie_files_are_refused(bookie):
    assert BookieDirectories.at(bookie).of_a_bookie().ledger_dirs
    (bookie / "other").mkdir()
    (bookie / "other/notes.txt").touch()
    with pytest.raises(NotFound, match=r"No files of a bookie in .*other"):
        BookieDirectories.at(bookie / "other").of_a_bookie()


def test_a_file_that_cannot_be_looked_up_is_refused_and_not_skipped(bookie, directories, monkeypatch):
    """A directory with read but without search permission lists its names, and nothing else."""

    def refuse(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(Path, "lstat", refuse)
    with pytest.raises(BkctlError, match=r"a\.log cannot be read: Permission denied"):
        describe(FileKind.ENTRY_LOG, 10, bookie / "l1/current/a.log", scoped=False)
