"""The client: create, open, write, read, recover and delete ledgers, in scope 0 and in scopes of BP-35.

    async with BookKeeper("zk://zk1/ledgers") as bookkeeper:
        async with await bookkeeper.create_ledger_adv(ledger_scope_id=7) as writer:
            entry_id = await writer.add(b"hello")
        reader = await bookkeeper.open_ledger(writer.ledger)
        async for entry in reader.read():
            ...

Source: BookKeeper, LedgerCreateOp, LedgerOpenOp, LedgerDeleteOp, LedgerHandle, ReadOnlyLedgerHandle; BP-35.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from functools import partial
from typing import Final, Self

from bkctl.client.bookies import DEFAULT_CONFIG, BookiePool
from bkctl.client.ensemble import check_quorums
from bkctl.client.placement import choose_ensemble
from bkctl.client.read_handle import ReadHandle
from bkctl.client.reader import LedgerAccess, read_last_confirmed
from bkctl.client.recovery import RecoveryLoss, RecoveryPlan, find_loss, recover, watch_writer
from bkctl.client.write_handle import WriteFlag, WriteHandle
from bkctl.config import ClientConfig
from bkctl.errors import BkctlError, IllegalOperation, LedgerExists, Unauthorized, UsageError, restated
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata
from bkctl.ids import I64_MAX, AnyLedgerId, LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.store import StoreSecurity
from bkctl.protocol.messages import Protocol
from bkctl.tasks import run_to_end

TIMEOUT_S: Final = 30.0
#: Generated ledger ids to try; all of them exist only in a broken store.
_CREATE_ATTEMPTS_MAX: Final = 20
#: The last id of scope 0.
_LAST_UNSCOPED: Final = LedgerId(0, I64_MAX)


class BookKeeper:
    """A client of one cluster, an async context manager. Tasks of one event loop share it and its connections.

    `cluster` is the cluster's metadata URI, whose store is connected to with `security` on entering the context, and
    closed with it; or an open cluster, which its owner closes. `timeout_s` is the longest wait for a server without
    progress, `connect_timeout_s` that for a connection (None: `timeout_s`). `addresses` overrides the addresses of
    bookies that advertise an unreachable one. `tls` turns on START_TLS. New entries go to bookies in `only` (None: all
    registered ones), by the placement policy in `config` and the racks of the cluster's bookies.
    `explicit_lac_interval` is the time in milliseconds after which handles write the last add confirmed if it moved (0:
    only `write_lac` does). `protocol` V2 reaches scope 0 only. Java: BookKeeper, ClientConfiguration.
    """

    cluster: Cluster
    pool: BookiePool

    def __init__(
        self,
        cluster: Cluster | str,
        *,
        protocol: Protocol = Protocol.V3,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
        connect_timeout_s: float | None = None,
        addresses: Mapping[str, tuple[str, int]] = {},
        only: Collection[str] | None = None,
        config: ClientConfig | None = None,
        explicit_lac_interval: int = 0,
        security: StoreSecurity | None = None,
    ) -> None:
        self.protocol = Protocol(protocol)
        self._explicit_lac_interval_s = explicit_lac_interval / 1000
        self._new_pool = partial(
            BookiePool, protocol=self.protocol, tls=tls, timeout_s=timeout_s, addresses=addresses,
            connect_timeout_s=connect_timeout_s, only=only, config=config or DEFAULT_CONFIG,
        )  # fmt: skip
        self._connect: Callable[[], Cluster] | None = None
        self._owned: Cluster | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        if isinstance(cluster, str):
            from bkctl.metadata.cluster import open_cluster
            from bkctl.metadata.store import NO_SECURITY

            self._connect = partial(
                open_cluster, cluster, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s,
                security=security or NO_SECURITY,
            )  # fmt: skip
        else:
            self.cluster, self.pool = cluster, self._new_pool(cluster)

    async def __aenter__(self) -> Self:
        if self._connect is not None:
            connecting = asyncio.ensure_future(asyncio.to_thread(self._connect))
            try:
                self.cluster = await run_to_end(connecting)
            except asyncio.CancelledError:
                if not connecting.cancelled() and connecting.exception() is None:
                    await run_to_end(asyncio.to_thread(connecting.result().close))
                raise
            self._connect, self._owned = None, self.cluster
            self.pool = self._new_pool(self.cluster)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. Requests in flight fail, ledgers being written stay open. Harmless when repeated."""
        self._connect, owned, self._owned = None, self._owned, None
        try:
            if hasattr(self, "pool"):
                await self.pool.close()
        finally:
            if owned is not None:
                await run_to_end(asyncio.to_thread(owned.close))

    async def create_ledger(
        self,
        *,
        ensemble_size: int = 3,
        write_quorum_size: int = 2,
        ack_quorum_size: int = 2,
        digest_type: DigestType = DigestType.CRC32C,
        password: bytes = b"",
        custom_metadata: Mapping[str, bytes] = {},
        write_flags: WriteFlag = WriteFlag.NONE,
    ) -> WriteHandle:
        """Create a ledger in scope 0 under an id that the metadata store generates, and open it for writing.

        Sizes are numbers of bookies. Raises UsageError for quorums that do not fit, NotEnoughBookies, IllegalOperation
        for `write_flags` in protocol v2. Java: newCreateLedgerOp.
        """
        return await self.create_ledger_adv(
            ensemble_size=ensemble_size, write_quorum_size=write_quorum_size, ack_quorum_size=ack_quorum_size,
            digest_type=digest_type, password=password, custom_metadata=custom_metadata, write_flags=write_flags,
            own_entry_ids=False,
        )  # fmt: skip

    async def create_ledger_adv(
        self,
        ledger_id: AnyLedgerId | None = None,
        *,
        ledger_scope_id: int | None = None,
        ensemble_size: int = 3,
        write_quorum_size: int = 2,
        ack_quorum_size: int = 2,
        digest_type: DigestType = DigestType.CRC32C,
        password: bytes = b"",
        custom_metadata: Mapping[str, bytes] = {},
        write_flags: WriteFlag = WriteFlag.NONE,
        own_entry_ids: bool = True,
    ) -> WriteHandle:
        """Create a ledger under `ledger_id` (None: a generated id) of scope `ledger_scope_id`, and open it for writing.

        The scope is 0 unless `ledger_scope_id`, or `ledger_id` as a LedgerId or UUID, names one. With `own_entry_ids`
        the caller may choose entry ids. Raises LedgerExists for an existing id, UsageError for
        quorums that do not fit, a scope-0 id of 2^63 or more, or 2^63 − 1 while Apache's bookies are up (that id makes
        them delete all ledgers), IllegalOperation for a scope in protocol v2, NotEnoughBookies (for a scope: bookies
        that serve scopes).
        Java: newCreateLedgerOp.makeAdv, BP-35's CreateAdvBuilder.withLedgerScopeId.
        """
        given = None if ledger_id is None else LedgerId.of(ledger_id, ledger_scope_id)
        scope_id = self._scope(LedgerId(ledger_scope_id or 0, 0) if given is None else given)
        if write_flags and self.protocol is Protocol.V2:
            raise IllegalOperation("Protocol v2 has no write flags such as DEFERRED_SYNC", hint="use v3")
        check_quorums(ensemble_size, write_quorum_size, ack_quorum_size)
        if given is not None and not given.is_scoped and given.ledger_id > I64_MAX:
            raise UsageError(
                f"Ledger id {given} is 2^63 or more, which no ledger of scope 0 can have",
                hint="give a smaller id, or a ledger scope id",
            )
        metadata = LedgerMetadata(
            ensemble_size=ensemble_size,
            write_quorum_size=write_quorum_size,
            ack_quorum_size=ack_quorum_size,
            digest_type=digest_type,
            password=password,
            ensembles=(),
            custom_metadata=dict(custom_metadata),
        )
        await self.pool.weigh()
        registering = asyncio.ensure_future(asyncio.to_thread(self._register, scope_id, given, metadata))

        async def remove() -> None:
            with contextlib.suppress(BkctlError):
                ledger, versioned = await registering
                await asyncio.to_thread(self.cluster.ledgers.remove, ledger, versioned.version)

        try:
            ledger, versioned = await asyncio.shield(registering)
        except asyncio.CancelledError:
            # The caller never learns the id.
            await run_to_end(remove())
            raise
        access = LedgerAccess(self.pool, ledger, DigestManager(ledger, digest_type, password), versioned)
        return WriteHandle(
            access, own_entry_ids=own_entry_ids, write_flags=write_flags,
            explicit_lac_interval_s=self._explicit_lac_interval_s,
        )  # fmt: skip

    async def open_ledger(
        self,
        ledger_id: AnyLedgerId,
        *,
        ledger_scope_id: int | None = None,
        password: bytes | None = b"",
        recovery: bool = False,
        accept_loss: RecoveryLoss | None = None,
    ) -> ReadHandle:
        """Open a ledger for reading; with `recovery` fence it, recover its end and close it first, if it is open.

        Without `recovery` its writer may continue, and `tail` follows it.
        `accept_loss` is the loss from `find_recovery_loss` that the recovery may cause. `password` None opens
        administratively, with the metadata's own password. Raises LedgerNotFound, Unauthorized for a wrong password,
        IllegalOperation for a scope in protocol v2, and the errors of `read_last_confirmed` and `recover`.
        Java: newOpenLedgerOp.withRecovery, BP-35's OpenBuilder.withLedgerScopeId.
        """
        ledger = self._ledger(ledger_id, ledger_scope_id)
        versioned = await asyncio.to_thread(self._read, ledger)
        metadata = versioned.metadata
        if metadata.password is not None and password is not None and password != metadata.password:
            problem = f"Wrong password for ledger {ledger}" if password else f"Ledger {ledger} has a password"
            raise Unauthorized(
                problem,
                hint="give it with --password-file or --password; administrators can read without it: --as-admin",
            )
        access = self.access(ledger, versioned, password=password)
        await self.pool.find_near(fragment.bookies for fragment in metadata.ensembles)
        if recovery:
            await recover(access, accept_loss=accept_loss)
        if access.metadata.is_closed:
            return ReadHandle(access, access.metadata.last_entry_id, access.metadata.length)
        confirmed = await read_last_confirmed(access)
        return ReadHandle(access, confirmed.last_add_confirmed, confirmed.length)

    async def plan_recovery(self, ledger: LedgerId, *, with_loss: bool = True) -> RecoveryPlan:
        """Return what recovering a ledger would do, and `with_loss` what it would give up. Changes nothing.

        Raises LedgerNotFound, and the errors of `recovery.watch_writer` and `recovery.find_loss`.
        """
        versioned = await asyncio.to_thread(self._read, self._ledger(ledger))
        access = self.access(ledger, versioned)
        activity = await watch_writer(access)
        return RecoveryPlan(ledger, versioned.metadata, activity, await find_loss(access) if with_loss else None)

    async def find_recovery_loss(self, ledger: LedgerId) -> tuple[VersionedMetadata, RecoveryLoss | None]:
        """Return a ledger's metadata and the loss from recovering it (None: no loss). Changes nothing.

        Raises LedgerNotFound, and the errors of `bkctl.client.recovery.find_loss`.
        """
        versioned = await asyncio.to_thread(self._read, self._ledger(ledger))
        return versioned, await find_loss(self.access(ledger, versioned))

    def access(self, ledger: LedgerId, versioned: VersionedMetadata, *, password: bytes | None = None) -> LedgerAccess:
        """Return the access to a ledger by its metadata alone, without asking a bookie or checking a password.

        Where the metadata has none, the digest type is CRC32, and `password` applies. Raises IllegalOperation as
        `open_ledger`.
        """
        self._scope(ledger)
        metadata = versioned.metadata
        digest = DigestManager(
            ledger,
            metadata.digest_type or DigestType.CRC32,
            metadata.password if metadata.password is not None else password or b"",
        )
        return LedgerAccess(self.pool, ledger, digest, versioned)

    async def delete_ledger(self, ledger_id: AnyLedgerId, *, ledger_scope_id: int | None = None) -> None:
        """Delete the ledger's metadata; the bookies drop its entries when they collect garbage.

        Raises LedgerNotFound, IllegalOperation for a scope in protocol v2.
        Java: newDeleteLedgerOp, BP-35's DeleteBuilder.withLedgerScopeId.
        """
        ledger = self._ledger(ledger_id, ledger_scope_id)
        await run_to_end(asyncio.to_thread(lambda: self.cluster.ledgers.remove(ledger)))

    async def get_ledger_metadata(
        self, ledger_id: AnyLedgerId, *, ledger_scope_id: int | None = None
    ) -> LedgerMetadata:
        """Return the ledger's metadata: state, length, ensembles, …. Raises LedgerNotFound.

        Java: getLedgerMetadata.
        """
        return (await asyncio.to_thread(self._read, self._ledger(ledger_id, ledger_scope_id))).metadata

    async def watch_ledger_metadata(
        self, ledger_id: AnyLedgerId, *, ledger_scope_id: int | None = None
    ) -> AsyncIterator[LedgerMetadata]:
        """Yield the ledger's metadata now and after each change; versions in between may be skipped.

        Raises LedgerNotFound once it is deleted. Java: LedgerManager.registerLedgerMetadataListener.
        """
        ledger, loop = self._ledger(ledger_id, ledger_scope_id), asyncio.get_running_loop()
        changes: asyncio.Queue[VersionedMetadata | BkctlError] = asyncio.Queue()

        def report(found: VersionedMetadata | BkctlError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changes.put_nowait, found)

        watching = asyncio.ensure_future(asyncio.to_thread(lambda: self.cluster.ledgers.watch(ledger, report)))
        try:
            await run_to_end(watching)
            while True:
                found = await changes.get()
                while not changes.empty():
                    found = changes.get_nowait()
                if isinstance(found, BkctlError):
                    raise restated(found)
                yield found.metadata
        finally:
            if watching.done() and not watching.cancelled() and watching.exception() is None:
                await run_to_end(asyncio.to_thread(watching.result()))

    async def list_ledgers(self, *, ledger_scope_id: int | None = 0) -> AsyncIterator[LedgerId]:
        """Yield the ids of the ledgers of a scope (None: of all scopes) in ascending order. Java: newListLedgersOp."""
        self._check_usable()
        batches = await asyncio.to_thread(lambda: self.cluster.ledgers.batches(ledger_scope_id))
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            for ledger in batch:
                yield ledger

    def _read(self, ledger: LedgerId) -> VersionedMetadata:
        """Read a ledger's metadata. Blocks, as the first use of `cluster.ledgers` does: it reads the LAYOUT."""
        return self.cluster.ledgers.read(ledger)

    def _ledger(self, ledger_id: AnyLedgerId, scope_id: int | None = None) -> LedgerId:
        ledger = LedgerId.of(ledger_id, scope_id)
        self._scope(ledger)
        return ledger

    def _scope(self, ledger: LedgerId) -> int:
        """Return the scope of `ledger`. Raises IllegalOperation if this client cannot reach it."""
        self._check_usable()
        if ledger.is_scoped and self.protocol is Protocol.V2:
            raise IllegalOperation(f"Protocol v2 cannot carry a ledger scope such as {ledger.scope_id}", hint="use v3")
        return ledger.scope_id

    def _check_usable(self) -> None:
        if not hasattr(self, "pool"):
            raise IllegalOperation("This BookKeeper is not connected", hint="use 'async with BookKeeper(…)'")
        if self.pool.closed:
            raise IllegalOperation("This BookKeeper is closed", hint="make a new one")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # `access` needs none
            return
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise IllegalOperation(
                "This BookKeeper is used in another event loop",
                hint="use one in each event loop, or bkctl.sync in threads",
            )

    def _register(
        self, scope_id: int, given: LedgerId | None, metadata: LedgerMetadata
    ) -> tuple[LedgerId, VersionedMetadata]:
        """Choose an ensemble and write the metadata, under the id `given` or a generated one. Blocks."""
        bookies = self.pool.registered()
        if given == _LAST_UNSCOPED and not all(bookie.ledger_scopes for bookie in bookies):
            # ScanAndCompareGarbageCollector.gc continues at the last id + 1, which overflows: no ledger seems listed.
            raise UsageError(
                f"While ledger {given} (2^63 − 1) exists, Apache's bookies delete every ledger they have when they "
                "collect garbage",
                hint="give a smaller id, or a ledger scope id",
            )
        ensemble = choose_ensemble(
            bookies, metadata.ensemble_size, metadata.write_quorum_size, self.pool.placement(bookies),
            scoped=scope_id != 0, ack_quorum_size=metadata.ack_quorum_size, avoid=self.pool.suspects(),
        )  # fmt: skip
        metadata = metadata._replace(ensembles=(Fragment(0, ensemble),))
        ledgers = self.cluster.ledgers
        for _ in range(_CREATE_ATTEMPTS_MAX):
            ledger = given or ledgers.new_ledger_id(scope_id)
            try:
                return ledger, VersionedMetadata(metadata, ledgers.create(ledger, metadata), None)
            except LedgerExists:
                if given is not None:
                    raise
        raise LedgerExists(f"{_CREATE_ATTEMPTS_MAX} generated ledger ids exist already")
