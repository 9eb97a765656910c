"""Metadata for garbage collection: of the bookie's own cluster, at a bounded rate, until the bookie stops."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final

from bkctl.bookie.collector_stats import GarbageCollectorStats
from bkctl.config import BookieConfig
from bkctl.errors import Conflict
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.liveness import Liveness
from bkctl.model import LedgerLiveness
from bkctl.storage.compaction import CompactionStopped

log: Final = logging.getLogger("bkctl.bookie")

#: Ledgers that are read, and deleted, together.
BATCH_SIZE: Final = 100


@dataclass
class CollectorMetadata:
    """The cluster as the collectors of one bookie see it, for one thread.

    `instance_id` is the one in the bookie's cookie. Every method raises BkctlError where the store fails.
    """

    config: BookieConfig
    cluster: Cluster
    _: KW_ONLY
    bookie_id: str
    instance_id: str
    stats: GarbageCollectorStats
    stopped: threading.Event

    def check_running(self) -> None:
        """Raise CompactionStopped when the bookie stops."""
        if self.stopped.is_set():
            raise CompactionStopped("The bookie stops")

    def check_cluster(self) -> None:
        """Raise Conflict when the metadata is another cluster's than the bookie's: every ledger would look dead."""
        found = self.cluster.instance_id()
        if self.instance_id and found != self.instance_id:
            raise Conflict(
                f"{self.cluster.store.name} is the cluster {found or 'without instance id'} now, this bookie belongs "
                f"to {self.instance_id}: nothing is collected",
                hint="if the cluster was formatted, remove this bookie's data with 'bkctl bookie format'",
            )

    def batches(self, ledgers: Sequence[LedgerId]) -> Iterator[Sequence[LedgerId]]:
        """Yield `ledgers` by BATCH_SIZE, no faster than gcMetadataOpRateLimit. Raises CompactionStopped."""
        for start in range(0, len(ledgers), BATCH_SIZE):
            self.check_running()
            began_s = time.monotonic()
            batch = ledgers[start : start + BATCH_SIZE]
            yield batch
            due_s = len(batch) / self.config.gc_metadata_op_rate_limit - (time.monotonic() - began_s)
            if due_s > 0:
                self.stopped.wait(due_s)

    def states(self, ledgers: Sequence[LedgerId], warning: str) -> dict[LedgerId, LedgerLiveness]:
        """Return whether ledgers exist; log `warning` for each problem that leaves some unknown."""
        liveness = Liveness(self.cluster.ledgers)
        states = liveness.states(ledgers)
        for problem in liveness.problems:
            log.warning("%s: %s", warning, problem)
        return states

    def names_bookie(self, metadata: LedgerMetadata) -> bool:
        """Return whether this bookie is in an ensemble of the ledger."""
        return any(self.bookie_id in fragment.bookies for fragment in metadata.ensembles)


def shown(ledgers: Sequence[LedgerId]) -> str:
    """Return up to ten ledgers for a log message."""
    names = ", ".join(map(str, ledgers[:10]))
    return f"{names}, …" if len(ledgers) > 10 else names
