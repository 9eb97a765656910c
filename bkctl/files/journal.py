"""Journal files, read offline: `JournalReader` and the last mark. Source: Journal.scanJournal, LastLogMark."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from bkctl.errors import BkctlError, Corrupt, CorruptRecord
from bkctl.files.scan import ROW_SIZE_MAX, RecordBatch, take_journal_entries
from bkctl.files.windows import WINDOW_SIZE_BYTES, FileReader
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
    BODY_SIZE_MIN,
    NO_ENTRY,
    NO_LEDGER,
    RECORD_SIZE,
    RECORD_SIZE_BYTES_MAX,
    Record,
    RecordType,
    contradicts_size,
    read_record,
)

#: Records in a row that count as proof that the journal goes on behind a damaged one.
_PROOF_RECORDS: Final = 3
_PROOF_SIZE_BYTES_MAX: Final = 64 << 20
#: How often the end of a journal is read anew while a bookie writes there.
_STILL_ATTEMPTS_MAX: Final = 20
_READ_ON_HINT: Final = "what stands before it is undamaged, 'bkctl journal verify' tells what is behind it"

_ROW_V1: Final = Struct(">iQqqq")
_ROW_V2: Final = Struct(">iBQQqqq")
_HEAD_SIZE: Final = _ROW_V2.size
#: What a record begins with, as far as all have it in common: a size from 16 bytes to 256 MiB, ids below what they
#: could be at most, an entry's LAC and length.
_HEAD: Final = re.compile(
    rb"(?!\x00{3}[\x00-\x0f])[\x00-\x0f].{3}"
    rb"(?:[\x00-\x7f].{7}|[\xa0-\xa4].{16})"
    rb"(?:(?P<entry>\x00\x00.{6}(?:\x00\x00.{6}|\xff{8})\x00\x00.{6})|\xff{6}[\x80\xc0\xe0\xf0]\x00)",
    re.DOTALL,
)

_Take = Callable[[bytes, int], tuple[Sequence[int], int]]


class JournalEnd(StrEnum):
    """Why a journal's records end where they do; the values are the words of every output."""

    #: The file ends behind a whole record.
    END_OF_FILE = "endOfFile"
    #: Only zeros follow: space that was allocated ahead.
    ZEROS = "zeros"
    #: The header or the last record is cut: the bookie stopped while it wrote.
    TORN = "torn"
    #: What follows is no record, and more than what a crash leaves.
    DAMAGED = "damaged"


class Behind(NamedTuple):
    """What lies behind the place where a journal's records end.

    `size_bytes` up to the last byte that is not zero; `record_count` plausible records in it, `entry_count` of them
    entries, the first of all at byte `resumes_at`. A payload that looks like records counts as such.
    """

    size_bytes: int = 0
    record_count: int = 0
    entry_count: int = 0
    resumes_at: int | None = None


class JournalReader(FileReader):
    """One journal file of any version, 1 to 7.

    `version` is the file's, `journal_id` what its name says (None for another name), `position` the offset after the
    last record that was read: what a last mark would point at. `end` tells why, once `records` or `batches` ended.
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
        self.end = JournalEnd.DAMAGED

    @classmethod
    def open(cls, path: Path | str) -> JournalReader:
        """Open a journal file. Raises NotFound, UsageError (a directory), Unsupported (an unknown version)."""
        return cls(path)

    def records(self, start: int = 0, *, padding: bool = False) -> Iterator[Record]:
        """Yield records in file order from byte `start` (0: just after the header), padding only if asked for.

        A record that the end of the file cuts short, and zeros to the end of the file, end the scan quietly: the
        bookie stopped writing there. Raises CorruptRecord where records follow behind such a place, at a length that
        no bookie writes, and at a body too short for its ids; Unsupported at an entry of an unknown format version.
        """
        skips_padding = self.version >= VERSION_PADDING and not padding
        read_size = RECORD_SIZE.unpack_from

        def take(window: bytes, begin: int) -> tuple[Sequence[int], int]:
            return _take_frames(window, begin, skips_padding)

        for window, at, begins in self._runs(start, take):
            for begin in begins:
                (size,) = read_size(window, begin)
                if size == PADDING_MASK:
                    if padding:
                        yield self._padding(window, begin, at + begin)
                    continue
                self.position = at + begin
                record = self._record(window, begin, size, at + begin)
                if record is None:
                    return
                self.position += 4 + size
                yield record

    def batches(self, start: int = 0, end: int | None = None, *, padding: bool = False) -> Iterator[RecordBatch]:
        """Yield what `records` yields, and raise what it raises, as columns: several times as fast.

        With `end` only records that begin before that byte. All records before damage are in the batches before the
        error. Padding, special records and the few entries that need a second look come in batches of their own.
        """
        skips_padding = self.version >= VERSION_PADDING and not padding
        has_scoped = self.version >= VERSION_SCOPED
        flat: Sequence[int] = ()
        format_version = 1

        def take(window: bytes, begin: int) -> tuple[Sequence[int], int]:
            nonlocal flat, format_version
            format_version = 2 if has_scoped and window[begin + 4 : begin + 5] >= b"\x80" else 1
            begins, flat, stop = take_journal_entries(window, begin, format_version, skips_padding=skips_padding)
            return begins, stop

        for window, at, begins in self._runs(start, take):
            if end is not None and at + begins[-1] >= end:
                if len(flat) and at + begins[0] < end:
                    yield from RecordBatch(window, at, begins, flat, format_version).before(end).parts()
                return
            if len(flat):
                batch, flat = RecordBatch(window, at, begins, flat, format_version), ()
                self.position = at + begins[-1] + 4 + batch.numbers("sizes")[-1]
                yield from batch.parts()
                continue
            begin = begins[0]
            (size,) = RECORD_SIZE.unpack_from(window, begin)
            if size == PADDING_MASK:
                if padding:
                    yield RecordBatch.of_record(self._padding(window, begin, at + begin), window, begin)
                continue
            self.position = at + begin
            record = self._record(window, begin, size, at + begin)
            if record is None:
                return
            self.position += 4 + size
            yield RecordBatch.of_record(record, window, begin)

    def _padding(self, window: bytes, begin: int, offset: int) -> Record:
        (count,) = RECORD_SIZE.unpack_from(window, begin + 4)
        self.position = offset + PADDING_HEADER_SIZE + count
        return Record(offset, count, RecordType.PADDING, NO_LEDGER, NO_ENTRY, None, None, 1, None, b"")

    def _record(self, window: bytes, begin: int, size: int, offset: int) -> Record | None:
        """The record at `begin`; None where only its size reached the disk, and the journal ends."""
        record = read_record(window, begin + 4, size, offset, self.name)
        if record.format_version == 2 and self.version < VERSION_SCOPED:
            raise CorruptRecord(f"Scoped record in a journal of version {self.version}", offset=offset, where=self.name)
        if record.last_add_confirmed == 0 and not any(record.body) and self.next_data(offset + 4) is None:
            self.end = JournalEnd.TORN
            return None
        return record

    def _runs(self, start: int, take: _Take) -> Iterator[tuple[bytes, int, Sequence[int]]]:
        """Yield (window, its file offset, where records begin in it) over the whole journal from byte `start` on.

        `take` says which records of a window belong together, and where the first stands that does not: that one
        comes alone, padding too. Raises as `records` does, and says in `end` why there are no more.
        """
        at, begin = max(start, self.header_size), 0
        self.position, self.end = at, JournalEnd.DAMAGED
        window = self._still_window(at)
        limit = len(window)
        if self.size() < (self.header_size or HEADER.size):
            # Too short for a record, and maybe the first bytes of a header.
            self.end = JournalEnd.TORN if self.size() else JournalEnd.END_OF_FILE
            return
        while True:
            begins, begin = take(window, begin)
            if begins:
                yield window, at, begins
            self.position = at + begin
            if begin + 4 > limit:
                if begin == 0:
                    self.end = JournalEnd.TORN if limit else JournalEnd.END_OF_FILE
                    return
                at, begin = at + begin, 0
                window = self._still_window(at)
                limit = len(window)
                continue
            (size,) = RECORD_SIZE.unpack_from(window, begin)
            end = begin + 4 + size
            if size > 0 and end <= limit and (begin == 0 or begin + ROW_SIZE_MAX <= limit):
                yield window, at, (begin,)
                begin = end
            elif size > 0:
                # It goes on behind the window, or is too near to its end to be taken with others.
                at, begin, crosses = at + begin, 0, end > limit
                if crosses and self._is_torn(at, size):
                    self.end = JournalEnd.TORN
                    return
                window = self._still_window(at, 4 + size)
                limit = len(window)
                if limit < 4 + size:
                    self.end = JournalEnd.TORN
                    return
            elif size == 0:
                if self._is_end(at + begin):
                    self.end = JournalEnd.ZEROS
                    return
                at, begin = at + begin, 0
                window = self._still_window(at)
                limit = len(window)
            elif size == PADDING_MASK and self.version >= VERSION_PADDING:
                if begin + PADDING_HEADER_SIZE > limit:
                    at, begin = at + begin, 0
                    window = self._still_window(at)
                    limit = len(window)
                    if limit < PADDING_HEADER_SIZE:
                        self.end = JournalEnd.TORN
                        return
                end = begin + PADDING_HEADER_SIZE + self._padding_count(window, begin, at + begin)
                if end > limit and at + end > self.size():
                    self.end = JournalEnd.TORN
                    return
                yield window, at, (begin,)
                begin = end
                if begin > limit:
                    at, begin = at + begin, 0
                    window = self._still_window(at)
                    limit = len(window)
            else:
                raise CorruptRecord(f"Record has length {size}", offset=at + begin, where=self.name, hint=_READ_ON_HINT)

    def _still_window(self, at: int, needed: int = 0) -> bytes:
        """A window that no bookie is writing to at this moment: part of a record would pass for a whole one."""
        window = self.window(at, needed)
        for _ in range(_STILL_ATTEMPTS_MAX):
            if window and window[-1]:
                break
            again = self.window(at, needed)
            if again == window:
                break
            window = again
        return window

    def _padding_count(self, window: bytes, begin: int, offset: int) -> int:
        count: int = RECORD_SIZE.unpack_from(window, begin + 4)[0]
        if not 0 <= count <= RECORD_SIZE_BYTES_MAX:
            raise CorruptRecord(f"Padding has length {count}", offset=offset, where=self.name, hint=_READ_ON_HINT)
        return count

    def look_behind(self, start: int) -> Behind:
        """What lies from byte `start` on, where the records ended: bytes, and plausible records among them.

        Reads the rest of the file about once, whatever is in it; what the disk does not give is jumped over.
        """
        record_count = entry_count = 0
        data_end, resumes_at = start, None
        at, begin, window = start, 0, b""
        while True:
            if begin + _HEAD_SIZE > len(window):
                at, begin = at + begin, 0
                at, window = self.next_window(at)
                filled = len(window.rstrip(b"\0"))
                data_end = max(data_end, at + filled if filled else 0)
                if window and not filled and at + len(window) < self.size():
                    begin = len(window)
                    continue
            match = _HEAD.search(window, begin)
            if match is None:
                if not window or at + len(window) >= self.size():
                    return Behind(data_end - start, record_count, entry_count, resumes_at)
                begin = max(begin + 1, len(window) - _HEAD_SIZE + 1)
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
        """Where plausible records end that follow each other from byte `at`; how many they are, and how many entries.

        One alone counts where padding (before version 5: zeros) or the end of the file follows it.
        """
        size_bytes = self.size()
        records = entries = 0
        ended = False
        while True:
            try:
                head = self.read(at, _HEAD_SIZE)
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
            match = _HEAD.match(head)
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
        """Whether the record at `at` goes on behind the file's end. Raises CorruptRecord where its size is damage."""
        if size > RECORD_SIZE_BYTES_MAX:
            raise CorruptRecord(f"Record has length {size}", offset=at, where=self.name, hint=_READ_ON_HINT)
        rest = self.size() - at - 4
        contradiction = contradicts_size(self.read(at + 4, OVERHEAD_SIZE_MAX), size)
        # Whoever sent the entry may have said any length of its ledger: where the record ends something else begins.
        if rest >= size and (not contradiction or self._is_boundary(at + 4 + size)):
            return False
        if contradiction or self._records_follow(at + 4):
            raise CorruptRecord(
                f"Record has length {size}, {rest} bytes follow", offset=at, where=self.name, hint=_READ_ON_HINT
            )
        return True

    def _is_boundary(self, at: int) -> bool:
        """Whether a record may end before byte `at`: another begins there, or padding, or the file ends."""
        head = self.read(at, _HEAD_SIZE)
        if len(head) < PADDING_HEADER_SIZE:
            return not any(head)
        size = int.from_bytes(head[:4], "big", signed=True)
        count = int.from_bytes(head[4:8], "big", signed=True)
        if size == PADDING_MASK and self.version >= VERSION_PADDING:
            return 0 <= count <= self.size() - at - PADDING_HEADER_SIZE
        if size == 0:
            is_flushed = self.version < VERSION_PADDING or at % ALIGNMENT_DEFAULT == 0
            return is_flushed and self.read(at - 1, 1) != b"\0" and self.next_data(at) is None
        return _HEAD.match(head) is not None and size <= self.size() - at - 4

    def _is_end(self, at: int) -> bool:
        """Whether only zeros follow from `at`, where there was one; False where a bookie has written on meanwhile."""
        data = self.next_data(at)
        if data is None:
            return True
        if any(self.read(at, RECORD_SIZE.size)):
            return False
        raise CorruptRecord(
            f"Zeros, and then data again at byte {data}: a hole", offset=at, where=self.name, hint=_READ_ON_HINT
        )

    def _records_follow(self, at: int) -> bool:
        """Whether undamaged records begin at a flush boundary behind `at`."""
        if self.version < VERSION_PADDING:
            return False
        end = min(self.size(), at + _PROOF_SIZE_BYTES_MAX)
        boundary = at + -at % ALIGNMENT_DEFAULT
        while boundary < end:
            window = self.window(boundary)
            for begin in range(0, len(window), ALIGNMENT_DEFAULT):
                if _is_chain(window, begin):
                    return True
            boundary += WINDOW_SIZE_BYTES
        return False


def _take_frames(window: bytes, begin: int, skips_padding: bool) -> tuple[list[int], int]:
    """Where records begin in `window` from byte `begin`, and where the first stands that is not whole or has no size.

    With `skips_padding` that is over padding, too.
    """
    begins: list[int] = []
    add, read_size = begins.append, RECORD_SIZE.unpack_from
    limit = len(window)
    last = limit - PADDING_HEADER_SIZE
    while begin <= last:
        (size,) = read_size(window, begin)
        end = begin + 4 + size
        if size == PADDING_MASK and skips_padding:
            (count,) = read_size(window, begin + 4)
            end = begin + PADDING_HEADER_SIZE + count
            if count < 0 or end > limit:
                break
        elif size <= 0 or end > limit:
            break
        else:
            add(begin)
        begin = end
    return begins, begin


def _is_chain(window: bytes, begin: int) -> bool:
    """Whether records follow each other from `begin`, until padding ends at a flush boundary."""
    for count in range(1, 1 << 16):
        if begin + 4 + BODY_SIZE_MIN > len(window):
            return False
        (size,) = RECORD_SIZE.unpack_from(window, begin)
        if size == PADDING_MASK:
            (padding,) = RECORD_SIZE.unpack_from(window, begin + 4)
            end = begin + PADDING_HEADER_SIZE + padding
            return count > 1 and 0 <= padding < 2 * ALIGNMENT_DEFAULT and end % ALIGNMENT_DEFAULT == 0
        if not BODY_SIZE_MIN <= size <= RECORD_SIZE_BYTES_MAX:
            return False
        flags = window[begin + 4]
        if flags >= 0x80 and flags & 0xF0 != 0xA0:
            return False
        begin += 4 + size
        if count > _PROOF_RECORDS and begin + 4 > len(window):
            return True
    return True


def read_last_mark(dirs: Iterable[Path | str], journal_index: int = 0, journal_count: int = 1) -> LogMark:
    """The last mark of one of a bookie's journal directories: the highest that its ledger directories keep.

    Files that are missing or of another size do not count, as in Apache's bookie; without any it is (0, 0), which
    means that the whole journal counts. Source: Journal.LastLogMark.readLog.
    """
    highest = LogMark(0, 0)
    for each in dirs:
        directory = Path(each)
        current = directory / "current"
        path = (current if current.is_dir() else directory) / last_mark_name(journal_index, journal_count)
        try:
            mark = LogMark.parse(path.read_bytes(), str(path))
        except (OSError, CorruptRecord):
            continue
        highest = max(highest, mark)
    return highest
