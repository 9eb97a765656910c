"""The client: create, open, write, read, recover and delete ledgers, in scope 0 and in scopes of BP-35.

    async with BookKeeper(cluster) as bookkeeper:
        async with await bookkeeper.create_ledger_adv(ledger_scope_id=7) as writer:
            entry_id = await writer.add(b"hello")
        reader = await bookkeeper.open_ledger(writer.ledger_id, ledger_scope_id=7)
        async for entry in reader.read(0, reader.last_add_confirmed):
            ...

Source: BookKeeper, LedgerCreateOp, LedgerOpenOp, LedgerDeleteOp, LedgerHandle, ReadOnlyLedgerHandle; BP-35.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final, Self

from bkctl.client.bookies import BookiePool, failure, in_thread
from bkctl.client.ensemble import check_quorums, choose_bookies, closed, update_metadata
from bkctl.client.reader import (
    LONG_POLL_S_MAX,
    LedgerAccess,
    LedgerEntry,
    long_poll,
    read_entries,
    read_last_confirmed,
    restate,
)
from bkctl.client.recovery import RecoveryLoss, find_loss, recover
from bkctl.client.writer import THROTTLE_COUNT, AddPipeline, restated
from bkctl.errors import (
    BkctlError,
    DigestMismatch,
    IllegalOperation,
    LedgerClosed,
    LedgerExists,
    LedgerFenced,
    MetadataVersionConflict,
    ProtocolError,
    Unauthorized,
    UsageError,
)
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.layout import Buffer
from bkctl.formats.metadata import Fragment, LedgerMetadata
from bkctl.ids import I64_MAX, LedgerId
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.store import client_tls
from bkctl.protocol.messages import (
    ForceLedgerRequest,
    Protocol,
    ReadRequest,
    ReadResponse,
    Request,
    Response,
    WriteLacRequest,
)

if TYPE_CHECKING:
    import ssl

    from bkctl.metadata.cluster import Cluster

__all__ = ["BookKeeper", "LedgerEntry", "ReadHandle", "WriteHandle", "client_tls"]

TIMEOUT_S: Final = 30.0
#: Tries of a generated ledger id before giving up; every one collides only in a broken store.
_CREATE_ATTEMPTS_MAX: Final = 20


class _Handle:
    """What readers and writers of one ledger have in common."""

    def __init__(self, access: LedgerAccess) -> None:
        self._access = access

    @property
    def ledger(self) -> LedgerId:
        """The 128-bit id."""
        return self._access.ledger

    @property
    def scope_id(self) -> int:
        """The most significant 64 bits of the id (`getScopeId`)."""
        return self._access.ledger.scope_id

    @property
    def ledger_id(self) -> int:
        """The least significant 64 bits of the id (`getId`)."""
        return self._access.ledger.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        """The ledger's metadata as last read or written."""
        return self._access.metadata

    @property
    def versioned_metadata(self) -> VersionedMetadata:
        """The metadata with the version that a compare-and-set needs."""
        return self._access.versioned

    @property
    def is_closed(self) -> bool:
        """Whether the metadata says that the ledger is closed."""
        return self._access.metadata.is_closed

    @property
    def last_add_confirmed(self) -> int:
        """The last entry known to be acknowledged; -1: none."""
        raise AssertionError

    def read(self, first: int, last: int, *, verify: bool = True) -> AsyncIterator[LedgerEntry]:
        """Yield the entries `first` to `last` (both included) in order; memory does not grow with their number.

        Each comes from the first replica that gives it intact; `verify` False leaves the digest unchecked. Raises
        UsageError for a range that is none or goes beyond the last add confirmed; when no replica of an entry gives
        it: EntryNotFound, DigestMismatch, BookieUnavailable, … as the gravest of them said.
        """
        if last > self.last_add_confirmed:
            raise UsageError(
                f"Entry {last} of ledger {self.ledger} is beyond its last add confirmed, {self.last_add_confirmed}"
            )
        return self.read_unconfirmed(first, last, verify=verify)

    def read_unconfirmed(self, first: int, last: int, *, verify: bool = True) -> AsyncIterator[LedgerEntry]:
        """As `read`, but also beyond the last add confirmed: EntryNotFound is raised where the entries end.

        Such an entry may not be acknowledged, and gone after a recovery.
        """
        if not 0 <= first <= last <= I64_MAX:
            raise UsageError(f"Entries {first} to {last} are no range")
        return read_entries(self._access, first, last, verify=verify)

    async def read_from(self, bookie_id: str, entry_id: int, *, verify: bool = True) -> LedgerEntry:
        """The entry as this one bookie has it.

        Raises EntryNotFound or LedgerNotFound (it has none), DigestMismatch, BookieUnavailable, TimedOut, ….
        """
        channel = self._access.pool.channel(bookie_id)
        future = channel.send(ReadRequest(self.ledger, entry_id), self._access.scoped)
        await asyncio.wait([future])
        return entry_of(future, self._access, entry_id, bookie_id, verify=verify)


def entry_of(
    future: asyncio.Future[Response], access: LedgerAccess, entry_id: int, bookie_id: str, *, verify: bool = True
) -> LedgerEntry:
    """The entry that the done `future` of a read brought. Raises what is wrong with it."""
    error = failure(future, access.ledger, entry_id, bookie_id)
    if error is not None:
        raise error
    response = future.result()
    if not isinstance(response, ReadResponse):
        raise ProtocolError(f"Bookie {bookie_id} answered a read with something else")
    return access.open_entry(response.body, entry_id, verify)


class ReadHandle(_Handle):
    """A ledger opened for reading (`BookKeeper.open_ledger`); its writer may still be at work (`is_closed` False)."""

    def __init__(self, access: LedgerAccess, last_add_confirmed: int, length: int) -> None:
        super().__init__(access)
        self._last_add_confirmed = last_add_confirmed
        self._length = length
        self._changed = asyncio.Event()
        self._told: VersionedMetadata | BkctlError | None = None
        self._cancel_watch: Callable[[], None] | None = None

    @property
    def last_add_confirmed(self) -> int:
        """The last entry known to be acknowledged; -1: none. Of a closed ledger its last entry."""
        return self._last_add_confirmed

    @property
    def length(self) -> int:
        """Payload bytes: of a closed ledger all, else about those up to the last add confirmed."""
        return self._length

    async def read_last_confirmed(self) -> int:
        """Read metadata and, while the ledger is not closed, ask its bookies anew; returns the last add confirmed.

        Raises LedgerNotFound when the ledger was deleted, BookieUnavailable, … when too few bookies answer.
        """
        self._use(await in_thread(self._access.pool.cluster.ledgers.read, self.ledger))
        if not self.is_closed:
            confirmed = await read_last_confirmed(self._access)
            self._advance(confirmed.last_add_confirmed, confirmed.length)
        return self._last_add_confirmed

    async def wait_for_lac(self, previous: int, timeout_s: float) -> int:
        """Wait until the last add confirmed is above `previous`, the ledger is closed, or `timeout_s` is over.

        Returns the last add confirmed as known then. The bookies tell it as it moves (long poll), the metadata store
        when the ledger is closed, its ensemble changes or it is deleted. Raises LedgerNotFound for a deleted ledger.
        """
        deadline = time.monotonic() + timeout_s
        await self._watch()
        while True:
            self._changed.clear()
            told, self._told = self._told, None
            if isinstance(told, BkctlError):
                raise restated(told)
            if told is not None:
                self._use(told)
            left_s = deadline - time.monotonic()
            if self.is_closed or self._last_add_confirmed > previous or left_s <= 0:
                return self._last_add_confirmed
            slice_s = min(left_s, LONG_POLL_S_MAX)
            confirmed = await long_poll(self._access, self._last_add_confirmed, slice_s, self._changed)
            if confirmed is not None:
                self._advance(confirmed, 0)

    async def close(self) -> None:
        """Stop watching the ledger. The ledger itself is untouched."""
        cancel, self._cancel_watch = self._cancel_watch, None
        if cancel is not None:
            await in_thread(cancel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _watch(self) -> None:
        if self._cancel_watch is not None:
            return
        loop = asyncio.get_running_loop()

        def told(found: VersionedMetadata | BkctlError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(self._tell, found)

        self._cancel_watch = await in_thread(self._access.pool.cluster.ledgers.watch, self.ledger, told)
        # The first call came from that thread before it returned: let it arrive.
        await asyncio.sleep(0)

    def _tell(self, found: VersionedMetadata | BkctlError) -> None:
        self._told = found
        self._changed.set()

    def _use(self, found: VersionedMetadata) -> None:
        self._access.versioned = found
        if found.metadata.is_closed:
            self._last_add_confirmed, self._length = found.metadata.last_entry_id, found.metadata.length

    def _advance(self, last_add_confirmed: int, length: int) -> None:
        self._last_add_confirmed = max(self._last_add_confirmed, last_add_confirmed)
        self._length = max(self._length, length)


class WriteHandle(_Handle):
    """A ledger that we write, from its creation until `close`. Made by `BookKeeper.create_ledger`."""

    def __init__(self, access: LedgerAccess, *, throttle_count: int, own_entry_ids: bool) -> None:
        super().__init__(access)
        self._own_entry_ids = own_entry_ids
        self._pipeline = AddPipeline(access, throttle_count=throttle_count, on_end=self._ended)
        self._closing: asyncio.Task[None] | None = None

    @property
    def last_add_confirmed(self) -> int:
        """The last entry that is acknowledged; -1: none."""
        return self._pipeline.last_add_confirmed

    @property
    def length(self) -> int:
        """Payload bytes added, those not acknowledged yet included."""
        return self._pipeline.length

    @property
    def pending_count(self) -> int:
        """Entries added and not acknowledged yet."""
        return self._pipeline.pending_count

    def add(self, payload: Buffer, *, entry_id: int | None = None) -> asyncio.Future[int]:
        """Add an entry without waiting: the future gives its id once the ack quorum has it and all entries before it.

        `await handle.add(b"…")` adds one after the other; to pipeline, `await handle.ready()` before each add. An
        `entry_id` of the caller's is for ledgers of `create_ledger_adv`; entries are acknowledged without gaps.
        Raises, as the future: LedgerFenced (another client recovers the ledger), NotEnoughBookies, Unauthorized,
        LedgerClosed; at once UsageError for a payload that fits no frame, DuplicateEntryId.
        """
        if entry_id is not None and not self._own_entry_ids:
            raise IllegalOperation("Entry ids are the client's in this ledger", hint="make it with create_ledger_adv")
        return self._pipeline.add(payload, entry_id=entry_id)

    async def ready(self) -> None:
        """Wait while too many adds are in flight. Raises the error that ended writing, if one did."""
        await self._pipeline.ready()

    async def flush(self) -> None:
        """Wait until every add so far is acknowledged. Raises the error that ended writing, if one did."""
        await self._pipeline.flush()

    async def write_lac(self) -> None:
        """Tell the bookies the last add confirmed now (explicit LAC), so that readers see it before the next entry.

        Does nothing before the first acknowledged entry. Raises when the ack quorum cannot be had.
        Source: PendingWriteLacOp.
        """
        access, lac = self._access, self.last_add_confirmed
        if lac < 0:
            return
        request = WriteLacRequest(self.ledger, lac, access.digest.master_key, access.digest.seal_lac(lac))
        indexes = access.schedule.write_set(lac)
        await self._ask(request, indexes, access.schedule.ack_quorum_size, "Explicit LAC")

    async def force(self) -> None:
        """Wait until all bookies of the ensemble have synced what they have of this ledger. v3 only.

        Raises IllegalOperation in v2; when a bookie does not answer, its error. Source: ForceLedgerOp.
        """
        access = self._access
        if access.pool.protocol is Protocol.V2:
            raise IllegalOperation("Protocol v2 has no force", hint="use v3")
        size = access.schedule.ensemble_size
        await self._ask(ForceLedgerRequest(self.ledger), range(size), size, "Force")

    async def close(self) -> None:
        """Wait for the adds in flight, then close the ledger at the last add confirmed. A second call does nothing new.

        Raises the error that ended writing, if one did (the ledger is closed at its last acknowledged entry even so,
        unless another client fenced it); MetadataVersionConflict when another client closed it elsewhere.
        Source: LedgerHandle.doAsyncCloseInternal.
        """
        if self._closing is None:
            with contextlib.suppress(BkctlError):
                await self._pipeline.flush()
            if self._closing is None:
                self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)
        error = self._pipeline.error
        if error is not None and not isinstance(error, _ClosedByUs):
            raise restated(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.close()
        else:
            with contextlib.suppress(BkctlError):  # the one on its way tells more
                await self.close()

    def _ended(self, error: BkctlError) -> None:
        if self._closing is None and not isinstance(error, _ClosedByUs) and not self._access.pool.closed:
            self._closing = asyncio.get_running_loop().create_task(self._close())
            # close() raises it; where nobody closes, the error of the adds has said enough.
            self._closing.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _close(self) -> None:
        await self._pipeline.close(_ClosedByUs(f"Ledger {self.ledger} is closed"))
        access, ledgers = self._access, self._access.pool.cluster.ledgers
        last_entry_id, length = self._pipeline.last_add_confirmed, self._pipeline.length_confirmed
        if isinstance(self._pipeline.error, (LedgerFenced, LedgerClosed)) and not isinstance(
            self._pipeline.error, _ClosedByUs
        ):
            # Who fenced the ledger closes it, with what it found.
            access.versioned = await in_thread(ledgers.read, self.ledger)
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

        access.versioned = await in_thread(update_metadata, ledgers, self.ledger, access.versioned, change)

    async def _ask(self, request: Request, indexes: tuple[int, ...] | range, needed: int, what: str) -> None:
        """Send `request` to the bookies at `indexes` over v3 until `needed` of them did it."""
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
    """The writer itself closed the ledger."""


#: The last id of scope 0.
_LAST_UNSCOPED: Final = LedgerId(0, I64_MAX)


class BookKeeper:
    """A client of one cluster; belongs to the event loop that it is used in.

    `cluster` is open and stays the caller's. `timeout_s` is the longest wait for a bookie without progress.
    `addresses` says where bookies are that advertise what this machine cannot reach. `tls` turns on START_TLS (see
    `client_tls`). `throttle_count` is how many adds of one ledger may be in flight before `ready` waits. `only` these
    bookies get what is written (None: whoever is registered).
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        protocol: Protocol = Protocol.V3,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
        addresses: Mapping[str, tuple[str, int]] = {},
        throttle_count: int = THROTTLE_COUNT,
        only: Collection[str] | None = None,
    ) -> None:
        self.cluster = cluster
        self.protocol = protocol
        self.pool = BookiePool(cluster, protocol=protocol, tls=tls, timeout_s=timeout_s, addresses=addresses, only=only)
        self._throttle_count = max(throttle_count, 1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections to bookies: what is in flight fails, and ledgers that are being written stay open."""
        await self.pool.close()

    async def create_ledger(
        self,
        *,
        ensemble_size: int = 3,
        write_quorum_size: int = 2,
        ack_quorum_size: int = 2,
        digest_type: DigestType = DigestType.CRC32C,
        password: bytes = b"",
        custom_metadata: Mapping[str, bytes] = {},
    ) -> WriteHandle:
        """Create a ledger in scope 0 under an id that the metadata store generates, and open it for writing.

        Raises UsageError for quorums that do not fit, NotEnoughBookies. Source: LedgerCreateOp.
        """
        return await self._create(
            0, None, ensemble_size, write_quorum_size, ack_quorum_size, digest_type, password, custom_metadata, False
        )

    async def create_ledger_adv(
        self,
        ledger_id: int | None = None,
        *,
        ledger_scope_id: int = 0,
        ensemble_size: int = 3,
        write_quorum_size: int = 2,
        ack_quorum_size: int = 2,
        digest_type: DigestType = DigestType.CRC32C,
        password: bytes = b"",
        custom_metadata: Mapping[str, bytes] = {},
    ) -> WriteHandle:
        """Create a ledger under `ledger_id` of scope `ledger_scope_id`; without an id one is generated there.

        Raises LedgerExists for an id that is taken, UsageError for a scope-0 id of 2^63 or more (2^63 − 1 too where
        bookies of Apache's are up, which that id makes delete everything) or quorums that do not fit, IllegalOperation
        for a scope in protocol v2, NotEnoughBookies (for a scope: among those that serve scopes).
        Source: BP-35 (CreateAdvBuilder.withLedgerScopeId).
        """
        return await self._create(
            ledger_scope_id, ledger_id, ensemble_size, write_quorum_size, ack_quorum_size, digest_type, password,
            custom_metadata, True,
        )  # fmt: skip

    async def open_ledger(
        self,
        ledger_id: int,
        *,
        ledger_scope_id: int = 0,
        password: bytes | None = b"",
        recovery: bool = False,
        accept_loss: RecoveryLoss | None = None,
        digest_type: DigestType | None = None,
    ) -> ReadHandle:
        """Open a ledger for reading; with `recovery` fence it and close it first, if it is not closed.

        `accept_loss` is what `find_recovery_loss` found and the recovery may give up.
        `password` None opens administratively, with the metadata's own password. `digest_type` None takes the
        metadata's; it counts where the metadata has none (CRC32 if that is None too).
        Raises LedgerNotFound, Unauthorized for a wrong password, DigestMismatch for another digest type than the
        metadata's, IllegalOperation for a scope in protocol v2; what reading the last add confirmed or recovery raise.
        Source: LedgerOpenOp; BP-35 (OpenBuilder.withLedgerScopeId).
        """
        ledger = self._ledger(ledger_scope_id, ledger_id)
        versioned = await in_thread(self.cluster.ledgers.read, ledger)
        metadata = versioned.metadata
        if metadata.password is not None and password is not None and password != metadata.password:
            raise Unauthorized(f"Wrong password for ledger {ledger}", hint="give the password it was created with")
        if metadata.digest_type is not None and digest_type not in (None, metadata.digest_type):
            raise DigestMismatch(f"Ledger {ledger} has digest type {metadata.digest_type.name}")
        access = self.access(ledger, versioned, digest_type=digest_type, password=password)
        if recovery:
            await recover(access, accept_loss=accept_loss)
        if access.metadata.is_closed:
            return ReadHandle(access, access.metadata.last_entry_id, access.metadata.length)
        confirmed = await read_last_confirmed(access)
        return ReadHandle(access, confirmed.last_add_confirmed, confirmed.length)

    async def find_recovery_loss(self, ledger: LedgerId) -> tuple[VersionedMetadata, RecoveryLoss | None]:
        """Return a ledger's metadata, and what recovering it would give up: None where nothing. Changes nothing.

        Raises LedgerNotFound, and as `bkctl.client.recovery.find_loss`.
        """
        versioned = await in_thread(self.cluster.ledgers.read, self._ledger(ledger.scope_id, ledger.ledger_id))
        return versioned, await find_loss(self.access(ledger, versioned))

    def access(
        self,
        ledger: LedgerId,
        versioned: VersionedMetadata,
        *,
        digest_type: DigestType | None = None,
        password: bytes | None = None,
    ) -> LedgerAccess:
        """What requests for the ledger need, by its metadata alone: no bookie is asked, no password is checked.

        `digest_type` and `password` count where the metadata has none. Raises IllegalOperation as `open_ledger`.
        """
        self._check_scope(ledger.scope_id)
        metadata = versioned.metadata
        digest = DigestManager(
            ledger,
            metadata.digest_type or digest_type or DigestType.CRC32,
            metadata.password if metadata.password is not None else password or b"",
        )
        return LedgerAccess(self.pool, ledger, digest, versioned)

    async def delete_ledger(self, ledger_id: int, *, ledger_scope_id: int = 0) -> None:
        """Delete the ledger's metadata; the bookies drop its entries when they collect garbage.

        Raises LedgerNotFound, IllegalOperation for a scope in protocol v2.
        Source: BP-35 (DeleteBuilder.withLedgerScopeId).
        """
        await in_thread(self.cluster.ledgers.remove, self._ledger(ledger_scope_id, ledger_id))

    def _ledger(self, scope_id: int, ledger_id: int) -> LedgerId:
        self._check_scope(scope_id)
        return LedgerId(scope_id, ledger_id)

    def _check_scope(self, scope_id: int) -> None:
        if scope_id != 0 and self.protocol is Protocol.V2:
            raise IllegalOperation(
                f"Protocol v2 cannot carry a ledger scope, and scope {scope_id} was given", hint="use v3"
            )

    async def _create(
        self,
        scope_id: int,
        ledger_id: int | None,
        ensemble_size: int,
        write_quorum_size: int,
        ack_quorum_size: int,
        digest_type: DigestType,
        password: bytes,
        custom_metadata: Mapping[str, bytes],
        advanced: bool,
    ) -> WriteHandle:
        self._check_scope(scope_id)
        check_quorums(ensemble_size, write_quorum_size, ack_quorum_size)
        if ledger_id is not None and scope_id == 0 and ledger_id > I64_MAX:
            raise UsageError(
                f"Ledger id {ledger_id} is 2^63 or more, which no ledger of scope 0 can have",
                hint="give a smaller id, or a ledger scope id",
            )
        suspects = self.pool.suspects()
        given = None if ledger_id is None else LedgerId(scope_id, ledger_id)

        def create() -> tuple[LedgerId, VersionedMetadata]:
            bookies = self.pool.registered()
            if given == _LAST_UNSCOPED and not all(bookie.ledger_scopes for bookie in bookies):
                # ScanAndCompareGarbageCollector.gc goes on at the last id + 1, which overflows: nothing seems listed.
                raise UsageError(
                    f"While ledger {given} (2^63 − 1) exists, Apache's bookies delete every ledger they have when they "
                    "collect garbage",
                    hint="give a smaller id, or a ledger scope id",
                )
            ensemble = choose_bookies(bookies, ensemble_size, scoped=scope_id != 0, avoid=suspects)
            metadata = LedgerMetadata(
                ensemble_size=ensemble_size,
                write_quorum_size=write_quorum_size,
                ack_quorum_size=ack_quorum_size,
                digest_type=digest_type,
                password=password,
                ensembles=(Fragment(0, ensemble),),
                custom_metadata=dict(custom_metadata),
            )
            ledgers = self.cluster.ledgers
            for _ in range(_CREATE_ATTEMPTS_MAX):
                ledger = given or ledgers.new_ledger_id(scope_id)
                try:
                    return ledger, VersionedMetadata(metadata, ledgers.create(ledger, metadata), None)
                except LedgerExists:
                    if given is not None:
                        raise
            raise LedgerExists(f"{_CREATE_ATTEMPTS_MAX} generated ledger ids exist already")

        ledger, versioned = await in_thread(create)
        access = LedgerAccess(self.pool, ledger, DigestManager(ledger, digest_type, password), versioned)
        return WriteHandle(access, throttle_count=self._throttle_count, own_entry_ids=advanced)
