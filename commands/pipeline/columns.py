"""Columns that several commands of `bkctl pipeline` print, and sums of columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from bkctl.ids import LedgerId

from ..kit.columns import Column, Kind, hex_column


def ledger_of(row: Any) -> LedgerId | None:
    """Return the ledger of a row with a ledgerQualifiedName."""
    name = row.ledgerQualifiedName
    return None if name is None else LedgerId.from_value(int(name, 16))


LEDGER = Column("LEDGER", "ledger", ledger_of, Kind.LEDGER)
BOOKIE = Column("BOOKIE", "bookieId", "bookieId")
FILE = Column("FILE", "file", "file", flexible=True, spare=2)
LEDGERS = Column("LEDGERS", "ledgerCount", "ledgerCount", Kind.INTEGER)
BOOKIES = Column("BOOKIES", "bookieCount", "bookieCount", Kind.INTEGER)
LOGS = Column("LOGS", "logCount", "logCount", Kind.INTEGER)
ENTRIES = Column("ENTRIES", "entryCount", "entryCount", Kind.INTEGER)
RANGE = (
    Column("FIRST", "firstEntryId", "firstEntryId", Kind.INTEGER),
    Column("LAST", "lastEntryId", "lastEntryId", Kind.INTEGER),
    ENTRIES,
    Column("FINDINGS", "findingCount", "findingCount", Kind.INTEGER),
)
SIZE = Column("SIZE", "size", "size", Kind.SIZE)
SUMS = (ENTRIES, SIZE)
LOG = (
    Column("LOG", "logId", "logId", Kind.INTEGER),
    hex_column("logIdHex", "logIdHex"),
    Column("SCOPED", "scoped", "scoped", Kind.BOOLEAN),
)


class Sums(Counter[str]):
    """Sums of the integer columns of rows by name, and in `count` the number of rows."""

    count = 0

    def add(self, row: Any) -> None:
        """Add a row to the sums."""
        self.count += 1
        self.update({name: value for name, value in row.asDict().items() if type(value) is int})


def sums_of(rows: Iterable[Any]) -> Sums:
    """Return the sums of `rows`."""
    sums = Sums()
    for row in rows:
        sums.add(row)
    return sums
