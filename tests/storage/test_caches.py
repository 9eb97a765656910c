"""The caches of DbLedgerStorage: what they hold, what they cost, and what they forget."""

from __future__ import annotations

import threading

from bkctl.ids import LedgerId
from bkctl.storage.ledger.caches import ENTRY_OVERHEAD_BYTES, ReadCache, WriteCache


class Ledger:
    def __init__(self, scope_id: int, ledger_id: int) -> None:
        self.ledger = LedgerId(scope_id, ledger_id)
        self.entries: dict[int, bytes] = {}
        self.flushing: dict[int, bytes] = {}


def test_flushed_write_cache_stays_readable() -> None:
    cache: WriteCache[Ledger] = WriteCache()
    ledgers = [Ledger(7, 1), Ledger(0, 9), Ledger(0, 2)]
    for ledger in ledgers:
        cache.add(ledger, [0], [b"old"], len(b"old"))
        cache.add(ledger, [0], [b"new"], len(b"new"))
    assert cache.size == 6 * (3 + ENTRY_OVERHEAD_BYTES)
    taken = cache.swap()
    assert [(each.ledger, entries) for each, entries in taken] == [
        (ledger.ledger, {0: b"new"}) for ledger in reversed(ledgers)
    ]
    assert (cache.size, cache.flushing_size) == (0, 6 * (3 + ENTRY_OVERHEAD_BYTES))
    cache.add(ledgers[0], [1], [b"next"], len(b"next"))
    assert [cache.find(ledgers[0], entry_id) for entry_id in range(3)] == [b"new", b"next", None]
    cache.add(ledgers[0], [0], [b"newest"], len(b"newest"))
    assert cache.find(ledgers[0], 0) == b"newest"

    # The flush failed, and the next one takes what came since: all of it is readable.
    again = cache.swap()
    assert again == [(ledgers[0], {1: b"next", 0: b"newest"})]
    assert [cache.find(ledgers[0], entry_id) for entry_id in range(2)] == [b"newest", b"next"]
    assert taken[2][1] == {0: b"new"}, "what the first one took is as it was"
    cache.finish(taken, again)
    assert cache.flushing_size == 0
    assert not any(each.flushing or each.entries for each in ledgers)


def test_removed_ledger_frees_its_write_cache() -> None:
    cache: WriteCache[Ledger] = WriteCache()
    one, other = Ledger(0, 1), Ledger(0, 2)
    for entry_id in range(4):
        cache.add(one, [entry_id], [bytes(10)], len(bytes(10)))
        cache.add(other, [entry_id], [bytes(10)], len(bytes(10)))
    cache.remove(one)
    cache.remove(one)
    assert cache.size == 4 * (10 + ENTRY_OVERHEAD_BYTES)
    assert cache.find(one, 0) is None
    assert [each for each, _ in cache.swap()] == [other]


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
