"""A bookie's indexes: ledger index files (Interleaved, Sorted) and the values of DbLedgerStorage's databases.

    index file  header (1024 bytes) | location i64 of entry 0, 1, 2, …        0: no such entry
    header      "BKLE" | version i32 | key size i32 | master key | state bits i32
                | version 1: explicit LAC size i32 | LAC packet | zeros
    ledgers     ledger i64 → LedgerData                 scoped-ledgers     scope | ledger → LedgerData
    locations   ledger i64 | entry i64 → location i64   scoped-locations   scope | ledger | entry i64 → location i64

Source: FileInfo, IndexPersistenceMgr, LedgerMetadataIndex, EntryLocationIndex; BP-35.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from struct import Struct
from typing import Annotated, Final, NamedTuple

from bkctl.errors import Corrupt, CorruptRecord, TruncatedRecord, Unsupported, UsageError
from bkctl.formats.entry import LAC_HEADER_SIZE_V1
from bkctl.formats.layout import Buffer, Layout
from bkctl.ids import LedgerId

#: The largest entry id with a slot in an index file: beyond it, file systems end.
ENTRY_ID_MAX: Final = (1 << 40) - 1

FINGERPRINT: Final = b"BKLE"
HEADER_SIZE: Final = 1024
VERSION_CURRENT: Final = 1
STATE_FENCED: Final = 0x1
SLOT_SIZE: Final = 8
PAGE_SIZE_DEFAULT: Final = 8192
#: Key of the storage flags in the `ledgers` database, which has no ledgers of negative ids.
STORAGE_FLAGS_LEDGER_ID: Final = -0xEEFD
#: Bit of the storage flags: the bookie must check its data before it denies having a ledger or entry.
NEEDS_INTEGRITY_CHECK: Final = 0x1

_INT: Final = Struct(">i")
_LONG: Final = Struct(">q")
STORAGE_FLAGS_KEY: Final = _LONG.pack(STORAGE_FLAGS_LEDGER_ID)
_TWO_LEVELS = re.compile(r"(?:.*/)?([0-9a-f]{1,2})/([0-9a-f]{1,2})/([0-9a-f]{1,16})\.idx", re.ASCII | re.DOTALL)
_FOUR_LEVELS = re.compile(r"(?:.*/)?([0-9a-f]{8})/([0-9a-f]{8})/([0-9a-f]{8})/([0-9a-f]{8})\.idx", re.ASCII | re.DOTALL)


class _FixedHeader(NamedTuple):
    fingerprint: Annotated[bytes, "4s"]
    version: Annotated[int, "i"]
    master_key_size: Annotated[int, "i"]


_FIXED_HEADER: Final = Layout(_FixedHeader)


class IndexHeader(NamedTuple):
    """The header of a ledger's index file; `explicit_lac` is a whole LAC packet. Source: FileInfo."""

    version: int
    master_key: bytes
    state_bits: int
    explicit_lac: bytes | None

    @property
    def fenced(self) -> bool:
        """Return whether the ledger refuses ordinary adds."""
        return bool(self.state_bits & STATE_FENCED)


def read_header(start: Buffer, where: str = "") -> IndexHeader:
    """Return the header in an index file's first 1024 bytes (or fewer, if that is all it has).

    Raises TruncatedRecord, CorruptRecord (wrong fingerprint, impossible length), Unsupported (version).
    """
    if len(start) < _FIXED_HEADER.size:
        raise TruncatedRecord(
            "Ledger index header", offset=0, needed=_FIXED_HEADER.size, present=len(start), where=where
        )
    fingerprint, version, key_size = _FIXED_HEADER.unpack_from(start, 0, where)
    if fingerprint != FINGERPRINT:
        raise CorruptRecord("Ledger index does not begin with BKLE", offset=0, where=where)
    if not 0 <= version <= VERSION_CURRENT:
        at = f"{where}: " if where else ""
        raise Unsupported(f"{at}Ledger index has version {version}, 0 and 1 are known")
    present = min(len(start), HEADER_SIZE)
    state_at = _FIXED_HEADER.size + key_size
    lac_at = state_at + 8
    if not 0 <= key_size <= HEADER_SIZE - _FIXED_HEADER.size - 8:
        raise CorruptRecord(f"Ledger index says {key_size} bytes of master key", offset=8, where=where)
    needed = lac_at if version >= 1 else lac_at - 4
    if present < needed:
        raise TruncatedRecord("Ledger index header", offset=0, needed=needed, present=present, where=where)
    master_key = bytes(start[_FIXED_HEADER.size : state_at])
    (state_bits,) = _INT.unpack_from(start, state_at)
    if version < 1:
        return IndexHeader(version, master_key, state_bits, None)
    (lac_size,) = _INT.unpack_from(start, state_at + 4)
    if lac_size and not LAC_HEADER_SIZE_V1 <= lac_size <= HEADER_SIZE - lac_at:
        raise CorruptRecord(f"Ledger index says {lac_size} bytes of explicit LAC", offset=state_at + 4, where=where)
    if present < lac_at + lac_size:
        raise TruncatedRecord("Explicit LAC", offset=lac_at, needed=lac_size, present=present - lac_at, where=where)
    return IndexHeader(version, master_key, state_bits, bytes(start[lac_at : lac_at + lac_size]) if lac_size else None)


def write_header(
    master_key: bytes, *, fenced: bool = False, explicit_lac: bytes | None = None, version: int = VERSION_CURRENT
) -> bytes:
    """Return the first 1024 bytes of an index file. Raises UsageError when key and packet do not fit."""
    packet = explicit_lac or b""
    data = _FIXED_HEADER.pack(_FixedHeader(FINGERPRINT, version, len(master_key))) + master_key
    data += _INT.pack(STATE_FENCED if fenced else 0)
    if version >= 1:
        data += _INT.pack(len(packet)) + packet
    if len(data) > HEADER_SIZE:
        raise UsageError(f"A ledger index header takes {HEADER_SIZE} bytes, {len(data)} were given")
    return data.ljust(HEADER_SIZE, b"\0")


def slot_offset(entry_id: int) -> int:
    """Return the byte offset of an entry's location in its ledger's index file."""
    return HEADER_SIZE + entry_id * SLOT_SIZE


def index_path(ledger: LedgerId) -> str:
    """Return the path of a ledger's index file below `current`: `12/34/1234.idx`, or four levels for a scope."""
    if ledger.is_scoped:
        name = ledger.qualified_name
        return f"{name[:8]}/{name[8:16]}/{name[16:24]}/{name[24:]}.idx"
    ledger_id = ledger.ledger_id
    return f"{ledger_id >> 8 & 0xFF:x}/{ledger_id & 0xFF:x}/{ledger_id:x}.idx"


def ledger_of_index_path(path: PurePath | str) -> LedgerId | None:
    """Return the ledger whose index file is at `path`; None for a path that no index file has."""
    text = path if isinstance(path, str) else path.as_posix()
    if match := _FOUR_LEVELS.fullmatch(text):
        ledger = LedgerId.from_value(int("".join(match.groups()), 16))
    elif match := _TWO_LEVELS.fullmatch(text):
        ledger = LedgerId(0, int(match[3], 16))
    else:
        return None
    expected = index_path(ledger)
    return ledger if text == expected or text.endswith(f"/{expected}") else None


@dataclass(frozen=True, slots=True)
class LedgerData:
    """Value of DbLedgerStorage's `ledgers` database; `explicit_lac` is a whole LAC packet."""

    exists: bool
    fenced: bool
    master_key: bytes = field(repr=False)
    explicit_lac: bytes | None = None
    limbo: bool | None = None

    @classmethod
    def parse(cls, data: bytes, where: str = "") -> LedgerData:
        """Return the value in the database. Raises Corrupt."""
        from google.protobuf.message import DecodeError

        from bkctl.formats.data_formats_pb2 import LedgerData as Message

        at = f"{where}: " if where else ""
        message = Message()
        try:
            message.ParseFromString(bytes(data))
        except DecodeError as error:
            raise Corrupt(f"{at}Ledger data is not a protobuf message of that kind") from error
        if not message.IsInitialized():
            raise Corrupt(f"{at}Ledger data lacks a required field")
        return cls(
            message.exists,
            message.fenced,
            message.masterKey,
            message.explicitLac if message.HasField("explicitLac") else None,
            message.limbo if message.HasField("limbo") else None,
        )

    def serialize(self) -> bytes:
        """Return the bytes of the value."""
        from bkctl.formats.data_formats_pb2 import LedgerData as Message

        message = Message(
            exists=self.exists,
            fenced=self.fenced,
            masterKey=self.master_key,
            explicitLac=self.explicit_lac,
        )
        if self.limbo is not None:
            message.limbo = self.limbo
        return message.SerializeToString()


def ledger_key(ledger: LedgerId, *, scoped: bool | None = None) -> bytes:
    """Return a ledger's key: 8 bytes in `ledgers` (scope 0), 16 in `scoped-ledgers`.

    `scoped` is the database that the caller means: an assertion fails for a ledger of the other one.
    """
    assert scoped is None or scoped == ledger.is_scoped, f"ledger {ledger} is kept elsewhere"
    return ledger.value.to_bytes(16 if ledger.is_scoped else 8, "big")


def location_key(ledger: LedgerId, entry_id: int, *, scoped: bool | None = None) -> bytes:
    """Return an entry's key: 16 bytes in `locations` (scope 0), 24 in `scoped-locations`; see `ledger_key`."""
    return ledger_key(ledger, scoped=scoped) + _LONG.pack(entry_id)


def location_keys(runs: Sequence[tuple[LedgerId, int]], entry_ids: array[int], *, scoped: bool) -> list[bytes]:
    """Return the keys of many entries: `runs` has the number of `entry_ids` of each ledger, in order."""
    tails = _big_endian(entry_ids)
    keys: list[bytes] = []
    begin = 0
    for ledger, count in runs:
        prefix = ledger_key(ledger, scoped=scoped)
        end = begin + count * _LONG.size
        keys += [prefix + tails[at : at + _LONG.size] for at in range(begin, end, _LONG.size)]
        begin = end
    assert len(keys) == len(entry_ids), "runs and entries differ in number"
    return keys


def location_values(locations: array[int]) -> list[bytes]:
    """Return the values of many entries."""
    data = _big_endian(locations)
    return [data[at : at + _LONG.size] for at in range(0, len(data), _LONG.size)]


def _big_endian(numbers: array[int]) -> bytes:
    swapped = numbers[:]
    if sys.byteorder == "little":
        swapped.byteswap()
    return swapped.tobytes()


def read_ledger_key(key: bytes, where: str = "", *, scoped: bool = False) -> LedgerId | None:
    """Return the ledger of a key of `ledgers`, or with `scoped` of `scoped-ledgers`; None for other keys.

    Apache's rebuild leaves keys of 16 bytes in `ledgers`: only their first 8 count. Raises Corrupt.
    """
    if len(key) != 16 and (scoped or len(key) != 8):
        raise Corrupt(f"{where + ': ' if where else ''}A ledger key has {len(key)} bytes: {key[:32].hex()}")
    if scoped:
        return LedgerId.from_value(int.from_bytes(key, "big"))
    return LedgerId(0, int.from_bytes(key[:8], "big")) if key[0] < 0x80 else None


def read_location_key(key: bytes, where: str = "", *, scoped: bool = False) -> tuple[LedgerId, int]:
    """Return ledger and entry of a key of `locations`, or with `scoped` of `scoped-locations`. Raises Corrupt."""
    at = f"{where}: " if where else ""
    if len(key) != (24 if scoped else 16):
        raise Corrupt(f"{at}A location key has {len(key)} bytes: {key[:32].hex()}")
    entry_id: int = _LONG.unpack_from(key, len(key) - 8)[0]
    if entry_id < 0:
        raise Corrupt(f"{at}A location key has entry id {entry_id}: {key.hex()}")
    return LedgerId.from_value(int.from_bytes(key[:-8], "big")), entry_id


def read_storage_flags(value: bytes, where: str = "") -> int:
    """Return the storage flags in the value of STORAGE_FLAGS_KEY. Raises Corrupt. Source: LedgerMetadataIndex."""
    if len(value) != _LONG.size:
        raise Corrupt(f"{where + ': ' if where else ''}Storage flags have {len(value)} bytes, not 8")
    flags: int = _LONG.unpack(value)[0]
    return flags


def write_storage_flags(flags: int) -> bytes:
    """Return the value of STORAGE_FLAGS_KEY."""
    return _LONG.pack(flags)


def write_location(location: int) -> bytes:
    """Return the value of an entry's key, which is also its slot in an index file."""
    return _LONG.pack(location)


def read_location(value: bytes, where: str = "") -> int:
    """Return the location in an entry's value. Raises Corrupt for another size than 8 bytes."""
    if len(value) != _LONG.size:
        raise Corrupt(f"{where + ': ' if where else ''}A location has {len(value)} bytes, not 8")
    location: int = _LONG.unpack(value)[0]
    return location
