"""A table whose widths come from its first rows, and that fits the terminal.

Columns that are too wide together shrink in this order: paths and payloads (`flexible`) are cut (commands wrap first),
texts wrap at words, titles wrap. Where that is not enough, columns are left out: first those without a value in any
row, then those that are declared `spare`, then the last ones, which `left_out` names; never the first column, and no
sentence.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Final, TextIO

from bkctl.columns import Column, Columns, Kind

from .terminal import has_links, linked, terminal_width
from .texts import BOLD, NULL, RESET, cut, width_of, wrapped

SAMPLE_ROWS: Final = 100
#: Rows that wait for a full batch or for the table's sample are printed after this long all the same.
PATIENCE_S: Final = 0.25
#: Cells that a cut or wrapped column keeps, while others can still be left out, and at the least.
_COMFORT: Final = 28
_NARROW: Final = 12
_GAP: Final = 2
_WRAPPING: Final = frozenset((Kind.TEXT, Kind.NESTED))


class Table:
    """A table whose widths come from its first rows; later rows stream into them."""

    def __init__(self, columns: Columns, stream: TextIO, color: bool, *, fits: bool = True) -> None:
        """A table on a terminal fits its width, unless `fits` is False."""
        self._columns = [column for column in columns.columns if column.title is not None]
        self._right = [column.kind in (Kind.INTEGER, Kind.SIZE) for column in self._columns]
        #: The rows that the widths wait for, None once they are known.
        self.sample: list[tuple[str, ...]] | None = []
        self._sample_started = 0.0
        self._color = color
        #: Places of the columns whose cells are links to files.
        self._links = {
            at for at, column in enumerate(self._columns) if color and column.is_file and has_links(os.environ)
        }
        self._room = terminal_width() if fits and stream.isatty() else None
        self._widths: list[int] = []
        #: For each column, True if its cells are cut where they do not fit: payloads, and paths.
        self._flexible: list[bool] = [column.flexible for column in self._columns]
        #: Places of the columns that are printed, in order.
        self._kept = list(range(len(self._columns)))
        #: Places of the columns that may have a value in some row.
        self._full = self._kept
        #: Plain rows are laid out by one % operation; terminals, colours and wide characters take the slower way.
        self._template: str | None = None

    @property
    def left_out(self) -> list[str]:
        """The titles of the columns that did not fit and have a value in some row."""
        return [(self._columns[at].title or "").strip() for at in self._full if at not in self._kept]

    def add(self, rows: Iterable[tuple[str, ...]], *, now: bool) -> list[str]:
        """Add `rows`, and return the lines that can be printed now."""
        lines: list[str] = []
        for cells in rows:
            if self.sample is None:
                line = self._template % cells if self._template else ""
                lines.append(line.rstrip() + "\n" if line.isascii() and line else self._format(cells))
                continue
            self.sample.append(cells)
            moment = time.monotonic()
            self._sample_started = self._sample_started or moment
            if now or len(self.sample) >= SAMPLE_ROWS or moment - self._sample_started > PATIENCE_S:
                lines += self._settle(live=now)
        return lines

    def finish(self) -> list[str]:
        """Return the lines that still wait for more rows."""
        return self._settle(complete=True) if self.sample is not None else []

    def _settle(self, *, live: bool = False, complete: bool = False) -> list[str]:
        assert self.sample is not None
        titles = [column.title or "" for column in self._columns]
        self._widths = [
            max([len(title), *(width_of(row[index]) for row in self.sample)]) for index, title in enumerate(titles)
        ]
        if live:
            # Rows that come later have larger numbers.
            self._widths = [
                max(width, 7) if right else width for width, right in zip(self._widths, self._right, strict=True)
            ]
        if self._room is not None:
            self._fit(self._room, complete=complete)
        elif not self._color:
            cells = [
                f"%{width}s" if right else f"%-{width}s" for width, right in zip(self._widths, self._right, strict=True)
            ]
            self._template = "  ".join([*cells[:-1], cells[-1] if self._right[-1] else "%s"])
        header = self._format(titles, header=True)
        lines = [header, *(self._format(row) for row in self.sample)]
        self.sample = None
        return lines

    def _fit(self, room: int, *, complete: bool) -> None:
        """Shrink columns to the terminal's width, and leave columns out where that is not enough."""
        assert self.sample is not None
        self._widths = [min(width, max(room, _NARROW)) for width in self._widths]
        sample = self.sample
        given = [[row[at] for row in sample if row[at] != NULL] for at in range(len(self._columns))]
        self._flexible = [
            column.flexible or (bool(cells) and all(cell.startswith("/") for cell in cells))
            for column, cells in zip(self._columns, given, strict=True)
        ]
        least = [self._least(at, column, sample) for at, column in enumerate(self._columns)]
        comfort = [
            low if self._is_rigid(at) else max(low, min(width, _COMFORT))
            for at, (low, width) in enumerate(zip(least, self._widths, strict=True))
        ]
        kept = self._kept
        # More rows may come with values, unless the table is complete.
        full = self._full = [at for at in kept if at == 0 or given[at] or not complete]
        spare = [column.spare for column in self._columns]
        leaving = [at for at in full[1:] if spare[at] or (self._is_rigid(at) and not self._columns[at].style)]
        leaving.sort(key=lambda at: (spare[at], at), reverse=True)
        tries = [(kept, comfort), (full, comfort), (full, least)]
        tries += [([at for at in full if at not in leaving[:count]], least) for count in range(1, len(leaving) + 1)]
        for kept, low in tries:
            widths = self._shrunk(kept, low, room)
            if widths is not None:
                break
        else:
            widths = {at: low[at] for at in kept}
        self._kept = kept
        for at, width in widths.items():
            self._widths[at] = width
        last = kept[-1]
        if not self._right[last]:
            # Later rows may be longer than the sample.
            used = sum(self._widths[at] + _GAP for at in kept[:-1])
            self._widths[last] = max(self._widths[last], room - used)

    def _is_rigid(self, at: int) -> bool:
        """Return True for a column whose cells cannot be cut or wrapped."""
        column = self._columns[at]
        if self._flexible[at]:
            return False
        return column.kind not in _WRAPPING or all(" " not in row[at] for row in self.sample or ())

    def _least(self, at: int, column: Column, sample: list[tuple[str, ...]]) -> int:
        """Return the width that a column needs at least."""
        title = max(map(len, (column.title or "").split()), default=0)
        if column.title != (column.title or "").strip():
            title = len(column.title or "")  # Room for cells that come later.
        if self._flexible[at]:
            return max(title, min(self._widths[at], _NARROW))
        if self._is_rigid(at):
            return max([title, *(width_of(row[at]) for row in sample)])
        words = (width_of(word) for row in sample for word in row[at].split())
        return max(title, min(self._widths[at], _NARROW), max(words, default=0))

    def _shrunk(self, kept: list[int], least: list[int], room: int) -> dict[int, int] | None:
        """Return the widths of the columns `kept` in the terminal's width, None if `least` is too wide for it."""
        widths = {at: self._widths[at] for at in kept}
        excess = sum(widths.values()) + _GAP * (len(kept) - 1) - room
        while excess > 0:
            spare = [at for at in kept if widths[at] > least[at]]
            if not spare:
                return None
            widest = max(spare, key=lambda at: (self._flexible[at], widths[at]))
            widths[widest] -= 1
            excess -= 1
        return widths

    def _format(self, cells: Sequence[str], *, header: bool = False) -> str:
        texts = [self._lines_of(at, cells[at], header) for at in self._kept]
        return "".join(
            self._line([lines[number] if number < len(lines) else "" for lines in texts], cells, header)
            for number in range(max(map(len, texts)))
        )

    def _lines_of(self, at: int, cell: str, header: bool) -> list[str]:
        """Return the lines of one cell, cut or wrapped to its column's width."""
        width = self._widths[at]
        if self._room is None or (len(cell) <= width and cell.isascii()):
            return [cell]
        column = self._columns[at]
        if self._flexible[at] and not header:
            return [cut(line, width) for line in (wrapped(cell, width) if column.wraps else [cell])]
        return wrapped(cell, width) if header or column.kind in _WRAPPING else [cell]

    def _line(self, parts: Sequence[str], cells: Sequence[str], header: bool) -> str:
        shown: list[str] = []
        last = self._kept[-1]
        for at, part in zip(self._kept, parts, strict=True):
            space = " " * (self._widths[at] - (len(part) if part.isascii() else width_of(part)))
            style = None
            if self._color and part:
                style = BOLD if header else (self._columns[at].style or {}).get(cells[at])
            text = f"{style}{part}{RESET}" if style else part
            if at in self._links and part and not header and cells[at].startswith("/"):
                text = linked(cells[at], text)
            shown.append(space + text if self._right[at] else text if at == last else text + space)
        return "  ".join(shown).rstrip() + "\n"
