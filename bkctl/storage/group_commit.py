"""GroupCommit: batches of journal records, and their commit in groups, one queue a journal.

The event loop fills the batches and settles them; one thread a journal commits them.
Source: Journal (QueueEntry, ForceWriteRequest).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from bkctl.ids import LedgerId
from bkctl.storage.journal_writer import JournalWriter
from bkctl.storage.ledger.ledger_storage import LedgerHandle

log: Final = logging.getLogger("bkctl.bookie")

#: Called with None when a batch is on disk, or with the error that lost it.
Done = Callable[[BaseException | None], None]


class JournalBatch:
    """Records on their way to one journal, and the callers that wait for them.

    `tokens` belong to the callers: one for the entries of each add, `count` entries in all. `calls` get the outcome
    once it is known. `written` get it earlier: once the system has the batch, synced or not.
    """

    __slots__ = ("calls", "count", "epoch", "put_s", "records", "scoped", "size", "tokens", "written")

    def __init__(self, epoch: int = 0) -> None:
        #: Batches of one epoch depend on each other: if one fails, so do those behind it.
        self.epoch = epoch
        self.records: list[bytes] = []
        #: Bytes of the records, and how many of them are entries.
        self.size = 0
        self.count = 0
        #: The time at which the batch was queued for its journal (monotonic clock).
        self.put_s = 0.0
        self.scoped = False
        self.tokens: list[Any] = []
        self.calls: list[Done] = []
        self.written: list[Done] = []

    def append(self, ledger: LedgerId, record: bytes) -> None:
        """Append a record that is not an entry."""
        self.records.append(record)
        self.size += len(record)
        self.scoped = self.scoped or ledger.is_scoped

    def tell_written(self, error: BaseException | None) -> None:
        """Call `written`, once."""
        written, self.written = self.written, []
        for done in written:
            _call(done, error)


def _call(done: Done, error: BaseException | None) -> None:
    """Call `done`, and log its exception: the other callers of the group must still get their outcome."""
    try:
        done(error)
    except Exception:
        log.exception("A caller of the journal failed when its group was settled")


class GroupCommit:
    """The journals of one bookie; `batches` has the batch of each that gathers records now.

    `handles` are the ledgers in memory.
    """

    def __init__(self, journals: Sequence[JournalWriter], handles: Mapping[LedgerId, LedgerHandle]) -> None:
        self.journals = journals
        self._handles = handles
        self.batches = [JournalBatch() for _ in journals]
        self._failed_epochs = [-1] * len(journals)

    def take_batch(self, number: int) -> JournalBatch | None:
        """Return the batch gathered for journal `number`, for `commit` and then `settle`; None for an empty one."""
        batch = self.batches[number]
        if not batch.tokens and not batch.calls and not batch.size:
            return None  # callers in `written` wait for an entry, which has a token
        self.batches[number] = JournalBatch(batch.epoch)
        return batch

    def commit(
        self, number: int, batch: JournalBatch, *more: JournalBatch, written: Callable[[], object] | None = None
    ) -> None:
        """Write batches of journal `number` as one group, in the order of `take_batch`; return once they are on disk.

        Calls `written` before the sync. Raises OSError: the batches fail, and so do all taken before `settle`.
        """
        # Grouped behind a batch that fails, one of a later epoch fails too, and so do those that depend on it.
        last_epoch = max(batch.epoch, *(other.epoch for other in more)) if more else batch.epoch
        if batch.epoch <= self._failed_epochs[number]:
            self._failed_epochs[number] = last_epoch
            raise OSError(f"An earlier group of journal {self.journals[number].directory} failed")
        records, size, scoped = batch.records, batch.size, batch.scoped
        for other in more:
            records += other.records
            size += other.size
            scoped = scoped or other.scoped
        try:
            self.journals[number].commit(records, size, scoped=scoped, written=written)
        except Exception:
            self._failed_epochs[number] = last_epoch
            raise

    def settle(self, number: int, batch: JournalBatch, error: OSError | None) -> JournalBatch | None:
        """Report the outcome of `commit` to the batch's `calls`; the caller reports it to the `tokens`.

        After a failure the batch gathered meanwhile fails too, since its records depend on the lost ones (a ledger
        key): its calls get the error, and it is returned for its tokens.
        """
        doomed = None
        if error is not None and batch.epoch == self.batches[number].epoch:
            doomed = self.batches[number]
            self.batches[number] = JournalBatch(batch.epoch + 1)
            for handle in self._handles.values():
                if handle.journal == number:
                    handle.key_recorded = False
                    handle.fence_recorded = False
        for settled in (batch,) if doomed is None else (batch, doomed):
            settled.tell_written(error)
            for done in settled.calls:
                _call(done, error)
        return doomed
