"""`--watch`: repeat a query, and show the changes."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from io import StringIO
from shutil import get_terminal_size
from typing import Any, Final

from bkctl.columns import Columns, iso_time
from bkctl.errors import UsageError

from .columns import Output, RowSelection
from .lines import Lines
from .output import open_writer, show
from .terminal import emit, flush, terminal_width
from .texts import BOLD, RESET, plain_lines

#: Several changes at once are shown together.
SETTLE_S: Final = 0.1


def watch(
    look: Callable[[], Iterable[Any]],
    columns: Columns,
    output: Output,
    *,
    seconds: float,
    subscribe: Callable[[Callable[[], None]], Callable[[], None]] | None,
    single: bool,
    color: bool,
    selection: RowSelection,
    key: Callable[[Any], Any] | None,
) -> None:
    """Watch as Run.watch describes. Never returns; raises the errors of `look`."""
    if output in (Output.JSON, Output.YAML):
        raise UsageError(f"--watch has no end, and -o {output} is one document", hint="use -o ndjson")
    take: Callable[[Iterable[Any]], None]
    if output in (Output.TABLE, Output.WIDE):
        pages = _Pages(f", every {seconds:g} s; Ctrl-C ends it", color)

        def take(rows: Iterable[Any]) -> None:
            page = _Page()
            if single:
                show(next(iter(rows)), columns, output, stream=page, color=color, selection=selection)
            else:
                note = partial(print, file=page)
                with open_writer(columns, output, selection, stream=page, color=color, note=note) as writer:
                    writer.rows(rows)
            pages.print(page.getvalue())

    elif selection.order is not None:
        raise UsageError(f"--watch prints changes as they come, so --sort does not apply to -o {output}")
    else:
        shown = selection.of(columns, output)
        # Only single objects have no ids.
        take = _Rows(shown, output, key or (shown.key.getter() if shown.key is not None else lambda _: None)).print
    changed = threading.Event()
    cancel = subscribe(changed.set) if subscribe is not None else None
    try:
        while True:
            changed.clear()
            take(look())
            if changed.wait(seconds):
                time.sleep(SETTLE_S)
    finally:
        if cancel is not None:
            cancel()


class _Page(StringIO):
    """A buffer in which a table is laid out before it is printed; as wide as the terminal on stdout."""

    def isatty(self) -> bool:
        return sys.stdout.isatty()


class _Pages:
    """Tables: drawn over the last one on a terminal, else printed one below the other."""

    def __init__(self, title: str, color: bool) -> None:
        self._title, self._color = title, color
        self._last: str | None = None

    def print(self, text: str) -> None:
        if sys.stdout.isatty():
            self._draw(text)
        elif text != self._last:
            emit(text if self._last is None else f"\n{text}")
        self._last = text
        flush()

    def _draw(self, text: str) -> None:
        moment = iso_time(time.time_ns() // 1_000_000)[11:19]
        title = f"{moment}Z{self._title}"[: terminal_width()]
        title = f"{BOLD}{title}{RESET}" if self._color else title
        if text == self._last:
            # Save the cursor, move home, and restore it: only the clock of this look is new.
            emit(f"\x1b7\x1b[H{title}\x1b[K\x1b8")
            return
        lines = [title, *text.splitlines()]
        room = max(get_terminal_size((80, 24)).lines - 1, 2)
        if len(lines) > room:
            lines[room - 1 :] = [f"… {len(lines) - room + 1:,} more lines"]
        # Move home, clear the rest of each line, then all lines below.
        emit("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")


class _Rows:
    """ndjson, csv and ids: new and changed rows, and in ndjson removed ones.

    A row that stays has its `key`, and may change. Rows that share a key differ by their lines.
    """

    def __init__(self, columns: Columns, output: Output, key: Callable[[Any], Any]) -> None:
        self._lines = Lines(columns, output)
        lasting = Columns(*(each for each in columns.columns if not each.ages), key=columns.key)
        #: The text of what makes a row another one.
        self._lasting = self._lines if len(lasting.columns) == len(columns.columns) else Lines(lasting, output)
        self._key, self._output = key, output
        self._header = ",".join(columns.names()) + "\n" if output is Output.CSV else ""
        self._plain = plain_lines if output is Output.CSV and sys.stdout.isatty() else str
        #: The number of rows that have a key and a line.
        self._last: Counter[tuple[Any, str]] = Counter()

    def print(self, rows: Iterable[Any]) -> None:
        last, now = self._last, Counter[tuple[Any, str]]()
        for row in rows:
            seen = self._key(row), self._lasting.of_rows([row])
            now[seen] += 1
            if now[seen] > last[seen]:
                emit(self._plain(self._header + self._lines.of_rows([row])))
                self._header = ""
        if self._output is Output.NDJSON:
            left = Counter(key for key, _ in last.elements())
            left.subtract(key for key, _ in now.elements())
            for key, line in (last - now).elements():
                if left[key] > 0:
                    left[key] -= 1
                    emit(line.rstrip()[:-1] + ',"removed":true}\n')
        self._last = now
        flush()
