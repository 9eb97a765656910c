"""Databases rebuilt from logs and journals: what an Apache bookie's own database said, and what damage leaves of it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest
from support import golden
from support.failing_files import FailingFiles
from support.golden import GoldenBookie
from support.simulated_disk import SimulatedCrash

from bkctl.disk import Files
from bkctl.errors import UsageError
from bkctl.files.directories import BookieDirectories
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.formats import entry_log, journal
from bkctl.formats.entry import DigestManager, DigestType, master_key
from bkctl.formats.index import LedgerData
from bkctl.formats.record import record_of
from bkctl.ids import LedgerId
from bkctl.model import LedgerFacts, LedgerLiveness
from bkctl.repair.layout import BookieLayout, find_layout
from bkctl.repair.rebuild import Rebuild, rebuild

GOLDEN = [bookie for bookie in golden.bookies() if bookie.name == "db"]
KEY = master_key(b"secret")


def golden_layout(bookie: GoldenBookie, base: Path) -> BookieLayout:
    shutil.copytree(bookie.journal_dir, base / "journal")
    shutil.copytree(bookie.ledger_dir, base / "ledgers")
    return find_layout(BookieDirectories([base / "journal"], [base / "ledgers"]))


def locations_in(path: Path) -> dict[tuple[LedgerId, int], int]:
    with LocationsDatabase.open(path, scoped=path.name.startswith("scoped")) as database:
        return {(ledger, entry_id): place for ledger, entry_id, place in database.locations()}


def ledgers_in(path: Path) -> dict[LedgerId, LedgerData]:
    with LedgersDatabase.open(path, scoped=path.name.startswith("scoped")) as database:
        return dict(database.ledgers())


# --- a bookie of our own making ---------------------------------------------------------------------------------------


def entry(ledger: LedgerId, entry_id: int) -> bytes:
    payload = b"%d" % entry_id
    return DigestManager(ledger, DigestType.CRC32C, b"secret").seal(entry_id, entry_id - 1, 10, payload) + payload


def write_log(path: Path, entries: list[tuple[LedgerId, int]], tail: bytes = b"") -> dict[tuple[LedgerId, int], int]:
    """A log without a ledgers map; the location of each entry."""
    data, found = entry_log.write_header(2 if entries and entries[0][0].is_scoped else 1), {}
    for ledger, entry_id in entries:
        found[ledger, entry_id] = entry_log.pack_location(int(path.stem, 16), len(data) + 4)
        body = entry(ledger, entry_id)
        data += len(body).to_bytes(4, "big") + body
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data + tail)
    return found


class Bookie:
    """A directory for a journal and some for ledgers, with databases that fit their logs."""

    def __init__(self, base: Path, count: int = 1) -> None:
        self.journal_dir = base / "journal"
        self.ledger_dirs = [base / f"ledgers-{number}" for number in range(count)]
        for each in (self.journal_dir, *self.ledger_dirs):
            (each / "current").mkdir(parents=True)

    @property
    def layout(self) -> BookieLayout:
        return find_layout(BookieDirectories([self.journal_dir], self.ledger_dirs))

    def current(self, number: int = 0) -> Path:
        return self.ledger_dirs[number] / "current"

    def log(
        self, log_id: int, *entries: tuple[LedgerId, int], number: int = 0, tail: bytes = b""
    ) -> dict[tuple[LedgerId, int], int]:
        scoped = entries[0][0].is_scoped
        directory = self.current(number) / "scoped" if scoped else self.current(number)
        return write_log(directory / entry_log.file_name(log_id), list(entries), tail)

    def database(
        self,
        ledgers: Mapping[LedgerId, LedgerData],
        places: Mapping[tuple[LedgerId, int], int],
        number: int = 0,
        prefix: str = "",
    ) -> None:
        scoped = prefix != ""
        with LedgersDatabase.create(self.current(number) / f"{prefix}ledgers", scoped=scoped) as database:
            for ledger, data in ledgers.items():
                database.put(ledger, data)
        with LocationsDatabase.create(self.current(number) / f"{prefix}locations", scoped=scoped) as locations:
            locations.put_all((*key, place) for key, place in places.items())

    def journal(self, journal_id: int, *records: bytes, version: int = 6) -> None:
        data = journal.write_header(version) + b"".join(records)
        (self.journal_dir / "current" / journal.file_name(journal_id)).write_bytes(data)


@pytest.fixture
def bookie(tmp_path: Path) -> Bookie:
    return Bookie(tmp_path)


A, B, C = LedgerId(0, 4), LedgerId(0, 5), LedgerId(0, 6)
S = LedgerId(7, 5)
OPEN = LedgerData(True, False, KEY)
FENCED = LedgerData(True, True, KEY)


def metadata_of(
    known: Mapping[LedgerId, LedgerFacts],
) -> Callable[[Collection[LedgerId]], Mapping[LedgerId, LedgerFacts]]:
    return lambda ledgers: {ledger: known.get(ledger, LedgerFacts(LedgerLiveness.DEAD)) for ledger in ledgers}


# --- what Apache's bookies wrote --------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden_bookie", GOLDEN, ids=lambda bookie: bookie.version)
def test_rebuilt_databases_match_apaches(golden_bookie: GoldenBookie, tmp_path: Path) -> None:
    layout = golden_layout(golden_bookie, tmp_path)
    current = tmp_path / "ledgers" / "current"
    locations, ledgers = locations_in(current / "locations"), ledgers_in(current / "ledgers")
    assert len(locations) > 1000
    done = rebuild(layout, ledgers=True, locations=True)
    assert not done.dry_run
    assert not done.findings.damage
    assert not done.findings.notes
    assert locations_in(current / "locations") == locations
    rebuilt = ledgers_in(current / "ledgers")
    assert {ledger: rebuilt[ledger] for ledger in ledgers} == ledgers
    for row in done.databases:
        assert row.backup is not None
        assert row.backup.name.startswith(f"{row.path.name}.backup-20")
    assert locations_in(done.databases[1].backup or Path()) == locations


@pytest.mark.parametrize("golden_bookie", GOLDEN, ids=lambda bookie: bookie.version)
def test_keys_come_from_the_journals_without_the_old_ledgers(golden_bookie: GoldenBookie, tmp_path: Path) -> None:
    layout = golden_layout(golden_bookie, tmp_path)
    current = tmp_path / "ledgers" / "current"
    ledgers = ledgers_in(current / "ledgers")
    shutil.rmtree(current / "ledgers")
    done = rebuild(layout, ledgers=True, locations=False)
    rebuilt = ledgers_in(current / "ledgers")
    in_logs = {ledger for ledger, _ in locations_in(current / "locations")}
    assert in_logs <= rebuilt.keys()
    with_key = {ledger for ledger, data in rebuilt.items() if data.master_key}
    assert with_key
    assert all(rebuilt[ledger].master_key == ledgers[ledger].master_key for ledger in with_key & ledgers.keys())
    (row,) = done.databases
    assert row.backup is None
    assert row.without_key == len(rebuilt) - len(with_key)
    assert row.guessed_fences == sum(
        data.fenced for ledger, data in rebuilt.items() if not (ledger in ledgers and ledgers[ledger].fenced)
    )


# --- which ledgers ----------------------------------------------------------------------------------------------------


def test_locations_of_the_ledgers_that_the_index_has(bookie: Bookie) -> None:
    places = bookie.log(3, (A, 0), (B, 0), (A, 1))
    later = bookie.log(0x1F, (A, 1), (C, 0))
    bookie.database({A: OPEN, C: OPEN}, {})
    done = rebuild(bookie.layout, ledgers=False, locations=True)
    # The copy in the later log counts.
    expected = {(A, 0): places[A, 0], (A, 1): later[A, 1], (C, 0): later[C, 0]}
    assert locations_in(bookie.current() / "locations") == expected
    (row,) = done.databases
    assert (row.logs, row.ledgers, row.entries, row.entries_before, row.left_out) == (2, 2, 3, 0, 1)


def test_with_metadata_dead_ledgers_stay_dead(bookie: Bookie) -> None:
    places = bookie.log(0, (A, 0), (B, 0), (C, 0))
    bookie.database({A: OPEN, B: FENCED}, {})
    alive = metadata_of({A: LedgerFacts(LedgerLiveness.ALIVE, KEY, True), C: LedgerFacts(LedgerLiveness.UNKNOWN)})
    done = rebuild(bookie.layout, ledgers=True, locations=True, metadata=alive)
    assert ledgers_in(bookie.current() / "ledgers") == {A: FENCED, C: LedgerData(True, True, b"")}
    assert locations_in(bookie.current() / "locations") == {key: places[key] for key in ((A, 0), (C, 0))}
    assert [row.left_out for row in done.databases] == [1, 1]


def test_metadata_knows_key_and_fence_where_the_old_index_is_gone(bookie: Bookie) -> None:
    bookie.log(0, (A, 0), (B, 0))
    alive = metadata_of(
        {A: LedgerFacts(LedgerLiveness.ALIVE, KEY, False), B: LedgerFacts(LedgerLiveness.ALIVE, KEY, True)}
    )
    (bookie.current() / "locations").mkdir()
    done = rebuild(bookie.layout, ledgers=True, locations=False, metadata=alive)
    assert ledgers_in(bookie.current() / "ledgers") == {A: OPEN, B: FENCED}
    assert done.databases[0].guessed_fences == 0


def test_an_existing_ledger_missing_in_the_index_is_noted(bookie: Bookie) -> None:
    bookie.log(0, (A, 0), (B, 0))
    bookie.database({A: OPEN}, {})
    alive = metadata_of(dict.fromkeys((A, B), LedgerFacts(LedgerLiveness.ALIVE, KEY, False)))
    done = rebuild(bookie.layout, ledgers=False, locations=True, metadata=alive)
    assert any("--ledgers" in note for note in done.findings.notes)


def test_facts_of_a_ledger_come_from_the_journal(bookie: Bookie) -> None:
    packet = DigestManager(B, DigestType.CRC32C, b"secret").seal_lac(9)
    bookie.journal(
        1,
        journal.ledger_key_record(A, KEY),
        record_of(entry(A, 0)),
        journal.ledger_key_record(B, KEY),
        journal.explicit_lac_record(B, packet),
        journal.fence_record(B),
        journal.fence_record(C),
    )
    bookie.database({}, {})
    rebuild(bookie.layout, ledgers=True, locations=False)
    # The whole old index had none of them: A and B began in the journal; of C only the fence is known.
    assert ledgers_in(bookie.current() / "ledgers") == {
        A: OPEN,
        B: LedgerData(True, True, KEY, packet),
        C: LedgerData(True, True, b""),
    }


def test_limbo_explicit_lac_and_storage_flags_are_kept(bookie: Bookie) -> None:
    packet = DigestManager(A, DigestType.CRC32C, b"secret").seal_lac(9)
    data = LedgerData(True, False, KEY, packet, True)
    bookie.database({A: data}, {})
    with LedgersDatabase.edit(bookie.current() / "ledgers") as database:
        database.put_storage_flags(1)
    rebuild(bookie.layout, ledgers=True, locations=False)
    assert ledgers_in(bookie.current() / "ledgers") == {A: data}
    with LedgersDatabase.open(bookie.current() / "ledgers") as database:
        assert database.storage_flags() == 1


def test_scoped_ledgers_have_their_own_databases(bookie: Bookie) -> None:
    plain, scoped = bookie.log(0, (B, 0)), bookie.log(0, (S, 0), (S, 1))
    bookie.database({B: OPEN}, plain)
    bookie.database({S: OPEN}, {}, prefix="scoped-")
    done = rebuild(bookie.layout, ledgers=True, locations=True)
    assert locations_in(bookie.current() / "locations") == plain
    assert locations_in(bookie.current() / "scoped-locations") == scoped
    assert ledgers_in(bookie.current() / "scoped-ledgers") == {S: OPEN}
    assert [row.path.name for row in done.databases] == ["ledgers", "scoped-ledgers", "locations", "scoped-locations"]


def test_each_directory_gets_its_own_ledgers(tmp_path: Path) -> None:
    bookie = Bookie(tmp_path, 2)
    first, second = bookie.log(0, (A, 0), number=0), bookie.log(0, (B, 0), number=1)
    bookie.journal(1, journal.ledger_key_record(A, KEY), journal.ledger_key_record(B, KEY))
    for number in (0, 1):
        bookie.database({}, {}, number=number)
    rebuild(bookie.layout, ledgers=True, locations=True)
    assert [ledgers_in(bookie.current(number) / "ledgers") for number in (0, 1)] == [{A: OPEN}, {B: OPEN}]
    assert [locations_in(bookie.current(number) / "locations") for number in (0, 1)] == [first, second]


def test_a_bookie_with_index_files_is_refused_with_a_hint(tmp_path: Path) -> None:
    interleaved = next(one for one in golden.bookies() if one.name == "interleaved")
    with pytest.raises(UsageError, match="regenerate"):
        rebuild(golden_layout(interleaved, tmp_path), ledgers=False, locations=True)


# --- damage -----------------------------------------------------------------------------------------------------------


def test_entries_behind_damage_are_taken_from_the_old_index(bookie: Bookie) -> None:
    places = bookie.log(0, *((A, number) for number in range(10)))
    bookie.database({A: OPEN}, places | {(A, 99): places[A, 2] + 4})
    log = bookie.current() / "0.log"
    data = bytearray(log.read_bytes())
    offset = places[A, 4] - 4
    data[offset : offset + 4] = b"\x7f\xff\xff\xff"
    log.write_bytes(data)
    done = rebuild(bookie.layout, ledgers=False, locations=True)
    (damage,) = done.findings.damage
    assert damage.path == log
    assert not done.dry_run
    assert locations_in(bookie.current() / "locations") == places
    assert (done.databases[0].entries, done.databases[0].entries_saved) == (10, 6)


@pytest.mark.parametrize("loss", ["missing", "cut"])
@pytest.mark.parametrize("has_ledgers", [True, False])
def test_entries_of_a_lost_log_stay_in_the_index(tmp_path: Path, loss: str, has_ledgers: bool) -> None:
    """Without them the bookie would answer that it never had them. C was deleted, and its log removed."""
    bookie = Bookie(tmp_path, 2)
    places = bookie.log(0, (A, 0)) | bookie.log(1, (A, 1), (B, 0), (B, 1))
    bookie.database({A: OPEN, B: OPEN}, places | ({(C, 0): entry_log.pack_location(7, 1028)} if has_ledgers else {}))
    bookie.database({}, {}, number=1)
    log = bookie.current() / "1.log"
    log.unlink() if loss == "missing" else os.truncate(log, entry_log.unpack_location(places[B, 0])[1] - 4)
    if not has_ledgers:
        shutil.rmtree(bookie.current() / "ledgers")
    saved, fault = (3, "is missing") if loss == "missing" else (2, "ends before them")
    for dry_run in (True, False):
        done = rebuild(bookie.layout, ledgers=True, locations=True, dry_run=dry_run)
        (damage,) = done.findings.damage
        assert str(damage.error) == f"{saved} entries of the old index are in {log}, which {fault}"
        (row,) = (row for row in done.databases if row.path == bookie.current() / "locations")
        assert (row.entries, row.entries_saved) == (4, saved)
    assert locations_in(bookie.current() / "locations") == places
    assert ledgers_in(bookie.current() / "ledgers").keys() == {A, B}


@pytest.mark.parametrize("ledger", [A, S])
def test_entries_that_the_disk_refuses_stay_in_the_index(
    bookie: Bookie, lose: Callable[[Path, int], None], ledger: LedgerId
) -> None:
    """Without them the bookie would answer that it never had them, and recovery would end the ledger there."""
    places = bookie.log(0, *((ledger, number) for number in range(30)))
    prefix, directory = ("scoped-", bookie.current() / "scoped") if ledger.is_scoped else ("", bookie.current())
    bookie.database({ledger: OPEN}, places, prefix=prefix)
    lose(directory / "0.log", entry_log.unpack_location(places[ledger, 9])[1])
    done = rebuild(bookie.layout, ledgers=False, locations=True)
    assert [damage.path for damage in done.findings.damage] == [directory / "0.log"]
    assert locations_in(bookie.current() / f"{prefix}locations") == places


@pytest.mark.parametrize("ledger", [B, S])
def test_a_ledger_behind_damage_is_taken_from_the_old_locations(bookie: Bookie, ledger: LedgerId) -> None:
    """Otherwise the next start would delete its locations."""
    other = ledger._replace(ledger_id=ledger.ledger_id + 8)
    places = bookie.log(0, (other, 0), (other, 1), (ledger, 0))
    prefix, directory = ("scoped-", bookie.current() / "scoped") if ledger.is_scoped else ("", bookie.current())
    gone = ledger._replace(ledger_id=ledger.ledger_id + 16)
    bookie.database({other: OPEN}, places | {(gone, 0): places[other, 0]}, prefix=prefix)
    shutil.rmtree(bookie.current() / f"{prefix}ledgers")
    log = directory / "0.log"
    data = bytearray(log.read_bytes())
    offset = entry_log.unpack_location(places[other, 1])[1]
    data[offset - 4 : offset] = b"\x7f\xff\xff\xff"
    log.write_bytes(data)
    rebuild(bookie.layout, ledgers=True, locations=False)
    assert ledgers_in(bookie.current() / f"{prefix}ledgers").keys() == {other, ledger}


@pytest.mark.parametrize("lost", [("ledgers",), ("ledgers", "locations")])
def test_a_ledger_that_a_damaged_ledgers_map_lacks_is_found(bookie: Bookie, lost: tuple[str, ...]) -> None:
    places = bookie.log(0, (A, 0), (B, 0))
    bookie.database({A: OPEN, B: OPEN}, places)
    log = bookie.current() / "0.log"
    data = log.read_bytes()
    maps = b"".join(entry_log.write_ledgers_map({A._replace(ledger_id=4100): 1, B: 1}))
    log.write_bytes(entry_log.write_header(1, len(data), 2) + data[entry_log.HEADER_SIZE :] + maps)
    for name in lost:
        shutil.rmtree(bookie.current() / name)
    rebuild(bookie.layout, ledgers=True, locations=True)
    assert ledgers_in(bookie.current() / "ledgers").keys() >= {A, B}
    assert locations_in(bookie.current() / "locations") == places


def test_an_invalid_log_is_reported_and_its_indexed_entries_are_kept(bookie: Bookie) -> None:
    places = bookie.log(0, (A, 0), (A, 1)) | bookie.log(1, (A, 2))
    bookie.database({A: OPEN}, places)
    log = bookie.current() / "0.log"
    log.write_bytes(b"XXXX" + log.read_bytes()[4:])
    done = rebuild(bookie.layout, ledgers=True, locations=True)
    assert {damage.path for damage in done.findings.damage} == {log}
    assert locations_in(bookie.current() / "locations") == places


@pytest.mark.parametrize("name", ["ledgers", "locations"])
def test_a_damaged_database_is_rebuilt(bookie: Bookie, name: str) -> None:
    places = bookie.log(0, (A, 0), (B, 1))
    bookie.journal(1, journal.ledger_key_record(A, KEY), journal.ledger_key_record(B, KEY))
    bookie.database({A: OPEN, B: OPEN}, places)
    for table in (bookie.current() / name).glob("*.sst"):
        table.write_bytes(bytes(table.stat().st_size))
    done = rebuild(bookie.layout, ledgers=True, locations=True)
    assert locations_in(bookie.current() / "locations") == places
    fenced = name == "ledgers"  # nothing says that they are not
    assert ledgers_in(bookie.current() / "ledgers") == dict.fromkeys((A, B), LedgerData(True, fenced, KEY))
    assert done.databases[0].guessed_fences == (2 if fenced else 0)


# --- safety -----------------------------------------------------------------------------------------------------------


def snapshot(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "LOG"
    }


def test_a_dry_run_changes_nothing(bookie: Bookie) -> None:
    places = bookie.log(0, (A, 0), (B, 0))
    bookie.database({A: OPEN}, places)
    before = snapshot(bookie.current())
    done = rebuild(bookie.layout, ledgers=True, locations=True, dry_run=True)
    assert snapshot(bookie.current()) == before
    assert done.dry_run
    assert [(row.ledgers, row.entries, row.backup) for row in done.databases] == [(2, None, None), (2, 2, None)]


@pytest.mark.parametrize(
    "error", [SimulatedCrash(), OSError(errno.ENOSPC, "No space left on device")], ids=["crash", "full"]
)
def test_a_crash_anywhere_leaves_the_old_or_the_new(bookie: Bookie, tmp_path: Path, error: BaseException) -> None:
    places = bookie.log(0, (A, 0), (B, 0))
    old = {(A, 0): places[A, 0] + 4}
    bookie.database({A: OPEN, B: FENCED}, old)
    shutil.copytree(bookie.current(), tmp_path / "original")
    seen = set()
    for at in range(1, 100):
        shutil.rmtree(bookie.current())
        shutil.copytree(tmp_path / "original", bookie.current())
        try:
            rebuild(bookie.layout, ledgers=True, locations=True, files=FailingFiles(at, error))
        except (SimulatedCrash, OSError):
            found = locations_in(bookie.current() / "locations")
            assert found in (old, places)
            assert ledgers_in(bookie.current() / "ledgers") == {A: OPEN, B: FENCED}
            backups = list(bookie.current().glob("locations.backup-*"))
            if found == places:
                assert locations_in(backups[0]) == old
            seen.add(found == places)
            rebuild(bookie.layout, ledgers=True, locations=True)
            assert locations_in(bookie.current() / "locations") == places
            assert not list(bookie.current().glob("*.unfinished"))
        else:
            break
    assert at > 8
    assert seen == {True, False}


def test_names_are_renamed_if_they_cannot_be_exchanged(bookie: Bookie) -> None:
    class OldFiles(Files):
        def exchange(self, one: Path, other: Path) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    places = bookie.log(0, (A, 0))
    bookie.database({A: OPEN}, {})
    done: Rebuild = rebuild(bookie.layout, ledgers=False, locations=True, files=OldFiles())
    assert locations_in(bookie.current() / "locations") == places
    assert locations_in(done.databases[0].backup or Path()) == {}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_interrupt_between_two_renames_leaves_the_new_database(bookie: Bookie, can_exchange: bool) -> None:
    class InterruptedFiles(Files):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            if can_exchange or source.name == "locations":
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, signal.SIGINT)

        def exchange(self, one: Path, other: Path) -> None:
            if not can_exchange:
                raise OSError(errno.EINVAL, "Invalid argument")
            super().exchange(one, other)

    places = bookie.log(0, (A, 0))
    bookie.database({A: OPEN}, {})
    with pytest.raises(KeyboardInterrupt):
        rebuild(bookie.layout, ledgers=False, locations=True, files=InterruptedFiles())
    assert locations_in(bookie.current() / "locations") == places
    (backup,) = bookie.current().glob("locations.backup-*")
    assert locations_in(backup) == {}
