"""Journal files, read offline: `JournalReader` and the last mark. Source: Journal.scanJournal, LastLogMark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from bkctl.disk import SECTOR_SIZE_BYTES
from bkctl.errors import BkctlError, Corrupt, CorruptRecord, Unsupported
from bkctl.files.scan import ROW_SIZE_MAX, RecordBatch, ScannedFile, ScanState, record_start, take_entries
from bkctl.files.windows import WINDOW_SIZE_BYTES, FileReader, WindowCursor
from bkctl.formats.entry import OVERHEAD_SIZE_MAX
from bkctl.formats.journal import (
    ALIGNMENT_DEFAULT,
    HEADER,
    PADDING_HEADER_SIZE,
    PADDING_MASK,
    VERSION_PADDING,
    VERSION_SCOPED,
    LogMark,
    header_size,
    journal_id_of,
    last_mark_name,
    read_header,
)
from bkctl.formats.record import (
    NO_ENTRY,
    NO_LEDGER,
    RECORD_SIZE,
    RECORD_SIZE_BYTES_MAX,
    Record,
    RecordType,
    contradicts_size,
    read_record,
)

#: Bytes that are examined before a sector border: more than the padding at the default alignment.
_TAIL_SIZE: Final = 2 * SECTOR_SIZE_BYTES
_PADDING_START: Final = RECORD_SIZE.pack(PADDING_MASK)
#: The largest padding of a group: alignments go up to 1 MiB.
_PADDING_SIZE_BYTES_MAX: Final = (1 << 20) + PADDING_HEADER_SIZE
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

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        try:
            self.version = read_header(self.read(0, HEADER.size), self.name)
        except BkctlError:
            self.close()
            raise
        self.journal_id = journal_id_of(self.path.name)
        self.header_size = header_size(self.version)
        self.position = self.header_size
        self.end = ScanState.DAMAGED
        #: Offsets of the scan's windows; each is between two records.
        self._window_starts: list[int] = []
        #: Start of the group that `_group_start` found last.
        self._known_group = self.header_size

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
        """Yield `batches`; end without an error at an incomplete last group.

        Raises CorruptRecord if the last records reach over later groups: one of their sizes is wrong.
        """
        try:
            yield from batches
            if self.end is not ScanState.DAMAGED and self.version >= VERSION_PADDING:
                self._check_last_group()
        except (CorruptRecord, Unsupported) as error:
            group = self._group_start(self.position)
            if self.version < VERSION_PADDING or not self._has_lost_field(group, self.position):
                raise
            if self.find_later_group(group) is None:
                self.end = ScanState.TORN
                return
            error.hint = _GAP_HINT
            raise

    # A group of records is written as one and synced before the next group is written, so only the last group of a
    # journal can be incomplete. Groups begin at sector borders (version 5 and later), and a disk writes sectors whole
    # or not at all: an incomplete group has the right bytes in some sectors and zeros in the others. Its chain of
    # records therefore breaks only at a size field that is partly in a sector of zeros, or behind the file's end.
    # A break elsewhere is damage, and so is a break before a later group. Padding that ends a group, or records that
    # begin where zeros end, show a later group.

    def _check_last_group(self) -> None:
        """Raise CorruptRecord if the last group has no padding at its end, and another group begins in it."""
        start = max(0, self.position - _TAIL_SIZE)
        tail = self.read(start, self.position - start)
        at = tail.rfind(_PADDING_START)
        # A payload may end like the start of padding.
        is_whole = 0 <= at <= len(tail) - PADDING_HEADER_SIZE
        if self.position <= self.header_size or (
            is_whole and _PADDING_HEADER.unpack_from(tail, at)[1] == len(tail) - at - PADDING_HEADER_SIZE
        ):
            return
        group = self._group_start(self.position)
        border = self.find_later_group(group) if group < self.position else None
        if border is not None:
            self.end, self.position = ScanState.DAMAGED, group
            raise CorruptRecord(
                f"Records that begin here overlap others, which begin at byte {border}",
                offset=group, where=self.name, hint=_READ_ON_HINT,
            )  # fmt: skip

    def _fields(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (offset, size, bytes of the size fields) of each record and padding from `start` to `stop`."""
        at = start
        while at < stop:
            head = self.read(at, PADDING_HEADER_SIZE).ljust(PADDING_HEADER_SIZE, b"\0")
            size, count = _PADDING_HEADER.unpack(head)
            is_padding = size == PADDING_MASK
            yield at, size, PADDING_HEADER_SIZE if is_padding else RECORD_SIZE.size
            at += max(1, PADDING_HEADER_SIZE + count if is_padding else RECORD_SIZE.size + size)

    def _group_start(self, at: int) -> int:
        """Return where the group of the record at byte `at` begins: behind the last padding before it."""
        stop = at
        for window_start in sorted({*self._window_starts, self._known_group}, reverse=True):
            if window_start > stop:
                continue
            found, ended = window_start, False
            for offset, size, _ in self._fields(window_start, stop):
                if ended:
                    found = offset
                ended = size == PADDING_MASK
            if ended:
                found = stop
            if found != window_start or found == self._known_group:
                self._known_group = found
                return found
            stop = window_start
        return stop

    def is_in_last_group(self, at: int) -> bool:
        """Return True if the record at byte `at` may be in the last group, which a crash can leave incomplete.

        Always True before version 5, where groups cannot be told apart.
        """
        return self.version < VERSION_PADDING or self.find_later_group(self._group_start(at)) is None

    def _has_lost_field(self, start: int, at: int) -> bool:
        """Return True if any size field from byte `start` to byte `at` is partly in a sector of zeros."""
        for offset, _, size in self._fields(start, at + 1):
            for sector in range(offset - offset % SECTOR_SIZE_BYTES, offset + size, SECTOR_SIZE_BYTES):
                data = self.read(sector, SECTOR_SIZE_BYTES)
                if not any(data) or sector + len(data) < min(offset + size, sector + SECTOR_SIZE_BYTES):
                    return True
        return False

    def find_later_group(self, start: int) -> int | None:
        """Return where a group begins behind the one at byte `start`; None if none shows.

        A group begins behind padding of zeros that ends at a sector border, and may begin behind a sector of zeros.
        Version 5 and later. Reads the rest of the file once. A payload can look like the end of a group.
        """
        at = start
        while (data := self.next_data(at)) is not None:
            at = max(start, data - data % SECTOR_SIZE_BYTES)
            window = self.window(at)
            found = self._padded_border(window, at)
            if found is None:
                found = self._records_behind_zeros(window, at, start)
            if found is not None:
                return found
            if len(window) < WINDOW_SIZE_BYTES:
                return None
            # The last sector comes again: a padding record, or the zeros before a group, may end in the next window.
            at += len(window) - SECTOR_SIZE_BYTES
            at -= at % SECTOR_SIZE_BYTES
        return None

    def _padded_border(self, window: bytes, at: int) -> int | None:
        """Return the first sector border behind padding in `window` that data follows; None without one."""
        begin = -1
        while (begin := window.find(_PADDING_START, begin + 1)) >= 0:
            head = window[begin : begin + PADDING_HEADER_SIZE]
            if len(head) < PADDING_HEADER_SIZE:
                head = self.read(at + begin, PADDING_HEADER_SIZE)
            if len(head) < PADDING_HEADER_SIZE:
                break
            _, count = _PADDING_HEADER.unpack(head)
            border: int = at + begin + PADDING_HEADER_SIZE + count
            if not 0 <= count <= _PADDING_SIZE_BYTES_MAX or border % SECTOR_SIZE_BYTES:
                continue
            if self.read(at + begin + PADDING_HEADER_SIZE, count).strip(b"\0"):
                continue
            if self.next_data(border) is None:
                break
            return border
        return None

    def _records_behind_zeros(self, window: bytes, at: int, start: int) -> int | None:
        """Return the first sector border of `window` where a record begins behind a possible end of a group.

        A group can end with a sector of zeros, or with the count and the zeros of a padding record.
        """
        for begin in range(-at % SECTOR_SIZE_BYTES, len(window), SECTOR_SIZE_BYTES):
            border = at + begin
            if border - SECTOR_SIZE_BYTES < start or not record_start(special=True).match(window, begin):
                continue
            (size,) = RECORD_SIZE.unpack_from(window, begin)
            if size <= self.size() - border - 4 and _ends_group(self.read(border - _TAIL_SIZE, _TAIL_SIZE)):
                return border
        return None

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
            if stop <= cursor.limit or not self._is_torn(cursor.offset, size):
                cursor.reload(4 + size)
                if cursor.limit >= 4 + size:
                    return 0
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

    def _is_torn(self, at: int, size: int) -> bool:
        """Return True if the file ends within the record at `at`. Raises CorruptRecord if its size is damaged."""
        if size > RECORD_SIZE_BYTES_MAX:
            raise CorruptRecord(f"Record has length {size}", offset=at, where=self.name, hint=_READ_ON_HINT)
        rest = self.size() - at - 4
        contradiction = contradicts_size(self.read(at + 4, OVERHEAD_SIZE_MAX), size)
        # A client may have sent a wrong ledger length; then another record begins where this one ends.
        if rest >= size and (not contradiction or self._is_boundary(at + 4 + size)):
            return False
        if contradiction or not self.is_in_last_group(at):
            raise CorruptRecord(
                f"Record has length {size}, {rest} bytes follow", offset=at, where=self.name, hint=_READ_ON_HINT
            )
        return True

    def _is_boundary(self, at: int) -> bool:
        """Return True if a record may end before byte `at`: at a record, at padding, or at the file's end."""
        head = self.read(at, ROW_SIZE_MAX)
        if len(head) < PADDING_HEADER_SIZE:
            return not any(head)
        size = int.from_bytes(head[:4], "big", signed=True)
        count = int.from_bytes(head[4:8], "big", signed=True)
        if size == PADDING_MASK and self.version >= VERSION_PADDING:
            return 0 <= count <= self.size() - at - PADDING_HEADER_SIZE
        if size == 0:
            is_flushed = self.version < VERSION_PADDING or at % ALIGNMENT_DEFAULT == 0
            return is_flushed and self.read(at - 1, 1) != b"\0" and self.next_data(at) is None
        return record_start(special=True).match(head) is not None and size <= self.size() - at - 4

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


def _ends_group(tail: bytes) -> bool:
    """Return True if `tail`, the bytes before a sector border, can end a group: by a sector of zeros, or by padding."""
    zeros = len(tail) - len(tail.rstrip(b"\0"))
    if zeros >= SECTOR_SIZE_BYTES:
        return True
    # The last bytes of the count may be zeros, too.
    return any(tail.endswith(RECORD_SIZE.pack(count) + bytes(count)) for count in range(max(0, zeros - 4), zeros + 1))


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
