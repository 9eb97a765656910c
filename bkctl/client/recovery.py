"""Recovery: fence a ledger, find its last entry, replicate its last entries again, close it.

    OPEN → IN_RECOVERY (compare-and-set) → fencing read of the last add confirmed from the last fragment → each entry
    after it: recovery read; found by any bookie: added again (RECOVERY_ADD); lacking on Wq − Aq + 1 bookies: the end
    → CLOSED (compare-and-set), with the fragments from re-adding.

Several clients may recover one ledger at once: the first one to close it decides. Source: LedgerRecoveryOp,
ReadOnlyLedgerHandle.recover, ListenerBasedPendingReadOp.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Final, NamedTuple

from bkctl.client.bookies import BookieChannel
from bkctl.client.ensemble import closed, update_metadata
from bkctl.client.read_handle import entry_of
from bkctl.client.reader import (
    LAST_CONFIRMED_MAX,
    LedgerAccess,
    LedgerEntry,
    long_poll,
    read_entries,
    read_last_confirmed,
    restate,
)
from bkctl.client.waiting_reads import WaitingReads
from bkctl.client.writer import RecoveryPipeline
from bkctl.errors import (
    BkctlError,
    EntryNotFound,
    LedgerLengthUnknown,
    LedgerNotFound,
    LedgerRecoveryFailed,
    MetadataVersionConflict,
    TimedOut,
    Unauthorized,
)
from bkctl.formats.entry import INVALID_ENTRY_ID
from bkctl.formats.metadata import LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.protocol.messages import ReadRequest, Response

#: Recovery reads in flight ahead of the entry being decided. Java reads one at a time (recoveryReadBatchSize).
RECOVERY_READ_AHEAD: Final = 16

_HINT: Final = "it stays IN_RECOVERY; try again when its bookies are back"


#: The wait for a writer's next entry, when a recovery is planned.
_WRITER_WAIT_S: Final = 1.0


class WriterActivity(NamedTuple):
    """The last add confirmed of a ledger that is not closed, and of a second look: a writer adds if it is larger."""

    last_add_confirmed: int
    later: int

    @property
    def is_writing(self) -> bool:
        return self.later > self.last_add_confirmed


class RecoveryPlan(NamedTuple):
    """The effect of recovering a ledger; `activity` is None for a closed ledger, `loss` if nothing would be lost."""

    ledger: LedgerId
    metadata: LedgerMetadata
    activity: WriterActivity | None
    loss: RecoveryLoss | None

    @property
    def effect(self) -> str:
        """The effect of a recovery, in words."""
        if self.activity is None:
            return "closed already: unchanged"
        last, later = self.activity
        known = "without a confirmed entry" if last < 0 else f"confirmed up to entry {last}"
        if self.metadata.state is not LedgerState.OPEN:
            return f"IN_RECOVERY, {known}: it would be closed"
        if self.activity.is_writing:
            return f"OPEN, {known} and moments later up to {later}: a writer is adding entries, and would be fenced"
        return f"OPEN, {known}, unchanged for the last second: a writer that still runs would be fenced"

    @property
    def end(self) -> RecoveryLoss | LedgerMetadata | None:
        """The last entry and length: of the metadata if the ledger is closed, else of the loss, None without one."""
        return self.metadata if self.metadata.is_closed else self.loss


async def watch_writer(access: LedgerAccess) -> WriterActivity | None:
    """Look twice whether a writer adds to the ledger, up to a second apart; None for a closed ledger.

    Changes and fences nothing. Raises the errors of `read_last_confirmed`.
    """
    if access.metadata.is_closed:
        return None
    first = (await read_last_confirmed(access)).last_add_confirmed
    later = None
    if access.metadata.state is LedgerState.OPEN:
        later = await long_poll(access, first, _WRITER_WAIT_S, asyncio.Event())
    return WriterActivity(first, first if later is None else later)


class RecoveryLoss(NamedTuple):
    """The loss from closing a ledger while no bookie returns its acknowledged last entry, `last_entry_id`.

    `readable_entry_id` is the last entry that a bookie returns, -1 if none of the requested ones. `length` is the
    ledger's length in bytes up to that entry; the closed ledger keeps this length, which is too small. The entries
    after it are lost if their bookies never return.
    """

    last_entry_id: int
    readable_entry_id: int
    length: int


async def recover(access: LedgerAccess, *, accept_loss: RecoveryLoss | None = None) -> None:
    """Recover the ledger of `access`; its `versioned` is CLOSED afterwards, by this client or a faster one.

    With `accept_loss` (from `find_loss`) a ledger is closed although no bookie returns its last entry, unless the loss
    grew since. Apache's client closes such a ledger with the length 0 or another entry's. Raises LedgerLengthUnknown
    when only an accepted loss would close the ledger, LedgerRecoveryFailed when the end cannot be decided or the last
    entries cannot be replicated (the ledger stays IN_RECOVERY), Unauthorized, TimedOut,
    MetadataVersionConflict, and what the store raises.
    """
    ledgers, ledger = access.pool.cluster.ledgers, access.ledger

    def begin(metadata: LedgerMetadata) -> LedgerMetadata | None:
        if metadata.state is not LedgerState.OPEN:
            return None
        return metadata._replace(state=LedgerState.IN_RECOVERY, length=0, last_entry_id=-1)

    access.versioned = await asyncio.to_thread(update_metadata, ledgers, ledger, access.versioned, begin)
    if access.metadata.is_closed:
        return
    pipeline, length = await _make_safe(access, accept_loss)
    last_entry_id = pipeline.last_add_confirmed

    def finish(metadata: LedgerMetadata) -> LedgerMetadata | None:
        if metadata.state is not LedgerState.IN_RECOVERY:
            return None
        return closed(pipeline.with_fragments(metadata), last_entry_id, length)

    access.versioned = await asyncio.to_thread(update_metadata, ledgers, ledger, access.versioned, finish)
    if not access.metadata.is_closed:
        raise MetadataVersionConflict(
            f"Ledger {ledger} was set to {access.metadata.state.name} while it was recovered", hint="recover it again"
        )


async def find_loss(access: LedgerAccess) -> RecoveryLoss | None:
    """Return the loss from closing the ledger; None if `recover` needs no loss.

    Changes and fences nothing. Raises LedgerRecoveryFailed when the end cannot be decided, with or without a loss, and
    the errors of `read_last_confirmed`.
    """
    if access.metadata.is_closed:
        return None
    confirmed = await read_last_confirmed(access)
    last_entry_id = max(confirmed.last_add_confirmed, access.metadata.last_fragment.first_entry_id - 1)
    with contextlib.closing(_Tail(access, last_entry_id + 1, fence=False)) as tail:
        if await tail.next() is not None:
            return None
    try:
        await _length_at(access, last_entry_id)
    except LedgerLengthUnknown:
        return await _measure_loss(access, last_entry_id)
    return None


async def _measure_loss(access: LedgerAccess, last_entry_id: int) -> RecoveryLoss:
    """Find the last entry up to `last_entry_id` that a bookie returns.

    Reads as many entries of each fragment as it has bookies, from the last fragment down: their write sets are all
    write sets of the fragment.
    """

    async def length_at(entry_id: int) -> tuple[int, int] | None:
        try:
            return entry_id, await _length_at(access, entry_id)
        except LedgerLengthUnknown:
            return None

    end = last_entry_id
    for fragment in reversed(access.metadata.ensembles):
        first = max(fragment.first_entry_id, end + 1 - len(fragment.bookies))
        found = await asyncio.gather(*map(length_at, range(end, first - 1, -1)))
        for readable in found:
            if readable is not None:
                return RecoveryLoss(last_entry_id, *readable)
        end = min(end, fragment.first_entry_id - 1)
    return RecoveryLoss(last_entry_id, INVALID_ENTRY_ID, 0)


async def _make_safe(access: LedgerAccess, accept_loss: RecoveryLoss | None) -> tuple[RecoveryPipeline, int]:
    """Fence, and add entries again that may be acknowledged; return the drained pipeline and the ledger's length."""
    metadata = access.metadata
    try:
        confirmed = await read_last_confirmed(access, fence=True)
        start = max(confirmed.last_add_confirmed, metadata.last_fragment.first_entry_id - 1)
        pipeline = RecoveryPipeline(access, last_add_confirmed=start, length=confirmed.length)
        with contextlib.closing(_Tail(access, start + 1)) as tail:
            while (entry := await tail.next()) is not None:
                await pipeline.ready()
                pipeline.add(entry.payload, entry_id=entry.entry_id, length=entry.length)
        await pipeline.flush()
        if pipeline.last_add_confirmed > start:
            return pipeline, pipeline.length
        try:
            return pipeline, await _length_at(access, start)
        except LedgerLengthUnknown:
            if accept_loss is None:
                raise
            loss = await _measure_loss(access, start)
            if (
                loss.last_entry_id != accept_loss.last_entry_id
                or loss.readable_entry_id < accept_loss.readable_entry_id
            ):
                raise
            return pipeline, loss.length
    except (Unauthorized, TimedOut, LedgerRecoveryFailed):
        raise
    except BkctlError as error:
        raise LedgerRecoveryFailed(
            f"Ledger {access.ledger} cannot be recovered: {error.message}", hint=_HINT
        ) from error


async def _length_at(access: LedgerAccess, entry_id: int) -> int:
    """Return the ledger's length with `entry_id` as its last entry, which only that entry contains.

    Raises LedgerLengthUnknown when no bookie returns the entry. The length beside the last add confirmed is a later
    entry's, or 0 when the last fragment has no entry yet. Java's client uses that length; but a wrong length in
    metadata is permanent, and readers trust it.
    """
    length = 0
    if entry_id >= 0:
        try:
            async for entry in read_entries(access, entry_id, entry_id):
                length = entry.length
        except Unauthorized:
            raise
        except BkctlError as error:
            raise LedgerLengthUnknown(
                f"Ledger {access.ledger} ends at entry {entry_id}, but its length is not known: {error.message}",
                hint="it stays IN_RECOVERY; start these bookies and try again. If they never return, "
                f"'bkctl ledger recover {access.ledger} --accept-loss' closes it and says what is given up",
            ) from error
    return length


class _Tail:
    """Recovery reads of consecutive entries, each from its whole write set, with some entries read ahead.

    Without `fence`: a plain read of the first entry only.
    """

    def __init__(self, access: LedgerAccess, first: int, *, fence: bool = True) -> None:
        if first > LAST_CONFIRMED_MAX + 1:
            raise LedgerRecoveryFailed(
                f"Ledger {access.ledger} cannot be recovered: its last fragment begins at entry "
                f"{access.metadata.last_fragment.first_entry_id}, which is impossible",
                hint="its metadata are damaged",
            )
        self._access = access
        self._fence = fence
        # A copy, because bookies that replace others while re-adding do not have the entries.
        self._replicas = access.replicas(access.metadata.last_fragment.bookies)
        self._next_id = first
        self._reads = WaitingReads(access, access.pool.recovery_bytes)
        self._window: deque[tuple[int, dict[asyncio.Future[Response], BookieChannel]]] = deque()

    async def next(self) -> LedgerEntry | None:
        """Return the next entry; None at the end, an entry that was never acknowledged.

        Raises LedgerRecoveryFailed when that cannot be decided; Unauthorized.
        """
        access = self._access
        while len(self._window) < (RECOVERY_READ_AHEAD if self._fence else 1):
            entry_id = self._next_id
            request = ReadRequest(access.ledger, entry_id)
            if self._fence:
                request = ReadRequest(access.ledger, entry_id, access.digest.master_key, True, True)
            channels = self._replicas[entry_id % access.schedule.ensemble_size]
            self._window.append((entry_id, {self._reads.send(channel, request): channel for channel in channels}))
            self._next_id += 1
        entry_id, pending = self._window.popleft()
        try:
            return await self._decide(entry_id, pending)
        finally:
            self._reads.abandon(pending)

    def close(self) -> None:
        """Let the entries go that were read ahead."""
        for _, pending in self._window:
            self._reads.abandon(pending)

    async def _decide(
        self, entry_id: int, pending: dict[asyncio.Future[Response], BookieChannel]
    ) -> LedgerEntry | None:
        access = self._access
        missing_count = 0
        problems: list[str] = []
        decisive_error: BkctlError | None = None
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                channel = pending.pop(future)
                if (again := self._reads.take(future)) is not None:
                    pending[again] = channel
                    continue
                try:
                    return entry_of(future, access, entry_id, channel.bookie_id)
                except (EntryNotFound, LedgerNotFound):
                    missing_count += 1
                except BkctlError as error:
                    problems.append(f"{channel.bookie_id}: {error.message}")
                    if isinstance(error, Unauthorized) or (decisive_error is None and isinstance(error, TimedOut)):
                        decisive_error = error
            if missing_count >= access.schedule.missing_count_for_recovery:
                return None
        message = (
            f"Ledger {access.ledger} cannot be recovered: whether entry {entry_id} was acknowledged is not known "
            f"({'; '.join(problems)})"
        )
        if decisive_error is not None:
            raise restate(decisive_error, message, _HINT)
        raise LedgerRecoveryFailed(message, hint=_HINT)
