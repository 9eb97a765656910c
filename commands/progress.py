"""`bkctl progress`: long work of this user on this machine, from another terminal."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import Conflict, NotFound, UsageError

from .kit.columns import field_column
from .kit.command import Run, command, group, object_of, rows_of
from .kit.options import WatchOption, parse_pace, word
from .kit.texts import GREEN, RED, YELLOW, counted, duration_text, size_text
from .kit.work import ask_for_rate, ask_to_pause, list_work, progress_directory

app = group(default="show", takes_words=True)

#: The longest wait for the work to follow a request; the work looks every second.
_ANSWER_S: Final = 5.0
#: The state of one run of a command that works for long.
Work = dict[str, Any]


def _in_units(row: Work, name: str, form: str = "{}") -> str | None:
    number, is_size = row.get(name), row.get("unit") == "bytes"
    return None if number is None else form.format(size_text(int(number)) if is_size else f"{number:,.0f}")


def _done(row: Work) -> str | None:
    unit = row.get("unit")
    return _in_units(row, "done", "{}" if unit in (None, "", "bytes") else f"{{}} {unit}")


def _limit(row: Work) -> str | None:
    size, steps = row.get("bytesPerSecondMax"), row.get("stepsPerSecondMax")
    if size is not None:
        return f"{size_text(int(size))}/s"
    return None if steps is None else f"{steps:g}/s"


_ID = field_column("ID", "id")
_STATE = field_column(
    "STATE", "state",
    style={"running": GREEN, "done": GREEN, "failed": RED, "killed": RED, "paused": YELLOW, "interrupted": YELLOW},
)  # fmt: skip
_STAGE = field_column("STAGE", "stage")
_PERCENT = field_column("PERCENT", "percent", Kind.INTEGER, text=lambda value: f"{value}%")
_ETA = field_column("TIME LEFT", "etaSeconds", Kind.INTEGER, text=duration_text)
_SINCE = Column("SINCE", "since", lambda row: row.get("began"), Kind.TIME)
_COMMAND = Column("COMMAND", "command", lambda row: shlex.join(row["command"]), flexible=True, wraps=True)
WORK_TABLE_COLUMNS = Columns(
    _ID,
    _STATE,
    _STAGE,
    _PERCENT,
    _ETA,
    Column("DONE", "done", _done, spare=1),
    Column("TOTAL", "total", lambda row: _in_units(row, "total"), spare=3),
    Column("RATE", "rate", lambda row: _in_units(row, "rate", "{}/s"), spare=2),
    _SINCE.replaced(spare=4),
    _COMMAND,
    key="id",
    none="No command works for long now, or did within the last hour",
)
WORK_COLUMNS = Columns(
    _ID,
    _STATE,
    _STAGE,
    field_column("DONE", "done", Kind.INTEGER),
    field_column("TOTAL", "total", Kind.INTEGER),
    field_column("UNIT", "unit"),
    _PERCENT,
    field_column("RATE", "rate", Kind.NESTED),
    _ETA,
    _SINCE,
    field_column("ENDED", "ended", Kind.TIME),
    Column("LIMIT", "limit", _limit),
    field_column(None, "bytesPerSecondMax", Kind.NESTED),
    field_column(None, "stepsPerSecondMax", Kind.NESTED),
    Column("CAN BE PAUSED", "steerable", lambda row: row.get("isSteerable"), Kind.BOOLEAN),
    field_column("PID", "pid", Kind.INTEGER),
    _COMMAND,
    key="id",
)
WorkId = Annotated[str, word("ID", "The id of the work, or its first digits.")]


def _all() -> list[Work]:
    return list_work(progress_directory(os.environ))


def _one(work_id: str) -> Work:
    """Return the work whose id begins with `work_id`. Raises NotFound, UsageError if several do."""
    found = [row for row in _all() if row["id"].startswith(work_id)]
    if not found:
        raise NotFound(f"No work has the id {work_id}", hint="'bkctl progress' lists running work")
    if len(found) > 1:
        raise UsageError(f"{counted(len(found), 'id')} begin with {work_id}", hint="give more of the id")
    return found[0]


@command(app, "show", prints=rows_of(WORK_COLUMNS) + object_of(WORK_COLUMNS))
def show(
    run: Run,
    watch: WatchOption,
    work_id: Annotated[str | None, word("ID", "Show one: its id, or the first digits.", show_default=False)] = None,
) -> None:
    """Show long work: running, and ended within the last hour.

    Lists the commands of this user on this machine that work for longer than two seconds. 'bkctl progress' alone and
    'bkctl progress ID' do the same.

    $ bkctl progress show
    $ bkctl progress show 3f2a9c
    """
    if work_id is not None:
        run.out.watch(watch, lambda: iter([_one(work_id)]), WORK_COLUMNS, single=True)
        return
    run.out.watch(watch, _all, run.out.table_columns(WORK_TABLE_COLUMNS, WORK_COLUMNS))


def _steerable(work_id: str) -> Work:
    """Return running work that can be paused. Raises Conflict for other work, and as `_one`."""
    row = _one(work_id)
    if row["state"] not in ("running", "paused"):
        raise Conflict(f"Work {row['id']} does not run: {row['state']}")
    if not row.get("isSteerable"):
        raise Conflict(
            f"Work {row['id']} ({row.get('stage')}) cannot be paused, and has no rate",
            hint="wait for its next stage, or stop it with Ctrl-C in its terminal",
        )
    return row


def _show_followed(run: Run, row: Work, is_followed: Callable[[Mapping[str, Any]], bool]) -> None:
    """Wait until the state of the work shows that it follows a request, and print the state."""
    deadline = time.monotonic() + _ANSWER_S
    while not is_followed(row) and time.monotonic() < deadline:
        time.sleep(0.1)
        row = _one(row["id"])
    run.out.show(row, WORK_COLUMNS)
    if not is_followed(row):
        run.out.note(f"Work {row['id']} has not followed yet: it will at its next step")


def _pause(run: Run, work_id: str, *, pause: bool) -> None:
    row = _steerable(work_id)
    ask_to_pause(progress_directory(os.environ), row["id"], pause=pause)
    _show_followed(run, row, lambda fields: fields["state"] != ("running" if pause else "paused"))


@command(app, "pause", prints=object_of(WORK_COLUMNS))
def pause(run: Run, work_id: WorkId) -> None:
    """Pause work at its next step.

    A paused command keeps its place and holds no locks of ledgers; 'bkctl progress resume' continues it.

    $ bkctl progress pause 3f2a9c
    """
    _pause(run, work_id, pause=True)


@command(app, "resume", prints=object_of(WORK_COLUMNS))
def resume(run: Run, work_id: WorkId) -> None:
    """Continue paused work.

    $ bkctl progress resume 3f2a9c
    """
    _pause(run, work_id, pause=False)


@command(app, "rate", prints=object_of(WORK_COLUMNS))
def rate(
    run: Run,
    work_id: WorkId,
    limit: Annotated[str, word("RATE", "Rate as in --rate: 20MiB, '5000 entries' or N; 'none' removes it.")],
) -> None:
    """Change the rate of running work.

    The new rate replaces --rate. A bare number is bytes where the command copies or reads entries, else ledgers or
    records.

    $ bkctl progress rate 3f2a9c 20MiB
    $ bkctl progress rate 3f2a9c none
    """
    row = _steerable(work_id)
    pace = None if limit == "none" else parse_pace(limit, "RATE", has_bytes=bool(row.get("hasBytes")))
    size, steps = (None, None) if pace is None else (pace.bytes_per_s, pace.steps_per_s)
    ask_for_rate(progress_directory(os.environ), row["id"], bytes_per_s=size, steps_per_s=steps)
    names = ("bytesPerSecondMax", "stepsPerSecondMax")
    _show_followed(run, row, lambda fields: (*map(fields.get, names),) == (size, steps))
