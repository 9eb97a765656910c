"""Reading a bookie's databases: beside a running bookie, and without a trace."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from golden import DATA

from bkctl.errors import Corrupt
from bkctl.ids import LedgerId
from bkctl.storage.directories import BookieDirectories
from bkctl.storage.listing import open_ledger_index


def files(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): path.stat().st_mtime_ns for path in directory.rglob("*")}


@pytest.fixture
def ledgers(tmp_path: Path) -> Path:
    """A copy of the ledger directory of Apache's DbLedgerStorage."""
    return shutil.copytree(DATA / "4.18.0" / "db" / "ledgers", tmp_path / "ledgers")


def test_the_databases_of_a_bookie_are_read_without_a_trace(ledgers: Path) -> None:
    before = files(ledgers)
    with open_ledger_index(BookieDirectories.at(ledgers), LedgerId(0, 0)) as index:
        assert index.extent()[0] > 0
        assert len(index.master_key) == 20
    assert files(ledgers) == before


def test_a_read_only_directory_can_be_read(ledgers: Path) -> None:
    for path in (ledgers, *ledgers.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        with open_ledger_index(BookieDirectories.at(ledgers), LedgerId(0, 0)) as index:
            assert index.extent()[0] > 0
    finally:
        for path in (ledgers, *ledgers.rglob("*")):
            path.chmod(0o755)


@pytest.mark.parametrize("damage", ["remove", "truncate", "flip"])
def test_a_damaged_database_is_one_error_that_names_it(ledgers: Path, damage: str) -> None:
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
        open_ledger_index(BookieDirectories.at(ledgers), LedgerId(0, 0)) as index,
        pytest.raises(Corrupt, match=str(database)),
    ):
        list(index.locations())
