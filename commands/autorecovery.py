"""`bkctl autorecovery`: the replication of ledgers whose bookies failed, of every scope."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

from bkctl.columns import TEXTS, Column, Columns, Kind, value_at
from bkctl.errors import AlreadyExists, BkctlError, NotFound, UsageError

from .kit.columns import COUNT_COLUMNS, PlainRow, fields
from .kit.command import Run, command, group, object_of, rows_of
from .kit.ledger_options import LedgersOrFile, ScopeOfAny
from .kit.next_steps import pasted
from .kit.options import WatchOption, duration_option, flag, word
from .kit.texts import GREEN, RED, YELLOW, counted, duration_text, time_text
from .kit.values import parse_duration, refuse_both, tap

if TYPE_CHECKING:
    from bkctl.metadata.underreplication import AuditorCheck

app = group()

_SPAN_OF_NO_CHECK_MS = 21 * 24 * 3600 * 1000

# --- run ------------------------------------------------------------------------------------------------------------

RUNNING_COLUMNS = Columns(
    Column("ID", "bookieId", "bookie_id"),
    *fields(Kind.BOOLEAN, defaultScope="SCOPE 0", otherScopes="OTHER SCOPES"),
    Column("PID", "pid", "pid", Kind.INTEGER),
    key="bookieId",
)


@command(app, "run", connects=True, prints=object_of(RUNNING_COLUMNS))
def run_auto_recovery(
    run: Run,
    scopes_only: Annotated[bool, flag("--scopes-only", "Ignore scope 0, which Apache's auto-recovery serves.")] = False,
    scope_0_only: Annotated[bool, flag("--scope-0-only", "Ignore all scopes but 0.")] = False,
    own_id: Annotated[
        str | None, flag("--id ID", "Name in votes and locks (default: the bookie's id, or this host).")
    ] = None,
) -> None:
    """Run auto-recovery in the foreground.

    Takes part in the election of the auditor, and replicates ledgers. SIGTERM, SIGHUP or Ctrl-C ends it. Intervals,
    delays, rates and the placement policy are those in `--conf bk_server.conf`, else Apache's defaults. With
    `httpServerEnabled=true` it serves `/heartbeat` and `/metrics`. Prints a row once it runs; logs go to stderr.

    $ bkctl autorecovery run --conf bk_server.conf
    """
    import socket

    from bkctl.bookie.cookies import bookie_id_of
    from bkctl.bookie.network import client_tls_context
    from bkctl.config import BookieConfig
    from bkctl.daemon import recovery_server
    from bkctl.metadata.admin.auto_recovery import auto_recovery_of
    from bkctl.metadata.store import TLS_REFRESH_S
    from bkctl.replication.daemon import AutoRecovery, serve

    hint = "give one of them, or none for all scopes"
    refuse_both("--scopes-only", scopes_only, "--scope-0-only", scope_0_only, hint)
    config = BookieConfig() if run.access.conf is None else run.access.config()
    scopes = {False, True} - ({False} if scopes_only else set()) - ({True} if scope_0_only else set())
    # As Apache's has it: the id of the bookie that the configuration is of; without one, this process.
    is_bookie = config.bookie_id is not None or config.conf_path is not None
    bookie_id = own_id or (bookie_id_of(config) if is_bookie else f"{socket.gethostname()}:{os.getpid()}")
    run.job.log()
    auto_recovery_of(run.cluster)
    auto_recovery = AutoRecovery(
        run.cluster, config, bookie_id,
        scopes=scopes, tls=run.access.bookie_tls(TLS_REFRESH_S) or client_tls_context(config),
        addresses=run.access.bookie_addresses(), timeout_s=run.access.timeout_s,
    )  # fmt: skip
    row = PlainRow(bookie_id=bookie_id, default_scope=False in scopes, other_scopes=True in scopes, pid=os.getpid())
    with recovery_server(auto_recovery):
        run.job.complete(serve(auto_recovery, started=lambda: run.out.show(row, RUNNING_COLUMNS)))


# --- status ---------------------------------------------------------------------------------------------------------


STATUS_COLUMNS = Columns(
    Column("ENABLED", "enabled", "enabled", Kind.BOOLEAN, style={"yes": GREEN, "no": YELLOW}),
    *fields(Kind.TEXT, auditorId="AUDITOR", scopedAuditorId="AUDITOR OF SCOPES"),
    Column("LOST BOOKIE DELAY", "lostBookieRecoveryDelay", "delay_s", Kind.INTEGER, text=duration_text),
    Column("UNDERREPLICATED", "underReplicated", "underreplicated", Kind.BOOLEAN, style={"yes": RED, "no": GREEN}),
    Column("NOT AUDITED", "notAudited", "not_audited", optional=True),
    Column("BEING REPLICATED", "lockedLedgerCount", "worker_count", Kind.INTEGER),
    Column("ALL LEDGERS CHECKED", "checkAllLedgersTime", "all_ledgers_ms", Kind.TIME),
    Column("PLACEMENT CHECKED", "placementPolicyCheckTime", "placement_policy_ms", Kind.TIME),
    Column("REPLICAS CHECKED", "replicasCheckTime", "replicas_ms", Kind.TIME),
    key=None,
)


@command(app, "status", connects=True, prints=object_of(STATUS_COLUMNS))
def status(run: Run, watch: WatchOption) -> None:
    """Show the state of auto-recovery.

    Shows the switch, the auditors, the delay, marked and locked ledgers, and the times of the last checks. Without a
    mark UNDERREPLICATED is `no` only while an auditor looks; else NOT AUDITED says since when none does.

    $ bkctl autorecovery status
    """
    from bkctl.metadata.admin.auto_recovery import recovery_status

    problems: list[BkctlError] = []
    run.out.watch(watch, partial(recovery_status, run.cluster, problems), STATUS_COLUMNS, single=True)
    run.out.raise_first(problems[:1])


SWITCH_COLUMNS = Columns(
    Column("ENABLED", "enabled", "enabled", Kind.BOOLEAN, style={"yes": GREEN, "no": YELLOW}),
    Column("CHANGED", "changed", "changed", Kind.BOOLEAN),
    key=None,
)


def _switch(run: Run, enabled: bool) -> None:
    from bkctl.metadata.admin.auto_recovery import auto_recovery_of

    settings, changed = auto_recovery_of(run.recorded).settings, True
    try:
        (settings.enable if enabled else settings.disable)()
    except AlreadyExists:
        changed = False
    run.out.show(PlainRow(enabled=enabled, changed=changed), SWITCH_COLUMNS)
    if not changed:
        run.out.note(f"Auto-recovery was {'enabled' if enabled else 'disabled'} already")


@command(app, "enable", undo=True, prints=object_of(SWITCH_COLUMNS))
def enable(run: Run) -> None:
    """Enable auto-recovery for the whole cluster.

    Does nothing if it is enabled already.

    $ bkctl autorecovery enable
    """
    _switch(run, True)


@command(app, "disable", undo=True, prints=object_of(SWITCH_COLUMNS))
def disable(run: Run) -> None:
    """Disable auto-recovery for the whole cluster.

    No audits and no replication take place until it is enabled again.

    $ bkctl autorecovery disable
    """
    _switch(run, False)


# --- marked ledgers -------------------------------------------------------------------------------------------------


MISSING_COLUMN = Column("MISSING ON", "missingReplicas", "missing_replicas", Kind.NESTED, shape=TEXTS, text=", ".join)
MARK_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    MISSING_COLUMN,
    Column("MARKED", "ctime", "ctime_ms", Kind.TIME),
    Column("AGE", "ageSeconds", "age_s", Kind.INTEGER, text=time_text, ages=True),
    Column("WORKER", "worker", "worker"),
    Column("TOPIC", "topic", "topic", flexible=True, spare=1),
    Column("REASON", "reason", "reason"),
    Column(None, "attempts", value_at("failure.attempts"), Kind.INTEGER),
    Column(None, "failedAt", value_at("failure.at_ms"), Kind.TIME),
    Column("TRIED AGAIN", "retryAt", value_at("failure.retry_at_ms"), Kind.TIME),
    Column("NEXT", "nextCommand", lambda row: pasted(f"bkctl why ledger {row.ledger}")),
    key="ledger",
    none="No ledgers are marked as under-replicated",
)


@command(app, "list", connects=True, prints=rows_of(MARK_COLUMNS) + object_of(COUNT_COLUMNS))
def list_marked(
    run: Run,
    scope: ScopeOfAny,
    watch: WatchOption,
    older_than: Annotated[
        float | None,
        duration_option("--older-than", "List only ledgers that were marked at least this long ago: 1h, 30m."),
    ],
    missing: Annotated[
        list[str] | None, flag("--missing BOOKIE", "List only ledgers that this bookie lacks; repeatable.")
    ] = None,
    not_missing: Annotated[
        list[str] | None, flag("--not-missing BOOKIE", "List only ledgers that this bookie does not lack; repeatable.")
    ] = None,
    count: Annotated[bool, flag("--count", "Print the number of ledgers only.")] = False,
) -> None:
    """List the under-replicated ledgers.

    Shows missing entries by bookie, age, the worker that has them, and why they are not replicated: what workers of
    ours published after their last attempt, else what the metadata says, as for Apache's workers.

    $ bkctl autorecovery list
    """
    from bkctl.client.ledger_survey import why_not_replicated
    from bkctl.metadata.admin.auto_recovery import MarkFilter, list_marks

    problems: list[BkctlError] = []
    chosen = MarkFilter(missing or (), not_missing or (), older_than)
    with run.job.working("Listing under-replicated ledgers", enabled=watch is None):
        look = partial(list_marks, run.cluster, scope, chosen, problems, None if count else why_not_replicated)
        run.out.watch(watch, look, MARK_COLUMNS, count=count)
    run.out.raise_first(problems[:1])


LOCK_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("WORKER", "worker", "worker"),
    Column("SINCE", "ctime", "ctime_ms", Kind.TIME),
    Column("SIZE", "length", "length", Kind.SIZE),
    key="ledger",
    none="No ledgers are being replicated",
)


@command(app, "workers", connects=True, prints=rows_of(LOCK_COLUMNS))
def workers(run: Run, scope: ScopeOfAny, watch: WatchOption) -> None:
    """List the ledgers that are being replicated, by worker.

    Apache's workers give their host name.

    $ bkctl autorecovery workers
    """
    from bkctl.metadata.admin.auto_recovery import list_work

    run.out.watch(watch, partial(list_work, run.cluster, scope), LOCK_COLUMNS)


MARKED_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    MISSING_COLUMN,
    Column("CHANGED", "changed", "changed", Kind.BOOLEAN),
    key="ledger",
)


@command(app, "mark", undo=True, dry_run=True, prints=rows_of(MARKED_COLUMNS))
def mark(
    run: Run,
    ledgers: LedgersOrFile,
    missing: Annotated[
        list[str] | None, flag("--missing BOOKIE", "A bookie of its ensembles that lacks entries; repeatable.")
    ] = None,
) -> None:
    """Mark ledgers as under-replicated.

    The workers of auto-recovery then check and replicate them. Of a bookie that answers, bkctl's workers read every
    entry and compare its digest; Apache's read the first and the last one.

    $ bkctl autorecovery mark 12 --missing 10.0.0.1:3181
    """
    from bkctl.metadata.admin.auto_recovery import auto_recovery_of, check_in_ensembles, mark_ledgers

    if not missing:
        raise UsageError("No bookie that lacks entries is named", hint="add --missing BOOKIE")

    if not auto_recovery_of(run.cluster).settings.is_enabled():
        run.out.note("Auto-recovery is disabled: no worker reads the marks until it is enabled")
    check_in_ensembles(run.cluster, ledgers, missing)
    text = f"was marked for {', '.join(missing)} already"
    marked = mark_ledgers(run.recorded, ledgers, missing, dry_run=run.dry_run)
    marked = tap(marked, lambda row: None if row.changed else run.out.note(f"Ledger {row.ledger} {text}"))
    run.out.render(marked, MARKED_COLUMNS)


@command(app, "unmark", asks=True, undo=True, dry_run=True, prints=rows_of(MARKED_COLUMNS))
def unmark(run: Run, ledgers: LedgersOrFile) -> None:
    """Remove the under-replicated mark from ledgers.

    The workers of auto-recovery then no longer replicate them.

    $ bkctl autorecovery unmark 12 --yes
    """
    from bkctl.metadata.admin.auto_recovery import stored_marks, unmark_ledgers

    marks = stored_marks(run.cluster, ledgers)
    run.out.note(*(f"Ledger {each} is not marked as under-replicated" for each in ledgers if each not in marks))
    if marks and not run.dry_run:
        run.consent.confirm(f"{counted(len(marks), 'ledger')} would not be replicated, until an audit marks them again")
    run.out.render(unmark_ledgers(run.recorded, marks, dry_run=run.dry_run), MARKED_COLUMNS, findings=True)


# --- the auditor ----------------------------------------------------------------------------------------------------


VOTE_COLUMNS = Columns(
    Column("AUDITOR", "bookieId", "bookie_id"),
    Column("ELECTED", "elected", "elected", Kind.BOOLEAN, style={"yes": GREEN}),
    Column("OF SCOPES", "scopes", "scoped", Kind.BOOLEAN),
    key="bookieId",
)


@command(app, "auditor", connects=True, prints=rows_of(VOTE_COLUMNS))
def auditor(run: Run, all_votes: Annotated[bool, flag("--all", "Show candidates for auditor, too.")] = False) -> None:
    """Show which bookie is the auditor.

    Also shows the auditor of the scopes, if there is one. Exit code 4 if there is none.

    $ bkctl autorecovery auditor
    """
    from bkctl.metadata.admin.auto_recovery import list_votes

    problems: list[BkctlError] = []
    votes = list_votes(run.cluster, problems, every=all_votes)
    if not votes and not problems:
        raise NotFound("No auditor is elected", hint="'bkctl autorecovery run' starts auto-recovery")
    run.out.render(votes, VOTE_COLUMNS)
    run.out.raise_first(problems[:1])


#: The auditor's periodic checks as --reset-clock names them → their names in AuditorCheck.
CHECKS: Final = {"all-ledgers": "ALL_LEDGERS", "placement": "PLACEMENT_POLICY", "replicas": "REPLICAS"}
#: The checks that the auditor does not run by default → the settings that have it run them.
_INTERVALS: Final = {
    "placement": "auditorPeriodicPlacementPolicyCheckInterval", "replicas": "auditorReplicasCheckInterval",
}  # fmt: skip
#: The id of the auditor that was asked to audit.
AUDITED_COLUMNS = Columns(Column("AUDITOR", "auditorId", str), key="auditorId")
CLOCK_COLUMNS = Columns(
    Column("CHECK", "check", "check"),
    Column("RAN LAST", "before", "before_ms", Kind.TIME),
    Column("SET BACK TO", "after", "after_ms", Kind.TIME),
    key="check",
)


def _checks(texts: str) -> dict[str, AuditorCheck]:
    from bkctl.metadata.underreplication import AuditorCheck

    try:
        return {name: AuditorCheck[CHECKS[name]] for name in map(str.strip, texts.split(","))}
    except KeyError:
        raise UsageError(f"--reset-clock {texts}: not a list of {', '.join(CHECKS)}") from None


@command(app, "audit", undo=True, dry_run=True, prints=object_of(AUDITED_COLUMNS) + rows_of(CLOCK_COLUMNS))
def audit(
    run: Run,
    reset_clock: Annotated[
        str | None,
        flag(
            "--reset-clock CHECK,…",
            "Make these checks due instead (all-ledgers, placement, replicas); an auditor that starts runs them, "
            "placement and replicas only if their intervals are set in its --conf.",
        ),
    ] = None,
) -> None:
    """Start an audit now, or make the periodic checks due.

    Without options, the auditor looks for lost bookies.

    $ bkctl autorecovery audit
    """
    from bkctl.metadata.admin.auto_recovery import auto_recovery_of, reset_clocks

    checks = {} if reset_clock is None else _checks(reset_clock)
    if not checks:
        run.out.show(auto_recovery_of(run.cluster).trigger_audit(dry_run=run.dry_run), AUDITED_COLUMNS)
        return
    after_ms = time.time_ns() // 1_000_000 - _SPAN_OF_NO_CHECK_MS
    rows = reset_clocks(run.recorded, after_ms, checks, dry_run=run.dry_run)
    run.out.render(rows, CLOCK_COLUMNS)
    run.out.note("The checks run when an auditor starts next; restart the auditor to have them now")
    run.out.note(
        *(f"{each} runs only if the auditor's {_INTERVALS[each]} is above 0" for each in _INTERVALS if each in checks)
    )


#: Seconds that the auditor waits before it takes a bookie for lost; `stored` False: its default.
DELAY_COLUMNS = Columns(
    Column("DELAY", "lostBookieRecoveryDelay", "seconds", Kind.INTEGER, text=duration_text),
    Column("STORED", "stored", "stored", Kind.BOOLEAN),
    key=None,
)


@command(app, "delay", changes="seconds", undo=True, dry_run=True, prints=object_of(DELAY_COLUMNS))
def delay(
    run: Run, seconds: Annotated[str | None, word("[DELAY]", "The new delay: seconds, or 30m, 2h; 0 is none.")] = None
) -> None:
    """Show or set the delay before a bookie counts as lost.

    $ bkctl autorecovery delay
    """
    from bkctl.metadata.admin.auto_recovery import auto_recovery_of

    state = auto_recovery_of(run.cluster)
    if seconds is None:
        stored = state.settings.lost_bookie_recovery_delay_s()
        run.out.show(PlainRow(seconds=stored or 0, stored=stored is not None), DELAY_COLUMNS)
        return
    wanted = parse_duration(seconds, "DELAY")
    if wanted != int(wanted):
        raise UsageError(f"DELAY {seconds}: not whole seconds")
    if not run.dry_run:
        auto_recovery_of(run.recorded).settings.set_lost_bookie_recovery_delay_s(int(wanted))
    run.out.show(PlainRow(seconds=int(wanted), stored=True), DELAY_COLUMNS)
