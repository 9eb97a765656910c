"""`bkctl bookie state`, `ready`, `info` and `readonly`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Annotated

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import BkctlError, FindingsError, NotFound, Unreachable, Unsupported

from ..kit.columns import PlainRow
from ..kit.command import Run, command, group, object_of
from ..kit.options import WatchOption, flag, word
from ..kit.texts import GREEN, RED, YELLOW
from .server import BOOKIE, URL, BookieServerOption, Patience, Server, WaitDeadline, finder, server

app = group()


STATE = (
    Column("RUNNING", "running", "answer.running", Kind.BOOLEAN, style={"no": RED}),
    Column("READ ONLY", "readOnly", "answer.read_only", Kind.BOOLEAN, style={"yes": YELLOW}),
    Column("SHUTTING DOWN", "shuttingDown", "answer.shutting_down", Kind.BOOLEAN, style={"yes": RED}),
    Column(
        "HIGH-PRIORITY WRITES", "availableForHighPriorityWrites", "answer.available_for_high_priority_writes",
        Kind.BOOLEAN,
    ),
)  # fmt: skip
STATE_COLUMNS = Columns(BOOKIE, URL, *STATE, key="url")


@command(app, "state", connects=True, prints=object_of(STATE_COLUMNS))
def state(run: Run, which: BookieServerOption, watch: WatchOption) -> None:
    """Show whether a bookie runs, is read-only or stops.

    A read-only bookie may still accept high-priority writes, which ledger recovery uses. A warning says why a bookie
    that runs is not ready: above all that it lost its registration in the metadata store.

    $ bkctl bookie state --bookie-url http://127.0.0.1:8080
    """
    with server(run, which) as found:
        with suppress(NotFound, Unsupported):  # an old bookie of Apache's has no such path
            readiness = found.api.readiness()
            if not readiness.ready:
                run.out.warn(f"{found.name} is not ready: {readiness.message}")
        run.out.watch(
            watch, lambda: iter([PlainRow(server=found, answer=found.api.state())]), STATE_COLUMNS, single=True
        )


READY_COLUMNS = Columns(
    BOOKIE,
    URL,
    Column("READY", "ready", "answer.ready", Kind.BOOLEAN, style={"yes": GREEN, "no": RED}),
    Column("ANSWER", "message", "answer.message"),
    key="url",
)


@command(app, "ready", connects=True, prints=object_of(READY_COLUMNS))
def ready(
    run: Run,
    which: BookieServerOption,
    deadline: WaitDeadline,
    wait: Annotated[bool, flag("--wait", "Wait until the bookie is ready, also while it is down.")] = False,
) -> None:
    """Show whether a bookie serves, for probes.

    Exit code 3 if the bookie is not ready.

    $ bkctl bookie ready --bookie-url http://127.0.0.1:8080 --wait --deadline 60s
    """
    with finder(run, which) as find:
        with run.job.working("Waiting for the bookie", enabled=wait):
            patience = Patience(f"Bookie {which.bookie_id or which.url or run.access.conf} is not ready", deadline)
            answer = _readiness(find, patience, wait=wait)
        run.out.show(answer, READY_COLUMNS)
        if not answer.answer.ready:
            raise FindingsError(f"{answer.server.name} is not ready: {answer.answer.message}")


def _readiness(find: Callable[[], Server], patience: Patience, *, wait: bool) -> PlainRow:
    """Return the bookie's answer, with `wait` once it is ready. Raises Unreachable, or TimedOut at the deadline."""
    while True:
        try:
            found = find()
            patience.shorten(found)
            readiness = found.api.readiness()
        except Unreachable:
            if not wait:
                raise
        else:
            if readiness.ready or not wait:
                return PlainRow(server=found, answer=readiness)
        patience.wait()


INFO_COLUMNS = Columns(
    BOOKIE,
    URL,
    *STATE,
    Column("TOTAL", "totalSpace", "space.total", Kind.SIZE),
    Column("FREE", "freeSpace", "space.free", Kind.SIZE),
    Column("USED", "usedSpace", "space.used", Kind.SIZE),
    Column(
        "USED %", "usedPercent", lambda row: round(row.space.used_percent, 2), Kind.INTEGER,
        text=lambda value: f"{value:.1f}%",
    ),
    key="url",
)  # fmt: skip


@command(app, "info", connects=True, prints=object_of(INFO_COLUMNS))
def info(run: Run, which: BookieServerOption, watch: WatchOption) -> None:
    """Show a bookie's state and the space on its disks.

    $ bkctl bookie info --bookie-url http://127.0.0.1:8080
    """
    with server(run, which) as found:
        run.out.watch(
            watch,
            lambda: [PlainRow(server=found, answer=found.api.state(), space=found.api.space())],
            INFO_COLUMNS,
            single=True,
        )


#: The states of a switch.
Switch = StrEnum("Switch", "ON OFF")


READ_ONLY_COLUMNS = Columns(
    BOOKIE, URL, Column("READ ONLY", "readOnly", "answer", Kind.BOOLEAN, style={"yes": YELLOW}), key="url"
)


@command(app, "readonly", connects=True, changes=None, dry_run=True, prints=object_of(READ_ONLY_COLUMNS))
def readonly(
    run: Run,
    which: BookieServerOption,
    wanted: Annotated[Switch | None, word("on|off", "The new state (default: show the state).")] = None,
) -> None:
    """Show or switch a bookie's read-only state.

    `on`: the bookie accepts no more entries, so writers replace it with other bookies; it continues to serve reads and
    keeps its entries. The state survives a restart only if the bookie has persistBookieStatusEnabled=true; it is
    refused if the bookie has readOnlyModeEnabled=false. `off`: the bookie accepts entries again, unless its disks are
    full.

    $ bkctl bookie readonly --bookie-url http://127.0.0.1:8080
    $ bkctl bookie readonly on --bookie-url http://127.0.0.1:8080 --dry-run
    """
    with server(run, which, changes=wanted is not None and not run.dry_run) as found:
        before = found.api.read_only()
        if wanted is None:
            run.out.show(PlainRow(server=found, answer=before), READ_ONLY_COLUMNS)
            return
        on = wanted is Switch.ON
        if before is on:
            run.out.note(f"{found.name} is {'read-only' if on else 'writable'} already")
        elif run.dry_run:
            run.out.note_dry_run(f"{found.name} would become {'read-only' if on else 'writable'}")
        after = before if run.dry_run else found.api.set_read_only(on)
        run.out.show(PlainRow(server=found, answer=after), READ_ONLY_COLUMNS)
        if run.dry_run:
            return
        if after is not on:
            raise BkctlError(f"{found.name} is still {'read-only' if after else 'writable'}")
        if before is not on:
            run.out.note(_meaning(found, on))


def _meaning(found: Server, on: bool) -> str:
    if not on:
        return f"{found.name} takes entries again, unless its disks are full"
    text = (
        f"{found.name} accepts no more entries and serves reads; the state is kept over a restart with "
        "persistBookieStatusEnabled=true only; 'bookie readonly off' ends it"
    )
    if found.cluster is not None:
        others = [each for each in found.cluster.bookies.list(include_down=False) if each.bookie_id != found.bookie_id]
        count = sum(each.state == "rw" for each in others)
        text += f". {count:,} other {'bookie is' if count == 1 else 'bookies are'} writable"
    return text
