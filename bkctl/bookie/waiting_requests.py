"""Requests that cannot be answered at once: they wait for a ledger to be opened, an index page, an entry, a sync.

A thread opens the ledger or reads the page. Every later request about the same ledger waits behind the first, so the
requests of a ledger keep their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeAlias, TypeVar

from bkctl.bookie.metrics import BookieMetrics
from bkctl.bookie.state_manager import BookieStateManager
from bkctl.disk import NO_SPACE
from bkctl.errors import BkctlError, Corrupt, LedgerNotFound, Unsupported
from bkctl.ids import LedgerId
from bkctl.protocol.handler import Responder
from bkctl.protocol.messages import AddRequest, ForceLedgerRequest, Request, Status, refusal, status_of
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.ledger.ledger_handle import NeedsDisk
from bkctl.storage.open_ledgers import RecentLedgers

T = TypeVar("T")

log: Final = logging.getLogger("bkctl.bookie")

#: Threads that open ledgers, beside those that read entries: while one disk hangs, ledgers open on others.
OPEN_THREADS: Final = 4
#: Ledgers with failed reads that are counted, and how long after the last failed read.
LEDGERS_MAX: Final = 1000
#: Unreadable ledgers that the metrics name.
NAMED_MAX: Final = 10
KEPT_S: Final = 24 * 3600.0
#: A malformed request is logged once in this time.
REFUSALS_LOGGED_S: Final = 60.0
#: Errors of the system for want of something else than a sound disk.
_PASSING: Final = NO_SPACE | {errno.ENOMEM, errno.EINTR}

#: Called with None once the ledger or page is in memory, or with the error of reading it.
Waiter: TypeAlias = Callable[[BaseException | None], None]
#: Serves one request: calls `respond` now or later, or raises the error to answer.
Handler: TypeAlias = Callable[[Any, Responder], None]


def run_in_threads(
    threads: ThreadPoolExecutor, prepare: Callable[[], Callable[[], T]], done: Callable[[asyncio.Future[T]], None]
) -> asyncio.Future[T]:
    """Have one of `threads` call what `prepare` returns, and `done` called with the future, which is returned.

    The future has the error if `prepare` raises, and RuntimeError if no thread can be started.
    """
    loop = asyncio.get_running_loop()
    try:
        future = loop.run_in_executor(threads, prepare())
    except Exception as error:  # noqa: BLE001 - the future has it
        future = loop.create_future()
        future.set_exception(error)
    future.add_done_callback(done)
    return future


class UnreadableLedgers(RecentLedgers):
    """Ledgers whose entries or index could not be read, by the time of the last failed read."""

    def __init__(self) -> None:
        super().__init__(KEPT_S, LEDGERS_MAX)

    def note(self, ledger: LedgerId, error: BaseException) -> None:
        """Add the ledger if `error`, of a read, is of the disk or of damage."""
        if isinstance(error, Corrupt) or (isinstance(error, OSError) and error.errno not in _PASSING):
            self.add(ledger)


class WaitingRequests:
    """Queues of requests by ledger, and the answers of requests that fail after a wait."""

    def __init__(self, storage: BookieStorage, state: BookieStateManager, metrics: BookieMetrics) -> None:
        self._storage = storage
        self._state = state
        self._metrics = metrics
        self._openers = ThreadPoolExecutor(OPEN_THREADS, "open")
        self.unreadable = UnreadableLedgers()
        #: Time of the last logged refusal of a malformed request (monotonic clock).
        self._refused_s = -math.inf
        #: By ledger that is being opened: its waiters in order.
        self.by_ledger: dict[LedgerId, list[Waiter]] = {}

    def stop(self) -> None:
        """Return when no ledger is being opened, in another thread than the event loop's."""
        self._openers.shutdown()

    # --- queues ------------------------------------------------------------------------------------------------------

    def once_read(self, need: NeedsDisk, waiter: Waiter) -> None:
        """Call `waiter` once a thread has read what `need` says, behind all waiters of the same ledger."""
        waiting = self.by_ledger.get(need.ledger)
        if waiting is not None:
            waiting.append(waiter)
            return
        self.by_ledger[need.ledger] = [waiter]
        run_in_threads(self._openers, lambda: need.read, functools.partial(self._call_waiters, need.ledger))

    def _call_waiters(self, ledger: LedgerId, future: asyncio.Future[Any]) -> None:
        """Call the waiters of `ledger` in order. One of them may wait again: the rest then waits behind it."""
        waiting = self.by_ledger.pop(ledger)
        error = future.exception()
        if self._state.is_stopping:  # storage is being closed
            error = BkctlError(f"Bookie {self._state.bookie_id} stops")
        with contextlib.nullcontext() if error is not None else self._storage.supplied(future.result()):
            for waiter in waiting:
                if ledger in self.by_ledger:
                    self.by_ledger[ledger].append(waiter)
                    continue
                try:
                    waiter(error)
                except Exception as fault:  # noqa: BLE001 - logged and counted; those behind it have their turn
                    self._metrics.note_unexpected(f"A request for ledger {ledger} that waited", fault)

    def serve_later(self, need: NeedsDisk | None, handler: Handler, request: Any, respond: Responder) -> None:
        """Give the request to `handler` again once `need` is in memory; None: behind the waiters of its ledger."""
        if isinstance(request, AddRequest) and isinstance(request.body, memoryview):
            request = request._replace(body=bytes(request.body))  # it is in the connection's buffer

        def serve(error: BaseException | None) -> None:
            # A force asks about the journal alone: a ledger that cannot be opened has nothing that is not on disk.
            if error is None or (isinstance(request, ForceLedgerRequest) and not self._state.is_stopping):
                self.serve(handler, request, respond)
            else:
                self.refuse(request, respond, error)

        if need is None:
            self.by_ledger[request.ledger].append(serve)
        else:
            self.once_read(need, serve)

    # --- answers -----------------------------------------------------------------------------------------------------

    def serve(self, handler: Handler, request: Any, respond: Responder) -> None:
        """Give the request to `handler`: now, again when it needs the disk, and answer the error that it raises."""
        try:
            handler(request, respond)
        except NeedsDisk as need:
            self.serve_later(need, handler, request, respond)
        except Exception as error:  # noqa: BLE001 - answered, logged and counted
            self.refuse(request, respond, error)

    def resume(self, request: Request, respond: Responder, take: Callable[[Any], None], found: Any) -> None:
        """Give `found` to `take` after a wait; errors that it raises are answered to this request alone."""
        self.serve(lambda *_: take(found), request, respond)

    def serve_timed(self, name: str, handler: Handler, request: Request, respond: Responder) -> None:
        """Give the request to `handler`, and observe as `name` how long its answer takes."""
        latency = self._metrics.requests[name]
        began_s = time.monotonic()
        timed = respond.observed(
            lambda response: latency.observe(time.monotonic() - began_s, ok=response.status is Status.EOK)
        )
        try:
            handler(request, timed)
        except NeedsDisk as need:
            self.serve_later(need, handler, request, timed)
        except Exception:
            latency.observe(time.monotonic() - began_s, ok=False)
            raise

    def refuse(self, request: Request, respond: Responder, error: BaseException) -> None:
        """Answer `request` with the status of `error`; log an error that is not a plain refusal."""
        respond(refusal(request, self.status_after(type(request).__name__, error, getattr(request, "ledger", None))))

    def status_after(self, name: str, error: BaseException, ledger: LedgerId | None = None) -> Status:
        """Return the status that answers `error`; log failures of the disk and unexpected errors of request `name`.

        A `ledger` that cannot be read is counted, unless it is set aside.
        """
        status = status_of(error)
        if not isinstance(error, (OSError, BkctlError)):
            self._metrics.note_unexpected(name, error)
        elif status is Status.EIO:
            log.warning("%s: %s", name, error)
            if ledger is not None and ledger not in self._storage.set_aside:
                self.unreadable.note(ledger, error)
        elif status is Status.EBADREQ and time.monotonic() - self._refused_s >= REFUSALS_LOGGED_S:
            self._refused_s = time.monotonic()
            log.warning("Refused a request, %s: %s. More such refusals are not logged for a minute", name, error)
        return status

    # --- deletions, each behind the requests that wait for its ledger -------------------------------------------------

    async def delete_all(self, ledgers: Sequence[LedgerId]) -> int:
        """Delete ledgers, one a turn of the loop; return how many there were.

        A checkpoint may be under way: on a busy bookie one begins as soon as another ends. Raises the error that made
        the bookie give up.
        """
        count = 0
        for ledger in ledgers:
            if self._state.failure is not None:
                raise self._state.failure
            try:
                await self.delete(ledger)
                count += 1
            except LedgerNotFound:
                pass
            except (OSError, BkctlError) as error:
                log.warning("Ledger %s cannot be deleted: %s", ledger, error)
            await asyncio.sleep(0)
        return count

    def delete(self, ledger: LedgerId) -> asyncio.Future[None]:
        """Delete a ledger; the future raises LedgerNotFound, OSError or BkctlError."""
        deleted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def delete(error: BaseException | None = None) -> None:
            is_damaged = isinstance(error, Corrupt | Unsupported)
            try:
                if error is not None and not is_damaged:
                    raise error
                self._storage.delete_ledger(ledger, is_damaged=is_damaged)
            except NeedsDisk as need:
                self.once_read(need, delete)
            except Exception as failure:  # noqa: BLE001 - raised by the future
                deleted.set_exception(failure)
            else:
                self.unreadable.discard(ledger)
                deleted.set_result(None)

        waiting = self.by_ledger.get(ledger)
        if waiting is not None:
            waiting.append(delete)
        else:
            delete()
        return deleted
