"""Replicas of entries: reading them from one bookie, and checking all of them.

Source: LedgerChecker, which samples; this reads every replica.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from enum import Enum
from itertools import chain, islice
from typing import Final, NamedTuple

from bkctl.client.bookies import BookieChannel, WaitingBytes
from bkctl.client.read_handle import ReadHandle, entry_of
from bkctl.client.reader import WAITING_BYTES_MAX, WINDOW_BYTES, LedgerEntry
from bkctl.client.waiting_reads import WaitingReads
from bkctl.errors import (
    BkctlError,
    CorruptRecord,
    DigestMismatch,
    EntryNotFound,
    LedgerNotFound,
    TruncatedRecord,
    UsageError,
)
from bkctl.pace import Pace
from bkctl.protocol.messages import ReadRequest, Response

#: Entries read ahead of the one that is reported.
WINDOW_COUNT_MAX: Final = 256
#: Reads of one replica in flight.
REPLICA_WINDOW_COUNT: Final = 256


class ReplicaState(Enum):
    """State of one bookie's replica of an entry."""

    OK = "ok"
    MISSING = "missing"
    #: The digest does not match, or the entry is another one.
    DAMAGED = "damaged"
    #: Intact, but with another payload or ledger length than the first intact replica.
    DIFFERENT = "different"
    #: Unknown: the bookie is down, gives no valid answer, or cannot serve the ledger's scope.
    UNAVAILABLE = "unavailable"


class Replica(NamedTuple):
    """One replica of one entry; `error` is None for OK. Intact replicas may differ in their last add confirmed."""

    bookie_id: str
    state: ReplicaState
    size_bytes: int | None = None
    error: BkctlError | None = None


class EntryCheck(NamedTuple):
    """One entry with all replicas of its write set, in the order of reading."""

    entry_id: int
    replicas: tuple[Replica, ...]

    @property
    def ok(self) -> bool:
        """True if every replica is present and intact."""
        return all(replica.state is ReplicaState.OK for replica in self.replicas)


async def verify_entries(handle: ReadHandle) -> AsyncIterator[EntryCheck]:
    """Read the entries up to the last add confirmed from every bookie of their write sets.

    Yields one check per entry, in order. Reads are pipelined within a bounded window. Failures of bookies are in the
    checks, except of bookies that were replaced since: their replacements are asked.
    """
    access, last = handle._access, handle.last_add_confirmed
    ensemble_size, write_quorum_size = access.schedule.ensemble_size, access.schedule.write_quorum_size
    window: deque[tuple[int, list[tuple[BookieChannel, asyncio.Future[Response]]]]] = deque()
    fragments = deque(access.metadata.ensembles)
    replicas: list[tuple[BookieChannel, ...]] = []
    size = access.entry_size_bytes
    largest, next_id = size, 0
    #: Faulty bookies of fragments for which the metadata was read again.
    looked_up: set[tuple[int, str]] = set()

    reads = WaitingReads(access, WaitingBytes(WAITING_BYTES_MAX))

    def ask(entry_id: int, channels: Iterable[BookieChannel]) -> list[tuple[BookieChannel, asyncio.Future[Response]]]:
        request = ReadRequest(handle.ledger, entry_id)
        return [(channel, reads.send(channel, request)) for channel in channels]

    while next_id <= last or window:
        count_max = min(max(WINDOW_BYTES // ((max(size, largest) + 64) * write_quorum_size), 2), WINDOW_COUNT_MAX)
        while next_id <= last and len(window) < count_max:
            while fragments and fragments[0].first_entry_id <= next_id:
                replicas = access.replicas(fragments.popleft().bookies)
            window.append((next_id, ask(next_id, replicas[next_id % ensemble_size])))
            next_id += 1
        entry_id, asked = window.popleft()
        check = await _check(handle, reads, entry_id, asked)
        if not check.ok:
            first = access.metadata.fragment_of(entry_id).first_entry_id
            faulty = {(first, replica.bookie_id) for replica in check.replicas if replica.state is not ReplicaState.OK}
            if not faulty <= looked_up:
                looked_up |= faulty
                await access.read_ensembles()
                fragments = deque(access.metadata.ensembles)
            present = access.replicas(access.metadata.fragment_of(entry_id).bookies)[entry_id % ensemble_size]
            if present != tuple(channel for channel, _ in asked):
                check = await _check(handle, reads, entry_id, ask(entry_id, present))
        largest = max(largest * 15 // 16, *(replica.size_bytes or 0 for replica in check.replicas))
        yield check


async def _check(
    handle: ReadHandle, reads: WaitingReads, entry_id: int, asked: list[tuple[BookieChannel, asyncio.Future[Response]]]
) -> EntryCheck:
    answered = [(channel, await reads.outcome(future)) for channel, future in asked]
    reference: LedgerEntry | None = None
    found = []
    for channel, future in answered:
        try:
            entry = entry_of(future, handle._access, entry_id, channel.bookie_id)
        except (EntryNotFound, LedgerNotFound) as error:
            found.append(Replica(channel.bookie_id, ReplicaState.MISSING, error=error))
        except (DigestMismatch, TruncatedRecord, CorruptRecord) as error:
            found.append(Replica(channel.bookie_id, ReplicaState.DAMAGED, error=error))
        except BkctlError as error:
            found.append(Replica(channel.bookie_id, ReplicaState.UNAVAILABLE, error=error))
        else:
            state = ReplicaState.OK
            if reference is None:
                reference = entry
            elif (entry.length, entry.payload) != (reference.length, reference.payload):
                state = ReplicaState.DIFFERENT
            found.append(Replica(channel.bookie_id, state, len(entry.payload)))
    return EntryCheck(entry_id, tuple(found))


class ReplicaFinding(NamedTuple):
    """A fault of one replica of an entry.

    `problem` is `missing`, `damaged`, `different` (see ReplicaState), `unavailable`, or `length`: the entries' sizes
    do not add up to the length in the metadata. `bookie_id` is None for a finding about the whole ledger. The fault
    is that of `entry_count` entries from `entry_id` to `last_entry_id`, of which the bookie may hold a stripe only.
    """

    entry_id: int
    bookie_id: str | None
    problem: str
    message: str
    last_entry_id: int
    entry_count: int = 1

    @property
    def entries(self) -> str:
        """The range: `7`, or `7-20`."""
        return str(self.entry_id) if self.last_entry_id == self.entry_id else f"{self.entry_id}-{self.last_entry_id}"


class Verification:
    """Reads every entry of a ledger from every replica.

    `entry_count`, `replica_count` and `finding_count` grow with progress. An unavailable bookie gives one finding for
    all of its entries. `progress` gets the number of entries checked so far; `pace` bounds what is read.
    """

    def __init__(
        self, handle: ReadHandle, progress: Callable[[int], None] = lambda _: None, *, pace: Pace | None = None
    ) -> None:
        self._handle = handle
        self._progress = progress
        self._pace = pace or Pace()
        self.entry_count = 0
        self.replica_count = 0
        self.finding_count = 0

    async def findings(self) -> AsyncIterator[ReplicaFinding]:
        """Check the entries up to the last add confirmed, and yield a finding for each range of a bookie's entries.

        A range ends where the bookie has an intact entry, or one with another problem.
        """
        ranges: dict[str, ReplicaFinding] = {}
        unavailable: dict[str, ReplicaFinding] = {}
        length: int | None = 0
        async for check in verify_entries(self._handle):
            size = None
            for replica in check.replicas:
                bookie_id, problem = replica.bookie_id, replica.state.value
                is_unknown = replica.state is ReplicaState.UNAVAILABLE
                same = (unavailable if is_unknown else ranges).get(bookie_id)
                if not is_unknown:
                    self.replica_count += 1
                    if same is not None and same.problem != problem:
                        yield self._found(ranges.pop(bookie_id))
                        same = None
                    if replica.state is ReplicaState.OK:
                        size = replica.size_bytes
                        continue
                same = same or ReplicaFinding(check.entry_id, bookie_id, problem, _text(replica), check.entry_id, 0)
                same = same._replace(last_entry_id=check.entry_id, entry_count=same.entry_count + 1)
                (unavailable if is_unknown else ranges)[bookie_id] = same
            length = None if length is None or size is None else length + size
            self.entry_count += 1
            self._progress(self.entry_count)
            await self._pace.acquire(sum(replica.size_bytes or 0 for replica in check.replicas))
        for each in (*sorted(ranges.values()), *unavailable.values()):
            yield self._found(each)
        metadata = self._handle.metadata
        if metadata.is_closed and length not in (None, metadata.length):
            text = f"The entries have {length} bytes, the metadata says {metadata.length}"
            last = metadata.last_entry_id
            yield self._found(ReplicaFinding(last, None, "length", text, last))

    def _found(self, finding: ReplicaFinding) -> ReplicaFinding:
        """Count a finding, and return it with the number of its entries in the message."""
        self.finding_count += 1
        count, message = finding.entry_count, finding.message
        if finding.problem == ReplicaState.UNAVAILABLE.value:
            return finding._replace(message=f"{count:,} {'entry' if count == 1 else 'entries'} not checked: {message}")
        return finding if count == 1 else finding._replace(message=f"{count:,} entries, the first: {message}")


def _text(replica: Replica) -> str:
    return "Differs from the first intact replica" if replica.error is None else replica.error.message


async def read_replica(
    handle: ReadHandle, bookie_id: str, first: int, last: int, *, verify: bool = True
) -> AsyncIterator[LedgerEntry]:
    """Yield one bookie's replicas of the entries `first` to `last` that it should have.

    Raises UsageError if it should have none of them by the metadata, and the errors of `read_from`.
    """
    wanted = _entries_at(handle, bookie_id, first, last)
    head = next(wanted, None)
    if head is None and first <= last:
        raise UsageError(
            f"Bookie {bookie_id} has no replica of the entries {first} to {last} of ledger {handle.ledger}",
            hint="its ensembles are in 'bkctl ledger show'",
        )
    access = handle._access
    channel, reads = access.pool.channel(bookie_id), WaitingReads(access, WaitingBytes(WAITING_BYTES_MAX))
    window: deque[tuple[int, asyncio.Future[Response]]] = deque()
    entry_ids = iter(()) if head is None else chain((head,), wanted)
    while True:
        for entry_id in islice(entry_ids, REPLICA_WINDOW_COUNT - len(window)):
            window.append((entry_id, reads.send(channel, ReadRequest(handle.ledger, entry_id))))
        if not window:
            return
        entry_id, future = window.popleft()
        yield entry_of(await reads.outcome(future), access, entry_id, bookie_id, verify=verify)


def _entries_at(handle: ReadHandle, bookie_id: str, first: int, last: int) -> Iterator[int]:
    """Yield the ids among `first` to `last` whose write sets contain the bookie."""
    fragments, write_set = handle.metadata.ensembles, handle._access.schedule.write_set
    ends = [fragment.first_entry_id for fragment in fragments[1:]]
    for fragment, end in zip(fragments, (*ends, last + 1), strict=True):
        if bookie_id in fragment.bookies:
            for entry_id in range(max(first, fragment.first_entry_id), min(last + 1, end)):
                if any(fragment.bookies[index] == bookie_id for index in write_set(entry_id)):
                    yield entry_id
