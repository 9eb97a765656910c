"""The entries of entry logs as a repair indexes them, and entries behind damage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from bkctl.errors import BkctlError, Corrupt, NotFound, Unsupported
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.windows import FileReader
from bkctl.formats.entry_log import log_id_of, pack_location, unpack_location
from bkctl.formats.names import SCOPED_DIRECTORY
from bkctl.formats.record import BODY_SIZE_MIN, IDS_V1, IDS_V2, RECORD_SIZE, RECORD_SIZE_BYTES_MAX, RecordType
from bkctl.ids import LedgerId
from bkctl.repair.findings import DamagedFile, RepairFindings
from bkctl.repair.ledger_facts import is_ledger


def read_log_entries(path: Path, findings: RepairFindings) -> Iterator[tuple[list[LedgerId], list[int], list[int]]]:
    """Yield the entries of a log as columns: ledgers, entry ids, locations. Stop at damage, and note it."""
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
            data = reader.read(offset - RECORD_SIZE.size, RECORD_SIZE.size + IDS_V2.size)
        except Corrupt:
            return True
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
