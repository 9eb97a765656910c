"""Reads of single replicas."""

from __future__ import annotations

import asyncio

from bkctl.client.read_handle import ReadHandle, entry_of
from bkctl.client.reader import LedgerEntry
from bkctl.protocol.messages import ReadRequest


async def read_from(reader: ReadHandle, bookie_id: str, entry_id: int) -> LedgerEntry:
    """Return the replica of an entry that one bookie has. Raise the bookie's error."""
    access = reader._access
    future = access.pool.channel(bookie_id).send(ReadRequest(reader.ledger, entry_id), access.scoped)
    await asyncio.wait([future])
    return entry_of(future, access, entry_id, bookie_id)
