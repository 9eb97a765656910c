"""Ledgers on HBase: rows by scope and ledger id, listed by merging the ranges of a scope."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, islice, tee
from typing import Final

from bkctl.errors import BkctlError
from bkctl.ids import U64_MAX, LedgerId
from bkctl.metadata.backends.hbase.hbase_store import HBaseStore
from bkctl.metadata.ledgers import QualifiedNameLedgerManager, VersionedMetadata
from bkctl.metadata.store import attempt

_BATCH_SIZE: Final = 1000
#: Ledgers of one scope that are passed over before the listing of scopes starts again behind it.
_PASSED_MAX: Final = 4000


class HBaseLedgerManager(QualifiedNameLedgerManager):
    """Every ledger at `ledgers/<qualified name>`, a row of HBase's table; ids of scope 0 from its counter."""

    store: HBaseStore

    def read_many(self, ids: Iterable[LedgerId]) -> Iterator[tuple[LedgerId, VersionedMetadata | BkctlError]]:
        """See LedgerManager.read_many: a malformed row is Corrupt in its place."""
        ledgers, asked = tee(ids)
        rows = self.store.rows(ledger.value for ledger in asked)
        for ledger, found in zip(ledgers, rows, strict=True):
            yield ledger, found if isinstance(found, BkctlError) else attempt(self.parse, ledger, found)

    def batches(self, scope_id: int | None = 0, after: LedgerId | None = None) -> Iterator[list[LedgerId]]:
        """See LedgerManager.batches: one listing, also of all scopes; a list holds ledgers of one scope."""
        first = LedgerId(scope_id or 0, 0).value
        last = LedgerId(U64_MAX if scope_id is None else scope_id, U64_MAX).value
        if after is not None:
            first = max(first, after.value + 1)
        for _, found in groupby(map(LedgerId.from_value, self.store.ledgers(first, last)), lambda each: each.scope_id):
            while batch := list(islice(found, _BATCH_SIZE)):
                yield batch

    def scopes(self) -> Iterator[int]:
        if next(self.store.ledgers(0, LedgerId(0, U64_MAX).value), None) is not None:  # passes over most ledgers
            yield 0
        start: int | None = LedgerId(1, 0).value
        while start is not None:
            scope, passed = -1, 0
            found, start = self.store.ledgers(start, LedgerId(U64_MAX, U64_MAX).value), None
            for ledger in found:
                passed += 1
                if ledger >> 64 != scope:
                    scope, passed = ledger >> 64, 0
                    yield scope
                elif passed > _PASSED_MAX:
                    start = (scope + 1) << 64
                    break
