"""Pulsar's message ids, as they are in the custom metadata of compacted ledgers."""

from __future__ import annotations

from typing import Final, NamedTuple

_LEDGER_ID: Final = 1 << 3  # field 1, varint
_ENTRY_ID: Final = 2 << 3  # field 2, varint


class MessageId(NamedTuple):
    """The place of a message: a ledger of scope 0 and an entry in it."""

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"


def read_message_id(data: bytes) -> MessageId | None:
    """Return the message id that begins `data`, None for other bytes.

    Source: Pulsar's MessageIdData in PulsarApi.proto, whose fields 1 and 2 are required and come first; what follows
    (partition, batch index …) is left out.
    """
    first = _field(data, 0, _LEDGER_ID)
    second = None if first is None else _field(data, first[1], _ENTRY_ID)
    return None if first is None or second is None else MessageId(first[0], second[0])


def _field(data: bytes, at: int, key: int) -> tuple[int, int] | None:
    """Return the varint of the field `key` that begins at byte `at`, and the position behind it."""
    if data[at : at + 1] != bytes((key,)):
        return None
    value = shift = 0
    for position in range(at + 1, min(at + 11, len(data))):
        value |= (data[position] & 0x7F) << shift
        shift += 7
        if data[position] < 0x80:
            return (value, position + 1) if value < 1 << 64 else None
    return None
