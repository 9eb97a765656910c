"""What the listing commands show of a bookie's files: journals and logs at a glance, some records, a ledger's index.

The index of a ledger is an index file (Interleaved, Sorted), or in the RocksDBs of DbLedgerStorage, which are opened
read-only beside a running bookie. Source: LedgerCommand, ReadJournalCommand, ReadLogCommand, LastMarkCommand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from bkctl.errors import BkctlError, Corrupt, LedgerNotFound, NotFound, UsageError
from bkctl.formats.entry import read_lac_header
from bkctl.formats.entry_log import unpack_location
from bkctl.formats.index import (
    LedgerData,
    index_path,
    ledger_key,
    location_key,
    read_location,
    read_location_key,
)
from bkctl.formats.journal import LogMark, journal_id_of
from bkctl.formats.record import Record, RecordType
from bkctl.ids import LedgerId
from bkctl.storage.directories import BookieDirectories, BookieFile, current_of
from bkctl.storage.entry_log import EntryLogReader
from bkctl.storage.index import LedgerIndexReader
from bkctl.storage.journal import JournalReader

#: Records that belong to no ledger are left out unless asked for by type, as Apache's tools leave them out.
FILLER_TYPES: Final = frozenset((RecordType.PADDING, RecordType.LEDGERS_MAP))

_ROCKSDB_FILE: Final = re.compile(r"CURRENT|IDENTITY|MANIFEST-\d+|OPTIONS-\d+|\d+\.(?:sst|log|blob)").fullmatch
_ROCKSDB_ATTEMPTS_MAX: Final = 5


class JournalSummary(NamedTuple):
    """A journal file and its version; `error` says why the version is not known."""

    file: BookieFile
    version: int | None
    error: BkctlError | None = None


def journal_summaries(directories: BookieDirectories) -> Iterator[JournalSummary]:
    """Yield the journal files in order. Raises NotFound for a missing directory."""
    for file in directories.journals():
        try:
            with JournalReader.open(file.path) as reader:
                yield JournalSummary(file, reader.version)
        except BkctlError as error:
            yield JournalSummary(file, None, error)


class EntryLogSummary(NamedTuple):
    """An entry log and what its header says; `ledgers_count` is None where the log has no ledgers map.

    `version` is None for an empty file (allocated, not yet written) and where `error` says why it is not known.
    """

    file: BookieFile
    version: int | None
    ledgers_map_offset: int | None
    ledgers_count: int | None
    error: BkctlError | None = None


def entry_log_summaries(directories: BookieDirectories) -> Iterator[EntryLogSummary]:
    """Yield the entry logs in order, scoped ones last in each directory. Raises NotFound for a missing directory."""
    for file in directories.entry_logs():
        try:
            with EntryLogReader.open(file.path) as reader:
                header = reader.header
        except BkctlError as error:
            yield EntryLogSummary(file, None, None, None, error)
            continue
        if header is None:
            yield EntryLogSummary(file, None, None, None)
        elif header.ledgers_map_offset:
            yield EntryLogSummary(file, header.version, header.ledgers_map_offset, header.ledgers_count)
        else:
            yield EntryLogSummary(file, header.version, None, None)


class LedgerInLog(NamedTuple):
    """A ledger's bytes (entries and their size fields) in one entry log; `from_map` False: counted by a scan."""

    ledger: LedgerId
    size_bytes: int
    from_map: bool


def ledgers_in_log(reader: EntryLogReader) -> list[LedgerInLog]:
    """The ledgers of a log in order, from its ledgers map, or by a scan where it has none or a damaged one."""
    try:
        sizes = reader.ledgers_map()
    except Corrupt:
        sizes = None
    from_map = sizes is not None
    if sizes is None:
        sizes = reader.scan_ledgers()
    return [LedgerInLog(ledger, sizes[ledger], from_map) for ledger in sorted(sizes)]


class JournalMark(NamedTuple):
    """The last mark of one journal directory, and the file that says so: the highest of all ledger directories."""

    journal_index: int
    mark: LogMark
    file: BookieFile


def latest_marks(directories: BookieDirectories) -> list[JournalMark]:
    """The last mark of each journal directory. Files of another size do not count, as in a bookie.

    Raises NotFound when there is no mark at all; Corrupt when none of those that are there can be read.
    """
    latest: dict[int, JournalMark] = {}
    damage: Corrupt | None = None
    for file in directories.last_marks():
        assert isinstance(file.id, int)
        try:
            mark = LogMark.parse(file.path.read_bytes(), str(file.path))
        except Corrupt as error:
            damage = error
            continue
        known = latest.get(file.id)
        if known is None or mark > known.mark:
            latest[file.id] = JournalMark(file.id, mark, file)
    if not latest:
        where = ", ".join(map(str, directories.ledger_dirs))
        raise damage or NotFound(f"There is no lastMark in {where}", hint="give the ledger directories")
    return [latest[index] for index in sorted(latest)]


class RecordFilter(NamedTuple):
    """Which records to show; None asks for nothing. `types` None: all but padding and ledgers maps.

    `position_last` is the last offset at which a shown record may begin.
    """

    ledger: LedgerId | None = None
    scope_id: int | None = None
    entry_id: int | None = None
    types: Container[RecordType] | None = None
    position_first: int = 0
    position_last: int | None = None

    def of_journal(self, reader: JournalReader, start: int = 0) -> Iterator[Record]:
        """The chosen records of a journal, from byte `start` on."""
        padding = self.types is not None and RecordType.PADDING in self.types
        return self._choose(reader.records(max(start, self.position_first), padding=padding))

    def of_entry_log(self, reader: EntryLogReader) -> Iterator[Record]:
        """The chosen records of an entry log."""
        special = self.types is not None and any(each in self.types for each in FILLER_TYPES)
        end = None if self.position_last is None else self.position_last + 1
        return self._choose(reader.records(self.position_first, end, special=special))

    def _choose(self, records: Iterator[Record]) -> Iterator[Record]:
        if self._replace(position_first=0) == RecordFilter():
            return records
        return self._filter(records)

    def _filter(self, records: Iterator[Record]) -> Iterator[Record]:
        ledger, scope_id, entry_id, types, _, last = self
        for record in records:
            if last is not None and record.offset > last:
                return
            if (
                (ledger is None or record.ledger == ledger)
                and (scope_id is None or record.ledger.scope_id == scope_id)
                and (entry_id is None or record.entry_id == entry_id)
                and (types is None or record.type in types)
            ):
                yield record


class EntryLocation(NamedTuple):
    """Where an entry is: in log `log_id`, its record at byte `offset` (of the size field); `location` as stored."""

    entry_id: int
    location: int

    @property
    def log_id(self) -> int:
        """The entry log's id."""
        return unpack_location(self.location)[0]

    @property
    def offset(self) -> int:
        """The byte offset of the record in the log: 4 before the entry that the location points at."""
        return unpack_location(self.location)[1] - 4


class Gap(NamedTuple):
    """Entries `first_entry_id` to `last_entry_id`, both included, that are not here although later ones are."""

    first_entry_id: int
    last_entry_id: int


class LedgerIndex:
    """What a bookie's index says about one ledger. A context manager; made by `open_ledger_index`."""

    ledger: LedgerId
    #: The index file, or the directory of the locations database.
    path: Path
    fenced: bool
    master_key: bytes
    _explicit_lac_packet: bytes | None

    def locations(self) -> Iterator[EntryLocation]:
        """Yield the entries that are here, in order."""
        raise AssertionError

    def gaps(self) -> Iterator[Gap]:
        """Yield the runs of entries before the last that are not here, in order."""
        expected = 0
        for entry_id, _ in self.locations():
            if entry_id > expected:
                yield Gap(expected, entry_id - 1)
            expected = entry_id + 1

    def extent(self) -> tuple[int, int]:
        """How many entries are here, and the last one's id (-1: none)."""
        count, last = 0, -1
        for entry_id, _ in self.locations():
            count, last = count + 1, entry_id
        return count, last

    def explicit_lac(self) -> int | None:
        """The last add confirmed that the writer told by itself; None when it told none. Raises Corrupt."""
        packet = self._explicit_lac_packet
        return None if packet is None else read_lac_header(packet).last_add_confirmed

    def close(self) -> None:
        """Close the files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _FileIndex(LedgerIndex):
    def __init__(self, ledger: LedgerId, path: Path) -> None:
        self._reader = LedgerIndexReader.open(path)
        self.ledger, self.path = ledger, path
        header = self._reader.header
        self.fenced, self.master_key, self._explicit_lac_packet = header.fenced, header.master_key, header.explicit_lac

    def locations(self) -> Iterator[EntryLocation]:
        for entry_id, location in self._reader.locations(skip_absent=True):
            yield EntryLocation(entry_id, location)

    def close(self) -> None:
        self._reader.close()


class _RocksDbIndex(LedgerIndex):
    def __init__(self, ledger: LedgerId, data: LedgerData, locations: Path) -> None:
        self.ledger, self.path = ledger, locations
        self.fenced, self.master_key, self._explicit_lac_packet = data.fenced, data.master_key, data.explicit_lac

    def locations(self) -> Iterator[EntryLocation]:
        with _open_rocksdb(self.path) as database:
            items = database.iter()
            items.seek(location_key(self.ledger, 0))
            while items.valid():
                ledger, entry_id = read_location_key(items.key(), str(self.path))
                if ledger != self.ledger:
                    return
                yield EntryLocation(entry_id, read_location(items.value(), str(self.path)))
                items.next()
            try:
                items.status()
            except Exception as error:  # rocksdict raises nothing narrower
                raise Corrupt(f"{self.path} cannot be read to its end: {error}") from error


@contextmanager
def _open_rocksdb(path: Path) -> Iterator[Any]:
    """A database of a bookie that may be running, read without leaving a trace beside it.

    Even a read-only RocksDB writes its log (and rocksdict its settings) into the directory it opens, so that is one of
    our own, with links to the files. Raises Corrupt, NotFound.
    """
    from tempfile import TemporaryDirectory

    from rocksdict import AccessType, Options, Rdict

    for attempt in range(_ROCKSDB_ATTEMPTS_MAX):
        with TemporaryDirectory(prefix="bkctl-") as view:
            for file in path.iterdir():
                if _ROCKSDB_FILE(file.name):
                    os.symlink(file.absolute(), os.path.join(view, file.name))
            try:
                database = Rdict(view, options=Options(raw_mode=True), access_type=AccessType.read_only(False))
            except Exception as error:  # rocksdict raises nothing narrower
                # A running bookie replaces files while we look: what is damaged stays so.
                if attempt == _ROCKSDB_ATTEMPTS_MAX - 1:
                    raise Corrupt(f"{path} cannot be opened: {str(error).replace(view, str(path))}") from error
                continue
            try:
                yield database
            finally:
                database.close()
            return


def open_ledger_index(directories: BookieDirectories, ledger: LedgerId) -> LedgerIndex:
    """The index of `ledger`, wherever the directories keep it.

    Raises LedgerNotFound; UsageError where several directories have one; what reading its header raises.
    """
    try:
        return _FileIndex(ledger, directories.index_of(ledger).path)
    except NotFound:
        databases = directories.rocksdbs()
    prefix = "scoped-" if ledger.is_scoped else ""
    found = []
    for file in databases:
        if file.path.name != f"{prefix}ledgers":
            continue
        with _open_rocksdb(file.path) as database:
            value = database.get(ledger_key(ledger))
            if value is None and not ledger.is_scoped:  # what Apache's rebuild writes
                value = database.get(ledger_key(ledger) + bytes(8))
        if value is not None:
            where = f"ledger {ledger} in {file.path}"
            found.append(
                _RocksDbIndex(ledger, LedgerData.parse(value, where), file.path.with_name(f"{prefix}locations"))
            )
    if len(found) > 1:
        paths = ", ".join(str(each.path.parent) for each in found)
        raise UsageError(f"{len(found)} directories have an index of ledger {ledger}: {paths}", hint="give one of them")
    if not found:
        where = ", ".join(map(str, directories.index_dirs))
        raise LedgerNotFound(
            f"There is no index of ledger {ledger} in {where}", hint=f"looked for {index_path(ledger)}"
        )
    return found[0]


def files_after_marks(directories: BookieDirectories, files: Iterable[Path]) -> dict[Path, int]:
    """Those journal files that a restart would replay, each with the byte to begin at (0: the file's beginning).

    A file belongs to the mark of its own journal directory where the directories are known as such and there are
    several, else to the only mark. Raises NotFound without any mark, UsageError where several marks might count.
    """
    marks = {each.journal_index: each.mark for each in latest_marks(directories)}
    currents = [current_of(each).resolve() for each in directories.journal_dirs]
    starts: dict[Path, int] = {}
    for path in files:
        mark = next(iter(marks.values()))
        if len(marks) > 1:
            parent = path.resolve().parent
            index = currents.index(parent) if currents.count(parent) == 1 else -1
            if index not in marks or directories.journal_dirs == directories.ledger_dirs:
                raise UsageError(f"{len(marks)} last marks might count for {path}", hint="use --conf bk_server.conf")
            mark = marks[index]
        journal_id = journal_id_of(path.name)
        if journal_id is None or journal_id > mark.journal_id:
            starts[path] = 0
        elif journal_id == mark.journal_id:
            starts[path] = mark.offset
    return starts
