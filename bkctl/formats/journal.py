"""The journal: file header, records, alignment, special records, and the last mark.

    file     header | records …                       header: none (version 1), 8 bytes (2 to 4), 512 bytes (5 to 7)
    header   "BKLG" | version i32 | tag[8] | zeros    tag: random in version 7, zeros before it
    record   size i32 | body[size]                    size 0: the end; see `record`
    padding  -0x100 i32 | count i32 | zeros[count]    version 5 and later
    seal     -0x100 i32 | 16 | tag[8] | start i64     version 7: the padding that ends the group from byte `start`

No client knows the tag, so a seal in a payload never passes for one. Versions 2 to 6 are Apache's, byte for byte.

Special records, after their ids (`record.write_ids`): ledger key: size i32 | master key; fence: nothing; explicit LAC:
size i32 | LAC packet. Version 7 is 6 with scoped records. Source: JournalChannel, Journal, LogMark; BP-35.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, NamedTuple

from bkctl.errors import CorruptRecord, Unsupported, UsageError
from bkctl.formats.layout import Buffer, Layout
from bkctl.formats.record import (
    EXPLICIT_LAC_ENTRY_ID,
    FENCE_ENTRY_ID,
    LEDGER_KEY_ENTRY_ID,
    RECORD_SIZE,
    record_of,
    write_ids,
)
from bkctl.ids import LedgerId

MAGIC: Final = b"BKLG"
VERSION_MIN: Final = 1
#: The versions that a bookie writes without scoped ledgers, and with them.
VERSION_CURRENT: Final = 6
VERSION_SCOPED: Final = 7
#: The first versions that may hold padding, and explicit LACs.
VERSION_PADDING: Final = 5
VERSION_EXPLICIT_LAC: Final = 6

HEADER_SIZE_V2: Final = 8
HEADER_SIZE_V5: Final = 512
ALIGNMENT_DEFAULT: Final = 512
PADDING_MASK: Final = -0x100
PADDING_HEADER_SIZE: Final = 8

_FILE_NAME = re.compile(r"([0-9a-fA-F]{1,16})\.txn", re.ASCII)


class JournalHeader(NamedTuple):
    """The first 8 bytes of a journal file of version 2 or later. Source: JournalChannel.writeHeader."""

    magic: Annotated[bytes, "4s"]
    version: Annotated[int, "i"]


HEADER: Final = Layout(JournalHeader)


class Seal(NamedTuple):
    """The last 24 bytes of a group in a file of version 7: padding, with the file's tag and the group's start."""

    mask: Annotated[int, "i"]
    size: Annotated[int, "i"]
    tag: Annotated[bytes, "8s"]
    start: Annotated[int, "q"]


SEAL: Final = Layout(Seal)
TAG_SIZE: Final = 8


def header_size(version: int) -> int:
    """Return the bytes before the first record."""
    return 0 if version < 2 else HEADER_SIZE_V2 if version < VERSION_PADDING else HEADER_SIZE_V5


def write_header(version: int, tag: bytes = b"") -> bytes:
    """Return the header of a journal file of `version` (2 to 7), 8 or 512 bytes; of version 7 with a `tag`."""
    if not 2 <= version <= VERSION_SCOPED:
        raise UsageError(f"Journal version {version} is not 2 to {VERSION_SCOPED}")
    size = header_size(version)
    return (HEADER.pack(JournalHeader(MAGIC, version)) + tag).ljust(size, b"\0")[:size]


def read_header(start: Buffer, where: str = "") -> int:
    """Return the version of a journal file whose first 8 bytes (or fewer, if it is shorter) are `start`.

    A file without the magic, or with fewer than 8 bytes, is version 1. Raises Unsupported for an unknown version.
    """
    if len(start) < HEADER.size or bytes(start[:4]) != MAGIC:
        return VERSION_MIN
    version = HEADER.unpack_from(start).version
    if not VERSION_MIN <= version <= VERSION_SCOPED:
        at = f"{where}: " if where else ""
        raise Unsupported(f"{at}Journal has version {version}, {VERSION_MIN} to {VERSION_SCOPED} are known")
    return version


def read_tag(start: Buffer, version: int) -> bytes:
    """Return the tag in the header of a journal file of `version`, whose first 16 bytes are `start`; empty if none."""
    tag = bytes(start[HEADER.size : HEADER.size + TAG_SIZE]) if version >= VERSION_PADDING else b""
    return tag if any(tag) else b""


def write_padding(position: int, alignment: int = ALIGNMENT_DEFAULT) -> bytes:
    """Return the record that pads a file of `position` bytes to a multiple of `alignment`; empty if it is one.

    Source: Journal.writePaddingBytes.
    """
    gap = -position % alignment
    if gap == 0:
        return b""
    if gap < PADDING_HEADER_SIZE:
        gap += alignment
    count = gap - PADDING_HEADER_SIZE
    return RECORD_SIZE.pack(PADDING_MASK) + RECORD_SIZE.pack(count) + bytes(count)


def write_seal(start: int, end: int, tag: bytes, alignment: int = ALIGNMENT_DEFAULT) -> bytes:
    """Return the padding of a group whose records are at bytes `start` to `end`: zeros, and then its seal."""
    seal = Seal(PADDING_MASK, SEAL.size - PADDING_HEADER_SIZE, tag, start)
    return write_padding(end + SEAL.size, alignment) + SEAL.pack(seal)


def ledger_key_record(ledger: LedgerId, master_key: bytes) -> bytes:
    """Return the record of a ledger's master key, which precedes its first entry; 44 bytes in scope 0, else 53."""
    return record_of(write_ids(ledger, LEDGER_KEY_ENTRY_ID) + RECORD_SIZE.pack(len(master_key)) + master_key)


def fence_record(ledger: LedgerId) -> bytes:
    """Return the record that fences a ledger; 20 bytes in scope 0, else 29."""
    return record_of(write_ids(ledger, FENCE_ENTRY_ID))


def explicit_lac_record(ledger: LedgerId, packet: bytes) -> bytes:
    """Return the record that keeps a ledger's explicit LAC; `packet` is the whole LAC packet."""
    return record_of(write_ids(ledger, EXPLICIT_LAC_ENTRY_ID) + RECORD_SIZE.pack(len(packet)) + packet)


def file_name(journal_id: int) -> str:
    """Return the name of a journal file, `<hex id>.txn`."""
    return f"{journal_id:x}.txn"


def journal_id_of(name: str) -> int | None:
    """Return the id in a journal file's name; None for any other name."""
    match = _FILE_NAME.fullmatch(name)
    return int(match[1], 16) if match else None


class LogMark(NamedTuple):
    """A place in the journal, ordered: everything before it is in ledger storage. Source: LogMark."""

    journal_id: Annotated[int, "q"]
    offset: Annotated[int, "q"]

    def serialize(self) -> bytes:
        """Return the 16 bytes of a `lastMark` file."""
        return LAST_MARK.pack(self)

    @classmethod
    def parse(cls, data: Buffer, where: str = "") -> LogMark:
        """Return the mark in a `lastMark` file. Raises CorruptRecord unless it has 16 bytes and no negative number."""
        if len(data) != LAST_MARK.size:
            raise CorruptRecord(f"Last mark has {len(data)} bytes, not {LAST_MARK.size}", offset=0, where=where)
        mark = LAST_MARK.unpack_from(data)
        if not (mark.journal_id >= 0 and mark.offset >= 0):
            raise CorruptRecord(f"Last mark is ({mark.journal_id}, {mark.offset})", offset=0, where=where)
        return mark


LAST_MARK: Final = Layout(LogMark)


def last_mark_name(journal_index: int = 0, journal_count: int = 1) -> str:
    """Return the name of the last mark's file of the journal directory `journal_index` of `journal_count`."""
    return "lastMark" if journal_count == 1 else f"lastMark.{journal_index}"
