"""Records of an entry log or journal as columns: the inner loop of every reader of whole files.

`take_entries` walks the records of a window by their size fields and stops at the first record that is not a plain
entry. The caller decides what that record means: the window's end, padding, a ledgers map, or damage. Source:
DefaultEntryLogger.scanEntryLog.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum, StrEnum
from functools import cache
from struct import Struct
from typing import Any, Final, cast

from bkctl.formats.entry import HEADER_SIZE_V1, HEADER_SIZE_V2, LENGTH_FIELD_SIZE, DigestType, digest_of_flags
from bkctl.formats.journal import PADDING_HEADER_SIZE, PADDING_MASK
from bkctl.formats.record import RECORD_SIZE, Record, RecordType, read_record
from bkctl.ids import I64_MAX, U64_MAX, LedgerId

#: Rows in one batch at most; this bounds the memory of readers that turn columns into lists.
BATCH_ROWS_MAX: Final = 16_384

_ROW_V1: Final = Struct(">iQqqq")
_ROW_V2: Final = Struct(">iBQQqqq")
#: Bytes of a record's fields at most, its size field included.
ROW_SIZE_MAX: Final = _ROW_V2.size
#: The version that `_scan` must have: a module built from other sources is not used.
COMPILED_API: Final = 8
try:
    from bkctl.files import _scan as compiled

    if getattr(compiled, "API", None) != COMPILED_API:
        raise ImportError
except ImportError:  # installed without a compiler, or built from other sources
    compiled = None  # type: ignore[assignment]

#: Positions in a row of the fields that every version has; negative: from its end.
_PLACES: Final = {"sizes": 0, "entry_ids": -3, "last_add_confirmed": -2, "lengths": -1}

_new_ledger = LedgerId._make


@cache
def record_start(*, special: bool) -> re.Pattern[bytes]:
    """Return the common start of all entries (with `special`, of all records), to search behind damage.

    A size from 16 bytes to 256 MiB, ids below plausible limits, and for entries LAC and length (group `entry`).
    """
    return re.compile(
        rb"(?!\x00{3}[\x00-\x0f])[\x00-\x0f].{3}(?:[\x00-\x7f].{7}|[\xa0-\xa4].{16})"
        rb"(?:(?P<entry>\x00\x00.{6}(?:\x00\x00.{6}|\xff{8})\x00\x00.{6})"
        + (rb"|\xff{6}[\x80\xc0\xe0\xf0]\x00)" if special else b")"),
        re.DOTALL,
    )


class ScanState(StrEnum):
    """The state of a journal or an entry log; the values are the words of every output.

    The first four are reasons why the records end, as a reader's `end` has it.
    """

    #: The file ends behind a whole record.
    END_OF_FILE = "endOfFile"
    #: Only zeros follow: space that was allocated ahead.
    ZEROS = "zeros"
    #: The last record, or the last group of a journal, is cut: the bookie stopped while it wrote, or still writes.
    TORN = "torn"
    #: The next bytes are not a record, and a crash cannot explain them, or acknowledged records may follow.
    DAMAGED = "damaged"
    #: An entry log that is allocated and still unwritten.
    EMPTY = "empty"
    #: Of an unknown version, or with an unreadable header.
    UNREADABLE = "unreadable"
    #: A journal is missing, although a mark or the neighbouring ids show that it must exist.
    MISSING = "missing"


class ScannedFile(IntEnum):
    """The kind of file that a scan reads, as `_scan` numbers them."""

    ENTRY_LOG = 0
    JOURNAL = 1
    #: A journal whose padding of zeros is skipped.
    JOURNAL_OVER_PADDING = 2
    #: Entries that end before their length field are plain too; that column means nothing for them.
    ENTRY_LOG_WITH_SHORT = 3


class RecordBatch:
    """Records of one file in file order, as columns: lists of one length, built at first use.

    Nearly every batch has plain entries only (`record` is None). Any other record (a ledgers map, padding, an entry too
    short for its header) comes in a batch of its own; its `last_add_confirmed` and `lengths` are None if it has none,
    as in the Record of `EntryLogReader.records`.

    `window` is the part of the file that has these records, `window_offset` its file offset; `begins` are the offsets
    of the size fields in it. `fields` are the fields of all records in a row, as `take_entries` returns them (a
    memoryview of int64 if the compiled loop built it).

    `offsets` are the file offsets of the size fields (an entry's location is 4 more), `sizes` the size fields,
    `format_version` is 1 or 2 for all records. `scope_ids` and `ledger_ids` are unsigned; `ledgers` has both as
    LedgerId.
    """

    __slots__ = ("_columns", "_ledgers", "_width", "begins", "fields", "format_version", "record", "window",
                 "window_offset")  # fmt: skip

    def __init__(
        self, window: bytes, window_offset: int, begins: Sequence[int], fields: Sequence[int], format_version: int,
        record: Record | None = None,
    ) -> None:  # fmt: skip
        self.window, self.window_offset, self.begins, self.fields = window, window_offset, begins, fields
        self._width = 5 if format_version == 1 else 7
        self.record = record
        self._columns: dict[int, list[int]] = {}
        self._ledgers: list[LedgerId] | None = None
        self.format_version = format_version

    @classmethod
    def of_record(cls, record: Record, window: bytes, begin: int) -> RecordBatch:
        """Return a batch of `record` alone; its size field is at byte `begin` of `window`."""
        (scope_id, ledger_id), version = record.ledger, record.format_version
        ids = [ledger_id] if version == 1 else [record.body[0], scope_id, ledger_id]
        fields = [record.record_size, *ids, record.entry_id, record.last_add_confirmed or 0, record.length or 0]
        return cls(window, record.offset - begin, [begin], fields, version, record)

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def type(self) -> RecordType:
        """Return the type of all records."""
        return RecordType.ENTRY if self.record is None else self.record.type

    @property
    def offsets(self) -> list[int]:
        """Return the file offsets of the size fields."""
        if (found := self._columns.get(-1)) is None:
            at = self.window_offset
            found = self._columns[-1] = [at + begin for begin in self.begins]
        return found

    @property
    def sizes(self) -> list[int]:
        """Return the size fields: the bytes of each record behind its size field."""
        return self._field(0)

    @property
    def scope_ids(self) -> list[int]:
        """Return the scope ids, unsigned; all 0 in format version 1."""
        return [0] * len(self) if self.format_version == 1 else self._field(2)

    @property
    def ledger_ids(self) -> list[int]:
        """Return the ledger ids, unsigned; 2^64−1 for a record without a ledger."""
        return self._field(self._width - 4)

    @property
    def ledgers(self) -> list[LedgerId]:
        """Return the ledger of each record; NO_LEDGER for a record without one."""
        if self._ledgers is None:
            ids = self.ledger_ids
            if self.format_version == 1:
                by_id = {ledger_id: _new_ledger((0, ledger_id)) for ledger_id in set(ids)}
                self._ledgers = list(map(by_id.__getitem__, ids))
            else:
                pairs = list(zip(self.scope_ids, ids, strict=True))
                made = {pair: _new_ledger(pair) for pair in set(pairs)}
                self._ledgers = list(map(made.__getitem__, pairs))
        return self._ledgers

    @property
    def entry_ids(self) -> list[int]:
        """Return the entry ids; negative for a record that is not an entry."""
        return self._field(self._width - 3)

    @property
    def last_add_confirmed(self) -> list[int] | list[None]:
        """Return each entry's last add confirmed; None for a record without it."""
        lacks = self.record is not None and self.record.last_add_confirmed is None
        return [None] if lacks else self._field(self._width - 2)

    @property
    def lengths(self) -> list[int] | list[None]:
        """Return the ledger's length after each entry, in payload bytes, as the entry has it; None without it."""
        return [None] if self.record is not None and self.record.length is None else self._field(self._width - 1)

    def numbers(self, name: str) -> Sequence[int]:
        """Return the column `sizes`, `entry_ids`, `last_add_confirmed` or `lengths` of plain entries.

        A memoryview of int64 where that costs less than a list.
        """
        flat = self.fields
        if not isinstance(flat, memoryview):
            return cast("Sequence[int]", getattr(self, name))
        return flat[_PLACES[name] % self._width :: self._width]

    @property
    def digest_types(self) -> list[DigestType | None]:
        """Return the digest type in each record; None for all in format version 1."""
        if self.record is not None:
            return [self.record.digest_type]
        if self.format_version == 1:
            return [None] * len(self)
        window = self.window
        return [digest_of_flags(window[begin + 4]) for begin in self.begins]

    def payload_sizes(self, digest_type: DigestType | None = None) -> list[int | None] | None:
        """Return each record's payload size as Record.payload_size does; None if it is None for all."""
        if self.record is not None:
            return [self.record.payload_size(digest_type)]
        if self.format_version == 1:
            if digest_type is None:
                return None
            overhead = HEADER_SIZE_V1 + digest_type.code_length
            return [size - overhead if size >= overhead else None for size in self.sizes]
        overheads = {
            0xA0: HEADER_SIZE_V2,
            **{0xA0 | digest_type: HEADER_SIZE_V2 + digest_type.code_length for digest_type in DigestType},
        }
        needed = map(overheads.__getitem__, self.fields[1 :: self._width])
        return [size - over if size >= over else None for size, over in zip(self.sizes, needed, strict=True)]

    def records(self) -> Iterator[Record]:
        """Return the records as Record objects."""
        if self.record is not None:
            yield self.record
            return
        window, at = self.window, self.window_offset
        for begin, size in zip(self.begins, self.sizes, strict=True):
            yield read_record(window, begin + 4, size, at + begin)

    def select(
        self, ledger: LedgerId | None = None, scope_id: int | None = None, entry_id: int | None = None
    ) -> RecordBatch:
        """Return the records of this ledger, of this scope and with this entry id; None matches any."""
        scope_id, ledger_id = (scope_id, None) if ledger is None else ledger
        chosen: Iterable[int] = range(len(self))
        for wanted, column in ((ledger_id, "ledger_ids"), (scope_id, "scope_ids"), (entry_id, "entry_ids")):
            if wanted is not None and (wanted or self.format_version == 2 or column != "scope_ids"):
                values = getattr(self, column)
                chosen = [index for index in chosen if values[index] == wanted]
        chosen = list(chosen)
        if len(chosen) == len(self):
            return self
        width, flat = self._width, self.fields
        rows = [value for index in chosen for value in flat[index * width : (index + 1) * width]]
        return self._of([self.begins[index] for index in chosen], rows)

    def bodies(self) -> list[bytes]:
        """Return all records without their size fields."""
        window = self.window
        return [window[at + 4 : at + 4 + size] for at, size in zip(self.begins, self.sizes, strict=True)]

    def sizes_by_ledger(self) -> dict[tuple[int, int], int]:
        """Return (scope id, ledger id) → bytes of its records in the batch, size fields included."""
        sums: defaultdict[Any, int] = defaultdict(int)
        is_plain = self.format_version == 1
        keys = self.ledger_ids if is_plain else zip(self.scope_ids, self.ledger_ids, strict=True)
        for key, size in zip(keys, self.sizes, strict=True):
            sums[key] += size + 4
        return {(0, ledger_id): size for ledger_id, size in sums.items()} if is_plain else sums

    def before(self, end: int) -> RecordBatch:
        """Return the records that begin before file offset `end`."""
        return self.first(bisect_left(self.begins, end - self.window_offset))

    def first(self, count: int) -> RecordBatch:
        """Return the first `count` records."""
        return self._part(0, count)

    def parts(self) -> list[RecordBatch]:
        """Return the records as batches of at most BATCH_ROWS_MAX; none without records."""
        return [self._part(first, first + BATCH_ROWS_MAX) for first in range(0, len(self), BATCH_ROWS_MAX)]

    def _part(self, first: int, last: int) -> RecordBatch:
        if first == 0 and last >= len(self):
            return self
        return self._of(self.begins[first:last], self.fields[first * self._width : last * self._width])

    def _of(self, begins: Sequence[int], fields: Sequence[int]) -> RecordBatch:
        return RecordBatch(self.window, self.window_offset, begins, fields, self.format_version, self.record)

    def _field(self, place: int) -> list[int]:
        values = self._columns.get(place)
        if values is None:
            flat = self.fields[place :: self._width]
            values = flat.tolist() if isinstance(flat, memoryview) else list(flat)
            # Ids are unsigned; scope and ledger of version 2 are the only ones that may be 2^63 or more.
            if self.format_version == 2 and place in (2, 3) and values and min(values) < 0:
                values = [value & U64_MAX for value in values]
            self._columns[place] = values
        return values


def take_entries(
    window: bytes, begin: int, format_version: int, source: ScannedFile = ScannedFile.ENTRY_LOG
) -> tuple[Sequence[int], Sequence[int], int]:
    """Take the plain entries of `format_version` in `window` from byte `begin` on.

    Returns the byte where each begins; their fields, record after record (size, ledger, entry, LAC, length; in version
    2 size, flags, scope, ledger, entry, LAC, length); and the byte of the first record that is not a plain entry: it is
    cut, its size is absurd, its header is cut, or its flags byte or entry id is special. In a journal an entry of zeros
    ends it too, which the caller must examine: maybe only its size reached the disk. Ids from 2^63 may be negative
    here; RecordBatch returns them unsigned.
    """
    if compiled is None:
        return take_entries_plainly(window, begin, format_version, source)
    begins, flat, stop = compiled.take_entries(window, begin, format_version, source)
    return memoryview(begins).cast("q"), memoryview(flat).cast("q"), stop


def take_entries_plainly(
    window: bytes, begin: int, format_version: int, source: ScannedFile = ScannedFile.ENTRY_LOG
) -> tuple[list[int], list[int], int]:
    """Do the work of `take_entries` in Python."""
    begins: list[int] = []
    flat: list[int] = []
    plain, in_log = format_version == 1, source in (ScannedFile.ENTRY_LOG, ScannedFile.ENTRY_LOG_WITH_SHORT)
    layout, size_min = (_ROW_V1, HEADER_SIZE_V1) if plain else (_ROW_V2, HEADER_SIZE_V2)
    if source is ScannedFile.ENTRY_LOG_WITH_SHORT:
        size_min -= LENGTH_FIELD_SIZE
    add, extend, unpack = begins.append, flat.extend, layout.unpack_from
    limit = len(window)
    last = limit - layout.size
    while begin <= last:
        row = unpack(window, begin)
        size = row[0]
        if size < size_min:
            if size != PADDING_MASK or source is not ScannedFile.JOURNAL_OVER_PADDING:
                break
            padded = end_of_padding(window, begin)
            if padded is None:
                break
            begin = padded
            continue
        end = begin + 4 + size
        if end > limit:
            break
        if plain:
            entry_id = row[2]
            if entry_id < 0 or row[1] > I64_MAX or not (in_log or entry_id or any(row[1:])):
                break
        elif row[4] < 0 or not 0xA0 <= row[1] <= 0xA4:
            break
        add(begin)
        extend(row)
        begin = end
    return begins, flat, begin


def end_of_padding(window: bytes, begin: int) -> int | None:
    """Return the end in `window` of the padding at byte `begin`; None unless it is whole and all zeros."""
    (count,) = RECORD_SIZE.unpack_from(window, begin + 4)
    start = begin + PADDING_HEADER_SIZE
    end = start + count
    return end if start <= end <= len(window) and not window[start:end].strip(b"\0") else None
