"""The same crashes and full disks for DbLedgerStorage, whose databases do not go through the file layer.

Each of their synced writes is one step of the simulation: a crash comes before it, and then the whole write is missing,
or behind it. RocksDB itself is trusted with torn writes of its own files; SIGKILLs are in tests/bookie/test_kills.py.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from simulation import test_crash as crash
from support.long_runs import seeds
from support.servers import DB
from support.simulated_disk import SimulatedFiles

from bkctl.errors import BkctlError

#: Databases take long to open: fewer seeds than for index files.
SEEDS = seeds(2, 2)
POINTS = 3


class RecordingFiles(SimulatedFiles):
    """Notes which operations were writes of databases."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.database_writes: list[int] = []

    def note_written(self, directory: Path) -> None:
        super().note_written(directory)
        self.database_writes.append(self.operations)


@pytest.fixture(autouse=True)
def databases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(crash.SETTINGS, "ledger_storage_class", DB)
    monkeypatch.setattr(crash, "SimulatedFiles", RecordingFiles)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("keep", "tear"), [(0.0, False), (0.5, True)], ids=["forget", "torn"])
def test_no_crash_around_a_database_write_loses_acknowledged_entries(
    tmp_path: Path, seed: int, keep: float, tear: bool
) -> None:
    journals = 1 + seed % 2
    whole = crash.start_and_work(tmp_path / "whole", seed, crash.Acknowledged(), journals, None)
    assert isinstance(whole, RecordingFiles)
    assert len(whole.database_writes) > 20, "the workload does something"
    count = len(whole.database_writes) if os.environ.get("BKCTL_TEST_CRASH_POINTS") == "all" else POINTS
    writes = random.Random(seed).sample(whole.database_writes, count)
    for crash_at in sorted({write + after for write in writes for after in (0, 1)}):
        promised = crash.Acknowledged()
        files = crash.start_and_work(tmp_path / f"at-{crash_at}", seed, promised, journals, crash_at)
        image = files.crash(tmp_path / f"image-{crash_at}", keep=keep, tear=tear)
        try:
            crash.survive(image, promised, journals, seed, torn=tear)
        except BaseException as error:
            error.add_note(f"seed {seed}, crash at operation {crash_at}, keep {keep}, tear {tear}")
            raise


def test_checker_finds_a_layer_that_forgets_databases(tmp_path: Path) -> None:
    """The simulation itself: a bookie that did not wait for its databases would lose what was acknowledged."""

    class Forgetful(SimulatedFiles):
        def note_written(self, directory: Path) -> None:
            if self.operations < 100:
                super().note_written(directory)

    root = tmp_path / "work"
    root.mkdir()
    files = Forgetful(root, seed=1)
    storage = crash.BookieStorage(crash.config_for(root), files=files)
    storage.open()
    promised = crash.Acknowledged()
    work = crash.Workload(storage, 1, promised)
    work.run(crash.STEPS)
    work.commit()
    storage.run_checkpoint()
    image = files.crash(tmp_path / "image")
    with pytest.raises((BkctlError, AssertionError)):
        crash.survive(image, promised, 1, 1, torn=False)


@pytest.mark.parametrize("seed", SEEDS[:1])
def test_full_disk_corrupts_nothing(tmp_path: Path, seed: int) -> None:
    crash.test_full_disk_corrupts_nothing(tmp_path, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_failing_disk_operation_fails_only_its_requests(tmp_path: Path, seed: int) -> None:
    crash.test_failing_disk_operation_fails_only_its_requests(tmp_path, seed)
