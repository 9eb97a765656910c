"""The contents of a new index, as a repair finds them: facts about ledgers, and the entries of entry logs.

`IndexRepair` gathers them for a target: a database of locations, or index files.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from bkctl.columns import counted
from bkctl.disk import Files
from bkctl.errors import BkctlError, Corrupt, NotFound, Unsupported
from bkctl.files.directories import BookieDirectories
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.index import LedgerIndexReader
from bkctl.files.journal import JournalReader
from bkctl.formats.entry import read_lac_header
from bkctl.formats.entry_log import HEADER_SIZE, file_name, log_id_of, pack_location, unpack_location
from bkctl.formats.index import LedgerData
from bkctl.formats.record import RECORD_SIZE, RecordType
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
    """The findings of a repair besides its result: damaged files, each once, and notes for the operator."""

    damage: list[DamagedFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: The end of the part that was read of each entry log.
    ends: dict[Path, int] = field(default_factory=dict)

    def add_damage(self, path: Path, error: BkctlError) -> None:
        """Note a damaged file, unless it is noted already."""
        if all(damage.path != path for damage in self.damage):
            self.damage.append(DamagedFile(path, error))

    def unread(self, logs: Iterable[Path], old: Iterable[IndexedEntry]) -> Iterator[IndexedEntry]:
        """Yield the entries of an old index that are in no part of `logs` that was read."""
        ends = {log_id_of(log.name): self.ends.get(log, HEADER_SIZE) for log in logs}
        for entry in old:
            log_id, offset = unpack_location(entry[2])
            if offset > ends.get(log_id, HEADER_SIZE):
                yield entry


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
                findings.add_damage(file.path, error)
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
            try:
                for batch in reader.batches():
                    if batch.type is RecordType.ENTRY:
                        yield batch.ledgers, batch.entry_ids, [first + offset for offset in batch.offsets]
            finally:
                findings.ends[path] = reader.position
    except NotFound:
        return
    except (Corrupt, Unsupported) as error:
        findings.add_damage(path, error)


def read_log_ledgers(path: Path, findings: RepairFindings, *, trusts_map: bool = False) -> set[LedgerId]:
    """Return the ledgers of a log: from its ledgers map, and from its entries unless `trusts_map`."""
    sizes: Mapping[LedgerId, int] | None = None
    with suppress(NotFound, Corrupt, Unsupported), EntryLogReader.open(path) as reader:
        sizes = reader.ledgers_map()
    found = set(sizes or ())
    # The map has no checksum: a flipped bit makes one ledger another.
    if sizes is None or not trusts_map:
        for ledgers, _, _ in read_log_entries(path, findings):
            found.update(ledgers)
    return {ledger for ledger in found if is_ledger(ledger)}


class IndexTarget(Protocol):
    """A new index that gets entries: a database of locations, or index files."""

    def put_all(self, entries: Iterable[IndexedEntry], /) -> object:
        """Set the locations of entries; a later one wins."""

    def get(self, ledger: LedgerId, entry_id: int, /) -> int:
        """Return the location of an entry; 0 if the entry is missing."""


class EntrySet:
    """The index target of a dry run: the entries, without their locations, a bit for each."""

    def __init__(self) -> None:
        self._pages: defaultdict[tuple[LedgerId, int], int] = defaultdict(int)

    def put_all(self, entries: Iterable[IndexedEntry]) -> None:
        """Add entries."""
        for ledger, entry_id, _ in entries:
            self._pages[ledger, entry_id >> 10] |= 1 << (entry_id & 1023)

    def get(self, ledger: LedgerId, entry_id: int) -> int:
        """Return 1 for an entry that was added, else 0."""
        return self._pages.get((ledger, entry_id >> 10), 0) >> (entry_id & 1023) & 1

    def extents(self) -> dict[LedgerId, tuple[int, int]]:
        """Return each ledger's number of entries and its last entry id."""
        found: dict[LedgerId, tuple[int, int]] = {}
        for (ledger, page), bits in self._pages.items():
            count, last = found.get(ledger, (0, -1))
            found[ledger] = count + bits.bit_count(), max(last, (page << 10) + bits.bit_length() - 1)
        return found


@dataclass
class IndexRepair:
    """One repair of a bookie's index; `_metadata` is None without a metadata store.

    `_progress` gets the number of bytes that were read.
    """

    _files: Files
    _metadata: LedgerFactsLookup | None
    _progress: Progress
    dry_run: bool
    findings: RepairFindings = field(init=False, default_factory=RepairFindings)
    _known: dict[LedgerId, LedgerFacts] = field(init=False, default_factory=dict)

    def ask(self, ledgers: Iterable[LedgerId]) -> None:
        """Ask the metadata store about ledgers, once for each."""
        if self._metadata is not None and (unknown := {ledger for ledger in ledgers if ledger not in self._known}):
            self._known.update(self._metadata(sorted(unknown)))

    def known(self, ledger: LedgerId) -> LedgerFacts | None:
        """Return the facts of the metadata store about a ledger; None without a store."""
        self.ask([ledger])
        return self._known.get(ledger)

    def copy_entries(
        self,
        logs: Sequence[Path],
        home: Path,
        target: IndexTarget,
        choose: Callable[[set[LedgerId]], set[LedgerId]],
        old: Iterable[IndexedEntry],
    ) -> Counter[LedgerId]:
        """Put the entries of `logs` into `target` whose ledgers `choose` returns of those it gets.

        The target also gets the entries of the old index, `old`, that no log has in the part that was read: they are
        behind damage, or in a log that is missing or ends before them. Without them the bookie would answer that it
        never had them, and recovery would end their ledgers there. Returns their numbers by ledger. `home` is the
        directory of missing logs.
        """
        for log in logs:
            for batch in read_log_entries(log, self.findings):
                found = set(batch[0])
                wanted = choose(found)
                rows = zip(*batch, strict=True)
                target.put_all(rows if len(wanted) == len(found) else (row for row in rows if row[0] in wanted))
            self._progress(size_of(log))
        saved: Counter[LedgerId] = Counter()
        lost: Counter[str] = Counter()
        for entry in self.findings.unread(logs, old):
            if choose({entry[0]}) and not target.get(*entry[:2]):
                target.put_all([entry])
                saved[entry[0]] += 1
                lost[file_name(unpack_location(entry[2])[0])] += 1
        paths = {log.name: log for log in logs if log in self.findings.ends}
        for name, count in sorted(lost.items()):
            fault = "ends before them" if name in paths else "is missing"
            entries = counted(count, "entry of the old index is", "entries of the old index are")
            path = paths.get(name, home / name)
            self.findings.add_damage(path, Corrupt(f"{entries} in {path}, which {fault}"))
        return saved


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it is missing."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
