"""What bookies hold by the ledgers' metadata, in every scope, and what would be amiss if they stopped.

Nothing here asks a bookie. Source: BookieLedgerIndexer, BookKeeperAdmin (getLedgersContainBookies,
areEntriesOfLedgerStoredInTheBookie), RoundRobinDistributionSchedule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from bkctl.client.ensemble import RoundRobinDistributionSchedule
from bkctl.errors import BkctlError, UsageError
from bkctl.formats.metadata import LedgerMetadata, LedgerState
from bkctl.ids import LedgerId, check_bookie_id
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.underreplication import LedgerUnderreplicationManager

if TYPE_CHECKING:
    from bkctl.metadata.cluster import Cluster, RegisteredBookie


# --- who holds what -------------------------------------------------------------------------------------------------


class HeldFragment(NamedTuple):
    """A fragment whose ensemble has some of the bookies that were asked for, at the ensemble indexes `indexes`.

    `last_entry_id` and `entry_count` (entries of the fragment that stand on them, each replica counted) are None where
    it still grows; one less than the first entry where it has no entries.
    """

    first_entry_id: int
    last_entry_id: int | None
    ensemble: tuple[str, ...]
    indexes: tuple[int, ...]
    entry_count: int | None

    @property
    def bookies(self) -> tuple[str, ...]:
        """Which of the bookies that were asked for."""
        return tuple(self.ensemble[index] for index in self.indexes)


@dataclass(frozen=True)
class HeldLedger:
    """A ledger that names some of the bookies that were asked for, with the fragments in which it does."""

    ledger: LedgerId
    found: VersionedMetadata
    fragments: tuple[HeldFragment, ...]

    @property
    def metadata(self) -> LedgerMetadata:
        """Its metadata."""
        return self.found.metadata

    @property
    def grows(self) -> bool:
        """Whether a writer may be adding entries to them now: the last fragment of a ledger that is not closed."""
        return any(fragment.last_entry_id is None for fragment in self.fragments)

    @property
    def holds_entries(self) -> bool:
        """Whether entries of it stand, or may stand, on them; being named alone is none.

        Source: areEntriesOfLedgerStoredInTheBookie.
        """
        return any(fragment.entry_count != 0 for fragment in self.fragments)

    @property
    def entry_count(self) -> int:
        """How many replicas of entries stand on them, as far as it is known."""
        return sum(fragment.entry_count or 0 for fragment in self.fragments)

    @property
    def size_bytes(self) -> int:
        """About how many bytes of payload those have: entries are taken to be equally large; 0 while it is open."""
        metadata = self.metadata
        if not metadata.is_closed or metadata.last_entry_id < 0:
            return 0
        return metadata.length * self.entry_count // (metadata.last_entry_id + 1)


def held_ledger(ledger: LedgerId, found: VersionedMetadata, bookie_ids: Collection[str]) -> HeldLedger | None:
    """What of the ledger is on `bookie_ids`; None when its metadata names none of them."""
    metadata = found.metadata
    schedule = RoundRobinDistributionSchedule.of(metadata)
    end = metadata.last_entry_id if metadata.is_closed else None
    fragments = []
    for at, fragment in enumerate(metadata.ensembles):
        indexes = tuple(index for index, bookie_id in enumerate(fragment.bookies) if bookie_id in bookie_ids)
        if not indexes:
            continue
        first = fragment.first_entry_id
        last = metadata.ensembles[at + 1].first_entry_id - 1 if at + 1 < len(metadata.ensembles) else end
        count = None
        if last is not None:
            last = max(last, first - 1)
            count = sum(schedule.entry_count(index, first, last) for index in indexes)
        fragments.append(HeldFragment(first, last, fragment.bookies, indexes, count))
    return HeldLedger(ledger, found, tuple(fragments)) if fragments else None


def ledgers_on(
    cluster: Cluster, bookie_ids: Collection[str], ids: Iterable[LedgerId] | None = None, *, doubtful: bool = False
) -> Iterator[tuple[LedgerId, HeldLedger | BkctlError]]:
    """Yield the ledgers of every scope (or those of `ids`) that name one of `bookie_ids`, in order.

    Metadata that names them and cannot be read comes as its error, with `doubtful` any that cannot be read: what is
    cut off may have named them. So does a ledger of `ids` that is not there. Streams.
    Raises UsageError for what is no bookie id, NotFound when there is no cluster.
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
    """The metadata of the ledgers whose bytes have one of the ids in them; the others are parsed for `doubtful`
    alone, to find those that cannot be."""
    names = [each.encode() for each in bookie_ids]
    for ledger, value in cluster.ledgers.values(cluster.ledgers.ledgers(None)):
        if value is None or not (doubtful or any(name in value.value for name in names)):
            continue
        try:
            metadata = LedgerMetadata.parse(value.value, f"ledger {ledger} in {cluster.store.name}")
        except BkctlError as error:
            yield ledger, error
        else:
            yield ledger, VersionedMetadata(metadata, value.version, metadata.ctime_ms or value.ctime_ms)


class Replacements:
    """Which bookies could take what others hold: the writable ones, `leaving` aside."""

    def __init__(self, bookies: Iterable[RegisteredBookie], leaving: Collection[str]) -> None:
        self.writable = [each for each in bookies if each.state == "rw" and each.bookie_id not in leaving]
        self._known: dict[tuple[tuple[str, ...], bool], tuple[str, ...]] = {}

    def of(self, ensemble: tuple[str, ...], *, scoped: bool) -> tuple[str, ...]:
        """Those that could come into the ensemble; `scoped`: among bookies that serve scopes."""
        found = self._known.get((ensemble, scoped))
        if found is None:
            found = self._known[ensemble, scoped] = tuple(
                each.bookie_id
                for each in self.writable
                if each.bookie_id not in ensemble and (each.ledger_scopes or not scoped)
            )
        return found

    def problem(self, held: HeldLedger) -> str | None:
        """Why not all that the ledger has on the leaving bookies can go elsewhere; None when it can."""
        scoped = held.ledger.is_scoped
        for fragment in held.fragments:
            found = self.of(fragment.ensemble, scoped=scoped)
            if fragment.entry_count != 0 and len(found) < len(fragment.indexes):
                return (
                    f"{len(fragment.indexes)} other writable {'bookie' if len(fragment.indexes) == 1 else 'bookies'}"
                    f"{' with ledger scopes' if scoped else ''} would be needed, {len(found)} "
                    f"{'is' if len(found) == 1 else 'are'} there (ensemble {', '.join(fragment.ensemble)})"
                )
        return None


# --- may they stop? -------------------------------------------------------------------------------------------------


class Risk(StrEnum):
    """What becomes of a ledger when bookies stop."""

    #: No replica of some entries is left.
    LOST = "lost"
    #: Its writer can add no more.
    UNWRITABLE = "unwritable"
    #: Fewer replicas of some entries are left than must be.
    UNDER_QUORUM = "under-quorum"
    #: Its metadata names them, and cannot be read.
    UNREADABLE = "unreadable"


class StopProblem(NamedTuple):
    """One thing that would be amiss with one ledger.

    The entries are those from `first_entry_id` to `last_entry_id` (None: to its end) whose write sets are concerned,
    `entry_count` of them where that is known. `replica_count` is how many replicas the worst of them has left,
    `replica_count_min` how many there must be. `bookies` are those of the stopping ones that hold it.
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


def ok_to_stop(
    cluster: Cluster, bookie_ids: Collection[str], *, replica_count_min: int | None = None
) -> Iterator[StopProblem]:
    """Yield what would be lost, unwritable or under its quorum if `bookie_ids` stopped now, in order of the ledgers.

    A replica counts while its bookie is registered, serves the ledger's scope, and no mark of auto-recovery says that
    it is missing there. `replica_count_min` is how many replicas of each entry must stay (None: the ledger's ack
    quorum). Raises UsageError, NotFound when there is no cluster.
    """
    if replica_count_min is not None and replica_count_min < 1:
        raise UsageError(f"At least {replica_count_min} replicas: 1 or more are needed")
    bookies = cluster.bookies.list(include_down=False)
    staying = {each.bookie_id: each for each in bookies if each.bookie_id not in bookie_ids}
    replacements = Replacements(bookies, bookie_ids)
    mark_of = LedgerUnderreplicationManager(cluster.store).beside()
    for ledger, held in ledgers_on(cluster, bookie_ids):
        if isinstance(held, BkctlError):
            yield StopProblem(ledger, Risk.UNREADABLE, held.message)
            continue
        mark = mark_of(ledger)
        missing = () if mark is None else mark.missing_replicas
        live = {
            bookie_id
            for bookie_id, bookie in staying.items()
            if bookie_id not in missing and (bookie.ledger_scopes or not ledger.is_scoped)
        }
        yield from _without(held, live, replica_count_min or max(held.metadata.ack_quorum_size, 1))
        if held.grows:
            fragment = held.fragments[-1]
            # A bookie of it that is down already has to be replaced too.
            needed = sum(bookie_id not in staying for bookie_id in fragment.ensemble)
            there = len(replacements.of(fragment.ensemble, scoped=ledger.is_scoped))
            if there < needed:
                yield StopProblem(
                    ledger, Risk.UNWRITABLE,
                    f"Its writer needs {needed} other writable {'bookie' if needed == 1 else 'bookies'}"
                    f"{' with ledger scopes' if ledger.is_scoped else ''}, {there} {'is' if there == 1 else 'are'} "
                    "there",
                    held.metadata.state, fragment.first_entry_id, bookies=fragment.bookies,
                )  # fmt: skip


class _Tally:
    """Entries of one risk, added up over fragments and write sets."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.last: int | None = -1
        self.count: int | None = 0
        self.replica_count = 0
        self.bookies: dict[str, None] = {}
        self.others: dict[str, None] = {}

    def add(self, first: int, last: int | None, count: int | None, live_count: int) -> None:
        self.replica_count = live_count if self.first is None else min(self.replica_count, live_count)
        self.first = first if self.first is None else min(self.first, first)
        self.last = None if last is None or self.last is None else max(self.last, last)
        self.count = None if count is None or self.count is None else self.count + count


def _without(held: HeldLedger, live: Collection[str], replica_count_min: int) -> Iterator[StopProblem]:
    """What entries of the ledger would have too few replicas, when only those on `live` are there."""
    metadata = held.metadata
    schedule = RoundRobinDistributionSchedule.of(metadata)
    size = schedule.ensemble_size
    wanted = min(replica_count_min, schedule.write_quorum_size)
    tallies = {Risk.LOST: _Tally(), Risk.UNDER_QUORUM: _Tally()}
    for fragment in held.fragments:
        for at in range(size):
            write_set = schedule.write_set(at)
            if not any(index in fragment.indexes for index in write_set):
                continue
            first = fragment.first_entry_id + (at - fragment.first_entry_id) % size
            last = fragment.last_entry_id
            if last is not None:
                if first > last:
                    continue
                last -= (last - at) % size
            live_count = sum(fragment.ensemble[index] in live for index in write_set)
            if live_count >= wanted:
                continue
            tally = tallies[Risk.UNDER_QUORUM if live_count else Risk.LOST]
            tally.add(first, last, None if last is None else (last - first) // size + 1, live_count)
            tally.bookies.update(
                dict.fromkeys(fragment.ensemble[each] for each in write_set if each in fragment.indexes)
            )
            tally.others.update(
                (fragment.ensemble[each], None)
                for each in write_set
                if each not in fragment.indexes and fragment.ensemble[each] not in live
            )
    for risk, tally in tallies.items():
        if tally.first is None:
            continue
        others = ", ".join(tally.others)
        if risk is Risk.LOST:
            lack = "lacks them, or is down" if len(tally.others) == 1 else "lack them, or are down"
            message = f"No replica would be left{f': {others} {lack}' if others else ''}"
        else:
            message = (
                f"{tally.replica_count} of {schedule.write_quorum_size} replicas would be left, {wanted} must be"
                f"{f'; not on {others} either' if others else ''}"
            )
        yield StopProblem(
            held.ledger, risk, message, metadata.state, tally.first, tally.last, tally.count, tally.replica_count,
            wanted, tuple(tally.bookies),
        )  # fmt: skip
