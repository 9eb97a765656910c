"""Trials of a cluster or bookie: write entries, read them back, compare. Source: SanityTestCommand."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from bkctl.client.ledger import BookKeeper
from bkctl.client.read_handle import ReadHandle
from bkctl.client.write_handle import WriteHandle
from bkctl.errors import BkctlError, Corrupt
from bkctl.formats.entry import DigestType
from bkctl.ids import LedgerId
from bkctl.protocol.messages import Protocol
from bkctl.tasks import run_to_end

#: Entries of a sanity test, unless told otherwise. Source: SanityTestCommand.
SANITY_ENTRY_COUNT: Final = 10
#: Payload of the entries of `sanity_test`.
SANITY_ENTRY_SIZE_BYTES: Final = 100


class RoundTrip(NamedTuple):
    """Result of writing and reading a trial ledger; times in seconds."""

    entry_count: int
    entry_size_bytes: int
    last_entry_id: int
    write_s: float
    read_s: float


async def round_trip(
    bookkeeper: BookKeeper,
    handle: WriteHandle,
    *,
    entry_count: int,
    entry_size_bytes: int,
    password: bytes = b"",
    progress: Callable[[int], None] = lambda _: None,
) -> RoundTrip:
    """Write `entry_count` random entries with `handle`, read them before and after closing, and compare.

    Raises Corrupt for entries that differ, and the errors of writing and reading. The ledger stays.
    """
    payloads = [os.urandom(entry_size_bytes) for _ in range(min(entry_count, 64))]
    began = time.perf_counter()
    for entry_id in range(entry_count):
        await handle.ready()
        handle.add(payloads[entry_id % len(payloads)])
        progress(entry_id + 1)
    await handle.flush()
    wrote = time.perf_counter()
    ledger = handle.ledger
    reads = 0.0
    for closed in (False, True):
        if closed:
            await handle.close()
        elif bookkeeper.protocol is Protocol.V3:
            await handle.write_lac()
        reader = await bookkeeper.open_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=password)
        # v2 does not carry an explicit LAC, so its reader does not see the last entries of an open ledger as confirmed.
        sees_lac = closed or bookkeeper.protocol is Protocol.V3
        last = reader.last_add_confirmed if sees_lac else handle.last_add_confirmed
        async with reader:
            started = time.perf_counter()
            count = await _compare(reader, payloads, last)
            reads = time.perf_counter() - started
        if count != entry_count:
            state = "closed" if closed else "open"
            raise Corrupt(f"Ledger {ledger}: {entry_count} entries were written, {count} were read from it {state}")
    return RoundTrip(entry_count, entry_size_bytes, handle.last_add_confirmed, wrote - began, reads)


def not_deleted(ledger: LedgerId, error: BkctlError) -> str:
    """Return what to say of a temporary ledger whose deletion failed."""
    return f"Ledger {ledger} is not deleted: {error.message}; use 'bkctl ledger delete {ledger}'"


@contextlib.asynccontextmanager
async def temporary(bookkeeper: BookKeeper, ledger: LedgerId, report: Callable[[str], None]) -> AsyncIterator[None]:
    """Delete `ledger` after the block, also after an error or interrupt.

    A deletion that fails goes to `report`, and its error is raised unless the block raised one.
    """
    failed = True
    try:
        yield
        failed = False
    finally:
        try:
            await run_to_end(bookkeeper.delete_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id))
        except BkctlError as error:
            report(not_deleted(ledger, error))
            if not failed:
                raise


class LedgerTrial(NamedTuple):
    """The result of `try_ledger`."""

    ledger: LedgerId
    result: RoundTrip
    deleted: bool


async def try_ledger(
    bookkeeper: BookKeeper,
    create: Callable[[BookKeeper], Awaitable[WriteHandle]],
    *,
    entry_count: int,
    entry_size_bytes: int,
    password: bytes = b"",
    keep: bool = False,
    progress: Callable[[int], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
    report: Callable[[str], None] = lambda _: None,
) -> LedgerTrial:
    """Run `round_trip` on the ledger that `create` returns, and delete it as `temporary` does, unless `keep`.

    `note` gets a sentence that names the ledger.
    """
    handle = await create(bookkeeper)
    note(f"Ledger {handle.ledger}")
    deletion = temporary(bookkeeper, handle.ledger, report)
    async with contextlib.nullcontext() if keep else deletion, handle:
        result = await round_trip(
            bookkeeper, handle, entry_count=entry_count, entry_size_bytes=entry_size_bytes, password=password,
            progress=progress,
        )  # fmt: skip
    return LedgerTrial(handle.ledger, result, not keep)


async def sanity_test(
    bookkeeper: BookKeeper,
    *,
    ledger_scope_id: int,
    entry_count: int,
    progress: Callable[[int], None] = lambda _: None,
    report: Callable[[str], None] = lambda _: None,
) -> RoundTrip:
    """Run `round_trip` on a new ledger of one bookie, and delete the ledger in any case, as `temporary` does.

    `bookkeeper` has `only` that bookie. Raises the errors of creating, writing and reading: NotEnoughBookies for a
    bookie that takes no entries. Source: SanityTestCommand.
    """
    handle = await bookkeeper.create_ledger_adv(
        ledger_scope_id=ledger_scope_id, ensemble_size=1, write_quorum_size=1, ack_quorum_size=1,
        digest_type=DigestType.HMAC,
    )  # fmt: skip
    async with temporary(bookkeeper, handle.ledger, report), handle:
        return await round_trip(
            bookkeeper, handle, entry_count=entry_count, entry_size_bytes=SANITY_ENTRY_SIZE_BYTES, progress=progress
        )


async def _compare(reader: ReadHandle, payloads: Sequence[bytes], last: int) -> int:
    """Return the number of entries up to `last`. Raises Corrupt for one that is not as written."""
    count = 0
    if last >= 0:
        async for entry in reader.read_unconfirmed(0, last):
            if entry.payload != payloads[entry.entry_id % len(payloads)]:
                raise Corrupt(f"Ledger {reader.ledger}: entry {entry.entry_id} is not what was written")
            count += 1
    return count
