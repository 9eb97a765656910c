"""Write alerts, dashboards, runbooks and the list of metrics from what is declared once: part of `make generate`.

A runbook's meaning and first command are those of the health code; an alert of a code has that code's runbook.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bkctl.bookie.metrics import process_metrics
from bkctl.http.bookie_metrics import METRICS
from bkctl.metadata.admin.health_codes import HealthCode as Code
from bkctl.replication.stats import AuditorStats, WorkerStats, auditor_samples, worker_samples

ROOT = Path(__file__).resolve().parent.parent


class Guide(NamedTuple):
    """Commands of a runbook: `look` to find the reason, `do` to end it; each with what it says or does."""

    look: tuple[tuple[str, str], ...]
    do: tuple[tuple[str, str], ...]


class Alert(NamedTuple):
    """An alert: `code` is the health code with the same meaning, else `what` and `guide` make its own runbook."""

    name: str
    expr: str
    summary: str
    wait: str = ""
    code: Code | None = None
    what: str = ""
    guide: Guide | None = None

    @property
    def page(self) -> str:
        return str(self.code) if self.code else re.sub(r"(?<!^)(?=[A-Z])", "-", self.name).lower()


_START = (("bkctl bookie start --conf bk_server.conf", "starts it on its host, or use its systemd unit or pod"),)
_MARK = (("bkctl autorecovery mark LEDGER --missing BOOKIE", "has workers copy what it lacks from the other replicas"),)
_SPACE = (
    ("bkctl bookies usage", "shows the disks of all bookies"),
    ("bkctl why space BOOKIE", "says what holds the space"),
)
_FREE = (
    ("bkctl bookie gc --bookie BOOKIE", "runs garbage collection now"),
    (
        "bkctl ledger delete LEDGER --yes",
        "deletes a ledger that nobody needs; its space returns with the next collection",
    ),
)
_HEALTH = (("bkctl cluster health detail", "shows each finding with the next command"),)
_STORE = (("bkctl metadata layout -v", "shows the metadata store and how long it takes"),)
_LEDGER = (
    ("bkctl ledger locate LEDGER", "shows the bookies of each fragment"),
    ("bkctl ledger verify LEDGER", "asks every replica"),
)
_RECOVER = (("bkctl bookies recover BOOKIE --yes", "copies what the lost bookie held to others"),)
_AUTO = (("bkctl autorecovery status", "shows auditors, workers and whether auto-recovery is enabled"),)
_RUN = (("bkctl autorecovery run", "runs auto-recovery in the foreground, beside any bookie"),)
_COOKIE = (
    (
        "bkctl cookie verify --conf bk_server.conf",
        "compares the cookies in directories with the one in the metadata store, on the bookie's host",
    ),
)
_CHECK = (
    ("bkctl bookie check --conf bk_server.conf", "names the ledgers whose files are damaged, on the bookie's host"),
)
_INDEX = (
    ("bkctl bookie index regenerate LEDGER --conf bk_server.conf", "rebuilds the index from the entry logs, while the bookie is stopped"),
    ("bkctl bookie index rebuild --ledgers --locations --conf bk_server.conf", "does that for DbLedgerStorage, for all ledgers"),
)  # fmt: skip
_RACKS = (("bkctl bookies racks list", "shows the rack of each bookie"),)

GUIDES: dict[Code, Guide] = {
    Code.NO_INSTANCE_ID: Guide((("bkctl cookie list", "shows the instance id that cookies name"),), (("bkctl metadata import EXPORT", "restores it from an export of this cluster"), ("bkctl cookie list", "without an export: each cookie has the id; write it into the node INSTANCEID of the cluster with the store's own tool (zkCli.sh, etcdctl). A new cluster ('bkctl cluster init') would have another id, which the bookies refuse"))),
    Code.NO_WRITABLE_BOOKIE: Guide(_SPACE, (*_START, ("bkctl bookie readonly off --bookie BOOKIE", "ends a read-only state that somebody asked for"), *_FREE)),
    Code.BOOKIE_DOWN: Guide((("bkctl bookies ok-to-stop BOOKIE", "says what depends on it"), ("bkctl autorecovery list", "shows the ledgers that lack it")), (*_START, ("bkctl bookies decommission BOOKIE --yes", "gives up a bookie that will not return: copies its ledgers, removes its cookie"))),
    Code.BOOKIE_UNKNOWN: Guide((("bkctl bookies list", "shows the bookies that there are"),), _RECOVER),
    Code.BOOKIE_READ_ONLY: Guide(_SPACE, (*_FREE, ("bkctl bookie readonly off --bookie BOOKIE", "makes it writable again, if somebody made it read-only"))),
    Code.BOOKIE_WITHOUT_ADDRESS: Guide((("bkctl bookies show BOOKIE", "shows what it registered"),), (("bkctl bookie config --bookie BOOKIE", "shows advertisedAddress and bookieId; correct them and restart it"),)),
    Code.BOOKIE_WITHOUT_COOKIE: Guide(_COOKIE, (("bkctl cookie create BOOKIE DIR/current/VERSION", "restores it from one of the bookie's directories"), ("bkctl cookie generate --conf bk_server.conf", "writes one, on its host, if no directory has it; 'bkctl cookie create' stores it"),)),
    Code.BOOKIE_UNREGISTERED: Guide((*_STORE, ("bkctl bookie state --bookie BOOKIE", "asks the bookie itself")), (("bkctl cluster health", "once its network and the metadata store work, the bookie registers by itself: no restart is needed"),)),
    Code.BOOKIE_SILENT: Guide((("bkctl bookie state --bookie BOOKIE", "asks its HTTP server"),), _START),
    Code.BOOKIE_HUNG: Guide((("bkctl diagnose bundle bundle.tar.gz", "saves its state before a restart"),), (("bkctl bookie start --conf bk_server.conf", "starts it on its host, once the hung process has ended: until then its port and directories are in use"),)),
    Code.BOOKIE_SLOW: Guide((("bkctl top", "compares latencies, journals and disks of all bookies"), ("bkctl bookie metrics --match JOURNAL --bookie BOOKIE", "shows its journal")), (("bkctl bookie readonly on --bookie BOOKIE", "keeps new ledgers away while its disk is replaced"),)),
    Code.METADATA_SLOW: Guide(_STORE, (("bkctl metadata check", "reads all metadata, and says how much there is"),)),
    Code.CLOCK_SKEW: Guide((("bkctl bookie metrics --match clock --bookie BOOKIE", "shows its clock"),), (("bkctl cluster health", "once time synchronization runs on both hosts, the finding ends"),)),
    Code.VERSIONS_MIXED: Guide((), (("bkctl bookies ok-to-stop BOOKIE", "says whether the next bookie may be stopped for its upgrade"),)),
    Code.COOKIE_DAMAGED: Guide(_COOKIE, (("bkctl cookie update BOOKIE DIR/current/VERSION --yes", "writes it again from one of the bookie's directories"),)),
    Code.COOKIE_OF_ANOTHER_CLUSTER: Guide((*_COOKIE, ("bkctl cluster id", "shows the id of this cluster")), (("bkctl cookie show BOOKIE", "decides: a wrong metadataServiceUri is corrected, a bookie of another cluster is not started here"),)),
    Code.DISK_FULL: Guide(_SPACE, _FREE),
    Code.DISK_FULL_NO_WAY_OUT: Guide((*_SPACE, ("bkctl bookie gc --status --bookie BOOKIE", "says why compaction is suspended")), (*_FREE, ("bkctl bookies drain BOOKIE --yes", "moves its ledgers to bookies with space, without fencing their writers"))),
    Code.LEDGERS_UNAVAILABLE: Guide(_LEDGER, _START),
    Code.LEDGERS_ONE_COPY: Guide((*_LEDGER, *_AUTO), (*_START, ("bkctl autorecovery audit", "has the auditor mark what lacks replicas now"))),
    Code.METADATA_UNREADABLE: Guide((("bkctl metadata get PATH", "reads the node of one, by the path that the check prints: with the login of another user, if it is refused"),), (("bkctl metadata diff EXPORT", "names the ledgers that differ from an export of this cluster: the damaged ones, and all that changed since"), ("bkctl metadata import EXPORT --overwrite --dry-run", "counts what an import would replace"), ("bkctl metadata import EXPORT --overwrite --yes", "replaces all of them: a ledger that was closed or moved since is set back, too. An undo file keeps what it replaces"))),
    Code.LEDGERS_IN_RECOVERY: Guide(_LEDGER, (("bkctl ledger recover LEDGER --yes", "decides the end of the ledger and closes it"),)),
    Code.LEDGERS_DANGLING: Guide((("bkctl metadata check", "shows the bookies that ledgers name"),), _RECOVER),
    Code.LEDGERS_SET_ASIDE: Guide(_CHECK, _MARK),
    Code.LEDGERS_UNREADABLE: Guide((("bkctl ledger verify LEDGER", "says which replicas are sound"), *_CHECK), _MARK),
    Code.CERTIFICATE_EXPIRES: Guide((("bkctl bookie metrics --match certificate --bookie BOOKIE", "shows the seconds left of each: its servers' (bookie, http), and its own one to ZooKeeper (metadata)"),), (("bkctl bookie config --bookie BOOKIE", "shows the files: replace them; with tlsCertFilesRefreshDurationSeconds they are loaded without a restart"),)),
    Code.BOOKIE_WITHOUT_RACK: Guide(_RACKS, (("bkctl bookies racks set BOOKIE --rack RACK", "stores its rack"),)),
    Code.TOO_FEW_RACKS: Guide(_RACKS, (*_START, ("bkctl bookies racks set BOOKIE --rack RACK", "corrects a wrong rack"))),
    Code.RACKS_VIOLATED: Guide((*_RACKS, ("bkctl ledger locate LEDGER", "shows bookies and racks of each fragment")), (("bkctl autorecovery audit --reset-clock placement", "makes the placement check due at the next start of an auditor. The check runs only with auditorPeriodicPlacementPolicyCheckInterval above 0, and workers move replicas only with repairedPlacementPolicyNotAdheringBookieEnabled=true: both are off by default"),)),
    Code.SCOPES_ORPHANED: Guide((("bkctl metadata orphans", "shows them"),), (("bkctl metadata orphans --delete --yes", "removes them, if an export shows nothing of use"),)),
    Code.NO_BOOKIE_FOR_SCOPES: Guide((("bkctl bookies list", "shows which bookies know scopes"),), _START),
    Code.MARK_DAMAGED: Guide((("bkctl autorecovery list", "shows the mark"),), (("bkctl autorecovery unmark LEDGER --yes", "removes it"), ("bkctl autorecovery audit", "marks the ledger again if it lacks replicas"))),
    Code.UNDERREPLICATED: Guide((("bkctl autorecovery list", "shows them, with the reason of the last failure"), ("bkctl autorecovery workers", "shows what is being replicated"), *_AUTO), (*_START, *_RUN)),
    Code.REPLICATION_STUCK: Guide((("bkctl why ledger LEDGER", "names what keeps replication from it"), ("bkctl autorecovery list", "shows the reason of each")), (*_START, *_MARK)),
    Code.AUTORECOVERY_DISABLED: Guide(_AUTO, (("bkctl autorecovery enable", "enables it"),)),
    Code.VOTE_DAMAGED: Guide((("bkctl autorecovery auditor --all", "shows the votes"),), _RUN),
    Code.NO_AUDITOR: Guide(_AUTO, _RUN),
    Code.NO_AUDITOR_OF_SCOPES: Guide(_AUTO, _RUN),
    Code.NOT_AUDITED: Guide(_AUTO, (("bkctl autorecovery audit --reset-clock all-ledgers", "makes the check due at the next start of an auditor"),)),
}  # fmt: skip

ALERTS = (
    Alert("BookieDown", 'up{job="bookkeeper"} == 0', "does not answer", "5m", Code.BOOKIE_SILENT),
    Alert("BookieUnregistered", "bkctl_unregistered_seconds > 10", "has not found its registration for {{ $value }} s", code=Code.BOOKIE_UNREGISTERED),
    Alert("BookieReadOnly", "bookie_SERVER_STATUS == 0", "accepts no entries", "15m", Code.BOOKIE_READ_ONLY),
    Alert("BookieDirectoryFull", "bookie_ledger_writable_dirs < bookie_ledger_num_dirs", "has a full ledger directory", "15m", Code.DISK_FULL),
    Alert("BookieLedgersUnavailable", "bkctl_set_aside_ledgers > 0 or bkctl_refused_ledgers > 0", "cannot serve {{ $value }} ledgers", code=Code.LEDGERS_SET_ASIDE),
    Alert("BookieLedgersUnreadable", "bkctl_unreadable_ledgers > 0", "failed to read entries of {{ $value }} ledgers", code=Code.LEDGERS_UNREADABLE),
    Alert("BookieCertificateExpires", "bookie_certificate_expiry_seconds < 14 * 86400", "has a certificate ({{ $labels.server }}) that expires in {{ $value | humanizeDuration }}", code=Code.CERTIFICATE_EXPIRES),
    Alert("BookieJournalSlow", 'bookie_journal_JOURNAL_SYNC{success="true", quantile="0.99"} > 1000', "waits {{ $value }} ms for syncs of its journal", "10m", Code.BOOKIE_SLOW),
    Alert("BookieClockSkewed", 'abs(bkctl_clock_seconds - timestamp(bkctl_clock_seconds)) > 5', "has a clock that differs by {{ $value }} s", "5m", Code.CLOCK_SKEW),
    Alert("NoAuditor", 'max(auditor_elected{scopes=""}) == 0', "no auditor is elected among the bookies that are scraped", "15m", Code.NO_AUDITOR),
    Alert("ReplicationFails", 'increase(replication_worker_rereplicate_count{success="false"}[10m]) > 0', "failed to replicate ledgers for 30 minutes", "30m", Code.REPLICATION_STUCK),
    Alert("BookieIndexLost", "bkctl_gc_unindexed_ledgers > 0", "has entries of {{ $value }} ledgers that are not in its index", what="Entry logs of a bookie have entries that its index does not know: reads of them fail.", guide=Guide(_CHECK, _INDEX)),
    Alert("BookieKeepsDeletedLedgers", "bkctl_gc_scoped_held_back == 1", "deletes no scoped ledgers", "1h", what="The collector cannot be sure that scoped ledgers are deleted, and keeps them: their space is not freed.", guide=Guide((("bkctl bookie gc --status --bookie BOOKIE", "has the reason"),), (("bkctl metadata scopes", "shows whether the metadata of scopes can be read"),))),
    Alert("BookieUnexpectedErrors", "increase(bkctl_unexpected_errors_total[1h]) > 0", "had faults of bkctl itself", what="A fault of bkctl that neither a disk nor a request explains; the bookie's log has each with a traceback.", guide=Guide((("bkctl diagnose bundle bundle.tar.gz", "saves logs, metrics and state without secrets"),), (("bkctl bookie state --bookie BOOKIE", "says whether it still serves; report the fault with the bundle"),))),
    Alert("BookieDescriptorsShort", 'process_open_fds{job="bookkeeper"} / process_max_fds{job="bookkeeper"} > 0.9', "has few file descriptors left", "5m", what="A bookie without file descriptors opens no files and accepts no connections.", guide=Guide((("bkctl bookie metrics --match fds --bookie BOOKIE", "shows how many are open"),), (("bkctl bookie config --bookie BOOKIE", "shows openFileLimit and serverMaxConnections: raise LimitNOFILE of its unit above their sum"),))),
    Alert("LedgerEntriesLost", "auditor_NUM_LEDGERS_HAVING_NO_REPLICA_OF_AN_ENTRY > 0", "found {{ $value }} ledgers with an entry that no bookie has", what="The check of replicas (auditorReplicasCheckInterval) found entries on none of their bookies.", guide=Guide((("bkctl ledger verify LEDGER", "names the entries"), ("bkctl metadata check", "finds ledgers whose metadata is wrong")), _INDEX)),
)  # fmt: skip


class Panel(NamedTuple):
    """A panel of a dashboard: its queries by legend. `idle`: it may be without data while all is well."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    idle: bool = False


_OF = 'job=~"$job", instance=~"$instance"'


def _rate(name: str, more: str = "") -> str:
    return f"sum by (instance) (rate({name}{{{_OF}{more}}}[$__rate_interval]))"


def _ms(name: str, quantile: str) -> str:
    return f'max by (instance) ({name}{{{_OF}, success="true", quantile="{quantile}"}})'


def _gauge(name: str, more: str = "") -> str:
    return f"sum by (instance) ({name}{{{_OF}{more}}})"


def _gc(name: str) -> str:
    """Return a query of the collector, whose names lack `gc` with DbLedgerStorage."""
    return f'sum by (instance) ({{__name__=~"bookie_(gc_)?{name}", {_OF}}})'


def _gc_rate(name: str) -> str:
    return (
        f"sum by (instance) (rate(bookie_{name}{{{_OF}}}[$__rate_interval])"
        f" or rate(bookie_gc_{name}{{{_OF}}}[$__rate_interval]))"
    )


_SCOPED = ', scopes="other"'
DASHBOARDS: dict[str, tuple[Panel, ...]] = {
    "cluster": (
        Panel("Writable bookies", {"writable": f"count(bookie_SERVER_STATUS{{{_OF}}} == 1)"}),
        Panel("Bookies that do not answer", {"down": 'sum(up{job=~"$job"} == bool 0)'}),
        Panel("Adds a second", {"{{instance}}": _rate("bookkeeper_server_ADD_ENTRY_REQUEST_count")}, "ops"),
        Panel("Reads a second", {"{{instance}}": _rate("bookkeeper_server_READ_ENTRY_REQUEST_count")}, "ops"),
        Panel("Bytes written", {"{{instance}}": _rate("bookie_WRITE_BYTES")}, "Bps"),
        Panel("Bytes read", {"{{instance}}": _rate("bookie_READ_BYTES")}, "Bps"),
        Panel("Add p99", {"{{instance}}": _ms("bookkeeper_server_ADD_ENTRY_REQUEST", "0.99")}, "ms"),
        Panel("Read p99", {"{{instance}}": _ms("bookkeeper_server_READ_ENTRY_REQUEST", "0.99")}, "ms"),
        Panel("Ledgers that cannot be served", {"{{instance}}": f"{_gauge('bkctl_set_aside_ledgers')} + {_gauge('bkctl_refused_ledgers')} + {_gauge('bkctl_unreadable_ledgers')}"}),
        Panel("Disks used", {"{{instance}} {{__name__}}": f'{{__name__=~"bookie_ledger_dir_.*_usage", {_OF}}}'}, "percent"),
    ),
    "bookie": (
        Panel("Failed requests a second", {"adds {{instance}}": _rate("bookkeeper_server_ADD_ENTRY_REQUEST_count", ', success="false"'), "reads {{instance}}": _rate("bookkeeper_server_READ_ENTRY_REQUEST_count", ', success="false"')}, "ops"),
        Panel("In progress", {"adds {{instance}}": _gauge("bookkeeper_server_ADD_ENTRY_IN_PROGRESS"), "reads {{instance}}": _gauge("bookkeeper_server_READ_ENTRY_IN_PROGRESS")}),
        Panel("Blocked", {"adds {{instance}}": _gauge("bookkeeper_server_ADD_ENTRY_BLOCKED"), "reads {{instance}}": _gauge("bookkeeper_server_READ_ENTRY_BLOCKED")}),
        Panel("Journal sync", {"p50 {{instance}}": _ms("bookie_journal_JOURNAL_SYNC", "0.5"), "p99 {{instance}}": _ms("bookie_journal_JOURNAL_SYNC", "0.99")}, "ms"),
        Panel("Journal add", {"p50 {{instance}}": _ms("bookie_journal_JOURNAL_ADD_ENTRY", "0.5"), "p99 {{instance}}": _ms("bookie_journal_JOURNAL_ADD_ENTRY", "0.99")}, "ms"),
        Panel("Journal queue", {"{{instance}}": _gauge("bookie_journal_JOURNAL_QUEUE_SIZE")}),
        Panel("Journal bytes", {"{{instance}}": _rate("bookie_journal_JOURNAL_WRITE_BYTES")}, "Bps"),
        Panel("Write cache", {"{{instance}}": _gauge("bookie_write_cache_size")}, "bytes"),
        Panel("Read cache", {"{{instance}}": _gauge("bookie_read_cache_size")}, "bytes"),
        Panel("Read cache hits and misses", {"hits {{instance}}": _rate("bookie_read_cache_hits"), "misses {{instance}}": _rate("bookie_read_cache_misses")}, "ops"),
        Panel("Checkpoint p99", {"{{instance}}": _ms("bookie_flush", "0.99")}, "ms"),
        Panel("Connections", {"{{instance}}": _gauge("bkctl_server_connections")}),
        Panel("File descriptors", {"{{instance}}": _gauge("process_open_fds")}),
        Panel("Memory", {"{{instance}}": _gauge("process_resident_memory_bytes")}, "bytes"),
        Panel("CPU", {"{{instance}}": _rate("process_cpu_seconds_total")}, "percentunit"),
        Panel("Certificate expires in", {"{{instance}} {{server}}": f"bookie_certificate_expiry_seconds{{{_OF}}}"}, "s", idle=True),
    ),
    "auto-recovery": (
        Panel("Auditors", {"scope 0": f'sum(auditor_elected{{{_OF}, scopes=""}})', "other scopes": f"sum(auditor_elected{{{_OF}{_SCOPED}}})"}),
        Panel("Under-replicated ledgers found", {"found": f'sum(increase(auditor_NUM_UNDER_REPLICATED_LEDGERS_sum{{{_OF}, success="true"}}[$__range]))'}),
        Panel("Ledgers replicated a second", {"{{instance}}": _rate("replication_worker_NUM_FULL_OR_PARTIAL_LEDGERS_REPLICATED")}, "ops"),
        Panel("Failed attempts a second", {"{{instance}}": _rate("replication_worker_rereplicate_count", ', success="false"')}, "ops"),
        Panel("Bytes read and written", {"read {{instance}}": _rate("replication_worker_NUM_BYTES_READ_sum"), "written {{instance}}": _rate("replication_worker_NUM_BYTES_WRITTEN_sum")}, "Bps"),
        Panel("Entries written a second", {"{{instance}}": _rate("replication_worker_NUM_ENTRIES_WRITTEN")}, "ops"),
        Panel("Ledgers in too few racks", {"{{instance}}": _gauge("auditor_NUM_LEDGERS_NOT_ADHERING_TO_PLACEMENT_POLICY")}),
        Panel("Ledgers with lost entries", {"{{instance}}": _gauge("auditor_NUM_LEDGERS_HAVING_NO_REPLICA_OF_AN_ENTRY")}),
    ),
    "garbage": (
        Panel("Entry logs", {"{{instance}}": _gc("ENTRY_LOG_SPACE_BYTES")}, "bytes"),
        Panel("Of ledgers that exist", {"{{instance}}": _gc("ACTIVE_ENTRY_LOG_SPACE_BYTES")}, "bytes"),
        Panel("Freed by deletion", {"{{instance}}": _gc_rate("RECLAIMED_DELETION_SPACE_BYTES")}, "Bps"),
        Panel("Freed by compaction", {"{{instance}}": _gc_rate("RECLAIMED_COMPACTION_SPACE_BYTES")}, "Bps"),
        Panel("Deleted ledgers", {"{{instance}}": _gc("DELETED_LEDGER_TOTAL")}),
        Panel("Compactions", {"major {{instance}}": _gc("MAJOR_COMPACTION_TOTAL"), "minor {{instance}}": _gc("MINOR_COMPACTION_TOTAL")}),
        Panel("Failed to delete", {"{{instance}}": _gc("RECLAIM_FAILED_TO_DELETE")}),
    ),
    "scopes": (
        Panel("Ledgers in memory", {"scope 0 {{instance}}": _gauge("bookie_ledgers_count", ', scopes=""'), "other scopes {{instance}}": _gauge("bookie_ledgers_count", _SCOPED)}),
        Panel("Entries in the index", {"scope 0 {{instance}}": _gauge("bookie_entries_count", ', scopes=""'), "other scopes {{instance}}": _gauge("bookie_entries_count", _SCOPED)}),
        Panel("Scoped ledgers deleted", {"{{instance}}": _gauge("bkctl_gc_deleted_scoped_ledgers_total")}),
        Panel("Scoped deletions held back", {"{{instance}}": _gauge("bkctl_gc_scoped_held_back")}),
        Panel("Auditor of other scopes", {"elected": f"sum(auditor_elected{{{_OF}{_SCOPED}}})"}),
    ),
}  # fmt: skip


def _alerts() -> str:
    lines = [
        "# Alerts on bookies of bkctl's for Prometheus (rule_files); job \"bookkeeper\" scrapes their /metrics.",
        "# Generated by docs/monitoring.py.", "groups:", "  - name: bkctl", "    rules:",
    ]  # fmt: skip
    for alert in ALERTS:
        command = alert.code.next if alert.code else (alert.guide or Guide((), ())).look[0][0]
        command = re.sub(r"\{(\w+)\}", lambda found: {"subject": "BOOKIE"}.get(found[1], found[1].upper()), command)
        subject = "" if alert.name == "NoAuditor" else "{{ $labels.instance }} "
        lines += [f"      - alert: {alert.name}", f"        expr: {alert.expr}"]
        lines += [f"        for: {alert.wait}"] if alert.wait else []
        lines += [
            "        annotations:",
            f"          summary: \"{subject}{alert.summary}: '{command}'\"",
            f'          runbook: "docs/runbooks/{alert.page}.md"',
        ]
    return "\n".join(lines) + "\n"


def _steps(steps: tuple[tuple[str, str], ...]) -> Iterator[str]:
    yield from (f"- `{command}`: {text}." for command, text in steps)


def _runbook(
    title: str, what: str, look: tuple[tuple[str, str], ...], do: tuple[tuple[str, str], ...], name: str
) -> str:
    alerts = [alert for alert in ALERTS if alert.page == name]
    lines = [f"# {title}", "", "## What it means", "", what, ""]
    lines += [
        line
        for alert in alerts
        for line in (
            f"Alert `{alert.name}`{f', after {alert.wait}' if alert.wait else ''}:",
            "",
            f"    {alert.expr}",
            "",
        )
    ]
    lines += ["## What to look at", "", *_steps(look), "", "## What to do", "", *_steps(do), ""]
    return "\n".join([*lines, "Generated by docs/monitoring.py. [All runbooks](index.md).", ""])


def _runbooks() -> Iterator[tuple[str, str]]:
    index = ["# Runbooks", "", "A page for each code of `bkctl cluster health` and each alert of [service/alerts.yml](../service/alerts.yml).", "", "| page | alerts | when |", "| --- | --- | --- |"]  # fmt: skip
    for code in Code:
        first = re.sub(r"\{(\w+)\}", lambda found: {"subject": "BOOKIE"}.get(found[1], found[1].upper()), code.next)
        guide = GUIDES[code]
        look = ((first, code.why.removeprefix("it ")), *(step for step in guide.look if step[0] != first))
        yield str(code), _runbook(f"{code} ({code.severity})", code.what, look, guide.do, str(code))
        index.append(_row(str(code), code.what))
    for alert in ALERTS:
        if alert.guide is not None:
            yield alert.page, _runbook(alert.name, alert.what, alert.guide.look, alert.guide.do, alert.page)
            index.append(_row(alert.page, alert.what))
    yield "index", "\n".join(index) + "\n"


def _row(page: str, what: str) -> str:
    return f"| [{page}]({page}.md) | {', '.join(alert.name for alert in ALERTS if alert.page == page)} | {what} |"


def _dashboard(name: str, panels: tuple[Panel, ...]) -> str:
    source = {"type": "prometheus", "uid": "${datasource}"}

    def variable(label: str, query: str) -> dict[str, Any]:
        return {"name": label, "type": "query", "datasource": source, "query": query, "refresh": 2, "multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}  # fmt: skip

    drawn = [
        {
            "id": number + 1, "type": "timeseries", "title": panel.title, "datasource": source,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
            "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
            "targets": [{"refId": chr(65 + at), "expr": expr, "legendFormat": legend} for at, (legend, expr) in enumerate(panel.queries.items())],
        }
        for number, panel in enumerate(panels)
    ]  # fmt: skip
    variables = [{"name": "datasource", "type": "datasource", "query": "prometheus"}, variable("job", "label_values(bookie_SERVER_STATUS, job)"), variable("instance", 'label_values(bookie_SERVER_STATUS{job=~"$job"}, instance)')]  # fmt: skip
    board = {
        "uid": f"bkctl-{name}", "title": f"BookKeeper: {name}", "tags": ["bookkeeper", "bkctl"], "schemaVersion": 38,
        "time": {"from": "now-1h", "to": "now"}, "refresh": "30s", "templating": {"list": variables}, "panels": drawn,
    }  # fmt: skip
    return json.dumps(board, indent=1) + "\n"


def _metrics() -> str:
    lines = [
        "# Metrics", "",
        "What `/metrics` of a bookie has; `bkctl bookie metrics` prints it. Names and kinds are those of Apache's bookie where",
        "they mean the same; names that begin with `bkctl_` are ours. A summary has quantiles of the last minute or two, `_count`",
        "and `_sum`, each for `success` true and false. Series of other scopes than 0 have the label `scopes=\"other\"`. `{dir}` is",
        "the directory; `{gc}` is `bookie` with DbLedgerStorage, else `bookie_gc`. Generated by docs/monitoring.py.", "",
        "| metric | kind | what |", "| --- | --- | --- |",
    ]  # fmt: skip
    lines += [f"| `{each.name}` | {each.kind} | {each.help} |" for each in METRICS]
    lines += [f"| `{name}` | {kind} | Of the operating system. |" for name, kind, _ in process_metrics(0)]
    lines += ["", "Of auto-recovery, in its own process or in the bookie's (`autoRecoveryDaemonEnabled`; there Apache's names begin with", "`replication_`, which ours and known dashboards do not):", "", "| metric | kind | what |", "| --- | --- | --- |"]  # fmt: skip
    recovery = [
        *auditor_samples(AuditorStats(), scoped=False, attempt_count=0, elected=False),
        *worker_samples(WorkerStats()),
    ]
    lines += dict.fromkeys(f"| `{each.name}` | {each.kind} | {each.help_text} |" for each in recovery)
    return "\n".join(lines) + "\n"


def generated_files() -> dict[str, str]:
    """Return the generated files: path below the repository's root → content."""
    return {
        "docs/service/alerts.yml": _alerts(),
        "docs/metrics.md": _metrics(),
        **{f"docs/runbooks/{name}.md": text for name, text in _runbooks()},
        **{f"dashboards/{name}.json": _dashboard(name, panels) for name, panels in DASHBOARDS.items()},
    }


def main() -> None:
    """Write the files below the directory given (default: the repository)."""
    for name, content in generated_files().items():
        path = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


if __name__ == "__main__":
    main()
