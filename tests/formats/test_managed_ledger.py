"""Pulsar's message ids, as Java's `MessageIdImpl.toByteArray()` writes them."""

from __future__ import annotations

import pytest

from bkctl.formats.managed_ledger import message_id_text


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x08\x00\x10\x00", "0:0"),
        (b"\x08\xac\x02\x10\x07\x18\x01", "300:7"),
        (b"\x08\x05\x10" + b"\xff" * 9 + b"\x01", "5:-1"),
        (b"", None),
        (b"\x08", None),
        (b"\x08\x80", None),
        (b"\x08\x01", None),
        (b"\x08" + b"\x80" * 40, None),
        (b"\x00\xff", None),
    ],
    ids=repr,
)
def test_message_ids_are_read_from_their_bytes(data: bytes, expected: str | None) -> None:
    assert message_id_text(data) == expected
