"""What is wrong with the metadata itself: what cannot be read, points to nothing or cannot be; and what is nobody's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final, NamedTuple

from bkctl.errors import BkctlError, LedgerNotFound, Unreachable
from bkctl.formats.metadata import LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.admin.nuke import OF_A_CLUSTER
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.ledgers import SCOPES
from bkctl.metadata.store import MetadataStore, Versioned
from bkctl.metadata.underreplication import LedgerUnderreplicationManager, mark_path

#: Ledgers that were opened for recovery so long ago are stuck.
IN_RECOVERY_AGE_S_MAX: Final = 24 * 3600
_DEPTH_MAX: Final = 64


class MetadataFinding(NamedTuple):
    """Something that is wrong. `code` is for scripts and stays the same; `path` is the node, `ledger` whose it is."""

    code: str
    path: str
    ledger: LedgerId | None
    message: str


def check_metadata(
    cluster: Cluster, scope_id: int | None = None, *, progress: Callable[[int], None] = lambda _: None
) -> Iterator[MetadataFinding]:
    """Yield what is wrong with the cluster's nodes, then with each ledger of the scope (None: of all) in order.

    `unparsable`: cannot be read. `dangling`: names a bookie that is neither registered nor has a cookie. `impossible`:
    fields contradict each other. `stuck-in-recovery`: for more than a day. Marks, cookies, layout and the `scopes` tree
    are looked at too. Raises NotFound when there is no cluster, Unreachable. Memory does not grow with the ledgers.
    """
    cluster.layout()
    manager = cluster.ledgers
    yield from _of_cookies(cluster)
    if manager.scopes_state() == "foreign":
        yield MetadataFinding(
            "foreign-scopes", SCOPES, None, "The scopes tree belongs to a cluster that was formatted away"
        )
    known = _KnownBookies(cluster)
    yield from _of_marks(cluster, scope_id)
    now_ms = time.time_ns() // 1_000_000
    for count, (ledger, found) in enumerate(manager.read_many(manager.ledgers(scope_id)), 1):
        if count % 1000 == 0:
            progress(count)
        if isinstance(found, LedgerNotFound):
            continue
        path = manager.path(ledger)
        if isinstance(found, BkctlError):
            yield MetadataFinding("unparsable", path, ledger, str(found))
            continue
        metadata = found.metadata
        for problem in impossibilities(metadata):
            yield MetadataFinding("impossible", path, ledger, problem)
        missing = known.missing({each for fragment in metadata.ensembles for each in fragment.bookies})
        if missing:
            yield MetadataFinding(
                "dangling",
                path,
                ledger,
                f"Names bookies that are neither registered nor have a cookie: {_join(missing)}",
            )
        if (
            metadata.state is LedgerState.IN_RECOVERY
            and found.ctime_ms is not None
            and now_ms - found.ctime_ms > IN_RECOVERY_AGE_S_MAX * 1000
        ):
            yield MetadataFinding(
                "stuck-in-recovery", path, ledger, "It is in recovery, and was created more than a day ago"
            )


class _KnownBookies:
    """Which bookies have a registration or a cookie; asked again for one that was not there, since they come and go."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: set[str] = set()
        self._unknown: set[str] = set()

    def missing(self, bookie_ids: set[str]) -> list[str]:
        """Those of `bookie_ids` that nobody knows, ascending."""
        if not bookie_ids <= self._known | self._unknown:
            self._known.update(bookie.bookie_id for bookie in self._cluster.bookies.list())
            self._unknown = (self._unknown | bookie_ids) - self._known
        return sorted(bookie_ids - self._known)


def impossibilities(metadata: LedgerMetadata) -> Iterator[str]:
    """Yield, in words, which fields of a ledger's metadata contradict each other."""
    ensemble, write, ack = metadata.ensemble_size, metadata.write_quorum_size, metadata.ack_quorum_size
    if not 1 <= ack <= write <= ensemble:
        yield f"Ensemble size {ensemble}, write quorum {write} and ack quorum {ack} do not fit each other"
    if not metadata.ensembles:
        yield "It has no ensemble"
    elif metadata.ensembles[0].first_entry_id != 0:
        yield f"Its first ensemble begins with entry {metadata.ensembles[0].first_entry_id}, not 0"
    for fragment in metadata.ensembles:
        if len(fragment.bookies) != ensemble:
            yield f"The ensemble of entry {fragment.first_entry_id} has {len(fragment.bookies)} bookies of {ensemble}"
        if len(set(fragment.bookies)) != len(fragment.bookies):
            yield f"The ensemble of entry {fragment.first_entry_id} names a bookie twice: {_join(fragment.bookies)}"
    for before, after in pairwise(metadata.ensembles):
        if before.first_entry_id >= after.first_entry_id:
            yield f"The ensemble of entry {after.first_entry_id} follows that of entry {before.first_entry_id}"
    if metadata.state is LedgerState.CLOSED:
        last, length = metadata.last_entry_id, metadata.length
        if last < -1:
            yield f"It is closed, and its last entry is {last}"
        if length < 0 or (last == -1 and length > 0):
            yield f"It is closed with {length} bytes in {last + 1} entries"
        begins = metadata.ensembles[-1].first_entry_id if metadata.ensembles else 0
        if begins > last + 1:
            yield f"It is closed at entry {last}, and has an ensemble from entry {begins} on"


def _of_cookies(cluster: Cluster) -> Iterator[MetadataFinding]:
    instance_id = cluster.instance_id()
    for bookie_id in cluster.cookies.list():
        try:
            found = cluster.cookies.read(bookie_id)
        except Unreachable:
            raise
        except BkctlError as error:
            yield MetadataFinding("unparsable-cookie", f"cookies/{bookie_id}", None, str(error))
            continue
        if found is not None and found.value.instance_id and found.value.instance_id != instance_id:
            yield MetadataFinding(
                "cookie-of-another-cluster", f"cookies/{bookie_id}", None,
                f"It names the instance id {found.value.instance_id}, the cluster is {instance_id}",
            )  # fmt: skip


def _of_marks(cluster: Cluster, scope_id: int | None) -> Iterator[MetadataFinding]:
    unparsable: deque[MetadataFinding] = deque()

    def marked() -> Iterator[LedgerId]:
        for ledger, found in LedgerUnderreplicationManager(cluster.store).list(scope_id):
            if isinstance(found, BkctlError):
                unparsable.append(MetadataFinding("unparsable-mark", mark_path(ledger), ledger, str(found)))
            else:
                yield ledger

    for ledger, found in cluster.ledgers.read_many(marked()):
        while unparsable:
            yield unparsable.popleft()
        if isinstance(found, LedgerNotFound):  # other damage is told with the ledger itself
            yield MetadataFinding("orphaned-mark", mark_path(ledger), ledger, "Marked as under-replicated, but deleted")
    yield from unparsable


# --- what is nobody's -----------------------------------------------------------------------------------------------


class Orphan(NamedTuple):
    """A node that belongs to nothing any more. `removable`: nobody misses it; else somebody should look first.

    `node_count` is how many nodes are there with all below it, the node itself included.
    """

    code: str
    path: str
    ledger: LedgerId | None
    node_count: int
    removable: bool
    message: str


def orphans(cluster: Cluster) -> Iterator[Orphan]:
    """Yield nodes that belong to nothing: marks of deleted ledgers, a scopes tree of another cluster, cookies of
    bookies that are down and hold no ledger, and nodes in the root that are no part of a cluster.

    Reads the metadata of every ledger, if a bookie is down. Raises as `check_metadata`.
    """
    cluster.layout()
    store, manager = cluster.store, cluster.ledgers
    if manager.scopes_state() == "foreign":
        yield Orphan(
            "foreign-scopes", SCOPES, None, _count(store, SCOPES), True,
            "Scoped ledgers of a cluster that was formatted away; their entries are of no use to this one",
        )  # fmt: skip
    marked = (ledger for ledger, _ in LedgerUnderreplicationManager(store).list(None))
    for ledger, found in manager.read_many(marked):
        if isinstance(found, LedgerNotFound) and not (ledger.is_scoped and manager.scopes_state() != "ours"):
            yield Orphan("orphaned-mark", mark_path(ledger), ledger, 1, True, "Marked as under-replicated, but deleted")
    down = {bookie.bookie_id for bookie in cluster.bookies.list() if bookie.state == "down"}
    if down:
        unreadable = 0
        for _, found in manager.read_many(manager.ledgers(None)):
            if isinstance(found, LedgerNotFound):
                continue
            if isinstance(found, BkctlError):
                unreadable += 1
                continue
            down.difference_update(each for fragment in found.metadata.ensembles for each in fragment.bookies)
        for bookie_id in sorted(down):
            message = "Its bookie is down, and no ledger has an ensemble with it"
            if unreadable:
                message += f" ({unreadable:,} ledgers cannot be read)"
            yield Orphan("unused-cookie", f"cookies/{bookie_id}", None, 1, False, message)
    for name in store.children("") or ():
        if not OF_A_CLUSTER.fullmatch(name):
            yield Orphan("unknown-node", name, None, _count(store, name), False, "No part of a BookKeeper cluster")


def remove_orphan(cluster: Cluster, orphan: Orphan, record: Callable[[str, bytes | None, bytes | None], None]) -> None:
    """Remove a removable orphan with all below it, each node after `record(path, before, None)`."""
    store = cluster.store
    if orphan.code == "orphaned-mark":
        assert orphan.ledger is not None
        found = store.get(orphan.path)
        if found is not None:
            record(orphan.path, found.value, None)
            LedgerUnderreplicationManager(store).unmark(orphan.ledger, found.version)
        return
    for path in _leaves_first(store, orphan.path):
        value = store.get(path)
        if value is not None:
            record(path, value.value, None)
            store.delete(path, value.version)


def _leaves_first(store: MetadataStore, path: str, depth: int = 0) -> Iterator[str]:
    if depth < _DEPTH_MAX:
        for name in store.children(path) or ():
            yield from _leaves_first(store, f"{path}/{name}", depth + 1)
    yield path


def _count(store: MetadataStore, path: str) -> int:
    count = 1
    level = [path]
    for _ in range(_DEPTH_MAX):
        names = zip(level, store.children_many(level), strict=True)
        level = [f"{place}/{name}" for place, found in names for name in found or ()]
        count += len(level)
        if not level:
            break
    return count


def _join(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names)


# --- another bookie in every ensemble -------------------------------------------------------------------------------


class Replacement(NamedTuple):
    """What became of one ledger that names the bookie. `problem` says why it was left as it is; None: it was not."""

    ledger: LedgerId
    fragment_count: int
    problem: str | None


def replace_bookie(
    cluster: Cluster,
    old: str,
    new: str,
    *,
    record: Callable[[str, bytes | None, bytes | None], None],
    per_second: float | None = None,
    limit: int | None = None,
    dry_run: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[Replacement]:
    """Put the bookie id `new` for `old` into the metadata of every ledger of every scope, by compare-and-set.

    Yields each ledger that names `old`; one whose ensemble has `new` already, or whose metadata cannot be read, is left
    as it is. Each change goes to `record(path, before, after)` first. At most `limit` ledgers change, `per_second` of
    them a second. What was stopped is finished by doing it again. Raises Unreachable.
    Source: UpdateLedgerOp, SearchReplaceBookieIdCommand.
    """
    manager = cluster.ledgers
    changed = 0
    due = time.monotonic()
    for count, (ledger, found) in enumerate(manager.read_many(manager.ledgers(None)), 1):
        if count % 1000 == 0:
            progress(count)
        if isinstance(found, LedgerNotFound):
            continue
        if isinstance(found, BkctlError):
            yield Replacement(ledger, 0, str(found))
            continue
        if not any(old in fragment.bookies for fragment in found.metadata.ensembles):
            continue
        if limit is not None and changed >= limit:
            return
        planned = _replaced(ledger, found.metadata, old, new)[1]
        if dry_run or planned.problem is not None:
            changed += planned.problem is None
            yield planned
            continue
        if per_second is not None:
            due = max(due, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            due += 1 / per_second
        outcome = _replace_in(cluster, ledger, old, new, record)
        changed += outcome.problem is None
        yield outcome


def _replace_in(
    cluster: Cluster, ledger: LedgerId, old: str, new: str, record: Callable[[str, bytes | None, bytes | None], None]
) -> Replacement:
    from bkctl.errors import MetadataVersionConflict

    manager = cluster.ledgers
    path = manager.path(ledger)
    while True:
        raw: Versioned[bytes] | None = cluster.store.get(path)
        if raw is None:
            return Replacement(ledger, 0, "It was deleted meanwhile")
        metadata = LedgerMetadata.parse(raw.value, f"ledger {ledger} at {path}")
        updated, outcome = _replaced(ledger, metadata, old, new)
        if outcome.problem is not None or outcome.fragment_count == 0:
            return outcome
        record(path, raw.value, updated.serialize())
        try:
            manager.write(ledger, updated, raw.version)
        except MetadataVersionConflict:
            continue
        except LedgerNotFound:
            return Replacement(ledger, 0, "It was deleted meanwhile")
        return outcome


def _replaced(ledger: LedgerId, metadata: LedgerMetadata, old: str, new: str) -> tuple[LedgerMetadata, Replacement]:
    from dataclasses import replace

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
        bookies = tuple(new if each == old else each for each in fragment.bookies)
        ensembles.append(fragment._replace(bookies=bookies))
    return replace(metadata, ensembles=tuple(ensembles), c_token=0 if metadata.format_version > 2 else None), (
        Replacement(ledger, count, None)
    )
