"""Importing records into a cluster: create, skip equal ones, report or replace different ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile, tee
from math import inf
from typing import Final, NamedTuple

from bkctl.errors import AlreadyExists, BkctlError, Conflict, MetadataVersionConflict, NotFound
from bkctl.formats.metadata import LedgerLayout
from bkctl.ids import I64_MAX, U64_MAX, LedgerId
from bkctl.metadata.admin.dump.sources import DumpHeader, DumpRecord, DumpSource
from bkctl.metadata.cluster import COOKIES, Cluster, init_cluster, new_layout
from bkctl.metadata.ledgers import SCOPES
from bkctl.metadata.store import NEW, Versioned, attempt, map_ahead
from bkctl.pace import Pace

#: Batches that are written at once, and records in each.
CONCURRENCY: Final = 8
BATCH_SIZE: Final = 100
#: At a bounded rate a batch has the records of this time.
_BATCH_S: Final = 0.1


@dataclass
class ImportSummary:
    """Result of an import. `conflicts` name the records that exist with another value, and were left unchanged."""

    created: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)
    same: Counter[str] = field(default_factory=Counter)
    conflicts: list[str] = field(default_factory=list)
    #: The target may generate ids below this one again; None: it cannot.
    unskipped_position: int | None = None

    @property
    def count(self) -> int:
        """Number of records compared."""
        return self.created.total() + self.replaced.total() + self.same.total() + len(self.conflicts)


class TargetPlan(NamedTuple):
    """The `layout` of the cluster to import into, and whether that cluster `is_new` or `lacks_id`, which is lost."""

    is_new: bool
    layout: LedgerLayout
    lacks_id: bool = False


def prepare_target(target: Cluster, source: DumpSource, *, dry_run: bool = False) -> TargetPlan:
    """Create the cluster of `source` in `target` where there is none yet.

    Keeps the instance id, since bookies' cookies name it, and the LAYOUT where the target's URI allows; else the LAYOUT
    is the URI's. Writes a lost instance id, where all readable cookies name that of `source`. Raises Conflict, before
    a record is written, if `target` is another cluster or cannot hold a ledger.
    """
    plan = _plan(target, source.header)
    _refuse_unheld_ledgers(target, source, target.ledger_manager(plan.layout).id_max)
    if plan.is_new and not dry_run:
        init_cluster(target, instance_id=source.header.instance_id, layout=plan.layout)
        # Another command may have created a cluster meanwhile, with its own id and LAYOUT.
        return prepare_target(target, source)._replace(is_new=True)
    if plan.lacks_id and not dry_run:
        target.store.put(target.places.instance_id, source.header.instance_id.encode(), NEW)
    return plan


def _plan(target: Cluster, header: DumpHeader) -> TargetPlan:
    store, places = target.store, target.places
    has_layout = store.get(places.layout) is not None
    if has_layout or store.get(places.instance_id) is not None:
        instance_id = target.instance_id()
        lacks_id = bool(header.instance_id) and store.get(places.instance_id) is None
        if instance_id != header.instance_id and not (lacks_id and _ids_of_cookies(target) == {header.instance_id}):
            raise Conflict(
                f"{target.uri} is the cluster {instance_id or 'without an id'}, "
                f"not {header.instance_id or 'the one without an id'}",
                hint="import into a store without a cluster, or 'bkctl cluster nuke' that one first"
                if instance_id
                else "'bkctl cookie list' shows which id its bookies have",
            )
        # Without a LAYOUT the URI decides (Pulsar creates such clusters), unless an interrupted import began this one.
        if has_layout or header.layout is None or store.children(COOKIES):
            return TargetPlan(False, target.layout(), lacks_id)
    # The LAYOUT of a cluster in another kind of store means nothing on ZooKeeper.
    stored = None if header.layout is None else LedgerLayout.parse(header.layout, "The source's LAYOUT")
    return TargetPlan(True, stored if stored is not None and target.fits(stored) else new_layout(target.location))


def _ids_of_cookies(target: Cluster) -> set[str]:
    """Return the instance ids that the readable cookies name."""
    found = (attempt(target.cookies.read, bookie_id) for bookie_id in target.cookies.list())
    return {each.value.instance_id or "" for each in found if isinstance(each, Versioned)}


def _refuse_unheld_ledgers(target: Cluster, source: DumpSource, id_max: int) -> None:
    """Raise Conflict for ids of scope 0 above `id_max`, and for scoped ledgers where another cluster left some."""
    if id_max < I64_MAX:
        unheld = takewhile(lambda ledger: not ledger.is_scoped, source.ledgers_after(LedgerId(0, id_max)))
        if (first := next(unheld, None)) is not None:
            raise Conflict(
                f"{target.uri} cannot hold {1 + sum(1 for _ in unheld):,} of the ledgers, from {first} on: its layout "
                f"has ids up to {id_max}",
                hint="name a target with longer ids, such as zk+longhierarchical://",
            )
    scopes = target.store.get(SCOPES)
    if scopes is not None and scopes.value != source.header.instance_id.encode():
        first = next(source.ledgers_after(LedgerId(0, U64_MAX)), None)
        if first is not None:
            raise Conflict(
                f"{target.uri} cannot hold ledger {first}: {SCOPES} has the ledgers of another cluster",
                hint=f"remove the orphaned {SCOPES} tree first",
            )


def import_records(
    records: Iterable[DumpRecord],
    target: Cluster,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    pace: Pace | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> ImportSummary:
    """Write records into a cluster, many at once; skip records that exist with the same value.

    So a second run finishes an interrupted one. A record that exists with another value is a conflict and stays; with
    `overwrite` it is replaced. `pace` bounds the records a second. The store's errors are raised once the writes under
    way have ended; with `dry_run` nothing is changed.
    """
    from concurrent.futures import ThreadPoolExecutor

    pace = pace or Pace()
    result = ImportSummary()
    batch_size = min(BATCH_SIZE, (pace.steps_per_s or inf) * _BATCH_S)

    def count(write: _Write) -> None:
        if write.outcome == "conflict":
            result.conflicts.append(write.record.name)
        else:
            getattr(result, write.outcome)[write.record.kind] += 1
        progress(result.count)

    def batches() -> Iterator[list[_Write]]:
        batch: list[_Write] = []
        # Reads are batched, so that a second run is fast: it writes nothing.
        nodes, asked = tee(_without_sequences(records, target, dry_run, result))
        paths = (record.path(target) for record in asked)
        for record, found in zip(nodes, target.store.get_many(paths), strict=True):
            pace.take()
            write = _Write(record, found, overwrite)
            if dry_run or not write.is_needed:
                count(write)
                continue
            batch.append(write)
            if len(batch) >= batch_size:
                yield batch
                batch = []
        yield batch

    with ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="import") as executor:
        for writes in map_ahead(executor, partial(_write_all, target=target), batches(), CONCURRENCY):
            for write in writes:
                count(write)
    return result


def _without_sequences(
    records: Iterable[DumpRecord], target: Cluster, dry_run: bool, result: ImportSummary
) -> Iterator[DumpRecord]:
    """Yield the records except sequences, which advance the ids of the target instead."""
    scopes_checked = False
    for record in records:
        if record.kind == "sequence":
            position = int(record.value)
            if not dry_run and not target.ledgers.skip_ids(position):
                result.unskipped_position = position
            continue
        if record.kind == "ledger" and not scopes_checked and record.ledger.is_scoped:
            next(target.ledgers.ledgers(record.ledger.scope_id), None)  # Raises Conflict for another cluster's scopes.
            scopes_checked = True
        yield record


class _Write:
    """A record to write over the value that was `found`. `outcome` names its field of ImportSummary, or "conflict"."""

    def __init__(self, record: DumpRecord, found: Versioned[bytes] | None, overwrite: bool) -> None:
        self.record, self._overwrite = record, overwrite
        self.learn(found)

    def learn(self, found: Versioned[bytes] | None) -> None:
        """Decide the outcome over the value that is there now."""
        self.found = found
        if found is None:
            self.outcome = "created"
        elif found.value == self.record.value:
            self.outcome = "same"
        else:
            self.outcome = "replaced" if self._overwrite else "conflict"

    @property
    def is_needed(self) -> bool:
        return self.outcome in ("created", "replaced")


def _write_all(writes: list[_Write], target: Cluster) -> list[_Write]:
    """Write the records over what was found, and again after concurrent changes; return them."""
    needed = writes
    while needed:
        nodes = []
        for write in needed:
            record, found = write.record, write.found
            path = target.ledgers.prepare_restore(record.ledger) if record.kind == "ledger" else record.path(target)
            nodes.append((path, record.value, NEW if found is None else found.version))
        refused = []
        for write, node, written in zip(needed, nodes, target.store.put_many(nodes), strict=True):
            if isinstance(written, AlreadyExists | NotFound | MetadataVersionConflict):
                write.learn(target.store.get(node[0]))  # Another client changed it since the read.
                refused.append(write)
            elif isinstance(written, BkctlError):
                raise written
        needed = [write for write in refused if write.is_needed]
    return writes
