"""The user's choice of columns and rows, and columns that commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, Final, NamedTuple

from bkctl.columns import Column, Columns, Kind, Source
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


#: The number of ledgers that `--count` of lists prints in their place.
COUNT_COLUMNS: Final = Columns(Column("LEDGERS", "count", int, Kind.INTEGER), key=None)


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
