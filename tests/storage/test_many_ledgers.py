"""A bookie with many ledgers: what it keeps in memory for each."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from support.journals import flush_journals
from support.servers import DB, INTERLEAVED, SORTED

from bkctl.config import BookieConfig
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.ids import U64_MAX, LedgerId, LedgerIdSet
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.entry_log_metadata import EntryLogMetadata, EntryLogMetadataMap, SizesByLedger
from bkctl.storage.ledger.sorted_ledger_storage import SortedLedgerStorage

LEDGERS = [*(LedgerId(0, number) for number in range(1, 41)), *(LedgerId(scope, 3) for scope in range(1, 21))]
LIMIT = 8
MANY = 20_000


def open_storage(root: Path, storage_class: str) -> BookieStorage:
    config = BookieConfig(
        journal_directories=(str(root / "journal"),),
        ledger_directories=(str(root / "ledgers"),),
        ledger_storage_class=storage_class,
        journal_pre_alloc_size_mb=0,
        journal_max_backups=0,
        log_size_limit=2048,
        open_file_limit=LIMIT,
    )
    storage = BookieStorage(config)
    storage.open()
    return storage


def fill(storage: BookieStorage) -> None:
    for ledger in LEDGERS:
        digests = DigestManager(ledger, DigestType.CRC32C, b"secret")
        storage.add(ledger, 0, digests.master_key, digests.seal(0, -1, 5, b"hello") + b"hello", None)
    flush_journals(storage)
    storage.run_checkpoint()


@pytest.mark.parametrize("storage_class", [SORTED, INTERLEAVED, DB])
def test_reads_of_many_ledgers_keep_few_in_memory(tmp_path: Path, storage_class: str) -> None:
    """No flush comes between, which would evict them."""
    storage = open_storage(tmp_path, storage_class)
    fill(storage)
    storage.close()
    again = open_storage(tmp_path, storage_class)
    watched = again.get(LEDGERS[0])
    assert watched is not None
    watched.watch(0, lambda: None)
    for ledger in LEDGERS:
        assert bytes(again.read_entry(ledger, 0)).endswith(b"hello")
        assert len(again.ledgers.handles) <= LIMIT + LIMIT // 4 + 1
        assert ledger in again.ledgers.handles
    assert again.get(LEDGERS[0]) is watched, "a ledger that a long poll waits for stays"
    if isinstance(again.ledgers, SortedLedgerStorage):
        pages = again.ledgers.pages
        assert len(pages) == len(LEDGERS)
        assert sum(map(len, pages._pages.values())) == len(LEDGERS), "a location each, not a page each"
    again.close()


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("storage_class", [SORTED, INTERLEAVED, DB])
def test_fence_stays_in_memory_until_a_flush_has_written_it(
    tmp_path: Path, storage_class: str, is_written: bool
) -> None:
    """Evicted before, its ledger would be loaded without the fence, and take entries again."""
    storage = open_storage(tmp_path, storage_class)
    fill(storage)
    before, during = list(storage.ledgers.handles)[:2]

    def fence(ledger: LedgerId) -> None:
        storage.fence(ledger, DigestManager(ledger, DigestType.CRC32C, b"secret").master_key, lambda error: None)
        flush_journals(storage)

    def are_fenced() -> bool:
        for ledger in LEDGERS:
            storage.read_entry(ledger, 0)  # and many ledgers come after those two
        return all(handle is not None and handle.fenced for handle in map(storage.get, (before, during)))

    fence(before)
    handle = storage.get(during)
    assert handle is not None
    storage.ledgers.change_header(handle)
    checkpoint = storage.checkpoints.begin()
    assert checkpoint is not None
    fence(during)
    assert are_fenced()
    if is_written:
        storage.checkpoints.write(checkpoint)
    storage.checkpoints.end(checkpoint, written=is_written)
    assert are_fenced()
    storage.run_checkpoint()
    assert are_fenced()
    assert storage.get(during) is not handle, "what is on disk is evicted again"
    storage.close()


def test_ledgers_of_a_log_keep_their_sizes(tmp_path: Path) -> None:
    storage = open_storage(tmp_path, SORTED)
    fill(storage)
    logs = EntryLogMetadataMap(storage.ledgers.entry_loggers, storage.ledgers)
    logs.extract(lambda path, error: pytest.fail(str(error)))
    known = set(storage.ledgers.ledger_ids())
    log: EntryLogMetadata = max(logs, key=lambda each: len(each.ledgers))
    sizes = dict(log.ledgers)
    assert known >= sizes.keys()
    assert len(sizes) > 3
    gone = set(list(sizes)[::2])
    log.keep(known - gone)
    assert dict(log.unindexed) == {ledger: sizes[ledger] for ledger in sorted(gone)}
    assert dict(log.ledgers) == {ledger: size for ledger, size in sizes.items() if ledger not in gone}
    assert log.remaining_size_bytes == sum(log.ledgers.values()) < log.total_size_bytes
    log.forget({min(gone)})
    assert set(log.unindexed) == gone - {min(gone)}
    log.keep(known)
    assert log.ledgers == {ledger: size for ledger, size in sizes.items() if ledger != min(gone)}
    assert not log.unindexed
    storage.close()


def test_id_sets_have_a_place_for_each_ledger_and_ranges() -> None:
    numbers = random.Random(1)
    chosen = {LedgerId(0, numbers.getrandbits(8)) for _ in range(100)}
    chosen |= {LedgerId(numbers.getrandbits(2), numbers.getrandbits(64)) for _ in range(100)}
    chosen |= {LedgerId(U64_MAX, U64_MAX), LedgerId(3, 0), LedgerId(4, 0)}
    ledgers = LedgerIdSet(sorted(chosen))
    assert [*ledgers] == sorted(chosen)
    assert [ledgers[at] for at in range(len(ledgers))] == sorted(chosen)
    assert [*ledgers.between(ledgers[3], ledgers[6])] == sorted(chosen)[3:7]
    assert all(ledger in ledgers for ledger in chosen)
    others = {LedgerId(scope, number) for scope in (0, 1, 2, 3, 4, 5, U64_MAX) for number in range(300)} - chosen
    assert not any(ledger in ledgers for ledger in others)
    assert "no ledger" not in ledgers
    assert LedgerId(0, 0) not in LedgerIdSet()


@pytest.mark.parametrize(
    ("make", "bytes_max"),
    [
        (lambda ledgers: LedgerIdSet(ledgers), 20),
        (lambda ledgers: SizesByLedger(dict.fromkeys(ledgers, 1 << 20)), 30),
    ],
)
def test_ledgers_that_a_collection_keeps_need_few_bytes(
    make: Callable[[list[LedgerId]], object], bytes_max: int
) -> None:
    ledgers = [LedgerId(0, 1 << 40 | number) for number in range(MANY)]
    tracemalloc.start()
    try:
        kept = make(ledgers)
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept
    assert size / MANY < bytes_max
