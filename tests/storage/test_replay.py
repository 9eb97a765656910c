"""Journals at a start: those that crashes leave are replayed."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

import pytest
from support.journals import flush_journals
from support.simulated_disk import Fault, SimulatedFiles

from bkctl.config import BookieConfig
from bkctl.errors import Corrupt
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.journal import write_header
from bkctl.ids import LedgerId
from bkctl.storage.bookie_storage import BookieStorage

LEDGER = LedgerId(0, 5)
DIGESTS = DigestManager(LEDGER, DigestType.CRC32C, b"secret")


def open_storage(root: Path, files: SimulatedFiles | None = None, **changes: Any) -> BookieStorage:
    config = BookieConfig(
        journal_directories=(str(root / "journal"),),
        ledger_directories=(str(root / "ledgers"),),
        journal_pre_alloc_size_mb=0,
        journal_max_size_mb=0,  # a new journal for every group
        entry_log_file_preallocation_enabled=False,
    ).with_changes(**changes)
    storage = BookieStorage(config, files=files, clock_ms=lambda: 0xA, chance=random.Random(1))
    storage.open()
    return storage


def add(storage: BookieStorage, *entry_ids: int, size: int = 100) -> None:
    for entry_id in entry_ids:
        body = DIGESTS.seal(entry_id, entry_id - 1, size, bytes(size)) + b"x" * size
        storage.add(LEDGER, entry_id, DIGESTS.master_key, body, None)
        flush_journals(storage)


def test_a_mark_never_points_at_unsynced_bytes(tmp_path: Path) -> None:
    """So what a power failure leaves is never shorter than its mark."""
    for number, syncs in enumerate((False, True)):
        (root := tmp_path / f"killed-{number}").mkdir()
        files = SimulatedFiles(root)
        storage = open_storage(root, files, journal_sync_data=syncs, journal_max_size_mb=1)
        add(storage, 0, 1)
        storage.run_checkpoint()
        if syncs:  # a bookie that is killed before its sync, and starts again on a full disk
            files.crash_at = files.operations + 2
            with pytest.raises(BaseException, match="sync"):
                add(storage, 2)
            files.crash_at = None
            files.faults += [Fault("create", "c.txn", errno.ENOSPC, 9)]
            open_storage(root, files).run_checkpoint()
        image = files.crash(tmp_path / f"image-{number}")
        open_storage(image).close()


@pytest.mark.parametrize("name", ["7fffffffffffffff.txn", "ffffffffffffffff.txn"])
def test_a_journal_name_without_a_next_id_is_refused(tmp_path: Path, name: str) -> None:
    open_storage(tmp_path)
    (tmp_path / "journal/current" / name).write_bytes(write_header(6))
    with pytest.raises(Corrupt, match=f"{name} in .* leaves no ids for later journals"):
        open_storage(tmp_path)
