"""A key-value store with a write-ahead log and failover: whoever opens the log last is its only writer.

    python write_ahead_log.py METADATA_URI LOG KEY=VALUE…

The log is a scope of 128-bit ledger ids, with the ledgers 0, 1, 2, …. A new writer fences and closes the last ledger,
replays all of them, and creates the next one. Only one writer can create it, and the writer before finds itself
fenced at its next write, however long it slept. Scopes need bookies that serve them (bkctl's).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

from bkctl import BookKeeper, WriteHandle
from bkctl.errors import LedgerExists, LedgerFenced, LedgerNotFound


class WriteAheadLog:
    """A dictionary whose changes are in a log before they are in memory."""

    def __init__(self, bookkeeper: BookKeeper, log_id: int) -> None:
        self._bookkeeper, self._log_id = bookkeeper, log_id
        self._writer: WriteHandle | None = None
        self.values: dict[str, str] = {}

    async def open(self) -> None:
        """Take the log over from its writer, if there is one, and replay it."""
        while True:
            self.values.clear()
            next_id = 0
            async for ledger in self._bookkeeper.list_ledgers(ledger_scope_id=self._log_id):
                try:
                    await self._replay(ledger.ledger_id)
                except LedgerNotFound:
                    continue  # compacted meanwhile
                next_id = ledger.ledger_id + 1
            try:
                self._writer = await self._bookkeeper.create_ledger_adv(
                    next_id, ledger_scope_id=self._log_id, ensemble_size=3, write_quorum_size=3, ack_quorum_size=2
                )
            except LedgerExists:
                continue  # another writer was faster: take the log over from it
            return

    async def _replay(self, ledger_id: int) -> None:
        reader = await self._bookkeeper.open_ledger(ledger_id, ledger_scope_id=self._log_id, recovery=True)
        async with reader:
            async for entry in reader.read():
                self.values.update(json.loads(entry.payload))

    async def put(self, **changes: str) -> None:
        """Change the values, once the change is on two bookies. Raises LedgerFenced if another writer took over."""
        assert self._writer is not None, "open the log first"
        await self._writer.add(json.dumps(changes).encode())
        self.values.update(changes)

    async def compact(self) -> None:
        """Write all values to a new ledger, and delete the ledgers before it."""
        assert self._writer is not None, "open the log first"
        await self._writer.close()
        old = self._writer.ledger_id
        self._writer = await self._bookkeeper.create_ledger_adv(old + 1, ledger_scope_id=self._log_id)
        await self._writer.add(json.dumps(self.values).encode())
        async for ledger in self._bookkeeper.list_ledgers(ledger_scope_id=self._log_id):
            if ledger.ledger_id <= old:
                await self._bookkeeper.delete_ledger(ledger)

    async def close(self) -> None:
        """Close the log. Harmless if another writer took over."""
        if self._writer is not None:
            with contextlib.suppress(LedgerFenced):
                await self._writer.close()


async def main(metadata_uri: str, log_id: str, *changes: str) -> None:
    async with BookKeeper(metadata_uri) as bookkeeper:
        log = WriteAheadLog(bookkeeper, int(log_id))
        await log.open()
        await log.put(**dict(change.split("=", 1) for change in changes))
        print(json.dumps(log.values))
        await log.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
