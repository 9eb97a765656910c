"""Columns: the fields of one kind of row, declared once for tables, JSON, CSV, schemas, REST and Spark."""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import date
from enum import Enum
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

from bkctl.errors import UsageError


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


#: The calendar of `iso_time`: the years 1 to 9999.
TIME_MS_MIN: Final = -62_135_596_800_000
TIME_MS_MAX: Final = 253_402_300_799_999
_EPOCH_DAYS: Final = date(1970, 1, 1).toordinal()


#: Control characters, line ends, and what shows text in another order than it is written.
_STEERING: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@lru_cache(maxsize=4096)
def _day(days: int) -> str | None:
    try:
        return date.fromordinal(_EPOCH_DAYS + days).isoformat()
    except (ValueError, OverflowError):
        return None


# A lookup takes a third of the time that it takes to write the digits.
@lru_cache(maxsize=1440)
def _minute(minutes: int) -> str:
    return f"T{minutes // 60:02d}:{minutes % 60:02d}:"


def iso_time(milliseconds: int) -> str:
    """Return ISO 8601 in UTC with milliseconds, ending in Z; out of the calendar's range the number itself."""
    days, rest_ms = divmod(milliseconds, 86_400_000)
    if (day := _day(days)) is None:
        return str(milliseconds)
    minutes, rest_ms = divmod(rest_ms, 60_000)
    return f"{day}{_minute(minutes)}{rest_ms / 1000:06.3f}Z"


def base64_text(data: bytes | bytearray | memoryview) -> str:
    """Return standard base64 without line breaks."""
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def size_text(size_bytes: int) -> str:
    """Return `size_bytes` for people: exact below 10 KiB, else three digits and a binary unit."""
    if size_bytes < 10240:
        return f"{size_bytes} B"
    value, unit = size_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB", "PiB"):
        if value < 999.5:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"


def counted(count: int, one: str, many: str | None = None) -> str:
    """Return the count with the noun in its number: `1 finding`, `2 findings`; `many` where other words change, too."""
    if many is None:
        many = f"{one[:-1]}ies" if one.endswith("y") and one[-2] not in "aeiou" else f"{one}s"
    return f"{count:,} {one if count == 1 else many}"


def some_of(names: Sequence[object], count_max: int = 5) -> str:
    """Return the first names for a message: `a, b and 3 more`."""
    more = f" and {len(names) - count_max:,} more" if len(names) > count_max else ""
    return ", ".join(map(str, names[:count_max])) + more


def plain(text: str) -> str:
    """Return `text` with control characters as `\\xNN`, so that no value can steer a terminal or break a row."""
    return text if text.isprintable() else _STEERING.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class SharedObject(dict[str, Any]):
    """A JSON object that many rows share: its JSON, once made, is kept in `text`. It does not change."""

    text: str | None = None


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
    colour of a cell's text. `shape` is the JSON schema of a nested value, `spark` the type in Spark, if not its kind's.
    A value that `ages` alone is not a change for `--watch`.
    """

    title: str | None
    name: str
    source: Source
    kind: Kind = Kind.TEXT
    _: KW_ONLY
    flexible: bool = False
    wraps: bool = False
    optional: bool = False
    detail: bool = False
    spare: int = 0
    ages: bool = False
    shape: Mapping[str, Any] | None = None
    spark: str | None = None
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

    def properties(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the names of the JSON fields with their JSON schemas."""
        if self.kind is Kind.LEDGER:
            for name in LEDGER_FIELDS:
                yield name, {"type": ["string", "null"]}
            return
        shape = dict(self.shape or {}) if self.kind is Kind.NESTED else dict(_TYPES[self.kind][0])
        if shape:
            shape["type"] = [shape["type"], "null"]
        title = (self.title or "").strip()
        yield self.name, {"title": title, **shape} if title else shape

    @property
    def spark_type(self) -> str:
        """The type in Spark, in its DDL."""
        return self.spark or _TYPES[self.kind][1]

    def getter(self) -> Callable[[Any], Any]:
        """Return the function row → value."""
        source = self.source
        if isinstance(source, Constant):
            value = source.value
            return lambda row: value
        return attrgetter(source) if isinstance(source, str) else source


#: Kind → the JSON schema of its values, and their type in Spark.
_TYPES: Final[Mapping[Kind, tuple[Mapping[str, Any], str]]] = {
    Kind.INTEGER: ({"type": "number"}, "bigint"),
    Kind.SIZE: ({"type": "integer", "minimum": 0}, "bigint"),
    Kind.TEXT: ({"type": "string"}, "string"),
    Kind.WORD: ({"type": "string"}, "string"),
    Kind.BOOLEAN: ({"type": "boolean"}, "boolean"),
    Kind.TIME: ({"type": "string", "format": "date-time"}, "timestamp"),
    Kind.BINARY: ({"type": "string", "contentEncoding": "base64"}, "binary"),
}
#: The shape of a list of texts.
TEXTS: Final[Mapping[str, Any]] = {"type": "array", "items": {"type": "string"}}
#: Kinds whose values JSON has in another form.
_JSON_VALUES: Final[Mapping[Kind, Callable[[Any], Any]]] = {Kind.TIME: iso_time, Kind.BINARY: base64_text}


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


class Columns:
    """The fields of one kind of row. `key` is what `-o id` prints: the name of a column, or a column of its own.

    None: the command has no ids. A table on a terminal is the sentence `none` where it has no rows.
    """

    def __init__(self, *columns: Column, key: str | Column | None = None, none: str = "") -> None:
        assert len({column.name for column in columns}) == len(columns), "two columns of one name"
        self.columns, self.none = columns, none
        self.key = next(each for each in columns if each.name == key) if isinstance(key, str) else key

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
                for name in LEDGER_FIELDS:
                    yield Column(None, name, partial(_ledger_field, column.getter(), name)).titled()

    def chosen(self, texts: tuple[str, ...]) -> Columns:
        """Return the columns that `texts` name, in that order. Raises UsageError."""
        found = {column.name: column for column in (self.find(text, "--columns") for text in texts)}
        return self._with(column.titled() for column in found.values())

    def listed(self, extra: Column, *, after: str) -> Columns:
        """Return the columns of a list's table: without details, and with `extra` behind the column `after`."""
        found: list[Column] = []
        for column in self.columns:
            found += [] if column.detail else [column]
            found += [extra] if column.name == after else []
        return self._with(found)

    def changed(self, **changes: Mapping[str, Any]) -> Columns:
        """Return these columns; those named get the settings in `changes`."""
        return self._with(column.replaced(**changes.get(column.name, {})) for column in self.columns)

    def object(self, row: Any) -> dict[str, Any]:
        """Return the JSON object of `row`."""
        found: dict[str, Any] = {}
        for column in self.columns:
            value = column.getter()(row)
            if column.kind is Kind.LEDGER:
                found.update(dict.fromkeys(LEDGER_FIELDS) if value is None else value.to_json())
            elif value is not None:
                found[column.name] = _JSON_VALUES.get(column.kind, lambda value: value)(value)
            elif not column.optional:
                found[column.name] = None
        return found

    def names(self) -> list[str]:
        """Return the JSON names in order."""
        names: list[str] = []
        for column in self.columns:
            names.extend(LEDGER_FIELDS if column.kind is Kind.LEDGER else [column.name])
        return names


LEDGER_FIELDS: Final = ("ledgerScopeId", "ledgerId", "ledgerQualifiedName")


def _plain_name(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def _ledger_field(get: Callable[[Any], Any], name: str, row: Any) -> Any:
    ledger = get(row)
    return None if ledger is None else ledger.to_json()[name]
