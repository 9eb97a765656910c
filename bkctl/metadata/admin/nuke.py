"""Remove a cluster from its metadata store, and nothing beside it.

Source: ZKRegistrationManager.nukeExistingCluster, AbstractZkLedgerManagerFactory.validateAndNukeExistingCluster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from bkctl.columns import some_of
from bkctl.errors import Conflict, NotFound
from bkctl.ids import is_bookie_id
from bkctl.metadata.admin.overview import scope_counts
from bkctl.metadata.cluster import COOKIES, Cluster
from bkctl.metadata.ledgers import LEDGERS, SCOPES, QualifiedNameLedgerManager
from bkctl.metadata.store import delete_if_present, names_in

#: Names of a cluster's nodes in its root: Apache's and ours in every kind of store, then what each kind adds.
_NODES: Final = "available|cookies|LAYOUT|INSTANCEID|underreplication|idgen|idgen-long|ID-?[0-9]*|disableHealthCheck"
_NODES_OF: Final = {
    "zk": "scopes|[0-9]{2,3}|L[0-9]{10,19}",  # the tree of each layout
    "hbase": "ledgers",
    "sqlite": "ledgers|sequences|bookies",
    "etcd": "ledgers|layout|instanceid|bookies|writable|readonly|buckets|hierarchical",
}
_DEPTH_MAX: Final = 64
_CONCURRENCY: Final = 16
_BATCH_SIZE: Final = 1000


class NukePlan(NamedTuple):
    """The cluster that a nuke would remove: its instance id, and the numbers of its ledgers, scopes ≠ 0 and cookies.

    `foreign_scopes`: it would also remove, uncounted, the scoped ledgers of a cluster that was formatted since.
    """

    instance_id: str
    ledger_count: int
    scope_count: int
    cookie_count: int
    foreign_scopes: bool


def plan_nuke(cluster: Cluster) -> NukePlan:
    """Return what `nuke` would remove.

    Raises Conflict while bookies are registered, or for foreign nodes in the root; NotFound without a cluster.
    """
    names = _refuse(cluster)
    # An interrupted nuke left nothing below the nodes that it removed.
    has_ledgers = LEDGERS in names or not isinstance(cluster.ledgers, QualifiedNameLedgerManager)
    counts = list(scope_counts(cluster)) if has_ledgers else []
    return NukePlan(
        cluster.instance_id(),
        sum(row.ledger_count for row in counts),
        sum(row.scope_id != 0 for row in counts),
        len(cluster.cookies.list()) if COOKIES in names else 0,
        cluster.ledgers.scopes_state() == "foreign",
    )


def _refuse(cluster: Cluster) -> list[str]:
    """Return the names of the nodes in the root. Raises as `plan_nuke`."""
    cluster.layout()
    names = names_in(cluster.store, "")
    # An interrupted run may have removed one of the two.
    listed = cluster.store.children_many((cluster.places.writable, cluster.places.read_only))
    registered = sorted({name for each in listed for name in each or () if is_bookie_id(name)})
    if registered:
        raise Conflict(
            f"{len(registered):,} bookies are registered in {cluster.store.name}: {some_of(registered)}",
            hint="stop every bookie first",
        )
    if unknown := foreign_nodes(cluster, names):
        raise Conflict(
            f"{cluster.uri} also holds nodes that do not belong to a cluster: {some_of(unknown)}",
            hint="check the path at the end of the metadata URI",
        )
    if other := [path for path in cluster.ledgers.unlisted() if path != SCOPES]:
        raise Conflict(
            f"{cluster.uri} also holds ledgers of another layout: {some_of(other)}",
            hint="'bkctl metadata check' says more",
        )
    return names


def foreign_nodes(cluster: Cluster, names: Collection[str]) -> list[str]:
    """Return the `names` of nodes in the root that belong to no cluster, or are the root of another one."""
    own = re.compile(f"{_NODES}|{_NODES_OF[cluster.location.driver]}", re.ASCII)
    roots = [name for name in names if not name.startswith("L")]  # A flat layout has every ledger in the root.
    found = cluster.store.get_many(f"{name}/{cluster.places.instance_id}" for name in roots)
    nested = {name for name, inner in zip(roots, found, strict=True) if inner is not None}
    return [name for name in names if name in nested or not own.fullmatch(name)]


def nuke(cluster: Cluster, *, progress: Callable[[int], None] = lambda _: None) -> int:
    """Remove the cluster's nodes, its root included; return the number of removed nodes.

    LAYOUT and instance id go last, so that a second run can finish an interrupted one. Raises as `plan_nuke`; Conflict
    when another client created a node meanwhile.
    """
    from concurrent.futures import ThreadPoolExecutor

    names = _refuse(cluster)
    # A second run recognises the cluster by its instance id.
    last = [cluster.places.layout.partition("/")[0], cluster.places.instance_id.partition("/")[0]]
    count = 0

    def delete(*paths: str) -> None:
        nonlocal count
        count += sum(executor.map(partial(delete_if_present, cluster.store), paths))
        progress(count)

    def remove(path: str, depth: int = 0) -> None:
        """Remove the node and all nodes below it."""
        below = [f"{path}/{name}" for name in (cluster.store.children(path) or () if depth < _DEPTH_MAX else ())]
        for at in range(0, len(below), _BATCH_SIZE):
            batch, leaves = below[at : at + _BATCH_SIZE], []
            for child, found in zip(batch, cluster.store.children_many(batch), strict=True):
                if found:
                    remove(child, depth + 1)
                else:
                    leaves.append(child)
            delete(*leaves)
        delete(path)

    with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="nuke") as executor:
        for name in [name for name in names if name not in last] + [name for name in last if name in names]:
            remove(name)
    with suppress(NotFound):
        cluster.store.delete_root()
    return count
