"""Group commit: which batches a journal's thread writes as one group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import Empty
from typing import Any

import pytest
from support.waiting import LIMIT_S

from bkctl.bookie.group_commit import GroupCommit, JournalThread
from bkctl.config import BookieConfig
from bkctl.storage.journal_writer import JournalBatch, JournalCommits


class Commits(JournalCommits):
    """Notes each group; the first is held back, so that the others gather."""

    def __init__(self) -> None:
        super().__init__((), 0, {})
        self.groups: list[list[JournalBatch]] = []
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.error: OSError | None = None

    def commit(self, batch: JournalBatch, *more: JournalBatch, written: Callable[[], object] | None = None) -> None:
        self.entered.set()
        self.go_on.wait(LIMIT_S)
        self.groups.append([batch, *more])
        if written is not None:
            written()
        if self.error is not None:
            raise self.error


class Listener(GroupCommit):
    """Records the calls that the loop receives, in order."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.errors: list[OSError | None] = []

    def written(self, batches: list[JournalBatch]) -> None:
        self.heard.append(("written", len(batches)))

    def committed(
        self, journal: JournalThread, batches: list[JournalBatch], began_s: float, took_s: float, error: OSError | None
    ) -> None:
        self.heard.append(("committed", len(batches)))
        self.errors.append(error)
        journal.waiting -= sum(batch.count for batch in batches)

    def thread_died(self, error: BaseException) -> None:
        raise error


def put(journal: JournalThread, batch: JournalBatch) -> None:
    journal.commits.batch = batch
    journal.flush()


def batch(size: int, entries: int) -> JournalBatch:
    made = JournalBatch()
    made.size = size
    made.count = entries
    return made


def groups_of(
    batches: list[JournalBatch], commits: Commits | None = None, **settings: Any
) -> tuple[list[int], Listener]:
    """Return how many batches each group has behind a first that holds the thread up; and what was heard."""
    commits = commits or Commits()
    listener = Listener()

    async def main() -> None:
        journal = JournalThread(listener, commits, BookieConfig(**settings))
        put(journal, batch(1 << 30, 1))
        await asyncio.to_thread(commits.entered.wait, LIMIT_S)
        for each in batches:
            put(journal, each)
        commits.go_on.set()
        await asyncio.to_thread(journal.stop)
        await asyncio.sleep(0)

    asyncio.run(main())
    return [len(group) for group in commits.groups[1:]], listener


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"journal_buffered_writes_threshold": 1 << 20}, [10]),
        ({"journal_buffered_writes_threshold": 299}, [3, 3, 3, 1]),
        ({"journal_buffered_writes_threshold": 0}, [1] * 10),
        ({"journal_buffered_entries_threshold": 9}, [2] * 5),
        ({"journal_buffered_entries_threshold": 0}, [10]),
        ({"journal_flush_when_queue_empty": True}, [10]),
        ({"journal_max_group_wait_msec": 0}, [10]),
    ],
    ids=str,
)
def test_group_ends_with_enough_bytes_or_entries(settings: dict[str, int], expected: list[int]) -> None:
    found, listener = groups_of([batch(100, 5) for _ in range(10)], **settings)
    assert found == expected
    assert listener.heard == [("committed", count) for count in (1, *expected)]


def test_group_waits_no_longer_than_its_time() -> None:
    commits, listener = Commits(), Listener()
    commits.go_on.set()

    async def main() -> None:
        journal = JournalThread(listener, commits, BookieConfig(journal_max_group_wait_msec=20))
        put(journal, batch(100, 1))
        async with asyncio.timeout(LIMIT_S):
            while not listener.heard:
                await asyncio.sleep(0.001)
        await asyncio.to_thread(journal.stop)

    asyncio.run(main())
    assert listener.heard == [("committed", 1)]


async def test_a_wait_for_more_batches_ends_however_short_it_is() -> None:
    """queue.SimpleQueue of CPython 3.11 and 3.12 waits for ever, once in some thousand times."""
    journal = JournalThread(Listener(), Commits(), BookieConfig())
    await asyncio.to_thread(journal.stop)
    waits = journal._queue
    count = 0

    def wait_often() -> None:
        nonlocal count
        for _ in range(20_000):
            waits.put(None)
            waits.get()
            with pytest.raises(Empty):
                waits.get(timeout=1e-7)
            count += 1

    waiting = threading.Thread(target=wait_often, daemon=True)
    waiting.start()
    await asyncio.to_thread(waiting.join, LIMIT_S)
    assert count == 20_000


def test_deferred_adds_are_reported_before_the_sync() -> None:
    waiting = batch(100, 1)
    waiting.written.append(lambda _: None)
    _, listener = groups_of([waiting, batch(100, 1)])
    assert listener.heard == [("committed", 1), ("written", 2), ("committed", 2)]


def test_failed_group_is_reported_and_the_next_is_tried() -> None:
    commits = Commits()
    commits.error = OSError("a disk")
    _, listener = groups_of([batch(100, 1), batch(1 << 30, 1), batch(100, 1)], commits)
    assert listener.errors == [commits.error] * len(commits.groups)
    assert len(commits.groups) == 3


async def test_the_queue_is_full_with_as_many_entries_as_journal_queue_size() -> None:
    commits, listener = Commits(), Listener()
    journal = JournalThread(listener, commits, BookieConfig(journal_queue_size=10))
    put(journal, batch(1 << 30, 9))
    assert not journal.is_full
    put(journal, batch(100, 1))
    assert journal.is_full
    commits.go_on.set()
    async with asyncio.timeout(LIMIT_S):
        while journal.waiting:
            await asyncio.sleep(0.001)
    assert not journal.is_full
    await asyncio.to_thread(journal.stop)
