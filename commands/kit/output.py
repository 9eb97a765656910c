"""The one output layer: columns declared once, printed as table, json, ndjson, csv or ids.

A `Columns` says for each field where it is on the domain's value, its JSON name and its table title. Rows are printed
in batches: the values of a batch are turned into text column by column, then joined to lines, in every format. Rows
that come as columns already (`RowWriter.block`) skip the first step. Memory does not grow with the number of rows. Data
goes to stdout, all else to stderr.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum, StrEnum
from itertools import islice, repeat
from json.encoder import JSONEncoder
from json.encoder import encode_basestring_ascii as quote
from operator import attrgetter
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, TextIO

from bkctl.errors import UsageError
from bkctl.ids import LedgerId

#: What `_rows` must say of itself: one that was built from other sources, or none at all, is not used.
COMPILED_API: Final = 1
try:
    from . import _rows
except ImportError:  # installed without a compiler
    join_rows = None
else:
    join_rows = _rows.join_rows if getattr(_rows, "API", None) == COMPILED_API else None


class Output(StrEnum):
    """The forms of output; `table` for people, the rest for scripts."""

    TABLE = "table"
    JSON = "json"
    NDJSON = "ndjson"
    CSV = "csv"
    ID = "id"


class Kind(Enum):
    """How a column's value is written; None is `null` in JSON and `-` in a table."""

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

    `source` says where its value is: an attribute path (`header.size`), a function of the row, or a Constant.
    `title` is the table's (None: not in the table), `name` the JSON name. An `optional` field is left out of JSON (and
    of an object's table) where it is None. `flexible` cells are cut when the terminal is too narrow. `text` overrides
    how a table shows the value; `style` gives the ANSI colour of a cell's text.
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
    """The column of a row's LedgerId: the three id fields in JSON and csv, decimal or qualified name in a table."""
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
        """These columns, and `more` behind them."""
        return Columns(*self.columns, *more, key=self.key)

    def names(self) -> list[str]:
        """The JSON names in order."""
        names: list[str] = []
        for column in self.columns:
            names.extend(LEDGER_FIELDS if column.kind is Kind.LEDGER else [column.name])
        return names


LEDGER_FIELDS: Final = ("ledgerScopeId", "ledgerId", "ledgerQualifiedName")
NULL: Final = "-"
SAMPLE_ROWS: Final = 100
#: As many rows are printed together as their text is about this long, by what those before took; 512 at most.
BATCH_CHARS: Final = 1 << 20
BATCH_ROWS: Final = 512
FIRST_BATCH_ROWS: Final = 16
#: Rows that wait for a full batch or for the table's sample are printed after this long all the same.
PATIENCE_S: Final = 0.25

BOLD: Final = "\x1b[1m"
GREEN: Final = "\x1b[32m"
YELLOW: Final = "\x1b[33m"
RED: Final = "\x1b[31m"
CYAN: Final = "\x1b[36m"
RESET: Final = "\x1b[0m"

_CSV_SPECIAL: Final = re.compile(r'[,"\r\n]').search
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


# --- values ---------------------------------------------------------------------------------------------------------


def iso_time(milliseconds: int) -> str:
    """ISO 8601 in UTC with milliseconds, ending in Z; out of the calendar's range: the number itself."""
    try:
        moment = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(milliseconds)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{milliseconds % 1000:03d}Z"


def size_text(size_bytes: int) -> str:
    """`size_bytes` for people: exact below 10 KiB, else three digits and a binary unit."""
    if size_bytes < 10240:
        return f"{size_bytes} B"
    value, unit = size_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB", "PiB"):
        if value < 999.5:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"


def base64_text(data: bytes | bytearray | memoryview) -> str:
    """Standard base64 without line breaks."""
    import binascii

    return binascii.b2a_base64(data, newline=False).decode("ascii")


def binary_text(data: bytes | bytearray | memoryview, format: str | None) -> str:
    """`data` as text: `utf8` (a byte that is none as U+FFFD), `hex`, else base64."""
    if format == "utf8":
        return bytes(data).decode("utf-8", "replace")
    if format == "hex":
        return data.hex()
    return base64_text(data)


def readable_text(data: bytes | bytearray | memoryview) -> str:
    """`data` for a table: as text where it is printable UTF-8, else base64."""
    try:
        text = bytes(data).decode()
    except UnicodeDecodeError:
        return base64_text(data)
    return text if text.replace("\n", "").replace("\t", "").isprintable() else base64_text(data)


def plain(text: str) -> str:
    """`text` without control characters (each as `\\xNN`), so that no value can steer the terminal or break a row."""
    return text if text.isprintable() else _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def width_of(text: str) -> int:
    """Terminal cells that `text` takes."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def cut(text: str, width: int) -> str:
    """`text` in at most `width` cells, ending in `…` where something was cut."""
    if width_of(text) <= width:
        return text
    while text and width_of(text) > width - 1:
        text = text[:-1]
    return text + "…"


# --- from values to text --------------------------------------------------------------------------------------------


def _ledger_json(ledger: LedgerId) -> str:
    return ",".join(f'"{name}":"{value}"' for name, value in ledger.to_json().items())


def _ledger_csv(ledger: LedgerId) -> str:
    return ",".join(ledger.to_json().values())


def _json_default(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return base64_text(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


#: json.dumps would make a new one for each value, since ours is not its default form.
_ENCODER: Final = JSONEncoder(separators=(",", ":"), default=_json_default)


def csv_cell(text: str) -> str:
    """Return `text` as csv.writer writes it, by RFC 4180; csv.writer itself takes ten times as long for a row."""
    return '"' + text.replace('"', '""') + '"' if _CSV_SPECIAL(text) else text


def _truth(value: Any) -> str:
    return "true" if value else "false"


def _nested_text(value: Any) -> str:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return base64_text(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{plain(str(key))}={_nested_text(item)}" for key, item in value.items()) or NULL
    if isinstance(value, list | tuple):
        return ", ".join(_nested_text(item) for item in value) or NULL
    return NULL if value is None else str(value)


#: A function value → text; None: the value is written as str writes it.
_Text = Callable[[Any], str] | None

_JSON_TEXTS: Final[Mapping[Kind, _Text]] = {
    Kind.LEDGER: _ledger_json,
    Kind.INTEGER: None,
    Kind.SIZE: None,
    Kind.TEXT: quote,
    Kind.BOOLEAN: _truth,
    Kind.TIME: lambda value: f'"{iso_time(value)}"',
    Kind.BINARY: lambda value: f'"{base64_text(value)}"',
    Kind.NESTED: _ENCODER.encode,
}
_CSV_TEXTS: Final[Mapping[Kind, _Text]] = {
    Kind.LEDGER: _ledger_csv,
    Kind.INTEGER: None,
    Kind.SIZE: None,
    Kind.TEXT: csv_cell,
    Kind.BOOLEAN: _truth,
    Kind.TIME: iso_time,
    Kind.BINARY: base64_text,
    Kind.NESTED: lambda value: csv_cell(value if isinstance(value, str) else _ENCODER.encode(value)),
}
_TABLE_TEXTS: Final[Mapping[Kind, Callable[[Any], str]]] = {
    Kind.LEDGER: str,
    Kind.INTEGER: str,
    Kind.SIZE: size_text,
    Kind.TEXT: lambda value: plain(str(value)),
    Kind.BOOLEAN: lambda value: "yes" if value else "no",
    Kind.TIME: lambda value: re.sub(r"\.\d{3}Z$", "Z", iso_time(value)),
    Kind.BINARY: base64_text,
    Kind.NESTED: _nested_text,
}


def getter(column: Column) -> Callable[[Any], Any]:
    """Return the function row → the column's value."""
    source = column.source
    if isinstance(source, Constant):
        value = source.value
        return lambda row: value
    return attrgetter(source) if isinstance(source, str) else source


def cell_text(column: Column, value: Any) -> str:
    """Return the text that a table shows for `value`."""
    return NULL if value is None else _table_text(column)(value)


def _table_text(column: Column) -> Callable[[Any], str]:
    text = column.text
    return _TABLE_TEXTS[column.kind] if text is None else lambda value: plain(text(value))


class _Field:
    """A column in one format: the text of its values, of None (`null`), and `before` each of them."""

    __slots__ = ("before", "column", "null", "text")

    def __init__(self, column: Column, text: _Text, null: str, before: str = "") -> None:
        self.column, self.text, self.null, self.before = column, text, null, before

    def constant(self, values: Mapping[str, Sequence[Any] | Constant]) -> str | None:
        """Return the text that all rows have, None where they differ."""
        source = self.column.source
        if not isinstance(source, Constant):
            given = values.get(self.column.name)
            if not isinstance(given, Constant):
                return None
            source = given
        return self.null if source.value is None else (self.text or str)(source.value)

    def texts(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the text of each value; numbers that are written as str writes them stay numbers."""
        text, null = self.text, self.null
        if text is None:
            if isinstance(values, memoryview) or None not in values:
                return values
            return [null if value is None else value for value in values]
        if self.column.kind is Kind.LEDGER:
            # The rows of a scan are of few ledgers.
            texts = {value: null if value is None else text(value) for value in set(values)}
            return list(map(texts.__getitem__, values))
        return [null if value is None else text(value) for value in values]


class _Fields:
    """The columns of one kind of row in one format."""

    def __init__(self, fields: Iterable[_Field]) -> None:
        self._fields = list(fields)
        varying = [field.column for field in self._fields if not isinstance(field.column.source, Constant)]
        # One attrgetter reads all attributes at once, in half the time that one for each takes.
        varying.sort(key=lambda column: not isinstance(column.source, str))
        paths = [column.source for column in varying if isinstance(column.source, str)]
        self._names = [column.name for column in varying]
        self._attributes = attrgetter(*paths) if len(paths) > 1 else None
        self._getters = [getter(column) for column in varying[len(paths) if self._attributes else 0 :]]

    def values(self, row: Any) -> tuple[Any, ...]:
        """Return what is to be printed of `row`, which may change or go afterwards."""
        others = [get(row) for get in self._getters]
        return tuple(others) if self._attributes is None else (*self._attributes(row), *others)

    def columns(self, rows: Iterable[tuple[Any, ...]]) -> dict[str, list[Any]]:
        """Return column name → the values of `rows` (one at least), each as `values` returned it."""
        return dict(zip(self._names, map(list, zip(*rows, strict=True)), strict=True))


class Lines(_Fields):
    """Turns rows into lines of ndjson, csv or ids, or into the items of a JSON array, each with `,\\n` before it."""

    def __init__(self, columns: Columns, output: Output) -> None:
        self._begin, self._end = _AROUND[output]
        super().__init__(_line_fields(columns, output))
        self._layouts: dict[tuple[tuple[str, Any], ...], tuple[tuple[str, ...], list[_Field]]] = {}

    def of_rows(self, rows: Iterable[Any]) -> str:
        """Return the text of `rows`, one at least."""
        values = list(map(self.values, rows))
        return self.of_columns(len(values), self.columns(values))

    def of_columns(self, count: int, values: Mapping[str, Sequence[Any] | Constant]) -> str:
        """Return the text of `count` rows given as columns."""
        pieces, fields = self._layout(values)
        columns = tuple(field.texts(values[field.column.name]) for field in fields)
        if join_rows is not None:
            joined = join_rows(pieces, columns, count)
            if joined is not None:
                return joined
        template = "%s".join(piece.replace("%", "%%") for piece in pieces)
        rows = zip(*columns, strict=True) if columns else repeat((), count)
        return "".join([template % row for row in rows])

    def _layout(self, values: Mapping[str, Sequence[Any] | Constant]) -> tuple[tuple[str, ...], list[_Field]]:
        """Return the text before, between and behind the values that differ, and the fields of these."""
        key = tuple((name, value.value) for name, value in values.items() if isinstance(value, Constant))
        layout = self._layouts.get(key)
        if layout is None:
            pieces, varying = [""], []
            for field in self._fields:
                text = field.constant(values)
                pieces[-1] += field.before + (text or "")
                if text is None:
                    varying.append(field)
                    pieces.append("")
            pieces[0] = self._begin + pieces[0].removeprefix(",")
            pieces[-1] += self._end
            layout = self._layouts[key] = tuple(pieces), varying
        return layout


_AROUND: Final = {
    Output.NDJSON: ("{", "}\n"),
    Output.JSON: (",\n{", "}"),
    Output.CSV: ("", "\n"),
    Output.ID: ("", "\n"),
}


def _line_fields(columns: Columns, output: Output) -> Iterator[_Field]:
    if output is Output.ID:
        if columns.key is None:
            raise UsageError("-o id: this command prints nothing that has an id", hint="use -o ndjson or -o csv")
        yield _Field(columns.key, _TABLE_TEXTS[columns.key.kind], NULL)
    elif output is Output.CSV:
        for column in columns.columns:
            yield _Field(column, _CSV_TEXTS[column.kind], ",," if column.kind is Kind.LEDGER else "", ",")
    else:
        for column in sorted(columns.columns, key=lambda column: column.optional):
            yield _json_field(column)


def _json_field(column: Column) -> _Field:
    text = _JSON_TEXTS[column.kind]
    before, null = f',"{column.name}":', "null"
    if column.kind is Kind.LEDGER:
        before, null = ",", ",".join(f'"{name}":null' for name in LEDGER_FIELDS)
    if column.optional:
        return _Field(column, lambda value: before + (text or str)(value), "")
    return _Field(column, text, null, before)


class Cells(_Fields):
    """Turns rows into the cells of a table, of those columns that have a title."""

    def __init__(self, columns: Columns) -> None:
        super().__init__(
            _Field(column, _table_text(column), NULL) for column in columns.columns if column.title is not None
        )

    def of_rows(self, rows: Iterable[Any]) -> Iterator[tuple[str, ...]]:
        """Yield the cells of each of `rows`, one at least."""
        values = list(map(self.values, rows))
        return self.of_columns(len(values), self.columns(values))

    def of_columns(self, count: int, values: Mapping[str, Sequence[Any] | Constant]) -> Iterator[tuple[str, ...]]:
        """Yield the cells of `count` rows given as columns."""
        texts: list[Sequence[str]] = []
        for field in self._fields:
            text = field.constant(values)
            texts.append(field.texts(values[field.column.name]) if text is None else [text] * count)
        return zip(*texts, strict=True)


# --- writing --------------------------------------------------------------------------------------------------------


class ClosedOutput(Exception):
    """The reader of stdout is gone (`| head`): what is left to print is not wanted."""


class Terminal(Protocol):
    """What the output layer asks of the terminal; replaced in tests."""

    def write(self, text: str, /) -> int: ...
    def flush(self) -> None: ...
    def isatty(self) -> bool: ...


def emit(text: str, stream: Terminal | None = None) -> None:
    """Write `text` to stdout. Raises ClosedOutput when nobody reads it any more."""
    try:
        (stream or sys.stdout).write(text)
    except OSError as error:
        raise output_error(error) from error


def output_error(error: OSError) -> Exception:
    """What it means that stdout cannot be written: ClosedOutput, or the error itself with a name for where."""
    if isinstance(error, BrokenPipeError):
        return ClosedOutput()
    return OSError(error.errno, error.strerror, "stdout")


def emit_bytes(data: bytes | bytearray | memoryview) -> None:
    """Write raw bytes to stdout. Raises ClosedOutput when nobody reads it any more."""
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
    except OSError as error:
        raise output_error(error) from error


class RowWriter:
    """Prints rows one by one; a context manager, since json closes its array and a short table is laid out at the end.

    What was given before an exception is printed all the same: data precedes damage.
    """

    def __init__(
        self,
        columns: Columns,
        output: Output,
        *,
        stream: Terminal | None = None,
        color: bool = False,
        live: bool = False,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        """`live` prints every row at once; `before_write` is called before anything is."""
        self._output = output
        self._stream: Terminal = stream or sys.stdout
        self._tty = self._stream.isatty()
        self._live = live or (self._tty and output is not Output.TABLE)
        self._before_write = before_write
        self._names = columns.names()
        #: The values of rows that are not printed yet.
        self._rows: list[tuple[Any, ...]] = []
        self._first = True
        self._batch_rows = FIRST_BATCH_ROWS
        self._pushed = time.monotonic()
        self._table = _Table(columns, self._stream, color) if output is Output.TABLE else None
        self.use(columns)

    def use(self, columns: Columns) -> None:
        """Take the values of later rows from `columns`: the same fields, from other sources."""
        self._flush()
        self._fields = Lines(columns, self._output) if self._table is None else Cells(columns)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and (issubclass(kind, ClosedOutput) or self._is_empty()):
            # What failed before its first row prints nothing but the error.
            return
        self._flush()
        if self._table is not None:
            self._write("".join(self._table.finish()))
        elif self._output is Output.JSON:
            self._write("[]\n" if self._first else "\n]\n")
        elif self._output is Output.CSV and self._first:
            self._write(self._header())
        self._push()

    def _is_empty(self) -> bool:
        """Return True where there was no row yet."""
        return not self._rows and (self._first if self._table is None else self._table.is_empty)

    def row(self, row: Any) -> None:
        """Print one row, with others or at once."""
        self._rows.append(self._fields.values(row))
        if self._live or self._tty or self._is_sampling() or len(self._rows) >= self._batch_rows:
            self._flush()
        elif time.monotonic() - self._pushed > PATIENCE_S:
            self._flush()
            self._push()

    def rows(self, rows: Iterable[Any]) -> None:
        """Print rows as they come: in growing batches while they come fast, one by one when they come slowly."""
        if self._tty or self._live:
            for row in rows:
                self.row(row)
            return
        iterator = iter(rows)
        size = 1
        while True:
            before = len(self._rows)
            # What an exception leaves here is printed by __exit__.
            self._rows.extend(map(self._fields.values, islice(iterator, size)))
            if len(self._rows) - before < size:
                return
            now = time.monotonic()
            slow = now - self._pushed > PATIENCE_S
            size = max(size // 2, 1) if slow else min(size * 2, self._batch_rows)
            if slow or self._is_sampling() or len(self._rows) >= self._batch_rows:
                self._flush()
            if slow:
                self._push()

    def block(self, count: int, values: Mapping[str, Sequence[Any] | Constant]) -> None:
        """Print `count` rows given as columns: JSON name → the value of each row, or one Constant for all.

        A sequence is a list, or a memoryview of int64. Columns with a Constant for their source need not be there.
        """
        self._flush()
        if count:
            self._print(count, values)
        if time.monotonic() - self._pushed > PATIENCE_S:
            self._push()

    def _is_sampling(self) -> bool:
        """Return True while the table waits for more rows to choose its widths."""
        return self._table is not None and self._table.is_sampling

    def _flush(self) -> None:
        if self._rows:
            rows, self._rows = self._rows, []
            self._print(len(rows), self._fields.columns(rows))

    def _print(self, count: int, values: Mapping[str, Sequence[Any] | Constant]) -> None:
        if isinstance(self._fields, Lines):
            text = self._fields.of_columns(count, values)
            if self._first and self._output is Output.JSON:
                text = "[\n" + text.removeprefix(",\n")
            elif self._first and self._output is Output.CSV:
                text = self._header() + text
        else:
            assert self._table is not None
            cells = self._fields.of_columns(count, values)
            text = "".join(self._table.add(cells, now=self._live))
        self._first = False
        if text:
            self._batch_rows = min(max(BATCH_CHARS * count // len(text), 1), BATCH_ROWS)
        self._write(text)
        if self._live:
            self._push()

    def _header(self) -> str:
        return ",".join(self._names) + "\n"

    def _write(self, text: str) -> None:
        if text:
            self._before_write()
            emit(text, self._stream)

    def _push(self) -> None:
        self._pushed = time.monotonic()
        try:
            self._stream.flush()
        except OSError as error:
            raise output_error(error) from error


class _Table:
    """A table whose widths come from its first rows; later rows stream into them."""

    def __init__(self, columns: Columns, stream: Terminal, color: bool) -> None:
        self._columns = [column for column in columns.columns if column.title is not None]
        self._right = [column.kind in (Kind.INTEGER, Kind.SIZE) for column in self._columns]
        self._sample: list[tuple[str, ...]] | None = []
        self._sample_started = 0.0
        self._color = color
        self._room = terminal_width() if stream.isatty() else None
        self._widths: list[int] = []
        #: Plain rows are laid out by one % operation; colours, wide characters and cutting take the slower way.
        self._template: str | None = None

    def add(self, rows: Iterable[tuple[str, ...]], *, now: bool) -> list[str]:
        """Return the lines that can be printed once `rows` are there."""
        lines: list[str] = []
        for cells in rows:
            if self._sample is None:
                line = self._template % cells if self._template else ""
                lines.append(line.rstrip() + "\n" if line.isascii() and line else self._format(cells))
                continue
            self._sample.append(cells)
            moment = time.monotonic()
            self._sample_started = self._sample_started or moment
            if now or len(self._sample) >= SAMPLE_ROWS or moment - self._sample_started > PATIENCE_S:
                lines += self._settle(live=now)
        return lines

    @property
    def is_sampling(self) -> bool:
        """Return True while the widths wait for more rows."""
        return self._sample is not None

    @property
    def is_empty(self) -> bool:
        """Whether there was no row yet."""
        return self._sample == []

    def finish(self) -> list[str]:
        """The lines that still wait for more rows."""
        return self._settle() if self._sample is not None else []

    def _settle(self, *, live: bool = False) -> list[str]:
        assert self._sample is not None
        titles = [column.title or "" for column in self._columns]
        self._widths = [
            max([len(title), *(width_of(row[index]) for row in self._sample)]) for index, title in enumerate(titles)
        ]
        if live:
            # Rows that come later have larger numbers.
            self._widths = [
                max(width, 7) if right else width for width, right in zip(self._widths, self._right, strict=True)
            ]
        self._fit()
        if not self._color and not (self._room is not None and any(column.flexible for column in self._columns)):
            cells = [
                f"%{width}s" if right else f"%-{width}s" for width, right in zip(self._widths, self._right, strict=True)
            ]
            self._template = "  ".join([*cells[:-1], cells[-1] if self._right[-1] else "%s"])
        header = self._format(titles, header=True)
        lines = [header, *(self._format(row) for row in self._sample)]
        self._sample = None
        return lines

    def _fit(self) -> None:
        """Take what the terminal lacks from the flexible columns, the widest first, never below 12 cells."""
        if self._room is None:
            return
        excess = sum(self._widths) + 2 * (len(self._widths) - 1) - self._room
        flexible = [index for index, column in enumerate(self._columns) if column.flexible]
        while excess > 0 and flexible:
            widest = max(flexible, key=lambda index: self._widths[index])
            if self._widths[widest] <= 12:
                return
            self._widths[widest] -= 1
            excess -= 1

    def _format(self, cells: Sequence[str], *, header: bool = False) -> str:
        parts: list[str] = []
        last = len(cells) - 1
        for index, (cell, width) in enumerate(zip(cells, self._widths, strict=True)):
            column = self._columns[index]
            if self._room is not None and column.flexible:
                cell = cut(cell, width)
            space = " " * (width - (len(cell) if cell.isascii() else width_of(cell)))
            style = None
            if self._color:
                style = BOLD if header else (column.style or {}).get(cell)
            shown = f"{style}{cell}{RESET}" if style else cell
            parts.append(space + shown if self._right[index] else shown if index == last else shown + space)
        return "  ".join(parts).rstrip() + "\n"


def show(value: Any, columns: Columns, output: Output, *, stream: Terminal | None = None, color: bool = False) -> None:
    """Print one object: name and value a line as a table, one indented document as json."""
    target: Terminal = stream or sys.stdout
    if output is Output.TABLE:
        fields = [(column, getter(column)(value)) for column in columns.columns if column.title is not None]
        fields = [(column, item) for column, item in fields if not (column.optional and item is None)]
        width = max(len(column.title or "") for column, _ in fields)
        lines: list[str] = []
        for column, item in fields:
            lines.extend(_field_lines(column, item, width, color))
        emit("\n".join(lines) + "\n", target)
    elif output is Output.JSON:
        import json

        document = json.loads(Lines(columns, Output.NDJSON).of_rows([value]))
        emit(json.dumps(document, indent=2) + "\n", target)
    else:
        with RowWriter(columns, output, stream=target) as writer:
            writer.row(value)
        return
    try:
        target.flush()
    except OSError as error:
        raise output_error(error) from error


def _field_lines(column: Column, value: Any, width: int, color: bool) -> Iterator[str]:
    """The lines of one field of an object; each item of a mapping has a line of its own."""
    label = (column.title or "").ljust(width)
    shown = f"{BOLD}{label}{RESET}" if color else label
    if column.kind is Kind.NESTED and isinstance(value, Mapping) and value and column.text is None:
        for key, item in value.items():
            yield f"{shown}  {plain(str(key))}: {_nested_text(item)}"
            shown = " " * width
        return
    text = column.text(value) if column.text is not None and value is not None else value
    if column.kind in (Kind.TEXT, Kind.NESTED) and isinstance(text, str) and "\n" in text:
        for line in text.splitlines():
            yield f"{shown}  {plain(line)}"
            shown = " " * width
        return
    if column.kind is Kind.LEDGER and value is not None and value.is_scoped:
        cell = f"{value}  (scope {value.scope_id}, ledger {value.ledger_id})"
    elif column.kind is Kind.SIZE and value is not None and value >= 10240:
        cell = f"{size_text(value)}  ({value:,} bytes)"
    else:
        cell = cell_text(column, value)
    style = (column.style or {}).get(cell) if color else None
    yield f"{shown}  {style}{cell}{RESET}" if style else f"{shown}  {cell}"


# --- the terminal ---------------------------------------------------------------------------------------------------


def terminal_width() -> int:
    """Columns of the terminal on stdout, or what COLUMNS says; 80 when neither is known."""
    from shutil import get_terminal_size

    return max(get_terminal_size((80, 24)).columns, 20)


def wants_color(stream: Terminal, *, no_color: bool) -> bool:
    """Colours go to terminals only, and not where NO_COLOR is set (to anything but nothing) or the terminal is dumb."""
    return not no_color and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


class Activity:
    """A line on stderr that shows that long work goes on; only on a terminal, and only where nothing else is printed.

    A context manager. It appears when nothing was printed for `DELAY_S`; `clear` takes it away for what comes next.
    With a `total` it has a bar and a percentage.
    """

    DELAY_S: Final = 0.6
    PERIOD_S: Final = 0.1
    FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

    def __init__(
        self,
        label: str,
        *,
        total: int | None = None,
        unit: str = "",
        stream: TextIO | None = None,
        enabled: bool = True,
    ) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self._stream = stream or sys.stderr
        self._enabled = enabled and self._stream.isatty()
        self._shown = False
        self._thread: Any = None

    def __enter__(self) -> Activity:
        if self._enabled:
            import threading

            self._stopped = threading.Event()
            self._lock = threading.Lock()
            self._began = self._printed = time.monotonic()
            self._thread = threading.Thread(target=self._draw, name="activity", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self.clear()
            self._thread = None

    def advance(self, count: int = 1) -> None:
        """Note that `count` more units are done."""
        self.done += count

    def update(self, done: int, total: int | None = None) -> None:
        """Set what is done so far and, if it is known now, the total."""
        self.done = done
        if total is not None:
            self.total = total

    def clear(self) -> None:
        """Take the line away: something else is printed now."""
        if self._thread is None:
            return
        with self._lock:
            self._printed = time.monotonic()
            if self._shown:
                self._stream.write("\r\x1b[K")
                self._stream.flush()
                self._shown = False

    def text(self, elapsed_s: float) -> str:
        """The line without its spinner."""
        unit = f" {self.unit}" if self.unit else ""
        if self.total:
            share = min(self.done / self.total, 1.0)
            filled = int(share * 24)
            if self.unit == "bytes":
                amount = f"{size_text(self.done)} of {size_text(self.total)}"
            else:
                amount = f"{self.done:,} of {self.total:,}{unit}"
            return f"{self.label}  {'━' * filled}{'╌' * (24 - filled)} {int(share * 100):3}%  {amount}"
        if self.done:
            amount = size_text(self.done) if self.unit == "bytes" else f"{self.done:,}{unit}"
            return f"{self.label}: {amount}, {elapsed_s:.0f} s"
        return f"{self.label}, {elapsed_s:.0f} s"

    def _draw(self) -> None:
        frame = 0
        while not self._stopped.wait(self.PERIOD_S):
            now = time.monotonic()
            with self._lock:
                if now - self._printed < self.DELAY_S:
                    continue
                line = f"{self.FRAMES[frame % len(self.FRAMES)]} {self.text(now - self._began)}"
                self._stream.write(f"\r\x1b[K{cut(line, terminal_width() - 1)}")
                self._stream.flush()
                self._shown = True
            frame += 1
