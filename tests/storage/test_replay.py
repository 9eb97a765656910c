"""Journals that lost bytes or whole files are refused at a start; those that crashes leave are replayed."""

from __future__ import annotations

import errno
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.journals import flush_journals
from support.simulated_disk import Fault, SimulatedFiles

from bkctl.config import BookieConfig
from bkctl.errors import Corrupt
from bkctl.files.journal import read_last_mark
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.journal import LogMark, write_header
from bkctl.ids import LedgerId
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.replay import JournalReplay

LEDGER = LedgerId(0, 5)
DIGESTS = DigestManager(LEDGER, DigestType.CRC32C, b"secret")
MIB = 1 << 20


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


def journals_of(root: Path) -> list[Path]:
    return sorted((root / "journal/current").glob("*.txn"))


def set_mark(root: Path, journal_id: int, offset: int) -> None:
    (root / "ledgers/current/lastMark").write_bytes(LogMark(journal_id, offset).serialize())


def cut(size: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def zero(path: Path) -> None:
    path.write_bytes(bytes(MIB))


@pytest.mark.parametrize("damage", [cut(0), cut(4), cut(100), zero], ids=["empty", "4", "100", "zeros"])
def test_a_marked_journal_that_lost_bytes_is_refused(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    add(open_storage(tmp_path, journal_max_size_mb=1), 0, 1)
    (path,) = journals_of(tmp_path)
    assert read_last_mark([tmp_path / "ledgers"]) == LogMark(0xB, 512)
    damage(path)
    with pytest.raises(
        Corrupt, match=rf"{path.name}: the last mark points at byte 512, .*acknowledged may be"
    ) as refused:
        open_storage(tmp_path)
    assert "skipReplayJournalInvalidRecord=true" in str(refused.value.hint)
    assert open_storage(tmp_path, skip_replay_journal_invalid_record=True).replayed == (0, 0)


def test_a_mark_behind_every_byte_is_refused_and_skipping_replays_the_whole_journal(tmp_path: Path) -> None:
    add(open_storage(tmp_path), 0, 1)
    set_mark(tmp_path, 0xB, 1 << 40)
    with pytest.raises(Corrupt, match=rf"b.txn: the last mark points at byte {1 << 40}, behind its end"):
        open_storage(tmp_path)
    assert open_storage(tmp_path, skip_replay_journal_invalid_record=True).replayed == (2, 0)


@pytest.mark.parametrize(
    ("content", "mark"),
    [
        (b"", (0xB, 0)),
        (bytes(512), (0xB, 0)),
        (bytes(MIB), (0xB, 0)),
        (bytes(MIB), (0xB, 4)),  # Java's replay leaves the mark there
        (b"BKLG", (0xB, 4)),
        (bytes(MIB), (0, 0)),
        (bytes(MIB), (0xA, 512)),
        (b"", (0xA, 512)),
        (write_header(6), (0xB, 512)),
    ],
)
def test_journals_of_bookies_killed_at_their_start_are_replayed(
    tmp_path: Path, content: bytes, mark: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("journal", "ledgers"):
        (tmp_path / name / "current").mkdir(parents=True)
    (tmp_path / "journal/current/a.txn").write_bytes(write_header(6))
    (tmp_path / "journal/current/b.txn").write_bytes(content)
    set_mark(tmp_path, *mark)
    with caplog.at_level(logging.WARNING):
        open_storage(tmp_path)
    assert "lost" not in caplog.text


def test_a_journal_missing_behind_the_mark_is_refused(tmp_path: Path) -> None:
    add(open_storage(tmp_path), 0, 1, 2, 3)
    assert [path.name for path in journals_of(tmp_path)] == ["b.txn", "c.txn", "d.txn", "e.txn", "f.txn"]
    for name, problem in (
        ("c.txn", "c.txn is missing between b.txn and d.txn"),
        ("d.txn", "c.txn to d.txn are missing between b.txn and e.txn"),
        ("b.txn", "b.txn is missing, but the last mark names it"),
    ):
        (tmp_path / "journal/current" / name).unlink()
        with pytest.raises(Corrupt, match=f"{problem}. Entries that were acknowledged may be in it") as refused:
            open_storage(tmp_path)
    assert "skipReplayJournalInvalidRecord=true" in str(refused.value.hint)
    assert open_storage(tmp_path, skip_replay_journal_invalid_record=True).replayed == (0, 2)


@pytest.mark.parametrize("damage", [cut(0), cut(100), cut(700), zero], ids=["empty", "100", "700", "zeros"])
def test_only_the_end_of_the_last_journal_was_never_acknowledged(
    tmp_path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    add(open_storage(tmp_path), 0, 1, 2, 3, size=1000)
    _, _, before, _, last = journals_of(tmp_path)
    damage(before)
    cut(700)(last)
    with caplog.at_level(logging.WARNING):
        assert open_storage(tmp_path).replayed == (2, 0)
    (about,) = (line for line in caplog.messages if before.name in line)
    assert (
        "later journals have records. Unless a crash left the file so, entries that were acknowledged are lost" in about
    )
    (about,) = (line for line in caplog.messages if last.name in line)
    assert "nothing in it was acknowledged" in about


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


def test_new_ledgers_leave_memory_while_journals_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"journal_max_size_mb": 16, "open_file_limit": 20, "page_limit": 200, "skip_list_size_limit": 1 << 16}
    storage = open_storage(tmp_path, **changes)
    for number in range(600):
        ledger = LedgerId(0, number)
        digests = DigestManager(ledger, DigestType.CRC32C, b"secret")
        storage.add(ledger, 0, digests.master_key, digests.seal(0, -1, 1000, bytes(1000)) + bytes(1000), None)
    flush_journals(storage)
    held = []
    whole = JournalReplay._write_when_full

    def write_when_full(replay: JournalReplay) -> None:
        whole(replay)
        held.append(len(replay._ledgers.handles))

    monkeypatch.setattr(JournalReplay, "_write_when_full", write_when_full)
    again = open_storage(tmp_path, **changes)
    assert len(held) > 100
    assert max(held) < 300
    assert all(again.get(LedgerId(0, number)) for number in range(600))
    again.close()
