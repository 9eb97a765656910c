"""Adds of one ledger: sent to the write set, acknowledged strictly in order, with ensemble changes on failures.

Source: LedgerHandle (add, ensemble change), PendingAddOp, ReadOnlyLedgerHandle.handleBookieFailure.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final, TypeAlias

from bkctl.client.bookies import BookieChannel, error_of
from bkctl.client.ensemble import update_metadata, with_fragment
from bkctl.client.placement import choose_replacements
from bkctl.client.reader import LedgerAccess, restate
from bkctl.errors import (
    BkctlError,
    BookieUnavailable,
    DuplicateEntryId,
    IllegalOperation,
    LedgerClosed,
    LedgerFenced,
    NotEnoughBookies,
    TooManyPending,
    Unauthorized,
    UsageError,
    restated,
)
from bkctl.formats.layout import Buffer
from bkctl.formats.metadata import LedgerMetadata, LedgerState
from bkctl.ids import I64_MAX
from bkctl.protocol.connection import Answered, Outcome
from bkctl.protocol.messages import FRAME_SIZE_BYTES_MAX, AddRequest, AddResponse, Request, Status
from bkctl.tasks import fail

#: Adds in flight before `ready` waits. Source: ClientConfiguration.getThrottleValue.
THROTTLE_COUNT: Final = 5000
#: Payload bytes in flight before `ready` waits.
PENDING_BYTES_MAX: Final = 64 << 20
#: Times the above at which `add` refuses more, for callers that do not wait.
_REFUSED_AT: Final = 2
#: Largest size of a request without its entry (protobuf fields, master key, frame length).
_REQUEST_OVERHEAD_BYTES: Final = 128

#: Gets the id of an added entry: a future of the event loop, or one that another thread waits for.
AddFuture: TypeAlias = asyncio.Future[int] | concurrent.futures.Future[int]
_new = tuple.__new__


class _PendingAdd:
    """One unacknowledged entry. `acks` has a bit for each ensemble index that stored it."""

    __slots__ = ("acks", "future", "request", "size")

    def __init__(self, request: AddRequest, size: int, future: AddFuture | None) -> None:
        self.request = request
        self.size = size
        self.future = future
        self.acks = 0


class AddPipeline:
    """Adds in flight of one ledger; belongs to one event loop.

    An entry is acknowledged when the ack quorum stored it and all entries before it are acknowledged. A failed bookie
    is replaced: entries from the last add confirmed + 1 get a new fragment (`_commit`), and pending ones are resent.
    """

    def __init__(
        self,
        access: LedgerAccess,
        *,
        last_add_confirmed: int = -1,
        length: int = 0,
        recovery: bool = False,
        deferred_sync: bool = False,
        on_end: Callable[[BkctlError], None] | None = None,
    ) -> None:
        self.access = access
        #: The last entry that is acknowledged, as all before it are.
        self.last_add_confirmed = last_add_confirmed
        #: The last add confirmed that readers learn: with `deferred_sync` only `forced` moves it. It stays in a
        #: recovery: if that fails, another one may end the ledger before what this one added.
        self.lac = last_add_confirmed
        self._deferred_sync = deferred_sync
        #: With `deferred_sync`, the channels that took entries since a force, and their `losses` then.
        self.sent_over: dict[BookieChannel, int] = {}
        #: Payload bytes up to the last add confirmed, and including pending entries.
        self.length_confirmed = self.length = length
        #: The error that ended the pipeline.
        self.error: BkctlError | None = None
        self.ensemble: tuple[str, ...] = access.metadata.last_fragment.bookies
        #: The id after that of the last entry added.
        self.next_id = last_add_confirmed + 1
        self._recovery = recovery
        self._on_end = on_end
        #: Unacknowledged entries by id.
        self.pending: dict[int, _PendingAdd] = {}
        self._pending_bytes = 0
        self._ack_quorum_size = access.schedule.ack_quorum_size
        self._payload_size_max = FRAME_SIZE_BYTES_MAX - _REQUEST_OVERHEAD_BYTES - access.digest.overhead_size
        self._changing: asyncio.Task[None] | None = None
        self._failed_later: dict[int, str] = {}
        self._failed_since_progress: set[str] = set()
        #: The last error of each failed bookie.
        self._problems: dict[str, str] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._wake_below = 0
        self._loop = asyncio.get_running_loop()
        #: The last ones of `pending`, to be sent in the next turn of the event loop.
        self._unsent: list[_PendingAdd] = []
        access.pool.users.add(self)
        self._channels: list[BookieChannel] = []
        #: Take the answers of each channel.
        self._takers: list[Answered] = []
        self._connect()

    def _connect(self) -> None:
        self._channels = [self.access.pool.channel(bookie_id) for bookie_id in self.ensemble]
        self._takers = [partial(self._answered, index, channel) for index, channel in enumerate(self._channels)]
        write_quorum_size = 0 if self._recovery else self.access.schedule.write_quorum_size
        self._domains, self._domain_count_min = self.access.pool.acks_domains(self.ensemble, write_quorum_size)

    # Adding.

    def add(
        self, payload: Buffer, future: AddFuture | None = None, *,
        entry_id: int | None = None, length: int | None = None,
    ) -> AddFuture:  # fmt: skip
        """Send the next entry; `future` (None: a new one) gets its id once it and all before it are acknowledged.

        The caller may choose an `entry_id`, in any order (None: the next id). `length` is the ledger's length with this
        entry where it is known (recovery). Raises the error that ended the pipeline, UsageError for a payload larger
        than a frame, DuplicateEntryId.
        """
        self._check()
        if (
            len(self.pending) >= _REFUSED_AT * THROTTLE_COUNT or self._pending_bytes >= _REFUSED_AT * PENDING_BYTES_MAX
        ) and entry_id != self.last_add_confirmed + 1:
            raise TooManyPending(
                f"Ledger {self.access.ledger} has {len(self.pending)} adds in flight",
                hint="wait with 'await handle.ready()' before each add, or use add_all",
            )
        if entry_id is None:
            entry_id = self.next_id
        elif not 0 <= entry_id <= I64_MAX:
            raise UsageError(f"Entry id {entry_id} is not in the range 0 to 2^63 − 1")
        elif entry_id <= self.last_add_confirmed or entry_id in self.pending:
            raise DuplicateEntryId(f"Entry {entry_id} of ledger {self.access.ledger} was added before")
        if future is None:
            future = self._loop.create_future()
        self._unsent.append(self._seal(entry_id, payload, length, future))
        if len(self.pending) == 1:
            self.send_unsent()
        elif len(self._unsent) == 1:  # the adds of one turn go out as one run
            self._loop.call_soon(self.send_unsent)
        return future

    def send_unsent(self) -> None:
        """Send the adds of this turn of the event loop."""
        unsent, self._unsent = self._unsent, []
        if unsent:
            self._send(unsent)

    async def add_all(self, payloads: Sequence[Buffer]) -> None:
        """Send the next entries in runs, without a future of each, waiting as `ready` does.

        Raises the error that ended the pipeline, and UsageError for a payload larger than a frame, after the entries
        before it were sent.
        """
        rest = iter(payloads)
        unsent = len(payloads)
        while unsent:
            await self.ready()
            run: list[_PendingAdd] = []
            try:
                # Behind a gap in the caller's ids, `ready` lets more than THROTTLE_COUNT adds be pending.
                for payload in islice(rest, max(1, THROTTLE_COUNT - len(self.pending))):
                    run.append(self._seal(self.next_id, payload))
                    if self._pending_bytes >= PENDING_BYTES_MAX:
                        break
            finally:
                self._unsent += run
                self.send_unsent()
            unsent -= len(run)

    def _seal(
        self, entry_id: int, payload: Buffer, length: int | None = None, future: AddFuture | None = None
    ) -> _PendingAdd:
        """Make an entry pending, and return it to be sent."""
        data = payload if type(payload) is bytes else bytes(memoryview(payload))
        size = len(data)
        if size > self._payload_size_max:
            raise UsageError(f"An entry of {size} bytes does not fit, at most {self._payload_size_max} do")
        if entry_id >= self.next_id:
            self.next_id = entry_id + 1
        self.length = self.length + size if length is None else length
        access, recovery = self.access, self._recovery
        digest = access.digest
        body = (digest.seal(entry_id, self.lac, self.length, data), data)
        request = _new(
            AddRequest, (access.ledger, entry_id, digest.master_key, body, recovery, recovery, self._deferred_sync)
        )
        add = self.pending[entry_id] = _PendingAdd(request, size, future)
        self._pending_bytes += size
        return add

    def _send(self, adds: Iterable[_PendingAdd], indexes: Collection[int] | None = None) -> None:
        """Send each bookie the adds that it is to store, in one run; with `indexes` only the bookies there."""
        runs: defaultdict[int, list[AddRequest]] = defaultdict(list)
        write_set = self.access.schedule.write_set
        for add in adds:
            for index in write_set(add.request[1]):
                if indexes is None or index in indexes:
                    runs[index].append(add.request)
        for index, run in runs.items():
            channel = self._channels[index]
            channel.send_run(run, self._takers[index], self.access.scoped)
            if self._deferred_sync:
                self.sent_over.setdefault(channel, channel.losses)
        if self._failed_later and self._changing is None:
            # Replace a bookie that failed entries with a quorum without it, now that another entry comes.
            self._bookies_failed({})

    def _answered(
        self, index: int, channel: BookieChannel, requests: Sequence[Request], outcomes: Sequence[Outcome]
    ) -> None:
        pending, acked = self.pending, 1 << index
        for request, outcome in zip(requests, outcomes, strict=True):
            if self._channels[index] is not channel or self.error is not None:
                return  # the ensemble changed, so this bookie's answer does not count
            entry_id: int = request[1]  # type: ignore[misc, assignment]
            add = pending.get(entry_id)
            if type(outcome) is not AddResponse or outcome[0] is not Status.EOK:
                self._complete()
                self._failed(index, channel, entry_id, outcome)
            elif add is not None:
                add.acks |= acked
        self._complete()

    def _failed(self, index: int, channel: BookieChannel, entry_id: int, outcome: Outcome) -> None:
        """Replace the bookie that did not store an entry, now or with the next entry, or end the pipeline."""
        add = self.pending.get(entry_id)
        error = error_of(outcome, self.access.ledger, entry_id, channel.bookie_id)
        assert error is not None
        if self.access.pool.closed:
            self._end(error)
            return
        if isinstance(error, LedgerFenced):
            self._end(LedgerFenced(f"Ledger {self.access.ledger} is fenced on bookie {channel.bookie_id}",
                                   hint="another client recovers or recovered it"))  # fmt: skip
        elif isinstance(error, (Unauthorized, IllegalOperation)):
            self._end(error)
        else:
            channel.failed()
            self._failed_since_progress.add(channel.bookie_id)
            self._problems[channel.bookie_id] = error.message
            if add is None or (add.acks.bit_count() >= self._ack_quorum_size and self._spans_domains(add)):
                self._failed_later[index] = channel.bookie_id
            else:
                self._bookies_failed({index: channel.bookie_id})

    def _complete(self) -> None:
        """Acknowledge, in order, entries with a quorum; not while the ensemble changes."""
        if self._changing is not None:
            return
        pending, quorum = self.pending, self._ack_quorum_size
        while True:
            entry_id = self.last_add_confirmed + 1
            add = pending.get(entry_id)
            if add is None or add.acks.bit_count() < quorum or (self._domains and not self._spans_domains(add)):
                break
            del pending[entry_id]
            self.last_add_confirmed = entry_id
            self.length_confirmed += add.size
            self._pending_bytes -= add.size
            if add.future is not None and not add.future.done():
                add.future.set_result(entry_id)
            if self._failed_since_progress:
                self._failed_since_progress.clear()
        if not (self._deferred_sync or self._recovery):
            self.lac = self.last_add_confirmed
        if self._waiter is not None and not self.must_wait(self._wake_below):
            self._wake()

    def _spans_domains(self, add: _PendingAdd) -> bool:
        """Return True if the bookies that stored the entry are in enough racks or zones.

        End the pipeline if all bookies that could store it are in too few.
        """
        found = {domain for index, domain in enumerate(self._domains) if add.acks >> index & 1}
        if len(found) >= self._domain_count_min:
            return True
        if add.acks.bit_count() == self.access.schedule.write_quorum_size:
            self._end(NotEnoughBookies(
                f"Ledger {self.access.ledger}: entry {add.request[1]} is in {', '.join(sorted(found))} only; "
                f"{self._domain_count_min} are needed (enforceMinNumFaultDomainsForWrite is true)",
                hint="start bookies in other racks, or set racks with 'bkctl bookies racks set'",
            ))  # fmt: skip
        return False

    # Back-pressure.

    def must_wait(self, count: int | None = None) -> bool:
        """Return True if more than `count` adds, or too many bytes, are in flight and bookies can complete some.

        With `count` None, `ready` would wait. Entries after an entry id that the caller left out wait for the caller,
        not for bookies. Any thread may ask.
        """
        count = THROTTLE_COUNT - 1 if count is None else count
        if self.error is not None or self.last_add_confirmed + 1 not in self.pending:
            return False
        return len(self.pending) > count or self._pending_bytes >= PENDING_BYTES_MAX

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    async def ready(self) -> None:
        """Wait until another add may be sent. Raises the error that ended the pipeline."""
        while self.must_wait():
            await self._wait_below(THROTTLE_COUNT // 2)
        self._check()

    def _check(self) -> None:
        if self.error is not None:
            raise restated(self.error)
        if asyncio.get_running_loop() is not self._loop:
            raise IllegalOperation(f"Ledger {self.access.ledger} is written in another event loop")

    async def flush(self) -> None:
        """Wait until no entry is pending before a gap in the caller's ids. Raises the error that ended the pipeline."""
        await self._wait_below(0)
        self._check()

    async def _wait_below(self, count: int) -> None:
        while self.must_wait(count):
            self._wake_below = count if self._waiter is None else min(count, self._wake_below)
            if self._waiter is None:
                self._waiter = self._loop.create_future()
            await asyncio.shield(self._waiter)

    # Failures.

    def _bookies_failed(self, failed: Mapping[int, str]) -> None:
        if self._deferred_sync:  # another bookie could not sync what this one acknowledged
            self._end(BookieUnavailable(
                f"Ledger {self.access.ledger} has deferred sync, and a bookie of it failed: "
                + "; ".join(self._problems.values()), hint="write on in a new ledger",
            ))  # fmt: skip
            return
        self._failed_later.update(failed)
        if self._changing is None:
            self._changing = self._loop.create_task(self._change_ensemble())
            self._changing.add_done_callback(self._changed)

    def _changed(self, task: asyncio.Task[None]) -> None:
        """End the pipeline if the change failed unexpectedly or its event loop ended, so that no add waits for ever."""
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._changing = None
            how = "was cancelled" if error is None else f"failed: {error!r}"
            self._end(BkctlError(f"Changing the ensemble of ledger {self.access.ledger} {how}"))

    async def _change_ensemble(self) -> None:
        """Replace failed bookies until no more fail, then resend pending entries of changed indexes."""
        before = self.ensemble
        try:
            while self._failed_later and self.error is None:
                failed = {
                    at: bookie_id for at, bookie_id in self._failed_later.items() if self.ensemble[at] == bookie_id
                }
                self._failed_later.clear()
                if failed:
                    self.ensemble = await self._commit(failed)
        except BkctlError as error:
            self._changing = None
            if isinstance(error, NotEnoughBookies) and self._problems:
                problems = "; ".join(self._problems.values())
                message = f"Ledger {self.access.ledger} cannot be written: {problems}: {error.message}"
                error = restate(error, message, error.hint)
            self._end(error)
            return
        self._changing = None
        if self.error is not None:
            return
        changed = [index for index, bookie_id in enumerate(self.ensemble) if bookie_id != before[index]]
        self._connect()
        kept = ~sum(1 << index for index in changed)
        for add in self.pending.values():
            add.acks &= kept
        self._send(list(islice(self.pending.values(), len(self.pending) - len(self._unsent))), changed)
        self._complete()

    async def _commit(self, failed: Mapping[int, str]) -> tuple[str, ...]:
        """Replace `failed` bookies in the ledger's metadata, and return the ensemble as stored then."""
        access, first_entry_id = self.access, self.last_add_confirmed + 1
        excluded = set(self._failed_since_progress)
        await access.pool.weigh()

        def change(metadata: LedgerMetadata) -> LedgerMetadata | None:
            if metadata.state is LedgerState.CLOSED:
                raise LedgerClosed(f"Ledger {access.ledger} was closed by another client")
            if metadata.state is LedgerState.IN_RECOVERY:
                raise LedgerFenced(f"Ledger {access.ledger} is being recovered by another client")
            ensemble = metadata.last_fragment.bookies
            if not any(ensemble[index] == bookie_id for index, bookie_id in failed.items()):
                return None
            return with_fragment(metadata, first_entry_id, self._replaced(ensemble, failed, excluded))

        access.versioned = await asyncio.to_thread(
            update_metadata, access.pool.cluster.ledgers, access.ledger, access.versioned, change
        )
        return access.metadata.last_fragment.bookies

    def _replaced(self, ensemble: tuple[str, ...], failed: Mapping[int, str], excluded: set[str]) -> tuple[str, ...]:
        """Return `ensemble` with others in place of `failed` bookies that are still at their indexes. Blocks.

        Source: EnsembleUtils.replaceBookiesInEnsemble.
        """
        access, pool = self.access, self.access.pool
        indexes = [index for index, bookie_id in failed.items() if ensemble[index] == bookie_id]
        registered = pool.registered()
        chosen = choose_replacements(
            ensemble, indexes, access.metadata.write_quorum_size, registered, pool.placement(registered, ensemble),
            scoped=access.scoped, ack_quorum_size=access.metadata.ack_quorum_size,
            exclude={*failed.values(), *excluded}, avoid=pool.suspects(),
        )  # fmt: skip
        return tuple(chosen.get(index, bookie_id) for index, bookie_id in enumerate(ensemble))

    def _end(self, error: BkctlError) -> None:
        """End the pipeline: pending adds fail with `error`, and no more are accepted."""
        if self.error is not None:
            return
        self.error = error
        pending, self.pending, self._unsent = self.pending, {}, []
        self.length, self._pending_bytes = self.length_confirmed, 0
        for add in pending.values():
            if add.future is not None:
                fail(add.future, error)
        self._wake()
        if self._on_end is not None:
            self._on_end(error)

    def client_closed(self) -> None:
        """End the pipeline if adds are pending; those behind a gap wait for no bookie."""
        if self.pending:
            self._end(BookieUnavailable(f"The client was closed while ledger {self.access.ledger} was written"))

    async def close(self, error: BkctlError) -> None:
        """End the pipeline with `error`, unless it ended before, and wait for an ensemble change in progress."""
        self._end(error)
        if self._changing is not None:
            await asyncio.gather(self._changing, return_exceptions=True)


class RecoveryPipeline(AddPipeline):
    """Adds of a recovery: flagged RECOVERY_ADD, with new fragments kept in memory until the ledger is closed.

    Source: ReadOnlyLedgerHandle.newEnsemblesFromRecovery.
    """

    def __init__(self, access: LedgerAccess, *, last_add_confirmed: int, length: int) -> None:
        super().__init__(access, last_add_confirmed=last_add_confirmed, length=length, recovery=True)
        self._fragments: dict[int, tuple[str, ...]] = {}

    async def _commit(self, failed: Mapping[int, str]) -> tuple[str, ...]:
        excluded = set(self._failed_since_progress)
        await self.access.pool.weigh()
        ensemble = await asyncio.to_thread(self._replaced, self.ensemble, failed, excluded)
        self._fragments[self.last_add_confirmed + 1] = ensemble
        return ensemble

    def with_fragments(self, metadata: LedgerMetadata) -> LedgerMetadata:
        """Return `metadata` with the new fragments of this recovery."""
        for first_entry_id, ensemble in sorted(self._fragments.items()):
            metadata = with_fragment(metadata, first_entry_id, ensemble)
        return metadata
