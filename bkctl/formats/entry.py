"""Entries as clients seal them and bookies keep them: header, digest, payload; V1 (scope 0) and V2 (128-bit ids).

    V1  ledger i64 | entry i64 | LAC i64 | length i64                              | digest | payload    32 bytes header
    V2  flags u8 | scope u64 | ledger u64 | entry i64 | LAC i64 | length i64       | digest | payload    41 bytes header
    LAC packet V1  ledger i64 | LAC i64                     | digest                                     16 bytes header
    LAC packet V2  flags u8 | scope u64 | ledger u64 | LAC i64 | digest                                  25 bytes header

The digest covers the header, then the payload. The flags byte is 0xA0 + the digest type's number, so a first byte of
0x80 or more is never V1; readers decide that before they read any id. Source: DigestManager; BP-35.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from google_crc32c import extend as _crc32c_extend

from bkctl.errors import DigestMismatch, TruncatedRecord, Unsupported, UsageError
from bkctl.formats.layout import Buffer
from bkctl.ids import I64_MAX, LedgerId

HEADER_SIZE_V1: Final = 32
HEADER_SIZE_V2: Final = 41
#: The last field of a header. Apache's bookie stores entries that end before it, or within it.
LENGTH_FIELD_SIZE: Final = 8
LAC_HEADER_SIZE_V1: Final = 16
LAC_HEADER_SIZE_V2: Final = 25
#: The longest header and digest that an entry can have.
OVERHEAD_SIZE_MAX: Final = HEADER_SIZE_V2 + 20
MASTER_KEY_SIZE: Final = 20
#: High nibble of a V2 flags byte: the always-1 bit and version 2.
FLAGS_V2: Final = 0xA0
INVALID_ENTRY_ID: Final = -1
#: Upper limit of one entry: above every frame size that a bookie can be configured to.
ENTRY_SIZE_BYTES_MAX: Final = (1 << 30) - 1

ENTRY_V1: Final = Struct(">Qqqq")
ENTRY_V2: Final = Struct(">BQQqqq")
LAC_V1: Final = Struct(">Qq")
LAC_V2: Final = Struct(">BQQq")
_AFTER_LEDGER: Final = Struct(">qqq")
# Creates an Entry in a third of the time of its own constructor.
_new = tuple.__new__


class DigestType(IntEnum):
    """The digest that protects an entry, by its number in ledger metadata and in the flags byte."""

    CRC32 = 1
    HMAC = 2
    CRC32C = 3
    DUMMY = 4

    @property
    def code_length(self) -> int:
        """Return the size of the digest in bytes (`macCodeLength`)."""
        return _CODE_LENGTHS[self]

    @classmethod
    def parse(cls, text: str) -> DigestType:
        """Return the type named `text`, in any case; `MAC` is HMAC, as in Java's client. Raises UsageError."""
        name = text.strip().upper()
        found = cls.__members__.get("HMAC" if name == "MAC" else name)
        if found is None:
            raise UsageError(f"Not a digest type: {text!r}", hint=f"one of {', '.join(cls.__members__)}")
        return found


_CODE_LENGTHS: Final = {DigestType.CRC32: 8, DigestType.HMAC: 20, DigestType.CRC32C: 4, DigestType.DUMMY: 0}
_DIGEST_TYPES: Final[dict[int, DigestType | None]] = {0: None, **{int(kind): kind for kind in DigestType}}


def master_key(password: bytes) -> bytes:
    """Return the 20 bytes that let a client write, fence or recover a ledger. Source: generateMasterKey."""
    import hashlib

    return hashlib.sha1(b"ledger" + password, usedforsecurity=False).digest()


def _mac_key(password: bytes) -> bytes:
    import hashlib

    return hashlib.sha1(b"mac" + password, usedforsecurity=False).digest()


class EntryHeader(NamedTuple):
    """The header before an entry's digest; `size` is 32 (V1) or 41 (V2) bytes.

    `digest_type` is None where the header does not have it: V1, or V2 without a digest.
    """

    ledger: LedgerId
    entry_id: int
    last_add_confirmed: int
    length: int
    format_version: int
    digest_type: DigestType | None
    size: int


class LacHeader(NamedTuple):
    """The header before a LAC packet's digest; `size` is 16 (V1) or 25 (V2) bytes."""

    ledger: LedgerId
    last_add_confirmed: int
    format_version: int
    digest_type: DigestType | None
    size: int


class Entry(NamedTuple):
    """A verified entry; `length` is the ledger's payload bytes including this entry's.

    `payload` is a view of the blob, or `bytes` if the blob was.
    """

    entry_id: int
    last_add_confirmed: int
    length: int
    payload: bytes | memoryview


#: The flags bytes of entries of format V2: without a digest, or with one of the types.
ENTRY_FLAGS_V2: Final = frozenset({FLAGS_V2, *(FLAGS_V2 | kind for kind in DigestType)})


def digest_of_flags(flags: int, at: int = 0, where: str = "") -> DigestType | None:
    """Return the digest type in a V2 flags byte, None without a digest.

    Raises Unsupported when the high nibble is not version 2, or the low one is an unknown digest type.
    """
    try:
        if flags & 0xF0 == FLAGS_V2:
            return _DIGEST_TYPES[flags & 0x0F]
    except KeyError:
        problem = f"digest type {flags & 0x0F}"
    else:
        problem = f"entry format version {flags >> 4 & 0x7}"
    raise Unsupported(f"{where + ': ' if where else ''}Flags byte {flags:#04x} at byte {at} has the unknown {problem}")


def read_ledger(buffer: Buffer, at: int = 0, where: str = "") -> tuple[LedgerId, int]:
    """Return the ledger of the record at byte `at`, and the offset of the entry id, which follows the ledger id.

    Raises TruncatedRecord, and Unsupported for a first byte of 0x80 or more that is not V2's.
    """
    present = len(buffer) - at
    if present < 8:
        raise TruncatedRecord("Ledger id", offset=at, needed=8, present=max(present, 0), where=where)
    if buffer[at] < 0x80:
        return LedgerId(0, int.from_bytes(buffer[at : at + 8], "big")), at + 8
    digest_of_flags(buffer[at], at, where)
    if present < 17:
        raise TruncatedRecord("Scoped ledger id", offset=at, needed=17, present=present, where=where)
    return LedgerId.from_value(int.from_bytes(buffer[at + 1 : at + 17], "big")), at + 17


def read_entry_header(buffer: Buffer, at: int = 0, where: str = "") -> EntryHeader:
    """Return the header of the entry at byte `at` of `buffer`.

    Raises TruncatedRecord, and Unsupported for a first byte of 0x80 or more that is not V2's.
    """
    present = len(buffer) - at
    if present < HEADER_SIZE_V1:
        raise TruncatedRecord("Entry header", offset=at, needed=HEADER_SIZE_V1, present=max(present, 0), where=where)
    flags = buffer[at]
    if flags < 0x80:
        ledger_id, entry_id, lac, length = ENTRY_V1.unpack_from(buffer, at)
        return EntryHeader(LedgerId(0, ledger_id), entry_id, lac, length, 1, None, HEADER_SIZE_V1)
    digest_type = digest_of_flags(flags, at, where)
    if present < HEADER_SIZE_V2:
        raise TruncatedRecord("Scoped entry header", offset=at, needed=HEADER_SIZE_V2, present=present, where=where)
    _, scope_id, ledger_id, entry_id, lac, length = ENTRY_V2.unpack_from(buffer, at)
    return EntryHeader(LedgerId(scope_id, ledger_id), entry_id, lac, length, 2, digest_type, HEADER_SIZE_V2)


def lac_of(entry: Buffer) -> int:
    """Return the last add confirmed in an entry that a bookie holds; it may end before its length field."""
    end = (HEADER_SIZE_V1 if entry[0] < 0x80 else HEADER_SIZE_V2) - LENGTH_FIELD_SIZE
    return int.from_bytes(entry[end - 8 : end], "big", signed=True)


def read_lac_header(packet: Buffer, at: int = 0, where: str = "") -> LacHeader:
    """Return the header of the LAC packet at byte `at`, without checking the digest.

    Raises TruncatedRecord, and Unsupported for a first byte of 0x80 or more that is not V2's.
    """
    present = len(packet) - at
    if present < LAC_HEADER_SIZE_V1:
        raise TruncatedRecord("LAC packet", offset=at, needed=LAC_HEADER_SIZE_V1, present=max(present, 0), where=where)
    flags = packet[at]
    if flags < 0x80:
        ledger_id, lac = LAC_V1.unpack_from(packet, at)
        return LacHeader(LedgerId(0, ledger_id), lac, 1, None, LAC_HEADER_SIZE_V1)
    digest_type = digest_of_flags(flags, at, where)
    if present < LAC_HEADER_SIZE_V2:
        raise TruncatedRecord("Scoped LAC packet", offset=at, needed=LAC_HEADER_SIZE_V2, present=present, where=where)
    _, scope_id, ledger_id, lac = LAC_V2.unpack_from(packet, at)
    return LacHeader(LedgerId(scope_id, ledger_id), lac, 2, digest_type, LAC_HEADER_SIZE_V2)


def _crc32(header: bytes, payload: Buffer) -> bytes:
    return zlib.crc32(payload, zlib.crc32(header)).to_bytes(8, "big")


def _crc32c(header: bytes, payload: Buffer) -> bytes:
    # google_crc32c takes bytes only; the copy costs a tenth of what the checksum does.
    crc: int = _crc32c_extend(_crc32c_extend(0, header), payload if type(payload) is bytes else bytes(payload))
    return crc.to_bytes(4, "big")


def _no_digest(header: bytes, payload: Buffer) -> bytes:
    return b""


def _hmac_sha1(key: bytes) -> Callable[[bytes, Buffer], bytes]:
    import hmac

    keyed = hmac.new(key, digestmod="sha1")

    def digest(header: bytes, payload: Buffer) -> bytes:
        code = keyed.copy()
        code.update(header)
        code.update(payload)
        return code.digest()

    return digest


def digest_function(digest_type: DigestType, password: bytes = b"") -> Callable[[bytes, Buffer], bytes]:
    """Return the function (header, payload) → digest of entries of that type; only HMAC uses the password."""
    if digest_type is DigestType.CRC32C:
        return _crc32c
    if digest_type is DigestType.CRC32:
        return _crc32
    return _hmac_sha1(_mac_key(password)) if digest_type is DigestType.HMAC else _no_digest


class DigestManager:
    """Seals and opens the entries and LAC packets of one ledger. Source: DigestManager, verifyDigest.

    Raises UsageError for a ledger that entries cannot carry: a scope-0 id of 2^63 or more.
    """

    __slots__ = ("_digest", "_prefix", "_prefix_size", "digest_type", "header_size", "ledger", "master_key",
                 "overhead_size")  # fmt: skip

    def __init__(self, ledger: LedgerId, digest_type: DigestType, password: bytes = b"") -> None:
        self.ledger = ledger
        self.digest_type = digest_type
        self.master_key = master_key(password)
        self._digest = digest_function(digest_type, password)
        if ledger.is_scoped:
            self._prefix = bytes((FLAGS_V2 | digest_type,)) + ledger.value.to_bytes(16, "big")
            self.header_size = HEADER_SIZE_V2
        elif ledger.ledger_id > I64_MAX:
            raise UsageError(f"No entry can carry ledger id {ledger.ledger_id} in scope 0", hint="give it a scope")
        else:
            self._prefix = ledger.ledger_id.to_bytes(8, "big")
            self.header_size = HEADER_SIZE_V1
        self._prefix_size = len(self._prefix)
        #: Bytes of header and digest before each payload.
        self.overhead_size = self.header_size + digest_type.code_length

    def seal(self, entry_id: int, last_add_confirmed: int, length: int, payload: Buffer) -> bytes:
        """Return header and digest of an entry, without the payload: a caller can write both without a copy.

        `length` is the ledger's payload bytes including this entry's.
        """
        header = self._prefix + _AFTER_LEDGER.pack(entry_id, last_add_confirmed, length)
        return header + self._digest(header, payload)

    def open(self, blob: Buffer, entry_id: int | None) -> Entry:
        """Return the entry in `blob` (header, digest, payload), verified; None skips the entry id check.

        Raises DigestMismatch: too short, of another ledger, entry or format version, or not what was sealed.
        """
        header_size = self.header_size
        overhead_size = self.overhead_size
        if len(blob) < overhead_size:
            raise DigestMismatch(
                f"Entry {_name(self.ledger, entry_id)} has {len(blob)} bytes, at least {overhead_size} are needed"
            )
        header = bytes(blob[:header_size])
        if not header.startswith(self._prefix):
            raise self._other_ledger(header, entry_id)
        found_id, last_add_confirmed, length = _AFTER_LEDGER.unpack_from(header, self._prefix_size)
        if entry_id is not None and entry_id != found_id:
            raise DigestMismatch(f"Ledger {self.ledger}: got entry {found_id} instead of entry {entry_id}")
        payload = blob[overhead_size:] if type(blob) is bytes else memoryview(blob)[overhead_size:]
        if self._digest(header, payload) != bytes(blob[header_size:overhead_size]):
            raise DigestMismatch(
                f"Entry {_name(self.ledger, found_id)} does not match its {self.digest_type.name} digest",
                hint="it is damaged, or sealed with another digest type or password",
            )
        return _new(Entry, (found_id, last_add_confirmed, length, payload))

    def seal_lac(self, last_add_confirmed: int) -> bytes:
        """Return the whole LAC packet: 16 bytes and the digest in scope 0, else 25 and the digest."""
        header = self._prefix + last_add_confirmed.to_bytes(8, "big", signed=True)
        return header + self._digest(header, b"")

    def open_lac(self, packet: Buffer) -> int:
        """Return the last add confirmed in a LAC packet, verified.

        Raises DigestMismatch: too short, of another ledger or format version, or not what was sealed.
        """
        header_size = self._prefix_size + 8
        data = bytes(packet[: header_size + self.digest_type.code_length])
        if len(data) < header_size + self.digest_type.code_length:
            raise DigestMismatch(
                f"LAC packet of ledger {self.ledger} has {len(data)} bytes, "
                f"{header_size + self.digest_type.code_length} are needed"
            )
        header = data[:header_size]
        if not header.startswith(self._prefix):
            raise self._other_ledger(data, None)
        if self._digest(header, b"") != data[header_size:]:
            raise DigestMismatch(
                f"LAC packet of ledger {self.ledger} does not match its {self.digest_type.name} digest",
                hint="it is damaged, or sealed with another digest type or password",
            )
        return int.from_bytes(header[-8:], "big", signed=True)

    def _other_ledger(self, header: bytes, entry_id: int | None) -> DigestMismatch:
        if header[0] in ENTRY_FLAGS_V2 and len(header) < LAC_HEADER_SIZE_V2:
            return DigestMismatch(f"Got a scoped record instead of one of ledger {self.ledger}")
        is_known = header[0] < 0x80 or header[0] in ENTRY_FLAGS_V2
        ledger = read_ledger(header)[0] if is_known else self.ledger
        if ledger != self.ledger:
            asked = f"one {_name(self.ledger, None)}" if entry_id is None else f"entry {_name(self.ledger, entry_id)}"
            return DigestMismatch(f"Got an entry of ledger {ledger} instead of {asked}")
        return DigestMismatch(
            f"Entry {_name(ledger, entry_id)} begins with byte {header[0]:#04x}, {self._prefix[0]:#04x} was expected",
            hint="it is damaged, or sealed with another digest type",
        )


def _name(ledger: LedgerId, entry_id: int | None) -> str:
    return f"of ledger {ledger}" if entry_id is None else f"{entry_id} of ledger {ledger}"
