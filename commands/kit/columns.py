"""Columns: the fields of one kind of row, declared once for all forms of output."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum, StrEnum
from operator import attrgetter
from typing import Any, Final, NamedTuple

from bkctl.errors import UsageError

from .texts import binary_text, readable_text, with_0x


class Output(StrEnum):
    """The forms of output; `table` and `wide` (a table of all columns, not cut) for people, the rest for scripts."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    NDJSON = "ndjson"
    YAML = "yaml"
    CSV = "csv"
    ID = "id"


class Kind(Enum):
    """The form of a column's value; None is `null` in JSON and `-` in a table."""

    LEDGER = "ledger"  # a LedgerId: three fields in JSON and csv, one cell in a table
    INTEGER = "integer"
    SIZE = "size"  # bytes: a number in JSON, KiB and MiB in a table
    TEXT = "text"
    WORD = "word"  # one of a few names, such as endOfFile: words in a table
    BOOLEAN = "boolean"
    TIME = "time"  # milliseconds since 1970 → ISO 8601 UTC
    BINARY = "binary"  # bytes-like → base64
    NESTED = "nested"  # lists, dicts and scalars as json.dumps writes them


class Constant(NamedTuple):
    """The source of a column that has the same value in every row."""

    value: Any


Source = str | Constant | Callable[[Any], Any]


@dataclass(slots=True, eq=False)
class Column:
    """One field of a row.

    `source` is the origin of the value: an attribute path (`header.size`), a function of the row, or a Constant.
    `title` is the table's (None: not in the table), `name` the JSON name. An `optional` field is left out of JSON (and
    of an object's table) where it is None. `flexible` cells are cut when the terminal is too narrow, which suits
    places and payloads, and never sentences; `wraps` breaks them at spaces first. Where that is not enough, columns are
    left out: first those with the highest `spare`. `text` overrides how a table shows the value; `style` gives the ANSI
    colour of a cell's text.
    """

    title: str | None
    name: str
    source: Source
    kind: Kind = Kind.TEXT
    _: KW_ONLY
    flexible: bool = False
    wraps: bool = False
    optional: bool = False
    spare: int = 0
    text: Callable[[Any], str] | None = None
    style: Mapping[str, str] | None = None

    @property
    def is_file(self) -> bool:
        """True for paths of files and directories of this host."""
        return self.name in ("file", "directory", "undoFile")

    def replaced(self, **changes: Any) -> Column:
        """Return this column with other settings."""
        return replace(self, **changes)

    def titled(self) -> Column:
        """Return this column with a title: its own, or one from its JSON name (`lastEntryId`: LAST ENTRY ID)."""
        if self.title is not None:
            return self
        return self.replaced(title=re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", self.name).upper())

    def getter(self) -> Callable[[Any], Any]:
        """Return the function row → value."""
        source = self.source
        if isinstance(source, Constant):
            value = source.value
            return lambda row: value
        return attrgetter(source) if isinstance(source, str) else source


def value_at(path: str) -> Callable[[Any], Any]:
    """Return the function row → value at an attribute path; None where anything on the way is None."""

    def value(row: Any) -> Any:
        for name in path.split("."):
            if row is None:
                return None
            row = getattr(row, name)
        return row

    return value


def applied_column(*, is_applied: bool) -> Column:
    """Return the column of commands with --dry-run that says whether the run changes anything; not in tables."""
    return Column(None, "applied", Constant(is_applied), Kind.BOOLEAN, optional=True)


def hex_column(name: str, source: Source) -> Column:
    """Return the column of an id in hexadecimal digits, the first to be left out beside the decimal one."""
    return Column("HEX", name, source, spare=3, text=with_0x)


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

    None: the command has no ids. A table on a terminal is the sentence `none` where it has no rows.
    """

    def __init__(self, *columns: Column, key: str | Column | None = None, none: str = "") -> None:
        assert len({column.name for column in columns}) == len(columns), "two columns of one name"
        self.columns = columns
        self.none = none
        self.key: Column | None = None
        if isinstance(key, str):
            self.key = next(column for column in columns if column.name == key)
        else:
            self.key = key

    def _with(self, columns: Iterable[Column]) -> Columns:
        """Return other columns with this key and sentence."""
        return Columns(*columns, key=self.key, none=self.none)

    def and_also(self, *more: Column) -> Columns:
        """Return these columns with `more` behind them."""
        return self._with((*self.columns, *more))

    def with_hidden(self, others: Columns) -> Columns:
        """Return these columns of a table, and `others` that it shows only on request."""
        names = {column.name for column in self.columns}
        return self.and_also(*(column.replaced(title=None) for column in others.columns if column.name not in names))

    def widened(self) -> Columns:
        """Return these columns, all with titles and none cut."""
        return self._with(column.titled().replaced(flexible=False) for column in self.columns)

    def find(self, text: str, flag: str) -> Column:
        """Return the column that `text` names by JSON name or title, in any case. Raises UsageError naming `flag`."""
        wanted = _plain_name(text)
        for column in (*self.columns, *self._ledger_fields()):
            if wanted in (_plain_name(column.name), _plain_name(column.title or column.name)):
                return column
        names = ", ".join(column.name for column in self.columns)
        raise UsageError(f"{flag} {text!r}: not a column of this command", hint=f"name some of {names}")

    def _ledger_fields(self) -> Iterator[Column]:
        """Yield the three id fields of ledgers as columns of their own."""
        for column in self.columns:
            if column.kind is Kind.LEDGER:
                get = column.getter()
                for name in LEDGER_FIELDS:
                    yield Column(None, name, _ledger_field(get, name)).titled()

    def chosen(self, texts: tuple[str, ...]) -> Columns:
        """Return the columns that `texts` name, in that order. Raises UsageError."""
        found = {column.name: column for column in (self.find(text, "--columns") for text in texts)}
        return self._with(column.titled() for column in found.values())

    def names(self) -> list[str]:
        """Return the JSON names in order."""
        names: list[str] = []
        for column in self.columns:
            names.extend(LEDGER_FIELDS if column.kind is Kind.LEDGER else [column.name])
        return names


LEDGER_FIELDS: Final = ("ledgerScopeId", "ledgerId", "ledgerQualifiedName")


def _plain_name(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def _ledger_field(get: Callable[[Any], Any], name: str) -> Callable[[Any], str | None]:
    def field(row: Any) -> str | None:
        ledger = get(row)
        return None if ledger is None else ledger.to_json()[name]

    return field


class RowOrder(NamedTuple):
    """`--sort COLUMN`, or `-COLUMN` for the largest first."""

    column: str
    reverse: bool

    @staticmethod
    def parse(text: str) -> RowOrder:
        """Return the order that `--sort` names."""
        return RowOrder(text.removeprefix("-"), text.startswith("-"))

    def key(self, value: Any) -> tuple[Any, ...]:
        """Return what sorts `value` among its column's: values first, absent ones last, whatever the direction."""
        absent = value is None
        if isinstance(value, str):
            value = int(value) if value.isdecimal() and len(value) < 40 else value
        elif not isinstance(value, int | float | bytes | tuple):
            value = "" if absent else str(value)
        return absent ^ self.reverse, isinstance(value, str), value


class RowSelection(NamedTuple):
    """The columns that the user wants (None: all), and the order of the rows."""

    columns: tuple[str, ...] | None = None
    order: RowOrder | None = None
    #: How many of the sorted rows to print.
    limit: int | None = None

    def of(self, columns: Columns, output: Output) -> Columns:
        """Return the columns to print. Raises UsageError for a name that `columns` lacks, and for -o id without ids."""
        if self.order is not None:
            columns.find(self.order.column, "--sort")
        if output is Output.ID:
            if self.columns is not None:
                raise UsageError("--columns and -o id are given", hint="drop one of them")
            if columns.key is None:
                raise UsageError("-o id: the rows of this command have no ids", hint="use -o ndjson or -o csv")
        if self.columns is not None:
            columns = columns.chosen(self.columns)
        return columns.widened() if output is Output.WIDE else columns

    def check(self, forms: Iterable[Columns], output: Output) -> None:
        """Raise the UsageError of the first of `forms`, if `of` refuses all of them."""
        errors: list[UsageError] = []
        for columns in forms:
            try:
                self.of(columns, output)
            except UsageError as error:
                errors.append(error)
            else:
                return
        if errors:
            raise errors[0]


#: All columns of the command, in its order.
ALL: Final = RowSelection()
