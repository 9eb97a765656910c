"""`bookkeeper.entrylog`: the records of entry logs, as `bkctl entrylog read` prints them; or sums of each ledger.

With the option `rows` = `ledgers` a row is a ledger's share of one partition: the number of its entries, and their
bytes with size fields, as a bookie counts them. The sum of its rows is what `bkctl entrylog show` prints. Sums cost
little more than reading the files.

Options: `path` (entry logs, directories of bookies, patterns), `mode`, `columns`, `ledger`, `ledgerScopeId`, `types`
(default: all but padding and ledgersMap), `digestType` (of ledgers of scope 0, whose records do not name it: without it
their `size` and `payload` are null), `maxPartitionBytes`. Unfinished files of compactions in directories are skipped:
their entries are in a log, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import Struct
from typing import Final

from bkctl.errors import BkctlError, CorruptRecord
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.scan import ROW_SIZE_MAX, RecordBatch, take_entries
from bkctl.formats.entry import HEADER_SIZE_V1, HEADER_SIZE_V2
from bkctl.formats.entry_log import DIRECT_ALIGNMENT, DIRECT_PADDING_BYTE, HEADER_SIZE, VERSION_SCOPED, content_id_of
from bkctl.formats.record import RECORD_SIZE, RECORD_SIZE_BYTES_MAX, read_record
from bkctl.spark.sources.places import Place, resolve
from bkctl.spark.sources.ranges import Range, RangePlanner
from bkctl.spark.sources.records import RecordReader, RecordSource

#: Bytes that a task reads at once.
_WINDOW_SIZE_BYTES: Final = 4 << 20
#: Average size from which reading single headers costs less than reading whole records.
_HOP_SIZE_BYTES: Final = 64 << 10
#: Records of one batch that are read by their headers.
_HOPS: Final = 1024


class EntryLogRecords(RecordReader):
    """Plans and reads entry logs."""

    id_name = "logId"
    source = "bookkeeper.entrylog"

    def list_places(self) -> list[Place]:
        return resolve(self._paths, lambda directories: directories.entry_logs(), content_id_of)

    def plan_file(self, place: Place, planner: Callable[[int, int], RangePlanner]) -> list[Range]:
        with EntryLogReader.open(place.path) as reader:
            version = 1 if reader.header is None else reader.header.version
            ranges = planner(HEADER_SIZE, version)
            try:
                for batch in reader.batches(special=True):
                    ranges.add(batch)
            except BkctlError as error:
                return ranges.finish(self._damage(error))
            return ranges.finish()

    def read_range(self, part: Range, *, content: bool) -> Iterator[RecordBatch]:
        with EntryLogReader.open(part.place.path) as reader:
            version = None if reader.header is None else reader.header.version
            if version != part.version:
                raise CorruptRecord(f"Header version was {part.version}, now {version}", offset=4, where=reader.name)
            yield from _Scan(reader, part, content=content).batches()


class EntryLogSource(RecordSource):
    """The records of entry logs. See the module."""

    records = EntryLogRecords


class _Scan:
    """One pass over a range of records; without `content`, large bodies are not read."""

    def __init__(self, reader: EntryLogReader, part: Range, *, content: bool) -> None:
        self._reader, self._content = reader, content
        self._at, self._end = part.start, part.end
        self._version = 2 if part.version == VERSION_SCOPED else 1

    def batches(self) -> Iterator[RecordBatch]:
        reader, version = self._reader, self._version
        while self._at < self._end:
            at = self._at
            window = reader.read(at, min(_WINDOW_SIZE_BYTES, self._end - at))
            begins, fields, stop = take_entries(window, 0, version)
            if not begins:
                yield from self._single()
                continue
            self._at = at + stop
            yield RecordBatch(window, at, begins, fields, version)
            if not self._content and stop // len(begins) >= _HOP_SIZE_BYTES:
                yield from self._hop()

    def _single(self) -> Iterator[RecordBatch]:
        """Yield a record that is not a plain entry or exceeds a window, or skip padding of the direct I/O logger."""
        reader, at = self._reader, self._at
        head = reader.read(at, ROW_SIZE_MAX)
        if len(head) < RECORD_SIZE.size:
            raise CorruptRecord("The file ends", offset=at, where=reader.name)
        (size,) = RECORD_SIZE.unpack_from(head)
        if size < 0:
            gap = -at % DIRECT_ALIGNMENT
            if not gap or reader.read(at, gap).strip(bytes((DIRECT_PADDING_BYTE,))):
                raise CorruptRecord(f"Record has length {size}", offset=at, where=reader.name)
            self._at = at + gap
            return
        if not 0 < size <= min(RECORD_SIZE_BYTES_MAX, self._end - at - 4):
            raise CorruptRecord(f"Record has length {size}", offset=at, where=reader.name)
        hops = not self._content and size > _WINDOW_SIZE_BYTES
        window = head if hops else reader.read(at, 4 + size)
        if reader.size() < at + 4 + size if hops else len(window) < 4 + size:
            raise CorruptRecord("The file ends", offset=at, where=reader.name)
        self._at = at + 4 + size
        yield RecordBatch.of_record(read_record(window, 4, size, at, reader.name), window, 0)

    def _hop(self) -> Iterator[RecordBatch]:
        """Yield plain entries by their headers alone, while they are large."""
        layout, size_min = (_ROW_V1, HEADER_SIZE_V1) if self._version == 1 else (_ROW_V2, HEADER_SIZE_V2)
        reader, end = self._reader, min(self._end, self._reader.size())
        place = -3
        while True:
            start = at = self._at
            begins: list[int] = []
            fields: list[int] = []
            while at + layout.size <= end and len(begins) < _HOPS:
                head = reader.read(at, layout.size)
                if len(head) < layout.size:
                    break
                row = layout.unpack(head)
                is_plain = head[4] < 0x80 if self._version == 1 else 0xA0 <= head[4] <= 0xA4
                if row[0] < size_min or at + 4 + row[0] > end or row[place] < 0 or not is_plain:
                    break
                begins.append(at - start)
                fields += row
                at += 4 + row[0]
            if begins:
                self._at = at
                yield RecordBatch(b"", start, begins, fields, self._version)
            if len(begins) < _HOPS or at - start < _HOPS * _HOP_SIZE_BYTES:
                return


_ROW_V1: Final = Struct(">iQqqq")
_ROW_V2: Final = Struct(">iBQQqqq")
