"""Generators of ledger ids in scope 0, from ZooKeeper's sequential nodes.

Source: ZkLedgerIdGenerator, LongZkLedgerIdGenerator.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Final

from bkctl.errors import Conflict, IllegalOperation, NotFound
from bkctl.metadata.store import MetadataStore, create_if_missing

#: The first id that the hierarchical manager keeps in the long tree, and that a 31-bit sequence cannot give.
SHORT_ID_END: Final = (1 << 31) - 1
_LONG: Final = "idgen-long"
_HIGH_ORDER_DIRECTORY: Final = re.compile(r"HOB-([0-9]{10})", re.ASCII)
_HIGH_ORDER_DIRECTORIES_KEPT: Final = 3


class ShortIdGenerator:
    """Gives each 31-bit id once, from the sequence at `path`. Source: ZkLedgerIdGenerator."""

    def __init__(self, store: MetadataStore, path: str) -> None:
        self.store = store
        self._path = path

    def next_id(self) -> int:
        """Return the next id. Raises IllegalOperation when none is left."""
        ledger_id = self.store.sequence(self._path)
        if not 0 <= ledger_id < SHORT_ID_END:
            raise IllegalOperation(f"No ledger ids are left in {self.store.name}: this layout's end at 2^31")
        return ledger_id

    def position(self) -> int:
        """See LedgerManager.id_position; every node created beside the sequence counts, so some ids may be skipped."""
        return self.store.sequence_position(self._path)

    def skip_to(self, position: int) -> bool:
        """See LedgerManager.skip_ids."""
        return self.store.advance_sequence(self._path, position)


class LongIdGenerator(ShortIdGenerator):
    """31-bit ids first, then 63-bit ids: directory << 32 | sequence in it. Source: LongZkLedgerIdGenerator."""

    def next_id(self) -> int:
        if self.store.get(_LONG) is None:
            with suppress(IllegalOperation):
                return super().next_id()
            create_if_missing(self.store, _LONG, b"")
        while True:
            directories = sorted(self._directories())
            if not directories:
                create_if_missing(self.store, _directory_path(1), b"")
                continue
            high = directories[-1]
            low = self.store.sequence(_directory_path(high))
            if 0 <= low < SHORT_ID_END:
                for old in directories[:-_HIGH_ORDER_DIRECTORIES_KEPT]:
                    with suppress(NotFound, Conflict):  # not empty
                        self.store.delete(_directory_path(old), 0)
                return high << 32 | low
            if high >= SHORT_ID_END:
                raise IllegalOperation(f"No ledger ids are left in {self.store.name}")
            create_if_missing(self.store, _directory_path(high + 1), b"")

    def position(self) -> int:
        if self.store.get(_LONG) is None:
            return super().position()
        # Without a directory the generator starts with number 1.
        high = max(self._directories(), default=1)
        return high << 32 | self.store.sequence_position(_directory_path(high))

    def skip_to(self, position: int) -> bool:
        """See LedgerManager.skip_ids. Where the short ids are too far behind, the long ones begin."""
        if position <= self.position():
            return True
        is_short = position < SHORT_ID_END and self.store.get(_LONG) is None
        if is_short and super().skip_to(position):
            return True
        high = (position - 1 >> 32) + 1
        if high >= SHORT_ID_END:
            return False
        create_if_missing(self.store, _LONG, b"")
        create_if_missing(self.store, _directory_path(high), b"")
        return True

    def _directories(self) -> list[int]:
        names = self.store.children(_LONG) or ()
        return [int(match[1]) for match in map(_HIGH_ORDER_DIRECTORY.fullmatch, names) if match]


def _directory_path(number: int) -> str:
    return f"{_LONG}/HOB-{number:010d}"
