"""A bookie's files, made from the formats: one ledger of scope 0, one of scope 7."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bkctl.formats import entry_log, index, journal
from bkctl.formats.entry import DigestManager, DigestType, master_key
from bkctl.formats.record import record_of
from bkctl.ids import LedgerId

PLAIN: Final = LedgerId(0, 5)
SCOPED: Final = LedgerId(7, 5)
PAYLOADS: Final = (b"one", b"", b"three\x1b[31m")
KEY: Final = master_key(b"secret")


def entries(ledger: LedgerId) -> list[bytes]:
    digest = DigestManager(ledger, DigestType.CRC32C, b"secret")
    length, sealed = 0, []
    for entry_id, payload in enumerate(PAYLOADS):
        length += len(payload)
        sealed.append(digest.seal(entry_id, entry_id - 1, length, payload) + payload)
    return sealed


def lac_packet(ledger: LedgerId) -> bytes:
    return DigestManager(ledger, DigestType.CRC32C, b"secret").seal_lac(1)


def journal_bytes(version: int, ledger: LedgerId) -> bytes:
    data = journal.write_header(version) + journal.ledger_key_record(ledger, KEY)
    for entry in entries(ledger):
        data += record_of(entry)
    data += journal.write_padding(len(data))
    return data + journal.fence_record(ledger) + journal.explicit_lac_record(ledger, lac_packet(ledger))


def log_bytes(version: int, ledger: LedgerId, *, closed: bool) -> tuple[bytes, list[int]]:
    """The log, and the offset of each record."""
    body, offsets = b"", []
    for entry in entries(ledger):
        offsets.append(entry_log.HEADER_SIZE + len(body))
        body += len(entry).to_bytes(4, "big") + entry
    if not closed:
        return entry_log.write_header(version) + body, offsets
    header = entry_log.write_header(version, entry_log.HEADER_SIZE + len(body), 1)
    return header + body + b"".join(entry_log.write_ledgers_map({ledger: len(body)}, version)), offsets


def make(base: Path) -> None:
    """Directories `journal` and `ledgers` below `base`."""
    current = base / "journal" / "current"
    current.mkdir(parents=True)
    (current / "a.txn").write_bytes(journal_bytes(6, PLAIN))
    (current / "b.txn").write_bytes(journal_bytes(7, SCOPED))
    current = base / "ledgers" / "current"
    (current / "scoped").mkdir(parents=True)
    for directory, version, ledger, closed in ((current, 1, PLAIN, True), (current / "scoped", 2, SCOPED, False)):
        data, offsets = log_bytes(version, ledger, closed=closed)
        (directory / "1f.log").write_bytes(data)
        path = current / index.index_path(ledger)
        path.parent.mkdir(parents=True)
        locations = [entry_log.pack_location(0x1F, offset + 4) for offset in offsets]
        locations.insert(1, 0)
        slots = b"".join(map(index.write_location, locations))
        header = index.write_header(KEY, fenced=True, explicit_lac=lac_packet(ledger))
        path.write_bytes(header + slots)
    (current / "lastMark").write_bytes(journal.LogMark(0xB, 512).serialize())
