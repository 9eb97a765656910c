"""Find metadata that is unreadable, dangling or impossible, and remove nodes that belong to nothing any more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, takewhile, tee
from typing import Final, NamedTuple

from bkctl.errors import BkctlError, Conflict, LedgerNotFound, Unauthorized
from bkctl.formats.metadata import LedgerMetadata, LedgerState
from bkctl.ids import I64_MAX, U64_MAX, LedgerId, is_bookie_id
from bkctl.metadata.admin.nuke import foreign_nodes
from bkctl.metadata.admin.overview import walk
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.ledgers import LEDGERS, SCOPES, QualifiedNameLedgerManager, VersionedMetadata
from bkctl.metadata.store import INVALID_NAMES_MAX, MetadataStore, Versioned, attempt, names_in
from bkctl.metadata.underreplication import UNDERREPLICATION, LedgerMarks, mark_path

#: Older ledgers in recovery count as stuck.
IN_RECOVERY_AGE_S_MAX: Final = 24 * 3600
_INVALID_NAME: Final = "Its name is invalid, so commands leave it out; remove it with the store's own client"
_FOREIGN_SCOPES: Final = f"{SCOPES} names another instance id: the cluster was formatted, or INSTANCEID is lost"


class MetadataFinding(NamedTuple):
    """One problem. `code` is stable, for scripts; `path` names the node, `ledger` its ledger, None for other nodes."""

    code: str
    path: str
    ledger: LedgerId | None
    message: str


def check_metadata(
    cluster: Cluster,
    scope_id: int | None = None,
    misplacement: Callable[[LedgerMetadata], str | None] = lambda _: None,
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[MetadataFinding]:
    """Yield the problems of the cluster's nodes, then of each ledger of the scope (None: of all scopes) in order.

    `refused`: this user may not read it. `unparsable`: no metadata can be read. `dangling`: names a bookie that is not
    registered and has no cookie. `impossible`: fields contradict each other. `stuck-in-recovery`: for more than a day.
    `misplaced`: as `misplacement` says. Marks, cookies, layout and the `scopes` tree are checked too. `invalid-name`
    comes last: nodes that commands leave out, because no path can name them or no ledger of scope 0 has their id, and
    registrations that are not of a bookie id. Raises NotFound without a cluster, Unreachable. Memory does not grow with
    the ledgers.
    """
    cluster.layout()
    manager = cluster.ledgers
    yield from _check_cookies(cluster)
    for path in manager.unlisted():
        if path == SCOPES:
            yield MetadataFinding("foreign-scopes", path, None, _FOREIGN_SCOPES)
        else:
            yield MetadataFinding("other-layout", path, None, "A ledger of another layout: LAYOUT is missing or wrong")
    bookies = _BookieLookup(cluster)
    yield from _check_marks(cluster, scope_id)
    now_ms = time.time_ns() // 1_000_000
    for count, (ledger, found) in enumerate(manager.read_many(manager.ledgers(scope_id)), 1):
        progress(count)
        if isinstance(found, LedgerNotFound):
            continue
        path = manager.path(ledger)
        if isinstance(found, BkctlError):
            yield MetadataFinding(_code(found, "unparsable"), path, ledger, str(found))
            continue
        problems = list(_ledger_problems(found, bookies, now_ms))
        if all(code != "impossible" for code, _ in problems) and (reason := misplacement(found.metadata)) is not None:
            problems.append(("misplaced", reason))
        for code, problem in problems:
            yield MetadataFinding(code, path, ledger, problem)
    places, store = cluster.places, cluster.store
    for directory in (places.writable, places.read_only):
        for name in names_in(store, directory):
            if not is_bookie_id(name) and f"{directory}/{name}" != places.read_only:
                yield MetadataFinding("invalid-name", f"{directory}/{name}", None, _INVALID_NAME)
    if isinstance(manager, QualifiedNameLedgerManager):
        after, last = (manager.path(LedgerId(0, number)).removeprefix(f"{LEDGERS}/") for number in (I64_MAX, U64_MAX))
        names = store.children(LEDGERS, after=after, limit=INVALID_NAMES_MAX) or ()
        for name in takewhile(last.__ge__, names):
            yield MetadataFinding("invalid-name", f"{LEDGERS}/{name}", None, _INVALID_NAME)
    deque(store.children_many(("", f"{UNDERREPLICATION}/locks")), 0)
    store.children(LEDGERS, limit=1)  # names before the ledgers, which listings pass over
    for path in store.invalid_names:
        yield MetadataFinding("invalid-name", path, None, _INVALID_NAME)


def _ledger_problems(found: VersionedMetadata, bookies: _BookieLookup, now_ms: int) -> Iterator[tuple[str, str]]:
    """Yield the code and the description of each problem of a ledger's metadata."""
    metadata = found.metadata
    for problem in impossibilities(metadata):
        yield "impossible", problem
    missing = bookies.missing({bookie_id for fragment in metadata.ensembles for bookie_id in fragment.bookies})
    if missing:
        yield "dangling", f"Names bookies that are neither registered nor have a cookie: {', '.join(missing)}"
    is_old = found.ctime_ms is not None and now_ms - found.ctime_ms > IN_RECOVERY_AGE_S_MAX * 1000
    if metadata.state is LedgerState.IN_RECOVERY and is_old:
        yield "stuck-in-recovery", "It is in recovery, and was created more than a day ago"


class _BookieLookup:
    """Bookies with a registration or a cookie; missing ones are looked up again, since bookies come and go."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: set[str] = set()
        self._unknown: set[str] = set()

    def missing(self, bookie_ids: set[str]) -> list[str]:
        """Return the members of `bookie_ids` without a registration or cookie, ascending."""
        if not bookie_ids <= self._known | self._unknown:
            self._known.update(bookie.bookie_id for bookie in self._cluster.bookies.list())
            self._unknown = (self._unknown | bookie_ids) - self._known
        return sorted(bookie_ids - self._known)


def impossibilities(metadata: LedgerMetadata) -> Iterator[str]:
    """Yield a description of each contradiction between fields of a ledger's metadata."""
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
            yield f"The ensemble of entry {fragment.first_entry_id} names a bookie twice: {', '.join(fragment.bookies)}"
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


def _check_cookies(cluster: Cluster) -> Iterator[MetadataFinding]:
    instance_id = cluster.instance_id()
    for bookie_id in cluster.cookies.list():
        found = attempt(cluster.cookies.read, bookie_id)
        if isinstance(found, BkctlError):
            yield MetadataFinding("unparsable-cookie", f"cookies/{bookie_id}", None, str(found))
        elif found and found.value.instance_id and instance_id not in ("", found.value.instance_id):
            yield MetadataFinding(
                "cookie-of-another-cluster", f"cookies/{bookie_id}", None,
                f"It names the instance id {found.value.instance_id}, the cluster is {instance_id}",
            )  # fmt: skip


def _check_marks(cluster: Cluster, scope_id: int | None) -> Iterator[MetadataFinding]:
    marks, asked = tee(LedgerMarks(cluster.store).list(scope_id))
    ledgers = cluster.ledgers.read_many(ledger for ledger, mark in asked if not isinstance(mark, BkctlError))
    for ledger, mark in marks:
        if isinstance(mark, BkctlError):
            yield MetadataFinding(_code(mark, "unparsable-mark"), mark_path(ledger), ledger, str(mark))
        elif isinstance(next(ledgers)[1], LedgerNotFound):  # other damage is reported with the ledger itself
            yield MetadataFinding("orphaned-mark", mark_path(ledger), ledger, "Marked as under-replicated, but deleted")


def _code(error: BkctlError, code: str) -> str:
    return "refused" if isinstance(error, Unauthorized) else code


_DEPTH_MAX: Final = 64


class Orphan(NamedTuple):
    """A node that belongs to nothing any more. `removable`: certainly unused; else an operator decides.

    `node_count` is the number of nodes at and below it.
    """

    code: str
    path: str
    ledger: LedgerId | None
    node_count: int
    removable: bool
    message: str


def orphans(cluster: Cluster) -> Iterator[Orphan]:
    """Yield the nodes that belong to nothing.

    These are marks of deleted ledgers, a scopes tree of another cluster, cookies of bookies that are down and hold no
    ledger, and foreign nodes in the root. Reads the metadata of every ledger, if a bookie is down. Raises NotFound
    without a cluster, Unreachable.
    """
    cluster.layout()
    store, manager = cluster.store, cluster.ledgers
    if manager.scopes_state() == "foreign":
        yield Orphan("foreign-scopes", SCOPES, None, _count(store, SCOPES), _is_formatted(cluster), _FOREIGN_SCOPES)
    marks = LedgerMarks(store)
    marks.check()
    marked, asked = tee(marks.places(None))
    read = manager.read_many(ledger for _, ledger in asked)
    for (path, ledger), (_, found) in zip(marked, read, strict=True):
        if isinstance(found, LedgerNotFound) and not (ledger.is_scoped and manager.scopes_state() != "ours"):
            yield Orphan("orphaned-mark", path, ledger, 1, True, "Marked as under-replicated, but deleted")
    down = {bookie.bookie_id for bookie in cluster.bookies.list() if bookie.state == "down"}
    if down:
        unreadable = 0
        for _, found in manager.read_many(manager.ledgers(None)):
            if isinstance(found, LedgerNotFound):
                continue
            if isinstance(found, BkctlError):
                unreadable += 1
                continue
            down.difference_update(*(fragment.bookies for fragment in found.metadata.ensembles))
        for bookie_id in sorted(down):
            message = "Its bookie is down, and no ledger has an ensemble with it"
            if unreadable:
                message += f" ({unreadable:,} ledgers cannot be read)"
            yield Orphan("unused-cookie", f"cookies/{bookie_id}", None, 1, False, message)
    for name in foreign_nodes(cluster, store.children("") or ()):
        yield Orphan("unknown-node", name, None, _count(store, name), False, "No part of this BookKeeper cluster")


def _is_formatted(cluster: Cluster) -> bool:
    """Return whether the scopes tree names another cluster than the bookies: else INSTANCEID may be lost or damaged."""
    scopes = cluster.store.get(SCOPES)
    found = [attempt(cluster.cookies.read, bookie_id) for bookie_id in cluster.cookies.list()]
    if any(isinstance(each, BkctlError) for each in found) or scopes is None or not cluster.instance_id():
        return False
    return all((each.value.instance_id or "").encode() != scopes.value for each in found if isinstance(each, Versioned))


def remove_orphans(cluster: Cluster, orphans: Iterable[Orphan]) -> int:
    """Remove removable orphans, and all nodes below them; return the number of orphans that still existed.

    Raises Conflict if scopes are the cluster's by now.
    """
    store, count = cluster.store, 0
    for orphan in orphans:
        if orphan.path == SCOPES and cluster.ledgers.scopes_state() == "ours":
            raise Conflict(f"{SCOPES} has ledgers of this cluster by now, and stays", hint="list the orphans again")
        # The directories of a mark are its own.
        prune = 0 if orphan.ledger is None else 8 if orphan.ledger.is_scoped else 4
        for path in _leaves_first(store, orphan.path):
            found = store.get(path)
            if found is not None:
                store.delete(path, found.version, prune=prune)
                count += path == orphan.path
    return count


def _leaves_first(store: MetadataStore, path: str, depth: int = 0) -> Iterator[str]:
    if depth < _DEPTH_MAX:
        for name in store.children(path) or ():
            yield from _leaves_first(store, f"{path}/{name}", depth + 1)
    yield path


def _count(store: MetadataStore, path: str) -> int:
    found = attempt(lambda: sum(1 for _ in walk(store, path)))
    return 1 if isinstance(found, BkctlError) else found  # It was deleted meanwhile.
