"""The output of a run: rows and objects on stdout, notes and errors on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from bkctl.columns import Columns, applied_column
from bkctl.errors import BkctlError, FindingsError, UsageError

from .activity import Activity
from .columns import ALL, COUNT_COLUMNS, Output, RowSelection
from .output import RowWriter, open_writer, show
from .session import Session
from .settings import GlobalOptions
from .terminal import continue_without_stdout, emit, emit_bytes, say, wants_color
from .texts import counted, plain_lines

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
        #: The progress on the terminal, cleared before anything is printed.
        self.activity: Activity | None = None
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
        from .watch import watch

        self.end_with_stdout()
        self.clear_activity()
        watch(
            look, columns, self.output, seconds=seconds, subscribe=subscribe, single=single, color=self.color,
            selection=self.selection, key=key,
        )  # fmt: skip
        return None

    def rows(self, columns: Columns, *, live: bool = False, findings: bool = False) -> RowWriter:
        """Return a writer to give rows to one by one, a context manager.

        `live` prints each row at once, so that --sort does not apply. A table of `findings` has no header without rows:
        the command says in a sentence that all is well.
        """
        if live and self.selection.order is not None:
            raise UsageError("--sort does not apply to rows that are printed as they come")
        return open_writer(
            self._with_applied(columns),
            self.output,
            self.selection,
            color=self.color,
            live=live,
            before_write=self.clear_activity,
            findings=findings,
            note=self.note,
        )

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

    def finish_with(self, count: int, one: str, many: str) -> None:
        """Raise FindingsError (exit code 3) for `count` findings, if any; `one` and `many` as in `counted`."""
        if count:
            raise FindingsError(counted(count, one, many))

    def clear_activity(self) -> None:
        if self.activity is not None:
            self.activity.clear()

    def end_with_stdout(self) -> None:
        """End with exit code 0 once stdout is closed: for rows without an end, or with entries of any size."""
        continue_without_stdout(None)

    def outlive_stdout(self) -> None:
        """Continue, with a note, once stdout is closed: what the run does beside printing is to be complete."""
        continue_without_stdout(lambda: self.note("stdout was closed; the command continues"))
