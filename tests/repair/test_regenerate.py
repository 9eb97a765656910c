"""Index files regenerated from entry logs: equal to an Apache bookie's own, as far as damage allows."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from support import golden
from support.failing_files import FailingFiles
from support.golden import GoldenBookie
from support.simulated_disk import SimulatedCrash

from bkctl.errors import NotFound, UsageError
from bkctl.files.directories import BookieDirectories
from bkctl.files.index import LedgerIndexReader
from bkctl.formats import entry_log, index, journal
from bkctl.formats.entry import DigestManager, DigestType, master_key
from bkctl.formats.index import ENTRY_ID_MAX
from bkctl.ids import LedgerId
from bkctl.model import LedgerFacts, LedgerLiveness
from bkctl.repair.layout import BookieLayout, find_layout
from bkctl.repair.regenerate import regenerate

KEY, OTHER_KEY = master_key(b"secret"), master_key(b"other")
A, B, S = LedgerId(0, 4), LedgerId(0, 5), LedgerId(7, 5)
PACKET = DigestManager(A, DigestType.CRC32C, b"secret").seal_lac(1)


class Said(NamedTuple):
    """Return the contents of an index file."""

    master_key: bytes
    fenced: bool
    explicit_lac: bytes | None
    places: dict[int, int]


def said(path: Path) -> Said:
    with LedgerIndexReader.open(path) as reader:
        header = reader.header
        return Said(header.master_key, header.fenced, header.explicit_lac, dict(reader.locations()))


def all_said(current: Path) -> dict[LedgerId, Said]:
    return {
        file.id: said(file.path)
        for file in BookieDirectories(index_dirs=[current]).indexes()
        if isinstance(file.id, LedgerId)
    }


class Bookie:
    """One directory for the journal, one for ledgers."""

    def __init__(self, base: Path) -> None:
        self.journal_dir, self.ledger_dir = base / "journal", base / "ledgers"
        self.current = self.ledger_dir / "current"
        self.current.mkdir(parents=True)
        (self.journal_dir / "current").mkdir(parents=True)

    @property
    def layout(self) -> BookieLayout:
        return find_layout(BookieDirectories([self.journal_dir], [self.ledger_dir]))

    def log(self, log_id: int, ledger: LedgerId, *entry_ids: int, tail: bytes = b"") -> dict[int, int]:
        """A log of one ledger's entries; the place of each."""
        digest = DigestManager(ledger, DigestType.CRC32C, b"secret")
        data, places = entry_log.write_header(2 if ledger.is_scoped else 1), {}
        for entry_id in entry_ids:
            places[entry_id] = entry_log.pack_location(log_id, len(data) + 4)
            body = digest.seal(entry_id, -1, 3, b"abc") + b"abc"
            data += len(body).to_bytes(4, "big") + body
        directory = self.current / "scoped" if ledger.is_scoped else self.current
        directory.mkdir(exist_ok=True)
        (directory / entry_log.file_name(log_id)).write_bytes(data + tail)
        return places

    def index(self, ledger: LedgerId, places: dict[int, int], *, fenced: bool = False, key: bytes = KEY) -> Path:
        path = self.current / index.index_path(ledger)
        path.parent.mkdir(parents=True, exist_ok=True)
        slots = b"".join(index.write_location(places.get(slot, 0)) for slot in range(max(places, default=-1) + 1))
        path.write_bytes(index.write_header(key, fenced=fenced, explicit_lac=PACKET if fenced else None) + slots)
        return path

    def journal(self, *records: bytes) -> None:
        (self.journal_dir / "current" / "1.txn").write_bytes(journal.write_header(6) + b"".join(records))


@pytest.fixture
def bookie(tmp_path: Path) -> Bookie:
    return Bookie(tmp_path)


GOLDEN = [bookie for bookie in golden.bookies() if bookie.name != "db"]


@pytest.mark.parametrize("golden_bookie", GOLDEN, ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def test_regenerated_files_match_apaches(golden_bookie: GoldenBookie, tmp_path: Path) -> None:
    shutil.copytree(golden_bookie.journal_dir, tmp_path / "journal")
    shutil.copytree(golden_bookie.ledger_dir, tmp_path / "ledgers")
    layout = find_layout(BookieDirectories([tmp_path / "journal"], [tmp_path / "ledgers"]))
    current = tmp_path / "ledgers" / "current"
    before = all_said(current)
    sizes = {ledger: (current / index.index_path(ledger)).stat().st_size for ledger in before}
    assert sum(len(each.places) for each in before.values()) > 1000
    done = regenerate(layout)
    assert not done.dry_run
    assert not done.findings.damage
    after = all_said(current)
    assert {ledger: after[ledger] for ledger in before} == before
    assert {ledger: (current / index.index_path(ledger)).stat().st_size for ledger in before} == sizes
    for row in done.indexes:
        if row.ledger in before:
            assert row.backup is not None
            assert row.backup.relative_to(current).parts[0].startswith("index.backup-20")
            assert said(row.backup) == before[row.ledger]


@pytest.mark.parametrize("golden_bookie", GOLDEN, ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def test_lost_files_are_rebuilt_with_the_journals_keys(golden_bookie: GoldenBookie, tmp_path: Path) -> None:
    shutil.copytree(golden_bookie.journal_dir, tmp_path / "journal")
    shutil.copytree(golden_bookie.ledger_dir, tmp_path / "ledgers")
    layout = find_layout(BookieDirectories([tmp_path / "journal"], [tmp_path / "ledgers"]))
    current = tmp_path / "ledgers" / "current"
    before = all_said(current)
    for ledger in before:
        (current / index.index_path(ledger)).unlink()
    done = regenerate(layout)
    after = all_said(current)
    assert after
    for ledger in after.keys() & before.keys():
        assert after[ledger].places == before[ledger].places
        assert after[ledger].master_key == before[ledger].master_key
        assert after[ledger].fenced
    assert {ledger for ledger, each in before.items() if each.places} <= after.keys() | set(done.without_key)


def test_scoped_ledgers_and_a_named_one(bookie: Bookie) -> None:
    places, scoped = bookie.log(0, A, 0, 1), bookie.log(0, S, 0, 2000)
    bookie.index(A, {0: 99})
    path = bookie.index(S, {0: 99}, fenced=True)
    done = regenerate(bookie.layout, [S])
    (row,) = done.indexes
    assert (row.path, row.entries, row.last_entry_id, row.entries_before) == (path, 2, 2000, 1)
    assert all_said(bookie.current) == {A: Said(KEY, False, None, {0: 99}), S: Said(KEY, True, PACKET, scoped)}
    regenerate(bookie.layout)
    assert all_said(bookie.current)[A] == Said(KEY, False, None, places)


def test_a_given_key_is_used_for_all_ledgers(bookie: Bookie) -> None:
    places = bookie.log(0, A, 0)
    bookie.index(A, {}, key=b"")
    regenerate(bookie.layout, [A], master_key=OTHER_KEY)
    assert all_said(bookie.current) == {A: Said(OTHER_KEY, False, None, places)}


def test_a_ledger_with_an_unknown_key(bookie: Bookie) -> None:
    bookie.log(0, A, 0)
    with pytest.raises(UsageError, match=r"master key of ledger 4.*--password-file"):
        regenerate(bookie.layout, [A])
    bookie.log(1, B, 0)
    bookie.index(B, {})
    done = regenerate(bookie.layout)
    assert (done.without_key, [row.ledger for row in done.indexes]) == ([A], [B])
    alive = {A: LedgerFacts(LedgerLiveness.ALIVE, OTHER_KEY, False)}
    done = regenerate(bookie.layout, [A], metadata=lambda _: alive)
    assert all_said(bookie.current)[A][:2] == (OTHER_KEY, False)


def test_the_journal_knows_key_fence_and_lac(bookie: Bookie) -> None:
    places = bookie.log(0, A, 0)
    bookie.journal(journal.ledger_key_record(A, KEY), journal.fence_record(A), journal.explicit_lac_record(A, PACKET))
    regenerate(bookie.layout, [A])
    assert all_said(bookie.current) == {A: Said(KEY, True, PACKET, places)}


def test_a_missing_ledger_and_a_dead_one(bookie: Bookie) -> None:
    with pytest.raises(NotFound, match="Ledger 4 "):
        regenerate(bookie.layout, [A])
    path = bookie.index(A, {0: 99})
    done = regenerate(bookie.layout, metadata=lambda _: {A: LedgerFacts(LedgerLiveness.DEAD)})
    assert (done.dead, done.indexes) == ([A], [])
    assert said(path).places == {0: 99}


def test_a_ledger_without_entries_keeps_its_header(bookie: Bookie) -> None:
    path = bookie.index(A, {0: 99}, fenced=True)
    regenerate(bookie.layout, [A])
    assert said(path) == Said(KEY, True, PACKET, {})


def test_an_unreadable_file_is_replaced(bookie: Bookie) -> None:
    places = bookie.log(0, A, 0)
    path = bookie.index(A, {0: 99})
    path.write_bytes(b"XXXX")
    bookie.journal(journal.ledger_key_record(A, KEY))
    done = regenerate(bookie.layout)
    assert any("BKLE" in note or "needs" in note for note in done.findings.notes)
    (row,) = done.indexes
    assert row.fence_guessed
    assert said(path) == Said(KEY, True, None, places)
    assert row.backup is not None
    assert row.backup.read_bytes() == b"XXXX"


def test_a_leftover_of_a_relocation_counts_as_the_old_file(bookie: Bookie) -> None:
    places = bookie.log(0, A, 0)
    path = bookie.index(A, {0: 99}, fenced=True)
    path.rename(f"{path}.rloc")
    (row,) = regenerate(bookie.layout).indexes
    assert (row.path, row.entries_before, row.backup) == (path, 1, None)
    assert said(path) == Said(KEY, True, PACKET, places)


def test_files_of_one_ledger_in_two_directories_become_one(tmp_path: Path) -> None:
    bookie, other = Bookie(tmp_path), Bookie(tmp_path / "other")
    places = bookie.log(0, A, 0, 1)
    lost = {2: entry_log.pack_location(1, 2000), 3: entry_log.pack_location(1, 3000)}
    first, second = bookie.index(A, places | {2: lost[2]}), other.index(A, {1: 99} | lost, fenced=True)
    layout = find_layout(BookieDirectories([bookie.journal_dir], [bookie.ledger_dir, other.ledger_dir]))
    content = second.read_bytes()
    (row,) = regenerate(layout, [A]).indexes
    assert (row.path, row.entries, row.entries_before, row.entries_saved) == (first, 4, 6, 2)
    assert said(first) == Said(KEY, True, PACKET, places | lost)
    assert not second.exists()
    (backup,) = other.current.glob(f"index.backup-*/{index.index_path(A)}")
    assert backup.read_bytes() == content


def test_entries_behind_damage_are_taken_from_the_old_file(bookie: Bookie) -> None:
    places = bookie.log(0, A, *range(10))
    path = bookie.index(A, places | {11: places[2] + 4})
    log = bookie.current / "0.log"
    data = bytearray(log.read_bytes())
    data[places[4] - 4 : places[4]] = b"\x7f\xff\xff\xff"
    log.write_bytes(data)
    done = regenerate(bookie.layout)
    assert [damage.path for damage in done.findings.damage] == [log]
    assert (done.indexes[0].entries, done.indexes[0].entries_saved) == (10, 6)
    assert said(path).places == places


def test_a_ledger_that_a_damaged_ledgers_map_lacks_is_found(bookie: Bookie) -> None:
    places = bookie.log(0, A, 0, 1)
    log = bookie.current / "0.log"
    data = log.read_bytes()
    maps = b"".join(entry_log.write_ledgers_map({A._replace(ledger_id=4100): 1}))
    log.write_bytes(entry_log.write_header(1, len(data), 1) + data[entry_log.HEADER_SIZE :] + maps)
    for ledgers in ([A], None):
        assert A in {row.ledger for row in regenerate(bookie.layout, ledgers, master_key=KEY).indexes}
        assert said(bookie.current / index.index_path(A)).places == places
        (bookie.current / index.index_path(A)).unlink()


@pytest.mark.parametrize("ledger", [A, S])
@pytest.mark.parametrize("loss", ["missing", "cut within a record", "cut before a record", "zeros"])
def test_entries_of_a_lost_log_stay_in_the_index(bookie: Bookie, ledger: LedgerId, loss: str) -> None:
    """Without them the bookie would answer that it never had them; a copy that compaction left is found."""
    places = bookie.log(0, ledger, 0, 1) | (lost := bookie.log(1, ledger, *range(2, 9)))
    copy = bookie.log(2, ledger, 8)
    path = bookie.index(ledger, places)
    log = bookie.current / ("scoped" if ledger.is_scoped else "") / "1.log"
    data, cut = log.read_bytes(), entry_log.unpack_location(lost[5])[1]
    if loss == "missing":
        log.unlink()
    else:
        log.write_bytes(data[: cut + (4 if "within" in loss else -4)].ljust(len(data) if loss == "zeros" else 0, b"\0"))
    saved, fault = (6, "is missing") if loss == "missing" else (3, "ends before them")
    for dry_run in (True, False):
        done = regenerate(bookie.layout, dry_run=dry_run)
        (damage,) = done.findings.damage
        assert str(damage.error) == f"{saved} entries of the old index are in {log}, which {fault}"
        (row,) = done.indexes
        assert (row.entries, row.last_entry_id, row.entries_saved) == (9, 8, saved)
    assert said(path).places == places | copy


def test_entries_that_the_disk_refuses_stay_in_the_index(bookie: Bookie, lose: Callable[[Path, int], None]) -> None:
    places = bookie.log(0, A, *range(30))
    path = bookie.index(A, places)
    lose(bookie.current / "0.log", entry_log.unpack_location(places[9])[1])
    done = regenerate(bookie.layout)
    assert [damage.path for damage in done.findings.damage] == [bookie.current / "0.log"]
    assert said(path).places == places


def test_entry_ids_too_high_for_an_index_file_are_noted(bookie: Bookie) -> None:
    places = bookie.log(0, A, 0, ENTRY_ID_MAX + 1)
    bookie.index(A, {})
    done = regenerate(bookie.layout)
    assert all_said(bookie.current)[A].places == {0: places[0]}
    assert any("index files cannot hold them" in note for note in done.findings.notes)


def test_many_pages_do_not_stay_in_memory(bookie: Bookie, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bkctl.repair.regenerate._CHANGED_PAGES_MAX", 2)
    monkeypatch.setattr("bkctl.repair.regenerate._HANDLES_MAX", 2)
    expected = {}
    for number in range(7):
        ledger = LedgerId(number % 2, number)
        places = bookie.log(number, ledger, 0, 1024, 5000, 1, 1025)
        bookie.index(ledger, {}, key=master_key(b"%d" % number))
        expected[ledger] = Said(master_key(b"%d" % number), False, None, places)
    regenerate(bookie.layout)
    assert all_said(bookie.current) == expected


def test_a_dry_run_changes_nothing(bookie: Bookie) -> None:
    bookie.log(0, A, 0, 1)
    bookie.index(A, {0: 99})
    before = {path: path.read_bytes() for path in bookie.current.rglob("*") if path.is_file()}
    done = regenerate(bookie.layout, dry_run=True)
    assert {path: path.read_bytes() for path in bookie.current.rglob("*") if path.is_file()} == before
    assert [(row.entries, row.last_entry_id, row.backup) for row in done.indexes] == [(2, 1, None)]
    assert done.dry_run


@pytest.mark.parametrize("error", [SimulatedCrash(), OSError(errno.ENOSPC, "No space left")], ids=["crash", "full"])
def test_a_crash_anywhere_leaves_each_ledger_its_old_or_new_file(
    bookie: Bookie, tmp_path: Path, error: BaseException
) -> None:
    old = {A: Said(KEY, False, None, {0: 99}), S: Said(KEY, True, PACKET, {7: 99})}
    new = {A: old[A]._replace(places=bookie.log(0, A, 0, 1)), S: old[S]._replace(places=bookie.log(0, S, 0, 1))}
    bookie.index(A, old[A].places)
    bookie.index(S, old[S].places, fenced=True)
    shutil.copytree(bookie.current, tmp_path / "original")
    for at in range(1, 200):
        shutil.rmtree(bookie.current)
        shutil.copytree(tmp_path / "original", bookie.current)
        try:
            regenerate(bookie.layout, files=FailingFiles(at, error))
        except (SimulatedCrash, OSError):
            found = all_said(bookie.current)
            assert found.keys() == old.keys()
            assert all(each in (old[ledger], new[ledger]) for ledger, each in found.items())
            regenerate(bookie.layout)
            assert all_said(bookie.current) == new
            assert not list(bookie.current.glob("*.unfinished"))
        else:
            break
    assert at > 10
