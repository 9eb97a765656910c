"""The read cache of DbLedgerStorage: its bounds, and the entries that it forgets."""

from __future__ import annotations

import threading

from bkctl.ids import LedgerId
from bkctl.storage.ledger.read_cache import ReadCache


def test_read_cache_evicts_the_oldest_entries() -> None:
    cache = ReadCache(100)
    one, other = LedgerId(0, 1), LedgerId(7, 1)
    cache.put(one, [(0, bytes(30)), (1, bytes(30))])
    cache.put(other, [(0, b"a" * 30)])
    assert cache.size == 90
    assert cache.get(other, 0) == b"a" * 30
    assert cache.get(other, 1) is None
    cache.put(other, [(1, bytes(20))])
    assert [cache.get(one, entry_id) for entry_id in range(2)] == [None, None]
    assert cache.size == 50
    cache.put(other, [(2, bytes(101))])
    assert cache.get(other, 2) is None, "more than it may hold"
    assert cache.get(other, 0) is not None
    cache.discard(other)
    cache.discard(other)
    assert cache.get(other, 0) is None
    for entry_id in range(50):
        cache.put(one, [(entry_id, bytes(10))])
    assert [entry_id for entry_id in range(50) if cache.get(one, entry_id) is not None] == [*range(40, 50)]
    assert cache.size == 100


def test_many_threads_keep_the_read_cache_within_its_bounds() -> None:
    cache = ReadCache(1000)

    def work(number: int) -> None:
        for entry_id in range(300):
            cache.put(LedgerId(0, number), [(entry_id, bytes(10)), (entry_id + 1, bytes(10))])
            cache.get(LedgerId(0, (number + 1) % 4), entry_id)
            if entry_id % 50 == 0:
                cache.discard(LedgerId(0, number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.size == 1000
    held = sum(cache.get(LedgerId(0, number), entry_id) is not None for number in range(4) for entry_id in range(301))
    assert 0 < held <= 100
