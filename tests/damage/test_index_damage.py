"""Damage to a bookie's indexes: a result or one clear error that names the file, and the process lives."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from damage import matrix
from support.command_line import Answer, CommandLine
from support.golden import DATA

from bkctl.formats.index import index_path
from bkctl.ids import LedgerId

#: One file of each kind that RocksDB has; the tables hold nearly everything.
ROCKSDB_FILES = ("CURRENT", "MANIFEST-000015", "000014.log", "000013.sst", "IDENTITY")
#: The difference for a reader that checks sums: one of each action.
OF_DATABASES = [
    each
    for each in matrix.DAMAGE
    if each.place in ("middle", "", "garbage", "much-garbage") and not each.action.startswith("length")
]
LEDGER = LedgerId(0, 0)


def run(*arguments: object) -> Answer:
    return CommandLine(None)("--quiet", "bookie", *arguments, "-o", "ndjson")


@pytest.fixture
def interleaved(tmp_path: Path) -> Path:
    return shutil.copytree(DATA / "4.18.0" / "interleaved" / "ledgers", tmp_path / "ledgers")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return shutil.copytree(DATA / "4.18.0" / "db" / "ledgers", tmp_path / "ledgers")


def test_a_damaged_index_file(interleaved: Path) -> None:
    path = interleaved / "current" / index_path(LEDGER)
    whole = path.read_bytes()
    before = run("index", "show", LEDGER, "--dir", interleaved).rows
    assert len(before) > 5
    codes = set()
    for damage in matrix.DAMAGE:
        if damage.place == "much-garbage":
            continue  # 375,000 entries that are shown, or found wrong: right, and slow.
        # The offsets of the lengths of the key and of the explicit LAC.
        difference = damage.do(path, [8, 36])
        with matrix.bounded():
            answer = run("index", "show", LEDGER, "--dir", interleaved)
            rows = matrix.check_answer(answer, path, removed=not path.exists(), offset=False)
            if difference is not None and difference >= 1024:
                kept = [row for row in before if 1024 + 8 * row["entryId"] + 8 <= difference]
                assert rows[: len(kept)] == kept, damage
            for command in (("index", "show", "--meta"), ("index", "check"), ("check",)):
                answer = run(*command, "--dir", interleaved)
                matrix.check_answer(answer, path, offset=False)
                codes.add(answer.code)
        path.write_bytes(whole)
    assert codes == {0, 3, 7}


def test_index_check_reports_moved_entries(interleaved: Path) -> None:
    path = interleaved / "current" / index_path(LEDGER)
    data = bytearray(path.read_bytes())
    data[1024:1032], data[1032:1040] = data[1032:1040], data[1024:1032]
    path.write_bytes(data)
    answer = run("check", "--dir", interleaved)
    assert answer.code == 3
    assert [row["entryId"] for row in matrix.check_answer(answer, path)] == [0, 1]


@pytest.mark.parametrize("file", ROCKSDB_FILES)
@pytest.mark.parametrize("name", ["ledgers", "locations"])
def test_a_damaged_database(database: Path, name: str, file: str) -> None:
    """Everything that can happen to each of RocksDB's files, in one process: none of it may end that."""
    directory = database / "current" / name
    path = directory / file
    whole = path.read_bytes()
    codes = set()
    for damage in OF_DATABASES:
        damaged = damage(whole)
        if damaged is None:
            path.unlink()
        else:
            path.write_bytes(damaged)
        for command in (("index", "check"), ("check",)):
            with matrix.bounded():
                answer = run(*command, "--dir", database)
            # A database whose MANIFEST lost a table still opens: then a ledger, or locations, are missing.
            matrix.check_answer(answer, directory, removed=True, offset=False)
            codes.add(answer.code)
        path.write_bytes(whole)
    assert run("check", "--dir", database).code == 0
    if file == "IDENTITY":
        assert codes == {0}
    elif file != "000014.log":
        assert 7 in codes


@pytest.mark.parametrize("name", ["ledgers", "locations"])
def test_damage_names_the_database_file(database: Path, name: str) -> None:
    for file in ("CURRENT", "MANIFEST-000015", "000013.sst"):
        path = database / "current" / name / file
        whole = path.read_bytes()
        path.write_bytes(b"?" * len(whole))
        answer = run("index", "check", "--dir", database)
        assert answer.code == 7
        assert file in answer.problem
        assert str(path.parent) in answer.problem
        path.write_bytes(whole)


def test_index_check_reports_a_damaged_write_ahead_log(database: Path) -> None:
    from bkctl.files.rocksdb import LocationsDatabase

    directory = database / "current" / "locations"
    killed = database.parent / "killed"
    with LocationsDatabase.edit(directory) as locations:
        locations.put_all((LEDGER, 100_000 + entry, 0x500) for entry in range(30_000))
        assert locations.last_entry_id(LEDGER) == 129_999
        shutil.copytree(directory, killed)
    shutil.rmtree(directory)
    shutil.move(killed, directory)
    log = max(directory.glob("*.log"), key=lambda path: path.stat().st_size)
    whole = log.read_bytes()
    assert run("index", "check", "--dir", database).code == 0
    for damage in OF_DATABASES:
        damaged = damage(whole)
        if damaged is None:
            continue
        log.write_bytes(damaged)
        answer = run("index", "check", "--dir", database)
        matrix.check_answer(answer, log)
        if damage.action.startswith(("flip", "cut", "swap")) or str(damage) == "zero-middle":
            assert answer.code == 7, damage
        log.write_bytes(whole)
