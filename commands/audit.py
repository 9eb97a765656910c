"""`bkctl audit`: the audit log on this machine, run by run."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import NotFound, UsageError

from .kit.audit import audit_file, run_result
from .kit.columns import field_column
from .kit.command import Run, command, group, object_of, rows_of
from .kit.options import count_option, duration_option, flag, word
from .kit.texts import GREEN, RED, YELLOW, duration_text

app = group()

LINE_SIZE_BYTES_MAX = 1 << 20


#: One run of a command: the fields of its last line in the log, the time of its first, and its result.
AuditedRun = dict[str, Any]


def _command(row: AuditedRun) -> str:
    words = row.get("command")
    return shlex.join(map(str, words)) if isinstance(words, list) else ""


_STYLE = {"done": GREEN, "failed": RED, "findings": YELLOW, "unfinished": YELLOW, "interrupted": YELLOW}
AUDIT_TABLE_COLUMNS = Columns(
    field_column("ID", "id"),
    field_column("TIME", "time"),
    field_column("USER", "user"),
    field_column("RESULT", "result", style=_STYLE),
    Column("COMMAND", "command", _command, flexible=True, wraps=True),
    key="id",
    none="The audit log has no such command",
)
AUDIT_COLUMNS = AUDIT_TABLE_COLUMNS.and_also(
    field_column("EXIT CODE", "exitCode", Kind.INTEGER),
    field_column("DURATION", "seconds", Kind.NESTED, text=duration_text),
    field_column("CLUSTER", "metadataUri"),
    field_column("CONNECTION", "connection"),
    field_column("ACCEPTED LOSS", "acceptedLoss"),
    field_column("ERROR", "error"),
    field_column("UNDO FILE", "undoFile"),
    field_column("DIRECTORY", "directory"),
    field_column("HOST", "host"),
    field_column("PID", "pid", Kind.INTEGER),
)


def _runs() -> list[AuditedRun]:
    """Return the runs in the audit log and the file before it, oldest first. Raises NotFound without a log."""
    path = audit_file(os.environ)
    if path is None:
        raise NotFound("The audit log is switched off by BKCTL_AUDIT_LOG", hint="unset it, or let it name a file")
    runs: dict[str, AuditedRun] = {}
    for fields in chain.from_iterable(map(_lines, (Path(f"{path}.1"), path))):
        began = runs.get(fields["id"], fields).get("time")
        runs[fields["id"]] = {**fields, "time": began, "result": run_result(fields.get("exitCode"))}
    if not runs and os.environ.get("BKCTL_AUDIT_LOG") and not path.exists():
        raise NotFound(f"No audit log {path}", hint="BKCTL_AUDIT_LOG names it")
    return list(runs.values())


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a log, if it is there; lines that are not records of runs are left out."""
    with suppress(FileNotFoundError), open(file, "rb") as stream:
        while line := stream.readline(LINE_SIZE_BYTES_MAX):
            with suppress(ValueError, RecursionError):
                fields = json.loads(line)
                if isinstance(fields, dict) and isinstance(fields.get("id"), str):
                    yield fields


@command(app, "list", prints=rows_of(AUDIT_COLUMNS))
def list_runs(
    run: Run,
    limit: Annotated[int | None, count_option("--limit", "List only the last N runs (default 50).")],
    since: Annotated[float | None, duration_option("--since", "List only runs of this last time: 1h, 7d.")],
    failed: Annotated[bool, flag("--failed", "List only runs that did not end with exit code 0.")] = False,
) -> None:
    """List the commands that changed something, oldest first.

    Reads the audit log of this user on this machine, or the file that BKCTL_AUDIT_LOG names.

    $ bkctl audit list
    $ bkctl audit list --since 1d --failed
    """
    earliest = None if since is None else time.time() - since
    found = [each for each in _runs() if (not failed or each["result"] != "done") and _is_after(each, earliest)]
    wanted = limit or 50
    run.out.render(found[-wanted:], run.out.table_columns(AUDIT_TABLE_COLUMNS, AUDIT_COLUMNS))
    if not found:
        run.out.note("No command has changed anything yet" if since is None and not failed else "No such runs")
    elif len(found) > wanted:
        run.out.note(f"{wanted:,} of {len(found):,} runs; --limit lists more")


def _is_after(run: AuditedRun, earliest: float | None) -> bool:
    """Return True for a run that began later; False where its time cannot be read."""
    with suppress(ValueError):
        return earliest is None or datetime.fromisoformat(str(run["time"])).timestamp() >= earliest
    return False


@command(app, "show", prints=object_of(AUDIT_COLUMNS))
def show(run: Run, name: Annotated[str, word("ID", "The run's id or its first digits, or last.")]) -> None:
    """Show one run: who, when, what, its result and its undo file.

    $ bkctl audit show last
    """
    runs = _runs()
    found = runs[-1:] if name == "last" else [each for each in runs if name and each["id"].startswith(name)]
    if not found:
        raise NotFound(f"No run {name} in the audit log", hint="'bkctl audit list' shows them")
    if len(found) > 1:
        raise UsageError(f"{len(found)} runs begin with {name}", hint="give more of the id")
    run.out.show(found[0], AUDIT_COLUMNS)
