"""Digest verdicts on records of an extract, and the evidence for those that only a ledger's metadata decides."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bkctl.errors import BkctlError, Corrupt, LedgerNotFound, Unauthorized, Unreachable, Unsupported, UsageError
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.ids import LedgerId

if TYPE_CHECKING:
    from bkctl.metadata.cluster import Cluster

#: Ledgers whose digests are kept in memory.
_LEDGERS_MAX: Final = 100_000


class LedgerDigests:
    """The digests of ledgers with their passwords, from `cluster`; None: digests that need a password stay unknown."""

    def __init__(self, cluster: Cluster | None) -> None:
        self._cluster = cluster
        self._known = lru_cache(_LEDGERS_MAX)(self._digest_of)

    def of_record(self, ledger: str, entry_id: int, body: bytes) -> tuple[str | None, bool]:
        """Return the digest type that a record matches (None: none, or unknown), and whether its bytes are evidence.

        They are not if the digest type of the ledger has nothing to check, or the ledger no longer exists.
        """
        if self._cluster is None:
            return None, True
        manager = self._known(self._cluster, ledger)
        if not isinstance(manager, DigestManager):
            return None, manager is not None
        try:
            manager.open(body, entry_id)
        except BkctlError:
            return None, True
        return manager.digest_type.name, False

    def judge(
        self, records: pa.RecordBatch, read: Callable[[int, int], bytes]
    ) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Return `records` with the digests that `cluster` tells, and the evidence of those that stay in doubt.

        `read(offset, size)` reads the file of the records.
        """
        digests = records.column("digest")
        ledgers = records.column("ledgerQualifiedName")
        doubtful = pc.and_(digests.is_null(), ledgers.is_valid())
        places = np.flatnonzero(doubtful.to_numpy(zero_copy_only=False))
        chosen = records.take(pa.array(places))
        found: dict[int, str] = {}
        kept: list[int] = []
        bodies: list[bytes] = []
        names = ("ledgerQualifiedName", "entryId", "offset", "recordSize")
        for number, (ledger, entry_id, offset, size) in enumerate(
            zip(*(chosen.column(name).to_pylist() for name in names), strict=True)
        ):
            body = read(offset + 4, size)
            digest, is_evidence = self.of_record(ledger, entry_id, body)
            if digest is not None:
                found[int(places[number])] = digest
            elif is_evidence:
                kept.append(number)
                bodies.append(body)
        if found:
            values = digests.to_pylist()
            for place, digest in found.items():
                values[place] = digest
            records = records.set_column(records.schema.get_field_index("digest"), "digest", pa.array(values))
        evidence = chosen.take(pa.array(kept, pa.int64())).select(["offset", "ledgerQualifiedName", "entryId"])
        return records, evidence.append_column("record", pa.array(bodies, pa.binary()))

    @staticmethod
    def _digest_of(cluster: Cluster, name: str) -> DigestManager | BkctlError | None:
        """Return None if there is nothing to check, or no ledger any more; an error: its metadata cannot be used."""
        ledger = LedgerId.from_value(int(name, 16))
        try:
            metadata = cluster.ledgers.read(ledger).metadata
            if metadata.digest_type in (None, DigestType.DUMMY):
                return None
            return DigestManager(ledger, metadata.digest_type, metadata.password or b"")
        except LedgerNotFound:
            return None
        except (Corrupt, Unsupported, UsageError) as error:
            return error
        except (Unauthorized, Unreachable):
            raise
        except BkctlError as error:
            # A refusal of the metadata store must not pass for damage of the file whose records are judged.
            raise Unreachable(error.message, hint=error.hint) from error
