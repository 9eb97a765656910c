"""Counters of garbage collection, and metadata for it: of the bookie's own cluster, at a bounded rate, until its stop.

Source: GarbageCollectorStats, GarbageCollectionStatus.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from bkctl.columns import some_of
from bkctl.config import BookieConfig
from bkctl.errors import BkctlError, Conflict, LedgerNotFound
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import I64_MAX, LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.liveness import Liveness
from bkctl.model import LedgerLiveness
from bkctl.storage.compaction import CompactionStopped

#: Classes of usage in which entry logs are counted. Source: ENTRY_LOG_USAGE_SEGMENT_COUNT.
USAGE_BUCKETS: Final = 10


class GarbageCollectionStatus(NamedTuple):
    """The state of one garbage collector of a bookie; DbLedgerStorage has one for each ledger directory.

    Times are milliseconds since 1970, of the last round; before the first round, of the bookie's start.
    Source: GarbageCollectionStatus.
    """

    force_compacting: bool
    major_compacting: bool
    minor_compacting: bool
    last_major_compaction_time: int
    last_minor_compaction_time: int
    last_entry_location_compaction_time: int
    major_compaction_counter: int
    minor_compaction_counter: int
    entry_location_compaction_counter: int
    #: The reason why the last round kept scoped ledgers that appear deleted; only our bookies report it.
    scoped_deletes_held_back: str | None = None


@dataclass(slots=True)
class GarbageCollectorStats:
    """Counters since the start, and gauges of the last round. The collector's thread writes, any thread reads."""

    rounds: int = 0
    failed_rounds: int = 0
    deleted_ledgers: int = 0
    deleted_scoped_ledgers: int = 0
    deleted_overreplicated_ledgers: int = 0
    major_compactions: int = 0
    minor_compactions: int = 0
    entry_location_compactions: int = 0
    reclaimed_by_deletion_bytes: int = 0
    reclaimed_by_compaction_bytes: int = 0
    failed_to_delete: int = 0
    compacted_entries: int = 0
    active_ledgers: int = 0
    active_entry_logs: int = 0
    active_entry_log_bytes: int = 0
    entry_log_bytes: int = 0
    #: Compacted logs / all logs, of the last compaction.
    compact_ratio: float = 0.0
    #: Logs by usage, in tenths.
    usage_buckets: list[int] = field(default_factory=lambda: [0] * USAGE_BUCKETS)
    #: The reason why the last round collected no scoped ledgers; "" when it did.
    scoped_held_back: str = ""
    #: The first thing that the last round could not do, and why; "" when it did all.
    problem: str = ""
    #: Ledgers that exist, name this bookie and have entries here, and are not in its index: their entry logs stay.
    #: Counted as far as the last round had to ask.
    unindexed_ledgers: int = 0

    @property
    def reclaimed_bytes(self) -> int:
        """The bytes of entry logs that were removed or compacted."""
        return self.reclaimed_by_deletion_bytes + self.reclaimed_by_compaction_bytes

    def note_problem(self, problem: str) -> None:
        """Keep the first problem of a round."""
        self.problem = self.problem or problem


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

    def batches(self, ledgers: Iterable[LedgerId]) -> Iterator[list[LedgerId]]:
        """Yield `ledgers` by BATCH_SIZE, no faster than gcMetadataOpRateLimit. Raises CompactionStopped."""
        remaining = iter(ledgers)
        while batch := list(islice(remaining, BATCH_SIZE)):
            self.check_running()
            began_s = time.monotonic()
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


_LOGS_STAY: Final = "Entry logs of ledgers that are not in the index stay"


class UnindexedLedgers:
    """The answers that one round of garbage collection got about ledgers that are not in the index.

    Most were deleted; of some the index is lost. The metadata store is asked before an entry log with such ledgers
    goes. Apache's bookie does not ask.
    """

    def __init__(self, metadata: CollectorMetadata) -> None:
        self._metadata = metadata
        #: Ledgers that this bookie needs nothing of.
        self._garbage: set[LedgerId] = set()
        #: The other ledgers, and whether they are known to be alive on this bookie.
        self._spared: dict[LedgerId, bool] = {}

    def begin_round(self) -> None:
        """Forget the answers of the last round."""
        self._garbage, self._spared = set(), {}

    def add_deleted(self, ledgers: Iterable[LedgerId]) -> None:
        """Take ledgers that this round deleted for garbage."""
        self._garbage.update(ledgers)

    def garbage_of(self, ledgers: Iterable[LedgerId]) -> set[LedgerId]:
        """Return the ledgers, none of which is in the index, whose entries this bookie will never be asked for.

        They have no metadata, or it names other bookies only; a ledger whose state is unknown is not among them. Each
        is asked for once in a round. Their entries must have been in entry logs before the call.
        """
        asked = sorted(set(ledgers) - self._garbage - self._spared.keys())
        try:
            if asked:
                self._metadata.check_running()
                self._metadata.check_cluster()
            for batch in self._metadata.batches(asked):
                self._ask(batch)
        except CompactionStopped:
            raise
        except BkctlError as error:
            log.warning("%s: %s", _LOGS_STAY, error)
        return self._garbage.intersection(ledgers)

    def _ask(self, ledgers: Sequence[LedgerId]) -> None:
        states = self._metadata.states(ledgers, _LOGS_STAY)
        for ledger, state in states.items():
            if state is LedgerLiveness.DEAD or (not ledger.is_scoped and ledger.ledger_id > I64_MAX):
                self._garbage.add(ledger)
            else:
                self._spared[ledger] = False
        alive = [ledger for ledger in ledgers if states[ledger] is LedgerLiveness.ALIVE]
        for ledger, found in self._metadata.cluster.ledgers.read_many(alive):
            if isinstance(found, LedgerNotFound):
                self._garbage.add(ledger)
            elif not isinstance(found, BkctlError):
                self._spared[ledger] = self._metadata.names_bookie(found.metadata)
                if not self._spared[ledger]:
                    self._garbage.add(ledger)

    def report(self) -> None:
        """Count and log the ledgers that lost their index, as far as this round has asked."""
        lost = sorted(ledger for ledger, is_alive in self._spared.items() if is_alive)
        self._metadata.stats.unindexed_ledgers = len(lost)
        if lost:
            is_db = self._metadata.config.ledger_storage == "db"
            command = "rebuild --ledgers --locations" if is_db else "regenerate --all"
            log.error(
                "%d ledgers exist and have entries on this bookie, and its index does not have them: %s. Their entry "
                "logs stay, and cannot be read. Was the index lost? 'bkctl bookie index %s' restores it",
                len(lost), some_of(lost, 10), command,
            )  # fmt: skip
