"""SortedLedgers and SizesByLedger: many ledgers in memory, at 16 and 24 bytes each."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import overload

from bkctl.ids import LedgerId


class SortedLedgers(Sequence[LedgerId]):
    """Ledgers in ascending order, as `ledgers` has them."""

    __slots__ = ("_ids", "_scopes")

    def __init__(self, ledgers: Iterable[LedgerId] = ()) -> None:
        self._scopes, self._ids = array("Q"), array("Q")
        for scope_id, ledger_id in ledgers:
            self._scopes.append(scope_id)
            self._ids.append(ledger_id)

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, at: int) -> LedgerId: ...

    @overload
    def __getitem__(self, at: slice) -> list[LedgerId]: ...

    def __getitem__(self, at: int | slice) -> LedgerId | list[LedgerId]:
        if isinstance(at, slice):
            return list(map(LedgerId, self._scopes[at], self._ids[at]))
        return LedgerId(self._scopes[at], self._ids[at])

    def __iter__(self) -> Iterator[LedgerId]:
        return map(LedgerId, self._scopes, self._ids)

    def place(self, ledger: object) -> int:
        """Return the index of the ledger, -1 for a ledger that is not here."""
        if not isinstance(ledger, LedgerId):
            return -1
        first = bisect_left(self._scopes, ledger.scope_id)
        end = bisect_right(self._scopes, ledger.scope_id, first)
        at = bisect_left(self._ids, ledger.ledger_id, first, end)
        return at if at < end and self._ids[at] == ledger.ledger_id else -1

    def __contains__(self, ledger: object) -> bool:
        return self.place(ledger) >= 0


class SizesByLedger(Mapping[LedgerId, int]):
    """Bytes by ledger, in ascending order of the ledgers."""

    __slots__ = ("_ledgers", "_sizes")

    def __init__(self, sizes: Mapping[LedgerId, int] = {}) -> None:
        self._ledgers = SortedLedgers(sorted(sizes))
        self._sizes = array("Q", (sizes[ledger] for ledger in self._ledgers))

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[LedgerId]:
        return iter(self._ledgers)

    def __getitem__(self, ledger: LedgerId) -> int:
        at = self._ledgers.place(ledger)
        if at < 0:
            raise KeyError(ledger)
        return self._sizes[at]

    @property
    def total(self) -> int:
        """Return the bytes of all ledgers."""
        return sum(self._sizes)
