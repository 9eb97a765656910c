"""Reading every entry from every bookie that should have it. Source: LedgerChecker, which samples; this reads all."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from enum import Enum
from typing import Final, NamedTuple

from bkctl.client.bookies import BookieChannel
from bkctl.client.ledger import ReadHandle, entry_of
from bkctl.client.reader import ENTRY_SIZE_BYTES_GUESS, WINDOW_BYTES, LedgerEntry
from bkctl.errors import (
    BkctlError,
    CorruptRecord,
    DigestMismatch,
    EntryNotFound,
    LedgerNotFound,
    TruncatedRecord,
    UsageError,
)
from bkctl.protocol.messages import ReadRequest, Response

#: Entries asked for ahead of the one that is reported.
WINDOW_COUNT_MAX: Final = 256


class ReplicaState(Enum):
    """What one bookie has of one entry."""

    OK = "ok"
    MISSING = "missing"
    #: The digest does not match, or it is another entry.
    DAMAGED = "damaged"
    #: Intact, but with another payload or ledger length than the first intact replica.
    DIFFERENT = "different"
    #: The bookie is not there, answers nothing or nonsense, or cannot serve the ledger's scope: nothing is known.
    UNAVAILABLE = "unavailable"


class Replica(NamedTuple):
    """One replica of one entry; `error` says why it is not OK. Good replicas may differ in `last_add_confirmed`."""

    bookie_id: str
    state: ReplicaState
    size_bytes: int | None = None
    last_add_confirmed: int | None = None
    error: BkctlError | None = None


class EntryCheck(NamedTuple):
    """One entry with all replicas of its write set, in the order of reading."""

    entry_id: int
    replicas: tuple[Replica, ...]

    @property
    def ok(self) -> bool:
        """Whether every replica is there and intact."""
        return all(replica.state is ReplicaState.OK for replica in self.replicas)


async def verify_entries(handle: ReadHandle, first: int = 0, last: int | None = None) -> AsyncIterator[EntryCheck]:
    """Read the entries `first` to `last` (None: the last add confirmed) from every bookie of their write sets.

    Yields one check an entry, in order; an empty ledger gives none. Reads are pipelined within a bounded window.
    Raises UsageError for a range that is none; what a bookie does wrong is in the checks.
    """
    if last is None:
        last = handle.last_add_confirmed
    if first < 0 or last > handle.last_add_confirmed:
        raise UsageError(f"Entries {first} to {last} are not all within 0 to {handle.last_add_confirmed}")
    access = handle._access
    ensemble_size, write_quorum_size = access.schedule.ensemble_size, access.schedule.write_quorum_size
    window: deque[tuple[int, list[tuple[BookieChannel, asyncio.Future[Response]]]]] = deque()
    metadata = access.metadata
    fragments = deque(metadata.ensembles)
    replicas: list[tuple[BookieChannel, ...]] = []
    size = ENTRY_SIZE_BYTES_GUESS
    if metadata.is_closed and metadata.last_entry_id >= 0:
        size = metadata.length // (metadata.last_entry_id + 1)
    largest, next_id = size, first
    while next_id <= last or window:
        count_max = min(max(WINDOW_BYTES // ((max(size, largest) + 64) * write_quorum_size), 2), WINDOW_COUNT_MAX)
        while next_id <= last and len(window) < count_max:
            while fragments and fragments[0].first_entry_id <= next_id:
                replicas = access.replicas(fragments.popleft().bookies)
            request = ReadRequest(handle.ledger, next_id)
            asked = [(each, each.send(request, access.scoped)) for each in replicas[next_id % ensemble_size]]
            window.append((next_id, asked))
            next_id += 1
        entry_id, asked = window.popleft()
        waiting = [future for _, future in asked if not future.done()]
        if waiting:
            await asyncio.wait(waiting)
        check = _check(handle, entry_id, asked)
        largest = max(largest * 15 // 16, *(replica.size_bytes or 0 for replica in check.replicas))
        yield check


def _check(
    handle: ReadHandle, entry_id: int, asked: list[tuple[BookieChannel, asyncio.Future[Response]]]
) -> EntryCheck:
    reference: LedgerEntry | None = None
    found = []
    for channel, future in asked:
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
            found.append(Replica(channel.bookie_id, state, len(entry.payload), entry.last_add_confirmed))
    return EntryCheck(entry_id, tuple(found))
