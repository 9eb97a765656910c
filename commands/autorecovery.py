"""`bkctl autorecovery`: the replication of ledgers whose bookies failed, of every scope."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar

import typer

from bkctl.columns import TEXTS, Column, Columns, Kind, value_at
from bkctl.errors import AlreadyExists, BkctlError, Corrupt, NotFound, UsageError
from bkctl.ids import LedgerId

from .kit.access import Access
from .kit.command import Run, command, group
from .kit.consent import Consent
from .kit.documents import object_of, rows_of
from .kit.job import LongWork
from .kit.ledger_options import LedgersOrFile, ScopeOfAny
from .kit.options import DryRun, UndoOption, WatchOption, duration_option
from .kit.printer import Printer
from .kit.texts import GREEN, RED, YELLOW, counted, duration_text, time_text
from .kit.values import parse_duration

if TYPE_CHECKING:
    from pathlib import Path

    from bkctl.config import BookieConfig
    from bkctl.metadata.cluster import Cluster
    from bkctl.metadata.underreplication import AuditorCheck, AutoRecoveryState, UnderreplicatedLedger
    from bkctl.metadata.underreplication.failures import ReplicationFailure

T = TypeVar("T")

app = group()

_SPAN_OF_NO_CHECK_MS = 21 * 24 * 3600 * 1000


def _state(cluster: Cluster) -> AutoRecoveryState:
    from bkctl.metadata.underreplication import AutoRecoveryState

    cluster.layout()  # Without a cluster all would look well.
    return AutoRecoveryState(cluster.store)


# --- run ------------------------------------------------------------------------------------------------------------


class Running(NamedTuple):
    """An auto-recovery that runs in this process."""

    bookie_id: str
    default_scope: bool
    other_scopes: bool
    pid: int


RUNNING_COLUMNS = Columns(
    Column("ID", "bookieId", "bookie_id"),
    Column("SCOPE 0", "defaultScope", "default_scope", Kind.BOOLEAN),
    Column("OTHER SCOPES", "otherScopes", "other_scopes", Kind.BOOLEAN),
    Column("PID", "pid", "pid", Kind.INTEGER),
    key="bookieId",
)


@command(
    app,
    "run",
    connects=True,
    examples=("bkctl autorecovery run --conf bk_server.conf",),
    prints=object_of(RUNNING_COLUMNS),
)
def run_auto_recovery(
    out: Printer,
    access: Access,
    job: LongWork,
    scopes_only: Annotated[
        bool, typer.Option("--scopes-only", help="Ignore scope 0, which Apache's auto-recovery serves.")
    ] = False,
    scope_0_only: Annotated[bool, typer.Option("--scope-0-only", help="Ignore all scopes but 0.")] = False,
    own_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="Name in votes and locks (default: the bookie's id, or this host)."),
    ] = None,
) -> None:
    """Run auto-recovery in the foreground.

    Takes part in the election of the auditor, and replicates ledgers. SIGTERM, SIGHUP or Ctrl-C ends it. Intervals,
    delays, rates and the rules of racks are those in `--conf bk_server.conf`, else Apache's defaults. Prints a row once
    it runs; logs go to stderr.
    """
    from bkctl.config import BookieConfig
    from bkctl.metadata.store import TLS_REFRESH_S
    from bkctl.replication.daemon import AutoRecovery, serve

    if scopes_only and scope_0_only:
        raise UsageError("--scopes-only and --scope-0-only are given", hint="give one of them, or none for all scopes")
    config = BookieConfig() if access.conf is None else access.config()
    scopes = {False, True} - ({False} if scopes_only else set()) - ({True} if scope_0_only else set())
    bookie_id = own_id or _own_id(config)
    job.log()
    with access.cluster() as cluster:
        _state(cluster)
        auto_recovery = AutoRecovery(
            cluster, config, bookie_id,
            scopes=scopes, tls=access.bookie_tls(TLS_REFRESH_S), addresses=access.bookie_addresses(),
            timeout_s=access.timeout_s,
        )  # fmt: skip
        row = Running(bookie_id, False in scopes, True in scopes, os.getpid())
        job.complete(serve(auto_recovery, started=lambda: out.show(row, RUNNING_COLUMNS)))


def _own_id(config: BookieConfig) -> str:
    """Return the id of the bookie that the configuration is of, as Apache's has it; without one, this process."""
    import socket

    from bkctl.bookie.network import advertised_host

    if config.bookie_id is not None:
        return config.bookie_id
    if config.conf_path is None:
        return f"{socket.gethostname()}:{os.getpid()}"
    return f"{advertised_host(config)}:{config.bookie_port}"


# --- status ---------------------------------------------------------------------------------------------------------


class StatusRow(NamedTuple):
    """Auto-recovery at a glance."""

    enabled: bool
    auditor_id: str | None
    scoped_auditor_id: str | None
    delay_s: int | None
    underreplicated: bool | None
    worker_count: int
    all_ledgers_ms: int | None
    placement_policy_ms: int | None
    replicas_ms: int | None
    #: Since when no auditor looks for ledgers that lack replicas, in words; None while one does.
    not_audited: str | None


STATUS_COLUMNS = Columns(
    Column("ENABLED", "enabled", "enabled", Kind.BOOLEAN, style={"yes": GREEN, "no": YELLOW}),
    Column("AUDITOR", "auditorId", "auditor_id"),
    Column("AUDITOR OF SCOPES", "scopedAuditorId", "scoped_auditor_id"),
    Column("LOST BOOKIE DELAY", "lostBookieRecoveryDelay", "delay_s", Kind.INTEGER, text=duration_text),
    Column(
        "UNDERREPLICATED",
        "underReplicated",
        "underreplicated",
        Kind.BOOLEAN,
        style={"yes": RED, "no": GREEN},
    ),
    Column("NOT AUDITED", "notAudited", "not_audited", optional=True),
    Column("BEING REPLICATED", "lockedLedgerCount", "worker_count", Kind.INTEGER),
    Column("ALL LEDGERS CHECKED", "checkAllLedgersTime", "all_ledgers_ms", Kind.TIME),
    Column("PLACEMENT CHECKED", "placementPolicyCheckTime", "placement_policy_ms", Kind.TIME),
    Column("REPLICAS CHECKED", "replicasCheckTime", "replicas_ms", Kind.TIME),
    key=None,
)


@command(app, "status", connects=True, examples=("bkctl autorecovery status",), prints=object_of(STATUS_COLUMNS))
def status(out: Printer, access: Access, watch: WatchOption) -> None:
    """Show the state of auto-recovery.

    Shows the switch, the auditors, the delay, marked and locked ledgers, and the times of the last checks. Without a
    mark UNDERREPLICATED is `no` only while an auditor looks; else NOT AUDITED says since when none does.
    """
    from bkctl.metadata.store import attempt
    from bkctl.metadata.underreplication import AuditorCheck

    problems: list[BkctlError] = []

    def read(call: Callable[[], T | None]) -> T | None:
        found = attempt(call)
        if isinstance(found, BkctlError):
            problems.append(found)
            return None
        return found

    def look() -> Iterator[StatusRow]:
        problems.clear()
        has_marks, not_audited = state.marks.has_marks(), read(state.why_not_audited)
        yield StatusRow(
            enabled=state.settings.is_enabled(),
            auditor_id=read(state.election.auditor),
            scoped_auditor_id=read(lambda: state.election.auditor(scoped=True)),
            delay_s=read(lambda: state.settings.lost_bookie_recovery_delay_s() or 0),
            underreplicated=True if has_marks else None if not_audited else False,
            worker_count=sum(1 for _ in state.locks.list()),
            all_ledgers_ms=read(lambda: state.settings.check_ctime_ms(AuditorCheck.ALL_LEDGERS)),
            placement_policy_ms=read(lambda: state.settings.check_ctime_ms(AuditorCheck.PLACEMENT_POLICY)),
            replicas_ms=read(lambda: state.settings.check_ctime_ms(AuditorCheck.REPLICAS)),
            not_audited=not_audited,
        )

    with access.cluster() as cluster:
        state = _state(cluster)
        out.watch(watch, look, STATUS_COLUMNS, single=True)
    if problems:
        raise problems[0]


class SwitchState(NamedTuple):
    """The state of a switch, and if the command changed it."""

    enabled: bool
    changed: bool


SWITCH_COLUMNS = Columns(
    Column("ENABLED", "enabled", "enabled", Kind.BOOLEAN, style={"yes": GREEN, "no": YELLOW}),
    Column("CHANGED", "changed", "changed", Kind.BOOLEAN),
    key=None,
)


def _switch(run: Run, enabled: bool, undo: Path | None) -> None:
    with run.access.cluster() as cluster, run.consent.recorded(cluster, undo) as recorded:
        state = _state(recorded)
        try:
            (state.settings.enable if enabled else state.settings.disable)()
            changed = True
        except AlreadyExists:
            changed = False
    run.out.show(SwitchState(enabled, changed), SWITCH_COLUMNS)
    if not changed:
        run.out.note(f"Auto-recovery was {'enabled' if enabled else 'disabled'} already")


@command(
    app,
    "enable",
    connects=True,
    changes=True,
    examples=("bkctl autorecovery enable",),
    prints=object_of(SWITCH_COLUMNS),
)
def enable(run: Run, undo: UndoOption = None) -> None:
    """Enable auto-recovery for the whole cluster.

    Does nothing if it is enabled already.
    """
    _switch(run, True, undo)


@command(
    app,
    "disable",
    connects=True,
    changes=True,
    examples=("bkctl autorecovery disable",),
    prints=object_of(SWITCH_COLUMNS),
)
def disable(run: Run, undo: UndoOption = None) -> None:
    """Disable auto-recovery for the whole cluster.

    No audits and no replication take place until it is enabled again.
    """
    _switch(run, False, undo)


# --- marked ledgers -------------------------------------------------------------------------------------------------


def _age_s(row: Any) -> int | None:
    return None if row.ctime_ms is None else max(0, time.time_ns() // 1_000_000 - row.ctime_ms) // 1000


MISSING_COLUMN = Column(
    "MISSING ON", "missingReplicas", lambda row: list(row.missing_replicas), Kind.NESTED, shape=TEXTS, text=", ".join
)
MARK_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    MISSING_COLUMN,
    Column("MARKED", "ctime", "ctime_ms", Kind.TIME),
    Column("AGE", "ageSeconds", _age_s, Kind.INTEGER, text=time_text),
    Column("WORKER", "worker", "worker"),
    Column("REASON", "reason", "reason"),
    Column(None, "attempts", value_at("failure.attempts"), Kind.INTEGER),
    Column(None, "failedAt", value_at("failure.at_ms"), Kind.TIME),
    Column("TRIED AGAIN", "retryAt", value_at("failure.retry_at_ms"), Kind.TIME),
    Column("NEXT", "nextCommand", lambda row: f"bkctl why ledger {row.ledger}"),
    key="ledger",
    none="No ledgers are marked as under-replicated",
)
COUNT_COLUMNS = Columns(Column("LEDGERS", "count", int, Kind.INTEGER), key=None)


class MarkRow(NamedTuple):
    """A marked ledger, and its present worker."""

    ledger: LedgerId
    missing_replicas: tuple[str, ...]
    ctime_ms: int | None
    worker: str | None
    #: What a worker of ours published, or what the metadata says without one.
    failure: ReplicationFailure | None = None
    derived: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the ledger is not replicated."""
        return self.derived if self.failure is None else self.failure.reason


@command(
    app,
    "list",
    connects=True,
    examples=("bkctl autorecovery list",),
    prints=rows_of(MARK_COLUMNS) + object_of(COUNT_COLUMNS),
)
def list_marked(
    out: Printer,
    access: Access,
    job: LongWork,
    scope: ScopeOfAny,
    watch: WatchOption,
    older_than: Annotated[
        float | None,
        duration_option("--older-than", "List only ledgers that were marked at least this long ago: 1h, 30m."),
    ],
    missing: Annotated[
        list[str] | None,
        typer.Option("--missing", metavar="BOOKIE", help="List only ledgers that this bookie lacks; repeatable."),
    ] = None,
    not_missing: Annotated[
        list[str] | None,
        typer.Option(
            "--not-missing", metavar="BOOKIE", help="List only ledgers that this bookie does not lack; repeatable."
        ),
    ] = None,
    count: Annotated[bool, typer.Option("--count", help="Print the number of ledgers only.")] = False,
) -> None:
    """List the under-replicated ledgers.

    Shows missing entries by bookie, age, the worker that has them, and why they are not replicated: what workers of
    ours published after their last attempt, else what the metadata says, as for Apache's workers.
    """
    from bkctl.client.ledger_survey import why_not_replicated
    from bkctl.metadata.underreplication.failures import ReplicationFailures

    problems: dict[str, BkctlError] = {}

    def look() -> Iterator[MarkRow]:
        problems.clear()
        locks = {} if count else {lock.ledger: lock.owner or "?" for lock in state.locks.list(scope)}
        failures = {} if count else {each.ledger: each for each in ReplicationFailures(cluster.store).list(scope)}
        bookies = [] if count else cluster.bookies.list()
        is_enabled = state.settings.is_enabled()
        for ledger, found in state.marks.list(scope):
            if isinstance(found, BkctlError):
                problems[str(found)] = found
            elif _wanted(found):
                worker, failure = locks.get(ledger), failures.get(ledger)
                derived = None
                if failure is None and worker is None and not count:
                    derived = why_not_replicated(cluster, found, bookies, is_enabled=is_enabled)
                yield MarkRow(ledger, found.missing_replicas, found.ctime_ms, worker, failure, derived)

    def _wanted(mark: UnderreplicatedLedger) -> bool:
        replicas = mark.missing_replicas
        age_s = _age_s(mark)
        return (
            (not missing or any(each in replicas for each in missing))
            and not any(each in replicas for each in not_missing or ())
            and (older_than is None or (age_s is not None and age_s >= older_than))
        )

    with access.cluster() as cluster, job.working("Listing under-replicated ledgers", enabled=watch is None):
        state = _state(cluster)
        if count:
            out.watch(watch, lambda: iter([sum(1 for _ in look())]), COUNT_COLUMNS, single=True)
        else:
            out.watch(watch, look, MARK_COLUMNS)
    if problems:
        raise next(iter(problems.values()))


class Work(NamedTuple):
    """A ledger that is being replicated; `length` in bytes, None if it was deleted or cannot be read."""

    ledger: LedgerId
    worker: str | None
    ctime_ms: int | None
    length: int | None


LOCK_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("WORKER", "worker", "worker"),
    Column("SINCE", "ctime", "ctime_ms", Kind.TIME),
    Column("SIZE", "length", "length", Kind.SIZE),
    key="ledger",
    none="No ledgers are being replicated",
)


@command(app, "workers", connects=True, examples=("bkctl autorecovery workers",), prints=rows_of(LOCK_COLUMNS))
def workers(out: Printer, access: Access, scope: ScopeOfAny, watch: WatchOption) -> None:
    """List the ledgers that are being replicated, by worker.

    Apache's workers give their host name.
    """

    def look() -> Iterator[Work]:
        locks = list(state.locks.list(scope))
        ledgers = cluster.ledgers.read_many(lock.ledger for lock in locks)
        for lock, (_, found) in zip(locks, ledgers, strict=True):
            length = None if isinstance(found, BkctlError) else found.metadata.length
            yield Work(lock.ledger, lock.owner, lock.ctime_ms, length)

    with access.cluster() as cluster:
        state = _state(cluster)
        out.watch(watch, look, LOCK_COLUMNS)


MARKED_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    MISSING_COLUMN,
    Column("CHANGED", "changed", "changed", Kind.BOOLEAN),
    key="ledger",
)


class Marked(NamedTuple):
    """A ledger and its requested mark; `changed` is False if the mark was as requested."""

    ledger: LedgerId
    missing_replicas: tuple[str, ...]
    changed: bool


@command(
    app,
    "mark",
    connects=True,
    changes=True,
    examples=("bkctl autorecovery mark 12 --missing 10.0.0.1:3181",),
    prints=rows_of(MARKED_COLUMNS),
)
def mark(
    out: Printer,
    access: Access,
    consent: Consent,
    ledgers: LedgersOrFile,
    missing: Annotated[
        list[str] | None,
        typer.Option("--missing", metavar="BOOKIE", help="A bookie of its ensembles that lacks entries; repeatable."),
    ] = None,
    undo: UndoOption = None,
    dry_run: DryRun = False,
) -> None:
    """Mark ledgers as under-replicated.

    The workers of auto-recovery then check and replicate them. Of a bookie that answers, bkctl's workers read every
    entry and compare its digest; Apache's read the first and the last one.
    """
    if not missing:
        raise UsageError("No bookie that lacks entries is named", hint="add --missing BOOKIE")
    with access.cluster() as cluster:
        state = _state(cluster)
        if not state.settings.is_enabled():
            out.note("Auto-recovery is disabled: no worker reads the marks until it is enabled")
        # All are looked at before the first is marked.
        for ledger, found in cluster.ledgers.read_many(ledgers):
            if isinstance(found, BkctlError):
                raise found
            for bookie_id in missing:
                if not any(bookie_id in fragment.bookies for fragment in found.metadata.ensembles):
                    raise UsageError(
                        f"Bookie {bookie_id} is in no ensemble of ledger {ledger}",
                        hint=f"'bkctl ledger locate {ledger}' shows its bookies",
                    )
        with out.rows(MARKED_COLUMNS) as writer, consent.recorded(cluster, undo) as recorded:
            state = _state(recorded)
            for ledger in ledgers:
                before = state.marks.get(ledger)
                present = () if before is None else before.missing_replicas
                wanted = tuple(dict.fromkeys((*present, *missing)))
                suspects = () if before is None else before.suspects
                changed = (
                    wanted != present or not {*missing} <= {*suspects}
                    if dry_run
                    else state.marks.add(ledger, missing, suspect=True)
                )
                writer.row(Marked(ledger, wanted, changed))
                if not changed:
                    out.note(f"Ledger {ledger} was marked for {', '.join(missing)} already")


@command(
    app,
    "unmark",
    connects=True,
    changes=True,
    asks=True,
    examples=("bkctl autorecovery unmark 12 --yes",),
    prints=rows_of(MARKED_COLUMNS),
)
def unmark(
    out: Printer,
    access: Access,
    consent: Consent,
    ledgers: LedgersOrFile,
    undo: UndoOption = None,
    dry_run: DryRun = False,
) -> None:
    """Remove the under-replicated mark from ledgers.

    The workers of auto-recovery then no longer replicate them.
    """
    from bkctl.metadata.underreplication import mark_path, parse_mark

    with access.cluster() as cluster:
        marks = {}
        for ledger in ledgers:
            found = cluster.store.get(mark_path(ledger))
            if found is None:
                out.note(f"Ledger {ledger} is not marked as under-replicated")
            else:
                marks[ledger] = found

        def taken_away(ledger: LedgerId) -> Marked:
            try:
                replicas = parse_mark(ledger, marks[ledger]).missing_replicas
            except Corrupt:
                replicas = ()  # A damaged mark is removed, too.
            return Marked(ledger, replicas, True)

        if marks and not dry_run:
            consent.confirm(
                f"{counted(len(marks), 'ledger', 'ledgers')} would not be replicated, until an audit marks them again"
            )
        with out.rows(MARKED_COLUMNS, findings=True) as writer:
            if dry_run:
                writer.rows(map(taken_away, marks))
                return
            with consent.recorded(cluster, undo) as recorded:
                recorded_marks = _state(recorded).marks
                for ledger, found in marks.items():
                    recorded_marks.remove(ledger, found.version)
                    writer.row(taken_away(ledger))


# --- the auditor ----------------------------------------------------------------------------------------------------


class Vote(NamedTuple):
    """A candidate for auditor; the first of each kind is the auditor."""

    bookie_id: str
    scoped: bool
    elected: bool


VOTE_COLUMNS = Columns(
    Column("AUDITOR", "bookieId", "bookie_id"),
    Column("ELECTED", "elected", "elected", Kind.BOOLEAN, style={"yes": GREEN}),
    Column("OF SCOPES", "scopes", "scoped", Kind.BOOLEAN),
    key="bookieId",
)


@command(app, "auditor", connects=True, examples=("bkctl autorecovery auditor",), prints=rows_of(VOTE_COLUMNS))
def auditor(
    out: Printer,
    access: Access,
    all_votes: Annotated[bool, typer.Option("--all", help="Show candidates for auditor, too.")] = False,
) -> None:
    """Show which bookie is the auditor.

    Also shows the auditor of the scopes, if there is one. Exit code 4 if there is none.
    """
    with access.cluster() as cluster:
        state = _state(cluster)
        votes = [
            (vote, scoped, at == 0)
            for scoped in (False, True)
            for at, vote in enumerate(state.election.votes(scoped=scoped))
            if at == 0 or all_votes
        ]
    if not votes:
        raise NotFound("No auditor is elected", hint="'bkctl autorecovery run' starts auto-recovery")
    out.render([Vote(vote, *rest) for vote, *rest in votes if isinstance(vote, str)], VOTE_COLUMNS)
    for vote, *_ in votes:
        if isinstance(vote, BkctlError):
            raise vote


#: The auditor's periodic checks as --reset-clock names them → their names in AuditorCheck.
CHECKS: Final = {"all-ledgers": "ALL_LEDGERS", "placement": "PLACEMENT_POLICY", "replicas": "REPLICAS"}


class ClockRow(NamedTuple):
    """The last run of a check, before and after its clock was reset."""

    check: str
    before_ms: int | None
    after_ms: int


#: The id of the auditor that was asked to audit.
AUDITED_COLUMNS = Columns(Column("AUDITOR", "auditorId", str), key="auditorId")
CLOCK_COLUMNS = Columns(
    Column("CHECK", "check", "check"),
    Column("RAN LAST", "before", "before_ms", Kind.TIME),
    Column("SET BACK TO", "after", "after_ms", Kind.TIME),
    key="check",
)


def _checks(texts: str) -> dict[str, AuditorCheck]:
    """Return the checks that `texts` names, by these names."""
    from bkctl.metadata.underreplication import AuditorCheck

    try:
        return {name: AuditorCheck[CHECKS[name]] for name in map(str.strip, texts.split(","))}
    except KeyError:
        raise UsageError(f"--reset-clock {texts}: not a list of {', '.join(CHECKS)}") from None


@command(
    app,
    "audit",
    connects=True,
    changes=True,
    examples=("bkctl autorecovery audit",),
    prints=object_of(AUDITED_COLUMNS) + rows_of(CLOCK_COLUMNS),
)
def audit(
    out: Printer,
    access: Access,
    consent: Consent,
    reset_clock: Annotated[
        str | None,
        typer.Option(
            "--reset-clock",
            metavar="CHECK,…",
            help="Make these checks due instead (all-ledgers, placement, replicas); an auditor that starts runs them.",
        ),
    ] = None,
    undo: UndoOption = None,
    dry_run: DryRun = False,
) -> None:
    """Start an audit now, or make the periodic checks due.

    Without options, the auditor looks for lost bookies.
    """
    checks = {} if reset_clock is None else _checks(reset_clock)
    with access.cluster() as cluster:
        state = _state(cluster)
        if not checks:
            out.show(state.trigger_audit(dry_run=dry_run), AUDITED_COLUMNS)
            return
        after_ms = time.time_ns() // 1_000_000 - _SPAN_OF_NO_CHECK_MS
        rows = [ClockRow(name, state.settings.check_ctime_ms(check), after_ms) for name, check in checks.items()]
        if not dry_run:
            with consent.recorded(cluster, undo) as recorded:
                for check in checks.values():
                    for scoped in (False, True):
                        _state(recorded).settings.set_check_ctime_ms(check, after_ms, scoped=scoped)
    out.render(rows, CLOCK_COLUMNS)
    out.note("The checks run when an auditor starts next; restart the auditor to have them now")


class Delay(NamedTuple):
    """Seconds that the auditor waits before it takes a bookie for lost; `stored` False: its default."""

    seconds: int
    stored: bool


DELAY_COLUMNS = Columns(
    Column("DELAY", "lostBookieRecoveryDelay", "seconds", Kind.INTEGER, text=duration_text),
    Column("STORED", "stored", "stored", Kind.BOOLEAN),
    key=None,
)


@command(
    app,
    "delay",
    connects=True,
    changes="seconds",
    examples=("bkctl autorecovery delay",),
    prints=object_of(DELAY_COLUMNS),
)
def delay(
    out: Printer,
    access: Access,
    consent: Consent,
    seconds: Annotated[
        str | None, typer.Argument(metavar="[DELAY]", help="The new delay: seconds, or 30m, 2h; 0 is none.")
    ] = None,
    undo: UndoOption = None,
    dry_run: DryRun = False,
) -> None:
    """Show or set the delay before a bookie counts as lost."""
    with access.cluster() as cluster:
        state = _state(cluster)
        if seconds is None:
            stored = state.settings.lost_bookie_recovery_delay_s()
            out.show(Delay(stored or 0, stored is not None), DELAY_COLUMNS)
            return
        wanted = parse_duration(seconds, "DELAY")
        if wanted != int(wanted):
            raise UsageError(f"DELAY {seconds}: not whole seconds")
        if not dry_run:
            with consent.recorded(cluster, undo) as recorded:
                _state(recorded).settings.set_lost_bookie_recovery_delay_s(int(wanted))
        out.show(Delay(int(wanted), True), DELAY_COLUMNS)
