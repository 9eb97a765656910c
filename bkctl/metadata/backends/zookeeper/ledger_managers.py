"""Apache's layouts of ledgers on ZooKeeper, each with the tree of the scopes ≠ 0 beside it.

Source: AbstractZkLedgerManager and its subclasses, StringUtils.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator
from typing import Final

from bkctl.errors import Conflict, LedgerNotFound, UsageError
from bkctl.ids import I64_MAX, LedgerId, ledger_ids
from bkctl.metadata.backends.zookeeper.id_generators import SHORT_ID_END, LongIdGenerator, ShortIdGenerator
from bkctl.metadata.backends.zookeeper.scopes import ScopesTree, scoped_ledger_path
from bkctl.metadata.ledgers import LedgerManager, ScopesState
from bkctl.metadata.store import MetadataStore, names_in, walk_levels

_FLAT_LEDGER: Final = re.compile(r"L([0-9]{10,19})", re.ASCII)
_LEAF: Final = re.compile(r"L([0-9]{4})", re.ASCII)
#: Source: StringUtils.FLAT_LEDGER_NODE_REGEX, getShortHierarchicalLedgerPath.
_TEN_DIGITS_MAX: Final = 10**10 - 1


class ZooKeeperLedgerManager(LedgerManager):
    """Trees of directories for scope 0, a generator of its ids, and the tree of the scopes ≠ 0."""

    #: Of each tree, in the order of their ids: the widths of its directories' names, its first id, the end of its ids.
    _trees: tuple[tuple[tuple[int, ...], int, int], ...] = ()
    _generator: type[ShortIdGenerator] = LongIdGenerator
    #: The path of the generator's first sequence.
    _sequence: str = "idgen"

    def __init__(self, store: MetadataStore) -> None:
        super().__init__(store)
        self._scopes = ScopesTree(store)
        self._ids = self._generator(store, self._sequence)

    @abstractmethod
    def _default_path(self, ledger_id: int) -> str:
        """Return the path of a ledger of scope 0. Raises UsageError for an id that does not fit."""

    def _default_batches(self, after: int) -> Iterator[list[LedgerId]]:
        """Yield scope 0's ledgers after the id `after`, ascending, one directory at a time."""
        for widths, first, end in self._trees:
            yield from self._walk_default(widths, first, end, after)

    def path(self, ledger: LedgerId) -> str:
        return scoped_ledger_path(ledger) if ledger.is_scoped else self._default_path(ledger.ledger_id)

    def scopes_state(self) -> ScopesState:
        return self._scopes.state()

    def batches(self, scope_id: int | None = 0, after: LedgerId | None = None) -> Iterator[list[LedgerId]]:
        if scope_id in (None, 0) and (after is None or not after.is_scoped):
            yield from self._default_batches(-1 if after is None else after.ledger_id)
        if scope_id != 0:
            yield from self._scopes.batches(scope_id, after)

    def _prepare_scopes(self) -> None:
        self._scopes.prepare()

    def _path_to_read(self, ledger: LedgerId) -> str:
        if ledger.is_scoped:
            try:
                self._scopes.is_ours()
            except Conflict as error:
                raise LedgerNotFound(f"No ledger {ledger} in {self.store.name}", hint=str(error)) from error
        return super()._path_to_read(ledger)

    def _prunable_count(self, ledger: LedgerId, path: str) -> int:
        return path.count("/") - (1 if ledger.is_scoped else 0)  # never `scopes` itself

    def _walk_default(self, widths: tuple[int, ...], first: int, end: int, after: int) -> Iterator[list[LedgerId]]:
        """Yield the ledger ids in [first, end) of the decimal tree of `widths` below the root, after the id `after`."""
        first = max(first, after + 1)
        if first >= end:
            return
        levels = tuple(re.compile(f"[0-9]{{{width}}}", re.ASCII) for width in widths)
        digit_count = sum(widths)
        for _, digits, names in walk_levels(self.store, "", levels, f"{first:0{digit_count + 4}d}"[:digit_count]):
            high = int(digits) * 10_000
            if high >= end:
                return
            ids = [high + number for number in _leaf_numbers(names)]
            if ids and not first <= ids[0] <= ids[-1] < end:
                ids = [ledger_id for ledger_id in ids if first <= ledger_id < end]
            if ids:
                yield ledger_ids(0, ids)

    def _new_default_id(self) -> int:
        return self._ids.next_id()

    def id_position(self) -> int:
        return self._ids.position()

    def skip_ids(self, position: int) -> bool:
        return self._ids.skip_to(position)


class HierarchicalLedgerManager(ZooKeeperLedgerManager):
    """Ids below 2^31−1 as `00/1234/L5678`, the others as 19 digits. Source: HierarchicalLedgerManager."""

    _trees = (((2, 4), 0, SHORT_ID_END), ((3, 4, 4, 4), SHORT_ID_END, 1 << 63))

    def _default_path(self, ledger_id: int) -> str:
        return _short_path(ledger_id) if ledger_id < SHORT_ID_END else _long_path(ledger_id)


class LegacyHierarchicalLedgerManager(ZooKeeperLedgerManager):
    """All ids as `00/1234/L5678`, so of up to 10 digits. Source: LegacyHierarchicalLedgerManager."""

    id_max = _TEN_DIGITS_MAX
    _trees = (((2, 4), 0, _TEN_DIGITS_MAX + 1),)
    _generator = ShortIdGenerator

    def _default_path(self, ledger_id: int) -> str:
        if ledger_id > self.id_max:
            raise UsageError(f"Ledger id {ledger_id} has more than the 10 digits of a LegacyHierarchical layout")
        return _short_path(ledger_id)


class LongHierarchicalLedgerManager(ZooKeeperLedgerManager):
    """All ids as `000/0000/0000/1234/L5678`; LongLong too. Source: LongHierarchicalLedgerManager."""

    _trees = (((3, 4, 4, 4), 0, 1 << 63),)

    def _default_path(self, ledger_id: int) -> str:
        return _long_path(ledger_id)


class FlatLedgerManager(ZooKeeperLedgerManager):
    """All ledgers side by side as `L0012345678`. Source: FlatLedgerManager.

    Longer ids are read and listed, although Apache's `nukeexistingcluster` refuses a root with them.
    """

    id_max = _TEN_DIGITS_MAX
    _generator = ShortIdGenerator
    _sequence = ""

    def _default_path(self, ledger_id: int) -> str:
        return f"L{ledger_id:010d}"

    def _default_batches(self, after: int) -> Iterator[list[LedgerId]]:
        matches = map(_FLAT_LEDGER.fullmatch, names_in(self.store, ""))
        ids = sorted(number for match in matches if match and after < (number := int(match[1])) <= I64_MAX)
        if ids:
            yield ledger_ids(0, ids)


def _leaf_numbers(names: list[str]) -> list[int]:
    """Return the numbers of the names that are `L` and four digits, in the order given; other names are passed over."""
    text = "".join(names)
    digits = text.replace("L", "")
    # Check up to ten thousand names at once: five characters each, of which the first is the L.
    if (
        text[::5] == "L" * len(names)
        and len(text) == 5 * len(names) == len(digits) + len(names)
        and digits.isascii()
        and digits.isdigit()
    ):
        return [int(digits[at : at + 4]) for at in range(0, len(digits), 4)]
    return [int(match[1]) for match in map(_LEAF.fullmatch, names) if match]


def _short_path(ledger_id: int) -> str:
    digits = f"{ledger_id:010d}"
    return f"{digits[:2]}/{digits[2:6]}/L{digits[6:]}"


def _long_path(ledger_id: int) -> str:
    digits = f"{ledger_id:019d}"
    return f"{digits[:3]}/{digits[3:7]}/{digits[7:11]}/{digits[11:15]}/L{digits[15:]}"
