"""Entries as the tests that compare with Java's client describe them."""

from __future__ import annotations

import hashlib
from typing import Any

from bkctl.client.read_handle import ReadHandle


def described(entry_id: int, data: bytes, length: int) -> dict[str, Any]:
    """Return an entry as the Java programs of the tests print it."""
    return {"entryId": entry_id, "size": len(data), "length": length, "sha256": hashlib.sha256(data).hexdigest()}


async def read_all(reader: ReadHandle) -> list[dict[str, Any]]:
    """Return all entries of a ledger up to its last add confirmed."""
    if reader.last_add_confirmed < 0:
        return []
    return [
        described(entry.entry_id, entry.payload, entry.length)
        async for entry in reader.read(0, reader.last_add_confirmed)
    ]
