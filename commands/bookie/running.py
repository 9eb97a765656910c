"""`bkctl bookie sanity`, `config` and `metrics`."""

from __future__ import annotations

import math
import sys
from fnmatch import fnmatchcase
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any, Final

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.errors import FindingsError, NotFound, TimedOut, Unreachable, UsageError
from bkctl.redaction import is_secret_name

from ..kit.audit import shown_uri
from ..kit.columns import PlainRow, fields
from ..kit.command import Run, command, group, object_of, rows_of
from ..kit.ledger_options import scope_option
from ..kit.options import WatchOption, combined, count_option, duration_option, flag, option, word
from ..kit.texts import GREEN, RED, YELLOW, plain_lines
from .server import BookieServerOption, Server, ServerChoice, registered_bookie, server

if TYPE_CHECKING:
    from bkctl.client.trials import RoundTrip
    from bkctl.http.bookie_load import Metric

app = group()

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
    with server(run, which, changes=True) as found, run.job.working("The bookie tests itself"):
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
    with (
        run.job.working("Writing and reading", total=count, unit="entries") as activity,
    ):
        bookie = registered_bookie(run.cluster, bookie_id)
        if bookie.state == "down":
            raise Unreachable(f"Bookie {bookie_id} is down", hint="'bkctl bookies list' shows which bookies are up")
        read_only = bookie.state == "ro"
        result = None if read_only else run.job.complete(work())
        return PlainRow(bookie_id=bookie_id, url=None, passed=not read_only, read_only=read_only, result=result)


SETTING_COLUMNS = Columns(
    Column("NAME", "name", itemgetter(0)), Column("VALUE", "value", itemgetter(1), Kind.NESTED, text=str), key="name"
)
HIDDEN: Final = "***"


def _settings(texts: list[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {text!r}: not NAME=VALUE")
        if name in found:
            raise UsageError(f"--set {name!r} is given twice")
        found[name] = value
    return found


SettingsToSet = Annotated[
    dict[str, str],
    combined(
        _settings,
        option("--set NAME=VALUE", "Change this setting in the bookie's memory; repeatable.", list[str]),
    ),
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
    if changed and names:
        raise UsageError("NAME and --set are given", hint="--set prints the settings that it changed")
    with server(run, which, changes=bool(changed) and not run.dry_run) as found:
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
            raise NotFound(
                f"{found.name} shows no setting {missing[0]}", hint="Apache's bookies show only what was set"
            )
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
        flexible=True,
        text=lambda labels: ", ".join(map("=".join, labels.items())),
    ),
    Column("VALUE", "value", _number, Kind.NESTED, text=str),
    Column("TYPE", "type", "type"),
    key=Column(None, "sample", _sample_id),
)


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
    with server(run, which) as found:
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
