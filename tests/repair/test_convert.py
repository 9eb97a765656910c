"""Index files to databases and back: nothing is lost on the way, wherever it is killed."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import golden
from support.failing_files import FailingFiles
from support.golden import GoldenBookie
from support.simulated_disk import SimulatedCrash

from bkctl.checks.check import IndexCheck
from bkctl.checks.index_scan import IndexScan
from bkctl.errors import Conflict, Corrupt, Unsupported, UsageError
from bkctl.files.conversion import DB, INTERLEAVED, ConversionState
from bkctl.files.directories import BookieDirectories, FileKind
from bkctl.files.index import LedgerIndexReader
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.formats import entry_log, index
from bkctl.formats.entry import DigestManager, DigestType, master_key
from bkctl.formats.index import ENTRY_ID_MAX, LedgerData
from bkctl.formats.names import CONVERSION_NAME
from bkctl.ids import LedgerId
from bkctl.repair.convert import convert
from bkctl.repair.layout import BookieLayout, find_layout
from bkctl.repair.rebuild import rebuild
from bkctl.repair.regenerate import regenerate
from bkctl.spark.jobs.bookies import find_bookies

KEY = master_key(b"secret")
A, B, S = LedgerId(0, 4), LedgerId(0, 5), LedgerId(7, 5)
PACKET = DigestManager(A, DigestType.CRC32C, b"secret").seal_lac(1)

#: Ledger → (master key, fenced, explicit LAC, places of its entries).
Index = dict[LedgerId, tuple[bytes, bool, bytes | None, dict[int, int]]]

INDEX: Index = {
    A: (KEY, False, None, {0: 1028, 1: 2000, 5000: 3000}),
    B: (KEY, True, PACKET, {}),
    S: (master_key(b""), True, None, {7: 1028}),
}


def file_index(current: Path) -> Index:
    found: Index = {}
    for file in BookieDirectories(index_dirs=[current]).indexes():
        assert isinstance(file.id, LedgerId)
        with LedgerIndexReader.open(file.path) as reader:
            header = reader.header
            places = dict(reader.locations())
            found[file.id] = header.master_key, header.fenced, header.explicit_lac, places
    return found


def database_index(current: Path) -> Index:
    found: Index = {}
    for prefix in ("", "scoped-"):
        if (current / f"{prefix}ledgers").is_dir():
            with LedgersDatabase.open(current / f"{prefix}ledgers") as ledgers:
                for ledger, data in ledgers.ledgers():
                    assert data.exists
                    found[ledger] = data.master_key, data.fenced, data.explicit_lac, {}
            with LocationsDatabase.open(current / f"{prefix}locations") as locations:  # there wherever ledgers are
                for ledger, entry_id, place in locations.locations():
                    found[ledger][3][entry_id] = place
    return found


def write_files(current: Path, content: Index) -> None:
    for ledger, (key, fenced, packet, places) in content.items():
        path = current / index.index_path(ledger)
        path.parent.mkdir(parents=True)
        slots = b"".join(index.write_location(places.get(slot, 0)) for slot in range(max(places, default=-1) + 1))
        path.write_bytes(index.write_header(key, fenced=fenced, explicit_lac=packet) + slots)


def layout_at(*bases: Path) -> BookieLayout:
    return find_layout(BookieDirectories([bases[0].parent / "journal"], bases))


@pytest.fixture
def current(tmp_path: Path) -> Path:
    """The `current` of a ledger directory with index files of three ledgers."""
    (tmp_path / "journal" / "current").mkdir(parents=True)
    (tmp_path / "journal" / "current" / "1.txn").touch()
    current = tmp_path / "ledgers" / "current"
    current.mkdir(parents=True)
    (current / "0.log").write_bytes(entry_log.write_header())
    write_files(current, INDEX)
    return current


def test_to_databases_and_back(current: Path) -> None:
    done = convert(layout_at(current.parent), DB)
    (row,) = done.directories
    assert (done.done, done.resumed, row.ledgers, row.entries) == (True, False, 3, 4)
    assert database_index(current) == INDEX
    assert file_index(current) == {}
    (backup,) = row.backups
    assert backup.name.startswith("index.backup-20")
    assert file_index(backup) == INDEX
    done = convert(layout_at(current.parent), INTERLEAVED)
    assert file_index(current) == INDEX
    assert sorted(each.name.split(".")[0] for each in done.directories[0].backups) == [
        "ledgers", "locations", "scoped-ledgers", "scoped-locations"
    ]  # fmt: skip
    assert not (current / "ledgers").exists()
    assert (current / index.index_path(A)).stat().st_size == 1024 + 5 * 8192
    convert(layout_at(current.parent), DB, discard_old=True)
    assert database_index(current) == INDEX


def test_repairs_within_one_second_keep_backups_of_their_own(current: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("convert", "rebuild"):
        monkeypatch.setattr(f"bkctl.repair.{module}.time_stamp", lambda: "20261121T064548Z")
    layout = layout_at(current.parent)
    convert(layout, DB)
    rebuild(layout, ledgers=True, locations=False)
    convert(layout, INTERLEAVED)
    convert(layout, DB)
    assert database_index(current) == INDEX
    assert {path.name for path in current.glob("*.backup-*")} == {
        "index.backup-20261121T064548Z", "index.backup-20261121T064548Z-3", "ledgers.backup-20261121T064548Z",
        "scoped-ledgers.backup-20261121T064548Z",
        *(f"{scope}{name}.backup-20261121T064548Z-2" for scope in ("", "scoped-") for name in ("ledgers", "locations")),
    }  # fmt: skip


def test_discard_old_removes_the_old_index(current: Path) -> None:
    done = convert(layout_at(current.parent), DB, discard_old=True)
    assert done.directories[0].backups == []
    assert not list(current.glob("*.backup*"))


@pytest.mark.parametrize("to", [DB, INTERLEAVED])
def test_an_interrupted_removal_of_the_old_index_continues(
    current: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if to == INTERLEAVED:
        convert(layout_at(current.parent), DB, discard_old=True)

    def interrupted(path: Path) -> None:
        shutil.rmtree(path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("bkctl.repair.convert.shutil", SimpleNamespace(rmtree=interrupted))
        with pytest.raises(KeyboardInterrupt):
            convert(layout_at(current.parent), to, discard_old=True)
    done = convert(layout_at(current.parent), to, discard_old=True)
    assert (done.resumed, done.done, done.directories[0].backups) == (True, True, [])
    assert (database_index if to == DB else file_index)(current) == INDEX
    assert not [*current.glob("*.backup*"), *current.glob(CONVERSION_NAME)]


@pytest.mark.parametrize("golden_bookie", golden.bookies(), ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def test_indexes_of_apache_bookies_are_converted(golden_bookie: GoldenBookie, tmp_path: Path) -> None:
    shutil.copytree(golden_bookie.journal_dir, tmp_path / "journal")
    shutil.copytree(golden_bookie.ledger_dir, tmp_path / "ledgers")
    current = tmp_path / "ledgers" / "current"
    if golden_bookie.name == "db":
        before = database_index(current)
        convert(layout_at(current.parent), INTERLEAVED)
        assert file_index(current) == before
    else:
        before = file_index(current)
        convert(layout_at(current.parent), DB)
        assert database_index(current) == before
    assert sum(len(each[3]) for each in before.values()) > 1000


def test_a_dry_run_changes_nothing(current: Path) -> None:
    before = {path: path.read_bytes() for path in current.rglob("*") if path.is_file()}
    done = convert(layout_at(current.parent), DB, dry_run=True)
    assert (done.done, done.directories[0].ledgers, done.directories[0].entries) == (False, 3, 4)
    assert {path: path.read_bytes() for path in current.rglob("*") if path.is_file()} == before


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_no_index_or_two_indexes_are_refused(current: Path) -> None:
    (current / "empty").mkdir()
    empty = find_layout(BookieDirectories([current.parent.parent / "journal"], [current / "empty"]))
    with pytest.raises(UsageError, match="No databases"):
        convert(empty, INTERLEAVED)
    with pytest.raises(UsageError, match="No index files"):
        convert(empty, DB)
    with pytest.raises(UsageError, match="No databases"):
        convert(layout_at(current.parent), INTERLEAVED)
    convert(layout_at(current.parent), DB)
    with pytest.raises(UsageError, match="converted already"):
        convert(layout_at(current.parent), DB)
    write_files(current, {B: INDEX[B]})
    for to in (DB, INTERLEAVED):
        with pytest.raises(Conflict):
            convert(layout_at(current.parent), to)


def test_index_files_behind_a_symbolic_link_stay(current: Path) -> None:
    level = next(path for path in sorted(current.iterdir()) if path.is_dir() and len(path.name) <= 2)
    level.rename(current.parent / "elsewhere")
    level.symlink_to(current.parent / "elsewhere")
    with pytest.raises(Unsupported, match="symbolic link"):
        convert(find_layout(BookieDirectories.at(current)), DB)
    assert not (current / "locations").exists()


@pytest.mark.parametrize("name", ["locations", "scoped-ledgers"])
def test_databases_behind_a_symbolic_link_stay(current: Path, name: str) -> None:
    """A link can be renamed to a backup, but `--discard-old` does not remove what is behind it."""
    convert(layout_at(current.parent), DB, discard_old=True)
    (current / name).rename(current.parent / "elsewhere")
    (current / name).symlink_to(current.parent / "elsewhere")
    with pytest.raises(Unsupported, match=f"{name} is a symbolic link"):
        convert(layout_at(current.parent), INTERLEAVED, discard_old=True)
    assert (file_index(current), database_index(current)) == ({}, INDEX)


def test_two_indexes_in_two_directories_are_named(tmp_path: Path) -> None:
    one, two = two_directories(tmp_path)
    write_files(one, {B: INDEX[B]})
    write_files(two, {A: INDEX[A]})
    convert(layout_at(two.parent), DB, discard_old=True)
    with pytest.raises(Conflict, match=f"{two}/ledgers has 1 ledgers, and {one}/.* is an index file"):
        convert(layout_at(one.parent, two.parent), DB)


def test_databases_without_a_ledger_are_moved_away(current: Path) -> None:
    LedgersDatabase.create(current / "ledgers").close()
    LocationsDatabase.create(current / "locations").close()
    convert(layout_at(current.parent), DB)
    assert database_index(current) == INDEX


@pytest.mark.parametrize(
    ("data", "problem"),
    [(LedgerData(True, False, KEY, None, True), "limbo"), (LedgerData(True, False, b""), "no master key")],
)
def test_facts_that_index_files_cannot_hold_are_refused(current: Path, data: LedgerData, problem: str) -> None:
    shutil.rmtree(current / "0")
    shutil.rmtree(current / "00000000")
    with LedgersDatabase.create(current / "ledgers") as ledgers:
        ledgers.put(A, data)
    LocationsDatabase.create(current / "locations").close()
    with pytest.raises(Unsupported, match=problem):
        convert(layout_at(current.parent), INTERLEAVED)


def test_ledgers_without_locations_are_not_converted_to_nothing(current: Path) -> None:
    convert(layout_at(current.parent), DB)
    shutil.rmtree(current / "locations")
    with pytest.raises(Corrupt, match=r"locations is missing.*rebuild --locations"):
        convert(layout_at(current.parent), INTERLEAVED)


def test_an_entry_id_too_high_for_an_index_file_is_refused(current: Path) -> None:
    convert(layout_at(current.parent), DB, discard_old=True)
    with LocationsDatabase.edit(current / "locations") as locations:
        locations.put(A, ENTRY_ID_MAX + 1, 1028)
    names = {path.name for path in current.iterdir()}
    with pytest.raises(Unsupported, match="index files end at entry"):
        convert(layout_at(current.parent), INTERLEAVED)
    assert {path.name for path in current.iterdir()} == names


def two_directories(tmp_path: Path) -> list[Path]:
    (tmp_path / "journal" / "current").mkdir(parents=True)
    currents = [tmp_path / f"ledgers-{number}" / "current" for number in (0, 1)]
    for current in currents:
        current.mkdir(parents=True)
    return currents


def test_several_directories_where_each_log_is_at_home(tmp_path: Path) -> None:
    first, second = two_directories(tmp_path)
    for number, current in enumerate((first, second)):
        (current / f"{number}.log").write_bytes(entry_log.write_header())
    in_first, in_second = entry_log.pack_location(0, 1028), entry_log.pack_location(1, 1028)
    even, odd = (KEY, False, None, {0: in_first}), (KEY, True, None, {0: in_second})
    write_files(second, {A: even})  # index files may be anywhere
    write_files(first, {B: odd})
    layout = layout_at(first.parent, second.parent)
    convert(layout, DB, discard_old=True)
    assert [database_index(each) for each in (first, second)] == [{A: even}, {B: odd}]
    convert(layout, INTERLEAVED)
    assert [file_index(each) for each in (first, second)] == [{A: even}, {B: odd}]


@pytest.mark.parametrize("prefix", ["", "scoped-"])
def test_lost_databases_of_ledgers_are_not_converted_to_nothing(tmp_path: Path, prefix: str) -> None:
    first, second = two_directories(tmp_path)
    write_files(first, INDEX)
    log = second / ("scoped" if prefix else "") / "1.log"
    log.parent.mkdir(exist_ok=True)
    log.write_bytes(entry_log.write_header() + bytes(9))
    layout = layout_at(first.parent, second.parent)
    convert(layout, DB, discard_old=True)
    for name in ("ledgers", "locations"):
        shutil.rmtree(second / f"{prefix}{name}")
        with pytest.raises(Corrupt, match=f"ledgers-1/current/{prefix}ledgers.*rebuild --ledgers --locations"):
            convert(layout, INTERLEAVED, discard_old=True)
    log.write_bytes(entry_log.write_header())  # without entries
    assert convert(layout, INTERLEAVED).done


def test_logs_where_databases_would_not_look_are_refused(tmp_path: Path) -> None:
    first, second = two_directories(tmp_path)
    (second / "0.log").write_bytes(entry_log.write_header())
    write_files(first, {A: (KEY, False, None, {0: 1028})})
    with pytest.raises(Unsupported, match=r"Entry 0 of ledger 4 is in log 0 of .*ledgers-1"):
        convert(layout_at(first.parent, second.parent), DB)
    assert not list(first.glob("*unfinished")) + list(first.glob(CONVERSION_NAME))


def test_several_directories_with_an_index_of_one_ledger_each(tmp_path: Path) -> None:
    first, second = two_directories(tmp_path)
    (first / "0.log").write_bytes(entry_log.write_header())
    for current, entry_id in ((first, 0), (second, 1)):
        write_files(current, {A: (KEY, False, None, {entry_id: 1028})})
    with pytest.raises(Conflict, match="both the index of ledger 4"):
        convert(layout_at(first.parent, second.parent), DB)


def test_directories_with_equal_log_ids_are_refused(tmp_path: Path) -> None:
    first, second = two_directories(tmp_path)
    for current in (first, second):
        (current / "0.log").write_bytes(entry_log.write_header())
        LedgersDatabase.create(current / "ledgers").close()
    with pytest.raises(Unsupported, match=r"0\.log have the same id"):
        convert(layout_at(first.parent, second.parent), INTERLEAVED)


def test_a_damaged_index_is_not_converted(current: Path) -> None:
    (current / index.index_path(B)).write_bytes(b"XXXX")
    with pytest.raises(Corrupt):
        convert(layout_at(current.parent), DB)
    assert not (current / "ledgers").exists()


# --- killed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [DB, INTERLEAVED])
@pytest.mark.parametrize("error", [SimulatedCrash(), OSError(errno.ENOSPC, "No space left")], ids=["crash", "full"])
def test_a_conversion_resumes_after_any_failure(
    current: Path, tmp_path: Path, to: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bkctl.repair.convert.LEDGERS_PER_CHECKPOINT", 1)
    layout = layout_at(current.parent)
    old, new = (file_index, database_index) if to == DB else (database_index, file_index)
    if to == INTERLEAVED:
        convert(layout, DB, discard_old=True)
    shutil.copytree(current, tmp_path / "original")
    resumed = tried = swapping = 0
    # Every fourth operation in each of the four runs, each time others.
    for at in range(1 + (to == DB) + 2 * isinstance(error, OSError), 300, 4):
        tried += 1
        for each in current.iterdir():
            if each.is_dir():
                shutil.rmtree(each)
        shutil.copytree(tmp_path / "original", current, dirs_exist_ok=True, copy_function=_copy_new)
        try:
            convert(layout, to, files=FailingFiles(at, error))
        except (SimulatedCrash, OSError):
            # The old index is all there, or the new one is.
            assert INDEX in (old(current), new(current))
            state = ConversionState.read(current / CONVERSION_NAME)
            if state is None and new(current) == INDEX:
                continue  # all but the last sync was done
            if state is not None and state.swapping:
                swapping += 1
                for work in (
                    lambda: rebuild(layout, ledgers=True, locations=True), lambda: regenerate(layout),
                    lambda: list(IndexCheck(BookieDirectories.at(current.parent)).findings()),
                    lambda: list(IndexScan(BookieDirectories.at(current.parent)).findings()),
                    lambda: find_bookies([f"bookie-1={current.parent}"]),
                ):  # fmt: skip
                    with pytest.raises(Conflict, match="is not finished"):
                        work()
                planned = convert(layout, to, dry_run=True)
                assert [(row.ledgers, row.entries) for row in planned.directories] == [(3, 4)]
            done = convert(layout, to)
            resumed += done.resumed
            assert new(current) == INDEX
            assert not list(current.glob("*.unfinished")) + list(current.glob(CONVERSION_NAME))
            assert [(row.ledgers, row.entries, len(row.backups)) for row in done.directories] == [
                (3, 4, 1 if to == DB else 4)
            ]
        else:
            break
    assert tried > 5
    assert resumed > tried // 2
    assert swapping


def _copy_new(source: str, target: str) -> None:
    """Copy the missing files: a conversion continues only beside the same logs and journals."""
    if not Path(target).exists():
        shutil.copy2(source, target)


KILLED = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from bkctl.repair import convert as conversion
from bkctl.repair.convert import convert
from bkctl.files.directories import BookieDirectories
from bkctl.disk import Files
from bkctl.repair.layout import find_layout

conversion.LEDGERS_PER_CHECKPOINT = 1
left = int(sys.argv[2])

class Killer(Files):
    def rename(self, source, target):
        global left
        left -= 1
        if left == 0:
            os._exit(9)
        super().rename(source, target)

base = Path(sys.argv[1])
convert(find_layout(BookieDirectories([base / "journal"], [base / "ledgers"])), sys.argv[3], files=Killer())
"""


@pytest.mark.parametrize("at", [2, 3, 5, 7])
def test_a_killed_conversion_resumes(current: Path, at: int) -> None:
    base = current.parent.parent
    done = subprocess.run([sys.executable, "-c", KILLED, base, str(at), DB], check=False)
    assert done.returncode == 9
    assert file_index(current) == INDEX or database_index(current) == INDEX
    assert convert(layout_at(current.parent), DB).resumed
    assert database_index(current) == INDEX


@pytest.mark.parametrize(
    "change",
    [
        {"to": 5}, {"to": []}, {"stamp": None}, {"stamp": "../x"}, {"fingerprint": 5}, {"after": 5}, {"after": "zz"},
        {"number": "0"}, {"number": None}, {"swapping": 1}, {"counts": 5}, {"counts": [5]}, {"counts": [["1", 2]]},
        {"counts": [[1]]}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_progress_file_with_other_values_is_corrupt(current: Path, change: dict[str, object]) -> None:
    with pytest.raises(SimulatedCrash):
        convert(layout_at(current.parent), DB, files=FailingFiles(8, SimulatedCrash()))
    path = current / CONVERSION_NAME
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change))
    with pytest.raises(Corrupt, match="is not a progress file of a conversion"):
        convert(layout_at(current.parent), DB)


def test_the_progress_file_is_listed_as_unfinished(current: Path) -> None:
    (current / CONVERSION_NAME).write_text("{}")
    kinds = {file.path.name: file.kind for file in BookieDirectories.at(current.parent).files()}
    assert kinds[CONVERSION_NAME] is FileKind.UNFINISHED


def test_a_bookie_that_ran_in_between_restarts_the_conversion(current: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bkctl.repair.convert.LEDGERS_PER_CHECKPOINT", 1)
    layout = layout_at(current.parent)
    with pytest.raises(SimulatedCrash):
        convert(layout, DB, files=FailingFiles(8, SimulatedCrash()))
    assert (current / CONVERSION_NAME).exists()
    (layout.journal_dirs[0] / "2.txn").touch()
    write_files(current, {LedgerId(0, 1): INDEX[A]})
    done = convert(layout, DB)
    assert not done.resumed
    assert database_index(current) == INDEX | {LedgerId(0, 1): INDEX[A]}


def test_the_other_direction_is_refused_meanwhile(current: Path) -> None:
    with pytest.raises(SimulatedCrash):
        convert(layout_at(current.parent), DB, files=FailingFiles(8, SimulatedCrash()))
    with pytest.raises(Conflict, match="conversion to db is unfinished"):
        convert(layout_at(current.parent), INTERLEAVED)
