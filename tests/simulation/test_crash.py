"""A bookie's storage on a disk that forgets what was not synced: whatever the moment of the crash, nothing that was
acknowledged is lost, and nothing that was stored is damaged. A failure prints the seed and the operation."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.journals import commit_batch
from support.long_runs import seeds
from support.servers import INTERLEAVED, SORTED
from support.simulated_disk import Fault, SimulatedCrash, SimulatedFiles

from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import BkctlError, BookieIOError, LedgerFenced
from bkctl.formats.availability import Availability
from bkctl.formats.entry import DigestManager, DigestType, read_lac_header
from bkctl.ids import LedgerId
from bkctl.storage.bookie_storage import BookieStorage, Checkpoint

SEEDS = seeds(3, 6)
#: The same ledger id in three scopes, and neighbours.
LEDGERS = [LedgerId(0, 5), LedgerId(7, 5), LedgerId(0xFFFF_0000_0000_0001, 5), LedgerId(0, 6), LedgerId(0, 0)]
STEPS = 40
SETTINGS: dict[str, Any] = {}


@pytest.fixture(params=[SORTED, INTERLEAVED], ids=["sorted", "interleaved"], autouse=True)
def storage_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test once for each storage class."""
    monkeypatch.setitem(SETTINGS, "ledger_storage_class", request.param)


@dataclass
class Acknowledged:
    """The bookie's promises, and all entries that it was ever given."""

    entries: dict[tuple[LedgerId, int], bytes] = field(default_factory=dict)
    given: dict[tuple[LedgerId, int], set[bytes]] = field(default_factory=dict)
    fenced: set[LedgerId] = field(default_factory=set)
    lacs: dict[LedgerId, int] = field(default_factory=dict)


def config_for(root: Path, journals: int = 1) -> BookieConfig:
    return BookieConfig(
        journal_directories=tuple(str(root / f"journal-{number}") for number in range(journals)),
        ledger_directories=(str(root / "ledgers-0"), str(root / "ledgers-1")),
        journal_max_size_mb=0,  # a new journal for every group
        journal_pre_alloc_size_mb=0,
        journal_max_backups=2,
        log_size_limit=6 * 1024,
        page_size=64,
        page_limit=4,
        open_file_limit=3,
        skip_list_size_limit=4096,
    ).with_changes(**SETTINGS)


def digest_of(ledger: LedgerId) -> DigestManager:
    kind = [DigestType.CRC32C, DigestType.CRC32, DigestType.HMAC][ledger.value % 3]
    return DigestManager(ledger, kind, b"secret")


class Workload:
    """Random operations of a bookie; `promised` grows as batches reach the disk."""

    def __init__(self, storage: BookieStorage, seed: int, promised: Acknowledged) -> None:
        self.storage = storage
        self.random = random.Random(seed)
        self.promised = promised
        self.under_way: Checkpoint | None = None

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.finish_checkpoint()

    def step(self) -> None:
        choice = self.random.random()
        if choice < 0.55:
            for _ in range(self.random.randint(1, 6)):
                self.add()
        elif choice < 0.60:
            self.fence()
        elif choice < 0.67:
            self.write_lac()
        elif choice < 0.80:
            self.commit()
        elif choice < 0.90:
            self.storage.seal_entries(1)
            self.storage.write_entries()
        elif self.under_way is not None:
            self.finish_checkpoint()
        elif choice < 0.95:
            self.storage.run_checkpoint()
        else:  # what comes meanwhile is not in it
            self.under_way = self.storage.checkpoints.begin()

    def finish_checkpoint(self) -> None:
        checkpoint, self.under_way = self.under_way, None
        if checkpoint is not None:
            written = False
            try:
                self.storage.checkpoints.write(checkpoint)
                written = True
            finally:
                self.storage.checkpoints.end(checkpoint, written=written)

    def add(self) -> None:
        ledger = self.random.choice(LEDGERS)
        known = [entry_id for each, entry_id in self.promised.given if each == ledger]
        again = bool(known) and self.random.random() < 0.15
        entry_id = self.random.choice(known) if again else max(known, default=-1) + self.random.choice((1, 1, 1, 9))
        digests = digest_of(ledger)
        # A copy of an entry has the same payload and length: only the LAC, and so the digest, may differ.
        content = random.Random(f"{ledger} {entry_id}")
        payload = content.randbytes(content.choice((0, 1, 30, 200, 900)))
        body = digests.seal(entry_id, self.random.randint(-1, entry_id), 1000 * (entry_id + 1), payload) + payload

        def note(error: OSError | None) -> None:
            if error is None:
                self.promised.entries[ledger, entry_id] = body

        try:
            self.storage.add(ledger, entry_id, digests.master_key, body, note, again)
        except LedgerFenced:
            return
        self.promised.given.setdefault((ledger, entry_id), set()).add(body)

    def fence(self) -> None:
        ledger = self.random.choice(LEDGERS[1:])
        self.storage.fence(ledger, digest_of(ledger).master_key, lambda error: self.note_fence(ledger, error))

    def note_fence(self, ledger: LedgerId, error: BaseException | None) -> None:
        if error is None:
            self.promised.fenced.add(ledger)

    def write_lac(self) -> None:
        ledger = self.random.choice(LEDGERS)
        lac = self.random.randint(0, 100)
        digests = digest_of(ledger)

        def note(error: BaseException | None) -> None:
            if error is None:
                self.promised.lacs[ledger] = lac

        self.storage.write_lac(ledger, digests.master_key, digests.seal_lac(lac), note)

    def commit(self) -> None:
        for commits in self.storage.commits:
            commit_batch(commits)


def check(storage: BookieStorage, promised: Acknowledged, *, torn: bool = False) -> None:
    """Everything promised is there, and everything there was once given."""
    for (ledger, entry_id), body in promised.entries.items():
        found = bytes(storage.read_entry(ledger, entry_id))
        # A later copy of the entry that was on its way may have replaced it.
        assert found == body or found in promised.given[ledger, entry_id], f"entry {entry_id} of {ledger!r}"
    for ledger in LEDGERS:
        handle = storage.get(ledger)
        if handle is None:
            continue
        for entry_id in Availability.parse(storage.availability(handle)()):
            found = bytes(storage.read_entry(ledger, entry_id))
            if (ledger, entry_id) in promised.entries or not torn:
                assert found in promised.given[ledger, entry_id], f"entry {entry_id} of {ledger!r} was never given"
    for ledger in promised.fenced:
        handle = storage.get(ledger)
        assert handle is not None
        assert handle.fenced, f"{ledger!r} was fenced"
    for ledger in promised.lacs:
        handle = storage.get(ledger)
        assert handle is not None
        assert read_lac_header(handle.explicit_lac).ledger == ledger


def survive(image: Path, promised: Acknowledged, journals: int, seed: int, *, torn: bool) -> None:
    """Start on what the crash left; then work, stop cleanly, and start again."""
    storage = BookieStorage(config_for(image, journals), files=SimulatedFiles(image, seed=seed))
    storage.open()
    check(storage, promised, torn=torn)
    work = Workload(storage, seed + 1, promised)
    work.run(8)
    work.commit()
    check(storage, promised, torn=torn)
    storage.close()
    again = BookieStorage(config_for(image, journals), files=SimulatedFiles(image, seed=seed))
    again.open()
    assert again.replayed == (0, 0), "a clean stop leaves nothing to replay"
    check(again, promised, torn=torn)


def crash_points(seed: int, total: int) -> Iterator[int]:
    """One operation in twenty at random, or with BKCTL_TEST_CRASH_POINTS=all every one."""
    if os.environ.get("BKCTL_TEST_CRASH_POINTS") == "all":
        yield from range(1, total + 1)
    else:
        yield from sorted(random.Random(seed).sample(range(1, total + 1), total // 20))


def start_and_work(
    root: Path, seed: int, promised: Acknowledged, journals: int, crash_at: int | None
) -> SimulatedFiles:
    root.mkdir()
    files = SimulatedFiles(root, seed=seed, crash_at=crash_at, short_writes=seed % 2 == 0)
    clock = iter(range(1000, 1_000_000))
    storage = BookieStorage(
        config_for(root, journals), files=files, clock_ms=lambda: next(clock), chance=random.Random(seed)
    )
    try:
        storage.open()
        work = Workload(storage, seed, promised)
        work.run(STEPS)
        work.commit()
        storage.close()
    except SimulatedCrash:
        pass
    return files


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("keep", "tear"), [(0.0, False), (0.5, False), (0.5, True)], ids=["forget", "some", "torn"])
def test_no_crash_loses_acknowledged_entries(tmp_path: Path, seed: int, keep: float, tear: bool) -> None:
    journals = 1 + seed % 2
    total = start_and_work(tmp_path / "whole", seed, Acknowledged(), journals, None).operations
    assert total > 200, "the workload does something"
    for crash_at in crash_points(seed, total):
        promised = Acknowledged()
        files = start_and_work(tmp_path / f"at-{crash_at}", seed, promised, journals, crash_at)
        image = files.crash(tmp_path / f"image-{crash_at}", keep=keep, tear=tear)
        try:
            survive(image, promised, journals, seed, torn=tear)
        except BaseException as error:
            error.add_note(f"seed {seed}, crash at operation {crash_at} of {total}, keep {keep}, tear {tear}")
            raise


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_kill_and_then_a_power_failure_lose_nothing(tmp_path: Path, seed: int) -> None:
    """Unsynced writes of a killed bookie are in the page cache for the next start, and not on the disk."""
    journals = 1 + seed % 2
    total = start_and_work(tmp_path / "whole", seed, Acknowledged(), journals, None).operations
    for kill_at in crash_points(seed, total):
        promised = Acknowledged()
        root = tmp_path / f"at-{kill_at}"
        files = start_and_work(root, seed, promised, journals, kill_at)
        files.crash_at = None
        BookieStorage(config_for(root, journals), files=files).open()
        image = files.crash(tmp_path / f"image-{kill_at}")
        try:
            survive(image, promised, journals, seed, torn=False)
        except BaseException as error:
            error.add_note(f"seed {seed}, killed at operation {kill_at} of {total}")
            raise


@pytest.mark.parametrize("syncs", [True, False], ids=["synced", "unsynced"])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_series_of_crashes_leads_to_a_refusal(tmp_path: Path, seed: int, syncs: bool) -> None:
    """Kills, power failures and full disks, most of them during a start: the next start never finds a journal lost."""
    for number in range(3):
        chance, promised = random.Random(f"{seed} {number}"), Acknowledged()
        (root := tmp_path / f"{number}").mkdir()
        files = SimulatedFiles(root, seed=seed)
        for life in range(8):
            files.crash_at = files.operations + chance.choice((chance.randint(1, 30), chance.randint(1, 300)))
            files.capacity_bytes = chance.choice((None, None, None, 0, chance.randint(1, 5_000)))
            config = config_for(root).with_changes(journal_sync_data=syncs, journal_max_size_mb=chance.randint(0, 1))
            storage = BookieStorage(config, files=files, chance=random.Random(seed))
            try:
                storage.open()
                Workload(storage, chance.randint(0, 99), promised).run(chance.randint(0, 30))
            except SimulatedCrash:
                pass
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017
            except BkctlError as error:
                assert "has no space" in error.message, f"seed {seed} {number}, life {life}"  # noqa: PT017
            if chance.random() < 0.7:  # else a kill: the next start has what the disk lacks
                keep = chance.random() if syncs else 0.0  # unsynced groups may leave holes otherwise
                root = files.crash(tmp_path / f"{number}-{life}", keep=keep, tear=chance.random() < 0.5)
                files = SimulatedFiles(root, seed=life)
        storage = BookieStorage(config_for(root), files=SimulatedFiles(root))
        storage.open()
        check(storage, promised if syncs else Acknowledged(), torn=True)


def test_clean_stop_after_a_journal_that_found_no_space(tmp_path: Path) -> None:
    """The stop's last journal takes the number of one that was half made: it is the one that the mark names."""
    root = tmp_path / "work"
    root.mkdir()
    files = SimulatedFiles(root)
    storage = BookieStorage(config_for(root), files=files)
    storage.open()
    promised = Acknowledged()
    work = Workload(storage, 2, promised)
    for _ in range(4):
        work.add()
    work.commit()
    files.faults.append(Fault("sync", "journal-0/current", errno.ENOSPC))
    work.add()
    work.commit()
    assert not files.faults, "the group found no space for its journal"
    storage.close()
    again = BookieStorage(config_for(root), files=files)
    again.open()
    check(again, promised)


def test_checker_finds_a_layer_that_lies_about_syncs(tmp_path: Path) -> None:
    """The simulation itself: without syncs something acknowledged is lost, or these tests would prove nothing."""

    class Liar(SimulatedFiles):
        def sync_directory(self, path: Path) -> None:
            self.step("sync", path)

    (tmp_path / "work").mkdir()
    files = Liar(tmp_path / "work", seed=1)
    storage = BookieStorage(config_for(tmp_path / "work"), files=files)
    storage.open()
    promised = Acknowledged()
    work = Workload(storage, 1, promised)
    work.run(STEPS)
    work.commit()
    assert promised.entries
    image = files.crash(tmp_path / "image")
    with pytest.raises(Exception, match=r"No ledger|missing|index|entry"):
        survive(image, promised, 1, 1, torn=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_full_disk_corrupts_nothing(tmp_path: Path, seed: int) -> None:
    """Space runs out at a random moment and comes back: failed groups were not acknowledged, all others are there."""
    for capacity in random.Random(seed).sample(range(1_000, 60_000), 8):
        root = tmp_path / f"capacity-{capacity}"
        root.mkdir()
        files = SimulatedFiles(root, seed=seed, short_writes=True)
        storage = BookieStorage(config_for(root), files=files, chance=random.Random(seed))
        storage.open()
        promised = Acknowledged()
        work = Workload(storage, seed, promised)
        files.capacity_bytes = capacity
        for _ in range(STEPS):
            try:
                work.step()
            except OSError:
                work.commit()
        files.capacity_bytes = None
        work.run(5)
        work.commit()
        check(storage, promised)
        image = files.crash(tmp_path / f"image-{capacity}")
        try:
            survive(image, promised, 1, seed, torn=False)
        except BaseException as error:
            error.add_note(f"seed {seed}, capacity {capacity}")
            raise


@pytest.mark.parametrize("seed", SEEDS)
def test_bookie_starts_on_a_full_disk(tmp_path: Path, seed: int) -> None:
    """After a crash, with no byte or few to write: what was acknowledged is served, and the journals stay until there
    is space."""
    root = tmp_path / "work"
    root.mkdir()
    files = SimulatedFiles(root, seed=seed)
    storage = BookieStorage(config_for(root), files=files, chance=random.Random(seed))
    storage.open()
    promised = Acknowledged()
    work = Workload(storage, seed, promised)
    work.run(STEPS)
    work.commit()
    for number, capacity in enumerate((0, 0, random.Random(seed).randrange(5_000))):
        image = files.crash(tmp_path / f"image-{number}")
        journals = sorted(image.glob("journal*/current/*.txn"))
        assert journals
        files = SimulatedFiles(image, seed=seed, capacity_bytes=capacity, short_writes=True)
        storage = BookieStorage(config_for(image), files=files, chance=random.Random(seed))
        storage.open()
        check(storage, promised)
        if capacity == 0:
            assert storage.no_space is not None
            assert sorted(image.glob("journal*/current/*.txn")) == journals
            check(storage, promised)
    files.capacity_bytes = None
    storage.run_checkpoint()
    work = Workload(storage, seed + 1, promised)
    work.run(STEPS)
    work.commit()
    check(storage, promised)
    survive(files.crash(tmp_path / "image"), promised, 1, seed, torn=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_failing_disk_operation_fails_only_its_requests(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    root = tmp_path / "work"
    root.mkdir()
    files = SimulatedFiles(root, seed=seed)
    storage = BookieStorage(config_for(root), files=files, chance=random.Random(seed))
    storage.open()
    promised = Acknowledged()
    work = Workload(storage, seed, promised)
    for _ in range(4):
        if storage.journals[0].failed is not None:  # The bookie ends.
            break
        work.run(8)
        kind, path = chance.choice((("write", ".txn"), ("create", ".txn"), ("write", ".log"), ("write", ".idx")))
        files.faults.append(Fault(kind, path, 5))
        for _ in range(8):
            try:
                work.step()
            except (OSError, BookieIOError):
                continue
        files.faults.clear()
        if storage.journals[0].failed is None:
            work.finish_checkpoint()
            storage.run_checkpoint()  # A ledger whose index the disk refused accepts entries again.
    if storage.journals[0].failed is None:
        work.commit()
        check(storage, promised)
    image = files.crash(tmp_path / "image")
    survive(image, promised, 1, seed, torn=False)


def test_failed_journal_sync_ends_the_journal(tmp_path: Path) -> None:
    """After a failed sync the system may have dropped the data and forgotten it: nothing is acknowledged any more."""
    root = tmp_path / "work"
    root.mkdir()
    files = SimulatedFiles(root)
    storage = BookieStorage(config_for(root).with_changes(journal_max_size_mb=1), files=files)
    storage.open()
    promised = Acknowledged()
    work = Workload(storage, 3, promised)
    work.add()
    work.commit()
    before = dict(promised.entries)
    work.add()
    files.faults.append(Fault("sync", ".txn", 5, times=9))
    work.commit()
    assert storage.journals[0].failed is not None
    work.add()
    with pytest.raises(Exception, match="failed"):
        work.commit()
    assert promised.entries == before


def test_real_and_simulated_files_hold_the_same_bytes(tmp_path: Path) -> None:
    trees = []
    for name, simulated in (("real", False), ("simulated", True)):
        root = tmp_path / name
        root.mkdir()
        files = SimulatedFiles(root) if simulated else Files()
        clock = iter(range(1000, 1_000_000))
        storage = BookieStorage(
            config_for(root), files=files, clock_ms=lambda clock=clock: next(clock), chance=random.Random(1)
        )
        storage.open()
        work = Workload(storage, 1, Acknowledged())
        work.run(STEPS)
        work.commit()
        storage.close()
        trees.append({str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()})
    assert trees[0] == trees[1]
