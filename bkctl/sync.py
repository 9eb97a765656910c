"""The blocking twin of the client: methods wait, iterators are plain ones, an event loop in a thread does the work.

    with BookKeeper("zk://zk1/ledgers") as bookkeeper, bookkeeper.create_ledger() as writer:
        writer.add(b"hello")

Arguments, results and errors are as documented for `bkctl.BookKeeper` and its handles. Threads may share all objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future
from functools import partial, wraps
from itertools import chain
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, cast

from bkctl.client import ledger, read_handle, write_handle
from bkctl.client.reader import LedgerEntry
from bkctl.errors import BkctlError, IllegalOperation, on_error
from bkctl.formats.layout import Buffer
from bkctl.protocol.connection import new_event_loop

__all__ = ["BookKeeper", "ReadHandle", "WriteHandle"]

P = ParamSpec("P")
T = TypeVar("T")
#: Adds of `add_async` that may wait to be handed to the event loop.
_QUEUED_COUNT_MAX: Final = 256
_QUEUED_BYTES_MAX: Final = 4 << 20
_END: Final = object()


class _LoopThread:
    """An event loop in a daemon thread; `run` waits for what other threads have it do."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="bkctl.sync", daemon=True)
        self._started = threading.Event()
        #: Guards the order of what is handed to the loop, and of its stop.
        self.lock = threading.RLock()  # a finalizer may run in it; the loop never takes it
        #: True once `stop` was called.
        self.is_stopped = False
        self._thread.start()
        self._started.wait()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            self.loop, self._stopped = runner.get_loop(), asyncio.Event()
            self._started.set()
            runner.run(self._stopped.wait())

    def check(self) -> None:
        """Raise IllegalOperation where waiting for the loop would never end."""
        if os.getpid() != self._pid:
            raise IllegalOperation("This BookKeeper is of the process before a fork", hint="make a new one after it")
        if self.is_stopped:
            raise IllegalOperation("This BookKeeper is closed", hint="make a new one")
        if threading.get_ident() == self._thread.ident:
            raise IllegalOperation("A callback of a future must not wait for the client", hint="use another thread")

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work` on the loop. An interrupt of this thread cancels `work`."""

        async def call() -> T:
            return await work()

        self.check()  # before the lock, which a fork may have left held
        with self.lock:
            self.check()
            future = asyncio.run_coroutine_threadsafe(call(), self.loop)
        try:
            return future.result()
        except CancelledError:
            raise IllegalOperation("This BookKeeper was closed while the call waited") from None
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what still runs, and end the thread."""
        with self.lock:  # what was handed over before is cancelled, and nothing is afterwards
            self.is_stopped = True
            self.loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()


def _like(method: Callable[P, Any]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a method the parameters of another one."""
    return lambda own: wraps(method)(own)


def _waits(method: Callable[Concatenate[Any, P], Awaitable[T]]) -> Callable[Concatenate[Any, P], T]:
    """Return the method that waits for what `method` of the client gives."""
    return _opens(method, lambda _, given: given)


def _opens(
    method: Callable[Concatenate[Any, P], Awaitable[Any]], kind: Callable[[_LoopThread, Any], T]
) -> Callable[Concatenate[Any, P], T]:
    """Return the method that gives the twin of the handle that `method` opens."""

    @wraps(method)
    def call(self: _Twin[Any], /, *args: P.args, **options: P.kwargs) -> T:
        return kind(self._thread, self._thread.run(partial(method, self._client, *args, **options)))

    return call


def _yields(method: Callable[Concatenate[Any, P], AsyncIterator[T]]) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """Return the method whose iterator waits for each item of the iterator that `method` gives."""

    @wraps(method)
    def call(self: _Twin[Any], /, *args: P.args, **options: P.kwargs) -> Iterator[T]:
        return self._items(partial(method, self._client, *args, **options))

    return call


def _value(getter: Callable[[Any], T]) -> T:
    """Return the property that reads `getter`, a property, from the client."""
    read = cast(property, getter).fget
    assert read is not None
    return cast(T, property(wraps(read)(lambda twin: read(twin._client))))


class _Twin(Generic[T]):
    """An object of the client, and the thread that it lives in."""

    def __init__(self, thread: _LoopThread, client: T) -> None:
        self._thread, self._client = thread, client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._thread.run(lambda: cast(Any, self._client).__aexit__(*raised))

    def _items(self, start: Callable[[], AsyncIterator[Any]]) -> Iterator[Any]:
        async def begin() -> AsyncIterator[Any]:
            return start()

        items = self._thread.run(begin)  # raises at once for wrong arguments
        turn = asyncio.Lock()  # an interrupted step ends before the iterator is closed

        async def step(work: Callable[[], Awaitable[Any]]) -> Any:
            async with turn:
                return await work()

        def waiting() -> Iterator[Any]:
            try:
                while (item := self._thread.run(lambda: step(lambda: anext(items, _END)))) is not _END:
                    yield item
            finally:
                with contextlib.suppress(IllegalOperation):  # stopped, which closed it
                    self._thread.run(lambda: step(cast(Any, items).aclose))

        return waiting()


class _Handle(_Twin[T]):
    """The common part of ReadHandle and WriteHandle."""

    ledger = _value(read_handle.Handle.ledger)
    scope_id = _value(read_handle.Handle.scope_id)
    ledger_id = _value(read_handle.Handle.ledger_id)
    metadata = _value(read_handle.Handle.metadata)
    is_closed = _value(read_handle.Handle.is_closed)
    read_runs = _yields(read_handle.Handle.read_runs)
    read_unconfirmed = _yields(read_handle.Handle.read_unconfirmed)
    batch_read = _waits(read_handle.Handle.batch_read)
    read_last_add_confirmed = _waits(read_handle.Handle.read_last_add_confirmed)

    def read(self, first: int = 0, last: int | None = None, *, verify: bool = True) -> Iterator[LedgerEntry]:
        """Yield the entries `first` to `last`, as `bkctl.Handle.read` does."""
        return chain.from_iterable(self.read_runs(first, last, verify=verify))  # a run costs as much as an entry


class ReadHandle(_Handle[read_handle.ReadHandle]):
    """The blocking twin of `bkctl.ReadHandle`."""

    last_add_confirmed = _value(read_handle.ReadHandle.last_add_confirmed)
    length = _value(read_handle.ReadHandle.length)
    wait_for_lac = _waits(read_handle.ReadHandle.wait_for_lac)
    tail = _yields(read_handle.ReadHandle.tail)
    close = _waits(read_handle.ReadHandle.close)


class WriteHandle(_Handle[write_handle.WriteHandle]):
    """The blocking twin of `bkctl.WriteHandle`. `add` waits for the acknowledgement, `add_async` only for room."""

    last_add_confirmed = _value(write_handle.WriteHandle.last_add_confirmed)
    last_add_pushed = _value(write_handle.WriteHandle.last_add_pushed)
    length = _value(write_handle.WriteHandle.length)
    pending_count = _value(write_handle.WriteHandle.pending_count)
    add_all = _waits(write_handle.WriteHandle.add_all)
    flush = _waits(write_handle.WriteHandle.flush)
    force = _waits(write_handle.WriteHandle.force)
    write_lac = _waits(write_handle.WriteHandle.write_lac)
    close = _waits(write_handle.WriteHandle.close)

    def __init__(self, thread: _LoopThread, client: write_handle.WriteHandle) -> None:
        super().__init__(thread, client)
        self._queue: deque[tuple[Buffer, int | None, Future[int]]] = deque()
        self._queued_bytes = 0
        self._is_sending = False

    def add_async(self, payload: Buffer, *, entry_id: int | None = None) -> Future[int]:
        """Add an entry, and return the future of its id, which fails as `add` does. Waits while much is in flight.

        Entries get their ids in the order of the calls. Java: appendAsync.
        """
        future = self._hand_over(payload, entry_id)
        is_full = len(self._queue) >= _QUEUED_COUNT_MAX or self._queued_bytes >= _QUEUED_BYTES_MAX
        if is_full or self._client._pipeline.must_wait():
            with contextlib.suppress(BkctlError):  # the futures tell
                self._thread.run(self._client.ready)
        return future

    @wraps(write_handle.WriteHandle.add)
    def add(self, payload: Buffer, *, entry_id: int | None = None) -> int:
        return self._hand_over(payload, entry_id).result()

    def _hand_over(self, payload: Buffer, entry_id: int | None) -> Future[int]:
        self._thread.check()
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # what was handed over is written
        data = payload if type(payload) is bytes else bytes(memoryview(payload))  # the caller may change it afterwards
        with self._thread.lock:
            if self._thread.is_stopped:
                self._thread.check()
            self._queue.append((data, entry_id, future))
            self._queued_bytes += len(data)
            if not self._is_sending:
                self._is_sending = True
                self._thread.loop.call_soon_threadsafe(self._send)
        return future

    def _send(self) -> None:
        self._is_sending, self._queued_bytes = False, 0  # what is queued from now on schedules another one
        for _ in range(len(self._queue)):
            payload, entry_id, future = self._queue.popleft()
            try:
                self._client._add(payload, future, entry_id)
            except Exception as error:  # noqa: BLE001 - given to the caller; the others are sent
                future.set_exception(error)


class BookKeeper(_Twin[ledger.BookKeeper]):
    """The blocking twin of `bkctl.BookKeeper`: connected once it is made, until `close` or the end of its context."""

    @_like(ledger.BookKeeper)
    def __init__(self, *args: Any, **options: Any) -> None:
        client = ledger.BookKeeper(*args, **options)
        super().__init__(_LoopThread(), client)
        self._closing = threading.Lock()
        with on_error(self._thread.stop):
            self._thread.run(client.__aenter__)

    create_ledger = _opens(ledger.BookKeeper.create_ledger, WriteHandle)
    create_ledger_adv = _opens(ledger.BookKeeper.create_ledger_adv, WriteHandle)
    open_ledger = _opens(ledger.BookKeeper.open_ledger, ReadHandle)
    delete_ledger = _waits(ledger.BookKeeper.delete_ledger)
    get_ledger_metadata = _waits(ledger.BookKeeper.get_ledger_metadata)
    watch_ledger_metadata = _yields(ledger.BookKeeper.watch_ledger_metadata)
    list_ledgers = _yields(ledger.BookKeeper.list_ledgers)

    def close(self) -> None:
        """Close all connections and end the thread; calls that wait raise IllegalOperation. Harmless when repeated."""
        if self._thread.is_stopped:
            return
        self._thread.check()
        with self._closing:
            if not self._thread.is_stopped:
                try:
                    self._thread.run(self._client.close)
                finally:
                    self._thread.stop()

    def __exit__(self, *_: object) -> None:
        self.close()
