"""Locks of ledgers under replication: ephemeral nodes that keep two workers off one ledger."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from bkctl.errors import AlreadyExists, BkctlError, Conflict, Corrupt
from bkctl.formats.metadata import parse_text, print_text
from bkctl.ids import LedgerId
from bkctl.metadata.store import Claim, MetadataStore, Versioned, value_of
from bkctl.metadata.underreplication.layout import SCOPED, UNDERREPLICATION, UnderreplicationLayout, lock_path
from bkctl.metadata.underreplication.marks import DEFAULT_NODE, SCOPED_NODE


class LedgerLock(NamedTuple):
    """A ledger under replication.

    `owner` is the name that the worker gave: Apache's workers give their host name, not their bookie id; None where the
    worker gave none, or one that cannot be read. `ctime_ms` is the time of the lock, in ms since 1970.
    """

    ledger: LedgerId
    owner: str | None
    ctime_ms: int | None


class LedgerLocks:
    """The locks of one cluster, in all scopes. Methods raise Unreachable, as `MetadataStore`."""

    def __init__(self, store: MetadataStore, layout: UnderreplicationLayout | None = None) -> None:
        self.store = store
        self._layout = layout or UnderreplicationLayout(store)
        self._claims: dict[LedgerId, Claim] = {}
        self._claims_lock = threading.Lock()

    def list(self, scope_id: int | None = None) -> Iterator[LedgerLock]:
        """Yield the locks of the scope's ledgers (None: of any scope), by ascending ledger id."""
        places = sorted(self._places(scope_id))
        for (ledger, _), found in zip(places, self.store.get_many(path for _, path in places), strict=True):
            if found is not None:
                yield LedgerLock(ledger, _owner(found), found.ctime_ms)

    def ledgers(self) -> set[LedgerId]:
        """Return the ids of all locked ledgers of all scopes, without their owners."""
        return {ledger for ledger, _ in self._places(None)}

    def get(self, ledger: LedgerId) -> LedgerLock | None:
        """Return the lock of the ledger, None for an unlocked ledger."""
        found = self.store.get(lock_path(ledger))
        return None if found is None else LedgerLock(ledger, _owner(found), found.ctime_ms)

    def lock(self, ledger: LedgerId, owner: str) -> Claim:
        """Lock the ledger against other workers, until `unlock` or the end of the store's session.

        The session may end during the replication: the returned claim says whether the lock is still held. Raises
        Conflict, naming the owner, for a locked ledger. Source: acquireUnderreplicatedLedger.
        """
        return value_of(self.lock_many([ledger], owner)[0])

    def lock_many(self, ledgers: Sequence[LedgerId], owner: str) -> Sequence[Claim | BkctlError]:
        """`lock` each ledger on its own; a ledger that fails has its error in its place. Raises only Unreachable."""
        from bkctl.formats.data_formats_pb2 import LockDataFormat

        self._layout.prepare()
        value = print_text(LockDataFormat(bookieId=owner)).encode("ascii")
        claimed = self.store.claim_many([lock_path(ledger) for ledger in ledgers], value)
        results: list[Claim | BkctlError] = []
        for ledger, found in zip(ledgers, claimed, strict=True):
            if isinstance(found, AlreadyExists):
                results.append(self._conflict(ledger, found))
                continue
            if not isinstance(found, BkctlError):
                with self._claims_lock:
                    self._claims[ledger] = found
            results.append(found)
        return results

    def _conflict(self, ledger: LedgerId, cause: AlreadyExists) -> Conflict:
        present = self.get(ledger)
        by = f" by {present.owner}" if present is not None and present.owner else ""
        conflict = Conflict(f"Ledger {ledger} is being replicated{by}")
        conflict.__cause__ = cause
        return conflict

    def unlock(self, ledger: LedgerId) -> None:
        """Release the lock that this object took, unless it was lost since, or taken by another worker.

        Source: releaseUnderreplicatedLedger.
        """
        self.unlock_many([ledger])

    def unlock_all(self) -> None:
        """`unlock` each ledger that this object has locked. Raises Unreachable, as `unlock_many`."""
        self.unlock_many(list(self._claims))

    def unlock_many(self, ledgers: Collection[LedgerId]) -> None:
        """`unlock` each ledger. Raises Unreachable: some may stay locked until the next call."""
        with self._claims_lock:
            claims = {ledger: self._claims[ledger] for ledger in ledgers if ledger in self._claims}
        self.store.release_many(list(claims.values()))
        with self._claims_lock:
            for ledger, claim in claims.items():
                if self._claims.get(ledger) is claim:
                    del self._claims[ledger]

    def _places(self, scope_id: int | None) -> Iterator[tuple[LedgerId, str]]:
        for base, pattern, radix in (
            (f"{UNDERREPLICATION}/locks", DEFAULT_NODE, 10),
            (f"{SCOPED}/locks", SCOPED_NODE, 16),
        ):
            for name in self.store.children(base) or ():
                if match := pattern.fullmatch(name):
                    ledger = LedgerId.from_value(int(match[1], radix))
                    if scope_id is None or ledger.scope_id == scope_id:
                        yield ledger, f"{base}/{name}"


def _owner(found: Versioned[bytes]) -> str | None:
    try:
        message = parse_text("LockDataFormat", found.value, "Lock")
    except Corrupt:  # The ledger is locked all the same.
        return None
    return message.bookieId if message.HasField("bookieId") else None
