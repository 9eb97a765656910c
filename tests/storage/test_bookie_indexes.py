"""A bookie's indexes, wherever it keeps them: databases read without a trace, index files in several directories."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.golden import DATA

from bkctl.errors import Corrupt, LedgerNotFound, UsageError
from bkctl.files.directories import BookieDirectories
from bkctl.files.index import BookieIndexes
from bkctl.formats.index import index_path, write_header, write_location
from bkctl.ids import LedgerId


def files(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): path.stat().st_mtime_ns for path in directory.rglob("*")}


@pytest.fixture
def ledgers(tmp_path: Path) -> Path:
    """A copy of the ledger directory of Apache's DbLedgerStorage."""
    return shutil.copytree(DATA / "4.18.0" / "db" / "ledgers", tmp_path / "ledgers")


def test_reading_databases_leaves_no_trace(ledgers: Path) -> None:
    before = files(ledgers)
    with BookieIndexes(BookieDirectories.at(ledgers)) as indexes, indexes.open(LedgerId(0, 0)) as index:
        assert index.extent()[0] > 0
        assert len(index.master_key) == 20
    assert files(ledgers) == before


def test_a_read_only_directory_can_be_read(ledgers: Path) -> None:
    for path in (ledgers, *ledgers.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        with BookieIndexes(BookieDirectories.at(ledgers)) as indexes, indexes.open(LedgerId(0, 0)) as index:
            assert index.extent()[0] > 0
    finally:
        for path in (ledgers, *ledgers.rglob("*")):
            path.chmod(0o755)


@pytest.mark.parametrize("damage", ["remove", "truncate", "flip"])
def test_damaged_database_raises_one_error_that_names_it(ledgers: Path, damage: str) -> None:
    database = ledgers / "current" / "locations"
    tables = sorted(database.glob("*.sst"))
    assert tables
    for table in tables:
        data = bytearray(table.read_bytes())
        if damage == "remove":
            table.unlink()
        elif damage == "truncate":
            table.write_bytes(data[: len(data) // 2])
        else:
            data[20] ^= 0xFF
            table.write_bytes(data)
    with (
        BookieIndexes(BookieDirectories.at(ledgers)) as indexes,
        pytest.raises(Corrupt, match=str(database)),
    ):
        list(indexes.open(LedgerId(0, 0)).locations())


# --- index files ----------------------------------------------------------------------------------------------------

ONE, SCOPED = LedgerId(0, 0x1234), LedgerId(7, 1)


def write(directory: Path, ledger: LedgerId, *locations: int, suffix: str = "") -> Path:
    path = directory / "current" / (index_path(ledger) + suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(write_header(b"k" * 20) + b"".join(map(write_location, locations)))
    return path


def test_lists_ledgers_of_several_index_directories(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write(one, ONE, 0x500, 0, 0x600)
    write(two, SCOPED, 0x700)
    with BookieIndexes(BookieDirectories([], [tmp_path], [one, two])) as indexes:
        assert indexes.ledgers() == [ONE, SCOPED]
        assert indexes.ledgers(scope_id=7) == [SCOPED]
        with indexes.open(ONE) as index:
            assert index.extent() == (2, 2)
            assert [index.location_of(entry_id) for entry_id in (0, 1, 2, 3)] == [0x500, 0, 0x600, 0]
            assert [tuple(gap) for gap in index.gaps()] == [(1, 1)]
        assert indexes.find(LedgerId(0, 1)) is None
        with pytest.raises(LedgerNotFound):
            indexes.open(LedgerId(0, 1))


def test_relocation_leftover_counts_without_an_index_file(tmp_path: Path) -> None:
    path = write(tmp_path, ONE, 0x500, suffix=".rloc")
    write(tmp_path, SCOPED, 0x600, suffix=".rloc")
    with BookieIndexes(BookieDirectories.at(tmp_path)) as indexes:
        assert indexes.ledgers() == [ONE, SCOPED]
        with indexes.open(ONE) as index:
            assert (index.path, index.location_of(0)) == (path, 0x500)
        write(tmp_path, ONE, 0x700)
        with indexes.open(ONE) as index:
            assert index.location_of(0) == 0x700
        assert [each.kind.value for each in indexes.files()] == ["relocation", "index"]


def test_lists_both_index_files_of_a_ledger(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write(one, ONE, 0x500)
    write(two, ONE, 0x600)
    with BookieIndexes(BookieDirectories.at(one, two)) as indexes:
        with pytest.raises(UsageError, match="2 index files"):
            indexes.open(ONE)
        first = indexes.find(ONE, first=True)
        assert first is not None
        assert first.location_of(0) == 0x500


def test_unreadable_database_does_not_hide_the_others(tmp_path: Path, ledgers: Path) -> None:
    (ledgers / "current" / "ledgers" / "CURRENT").write_bytes(b"?")
    write(tmp_path / "files", ONE, 0x500)
    with BookieIndexes(BookieDirectories.at(ledgers, tmp_path / "files")) as indexes:
        assert indexes.open(ONE).location_of(0) == 0x500
        for call in (lambda: indexes.open(LedgerId(0, 0)), indexes.ledgers):
            with pytest.raises(Corrupt, match="CURRENT"):
                call()
        assert len(indexes.problems) == 1
