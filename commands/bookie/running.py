"""`bkctl bookie gc`, `compact-locations`, `sanity`, `config` and `metrics`: commands for a running bookie."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Annotated, Any, Final

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.errors import BkctlError, FindingsError, NotFound, TimedOut, Unreachable, Unsupported, UsageError
from bkctl.redaction import is_secret_name

from ..kit.audit import shown_uri
from ..kit.columns import PlainRow, fields
from ..kit.command import Run, command, group, object_of, rows_of
from ..kit.ledger_options import scope_option
from ..kit.options import Compactions, WatchOption, count_option, duration_option, flag, pairs_option, word
from ..kit.texts import GREEN, RED, YELLOW, plain_lines
from ..kit.values import refuse_both
from .server import BookieServerOption, Patience, Server, ServerChoice, WaitDeadline, server

if TYPE_CHECKING:
    from bkctl.client.trials import RoundTrip
    from bkctl.http.bookie_client import GarbageCollection
    from bkctl.http.bookie_load import Metric

app = group()

_FULL_HINT: Final = (
    "if its disks are full, delete ledgers or add space; isForceGCAllowWhenNoSpace=true lets it compact on full disks, "
    "as far as the live entries of a log have room"
)


def _doing(running: str, suspended: str) -> Callable[[PlainRow], str]:
    def text(row: PlainRow) -> str:
        if getattr(row.status, running):
            return "running"
        return "suspended" if getattr(row.collection, suspended) else "idle"

    return text


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
    Column("LAST MAJOR", "lastMajorCompactionTime", "status.last_major_compaction_time", Kind.TIME),
    Column("MINORS", "minorCompactionCounter", "status.minor_compaction_counter", Kind.INTEGER),
    Column("LAST MINOR", "lastMinorCompactionTime", "status.last_minor_compaction_time", Kind.TIME),
    key="collector",
)


def _collector_columns(run: Run) -> Columns:
    return run.out.table_columns(COLLECTOR_TABLE_COLUMNS, COLLECTOR_COLUMNS)


_COLLECTORS: Final = rows_of(COLLECTOR_COLUMNS, table=COLLECTOR_TABLE_COLUMNS)


@command(app, "gc", connects=True, asks=True, changes=None, dry_run=True, prints=_COLLECTORS)
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
    refuse_both("--status", status, "--suspend or --resume", switches)
    if not forces and (major or minor or wait or accept_scoped_deletes):
        raise UsageError("--major, --minor, --wait and --accept-scoped-deletes apply only to a forced round")
    if watch is not None and not status:
        raise UsageError("--watch requires --status", hint="add --status")
    found = server(run, which, changes=not status and not run.dry_run)
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
        run.out.note(*([f"{found.name}: {after.suspended_by_disks}"] if after.suspended_by_disks else []))
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
    for verb, chosen in (("suspend", suspend), ("resume", resume)):
        if chosen is not None:
            major, minor = chosen is not Compactions.MINOR, chosen is not Compactions.MAJOR
            found.api.switch_compaction(verb, major=major, minor=minor)


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
    if before.in_force_gc and not wait:
        run.out.note(f"{found.name} is in a forced round and starts no other; add --wait to start one afterwards")
    with run.job.working("Collecting garbage", enabled=wait, left="the bookie finishes the round all the same"):
        while before.in_force_gc and wait:
            patience.wait()
            before = api.garbage_collection()
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
    found = server(run, which, changes=not status and not run.dry_run)
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
    run.out.render((PlainRow(path=path, compacting=known[path]) for path in chosen if path in known), LOCATIONS_COLUMNS)


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


#: The outcome of a bookie's test; `result` is None if the bookie tested itself.
SANITY_COLUMNS = Columns(
    *fields(Kind.TEXT, bookieId="BOOKIE", url="URL"),
    Column("PASSED", "passed", "passed", Kind.BOOLEAN, style={"yes": GREEN, "no": RED}),
    Column("READ ONLY", "readOnly", "read_only", Kind.BOOLEAN, style={"yes": YELLOW}),
    Column("ENTRIES", "entryCount", value_at("result.entry_count"), Kind.INTEGER, optional=True),
    Column(
        "WRITTEN IN", "writeMilliseconds", lambda row: row.result and round(row.result.write_s * 1000), Kind.INTEGER,
        optional=True, text="{:,} ms".format,
    ),
    Column(
        "READ IN", "readMilliseconds", lambda row: row.result and round(row.result.read_s * 1000), Kind.INTEGER,
        optional=True, text="{:,} ms".format,
    ),
)  # fmt: skip


@command(app, "sanity", connects=True, changes=None, prints=object_of(SANITY_COLUMNS))
def sanity(
    run: Run,
    which: BookieServerOption,
    count: Annotated[int | None, count_option("-e --entries", "Entries to write (default 10).")],
    deadline: Annotated[float | None, duration_option("-t --deadline", "Give up after this long (exit code 6).")],
    scope_id: Annotated[int | None, scope_option("Scope of the ledger (default 0).")],
) -> None:
    """Test a bookie with a temporary ledger.

    Writes a ledger on this bookie alone, reads it open and closed, compares, and deletes it. With --bookie the test
    runs over the wire. With --bookie-url, or --conf alone, the bookie tests itself, as Apache's bookies can, too: 10
    entries in scope 0. Exit code 3 if the bookie did not pass, or is read-only and so accepts no entries.

    $ bkctl bookie sanity --bookie-url http://127.0.0.1:8080
    """
    if which.bookie_id is None or which.url is not None:
        if count is not None or scope_id is not None:
            raise UsageError(
                f"{'--ledger-scope-id' if count is None else '--entries'} requires --bookie without --bookie-url",
                hint="a bookie tests itself with 10 entries in scope 0",
            )
        row = _sanity_of_itself(run, which, deadline)
    else:
        from bkctl.client.trials import SANITY_ENTRY_COUNT

        row = _sanity_over_the_wire(run, which.bookie_id, count or SANITY_ENTRY_COUNT, scope_id or 0, deadline)
    run.out.show(row, SANITY_COLUMNS)
    if not row.passed:
        name = f"Bookie {row.bookie_id}" if row.bookie_id else f"The bookie at {row.url}"
        if row.read_only:
            raise FindingsError(f"{name} is read-only, so no entry was written")
        raise FindingsError(f"{name} did not pass its test", hint="its log says why")


def _sanity_of_itself(run: Run, which: ServerChoice, deadline: float | None) -> PlainRow:
    if deadline is not None:
        run.access.timeout_s, run.access.connect_timeout_s = deadline, min(run.access.connect_timeout_s, deadline)
    found = server(run, which, changes=True)
    with run.job.working("The bookie tests itself"):
        try:
            answer = found.api.sanity()
        except TimedOut as error:
            if deadline is None:
                raise
            raise TimedOut(f"{found.name} did not end its test within {deadline:g} s") from error
    return PlainRow(
        bookie_id=which.bookie_id, url=found.url, passed=answer.passed, read_only=answer.read_only, result=None
    )


def _sanity_over_the_wire(run: Run, bookie_id: str, count: int, scope_id: int, deadline: float | None) -> PlainRow:
    async def work() -> RoundTrip:
        import asyncio

        from bkctl.client.trials import sanity_test

        try:
            async with asyncio.timeout(deadline), run.access.bookkeeper(run.cluster, only={bookie_id}) as bookkeeper:
                return await sanity_test(
                    bookkeeper, ledger_scope_id=scope_id, entry_count=count, progress=activity.update,
                    report=run.out.error,
                )  # fmt: skip
        except TimeoutError as error:
            raise TimedOut(f"The test of bookie {bookie_id} did not end within {deadline:g} s") from error

    run.consent.start_audit(begun=False)
    with run.job.working("Writing and reading", total=count, unit="entries") as activity:
        bookie = run.bookie(bookie_id)
        if bookie.state == "down":
            raise Unreachable(f"Bookie {bookie_id} is down", hint="'bkctl bookies list' shows which bookies are up")
        read_only = bookie.state == "ro"
        result = None if read_only else run.job.complete(work())
        return PlainRow(bookie_id=bookie_id, url=None, passed=not read_only, read_only=read_only, result=result)


SETTING_COLUMNS = Columns(
    Column("NAME", "name", itemgetter(0)), Column("VALUE", "value", itemgetter(1), Kind.NESTED, text=str), key="name"
)
HIDDEN: Final = "***"


SettingsToSet = Annotated[
    dict[str, str], pairs_option("--set NAME=VALUE", "Change this setting in the bookie's memory; repeatable.")
]


@command(app, "config", connects=True, changes=None, dry_run=True, prints=rows_of(SETTING_COLUMNS))
def config(
    run: Run,
    which: BookieServerOption,
    changed: SettingsToSet,
    names: Annotated[list[str] | None, word("NAME", "Only these settings; * and ? stand for any characters.")] = None,
    show_secrets: Annotated[bool, flag("--show-secrets", "Print passwords and tokens, too.")] = False,
) -> None:
    """Show or change the settings of a running bookie.

    Apache's bookies show what their file sets, and no defaults. --set changes a setting in the bookie's memory until it
    stops. Bookies read most settings only when they start: change the bookie's file, too.

    $ bkctl bookie config --bookie-url http://127.0.0.1:8080
    $ bkctl bookie config 'gc*' --bookie-url http://127.0.0.1:8080
    """
    refuse_both("NAME", names, "--set", bool(changed), "--set prints the settings that it changed")
    found = server(run, which, changes=bool(changed) and not run.dry_run)
    settings = found.api.config()
    if changed and run.dry_run:
        run.out.note_dry_run(f"{found.name} would set {', '.join(changed)}; now it has")
    elif changed:
        run.out.detail(found.api.set_config(changed))
        settings = found.api.config()
    shown = changed or sorted(name for name in settings if _is_asked_for(name, names))
    values = {name: settings.get(name) for name in shown}
    rows = ((name, value if show_secrets else _without_secret(name, value)) for name, value in values.items())
    run.out.render(rows, SETTING_COLUMNS)
    missing = [name for name in names or () if not any(_is_asked_for(each, [name]) for each in settings)]
    if missing:
        raise NotFound(f"{found.name} shows no setting {missing[0]}", hint="Apache's bookies show only what was set")
    if changed and not run.dry_run:
        run.out.note(f"{found.name} loses this change when it stops, and reads most settings only when it starts")


def _is_asked_for(name: str, patterns: list[str] | None) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _without_secret(name: str, value: Any) -> Any:
    """Return the value of a setting as it may be printed: a password as `***`, and one within a URI."""
    if not isinstance(value, str):
        return value
    return HIDDEN if is_secret_name(name) and value else shown_uri(value)


def _number(metric: Metric) -> int | float | str:
    """Return the value as JSON has it; values that JSON numbers cannot have are text, as in Prometheus."""
    value = metric.value
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return int(value) if value.is_integer() and abs(value) < 1 << 53 else value


def _sample_id(metric: Metric) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in metric.labels.items())
    return f"{metric.name}{{{labels}}}" if labels else metric.name


METRIC_COLUMNS = Columns(
    Column("METRIC", "name", "name"),
    Column(
        "LABELS",
        "labels",
        "labels",
        Kind.NESTED,
        text=lambda labels: ", ".join(map("=".join, labels.items())),
    ),
    Column("VALUE", "value", _number, Kind.NESTED, text=str),
    Column("TYPE", "type", "type"),
    key=Column(None, "sample", _sample_id),
)  # fmt: skip


@command(app, "metrics", connects=True, prints=rows_of(METRIC_COLUMNS))
def metrics(
    run: Run,
    which: BookieServerOption,
    watch: WatchOption,
    match: Annotated[
        str | None,
        flag("--match PATTERN", "Only metrics whose name contains this; with * or ?, it must match the whole name."),
    ] = None,
    raw: Annotated[bool, flag("--raw", "Print Prometheus' text as the bookie sent it.")] = False,
) -> None:
    """Show a bookie's metrics, one row for each sample.

    Apache's bookies have metrics only with statsProviderClass=…PrometheusMetricsProvider.

    $ bkctl bookie metrics --match journal --bookie-url http://127.0.0.1:8080
    """
    if raw and (match is not None or watch is not None):
        raise UsageError("--raw prints all metrics, once", hint="drop --match and --watch")
    found = server(run, which)
    if raw:
        text = found.api.metrics()
        run.out.text(plain_lines(text) if sys.stdout.isatty() else text)
        return

    run.out.watch(watch, partial(_metrics, found, match), METRIC_COLUMNS)


def _metrics(found: Server, match: str | None) -> list[Metric]:
    from bkctl.http.bookie_load import parse_metrics

    metrics = parse_metrics(found.api.metrics(), f"{found.url}/metrics")
    pattern = match if match is not None and any(char in match for char in "*?[") else f"*{match or ''}*"
    return [metric for metric in metrics if fnmatchcase(metric.name, pattern)]
