"""Entry log files, read offline. Source: DefaultEntryLogger.scanEntryLog, extractEntryLogMetadataFromIndex."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from bkctl.errors import BkctlError, Corrupt, CorruptRecord, EntryNotFound, Unsupported
from bkctl.files.scan import ROW_SIZE_MAX, RecordBatch, ScannedFile, ScanState, record_start, take_entries
from bkctl.files.windows import FileReader, WindowCursor
from bkctl.formats.entry import HEADER_SIZE_V1, HEADER_SIZE_V2, OVERHEAD_SIZE_MAX, DigestType
from bkctl.formats.entry_log import (
    DIRECT_ALIGNMENT,
    DIRECT_PADDING_BYTE,
    HEADER_SIZE,
    LEDGERS_MAP_ITEMS_MAX,
    VERSION_SCOPED,
    EntryLogHeader,
    is_ledgers_map,
    log_id_of,
    read_header,
    read_ledgers_map,
)
from bkctl.formats.record import (
    BODY_SIZE_MIN,
    NO_LEDGER,
    RECORD_SIZE,
    RECORD_SIZE_BYTES_MAX,
    Record,
    RecordType,
    contradicts_size,
    read_record,
)
from bkctl.ids import LedgerId

_LEDGERS_MAP_SIZE_MAX: Final = 20 + 24 * LEDGERS_MAP_ITEMS_MAX
_HINT: Final = "the records before it are undamaged"
#: Bytes behind a cut record that are searched for entries, and the cost in bytes of each rejected candidate.
_PROOF_SIZE_BYTES_MAX: Final = 64 << 20
_CANDIDATE_COST_BYTES: Final = 4096
#: Records before damage that are checked for a wrong size.
_SUSPECTS_MAX: Final = 8


class EntryLogReader(FileReader):
    """One entry log file, written by the default or the direct I/O logger, header version 0 to 2.

    `header` is None for an empty file: a log that is allocated but still unwritten. `log_id` comes from the file's name
    (None for another name). After a scan, `position` is the offset behind the last record and `end` the reason why it
    ended.

    Raises NotFound, UsageError (a directory), CorruptRecord (not an entry log), TruncatedRecord (part of a header),
    Unsupported (an unknown version).
    """

    def _begin(self) -> None:
        self.position = HEADER_SIZE
        self.end = ScanState.END_OF_FILE
        #: Returns whether the index points to a record, None if it cannot tell. Where nothing can, records within a
        #: record count as proof that its size is bad.
        self.is_indexed: Callable[[Record], bool | None] = lambda record: None
        start = self.read(0, HEADER_SIZE)
        self.header: EntryLogHeader | None = read_header(start, self.name) if start else None
        self.log_id = log_id_of(self.path.name)

    def records(self, start: int = 0, end: int | None = None, *, special: bool = False) -> Iterator[Record]:
        """Yield the entries in file order whose size field is at byte `start` or later (0: all) and before `end`.

        A record must begin at `start`. With `special`, also yield the ledgers map and the direct I/O logger's padding
        records. The scan ends without an error at zeros up to the end of the file, and at a record cut by the end of a
        log without ledgers map: its bookie was killed there, or still writes. Raises CorruptRecord for anything else,
        and for such a record if others begin within it (its size is damaged). Raises Unsupported at an entry of an
        unknown format version.
        """
        for batch in self.batches(start, end, special=special):
            yield from batch.records()

    def batches(
        self,
        start: int = 0,
        end: int | None = None,
        *,
        special: bool = False,
        complete: bool = True,
        source: ScannedFile = ScannedFile.ENTRY_LOG,
    ) -> Iterator[RecordBatch]:
        """Yield the records of `records` as columns, several times as fast; raise the same errors.

        All records before damage are in the batches before the error. Without `complete` a log may end before the
        ledgers map that its header promises. `source` may have short entries taken as fast as others.
        """
        if self.header is None:
            return
        version = 2 if self.header.version == VERSION_SCOPED else 1
        cursor = WindowCursor(self.window, max(start, HEADER_SIZE))
        self.end = ScanState.DAMAGED
        nothing = RecordBatch(b"", cursor.at, (), (), version)
        #: Records that are not yielded yet: where damage follows, the last of them may have the wrong size.
        held = nothing
        while True:
            self.position = cursor.offset
            begins, fields, cursor.begin = take_entries(cursor.window, cursor.begin, version, source)
            self.position = cursor.offset
            if begins:
                yield from held.parts()
                held = RecordBatch(cursor.window, cursor.at, begins, fields, version)
            if end is not None and cursor.offset >= end:
                yield from held.before(end).parts()
                return
            if cursor.begin + 4 > cursor.limit:
                if cursor.begin == 0:
                    break
                cursor.reload()
                continue
            record = None
            try:
                stop = self._end_of_single(cursor)
                if stop:
                    size = stop - cursor.begin - 4
                    record = read_record(cursor.window, cursor.begin + 4, size, cursor.offset, self.name)
            except (Corrupt, Unsupported) as error:
                yield from self._before_damage(held, error)
                raise
            if stop is None:
                break
            if record is not None:
                yield from held.parts()
                held = nothing
                window, begin = cursor.window, cursor.begin
                if special or record.ledger is not NO_LEDGER:
                    yield RecordBatch.of_record(record, window, begin)
                cursor.begin = stop
                self.position = cursor.offset
        yield from held.parts()
        if complete:
            self._check_map_is_reached(self.header, cursor)
        is_at_end = cursor.at >= self.size()
        self.end = ScanState.TORN if cursor.limit else ScanState.END_OF_FILE if is_at_end else ScanState.ZEROS

    def _before_damage(self, batch: RecordBatch, damage: BkctlError) -> Iterator[RecordBatch]:
        """Yield the records of `batch`, behind which `damage` begins.

        Where no record begins there, the size of the last one that is larger than its ledger may be the damage: end
        before that record, and raise CorruptRecord.
        """
        lengths, sizes = batch.numbers("lengths"), batch.numbers("sizes")
        is_disk = not isinstance(damage, CorruptRecord | Unsupported)
        count = 0 if is_disk or self._is_boundary(self.position) else _SUSPECTS_MAX
        for at in range(len(batch) - 1, max(-1, len(batch) - 1 - count), -1):
            if sizes[at] - OVERHEAD_SIZE_MAX > max(lengths[at], 0):
                self.position = batch.window_offset + batch.begins[at]
                yield from batch.first(at).parts()
                raise CorruptRecord(
                    f"Record has length {sizes[at]}, and no record begins behind it",
                    offset=self.position,
                    where=self.name,
                    hint=_HINT,
                ) from damage
        yield from batch.parts()

    def entry_at(self, offset: int) -> Record:
        """Return the record of the entry at byte `offset`, the offset part of its location.

        Raises EntryNotFound if the offset is behind the end, CorruptRecord if no entry begins there.
        """
        if offset < HEADER_SIZE + 4:
            raise CorruptRecord("An entry cannot begin in the header", offset=offset, where=self.name)
        window = self.read(offset - 4, 4)
        if len(window) < 4:
            raise EntryNotFound(f"{self.name} has no entry at byte {offset}: it ends before")
        (size,) = RECORD_SIZE.unpack_from(window)
        if not BODY_SIZE_MIN <= size <= min(RECORD_SIZE_BYTES_MAX, self.size() - offset):
            raise CorruptRecord(f"No entry begins here: its length would be {size}", offset=offset, where=self.name)
        return read_record(self.read(offset, size), 0, size, offset - 4, self.name)

    def ledgers_map(self) -> dict[LedgerId, int] | None:
        """Return each ledger's bytes in this log from the ledgers map at its end; None for a log without a map there.

        Apache's SortedLedgerStorage may add entries while another thread writes the map: entries stand behind it, or at
        the place that the header gives. Neither map is used, as in Apache's getEntryLogMetadata. A log that was closed
        without entries (Apache's SortedLedgerStorage may do that) has neither ledgers nor a map.
        Raises CorruptRecord if the map contradicts itself or the header.
        """
        header = self.header
        if header is None or not header.has_map:
            return None
        if self._is_closed_empty(header) and self.size() == HEADER_SIZE:
            return {}
        try:
            return self._read_ledgers_map(header)
        except CorruptRecord:
            if self._is_map_behind_entries(header.ledgers_map_offset):
                return None
            raise

    def _read_ledgers_map(self, header: EntryLogHeader) -> dict[LedgerId, int] | None:
        at = header.ledgers_map_offset
        file_size = self.size()
        if not HEADER_SIZE <= at < file_size:
            raise CorruptRecord(f"Ledgers map is said to be at byte {at} of {file_size}", offset=8, where=self.name)
        sizes: dict[LedgerId, int] = {}
        while at + 4 <= file_size:
            (size,) = RECORD_SIZE.unpack(self.read(at, 4).ljust(4, b"\0"))
            if size <= 0:
                break
            if size > min(_LEDGERS_MAP_SIZE_MAX, file_size - at - 4):
                raise CorruptRecord(f"Ledgers map has length {size}", offset=at, where=self.name)
            body = self.read(at + 4, size)
            if sizes and len(sizes) == header.ledgers_count and not is_ledgers_map(body):
                return None
            for ledger, ledger_size in read_ledgers_map(body, header.version, at, self.name):
                if ledger in sizes or ledger_size <= 0:
                    # Zeros after a crash before the map was synced: the log may have other ledgers.
                    raise CorruptRecord(f"Ledgers map says {ledger_size} bytes of {ledger}", offset=at, where=self.name)
                sizes[ledger] = ledger_size
            at += 4 + size
        if not sizes or len(sizes) != header.ledgers_count:
            raise CorruptRecord(
                f"Ledgers map names {len(sizes)} ledgers, the header says {header.ledgers_count}",
                offset=at,
                where=self.name,
            )
        return sizes

    def _is_map_behind_entries(self, at: int) -> bool:
        """Return whether sound entries begin at byte `at` and a ledgers map follows them."""
        if at < HEADER_SIZE:
            return False
        entries = 0
        with suppress(Corrupt, Unsupported):
            for batch in self.batches(at, special=True, complete=False):
                if batch.type is RecordType.LEDGERS_MAP:
                    return entries > 0
                entries += len(batch)
        return False

    def _is_closed_empty(self, header: EntryLogHeader) -> bool:
        return header.ledgers_map_offset == HEADER_SIZE and header.ledgers_count == 0

    def scan_ledgers(self, *, complete: bool = True) -> tuple[dict[LedgerId, int], BkctlError | None]:
        """Return each ledger's bytes in this log (entries and their size fields), from its records, in id order.

        The second value is the damage behind those records, None at the end of the log. Without `complete` a log may
        end before its ledgers map.
        """
        sums: Counter[tuple[int, int]] = Counter()
        damage: BkctlError | None = None
        try:
            for batch in self.batches(complete=complete, source=ScannedFile.ENTRY_LOG_WITH_SHORT):
                sums.update(batch.sizes_by_ledger())
        except (Corrupt, Unsupported) as error:
            damage = error
        return {LedgerId(*key): sums[key] for key in sorted(sums)}, damage

    def _end_of_single(self, cursor: WindowCursor) -> int | None:
        """Return where the record at the cursor ends in the window.

        Returns 0 after moving the cursor, None at the end of the records. Raises CorruptRecord.
        """
        (size,) = RECORD_SIZE.unpack_from(cursor.window, cursor.begin)
        if size > 0:
            stop: int = cursor.begin + 4 + size
            if stop <= cursor.limit and (cursor.begin == 0 or cursor.begin + ROW_SIZE_MAX <= cursor.limit):
                self._check_size(cursor.offset, size)
                return stop
            # The record crosses the end of the window, or is too near to it for `take_entries`.
            if stop > cursor.limit:
                self._check_size(cursor.offset, size)
            cursor.reload(4 + size)
            return None if cursor.limit < 4 + size else 0
        if size == 0:
            cursor.at, cursor.begin, cursor.limit = cursor.offset, 0, 0
            data = self.next_data(cursor.at)
            if data is None:
                return None
            raise CorruptRecord(
                f"Zeros, and then data again at byte {data}: a hole", offset=cursor.at, where=self.name, hint=_HINT
            )
        cursor.begin += self._skip_direct_padding(cursor.offset, size) - cursor.offset
        if cursor.begin > cursor.limit:
            cursor.reload()
        return 0

    def _check_map_is_reached(self, header: EntryLogHeader, cursor: WindowCursor) -> None:
        """Raise CorruptRecord if the records end before the ledgers map that the header promises."""
        if not header.has_map or self._is_closed_empty(header):
            return
        if cursor.limit or cursor.at <= header.ledgers_map_offset:
            raise CorruptRecord(
                f"Entry log was closed with a ledgers map at byte {header.ledgers_map_offset}, but the file ends at "
                f"byte {self.size()}, and the readable records end",
                offset=cursor.at,
                where=self.name,
                hint=_HINT,
            )

    def _skip_direct_padding(self, at: int, size: int) -> int:
        gap = -at % DIRECT_ALIGNMENT
        filler = self.read(at, gap)
        if gap == 0 or filler.strip(bytes((DIRECT_PADDING_BYTE,))):
            raise CorruptRecord(f"Record has length {size}", offset=at, where=self.name, hint=_HINT)
        return at + gap

    def next_entry(self, at: int, end: int, budget: int) -> tuple[int | None, int]:
        """Find a plausible entry from byte `at` on and before `end`, with a plausible record behind it.

        Returns its offset and the rest of `budget`. The offset is None if there is none, or finding it would cost more
        than `budget` bytes of reads. Skips bytes that the disk cannot read.
        """
        window, begin = b"", 0
        while budget > 0:
            if begin + ROW_SIZE_MAX > len(window):
                at, window = self.next_window(at + begin)
                begin = 0
                budget -= len(window)
                if not window:
                    break
            match = record_start(special=False).search(window, begin)
            if match is None:
                if at + len(window) >= end:
                    break
                begin = max(begin + 1, len(window) - ROW_SIZE_MAX + 1)
                continue
            begin = match.start()
            if at + begin >= end:
                break
            if self._is_entry(at + begin):
                return at + begin, budget
            budget -= _CANDIDATE_COST_BYTES
            begin += 1
        return None, budget

    def _is_entry(self, at: int) -> bool:
        """Return True if a plausible entry begins at byte `at`, with a plausible record behind it."""
        try:
            head = self.read(at, ROW_SIZE_MAX)
            match = record_start(special=False).match(head)
            if match is None:
                return False
            (size,) = RECORD_SIZE.unpack_from(head)
            next_at = at + 4 + size
            length = int.from_bytes(match["entry"][-8:], "big")
            if not BODY_SIZE_MIN <= size <= RECORD_SIZE_BYTES_MAX or next_at > self.size():
                return False
            if size - OVERHEAD_SIZE_MAX > length:
                return False
            behind = self.read(next_at, ROW_SIZE_MAX)
        except Corrupt:  # The disk failed.
            return False
        if not behind.strip(b"\0") or behind[0] == DIRECT_PADDING_BYTE or behind[4:12] == b"\xff" * 8:
            return True
        return record_start(special=False).match(behind) is not None

    def _check_size(self, at: int, size: int) -> None:
        """Raise CorruptRecord if the size field at byte `at` is damaged.

        Only the bookie's own bytes prove that. What a client sends proves nothing: an entry may say a smaller length of
        its ledger than it has bytes itself, have any id, and hold entries in its payload.
        """
        rest = self.size() - at - 4
        head = self.read(at, 4 + OVERHEAD_SIZE_MAX)
        is_wrong, inner = size > RECORD_SIZE_BYTES_MAX, ""
        if not is_wrong and rest < size:
            is_wrong = not (len(head) < 4 + OVERHEAD_SIZE_MAX or self._begins_record(head, at))
            if not is_wrong and (inner := self._hidden_records(at, rest)):
                is_wrong = not _fits_its_ledger(self.path, at, size)
        elif not is_wrong and contradicts_size(head[4:], size):
            is_wrong = not self._is_boundary(at + 4 + size)
            if not is_wrong and not self.read(at + 4 + size - 1, 5).strip(b"\0"):
                is_wrong = bool(inner := self._hidden_records(at, size))
        if is_wrong:
            raise CorruptRecord(
                f"Record has length {size}, {rest} bytes follow{inner}", offset=at, where=self.name, hint=_HINT
            )

    def _hidden_records(self, at: int, size: int) -> str:
        """Return what shows that records begin in the `size` bytes behind the size field at byte `at`; "" for none.

        A client may have put them there: the index decides, where it can tell. Else they must reach to the log's end.
        """
        begin: int | None = at + 4 + BODY_SIZE_MIN
        end, budget = at + 4 + size, _PROOF_SIZE_BYTES_MAX
        while begin is not None:
            begin, budget = self.next_entry(begin, end, budget)
            if begin is not None:
                head = self.read(begin, 4 + OVERHEAD_SIZE_MAX)
                is_indexed = self.is_indexed(read_record(head, 4, len(head) - 4, begin, self.name))
                if is_indexed:
                    return f", with an indexed entry at byte {begin}"
                if is_indexed is None:
                    stop, is_whole = self._follow(begin)
                    if is_whole:
                        return f", with an entry at byte {begin}: damage, or a cut entry's payload; no index here tells"
                    budget -= stop - begin
                budget -= _CANDIDATE_COST_BYTES
                begin += 1
        return ""

    def _follow(self, at: int) -> tuple[int, bool]:
        """Follow the records from byte `at` on. Return where they end, and whether that is an end that logs have.

        That is the end of the file, zeros up to it, or a plausible record that is cut there.
        """
        version = 2 if self.header is not None and self.header.version == VERSION_SCOPED else 1
        cursor = WindowCursor(self.window, at)
        while True:
            _, _, cursor.begin = take_entries(cursor.window, cursor.begin, version, ScannedFile.ENTRY_LOG_WITH_SHORT)
            if cursor.begin:
                cursor.reload()
                continue
            if cursor.limit < 4:
                return cursor.at, not any(cursor.window)
            (size,) = RECORD_SIZE.unpack_from(cursor.window)
            if size == 0:
                return cursor.at, self.next_data(cursor.at) is None
            if not self._begins_record(cursor.window[: 4 + OVERHEAD_SIZE_MAX], cursor.at):
                return cursor.at, False
            if not BODY_SIZE_MIN <= size <= self.size() - cursor.at - 4:
                return cursor.at, record_start(special=False).match(cursor.window) is not None
            cursor.reload(4 + size)
            cursor.begin = 4 + size

    def _is_boundary(self, at: int) -> bool:
        """Return True if a record may end before byte `at`: at a record, at padding, or at the log's end."""
        head = self.read(at, 4 + OVERHEAD_SIZE_MAX)
        size = RECORD_SIZE.unpack_from(head)[0] if len(head) >= 4 else 0
        if size == 0:
            return not any(head) and self.next_data(at) is None
        return head[0] == DIRECT_PADDING_BYTE or (
            BODY_SIZE_MIN <= size <= RECORD_SIZE_BYTES_MAX and self._begins_record(head, at)
        )

    def _begins_record(self, head: bytes, at: int) -> bool:
        """Return True if `head` at byte `at` may be the size field and ids of an entry or a ledgers map."""
        try:
            record = read_record(head, 4, len(head) - 4, at, self.name)
        except (CorruptRecord, Unsupported):
            return False
        return record.type is RecordType.LEDGERS_MAP or record.entry_id >= 0


def _fits_its_ledger(path: Path, at: int, size: int) -> bool:
    """Return True if the size of the record at byte `at` matches the growth of its ledger's length.

    Then the record is really cut, and entries found in it are its payload. Reads the log up to the record.
    """
    with EntryLogReader.open(path) as reader:
        try:
            record = read_record(reader.read(at + 4, OVERHEAD_SIZE_MAX), 0, OVERHEAD_SIZE_MAX, at, reader.name)
        except (CorruptRecord, Unsupported):
            return False
        if record.length is None:
            return False
        before = 0 if record.entry_id == 0 else None
        for batch in reader.batches(end=at):
            for found in batch.select(record.ledger, entry_id=record.entry_id - 1).lengths:
                before = found
    digest_types = [*DigestType] if record.digest_type is None else [record.digest_type]
    header = HEADER_SIZE_V1 if record.format_version == 1 else HEADER_SIZE_V2
    overheads = [header + digest_type.code_length for digest_type in digest_types]
    return before is not None and size - (record.length - before) in overheads
