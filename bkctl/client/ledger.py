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
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final, Self

from bkctl.client.bookies import DEFAULT_CONFIG, BookiePool
from bkctl.client.ensemble import check_quorums
from bkctl.client.placement import choose_ensemble
from bkctl.client.read_handle import ReadHandle
from bkctl.client.reader import LedgerAccess, read_last_confirmed
from bkctl.client.recovery import RecoveryLoss, RecoveryPlan, find_loss, recover, watch_writer
from bkctl.client.write_handle import WriteHandle
from bkctl.errors import (
    BkctlError,
    IllegalOperation,
    LedgerExists,
    Unauthorized,
    UsageError,
)
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata
from bkctl.ids import I64_MAX, LedgerId
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.protocol.messages import Protocol
from bkctl.tasks import run_to_end

if TYPE_CHECKING:
    import ssl

    from bkctl.config import ClientConfig
    from bkctl.metadata.cluster import Cluster

TIMEOUT_S: Final = 30.0
#: Generated ledger ids to try; all of them exist only in a broken store.
_CREATE_ATTEMPTS_MAX: Final = 20
#: The last id of scope 0.
_LAST_UNSCOPED: Final = LedgerId(0, I64_MAX)


class BookKeeper:
    """A client of one cluster; belongs to the event loop that it is used in.

    `cluster` is open; its owner closes it. `timeout_s` is the longest wait for a bookie without progress,
    `connect_timeout_s` that for a connection (None: `timeout_s`). `addresses` overrides the addresses of bookies that
    advertise an unreachable one. `tls` turns on START_TLS (see `client_tls`). New entries go to bookies in `only`
    (None: all registered ones), by the placement policy in `config` and the racks of the cluster's bookies.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        protocol: Protocol = Protocol.V3,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
        connect_timeout_s: float | None = None,
        addresses: Mapping[str, tuple[str, int]] = {},
        only: Collection[str] | None = None,
        config: ClientConfig = DEFAULT_CONFIG,
    ) -> None:
        self.cluster = cluster
        self.protocol = protocol
        self.pool = BookiePool(
            cluster, protocol=protocol, tls=tls, timeout_s=timeout_s, addresses=addresses,
            connect_timeout_s=connect_timeout_s, only=only, config=config,
        )  # fmt: skip

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections to bookies. Requests in flight fail, and ledgers being written stay open."""
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
        return await self.create_ledger_adv(
            ensemble_size=ensemble_size, write_quorum_size=write_quorum_size, ack_quorum_size=ack_quorum_size,
            digest_type=digest_type, password=password, custom_metadata=custom_metadata, own_entry_ids=False,
        )  # fmt: skip

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
        own_entry_ids: bool = True,
    ) -> WriteHandle:
        """Create a ledger under `ledger_id` (None: a generated id) of scope `ledger_scope_id`, and open it for writing.

        With `own_entry_ids` the caller may choose entry ids. Raises LedgerExists for an existing id, UsageError for
        quorums that do not fit, a scope-0 id of 2^63 or more, or 2^63 − 1 while Apache's bookies are up (that id makes
        them delete all ledgers), IllegalOperation for a scope in protocol v2, NotEnoughBookies (for a scope: bookies
        that serve scopes).
        Source: BP-35 (CreateAdvBuilder.withLedgerScopeId).
        """
        self._check_scope(ledger_scope_id)
        check_quorums(ensemble_size, write_quorum_size, ack_quorum_size)
        if ledger_id is not None and ledger_scope_id == 0 and ledger_id > I64_MAX:
            raise UsageError(
                f"Ledger id {ledger_id} is 2^63 or more, which no ledger of scope 0 can have",
                hint="give a smaller id, or a ledger scope id",
            )
        given = None if ledger_id is None else LedgerId(ledger_scope_id, ledger_id)
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
        registering = asyncio.ensure_future(asyncio.to_thread(self._register, ledger_scope_id, given, metadata))

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
        return WriteHandle(access, own_entry_ids=own_entry_ids)

    async def open_ledger(
        self,
        ledger_id: int,
        *,
        ledger_scope_id: int = 0,
        password: bytes | None = b"",
        recovery: bool = False,
        accept_loss: RecoveryLoss | None = None,
    ) -> ReadHandle:
        """Open a ledger for reading; with `recovery` fence and close an open ledger first.

        `accept_loss` is the loss from `find_recovery_loss` that the recovery may cause. `password` None opens
        administratively, with the metadata's own password. Raises LedgerNotFound, Unauthorized for a wrong password,
        IllegalOperation for a scope in protocol v2, and the errors of `read_last_confirmed` and `recover`.
        Source: LedgerOpenOp; BP-35 (OpenBuilder.withLedgerScopeId).
        """
        ledger = self._ledger(ledger_scope_id, ledger_id)
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
        versioned = await asyncio.to_thread(self._read, self._ledger(ledger.scope_id, ledger.ledger_id))
        access = self.access(ledger, versioned)
        activity = await watch_writer(access)
        return RecoveryPlan(ledger, versioned.metadata, activity, await find_loss(access) if with_loss else None)

    async def find_recovery_loss(self, ledger: LedgerId) -> tuple[VersionedMetadata, RecoveryLoss | None]:
        """Return a ledger's metadata and the loss from recovering it (None: no loss). Changes nothing.

        Raises LedgerNotFound, and the errors of `bkctl.client.recovery.find_loss`.
        """
        versioned = await asyncio.to_thread(self._read, self._ledger(ledger.scope_id, ledger.ledger_id))
        return versioned, await find_loss(self.access(ledger, versioned))

    def access(self, ledger: LedgerId, versioned: VersionedMetadata, *, password: bytes | None = None) -> LedgerAccess:
        """Return the access to a ledger by its metadata alone, without asking a bookie or checking a password.

        Where the metadata has none, the digest type is CRC32, and `password` applies. Raises IllegalOperation as
        `open_ledger`.
        """
        self._check_scope(ledger.scope_id)
        metadata = versioned.metadata
        digest = DigestManager(
            ledger,
            metadata.digest_type or DigestType.CRC32,
            metadata.password if metadata.password is not None else password or b"",
        )
        return LedgerAccess(self.pool, ledger, digest, versioned)

    async def delete_ledger(self, ledger_id: int, *, ledger_scope_id: int = 0) -> None:
        """Delete the ledger's metadata; the bookies drop its entries when they collect garbage.

        Raises LedgerNotFound, IllegalOperation for a scope in protocol v2.
        Source: BP-35 (DeleteBuilder.withLedgerScopeId).
        """
        ledger = self._ledger(ledger_scope_id, ledger_id)
        await asyncio.to_thread(lambda: self.cluster.ledgers.remove(ledger))

    def _read(self, ledger: LedgerId) -> VersionedMetadata:
        """Read a ledger's metadata. Blocks, as the first use of `cluster.ledgers` does: it reads the LAYOUT."""
        return self.cluster.ledgers.read(ledger)

    def _ledger(self, scope_id: int, ledger_id: int) -> LedgerId:
        self._check_scope(scope_id)
        return LedgerId(scope_id, ledger_id)

    def _check_scope(self, scope_id: int) -> None:
        if scope_id != 0 and self.protocol is Protocol.V2:
            raise IllegalOperation(f"Protocol v2 cannot carry a ledger scope such as {scope_id}", hint="use v3")

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
