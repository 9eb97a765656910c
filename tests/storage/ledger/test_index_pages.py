"""IndexInMemPageMgr: what several threads do to the pages of one ledger at a time."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from bkctl.disk import Files
from bkctl.formats.index import HEADER_SIZE
from bkctl.ids import LedgerId
from bkctl.storage.entry_logger import Move
from bkctl.storage.ledger.index_pages import IndexInMemPageMgr
from bkctl.storage.ledger.index_persistence import IndexedHandle, IndexPersistenceMgr

LEDGER = LedgerId(7, 0x1234)
PAGE_SIZE = 64
SLOTS = PAGE_SIZE // 8


def open_index(root: Path) -> tuple[IndexPersistenceMgr, IndexInMemPageMgr]:
    root.mkdir(exist_ok=True)
    persistence = IndexPersistenceMgr(
        [root], Files(), page_size=PAGE_SIZE, open_file_limit=10, version=1, pick_directory=lambda: 0
    )
    return persistence, IndexInMemPageMgr(persistence, page_size=PAGE_SIZE, page_limit=4)


def flush(persistence: IndexPersistenceMgr, pages: IndexInMemPageMgr) -> None:
    for handle, changed in pages.take_changes().items():
        persistence.write(handle, None, changed)
    pages.finish(written=True)


def test_move_by_another_handle_keeps_later_changes(tmp_path: Path) -> None:
    persistence, pages = open_index(tmp_path)
    handle = persistence.create(LEDGER, b"key")
    pages.put(handle, [0], [100])
    flush(persistence, pages)
    borrowed = persistence.load(LEDGER)
    assert borrowed is not None
    pages.put(handle, [1], [101])
    pages.move(borrowed, [Move(LEDGER, 0, 100, 200)])
    flush(persistence, pages)
    pages.put(handle, [2], [102])
    flush(persistence, pages)
    assert list(open_index(tmp_path)[0].read_page(LEDGER, 0))[:3] == [200, 101, 102]


def test_page_evicted_during_a_move_is_reread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    persistence, pages = open_index(tmp_path)
    handle = persistence.create(LEDGER, b"key")
    pages.put(handle, [0], [100])
    flush(persistence, pages)
    borrowed = persistence.load(LEDGER)
    assert borrowed is not None
    for entry_id in range(1, 2 * SLOTS):
        pages.put(handle, [entry_id], [100 + entry_id])
    flush(persistence, pages)
    load: Callable[[tuple[LedgerId, int]], array[int]] = pages._load
    evictions = 3

    def load_and_evict(key: tuple[LedgerId, int]) -> array[int]:
        nonlocal evictions
        page = load(key)
        if evictions:
            evictions -= 1
            pages.forget(LEDGER)
        return page

    monkeypatch.setattr(pages, "_load", load_and_evict)
    pages.move(borrowed, [Move(LEDGER, SLOTS + 1, 101 + SLOTS, 200)])
    flush(persistence, pages)
    expected = [100 + entry_id for entry_id in range(SLOTS, 2 * SLOTS)]
    expected[1] = 200
    assert list(open_index(tmp_path)[0].read_page(LEDGER, 1)) == expected


def test_page_changed_during_a_flush_counts_once(tmp_path: Path) -> None:
    _, pages = open_index(tmp_path)
    handles = [IndexedHandle(LedgerId(0, number), b"key", tmp_path / f"{number}.idx") for number in (1, 2)]
    for handle in handles:
        pages.put(handle, [0], [100])
    pages.take_changes()
    for handle in handles:
        pages.put(handle, [1], [101])
    assert not pages.is_full, "two of four pages"
    pages.put(handles[0], [SLOTS], [102])
    assert pages.is_full, "three of four"
    pages.finish(written=False)
    assert pages.is_full
    pages.forget(handles[0].ledger)
    assert not pages.is_full
    assert pages.changed_count == 1


@pytest.mark.parametrize("entry_ids", [[0], [SLOTS - 1], [1, 2, 4], [3, 4, 5]])
def test_pages_are_padded_when_written(tmp_path: Path, entry_ids: list[int]) -> None:
    persistence, pages = open_index(tmp_path)
    handle = persistence.create(LEDGER, b"key")
    locations = [100 + entry_id for entry_id in entry_ids]
    pages.put(handle, entry_ids, locations)
    assert [pages.location(LEDGER, entry_id) for entry_id in range(SLOTS) if entry_id in entry_ids] == locations
    assert pages.location(LEDGER, SLOTS - 1) in (0, 100 + SLOTS - 1)
    flush(persistence, pages)
    assert handle.index_path.stat().st_size == HEADER_SIZE + PAGE_SIZE
    expected = [100 + slot if slot in entry_ids else 0 for slot in range(max(entry_ids) + 1)]
    again, others = open_index(tmp_path)
    assert list(again.read_page(LEDGER, 0)) == expected, "without the padding, which would fill memory"
    assert [others.location(LEDGER, slot) for slot in range(SLOTS)][: len(expected)] == expected
    assert others.location(LEDGER, SLOTS - 1) == (expected[SLOTS - 1] if len(expected) == SLOTS else 0)
