"""Ledgers of a live cluster for the tests of the sources and jobs that read and write them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from support.waiting import LIMIT_S

from bkctl.client.write_handle import WriteHandle
from bkctl.formats.entry import DigestType
from bkctl.ids import LedgerId
from bkctl.spark.sources.options import CONNECTION_OPTIONS, Client, ClusterOptions, SourceOptions


class Live:
    """A cluster, and what tests do there."""

    def __init__(self, metadata_uri: str) -> None:
        self.uri = metadata_uri
        self.options = {"metadataUri": metadata_uri}
        self._clients: list[Client] = []

    def _new_client(self) -> Client:
        options = {**self.options, "timeoutSeconds": f"{LIMIT_S:.0f}"}
        return Client(ClusterOptions(SourceOptions("test", options, CONNECTION_OPTIONS)))

    def client(self) -> Client:
        """A client; closed with the cluster."""
        self._clients.append(self._new_client())
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def open(
        self, ledger: LedgerId | None = None, *, scope_id: int = 0, password: bytes = b"",
        custom_metadata: Mapping[str, bytes] = {}, digest_type: DigestType = DigestType.CRC32C, copies: int = 2,
    ) -> OpenLedger:  # fmt: skip
        """A new ledger, to be written."""
        client = self.client()
        shape: dict[str, Any] = {
            "ensemble_size": copies, "write_quorum_size": copies, "ack_quorum_size": copies, "password": password,
            "custom_metadata": custom_metadata, "digest_type": digest_type,
        }  # fmt: skip
        if ledger is None and scope_id == 0:
            return OpenLedger(client, client.run(client.bookkeeper.create_ledger(**shape)))
        ledger_id, scope_id = (None, scope_id) if ledger is None else (ledger.ledger_id, ledger.scope_id)
        created = client.bookkeeper.create_ledger_adv(ledger_id, ledger_scope_id=scope_id, **shape)
        return OpenLedger(client, client.run(created))

    def write(self, payloads: Iterable[bytes], ledger: LedgerId | None = None, **settings: Any) -> LedgerId:
        """A closed ledger with these entries."""
        written = self.open(ledger, **settings)
        written.add(payloads)
        written.close()
        self._clients.pop().close()  # A process of tests has many ledgers.
        return written.ledger

    def read(self, ledger: LedgerId) -> list[bytes]:
        """The payloads of a ledger, as our client reads them."""

        async def payloads() -> list[bytes]:
            handle = await client.bookkeeper.open_ledger(
                ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=None
            )
            if handle.last_add_confirmed < 0:
                return []
            return [entry.payload async for entry in handle.read(0, handle.last_add_confirmed)]

        with self._new_client() as client:
            return client.run(payloads())

    def ledgers(self, scope_id: int | None = None) -> set[LedgerId]:
        """Return all ledgers, or the ledgers of a scope."""
        with self._new_client() as client:
            return set(client.cluster.ledgers.ledgers(scope_id))


class OpenLedger:
    """A ledger that is being written."""

    def __init__(self, client: Client, handle: WriteHandle) -> None:
        self._client, self.handle, self.ledger = client, handle, handle.ledger

    def add(self, payloads: Iterable[bytes], *, confirm: bool = True) -> None:
        """Add entries; all are confirmed for readers when this returns, unless not `confirm`."""

        async def work() -> None:
            await asyncio.gather(*(self.handle.add(payload) for payload in payloads))
            if confirm:
                await self.handle.write_lac()

        self._client.run(work())

    def close(self) -> None:
        self._client.run(self.handle.close())


def sha256(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()
