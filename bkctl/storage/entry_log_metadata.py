"""EntryLogMetadata: the ledgers in each entry log and their bytes, for garbage collection.

Source: EntryLogMetadata, InMemoryEntryLogMetadataMap, GarbageCollectorThread.extractMetaFromEntryLogs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bkctl.errors import BkctlError, NotFound
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.listing import log_contents
from bkctl.formats.entry_log import pack_location
from bkctl.formats.record import RECORD_SIZE
from bkctl.ids import LedgerId, LedgerIdSet
from bkctl.storage.entry_logger import EntryLogger
from bkctl.storage.ledger.ledger_storage import LedgerStorage


class SizesByLedger(Mapping[LedgerId, int]):
    """Bytes by ledger, in ascending order of the ledgers."""

    __slots__ = ("_ledgers", "_sizes")

    def __init__(self, sizes: Mapping[LedgerId, int] = {}) -> None:
        self._ledgers = LedgerIdSet(sorted(sizes))
        self._sizes = array("Q", (sizes[ledger] for ledger in self._ledgers))

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[LedgerId]:
        return iter(self._ledgers)

    def __getitem__(self, ledger: LedgerId) -> int:
        at = self._ledgers.place(ledger)
        if at < 0:
            raise KeyError(ledger)
        return self._sizes[at]

    @property
    def total(self) -> int:
        """Return the bytes of all ledgers."""
        return sum(self._sizes)


def open_log(logger: EntryLogger, log_id: int, path: Path, storage: LedgerStorage[Any]) -> EntryLogReader:
    """Open a complete log, in which only the index tells a cut record's payload from records behind a damaged size."""
    reader, base = EntryLogReader.open(path), pack_location(log_id, RECORD_SIZE.size)
    live = storage.index_of(logger).live
    reader.is_indexed = lambda record: live([(record.ledger, record.entry_id, base + record.offset)])[0]
    return reader


class EntryLogMetadata:
    """One complete entry log. `ledgers` are its ledgers that the index has, with their bytes in the log.

    `unindexed` are its other ledgers, until `forget` drops them as garbage: most were deleted, some have lost their
    index. `total_size_bytes` counts all entries and their size fields, `remaining_size_bytes` only the entries of
    `ledgers`. `from_map`: the ledgers map says so, which has no checksum.
    """

    __slots__ = (
        "from_map", "ledgers", "log_id", "logger", "path", "remaining_size_bytes", "total_size_bytes", "unindexed",
    )  # fmt: skip

    def __init__(self, logger: EntryLogger, log_id: int, path: Path, ledgers: Mapping[LedgerId, int]) -> None:
        self.logger = logger
        self.log_id = log_id
        self.path = path
        self.use(ledgers)

    def use(self, ledgers: Mapping[LedgerId, int]) -> None:
        """Take `ledgers` for the contents of the log, as its records have them."""
        self.from_map = False
        self.ledgers = SizesByLedger(ledgers)
        self.unindexed = SizesByLedger()
        self.total_size_bytes = self.remaining_size_bytes = self.ledgers.total

    def keep(self, indexed: Container[LedgerId]) -> None:
        """Update which ledgers the index has: `indexed`."""
        if all(ledger in indexed for ledger in self.ledgers) and not any(map(indexed.__contains__, self.unindexed)):
            return
        sizes = {**self.ledgers, **self.unindexed}
        self.ledgers = SizesByLedger({ledger: size for ledger, size in sizes.items() if ledger in indexed})
        self.unindexed = SizesByLedger({ledger: size for ledger, size in sizes.items() if ledger not in indexed})
        self.remaining_size_bytes = self.ledgers.total

    def forget(self, garbage: Container[LedgerId]) -> None:
        """Forget the unindexed ledgers that are in `garbage`."""
        if any(map(garbage.__contains__, self.unindexed)):
            kept = {ledger: size for ledger, size in self.unindexed.items() if ledger not in garbage}
            self.unindexed = SizesByLedger(kept)

    def usage(self, size_min: int = 0) -> float:
        """Return the live part of the log, 0.0 to 1.0; a log smaller than `size_min` counts as that large.

        0.0 for a log without entries. Source: EntryLogMetadata.getUsage, useTargetEntryLogSizeForGc.
        """
        size = self.total_size_bytes
        if self.remaining_size_bytes < size:
            size = max(size, size_min)
        return self.remaining_size_bytes / size if size else 0.0


class EntryLogMetadataMap:
    """The complete entry logs of all id spaces; each is read once. `storage` has their index. For one thread."""

    def __init__(self, loggers: Sequence[EntryLogger], storage: LedgerStorage[Any]) -> None:
        self._loggers, self._storage = loggers, storage
        self._logs: list[dict[int, EntryLogMetadata]] = [{} for _ in loggers]
        self._unreadable: set[Path] = set()

    def __len__(self) -> int:
        return sum(map(len, self._logs))

    def __iter__(self) -> Iterator[EntryLogMetadata]:
        """Yield all logs, one id space after the other, ascending in each."""
        for logs in self._logs:
            yield from [logs[log_id] for log_id in sorted(logs)]

    def extract(self, problem: Callable[[Path, BkctlError], None]) -> None:
        """Read the logs completed since the last call, and forget removed logs.

        A log that cannot be read to its end is left out, since the rest of its entries is unknown: `problem` gets it,
        once.
        """
        for logger, logs in zip(self._loggers, self._logs, strict=True):
            flushed = set(logger.flushed_log_ids())
            for log_id in logs.keys() - flushed:
                del logs[log_id]
            for log_id in sorted(flushed - logs.keys()):
                path = logger.path_of(log_id)
                if path in self._unreadable:
                    continue
                try:
                    with open_log(logger, log_id, path, self._storage) as reader:
                        contents = log_contents(reader)
                    if not contents.complete:
                        raise contents.error or BkctlError(f"{path} cannot be read to its end")
                    log = logs[log_id] = EntryLogMetadata(logger, log_id, path, contents.sizes)
                    log.from_map = contents.from_map
                except (NotFound, OSError):
                    continue  # it is gone, or a later round reads it
                except BkctlError as error:
                    self.leave_out(path)
                    problem(path, error)

    def read_records(self, log: EntryLogMetadata) -> None:
        """Use the records of a log instead of its ledgers map, once. Raises BkctlError, OSError."""
        if log.from_map:
            with open_log(log.logger, log.log_id, log.path, self._storage) as reader:
                sizes, damage = reader.scan_ledgers()
            log.use(sizes if damage is None else {**log.ledgers, **log.unindexed, **sizes})

    def leave_out(self, path: Path) -> None:
        """Ignore this damaged log from now on."""
        self._unreadable.add(path)
        for logs in self._logs:
            for log_id in [log.log_id for log in logs.values() if log.path == path]:
                del logs[log_id]

    def remove(self, log: EntryLogMetadata) -> None:
        """Forget a log whose file was removed."""
        self._logs[self._loggers.index(log.logger)].pop(log.log_id, None)
