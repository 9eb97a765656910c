"""A store of small objects: many blobs in one ledger, each under a name of its own; written with the blocking client.

    python blob_store.py METADATA_URI put FILE…
    python blob_store.py METADATA_URI get NAME

A name is the ledger's 128-bit id, the first entry and the number of entries. Ledger ids are random UUIDs, so that any
number of writers needs no common counter. Such ids need bookies that serve scopes (bkctl's).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from bkctl import LedgerId
from bkctl.sync import BookKeeper, WriteHandle

#: Bytes of a blob in one entry. An entry must fit in a frame of 5 MiB.
CHUNK_SIZE_BYTES = 1 << 20
#: Bytes after which a new ledger is begun: blobs are deleted with their ledger.
LEDGER_SIZE_BYTES = 1 << 30


class BlobStore:
    """Puts and gets blobs. A store that only gets has no ledger of its own."""

    def __init__(self, bookkeeper: BookKeeper) -> None:
        self._bookkeeper = bookkeeper
        self._writer: WriteHandle | None = None

    def put(self, data: bytes) -> str:
        """Return the name of the blob once it is on two bookies."""
        writer = self._open_writer()
        chunks = [data[at : at + CHUNK_SIZE_BYTES] for at in range(0, len(data), CHUNK_SIZE_BYTES)] or [b""]
        first = [writer.add_async(chunk) for chunk in chunks]
        ids = [future.result() for future in first]
        return f"{writer.ledger.qualified_name}-{ids[0]}-{len(ids)}"

    def get(self, name: str) -> bytes:
        """Return the blob. Raises LedgerNotFound, EntryNotFound."""
        return b"".join(self._chunks(name))

    def _chunks(self, name: str) -> Iterator[bytes]:
        ledger, first, count = name.split("-")
        with self._bookkeeper.open_ledger(LedgerId.parse(ledger)) as reader:
            # The writer's last entries are not known to be confirmed yet; a name is given for acknowledged ones only.
            for entry in reader.read_unconfirmed(int(first), int(first) + int(count) - 1):
                yield entry.payload

    def _open_writer(self) -> WriteHandle:
        if self._writer is not None and self._writer.length >= LEDGER_SIZE_BYTES:
            self._writer.close()
            self._writer = None
        if self._writer is None:
            self._writer = self._bookkeeper.create_ledger_adv(LedgerId.random(), custom_metadata={"kind": b"blobs"})
        return self._writer

    def delete_before(self, time_ms: int) -> int:
        """Delete the closed ledgers created before `time_ms` (milliseconds since 1970), and return their number."""
        count = 0
        for ledger in self._bookkeeper.list_ledgers(ledger_scope_id=None):
            metadata = self._bookkeeper.get_ledger_metadata(ledger)
            is_blobs = metadata.custom_metadata.get("kind") == b"blobs"
            if is_blobs and metadata.is_closed and (metadata.ctime_ms or 0) < time_ms:
                self._bookkeeper.delete_ledger(ledger)
                count += 1
        return count

    def close(self) -> None:
        """Close the ledger being written."""
        if self._writer is not None:
            self._writer.close()


def main(metadata_uri: str, action: str, *names: str) -> None:
    with BookKeeper(metadata_uri) as bookkeeper:
        store = BlobStore(bookkeeper)
        for name in names:
            if action == "put":
                print(store.put(Path(name).read_bytes()))
            else:
                sys.stdout.buffer.write(store.get(name))
        store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
