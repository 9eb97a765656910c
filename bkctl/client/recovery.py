"""Recovery: fence a ledger, find where it ends, make its last entries safe, close it.

    OPEN → IN_RECOVERY (compare-and-set) → fencing read of the last add confirmed from the last fragment → each entry
    after it: recovery read; found by any bookie: added again (RECOVERY_ADD); lacking on Wq − Aq + 1 bookies: the end
    → CLOSED (compare-and-set), with the fragments that re-adding made.

Several clients may recover one ledger at once: whoever closes it first decides. Source: LedgerRecoveryOp,
ReadOnlyLedgerHandle.recover, ListenerBasedPendingReadOp.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from typing import Final

from bkctl.client.bookies import BookieChannel, failure, in_thread
from bkctl.client.ensemble import closed, update_metadata
from bkctl.client.reader import LedgerAccess, LedgerEntry, read_entries, read_last_confirmed, restate
from bkctl.client.writer import RecoveryPipeline
from bkctl.errors import (
    BkctlError,
    EntryNotFound,
    LedgerNotFound,
    LedgerRecoveryFailed,
    MetadataVersionConflict,
    ProtocolError,
    TimedOut,
    Unauthorized,
)
from bkctl.formats.metadata import LedgerMetadata, LedgerState
from bkctl.protocol.messages import ReadRequest, ReadResponse, Response

#: Recovery reads in flight ahead of the entry that is decided. Java reads one at a time (recoveryReadBatchSize).
RECOVERY_READ_AHEAD: Final = 16


async def recover(access: LedgerAccess) -> None:
    """Recover the ledger of `access`, whose `versioned` is CLOSED afterwards (by us, or by who was faster).

    Raises LedgerRecoveryFailed when the end cannot be decided or the last entries not be made safe (the ledger stays
    IN_RECOVERY), Unauthorized, TimedOut, MetadataVersionConflict, and what the store raises.
    """
    ledgers, ledger = access.pool.cluster.ledgers, access.ledger

    def begin(metadata: LedgerMetadata) -> LedgerMetadata | None:
        if metadata.state is not LedgerState.OPEN:
            return None
        return replace(metadata, state=LedgerState.IN_RECOVERY, length=0, last_entry_id=-1)

    access.versioned = await in_thread(update_metadata, ledgers, ledger, access.versioned, begin)
    if access.metadata.is_closed:
        return
    pipeline, length = await _make_safe(access)
    last_entry_id = pipeline.last_add_confirmed

    def finish(metadata: LedgerMetadata) -> LedgerMetadata | None:
        if metadata.state is not LedgerState.IN_RECOVERY:
            return None
        return closed(pipeline.with_fragments(metadata), last_entry_id, length)

    access.versioned = await in_thread(update_metadata, ledgers, ledger, access.versioned, finish)
    if not access.metadata.is_closed:
        raise MetadataVersionConflict(
            f"Ledger {ledger} was set to {access.metadata.state.name} while it was recovered", hint="recover it again"
        )


async def _make_safe(access: LedgerAccess) -> tuple[RecoveryPipeline, int]:
    """Fence, and add again what may have been acknowledged; returns the pipeline, drained, and the ledger's length."""
    metadata = access.metadata
    try:
        confirmed = await read_last_confirmed(access, fence=True)
        start = max(confirmed.last_add_confirmed, metadata.last_fragment.first_entry_id - 1)
        pipeline = RecoveryPipeline(access, last_add_confirmed=start, length=confirmed.length)
        tail = _Tail(access, start + 1)
        while (entry := await tail.next()) is not None:
            await pipeline.ready()
            pipeline.add(entry.payload, entry_id=entry.entry_id, length=entry.length)
        await pipeline.flush()
        if pipeline.last_add_confirmed > start:
            return pipeline, pipeline.length
        return pipeline, await _length_at(access, start)
    except (Unauthorized, TimedOut, LedgerRecoveryFailed):
        raise
    except BkctlError as error:
        raise LedgerRecoveryFailed(
            f"Ledger {access.ledger} cannot be recovered: {error.message}",
            hint="it stays IN_RECOVERY; try again when its bookies are back",
        ) from error


async def _length_at(access: LedgerAccess, entry_id: int) -> int:
    """The ledger's length with entry `entry_id` as its last, which only that entry tells. Raises when nobody gives it.

    The length told with the last add confirmed is a later entry's, or 0 when the last fragment has no entry yet. Java's
    client takes it as it is; but a wrong length in metadata stays for ever, and readers trust it.
    """
    length = 0
    if entry_id >= 0:
        async for entry in read_entries(access, entry_id, entry_id):
            length = entry.length
    return length


class _Tail:
    """Recovery reads of one entry after the other: each asked of its whole write set, some entries ahead."""

    def __init__(self, access: LedgerAccess, first: int) -> None:
        self._access = access
        # A copy: replacements made while re-adding are not where the entries are.
        self._replicas = access.replicas(access.metadata.last_fragment.bookies)
        self._next_id = first
        self._window: deque[tuple[int, dict[asyncio.Future[Response], BookieChannel]]] = deque()

    async def next(self) -> LedgerEntry | None:
        """The next entry; None when it was never acknowledged, which is the end.

        Raises LedgerRecoveryFailed when that cannot be decided; Unauthorized.
        """
        access = self._access
        while len(self._window) < RECOVERY_READ_AHEAD:
            entry_id = self._next_id
            request = ReadRequest(access.ledger, entry_id, access.digest.master_key, True, True)
            channels = self._replicas[entry_id % access.schedule.ensemble_size]
            self._window.append((entry_id, {each.send(request, access.scoped): each for each in channels}))
            self._next_id += 1
        entry_id, pending = self._window.popleft()
        missing_count = 0
        problems: list[str] = []
        passed_on: BkctlError | None = None
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                channel = pending.pop(future)
                try:
                    return self._entry(future, entry_id, channel)
                except (EntryNotFound, LedgerNotFound):
                    missing_count += 1
                except BkctlError as error:
                    problems.append(f"{channel.bookie_id}: {error.message}")
                    if isinstance(error, Unauthorized) or (passed_on is None and isinstance(error, TimedOut)):
                        passed_on = error
            if missing_count >= access.schedule.missing_count_for_recovery:
                return None
        message = (
            f"Ledger {access.ledger} cannot be recovered: whether entry {entry_id} was acknowledged is not known "
            f"({'; '.join(problems)})"
        )
        hint = "it stays IN_RECOVERY; try again when its bookies are back"
        raise LedgerRecoveryFailed(message, hint=hint) if passed_on is None else restate(passed_on, message, hint)

    def _entry(self, future: asyncio.Future[Response], entry_id: int, channel: BookieChannel) -> LedgerEntry:
        error = failure(future, self._access.ledger, entry_id, channel.bookie_id)
        if error is not None:
            raise error
        response = future.result()
        if not isinstance(response, ReadResponse):
            raise ProtocolError(f"Bookie {channel.bookie_id} answered a read with something else")
        return self._access.open_entry(response.body, entry_id)
