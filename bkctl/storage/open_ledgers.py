"""OpenLedgers: the handles of the ledgers in memory, loaded or created when a request needs them.

Source: HandleFactoryImpl, LedgerDescriptorImpl.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

from bkctl.errors import BadRequest, BkctlError, Corrupt, LedgerNotFound, Unauthorized
from bkctl.formats.entry import MASTER_KEY_SIZE
from bkctl.formats.layout import Buffer
from bkctl.ids import I64_MAX, LedgerId
from bkctl.storage.journal_writer import JournalWriter
from bkctl.storage.ledger.ledger_handle import LedgerHandle, NeedsDisk
from bkctl.storage.ledger.ledger_storage import LedgerStorage

#: A deleted ledger that was fenced refuses writes until a week after the last one; and how many such are kept.
FENCED_AND_DELETED_S: Final = 7 * 24 * 3600
FENCED_AND_DELETED_MAX: Final = 100_000


class RecentLedgers:
    """Ledgers that were added within `kept_s`, the last `count_max` at most. Belongs to the event loop."""

    def __init__(self, kept_s: float, count_max: int) -> None:
        self._kept_s, self._count_max = kept_s, count_max
        #: Time of each ledger's last addition, oldest first; monotonic: wall time may leap, and so lift a fence.
        self._added_s: dict[LedgerId, float] = {}

    def add(self, ledger: LedgerId) -> None:
        """Add the ledger, or keep it for longer."""
        self._added_s.pop(ledger, None)
        self._added_s[ledger] = time.monotonic()
        if len(self._added_s) > self._count_max:
            del self._added_s[next(iter(self._added_s))]

    def discard(self, ledger: LedgerId) -> None:
        """Forget the ledger."""
        self._added_s.pop(ledger, None)

    def __contains__(self, ledger: LedgerId) -> bool:
        return time.monotonic() - self._added_s.get(ledger, -math.inf) <= self._kept_s

    def __len__(self) -> int:
        while self._added_s and (oldest := next(iter(self._added_s))) not in self:
            del self._added_s[oldest]
        return len(self._added_s)

    def newest(self, count: int) -> list[LedgerId]:
        """Return the ledgers that were added last, `count` at most."""
        return list(islice(reversed(self._added_s), count))


class OpenLedgers:
    """The ledgers of one bookie that are in memory. Belongs to the event loop.

    `journals` are the bookie's; the list is empty while the journals are replayed.
    """

    def __init__(self, storage: LedgerStorage[Any], journals: Sequence[JournalWriter], journal_count: int) -> None:
        self._storage = storage
        self._journals = journals
        self._journal_count = journal_count
        #: Deleted ledgers whose fence still holds: their writers may not have noticed either.
        self._fenced_and_deleted = RecentLedgers(FENCED_AND_DELETED_S, FENCED_AND_DELETED_MAX)
        self.handles: dict[LedgerId, LedgerHandle] = storage.handles
        #: Ledgers that `supplied` did not find on disk, with the handles to create them from.
        self._blanks: dict[LedgerId, LedgerHandle] = {}
        #: The handles that the last eviction by `_adopt` left.
        self._handles_left = 0
        #: The bookie has a ledger of a scope other than 0.
        self.has_scoped = False
        #: Ledgers whose records could not be replayed, and why: their requests fail until the next start.
        self.set_aside: dict[LedgerId, BkctlError] = {}

    def look_up(self, ledger: LedgerId) -> LedgerHandle:
        """Return the ledger's handle; for a ledger that is not here, one that is not among `handles`.

        Raises OSError, Corrupt, Unsupported, NeedsDisk.
        """
        handle = self.handles.get(ledger) or self._blanks.get(ledger)
        if handle is None:
            if ledger in self.set_aside:
                raise Corrupt(f"Ledger {ledger} is set aside: {self.set_aside[ledger].message}")
            read = functools.partial(self._load, ledger)
            if not self._storage.waits_for_disk:
                raise NeedsDisk(ledger, read)
            handle = self._adopt(read())
        return handle

    def _load(self, ledger: LedgerId) -> LedgerHandle:
        handle: LedgerHandle = self._storage.load(ledger)
        if handle.index_error is not None and self._journals:
            raise handle.index_error  # replay, which has the key, would have written it
        return handle

    def _adopt(self, handle: LedgerHandle) -> LedgerHandle:
        if handle.is_on_disk:
            handle.journal = handle.ledger.value % self._journal_count
            limit = self._storage.config.open_file_limit
            # A bookie that is only read has no flushes.
            if len(self.handles) > max(limit, self._handles_left) + limit // 4:
                self.evict()
                self._handles_left = len(self.handles)
            self.handles[handle.ledger] = handle
        return handle

    def evict(self) -> None:
        """Evict the oldest handles beyond `openFileLimit` that are not in use."""
        surplus = len(self.handles) - self._storage.config.open_file_limit
        for ledger in self._storage.unused()[:surplus] if surplus > 0 else ():
            del self.handles[ledger]

    @contextlib.contextmanager
    def supplied(self, found: object) -> Iterator[None]:
        """Serve within, from memory, the requests that waited for the result `found` of NeedsDisk.read."""
        if not isinstance(found, LedgerHandle):
            yield
            return
        ledger = found.ledger
        assert ledger not in self.handles, f"ledger {ledger} was opened twice"
        if not self._adopt(found).is_on_disk:
            self._blanks[ledger] = found
        try:
            yield
        finally:
            self._blanks.pop(ledger, None)

    def open_to_write(self, ledger: LedgerId, master_key: Buffer) -> LedgerHandle:
        """Return the ledger's handle; create a missing ledger, which the first master key binds.

        Raises Unauthorized; BadRequest for a master key that is not 20 bytes, or an impossible ledger id;
        LedgerNotFound for a ledger that was fenced and is deleted; and what `look_up` raises.
        """
        handle = self.look_up(ledger)
        is_here = ledger in self.handles
        if is_here and handle.master_key:
            if handle.master_key != master_key:
                raise Unauthorized(f"Wrong master key for ledger {ledger}")
            return handle
        if len(master_key) != MASTER_KEY_SIZE:
            raise BadRequest(f"A master key for ledger {ledger} of {len(master_key)} bytes, not {MASTER_KEY_SIZE}")
        if not is_here:
            if ledger in self._fenced_and_deleted:
                self._fenced_and_deleted.add(ledger)
                raise LedgerNotFound(f"Ledger {ledger} was fenced, and is deleted")
            if not ledger.is_scoped and ledger.ledger_id > I64_MAX:
                raise BadRequest(f"Ledger id {ledger.ledger_id} is 2^63 or more, which no ledger of scope 0 can have")
            self.create(handle, bytes(master_key))
        else:
            handle.master_key = bytes(master_key)
            self._storage.change_header(handle)
        return handle

    def create(self, handle: LedgerHandle, master_key: bytes) -> None:
        """Create the ledger of a handle that `look_up` returned; its first journal of version 7 follows if needed."""
        ledger = handle.ledger
        self._blanks.pop(ledger, None)
        self._storage.create(handle, master_key)
        handle.journal = ledger.value % self._journal_count
        if ledger.is_scoped and not self.has_scoped:
            self.has_scoped = True
            for journal in self._journals:
                journal.expect_scoped()

    def set_explicit_lac(self, handle: LedgerHandle, lac: int, packet: bytes) -> None:
        """Keep an explicit LAC, whose whole packet is `packet`, and wake the watchers of a higher one."""
        handle.explicit_lac = packet
        self._storage.change_header(handle)
        if lac > handle.lac:
            handle.lac = lac
            handle.wake()

    def delete(self, handle: LedgerHandle) -> None:
        """Delete the ledger from the storage; a fence still refuses writes for a week. Raises OSError, NeedsDisk."""
        self._storage.delete_ledger(handle)
        if handle.fenced:
            self._fenced_and_deleted.add(handle.ledger)
        handle.wake()
