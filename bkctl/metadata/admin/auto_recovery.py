"""Auto-recovery at a glance: its state, marked and locked ledgers, votes; marks set and removed by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import UTC, datetime
from itertools import tee
from typing import NamedTuple, TypeVar

from bkctl.errors import BkctlError, Corrupt, UsageError
from bkctl.ids import U64_MAX, LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.pulsar_topics import owner_text
from bkctl.metadata.store import Versioned, attempt
from bkctl.metadata.underreplication import (
    AuditorCheck,
    AutoRecoveryState,
    MarkChange,
    ReplicationFailure,
    ReplicationFailures,
    UnderreplicatedLedger,
    mark_path,
    parse_mark,
)

T = TypeVar("T")


def auto_recovery_of(cluster: Cluster) -> AutoRecoveryState:
    """Return the state of auto-recovery. Raises NotFound without a cluster, where all would look well."""
    cluster.layout()
    return AutoRecoveryState(cluster.store)


def why_not_audited(cluster: Cluster) -> str | None:
    """Return in words that no auditor looks for lost replicas, and since when; None while one does.

    Scope 0 needs an auditor, and the other scopes if they have ledgers. Without one the lack of marks proves nothing.
    Raises Corrupt if an auditor's vote is damaged.
    """
    state = AutoRecoveryState(cluster.store)
    has_scopes = next(cluster.ledgers.ledgers(None, LedgerId(0, U64_MAX)), None) is not None
    for scoped in (False, True) if has_scopes else (False,):
        if not (state.settings.is_enabled() and state.election.auditor(scoped=scoped)):
            where = " in ledger scopes" if scoped else ""
            times = (state.settings.check_ctime_ms(check, scoped=scoped) for check in AuditorCheck)
            if (last_ms := max(filter(None, times), default=None)) is None:
                return f"never audited{where}"
            return f"not audited{where} since {datetime.fromtimestamp(last_ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
    return None


class RecoveryStatus(NamedTuple):
    """The state of auto-recovery. `not_audited` says since when no auditor looks for lost replicas; None: one does."""

    enabled: bool
    auditor_id: str | None
    scoped_auditor_id: str | None
    delay_s: int | None
    underreplicated: bool | None
    worker_count: int
    all_ledgers_ms: int | None
    placement_policy_ms: int | None
    replicas_ms: int | None
    not_audited: str | None


def recovery_status(cluster: Cluster, problems: list[BkctlError]) -> Iterator[RecoveryStatus]:
    """Yield the present state; `problems` has then the errors of what could not be read, which is None."""
    problems.clear()
    state = auto_recovery_of(cluster)

    def read(call: Callable[[], T | None]) -> T | None:
        found = attempt(call)
        if isinstance(found, BkctlError):
            problems.append(found)
            return None
        return found

    has_marks, not_audited = state.marks.has_marks(), read(lambda: why_not_audited(cluster))
    yield RecoveryStatus(
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


class MarkRow(NamedTuple):
    """A marked ledger, its present worker, and the topic that Pulsar has it for.

    `failure` is what a worker of ours published, `derived` what the metadata says without one.
    """

    ledger: LedgerId
    missing_replicas: tuple[str, ...]
    ctime_ms: int | None
    worker: str | None
    topic: str | None = None
    failure: ReplicationFailure | None = None
    derived: str | None = None

    @property
    def reason(self) -> str | None:
        """The reason for which the ledger is not replicated."""
        return self.derived if self.failure is None else self.failure.reason

    @property
    def age_s(self) -> int | None:
        """The seconds since the mark; None if its time is unknown."""
        return age_s(self.ctime_ms)


def age_s(ctime_ms: int | None) -> int | None:
    """Return the seconds since a moment, at least 0."""
    return None if ctime_ms is None else max(0, time.time_ns() // 1_000_000 - ctime_ms) // 1000


class MarkFilter(NamedTuple):
    """Conditions on marks: one of the bookies `missing` lacks entries, none of `not_missing` does; the least age."""

    missing: Collection[str] = ()
    not_missing: Collection[str] = ()
    age_s_min: float | None = None

    def matches(self, mark: UnderreplicatedLedger) -> bool:
        """Return whether the mark meets the conditions. A mark of unknown age meets none on the age."""
        replicas, age = {*mark.missing_replicas}, age_s(mark.ctime_ms)
        return (
            (not self.missing or not replicas.isdisjoint(self.missing))
            and replicas.isdisjoint(self.not_missing)
            and (self.age_s_min is None or (age is not None and age >= self.age_s_min))
        )


def list_marks(
    cluster: Cluster,
    scope_id: int | None,
    chosen: MarkFilter,
    problems: list[BkctlError],
    why: Callable[..., str | None] | None = None,
) -> Iterator[MarkRow]:
    """Yield the marked ledgers of a scope (None: all) in order; `problems` has then the errors of damaged marks.

    With `why`, which is `ledger_survey.why_not_replicated`, rows have workers, topics and reasons.
    """
    problems.clear()
    state = auto_recovery_of(cluster)

    def marks() -> Iterator[UnderreplicatedLedger]:
        for _, found in state.marks.list(scope_id):
            if isinstance(found, BkctlError):
                problems.append(found)
            elif chosen.matches(found):
                yield found

    if why is None:
        yield from (MarkRow(each.ledger, each.missing_replicas, each.ctime_ms, None) for each in marks())
        return
    locks = {lock.ledger: lock.owner or "?" for lock in state.locks.list(scope_id)}
    failures = {each.ledger: each for each in ReplicationFailures(cluster.store).list(scope_id)}
    bookies, is_enabled = cluster.bookies.list(), state.settings.is_enabled()
    shown, asked = tee(marks())
    found = cluster.ledgers.read_many(mark.ledger for mark in asked)
    for mark, (ledger, metadata) in zip(shown, found, strict=True):
        worker, failure = locks.get(ledger), failures.get(ledger)
        derived = None if failure or worker else why(mark, metadata, bookies, is_enabled=is_enabled)
        yield MarkRow(ledger, mark.missing_replicas, mark.ctime_ms, worker, owner_text(metadata), failure, derived)


class Work(NamedTuple):
    """A ledger that is being replicated; `length` in bytes, None if it was deleted or cannot be read."""

    ledger: LedgerId
    worker: str | None
    ctime_ms: int | None
    length: int | None


def list_work(cluster: Cluster, scope_id: int | None) -> Iterator[Work]:
    """Yield the ledgers of a scope (None: all) that workers have locked."""
    locks = list(auto_recovery_of(cluster).locks.list(scope_id))
    ledgers = cluster.ledgers.read_many(lock.ledger for lock in locks)
    for lock, (_, found) in zip(locks, ledgers, strict=True):
        yield Work(
            lock.ledger, lock.owner, lock.ctime_ms, None if isinstance(found, BkctlError) else found.metadata.length
        )


class Vote(NamedTuple):
    """A candidate for auditor; the first of each kind is the auditor."""

    bookie_id: str
    scoped: bool
    elected: bool


def list_votes(cluster: Cluster, problems: list[BkctlError], *, every: bool) -> list[Vote]:
    """Return the auditors, and with `every` the candidates; errors of damaged votes go to `problems`."""
    found = []
    for scoped in (False, True):
        votes = list(auto_recovery_of(cluster).election.votes(scoped=scoped))
        for at, vote in enumerate(votes if every else votes[:1]):
            if isinstance(vote, BkctlError):
                problems.append(vote)
            else:
                found.append(Vote(vote, scoped, at == 0))
    return found


class ClockReset(NamedTuple):
    """The last run of a check, before and after its clock was reset."""

    check: str
    before_ms: int | None
    after_ms: int | None


def reset_clocks(
    cluster: Cluster, after_ms: int, checks: dict[str, AuditorCheck], *, dry_run: bool
) -> list[ClockReset]:
    """Set the last runs of `checks`, by their names, to `after_ms` in every scope, unless `dry_run`.

    A check that never ran is due already.
    """
    settings, rows = auto_recovery_of(cluster).settings, []
    for name, check in checks.items():
        before_ms = {scoped: settings.check_ctime_ms(check, scoped=scoped) for scoped in (False, True)}
        ran = [scoped for scoped, ctime_ms in before_ms.items() if ctime_ms is not None]
        rows.append(ClockReset(name, before_ms[False], after_ms if ran else None))
        for scoped in () if dry_run else ran:
            settings.set_check_ctime_ms(check, after_ms, scoped=scoped)
    return rows


def check_in_ensembles(cluster: Cluster, ledgers: Iterable[LedgerId], bookie_ids: Collection[str]) -> None:
    """Raise UsageError unless each of the bookies is in an ensemble of each ledger, LedgerNotFound without one."""
    for ledger, found in cluster.ledgers.read_each(ledgers):
        for bookie_id in bookie_ids:
            if not any(bookie_id in fragment.bookies for fragment in found.metadata.ensembles):
                raise UsageError(
                    f"Bookie {bookie_id} is in no ensemble of ledger {ledger}",
                    hint=f"'bkctl ledger locate {ledger}' shows its bookies",
                )


def mark_ledgers(
    cluster: Cluster, ledgers: Iterable[LedgerId], bookie_ids: Collection[str], *, dry_run: bool
) -> Iterator[MarkChange]:
    """Mark each ledger as lacking entries on the bookies, and yield its mark; with `dry_run` nothing is written."""
    marks = auto_recovery_of(cluster).marks
    return (marks.mark(ledger, bookie_ids, suspect=True, dry_run=dry_run) for ledger in ledgers)


def stored_marks(cluster: Cluster, ledgers: Iterable[LedgerId]) -> dict[LedgerId, Versioned[bytes]]:
    """Return the marks of the ledgers that are marked, damaged ones too."""
    found = {ledger: cluster.store.get(mark_path(ledger)) for ledger in ledgers}
    return {ledger: mark for ledger, mark in found.items() if mark is not None}


def unmark_ledgers(cluster: Cluster, marks: dict[LedgerId, Versioned[bytes]], *, dry_run: bool) -> Iterator[MarkChange]:
    """Remove marks in the version that `stored_marks` read, and yield them; with `dry_run` nothing is removed."""
    present = auto_recovery_of(cluster).marks
    for ledger, found in marks.items():
        if not dry_run:
            present.remove(ledger, found.version)
        try:
            replicas = parse_mark(ledger, found).missing_replicas
        except Corrupt:
            replicas = ()  # A damaged mark is removed, too.
        yield MarkChange(ledger, replicas, True)
