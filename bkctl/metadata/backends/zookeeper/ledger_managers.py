"""Apache's layouts of ledgers on ZooKeeper, each with the tree of the scopes ≠ 0 beside it.

Source: AbstractZkLedgerManager and its subclasses, StringUtils.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Final

from bkctl.errors import AlreadyExists, Conflict, IllegalOperation, NotFound, UsageError
from bkctl.ids import I64_MAX, LedgerId, ledger_ids
from bkctl.metadata.ledgers import INSTANCE_ID, SCOPES, LedgerManager, ScopesState
from bkctl.metadata.store import NEW, create_if_missing, names_in, walk_levels

#: The first id that the hierarchical manager keeps in the long tree, and that a 31-bit sequence cannot give.
SHORT_ID_END: Final = (1 << 31) - 1
_LONG: Final = "idgen-long"
_HIGH_ORDER_DIRECTORY: Final = re.compile(r"HOB-([0-9]{10})", re.ASCII)
_HIGH_ORDER_DIRECTORIES_KEPT: Final = 3
_SCOPED_LEAF: Final = re.compile(r"L([0-9a-f]{4})", re.ASCII)
_FLAT_LEDGER: Final = re.compile(r"L([0-9]{10,19})", re.ASCII)
_LEAF: Final = re.compile(r"L([0-9]{4})", re.ASCII)
#: Source: StringUtils.FLAT_LEDGER_NODE_REGEX, getShortHierarchicalLedgerPath.
_TEN_DIGITS_MAX: Final = 10**10 - 1


def _directory_path(number: int) -> str:
    return f"{_LONG}/HOB-{number:010d}"


class ZooKeeperLedgerManager(LedgerManager):
    """Trees of directories for scope 0, and beside them `scopes`, the tree of one cluster's scopes ≠ 0.

    Ids are given once: 31-bit ids, then, as a layout has them, directory << 32 | 31-bit number.
    Source: ZkLedgerIdGenerator, LongZkLedgerIdGenerator.
    """

    #: The path of the sequence of 31-bit ids.
    _sequence: str = "idgen"
    _has_long_ids = True
    _has_scopes = False
    #: Of each tree, in the order of their ids: the widths of its directories' names, its first id, the end of its ids.
    _trees: tuple[tuple[tuple[int, ...], int, int], ...] = ()

    # ids

    def _is_short(self) -> bool:
        """Return whether the next id comes from the first sequence."""
        return not self._has_long_ids or self.store.get(_LONG) is None

    def _new_default_id(self) -> int:
        """Return the next id. Raises IllegalOperation when none is left."""
        if self._is_short():
            ledger_id = self.store.sequence(self._sequence)
            if 0 <= ledger_id < SHORT_ID_END:
                return ledger_id
            if not self._has_long_ids:
                raise IllegalOperation(f"No ledger ids are left in {self.store.name}: this layout's end at 2^31")
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

    def id_position(self) -> int:
        """See LedgerManager.id_position; every node created beside the sequence counts, so some ids may be skipped."""
        if self._is_short():
            return self.store.sequence_position(self._sequence)
        # Without a directory the generator starts with number 1.
        high = max(self._directories(), default=1)
        return high << 32 | self.store.sequence_position(_directory_path(high))

    def skip_ids(self, position: int) -> bool:
        """See LedgerManager.skip_ids. Where the short ids are too far behind, the long ones begin."""
        if not self._has_long_ids:
            return self.store.advance_sequence(self._sequence, position)
        if position <= self.id_position():
            return True
        is_short = position < SHORT_ID_END and self._is_short()
        if is_short and self.store.advance_sequence(self._sequence, position):
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

    # scopes

    def scopes_state(self) -> ScopesState:
        scopes, instance_id = self.store.get_many((SCOPES, INSTANCE_ID))
        if scopes is None:
            return "absent"
        return "ours" if scopes.value == (b"" if instance_id is None else instance_id.value) else "foreign"

    def unlisted(self) -> list[str]:
        found = super().unlisted()
        for widths, id_end, path in (((2, 4), _TEN_DIGITS_MAX + 1, _short_path), ((3, 4, 4, 4), 1 << 63, _long_path)):
            first, end = next((tree[1:] for tree in self._trees if tree[0] == widths), (id_end, id_end))
            for ids in (next(self._walk_default(widths, *gap, -1), ()) for gap in ((0, first), (end, id_end))):
                found += [path(ledger.ledger_id) for ledger in ids[:1]]
        return found + (
            [name for name in names_in(self.store, "") if _FLAT_LEDGER.fullmatch(name)][:1] if self._trees else []
        )

    def _check_scopes(self) -> bool:
        """Return whether the tree exists. Raises Conflict for another cluster's tree."""
        if not self._has_scopes:
            state = self.scopes_state()
            if state == "foreign":
                raise Conflict(
                    f"The scoped ledgers in {self.store.name} belong to a cluster that was formatted: "
                    f"{SCOPES} names another instance id than {INSTANCE_ID}",
                    hint="remove the orphaned scopes tree first",
                )
            self._has_scopes = state == "ours"
        return self._has_scopes

    def _prepare_scopes(self) -> None:
        """Create the tree where it is missing. Raises Conflict for another cluster's tree."""
        if not self._check_scopes():
            instance_id = self.store.get(INSTANCE_ID)
            try:
                self.store.put(SCOPES, b"" if instance_id is None else instance_id.value, NEW)
            except AlreadyExists:
                self._check_scopes()

    def _scoped_batches(self, scope_id: int | None, after: LedgerId | None) -> Iterator[list[LedgerId]]:
        """Yield the ledgers of the scope (None: of every scope ≠ 0) after `after`, one directory at a time.

        Raises Conflict for another cluster's tree; with None such a tree is passed over.
        """
        if scope_id is None:
            if self._has_scopes or self.scopes_state() == "ours":
                yield from self._walk(SCOPES, (4, 12, 4, 4, 4), after, 0)
        elif (after is None or after.scope_id <= scope_id) and self._check_scopes():
            first = after if after is not None and after.scope_id == scope_id else None
            yield from self._walk(_scope_path(scope_id), (4, 4, 4), first, scope_id)

    def _walk(
        self, base: str, widths: tuple[int, ...], after: LedgerId | None, scope_id: int
    ) -> Iterator[list[LedgerId]]:
        """Walk the tree below `base`, whose directories name the part of the id that `scope_id` does not."""
        first = after.qualified_name[-sum(widths) - 4 :] if after is not None else ""
        levels = tuple(re.compile(f"[0-9a-f]{{{width}}}", re.ASCII) for width in widths)
        for _, digits, names in walk_levels(self.store, base, levels, first):
            high = LedgerId.from_value(scope_id << 64 | int(digits, 16) << 16)
            ids = [high.ledger_id | int(match[1], 16) for match in map(_SCOPED_LEAF.fullmatch, names) if match]
            found = ledger_ids(high.scope_id, ids)
            if after is not None and found and found[0] <= after:
                found = [ledger for ledger in found if ledger > after]
            if found:
                yield found

    # layouts

    @abstractmethod
    def _default_path(self, ledger_id: int) -> str:
        """Return the path of a ledger of scope 0. Raises UsageError for an id that does not fit."""

    def _default_batches(self, after: int) -> Iterator[list[LedgerId]]:
        """Yield scope 0's ledgers after the id `after`, ascending, one directory at a time."""
        for widths, first, end in self._trees:
            yield from self._walk_default(widths, first, end, after)

    def path(self, ledger: LedgerId) -> str:
        return _scoped_path(ledger) if ledger.is_scoped else self._default_path(ledger.ledger_id)

    def batches(self, scope_id: int | None = 0, after: LedgerId | None = None) -> Iterator[list[LedgerId]]:
        if scope_id in (None, 0) and (after is None or not after.is_scoped):
            yield from self._default_batches(-1 if after is None else after.ledger_id)
        if scope_id != 0:
            yield from self._scoped_batches(scope_id, after)

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


def _scoped_path(ledger: LedgerId) -> str:
    """Return the path of a scoped ledger's metadata, below the root."""
    name = f"{ledger.ledger_id:016x}"
    return f"{_scope_path(ledger.scope_id)}/{name[:4]}/{name[4:8]}/{name[8:12]}/L{name[12:]}"


def _scope_path(scope_id: int) -> str:
    name = f"{scope_id:016x}"
    return f"{SCOPES}/{name[:4]}/{name[4:]}"


class HierarchicalLedgerManager(ZooKeeperLedgerManager):
    """Ids below 2^31−1 as `00/1234/L5678`, the others as 19 digits. Source: HierarchicalLedgerManager."""

    _trees = (((2, 4), 0, SHORT_ID_END), ((3, 4, 4, 4), SHORT_ID_END, 1 << 63))

    def _default_path(self, ledger_id: int) -> str:
        return _short_path(ledger_id) if ledger_id < SHORT_ID_END else _long_path(ledger_id)


class LegacyHierarchicalLedgerManager(ZooKeeperLedgerManager):
    """All ids as `00/1234/L5678`, so of up to 10 digits. Source: LegacyHierarchicalLedgerManager."""

    id_max = _TEN_DIGITS_MAX
    _trees = (((2, 4), 0, _TEN_DIGITS_MAX + 1),)
    _has_long_ids = False

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
    _has_long_ids = False
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
    return _short_directory(ledger_id // 10_000) + f"/L{ledger_id % 10_000:04d}"


@lru_cache(maxsize=64)  # Lists name ten thousand ledgers in each.
def _short_directory(number: int) -> str:
    return f"{number // 10_000:02d}/{number % 10_000:04d}"


def _long_path(ledger_id: int) -> str:
    digits = f"{ledger_id:019d}"
    return f"{digits[:3]}/{digits[3:7]}/{digits[7:11]}/{digits[11:15]}/L{digits[15:]}"
