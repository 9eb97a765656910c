"""Fixed-width records: one declaration gives reading, writing, size and offsets of each.

class EntryLogHeader(NamedTuple):
    fingerprint: Annotated[bytes, "4s"]
    version: Annotated[int, "i"]

ENTRY_LOG_HEADER = Layout(EntryLogHeader, size=1024)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

from bkctl.errors import TruncatedRecord

Buffer = bytes | bytearray | memoryview
R = TypeVar("R", bound=NamedTuple)


class Layout(Generic[R]):
    """The bytes of a NamedTuple whose fields are `Annotated[type, struct code]`, big-endian.

    `size` is in bytes, padded with zeros behind the fields; `offsets` maps a field to its byte offset.
    """

    def __init__(self, record: type[R], *, size: int | None = None) -> None:
        codes: dict[str, str] = {}
        for name, hint in get_type_hints(record, include_extras=True).items():
            if get_origin(hint) is not Annotated:
                raise TypeError(f"{record.__name__}.{name} has no struct code")
            codes[name] = get_args(hint)[1]
        self.record = record
        self.offsets: dict[str, int] = {}
        at = 0
        for name, code in codes.items():
            self.offsets[name] = at
            at += struct.calcsize(">" + code)
        padding = f"{size - at}x" if size is not None and size > at else ""
        self.struct = struct.Struct(">" + "".join(codes.values()) + padding)
        self.size = self.struct.size

    def pack(self, record: R) -> bytes:
        """Return the record's `size` bytes."""
        return self.struct.pack(*cast(Iterable[Any], record))

    def unpack_from(self, buffer: Buffer, at: int = 0, where: str = "") -> R:
        """Return the record at byte `at` of `buffer`.

        Raises TruncatedRecord (offset, bytes needed, bytes present) when the buffer is too short; `where` names it.
        """
        present = len(buffer) - at
        if at < 0 or present < self.size:
            raise TruncatedRecord(
                self.record.__name__, offset=at, needed=self.size, present=max(present, 0), where=where
            )
        return self.record._make(self.struct.unpack_from(buffer, at))
