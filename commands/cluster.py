"""`bkctl cluster`: the cluster as a whole."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.errors import AlreadyExists, Conflict, NotFound, UsageError
from bkctl.metadata.admin.health_codes import HealthCode

from .kit.audit import user_name
from .kit.columns import Output, PlainRow, fields
from .kit.command import Run, command, group, object_of, rows_of
from .kit.next_steps import pasted
from .kit.options import WatchOption, YesReally, duration_option, flag, option, word
from .kit.texts import GREEN, RED, YELLOW, counted, milliseconds
from .kit.values import percentage
from .local import down, up

if TYPE_CHECKING:
    from bkctl.client.disk_space import BookieSpace
    from bkctl.metadata.admin.health import HealthFinding
    from bkctl.metadata.cluster import Cluster

app = group()
health_app = group("Show what is wrong with the cluster, and mute findings.", default="show")
app.add_typer(health_app, name="health")
healthcheck_app = group("Allow or forbid clients to quarantine failing bookies.")
app.add_typer(healthcheck_app, name="healthcheck")
#: The names that 'local up' and 'local down' had before.
command(app, "up", changes=True, hidden=True)(up)
command(app, "down", changes=True, hidden=True)(down)

INFO_COLUMNS = Columns(
    *fields(Kind.TEXT, metadataUri="METADATA URI", instanceId="INSTANCE ID"),
    Column("LAYOUT", "managerFactoryClass", "factory_class"),
    Column("BOOKIES", "totalBookiesCount", "bookie_count", Kind.INTEGER),
    Column("  WRITABLE", "writableBookiesCount", "writable_count", Kind.INTEGER),
    Column("  READ-ONLY", "readonlyBookiesCount", "read_only_count", Kind.INTEGER),
    Column("  DOWN", "unavailableBookiesCount", "down_count", Kind.INTEGER),
    Column("  WITH SCOPES", "ledgerScopesBookiesCount", "scopes_count", Kind.INTEGER),
    Column("AUDITOR ELECTED", "auditorElected", "auditor_elected", Kind.BOOLEAN),
    Column("AUDITOR", "auditorId", "auditor_id"),
    Column(
        "UNDERREPLICATED", "clusterUnderReplicated", "underreplicated", Kind.BOOLEAN, style={"yes": RED, "no": GREEN}
    ),
    Column("AUTO RECOVERY", "ledgerReplicationEnabled", "replication_enabled", Kind.BOOLEAN, style={"no": YELLOW}),
    key="instanceId",
)


@command(app, "info", connects=True, prints=object_of(INFO_COLUMNS))
def info(run: Run) -> None:
    """Show the cluster: layout, bookies, auditor, replication.

    Without a mark UNDERREPLICATED is `no` only while an auditor looks; 'autorecovery status' says since when none does.

    $ bkctl cluster info
    """
    from bkctl.metadata.admin.overview import cluster_info

    run.out.show(cluster_info(run.cluster), INFO_COLUMNS)


# --- status ---------------------------------------------------------------------------------------------------------

THRESHOLD: Final = option(
    "--threshold PERCENT", "Percentage of used disk space that is too much.", float, 90.0, parse=percentage
)
#: Ledgers whose metadata `cluster status` reads without --count-ledgers.
COUNTED_LEDGERS_MAX: Final = 10_000
#: Ledgers, or marks in larger clusters, whose metadata `cluster health` reads without --ledgers.
SURVEYED_MAX: Final = 10_000
#: The state of a bookie that only ledgers name.
UNKNOWN: Final = "unknown"


class MemberRow(NamedTuple):
    """A bookie of the cluster; `ledger_count` is None where ledgers were not counted."""

    space: BookieSpace
    ledger_count: int | None
    threshold: float

    @property
    def problem(self) -> str | None:
        """The problem with the bookie, None without one."""
        bookie, error = self.space.bookie, self.space.error
        if bookie.state == UNKNOWN:
            return "ledgers name it, but it has neither a cookie nor a registration"
        if bookie.state == "down":
            return "has a cookie, but is not registered"
        if self.space.hangs:
            return f"hangs: {error.message}" if error else "hangs"
        if error is not None:
            return f"does not answer: {error.message}"
        used = self.space.used_percent
        return f"{used:.1f}% of its disks are used" if used is not None and used > self.threshold else None


STATUS_COLUMNS = Columns(
    Column("BOOKIE", "bookieId", "space.bookie.bookie_id"),
    Column("STATE", "state", "space.bookie.state", style={"rw": GREEN, "ro": YELLOW, "down": RED, UNKNOWN: RED}),
    Column("LATENCY", "latencyMs", "space.latency_ms", Kind.INTEGER, text=lambda ms: f"{milliseconds(ms)} ms", spare=1),
    Column("VERSION", "version", "space.bookie.version", spare=4),
    Column("TOTAL", "totalSpace", "space.total", Kind.SIZE, spare=3),
    Column("FREE", "freeSpace", "space.free", Kind.SIZE),
    Column("USED %", "usedPercent", "space.used_percent", Kind.INTEGER, text=lambda percent: f"{percent:.1f}%"),
    Column("LEDGERS", "ledgerCount", "ledger_count", Kind.INTEGER, spare=2),
    Column("PROBLEM", "problem", "problem"),
    key="bookieId",
)


@command(app, "status", connects=True, prints=rows_of(STATUS_COLUMNS))
def status(
    run: Run,
    threshold: Annotated[float, THRESHOLD],
    count_ledgers: Annotated[
        bool | None,
        flag(
            "--count-ledgers/--no-count-ledgers",
            "Count the ledgers on each bookie (default: in clusters of up to 10,000 ledgers).",
        ),
    ] = None,
) -> None:
    """Show every bookie of the cluster, one a row.

    Shows state, latency, version, space and ledgers. Asks every registered bookie. The latency is that of one request
    on an open connection. Apache's bookies do not publish their version. Where ledgers are counted, bookies that only
    ledgers name are rows too: unknown. Exit code 3 if a bookie is unknown or down, does not answer or is too full, or
    if no bookie is writable. 'cluster health' says what to do.

    $ bkctl cluster status
    """
    from bkctl.client.disk_space import BookieSpace, member_space
    from bkctl.metadata.admin.overview import count_ledgers_of_bookies
    from bkctl.metadata.cluster import RegisteredBookie

    run.cluster.layout()
    members, counts = run.cluster.bookies.list(), None
    with run.job.working("Asking the bookies"):
        spaces = run.job.ask(run.access.bookkeeper(run.cluster), partial(member_space, bookies=members))
    if count_ledgers is not False:
        with run.job.working("Counting ledgers"):
            counts = count_ledgers_of_bookies(run.cluster, None if count_ledgers else COUNTED_LEDGERS_MAX)
    unknown = sorted((counts or {}).keys() - {each.bookie_id for each in members})
    spaces += [BookieSpace(RegisteredBookie(each, UNKNOWN, None), None, None, None) for each in unknown]
    rows = [MemberRow(space, None if counts is None else counts[space.bookie.bookie_id], threshold) for space in spaces]
    run.out.render(rows, STATUS_COLUMNS, findings=run.out.draws)
    if counts is None and count_ledgers is None:
        run.out.note(f"More than {COUNTED_LEDGERS_MAX:,} ledgers, which are not counted: add --count-ledgers")
    problem_count = sum(row.problem is not None for row in rows)
    if not any(row.space.bookie.state == "rw" for row in rows):
        problem_count += 1
        run.out.note("No bookie is writable: nothing can be written")
    advice = "'bkctl cluster health' says what to do"
    run.out.finish_with(problem_count, f"problem; {advice}", f"problems; {advice}")


# --- health ---------------------------------------------------------------------------------------------------------

HEALTH_COLUMNS = Columns(
    Column("SEVERITY", "severity", lambda row: row.severity.value, style={"error": RED, "warning": YELLOW}),
    Column("CODE", "code", "code"),
    Column("SUBJECT", "subject", lambda row: row.subject or None),
    *fields(Kind.TEXT, message="WHAT", advice="ADVICE"),
    Column(None, "nextCommand", lambda row: pasted(row.command)),
    Column(None, "details", "details", Kind.NESTED, optional=True),
    key="code",
)
#: Severity → the color of a finding's panel on a terminal.
PANEL_STYLES: Final = {"error": "red", "warning": "yellow"}

Code = Annotated[HealthCode, word("CODE", "The code of the findings.")]


class Look(NamedTuple):
    """The options of a look at the health of a cluster."""

    stuck_after_s: Annotated[
        float,
        duration_option(
            "--stuck-after", "The age from which a ledger IN_RECOVERY is a finding: 10m, 1h.", default="10m"
        ),
    ] = 600.0
    threshold: Annotated[float, THRESHOLD] = 90.0
    no_bookies: Annotated[bool, flag("--no-bookies", "Read the metadata only, and ask no bookie.")] = False
    ledgers: Annotated[
        bool,
        flag(
            "--ledgers",
            "Read the metadata of every ledger, also in clusters of more than 10,000 ledgers, where marked ledgers and "
            "the last audit are the source otherwise.",
        ),
    ] = False


def find_all(run: Run, look: Look) -> list[HealthFinding]:
    """Return all findings, the most severe first."""
    from bkctl.client.disk_space import disk_findings
    from bkctl.client.ledger_survey import LedgerSurvey, published_survey, rack_findings, survey_ledgers
    from bkctl.http.bookie_load import full_bookies, vitals_findings, without_moved
    from bkctl.metadata.admin.health import health_findings, unknown_bookie_findings
    from bkctl.metadata.underreplication import LedgerMarks

    from .bookies.members import find_placement

    if run.bundled is not None:
        return run.bundled.findings()
    cluster = run.cluster
    of_bookies: list[HealthFinding] = []
    if not look.no_bookies:
        members = cluster.bookies.list(include_down=False)
        vitals = without_moved(cluster, run.access.vitals(members))
        asked = partial(disk_findings, bookies=members, percent_max=look.threshold, full=full_bookies(vitals))
        of_bookies += run.job.ask(run.access.bookkeeper(cluster), asked)
        full = {each.subject for each in of_bookies if each.command.startswith("bkctl why space")}
        of_bookies += vitals_findings(vitals, full)
    known = {(each.code, each.subject) for each in of_bookies}
    # A slow bookie is read-only because it is slow: it is not to be made writable.
    slow = {(HealthCode.BOOKIE_READ_ONLY, each.subject) for each in of_bookies if each.code is HealthCode.BOOKIE_SLOW}
    of_bookies = [each for each in of_bookies if (each.code, each.subject) not in slow]
    period = () if run.access.conf is None else (run.access.config().auditor_periodic_check_interval,)
    found = [each for each in health_findings(cluster, *period) if (each.code, each.subject) not in known]
    bookies = cluster.bookies.list()
    placement = find_placement(run, bookies)
    found += rack_findings(bookies, placement)
    survey = LedgerSurvey(bookies, placement=placement, stuck_after_s=look.stuck_after_s)
    ledgers = cluster.ledgers.ledgers(None)
    first = [] if look.ledgers else list(islice(ledgers, SURVEYED_MAX + 1))
    is_whole = len(first) <= SURVEYED_MAX
    with run.job.working("Reading metadata", enabled=look.ledgers, unit="ledgers") as activity:
        marked = (ledger for ledger, _ in islice(LedgerMarks(cluster.store).list(None), SURVEYED_MAX))
        survey_ledgers(cluster, survey, chain(first, ledgers) if is_whole else marked, activity.advance)
    found += survey.findings()
    if is_whole:
        found += unknown_bookie_findings(survey.of_unknown, bookies)
    else:  # What the marks say is newer than what the last audit found.
        seen = survey.tallies.keys()
        for scoped in (False, True):
            if (audit := published_survey(cluster.store, scoped=scoped)) is not None:
                # Look at the ledgers that it names again: a fault that is gone from these is gone.
                now = LedgerSurvey(bookies, placement=placement, stuck_after_s=look.stuck_after_s)
                survey_ledgers(
                    cluster, now, sorted({each for tally in audit.tallies.values() for each in tally.examples})
                )
                still = now.tallies.keys() - seen
                audit.tallies = {key: tally for key, tally in audit.tallies.items() if key in still}
                found += audit.findings(audited=True)
    return sorted(found + of_bookies, key=lambda each: (each.severity, each.code, each.subject))


@command(health_app, "show", connects=True, prints=rows_of(HEALTH_COLUMNS))
def health(run: Run, watch: WatchOption, look: Look) -> None:
    """Show what is wrong with the cluster, and what to do.

    Covers bookies, cookies, disks, clocks, the metadata store, ledgers without replicas or in recovery, replication,
    audits, scopes and racks; docs/health.md lists the codes. The metadata of up to 10,000 ledgers is read, with
    --ledgers of all; else of marked ledgers, beside what the last audit of ours found. Muted findings are left out.
    Prints OK without findings; exit code 3 if there are some. `show` itself may be left out: 'bkctl cluster health'.

    $ bkctl cluster health show
    $ bkctl cluster health show --watch
    """
    if watch is not None:
        run.out.watch(watch, lambda: _open(_find(run, look)), HEALTH_COLUMNS, key=attrgetter("code", "subject"))
        return
    with run.job.working("Asking the bookies"):
        rows = _find(run, look)
    findings, muted = _open(rows), [row.mute.code for row in rows if row.mute is not None]
    if findings and run.out.draws:
        run.out.text("".join(_panel(each, color=run.out.color) for each in findings))
    elif findings or run.out.output is not Output.TABLE:
        run.out.render(findings, HEALTH_COLUMNS)
    if muted:
        codes = ", ".join(dict.fromkeys(muted))
        run.out.note(
            f"{counted(len(muted), 'finding is', 'findings are')} muted ({codes}): 'bkctl cluster health detail' shows "
            "everything"
        )
    elif not findings:
        _say_ok(run)
    run.out.finish_with(len(findings))


def _panel(finding: HealthFinding, *, color: bool) -> str:
    from .kit.drawing import panel_text

    severity = finding.severity.value
    title = " ".join(filter(None, (severity, finding.code.value, finding.subject)))
    return panel_text(title, (finding.message, finding.advice), style=PANEL_STYLES[severity], color=color)


def _find(run: Run, look: Look) -> list[PlainRow]:
    """Return the findings, each with the mute of its code, None without one."""
    from bkctl.metadata.admin.health import HealthMutes

    mutes = {mute.code: mute for mute in HealthMutes(run.cluster).active()}
    return [PlainRow(finding=each, mute=mutes.get(each.code)) for each in find_all(run, look)]


def _open(rows: list[PlainRow]) -> list[HealthFinding]:
    """Return the findings that are not muted."""
    return [row.finding for row in rows if row.mute is None]


def _say_ok(run: Run) -> None:
    """Say on stdout, in a table's place, that a cluster has no findings, and whether an auditor watches it."""
    from bkctl.metadata.underreplication import AuditorElection

    is_watched = AuditorElection(run.cluster.store).auditor() is not None
    if run.out.output is Output.TABLE:
        run.out.text("OK\n")
    if not is_watched:
        run.out.note("Auto-recovery does not run: lost bookies would go unnoticed. 'bkctl autorecovery run' starts it")


DETAIL_COLUMNS = Columns(
    Column("FINDING", "code", "finding.code"),
    Column("SEVERITY", "severity", lambda row: row.finding.severity.value, style={"error": RED, "warning": YELLOW}),
    Column("SUBJECT", "subject", lambda row: row.finding.subject or None, optional=True),
    Column("WHAT", "message", "finding.message"),
    Column("NEXT", "nextCommand", lambda row: pasted(row.finding.command)),
    Column("WHY", "why", "finding.why"),
    Column(
        "ADVICE",
        "advice",
        lambda row: None if row.finding.advice.endswith(row.finding.why.removeprefix("it ")) else row.finding.advice,
        optional=True,
    ),
    Column("DETAILS", "details", "finding.details", Kind.NESTED, optional=True),
    Column("MUTED BY", "mutedBy", value_at("mute.user"), optional=True),
    Column("MUTED UNTIL", "mutedUntil", value_at("mute.until_ms"), Kind.TIME, optional=True),
    key="code",
)


@command(health_app, "detail", connects=True, prints=rows_of(DETAIL_COLUMNS))
def health_detail(run: Run, look: Look) -> None:
    """Show each finding with its next command, muted ones too.

    NEXT is the command to run next, filled in, and WHY says why that one. Exit code 3 if a finding is not muted.

    $ bkctl cluster health detail
    """
    with run.job.working("Asking the bookies"):
        rows = _find(run, look)
    if run.out.output is Output.TABLE and run.out.selection.order is None:
        for index, row in enumerate(rows):
            run.out.text("\n" if index else "")
            run.out.show(row, DETAIL_COLUMNS)
    else:
        run.out.render(rows, DETAIL_COLUMNS)
    if not rows:
        _say_ok(run)
    run.out.finish_with(len(_open(rows)))


MUTE_COLUMNS = Columns(
    Column("CODE", "code", "code"),
    Column("SINCE", "since", "since_ms", Kind.TIME),
    Column("UNTIL", "until", "until_ms", Kind.TIME),
    Column("BY", "user", "user"),
    key="code",
    none="No findings are muted",
)


@command(health_app, "mute", undo=True, prints=object_of(MUTE_COLUMNS))
def mute_health(
    run: Run,
    code: Code,
    duration_s: Annotated[
        float | None, duration_option("--for", "How long: 30m, 2h, 1d (default: until it is unmuted).")
    ],
) -> None:
    """Leave findings of a code out of 'cluster health'.

    Counts for every user of the cluster, and is kept in the metadata store. 'cluster health' says how many findings are
    muted.

    $ bkctl cluster health mute bookie-down --for 2h
    """
    from bkctl.metadata.admin.health import HealthMutes

    if duration_s == 0:
        raise UsageError("--for 0: must be more than 0")
    run.out.show(HealthMutes(run.recorded).mute(code, duration_s=duration_s, user=user_name()), MUTE_COLUMNS)


@command(health_app, "unmute", undo=True, prints=object_of(MUTE_COLUMNS))
def unmute_health(run: Run, code: Code) -> None:
    """Show findings of a muted code again.

    $ bkctl cluster health unmute bookie-down
    """
    from bkctl.metadata.admin.health import HealthMutes

    run.out.show(HealthMutes(run.recorded).unmute(code), MUTE_COLUMNS)


@command(health_app, "mutes", connects=True, prints=rows_of(MUTE_COLUMNS))
def list_mutes(run: Run) -> None:
    """List the muted codes, with time and user.

    $ bkctl cluster health mutes
    """
    from bkctl.metadata.admin.health import HealthMutes

    run.out.render(HealthMutes(run.cluster).active(), MUTE_COLUMNS)


CHECK_COLUMNS = Columns(
    Column("ENABLED", "enabled", "enabled", Kind.BOOLEAN, style={"yes": GREEN, "no": YELLOW}),
    Column("CHANGED", "changed", "changed", Kind.BOOLEAN, optional=True),
    key=None,
)


@command(healthcheck_app, "status", connects=True, prints=object_of(CHECK_COLUMNS))
def healthcheck_status(run: Run) -> None:
    """Show whether clients may quarantine failing bookies.

    $ bkctl cluster healthcheck status
    """
    from bkctl.metadata.admin.health import HealthCheckSwitch

    run.out.show(PlainRow(enabled=HealthCheckSwitch(run.cluster).is_enabled(), changed=None), CHECK_COLUMNS)


@command(healthcheck_app, "enable", undo=True, prints=object_of(CHECK_COLUMNS))
def healthcheck_enable(run: Run) -> None:
    """Allow clients to quarantine failing bookies.

    $ bkctl cluster healthcheck enable
    """
    _switch_healthcheck(run, True)


@command(healthcheck_app, "disable", undo=True, prints=object_of(CHECK_COLUMNS))
def healthcheck_disable(run: Run) -> None:
    """Forbid every client to quarantine bookies.

    $ bkctl cluster healthcheck disable
    """
    _switch_healthcheck(run, False)


def _switch_healthcheck(run: Run, enabled: bool) -> None:
    from bkctl.metadata.admin.health import HealthCheckSwitch

    changed = HealthCheckSwitch(run.recorded).set(enabled)
    run.out.show(PlainRow(enabled=enabled, changed=changed), CHECK_COLUMNS)
    if not changed:
        run.out.note(f"The health check was {'enabled' if enabled else 'disabled'} already")


# --- the whole cluster ----------------------------------------------------------------------------------------------


ID_COLUMNS = Columns(
    *fields(Kind.TEXT, metadataUri="METADATA URI", instanceId="INSTANCE ID"),
    Column("LAYOUT", "managerFactoryClass", "factory_class"),
    key="instanceId",
)


@command(app, "id", connects=True, prints=object_of(ID_COLUMNS))
def show_id(run: Run) -> None:
    """Show the cluster's instance id.

    $ bkctl cluster id
    """
    identity = _identity(run.cluster)  # raises NotFound without a cluster
    if not identity.instance_id:
        raise NotFound(
            f"The cluster in {run.cluster.uri} has no instance id",
            hint="a bookie's cookie may name it: 'bkctl cookie show BOOKIE'",
        )
    run.out.show(identity, ID_COLUMNS)


@command(app, "init", connects=True, dry_run=True, prints=object_of(ID_COLUMNS))
def init(
    run: Run,
    long_long_layout: Annotated[
        bool,
        flag("--long-long-layout", "Write BP-35's own class into LAYOUT; Apache's processes then refuse the cluster."),
    ] = False,
) -> None:
    """Create a new cluster in the metadata store.

    Creates the layout, the instance id, and the places of bookies and cookies. If there is a cluster, nothing is
    changed, and the exit code is 5.

    $ bkctl cluster init --metadata-uri sqlite:///metadata.db
    """
    from bkctl.metadata.cluster import init_cluster, new_layout
    from bkctl.metadata.uri import parse_uri

    location = parse_uri(run.access.connection().uri)
    layout = new_layout(location, long_long=long_long_layout)
    if not run.dry_run:
        with run.access.cluster(create_store=True) as cluster:
            if not init_cluster(cluster, layout=layout):
                raise _already_there(cluster)
            run.out.show(_identity(cluster), ID_COLUMNS)
        return
    with suppress(NotFound):  # NotFound: the file is created later.
        if run.cluster.store.get(run.cluster.places.layout) is not None:
            raise _already_there(run.cluster)
    run.out.show(PlainRow(metadata_uri=location.text, instance_id=None, factory_class=layout.factory_class), ID_COLUMNS)


def _identity(cluster: Cluster) -> PlainRow:
    """Return the row of a cluster's identity. Raises the errors of a store without a cluster."""
    factory_class = cluster.layout().factory_class
    return PlainRow(metadata_uri=cluster.uri, instance_id=cluster.instance_id(), factory_class=factory_class)


def _already_there(cluster: Cluster) -> AlreadyExists:
    what = cluster.instance_id() or "it has no instance id"
    return AlreadyExists(f"There is a cluster in {cluster.uri}: {what}", hint="'bkctl cluster info' shows it")


NUKE_COLUMNS = Columns(
    Column("INSTANCE ID", "instanceId", "instance_id"),
    *fields(Kind.INTEGER, ledgerCount="LEDGERS", scopeCount="SCOPES", cookieCount="COOKIES"),
    key="instanceId",
)


@command(app, "nuke", connects=True, asks=True, dry_run=True, prints=object_of(NUKE_COLUMNS))
def nuke_cluster(
    run: Run,
    yes_really: YesReally = None,
    instance_id: Annotated[
        str | None, flag("--instance-id ID", "As --yes-really, which asks all the same.", hidden=True)
    ] = None,
    backup: Annotated[Path | None, flag("--backup FILE", "Export all metadata to this new file first.")] = None,
) -> None:
    """Remove all metadata of a cluster, for good.

    Refused while bookies are registered. On a terminal, asks for the cluster's instance id; elsewhere --yes-really with
    that id is required. The bookies' own files stay, but no bookie starts on them again. With
    --backup, 'metadata import' restores the metadata.

    $ bkctl cluster nuke --dry-run
    $ bkctl cluster nuke --backup metadata.ndjson
    """
    from bkctl.metadata.admin.dump.sources import ClusterSource, export_to_file
    from bkctl.metadata.admin.nuke import nuke, plan_nuke

    with run.job.working("Counting ledgers"):
        plan = plan_nuke(run.cluster)
    named = yes_really if instance_id is None else instance_id
    if named not in (None, plan.instance_id):
        raise Conflict(
            f"The cluster in {run.cluster.uri} has another instance id: {plan.instance_id}",
            hint="check the metadata URI",
        )
    if plan.foreign_scopes:
        run.out.note(
            "Scoped ledgers that are not counted would be lost, too, and no backup holds them: 'bkctl metadata check' "
            "says why"
        )
    if run.dry_run:
        run.out.show(plan, NUKE_COLUMNS)
        return
    kept = f"; {backup} will hold a copy" if backup is not None else ", without a backup"
    loss = (
        f"All metadata of the cluster {plan.instance_id} in {run.cluster.uri} would be lost: "
        f"{counted(plan.ledger_count, 'ledger')}, "
        f"{counted(plan.cookie_count, 'cookie')}{kept}"
    )
    if instance_id is not None:
        run.consent.confirm(loss)
    else:
        run.consent.confirm_name(loss, plan.instance_id, yes_really)
    if backup is not None:
        with run.job.working(f"Exporting to {backup}") as activity:
            export_to_file(ClusterSource(run.cluster), backup, progress=activity.update)
    with run.job.working("Removing nodes", left="run the command again to remove the rest") as activity:
        count = nuke(run.cluster, progress=activity.update)
    run.out.show(plan, NUKE_COLUMNS)
    run.out.note(f"Removed {counted(count, 'node')}")
