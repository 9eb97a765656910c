"""Pulsar's message ids, as Java's `MessageIdImpl.toByteArray()` writes them."""

from __future__ import annotations

import pytest

from bkctl.formats.pulsar import MessageId, read_message_id


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x08\x00\x10\x00", MessageId(0, 0)),
        (b"\x08\xac\x02\x10\x07\x18\x01", MessageId(300, 7)),
        (b"\x08" + b"\xff" * 9 + b"\x01\x10\x01", MessageId(2**64 - 1, 1)),
        (b"", None),
        (b"\x08", None),
        (b"\x08\x80", None),
        (b"\x08\x01", None),
        (b"\x10\x01\x08\x01", None),
        (b"\x08" + b"\xff" * 9 + b"\x7f\x10\x01", None),
        (b"\x08" + b"\x80" * 40, None),
        (b"\x00\xff", None),
    ],
    ids=repr,
)
def test_message_ids_are_read_from_their_bytes(data: bytes, expected: MessageId | None) -> None:
    assert read_message_id(data) == expected


def test_a_message_id_is_a_ledger_and_an_entry() -> None:
    assert str(MessageId(300, 7)) == "300:7"
