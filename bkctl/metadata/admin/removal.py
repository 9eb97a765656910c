"""Removing many ledgers' metadata: several at once, in a state that is asked for, each kept in an undo file before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.errors import BkctlError, Conflict, LedgerNotFound, Unreachable
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster

if TYPE_CHECKING:
    from concurrent.futures import Future

    from bkctl.metadata.store import Versioned

CONCURRENCY: Final = 16


class Removal(NamedTuple):
    """What became of one ledger. `metadata` is what it was; None where it was not there, or cannot be read.

    `error` says why it was not removed; a ledger that was not there has none where that is allowed.
    """

    ledger: LedgerId
    metadata: LedgerMetadata | None
    removed: bool
    error: BkctlError | None = None


class RemovalPlan(NamedTuple):
    """What `plan_removal` found: the ledgers to remove, the bytes of the closed ones, and what stands against it."""

    ledgers: list[LedgerId]
    closed_count: int
    size_bytes: int
    failures: list[Removal]


def check_state(ledger: LedgerId, metadata: LedgerMetadata, states: Collection[str]) -> None:
    """Raises Conflict when the ledger is in none of `states`; none given: any will do."""
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
    """Look at every ledger that is to be removed; each goes to `seen` with its metadata, in the order given.

    A ledger that is given twice counts once. With `keep_missing` one that is not there is no failure, and is left out.
    Memory: the ids.
    """
    ledgers: list[LedgerId] = []
    failures: list[Removal] = []
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
        seen(Removal(ledger, found.metadata, False))
    return RemovalPlan(ledgers, closed_count, size_bytes, failures)


def remove_ledgers(
    cluster: Cluster,
    ids: Iterable[LedgerId],
    *,
    states: Collection[str] = (),
    record: Callable[[LedgerId, str, bytes], None],
    keep_missing: bool = False,
    keep_going: bool = False,
    per_second: int | None = None,
) -> Iterator[Removal]:
    """Remove the ledgers' metadata, and yield what became of each in the order given.

    Each is read again, and removed in the version that was read only, after `record(ledger, path, bytes)` kept it;
    `record` is called from several threads. The first failure is raised once what is under way has ended and was
    yielded; with `keep_going` failures are yielded instead. Raises Unreachable always.
    """
    from concurrent.futures import ThreadPoolExecutor

    def remove(ledger: LedgerId, found: Versioned[bytes] | None) -> Removal:
        metadata: LedgerMetadata | None = None
        try:
            path = cluster.ledgers.path(ledger)
            if found is None:
                cluster.ledgers.read(ledger)  # says that it is not there
                raise Conflict(f"Ledger {ledger} was created just now")
            metadata = LedgerMetadata.parse(found.value, f"ledger {ledger} at {path} in {cluster.store.name}")
            check_state(ledger, metadata, states)
            record(ledger, path, found.value)
            cluster.ledgers.remove(ledger, found.version)
        except LedgerNotFound as error:
            return Removal(ledger, metadata, False, None if keep_missing else error)
        except BkctlError as error:
            return Removal(ledger, metadata, False, error)
        return Removal(ledger, metadata, True)

    def slowly(ledgers: Iterable[LedgerId], count: int) -> Iterator[LedgerId]:
        due = time.monotonic()
        for ledger in ledgers:
            due = max(due + 1 / count, time.monotonic())
            time.sleep(max(due - time.monotonic(), 0))
            yield ledger

    under_way: deque[Future[Removal]] = deque()
    first: BkctlError | None = None

    def next_done() -> Removal:
        nonlocal first
        done = under_way.popleft().result()
        if done.error is not None and first is None and (not keep_going or isinstance(done.error, Unreachable)):
            first = done.error
        return done

    with ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="remove-ledgers") as executor:
        # Reading far ahead would be reading what changes before its turn comes.
        found_ledgers = (
            cluster.ledgers.values(ids)
            if per_second is None
            else ((ledger, cluster.store.get(cluster.ledgers.path(ledger))) for ledger in slowly(ids, per_second))
        )
        for ledger, found in found_ledgers:
            under_way.append(executor.submit(remove, ledger, found))
            if len(under_way) >= CONCURRENCY or (per_second is not None and under_way[0].done()):
                yield next_done()
            if first is not None:
                break
        while under_way:
            yield next_done()
    if first is not None:
        raise first
