"""Find nodes that no longer belong to anything, and remove the nodes that are certainly unused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from bkctl.errors import BkctlError, LedgerNotFound
from bkctl.ids import LedgerId
from bkctl.metadata.admin.nuke import CLUSTER_NODE
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.ledgers import SCOPES
from bkctl.metadata.store import MetadataStore
from bkctl.metadata.underreplication import LedgerMarks, mark_path

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
        yield Orphan(
            "foreign-scopes", SCOPES, None, _count(store, SCOPES), True,
            "Scoped ledgers of a cluster that was formatted; this cluster cannot read their entries",
        )  # fmt: skip
    marked = (ledger for ledger, _ in LedgerMarks(store).list(None))
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
            down.difference_update(*(fragment.bookies for fragment in found.metadata.ensembles))
        for bookie_id in sorted(down):
            message = "Its bookie is down, and no ledger has an ensemble with it"
            if unreadable:
                message += f" ({unreadable:,} ledgers cannot be read)"
            yield Orphan("unused-cookie", f"cookies/{bookie_id}", None, 1, False, message)
    for name in store.children("") or ():
        if not CLUSTER_NODE.fullmatch(name):
            yield Orphan("unknown-node", name, None, _count(store, name), False, "No part of a BookKeeper cluster")


def remove_orphan(cluster: Cluster, orphan: Orphan) -> None:
    """Remove a removable orphan and all nodes below it."""
    store = cluster.store
    if orphan.code == "orphaned-mark":
        assert orphan.ledger is not None
        found = store.get(orphan.path)
        if found is not None:
            LedgerMarks(store).remove(orphan.ledger, found.version)
        return
    for path in _leaves_first(store, orphan.path):
        value = store.get(path)
        if value is not None:
            store.delete(path, value.version)


def remove_orphans(cluster: Cluster, orphans: Iterable[Orphan]) -> None:
    """Remove removable orphans."""
    for orphan in orphans:
        remove_orphan(cluster, orphan)


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
