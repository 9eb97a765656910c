"""Columns: the fields of one kind of row, declared once for all forms of output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from typing import Any, Final, NamedTuple

from .texts import binary_text, readable_text


class Output(StrEnum):
    """The forms of output; `table` for people, the rest for scripts."""

    TABLE = "table"
    JSON = "json"
    NDJSON = "ndjson"
    CSV = "csv"
    ID = "id"


class Kind(Enum):
    """The form of a column's value; None is `null` in JSON and `-` in a table."""

    LEDGER = "ledger"  # a LedgerId: three fields in JSON and csv, one cell in a table
    INTEGER = "integer"
    SIZE = "size"  # bytes: a number in JSON, KiB and MiB in a table
    TEXT = "text"
    BOOLEAN = "boolean"
    TIME = "time"  # milliseconds since 1970 → ISO 8601 UTC
    BINARY = "binary"  # bytes-like → base64
    NESTED = "nested"  # lists, dicts and scalars as json.dumps writes them


class Constant(NamedTuple):
    """The source of a column that has the same value in every row."""

    value: Any


Source = str | Constant | Callable[[Any], Any]


class Column:
    """One field of a row.

    `source` is the origin of the value: an attribute path (`header.size`), a function of the row, or a Constant.
    `title` is the table's (None: not in the table), `name` the JSON name. An `optional` field is left out of JSON (and
    of an object's table) where it is None. `flexible` cells are cut when the terminal is too narrow, which suits places
    and payloads, and never sentences. `text` overrides how a table shows the value; `style` gives the ANSI colour of a
    cell's text.
    """

    __slots__ = ("flexible", "kind", "name", "optional", "source", "style", "text", "title")

    def __init__(
        self,
        title: str | None,
        name: str,
        source: Source,
        kind: Kind = Kind.TEXT,
        *,
        flexible: bool = False,
        optional: bool = False,
        text: Callable[[Any], str] | None = None,
        style: Mapping[str, str] | None = None,
    ) -> None:
        self.title, self.name, self.source, self.kind = title, name, source, kind
        self.flexible, self.optional, self.text, self.style = flexible, optional, text, style


def ledger_column(source: str = "ledger") -> Column:
    """Return the column of a LedgerId: three id fields in JSON and csv, decimal or qualified name in a table."""
    return Column("LEDGER", "ledger", source, Kind.LEDGER)


def payload_column(payload: Callable[[Any], bytes | None], form: str | None) -> Column:
    """Return the column of an entry's payload as `form` writes it; None: base64, in a table text where it is text."""

    def text(row: Any) -> str | None:
        data = payload(row)
        return None if data is None else binary_text(data, form)

    if form is None:
        return Column("PAYLOAD", "payload", payload, Kind.BINARY, flexible=True, text=readable_text)
    return Column("PAYLOAD", "payload", text, flexible=True)


class Columns:
    """The fields of one kind of row. `key` is what `-o id` prints: the name of a column, or a column of its own.

    None: the command has no ids.
    """

    def __init__(self, *columns: Column, key: str | Column | None = None) -> None:
        assert len({column.name for column in columns}) == len(columns), "two columns of one name"
        self.columns = columns
        self.key: Column | None = None
        if isinstance(key, str):
            self.key = next(column for column in columns if column.name == key)
        else:
            self.key = key

    def and_also(self, *more: Column) -> Columns:
        """Return these columns with `more` behind them."""
        return Columns(*self.columns, *more, key=self.key)

    def names(self) -> list[str]:
        """Return the JSON names in order."""
        names: list[str] = []
        for column in self.columns:
            names.extend(LEDGER_FIELDS if column.kind is Kind.LEDGER else [column.name])
        return names


LEDGER_FIELDS: Final = ("ledgerScopeId", "ledgerId", "ledgerQualifiedName")
