"""Changes of the metadata of many ledgers: removal in given states, and another bookie id in all ensembles."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.errors import BkctlError, Conflict, LedgerNotFound, MetadataVersionConflict, Unreachable
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.store import map_ahead, value_of
from bkctl.pace import Pace

if TYPE_CHECKING:
    from bkctl.metadata.ledgers import VersionedMetadata

CONCURRENCY: Final = 16
#: Ledgers whose metadata is read together.
_BATCH_COUNT: Final = 500


class Removal(NamedTuple):
    """Result for one ledger. `metadata` is its former metadata; None if missing or unreadable.

    `error` is the reason of a failure; a missing ledger has none where missing ledgers are allowed.
    """

    ledger: LedgerId
    metadata: LedgerMetadata | None
    removed: bool
    error: BkctlError | None = None


#: Ledgers of a plan that are kept with their metadata.
FIRST_COUNT: Final = 5


class RemovalPlan(NamedTuple):
    """The ledgers to remove, number and size of the closed ones, the first few, and those that cannot be removed."""

    ledgers: list[LedgerId]
    closed_count: int
    size_bytes: int
    failures: list[Removal]
    first: list[Removal]

    def check(self) -> None:
        """Raise the first failure, of a plan that is not carried out then."""
        for _, _, _, error in self.failures:
            assert error is not None
            raise Conflict(f"{error.message}; nothing was deleted") if isinstance(error, Conflict) else error


def check_state(ledger: LedgerId, metadata: LedgerMetadata, states: Collection[str]) -> None:
    """Raise Conflict when the ledger is in none of `states`; empty: every state is allowed."""
    if states and metadata.state.name not in states:
        raise Conflict(f"Ledger {ledger} is {metadata.state.name}, not {' or '.join(sorted(states))}")


def plan_removal(
    cluster: Cluster,
    ids: Iterable[LedgerId],
    *,
    states: Collection[str] = (),
    keep_missing: bool = False,
    seen: Callable[[Removal], None] = lambda _: None,
) -> RemovalPlan:
    """Read every ledger to remove; each goes to `seen` with its metadata, in the order given.

    A repeated id counts once. With `keep_missing` a missing ledger is left out and does not fail. Memory: the ids.
    """
    ledgers: list[LedgerId] = []
    failures: list[Removal] = []
    first: list[Removal] = []
    closed_count = size_bytes = 0
    for ledger, found in cluster.ledgers.read_many(dict.fromkeys(ids)):
        if isinstance(found, BkctlError):
            if not (keep_missing and isinstance(found, LedgerNotFound)):
                failures.append(Removal(ledger, None, False, found))
            continue
        try:
            check_state(ledger, found.metadata, states)
        except Conflict as error:
            failures.append(Removal(ledger, found.metadata, False, error))
            continue
        if found.metadata.state.name == "CLOSED":
            closed_count += 1
            size_bytes += found.metadata.length
        ledgers.append(ledger)
        row = Removal(ledger, found.metadata, False)
        first += [row] if len(ledgers) <= FIRST_COUNT else []
        seen(row)
    return RemovalPlan(ledgers, closed_count, size_bytes, failures, first)


def remove_ledgers(
    cluster: Cluster,
    ids: Iterable[LedgerId],
    *,
    states: Collection[str] = (),
    keep_missing: bool = False,
    keep_going: bool = False,
    pace: Pace,
) -> Iterator[Removal]:
    """Remove the ledgers' metadata, and yield the result of each in the order given.

    Each ledger is read again, and removed only in the version read. The first failure is raised once the removals under
    way have ended and were yielded; with `keep_going` failures are yielded instead, and only Unreachable is raised.
    """
    from concurrent.futures import ThreadPoolExecutor

    failure: BkctlError | None = None

    def remove(read: tuple[LedgerId, VersionedMetadata | BkctlError]) -> Removal:
        return _remove(cluster, *read, states, keep_missing)

    read = takewhile(lambda _: failure is None, _read(cluster, ids, pace))
    with ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="remove-ledgers") as executor:
        for done in map_ahead(executor, remove, read, CONCURRENCY):
            if failure is None and (not keep_going or isinstance(done.error, Unreachable)):
                failure = done.error
            if done.error is None or keep_going:
                yield done
    if failure is not None:
        raise failure


def _read(
    cluster: Cluster, ids: Iterable[LedgerId], pace: Pace
) -> Iterator[tuple[LedgerId, VersionedMetadata | BkctlError]]:
    """Yield each ledger with its metadata, or the error of it, at that pace."""
    left = iter(ids)
    # Metadata that is read far ahead changes before its turn.
    while batch := list(islice(left, _BATCH_COUNT if pace.steps_per_s is None else 1)):
        pace.take(steps=len(batch))
        yield from cluster.ledgers.read_many(batch)


def _remove(
    cluster: Cluster,
    ledger: LedgerId,
    found: VersionedMetadata | BkctlError,
    states: Collection[str],
    keep_missing: bool,
) -> Removal:
    """Remove the ledger in the version `found`; every error is in the result."""
    metadata: LedgerMetadata | None = None
    try:
        metadata, version, _ = value_of(found)
        check_state(ledger, metadata, states)
        cluster.ledgers.remove(ledger, version)
    except LedgerNotFound as error:
        return Removal(ledger, metadata, False, None if keep_missing else error)
    except BkctlError as error:
        return Removal(ledger, metadata, False, error)
    return Removal(ledger, metadata, True)


class Replacement(NamedTuple):
    """Result for one ledger that names the bookie. `problem` explains an unchanged ledger; None: it was changed."""

    ledger: LedgerId
    fragment_count: int
    problem: str | None


def replace_bookie(
    cluster: Cluster,
    old: str,
    new: str,
    *,
    pace: Pace | None = None,
    limit: int | None = None,
    dry_run: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[Replacement]:
    """Replace the bookie id `old` by `new` in the metadata of every ledger of every scope, by compare-and-set.

    Yields each ledger that names `old`; a ledger whose ensemble has `new` already, or whose metadata cannot be read
    or written, stays unchanged. At most `limit` ledgers change, at that `pace`; the first one behind them is the last
    one yielded. Another run finishes an interrupted one. Raises Unreachable.
    Source: UpdateLedgerOp, SearchReplaceBookieIdCommand.
    """
    manager = cluster.ledgers
    changed = 0
    for count, (ledger, found) in enumerate(manager.read_many(manager.ledgers(None)), 1):
        progress(count)
        if isinstance(found, LedgerNotFound):
            continue
        if isinstance(found, BkctlError):
            yield Replacement(ledger, 0, str(found))
            continue
        if not any(old in fragment.bookies for fragment in found.metadata.ensembles):
            continue
        if limit is not None and changed >= limit:
            yield Replacement(ledger, 0, "left, as those behind it: --limit is reached")
            return
        planned = _replaced(ledger, found.metadata, old, new)[1]
        if dry_run or planned.problem is not None:
            changed += planned.problem is None
            yield planned
            continue
        if pace is not None:
            pace.take()
        outcome = _replace_in(cluster, ledger, old, new)
        if outcome.problem is None and not outcome.fragment_count:
            continue  # Another command replaced the bookie since the read.
        changed += outcome.problem is None
        yield outcome


def _replace_in(cluster: Cluster, ledger: LedgerId, old: str, new: str) -> Replacement:
    while True:
        try:
            found = cluster.ledgers.read(ledger)
            updated, outcome = _replaced(ledger, found.metadata, old, new)
            if outcome.problem is None and outcome.fragment_count:
                cluster.ledgers.write(ledger, updated, found.version)
            return outcome
        except MetadataVersionConflict:
            continue
        except LedgerNotFound:
            return Replacement(ledger, 0, "It was deleted meanwhile")
        except Unreachable:
            raise
        except BkctlError as error:
            return Replacement(ledger, 0, str(error))


def _replaced(ledger: LedgerId, metadata: LedgerMetadata, old: str, new: str) -> tuple[LedgerMetadata, Replacement]:
    ensembles = []
    count = 0
    for fragment in metadata.ensembles:
        if old not in fragment.bookies:
            ensembles.append(fragment)
            continue
        if new in fragment.bookies:
            problem = f"The ensemble of entry {fragment.first_entry_id} has {new} already"
            return metadata, Replacement(ledger, 0, problem)
        count += 1
        bookies = tuple(new if bookie_id == old else bookie_id for bookie_id in fragment.bookies)
        ensembles.append(fragment._replace(bookies=bookies))
    return metadata._replace(ensembles=tuple(ensembles), c_token=0 if metadata.format_version > 2 else None), (
        Replacement(ledger, count, None)
    )
