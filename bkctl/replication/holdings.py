"""Contents of bookies by the ledgers' metadata, in every scope: what would be lost without them, and what is to move.

No bookie is asked. Source: BookieLedgerIndexer, BookKeeperAdmin (getLedgersContainBookies,
areEntriesOfLedgerStoredInTheBookie), RoundRobinDistributionSchedule.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

from bkctl.client.ensemble import RoundRobinDistributionSchedule
from bkctl.columns import some_of
from bkctl.errors import BkctlError, Conflict, Corrupt, LedgerNotFound, NotFound, UsageError
from bkctl.formats.entry import HEADER_SIZE_V1, HEADER_SIZE_V2, DigestType
from bkctl.formats.metadata import LedgerMetadata, LedgerState
from bkctl.ids import LedgerId, LedgerIdSet, check_bookie_id
from bkctl.metadata.cluster import Cluster, RegisteredBookie
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.underreplication import LedgerMarks, UnderreplicatedLedger
from bkctl.replication.fragments import EntrySpan, LedgerFragment

# --- holdings ---------------------------------------------------------------------------------------------------------


class Stripe(NamedTuple):
    """A write set of a fragment: its bookies, and its first and last entry; None where the fragment still grows."""

    fragment: LedgerFragment
    bookies: tuple[str, ...]
    first: int
    last: int | None

    @property
    def entry_count(self) -> int | None:
        return None if self.last is None else (self.last - self.first) // len(self.fragment.ensemble) + 1


class HeldLedger(NamedTuple):
    """A ledger whose metadata names some of the wanted bookies, and the fragments that do.

    The wanted bookies are the bad ones of the fragments. A fragment that still grows is not closed, and has no entries.
    """

    ledger: LedgerId
    found: VersionedMetadata
    fragments: tuple[LedgerFragment, ...]

    @property
    def metadata(self) -> LedgerMetadata:
        return self.found.metadata

    @property
    def grows(self) -> bool:
        """True if a writer may be adding entries to the wanted bookies: in the last fragment of a ledger not closed."""
        return not all(fragment.closed for fragment in self.fragments)

    @property
    def holds_entries(self) -> bool:
        """True if the wanted bookies hold, or may hold, entries of the ledger; an empty fragment does not count.

        Source: areEntriesOfLedgerStoredInTheBookie.
        """
        return any(fragment.held_count != 0 for fragment in self.fragments)

    @property
    def entry_count(self) -> int:
        """The known number of replicas of entries on the wanted bookies."""
        return sum(fragment.held_count or 0 for fragment in self.fragments)

    @property
    def size_bytes(self) -> int:
        """The approximate bytes of these replicas as stored, for entries of equal size; 0 while the ledger is open."""
        metadata = self.metadata
        if not metadata.is_closed or metadata.last_entry_id < 0:
            return 0
        header_size = HEADER_SIZE_V2 if self.ledger.is_scoped else HEADER_SIZE_V1
        overhead = header_size + (metadata.digest_type or DigestType.HMAC).code_length
        return metadata.length * self.entry_count // (metadata.last_entry_id + 1) + overhead * self.entry_count

    def stripes(self) -> Iterator[Stripe]:
        """Yield each write set with entries on the wanted bookies."""
        for fragment in self.fragments:
            size, wanted, first_entry_id = len(fragment.ensemble), set(fragment.bookie_indexes), fragment.first_entry_id
            for at in range(size):
                write_set = fragment.schedule.write_set(at)
                first = first_entry_id + (at - first_entry_id) % size
                if not wanted.isdisjoint(write_set) and (first <= fragment.last_entry_id or not fragment.closed):
                    last = fragment.last_entry_id - (fragment.last_entry_id - at) % size if fragment.closed else None
                    bookies = tuple(map(fragment.ensemble.__getitem__, write_set))
                    yield Stripe(fragment, bookies, first, last)


def held_ledger(ledger: LedgerId, found: VersionedMetadata, bookie_ids: Set[str]) -> HeldLedger | None:
    """Return what `bookie_ids` hold of the ledger; None if its metadata names none of them."""
    schedule = RoundRobinDistributionSchedule.of(found.metadata)
    fragments = []
    for first, end, bookies in found.metadata.extents():
        if not bookie_ids.isdisjoint(bookies):
            last = first - 1 if end is None else max(end, first - 1)
            fragment = LedgerFragment(ledger, first, last, bookies, end is not None, schedule)
            fragments.append(fragment.given(at for at, bookie_id in enumerate(bookies) if bookie_id in bookie_ids))
    return HeldLedger(ledger, found, tuple(fragments)) if fragments else None


def ledgers_on(
    cluster: Cluster, bookie_ids: Collection[str], ids: Iterable[LedgerId] | None = None, *, doubtful: bool = False
) -> Iterator[tuple[LedgerId, HeldLedger | BkctlError]]:
    """Yield the ledgers of every scope (or of `ids`) that name one of `bookie_ids`, in order.

    Unreadable metadata that names one of them yields the error; with `doubtful`, all unreadable metadata does, since a
    truncated part may have named them. A missing ledger of `ids` yields LedgerNotFound. Streams.
    Raise UsageError for an invalid bookie id, NotFound without a cluster.
    """
    wanted = frozenset(map(check_bookie_id, bookie_ids))
    ledgers = cluster.ledgers
    for ledger, found in _naming(cluster, wanted, doubtful) if ids is None else ledgers.read_many(ids):
        if isinstance(found, BkctlError):
            yield ledger, found
        elif (held := held_ledger(ledger, found, wanted)) is not None:
            yield ledger, held


def _naming(
    cluster: Cluster, bookie_ids: Collection[str], doubtful: bool
) -> Iterator[tuple[LedgerId, VersionedMetadata | BkctlError]]:
    """Yield the metadata of ledgers whose bytes contain one of the ids; with `doubtful`, parse the others too."""
    names = [bookie_id.encode() for bookie_id in bookie_ids]
    for ledger, value in cluster.ledgers.values(cluster.ledgers.ledgers(None)):
        if value is None or not (doubtful or any(name in value.value for name in names)):
            continue
        try:
            metadata = LedgerMetadata.parse(value.value, f"ledger {ledger} in {cluster.store.name}")
        except BkctlError as error:
            yield ledger, error
        else:
            yield ledger, VersionedMetadata(metadata, value.version, metadata.ctime_ms or value.ctime_ms)


#: Ensembles whose candidates are kept for the next ledgers.
_CANDIDATES_MAX: Final = 1024


class Replacements:
    """The bookies that can take over entries: the writable ones except `leaving`."""

    def __init__(self, bookies: Iterable[RegisteredBookie], leaving: Collection[str]) -> None:
        self.writable = [bookie for bookie in bookies if bookie.state == "rw" and bookie.bookie_id not in leaving]
        #: Returns the bookies that could join an ensemble; with `scoped` only bookies that serve ledger scopes.
        self.candidates = lru_cache(_CANDIDATES_MAX)(self._candidates)

    def _candidates(self, ensemble: tuple[str, ...], *, scoped: bool) -> tuple[str, ...]:
        return tuple(
            bookie.bookie_id
            for bookie in self.writable
            if bookie.bookie_id not in ensemble and (bookie.ledger_scopes or not scoped)
        )

    def problem(self, held: HeldLedger) -> str | None:
        """Return the reason why other bookies cannot take over the ledger's entries; None if they can."""
        scoped = held.ledger.is_scoped
        for fragment in held.fragments:
            found = self.candidates(fragment.ensemble, scoped=scoped)
            if fragment.held_count != 0 and len(found) < len(fragment.faults):
                return (
                    f"{_other_bookies(len(fragment.faults), scoped)} would be needed, {len(found)} "
                    f"{'is' if len(found) == 1 else 'are'} there (ensemble {', '.join(fragment.ensemble)})"
                )
        return None


# --- risks of stopping bookies ----------------------------------------------------------------------------------------


def _other_bookies(count: int, scoped: bool) -> str:
    return f"{count} other writable {'bookie' if count == 1 else 'bookies'}{' with ledger scopes' if scoped else ''}"


class Risk(StrEnum):
    """The risk for a ledger if bookies stop."""

    #: Some entries would have no replica.
    LOST = "lost"
    #: Too few bookies would answer to open or recover the ledger, which is not closed.
    UNRECOVERABLE = "unrecoverable"
    #: The ledger's writer could add no more.
    UNWRITABLE = "unwritable"
    #: Some entries would have fewer replicas than required.
    UNDER_QUORUM = "under-quorum"
    #: The ledger's metadata names the bookies, but is unreadable.
    UNREADABLE = "unreadable"


class StopProblem(NamedTuple):
    """One risk of one ledger.

    It concerns `entry_count` (None: unknown) entries between `first_entry_id` and `last_entry_id` (None: the ledger's
    end). `replica_count` is the smallest number of replicas that one of them would have, `replica_count_min` the
    required number. `bookies` are the stopping bookies that hold the ledger.
    """

    ledger: LedgerId
    risk: Risk
    message: str
    state: LedgerState | None = None
    first_entry_id: int | None = None
    last_entry_id: int | None = None
    entry_count: int | None = None
    replica_count: int | None = None
    replica_count_min: int | None = None
    bookies: tuple[str, ...] = ()


def check_known(cluster: Cluster, bookie_ids: Iterable[str]) -> None:
    """Raise NotFound for a bookie that has neither a cookie nor a registration."""
    for bookie_id in bookie_ids:
        if cluster.bookies.get(bookie_id) is None:
            raise NotFound(f"No bookie {bookie_id}", hint="'bkctl bookies list' shows them")


def ok_to_stop(
    cluster: Cluster,
    bookie_ids: Collection[str],
    *,
    replica_count_min: int | None = None,
    under_quorum: set[LedgerId] | None = None,
    silent: Collection[str] = (),
) -> Iterator[StopProblem]:
    """Yield the ledgers that would suffer, as `Risk` says, if `bookie_ids` stopped now, in order.

    A ledger that is not closed also needs the answers of its last ensemble that opening and recovery need. A replica
    counts while its bookie is registered, serves the ledger's scope, and is not marked as missing by auto-recovery.
    `replica_count_min` is the number of replicas of each entry that must remain (None: the ledger's ack quorum). With
    `under_quorum`, ledgers with fewer are put there instead: a restart leaves them as they must be. `silent` bookies
    count as down, although they are registered. Raise UsageError, NotFound without a cluster.
    """
    if replica_count_min is not None and replica_count_min < 1:
        raise UsageError(f"Cannot require {replica_count_min} replicas", hint="give 1 or more")
    bookies = bookies_up(cluster, silent)
    staying = {bookie.bookie_id: bookie for bookie in bookies if bookie.bookie_id not in bookie_ids}
    replacements = Replacements(bookies, bookie_ids)
    mark_of = LedgerMarks(cluster.store).cursor()
    for ledger, held in ledgers_on(cluster, bookie_ids):
        if isinstance(held, BkctlError):
            yield StopProblem(ledger, Risk.UNREADABLE, held.message)
            continue
        live = _live(staying, ledger, mark_of(ledger))
        for problem in _replica_risks(held, live, replica_count_min or max(held.metadata.ack_quorum_size, 1)):
            if under_quorum is not None and problem.risk is Risk.UNDER_QUORUM:
                under_quorum.add(ledger)
            else:
                yield problem
        if held.grows:
            fragment = held.fragments[-1]
            silent = sorted(set(fragment.ensemble) - live)
            if not is_covered(fragment.schedule, fragment.ensemble, live):
                yield StopProblem(
                    ledger, Risk.UNRECOVERABLE,
                    f"It could not be opened or recovered: {', '.join(silent)} of its last bookies would not answer, "
                    "and the others cannot tell where it ends",
                    held.metadata.state, fragment.first_entry_id, bookies=fragment.bookies,
                )  # fmt: skip
            # Bookies of the fragment that are down already need a replacement too.
            needed = sum(bookie_id not in staying for bookie_id in fragment.ensemble)
            available = len(replacements.candidates(fragment.ensemble, scoped=ledger.is_scoped))
            if available < needed:
                yield StopProblem(
                    ledger, Risk.UNWRITABLE,
                    f"Its writer needs {_other_bookies(needed, ledger.is_scoped)}, {available} "
                    f"{'is' if available == 1 else 'are'} there",
                    held.metadata.state, fragment.first_entry_id, bookies=fragment.bookies,
                )  # fmt: skip


def bookies_up(cluster: Cluster, silent: Collection[str] = ()) -> list[RegisteredBookie]:
    """Return the registered bookies but the `silent` ones."""
    return [each for each in cluster.bookies.list(include_down=False) if each.bookie_id not in silent]


def _live(
    staying: Mapping[str, RegisteredBookie], ledger: LedgerId, mark: UnderreplicatedLedger | None
) -> frozenset[str]:
    """Return the bookies of `staying` whose replicas of the ledger count."""
    missing = () if mark is None else mark.missing_replicas
    return frozenset(
        bookie_id
        for bookie_id, bookie in staying.items()
        if bookie_id not in missing and (bookie.ledger_scopes or not ledger.is_scoped)
    )


def is_covered(schedule: RoundRobinDistributionSchedule, ensemble: tuple[str, ...], answering: Collection[str]) -> bool:
    """Return True if a client could find the end of a ledger from the `answering` bookies of its last ensemble."""
    return schedule.covered([index for index, bookie_id in enumerate(ensemble) if bookie_id in answering])


class StopSets:
    """The sets of bookies that may stop together, by the metadata of all ledgers, as `ok_to_stop` judges them.

    `replica_count_min` and `silent` are as for `ok_to_stop`. Memory: one item for each different write set. Raise the
    error of metadata that is unreadable, NotFound without a cluster.
    """

    def __init__(self, cluster: Cluster, *, replica_count_min: int | None = None, silent: Collection[str] = ()) -> None:
        self._bookies = {bookie.bookie_id: bookie for bookie in bookies_up(cluster, silent)}
        #: For each write set with entries: its bookies, the ones whose replicas count, and how many must remain.
        self._write_sets: set[tuple[frozenset[str], frozenset[str], int]] = set()
        #: The last ensembles of ledgers that are not closed, their bookies that answer, whether they are scoped.
        self._growing: set[tuple[RoundRobinDistributionSchedule, tuple[str, ...], frozenset[str], bool]] = set()
        mark_of = LedgerMarks(cluster.store).cursor()
        for ledger, held in ledgers_on(cluster, self._bookies.keys()):
            if isinstance(held, BkctlError):
                raise held
            live = _live(self._bookies, ledger, mark_of(ledger))
            wanted = replica_count_min or max(held.metadata.ack_quorum_size, 1)
            for stripe in held.stripes():
                names = frozenset(stripe.bookies)
                self._write_sets.add((names, names & live, wanted))
            if held.grows:
                last = held.fragments[-1]
                answering = live.intersection(last.ensemble)
                self._growing.add((last.schedule, last.ensemble, answering, ledger.is_scoped))

    def allows(self, stopping: Collection[str]) -> bool:
        """Return True if these bookies may stop together, and a writable one remains."""
        stopping = frozenset(stopping)
        for names, live, wanted in self._write_sets:
            if not names.isdisjoint(stopping) and len(live - stopping) < wanted:
                return False
        replacements = Replacements(self._bookies.values(), stopping)
        for schedule, ensemble, live, scoped in self._growing:
            if stopping.isdisjoint(ensemble):
                continue
            if not is_covered(schedule, ensemble, live - stopping):
                return False
            needed = sum(name in stopping or name not in self._bookies for name in ensemble)
            if len(replacements.candidates(ensemble, scoped=scoped)) < needed:
                return False
        return bool(replacements.writable)

    def largest(self, first: Collection[str], racks: Mapping[str, str]) -> list[str]:
        """Return the largest set found that has `first` in it and may stop; to it, no bookie can be added.

        Bookies of one rack are tried together, and the racks of `first` before others. Empty if `first` may not stop.
        """
        if first and not self.allows(first):
            return []
        near = {racks[name] for name in first if name in racks}
        counts = Counter(name for names, _, _ in self._write_sets for name in names)
        # Bookies of few write sets hinder few others.
        others = sorted(
            self._bookies.keys() - set(first), key=lambda name: (racks.get(name) not in near, counts[name], name)
        )
        best: list[str] = []
        for rack in dict.fromkeys([None, *sorted(set(racks.values()))]):
            added: list[str] = []
            for name in sorted(others, key=lambda name: rack is not None and racks.get(name) != rack):
                if self.allows([*first, *added, name]):
                    added.append(name)
            if len(added) > len(best):
                best = added
        return [*first, *sorted(best, key=lambda name: (racks.get(name, ""), name))]


def _replica_risks(held: HeldLedger, live: frozenset[str], replica_count_min: int) -> Iterator[StopProblem]:
    """Yield the risks of entries that would have too few replicas if only the replicas on `live` remained."""
    counts = ((len(live.intersection(stripe.bookies)), stripe) for stripe in held.stripes())
    too_few = [each for each in counts if each[0] < replica_count_min]
    for risk in (Risk.LOST, Risk.UNDER_QUORUM):
        few = [each for each in too_few if (each[0] > 0) == (risk is Risk.UNDER_QUORUM)]
        if not few:
            continue
        left, stripes = min(count for count, _ in few), [stripe for _, stripe in few]
        lasts = [stripe.last for stripe in stripes if stripe.last is not None]
        is_known = len(lasts) == len(stripes)
        entry_count = sum(stripe.entry_count or 0 for stripe in stripes)
        bookies = {each: each in stripe.fragment.bookies for stripe in stripes for each in stripe.bookies}
        #: Bookies that do not stop, and are down or lack the entries.
        away = [each for each, stops in bookies.items() if not stops and each not in live]
        lack = f"{', '.join(away)} {'lacks them, or is down' if len(away) == 1 else 'lack them, or are down'}"
        message = f"No replica would be left{f': {lack}' if away else ''}"
        if left:
            required = f"{held.metadata.write_quorum_size} replicas would remain; {replica_count_min} are required"
            message = f"Only {left} of {required}{f'; {lack}' if away else ''}"
        yield StopProblem(
            held.ledger, risk, message, held.metadata.state, min(stripe.first for stripe in stripes),
            max(lasts) if is_known else None, entry_count if is_known else None, left, replica_count_min,
            tuple(each for each, stops in bookies.items() if stops),
        )  # fmt: skip


# --- plans of moves --------------------------------------------------------------------------------------------------


class MoveOutcome(StrEnum):
    """The outcome of moving one ledger."""

    #: The leaving bookies hold nothing of it any more.
    MOVED = "moved"
    #: There was nothing to move: the ledger was deleted, or another worker moved it.
    GONE = "gone"
    #: A writer may be adding to it, and the caller forbade touching open ledgers.
    OPEN = "open"
    #: Some of its entries are lost: every bookie that should have them answers, and lacks them or has them damaged.
    UNRECOVERABLE = "unrecoverable"
    #: It could not be copied now, as when a bookie that may have its entries is away; another attempt may succeed.
    FAILED = "failed"


class LedgerMove(NamedTuple):
    """The result of moving one ledger.

    `problem` says why it was not moved, `unreadable` names the entries that no replica returns. `entry_count` and
    `size_bytes` were copied, `fragment_count` is the number of fragments whose bookies were replaced.
    """

    ledger: LedgerId
    outcome: MoveOutcome
    state: LedgerState | None = None
    fragment_count: int = 0
    entry_count: int = 0
    size_bytes: int = 0
    unreadable: tuple[EntrySpan, ...] = ()
    problem: str | None = None


def left_open(held: HeldLedger) -> LedgerMove:
    """Return the result for a ledger that is not moved because it is open."""
    return LedgerMove(held.ledger, MoveOutcome.OPEN, held.metadata.state, problem="It is open")


class PlannedFragment(NamedTuple):
    """The dry run of moving one fragment.

    `targets` are the bookies that would take over, by ensemble index; empty if there are too few, as `problem` says.
    `closes`: the ledger would be fenced and closed first. `unreadable` are the entries that no registered bookie has;
    `lost`: all other bookies that should have them answered, and nothing else prevents the move.
    """

    held: HeldLedger
    fragment: LedgerFragment
    targets: dict[int, str]
    closes: bool
    problem: str | None
    unreadable: tuple[EntrySpan, ...]
    lost: bool = False

    @property
    def new_ensemble(self) -> tuple[str, ...]:
        """The ensemble after the move."""
        return tuple(self.targets.get(index, bookie_id) for index, bookie_id in enumerate(self.fragment.ensemble))


@dataclass
class MovePlan:
    """The ledgers to move, by the metadata alone. Memory: 16 bytes for each id.

    `ledgers` include ledgers that name the bookies but hold nothing on them. Entries and
    bytes count each replica, of closed ledgers only. `crowded` are the ledgers with too few other bookies, `damaged`
    the ones whose metadata names the bookies but is unreadable, with the reason of each. `marked` are the ledgers that
    auto-recovery has marked for the bookies. `silent` are registered bookies that count as down.
    """

    ledgers: LedgerIdSet = field(default_factory=LedgerIdSet)
    scope_count: int = 0
    open_count: int = 0
    entry_count: int = 0
    size_bytes: int = 0
    crowded: LedgerIdSet = field(default_factory=LedgerIdSet)
    damaged: dict[LedgerId, str] = field(default_factory=dict)
    marked: LedgerIdSet = field(default_factory=LedgerIdSet)
    silent: Sequence[str] = ()

    @property
    def kinds(self) -> set[bool]:
        """False if there are ledgers of scope 0, and True if there are ledgers of other scopes."""
        ledgers = self.ledgers
        return {ledgers[0].is_scoped, ledgers[-1].is_scoped} if ledgers else set()


def plan_move(
    cluster: Cluster, leaving: Collection[str], ids: Iterable[LedgerId] | None = None, *, silent: Sequence[str] = ()
) -> MovePlan:
    """Return what `leaving` hold of the ledgers `ids` (None: of all ledgers), by the metadata. Blocks.

    `silent` bookies count as down, although they are registered. Raise LedgerNotFound if one of `ids` does not exist,
    UsageError for an invalid bookie id, and errors of the store.
    """
    plan = MovePlan(silent=silent)
    leaving = frozenset(leaving)
    marks = LedgerMarks(cluster.store)
    mark_of = marks.cursor() if ids is None else marks.get
    replacements = Replacements(bookies_up(cluster, silent), leaving)
    scope_id = None
    for ledger, held in ledgers_on(cluster, leaving, None if ids is None else sorted(set(ids))):
        if isinstance(held, BkctlError):
            if ids is not None and isinstance(held, LedgerNotFound):
                raise held
            plan.damaged[ledger] = held.message
            continue
        plan.ledgers.add(ledger)
        plan.scope_count += ledger.scope_id != scope_id
        scope_id = ledger.scope_id
        plan.open_count += not held.metadata.is_closed
        plan.entry_count += held.entry_count
        plan.size_bytes += held.size_bytes
        with contextlib.suppress(Corrupt):
            mark = mark_of(ledger)
            if mark is not None and not leaving.isdisjoint(mark.missing_replicas):
                plan.marked.add(ledger)
        if replacements.problem(held) is not None:
            plan.crowded.add(ledger)
    return plan


def check_scopes_known(cluster: Cluster) -> None:
    """Raise Conflict if there are ledgers that no listing has, of a formatted cluster or another layout. Blocks.

    Any bookie may hold some of them, and needs its cookie.
    """
    if unlisted := cluster.ledgers.unlisted():
        raise Conflict(
            f"The ledgers at {some_of(unlisted)} are in no listing: the bookies may hold their entries",
            hint="'bkctl metadata check' says why; mend or remove them first, or keep the cookie",
        )


@dataclass
class MoveProgress:
    """The progress of a move, updated while it runs. Times in seconds."""

    plan: MovePlan
    ledger_count: int = 0
    entry_count: int = 0
    size_bytes: int = 0
    #: Ledgers that other workers have locked, and that are retried later.
    locked_count: int = 0
    _began: float = field(default_factory=time.monotonic)

    def copied(self, entry_count: int, size_bytes: int) -> None:
        self.entry_count += entry_count
        self.size_bytes += size_bytes

    def paused(self, duration_s: float) -> None:
        """Leave a pause out of the elapsed time."""
        self._began += duration_s

    @property
    def elapsed_s(self) -> float:
        """The time since the move began, without pauses."""
        return max(time.monotonic() - self._began, 1e-6)

    @property
    def bytes_per_s(self) -> float:
        """Bytes copied a second, since the move began."""
        return self.size_bytes / self.elapsed_s

    @property
    def share(self) -> float:
        """The part that is done, from 0 to 1; a ledger counts as much as one entry."""
        total = len(self.plan.ledgers) + self.plan.entry_count
        done = self.ledger_count + min(self.entry_count, self.plan.entry_count)
        return 1.0 if self.ledger_count >= len(self.plan.ledgers) else done / total

    @property
    def left_s(self) -> float | None:
        """The estimated remaining time; None before anything is known."""
        share = self.share
        if share < 1 and self.plan.entry_count and not self.entry_count:
            return None  # Ledgers that cannot be moved end at once, and tell nothing about the others.
        return self.elapsed_s * (1 - share) / share if share > 0 else None
