"""RocksDB's log format, in MANIFEST files and write-ahead logs, as far as needed to find damage.

    file     blocks of 32 KiB
    block    records … | zeros where the rest is too small for a record header
    record   checksum u32 | size u16 | type u8 | data[size]             all little-endian
             types 5 to 8 and 11 have the number of their log, u32, before the data (and in the size)
    checksum of type and data, CRC32C, rotated right by 15 bits, plus 0xA282EAD8

Source: RocksDB's "Write Ahead Log File Format".
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from bkctl.errors import CorruptRecord

BLOCK_SIZE: Final = 32 << 10
MANIFEST_NAME_PREFIX: Final = "MANIFEST-"

_HEADER: Final = Struct("<IHB")
_CHECKSUM_DELTA: Final = 0xA282EAD8


def manifest_name(current: bytes, where: str = "") -> str:
    """Return the name of the MANIFEST in the content of the file `CURRENT`. Raises CorruptRecord."""
    name = current.decode("ascii", "replace")
    number = name.removeprefix(MANIFEST_NAME_PREFIX).removesuffix("\n")
    if name != f"{MANIFEST_NAME_PREFIX}{number}\n" or not number.isdecimal():
        raise CorruptRecord("CURRENT does not name a MANIFEST", offset=0, where=where)
    return name[:-1]


def check_block(block: bytes, offset: int, *, last: bool, where: str = "") -> bool:
    """Check the records of a block at file byte `offset`; return whether the log continues after it.

    In the `last` block a record cut short by the end of the file ends the log, and so do zeros: RocksDB stopped, or
    still writes, there. Raises CorruptRecord at the first invalid record.
    """
    from google_crc32c import value as crc32c

    at = 0
    while at + _HEADER.size <= len(block):
        checksum, size, kind = _HEADER.unpack_from(block, at)
        end = at + _HEADER.size + size
        if checksum == size == kind == 0:
            # Space allocated ahead: only zeros may follow.
            rest = block[at:].lstrip(b"\0")
            if rest:
                raise CorruptRecord("Zeros, and then data again", offset=offset + at, where=where)
            return False
        if end > len(block):
            if last and end <= BLOCK_SIZE:
                return False
            raise CorruptRecord(f"Record has length {size}", offset=offset + at, where=where)
        actual = crc32c(block[at + 6 : end])
        if ((actual >> 15 | actual << 17) + _CHECKSUM_DELTA) & 0xFFFFFFFF != checksum:
            raise CorruptRecord("Record does not match its checksum", offset=offset + at, where=where)
        at = end
    return not last
