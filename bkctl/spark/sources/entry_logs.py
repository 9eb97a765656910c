"""`bookkeeper.entrylog`: the records of entry logs, as `bkctl entrylog read` prints them; or sums of each ledger.

With the option `rows` = `ledgers` a row is a ledger's share of one partition: the number of its entries, and their
bytes with size fields, as a bookie counts them. The sum of its rows is what `bkctl entrylog show` prints. Sums cost
little more than reading the files.

Options: `path` (entry logs, directories of bookies, patterns), `mode`, `columns`, `ledger`, `ledgerScopeId`, `types`
(default: all but padding and ledgersMap), `digestType` (of ledgers of scope 0, whose records do not name it: without it
their `size` and `payload` are null), `borders` (JSON: offsets of records at which a file is cut into partitions).
Unfinished files of compactions in directories are skipped: their entries are in a log, too.

A partition is a file. A log whose ledgers map names none of the wanted ledgers is not read, so its damage is unseen.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final

from bkctl.errors import CorruptRecord
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.scan import RecordBatch
from bkctl.formats.entry import HEADER_SIZE_V1, HEADER_SIZE_V2, OVERHEAD_SIZE_MAX
from bkctl.formats.entry_log import HEADER_SIZE, content_id_of
from bkctl.formats.record import RECORD_SIZE_BYTES_MAX
from bkctl.spark.sources.places import Place, resolve
from bkctl.spark.sources.pushdown import PathSource
from bkctl.spark.sources.ranges import end_of
from bkctl.spark.sources.records import RecordReader

#: Average size from which reading single headers costs less than reading whole records.
_HOP_SIZE_BYTES: Final = 64 << 10
#: Records of one batch that are read by their headers.
_HOPS: Final = 1024
_OPEN_LOGS_MAX: Final = 64


class EntryLogRecords(RecordReader):
    """Plans and reads entry logs."""

    id_name = "logId"
    source = "bookkeeper.entrylog"

    def list_places(self) -> list[Place]:
        return resolve(self._paths, lambda directories: directories.entry_logs(), content_id_of)

    def read_range(self, path: str, start: int, end: int | None, *, content: bool) -> Iterator[RecordBatch]:
        with EntryLogReader.open(path) as reader:
            if not self._conditions.about_ledgers or self._may_hold_wanted(reader):
                yield from _batches(reader, start, end, content=content)

    def _may_hold_wanted(self, reader: EntryLogReader) -> bool:
        """Return whether a wanted ledger may have records in this log; False only if a sound ledgers map has none."""
        try:
            sizes = reader.ledgers_map()
        except CorruptRecord:
            return True
        return sizes is None or any(map(self._conditions.accepts_ledger, sizes))


class OpenLogs:
    """Readers of entry logs, of which the latest stay open until `close`."""

    def __init__(self) -> None:
        self._readers: dict[str, EntryLogReader] = {}

    def reader(self, path: str) -> EntryLogReader:
        """Return the reader of a log. Raises as `EntryLogReader.open`."""
        reader = self._readers.get(path)
        if reader is None:
            if len(self._readers) >= _OPEN_LOGS_MAX:
                self._readers.pop(next(iter(self._readers))).close()
            reader = self._readers[path] = EntryLogReader.open(path)
        return reader

    def close(self) -> None:
        """Close all of them."""
        for reader in self._readers.values():
            reader.close()


class EntryLogSource(PathSource):
    """The records of entry logs. See the module."""

    reads = EntryLogRecords


def _batches(reader: EntryLogReader, start: int, end: int | None, *, content: bool) -> Iterator[RecordBatch]:
    """Yield the records of a log as `EntryLogReader.batches` does; without `content`, large bodies are not read."""
    at = max(start, HEADER_SIZE)
    while True:
        for batch in reader.batches(at, end, special=True):
            yield batch
            before, at = batch.window_offset + batch.begins[0], end_of(batch)
            if not content and batch.record is None and (at - before) // len(batch) >= _HOP_SIZE_BYTES:
                break
        else:
            return
        for headers in _headers(reader, at, end, batch.format_version):
            yield headers
            at = end_of(headers)


def _headers(reader: EntryLogReader, at: int, end: int | None, version: int) -> Iterator[RecordBatch]:
    """Yield plain entries by their headers alone, while they are large and sound."""
    layout, size_min = (_ROW_V1, HEADER_SIZE_V1) if version == 1 else (_ROW_V2, HEADER_SIZE_V2)
    file_end = reader.size()
    while True:
        start = at
        begins: list[int] = []
        fields: list[int] = []
        while at + layout.size <= file_end and (end is None or at < end) and len(begins) < _HOPS:
            head = reader.read(at, layout.size)
            if len(head) < layout.size:
                break
            row = layout.unpack(head)
            is_plain = head[4] < 0x80 if version == 1 else 0xA0 <= head[4] <= 0xA4
            size, entry_id, length = row[0], row[-3], row[-1]
            is_sound = size_min <= size <= min(RECORD_SIZE_BYTES_MAX, file_end - at - 4) and entry_id >= 0
            if not (is_plain and is_sound) or size - OVERHEAD_SIZE_MAX > max(length, 0):
                break
            begins.append(at - start)
            fields += row
            at += 4 + size
        if begins:
            yield RecordBatch(b"", start, begins, fields, version)
        if len(begins) < _HOPS or at - start < _HOPS * _HOP_SIZE_BYTES:
            return


_ROW_V1: Final = Struct(">iQqqq")
_ROW_V2: Final = Struct(">iBQQqqq")
