"""The contents of a new index, as a repair finds them: facts about ledgers, and the entries of entry logs.

`IndexRepair` gathers them for a target: a database of locations, or index files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from bkctl.disk import Files
from bkctl.errors import BkctlError, Corrupt, CorruptRecord, NotFound, Unsupported
from bkctl.files.directories import BookieDirectories
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.index import LedgerIndexReader
from bkctl.files.journal import JournalReader
from bkctl.files.windows import FileReader
from bkctl.formats.entry import read_lac_header
from bkctl.formats.entry_log import log_id_of, pack_location, unpack_location
from bkctl.formats.index import LedgerData
from bkctl.formats.names import SCOPED_DIRECTORY
from bkctl.formats.record import BODY_SIZE_MIN, IDS_V2, RECORD_SIZE, RECORD_SIZE_BYTES_MAX, RecordType, read_record
from bkctl.ids import I64_MAX, LedgerId
from bkctl.model import LedgerFacts, LedgerFactsLookup, LedgerLiveness

#: Called with the bytes (or entries) that were processed since the last call.
Progress = Callable[[int], None]
#: An entry of an index: ledger, entry id, location.
IndexedEntry = tuple[LedgerId, int, int]


class DamagedFile(NamedTuple):
    """A file that could not be read to its end, and the error. A repair uses the records before the damage."""

    path: Path
    error: BkctlError


@dataclass(slots=True)
class RepairFindings:
    """The findings of a repair besides its result: damaged files, and notes for the operator."""

    damage: list[DamagedFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class JournalFacts:
    """A ledger's records in the journals; None without such a record. `explicit_lac` is the last LAC packet."""

    master_key: bytes | None = None
    fenced: bool = False
    explicit_lac: bytes | None = None


def read_journals(
    directories: Iterable[Path], findings: RepairFindings, progress: Progress
) -> dict[LedgerId, JournalFacts]:
    """Return the facts of every ledger in the journals of `directories` (each `current`).

    Journals of version 7 that a clean stop set aside count too. A damaged journal is noted and used up to its damage.
    """
    facts: dict[LedgerId, JournalFacts] = {}
    for directory in directories:
        found = BookieDirectories(journal_dirs=[directory]).journals()
        for file in sorted(found, key=lambda journal: journal.id if isinstance(journal.id, int) else 0):
            try:
                with JournalReader.open(file.path) as reader:
                    _read_journal(reader, facts)
            except (Corrupt, Unsupported) as error:
                findings.damage.append(DamagedFile(file.path, error))
            progress(file.size)
    return facts


def _read_journal(reader: JournalReader, facts: dict[LedgerId, JournalFacts]) -> None:
    for record in reader.records():
        ledger = record.ledger
        if not is_ledger(ledger):
            continue
        fact = facts.get(ledger)
        if fact is None:
            fact = facts[ledger] = JournalFacts()
        if record.type is RecordType.LEDGER_KEY:
            fact.master_key = record.special_payload
        elif record.type is RecordType.FENCE:
            fact.fenced = True
        elif record.type is RecordType.EXPLICIT_LAC:
            fact.explicit_lac = record.special_payload


def header_data(reader: LedgerIndexReader) -> LedgerData:
    """Return the data in the header of an index file."""
    header = reader.header
    return LedgerData(True, header.fenced, header.master_key, header.explicit_lac)


def is_ledger(ledger: LedgerId) -> bool:
    """Return True if a bookie can have a ledger of this id. Ids from 2^63 in scope 0 are marks, not ledgers."""
    return ledger.is_scoped or ledger.ledger_id <= I64_MAX


def decide_ledger_data(
    old: LedgerData | None, journal: JournalFacts | None, known: LedgerFacts | None, *, old_is_complete: bool
) -> tuple[LedgerData, bool] | None:
    """Return the data of a ledger for a new index, and True if its fence is a guess; None for a dead ledger.

    The master key is taken from the old index, else the journal, else the metadata's password; an empty key accepts
    the next writer's. The ledger is fenced if any source says so. It is also fenced if no source can tell, as Apache's
    rebuild does: then no entry can be added twice.
    """
    if known is not None and known.liveness is LedgerLiveness.DEAD:
        return None
    keys = (source.master_key for source in (old, journal, known) if source is not None)
    key = next((key for key in keys if key and any(key)), b"")
    fenced = bool((old and old.fenced) or (journal and journal.fenced) or (known and known.fenced))
    # A ledger that a complete index lacks was created later: its key record shows that the journal has all of it.
    is_new = old_is_complete and journal is not None and journal.master_key is not None
    guessed = not fenced and old is None and not is_new and (known is None or known.fenced is None)
    packet = (old and old.explicit_lac) or None
    if journal is not None and journal.explicit_lac is not None:
        packet = later_lac(packet, journal.explicit_lac)
    return LedgerData(True, fenced or guessed, key, packet, old.limbo if old else None), guessed


def later_lac(old: bytes | None, new: bytes) -> bytes | None:
    """Return the LAC packet with the higher LAC; an unreadable packet does not count."""
    try:
        lac = read_lac_header(new).last_add_confirmed
    except BkctlError:
        return old
    try:
        return new if old is None or read_lac_header(old).last_add_confirmed <= lac else old
    except BkctlError:
        return new


def read_log_entries(path: Path, findings: RepairFindings) -> Iterator[tuple[list[LedgerId], list[int], list[int]]]:
    """Yield the entries of a log as columns: ledgers, entry ids, locations. Stop at damage, and note it."""
    log_id = log_id_of(path.name)
    assert log_id is not None
    first = pack_location(log_id, RECORD_SIZE.size)
    try:
        with EntryLogReader.open(path) as reader:
            for batch in reader.batches():
                if batch.type is RecordType.ENTRY:
                    yield batch.ledgers, batch.entry_ids, [first + offset for offset in batch.offsets]
    except NotFound:
        return
    except (Corrupt, Unsupported) as error:
        findings.damage.append(DamagedFile(path, error))


def read_log_ledgers(path: Path, findings: RepairFindings) -> set[LedgerId]:
    """Return the ledgers of a log: from its ledgers map if that is sound, else from its entries."""
    try:
        with EntryLogReader.open(path) as reader:
            sizes = reader.ledgers_map()
            if sizes is not None:
                return {ledger for ledger in sizes if is_ledger(ledger)}
    except NotFound:
        return set()
    except (Corrupt, Unsupported):
        pass  # The scan reports the damage.
    found: set[LedgerId] = set()
    for ledgers, _, _ in read_log_entries(path, findings):
        found.update(ledgers)
    return {ledger for ledger in found if is_ledger(ledger)}


class DamagedLogs(ExitStack):
    """Logs that a scan could not read to their end: confirms entries of an old index behind the damage.

    Created from the damage found so far. Use as a context manager.
    """

    def __init__(self, damage: Iterable[DamagedFile]) -> None:
        super().__init__()
        self._readers: dict[tuple[bool, int], FileReader] = {}
        for path, _ in damage:
            log_id = log_id_of(path.name)
            if log_id is not None:
                scoped = path.parent.name == SCOPED_DIRECTORY
                with suppress(BkctlError):
                    reader = self._readers[scoped, log_id] = FileReader(path)
                    self.callback(reader.close)

    def __bool__(self) -> bool:
        return bool(self._readers)

    def has(self, ledger: LedgerId, entry_id: int, location: int) -> bool:
        """Return True if one of these logs has the whole entry at `location`, or cannot be read there.

        An entry that the disk refuses stays in the index: else the bookie would answer that it never had the entry.
        """
        log_id, offset = unpack_location(location)
        reader = self._readers.get((ledger.is_scoped, log_id))
        if reader is None or offset < RECORD_SIZE.size:
            return False
        try:
            head = reader.read(offset - RECORD_SIZE.size, RECORD_SIZE.size + IDS_V2.size)
        except Corrupt:
            return True
        if len(head) < RECORD_SIZE.size + BODY_SIZE_MIN:
            return False
        (size,) = RECORD_SIZE.unpack_from(head)
        if not BODY_SIZE_MIN <= size <= min(RECORD_SIZE_BYTES_MAX, reader.size() - offset):
            return False
        with suppress(CorruptRecord, Unsupported):
            record = read_record(head, RECORD_SIZE.size, len(head) - RECORD_SIZE.size, offset, reader.name)
            return record.ledger == ledger and record.entry_id == entry_id
        return False


class IndexTarget(Protocol):
    """A new index that gets entries: a database of locations, or index files."""

    def put_all(self, entries: Iterable[IndexedEntry], /) -> int:
        """Set the locations of entries; a later one wins. Return their number."""

    def get(self, ledger: LedgerId, entry_id: int, /) -> int:
        """Return the location of an entry; 0 if the entry is missing."""


@dataclass
class IndexRepair:
    """One repair of a bookie's index; `_metadata` is None without a metadata store.

    `_progress` gets the number of bytes that were read. A dry run has no target: it counts copies of entries by ledger
    (`counted`), and keeps each ledger's last entry id.
    """

    _files: Files
    _metadata: LedgerFactsLookup | None
    _progress: Progress
    dry_run: bool
    findings: RepairFindings = field(init=False, default_factory=RepairFindings)
    counted: Counter[LedgerId] = field(init=False, default_factory=Counter)
    last_entry_ids: dict[LedgerId, int] = field(init=False, default_factory=dict)
    _known: dict[LedgerId, LedgerFacts] = field(init=False, default_factory=dict)

    def ask(self, ledgers: Iterable[LedgerId]) -> None:
        """Ask the metadata store about ledgers, once for each."""
        if self._metadata is not None and (unknown := {ledger for ledger in ledgers if ledger not in self._known}):
            self._known.update(self._metadata(sorted(unknown)))

    def known(self, ledger: LedgerId) -> LedgerFacts | None:
        """Return the facts of the metadata store about a ledger; None without a store."""
        self.ask([ledger])
        return self._known.get(ledger)

    def _count(self, entries: Iterable[IndexedEntry]) -> None:
        for ledger, entry_id, _ in entries:
            self.counted[ledger] += 1
            self.last_entry_ids[ledger] = max(self.last_entry_ids.get(ledger, -1), entry_id)

    def copy_entries(
        self,
        logs: Iterable[Path],
        target: IndexTarget | None,
        choose: Callable[[set[LedgerId]], set[LedgerId]],
        old_entries: Callable[[DamagedLogs], Iterable[IndexedEntry]],
    ) -> Counter[LedgerId]:
        """Put the entries of `logs` into `target` whose ledgers `choose` returns of those it gets.

        The target also gets the entries behind damage in these logs that only the old index knows, as `old_entries`
        yields them; returns their numbers by ledger.
        """
        put_all = self._count if target is None else target.put_all
        damaged_before = len(self.findings.damage)
        for log in logs:
            for batch in read_log_entries(log, self.findings):
                found = set(batch[0])
                wanted = choose(found)
                rows = zip(*batch, strict=True)
                put_all(rows if len(wanted) == len(found) else (row for row in rows if row[0] in wanted))
            self._progress(size_of(log))
        saved: Counter[LedgerId] = Counter()
        with DamagedLogs(self.findings.damage[damaged_before:]) as damaged:
            for entry in old_entries(damaged):
                if choose({entry[0]}) and not (target and target.get(*entry[:2])):
                    put_all([entry])
                    saved[entry[0]] += 1
        return saved


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it is missing."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
