"""Journal files, read offline: `JournalReader` and the last mark. Source: Journal.scanJournal, LastLogMark.

**Where a journal ends, and what is damage.** A bookie writes a group of records as one, pads it to a border (version 5
and later), and syncs it before it acknowledges anything in it. So a crash leaves only the last group incomplete: a
disk writes sectors whole or not at all, and each sector of that group has its bytes, or the zeros that were allocated.
Only what the bookie itself wrote decides: record sizes, borders, padding, sectors. Ids, lengths and payloads are the
clients' and prove nothing. Records form a chain by their sizes, and a chain ends in one of these ways:

- Only zeros or nothing follow: the end. A crash may have cut the last group here.
- A size is wrong, and no size of its group so far is partly in a sector of zeros: damage. No crash writes that.
- A size is wrong, and one of them is: a crash, unless a later group shows that this group was synced: then damage.
- The file ends in a record, or a group ends without padding: a crash, unless a later group contradicts it.

In version 7 a seal ends each group: the file's random tag, which no client knows, and the group's start. So a seal of a
later group, or data behind the group's own seal, is the proof, and no payload passes for it.

Versions 5 and 6 are Apache's and have no tag. There a later group is a chain that begins behind the records that can be
followed, at a border behind padding or a sector of zeros, has a whole group with its padding, and continues to the end
of the data or to an incomplete last group. What a record reaches over is its payload, as for Apache's bookie. So what a
kill leaves is always replayed; only after a power failure that lost a sector before others can a payload pass for later
groups.

Versions 1 to 4 have no borders: the first bad size is damage, and a record that the file's end cuts is the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from struct import Struct
from sys import maxsize
from typing import Final, NamedTuple

from bkctl.disk import SECTOR_SIZE_BYTES
from bkctl.errors import Corrupt, CorruptRecord, Unsupported
from bkctl.files.scan import ROW_SIZE_MAX, RecordBatch, ScannedFile, ScanState, record_start, take_entries
from bkctl.files.windows import FileReader, WindowCursor
from bkctl.formats.entry import OVERHEAD_SIZE_MAX
from bkctl.formats.journal import (
    ALIGNMENT_DEFAULT,
    HEADER,
    PADDING_HEADER_SIZE,
    PADDING_MASK,
    SEAL,
    TAG_SIZE,
    VERSION_PADDING,
    VERSION_SCOPED,
    LogMark,
    file_name,
    header_size,
    journal_id_of,
    last_mark_name,
    read_header,
    read_tag,
)
from bkctl.formats.record import (
    BODY_SIZE_MIN,
    NO_ENTRY,
    NO_LEDGER,
    RECORD_SIZE,
    RECORD_SIZE_BYTES_MAX,
    Record,
    RecordType,
    read_record,
)

_PADDING_START: Final = RECORD_SIZE.pack(PADDING_MASK)
#: Larger gaps between ids are normal: bookies up to 4.1 named each journal by its time.
_GAP_MAX: Final = 1000
#: Reads of the end of a journal while a bookie writes there.
_STILL_ATTEMPTS_MAX: Final = 20
_READ_ON_HINT: Final = "the records before it are undamaged, 'bkctl journal verify' shows what is behind it"
_GAP_HINT: Final = (
    f"{_READ_ON_HINT}. A bookie with journalSyncData=false, and Apache's with several groups under way, can leave such "
    "a gap after a power failure"
)

_PADDING_HEADER: Final = Struct(">ii")


class Behind(NamedTuple):
    """The bytes behind the end of a journal's records.

    `size_bytes` up to the last nonzero byte; `record_count` plausible records in them, `entry_count` of them entries,
    the first at byte `resumes_at`. A payload that looks like records counts too.
    """

    size_bytes: int = 0
    record_count: int = 0
    entry_count: int = 0
    resumes_at: int | None = None


class JournalReader(FileReader):
    """One journal file of any version, 1 to 7.

    `version` is the file's; `journal_id` comes from its name (None for another name). `position` is the offset after
    the last record that was read, as a last mark has it. Once `records` or `batches` ended, `end` has the reason.
    Raises NotFound, UsageError (a directory), Unsupported (an unknown version).
    """

    def _begin(self) -> None:
        header = self.read(0, HEADER.size + TAG_SIZE)
        self.version = read_header(header[: HEADER.size], self.name)
        self.journal_id = journal_id_of(self.path.name)
        self._tag = read_tag(header, self.version)
        self.header_size = header_size(self.version)
        self.position = self.header_size
        self.end = ScanState.DAMAGED
        #: Offsets of the scan's windows; each is between two records.
        self._window_starts: list[int] = []
        #: Start of the group that `_group_start` found last.
        self._known_group = self.header_size
        #: Groups before the first byte were synced; those from the second on may be incomplete.
        self._synced_before, self._unsynced_from = 0, maxsize

    @property
    def is_sealed(self) -> bool:
        """Return True if each of the file's groups ends with a seal."""
        return bool(self._tag)

    @property
    def is_blank(self) -> bool:
        """Return True if the file has neither a header nor a record: it is empty, or begins with zeros."""
        return not any(self.read(0, RECORD_SIZE.size))

    def mark_problem(self, offset: int) -> str | None:
        """Return why the file lost bytes that were on disk when a last mark was set to byte `offset`; None if not."""
        if offset > self.size():
            return f"the last mark points at byte {offset}, behind its end at byte {self.size()}"
        # Java's replay leaves the mark of a file that a crash left without a header behind the first size.
        if offset >= HEADER.size and self.is_blank:
            return f"the last mark points at byte {offset}, but it has no header"
        return None

    def records(self, start: int = 0, *, padding: bool = False) -> Iterator[Record]:
        """Yield records in file order from byte `start` (0: just after the header), padding only if asked for.

        The scan ends without an error at zeros up to the end of the file, and at an incomplete last group of records:
        the bookie stopped writing there (see `_to_incomplete_group`). Raises CorruptRecord at anything else that is not
        a record, Unsupported at an entry of an unknown format version.
        """
        for batch in self.batches(start, padding=padding):
            for record in batch.records():
                if batch.record is None:
                    self.position = record.offset + 4 + record.record_size
                yield record

    def batches(self, start: int = 0, end: int | None = None, *, padding: bool = False) -> Iterator[RecordBatch]:
        """Yield the records of `records` as columns, several times as fast; raise the same errors.

        With `end`, only records that begin before that byte. All records before damage are in the batches before the
        error. Padding, special records and the few entries that need a closer look come in batches of their own.
        """
        return self._to_incomplete_group(self._batches(start, end, padding=padding))

    def _batches(self, start: int, end: int | None, *, padding: bool) -> Iterator[RecordBatch]:
        skips_padding = self.version >= VERSION_PADDING and not padding
        source = ScannedFile.JOURNAL_OVER_PADDING if skips_padding else ScannedFile.JOURNAL
        has_scoped = self.version >= VERSION_SCOPED
        self.position, self.end = max(start, self.header_size), ScanState.DAMAGED
        self._window_starts.clear()
        self._known_group = self.position
        cursor = WindowCursor(self._still_window, self.position)
        if self.size() < (self.header_size or HEADER.size):
            # Too short for a record; maybe the first bytes of a header.
            self.end = ScanState.TORN if self.size() else ScanState.END_OF_FILE
            return
        while True:
            window, begin = cursor.window, cursor.begin
            format_version = 2 if has_scoped and window[begin + 4 : begin + 5] >= b"\x80" else 1
            begins, fields, cursor.begin = take_entries(window, begin, format_version, source)
            if begins:
                batch = RecordBatch(window, cursor.at, begins, fields, format_version)
                if end is not None and cursor.at + begins[-1] >= end:
                    yield from batch.before(end).parts()
                    return
                self.position = cursor.at + begins[-1] + 4 + batch.numbers("sizes")[-1]
                yield from batch.parts()
            self.position = cursor.offset
            if cursor.begin + 4 > cursor.limit:
                if cursor.begin == 0:
                    self.end = ScanState.TORN if cursor.limit else ScanState.END_OF_FILE
                    return
                cursor.reload()
                continue
            stop = self._end_of_single(cursor)
            if stop is None or (stop and end is not None and cursor.offset >= end):
                return
            if not stop:
                continue
            window, begin = cursor.window, cursor.begin
            (size,) = RECORD_SIZE.unpack_from(window, begin)
            if size != PADDING_MASK:
                record = self._record(window, begin, size, cursor.offset)
                if record is None:
                    return
                self.position += 4 + size
                yield RecordBatch.of_record(record, window, begin)
            elif padding:
                yield RecordBatch.of_record(self._padding(window, begin, cursor.offset), window, begin)
            cursor.begin = stop
            if stop > cursor.limit:
                cursor.reload()

    def _to_incomplete_group(self, batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
        """Yield `batches`; end without an error at an incomplete last group. Raises CorruptRecord for damage."""
        try:
            yield from batches
        except (CorruptRecord, Unsupported) as error:
            group = self._group_start(self.position)
            if self.version < VERSION_PADDING or not self._has_lost_field(group, self.position):
                raise
            if self._find_later_group(group, self.position) is None:
                self.end = ScanState.TORN
                return
            error.hint = _GAP_HINT
            raise
        if self.end is not ScanState.DAMAGED and self._tag:
            self._check_last_group()

    def _check_last_group(self) -> None:
        """Raise CorruptRecord if a later group contradicts the last one: then a size in that one is wrong."""
        group, stop = self._group_start(self.position), self.position
        if group == stop and self.end is not ScanState.TORN:
            return
        border = self._find_sealed_group(group)
        if border is None:
            return
        at = max((offset for offset, end, _ in self._walk(group, stop) if offset < border < end), default=stop)
        self.end, self.position = ScanState.DAMAGED, at
        (size,) = RECORD_SIZE.unpack(self.read(at, RECORD_SIZE.size))
        raise CorruptRecord(
            f"Record has length {size}, but another group of records begins in it, at byte {border}",
            offset=at, where=self.name, hint=_READ_ON_HINT,
        )  # fmt: skip

    def _step(self, at: int) -> tuple[int, bool] | None:
        """Return (end, is padding) of the record or padding at byte `at`; None if the file has none of its size."""
        head = self.read(at, PADDING_HEADER_SIZE).ljust(PADDING_HEADER_SIZE, b"\0")
        size, count = _PADDING_HEADER.unpack(head)
        is_padding = size == PADDING_MASK
        end: int = at + (PADDING_HEADER_SIZE + max(0, count) if is_padding else RECORD_SIZE.size + size)
        is_possible = is_padding or BODY_SIZE_MIN <= size <= RECORD_SIZE_BYTES_MAX
        return (end, is_padding) if is_possible and end <= self.size() else None

    def _walk(self, at: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """Yield (offset, end, is the end of a group) of each record and padding from byte `at` up to `stop`."""
        while at < stop and (step := self._step(at)) is not None:
            end, is_padding = step
            yield at, end, is_padding and end % SECTOR_SIZE_BYTES == 0
            at = end

    def _group_start(self, at: int) -> int:
        """Return where the group of the record at byte `at` begins: behind the last padding before it."""
        stop = at
        for window_start in sorted({*self._window_starts, self._known_group}, reverse=True):
            if window_start > stop:
                continue
            found = window_start
            for _, end, is_end in self._walk(window_start, stop):
                if is_end:
                    found = end
            if found != window_start or found == self._known_group:
                self._known_group = found
                return found
            stop = window_start
        return stop

    def is_in_last_group(self, at: int) -> bool:
        """Return True if the record at byte `at` may be in the last group, which a crash can leave incomplete.

        Always True before version 5, where groups cannot be told apart.
        """
        if self.version < VERSION_PADDING or at >= self._unsynced_from:
            return True
        if at >= self._synced_before:
            group = stop = self._group_start(at)
            for _, end, is_end in self._walk(at, self.size()):
                stop = end
                if is_end:
                    is_last = self.next_data(stop) is None
                    break
            else:
                is_last = self._find_later_group(group, stop) is None
            if is_last:
                self._unsynced_from = group
            else:
                self._synced_before = stop
            return is_last
        return False

    def may_be_torn(self, at: int) -> bool:
        """Return True if a crash may have cut the record at byte `at`: it lacks sectors and is in the last group."""
        step = self._step(at)
        return step is not None and self.has_lost_sector(at, step[0]) and self.is_in_last_group(at)

    def _has_lost_field(self, start: int, at: int) -> bool:
        """Return True if any size field from byte `start` to byte `at` is partly in a sector of zeros."""
        return self._is_lost(at) or any(self._is_lost(offset) for offset, _, _ in self._walk(start, at))

    def _is_lost(self, at: int) -> bool:
        """Return True if the size field at byte `at` is partly in a sector of zeros, or behind the file's end."""
        is_padding = self.read(at, RECORD_SIZE.size) == _PADDING_START
        end = at + (PADDING_HEADER_SIZE if is_padding else RECORD_SIZE.size)
        return end > self.size() or self.has_lost_sector(at, end)

    def has_lost_sector(self, start: int, stop: int) -> bool:
        """Return True if any sector with bytes from `start` to `stop` is all zeros."""
        sectors = range(start - start % SECTOR_SIZE_BYTES, stop, SECTOR_SIZE_BYTES)
        return any(not any(self.read(sector, SECTOR_SIZE_BYTES)) for sector in sectors)

    def _find_later_group(self, group: int, stop: int) -> int | None:
        """Return a border behind which another group than that at byte `group` was written; None if nothing proves it.

        The records of that group end, or cannot be followed, at byte `stop`.
        """
        if self._tag:
            return self._find_sealed_group(group)
        # (position, behind a whole group, first border), lowest first: the chains from all borders at once. Those that
        # meet are joined, so no byte is a record's start twice.
        data_end = self._data_end(stop)
        borders = self._possible_starts(stop, data_end)
        border = next(borders, None)
        chains: list[tuple[int, bool, int]] = []
        while border is not None or chains:
            if border is not None and (not chains or border < chains[0][0]):
                heappush(chains, (border, True, border))
            if chains[0][0] == border:
                border = next(borders, None)
            at, is_first, first = heappop(chains)
            while chains and chains[0][0] == at:
                heappop(chains)
            step = self._step(at) if at < data_end else None
            if step is None:
                # Only the end of the data, or an incomplete last group, may follow the whole groups.
                (size,) = RECORD_SIZE.unpack(self.read(at, RECORD_SIZE.size).ljust(RECORD_SIZE.size, b"\0"))
                is_cut = BODY_SIZE_MIN <= size <= RECORD_SIZE_BYTES_MAX
                if not is_first and (at >= data_end or self._is_lost(at) or is_cut):
                    return first
                continue
            end, is_padding = step
            if is_padding:
                data = None if end % SECTOR_SIZE_BYTES else self.next_data(at + PADDING_HEADER_SIZE)
                if end % SECTOR_SIZE_BYTES or (data is not None and data < end):
                    continue
                is_first = False
            heappush(chains, (end, is_first, first))
        return None

    def _find_sealed_group(self, group: int) -> int | None:
        """Return the start of a group later than that at byte `group`, or the end of that one if data follows it."""
        at = group
        while len(window := self.window(at)) >= TAG_SIZE:
            found = -1
            while (found := window.find(self._tag, found + 1)) >= 0:
                sealed = at + found - PADDING_HEADER_SIZE
                end = sealed + SEAL.size
                if end % SECTOR_SIZE_BYTES or end > self.size():
                    continue
                start = SEAL.unpack_from(self.read(sealed, SEAL.size)).start
                if group < start < end:
                    return start
                if start == group and self.next_data(end) is not None:
                    return end
            at += len(window) - TAG_SIZE + 1
        return None

    def _possible_starts(self, start: int, stop: int) -> Iterator[int]:
        """Yield the sector borders from byte `start` up to `stop` where a record begins, and a group may end before."""
        at = start + -start % SECTOR_SIZE_BYTES
        while at < stop and (data := self.next_data(at)) is not None:
            at = max(at, data - data % SECTOR_SIZE_BYTES)
            window = self.window(at)
            for begin in range(0, len(window) - RECORD_SIZE.size, SECTOR_SIZE_BYTES):
                (size,) = RECORD_SIZE.unpack_from(window, begin)
                if BODY_SIZE_MIN <= size <= RECORD_SIZE_BYTES_MAX and self._may_end_group(at + begin):
                    yield at + begin
            at += len(window) + -len(window) % SECTOR_SIZE_BYTES

    def _may_end_group(self, border: int) -> bool:
        """Return True if padding ends at `border`, or a sector of zeros, in which padding may have been lost.

        The mask before the count may be lost or damaged, unless the count is 0.
        """
        tail = self.read(border - 2 * SECTOR_SIZE_BYTES, 2 * SECTOR_SIZE_BYTES)
        zeros = len(tail) - len(tail.rstrip(b"\0"))
        # The last bytes of the count may be zeros, too.
        return (
            zeros >= SECTOR_SIZE_BYTES
            or tail.endswith(_PADDING_START + bytes(RECORD_SIZE.size))
            or any(tail.endswith(RECORD_SIZE.pack(each) + bytes(each)) for each in range(max(1, zeros - 3), zeros + 1))
        )

    def _data_end(self, at: int) -> int:
        """Return the end of the last data behind byte `at`: only zeros follow."""
        end = at
        while (data := self.next_data(at)) is not None:
            window = self.window(data)
            end, at = data + len(window.rstrip(b"\0")), data + len(window)
        return end

    def _padding(self, window: bytes, begin: int, offset: int) -> Record:
        (count,) = RECORD_SIZE.unpack_from(window, begin + 4)
        self.position = offset + PADDING_HEADER_SIZE + count
        return Record(offset, count, RecordType.PADDING, NO_LEDGER, NO_ENTRY, None, None, 1, None, b"")

    def _record(self, window: bytes, begin: int, size: int, offset: int) -> Record | None:
        """Return the record at `begin`; None at the journal's end, where only a size reached the disk."""
        record = read_record(window, begin + 4, size, offset, self.name)
        if record.format_version == 2 and self.version < VERSION_SCOPED:
            raise CorruptRecord(f"Scoped record in a journal of version {self.version}", offset=offset, where=self.name)
        if record.last_add_confirmed == 0 and not any(record.body) and self.next_data(offset + 4) is None:
            self.end = ScanState.TORN
            return None
        return record

    def _end_of_single(self, cursor: WindowCursor) -> int | None:
        """Return where the record or padding at the cursor ends in the window.

        Returns 0 after moving the cursor, None at the end of the records (`end` has the reason). Raises CorruptRecord.
        """
        (size,) = RECORD_SIZE.unpack_from(cursor.window, cursor.begin)
        if size > 0:
            stop: int = cursor.begin + 4 + size
            if stop <= cursor.limit and (cursor.begin == 0 or cursor.begin + ROW_SIZE_MAX <= cursor.limit):
                return stop
            # The record crosses the end of the window, or is too near to it for `take_entries`.
            if size <= min(RECORD_SIZE_BYTES_MAX, self.size() - cursor.offset - 4):
                cursor.reload(4 + size)
                if cursor.limit >= 4 + size:
                    return 0
            if size <= RECORD_SIZE_BYTES_MAX:
                self.end = ScanState.TORN
                return None
        if size == 0:
            if self._is_end(cursor.offset):
                self.end = ScanState.ZEROS
                return None
            cursor.reload()
            return 0
        if size == PADDING_MASK and self.version >= VERSION_PADDING:
            return self._end_of_padding(cursor)
        raise CorruptRecord(f"Record has length {size}", offset=cursor.offset, where=self.name, hint=_READ_ON_HINT)

    def _end_of_padding(self, cursor: WindowCursor) -> int | None:
        if cursor.begin + PADDING_HEADER_SIZE > cursor.limit:
            cursor.reload()
        if cursor.limit >= PADDING_HEADER_SIZE:
            count = self._padding_count(cursor.window, cursor.begin, cursor.offset)
            stop = cursor.begin + PADDING_HEADER_SIZE + count
            if stop <= cursor.limit or cursor.at + stop <= self.size():
                return stop
        self.end = ScanState.TORN
        return None

    def _still_window(self, at: int, needed: int = 0) -> bytes:
        """Return a window that no bookie writes to now: half of a record would pass for a whole one."""
        self._window_starts.append(at)
        window = self.window(at, needed)
        for _ in range(_STILL_ATTEMPTS_MAX):
            if window and window[-1]:
                break
            reread = self.window(at, needed)
            if reread == window:
                break
            window = reread
        return window

    def _padding_count(self, window: bytes, begin: int, offset: int) -> int:
        """Return the size of the padding at file `offset`. Raises CorruptRecord if it may cover later groups."""
        count: int = RECORD_SIZE.unpack_from(window, begin + 4)[0]
        end = offset + PADDING_HEADER_SIZE + count
        is_padding = 0 <= count < SECTOR_SIZE_BYTES and end % SECTOR_SIZE_BYTES == 0
        if not is_padding and 0 <= count <= RECORD_SIZE_BYTES_MAX:
            data = self.next_data(offset + PADDING_HEADER_SIZE)
            is_padding = data is None or data >= end
        if not is_padding:
            raise CorruptRecord(f"Padding has length {count}", offset=offset, where=self.name, hint=_READ_ON_HINT)
        return count

    def look_behind(self, start: int) -> Behind:
        """Return the bytes and plausible records from byte `start` on, where the records ended.

        Reads the rest of the file about once, and skips bytes that the disk cannot read.
        """
        record_count = entry_count = 0
        data_end, resumes_at = start, None
        at, begin, window = start, 0, b""
        while True:
            if begin + ROW_SIZE_MAX > len(window):
                at, begin = at + begin, 0
                at, window = self.next_window(at)
                filled = len(window.rstrip(b"\0"))
                data_end = max(data_end, at + filled if filled else 0)
                if window and not filled and at + len(window) < self.size():
                    begin = len(window)
                    continue
            match = record_start(special=True).search(window, begin)
            if match is None:
                if not window or at + len(window) >= self.size():
                    return Behind(data_end - start, record_count, entry_count, resumes_at)
                begin = max(begin + 1, len(window) - ROW_SIZE_MAX + 1)
                continue
            begin = match.start()
            end, records, entries = self._chain(at + begin)
            if records == 0:
                begin += 1
                continue
            if resumes_at is None:
                resumes_at = at + begin
            record_count += records
            entry_count += entries
            data_end = max(data_end, end)
            begin = end - at

    def _chain(self, at: int) -> tuple[int, int, int]:
        """Follow plausible records from byte `at`; return (end, number of records, number of entries).

        A single record counts if padding (before version 5: zeros) or the end of the file follows it.
        """
        size_bytes = self.size()
        records = entries = 0
        ended = False
        while True:
            try:
                head = self.read(at, ROW_SIZE_MAX)
            except Corrupt:  # The disk failed.
                break
            size = RECORD_SIZE.unpack_from(head)[0] if len(head) >= 4 else 0
            if size == PADDING_MASK and len(head) >= PADDING_HEADER_SIZE:
                (count,) = RECORD_SIZE.unpack_from(head, 4)
                if not 0 <= count <= size_bytes - at - PADDING_HEADER_SIZE:
                    break
                ended = True
                at += PADDING_HEADER_SIZE + count
                continue
            match = record_start(special=True).match(head)
            if match is None or at + 4 + size > size_bytes:
                if not ended:
                    rest = self.read(at, ALIGNMENT_DEFAULT)
                    ended = not rest or (self.version < VERSION_PADDING and not any(rest))
                break
            if match["entry"] is not None:
                length = int.from_bytes(match["entry"][-8:], "big")
                if size - OVERHEAD_SIZE_MAX > length:
                    break
                entries += 1
            records += 1
            at += 4 + size
        return (at, records, entries) if records > 1 or ended else (at, 0, 0)

    def _is_end(self, at: int) -> bool:
        """Return True if only zeros follow the size 0 at byte `at`; False if a bookie has since written there.

        Raises CorruptRecord for data behind the zeros.
        """
        data = self.next_data(at)
        if data is None:
            return True
        if any(self.read(at, RECORD_SIZE.size)):
            return False
        raise CorruptRecord(
            f"Zeros, and then data again at byte {data}: a hole", offset=at, where=self.name, hint=_READ_ON_HINT
        )


def missing_journals(journal_ids: Iterable[int], marked_id: int) -> Iterator[tuple[int, str]]:
    """Yield the first id of each gap in ascending `journal_ids` from the marked one on, and its description.

    Ids count up one by one, and a bookie deletes the oldest journals first, up to the mark.
    """
    for before, after in pairwise(journal_ids):
        if before >= marked_id and 1 < after - before <= _GAP_MAX:
            first, last = file_name(before + 1), file_name(after - 1)
            missing = f"{first} is" if first == last else f"{first} to {last} are"
            yield before + 1, f"{missing} missing between {file_name(before)} and {file_name(after)}"


def read_last_mark(dirs: Iterable[Path | str], journal_index: int = 0, journal_count: int = 1) -> LogMark:
    """Return the last mark of one of a bookie's journal directories: the highest of its ledger directories.

    Ignores missing files and files of another size, as Apache's bookie does. Without any mark it is (0, 0): a replay
    reads the whole journal. Source: Journal.LastLogMark.readLog.
    """
    highest = LogMark(0, 0)
    for name in dirs:
        directory = Path(name)
        current = directory / "current"
        path = (current if current.is_dir() else directory) / last_mark_name(journal_index, journal_count)
        try:
            mark = LogMark.parse(path.read_bytes(), str(path))
        except (OSError, CorruptRecord):
            continue
        highest = max(highest, mark)
    return highest
