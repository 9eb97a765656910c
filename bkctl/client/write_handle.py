"""A ledger that this client writes, from its creation until it is closed.

Source: LedgerHandle, PendingWriteLacOp, ForceLedgerOp.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from enum import IntFlag
from typing import cast

from bkctl.client.bookies import failure
from bkctl.client.ensemble import closed, update_metadata
from bkctl.client.read_handle import Handle
from bkctl.client.reader import LedgerAccess, restate
from bkctl.client.writer import AddFuture, AddPipeline
from bkctl.errors import (
    BkctlError,
    BookieUnavailable,
    IllegalOperation,
    LedgerClosed,
    LedgerFenced,
    MetadataVersionConflict,
    restated,
)
from bkctl.formats.layout import Buffer
from bkctl.formats.metadata import LedgerMetadata
from bkctl.protocol.messages import ForceLedgerRequest, Protocol, Request, WriteLacRequest
from bkctl.tasks import drop_error, run_to_end


class WriteFlag(IntFlag):
    """Ways to write a ledger. With DEFERRED_SYNC bookies acknowledge entries before they are on disk (`force`)."""

    NONE = 0
    DEFERRED_SYNC = 1


class WriteHandle(Handle):
    """A ledger that this client writes, from `BookKeeper.create_ledger` until `close`.

    With `recovery` bookies accept its adds although a recovery fenced the ledger. Java: WriteHandle, WriteAdvHandle.
    """

    def __init__(
        self,
        access: LedgerAccess,
        *,
        own_entry_ids: bool,
        recovery: bool = False,
        write_flags: WriteFlag = WriteFlag.NONE,
        explicit_lac_interval_s: float = 0,
    ) -> None:
        super().__init__(access)
        self._own_entry_ids = own_entry_ids
        self._deferred_sync = WriteFlag.DEFERRED_SYNC in write_flags
        self._pipeline = AddPipeline(access, recovery=recovery, deferred_sync=self._deferred_sync, on_end=self._ended)
        self._closing: asyncio.Task[None] | None = None
        self._forced_length = 0
        if explicit_lac_interval_s > 0:
            self._write_lac_later(explicit_lac_interval_s, -1)

    @property
    def last_add_confirmed(self) -> int:
        """Id of the last acknowledged entry, with DEFERRED_SYNC of the last forced one; -1: none."""
        return self._pipeline.lac if self._deferred_sync else self._pipeline.last_add_confirmed

    @property
    def last_add_pushed(self) -> int:
        """Id of the last entry added; -1: none. Java: getLastAddPushed."""
        return self._pipeline.next_id - 1

    @property
    def length(self) -> int:
        """Payload bytes added, including unacknowledged ones."""
        return self._pipeline.length

    @property
    def pending_count(self) -> int:
        """Number of unacknowledged entries."""
        return len(self._pipeline.pending)

    def add(self, payload: Buffer, *, entry_id: int | None = None) -> asyncio.Future[int]:
        """Add an entry without waiting; the future gives its id once the ack quorum has it and all entries before it.

        `await handle.add(b"…")` adds one entry after the other; to pipeline, `await handle.ready()` before each add.
        Only ledgers of `create_ledger_adv` accept an `entry_id`; entries are acknowledged without gaps. The future
        fails with, or `add` raises, LedgerFenced (another client recovers the ledger), NotEnoughBookies, Unauthorized,
        LedgerClosed. `add` also raises UsageError for a payload that does not fit a frame, DuplicateEntryId, and
        TooManyPending for a caller that never waits. An entry whose future is cancelled is still written.
        Java: appendAsync, WriteAdvHandle.writeAsync.
        """
        return cast("asyncio.Future[int]", self._add(payload, None, entry_id))

    def _add(self, payload: Buffer, future: AddFuture | None, entry_id: int | None) -> AddFuture:
        if entry_id is not None and not self._own_entry_ids:
            raise IllegalOperation(
                "The client chooses the entry ids of this ledger", hint="create it with create_ledger_adv"
            )
        return self._pipeline.add(payload, future, entry_id=entry_id)

    async def add_all(self, payloads: Sequence[Buffer]) -> None:
        """Add entries one after the other, and wait while too many are in flight; `flush` waits for all of them.

        Faster than `add`, because entries go out in runs and none has a future. Raises the error that ended writing,
        and UsageError for a payload that does not fit a frame, after the entries before it were added.
        """
        await self._pipeline.add_all(payloads)

    async def ready(self) -> None:
        """Wait while too many adds are in flight. Raises the error that ended writing, if one did."""
        await self._pipeline.ready()

    async def flush(self) -> None:
        """Wait until every add so far is acknowledged. Raises the error that ended writing, if one did."""
        await self._pipeline.flush()

    async def write_lac(self) -> None:
        """Write the last add confirmed to the bookies (explicit LAC), so that readers see it before the next entry.

        `BookKeeper(explicit_lac_interval=…)` does so regularly.

        Does nothing before the first acknowledged entry. Raises LedgerClosed or the error that ended writing, and the
        last error when the ack quorum is not reached.
        Source: PendingWriteLacOp.
        """
        access, lac = self._access, self._pipeline.lac
        if lac < 0:
            return
        request = WriteLacRequest(self.ledger, lac, access.digest.master_key, access.digest.seal_lac(lac))
        indexes = access.schedule.write_set(lac)
        await self._ask(request, indexes, access.schedule.ack_quorum_size, "Explicit LAC")

    async def force(self) -> None:
        """Wait until all bookies of the ensemble have synced their entries of this ledger. v3 only.

        Raises IllegalOperation in v2, LedgerClosed or the error that ended writing, the error of a bookie that
        fails, and BookieUnavailable if a bookie may have restarted, without entries that it acknowledged.
        Source: ForceLedgerOp.
        """
        access, pipeline = self._access, self._pipeline
        if access.pool.protocol is Protocol.V2:
            raise IllegalOperation("Protocol v2 has no force", hint="use v3")
        last, length, pushed = pipeline.last_add_confirmed, pipeline.length_confirmed, pipeline.next_id
        size = access.schedule.ensemble_size
        pipeline.send_unsent()
        await self._ask(ForceLedgerRequest(self.ledger), range(size), size, "Force")
        lost = [channel.bookie_id for channel, losses in pipeline.sent_over.items() if channel.losses != losses]
        if lost:
            raise BookieUnavailable(
                f"Force of ledger {self.ledger} failed: the connection to {', '.join(lost)} was lost since it "
                "acknowledged entries, so a restart may have lost these", hint="write on in a new ledger",
            )  # fmt: skip
        if pushed == pipeline.next_id:
            pipeline.sent_over.clear()
        if last > pipeline.lac:
            pipeline.lac, self._forced_length = last, length

    async def close(self) -> None:
        """Wait for the adds in flight, then close the ledger at the last add confirmed. Further calls are harmless.

        A cancellation is raised once the ledger is closed. With DEFERRED_SYNC, entries are forced first, and the ones
        that cannot be are left out.
        Raises the error that ended writing, if one did (the ledger is still closed at its last acknowledged entry,
        unless another client fenced it), and MetadataVersionConflict if another client closed it at another entry.
        Source: LedgerHandle.doAsyncCloseInternal.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._flush_and_close())
        await run_to_end(self._closing)
        error = self._pipeline.error
        if error is not None and not isinstance(error, _ClosedByUs):
            raise restated(error)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.close()
        else:
            with contextlib.suppress(BkctlError):  # the error in progress is the cause
                await self.close()

    def _ended(self, error: BkctlError) -> None:
        if self._closing is None and not isinstance(error, _ClosedByUs) and not self._access.pool.closed:
            self._closing = asyncio.get_running_loop().create_task(self._close())
            # close() raises the error; without close(), the adds have failed with their own.
            drop_error(self._closing)

    async def _flush_and_close(self) -> None:
        try:
            await self._pipeline.flush()
            if self._pipeline.last_add_confirmed > self.last_add_confirmed:
                await self.force()
        except BkctlError as error:  # close() raises it
            await self._pipeline.close(error)
        await self._close()

    async def _close(self) -> None:
        await self._pipeline.close(_ClosedByUs(f"Ledger {self.ledger} is closed"))
        access, ledgers = self._access, self._access.pool.cluster.ledgers
        last_entry_id = self.last_add_confirmed
        length = self._forced_length if self._deferred_sync else self._pipeline.length_confirmed
        if isinstance(self._pipeline.error, (LedgerFenced, LedgerClosed)) and not isinstance(
            self._pipeline.error, _ClosedByUs
        ):
            # The client that fenced the ledger closes it.
            access.versioned = await asyncio.to_thread(ledgers.read, self.ledger)
            return

        def change(metadata: LedgerMetadata) -> LedgerMetadata | None:
            if not metadata.is_closed:
                return closed(metadata, last_entry_id, length)
            if (metadata.last_entry_id, metadata.length) == (last_entry_id, length):
                return None
            raise MetadataVersionConflict(
                f"Ledger {self.ledger} was closed by another client at entry {metadata.last_entry_id} "
                f"({metadata.length} bytes), not at {last_entry_id} ({length} bytes)"
            )

        access.versioned = await asyncio.to_thread(update_metadata, ledgers, self.ledger, access.versioned, change)

    def _write_lac_later(self, interval_s: float, written: int) -> None:
        """Write the last add confirmed after each interval in which it moved. Source: ExplicitLacUpdateFlow."""

        def write() -> None:
            if self._pipeline.error is None and not self._access.pool.closed:
                if self.last_add_confirmed > written:
                    drop_error(loop.create_task(self.write_lac()))
                self._write_lac_later(interval_s, self.last_add_confirmed)

        loop = asyncio.get_running_loop()
        loop.call_later(interval_s, write)

    async def _ask(self, request: Request, indexes: tuple[int, ...] | range, needed: int, what: str) -> None:
        """Send `request` to the bookies at `indexes` over v3, and wait until `needed` of them succeed."""
        if self._pipeline.error is not None:  # bookies would answer, for a ledger that is no longer written
            raise restated(self._pipeline.error)
        access = self._access
        ensemble = self._pipeline.ensemble
        pending = {
            access.pool.channel(ensemble[index], Protocol.V3).send(request, access.scoped): ensemble[index]
            for index in indexes
        }
        problems: list[str] = []
        last_error: BkctlError | None = None
        while needed > 0 and len(pending) >= needed:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                bookie_id = pending.pop(future)
                error = failure(future, self.ledger, None, bookie_id)
                if error is None:
                    needed -= 1
                else:
                    problems.append(f"{bookie_id}: {error.message}")
                    last_error = error
        if needed > 0:
            assert last_error is not None
            raise restate(last_error, f"{what} of ledger {self.ledger} failed ({'; '.join(problems)})")


class _ClosedByUs(LedgerClosed):
    """Ends the pipeline of a handle that closes its own ledger."""
