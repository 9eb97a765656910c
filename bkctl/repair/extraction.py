"""The entries of one ledger, gathered from all entry logs of a bookie.

Several logs may have a copy of an entry: compaction copies entries, and so does a replay of the journal. A bookie's
index points at the last copy, by log id and offset. Source: EntryLogCompactor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import groupby, islice
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from bkctl.checks.digests import DigestChecker, DigestMismatchAt
from bkctl.checks.log_check import batches_behind
from bkctl.disk import Closing
from bkctl.errors import BkctlError, Corrupt, NotFound, Unsupported, on_error
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.index import Gap
from bkctl.files.scan import RecordBatch, ScanState
from bkctl.formats import entry_log
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.record import RECORD_SIZE, Record, RecordType
from bkctl.ids import I64_MAX, LedgerId

#: Locations are 31 bits wide in Apache's logs. Source: DefaultEntryLogger (logSizeLimit's hard limit).
LOG_SIZE_BYTES_MAX: Final = (1 << 31) - 1
_OPEN_FILES_MAX: Final = 128
#: Entries that may be damaged before the digest type of a ledger counts as unknown.
_DIGESTS_TRIED: Final = 5


class Extracted(NamedTuple):
    """One copy of an entry, and its log (the log id is None if the file's name has none).

    `damaged`: the copy does not match its digest.
    """

    path: Path
    log_id: int | None
    record: Record
    damaged: bool = False


class LedgerExtraction(Closing):
    """The entries `first` to `last` (None: all) of `ledger` in the given logs, in order of their ids.

    Of several copies of an entry the last is taken that `digests` does not reject; with `all_copies` every copy, oldest
    first. The constructor scans the logs once, except logs whose ledgers map lacks the ledger; with `trust_maps` False
    also those, as a map has no checksum. Each copy takes 32 bytes of memory. Use as a context manager: it keeps files
    open, so that a running bookie may delete them meanwhile.

    `problems` are the errors of damaged logs, whose entries before the damage and behind it are taken; `cut` are the
    logs that end within a record. A deleted log is skipped.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        ledger: LedgerId,
        first: int = 0,
        last: int | None = None,
        *,
        all_copies: bool = False,
        trust_maps: bool = True,
        digests: DigestChecker | None = None,
    ) -> None:
        self.ledger, self.first, self.last = ledger, first, last
        self.problems: list[BkctlError] = []
        self.cut: list[Path] = []
        self._digests = digests
        self._damaged: set[tuple[str, int]] = set()
        self.logs_skipped = 0
        self._trust_maps = trust_maps
        #: The logs with entries of the ledger, oldest first.
        self.log_paths: list[Path] = []
        self._readers: OrderedDict[int, EntryLogReader] = OrderedDict()
        #: For each copy: entry id, index in `log_paths`, offset of the size field, size.
        self._parts = [np.empty((0, 4), np.int64)]
        with on_error(self.close):
            for path in sorted(paths, key=_age):
                self._scan(path)
        if digests is not None:
            self._note_damage(digests.late_findings())
        copies = np.concatenate(self._parts)
        self.copies_count = len(copies)
        self._is_damaged = np.zeros(len(copies), bool)
        if self._damaged:
            self._is_damaged[:] = [(str(self.log_paths[log]), at) in self._damaged for _, log, at, _ in copies.tolist()]
        # Stable sorts keep copies of one entry in the order of the logs; a damaged copy is the last choice.
        order = np.argsort(copies[:, 0], kind="stable")
        if not all_copies:
            order = np.lexsort((~self._is_damaged, copies[:, 0]))
            ids = copies[order, 0]
            is_last = np.ones(len(ids), bool)
            is_last[:-1] = ids[1:] != ids[:-1]
            order = order[is_last]
        self._copies, self._is_damaged = copies[order], self._is_damaged[order]

    def close(self) -> None:
        while self._readers:
            self._readers.popitem()[1].close()

    def __len__(self) -> int:
        """Return the number of copies that are taken."""
        return len(self._copies)

    @property
    def entry_ids(self) -> Iterator[int]:
        """Return the entry id of each copy that is taken, ascending, with repetitions."""
        return map(int, self._copies[:, 0])

    @property
    def entries_count(self) -> int:
        """Return the number of distinct entries."""
        return sum(1 for _ in groupby(self.entry_ids))

    @property
    def last_entry_id(self) -> int:
        """Return the last entry's id; -1 without entries."""
        return int(self._copies[-1, 0]) if len(self) else -1

    @property
    def damaged_ids(self) -> list[int]:
        """Return the entry id of each copy that is taken and does not match its digest, ascending."""
        return self._copies[self._is_damaged, 0].tolist()  # type: ignore[no-any-return]

    def gaps(self) -> Iterator[Gap]:
        """Yield the missing entries from `first` on: up to `last` if given, else before the last entry."""
        expected = self.first
        for entry_id in self.entry_ids:
            if entry_id > expected:
                yield Gap(expected, entry_id - 1)
            expected = max(expected, entry_id + 1)
        if self.last is not None and expected <= self.last:
            yield Gap(expected, self.last)

    def entries(self) -> Iterator[Extracted]:
        """Yield the taken copies in order of entry ids. Raises Corrupt or NotFound if a log changed since the scan."""
        ids = [entry_log.content_id_of(path.name) for path in self.log_paths]
        for row, is_damaged in zip(self._copies, self._is_damaged, strict=True):
            entry_id, log, offset, size = map(int, row)
            record = self._reader(log).entry_at(offset + RECORD_SIZE.size)
            if (record.ledger, record.entry_id, record.record_size) != (self.ledger, entry_id, size):
                raise Corrupt(f"{self.log_paths[log]}: Entry log changed while it was read, at byte {record.offset}")
            yield Extracted(self.log_paths[log], ids[log], record, bool(is_damaged))

    def find_digest_type(self) -> DigestType | None:
        """Return the digest type without a key (CRC32C, CRC32) that the first entries match; None without one."""
        for digest_type in (DigestType.CRC32C, DigestType.CRC32):
            manager = DigestManager(self.ledger, digest_type)
            for _, _, record, _ in islice(self.entries(), _DIGESTS_TRIED):
                try:
                    manager.open(record.body, record.entry_id)
                except Corrupt:
                    continue
                return digest_type
        return None

    def write_log(self, write: Callable[[bytes], object]) -> int | None:
        """Write an entry log that Apache's tools and bookies read (header, records, ledgers map), in one pass.

        Scoped ledgers give a log of version 2. Returns the first entry id that does not fit below 2 GiB, else None.
        Raises as `entries` does.
        """
        version = entry_log.VERSION_SCOPED if self.ledger.is_scoped else entry_log.VERSION_CURRENT
        room = LOG_SIZE_BYTES_MAX - entry_log.HEADER_SIZE - 64
        ends = np.cumsum(self._copies[:, 3] + RECORD_SIZE.size)
        count = int(np.searchsorted(ends, room, "right"))
        size = int(ends[count - 1]) if count else 0
        write(entry_log.write_header(version, entry_log.HEADER_SIZE + size, 1))
        for _, _, record, _ in islice(self.entries(), count):
            write(RECORD_SIZE.pack(record.record_size) + record.body)
        for record_bytes in entry_log.write_ledgers_map({self.ledger: size}, version):
            write(record_bytes)
        return int(self._copies[count, 0]) if count < len(self) else None

    def _scan(self, path: Path) -> None:
        with ExitStack() as stack:
            try:
                reader = stack.enter_context(EntryLogReader.open(path))
            except NotFound:
                return
            except (Corrupt, Unsupported) as error:
                self.problems.append(error)
                return
            try:
                sizes = reader.ledgers_map()
            except Corrupt as error:
                sizes = None
                self.problems.append(error)
            if sizes is not None and self.ledger not in sizes and self._trust_maps:
                self.logs_skipped += 1
                return
            before = len(self._parts)
            self.log_paths.append(path)
            log = len(self.log_paths) - 1
            try:
                for batch in reader.batches():
                    self._take(batch, log)
                if reader.end is ScanState.TORN:
                    self.cut.append(path)
            except (Corrupt, Unsupported) as error:
                self.problems.append(error)
                for batch in batches_behind(reader, reader.position):
                    self._take(batch, log)
            if len(self._parts) == before:
                self.log_paths.pop()
            else:
                stack.pop_all()
                self._keep(log, reader)

    def _take(self, batch: RecordBatch, log: int) -> None:
        if self.ledger.ledger_id not in batch.ledger_ids or batch.type is not RecordType.ENTRY:
            return
        found = batch.select(self.ledger)
        if self._digests is not None:
            self._note_damage(self._digests.check_batch(found, str(self.log_paths[log])))
        rows = np.array([found.entry_ids, [log] * len(found), found.offsets, found.sizes], np.int64).T
        is_wanted = (rows[:, 0] >= self.first) & (rows[:, 0] <= (I64_MAX if self.last is None else self.last))
        if is_wanted.any():
            self._parts.append(rows[is_wanted])

    def _note_damage(self, mismatches: Iterable[DigestMismatchAt]) -> None:
        self._damaged.update((each.where, each.offset) for each in mismatches)

    def _reader(self, log: int) -> EntryLogReader:
        reader = self._readers.get(log)
        if reader is None:
            try:
                reader = EntryLogReader.open(self.log_paths[log])
            except NotFound as error:
                raise NotFound(
                    f"{self.log_paths[log]} was deleted while it was read", hint="the bookie is running: try again"
                ) from error
            self._keep(log, reader)
        else:
            self._readers.move_to_end(log)
        return reader

    def _keep(self, log: int, reader: EntryLogReader) -> None:
        self._readers[log] = reader
        if len(self._readers) > _OPEN_FILES_MAX:
            self._readers.popitem(last=False)[1].close()


def _age(path: Path) -> tuple[bool, int, bool, str]:
    """Return a sort key: log id, the file of a compaction before the log that it becomes, other names first."""
    log_id = entry_log.content_id_of(path.name)
    return log_id is not None, log_id or 0, entry_log.log_id_of(path.name) is not None, str(path)
