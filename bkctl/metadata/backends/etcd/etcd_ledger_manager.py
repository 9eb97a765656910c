"""Ledgers on etcd, at the keys of Apache's driver. Source: EtcdUtils, EtcdLedgerManager, Etcd64bitIdGenerator."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Final

from bkctl.errors import IllegalOperation
from bkctl.ids import LedgerId
from bkctl.metadata.ledgers import LEDGERS, QualifiedNameLedgerManager
from bkctl.metadata.store import MetadataStore, names_in

_UUID: Final = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_BUCKETS: Final = 0x80
_BUCKET_SHIFT: Final = 56


class EtcdLedgerManager(QualifiedNameLedgerManager):
    """Every ledger at `ledgers/<UUID>`: 128 bits, scope first; Apache's driver always writes scope 0.

    Ids of scope 0 come from 128 buckets, each a key that counts its writes: bucket << 56 | count.
    """

    def __init__(self, store: MetadataStore) -> None:
        super().__init__(store)
        self._bucket = random.randrange(_BUCKETS)

    def _name(self, ledger: LedgerId) -> str:
        text = ledger.qualified_name
        return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    def _ledger(self, name: str) -> LedgerId | None:
        return LedgerId.from_value(int(name.replace("-", ""), 16)) if _UUID.fullmatch(name) else None

    def _names_after(self, name: str, limit: int) -> list[str]:
        return names_in(self.store, LEDGERS, after=name, limit=limit)

    def _new_default_id(self) -> int:
        for _ in range(_BUCKETS):
            self._bucket = bucket = (self._bucket + 1) % _BUCKETS
            number = self.store.sequence(f"buckets/{bucket:03d}") + 1
            if number < 1 << _BUCKET_SHIFT:
                return bucket << _BUCKET_SHIFT | number
        raise IllegalOperation(f"No ledger ids are left in {self.store.name}")

    def id_position(self) -> int:
        """See LedgerManager.id_position: the highest bucket in use, with the count of the fullest one."""
        counts = self.generator_state()
        highest = max((bucket for bucket, count in enumerate(counts) if count), default=None)
        return 0 if highest is None else highest << _BUCKET_SHIFT | max(counts) + 1

    def skip_ids(self, position: int) -> bool:
        if position <= 1:
            return True
        highest, count = position >> _BUCKET_SHIFT, position & ((1 << _BUCKET_SHIFT) - 1)
        return all(
            self.store.advance_sequence(f"buckets/{bucket:03d}", count - 1)
            for bucket in range(min(highest, _BUCKETS - 1) + 1)
        )

    def generator_state(self) -> tuple[int, ...]:
        """See LedgerManager.generator_state: the last number of each bucket."""
        return tuple(self.store.sequence_position(f"buckets/{bucket:03d}") for bucket in range(_BUCKETS))

    def generated_since(self, state: tuple[int, ...]) -> Iterator[LedgerId]:
        """See LedgerManager.generated_since: every id, without a listing, which would pass over whole buckets."""
        for bucket, (before, now) in enumerate(zip(state, self.generator_state(), strict=True)):
            for number in range(before + 1, now + 1):
                yield LedgerId(0, bucket << _BUCKET_SHIFT | number)
