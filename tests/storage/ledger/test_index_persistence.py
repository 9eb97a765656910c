"""Index files and their pages in memory: bounds, full disks, crashes while a file moves."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from support.simulated_disk import Fault, SimulatedCrash, SimulatedFiles

from bkctl.disk import Files, StorageFile
from bkctl.files.index import LedgerIndexReader
from bkctl.formats import index as formats
from bkctl.ids import LedgerId
from bkctl.storage.entry_logger import Move
from bkctl.storage.ledger.index_pages import IndexInMemPageMgr
from bkctl.storage.ledger.index_persistence import IndexedHandle, IndexPersistenceMgr

PLAIN, SCOPED = LedgerId(0, 0x1234), LedgerId(7, 0x1234)


def open_index(root: Path, files: Files | None = None, **changes: Any) -> tuple[IndexPersistenceMgr, IndexInMemPageMgr]:
    files = files or Files()
    directories = [root / "a", root / "b"]
    for each in directories:
        files.make_directory(each)
    settings = {"page_size": 64, "open_file_limit": 3, "version": 1, "pick_directory": lambda: 0} | changes
    page_limit = settings.pop("page_limit", -1)
    persistence = IndexPersistenceMgr(directories, files, **settings)
    return persistence, IndexInMemPageMgr(persistence, page_size=64, page_limit=page_limit)


def flush(persistence: IndexPersistenceMgr, pages: IndexInMemPageMgr) -> None:
    written = False
    try:
        for handle, changed in pages.take_changes().items():
            persistence.write(handle, None, changed)
        written = True
    finally:
        pages.finish(written=written)


def fill(
    persistence: IndexPersistenceMgr, pages: IndexInMemPageMgr, ledger: LedgerId, *entry_ids: int
) -> IndexedHandle:
    handle = persistence.load(ledger) or persistence.create(ledger, b"key")
    for entry_id in entry_ids:
        pages.put(handle, [entry_id], [entry_id + 1])
    return handle


def locations(root: Path, ledger: LedgerId) -> dict[int, int]:
    """By a new start."""
    _, pages = open_index(root)
    return {each: pages.location(ledger, each) for each in pages.entry_ids(ledger, {})}


@pytest.mark.parametrize("ledger", [PLAIN, SCOPED], ids=str)
def test_locations_survive_a_flush(tmp_path: Path, ledger: LedgerId) -> None:
    persistence, pages = open_index(tmp_path)
    assert persistence.load(ledger) is None
    handle = fill(persistence, pages, ledger, 0, 7, 8, 1000)
    pages.put(handle, [16, 17, 19], [3, 4, 6])
    pages.put(handle, [24, 25, 26], [7, 8, 9])
    expected = {0: 1, 7: 8, 8: 9, 16: 3, 17: 4, 19: 6, 24: 7, 25: 8, 26: 9, 1000: 1001}
    for _ in range(2):
        assert {
            each: pages.location(ledger, each) for each in pages.entry_ids(ledger, pages.copy_of(ledger))
        } == expected
        flush(persistence, pages)
    assert pages.is_clean
    assert locations(tmp_path, ledger) == expected
    again = open_index(tmp_path)[0].load(ledger)
    assert again is not None
    assert (again.last_entry, again.master_key, again.fenced) == (1000, b"key", False)
    assert persistence.ledgers() == {ledger.value}
    assert persistence.has_scoped_ledgers() == ledger.is_scoped


def test_pages_and_open_files_stay_within_limits(tmp_path: Path) -> None:
    persistence, pages = open_index(tmp_path, page_limit=8)
    ledgers = [LedgerId(each % 2, each) for each in range(20)]
    for ledger in ledgers:
        fill(persistence, pages, ledger, 0, 9)
        if pages.is_full:
            flush(persistence, pages)
        assert len(pages) <= 8
    flush(persistence, pages)
    for ledger in ledgers:
        assert [pages.location(ledger, each) for each in (0, 9, 10)] == [1, 10, 0]
        assert len(pages) <= 8
        assert len(persistence._open) <= 3


def test_page_changed_during_a_write_is_rewritten(tmp_path: Path) -> None:
    persistence, pages = open_index(tmp_path)
    handle = fill(persistence, pages, PLAIN, 0, 1)
    taken = pages.take_changes()
    pages.put(handle, [2], [3])
    pages.move(handle, [Move(PLAIN, 0, 1, 77), Move(PLAIN, 1, 99, 88)])
    assert pages.changed_ledgers() == {PLAIN}
    for each, changed in taken.items():
        persistence.write(each, None, changed)
    pages.finish(written=True)
    assert locations(tmp_path, PLAIN) == {0: 1, 1: 2}
    flush(persistence, pages)
    assert locations(tmp_path, PLAIN) == {0: 77, 1: 2, 2: 3}


def test_next_flush_writes_pages_of_a_failed_one(tmp_path: Path) -> None:
    files = SimulatedFiles(tmp_path)
    persistence, pages = open_index(tmp_path, files)
    fill(persistence, pages, PLAIN, 0)
    files.faults.append(Fault("sync", ".idx", errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        flush(persistence, pages)
    assert not pages.is_clean
    flush(persistence, pages)
    assert locations(files.crash(tmp_path / "image"), PLAIN) == {0: 1}


def test_index_files_leave_a_full_directory_crash_safely(tmp_path: Path) -> None:
    def move(root: Path, crash_at: int | None) -> SimulatedFiles:
        root.mkdir()
        files = SimulatedFiles(root)
        persistence, pages = open_index(root, files, is_writable=lambda number: number == 1)
        fill(persistence, pages, PLAIN, 0, 9)
        flush(persistence, pages)
        fill(persistence, pages, PLAIN, 1, 100)
        files.faults.append(Fault("write", "/a/", errno.ENOSPC, times=99))
        files.operations, files.crash_at = 0, crash_at
        try:
            flush(persistence, pages)
        except SimulatedCrash:
            assert crash_at
        return files

    total = move(tmp_path / "whole", None).operations
    assert [path.relative_to(tmp_path).parts[1] for path in tmp_path.rglob("*.idx*")] == ["b"]
    assert locations(tmp_path / "whole", PLAIN) == {0: 1, 1: 2, 9: 10, 100: 101}
    for crash_at in range(1, total + 1):
        image = move(tmp_path / f"at-{crash_at}", crash_at).crash(tmp_path / f"image-{crash_at}")
        assert locations(image, PLAIN).items() >= {0: 1, 9: 10}.items(), crash_at


def test_index_cost_depends_on_entries_not_on_ids(tmp_path: Path) -> None:
    high = formats.ENTRY_ID_MAX
    persistence, pages = open_index(tmp_path)
    handle = fill(persistence, pages, PLAIN, 0, 9, high)
    flush(persistence, pages)
    full = tmp_path / "b" / handle.index_path.relative_to(tmp_path / "a")
    persistence._leave(handle, full)  # as for a full directory
    assert full.stat().st_size > high * 8
    assert full.stat().st_blocks * 512 < 1 << 20
    assert locations(tmp_path, PLAIN) == {0: 1, 9: 10, high: high + 1}
    # A crash may keep the size and lose the page: what is left is a hole as long as the id says.
    size = full.stat().st_size
    os.truncate(full, formats.HEADER_SIZE + 8 * 1024)
    os.truncate(full, size)
    found = open_index(tmp_path)[0].load(PLAIN)
    assert found is not None
    assert found.last_entry == 9
    with LedgerIndexReader.open(full) as reader:
        assert reader.last_entry_id == 9


def test_new_index_file_leaves_a_full_directory(tmp_path: Path) -> None:
    files = SimulatedFiles(tmp_path)
    persistence, pages = open_index(tmp_path, files)
    fill(persistence, pages, PLAIN, 0)
    files.faults.append(Fault("write", "/a/", errno.ENOSPC, times=99))
    flush(persistence, pages)
    assert [path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.idx*")] == ["b"]
    assert locations(tmp_path, PLAIN) == {0: 1}


def test_flush_removes_files_of_doomed_ledgers(tmp_path: Path) -> None:
    persistence, pages = open_index(tmp_path)
    handle = fill(persistence, pages, PLAIN, 0)
    fill(persistence, pages, SCOPED, 0)
    flush(persistence, pages)
    pages.put(handle, [1], [2])
    taken = pages.take_changes()
    handle.deleted = True
    persistence.doom(PLAIN)
    pages.forget(PLAIN)
    assert persistence.ledgers() == {SCOPED.value}
    assert persistence.load(PLAIN) is None
    assert pages.location(PLAIN, 0) == 0
    assert persistence.has_doomed
    for each, changed in taken.items():
        persistence.write(each, None, changed)
    pages.finish(written=True)
    persistence.remove_doomed()
    assert not persistence.has_doomed
    assert len(list(tmp_path.rglob("*.idx"))) == 1
    persistence.doom(SCOPED)
    again = persistence.create(SCOPED, b"new")
    pages.forget(SCOPED)
    pages.put(again, [5], [6])
    flush(persistence, pages)
    persistence.remove_doomed()
    assert locations(tmp_path, SCOPED) == {5: 6}


def test_missing_index_directory_is_an_error(tmp_path: Path) -> None:
    """Else its entries would be collected: somebody unmounted a disk."""
    persistence, pages = open_index(tmp_path, pick_directory=lambda: 1)
    handle = fill(persistence, pages, PLAIN, 0)
    flush(persistence, pages)
    again, _ = open_index(tmp_path)
    (tmp_path / "b").rename(tmp_path / "away")
    for ask in (again.ledgers, lambda: again.load(PLAIN), lambda: again.read_page(PLAIN, 0)):
        with pytest.raises(FileNotFoundError):
            ask()
    pages.put(handle, [1000], [1001])
    with pytest.raises(FileNotFoundError):
        flush(persistence, pages)
    assert not (tmp_path / "b").exists()
    (tmp_path / "away").rename(tmp_path / "b")
    assert again.ledgers() == {PLAIN.value}
    flush(persistence, pages)
    assert locations(tmp_path, PLAIN) == {0: 1, 1000: 1001}


@pytest.mark.parametrize("ledger", [PLAIN, SCOPED], ids=str)
def test_lists_a_ledger_whose_relocation_crashed(tmp_path: Path, ledger: LedgerId) -> None:
    persistence, pages = open_index(tmp_path)
    path = fill(persistence, pages, ledger, 0).index_path
    flush(persistence, pages)
    path.rename(path.with_name(f"{path.name}.rloc"))
    assert open_index(tmp_path)[0].ledgers() == {ledger.value}
    assert locations(tmp_path, ledger) == {0: 1}


def test_recreated_ledger_does_not_use_the_old_open_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files()
    persistence, pages = open_index(tmp_path, files)
    old = fill(persistence, pages, PLAIN, 0)
    flush(persistence, pages)
    again, pages = open_index(tmp_path, files)
    open_file = files.open

    def open_and_delete(path: Path, *, create: bool = False) -> StorageFile:
        file = open_file(path, create=create)
        monkeypatch.undo()
        again.doom(PLAIN)
        pages.put(again.create(PLAIN, b"key"), [1], [2])
        return file

    monkeypatch.setattr(files, "open", open_and_delete)
    assert again.read_page(old.ledger, 0)[0] == 1
    flush(again, pages)
    assert locations(tmp_path, PLAIN) == {1: 2}


def test_finds_a_file_that_moves_during_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    persistence, pages = open_index(tmp_path, pick_directory=lambda: 1)
    source = fill(persistence, pages, PLAIN, 0).index_path
    flush(persistence, pages)
    again, _ = open_index(tmp_path)
    exists = Path.exists
    moved = False

    def exists_and_move(path: Path) -> bool:
        nonlocal moved
        found = exists(path)
        if not moved and tmp_path / "a" in path.parents:
            moved = True
            target = tmp_path / "a" / source.relative_to(tmp_path / "b")
            target.parent.mkdir(parents=True)
            source.rename(target)
        return found

    monkeypatch.setattr(Path, "exists", exists_and_move)
    assert again.read_page(PLAIN, 0)[0] == 1
