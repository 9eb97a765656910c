"""A live cluster as a source of records, and the choice between a cluster and an export."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import tee
from pathlib import Path

from bkctl.errors import UsageError
from bkctl.ids import LedgerId
from bkctl.metadata.admin.dump.export_file import ExportFile
from bkctl.metadata.admin.dump.records import NODE_PATHS, DumpHeader, DumpRecord, DumpSource
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.underreplication import LedgerMarks, mark_path


class ClusterSource(DumpSource):
    """The present records of a cluster, or with `ledgers` only the metadata of these ledgers.

    Scoped ledgers that another cluster left (`scopes_state` "foreign") are left out.
    """

    def __init__(self, cluster: Cluster, ledgers: Sequence[LedgerId] | None = None) -> None:
        self._cluster = cluster
        self._ledgers = None if ledgers is None else sorted(set(ledgers))
        cluster.layout()
        stored = cluster.store.get(cluster.places.layout)
        self.name = cluster.uri
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.header = DumpHeader(cluster.uri, cluster.instance_id(), None if stored is None else stored.value, now)

    def records(self) -> Iterator[DumpRecord]:
        """See DumpSource.records. Raises LedgerNotFound for a missing one of `ledgers`."""
        cluster, store = self._cluster, self._cluster.store
        if self._ledgers is not None:
            for ledger in self._ledgers:
                cluster.ledgers.read(ledger)
            yield from self._of_ledgers(self._ledgers)
            return
        for path, found in zip(NODE_PATHS, store.get_many(NODE_PATHS), strict=True):
            if found is not None:
                yield DumpRecord("node", path, found.value)
        bookies = cluster.cookies.list()
        cookies = store.get_many(f"cookies/{bookie_id}" for bookie_id in bookies)
        for bookie_id, found in zip(bookies, cookies, strict=True):
            if found is not None:
                yield DumpRecord("cookie", bookie_id, found.value)
        position = cluster.ledgers.id_position()
        if position is not None:
            yield DumpRecord("sequence", "ledger", b"%d" % position)
        yield from self._marks()
        yield from self._of_ledgers(cluster.ledgers.ledgers(None))

    def ledgers_after(self, ledger: LedgerId) -> Iterator[LedgerId]:
        if self._ledgers is not None:
            return (each for each in self._ledgers if each > ledger)
        return self._cluster.ledgers.ledgers(None, ledger)

    def _marks(self) -> Iterator[DumpRecord]:
        store = self._cluster.store
        ledgers, asked = tee(ledger for ledger, _ in LedgerMarks(store).list(None))
        for ledger, found in zip(ledgers, store.get_many(map(mark_path, asked)), strict=True):
            if found is not None:
                yield DumpRecord("mark", ledger.qualified_name, found.value)

    def _of_ledgers(self, ledgers: Iterable[LedgerId]) -> Iterator[DumpRecord]:
        for ledger, found in self._cluster.ledgers.values(ledgers):
            if found is not None:
                yield DumpRecord("ledger", ledger.qualified_name, found.value, found.ctime_ms)

    def close(self) -> None:
        """Do nothing: the caller who opened the cluster closes it."""


def open_source(text: str, open_cluster: Callable[[str], Cluster]) -> tuple[DumpSource, Cluster | None]:
    """Open the source that `text` names: a store by its URI or as `context:NAME`, else an export file.

    Returns the cluster of a store too, for the caller to close.
    """
    if "://" in text or text.startswith(("context:", "metadata-store:")):
        cluster = open_cluster(text)
        try:
            return ClusterSource(cluster), cluster
        except BaseException:
            cluster.close()
            raise
    if not text:
        raise UsageError("An export file, or a metadata URI, is needed")
    return ExportFile(Path(text)), None
