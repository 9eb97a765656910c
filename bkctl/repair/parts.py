"""What repairs of a bookie's indexes share: what is known of ledgers, the entries in logs, and the swap at the end.

A repair builds beside the old files, has it all on disk, and swaps names at the end; the old stays as a backup with
the time in its name. A crash leaves the old or the new.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from bkctl.disk import Files
from bkctl.errors import BkctlError, Corrupt, NotFound, Unsupported, UsageError
from bkctl.files.directories import BookieDirectories, current_of
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.journal import JournalReader
from bkctl.files.windows import FileReader
from bkctl.formats.entry_log import log_id_of, pack_location, unpack_location
from bkctl.formats.index import LedgerData
from bkctl.formats.metadata import Cookie
from bkctl.formats.names import COOKIE_NAME, ROCKSDB_NAMES, SCOPED_DIRECTORY, UNFINISHED_SUFFIX
from bkctl.formats.record import BODY_SIZE_MIN, IDS_V1, IDS_V2, RECORD_SIZE, RECORD_SIZE_BYTES_MAX, RecordType
from bkctl.ids import I64_MAX, LedgerId
from bkctl.model import LedgerFacts

#: Told the bytes that are done.
Progress = Callable[[int], None]
_NO_EXCHANGE: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM})


class Damage(NamedTuple):
    """A file that could not be read to its end, and why. What stands before is used."""

    path: Path
    error: BkctlError


@dataclass(slots=True)
class Findings:
    """What a repair found out besides its result: damaged files, and what the operator should know, in words."""

    damage: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


# --- the directories ------------------------------------------------------------------------------------------------


class Storage(NamedTuple):
    """One ledger directory and the index directory that goes with it, both `current`; `number` is its place."""

    number: int
    ledger_dir: Path
    index_dir: Path

    def logs(self, *, scoped: bool) -> list[Path]:
        """Its entry logs by id."""
        directory = self.ledger_dir / SCOPED_DIRECTORY if scoped else self.ledger_dir
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            return []
        ids = {name: log_id for name in names if (log_id := log_id_of(name)) is not None}
        return [directory / name for name in sorted(ids, key=lambda name: ids[name])]


class BookieLayout(NamedTuple):
    """A bookie's directories in the order in which its configuration names them; all are `current`."""

    journal_dirs: tuple[Path, ...]
    ledger_dirs: tuple[Path, ...]
    index_dirs: tuple[Path, ...]

    @property
    def all(self) -> list[Path]:
        """Every directory once."""
        return list(dict.fromkeys((*self.journal_dirs, *self.ledger_dirs, *self.index_dirs)))

    def storages(self) -> list[Storage]:
        """The ledger directories with their index directories. Raises UsageError where they are not as many."""
        if len(self.ledger_dirs) != len(self.index_dirs):
            raise UsageError(
                f"{len(self.ledger_dirs)} ledger directories and {len(self.index_dirs)} index directories: "
                "DbLedgerStorage has one for each"
            )
        pairs = zip(self.ledger_dirs, self.index_dirs, strict=True)
        return [Storage(number, *pair) for number, pair in enumerate(pairs)]

    def logs(self, *, scoped: bool) -> list[Path]:
        """All entry logs by id, as Interleaved and SortedLedgerStorage have them: one id space."""
        found = [path for each in self.ledger_dirs for path in Storage(0, each, each).logs(scoped=scoped)]
        return sorted(found, key=lambda path: log_id_of(path.name) or 0)


def layout_of(directories: BookieDirectories) -> BookieLayout:
    """The directories of a bookie, those of a configuration as it orders them, others as their cookie does.

    Raises NotFound for one that is missing; UsageError where it cannot be told what they are.
    """
    journal_dirs = tuple(dict.fromkeys(map(current_of, directories.journal_dirs)))
    ledger_dirs = tuple(dict.fromkeys(map(current_of, directories.ledger_dirs)))
    index_dirs = tuple(dict.fromkeys(map(current_of, directories.index_dirs)))
    for each in (*ledger_dirs, *index_dirs):
        for name in ROCKSDB_NAMES:
            # What looks like a database there is a directory with all of a bookie's logs.
            if (each / name / "current").is_dir():
                raise UsageError(
                    f"{each} is no directory of a bookie, but has one in it: {each / name}", hint="name that one"
                )
    if directories.journal_dirs != directories.ledger_dirs:
        return BookieLayout(journal_dirs, ledger_dirs, index_dirs)
    by_cookie = _layout_by_cookie(ledger_dirs)
    if by_cookie is not None:
        return by_cookie
    journals = tuple(each for each in ledger_dirs if any(name.endswith(".txn") for name in os.listdir(each)))
    rest = tuple(each for each in ledger_dirs if each not in journals) or ledger_dirs
    others = tuple(each for each in ledger_dirs if _has_ledgers(each)) or rest
    if len(others) > 1:
        listed = ", ".join(map(str, others))
        raise UsageError(f"Which of {listed} come first, no cookie says", hint="use --conf bk_server.conf")
    return BookieLayout(journals, others, others)


def _has_ledgers(current: Path) -> bool:
    """Whether entry logs, a mark of the journal, or an index lie in a directory."""
    for name in os.listdir(current):
        if log_id_of(name) is not None or name.startswith("lastMark") or name in ROCKSDB_NAMES:
            return True
    return next(BookieDirectories(index_dirs=[current]).indexes(), None) is not None


def _layout_by_cookie(given: tuple[Path, ...]) -> BookieLayout | None:
    for current in given:
        try:
            cookie = Cookie.parse((current / COOKIE_NAME).read_bytes())
        except (OSError, BkctlError):
            continue

        def find(named: tuple[str, ...]) -> tuple[Path, ...] | None:
            found = []
            for each in named:
                place = Path(each) / "current"
                same = [one for one in given if place.is_dir() and one.samefile(place)]
                if not same:
                    return None
                found.append(same[0])
            return tuple(found)

        journals = tuple(one for each in cookie.journal_dirs for one in find((each,)) or ())
        ledgers = find(cookie.ledger_dirs)
        indexes = find(cookie.index_dirs) if cookie.index_dirs else ledgers
        if ledgers and indexes:
            return BookieLayout(journals, ledgers, indexes)
    return None


# --- what is known of ledgers ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class JournalFacts:
    """What the journals say of one ledger; None where they say nothing. `explicit_lac` is the last LAC packet."""

    master_key: bytes | None = None
    fenced: bool = False
    explicit_lac: bytes | None = None


def read_journals(directories: Iterable[Path], findings: Findings, progress: Progress) -> dict[LedgerId, JournalFacts]:
    """Every ledger in the journals of `directories` (each `current`), and what they say of it.

    Journals of version 7 that a clean stop set aside count too. What cannot be read is noted as damage.
    """
    facts: dict[LedgerId, JournalFacts] = {}
    for directory in directories:
        found = BookieDirectories(journal_dirs=[directory]).journals()
        for file in sorted(found, key=lambda each: each.id if isinstance(each.id, int) else 0):
            try:
                with JournalReader.open(file.path) as reader:
                    _read_journal(reader, facts)
            except (Corrupt, Unsupported) as error:
                findings.damage.append(Damage(file.path, error))
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


def is_ledger(ledger: LedgerId) -> bool:
    """Whether a bookie can have a ledger of this id: those of 2^63 and more in scope 0 are marks, not ledgers."""
    return ledger.is_scoped or ledger.ledger_id <= I64_MAX


def decide(
    old: LedgerData | None, journal: JournalFacts | None, known: LedgerFacts | None, *, old_is_complete: bool
) -> tuple[LedgerData, bool]:
    """What a new index should say of a ledger, and whether its fence is a guess.

    The master key is the old index's, else the journal's, else that of the metadata's password, else empty: then the
    next writer's is taken. Fenced is what one of them says is; where nobody can know, it is fenced too, as Apache's
    rebuild has it: no entry can be added twice then.
    """
    key = b""
    for each in (old and old.master_key, journal and journal.master_key, known and known.master_key):
        if each and any(each):
            key = each
            break
    fenced = bool((old and old.fenced) or (journal and journal.fenced) or (known and known.fenced))
    # A ledger that a whole index does not have began in the journal, and its key record says that it is all there.
    is_new = old_is_complete and journal is not None and journal.master_key is not None
    guessed = not fenced and old is None and not is_new and (known is None or known.fenced is None)
    packet = (old and old.explicit_lac) or None
    if journal is not None and journal.explicit_lac is not None:
        packet = later_lac(packet, journal.explicit_lac)
    return LedgerData(True, fenced or guessed, key, packet, old.limbo if old else None), guessed


def later_lac(old: bytes | None, new: bytes) -> bytes | None:
    """Of two LAC packets the one with the higher LAC; one that cannot be read does not count."""
    from bkctl.formats.entry import read_lac_header

    try:
        lac = read_lac_header(new).last_add_confirmed
    except BkctlError:
        return old
    try:
        return new if old is None or read_lac_header(old).last_add_confirmed <= lac else old
    except BkctlError:
        return new


# --- entries in logs ------------------------------------------------------------------------------------------------


def entries_of(path: Path, findings: Findings) -> Iterator[tuple[list[LedgerId], list[int], list[int]]]:
    """Yield the entries of a log as columns: ledgers, entry ids, locations. Damage ends it, and is noted."""
    log_id = log_id_of(path.name)
    assert log_id is not None
    first = pack_location(log_id, RECORD_SIZE.size)
    try:
        with EntryLogReader.open(path) as reader:
            for batch in reader.batches():
                if batch.types is None or batch.types[0] is RecordType.ENTRY:
                    yield batch.ledgers, batch.entry_ids, [first + offset for offset in batch.offsets]
    except NotFound:
        return
    except (Corrupt, Unsupported) as error:
        findings.damage.append(Damage(path, error))


def ledgers_of(path: Path, findings: Findings) -> set[LedgerId]:
    """The ledgers of a log, from its ledgers map if it has a good one, else from its entries."""
    try:
        with EntryLogReader.open(path) as reader:
            sizes = reader.ledgers_map()
            if sizes is not None:
                return {ledger for ledger in sizes if is_ledger(ledger)}
    except NotFound:
        return set()
    except (Corrupt, Unsupported):
        pass  # The scan says what is wrong.
    found: set[LedgerId] = set()
    for ledgers, _, _ in entries_of(path, findings):
        found.update(ledgers)
    return {ledger for ledger in found if is_ledger(ledger)}


class DamagedLogs:
    """The logs that a scan could not read to their end: what an old index knows of them is looked up there.

    A context manager; made from the damage that was found so far.
    """

    def __init__(self, damage: Iterable[Damage]) -> None:
        self._readers: dict[tuple[bool, int], FileReader | None] = {}
        for each in damage:
            log_id = log_id_of(each.path.name)
            if log_id is not None:
                scoped = each.path.parent.name == SCOPED_DIRECTORY
                with suppress(BkctlError):
                    self._readers[scoped, log_id] = FileReader(each.path)

    def __bool__(self) -> bool:
        return bool(self._readers)

    def __enter__(self) -> DamagedLogs:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            if reader is not None:
                reader.close()

    def has(self, ledger: LedgerId, entry_id: int, location: int) -> bool:
        """Whether `location` is in one of these logs, and that entry stands there, whole."""
        log_id, offset = unpack_location(location)
        reader = self._readers.get((ledger.is_scoped, log_id))
        if reader is None or offset < RECORD_SIZE.size:
            return False
        data = reader.read(offset - RECORD_SIZE.size, RECORD_SIZE.size + IDS_V2.size)
        if len(data) < RECORD_SIZE.size + BODY_SIZE_MIN:
            return False
        (size,) = RECORD_SIZE.unpack_from(data)
        if not BODY_SIZE_MIN <= size <= min(RECORD_SIZE_BYTES_MAX, reader.size() - offset):
            return False
        if not ledger.is_scoped:
            return bool(IDS_V1.unpack_from(data, RECORD_SIZE.size) == (ledger.ledger_id, entry_id))
        if len(data) < RECORD_SIZE.size + IDS_V2.size:
            return False
        flags, *ids = IDS_V2.unpack_from(data, RECORD_SIZE.size)
        return flags >> 4 == 0xA and ids == [ledger.scope_id, ledger.ledger_id, entry_id]


# --- swapping -------------------------------------------------------------------------------------------------------


def time_stamp() -> str:
    """The time for the names of backups: `20261121T064548Z`."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def backup_name(path: Path, stamp: str) -> Path:
    """Where the old `path` is kept: beside it, with the time; with a number where two fall into one second."""
    backup = path.with_name(f"{path.name}.backup-{stamp}")
    number = 1
    while backup.exists():
        number += 1
        backup = path.with_name(f"{path.name}.backup-{stamp}-{number}")
    return backup


def unfinished(path: Path) -> Path:
    """Where the new `path` is built, emptied of what a crash left there. Raises OSError."""
    building = path.with_name(path.name + UNFINISHED_SUFFIX)
    shutil.rmtree(building, ignore_errors=True)
    return building


def swap(files: Files, target: Path, stamp: str) -> Path | None:
    """Put the whole new directory that was built for `target` in its place in one step; returns the old one's backup.

    None where there was no old one. At any moment `target` is the old or the new. Where the file system cannot
    exchange two names there is an instant without any. Raises OSError.
    """
    building = target.with_name(target.name + UNFINISHED_SUFFIX)
    sync_tree(building, files)
    if not target.exists():
        files.rename(building, target)
        files.sync_directory(target.parent)
        return None
    backup = backup_name(target, stamp)
    put_in_place(files, building, target, backup)
    files.sync_directory(target.parent)
    return backup


def put_in_place(files: Files, new: Path, target: Path, backup: Path) -> None:
    """Let the file or directory `new` take the place of `target`, and that one the name `backup`.

    The names need a sync. Raises OSError.
    """
    # The new one gets the old one's name to be first: what is called unfinished is never the old one.
    files.rename(new, backup)
    try:
        files.exchange(backup, target)
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            raise
        files.rename(backup, new)
        files.rename(target, backup)
        files.rename(new, target)


def sync_tree(directory: Path, files: Files) -> None:
    """Have all files below a directory, and their names, on disk."""
    for place, _, names in os.walk(directory):
        for name in names:
            with files.open_to_read(Path(place, name)) as file:
                os.fsync(file.fd)
        files.sync_directory(Path(place))
    files.sync_directory(directory.parent)
