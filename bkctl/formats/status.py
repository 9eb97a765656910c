"""BOOKIE_STATUS: the mode of a bookie, writable or read-only, across restarts. One line in each ledger directory.

    1,READ_ONLY|READ_WRITE,<milliseconds since the epoch>[,true|false]

The last field exists since 4.17.3: true if an operator set the mode. Lines without it count as true.
Source: BookieStatus (`persistBookieStatusEnabled`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

from bkctl.errors import CorruptRecord, Unsupported

LAYOUT_VERSION: Final = 1
_TIME_MS_MAX: Final = (1 << 63) - 1


class BookieMode(StrEnum):
    """The mode of a bookie: writable or read-only."""

    READ_ONLY = "READ_ONLY"
    READ_WRITE = "READ_WRITE"


class BookieStatus(NamedTuple):
    """A bookie's mode since `updated_ms`; `manual`: an operator set it, None if the file does not say.

    The latest of a bookie's several files counts.
    """

    mode: BookieMode
    updated_ms: int
    manual: bool | None = None

    @classmethod
    def parse(cls, data: bytes, where: str = "") -> BookieStatus:
        """Return the status in a BOOKIE_STATUS file; only the first line counts.

        Raises CorruptRecord with the offset of the wrong field, Unsupported for another layout version.
        """
        line = data.partition(b"\n")[0].rstrip(b"\r")
        fields = line.split(b",")
        version = _integer(fields[0], "layout version", 0, where)
        if version != LAYOUT_VERSION:
            prefix = f"{where}: " if where else ""
            raise Unsupported(f"{prefix}Bookie status has layout version {version}, {LAYOUT_VERSION} is known")
        if len(fields) not in (3, 4):
            raise CorruptRecord(f"Bookie status has {len(fields)} fields, not 3 or 4", offset=0, where=where)
        at = len(fields[0]) + 1
        try:
            mode = BookieMode(fields[1].decode("ascii", "replace"))
        except ValueError as error:
            raise CorruptRecord(f"Bookie status has mode {_shown(fields[1])}", offset=at, where=where) from error
        at += len(fields[1]) + 1
        updated_ms = _integer(fields[2], "time", at, where)
        manual = None if len(fields) == 3 else fields[3].strip().lower() == b"true"
        return cls(mode, updated_ms, manual)

    def serialize(self) -> bytes:
        """Return the bytes of a BOOKIE_STATUS file."""
        manual = "" if self.manual is None else f",{str(self.manual).lower()}"
        return f"{LAYOUT_VERSION},{self.mode},{self.updated_ms}{manual}\n".encode("ascii")


def _integer(field: bytes, what: str, offset: int, where: str) -> int:
    text = field.strip()
    digits = text.removeprefix(b"-")
    if not (digits.isdigit() and len(digits) <= 19) or abs(number := int(text)) > _TIME_MS_MAX:
        raise CorruptRecord(f"Bookie status has {what} {_shown(field)}", offset=offset, where=where)
    return number


def _shown(field: bytes) -> str:
    return repr(field[:40].decode("ascii", "backslashreplace"))
