"""DbLedgerStorage's databases: read beside a running bookie and without a trace, written, and what damage gives."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.golden import DATA, bookies

from bkctl.config import BookieConfig
from bkctl.errors import AlreadyExists, BkctlError, Corrupt, DirectoryInUse, NotFound
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase, check_write_ahead_logs
from bkctl.formats.entry_log import unpack_location
from bkctl.formats.index import LedgerData, ledger_key
from bkctl.ids import LedgerId

KEY = b"k" * 20
GOLDEN = [bookie for bookie in bookies() if bookie.name == "db"]


def data(*, fenced: bool = False) -> LedgerData:
    return LedgerData(exists=True, fenced=fenced, master_key=KEY)


@pytest.fixture
def current(tmp_path: Path) -> Path:
    """A copy of what Apache's bookie left in its ledger directory."""
    return shutil.copytree(DATA / "4.18.0" / "db" / "ledgers" / "current", tmp_path / "current")


# --- Apache's -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bookie", GOLDEN, ids=lambda bookie: bookie.version)
def test_a_bookies_databases_match_apaches_shell(bookie) -> None:
    with LocationsDatabase.open(bookie.ledger_dir / "current" / "locations") as locations:
        found: dict[str, dict[int, tuple[int, int]]] = {}
        for ledger, entry_id, location in locations.locations():
            found.setdefault(str(ledger.ledger_id), {})[entry_id] = unpack_location(location)
        assert found == {ledger_id: answer["locations"] for ledger_id, answer in bookie.indexes.items()}
        for ledger_id, entries in found.items():
            ledger = LedgerId(0, int(ledger_id))
            assert locations.last_entry_id(ledger) == max(entries)
            assert [entry_id for _, entry_id, _ in locations.locations(ledger)] == sorted(entries)
    with LedgersDatabase.open(bookie.ledger_dir / "current" / "ledgers") as ledgers:
        known = dict(ledgers.ledgers())
        assert found.keys() <= {str(ledger.ledger_id) for ledger in known}
        assert all(each.exists and len(each.master_key) == 20 for each in known.values())
        assert ledgers.storage_flags() in (None, 0)
        first = min(known)
        assert ledgers.get(first) == known[first]
        assert ledgers.get(LedgerId(0, 1 << 62)) is None


def test_opening_a_database_leaves_no_trace(current: Path) -> None:
    def state() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in current.rglob("*")}

    before = state()
    with LocationsDatabase.open(current / "locations") as locations:
        assert next(locations.locations())
    assert state() == before


# --- ours -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope_id", [0, 7])
def test_written_locations_are_read_back(tmp_path: Path, scope_id: int) -> None:
    path = tmp_path / ("scoped-locations" if scope_id else "locations")
    one, two, three = (LedgerId(scope_id, number) for number in (1, 2, (1 << 63) - 1))
    with LocationsDatabase.create(path) as locations:
        assert locations.scoped == bool(scope_id)
        entries = [(one, entry) for entry in range(25_000)] + [(two, entry) for entry in (*range(10), 24_999)]
        assert locations.put_all((ledger, entry, entry + 5) for ledger, entry in entries) == 25_011
        locations.put(three, 3, 77)
        assert locations.get(three, 3) == 77
    assert "rocksdict-config.json" not in {each.name for each in path.iterdir()}
    with LocationsDatabase.open(path) as locations:
        assert [entry for _, entry, _ in locations.locations(two)] == [*range(10), 24_999]
        assert len(list(locations.locations())) == 25_012
        assert list(locations.locations(one))[4:6] == [(one, 4, 9), (one, 5, 10)]
        assert list(locations.locations(three)) == [(three, 3, 77)]
        assert [locations.get(one, entry) for entry in (-1, 0, 24_999, 25_000, 1 << 63)] == [0, 5, 25_004, 0, 0]
        assert [locations.last_entry_id(ledger) for ledger in (one, two, three)] == [24_999, 24_999, 3]
        assert locations.last_entry_id(LedgerId(scope_id, 9)) == -1
        other = LedgerId(7 - scope_id, 1)
        assert (locations.get(other, 0), locations.last_entry_id(other), list(locations.locations(other))) == (
            0,
            -1,
            [],
        )
        assert sum(map(len, locations.batches(count=1000))) == 25_012
    with LocationsDatabase.edit(path) as locations:
        locations.write(locations.batch_without([one]))
    with LocationsDatabase.open(path) as locations:
        assert locations.last_entry_id(one) == -1
        assert locations.last_entry_id(two) == 24_999


@pytest.mark.parametrize("exists", [False, True])
def test_locations_have_the_sizes_of_the_configuration(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "locations"
    if exists:
        with LocationsDatabase.serve(path, BookieConfig(db_storage_rocksdb_format_version=2)) as locations:
            locations.put(LedgerId(0, 7), 0, 1)
    config = BookieConfig(
        db_storage_rocksdb_block_cache_size=77 << 20,
        db_storage_rocksdb_write_buffer_size_mb=8,
        db_storage_rocksdb_sst_size_mb=9,
        db_storage_rocksdb_num_files_in_level0=5,
        db_storage_rocksdb_max_size_in_level1_mb=99,
    )
    with LocationsDatabase.serve(path, config) as locations:
        assert locations.get(LedgerId(0, 7), 0) == exists
        assert locations._database.property_int_value("rocksdb.block-cache-capacity") == 77 << 20
        lines = max(path.glob("OPTIONS-*")).read_text().split()
    assert {
        f"format_version={2 if exists else 5}",
        f"write_buffer_size={8 << 20}",
        f"target_file_size_base={9 << 20}",
        "level0_file_num_compaction_trigger=5",
        f"max_bytes_for_level_base={99 << 20}",
    } <= set(lines)


@pytest.mark.parametrize("options", [None, b"", b"damaged"])
def test_a_database_is_served_without_its_options(tmp_path: Path, options: bytes | None) -> None:
    path = tmp_path / "locations"
    with LocationsDatabase.serve(path, BookieConfig()) as locations:
        locations.put(LedgerId(0, 7), 0, 1)
    for file in path.glob("OPTIONS-*"):
        if options is None:
            file.rename(f"{file}.dbtmp")
        else:
            file.write_bytes(options)
    with LocationsDatabase.serve(path, BookieConfig()) as locations:
        assert locations.get(LedgerId(0, 7), 0) == 1


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this system does not count what a process reads")
def test_look_ups_keep_the_filter_of_a_large_table_in_memory(tmp_path: Path) -> None:
    def read_bytes() -> int:
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counts["rchar"])

    ledger, filter_bytes = LedgerId(0, 7), 625_000  # 10 bits an entry
    with LocationsDatabase.serve(tmp_path / "locations", BookieConfig()) as locations:
        assert locations.put_all((ledger, entry_id, entry_id + 1) for entry_id in range(500_000)) == 500_000
        locations.flush()
        assert locations.get(ledger, 1) == 2
        before = read_bytes()
        assert [locations.get(ledger, entry_id) for entry_id in range(100)] == list(range(1, 101))
        assert read_bytes() - before < filter_bytes


@pytest.mark.parametrize("scope_id", [0, 7])
def test_ledgers_are_written_and_read_back(tmp_path: Path, scope_id: int) -> None:
    path = tmp_path / ("scoped-ledgers" if scope_id else "ledgers")
    names = [LedgerId(scope_id, number) for number in (0, 1, 300, (1 << 63) - 1)]
    with LedgersDatabase.create(path) as ledgers:
        for ledger in names:
            ledgers.put(ledger, data())
        ledgers.put(names[1], data(fenced=True))
        ledgers.flush()
        ledgers.write(ledgers.batch_of({}, [names[0]]))
    with LedgersDatabase.open(path) as ledgers:
        assert list(ledgers.ledgers()) == [(names[1], data(fenced=True)), (names[2], data()), (names[3], data())]
        assert [ledger for ledger, _ in ledgers.ledgers(names[2])] == names[2:]
        assert ledgers.get(names[1]) == data(fenced=True)
        assert ledgers.get(names[0]) is None
        assert ledgers.storage_flags() is None


def test_storage_flags_are_not_listed_as_a_ledger(tmp_path: Path) -> None:
    with LedgersDatabase.create(tmp_path / "ledgers") as ledgers:
        ledgers.put(LedgerId(0, 1), data())
        ledgers.put_storage_flags(1)
    with LedgersDatabase.open(tmp_path / "ledgers") as ledgers:
        assert ledgers.storage_flags() == 1
        assert [ledger for ledger, _ in ledgers.ledgers()] == [LedgerId(0, 1)]


def test_the_later_of_two_keys_of_a_ledger_counts_as_in_apache(tmp_path: Path) -> None:
    """Apache's rebuild writes keys of 16 bytes, which shadow keys of 8 when its bookie loads them."""
    one, two = LedgerId(0, 1), LedgerId(0, 2)
    with LedgersDatabase.create(tmp_path / "ledgers") as ledgers:
        ledgers.put(one, data())
        ledgers.put(two, data())
        ledgers._batch().put(ledger_key(one) + bytes(8), data(fenced=True).serialize())
    with LedgersDatabase.edit(tmp_path / "ledgers") as ledgers:
        assert ledgers.get(one) == data(fenced=True)
        assert list(ledgers.ledgers()) == [(one, data(fenced=True)), (two, data())]
        ledgers.put(one, data())
        assert list(ledgers.ledgers()) == [(one, data()), (two, data())]
        ledgers.write(ledgers.batch_of({}, [one]))
        assert [ledger for ledger, _ in ledgers.ledgers()] == [two]


def test_a_database_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "locations"
    with pytest.raises(NotFound):
        LocationsDatabase.edit(path)
    with pytest.raises(NotFound):
        LocationsDatabase.open(path)
    with LocationsDatabase.create(path) as locations:
        locations.put(LedgerId(0, 1), 0, 5)
        with pytest.raises(AlreadyExists):
            LocationsDatabase.create(path)
        with pytest.raises(DirectoryInUse, match="stop the bookie"):
            LocationsDatabase.edit(path)
        locations.flush()
        with LocationsDatabase.open(path) as beside:
            assert beside.get(LedgerId(0, 1), 0) == 5


def test_closing_waits_for_calls_of_other_threads(tmp_path: Path) -> None:
    class Borrowed:
        """Refuses `close` as rocksdict does while another thread is in a call."""

        def __init__(self, database: Any) -> None:
            self._database, self.refusals_left = database, 2

        def flush(self, wait: bool) -> None:
            self._database.flush(wait)

        def close(self) -> None:
            if self.refusals_left:
                self.refusals_left -= 1
                raise RuntimeError("Already borrowed")
            self._database.close()

    database = LocationsDatabase.create(tmp_path / "locations")
    database._database = Borrowed(database._database)
    database.close()
    LocationsDatabase.edit(tmp_path / "locations").close()


def test_an_exception_discards_pending_writes(tmp_path: Path) -> None:
    path = tmp_path / "locations"

    def interrupted() -> None:
        with LocationsDatabase.create(path) as locations:
            locations.put(LedgerId(0, 1), 0, 5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    with LocationsDatabase.edit(path) as locations:
        assert locations.get(LedgerId(0, 1), 0) == 0


def test_keys_of_another_size_are_corrupt(tmp_path: Path) -> None:
    for name, kind in (("ledgers", LedgersDatabase), ("locations", LocationsDatabase)):
        with kind.create(tmp_path / name) as database:
            database._batch().put(b"short", b"")
        with kind.open(tmp_path / name) as database, pytest.raises(Corrupt, match=f"{name}: .* has 5 bytes"):
            list(database.ledgers() if isinstance(database, LedgersDatabase) else database.locations())


# --- damage ---------------------------------------------------------------------------------------------------------


def test_a_manifest_that_would_hang_rocksdb_is_corrupt(current: Path) -> None:
    (manifest,) = (current / "ledgers").glob("MANIFEST-*")
    size = manifest.stat().st_size
    manifest.write_bytes(manifest.read_bytes() + b"\x17\x2a\x80\xff" * 800_000)
    with pytest.raises(Corrupt, match=rf"{manifest}: .* at byte {size}"):
        LedgersDatabase.open(current / "ledgers")


def test_a_manifest_that_is_being_written_can_be_read(current: Path) -> None:
    (manifest,) = (current / "ledgers").glob("MANIFEST-*")
    whole = manifest.read_bytes()
    for tail in (whole[:5], whole[:20], bytes(40_000)):
        manifest.write_bytes(whole + tail)
        with LedgersDatabase.open(current / "ledgers") as ledgers:
            assert len(list(ledgers.ledgers())) > 20


def test_a_database_that_a_bookie_is_just_creating_is_waited_for(
    current: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "locations"
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            path.mkdir()
        elif len(pauses) == 3:
            shutil.copytree(current / "locations", path, dirs_exist_ok=True)

    monkeypatch.setattr("bkctl.files.rocksdb.time.sleep", pause)
    with LocationsDatabase.open(path) as database:
        assert next(database.locations())
    with pytest.raises(NotFound, match="has no database"):
        LocationsDatabase.open(tmp_path / "none")


def test_a_damaged_write_ahead_log_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "locations"
    locations = LocationsDatabase.create(path)
    locations.put_all((LedgerId(0, 1), entry, 5) for entry in range(50_000))
    assert locations.get(LedgerId(0, 1), 49_999) == 5
    shutil.copytree(path, tmp_path / "killed" / "locations")
    locations.close()
    killed = tmp_path / "killed" / "locations"
    with LocationsDatabase.open(killed) as locations:
        assert locations.last_entry_id(LedgerId(0, 1)) == 49_999
    assert list(check_write_ahead_logs(killed)) == []
    (log,) = killed.glob("*.log")
    whole = log.read_bytes()
    log.write_bytes(whole[:-100])
    assert list(check_write_ahead_logs(killed)) == []
    log.write_bytes(whole[:700_000] + b"\0\1" + whole[700_002:])
    (error,) = check_write_ahead_logs(killed)
    assert f"{log}: Record does not match its checksum at byte " in str(error)
    with LocationsDatabase.open(killed) as locations:
        assert 0 < locations.last_entry_id(LedgerId(0, 1)) < 49_999


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("IO error: While lock file: /b/ledgers/LOCK: Resource temporarily unavailable", DirectoryInUse),
        ("Corruption: block checksum mismatch: stored = 1, computed = 2", Corrupt),
        ("IO error: No space left on device: While appending to file: /b/ledgers/000004.log", BkctlError),
        ("IO error: While open a file for random read: /b/ledgers/000008.sst: Permission denied", BkctlError),
    ],
)
def test_rocksdb_errors_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, kind: type) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Exception(text)

    monkeypatch.setattr("rocksdict.Rdict", fail)
    with pytest.raises(BkctlError, match=text.split(":")[-1]) as raised:
        LedgersDatabase.create(tmp_path / "ledgers")
    assert raised.type is kind
