"""Generators of ledger ids in scope 0, from ZooKeeper's sequential nodes. Source: ZkLedgerIdGenerator,
LongZkLedgerIdGenerator."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Final

from bkctl.errors import AlreadyExists, Conflict, IllegalOperation, NotFound
from bkctl.metadata.store import NEW, MetadataStore

#: The first id that the hierarchical manager keeps in the long tree, and that a 31-bit sequence cannot give.
SHORT_ID_END: Final = (1 << 31) - 1
_LONG: Final = "idgen-long"
_HIGH_ORDER_DIRECTORY: Final = re.compile(r"HOB-([0-9]{10})", re.ASCII)
_HIGH_ORDER_DIRECTORIES_KEPT: Final = 3


class IdGenerator(ABC):
    """Gives each id once."""

    def __init__(self, store: MetadataStore) -> None:
        self.store = store

    @abstractmethod
    def next_id(self) -> int:
        """Return the next id. Raises IllegalOperation when none is left."""

    @abstractmethod
    def position(self) -> int:
        """See LedgerManager.id_position."""

    @abstractmethod
    def skip_to(self, position: int) -> bool:
        """See LedgerManager.skip_ids."""


class ShortIdGenerator(IdGenerator):
    """31-bit ids from the sequence at `path`. Source: ZkLedgerIdGenerator."""

    def __init__(self, store: MetadataStore, path: str) -> None:
        super().__init__(store)
        self._path = path

    def next_id(self) -> int:
        """See IdGenerator.next_id."""
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


class LongIdGenerator(IdGenerator):
    """31-bit ids first, then 63-bit ids: directory << 32 | sequence in it. Source: LongZkLedgerIdGenerator."""

    def next_id(self) -> int:
        """See IdGenerator.next_id."""
        if self.store.get(_LONG) is None:
            ledger_id = self.store.sequence("idgen")
            if 0 <= ledger_id < SHORT_ID_END:
                return ledger_id
            self._create_if_missing(_LONG)
        while True:
            directories = sorted(self._directories())
            if not directories:
                self._create_if_missing(_directory_path(1))
                continue
            high = directories[-1]
            low = self.store.sequence(_directory_path(high))
            if 0 <= low < SHORT_ID_END:
                for old in directories[:-_HIGH_ORDER_DIRECTORIES_KEPT]:
                    self._delete_if_empty(_directory_path(old))
                return high << 32 | low
            if high >= SHORT_ID_END:
                raise IllegalOperation(f"No ledger ids are left in {self.store.name}")
            self._create_if_missing(_directory_path(high + 1))

    def position(self) -> int:
        """See LedgerManager.id_position."""
        if self.store.get(_LONG) is None:
            return self.store.sequence_position("idgen")
        # Without a directory the generator starts with number 1.
        high = max(self._directories(), default=1)
        return high << 32 | self.store.sequence_position(_directory_path(high))

    def skip_to(self, position: int) -> bool:
        """See LedgerManager.skip_ids. Where the short ids are too far behind, the long ones begin."""
        if position <= self.position():
            return True
        is_short = position < SHORT_ID_END and self.store.get(_LONG) is None
        if is_short and self.store.advance_sequence("idgen", position):
            return True
        high = (position - 1 >> 32) + 1
        if high >= SHORT_ID_END:
            return False
        self._create_if_missing(_LONG)
        self._create_if_missing(_directory_path(high))
        return True

    def _directories(self) -> list[int]:
        names = self.store.children(_LONG) or ()
        return [int(match[1]) for match in map(_HIGH_ORDER_DIRECTORY.fullmatch, names) if match]

    def _create_if_missing(self, path: str) -> None:
        try:
            self.store.put(path, b"", NEW)
        except AlreadyExists:
            return

    def _delete_if_empty(self, path: str) -> None:
        try:
            self.store.delete(path, 0)
        except (NotFound, Conflict):
            return


def _directory_path(number: int) -> str:
    return f"{_LONG}/HOB-{number:010d}"
