"""The filter for the records to show of journals and entry logs. Source: ReadJournalCommand, ReadLogCommand."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.errors import CorruptRecord
from bkctl.formats.entry_log import HEADER_SIZE
from bkctl.formats.record import RecordType
from bkctl.ids import LedgerId

if TYPE_CHECKING:
    from bkctl.files.entry_log import EntryLogReader
    from bkctl.files.journal import JournalReader
    from bkctl.files.scan import RecordBatch

#: Records without a ledger are left out unless asked for by type, as in Apache's tools.
FILLER_TYPES: Final = frozenset((RecordType.PADDING, RecordType.LEDGERS_MAP))


class RecordFilter(NamedTuple):
    """The records to show; None matches any. `types` None: all but padding and ledgers maps.

    `position_first` is the byte at which the first record begins (0: behind the header), `position_last` the last byte
    at which a record may begin. All methods raise CorruptRecord for a first position within the header.
    """

    ledger: LedgerId | None = None
    scope_id: int | None = None
    entry_id: int | None = None
    types: Container[RecordType] | None = None
    position_first: int = 0
    position_last: int | None = None

    def of_journal(self, reader: JournalReader, start: int = 0) -> Iterator[RecordBatch]:
        """Return the matching records of a journal as columns, from byte `start` on."""
        types, last = self.types, self.position_last
        padding = types is not None and RecordType.PADDING in types
        first = max(start, self._first(reader.header_size, reader.name))
        return self._choose(reader.batches(first, None if last is None else last + 1, padding=padding))

    def of_entry_log(self, reader: EntryLogReader) -> Iterator[RecordBatch]:
        """Return the matching records of an entry log as columns."""
        types, last = self.types, self.position_last
        special = types is not None and any(filler in types for filler in FILLER_TYPES)
        end = None if last is None else last + 1
        return self._choose(reader.batches(self._first(HEADER_SIZE, reader.name), end, special=special))

    def _first(self, header_size: int, name: str) -> int:
        if 0 < self.position_first < header_size:
            hint = f"the header goes to byte {header_size}; 0 is the whole file"
            raise CorruptRecord("No record begins in the header", offset=self.position_first, where=name, hint=hint)
        return self.position_first

    def _choose(self, batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
        ledger, scope_id, entry_id, types, _, _ = self
        plain = types is None or RecordType.ENTRY in types
        for batch in batches:
            if plain if batch.record is None else types is None or batch.record.type in types:
                chosen = batch.select(ledger, scope_id, entry_id)
                if len(chosen):
                    yield chosen
