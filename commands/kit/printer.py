"""The output of a run: rows and objects on stdout, notes and errors on stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from io import StringIO
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Final

from bkctl.columns import Columns, applied_column, iso_time
from bkctl.errors import BkctlError, FindingsError, UsageError

from .columns import ALL, COUNT_COLUMNS, Output, RowSelection
from .lines import Lines
from .output import RowWriter, open_writer, show
from .settings import GlobalOptions, Session
from .terminal import continue_without_stdout, emit, emit_bytes, flush, say, terminal_width, wants_color
from .texts import BOLD, RESET, counted, plain_lines

if TYPE_CHECKING:
    from .drawing import TreeWriter


class Printer:
    """Prints what a run finds, in the form that the options name."""

    def __init__(self, session: Session, options: GlobalOptions, given: GlobalOptions) -> None:
        self.output = session.output = options.output or Output.TABLE
        #: The form of output that an option names, for commands that print no rows; nothing of the environment.
        self.given_output = given.output or Output.TABLE
        self.selection = RowSelection(options.columns, options.sort)
        self.verbose, self.quiet = session.verbose, session.quiet
        #: The value of --dry-run, None for commands without it: rows say whether the run was applied.
        self.dry_run: bool | None = None
        #: True once the run may change something.
        self.changes = False
        #: Clears the progress on the terminal, before anything is printed; None without progress.
        self.activity: Callable[[], None] | None = None
        self._no_color = session.no_color
        self._has_noted_dry_run = False

    def render(self, rows: Iterable[Any], columns: Columns, *, findings: bool = False) -> int:
        """Print `rows` as they come, and return their number. What came before an error is printed, then it is raised.

        `findings`: as for `rows`.
        """
        with self.rows(columns, findings=findings) as writer:
            writer.rows(rows)
        return writer.count

    def watch(
        self,
        seconds: float | None,
        look: Callable[[], Iterable[Any]],
        columns: Columns,
        *,
        subscribe: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
        single: bool = False,
        count: bool = False,
        findings: bool = False,
        key: Callable[[Any], Any] | None = None,
    ) -> None:
        """Print the rows of `look`; with `seconds`, again after each change, until the user ends it.

        `subscribe(callback)` makes the store call at each change, and returns the cancel: then changes are seen at
        once, else when the next `seconds` are over. On a terminal a table is drawn anew, elsewhere printed again; the
        other forms give the rows that are new or changed, ndjson also those that went, with `"removed":true`. `single`:
        one row, shown as an object. `count`: the number of the rows, as such an object. `key` tells rows apart, by
        default by their ids. `findings`: as for `rows`.
        """
        if count:
            return self.watch(seconds, lambda: [sum(1 for _ in look())], COUNT_COLUMNS, single=True)
        if seconds is None:
            rows = look()
            if single:
                return self.show(next(iter(rows)), columns)
            self.render(rows, columns, findings=findings)
            return None
        if self.output in (Output.JSON, Output.YAML):
            raise UsageError(f"--watch has no end, and -o {self.output} is one document", hint="use -o ndjson")
        self.end_with_stdout()
        self.clear_activity()
        is_table = self.output in (Output.TABLE, Output.WIDE)
        shown = _Pages(self, columns, seconds, single=single) if is_table else _Changes(self, columns, key)
        changed = threading.Event()
        cancel = subscribe(changed.set) if subscribe is not None else lambda: None
        try:
            while True:
                changed.clear()
                shown.print(look())
                if changed.wait(seconds):
                    time.sleep(SETTLE_S)
        finally:
            cancel()

    def rows(self, columns: Columns, *, live: bool = False, findings: bool = False) -> RowWriter:
        """Return a writer to give rows to one by one, a context manager.

        `live` prints each row at once, so that --sort does not apply. A table of `findings` has no header without rows:
        the command says in a sentence that all is well.
        """
        if live and self.selection.order is not None:
            raise UsageError("--sort does not apply to rows that are printed as they come")
        return open_writer(
            self._with_applied(columns), self.output, self.selection, color=self.color, live=live,
            before_write=self.clear_activity, findings=findings, note=self.note,
        )  # fmt: skip

    def _with_applied(self, columns: Columns) -> Columns:
        """Return the columns, with `applied` where the command has --dry-run and does more than to read."""
        if self.dry_run is None or not (self.dry_run or self.changes):
            return columns
        return columns.and_also(applied_column(is_applied=not self.dry_run))

    @property
    def draws(self) -> bool:
        """True if trees and panels replace the table: on a terminal, unless options choose a form or columns."""
        is_chosen = self.output is Output.TABLE and self.selection == ALL
        return is_chosen and sys.stdout.isatty() and "utf" in (sys.stdout.encoding or "").lower()

    def tree(self, columns: Columns, levels: Sequence[Sequence[str]]) -> RowWriter | TreeWriter:
        """Return a writer to give rows to, as `rows`; on a terminal it prints them as trees.

        `levels` are the JSON names of the columns of each level, the root first.
        """
        if not self.draws:
            return self.rows(columns)
        from .drawing import TreeWriter

        return TreeWriter(columns, levels, color=self.color, before_write=self.clear_activity)

    def limit_sorted(self, limit: int | None) -> int | None:
        """With --sort, apply `limit` to the sorted rows and return None; else return it, for the command to apply."""
        if self.selection.order is None:
            return limit
        self.selection = self.selection._replace(limit=limit)
        return None

    def table_columns(self, short: Columns, full: Columns) -> Columns:
        """Return `short` for a table, where `full` has the columns to choose from; `full` for other forms."""
        return short.with_hidden(full) if self.output is Output.TABLE else full

    def show(self, value: Any, columns: Columns) -> None:
        """Print one object."""
        self.clear_activity()
        show(value, self._with_applied(columns), self.output, color=self.color, selection=self.selection)

    def text(self, text: str) -> None:
        """Print `text` on stdout as it is (no form of output applies)."""
        self.clear_activity()
        emit(text)

    def raw(self, data: bytes | bytearray | memoryview) -> None:
        """Write bytes to stdout as they are."""
        self.clear_activity()
        emit_bytes(data)

    def note(self, *texts: str) -> None:
        """Say something on stderr, a line each, unless --quiet."""
        for text in () if self.quiet else texts:
            self._say(text)

    def note_dry_run(self, plan: str = "nothing was changed") -> None:
        """Say on stderr what a dry run would do; only the first call counts."""
        if not self._has_noted_dry_run:
            self._has_noted_dry_run = True
            self.note(f"Dry run: {plan}")

    def end_dry_run(self) -> None:
        """Say that nothing was changed where rows do not: other forms than tables have `applied`."""
        if self.dry_run and self.output in (Output.TABLE, Output.WIDE):
            self.note_dry_run()

    def warn(self, *texts: str) -> None:
        """Say on stderr what the user should know before it is too late, unless --quiet."""
        if not self.quiet:
            self.error(*(f"Warning: {text}" for text in texts))

    def error(self, *problems: object) -> None:
        """Report errors on stderr that do not end the run: as the error that does, each begins with `bkctl:`."""
        for problem in problems:
            self._say(f"bkctl: {problem}")

    def raise_first(self, errors: list[BkctlError]) -> None:
        """Report all errors but the first, which is raised."""
        self.error(*errors[1:])
        if errors:
            raise errors[0]

    def _say(self, text: str) -> None:
        self.clear_activity()
        say(plain_lines(text))

    def detail(self, text: str) -> None:
        """Say something on stderr with --verbose."""
        if self.verbose:
            self._say(text)

    @property
    def color(self) -> bool:
        """True if stdout gets colours."""
        return wants_color(sys.stdout, no_color=self._no_color)

    def finish_with(self, count: int, one: str = "finding", many: str | None = None) -> None:
        """Raise FindingsError (exit code 3) for `count` findings, if any; `one` and `many` as in `counted`."""
        if count:
            raise FindingsError(counted(count, one, many))

    def clear_activity(self) -> None:
        if self.activity is not None:
            self.activity()

    def end_with_stdout(self) -> None:
        """Raise ClosedOutput, which ends with exit code 0, once stdout is closed: for rows of any number or size."""
        continue_without_stdout(None)

    def outlive_stdout(self) -> None:
        """Continue, with a note, once stdout is closed: what the run does beside printing is to be complete."""
        continue_without_stdout(lambda: self.note("stdout was closed; the command continues"))


# --- watching ---------------------------------------------------------------------------------------------------------

#: Several changes at once are shown together.
SETTLE_S: Final = 0.1


class _Page(StringIO):
    """A buffer in which a table is laid out before it is printed; as wide as the terminal on stdout."""

    def isatty(self) -> bool:
        return sys.stdout.isatty()


class _Pages:
    """Tables: drawn over the last one on a terminal, else printed one below the other."""

    def __init__(self, out: Printer, columns: Columns, seconds: float, *, single: bool) -> None:
        self._out, self._columns, self._single = out, columns, single
        self._title = f", every {seconds:g} s; Ctrl-C ends it"
        self._last: str | None = None

    def print(self, rows: Iterable[Any]) -> None:
        """Print rows as the next page."""
        out, page = self._out, _Page()
        settings: dict[str, Any] = {"stream": page, "color": out.color, "selection": out.selection}
        if self._single:
            show(next(iter(rows)), self._columns, out.output, **settings)
        else:
            with open_writer(self._columns, out.output, note=partial(print, file=page), **settings) as writer:
                writer.rows(rows)
        text = page.getvalue()
        if sys.stdout.isatty():
            self._draw(text)
        elif text != self._last:
            emit(text if self._last is None else f"\n{text}")
        self._last = text
        flush()

    def _draw(self, text: str) -> None:
        moment = iso_time(time.time_ns() // 1_000_000)[11:19]
        title = f"{moment}Z{self._title}"[: terminal_width()]
        title = f"{BOLD}{title}{RESET}" if self._out.color else title
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


class _Changes:
    """ndjson, csv and ids: new and changed rows, and in ndjson removed ones.

    A row that stays has its `key`, and may change. Rows that share a key differ by their lines.
    """

    def __init__(self, out: Printer, columns: Columns, key: Callable[[Any], Any] | None) -> None:
        output = self._output = out.output
        if out.selection.order is not None:
            raise UsageError(f"--watch prints changes as they come, so --sort does not apply to -o {output}")
        columns = out.selection.of(columns, output)
        # Only single objects have no ids.
        self._key = key or (columns.key.getter() if columns.key is not None else lambda _: None)
        self._lines = Lines(columns, output)
        lasting = Columns(*(each for each in columns.columns if not each.ages), key=columns.key)
        #: The text of what makes a row another one.
        self._lasting = self._lines if len(lasting.columns) == len(columns.columns) else Lines(lasting, output)
        self._header = ",".join(columns.names()) + "\n" if output is Output.CSV else ""
        self._plain = plain_lines if output is Output.CSV and sys.stdout.isatty() else str
        #: The number of rows that have a key and a line.
        self._last: Counter[tuple[Any, str]] = Counter()

    def print(self, rows: Iterable[Any]) -> None:
        last, now = self._last, Counter[tuple[Any, str]]()
        for row in rows:
            seen = self._key(row), self._lasting.text([row])
            now[seen] += 1
            if now[seen] > last[seen]:
                emit(self._plain(self._header + self._lines.text([row])))
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
