"""`bkctl bookie gc` and `bkctl bookie compact-locations`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Final

from bkctl.columns import Column, Columns, Kind, iso_time
from bkctl.errors import BkctlError, FindingsError, NotFound, Unsupported, UsageError

from ..kit.columns import PlainRow, fields
from ..kit.command import Run, command, group, rows_of
from ..kit.options import WatchOption, flag, word
from ..kit.texts import GREEN, YELLOW
from .server import BookieServerOption, Patience, Server, WaitDeadline, server

if TYPE_CHECKING:
    from bkctl.http.bookie_client import GarbageCollection

app = group()


_FULL_HINT: Final = (
    "if its disks are full, delete ledgers or add space; isForceGCAllowWhenNoSpace=true lets it compact on full disks, "
    "as far as the live entries of a log have room"
)


#: The compactions to suspend or resume.
Compactions = StrEnum("Compactions", "MAJOR MINOR BOTH")


def _doing(running: str, suspended: str) -> Callable[[PlainRow], str]:
    def text(row: PlainRow) -> str:
        if getattr(row.status, running):
            return "running"
        return "suspended" if getattr(row.collection, suspended) else "idle"

    return text


def _seconds(milliseconds: int) -> str:
    return iso_time(milliseconds - milliseconds % 1000).replace(".000Z", "Z")


_DOING_STYLE = {"running": GREEN, "suspended": YELLOW}
COLLECTOR_COLUMNS = Columns(
    Column("#", "collector", "number", Kind.INTEGER),
    Column(None, "isInForceGc", "collection.in_force_gc", Kind.BOOLEAN),
    Column(None, "isMajorGcSuspended", "collection.major_suspended", Kind.BOOLEAN),
    Column(None, "isMinorGcSuspended", "collection.minor_suspended", Kind.BOOLEAN),
    *fields(Kind.BOOLEAN, "status.", forceCompacting=None, majorCompacting=None, minorCompacting=None),
    *fields(Kind.TIME, "status.", lastMajorCompactionTime=None, lastMinorCompactionTime=None),
    *fields(Kind.TIME, "status.", lastEntryLocationCompactionTime=None),
    *fields(Kind.INTEGER, "status.", majorCompactionCounter=None, minorCompactionCounter=None),
    *fields(Kind.INTEGER, "status.", entryLocationCompactionCounter=None),
    Column(None, "scopedDeletesHeldBack", "status.scoped_deletes_held_back", optional=True),
    key="collector",
)
COLLECTOR_TABLE_COLUMNS = Columns(
    Column("#", "collector", "number", Kind.INTEGER),
    Column("FORCED", "forceCompacting", "status.force_compacting", Kind.BOOLEAN, style={"yes": GREEN}),
    Column("MAJOR", "major", _doing("major_compacting", "major_suspended"), style=_DOING_STYLE),
    Column("MINOR", "minor", _doing("minor_compacting", "minor_suspended"), style=_DOING_STYLE),
    Column("MAJORS", "majorCompactionCounter", "status.major_compaction_counter", Kind.INTEGER),
    Column("LAST MAJOR", "lastMajorCompactionTime", "status.last_major_compaction_time", Kind.INTEGER, text=_seconds),
    Column("MINORS", "minorCompactionCounter", "status.minor_compaction_counter", Kind.INTEGER),
    Column("LAST MINOR", "lastMinorCompactionTime", "status.last_minor_compaction_time", Kind.INTEGER, text=_seconds),
    key="collector",
)


def _collector_columns(run: Run) -> Columns:
    return run.out.table_columns(COLLECTOR_TABLE_COLUMNS, COLLECTOR_COLUMNS)


@command(
    app,
    "gc",
    connects=True,
    asks=True,
    changes=None,
    dry_run=True,
    prints=rows_of(COLLECTOR_COLUMNS, table=COLLECTOR_TABLE_COLUMNS),
)
def gc(
    run: Run,
    which: BookieServerOption,
    deadline: WaitDeadline,
    watch: WatchOption,
    major: Annotated[bool, flag("--major", "Force a round with major compaction only, or with --minor both.")] = False,
    minor: Annotated[bool, flag("--minor", "Force a round with minor compaction only, or with --major both.")] = False,
    wait: Annotated[bool, flag("--wait", "Wait until the forced round is over.")] = False,
    accept_scoped_deletes: Annotated[
        bool,
        flag(
            "--accept-scoped-deletes",
            "Let this one round delete any number of scoped ledgers; otherwise a bookie of bkctl stops at "
            "more than half of them. Asks.",
        ),
    ] = False,
    suspend: Annotated[
        Compactions | None, flag("--suspend [major|minor]", "Suspend major or minor compaction (default: both).")
    ] = None,
    resume: Annotated[
        Compactions | None, flag("--resume [major|minor]", "Resume major or minor compaction (default: both).")
    ] = None,
    status: Annotated[bool, flag("--status", "Only show the state of the collectors.")] = False,
) -> None:
    """Collect garbage on a bookie, or control its compaction.

    A round removes the ledgers that the metadata store no longer has, deletes entry logs without live entries, and
    compacts those with few. Without --major and --minor the round does both compactions, unless they are suspended.
    There is one collector for each ledger directory with DbLedgerStorage, else one in all. A compaction that runs when
    compactions are suspended finishes; a restart resumes them. Exit code 1 if --wait saw that the bookie could not do
    what was asked for, or if full disks keep a resumed compaction suspended.

    $ bkctl bookie gc --status --bookie-url http://127.0.0.1:8080
    $ bkctl bookie gc --major --wait --bookie-url http://127.0.0.1:8080
    """
    switches = suspend is not None or resume is not None
    forces = not (switches or status)
    if status and switches:
        raise UsageError("--status and --suspend or --resume are given", hint="give one of them")
    if not forces and (major or minor or wait or accept_scoped_deletes):
        raise UsageError("--major, --minor, --wait and --accept-scoped-deletes apply only to a forced round")
    if watch is not None and not status:
        raise UsageError("--watch requires --status", hint="add --status")
    with server(run, which, changes=not status and not run.dry_run) as found:
        if accept_scoped_deletes and not run.dry_run:
            run.consent.confirm(
                f"{found.name} would delete all that it has of every ledger of a scope that the metadata store does "
                "not name, however many those are"
            )
        if status:
            _show_collectors(run, found, watch)
            return
        if run.dry_run:
            run.out.note_dry_run(f"{found.name} would {_gc_plan(major, minor, suspend, resume)}")
        elif switches:
            _switch_compactions(found, suspend, resume)
        else:
            before = _force_gc(run, found, major, minor, accept_scoped_deletes, wait, deadline)
        after = found.api.garbage_collection()
        run.out.render(_collector_rows(after), _collector_columns(run))
        if resume is not None and not run.dry_run:
            _check_resumed(found, after, resume)
        if forces and wait and not run.dry_run:
            _check_round(found, before, after, "major" if major else "minor" if minor else None)


def _check_resumed(found: Server, after: GarbageCollection, resume: Compactions) -> None:
    """Raise BkctlError if full disks keep a compaction suspended that was resumed."""
    suspended = {Compactions.MAJOR: after.major_suspended, Compactions.MINOR: after.minor_suspended}
    if after.suspended_by_disks and suspended.get(resume, True):
        raise BkctlError(f"{found.name}: {after.suspended_by_disks}", hint=_FULL_HINT)


def _check_round(found: Server, before: GarbageCollection, after: GarbageCollection, kind: str | None) -> None:
    """Raise BkctlError if the forced round failed, or did no compaction of `kind`; FindingsError for kept scopes."""
    problem = after.last_round_problem
    if kind is not None and not _has_compacted(before, after, kind):
        reason = problem or f"{kind} compaction is disabled there, or the bookie started again meanwhile"
        raise BkctlError(f"{found.name} did no {kind} compaction: {reason}", hint=_FULL_HINT)
    if problem:
        raise BkctlError(f"{found.name} did not finish the round: {problem}", hint=_FULL_HINT)
    if reasons := _held_back(after):
        raise FindingsError(
            f"{found.name} kept ledgers of scopes that seem deleted: {reasons[0]}",
            hint="check that; 'bookie gc --accept-scoped-deletes' lets one round delete them",
        )


def _show_collectors(run: Run, found: Server, watch: float | None) -> None:
    latest: list[GarbageCollection] = []

    def look() -> Iterator[PlainRow]:
        latest[:] = [found.api.garbage_collection()]
        return _collector_rows(latest[0])

    run.out.watch(watch, look, _collector_columns(run))
    run.out.note(*(f"{found.name} keeps ledgers of scopes that seem deleted: {each}" for each in _held_back(latest[0])))


def _switch_compactions(found: Server, suspend: Compactions | None, resume: Compactions | None) -> None:
    for chosen, change in ((suspend, found.api.suspend_compaction), (resume, found.api.resume_compaction)):
        if chosen is not None:
            both = chosen is Compactions.BOTH
            change(major=both or chosen is Compactions.MAJOR, minor=both or chosen is Compactions.MINOR)


def _gc_plan(major: bool, minor: bool, suspend: Compactions | None, resume: Compactions | None) -> str:
    if suspend is None and resume is None:
        kinds = [name for name, wanted in (("major", major), ("minor", minor)) if wanted]
        return f"collect garbage now, with {' and '.join(kinds)} compaction" if kinds else "collect garbage now"
    return " and ".join(
        f"{what} {'major and minor' if chosen is Compactions.BOTH else chosen} compactions"
        for what, chosen in (("suspend", suspend), ("resume", resume))
        if chosen is not None
    )


def _force_gc(
    run: Run, found: Server, major: bool, minor: bool, accept: bool, wait: bool, deadline: float | None
) -> GarbageCollection:
    """Force a round; return the state before it."""
    api = found.api
    patience = Patience(f"{found.name} still collects garbage", deadline)
    patience.shorten(found)
    before = api.garbage_collection()
    busy = before.in_force_gc
    if busy and not wait:
        run.out.note(f"{found.name} is in a forced round and starts no other; add --wait to start one afterwards")
    with run.job.working("Collecting garbage", enabled=wait, left="the bookie finishes the round all the same"):
        while busy and wait:
            patience.wait()
            before = api.garbage_collection()
            busy = before.in_force_gc
        chosen: tuple[bool | None, bool | None] = (major, minor) if major or minor else (None, None)
        run.out.detail(api.force_garbage_collection(major=chosen[0], minor=chosen[1], accept_scoped_deletes=accept))
        while wait:
            now = api.garbage_collection()
            if not (now.in_force_gc or any(each.force_compacting for each in now.collectors)):
                break
            patience.wait()
    return before


def _has_compacted(before: GarbageCollection, after: GarbageCollection, kind: str) -> bool:
    """Return True if a collector counted a compaction, or timed one: Apache's counts only with statistics on."""
    get = attrgetter(f"{kind}_compaction_counter", f"last_{kind}_compaction_time")
    return any(get(new) > get(old) for old, new in zip(before.collectors, after.collectors, strict=False))


def _held_back(collection: GarbageCollection) -> list[str]:
    """Return the reasons for which collectors deleted no scoped ledgers in their last round."""
    return [each.scoped_deletes_held_back for each in collection.collectors if each.scoped_deletes_held_back]


def _collector_rows(collection: GarbageCollection) -> Iterator[PlainRow]:
    for number, status in enumerate(collection.collectors):
        yield PlainRow(number=number, collection=collection, status=status)


LOCATIONS_COLUMNS = Columns(
    Column("DATABASE", "path", "path"),
    Column("COMPACTING", "compacting", "compacting", Kind.BOOLEAN, style={"yes": GREEN}),
    key="path",
)
#: A bookie begins to compact a moment after the request.
BEGIN_S: Final = 1.0


@command(app, "compact-locations", connects=True, changes=None, dry_run=True, prints=rows_of(LOCATIONS_COLUMNS))
def compact_locations(
    run: Run,
    which: BookieServerOption,
    deadline: WaitDeadline,
    databases: Annotated[
        list[str] | None, word("DATABASE", "Compact only these, by their paths on the bookie, as --status shows them.")
    ] = None,
    wait: Annotated[bool, flag("--wait", "Wait until compaction ends.")] = False,
    status: Annotated[bool, flag("--status", "Only show whether compaction runs.")] = False,
) -> None:
    """Compact a bookie's RocksDB of entry locations.

    Reads become faster after many ledgers were deleted. Compaction reads and writes the whole database. Needs a bookie
    with DbLedgerStorage.

    $ bkctl bookie compact-locations --status --bookie-url http://127.0.0.1:8080
    """
    if status and (wait or databases):
        raise UsageError("--status shows all databases, and changes nothing", hint="drop the other arguments")
    with server(run, which, changes=not status and not run.dry_run) as found:
        known = found.api.location_compactions()
        if not known:
            raise Unsupported(
                f"{found.name} has no databases of entry locations", hint="only DbLedgerStorage keeps them in RocksDB"
            )
        unknown = [path for path in databases or () if path not in known]
        if unknown:
            raise NotFound(f"{found.name} has no database {unknown[0]}", hint=f"it has {', '.join(known)}")
        chosen = databases or list(known)
        if run.dry_run:
            run.out.note_dry_run(f"{found.name} would compact {', '.join(chosen)}")
        elif not status:
            run.out.detail(found.api.compact_locations(databases or ()))
            known = found.api.location_compactions()
            if wait:
                known = _wait_for_locations(run, found, chosen, deadline)
        run.out.render(
            (PlainRow(path=path, compacting=known[path]) for path in chosen if path in known), LOCATIONS_COLUMNS
        )


def _wait_for_locations(run: Run, found: Server, chosen: list[str], deadline: float | None) -> dict[str, bool]:
    patience, began = Patience(f"{found.name} still compacts", deadline), time.monotonic()
    patience.shorten(found)
    seen = False
    with run.job.working("Compacting", left="the bookie finishes it all the same"):
        while True:
            now = found.api.location_compactions()
            busy = any(now.get(path) for path in chosen)
            seen = seen or busy
            if not busy and (seen or time.monotonic() - began > BEGIN_S):
                return now
            patience.wait()
