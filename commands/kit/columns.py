"""Columns and rows as the user chooses them, columns that commands share, and the documents of `-o json`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from bkctl.columns import Column, Columns, Kind, Source, applied_column
from bkctl.errors import UsageError

from .texts import binary_text, readable_text

#: The forms of output; `table` and `wide` (a table of all columns, not cut) for people, the rest for scripts.
Output = StrEnum("Output", "TABLE WIDE JSON NDJSON YAML CSV ID")
#: The number of ledgers that `--count` of lists prints in their place.
COUNT_COLUMNS: Final = Columns(Column("LEDGERS", "count", int, Kind.INTEGER), key=None)


def hex_column(name: str, source: Source) -> Column:
    """Return the column of an id in hexadecimal digits, the first to be left out beside the decimal one."""
    return Column("HEX", name, source, spare=3, text="0x{}".format)


def with_hex(title: str, name: str, source: Source) -> tuple[Column, Column]:
    """Return the column of an id, and that of the same id in hexadecimal digits."""
    number = Column(title, name, source, Kind.INTEGER)
    get = number.getter()

    def digits(row: Any) -> str | None:
        value = get(row)
        return None if value is None else f"{value:x}"

    return number, hex_column(f"{name}Hex", digits)


def fields(kind: Kind, path: str = "", /, **titles: str | None) -> Iterator[Column]:
    """Yield columns of one kind by JSON name and title; their sources are the names in snake case, behind `path`."""
    for name, title in titles.items():
        yield Column(title, name, path + re.sub("(?=[A-Z])", "_", name).lower(), kind)


def field_column(title: str | None, name: str, kind: Kind = Kind.TEXT, **settings: Any) -> Column:
    """Return the column of a field of rows that are dicts, which may lack it."""
    return Column(title, name, lambda row: row.get(name), kind, **settings)


def payload_column(payload: Callable[[Any], bytes | None], form: str | None) -> Column:
    """Return the column of an entry's payload as `form` writes it; None: base64, in a table text where it is text."""

    def text(row: Any) -> str | None:
        data = payload(row)
        return None if data is None else binary_text(data, form)

    if form is None:
        return Column("PAYLOAD", "payload", payload, Kind.BINARY, flexible=True, text=readable_text)
    return Column("PAYLOAD", "payload", text, flexible=True)


class RowOrder(NamedTuple):
    """`--sort COLUMN`, or `-COLUMN` for the largest first."""

    column: str
    reverse: bool

    @staticmethod
    def parse(text: str) -> RowOrder:
        """Return the order that `--sort` names."""
        return RowOrder(text.removeprefix("-") or text, text.startswith("-"))

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
    #: The number of sorted rows to print.
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
        first: UsageError | None = None
        for columns in forms:
            try:
                self.of(columns, output)
                return
            except UsageError as error:
                first = first or error
        if first is not None:
            raise first


#: All columns of the command, in its order.
ALL: Final = RowSelection()


class PlainRow(SimpleNamespace):
    """A row of values by name, for columns whose sources are these names."""


# --- documents --------------------------------------------------------------------------------------------------------


class Document(NamedTuple):
    """A form of what a command prints: rows of these columns (`is_list`), or one object.

    `source` is the columns, or a function that returns them where making them imports much. `table` has the columns
    of a table that shows others; the document's own are then shown on request.
    """

    source: Columns | Callable[[], Columns]
    is_list: bool
    table: Columns | None = None

    def columns(self, output: Output = Output.JSON) -> Columns:
        """Return the columns that `output` may show."""
        found = self.source if isinstance(self.source, Columns) else self.source()
        if self.table is not None and output is Output.TABLE:
            return self.table.with_hidden(found)
        return found


#: Origin of columns; a mapping has columns for each value of an option.
DocumentSource = Columns | Mapping[Any, Columns] | Callable[[], Columns]


def rows_of(*sources: DocumentSource, table: Columns | None = None) -> tuple[Document, ...]:
    """Return the documents of a command that prints rows, of one of `sources`."""
    return tuple(
        Document(columns, True, table)
        for source in sources
        for columns in (source.values() if isinstance(source, Mapping) else [source])
    )


def object_of(*sources: DocumentSource) -> tuple[Document, ...]:
    """Return the documents of a command that prints one object, of one of `sources`."""
    return tuple(document._replace(is_list=False) for document in rows_of(*sources))


def union(*variants: Columns) -> Columns:
    """Return the columns of all `variants` as one; a column that one of them lacks is optional."""
    every = [column for each in variants for column in each.columns]
    counts = Counter(column.name for column in every)
    found: dict[str, Column] = {}
    for column in every:
        in_all = counts[column.name] == len(variants)
        found.setdefault(column.name, column if in_all else column.replaced(optional=True))
    return Columns(*found.values(), key=variants[0].key)


class Declaration(NamedTuple):
    """The facts about a command that its help, schema, audit and `--columns` share."""

    prints: tuple[Document, ...]
    #: True if the audit log records some of its runs.
    changes: bool
    has_dry_run: bool

    def forms(self, output: Output) -> list[Columns]:
        """Return the columns of each form of the rows that the command may print as `output`.

        Rows of a command with --dry-run have `applied`: false in a dry run, true in a run that changes something.
        """
        applied = (applied_column(is_applied=True),) if self.has_dry_run else ()
        return [document.columns(output).and_also(*applied) for document in self.prints]
