"""Summaries of a cluster: counts of its bookies, its auditor, the tree of its nodes, its ledgers by query.

Source: ClusterInfoService.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from bkctl.errors import BkctlError, LedgerNotFound, NotFound
from bkctl.formats.metadata import LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.admin.auto_recovery import why_not_audited
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.ledger_columns import LedgerRow, ledger_rows
from bkctl.metadata.ledgers import ReadLedgers, VersionedMetadata
from bkctl.metadata.pulsar_topics import TopicFilter
from bkctl.metadata.store import MetadataStore, Versioned, attempt
from bkctl.metadata.underreplication import AuditorElection, AutoRecoverySettings, LedgerMarks

TREE_DEPTH_MAX: Final = 64


class ClusterInfo(NamedTuple):
    """The state of a cluster. `auditor_id` is None where no auditor is elected; bookie counts are by registration."""

    metadata_uri: str
    instance_id: str
    factory_class: str
    bookie_count: int
    writable_count: int
    read_only_count: int
    down_count: int
    scopes_count: int
    auditor_id: str | None
    #: None: not known, since no auditor looks for lost replicas.
    underreplicated: bool | None
    replication_enabled: bool

    @property
    def auditor_elected(self) -> bool:
        return self.auditor_id is not None


def cluster_info(cluster: Cluster) -> ClusterInfo:
    """Return the present state of the cluster by its metadata store. Raises NotFound without a cluster."""
    store = cluster.store
    layout = cluster.layout()
    bookies = cluster.bookies.list()
    states = Counter(bookie.state for bookie in bookies)
    return ClusterInfo(
        metadata_uri=cluster.uri,
        instance_id=cluster.instance_id(),
        factory_class=layout.factory_class,
        bookie_count=len(bookies),
        writable_count=states["rw"],
        read_only_count=states["ro"],
        down_count=states["down"],
        scopes_count=sum(bookie.ledger_scopes for bookie in bookies),
        auditor_id=None if isinstance(auditor := attempt(AuditorElection(store).auditor), BkctlError) else auditor,
        underreplicated=LedgerMarks(store).has_marks() or (None if attempt(why_not_audited, cluster) else False),
        replication_enabled=AutoRecoverySettings(store).is_enabled(),
    )


class Node(NamedTuple):
    """One node of the tree below a path.

    `lasts` says, for the node and each ancestor below the start, if it is the last of its siblings; empty for the start
    itself. `found` is None for a node deleted meanwhile.
    """

    path: str
    lasts: tuple[bool, ...]
    found: Versioned[bytes] | None

    @property
    def name(self) -> str:
        """The last part of the path; "" for the root."""
        return self.path.rpartition("/")[2]


def walk(store: MetadataStore, path: str = "", *, depth: int | None = None) -> Iterator[Node]:
    """Yield the node at `path` and all below it, parents first, siblings in ascending order; `depth` limits the levels.

    Raises NotFound for a missing node at `path`.
    """
    found = store.get(path)
    if found is None:
        raise NotFound(f"No node {path!r} in {store.name}", hint="'bkctl metadata tree' lists the nodes")
    yield from _walk_from(store, Node(path, (), found), TREE_DEPTH_MAX if depth is None else depth)


def _walk_from(store: MetadataStore, node: Node, depth: int) -> Iterator[Node]:
    yield node
    names = store.children(node.path) or [] if depth else []
    paths = [f"{node.path}/{name}" if node.path else name for name in names]
    for index, (path, found) in enumerate(zip(paths, store.get_many(paths), strict=True), 1):
        yield from _walk_from(store, Node(path, (*node.lasts, index == len(paths)), found), depth - 1)


class SubtreeTotal(NamedTuple):
    """A node, and the number and value bytes of the nodes from it downward."""

    node: Node
    node_count: int
    size_bytes: int

    @property
    def path(self) -> str:
        return self.node.path


def subtree_totals(
    store: MetadataStore, path: str = "", *, depth: int | None = None, progress: Callable[[int], None] = lambda _: None
) -> Iterator[SubtreeTotal]:
    """Yield the totals of the nodes that `walk` yields with `depth`, in the same order.

    Memory: the nodes down to `depth`. `progress` gets the number of nodes read so far. Raises as `walk`.
    """
    totals: list[SubtreeTotal] = []
    above: list[int] = []  # places in `totals` of the last node and its ancestors, by level
    for number, node in enumerate(walk(store, path), 1):
        progress(number)
        level = len(node.lasts)
        del above[level:]
        if depth is None or level <= depth:
            above.append(len(totals))
            totals.append(SubtreeTotal(node, 0, 0))
        size_bytes = 0 if node.found is None else len(node.found.value)
        for at in above:
            total = totals[at]
            totals[at] = SubtreeTotal(total.node, total.node_count + 1, total.size_bytes + size_bytes)
    yield from totals


class LedgerQuery(NamedTuple):
    """Conditions on ledgers; None: no condition. Ages are in seconds since the creation, where it is known.

    A key of custom metadata with None is met by any value.
    """

    bookie_id: str | None = None
    states: frozenset[str] = frozenset()
    age_s_min: float | None = None
    age_s_max: float | None = None
    size_bytes_min: int | None = None
    size_bytes_max: int | None = None
    custom_metadata: tuple[tuple[str, bytes | None], ...] = ()
    topic: TopicFilter | None = None

    @property
    def needs_metadata(self) -> bool:
        """True if ids alone do not answer the query."""
        return self != LedgerQuery()

    def matches(self, found: VersionedMetadata, now_ms: int) -> bool:
        """Return whether the ledger meets the conditions. A ledger of unknown age meets none on the age."""
        metadata = found.metadata
        age_s = None if found.ctime_ms is None else (now_ms - found.ctime_ms) / 1000
        return (
            (not self.states or metadata.state.name in self.states)
            and (self.age_s_min is None or (age_s is not None and age_s >= self.age_s_min))
            and (self.age_s_max is None or (age_s is not None and age_s <= self.age_s_max))
            and (self.size_bytes_min is None or metadata.length >= self.size_bytes_min)
            and (self.size_bytes_max is None or metadata.length <= self.size_bytes_max)
            and all(
                key in metadata.custom_metadata and value in (None, metadata.custom_metadata[key])
                for key, value in self.custom_metadata
            )
            and (self.topic is None or self.topic.matches(metadata.custom_metadata))
            and (self.bookie_id is None or any(self.bookie_id in fragment.bookies for fragment in metadata.ensembles))
        )


NO_QUERY: Final = LedgerQuery()


def list_ledgers(
    cluster: Cluster,
    scope_id: int | None = 0,
    *,
    after: LedgerId | None = None,
    ids: Iterable[LedgerId] | None = None,
    query: LedgerQuery = NO_QUERY,
    unreadable: Callable[[LedgerId, BkctlError], None] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[LedgerId, VersionedMetadata]]:
    """Yield the ledgers of a scope (None: all) in order, with their metadata; ledgers deleted meanwhile are left out.

    `ids` are the ledgers to read instead.
    Errors of unreadable metadata go to `unreadable`; without it they are raised. `progress` gets the number of ledgers
    read.
    """
    wanted = cluster.ledgers.ledgers(scope_id, after) if ids is None else ids
    yield from chosen(cluster.ledgers.read_many(wanted), query, unreadable, progress)


def chosen(
    ledgers: Iterable[tuple[LedgerId, VersionedMetadata | BkctlError]],
    query: LedgerQuery,
    unreadable: Callable[[LedgerId, BkctlError], None] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[LedgerId, VersionedMetadata]]:
    """Yield the ledgers that `query` finds among those that were read; see `list_ledgers`."""
    now_ms = time.time_ns() // 1_000_000
    finds_all = not query.needs_metadata
    for count, (ledger, found) in enumerate(ledgers, 1):
        progress(count)
        if isinstance(found, VersionedMetadata):
            if finds_all or query.matches(found, now_ms):
                yield ledger, found
        elif not isinstance(found, LedgerNotFound):
            if unreadable is None:
                raise found
            unreadable(ledger, found)


@dataclass
class LedgerListing:
    """The ledgers of a scope (None: all) that a query finds, in order, up to `limit`.

    `skip` gets each new error of unreadable metadata, which is raised without it. `progress` gets the number of ledgers
    read, `found` of those that the query found.
    """

    cluster: Cluster
    scope_id: int | None
    query: LedgerQuery
    _: KW_ONLY
    after: LedgerId | None = None
    limit: int | None = None
    skip: Callable[[BkctlError], None] | None = None
    progress: Callable[[int], None] = lambda _: None
    found: Callable[[int], None] = lambda _: None
    found_count: int = field(default=0, init=False)
    #: Ledgers whose metadata could not be read → the error.
    unreadable: dict[LedgerId, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._counts = self.query.needs_metadata

    def ids(self) -> Iterator[LedgerId]:
        """Yield the ids; without a query they are known without metadata."""
        if self.query.needs_metadata:
            return (ledger for ledger, _ in self._ledgers())
        return islice(self.cluster.ledgers.ledgers(self.scope_id, self.after), self.limit)

    def rows(self) -> Iterator[LedgerRow]:
        """Yield the rows. Raises as `check_bookie` behind them."""
        return ledger_rows(self._ledgers())

    def batches(self) -> Iterator[ReadLedgers]:
        """Yield all ledgers as they are read, whatever the query and `limit`.

        The caller takes `rows_of` each, or finds its ledgers elsewhere and calls `count`; then it calls `check_bookie`.
        The first batches are small, so that a list begins at once.
        """
        done = 0
        for batch in self.cluster.ledgers.read_batches(self.cluster.ledgers.ledgers(self.scope_id, self.after)):
            done += len(batch.ledgers)
            self.progress(done)
            yield batch

    def rows_of(self, batch: ReadLedgers) -> Iterator[LedgerRow]:
        """Yield the rows of one of `batches`, and count them."""
        unreadable = None if self.skip is None else self._note_unreadable
        return ledger_rows(self._counted(chosen(self.cluster.ledgers.parse_each(batch), self.query, unreadable)))

    def _ledgers(self) -> Iterator[tuple[LedgerId, VersionedMetadata]]:
        found = list_ledgers(
            self.cluster, self.scope_id, after=self.after, query=self.query,
            unreadable=None if self.skip is None else self._note_unreadable, progress=self.progress,
        )  # fmt: skip
        self.found_count = 0
        yield from self._counted(islice(found, self.limit))
        self.check_bookie()

    def _note_unreadable(self, ledger: LedgerId, error: BkctlError) -> None:
        if self.unreadable.get(ledger) != str(error) and self.skip is not None:
            self.skip(error)
        self.unreadable[ledger] = str(error)

    def _counted(
        self, ledgers: Iterator[tuple[LedgerId, VersionedMetadata]]
    ) -> Iterator[tuple[LedgerId, VersionedMetadata]]:
        if not self._counts:
            yield from ledgers
            return
        for each in ledgers:
            self.count(1)
            yield each

    def count(self, ledgers: int) -> None:
        """Count ledgers that the query found, if there is one."""
        if self._counts:
            self.found_count += ledgers
            self.found(self.found_count)

    def check_bookie(self) -> None:
        """Raise NotFound if no ledger is found, each was read, and the bookie of the query is unknown."""
        bookie_id = self.query.bookie_id
        if self.found_count or self.unreadable or bookie_id is None:
            return
        if self.cluster.bookies.get(bookie_id) is None:
            raise NotFound(
                f"No bookie {bookie_id}, and no such ledger names it", hint="'bkctl bookies list' shows them"
            )


class ApplicationRow(NamedTuple):
    """The ledgers of one application; None: of ledgers without the name of one. The sizes are of closed ledgers."""

    application: str | None
    ledger_count: int
    size_bytes: int
    biggest: LedgerId
    biggest_size_bytes: int


def ledgers_by_application(listing: LedgerListing) -> list[ApplicationRow]:
    """Return a row for each application that the custom metadata of the ledgers names, the most bytes first."""
    found: dict[str | None, ApplicationRow] = {}
    for ledger, metadata, *_ in listing.rows():
        name = metadata.custom_metadata.get("application")
        application = None if name is None else name.decode("utf-8", "backslashreplace")
        size = max(metadata.length, 0)
        _, count, total, biggest, most = found.get(application, ApplicationRow(application, 0, 0, ledger, size))
        biggest, most = (ledger, size) if size > most else (biggest, most)
        found[application] = ApplicationRow(application, count + 1, total + size, biggest, most)
    return sorted(found.values(), key=lambda row: row.size_bytes, reverse=True)


class ScopeRow(NamedTuple):
    """A scope and the number of its ledgers."""

    scope_id: int
    ledger_count: int


def scope_counts(cluster: Cluster) -> Iterator[ScopeRow]:
    """Yield the scopes that have ledgers, and scope 0, in order."""
    scope_id = count = 0
    for ledger in cluster.ledgers.ledgers(None):
        if ledger.scope_id != scope_id:
            yield ScopeRow(scope_id, count)
            scope_id, count = ledger.scope_id, 0
        count += 1
    yield ScopeRow(scope_id, count)


def count_scopes(cluster: Cluster, scope_id: int | None, limit: int) -> tuple[int, int]:
    """Count up to `limit` scopes besides `scope_id`, and up to `limit` ledgers of every scope."""
    scopes = sum(scope != scope_id for scope in islice(cluster.ledgers.scopes(), limit))
    return scopes, sum(1 for _ in islice(cluster.ledgers.ledgers(None), limit))


class BookieLedgers(NamedTuple):
    """Numbers of ledgers with the bookie in an ensemble, and of unclosed ledgers with it in their last ensemble."""

    ledger_count: int
    open_count: int


def count_ledgers_of_bookies(cluster: Cluster, limit: int | None) -> Counter[str] | None:
    """Count the ledgers of every scope on each bookie; None if there are more than `limit` ledgers.

    Ledgers with unreadable metadata do not count: `metadata check` finds them.
    """
    if limit is not None and len(list(islice(cluster.ledgers.ledgers(None), limit + 1))) > limit:
        return None
    return _holdings(list_ledgers(cluster, None, unreadable=lambda *_: None))[0]


def ledgers_of_bookies(cluster: Cluster, bookie_ids: Collection[str]) -> dict[str, BookieLedgers]:
    """Count the ledgers of every scope on each of `bookie_ids`, in one pass over all metadata.

    Raises the error of unreadable metadata.
    """
    ledgers, growing = _holdings(list_ledgers(cluster, None))
    return {bookie_id: BookieLedgers(ledgers[bookie_id], growing[bookie_id]) for bookie_id in bookie_ids}


def _holdings(found: Iterable[tuple[LedgerId, VersionedMetadata]]) -> tuple[Counter[str], Counter[str]]:
    """Count ledgers by the bookies in their ensembles, and unclosed ones by those in their last ensembles."""
    ledgers, growing = Counter[str](), Counter[str]()
    for _, (metadata, _, _) in found:
        ledgers.update({bookie_id for fragment in metadata.ensembles for bookie_id in fragment.bookies})
        if metadata.state is not LedgerState.CLOSED and metadata.ensembles:
            growing.update(set(metadata.last_fragment.bookies))
    return ledgers, growing
