"""Ledger index files of Interleaved and SortedLedgerStorage, read offline. Source: FileInfo, LedgerEntryPage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Final

from bkctl.errors import BkctlError
from bkctl.formats.index import HEADER_SIZE, SLOT_SIZE, ledger_of_index_path, read_header, slot_offset
from bkctl.storage.windows import WINDOW_SIZE_BYTES, FileReader

_SLOTS_PER_READ: Final = 1024
_SLOT: Final = Struct(">q")


class LedgerIndexReader(FileReader):
    """One ledger's index file: `header` (master key, fenced, explicit LAC packet) and where its entries are.

    `ledger` is what the file's place below `current` says; None elsewhere.
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        try:
            self.header = read_header(self.read(0, HEADER_SIZE), self.name)
        except BkctlError:
            self.close()
            raise
        self.ledger = ledger_of_index_path(self.path.absolute())

    @classmethod
    def open(cls, path: Path | str) -> LedgerIndexReader:
        """Open an index file.

        Raises NotFound, UsageError (a directory), CorruptRecord and TruncatedRecord (the header), Unsupported.
        """
        return cls(path)

    @property
    def slot_count(self) -> int:
        """Entries that the file has a slot for; a part of a slot at the end does not count."""
        return max(0, self.size() - HEADER_SIZE) // SLOT_SIZE

    def locations(
        self, first: int = 0, last: int | None = None, *, skip_absent: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Yield (entry id, location) in order for the entries `first` to `last` (None: to the file's end).

        A location is the log id and the offset of the entry (`entry_log.unpack_location`); 0: the entry is not here,
        and is left out with `skip_absent`.
        """
        end = self.slot_count if last is None else min(self.slot_count, last + 1)
        entry_id = max(first, 0)
        while entry_id < end:
            at = slot_offset(entry_id)
            if skip_absent:
                data = self.skip_hole(at)
                if data is None:
                    return
                entry_id = max(entry_id, (data - HEADER_SIZE) // SLOT_SIZE)
                at = slot_offset(entry_id)
            window = self.window(at)
            count = min(len(window) // SLOT_SIZE, end - entry_id)
            if count == 0:
                return
            for base in range(0, count, _SLOTS_PER_READ):
                slots = min(_SLOTS_PER_READ, count - base)
                begin = base * SLOT_SIZE
                page = window[begin : begin + slots * SLOT_SIZE]
                if skip_absent and not page.strip(b"\0"):
                    continue
                for number, (location,) in enumerate(_SLOT.iter_unpack(page), entry_id + base):
                    if location or not skip_absent:
                        yield number, location
            entry_id += count

    def location_of(self, entry_id: int) -> int:
        """The location of an entry; 0 where it is not here."""
        if not 0 <= entry_id < self.slot_count:
            return 0
        data = self.read(slot_offset(entry_id), SLOT_SIZE)
        return int(_SLOT.unpack(data)[0]) if len(data) == SLOT_SIZE else 0

    @property
    def last_entry_id(self) -> int:
        """The highest entry that is here; -1 where there is none. Source: LedgerEntryPage.getLastEntry."""
        end = self.slot_count
        while end > 0:
            start = max(0, end - WINDOW_SIZE_BYTES // SLOT_SIZE)
            filled = self.read(slot_offset(start), (end - start) * SLOT_SIZE).rstrip(b"\0")
            if filled:
                return start + (len(filled) - 1) // SLOT_SIZE
            end = start
        return -1
