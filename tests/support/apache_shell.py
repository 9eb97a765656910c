"""Answers of Apache's shell as rows; it says `--------- Lid=7, …` before 4.18, and `Entry {ledgerId=7, …}` since."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

_ATTRIBUTES: Final = re.compile(r"(\w+)=([^,}]*)")
_RECORD_417: Final = re.compile(r"^-+ Lid=(-?\d+), Eid=(-?\d+), ByteOffset=(\d+), EntrySize=(\d+) -+")
_SIZE_417: Final = re.compile(r"^-+ Lid=(-?\d+), TotalSizeOfEntriesOfLedger=(\d+)")
_LOCATION: Final = re.compile(r"^entry (\d+)\t:\t(?:\(log: ?(\d+), pos: (\d+)\)|N/A)")

_TYPES: Final = {-0x1000: "ledgerKey", -0x2000: "fence", -0x4000: "forceLedger", -0x8000: "explicitLac"}


def _record(ledger_id: str, entry_id: str, offset: str, size: str) -> dict[str, Any]:
    """One row. Apache has words for ledger keys and fences only, so `type` comes from the entry id."""
    kind = _TYPES.get(int(entry_id), "entry")
    return {
        "type": kind,
        "ledgerId": str(int(ledger_id) % (1 << 64)),
        "entryId": int(entry_id),
        "offset": int(offset),
        "recordSize": int(size),
    }


def records(text: str) -> list[dict[str, Any]]:
    """The rows of `readjournal` and `readlog`: type, ledgerId, entryId, offset (of the size field), recordSize.

    Entries also have lastAddConfirmed, ledger keys masterKey (hex).
    """
    rows: list[dict[str, Any]] = []
    for line in text.splitlines():
        if line.startswith(("Entry {", "MasterKey {")):
            found = dict(_ATTRIBUTES.findall(line))
            if "position" in found:
                rows.append(_record(found["ledgerId"], found["entryId"], found["position"], found["entrySize"]))
            elif "masterKey" in found:
                rows[-1]["masterKey"] = found["masterKey"]
            elif rows[-1]["type"] == "entry":
                rows[-1]["lastAddConfirmed"] = int(found["lastAddConfirmed"])
        elif match := _RECORD_417.match(line):
            rows.append(_record(*match.groups()))
        elif line.startswith("MasterKey:"):
            rows[-1]["masterKey"] = line.split()[1]
        elif line.startswith("LastConfirmed:") and rows[-1]["type"] == "entry":
            rows[-1]["lastAddConfirmed"] = int(line.split()[1])
    return rows


def journal_version(text: str) -> int | None:
    """The version that `readjournal` names; None where the journal has no record."""
    found = re.search(r"Journal Version (?:: |\{journalVersion=)(\d+)", text)
    return int(found[1]) if found else None


def log_metadata(text: str) -> dict[str, int]:
    """The bytes of each ledger in `readlogmetadata`: unsigned ledger id → bytes."""
    return {str(int(ledger_id) % (1 << 64)): int(size) for ledger_id, size in _log_sizes(text)}


def _log_sizes(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if line.startswith("Size of ledger's entries {"):
            found = dict(_ATTRIBUTES.findall(line))
            yield found["ledgerId"], found["size"]
        elif match := _SIZE_417.match(line):
            yield match[1], match[2]


def locations(text: str) -> dict[int, tuple[int, int]]:
    """The entries in `ledger`: entry id → (log id, position as the index has it, 4 behind the size field's offset)."""
    found = {}
    for line in text.splitlines():
        if (match := _LOCATION.match(line)) and match[2] is not None:
            found[int(match[1])] = (int(match[2]), int(match[3]))
    return found


def index_header(text: str) -> dict[str, Any]:
    """masterKey (hex) and fenced, as `ledger -m` prints them for an index file."""
    key = re.search(r"^master key +: *(\S*)", text, re.MULTILINE)
    fenced = re.search(r"^isFenced +: *(true|false)", text, re.MULTILINE)
    assert key is not None, text
    assert fenced is not None, text
    return {"masterKey": key[1], "fenced": fenced[1] == "true"}


def last_mark(text: str) -> tuple[int, int]:
    """(journal id, offset) of `lastmark`."""
    found = re.search(r"Journal Id - (\d+)\(\w+\.txn\), Pos - (\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def last_marks(text: str) -> list[tuple[int, int]]:
    """(journal id, offset) of each journal directory in `lastmark`, in their order."""
    found = re.findall(r"Journal Id - (\d+)\(\w+\.txn\), Pos - (\d+)", text)
    return [(int(journal_id), int(offset)) for journal_id, offset in found]
