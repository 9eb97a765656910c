"""Health findings of a cluster from its metadata store, each with a code and advice, and mutes of codes."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import groupby, islice
from typing import Any, Final, NamedTuple, TypeVar

from bkctl.columns import some_of
from bkctl.errors import BkctlError, Conflict, MetadataVersionConflict, NotFound
from bkctl.ids import LedgerId
from bkctl.metadata.admin.health_codes import HealthCode
from bkctl.metadata.cluster import Cluster, RegisteredBookie
from bkctl.metadata.pulsar_topics import with_topics
from bkctl.metadata.store import NEW, attempt, create_if_missing, delete_if_present
from bkctl.metadata.underreplication import (
    UNDERREPLICATION,
    AuditorCheck,
    AuditorElection,
    AutoRecoveryState,
    ReplicationFailures,
)

T = TypeVar("T")

#: While this node exists, clients quarantine no bookie. Source: ZKMetadataDriverBase.disableHealthCheck.
DISABLE_HEALTH_CHECK: Final = "disableHealthCheck"
UNDERREPLICATED_AGE_S_MAX: Final = 3600
#: The period of the auditor's check of all ledgers. Source: auditorPeriodicCheckInterval.
AUDIT_PERIOD_S: Final = 604_800
#: The first check of all ledgers has so long, from the creation of the first ledger.
FIRST_AUDIT_MS: Final = 3_600_000
METADATA_SLOW_S: Final = 0.25
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
    """One problem. `code` is stable, for scripts; `subject` is the bookie or scope; `advice` says why `command`."""

    code: HealthCode
    severity: Severity
    subject: str
    message: str
    advice: str
    #: Numbers behind the message, by their JSON names; None without numbers.
    details: Mapping[str, Any] | None = None
    #: The command to run next, filled in.
    command: str = ""
    #: The reason for that command.
    why: str = ""


def health_finding(
    code: HealthCode,
    subject: str,
    message: str,
    severity: str | None = None,
    *,
    advice: str | None = None,
    details: Mapping[str, Any] | None = None,
    ledger: str = "LEDGER",
    command: str | None = None,
) -> HealthFinding:
    """Return a finding with what its code declares in place of what is None; `ledger` is an example of its ledgers."""
    why = code.why if command is None else advice or code.why
    command = command or code.next.format(subject=shlex.quote(subject), ledger=ledger)
    severity = Severity(severity or code.severity)
    return HealthFinding(code, severity, subject, message, advice or advice_of(why, command), details, command, why)


def advice_of(why: str, command: str) -> str:
    """Return the advice that says what `command` does, as tables and the console show it: without the command."""
    return re.sub("^it ", lambda _: f"'{command}' ", why)


def health_findings(cluster: Cluster, audit_period_s: float = AUDIT_PERIOD_S) -> Iterator[HealthFinding]:
    """Yield the problems in the metadata store: bookies, cookies, scopes, under-replication, auto-recovery.

    Raises NotFound without a cluster, Unreachable.
    """
    cluster.layout()
    instance_id = cluster.instance_id()
    if not instance_id:
        yield health_finding(HealthCode.NO_INSTANCE_ID, "", "The cluster has no instance id")
    bookies = cluster.bookies.list()
    yield from _of_bookies(bookies)
    yield from _of_cookies(cluster, bookies, instance_id)
    yield from _of_scopes(cluster, bookies)
    yield from _of_replication(
        cluster, [bookie.bookie_id for bookie in bookies if bookie.state == "down"], audit_period_s
    )
    yield from metadata_finding(cluster)


def unknown_bookie_findings(counts: Mapping[str, int], bookies: Iterable[RegisteredBookie]) -> Iterator[HealthFinding]:
    """Yield a finding for each bookie that ledgers name, by their counts, and that is not among `bookies`."""
    for bookie_id in sorted(counts.keys() - {bookie.bookie_id for bookie in bookies}):
        count = counts[bookie_id]
        yield health_finding(
            HealthCode.BOOKIE_UNKNOWN, bookie_id,
            f"{count:,} ledger{'s name' if count > 1 else ' names'} it, but it has neither a cookie nor a registration",
            advice="start it with its cookie ('bkctl metadata undo' of a deletion); "
            f"'bkctl bookies decommission {bookie_id}' if it is gone for good",
        )  # fmt: skip


def read_only_finding(bookie_id: str, used_percent: float | None, percent_max: float) -> HealthFinding:
    """Return the finding of a read-only bookie; `used_percent` of its disks says whether they are the reason.

    None: the bookie was not asked.
    """
    writable_again = f"bkctl bookie readonly off --bookie {shlex.quote(bookie_id)}"
    if used_percent is None:
        return health_finding(
            HealthCode.BOOKIE_READ_ONLY, bookie_id, "It is read-only",
            advice=f"make room if its disks are full ('bkctl bookies usage'), else '{writable_again}'",
        )  # fmt: skip
    if used_percent > percent_max:
        return health_finding(
            HealthCode.BOOKIE_READ_ONLY, bookie_id, f"It is read-only, and {used_percent:g}% of its disks are used",
            advice="add disks or bookies, or delete ledgers",
            command=HealthCode.DISK_FULL.next.format(subject=shlex.quote(bookie_id)),
        )  # fmt: skip
    return health_finding(
        HealthCode.BOOKIE_READ_ONLY, bookie_id,
        f"It is read-only by request, for example since a drain: {used_percent:g}% of its disks are used",
        advice=f"'{writable_again}' when the maintenance is over", command=writable_again,
    )  # fmt: skip


def _of_bookies(bookies: list[RegisteredBookie]) -> Iterator[HealthFinding]:
    if not any(bookie.state == "rw" for bookie in bookies):
        yield health_finding(HealthCode.NO_WRITABLE_BOOKIE, "", f"None of {len(bookies):,} bookies is writable")
    for bookie in bookies:
        if bookie.state == "down":
            yield health_finding(
                HealthCode.BOOKIE_DOWN, bookie.bookie_id, "It has a cookie, but is not registered",
                advice=f"start it; 'bkctl bookies decommission {bookie.bookie_id}' if it is gone for good",
            )  # fmt: skip
        elif bookie.state == "ro":
            yield read_only_finding(bookie.bookie_id, None, 0)
        if bookie.state != "down" and bookie.address is None:
            problem = "Its registration names no bookie-rpc address"
            yield health_finding(HealthCode.BOOKIE_WITHOUT_ADDRESS, bookie.bookie_id, problem)
    if len(versions := Counter(bookie.version for bookie in bookies if bookie.version is not None)) > 1:
        text = ", ".join(f"{count:,} {version}" for version, count in sorted(versions.items()))
        yield health_finding(
            HealthCode.VERSIONS_MIXED, "", f"Bookies have different versions: {text}", details={"versions": versions}
        )


def _of_cookies(cluster: Cluster, bookies: list[RegisteredBookie], instance_id: str) -> Iterator[HealthFinding]:
    with_cookie = set(cluster.cookies.list())
    for bookie in bookies:
        if bookie.bookie_id not in with_cookie:
            problem = "It is registered, but has no cookie"
            yield health_finding(HealthCode.BOOKIE_WITHOUT_COOKIE, bookie.bookie_id, problem)
            continue
        found = attempt(cluster.cookies.read, bookie.bookie_id)
        if isinstance(found, BkctlError):
            yield health_finding(HealthCode.COOKIE_DAMAGED, bookie.bookie_id, str(found))
        elif found and found.value.instance_id and instance_id not in ("", found.value.instance_id):
            problem = f"Its cookie names the instance id {found.value.instance_id}, the cluster is {instance_id}"
            yield health_finding(HealthCode.COOKIE_OF_ANOTHER_CLUSTER, bookie.bookie_id, problem)


def _of_scopes(cluster: Cluster, bookies: list[RegisteredBookie]) -> Iterator[HealthFinding]:
    state = cluster.ledgers.scopes_state()
    if state == "foreign":
        problem = "The scoped ledgers belong to a cluster that was formatted"
        yield health_finding(HealthCode.SCOPES_ORPHANED, "", problem)
    if state == "ours" and next((scope for scope in cluster.ledgers.scopes() if scope), None) is not None:
        capable = [bookie for bookie in bookies if bookie.state == "rw" and bookie.ledger_scopes]
        if not capable:
            problem = "There are scoped ledgers, and no writable bookie that knows ledger scopes"
            yield health_finding(HealthCode.NO_BOOKIE_FOR_SCOPES, "", problem)


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


def _of_replication(cluster: Cluster, down: list[str], audit_period_s: float) -> Iterator[HealthFinding]:
    state = AutoRecoveryState(cluster.store)
    enabled = state.settings.is_enabled()
    now_ms = _now_ms()
    named_count = more_count = 0
    severity = Severity.ERROR if down else Severity.WARNING
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
                yield health_finding(HealthCode.MARK_DAMAGED, str(ledger), str(mark), ledger=str(ledger))
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
        yield health_finding(
            HealthCode.AUTORECOVERY_DISABLED, "", f"Auto-recovery is disabled{_unrepaired(down)}", severity
        )
    elif named_count or down or state.election.was_held() or cluster.location.driver != "sqlite":
        # A local cluster is healthy without auto-recovery, until it has had or needs one.
        yield from _of_auditors(cluster, state.election, has_scoped, down, severity)
    yield from _of_failures(cluster)
    yield from _of_audits(cluster, state, audit_period_s)


def _topics(cluster: Cluster, marks: _Marks) -> dict[str, list[str]]:
    """Return the topics of the first marked ledgers, {} where none is Pulsar's."""
    named = with_topics(cluster.ledgers, marks.first, lambda ledger: ledger)
    topics = list(dict.fromkeys(topic for _, topic in named if topic))
    return {"topics": topics} if topics else {}


def _underreplicated(subject: str, scopes: Mapping[str, Any], marks: _Marks, *, enabled: bool) -> HealthFinding:
    late = marks.oldest_s > UNDERREPLICATED_AGE_S_MAX
    topics = f": {', '.join(scopes['topics'])} …" if "topics" in scopes else ""
    return health_finding(
        HealthCode.UNDERREPLICATED, subject, marks.text() + topics, Severity.ERROR if late else Severity.WARNING,
        advice="'bkctl autorecovery list' shows them"
        + ("; they stay so while auto-recovery is disabled" if not enabled else ""),
        details={
            **scopes,
            "ledgerCount": marks.count,
            "oldestSeconds": marks.oldest_s,
            "olderThan": marks.older,
        },
    )  # fmt: skip


def _of_auditors(
    cluster: Cluster, election: AuditorElection, has_scoped_marks: bool, down: list[str], severity: str
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
                yield health_finding(HealthCode.VOTE_DAMAGED, "", str(vote))
        if not votes and scoped:
            problem = "No auditor is elected for scopes other than 0: lost bookies go unnoticed there"
            yield health_finding(HealthCode.NO_AUDITOR_OF_SCOPES, "", problem, severity)
        elif not votes:
            problem = f"No auditor is elected{_unrepaired(down) or ': lost bookies go unnoticed'}"
            yield health_finding(HealthCode.NO_AUDITOR, "", problem, severity)


def _of_failures(cluster: Cluster) -> Iterator[HealthFinding]:
    for scope_id, group in groupby(ReplicationFailures(cluster.store).list(), key=lambda each: each.ledger.scope_id):
        failures = list(group)
        reason, count = Counter(failure.reason for failure in failures).most_common(1)[0]
        example = next(failure for failure in failures if failure.reason == reason)
        ledgers = f"{len(failures):,} marked ledger{'s' if len(failures) > 1 else ''}"
        yield health_finding(
            HealthCode.REPLICATION_STUCK, f"scope {scope_id}",
            f"Workers failed to replicate {ledgers}; {count:,} of them: {reason}",
            details={"ledgerScopeId": str(scope_id), "ledgerCount": len(failures), "reason": reason},
            ledger=str(example.ledger),
        )  # fmt: skip


def _of_audits(cluster: Cluster, state: AutoRecoveryState, period_s: float) -> Iterator[HealthFinding]:
    for scoped in (False, True):
        first = next((scope for scope in cluster.ledgers.scopes() if scope or not scoped), None)
        has_auditor = attempt(state.election.auditor, scoped=scoped) is not None
        is_local = cluster.location.driver == "sqlite" and not has_auditor
        last_ms = attempt(state.settings.check_ctime_ms, AuditorCheck.ALL_LEDGERS, scoped=scoped)
        if isinstance(last_ms, BkctlError) or period_s <= 0 or first is None or bool(first) != scoped:
            continue
        now_ms = _now_ms()
        age_s = None if last_ms is None else (now_ms - last_ms) // 1000
        if age_s is None and has_auditor and _is_young(cluster, first, now_ms):
            continue  # The first check may still run.
        what = "the scopes other than 0" if scoped else "scope 0"
        if (age_s is None and not is_local) or (age_s or 0) > 2 * period_s:
            when = "were never audited" if age_s is None else f"were audited last {age_text(age_s)} ago"
            yield health_finding(
                HealthCode.NOT_AUDITED, what, f"The ledgers of {what} {when}: lost entries go unnoticed",
                details={"ageSeconds": age_s, "periodSeconds": period_s},
            )  # fmt: skip


def _is_young(cluster: Cluster, scope_id: int, now_ms: int) -> bool:
    """Return True if the first ledger of a scope was created within the last hour."""
    _, found = next(cluster.ledgers.read_many(islice(cluster.ledgers.ledgers(scope_id), 1)), (None, None))
    ctime_ms = None if found is None or isinstance(found, BkctlError) else found.ctime_ms
    return ctime_ms is not None and now_ms - ctime_ms < FIRST_AUDIT_MS


def metadata_finding(cluster: Cluster) -> Iterator[HealthFinding]:
    """Yield a finding if small reads of the metadata store are slow."""
    took_s = []
    for _ in range(5):
        began_s = time.perf_counter()
        cluster.store.get(cluster.places.layout)
        took_s.append(time.perf_counter() - began_s)
    if (median_s := sorted(took_s)[2]) >= METADATA_SLOW_S:
        yield health_finding(
            HealthCode.METADATA_SLOW, "", f"A small read of the metadata store takes {1000 * median_s:,.0f} ms",
            details={"readMs": round(1000 * median_s, 1)},
        )  # fmt: skip


def _unrepaired(down: list[str]) -> str:
    """Return what it means that auto-recovery does not run while bookies are down; "" if none is."""
    if not down:
        return ""
    return f": nothing replicates the ledgers of {some_of(down, 1)}"


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


MUTES: Final = f"{UNDERREPLICATION}/bkctlHealthMutes"
_MUTE_ATTEMPTS: Final = 10


class Mute(NamedTuple):
    """A muted code. Times are in milliseconds since 1970; `until_ms` None: until it is unmuted."""

    code: str
    since_ms: int
    until_ms: int | None
    user: str


class HealthMutes:
    """The mutes of one cluster. A damaged node mutes nothing. Methods raise Unreachable.

    One node holds them as JSON: code → since, until (milliseconds since 1970, or null) and user. Apache's processes
    read only the nodes that they know below `underreplication`, and remove that tree with the cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._store = cluster.store
        cluster.layout()

    def active(self) -> list[Mute]:
        """Return the mutes in effect, by code."""
        found = self._store.get(MUTES)
        return [] if found is None else self._parse(found.value)

    def mute(self, code: HealthCode, *, duration_s: float | None, user: str) -> Mute:
        """Mute a code for a time, or until it is unmuted; an older mute of the code is replaced."""
        now_ms = _now_ms()
        until_ms = None if duration_s is None else now_ms + round(1000 * duration_s)
        mute = Mute(code.value, now_ms, until_ms, user)
        self._change(lambda mutes: mutes.update({mute.code: mute}))
        return mute

    def unmute(self, code: HealthCode) -> Mute:
        """End the mute of a code, and return it. Raises NotFound for a code that is not muted."""

        def end(mutes: dict[str, Mute]) -> Mute:
            if code.value not in mutes:
                raise NotFound(f"{code.value} is not muted", hint="'bkctl cluster health mutes' lists the mutes")
            return mutes.pop(code.value)

        return self._change(end)

    def _change(self, change: Callable[[dict[str, Mute]], T]) -> T:
        for _ in range(_MUTE_ATTEMPTS):
            found = self._store.get(MUTES)
            mutes = {} if found is None else {mute.code: mute for mute in self._parse(found.value)}
            result = change(mutes)
            shown = {
                code: {"since": since, "until": until, "user": user} for code, since, until, user in mutes.values()
            }
            try:
                self._store.put(MUTES, json.dumps(shown).encode(), NEW if found is None else found.version)
            except (Conflict, NotFound):  # Another command changed the mutes.
                continue
            return result
        raise MetadataVersionConflict(f"{MUTES} in {self._store.name} changes all the time", hint="try again")

    @staticmethod
    def _parse(value: bytes) -> list[Mute]:
        try:
            mutes = [
                Mute(str(code), int(each["since"]), None if each["until"] is None else int(each["until"]), each["user"])
                for code, each in json.loads(value).items()
            ]
        except (ValueError, OverflowError, TypeError, KeyError, AttributeError, RecursionError):
            return []
        now_ms = _now_ms()
        return sorted(mute for mute in mutes if mute.until_ms is None or mute.until_ms > now_ms)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
