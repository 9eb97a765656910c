"""Health findings of a cluster from its metadata store, each with a code and advice."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import groupby
from typing import Any, Final, NamedTuple

from bkctl.errors import BkctlError
from bkctl.ids import LedgerId
from bkctl.metadata.admin.health_codes import HealthCode
from bkctl.metadata.cluster import Cluster, RegisteredBookie
from bkctl.metadata.pulsar_topics import with_topics
from bkctl.metadata.store import attempt, create_if_missing, delete_if_present
from bkctl.metadata.underreplication import AuditorElection, AutoRecoveryState

#: While this node exists, clients quarantine no bookie. Source: ZKMetadataDriverBase.disableHealthCheck.
DISABLE_HEALTH_CHECK: Final = "disableHealthCheck"
UNDERREPLICATED_AGE_S_MAX: Final = 3600
#: Scopes with under-replicated ledgers that have a finding each, in order; one finding counts all further scopes.
SCOPES_NAMED_MAX: Final = 10
#: Marked ledgers of a scope whose topics are named.
TOPICS_MAX: Final = 5
#: Ages by which under-replicated ledgers are counted, in seconds.
AGES_S: Final = {"10m": 600, "1h": 3600, "1d": 86400}


class Severity(StrEnum):
    """Error: data is at risk or unreachable. Warning: an operator should look at it."""

    ERROR = "error"
    WARNING = "warning"


class HealthFinding(NamedTuple):
    """One problem. `code` is stable, for scripts; `subject` is the bookie or scope."""

    code: HealthCode
    severity: Severity
    subject: str
    message: str
    advice: str
    #: Numbers behind the message, by their JSON names; None without numbers.
    details: Mapping[str, Any] | None = None


#: Advice by code, where it is the same for every subject.
_ADVICE: Final = {
    HealthCode.NO_INSTANCE_ID: "bookies will not start; restore it from a cookie or a backup of the metadata",
    HealthCode.NO_WRITABLE_BOOKIE: "start bookies, or free their disks: nothing can be written",
    HealthCode.BOOKIE_WITHOUT_ADDRESS: "clients cannot reach it: check its advertised address",
    HealthCode.BOOKIE_WITHOUT_COOKIE: "another bookie could take its place with empty disks: 'bkctl cookie verify'",
    HealthCode.COOKIE_DAMAGED: "it cannot start again: rewrite its cookie with 'bkctl cookie update'",
    HealthCode.COOKIE_OF_ANOTHER_CLUSTER: "see 'bkctl cookie verify' before it is started again",
    HealthCode.SCOPES_ORPHANED: "'bkctl metadata orphans' shows them",
    HealthCode.NO_BOOKIE_FOR_SCOPES: "start bookies that do: scoped ledgers cannot be written",
    HealthCode.MARK_DAMAGED: "'bkctl autorecovery unmark' removes it",
    HealthCode.VOTE_DAMAGED: "restart auto-recovery on the bookie that cast it",
}


def _finding(code: HealthCode, subject: str, message: str, severity: Severity = Severity.ERROR) -> HealthFinding:
    return HealthFinding(code, severity, subject, message, _ADVICE[code])


def health_findings(cluster: Cluster) -> Iterator[HealthFinding]:
    """Yield the problems in the metadata store: bookies, cookies, scopes, under-replication, auto-recovery.

    Raises NotFound without a cluster, Unreachable.
    """
    cluster.layout()
    instance_id = cluster.instance_id()
    if not instance_id:
        yield _finding(HealthCode.NO_INSTANCE_ID, "", "The cluster has no instance id")
    bookies = cluster.bookies.list()
    yield from _of_bookies(bookies)
    yield from _of_cookies(cluster, bookies, instance_id)
    yield from _of_scopes(cluster, bookies)
    yield from _of_replication(cluster, [bookie.bookie_id for bookie in bookies if bookie.state == "down"])


def unknown_bookie_findings(counts: Mapping[str, int], bookies: Iterable[RegisteredBookie]) -> Iterator[HealthFinding]:
    """Yield a finding for each bookie that ledgers name, by their counts, and that is not among `bookies`."""
    for bookie_id in sorted(counts.keys() - {bookie.bookie_id for bookie in bookies}):
        count = counts[bookie_id]
        yield HealthFinding(
            HealthCode.BOOKIE_UNKNOWN, Severity.ERROR, bookie_id,
            f"{count:,} ledger{'s name' if count > 1 else ' names'} it, but it has neither a cookie nor a registration",
            f"start it with its cookie ('bkctl metadata undo' of a deletion); 'bkctl bookies decommission {bookie_id}' "
            "if it is gone for good",
        )  # fmt: skip


def read_only_finding(bookie_id: str, used_percent: float | None, percent_max: float) -> HealthFinding:
    """Return the finding of a read-only bookie; `used_percent` of its disks says whether they are the reason.

    None: the bookie was not asked.
    """
    writable_again = f"'bkctl bookie readonly off --bookie {bookie_id}'"
    if used_percent is None:
        message, advice = (
            "It is read-only",
            f"make room if its disks are full ('bkctl bookies usage'), else {writable_again}",
        )
    elif used_percent > percent_max:
        message = f"It is read-only, and {used_percent:g}% of its disks are used"
        advice = "add disks or bookies, or delete ledgers"
    else:
        message = f"It is read-only by request, for example since a drain: {used_percent:g}% of its disks are used"
        advice = f"{writable_again} when the maintenance is over"
    return HealthFinding(HealthCode.BOOKIE_READ_ONLY, Severity.WARNING, bookie_id, message, advice)


def _of_bookies(bookies: list[RegisteredBookie]) -> Iterator[HealthFinding]:
    if not any(bookie.state == "rw" for bookie in bookies):
        yield _finding(HealthCode.NO_WRITABLE_BOOKIE, "", f"None of {len(bookies):,} bookies is writable")
    for bookie in bookies:
        if bookie.state == "down":
            yield HealthFinding(
                HealthCode.BOOKIE_DOWN, Severity.ERROR, bookie.bookie_id, "It has a cookie, but is not registered",
                f"start it; 'bkctl bookies decommission {bookie.bookie_id}' if it is gone for good",
            )  # fmt: skip
        elif bookie.state == "ro":
            yield read_only_finding(bookie.bookie_id, None, 0)
        if bookie.state != "down" and bookie.address is None:
            problem = "Its registration names no bookie-rpc address"
            yield _finding(HealthCode.BOOKIE_WITHOUT_ADDRESS, bookie.bookie_id, problem)


def _of_cookies(cluster: Cluster, bookies: list[RegisteredBookie], instance_id: str) -> Iterator[HealthFinding]:
    with_cookie = set(cluster.cookies.list())
    for bookie in bookies:
        if bookie.bookie_id not in with_cookie:
            problem = "It is registered, but has no cookie"
            yield _finding(HealthCode.BOOKIE_WITHOUT_COOKIE, bookie.bookie_id, problem, Severity.WARNING)
            continue
        found = attempt(cluster.cookies.read, bookie.bookie_id)
        if isinstance(found, BkctlError):
            yield _finding(HealthCode.COOKIE_DAMAGED, bookie.bookie_id, str(found))
        elif found is not None and found.value.instance_id and found.value.instance_id != instance_id:
            problem = f"Its cookie names the instance id {found.value.instance_id}, the cluster is {instance_id}"
            yield _finding(HealthCode.COOKIE_OF_ANOTHER_CLUSTER, bookie.bookie_id, problem)


def _of_scopes(cluster: Cluster, bookies: list[RegisteredBookie]) -> Iterator[HealthFinding]:
    state = cluster.ledgers.scopes_state()
    if state == "foreign":
        problem = "The scoped ledgers belong to a cluster that was formatted"
        yield _finding(HealthCode.SCOPES_ORPHANED, "", problem)
    if state == "ours" and next((scope for scope in cluster.ledgers.scopes() if scope), None) is not None:
        capable = [bookie for bookie in bookies if bookie.state == "rw" and bookie.ledger_scopes]
        if not capable:
            problem = "There are scoped ledgers, and no writable bookie that knows ledger scopes"
            yield _finding(HealthCode.NO_BOOKIE_FOR_SCOPES, "", problem)


class _Marks:
    """The marked ledgers of one scope, or of several, counted by age."""

    def __init__(self) -> None:
        self.count = 0
        self.oldest_s = 0
        self.first: list[LedgerId] = []
        self.older = dict.fromkeys(AGES_S, 0)

    def add(self, age_s: int, ledger: LedgerId) -> None:
        self.count += 1
        self.first += [ledger] * (self.count <= TOPICS_MAX)
        self.oldest_s = max(self.oldest_s, age_s)
        for name, limit_s in AGES_S.items():
            self.older[name] += age_s >= limit_s

    def text(self) -> str:
        several = self.count != 1
        text = f"{self.count:,} {'ledgers are' if several else 'ledger is'} under-replicated"
        text += f", the oldest for {age_text(self.oldest_s)}" if several else f", for {age_text(self.oldest_s)}"
        older = [f"{count:,} for {name} or more" for name, count in self.older.items() if count]
        return f"{text} ({', '.join(older)})" if several and older else text


def age_text(age_s: int) -> str:
    """Return seconds in words: `40 s`, `12 min`, `3 h 20 min`, `2 d 4 h`."""
    minutes, hours, days = age_s // 60, age_s // 3600, age_s // 86400
    if days:
        return f"{days:,} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{age_s} s"


def _of_replication(cluster: Cluster, down: list[str]) -> Iterator[HealthFinding]:
    state = AutoRecoveryState(cluster.store)
    enabled = state.settings.is_enabled()
    now_ms = time.time_ns() // 1_000_000
    named_count = more_count = 0
    more = _Marks()
    has_scoped = False
    # In the order of their scopes, so that one scope is held at a time.
    for scope_id, marks in groupby(state.marks.list(None), key=lambda mark: mark[0].scope_id):
        has_scoped |= scope_id != 0
        named_count += 1
        found = _Marks() if named_count <= SCOPES_NAMED_MAX else more
        more_count += found is more
        for ledger, mark in marks:
            if isinstance(mark, BkctlError):
                yield _finding(HealthCode.MARK_DAMAGED, str(ledger), str(mark), Severity.WARNING)
                found.add(0, ledger)
            else:
                found.add(0 if mark.ctime_ms is None else max(0, now_ms - mark.ctime_ms) // 1000, ledger)
        if found is not more:
            about = {"ledgerScopeId": str(scope_id), **_topics(cluster, found)}
            yield _underreplicated(f"scope {scope_id}", about, found, enabled=enabled)
    if more_count:
        subject = f"{more_count:,} more {'scopes' if more_count > 1 else 'scope'}"
        yield _underreplicated(subject, {"scopeCount": more_count}, more, enabled=enabled)
    if not enabled:
        yield HealthFinding(
            HealthCode.AUTORECOVERY_DISABLED, Severity.ERROR if down else Severity.WARNING, "",
            f"Auto-recovery is disabled{_unrepaired(down)}",
            "'bkctl autorecovery enable' when the maintenance is over",
        )  # fmt: skip
    elif named_count or down or state.election.was_held() or cluster.location.driver != "sqlite":
        # A local cluster is healthy without auto-recovery, until it has had or needs one.
        yield from _of_auditors(cluster, state.election, has_scoped, down)


def _topics(cluster: Cluster, marks: _Marks) -> dict[str, list[str]]:
    """Return the topics of the first marked ledgers, {} where none is Pulsar's."""
    named = with_topics(cluster.ledgers, marks.first, lambda ledger: ledger)
    topics = list(dict.fromkeys(topic for _, topic in named if topic))
    return {"topics": topics} if topics else {}


def _underreplicated(subject: str, scopes: Mapping[str, Any], marks: _Marks, *, enabled: bool) -> HealthFinding:
    late = marks.oldest_s > UNDERREPLICATED_AGE_S_MAX
    topics = f": {', '.join(scopes['topics'])} …" if "topics" in scopes else ""
    return HealthFinding(
        HealthCode.UNDERREPLICATED, Severity.ERROR if late else Severity.WARNING, subject, marks.text() + topics,
        "'bkctl autorecovery list' shows them"
        + ("; they stay so while auto-recovery is disabled" if not enabled else ""),
        {
            **scopes,
            "ledgerCount": marks.count,
            "oldestSeconds": marks.oldest_s,
            "olderThan": marks.older,
        },
    )  # fmt: skip


def _of_auditors(
    cluster: Cluster, election: AuditorElection, has_scoped_marks: bool, down: list[str]
) -> Iterator[HealthFinding]:
    for scoped in (False, True):
        if (
            scoped
            and not has_scoped_marks
            and next((scope for scope in cluster.ledgers.scopes() if scope), None) is None
        ):
            continue
        votes = election.votes(scoped=scoped)
        for vote in votes:
            if isinstance(vote, BkctlError):
                yield _finding(HealthCode.VOTE_DAMAGED, "", str(vote))
        if not votes and scoped:
            yield HealthFinding(
                HealthCode.NO_AUDITOR_OF_SCOPES, Severity.ERROR if down else Severity.WARNING, "",
                "No auditor is elected for scopes other than 0: lost bookies go unnoticed there",
                "'bkctl autorecovery run' on some hosts: Apache's auto-recovery sees scope 0 only",
            )  # fmt: skip
        elif not votes:
            yield HealthFinding(
                HealthCode.NO_AUDITOR, Severity.ERROR if down else Severity.WARNING, "",
                f"No auditor is elected{_unrepaired(down) or ': lost bookies go unnoticed'}",
                "start auto-recovery on some bookie, or run 'bkctl autorecovery run'",
            )  # fmt: skip


def _unrepaired(down: list[str]) -> str:
    """Return what it means that auto-recovery does not run while bookies are down; "" if none is."""
    if not down:
        return ""
    more = f" and {len(down) - 1:,} more" if len(down) > 1 else ""
    return f": nothing replicates the ledgers of {down[0]}{more}"


class HealthCheckSwitch:
    """The switch that lets clients quarantine failing bookies, for the whole cluster.

    Source: ZKMetadataDriverBase, SwitchOfHealthCheckCommand.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._store = cluster.store
        cluster.layout()

    def is_enabled(self) -> bool:
        """Return whether clients may quarantine bookies."""
        return self._store.get(DISABLE_HEALTH_CHECK) is None

    def set(self, enabled: bool) -> bool:
        """Set the switch; return False when it was set so already."""
        if not enabled:
            return create_if_missing(self._store, DISABLE_HEALTH_CHECK, b"")
        return delete_if_present(self._store, DISABLE_HEALTH_CHECK)
