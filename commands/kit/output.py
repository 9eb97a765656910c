"""Printing of rows and objects as table, json, ndjson, yaml, csv or ids."""

from __future__ import annotations

import heapq
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, BinaryIO, Final, TextIO

from bkctl.columns import Column, Columns, Constant, Kind

from .columns import ALL, Output, RowOrder, RowSelection
from .lines import Cells, Lines, cell_text, nested_text, yaml_items, yaml_text
from .table import PATIENCE_S, Table
from .terminal import ClosedOutput, emit, flush, has_links, linked, terminal_width
from .texts import BOLD, RESET, plain, plain_lines, size_text, wrapped

#: A batch has as many rows as give about this much text, by the size of the batch before; 512 at most.
BATCH_CHARS: Final = 1 << 20
BATCH_ROWS: Final = 512
FIRST_BATCH_ROWS: Final = 16
#: Rows that --sort keeps in memory, and rows of one read of its temporary file.
SORTED_ROWS: Final = 10_000
_BLOCK_ROWS: Final = 64


class RowWriter:
    """Prints rows one by one; a context manager, since json closes its array and a short table is laid out at the end.

    What was given before an exception is printed all the same: data precedes damage.
    """

    def __init__(
        self,
        columns: Columns,
        output: Output,
        *,
        stream: TextIO | None = None,
        color: bool = False,
        live: bool = False,
        before_write: Callable[[], None] = lambda: None,
        note: Callable[[str], None] = lambda _: None,
        selection: RowSelection = ALL,
        findings: bool = False,
    ) -> None:
        """`live` prints every row at once; `before_write` is called before each write, `note` with a final remark.

        A table of `findings` without rows prints nothing: the command says in a sentence that all is well.
        """
        self._findings, self._none = findings, columns.none
        self._output, self._selection = output, selection
        self._stream = stream or sys.stdout
        self._tty = self._stream.isatty()
        is_table = output in (Output.TABLE, Output.WIDE)
        self._live = live or (self._tty and not is_table)
        self._before_write, self._note = before_write, note
        shown = selection.of(columns, output)
        self._names = shown.names()
        #: The values of rows that are not printed yet.
        self._rows: list[tuple[Any, ...]] = []
        #: Rows that are printed; rows given to `lines` do not count.
        self.count = 0
        self._first = True
        self._batch_rows = FIRST_BATCH_ROWS
        self._pushed = time.monotonic()
        self._table = Table(shown, self._stream, color, fits=output is Output.TABLE) if is_table else None
        self.use(columns)

    def use(self, columns: Columns) -> None:
        """Take the values of later rows from `columns`: the same fields, from other sources."""
        self._flush()
        shown = self._selection.of(columns, self._output)
        form = Output.NDJSON if self._output is Output.YAML else self._output
        self._fields = Lines(shown, form) if self._table is None else Cells(shown)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and (issubclass(kind, ClosedOutput) or self._is_empty()):
            # A command that fails before its first row prints only the error.
            return
        self._flush()
        if self._table is not None:
            if self._is_empty() and self._tty and self._none:
                self._note(self._none)
            elif not (self._findings and self._is_empty()):
                self._write("".join(self._table.finish()))
        elif self._output is Output.JSON:
            self._write("[]\n" if self._first else "\n]\n")
        elif self._output is Output.YAML and self._first:
            self._write("[]\n")
        elif self._output is Output.CSV and self._first:
            self._write(self._header())
        self._push()
        if self._table is not None and (names := self._table.left_out):
            self._note(f"Left out for width: {', '.join(names)}; a wider terminal or -o json shows them")

    def _is_empty(self) -> bool:
        """Return True before the first row."""
        return not self._rows and (self._first if self._table is None else self._table.sample == [])

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
            # Rows that an exception leaves here are printed by __exit__.
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
        self.made(count, self._fields.of_columns(count, values) if count else ())

    @property
    def lines(self) -> Lines | None:
        """The maker of texts for `made`; None for rows that are laid out, sorted, or printed as they come."""
        is_plain = type(self) is RowWriter and not (self._tty or self._live)
        return self._fields if is_plain and isinstance(self._fields, Lines) else None

    def made(self, count: int, made: Iterable[Any]) -> None:
        """Print `count` rows as `lines` made them, in any number of texts."""
        self._flush()
        if count:
            self._put(count, made)
        if time.monotonic() - self._pushed > PATIENCE_S:
            self._push()

    def _is_sampling(self) -> bool:
        """Return True while the table waits for more rows to choose its widths."""
        return self._table is not None and self._table.sample is not None

    def _flush(self) -> None:
        if self._rows:
            rows, self._rows = self._rows, []
            self._put(len(rows), self._fields.of_columns(len(rows), self._fields.columns(rows)))

    def _put(self, count: int, made: Iterable[Any]) -> None:
        """Print `count` rows as `_fields` makes them: texts, or cells of the table."""
        if self._table is None:
            text = "".join(made)
            if self._first and self._output is Output.JSON:
                text = "[\n" + text.removeprefix(",\n")
            elif self._first and self._output is Output.CSV:
                text = self._header() + text
            elif self._output is Output.YAML:
                text = yaml_items(text)
        else:
            text = "".join(self._table.add(made, now=self._live))
        self._first = False
        self.count += count
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
            emit(plain_lines(text) if self._tty and self._output is Output.CSV else text, self._stream)

    def _push(self) -> None:
        self._pushed = time.monotonic()
        flush(self._stream)


class SortedWriter(RowWriter):
    """A RowWriter that prints all rows in order at the end.

    It keeps up to SORTED_ROWS rows. More are written to a temporary file as they will be printed, in sorted runs, and
    merged at the end; with a smaller limit, the rows beyond it are dropped.
    """

    def __init__(self, columns: Columns, output: Output, order: RowOrder, **settings: Any) -> None:
        self._order = order
        #: The keys of the rows that have no text yet, and (key, row as it is printed) of the rows that have.
        self._keys: list[tuple[Any, ...]] = []
        self._kept: list[tuple[tuple[Any, ...], Any]] = []
        #: The key of the last row within the limit, once there are more.
        self._cutoff: tuple[Any, ...] | None = None
        self._file: BinaryIO | None = None
        #: The blocks of each run: offset and size of a pickled part of `_kept`.
        self._runs: list[list[tuple[int, int]]] = []
        super().__init__(columns, output, **settings)

    def use(self, columns: Columns) -> None:
        """Take the values of later rows from `columns`: the same fields, from other sources."""
        super().use(columns)
        varying = [each for each in columns.columns if not isinstance(each.source, Constant)]
        given = columns.changed(**{each.name: {"source": itemgetter(each.name)} for each in varying})
        self._value, self._value_of_given = (
            each.find(self._order.column, "--sort").getter() for each in (columns, given)
        )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or not issubclass(kind, ClosedOutput):
                self._flush()
                self._sort()
                runs = [*map(self._read_run, self._runs), self._kept]
                merged = heapq.merge(*runs, key=itemgetter(0), reverse=self._order.reverse)
                rows = islice(map(itemgetter(1), merged), self._selection.limit)
                while batch := list(islice(rows, self._batch_rows)):
                    self._put(len(batch), batch)
            super().__exit__(kind)
        finally:
            if self._file is not None:
                self._file.close()

    def row(self, row: Any) -> None:
        """Keep one row."""
        key = self._order.key(self._value(row))
        if self._cutoff is not None and (key <= self._cutoff if self._order.reverse else key >= self._cutoff):
            return
        self._keys.append(key)
        self._rows.append(self._fields.values(row))
        if len(self._rows) >= min(BATCH_ROWS, SORTED_ROWS):
            self._flush()

    def rows(self, rows: Iterable[Any]) -> None:
        """Keep rows."""
        for row in rows:
            self.row(row)

    def block(self, count: int, values: Mapping[str, Sequence[Any] | Constant]) -> None:
        """Keep rows given as columns."""
        self._flush()
        for at in range(count):
            row = {name: each.value if isinstance(each, Constant) else each[at] for name, each in values.items()}
            self._keys.append(self._order.key(self._value_of_given(row)))
        self._keep(count, values)

    def _flush(self) -> None:
        if self._rows:
            rows, self._rows = self._rows, []
            self._keep(len(rows), self._fields.columns(rows))

    def _keep(self, count: int, values: Mapping[str, Sequence[Any] | Constant]) -> None:
        """Keep rows as they are printed; write them to the temporary file as a sorted run where they are too many."""
        self._kept += zip(self._keys, self._fields.of_columns(count, values), strict=True)
        self._keys = []
        if len(self._kept) < SORTED_ROWS:
            return
        self._sort()
        limit = self._selection.limit
        if limit is not None and limit <= SORTED_ROWS // 2:
            del self._kept[limit:]
            self._cutoff = self._kept[-1][0] if limit else None
            return
        import pickle
        from tempfile import TemporaryFile

        if self._file is None:
            self._file = TemporaryFile(prefix="bkctl-sort-")  # noqa: SIM115 (closed by __exit__)
        blocks = []
        for at in range(0, len(self._kept), _BLOCK_ROWS):
            data = pickle.dumps(self._kept[at : at + _BLOCK_ROWS])
            blocks.append((self._file.tell(), len(data)))
            self._file.write(data)
        self._file.flush()
        self._runs.append(blocks)
        self._kept = []

    def _sort(self) -> None:
        self._kept.sort(key=itemgetter(0), reverse=self._order.reverse)

    def _read_run(self, blocks: list[tuple[int, int]]) -> Iterator[tuple[tuple[Any, ...], Any]]:
        import pickle

        assert self._file is not None
        for offset, size in blocks:
            yield from pickle.loads(os.pread(self._file.fileno(), size, offset))


def open_writer(columns: Columns, output: Output, selection: RowSelection, **settings: Any) -> RowWriter:
    """Return a RowWriter with these settings of RowWriter's, which sorts if `selection` says so."""
    if selection.order is None:
        return RowWriter(columns, output, selection=selection, **settings)
    return SortedWriter(columns, output, selection.order, selection=selection, **settings)


def show(
    value: Any,
    columns: Columns,
    output: Output,
    *,
    stream: TextIO | None = None,
    color: bool = False,
    selection: RowSelection = ALL,
) -> None:
    """Print one object: name and value a line as a table, one indented document as json or yaml."""
    target = stream or sys.stdout
    columns = selection.of(columns, output)
    if output in (Output.TABLE, Output.WIDE):
        fields = [(column, column.getter()(value)) for column in columns.columns if column.title is not None]
        fields = [(column, item) for column, item in fields if not (column.optional and item is None)]
        width = max(len(column.title or "") for column, _ in fields)
        room = terminal_width() - width - 2 if target.isatty() and output is Output.TABLE else None
        lines: list[str] = []
        for column, item in fields:
            lines.extend(_field_lines(column, item, width, color, room))
        emit("\n".join(lines) + "\n", target)
    elif output in (Output.JSON, Output.YAML):
        document = json.loads(Lines(columns, Output.NDJSON).text([value]))
        emit(json.dumps(document, indent=2) + "\n" if output is Output.JSON else yaml_text(document), target)
    else:
        with RowWriter(columns, output, stream=target) as writer:
            writer.row(value)
        return
    flush(target)


def _field_lines(column: Column, value: Any, width: int, color: bool, room: int | None) -> Iterator[str]:
    """Yield the lines of one field of an object; each item of a mapping has a line of its own.

    Texts wrap at words where they are wider than `room`.
    """
    text = column.text(value) if column.text is not None and value is not None else value
    if column.kind is Kind.NESTED and isinstance(value, Mapping) and value and column.text is None:
        lines = [f"{plain(str(key))}: {nested_text(item)}" for key, item in value.items()]
    elif column.kind in (Kind.TEXT, Kind.NESTED) and isinstance(text, str) and "\n" in text:
        lines = [*map(plain, text.splitlines())]
    else:
        cell = cell_text(column, value)
        if column.kind is Kind.LEDGER and value is not None and value.is_scoped:
            cell = f"{value}  (scope {value.scope_id}, ledger {value.ledger_id})"
        elif column.kind is Kind.SIZE and value is not None and value >= 10240:
            cell = f"{size_text(value)}  ({value:,} bytes)"
        style = (column.style or {}).get(cell) if color else None
        is_link = color and column.is_file and cell.startswith("/") and has_links(os.environ)
        lines = [cell] if room is None else wrapped(cell, max(room, 20))
        lines = [linked(cell, line) if is_link else line for line in lines]
        lines = [f"{style}{line}{RESET}" if style else line for line in lines]
    label = (column.title or "").ljust(width)
    yield f"{BOLD}{label}{RESET}  {lines[0]}" if color else f"{label}  {lines[0]}"
    yield from (f"{' ' * width}  {line}" for line in lines[1:])
