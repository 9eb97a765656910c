"""The blocking twin against fake bookies, which run in an event loop of their own thread."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from client.fakes import FakeCluster
from support.waiting import LIMIT_S

from bkctl import LedgerId, LedgerState, WriteFlag, sync
from bkctl.errors import (
    BookieUnavailable,
    IllegalOperation,
    LedgerClosed,
    LedgerFenced,
    LedgerNotFound,
    NotFound,
    Unauthorized,
    UsageError,
)
from bkctl.metadata.cluster import open_cluster
from bkctl.protocol.messages import AddRequest


class Fakes:
    """Three fake bookies, and `call` to change them in their thread."""

    def __init__(self, path: Path) -> None:
        self.uri = f"sqlite://{path / 'metadata.db'}"
        self._cluster = open_cluster(self.uri, create=True)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.fakes = FakeCluster(self._cluster)
        for _ in range(3):
            self.call(self.fakes.add_bookie())

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def hold_adds(self) -> None:
        for bookie in self.fakes.bookies:
            bookie.hold = lambda request: type(request) is AddRequest

    def release(self) -> None:
        async def release() -> None:
            for bookie in self.fakes.bookies:
                bookie.release()

        self.call(release())

    def close(self) -> None:
        for bookie in self.fakes.bookies:
            self.call(bookie.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        self._cluster.close()


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Fakes]:
    fakes = Fakes(tmp_path)
    yield fakes
    fakes.close()


@pytest.fixture
def client(fakes: Fakes) -> Iterator[sync.BookKeeper]:
    with sync.BookKeeper(fakes.uri) as client:
        yield client


@pytest.mark.parametrize(("protocol", "scope_id"), [(2, 0), (3, 0), (3, 7)])
def test_entries_are_read_back_as_written(fakes: Fakes, protocol: Any, scope_id: int) -> None:
    with sync.BookKeeper(fakes.uri, protocol=protocol) as client:
        with client.create_ledger_adv(ledger_scope_id=scope_id, password=b"secret") as writer:
            assert (writer.scope_id, writer.ledger) == (scope_id, LedgerId(scope_id, writer.ledger_id))
            assert writer.add(b"0") == 0
            assert [writer.add_async(b"%d" % number) for number in range(1, 600)][-1].result() == 599
            writer.add_all([b"%d" % number for number in range(600, 700)])
            writer.flush()
            assert (writer.last_add_confirmed, writer.last_add_pushed, writer.pending_count) == (699, 699, 0)
            with pytest.raises(UsageError):
                writer.read(0, 700)
        assert writer.is_closed
        with pytest.raises(Unauthorized):
            client.open_ledger(writer.ledger, password=b"wrong")
        with client.open_ledger(writer.ledger, password=b"secret") as reader:
            assert [entry.payload for entry in reader.read()] == [b"%d" % number for number in range(700)]
            assert [entry.entry_id for entry in reader.read_unconfirmed(5, 6)] == [5, 6]
            assert [entry.entry_id for entry in reader.batch_read(3, 2)] == [3, 4]
            assert [entry.entry_id for entry in reader.tail(690)] == list(range(690, 700))
            assert (reader.length, reader.metadata.state) == (writer.length, LedgerState.CLOSED)
        assert list(client.list_ledgers(ledger_scope_id=None)) == [writer.ledger]
        client.delete_ledger(writer.ledger)
        with pytest.raises(LedgerNotFound):
            client.get_ledger_metadata(writer.ledger)


def test_threads_share_a_client_and_a_handle(client: sync.BookKeeper) -> None:
    with client.create_ledger_adv(uuid.uuid4()) as writer:

        def add(name: int) -> list[int]:
            return [writer.add_async(b"%d" % name).result() for _ in range(50)]

        with ThreadPoolExecutor(8) as threads:
            ids = list(threads.map(add, range(8)))
        assert sorted(each for part in ids for each in part) == list(range(400))
        assert all(part == sorted(part) for part in ids)


def test_a_tail_follows_a_writer_in_another_thread(client: sync.BookKeeper) -> None:
    writer = client.create_ledger_adv(ledger_scope_id=7)

    def write() -> None:
        for number in range(20):
            writer.add(b"%d" % number)
            writer.write_lac()
        writer.close()

    with client.open_ledger(writer.ledger) as reader, ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        assert [entry.payload for entry in reader.tail()] == [b"%d" % number for number in range(20)]
        writing.result()


def test_an_iterator_that_is_left_stops_its_work(client: sync.BookKeeper) -> None:
    with client.create_ledger() as writer:
        writer.add(b"a")
        watch = client.watch_ledger_metadata(writer.ledger)
        assert next(watch).state is LedgerState.OPEN
        watch.close()  # type: ignore[attr-defined]
        tail = client.open_ledger(writer.ledger).tail()
    assert next(tail).payload == b"a"
    tail.close()  # type: ignore[attr-defined]


def test_errors_have_the_classes_of_the_client(client: sync.BookKeeper, fakes: Fakes) -> None:
    with client.create_ledger(write_flags=WriteFlag.DEFERRED_SYNC) as forced:
        forced.add(b"a")
        assert forced.last_add_confirmed == -1
        forced.force()
        assert forced.last_add_confirmed == 0
    writer = client.create_ledger()
    writer.add(b"a")
    with sync.BookKeeper(fakes.uri) as other:
        assert other.open_ledger(writer.ledger, recovery=True).is_closed
    with pytest.raises(LedgerFenced):
        writer.add_async(b"b").result()
    with pytest.raises(LedgerFenced):
        writer.add_async(b"b").result()
    with pytest.raises(LedgerFenced):
        writer.close()
    with pytest.raises(LedgerNotFound):
        client.open_ledger(99)
    with pytest.raises(TypeError):
        client.open_ledger(99, unknown=1)  # type: ignore[call-arg]
    with pytest.raises(NotFound):
        sync.BookKeeper("sqlite:///nowhere/at/all.db")
    assert threading.active_count() < 20


def test_an_interrupt_leaves_the_client_usable(client: sync.BookKeeper, fakes: Fakes) -> None:
    writer = client.create_ledger()
    writer.add(b"a")
    fakes.hold_adds()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        writer.add(b"b")
    fakes.release()
    assert writer.add(b"c") == 2
    writer.close()


def test_an_interrupt_of_an_iterator_is_raised_as_it_is(client: sync.BookKeeper) -> None:
    writer = client.create_ledger()
    watch = client.watch_ledger_metadata(writer.ledger)
    next(watch)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        next(watch)
    writer.close()


@pytest.mark.parametrize("entry_id", [1 << 63, -1, "1"])
def test_a_refused_add_leaves_the_adds_around_it_alone(client: sync.BookKeeper, entry_id: Any) -> None:
    with client.create_ledger_adv() as writer:
        adds = [writer.add_async(b"a"), writer.add_async(b"b", entry_id=entry_id), writer.add_async(b"c")]
        assert (adds[0].result(LIMIT_S), adds[2].result(LIMIT_S)) == (0, 1)
        with pytest.raises(TypeError if isinstance(entry_id, str) else UsageError):
            adds[1].result(LIMIT_S)
    assert writer.metadata.length == 2


def test_a_buffer_may_be_changed_once_it_was_added(client: sync.BookKeeper) -> None:
    buffer = bytearray(b"0000")
    with client.create_ledger() as writer:
        for number in range(600):
            buffer[:] = b"%04d" % number
            writer.add_async(memoryview(buffer))
        with pytest.raises(TypeError):
            writer.add_async([1, 2])  # type: ignore[arg-type]
    assert [entry.payload for entry in writer.read()] == [b"%04d" % number for number in range(600)]


def test_adds_that_come_one_by_one_wait_for_slow_bookies(
    client: sync.BookKeeper, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bkctl.client.writer.THROTTLE_COUNT", 4)
    writer = client.create_ledger()
    fakes.hold_adds()

    def add() -> list[Future[int]]:
        found = []
        for number in range(20):
            found.append(writer.add_async(b"a"))
            while writer.last_add_pushed < number and not found[-1].done():
                pass
        return found

    with ThreadPoolExecutor(1) as threads:
        adding = threads.submit(add)
        while writer._client._pipeline._waiter is None and not adding.done():
            pass
        fakes.release()
        assert [future.result(LIMIT_S) for future in adding.result(LIMIT_S)] == list(range(20))
    writer.close()


def test_an_add_behind_a_gap_ends_with_the_client(fakes: Fakes) -> None:
    with sync.BookKeeper(fakes.uri) as client:
        writer = client.create_ledger_adv()
        waiting = writer.add_async(b"a", entry_id=5)
        writer.force()  # the bookies have answered
    with pytest.raises(BookieUnavailable):
        waiting.result(LIMIT_S)


def test_a_client_is_closed_by_many_threads_but_not_by_a_callback(fakes: Fakes) -> None:
    client = sync.BookKeeper(fakes.uri)
    writer = client.create_ledger()
    fakes.hold_adds()
    refused: Future[None] = Future()

    def close(_: Any) -> None:
        try:
            client.close()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            refused.set_exception(error)

    writer.add_async(b"a").add_done_callback(close)
    fakes.release()
    with pytest.raises(IllegalOperation, match="callback"):
        refused.result(LIMIT_S)
    assert writer.add(b"b") == 1
    with ThreadPoolExecutor(8) as threads:
        for closing in [threads.submit(client.close) for _ in range(8)]:
            closing.result(LIMIT_S)


def test_all_that_wait_for_a_ledger_learn_that_it_is_deleted(client: sync.BookKeeper) -> None:
    writer = client.create_ledger()
    with client.open_ledger(writer.ledger) as reader, ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(lambda: list(reader.tail())) for _ in range(2)]
        client.delete_ledger(writer.ledger)
        for each in waiting:
            with pytest.raises(LedgerNotFound):
                each.result(LIMIT_S)
        with pytest.raises(LedgerNotFound):
            reader.wait_for_lac(0, 0)


def test_a_closed_client_refuses_and_lets_waiting_threads_go(fakes: Fakes) -> None:
    client = sync.BookKeeper(fakes.uri)
    writer = client.create_ledger()
    writer.add(b"a")
    closed = client.create_ledger()
    closed.close()
    closed.close()
    with pytest.raises(LedgerClosed):
        closed.add(b"a")
    reader = client.open_ledger(writer.ledger)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(reader.wait_for_lac, 5, LIMIT_S)
        while not waiting.running():
            pass
        client.close()
        with pytest.raises(IllegalOperation, match="closed"):
            waiting.result()
    client.close()
    for call in (lambda: writer.add(b"b"), lambda: writer.add_async(b"b"), lambda: client.open_ledger(1)):
        with pytest.raises(IllegalOperation, match="closed"):
            call()


def test_a_callback_that_would_wait_for_its_own_thread_is_refused(client: sync.BookKeeper) -> None:
    with client.create_ledger() as writer:
        found: list[BaseException] = []
        done = threading.Event()

        def callback(_: Any) -> None:
            try:
                writer.flush()
            except IllegalOperation as error:
                found.append(error)
            done.set()

        writer.add_async(b"a").add_done_callback(callback)
        assert done.wait(LIMIT_S)
        assert not found or "callback" in str(found[0])


def _use_in_child(client: sync.BookKeeper, results: Any) -> None:
    try:
        client.open_ledger(0)
    except IllegalOperation as error:
        results.put(str(error))


def test_a_client_of_before_a_fork_is_refused_in_the_child(client: sync.BookKeeper) -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_use_in_child, args=(client, results))
    child.start()
    child.join()
    assert "fork" in results.get()
