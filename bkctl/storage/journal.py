"""Journal files, read offline: `JournalReader` and the last mark. Source: Journal.scanJournal, LastLogMark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from bkctl.errors import BkctlError, CorruptRecord
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
from bkctl.storage.windows import WINDOW_SIZE_BYTES, FileReader

#: Records in a row that count as proof that the journal goes on behind a damaged one.
_PROOF_RECORDS: Final = 3
_PROOF_SIZE_BYTES_MAX: Final = 64 << 20
_READ_ON_HINT: Final = "what stands before it is undamaged"


class JournalReader(FileReader):
    """One journal file of any version, 1 to 7.

    `version` is the file's, `journal_id` what its name says (None for another name), `position` the offset after the
    last record that was read: what a last mark would point at.
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
        at = max(start, self.header_size)
        window = self.window(at)
        limit = len(window)
        if at == 0 and limit < HEADER.size:
            # Too short for a record, and maybe the first bytes of a header.
            return
        begin = 0
        read_size = RECORD_SIZE.unpack_from
        has_padding = self.version >= VERSION_PADDING
        name = self.name
        while True:
            self.position = at + begin
            if begin + 4 > limit:
                at, begin = at + begin, 0
                window = self.window(at)
                limit = len(window)
                if limit < 4:
                    return
            (size,) = read_size(window, begin)
            if size > 0:
                end = begin + 4 + size
                if end > limit:
                    at, begin = at + begin, 0
                    if self._is_torn(at, size):
                        return
                    end = 4 + size
                    window = self.window(at, end)
                    limit = len(window)
                    if limit < end:
                        return
                record = read_record(window, begin + 4, size, at + begin, name)
                if record.format_version == 2 and self.version < VERSION_SCOPED:
                    raise CorruptRecord(
                        f"Scoped record in a journal of version {self.version}", offset=at + begin, where=name
                    )
                if record.last_add_confirmed == 0 and self._is_lost_body(record):
                    return
                begin = end
                self.position = at + begin
                yield record
            elif size == 0:
                self._check_end(at + begin)
                return
            elif size == PADDING_MASK and has_padding:
                offset = at + begin
                if begin + PADDING_HEADER_SIZE > limit:
                    at, begin = offset, 0
                    window = self.window(at)
                    limit = len(window)
                    if limit < PADDING_HEADER_SIZE:
                        return
                (count,) = read_size(window, begin + 4)
                if not 0 <= count <= RECORD_SIZE_BYTES_MAX:
                    raise CorruptRecord(f"Padding has length {count}", offset=offset, where=name, hint=_READ_ON_HINT)
                begin += PADDING_HEADER_SIZE + count
                if begin > limit:
                    at, begin = at + begin, 0
                    limit = 0
                    if at > self.size():
                        return
                if padding:
                    self.position = at + begin
                    yield Record(offset, count, RecordType.PADDING, NO_LEDGER, NO_ENTRY, None, None, 1, None, b"")
            else:
                raise CorruptRecord(f"Record has length {size}", offset=at + begin, where=name, hint=_READ_ON_HINT)

    def _is_torn(self, at: int, size: int) -> bool:
        """Whether the record at `at` goes on behind the file's end. Raises CorruptRecord where its size is damage."""
        if size > RECORD_SIZE_BYTES_MAX:
            raise CorruptRecord(f"Record has length {size}", offset=at, where=self.name, hint=_READ_ON_HINT)
        rest = self.size() - at - 4
        contradiction = contradicts_size(self.read(at + 4, OVERHEAD_SIZE_MAX), size)
        if rest >= size and not contradiction:
            return False
        if contradiction or self._records_follow(at + 4):
            raise CorruptRecord(
                f"Record has length {size}, {rest} bytes follow", offset=at, where=self.name, hint=_READ_ON_HINT
            )
        return True

    def _check_end(self, at: int) -> None:
        data = self.next_data(at)
        if data is not None:
            raise CorruptRecord(
                f"Zeros, and then data again at byte {data}: a hole", offset=at, where=self.name, hint=_READ_ON_HINT
            )

    def _is_lost_body(self, record: Record) -> bool:
        """Whether only the size field of the last record reached the disk: its body is zeros as all that follows."""
        return not any(record.body) and self.next_data(record.offset + 4) is None

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
