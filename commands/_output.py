"""The one output layer: columns declared once, printed as table, json, ndjson, csv or ids.

A `Columns` says for each field where it is on the domain's value, its JSON name and its table title. The JSON line of
a row is one compiled f-string, so listing the records of an entry log costs no dict and no `json.dumps` a row. Rows
stream in every format: memory does not grow with their number. Data goes to stdout, all else to stderr.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum, StrEnum
from functools import partial
from itertools import islice
from json.encoder import JSONEncoder
from json.encoder import encode_basestring_ascii as quote
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


class Inline(NamedTuple):
    """The source of a column as an expression of the row `r`, for rows by the hundred thousand.

    `names` are what it refers to.
    """

    code: str
    names: Mapping[str, Any] = {}


Source = str | Constant | Inline | Callable[[Any], Any]


class Column:
    """One field of a row.

    `source` says where its value is: an attribute path (`header.size`), a function of the row, a Constant or an Inline.
    `title` is the table's (None: not in the table), `name` the JSON name. An `optional` field is left out of JSON (and
    of an object's table) where it is None. `flexible` cells are cut when the terminal is too narrow. `text` overrides
    how a table shows the value; `style` gives the ANSI colour of a cell's text. `nullable` False promises that the
    value is never None; `absent` is a value that stands for None.
    """

    __slots__ = ("absent", "flexible", "kind", "name", "nullable", "optional", "source", "style", "text", "title")

    def __init__(
        self,
        title: str | None,
        name: str,
        source: Source,
        kind: Kind = Kind.TEXT,
        *,
        flexible: bool = False,
        optional: bool = False,
        nullable: bool = True,
        absent: Any = None,
        text: Callable[[Any], str] | None = None,
        style: Mapping[str, str] | None = None,
    ) -> None:
        self.title, self.name, self.source, self.kind = title, name, source, kind
        self.flexible, self.optional, self.text, self.style = flexible, optional, text, style
        self.nullable, self.absent = nullable, absent


def ledger_column(source: str = "ledger") -> Column:
    """The column of a row's LedgerId: the three id fields in JSON and csv, decimal or qualified name in a table."""
    return Column("LEDGER", "ledger", source, Kind.LEDGER)


class Columns:
    """The fields of one kind of row. `key` is what `-o id` prints: the name of a column, or a column of its own.

    None: the command has no ids.
    """

    def __init__(self, *columns: Column, key: str | Column | None = None) -> None:
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
BATCH_ROWS: Final = 512
#: Rows that wait for a full batch or for the table's sample are printed after this long all the same.
PATIENCE_S: Final = 0.25

BOLD: Final = "\x1b[1m"
GREEN: Final = "\x1b[32m"
YELLOW: Final = "\x1b[33m"
RED: Final = "\x1b[31m"
CYAN: Final = "\x1b[36m"
RESET: Final = "\x1b[0m"

_CSV_SPECIAL: Final = re.compile(r'[,"\r\n]').search
_TRAILING_SPACES: Final = re.compile(r"(?m) +$")
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


def hex_of_base64(text: str) -> str:
    """What a table shows of a short binary value, such as a key, that is base64 in all other output."""
    import binascii

    return binascii.a2b_base64(text).hex()


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


# --- compiling a row ------------------------------------------------------------------------------------------------


class _Texts(dict[Any, str]):
    """Value → its text; a scan meets the same few ledgers and words again and again."""

    def __init__(self, text: Callable[[Any], str]) -> None:
        super().__init__()
        self._text = text

    def __missing__(self, value: Any) -> str:
        if len(self) > 10_000:
            self.clear()
        text = self[value] = self._text(value)
        return text


def _ledger_json(ledger: LedgerId) -> str:
    return ",".join(f'"{name}":"{value}"' for name, value in ledger.to_json().items())


def _ledger_csv(ledger: LedgerId) -> str:
    return ",".join(ledger.to_json().values())


def _dumps(value: Any) -> str:
    return _ENCODER.encode(value)


def _json_default(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return base64_text(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


#: json.dumps would make a new one for each value, since ours is not its default form.
_ENCODER: Final = JSONEncoder(separators=(",", ":"), default=_json_default)


class _Form(NamedTuple):
    """How a format writes a value, per kind: expressions of the value `{v}` and what is written for None."""

    null: str
    null_ledger: str
    ledger: Callable[[LedgerId], str]
    codes: Mapping[Kind, str]


_JSON: Final = _Form(
    "null",
    ",".join(f'"{name}":null' for name in LEDGER_FIELDS),
    _ledger_json,
    {
        Kind.INTEGER: "{v}",
        Kind.SIZE: "{v}",
        Kind.TEXT: "_quote({v})",
        Kind.BOOLEAN: '"true" if {v} else "false"',
        Kind.TIME: "_quote(_iso({v}))",
        Kind.BINARY: "_quote(_base64({v}))",
        Kind.NESTED: "_dumps({v})",
    },
)
_CSV: Final = _Form(
    "",
    ",,",
    _ledger_csv,
    {
        Kind.INTEGER: "{v}",
        Kind.SIZE: "{v}",
        Kind.TEXT: "_cell({v})",
        Kind.BOOLEAN: '"true" if {v} else "false"',
        Kind.TIME: "_iso({v})",
        Kind.BINARY: "_base64({v})",
        Kind.NESTED: "_cell({v} if isinstance({v}, str) else _dumps({v}))",
    },
)


def _compile(
    form: _Form, columns: Columns, begin: str, field: Callable[[Column, str], str], end: str
) -> Callable[[Any], str]:
    """The function row → its text: one f-string for the whole row.

    That is an order of magnitude faster than a dict and json.dumps, or a loop over columns, for each row.
    """
    scope: dict[str, Any] = {
        "_null": form.null,
        "_null_ledger": form.null_ledger,
        "_quote": quote,
        "_iso": iso_time,
        "_base64": base64_text,
        "_dumps": _dumps,
        "_cell": csv_cell,
    }
    parts: list[str] = []
    for index, column in enumerate(columns.columns):
        value = _value_code(column, index, scope)
        null = "_null"
        if column.kind is Kind.LEDGER:
            texts = _Texts(form.ledger)
            if column.absent is not None:
                texts[column.absent] = form.null_ledger
            scope[f"_ledgers{index}"] = texts
            code, null = f"_ledgers{index}[{{v}}]", "_null_ledger"
        else:
            code = form.codes[column.kind]
        if column.nullable and column.absent is None:
            written = code.replace("{v}", f"_v{index}")
            code = f"{null} if (_v{index} := {value}) is None else {written}"
        else:
            code = code.replace("{v}", value)
        if isinstance(column.source, Constant):
            text = str(eval(code, scope)).encode("unicode_escape").decode()
            text = text.replace("'", "\\'").replace("{", "{{").replace("}", "}}")
        else:
            text = "{(" + code + ")}"
        parts.append(field(column, text))
    source = "lambda r: f'''" + begin + ",".join(parts) + end + "'''"
    compiled: Callable[[Any], str] = eval(source, scope)
    return compiled


def _value_code(column: Column, index: int, scope: dict[str, Any]) -> str:
    """The expression of the row `r` that is the column's value."""
    source = column.source
    if isinstance(source, str):
        return f"r.{source}"
    if isinstance(source, Constant):
        scope[f"_c{index}"] = source.value
        return f"_c{index}"
    if isinstance(source, Inline):
        scope.update(source.names)
        return f"({source.code})"
    scope[f"_f{index}"] = source
    return f"_f{index}(r)"


def compile_json(columns: Columns, *, before: str = "", after: str = "") -> Callable[[Any], str]:
    """The function row → its JSON object on one line, with the plain text `before` and `after` it."""

    optional = [
        (getter(column), _compile(_JSON, Columns(column), ",", _json_field, ""))
        for column in columns.columns
        if column.optional
    ]
    if not optional:
        return _compile(_JSON, columns, before + "{{", _json_field, "}}" + after)
    always = Columns(*(column for column in columns.columns if not column.optional))
    fields = _compile(_JSON, always, before + "{{", _json_field, "")
    ending = "}" + after.replace("\\n", "\n")

    def with_optional(row: Any) -> str:
        return "".join([fields(row), *(text(row) for get, text in optional if get(row) is not None), ending])

    return with_optional


def _json_field(column: Column, code: str) -> str:
    return code if column.kind is Kind.LEDGER else f'"{column.name}":{code}'


def compile_csv(columns: Columns) -> Callable[[Any], str]:
    """The function row → its csv line; text is quoted where RFC 4180 wants it."""
    return _compile(_CSV, columns, "", lambda column, code: code, "\\n")


_VALUE: Final = "\0"


class _BlockText:
    """Turns rows that are given as columns into text: one % operation for hundreds of them.

    That is three times as fast as a function of each row.
    """

    def __init__(
        self, form: _Form, columns: Columns, begin: str, field: Callable[[Column, str], str], end: str,
        constants: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._texts: list[tuple[str, Callable[[Any], Any] | None]] = []
        #: What stands before, between and behind the values.
        self._pieces = [begin]
        separator = ""
        for column in columns.columns:
            source = column.source
            if not isinstance(source, Constant) and column.name in constants:
                source = Constant(constants[column.name])
            if isinstance(source, Constant):
                if column.optional and source.value is None and form is _JSON:
                    continue
                same = Column(None, column.name, source, column.kind, absent=column.absent)
                text = _compile(form, Columns(same), "", lambda _, code: code, "")(None)
                self._pieces[-1] += separator + field(column, text)
            else:
                self._texts.append((column.name, _value_text(form, column)))
                before, _, after = field(column, _VALUE).partition(_VALUE)
                self._pieces[-1] += separator + before
                self._pieces.append(after)
            separator = ","
        self._pieces[-1] += end
        self._block = "%s".join(piece.replace("%", "%%") for piece in self._pieces) * BATCH_ROWS

    def __call__(self, count: int, values: Mapping[str, Any]) -> str:
        """The text of `count` rows."""
        columns = tuple(
            list(map(text, values[name])) if text is not None else values[name] for name, text in self._texts
        )
        if join_rows is not None:
            joined = join_rows(tuple(self._pieces), columns, count)
            if joined is not None:
                return joined
        width = len(columns)
        flat: list[Any] = [None] * (count * width)
        for index, column in enumerate(columns):
            flat[index::width] = column
        texts = []
        for row in range(0, count, BATCH_ROWS):
            rows = min(BATCH_ROWS, count - row)
            block = self._block if rows == BATCH_ROWS else self._block[: len(self._block) // BATCH_ROWS * rows]
            texts.append(block % tuple(flat[row * width : (row + rows) * width]))
        return "".join(texts)


def _value_text(form: _Form, column: Column) -> Callable[[Any], Any] | None:
    """The function value → its text; None where what str makes of it will do."""
    if column.kind in (Kind.INTEGER, Kind.SIZE) and column.absent is None:
        return None
    if column.kind is Kind.LEDGER:
        texts = _Texts(form.ledger)
        if column.absent is not None:
            texts[column.absent] = form.null_ledger
        return texts.__getitem__
    text = _compile(form, Columns(_of_value(column)), "", lambda _, code: code, "")
    return _Texts(text).__getitem__ if column.kind is Kind.TEXT else text


def _of_value(column: Column) -> Column:
    """The column of a row that is nothing but the value."""
    return Column(
        column.title, column.name, Inline("r"), column.kind, absent=column.absent, nullable=column.nullable,
        text=column.text, style=column.style,
    )  # fmt: skip


def csv_cell(text: str) -> str:
    """`text` as one csv cell."""
    return '"' + text.replace('"', '""') + '"' if _CSV_SPECIAL(text) else text


def getter(column: Column) -> Callable[[Any], Any]:
    """The function row → the column's value."""
    source, absent = column.source, column.absent
    if isinstance(source, Constant):
        value = source.value
        return lambda row: value
    if isinstance(source, Inline):
        get: Callable[[Any], Any] = eval(f"lambda r: {source.code}", dict(source.names))
    elif isinstance(source, str):
        from operator import attrgetter

        get = attrgetter(source)
    else:
        get = source
    if absent is None:
        return get
    return lambda row: None if (value := get(row)) == absent else value


def cell_text(column: Column, value: Any) -> str:
    """How a table shows `value`."""
    if value is None:
        return NULL
    if column.text is not None:
        return plain(column.text(value))
    match column.kind:
        case Kind.SIZE:
            return size_text(value)
        case Kind.BOOLEAN:
            return "yes" if value else "no"
        case Kind.TIME:
            return re.sub(r"\.\d{3}Z$", "Z", iso_time(value))
        case Kind.BINARY:
            return base64_text(value)
        case Kind.NESTED:
            return _nested_text(value)
        case Kind.TEXT:
            return plain(str(value))
        case _:
            return str(value)


def compile_cells(columns: list[Column]) -> Callable[[Any], tuple[str, ...]]:
    """The function row → the texts of its cells in a table."""
    scope: dict[str, Any] = {"_texts": _Texts(str), "_null": NULL}
    cells: list[str] = []
    for index, column in enumerate(columns):
        value = _value_code(column, index, scope)
        if isinstance(column.source, Constant):
            scope[f"_t{index}"] = cell_text(column, column.source.value)
            cells.append(f"_t{index}")
        elif column.text is None and column.kind in (Kind.INTEGER, Kind.LEDGER) and column.absent is None:
            text = "str" if column.kind is Kind.INTEGER else "_texts.__getitem__"
            scope[f"_s{index}"] = eval(text, scope)
            cells.append(f"_null if (_v{index} := {value}) is None else _s{index}(_v{index})")
        else:
            scope[f"_g{index}"] = _cell_function(column)
            cells.append(f"_g{index}({value})")
    compiled: Callable[[Any], tuple[str, ...]] = eval(f"lambda r: ({', '.join(cells)},)", scope)
    return compiled


def _cell_function(column: Column) -> Callable[[Any], str]:
    """The function value → cell; a scan meets the same few texts and ledgers again and again."""
    absent = column.absent
    if column.kind in (Kind.LEDGER, Kind.TEXT):
        return _Texts(lambda value: NULL if value == absent else cell_text(column, value)).__getitem__
    return lambda value: NULL if value == absent else cell_text(column, value)


def _value_cell(column: Column) -> Callable[[Any], str]:
    """The function value → cell."""
    if column.text is None and column.kind is Kind.INTEGER and column.absent is None:
        return str
    return _cell_function(column)


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
        self._columns, self._output = columns, output
        self._stream: Terminal = stream or sys.stdout
        self._tty = self._stream.isatty()
        self._color = color
        self._live = live or (self._tty and output is not Output.TABLE)
        self._before_write = before_write
        self._batch: list[str] = []
        self._pushed = time.monotonic()
        self._table: _Table | None = None
        self._line: Callable[[Any], str]
        if output is Output.ID and columns.key is None:
            raise UsageError("-o id: this command prints nothing that has an id", hint="use -o ndjson or -o csv")
        if output is Output.TABLE:
            self._table = _Table(columns, self._stream, color)
        self.use(columns)

    def use(self, columns: Columns) -> None:
        """Take the values of later rows from `columns`: the same fields, from other sources."""
        self._columns = columns
        self._block_texts: dict[tuple[tuple[str, Any], ...], _BlockText] = {}
        if self._table is not None:
            self._table.use(columns)
        elif self._output is Output.ID:
            key = columns.key
            assert key is not None
            value = getter(key)
            self._line = lambda row: f"{_id_text(key, value(row))}\n"
        elif self._output is Output.NDJSON:
            self._line = compile_json(columns, after="\\n")
        elif self._output is Output.JSON:
            self._line = compile_json(columns, before=",\\n")
        else:
            self._line = compile_csv(columns)

    def __enter__(self) -> RowWriter:
        if self._output is Output.CSV:
            self._batch.append(",".join(self._columns.names()) + "\n")
        self._first = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and (issubclass(kind, ClosedOutput) or self._is_empty()):
            # What failed before its first row prints nothing but the error.
            return
        if self._table is not None:
            self._batch.extend(self._table.finish())
        if self._output is Output.JSON:
            self._flush_json()
            self._before_write()
            emit("[]\n" if self._first else "\n]\n", self._stream)
        else:
            self._flush()
        self._push()

    def _is_empty(self) -> bool:
        """Whether there was no row yet."""
        if self._table is not None:
            return self._table.is_empty
        return self._first and len(self._batch) == (self._output is Output.CSV)

    def row(self, row: Any) -> None:
        """Print one row, with others or at once."""
        batch = self._batch
        if self._table is not None:
            batch.extend(self._table.add(row, now=self._live))
        else:
            batch.append(self._line(row))
        if self._live or len(batch) >= BATCH_ROWS or (self._tty and batch):
            self._flush_batch()
        elif time.monotonic() - self._pushed > PATIENCE_S:
            self._flush_batch()
            self._push()

    def rows(self, rows: Iterable[Any]) -> None:
        """Print rows as they come: in growing batches while they come fast, one by one when they come slowly."""
        if self._table is not None or self._live:
            for row in rows:
                self.row(row)
            return
        iterator = iter(rows)
        size = 1
        while True:
            before = len(self._batch)
            # What an exception leaves in the batch is printed by __exit__.
            self._batch.extend(map(self._line, islice(iterator, size)))
            if len(self._batch) - before < size:
                return
            now = time.monotonic()
            slow = now - self._pushed > PATIENCE_S
            size = max(size // 2, 1) if slow else min(size * 2, BATCH_ROWS)
            if slow or len(self._batch) >= BATCH_ROWS:
                self._flush_batch()
            if slow:
                self._push()

    def block(self, count: int, values: Mapping[str, Sequence[Any] | Constant]) -> None:
        """Print `count` rows given as columns: JSON name → the value of each row, or one Constant for all.

        None stands in Constants only. Columns with a Constant for their source need not be there. Three times as fast
        as row by row.
        """
        if count == 0:
            return
        if self._table is not None:
            self._batch.extend(self._table.add_block(count, values, now=self._live))
        elif self._output is Output.ID:
            key = self._columns.key
            assert key is not None
            text = str if key.kind is Kind.INTEGER else partial(_id_text, key)
            self._batch.append("\n".join(map(text, values[key.name])) + "\n")
        else:
            self._batch.append(self._block_text(values)(count, values))
        self._flush_batch()
        if time.monotonic() - self._pushed > PATIENCE_S:
            self._push()

    def _block_text(self, values: Mapping[str, Sequence[Any] | Constant]) -> _BlockText:
        constants = {name: value.value for name, value in values.items() if isinstance(value, Constant)}
        shape = tuple(constants.items())
        known = self._block_texts.get(shape)
        if known is None:
            columns = self._columns
            if self._output is Output.CSV:
                known = _BlockText(_CSV, columns, "", lambda column, code: code, "\n", constants)
            else:
                begin, end = (",\n{", "}") if self._output is Output.JSON else ("{", "}\n")
                known = _BlockText(_JSON, columns, begin, _json_field, end, constants)
            self._block_texts[shape] = known
        return known

    def _flush_batch(self) -> None:
        if self._output is Output.JSON:
            self._flush_json()
        else:
            self._flush()
        if self._live:
            self._push()

    def _flush(self) -> None:
        if self._batch:
            self._first = False
            self._before_write()
            emit("".join(self._batch), self._stream)
            self._batch.clear()

    def _flush_json(self) -> None:
        if self._batch and self._first:
            self._batch[0] = "[\n" + self._batch[0][2:]
            self._first = False
        self._flush()

    def _push(self) -> None:
        self._pushed = time.monotonic()
        try:
            self._stream.flush()
        except OSError as error:
            raise output_error(error) from error


class _Table:
    """A table whose widths come from its first rows; later rows stream into them."""

    def __init__(self, columns: Columns, stream: Terminal, color: bool) -> None:
        self.use(columns)
        self._right = [column.kind in (Kind.INTEGER, Kind.SIZE) for column in self._columns]
        self._sample: list[tuple[str, ...]] | None = []
        self._sample_started = 0.0
        self._color = color
        self._room = terminal_width() if stream.isatty() else None
        self._widths: list[int] = []
        #: Plain rows are laid out by one % operation; colours, wide characters and cutting take the slower way.
        self._template: str | None = None

    def use(self, columns: Columns) -> None:
        """Take the cells of later rows from `columns`."""
        self._columns = [column for column in columns.columns if column.title is not None]
        self._cells = compile_cells(self._columns)
        self._texts = [_value_cell(column) for column in self._columns]

    def add(self, row: Any, *, now: bool) -> list[str]:
        """The lines that can be printed once `row` is there."""
        return self._add_cells(self._cells(row), now=now)

    def add_block(self, count: int, values: Mapping[str, Sequence[Any] | Constant], *, now: bool) -> list[str]:
        """The lines that can be printed once `count` rows, given as columns, are there."""
        texts: list[Sequence[str]] = []
        for column, text in zip(self._columns, self._texts, strict=True):
            source = column.source if isinstance(column.source, Constant) else values[column.name]
            if isinstance(source, Constant):
                texts.append([NULL if source.value is None else text(source.value)] * count)
            else:
                texts.append(list(map(text, source)))
        lines: list[str] = []
        rows = zip(*texts, strict=True)
        done = 0
        while self._sample is not None and done < count:
            lines += self._add_cells(next(rows), now=now)
            done += 1
        if done < count and self._template is not None:
            flat: list[str] = [""] * ((count - done) * len(texts))
            for index, column_texts in enumerate(texts):
                flat[index :: len(texts)] = column_texts[done:]
            block = (self._template + "\n") * (count - done) % tuple(flat)
            if block.isascii():
                lines.append(_TRAILING_SPACES.sub("", block) if " \n" in block else block)
                return lines
        lines.extend(self._format(cells) for cells in rows)
        return lines

    def _add_cells(self, cells: tuple[str, ...], *, now: bool) -> list[str]:
        if self._sample is None:
            line = self._template % cells if self._template else ""
            return [line.rstrip() + "\n"] if line.isascii() and line else [self._format(cells)]
        self._sample.append(cells)
        moment = time.monotonic()
        self._sample_started = self._sample_started or moment
        if now or len(self._sample) >= SAMPLE_ROWS or moment - self._sample_started > PATIENCE_S:
            return self._settle(live=now)
        return []

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


def _id_text(column: Column, value: Any) -> str:
    # Control characters are escaped, so that one row stays one line.
    return cell_text(Column("", column.name, column.source, column.kind), value)


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

        document = json.loads(compile_json(columns)(value))
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
