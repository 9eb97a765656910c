"""Runs the moves of many ledgers at once, and retries ledgers that another worker has locked.

waiting → metadata read ahead → running → result
                              ↖         ↙
                                locked

A pause ends the moves that are running, so that no ledger stays locked, and repeats them afterwards. Fragments that
were copied by then are not copied again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.errors import BkctlError
from bkctl.tasks import cancel_and_wait

if TYPE_CHECKING:
    from bkctl.ids import LedgerId
    from bkctl.metadata.ledgers import LedgerManager, VersionedMetadata
    from bkctl.pace import Pace
    from bkctl.replication.ledger_mover import LedgerMover
    from bkctl.replication.move_plan import LedgerMove, MoveProgress

#: Ledgers that are moved at once; so many wait for the metadata store together.
CONCURRENCY: Final = 512
#: The time for which another worker keeps a locked ledger to itself; then its entries are copied ahead.
LOCK_PATIENCE_S: Final = 15.0
#: The time after which a ledger that stayed locked fails. A worker keeps the lock of a ledger that it could not
#: replicate for 5 minutes (lockReleaseOfFailedLedgerGracePeriod).
LOCK_WAIT_S_MAX: Final = 600.0
#: The pauses between tries for a lock grow from the first to the second.
_LOCK_POLL_S: Final = 0.5
_LOCK_POLL_S_MAX: Final = 5.0
#: The time between looks for a pause.
_PAUSE_POLL_S: Final = 1.0


class _Attempt(NamedTuple):
    """A ledger being moved or locked, the monotonic time of its next try, and that of its first.

    `is_ahead`: its entries are copied already, without the lock.
    """

    due_s: float
    ledger: LedgerId
    since_s: float
    is_ahead: bool = False


@dataclass(eq=False)
class MoveQueue:
    """Moves ledgers, up to CONCURRENCY at once, unless `pace` is paused.

    `report` gets a message when only locked ledgers are left.
    """

    waiting: Iterator[LedgerId]
    ledgers: LedgerManager
    mover: LedgerMover
    progress: MoveProgress
    pace: Pace
    report: Callable[[str], None]
    _read: deque[tuple[LedgerId, VersionedMetadata | BkctlError | None]] = field(default_factory=deque)
    #: A heap: the ledger that is due first comes first.
    _locked: list[_Attempt] = field(default_factory=list)
    _running: dict[asyncio.Task[LedgerMove | None], _Attempt] = field(default_factory=dict)
    _ended: asyncio.Queue[asyncio.Task[LedgerMove | None]] = field(default_factory=asyncio.Queue)
    _has_reported: bool = False

    async def results(self) -> AsyncGenerator[LedgerMove, None]:
        """Yield the result of each ledger as its move ends. Raise errors of the store."""
        ahead = self._read_ahead()
        try:
            while True:
                if self.pace.is_paused:
                    await self._pause()
                self._retry_locked()
                while len(self._running) < CONCURRENCY:
                    if not self._read:
                        self._read.extend(await ahead)
                        if not self._read:
                            break
                        ahead = self._read_ahead()
                    ledger, found = self._read.popleft()
                    known = None if isinstance(found, BkctlError) else found
                    now = time.monotonic()
                    self._start(_Attempt(now, ledger, now), known)
                self.progress.locked_count = len(self._locked)
                if not self._running and not self._locked:
                    return
                result = await self._next_result()
                if result is not None:
                    yield result
        finally:
            await cancel_and_wait(ahead, *self._running)

    def _read_ahead(self) -> asyncio.Task[list[tuple[LedgerId, VersionedMetadata | BkctlError]]]:
        batch = list(islice(self.waiting, CONCURRENCY))
        return asyncio.create_task(asyncio.to_thread(lambda: list(self.ledgers.read_many(batch))))

    def _retry_locked(self) -> None:
        while self._locked and len(self._running) < CONCURRENCY and self._locked[0].due_s <= time.monotonic():
            self._start(heappop(self._locked), None)

    async def _pause(self) -> None:
        """End the running moves, and wait for the end of the pause; the moves without a result come first then."""
        began = time.monotonic()
        moves = dict(self._running)
        await cancel_and_wait(*moves)
        for task, attempt in reversed(moves.items()):
            if task.cancelled():
                del self._running[task]
                self._read.appendleft((attempt.ledger, None))
        await self.pace.resumed()
        self.progress.paused(time.monotonic() - began)

    def _start(self, attempt: _Attempt, found: VersionedMetadata | None) -> None:
        waited_s = time.monotonic() - attempt.since_s
        copies_ahead = waited_s >= LOCK_PATIENCE_S and not attempt.is_ahead
        is_last = attempt.is_ahead and waited_s >= LOCK_WAIT_S_MAX
        move = self.mover.move(attempt.ledger, found, copies_ahead=copies_ahead, is_last=is_last)
        task = asyncio.ensure_future(move)
        self._running[task] = attempt._replace(is_ahead=attempt.is_ahead or copies_ahead)
        task.add_done_callback(self._ended.put_nowait)

    async def _next_result(self) -> LedgerMove | None:
        """Wait for the end of a move, at most until a locked ledger is due; return None if no ledger has a result."""
        if not self._running:
            self._report_waiting([attempt.ledger for attempt in self._locked])
        timeout_s = _PAUSE_POLL_S
        if self._locked and len(self._running) < CONCURRENCY:
            timeout_s = min(timeout_s, max(self._locked[0].due_s - time.monotonic(), 0.0))
        try:
            async with asyncio.timeout(timeout_s):
                task = await self._ended.get()
        except TimeoutError:
            return None
        if task.cancelled():  # By a pause.
            return None
        attempt = self._running.pop(task)
        result = task.result()
        if result is None:
            now = time.monotonic()
            pause_s = min(_LOCK_POLL_S + (now - attempt.since_s) / 4, _LOCK_POLL_S_MAX)
            heappush(self._locked, attempt._replace(due_s=now + pause_s))
        return result

    def _report_waiting(self, locked: Sequence[LedgerId]) -> None:
        """Report once that all ledgers left are locked by other workers."""
        if not self._has_reported:
            self._has_reported = True
            names = ", ".join(map(str, locked[:5])) + (f" and {len(locked) - 5:,} more" if len(locked) > 5 else "")
            self.report(
                f"{'Ledger' if len(locked) == 1 else 'Ledgers'} {names}: locked by other workers, such as "
                f"auto-recovery's; waiting up to {LOCK_WAIT_S_MAX / 60:g} min for them"
            )
