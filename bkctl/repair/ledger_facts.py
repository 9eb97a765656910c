"""The facts about a ledger that a new index states: from the old index, the journals and the metadata store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bkctl.errors import BkctlError, Corrupt, Unsupported
from bkctl.files.directories import BookieDirectories
from bkctl.files.journal import JournalReader
from bkctl.formats.entry import read_lac_header
from bkctl.formats.index import LedgerData
from bkctl.formats.record import RecordType
from bkctl.ids import I64_MAX, LedgerId
from bkctl.model import LedgerFacts
from bkctl.repair.findings import DamagedFile, Progress, RepairFindings


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


def is_ledger(ledger: LedgerId) -> bool:
    """Return True if a bookie can have a ledger of this id. Ids from 2^63 in scope 0 are marks, not ledgers."""
    return ledger.is_scoped or ledger.ledger_id <= I64_MAX


def decide_ledger_data(
    old: LedgerData | None, journal: JournalFacts | None, known: LedgerFacts | None, *, old_is_complete: bool
) -> tuple[LedgerData, bool]:
    """Return the data of a ledger for a new index, and True if its fence is a guess.

    The master key is taken from the old index, else the journal, else the metadata's password; an empty key accepts
    the next writer's. The ledger is fenced if any source says so. It is also fenced if no source can tell, as Apache's
    rebuild does: then no entry can be added twice.
    """
    key = b""
    for candidate in (old and old.master_key, journal and journal.master_key, known and known.master_key):
        if candidate and any(candidate):
            key = candidate
            break
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
