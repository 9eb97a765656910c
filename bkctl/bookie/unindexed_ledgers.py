"""Ledgers with entries in a bookie's entry logs that are not in its index: deleted ones, or the index is lost.

The metadata store is asked before an entry log with such ledgers goes. Apache's bookie does not ask.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from bkctl.bookie.collector_metadata import CollectorMetadata, shown
from bkctl.errors import BkctlError, LedgerNotFound
from bkctl.ids import I64_MAX, LedgerId
from bkctl.model import LedgerLiveness
from bkctl.storage.compaction import CompactionStopped

log: Final = logging.getLogger("bkctl.bookie")

_LOGS_STAY: Final = "Entry logs of ledgers that are not in the index stay"


class UnindexedLedgers:
    """The answers that one round of garbage collection got about ledgers that are not in the index."""

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
                len(lost), shown(lost), command,
            )  # fmt: skip
