"""Filters that Spark pushes down to a source, as plain values on ledgers, entries and other columns.

A source applies a filter that it takes exactly, so that Spark does not check it again. Values are as in the columns:
ids are numbers, qualified names have 32 lower-case hex digits. A condition that no value can meet matches no row.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from bkctl.ids import I64_MAX, U64_MAX, LedgerId

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

    from bkctl.spark.sources.options import SourceOptions

LEDGER_COLUMNS: Final = ("ledgerScopeId", "ledgerId", "ledgerQualifiedName")
_IDS: Final = LEDGER_COLUMNS[:2]
_NAME: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass
class Conditions:
    """Conditions that a row must meet, all of them; at first none. Plain values, which pickle.

    `values`: column → its allowed values. `first` and `last`: integer column → its bounds, both included. `ledgers`:
    the ledgers of the option `ledger`, or None; filters that Spark pushes down limit them further.
    """

    values: dict[str, frozenset[Any]] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    ledgers: frozenset[LedgerId] | None = None

    @classmethod
    def of(cls, options: SourceOptions) -> Conditions:
        """Return the conditions of the options `ledger`, else `ledgerScopeId`."""
        conditions = cls()
        if named := options.ledgers():
            conditions.ledgers = frozenset(named)
        elif (scope_id := options.scope_id()) is not None:
            conditions.values["ledgerScopeId"] = frozenset((scope_id,))
        return conditions

    def push(
        self, filters: Sequence[Filter], texts: Collection[str] = (), integers: Collection[str] = (),
        never_null: Collection[str] = (),
    ) -> list[Filter]:  # fmt: skip
        """Take the filters on ledgers, the string columns `texts` and the columns `integers`; return the others.

        `IS NOT NULL` is taken for the columns `never_null`.
        """
        from pyspark.sql import datasource as ds

        texts, integers = (*texts, LEDGER_COLUMNS[2]), (*integers, *_IDS)
        left: list[Filter] = []
        for each in filters:
            path: tuple[str, ...] = getattr(each, "attribute", ())
            name = path[0] if len(path) == 1 else ""
            if isinstance(each, ds.IsNotNull) and name in never_null:
                continue
            value: Any = getattr(each, "value", None)
            values = list(value) if isinstance(each, ds.In) else [value]
            if name in integers:
                values = [_integer(value) for value in values]
            elif name not in texts or not all(isinstance(value, str) for value in values):
                values = [None]
            if not values or None in values:
                left.append(each)
            elif isinstance(each, ds.EqualTo | ds.EqualNullSafe | ds.In):
                allowed = frozenset(values)
                self.values[name] = allowed & self.values.get(name, allowed)
            elif name in integers and isinstance(each, ds.GreaterThan | ds.GreaterThanOrEqual):
                low = values[0] + isinstance(each, ds.GreaterThan)
                self.first[name] = max(low, self.first.get(name, low))
            elif name in integers and isinstance(each, ds.LessThan | ds.LessThanOrEqual):
                high = values[0] - isinstance(each, ds.LessThan)
                self.last[name] = min(high, self.last.get(name, high))
            else:
                left.append(each)
        return left

    def accepts(self, name: str, value: Any) -> bool:
        """Return whether `value` meets the conditions on the column `name`; None meets no condition."""
        if name in self.values and value not in self.values[name]:
            return False
        if name in self.first and (value is None or value < self.first[name]):
            return False
        return not (name in self.last and (value is None or value > self.last[name]))

    def accepts_ledger(self, ledger: LedgerId) -> bool:
        """Return whether `ledger` meets the conditions on ledgers and ids."""
        return (
            (self.ledgers is None or ledger in self.ledgers)
            and self.accepts("ledgerScopeId", ledger.scope_id)
            and self.accepts("ledgerId", ledger.ledger_id)
            and self.accepts("ledgerQualifiedName", ledger.qualified_name)
        )

    @property
    def about_ledgers(self) -> bool:
        """Return whether there is a condition on ledgers or their ids."""
        given = {*self.values, *self.first, *self.last}
        return self.ledgers is not None or not given.isdisjoint(LEDGER_COLUMNS)

    def wanted_ledgers(self) -> list[LedgerId] | None:
        """The ledgers that rows may be of, in order, where they can be counted; None where they cannot."""
        named, names = self.ledgers, self.values.get("ledgerQualifiedName")
        if names is not None:
            ids = {LedgerId.from_value(int(name, 16)) for name in names if _NAME.fullmatch(name)}
            named = frozenset(ids if named is None else ids & named)
        if named is None:
            scopes, numbers = self.ids_of("ledgerScopeId"), self.ids_of("ledgerId")
            if scopes is None or numbers is None:
                return None
            named = frozenset(LedgerId(scope_id, number) for scope_id in scopes for number in numbers)
        return sorted(filter(self.accepts_ledger, named))

    def entry_range(self) -> tuple[int, int]:
        """The first and the last entry id that rows may have, both included; first > last: no row is wanted."""
        first, last = self.first.get("entryId", 0), self.last.get("entryId", I64_MAX)
        ids = self.values.get("entryId")
        if ids is not None:
            first, last = max(first, min(ids, default=1)), min(last, max(ids, default=0))
        return first, last

    def ledger_mask(
        self, scope_ids: npt.NDArray[np.uint64] | None, ledger_ids: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.bool_] | None:
        """Return which rows belong to an accepted ledger (`scope_ids` None: all in scope 0); None: all rows."""
        wanted = self.wanted_ledgers()
        if wanted is not None:
            return mask_of_ledgers(ids_by_scope(wanted), scope_ids, ledger_ids)
        masks = [self.mask("ledgerId", ledger_ids)]
        if scope_ids is None:
            masks.append(None if self.accepts("ledgerScopeId", 0) else np.zeros(len(ledger_ids), np.bool_))
        else:
            masks.append(self.mask("ledgerScopeId", scope_ids))
        return all_of(masks)

    def mask(self, name: str, numbers: npt.NDArray[Any]) -> npt.NDArray[np.bool_] | None:
        """Return which values of the integer column `name`, of 64 bits, are accepted; None: all."""
        limits = np.iinfo(numbers.dtype)
        masks: list[npt.NDArray[np.bool_] | None] = []
        if name in self.values:
            masks.append(_isin(numbers, [each for each in self.values[name] if limits.min <= each <= limits.max]))
        first, last = self.first.get(name, limits.min), self.last.get(name, limits.max)
        if first > limits.max or last < limits.min:
            masks.append(np.zeros(len(numbers), np.bool_))
        else:
            if first > limits.min:
                masks.append(numbers >= numbers.dtype.type(first))
            if last < limits.max:
                masks.append(numbers <= numbers.dtype.type(last))
        return all_of(masks)

    def ids_of(self, name: str) -> frozenset[int] | None:
        """Return the ids that meet the conditions on the column `name`, where they can be counted; else None."""
        ids = self.values.get(name)
        if ids is None:
            return None
        return frozenset(each for each in ids if 0 <= each <= U64_MAX and self.accepts(name, each))


def _integer(value: object) -> int | None:
    """Return the integer that a filter names, which may be a decimal; None for any other value."""
    if isinstance(value, Decimal) and value.is_finite() and value == value.to_integral_value():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def all_of(masks: Iterable[npt.NDArray[np.bool_] | None]) -> npt.NDArray[np.bool_] | None:
    """Return the rows that all masks have; None stands for all rows."""
    given = [mask for mask in masks if mask is not None]
    found: npt.NDArray[np.bool_] | None = np.logical_and.reduce(given) if given else None
    return found


def _isin(numbers: npt.NDArray[Any], wanted: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    if len(wanted) == 1:
        equal: npt.NDArray[np.bool_] = numbers == numbers.dtype.type(wanted[0])
        return equal
    return np.isin(numbers, np.array(wanted, numbers.dtype))


def ids_by_scope(ledgers: Iterable[LedgerId]) -> dict[int, npt.NDArray[np.uint64]]:
    """Return the ledger ids of each scope."""
    found: dict[int, list[int]] = {}
    for ledger in ledgers:
        found.setdefault(ledger.scope_id, []).append(ledger.ledger_id)
    return {scope_id: np.array(ids, np.uint64) for scope_id, ids in found.items()}


def mask_of_ledgers(
    ids_by_scope: dict[int, npt.NDArray[np.uint64]],
    scope_ids: npt.NDArray[np.uint64] | None, ledger_ids: npt.NDArray[np.uint64],
) -> npt.NDArray[np.bool_]:  # fmt: skip
    """Return which rows belong to the ledgers of `ids_by_scope` (`scope_ids` None: all rows are of scope 0)."""
    if scope_ids is None:
        return _isin(ledger_ids, ids_by_scope.get(0, ledger_ids[:0]))
    mask = np.zeros(len(ledger_ids), np.bool_)
    for scope_id in ids_by_scope if len(ids_by_scope) == 1 else np.unique(scope_ids).tolist():
        if scope_id in ids_by_scope:
            mask |= (scope_ids == np.uint64(scope_id)) & _isin(ledger_ids, ids_by_scope[scope_id])
    return mask
