"""Rows as text: lines of ndjson, csv and ids, items of a JSON array, cells of a table; JSON values as YAML."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from json.encoder import JSONEncoder
from json.encoder import encode_basestring_ascii as quote
from operator import attrgetter
from typing import Any, Final, NamedTuple

from bkctl.columns import LEDGER_FIELDS, Column, Columns, Constant, Kind, SharedObject, base64_text, iso_time
from bkctl.ids import LedgerId

from .columns import Output
from .texts import NULL, plain, size_text, words

_CSV_SPECIAL: Final = re.compile(r'[,"\r\n]').search


#: In two thirds of the time of an f-string.
_LEDGER_JSON: Final = '"ledgerScopeId":"%d","ledgerId":"%d","ledgerQualifiedName":"%016x%016x"'


def _ledger_json(ledger: LedgerId) -> str:
    return _LEDGER_JSON % (ledger + ledger)


def _json_default(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return base64_text(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


#: json.dumps would make a new one for each value, since ours is not its default form.
_ENCODER: Final = JSONEncoder(separators=(",", ":"), default=_json_default)
#: JSONEncoder.encode makes one of these for each value, which takes four times as long as to use it.
_make_encoder: Final = getattr(json.encoder, "c_make_encoder", None)
_encode_parts: Final = _make_encoder and _make_encoder(None, _json_default, quote, None, ":", ",", False, False, True)


def _encode(value: Any) -> str:
    return _ENCODER.encode(value) if _encode_parts is None else "".join(_encode_parts(value, 0))


def _nested_json(value: Any) -> str:
    if type(value) is not SharedObject:
        return _encode(value)
    if value.text is None:
        value.text = _encode(value)
    return value.text


def csv_cell(text: str) -> str:
    """Return `text` as csv.writer writes it, by RFC 4180; csv.writer itself takes ten times as long for a row."""
    return '"' + text.replace('"', '""') + '"' if _CSV_SPECIAL(text) else text


def _truth(value: Any) -> str:
    return "true" if value else "false"


def nested_text(value: Any) -> str:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return base64_text(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{plain(str(key))}={nested_text(item)}" for key, item in value.items()) or NULL
    if isinstance(value, list | tuple):
        return ", ".join(nested_text(item) for item in value) or NULL
    return NULL if value is None else str(value)


#: A function value → text; None: the value is written as str writes it.
_Text = Callable[[Any], str] | None


class _KindTexts(NamedTuple):
    """The texts of values of one kind, by form."""

    json: _Text
    csv: _Text
    table: Callable[[Any], str]


_TEXTS: Final[Mapping[Kind, _KindTexts]] = {
    Kind.LEDGER: _KindTexts(_ledger_json, lambda ledger: ",".join(ledger.to_json().values()), str),
    Kind.INTEGER: _KindTexts(None, None, str),
    Kind.SIZE: _KindTexts(None, None, size_text),
    Kind.TEXT: _KindTexts(quote, csv_cell, lambda value: plain(str(value))),
    Kind.WORD: _KindTexts(quote, csv_cell, words),
    Kind.BOOLEAN: _KindTexts(_truth, _truth, lambda value: "yes" if value else "no"),
    Kind.TIME: _KindTexts(
        lambda value: f'"{iso_time(value)}"', iso_time, lambda value: re.sub(r"\.\d{3}Z$", "Z", iso_time(value))
    ),
    Kind.BINARY: _KindTexts(lambda value: f'"{base64_text(value)}"', base64_text, base64_text),
    Kind.NESTED: _KindTexts(
        _nested_json, lambda value: csv_cell(value if isinstance(value, str) else _nested_json(value)), nested_text
    ),
}


def cell_text(column: Column, value: Any) -> str:
    """Return the text that a table shows for `value`."""
    return NULL if value is None else _table_text(column)(value)


def _table_text(column: Column) -> Callable[[Any], str]:
    text = column.text
    return _TEXTS[column.kind].table if text is None else lambda value: plain(text(value))


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
            distinct = set(values)
            if 2 * len(distinct) < len(values):  # A scan: many rows of few ledgers.
                texts = {value: null if value is None else text(value) for value in distinct}
                return list(map(texts.__getitem__, values))
        return [null if value is None else text(value) for value in values]


class _Fields(ABC):
    """The columns of one kind of row in one format, each row a text or a tuple of cells."""

    def __init__(self, fields: Iterable[_Field]) -> None:
        self._fields = list(fields)
        varying = [field.column for field in self._fields if not isinstance(field.column.source, Constant)]
        # One attrgetter reads all attributes at once, in half the time that one for each takes.
        varying.sort(key=lambda column: not isinstance(column.source, str))
        paths = [column.source for column in varying if isinstance(column.source, str)]
        self._getters = {column.name: column.getter() for column in varying}
        self._attributes = attrgetter(*paths) if len(paths) > 1 else None
        self._others = list(self._getters.values())[len(paths) if self._attributes else 0 :]

    def values(self, row: Any) -> tuple[Any, ...]:
        """Return the values to print of `row`, which may change afterwards."""
        others = [get(row) for get in self._others]
        return tuple(others) if self._attributes is None else (*self._attributes(row), *others)

    def columns(self, rows: Iterable[tuple[Any, ...]]) -> dict[str, list[Any]]:
        """Return column name → the values of `rows` (one at least), each as `values` returned it."""
        return dict(zip(self._getters, map(list, zip(*rows, strict=True)), strict=True))

    def of_rows(self, rows: Sequence[Any]) -> Iterable[Any]:
        """Return each of `rows` as this format has it."""
        return self.of_columns(len(rows), {name: list(map(get, rows)) for name, get in self._getters.items()})

    @abstractmethod
    def of_columns(self, count: int, values: Mapping[str, Sequence[Any] | Constant]) -> Iterable[Any]:
        """Return each of `count` rows given as columns as this format has it."""


class Lines(_Fields):
    """Turns rows into lines of ndjson, csv or ids, or into the items of a JSON array, each with `,\\n` before it."""

    def __init__(self, columns: Columns, output: Output) -> None:
        self._begin, self._end = _AROUND[output]
        super().__init__(_line_fields(columns, output))
        self._layouts: dict[tuple[tuple[str, Any], ...], tuple[tuple[str, ...], list[_Field]]] = {}

    def text(self, rows: Sequence[Any]) -> str:
        """Return the text of `rows`."""
        return "".join(self.of_rows(rows))

    def of_columns(self, count: int, values: Mapping[str, Sequence[Any] | Constant]) -> list[str]:
        """Return the text of each of `count` rows given as columns."""
        pieces, fields = self._layout(values)
        columns = [field.texts(values[field.column.name]) for field in fields]
        template = "%s".join(piece.replace("%", "%%") for piece in pieces)
        return [template % row for row in (zip(*columns, strict=True) if columns else repeat((), count))]

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
        assert columns.key is not None, "RowSelection.of refuses -o id"
        kind = columns.key.kind
        # Other programs read ids, so a ledger's has its normal form, however it was given.
        text = LedgerId.__str__ if kind is Kind.LEDGER else _TEXTS[Kind.TEXT if kind is Kind.WORD else kind].table
        yield _Field(columns.key, text, NULL)
    elif output is Output.CSV:
        for column in columns.columns:
            yield _Field(column, _TEXTS[column.kind].csv, ",," if column.kind is Kind.LEDGER else "", ",")
    else:
        for column in sorted(columns.columns, key=lambda column: column.optional):
            yield _json_field(column)


def _json_field(column: Column) -> _Field:
    text = _TEXTS[column.kind].json
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

    def of_columns(self, count: int, values: Mapping[str, Sequence[Any] | Constant]) -> Iterator[tuple[str, ...]]:
        """Yield the cells of `count` rows given as columns."""
        texts: list[Sequence[str]] = []
        for field in self._fields:
            text = field.constant(values)
            texts.append(field.texts(values[field.column.name]) if text is None else [text] * count)
        return zip(*texts, strict=True)


# --- YAML ---------------------------------------------------------------------------------------------------------

#: Strings that no YAML reader takes for anything else, so that they need no quotes.
_PLAIN: Final = re.compile(
    r"(?!(?:true|false|yes|no|on|off|null|y|n)\Z)[A-Za-z_/][\w./@+-]*(?: [\w./@+-]+)*", re.ASCII | re.I
)
#: Characters that YAML does not take unescaped, beside those that JSON escapes.
_UNPRINTABLE: Final = re.compile("[\x7f-\x84\x86-\x9f\ud800-\udfff\ufeff\ufffe\uffff\u2028\u2029\x85]")


def yaml_items(lines: str) -> str:
    """Return `lines` of ndjson as items of a YAML list."""
    return "".join("\n".join(_block([json.loads(line)], "")) + "\n" for line in lines.splitlines())


def yaml_text(document: Any) -> str:
    """Return one JSON value as a YAML document."""
    return "\n".join(_block(document, "")) + "\n"


def _block(value: Any, indent: str) -> Iterator[str]:
    """Yield the lines of a value that begins on a line of its own."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            if isinstance(item, dict | list) and item:
                yield f"{indent}{_scalar(key)}:"
                yield from _block(item, indent + "  ")
            else:
                yield f"{indent}{_scalar(key)}: {_scalar(item)}"
    elif isinstance(value, list) and value:
        for item in value:
            first, *others = _block(item, indent + "  ")
            yield f"{indent}- {first[len(indent) + 2 :]}"
            yield from others
    else:
        yield f"{indent}{_scalar(value)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
