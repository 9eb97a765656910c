"""Copies the entries of one fragment to bookies that lack them: read from any replica, RECOVERY_ADD to the targets."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, repeat
from operator import itemgetter
from typing import Final, NamedTuple

from bkctl.client.bookies import BookieChannel, WaitingBytes, failure
from bkctl.client.reader import WINDOW_BYTES, LedgerAccess, restate
from bkctl.errors import BkctlError, NotFound, ProtocolError
from bkctl.formats.availability import Availability
from bkctl.pace import Pace
from bkctl.protocol.messages import AddRequest, BytesLike, ReadRequest, ReadResponse, Response
from bkctl.replication.fragments import ANSWERED, UNREADABLE_NAMED_MAX, FaultReason, LedgerFragment, reason_of
from bkctl.replication.replica_reads import ReplicaReader
from bkctl.tasks import in_order

#: Entries of a fragment on their way at once. Apache's rereplicationEntryBatchSize (10) serves the same purpose.
BATCH_SIZE: Final = 100
#: Fragments whose entries are on their way at once, and the approximate bytes of those entries together.
COPIES_AT_ONCE: Final = 64
WINDOWS_BYTES: Final = 256 << 20
#: Bytes of entries that were read and not written yet, whatever their sizes. Further entries are read again, so many at
#: once.
WAITING_BYTES_MAX: Final = 2 * WINDOWS_BYTES
READ_AGAIN_COUNT: Final = 8


class UnreadableEntries(NamedTuple):
    """The `entry_count` entries from `first_entry_id` to `last_entry_id` that the fragment's bad bookies should hold,
    and that no replica returns.

    `problems` has the error of each bookie, for the first entry. `lost`: every bookie that should hold the entries
    answers, and lacks them or has them damaged; the ones that the caller named (FaultReason.GIVEN) need not answer.
    """

    first_entry_id: int
    last_entry_id: int
    entry_count: int
    problems: tuple[tuple[str, BkctlError], ...]
    lost: bool

    def __str__(self) -> str:
        several = self.first_entry_id != self.last_entry_id
        what = f"Entries {self.first_entry_id} to {self.last_entry_id}" if several else f"Entry {self.first_entry_id}"
        return f"{what} cannot be read from any bookie ({self.answers})"

    @property
    def all_answered(self) -> bool:
        """True if every bookie answered, the ones that the caller named too."""
        return all(reason_of(error) in ANSWERED for _, error in self.problems)

    @property
    def answers(self) -> str:
        """The errors of the bookies, for a message."""
        return "; ".join(f"{bookie_id}: {error.message}" for bookie_id, error in self.problems)


class TargetFailed(Exception):
    """A bookie did not take an entry."""

    def __init__(self, bookie_id: str, error: BkctlError) -> None:
        super().__init__(error.message)
        self.bookie_id = bookie_id
        self.error = error


@dataclass(eq=False)
class CopyTools:
    """Parts and bounds that all copies of a replicator share. `progress` gets the entries and bytes of each write.

    On their way are `batch_size` entries and about 16 MiB of one fragment, about 256 MiB of all fragments. Entries of
    at most 64 fragments are on their way at once, and at least two entries of each. `waiting` counts entries that were
    read and not written yet. Those without room are read again, one after the other in `turns`.
    """

    replicas: ReplicaReader
    batch_size: int
    pace: Pace
    progress: Callable[[int, int], None]
    #: Gets the bytes of each entry that was read.
    was_read: Callable[[int], None]
    _copying_count: int = 0

    def __post_init__(self) -> None:
        self._permits = asyncio.Semaphore(COPIES_AT_ONCE)
        self.waiting = WaitingBytes(WAITING_BYTES_MAX)
        self.turns = asyncio.Semaphore(READ_AGAIN_COUNT)

    @contextlib.asynccontextmanager
    async def copying(self) -> AsyncIterator[None]:
        """Hold a permit while entries of a fragment are on their way; wait for one first."""
        async with self._permits:
            self._copying_count += 1
            try:
                yield
            finally:
                self._copying_count -= 1

    def entry_count(self, size_bytes: int) -> int:
        """Return how many entries of that size (0: unknown) one fragment may have on their way now."""
        window_bytes = min(WINDOW_BYTES, WINDOWS_BYTES // self._copying_count)
        return min(max(window_bytes // (size_bytes or WINDOW_BYTES // 16), 2), max(self.batch_size, 1))


@dataclass(eq=False)
class FragmentCopy:
    """A copy of one fragment's entries to `targets` (ensemble index → bookie).

    All entries up to `done_through` are at their targets, at first by an earlier copy to these, which was cancelled.
    They are not copied again if the targets list them.
    """

    tools: CopyTools
    access: LedgerAccess
    fragment: LedgerFragment
    targets: Mapping[int, str]
    done_through: int = -1
    entry_count: int = 0
    size_bytes: int = 0
    unreadable: list[UnreadableEntries] = field(default_factory=list)
    _present: dict[str, Availability] = field(default_factory=dict)
    _size_bytes_largest: int = 0

    def __post_init__(self) -> None:
        #: Each bookie of the fragment, and True for a bad one.
        self._bookies = [
            (index in self.fragment.bookie_indexes, self.access.pool.channel(bookie_id))
            for index, bookie_id in enumerate(self.fragment.ensemble)
        ]
        self._known_through = self.done_through

    async def run(self) -> None:
        """Copy all entries. Raise TargetFailed; entries that no replica returns are in `unreadable`."""
        for index, target in self.targets.items():
            if target == self.fragment.ensemble[index] or self._known_through >= 0:
                self._present[target] = await self._listed(target)
        await self._copy_all(self._wanted())

    async def try_reading(self, entry_ids: Iterable[int]) -> None:
        """Read entries, ascending, and write none; entries that no replica returns are in `unreadable`."""
        await self._copy_all((entry_id, []) for entry_id in entry_ids)

    def _wanted(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each entry to copy, ascending, with the ensemble indexes of its targets."""
        merged = heapq.merge(*(zip(self.fragment.entries_of(index), repeat(index)) for index in self.targets))
        return ((entry_id, [index for _, index in pairs]) for entry_id, pairs in groupby(merged, key=itemgetter(0)))

    async def _copy_all(self, wanted: Iterator[tuple[int, list[int]]]) -> None:
        unreadable_count = 0
        tools = self.tools
        copies = in_order(wanted, lambda entry: self._copy(*entry), lambda: tools.entry_count(self._size_bytes_largest))
        async with tools.copying(), contextlib.aclosing(copies):
            async for (entry_id, _), problems in copies:
                if problems:
                    self._add_unreadable(entry_id, problems)
                    unreadable_count += 1
                    if unreadable_count >= UNREADABLE_NAMED_MAX:
                        return
                elif not unreadable_count:
                    self.done_through = max(self.done_through, entry_id)

    async def _listed(self, target: str) -> Availability:
        """Return the entries that the target lists."""
        try:
            return await self.tools.replicas.listed(self.access, target)
        except BkctlError:  # an old bookie cannot list: all is copied
            return Availability(())

    async def _copy(self, entry_id: int, indexes: list[int]) -> list[tuple[str, BkctlError]]:
        """Bring one entry to the targets at `indexes`; return each bookie's error if no bookie returns the entry."""
        access = self.access
        lacking = []
        for index in indexes:
            target = self.targets[index]
            if entry_id in self._present.get(target, ()):
                if entry_id <= self._known_through:
                    continue
                # Another target's entries may be of a deleted ledger of this id, whose digests are right too.
                is_own = target == self.fragment.ensemble[index]
                if is_own and (await self._read(entry_id, [access.pool.channel(target)]))[0] is not None:
                    continue
            lacking.append(target)
        if indexes and not lacking:
            return []
        tools, channels = self.tools, self._sources(entry_id)
        body, problems = await self._read(entry_id, channels)
        size = len(body or b"")
        self._size_bytes_largest = max(self._size_bytes_largest * 15 // 16, size)
        if tools.waiting.admit(size):
            try:
                await self._give(entry_id, body, lacking)
            finally:
                tools.waiting.free(size)
        else:
            body = None
            async with tools.turns:
                body, problems = await self._read(entry_id, channels)
                await self._give(entry_id, body, lacking)
        return problems

    async def _give(self, entry_id: int, body: BytesLike | None, targets: list[str]) -> None:
        """Write an entry, if it was read, to the targets at the pace of the copy; no more after an unreadable one."""
        if body is not None:
            await self.tools.pace.acquire(len(body) * max(len(targets), 1))
            if targets and not self.unreadable:
                await self._write(entry_id, body, targets)

    def _sources(self, entry_id: int) -> list[BookieChannel]:
        """Return the bookies that should have the entry: good ones first, suspects after others."""
        now = time.monotonic()
        bookies = [self._bookies[index] for index in self.access.schedule.write_set(entry_id)]
        bookies.sort(key=lambda bookie: (bookie[0], bookie[1].suspect_until > now))
        return [channel for _, channel in bookies]

    async def _read(
        self, entry_id: int, channels: list[BookieChannel]
    ) -> tuple[BytesLike | None, list[tuple[str, BkctlError]]]:
        """Return the entry from the first of `channels` that has it intact, or None and the error of each bookie.

        While a bookie is silent for speculativeReadTimeout, the next one is asked too.
        """
        access = self.access
        untried = deque(channels)
        pending: dict[asyncio.Future[Response], BookieChannel] = {}
        problems: list[tuple[str, BkctlError]] = []
        ask = True
        while untried or pending:
            if untried and (ask or not pending):
                channel = untried.popleft()
                pending[channel.send(ReadRequest(access.ledger, entry_id), access.scoped)] = channel
            limit_s = access.pool.config.speculative_read_s(len(pending) - 1) if untried else None
            done, _ = await asyncio.wait(pending, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            ask = not done
            if not done:
                for channel in pending.values():
                    channel.failed()
            for future in done:
                channel = pending.pop(future)
                try:
                    body = self._body(future, entry_id, channel.bookie_id)
                    self.tools.was_read(len(body))
                    return body, []
                except BkctlError as error:
                    if not isinstance(error, NotFound):
                        channel.failed()
                    problems.append((channel.bookie_id, error))
        return None, problems

    def _body(self, future: asyncio.Future[Response], entry_id: int, bookie_id: str) -> BytesLike:
        """Return the entry in a bookie's answer. Raise the answer's error, or DigestMismatch."""
        error = failure(future, self.access.ledger, entry_id, bookie_id)
        if error is not None:
            raise error
        response = future.result()
        if not isinstance(response, ReadResponse) or response.body is None:
            raise ProtocolError(f"Bookie {bookie_id} answered a read of entry {entry_id} without an entry")
        self.access.digest.open(response.body, entry_id)
        return response.body

    async def _write(self, entry_id: int, body: BytesLike, targets: list[str]) -> None:
        access = self.access
        request = AddRequest(access.ledger, entry_id, access.digest.master_key, body, True, True)
        sent = {access.pool.channel(target).send(request, access.scoped): target for target in targets}
        await asyncio.wait(sent)
        for future, target in sent.items():
            error = failure(future, access.ledger, entry_id, target)
            if error is not None:
                access.pool.channel(target).failed()
                message = f"Bookie {target} does not take entry {entry_id} of ledger {access.ledger}: {error.message}"
                raise TargetFailed(target, restate(error, message))
            self.entry_count += 1
            self.size_bytes += len(body)
            self.tools.progress(1, len(body))

    def _add_unreadable(self, entry_id: int, problems: list[tuple[str, BkctlError]]) -> None:
        """Add an entry to `unreadable`: to its last span, or as a new one."""
        given = {fault.bookie_id for fault in self.fragment.faults if fault.reason is FaultReason.GIVEN}
        lost = all(bookie_id in given or reason_of(error) in ANSWERED for bookie_id, error in problems)
        last = self.unreadable[-1] if self.unreadable else None
        adjoins = last and self.fragment.next_of(last.last_entry_id, self.fragment.bookie_indexes) == entry_id
        if last and adjoins and last.lost == lost:
            self.unreadable[-1] = last._replace(last_entry_id=entry_id, entry_count=last.entry_count + 1)
        else:
            self.unreadable.append(UnreadableEntries(entry_id, entry_id, 1, tuple(problems), lost))
